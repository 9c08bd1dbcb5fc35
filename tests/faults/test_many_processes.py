"""Eight processes append and commit at once; a reader of events misses nothing."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from books import POSTGRESQL, SQLITE, Place
from extent import long
from facts import check_acknowledged
from lakebook import Book, Event
from writers import PARTITIONS, TOPIC, write_for_a_while

PROCESSES = 8
STEPS = int(os.environ.get("LAKEBOOK_TEST_STEPS", "25"))


@long(POSTGRESQL)
def test_eight_processes_write_at_once_and_nothing_is_lost(shared_place: Place, soak: Callable[[str], None]) -> None:
    book = shared_place.open(lock_timeout=60)
    book.metadata.create_topic(TOPIC, PARTITIONS)
    settings = {**shared_place.settings, "lock_timeout": 60}
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        writing = [
            pool.submit(write_for_a_while, shared_place.target, settings, seed, STEPS) for seed in range(PROCESSES)
        ]
        seen = read_until_done(book, writing)
        told = [fact for future in writing for fact in future.result()]
    assert len([fact for fact in told if fact[0] == "segment"]) > PROCESSES
    check_acknowledged(book, told)
    check_order(book, seen)
    # Nobody but the acknowledged wrote: each segment has one acknowledgement, and each is there.
    ids = [fact[4] for fact in told if fact[0] == "segment"]
    assert len(set(ids)) == len(ids) == book.measure().values()["lakebook_segments"]
    soak(
        f"{shared_place.kind}: {PROCESSES} processes, {len(told):,} acknowledged appends and commits,"
        f" {len(seen):,} events read once and in order, nothing lost"
    )


def read_until_done(book: Book, writing: list[Future[Any]]) -> list[Event]:
    """Follow the events while they are written, then read the rest."""
    chance = random.Random(7)
    cursor = book.events.beginning()
    seen: list[Event] = []
    done = False
    while True:
        finished = all(future.done() for future in writing)
        batch = book.events.read(cursor, chance.choice([1, 3, 10, 1000]))
        seen.extend(batch.events)
        cursor = batch.cursor
        if done and not batch.events and not batch.more:
            return seen
        done = finished


def check_order(book: Book, seen: list[Event]) -> None:
    per_object: dict[int, list[int]] = defaultdict(list)
    for event in seen:
        per_object[event.object_id].append(event.sequence)
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in per_object.values())
    assert len({event.id for event in seen}) == len(seen) == book.measure().values()["lakebook_events"]


@pytest.mark.parametrize("kind", [SQLITE, POSTGRESQL])
@long(SQLITE)
def test_eight_processes_create_one_book_together(make_place: Callable[..., Place], kind: str) -> None:
    place = make_place(kind, with_book=False)
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        opened = [pool.submit(open_and_name, place.target, place.settings) for _ in range(PROCESSES)]
        identities = {future.result() for future in opened}
    assert len(identities) == 1
    assert place.open().verify().ok


def open_and_name(target: str, settings: dict[str, Any]) -> tuple[str, str]:
    import lakebook

    with lakebook.open(target, **settings) as book:
        return book.identity.book_id, book.identity.epoch
