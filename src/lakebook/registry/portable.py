"""A registry as a backup, and a backup as a registry, on either database.

Written from one consistent state of the registry, while others write. Read into a place that holds no book, and all
or nothing: in a file beside it that takes its name at the end, or in one transaction. What the rows of a former life
mean in a new one is decided by `begin_life`, before anybody can open it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import sqlalchemy as sa

from lakebook import failpoints
from lakebook.clock import Clock
from lakebook.config import SQLITE_SCHEME
from lakebook.errors import BackupInvalid, BookExists, RegistryNotWritable
from lakebook.registry import schema
from lakebook.registry.backup_files import (
    BOOLEAN,
    BYTES,
    FLOAT,
    INTEGER,
    JSON,
    TEXT,
    BackupReader,
    BackupWriter,
    Column,
    Header,
    Summary,
    backup_at,
    new_file,
)
from lakebook.registry.commits import FENCE
from lakebook.registry.databases import Database, Failure, SQLite
from lakebook.registry.epoch import SELECT_BOOK
from lakebook.registry.migrate import HEAD, REVISIONS, migrate, migrate_to, revision_of
from lakebook.registry.registry import Registry
from lakebook.registry.statements import POSTGRESQL, Insert, Statement
from lakebook.registry.transactions import Reader, Transaction

#: Hears how many rows are done, of how many if that is known, and of which table.
Progress: TypeAlias = Callable[[int, int | None, str], None]

# What means nothing in another life: events and who has read them, in the words of one database; who delivers them,
# and who compacts what.
_LEFT_OUT = frozenset({"events", "cursors", "deliveries", "schedulers", "compaction_claims"})
_ROWS_PER_CHUNK = 500

_TABLES = tuple(table for table in schema.metadata.sorted_tables if table.name not in _LEFT_OUT)
_COUNTED = tuple(
    str(table.name) for table in _TABLES if any(column.identity is not None for column in table.primary_key)
)
SQLITE_POSITIONS = Statement(sa.text("SELECT name, seq FROM sqlite_sequence"))


def _kind(column: sa.Column[Any]) -> str:
    for kind, name in (
        (sa.Boolean, BOOLEAN),
        (sa.Integer, INTEGER),
        (sa.Float, FLOAT),
        (sa.LargeBinary, BYTES),
        (sa.JSON, JSON),
    ):
        if isinstance(column.type, kind):
            return name
    assert isinstance(column.type, sa.Text), column
    return TEXT


_COLUMNS = {str(table.name): [Column(str(column.name), _kind(column)) for column in table.columns] for table in _TABLES}


def _selected(table: sa.Table) -> Statement:
    def clause(columns: Any) -> sa.Select[Any]:
        found = sa.select(*columns)
        # Fences of transactions: nobody of another life can ask for them.
        return found.where(table.c.kind != sa.literal_column(f"'{FENCE}'")) if table is schema.commits else found

    texts = [sa.cast(column, sa.Text) if _kind(column) == JSON else column for column in table.columns]
    return Statement(clause(table.columns), postgresql=clause(texts))


_SELECT = {str(table.name): _selected(table) for table in _TABLES}


# --- writing -------------------------------------------------------------------


def write_backup(
    registry: Registry,
    path: str | os.PathLike[str],
    warehouse: str,
    progress: Progress = lambda done, total, table: None,
    *,
    store_at: int | None = None,
) -> Summary:
    """Write the registry as it is now into a new file, while others write on.

    `store_at` is the time by the clock of the store, asked for just before.
    """
    with new_file(path) as file:
        return registry.in_snapshot_once(
            lambda reader: dump(reader, file, warehouse, registry.clock, progress, store_at)
        )


def dump(
    reader: Reader, file: Any, warehouse: str, clock: Clock, progress: Progress, store_at: int | None = None
) -> Summary:
    """Write all rows that a snapshot has, as a backup."""
    # Read by the first statement, with which the snapshot begins: whatever is newer came after this.
    taken_at = clock.now_ms()
    row = reader.one(SELECT_BOOK)
    assert row is not None
    book_id, epoch, recorded, created_at, _ = row
    positions = _positions(reader)
    header = Header(HEAD, book_id, epoch, recorded, warehouse, created_at, taken_at, reader.kind, positions, store_at)
    writer = BackupWriter(file, header)
    done = 0
    for table in _TABLES:
        name = str(table.name)
        progress(done, None, name)
        writer.table(
            name,
            _COLUMNS[name],
            reader.each(_SELECT[name]),
            lambda count: progress(done + count, None, name),  # noqa: B023 - called at once
        )
        done += writer.rows[name]
    return writer.end()


def _positions(reader: Reader) -> dict[str, int]:
    """The last id that was given in each table that counts them: also of rows that are gone."""
    if reader.kind != POSTGRESQL:
        return {name: seq for name, seq in reader.all(SQLITE_POSITIONS) if name in _COUNTED}
    found: dict[str, int] = {}
    for name in _COUNTED:
        row = reader.one(Statement(sa.text(f"SELECT pg_sequence_last_value(pg_get_serial_sequence('{name}', 'id'))")))
        if row is not None and row[0] is not None:
            found[name] = row[0]
    return found


# --- reading -------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """What is done to the rows of a backup before they are a book."""

    #: Changes them, in the transaction that makes the book, at the newest revision.
    begin_life: Callable[[Transaction, Header], None]
    #: Called when all is there but not seen yet.
    before_end: Callable[[], None] = lambda: None

    def end(self) -> None:
        """All is there, and nobody sees it yet."""
        self.before_end()
        failpoints.reach("restore.loaded")


def read_backup(
    database: Database,
    backup: BackupReader,
    arrival: Arrival,
    clock: Clock,
    progress: Progress = lambda done, total, table: None,
    *,
    locked: bool = False,
) -> Summary:
    """Make the registry that a backup has, in a database that holds no book; all of it or nothing.

    With `locked` the caller holds the migration lock.
    """
    summary = backup.check(lambda rows: progress(rows, None, "checking the backup"))
    _check_known(summary.header, database)
    try:
        if isinstance(database, SQLite) and database.path is not None:
            database.make_folder()
            with nullcontext() if locked else database.migration_lock():
                refuse_book(database)
                _read_into_file(database, backup, summary, arrival, clock, progress)
        else:
            lock = nullcontext() if locked else database.migration_lock()
            with lock, _newest(backup, summary, clock, database, progress) as newest:
                refuse_book(database)
                migrate(database)
                _read_at_once(database, newest, summary.header, arrival, clock, partial(_of_all, progress, summary))
    except database.errors as error:
        raise database.unreachable(error) from error
    except OSError as error:
        raise RegistryNotWritable(
            f"the file cannot be made ({error.strerror})", on=database.shown, remedy="Check the folder and the rights"
        ) from None
    return summary


def refuse_book(database: Database) -> None:
    """Refuse a place where there is a book already."""
    path = database.path if isinstance(database, SQLite) else None
    if (path is not None and not path.is_file()) or revision_of(database) is None:
        return
    connection = database.connect()
    try:
        if database.run_alone(connection, SELECT_BOOK.on(database.kind).sql).fetchone() is None:
            return
    finally:
        connection.close()
    raise BookExists("there is a book already", on=database.shown, remedy="Name a place where there is none")


def _check_known(header: Header, database: Database) -> None:
    if header.revision not in REVISIONS:
        raise BackupInvalid(
            f"it has schema {header.revision}, which is newer than {HEAD}, the newest this version knows",
            on=database.shown,
            remedy="Use the version of Lakebook that wrote it, or a newer one",
        )


def _of_all(progress: Progress, summary: Summary, done: int, _: int | None, table: str) -> None:
    progress(done, sum(summary.rows.values()), table)


def _read_into_file(
    database: SQLite, backup: BackupReader, summary: Summary, arrival: Arrival, clock: Clock, progress: Progress
) -> None:
    """Read it into a file beside the registry's, which takes its name when all is done."""
    assert database.path is not None
    staged = Path(f"{database.path}.restoring")
    _remove(staged)
    beside = SQLite(replace(database.settings, registry=f"{SQLITE_SCHEME}{staged}"))
    try:
        beside.create()
        migrate_to(beside, summary.header.revision)
        with _transaction(beside, clock) as transaction:
            _load(transaction, backup, partial(_of_all, progress, summary))
        migrate(beside)
        with _transaction(beside, clock) as transaction:
            arrival.begin_life(transaction, summary.header)
        _close(beside)
        arrival.end()
        # A file without a book may be there: somebody has begun to make one, and was interrupted.
        _remove(database.path)
        os.link(staged, database.path)
        _sync(database.path)
    finally:
        _remove(staged)


