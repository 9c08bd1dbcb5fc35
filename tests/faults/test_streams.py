"""Everything at once: producers, consumers of one group, retention, leases and merging, and children killed."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from books import POSTGRESQL, SQLITE, Place
from extent import long
from lakebook import Book
from lakebook.components.janitor import Janitor
from stream_processes import (
    BUSY,
    FLEETING,
    GROUP,
    PARTITIONS,
    TOPIC,
    consume,
    create_topics,
    drain,
    follow,
    look_after,
    produce,
    tick,
)
from table_facts import objects_of, with_own_warehouse
from table_writers import Child, kill_all

SECONDS = float(os.environ.get("LAKEBOOK_TEST_STREAM_SECONDS", "60"))
PRODUCERS, CONSUMERS = 8, 4


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(request.param), tmp_path)


class Account:
    """What the children have told, and whether it fits together."""

    def __init__(self) -> None:
        self.bound: dict[str, int] = {}
        self.acknowledged: dict[tuple[int, int], str] = {}
        self.read: dict[tuple[int, int], str] = {}
        self.reads = 0

    def take(self, kind: str, *rest: Any) -> None:
        """One thing that a producer has told."""
        if kind == "sending":
            self.bound[rest[0]] = rest[1]
        elif kind == "acknowledged":
            life, first, places = rest
            for number, (partition, offset) in enumerate(places, first):
                assert (partition, offset) not in self.acknowledged, "two records have one offset"
                self.acknowledged[partition, offset] = f"{life}:{number}"

    def note_read(self, records: list[tuple[int, int, str]]) -> None:
        """Records as a consumer, or the last one, has read them."""
        for partition, offset, text in records:
            known = self.read.setdefault((partition, offset), text)
            assert known == text, "an offset has changed its record"
        self.reads += len(records)

    def check(self, watermarks: dict[int, int]) -> None:
        """Every acknowledged record was read, none is there twice, none was never sent, in order and gapless."""
        missing = self.acknowledged.items() - self.read.items()
        assert not missing, sorted(missing)[:10]
        for partition, watermark in watermarks.items():
            offsets = sorted(offset for number, offset in self.read if number == partition)
            assert offsets == list(range(watermark)), partition
        of_life: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for (partition, offset), text in self.read.items():
            life, _, number = text.rpartition(":")
            assert int(number) < self.bound[life], f"{text} was never sent"
            of_life[life].append((int(number), partition, offset))
        for life, found in of_life.items():
            found.sort()
            assert len({number for number, *_ in found}) == len(found), f"{life} has a record twice"
            # One key, so one partition: in the order in which they were sent.
            assert len({partition for _, partition, _ in found}) == 1
            assert [offset for *_, offset in found] == sorted(offset for *_, offset in found), life


class Reader:
    """A consumer, and whether what it tells is in order."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.following: dict[int, int] = {}

    def take(self, account: Account, kind: str, *rest: Any) -> None:
        """One thing that it has told."""
        if kind == "assigned":
            for _, partition in rest[0]:
                self.following.pop(partition, None)
        elif kind == "read":
            account.note_read(rest[0])
            for partition, offset, _ in rest[0]:
                assert self.following.get(partition, offset) == offset, "a record twice, or one left out, in one pass"
                self.following[partition] = offset + 1


