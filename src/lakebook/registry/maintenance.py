"""What components have done, what they are asked for, and where they rest.

Whoever runs the components is one process among many; the others reach it through rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.registry import schema
from lakebook.registry.commits import owner
from lakebook.registry.object_names import names_of_tables
from lakebook.registry.statements import POSTGRESQL, SQLITE, ZERO, Statement, among, bind, insert_into
from lakebook.registry.transactions import Reader, Row, Transaction

#: Every component, and every table, in a pause.
EVERY_COMPONENT = "*"
EVERY_TABLE = 0

#: Outcomes of a piece of work: done, failed, or given up in favour of a writer.
DONE, FAILED, YIELDED = "done", "failed", "yielded"

#: Kinds of requests.
REFRESH, TAG = "refresh", "tag"

#: Components that are told of events; what they did not act on while they rested, a refresh makes up for.
TOLD_OF_EVENTS = ("iceberg_updater", "compactor", "snapshotter", "orchestrator", "topic_publisher")

# An error's text may quote what it failed on.
_LONGEST_TEXT = 1000

_h = schema.maintenance_history.c
_p = schema.pauses.c
_r = schema.requests.c

INSERT_WORK = insert_into(
    schema.maintenance_history,
    "component",
    "table_id",
    "action",
    "reason",
    "outcome",
    "detail",
    "started_at",
    "finished_at",
)


def _history(*where: sa.ColumnElement[bool]) -> sa.Select[Any]:
    return (
        sa.select(schema.maintenance_history)
        .where(_h.id < bind("before"), *where)
        .order_by(_h.id.desc())
        .limit(bind("most", sa.Integer))
        .offset(ZERO)
    )


HISTORY = Statement(_history(), "before", "most")
HISTORY_OF_COMPONENT = Statement(_history(_h.component == bind("by")), "before", "by", "most")
HISTORY_OF_TABLE = Statement(_history(_h.table_id == bind("of_table")), "before", "of_table", "most")
HISTORY_OF_BOTH = Statement(
    _history(_h.component == bind("by"), _h.table_id == bind("of_table")), "before", "by", "of_table", "most"
)
PRUNE_HISTORY = Statement(
    sa.delete(schema.maintenance_history).where(
        _h.id.in_(
            sa.select(_h.id)
            .where(_h.finished_at < bind("older"))
            .order_by(_h.id)
            .limit(bind("most", sa.Integer))
            .offset(ZERO)
        )
    ),
    "older",
    "most",
)

PAUSES = Statement(sa.select(schema.pauses).order_by(_p.component, _p.table_id))
PAUSE_OF = Statement(
    sa.select(schema.pauses).where(
        _p.component.in_([sa.literal_column(f"'{EVERY_COMPONENT}'"), bind("of_component")]),
        _p.table_id.in_([ZERO, bind("of_table")]),
    ),
    "of_component",
    "of_table",
)
INSERT_PAUSE = insert_into(schema.pauses)
END_PAUSE = Statement(
    sa.delete(schema.pauses).where(_p.component == bind("of_component"), _p.table_id == bind("of_table")),
    "of_component",
    "of_table",
)

OBJECT_OF = Statement(sa.select(schema.tables.c.object_id).where(schema.tables.c.id == bind("of_table")), "of_table")

INSERT_REQUEST = insert_into(schema.requests)
REQUEST = Statement(sa.select(_r.requested_at).where(_r.request_key == bind("of_key")), "of_key")
REQUESTS_OF = Statement(
    sa.select(schema.requests)
    .where(_r.component == bind("of_component"))
    .order_by(_r.requested_at, _r.request_key)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_component",
    "most",
)
EVERY_REQUEST = Statement(
    sa.select(schema.requests).order_by(_r.requested_at, _r.request_key).limit(bind("most", sa.Integer)).offset(ZERO),
    "most",
)


def _asked_of(database: str) -> sa.Select[Any]:
    return (
        sa.select(schema.requests)
        .where(_r.kind == bind("of_kind"), among(_r.component, "of_components", database))
        .order_by(_r.requested_at, _r.request_key)
        .limit(bind("most", sa.Integer))
        .offset(ZERO)
    )


REQUESTS_OF_KIND = Statement(_asked_of(SQLITE), "of_kind", "of_components", "most", postgresql=_asked_of(POSTGRESQL))
# Later than before, also where the clock has not moved: whoever meets the former leaves this one.
ASK_AGAIN = Statement(
    sa.update(schema.requests)
    .where(_r.request_key == bind("of_key"))
    .values(
        requested_at=sa.case(
            (_r.requested_at >= bind("now"), _r.requested_at + sa.literal_column("1")), else_=bind("now")
        )
    ),
    "of_key",
    "now",
)
MEET_REQUEST = Statement(
    sa.delete(schema.requests).where(_r.request_key == bind("of_key"), _r.requested_at == bind("seen")),
    "of_key",
    "seen",
)


@dataclass(frozen=True)
class Work:
    """A piece of work that a component has done, or tried."""

    id: int
    component: str
    #: None: it was about no single table.
    table_id: int | None
    action: str
    reason: str
    #: `done`, `failed`, or `yielded` to a writer.
    outcome: str
    detail: Mapping[str, Any]
    started_at: datetime
    finished_at: datetime
    #: The table's name; none if it is gone altogether.
    table: str | None = None


@dataclass(frozen=True)
class Pause:
    """A component that rests, on all tables or on one."""

    component: str
    #: None: on every table.
    table_id: int | None
    reason: str
    paused_by: str
    since: datetime
    #: The table's name.
    table: str | None = None


@dataclass(frozen=True)
class Request:
    """Something that a process asks of whoever runs the components."""

    key: str
    kind: str
    component: str
    object_id: int
    argument: Mapping[str, Any]
    requested_at: int
    requested_by: str


# --- history -------------------------------------------------------------------


def note_work(
    transaction: Transaction,
    component: str,
    table_id: int | None,
    action: str,
    reason: str,
    outcome: str,
    detail: Mapping[str, Any],
    started_at: int,
) -> None:
    """Remember a piece of work."""
    now = max(transaction.clock.now_ms(), started_at)
    transaction.run(
        INSERT_WORK, component, table_id, action, plain(reason), outcome, plain_json(detail), started_at, now
    )


def plain_json(values: Mapping[str, Any]) -> str:
    """Values of any kind as JSON that every database can keep."""
    return orjson.dumps(plain(values)).decode()


def plain(value: Any) -> Any:
    """A value whose texts every database can keep, none of them long; what is none of JSON's kinds as a text."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if abs(value) <= schema.MAX_BIGINT else str(value)
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    text = str(value)[:_LONGEST_TEXT].replace("\0", "\\0")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def list_work(reader: Reader, component: str | None, table_id: int | None, before: int, most: int) -> list[Work]:
    """What was done, the newest first; of one component, one table, or both."""
    if component is not None and table_id is not None:
        rows = reader.all(HISTORY_OF_BOTH, before, component, table_id, most)
    elif component is not None:
        rows = reader.all(HISTORY_OF_COMPONENT, before, component, most)
    elif table_id is not None:
        rows = reader.all(HISTORY_OF_TABLE, before, table_id, most)
    else:
        rows = reader.all(HISTORY, before, most)
    return [_work_from(row) for row in rows]


