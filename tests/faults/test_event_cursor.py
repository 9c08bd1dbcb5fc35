"""Reading events on PostgreSQL while transactions commit in another order than they began."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from books import POSTGRESQL, Place, describe
from held import held_before_commit
from lakebook import Book, Event


@pytest.fixture
def book(make_place: Callable[[str], Place]) -> Book:
    book = make_place(POSTGRESQL).open()
    book.metadata.create_topic("orders", 8)
    return book


def tables(events: tuple[Event, ...]) -> list[tuple[str, int]]:
    return [(event.table, int(event.key.get("partition_id", -1))) for event in events]


def test_a_commit_that_comes_late_is_not_skipped(book: Book) -> None:
    cursor = book.events.now()
    with held_before_commit(lambda: book.metadata.add_segment(describe(partition=0)), skip=1) as early:
        book.metadata.add_segment(describe(partition=1))
        first = book.events.read(cursor)
        # The one that began later is there: an open transaction stalls nobody.
        assert tables(first.events) == [("segments", -1), ("partitions", 1)]
        early.finish()
    second = book.events.read(first.cursor)
    assert tables(second.events) == [("segments", -1), ("partitions", 0)]
    # Its ids are smaller than those that were read before it: `id > last` would have lost it.
    assert second.events[0].id < first.events[0].id
    assert book.events.read(second.cursor).events == ()


def test_a_page_that_is_read_in_parts_neither_repeats_nor_skips_a_late_commit(book: Book) -> None:
    cursor = book.events.now()
    with held_before_commit(lambda: book.metadata.add_segment(describe(partition=0)), skip=1) as early:
        book.metadata.add_segments([describe(partition=1, base=base) for base in range(0, 500, 100)])
        page = book.events.read(cursor, 2)
        early.finish()
    found = list(page.events)
    while page.more:
        page = book.events.read(page.cursor, 2)
        found.extend(page.events)
    found.extend(book.events.read(page.cursor).events)
    assert len({event.id for event in found}) == len(found) == 8


def test_a_transaction_that_stays_open_for_ever_stalls_no_reader(book: Book) -> None:
    cursor = book.events.now()
    with held_before_commit(lambda: book.metadata.add_segment(describe(partition=7)), skip=1):
        for number in range(50):
            book.metadata.add_segment(describe(partition=number % 4, base=number // 4 * 100))
            batch = book.events.read(cursor)
            assert len(batch.events) == 2
            cursor = batch.cursor
    assert len(book.events.read(cursor).events) == 2


def test_with_transactions_held_at_random_every_event_comes_once_and_in_order(book: Book) -> None:
    chance = random.Random(20260501)
    cursor = book.events.beginning()
    seen: list[Event] = []
    open_now: list[object] = []
    bases = [0] * 8

    def drain() -> None:
        nonlocal cursor
        while True:
            batch = book.events.read(cursor, chance.choice([1, 2, 5, 1000]))
            seen.extend(batch.events)
            cursor = batch.cursor
            if not batch.more:
                return

    def step(depth: int) -> None:
        """Hold some partition's append open, and do more inside of it."""
        free = [number for number in range(8) if number not in open_now]
        partition = chance.choice(free)
        segment = describe(partition=partition, base=bases[partition])
        bases[partition] += 100
        if depth == 0:
            book.metadata.add_segment(segment)
            return
        open_now.append(partition)
        with held_before_commit(lambda: book.metadata.add_segment(segment), skip=1) as held:
            for _ in range(chance.randrange(3)):
                step(0)
                drain()
            held.finish()
        open_now.remove(partition)
        drain()

    for _ in range(40):
        step(chance.choice([0, 1]))
    drain()
    per_object: dict[int, list[int]] = defaultdict(list)
    for event in seen:
        per_object[event.object_id].append(event.sequence)
    assert len({event.id for event in seen}) == len(seen)
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in per_object.values())
    assert len(seen) == book.measure().values()["lakebook_events"]
    assert book.verify().ok
