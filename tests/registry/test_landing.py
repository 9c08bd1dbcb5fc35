"""Batches of staged rows: they become segments as the topic wants them, each batch once, and nothing is lost unsaid."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

import pyarrow as pa
import pytest

from books import Place
from faulty_stores import PATIENCE, answer_is_lost, failing, half_is_stored, nothing_is_stored
from lake import in_memory, objects, own_warehouse  # noqa: F401
from lakebook import Book
from lakebook.errors import StaleBatch, StorageUnavailable, UploadIncomplete
from lakebook.storage.objects import ObjectStore
from lakebook.streams.merging import merge_topic
from lakebook.streams.staging import Stage, Stager
from segment_logs import log_of
from streaming import land, produce


@pytest.fixture
def orders(book: Book) -> Book:
    book.metadata.create_topic("orders")
    return book


def values(book: Book) -> list[bytes | None]:
    return [value for _, value in log_of(book)]


def counts(book: Book) -> list[int]:
    return [segment.record_count for segment in book.metadata.each_segment("orders", 0)]


# --- segments ------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 3, 40])
def test_segments_of_a_batch_have_no_more_bytes_than_the_topic_wants(orders: Book, tasks: int) -> None:
    sent = [os.urandom(1000) for _ in range(40)]
    orders.metadata.update_topic_config("orders", {"segment.bytes": "4096"})
    land(orders, *[sent[number::tasks] for number in range(tasks)])
    # As those of a producer: what a record weighs beside its value counts too.
    assert counts(orders) == [3] * 13 + [1]
    assert values(orders) == [value for number in range(tasks) for value in sent[number::tasks]]
    with orders.producer("orders", linger=60) as producer:
        producer.send_many([{"value": value} for value in sent])
    assert max(counts(orders)[14:]) == 3
    assert orders.verify().ok


@in_memory
def test_segments_of_a_batch_are_cut_by_bytes_and_by_records_whichever_comes_first(orders: Book) -> None:
    orders.metadata.update_topic_config("orders", {"segment.bytes": "4096", "segment.records": "5"})
    small, large = [b"%d" % number for number in range(12)], [os.urandom(1500) for _ in range(4)]
    land(orders, [*small, *large], small)
    # Two large ones fill a segment, and so do five small ones, also behind a large one.
    assert counts(orders) == [5, 5, 4, 5, 5, 4]
    assert values(orders) == [*small, *large, *small]


@in_memory
def test_a_record_that_is_larger_than_a_segment_has_one_of_its_own(orders: Book) -> None:
    orders.metadata.update_topic_config("orders", {"segment.bytes": "1024"})
    sent = [b"a", os.urandom(5000), os.urandom(5000), b"b", b"c"]
    land(orders, sent)
    assert counts(orders) == [1, 1, 1, 2]
    assert values(orders) == sent


# --- once ----------------------------------------------------------------------


def test_a_repeated_batch_is_left_out_and_that_is_told(orders: Book, caplog: pytest.LogCaptureFixture) -> None:
    assert not land(orders, [b"a"], sink="copies", batch_id=3, of_query=True).duplicate
    assert land(orders, [b"a"], sink="copies", batch_id=3, of_query=True).duplicate
    assert "batch 3 of the sink copies is there already" in caplog.text
    assert not land(orders, [], sink="copies", batch_id=3).duplicate
    assert values(orders) == [b"a"]


def test_a_query_that_begins_anew_under_the_name_of_a_former_one_is_refused(orders: Book) -> None:
    for number in range(3):
        land(orders, [b"%d" % number], sink="copies", batch_id=number, of_query=True)
    with pytest.raises(StaleBatch, match="its last batch is 2, and this one is 0") as caught:
        land(orders, [b"new"], sink="copies", batch_id=0, of_query=True)
    assert "a sink of its own" in caught.value.remedy
    assert values(orders) == [b"0", b"1", b"2"]
    # Nothing but segments is left.
    assert len(objects(orders, "topics")) == 3
    land(orders, [b"new"], sink="copies 2", batch_id=0, of_query=True)
    # Whoever numbers batches by hand may repeat any of them.
    assert land(orders, [b"0"], sink="copies", batch_id=0).duplicate
    assert values(orders) == [b"0", b"1", b"2", b"new"]


# --- what fails ----------------------------------------------------------------


@pytest.mark.parametrize("fault", [half_is_stored, nothing_is_stored, answer_is_lost])
def test_a_batch_whose_segment_is_torn_or_lost_is_not_recorded(orders: Book, fault: Any) -> None:
    failing(orders, fault)
    with pytest.raises(StorageUnavailable if fault is answer_is_lost else UploadIncomplete):
        land(orders, [b"a"], sink="copies", batch_id=0)
    assert values(orders) == []
    # What was staged is left for who gives the batch up.
    assert [path for path in objects(orders, "topics") if not path.endswith(".arrow")] == []
    assert not land(orders, [b"a"], sink="copies", batch_id=0).duplicate
    assert values(orders) == [b"a"]
    assert orders.verify().ok


def test_an_upload_of_a_batch_or_of_a_merge_that_hangs_is_given_up(place: Place) -> None:
    book = place.open(upload_seconds=0.05, merge_quiet=0, merge_segments=2)
    book.metadata.create_topic("orders")
    for value in ("a", "b"):
        produce(book, "orders", 0, value)
    hanging = threading.Event()
    store = failing(book, hanging, hanging)
    try:
        with pytest.raises(StorageUnavailable, match="longer than"):
            land(book, [b"lost"])
        ((_, why),) = merge_topic(book.lake, book.metadata, "orders").failed
        assert "longer than" in why
        assert len(store.tried) == 2
    finally:
        hanging.set()
    assert values(book) == [b"a", b"b"]
    assert len(counts(book)) == 2


class Hanging(ObjectStore):
    """A warehouse in which nothing can be created before its time."""

    def __init__(self, store: ObjectStore, until: threading.Event) -> None:
        super().__init__(store.warehouse)
        self._until = until

    def create(self, path: str, *, durable: bool = True) -> AbstractContextManager[BinaryIO]:
        assert self._until.wait(PATIENCE)
        return super().create(path, durable=durable)


def test_rows_that_cannot_be_staged_in_time_fail_their_task(orders: Book) -> None:
    hanging = threading.Event()
    stage = Stage("orders", 1, "topics/1/s-1", "1", 1, True, 1000, 0.05)
    stager = Stager(Hanging(orders.lake.store, hanging), stage)
    stager.add(pa.table({"value": [b"a"]}), 0)
    try:
        with pytest.raises(StorageUnavailable, match="longer than"):
            stager.finish()
    finally:
        hanging.set()