def _close(database: SQLite) -> None:
    """Bring everything into the one file."""
    connection = database.connect()
    try:
        connection.execute("PRAGMA optimize=0x10002")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        connection.close()


def _remove(path: Path) -> None:
    for end in ("", "-wal", "-shm", "-journal", ".lock") if path.suffix == ".restoring" else ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(f"{path}{end}")


def _sync(path: Path) -> None:
    for place in (path, path.parent):
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read_at_once(
    database: Database, backup: BackupReader, header: Header, arrival: Arrival, clock: Clock, progress: Progress
) -> None:
    """Read it in one transaction, into tables that are there and empty."""
    with _transaction(database, clock) as transaction:
        _load(transaction, backup, progress)
        arrival.begin_life(transaction, header)
        arrival.end()
    with _transaction(database, clock) as transaction:
        transaction._connection.execute("ANALYZE")


@contextmanager
def _newest(
    backup: BackupReader, summary: Summary, clock: Clock, database: Database, progress: Progress
) -> Iterator[BackupReader]:
    """The backup itself, or, of an older revision, one of the newest that was made of it on the way."""
    if summary.header.revision == HEAD:
        yield backup
        return
    with tempfile.TemporaryDirectory(prefix="lakebook-restore-") as folder:
        between = SQLite(replace(database.settings, registry=f"{SQLITE_SCHEME}{folder}/registry.db"))
        between.create()
        migrate_to(between, summary.header.revision)
        with _transaction(between, clock) as transaction:
            _load(transaction, backup, partial(_of_all, progress, summary))
        migrate(between)
        path = Path(folder) / "newest"
        with _transaction(between, clock) as transaction, path.open("wb") as file:
            dump(transaction, file, summary.header.warehouse, clock, progress)
        yield backup_at(path)


