"""What the processes of the publishing tests do: publish, commit as outside engines do, clean; and until when."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.table import Table as IcebergTable

import lakebook
from lakebook import Book, failpoints
from lakebook.errors import FilesChanged, LakebookError, SchemaChanged, SparkUnsuitable
from lakebook.lake.attempts import Attempt
from lakebook.lake.inserting import one_clear_error
from lakebook.lake.table import Table
from lakebook.registry.table_files import PlannedFile, TableChange
from table_writers import SCHEMA, TABLE, Line, Worker, halves, replace_files, rows_of, write_files

#: Where a process comes by that publishes, or that commits as an outside engine.
POINTS = (
    "publish.reserved",
    "publish.manifests_written",
    "publish.list_written",
    "publish.metadata_written",
    "publish.committed",
    "publish.discarded",
    "outside.metadata_written",
    "outside.committed",
    "outside.created",
    "debt.taken",
)
TRANSACTIONS = ("transaction.begun", "transaction.before_commit", "transaction.after_commit")

#: Who loads a version through a catalog pins it for no longer than a test lasts.
BRIEF = {"catalog_lease": 1}


def create_table(book: Book) -> Table:
    """The table of batches, each in a file of its own; outside engines try again without long waits."""
    table = book.tables.create(TABLE, SCHEMA)
    retry = {"num-retries": "10", "min-wait-ms": "1", "max-wait-ms": "50"}
    table.set_properties(**{f"commit.retry.{name}": value for name, value in retry.items()})
    return table


def loaded(catalog: Catalog) -> IcebergTable:
    """The table as outside engines have it."""
    return catalog.load_table(f"default.{TABLE}")


def as_table_is(outside: IcebergTable, rows: pa.Table) -> pa.Table:
    """Rows with the columns that the table has got meanwhile, all null."""
    wanted = outside.schema().as_arrow()
    columns = [
        rows[field.name] if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type) for field in wanted
    ]
    return pa.table(columns, schema=pa.schema([pa.field(field.name, field.type) for field in wanted]))


def overwrite_files(book: Book, table: Table, files: Iterable[PlannedFile], rows: pa.Table) -> int:
    """Replace files by other rows; the new version."""
    record = table.record
    with one_clear_error(record), Attempt(book.lake, record) as attempt:
        added = write_files(book, record, attempt, rows)
        return attempt.commit(TableChange("overwrite", added, [file.id for file in files])).version


def add_column(table: Table) -> None:
    """One more column that is null in every row."""
    with table.update_schema() as update:
        update.add_column(f"more_{table.record.schema_version}", "BIGINT")


# --- one thing, once -------------------------------------------------------------


def make_backlog(book: Book, table: Table, first: int) -> list[tuple[str, int]]:
    """Changes of every kind that nobody publishes yet; the operations and numbers of versions that each snapshot takes.

    Of the batches from `first` on, the first and the fourth are gone in the end.
    """
    table.insert_arrow(rows_of(first))
    table.insert_arrow(rows_of(first + 1))
    table.delete(f"batch = {first}")
    table.insert_arrow(rows_of(first + 2))
    add_column(table)
    table.insert_arrow(rows_of(first + 3))
    replace_files(book, table, list(table.plan(f"batch = {first + 2}")), halves(rows_of(first + 2)))
    overwrite_files(book, table, list(table.plan(f"batch = {first + 3}")), rows_of(first + 4))
    table.insert_arrow(rows_of(first + 5))
    table.insert_arrow(rows_of(first + 6))
    return [("append", 2), ("delete", 1), ("append", 1), ("append", 1), ("replace", 1), ("overwrite", 1), ("append", 2)]


#: Which batches a backlog leaves, counted from its first.
LEFT = (1, 2, 4, 5, 6)


@contextmanager
def outrun(target: str, settings: dict[str, Any]) -> Iterator[None]:
    """Whoever is about to move the pointer is outrun by another book, once."""
    waiting = [1]

    def publish_first() -> None:
        if waiting:
            waiting.pop()
            with lakebook.open(target, **settings) as rival:
                rival.table(TABLE).publish()

    with failpoints.armed("publish.metadata_written", publish_first):
        yield


def publish_once(line: Line, target: str, settings: dict[str, Any], *, outrun_once: bool = False) -> None:
    """Publish what there is."""
    with lakebook.open(target, **settings) as book:
        table = book.table(TABLE)
        line.tell("ready")
        if outrun_once:
            with outrun(target, settings):
                report = table.publish()
        else:
            report = table.publish()
        line.tell("published", report.version)


def append_once(line: Line, target: str, settings: dict[str, Any], batch: int) -> None:
    """Append as an outside engine, to a table that this book has changed since it was loaded."""
    with lakebook.open(target, **settings) as book:
        outside = loaded(book.catalog())
        line.tell("begin", [batch], [])
        outside.append(as_table_is(outside, rows_of(batch)))
        line.tell("done")


def overwrite_once(line: Line, target: str, settings: dict[str, Any], batch: int, former: int) -> None:
    """Put a batch in the place of another, as an outside engine: two snapshots in one commit."""
    with lakebook.open(target, **settings) as book:
        outside = loaded(book.catalog())
        line.tell("begin", [batch], [former])
        outside.overwrite(as_table_is(outside, rows_of(batch)), f"batch = {former}")
        line.tell("done")


def create_once(line: Line, target: str, settings: dict[str, Any], name: str) -> None:
    """Create a table together with its first rows, as an outside engine."""
    with lakebook.open(target, **settings) as book:
        rows = rows_of(1)
        with book.catalog().create_table_transaction(f"default.{name}", rows.schema) as transaction:
            transaction.append(rows)
        line.tell("created")


def settle_once(line: Line, target: str, settings: dict[str, Any]) -> None:
    """Take what is owed of files of outside engines."""
    with lakebook.open(target, **settings) as book:
        settled = book.settle_debts()
        assert settled.failed == [], settled.failed
        line.tell("settled", settled.paid)


def publish_frozen(line: Line, target: str, settings: dict[str, Any], point: str) -> None:
    """Publish, but stop at a failpoint as a process does whose machine is suspended."""
    with lakebook.open(target, **settings) as book, frozen_at(line, point):
        try:
            report = book.table(TABLE).publish()
        except LakebookError as error:
            line.tell("refused", type(error).__name__)
        else:
            line.tell("published", report.version)


def append_frozen(line: Line, target: str, settings: dict[str, Any], point: str, batch: int) -> None:
    """Append as an outside engine, but stop at a failpoint."""
    with lakebook.open(target, **settings) as book:
        outside = loaded(book.catalog())
        with frozen_at(line, point):
            try:
                outside.append(as_table_is(outside, rows_of(batch)))
            except CommitFailedException:
                line.tell("refused", "CommitFailedException")
            else:
                line.tell("appended")


@contextmanager
def frozen_at(line: Line, point: str) -> Iterator[None]:
    """Stop the process the first time it comes to a point."""
    waiting = [1]

    def freeze() -> None:
        if waiting:
            waiting.pop()
            line.tell("freezing")
            os.kill(os.getpid(), signal.SIGSTOP)

    with failpoints.armed(point, freeze):
        yield


# --- everything in turn, until it is killed --------------------------------------


class OutsideWorker(Worker):
    """Does everything in turn that publishes the table or commits to it from outside, and tells of it."""

    def __init__(self, book: Book, line: Line, seed: int, target: str, settings: dict[str, Any]) -> None:
        super().__init__(book, line, seed)
        self._again = target, settings
        self._catalog = book.catalog()

    def publish(self) -> None:
        """All there is."""
        self._table.publish()

    def publish_too_late(self) -> None:
        """Somebody else is faster: what was written goes again."""
        self.insert()
        if "publish.metadata_written" in failpoints._armed:
            return
        with outrun(*self._again):
            self._table.publish()

    def append_outside(self) -> None:
        """An append of another engine, behind one of this book's that it did not know of."""
        outside = loaded(self._catalog)
        self.insert()
        (batch,) = self._new_batches(1)
        self._begin([batch])
        outside.append(as_table_is(outside, rows_of(batch)))
        self._done()

    def append_two(self) -> None:
        """Two batches in one file."""
        batches = self._new_batches(2)
        outside = loaded(self._catalog)
        self._begin(batches)
        outside.append(as_table_is(outside, rows_of(*batches)))
        self._done()
        # The file is written anew without the one.
        outside = loaded(self._catalog)
        self._begin([], batches[:1])
        outside.delete(f"batch = {batches[0]}")
        self._done()

    def overwrite_outside(self) -> None:
        """A batch of another engine's in the place of one."""
        former = self._some_batch()
        (batch,) = self._new_batches(1)
        outside = loaded(self._catalog)
        self._begin([batch], [former])
        outside.overwrite(as_table_is(outside, rows_of(batch)), f"batch = {former}")
        self._done()

    def delete_outside(self) -> None:
        """A batch goes."""
        batch = self._some_batch()
        outside = loaded(self._catalog)
        self._begin([], [batch])
        outside.delete(f"batch = {batch}")
        self._done()

    def replace(self) -> None:
        """The files of a batch by others, when it is known which they are."""
        self.settle()
        super().replace()

    def delete(self) -> None:
        """A batch, when it is known in which files it is."""
        self.settle()
        super().delete()

    def evolve(self) -> None:
        """One more column, sometimes by this book and sometimes by another engine."""
        number = self._table.record.schema_version
        if number > 12:
            return
        if number % 2:
            add_column(self._table)
            return
        from pyiceberg.types import LongType

        with loaded(self._catalog).update_schema() as update:
            update.add_column(f"more_{number}", LongType())

    def create_outside(self) -> None:
        """A table of another engine's that lives for a moment."""
        name = f"default.brief_{next(self._numbers)}"
        self._catalog.create_table(name, rows_of(1).schema).append(rows_of(1))
        self._catalog.drop_table(name)

    def settle(self) -> None:
        """Take what is owed."""
        self._book.settle_debts()

    def go_on(self) -> None:
        """Everything, again and again."""
        while True:
            for step in (
                self.insert,
                self.append_outside,
                self.publish,
                self.append_two,
                self.publish_too_late,
                self.overwrite_outside,
                self.evolve,
                self.replace,
                self.delete_outside,
                self.create_outside,
                self.settle,
                self.clean,
            ):
                step()
                self._line.tell("step", step.__name__)
            while len(self._batches) > 10:
                self.delete()


