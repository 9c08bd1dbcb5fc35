"""Rows for tests with Spark, and the same rows as each engine sees them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from lakebook import Book, failpoints
from lakebook.iceberg.arrow_files import plain_schema
from lakebook.iceberg.publishing import ICEBERG
from lakebook.iceberg.staging import spark_type
from lakebook.lake.table import Table
from lakebook.registry.inserts import known_paths
from lakebook.registry.stream_folders import unknown_stream_paths
from lakebook.registry.table_checks import files_to_check

#: More files than any test has.
MOST = 10_000


def arrow_rows(table: Table, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows in the table's types; a column that a row does not name is null."""
    return pa.Table.from_pylist([dict(row) for row in rows], schema=plain_schema(table.schema))


def frame_of(spark: SparkSession, table: Table, rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Rows as a frame in the table's types."""
    return spark.createDataFrame(arrow_rows(table, rows), StructType.fromJson(spark_type(table.schema)))


# --- what the engines see ------------------------------------------------------


def in_spark(table: Table, spark: SparkSession, *args: Any, **how: Any) -> pa.Table:
    """What Spark reads."""
    return table.read(spark, *args, **how).toArrow()


def in_duckdb(table: Table) -> pa.Table:
    """What DuckDB reads from the files alone."""
    with duckdb.connect() as connection:
        return connection.execute("SELECT * FROM read_parquet(?)", [table.plan().paths]).to_arrow_table()


def values(data: pa.Table) -> list[tuple[Any, ...]]:
    """The rows as plain values that can be compared, in the order of their first column.

    A struct is what its fields are, in their order, without their names: Iceberg writes other names
    into a file where the column has one that Avro would not take.
    """
    kinds = [field.type for field in data.schema]
    rows = zip(*(column.to_pylist() for column in data.columns), strict=True)
    found = [tuple(_plain(value, kind) for value, kind in zip(row, kinds, strict=True)) for row in rows]
    return sorted(found, key=lambda row: f"{row[0]!r:>30}")


def _plain(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if isinstance(value, float):
        # Text tells NaN from nothing else, and -0.0 from 0.0.
        return repr(value)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    if pa.types.is_struct(kind):
        return tuple(_plain(value[field.name], field.type) for field in kind)
    if pa.types.is_map(kind):
        return [(_plain(key, kind.key_type), _plain(item, kind.item_type)) for key, item in value]
    if pa.types.is_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    return value


def layout(kind: pa.DataType | pa.Schema) -> Any:
    """Names and types at every depth, without what engines call the inside of lists and maps."""
    if isinstance(kind, pa.Schema) or pa.types.is_struct(kind):
        return [(field.name, layout(field.type)) for field in kind]
    if pa.types.is_map(kind):
        return ("map", layout(kind.key_type), layout(kind.item_type))
    if pa.types.is_list(kind):
        return ("list", layout(kind.value_type))
    return str(kind)


def check_same(table: Table, spark: SparkSession, rows: Sequence[Mapping[str, Any]]) -> None:
    """Spark and Arrow both see exactly these rows, under the table's names and types."""
    wanted = arrow_rows(table, rows)
    for name, found in (("Spark", in_spark(table, spark)), ("Arrow", table.to_arrow())):
        assert layout(found.schema) == layout(wanted.schema), name
        assert values(found) == values(wanted), name
    assert table.count() == len(rows)


def ids(data: pa.Table) -> list[Any]:
    """The values of the column `id`, in order."""
    return sorted(data.column("id").to_pylist())


# --- what lies in the warehouse ------------------------------------------------


def warehouse_of(book: Book) -> Path:
    """The folder of a book's warehouse."""
    inside = book.lake.store.local_path("data")
    assert inside is not None
    return inside.parent


def known_files(book: Book) -> set[str]:
    """Every path that a segment or some version of some table has, or Iceberg metadata, or that waits for removal."""
    registry = book.lake.registry
    files = registry.read_with(lambda reader: files_to_check(reader, "", MOST))
    there = sorted(path for path in remains(warehouse_of(book)) if path.startswith(f"{ICEBERG}/"))
    streams = sorted(path for path in remains(warehouse_of(book)) if path.startswith("topics/"))
    unknown = registry.read_with(lambda reader: unknown_stream_paths(reader, streams))
    segments = set(streams) - set(unknown)
    return segments | {file.file_path for file in files} | registry.read_with(lambda reader: known_paths(reader, there))


def of_outside_engines(path: str) -> bool:
    """Whether a path is one that outside engines write themselves, not in the folder of an attempt of this book's."""
    return path.startswith(f"{ICEBERG}/") and (path.split("/")[2] == "data" or path.count("/") == 3)


def remains(folder: Path) -> set[str]:
    """Every file below a folder, and every folder with nothing in it."""
    found = set()
    for place, folders, files in os.walk(folder):
        here = Path(place).relative_to(folder)
        found |= {(here / name).as_posix() for name in files}
        # The folders of tables, and the roots, may be empty.
        if not folders and not files and len(here.parts) > 2:
            found.add(f"{here.as_posix()}/")
    return found


# --- interfering ---------------------------------------------------------------


def once_at(point: str, action: Callable[[], object]) -> AbstractContextManager[None]:
    """Do something the first time a point is reached, and not when that comes to the point itself."""
    waiting = [action]

    def act() -> None:
        if waiting:
            waiting.pop()()

    return failpoints.armed(point, act)


def raising(error: Exception) -> Callable[[], None]:
    """What fails with this error."""

    def fail() -> None:
        raise error

    return fail
