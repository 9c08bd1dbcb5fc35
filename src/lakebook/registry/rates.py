"""How much comes into a topic, how much of it is kept, and who reads it: read-only questions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.registry import schema
from lakebook.registry.groups import GroupState
from lakebook.registry.statements import Statement, bind
from lakebook.registry.transactions import Reader

_p = schema.partitions.c
_s = schema.segments.c
_g = schema.consumer_groups.c
_o = schema.consumer_offsets.c
_a = schema.group_assignments.c

_MINUTE, _HOUR = 60, 3600


def _since(name: str, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(sa.func.sum(sa.case((_s.created_at >= bind(name, sa.BigInteger), column), else_=0)), 0)


# One walk along the index of the topic's segments. Those below the log start only wait for a reader.
TRAFFIC = Statement(
    sa.select(
        _p.partition_id,
        _p.log_start,
        _p.high_watermark,
        sa.func.count(_s.id),
        sa.func.coalesce(sa.func.sum(_s.size_bytes), 0),
        _since("minute", _s.record_count),
        _since("minute", _s.size_bytes),
        _since("hour", _s.record_count),
        _since("hour", _s.size_bytes),
        sa.func.max(_s.created_at),
    )
    .select_from(
        schema.partitions.outerjoin(
            schema.segments,
            sa.and_(_s.topic_id == _p.topic_id, _s.partition_id == _p.partition_id, _s.base_offset >= _p.log_start),
        )
    )
    .where(_p.topic_id == bind("topic_id"))
    .group_by(_p.partition_id, _p.log_start, _p.high_watermark)
    .order_by(_p.partition_id),
    "topic_id",
    "minute",
    "hour",
)
_behind = sa.case((_o.committed_offset < _p.log_start, 1), else_=0)
_read = sa.case((_o.committed_offset >= _p.log_start, _o.committed_offset), else_=_p.log_start)
_readers = (
    sa.select(sa.func.count(sa.distinct(_a.member_id)))
    .where(_a.consumer_group_id == _g.id, _a.topic_id == bind("topic_id"))
    .correlate(schema.consumer_groups)
    .scalar_subquery()
)
READING_GROUPS = Statement(
    sa.select(
        _g.group_id,
        _g.generation,
        _readers,
        sa.func.sum(_p.high_watermark - _read),
        sa.func.sum(_behind),
        sa.func.count(_o.committed_offset),
        sa.func.max(_o.committed_at),
    )
    .select_from(
        schema.consumer_groups.join(schema.partitions, _p.topic_id == bind("topic_id")).outerjoin(
            schema.consumer_offsets,
            sa.and_(_o.consumer_group_id == _g.id, _o.topic_id == _p.topic_id, _o.partition_id == _p.partition_id),
        )
    )
    .where(
        _g.id.in_(
            sa.union(
                sa.select(_o.consumer_group_id).where(_o.topic_id == bind("topic_id")),
                sa.select(_a.consumer_group_id).where(_a.topic_id == bind("topic_id")),
            )
        )
    )
    .group_by(_g.id, _g.group_id, _g.generation)
    .order_by(_g.group_id),
    "topic_id",
)


@dataclass(frozen=True)
class PartitionTraffic:
    """What a partition holds, and what came in lately: records and bytes per second.

    The rates come from the segments that are still there, by the time at which they were recorded.
    """

    partition_id: int
    log_start: int
    high_watermark: int
    records: int
    segments: int
    size_bytes: int
    records_per_second_minute: float
    bytes_per_second_minute: float
    records_per_second_hour: float
    bytes_per_second_hour: float
    last_append_at: datetime | None


@dataclass(frozen=True)
class ReadingGroup:
    """A consumer group that reads a topic: its lag there, and how many members have partitions of it."""

    group_id: str
    state: GroupState
    generation: int
    members: int
    lag: int
    last_commit_at: datetime | None


@dataclass(frozen=True)
class TopicTraffic:
    """A topic's partitions with their rates, and the groups that read it."""

    partitions: tuple[PartitionTraffic, ...]
    groups: tuple[ReadingGroup, ...]


def topic_traffic(reader: Reader, topic_id: int, now: int) -> TopicTraffic:
    """How a topic is written and read, as of now."""
    found = reader.all(TRAFFIC, topic_id, now - _MINUTE * 1000, now - _HOUR * 1000)
    groups = reader.all(READING_GROUPS, topic_id)
    return TopicTraffic(tuple(map(_partition_from, found)), tuple(map(_group_from, groups)))


def _partition_from(row: Any) -> PartitionTraffic:
    number, start, watermark, segments, size, minute, minute_bytes, hour, hour_bytes, last = row
    return PartitionTraffic(
        partition_id=number,
        log_start=start,
        high_watermark=watermark,
        # Offsets have no holes, so that they count the records.
        records=watermark - start,
        segments=segments,
        size_bytes=int(size),
        records_per_second_minute=_rate(minute, _MINUTE),
        bytes_per_second_minute=_rate(minute_bytes, _MINUTE),
        records_per_second_hour=_rate(hour, _HOUR),
        bytes_per_second_hour=_rate(hour_bytes, _HOUR),
        last_append_at=None if last is None else to_datetime(last),
    )


def _rate(number: Any, seconds: int) -> float:
    return round(int(number) / seconds, 3)


def _group_from(row: Any) -> ReadingGroup:
    group, generation, members, lag, behind, committed, last = row
    if behind:
        state = GroupState.BEHIND
    elif not committed:
        state = GroupState.EMPTY
    else:
        state = GroupState.LAGGING if lag else GroupState.CURRENT
    return ReadingGroup(group, state, generation, members, int(lag), None if last is None else to_datetime(last))
