"""Whoever merges segments is killed at every step: the log stays what it was, and nothing is left over."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import merge_processes
from books import POSTGRESQL, SQLITE, Place
from lake import records
from lakebook import Book
from lakebook.components.janitor import Janitor
from lakebook.registry import schema
from merge_processes import IMPATIENT, TOPIC, look_after_topics
from segment_logs import log_of, values_of
from streaming import produce
from table_facts import later, objects_of, with_own_warehouse
from table_writers import Child, kill_all

SEGMENTS = 6


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    place = with_own_warehouse(make_place(request.param), tmp_path)
    place.settings |= IMPATIENT
    return place


@pytest.fixture
def book(place: Place) -> Book:
    book = place.open()
    book.metadata.create_topic(TOPIC)
    for number in range(SEGMENTS):
        produce(book, TOPIC, 0, f"{number}.0", f"{number}.1")
    return book


def kill(place: Place, point: str, *actions: str) -> None:
    child = Child(look_after_topics, place.target, place.settings, *actions, points=point)
    assert ("done",) not in list(child.facts())
    assert child.end() == -signal.SIGKILL


def settle(book: Book) -> None:
    """Wait, under its lock, for what a server may still have under way of one who is dead already."""
    book.metadata.release_append(book.metadata.claim_append(TOPIC, 0))


def sweep(place: Place) -> None:
    """The work of a janitor of some time later, with patience for nobody but readers."""
    book = place.open(clock=(clock := later()))
    janitor = Janitor(book.lake)
    for _ in range(3):
        for action in ("retention", "segments", "files"):
            janitor.run_once(action)
        clock.advance(0.01)


def check(book: Book) -> None:
    found = book.verify()
    assert found.ok, found.findings


@pytest.mark.parametrize(
    "point", [*merge_processes.POINTS, "transaction.before_commit@2", "transaction.after_commit@2"]
)
def test_a_merge_that_is_killed_changes_no_record_and_leaves_nothing(place: Place, book: Book, point: str) -> None:
    before = log_of(book, TOPIC)
    files = objects_of(book)
    name, _, count = point.partition("@")
    kill(place, f"{name}=kill@{count or 1}", "merging")
    check(book)
    settle(book)
    committed = len(list(book.metadata.each_segment(TOPIC, 0))) == 1
    assert committed == (point in ("merge.committed", "transaction.after_commit@2"))
    assert log_of(book, TOPIC) == before
    assert len(objects_of(book) - files) == 1
    sweep(place)
    assert objects_of(book) == {segment.s3_key for segment in book.metadata.each_segment(TOPIC, 0)}
    assert records(book, schema.stream_folders) == records(book, schema.retired_segments) == []
    assert log_of(book, TOPIC) == before
    # The next one is not kept from it.
    merging = Janitor(book.lake).run_once("merging")["merging"]
    assert merging["segments"] == (0 if committed else SEGMENTS)
    assert log_of(book, TOPIC) == before
    check(book)


def test_a_reader_with_a_lease_reads_every_record_once_though_upkeep_is_killed_again_and_again(
    place: Place, book: Book
) -> None:
    before = log_of(book, TOPIC)
    lease_id, topic_id = book.metadata.pin_topic(TOPIC, {0: 0}, seconds=3600)
    planned = book.metadata.list_segments_in(topic_id, 0, 0, 2 * SEGMENTS)
    half = values_of(book, planned[: SEGMENTS // 2])
    kill(place, "merge.committed=kill@1", "merging")
    book.metadata.update_topic_config(TOPIC, retention_ms=1)
    for point in ("transaction.after_commit=kill@1", "transaction.before_commit=kill@2"):
        kill(place, point, "retention", "segments", "files")
        settle(book)
    sweep(place)
    rest = values_of(book, planned[SEGMENTS // 2 :])
    assert half + rest == before
    # Whoever looks anew, with the same lease, finds the merged one: the same records, each once.
    assert values_of(book, book.metadata.list_segments_in(topic_id, 0, 0, 2 * SEGMENTS)) == before
    check(book)
    book.metadata.unpin(lease_id)
    sweep(place)
    assert objects_of(book) == set()
    check(book)
