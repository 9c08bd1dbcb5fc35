"""Removing what nobody can ask for any more: events, commit rows, and what is only history.

Everything goes in chunks, the oldest first, each in a short transaction of its own, which looks again
whether what it removes may go. What cannot be decided stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import sqlalchemy as sa

from lakebook.clock import Enough, never
from lakebook.registry import schema
from lakebook.registry.commits import abort_forsaken, prune_commit_rows
from lakebook.registry.deliveries import events_behind, forget_progress, list_cursors
from lakebook.registry.events import CURRENT_SNAPSHOT, HORIZON, Cursor
from lakebook.registry.maintenance import REFRESH, TOLD_OF_EVENTS, ask, prune_work
from lakebook.registry.owed import prune_updates
from lakebook.registry.pg_snapshots import PgSnapshot
from lakebook.registry.pipelines import prune_batches
from lakebook.registry.registry import Registry
from lakebook.registry.schema import MAX_BIGINT
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind
from lakebook.registry.transactions import Reader, Transaction

#: Rows that one transaction looks at: few enough for its locks to be short.
CHUNK = 2000

#: Dead letters that nobody has driven again go after this.
LETTERS_KEPT_MS = 30 * 86_400_000

_e = schema.events.c
_d = schema.deliveries.c
_c = schema.cursors.c
_x = schema.dead_letters.c
_b = schema.book.c

# Of each object, the first event that some subscriber has not taken though its cursor has passed it.
# Not of those that wait for a refresh: the state they take covers every event before it.
_takes_events = sa.not_(_d.refresh)
_needed = (
    sa.select(_d.object_id, sa.func.min(_d.next_sequence).label("least"))
    .where(_takes_events)
    .group_by(_d.object_id)
    .subquery("needed")
)


def _is_free(events: Any) -> sa.ColumnElement[bool]:
    return sa.or_(_needed.c.least.is_(None), events.sequence < _needed.c.least)


def _is_passed(events: Any, database: str) -> sa.ColumnElement[bool]:
    """Whether every cursor has passed an event, by what all of them see."""
    if database == POSTGRESQL:
        # Not `xid < xmin`: an object's later event may have the smaller transaction id, if its transaction
        # began earlier and waited for the object. What a snapshot sees has no such holes, because whoever
        # waits for an object commits after the one that held it.
        snapshot = sa.cast(bind("reach", sa.Text), _PgSnapshotType())
        seen: sa.ColumnElement[bool] = sa.func.pg_visible_in_snapshot(events.xid, snapshot, type_=sa.Boolean)
        return seen
    before: sa.ColumnElement[bool] = events.id <= bind("reach")
    return before


class _PgSnapshotType(sa.types.UserDefinedType[str]):
    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "pg_snapshot"


def _window(database: str) -> sa.Select[Any]:
    # By themselves: else PostgreSQL joins all of them first, and sorts them then.
    some = (
        sa.select(schema.events)
        .where(_e.id > bind("after"))
        .order_by(_e.id)
        .limit(bind("most", sa.Integer))
        .offset(ZERO)
        .subquery("some")
    )
    passed = sa.and_(_is_passed(some.c, database), some.c.occurred_at < bind("before"))
    return (
        sa.select(
            some.c.id,
            sa.case((passed, ONE), else_=ZERO),
            sa.case((sa.and_(passed, _is_free(some.c)), ONE), else_=ZERO),
        )
        .select_from(some.outerjoin(_needed, _needed.c.object_id == some.c.object_id))
        .order_by(some.c.id)
    )


# The next events by their ids, whether each is old and passed by every cursor, and whether it may go.
WINDOW = Statement(_window(SQLITE), "reach", "before", "after", "most", postgresql=_window(POSTGRESQL))


def _prune_events(database: str) -> sa.sql.base.Executable:
    going = (
        sa.select(_e.id)
        .select_from(schema.events.outerjoin(_needed, _needed.c.object_id == _e.object_id))
        .where(
            among(_e.id, "ids", database),
            _is_passed(_e, database),
            _e.occurred_at < bind("before"),
            _is_free(_e),
        )
    )
    xid = sa.cast(_e.xid, sa.Text) if database == POSTGRESQL else _e.id
    return sa.delete(schema.events).where(_e.id.in_(going)).returning(_e.id, xid)


PRUNE_EVENTS = Statement(_prune_events(SQLITE), "ids", "reach", "before", postgresql=_prune_events(POSTGRESQL))
CLAIM_HORIZON = Statement(sa.select(_b.epoch, _b.events_horizon).with_for_update(key_share=True))
MOVE_HORIZON = Statement(sa.update(schema.book).values(events_horizon=bind("new_horizon")), "new_horizon")
DROP_CURSOR = Statement(
    sa.delete(schema.cursors).where(_c.subscriber == bind("name"), _c.position == bind("seen")), "name", "seen"
)
POSITION = Statement(sa.select(_c.position).where(_c.subscriber == bind("name")), "name")
OLDEST_AFTER = Statement(
    sa.select(_e.occurred_at).where(_e.id > bind("after")).order_by(_e.id).limit(ONE).offset(ZERO), "after"
)
OLDEST_SINCE = Statement(
    sa.text(
        "SELECT min(occurred_at) FROM events WHERE xid >= pg_snapshot_xmin(CAST(:since AS pg_snapshot))"
        " AND NOT pg_visible_in_snapshot(xid, CAST(:since AS pg_snapshot))"
    ),
    "since",
)
_first = (
    sa.select(sa.func.min(_e.sequence))
    .where(_e.object_id == _d.object_id, _e.sequence >= _d.next_sequence)
    .correlate(schema.deliveries)
    .scalar_subquery()
)
#: Of tables that are gone.
DROP_PAUSES = Statement(
    sa.delete(schema.pauses).where(
        schema.pauses.c.table_id != ZERO,
        schema.pauses.c.table_id.not_in(sa.select(schema.tables.c.id).where(schema.tables.c.deleted_at.is_(None))),
    )
)
#: To tag what was loaded so long ago.
DROP_REQUESTS = Statement(
    sa.delete(schema.requests).where(
        schema.requests.c.kind == sa.literal_column("'tag'"), schema.requests.c.requested_at < bind("older")
    ),
    "older",
)
_orphaned = _d.subscriber.not_in(sa.select(schema.cursors.c.subscriber))
ANY_ORPHANED_LANE = Statement(sa.select(_d.object_id).where(_orphaned).limit(ONE).offset(ZERO))
DROP_ORPHANED_LANES = Statement(sa.delete(schema.deliveries).where(_orphaned))
# The lane of a subscriber whose first event is the oldest.
OLDEST_LANE = Statement(
    sa.select(_d.object_id, _d.next_sequence, _e.occurred_at)
    .select_from(schema.deliveries.join(schema.events, sa.and_(_e.object_id == _d.object_id, _e.sequence == _first)))
    .where(_d.subscriber == bind("name"), _takes_events)
    .order_by(_e.occurred_at)
    .limit(ONE)
    .offset(ZERO),
    "name",
)
LANE_AT = Statement(
    sa.select(_d.object_id)
    .where(_d.subscriber == bind("name"), _d.object_id == bind("of_object"), _d.next_sequence == bind("seen"))
    .with_for_update(),
    "name",
    "of_object",
    "seen",
)
COUNT_IN_LANES = Statement(
    sa.select(sa.func.count())
    .select_from(
        schema.deliveries.join(schema.events, sa.and_(_e.object_id == _d.object_id, _e.sequence >= _d.next_sequence))
    )
    .where(_d.subscriber == bind("name"), _takes_events, _e.sequence <= _d.known_sequence),
    "name",
)


def _prune_letters(*where: sa.ColumnElement[bool]) -> sa.Delete:
    some = sa.select(_x.id).where(*where).order_by(_x.id).limit(bind("most", sa.Integer)).offset(ZERO)
    return sa.delete(schema.dead_letters).where(_x.id.in_(some))


PRUNE_LETTERS = Statement(
    _prune_letters(sa.or_(_x.redriven_at < bind("redriven_before"), _x.parked_at < bind("parked_before"))),
    "redriven_before",
    "parked_before",
    "most",
)


# --- events --------------------------------------------------------------------


def prune_events(registry: Registry, enough: Enough = never) -> int:
    """Remove events that are old, that every cursor has passed, and that no delivery waits for; how many."""
    before = registry.clock.now_ms() - round(registry.settings.events_kept * 1000)
    after = pruned = 0
    while True:
        start = after
        window = registry.read_with(lambda reader: _look(reader, before, start), plan_once=False)  # noqa: B023
        # Where none is old and passed, what comes later is not either, or comes next time.
        if not any(passed for _, passed, _ in window):
            return pruned
        ids = [number for number, _, free in window if free]
        if ids:
            pruned += registry.write(lambda transaction: _remove(transaction, ids, before))  # noqa: B023
        after = window[-1][0]
        if enough():
            return pruned


def _look(reader: Reader, before: int, after: int) -> Sequence[Any]:
    return reader.all(WINDOW, _reach(reader), before, after, CHUNK)


def _remove(transaction: Transaction, ids: Sequence[int], before: int) -> int:
    """Remove those of some events that may go, and move the horizon behind them."""
    # One at a time: two would each put the horizon where the other's events are still before it.
    claimed = transaction.one(CLAIM_HORIZON)
    assert claimed is not None
    # The cursors first. A cursor and what it has passed without taking are written in one transaction: who
    # sees the new cursor here sees that too in the statement below.
    reach = _reach(transaction)
    gone = transaction.all(PRUNE_EVENTS, transaction.listed(ids), reach, before)
    if gone:
        horizon = Cursor.parse(claimed[1]) if claimed[1] is not None else None
        new = _horizon_behind(transaction, claimed[0], horizon, reach, gone)
        transaction.run(MOVE_HORIZON, str(new))
    return len(gone)


def _reach(reader: Reader) -> Any:
    """Up to where every cursor has passed: an id, or a snapshot. Without a cursor, everything that is committed."""
    cursors = [cursor for _, cursor in _cursors(reader)]
    if reader.kind != POSTGRESQL:
        return min((cursor.after for cursor in cursors), default=MAX_BIGINT)
    if not cursors:
        row = reader.one(CURRENT_SNAPSHOT)
        assert row is not None
        return row[0]
    # Of one that is in the middle of pages, what it has read of them counts as not passed.
    return str(reduce(PgSnapshot.shared, (_snapshot(cursor.since) for cursor in cursors)))


def _cursors(reader: Reader) -> list[tuple[str, Cursor]]:
    """Subscribers and their cursors. One of another epoch is refused when it is used, and needs nothing."""
    book = reader.one(HORIZON)
    assert book is not None
    here = (book[0], reader.kind)
    return [(name, cursor) for name, cursor, _ in list_cursors(reader) if (cursor.epoch, cursor.kind) == here]


def _snapshot(text: str) -> PgSnapshot:
    found = PgSnapshot.parse(text)
    assert found is not None
    return found


def _horizon_behind(
    reader: Reader, epoch: str, horizon: Cursor | None, reach: Any, gone: Sequence[Sequence[Any]]
) -> Cursor:
    """The horizon behind the present one and behind events that have gone."""
    last = max(int(row[1]) for row in gone)
    if reader.kind != POSTGRESQL:
        return Cursor(epoch, reader.kind, after=max(last, horizon.after if horizon is not None else 0))
    # No further than the last of them: whoever has read a moment ago, and has not told so, stands behind it.
    new = _snapshot(reach).below(last + 1)
    if horizon is not None:
        new = new.joined(_snapshot(horizon.since))
    return Cursor(epoch, reader.kind, since=str(new))


def drop_laggards(registry: Registry) -> list[str]:
    """Take the cursors of subscribers that are too far behind; who they are.

    They are refreshed when they come back. One that is just being delivered to is asked to begin anew.
    """
    oldest = registry.clock.now_ms() - round(registry.settings.events_oldest * 1000)
    most = registry.settings.events_most
    found = []
    for name, cursor in registry.read_with(_cursors):
        if registry.read_with(lambda reader: _is_behind(reader, cursor, oldest, most)):  # noqa: B023
            dropped = registry.write(lambda transaction: _drop_at(transaction, name, cursor))  # noqa: B023
        else:
            dropped = _drop_by_lane(registry, name, oldest, most)
        if dropped:
            found.append(name)
    # Of who has no cursor: nobody goes on from there.
    if registry.one(ANY_ORPHANED_LANE) is not None:
        registry.write(lambda transaction: transaction.run(DROP_ORPHANED_LANES))
    return found


def _is_behind(reader: Reader, cursor: Cursor, oldest: int, most: int) -> bool:
    if reader.kind == POSTGRESQL:
        row = reader.one(OLDEST_SINCE, cursor.since)
    else:
        row = reader.one(OLDEST_AFTER, cursor.after)
    return _is_before(row, oldest) or events_behind(reader, cursor) > most


def _is_before(row: Sequence[Any] | None, moment: int) -> bool:
    return row is not None and row[-1] is not None and row[-1] < moment


def _drop_at(transaction: Transaction, name: str, cursor: Cursor) -> bool:
    # Not if it has moved meanwhile: then it gets on, and is looked at again.
    return transaction.run(DROP_CURSOR, name, str(cursor)) == 1 and _begin_anew(transaction, name)


def _drop_by_lane(registry: Registry, name: str, oldest: int, most: int) -> bool:
    """Drop a subscriber that has left too much, or something for too long, of what its cursor has passed."""

    def look(reader: Reader) -> Sequence[Any] | None:
        lane = reader.one(OLDEST_LANE, name)
        if lane is None or _is_before(lane, oldest):
            return lane
        number = reader.one(COUNT_IN_LANES, name)
        return lane if number is not None and number[0] > most else None

    def drop(transaction: Transaction, lane: Sequence[Any]) -> bool:
        # Not if it has moved meanwhile.
        if transaction.one(LANE_AT, name, lane[0], lane[1]) is None:
            return False
        position = transaction.one(POSITION, name)
        if position is not None:
            transaction.run(DROP_CURSOR, name, position[0])
        return _begin_anew(transaction, name)

    lane = registry.read_with(look)
    return lane is not None and registry.write(lambda transaction: drop(transaction, lane))


def _begin_anew(transaction: Transaction, name: str) -> bool:
    forget_progress(transaction, name)
    if name in TOLD_OF_EVENTS:
        # Whoever delivers to it just now goes by what it has in memory.
        ask(transaction, REFRESH, name)
    return True


# --- commit rows ---------------------------------------------------------------


def prune_commits(registry: Registry, enough: Enough = never) -> dict[str, int]:
    """Remove commit rows that nobody can ask for any more, and settle those that nobody will; how many of each."""
    done = {"aborted": 0, "fences": 0, "commits": 0}
    steps: dict[str, Callable[[], int]] = {
        "aborted": lambda: registry.write(lambda transaction: abort_forsaken(transaction, CHUNK)),
        "fences": lambda: registry.prune_fences(CHUNK),
        "commits": lambda: registry.write(lambda transaction: prune_commit_rows(transaction, CHUNK)),
    }
    for name, step in steps.items():
        done[name] = _in_chunks(step, enough)
    return done


def _in_chunks(step: Callable[[], int], enough: Enough) -> int:
    total = 0
    while True:
        number = step()
        total += number
        if number == 0 or enough():
            return total


# --- history -------------------------------------------------------------------


def prune_letters(transaction: Transaction, redriven_before: int, parked_before: int, most: int) -> int:
    """Remove dead letters that were driven again, or were parked, before a time; how many."""
    return transaction.run(PRUNE_LETTERS, redriven_before, parked_before, most)


def prune_history(registry: Registry, enough: Enough = never) -> dict[str, int]:
    """Remove what is only history and old: work of components, updates that are completed, dead letters."""
    now = registry.clock.now_ms()
    older = now - round(registry.settings.maintenance_kept * 1000)
    parked = now - LETTERS_KEPT_MS
    steps: dict[str, Callable[[Transaction], int]] = {
        "work": lambda transaction: prune_work(transaction, older, CHUNK),
        "updates": lambda transaction: prune_updates(transaction, older, CHUNK),
        "letters": lambda transaction: prune_letters(transaction, older, parked, CHUNK),
        "pauses": lambda transaction: transaction.run(DROP_PAUSES),
        "requests": lambda transaction: transaction.run(DROP_REQUESTS, older),
        "batches": lambda transaction: prune_batches(transaction, older),
    }
    return {name: _in_chunks(lambda: registry.write(step), enough) for name, step in steps.items()}  # noqa: B023
