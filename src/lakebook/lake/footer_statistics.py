"""Column statistics of a file that has a row already, taken from its footer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow.parquet import FileMetaData

from lakebook.iceberg.arrow_files import check_readable_as, file_schema
from lakebook.iceberg.bounds import ColumnBounds
from lakebook.iceberg.partitioning import partition_from_json
from lakebook.iceberg.schemas import leaf_fields
from lakebook.iceberg.statistics import column_stats, footer_columns, partition_stats, stats_from_footer
from lakebook.iceberg.table_metadata import schema_for, shapes_of
from lakebook.registry.file_stats import ColumnStats
from lakebook.registry.tables import GET_TABLE_BY_ID, TableMetadata, list_metadata, table_from
from lakebook.registry.transactions import Reader


class FileStatistics:
    """Takes the statistics of a table's files from their footers."""

    def __init__(self, states: Sequence[TableMetadata]) -> None:
        self._states = {state.schema_version: state for state in states}
        self._schemas, self._specs, _ = shapes_of(states)
        # The files of a table have the same few schemas, mostly one after the other.
        self._last: tuple[pa.Schema, int, Any] | None = None

    def of(
        self,
        row: Mapping[str, Any],
        opened: FileMetaData,
        columns: pa.Schema,
        *,
        ours: bool = False,
        nans: Mapping[int, int] | None = None,
    ) -> tuple[tuple[ColumnStats, ...], bool]:
        """Statistics of every plain column of a file, as far as its footer tells; whether that is all of them.

        `ours`: the file was written here, with bounds that were not cut. `nans`: how many values of a column are NaN.
        """
        schema = self._schemas[self._states[row["schema_version"]].schema.get("schema-id", 0)]
        partitions: tuple[ColumnStats, ...] = ()
        if row["spec_id"] in self._specs:
            spec = self._specs[row["spec_id"]]
            with_columns = schema_for(spec, list(self._schemas.values()))
            partitions = partition_stats(
                spec, with_columns, partition_from_json(spec, with_columns, row["partition_values"])
            )
        given = self._schema_of(columns, row["schema_version"], schema)
        laid_out = footer_columns(opened, given)
        if laid_out is None:
            return partitions, False
        stats = stats_from_footer(laid_out, nans, ours=ours)
        known = {item.field_id for item in stats}
        nothing = ColumnBounds(None, None, opened.num_rows, opened.num_rows, 0)
        # A column that the file does not have is null in every row.
        absent = tuple(
            column_stats(leaf.field_id, leaf.type, nothing, is_exact=True)
            for leaf in leaf_fields(schema)
            if not leaf.in_collection and leaf.field_id not in known
        )
        return (*stats, *absent, *partitions), True

    def _schema_of(self, columns: pa.Schema, version: int, schema: Any) -> Any:
        """The schema of a file by field ids, which can be read as the table's."""
        last = self._last
        if last is not None and last[1] == version and columns.equals(last[0], check_metadata=True):
            return last[2]
        given = file_schema(columns, schema)
        check_readable_as(given, schema)
        self._last = (columns, version, given)
        return given


def statistics_of(
    reader: Reader, row: Mapping[str, Any], opened: FileMetaData, columns: pa.Schema, *, ours: bool = False
) -> tuple[tuple[ColumnStats, ...], bool]:
    """Statistics of every plain column of a file, as far as its footer tells them; whether that is all of them.

    `ours`: the file was written here, with bounds that were not cut.
    """
    found = reader.one(GET_TABLE_BY_ID, row["table_id"])
    if found is None:
        return (), False
    return FileStatistics(list_metadata(reader, table_from(found))).of(row, opened, columns, ours=ours)
