"""What the processes of the table tests do: insert, replace, delete, read and clean; also a program that uses Spark.

A child is forked from a server that has loaded all modules, because loading them takes longer
than the work. It tells what it does as it does it: what was told stays told when it is killed.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import lakebook
from compacting import by_arrow
from lakebook import Book, failpoints
from lakebook.errors import CommitAborted, FilesChanged, InsertFailed, LeaseLost, ObjectNotFound, VersionExpired
from lakebook.lake.attempts import Attempt, folder_of
from lakebook.lake.formats import FORMATS
from lakebook.lake.inserting import one_clear_error
from lakebook.lake.table import PinnedTable, Table
from lakebook.registry import table_files
from lakebook.registry.table_files import NewFile, PlannedFile, TableChange
from lakebook.registry.tables import TableRecord

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TABLE, SCHEMA = "numbers", "batch BIGINT, number BIGINT"
#: Rows of a batch; a batch is there as a whole, or not at all.
ROWS = 12
#: Keys of the table that readers watch while its files are replaced.
KEYS = 120

#: Where a process comes by that works on tables, without and with Spark.
POINTS = (
    "transaction.begun",
    "transaction.before_commit",
    "transaction.after_commit",
    "commit.opened",
    "insert.reserved",
    "insert.chunk_staged",
    "insert.aborted",
    "insert.arrow_written",
    "change.written",
    "change.committed",
    "appender.rotated",
    "expire.retired",
    "clean.marked",
    "clean.object_deleted",
    "clean.forgotten",
    "sweep.fenced",
    "sweep.folder_deleted",
    "sweep.leftovers_deleted",
    "lease.taken",
)
SPARK_POINTS = ("insert.staged", "insert.written", "insert.measured")
COMPACTION_POINTS = ("compact.claimed", "compact.written")
FOOTER_POINTS = ("footers.upgraded",)

_forks = get_context("forkserver")
_forks.set_forkserver_preload(
    ["lakebook.lake.tables", "lakebook.lake.cleaning", "lakebook.lake.checking", "psycopg", "pysqlite3", "pyspark.sql"]
)


_alive: list[Child] = []


def kill_all() -> None:
    """End the children that a failed test has left behind, also frozen ones."""
    for child in _alive:
        child.kill()
        child.end()


class Line:
    """A child's end of the line to its test."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def tell(self, *fact: Any) -> None:
        """Say something that stays said."""
        self._connection.send(fact)

    def stopped(self) -> bool:
        """Whether the test wants the child to end."""
        return self._connection.poll()

    def pause(self, seconds: float) -> None:
        """Do nothing for a while, unless the test wants the child to end."""
        self._connection.poll(seconds)

    def wait(self) -> None:
        """Wait for the test to say so."""
        self._connection.recv()


Program = Callable[..., None]


def _run(
    connection: Connection, points: str, program: Program, arguments: Sequence[Any], options: dict[str, Any]
) -> None:
    os.environ["LAKEBOOK_FAILPOINTS"] = points
    failpoints.arm_from_environment()
    line = Line(connection)
    try:
        program(line, *arguments, **options)
    except BaseException:  # noqa: BLE001 - handed to the test
        line.tell("failed", traceback.format_exc())
        raise SystemExit(1) from None


