"""Reading captured events: everything committed since a cursor, nothing twice, nothing skipped.

On SQLite commits are serial, so a cursor is the last id that was read. On PostgreSQL ids
commit in another order than they were drawn, so a cursor is a snapshot: new is what is
visible now and was not visible then. While a long list is read in pages the cursor also
remembers the snapshot the pages belong to and how far it has come. Within a lake object
ids and sequences grow together, because both are given out under the object's lock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import CursorExpired, InvalidCursor
from lakebook.names import check_name, shown
from lakebook.pages import check_limit
from lakebook.registry import schema
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

CURRENT_EPOCH = Statement(sa.select(schema.book.c.epoch))

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
DELETE_CURSOR = Statement(sa.delete(schema.cursors).where(_cu.subscriber == bind("name")), "name")

_NOTHING_SEEN = "1:1:"
_SNAPSHOT = re.compile(r"(\d{1,19}):(\d{1,19}):((?:\d{1,19}(?:,\d{1,19})*)?)", re.ASCII)
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
        position = str(self.after) if self.kind != POSTGRESQL else f"{self.since}|{self.upto}|{self.after}"
        return f"{self.epoch}/{self.kind}/{position}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Read a cursor that was written with `str`."""
        match = _TOKEN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise _not_a_cursor(text)
        epoch, kind, position = match["epoch"], match["kind"], match["position"]
        if kind != POSTGRESQL:
            return cls(epoch, kind, after=_whole(position, text))
        parts = position.split("|")
        if len(parts) != 3 or not _is_snapshot(parts[0]) or (parts[1] and not _is_snapshot(parts[1])):
            raise _not_a_cursor(text)
        return cls(epoch, kind, parts[0], parts[1], _whole(parts[2], text))


def _is_snapshot(text: str) -> bool:
    """Whether PostgreSQL would take the text for a snapshot: xmin, xmax, and what was open between."""
    match = _SNAPSHOT.fullmatch(text)
    if match is None:
        return False
    low, high = int(match[1]), int(match[2])
    between = [int(part) for part in match[3].split(",") if part]
    return 0 < low <= high and between == sorted(set(between)) and all(low <= xid < high for xid in between)


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
    book = reader.one(CURRENT_EPOCH)
    assert book is not None
    epoch = book[0]
    if reader.kind == POSTGRESQL:
        row = reader.one(CURRENT_SNAPSHOT)
        assert row is not None
        return Cursor(epoch, reader.kind, since=row[0])
    row = reader.one(NEWEST_ID)
    assert row is not None
    return Cursor(epoch, reader.kind, after=row[0])


class EventLog:
    """The captured events of a book."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def beginning(self) -> Cursor:
        """The position before the oldest event that is kept."""
        return Cursor(self._registry.epoch, self._registry.kind)

    def now(self) -> Cursor:
        """The position behind everything that is committed."""
        return self._registry.in_snapshot(current_cursor)

    def read(self, cursor: Cursor, limit: int = 1000) -> EventBatch:
        """What was committed since `cursor`, oldest first, at most `limit` events."""
        check_limit(limit)
        if cursor.kind != self._registry.kind:
            raise _not_a_cursor(str(cursor))
        read = _read_postgresql if cursor.kind == POSTGRESQL else _read_sqlite

        def work(reader: Reader) -> EventBatch:
            batch = read(reader, cursor, limit)
            # After the events: a new epoch removes them in the transaction that begins it, so if it is
            # still the old one now, none was missing then.
            row = reader.one(CURRENT_EPOCH)
            if row is None or row[0] != cursor.epoch:
                raise CursorExpired(
                    "the cursor belongs to another epoch of the book",
                    on="events",
                    remedy="Read the state from the registry and start with a new cursor",
                )
            return batch

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
        self._registry.write(lambda transaction: transaction.run(DELETE_CURSOR, subscriber))


def _read_sqlite(reader: Reader, cursor: Cursor, limit: int) -> EventBatch:
    rows = reader.all(AFTER_ID, cursor.after, limit + 1)
    events = tuple(event_from(row) for row in rows[:limit])
    after = events[-1].id if events else cursor.after
    return EventBatch(events, Cursor(cursor.epoch, cursor.kind, after=after), len(rows) > limit)


def _read_postgresql(reader: Reader, cursor: Cursor, limit: int) -> EventBatch:
    since, upto, after = cursor.since, cursor.upto, cursor.after
    if not upto:
        snapshot = reader.one(CURRENT_SNAPSHOT)
        assert snapshot is not None
        upto = snapshot[0]
        first = reader.one(FIRST_NEW_ID, since, upto)
        if first is None or first[0] is None:
            return EventBatch((), Cursor(cursor.epoch, cursor.kind, since=upto), False)
        after = first[0] - 1
    rows = reader.all(NEW_IN_SNAPSHOT, after, since, upto, limit + 1)
    events = tuple(event_from(row) for row in rows[:limit])
    if len(rows) > limit:
        return EventBatch(events, Cursor(cursor.epoch, cursor.kind, since, upto, events[-1].id), True)
    # The last page of a snapshot that an earlier call took: there may be newer events by now.
    return EventBatch(events, Cursor(cursor.epoch, cursor.kind, since=upto), bool(cursor.upto))