def work_until_killed(line: Line, target: str, settings: dict[str, Any], seed: int) -> None:
    """Everything in turn."""
    with lakebook.open(target, **settings) as book:
        line.tell("ready")
        OutsideWorker(book, line, seed, target, settings).go_on()


# --- beside each other, until they are stopped -----------------------------------


class Log:
    """A file with what a process began and what it was told is done; each line is on the disk before it goes on."""

    def __init__(self, folder: str, name: str) -> None:
        self._file = (Path(folder) / f"{name}.log").open("a", encoding="ascii")
        #: There while somebody asks all others to rest who change the table.
        self.rest = Path(folder) / "rest"

    def note(self, what: str, *batches: int) -> None:
        """Write a line."""
        self._file.write(" ".join([what, *map(str, batches)]) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def add(self, act: Callable[[], object], *batches: int) -> None:
        """Note what is added, before and after."""
        self.note("adding", *batches)
        act()
        self.note("added", *batches)

    def remove(self, act: Callable[[], object], *batches: int) -> None:
        """Note what is removed, before and after."""
        self.note("removing", *batches)
        act()
        self.note("removed", *batches)


class Numbers:
    """Batches that nobody else has."""

    def __init__(self, seed: int) -> None:
        self._next = seed * 1_000_000

    def new(self, number: int = 1) -> list[int]:
        """Some of them."""
        self._next += number
        return list(range(self._next - number, self._next))


Program = Callable[[Line, Book, Log, int], Iterator[str]]


def run_logged(
    line: Line, target: str, settings: dict[str, Any], folder: str, name: str, seed: int, program: Program
) -> None:
    """Run a program step by step until it is told to stop."""
    with lakebook.open(target, **settings) as book:
        log = Log(folder, f"{name}-{seed}")
        line.tell("ready")
        steps, chance = program(line, book, log, seed), random.Random(seed)
        while not line.stopped():
            line.tell(next(steps))
            # As fast as they can they would only wait for each other's locks.
            book.lake.clock.sleep(chance.random() / 4)


#: How far the writers of this book may be ahead of what is published.
AHEAD = 10


def _in_step(log: Log, table: Table) -> Iterator[str]:
    """Let those who publish come along: they write several files for each version, and all on one disk."""
    while log.rest.exists() or table.version - (table.describe().published_version or 0) > AHEAD:
        yield "waited"


def inserting(_: Line, book: Book, log: Log, seed: int) -> Iterator[str]:
    """Insert with this book, and let go of some of it again."""
    table, numbers, chance = book.table(TABLE), Numbers(seed), random.Random(seed)
    while True:
        yield from _in_step(log, table)
        (batch,) = numbers.new()
        try:
            log.add(lambda: table.insert_arrow(rows_of(batch)), batch)  # noqa: B023 - called at once
        except SchemaChanged:
            log.note("failed", batch)
            yield "conflict"
            continue
        yield "inserted"
        if chance.random() < 0.1:
            try:
                log.remove(lambda: table.delete(f"batch = {batch}"), batch)  # noqa: B023 - called at once
            except (FilesChanged, SchemaChanged, SparkUnsuitable):
                # Files of outside engines that nobody has looked at yet may have any batch.
                log.note("kept", batch)
                yield "conflict"
            else:
                yield "removed"


def rewriting(_: Line, book: Book, log: Log, seed: int) -> Iterator[str]:
    """Put batches into other files, and other batches in their place."""
    table, numbers, chance = book.table(TABLE), Numbers(seed), random.Random(seed)
    (mine,) = numbers.new()
    log.add(lambda: table.insert_arrow(rows_of(mine)), mine)
    while True:
        yield from _in_step(log, table)
        # Files of outside engines that nobody has looked at yet may have any batch.
        files = [file for file in table.plan(f"batch = {mine}") if file.has_statistics]
        try:
            if chance.random() < 0.5:
                replace_files(book, table, files, halves(rows_of(mine)))
            else:
                (new,) = numbers.new()
                log.note("adding", new)
                log.note("removing", mine)
                overwrite_files(book, table, files, rows_of(new))
                log.note("added", new)
                log.note("removed", mine)
                mine = new
        except (FilesChanged, SchemaChanged):
            yield "conflict"
        else:
            yield "rewritten"


def _landed(act: Callable[[], object]) -> bool:
    """Whether a commit of an outside engine landed; if not, it is certain that it did not."""
    try:
        act()
    except (CommitFailedException, ValidationException):
        return False
    return True


def appending_outside(_: Line, book: Book, log: Log, seed: int) -> Iterator[str]:
    """Append as an outside engine."""
    catalog, numbers, chance = book.catalog(), Numbers(seed), random.Random(seed)
    while True:
        while log.rest.exists():
            yield "waited"
        batches = numbers.new(chance.choice([1, 2]))
        outside = loaded(catalog)
        log.note("adding", *batches)
        landed = _landed(lambda: outside.append(as_table_is(outside, rows_of(*batches))))  # noqa: B023 - called at once
        log.note("added" if landed else "failed", *batches)
        yield "appended" if landed else "conflict"


def overwriting_outside(_: Line, book: Book, log: Log, seed: int) -> Iterator[str]:
    """Append two batches in a file, delete the one, and put another in the place of the other.

    On a slow machine it would never get through to a table that others change all the time: then it asks them to rest.
    """
    done: list[str] = []
    for step in _overwriting_outside(book, log, seed):
        done.append(step)
        if not set(done) >= {"outside deleted", "outside overwritten"}:
            log.rest.touch()
        else:
            log.rest.unlink(missing_ok=True)
        yield step


def _overwriting_outside(book: Book, log: Log, seed: int) -> Iterator[str]:
    catalog, numbers = book.catalog(), Numbers(seed)
    while True:
        first, second = numbers.new(2)
        outside = loaded(catalog)
        log.note("adding", first, second)
        landed = _landed(lambda: outside.append(as_table_is(outside, rows_of(first, second))))  # noqa: B023
        log.note("added" if landed else "failed", first, second)
        if not landed:
            yield "conflict"
            continue
        log.note("removing", first)
        landed = _landed(lambda: loaded(catalog).delete(f"batch = {first}"))  # noqa: B023
        log.note("removed" if landed else "kept", first)
        yield "outside deleted" if landed else "outside conflict"
        (third,) = numbers.new()
        outside = loaded(catalog)
        log.note("adding", third)
        log.note("removing", second)
        landed = _landed(lambda: outside.overwrite(as_table_is(outside, rows_of(third)), f"batch = {second}"))  # noqa: B023
        log.note("added" if landed else "failed", third)
        log.note("removed" if landed else "kept", second)
        yield "outside overwritten" if landed else "outside conflict"


def evolving(_: Line, book: Book, log: Log, seed: int) -> Iterator[str]:
    """Add a column now and then."""
    table = book.table(TABLE)
    before = table.version
    while True:
        if log.rest.exists() or table.version < before + 20 or table.record.schema_version > 20:
            yield "waited"
            continue
        add_column(table)
        before = table.version
        yield "evolved"


def cleaning(_: Line, book: Book, log: Log, seed: int) -> Iterator[str]:
    """Keep little history, and remove what nobody needs."""
    cleaner = book.cleaner
    while True:
        expired = cleaner.expire(seconds=0, versions=5)
        assert not expired.failed, expired.failed
        cleaned = cleaner.delete_expired_temporary_files(wait=False)
        assert not cleaned.failed, cleaned.failed
        swept = cleaner.sweep()
        assert not swept.failed, swept.failed
        assert swept.fenced == 0
        yield "cleaned"


# --- many inserts against few commits of another engine --------------------------


def insert_steadily(line: Line, target: str, settings: dict[str, Any], seed: int) -> None:
    """Insert as fast as possible, and tell of each."""
    numbers = Numbers(seed)
    with lakebook.open(target, **settings) as book:
        table = book.table(TABLE)
        line.tell("ready")
        while not line.stopped():
            (batch,) = numbers.new()
            table.insert_arrow(rows_of(batch))
            line.tell("inserted", batch)


def commit_patiently(line: Line, target: str, settings: dict[str, Any], seed: int, number: int, deletes: bool) -> None:
    """Commit so many times as an outside engine; tell how often each had to be tried."""
    numbers = Numbers(seed)
    with lakebook.open(target, **settings) as book:
        catalog = book.catalog()
        commit, attempts = catalog.commit, [0]

        def counted(*arguments: Any) -> Any:
            attempts[0] += 1
            return commit(*arguments)

        catalog.commit = counted  # type: ignore[method-assign,assignment]
        line.tell("ready")
        line.wait()
        mine: list[int] = []
        for _ in range(number):
            (batch,) = numbers.new()
            attempts[0] = 0
            outside = loaded(catalog)
            outside.append(as_table_is(outside, rows_of(batch)))
            mine.append(batch)
            line.tell("appended", batch, attempts[0])
        for batch in mine if deletes else ():
            attempts[0] = 0
            for _ in range(20):
                if _landed(lambda: loaded(catalog).delete(f"batch = {batch}")):  # noqa: B023 - called at once
                    line.tell("removed", batch, attempts[0])
                    break
            else:
                line.tell("starved", batch, attempts[0])
