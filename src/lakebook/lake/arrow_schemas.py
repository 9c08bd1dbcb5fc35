"""The schema of a data file by field ids."""

from __future__ import annotations

from typing import Any

from pyarrow.parquet import FileMetaData

from lakebook.iceberg.arrow_files import file_schema
from lakebook.lake.lake import Lake
from lakebook.registry.table_files import PlannedFile
from lakebook.registry.tables import TableRecord


def schema_of_file(lake: Lake, table: TableRecord, file: PlannedFile, footer: FileMetaData) -> Any:
    """A file's columns by field id; one without ids has the names of its schema version."""
    names = lake.shape_of(table, file.schema_version).schema
    return file_schema(footer.schema.to_arrow_schema(), names)
