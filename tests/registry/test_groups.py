"""Consumer groups: offsets move forward, resets are recorded, lag is never a phantom."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from books import describe
from lakebook import Book, GroupState, OffsetCommit
from lakebook.errors import (
    GenerationFenced,
    GroupNotFound,
    OffsetBelowLogStart,
    OffsetBeyondWatermark,
    OffsetRegression,
    PartitionNotFound,
    TopicNotFound,
)


@pytest.fixture
def orders(book: Book) -> Book:
    book.metadata.create_topic("orders", 2)
    book.metadata.add_segments([describe(base=base) for base in range(0, 500, 100)])
    book.metadata.add_segment(describe(partition=1))
    return book


def test_a_consumer_resumes_where_it_committed(orders: Book) -> None:
    assert orders.metadata.get_committed_offset("analytics", "orders", 0) is None
    orders.metadata.commit_offset("analytics", "orders", 0, 100, "up to order 99")
    assert orders.metadata.get_committed_offset("analytics", "orders", 0) == 100
    orders.metadata.commit_offset("analytics", "orders", 0, 200)
    assert orders.metadata.get_committed_offset("analytics", "orders", 0) == 200
    (offset,) = orders.metadata.get_consumer_offsets("analytics")
    assert (offset.group_id, offset.topic, offset.partition_id, offset.committed_offset, offset.metadata) == (
        "analytics",
        "orders",
        0,
        200,
        None,
    )


def test_offsets_of_groups_do_not_touch_each_other(orders: Book) -> None:
    orders.metadata.commit_offset("one", "orders", 0, 100)
    orders.metadata.commit_offset("two", "orders", 0, 300)
    orders.metadata.commit_offset("one", "orders", 1, 50)
    assert orders.metadata.get_committed_offsets("one", [("orders", 0), ("orders", 1)]) == {
        ("orders", 0): 100,
        ("orders", 1): 50,
    }
    assert orders.metadata.get_committed_offset("two", "orders", 0) == 300
    assert orders.metadata.get_committed_offsets("two", [("orders", 1)]) == {("orders", 1): None}
    assert orders.metadata.get_committed_offsets("nobody", [("orders", 1)]) == {("orders", 1): None}
    with pytest.raises(PartitionNotFound):
        orders.metadata.get_committed_offsets("two", [("orders", 0), ("orders", 5)])


def test_an_offset_above_the_watermark_is_refused(orders: Book) -> None:
    orders.metadata.commit_offset("g", "orders", 0, 500)
    for offset in (501, 2**63 - 1):
        with pytest.raises(OffsetBeyondWatermark):
            orders.metadata.commit_offset("g", "orders", 0, offset)
    assert orders.metadata.get_committed_offset("g", "orders", 0) == 500


def test_a_commit_on_an_empty_partition_can_only_be_zero(book: Book) -> None:
    book.metadata.create_topic("empty")
    with pytest.raises(OffsetBeyondWatermark):
        book.metadata.commit_offset("g", "empty", 0, 100)
    book.metadata.commit_offset("g", "empty", 0, 0)


def test_an_offset_never_moves_backwards_by_a_commit(orders: Book) -> None:
    orders.metadata.commit_offset("g", "orders", 0, 200)
    with pytest.raises(OffsetRegression):
        orders.metadata.commit_offset("g", "orders", 0, 199)
    assert orders.metadata.get_committed_offset("g", "orders", 0) == 200


def test_a_repeated_commit_is_no_change(orders: Book) -> None:
    orders.metadata.commit_offset("g", "orders", 0, 200, "x")
    cursor = orders.events.now()
    orders.metadata.commit_offset("g", "orders", 0, 200, "x")
    assert orders.events.read(cursor).events == ()
    orders.metadata.commit_offset("g", "orders", 0, 200, "y")
    assert len(orders.events.read(cursor).events) == 1


def test_commits_of_a_batch_land_together_or_not_at_all(orders: Book) -> None:
    commits = [OffsetCommit("orders", 0, 100), OffsetCommit("orders", 1, 50)]
    assert [c.offset for c in orders.metadata.commit_offsets("g", commits)] == [100, 50]
    with pytest.raises(OffsetBeyondWatermark):
        orders.metadata.commit_offsets("g", [OffsetCommit("orders", 0, 200), OffsetCommit("orders", 1, 999)])
    assert orders.metadata.get_committed_offset("g", "orders", 0) == 100
    with pytest.raises(PartitionNotFound):
        orders.metadata.commit_offsets("g", [OffsetCommit("orders", 0, 200), OffsetCommit("orders", 7, 0)])
    assert orders.metadata.get_committed_offset("g", "orders", 0) == 100


def test_a_failed_first_commit_creates_no_group(orders: Book) -> None:
    with pytest.raises(OffsetBeyondWatermark):
        orders.metadata.commit_offset("new", "orders", 0, 999)
    with pytest.raises(GroupNotFound):
        orders.metadata.get_consumer_offsets("new")


def test_a_commit_below_the_log_start_is_accepted_and_said_to_be_behind(orders: Book) -> None:
    assert not orders.metadata.commit_offset("g", "orders", 0, 50).behind
    orders.metadata.delete_segments_before("orders", 0, 300)
    assert orders.metadata.commit_offset("g", "orders", 0, 120).behind
    assert not orders.metadata.commit_offset("g", "orders", 0, 300).behind
    with pytest.raises(OffsetRegression):
        orders.metadata.commit_offset("g", "orders", 0, 120)


def test_lag_counts_only_records_that_are_there(orders: Book) -> None:
    orders.metadata.commit_offset("g", "orders", 0, 50)
    first, second = orders.metadata.lag("g")
    assert (first.committed_offset, first.lag, first.behind) == (50, 450, False)
    assert (second.committed_offset, second.lag, second.behind) == (None, 100, False)
    orders.metadata.delete_segments_before("orders", 0, 400)
    first, _ = orders.metadata.lag("g", "orders")
    assert (first.lag, first.behind) == (100, True)
    orders.metadata.delete_segments_before("orders", 0, 500)
    first, _ = orders.metadata.lag("g")
    assert (first.lag, first.behind) == (0, True)


def test_lag_on_what_is_not_there_is_an_error(orders: Book) -> None:
    orders.metadata.ensure_consumer_group("g")
    assert orders.metadata.lag("g") == []
    assert [entry.lag for entry in orders.metadata.lag("g", "orders")] == [500, 100]
    with pytest.raises(GroupNotFound):
        orders.metadata.lag("nobody")
    with pytest.raises(TopicNotFound):
        orders.metadata.lag("g", "nowhere")


def test_groups_are_listed_with_their_state(orders: Book) -> None:
    orders.metadata.ensure_consumer_group("a-empty")
    orders.metadata.commit_offset("b-current", "orders", 0, 500)
    orders.metadata.commit_offset("c-lagging", "orders", 0, 450)
    orders.metadata.commit_offset("d-behind", "orders", 0, 10)
    orders.metadata.delete_segments_before("orders", 0, 100)
    groups = orders.metadata.list_consumer_groups()
    assert [(group.group_id, group.state, group.lag) for group in groups] == [
        ("a-empty", GroupState.EMPTY, 0),
        ("b-current", GroupState.CURRENT, 0),
        ("c-lagging", GroupState.LAGGING, 50),
        ("d-behind", GroupState.BEHIND, 400),
    ]
    page = orders.metadata.list_consumer_groups(limit=3)
    assert [group.group_id for group in orders.metadata.list_consumer_groups(after=page.next)] == ["d-behind"]


def test_offsets_of_a_group_come_in_pages(book: Book) -> None:
    for topic in ("a", "b"):
        book.metadata.create_topic(topic, 3)
        book.metadata.commit_offsets("g", [OffsetCommit(topic, number, 0) for number in range(3)])
    page = book.metadata.get_consumer_offsets("g", limit=4)
    assert [(o.topic, o.partition_id) for o in page] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    rest = book.metadata.get_consumer_offsets("g", after=page.next)
    assert [(o.topic, o.partition_id) for o in rest] == [("b", 1), ("b", 2)]


def test_a_reset_goes_anywhere_between_log_start_and_watermark(orders: Book) -> None:
    orders.metadata.commit_offset("g", "orders", 0, 450)
    orders.metadata.delete_segments_before("orders", 0, 200)
    (reset,) = orders.metadata.reset_offset("g", "orders", 0, "earliest", reason="replay")
    assert (reset.from_offset, reset.to_offset, reset.reason) == (450, 200, "replay")
    assert orders.metadata.get_committed_offset("g", "orders", 0) == 200
    assert orders.metadata.reset_offset("g", "orders", 0, "latest")[0].to_offset == 500
    assert orders.metadata.reset_offset("g", "orders", 0, 321)[0].to_offset == 321
    with pytest.raises(OffsetBeyondWatermark):
        orders.metadata.reset_offset("g", "orders", 0, 501)
    with pytest.raises(OffsetBelowLogStart):
        orders.metadata.reset_offset("g", "orders", 0, 199)
    assert orders.metadata.get_committed_offset("g", "orders", 0) == 321
    assert orders.verify().ok


def test_a_reset_of_a_whole_topic_covers_every_partition(orders: Book) -> None:
    orders.metadata.commit_offset("g", "orders", 0, 450)
    resets = orders.metadata.reset_offset("g", "orders", to="latest")
    assert [(reset.partition_id, reset.from_offset, reset.to_offset) for reset in resets] == [
        (0, 450, 500),
        (1, None, 100),
    ]


def test_a_reset_to_a_time_leaves_nothing_newer_out(book: Book) -> None:
    noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
    book.metadata.create_topic("timed")
    for hour in range(3):
        start = noon + timedelta(hours=hour)
        book.metadata.add_segment(
            describe("timed", base=hour * 100, min_timestamp=start, max_timestamp=start + timedelta(minutes=59))
        )
    book.metadata.commit_offset("g", "timed", 0, 300)
    assert book.metadata.reset_offset("g", "timed", 0, noon + timedelta(minutes=70))[0].to_offset == 100
    assert book.metadata.reset_offset("g", "timed", 0, noon - timedelta(days=1))[0].to_offset == 0
    assert book.metadata.reset_offset("g", "timed", 0, noon + timedelta(days=1))[0].to_offset == 300
    assert book.verify().ok


def test_a_reset_of_an_unknown_group_is_an_error(orders: Book) -> None:
    with pytest.raises(GroupNotFound):
        orders.metadata.reset_offset("nobody", "orders", 0, "earliest")
    orders.metadata.ensure_consumer_group("g")
    with pytest.raises(TopicNotFound):
        orders.metadata.reset_offset("g", "nowhere", 0, "earliest")
    with pytest.raises(PartitionNotFound):
        orders.metadata.reset_offset("g", "orders", 9, "earliest")


def test_a_deleted_group_is_gone_and_a_new_one_inherits_nothing(orders: Book) -> None:
    orders.metadata.commit_offset("g", "orders", 0, 100)
    orders.metadata.delete_consumer_group("g")
    with pytest.raises(GroupNotFound):
        orders.metadata.delete_consumer_group("g")
    assert orders.metadata.get_committed_offset("g", "orders", 0) is None
    orders.metadata.ensure_consumer_group("g")
    orders.metadata.ensure_consumer_group("g")
    assert list(orders.metadata.get_consumer_offsets("g")) == []
    orders.metadata.commit_offset("g", "orders", 0, 50)
    assert orders.verify().ok


def test_a_commit_carries_the_generation_of_a_group_with_members(orders: Book) -> None:
    orders.metadata.commit_offset("g", "orders", 0, 10)
    assert orders.metadata.begin_generation("g") == 1
    with pytest.raises(GenerationFenced):
        orders.metadata.commit_offset("g", "orders", 0, 20)
    orders.metadata.commit_offset("g", "orders", 0, 20, generation=1)
    assert orders.metadata.begin_generation("g") == 2
    with pytest.raises(GenerationFenced):
        orders.metadata.commit_offset("g", "orders", 0, 30, generation=1)
    with pytest.raises(GenerationFenced):
        orders.metadata.commit_offset("g", "orders", 0, 30, generation=3)
    assert orders.metadata.get_committed_offset("g", "orders", 0) == 20
