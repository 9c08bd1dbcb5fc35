"""Publishing as Iceberg: what an insert costs with its snapshot, beside PyIceberg's own append.

Both sides get the same Arrow tables in turns, write one Parquet file (zstd) for each into the same
file system and make every one a snapshot; PyIceberg as it is by default, with its SqlCatalog in
SQLite. Ours syncs the data file and its folders, and the files of the metadata. PyIceberg syncs its
catalog only.

The large tables are rows of the registry, as those that are planned: publishing opens no data file.
"""

from __future__ import annotations

import atexit
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog

import lakebook
from bench.asked import Asked, Say
from bench.commits import ROWS, rows
from bench.measure import latency, timed
from bench.places import Ground, Place
from bench.planning import _AT_ONCE, _SCHEMA, _enter, _Layout, _megabytes
from bench.report import Result
from lakebook import Book
from lakebook.iceberg.publishing import default_location
from lakebook.lake.inserting import PUBLISH, InsertReport
from lakebook.lake.table import Table
from lakebook.registry.publishing import Pointer
from lakebook.registry.statements import SQLITE

#: Inserts of which the first and the last are compared, at most; a quarter of all where they are few.
_WINDOW = 100
_WARMING = 3
#: A burst becomes at most so many snapshots.
_MOST_SNAPSHOTS = 20
_IDLE, _FEW_IDLE = 10, 3
_MOST_LAG = 2.0
_LOOK_EVERY = 0.002
_PATIENCE = 60.0
_MODES = ("off", "async", "sync")
_TURNS, _FEW_TURNS = 300, 50
_ROUNDS, _FEW_ROUNDS = 8, 2
#: Seconds that a mode gets in a round: more than publishing waits for more inserts.
_ROUND, _SHORT_ROUND = 2.5, 1.2
_MORE, _FEW_MORE = 49, 17
_MOST_MEMORY = 500
_FLAT = 1.2


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """Snapshots one by one, then in the background, then all of a very large table at once."""
    yield from _one_by_one(ground, asked, say)
    yield from _burst(ground, asked, say)
    yield from _looked_after(ground, asked, say)
    yield from _modes(ground, asked, say)
    yield from _large(ground, asked, say)


# --- each insert a snapshot -----------------------------------------------------


@dataclass
class _Side(ABC):
    """A table whose every insert is a snapshot, and what the inserts took."""

    taken: list[float] = field(default_factory=list)
    #: Bytes of its metadata, whenever they were counted. Neither side removes any of it so soon.
    written: list[int] = field(default_factory=list)

    @abstractmethod
    def insert(self, data: pa.Table) -> None:
        """Insert, and remember how long it took."""

    @abstractmethod
    def metadata_size(self) -> int:
        """Bytes of metadata that were written so far."""

    def weigh(self) -> None:
        """Remember how much metadata there is."""
        self.written.append(self.metadata_size())

    @property
    def per_insert(self) -> float:
        """Kilobytes of metadata that an insert wrote."""
        return (self.written[-1] - self.written[0]) / len(self.taken) / 1000


@dataclass
class _Ours(_Side):
    """A table of a book that publishes at once."""

    table: Table = field(kw_only=True)
    reports: list[InsertReport] = field(default_factory=list)

    def insert(self, data: pa.Table) -> None:
        taken, report = timed(lambda: self.table.insert_arrow(data))
        self.taken.append(taken)
        self.reports.append(report)

    def metadata_size(self) -> int:
        place = f"{default_location(self.table.record.table_uuid)}/metadata"
        return sum(item.size for item in self.table._lake.store.list(place))


@dataclass
class _Theirs(_Side):
    """A table of PyIceberg."""

    table: Any = field(kw_only=True)

    def insert(self, data: pa.Table) -> None:
        self.taken.append(timed(lambda: self.table.append(data))[0])

    def metadata_size(self) -> int:
        folder = Path(self.table.location().removeprefix("file://"))
        return sum(file.stat().st_size for file in folder.glob("metadata/*"))


@dataclass
class _Sides:
    """A book and a catalog of PyIceberg, with tables of the same names."""

    book: Book
    catalog: SqlCatalog | None
    data: pa.Table

    def create(self, name: str) -> list[_Side]:
        """A new table on each side."""
        sides: list[_Side] = [_Ours(table=self.book.tables.create(name, self.data.schema))]
        if self.catalog is not None:
            sides.append(_Theirs(table=self.catalog.create_table(f"n.{name}", self.data.schema)))
        return sides

    def insert(self, sides: Sequence[_Side], number: int, say: Say) -> None:
        """Insert into each in turns."""
        for count in range(number):
            say("publishing: each insert a snapshot", count, number)
            for side in sides if count % 2 else reversed(sides):
                side.insert(self.data)


