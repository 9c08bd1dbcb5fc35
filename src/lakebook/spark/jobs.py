"""Jobs that Spark's executors do for Lakebook. They need no Spark context, so a Connect session can do them too."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from lakebook.storage.answers import Measured
from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")

_ITEMS_PER_TASK = 50
_TASKS = 8
# An item on its way there, and what was found on its way back: pickled, with its number in the order asked for.
_NUMBERED = "number long, pickled binary"
_ARROW = pa.schema([("number", pa.int64()), ("pickled", pa.binary())])


def on_executors(
    spark: SparkSession, warehouse: Warehouse, items: Sequence[T], act: Callable[[ObjectStore, T], R]
) -> list[R]:
    """What an action gives for each item, done where the executors are, in the order of the items.

    It gets the objects of the warehouse and one item. The action is a function of a module, found there by its name.
    """
    if not items:
        return []

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        store = ObjectStore(warehouse)
        for batch in batches:
            items = [(row["number"], pickle.loads(row["pickled"])) for row in batch.to_pylist()]  # noqa: S301 - our own
            found = [{"number": number, "pickled": pickle.dumps(act(store, item))} for number, item in items]
            yield pa.RecordBatch.from_pylist(found, schema=_ARROW)

    tasks = min(len(items), len(items) // _ITEMS_PER_TASK + _TASKS)
    given = [(number, bytearray(pickle.dumps(item))) for number, item in enumerate(items)]
    frame = spark.createDataFrame(given, _NUMBERED).repartition(tasks)
    rows = {row.number: row.pickled for row in frame.mapInArrow(run, _NUMBERED).collect()}
    return [pickle.loads(rows[number]) for number in range(len(items))]  # noqa: S301 - our own


def measured(store: ObjectStore, path: str) -> Measured:
    """Size and checksum of one file."""
    (found,) = store.measure([path])
    return found
