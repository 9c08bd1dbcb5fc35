"""Offsets and versions that a rebuild of the registry could not bring back, and has reported."""

from __future__ import annotations

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.statements import ONE, ZERO, Statement, bind
from lakebook.registry.transactions import Reader

#: Kinds of gaps: of a partition's offsets, of a table's versions.
OFFSETS, VERSIONS = "offsets", "versions"

_g = schema.known_gaps.c
GAPS = Statement(
    sa.select(_g.owner_id, _g.partition_id, _g.first_number, _g.last_number, _g.reason)
    .where(_g.kind == bind("of_kind"))
    .order_by(_g.owner_id, _g.partition_id, _g.first_number),
    "of_kind",
)
GAP_AFTER = Statement(
    sa.select(_g.last_number)
    .where(
        _g.kind == sa.literal_column(f"'{VERSIONS}'"),
        _g.owner_id == bind("of_table"),
        _g.partition_id == ZERO,
        _g.first_number == bind("first"),
    )
    .limit(ONE)
    .offset(ZERO),
    "of_table",
    "first",
)

#: A gap from its first number to its last, and why it is there.
Gap = tuple[int, int, str]


def known_gaps(reader: Reader, kind: str) -> dict[tuple[int, int], list[Gap]]:
    """Every gap of a kind, in order, by topic and partition; of a table the partition is 0."""
    found: dict[tuple[int, int], list[Gap]] = {}
    for owner, number, first, last, reason in reader.all(GAPS, kind):
        found.setdefault((owner, number), []).append((first, last, reason))
    return found


def is_covered(gaps: list[Gap], first: int, last: int) -> bool:
    """Whether everything from one number to another lies in known gaps."""
    for begin, end, _ in gaps:
        if begin <= first <= end:
            first = end + 1
    return first > last


def is_lost_after(reader: Reader, table_id: int, version: int) -> bool:
    """Whether the version after one is lost."""
    return reader.one(GAP_AFTER, table_id, version + 1) is not None
