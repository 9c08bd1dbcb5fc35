"""Producers: what is acknowledged is there, once, in order, whatever fails on the way."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, as_completed, wait
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from books import POSTGRESQL, SQLITE, Place, describe
from faulty_stores import (
    Fault,
    answer_is_lost,
    failing,
    half_is_left,
    half_is_stored,
    nothing_is_stored,
    room_for,
)
from lake import in_memory, objects, own_warehouse, records  # noqa: F401
from lakebook import Book, failpoints
from lakebook.clock import ManualClock
from lakebook.errors import (
    BufferFull,
    CommitOutcomeUnknown,
    FlushTimeout,
    InvalidInput,
    InvalidRecord,
    PartitionNotFound,
    ProduceFailed,
    ProducerClosed,
    ProducerFenced,
    RecordTooLarge,
    RegistryUnavailable,
    StorageRefused,
    StorageUnavailable,
    TopicNotFound,
    UploadIncomplete,
)
from lakebook.registry import schema
from lakebook.streams.batching import Acknowledgement, OffsetRange
from lakebook.streams.partitioners import partition_of_key
from lakebook.streams.producer import Producer
from lakebook.streams.records import Record, records_of
from lakebook.streams.segment_files import check_offsets
from segment_logs import log_of

PATIENCE = 60
MOMENT = datetime(2024, 5, 6, 7, 8, 9, 123456, UTC)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def orders(book: Book) -> Book:
    book.metadata.create_topic("orders", 3)
    return book


def produced(book: Book, partition: int = 0, topic: str = "orders") -> list[Record]:
    """Everything a partition holds, as its files have it."""
    found: list[Record] = []
    for segment in book.metadata.each_segment(topic, partition):
        with book.lake.store.open(segment.s3_key) as file:
            rows = pq.read_table(file).combine_chunks()
        assert (rows.num_rows, book.lake.store.size(segment.s3_key)) == (segment.record_count, segment.size_bytes)
        check_offsets(rows, partition, segment.base_offset, segment.s3_key)
        for batch in rows.to_batches():
            found += records_of(topic, batch)
    return found


def values(book: Book, partition: int = 0, topic: str = "orders") -> list[bytes | None]:
    return [value for _, value in log_of(book, topic, partition)]


def acknowledged(*sent: Future[Acknowledgement]) -> list[tuple[int, int]]:
    return [(ack.partition, ack.offset) for ack in (one.result(PATIENCE) for one in sent)]


def as_time_passes(clock: ManualClock, sent: Future[Acknowledgement]) -> tuple[int, int]:
    """Where a record is, after pauses between two tries."""
    for _ in range(100 * PATIENCE):
        try:
            ack = sent.result(0.01)
        except TimeoutError:
            clock.advance(0.01)
        else:
            return ack.partition, ack.offset
    raise AssertionError("it is not acknowledged")


def check(book: Book) -> None:
    checked = book.verify()
    assert checked.ok, checked.findings


# --- records -------------------------------------------------------------------


def test_a_record_comes_back_as_it_was_sent(orders: Book) -> None:
    east = MOMENT.astimezone(timezone(timedelta(hours=9)))
    with orders.producer("orders") as producer:
        sent = [
            producer.send(b"\x00\xff", b"key", headers=[("a", b"1"), ("a", None)], timestamp=east, partition=1),
            producer.send("käse", "schlüssel", headers={"b": "text"}, partition=1),
            producer.send(None, "gone", partition=1),
            producer.send(bytearray(b"x"), partition=1),
        ]
    acks = [one.result(0) for one in sent]
    first, second, third, fourth = produced(orders, 1)
    truncated = MOMENT.replace(microsecond=123000)
    assert first == Record("orders", 1, 0, truncated, b"key", b"\x00\xff", (("a", b"1"), ("a", None)))
    assert acks[0] == Acknowledgement("orders", 1, 0, truncated)
    assert (second.key, second.value, second.headers) == ("schlüssel".encode(), "käse".encode(), (("b", b"text"),))
    assert (third.value, third.headers, fourth.value) == (None, (), b"x")
    assert [ack.timestamp for ack in acks] == [record.timestamp for record in produced(orders, 1)]
    check(orders)


def test_records_of_a_key_land_where_kafka_puts_them_and_in_order(orders: Book) -> None:
    keys = [b"21", b"foobar", b"abc", b"a-little-bit-long-string"]
    with orders.producer("orders") as producer:
        sent = [producer.send(b"%d" % number, keys[number % 4]) for number in range(40)]
    for number, ack in enumerate(one.result(0) for one in sent):
        assert ack.partition == partition_of_key(keys[number % 4], 3)
    for partition in range(3):
        found = produced(orders, partition)
        assert [record.offset for record in found] == list(range(len(found)))
        for key in keys:
            mine = [int(record.value or b"") for record in found if record.key == key]
            assert mine == sorted(mine)
    check(orders)


@in_memory
def test_records_without_a_key_gather_in_one_partition_until_their_batch_is_complete(orders: Book) -> None:
    orders.metadata.update_topic_config("orders", {"segment.records": "10"})
    with orders.producer("orders", linger=60) as producer:
        sent = producer.send_many(b"%d" % number for number in range(100))
        producer.flush()
        runs = [{ack.partition for ack in (one.result(0) for one in sent[at : at + 10])} for at in range(0, 100, 10)]
        assert all(len(run) == 1 for run in runs)
        assert all(before != after for before, after in pairwise(runs))
    # With the sticky partitioner those with a key too.
    with orders.producer("orders", linger=60, partitioner="sticky") as producer:
        sent = [producer.send(b"x", b"key %d" % number) for number in range(10)]
    assert len({one.result(0).partition for one in sent}) == 1


def test_a_table_is_sent_without_an_object_per_record(orders: Book) -> None:
    table = pa.table(
        {
            "value": pa.array([f"value {number}" for number in range(1000)]),
            "key": pa.array([f"key {number % 7}" if number % 3 else None for number in range(1000)], pa.large_string()),
            "timestamp": pa.array([MOMENT, None] * 500, pa.timestamp("ns", "Europe/Paris")),
            "headers": pa.array([[{"key": "n", "value": b"%d" % number}] for number in range(1000)]),
            "partition": pa.array([2 if number == 5 else None for number in range(1000)], pa.int64()),
        }
    )
    with orders.producer("orders", linger=0.01) as producer:
        ranges = producer.send_table(table).result(PATIENCE)
        assert producer.send_table(table.slice(0, 0)).result(0) == ()
    assert sum(item.record_count for item in ranges) == 1000
    found = {record.value: record for partition in range(3) for record in produced(orders, partition)}
    assert len(found) == 1000
    for item in ranges:
        there = [record for record in found.values() if record.partition == item.partition]
        assert {*range(item.base_offset, item.end_offset + 1)} <= {record.offset for record in there}
    for number in range(1000):
        record = found[b"value %d" % number]
        assert record.headers == (("n", b"%d" % number),)
        assert record.key == (f"key {number % 7}".encode() if number % 3 else None)
        if record.key is not None and number != 5:
            assert record.partition == partition_of_key(record.key, 3)
        if number % 2 == 0:
            assert record.timestamp == MOMENT.replace(microsecond=123000)
    assert found[b"value 5"].partition == 2
    for partition in range(3):
        numbers = [int((record.value or b"")[6:]) for record in produced(orders, partition) if record.key]
        assert numbers == sorted(numbers)
    check(orders)


def test_many_records_are_sent_at_once_or_not_at_all(orders: Book) -> None:
    with orders.producer("orders") as producer:
        with pytest.raises(InvalidRecord):
            producer.send_many([b"good", {"value": b"bad", "colour": b"red"}])
        with pytest.raises(InvalidRecord):
            producer.send_many([b"good", 7])  # type: ignore[list-item]
        sent = producer.send_many([b"a", "b", None, {"value": b"d", "key": b"21", "partition": 0}])
        producer.flush()
    assert acknowledged(*sent)[3][0] == 0
    assert sum(len(values(orders, partition)) for partition in range(3)) == 4


NO_RECORDS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((7,), {}),
    (({"a": 1},), {}),
    ((b"x", 1.5), {}),
    (("\ud800",), {}),
    ((b"x",), {"headers": "text"}),
    ((b"x",), {"headers": [("a", 1)]}),
    ((b"x",), {"headers": [(1, b"a")]}),
    ((b"x",), {"headers": [b"abc"]}),
    ((b"x",), {"headers": 5}),
    ((b"x",), {"timestamp": datetime(2024, 1, 1)}),  # noqa: DTZ001 - that is what is wrong with it
    ((b"x",), {"timestamp": 1_700_000_000_000}),
]


@in_memory
def test_what_is_no_record_is_refused(orders: Book) -> None:
    with orders.producer("orders") as producer:
        for arguments, more in NO_RECORDS:
            with pytest.raises(InvalidRecord) as caught:
                producer.send(*arguments, **more)
            assert "Give " in caught.value.remedy
    assert [values(orders, partition) for partition in range(3)] == [[], [], []]


NO_TABLES: list[dict[str, Any]] = [
    {"key": ["a"]},
    {"value": ["a"], "offset": [1]},
    {"value": [1]},
    {"value": ["a"], "key": [1.5]},
    {"value": ["a"], "timestamp": pa.array([datetime(2024, 1, 1)], pa.timestamp("us"))},  # noqa: DTZ001
    {"value": ["a"], "timestamp": pa.array([2**62], pa.timestamp("us", "UTC"))},
    {"value": ["a"], "timestamp": [1]},
    {"value": ["a"], "headers": ["a"]},
    {"value": ["a"], "headers": [[{"key": None, "value": b"x"}]]},
    {"value": ["a"], "headers": [[{"name": "x"}]]},
    {"value": ["a"], "partition": ["one"]},
    {"value": ["a"], "partition": [2**40]},
]


@in_memory
def test_a_table_that_holds_no_records_is_refused(orders: Book) -> None:
    with orders.producer("orders") as producer:
        for columns in NO_TABLES:
            with pytest.raises(InvalidRecord):
                producer.send_table(pa.table(columns))
        with pytest.raises(InvalidRecord):
            producer.send_table(NO_TABLES)
    assert [values(orders, partition) for partition in range(3)] == [[], [], []]


@in_memory
def test_a_partition_that_is_not_there_is_refused(orders: Book) -> None:
    with orders.producer("orders") as producer:
        for number in (3, -1, "0", True):
            with pytest.raises(PartitionNotFound):
                producer.send(b"x", partition=number)  # type: ignore[arg-type]
        with pytest.raises(PartitionNotFound):
            producer.send_table(pa.table({"value": ["a", "b"], "partition": [0, 3]}))
    assert [values(orders, partition) for partition in range(3)] == [[], [], []]


@in_memory
def test_a_record_that_is_too_large_is_refused_alone(orders: Book) -> None:
    orders.metadata.update_topic_config("orders", {"max.message.bytes": "100"})
    with orders.producer("orders", partitioner="sticky") as producer:
        for size, headers in ((101, ()), (90, {"ten": "abcdefgh"})):
            with pytest.raises(RecordTooLarge):
                producer.send(b"x" * size, headers=headers)
        given = [[{"key": "ten", "value": b"abcdefgh"}], None]
        with pytest.raises(RecordTooLarge):
            producer.send_table(pa.table({"value": [b"x" * 90, b"x"], "headers": given}))
        sent = [producer.send(b"x" * 100), producer.send(b"x" * 90, b"0123456789")]
        assert producer.send_table(pa.table({"value": [b"x" * 100]})).result(PATIENCE)
    assert all(one.result(0) for one in sent)
    with orders.producer("orders", buffer=50) as producer, pytest.raises(RecordTooLarge):
        producer.send(b"x" * 51)


# --- segments ------------------------------------------------------------------


def test_segments_roll_by_their_number_of_records_and_by_their_size(orders: Book) -> None:
    orders.metadata.update_topic_config("orders", {"segment.records": "10"})
    with orders.producer("orders", linger=60) as producer:
        for number in range(35):
            producer.send(b"%d" % number, partition=0)
        producer.send_table(pa.table({"value": [b"%d" % number for number in range(35, 70)], "partition": [0] * 35}))
    assert [segment.record_count for segment in orders.metadata.get_segments("orders", 0)] == [10] * 7
    assert values(orders) == [b"%d" % number for number in range(70)]
    orders.metadata.update_topic_config("orders", {"segment.records": None, "segment.bytes": "4096"})
    with orders.producer("orders", linger=60) as producer:
        for _ in range(20):
            producer.send(b"x" * 1000, partition=1)
        producer.send_table(pa.table({"value": [b"x" * 1000] * 20, "partition": [1] * 20}))
    counts = [segment.record_count for segment in orders.metadata.get_segments("orders", 1)]
    assert sum(counts) == 40
    assert max(counts) == 3
    check(orders)


def test_a_segment_is_stored_when_its_time_has_come_though_nothing_more_arrives(orders: Book) -> None:
    orders.metadata.update_topic_config("orders", {"segment.ms": "30"})
    with orders.producer("orders") as producer:
        sent = [producer.send(b"a", partition=0), producer.send(b"b", partition=0)]
        assert acknowledged(*sent) == [(0, 0), (0, 1)]
        assert acknowledged(producer.send(b"c", partition=0)) == [(0, 2)]
    assert [segment.record_count for segment in orders.metadata.get_segments("orders", 0)] == [2, 1]


def test_a_segment_knows_who_wrote_it(orders: Book) -> None:
    with orders.producer("orders", producer_id="till 7", compression="gzip") as producer:
        for value in (b"a", b"bc"):
            producer.send(value, partition=2).result(PATIENCE)
    first, second = orders.metadata.get_segments("orders", 2)
    assert (first.producer_id, first.producer_epoch) == ("till 7", 0)
    assert [(item.first_sequence, item.last_sequence) for item in (first, second)] == [(0, 0), (1, 1)]
    with orders.lake.store.open(second.s3_key) as file:
        metadata = pq.read_metadata(file)
    topic = orders.metadata.get_topic("orders")
    assert topic is not None
    told = {key.decode(): value.decode() for key, value in metadata.metadata.items() if key.startswith(b"lakebook.")}
    assert told == {
        "lakebook.topic_id": str(topic.id),
        "lakebook.partition": "2",
        "lakebook.base_offset": "1",
        "lakebook.producer_id": "till 7",
        "lakebook.producer_epoch": "0",
        "lakebook.first_sequence": "1",
        "lakebook.last_sequence": "1",
    }
    assert metadata.row_group(0).column(4).compression == "GZIP"
    assert second.s3_key.startswith(f"topics/{topic.id}/2/t1/")
    assert {row["file_path"] for row in records(orders, schema.partition_metadata)} == {first.s3_key, second.s3_key}


@in_memory
def test_a_topic_may_want_the_time_of_the_append(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders", config={"message.timestamp.type": "LogAppendTime"})
    with book.producer("orders", linger=0) as producer:
        given = [producer.send(b"a", timestamp=MOMENT), producer.send(b"b")]
        producer.send_table(pa.table({"value": ["c"], "timestamp": [MOMENT]})).result(PATIENCE)
        producer.flush()
    now = datetime.fromtimestamp(clock.now_ms() / 1000, UTC)
    assert {record.timestamp for record in produced(book)} == {one.result(0).timestamp for one in given} == {now}


# --- turns ---------------------------------------------------------------------


def test_a_producer_alone_takes_the_turn_once_and_gives_it_back_at_the_end(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders")
    with book.producer("orders", linger=0) as producer:
        for _ in range(5):
            producer.send(b"x").result(PATIENCE)
        assert book.metadata.get_segments("orders", 0)[-1].end_offset == 4
        (turn,) = records(book, schema.append_turns)
        assert (turn["token"], turn["holder"]) == (1, producer.producer_id)
    (turn,) = records(book, schema.append_turns)
    assert (turn["token"], turn["holder"]) == (1, None)
    assert book.measure().values()["lakebook_open_commits"] == 0


def test_two_producers_share_a_partition_by_turns(orders: Book) -> None:
    with orders.producer("orders", linger=0) as one, orders.producer("orders", linger=0) as two:
        for number in range(20):
            sent = [producer.send(f"{name} {number}", partition=0) for producer, name in ((one, "one"), (two, "two"))]
            acknowledged(*sent)
    found = [(value or b"").decode().split() for value in values(orders)]
    for name in ("one", "two"):
        assert [int(number) for who, number in found if who == name] == list(range(20))
    check(orders)


@contextmanager
def once(point: str, action: Callable[[], None]) -> Iterator[None]:
    """Do something the first time that a point is reached by a producer's thread."""
    left = [action]

    def act() -> None:
        if left and threading.current_thread().name.startswith("lakebook-producer"):
            left.pop()()

    with failpoints.armed(point, act):
        yield
    assert not left


