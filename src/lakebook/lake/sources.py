"""Inserting a user's own files, which Spark reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lakebook.errors import IncompatibleSchema, InsertFailed, InvalidInput
from lakebook.iceberg.staging import spark_type
from lakebook.lake.inserting import InsertReport, insert_frame
from lakebook.lake.lake import Lake
from lakebook.names import shown
from lakebook.registry.tables import TableRecord
from lakebook.spark import frames
from lakebook.spark.session import check_session, reason_of

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession


#: What becomes of keys in JSON that a table has no column for.
REFUSED, IGNORED = "error", "ignore"


def insert_json(
    lake: Lake,
    table: TableRecord,
    spark: SparkSession,
    paths: Sequence[str],
    unknown: str,
    properties: Mapping[str, str] | None,
) -> InsertReport:
    """Insert the rows of files or folders of JSON, read with the table's schema, which they must fit."""
    if unknown not in (REFUSED, IGNORED):
        raise InvalidInput(
            f"{shown(unknown)} says not what to do about unknown keys",
            on=table.shown,
            remedy=f"Use {REFUSED!r} or {IGNORED!r}",
        )
    schema = spark_type(lake.shape_of(table, table.schema_version).schema)
    read = frames.read_known_json if unknown == REFUSED else frames.read_json
    frame = _read(lake, table, spark, paths, lambda found: read(spark, found, schema))
    try:
        return insert_frame(lake, table, frame, properties)
    except InsertFailed as failed:
        keys = frames.strange_keys(failed.__cause__)
        if not keys:
            raise
        raise IncompatibleSchema(
            f"the files have keys for which it has no column ({', '.join(shown(key) for key in keys)})",
            on=table.shown,
            remedy=f"Add columns, mend the names, whose case counts, or say unknown={IGNORED!r}",
        ) from failed


def insert_parquet(
    lake: Lake, table: TableRecord, spark: SparkSession, paths: Sequence[str], properties: Mapping[str, str] | None
) -> InsertReport:
    """Insert the rows of files or folders of Parquet."""
    frame = _read(lake, table, spark, paths, lambda found: frames.read_parquet(spark, found))
    return insert_frame(lake, table, frame, properties)


def _read(
    lake: Lake, table: TableRecord, spark: SparkSession, paths: Sequence[str], read: Callable[[list[str]], DataFrame]
) -> DataFrame:
    if not paths or any(not isinstance(path, str) or not path for path in paths):
        raise InvalidInput(f"{shown(paths)} names no files", on=table.shown, remedy="Give paths of files or folders")
    check_session(spark, lake.store.warehouse)
    try:
        return read(list(paths))
    except Exception as error:
        raise InsertFailed(
            f"the files cannot be read ({reason_of(error)})", on=table.shown, remedy="Check the paths"
        ) from error
