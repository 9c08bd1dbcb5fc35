"""Astha: how many events it delivers, and how soon after their commit.

The log is filled first, by segments of a topic; then four subscribers take all of it. Beside it stands
the bare driver, which reads the same rows as often as there are subscribers and does nothing with them.
How soon is measured with a writer in another process that commits at a steady pace: from the moment at
which its commit has returned to the call of the subscriber.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import quantiles
from time import perf_counter
from typing import Any

import lakebook
from bench.asked import Asked, Say
from bench.places import Ground, Place
from bench.report import Result
from lakebook import Book, SegmentInfo
from lakebook.cdc.astha import Astha
from lakebook.cdc.subscribers import Event, Refresh, Subscriber

_SUBSCRIBERS = 4
_PARTITIONS = 16
_TABLES = ("segments", "partitions")
#: Events that the specification wants delivered in a second, and the longest way of all but one in a hundred.
_RATE = 10_000
_MOST_MS = 50.0
#: Events per second of the writer, in so many commits.
_PACE, _COMMITS = 1000, 50
_SECONDS, _FEW_SECONDS = 20, 3
_EVENTS, _FEW_EVENTS = 200_000, 10_000
_AT_ONCE = 1000


class _Counter(Subscriber):
    """Counts, and notes when it was first told of each segment."""

    workers = 2

    def __init__(self, name: str, noting: bool = False) -> None:
        self.name = name  # type: ignore[misc]
        self._noting = noting
        self.count = 0
        self.noted: dict[int, float] = {}
        self._lock = threading.Lock()

    @property
    def subscribed_tables(self) -> tuple[str, ...]:
        return _TABLES

    def on_event(self, event: Event[Any]) -> None:
        self.on_events([event])

    def on_events(self, events: Sequence[Event[Any]]) -> None:
        now = time.time()
        if self._noting:
            for event in events:
                if event.table == "segments":
                    self.noted.setdefault(event.data.base_offset, now)
        with self._lock:
            self.count += len(events)

    def on_refresh(self, refresh: Refresh) -> None:
        pass

    def on_health(self) -> None:
        pass


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """All that lies in the log at once, then what comes at a steady pace."""
    events = _FEW_EVENTS if asked.quick else _EVENTS
    with ground.new(events, "delivery") as place:
        book = place.open(publish="off")
        book.metadata.create_topic("filled", _PARTITIONS)
        yield from _all_at_once(place, book, events, say)
        yield from _steadily(place, book, _FEW_SECONDS if asked.quick else _SECONDS, say)


def _all_at_once(place: Place, book: Book, events: int, say: Say) -> Iterator[Result]:
    start = book.events.now()
    filled = _fill(book, events, say)
    subscribers = [_Counter(f"counter-{number}") for number in range(_SUBSCRIBERS)]
    for subscriber in subscribers:
        # As if each of them had stopped before the first of these events.
        book.events.save_cursor(subscriber.name, start)
    say("delivering", 0, filled)
    astha = Astha(book.lake.registry, subscribers)
    begun = perf_counter()
    astha.start()
    assert astha.wait_active(60)
    while any(subscriber.count < filled for subscriber in subscribers):
        if perf_counter() - begun > 600:
            raise RuntimeError("not everything was delivered")
        time.sleep(0.002)
    taken = perf_counter() - begun
    astha.stop()
    bare = _read_bare(place, filled)
    rate, driver = filled / taken, filled / bare
    yield Result("events/s to four subscribers", place.kind, filled, rate, driver, "1/s", promised=_RATE)
    yield Result(
        f"events/s to four subscribers ≥ {_RATE:,}", place.kind, filled, None, None, "1/s", holds=rate >= _RATE
    )


def _fill(book: Book, events: int, say: Say) -> int:
    """Segments until there are so many events; how many there are."""
    before = _number_of(book)
    done = 0
    offset = 0
    while done < events:
        book.metadata.add_segments(
            [
                _segment("filled", partition, offset + step)
                for partition in range(_PARTITIONS)
                for step in range(_AT_ONCE // _PARTITIONS)
            ]
        )
        offset += _AT_ONCE // _PARTITIONS
        done = _number_of(book) - before
        say("filling the log", done, events)
    return done


def _number_of(book: Book) -> int:
    return int(book.measure().values()["lakebook_events"])


def _segment(topic: str, partition: int, offset: int) -> SegmentInfo:
    return SegmentInfo(
        topic=topic,
        partition_id=partition,
        base_offset=offset,
        end_offset=offset,
        record_count=1,
        size_bytes=100,
        s3_key=f"{topic}/{partition}/{offset}",
    )


def _read_bare(place: Place, events: int) -> float:
    """Seconds in which the bare driver reads the rows of all events, as often as there are subscribers."""
    connection = place.connect()
    (last,) = connection.execute("SELECT max(id) FROM events").fetchone()
    begun = perf_counter()
    for _ in range(_SUBSCRIBERS):
        after = last - events
        while after < last:
            rows = connection.execute(
                f"SELECT * FROM events WHERE id > {after} ORDER BY id LIMIT {_AT_ONCE}"
            ).fetchall()
            after = rows[-1][0]
    return perf_counter() - begun


def _steadily(place: Place, book: Book, seconds: int, say: Say) -> Iterator[Result]:
    book.metadata.create_topic("paced", 1)
    subscribers = [_Counter(f"paced-{number}", noting=True) for number in range(_SUBSCRIBERS)]
    astha = Astha(book.lake.registry, subscribers)
    astha.start()
    assert astha.wait_active(60)
    assert astha.wait_idle(600)
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    writer = context.Process(target=_write, args=(place.target, seconds, theirs))
    say(f"delivering {_PACE} events/s", 0, None)
    writer.start()
    committed: dict[int, float] = ours.recv()
    writer.join()
    assert astha.wait_idle(60)
    astha.stop()
    taken = sorted(
        max(0.0, subscriber.noted[offset] - at) * 1000 for subscriber in subscribers for offset, at in committed.items()
    )
    cuts = quantiles(taken, n=100)
    yield Result("commit to delivery at 1,000/s, p50", place.kind, _PACE, cuts[49], None, "ms")
    yield Result("commit to delivery at 1,000/s, p99", place.kind, _PACE, cuts[98], None, "ms", below=_MOST_MS)


def _write(target: tuple[str, dict[str, Any]], seconds: int, back: Connection) -> None:
    """Commit at a steady pace; when each commit had returned, by the first offset of it."""
    each = _PACE // _COMMITS // 2 * 2
    committed: dict[int, float] = {}
    with lakebook.open(target[0], publish="off", **target[1]) as book:
        offset = 0
        begun = time.monotonic()
        for number in range(seconds * _COMMITS):
            # Each segment is an event, and the partition's row one more per commit.
            book.metadata.add_segments([_segment("paced", 0, offset + step) for step in range(each - 1)])
            committed[offset] = time.time()
            offset += each - 1
            time.sleep(max(0.0, begun + (number + 1) / _COMMITS - time.monotonic()))
    back.send(committed)