def assert_in_time(event: threading.Event) -> None:
    assert event.wait(PATIENCE)


def fail() -> None:
    raise RegistryUnavailable("it is away", on="registry")


@pytest.mark.parametrize("point", ["produce.stamped", "produce.stored"])
def test_a_producer_that_was_frozen_past_its_turn_stamps_its_records_anew(
    place: Place, clock: ManualClock, point: str
) -> None:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders")

    def freeze() -> None:
        clock.advance(31)
        turn = book.metadata.claim_append("orders", 0, holder="another")
        result = book.metadata.append_segment(turn, describe(base=1, count=5))
        book.metadata.release_append(result.turn)

    with book.producer("orders", linger=0) as producer:
        assert acknowledged(producer.send(b"a")) == [(0, 0)]
        with once(point, freeze):
            assert acknowledged(producer.send(b"b"), producer.send(b"c"))[0] == (0, 6)
        producer.flush()
    last = [segment for segment in book.metadata.get_segments("orders", 0) if segment.producer_id is not None]
    assert [segment.base_offset for segment in last][:2] == [0, 6]
    assert "/t3/" in last[1].s3_key
    check(book)


def test_a_segment_that_somebody_recorded_by_hand_makes_the_producer_stamp_anew(orders: Book) -> None:
    with orders.producer("orders", linger=0) as producer:
        assert acknowledged(producer.send(b"a", partition=0)) == [(0, 0)]
        orders.metadata.add_segment(describe(base=1, count=5))
        assert acknowledged(producer.send(b"b", partition=0)) == [(0, 6)]
    check(orders)


