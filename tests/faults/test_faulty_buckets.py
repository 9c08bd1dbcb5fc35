"""A book whose bucket fails at any request: what was acknowledged is there, and nothing stays that no row knows."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import moto.s3.models
import pytest

from books import POSTGRESQL, SQLITE, Place
from bucket_facts import check_that_nothing_is_left
from buckets import Buckets
from compacting import by_arrow
from fault_proxy import CLOSED, ENDLESS, ERROR, HELD, LATE, LOST, SHORT, SLOW_DOWN, FaultProxy
from lakebook import Book
from lakebook.components.janitor import Janitor
from lakebook.errors import LakebookError
from lakebook.storage import s3
from segment_logs import log_of
from table_facts import batches_of
from table_writers import ROWS, SCHEMA, TABLE, rows_of

TOPIC, OTHER = "clicks", "fleeting"
STEPS = 3 * int(os.environ.get("LAKEBOOK_TEST_KILLS", "20"))
REQUEST_SECONDS = 0.4
SETTINGS: dict[str, Any] = {
    "s3_request_seconds": REQUEST_SECONDS,
    "s3_retry_seconds": 0.3,
    "producer_linger": 0.0,
    "append_turn": 5.0,
    "merge_segments": 2,
    "merge_quiet": 0.0,
    "temporary_file_grace": 0.0,
    "sweep_grace": 0.0,
    "history_seconds": 0.0,
    "history_versions": 1,
    "insert_alive": 60.0,
}
FAULTS = (ERROR, SLOW_DOWN, CLOSED, HELD, LATE, SHORT, LOST)


@pytest.fixture(scope="module")
def buckets() -> Iterator[Buckets]:
    server = Buckets()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def proxy(buckets: Buckets) -> Iterator[FaultProxy]:
    with closing(FaultProxy(buckets.endpoint)) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def short_pauses_and_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_FIRST_PAUSE", 0.01)
    # So that files of a few rows go in parts.
    monkeypatch.setattr(s3, "PART", 800)
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 1)


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], buckets: Buckets) -> Place:
    place = make_place(request.param, with_book=False)
    place.settings |= {**buckets.settings, **SETTINGS, "warehouse": f"s3://{buckets.new_bucket()}/lake"}
    return place


class Worker:
    """Uses a book in every way, and remembers what it was told."""

    def __init__(self, book: Book, chance: random.Random) -> None:
        self._book, self._chance = book, chance
        self._number = 0
        #: Batches of rows, and values of records.
        self.tried: set[int] = set()
        self.batches: set[int] = set()
        self.sent: set[str] = set()
        self.records: set[str] = set()
        self.failed = 0

    def next(self) -> int:
        self._number += 1
        return self._number

    def insert(self) -> None:
        batch = self.next()
        self.tried.add(batch)
        self._book.table(TABLE).insert_arrow(rows_of(batch))
        self.batches.add(batch)

    def append(self) -> None:
        batch = self.next()
        self.tried.add(batch)
        with self._book.table(TABLE).appender() as appender:
            for number in range(ROWS):
                appender.append({"batch": batch, "number": number})
        self.batches.add(batch)

    def compact(self) -> None:
        by_arrow(self._book, self._book.table(TABLE))

    def publish(self) -> None:
        self._book.table(TABLE).publish()

    def read(self) -> None:
        found = self._book.table(TABLE).to_arrow()
        assert found.num_rows % ROWS == 0
        assert self.batches <= set(found["batch"].to_pylist())

    def produce(self) -> None:
        values = [f"record {self.next()}" for _ in range(3)]
        self.sent |= set(values)
        # What cannot be stored in time fails; each is asked for its own outcome.
        with suppress(LakebookError), self._book.producer(TOPIC, timeout=3.0) as producer:
            sent = [(value, producer.send(value)) for value in values]
            with suppress(LakebookError):
                producer.flush()
            for value, one in sent:
                one.result(60)
                self.records.add(value)

    def consume(self) -> None:
        with self._book.consumer(TOPIC, group="billing", auto_commit=False) as consumer:
            found = {record.value.decode() for record in consumer.poll(timeout=0.2) if record.value is not None}
            assert found <= self.sent
            consumer.commit()

    def merge(self) -> None:
        Janitor(self._book.lake).run_once("merging")

    def clean(self) -> None:
        self._book.maintain(["janitor"], spark=None)

    def drop(self) -> None:
        with suppress(LakebookError):
            table = self._book.tables.create(OTHER, SCHEMA)
            table.insert_arrow(rows_of(1))
            table.publish()
        self._book.tables.drop(OTHER)

    def step(self, act: Callable[[], None]) -> None:
        """Do something that may fail, but only in a way that callers know."""
        try:
            act()
        except LakebookError:
            self.failed += 1


def misfortune(proxy: FaultProxy, chance: random.Random) -> Any:
    """A fault that begins at some request, and is there for one, for some, or until the step ends."""
    fault, waits = chance.choice(FAULTS), iter([False] * chance.randrange(8))
    # Those take time.
    times = 1 if fault in (HELD, LATE) else chance.choice([1, 3, ENDLESS])
    return proxy.faulty(fault, times=times, seconds=2 * REQUEST_SECONDS, chosen=lambda: next(waits, True))


def test_a_book_is_sound_whatever_its_bucket_does(
    place: Place, buckets: Buckets, proxy: FaultProxy, soak: Callable[[str], None]
) -> None:
    book, bucket = place.open(s3_endpoint=proxy.endpoint), place.settings["warehouse"].split("/")[2]
    book.tables.create(TABLE, SCHEMA)
    book.topics.create(TOPIC, 1)
    chance = random.Random(STEPS)
    worker = Worker(book, chance)
    acts = [worker.insert, worker.append, worker.compact, worker.publish, worker.read, worker.produce, worker.consume]
    acts += [worker.merge, worker.clean, worker.drop]
    before = proxy.faults()
    for number in range(STEPS):
        act = acts[number % len(acts)]
        with misfortune(proxy, chance):
            worker.step(act)
    faults = proxy.faults() - before
    found = batches_of(book)
    assert worker.batches <= found <= worker.tried
    values = [value.decode() for _, value in log_of(book, TOPIC) if value is not None]
    assert len(values) == len(set(values))
    assert worker.records <= set(values) <= worker.sent
    check_that_nothing_is_left(place, buckets)
    assert proxy.count(f"{bucket}.*uploadId") > 0
    # The faults were felt, and not only felt.
    assert worker.failed > 0
    assert worker.batches
    assert worker.records
    soak(f"{place.kind}: a bucket that failed at {faults} requests, {worker.failed} of {STEPS} steps told of it")
