"""The table of a view: made from the columns of its first range, and given more columns as its query gets them."""

from __future__ import annotations

from typing import Any

from lakebook.errors import IncompatibleSchema, SchemaChanged
from lakebook.iceberg.evolution import SchemaUpdate
from lakebook.iceberg.partitioning import order_to_json, partition_spec, sort_order, spec_to_json
from lakebook.iceberg.refs import TAG_QUERIES
from lakebook.iceberg.schemas import can_promote, describe_type, last_field_id, schema_from, schema_to_json
from lakebook.lake.lake import Lake
from lakebook.lake.measuring import PARQUET
from lakebook.lake.properties import COMPACTION, HISTORY_SECONDS, HISTORY_VERSIONS, TAG_BYTES, TAG_SECONDS
from lakebook.names import shown
from lakebook.registry.tables import NewTable, TableRecord, change_schema, current_table
from lakebook.registry.views import NAMESPACE, ViewRecord, create_view_table, table_name, view_table

_ENGINE, _COMPRESSION = "spark", "zstd"
# Ranges of views have no history.
_PROPERTIES = {
    HISTORY_SECONDS: "0",
    HISTORY_VERSIONS: "1",
    TAG_SECONDS: "0",
    TAG_BYTES: "0",
    TAG_QUERIES: "no",
    COMPACTION: "off",
}
_TRIES = 10


def table_for(lake: Lake, view: ViewRecord, instance: str, columns: Any) -> TableRecord:
    """The table of an instance, with at least the columns of a frame's schema."""
    wanted = schema_from(columns)
    found = lake.registry.read_with(lambda reader: view_table(reader, view, instance))
    table = found if found is not None else _created(lake, view, instance, wanted)
    for _ in range(_TRIES):
        try:
            return _evolved(lake, view, table, wanted)
        except SchemaChanged:
            # Another range of the view was faster.
            table = lake.registry.read_with(lambda reader: current_table(reader, table))  # noqa: B023 - called at once
    raise SchemaChanged("its columns change all the time", on=view.shown, remedy="Try again")


def _created(lake: Lake, view: ViewRecord, instance: str, columns: Any) -> TableRecord:
    wanted = NewTable(
        NAMESPACE,
        table_name(view.name, instance),
        schema_to_json(columns),
        last_field_id(columns),
        spec_to_json(partition_spec(columns, ())),
        order_to_json(sort_order(columns, ())),
        PARQUET,
        _COMPRESSION,
        _ENGINE,
        {},
        _PROPERTIES,
    )
    return lake.registry.write_opened(
        "table", lambda transaction, commit_id: create_view_table(transaction, view, instance, wanted, commit_id)
    )


def _evolved(lake: Lake, view: ViewRecord, table: TableRecord, wanted: Any) -> TableRecord:
    shape = lake.shape_of(table, table.schema_version)
    present = {field.name: field for field in shape.schema.fields}
    update = SchemaUpdate(shape.schema, table.last_field_id)
    changed = False
    for field in wanted.fields:
        found = present.get(field.name)
        if found is None:
            update.add_column((field.name,), field.field_type)
            changed = True
        elif describe_type(found.field_type) == describe_type(field.field_type) or can_promote(
            field.field_type, found.field_type
        ):
            continue
        elif can_promote(found.field_type, field.field_type):
            update.widen_column((field.name,), field.field_type)
            changed = True
        else:
            old, new = describe_type(found.field_type), describe_type(field.field_type)
            raise IncompatibleSchema(
                f"the column {shown(field.name)} was {old} and would be {new}",
                on=view.shown,
                remedy="Give the column another name, or cast it to what it was",
            )
    if not changed:
        return table
    schema_id = 1 + max(_schema_ids(lake, table), default=0)
    new_schema, last = update.apply(schema_id)
    lake.registry.write_opened(
        "schema",
        lambda transaction, commit_id: change_schema(
            transaction,
            table,
            table.schema_version,
            schema_to_json(new_schema),
            max(last, table.last_field_id),
            commit_id,
            by_view=True,
        ),
    )
    return lake.registry.read_with(lambda reader: current_table(reader, table))


def _schema_ids(lake: Lake, table: TableRecord) -> list[int]:
    versions = range(1, table.schema_version + 1)
    return [int(lake.shape_of(table, version).schema.schema_id) for version in versions]