@contextmanager
def _transaction(database: Database, clock: Clock) -> Iterator[Transaction]:
    connection = database.connect()
    try:
        # Without a limit to what a statement takes, as in a migration.
        connection.execute(database.begin_migration)
        yield Transaction(connection, database, clock, "")
        connection.execute("COMMIT")
    finally:
        # Whatever was not committed goes with the connection.
        connection.close()


def _load(transaction: Transaction, backup: BackupReader, progress: Progress) -> None:
    done = 0
    with backup.opened() as (header, tables):
        for name, columns, rows in tables:
            insert = _insert(transaction, name, columns)
            chunk: list[Any] = []
            for row in rows:
                chunk.append(row)
                if len(chunk) == _ROWS_PER_CHUNK:
                    transaction.insert_many(insert, chunk)
                    failpoints.reach("restore.rows_loaded")
                    done, chunk = done + len(chunk), []
                    progress(done, None, name)
            transaction.insert_many(insert, chunk)
            done += len(chunk)
            progress(done, None, name)
        _set_positions(transaction, header.positions)


def _insert(transaction: Transaction, name: str, columns: list[Column]) -> Insert:
    known = _columns_of(transaction, name) if name in _COLUMNS else set()
    if not {column.name for column in columns} <= known:
        raise BackupInvalid(f"it has columns of {name!r} that its revision does not have", on="backup")
    # Without types: the values are in the form that the drivers take.
    return Insert(sa.table(name, *(sa.column(column.name) for column in columns)), tuple(c.name for c in columns))


def _columns_of(transaction: Transaction, name: str) -> set[str]:
    try:
        cursor = transaction._connection.execute(f"SELECT * FROM {name} LIMIT 0")  # noqa: S608 - a name of the schema
    except transaction._database.errors as error:
        if transaction._database.classify(error) is not Failure.OTHER:
            raise
        return set()  # A table of a later revision.
    return {str(item[0]) for item in cursor.description}


def _set_positions(transaction: Transaction, positions: dict[str, int]) -> None:
    for name, position in positions.items():
        if name not in _COUNTED:
            continue
        if transaction.kind == POSTGRESQL:
            sql = f"SELECT setval(pg_get_serial_sequence('{name}', 'id'), {int(position)})"
            transaction._connection.execute(sql)
        else:
            transaction._connection.execute("DELETE FROM sqlite_sequence WHERE name = ?", (name,))
            transaction._connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (name, position))
