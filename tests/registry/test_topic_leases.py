"""What a lease on a topic pins stays, whatever retention does; nothing else stays for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from books import Place, describe
from held import held_before_commit, started, wait_until_blocked
from lake import records, run_sql
from lakebook import Book, failpoints
from lakebook.clock import ManualClock
from lakebook.errors import (
    InvalidInput,
    InvalidName,
    LeaseLost,
    NegativeOffset,
    OffsetBelowLogStart,
    OffsetBeyondWatermark,
    PartitionNotFound,
    TopicNotFound,
)
from lakebook.registry import schema
from lakebook.registry.topic_leases import TopicLease, end_dead_topic_leases, list_topic_leases, pinned_from
from lakebook.registry.topics import hide_topic
from lakebook.streams.pinning import Pin
from lakebook.streams.ranges import select

LEASE = 60.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def orders(place: Place, clock: ManualClock) -> Book:
    return filled(place.open(clock=clock, lease_seconds=LEASE))


def filled(book: Book) -> Book:
    """Five segments of a hundred records in one partition, and one in the other."""
    book.metadata.create_topic("orders", 2)
    book.metadata.add_segments([describe(base=base) for base in range(0, 500, 100)])
    book.metadata.add_segment(describe(partition=1))
    return book


def bases(book: Book, number: int = 0) -> list[int]:
    """Where the segments begin that there are, also below the log start."""
    return [row["base_offset"] for row in records(book, schema.segments, partition_id=number)]


def in_order(book: Book, number: int = 0) -> list[int]:
    return sorted(bases(book, number))


def pins(book: Book) -> dict[tuple[str, int], int]:
    return {(row["id"], row["partition_id"]): row["from_offset"] for row in records(book, schema.topic_leases)}


def retain(book: Book, offset: int, number: int = 0) -> int:
    removed = book.metadata.delete_segments_before("orders", number, offset)
    checked = book.verify()
    assert checked.ok, checked.findings
    return removed


def seen(book: Book) -> list[TopicLease]:
    return book._registry.read_with(lambda reader: list_topic_leases(reader, ("", 0, -1), 100))


def end_dead(book: Book, dead: list[TopicLease]) -> None:
    book._registry.write(lambda transaction: end_dead_topic_leases(transaction, dead))


# --- pinning -------------------------------------------------------------------


def test_a_lease_has_a_row_for_each_partition_and_knows_what_was_there(orders: Book, clock: ManualClock) -> None:
    lease, topic_id = orders.metadata.pin_topic("orders", {0: 150, 1: 0})
    found = seen(orders)
    assert [(row.id, row.topic_id, row.partition_id, row.from_offset) for row in found] == [
        (lease, topic_id, 0, 150),
        (lease, topic_id, 1, 0),
    ]
    for row in found:
        (partition,) = records(orders, schema.partitions, partition_id=row.partition_id)
        (lake_object,) = records(orders, schema.lake_objects, id=partition["object_id"])
        assert row.sequence == lake_object["last_sequence"] > 0
        assert (row.expires_at - row.created_at).total_seconds() == LEASE
        assert row.holder
    topic = orders.metadata.get_topic("orders")
    assert topic is not None and topic.id == topic_id


def test_taking_a_lease_is_no_event(orders: Book) -> None:
    cursor = orders.events.now()
    lease, topic_id = orders.metadata.pin_topic("orders", {0: 0})
    orders.metadata.renew_pins([lease])
    orders.metadata.advance_pin(lease, {(topic_id, 0): 100})
    orders.metadata.unpin(lease)
    assert orders.events.read(cursor).events == ()


def test_the_log_start_moves_but_what_is_pinned_stays(orders: Book) -> None:
    lease, topic_id = orders.metadata.pin_topic("orders", {0: 200})
    assert retain(orders, 400) == 2
    partition = orders.metadata.get_partition("orders", 0)
    assert partition is not None and partition.log_start == 400
    assert in_order(orders) == [200, 300, 400]
    # A plain reader is not sent to what is on its way out, nor may a new one go there.
    assert orders.metadata.find_segment_for_offset("orders", 0, 250) is None
    assert [segment.base_offset for segment in orders.metadata.get_segments("orders", 0)] == [400]
    with pytest.raises(OffsetBelowLogStart):
        orders.metadata.pin_topic("orders", {0: 250})
    found = orders.metadata.find_pinned_segment(topic_id, 0, 250)
    assert found is not None and (found.topic, found.base_offset, found.end_offset) == ("orders", 200, 299)
    # Asked again it stays so, and goes as far as the reader has come.
    assert retain(orders, 400) == 0
    assert orders.metadata.advance_pin(lease, {(topic_id, 0): 300}) == set()
    assert retain(orders, 400) == 1
    orders.metadata.unpin(lease)
    assert retain(orders, 400) == 1
    assert in_order(orders) == [400]
    assert len(orders.metadata.list_temporary_files()) == 4


def test_a_segment_that_holds_the_pinned_offset_stays_whole(orders: Book) -> None:
    _, topic_id = orders.metadata.pin_topic("orders", {0: 199})
    assert retain(orders, 500) == 1
    assert in_order(orders) == [100, 200, 300, 400]
    found = orders.metadata.find_pinned_segment(topic_id, 0, 199)
    assert found is not None and found.base_offset == 100


def test_the_slowest_of_several_readers_counts_and_each_partition_by_itself(orders: Book) -> None:
    slow, topic_id = orders.metadata.pin_topic("orders", {0: 100})
    orders.metadata.pin_topic("orders", {0: 300, 1: 100})
    assert orders._registry.read_with(lambda reader: pinned_from(reader, topic_id, 0)) == 100
    assert (retain(orders, 500), retain(orders, 100, number=1)) == (1, 1)
    orders.metadata.unpin(slow)
    assert orders._registry.read_with(lambda reader: pinned_from(reader, topic_id, 0)) == 300
    assert retain(orders, 500) == 2
    assert orders._registry.read_with(lambda reader: pinned_from(reader, topic_id, 7)) is None


def test_a_reader_at_the_end_pins_what_comes(orders: Book) -> None:
    _, topic_id = orders.metadata.pin_topic("orders", {0: 500})
    assert orders.metadata.find_pinned_segment(topic_id, 0, 500) is None
    assert retain(orders, 500) == 5
    orders.metadata.add_segment(describe(base=500))
    assert retain(orders, 600) == 0
    found = orders.metadata.find_pinned_segment(topic_id, 0, 500)
    assert found is not None and found.base_offset == 500


def test_a_lease_is_refused_where_there_is_nothing_to_pin(orders: Book) -> None:
    retain(orders, 200)
    refused: list[tuple[type[Exception], str, Mapping[Any, Any]]] = [
        (OffsetBelowLogStart, "orders", {0: 199}),
        (OffsetBeyondWatermark, "orders", {0: 501}),
        (OffsetBeyondWatermark, "orders", {0: 300, 1: 101}),
        (PartitionNotFound, "orders", {0: 300, 2: 0}),
        (PartitionNotFound, "orders", {True: 0}),
        (NegativeOffset, "orders", {0: -1}),
        (TopicNotFound, "nowhere", {0: 0}),
    ]
    for error, topic, offsets in refused:
        with pytest.raises(error):
            orders.metadata.pin_topic(topic, offsets)
    for seconds in (0, -1, float("nan"), "1", True):
        with pytest.raises(InvalidInput):
            orders.metadata.pin_topic("orders", {0: 300}, seconds=seconds)  # type: ignore[arg-type]
    with pytest.raises(InvalidName):
        orders.metadata.pin_topic("orders", {0: 300}, lease_id="")
    assert pins(orders) == {}


# --- moving --------------------------------------------------------------------


def test_a_lease_that_is_taken_again_is_extended_and_never_loosened(orders: Book) -> None:
    lease, topic_id = orders.metadata.pin_topic("orders", {0: 200})
    (before,) = seen(orders)
    retain(orders, 100)
    assert orders.metadata.pin_topic("orders", {0: 300, 1: 50}, lease_id=lease) == (lease, topic_id)
    assert pins(orders) == {(lease, 0): 200, (lease, 1): 50}
    # Back to what is still there, as a seek does. What its reader may have found it may still read.
    orders.metadata.pin_topic("orders", {0: 100}, lease_id=lease)
    assert pins(orders)[lease, 0] == 100
    assert seen(orders)[0].sequence == before.sequence
    with pytest.raises(OffsetBelowLogStart):
        orders.metadata.pin_topic("orders", {0: 99}, lease_id=lease)


def test_below_the_log_start_a_lease_may_be_taken_again_where_it_pins_already(orders: Book) -> None:
    lease, _ = orders.metadata.pin_topic("orders", {0: 200})
    retain(orders, 500)
    orders.metadata.pin_topic("orders", {0: 200}, lease_id=lease)
    orders.metadata.pin_topic("orders", {0: 350}, lease_id=lease)
    with pytest.raises(OffsetBelowLogStart):
        orders.metadata.pin_topic("orders", {0: 199}, lease_id=lease)
    assert pins(orders) == {(lease, 0): 200}


def test_a_lease_inherits_what_another_one_pins(orders: Book) -> None:
    first, topic_id = orders.metadata.pin_topic("orders", {0: 200})
    retain(orders, 500)
    with pytest.raises(OffsetBelowLogStart):
        orders.metadata.pin_topic("orders", {0: 150}, inherit=first)
    with pytest.raises(OffsetBelowLogStart):
        orders.metadata.pin_topic("orders", {0: 300}, inherit="nobody")
    second, _ = orders.metadata.pin_topic("orders", {0: 300}, inherit=first)
    # It may be handed files that the first one's reader has found.
    assert len({row.sequence for row in seen(orders)}) == 1
    orders.metadata.unpin(first)
    assert retain(orders, 500) == 1
    assert orders.metadata.find_pinned_segment(topic_id, 0, 300) is not None
    assert pins(orders) == {(second, 0): 300}


def test_a_pin_advances_only_forward_and_says_what_it_has_lost(orders: Book) -> None:
    lease, topic_id = orders.metadata.pin_topic("orders", {0: 200, 1: 0})
    assert orders.metadata.advance_pin(lease, {(topic_id, 0): 100, (topic_id, 1): 70}) == set()
    assert pins(orders) == {(lease, 0): 200, (lease, 1): 70}
    orders.metadata.unpin(lease, [(topic_id, 0)])
    assert orders.metadata.advance_pin(lease, {(topic_id, 0): 300, (topic_id, 1): 80}) == {(topic_id, 0)}
    assert orders.metadata.pinned_places(lease) == {(topic_id, 1): 80}
    assert orders.metadata.advance_pin("nobody", {(topic_id, 0): 1}) == {(topic_id, 0)}
    assert pins(orders) == {(lease, 1): 80}


# --- life and death ------------------------------------------------------------


def test_a_renewal_says_which_leases_are_held(orders: Book, clock: ManualClock) -> None:
    first, topic_id = orders.metadata.pin_topic("orders", {0: 0, 1: 0})
    second, _ = orders.metadata.pin_topic("orders", {0: 0})
    clock.advance(LEASE / 2)
    assert orders.metadata.renew_pins([first, second, "nobody"]) == {first, second}
    assert {(row.expires_at - row.created_at).total_seconds() for row in seen(orders)} == {LEASE * 1.5}
    orders.metadata.unpin(second)
    orders.metadata.unpin(first, [(topic_id, 0), (topic_id, 1)])
    assert orders.metadata.renew_pins([first, second]) == set()
    assert orders.metadata.renew_pins([]) == set()


def test_a_lease_that_has_run_out_pins_until_somebody_ends_it(orders: Book, clock: ManualClock) -> None:
    lease, _ = orders.metadata.pin_topic("orders", {0: 0})
    clock.advance(10 * LEASE)
    assert retain(orders, 500) == 0
    dead = seen(orders)
    assert orders.metadata.renew_pins([lease]) == {lease}
    end_dead(orders, dead)
    assert pins(orders) == {(lease, 0): 0}, "it had been renewed since it was seen"
    end_dead(orders, seen(orders))
    assert pins(orders) == {}
    assert orders.metadata.renew_pins([lease]) == set()
    assert retain(orders, 500) == 5


def test_a_lease_is_never_lost_by_halves(orders: Book, clock: ManualClock) -> None:
    lease, _ = orders.metadata.pin_topic("orders", {0: 0})
    dead = seen(orders)
    clock.advance(LEASE / 2)
    # To pin more renews all of it: none of its partitions runs out before the others.
    orders.metadata.pin_topic("orders", {1: 0}, lease_id=lease)
    assert len({row.expires_at for row in seen(orders)}) == 1
    end_dead(orders, dead)
    assert pins(orders) == {(lease, 0): 0, (lease, 1): 0}
    # One row is enough to name it.
    end_dead(orders, seen(orders)[:1])
    assert pins(orders) == {}


def test_leases_come_in_pages(orders: Book) -> None:
    for name in ("b", "a"):
        orders.metadata.pin_topic("orders", {0: 0, 1: 0}, lease_id=name)
    after, found = ("", 0, -1), []
    while page := orders._registry.read_with(lambda reader: list_topic_leases(reader, after, 3)):  # noqa: B023
        found += [(row.id, row.partition_id) for row in page]
        after = (page[-1].id, page[-1].topic_id, page[-1].partition_id)
    assert found == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


# --- looking up ----------------------------------------------------------------


def test_a_range_is_all_segments_that_hold_one_of_its_offsets(orders: Book) -> None:
    _, topic_id = orders.metadata.pin_topic("orders", {0: 100})
    retain(orders, 300)
    there = [(base, base + 100) for base in (100, 200, 300, 400)]
    for start in (0, 99, 100, 150, 199, 200, 299, 400, 499, 500):
        for end in (0, 100, 101, 200, 250, 500, 501, 10_000):
            expected = [base for base, beyond in there if start < end and base < end and start < beyond]
            found = orders.metadata.list_segments_in(topic_id, 0, start, end)
            assert [segment.base_offset for segment in found] == expected, (start, end)
    assert orders.metadata.list_segments_in(topic_id, 5, 0, 100) == []


def test_a_reader_that_lost_its_lease_before_it_looked_is_told_and_reads_no_less(
    orders: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = orders.metadata.list_segments_in

    def froze(*where: int) -> Any:
        """Meanwhile its lease was ended, and retention has been there."""
        end_dead(orders, seen(orders))
        retain(orders, 300)
        return listed(*where)

    with Pin(orders.lake) as pin, monkeypatch.context() as patch:
        patch.setattr(orders.metadata, "list_segments_in", froze)
        with pytest.raises(LeaseLost):
            select(orders.lake, orders.metadata, pin, "orders", start=0)
    # A hole that was reported when the registry was rebuilt is there whoever looks, and is no reason to give up.
    run_sql(orders, "DELETE FROM segments WHERE base_offset = 300")
    with Pin(orders.lake) as pin:
        found = select(orders.lake, orders.metadata, pin, "orders", start={0: 300}, partitions=[0])
    assert (found.record_count, found.ranges) == (100, {0: (300, 500)})


def test_an_offset_is_found_by_its_segment_or_not_at_all(orders: Book) -> None:
    _, topic_id = orders.metadata.pin_topic("orders", {0: 100})
    retain(orders, 500)
    for offset in (0, 99, 100, 199, 200, 499, 500, 2**62):
        found = orders.metadata.find_pinned_segment(topic_id, 0, offset)
        expected = offset // 100 * 100 if 100 <= offset < 500 else None
        assert (None if found is None else found.base_offset) == expected
    assert orders.metadata.find_pinned_segment(topic_id, 1, 5) is not None
    assert orders.metadata.find_pinned_segment(topic_id, 2, 5) is None
    with pytest.raises(NegativeOffset):
        orders.metadata.find_pinned_segment(topic_id, 0, -1)
    with pytest.raises(TopicNotFound):
        orders.metadata.find_pinned_segment(topic_id + 1000, 0, 5)


# --- deletion of topics --------------------------------------------------------


def test_a_deleted_topic_goes_whatever_leases_pin(orders: Book) -> None:
    lease, topic_id = orders.metadata.pin_topic("orders", {0: 0, 1: 0})
    retain(orders, 300)
    orders.metadata.delete_topic("orders")
    assert pins(orders) == {}
    assert bases(orders) == []
    assert len(orders.metadata.list_temporary_files()) == 6
    orders.metadata.create_topic("orders", 2)
    for ask in (
        lambda: orders.metadata.find_pinned_segment(topic_id, 0, 0),
        lambda: orders.metadata.list_segments_in(topic_id, 0, 0, 10),
        lambda: orders.metadata.list_segments_in(topic_id, 0, 10, 10),
    ):
        with pytest.raises(TopicNotFound):
            ask()
    assert orders.metadata.renew_pins([lease]) == set()
    assert orders.metadata.advance_pin(lease, {(topic_id, 0): 5}) == {(topic_id, 0)}
    assert orders.verify().ok


def test_a_topic_that_is_hidden_and_not_yet_emptied_is_gone_for_readers_too(orders: Book) -> None:
    lease, topic_id = orders.metadata.pin_topic("orders", {0: 0})
    orders._registry.write(lambda transaction: hide_topic(transaction, "orders"))
    with pytest.raises(TopicNotFound, match="orders"):
        orders.metadata.find_pinned_segment(topic_id, 0, 0)
    with pytest.raises(TopicNotFound, match="orders"):
        orders.metadata.list_segments_in(topic_id, 0, 0, 500)
    with pytest.raises(TopicNotFound):
        orders.metadata.pin_topic("orders", {0: 0}, lease_id=lease)
    assert orders.verify().ok
    assert orders.metadata.purge_deleted_topics() == 1
    assert pins(orders) == {}
    assert orders.verify().unfinished == ()


# --- verify --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ("UPDATE topic_leases SET from_offset = 501", "above the high watermark 500"),
        ("UPDATE topic_leases SET from_offset = 50", "whose segment is gone"),
        ("UPDATE topic_leases SET partition_id = 9", "no such partition"),
        ("UPDATE topic_leases SET topic_id = 999", "no such partition"),
    ],
)
def test_verify_finds_a_lease_that_cannot_be(orders: Book, damage: str, what: str) -> None:
    retain(orders, 100)
    orders.metadata.pin_topic("orders", {0: 200}, lease_id="reader")
    retain(orders, 300)
    run_sql(orders, damage)
    (finding,) = orders.verify().findings
    assert finding.check == "leases"
    assert "reader" in finding.on and what in finding.what


# --- races ---------------------------------------------------------------------


def test_a_lease_that_comes_before_the_removal_holds_it_up(shared_place: Place) -> None:
    book, other = filled(shared_place.open()), shared_place.open()
    with held_before_commit(lambda: book.metadata.pin_topic("orders", {0: 100})) as taking:
        removing = started(lambda: other.metadata.delete_segments_before("orders", 0, 500))
        wait_until_blocked(book)
        _, topic_id = taking.finish()
    assert removing.finish() == 1
    assert book.metadata.find_pinned_segment(topic_id, 0, 100) is not None
    assert in_order(book) == [100, 200, 300, 400]
    assert book.verify().ok


def test_a_lease_that_comes_while_the_log_start_moves_is_refused(shared_place: Place) -> None:
    book, other = filled(shared_place.open()), shared_place.open()
    with held_before_commit(lambda: book.metadata.delete_segments_before("orders", 0, 500)) as moving:
        taking = started(lambda: other.metadata.pin_topic("orders", {0: 100}))
        wait_until_blocked(book)
        assert moving.finish() == 5
    with pytest.raises(OffsetBelowLogStart):
        taking.finish()
    assert pins(book) == {}
    assert book.verify().ok


def test_a_lease_that_comes_between_the_move_and_the_removal_is_refused(shared_place: Place) -> None:
    book = filled(shared_place.open())
    pinned, _ = book.metadata.pin_topic("orders", {0: 200})

    def take() -> None:
        with pytest.raises(OffsetBelowLogStart):
            book.metadata.pin_topic("orders", {0: 100})
        # One that is handed over, at the very moment, is not.
        book.metadata.pin_topic("orders", {0: 300}, lease_id="heir", inherit=pinned)
        book.metadata.unpin(pinned)

    with failpoints.armed("retention.log_start_moved", take):
        assert book.metadata.delete_segments_before("orders", 0, 500) == 3
    assert in_order(book) == [300, 400]
    assert pins(book) == {("heir", 0): 300}
    assert book.verify().ok


def test_a_lease_is_handed_over_while_its_rows_are_removed(shared_place: Place) -> None:
    book, other = filled(shared_place.open()), shared_place.open()
    first, topic_id = book.metadata.pin_topic("orders", {0: 200})
    with held_before_commit(lambda: book.metadata.delete_segments_before("orders", 0, 500), skip=1) as removing:
        handing = started(lambda: other.metadata.pin_topic("orders", {0: 200}, inherit=first))
        wait_until_blocked(book)
        assert removing.finish() == 2
    second, _ = handing.finish()
    book.metadata.unpin(first)
    assert book.metadata.delete_segments_before("orders", 0, 500) == 0
    assert book.metadata.find_pinned_segment(topic_id, 0, 200) is not None
    assert pins(book) == {(second, 0): 200}
    assert book.verify().ok


def test_a_renewal_and_the_end_of_a_dead_lease_agree_on_who_was_first(shared_place: Place) -> None:
    clock = ManualClock()
    book, other = filled(shared_place.open(clock=clock)), shared_place.open(clock=clock)
    lease, _ = book.metadata.pin_topic("orders", {0: 0, 1: 0}, seconds=1)
    clock.advance(2)
    dead = seen(book)
    with held_before_commit(lambda: book.metadata.renew_pins([lease])) as renewing:
        ending = started(lambda: end_dead(other, dead))
        wait_until_blocked(book)
        assert renewing.finish() == {lease}
    ending.finish()
    assert pins(book) == {(lease, 0): 0, (lease, 1): 0}
    dead = seen(book)
    clock.advance(2)
    with held_before_commit(lambda: end_dead(book, dead)) as removing:
        late = started(lambda: other.metadata.renew_pins([lease]))
        wait_until_blocked(book)
        removing.finish()
    assert late.finish() == set()
    assert pins(book) == {}
