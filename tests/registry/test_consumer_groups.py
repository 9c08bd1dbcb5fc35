"""Consumers of a group: each partition has one reader, who goes on where the group has committed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from books import Place
from lake import in_memory, own_warehouse  # noqa: F401
from lakebook import Book
from lakebook.clock import ManualClock
from lakebook.errors import (
    GenerationFenced,
    GroupInUse,
    InvalidInput,
    MemberRemoved,
    OffsetBelowLogStart,
    OffsetRegression,
    TopicNotFound,
)
from lakebook.streams.consumer import AUTO_COMMIT, Consumer
from lakebook.streams.positions import Skipped, TopicPartition
from streaming import PATIENCE, in_thread, produce, read, threads_of_consumers, values

# Long enough for nobody to be removed while a test runs, and short enough for changes to be heard of soon.
SESSION = 1.5
ALL = [("orders", number) for number in range(4)]


@pytest.fixture
def orders(place: Place) -> Book:
    book = place.open(group_session=SESSION)
    book.metadata.create_topic("orders", 4)
    return book


def committed(book: Book, partition: int = 0) -> int | None:
    return book.metadata.get_committed_offset("g", "orders", partition)


def poll_until(condition: Callable[[], bool], *consumers: Consumer) -> None:
    """Let consumers poll in turn until something has come about."""
    deadline = threading.Event()
    timer = threading.Timer(PATIENCE, deadline.set)
    timer.start()
    try:
        while not condition():
            assert not deadline.is_set()
            for consumer in consumers:
                consumer.poll(0.01)
    finally:
        timer.cancel()


def shared(*consumers: Consumer, number: int = 4) -> Callable[[], bool]:
    """Whether all partitions are read, by all of the consumers."""

    def is_shared() -> bool:
        assigned = [consumer.assignment() for consumer in consumers]
        return all(assigned) and sum(map(len, assigned)) == number

    return is_shared


# --- committing ------------------------------------------------------------------


def test_a_group_goes_on_where_it_has_committed(orders: Book) -> None:
    produce(orders, "orders", 0, *range(10))
    with orders.consumer("orders", "g", auto_commit=False) as consumer:
        assert values(read(consumer, 4)) == ["0", "1", "2", "3"]
        consumer.commit()
        assert len(read(consumer, 3)) == 3
        assert consumer.committed() == {("orders", 0): 4, **dict.fromkeys(ALL[1:], 0)}
    with orders.consumer("orders", "g") as consumer:
        assert values(read(consumer, 6)) == [str(n) for n in range(4, 10)]
    assert committed(orders) == 10
    with orders.consumer("orders", "other") as consumer:
        assert len(read(consumer, 10)) == 10


@in_memory
def test_a_loop_commits_what_it_is_done_with(orders: Book) -> None:
    produce(orders, "orders", 0, *range(10))
    with orders.consumer("orders", "g", auto_commit=0) as consumer:
        for record in consumer.until_end():
            # Nothing was committed before the first came; each is when the next one is asked for.
            assert committed(orders) == record.offset
    assert committed(orders) == 10


@in_memory
def test_who_is_interrupted_reads_again_what_it_was_not_done_with(orders: Book) -> None:
    produce(orders, "orders", 0, *range(10))

    def fail_after_two_polls(consumer: Consumer) -> None:
        assert len(consumer.poll(PATIENCE, max_records=3)) == 3
        assert len(consumer.poll(PATIENCE, max_records=3)) == 3
        raise ZeroDivisionError

    def fail_at_the_seventh(consumer: Consumer) -> None:
        for record in consumer:
            if record.offset == 7:
                raise ZeroDivisionError

    for action, expected in ((fail_after_two_polls, 3), (fail_at_the_seventh, 7)):
        with pytest.raises(ZeroDivisionError), orders.consumer("orders", "g") as consumer:
            action(consumer)
        assert committed(orders) == expected


@in_memory
def test_positions_are_committed_when_it_is_time(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock)
    book.metadata.create_topic("orders", 4)
    produce(book, "orders", 0, *range(10))
    with book.consumer("orders", "g", max_records=5) as consumer:
        assert len(consumer.poll(PATIENCE)) == 5
        clock.advance(AUTO_COMMIT - 0.1)
        assert len(consumer.poll(PATIENCE)) == 5
        assert committed(book) == 0
        clock.advance(0.1)
        # What was handed out before this poll is done with.
        assert consumer.poll(0) == []
        assert committed(book) == 10


def test_given_offsets_are_committed_and_only_forward(orders: Book) -> None:
    produce(orders, "orders", 0, *range(10))
    with orders.consumer("orders", "g") as consumer:
        assert len(read(consumer, 10)) == 10
        consumer.commit({("orders", 0): 6})
        assert committed(orders) == 6
        with pytest.raises(OffsetRegression):
            consumer.commit({("orders", 0): 5})
        with pytest.raises(InvalidInput):
            consumer.commit({("orders", 9): 5})
        consumer.seek("orders", 0, 2)
        assert len(read(consumer, 3)) == 3
    # Going back is the reader's own affair: the group stays where it was.
    assert committed(orders) == 6


@in_memory
def test_named_partitions_are_read_for_a_group_without_joining_it(orders: Book) -> None:
    produce(orders, "orders", 0, *range(4))
    produce(orders, "orders", 1, "other")
    for expected in (["0", "1", "2", "3"], []):
        with orders.consumer("orders", "g", partitions=[0]) as consumer:
            assert values(consumer.until_end()) == expected
        assert orders.metadata.group_members("g") == []
    assert (committed(orders, 0), committed(orders, 1)) == (4, None)


# --- where a group begins --------------------------------------------------------


def test_where_a_group_began_is_remembered(orders: Book) -> None:
    """Else what came before its first commit would be left out by the next one that begins at the end."""
    produce(orders, "orders", 0, "old")
    with orders.consumer("orders", "g", start="latest", auto_commit=False) as consumer:
        assert consumer.poll(0) == []
        assert committed(orders) == 1
    produce(orders, "orders", 0, "between")
    produce(orders, "orders", 3, "elsewhere")
    with orders.consumer("orders", "g", start="latest") as consumer:
        assert sorted(values(consumer.until_end())) == ["between", "elsewhere"]


def test_a_partition_that_came_later_begins_at_its_beginning_for_every_group(orders: Book) -> None:
    with orders.consumer("orders", "g", start="latest") as consumer:
        assert consumer.poll(0) == []
    orders.metadata.grow_topic("orders", 6)
    produce(orders, "orders", 4, "first")
    produce(orders, "orders", 5, "gone")
    produce(orders, "orders", 5, "second")
    orders.metadata.delete_segments_before("orders", 5, 1)
    with orders.consumer("orders", "g", start="latest", reset="latest") as consumer:
        assert sorted(values(read(consumer, 2))) == ["first", "second"]
        assert consumer.skipped == [Skipped("orders", 5, 0, 1)]


def test_a_partition_that_comes_while_a_group_reads_is_read(orders: Book) -> None:
    with orders.consumer("orders", "g", start="latest") as consumer:
        assert consumer.poll(0) == []
        orders.metadata.grow_topic("orders", 5)
        produce(orders, "orders", 4, "first")
        assert values(read(consumer, 1)) == ["first"]


@in_memory
def test_a_group_without_a_commit_begins_by_its_policy(orders: Book) -> None:
    produce(orders, "orders", 0, "old")
    with orders.consumer("orders", "g", start="committed") as consumer, pytest.raises(InvalidInput):
        consumer.poll(0)
    with orders.consumer("orders", "g", start="committed", reset="latest") as consumer:
        assert consumer.poll(0) == []
        assert consumer.position() == {("orders", 0): 1, **dict.fromkeys(ALL[1:], 0)}


@pytest.mark.parametrize("reset", ["error", "earliest"])
def test_a_committed_offset_that_is_gone_is_an_error_or_reset(orders: Book, reset: str) -> None:
    for value in ("a", "b", "c"):
        produce(orders, "orders", 0, value)
    orders.metadata.commit_offset("g", "orders", 0, 0)
    orders.metadata.delete_segments_before("orders", 0, 2)
    with orders.consumer("orders", "g", reset=reset) as consumer:
        if reset == "error":
            for _ in range(2):
                with pytest.raises(OffsetBelowLogStart):
                    consumer.poll(0)
            assert consumer.assignment() == ALL
            consumer.seek("orders", 0, "beginning")
        assert values(read(consumer, 1)) == ["c"]
        assert consumer.skipped == ([] if reset == "error" else [Skipped("orders", 0, 0, 2)])


# --- sharing ---------------------------------------------------------------------


def test_members_share_the_partitions_and_hand_them_over(orders: Book) -> None:
    for partition in range(4):
        produce(orders, "orders", partition, *range(10))
    heard: list[tuple[str, list[TopicPartition]]] = []
    with orders.consumer(
        "orders",
        "g",
        on_assigned=lambda places: heard.append(("assigned", places)),
        on_revoked=lambda places: heard.append(("revoked", places)),
    ) as first:
        assert len(read(first, 40)) == 40
        assert heard == [("assigned", ALL)]
        with orders.consumer("orders", "g") as second:
            poll_until(shared(first, second), first, second)
            assert len(first.assignment()) == len(second.assignment()) == 2
            assert heard[1:] == [("revoked", second.assignment())]
            # What was handed out was committed before it was given away: nothing is read twice.
            assert second.position() == dict.fromkeys(second.assignment(), 10)
            for partition in range(4):
                produce(orders, "orders", partition, "new")
            found = {id(consumer): read(consumer, 2) for consumer in (first, second)}
            for consumer in (first, second):
                places = sorted((record.topic, record.partition) for record in found[id(consumer)])
                assert places == consumer.assignment()
        poll_until(lambda: first.assignment() == ALL, first)
        assert first.poll(0.01) == [] and first.lag() == dict.fromkeys(ALL, 0)
        assert heard[2:] == [("assigned", heard[1][1])]
    assert heard[3:] == [("revoked", ALL)]
    assert orders.metadata.group_members("g") == []
    assert threads_of_consumers() == []
    assert orders.verify().ok


def test_a_change_in_the_group_does_not_make_a_commit_fail(orders: Book) -> None:
    produce(orders, "orders", 0, *range(10))
    with orders.consumer("orders", "g", auto_commit=False) as first:
        assert len(read(first, 10)) == 10
        with orders.consumer("orders", "g") as second:
            assert second.poll(0) == []
            # The group is at another generation; what the first one had is its own until it lets go of it.
            first.commit()
    assert committed(orders) == 10


def test_who_was_removed_cannot_commit_and_joins_anew(orders: Book) -> None:
    produce(orders, "orders", 0, *range(10))
    revoked: list[list[TopicPartition]] = []
    with orders.consumer("orders", "g", auto_commit=False, on_revoked=revoked.append) as frozen:
        assert len(read(frozen, 8)) == 8
        (member,) = orders.metadata.group_members("g")
        # As the others do with one that was silent for too long.
        orders.metadata.leave_group("g", member.member_id)
        with orders.consumer("orders", "g", auto_commit=False) as successor:
            assert values(read(successor, 5)) == ["0", "1", "2", "3", "4"]
            successor.commit()
            with pytest.raises((MemberRemoved, GenerationFenced)):
                frozen.commit()
            assert committed(orders) == 5
            poll_until(shared(frozen, successor), frozen, successor)
            assert revoked == [ALL]
            assert {item.member_id for item in orders.metadata.group_members("g")}.isdisjoint({member.member_id})
        poll_until(lambda: frozen.assignment() == ALL, frozen)
        assert frozen.position()["orders", 0] == 5 or committed(orders) == 5


@in_memory
def test_a_removed_member_commits_nothing_when_it_is_closed(orders: Book, caplog: pytest.LogCaptureFixture) -> None:
    produce(orders, "orders", 0, *range(10))
    with orders.consumer("orders", "g") as consumer:
        assert len(read(consumer, 8)) == 8
        (member,) = orders.metadata.group_members("g")
        orders.metadata.leave_group("g", member.member_id)
    assert "the last positions are not committed" in caplog.text
    assert committed(orders) == 0


@in_memory
def test_who_does_not_poll_leaves_and_comes_back_with_the_next_poll(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock, group_session=0.3, poll_seconds=300)
    book.metadata.create_topic("orders", 4)
    produce(book, "orders", 0, *range(5))
    with book.consumer("orders", "g", auto_commit=False) as consumer:
        assert len(read(consumer, 3)) == 3
        assert len(book.metadata.group_members("g")) == 1
        left = threading.Event()
        deadline = threading.Timer(PATIENCE, left.set)
        deadline.start()
        clock.advance(300)
        while book.metadata.group_members("g") and not left.is_set():
            left.wait(0.01)
        deadline.cancel()
        assert book.metadata.group_members("g") == []
        with pytest.raises(MemberRemoved):
            consumer.commit()
        assert values(read(consumer, 5)) == ["0", "1", "2", "3", "4"]
        assert len(book.metadata.group_members("g")) == 1


def test_a_member_hears_that_its_topic_was_deleted(orders: Book) -> None:
    with orders.consumer("orders", "g") as consumer:
        assert consumer.poll(0) == []
        orders.metadata.delete_topic("orders")
        with pytest.raises(TopicNotFound):
            poll_until(lambda: False, consumer)


@in_memory
def test_members_with_other_topics_read_what_they_asked_for(orders: Book) -> None:
    orders.metadata.create_topic("returns")
    with orders.consumer("orders", "g") as one, orders.consumer(["orders", "returns"], "g") as both:
        poll_until(shared(one, both, number=5), one, both)
        assert ("returns", 0) in both.assignment()


# --- threads ---------------------------------------------------------------------


@in_memory
def test_another_thread_may_commit_while_one_waits_for_records(orders: Book) -> None:
    produce(orders, "orders", 0, *range(3))
    with orders.consumer("orders", "g", auto_commit=False) as consumer:
        assert len(read(consumer, 3)) == 3
        with in_thread(lambda: consumer.poll(PATIENCE)) as outcome:
            consumer.commit()
            assert committed(orders) == 3
            produce(orders, "orders", 0, "more")
        assert values(outcome[0]) == ["more"]


def test_a_poll_ends_when_another_thread_closes_the_consumer(orders: Book) -> None:
    consumer = orders.consumer("orders", "g")
    assert consumer.poll(0) == []
    with in_thread(lambda: consumer.poll(PATIENCE)) as outcome:
        consumer.close()
    # Either it was waiting and found nothing, or it came too late.
    assert outcome == [[]] or type(outcome[0]).__name__ == "ConsumerClosed"
    assert threads_of_consumers() == []


# --- resetting -------------------------------------------------------------------


@pytest.mark.parametrize("to", ["earliest", "latest", 2], ids=str)
def test_a_group_is_not_reset_under_the_hands_of_those_who_read_for_it(orders: Book, to: int | str) -> None:
    produce(orders, "orders", 0, *range(10))
    with orders.consumer("orders", "g", auto_commit=0) as consumer:
        read(consumer, 5)
        poll_until(lambda: committed(orders) == 5, consumer)
        for partition in (0, None):
            with pytest.raises(GroupInUse, match="1 of its members read orders") as caught:
                orders.metadata.reset_offset("g", "orders", partition, to)
            assert "lakebook groups members" in caught.value.remedy
        assert committed(orders) == 5
    (reset,) = orders.metadata.reset_offset("g", "orders", 0, to)
    with orders.consumer("orders", "g") as consumer:
        expected = list(range(reset.to_offset, 10))
        assert [record.offset for record in consumer.until_end()] == expected


def test_members_that_read_other_topics_do_not_stand_in_the_way_of_a_reset(orders: Book) -> None:
    orders.metadata.create_topic("returns")
    produce(orders, "orders", 0, *range(10))
    orders.metadata.commit_offset("g", "orders", 0, 7)
    with orders.consumer("returns", "g") as consumer:
        poll_until(lambda: consumer.assignment() == [("returns", 0)], consumer)
        orders.metadata.reset_offset("g", "orders", 0, 3)
        assert committed(orders) == 3


def test_a_member_that_was_silent_when_its_group_was_reset_goes_on_where_the_group_stands(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock)
    book.metadata.create_topic("orders", 4)
    produce(book, "orders", 0, *range(10))
    with book.consumer("orders", "g", auto_commit=0) as consumer:
        read(consumer, 8)
        clock.advance(book.settings.group_session + 1)
        (reset,) = book.metadata.reset_offset("g", "orders", 0, 2)
        with pytest.raises(MemberRemoved):
            consumer.commit()
        assert committed(book) == reset.to_offset == 2
        assert [record.offset for record in read(consumer, 8)] == list(range(2, 10))
    assert committed(book) == 10


def test_a_reader_of_chosen_partitions_goes_on_though_its_group_was_moved_ahead_of_it(
    orders: Book, caplog: pytest.LogCaptureFixture
) -> None:
    for partition in (0, 1):
        produce(orders, "orders", partition, *range(10))
    # It is no member, so nobody can know that it reads.
    with orders.consumer("orders", "g", partitions=[0, 1], auto_commit=0) as consumer:
        consumer.pause([("orders", 1)])
        assert len(read(consumer, 5)) == 5
        orders.metadata.reset_offset("g", "orders", 0, "latest")
        consumer.resume()
        found = [(record.partition, record.offset) for record in read(consumer, 15)]
        assert sorted(found) == [*((0, offset) for offset in range(5, 10)), *((1, offset) for offset in range(10))]
        consumer.seek("orders", 0, 3)
        with pytest.raises(OffsetRegression):
            consumer.commit()
    assert [committed(orders, number) for number in (0, 1)] == [10, 10]
    assert "lies below the committed 10" in caplog.text
