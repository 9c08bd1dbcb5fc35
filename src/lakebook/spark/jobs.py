"""Jobs that Spark's executors do for Lakebook. They need no Spark context, so a Connect session can do them too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PATHS_PER_TASK = 50
_TASKS = 8
_FILES = "number long, path string, size long, checksum string"

#: A file as a job gets it and gives it back: its number in the order asked for, path, size and checksum.
_File = tuple[int, str, int | None, str | None]


def measure_on_executors(spark: SparkSession, root: str, paths: list[str]) -> list[tuple[str, int, str]]:
    """Size and checksum of files in a warehouse, taken where the executors are; in the order of `paths`."""

    def measured(number: int, path: str, *_: Any) -> _File:
        (found,) = ObjectStore(Warehouse(root)).measure([path])
        return number, found.path, found.size, found.checksum

    rows = _of_each(spark, [(number, path, None, None) for number, path in enumerate(paths)], measured)
    return [(path, size or 0, checksum or "") for _, path, size, checksum in sorted(rows)]


def check_on_executors(
    spark: SparkSession, root: str, files: list[tuple[str, int, str]]
) -> list[tuple[str, int | None, str | None]]:
    """Of files (path, size, checksum), those whose bytes differ: with what was found, none if it is gone."""

    def wrong(number: int, path: str, size: int | None, checksum: str | None) -> _File | None:
        store = ObjectStore(Warehouse(root))
        if store.size(path) is None:
            return number, path, None, None
        (found,) = store.measure([path])
        return None if (found.size, found.checksum) == (size, checksum) else (number, path, found.size, found.checksum)

    rows = _of_each(spark, [(number, *file) for number, file in enumerate(files)], wrong)
    return sorted((path, size, checksum) for _, path, size, checksum in rows)


def _of_each(spark: SparkSession, files: Sequence[_File], act: Callable[..., _File | None]) -> list[_File]:
    """What an action gives for each file; several files to a task."""
    if not files:
        return []
    tasks = min(len(files), len(files) // _PATHS_PER_TASK + _TASKS)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = [act(*row.values()) for row in batch.to_pylist()]
            columns = list(zip(*(file for file in found if file is not None), strict=True)) or [()] * 4
            kinds = (pa.int64(), pa.string(), pa.int64(), pa.string())
            arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, names=["number", "path", "size", "checksum"])

    frame = spark.createDataFrame(list(files), _FILES).repartition(tasks)
    return [tuple(row) for row in frame.mapInArrow(run, _FILES).collect()]