# --- what fails ----------------------------------------------------------------


def test_a_batch_whose_acknowledgement_was_lost_is_acknowledged_once_and_there_once(orders: Book) -> None:
    with orders.producer("orders", linger=0) as producer:
        with once("produce.committed", fail):
            assert acknowledged(producer.send(b"a", partition=0)) == [(0, 0)]
        assert acknowledged(producer.send(b"b", partition=0)) == [(0, 1)]
    assert values(orders) == [b"a", b"b"]
    assert orders.metrics.values()["lakebook_produce_retries_total{reason=registry_unavailable}"] == 1
    check(orders)


@pytest.mark.parametrize("gone", [False, True], ids=["there", "removed"])
def test_a_batch_that_landed_before_the_turn_was_lost_is_found_by_its_sequence(
    place: Place, clock: ManualClock, gone: bool
) -> None:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders", config={"message.timestamp.type": "LogAppendTime"})

    def lose() -> None:
        clock.advance(31)
        turn = book.metadata.claim_append("orders", 0, holder="another")
        result = book.metadata.append_segment(turn, describe(base=2, count=5))
        book.metadata.release_append(result.turn)
        if gone:
            book.metadata.delete_segments_before("orders", 0, 7)
        fail()

    with book.producer("orders", linger=0) as producer:
        producer.send(b"a").result(PATIENCE)
        with once("produce.committed", lose):
            assert as_time_passes(clock, producer.send(b"b")) == (0, 1)
        assert acknowledged(producer.send(b"c")) == [(0, 7)]
    ours = [segment for segment in book.metadata.get_segments("orders", 0) if segment.producer_id is not None]
    assert [(segment.base_offset, segment.first_sequence) for segment in ours] == [(0, 0), (1, 1), (7, 2)][2 * gone :]
    check(book)


