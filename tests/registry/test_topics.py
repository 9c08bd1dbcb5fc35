"""Topics behave alike on every registry."""

from __future__ import annotations

import pytest

from books import describe
from lakebook import Book, TopicConfig, failpoints
from lakebook.errors import InvalidPartitionCount, TopicAlreadyExists, TopicNotFound
from lakebook.pages import every
from lakebook.streams.metadata_store import CHUNK


def test_a_created_topic_is_found_with_its_partitions(book: Book) -> None:
    book.metadata.create_topic(TopicConfig("orders", 3, retention_ms=1000, config={"segment.bytes": "2048"}))
    topic = book.metadata.get_topic("orders")
    assert topic is not None
    assert (topic.name, topic.partition_count, topic.retention_ms) == ("orders", 3, 1000)
    assert topic.config == {"segment.bytes": "2048"}
    assert [p.partition_id for p in book.metadata.list_partitions("orders")] == [0, 1, 2]
    assert all((p.log_start, p.high_watermark) == (0, 0) for p in book.metadata.list_partitions("orders"))


def test_a_second_topic_of_the_same_name_is_refused(book: Book) -> None:
    book.metadata.create_topic("orders")
    with pytest.raises(TopicAlreadyExists):
        book.metadata.create_topic("orders", 2)
    topic = book.metadata.get_topic("orders")
    assert topic is not None
    assert topic.partition_count == 1


def test_an_unknown_topic_is_none_to_get_and_an_error_to_use(book: Book) -> None:
    assert book.metadata.get_topic("nowhere") is None
    for use in (
        lambda: book.metadata.list_partitions("nowhere"),
        lambda: book.metadata.delete_topic("nowhere"),
        lambda: book.metadata.update_topic_config("nowhere", {}),
        lambda: book.metadata.grow_topic("nowhere", 2),
        lambda: book.metadata.find_segment_for_offset("nowhere", 0, 0),
        lambda: book.metadata.get_segments("nowhere", 0),
        lambda: book.metadata.claim_append("nowhere", 0),
        lambda: book.metadata.commit_offset("group", "nowhere", 0, 0),
        lambda: book.metadata.get_committed_offset("group", "nowhere", 0),
        lambda: book.metadata.add_segment(describe("nowhere")),
    ):
        with pytest.raises(TopicNotFound):
            use()


def test_topics_are_listed_in_pages_by_the_bytes_of_their_names(book: Book) -> None:
    names = ["b", "a-1", "A", "a.1", "a_1", "a1", "Z", "0", "zz"]
    for name in names:
        book.metadata.create_topic(name)
    expected = sorted(names, key=str.encode)
    assert [topic.name for topic in book.metadata.list_topics()] == expected
    first = book.metadata.list_topics(limit=4)
    assert [topic.name for topic in first] == expected[:4]
    second = book.metadata.list_topics(after=first.next, limit=100)
    assert [topic.name for topic in second] == expected[4:]
    assert second.next is None
    assert [t.name for t in every(lambda after: book.metadata.list_topics(after=after, limit=1))] == expected
    assert [topic.name for topic in book.metadata.list_topics(prefix="a")] == ["a-1", "a.1", "a1", "a_1"]


def test_several_topics_are_got_at_once(book: Book) -> None:
    book.metadata.create_topic("one")
    book.metadata.create_topic("two", 2)
    found = book.metadata.get_topics(["one", "two", "three"])
    assert {name: topic.partition_count for name, topic in found.items()} == {"one": 1, "two": 2}
    assert book.metadata.get_topics([]) == {}


def test_configuration_is_merged_and_a_key_can_be_removed(book: Book) -> None:
    book.metadata.create_topic("orders", config={"segment.bytes": "2048", "user.team": "sales"})
    book.metadata.update_topic_config("orders", {"segment.bytes": "4096", "segment.ms": "10"})
    book.metadata.update_topic_config("orders", {"user.team": None}, retention_ms=5000)
    topic = book.metadata.get_topic("orders")
    assert topic is not None
    assert topic.config == {"segment.bytes": "4096", "segment.ms": "10"}
    assert topic.retention_ms == 5000
    forever = book.metadata.update_topic_config("orders", retention_ms=None)
    assert forever.retention_ms is None
    assert forever.updated_at > forever.created_at