def list_named_work(reader: Reader, component: str | None, table_id: int | None, before: int, most: int) -> list[Work]:
    """The same, with the names of the tables."""
    found = list_work(reader, component, table_id, before, most)
    names = names_of_tables(reader, (item.table_id for item in found))
    return [replace(item, table=names.get(item.table_id or 0)) for item in found]


def _work_from(row: Row) -> Work:
    ident, component, table_id, action, reason, outcome, detail, started, finished = row
    return Work(
        ident,
        component,
        table_id,
        action,
        reason,
        outcome,
        _parsed(detail),
        to_datetime(started),
        to_datetime(finished),
    )


def prune_work(transaction: Transaction, older_than: int, most: int) -> int:
    """Forget work of long ago; how many rows."""
    return transaction.run(PRUNE_HISTORY, older_than, most)


# --- pauses --------------------------------------------------------------------


def pause(transaction: Transaction, component: str, table_id: int | None, reason: str) -> None:
    """Let a component rest until it is told to go on."""
    end_pause(transaction, component, table_id)
    now = transaction.clock.now_ms()
    transaction.run(INSERT_PAUSE, component, table_id or EVERY_TABLE, reason, owner(), now)


def end_pause(transaction: Transaction, component: str, table_id: int | None) -> bool:
    """Let a component go on; whether it rested."""
    return transaction.run(END_PAUSE, component, table_id or EVERY_TABLE) == 1


