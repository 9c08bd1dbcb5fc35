"""Segments of topics as Spark frames, read by Spark's own Parquet reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from lakebook.spark.frames import empty

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def _columns(**kinds: object) -> dict[str, object]:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in kinds.items()]
    return {"type": "struct", "fields": fields}


#: The columns of a topic, as Spark describes them in JSON.
COLUMNS = _columns(
    partition="integer",
    offset="long",
    timestamp="timestamp",
    key="binary",
    value="binary",
    headers={"type": "array", "elementType": _columns(key="string", value="binary"), "containsNull": True},
)
# From how many paths on Spark looks at them by a job, and with how many tasks.
_THRESHOLD = "spark.sql.sources.parallelPartitionDiscovery.threshold"
_TASKS = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
_MOST_TASKS = 100


def read_segments(
    spark: SparkSession,
    whole: Sequence[str],
    cut: Sequence[str],
    ranges: Mapping[int, tuple[int, int]],
    *,
    on_disk: bool,
) -> DataFrame:
    """The records of segments, by their locations: of some all, of those that a range cuts what lies in it."""
    if not whole and not cut:
        return empty(spark, COLUMNS)
    with _few_tasks(spark, len(whole) + len(cut), on_disk):
        frames = [_read(spark, whole)] if whole else []
        if cut:
            # Only these: a test of every record would be felt.
            frames.append(_read(spark, cut).where(_inside(ranges)))
    return reduce(lambda left, right: left.unionAll(right), frames)


def _read(spark: SparkSession, locations: Sequence[str]) -> DataFrame:
    from pyspark.sql.types import StructType

    reader = spark.read.schema(StructType.fromJson(COLUMNS))
    reader = reader.option("ignoreMissingFiles", "false").option("ignoreCorruptFiles", "false")
    # The locations are names, not patterns, and no folders to look for partitions in.
    reader = reader.option("__globPaths__", "false").option("recursiveFileLookup", "true")
    return reader.parquet(*locations)


@contextmanager
def _few_tasks(spark: SparkSession, paths: int, on_disk: bool) -> Iterator[None]:
    """Have Spark look at many paths in reasonable time: by default it starts a task for each.

    On a disk one thread is done with them sooner than a job has begun. The settings are the session's, and
    put back at once: others that read at the same time look at their paths in the same way, and find the same.
    """
    wanted = {_THRESHOLD: str(paths)} if on_disk else {_TASKS: str(_MOST_TASKS)}
    before = {name: spark.conf.get(name, None) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, former in before.items():
            spark.conf.unset(name) if former is None else spark.conf.set(name, former)


def _inside(ranges: Mapping[int, tuple[int, int]]) -> Column:
    """Whether a record lies in the range of its partition."""
    from pyspark.sql import functions

    partition, offset = functions.col("partition"), functions.col("offset")
    alike: dict[tuple[int, int], list[int]] = {}
    for number, bounds in ranges.items():
        alike.setdefault(bounds, []).append(number)
    return reduce(
        or_,
        (
            partition.isin(*numbers) & (offset >= start) & (offset < end)
            for (start, end), numbers in sorted(alike.items())
        ),
    )
