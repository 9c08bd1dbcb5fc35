"""Topics as Spark frames: the records of a range, no more and no less, from segments that stay."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import lakebook
from lakebook import Book
from lakebook.errors import (
    InvalidInput,
    InvalidOffset,
    LakebookError,
    OffsetBelowLogStart,
    OffsetBeyondWatermark,
    PartitionNotFound,
    SparkUnsuitable,
    TopicNotFound,
)
from lakebook.streams.topic import Topic
from spark.rows import layout
from streaming import produce

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def orders(book: Book) -> Topic:
    """Two partitions: one with the offsets 0 to 8 in three segments, one with 0 to 3 in two."""
    topic = book.topics.create("orders", 2)
    for base in (0, 3, 6):
        produce(book, "orders", 0, *range(base, base + 3), times=[at(base + place) for place in range(3)])
    produce(book, "orders", 1, "a", "b", times=[at(0), at(0)])
    produce(book, "orders", 1, "c", "d", times=[at(5), at(6)])
    return topic


def places(frame: DataFrame) -> list[tuple[int, int]]:
    return sorted((row["partition"], row["offset"]) for row in frame.collect())


def expected(*ranges: tuple[int, int, int]) -> list[tuple[int, int]]:
    return [(partition, offset) for partition, start, end in ranges for offset in range(start, end)]


def test_a_topic_is_read_with_all_its_columns(spark: SparkSession, book: Book) -> None:
    orders(book)
    found = book.topics["orders"].read(spark).orderBy("partition", "offset").toArrow()
    assert layout(found.schema) == [
        ("partition", "int32"),
        ("offset", "int64"),
        ("timestamp", "timestamp[us, tz=UTC]"),
        ("key", "binary"),
        ("value", "binary"),
        ("headers", ("list", [("key", "string"), ("value", "binary")])),
    ]
    assert found.column("value").to_pylist() == [*(str(number).encode() for number in range(9)), b"a", b"b", b"c", b"d"]
    assert found.column("timestamp").to_pylist()[:2] == [at(0), at(1)]


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [
        ("earliest", "latest", [(0, 0, 9), (1, 0, 4)]),
        (2, 4, [(0, 2, 4), (1, 2, 4)]),
        (3, "latest", [(0, 3, 9), (1, 3, 4)]),
        ({0: 4, 1: 1}, {0: 7, 1: 3}, [(0, 4, 7), (1, 1, 3)]),
        ({0: 8}, "latest", [(0, 8, 9), (1, 0, 4)]),
        ("latest", "latest", []),
        (at(4), "latest", [(0, 4, 9), (1, 2, 4)]),
        # Between two records, and before a whole millisecond: the first that is not before it.
        (at(4.5), at(6.0001), [(0, 5, 7), (1, 2, 4)]),
        (at(-9), at(5), [(0, 0, 5), (1, 0, 2)]),
        (at(99), "latest", []),
        ({0: at(7)}, {0: "latest", 1: 0}, [(0, 7, 9)]),
    ],
)
def test_a_range_has_its_records_and_no_others(
    spark: SparkSession, book: Book, start: Any, end: Any, found: list[tuple[int, int, int]]
) -> None:
    topic = orders(book)
    assert places(topic.read(spark, start=start, end=end)) == expected(*found)


def test_some_partitions_can_be_read_alone(spark: SparkSession, book: Book) -> None:
    topic = orders(book)
    assert places(topic.read(spark, partitions=[1], start=1)) == expected((1, 1, 4))
    assert places(topic.read(spark, partitions=[])) == []


def test_records_out_of_the_order_of_time_are_found_by_the_first_that_is_late_enough(
    spark: SparkSession, book: Book
) -> None:
    topic = book.topics.create("mixed")
    produce(book, "mixed", 0, *range(4), times=[at(5), at(1), at(9), at(2)])
    produce(book, "mixed", 0, *range(2), times=[at(3), at(9)])
    assert places(topic.read(spark, start=at(6))) == expected((0, 2, 6))
    assert places(topic.read(spark, start=at(2))) == expected((0, 0, 6))


def test_an_empty_topic_is_an_empty_frame(spark: SparkSession, book: Book) -> None:
    topic = book.topics.create("quiet", 3)
    frame = topic.read(spark)
    assert (frame.columns, frame.count()) == (["partition", "offset", "timestamp", "key", "value", "headers"], 0)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"start": 99}, OffsetBeyondWatermark),
        ({"end": 5}, OffsetBeyondWatermark),
        ({"start": -1}, InvalidOffset),
        ({"start": "begin"}, InvalidOffset),
        ({"start": datetime(2026, 1, 1)}, InvalidInput),  # noqa: DTZ001 - that is what is refused
        ({"start": {7: 1}}, PartitionNotFound),
        ({"partitions": [2]}, PartitionNotFound),
        ({"partitions": 1}, InvalidInput),
        ({"start": True}, InvalidOffset),
    ],
)
def test_a_range_that_cannot_be_is_refused(
    spark: SparkSession, book: Book, how: dict[str, Any], error: type[LakebookError]
) -> None:
    topic = orders(book)
    with pytest.raises(error):
        topic.read(spark, **how)


def test_what_is_no_session_is_refused(book: Book) -> None:
    topic = orders(book)
    with pytest.raises(SparkUnsuitable):
        topic.read(None)  # type: ignore[arg-type]


def test_a_book_in_memory_says_that_spark_cannot_reach_it(spark: SparkSession) -> None:
    with lakebook.open(":memory:") as book:
        book.topics.create("orders")
        with pytest.raises(SparkUnsuitable):
            book.topics["orders"].read(spark)


# --- what stays ----------------------------------------------------------------


def test_what_a_frame_reads_outlives_retention_until_it_is_released(spark: SparkSession, book: Book) -> None:
    topic = orders(book)
    frame = topic.read(spark, start=2, end=4)
    assert book.metadata.delete_segments_before("orders", 0, 9) == 0
    assert places(frame) == expected((0, 2, 4), (1, 2, 4))
    with pytest.raises(OffsetBelowLogStart):
        topic.read(spark, start=2)
    book.release_reads()
    assert book.metadata.delete_segments_before("orders", 0, 9) == 3


def test_a_frame_whose_files_are_gone_fails_and_does_not_shrink(spark: SparkSession, book: Book) -> None:
    topic = book.topics.create("lost")
    segments = [produce(book, "lost", 0, number) for number in range(3)]
    frame = topic.read(spark)
    content = book.lake.store.read(segments[1].s3_key)
    book.lake.store.delete_one(segments[1].s3_key)
    with pytest.raises((PySparkException, Py4JJavaError), match="does not exist"):
        frame.collect()
    book.lake.store.put_new(segments[1].s3_key, content)
    assert frame.count() == 3


def test_a_read_that_fails_pins_nothing(spark: SparkSession, book: Book) -> None:
    topic = orders(book)
    with pytest.raises(OffsetBeyondWatermark):
        topic.read(spark, start=0, end=99)
    assert book.metadata.delete_segments_before("orders", 0, 9) == 3


# --- the topics of a book ------------------------------------------------------


def test_topics_are_found_listed_and_deleted_by_their_names(book: Book) -> None:
    book.topics.create("b", 2, config={"user.team": "x"})
    book.topics.create("a", retention_ms=1000)
    assert list(book.topics) == ["a", "b"]
    assert ("a" in book.topics, "c" in book.topics, 7 in book.topics) == (True, False, False)
    book.topics.delete("a")
    assert list(book.topics) == ["b"]
    with pytest.raises(TopicNotFound):
        book.topics["a"]


def test_a_topic_describes_itself(book: Book) -> None:
    described = orders(book).describe()
    assert (described.name, described.partition_count, described.record_count) == ("orders", 2, 13)
    assert [(item.log_start, item.high_watermark) for item in described.partitions] == [(0, 9), (0, 4)]


def test_a_handle_on_a_deleted_topic_says_so(spark: SparkSession, book: Book) -> None:
    topic = orders(book)
    book.topics.delete("orders")
    for act in (topic.describe, lambda: topic.record, lambda: topic.read(spark)):
        with pytest.raises(TopicNotFound):
            act()


def values_of(records: Sequence[Any]) -> list[bytes]:
    return [record.value for record in records]


def test_a_topic_makes_its_own_producer_and_consumer(book: Book) -> None:
    topic = book.topics.create("own")
    with topic.producer() as producer:
        producer.send(b"x")
    with topic.consumer(group="g") as consumer:
        assert values_of(consumer.poll(10)) == [b"x"]
