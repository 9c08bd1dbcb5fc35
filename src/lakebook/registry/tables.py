"""Namespaces and tables: creating, finding, renaming, changing and dropping them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import (
    NamespaceAlreadyExists,
    NamespaceNotEmpty,
    NamespaceNotFound,
    ReadOnlyTable,
    SchemaChanged,
    TableAlreadyExists,
    TableNotFound,
)
from lakebook.names import shown
from lakebook.registry import schema
from lakebook.registry.changes import capture, insert_new, row_of, update_row
from lakebook.registry.freshness import TABLE, freeze_all
from lakebook.registry.losses import forget_losses
from lakebook.registry.statements import ONE, ZERO, Statement, bind, insert_into
from lakebook.registry.transactions import Reader, Row, Transaction

DEFAULT_NAMESPACE = "default"

_n = schema.namespaces.c
_t = schema.tables.c
_m = schema.table_metadata.c
_live = _t.deleted_at.is_(None)
_AFTER_ALL = "\x7f"

_TABLE = (
    _t.id,
    _t.object_id,
    _n.name.label("namespace"),
    _t.name,
    _t.table_uuid,
    _t.format,
    _t.version,
    _t.schema_version,
    _t.last_field_id,
    _t.row_count,
    _t.deleted_rows,
    _t.file_count,
    _t.total_size,
    _t.topic_id,
    _t.view_id,
    _t.last_modified,
    _t.created_at,
    _t.updated_at,
)
_w = schema.namespaces.alias("wanted").c
_with_namespace = schema.tables.join(schema.namespaces, _n.id == _t.namespace_id)
GET_TABLE = Statement(
    sa.select(*_TABLE)
    .select_from(_with_namespace)
    .where(_n.name == bind("namespace_name"), _t.name == bind("table_name"), _live),
    "namespace_name",
    "table_name",
)
GET_TABLE_BY_ID = Statement(
    sa.select(*_TABLE).select_from(_with_namespace).where(_t.id == bind("of_table"), _live), "of_table"
)
LIST_TABLES = Statement(
    sa.select(*_TABLE)
    .select_from(_with_namespace)
    .where(
        # Its id as one value: the order then comes from the index, where a join would sort the whole namespace.
        _t.namespace_id == sa.select(_w.id).where(_w.name == bind("namespace_name")).scalar_subquery(),
        _live,
        _t.name > bind("after"),
        _t.name >= bind("prefix"),
        _t.name < bind("prefix_end"),
    )
    .order_by(_t.name)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "namespace_name",
    "after",
    "prefix",
    "prefix_end",
    "most",
)
EVERY_TABLE = Statement(
    sa.select(_t.id, _t.object_id, _t.deleted_at)
    .where(_t.id > bind("after"))
    .order_by(_t.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
TABLE_ROW = Statement(sa.select(schema.tables).where(_t.id == bind("of_table")), "of_table")
INSERT_NAMESPACE = Statement(
    sa.insert(schema.namespaces)
    .values(name=bind("name"), properties=bind("properties"), created_at=bind("now"))
    .returning(_n.id),
    "name",
    "properties",
    "now",
)
GET_NAMESPACE = Statement(
    sa.select(_n.id, _n.name, _n.properties, _n.created_at).where(_n.name == bind("name")), "name"
)
# A table is created under the shared lock of its namespace, whose removal takes the lock alone.
SHARE_NAMESPACE = Statement(
    sa.select(_n.id).where(_n.name == bind("name")).with_for_update(read=True, key_share=True), "name"
)
CLAIM_NAMESPACE = Statement(sa.select(_n.id).where(_n.name == bind("name")).with_for_update(), "name")
LIST_NAMESPACES = Statement(
    sa.select(_n.id, _n.name, _n.properties, _n.created_at)
    .where(_n.name > bind("after"))
    .order_by(_n.name)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
# Dropped tables count too: their rows refer to the namespace until they are emptied.
ANY_TABLE_OF = Statement(
    sa.select(_t.id).where(_t.namespace_id == bind("of_namespace")).limit(ONE).offset(ZERO), "of_namespace"
)
SET_NAMESPACE_PROPERTIES = Statement(
    sa.update(schema.namespaces).where(_n.name == bind("of_name")).values(properties=bind("given", _n.properties.type)),
    "given",
    "of_name",
)
DELETE_NAMESPACE = Statement(sa.delete(schema.namespaces).where(_n.id == bind("of_namespace")), "of_namespace")
GET_METADATA = Statement(
    sa.select(schema.table_metadata).where(
        _m.table_id == bind("of_table"), _m.schema_version == bind("of_schema_version")
    ),
    "of_table",
    "of_schema_version",
)
LIST_METADATA = Statement(
    sa.select(schema.table_metadata).where(_m.table_id == bind("of_table")).order_by(_m.schema_version), "of_table"
)
END_PAUSES = Statement(sa.delete(schema.pauses).where(schema.pauses.c.table_id == bind("of_table")), "of_table")
LIVE_UUID = Statement(
    sa.select(_t.id).where(_t.table_uuid == bind("of_uuid"), _t.deleted_at.is_(None)).limit(ONE).offset(ZERO),
    "of_uuid",
)
INSERT_HORIZON = insert_into(schema.table_horizons)
INSERT_VERSION = insert_into(schema.table_versions)


@dataclass(frozen=True)
class Namespace:
    """What tables are grouped by."""

    name: str
    properties: Mapping[str, str]
    created_at: datetime


@dataclass(frozen=True)
class TableRecord:
    """A table and the exact totals over its visible files."""

    id: int
    object_id: int
    namespace: str
    name: str
    table_uuid: str
    format: str
    version: int
    schema_version: int
    last_field_id: int
    row_count: int
    deleted_rows: int
    file_count: int
    total_size: int
    #: The topic whose segments are its files: nobody but the topic changes it.
    topic_id: int | None
    #: The view whose ranges are its files: nobody but the view changes it.
    view_id: int | None
    last_modified: datetime
    created_at: datetime
    updated_at: datetime

    @property
    def shown(self) -> str:
        """The table as an error names it."""
        return f"table {self.namespace}.{self.name}"


@dataclass(frozen=True)
class TableMetadata:
    """One state of a table's schema, partitioning, sort order and properties."""

    table_id: int
    schema_version: int
    from_version: int
    schema: Mapping[str, Any]
    storage_engine: str
    engine_config: Mapping[str, Any]
    format: str
    compression: str
    partition_by: Mapping[str, Any]
    sort_by: Mapping[str, Any]
    properties: Mapping[str, str]
    last_modified: datetime
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True)
class NewTable:
    """What a new table shall be, in Iceberg's JSON forms."""

    namespace: str
    name: str
    schema: Mapping[str, Any]
    last_field_id: int
    partition_by: Mapping[str, Any]
    sort_by: Mapping[str, Any]
    format: str
    compression: str
    storage_engine: str
    engine_config: Mapping[str, Any]
    properties: Mapping[str, str]
    #: Where somebody else has given it one already.
    table_uuid: str | None = None
    #: The topic whose segments are to be its files.
    topic_id: int | None = None
    #: The view whose ranges are to be its files.
    view_id: int | None = None


