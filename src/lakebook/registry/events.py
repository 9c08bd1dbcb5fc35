"""Reading captured events: everything committed since a cursor, nothing twice, nothing skipped.

On SQLite commits are serial, so a cursor is the last id that was read. On PostgreSQL ids
commit in another order than they were drawn, so a cursor is a snapshot: new is what is
visible now and was not visible then. While a long list is read in pages the cursor also
remembers the snapshot the pages belong to and how far it has come. Within a lake object
ids and sequences grow together, because both are given out under the object's lock.

A server that crashed gives out again the ids of transactions of which nothing had reached its disk. So no
cursor counts an id as passed that is above those of all events it has passed: what could be seen was on
the disk, and with it that every id up to its own had been given out.

Events that nobody needs any more are removed (`pruning`). The book keeps the horizon: a cursor up to
which some may be gone. Whoever reads from a cursor before it is told so, and never skips silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import CursorExpired, InvalidCursor
from lakebook.names import check_name, shown
from lakebook.pages import check_limit
from lakebook.registry import schema
from lakebook.registry.pg_snapshots import PgSnapshot
from lakebook.registry.registry import Registry
from lakebook.registry.statements import POSTGRESQL, ZERO, Statement, bind, insert_into
from lakebook.registry.transactions import Reader, Row, Transaction

_e = schema.events.c
_lo = schema.lake_objects.c
_EVENT = (
    _e.id,
    _e.object_id,
    _lo.kind,
    _e.sequence,
    _e.table_name,
    _e.operation,
    _e.key,
    _e.row_after,
    _e.row_before,
    _e.occurred_at,
)
all_events = sa.select(*_EVENT).select_from(schema.events.join(schema.lake_objects, _lo.id == _e.object_id))

AFTER_ID = Statement(
    all_events.where(_e.id > bind("after")).order_by(_e.id).limit(bind("most", sa.Integer)).offset(ZERO),
    "after",
    "most",
)
NEWEST_ID = Statement(
    # The counter, not the largest id: pruned ids are never given again.
    sa.text("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'")
)
_new = sa.text(
    "xid >= pg_snapshot_xmin(CAST(:since AS pg_snapshot))"
    " AND NOT pg_visible_in_snapshot(xid, CAST(:since AS pg_snapshot))"
    " AND pg_visible_in_snapshot(xid, CAST(:upto AS pg_snapshot))"
)
# `id + 0`: else the planner walks the primary key from its beginning to find the least id.
FIRST_NEW_ID = Statement(sa.select(sa.func.min(_e.id + 0)).where(_new), "since", "upto")
NEW_IN_SNAPSHOT = Statement(
    all_events.where(_e.id > bind("after"), _new).order_by(_e.id).limit(bind("most", sa.Integer)).offset(ZERO),
    "after",
    "since",
    "upto",
    "most",
)
CURRENT_SNAPSHOT = Statement(sa.text("SELECT CAST(pg_current_snapshot() AS text)"))
# The snapshot, and the highest id of a transaction whose events it sees, if that has not been passed already. Of
# one statement, so of one moment. Not of all events: what was pruned stays in the index until it is vacuumed.
SNAPSHOT_AND_LAST = Statement(
    sa.text(
        "SELECT CAST(pg_current_snapshot() AS text),"
        " CAST((SELECT xid FROM events WHERE xid >= CAST(:passed AS xid8) ORDER BY xid DESC LIMIT 1) AS text)"
    ),
    "passed",
)

HORIZON = Statement(sa.select(schema.book.c.epoch, schema.book.c.events_horizon))

_cu = schema.cursors.c
LOAD_CURSOR = Statement(sa.select(_cu.position).where(_cu.subscriber == bind("name")), "name")
INSERT_CURSOR = insert_into(schema.cursors)
UPDATE_CURSOR = Statement(
    sa.update(schema.cursors)
    .where(_cu.subscriber == bind("name"))
    .values(position=bind("new_position"), updated_at=bind("now")),
    "new_position",
    "now",
    "name",
)
DELETE_DELIVERIES_OF = Statement(
    sa.delete(schema.deliveries).where(schema.deliveries.c.subscriber == bind("name")), "name"
)
DELETE_CURSOR = Statement(sa.delete(schema.cursors).where(_cu.subscriber == bind("name")), "name")

_NOTHING_SEEN = "1:1:"
# The end of a log that never had an event: below the first id there is, and not the beginning.
_FIRST_ID = 3
# On SQLite: before the first id, and so that it differs from the end of an empty log.
_BEFORE_ALL = -1
_BEGINNING = "beginning"
_TOKEN = re.compile(r"(?P<epoch>[0-9a-f]{32})/(?P<kind>sqlite|postgresql)/(?P<position>.*)")


@dataclass(frozen=True)
class Event:
    """One captured change of one row.

    `object_id` is the lake object it belongs to, `sequence` its place in that object's history:
    1, 2, 3 and so on without a gap. `row_after` is missing for a delete, `row_before` for an insert.
    """

    id: int
    object_id: int
    object_kind: str
    sequence: int
    table: str
    operation: str
    key: Mapping[str, Any]
    row_after: Mapping[str, Any] | None
    row_before: Mapping[str, Any] | None
    occurred_at: datetime


@dataclass(frozen=True)
class Cursor:
    """A position in the events. `str(cursor)` is its lasting form; `Cursor.parse` reads it."""

    epoch: str
    kind: str
    #: PostgreSQL: the snapshot up to which everything was read.
    since: str = _NOTHING_SEEN
    #: PostgreSQL: the snapshot whose new events are being read in pages.
    upto: str = ""
    #: The last id that was read (PostgreSQL: of this page's snapshot).
    after: int = 0

    def __str__(self) -> str:
        if self.kind == POSTGRESQL:
            position = f"{self.since}|{self.upto}|{self.after}"
        else:
            position = _BEGINNING if self.after == _BEFORE_ALL else str(self.after)
        return f"{self.epoch}/{self.kind}/{position}"

    @property
    def is_beginning(self) -> bool:
        """Whether it stands before the oldest event that is kept, whichever that is."""
        if self.kind == POSTGRESQL:
            return self.since == _NOTHING_SEEN and not self.upto
        return self.after == _BEFORE_ALL

    def is_behind(self, horizon: Cursor) -> bool:
        """Whether events that it has not passed may be gone, by the horizon of the log."""
        if self.kind != POSTGRESQL:
            return self.after < horizon.after
        # Those of a page that is half read are counted as not passed.
        since, gone = PgSnapshot.parse(self.since), PgSnapshot.parse(horizon.since)
        return since is None or gone is None or not since.includes(gone)

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Read a cursor that was written with `str`."""
        match = _TOKEN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise _not_a_cursor(text)
        epoch, kind, position = match["epoch"], match["kind"], match["position"]
        if kind != POSTGRESQL:
            return cls(epoch, kind, after=_BEFORE_ALL if position == _BEGINNING else _whole(position, text))
        parts = position.split("|")
        # Without pages the second one is missing.
        if len(parts) != 3 or any(PgSnapshot.parse(part) is None for part in (parts[0], parts[1] or parts[0])):
            raise _not_a_cursor(text)
        return cls(epoch, kind, parts[0], parts[1], _whole(parts[2], text))


