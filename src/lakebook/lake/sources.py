"""A user's own files as a Spark frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lakebook.errors import InsertFailed, InvalidInput
from lakebook.iceberg.staging import spark_type
from lakebook.lake.lake import Lake
from lakebook.lake.measuring import JSON
from lakebook.names import shown
from lakebook.registry.tables import TableRecord
from lakebook.spark import frames
from lakebook.spark.session import check_session, reason_of

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession


def read_source(lake: Lake, table: TableRecord, spark: SparkSession, kind: str, paths: Sequence[str]) -> DataFrame:
    """Files or folders of JSON or Parquet; JSON is read with the table's schema, and must fit it."""
    if not paths or any(not isinstance(path, str) or not path for path in paths):
        raise InvalidInput(f"{shown(paths)} names no files", on=table.shown, remedy="Give paths of files or folders")
    check_session(spark)
    schema = spark_type(lake.shape_of(table, table.schema_version).schema) if kind == JSON else None
    try:
        return frames.read_files(spark, kind, list(paths), schema)
    except Exception as error:
        raise InsertFailed(
            f"the files cannot be read ({reason_of(error)})", on=table.shown, remedy="Check the paths"
        ) from error
