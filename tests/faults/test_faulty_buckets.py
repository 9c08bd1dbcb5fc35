"""A book whose bucket fails at any request: what was acknowledged is there, and nothing stays that no row knows."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import moto.s3.models
import pytest

from books import POSTGRESQL, SQLITE, Place
from bucket_workers import FIRST_PAUSE, PART, TOPIC, Worker, work_until_stopped
from buckets import Buckets
from extent import long
from fault_proxy import CLOSED, ENDLESS, ERROR, HELD, LATE, LOST, SHORT, SLOW_DOWN, FaultProxy
from lakebook.storage import s3
from leftovers import check_that_nothing_is_left
from segment_logs import log_of
from table_facts import batches_of
from table_writers import SCHEMA, TABLE, Child, kill_all

#: How long several work at once.
SECONDS = float(os.environ.get("LAKEBOOK_TEST_SECONDS", "2"))
#: Each of ten acts meets a fault more than once, however small the run: what is felt but once may be felt by none.
STEPS = max(30, 3 * int(os.environ.get("LAKEBOOK_TEST_KILLS", "20")))
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
    monkeypatch.setattr(s3, "_FIRST_PAUSE", FIRST_PAUSE)
    monkeypatch.setattr(s3, "PART", PART)
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 1)


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], buckets: Buckets) -> Place:
    place = make_place(request.param, with_book=False)
    place.settings |= {**buckets.settings, **SETTINGS, "warehouse": f"s3://{buckets.new_bucket()}/lake"}
    return place


def misfortune(proxy: FaultProxy, chance: random.Random) -> Any:
    """A fault that begins at some request, and is there for one, for some, or until the step ends."""
    fault, waits = chance.choice(FAULTS), iter([False] * chance.randrange(8))
    # Those take time.
    times = 1 if fault in (HELD, LATE) else chance.choice([1, 3, ENDLESS])
    return proxy.faulty(fault, times=times, seconds=2 * REQUEST_SECONDS, chosen=lambda: next(waits, True))


@long(SQLITE)
def test_a_book_is_sound_whatever_its_bucket_does(
    place: Place, buckets: Buckets, proxy: FaultProxy, soak: Callable[[str], None]
) -> None:
    book, bucket = place.open(s3_endpoint=proxy.endpoint), place.settings["warehouse"].split("/")[2]
    book.tables.create(TABLE, SCHEMA)
    book.topics.create(TOPIC, 1)
    chance = random.Random(STEPS)
    worker = Worker(book)
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
    check_that_nothing_is_left(place)
    assert proxy.count(f"{bucket}.*uploadId") > 0
    # The faults were felt, and not only felt.
    assert worker.failed > 0
    assert worker.batches
    assert worker.records
    soak(f"{place.kind}: a bucket that failed at {faults} requests, {worker.failed} of {STEPS} steps told of it")


# --- several processes at once -----------------------------------------------------

WRITERS = 4
#: What each process does, again and again.
ROLES = (*[("insert", "append")] * WRITERS, ("publish", "read"), ("compact",), ("clean", "drop"))
#: On a machine that is busy with all of them, a request that is not held is answered in time.
AT_ONCE = {**SETTINGS, "s3_request_seconds": 1.0, "s3_retry_seconds": 0.5}
#: More than anybody tries again: what is written, what is published, what is read.
AT_FIRST = ((ERROR, "(PUT|POST) .*/data/", 60), (SLOW_DOWN, "(PUT|POST) .*/iceberg/", 6), (CLOSED, "GET ", 20))
#: So many requests later everybody has met a fault who was to meet it.
MANY = 300


def troubles(chance: random.Random) -> Iterator[tuple[str, str, int, float]]:
    """In which ways the bucket fails one after the other: how, at what, how often, and at which share of it."""
    yield from ((*trouble, 1.0) for trouble in AT_FIRST)
    deadline = time.monotonic() + SECONDS
    for fault in itertools.cycle(chance.sample(FAULTS, len(FAULTS))):
        # Those take time.
        times = chance.choice([2, 5] if fault in (HELD, LATE) else [5, 20, 150])
        yield fault, "", times, chance.choice([0.2, 1.0])
        if time.monotonic() >= deadline:
            return


def have(trouble: tuple[str, str, int, float], proxy: FaultProxy, chance: random.Random, children: list[Child]) -> None:
    """Have the bucket fail, and then be well for a while."""
    fault, fits, times, share = trouble
    before = len(proxy.requests)
    with proxy.faulty(fault, fits, times, seconds=2.0, chosen=lambda: chance.random() < share) as rule:
        listen(lambda: rule.left == 0 or len(proxy.requests) > before + MANY, children)
    well = len(proxy.requests) + chance.choice([10, 100])
    listen(lambda: len(proxy.requests) > well, children)


def listen(until: Callable[[], bool], children: list[Child]) -> None:
    """Wait for something; none of them says anything meanwhile but why it has failed."""
    while not until():
        for child in children:
            assert not child.connection.poll(0.01), child.hear()


@long(POSTGRESQL)
def test_a_book_is_sound_whatever_its_bucket_does_to_several_processes_at_once(
    place: Place, proxy: FaultProxy, soak: Callable[[str], None]
) -> None:
    place.settings |= AT_ONCE
    book = place.open()
    book.tables.create(TABLE, SCHEMA)
    chance, before = random.Random(SECONDS), proxy.faults()
    settings = {**place.settings, "s3_endpoint": proxy.endpoint}
    children = [
        Child(work_until_stopped, place.target, settings, number * 1_000_000, acts) for number, acts in enumerate(ROLES)
    ]
    for child in children:
        child.wait_for("ready")
    for trouble in troubles(chance):
        have(trouble, proxy, chance, children)
    for child in children:
        child.stop()
    told = [child.wait_for("worked")[1:] for child in children]
    assert [child.end() for child in children] == [0] * len(children)
    tried, batches = (set().union(*(one[number] for one in told)) for number in (0, 1))
    failed, done = (sum(one[number] for one in told) for number in (2, 3))
    # What was refused is not there: nobody had to be told that nobody knows.
    assert batches_of(book) == batches < tried
    check_that_nothing_is_left(place)
    assert batches_of(book) == batches
    # Everybody has got on.
    assert all(one[3] for one in told), [one[2:] for one in told]
    faults = proxy.faults() - before
    soak(
        f"{place.kind}: {len(ROLES)} processes on a bucket that failed at {faults:,} requests: {done:,} steps done,"
        f" {failed:,} refused, {len(batches):,} of {len(tried):,} batches there, the others not; nothing left over"
    )
