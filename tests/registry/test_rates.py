"""How a topic is written and read: sums, rates and groups, on every database."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from books import Place, describe
from lakebook.clock import ManualClock
from lakebook.errors import TopicNotFound
from lakebook.registry.groups import GroupState
from stream_writes import filled, merge

NOW = 1_700_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


def test_rates_are_those_of_the_last_minute_and_the_last_hour(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders", 2)
    for base in (0, 100, 200):
        book.metadata.add_segment(describe("orders", 0, base))
        clock.advance(59 if base else 3000)
    first, second = book.metadata.topic_traffic("orders").partitions
    assert (first.segments, first.records, first.size_bytes) == (3, 300, 3000)
    assert (first.records_per_second_minute, first.bytes_per_second_minute) == (1.667, 16.667)
    assert (first.records_per_second_hour, first.bytes_per_second_hour) == (0.083, 0.833)
    assert first.last_append_at == datetime.fromtimestamp(NOW / 1000 + 3059, UTC)
    assert (second.segments, second.records, second.records_per_second_hour, second.last_append_at) == (0, 0, 0, None)


def test_what_lies_below_the_log_start_does_not_count(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders")
    book.metadata.add_segments([describe("orders", 0, base) for base in (0, 100, 200)])
    book.metadata.delete_segments_before("orders", 0, 250)
    (found,) = book.metadata.topic_traffic("orders").partitions
    assert (found.log_start, found.high_watermark, found.records, found.segments) == (200, 300, 100, 1)


def test_every_group_that_reads_the_topic_is_told_with_its_lag(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders", 2)
    book.metadata.create_topic("others")
    for topic, number in (("orders", 0), ("orders", 1), ("others", 0)):
        book.metadata.add_segments([describe(topic, number, base) for base in (0, 100)])
    book.metadata.commit_offset("elsewhere", "others", 0, 10)
    book.metadata.commit_offset("behind", "orders", 0, 10)
    book.metadata.commit_offset("current", "orders", 0, 200)
    book.metadata.commit_offset("current", "orders", 1, 200)
    book.metadata.delete_segments_before("orders", 0, 100)
    groups = book.metadata.topic_traffic("orders").groups
    assert [(group.group_id, group.state, group.lag, group.members) for group in groups] == [
        ("behind", GroupState.BEHIND, 300, 0),
        ("current", GroupState.CURRENT, 0, 0),
    ]
    assert all(group.last_commit_at is not None for group in groups)


def test_a_topic_that_is_not_there_has_no_traffic(place: Place) -> None:
    with pytest.raises(TopicNotFound):
        place.open().metadata.topic_traffic("nowhere")


def test_a_merge_is_no_traffic(shared_place: Place, clock: ManualClock) -> None:
    book = shared_place.open(clock=clock)
    book.metadata.create_topic("orders")
    filled(book, 3)
    clock.advance(7200)
    merge(book, list(book.metadata.get_segments("orders", 0)))
    (found,) = book.metadata.topic_traffic("orders").partitions
    assert (found.segments, found.records) == (1, 30)
    assert (found.records_per_second_minute, found.records_per_second_hour) == (0, 0)
