"""Subscribers that record, fail and hang, and processes that deliver events to one that writes down what it is told."""

from __future__ import annotations

import json
import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lakebook
from books import describe
from lakebook import Book
from lakebook.cdc.astha import Astha
from lakebook.cdc.subscribers import Event, Refresh, Subscriber
from lakebook.clock import SystemClock
from lakebook.registry import events as log
from lakebook.registry.deliveries import KIND_OF, Lane, load_progress
from lakebook.registry.maintenance import Request, list_requests
from table_writers import Line

PATIENCE = 30.0

#: Settings with which whatever is tried again is tried again soon.
QUICK = {"delivery_pause": 0.01, "astha_lease": 0.5}

TOPIC = "orders"


def until(what: Callable[[], object], patience: float = PATIENCE) -> None:
    """Wait until something is the case."""
    never = threading.Event()
    clock = SystemClock()
    late = clock.monotonic() + patience
    while not what():
        assert clock.monotonic() < late, "it does not come about"
        never.wait(0.002)


def nothing(*_: object) -> None:
    """Do nothing, as a subscriber does that is content."""


class Recorder(Subscriber):
    """Remembers what it was told; what it does beforehand may fail, hang or return something."""

    def __init__(
        self,
        name: str = "recorder",
        tables: Sequence[str] = ("segments",),
        *,
        act: Callable[[Sequence[Event[Any]]], object] = nothing,
        take_state: Callable[[Refresh], object] = nothing,
        health: Callable[[], object] = nothing,
        **options: Any,
    ) -> None:
        self.name = name  # type: ignore[misc]
        self._tables = tuple(tables)
        self.act = act
        self.take_state = take_state
        self.health = health
        #: Events that were taken, call by call, those that were tried, and the refreshes that were taken.
        self.calls: list[list[Event[Any]]] = []
        self.tried: list[list[Event[Any]]] = []
        self.refreshes: list[Refresh] = []
        self.checkups = 0
        for option, value in options.items():
            setattr(self, option, value)

    @property
    def subscribed_tables(self) -> tuple[str, ...]:
        return self._tables

    def on_event(self, event: Event[Any]) -> None:
        return self.on_events([event])

    def on_events(self, events: Sequence[Event[Any]]) -> None:
        self.tried.append(list(events))
        returned = self.act(events)
        if returned is None:
            self.calls.append(list(events))
        return returned  # type: ignore[return-value]

    def on_refresh(self, refresh: Refresh) -> None:
        returned = self.take_state(refresh)
        self.refreshes.append(refresh)
        return returned  # type: ignore[return-value]

    def on_health(self) -> None:
        self.checkups += 1
        return self.health()  # type: ignore[return-value]

    @property
    def events(self) -> list[Event[Any]]:
        """What it has taken."""
        return [event for call in list(self.calls) for event in call]

    def sequences(self) -> dict[int, list[int]]:
        """The sequences it has taken, by object."""
        return sequences_of(self.events)


def sequences_of(events: Iterable[Event[Any] | log.Event]) -> dict[int, list[int]]:
    """The sequences of events, by object, in the order in which they are."""
    found: dict[int, list[int]] = defaultdict(list)
    for event in events:
        found[event.object_id].append(event.sequence)
    return dict(found)


class Failing:
    """Fails so many times, then no more; or always, for some objects."""

    def __init__(self, times: float = float("inf"), error: BaseException | None = None, objects: Any = None) -> None:
        self.times = times
        self.error = error if error is not None else ValueError("poison")
        self.objects = objects
        self.failures = 0

    def __call__(self, told: Any = ()) -> None:
        first = told[0] if isinstance(told, Sequence) and told else told
        if self.objects is not None and getattr(first, "object_id", None) not in self.objects:
            return
        if self.failures < self.times:
            self.failures += 1
            raise self.error


class Gate:
    """Holds those who come to it until it is opened."""

    def __init__(self, objects: Any = None, times: float = float("inf")) -> None:
        self.objects = objects
        self.times = times
        self.held = 0
        self.opened = threading.Event()

    def __call__(self, told: Any = ()) -> None:
        first = told[0] if isinstance(told, Sequence) and told else told
        if self.objects is not None and getattr(first, "object_id", None) not in self.objects:
            return
        if self.held < self.times:
            self.held += 1
            assert self.opened.wait(PATIENCE)


@contextmanager
def delivering(book: Book, *subscribers: Subscriber, **options: Any) -> Iterator[Astha]:
    """Deliver events of a book within a block."""
    astha = Astha(book._registry, subscribers, **options)
    astha.start()
    try:
        assert astha.wait_active(PATIENCE)
        yield astha
    finally:
        astha.stop()


def append(book: Book, partition: int = 0, number: int = 1, topic: str = TOPIC) -> None:
    """Add segments to a partition, in one transaction: an event for each, and one for the partition."""
    found = book.metadata.get_partition(topic, partition)
    assert found is not None
    start = found.high_watermark
    book.metadata.add_segments([describe(topic, partition, start + step, 1) for step in range(number)])


