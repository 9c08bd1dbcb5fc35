"""The databases' own upkeep: the size of the WAL, free pages, dead rows, statistics for the planner.

It is bounded and may be repeated at any time. What the database refuses is a note, not a failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from lakebook.clock import Enough, never, to_datetime
from lakebook.registry import schema
from lakebook.registry.databases import Database, Failure, PostgreSQL, SQLite
from lakebook.registry.registry import Registry
from lakebook.registry.statements import Statement

# SQLite keeps it at four megabytes by itself, unless a reader stood in the way for long.
LARGE_WAL = 64 * 1024**2
# Free pages that are kept for what comes next: so many, or this part of all.
FREE_PAGES = 1024
_FREE_PART = 20
# Pages that one step gives back at first. A step that takes longer than this is followed by a smaller one.
_STEP_PAGES = 256
_STEP_SECONDS = 0.05

# Rows from which on a table has statistics, and rows that are looked at for them.
LARGE_TABLE = 10_000
_ANALYSED_ROWS = 1000
# What PRAGMA optimize would do now, for every table, without doing it.
_ADVISE = "0x10003"

# As autovacuum's own thresholds, and a little more: it has precedence.
_MODIFIED_ROWS, _MODIFIED_PART = 1000, 10
DEAD_ROWS = 10_000
_DEAD_PART = 5

# Times in milliseconds, as everywhere; none: never.
TABLE_STATISTICS = Statement(
    sa.text(
        "SELECT relname, n_live_tup, n_dead_tup, n_mod_since_analyze,"
        " CAST(extract(epoch FROM greatest(last_vacuum, last_autovacuum)) * 1000 AS bigint)"
        " FROM pg_stat_user_tables WHERE schemaname = current_schema() ORDER BY relname"
    )
)
AUTOVACUUM = Statement(sa.text("SELECT current_setting('autovacuum')"))


@dataclass
class DatabaseUpkeep:
    """What was done for the database, how it stands, and what somebody else should do."""

    #: What was done, by name, and how much of it.
    done: dict[str, Any] = field(default_factory=dict)
    #: Sizes and counts.
    facts: dict[str, int] = field(default_factory=dict)
    #: What to do by hand, and why.
    hints: list[str] = field(default_factory=list)
    #: What the database refused.
    notes: list[str] = field(default_factory=list)


def keep_database(registry: Registry, enough: Enough = never) -> DatabaseUpkeep:
    """Do the upkeep of the database that the registry is in, for as long as it is not enough."""
    database = registry.database
    report = DatabaseUpkeep()
    if isinstance(database, SQLite):
        with _connection(database) as connection:
            _SQLiteUpkeep(registry, database, connection, report).run(enough)
    elif isinstance(database, PostgreSQL):
        _look_at_tables(registry, report, enough)
    return report


@contextmanager
def _connection(database: Database) -> Iterator[Any]:
    """A connection apart from the registry's own: its settings are changed."""
    try:
        connection = database.connect()
    except database.errors as error:
        raise database.unreachable(error) from error
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def _noted(database: Database, report: DatabaseUpkeep, what: str) -> Iterator[None]:
    """Note what the database refuses; only a connection that is lost, or a damaged file, is a failure."""
    try:
        yield
    except database.errors as error:
        if database.classify(error) in (Failure.LOST, Failure.CORRUPT):
            raise database.unreachable(error) from error
        report.notes.append(f"{what}: {str(error).strip().splitlines()[0] if str(error).strip() else 'refused'}")


# --- SQLite --------------------------------------------------------------------


