"""Views: what they are, the topics and tables that they read, and the tables that hold their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import ViewAlreadyExists, ViewChanged, ViewNotFound
from lakebook.names import shown
from lakebook.registry import schema
from lakebook.registry.freshness import TABLE, TOPIC, mark_all_stale, milliseconds_of
from lakebook.registry.statements import ZERO, Statement, bind, insert_into
from lakebook.registry.tables import (
    GET_NAMESPACE,
    GET_TABLE_BY_ID,
    NewTable,
    TableRecord,
    create_namespace,
    create_table,
    drop_table,
    table_from,
)
from lakebook.registry.transactions import Reader, Row, Transaction

#: The namespace in which the tables of views are.
NAMESPACE = "lakebook_views"
#: The instance of a view that has no others.
GLOBAL = "global"
ACTIVE, PAUSED = "active", "paused"

_v = schema.views.c
_i = schema.view_instances.c
_s = schema.view_sources.c
_t = schema.tables.c
_p = schema.partitions.c
_r = schema.lakehouse_partitions.c

_VIEW = tuple(schema.views.columns)
GET_VIEW = Statement(sa.select(*_VIEW).where(_v.name == bind("name")), "name")
GET_VIEW_BY_ID = Statement(sa.select(*_VIEW).where(_v.id == bind("of_view")), "of_view")
# Held by who changes a view or takes a claim on it: after the sources' objects, before the view's own tables.
CLAIM_VIEW = Statement(sa.select(*_VIEW).where(_v.id == bind("of_view")).with_for_update(key_share=True), "of_view")
LIST_VIEWS = Statement(
    sa.select(*_VIEW).where(_v.name > bind("after")).order_by(_v.name).limit(bind("most", sa.Integer)).offset(ZERO),
    "after",
    "most",
)
INSERT_VIEW = Statement(
    sa.insert(schema.views).values({column.name: bind(column.name) for column in _VIEW[1:]}).returning(_v.id),
    *(str(column.name) for column in _VIEW[1:]),
)
CHANGE_VIEW = Statement(
    sa.update(schema.views)
    .where(_v.id == bind("of_view"))
    .values(definition=bind("given", _v.definition.type), schema_hash=bind("hash"), updated_at=bind("now")),
    "given",
    "hash",
    "now",
    "of_view",
)
SET_STATE = Statement(
    sa.update(schema.views).where(_v.id == bind("of_view")).values(state=bind("wanted"), updated_at=bind("now")),
    "wanted",
    "now",
    "of_view",
)
NOTE_FAILURE = Statement(
    sa.update(schema.views)
    .where(_v.id == bind("of_view"))
    .values(failures=_v.failures + 1, last_error=bind("error"), failed_at=bind("now"), retry_at=bind("again")),
    "error",
    "now",
    "again",
    "of_view",
)
NOTE_SUCCESS = Statement(
    sa.update(schema.views)
    .where(_v.id == bind("of_view"))
    .values(failures=0, last_error=sa.null(), failed_at=sa.null(), retry_at=sa.null()),
    "of_view",
)
DELETE_VIEW = Statement(sa.delete(schema.views).where(_v.id == bind("of_view")), "of_view")
DELETE_SOURCES = Statement(sa.delete(schema.view_sources).where(_s.view_id == bind("of_view")), "of_view")
DELETE_INSTANCES = Statement(sa.delete(schema.view_instances).where(_i.view_id == bind("of_view")), "of_view")
DELETE_CLAIMS = Statement(
    sa.delete(schema.view_claims).where(schema.view_claims.c.view_id == bind("of_view")), "of_view"
)
DELETE_RANGES = Statement(sa.delete(schema.lakehouse_partitions).where(_r.view_set_name == bind("name")), "name")
INSERT_SOURCE = insert_into(schema.view_sources)
INSERT_INSTANCE = insert_into(schema.view_instances)
SOURCES_OF = Statement(
    sa.select(_s.name, _s.kind, _s.source_id, _s.event_time, _s.field_id)
    .where(_s.view_id == bind("of_view"))
    .order_by(_s.name),
    "of_view",
)
INSTANCES_OF = Statement(
    sa.select(_i.instance, _i.table_id).where(_i.view_id == bind("of_view")).order_by(_i.instance), "of_view"
)
TABLE_OF = Statement(
    sa.select(_i.table_id).where(_i.view_id == bind("of_view"), _i.instance == bind("instance")),
    "of_view",
    "instance",
)
OBJECT_OF_TABLE = Statement(sa.select(_t.object_id).where(_t.id == bind("of_table")), "of_table")
OBJECT_OF_TOPIC = Statement(
    sa.select(schema.topics.c.object_id).where(schema.topics.c.id == bind("of_topic")), "of_topic"
)
OBJECTS_OF_TOPIC = Statement(sa.select(_p.object_id).where(_p.topic_id == bind("of_topic")), "of_topic")


@dataclass(frozen=True)
class Source:
    """A topic or a table that a view reads."""

    #: As the query spells it.
    name: str
    kind: str
    id: int
    #: The column that is its event time and, of a table, the column's field id.
    event_time: str
    field_id: int | None


@dataclass(frozen=True)
class ViewRecord:
    """A view as the registry has it."""

    id: int
    name: str
    definition: Mapping[str, Any]
    schema_hash: str
    state: str
    failures: int
    last_error: str | None
    failed_at: datetime | None
    retry_at: datetime | None
    created_at: datetime
    updated_at: datetime
    sources: tuple[Source, ...] = ()

    @property
    def shown(self) -> str:
        """The view as an error names it."""
        return f"view {self.name}"


def view_not_found(name: object) -> ViewNotFound:
    """The error for a view that is not there."""
    return ViewNotFound(
        f"there is no view {shown(name)}", on="view", remedy="`lakebook views list` shows which there are"
    )


def _view_from(reader: Reader, row: Row) -> ViewRecord:
    ident, name, definition, schema_hash, state, failures, error, *times = row
    parsed = orjson.loads(definition) if isinstance(definition, str) else dict(definition)
    failed, retry = (None if time is None else to_datetime(time) for time in times[:2])
    created, updated = map(to_datetime, times[2:])
    sources = tuple(Source(*source) for source in reader.all(SOURCES_OF, ident))
    return ViewRecord(
        ident, name, parsed, schema_hash, state, failures, error, failed, retry, created, updated, sources
    )


# --- views ---------------------------------------------------------------------


def create_view(
    transaction: Transaction, name: str, definition: Mapping[str, Any], schema_hash: str, sources: Sequence[Source]
) -> ViewRecord:
    """Create a view; its tables are made with its first ranges."""
    if transaction.one(GET_VIEW, name) is not None:
        raise ViewAlreadyExists(f"a view {name!r} exists already", on=f"view {name}", remedy="Choose another name")
    now = transaction.clock.now_ms()
    text = orjson.dumps(dict(definition)).decode()
    row = transaction.one(INSERT_VIEW, name, text, schema_hash, ACTIVE, 0, None, None, None, now, now)
    assert row is not None
    _set_sources(transaction, int(row[0]), sources)
    return get_view(transaction, name)


def _set_sources(transaction: Transaction, view_id: int, sources: Sequence[Source]) -> None:
    transaction.run(DELETE_SOURCES, view_id)
    rows = [(view_id, item.name, item.kind, item.id, item.event_time, item.field_id) for item in sources]
    transaction.insert_many(INSERT_SOURCE, rows)


def get_view(reader: Reader, name: str) -> ViewRecord:
    """A view by its name."""
    row = reader.one(GET_VIEW, name)
    if row is None:
        raise view_not_found(name)
    return _view_from(reader, row)


def find_view(reader: Reader, name: str) -> ViewRecord | None:
    """A view by its name, if there is one."""
    row = reader.one(GET_VIEW, name)
    return None if row is None else _view_from(reader, row)


def current_view(reader: Reader, view: ViewRecord) -> ViewRecord:
    """The present state of a view that was looked up before."""
    row = reader.one(GET_VIEW_BY_ID, view.id)
    if row is None:
        raise view_not_found(view.name)
    return _view_from(reader, row)


def locked_view(transaction: Transaction, view: ViewRecord) -> ViewRecord:
    """The present state of a view, whose row this transaction then holds."""
    row = transaction.one(CLAIM_VIEW, view.id)
    if row is None:
        raise view_not_found(view.name)
    return _view_from(transaction, row)


def list_views(reader: Reader, after: str, most: int) -> list[ViewRecord]:
    """Views in the order of their names."""
    return [_view_from(reader, row) for row in reader.all(LIST_VIEWS, after, most)]


def alter_view(
    transaction: Transaction,
    view: ViewRecord,
    definition: Mapping[str, Any],
    schema_hash: str,
    sources: Sequence[Source],
) -> ViewRecord:
    """Give a view, as it was looked up before, another definition. What is built stays until it is built anew."""
    present = locked_view(transaction, view)
    if present.definition != view.definition:
        raise ViewChanged(
            "its definition has changed meanwhile", on=view.shown, remedy="Look at the new one and repeat the change"
        )
    if _watched(present.sources) != _watched(sources):
        # Of what was not among its sources, or was another thing of that name, no commit has marked anything.
        mark_all_stale(transaction, view.id, view.name)
    text = orjson.dumps(dict(definition)).decode()
    transaction.run(CHANGE_VIEW, text, schema_hash, transaction.clock.now_ms(), view.id)
    _set_sources(transaction, view.id, sources)
    return current_view(transaction, view)


def _watched(sources: Sequence[Source]) -> set[tuple[str, str, int, int | None]]:
    """What commits are looked at for, and by which name the query reads it."""
    return {(item.name, item.kind, item.id, item.field_id) for item in sources}


def set_view_state(transaction: Transaction, view: ViewRecord, state: str) -> bool:
    """Let upkeep rest or go on; whether that changes anything."""
    if locked_view(transaction, view).state == state:
        return False
    transaction.run(SET_STATE, state, transaction.clock.now_ms(), view.id)
    if state == ACTIVE:
        transaction.run(NOTE_SUCCESS, view.id)
    return True


def note_failure(transaction: Transaction, view: ViewRecord, error: str, pause_ms: int) -> None:
    """Write down that the upkeep of a view has failed, and when it is tried again."""
    now = transaction.clock.now_ms()
    transaction.run(NOTE_FAILURE, error, now, now + pause_ms, view.id)


def note_success(transaction: Transaction, view: ViewRecord) -> None:
    """Forget former failures."""
    transaction.run(NOTE_SUCCESS, view.id)


def drop_view(transaction: Transaction, view: ViewRecord) -> int:
    """Remove a view, its ranges and its tables; how many ranges. The tables' files go later."""
    locked_view(transaction, view)
    # Under the lock, under which a build makes them.
    tables = view_tables(transaction, view)
    transaction.lock(*(table.object_id for table in tables.values()))
    for table in tables.values():
        drop_table(transaction, table, by_view=True)
    # Claims before ranges, as everybody does.
    transaction.run(DELETE_CLAIMS, view.id)
    ranges = transaction.run(DELETE_RANGES, view.name)
    for statement in (DELETE_INSTANCES, DELETE_SOURCES, DELETE_VIEW):
        transaction.run(statement, view.id)
    return ranges


