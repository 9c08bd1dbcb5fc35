"""A topic as its users see it: what it is, and its records for Spark, producers and consumers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from lakebook.errors import LakebookError, ReadFailed
from lakebook.lake.lake import Lake, check_reachable
from lakebook.registry.partitions import Partition
from lakebook.registry.topics import Topic as TopicRecord
from lakebook.registry.topics import not_found
from lakebook.spark.session import check_spark, reason_of
from lakebook.spark.topics import read_segments
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.pinning import Pin
from lakebook.streams.ranges import EARLIEST, LATEST, Places, Selection, partitions_of, select

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession
    from lakebook.streams.consumer import Consumer
    from lakebook.streams.producer import Producer


@dataclass(frozen=True)
class TopicDescription:
    """Everything there is to say about a topic, without its segments."""

    name: str
    id: int
    partition_count: int
    retention_ms: int | None
    config: Mapping[str, str]
    #: The records that are kept.
    record_count: int
    partitions: tuple[Partition, ...]
    created_at: datetime
    updated_at: datetime


class Reads:
    """What reads outside a `with` block have pinned in this process, until it is released."""

    def __init__(self) -> None:
        self._pins: list[Pin] = []

    def keep(self, pin: Pin) -> None:
        """Hold a pin until everything is released."""
        self._pins.append(pin)

    def release(self) -> None:
        """Let go of everything that was pinned."""
        pins, self._pins = self._pins, []
        for pin in pins:
            pin.close()


class Topic:
    """One topic, by its name."""

    def __init__(
        self,
        lake: Lake,
        metadata: MetadataStore,
        name: str,
        reads: Reads,
        *,
        producer: Callable[..., Producer],
        consumer: Callable[..., Consumer],
    ) -> None:
        self._lake = lake
        self._metadata = metadata
        self._reads = reads
        self._producer, self._consumer = producer, consumer
        self.name = name

    def __repr__(self) -> str:
        return f"Topic({self.name!r})"

    @property
    def record(self) -> TopicRecord:
        """The topic as the registry has it now."""
        found = self._metadata.get_topic(self.name)
        if found is None:
            raise not_found(self.name)
        return found

    def describe(self) -> TopicDescription:
        """Everything there is to say about the topic."""
        record = self.record
        partitions = tuple(partitions_of(self._metadata, self.name).values())
        return TopicDescription(
            record.name,
            record.id,
            record.partition_count,
            record.retention_ms,
            dict(record.config),
            sum(item.high_watermark - item.log_start for item in partitions),
            partitions,
            record.created_at,
            record.updated_at,
        )

    def read(
        self,
        spark: SparkSession,
        *,
        start: Places = EARLIEST,
        end: Places = LATEST,
        partitions: Iterable[int] | None = None,
    ) -> DataFrame:
        """The records of a range as a Spark DataFrame. What it reads is pinned until the book is closed.

        `start` and `end` are each 'earliest', 'latest', an offset, or a time, for all partitions or as a
        mapping for some. The end itself is not read.
        """
        check_spark(spark, self._lake.store.warehouse)
        check_reachable(self._lake)
        pin = Pin(self._lake)
        try:
            frame = frame_of(
                self._lake, spark, select(self._lake, self._metadata, pin, self.name, start, end, partitions)
            )
        except BaseException:
            pin.close()
            raise
        self._reads.keep(pin)
        return frame

    def producer(self, **options: Any) -> Producer:
        """What sends records to the topic; the options are those of `Book.producer`."""
        return self._producer(self.name, **options)

    def consumer(self, **options: Any) -> Consumer:
        """What reads the topic record by record; the options are those of `Book.consumer`."""
        return self._consumer(self.name, **options)


def frame_of(lake: Lake, spark: SparkSession, selection: Selection) -> DataFrame:
    """The records of a selection, by Spark's own Parquet reader; whoever selected it holds the pin."""
    store = lake.store
    cut = [item for item in selection.slices if not item.is_whole]
    try:
        return read_segments(
            spark,
            [store.uri(item.path) for item in selection.slices if item.is_whole],
            [store.uri(item.path) for item in cut],
            {item.partition: selection.ranges[item.partition] for item in cut},
            on_disk=store.warehouse.folder is not None,
        )
    except LakebookError:
        raise
    except Exception as error:
        raise ReadFailed(f"Spark cannot read it ({reason_of(error)})", on=f"topic {selection.topic}") from error