@pytest.mark.parametrize("point", ["produce.committed", "transaction.before_commit"])
def test_a_batch_that_was_given_up_in_doubt_leaves_no_hole_and_no_double(
    place: Place, clock: ManualClock, point: str
) -> None:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders")
    with book.producer("orders", linger=0, timeout=10) as producer:
        producer.send(b"a").result(PATIENCE)

        def give_up() -> None:
            clock.advance(11)
            fail()

        with once(point, give_up):
            doubtful = producer.send(b"b")
            with pytest.raises(CommitOutcomeUnknown, match="1 records"):
                doubtful.result(PATIENCE)
        # The same number of records, so that they could be taken for the former.
        sent = producer.send(b"c")
        landed = point == "produce.committed"
        assert acknowledged(sent) == [(0, 2 if landed else 1)]
        with pytest.raises(CommitOutcomeUnknown):
            producer.flush()
    assert values(book) == ([b"a", b"b", b"c"] if landed else [b"a", b"c"])
    check(book)


def test_records_that_could_not_be_stored_are_kept_and_stored_elsewhere_in_order(orders: Book) -> None:
    store = failing(orders, StorageUnavailable("no"), StorageRefused("full"), MemoryError())
    with orders.producer("orders", linger=0) as producer:
        sent = [producer.send(b"%d" % number, partition=0) for number in range(50)]
    assert acknowledged(*sent) == [(0, number) for number in range(50)]
    assert values(orders) == [b"%d" % number for number in range(50)]
    assert len(set(store.tried)) == len(store.tried) >= 4
    check(orders)


