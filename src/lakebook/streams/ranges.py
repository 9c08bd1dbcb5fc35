"""Ranges of a topic's records: from where to where of each partition, and the segments that hold them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

import pyarrow as pa

from lakebook.errors import (
    InvalidInput,
    InvalidOffset,
    OffsetBelowLogStart,
    OffsetBeyondWatermark,
    PartitionNotFound,
    ReadFailed,
)
from lakebook.lake.footer_store import read_footer
from lakebook.lake.lake import Lake
from lakebook.names import check_moment, shown
from lakebook.pages import every
from lakebook.registry.offsets import check_offset
from lakebook.registry.partitions import Partition, no_partition
from lakebook.storage.objects import ObjectStore
from lakebook.streams.fetching import offset_at
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.pinning import Pin
from lakebook.streams.segment_files import SegmentReader

LOG = logging.getLogger("lakebook.streams")

EARLIEST, LATEST = "earliest", "latest"
#: A place in a partition: its beginning or end, an offset, or a time: the first record at or after it.
Place: TypeAlias = str | int | datetime
#: A place in every partition, or one for each that is named.
Places: TypeAlias = Place | Mapping[int, Place]


@dataclass(frozen=True)
class Slice:
    """A segment, and which of its records are asked for: those from `start` to before `end`."""

    path: str
    size: int
    partition: int
    base_offset: int
    record_count: int
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether all of its records are asked for."""
        return self.end - self.start == self.record_count


@dataclass(frozen=True)
class Selection:
    """Records of a topic: of each partition those from an offset to before another."""

    topic: str
    topic_id: int
    ranges: Mapping[int, tuple[int, int]]
    slices: tuple[Slice, ...]

    @property
    def record_count(self) -> int:
        """How many records there are."""
        return sum(item.end - item.start for item in self.slices)


def check_place(place: object, on: str) -> Place:
    """Return `place` if it can be one in a partition."""
    if isinstance(place, datetime):
        check_moment(place, on)
        return place
    if isinstance(place, int) and not isinstance(place, bool):
        return check_offset(place, on)
    if isinstance(place, str) and place in (EARLIEST, LATEST):
        return place
    raise InvalidOffset(
        f"{shown(place)} is not a place in a topic",
        on=on,
        remedy="Use 'earliest', 'latest', an offset, a time, or one of these for each partition",
    )


def partitions_of(metadata: MetadataStore, topic: str, wanted: Iterable[Any] | None = None) -> dict[int, Partition]:
    """The partitions of a topic by their numbers: all of them, or those that are wanted."""
    found = {item.partition_id: item for item in every(lambda after: metadata.list_partitions(topic, after=after))}
    if wanted is None:
        return found
    try:
        numbers = list(dict.fromkeys(wanted))
    except TypeError:
        raise InvalidInput(f"{shown(wanted)} is no list of partitions", on=f"topic {topic}") from None
    for number in numbers:
        _require(number, found, topic)
    return {number: found[number] for number in sorted(numbers)}


def _require(number: object, found: Mapping[int, Partition], topic: str) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise PartitionNotFound(f"{shown(number)} is not the number of a partition", on=f"topic {topic}")
    if number not in found:
        raise no_partition(topic, number)


def places_by_partition(
    places: Places, otherwise: str, partitions: Mapping[int, Partition], topic: str
) -> dict[int, Place]:
    """The place in each partition; one that a mapping does not name has `otherwise`."""
    if not isinstance(places, Mapping):
        place = check_place(places, f"topic {topic}")
        return dict.fromkeys(partitions, place)
    for number, place in places.items():
        _require(number, partitions, topic)
        check_place(place, f"{topic}/{number}")
    return {number: places.get(number, otherwise) for number in partitions}


def select(
    lake: Lake,
    metadata: MetadataStore,
    pin: Pin,
    topic: str,
    start: Places = EARLIEST,
    end: Places = LATEST,
    partitions: Iterable[int] | None = None,
) -> Selection:
    """The segments of a range, which the pin holds from then on.

    An end is the first offset that is not read any more. `latest` is as it is now.
    """
    found, topic_id, firsts = pin_starts(lake, metadata, pin, topic, start, partitions)
    ends = places_by_partition(end, LATEST, found, topic)
    ranges = {}
    for number, partition in found.items():
        last = offset_of(lake, metadata, partition, ends[number])
        _check_end(partition, last)
        ranges[number] = (firsts[number], max(firsts[number], last))
    return Selection(topic, topic_id, ranges, tuple(slices_of(metadata, pin, topic, topic_id, ranges)))


