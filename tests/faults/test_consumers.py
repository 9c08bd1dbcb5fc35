"""Readers of one group in several processes: one is killed, one is frozen; nothing is lost, none overwrites another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from books import POSTGRESQL, SQLITE, Place
from group_readers import GROUP, PARTITIONS, SETTINGS, TOPIC, read_for_group
from lakebook import Book
from streaming import PATIENCE, produce
from table_facts import with_own_warehouse
from table_writers import Child, kill_all


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(request.param), tmp_path)


class Reader:
    """A process of the group, and what it has told."""

    def __init__(self, place: Place, name: str) -> None:
        self.name = name
        self.child = Child(read_for_group, place.target, {**place.settings, **SETTINGS}, name)
        self.read: set[tuple[int, int]] = set()
        self.facts: list[str] = []
        self._following: dict[int, int] = {}

    def listen(self, *, to_the_end: bool = False) -> None:
        """Take what it has told; of each partition that is its own, all records come once and in order."""
        if to_the_end:
            for fact in self.child.facts():
                self._take(*fact)
        while not to_the_end and self.child.connection.poll():
            self._take(*self.child.hear())

    def _take(self, kind: str, *rest: Any) -> None:
        self.facts.append(kind)
        if kind == "assigned":
            for _, partition in rest[0]:
                self._following.pop(partition, None)
        elif kind == "read":
            for partition, offset in rest[0]:
                assert self._following.get(partition, offset) == offset
                self._following[partition] = offset + 1
            self.read |= {(partition, offset) for partition, offset in rest[0]}


def wait_until(condition: Callable[[], bool], *readers: Reader) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        for reader in readers:
            reader.listen()


def shares(book: Book) -> list[int]:
    return sorted(len(member.partitions) for member in book.metadata.group_members(GROUP))


def lag(book: Book) -> int:
    return sum(item.lag for item in book.metadata.lag(GROUP, TOPIC))


def committed(book: Book) -> list[int]:
    return [item.committed_offset or 0 for item in book.metadata.lag(GROUP, TOPIC)]


def test_the_others_go_on_for_readers_that_are_killed_or_frozen(place: Place) -> None:
    book = place.open(**SETTINGS)
    book.metadata.create_topic(TOPIC, PARTITIONS)
    book.metadata.ensure_consumer_group(GROUP)
    killed, frozen, last = readers = [Reader(place, name) for name in ("killed", "frozen", "last")]
    wait_until(lambda: shares(book) == [2, 2, 2], *readers)
    produce_everywhere(book)
    wait_until(lambda: lag(book) == 0, *readers)

    produce_everywhere(book)
    killed.child.kill()
    wait_until(lambda: shares(book) == [3, 3] and lag(book) == 0, frozen, last)

    # Frozen between what it has read and its commit. The last one reads that again, and goes on.
    own = next(iter(owned_by(book, frozen)))
    produce(book, TOPIC, own, "freeze frozen")
    frozen.child.wait_until_frozen()
    produce_everywhere(book)
    wait_until(lambda: shares(book) == [6] and lag(book) == 0, last)
    before = committed(book)
    frozen.child.wake()
    wait_until(lambda: bool(after_waking(frozen)), frozen, last)
    # Its commit was refused, before it was assigned anything as a new member.
    assert after_waking(frozen)[0] == "refused"
    assert committed(book) == before

    produce_everywhere(book)
    wait_until(lambda: shares(book) == [3, 3] and lag(book) == 0, frozen, last)
    for reader in (frozen, last):
        reader.child.stop()
    for reader in readers:
        reader.listen(to_the_end=True)
    assert [reader.child.end() for reader in readers] == [-9, 0, 0]
    watermarks = [item.high_watermark for item in book.metadata.lag(GROUP, TOPIC)]
    everything = {(partition, offset) for partition in range(PARTITIONS) for offset in range(watermarks[partition])}
    assert killed.read | frozen.read | last.read == everything
    assert committed(book) == watermarks
    assert book.verify().ok


def produce_everywhere(book: Book) -> None:
    for partition in range(PARTITIONS):
        produce(book, TOPIC, partition, *range(20))


def owned_by(book: Book, reader: Reader) -> set[int]:
    (member,) = (item for item in book.metadata.group_members(GROUP) if item.holder.endswith(f":{reader.child.pid}"))
    return {partition for _, partition in member.partitions}


def after_waking(reader: Reader) -> list[str]:
    return reader.facts[reader.facts.index("woken") + 1 :] if "woken" in reader.facts else []
