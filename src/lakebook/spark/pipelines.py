"""What pipelines do on Spark: decoding records, transforming rows, and counting what was read."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from lakebook.errors import InvalidPipeline
from lakebook.names import shown
from lakebook.spark.avro import AvroRecords, avro_fields, read_avro
from lakebook.spark.frames import empty
from lakebook.spark.topics import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession

RAW, JSON, AVRO = "raw", "json", "avro"
#: Columns that say where a row comes from, as the target has them. Some shorter names are Iceberg's own.
PROVENANCE = ("_source_topic", "_source_partition", "_source_offset", "_source_timestamp")
_RECORD = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
#: The columns of records that did not fit, as Spark's DDL has them.
DEAD_LETTERS = (
    "pipeline STRING, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, key BINARY, value BINARY,"
    " headers ARRAY<STRUCT<key: STRING, value: BINARY>>, reason STRING, failed_at TIMESTAMP"
)
_DECODED, _REASON, _CORRUPT = "__lakebook_decoded", "__lakebook_reason", "__lakebook_corrupt"
_RECORDS, _DEAD = "records", "dead"

# What makes rows of rows one by one, as Spark names the parts of a plan.
_ROW_WISE = {
    *("WithCTE", "CTERelationDef", "CTERelationRef", "SubqueryAlias", "View", "LogicalRDD", "LocalRelation"),
    *(
        "CollectMetrics",
        "Project",
        "Filter",
        "Generate",
        "Sort",
        "Repartition",
        "RepartitionByExpression",
        "RebalancePartitions",
    ),
    *("MapInPandas", "MapInArrow", "PythonMapInArrow", "BatchEvalPython", "ArrowEvalPython", "ResolvedHint"),
    *("DeserializeToObject", "MapElements", "MapPartitions", "SerializeFromObject", "TypedFilter"),
}
_OBSERVED = "CollectMetrics"
_DEFINED, _REFERRED = re.compile(r"CTERelationDef (\d+)"), re.compile(r"CTERelationRef (\d+)")
_SUBQUERY = re.compile(r"\b(?:list|scalar-subquery|exists|array-subquery|lateral-subquery)#\d+ \[")
_NODE = re.compile(r"^[\s:+-]*(?:!|')?([A-Za-z]\w*)")


# --- decoding ------------------------------------------------------------------


def of_topics(frames: Sequence[tuple[str, DataFrame]]) -> DataFrame:
    """Records of several topics as one frame, each with the name of its topic."""
    from pyspark.sql import functions

    named = [frame.select(functions.lit(topic).alias("topic"), "*") for topic, frame in frames]
    return reduce(lambda left, right: left.unionByName(right), named)


def no_records(spark: SparkSession) -> DataFrame:
    """A frame of records without one."""
    return of_topics([("", empty(spark, COLUMNS))])


@dataclass(frozen=True)
class Decoder:
    """How records become columns: not at all, as JSON of some columns, or as Avro of a schema."""

    kind: str = RAW
    #: The columns of JSON, as Spark describes them; one that is not nullable has to be there.
    columns: Mapping[str, Any] | None = None
    #: How records of Avro are read.
    avro: AvroRecords | None = None

    def fields(self) -> Any:
        """The columns that it gives, as Spark has them."""
        from pyspark.sql.types import StructType

        if self.kind == AVRO:
            assert self.avro is not None
            return avro_fields(self.avro.schema)
        assert self.columns is not None
        return StructType.fromJson(dict(self.columns))


def decoded(frame: DataFrame, decoder: Decoder) -> DataFrame:
    """Records with what is in them, or why that cannot be told."""
    from pyspark.sql import functions

    if decoder.kind == RAW:
        return frame.withColumn(_REASON, functions.lit(None).cast("string"))
    if decoder.kind == AVRO:
        assert decoder.avro is not None
        return read_avro(frame, decoder.avro, _DECODED, _REASON)
    fields = decoder.fields()
    text = functions.col("value").cast("string")
    wanted = _with_corrupt(fields)
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    read = frame.withColumn(_DECODED, functions.from_json(text, wanted, options))
    found = functions.col(_DECODED)
    reason = (
        functions.when(functions.col("value").isNull(), "it has no value")
        .when(~functions.is_valid_utf8(text), "it is not UTF-8")
        .when(found.isNull() | found.getField(_CORRUPT).isNotNull(), "it is not JSON that fits the schema")
        .when(~_is_one_object(text), "there is more in it than one object")
    )
    for field in fields.fields:
        if not field.nullable:
            reason = reason.when(found.getField(field.name).isNull(), f"it has no {field.name}")
    return read.withColumn(_REASON, reason.otherwise(functions.lit(None)))


def _is_one_object(text: Column) -> Column:
    """Whether nothing follows the object that a text begins with: Spark's reader of JSON would not look at it."""
    from pyspark.sql import functions

    # Most are flat: then the first brace that closes is the last character, and that is cheap to find out.
    flat = functions.instr(text, "}") == functions.length(functions.rtrim(text, functions.lit(" \t\r\n")))
    # As the only element of a list, and as the first of two: a bracket in the text that ends the list would give
    # the same number for both.
    alone = functions.json_array_length(functions.concat(functions.lit("["), text, functions.lit("]")))
    of_two = functions.json_array_length(functions.concat(functions.lit("["), text, functions.lit(",1]")))
    return flat | functions.coalesce((alone == 1) & (of_two == 2), functions.lit(False))


