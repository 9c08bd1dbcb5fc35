"""One transaction: it reads, locks lake objects, changes rows and captures the changes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.clock import Clock
from lakebook.errors import RegistryCorrupt
from lakebook.registry import schema
from lakebook.registry.databases import Database, Failure
from lakebook.registry.statements import POSTGRESQL, SQLITE, Insert, Statement, among, bind, insert_into

Row = tuple[Any, ...]

_o = schema.lake_objects.c
LOCK_OBJECT = Statement(
    sa.select(_o.last_sequence, _o.last_commit_at).where(_o.id == bind("object_id")).with_for_update(key_share=True),
    "object_id",
)
# Locked in the order in which they are returned, as one after the other.
_lock_objects = {
    database: sa.select(_o.id, _o.last_sequence, _o.last_commit_at)
    .where(among(_o.id, "object_ids", database))
    .order_by(_o.id)
    .with_for_update(key_share=True)
    for database in (SQLITE, POSTGRESQL)
}
LOCK_OBJECTS = Statement(_lock_objects[SQLITE], "object_ids", postgresql=_lock_objects[POSTGRESQL])
INSERT_OBJECT = Statement(
    sa.insert(schema.lake_objects)
    .values(kind=bind("kind"), last_sequence=0, last_commit_at=bind("now"))
    .returning(_o.id),
    "kind",
    "now",
)
ADVANCE_OBJECT = Statement(
    sa.update(schema.lake_objects)
    .where(_o.id == bind("object_id"))
    .values(last_sequence=bind("last"), last_commit_at=bind("now")),
    "last",
    "now",
    "object_id",
)
# In the order of the table, which is the order of its INSERT.
_EVENT_COLUMNS = (
    "xid",
    "object_id",
    "sequence",
    "table_name",
    "operation",
    "key",
    "row_after",
    "row_before",
    "occurred_at",
)
INSERT_EVENT = insert_into(schema.events, *_EVENT_COLUMNS)
# For a few events on PostgreSQL: the transaction's id without asking for it first.
INSERT_EVENT_HERE = Statement(
    sa.insert(schema.events)
    .values({name: bind(name) for name in _EVENT_COLUMNS[1:]} | {"xid": sa.func.pg_current_xact_id()})
    .inline(),
    *_EVENT_COLUMNS[1:],
)
CURRENT_XID = Statement(sa.text("SELECT CAST(pg_current_xact_id() AS text)"))


def new_id() -> str:
    """An id nobody else has."""
    return os.urandom(16).hex()


def new_ids(number: int) -> list[str]:
    """That many of them, for less than one at a time."""
    digits = os.urandom(16 * number).hex()
    return [digits[start : start + 32] for start in range(0, 32 * number, 32)]


# More would save little, and a statement has a limit on its values.
_ROWS_AT_ONCE = 50
_ROWS_FETCHED = 1000


class NoEffect(Exception):
    """Ends a transaction on purpose without an effect; it carries the result."""


class TryAgain(Exception):
    """The transaction had no effect and may be tried again."""

    def __init__(self, failure: Failure, cause: Exception | None = None) -> None:
        super().__init__(failure.value)
        self.failure = failure
        self.cause = cause


@dataclass(slots=True)
class _Locked:
    """A lake object this transaction holds the lock of."""

    sequence: int
    time: int
    #: A time that was chosen before, for what is written.
    chosen: int | None = None
    changed: bool = False


class Reader:
    """Runs statements on one connection: in its transaction, or each by itself (`alone`)."""

    def __init__(self, connection: Any, database: Database, *, alone: bool = False, plan_once: bool = True) -> None:
        self._connection = connection
        self._database = database
        self.kind = database.kind
        self._brings_limits = alone and database.brings_limits
        # PostgreSQL prepares what runs often, and then no longer plans it for the values at hand.
        self._options = {} if plan_once or self.kind != POSTGRESQL else {"prepare": False}

    def _execute(self, statement: Statement, values: Sequence[Any]) -> Any:
        compiled = statement.on(self.kind)
        arranged = compiled.arrange(values) if compiled.arrange else values
        return self.run_sql(compiled.sql, arranged)

    def run_sql(self, sql: str, *values: Any, **options: Any) -> Any:
        """Run a statement that is compiled already; what the driver gives for it."""
        if self._brings_limits:
            return self._database.run_alone(self._connection, sql, *values, **self._options, **options)
        return self._connection.execute(sql, *values, **self._options, **options)

    def one(self, statement: Statement, *values: Any) -> Row | None:
        """The first row, if there is one."""
        row: Row | None = self._execute(statement, values).fetchone()
        return row

    def all(self, statement: Statement, *values: Any) -> list[Row]:
        """All rows."""
        rows: list[Row] = self._execute(statement, values).fetchall()
        return rows

    def each(self, statement: Statement, *values: Any) -> Iterator[Row]:
        """All rows, one after the other, however many there are; within a transaction."""
        compiled = statement.on(self.kind)
        arranged = compiled.arrange(values) if compiled.arrange else values
        if self.kind != POSTGRESQL:
            yield from self._connection.execute(compiled.sql, arranged)
            return
        # A cursor on the server: else the driver would fetch all of them at once.
        with self._connection.cursor(name="lakebook_each") as cursor:
            cursor.itersize = _ROWS_FETCHED
            cursor.execute(compiled.sql, arranged)
            yield from cursor

    def listed(self, values: Iterable[Any]) -> Any:
        """Many values as one bound value, for a statement made with `among`."""
        return list(values) if self.kind == POSTGRESQL else orjson.dumps(list(values)).decode()


class Transaction(Reader):
    """A write transaction: it locks lake objects, changes rows and captures the changes."""

    def __init__(
        self, connection: Any, database: Database, clock: Clock, epoch: str, retried_after: Failure | None = None
    ) -> None:
        super().__init__(connection, database)
        self.clock = clock
        self.epoch = epoch
        #: Why the attempt before this one failed. After `DUPLICATE` the work looks for the duplicate.
        self.retried_after = retried_after
        self._locked: dict[int, _Locked] = {}
        self._events: list[Row] = []
        self.captured: dict[str, int] = {}

    def run(self, statement: Statement, *values: Any) -> int:
        """Change rows and say how many."""
        return int(self._execute(statement, values).rowcount)

    def run_many(self, statement: Statement, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement once for each row of values."""
        compiled = statement.on(self.kind)
        arrange = compiled.arrange
        given = [arrange(row) for row in rows] if arrange else rows
        if given:
            self._connection.cursor().executemany(compiled.sql, given)

    def insert_many(self, statement: Insert, rows: Sequence[Sequence[Any]]) -> None:
        """Insert many rows, in the way that is fastest on this database."""
        if self.kind == POSTGRESQL and len(rows) >= _ROWS_AT_ONCE:
            with self._connection.cursor().copy(statement.copy) as copy:
                for row in rows:
                    copy.write_row(row)
            return
        compiled = statement.on(self.kind)
        assert compiled.arrange is None
        whole = len(rows) - len(rows) % _ROWS_AT_ONCE
        if whole:
            # Several rows at once save SQLite a third of the time where there are few indexes.
            sql = compiled.wide(_ROWS_AT_ONCE)
            for start in range(0, whole, _ROWS_AT_ONCE):
                self._connection.execute(sql, tuple(chain.from_iterable(rows[start : start + _ROWS_AT_ONCE])))
        if whole < len(rows):
            self._connection.cursor().executemany(compiled.sql, rows[whole:])

    # --- lake objects ------------------------------------------------------------

    def lock(self, *object_ids: int) -> None:
        """Lock lake objects, always in the order of their ids, so that nobody waits in a circle."""
        wanted = sorted(set(object_ids) - self._locked.keys())
        if len(wanted) > 1:
            rows = {row[0]: row[1:] for row in self.all(LOCK_OBJECTS, self.listed(wanted))}
        else:
            rows = {object_id: row for object_id in wanted if (row := self.one(LOCK_OBJECT, object_id)) is not None}
        for object_id in wanted:
            if object_id not in rows:
                raise RegistryCorrupt("a lake object has no row", on=f"object {object_id}", remedy="Run verify")
            sequence, time = rows[object_id]
            # Read under the lock, so that times per object never run backwards.
            self._locked[object_id] = _Locked(sequence, max(self.clock.now_ms(), time + 1))

    def create_object(self, kind: str, at: int | None = None) -> int:
        """A new lake object, which nobody else can see yet."""
        now = self.clock.now_ms() if at is None else at
        row = self.one(INSERT_OBJECT, kind, now)
        assert row is not None
        self._locked[row[0]] = _Locked(0, now)
        return int(row[0])

    def time_of(self, object_id: int) -> int:
        """The commit time of a locked object."""
        locked = self._locked[object_id]
        return locked.time if locked.chosen is None else locked.chosen

    def set_time(self, object_id: int, time: int) -> None:
        """Let what is written from now on have a time that was chosen before; events keep to the clock."""
        locked = self._locked[object_id]
        locked.chosen = time
        locked.time = max(locked.time, time)

    def next_sequence(self, object_id: int) -> int:
        """The sequence that the next captured change of a locked object will have."""
        return self._locked[object_id].sequence + 1

    # --- events ------------------------------------------------------------------

    def capture(self, object_id: int, table: str, changes: Iterable[tuple[str, str, str | None, str | None]]) -> None:
        """Keep events (operation, key, row after, row before) until the transaction commits."""
        locked = self._locked[object_id]
        sequence, time = locked.sequence, locked.time
        before = len(self._events)
        for operation, key, row_after, row_before in changes:
            sequence += 1
            self._events.append((object_id, sequence, table, operation, key, row_after, row_before, time))
        locked.sequence = sequence
        locked.changed = True
        self.captured[table] = self.captured.get(table, 0) + len(self._events) - before

    def write_events(self) -> None:
        """Write what was captured; the last thing before COMMIT."""
        changed = [(held.sequence, held.time, object_id) for object_id, held in self._locked.items() if held.changed]
        self.run_many(ADVANCE_OBJECT, changed)
        xid = None
        if self.kind == POSTGRESQL:
            if len(self._events) < _ROWS_AT_ONCE:
                self.run_many(INSERT_EVENT_HERE, self._events)
                return
            row = self.one(CURRENT_XID)
            xid = row[0] if row else None
        self.insert_many(INSERT_EVENT, [(xid, *event) for event in self._events])