@pytest.mark.parametrize("fault", [half_is_left, answer_is_lost, half_is_stored, nothing_is_stored])
def test_records_of_a_torn_or_vanished_upload_are_stored_elsewhere_before_they_are_acknowledged(
    orders: Book, fault: Fault
) -> None:
    store = failing(orders, fault)
    with orders.producer("orders", linger=0) as producer:
        assert acknowledged(producer.send(b"a", partition=0)) == [(0, 0)]
        assert acknowledged(producer.send(b"b", partition=0)) == [(0, 1)]
    torn, *sound = store.tried
    segments = orders.metadata.get_segments("orders", 0)
    assert [segment.s3_key for segment in segments] == sound
    assert [record.value for record in produced(orders)] == [b"a", b"b"]
    check(orders)
    # What is left of the torn one counts for nobody, and goes with its folder.
    orders.lake.store.delete_one(torn)
    check(orders)


def test_an_upload_that_was_torn_without_a_word_is_told_by_its_own_error(orders: Book) -> None:
    failing(orders, *[half_is_stored, nothing_is_stored] * 5000)
    with orders.producer("orders", linger=0, timeout=0.2) as producer:
        with pytest.raises(ProduceFailed, match="UploadIncomplete") as caught:
            producer.send(b"a", partition=0).result(PATIENCE)
        assert isinstance(caught.value.__cause__, UploadIncomplete)
        with pytest.raises(ProduceFailed):
            producer.flush()
    assert values(orders) == []