def _with_corrupt(fields: Any) -> Any:
    from pyspark.sql.types import StringType, StructField, StructType

    optional = [StructField(field.name, field.dataType, True) for field in fields.fields]
    return StructType([*optional, StructField(_CORRUPT, StringType())])


def good_rows(frame: DataFrame, decoder: Decoder, *, provenance: bool) -> DataFrame:
    """What a transformation sees of decoded records: their columns, and where they come from if that is asked for."""
    from pyspark.sql import functions

    good = frame.where(functions.col(_REASON).isNull())
    if decoder.kind == RAW:
        columns = [functions.col(name) for name in _RECORD]
    else:
        names = [field.name for field in decoder.fields().fields]
        columns = [functions.col(_DECODED).getField(name).alias(name) for name in names]
    if provenance:
        columns += [functions.col(name.removeprefix("_source_")).alias(name) for name in PROVENANCE]
    return good.select(columns)


def dead_rows(frame: DataFrame, pipeline: str) -> DataFrame:
    """Records that did not fit, as the table of dead letters has them."""
    from pyspark.sql import functions

    bad = frame.where(functions.col(_REASON).isNotNull())
    return bad.select(
        functions.lit(pipeline).alias("pipeline"),
        *_RECORD,
        functions.col(_REASON).alias("reason"),
        functions.current_timestamp().alias("failed_at"),
    )


def without_reason(frame: DataFrame) -> DataFrame:
    """Rows that need no decoding, as a transformation sees them."""
    return frame.drop(_REASON)


def first_dead(frame: DataFrame) -> str:
    """Where one of the records lies that did not fit, and why it did not."""
    from pyspark.sql import functions

    bad = frame.where(functions.col(_REASON).isNotNull()).select("topic", "partition", "offset", _REASON)
    row = bad.limit(1).collect()[0]
    return f"{row['topic']}/{row['partition']}, offset {row['offset']}: {row[_REASON]}"


# --- transforming --------------------------------------------------------------


