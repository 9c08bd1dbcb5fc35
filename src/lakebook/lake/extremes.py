"""Answers that need no data file: the number of rows, and the extremes of a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lakebook.errors import InvalidInput
from lakebook.iceberg.bounds import decode
from lakebook.iceberg.schemas import field_at, find_column, leaf_fields
from lakebook.lake.lake import Lake
from lakebook.lake.leasing import Lease
from lakebook.lake.planning import make_plan, require_readable, versions_having
from lakebook.lake.reading import rows_left
from lakebook.names import shown
from lakebook.predicates import FLOATING
from lakebook.registry.file_stats import extremes_of
from lakebook.registry.table_files import totals_at
from lakebook.registry.tables import TableRecord


@dataclass(frozen=True)
class Extremes:
    """The least and the largest value of a column; both none if it has no values."""

    least: Any
    largest: Any


def count_rows(lake: Lake, lease: Lease) -> int:
    """The number of rows of a version: from the registry or, where rows are deleted, with the files of deletes."""
    table, version = lease.table, lease.version
    plan = make_plan(lake, table, version, lease.schema_version, None)
    if plan.deletes:
        return rows_left(plan, lease)
    found = lake.registry.read_with(lambda reader: totals_at(reader, table.id, version))[0]
    require_readable(lake, table, version)
    return found


def extremes(lake: Lake, table: TableRecord, column: str) -> Extremes | None:
    """The extremes of a column in a table's present version, if every file's bounds are exact; else none."""
    schema = lake.shape_of(table, table.schema_version).schema
    path = find_column(schema.fields, column)
    if path is None:
        raise InvalidInput(f"the table has no column {shown(column)}", on=table.shown)
    found = field_at(schema.fields, path)
    kind = str(found.field_type)
    inside = {leaf.field_id for leaf in leaf_fields(schema) if leaf.in_collection}
    if not found.field_type.is_primitive or found.field_id in inside:
        raise InvalidInput(f"the column {shown(column)} is not a plain one", on=table.shown)
    if table.deleted_rows:
        # The bounds are those of all rows, and nobody knows whether the extreme ones are among the deleted.
        return None
    having = versions_having(lake, table, table.schema_version, found.field_id)
    answer = lake.registry.read_with(
        lambda reader: extremes_of(reader, table.id, table.version, found.field_id, having, has_nan=kind in FLOATING)
    )
    require_readable(lake, table, table.version)
    if answer is None:
        return None
    least, largest = answer
    if least is None or largest is None:
        return Extremes(None, None)
    return Extremes(decode(kind, least), decode(kind, largest))
