"""Records for the tests of streams, written without a producer, and what reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from uuid import uuid4

import pyarrow as pa

from lakebook import Book, SegmentInfo
from lakebook.clock import to_datetime
from lakebook.streams.consumer import Consumer
from lakebook.streams.landing import Landing, land_batch, most_record
from lakebook.streams.records import Record
from lakebook.streams.segment_files import CONTENT_SCHEMA, stamped, store_segment
from lakebook.streams.staging import Stage, Stager

PATIENCE = 60


def produce(
    book: Book,
    topic: str,
    partition: int,
    *values: bytes | str | int,
    times: Sequence[datetime] | None = None,
    footer: bool = True,
) -> SegmentInfo:
    """Append records to a partition as one segment, and say which it is."""
    turn = book.metadata.claim_append(topic, partition, holder=f"test-{uuid4().hex}")
    now = to_datetime(book.lake.clock.now_ms())
    content = pa.table(
        [
            pa.array([now] * len(values) if times is None else times, CONTENT_SCHEMA.field("timestamp").type),
            pa.nulls(len(values), pa.binary()),
            pa.array([value if isinstance(value, bytes) else str(value).encode() for value in values], pa.binary()),
            pa.nulls(len(values), CONTENT_SCHEMA.field("headers").type),
        ],
        schema=CONTENT_SCHEMA,
    )
    stored = store_segment(
        book.lake.store,
        f"{turn.folder}/{uuid4().hex}.parquet",
        stamped(content, partition, turn.next_offset),
        facts={"topic_id": turn.topic_id, "partition": partition, "base_offset": turn.next_offset},
    )
    segment = SegmentInfo(
        topic=topic,
        partition_id=partition,
        base_offset=stored.base_offset,
        end_offset=stored.base_offset + stored.record_count - 1,
        record_count=stored.record_count,
        size_bytes=stored.size,
        s3_key=stored.path,
        checksum=stored.checksum,
        min_timestamp=stored.min_timestamp,
        max_timestamp=stored.max_timestamp,
    )
    result = book.metadata.append_segments(turn, [segment], footers={stored.path: stored.footer} if footer else {})
    book.metadata.release_append(result.turn)
    return result.segments[0]


def land(book: Book, *tasks: Sequence[bytes], spread: bool = False, **options: Any) -> Landing:
    """Stage values for `orders`, each sequence by a task of its own, and land them as one batch.

    If they are to be spread, every partition gets one after the other.
    """
    topic = book.topics["orders"].record
    folder = book.metadata.open_stream_folder("orders", "s")
    assert folder.commit_id is not None
    stage = Stage(
        "orders",
        topic.id,
        folder.folder,
        folder.commit_id,
        topic.partition_count,
        True,
        most_record(book.lake, topic),
    )
    staged = []
    for values in tasks:
        stager = Stager(book.lake.store, stage)
        # As Spark hands them over, in several batches.
        for start in range(0, len(values), 7):
            some = values[start : start + 7]
            rows = pa.table({"value": pa.array(some, pa.binary())})
            if spread:
                numbers = [(start + number) % topic.partition_count for number in range(len(some))]
                rows = rows.append_column("partition", pa.array(numbers, pa.int32()))
            stager.add(rows, book.lake.clock.now_ms())
        staged += stager.finish()
    return land_batch(book.lake, book.metadata, stage, staged, **options)


def read(consumer: Consumer, number: int) -> list[Record]:
    """Poll until so many records have come."""
    found: list[Record] = []
    deadline = threading.Event()
    timer = threading.Timer(PATIENCE, deadline.set)
    timer.start()
    try:
        while len(found) < number:
            assert not deadline.is_set(), f"{len(found)} of {number} records came"
            found += consumer.poll(PATIENCE, max_records=number - len(found))
    finally:
        timer.cancel()
    return found


def values(records: Iterable[Record]) -> list[str]:
    return [(record.value or b"").decode() for record in records]


@contextmanager
def in_thread(action: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run something beside the block; what it returned or raised is in the list when the block has ended."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(action())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            outcome.append(error)

    running = threading.Thread(target=run)
    running.start()
    try:
        yield outcome
    finally:
        running.join(PATIENCE)
        assert not running.is_alive()


def threads_of_consumers() -> list[str]:
    names = ("lakebook-fetching", "lakebook-membership", "lakebook-wakeups")
    return [item.name for item in threading.enumerate() if item.name.startswith(names)]
