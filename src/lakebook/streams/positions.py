"""Where a reader begins, and what becomes of an offset whose records are not there."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple, TypeAlias

from lakebook.errors import InvalidInput, OffsetBelowLogStart, OffsetBeyondWatermark
from lakebook.lake.lake import Lake
from lakebook.names import check_moment, shown
from lakebook.registry.offsets import check_offset
from lakebook.registry.partitions import Partition
from lakebook.streams.fetching import offset_at
from lakebook.streams.metadata_store import MetadataStore

#: A partition by its topic's name and its number.
TopicPartition: TypeAlias = tuple[str, int]
#: An offset, a time, or a name of the beginning or the end.
Start: TypeAlias = int | datetime | str

COMMITTED = "committed"
#: The beginning of a partition that was created later: of whatever is gone of it nobody has heard.
NEW = "new"
_FIRST = ("earliest", "beginning")
_LAST = ("latest", "end")
RESETS = ("error", "earliest", "latest")


class Skipped(NamedTuple):
    """Offsets that a reader left out, up to before `to_offset`; or went back over, where that is the smaller one."""

    topic: str
    partition: int
    from_offset: int
    to_offset: int


def check_start(where: object, on: str, *more: str) -> Start:
    """Return a place to begin at, if it can be one."""
    if isinstance(where, datetime):
        check_moment(where, on)
        return where
    if isinstance(where, int) and not isinstance(where, bool):
        return check_offset(where, on)
    names = (*_FIRST, *_LAST, *more)
    if isinstance(where, str) and where in names:
        return where
    raise InvalidInput(
        f"{shown(where)} is not a place to begin at",
        on=on,
        remedy=f"Use an offset, a time, or one of {', '.join(names)}",
    )


def offset_of(lake: Lake, metadata: MetadataStore, partition: Partition, where: Start) -> int:
    """The offset that a place stands for."""
    if isinstance(where, datetime):
        # What came after the partition was looked at is newer than all that was.
        found = offset_at(lake, metadata, partition.topic, partition.partition_id, where)
        return partition.high_watermark if found is None else found
    if isinstance(where, int) or where == NEW:
        return int(where) if isinstance(where, int) else 0
    return partition.log_start if where in _FIRST else partition.high_watermark


def in_range(partition: Partition, offset: int, reset: str, pinned: int | None = None) -> int:
    """An offset whose records are there, also below the log start if they are pinned; or where the policy goes."""
    start, watermark = partition.log_start, partition.high_watermark
    if (start if pinned is None else min(start, pinned)) <= offset <= watermark:
        return offset
    if reset != "error":
        return start if reset == "earliest" else watermark
    on = f"{partition.topic}/{partition.partition_id}"
    if offset < start:
        raise OffsetBelowLogStart(
            f"the records from {offset} to {start - 1} are gone",
            on=on,
            remedy="Seek to 'beginning', or give a reset policy",
        )
    raise OffsetBeyondWatermark(
        f"the offset {offset} lies above the high watermark {watermark}",
        on=on,
        remedy="Seek to 'end', or give a reset policy",
    )
