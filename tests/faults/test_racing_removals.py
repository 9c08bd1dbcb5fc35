"""Removals that meet each other, appends and deletions on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from books import POSTGRESQL, Place, describe
from held import PATIENCE, held_before_commit, started, wait_until_blocked
from lakebook import Book, failpoints
from lakebook.errors import PathInUse
from lakebook.streams.metadata_store import CHUNK


@pytest.fixture
def place(make_place: Callable[..., Place]) -> Place:
    return make_place(POSTGRESQL)


@pytest.fixture
def book(place: Place) -> Book:
    return place.open()


def test_a_path_cannot_be_taken_while_it_is_being_let_go_of(book: Book) -> None:
    book.metadata.create_topic("orders", 2)
    book.metadata.add_segment(describe(base=0, s3_key="t/one.parquet"))
    with held_before_commit(lambda: book.metadata.delete_segments_before("orders", 0, 100), skip=1) as removing:
        adding = started(lambda: book.metadata.add_segment(describe(partition=1, s3_key="t/one.parquet")))
        wait_until_blocked(book)
        assert removing.finish() == 1
    with pytest.raises(PathInUse):
        adding.finish()
    assert list(book.metadata.get_segments("orders", 1)) == []
    assert book.verify().ok


def test_two_purgers_of_one_wide_topic_do_not_trip_over_each_other(place: Place, book: Book) -> None:
    other = place.open(max_partitions=CHUNK + 5)
    other.metadata.create_topic("wide", CHUNK + 5)

    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    with failpoints.armed("topic.hidden", stop), pytest.raises(Stopped):
        other.metadata.delete_topic("wide")
    # The fourth transaction of a purge deletes partitions; by then both are at the same place.
    with held_before_commit(book.metadata.purge_deleted_topics, skip=3) as first:
        second = started(other.metadata.purge_deleted_topics)
        wait_until_blocked(book)
        first.finish()
    second.finish()
    checked = book.verify()
    assert checked.ok, checked.findings[:3]
    assert checked.unfinished == ()
    assert checked.checked["partitions"] == 0


def test_retention_on_a_topic_that_is_deleted_meanwhile_ends_quietly(shared_place: Place) -> None:
    book = shared_place.open()
    book.metadata.create_topic("orders")
    book.metadata.add_segments([describe(base=0), describe(base=100)])
    with failpoints.armed("retention.log_start_moved", lambda: book.metadata.delete_topic("orders")):
        assert book.metadata.delete_segments_before("orders", 0, 100) == 0
    assert len(book.metadata.list_temporary_files()) == 2
    assert book.verify().ok


def test_a_deletion_waits_for_an_append_in_flight_and_takes_its_segment_along(book: Book) -> None:
    book.metadata.create_topic("orders")
    with held_before_commit(lambda: book.metadata.add_segment(describe()), skip=1) as appending:
        deleting = started(lambda: book.metadata.delete_topic("orders"))
        wait_until_blocked(book)
        assert deleting.thread.is_alive()
        appending.finish()
    deleting.thread.join(PATIENCE)
    assert deleting.error is None
    assert len(book.metadata.list_temporary_files()) == 1
    checked = book.verify()
    assert checked.ok
    assert checked.unfinished == ()


def test_turns_and_appends_of_many_partitions_never_wait_in_a_circle(place: Place, book: Book) -> None:
    # Names in one order, lake objects in the other.
    for name in ("z", "m", "a"):
        book.metadata.create_topic(name)
    other = place.open()
    rounds = 60

    def add() -> None:
        for base in range(rounds):
            other.metadata.add_segments([describe(name, base=base, count=1) for name in ("a", "m", "z")])

    adding = threading.Thread(target=add)
    adding.start()
    for _ in range(rounds):
        turns = book.metadata.claim_appends([("a", 0), ("m", 0), ("z", 0)], holder="one")
        assert len(turns) == 3
    adding.join(PATIENCE)
    assert not adding.is_alive()
    for each in (book, other):
        assert each.metrics.values().get("lakebook_transaction_retries_total{reason=busy}", 0) == 0
    assert book.verify().ok