def test_a_topic_grows_and_never_shrinks(book: Book) -> None:
    book.metadata.create_topic("orders", 2)
    book.metadata.add_segment(describe("orders", 1))
    book.metadata.commit_offset("group", "orders", 1, 40)
    assert book.metadata.grow_topic("orders", 4).partition_count == 4
    partitions = book.metadata.list_partitions("orders")
    assert [(p.partition_id, p.log_start, p.high_watermark) for p in partitions] == [
        (0, 0, 0),
        (1, 0, 100),
        (2, 0, 0),
        (3, 0, 0),
    ]
    assert book.metadata.get_committed_offset("group", "orders", 1) == 40
    # A partition created later starts at 0 for every group.
    book.metadata.add_segment(describe("orders", 3, count=7))
    assert {entry.partition_id: entry.lag for entry in book.metadata.lag("group")} == {0: 0, 1: 60, 2: 0, 3: 7}
    with pytest.raises(InvalidPartitionCount):
        book.metadata.grow_topic("orders", 3)
    assert book.metadata.grow_topic("orders", 4).partition_count == 4


def test_partitions_are_listed_in_pages(book: Book) -> None:
    book.metadata.create_topic("wide", 25)
    page = book.metadata.list_partitions("wide", limit=10)
    assert [p.partition_id for p in page] == list(range(10))
    rest = book.metadata.list_partitions("wide", after=page.next)
    assert [p.partition_id for p in rest] == list(range(10, 25))
    found = book.metadata.get_partitions([("wide", 3), ("wide", 25), ("other", 0)])
    assert list(found) == [("wide", 3)]


def test_a_deleted_topic_is_gone_and_its_files_wait_for_removal(book: Book) -> None:
    book.metadata.create_topic("orders", 2)
    segments = [describe("orders", 0, 0), describe("orders", 0, 100), describe("orders", 1)]
    book.metadata.add_segments(segments)
    book.metadata.commit_offset("group", "orders", 0, 50)
    book.metadata.delete_topic("orders")
    assert book.metadata.get_topic("orders") is None
    assert book.metadata.get_partition("orders", 0) is None
    assert list(book.metadata.list_topics()) == []
    assert list(book.metadata.get_consumer_offsets("group")) == []
    waiting = {file.file_path: file for file in book.metadata.list_temporary_files()}
    assert waiting.keys() == {segment.s3_key for segment in segments}
    assert all((f.expiration - f.added_at).total_seconds() == 3600 for f in waiting.values())
    assert book.verify().ok


def test_a_new_topic_of_a_deleted_ones_name_inherits_nothing(book: Book) -> None:
    first = book.metadata.create_topic("orders", 3, config={"user.a": "1"})
    book.metadata.add_segment(describe("orders", 0))
    book.metadata.commit_offset("group", "orders", 0, 100)
    book.metadata.delete_topic("orders")
    second = book.metadata.create_topic("orders")
    assert second.id != first.id
    assert second.config == {}
    partition = book.metadata.get_partition("orders", 0)
    assert partition is not None
    assert (partition.log_start, partition.high_watermark) == (0, 0)
    assert list(book.metadata.get_segments("orders", 0)) == []
    assert book.metadata.get_committed_offset("group", "orders", 0) is None
    assert book.metadata.commit_offset("group", "orders", 0, 0).offset == 0


def test_deleting_a_topic_with_more_than_a_chunk_of_segments_leaves_none(book: Book) -> None:
    book.metadata.create_topic("orders")
    number = CHUNK * 2 + 1
    book.metadata.add_segments([describe("orders", 0, base, 1) for base in range(number)])
    book.metadata.delete_topic("orders")
    assert book.measure().values()["lakebook_temporary_files"] == number
    assert book.verify().ok


def test_a_deletion_that_stopped_half_way_is_finished_later(book: Book) -> None:
    book.metadata.create_topic("orders")
    book.metadata.add_segment(describe("orders"))

    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    with failpoints.armed("topic.hidden", stop), pytest.raises(Stopped):
        book.metadata.delete_topic("orders")
    assert book.metadata.get_topic("orders") is None
    book.metadata.create_topic("orders")
    checked = book.verify()
    assert checked.ok
    assert len(checked.unfinished) == 1
    assert book.metadata.purge_deleted_topics() == 1
    checked = book.verify()
    assert checked.ok
    assert checked.unfinished == ()
    assert len(book.metadata.list_temporary_files()) == 1
    assert book.metadata.get_topic("orders") is not None