def transformed(frame: DataFrame, sql: str | None, function: str | None) -> DataFrame:
    """What a pipeline makes of its source."""
    if function is not None:
        made = load_function(function)(frame)
        if not hasattr(made, "sparkSession"):
            raise InvalidPipeline(
                f"it gave {shown(type(made).__name__)} and not a DataFrame", on=f"function {function}"
            )
        return made  # type: ignore[no-any-return]
    if sql is None:
        return frame
    # A nested query sees the outer one's names. Braces would be taken for arguments.
    text = sql.strip().rstrip(";").replace("{", "{{").replace("}", "}}")
    query = "\n".join(["WITH source AS (SELECT * FROM {lakebook_source}) SELECT * FROM (", text, ")"])
    return frame.sparkSession.sql(query, lakebook_source=frame)


def load_function(name: str) -> Callable[[Any], Any]:
    """A function by `module:function`."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise InvalidPipeline(
            f"it cannot be loaded ({type(error).__name__}: {error})",
            on=f"function {shown(name)}",
            remedy="Name it module:function, and have the module on the path of whoever runs the pipeline",
        ) from error
    if not callable(found):
        raise InvalidPipeline("it is not a function", on=f"function {shown(name)}")
    return found  # type: ignore[no-any-return]


def check_row_wise(frame: DataFrame) -> None:
    """Refuse what does not make rows of rows one by one: it would depend on where batches are cut."""
    text = _plan_of(frame)
    nodes = [match.group(1) for line in text.splitlines() if (match := _NODE.match(line))]
    strange = next((node for node in nodes if node not in _ROW_WISE), None)
    if strange is None and _SUBQUERY.search(text):
        strange = "a subquery"
    referred = _REFERRED.findall(text)
    if strange is None and (
        nodes.count(_OBSERVED) != 1 or any(referred.count(number) != 1 for number in _DEFINED.findall(text))
    ):
        # It would be read not at all, or several times.
        strange = "rows that do not come from `source`, or from it twice"
    if strange is not None:
        raise InvalidPipeline(
            f"the transformation has {_WORDS.get(strange, strange)}, whose outcome depends on where batches are cut",
            on="pipeline",
            remedy="A pipeline transforms row by row; make a view of this query instead (`lakebook views create`)",
        )


_WORDS = {
    "Aggregate": "an aggregation",
    "Distinct": "DISTINCT",
    "Deduplicate": "a removal of duplicates",
    "Window": "a window",
    "Join": "a join",
    "GlobalLimit": "LIMIT",
    "LocalLimit": "LIMIT",
    "Union": "a union",
    "OneRowRelation": "rows that come from no source",
}


def _plan_of(frame: DataFrame) -> str:
    """The analysed plan as text, from a session of either kind."""
    if hasattr(frame, "_jdf"):
        return str(frame._jdf.queryExecution().analyzed().toString())
    explained: Any = frame
    text = str(explained._explain_string(extended=True))
    return (
        text.partition("== Analyzed Logical Plan ==")[2]
        .partition("== Optimized")[0]
        .partition("\n")[2]
        .partition("\n")[2]
    )


# --- counting ------------------------------------------------------------------


def observing(frame: DataFrame) -> tuple[DataFrame, Observation]:
    """Decoded records that are counted while they are read."""
    from pyspark.sql import Observation, functions

    seen = Observation()
    return frame.observe(seen, *_counts(functions)), seen


def _counts(functions: Any) -> list[Column]:
    return [
        functions.count(functions.lit(1)).alias(_RECORDS),
        functions.count(functions.col(_REASON)).alias(_DEAD),
    ]


def observed(seen: Observation) -> tuple[int, int]:
    """How many records were read, and how many of them did not fit; after rows of the frame were written.

    A client of Spark Connect is told nothing of what a write has observed: then it is fewer than none.
    """
    found = seen.get
    return int(found.get(_RECORDS, -1)), int(found.get(_DEAD, 0))


def counted(frame: DataFrame) -> tuple[int, int]:
    """The same by a read of its own."""
    from pyspark.sql import functions

    row = frame.agg(*_counts(functions)).collect()[0]
    return int(row[_RECORDS]), int(row[_DEAD])
