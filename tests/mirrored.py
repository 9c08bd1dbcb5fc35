"""Records in topics, written without a producer, and what a topic and its table hold of them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from lakebook import Book, SegmentInfo
from lakebook.errors import MergeConflict
from lakebook.lake.footer_store import read_footer
from lakebook.registry.mirrors import NAMESPACE
from lakebook.streams.segment_files import (
    CONTENT_SCHEMA,
    SegmentFile,
    SegmentReader,
    described,
    encoded,
    stamped,
)

BEGIN = datetime(2024, 5, 1, tzinfo=UTC)
TOPIC = "orders"
PATIENCE = 60


def content(values: Sequence[str]) -> pa.Table:
    """Records with these values; some have no key, some have headers."""
    rows = [
        {
            "timestamp": BEGIN + timedelta(seconds=number),
            "key": None if number % 3 == 0 else value[:1].encode(),
            "value": value.encode(),
            "headers": None if number % 2 else [{"key": "n", "value": str(number).encode()}],
        }
        for number, value in enumerate(values)
    ]
    return pa.Table.from_pylist(rows, CONTENT_SCHEMA)


def stored(book: Book, path: str, rows: pa.Table) -> SegmentFile:
    """Rows as a segment's file."""
    data = encoded(rows)
    book.lake.store.put_new(path, data)
    return described(path, rows, data)


def info(topic: str, partition: int, file: SegmentFile) -> SegmentInfo:
    """What is recorded of a file."""
    return SegmentInfo(
        topic,
        partition,
        file.base_offset,
        file.base_offset + file.record_count - 1,
        file.record_count,
        file.size,
        file.path,
        checksum=file.checksum,
        min_timestamp=file.min_timestamp,
        max_timestamp=file.max_timestamp,
    )


def append(book: Book, *values: str, topic: str = TOPIC, partition: int = 0) -> SegmentInfo:
    """Append records as one segment."""
    metadata = book.metadata
    turn = metadata.claim_append(topic, partition, holder=f"{os.getpid()}-{topic}-{partition}")
    rows = stamped(content(values), partition, turn.next_offset)
    file = stored(book, f"{turn.folder}/{uuid.uuid4()}.parquet", rows)
    done = metadata.append_segments(turn, [info(topic, partition, file)], footers={file.path: file.footer})
    metadata.release_append(done.turn)
    return done.segments[0]


def merge(book: Book, old: Sequence[SegmentInfo], *, topic: str = TOPIC) -> SegmentInfo:
    """Merge segments that follow one another."""
    metadata, number = book.metadata, old[0].partition_id
    rows = pa.concat_tables([rows_of(book, segment) for segment in old])
    folder = metadata.open_stream_folder(topic, "m", number)
    assert folder.commit_id is not None
    file = stored(book, f"{folder.folder}/{uuid.uuid4()}.parquet", rows)
    try:
        return metadata.replace_segments(
            folder.topic_id,
            number,
            old,
            info(topic, number, file),
            commit_id=folder.commit_id,
            footers={file.path: file.footer},
        )
    except MergeConflict:
        metadata.end_stream_folder(folder)
        book.lake.store.delete_one(file.path)
        raise


def rows_of(book: Book, segment: SegmentInfo) -> pa.Table:
    """The records of a segment."""
    store, path = book.lake.store, segment.s3_key
    reader = SegmentReader(store, path, read_footer(store, path, segment.size_bytes), segment.base_offset)
    return pa.Table.from_batches(list(reader.batches(segment.base_offset)))


def in_topic(book: Book, topic: str = TOPIC) -> list[dict[str, Any]]:
    """The records of a topic, from its segments, by partition and offset."""
    found: list[dict[str, Any]] = []
    for partition in book.metadata.list_partitions(topic):
        for segment in book.metadata.each_segment(topic, partition.partition_id):
            found += rows_of(book, segment).to_pylist()
    return found


def send(book: Book, *values: str, topic: str = TOPIC, partition: int = 0) -> None:
    """Send records by a producer, as one segment."""
    with book.producer(topic, linger=PATIENCE) as producer:
        for value in values:
            producer.send(value, key=value[:1], headers={"by": "a producer"}, partition=partition)


def consumed(book: Book, topic: str = TOPIC) -> list[dict[str, Any]]:
    """The records of a topic as a consumer has them, by partition and offset."""
    with book.consumer(topic) as consumer:
        found = sorted(consumer.until_end(), key=lambda record: (record.partition, record.offset))
    names = ("partition", "offset", "timestamp", "key", "value")
    return [{**{name: getattr(record, name) for name in names}, "headers": list(record.headers)} for record in found]


def in_order(rows: pa.Table) -> list[dict[str, Any]]:
    """Rows of the table by partition and offset."""
    found: list[dict[str, Any]] = rows.sort_by([("partition", "ascending"), ("offset", "ascending")]).to_pylist()
    return found


def as_records(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows as a consumer has them, to whom a record without headers has none: PyIceberg shows an empty list."""
    return [{**row, "headers": [tuple(pair.values()) for pair in row["headers"] or ()]} for row in rows]


def in_table(book: Book, topic: str = TOPIC, **at: Any) -> list[dict[str, Any]]:
    """The records of a topic, from its table."""
    return in_order(book.table(topic, namespace=NAMESPACE).to_arrow(**at))


def paths(book: Book, topic: str = TOPIC) -> list[str]:
    """The files of a topic's segments."""
    return sorted(
        segment.s3_key
        for partition in book.metadata.list_partitions(topic)
        for segment in book.metadata.each_segment(topic, partition.partition_id)
    )