class Scene:
    """All children at work, some of which are killed and replaced."""

    def __init__(self, place: Place, account: Account) -> None:
        self._target, self._settings = place.target, {**place.settings, **BUSY}
        self._account = account
        self._choose = random.Random(7)
        self._lives = 0
        self.kills = 0
        #: Segments that were merged; records of the fleeting topic that were read, and how often it was overtaken.
        self.merged = self.followed = self.overtaken = 0
        self.producers = [self._producer() for _ in range(PRODUCERS)]
        self.consumers = [self._consumer() for _ in range(CONSUMERS)]
        self.janitor = self._start(look_after)
        self.clock, self.follower = self._start(tick), self._start(follow)

    def _start(self, program: Callable[..., None]) -> Child:
        return Child(program, self._target, self._settings)

    def _producer(self) -> Child:
        self._lives += 1
        return Child(produce, self._target, self._settings, f"life{self._lives}", self._lives)

    def _consumer(self) -> Reader:
        self._lives += 1
        return Reader(Child(consume, self._target, self._settings, self._lives))

    def work(self, seconds: float) -> None:
        """Listen to all, and every now and then end one of them and begin another."""
        deadline = time.monotonic() + seconds
        due = time.monotonic() + 3
        while time.monotonic() < deadline:
            self.listen()
            if time.monotonic() >= due:
                self._replace_one()
                due = time.monotonic() + self._choose.uniform(0.5, 2)

    def listen(self) -> None:
        """Take what was told."""
        for child in self.producers:
            self._hear(child, self._account.take)
        for reader in self.consumers:
            self._hear(reader.child, lambda *fact, own=reader: own.take(self._account, *fact))
        self._hear(self.follower, self._note)
        while self.janitor.connection.poll(0.01):
            self._note(*self.janitor.hear())

    def _note(self, kind: str, *rest: Any) -> None:
        """One thing that the janitor or the reader of the fleeting topic has told."""
        if kind == "round":
            self.merged += rest[0]
        elif kind == "passed":
            self.followed += rest[0]
            self.overtaken += rest[1]

    @staticmethod
    def _hear(child: Child, take: Callable[..., None]) -> None:
        while child.connection.poll():
            take(*child.hear())

    def _replace_one(self) -> None:
        what = self._choose.choice(("producer", "producer", "consumer", "consumer", "leaver", "janitor", "follower"))
        if what == "producer":
            number = self._choose.randrange(PRODUCERS)
            self._end(self.producers[number], self._account.take)
            self.producers[number] = self._producer()
        elif what == "janitor":
            self._end(self.janitor, self._note)
            self.janitor = self._start(look_after)
        elif what == "follower":
            self._end(self.follower, self._note)
            self.follower = self._start(follow)
        else:
            number = self._choose.randrange(CONSUMERS)
            reader = self.consumers[number]
            if what == "leaver":
                reader.child.stop()
            self._end(reader.child, lambda *fact: reader.take(self._account, *fact), killed=what != "leaver")
            self.consumers[number] = self._consumer()

    def _end(self, child: Child, take: Callable[..., None], *, killed: bool = True) -> None:
        if killed:
            child.kill()
            self.kills += 1
        # What it told before its end stays told.
        for fact in child.facts():
            take(*fact)
        code = child.end()
        assert killed or code == 0

    def stop(self) -> None:
        """End the producers, then all others, as one should."""
        for child in self.producers:
            child.stop()
        for child in self.producers:
            self._end(child, self._account.take, killed=False)
        for reader in self.consumers:
            reader.child.stop()
        for reader in self.consumers:
            self._end(reader.child, lambda *fact, own=reader: own.take(self._account, *fact), killed=False)
        for child in (self.clock, self.follower, self.janitor):
            child.stop()
            self._end(child, self._note, killed=False)


@long(POSTGRESQL)
def test_every_acknowledged_record_is_read_whoever_is_killed(place: Place, soak: Callable[[str], None]) -> None:
    book = place.open(**BUSY)
    create_topics(book)
    account = Account()
    scene = Scene(place, account)
    scene.work(SECONDS)
    scene.stop()
    account.note_read(drain(book))
    partitions = book.metadata.list_partitions(TOPIC).items
    account.check({part.partition_id: part.high_watermark for part in partitions})
    assert len(partitions) == PARTITIONS
    assert all(part.lag == 0 for part in book.metadata.lag(GROUP, TOPIC))
    assert sum(part.log_start for part in partitions) > 0, "retention has removed nothing"
    assert scene.merged > 0, "nothing was merged"
    assert scene.followed > 0 and scene.overtaken > 0, "retention was never ahead of one who read"
    check_sound(book)
    soak(
        f"streams on {place.kind}, {SECONDS:.0f} s: {len(account.bound)} lives of {PRODUCERS} producers,"
        f" {CONSUMERS} consumers of one group, {scene.kills} kills; {len(account.acknowledged):,} records acknowledged,"
        f" all read, {account.reads - len(account.read):,} of them more than once; offsets gapless, in order;"
        f" {scene.merged:,} segments merged; {scene.followed:,} records of another topic read under leases, at"
        f" {scene.overtaken:,} looks behind its log start, none missing; verify found nothing"
    )


def check_sound(book: Book) -> None:
    """Nothing is wrong, and nothing is left that no row knows of."""
    deadline = time.monotonic() + 60
    janitor = Janitor(book.lake)
    while True:
        janitor.run_once()
        found = book.verify()
        if found.ok and not found.unfinished:
            break
        assert found.ok and time.monotonic() < deadline, (found.findings, found.unfinished)
    places = [(FLEETING, 0), *((TOPIC, number) for number in range(PARTITIONS))]
    segments = {item.s3_key for place in places for item in book.metadata.each_segment(*place)}
    there = set(objects_of(book))
    assert segments <= there
