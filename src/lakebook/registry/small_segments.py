"""Partitions of topics with many segments, which may be worth a merge."""

from __future__ import annotations

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.statements import ZERO, Statement, bind
from lakebook.registry.transactions import Reader

_s = schema.segments.c
_t = schema.topics.c
_many = (
    sa.select(_s.topic_id, _s.partition_id, sa.func.count().label("number"))
    .group_by(_s.topic_id, _s.partition_id)
    .having(sa.func.count() >= bind("least", sa.BigInteger))
    .subquery("many")
)
PARTITIONS_WITH_MOST_SEGMENTS = Statement(
    sa.select(_t.name, _many.c.partition_id)
    .select_from(_many.join(schema.topics, _t.id == _many.c.topic_id))
    .where(_t.deleted_at.is_(None))
    .order_by(_many.c.number.desc(), _t.name, _many.c.partition_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "least",
    "most",
)
NEWEST_SEGMENTS = Statement(
    sa.select(_s.base_offset)
    .where(_s.topic_id == bind("of_topic"), _s.partition_id == bind("number"))
    .order_by(_s.base_offset.desc())
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_topic",
    "number",
    "most",
)


def partitions_with_most_segments(reader: Reader, least: int, most: int) -> list[tuple[str, int]]:
    """The partitions with at least so many segments, those with the most first: topics and numbers."""
    return [(str(row[0]), int(row[1])) for row in reader.all(PARTITIONS_WITH_MOST_SEGMENTS, least, most)]


def first_of_newest(reader: Reader, topic_id: int, partition: int, most: int) -> int:
    """The offset with which so many of the newest segments of a partition begin."""
    rows = reader.all(NEWEST_SEGMENTS, topic_id, partition, most)
    return int(rows[-1][0]) if rows else 0
