"""The read cache answers fast and never with what changed longer ago than its staleness."""

from __future__ import annotations

import pytest

from books import Place, describe
from lakebook import Book
from lakebook.clock import ManualClock
from lakebook.errors import TopicNotFound


def hits(book: Book) -> float:
    return book.metrics.values()["lakebook_cache_lookups_total{result=hit}"]


def high_watermark(book: Book) -> int:
    partition = book.metadata.get_partition("orders", 0)
    assert partition is not None
    return partition.high_watermark


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def writer(shared_place: Place) -> Book:
    book = shared_place.open()
    book.metadata.create_topic("orders")
    book.metadata.add_segments([describe(base=0), describe(base=100)])
    return book


def found(book: Book, offset: int) -> int | None:
    segment = book.metadata.find_segment_for_offset("orders", 0, offset)
    return None if segment is None else segment.base_offset


@pytest.mark.parametrize("staleness", [0.0, 0])
def test_without_staleness_every_answer_is_as_new_as_the_registry(
    shared_place: Place, writer: Book, staleness: float
) -> None:
    reader = shared_place.open(cache_staleness=staleness)
    for number in range(2, 6):
        assert high_watermark(reader) == number * 100
        assert found(reader, number * 100) is None
        assert found(reader, number * 100 - 1) == (number - 1) * 100
        assert found(reader, 0) == 0
        writer.metadata.add_segment(describe(base=number * 100))
    writer.metadata.delete_segments_before("orders", 0, 250)
    assert found(reader, 150) is None
    assert found(reader, 200) == 200
    writer.metadata.update_topic_config("orders", {"segment.ms": "7"})
    topic = reader.metadata.get_topic("orders")
    assert topic is not None
    assert topic.config == {"segment.ms": "7"}
    writer.metadata.delete_topic("orders")
    assert reader.metadata.get_topic("orders") is None
    assert reader.metadata.get_partition("orders", 0) is None
    with pytest.raises(TopicNotFound):
        found(reader, 200)
    writer.metadata.create_topic("orders")
    assert high_watermark(reader) == 0
    assert found(reader, 200) is None


def test_a_stale_answer_ends_when_the_staleness_does(shared_place: Place, writer: Book, clock: ManualClock) -> None:
    reader = shared_place.open(cache_staleness=5, clock=clock)
    assert found(reader, 50) == 0
    assert high_watermark(reader) == 200
    writer.metadata.delete_segments_before("orders", 0, 100)
    writer.metadata.add_segment(describe(base=200))
    clock.advance(4.9)
    assert found(reader, 50) == 0
    assert high_watermark(reader) == 200
    clock.advance(0.2)
    assert found(reader, 50) is None
    assert high_watermark(reader) == 300


def test_what_is_not_there_is_never_remembered(shared_place: Place, writer: Book, clock: ManualClock) -> None:
    reader = shared_place.open(cache_staleness=3600, clock=clock)
    assert found(reader, 200) is None
    assert reader.metadata.get_topic("clicks") is None
    writer.metadata.add_segment(describe(base=200))
    writer.metadata.create_topic("clicks")
    assert found(reader, 200) == 200
    assert reader.metadata.get_topic("clicks") is not None


def test_a_book_sees_its_own_changes_at_once(shared_place: Place, clock: ManualClock) -> None:
    book = shared_place.open(cache_staleness=3600, clock=clock)
    book.metadata.create_topic("orders")
    for number in range(3):
        assert high_watermark(book) == number * 100
        book.metadata.add_segment(describe(base=number * 100))
        assert found(book, number * 100) == number * 100
    turn = book.metadata.claim_append("orders", 0)
    book.metadata.append_segment(turn, describe(base=300))
    assert high_watermark(book) == 400
    book.metadata.delete_segments_before("orders", 0, 250)
    assert found(book, 150) is None
    assert book.metadata.get_topic("orders") is not None
    book.metadata.grow_topic("orders", 2)
    topic = book.metadata.get_topic("orders")
    assert topic is not None
    assert topic.partition_count == 2
    book.metadata.delete_topic("orders")
    assert book.metadata.get_topic("orders") is None
    book.metadata.create_topic("orders")
    assert found(book, 250) is None


def test_what_was_handed_out_can_be_changed_without_harm(shared_place: Place, writer: Book, clock: ManualClock) -> None:
    writer.metadata.update_topic_config("orders", {"segment.ms": "7"})
    reader = shared_place.open(cache_staleness=60, clock=clock)
    for _ in range(3):
        topic = reader.metadata.get_topic("orders")
        assert topic is not None
        assert topic.config == {"segment.ms": "7"}
        topic.config["segment.ms"] = "8"  # type: ignore[index]


def test_repeated_lookups_are_answered_by_the_cache(shared_place: Place, writer: Book, clock: ManualClock) -> None:
    reader = shared_place.open(cache_staleness=60, clock=clock)
    found(reader, 5)
    before = hits(reader)
    for offset in range(100):
        assert found(reader, offset) == 0
    assert hits(reader) == before + 100


def test_the_cache_is_bounded_and_can_be_turned_off(shared_place: Place, writer: Book, clock: ManualClock) -> None:
    writer.metadata.add_segments([describe(base=base) for base in range(200, 3000, 100)])
    small = shared_place.open(cache_segments=4, cache_staleness=60, clock=clock)
    off = shared_place.open(cache_segments=0, cache_staleness=60, clock=clock)
    for book in (small, off):
        for _ in range(3):
            assert [found(book, offset) for offset in range(50, 3000, 100)] == list(range(0, 3000, 100))
    assert hits(off) == 0


def test_a_segment_that_was_read_before_its_partition_changed_is_not_remembered(
    shared_place: Place, writer: Book
) -> None:
    reader = shared_place.open()
    cache = reader.metadata._cache
    old = reader.metadata.find_segment_for_offset("orders", 0, 50)
    assert old is not None
    known = cache.known("orders", 0)
    # Between the look-up and the remembering, another thread learns what has happened since.
    writer.metadata.delete_segments_before("orders", 0, 100)
    assert high_watermark(reader) == 200
    cache.remember(old, known)
    assert found(reader, 50) is None
    writer.metadata.delete_topic("orders")
    writer.metadata.create_topic("orders")
    assert high_watermark(reader) == 0
    cache.remember(old, known)
    assert found(reader, 50) is None
