"""Consumers: what was appended is read once, in order, from wherever it was asked for, and stays while it is read."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

from books import SQLITE, Place
from lake import in_memory, own_warehouse  # noqa: F401
from lakebook import Book, SegmentInfo
from lakebook.clock import ManualClock
from lakebook.errors import (
    ConsumerClosed,
    CorruptFooter,
    InvalidInput,
    LeaseLost,
    NegativeOffset,
    OffsetBelowLogStart,
    OffsetBeyondWatermark,
    PartitionNotFound,
    ReadFailed,
    TopicNotFound,
)
from lakebook.registry import schema
from lakebook.registry.statements import Statement, bind
from lakebook.streams.fetching import PartitionStream
from lakebook.streams.merging import merge
from lakebook.streams.positions import Skipped
from streaming import PATIENCE, in_thread, produce, read, threads_of_consumers, values

NOON = datetime(2024, 5, 17, 12, tzinfo=UTC)
in_a_file = pytest.mark.parametrize("place", [SQLITE], indirect=True)

_s = schema.segments.c
REMOVE_ROW = Statement(sa.delete(schema.segments).where(_s.id == bind("segment")), "segment")


@pytest.fixture
def orders(book: Book) -> Book:
    book.metadata.create_topic("orders", 2)
    return book


# --- reading ---------------------------------------------------------------------


def test_records_are_read_once_and_in_the_order_of_their_offsets(orders: Book) -> None:
    produce(orders, "orders", 0, *range(10))
    produce(orders, "orders", 1, *"abcde")
    produce(orders, "orders", 0, *range(10, 25))
    with orders.consumer("orders") as consumer:
        found = read(consumer, 30)
        assert consumer.poll(0) == []
        assert consumer.position() == {("orders", 0): 25, ("orders", 1): 5}
        assert consumer.lag() == {("orders", 0): 0, ("orders", 1): 0}
    of_first = [record for record in found if record.partition == 0]
    assert [(record.offset, record.value) for record in of_first] == [(n, str(n).encode()) for n in range(25)]
    assert values([record for record in found if record.partition == 1]) == list("abcde")
    assert {(record.topic, record.key, record.headers) for record in found} == {("orders", None, ())}
    assert orders.metrics.values()["lakebook_consumed_records_total"] == 30


@in_memory
def test_a_poll_gives_no_more_than_was_asked_for_and_goes_on_from_there(orders: Book) -> None:
    produce(orders, "orders", 0, *range(100))
    with orders.consumer("orders", max_records=30) as consumer:
        assert values(consumer.poll(PATIENCE)) == [str(n) for n in range(30)]
        assert values(consumer.poll(PATIENCE, max_records=1)) == ["30"]
        assert consumer.lag()["orders", 0] == 69
        assert values(read(consumer, 69)) == [str(n) for n in range(31, 100)]


@in_memory
def test_batches_are_arrow_and_hold_the_same_records(orders: Book) -> None:
    produce(orders, "orders", 0, *range(50))
    produce(orders, "orders", 0, *range(50, 80))
    with orders.consumer("orders") as consumer:
        (topic, first), *_ = consumer.poll_batches(PATIENCE, max_records=20)
        assert topic == "orders" and isinstance(first, pa.RecordBatch) and first.num_rows == 20
        batches = [first]
        while sum(batch.num_rows for batch in batches) < 80:
            batches += [batch for _, batch in consumer.poll_batches(PATIENCE)]
    table = pa.Table.from_batches(batches)
    assert table.column("offset").to_pylist() == list(range(80))
    assert table.column("value").to_pylist() == [str(n).encode() for n in range(80)]
    assert table.column_names == ["partition", "offset", "timestamp", "key", "value", "headers"]


def test_a_poll_waits_for_records_of_another_book(shared_place: Place) -> None:
    book, other = shared_place.open(), shared_place.open()
    book.metadata.create_topic("orders", 2)
    with book.consumer("orders") as consumer:
        assert consumer.poll(0) == []
        with in_thread(lambda: consumer.poll(PATIENCE)) as outcome:
            produce(other, "orders", 1, "late")
        assert values(outcome[0]) == ["late"]


@in_memory
def test_a_poll_without_records_ends_in_its_time(orders: Book) -> None:
    with orders.consumer("orders") as consumer:
        assert consumer.poll(0) == [] and consumer.poll(0.02) == [] and consumer.poll_batches(0.02) == []


@in_memory
def test_a_poll_ends_in_its_time_whatever_the_clock_does(place: Place) -> None:
    book = place.open(clock=ManualClock(), event_poll=0.01)
    book.metadata.create_topic("orders")
    with book.consumer("orders") as consumer:
        assert consumer.poll(0.05) == []


@in_memory
def test_several_topics_are_read_by_one_consumer(orders: Book) -> None:
    orders.metadata.create_topic("returns")
    produce(orders, "orders", 1, "a")
    produce(orders, "returns", 0, "b")
    with orders.consumer(["orders", "returns", "orders"]) as consumer:
        assert {(record.topic, record.value) for record in read(consumer, 2)} == {("orders", b"a"), ("returns", b"b")}
        assert consumer.assignment() == [("orders", 0), ("orders", 1), ("returns", 0)]


@in_memory
def test_only_the_chosen_partitions_are_read(orders: Book) -> None:
    produce(orders, "orders", 0, "a")
    produce(orders, "orders", 1, "b")
    with orders.consumer("orders", partitions=[1]) as consumer:
        assert values(consumer.until_end()) == ["b"]
    with orders.consumer("orders", partitions=[("orders", 0)]) as consumer:
        assert values(consumer.until_end()) == ["a"]


@in_memory
def test_little_memory_is_enough_for_many_segments(orders: Book) -> None:
    for start in range(0, 120, 3):
        produce(orders, "orders", 0, *range(start, start + 3))
        produce(orders, "orders", 1, *range(start, start + 3))
    with orders.consumer("orders", read_ahead=1) as consumer:
        found = read(consumer, 240)
    for partition in (0, 1):
        assert [record.offset for record in found if record.partition == partition] == list(range(120))


@in_memory
def test_many_row_groups_are_read_ahead_and_any_offset_is_found_in_them(orders: Book) -> None:
    produce(orders, "orders", 0, *(f"{n}-{'x' * 5000}" for n in range(5000)))
    with orders.consumer("orders", partitions=[0]) as consumer:
        numbers = [int(value.partition("-")[0]) for value in values(consumer.until_end())]
        assert numbers == list(range(5000))
        for offset in (0, 1023, 1024, 3333, 4999):
            consumer.seek("orders", 0, offset)
            assert [record.offset for record in consumer.poll(PATIENCE, max_records=1)] == [offset]


@in_memory
def test_a_segment_whose_footer_is_missing_is_read_by_the_end_of_its_file(orders: Book) -> None:
    produce(orders, "orders", 0, *range(5), footer=False)
    with orders.consumer("orders") as consumer:
        assert values(consumer.until_end()) == [str(n) for n in range(5)]


# --- iterating -------------------------------------------------------------------


@in_memory
def test_a_pass_until_the_end_ends_where_the_end_was_when_it_began(orders: Book) -> None:
    produce(orders, "orders", 0, *range(5))
    with orders.consumer("orders") as consumer:
        passing = consumer.until_end()
        found = [next(passing)]
        produce(orders, "orders", 0, *range(5, 9))
        produce(orders, "orders", 1, "other")
        found += passing
        assert values(found) == [str(n) for n in range(5)]
        assert sorted(values(consumer.until_end())) == ["5", "6", "7", "8", "other"]
        assert values(consumer.until_end()) == []


@in_memory
def test_a_loop_that_is_left_early_loses_nothing(orders: Book) -> None:
    produce(orders, "orders", 0, *range(10))
    with orders.consumer("orders") as consumer:
        for record in consumer:
            if record.offset == 3:
                break
        assert consumer.position()["orders", 0] == 4
        assert values(consumer.poll(PATIENCE)) == [str(n) for n in range(4, 10)]


@in_memory
def test_a_loop_follows_a_seek_that_is_made_in_it(orders: Book) -> None:
    produce(orders, "orders", 0, *range(10))
    seen = []
    with orders.consumer("orders") as consumer:
        for record in consumer.until_end():
            seen.append(record.offset)
            if seen == [0, 1, 2]:
                consumer.seek("orders", 0, 7)
    assert seen == [0, 1, 2, 7, 8, 9]


def test_a_loop_waits_for_more_until_another_thread_closes_the_consumer(orders: Book) -> None:
    consumer = orders.consumer("orders")
    came = threading.Event()
    seen: list[int] = []

    def loop() -> None:
        for record in consumer:
            seen.append(record.offset)
            came.set()

    with in_thread(loop) as outcome:
        produce(orders, "orders", 0, "a")
        assert came.wait(PATIENCE)
        consumer.close()
    assert (seen, outcome) == ([0], [None])


# --- where to begin --------------------------------------------------------------


def test_a_reader_begins_where_it_was_told_to(orders: Book) -> None:
    produce(orders, "orders", 0, *range(5))
    with orders.consumer("orders", start="latest") as late, orders.consumer("orders", start=3, partitions=[0]) as third:
        produce(orders, "orders", 0, "new")
        assert values(read(late, 1)) == ["new"]
        assert values(read(third, 3)) == ["3", "4", "new"]


def test_a_time_is_found_to_the_record(orders: Book) -> None:
    minutes = [0, 1, 2, 5, 3, 4]
    produce(orders, "orders", 0, *minutes[:3], times=[NOON + timedelta(minutes=n) for n in minutes[:3]])
    produce(orders, "orders", 0, *minutes[3:], times=[NOON + timedelta(minutes=n) for n in minutes[3:]])
    with orders.consumer("orders", partitions=[0]) as consumer:
        for moment, expected in [
            (NOON - timedelta(days=1), 0),
            (NOON, 0),
            (NOON + timedelta(microseconds=1), 1),
            (NOON + timedelta(minutes=1, milliseconds=1), 2),
            (NOON + timedelta(minutes=2), 2),
            (NOON + timedelta(minutes=2.5), 3),
            (NOON + timedelta(minutes=3), 3),
            (NOON + timedelta(minutes=5), 3),
            (NOON + timedelta(minutes=5, microseconds=1), 6),
        ]:
            consumer.seek("orders", 0, moment)
            assert consumer.position()["orders", 0] == expected, moment
    with orders.consumer("orders", start=NOON + timedelta(minutes=2)) as consumer:
        assert values(consumer.until_end()) == ["2", "5", "3", "4"]


@in_memory
def test_a_reader_goes_to_the_beginning_and_to_the_end(orders: Book) -> None:
    produce(orders, "orders", 0, *range(5))
    with orders.consumer("orders", partitions=[0]) as consumer:
        consumer.seek("orders", 0, "end")
        assert consumer.poll(0) == [] and consumer.position() == {("orders", 0): 5}
        consumer.seek("orders", 0, "beginning")
        assert values(read(consumer, 5)) == [str(n) for n in range(5)]
        assert consumer.skipped == []


def test_partitions_that_come_later_are_read_from_their_beginning(orders: Book) -> None:
    with orders.consumer("orders", start="latest") as consumer:
        assert consumer.poll(0) == []
        orders.metadata.grow_topic("orders", 3)
        produce(orders, "orders", 2, "first")
        assert values(read(consumer, 1)) == ["first"]
        assert consumer.assignment() == [("orders", 0), ("orders", 1), ("orders", 2)]


@in_memory
@pytest.mark.parametrize(
    "options",
    [
        {"start": "soon"},
        {"start": "committed"},
        {"start": True},
        {"start": datetime(2024, 1, 1)},  # noqa: DTZ001 - without a zone on purpose
        {"reset": "never"},
        {"max_records": 0},
        {"read_ahead": 0},
        {"auto_commit": -1},
        {"auto_commit": "often"},
        {"partitions": [("returns", 0)]},
    ],
)
def test_options_that_make_no_sense_are_refused(orders: Book, options: Any) -> None:
    with pytest.raises(InvalidInput):
        orders.consumer("orders", **options)


@in_memory
def test_what_is_not_there_cannot_be_read(orders: Book) -> None:
    with pytest.raises(TopicNotFound):
        orders.consumer("returns")
    with pytest.raises(PartitionNotFound):
        orders.consumer("orders", partitions=[2])
    with pytest.raises(InvalidInput):
        orders.consumer([])
    with orders.consumer("orders", partitions=[0]) as consumer:
        with pytest.raises(InvalidInput):
            consumer.seek("orders", 1, 0)
        with pytest.raises(InvalidInput):
            consumer.seek("orders", 0, "middle")
        with pytest.raises(NegativeOffset):
            consumer.seek("orders", 0, -1)
        with pytest.raises(InvalidInput):
            consumer.poll(0, max_records=0)
        for asks_a_group in (consumer.commit, consumer.committed):
            with pytest.raises(InvalidInput):
                asks_a_group()


# --- offsets that are not there --------------------------------------------------


def kept_from_ten(book: Book) -> None:
    produce(book, "orders", 0, *range(10))
    produce(book, "orders", 0, *range(10, 20))
    assert book.metadata.delete_segments_before("orders", 0, 10) == 1


def test_an_offset_that_is_gone_or_not_there_yet_is_an_error_of_its_own(orders: Book) -> None:
    kept_from_ten(orders)
    with orders.consumer("orders", partitions=[0]) as consumer:
        with pytest.raises(OffsetBelowLogStart):
            consumer.seek("orders", 0, 9)
        with pytest.raises(OffsetBeyondWatermark):
            consumer.seek("orders", 0, 21)
        assert consumer.position() == {("orders", 0): 10}
        consumer.seek("orders", 0, 20)
        assert consumer.skipped == []
    with pytest.raises(OffsetBelowLogStart):
        orders.consumer("orders", partitions=[0], start=5)


@pytest.mark.parametrize(("reset", "asked", "position"), [("earliest", 4, 10), ("latest", 4, 20), ("earliest", 99, 10)])
def test_a_reset_says_what_was_skipped(
    orders: Book, caplog: pytest.LogCaptureFixture, reset: str, asked: int, position: int
) -> None:
    kept_from_ten(orders)
    with orders.consumer("orders", reset=reset) as consumer:
        consumer.seek("orders", 0, asked)
        assert consumer.position()["orders", 0] == position
        assert consumer.skipped == [Skipped("orders", 0, asked, position)]
    assert f"orders/0: the reader goes from {asked} to {position}" in caplog.text
    assert orders.metrics.values()["lakebook_skipped_records_total"] == max(0, position - asked)


def remove_row(book: Book, segment: SegmentInfo) -> None:
    book.lake.registry.write(lambda transaction: transaction.run(REMOVE_ROW, segment.id))


def test_a_hole_is_skipped_and_told(orders: Book) -> None:
    """As a rebuild of the registry leaves one, where a file was lost."""
    parts = [produce(orders, "orders", 0, *range(start, start + 10)) for start in (0, 10, 20, 30)]
    for lost in (parts[1], parts[3]):
        remove_row(orders, lost)
    with orders.consumer("orders") as consumer:
        assert [int(value) for value in values(consumer.until_end())] == [*range(10), *range(20, 30)]
        assert consumer.skipped == [Skipped("orders", 0, 10, 20), Skipped("orders", 0, 30, 40)]
        produce(orders, "orders", 0, "after")
        assert [record.offset for record in read(consumer, 1)] == [40]


# --- what is read stays ----------------------------------------------------------


def present(book: Book, parts: list[SegmentInfo]) -> int:
    return sum(book.lake.store.size(part.s3_key) is not None for part in parts)


def clean(book: Book) -> None:
    """Whatever may be deleted is deleted."""
    book.metadata.release_retired()
    book.cleaner.delete_expired_temporary_files()


def test_retention_takes_nothing_from_a_reader_that_is_on_its_way(place: Place) -> None:
    book = place.open(temporary_file_grace=0)
    book.metadata.create_topic("orders")
    parts = [produce(book, "orders", 0, *range(start, start + 10)) for start in range(0, 100, 10)]
    with book.consumer("orders", read_ahead=1) as consumer:
        assert values(read(consumer, 25)) == [str(n) for n in range(25)]
        book.lake.renewals.renew()
        # Everything goes but what the reader still needs: from the segment that holds its position on.
        assert book.metadata.delete_segments_before("orders", 0, 100) == 2
        clean(book)
        assert present(book, parts) == 8
        with book.consumer("orders") as other:
            assert other.position() == {("orders", 0): 100}
        consumer.seek("orders", 0, 27)
        assert values(read(consumer, 73)) == [str(n) for n in range(27, 100)]
        book.lake.renewals.renew()
        assert book.metadata.delete_segments_before("orders", 0, 100) == 8
        clean(book)
        assert present(book, parts) == 0
    assert book.verify().ok


@in_memory
def test_a_closed_reader_pins_nothing(orders: Book) -> None:
    produce(orders, "orders", 0, *range(10))
    consumer = orders.consumer("orders")
    assert orders.metadata.delete_segments_before("orders", 0, 10) == 0
    consumer.close()
    assert orders.metadata.delete_segments_before("orders", 0, 10) == 1


def lose_lease(book: Book) -> None:
    """As the janitor does with the lease of a reader that was frozen for long."""
    book.lake.registry.write(lambda transaction: transaction.run(Statement(sa.delete(schema.topic_leases))))


def test_a_lost_lease_is_taken_anew_where_nothing_was_lost(orders: Book, caplog: pytest.LogCaptureFixture) -> None:
    produce(orders, "orders", 0, *range(10))
    with orders.consumer("orders") as consumer:
        assert values(read(consumer, 4)) == ["0", "1", "2", "3"]
        consumer.pause([("orders", 1)])
        lose_lease(orders)
        orders.lake.renewals.renew()
        assert values(read(consumer, 6)) == [str(n) for n in range(4, 10)]
        assert "the lease ran out" in caplog.text
        assert orders.metadata.delete_segments_before("orders", 0, 10) == 0
        produce(orders, "orders", 1, "paused")
        assert consumer.poll(0.02) == []


@pytest.mark.parametrize("reset", ["error", "earliest"])
def test_a_lost_lease_whose_records_are_gone_is_an_error_of_its_own(place: Place, reset: str) -> None:
    clock = ManualClock()
    book = place.open(clock=clock)
    book.metadata.create_topic("orders")
    produce(book, "orders", 0, *range(10))
    produce(book, "orders", 0, *range(10, 20))
    with book.consumer("orders", reset=reset) as consumer:
        assert len(read(consumer, 4)) == 4
        lose_lease(book)
        assert book.metadata.delete_segments_before("orders", 0, 10) == 1
        # Nobody has renewed it for its time: so the registry is asked.
        clock.advance(book.settings.lease_seconds)
        if reset == "error":
            with pytest.raises(LeaseLost):
                consumer.poll(0)
            with pytest.raises(OffsetBelowLogStart):
                consumer.poll(0)
            consumer.seek("orders", 0, "beginning")
        assert values(consumer.until_end()) == [str(n) for n in range(10, 20)]
        assert consumer.skipped == ([] if reset == "error" else [Skipped("orders", 0, 4, 10)])


@in_memory
def test_a_file_that_is_gone_though_it_is_pinned_fails_the_read(orders: Book) -> None:
    segment = produce(orders, "orders", 0, *range(10))
    with orders.consumer("orders") as consumer:
        orders.lake.store.delete_one(segment.s3_key)
        for _ in range(2):
            with pytest.raises(ReadFailed, match=segment.s3_key):
                consumer.poll(PATIENCE)


@in_memory
def test_a_file_with_other_records_than_the_registry_says_fails_the_read(orders: Book) -> None:
    first, second = produce(orders, "orders", 0, *range(10)), produce(orders, "orders", 0, *range(10))
    swapped = orders.lake.store.read(first.s3_key)
    orders.lake.store.delete_one(second.s3_key)
    orders.lake.store.put_new(second.s3_key, swapped)
    with orders.consumer("orders", start=10, partitions=[0]) as consumer, pytest.raises(InvalidInput, match="10 to 10"):
        consumer.poll(PATIENCE)
    orders.lake.store.delete_one(second.s3_key)
    orders.lake.store.put_new(second.s3_key, b"PAR1 and no more of it PAR1")
    with orders.consumer("orders", start=10, partitions=[0]) as consumer, pytest.raises(ReadFailed):
        consumer.poll(PATIENCE)


@in_memory
def test_a_segment_with_fewer_records_than_the_registry_says_is_refused(orders: Book) -> None:
    short = produce(orders, "orders", 1, *range(5))
    longer = produce(orders, "orders", 0, *range(10), footer=False)
    data = orders.lake.store.read(short.s3_key)
    orders.lake.store.delete_one(longer.s3_key)
    orders.lake.store.put_new(longer.s3_key, data + b"")
    registered = schema.segments.update().where(_s.id == bind("segment")).values(size_bytes=bind("size"))
    orders.lake.registry.write(
        lambda transaction: transaction.run(Statement(registered, "size", "segment"), len(data), longer.id)
    )
    with orders.consumer("orders", partitions=[0]) as consumer, pytest.raises(CorruptFooter):
        consumer.poll(PATIENCE)


def test_a_reader_that_had_planned_what_a_merge_replaced_reads_on(orders: Book) -> None:
    parts = [produce(orders, "orders", 0, *range(start, start + 10)) for start in range(0, 50, 10)]
    partition = orders.metadata.get_partition("orders", 0)
    assert partition is not None
    stream = PartitionStream(orders.lake, orders.metadata, partition.topic_id, 0, 0)
    rows = []
    for _ in range(2):  # By then the others have been looked up.
        fetched = stream.read(50)
        rows.append((fetched.base, fetched.end))
        stream.next = fetched.end
    merge_all(orders, parts)
    for part in parts:
        orders.lake.store.delete_one(part.s3_key)
    fetched = stream.read(50)
    assert [*rows, (fetched.base, fetched.end)] == [(0, 10), (10, 20), (20, 50)]
    stream.forget()


def merge_all(book: Book, parts: list[SegmentInfo]) -> None:
    topic = book.metadata.get_topic("orders")
    assert topic is not None
    merge(book.lake, book.metadata, topic, 0, parts)


def test_a_merge_changes_nothing_for_a_reader_on_its_way(orders: Book) -> None:
    parts = [produce(orders, "orders", 0, *range(start, start + 10)) for start in range(0, 50, 10)]
    with orders.consumer("orders", read_ahead=1) as consumer:
        first = read(consumer, 17)
        merge_all(orders, parts)
        clean(orders)
        assert values(first + read(consumer, 33)) == [str(n) for n in range(50)]


# --- pausing, and the end --------------------------------------------------------


@in_memory
def test_a_paused_partition_waits_and_goes_on_where_it_was(orders: Book) -> None:
    produce(orders, "orders", 0, *range(10))
    with orders.consumer("orders") as consumer:
        assert values(consumer.poll(PATIENCE, max_records=3)) == ["0", "1", "2"]
        consumer.pause([("orders", 0)])
        produce(orders, "orders", 1, "other")
        assert values(read(consumer, 1)) == ["other"]
        assert consumer.poll(0.02) == [] and values(consumer.until_end()) == []
        consumer.resume()
        assert values(read(consumer, 7)) == [str(n) for n in range(3, 10)]
        with pytest.raises(InvalidInput):
            consumer.pause([("orders", 7)])


def test_a_deleted_topic_is_told_and_one_of_the_same_name_is_another(orders: Book) -> None:
    produce(orders, "orders", 0, "a")
    with orders.consumer("orders") as consumer:
        assert values(read(consumer, 1)) == ["a"]
        orders.metadata.delete_topic("orders")
        with pytest.raises(TopicNotFound):
            consumer.poll(PATIENCE)
        orders.metadata.create_topic("orders", 2)
        produce(orders, "orders", 0, "b", "c")
        with pytest.raises(TopicNotFound):
            consumer.poll(PATIENCE)


def test_nothing_runs_on_when_a_consumer_is_closed(orders: Book) -> None:
    produce(orders, "orders", 0, "a")
    before = threads_of_consumers()
    consumer = orders.consumer("orders")
    assert len(read(consumer, 1)) == 1
    assert consumer.poll(0.02) == []
    consumer.close()
    consumer.close()
    assert threads_of_consumers() == before
    for use in (consumer.poll, consumer.poll_batches, consumer.until_end, consumer.lag, consumer.__iter__):
        with pytest.raises(ConsumerClosed):
            use()
    assert consumer.position() == {("orders", 0): 1, ("orders", 1): 0}


def test_a_book_that_is_closed_closes_its_consumers(place: Place) -> None:
    book = place.open()
    book.metadata.create_topic("orders")
    alone, member = book.consumer("orders"), book.consumer("orders", "g")
    assert alone.poll(0) == member.poll(0) == []
    book.close()
    for consumer in (alone, member):
        with pytest.raises(ConsumerClosed):
            consumer.poll()
    assert threads_of_consumers() == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@in_a_file
def test_a_consumer_cannot_be_used_in_a_child_that_was_forked(orders: Book) -> None:
    produce(orders, "orders", 0, *range(5))
    with orders.consumer("orders", "g") as consumer:
        assert len(read(consumer, 2)) == 2
        child = os.fork()
        if child == 0:
            code = 1
            try:
                consumer.poll()
            except ConsumerClosed:
                consumer.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert values(read(consumer, 3)) == ["2", "3", "4"]
