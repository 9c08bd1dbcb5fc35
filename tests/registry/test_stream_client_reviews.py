"""Producers and consumers in awkward moments: nobody waits for ever, is told nothing, or loses what he has not got."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from books import POSTGRESQL, SQLITE, Place, describe
from lake import in_memory, own_warehouse, records  # noqa: F401
from lakebook import Book, failpoints
from lakebook.clock import ManualClock
from lakebook.errors import (
    CommitOutcomeUnknown,
    ConsumerClosed,
    FlushTimeout,
    LakebookError,
    OffsetBelowLogStart,
    ProducerClosed,
    RegistryUnavailable,
    TopicNotFound,
    TransientError,
)
from lakebook.registry import schema
from lakebook.storage.objects import ObjectStore
from lakebook.streams import consumer as consumer_module
from lakebook.streams import landing
from lakebook.streams.consumer import Consumer
from lakebook.streams.fetching import PartitionStream
from lakebook.streams.landing import Landing, land_batch, most_record
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.pinning import Pin
from lakebook.streams.positions import Skipped
from lakebook.streams.records import Record
from lakebook.streams.segment_files import store_segment
from lakebook.streams.staging import Stage, Stager
from segment_logs import log_of
from streaming import PATIENCE, in_thread, produce, read, values

GROUP = "billing"
#: Seconds for which a registry is away: for ten of them at the one place where that happens to servers.
AWAY = {SQLITE: 3, POSTGRESQL: 10}


@pytest.fixture
def orders(book: Book) -> Book:
    book.metadata.create_topic("orders", 2)
    return book


def fails_once(patch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
    """Let a method fail at its next call, and work from then on: as when the registry is away for a moment."""
    real = getattr(owner, name)
    left = [error]

    def call(*args: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return real(*args, **named)

    patch.setattr(owner, name, call)


def ends(action: Callable[[], Any]) -> Any:
    """What something returns or raises, if it ends at all."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(action())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert outcome, "it does not end"
    return outcome[0]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


# --- producers -------------------------------------------------------------------


def test_every_batch_of_a_partition_fails_when_the_topic_is_gone(orders: Book) -> None:
    with orders.producer("orders", linger=PATIENCE) as producer:
        held = threading.Event()

        def hold() -> None:
            held.wait(PATIENCE)

        failpoints._armed["produce.stamped"] = hold
        try:
            sent = [producer.send(b"0", partition=0)]
            assert isinstance(ends(lambda: producer.flush(0.01)), Exception)
            for number in range(1, 4):
                sent.append(producer.send(b"%d" % number, partition=0))
                assert isinstance(ends(lambda: producer.flush(0.01)), Exception)
            orders.metadata.delete_topic("orders")
        finally:
            held.set()
            del failpoints._armed["produce.stamped"]
        for one in sent:
            assert isinstance(one.exception(10), TopicNotFound)
        assert isinstance(ends(producer.flush), TopicNotFound)


@in_memory
def test_a_batch_that_waits_behind_one_just_acknowledged_fails_when_the_producer_ends(orders: Book) -> None:
    producer = orders.producer("orders", linger=PATIENCE)
    first = producer.send(b"a", partition=0)
    told, go_on = threading.Event(), threading.Event()

    def slow(_: object) -> None:
        told.set()
        go_on.wait(PATIENCE)

    first.add_done_callback(slow)
    ends(lambda: producer.flush(0.01))
    assert told.wait(PATIENCE)
    second = producer.send(b"b", partition=0)
    with in_thread(lambda: producer.close(0.01)):
        with pytest.raises(ProducerClosed):
            second.result(10)
        go_on.set()


@in_memory
def test_a_callback_that_ends_its_thread_keeps_no_flush_waiting(orders: Book) -> None:
    def leave(_: object) -> None:
        raise SystemExit

    with orders.producer("orders", linger=0) as producer:
        producer.send(b"a", partition=0).add_done_callback(leave)
        assert ends(lambda: producer.flush(10)) is None
        assert producer.send(b"b", partition=0).result(10).offset == 1


