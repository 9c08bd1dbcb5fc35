"""Who delivers events, how far each subscriber has come, and what could not be delivered.

One process at a time has the scheduler's turn. Its token grows with every holder, and whatever the
holder writes down about deliveries asserts it, so that one that was frozen and taken for dead does no
harm when it wakes. No clock decides who is dead: whoever waits has seen the turn's beat stand still.

A subscriber's cursor passes all events. Those of an object that it could not take yet are remembered by
a row, with the sequence from which they go on: one failing object holds up nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.clock import to_datetime, to_ms
from lakebook.errors import CursorExpired, DeadLetterNotFound, InvalidCursor, SchedulerLost
from lakebook.registry import schema
from lakebook.registry.commits import owner
from lakebook.registry.events import (
    DELETE_CURSOR,
    INSERT_CURSOR,
    LOAD_CURSOR,
    UPDATE_CURSOR,
    Cursor,
    Event,
    all_events,
    current_cursor,
    event_from,
)
from lakebook.registry.maintenance import REFRESH, ask, plain_json
from lakebook.registry.object_names import names_of_objects
from lakebook.registry.statements import POSTGRESQL, SQLITE, ZERO, Statement, among, bind, insert_into
from lakebook.registry.tables import GET_TABLE_BY_ID, TableRecord, table_from
from lakebook.registry.transactions import Reader, Row, Transaction

#: The one scheduler there is.
ASTHA = "astha"
# A longer one would fill the log of whoever looks at it.
_LONGEST_ERROR = 2000

_s = schema.schedulers.c
_d = schema.deliveries.c
_x = schema.dead_letters.c
_e = schema.events.c
_o = schema.lake_objects.c
_t = schema.tables.c

SCHEDULER = Statement(sa.select(schema.schedulers).where(_s.name == bind("of_name")), "of_name")
CLAIM_SCHEDULER = Statement(sa.select(schema.schedulers).where(_s.name == bind("of_name")).with_for_update(), "of_name")
INSERT_SCHEDULER = insert_into(schema.schedulers)
TAKE_TURN = Statement(
    sa.update(schema.schedulers)
    .where(_s.name == bind("of_name"))
    .values(
        token=bind("new_token"),
        holder=bind("new_holder"),
        beat=_s.beat + sa.literal_column("1"),
        claimed_at=bind("now"),
        renewed_at=bind("now"),
        status=bind("new_status", _s.status.type),
    ),
    "new_token",
    "new_holder",
    "now",
    "new_status",
    "of_name",
)
RENEW_TURN = Statement(
    sa.update(schema.schedulers)
    .where(_s.name == bind("of_name"), _s.token == bind("held"), _s.holder.is_not(None))
    .values(beat=_s.beat + sa.literal_column("1"), renewed_at=bind("now"), status=bind("new_status", _s.status.type)),
    "now",
    "new_status",
    "of_name",
    "held",
)
BOUND_SILENCE = Statement(sa.text("SELECT set_config('idle_in_transaction_session_timeout', :most, true)"), "most")
RELEASE_TURN = Statement(
    sa.update(schema.schedulers)
    .where(_s.name == bind("of_name"), _s.token == bind("held"))
    .values(holder=sa.null(), beat=_s.beat + sa.literal_column("1"), renewed_at=bind("now")),
    "now",
    "of_name",
    "held",
)
# Shared: several threads of the holder may write at once, and a new holder waits for them.
SHARE_TURN = Statement(
    sa.select(_s.token, _s.holder).where(_s.name == bind("of_name")).with_for_update(read=True), "of_name"
)

LANES = Statement(
    sa.select(*(column for column in schema.deliveries.columns if column.name != "subscriber")).where(
        _d.subscriber == bind("of_subscriber")
    ),
    "of_subscriber",
)
DELETE_LANE = Statement(
    sa.delete(schema.deliveries).where(_d.subscriber == bind("of_subscriber"), _d.object_id == bind("of_object")),
    "of_subscriber",
    "of_object",
)
DELETE_LANES = Statement(sa.delete(schema.deliveries).where(_d.subscriber == bind("of_subscriber")), "of_subscriber")
INSERT_LANE = insert_into(schema.deliveries)
STALLED = Statement(
    sa.select(schema.deliveries)
    .order_by(_d.since, _d.subscriber, _d.object_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "most",
)


def _of_object(database: str) -> sa.Select[Any]:
    return (
        all_events.where(
            _e.object_id == bind("of_object"),
            _e.sequence >= bind("least"),
            _e.sequence <= bind("last"),
            among(_e.table_name, "of_tables", database),
        )
        .order_by(_e.sequence)
        .limit(bind("most", sa.Integer))
        .offset(ZERO)
    )


EVENTS_OF_OBJECT = Statement(
    _of_object(SQLITE), "of_object", "least", "last", "of_tables", "most", postgresql=_of_object(POSTGRESQL)
)
EVENT_AT = Statement(
    sa.select(_e.id).where(_e.object_id == bind("of_object"), _e.sequence == bind("at")), "of_object", "at"
)
LIVE_TABLES = Statement(
    sa.select(_o.id, _o.last_sequence)
    .select_from(schema.lake_objects.join(schema.tables, _t.object_id == _o.id))
    .where(_t.deleted_at.is_(None))
    .order_by(_o.id)
)
OBJECTS_OF_KIND = Statement(
    sa.select(_o.id, _o.last_sequence).where(_o.kind == bind("of_kind")).order_by(_o.id), "of_kind"
)
OBJECT = Statement(sa.select(_o.kind, _o.last_sequence).where(_o.id == bind("of_object")), "of_object")
TABLE_OF_OBJECT = Statement(
    sa.select(_t.id).where(_t.object_id == bind("of_object"), _t.deleted_at.is_(None)), "of_object"
)
CURSORS = Statement(sa.select(schema.cursors).order_by(schema.cursors.c.subscriber))

EVENTS_AFTER = Statement(sa.select(sa.func.count()).where(_e.id > bind("after")), "after")
# What a cursor is in the middle of reading counts as not read.
EVENTS_SINCE = Statement(
    sa.text(
        "SELECT count(*) FROM events WHERE xid >= pg_snapshot_xmin(CAST(:since AS pg_snapshot))"
        " AND NOT pg_visible_in_snapshot(xid, CAST(:since AS pg_snapshot))"
    ),
    "since",
)

INSERT_DEAD_LETTER = insert_into(
    schema.dead_letters, *(str(column.name) for column in schema.dead_letters.columns if column.name != "id")
)
DEAD_LETTERS = Statement(
    sa.select(schema.dead_letters)
    .where(_x.id > bind("after"))
    .order_by(_x.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
PARKED = Statement(
    sa.select(_x.id).where(
        _x.subscriber == bind("of_subscriber"), _x.event_id == bind("of_event"), _x.object_id == bind("of_object")
    ),
    "of_subscriber",
    "of_event",
    "of_object",
)
DEAD_LETTER = Statement(sa.select(schema.dead_letters).where(_x.id == bind("of_id")), "of_id")
COUNT_LETTERS = Statement(
    sa.select(_x.subscriber, sa.func.count()).where(_x.redriven_at.is_(None)).group_by(_x.subscriber)
)
REDRIVEN = Statement(
    sa.update(schema.dead_letters)
    .where(_x.subscriber == bind("of_subscriber"), _x.object_id == bind("of_object"), _x.redriven_at.is_(None))
    .values(redriven_at=bind("now")),
    "now",
    "of_subscriber",
    "of_object",
)

#: The kind of lake object that rows of each captured table belong to.
KIND_OF = {
    "tables": "table",
    "table_metadata": "table",
    "table_files": "table",
    "table_stats": "table",
    "table_snapshots": "table",
    "topics": "topic",
    "partitions": "partition",
    "segments": "partition",
    "consumer_groups": "group",
    "consumer_offsets": "group",
}


@dataclass(frozen=True)
class Turn:
    """The right to deliver events."""

    name: str
    token: int


@dataclass(frozen=True)
class SchedulerState:
    """Who has the turn, and what it said of itself when it renewed it last."""

    name: str
    token: int
    #: None: nobody has it.
    holder: str | None
    beat: int
    claimed_at: datetime
    renewed_at: datetime
    status: Mapping[str, Any]


@dataclass(frozen=True)
class Lane:
    """A lake object of which a subscriber has not taken every event that its cursor has passed."""

    object_id: int
    #: The first event it has not taken.
    next_sequence: int
    #: The last one that its cursor has passed.
    known_sequence: int
    refresh: bool = False
    attempts: int = 0
    last_error: str | None = None
    since: int = 0
    retry_at: int = 0


@dataclass(frozen=True)
class Stalled:
    """A lane, and whose it is."""

    subscriber: str
    lane: Lane
    #: What its lake object is called.
    shown: str = ""


@dataclass(frozen=True)
class DeadLetter:
    """An event that a subscriber could not take after its last attempt."""

    id: int
    subscriber: str
    event: Event
    attempts: int
    error: str
    parked_at: datetime
    #: When somebody had its object refreshed for that subscriber again.
    redriven_at: datetime | None
    #: What the lake object of the event is called.
    shown: str = ""


# --- the turn ------------------------------------------------------------------


def scheduler_state(reader: Reader, name: str = ASTHA) -> SchedulerState | None:
    """Who has the turn; none if nobody ever had it."""
    row = reader.one(SCHEDULER, name)
    if row is None:
        return None
    name, token, holder, beat, claimed, renewed, status = row
    return SchedulerState(name, token, holder, beat, to_datetime(claimed), to_datetime(renewed), _parsed(status))


def claim_turn(
    transaction: Transaction, seen: tuple[int, int] | None, status: Mapping[str, Any], name: str = ASTHA
) -> Turn | None:
    """Take the turn if nobody has it, or if it still stands where it was seen to stand still; else none."""
    row = transaction.one(CLAIM_SCHEDULER, name)
    now = transaction.clock.now_ms()
    written = plain_json(status)
    if row is None:
        transaction.run(INSERT_SCHEDULER, name, 1, owner(), 1, now, now, written)
        return Turn(name, 1)
    _, token, holder, beat, *_ = row
    if holder is not None and seen != (token, beat):
        return None
    transaction.run(TAKE_TURN, token + 1, owner(), now, written, name)
    return Turn(name, token + 1)


def renew_turn(transaction: Transaction, turn: Turn, status: Mapping[str, Any], silent_ms: int = 60_000) -> None:
    """Say that the holder lives and what it does; refused if another has taken the turn.

    On PostgreSQL the server ends the transaction of one that is frozen in it for so long: else it would keep
    the row locked, and nobody could take over.
    """
    if transaction.kind == POSTGRESQL:
        transaction.one(BOUND_SILENCE, str(silent_ms))
    written = plain_json(status)
    if transaction.run(RENEW_TURN, transaction.clock.now_ms(), written, turn.name, turn.token) != 1:
        raise _lost(turn)


def release_turn(transaction: Transaction, turn: Turn) -> None:
    """Give the turn back, if it is still held."""
    transaction.run(RELEASE_TURN, transaction.clock.now_ms(), turn.name, turn.token)


def require_turn(transaction: Transaction, turn: Turn) -> None:
    """Refuse to go on if another has taken the turn."""
    row = transaction.one(SHARE_TURN, turn.name)
    if row is None or row[0] != turn.token or row[1] is None:
        raise _lost(turn)


def _lost(turn: Turn) -> SchedulerLost:
    return SchedulerLost("another process delivers events by now", on=turn.name, remedy="It goes on there")


# --- progress ------------------------------------------------------------------


def load_progress(reader: Reader, subscriber: str) -> tuple[Cursor | None, list[Lane]]:
    """How far a subscriber has come; without a cursor it begins with a refresh."""
    row = reader.one(LOAD_CURSOR, subscriber)
    lanes = [_lane_from(values) for values in reader.all(LANES, subscriber)]
    try:
        return (Cursor.parse(row[0]) if row else None), lanes
    except InvalidCursor:
        return None, lanes  # What it stood for is not known any more.


def has_cursor(reader: Reader, subscriber: str) -> bool:
    """Whether a subscriber has a cursor."""
    return reader.one(LOAD_CURSOR, subscriber) is not None


def save_progress(
    transaction: Transaction,
    subscriber: str,
    cursor: Cursor,
    changed: Sequence[Lane],
    finished: Sequence[int],
) -> None:
    """Write down how far a subscriber has come. The caller asserts the turn in the same transaction."""
    now = transaction.clock.now_ms()
    if transaction.run(UPDATE_CURSOR, str(cursor), now, subscriber) == 0:
        transaction.run(INSERT_CURSOR, subscriber, str(cursor), now)
    save_lanes(transaction, subscriber, changed, finished)


def save_lanes(transaction: Transaction, subscriber: str, changed: Sequence[Lane], finished: Sequence[int]) -> None:
    """Write down lanes that have changed, and forget those that are finished."""
    gone = [(subscriber, lane.object_id) for lane in changed]
    gone += [(subscriber, object_id) for object_id in finished]
    transaction.run_many(DELETE_LANE, gone)
    transaction.insert_many(INSERT_LANE, [_lane_row(subscriber, lane) for lane in changed])


def forget_progress(transaction: Transaction, subscriber: str) -> None:
    """Forget how far a subscriber has come: it is about to take everything anew."""
    transaction.run(DELETE_CURSOR, subscriber)
    transaction.run(DELETE_LANES, subscriber)


def _lane_row(subscriber: str, lane: Lane) -> tuple[Any, ...]:
    return (
        subscriber,
        lane.object_id,
        lane.next_sequence,
        lane.known_sequence,
        lane.refresh,
        lane.attempts,
        lane.last_error,
        lane.since,
        lane.retry_at,
    )


def _lane_from(row: Row) -> Lane:
    object_id, following, known, refresh, attempts, error, since, retry = row
    return Lane(object_id, following, known, bool(refresh), attempts, error, since, retry)


def list_stalled(reader: Reader, most: int) -> list[Stalled]:
    """Lanes that wait, those of the longest standing first."""
    found = [Stalled(row[0], _lane_from(row[1:])) for row in reader.all(STALLED, most)]
    names = names_of_objects(reader, (item.lane.object_id for item in found))
    return [replace(item, shown=names[item.lane.object_id]) for item in found]


def list_cursors(reader: Reader) -> list[tuple[str, Cursor, datetime]]:
    """Every subscriber with a cursor, the cursor, and when it was saved."""
    return [(name, Cursor.parse(position), to_datetime(at)) for name, position, at in reader.all(CURSORS)]


def events_behind(reader: Reader, cursor: Cursor) -> int:
    """How many events a cursor has not passed yet."""
    if cursor.kind == POSTGRESQL:
        row = reader.one(EVENTS_SINCE, cursor.since)
    else:
        row = reader.one(EVENTS_AFTER, cursor.after)
    assert row is not None
    return int(row[0])


def events_of_object(
    reader: Reader, object_id: int, first: int, last: int, tables: Sequence[str], most: int
) -> list[Event]:
    """Events of one lake object between two sequences, of some tables; refused if they are no longer kept."""
    rows = reader.all(EVENTS_OF_OBJECT, object_id, first, last, reader.listed(tables), most)
    # After the events, and whatever table it is of: the oldest go first, so if the first is there now, all were.
    if reader.one(EVENT_AT, object_id, first) is None:
        raise CursorExpired(
            "events that were not taken yet are no longer kept",
            on=f"object {object_id}",
            remedy="Take the state of the object from the registry",
        )
    return [event_from(row) for row in rows]


# --- refreshing ----------------------------------------------------------------


def objects_of(reader: Reader, tables: Sequence[str]) -> tuple[Cursor, list[tuple[int, int]]]:
    """Every lake object a subscriber of these tables cares for, with the last of its events, and the cursor behind.

    The reader is in a snapshot: what is committed later is behind the cursor.
    """
    cursor = current_cursor(reader)
    found: list[tuple[int, int]] = []
    for kind in sorted({KIND_OF[table] for table in tables}):
        rows = reader.all(LIVE_TABLES) if kind == "table" else reader.all(OBJECTS_OF_KIND, kind)
        found += [(int(row[0]), int(row[1])) for row in rows]
    return cursor, found


def object_state(reader: Reader, object_id: int) -> tuple[str, int, TableRecord | None]:
    """The kind of a lake object, the last of its events, and the table it is, all of one moment."""
    row = reader.one(OBJECT, object_id)
    if row is None:
        return "table", 0, None
    found = reader.one(TABLE_OF_OBJECT, object_id)
    table = reader.one(GET_TABLE_BY_ID, found[0]) if found is not None else None
    return str(row[0]), int(row[1]), None if table is None else table_from(table)


# --- dead letters --------------------------------------------------------------


def park(transaction: Transaction, subscriber: str, event: Event, attempts: int, error: str) -> None:
    """Put an event aside that could not be taken; once, also if nobody knew whether it was done."""
    if transaction.one(PARKED, subscriber, event.id, event.object_id) is not None:
        return
    transaction.run(
        INSERT_DEAD_LETTER,
        subscriber,
        event.object_id,
        event.object_kind,
        event.id,
        event.sequence,
        event.table,
        event.operation,
        _written(event.key),
        _written(event.row_after),
        _written(event.row_before),
        to_ms(event.occurred_at),
        attempts,
        error[:_LONGEST_ERROR],
        transaction.clock.now_ms(),
        None,
    )


def list_dead_letters(reader: Reader, after: int, most: int) -> list[DeadLetter]:
    """Dead letters, the oldest first."""
    return _named(reader, [_letter_from(row) for row in reader.all(DEAD_LETTERS, after, most)])


def _named(reader: Reader, letters: list[DeadLetter]) -> list[DeadLetter]:
    names = names_of_objects(reader, (letter.event.object_id for letter in letters))
    return [replace(letter, shown=names[letter.event.object_id]) for letter in letters]


def count_dead_letters(reader: Reader) -> dict[str, int]:
    """How many events are parked for each subscriber, and were not driven again."""
    return {name: int(number) for name, number in reader.all(COUNT_LETTERS)}


def get_dead_letter(reader: Reader, letter_id: int) -> DeadLetter:
    """One dead letter."""
    row = reader.one(DEAD_LETTER, letter_id)
    if row is None:
        raise DeadLetterNotFound(
            "there is no such dead letter", on=f"dead letter {letter_id}", remedy="List them with `dead-letters list`"
        )
    return _named(reader, [_letter_from(row)])[0]


def redrive(transaction: Transaction, letter_id: int) -> DeadLetter:
    """Ask for a refresh of the object that a dead letter is about, for its subscriber.

    Not for the event itself: others have come since, and it would be out of order.
    """
    letter = get_dead_letter(transaction, letter_id)
    ask(transaction, REFRESH, letter.subscriber, letter.event.object_id)
    transaction.run(REDRIVEN, transaction.clock.now_ms(), letter.subscriber, letter.event.object_id)
    return get_dead_letter(transaction, letter_id)


def _letter_from(row: Row) -> DeadLetter:
    (
        ident,
        subscriber,
        object_id,
        kind,
        event_id,
        sequence,
        table,
        operation,
        key,
        after,
        before,
        occurred,
        attempts,
        error,
        parked,
        redriven,
    ) = row
    event = Event(
        event_id,
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
    return DeadLetter(
        ident,
        subscriber,
        event,
        attempts,
        error,
        to_datetime(parked),
        None if redriven is None else to_datetime(redriven),
    )


def _written(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()


def _parsed(value: Any) -> Any:
    return orjson.loads(value) if isinstance(value, str) else value