def table_from(row: Row) -> TableRecord:
    """A table from the columns of `GET_TABLE`."""
    return TableRecord(*row[:-3], *map(to_datetime, row[-3:]))


def metadata_from(row: Row) -> TableMetadata:
    """A state of a table's metadata from a row of all columns."""
    values = row_of(schema.table_metadata, row)
    del values["id"]
    for name in ("last_modified", "created_at", "updated_at"):
        values[name] = to_datetime(values[name])
    return TableMetadata(**values)


def table_not_found(namespace: object, name: object) -> TableNotFound:
    """The error for a table that is not there."""
    return TableNotFound(
        f"there is no table {shown(name)} in the namespace {shown(namespace)}",
        on="table",
        remedy="`lakebook tables list` shows which there are",
    )


def _namespace_not_found(name: object) -> NamespaceNotFound:
    return NamespaceNotFound(
        f"there is no namespace {shown(name)}", on="namespace", remedy="Create it with `lakebook namespaces create`"
    )


# --- namespaces ----------------------------------------------------------------


def create_namespace(transaction: Transaction, name: str, properties: Mapping[str, str]) -> Namespace:
    """Create a namespace."""
    if transaction.one(GET_NAMESPACE, name) is not None:
        raise NamespaceAlreadyExists(f"a namespace {name!r} exists already", on=f"namespace {name}")
    now = transaction.clock.now_ms()
    transaction.one(INSERT_NAMESPACE, name, orjson.dumps(dict(properties)).decode(), now)
    return Namespace(name, dict(properties), to_datetime(now))


