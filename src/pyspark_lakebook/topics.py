"""Reading a topic once: planned where the registry is, read where the executors are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from lakebook.errors import ObjectNotFound, ReadFailed
from lakebook.lake.lake import check_reachable
from lakebook.registry.topics import not_found
from lakebook.spark.topics import COLUMNS
from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse
from lakebook.streams.pinning import Pin
from lakebook.streams.ranges import EARLIEST, LATEST, Slice, batches_of, select
from pyspark_lakebook.columns import check_read
from pyspark_lakebook.options import Options

if TYPE_CHECKING:
    import pyarrow as pa

# What one task reads, unless the options say otherwise.
_TASK_BYTES = 64 * 1024**2
_TASK_SEGMENTS = 100


def topic_columns() -> StructType:
    """The columns of every topic."""
    return StructType.fromJson(COLUMNS)


def columns_of(given: Options) -> StructType:
    """The columns of a topic that there is."""
    with given.opened() as book:
        assert given.topic is not None
        if book.metadata.get_topic(given.topic) is None:
            raise not_found(given.topic)
    return topic_columns()


@dataclass(repr=False)
class Segments(InputPartition):
    """What one task reads: slices of segments, by their paths in the warehouse."""

    warehouse: Warehouse
    slices: tuple[Slice, ...]

    def __repr__(self) -> str:
        return f"Segments({len(self.slices)}, {sum(item.end - item.start for item in self.slices)} records)"


def tasks_of(warehouse: Warehouse, slices: Sequence[Slice], per_task: int | None) -> list[Segments]:
    """Slices as tasks, in order: so many segments each, or as many as are read in reasonable time."""
    tasks: list[Segments] = []
    held: list[Slice] = []
    size = 0
    for item in slices:
        full = len(held) >= (per_task or _TASK_SEGMENTS) or (per_task is None and size + item.size > _TASK_BYTES)
        if held and full:
            tasks.append(Segments(warehouse, tuple(held)))
            held, size = [], 0
        held.append(item)
        size += item.size
    return [*tasks, Segments(warehouse, tuple(held))] if held else tasks


def read_task(task: Segments, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The records of a task, as Arrow, without the registry."""
    store = ObjectStore(task.warehouse)
    for item in task.slices:
        try:
            for batch in batches_of(store, item, columns):
                yield batch.select(list(columns))
        except ObjectNotFound as error:
            raise ReadFailed(
                "the segment is gone: it was pinned for a time only, which has passed",
                on=item.path,
                remedy="Read the topic anew, or give the option leaseSeconds",
            ) from error


class TopicReader(DataSourceReader):
    """Reads a range of a topic."""

    def __init__(self, given: Options, schema: StructType) -> None:
        self._given: Options | None = given
        self._columns = check_read(schema, topic_columns(), f"topic {given.topic}")

    def __getstate__(self) -> dict[str, Any]:
        # Executors need no book, and so no password.
        return {"_given": None, "_columns": self._columns}

    def partitions(self) -> Sequence[InputPartition]:
        """Pin the range for a time, and divide its segments among tasks."""
        given = self._given
        assert given is not None and given.topic is not None
        start = given.places("startingOffsets", "startingTimestamp", EARLIEST)
        end = given.places("endingOffsets", "endingTimestamp", LATEST)
        per_task = given.number("segmentsPerTask")
        with given.opened() as book:
            check_reachable(book.lake)
            with Pin(book.lake) as pin:
                found = select(book.lake, book.metadata, pin, given.topic, start, end)
                # This process ends before the read does: nobody will renew the lease, nor end it.
                seconds = given.lease_seconds or book.settings.catalog_lease
                starts = {number: first for number, (first, last) in found.ranges.items() if first < last}
                if starts:
                    book.metadata.pin_topic(given.topic, starts, seconds=seconds, inherit=pin.id)
            return list(tasks_of(book.lake.store.warehouse, found.slices, per_task))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task."""
        # Spark asks once for nothing where there is nothing.
        return read_task(partition, self._columns) if isinstance(partition, Segments) else iter(())