# --- tables --------------------------------------------------------------------


def table_name(view: str, instance: str) -> str:
    """The name of the table of an instance."""
    return view if instance == GLOBAL else f"{view}.{instance}"


def view_tables(reader: Reader, view: ViewRecord) -> dict[str, TableRecord]:
    """The tables of a view by its instances, as far as anything was built."""
    rows = {instance: reader.one(GET_TABLE_BY_ID, table_id) for instance, table_id in reader.all(INSTANCES_OF, view.id)}
    return {instance: table_from(row) for instance, row in rows.items() if row is not None}


def view_table(reader: Reader, view: ViewRecord, instance: str) -> TableRecord | None:
    """The table of an instance; none if nothing of it was ever built."""
    found = reader.one(TABLE_OF, view.id, instance)
    row = None if found is None else reader.one(GET_TABLE_BY_ID, found[0])
    return None if row is None else table_from(row)


def create_view_table(
    transaction: Transaction, view: ViewRecord, instance: str, wanted: NewTable, commit_id: str
) -> TableRecord:
    """The table of an instance, made now if another process was not faster."""
    locked_view(transaction, view)
    present = view_table(transaction, view, instance)
    if present is not None:
        return present
    if transaction.one(GET_NAMESPACE, NAMESPACE) is None:
        create_namespace(transaction, NAMESPACE, {})
    table = create_table(transaction, replace(wanted, view_id=view.id), commit_id)
    transaction.run(INSERT_INSTANCE, view.id, instance, table.id)
    return table