def drop_namespace(transaction: Transaction, name: str) -> None:
    """Remove a namespace that has no tables."""
    row = transaction.one(CLAIM_NAMESPACE, name)
    if row is None:
        raise _namespace_not_found(name)
    if transaction.one(ANY_TABLE_OF, row[0]) is not None:
        raise NamespaceNotEmpty(
            "it has tables, or dropped ones whose files are not yet gone",
            on=f"namespace {name}",
            remedy="Drop its tables, then run `lakebook admin expire` and `lakebook admin delete-expired-temp`",
        )
    transaction.run(DELETE_NAMESPACE, row[0])


def change_namespace(transaction: Transaction, name: str, changes: Mapping[str, str | None]) -> Mapping[str, str]:
    """Merge into the properties of a namespace; a value of none removes its key. What they were before."""
    if transaction.one(CLAIM_NAMESPACE, name) is None:
        raise _namespace_not_found(name)
    before = get_namespace(transaction, name).properties
    after = {key: value for key, value in {**before, **changes}.items() if value is not None}
    transaction.run(SET_NAMESPACE_PROPERTIES, orjson.dumps(after).decode(), name)
    return before


def _namespace_from(row: Row) -> Namespace:
    _, name, properties, created = row
    parsed = orjson.loads(properties) if isinstance(properties, str) else dict(properties)
    return Namespace(name, parsed, to_datetime(created))


def get_namespace(reader: Reader, name: str) -> Namespace:
    """A namespace by its name."""
    row = reader.one(GET_NAMESPACE, name)
    if row is None:
        raise _namespace_not_found(name)
    return _namespace_from(row)


def list_namespaces(reader: Reader, after: str, most: int) -> list[Namespace]:
    """Namespaces in the order of their names."""
    return [_namespace_from(row) for row in reader.all(LIST_NAMESPACES, after, most)]


def _shared_namespace(transaction: Transaction, name: str) -> int:
    row = transaction.one(SHARE_NAMESPACE, name)
    if row is None and name == DEFAULT_NAMESPACE:
        row = transaction.one(INSERT_NAMESPACE, name, "{}", transaction.clock.now_ms())
    if row is None:
        raise _namespace_not_found(name)
    return int(row[0])


# --- tables --------------------------------------------------------------------


def empty_table(
    object_id: int, namespace_id: int, name: str, table_uuid: str, kind: str, last_field_id: int, now: int
) -> dict[str, Any]:
    """The row of a table at version 0, without files and without its id, in the order of its columns."""
    return {
        "object_id": object_id,
        "namespace_id": namespace_id,
        "name": name,
        "table_uuid": table_uuid,
        "format": kind,
        "version": 0,
        "schema_version": 1,
        "last_field_id": last_field_id,
        "last_file_id": 0,
        "row_count": 0,
        "deleted_rows": 0,
        "file_count": 0,
        "total_size": 0,
        "last_modified": now,
        "created_at": now,
        "updated_at": now,
        "deleted_at": None,
        "hold_until": 0,
        "topic_id": None,
        "view_id": None,
    }


