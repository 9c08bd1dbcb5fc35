"""Producers are killed, frozen and cut off; what they acknowledged is there once and in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from books import POSTGRESQL, Place
from lake import own_warehouse  # noqa: F401
from lakebook import Book, failpoints
from lakebook.errors import ProducerFenced
from lakebook.registry.databases import PostgreSQL
from producing import IMPATIENT, PARTITIONS, POINTS, TOPIC, UPLOAD, Told, produce
from segment_logs import log_of
from table_facts import with_own_warehouse
from table_writers import Child, kill_all
from test_lost_commits import Server, Wires

PATIENCE = 60


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture
def topic(shared_place: Place) -> Book:
    book = shared_place.open(**IMPATIENT)
    book.metadata.create_topic(TOPIC, PARTITIONS)
    return book


def start(place: Place, life: str, points: str = "", **options: Any) -> Child:
    return Child(produce, place.target, {**place.settings, **IMPATIENT}, life, points=points, **options)


def test_every_point_of_producing_is_killed() -> None:
    assert set(POINTS) == {point for point in failpoints.POINTS if point.startswith("produce.")}


TRANSACTIONS = ("transaction.begun", "transaction.before_commit", "transaction.after_commit")
#: At which times a point is reached a producer is killed, and after how many rounds it would end by itself.
COUNTS = {"append.claimed": (1, 2), "produce.releasing": (1, 2)} | dict.fromkeys(TRANSACTIONS, (4, 9))
ROUNDS = {"produce.releasing": 3}


@pytest.mark.parametrize("point", [*POINTS, UPLOAD, "append.claimed", *TRANSACTIONS])
def test_a_producer_killed_at_each_point_loses_nothing_it_acknowledged(
    shared_place: Place, topic: Book, point: str
) -> None:
    told = Told()
    ending = {"rounds": ROUNDS[point]} if point in ROUNDS else {}
    for count in COUNTS.get(point, (1, 5)):
        # The same producer comes back, and does not wait for the turn of the one that is dead.
        child = start(shared_place, f"life {count}", f"{point}=kill@{count}", producer_id="till", **ending)
        told.take(child.facts())
        assert child.end() == -signal.SIGKILL
        told.check(topic)
    last = start(shared_place, "the last life", producer_id="till", rounds=2)
    told.take(last.facts())
    assert last.end() == 0
    told.check(topic)
    assert "the last life:19" in told.acknowledged.values()


def test_producers_in_several_processes_share_a_partition(shared_place: Place, topic: Book) -> None:
    told = Told()
    children = [start(shared_place, f"life {number}", partitions=1, rounds=6) for number in range(3)]
    for child in children:
        told.take(child.facts())
        assert child.end() == 0
    told.check(topic)
    assert len(log_of(topic)) == len(told.acknowledged) == 3 * 6 * 10


def test_a_producer_that_was_frozen_past_its_turn_goes_on_behind_the_others(shared_place: Place, topic: Book) -> None:
    told = Told()
    child = start(shared_place, "frozen", partitions=1, rounds=4, frozen_at=3)
    child.wait_until_frozen()
    with topic.producer(TOPIC) as other:
        for number in range(3):
            told.take([("sending", [f"other:{number}"])])
            ack = other.send(f"other:{number}", partition=0).result(PATIENCE)
            told.take([("acknowledged", f"other:{number}", ack.partition, ack.offset)])
    child.wake()
    told.take(child.facts())
    assert child.end() == 0
    told.check(topic)
    assert len(log_of(topic)) == len(told.acknowledged) == 43


def test_a_producer_that_was_frozen_while_its_successor_began_is_fenced(shared_place: Place, topic: Book) -> None:
    child = start(shared_place, "old", partitions=1, frozen_at=2, producer_id="till")
    child.wait_until_frozen()
    with topic.producer(TOPIC, producer_id="till") as new:
        first = new.send(b"new", partition=0).result(PATIENCE)
        child.wake()
        # What the child says last is what it died of.
        with pytest.raises(AssertionError, match=ProducerFenced.__name__):
            for _ in child.facts():
                pass
        assert child.end() == 1
        second = new.send(b"new", partition=0).result(PATIENCE)
    assert second.offset == first.offset + 1
    assert topic.verify().ok


# --- a registry that goes away --------------------------------------------------


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Wires:
    watched = Wires()
    monkeypatch.setattr(PostgreSQL, "connect", watched.watch(PostgreSQL.connect))
    return watched


@pytest.fixture
def remote(make_place: Callable[[str], Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(POSTGRESQL), tmp_path)


@pytest.fixture
def server(remote: Place) -> Iterator[Server]:
    server = Server(remote.target)
    yield server
    server.close()


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "died"])
def test_a_batch_whose_commit_was_in_flight_when_the_wire_was_cut_is_there_once(
    remote: Place, server: Server, wires: Wires, landed: bool
) -> None:
    book = remote.open()
    book.metadata.create_topic(TOPIC)
    with book.producer(TOPIC, linger=0) as producer:
        producer.send(b"a").result(PATIENCE)
        server.shut_gate()
        sent = producer.send(b"b")
        pid = server.wait_for("COMMIT", "advisory")
        wires.cut(pid)
        server.wait_for("UPDATE commits%", "transactionid")
        if not landed:
            server.terminate(pid)
        server.open_gate()
        assert sent.result(PATIENCE).offset == 1
        assert producer.send(b"c").result(PATIENCE).offset == 2
    assert [value for _, value in log_of(book)] == [b"a", b"b", b"c"]
    assert book.verify().ok


class Switch:
    """Turns a database off and on again."""

    def __init__(self, url: str) -> None:
        where = psycopg.conninfo.conninfo_to_dict(url)
        self._name = where.pop("dbname")
        self._admin = psycopg.connect(**where, dbname="postgres", autocommit=True)  # type: ignore[arg-type]

    def turn_off(self) -> None:
        """Let nobody in, and put those out who are in."""
        self._admin.execute(f'ALTER DATABASE "{self._name}" ALLOW_CONNECTIONS false')
        self._admin.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s", (self._name,)
        )

    def turn_on(self) -> None:
        """As before."""
        self._admin.execute(f'ALTER DATABASE "{self._name}" ALLOW_CONNECTIONS true')

    def close(self) -> None:
        """As before, whatever has happened."""
        self.turn_on()
        self._admin.close()


def test_records_wait_for_a_registry_that_has_gone_away(remote: Place) -> None:
    book = remote.open(retry_attempts=2, outage_seconds=0)
    book.metadata.create_topic(TOPIC, 2)
    switch = Switch(remote.target)
    try:
        with book.producer(TOPIC, linger=0) as producer:
            sent = [producer.send(b"0", partition=number) for number in range(2)]
            assert [one.result(PATIENCE).offset for one in sent] == [0, 0]
            switch.turn_off()
            waiting = [producer.send(b"%d" % number, partition=number % 2) for number in range(2, 22)]
            tried = threading.Event()
            for _ in range(PATIENCE * 100):
                retries = book.metrics.values().get("lakebook_produce_retries_total{reason=registry_unavailable}", 0)
                if retries >= 6 or tried.wait(0.01):
                    break
            assert retries >= 6
            assert not any(one.done() for one in waiting)
            switch.turn_on()
            for one in waiting:
                one.result(PATIENCE)
    finally:
        switch.close()
    for partition in range(2):
        expected = [b"0", *(b"%d" % number for number in range(2, 22) if number % 2 == partition)]
        assert [value for _, value in log_of(book, TOPIC, partition)] == expected
    assert book.verify().ok
