"""Writing and reading staged tables, and JSON, with Spark."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

from lakebook.predicates import FLOATING, Always, And, Not, Or, Predicate, Test
from lakebook.spark.session import active

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def session_of(frame: Any) -> SparkSession:
    """The session a frame belongs to."""
    session: SparkSession = frame.sparkSession
    return session


def refusing_nulls(frame: DataFrame, fields: Sequence[Mapping[str, Any]]) -> DataFrame:
    """The same rows; a null where one of these fields, as Iceberg has them in JSON, is required fails the job."""
    from pyspark.sql import functions

    checked = []
    for field in fields:
        column = _named((field["name"],))
        for path, missing in _missing(column, field, (field["name"],)):
            text = functions.lit(f"NULL in the required column {'.'.join(path)}")
            column = functions.when(missing, functions.raise_error(text)).otherwise(column)
        checked.append(column.alias(field["name"]))
    return frame.select(checked)


def _missing(column: Column, field: Mapping[str, Any], path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Column]]:
    """For each required field in a column, its path and where it is missing."""
    from pyspark.sql import functions

    found = [(path, column.isNull())] if field["required"] else []
    kind = field["type"]
    if not isinstance(kind, Mapping):
        return found
    if kind["type"] == "struct":
        for child in kind["fields"]:
            inside = _missing(column.getField(child["name"]), child, (*path, child["name"]))
            found += [(inner, column.isNotNull() & missing) for inner, missing in inside]
        return found
    parts = {"element": column} if kind["type"] == "list" else {"value": functions.map_values(column)}
    for name, items in parts.items():
        child = {"type": kind[name], "required": kind[f"{name}-required"]}
        here = (*path, name)
        for number, (inner, _) in enumerate(_missing(functions.lit(None), child, here)):
            each = partial(_missing_in, child, here, number)
            found.append((inner, functions.coalesce(functions.exists(items, each), functions.lit(False))))
    return found


def _missing_in(child: Mapping[str, Any], path: tuple[str, ...], number: int, item: Column) -> Column:
    return _missing(item, child, path)[number][1]


def shaped(frame: DataFrame, schema: dict[str, object]) -> DataFrame:
    """A frame with the columns of a schema, in its order, at every depth; what is missing is null."""
    from pyspark.sql.types import StructType

    return frame.to(StructType.fromJson(schema))


def write_staged(frame: DataFrame, location: str) -> None:
    """Write a frame into a staged Iceberg table. Only files of committed tasks are in its manifest."""
    with active(frame.sparkSession):
        frame.write.format("iceberg").mode("append").save(location)


def write_json(frame: DataFrame, location: str, compression: str) -> None:
    """Write a frame as lines of JSON with Spark's own writer."""
    # Nulls are written: a column that is null in every row of a file must not vanish from it.
    writer = frame.write.mode("errorifexists").option("ignoreNullFields", "false").option("compression", compression)
    # By default the microseconds are cut.
    writer = writer.option("timestampFormat", "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX").option("timeZone", "UTC")
    writer = writer.option("timestampNTZFormat", "yyyy-MM-dd'T'HH:mm:ss.SSSSSS")
    # By rename of whole tasks: slower on S3 than the other algorithm, but a failed attempt leaves nothing.
    writer.option("mapreduce.fileoutputcommitter.algorithm.version", "1").json(location)


def count_lines(spark: SparkSession, paths: list[str]) -> dict[str, int]:
    """How many lines each of some files has, by its name; one that has none is not there."""
    # Each line that Spark has written ends so, and no other character ends one.
    reader = spark.read.option("lineSep", "\n")
    lines = reader.option("ignoreMissingFiles", "false").option("ignoreCorruptFiles", "false").text(paths)
    counted = lines.selectExpr("_metadata.file_name AS name").groupBy("name").count()
    return {row["name"]: row["count"] for row in counted.collect()}


def read_staged(spark: SparkSession, location: str) -> DataFrame:
    """A frame over a staged table."""
    return spark.read.format("iceberg").load(location)


def read_json(spark: SparkSession, paths: list[str], schema: dict[str, object]) -> DataFrame:
    """A frame over files of JSON lines; a line that is none, or does not fit the schema, fails the read."""
    from pyspark.sql.types import StructType

    reader = spark.read.schema(StructType.fromJson(schema)).option("mode", "FAILFAST")
    return reader.option("ignoreMissingFiles", "false").option("ignoreCorruptFiles", "false").json(paths)


