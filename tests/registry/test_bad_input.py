"""Hostile and mistaken input: a typed error, and nothing is changed."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from books import describe
from lakebook import Book, OffsetCommit
from lakebook.errors import (
    InvalidConfig,
    InvalidInput,
    InvalidName,
    InvalidOffset,
    InvalidPage,
    InvalidPartitionCount,
    InvalidSegment,
    LakebookError,
    NegativeOffset,
    OffsetOverflow,
    PartitionNotFound,
    PathOutsideWarehouse,
    SegmentGap,
)
from lakebook.metrics import GAUGES

BAD_NAMES: list[Any] = [
    "", ".", "..", "a/b", "a b", "a\0b", "ä", "a'; DROP TABLE topics; --", "x" * 250, "../../etc/passwd", "a\n",
    None, 7, b"orders", ["orders"], {"a": 1}, "orders\ud800", "%s", "名前",
]  # fmt: skip
BAD_OFFSETS: list[tuple[Any, type[LakebookError]]] = [
    (-1, NegativeOffset),
    (2**63, OffsetOverflow),
    (10**30, OffsetOverflow),
    (1.5, InvalidOffset),
    ("7", InvalidOffset),
    (None, InvalidOffset),
    (True, InvalidOffset),
]
BAD_PARTITIONS: list[Any] = [-1, 2, 2**31, 2**63, 10**30, "0", None, 0.0, True]
BAD_PATHS: list[Any] = [
    "", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "s3://other/x", "a\\b", "a\0b", "a\nb", "x" * 1025,
    None, 7, "a/", "..", "a/\ud800",
]  # fmt: skip


@pytest.fixture
def orders(book: Book) -> Book:
    book.metadata.create_topic("orders", 2)
    book.metadata.add_segment(describe(base=0))
    book.metadata.commit_offset("g", "orders", 0, 50)
    return book


def check_refused(book: Book, expected: type[LakebookError], use: Callable[[], object]) -> None:
    """The call fails with that error, and the registry is as it was."""

    def state() -> tuple[object, ...]:
        values = book.measure().values()
        return (*(values[f"lakebook_{name}"] for name in GAUGES if name != "open_commits"), str(book.events.now())[:33])

    before = state()
    with pytest.raises(expected) as caught:
        use()
    assert str(caught.value)
    assert "\n" not in str(caught.value)
    assert state() == before


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_names_outside_the_rule_are_refused(orders: Book, name: Any) -> None:
    store = orders.metadata
    for use in (
        lambda: store.create_topic(name),
        lambda: store.get_topic(name),
        lambda: store.get_topics([name]),
        lambda: store.delete_topic(name),
        lambda: store.update_topic_config(name, {}),
        lambda: store.grow_topic(name, 2),
        lambda: store.list_partitions(name),
        lambda: store.get_partition(name, 0),
        lambda: store.find_segment_for_offset(name, 0, 0),
        lambda: store.get_segments(name, 0),
        lambda: store.add_segment(replace(describe(), topic=name)),
        lambda: store.claim_append(name, 0),
        lambda: store.ensure_consumer_group(name),
        lambda: store.commit_offset(name, "orders", 0, 60),
        lambda: store.commit_offset("g", name, 0, 60),
        lambda: store.get_committed_offset(name, "orders", 0),
        lambda: store.get_consumer_offsets(name),
        lambda: store.delete_consumer_group(name),
        lambda: store.lag(name),
        lambda: store.reset_offset(name, "orders"),
        lambda: orders.events.load_cursor(name),
        lambda: orders.events.save_cursor(name, orders.events.beginning()),
    ):
        check_refused(orders, InvalidName, use)


def test_the_longest_and_strangest_legal_names_work(book: Book) -> None:
    for name in ("x" * 249, "...", "-", "_", "a.b-c_D9", "DROP-TABLE"):
        book.metadata.create_topic(name)
        book.metadata.add_segment(describe(name, s3_key=f"t/{name[:40]}"))
        book.metadata.commit_offset(name, name, 0, 5)
        assert book.metadata.get_committed_offset(name, name, 0) == 5
        book.metadata.delete_topic(name)
    assert book.verify().ok


@pytest.mark.parametrize("count", [0, -1, 10_001, 2**31, 10**12, 1.0, "3", None, True], ids=repr)
def test_zero_and_absurd_partition_counts_are_refused(orders: Book, count: Any) -> None:
    check_refused(orders, InvalidPartitionCount, lambda: orders.metadata.create_topic("new", count))
    check_refused(orders, InvalidPartitionCount, lambda: orders.metadata.grow_topic("orders", count))


@pytest.mark.parametrize(
    "config",
    [
        {"segment.bytes": "many"},
        {"segment.bytes": "-1"},
        {"segment.bytes": "1e9"},
        {"segment.bytes": 2048},
        {"segment.bytes": "٣٣٣٣"},
        {"segment.bytes": "9" * 30},
        {"compression.type": "rar"},
        {"retension.bytes": "1"},
        {"user.x": "a\0b"},
        {"user.x": "x" * 5000},
        {"user.x": "\ud800"},
        {7: "x"},
        {"user.x": None},
        {"": ""},
        ["segment.bytes"],
        "segment.bytes=1",
    ],
    ids=ascii,
)
def test_malformed_configuration_is_refused(orders: Book, config: Any) -> None:
    check_refused(orders, InvalidConfig, lambda: orders.metadata.create_topic("new", config=config))
    if config != {"user.x": None}:
        check_refused(orders, InvalidConfig, lambda: orders.metadata.update_topic_config("orders", config))


@pytest.mark.parametrize("retention", [0, -1, 2**63, 1.5, "7d", True], ids=repr)
def test_a_retention_that_is_no_time_is_refused(orders: Book, retention: Any) -> None:
    check_refused(orders, InvalidConfig, lambda: orders.metadata.create_topic("new", retention_ms=retention))
    check_refused(orders, InvalidConfig, lambda: orders.metadata.update_topic_config("orders", retention_ms=retention))


@pytest.mark.parametrize(("offset", "expected"), BAD_OFFSETS, ids=repr)
def test_offsets_that_cannot_be_are_refused(orders: Book, offset: Any, expected: type[LakebookError]) -> None:
    store = orders.metadata
    for use in (
        lambda: store.find_segment_for_offset("orders", 0, offset),
        lambda: store.get_segments("orders", 0, from_offset=offset),
        lambda: store.update_high_watermark("orders", 0, offset),
        lambda: store.delete_segments_before("orders", 0, offset),
        lambda: store.commit_offset("g", "orders", 0, offset),
        lambda: store.commit_offsets("g", [OffsetCommit("orders", 0, 60), OffsetCommit("orders", 1, offset)]),
        lambda: store.add_segment(replace(describe(base=100), base_offset=offset)),
        lambda: store.add_segment(replace(describe(base=100), end_offset=offset)),
    ):
        check_refused(orders, expected, use)
    if offset is not None:
        check_refused(orders, InvalidOffset, lambda: store.reset_offset("g", "orders", 0, offset))


@pytest.mark.parametrize("number", BAD_PARTITIONS, ids=repr)
def test_partitions_that_are_not_there_are_refused(orders: Book, number: Any) -> None:
    store = orders.metadata
    assert store.get_partition("orders", number) is None
    for use in (
        lambda: store.find_segment_for_offset("orders", number, 0),
        lambda: store.get_segments("orders", number),
        lambda: store.update_high_watermark("orders", number, 0),
        lambda: store.delete_segments_before("orders", number, 0),
        lambda: store.claim_append("orders", number),
        lambda: store.commit_offset("g", "orders", number, 0),
        lambda: store.get_committed_offset("g", "orders", number),
        lambda: store.add_segment(replace(describe(), partition_id=number)),
        lambda: store.find_segment_for_timestamp("orders", number, datetime.now().astimezone()),
    ):
        check_refused(orders, PartitionNotFound, use)


@pytest.mark.parametrize("path", BAD_PATHS, ids=lambda path: ascii(path)[:20])
def test_paths_outside_the_warehouse_are_refused(orders: Book, path: Any) -> None:
    check_refused(
        orders, PathOutsideWarehouse, lambda: orders.metadata.add_segment(replace(describe(base=100), s3_key=path))
    )


def test_a_bucket_that_is_not_the_warehouse_is_refused(orders: Book) -> None:
    check_refused(
        orders, PathOutsideWarehouse, lambda: orders.metadata.add_segment(describe(base=100, s3_bucket="elsewhere"))
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"record_count": 99},
        {"record_count": 0},
        {"record_count": 2**31},
        {"end_offset": 50},
        {"size_bytes": -1},
        {"size_bytes": 2**63},
        {"size_bytes": None},
        {"checksum": "abc"},
        {"checksum": 7},
        {"checksum": "xxh3:\0"},
        {"checksum": "x:" + "y" * 300},
        {"size_bytes": 2**43 + 1},
        {"min_timestamp": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"created_at": "now"},
        {"min_timestamp": datetime.fromisoformat("2026-01-01T00:00:00Z")},
        {
            "min_timestamp": datetime.fromisoformat("2026-01-02T00:00:00Z"),
            "max_timestamp": datetime.fromisoformat("2026-01-01T00:00:00Z"),
        },
        {"producer_id": "p"},
    ],
    ids=repr,
)
def test_segments_that_contradict_themselves_are_refused(orders: Book, changes: dict[str, Any]) -> None:
    check_refused(orders, InvalidSegment, lambda: orders.metadata.add_segment(replace(describe(base=100), **changes)))


@pytest.mark.parametrize("segment_id", ["x" * 250, "a\nb", "ä", 7, None], ids=ascii)
def test_segment_ids_that_cannot_be_are_refused(orders: Book, segment_id: Any) -> None:
    check_refused(orders, InvalidName, lambda: orders.metadata.add_segment(replace(describe(base=100), id=segment_id)))


def test_what_is_no_segment_is_refused(orders: Book) -> None:
    check_refused(orders, InvalidSegment, lambda: orders.metadata.add_segments([{"topic": "orders"}]))  # type: ignore[list-item]


def test_the_last_offset_there_can_be_is_recorded_and_no_further(book: Book) -> None:
    book.metadata.create_topic("long")
    most = 2**31 - 1
    # The counter cannot be brought near its end honestly in a test: each segment holds 2**31 - 1 records.
    book.metadata.add_segment(replace(describe("long", count=most)))
    partition = book.metadata.get_partition("long", 0)
    assert partition is not None
    assert partition.high_watermark == most
    check_refused(
        book,
        OffsetOverflow,
        lambda: book.metadata.add_segment(replace(describe("long"), base_offset=2**63 - 1, end_offset=2**63 - 1)),
    )


@pytest.mark.parametrize("text", ["x" * 5000, "a\0b", "\ud800", 7, b"x"], ids=lambda t: ascii(t)[:12])
def test_texts_that_no_database_can_hold_are_refused(orders: Book, text: Any) -> None:
    check_refused(orders, InvalidInput, lambda: orders.metadata.commit_offset("g", "orders", 0, 60, text))
    check_refused(orders, InvalidInput, lambda: orders.metadata.reset_offset("g", "orders", 0, "latest", reason=text))


@pytest.mark.parametrize("limit", [0, -1, 100_001, 2**63, "5", None, True, 1.0], ids=repr)
def test_pages_of_an_impossible_size_are_refused(orders: Book, limit: Any) -> None:
    store = orders.metadata
    for use in (
        lambda: store.list_topics(limit=limit),
        lambda: store.list_partitions("orders", limit=limit),
        lambda: store.get_segments("orders", 0, limit=limit),
        lambda: store.get_consumer_offsets("g", limit=limit),
        lambda: store.list_consumer_groups(limit=limit),
        lambda: store.list_temporary_files(limit=limit),
        lambda: orders.events.read(orders.events.beginning(), limit),
    ):
        check_refused(orders, InvalidPage, use)


@pytest.mark.parametrize("to", ["yesterday", None, 1.5, True, [], -1, 2**63], ids=repr)
def test_resets_to_nowhere_are_refused(orders: Book, to: Any) -> None:
    check_refused(orders, InvalidOffset, lambda: orders.metadata.reset_offset("g", "orders", 0, to))


@pytest.mark.parametrize("moment", [datetime(2026, 1, 1), "now", 0, None], ids=repr)  # noqa: DTZ001
def test_times_without_a_zone_are_refused(orders: Book, moment: Any) -> None:
    check_refused(orders, InvalidInput, lambda: orders.metadata.find_segment_for_timestamp("orders", 0, moment))
    if isinstance(moment, datetime):
        check_refused(orders, InvalidInput, lambda: orders.metadata.reset_offset("g", "orders", 0, moment))


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 10**9, "5", True], ids=repr)
def test_turns_of_an_impossible_length_are_refused(orders: Book, seconds: Any) -> None:
    check_refused(orders, InvalidInput, lambda: orders.metadata.claim_append("orders", 0, seconds=seconds))


def test_places_to_go_on_from_are_checked(orders: Book) -> None:
    check_refused(orders, InvalidName, lambda: orders.metadata.list_topics(after="a/b"))
    check_refused(orders, InvalidName, lambda: orders.metadata.list_consumer_groups(after="a/b"))
    check_refused(orders, PathOutsideWarehouse, lambda: orders.metadata.list_temporary_files(after="a\0b"))
    check_refused(orders, PartitionNotFound, lambda: orders.metadata.get_consumer_offsets("g", after=("a", 2**70)))
    check_refused(orders, PartitionNotFound, lambda: orders.metadata.list_partitions("orders", after=-5))
    check_refused(orders, OffsetOverflow, lambda: orders.metadata.get_segments("orders", 0, after=2**70))


def test_times_of_any_year_come_back_as_they_were(book: Book) -> None:
    book.metadata.create_topic("orders")
    for number, year in enumerate((1, 1969, 1970, 2026, 2242, 9999)):
        moment = datetime(year, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
        book.metadata.create_topic(f"t{number}")
        recorded = book.metadata.add_segment(describe(f"t{number}", min_timestamp=moment, max_timestamp=moment))
        assert recorded.max_timestamp == moment
        assert book.metadata.find_segment_for_timestamp(f"t{number}", 0, moment) == recorded
    assert book.verify().ok


def test_names_and_numbers_of_enumerations_are_what_they_stand_for(book: Book) -> None:
    class Names(enum.StrEnum):
        ORDERS = "orders"

    class Numbers(enum.IntEnum):
        FIRST = 0

    book.metadata.create_topic(Names.ORDERS)
    new = [replace(describe(base=base), topic=Names.ORDERS, partition_id=Numbers.FIRST) for base in (0, 100)]
    assert [segment.base_offset for segment in book.metadata.add_segments(new)] == [0, 100]
    partition = book.metadata.get_partition(Names.ORDERS, Numbers.FIRST)
    assert partition is not None
    assert partition.high_watermark == 200
    reversed_batch = [replace(describe(base=base), topic=Names.ORDERS) for base in (300, 200)]
    check_refused(book, SegmentGap, lambda: book.metadata.add_segments(reversed_batch))
    check_refused(
        book, InvalidSegment, lambda: book.metadata.add_segment(replace(describe(base=200), size_bytes=Numbers.FIRST))
    )


def test_times_that_do_not_exist_in_utc_are_refused(orders: Book) -> None:
    moment = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))
    segment = describe(base=100, min_timestamp=moment, max_timestamp=moment)
    check_refused(orders, InvalidSegment, lambda: orders.metadata.add_segment(segment))
    check_refused(orders, InvalidInput, lambda: orders.metadata.find_segment_for_timestamp("orders", 0, moment))
    check_refused(orders, InvalidInput, lambda: orders.metadata.reset_offset("g", "orders", 0, moment))


def test_a_prefix_may_be_a_dot(book: Book) -> None:
    book.metadata.create_topic(".hidden")
    book.metadata.create_topic("shown")
    assert [topic.name for topic in book.metadata.list_topics(prefix=".")] == [".hidden"]
