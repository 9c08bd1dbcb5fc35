"""Writers beside each other: processes that commit one file after the other, beside DuckLake.

Both sides have their catalog in the same PostgreSQL, each in a database of its own, and the same number of
processes. A commit is that of bench/commits.py: the same thousand rows become one Parquet file (zstd) and a
version. Or the file is there already and is only taken into the table (`add_files`,
`ducklake_add_data_files`). Nothing of ours is published meanwhile, for DuckLake publishes nothing.

The sides take turns. What a side tries again by itself is part of its commits; what it gives up is counted,
and its writer goes on with the next one.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import duckdb
import psycopg
import pyarrow.parquet as pq

import lakebook
from bench.asked import Asked, Say
from bench.commits import ROWS, rows
from bench.measure import latency
from bench.places import Ground
from bench.report import Result
from lakebook.registry.statements import POSTGRESQL
from lakebook.registry.transactions import new_id

_WRITERS = (1, 2, 4, 8)
_FEW_WRITERS = (1, 2)
_SHARED = "shared"
_ROUNDS = 3
#: Seconds that do not count.
_WARMING = 0.5
#: Files that each writer has ready, for each second: more than it can commit.
_READY = 150
_INSERT, _ADD = "inserts", "files that are there"
_OURS, _THEIRS = "Lakebook", "DuckLake"


@dataclass(frozen=True)
class _Work:
    """What a writer is asked to do for a while."""

    side: str
    way: str
    shared: bool
    seconds: float


@dataclass(frozen=True)
class _Done:
    """What it has done: how long each of its commits took, what was tried again and what it gave up."""

    taken: Sequence[float]
    retries: int
    failures: Sequence[str]
    seconds: float


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """Each number of writers, on tables of their own and on one table."""
    if ground.kind != POSTGRESQL:
        # One writer at a time is all that SQLite has.
        return
    numbers = _FEW_WRITERS if asked.quick else _WRITERS
    with ExitStack() as stack:
        place = stack.enter_context(ground.new(max(numbers), "writers"))
        book, data = place.open(publish="off"), rows(ROWS)
        target, settings = place.target
        uri = ground.new_database("ducklake")
        folder = ground.folder / "ducklake-writers"
        with _attached(uri, folder) as lake:
            lake.execute("CALL lake.set_option('parquet_compression', 'zstd')")
            for name in (_SHARED, *(f"t{number}" for number in range(max(numbers)))):
                book.tables.create(name, data.schema)
                lake.execute(f"CREATE TABLE lake.{name} (id BIGINT, name VARCHAR, value DOUBLE, moment TIMESTAMP)")
        where = _Where(target, {**settings, "publish": "off"}, uri, str(folder))
        say("writers: starting them")
        writers = [stack.enter_context(_Writer(where, number)) for number in range(max(numbers))]
        databases = {
            side: stack.enter_context(psycopg.connect(url, autocommit=True))
            for side, url in ((_OURS, target), (_THEIRS, uri))
        }
        for way in (_INSERT, _ADD):
            for shared in (False, True):
                for number in numbers:
                    say(f"writers: {number}, {way}", number, max(numbers))
                    yield from _beside(writers[:number], way, shared, asked, databases)


def _beside(
    writers: Sequence[_Writer], way: str, shared: bool, asked: Asked, databases: dict[str, Any]
) -> Iterator[Result]:
    sides, rounds = (_OURS, _THEIRS), 1 if asked.quick else _ROUNDS
    for side in sides:
        _together(writers, _Work(side, way, shared, _WARMING))
    before = {side: _rolled_back(databases[side]) for side in sides}
    done: dict[str, list[_Done]] = {side: [] for side in sides}
    spent: dict[str, list[_Spent]] = {side: [] for side in sides}
    for count in range(rounds):
        for side in sides if count % 2 else reversed(sides):
            meter = _Meter(databases[side])
            done[side] += _together(writers, _Work(side, way, shared, asked.writing / rounds))
            spent[side].append(meter.spent())
    rolled = {side: _rolled_back(databases[side]) - before[side] for side in sides}
    found = {side: _Together(done[side], rolled[side], len(writers), spent[side]) for side in sides}
    ours, theirs = found[_OURS], found[_THEIRS]
    number = len(writers)
    where = "one table" if shared else "tables of their own"
    name = f"{way}, {number} {'writer' if number == 1 else 'writers'}, {where}"
    at_least = 1 if way == _INSERT else None
    yield Result(f"commits, {name}", POSTGRESQL, number, ours.rate, theirs.rate, "commits/s", at_least=at_least)
    yield Result(f"p50 of a commit, {name}", POSTGRESQL, number, ours.latency.p50, theirs.latency.p50, "ms")
    yield Result(f"p99 of a commit, {name}", POSTGRESQL, number, ours.latency.p99, theirs.latency.p99, "ms")
    yield Result(f"given up, {name}", POSTGRESQL, number, ours.given_up, theirs.given_up, "%")
    yield Result(f"rolled back, {name}", POSTGRESQL, number, ours.rolled_back, theirs.rolled_back, "per commit")
    yield Result(f"tried again, {name}", POSTGRESQL, number, ours.retried, None, "per commit")
    yield Result(f"server's log, {name}", POSTGRESQL, number, ours.log, theirs.log, "kB per commit")
    if ours.processor is not None:
        both = ours.processor, theirs.processor
        yield Result(f"server's processors, {name}", POSTGRESQL, number, *both, "ms per commit")


@dataclass(frozen=True)
class _Together:
    """What several writers did at the same time."""

    done: Sequence[_Done]
    #: Transactions that the database rolled back meanwhile.
    rollbacks: int
    writers: int
    spent: Sequence[_Spent]

    @property
    def number(self) -> int:
        return sum(len(each.taken) for each in self.done)

    @property
    def rate(self) -> float:
        """Commits per second: of each writer over its own time, for one may still try while others have ended."""
        rounds = len(self.done) / self.writers
        return sum(len(each.taken) / each.seconds for each in self.done) / rounds

    @property
    def latency(self) -> Any:
        return latency([taken for each in self.done for taken in each.taken] or [0.0])

    @property
    def given_up(self) -> float:
        """Percent of all that were begun."""
        failed = sum(len(each.failures) for each in self.done)
        return 100 * failed / max(1, failed + self.number)

    @property
    def rolled_back(self) -> float:
        return self.rollbacks / max(1, self.number)

    @property
    def retried(self) -> float:
        return sum(each.retries for each in self.done) / max(1, self.number)

    @property
    def log(self) -> float:
        """Kilobytes of the server's log for each commit."""
        return sum(each.log for each in self.spent) / max(1, self.number) / 1000

    @property
    def processor(self) -> float | None:
        """Milliseconds of the server's processors for each commit."""
        known = [each.processor for each in self.spent if each.processor is not None]
        return sum(known) * 1000 / max(1, self.number) if known else None


