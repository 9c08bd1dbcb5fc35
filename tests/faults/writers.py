"""What the writing processes of the fault tests do; also a program to be killed.

Everything that was acknowledged is told at once: to a list, or as a line on standard output.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import lakebook
from lakebook import Book, SegmentInfo, failpoints
from lakebook.clock import SystemClock
from lakebook.errors import AppendTurnHeld, AppendTurnLost, OffsetRegression, SegmentGap, SegmentOverlap

TOPIC, PARTITIONS, GROUPS = "orders", 3, ("a", "b")
#: Where a process comes by that works on topics.
POINTS = (
    "transaction.beginning",
    "transaction.begun",
    "transaction.before_commit",
    "transaction.after_commit",
    "commit.opened",
    "append.claimed",
    "retention.log_start_moved",
    "topic.hidden",
)
_numbers = itertools.count()

Tell = Callable[..., None]


def new_segment(partition: int, base: int, count: int, **more: Any) -> SegmentInfo:
    unique = f"{os.getpid()}-{next(_numbers)}"
    return SegmentInfo(
        TOPIC, partition, base, base + count - 1, count, count * 10, f"t/{partition}/{unique}.parquet", unique, **more
    )


def append_in_turn(book: Book, chance: random.Random, holder: str, tell: Tell) -> None:
    partition = chance.randrange(PARTITIONS)
    try:
        turn = book.metadata.claim_append(TOPIC, partition, holder=holder, seconds=2)
        for _ in range(chance.randrange(1, 4)):
            segment = new_segment(partition, turn.next_offset, chance.randrange(1, 50))
            turn = book.metadata.append_segment(turn, segment).turn
            tell("segment", partition, segment.base_offset, segment.end_offset, segment.id)
        book.metadata.release_append(turn)
    except (AppendTurnHeld, AppendTurnLost, SegmentOverlap, SegmentGap):
        pass  # Somebody else was faster; nothing was acknowledged.


def add_at_watermark(book: Book, chance: random.Random, tell: Tell) -> None:
    partition = chance.randrange(PARTITIONS)
    found = book.metadata.get_partition(TOPIC, partition)
    assert found is not None
    segment = new_segment(partition, found.high_watermark, chance.randrange(1, 50))
    try:
        book.metadata.add_segment(segment)
    except (SegmentOverlap, SegmentGap):
        return
    tell("segment", partition, segment.base_offset, segment.end_offset, segment.id)


def commit(book: Book, chance: random.Random, tell: Tell) -> None:
    partition, group = chance.randrange(PARTITIONS), chance.choice(GROUPS)
    found = book.metadata.get_partition(TOPIC, partition)
    assert found is not None
    offset = chance.randint(found.high_watermark // 2, found.high_watermark)
    try:
        book.metadata.commit_offset(group, TOPIC, partition, offset)
    except OffsetRegression:
        return
    tell("offset", partition, offset, group)


def clean(book: Book, chance: random.Random, tell: Tell) -> None:
    partition = chance.randrange(PARTITIONS)
    found = book.metadata.get_partition(TOPIC, partition)
    assert found is not None
    book.metadata.delete_segments_before(TOPIC, partition, found.log_start + 20 * (found.high_watermark > 200))
    name = f"short-lived-{os.getpid()}-{next(_numbers)}"
    book.metadata.create_topic(name)
    book.metadata.delete_topic(name)


def write_for_a_while(target: str, settings: dict[str, Any], seed: int, steps: int) -> list[tuple[Any, ...]]:
    """One of several processes: append, add and commit, holding some transactions open."""
    chance = random.Random(seed)
    told: list[tuple[Any, ...]] = []
    clock = SystemClock()

    def hold() -> None:
        if chance.random() < 0.1:
            clock.sleep(chance.random() * 0.02)

    with (
        lakebook.open(target, **settings) as book,
        failpoints.armed("transaction.before_commit", hold),
    ):
        for _ in range(steps):
            choice = chance.random()
            if choice < 0.4:
                append_in_turn(book, chance, f"writer-{os.getpid()}", lambda *fact: told.append(fact))
            elif choice < 0.6:
                add_at_watermark(book, chance, lambda *fact: told.append(fact))
            else:
                commit(book, chance, lambda *fact: told.append(fact))
    return told


def main(target: str, settings: str, seed: str) -> None:
    """Write until killed."""
    chance = random.Random(int(seed))

    def tell(*fact: Any) -> None:
        sys.stdout.write(json.dumps(fact) + "\n")
        sys.stdout.flush()

    with lakebook.open(target, **json.loads(settings)) as book:
        tell("ready")
        for number in itertools.count(1):
            # The same holder as the one that was killed: its turn need not be waited for.
            append_in_turn(book, chance, "writer", tell)
            commit(book, chance, tell)
            if number % 5 == 0:
                add_at_watermark(book, chance, tell)
            if number % 10 == 0:
                clean(book, chance, tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