def flush_in_vain(book: Book, producer: Producer) -> set[str]:
    """Wait for what cannot be stored, until it was tried again and again; for which reasons it was."""
    for _ in range(100 * PATIENCE):
        with pytest.raises(FlushTimeout):
            producer.flush(0.01)
        counted = book.metrics.values().items()
        retries = {name: number for name, number in counted if name.startswith("lakebook_produce_retries_total")}
        if sum(retries.values()) >= 2:
            return {name.partition("=")[2].rstrip("}") for name in retries}
    raise AssertionError("it is not tried again")


@pytest.mark.parametrize("place", [SQLITE, POSTGRESQL], indirect=True)
def test_records_wait_for_room_on_a_full_disk(orders: Book) -> None:
    value = os.urandom(6_000_000)
    with orders.producer("orders", linger=0) as producer:
        # The registry's own files are smaller than that, and the server is another process.
        with room_for(5_000_000):
            sent = producer.send(value, partition=0)
            assert flush_in_vain(orders, producer) == {"storage_refused"}
            assert not sent.done()
            assert acknowledged(producer.send(b"small", partition=1)) == [(1, 0)]
        assert acknowledged(sent, producer.send(b"after", partition=0)) == [(0, 0), (0, 1)]
    assert values(orders) == [value, b"after"]
    # Nothing but the segments is left.
    live = [part.s3_key for number in range(3) for part in orders.metadata.get_segments("orders", number)]
    assert objects(orders) == sorted(live)
    check(orders)


@pytest.mark.parametrize("place", [SQLITE], indirect=True)
def test_records_wait_for_room_on_the_disk_of_the_registry(place: Place) -> None:
    orders = place.open(retry_attempts=2, retry_seconds=0.1)
    orders.metadata.create_topic("orders", 3)
    with orders.producer("orders", linger=0) as producer:
        assert acknowledged(producer.send(b"a", partition=0)) == [(0, 0)]
        # A segment with one small record finds room; a transaction, which writes several pages, does not.
        with room_for(8000):
            sent = producer.send(b"b", partition=0)
            assert flush_in_vain(orders, producer) <= {"commit_outcome_unknown", "registry_unavailable"}
            assert not sent.done()
        assert acknowledged(sent, producer.send(b"c", partition=0)) == [(0, 1), (0, 2)]
    assert values(orders) == [b"a", b"b", b"c"]
    check(orders)


def test_records_that_cannot_be_stored_in_time_fail_and_those_after_them_land(orders: Book) -> None:
    store = failing(orders, *[StorageUnavailable("no")] * 10_000)
    with orders.producer("orders", linger=0, timeout=0.2) as producer:
        failed = producer.send(b"a", partition=0)
        with pytest.raises(ProduceFailed, match="StorageUnavailable") as caught:
            failed.result(PATIENCE)
        assert isinstance(caught.value.__cause__, StorageUnavailable)
        with pytest.raises(ProduceFailed):
            producer.flush()
        store.faults.clear()
        assert acknowledged(producer.send(b"b", partition=0)) == [(0, 0)]
        table = pa.table({"value": [b"c"], "partition": [0]})
        assert producer.send_table(table).result(PATIENCE) == (OffsetRange("orders", 0, 1, 1),)
    (first, _) = orders.metadata.get_segments("orders", 0)
    assert first.first_sequence == 0
    check(orders)


def test_an_upload_that_hangs_is_given_up_and_what_it_stores_late_counts_for_nobody(place: Place) -> None:
    book = place.open(upload_seconds=0.05)
    book.metadata.create_topic("orders")
    hanging = threading.Event()
    store = failing(book, hanging)
    with book.producer("orders", linger=0) as producer:
        assert acknowledged(producer.send(b"a")) == [(0, 0)]
        hanging.set()
        for _ in range(1_000_000):
            if len(objects(book)) == 2:
                break
    assert sorted(store.tried) == objects(book)
    assert values(book) == [b"a"]
    check(book)


@pytest.mark.parametrize("place", [SQLITE], indirect=True)
def test_a_file_in_the_place_of_the_folder_is_waited_for_to_be_removed(orders: Book, tmp_path: Path) -> None:
    blocked = tmp_path / "book" / "warehouse" / "topics"
    blocked.write_text("in the way")
    with orders.producer("orders", linger=0) as producer:
        sent = producer.send(b"a", partition=0)
        with pytest.raises(FlushTimeout):
            producer.flush(0.1)
        blocked.unlink()
        assert acknowledged(sent) == [(0, 0)]
    check(orders)


