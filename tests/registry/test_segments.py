"""Segments are contiguous, found by offset and by time, and removed whole."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from books import describe
from lakebook import Book, failpoints
from lakebook.errors import (
    OffsetBeyondWatermark,
    PartitionNotFound,
    PathInUse,
    SegmentAlreadyExists,
    SegmentGap,
    SegmentOverlap,
    TopicNotFound,
    WatermarkMismatch,
)
from lakebook.pages import every
from lakebook.streams.metadata_store import CHUNK

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def orders(book: Book) -> Book:
    book.metadata.create_topic("orders", 2)
    return book


def watermark(book: Book, partition: int = 0) -> tuple[int, int]:
    found = book.metadata.get_partition("orders", partition)
    assert found is not None
    return found.log_start, found.high_watermark


def test_a_segment_moves_the_watermark_and_is_found_by_each_of_its_offsets(orders: Book) -> None:
    recorded = orders.metadata.add_segment(describe(base=0, count=1000, id="seg1", checksum="xxh3:1f"))
    orders.metadata.add_segment(describe(base=1000, count=1000, id="seg2"))
    assert watermark(orders) == (0, 2000)
    for offset, expected in ((0, "seg1"), (500, "seg1"), (999, "seg1"), (1000, "seg2"), (1999, "seg2")):
        found = orders.metadata.find_segment_for_offset("orders", 0, offset)
        assert found is not None
        assert found.id == expected
    assert orders.metadata.find_segment_for_offset("orders", 0, 0) == recorded
    assert recorded.checksum == "xxh3:1f"
    assert recorded.created_at is not None
    for offset in (2000, 5000, 2**63 - 1):
        assert orders.metadata.find_segment_for_offset("orders", 0, offset) is None
    assert orders.metadata.find_segment_for_offset("orders", 1, 0) is None


def test_a_segment_that_overlaps_or_leaves_a_hole_changes_nothing(orders: Book) -> None:
    orders.metadata.add_segment(describe(base=0))
    before = list(orders.events.read(orders.events.beginning()).events)
    for base in (0, 1, 50, 99):
        with pytest.raises(SegmentOverlap):
            orders.metadata.add_segment(describe(base=base))
    for base in (101, 200, 2**62):
        with pytest.raises(SegmentGap):
            orders.metadata.add_segment(describe(base=base))
    assert watermark(orders) == (0, 100)
    assert len(orders.metadata.get_segments("orders", 0)) == 1
    assert list(orders.events.read(orders.events.beginning()).events) == before
    assert orders.verify().ok


def test_a_batch_is_recorded_whole_or_not_at_all(orders: Book) -> None:
    orders.metadata.add_segments([describe(base=0), describe(partition=1, base=0), describe(base=100)])
    assert watermark(orders) == (0, 200)
    assert watermark(orders, 1) == (0, 100)
    with pytest.raises(SegmentGap):
        orders.metadata.add_segments([describe(base=200), describe(partition=1, base=100), describe(base=301)])
    assert watermark(orders) == (0, 200)
    assert watermark(orders, 1) == (0, 100)
    assert orders.metadata.add_segments([]) == []
    assert orders.measure().values()["lakebook_open_commits"] == 0
    assert orders.verify().ok


def test_an_id_or_a_path_cannot_be_used_twice(orders: Book) -> None:
    orders.metadata.add_segment(describe(base=0, id="one", s3_key="a/1.parquet"))
    with pytest.raises(SegmentAlreadyExists):
        orders.metadata.add_segment(describe(base=100, id="one"))
    with pytest.raises(PathInUse):
        orders.metadata.add_segment(describe(base=100, s3_key="a/1.parquet"))
    with pytest.raises(PathInUse):
        orders.metadata.add_segments([describe(base=100, s3_key="b"), describe(base=200, s3_key="b")])
    with pytest.raises(SegmentAlreadyExists):
        orders.metadata.add_segments([describe(base=100, id="x"), describe(base=200, id="x")])
    assert watermark(orders) == (0, 100)


def test_a_path_that_waits_for_its_removal_can_never_count_again(orders: Book) -> None:
    orders.metadata.add_segments([describe(base=0, s3_key="a/1.parquet"), describe(base=100)])
    assert orders.metadata.delete_segments_before("orders", 0, 100) == 1
    with pytest.raises(PathInUse):
        orders.metadata.add_segment(describe(base=200, s3_key="a/1.parquet"))


def test_a_watermark_can_be_confirmed_and_not_moved(orders: Book) -> None:
    orders.metadata.add_segment(describe(base=0))
    orders.metadata.update_high_watermark("orders", 0, 100)
    for offset in (0, 99, 101, 1000):
        with pytest.raises(WatermarkMismatch):
            orders.metadata.update_high_watermark("orders", 0, offset)
    assert watermark(orders) == (0, 100)


def test_segments_come_in_pages_from_any_offset(orders: Book) -> None:
    orders.metadata.add_segments([describe(base=base, count=10) for base in range(0, 250, 10)])
    page = orders.metadata.get_segments("orders", 0, limit=10)
    assert [segment.base_offset for segment in page] == list(range(0, 100, 10))
    page = orders.metadata.get_segments("orders", 0, after=page.next, limit=10)
    assert [segment.base_offset for segment in page] == list(range(100, 200, 10))
    page = orders.metadata.get_segments("orders", 0, from_offset=215, limit=2)
    assert [segment.base_offset for segment in page] == [210, 220]
    assert [s.base_offset for s in orders.metadata.each_segment("orders", 0)] == list(range(0, 250, 10))
    walked = every(lambda after: orders.metadata.get_segments("orders", 0, from_offset=15, after=after, limit=3))
    assert [segment.base_offset for segment in walked] == list(range(10, 250, 10))
    assert list(orders.metadata.get_segments("orders", 0, from_offset=250)) == []
    assert list(orders.metadata.get_segments("orders", 1)) == []
    with pytest.raises(PartitionNotFound):
        orders.metadata.get_segments("orders", 2)


def test_many_offsets_are_looked_up_at_once(orders: Book) -> None:
    orders.metadata.add_segments([describe(base=0), describe(base=100), describe(partition=1, base=0)])
    found = orders.metadata.find_segments_for_offsets(
        [("orders", 0, 5), ("orders", 0, 150), ("orders", 1, 5), ("orders", 1, 500)]
    )
    assert {place: segment and segment.base_offset for place, segment in found.items()} == {
        ("orders", 0, 5): 0,
        ("orders", 0, 150): 100,
        ("orders", 1, 5): 0,
        ("orders", 1, 500): None,
    }
    for (topic, number, offset), segment in found.items():
        assert orders.metadata.find_segment_for_offset(topic, number, offset) == segment
    orders.metadata.delete_segments_before("orders", 0, 100)
    assert orders.metadata.find_segments_for_offsets([("orders", 0, 5)]) == {("orders", 0, 5): None}
    assert orders.metadata.find_segments_for_offsets([]) == {}
    with pytest.raises(PartitionNotFound):
        orders.metadata.find_segments_for_offsets([("orders", 0, 5), ("orders", 9, 5)])
    with pytest.raises(TopicNotFound):
        orders.metadata.find_segments_for_offsets([("nowhere", 0, 5)])


def test_retention_removes_whole_segments_and_moves_the_log_start(orders: Book) -> None:
    orders.metadata.add_segments([describe(base=base) for base in range(0, 500, 100)])
    assert orders.metadata.delete_segments_before("orders", 0, 0) == 0
    assert orders.metadata.delete_segments_before("orders", 0, 250) == 2
    assert watermark(orders) == (200, 500)
    assert orders.metadata.find_segment_for_offset("orders", 0, 199) is None
    kept = orders.metadata.find_segment_for_offset("orders", 0, 200)
    assert kept is not None
    assert kept.base_offset == 200
    assert orders.metadata.delete_segments_before("orders", 0, 250) == 0
    assert orders.metadata.delete_segments_before("orders", 0, 100) == 0
    assert watermark(orders) == (200, 500)
    assert len(orders.metadata.list_temporary_files()) == 2
    assert orders.verify().ok


def test_an_emptied_partition_goes_on_at_its_watermark(orders: Book) -> None:
    orders.metadata.add_segment(describe(base=0))
    assert orders.metadata.delete_segments_before("orders", 0, 100) == 1
    assert watermark(orders) == (100, 100)
    with pytest.raises(SegmentOverlap):
        orders.metadata.add_segment(describe(base=0))
    orders.metadata.add_segment(describe(base=100))
    assert watermark(orders) == (100, 200)
    assert orders.verify().ok


def test_retention_beyond_the_watermark_is_refused(orders: Book) -> None:
    orders.metadata.add_segment(describe(base=0))
    with pytest.raises(OffsetBeyondWatermark):
        orders.metadata.delete_segments_before("orders", 0, 101)
    assert watermark(orders) == (0, 100)


def test_retention_of_more_than_a_chunk_counts_everything(orders: Book) -> None:
    number = CHUNK + CHUNK // 2
    orders.metadata.add_segments([describe(base=base, count=1) for base in range(number)])
    assert orders.metadata.delete_segments_before("orders", 0, number - 1) == number - 1
    assert watermark(orders) == (number - 1, number)
    assert orders.verify().ok


def test_segments_below_the_log_start_are_invisible_before_they_are_removed(orders: Book) -> None:
    orders.metadata.add_segments([describe(base=base) for base in range(0, 300, 100)])

    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    with failpoints.armed("retention.log_start_moved", stop), pytest.raises(Stopped):
        orders.metadata.delete_segments_before("orders", 0, 200)
    assert orders.metadata.find_segment_for_offset("orders", 0, 150) is None
    assert [segment.base_offset for segment in orders.metadata.get_segments("orders", 0)] == [200]
    assert orders.verify().ok
    assert len(orders.verify().unfinished) == 1
    assert orders.metadata.delete_segments_before("orders", 0, 200) == 2
    assert orders.verify().unfinished == ()


def at(base: int, first: int, last: int) -> object:
    return describe(
        base=base,
        min_timestamp=NOON + timedelta(minutes=first),
        max_timestamp=NOON + timedelta(minutes=last),
    )


def found_at(book: Book, minute: int) -> int | None:
    segment = book.metadata.find_segment_for_timestamp("orders", 0, NOON + timedelta(minutes=minute))
    return None if segment is None else segment.base_offset


def test_a_time_finds_the_first_segment_with_a_record_at_or_after_it(orders: Book) -> None:
    # The second one holds late records: its newest is older than the first one's.
    orders.metadata.add_segments([at(0, 0, 10), at(100, 2, 5), at(200, 8, 20), at(300, 20, 30)])  # type: ignore[list-item]
    found = {minute: found_at(orders, minute) for minute in (-5, 0, 10, 11, 20, 21, 30, 31)}
    assert found == {-5: 0, 0: 0, 10: 0, 11: 200, 20: 200, 21: 300, 30: 300, 31: None}


def test_a_time_is_found_after_a_newer_segment_was_removed(orders: Book) -> None:
    orders.metadata.add_segments([at(0, 0, 100), at(100, 2, 5), at(200, 8, 20)])  # type: ignore[list-item]
    orders.metadata.delete_segments_before("orders", 0, 100)
    assert {minute: found_at(orders, minute) for minute in (3, 6, 20, 50)} == {3: 100, 6: 200, 20: 200, 50: None}


def test_records_without_times_count_as_written_when_they_were_recorded(orders: Book) -> None:
    recorded = orders.metadata.add_segment(describe(base=0))
    assert recorded.max_timestamp == recorded.created_at
    assert recorded.created_at is not None
    before = orders.metadata.find_segment_for_timestamp("orders", 0, recorded.created_at)
    after = orders.metadata.find_segment_for_timestamp("orders", 0, recorded.created_at + timedelta(milliseconds=1))
    assert before == recorded
    assert after is None