# --- sources -------------------------------------------------------------------


def lock_sources(transaction: Transaction, view: ViewRecord) -> None:
    """Hold the lake objects of all sources: what is committed to them is committed, and nothing more is for now.

    Topics first, which so get no other partitions, then partitions, then tables, as everybody does who needs several.
    """
    topics = [
        row[0] for source in view.sources if source.kind == TOPIC for row in transaction.all(OBJECT_OF_TOPIC, source.id)
    ]
    transaction.lock(*topics)
    partitions = [
        row[0]
        for source in view.sources
        if source.kind == TOPIC
        for row in transaction.all(OBJECTS_OF_TOPIC, source.id)
    ]
    transaction.lock(*partitions)
    tables = [
        row[0] for source in view.sources if source.kind == TABLE for row in transaction.all(OBJECT_OF_TABLE, source.id)
    ]
    transaction.lock(*tables)


_h = schema.table_versions.c
LAST_CHANGE = Statement(
    sa.select(sa.func.max(_h.version)).where(
        _h.table_id == bind("of_table"),
        _h.version <= bind("at_version"),
        _h.operation.not_in([sa.literal_column("'replace'"), sa.literal_column("'schema'")]),
    ),
    "of_table",
    "at_version",
)


def last_change(reader: Reader, table_id: int, version: int) -> int | None:
    """The newest version up to one that changed rows; none if none is kept."""
    row = reader.one(LAST_CHANGE, table_id, version)
    return None if row is None or row[0] is None else int(row[0])