def object_of(book: Book, partition: int = 0, topic: str = TOPIC) -> int:
    """The lake object that a partition is."""
    record = book.metadata.get_topic(topic)
    assert record is not None
    sql = f"SELECT object_id FROM partitions WHERE topic_id = {record.id} AND partition_id = {partition}"
    row = book._registry.read_with(lambda reader: reader._connection.execute(sql).fetchone())
    return int(row[0])


def all_events(book: Book, tables: Sequence[str] = tuple(KIND_OF)) -> list[log.Event]:
    """Every event of some tables that is in the log."""
    cursor = book.events.beginning()
    found: list[log.Event] = []
    while True:
        batch = book.events.read(cursor)
        found.extend(event for event in batch.events if event.table in tables)
        cursor = batch.cursor
        if not batch.more:
            return found


def asked(book: Book) -> list[Request]:
    """What is asked for and not met yet."""
    return book._registry.read_with(list_requests)


def lanes(book: Book, name: str = "recorder") -> list[Lane]:
    """The lanes of a subscriber that are written down."""
    return book._registry.read_with(lambda reader: load_progress(reader, name))[1]


def begin_here(book: Book, *names: str) -> None:
    """As if subscribers had stopped now: they go on from here, without a refresh."""
    for name in names or ("recorder",):
        book.events.save_cursor(name, book.events.now())


# --- processes -----------------------------------------------------------------

#: What the recording processes are told of.
TABLES = ("partitions", "segments")
NAMES = ("first", "second")
#: Where a process comes by that delivers events.
POINTS = ("astha.claimed", "astha.saved", "delivery.taken")


class Writing(Subscriber):
    """Appends what it is told to a file: what was written stays when the process is killed."""

    workers = 3

    def __init__(self, name: str, file: int, run: Callable[[], str]) -> None:
        self.name = name  # type: ignore[misc]
        self._file = file
        self._run = run

    @property
    def subscribed_tables(self) -> tuple[str, ...]:
        return TABLES

    def _write(self, *facts: tuple[Any, ...]) -> None:
        # In one write, at the end of the file: nobody else's comes between.
        run = self._run()
        os.write(self._file, "".join(f"{json.dumps([run, self.name, *fact])}\n" for fact in facts).encode())

    def on_event(self, event: Event[Any]) -> None:
        self.on_events([event])

    def on_events(self, events: Sequence[Event[Any]]) -> None:
        self._write(*(("event", event.object_id, event.sequence) for event in events))

    def on_refresh(self, refresh: Refresh) -> None:
        self._write(("refresh", refresh.object_id, 0))

    def on_health(self) -> None:
        pass


class Jumping(SystemClock):
    """A clock whose wall time jumps when it is told to."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


def deliver_until_stopped(line: Line, target: str, settings: dict[str, Any], file: str, run: str) -> None:
    """Deliver to subscribers that write down what they are told; tell of every change of role."""
    written = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    clock = Jumping()
    with lakebook.open(target, clock=clock, **settings) as book:
        turns: list[int] = []
        subscribers = [Writing(name, written, lambda: f"{run}, turn {len(turns)}") for name in NAMES]
        astha = Astha(book._registry, subscribers, on_claimed=lambda: turns.append(1))
        astha.start()
        line.tell("ready")
        role = None
        ending = threading.Event()
        while True:
            if role is not astha.role:
                role = astha.role
                line.tell("role", str(role))
            if line.stopped():
                asked = line._connection.recv()
                if asked == "stop":
                    break
                clock.ahead_ms += asked
            ending.wait(0.005)
        astha.stop()
        line.tell("stopped", str(astha.failure))


def write_events(line: Line, target: str, settings: dict[str, Any], seed: int, commits: int) -> None:
    """One of several processes that append to all partitions; tells how many transactions it has made."""
    chance = random.Random(seed)
    with lakebook.open(target, **settings) as book:
        partitions = [partition.partition_id for partition in book.metadata.list_partitions(TOPIC)]
        line.tell("ready")
        done = 0
        while done < commits:
            try:
                append(book, chance.choice(partitions), chance.randint(1, 20))
            except (lakebook.errors.SegmentOverlap, lakebook.errors.SegmentGap):
                continue  # Another was faster.
            done += 1
            line.tell("committed", done)


@dataclass(frozen=True)
class Fact:
    """What a recording subscriber was told once."""

    #: The process, and how often it has had the turn.
    run: str
    subscriber: str
    kind: str
    object_id: int
    sequence: int


def facts_in(file: Path) -> list[Fact]:
    """What was written down, in its order; a line that a killed process has not finished is left out."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    # What it has not finished may stand before the first line of the next process.
    return [Fact(*json.loads(line[line.rindex('["') :])) for line in lines if line.endswith("\n")]
