"""Partitions that are read: each from a position on, pinned, and read ahead.

A position is the next offset that is handed out. Whoever reads holds a lease on all that lies at or after it.
Where an offset is not there (below the log start, above the watermark, in a hole), the reset policy decides;
what is left out is told.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from lakebook.errors import LakebookError, LeaseLost, OffsetBelowLogStart, OffsetBeyondWatermark, RegistryBusy
from lakebook.lake.lake import Lake
from lakebook.registry.partitions import Partition, no_partition
from lakebook.registry.topics import not_found
from lakebook.streams.fetching import Fetched, Fetcher, PartitionStream
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.pinning import Pin
from lakebook.streams.positions import NEW, Skipped, Start, TopicPartition, in_range, offset_of

LOG = logging.getLogger("lakebook.consumer")

# Retention may move a log start while a partition is being pinned; hardly ever that often.
_TRIES = 10


@dataclass(eq=False)
class Reading:
    """A partition that is read."""

    topic: str
    number: int
    topic_id: int
    #: The next offset to be handed out, and up to where whoever reads is known to have done its work.
    position: int
    done: int
    watermark: int
    paused: bool = False
    stream: PartitionStream | None = None

    @property
    def place(self) -> TopicPartition:
        """The partition by its topic's name and its number."""
        return self.topic, self.number

    @property
    def is_behind(self) -> bool:
        """Whether there are records to hand out, as far as is known."""
        return not self.paused and self.position < self.watermark