def _together(writers: Sequence[_Writer], work: _Work) -> list[_Done]:
    for writer in writers:
        writer.prepare(work)
    for writer in writers:
        writer.ready()
    for writer in writers:
        writer.start()
    return [writer.done() for writer in writers]


def _rolled_back(connection: Any) -> int:
    """Transactions of this database that ended in a rollback, as the server has counted them so far."""
    # Its processes report at most each second, and a reader keeps what it has seen within a transaction.
    connection.execute("SELECT pg_sleep(1.2)")
    row = connection.execute("SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()").fetchone()
    return int(row[0])


@dataclass(frozen=True)
class _Spent:
    """What the server spent: bytes of its log, and seconds of its processors where they are known."""

    log: int
    processor: float | None


class _Meter:
    """Looks at the server before and after a round."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        (folder,) = connection.execute("SHOW data_directory").fetchone()
        self._parent = (Path(folder) / "postmaster.pid").read_text().split("\n", 1)[0]
        self._log, self._processes = self._position(), self._seconds()

    def spent(self) -> _Spent:
        """What was spent since then."""
        now = self._seconds()
        both = now.keys() & self._processes.keys()
        seconds = sum(now[process] - self._processes[process] for process in both) if both else None
        return _Spent(self._position() - self._log, seconds)

    def _position(self) -> int:
        (found,) = self._connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
        return int(found)

    def _seconds(self) -> dict[str, float]:
        """Processor time of each of the server's processes, as Linux tells it."""
        found: dict[str, float] = {}
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                # After the name, which may have anything in it: state, parent, …, user and system time.
                values = file.read_text().rpartition(")")[2].split()
                if values[1] == self._parent:
                    found[file.parent.name] = (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
        return found


# --- a writer ------------------------------------------------------------------


@dataclass(frozen=True)
class _Where:
    """What a writer opens."""

    target: str
    settings: dict[str, Any]
    uri: str
    folder: str


class _Writer:
    """A process with both sides open."""

    def __init__(self, where: _Where, number: int) -> None:
        spawn = get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, where, number))

    def __enter__(self) -> _Writer:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.send(None)
        self._process.join(30)
        if self._process.is_alive():
            self._process.terminate()

    def prepare(self, work: _Work) -> None:
        """Tell it what to do; it gets its files ready."""
        self._ours.send(work)

    def ready(self) -> None:
        """Wait until it is ready."""
        self._received()

    def start(self) -> None:
        """Let it begin."""
        self._ours.send("go")

    def done(self) -> _Done:
        """Wait for what it has done."""
        found: _Done = self._received()
        return found

    def _received(self) -> Any:
        found = self._ours.recv()
        if isinstance(found, BaseException):
            raise found
        return found