def list_pauses(reader: Reader) -> list[Pause]:
    """Every pause there is."""
    found = [_pause_from(row) for row in reader.all(PAUSES)]
    names = names_of_tables(reader, (item.table_id for item in found))
    return [replace(item, table=names.get(item.table_id or 0)) for item in found]


def pause_of(reader: Reader, component: str, table_id: int | None = None) -> Pause | None:
    """Why a component rests now, on a table or altogether; none if it does not."""
    found = reader.all(PAUSE_OF, component, table_id or EVERY_TABLE)
    return _pause_from(found[0]) if found else None


def _pause_from(row: Row) -> Pause:
    component, table_id, reason, by, since = row
    return Pause(component, table_id or None, reason, by, to_datetime(since))


# --- requests ------------------------------------------------------------------


def request_key(kind: str, component: str, object_id: int, argument: Mapping[str, Any]) -> str:
    """What makes a request one and the same, however often it is asked."""
    return f"{kind}/{component}/{object_id}/{orjson.dumps(dict(argument), option=orjson.OPT_SORT_KEYS).decode()}"


def is_asked(reader: Reader, key: str) -> bool:
    """Whether a request is waiting to be met."""
    return reader.one(REQUEST, key) is not None


def ask(
    transaction: Transaction,
    kind: str,
    component: str,
    object_id: int = 0,
    argument: Mapping[str, Any] | None = None,
) -> str:
    """Ask something of whoever runs a component; asking the same twice is asking once. The request's key.

    Asked again while it is just being met, it is asked anew: whoever meets it saw only the former.
    """
    given = dict(argument or {})
    key = request_key(kind, component, object_id, given)
    now = transaction.clock.now_ms()
    if transaction.run(ASK_AGAIN, key, now) == 0:
        transaction.run(INSERT_REQUEST, key, kind, component, object_id, orjson.dumps(given).decode(), now, owner())
    return key


def list_requests(reader: Reader, component: str | None = None, most: int = 1000) -> list[Request]:
    """What is asked for and not met yet, the oldest first."""
    rows = reader.all(EVERY_REQUEST, most) if component is None else reader.all(REQUESTS_OF, component, most)
    return [_request_from(row) for row in rows]


def _request_from(row: Row) -> Request:
    key, kind, by, object_id, argument, at, who = row
    return Request(key, kind, by, object_id, _parsed(argument), at, who)


def requests_of_kind(reader: Reader, kind: str, components: Sequence[str], most: int = 1000) -> list[Request]:
    """What is asked of some components, of one kind, the oldest first: others cannot stand in its way."""
    return [_request_from(row) for row in reader.all(REQUESTS_OF_KIND, kind, reader.listed(components), most)]


def meet(transaction: Transaction, requests: Sequence[Request]) -> None:
    """Remove requests that were met."""
    for request in requests:
        transaction.run(MEET_REQUEST, request.key, request.requested_at)


def _parsed(value: Any) -> Any:
    return orjson.loads(value) if isinstance(value, str) else value


# --- going on ------------------------------------------------------------------


def resume_component(transaction: Transaction, component: str, table_id: int | None) -> bool:
    """Let a component go on, and have it make up for what came while it rested; whether it rested."""
    if not end_pause(transaction, component, table_id):
        return False
    # Of no table in particular: all of them.
    object_id = 0
    if table_id is not None:
        row = transaction.one(OBJECT_OF, table_id)
        if row is None:
            return True
        object_id = int(row[0])
    for name in TOLD_OF_EVENTS:
        if component in (name, EVERY_COMPONENT):
            ask(transaction, REFRESH, name, object_id)
    return True