def pin_starts(
    lake: Lake,
    metadata: MetadataStore,
    pin: Pin,
    topic: str,
    start: Places = EARLIEST,
    partitions: Iterable[int] | None = None,
) -> tuple[dict[int, Partition], int, dict[int, int]]:
    """Pin partitions from a place on; the partitions, the topic's id, and the offset of the place in each."""
    found, starts, topic_id = _pinned(metadata, pin, topic, start, partitions)
    firsts = {number: offset_of(lake, metadata, item, starts[number]) for number, item in found.items()}
    for number, offset in firsts.items():
        pin.advance((topic_id, number), offset)
    return found, topic_id, firsts


def _pinned(
    metadata: MetadataStore, pin: Pin, topic: str, start: Places, partitions: Iterable[int] | None
) -> tuple[dict[int, Partition], dict[int, Place], int]:
    """The partitions, the place in each to start at, and the topic's id, once nothing after those can go away."""
    found = partitions_of(metadata, topic, partitions)
    while True:
        starts = places_by_partition(start, EARLIEST, found, topic)
        try:
            return found, starts, pin.take(topic, {number: _least(starts[number], found[number]) for number in found})
        except OffsetBelowLogStart:
            # Where the beginning is asked for it may have moved since it was looked up.
            seen, found = found, partitions_of(metadata, topic, partitions)
            if all(seen[number].log_start == found[number].log_start for number in seen):
                raise


def _least(place: Place, partition: Partition) -> int:
    """An offset at or before a place, known without a look at files."""
    if isinstance(place, int):
        return place
    return partition.high_watermark if place == LATEST else partition.log_start


def _check_end(partition: Partition, offset: int) -> None:
    if offset > partition.high_watermark:
        raise OffsetBeyondWatermark(
            f"the range ends at {offset}, above the high watermark {partition.high_watermark}",
            on=f"{partition.topic}/{partition.partition_id}",
            remedy="End it at the high watermark at most",
        )


def offset_of(lake: Lake, metadata: MetadataStore, partition: Partition, place: Place) -> int:
    """The offset of a place, in a partition that is pinned."""
    if isinstance(place, int):
        return place
    if isinstance(place, datetime):
        found = offset_at(lake, metadata, partition.topic, partition.partition_id, place)
        # Records that came since the partition was looked at belong to no range of it.
        return partition.high_watermark if found is None else min(found, partition.high_watermark)
    return partition.log_start if place == EARLIEST else partition.high_watermark


def slices_of(
    metadata: MetadataStore, pin: Pin, topic: str, topic_id: int, ranges: Mapping[int, tuple[int, int]]
) -> Iterator[Slice]:
    """The segments of ranges, in order, each with what is asked for of it; `LeaseLost` if the pin is none any more."""
    for number, (start, end) in sorted(ranges.items()):
        expected = start
        for segment in metadata.list_segments_in(topic_id, number, start, end):
            first, last = max(start, segment.base_offset), min(end, segment.end_offset + 1)
            _tell_of_hole(pin, topic, number, expected, first)
            expected = last
            yield Slice(
                segment.s3_key, segment.size_bytes, number, segment.base_offset, segment.record_count, first, last
            )
        _tell_of_hole(pin, topic, number, expected, end)


def _tell_of_hole(pin: Pin, topic: str, number: int, expected: int, found: int) -> None:
    if found > expected:
        # A process that was frozen since it took its lease may have lost it, and retention took what is missing here.
        pin.confirm()
        LOG.warning(
            "%s/%s has no records %s to %s: the registry was rebuilt without them", topic, number, expected, found - 1
        )


def batches_of(store: ObjectStore, item: Slice, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The records of a slice, without the registry; fewer or more than there have to be are refused."""
    footer = read_footer(store, item.path, item.size)
    reader = SegmentReader(store, item.path, footer, item.base_offset)
    position = item.start
    for batch in reader.batches(item.start, columns):
        rows = batch.slice(0, item.end - position)
        position += rows.num_rows
        yield rows
        if position == item.end:
            break
    if position != item.end or reader.end != item.base_offset + item.record_count:
        raise ReadFailed(
            f"it has {reader.end - item.base_offset} records, and not {item.record_count}",
            on=item.path,
            remedy="Run `lakebook verify`",
        )