def _one_by_one(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """The last inserts into a table that has had many, in turns with the first ones into a new table."""
    number = asked.published
    window = max(1, min(_WINDOW, number // 4))
    with ground.new(number, "published") as place, ExitStack() as stack:
        catalog = None
        if ground.kind == SQLITE:
            catalog = _catalog(ground.folder / f"pyiceberg-{number}")
            stack.callback(catalog.close)
        both = _Sides(place.open(publish="sync"), catalog, rows(ROWS))
        both.insert(both.create("warming"), _WARMING, say)
        old = both.create("old")
        both.insert(old, number - window, say)
        new = both.create("new")
        for side in (*old, *new):
            side.taken.clear()
            side.weigh()
        both.insert([*old, *new], window, say)
        for side in (*old, *new):
            side.weigh()
    yield from _described(ground.kind, window, f"the first {window}", new)
    yield from _described(ground.kind, number, f"the last {window}", old)
    for owner, late, early in zip(("an insert", "PyIceberg's append"), old, new, strict=False):
        p50, p50_early = latency(late.taken).p50, latency(early.taken).p50
        title = f"growth of {owner}, each a snapshot, beside the first {window}"
        at_most = _FLAT if isinstance(late, _Ours) else None
        yield Result(title, ground.kind, number, p50, p50_early, "ms", at_most=at_most)


def _catalog(folder: Path) -> SqlCatalog:
    folder.mkdir()
    catalog = SqlCatalog("peer", uri=f"sqlite:///{folder / 'catalog.db'}", warehouse=f"file://{folder}")
    catalog.create_namespace("n")
    return catalog


def _described(kind: str, size: int, which: str, sides: Sequence[_Side]) -> Iterator[Result]:
    ours, theirs = sides[0], sides[1] if len(sides) > 1 else None
    assert isinstance(ours, _Ours)
    reports = ours.reports[-len(ours.taken) :]
    assert len({report.snapshot_id for report in reports}) == len(reports)
    title = f"an insert, each a snapshot, {which}"
    mine, peer = latency(ours.taken), latency(theirs.taken) if theirs is not None else None
    p50, p99 = (peer.p50, peer.p99) if peer is not None else (None, None)
    yield Result(f"p50 of {title}", kind, size, mine.p50, p50, "ms")
    yield Result(f"p99 of {title}", kind, size, mine.p99, p99, "ms")
    step = median(report.seconds[PUBLISH] for report in reports) * 1000
    yield Result(f"p50 of {title}, its step {PUBLISH}", kind, size, step, None, "ms")
    peers = theirs.per_insert if theirs is not None else None
    yield Result(f"metadata of {title}", kind, size, ours.per_insert, peers, "kB")


# --- in the background ----------------------------------------------------------


def _burst(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    number, kind = asked.published, ground.kind
    data = rows(ROWS)
    with ground.new(number, "burst") as place:
        table = place.open(publish="async").tables.create("t", data.schema)
        _await_published(table)
        made = _pointer(table).last_sequence
        begun = perf_counter()
        for count in range(number):
            say("publishing: a burst", count, number)
            table.insert_arrow(data)
        inserted = perf_counter() - begun
        _await_published(table)
        published = perf_counter() - begun
        made = _pointer(table).last_sequence - made
        below = _MOST_SNAPSHOTS + 1
        yield Result("snapshots of a burst of inserts", kind, number, made, None, "snapshots", below=below)
        yield Result("a burst, until it is published, beside inserted", kind, number, published, inserted, "s")
        yield from _lags(table, data, "idle", kind, asked, say)


def _looked_after(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """The same by the Iceberg updater: a writer leaves its snapshots to whoever looks after the tables."""
    data = rows(ROWS)
    with ground.new(asked.published, "kept") as place:
        book = place.open(publish="async")
        table = book.tables.create("t", data.schema)
        with book.running(spark=None) as upkeep:
            if not (upkeep.wait_active(_PATIENCE) and upkeep.wait_idle(_PATIENCE)):
                raise RuntimeError("nobody looks after the tables")
            _await_published(table)
            yield from _lags(table, data, "idle, by the updater", ground.kind, asked, say)


def _lags(table: Table, data: pa.Table, how: str, kind: str, asked: Asked, say: Say) -> Iterator[Result]:
    lags = []
    idle = _FEW_IDLE if asked.quick else _IDLE
    for count in range(idle):
        say(f"publishing: {how}", count, idle)
        table.insert_arrow(data)
        lags.append(_await_published(table))
    name = f"from an insert's return to its snapshot, {how}"
    yield Result(f"p50 {name}", kind, asked.published, median(lags), None, "s")
    yield Result(f"most {name}", kind, asked.published, max(lags), None, "s", below=_MOST_LAG)


def _pointer(table: Table) -> Pointer:
    pointer = table._lake.publisher.pointer(table.record)
    assert pointer is not None
    return pointer


def _await_published(table: Table) -> float:
    """Wait until the version of now is published; how long that was."""
    begun = perf_counter()
    version, find = table.version, partial(table._lake.publisher.pointer, table.record)
    while (pointer := find()) is None or pointer.version < version:
        time.sleep(_LOOK_EVERY)
    return perf_counter() - begun


# --- what each mode costs -------------------------------------------------------


def _modes(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    data = rows(ROWS)
    with ExitStack() as stack:
        tables = {
            mode: stack.enter_context(ground.new(number, "modes")).open(publish=mode).tables.create("t", data.schema)
            for number, mode in enumerate(_MODES)
        }
        yield from _in_turns(ground.kind, tables, data, _FEW_TURNS if asked.quick else _TURNS, say)
        yield from _in_rounds(ground.kind, tables, data, asked, say)


def _in_turns(kind: str, tables: Mapping[str, Table], data: pa.Table, number: int, say: Say) -> Iterator[Result]:
    """Insert by insert, for the p50: it does not see what the background does now and then."""
    taken: dict[str, list[float]] = {mode: [] for mode in tables}
    for count in range(_WARMING + number):
        say("publishing: off, async and sync in turns", count, number)
        for mode in _MODES if count % 2 else reversed(_MODES):
            taken[mode].append(timed(lambda: tables[mode].insert_arrow(data))[0])  # noqa: B023 - called at once
    off, later, now = (latency(taken[mode][_WARMING:]).p50 for mode in _MODES)
    name = "p50 of an insert, published"
    yield Result(f"{name} async, beside off", kind, number, later, off, "ms", at_most=1.1)
    yield Result(f"{name} sync, beside async", kind, number, now, later, "ms")


def _in_rounds(kind: str, tables: Mapping[str, Table], data: pa.Table, asked: Asked, say: Say) -> Iterator[Result]:
    """One mode after the other, for the mean: what the background does meets only the inserts of its own mode."""
    rounds, seconds = (_FEW_ROUNDS, _SHORT_ROUND) if asked.quick else (_ROUNDS, _ROUND)
    taken: dict[str, list[float]] = {mode: [] for mode in ("off", "async")}
    for count in range(rounds):
        say("publishing: off and async in rounds", count, rounds)
        for mode in taken if count % 2 else reversed(taken):
            until = perf_counter() + seconds
            while perf_counter() < until:
                taken[mode].append(timed(lambda: tables[mode].insert_arrow(data))[0])  # noqa: B023 - called at once
            if mode == "async":
                _await_published(tables[mode])
    off, later = (fmean(taken[mode]) * 1000 for mode in taken)
    name = "mean of an insert, published async, beside off"
    yield Result(name, kind, len(taken["async"]), later, off, "ms")


# --- a very large table ---------------------------------------------------------


def _large(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """Tables that were never published; then more inserts into each, in turns."""
    with ExitStack() as stack:
        tables: list[tuple[int, Callable[..., Any]]] = []
        for size in asked.published_files:
            place = stack.enter_context(ground.new(size, "publishing"))
            _fill(place, say)
            say(f"publishing: {size:,} files at once")
            yield from _first(ground.kind, size, stack.enter_context(_process(place, "off")))
            tables.append((size, stack.enter_context(_process(place, "sync"))))
        yield from _more(ground.kind, tables, _FEW_MORE if asked.quick else _MORE, say)


def _first(kind: str, size: int, call: Callable[..., Any]) -> Iterator[Result]:
    seconds, number, grown = call(_publish)
    name = "first publication of a table"
    yield Result(name, kind, size, seconds, None, "s")
    yield Result(f"{name}, each thousand files", kind, size, seconds * 1e6 / size, None, "ms")
    yield Result(f"{name}, its manifests", kind, size, number, None, "manifests")
    yield from _memory(kind, size, f"the {name}", grown)


def _memory(kind: str, size: int, name: str, grown: _Grown) -> Iterator[Result]:
    title = f"memory by which {name} grows"
    yield Result(title, kind, size, grown.resident, None, "MB", below=_MOST_MEMORY)
    if grown.own is not None:
        yield Result(f"{title}, without mapped files", kind, size, grown.own, None, "MB", below=_MOST_MEMORY)


def _more(kind: str, tables: list[tuple[int, Callable[..., Any]]], number: int, say: Say) -> Iterator[Result]:
    taken: dict[int, list[float]] = {size: [] for size, _ in tables}
    grown: dict[int, list[_Grown]] = {size: [] for size, _ in tables}
    for count in range(number):
        say("publishing: inserts into large and small tables", count, number)
        for size, call in tables if count % 2 else reversed(tables):
            seconds, memory = call(_insert)
            taken[size].append(seconds)
            grown[size].append(memory)
    for size in taken:
        yield from _memory(kind, size, "the next insert, published,", grown[size][0])
    if len(tables) > 1:
        few, many = tables[0][0], tables[-1][0]
        beside = f"beside {few:,} files"
        first, first_small = taken[many][0] * 1000, taken[few][0] * 1000
        # It is one only: twice as long may be chance.
        yield Result(f"growth of the next insert, published, {beside}", kind, many, first, first_small, "ms", at_most=2)
        large, small = latency(taken[many][1:]).p50, latency(taken[few][1:]).p50
        yield Result(f"growth of further inserts, published, {beside}", kind, many, large, small, "ms", at_most=_FLAT)


def _fill(place: Place, say: Say) -> None:
    """Enter the rows of the files, some thousands in each version; nothing publishes them meanwhile."""
    book = place.open(publish="off")
    table, layout = book.tables.create("t", _SCHEMA), _Layout(place.size)
    for start in range(0, place.size, _AT_ONCE):
        say(f"publishing: filling {place.size:,} files", start, place.size)
        numbers = range(start, min(start + _AT_ONCE, place.size))
        book._registry.write(partial(_enter, record=table.record, layout=layout, numbers=numbers))
    place.analyze()
    assert table.metadata_location is None


@contextmanager
def _process(place: Place, mode: str) -> Iterator[Callable[..., Any]]:
    """A process of its own in which the book is open; what is called there."""
    target, settings = place.target
    with ProcessPoolExecutor(1, get_context("spawn"), _begin, (target, {**settings, "publish": mode})) as pool:
        yield lambda work: pool.submit(work).result()


class _Opened:
    """What a process has open."""

    table: Table
    data: pa.Table


def _begin(target: str, settings: dict[str, Any]) -> None:
    book = lakebook.open(target, **settings)
    atexit.register(book.close)
    _Opened.table, _Opened.data = book.table("t"), _few_rows()
    if settings["publish"] == "sync":
        # What a process does only once has nothing to do with the size of a table.
        other = book.tables.create("warming", _SCHEMA)
        for _ in range(_WARMING):
            other.insert_arrow(_Opened.data)


def _few_rows() -> pa.Table:
    """Rows with the columns of a large table."""
    whole = rows(ROWS)
    return pa.table([whole[name] for name in ("id", "name", "name", "value")], names=["id", "code", "url", "value"])


def _publish() -> tuple[float, int, _Grown]:
    table = _Opened.table
    with _Watch() as watch:
        seconds, _ = timed(table.publish)
    (snapshot,) = table.snapshots()
    assert int(snapshot.summary["total-data-files"]) == table.record.file_count
    publisher = table._lake.publisher
    listed = publisher.load(_pointer(table)).snapshots[-1].manifests(publisher.io)
    return seconds, len(listed), watch.grown


def _insert() -> tuple[float, _Grown]:
    with _Watch() as watch:
        seconds, _ = timed(lambda: _Opened.table.insert_arrow(_Opened.data))
    return seconds, watch.grown


@dataclass(frozen=True)
class _Grown:
    """Megabytes by which a process grew at most."""

    resident: float
    #: Without what is mapped from files, such as the registry on SQLite; known on Linux only.
    own: float | None


class _Watch:
    """Watches how much memory this process has."""

    grown: _Grown

    def __enter__(self) -> _Watch:
        self._before, self._own_before = _megabytes("VmRSS"), _own_megabytes()
        self._most = self._own_before
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        resident = max(0.0, _megabytes("VmHWM") - self._before)
        self.grown = _Grown(resident, self._most - self._own_before if self._own_before else None)

    def _look(self) -> None:
        while True:
            self._most = max(self._most, _own_megabytes())
            if self._ended.wait(_LOOK_EVERY * 10):
                return


def _own_megabytes() -> float:
    """Memory of no file; zero where that is not known."""
    return _megabytes("RssAnon") if Path("/proc/self/status").exists() else 0.0
