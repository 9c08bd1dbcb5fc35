"""Publishing as Iceberg: what an insert costs with its snapshot, beside PyIceberg's own append.

Both sides get the same Arrow tables in turns, write one Parquet file (zstd) for each into the same
file system and make every one a snapshot; PyIceberg as it is by default, with its SqlCatalog in
SQLite. Ours syncs the data file and its folders, and the files of the metadata. PyIceberg syncs its
catalog only.

The large tables are rows of the registry, as those that are planned: publishing opens no data file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
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
#: Inserts of each mode in a round: together they take longer than publishing waits for more.
_ROUNDS, _PER_ROUND = 5, 120
_FEW_ROUNDS, _FEW_PER_ROUND = 2, 60
_MODES = ("off", "async", "sync")
_MORE, _FEW_MORE = 25, 10
_MOST_MEMORY = 500
_FLAT = 1.2


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """Snapshots one by one, then in the background, then all of a very large table at once."""
    yield from _one_by_one(ground, asked, say)
    yield from _burst(ground, asked, say)
    yield from _modes(ground, asked, say)
    yield from _large(ground, asked, say)


# --- each insert a snapshot -----------------------------------------------------


@dataclass
class _Ours:
    """A table whose every insert is published before it returns."""

    table: Table
    taken: list[float] = field(default_factory=list)
    reports: list[InsertReport] = field(default_factory=list)
    #: Bytes of metadata that had been written after so many inserts.
    written: dict[int, int] = field(default_factory=dict)

    def insert(self, data: pa.Table) -> None:
        """One insert."""
        taken, report = timed(lambda: self.table.insert_arrow(data))
        self.taken.append(taken)
        self.reports.append(report)

    def weigh(self) -> None:
        """Remember how much metadata there is. None of it is removed before its grace is over."""
        record, store = self.table.record, self.table._lake.store
        place = f"{default_location(record.table_uuid)}/metadata"
        self.written[len(self.taken)] = sum(item.size for item in store.list(place))


@dataclass
class _Theirs:
    """A table of PyIceberg."""

    table: Any
    folder: Path
    taken: list[float] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)

    def insert(self, data: pa.Table) -> None:
        """One append."""
        self.taken.append(timed(lambda: self.table.append(data))[0])

    def weigh(self) -> None:
        """Remember how much metadata there is."""
        self.written[len(self.taken)] = sum(file.stat().st_size for file in self.folder.glob("metadata/*"))


def _pyiceberg(folder: Path, columns: pa.Schema) -> _Theirs:
    folder.mkdir()
    catalog = SqlCatalog("peer", uri=f"sqlite:///{folder / 'catalog.db'}", warehouse=f"file://{folder}")
    catalog.create_namespace("n")
    table = catalog.create_table("n.t", columns)
    return _Theirs(table, Path(table.location().removeprefix("file://")))


def _one_by_one(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    number = asked.published
    data = rows(ROWS)
    with ground.new(number, "published") as place:
        ours = _Ours(place.open(publish="sync").tables.create("t", data.schema))
        theirs = _pyiceberg(ground.folder / f"pyiceberg-{number}", data.schema) if ground.kind == SQLITE else None
        _warm_up(place, ground, data)
        sides = [ours, theirs] if theirs is not None else [ours]
        window = _window(number)
        for count in range(number + 1):
            say("publishing: each insert a snapshot", count, number)
            if count in (0, window, number - window, number):
                for side in sides:
                    side.weigh()
            if count < number:
                for side in sides if count % 2 else reversed(sides):
                    side.insert(data)
        assert len(ours.reports) == len({report.snapshot_id for report in ours.reports})
    yield from _grown(ground.kind, number, ours, theirs)
    yield from _bytes(ground.kind, number, ours, theirs)


def _window(number: int) -> int:
    return max(1, min(_WINDOW, number // 4))


def _warm_up(place: Place, ground: Ground, data: pa.Table) -> None:
    """In other tables: the first snapshots of these are to be measured."""
    book = place.open(publish="sync")
    sides: list[Any] = [_Ours(book.tables.create("other", data.schema))]
    if ground.kind == SQLITE:
        sides.append(_pyiceberg(ground.folder / "pyiceberg-warming", data.schema))
    for side in sides:
        for _ in range(_WARMING):
            side.insert(data)


def _grown(kind: str, number: int, ours: _Ours, theirs: _Theirs | None) -> Iterator[Result]:
    window, name = _window(number), "insert, each a snapshot"
    spans = {"first": slice(0, window), "last": slice(number - window, number)}
    for which, span in spans.items():
        mine, peer = latency(ours.taken[span]), latency(theirs.taken[span]) if theirs is not None else None
        p50, p99 = (peer.p50, peer.p99) if peer is not None else (None, None)
        title = f"{name}, the {which} {window}"
        yield Result(f"p50 of {title}", kind, number, mine.p50, p50, "ms")
        yield Result(f"p99 of {title}", kind, number, mine.p99, p99, "ms")
        step = median(report.seconds[PUBLISH] for report in ours.reports[span]) * 1000
        yield Result(f"p50 of {title}, its step {PUBLISH}", kind, number, step, None, "ms")
    yield _last_beside_first(f"growth of an {name}", kind, number, ours.taken, "ms", _FLAT)
    if theirs is not None:
        yield _last_beside_first("growth of PyIceberg's append", kind, number, theirs.taken, "ms")


def _last_beside_first(
    name: str, kind: str, number: int, taken: Sequence[float], unit: str, at_most: float | None = None
) -> Result:
    window = _window(number)
    last, first = latency(taken[-window:]).p50, latency(taken[:window]).p50
    title = f"{name}, the last {window} beside the first"
    return Result(title, kind, number, last, first, unit, at_most=at_most)


def _bytes(kind: str, number: int, ours: _Ours, theirs: _Theirs | None) -> Iterator[Result]:
    window = _window(number)
    for which, begin, end in (("first", 0, window), ("last", number - window, number)):
        mine, peer = (
            None if side is None else (side.written[end] - side.written[begin]) / window / 1000
            for side in (ours, theirs)
        )
        yield Result(f"metadata per insert, the {which} {window}", kind, number, mine, peer, "kB")


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
        lags = []
        idle = _FEW_IDLE if asked.quick else _IDLE
        for count in range(idle):
            say("publishing: idle", count, idle)
            table.insert_arrow(data)
            lags.append(_await_published(table))
        name = "seconds from an insert's return to its snapshot, idle"
        yield Result(f"p50 of {name}", kind, number, median(lags), None, "s")
        yield Result(f"most of {name}", kind, number, max(lags), None, "s", below=_MOST_LAG)


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
    """Rounds of one mode after the other: what the background does meets only the inserts of its own mode."""
    rounds, each = (_FEW_ROUNDS, _FEW_PER_ROUND) if asked.quick else (_ROUNDS, _PER_ROUND)
    data = rows(ROWS)
    taken: dict[str, list[float]] = {mode: [] for mode in _MODES}
    with ExitStack() as stack:
        tables = {
            mode: stack.enter_context(ground.new(number, "modes")).open(publish=mode).tables.create("t", data.schema)
            for number, mode in enumerate(_MODES)
        }
        for number in range(rounds + 1):
            say("publishing: off, async and sync", number, rounds + 1)
            for mode in _MODES if number % 2 else reversed(_MODES):
                table = tables[mode]
                spent = [timed(lambda: table.insert_arrow(data))[0] for _ in range(each if number else _WARMING)]  # noqa: B023
                if number:
                    taken[mode] += spent
                if mode == "async":
                    _await_published(table)
    # The p50 does not see what is done now and then: the mean does.
    for shown, of in (("p50", median), ("mean", fmean)):
        off, later, now = (of(taken[mode]) * 1000 for mode in _MODES)
        name = f"{shown} of an insert, published"
        at_most = 1.1 if shown == "p50" else None
        size = rounds * each
        yield Result(f"{name} async, beside off", ground.kind, size, later, off, "ms", at_most=at_most)
        yield Result(f"{name} sync, beside async", ground.kind, size, now, later, "ms")


# --- a very large table ---------------------------------------------------------


def _large(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """A table that was never published; then one more insert, beside the same on a small table."""
    found: list[tuple[int, list[float]]] = []
    more = _FEW_MORE if asked.quick else _MORE
    for size in asked.published_files:
        with ground.new(size, "publishing") as place:
            _fill(place, say)
            say(f"publishing: {size:,} files at once")
            target, settings = place.target
            seconds, grown, manifests = _apart(_published_first, target, settings)
            title = f"publishing of a table that never was, of {size:,} files"
            kind = ground.kind
            yield Result(title, kind, size, seconds, None, "s")
            yield Result(f"{title}, each thousand", kind, size, seconds * 1e6 / size, None, "ms")
            yield Result(f"memory by which {title} grows", kind, size, grown, None, "MB", below=_MOST_MEMORY)
            yield Result(f"{title}, its manifests", kind, size, manifests, None, "manifests")
            say(f"publishing: inserts into {size:,} files")
            taken, grown = _apart(_published_more, target, settings, more)
            found.append((size, taken))
            title = f"insert, published, into a table of {size:,} files"
            yield Result(f"{title}, the first of a process", kind, size, taken[0] * 1000, None, "ms")
            yield Result(f"memory by which an {title} grows", kind, size, grown, None, "MB", below=_MOST_MEMORY)
    if len(found) > 1:
        (few, small), (many, large) = found[0], found[-1]
        beside = f"beside {few:,} files"
        both = median(large[1:]) * 1000, median(small[1:]) * 1000
        yield Result(f"growth of an insert, published, {beside}", ground.kind, many, *both, "ms", at_most=_FLAT)
        both = large[0] * 1000, small[0] * 1000
        yield Result(f"growth of the first of a process, {beside}", ground.kind, many, *both, "ms")


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


def _apart(work: Any, *given: Any) -> Any:
    """Do it in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def _published_first(target: str, settings: dict[str, Any]) -> tuple[float, float, int]:
    with lakebook.open(target, publish="off", **settings) as book:
        table = book.table("t")
        before = _megabytes("VmRSS")
        seconds, _ = timed(table.publish)
        grown = _megabytes("VmHWM") - before
        (snapshot,) = table.snapshots()
        listed = table._lake.publisher.load(_pointer(table)).snapshots[-1].manifests(table._lake.publisher.io)
        assert int(snapshot.summary["total-data-files"]) == table.record.file_count
        return seconds, grown, len(listed)


def _published_more(target: str, settings: dict[str, Any], number: int) -> tuple[list[float], float]:
    with lakebook.open(target, publish="sync", **settings) as book:
        table = book.table("t")
        data = _few_rows()
        before = _megabytes("VmRSS")
        taken = [timed(lambda: table.insert_arrow(data))[0] for _ in range(number)]
        return taken, _megabytes("VmHWM") - before


def _few_rows() -> pa.Table:
    """Rows with the columns of a large table."""
    whole = rows(ROWS)
    columns = [whole["id"], whole["name"], whole["name"], whole["value"]]
    return pa.table(columns, names=["id", "code", "url", "value"])