class Reader:
    """Reads partitions. One thread at a time uses it; `tell` is called by others when there is something to take."""

    def __init__(
        self,
        lake: Lake,
        metadata: MetadataStore,
        topic_ids: Mapping[str, int],
        *,
        reset: str,
        read_ahead: int,
        tell: Callable[[], None],
    ) -> None:
        self._lake = lake
        self._metadata = metadata
        self._topic_ids = topic_ids
        self._reset = reset
        self._fetcher = Fetcher(lake, metadata, read_ahead, tell)
        self._pin = Pin(lake)
        self._served = 0
        self.readings: dict[TopicPartition, Reading] = {}
        #: What is to be read and has not begun: where each partition is to begin.
        self.waiting: dict[TopicPartition, Start] = {}
        self.skipped: list[Skipped] = []
        #: What was taken back, and may be pinned from a later offset on.
        self._returned: set[TopicPartition] = set()

    @property
    def places(self) -> list[TopicPartition]:
        """What is read, or is to be."""
        return sorted({*self.readings, *self.waiting})

    # --- beginning -------------------------------------------------------------------

    def begin(self, wanted: Mapping[TopicPartition, Start]) -> None:
        """Pin partitions and read each from a place on. Those out of range are left as they were, and raised."""
        for _ in range(_TRIES):
            partitions = self.present(wanted)
            offsets: dict[TopicPartition, tuple[int, int]] = {}
            failure: LakebookError | None = None
            for place, where in wanted.items():
                try:
                    offsets[place] = self._settled(partitions[place], where)
                except (OffsetBelowLogStart, OffsetBeyondWatermark) as error:
                    failure = error
            try:
                self._pin_all({place: offset for place, (_, offset) in offsets.items()})
            except (OffsetBelowLogStart, OffsetBeyondWatermark):
                continue  # The log start has moved since it was looked at.
            for place, (asked, offset) in offsets.items():
                self._read_from(partitions[place], offset)
                if asked != offset:
                    self._report(Skipped(*place, asked, offset), "they are not there")
            if failure is not None:
                raise failure
            return
        raise RegistryBusy("the log start moved whenever it was looked at", on="consumer", remedy="Try again")

    def begin_waiting(self) -> None:
        """Begin what is to be read. What cannot be begun goes on waiting, and is raised."""
        if self.waiting:
            self.begin(self.waiting)

    def present(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, Partition]:
        """The partitions as they are now; one that is not there, or of another topic of that name, is an error."""
        wanted = list(places)
        found = self._metadata.get_partitions(wanted) if wanted else {}
        for topic, number in wanted:
            partition = found.get((topic, number))
            if partition is None and self._is_there(topic):
                raise no_partition(topic, number)
            if partition is None or partition.topic_id != self._topic_ids[topic]:
                raise not_found(topic)
        return found

    def _is_there(self, topic: str) -> bool:
        found = self._metadata.get_topics([topic])
        return topic in found and found[topic].id == self._topic_ids[topic]

    def _settled(self, partition: Partition, where: Start) -> tuple[int, int]:
        """The offset that a place stands for, and the one to begin at."""
        asked = offset_of(self._lake, self._metadata, partition, where)
        reading = self.readings.get((partition.topic, partition.partition_id))
        reset = "earliest" if where == NEW else self._reset
        return asked, in_range(partition, asked, reset, None if reading is None else reading.position)

    def _pin_all(self, offsets: Mapping[TopicPartition, int]) -> None:
        by_topic: dict[str, dict[int, int]] = {}
        for (topic, number), offset in offsets.items():
            by_topic.setdefault(topic, {})[number] = offset
        for topic, theirs in by_topic.items():
            self._pin.take(topic, theirs)

    def _read_from(self, partition: Partition, offset: int) -> None:
        place = (partition.topic, partition.partition_id)
        former = self.readings.get(place)
        self._let_go(former)
        reading = Reading(*place, partition.topic_id, offset, offset, partition.high_watermark)
        reading.paused = former is not None and former.paused
        self.waiting = {other: start for other, start in self.waiting.items() if other != place}
        self.readings[place] = reading
        self._pin.advance((partition.topic_id, partition.partition_id), offset)

    def _report(self, skipped: Skipped, why: str) -> None:
        self.skipped.append(skipped)
        topic, number, first, end = skipped
        LOG.warning("%s/%s: the reader goes from %s to %s, for %s", topic, number, first, end, why)
        self._lake.metrics.count_skipped(max(0, end - first))

    # --- the lease -------------------------------------------------------------------

    def hold(self) -> None:
        """See that all is pinned; pin it anew where the lease was lost and the records are still there."""
        try:
            self._pin.check()
        except LeaseLost as lost:
            self._pin_anew(lost)
        for place in list(self._returned):
            self._pin_returned(place)
            self._returned.discard(place)

    def _pin_returned(self, place: TopicPartition) -> None:
        """Pin what was taken back: a renewal may have let go of it. If it is gone, it is begun as the policy says."""
        reading = self.readings.get(place)
        if reading is None:
            return
        try:
            self._pin_all({place: reading.position})
        except OffsetBelowLogStart:
            self.forget([place])
            self.waiting[place] = reading.position

    def _pin_anew(self, lost: LeaseLost) -> None:
        LOG.warning("%s", lost)
        self._pin.close()
        self._pin = Pin(self._lake)
        former, self.readings = self.readings, {}
        for reading in former.values():
            self._let_go(reading)
        self.waiting |= {place: reading.position for place, reading in former.items()}
        try:
            self.begin_waiting()
        except OffsetBelowLogStart as error:
            raise LeaseLost(
                f"{lost.what}, and {error.what}", on=error.on, remedy="Seek to where the reading shall go on"
            ) from error
        finally:
            for place, reading in self.readings.items():
                if place in former:
                    reading.paused = former[place].paused
                    reading.done = min(former[place].done, reading.position)

    def _is_pinned(self) -> bool:
        """Ask the registry whether all is pinned. If it was not, it is now, and everything is read anew."""
        try:
            self._pin.confirm()
        except LeaseLost as lost:
            self._pin_anew(lost)
            return False
        return True

    # --- reading ---------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether there are records to hand out, as far as is known."""
        return any(reading.is_behind for reading in self.readings.values())

    def read_ahead(self) -> None:
        """Have what is there read in the background."""
        for reading in self.readings.values():
            if reading.stream is not None:
                # Also of those that are read to their end: what they hold would be kept from the others.
                self._fetcher.trim(reading.stream, reading.position)
        for reading in self.readings.values():
            if reading.is_behind:
                if reading.stream is None:
                    reading.stream = self._fetcher.open(reading.topic_id, reading.number, reading.position)
                self._fetcher.fetch(reading.stream, reading.watermark)

    def look(self, found: Mapping[TopicPartition, Partition]) -> None:
        """Learn of new records from partitions as they are now."""
        for place, reading in self.readings.items():
            partition = found.get(place)
            if partition is None or partition.topic_id != reading.topic_id:
                raise not_found(reading.topic)
            reading.watermark = max(reading.watermark, partition.high_watermark)

    def take(
        self, most: int, ends: Mapping[TopicPartition, int] | None = None, *, moving: bool = True
    ) -> list[tuple[Reading, pa.RecordBatch]]:
        """What has been read, partition by partition, another one first each time; at most one batch if not moving."""
        readings = [reading for reading in self.readings.values() if reading.is_behind and reading.stream is not None]
        found: list[tuple[Reading, pa.RecordBatch]] = []
        self._served += 1
        for number in range(len(readings)):
            reading = readings[(self._served + number) % len(readings)]
            end = sys.maxsize if ends is None else ends[reading.place]
            try:
                while most > 0 and reading.position < end:
                    batch = self._next_batch(reading, min(most, end - reading.position))
                    if batch is None:
                        break
                    found.append((reading, batch))
                    most -= batch.num_rows
                    if not moving:
                        break
                    self.move(reading, reading.position + batch.num_rows)
            except Exception as error:
                if not found:
                    raise
                # Those before it are handed out now; the next call tells.
                if reading.stream is not None:
                    reading.stream.error = error
            except BaseException:
                self.take_back(found)
                raise
        return found

    def take_back(self, taken: Iterable[tuple[Reading, pa.RecordBatch]]) -> None:
        """Hand out again what was taken and did not arrive."""
        for former, batch in reversed(list(taken)):
            reading, base = self.readings.get(former.place), int(batch.column("offset")[0].as_py())
            if reading is not None and reading.position == base + batch.num_rows:
                self._let_go(reading)
                reading.done = min(reading.done, base)
                self.move(reading, base)
                self._returned.add(reading.place)

    def _next_batch(self, reading: Reading, most: int) -> pa.RecordBatch | None:
        if reading.stream is None:
            return None
        try:
            fetched: Fetched | None = self._fetcher.head(reading.stream, reading.position)
        except LakebookError:
            if self._is_pinned():
                raise
            return None  # It is read anew, under another lease.
        if fetched is not None and fetched.base > reading.position:
            if not self._is_pinned():
                return None
            self._report(Skipped(*reading.place, reading.position, fetched.base), "there are no such records")
            self.move(reading, fetched.base)
        if fetched is None or fetched.batch is None:
            return None
        return fetched.batch.slice(reading.position - fetched.base, most)

    def move(self, reading: Reading, position: int) -> None:
        """Say that everything before a position was handed out."""
        reading.position = position
        self._pin.advance((reading.topic_id, reading.number), position)

    # --- the end ---------------------------------------------------------------------

    def pause(self, reading: Reading) -> None:
        """Hand out nothing of a partition, and keep nothing of it in memory."""
        reading.paused = True
        self._let_go(reading)

    def forget(self, places: Iterable[TopicPartition]) -> None:
        """Read some partitions no more."""
        gone = []
        for place in places:
            self.waiting.pop(place, None)
            reading = self.readings.pop(place, None)
            self._let_go(reading)
            if reading is not None:
                gone.append((reading.topic_id, reading.number))
        self._pin.drop(gone)

    def _let_go(self, reading: Reading | None) -> None:
        if reading is not None and reading.stream is not None:
            self._fetcher.drop(reading.stream)
            reading.stream = None

    def close(self) -> None:
        """End the lease and all threads."""
        self._pin.close()
        self._fetcher.close()