def read_known_json(spark: SparkSession, paths: list[str], schema: dict[str, object]) -> DataFrame:
    """The same of a user's files; a key that the schema does not have, at any depth, fails the read too.

    Spark's own source would pass over it in silence. So lines are read as texts, and each is taken apart twice: for
    its keys and for its values.
    """
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType, StructType

    target = StructType.fromJson(schema)
    reader = spark.read.option("ignoreMissingFiles", "false").option("ignoreCorruptFiles", "false")
    lines = reader.text(paths)
    # What folders say, as in `day=2026-05-01`, comes after the line.
    line, of_folders = lines.columns[0], lines.columns[1:]
    text = _named((line,))
    fields: Sequence[Mapping[str, Any]] = target.jsonValue()["fields"]
    # A line may be a list of rows.
    rows = functions.when(functions.ltrim(text).startswith("["), functions.from_json(text, "array<string>"))
    strange = _strange_within(rows.otherwise(functions.array(text)), {"type": "struct", "fields": fields}, ())
    told = functions.concat(
        functions.lit(_STRANGE), functions.to_json(functions.slice(functions.array_distinct(strange), 1, _MOST_STRANGE))
    )
    known = functions.when(functions.size(strange) > 0, functions.raise_error(told)).otherwise(functions.lit(True))
    row = _unused("lakebook_row", lines.columns)
    values = functions.explode(functions.from_json(text, ArrayType(target), {"mode": "FAILFAST"})).alias(row)
    own = [functions.col(_quoted(name)) for name in of_folders]
    found = lines.where((functions.trim(text) != "") & known.cast("boolean")).select(values, *own)
    return found.select(
        *(
            (
                _named((field.name,)).cast(field.dataType) if field.name in of_folders else _named((row, field.name))
            ).alias(field.name)
            for field in target.fields
        ),
        *(column for column, name in zip(own, of_folders, strict=True) if name not in target.names),
    )


_STRANGE = "Lakebook found strange keys: "
_MOST_STRANGE = 20


def strange_keys(error: BaseException | None) -> list[str]:
    """The keys for which `read_known_json` has failed; none if that is not why."""
    _, found, rest = str(error).partition(_STRANGE)
    if not found:
        return []
    keys, _ = json.JSONDecoder().raw_decode(rest)
    return [str(key) for key in keys]


def _strange_keys(text: Column, fields: Sequence[Mapping[str, Any]], path: tuple[str, ...]) -> Column:
    """The keys of an object of JSON, and of what is in it, that are none of these fields."""
    from pyspark.sql import functions

    entries = functions.from_json(text, "map<string,string>")
    known = functions.array(*(functions.lit(field["name"]) for field in fields))
    before = functions.lit("".join(f"{name}." for name in path))
    own = functions.transform(
        functions.array_except(functions.map_keys(entries), known), lambda key: functions.concat(before, key)
    )
    inside = [
        _strange_in(
            functions.try_element_at(entries, functions.lit(field["name"])), field["type"], (*path, field["name"])
        )
        for field in fields
        if _has_fields(field["type"])
    ]
    return functions.concat(*(functions.coalesce(part, _no_texts()) for part in (own, *inside)))


def _strange_in(text: Column, kind: Mapping[str, Any], path: tuple[str, ...]) -> Column:
    from pyspark.sql import functions

    if kind["type"] == "struct":
        return _strange_keys(text, kind["fields"], path)
    if kind["type"] == "array":
        return _strange_within(functions.from_json(text, "array<string>"), kind["elementType"], path)
    values = functions.map_values(functions.from_json(text, "map<string,string>"))
    return _strange_within(values, kind["valueType"], path)


def _strange_within(texts: Column, kind: Mapping[str, Any], path: tuple[str, ...]) -> Column:
    from pyspark.sql import functions

    found = functions.flatten(functions.transform(texts, lambda text: _strange_in(text, kind, path)))
    return functions.coalesce(found, _no_texts())


def _no_texts() -> Column:
    from pyspark.sql import functions

    return functions.array().cast("array<string>")


def _has_fields(kind: Any) -> bool:
    """Whether there is a struct in a type, as Spark describes it in JSON."""
    if not isinstance(kind, Mapping):
        return False
    return kind["type"] == "struct" or _has_fields(kind.get("elementType", kind.get("valueType")))


def read_parquet(spark: SparkSession, paths: list[str]) -> DataFrame:
    """A frame over a user's files of Parquet."""
    reader = spark.read.option("ignoreCorruptFiles", "false").option("ignoreMissingFiles", "false")
    # Else the columns of one of the files are those of all.
    return reader.option("mergeSchema", "true").parquet(*paths)


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


def union(frames: list[DataFrame]) -> DataFrame:
    """Frames of the same columns as one."""
    return reduce(lambda left, right: left.unionByName(right), frames)


def by_file(frame: DataFrame, tasks: Mapping[str, int], number: int) -> DataFrame:
    """The same rows, those of each file in the task that is given for its location; others in the first.

    Rows of a file stay together, and are read by as many tasks as Spark likes before.
    """
    from pyspark.sql import functions

    session = session_of(frame)
    names = frame.columns
    file, task = _unused("lakebook_file", names), _unused("lakebook_task", names)
    known = session.createDataFrame(list(tasks.items()), f"`{file}` STRING, `{task}` INT")
    named = frame.withColumn(file, functions.input_file_name())
    placed = named.join(functions.broadcast(known), on=file, how="left")
    wanted = functions.coalesce(_named((task,)), functions.lit(0))
    return columns(placed.repartitionById(number, wanted), names)


def _unused(name: str, taken: Sequence[str]) -> str:
    """A name that no column has, in whatever case."""
    lower = {other.lower() for other in taken}
    while name in lower:
        name = f"_{name}"
    return name


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

    column = functions.col(_quoted(path[0]))
    for name in path[1:]:
        column = column.getField(name)
    return column


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


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
    if test.type == "uuid":
        # Iceberg's readers pass over row groups that have the value; of an expression they know nothing.
        column = functions.lower(column)
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
        case "gt" | "ge":
            found = column > values[0] if test.op == "gt" else column >= values[0]
            # For Spark it is so anyway; but Iceberg's readers pass over row groups by bounds without NaN.
            return found | functions.isnan(column) if test.type in FLOATING else found
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
