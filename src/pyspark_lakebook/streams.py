"""Following a topic: micro-batches of its records, with a cap, from a checkpoint on.

Spark 4.1 has no read limits for Python sources, and asks for the newest offset before it says where the
query stands. So the reader keeps in mind how far batches were planned, and offers no more than the cap
beyond that. After a restart Spark tells the last offset it knows by asking for the plan of nothing there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from lakebook.errors import InvalidCursor, LeaseLost, OffsetBelowLogStart
from lakebook.lake.lake import check_reachable
from lakebook.names import shown
from lakebook.registry.topics import not_found
from lakebook.streams.pinning import Pin
from lakebook.streams.ranges import EARLIEST, partitions_of, pin_starts, slices_of
from pyspark_lakebook.columns import check_read
from pyspark_lakebook.options import Options
from pyspark_lakebook.topics import Segments, read_task, tasks_of, topic_columns

if TYPE_CHECKING:
    import pyarrow as pa

LOG = logging.getLogger("lakebook.spark")

# Spark asks for the newest offset a hundred times a second. The registry is asked less often.
_BETWEEN_LOOKS = 0.1


class TopicStreamReader(DataSourceStreamReader):
    """Follows a topic. One process of its own has it for as long as the query runs."""

    def __init__(self, given: Options, schema: StructType) -> None:
        self._given: Options | None = given
        self._columns = check_read(schema, topic_columns(), f"topic {given.topic}")
        self._followed: Followed | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Executors need no book, and so no password.
        return {"_given": None, "_columns": self._columns, "_followed": None}

    def _topic(self) -> Followed:
        # Not when it is made: Spark makes one for the executors too.
        if self._followed is None:
            assert self._given is not None
            self._followed = Followed(self._given)
        return self._followed

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a new query begins."""
        return self._topic().initial()

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where the next batch ends."""
        return self._topic().latest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a batch."""
        return self._topic().plan(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task."""
        return read_task(partition, self._columns) if isinstance(partition, Segments) else iter(())

    def commit(self, end: dict[str, Any]) -> None:
        """Let go of what lies before a batch that is done."""
        self._topic().advance(end)

    def stop(self) -> None:
        """Let go of everything."""
        if self._followed is not None:
            self._followed.close()


class Followed:
    """A topic that a query follows, and how far it has come."""

    def __init__(self, given: Options) -> None:
        assert given.topic is not None
        self._given = given
        self._name = given.topic
        self._start = given.places("startingOffsets", "startingTimestamp", EARLIEST)
        self._cap = given.number("maxRecordsPerBatch")
        self._per_task = given.number("segmentsPerTask")
        self._strict = given.flag("failOnDataLoss", otherwise=True)
        self._book = given.open()
        self._lake = self._book.lake
        check_reachable(self._lake)
        topic = self._book.metadata.get_topic(self._name)
        if topic is None:
            raise not_found(self._name)
        self._topic_id = topic.id
        self._pin = Pin(self._lake)
        self._pinned: dict[int, int] = {}
        self._initial: dict[int, int] | None = None
        #: The end of the last batch that was planned: none before Spark has said where the query stands.
        self._position: dict[int, int] | None = None
        self._looked: tuple[float, dict[int, int]] | None = None

    def close(self) -> None:
        """End the lease, and close the book."""
        self._pin.close()
        self._book.close()

    # --- offsets -----------------------------------------------------------------------

    def initial(self) -> dict[str, Any]:
        """Where a new query begins; pinned at once."""
        if self._initial is None:
            _, topic_id, starts = pin_starts(self._lake, self._book.metadata, self._pin, self._name, self._start)
            self._check_id(topic_id)
            self._initial = starts
            self._pinned.update(starts)
        return self._told(self._initial)

    def latest(self) -> dict[str, Any]:
        """The end of what there is beyond the last planned batch, or of as much as the cap allows."""
        if self._position is None:
            self.initial()
            assert self._initial is not None
            self._position = dict(self._initial)
        here = self._position
        available = {number: max(0, end - here.get(number, 0)) for number, end in self._ends().items()}
        if self._cap is not None:
            available = spread(available, self._cap)
        return self._told({number: here.get(number, 0) + count for number, count in available.items()})

    def _ends(self) -> dict[int, int]:
        """The high watermarks. A partition that came later is read from its beginning."""
        now = self._lake.clock.monotonic()
        if self._looked is None or now - self._looked[0] >= _BETWEEN_LOOKS:
            found = partitions_of(self._book.metadata, self._name)
            for item in found.values():
                self._check_id(item.topic_id)
            self._looked = (now, {number: item.high_watermark for number, item in found.items()})
        return self._looked[1]

    def _told(self, offsets: Mapping[int, int]) -> dict[str, Any]:
        # In one order: Spark compares their texts.
        return {"topic_id": self._topic_id, "offsets": {str(number): offsets[number] for number in sorted(offsets)}}

    def _offsets(self, told: Mapping[str, Any]) -> dict[int, int]:
        try:
            topic_id = int(told["topic_id"])
            offsets = {int(number): int(offset) for number, offset in told["offsets"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InvalidCursor(
                f"the checkpoint has {shown(told)}", on=f"topic {self._name}", remedy="It is of another source"
            ) from None
        self._check_id(topic_id)
        return offsets

    def _check_id(self, topic_id: int) -> None:
        if topic_id != self._topic_id:
            raise InvalidCursor(
                "the checkpoint is of a topic of the same name that was deleted",
                on=f"topic {self._name}",
                remedy="Begin with a new checkpoint",
            )

    # --- batches -----------------------------------------------------------------------

    def plan(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a batch; its segments are pinned until it is done."""
        first, last = self._offsets(start), self._offsets(end)
        self._position = last
        ranges = {number: (first.get(number, 0), offset) for number, offset in last.items()}
        ranges = {number: bounds for number, bounds in ranges.items() if bounds[0] < bounds[1]}
        while ranges:
            ranges = self._hold(ranges)
            try:
                found = list(slices_of(self._book.metadata, self._pin, self._name, self._topic_id, ranges))
            except LeaseLost:
                continue  # What is gone meanwhile, who takes it anew is told.
            return tasks_of(self._lake.store.warehouse, found, self._per_task)
        return []

    def _hold(self, ranges: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Pin what is to be read; without what is gone, where that is wanted."""
        try:
            self._pin.check()
        except LeaseLost:
            # This process was frozen, or could not reach the registry, for longer than its lease.
            self._renew_pin()
        while True:
            free = {
                number: first for number, (first, _) in ranges.items() if first < self._pinned.get(number, first + 1)
            }
            if not free:
                return ranges
            try:
                self._check_id(self._pin.take(self._name, free))
            except OffsetBelowLogStart as error:
                ranges = self._without_lost(ranges, error)
                continue
            self._pinned.update(free)
            return ranges

    def _renew_pin(self) -> None:
        self._pin.close()
        self._pin, self._pinned = Pin(self._lake), {}

    def _without_lost(
        self, ranges: dict[int, tuple[int, int]], error: OffsetBelowLogStart
    ) -> dict[int, tuple[int, int]]:
        if self._strict:
            raise OffsetBelowLogStart(
                f"{error.what}: retention was faster than the query",
                on=error.on,
                remedy="Begin with a new checkpoint, or set failOnDataLoss to false to go on without them",
            ) from error
        kept = {}
        for number, item in partitions_of(self._book.metadata, self._name, ranges).items():
            first, last = ranges[number]
            start = max(first, min(last, item.log_start))
            if start > first:
                LOG.warning("%s/%s: the records %s to %s are gone and skipped", self._name, number, first, start - 1)
            if start < last:
                kept[number] = (start, last)
        return kept

    def advance(self, end: Mapping[str, Any]) -> None:
        """Let go of what lies before a batch that is done. The registry learns of it when the lease is renewed."""
        for number, offset in self._offsets(end).items():
            if number in self._pinned:
                self._pinned[number] = offset
                self._pin.advance((self._topic_id, number), offset)


def spread(available: Mapping[int, int], cap: int) -> dict[int, int]:
    """How many records of each partition a batch takes, at most `cap` in all: equal shares, as far as there are any."""
    taken: dict[int, int] = {}
    left = cap
    for place, number in enumerate(sorted(available, key=lambda number: (available[number], number))):
        taken[number] = min(available[number], left // (len(available) - place))
        left -= taken[number]
    return taken
