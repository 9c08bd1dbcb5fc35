"""Writers that go on while their server dies and comes back, or their lines are cut; each says what it was told."""

from __future__ import annotations

import os
import random
from typing import Any

import lakebook
from lakebook import Book
from lakebook.errors import (
    AppendTurnHeld,
    AppendTurnLost,
    CommitAborted,
    CommitOutcomeUnknown,
    InsertFailed,
    OffsetRegression,
    SegmentGap,
    SegmentOverlap,
    TransientError,
)
from table_writers import TABLE, Line, rows_of
from writers import GROUPS, PARTITIONS, TOPIC, new_segment

#: What a writer may be told beside success: it has failed, and nothing of it is there.
REFUSED = (
    TransientError,
    InsertFailed,
    CommitAborted,
    AppendTurnHeld,
    AppendTurnLost,
    SegmentGap,
    SegmentOverlap,
    OffsetRegression,
)


def write_through_outages(line: Line, target: str, settings: dict[str, Any], seed: int, steps: int) -> None:
    """Insert, append and commit that many times, or until stopped; whatever is raised beside `REFUSED` is a failure."""
    chance = random.Random(seed)
    with lakebook.open(target, **settings) as book:
        line.tell("ready")
        acts = (_insert, _insert_by_appender, _append, _add, _commit)
        for step in range(steps):
            if line.stopped():
                break
            act = chance.choice(acts)
            fact = act(book, chance, seed * 1_000_000 + step, line)
            if fact is not None:
                line.tell(*fact)


def _insert(book: Book, chance: random.Random, batch: int, line: Line) -> tuple[Any, ...]:
    try:
        book.table(TABLE).insert_arrow(rows_of(batch))
    except CommitOutcomeUnknown:
        return "unknown", "batch", batch
    except REFUSED as error:
        return "refused", "batch", batch, repr(error)
    return "batch", batch


def _insert_by_appender(book: Book, chance: random.Random, batch: int, line: Line) -> tuple[Any, ...]:
    try:
        with book.table(TABLE).appender() as appender:
            appender.append(rows_of(batch))
    except CommitOutcomeUnknown:
        return "unknown", "batch", batch
    except REFUSED as error:
        return "refused", "batch", batch, repr(error)
    return "batch", batch


def _append(book: Book, chance: random.Random, _: int, line: Line) -> tuple[Any, ...] | None:
    partition = chance.randrange(PARTITIONS)
    segment = None
    try:
        turn = book.metadata.claim_append(TOPIC, partition, holder=f"writer-{os.getpid()}", seconds=2)
        segment = new_segment(partition, turn.next_offset, chance.randrange(1, 50))
        turn = book.metadata.append_segment(turn, segment).turn
        line.tell("segment", partition, segment.base_offset, segment.end_offset, segment.id)
        segment = None
        book.metadata.release_append(turn)
    except CommitOutcomeUnknown:
        return ("unknown", "segment", segment.id) if segment else None
    except REFUSED as error:
        return ("refused", "segment", segment.id, repr(error)) if segment else None
    return None


def _add(book: Book, chance: random.Random, _: int, line: Line) -> tuple[Any, ...] | None:
    partition = chance.randrange(PARTITIONS)
    segment = None
    try:
        found = book.metadata.get_partition(TOPIC, partition)
        assert found is not None
        segment = new_segment(partition, found.high_watermark, chance.randrange(1, 50))
        book.metadata.add_segment(segment)
    except CommitOutcomeUnknown:
        return ("unknown", "segment", segment.id) if segment else None
    except REFUSED as error:
        return ("refused", "segment", segment.id, repr(error)) if segment else None
    return "segment", partition, segment.base_offset, segment.end_offset, segment.id


def _commit(book: Book, chance: random.Random, _: int, line: Line) -> tuple[Any, ...] | None:
    partition, group = chance.randrange(PARTITIONS), chance.choice(GROUPS)
    try:
        found = book.metadata.get_partition(TOPIC, partition)
        assert found is not None
        offset = chance.randint(found.high_watermark // 2, found.high_watermark)
        book.metadata.commit_offset(group, TOPIC, partition, offset)
    except (*REFUSED, CommitOutcomeUnknown):
        return None
    return "offset", partition, offset, group
