"""Answers that need no file: the number of rows, and the extremes of a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lakebook.errors import InvalidInput
from lakebook.iceberg.bounds import decode
from lakebook.iceberg.schemas import field_at, find_column, leaf_fields
from lakebook.lake.lake import Lake
from lakebook.lake.planning import require_readable
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


def count_rows(lake: Lake, table: TableRecord, version: int) -> int:
    """The number of rows of a version."""
    found = lake.registry.read_with(lambda reader: totals_at(reader, table.id, version))[0]
    require_readable(lake, table, version)
    return found


def extremes(lake: Lake, table: TableRecord, version: int, schema_version: int, column: str) -> Extremes | None:
    """The extremes of a column in a version, if every file's bounds are exact; else none."""
    schema = lake.shape_of(table, schema_version).schema
    path = find_column(schema.fields, column)
    if path is None:
        raise InvalidInput(f"the table has no column {shown(column)}", on=table.shown)
    found = field_at(schema.fields, path)
    kind = str(found.field_type)
    inside = {leaf.field_id for leaf in leaf_fields(schema) if leaf.in_collection}
    if not found.field_type.is_primitive or found.field_id in inside:
        raise InvalidInput(f"the column {shown(column)} is not a plain one", on=table.shown)
    answer = lake.registry.read_with(
        lambda reader: extremes_of(reader, table.id, version, found.field_id, has_nan=kind in FLOATING)
    )
    if answer is None:
        return None
    least, largest = answer
    if least is None or largest is None:
        return Extremes(None, None)
    return Extremes(decode(kind, least), decode(kind, largest))