def create_table(transaction: Transaction, wanted: NewTable, commit_id: str, at: int | None = None) -> TableRecord:
    """Create a table at version 0, without files; `at` is its time, where that was chosen before."""
    namespace_id = _shared_namespace(transaction, wanted.namespace)
    require_free_name(transaction, wanted.namespace, wanted.name)
    if wanted.table_uuid is not None and transaction.one(LIVE_UUID, wanted.table_uuid) is not None:
        raise TableAlreadyExists(
            "it is here already, under another name",
            on=f"table {wanted.namespace}.{wanted.name}",
            remedy="Rename that one",
        )
    object_id = transaction.create_object("table", at)
    now = transaction.time_of(object_id)
    unique = wanted.table_uuid or str(uuid.uuid4())
    row = empty_table(object_id, namespace_id, wanted.name, unique, wanted.format, wanted.last_field_id, now)
    row |= {"topic_id": wanted.topic_id, "view_id": wanted.view_id}
    table_id = insert_new(transaction, object_id, schema.tables, row)
    metadata = {
        "table_id": table_id,
        "schema_version": 1,
        "from_version": 0,
        "schema": dict(wanted.schema),
        "storage_engine": wanted.storage_engine,
        "engine_config": dict(wanted.engine_config),
        "format": wanted.format,
        "compression": wanted.compression,
        "partition_by": dict(wanted.partition_by),
        "sort_by": dict(wanted.sort_by),
        "properties": dict(wanted.properties),
        "last_modified": now,
        "created_at": now,
        "updated_at": now,
    }
    insert_new(transaction, object_id, schema.table_metadata, metadata)
    stats = {
        "table_id": table_id,
        "row_count": 0,
        "deleted_rows": 0,
        "file_count": 0,
        "total_size": 0,
        "last_modified": now,
        "created_at": now,
        "updated_at": now,
    }
    insert_new(transaction, object_id, schema.table_stats, stats)
    transaction.run(INSERT_HORIZON, table_id, 0, now)
    record_version(transaction, table_id, 0, "create", 1, commit_id, now)
    found = transaction.one(GET_TABLE_BY_ID, table_id)
    assert found is not None
    return table_from(found)


def require_free_name(reader: Reader, namespace: str, name: str) -> None:
    """Refuse a name that a live table has."""
    if reader.one(GET_TABLE, namespace, name) is not None:
        raise TableAlreadyExists(
            f"a table {name!r} exists already", on=f"table {namespace}.{name}", remedy="Choose another name"
        )


def record_version(
    transaction: Transaction,
    table_id: int,
    version: int,
    operation: str,
    schema_version: int,
    commit_id: str,
    now: int,
    added: tuple[int, int, int] = (0, 0, 0),
    removed: tuple[int, int, int] = (0, 0, 0),
    summary: Mapping[str, str] | None = None,
) -> None:
    """Write a version into the table's history; `added` and `removed` are files, rows and bytes."""
    text = orjson.dumps(dict(summary or {})).decode()
    transaction.run(
        INSERT_VERSION, table_id, version, operation, schema_version, commit_id, *added, *removed, text, now
    )


def locked_table(transaction: Transaction, table: TableRecord) -> dict[str, Any]:
    """The row of a live table, under its lock."""
    transaction.lock(table.object_id)
    row = transaction.one(TABLE_ROW, table.id)
    if row is None:
        raise table_not_found(table.namespace, table.name)
    found = row_of(schema.tables, row)
    if found["deleted_at"] is not None:
        raise table_not_found(table.namespace, table.name)
    return found


def refuse_mirror(table: TableRecord) -> None:
    """Refuse to change a table whose files are a topic's segments, or a view's ranges: only those change it."""
    if table.view_id is not None:
        raise ReadOnlyTable(
            "its files are the ranges of a view, and only the view changes it",
            on=table.shown,
            remedy="Change the view's sources and materialise it, or drop the view",
        )
    if table.topic_id is not None:
        raise ReadOnlyTable(
            "its files are the segments of a topic, and only the topic changes it",
            on=table.shown,
            remedy="Append to the topic, or set iceberg=false on it to have the table dropped",
        )


def rename_table(transaction: Transaction, table: TableRecord, namespace: str, name: str) -> TableRecord:
    """Give a table another name, or move it to another namespace."""
    refuse_mirror(table)
    namespace_id = _shared_namespace(transaction, namespace)
    row = locked_table(transaction, table)
    if (row["namespace_id"], row["name"]) != (namespace_id, name):
        require_free_name(transaction, namespace, name)
        now = transaction.time_of(table.object_id)
        changes = {"namespace_id": namespace_id, "name": name, "updated_at": now}
        update_row(transaction, table.object_id, schema.tables, row, changes)
    found = transaction.one(GET_TABLE_BY_ID, table.id)
    assert found is not None
    return table_from(found)


def drop_table(transaction: Transaction, table: TableRecord, *, by_topic: bool = False, by_view: bool = False) -> None:
    """Make a table invisible at once; its files go later, through `temporary_files`."""
    if not by_topic and not by_view:
        refuse_mirror(table)
    row = locked_table(transaction, table)
    freeze_all(transaction, TABLE, table.id)
    forget_losses(transaction, TABLE, table.id)
    now = transaction.time_of(table.object_id)
    update_row(transaction, table.object_id, schema.tables, row, {"updated_at": now, "deleted_at": now})
    # By its name nobody could end them any more.
    transaction.run(END_PAUSES, table.id)


