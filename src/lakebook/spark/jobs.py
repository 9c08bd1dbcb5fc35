"""Jobs that Spark's executors do for Lakebook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PATHS_PER_TASK = 50


def measure_on_executors(spark: SparkSession, root: str, paths: list[str]) -> list[tuple[str, int, str]]:
    """Size and checksum of files in a warehouse, taken where the executors are; in the order of `paths`."""
    tasks = max(1, min(len(paths), len(paths) // _PATHS_PER_TASK + spark.sparkContext.defaultParallelism))

    def measured(some: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str, int, str]]:
        store = ObjectStore(Warehouse(root))
        for number, path in some:
            (found,) = store.measure([path])
            yield number, found.path, found.size, found.checksum

    rows = spark.sparkContext.parallelize(list(enumerate(paths)), tasks).mapPartitions(measured).collect()
    return [(path, size, checksum) for _, path, size, checksum in sorted(rows)]


def check_on_executors(
    spark: SparkSession, root: str, files: list[tuple[str, int, str]]
) -> list[tuple[str, int | None, str | None]]:
    """Of files (path, size, checksum), those whose bytes differ: with what was found, none if it is gone."""
    tasks = max(1, min(len(files), len(files) // _PATHS_PER_TASK + spark.sparkContext.defaultParallelism))

    def wrong(some: Iterable[tuple[str, int, str]]) -> Iterator[tuple[str, int | None, str | None]]:
        store = ObjectStore(Warehouse(root))
        for path, size, checksum in some:
            if store.size(path) is None:
                yield path, None, None
                continue
            (found,) = store.measure([path])
            if (found.size, found.checksum) != (size, checksum):
                yield path, found.size, found.checksum

    return sorted(spark.sparkContext.parallelize(files, tasks).mapPartitions(wrong).collect())