@in_memory
def test_a_full_buffer_makes_senders_wait_until_there_is_room_again(orders: Book) -> None:
    gate = threading.Event()
    failing(orders, gate)
    producer = orders.producer("orders", linger=0, buffer=2000)
    first = producer.send(b"x" * 1500, partition=0)
    waiting = threading.Thread(target=lambda: producer.send(b"y" * 1500, partition=0))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert not first.done()
    gate.set()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    producer.close()
    assert [len(value or b"") for value in values(orders)] == [1500, 1500]


@in_memory
def test_whoever_waits_too_long_for_room_is_told_so(orders: Book) -> None:
    gate = threading.Event()
    producer = orders.producer("orders", linger=0, buffer=2000, timeout=0.2)
    with once("produce.stored", lambda: assert_in_time(gate)):
        first = producer.send(b"x" * 1500, partition=0)
        with pytest.raises(BufferFull) as caught:
            producer.send(b"y" * 1500, partition=0)
        assert caught.value.transient
        many = producer.send_many([{"value": b"z" * 1500, "partition": 0}] * 2)
        assert [type(one.exception(PATIENCE)) for one in many] == [BufferFull] * 2
        table = producer.send_table(pa.table({"value": [b"z" * 1500], "partition": [0]}))
        assert isinstance(table.exception(PATIENCE), BufferFull)
        gate.set()
        # It was in time, and under way: it is not given up in the middle.
        assert acknowledged(first) == [(0, 0)]
    producer.close()
    assert len(values(orders)) == 1


# --- fences and ends -----------------------------------------------------------


