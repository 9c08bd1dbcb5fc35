"""Queries over frames: each by a name of its own, which nobody else sees."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from lakebook.spark.frames import _literal, _named

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


@contextmanager
def query_over(
    spark: SparkSession,
    sources: Mapping[str, DataFrame],
    over: Callable[[Mapping[str, str]], str],
    parameters: Mapping[str, str],
) -> Iterator[DataFrame]:
    """The rows of a query over frames, good within the block; `over` writes the query for the frames' names."""
    names = {name: f"lakebook_{uuid.uuid4().hex}" for name in sources}
    try:
        for name, frame in sources.items():
            frame.createOrReplaceTempView(names[name])
        yield spark.sql(over(names), args=dict(parameters)) if parameters else spark.sql(over(names))
    finally:
        for name in names.values():
            spark.catalog.dropTempView(name)


def query_frame(
    spark: SparkSession, sources: Mapping[str, DataFrame], over: Callable[[Mapping[str, str]], str]
) -> DataFrame:
    """The rows of a query over frames, good for as long as those are.

    A client of Spark Connect has its names resolved with every action, so that there they stay.
    """
    if hasattr(spark, "sparkContext"):
        with query_over(spark, sources, over, {}) as frame:
            frame.schema  # noqa: B018 - resolved from here on
            return frame
    names = {name: f"lakebook_{uuid.uuid4().hex}" for name in sources}
    for name, frame in sources.items():
        frame.createOrReplaceTempView(names[name])
    return spark.sql(over(names))


def between(frame: DataFrame, column: str, begin: datetime, end: datetime) -> DataFrame:
    """The rows of a half-open range of time."""
    time = _named((column,))
    return frame.where((time >= _literal(begin)) & (time < _literal(end)))


def as_one_file(frame: DataFrame, sort_by: Sequence[str]) -> DataFrame:
    """The same rows in one task, in order: so they are written to one file."""
    whole = frame.repartition(1)
    return whole.sortWithinPartitions([_named((name,)) for name in sort_by]) if sort_by else whole


def optional_schema(frame: DataFrame) -> StructType:
    """The columns of a frame, each of which may be null, at every depth."""
    from pyspark.sql.types import StructType

    return StructType.fromJson(_optional(frame.schema.jsonValue()))


def _optional(value: Any) -> Any:
    if isinstance(value, list):
        return [_optional(item) for item in value]
    if not isinstance(value, dict):
        return value
    loose = {"nullable": True, "containsNull": True, "valueContainsNull": True}
    return {key: loose[key] if key in loose else _optional(item) for key, item in value.items()}


def is_utc(spark: SparkSession) -> bool:
    """Whether a text without a zone is a time of UTC in a session."""
    return spark.conf.get("spark.sql.session.timeZone") in ("UTC", "Etc/UTC", "GMT", "+00:00")