_g = schema.segments.c
_b = schema.file_column_stats.c
_f = schema.table_files.c
FIRST_OF_TOPIC = Statement(
    sa.select(sa.func.min(_g.min_timestamp))
    .select_from(
        schema.partitions.join(schema.segments, sa.and_(_g.topic_id == _p.topic_id, _g.partition_id == _p.partition_id))
    )
    .where(_p.topic_id == bind("of_source"), _g.base_offset >= _p.log_start),
    "of_source",
)
FIRST_OF_TABLE = Statement(
    sa.select(sa.func.min(_b.lower_bound))
    .select_from(
        schema.table_files.join(schema.file_column_stats, sa.and_(_b.table_id == _f.table_id, _b.file_id == _f.id))
    )
    .where(_f.table_id == bind("of_source"), _f.to_version.is_(None), _b.field_id == bind("of_field")),
    "of_source",
    "of_field",
)


def earliest_time(reader: Reader, view: ViewRecord) -> int | None:
    """The event time of the oldest rows in the sources of a view, in milliseconds; none if there are none."""
    found: list[int] = []
    for source in view.sources:
        if source.kind == TOPIC:
            row = reader.one(FIRST_OF_TOPIC, source.id)
            found += [] if row is None or row[0] is None else [int(row[0])]
        else:
            row = reader.one(FIRST_OF_TABLE, source.id, source.field_id)
            found += [] if row is None or row[0] is None else [milliseconds_of(bytes(row[0]))]
    return min(found, default=None)