def test_a_record_of_which_nobody_knows_is_not_called_unsent_when_the_producer_is_closed(orders: Book) -> None:
    def lose() -> None:
        raise RegistryUnavailable("the answer is lost")

    producer = orders.producer("orders", linger=0)
    failpoints._armed["produce.committed"] = lose
    try:
        sent = producer.send(b"a", partition=0)
        wait_until(lambda: bool(log_of(orders)) and not producer._dispatcher.lanes[0].busy)
        with pytest.raises(FlushTimeout):
            producer.close(0.01)
    finally:
        del failpoints._armed["produce.committed"]
    assert isinstance(sent.exception(10), CommitOutcomeUnknown)


@in_memory
def test_a_registry_that_is_away_is_not_waited_for_once_per_partition(
    orders: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def away(*_: object) -> None:
        asked.append(None)
        raise RegistryUnavailable("away")

    producer = orders.producer("orders", linger=0)
    monkeypatch.setattr(MetadataStore, "release_append", away)
    for one in [producer.send(b"a", partition=number) for number in range(2)]:
        one.result(PATIENCE)
    producer.close()
    assert len(asked) == 1


# --- consumers -------------------------------------------------------------------


def test_partitions_that_are_read_to_their_end_leave_room_for_the_others(orders: Book) -> None:
    produce(orders, "orders", 0, "a")
    for number in range(4):
        produce(orders, "orders", 1, number)
    with orders.consumer("orders", read_ahead=1) as consumer:
        consumer.pause([("orders", 1)])
        assert values(consumer.poll(PATIENCE, max_records=1)) == ["a"]
        consumer.resume()
        found = ends(lambda: list(consumer.until_end()))
    assert values(found) == ["0", "1", "2", "3"]


def test_what_was_not_handed_out_is_not_committed(orders: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    produce(orders, "orders", 0, *range(10))
    consumer = orders.consumer("orders", group=GROUP, max_records=5)
    assert values(read(consumer, 5)) == list("01234")
    with monkeypatch.context() as patch:
        fails_once(patch, consumer_module, "records_of", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            consumer.poll(PATIENCE)
    assert consumer.position()["orders", 0] == 5
    consumer.close()
    assert orders.metadata.get_committed_offset(GROUP, "orders", 0) == 5
    with orders.consumer("orders", group=GROUP) as successor:
        assert values(read(successor, 5)) == list("56789")
        assert successor.skipped == []


def test_a_poll_that_was_interrupted_is_repeated_from_the_same_place(
    orders: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(orders, "orders", 0, *range(10))
    produce(orders, "orders", 0, *range(10, 20))
    with orders.consumer("orders") as consumer:
        with monkeypatch.context() as patch:
            fails_once(patch, consumer_module, "records_of", KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                consumer.poll(PATIENCE)
        assert values(read(consumer, 20)) == [str(number) for number in range(20)]
        assert consumer.skipped == []


def interrupt_after(patch: pytest.MonkeyPatch, consumer: Consumer, meanwhile: Callable[[], Any]) -> None:
    """Interrupt a poll that has taken its records and not handed them out, after something else has happened."""

    def interrupted(*_: Any) -> Any:
        meanwhile()
        raise KeyboardInterrupt

    with patch.context() as patched:
        patched.setattr(consumer_module, "records_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consumer.poll(PATIENCE, max_records=10)
    assert consumer.position()["orders", 0] == 0


@pytest.mark.parametrize("reset", ["error", "earliest"])
def test_records_that_go_before_an_interrupted_poll_is_repeated_are_not_passed_over_in_silence(
    orders: Book, monkeypatch: pytest.MonkeyPatch, reset: str
) -> None:
    for start in (0, 10):
        produce(orders, "orders", 0, *range(start, start + 10))

    def renew_and_remove() -> None:
        # The registry hears that they are read, which they are not yet.
        orders.lake.renewals.renew()
        assert orders.metadata.delete_segments_before("orders", 0, 10) == 1

    with orders.consumer("orders", reset=reset) as consumer:
        consumer.pause([("orders", 1)])
        interrupt_after(monkeypatch, consumer, renew_and_remove)
        if reset == "error":
            for _ in range(2):
                with pytest.raises(OffsetBelowLogStart, match="from 0 to 9 are gone"):
                    consumer.poll(PATIENCE)
            consumer.seek("orders", 0, "beginning")
        assert values(read(consumer, 10)) == [str(number) for number in range(10, 20)]
        assert consumer.skipped == ([] if reset == "error" else [Skipped("orders", 0, 0, 10)])
        assert consumer._reader.readings["orders", 1].paused


@pytest.mark.parametrize("renewed", [True, False], ids=["renewed", "not yet"])
def test_records_of_an_interrupted_poll_are_pinned_before_it_is_repeated(
    orders: Book, monkeypatch: pytest.MonkeyPatch, renewed: bool
) -> None:
    for start in (0, 10):
        produce(orders, "orders", 0, *range(start, start + 10))
    with orders.consumer("orders", group=GROUP, auto_commit=0) as consumer:
        if renewed:
            interrupt_after(monkeypatch, consumer, orders.lake.renewals.renew)
        else:
            # The log start moves over them, and the lease still keeps them.
            interrupt_after(monkeypatch, consumer, lambda: orders.metadata.delete_segments_before("orders", 0, 20))
        first = read(consumer, 1)
        assert orders.metadata.delete_segments_before("orders", 0, 20) == 0
        assert values([*first, *read(consumer, 19)]) == [str(number) for number in range(20)]
        assert consumer.skipped == []
    assert orders.metadata.get_committed_offset(GROUP, "orders", 0) == 20


@in_memory
def test_a_failure_of_one_partition_takes_nothing_from_another(orders: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        produce(orders, "orders", number, *range(5))
    real = PartitionStream.read

    def broken(self: PartitionStream, watermark: int) -> Any:
        if self._partition == 1:
            raise MemoryError("no")
        return real(self, watermark)

    monkeypatch.setattr(PartitionStream, "read", broken)
    with orders.consumer("orders") as consumer:
        assert consumer.poll(0) == []
        ready, broken_one = (consumer._reader.readings["orders", number].stream for number in range(2))
        assert ready is not None and broken_one is not None
        wait_until(lambda: bool(ready.ready) and broken_one.error is not None)
        consumer._reader._served = 1  # The one that can be read is the first.
        assert values(consumer.poll(1)) == list("01234")
        monkeypatch.undo()
        rest: list[Record] = []
        while len(rest) < 5:
            with suppress(MemoryError):  # One more may be waiting to be told.
                rest += consumer.poll(1)
        assert values(rest) == list("01234")


@pytest.mark.parametrize("where", ["join_group", "get_committed_offsets"])
def test_a_member_that_could_not_begin_begins_with_the_next_poll(
    orders: Book, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    produce(orders, "orders", 0, "a")
    with orders.consumer("orders", group=GROUP) as consumer:
        with monkeypatch.context() as patch:
            fails_once(patch, MetadataStore, where, RegistryUnavailable("away"))
            with pytest.raises(RegistryUnavailable):
                consumer.poll(0)
        assert values(consumer.poll(5)) == ["a"]


def test_a_member_that_could_not_give_away_gives_away_with_the_next_poll(
    orders: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    with orders.consumer("orders", group=GROUP) as first, orders.consumer("orders", group=GROUP) as second:
        assert first.poll(0) == [] and second.poll(0) == []
        assert first._member is not None
        first._member.sync()
        with monkeypatch.context() as patch:
            fails_once(patch, Pin, "drop", RegistryUnavailable("away"))
            with pytest.raises(RegistryUnavailable):
                first.poll(0)
        first.poll(0)
        assert second._member is not None
        second._member.sync()
        second.poll(0)
        assert len(second.assignment()) == len(first.assignment()) == 1


def test_what_a_member_gave_away_is_not_pinned_though_the_registry_was_away(
    orders: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    with orders.consumer("orders", group=GROUP) as first, orders.consumer("orders", group=GROUP) as second:
        assert first.poll(0) == [] and second.poll(0) == []
        assert first._member is not None
        first._member.sync()
        with monkeypatch.context() as patch:
            fails_once(patch, type(orders._registry), "write", RegistryUnavailable("away"))
            try:
                first.poll(0)
            except RegistryUnavailable:
                first.poll(0)
        orders.lake.renewals.renew()
        mine = [row for row in records(orders, schema.topic_leases) if row["id"] == first._reader._pin.id]
        assert len(first.assignment()) == len(mine) == 1


def test_a_group_that_began_at_the_end_remembers_that_though_the_registry_was_away(
    orders: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(orders, "orders", 0, "old")
    got: list[Any] = []
    with orders.consumer("orders", group=GROUP, start="end", auto_commit=False, on_assigned=got.extend) as consumer:
        with monkeypatch.context() as patch:
            fails_once(patch, MetadataStore, "commit_offsets", RegistryUnavailable("away"))
            with pytest.raises(RegistryUnavailable):
                consumer.poll(0)
        assert consumer.poll(0) == []
        assert got == [("orders", 0), ("orders", 1)]
        assert orders.metadata.get_committed_offset(GROUP, "orders", 0) == 1


def test_a_topic_of_the_same_name_is_not_read_on(orders: Book) -> None:
    produce(orders, "orders", 0, *range(10))
    with orders.consumer("orders", max_records=4) as consumer:
        assert len(read(consumer, 4)) == 4
        consumer.pause()
        consumer.resume()
        orders.metadata.delete_topic("orders")
        orders.metadata.create_topic("orders", 3)
        produce(orders, "orders", 0, *"abcdefghijkl")
        got = []
        for _ in range(3):
            result = ends(lambda: consumer.poll(1))
            if isinstance(result, Exception):
                got.append(type(result))
            else:
                assert not {"a", "b", "c", "d", "e", "f"} & set(values(result)), values(result)
        assert set(got) == {TopicNotFound}, got


def test_members_hear_that_a_topic_of_the_same_name_is_another(orders: Book) -> None:
    with orders.consumer("orders", group=GROUP) as consumer:
        assert consumer.poll(0) == []
        orders.metadata.delete_topic("orders")
        orders.metadata.create_topic("orders", 2)
        produce(orders, "orders", 0, "a")
        assert consumer._member is not None
        consumer._member.sync()
        for _ in range(3):
            with pytest.raises(TopicNotFound):
                consumer.poll(0.5)


def test_a_loop_does_not_go_on_in_a_child_that_was_forked(orders: Book) -> None:
    produce(orders, "orders", 0, *range(5))
    with orders.consumer("orders", group=GROUP) as consumer:
        loop = iter(consumer)
        assert next(loop).offset == 0
        pid = os.fork()
        if not pid:
            try:
                next(loop)
            except ConsumerClosed:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert next(loop).offset == 1


# --- batches of several partitions -----------------------------------------------


class Meanwhile(ManualClock):
    """A clock at whose next sleep something happens."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Callable[[], object]] = []

    def sleep(self, seconds: float) -> None:
        if self.actions:
            self.actions.pop(0)()
        super().sleep(seconds)


@pytest.mark.parametrize("kept", [False, True], ids=["passed", "kept"])
def test_a_batch_that_loses_a_turn_while_it_waits_for_another_begins_anew(place: Place, kept: bool) -> None:
    clock = Meanwhile()
    book = place.open(clock=clock)
    book.metadata.create_topic("orders", 3)
    book.metadata.claim_append("orders", 2, holder="another", seconds=40)

    def intrude() -> None:
        clock.advance(31)
        turn = book.metadata.claim_append("orders", 0, holder="another", seconds=40)
        result = book.metadata.append_segment(turn, describe(count=5))
        if not kept:
            book.metadata.release_append(result.turn)

    clock.actions.append(intrude)
    assert stage_and_land(book, [0, 1, 2]).record_count == 3
    assert [high_watermark(book, number) for number in range(3)] == [6, 1, 1]


def test_a_batch_that_loses_a_turn_while_it_stores_begins_anew(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    book = place.open(clock=clock)
    book.metadata.create_topic("orders", 2)
    stored: list[str] = []

    def store_and_intrude(store: ObjectStore, path: str, *args: Any, **named: Any) -> Any:
        stored.append(path)
        if len(stored) == 1:
            clock.advance(31)
            turn = book.metadata.claim_append("orders", 1, holder="another", seconds=0.05)
            book.metadata.append_segment(turn, describe(partition=1, count=5))
        return store_segment(store, path, *args, **named)

    monkeypatch.setattr(landing, "store_segment", store_and_intrude)
    assert stage_and_land(book, [0, 1]).record_count == 2
    assert [high_watermark(book, number) for number in range(2)] == [1, 6]
    assert len(stored) == len(set(stored)) == 3


def stage_and_land(book: Book, partitions: list[int]) -> Landing:
    """Land one record in each of some partitions, as one batch."""
    topic = book.topics["orders"].record
    folder = book.metadata.open_stream_folder("orders", "s")
    assert folder.commit_id is not None
    stage = Stage(
        "orders", topic.id, folder.folder, folder.commit_id, topic.partition_count, True, most_record(book.lake, topic)
    )
    stager = Stager(book.lake.store, stage)
    stager.add(pa.table({"value": [b"x"] * len(partitions), "partition": partitions}), book.lake.clock.now_ms())
    return land_batch(book.lake, book.metadata, stage, stager.finish())


def high_watermark(book: Book, number: int) -> int:
    return book.metadata.get_partitions([("orders", number)])["orders", number].high_watermark


# --- a registry that goes away ---------------------------------------------------


@contextmanager
def away(place: Place) -> Iterator[None]:
    """Let nobody use the registry: a server that lets nobody in, or a file that somebody else has locked."""
    if place.kind == SQLITE:
        other, begun, over = place.open(), threading.Event(), threading.Event()

        def work(_: object) -> bool:
            begun.set()
            return over.wait(PATIENCE)

        def hold() -> None:
            other._registry.write(work)

        with in_thread(hold):
            assert begun.wait(PATIENCE)
            try:
                yield
            finally:
                over.set()
        return
    where = psycopg.conninfo.conninfo_to_dict(place.target)
    name = where.pop("dbname")
    with psycopg.connect(**where, dbname="postgres", autocommit=True) as admin:  # type: ignore[arg-type]
        admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            admin.execute("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s", (name,))
            yield
        finally:
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')


def test_a_registry_that_goes_away_for_ten_seconds_loses_and_doubles_nothing(shared_place: Place) -> None:
    book = shared_place.open(retry_attempts=2, outage_seconds=0, lock_timeout=0.1, group_session=0.6)
    book.metadata.create_topic("orders", 2)
    found: list[Record] = []
    failures: list[LakebookError] = []

    def poll(consumer: Consumer) -> None:
        try:
            found.extend(consumer.poll(0.05))
        except LakebookError as error:
            failures.append(error)

    with book.consumer("orders", group=GROUP, auto_commit=0) as consumer, book.producer("orders", linger=0) as producer:
        sent = [producer.send(b"0", partition=number) for number in range(2)]
        while len(found) < 2:
            poll(consumer)
        with away(shared_place):
            begun = time.monotonic()
            sent += [producer.send(b"%d" % number, partition=number % 2) for number in range(1, 21)]
            while len(failures) < 3 or time.monotonic() < begun + AWAY[shared_place.kind]:
                poll(consumer)
            assert not any(one.done() for one in sent[2:])
        while len(found) < 22:
            poll(consumer)
        landed = [one.result(PATIENCE) for one in sent]
    assert all(isinstance(error, TransientError) for error in failures), failures
    expected = sorted((ack.partition, ack.offset) for ack in landed)
    for number in range(2):
        offsets = [record.offset for record in found if record.partition == number]
        assert offsets == [offset for partition, offset in expected if partition == number] == list(range(11))
        assert book.metadata.get_committed_offset(GROUP, "orders", number) == 11
    assert book.verify().ok