class _SQLiteUpkeep:
    """One round on a file of SQLite's."""

    def __init__(self, registry: Registry, database: SQLite, connection: Any, report: DatabaseUpkeep) -> None:
        self._clock = registry.clock
        self._database = database
        self._connection = connection
        self._report = report

    def run(self, enough: Enough) -> None:
        # It never waits for others, and so never stands in their way with what it has locked already.
        self._connection.execute("PRAGMA busy_timeout = 0").fetchall()
        with _noted(self._database, self._report, "optimize"):
            self._optimize()
        with _noted(self._database, self._report, "incremental_vacuum"):
            self._give_back_pages(enough)
        with _noted(self._database, self._report, "wal_checkpoint"):
            self._checkpoint()
        with _noted(self._database, self._report, "sizes"):
            self._report.facts |= {
                "pages": self._number("page_count"),
                "free_pages": self._number("freelist_count"),
                "page_bytes": self._number("page_size"),
                "wal_bytes": self._wal_bytes(),
            }

    def _optimize(self) -> None:
        """Follow `PRAGMA optimize` where tables are large, and let go of the statistics of small ones.

        Every look-up is laid out to walk an index, and does. With statistics of a table of few rows SQLite prefers
        to read it whole, and then sorts what it walked in order before: at 100,000 segments a look-up by time took
        400 times as long, because there were two topics.
        """
        # Only asked what it would do: it begins with every table that has no statistics.
        advised = [row[0] for row in self._connection.execute(f"PRAGMA optimize({_ADVISE})").fetchall()]
        large = [name for name in schema.metadata.tables if any(f'"{name}"' in advice for advice in advised)]
        large = [name for name in large if self._is_large(name)]
        if not large and not self._small_statistics():
            return
        self._connection.execute(f"PRAGMA analysis_limit = {_ANALYSED_ROWS}").fetchall()
        # In one transaction: nobody sees statistics of a small table that go again at once.
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for name in large:
                self._connection.execute(f'ANALYZE "{name}"')
            for name in self._small_statistics():
                self._connection.execute("DELETE FROM sqlite_stat1 WHERE tbl = ?", (name,))
            self._connection.execute("COMMIT")
        except self._database.errors:
            self._connection.execute("ROLLBACK")
            raise
        if large:
            self._report.done["analysed"] = large

    def _is_large(self, name: str) -> bool:
        beyond = f'SELECT 1 FROM "{name}" LIMIT 1 OFFSET {LARGE_TABLE - 1}'  # noqa: S608 - names of our own schema
        return self._connection.execute(beyond).fetchone() is not None

    def _small_statistics(self) -> list[str]:
        """Tables that have statistics and should not: somebody has run ANALYZE."""
        known = "SELECT count(*) FROM sqlite_master WHERE name = 'sqlite_stat1'"
        if self._connection.execute(known).fetchone()[0] == 0:
            return []
        found = [row[0] for row in self._connection.execute("SELECT DISTINCT tbl FROM sqlite_stat1").fetchall()]
        return [name for name in found if name in schema.metadata.tables and not self._is_large(name)]

    def _number(self, pragma: str) -> int:
        row = self._connection.execute(f"PRAGMA {pragma}").fetchone()
        return int(row[0]) if row is not None else 0

    def _wal_bytes(self) -> int:
        if self._database.path is None:
            return 0
        try:
            return Path(f"{self._database.path}-wal").stat().st_size
        except OSError:
            return 0

    def _give_back_pages(self, enough: Enough) -> None:
        """Give free pages back to the file system, a few at a time: each step is a write transaction."""
        pages = _STEP_PAGES
        while (surplus := self._surplus()) > 0:
            if self._number("auto_vacuum") == 0:
                self._report.hints.append(f"{surplus} pages are free; give them back with VACUUM, which locks it")
                return
            if enough():
                return
            free, begun = self._number("freelist_count"), self._clock.monotonic()
            # To its end: else only the first page is given back.
            self._connection.execute(f"PRAGMA incremental_vacuum({min(pages, surplus)})").fetchall()
            # Writers that wait get their turn between two steps.
            self._clock.sleep(min(_STEP_SECONDS, self._clock.monotonic() - begun))
            given = free - self._number("freelist_count")
            if given <= 0:
                return
            self._report.done["pages"] = self._report.done.get("pages", 0) + given
            if self._clock.monotonic() - begun > _STEP_SECONDS:
                pages = max(1, pages // 2)

    def _surplus(self) -> int:
        """Free pages beyond those that are kept."""
        return self._number("freelist_count") - max(FREE_PAGES, self._number("page_count") // _FREE_PART)

    def _checkpoint(self) -> None:
        """Move what readers do not need out of the WAL; cut it to nothing only if it is large and nobody is at work."""
        busy, _, _ = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if busy or self._wal_bytes() < LARGE_WAL:
            return
        busy, _, _ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            self._report.notes.append("wal_checkpoint: the WAL is large, and somebody is reading it")
        else:
            self._report.done["wal_truncated"] = True


# --- PostgreSQL ----------------------------------------------------------------


def _look_at_tables(registry: Registry, report: DatabaseUpkeep, enough: Enough) -> None:
    """Analyse tables whose statistics are stale; tell of those that autovacuum has left too long."""
    ours = set(schema.metadata.tables)
    rows, autovacuum = registry.read_with(lambda reader: (reader.all(TABLE_STATISTICS), reader.one(AUTOVACUUM)))
    rows = [row for row in rows if row[0] in ours]
    report.facts |= {"rows": sum(row[1] for row in rows), "dead_rows": sum(row[2] for row in rows)}
    if autovacuum is not None and autovacuum[0] == "off":
        report.hints.append("autovacuum is off; turn it on: ALTER SYSTEM SET autovacuum = on")
    for name, live, dead, _, vacuumed in rows:
        if dead > DEAD_ROWS and dead > live // _DEAD_PART:
            when = "never" if vacuumed is None else to_datetime(vacuumed).isoformat(timespec="seconds")
            report.hints.append(f"{name} has {dead} dead rows, vacuumed last: {when}; run VACUUM (ANALYZE) {name}")
    stale = [row[0] for row in rows if row[3] > _MODIFIED_ROWS + row[1] // _MODIFIED_PART]
    if stale:
        with _connection(registry.database) as connection:
            report.done |= _analyse(registry.database, connection, stale, report, enough)


def _analyse(
    database: Database, connection: Any, tables: Sequence[str], report: DatabaseUpkeep, enough: Enough
) -> dict[str, Any]:
    refused: list[str] = []
    connection.add_notice_handler(lambda notice: refused.append(str(notice.message_primary)))
    done = []
    for name in tables:
        with _noted(database, report, f"ANALYZE {name}"):
            # Passed over where somebody else vacuums it just now. A table of another role is refused by a notice.
            connection.execute(f'ANALYZE (SKIP_LOCKED) "{name}"')
            if not refused:
                done.append(name)
        report.notes += refused
        refused.clear()
        if enough():
            break
    return {"analysed": done} if done else {}
