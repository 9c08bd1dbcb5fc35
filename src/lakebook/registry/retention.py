"""What retention asks of the registry: which records of a topic are due, and what can be removed of them.

Only whole segments go, from the oldest on. The log start moves first, whoever reads; the rows and files
follow as far as no lease needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.registry import schema
from lakebook.registry.changes import row_of
from lakebook.registry.partitions import PARTITION_ROW, locked_partition
from lakebook.registry.segments import find_by_timestamp, move_log_start
from lakebook.registry.statements import ONE, ZERO, Statement, bind
from lakebook.registry.topics import Topic, share_topic
from lakebook.registry.transactions import Reader, Transaction

#: Keys of a topic's configuration.
BYTES, GROUPS = "retention.bytes", "retention.groups"
_WAIT = "wait"

_p = schema.partitions.c
_s = schema.segments.c
_o = schema.consumer_offsets.c
_g = schema.consumer_groups.c
_l = schema.topic_leases.c
_none = sa.literal_column("0", sa.BigInteger)

_other = schema.segments.alias("other")
_first_base = (
    sa.select(sa.func.min(_other.c.base_offset))
    .where(_other.c.topic_id == _p.topic_id, _other.c.partition_id == _p.partition_id)
    .correlate(schema.partitions)
    .scalar_subquery()
)
_pinned = (
    sa.select(sa.func.min(_l.from_offset))
    .where(_l.topic_id == _p.topic_id, _l.partition_id == _p.partition_id)
    .correlate(schema.partitions)
    .scalar_subquery()
)
# The oldest segment tells whether there is anything to do: two steps into an index for each partition.
OLDEST_SEGMENTS = Statement(
    sa.select(
        _p.partition_id, _p.log_start, _p.high_watermark, _s.base_offset, _s.end_offset, _s.max_timestamp, _pinned
    )
    .select_from(
        schema.partitions.join(
            schema.segments,
            sa.and_(_s.topic_id == _p.topic_id, _s.partition_id == _p.partition_id, _s.base_offset == _first_base),
        )
    )
    .where(_p.topic_id == bind("of_topic"), _p.partition_id > bind("after"))
    .order_by(_p.partition_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_topic",
    "after",
    "most",
)
_from_the_end = (
    sa.select(
        _s.base_offset,
        sa.func.sum(_s.size_bytes).over(order_by=_s.base_offset.desc(), rows=(None, 0)).label("bytes"),
    )
    .where(_s.topic_id == bind("of_topic"), _s.partition_id == bind("number"), _s.base_offset >= bind("start"))
    .subquery("from_the_end")
)
# The newest segment from which on there are so many bytes: nothing before it is needed for that.
ENOUGH_BYTES = Statement(
    sa.select(sa.func.max(_from_the_end.c.base_offset)).where(_from_the_end.c.bytes >= bind("wanted", sa.BigInteger)),
    "of_topic",
    "number",
    "start",
    "wanted",
)
# One step into an index for each group: all offsets of a topic may be many times as many.
_any_offset = (
    sa.select(_o.topic_id)
    .where(_o.consumer_group_id == _g.id, _o.topic_id == bind("of_topic"))
    .limit(ONE)
    .offset(ZERO)
    .correlate(schema.consumer_groups)
    .scalar_subquery()
)
_readers = sa.select(_g.id.label("consumer_group_id")).where(_any_offset.is_not(None)).subquery("readers")
# A group that reads the topic, and has not come to this partition yet, begins at 0.
SLOWEST_GROUP = Statement(
    sa.select(sa.func.min(sa.func.coalesce(_o.committed_offset, _none))).select_from(
        _readers.outerjoin(
            schema.consumer_offsets,
            sa.and_(
                _o.consumer_group_id == _readers.c.consumer_group_id,
                _o.topic_id == bind("of_topic"),
                _o.partition_id == bind("number"),
            ),
        )
    ),
    "of_topic",
    "number",
)


@dataclass(frozen=True)
class Policy:
    """How long the records of a topic are kept."""

    #: Milliseconds; none: for ever.
    ms: int | None
    #: Bytes of each partition; none: as many as there are.
    bytes: int | None
    #: Whether records stay that a group has yet to read.
    waits: bool

    @classmethod
    def of(cls, retention_ms: int | None, config: Mapping[str, str]) -> Policy:
        """The policy that a topic's configuration asks for."""
        size = config.get(BYTES)
        return cls(retention_ms, None if size is None else int(size), config.get(GROUPS) == _WAIT)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever due."""
        return self.ms is None and self.bytes is None


@dataclass(frozen=True)
class Oldest:
    """A partition and its oldest segment, visible or on its way out."""

    partition_id: int
    log_start: int
    high_watermark: int
    base_offset: int
    end_offset: int
    max_timestamp: int
    #: The smallest offset that a lease needs; none if there is no lease.
    pinned: int | None

    @property
    def is_removable(self) -> bool:
        """Whether the segment lies below the log start, and no lease needs it."""
        return self.end_offset < (self.log_start if self.pinned is None else min(self.log_start, self.pinned))


def oldest_segments(reader: Reader, topic_id: int, after: int, most: int) -> list[Oldest]:
    """The partitions of a topic that have segments, in order, each with its oldest."""
    return [Oldest(*row) for row in reader.all(OLDEST_SEGMENTS, topic_id, after, most)]


def kept_from(reader: Reader, topic: Topic, policy: Policy, number: int, now: int) -> int | None:
    """The offset before which a topic's policy keeps nothing; none if that is where the partition begins."""
    row = reader.one(PARTITION_ROW, topic.id, number)
    if row is None:
        return None
    partition = row_of(schema.partitions, row)
    start, watermark = partition["log_start"], partition["high_watermark"]
    kept = start
    if policy.ms is not None and now > policy.ms:
        first = find_by_timestamp(reader, topic.name, number, to_datetime(now - policy.ms))
        kept = watermark if first is None else first.base_offset
    if policy.bytes is not None:
        found = reader.one(ENOUGH_BYTES, topic.id, number, start, policy.bytes)
        if found is not None and found[0] is not None:
            kept = max(kept, found[0])
    if policy.waits and kept > start:
        slowest = reader.one(SLOWEST_GROUP, topic.id, number)
        if slowest is not None and slowest[0] is not None:
            kept = min(kept, slowest[0])
    return kept if kept > start else None


def retain(transaction: Transaction, topic: Topic, number: int, now: int) -> int:
    """Move a partition's log start to where its topic's policy begins to keep; by how many records it moved."""
    row = share_topic(transaction, topic.name)
    if row["id"] != topic.id:
        return 0  # It was deleted, and its name taken again.
    before = locked_partition(transaction, topic.name, topic.id, number)["log_start"]
    # Decided under the lock, and by the configuration as it is now.
    kept = kept_from(transaction, topic, Policy.of(row["retention_ms"], row["config"]), number, now)
    return 0 if kept is None else move_log_start(transaction, row, number, kept) - int(before)
