"""What is owed to Iceberg, per version of each table, and what became of it.

pending → processing → completed or failed, and failed → processing. A version is completed in the
transaction that moves the pointer over it, whoever publishes it, and what is entered late is entered as
what it is. Both happen under the table's lock, so that the pointer and these rows never disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.registry import schema
from lakebook.registry.object_names import names_of_tables
from lakebook.registry.statements import ONE, ZERO, Statement, bind, insert_into
from lakebook.registry.transactions import Reader, Row, Transaction

PENDING, PROCESSING, COMPLETED, FAILED = "pending", "processing", "completed", "failed"
STATES = (PENDING, PROCESSING, COMPLETED, FAILED)
#: In a question for updates: in any state but completed.
OWED = "owed"

# Every version of a failed attempt has it.
_LONGEST_ERROR = 500
_PUBLISHED_FORMAT = "parquet"

_u = schema.metadata_updates.c
_t = schema.tables.c
_i = schema.iceberg_tables.c
_v = schema.table_versions.c


def _word(text: str) -> sa.ColumnElement[str]:
    """A constant that the planner sees: a bound one would hide that the partial index is enough."""
    return sa.literal_column(f"'{text}'")


_is_owed = _u.state != _word(COMPLETED)

TABLE_STATE = Statement(
    sa.select(_t.object_id, _t.version, _t.format, _t.deleted_at).where(_t.id == bind("of_table")), "of_table"
)
PUBLISHED_VERSION = Statement(sa.select(_i.version).where(_i.table_id == bind("of_table")), "of_table")
ENTERED = Statement(
    sa.select(_u.version).where(
        _u.table_id == bind("of_table"), _u.version >= bind("first"), _u.version <= bind("last")
    ),
    "of_table",
    "first",
    "last",
)
INSERT_UPDATE = insert_into(schema.metadata_updates)
VERSIONS_ABOVE = Statement(
    sa.select(_v.version)
    .where(_v.table_id == bind("of_table"), _v.version > bind("after"))
    .order_by(_v.version)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "after",
    "most",
)
_first_owed = (
    sa.select(_u.version)
    .where(_u.table_id == bind("of_table"), _is_owed)
    .order_by(_u.version)
    .limit(bind("most", sa.Integer))
    .offset(ZERO)
    .subquery()
)
OWED_UPTO = Statement(sa.select(sa.func.max(_first_owed.c.version)), "of_table", "most")


def _move(*where: sa.ColumnElement[bool], **values: Any) -> sa.Update:
    return sa.update(schema.metadata_updates).where(_u.table_id == bind("of_table"), *where).values(values)


_upto = _u.version <= bind("upto")
BEGIN = Statement(
    _move(
        _upto,
        _is_owed,
        _u.state != _word(PROCESSING),
        state=_word(PROCESSING),
        attempts=_u.attempts + ONE,
        started_at=bind("now"),
        finished_at=sa.null(),
    ),
    "now",
    "of_table",
    "upto",
)
FAIL = Statement(
    _move(
        _upto,
        _is_owed,
        _u.state == _word(PROCESSING),
        state=_word(FAILED),
        last_error=bind("reason"),
        finished_at=bind("now"),
    ),
    "reason",
    "now",
    "of_table",
    "upto",
)
COMPLETE = Statement(
    _move(_upto, _is_owed, state=_word(COMPLETED), last_error=sa.null(), finished_at=bind("now")),
    "now",
    "of_table",
    "upto",
)
REOPEN = Statement(
    _move(_u.version > bind("above"), _u.state == _word(COMPLETED), state=_word(PENDING), finished_at=sa.null()),
    "of_table",
    "above",
)
RESUME = Statement(_move(_is_owed, _u.state == _word(PROCESSING), state=_word(PENDING)), "of_table")
FORGET_UPDATES_OF = Statement(sa.delete(schema.metadata_updates).where(_u.table_id == bind("of_table")), "of_table")
FORGET_UPDATES_OF_DROPPED = Statement(
    sa.delete(schema.metadata_updates).where(
        _u.table_id.in_(sa.select(_t.id).where(_t.object_id == bind("of_object"), _t.deleted_at.is_not(None)))
    ),
    "of_object",
)


_live_table = (
    sa.select(ONE).select_from(schema.tables).where(_t.id == _u.table_id, _t.deleted_at.is_(None))
).correlate(schema.metadata_updates)


def _prune(*where: sa.ColumnElement[bool]) -> sa.Delete:
    some = sa.select(_u.table_id, _u.version).where(*where).limit(bind("most", sa.Integer)).offset(ZERO)
    return sa.delete(schema.metadata_updates).where(sa.tuple_(_u.table_id, _u.version).in_(some))


PRUNE_COMPLETED = Statement(_prune(_u.state == _word(COMPLETED), _u.finished_at < bind("older")), "older", "most")
# Completed ones of such tables go by their age.
PRUNE_GONE = Statement(_prune(_is_owed, sa.not_(sa.exists(_live_table))), "most")


def _listing(*where: sa.ColumnElement[bool]) -> sa.Select[Any]:
    return (
        sa.select(schema.metadata_updates)
        .where(
            sa.tuple_(_u.table_id, _u.version) > sa.tuple_(bind("after_table"), bind("after_version")),
            *where,
        )
        .order_by(_u.table_id, _u.version)
        .limit(bind("most", sa.Integer))
        .offset(ZERO)
    )


_of_table, _in_state = _u.table_id == bind("of_table"), _u.state == bind("of_state")
OWED_UPDATES = Statement(_listing(_is_owed), "after_table", "after_version", "most")
OWED_UPDATES_OF_TABLE = Statement(_listing(_of_table, _is_owed), "after_table", "after_version", "of_table", "most")
UPDATES = Statement(_listing(), "after_table", "after_version", "most")
UPDATES_OF_TABLE = Statement(_listing(_of_table), "after_table", "after_version", "of_table", "most")
UPDATES_IN_STATE = Statement(_listing(_in_state), "after_table", "after_version", "of_state", "most")
UPDATES_OF_BOTH = Statement(
    _listing(_of_table, _in_state), "after_table", "after_version", "of_table", "of_state", "most"
)
SUMMARY = Statement(
    sa.select(
        _u.table_id,
        _u.state,
        sa.func.count(),
        sa.func.min(_u.version),
        sa.func.max(_u.version),
        sa.func.min(_u.created_at),
    )
    .where(_is_owed)
    .group_by(_u.table_id, _u.state)
    .order_by(_u.table_id, _u.state)
)


@dataclass(frozen=True)
class MetadataUpdate:
    """A version that was or is owed to Iceberg."""

    table_id: int
    version: int
    #: `pending`, `processing`, `completed` or `failed`.
    state: str
    attempts: int
    last_error: str | None
    created_at: datetime
    #: When the last attempt began.
    started_at: datetime | None
    #: When it was published, or when the last attempt failed.
    finished_at: datetime | None
    #: The table's name; none if it is gone altogether.
    table: str | None = None


@dataclass(frozen=True)
class Owed:
    """How many versions of a table are owed, in one state."""

    table_id: int
    state: str
    count: int
    first_version: int
    last_version: int
    #: When the oldest of them was written down.
    oldest: datetime


@dataclass(frozen=True)
class _Locked:
    """A table under its lock."""

    version: int
    format: str
    is_dropped: bool


def _locked(transaction: Transaction, table_id: int) -> _Locked | None:
    """A table under the lock that its pointer moves under; none if it is gone altogether."""
    found = transaction.one(TABLE_STATE, table_id)
    if found is None:
        return None
    transaction.lock(found[0])
    row = transaction.one(TABLE_STATE, table_id)
    return None if row is None else _Locked(row[1], row[2], row[3] is not None)


# --- writing down what is owed ----------------------------------------------------


def owe(transaction: Transaction, table_id: int, versions: Iterable[int]) -> int:
    """Write versions down that are not yet; those that are published already, as completed. How many.

    Of a dropped table nothing is owed any more.
    """
    table = _locked(transaction, table_id)
    if table is None or table.is_dropped:
        transaction.run(FORGET_UPDATES_OF, table_id)
        return 0
    if table.format != _PUBLISHED_FORMAT:
        return 0
    return _enter(transaction, table_id, versions)


def owe_unpublished(transaction: Transaction, table_id: int, after: int, most: int) -> int | None:
    """Write down versions above `after` that are not published, at most so many; the last, if there may be more."""
    table = _locked(transaction, table_id)
    if table is None or table.is_dropped or table.format != _PUBLISHED_FORMAT:
        return None
    least = max(after, _published(transaction, table_id))
    versions = [int(row[0]) for row in transaction.all(VERSIONS_ABOVE, table_id, least, most)]
    _enter(transaction, table_id, versions)
    return versions[-1] if len(versions) == most else None


def _published(reader: Reader, table_id: int) -> int:
    """The newest version that is published; -1 if none is."""
    row = reader.one(PUBLISHED_VERSION, table_id)
    return -1 if row is None else int(row[0])


def _enter(transaction: Transaction, table_id: int, versions: Iterable[int]) -> int:
    wanted = sorted(set(versions))
    if not wanted:
        return 0
    entered = {row[0] for row in transaction.all(ENTERED, table_id, wanted[0], wanted[-1])}
    published = _published(transaction, table_id)
    now = transaction.clock.now_ms()
    rows = [
        (table_id, version, COMPLETED, 0, None, now, None, now)
        if version <= published
        else (table_id, version, PENDING, 0, None, now, None, None)
        for version in wanted
        if version not in entered
    ]
    transaction.insert_many(INSERT_UPDATE, rows)
    return len(rows)


# --- what becomes of it -----------------------------------------------------------


def begin_updates(transaction: Transaction, table_id: int, upto: int) -> int:
    """Say that somebody has begun to publish these versions; how many of them were waiting."""
    if _locked(transaction, table_id) is None:
        return 0
    return transaction.run(BEGIN, transaction.clock.now_ms(), table_id, upto)


def fail_updates(transaction: Transaction, table_id: int, upto: int, error: str) -> int:
    """Say why versions that somebody had begun to publish are not published; how many."""
    if _locked(transaction, table_id) is None:
        return 0
    return transaction.run(FAIL, error[:_LONGEST_ERROR], transaction.clock.now_ms(), table_id, upto)


def complete_updates(transaction: Transaction, table_id: int, version: int) -> int:
    """Say that everything up to a version is published. The caller moves the pointer in this transaction."""
    return transaction.run(COMPLETE, transaction.clock.now_ms(), table_id, version)


def reopen_updates(transaction: Transaction, table_id: int, version: int) -> int:
    """Say that nothing above a version is published any more: all of it is being published anew."""
    return transaction.run(REOPEN, table_id, version)


def resume_updates(transaction: Transaction, table_id: int) -> int:
    """Let versions wait again that somebody had begun to publish, and may have died over; how many."""
    if _locked(transaction, table_id) is None:
        return 0
    return transaction.run(RESUME, table_id)


def forget_dropped(transaction: Transaction, object_id: int) -> int:
    """Forget what is owed of the table that a lake object was; how many rows."""
    return transaction.run(FORGET_UPDATES_OF_DROPPED, object_id)


def prune_updates(transaction: Transaction, older_than: int, most: int) -> int:
    """Remove what was completed long ago, and what is owed of tables that are gone; how many rows."""
    done = transaction.run(PRUNE_COMPLETED, older_than, most)
    return done + transaction.run(PRUNE_GONE, most)


# --- reading ----------------------------------------------------------------------


def owed_upto(reader: Reader, table_id: int, most: int) -> int | None:
    """The last of the first so many versions that are written down as owed; none if none is."""
    row = reader.one(OWED_UPTO, table_id, most)
    return None if row is None or row[0] is None else int(row[0])


def list_updates(
    reader: Reader, table_id: int | None, state: str | None, after: tuple[int, int] | None, most: int
) -> list[MetadataUpdate]:
    """Updates of a table, in a state, or both, in the order of tables and versions."""
    # Version 0 is the first there is.
    start = after if after is not None else (table_id or 0, -1)
    if state == OWED:
        rows = (
            reader.all(OWED_UPDATES, *start, most)
            if table_id is None
            else reader.all(OWED_UPDATES_OF_TABLE, *start, table_id, most)
        )
    elif table_id is not None and state is not None:
        rows = reader.all(UPDATES_OF_BOTH, *start, table_id, state, most)
    elif table_id is not None:
        rows = reader.all(UPDATES_OF_TABLE, *start, table_id, most)
    elif state is not None:
        rows = reader.all(UPDATES_IN_STATE, *start, state, most)
    else:
        rows = reader.all(UPDATES, *start, most)
    return [_update_from(row) for row in rows]


def list_named_updates(
    reader: Reader, table_id: int | None, state: str | None, after: tuple[int, int] | None, most: int
) -> list[MetadataUpdate]:
    """The same, with the names of the tables."""
    found = list_updates(reader, table_id, state, after, most)
    names = names_of_tables(reader, (item.table_id for item in found))
    return [replace(item, table=names.get(item.table_id)) for item in found]


def _update_from(row: Row) -> MetadataUpdate:
    table_id, version, state, attempts, error, created, started, finished = row
    return MetadataUpdate(
        table_id,
        version,
        state,
        attempts,
        error,
        to_datetime(created),
        None if started is None else to_datetime(started),
        None if finished is None else to_datetime(finished),
    )


def owed_summary(reader: Reader) -> list[Owed]:
    """What is owed now, per table and state; what is completed is not counted."""
    return [
        Owed(table_id, state, count, first, last, to_datetime(oldest))
        for table_id, state, count, first, last, oldest in reader.all(SUMMARY)
    ]