def test_a_restarted_producer_fences_the_former_and_takes_its_turn_over(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders")
    old = book.producer("orders", producer_id="till", linger=0)
    assert acknowledged(old.send(b"a")) == [(0, 0)]
    with book.producer("orders", producer_id="till", linger=0) as new:
        assert (old.epoch, new.epoch) == (0, 1)
        # No time has passed: the turn of the former is not waited for.
        assert acknowledged(new.send(b"b")) == [(0, 1)]
        late = old.send(b"late")
        with pytest.raises(ProducerFenced):
            late.result(PATIENCE)
        with pytest.raises(ProducerFenced):
            old.send(b"later")
        with pytest.raises(ProducerFenced):
            old.close()
        old.close()
        assert acknowledged(new.send(b"c")) == [(0, 2)]
    assert values(book) == [b"a", b"b", b"c"]
    check(book)


def test_records_for_a_topic_that_was_deleted_fail_and_do_not_land_in_its_namesake(orders: Book) -> None:
    producer = orders.producer("orders", linger=60)
    pending = [producer.send(b"a", partition=number) for number in range(3)]
    orders.metadata.delete_topic("orders")
    orders.metadata.create_topic("orders", 3)
    with pytest.raises(TopicNotFound):
        producer.flush()
    assert all(isinstance(one.exception(PATIENCE), TopicNotFound) for one in pending)
    with pytest.raises(TopicNotFound):
        producer.send(b"b")
    producer.close()
    assert [values(orders, number) for number in range(3)] == [[], [], []]
    with pytest.raises(TopicNotFound):
        orders.producer("payments")
    check(orders)


def test_a_topic_that_is_deleted_while_a_turn_is_held_ends_the_producer(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders")
    producer = book.producer("orders", linger=0)
    producer.send(b"a").result(PATIENCE)
    book.metadata.delete_topic("orders")
    with pytest.raises(TopicNotFound):
        producer.send(b"b").result(PATIENCE)
    with pytest.raises(TopicNotFound):
        producer.close()
    check(book)


@in_memory
def test_a_topic_that_has_grown_is_noticed(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders", 1)
    with book.producer("orders", linger=0) as producer:
        assert acknowledged(producer.send(b"a", b"21")) == [(0, 0)]
        book.metadata.grow_topic("orders", 8)
        assert acknowledged(producer.send(b"b", partition=7)) == [(7, 0)]
        assert producer.send(b"c", b"21").result(PATIENCE).partition == partition_of_key(b"21", 8)
        book.metadata.grow_topic("orders", 100)
        clock.advance(6)
        producer.send(b"d", b"21").result(PATIENCE)
        assert producer.send(b"e", b"21").result(PATIENCE).partition == partition_of_key(b"21", 100)


@in_memory
def test_a_closed_producer_takes_nothing_more(orders: Book) -> None:
    producer = orders.producer("orders", linger=60)
    sent = producer.send(b"a", partition=0)
    producer.close()
    producer.close()
    assert acknowledged(sent) == [(0, 0)]
    for send in (lambda: producer.send(b"b"), lambda: producer.send_many([b"b"])[0].result(0)):
        with pytest.raises(ProducerClosed):
            send()
    assert isinstance(producer.send_table(pa.table({"value": [b"b"]})).exception(0), ProducerClosed)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lakebook-producer")]


def test_a_book_that_is_closed_sends_what_its_producers_hold(place: Place, make_place: Callable[..., Place]) -> None:
    book = place.open()
    book.metadata.create_topic("orders", 2)
    producer = book.producer("orders", linger=60)
    sent = [producer.send(b"a", partition=number) for number in range(2)]
    book.close()
    assert acknowledged(*sent) == [(0, 0), (1, 0)]
    with pytest.raises(ProducerClosed):
        producer.send(b"b")


@in_memory
def test_a_block_that_fails_does_not_wait_for_ever(orders: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakebook.streams.producer._PARTING", 0.1)
    gate = threading.Event()
    store = failing(orders, gate)
    sent: list[Future[Acknowledgement]] = []

    def break_off() -> None:
        with orders.producer("orders", linger=0) as producer:
            sent.append(producer.send(b"a", partition=0))
            for _ in range(1_000_000):
                if store.tried:
                    break
            sent.append(producer.send(b"b", partition=0))
            threading.Timer(0.3, gate.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        break_off()
    first, second = sent
    assert "FlushTimeout" in caught.value.__notes__[0]
    # What is under way may still land; what is not is told so.
    assert first.exception(PATIENCE) is None
    assert isinstance(second.exception(PATIENCE), ProducerClosed)
    assert values(orders) == [b"a"]


@in_memory
def test_what_is_sent_can_be_waited_for_like_any_future(orders: Book) -> None:
    with orders.producer("orders", linger=0.02) as producer:
        sent = [producer.send(b"%d" % number, partition=number % 2) for number in range(10)]
        assert not any(one.cancel() for one in sent)
        with pytest.raises(TimeoutError):
            producer.send(b"x").result(0)
        done, left = wait(sent, timeout=PATIENCE)
        assert (done, left) == (set(sent), set())
        again = [producer.send(b"y") for _ in range(3)]
        assert {one.result(0).offset for one in as_completed(again, PATIENCE)}
        called: list[Any] = []
        heard = threading.Event()
        one = producer.send(b"z", partition=0)
        one.add_done_callback(lambda future: 1 / 0)
        one.add_done_callback(lambda future: called.append(producer.send(b"from a callback", partition=1)))
        one.add_done_callback(lambda future: heard.set())
        assert heard.wait(PATIENCE)
        one.add_done_callback(called.append)
        assert called[1] is one
        assert called[0].result(PATIENCE).partition == 1

        async def awaited() -> Acknowledgement:
            return await asyncio.wrap_future(producer.send(b"awaited", partition=2))

        assert asyncio.run(awaited()).partition == 2


@in_memory
def test_a_callback_may_not_wait_for_its_own_producer(orders: Book) -> None:
    caught: list[Exception] = []
    heard = threading.Event()

    def wait_for_all(future: Any) -> None:
        try:
            producer.flush()
        except InvalidInput as error:
            caught.append(error)
        heard.set()

    with orders.producer("orders", linger=0.01) as producer:
        producer.send(b"a").add_done_callback(wait_for_all)
        assert heard.wait(PATIENCE)
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("place", [SQLITE], indirect=True)
def test_a_producer_cannot_be_used_in_a_child_that_was_forked(orders: Book) -> None:
    with orders.producer("orders", linger=60) as producer:
        sent = producer.send(b"a", partition=0)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                producer.send(b"b")
            except ProducerClosed:
                try:
                    producer.flush()
                except ProducerClosed:
                    producer.close()
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert acknowledged(sent) == [(0, 0)]
    assert values(orders) == [b"a"]


@in_memory
def test_options_that_make_no_sense_are_refused(orders: Book) -> None:
    for options in (
        {"partitioner": "random"},
        {"linger": -1},
        {"linger": "soon"},
        {"buffer": 0},
        {"timeout": float("nan")},
        {"compression": "rar"},
        {"producer_id": "ü"},
    ):
        with pytest.raises(InvalidInput):
            orders.producer("orders", **options)


@in_memory
def test_what_was_produced_is_counted(orders: Book) -> None:
    with orders.producer("orders") as producer:
        producer.send_many([b"x" * 10] * 5)
    values_of = orders.metrics.values()
    assert values_of["lakebook_produced_records_total"] == 5
    assert values_of["lakebook_produced_bytes_total"] == 50


@in_memory
def test_a_producer_says_who_it_is(orders: Book) -> None:
    with orders.producer("orders", producer_id="me") as producer:
        assert repr(producer) == "Producer('orders', producer_id='me')"
        assert isinstance(producer, Producer)
