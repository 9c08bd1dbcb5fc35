"""Writing and reading staged tables, and JSON, with Spark."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from functools import reduce
from typing import TYPE_CHECKING, Any

from lakebook.predicates import Always, And, Not, Or, Predicate, Test

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def session_of(frame: Any) -> SparkSession:
    """The session a frame belongs to."""
    session: SparkSession = frame.sparkSession
    return session


def shaped(frame: DataFrame, schema: dict[str, object]) -> DataFrame:
    """A frame with the columns of a schema, in its order, at every depth; what is missing is null."""
    from pyspark.sql.types import StructType

    return frame.to(StructType.fromJson(schema))


def write_staged(frame: DataFrame, location: str) -> None:
    """Write a frame into a staged Iceberg table. Only files of committed tasks are in its manifest."""
    frame.write.format("iceberg").mode("append").save(location)


def write_json(frame: DataFrame, location: str, compression: str) -> None:
    """Write a frame as lines of JSON with Spark's own writer."""
    # Nulls are written: a column that is null in every row of a file must not vanish from it.
    writer = frame.write.mode("errorifexists").option("ignoreNullFields", "false").option("compression", compression)
    # By rename of whole tasks: slower on S3 than the other algorithm, but a failed attempt leaves nothing.
    writer.option("mapreduce.fileoutputcommitter.algorithm.version", "1").json(location)


def read_staged(spark: SparkSession, location: str) -> DataFrame:
    """A frame over a staged table."""
    return spark.read.format("iceberg").load(location)


def read_json(spark: SparkSession, paths: list[str], schema: dict[str, object]) -> DataFrame:
    """A frame over files of JSON lines; a line that is none, or does not fit the schema, fails the read."""
    from pyspark.sql.types import StructType

    reader = spark.read.schema(StructType.fromJson(schema)).option("mode", "FAILFAST")
    return reader.option("ignoreMissingFiles", "false").option("ignoreCorruptFiles", "false").json(paths)


def read_files(spark: SparkSession, kind: str, paths: list[str], schema: dict[str, object] | None) -> DataFrame:
    """A frame over a user's files of that format."""
    if kind == "json" and schema is not None:
        return read_json(spark, paths, schema)
    return spark.read.option("ignoreCorruptFiles", "false").format(kind).load(paths)


def empty(spark: SparkSession, schema: dict[str, object]) -> DataFrame:
    """A frame without rows."""
    from pyspark.sql.types import StructType

    return spark.createDataFrame([], StructType.fromJson(schema))


def renamed(frame: DataFrame, schema: dict[str, object]) -> DataFrame:
    """A frame whose columns have these names, by their position at every depth."""
    from pyspark.sql.types import StructType

    target = StructType.fromJson(schema)
    named = frame.toDF(*target.names)
    return named.select([_named((field.name,)).cast(field.dataType).alias(field.name) for field in target.fields])


def columns(frame: DataFrame, names: Sequence[str]) -> DataFrame:
    """Some columns of a frame."""
    return frame.select([_named((name,)) for name in names])


def together(frame: DataFrame, rest: DataFrame) -> DataFrame:
    """The rows of both; a column that the first has not is null in its rows."""
    return rest.unionByName(frame, allowMissingColumns=True)


def union(frames: list[DataFrame]) -> DataFrame:
    """Frames of the same columns as one."""
    return reduce(lambda left, right: left.unionByName(right), frames)


def matching(frame: DataFrame, predicate: Predicate) -> DataFrame:
    """The rows for which a predicate is true."""
    return frame.where(column_of(predicate))


def not_matching(frame: DataFrame, predicate: Predicate) -> DataFrame:
    """The rows for which a predicate is false or unknown."""
    from pyspark.sql import functions

    return frame.where(~functions.coalesce(column_of(predicate), functions.lit(False)))


def column_of(predicate: Predicate) -> Column:
    """A predicate as a Spark column."""
    from pyspark.sql import functions

    if isinstance(predicate, Always):
        return functions.lit(predicate.value)
    if isinstance(predicate, And):
        return column_of(predicate.left) & column_of(predicate.right)
    if isinstance(predicate, Or):
        return column_of(predicate.left) | column_of(predicate.right)
    if isinstance(predicate, Not):
        return ~column_of(predicate.child)
    assert isinstance(predicate, Test)
    return _test(predicate)


def _named(path: tuple[str, ...]) -> Column:
    from pyspark.sql import functions

    column = functions.col("`" + path[0].replace("`", "``") + "`")
    for name in path[1:]:
        column = column.getField(name)
    return column


def _literal(value: Any) -> Column:
    from pyspark.sql import functions

    if isinstance(value, datetime):
        # By its text: PySpark takes a datetime without a zone for one of the machine's zone.
        return functions.lit(value.isoformat(sep=" ")).cast("timestamp_ntz" if value.tzinfo is None else "timestamp")
    # Spark has no type of its own for a UUID.
    return functions.lit(str(value) if isinstance(value, uuid.UUID) else value)


def _test(test: Test) -> Column:
    from pyspark.sql import functions

    column = _named(test.path)
    values = [_literal(value) for value in test.values]
    match test.op:
        case "eq":
            return column == values[0]
        case "ne":
            return column != values[0]
        case "lt":
            return column < values[0]
        case "le":
            return column <= values[0]
        case "gt":
            return column > values[0]
        case "ge":
            return column >= values[0]
        case "in":
            return column.isin(*values)
        case "not_in":
            return ~column.isin(*values)
        case "is_null":
            return column.isNull()
        case "not_null":
            return column.isNotNull()
        case "is_nan":
            return functions.isnan(column)
        case "not_nan":
            return ~functions.isnan(column)
        case "starts_with":
            return column.startswith(values[0])
        case "not_starts_with":
            return ~column.startswith(values[0])
    raise AssertionError(test.op)
