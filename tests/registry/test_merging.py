"""Small segments become large ones in the background; the log stays what it was, and so do its readers."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import log2
from typing import Any

import pytest

from books import MEMORY, POSTGRESQL, Place, describe
from lake import objects, own_warehouse, records, replace_bytes  # noqa: F401
from lakebook import Book, SegmentInfo, failpoints
from lakebook.clock import ManualClock, to_datetime
from lakebook.components.janitor import Janitor
from lakebook.errors import MergeConflict
from lakebook.registry import schema
from lakebook.streams.merging import MOST_SEGMENTS, Merger, Rule, merge, merge_topic, worth_merging
from segment_logs import log_of, values_of
from streaming import produce

GRACE = 100.0
# A little more than the setting: times of commits are apart though the clock stands.
QUIET = 61.0
LEASE = 60.0


@pytest.fixture(params=[MEMORY, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place]) -> Place:
    """Both databases; where the bytes lie makes no difference here."""
    return make_place(request.param)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def orders(place: Place, clock: ManualClock) -> Book:
    book = place.open(clock=clock, temporary_file_grace=GRACE, sweep_grace=GRACE, lease_seconds=LEASE, merge_segments=4)
    book.metadata.create_topic("orders", 2)
    return book


def fill(book: Book, segments: int, number: int = 0, topic: str = "orders", first: int = 0) -> None:
    for place in range(segments):
        produce(book, topic, number, *(f"{first + place}.{n}" for n in range(3)))


def bases(book: Book, number: int = 0, topic: str = "orders") -> list[tuple[int, int]]:
    return [(item.base_offset, item.end_offset) for item in book.metadata.each_segment(topic, number)]


def run(book: Book, topic: str = "orders") -> Any:
    return merge_topic(book.lake, book.metadata, topic)


# --- the log stays what it was -------------------------------------------------


def test_small_segments_become_one_with_the_same_records_at_the_same_offsets(orders: Book, clock: ManualClock) -> None:
    fill(orders, 5)
    fill(orders, 2, number=1)
    before = log_of(orders)
    clock.advance(QUIET)
    done = run(orders)
    assert (done.replaced, done.into) == ({"orders": 5}, {"orders": 1})
    assert bases(orders) == [(0, 14)]
    # Two are too few.
    assert len(bases(orders, 1)) == 2
    assert log_of(orders) == before
    assert [offset for offset, _ in before] == list(range(15))
    (merged,) = orders.metadata.each_segment("orders", 0)
    assert merged.producer_id is None
    assert "/m-" in merged.s3_key
    for offset in (0, 7, 14):
        found = orders.metadata.find_segment_for_offset("orders", 0, offset)
        assert found is not None and found.id == merged.id
    assert orders.verify().ok


def test_appends_go_on_behind_a_merge(orders: Book, clock: ManualClock) -> None:
    fill(orders, 4)
    clock.advance(QUIET)
    run(orders)
    fill(orders, 3, first=4)
    assert bases(orders) == [(0, 11), (12, 14), (15, 17), (18, 20)]
    assert [offset for offset, _ in log_of(orders)] == list(range(21))
    assert orders.verify().ok


def test_segments_that_are_young_or_few_or_large_or_without_a_file_stay(orders: Book, clock: ManualClock) -> None:
    fill(orders, 4)
    assert run(orders).segments == 0
    clock.advance(QUIET)
    fill(orders, 1)
    assert run(orders).segments == 4
    orders.metadata.create_topic("by-hand")
    orders.metadata.add_segments([describe("by-hand", base=base * 100) for base in range(10)])
    orders.metadata.create_topic("off", config={"segment.merge": "false"})
    fill(orders, 10, topic="off")
    clock.advance(QUIET)
    assert run(orders, "by-hand").segments == run(orders, "off").segments == 0
    assert len(bases(orders, topic="off")) == len(bases(orders, topic="by-hand")) == 10
    assert not run(orders, "by-hand").failed


def test_a_topic_that_is_gone_meanwhile_is_left_alone(orders: Book, clock: ManualClock) -> None:
    fill(orders, 5)
    clock.advance(QUIET)
    topic = orders.metadata.get_topic("orders")
    assert topic is not None
    with failpoints.armed("merge.written", lambda: orders.metadata.delete_topic("orders")):
        done = Merger(orders.lake).run_topic(orders.metadata, topic)
    assert (done.segments, done.failed) == (0, [])
    orders.metadata.create_topic("orders")
    assert Merger(orders.lake).run_topic(orders.metadata, topic).segments == 0


# --- readers -------------------------------------------------------------------


def test_a_reader_with_a_lease_keeps_the_files_that_it_has_planned(orders: Book, clock: ManualClock) -> None:
    fill(orders, 5)
    before = log_of(orders)
    lease_id, topic_id = orders.metadata.pin_topic("orders", {0: 0})
    planned = orders.metadata.list_segments_in(topic_id, 0, 0, 15)
    clock.advance(QUIET)
    run(orders)
    janitor = Janitor(orders.lake)
    for _ in range(6):
        clock.advance(GRACE)
        orders.metadata.renew_pins([lease_id])
        janitor.run_once()
    assert values_of(orders, planned) == before
    # Who looks now finds the new one.
    assert len(orders.metadata.list_segments_in(topic_id, 0, 0, 15)) == 1
    orders.metadata.unpin(lease_id)
    for _ in range(4):
        clock.advance(GRACE)
        janitor.run_once()
    assert objects(orders) == [segment.s3_key for segment in orders.metadata.each_segment("orders", 0)]
    assert records(orders, schema.retired_segments) == []
    assert log_of(orders) == before
    assert orders.verify().ok


def test_a_lease_that_is_younger_than_the_merge_does_not_keep_what_was_merged(orders: Book, clock: ManualClock) -> None:
    fill(orders, 5)
    clock.advance(QUIET)
    run(orders)
    lease_id, topic_id = orders.metadata.pin_topic("orders", {0: 0})
    planned = orders.metadata.list_segments_in(topic_id, 0, 0, 15)
    janitor = Janitor(orders.lake)
    for _ in range(4):
        clock.advance(GRACE)
        orders.metadata.renew_pins([lease_id])
        janitor.run_once()
    assert objects(orders) == [planned[0].s3_key]
    assert len(values_of(orders, planned)) == 15


# --- races and failures --------------------------------------------------------


def test_a_merge_that_meets_retention_loses_only_its_work(orders: Book, clock: ManualClock) -> None:
    fill(orders, 6)
    clock.advance(QUIET)

    def remove() -> None:
        orders.metadata.delete_segments_before("orders", 0, 3)

    with failpoints.armed("merge.written", remove):
        done = run(orders)
    assert (done.segments, done.conflicts, done.failed) == (0, 1, [])
    assert bases(orders) == [(base, base + 2) for base in range(3, 18, 3)]
    assert not [path for path in objects(orders) if "/m-" in path]
    assert run(orders).segments == 5
    assert orders.verify().ok


def test_of_two_merges_of_the_same_segments_one_wins(orders: Book, clock: ManualClock) -> None:
    fill(orders, 6)
    before = log_of(orders)
    clock.advance(QUIET)
    others: list[int] = []

    def first() -> None:
        if not others:
            others.append(0)
            others[0] = run(orders).segments

    with failpoints.armed("merge.written", first):
        done = run(orders)
    assert (others, done.segments, done.conflicts) == ([6], 0, 1)
    assert len([path for path in objects(orders) if "/m-" in path]) == 1
    assert log_of(orders) == before
    assert orders.verify().ok


def test_a_damaged_segment_is_told_of_and_nothing_is_replaced(orders: Book, clock: ManualClock) -> None:
    fill(orders, 5)
    clock.advance(QUIET)
    segments = list(orders.metadata.each_segment("orders", 0))
    swapped = orders.lake.store.read(segments[2].s3_key)
    replace_bytes(orders, segments[3].s3_key, lambda _: swapped)
    done = run(orders)
    assert done.segments == 0
    assert len(done.failed) == 1
    assert len(bases(orders)) == 5
    assert not [path for path in objects(orders) if "/m-" in path]


def test_a_merge_that_was_fenced_while_it_stood_still_changes_nothing(orders: Book, clock: ManualClock) -> None:
    fill(orders, 5)
    clock.advance(QUIET)

    def freeze() -> None:
        clock.advance(orders.settings.insert_alive + 1)
        assert orders.metadata.settle_stream_folders() == 1

    with failpoints.armed("merge.written", freeze):
        done = run(orders)
    assert (done.segments, done.conflicts) == (0, 1)
    assert len(bases(orders)) == 5
    assert orders.verify().ok


def test_a_segment_that_is_gone_is_a_conflict_by_itself(orders: Book, clock: ManualClock) -> None:
    fill(orders, 5)
    topic = orders.metadata.get_topic("orders")
    assert topic is not None
    old = list(orders.metadata.each_segment("orders", 0))
    merge(orders.lake, orders.metadata, topic, 0, old[:4])
    with pytest.raises(MergeConflict):
        merge(orders.lake, orders.metadata, topic, 0, old)


# --- rounds --------------------------------------------------------------------


def test_a_round_that_was_stopped_goes_on_with_the_next_topic(orders: Book, clock: ManualClock) -> None:
    for topic in ("a", "b"):
        orders.metadata.create_topic(topic)
        fill(orders, 4, topic=topic)
    clock.advance(QUIET)
    merger = Merger(orders.lake)
    for topic in ("a", "b"):
        assert merger.run(orders.metadata, lambda: True).replaced == {topic: 4}
    assert merger.run(orders.metadata, lambda: True).replaced == {}


def test_what_was_merged_is_merged_again_when_there_is_enough_of_it(orders: Book, clock: ManualClock) -> None:
    merger = Merger(orders.lake)
    for number in range(4):
        fill(orders, 4, first=number * 4)
        clock.advance(QUIET)
        assert merger.run(orders.metadata).segments >= 4
    clock.advance(QUIET)
    merger.run(orders.metadata)
    assert bases(orders) == [(0, 47)]
    clock.advance(QUIET)
    assert merger.run(orders.metadata).segments == 0
    assert [offset for offset, _ in log_of(orders)] == list(range(48))


def test_a_partition_that_has_not_changed_is_not_looked_at_again(
    orders: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(orders, 5)
    clock.advance(QUIET)
    merger = Merger(orders.lake)
    for _ in range(2):
        merger.run(orders.metadata)
        clock.advance(QUIET)
    merger.run(orders.metadata)
    monkeypatch.setattr(merger, "_pages", lambda *_: pytest.fail("it was looked at"))
    assert merger.run(orders.metadata).segments == 0


def test_the_janitor_merges_and_writes_down_what_of_which_topic(orders: Book, clock: ManualClock) -> None:
    fill(orders, 5)
    clock.advance(QUIET)
    janitor = Janitor(orders.lake)
    done = janitor.run_once("merging")["merging"]
    assert (done["segments"], done["into"]) == (5, 1)
    (entry,) = orders.maintenance_history(component="janitor")
    assert entry.action == "merging"
    assert entry.detail["topics"] == {"orders": {"segments": 5, "into": 1}}
    orders.pause("janitor", reason="a test")
    assert janitor.run_once("merging") == {"merging": {"paused": "a test"}}


# --- how much is rewritten -----------------------------------------------------


def sized(size: int, base: int, at: int = 0) -> SegmentInfo:
    moment = to_datetime(at)
    return SegmentInfo("t", 0, base, base, 1, size, f"p{base}", min_timestamp=moment, max_timestamp=moment)


def settle(log: list[int], rule: Rule) -> int:
    """Merge a log of sizes until nothing is worth it; how many bytes were written."""
    written = 0
    while True:
        runs: list[list[SegmentInfo]] = [[]]
        for place, size in enumerate(log):
            segment = sized(size, place)
            runs[-1].append(segment) if rule.is_small(segment) else runs.append([])
        parts = [list(part) for some in runs for part in worth_merging(some, rule)]
        if not parts:
            return written
        for part in reversed(parts):
            size = sum(item.size_bytes for item in part)
            log[part[0].base_offset : part[-1].base_offset + 1] = [size]
            written += size


@pytest.mark.parametrize("least", [2, 4, 10])
def test_each_byte_is_rewritten_a_few_times_however_long_a_topic_is_fed(least: int) -> None:
    rule = Rule(least, 4096)
    for number in (100, 1000, 4000):
        log: list[int] = []
        written = most = 0
        for _ in range(number):
            log.append(1)
            written += settle(log, rule)
            most = max(most, len(log))
        assert sum(log) == number
        assert written <= number * log2(number)
        assert most <= 2 * least * (log2(number) + 1)


def test_segments_of_any_sizes_are_merged_with_little_work_into_few() -> None:
    chance = random.Random(7)
    rule = Rule(10, 100_000)
    log: list[int] = []
    written = 0
    for _ in range(3000):
        log.append(chance.choice([1, 10, 100, 1000]) * chance.randrange(1, 10))
        written += settle(log, rule)
    assert written <= sum(log) * log2(rule.target)
    assert all(size <= rule.target for size in log)
    assert len(log) <= sum(log) / rule.target * 20 + 100


def test_a_merge_has_bounds_in_segments_bytes_and_the_time_that_it_spans() -> None:
    tiny = [sized(1, base) for base in range(MOST_SEGMENTS * 2 + 5)]
    assert [len(part) for part in worth_merging(tiny, Rule(10, 10**9))] == [MOST_SEGMENTS, MOST_SEGMENTS]
    assert [len(part) for part in worth_merging(tiny[:100], Rule(10, 30))] == [30, 30, 30, 10]
    hourly = [sized(1, base, at=base * 1000) for base in range(40)]
    assert [len(part) for part in worth_merging(hourly, Rule(10, 10**9, span=14_000))] == [15, 15, 10]
    # One that is larger than all the others stays as it is.
    assert [len(part) for part in worth_merging([sized(50, 0), *tiny[:20]], Rule(10, 10**9))] == [20]


def test_merged_segments_span_a_small_part_of_what_a_topic_keeps(orders: Book) -> None:
    metadata = orders.metadata
    topic = metadata.create_topic("kept", config={"retention.bytes": "1000"}, retention_ms=5000)
    assert Rule.of(orders.lake, topic) == Rule(4, 100, 500)
    assert Rule.of(orders.lake, metadata.create_topic("all")) == Rule(4, orders.settings.merge_target, None)