class Child:
    """A process that runs one of the programs below, to be listened to, stopped, frozen or killed."""

    def __init__(self, program: Program, *arguments: Any, points: str = "", **options: Any) -> None:
        self.connection, other = _forks.Pipe()
        self._process = _forks.Process(target=_run, args=(other, points, program, arguments, options), daemon=True)
        self._process.start()
        other.close()
        _alive.append(self)

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None
        return self._process.pid

    def hear(self) -> tuple[Any, ...]:
        """The next thing it tells."""
        fact: tuple[Any, ...] = self.connection.recv()
        assert fact[0] != "failed", fact[1]
        return fact

    def facts(self) -> Iterator[tuple[Any, ...]]:
        """What it tells, until it has ended."""
        while True:
            try:
                fact = self.hear()
            except (EOFError, ConnectionResetError):
                return
            yield fact

    def wait_for(self, kind: str) -> tuple[Any, ...]:
        """The next fact of a kind."""
        return next(fact for fact in self.facts() if fact[0] == kind)

    def stop(self) -> None:
        """Ask it to end."""
        self.connection.send("stop")

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def end(self) -> int:
        """Wait for its end, and say how it ended."""
        self._process.join(60)
        code = self._process.exitcode
        assert code is not None, "it does not end"
        self.connection.close()
        self._process.close()
        _alive.remove(self)
        return code

    def wait_until_frozen(self) -> None:
        """Return when it has stopped itself."""
        for _ in range(1_000_000):
            with open(f"/proc/{self.pid}/stat", encoding="ascii") as state:
                if state.read().rpartition(")")[2].split()[0] == "T":
                    return
        raise AssertionError("it does not stop")

    def freeze(self) -> None:
        """Stop it wherever it is."""
        os.kill(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """Let one that was stopped go on."""
        os.kill(self.pid, signal.SIGCONT)


# --- changes without Spark -----------------------------------------------------


def rows_of(*batches: int) -> pa.Table:
    """The rows of batches."""
    numbers = list(range(ROWS)) * len(batches)
    return pa.table({"batch": [batch for batch in batches for _ in range(ROWS)], "number": numbers})


def create_table(book: Book) -> Table:
    """The table of batches: each has files of its own."""
    return book.tables.create(TABLE, SCHEMA, partition_by=["batch"])


def write_files(book: Book, record: TableRecord, attempt: Attempt, rows: pa.Table) -> list[NewFile]:
    """Write rows into the folder of an attempt."""
    shape = book.lake.shape_of(record, record.schema_version)
    return FORMATS[record.format].write_arrow(book.lake, attempt, shape, rows)


def replace_files(book: Book, table: Table, files: Sequence[PlannedFile], parts: Sequence[pa.Table]) -> int:
    """Replace files by the same rows in other files, one for each part; the new version."""
    record = table.record
    with one_clear_error(record), Attempt(book.lake, record) as attempt:
        added = [file for part in parts for file in write_files(book, record, attempt, part)]
        return attempt.commit(TableChange("replace", added, [file.id for file in files])).version


def halves(rows: pa.Table) -> list[pa.Table]:
    """The same rows in two parts."""
    middle = rows.num_rows // 2
    return [rows.slice(0, middle), rows.slice(middle)]


def leave_behind(book: Book, table: Table) -> None:
    """Begin an insert, write a file, and never come back to it."""
    record = table.record
    attempt = Attempt(book.lake, record).__enter__()
    write_files(book, record, attempt, rows_of(-1))
    book.lake.renewals.let_go(attempt.commit_id)


# --- everything in turn, until it is killed ------------------------------------


class Worker:
    """Does everything in turn that changes or reads the table, and tells of it."""

    def __init__(self, book: Book, line: Line, seed: int) -> None:
        self._book, self._line = book, line
        self._table = book.table(TABLE)
        self._chance = random.Random(seed)
        self._numbers = itertools.count(seed * 1_000_000)
        self._batches: set[int] = set(self._table.to_arrow(columns=["batch"])["batch"].to_pylist())
        self._ended: list[PlannedFile] = []

    def _begin(self, added: Sequence[int] = (), removed: Sequence[int] = ()) -> None:
        self._change = set(added), set(removed)
        self._line.tell("begin", list(added), list(removed))

    def _done(self) -> None:
        self._line.tell("done")
        self._batches = (self._batches | self._change[0]) - self._change[1]

    def _new_batches(self, number: int) -> list[int]:
        return list(itertools.islice(self._numbers, number))

    def _some_batch(self) -> int:
        return self._chance.choice(sorted(self._batches))

    def insert(self) -> None:
        """One batch in one file."""
        (batch,) = self._new_batches(1)
        self._begin([batch])
        report = self._table.insert_arrow(rows_of(batch))
        self._done()
        # What an executor leaves that was late.
        folder = folder_of(self._table.id, report.commit_id)
        self._book.lake.store.put_new(f"{folder}/.late.parquet.crc", b"crc")

    def insert_many(self) -> None:
        """More files than one transaction takes: footers and statistics are staged."""
        batches = self._new_batches(3)
        self._begin(batches)
        self._table.insert_arrow(rows_of(*batches))
        self._done()

    def append(self) -> None:
        """An appender that makes a file of each batch, and commits two files at a time."""
        waiting: list[int] = []

        def committed(_: Any) -> None:
            self._done()
            waiting.clear()

        with self._table.appender(max_rows=ROWS, max_age=3600, files_per_commit=2, on_commit=committed) as appender:
            for batch in self._new_batches(3):
                waiting.append(batch)
                self._begin(waiting)
                appender.append(rows_of(batch))

    def replace(self) -> None:
        """The files of a batch by others; what a reader sees stays the same."""
        batch = self._some_batch()
        with self._table.pin() as pinned:
            files = list(pinned.plan(f"batch = {batch}"))
            rows = pinned.to_arrow(f"batch = {batch}")
        self._begin()
        replace_files(self._book, self._table, files, halves(rows))
        self._done()
        self._ended = files

    def replace_too_late(self) -> None:
        """A change of files that are gone: refused, and nothing of it stays."""
        try:
            replace_files(self._book, self._table, self._ended, [rows_of(-1)])
        except FilesChanged:
            return
        raise AssertionError("files were ended twice")

    def delete(self) -> None:
        """A batch, which is all there is in its files."""
        batch = self._some_batch()
        self._begin([], [batch])
        self._table.delete(f"batch = {batch}")
        self._done()

    def read(self) -> None:
        """All rows, under a lease."""
        with self._table.pin() as pinned:
            found = sorted(pinned.to_arrow(columns=["batch"])["batch"].to_pylist())
        assert found == sorted(list(self._batches) * ROWS)

    def leave_behind(self) -> None:
        """An insert that nobody goes on with."""
        leave_behind(self._book, self._table)

    def drop(self) -> None:
        """A table that lives for a moment."""
        name = f"short_lived_{next(self._numbers)}"
        self._book.tables.create(name, SCHEMA).insert_arrow(rows_of(1))
        self._book.tables.drop(name)

    def clean(self) -> None:
        """All that a janitor does."""
        self._book.cleaner.expire(seconds=0, versions=1)
        self._book.cleaner.delete_expired_temporary_files()
        self._book.cleaner.sweep()

    def go_on(self) -> None:
        """Everything, again and again."""
        while True:
            for step in (
                self.insert,
                self.append,
                self.insert_many,
                self.replace,
                self.replace_too_late,
                self.delete,
                self.read,
                self.leave_behind,
                self.drop,
                self.clean,
            ):
                step()
                self._line.tell("step", step.__name__)
            while len(self._batches) > 10:
                self.delete()


def stage_early() -> None:
    """Stage the footers and statistics of few files, as it is done for many."""
    table_files.STAGED = 2


def work_until_killed(line: Line, target: str, settings: dict[str, Any], seed: int) -> None:
    """Everything in turn."""
    stage_early()
    with lakebook.open(target, **settings) as book:
        line.tell("ready")
        Worker(book, line, seed).go_on()


# --- one thing, once -----------------------------------------------------------


def freeze_at(line: Line, point: str) -> AbstractContextManager[None]:
    """Stop at a failpoint as a process does whose machine is suspended."""

    def freeze() -> None:
        line.tell("freezing")
        os.kill(os.getpid(), signal.SIGSTOP)

    return failpoints.armed(point, freeze)


def insert_frozen(line: Line, target: str, settings: dict[str, Any], point: str, batches: Sequence[int]) -> None:
    """Insert batches, but stop at a failpoint as a process does whose machine is suspended."""
    stage_early()
    with lakebook.open(target, **settings) as book, freeze_at(line, point):
        try:
            book.table(TABLE).insert_arrow(rows_of(*batches))
        except lakebook.errors.LakebookError as error:
            line.tell("refused", type(error).__name__)
        else:
            line.tell("inserted")


GIVEN = [f"given/{number}.parquet" for number in range(3)]


def lay_files(book: Book, number: int = len(GIVEN)) -> None:
    """Put files into the warehouse, as another program does; each has a batch."""
    for batch, path in enumerate(GIVEN[:number]):
        stream = io.BytesIO()
        pq.write_table(rows_of(batch), stream)
        book.lake.store.put_new(path, stream.getvalue())


def add_given_files(line: Line, target: str, settings: dict[str, Any]) -> None:
    """Add the files that were given."""
    stage_early()
    with lakebook.open(target, **settings) as book:
        book.table(TABLE).add_files(GIVEN)
        line.tell("added")


def insert_batches(line: Line, target: str, settings: dict[str, Any], first: int, number: int) -> None:
    """Insert batches one after the other, beside others who do the same."""
    with lakebook.open(target, **settings) as book:
        for batch in range(first, first + number):
            book.table(TABLE).insert_arrow(rows_of(batch))
            line.tell("inserted", batch)


def rewrite_batch(line: Line, target: str, settings: dict[str, Any], batch: int, times: int) -> None:
    """Replace the files of one batch again and again; whoever does so with another batch is not met."""
    with lakebook.open(target, **settings) as book:
        table = book.table(TABLE)
        for _ in range(times):
            files = list(table.plan(f"batch = {batch}"))
            replace_files(book, table, files, halves(rows_of(batch)))
            line.tell("replaced")


def rewrite_once(line: Line, target: str, settings: dict[str, Any], batch: int) -> None:
    """Replace the files of a batch when told to, as others do at the same time."""
    with lakebook.open(target, **settings) as book:
        table = book.table(TABLE)
        files = list(table.plan(f"batch = {batch}"))
        line.tell("ready")
        line.wait()
        try:
            replace_files(book, table, files, halves(rows_of(batch)))
        except FilesChanged:
            line.tell("refused")
        else:
            line.tell("replaced")


def hold_lease(line: Line, target: str, settings: dict[str, Any]) -> None:
    """Pin the newest version until killed."""
    with lakebook.open(target, **settings) as book, book.table(TABLE).pin() as pinned:
        line.tell("pinned", pinned.version)
        line.wait()


def compact_once(line: Line, target: str, settings: dict[str, Any]) -> None:
    """Compact the table; Arrow writes in the place of Spark."""
    with lakebook.open(target, **settings) as book:
        line.tell("ready")
        assert by_arrow(book, book.table(TABLE)) is not None
        line.tell("compacted")


def upgrade_stored_footers(line: Line, target: str, settings: dict[str, Any]) -> None:
    """Bring all footers up to date."""
    with lakebook.open(target, **settings) as book:
        line.tell("upgraded", *book.upgrade_footers())


# --- readers, writers and a cleaner at once ------------------------------------


def keyed(keys: Sequence[int]) -> pa.Table:
    """Rows whose second column follows from the first, so that a wrong row shows."""
    return pa.table({"batch": list(keys), "number": [key * key for key in keys]})


#: What somebody is told who was frozen for longer than leases and inserts live.
TOO_LATE = (LeaseLost, CommitAborted, InsertFailed, ObjectNotFound, VersionExpired)


def replace_until_stopped(
    line: Line, target: str, settings: dict[str, Any], seed: int, *, freezes: bool = False
) -> None:
    """Put the keys of a few files into other files, again and again."""
    chance = random.Random(seed)
    with lakebook.open(target, **settings) as book:
        table = book.table(TABLE)
        while not line.stopped():
            try:
                version = _replace_some(book, table, chance)
            except FilesChanged:
                line.tell("conflict")
            except TOO_LATE:
                if not freezes:
                    raise
                line.tell("too late")
            else:
                line.tell("replaced", version)


def _replace_some(book: Book, table: Table, chance: random.Random) -> int:
    with table.pin() as pinned:
        files = list(pinned.plan())
        chosen = chance.sample(files, min(len(files), chance.randint(1, 3)))
        keys = [key for file in chosen for key in _keys_of(book, file)]
    chance.shuffle(keys)
    return replace_files(book, table, chosen, _in_parts(chance, keys, len(files)))


def _keys_of(book: Book, file: PlannedFile) -> list[int]:
    with book.lake.store.open(file.file_path) as stream:
        return list(pq.read_table(stream, columns=["batch"])["batch"].to_pylist())


def _in_parts(chance: random.Random, keys: Sequence[int], files: int) -> list[pa.Table]:
    # Few files grow in number, many shrink.
    number = min(len(keys), chance.randint(1, 2 if files > 12 else 5))
    cuts = sorted(chance.sample(range(1, len(keys)), number - 1))
    return [keyed(keys[start:end]) for start, end in itertools.pairwise([0, *cuts, len(keys)])]


def check_rows(rows: pa.Table, keys: Sequence[int]) -> None:
    """Exactly these keys, each once and with its own value."""
    found = sorted(zip(rows["batch"].to_pylist(), rows["number"].to_pylist(), strict=True))
    assert found == [(key, key * key) for key in keys], found


def read_until_stopped(line: Line, target: str, settings: dict[str, Any], seed: int, *, freezes: bool = False) -> None:
    """Read in every way there is; each version has every key once."""
    chance = random.Random(seed)
    with lakebook.open(target, **settings) as book:
        table = book.table(TABLE)
        # Before it not all keys were there.
        first = table.version
        while not line.stopped():
            try:
                older = max(first, table.version - chance.choice([0, 0, 1, 2]))
                pin = table.pin(version=older) if chance.random() < 0.3 else table.pin()
            except VersionExpired:
                line.tell("expired")
                continue
            try:
                with pin as pinned:
                    _read_and_check(pinned, chance)
            except TOO_LATE:
                if not freezes:
                    raise
                line.tell("too late")
            else:
                line.tell("read", pinned.version)


def _read_and_check(pinned: PinnedTable, chance: random.Random) -> None:
    low = chance.randrange(KEYS)
    high = chance.randint(low, KEYS)
    for _ in range(chance.randint(1, 3)):
        check_rows(pinned.to_arrow(), range(KEYS))
        check_rows(pinned.to_arrow(f"batch >= {low} AND batch < {high}"), range(low, high))
        assert pinned.plan().row_count == pinned.count() == KEYS


def clean_until_stopped(line: Line, target: str, settings: dict[str, Any], *, freezes: bool = False) -> None:
    """Keep no history, and delete at once what nobody holds."""
    with lakebook.open(target, **settings) as book:
        cleaner = book.cleaner
        while not line.stopped():
            cleaner.expire(seconds=0, versions=1, wait=freezes)
            cleaned = cleaner.delete_expired_temporary_files(wait=freezes)
            swept = cleaner.sweep()
            assert not cleaned.failed, cleaned.failed
            assert not swept.failed, swept.failed
            # Everybody renews in time: a live insert or lease is never taken for dead.
            assert freezes or swept.fenced == cleaned.dead_leases == 0
            for _ in range(swept.fenced):
                line.tell("fenced")
            if cleaned.files:
                line.tell("deleted", cleaned.files)


def verify_until_stopped(line: Line, target: str, settings: dict[str, Any]) -> None:
    """Check everything, again and again; work in progress is nothing wrong."""
    with lakebook.open(target, **settings) as book:
        while not line.stopped():
            checked = book.verify()
            assert checked.ok, checked.findings
            line.tell("verified")


# --- Spark ---------------------------------------------------------------------


def _frame(spark: SparkSession, *batches: int) -> DataFrame:
    return spark.createDataFrame(rows_of(*batches).to_pylist(), SCHEMA)


#: What is done with Spark to a table that has the batches 0 and 1 in one file.
WITH_SPARK: dict[str, Callable[[Table, Any], Any]] = {
    "insert": lambda table, spark: table.insert(_frame(spark, 2)),
    "overwrite": lambda table, spark: table.overwrite(_frame(spark, 2), where="batch = 1"),
    "delete": lambda table, spark: table.delete("batch = 1", spark=spark),
    "replace": lambda table, spark: table.replace([file.file_path for file in table.plan()], table.read(spark)),
}
#: What a driver needs that has next to nothing to do, and is not worth being compiled well.
_QUICK = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def change_with_spark(line: Line, target: str, settings: dict[str, Any], act: str, gateway: tuple[int, str]) -> None:
    """Change the table through a Spark that another process has started; a failpoint ends this one on the way."""
    with lakebook.open(target, **settings) as book:
        spark = joined(*gateway)
        line.tell("ready")
        WITH_SPARK[act](book.table(TABLE), spark)
        line.tell("done")


def joined(port: int, secret: str) -> SparkSession:
    """The session of a JVM that another process has started: to start one takes longer than all that it does."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    os.environ |= {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
    launch: Any = launch_gateway
    gateway = launch()
    jvm = gateway.jvm
    context = jvm.JavaSparkContext(jvm.org.apache.spark.SparkContext.getOrCreate())
    conf = SparkConf(_jvm=jvm, _jconf=context.getConf())
    return SparkSession(SparkContext(gateway=gateway, jsc=context, conf=conf))


def host() -> None:
    """Start a Spark for others, say how to reach it, and keep it until nobody reads or writes any more."""
    from lakebook.spark.session import spark_session

    spark = spark_session("killed", master="local[1]", **_QUICK)
    gateway: Any = spark.sparkContext._gateway
    parameters = gateway.gateway_parameters
    print(json.dumps([parameters.port, parameters.auth_token]), flush=True)  # noqa: T201 - this is what it is for
    sys.stdin.read()


def main(target: str, settings: str) -> None:
    """Insert a batch with a Spark of its own, which ends with it; a failpoint ends the process on the way."""
    from lakebook.spark.session import spark_session

    with lakebook.open(target, **json.loads(settings)) as book:
        spark = spark_session("killed", master="local[1]", **_QUICK)
        WITH_SPARK["insert"](book.table(TABLE), spark)


if __name__ == "__main__":
    main(*sys.argv[1:]) if sys.argv[1:] else host()
