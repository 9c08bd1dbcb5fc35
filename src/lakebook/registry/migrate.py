"""Creating a registry and bringing an older one up to date."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import sqlalchemy as sa

from lakebook import failpoints
from lakebook.clock import SystemClock
from lakebook.errors import RegistryUnfinished, SchemaOutdated, SchemaTooNew
from lakebook.registry.databases import Database, Failure
from lakebook.registry.statements import SQLITE, Statement

VERSION_TABLE = "schema_version"

#: Every revision there has been, oldest first. A test compares it with the migrations.
REVISIONS = (
    "0001",
    "0002",
    "0003",
    "0004",
    "0005",
    "0006",
    "0007",
    "0008",
    "0009",
    "0010",
    "0011",
    "0012",
    "0013",
    "0014",
    "0015",
    "0016",
    "0017",
)
HEAD = REVISIONS[-1]
#: What the revision of a registry begins with that is being filled, and is no book yet; see `rebuilding`.
UNFINISHED = "unfinished-"

_BUSY_ATTEMPTS = 500
_BUSY_PAUSE = 0.01

HAS_VERSION = Statement(
    sa.text("SELECT count(*) FROM sqlite_master WHERE name = 'schema_version'"),
    # In the schema that new tables go to: one further along the search path may be another book's.
    postgresql=sa.text(
        "SELECT CASE WHEN to_regclass(quote_ident(current_schema()) || '.schema_version') IS NULL THEN 0 ELSE 1 END"
    ),
)
READ_VERSION = Statement(sa.text("SELECT version_num FROM schema_version"))


@dataclass(frozen=True)
class Migration:
    """What a migration did."""

    before: str | None
    after: str
    applied: tuple[str, ...]


def revision_of(database: Database) -> str | None:
    """The revision of a registry's schema; none if it has no schema yet."""
    try:
        connection = database.connect()
    except database.errors as error:
        raise database.unreachable(error) from error
    try:
        return _read_revision(database, connection)
    except database.errors as error:
        raise database.unreachable(error) from error
    finally:
        connection.close()


def _read_revision(database: Database, connection: Any) -> str | None:
    for attempt in range(_BUSY_ATTEMPTS):
        try:
            if not database.run_alone(connection, HAS_VERSION.on(database.kind).sql).fetchone()[0]:
                return None
            row = database.run_alone(connection, READ_VERSION.on(database.kind).sql).fetchone()
            return str(row[0]) if row else None
        except database.errors as error:
            # The creation of a book changes the journal's mode, which locks out readers at once.
            if database.classify(error) is not Failure.BUSY or attempt + 1 == _BUSY_ATTEMPTS:
                raise
            SystemClock().sleep(_BUSY_PAUSE)
    raise AssertionError("unreachable")


def check_revision(database: Database, revision: str) -> None:
    """Refuse a schema that this version of Lakebook does not know how to use."""
    if revision == HEAD:
        return
    if revision.startswith(UNFINISHED):
        raise RegistryUnfinished(
            "the registry was being rebuilt, and that was not finished",
            on=database.shown,
            remedy="Run `lakebook rebuild` again: it begins anew",
        )
    if revision in REVISIONS:
        raise SchemaOutdated(
            f"the registry has schema {revision}, and this version of Lakebook needs {HEAD}",
            on=database.shown,
            remedy="Run `lakebook migrate`",
        )
    raise SchemaTooNew(
        f"the registry has schema {revision}, which is newer than {HEAD}, the newest this version knows",
        on=database.shown,
        remedy="Use the version of Lakebook that wrote it, or a newer one",
    )


def migrate(database: Database, progress: Callable[[str], None] = lambda revision: None) -> Migration:
    """Bring the schema up to date; it can be resumed wherever it was stopped.

    A revision is one transaction, or copies rows in several and goes on with those that are missing.
    The caller holds `database.migration_lock()`.
    """
    before = revision_of(database)
    if before is not None and before not in REVISIONS:
        check_revision(database, before)
    applied: list[str] = []

    def on_step(revision: str) -> None:
        failpoints.reach("migration.step")
        applied.append(revision)
        progress(revision)

    if before is None and database.kind == SQLITE:
        _make(database, on_step)
    elif before != HEAD:
        _run(database, HEAD, on_step)
    return Migration(before, HEAD, tuple(applied))


def _make(database: Database, on_step: Callable[[str], None]) -> None:
    """Make the schema in an empty SQLite database: by the migrations once, and then as they have made it."""
    global _made
    with _told(database), database.engine() as engine, engine.begin() as connection:
        # Somebody's own tables may be there: they are none of what is made.
        empty = connection.exec_driver_sql("SELECT 1 FROM sqlite_schema LIMIT 1").one_or_none() is None
        known = _made if empty else None
        if known is not None:
            known.make(connection)
            for revision in REVISIONS:
                on_step(revision)
            return
    _run(database, HEAD, on_step)
    if empty:
        with _told(database), database.engine() as engine, engine.begin() as connection:
            _made = _Made.of(connection)


@dataclass(frozen=True)
class _Made:
    """What the migrations make of an empty SQLite database: its tables, indexes and triggers, and their first rows."""

    statements: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Any, ...]], ...]

    @staticmethod
    def of(connection: sa.Connection) -> _Made:
        """What is there."""
        found = connection.exec_driver_sql(
            "SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid"
        )
        parts = [tuple(part) for part in found if not part[1].startswith("sqlite_")]
        rows = [
            (f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", tuple(row))  # noqa: S608 - a name of ours
            for kind, name, _ in parts
            if kind == "table"
            for row in connection.exec_driver_sql(f"SELECT * FROM {name}")  # noqa: S608 - a name of ours
        ]
        return _Made(tuple(sql for *_, sql in parts), tuple(rows))

    def make(self, connection: sa.Connection) -> None:
        """Make it again."""
        for statement in self.statements:
            connection.exec_driver_sql(statement)
        for statement, row in self.rows:
            connection.exec_driver_sql(statement, row)


_made: _Made | None = None


def migrate_to(database: Database, revision: str) -> None:
    """Bring a registry up to some older revision, for tests of what comes after."""
    _run(database, revision, lambda _: None)


def _run(database: Database, revision: str, on_step: Callable[[str], None]) -> None:
    # Alembic takes longer to import than a book takes to open, and is needed once in a book's life.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(files("lakebook.registry") / "migrations"))
    config.set_main_option("path_separator", "os")

    def on_version_apply(*, step: Any, **_: Any) -> None:
        on_step(step.up_revision_id)

    with _told(database), database.engine() as engine, engine.connect() as connection:
        config.attributes["connection"] = connection
        config.attributes["on_version_apply"] = on_version_apply
        command.upgrade(config, revision)


@contextmanager
def _told(database: Database) -> Iterator[None]:
    """What the database refuses, in our words."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        raise database.unreachable(error.orig if isinstance(error.orig, Exception) else error) from error
    except database.errors as error:
        raise database.unreachable(error) from error