def change_schema(
    transaction: Transaction,
    table: TableRecord,
    expected: int,
    new_schema: Mapping[str, Any],
    last_field_id: int,
    commit_id: str,
    *,
    by_view: bool = False,
) -> TableMetadata:
    """Give a table a new schema: a new `schema_version`, and a new version."""
    if not by_view:
        refuse_mirror(table)
    row = locked_table(transaction, table)
    if row["schema_version"] != expected:
        raise SchemaChanged(
            f"its schema has moved from version {expected} to {row['schema_version']} meanwhile",
            on=table.shown,
            remedy="Look at the new schema and try again",
        )
    now = transaction.time_of(table.object_id)
    found = transaction.one(GET_METADATA, table.id, expected)
    assert found is not None
    current = row_of(schema.table_metadata, found)
    version, schema_version = row["version"] + 1, expected + 1
    changes = {
        "version": version,
        "schema_version": schema_version,
        "last_field_id": last_field_id,
        "last_modified": now,
        "updated_at": now,
    }
    update_row(transaction, table.object_id, schema.tables, row, changes)
    metadata = {
        **{name: value for name, value in current.items() if name != "id"},
        "schema_version": schema_version,
        "from_version": version,
        "schema": dict(new_schema),
        "last_modified": now,
        "created_at": now,
        "updated_at": now,
    }
    insert_new(transaction, table.object_id, schema.table_metadata, metadata)
    record_version(transaction, table.id, version, "schema", schema_version, commit_id, now)
    return get_metadata(transaction, table, schema_version)


def change_properties(transaction: Transaction, table: TableRecord, changes: Mapping[str, str | None]) -> TableMetadata:
    """Merge into a table's properties; a value of none removes its key. This makes no version."""
    row = locked_table(transaction, table)
    found = transaction.one(GET_METADATA, table.id, row["schema_version"])
    assert found is not None
    current = row_of(schema.table_metadata, found)
    merged = {**current["properties"], **changes}
    properties = {key: value for key, value in merged.items() if value is not None}
    if properties != current["properties"]:
        now = transaction.time_of(table.object_id)
        update_row(
            transaction,
            table.object_id,
            schema.table_metadata,
            current,
            {"properties": properties, "last_modified": now, "updated_at": now},
        )
    return get_metadata(transaction, table, row["schema_version"])


def get_table(reader: Reader, namespace: str, name: str) -> TableRecord:
    """A live table by its name."""
    row = reader.one(GET_TABLE, namespace, name)
    if row is None:
        raise table_not_found(namespace, name)
    return table_from(row)


def current_table(reader: Reader, table: TableRecord) -> TableRecord:
    """The present state of a table that was looked up before."""
    row = reader.one(GET_TABLE_BY_ID, table.id)
    if row is None:
        raise table_not_found(table.namespace, table.name)
    return table_from(row)


def list_tables(reader: Reader, namespace: str, after: str, prefix: str, most: int) -> list[TableRecord]:
    """Live tables of a namespace in the order of their names."""
    rows = reader.all(LIST_TABLES, namespace, after, prefix, prefix + _AFTER_ALL, most)
    if not rows and namespace != DEFAULT_NAMESPACE:
        get_namespace(reader, namespace)
    return [table_from(row) for row in rows]


def get_metadata(reader: Reader, table: TableRecord, schema_version: int) -> TableMetadata:
    """One state of a table's metadata."""
    row = reader.one(GET_METADATA, table.id, schema_version)
    if row is None:
        raise table_not_found(table.namespace, table.name)
    return metadata_from(row)


def list_metadata(reader: Reader, table: TableRecord) -> list[TableMetadata]:
    """Every state there has been of a table's metadata."""
    return [metadata_from(row) for row in reader.all(LIST_METADATA, table.id)]


def captured_update(
    transaction: Transaction, object_id: int, table: sa.Table, before: Mapping[str, Any], row: Row
) -> dict[str, Any]:
    """Capture an update that was added up in SQL and returned its row."""
    after = row_of(table, row)
    capture(transaction, object_id, table, "update", after=after, before=before)
    return after
