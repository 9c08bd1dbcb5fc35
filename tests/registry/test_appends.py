"""Append turns and producers: nothing lands twice, late, or out of turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from books import Place, describe
from lakebook import Book, SegmentInfo
from lakebook.clock import ManualClock
from lakebook.errors import (
    AppendTurnHeld,
    AppendTurnLost,
    InvalidInput,
    InvalidSegment,
    ProducerFenced,
    SegmentGap,
    SegmentOverlap,
    SequenceConflict,
    TopicNotFound,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def orders(place: Place, clock: ManualClock) -> Book:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders", 2)
    return book


def batch(base: int, first: int, *, epoch: int = 0, producer: str = "p", count: int = 10, **more: Any) -> SegmentInfo:
    return describe(
        base=base,
        count=count,
        producer_id=producer,
        producer_epoch=epoch,
        first_sequence=first,
        last_sequence=first + count - 1,
        **more,
    )


def test_a_turn_goes_on_from_append_to_append(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0, holder="a")
    assert turn.next_offset == 0
    for number in range(5):
        result = orders.metadata.append_segment(turn, describe(base=turn.next_offset))
        assert not result.duplicate
        turn = result.turn
        assert turn.next_offset == (number + 1) * 100
    assert orders.verify().ok


def test_a_turn_that_is_held_cannot_be_taken_before_its_time(orders: Book, clock: ManualClock) -> None:
    orders.metadata.claim_append("orders", 0, holder="a", seconds=10)
    clock.advance(9.9)
    with pytest.raises(AppendTurnHeld) as caught:
        orders.metadata.claim_append("orders", 0, holder="b")
    assert caught.value.transient
    assert orders.metadata.claim_append("orders", 1, holder="b").token == 1
    clock.advance(0.2)
    assert orders.metadata.claim_append("orders", 0, holder="b").token == 2


def test_an_append_renews_the_turn(orders: Book, clock: ManualClock) -> None:
    turn = orders.metadata.claim_append("orders", 0, holder="a")
    clock.advance(29)
    turn = orders.metadata.append_segment(turn, describe(base=0)).turn
    clock.advance(29)
    with pytest.raises(AppendTurnHeld):
        orders.metadata.claim_append("orders", 0, holder="b")
    orders.metadata.append_segment(turn, describe(base=100))


def test_the_former_holder_of_a_turn_cannot_append(orders: Book, clock: ManualClock) -> None:
    lost = orders.metadata.claim_append("orders", 0, holder="a")
    clock.advance(31)
    turn = orders.metadata.claim_append("orders", 0, holder="b")
    with pytest.raises(AppendTurnLost):
        orders.metadata.append_segment(lost, describe(base=0))
    assert orders.metadata.append_segment(turn, describe(base=0)).turn.next_offset == 100
    with pytest.raises(AppendTurnLost):
        orders.metadata.append_segment(lost, describe(base=100))
    assert len(orders.metadata.get_segments("orders", 0)) == 1
    assert orders.verify().ok


def test_a_turn_past_its_time_still_appends_if_nobody_took_it(orders: Book, clock: ManualClock) -> None:
    turn = orders.metadata.claim_append("orders", 0, holder="a", seconds=1)
    clock.advance(3600)
    assert orders.metadata.append_segment(turn, describe(base=0)).turn.next_offset == 100


def test_a_released_turn_can_be_taken_at_once(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0, holder="a")
    assert orders.metadata.release_append(turn)
    other = orders.metadata.claim_append("orders", 0, holder="b")
    assert other.token == turn.token + 1
    assert not orders.metadata.release_append(turn)
    with pytest.raises(AppendTurnLost):
        orders.metadata.append_segment(turn, describe(base=0))
    assert orders.metadata.append_segment(other, describe(base=0)).segments[0].base_offset == 0


def test_claiming_again_fences_what_the_same_holder_had_under_way(orders: Book) -> None:
    first = orders.metadata.claim_append("orders", 0, holder="a")
    second = orders.metadata.claim_append("orders", 0, holder="a")
    with pytest.raises(AppendTurnLost):
        orders.metadata.append_segment(first, describe(base=0))
    orders.metadata.append_segment(second, describe(base=0))


def test_turns_of_several_partitions_are_claimed_together_or_not_at_all(orders: Book) -> None:
    orders.metadata.claim_append("orders", 1, holder="other")
    with pytest.raises(AppendTurnHeld):
        orders.metadata.claim_appends([("orders", 0), ("orders", 1)], holder="a")
    assert orders.metadata.claim_append("orders", 0, holder="b").token == 1
    orders.metadata.create_topic("wide", 5)
    turns = orders.metadata.claim_appends([("wide", number) for number in (3, 1, 4)], holder="a")
    assert [turn.partition_id for turn in turns] == [3, 1, 4]


def test_an_append_asserts_its_base(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    with pytest.raises(SegmentGap):
        orders.metadata.append_segment(turn, describe(base=10))
    # Somebody recorded a segment without a turn: the holder has to stamp again.
    orders.metadata.add_segment(describe(base=0))
    with pytest.raises(SegmentOverlap):
        orders.metadata.append_segment(turn, describe(base=0))
    assert orders.metadata.append_segment(turn, describe(base=100)).turn.next_offset == 200


def test_segments_of_another_partition_are_refused(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    with pytest.raises(InvalidInput):
        orders.metadata.append_segment(turn, describe(partition=1, base=0))
    assert orders.metadata.append_segments(turn, []).segments == ()


def test_a_segment_for_a_deleted_topic_is_refused(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    orders.metadata.delete_topic("orders")
    orders.metadata.create_topic("orders", 2)
    with pytest.raises((TopicNotFound, AppendTurnLost)):
        orders.metadata.append_segment(turn, describe(base=0))
    assert list(orders.metadata.get_segments("orders", 0)) == []
    assert not orders.metadata.release_append(turn)
    assert orders.verify().ok


def test_a_repeated_append_is_reported_as_a_duplicate(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    segment = batch(0, 0, id="one")
    first = orders.metadata.append_segment(turn, segment)
    again = orders.metadata.append_segment(turn, segment)
    assert again.duplicate
    assert again.segments == first.segments
    # The turn that comes with it is the one to go on with.
    assert orders.metadata.append_segment(again.turn, batch(10, 10)).turn.next_offset == 20
    assert len(orders.metadata.get_segments("orders", 0)) == 2


def test_a_repeated_batch_is_found_by_its_sequence_after_it_was_stamped_again(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    first = orders.metadata.append_segment(turn, batch(0, 0))
    other = orders.metadata.append_segment(first.turn, batch(10, 0, producer="q"))
    # The producer does not know that its batch landed, and stamps it for the new watermark.
    again = orders.metadata.append_segment(other.turn, batch(20, 0))
    assert again.duplicate
    assert again.segments[0].base_offset == 0
    assert again.turn.next_offset == 20
    assert orders.metadata.append_segment(again.turn, batch(20, 10)).turn.next_offset == 30
    assert orders.verify().ok


def test_a_repeated_batch_of_several_segments_is_found_whole(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    new = [batch(0, 0), batch(10, 10), batch(20, 20)]
    landed = orders.metadata.append_segments(turn, new)
    again = orders.metadata.append_segments(
        landed.turn,
        [replace(s, s3_key=s.s3_key + "2", base_offset=s.base_offset + 30, end_offset=s.end_offset + 30) for s in new],
    )
    assert again.duplicate
    assert [segment.base_offset for segment in again.segments] == [0, 10, 20]


def test_a_batch_is_known_after_retention_has_taken_it(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    turn = orders.metadata.append_segment(turn, batch(0, 0)).turn
    orders.metadata.delete_segments_before("orders", 0, 10)
    again = orders.metadata.append_segment(turn, batch(10, 0))
    assert again.duplicate
    assert (again.segments[0].base_offset, again.segments[0].end_offset) == (0, 9)
    assert list(orders.metadata.get_segments("orders", 0)) == []


@pytest.mark.parametrize("first", [5, 11, 100])
def test_a_sequence_that_overlaps_or_skips_is_refused(orders: Book, first: int) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    turn = orders.metadata.append_segment(turn, batch(0, 0)).turn
    with pytest.raises(SequenceConflict):
        orders.metadata.append_segment(turn, batch(10, first))
    with pytest.raises(SequenceConflict):
        orders.metadata.append_segment(turn, batch(10, 0, count=5))
    assert len(orders.metadata.get_segments("orders", 0)) == 1


def test_a_producers_first_batch_begins_at_sequence_zero(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    with pytest.raises(SequenceConflict):
        orders.metadata.append_segment(turn, batch(0, 10))


def test_a_newer_epoch_fences_the_older_one_everywhere(orders: Book) -> None:
    assert orders.metadata.register_producer("p") == 0
    turn = orders.metadata.claim_append("orders", 0)
    turn = orders.metadata.append_segment(turn, batch(0, 0, epoch=0)).turn
    assert orders.metadata.register_producer("p") == 1
    with pytest.raises(ProducerFenced):
        orders.metadata.append_segment(turn, batch(10, 10, epoch=0))
    other = orders.metadata.claim_append("orders", 1)
    with pytest.raises(ProducerFenced):
        orders.metadata.append_segment(other, replace(batch(0, 0, epoch=0), partition_id=1))
    assert orders.metadata.append_segment(turn, batch(10, 0, epoch=1)).turn.next_offset == 20


def test_an_epoch_that_was_not_registered_counts_from_when_it_is_seen(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    turn = orders.metadata.append_segment(turn, batch(0, 0, epoch=3)).turn
    with pytest.raises(ProducerFenced):
        orders.metadata.append_segment(turn, batch(10, 0, epoch=2))
    assert orders.metadata.register_producer("p") == 4


def test_a_producers_fields_go_together(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    with pytest.raises(InvalidSegment):
        orders.metadata.append_segment(turn, describe(base=0, producer_id="p"))
    with pytest.raises(InvalidSegment):
        orders.metadata.append_segment(turn, replace(batch(0, 0), last_sequence=50))


def test_no_commit_stays_open_when_turns_are_given_back(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    turn = orders.metadata.append_segment(turn, describe(base=0)).turn
    assert orders.measure().values()["lakebook_open_commits"] == 1
    orders.metadata.release_append(turn)
    assert orders.measure().values()["lakebook_open_commits"] == 0


def test_a_repeated_append_without_an_id_is_found_by_its_turn(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    segment = describe(base=0)
    first = orders.metadata.append_segment(turn, segment)
    again = orders.metadata.append_segment(turn, segment)
    assert again.duplicate
    assert again.segments == first.segments
    assert orders.metadata.append_segment(again.turn, describe(base=100)).turn.next_offset == 200
    # Another segment under a turn that was used is no repetition.
    with pytest.raises(AppendTurnLost):
        orders.metadata.append_segment(turn, describe(base=0))
    with pytest.raises(AppendTurnLost):
        orders.metadata.append_segment(turn, describe(base=200))
    assert len(orders.metadata.get_segments("orders", 0)) == 2


def test_a_repeated_append_is_never_called_lost_because_retention_was_faster(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    segment = describe(base=0)
    orders.metadata.append_segment(turn, segment)
    orders.metadata.delete_segments_before("orders", 0, 100)
    assert orders.metadata.append_segment(turn, segment).duplicate
    assert list(orders.metadata.get_segments("orders", 0)) == []


def test_a_repeated_batch_of_several_segments_is_known_after_retention(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    new = [batch(0, 0), batch(10, 10), batch(20, 20)]
    turn = orders.metadata.append_segments(turn, new).turn
    for before in (10, 30):
        orders.metadata.delete_segments_before("orders", 0, before)
        again = orders.metadata.append_segments(turn, [batch(30, 0), batch(40, 10), batch(50, 20)])
        assert again.duplicate
        assert [(s.base_offset, s.end_offset) for s in again.segments] == [(0, 9), (10, 19), (20, 29)]
    with pytest.raises(SequenceConflict):
        orders.metadata.append_segments(turn, [batch(30, 20), batch(40, 30)])
    assert orders.metadata.append_segment(turn, batch(30, 30)).turn.next_offset == 40


def test_an_append_is_of_one_producer_and_one_epoch(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    for other in (batch(10, 0, epoch=1), batch(10, 0, producer="q"), describe(base=10)):
        with pytest.raises(InvalidSegment):
            orders.metadata.append_segments(turn, [batch(0, 0), other])
    assert list(orders.metadata.get_segments("orders", 0)) == []


def test_a_producers_batch_needs_a_turn(orders: Book) -> None:
    with pytest.raises(InvalidSegment):
        orders.metadata.add_segment(batch(0, 0))


def test_a_producer_that_has_had_every_epoch_gets_no_more(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    orders.metadata.append_segment(turn, batch(0, 0, epoch=2**31 - 1))
    with pytest.raises(ProducerFenced):
        orders.metadata.register_producer("p")


def test_another_segment_under_a_used_turn_is_not_called_landed_after_retention(
    orders: Book, clock: ManualClock
) -> None:
    # The answer to the first append is lost; meanwhile the turn passes on and retention moves past it.
    turn = orders.metadata.claim_append("orders", 0, holder="a")
    first = describe(base=0)
    orders.metadata.append_segment(turn, first)
    clock.advance(60)
    orders.metadata.release_append(orders.metadata.claim_append("orders", 0, holder="b"))
    orders.metadata.delete_segments_before("orders", 0, 100)
    again = orders.metadata.append_segment(turn, first)
    assert again.duplicate
    assert again.turn.next_offset == 100
    for base in (0, again.turn.next_offset):
        with pytest.raises(AppendTurnLost):
            orders.metadata.append_segment(turn, describe(base=base))
        with pytest.raises(AppendTurnLost):
            orders.metadata.append_segment(again.turn, describe(base=base))
    assert list(orders.metadata.get_segments("orders", 0)) == []


def test_an_append_renews_a_turn_for_as_long_as_it_was_claimed(orders: Book, clock: ManualClock) -> None:
    turn = orders.metadata.claim_append("orders", 0, holder="a", seconds=3600)
    turn = orders.metadata.append_segment(turn, describe(base=0)).turn
    clock.advance(3599)
    with pytest.raises(AppendTurnHeld):
        orders.metadata.claim_append("orders", 0, holder="b")
    assert orders.metadata.append_segment(turn, describe(base=100)).turn.next_offset == 200