def _serve(pipe: Connection, where: _Where, number: int) -> None:
    try:
        sides = _Sides(where, number)
        while (work := pipe.recv()) is not None:
            commit = sides.prepared(work)
            pipe.send("ready")
            pipe.recv()
            pipe.send(_repeated(commit, work.seconds, sides.retries))
    except BaseException as error:
        pipe.send(RuntimeError(f"writer {number}: {error!r}"))
        raise


def _repeated(commit: Callable[[], object], seconds: float, retries: Callable[[], int]) -> _Done:
    taken: list[float] = []
    failures: list[str] = []
    before = retries()
    begun = now = perf_counter()
    while now < begun + seconds:
        try:
            commit()
        except (duckdb.Error, lakebook.LakebookError) as error:
            failures.append(str(error)[:200])
            now = perf_counter()
        else:
            last, now = now, perf_counter()
            taken.append(now - last)
    return _Done(taken, retries() - before, failures, now - begun)


class _Sides:
    """Both sides as one writer has them."""

    def __init__(self, where: _Where, number: int) -> None:
        self._own = f"t{number}"
        self._data = rows(ROWS)
        self._book = lakebook.open(where.target, **where.settings)
        atexit.register(self._book.close)
        self._folder = Path(where.folder)
        self._lake = _attached(where.uri, self._folder)
        self._lake.register("data", self._data)
        self._warehouse = Path(where.settings["warehouse"])

    def retries(self) -> int:
        """Transactions of ours that were tried again."""
        values = self._book._registry.metrics.values()
        return int(
            sum(value for name, value in values.items() if name.startswith("lakebook_transaction_retries_total"))
        )

    def prepared(self, work: _Work) -> Callable[[], object]:
        """What it repeats."""
        name = _SHARED if work.shared else self._own
        if work.side == _OURS:
            table = self._book.table(name)
            if work.way == _INSERT:
                return lambda: table.insert_arrow(self._data)
            ready = self._files(self._warehouse / "incoming", work.seconds)
            return lambda: table.add_files([str(next(ready).relative_to(self._warehouse))])
        if work.way == _INSERT:
            return lambda: self._lake.execute(f"INSERT INTO lake.{name} SELECT * FROM data")
        ready = self._files(self._folder / "incoming", work.seconds)
        return lambda: self._lake.execute(f"CALL ducklake_add_data_files('lake', '{name}', '{next(ready)}')")

    def _files(self, folder: Path, seconds: float) -> Iterator[Path]:
        folder = folder / new_id()
        folder.mkdir(parents=True)
        first = folder / "first.parquet"
        pq.write_table(self._data, first, compression="zstd")
        paths = [folder / f"{count}.parquet" for count in range(int(_READY * seconds))]
        for path in paths:
            shutil.copyfile(first, path)
        return iter(paths)


def _attached(uri: str, folder: Path) -> duckdb.DuckDBPyConnection:
    """DuckDB with a DuckLake whose catalog is a database of PostgreSQL."""
    connection = duckdb.connect()
    extensions: Any = importlib.import_module("duckdb_extensions")
    for name in ("ducklake", "postgres_scanner"):
        extensions.import_extension(name)
        connection.execute(f"LOAD {name}")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    words = " ".join(f"{key}={value}" for key, value in psycopg.conninfo.conninfo_to_dict(uri).items())
    connection.execute(
        f"ATTACH 'ducklake:postgres:{words}' AS lake (DATA_PATH '{folder / 'data'}', DATA_INLINING_ROW_LIMIT 0)"
    )
    return connection
