"""The history of a table: its versions that can still be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.registry import schema
from lakebook.registry.changes import row_of
from lakebook.registry.schema import MAX_BIGINT
from lakebook.registry.statements import ZERO, Statement, bind
from lakebook.registry.transactions import Reader, Row

_v = schema.table_versions.c

LIST_VERSIONS = Statement(
    sa.select(schema.table_versions)
    .where(_v.table_id == bind("of_table"), _v.version < bind("below"))
    .order_by(_v.version.desc())
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "below",
    "most",
)


@dataclass(frozen=True)
class TableVersion:
    """One version of a table, and what it changed."""

    version: int
    operation: str
    schema_version: int
    commit_id: str
    added_files: int
    added_rows: int
    added_size: int
    removed_files: int
    removed_rows: int
    removed_size: int
    summary: Mapping[str, str]
    committed_at: datetime


def version_from(row: Row) -> TableVersion:
    """A version from a row of all columns."""
    values = row_of(schema.table_versions, row)
    del values["table_id"]
    values["committed_at"] = to_datetime(values["committed_at"])
    return TableVersion(**values)


def list_versions(reader: Reader, table_id: int, below: int | None, most: int) -> list[TableVersion]:
    """Versions of a table, the newest first."""
    return [
        version_from(row) for row in reader.all(LIST_VERSIONS, table_id, MAX_BIGINT if below is None else below, most)
    ]