def _whole(text: str, cursor: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise _not_a_cursor(cursor)
    return int(text)


def _not_a_cursor(text: object) -> InvalidCursor:
    return InvalidCursor(f"{shown(text)} is not a cursor", on="events", remedy="Use one that `events` has given out")


@dataclass(frozen=True)
class EventBatch:
    """Events in an order that keeps every object's own, and the cursor behind them."""

    events: tuple[Event, ...]
    cursor: Cursor
    #: Whether there may be more to read at once; if not, it is time to wait.
    more: bool


def event_from(row: Row) -> Event:
    """An event from the columns of `AFTER_ID`."""
    number, object_id, kind, sequence, table, operation, key, after, before, occurred = row
    return Event(
        number,
        object_id,
        kind,
        sequence,
        table,
        operation,
        _parsed(key),
        _parsed(after),
        _parsed(before),
        to_datetime(occurred),
    )


def _parsed(value: Any) -> Any:
    return orjson.loads(value) if isinstance(value, str) else value


def current_cursor(reader: Reader) -> Cursor:
    """The position behind everything the reader can see; in a snapshot, the one to follow a refresh with."""
    book = reader.one(HORIZON)
    assert book is not None
    epoch, horizon = book
    if reader.kind == POSTGRESQL:
        # Events that are gone are passed too.
        gone = None if horizon is None else PgSnapshot.parse(Cursor.parse(horizon).since)
        return Cursor(epoch, reader.kind, since=_all_visible(reader, _FIRST_ID if gone is None else gone.xmax))
    row = reader.one(NEWEST_ID)
    assert row is not None
    return Cursor(epoch, reader.kind, after=row[0])


def _all_visible(reader: Reader, passed: int) -> str:
    """The snapshot of this moment, as far as it reaches for certain also after a crash.

    That is up to the last id of an event it sees, and not less than what is known to be passed: the ids below
    `passed`.
    """
    row = reader.one(SNAPSHOT_AND_LAST, str(passed))
    assert row is not None
    snapshot = PgSnapshot.parse(row[0])
    assert snapshot is not None
    return str(snapshot.below(passed if row[1] is None else int(row[1]) + 1))


class EventLog:
    """The captured events of a book."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def beginning(self) -> Cursor:
        """The position before the oldest event that is kept."""
        after = 0 if self._registry.kind == POSTGRESQL else _BEFORE_ALL
        return Cursor(self._registry.epoch, self._registry.kind, after=after)

    def now(self) -> Cursor:
        """The position behind everything that is committed."""
        return self._registry.in_snapshot(current_cursor)

    def read(self, cursor: Cursor, limit: int = 1000) -> EventBatch:
        """What was committed since `cursor`, oldest first, at most `limit` events."""
        check_limit(limit)
        if cursor.kind != self._registry.kind:
            raise _not_a_cursor(str(cursor))
        read = partial(_read_postgresql, whole=cursor.is_beginning) if cursor.kind == POSTGRESQL else _read_sqlite

        def work(reader: Reader) -> EventBatch:
            while True:
                start = (_horizon(reader, cursor) or cursor) if cursor.is_beginning else cursor
                batch = read(reader, start, limit)
                # After the events: a new epoch removes them in the transaction that begins it, and so does
                # whoever moves the horizon. If both are as they should be now, none was missing then.
                horizon = _horizon(reader, cursor)
                if horizon is None or not start.is_behind(horizon):
                    return batch
                if not cursor.is_beginning:
                    raise CursorExpired(
                        "events that come after the cursor are no longer kept",
                        on="events",
                        remedy="Read the state from the registry and start with a new cursor",
                    )

        # What a good plan is depends on the snapshots, so it is made for these very values.
        return self._registry.read_with(work, plan_once=False)

    def load_cursor(self, subscriber: str) -> Cursor | None:
        """How far a subscriber has come; none if it has to begin with a refresh."""
        row = self._registry.one(LOAD_CURSOR, check_name("subscriber", subscriber))
        return Cursor.parse(row[0]) if row else None

    def save_cursor(self, subscriber: str, cursor: Cursor) -> None:
        """Remember how far a subscriber has come."""
        check_name("subscriber", subscriber)

        def work(transaction: Transaction) -> None:
            now = transaction.clock.now_ms()
            if transaction.run(UPDATE_CURSOR, str(cursor), now, subscriber) == 0:
                transaction.run(INSERT_CURSOR, subscriber, str(cursor), now)

        self._registry.write(work)

    def delete_cursor(self, subscriber: str) -> None:
        """Forget a subscriber; it begins with a refresh when it comes back."""
        check_name("subscriber", subscriber)

        def work(transaction: Transaction) -> None:
            transaction.run(DELETE_CURSOR, subscriber)
            transaction.run(DELETE_DELIVERIES_OF, subscriber)

        self._registry.write(work)


def _horizon(reader: Reader, cursor: Cursor) -> Cursor | None:
    """Up to where events may be gone; refused if the cursor is not of the book's present epoch."""
    row = reader.one(HORIZON)
    if row is None or row[0] != cursor.epoch:
        raise CursorExpired(
            "the cursor belongs to another epoch of the book",
            on="events",
            remedy="Read the state from the registry and start with a new cursor",
        )
    return None if row[1] is None else Cursor.parse(row[1])


def _read_sqlite(reader: Reader, cursor: Cursor, limit: int) -> EventBatch:
    rows = reader.all(AFTER_ID, cursor.after, limit + 1)
    events = tuple(event_from(row) for row in rows[:limit])
    after = events[-1].id if events else cursor.after
    return EventBatch(events, Cursor(cursor.epoch, cursor.kind, after=after), len(rows) > limit)


def _read_postgresql(reader: Reader, cursor: Cursor, limit: int, *, whole: bool) -> EventBatch:
    since, upto, after = cursor.since, cursor.upto, cursor.after
    if not upto:
        passed = PgSnapshot.parse(since)
        assert passed is not None
        upto = _all_visible(reader, passed.xmax)
    if not cursor.upto and not whole:
        first = reader.one(FIRST_NEW_ID, since, upto)
        if first is None or first[0] is None:
            return EventBatch((), Cursor(cursor.epoch, cursor.kind, since=upto), False)
        after = first[0] - 1
    # Of the whole log, the first new event is the first one there is: to look for it would read them all.
    rows = reader.all(NEW_IN_SNAPSHOT, after, since, upto, limit + 1)
    events = tuple(event_from(row) for row in rows[:limit])
    if len(rows) > limit:
        return EventBatch(events, Cursor(cursor.epoch, cursor.kind, since, upto, events[-1].id), True)
    # The last page of a snapshot that an earlier call took: there may be newer events by now.
    return EventBatch(events, Cursor(cursor.epoch, cursor.kind, since=upto), bool(cursor.upto))
