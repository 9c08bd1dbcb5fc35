"""Retention removes whole segments by time and size, the log start first, and nothing that a lease needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from books import MEMORY, POSTGRESQL, SQLITE, Place, describe
from lake import lay, objects, own_warehouse, records, run_sql  # noqa: F401
from lakebook import Book, failpoints
from lakebook.clock import ManualClock, to_datetime
from lakebook.components.janitor import Janitor
from lakebook.errors import OffsetBelowLogStart, RegistryBusy, StorageUnavailable
from lakebook.registry import retention, schema
from lakebook.registry.statements import Statement
from lakebook.streams import retention as applied
from lakebook.streams.retention import Retention
from lakebook.streams.sweeping import sweep_streams
from segment_logs import values_of
from streaming import produce

HOUR = 3600.0
GRACE = 100.0
LEASE = 60.0


@pytest.fixture(params=[MEMORY, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place]) -> Place:
    """Both databases; where the bytes lie makes no difference here."""
    return make_place(request.param)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def book(place: Place, clock: ManualClock) -> Book:
    return place.open(clock=clock, temporary_file_grace=GRACE, sweep_grace=GRACE, lease_seconds=LEASE)


def hourly(book: Book, clock: ManualClock, segments: int, topic: str = "orders", number: int = 0) -> None:
    """A segment of ten records an hour; the last one just now."""
    for place in range(segments):
        at = to_datetime(clock.now_ms())
        base = book.metadata.get_partition(topic, number).high_watermark  # type: ignore[union-attr]
        book.metadata.add_segment(describe(topic, number, base, 10, min_timestamp=at, max_timestamp=at))
        if place < segments - 1:
            clock.advance(HOUR)


def begins(book: Book, topic: str = "orders", number: int = 0) -> int:
    found = book.metadata.get_partition(topic, number)
    assert found is not None
    return found.log_start


def bases(book: Book, topic: str = "orders", number: int = 0) -> list[int]:
    return [segment.base_offset for segment in book.metadata.each_segment(topic, number)]


# --- what is due ---------------------------------------------------------------


def test_segments_go_when_all_their_records_are_older_than_the_topic_keeps(book: Book, clock: ManualClock) -> None:
    book.metadata.create_topic("orders", retention_ms=round(3 * HOUR * 1000))
    hourly(book, clock, 5)
    # The first is four hours old, the second exactly three.
    done = Retention(book.lake).run()
    assert (done.records, done.segments, done.failed) == ({"orders": 10}, {"orders": 1}, [])
    assert (begins(book), bases(book)) == (10, [10, 20, 30, 40])
    assert Retention(book.lake).run().records == {}
    clock.advance(10 * HOUR)
    # The last goes as well: a topic that nobody writes to any more becomes empty.
    Retention(book.lake).run()
    assert (begins(book), bases(book)) == (50, [])
    produce(book, "orders", 0, "next")
    assert bases(book) == [50]
    assert book.verify().ok


def test_a_late_record_keeps_its_segment_and_all_behind_it(book: Book, clock: ManualClock) -> None:
    book.metadata.create_topic("orders", retention_ms=round(2 * HOUR * 1000))
    now = to_datetime(clock.now_ms())
    for base, age in ((0, 9), (10, 1), (20, 9), (30, 0)):
        at = now - timedelta(hours=age)
        book.metadata.add_segment(describe(base=base, count=10, min_timestamp=at, max_timestamp=at))
    Retention(book.lake).run()
    assert bases(book) == [10, 20, 30]
    clock.advance(1.5 * HOUR)
    Retention(book.lake).run()
    assert bases(book) == [30]


def test_one_that_was_ahead_of_its_time_holds_nothing_back_once_it_is_removed(book: Book, clock: ManualClock) -> None:
    book.metadata.create_topic("orders", retention_ms=round(HOUR * 1000))
    future = to_datetime(clock.now_ms()) + timedelta(days=9)
    book.metadata.add_segment(describe(base=0, count=10, min_timestamp=future, max_timestamp=future))
    hourly(book, clock, 4)
    clock.advance(1)
    assert Retention(book.lake).run().records == {}
    book.metadata.delete_segments_before("orders", 0, 10)
    assert Retention(book.lake).run().records == {"orders": 30}
    assert bases(book) == [40]


def test_the_oldest_segments_go_while_what_is_left_is_large_enough(book: Book, clock: ManualClock) -> None:
    book.metadata.create_topic("orders", 2, config={"retention.bytes": "250"})
    # A hundred bytes each.
    hourly(book, clock, 5)
    hourly(book, clock, 2, number=1)
    assert Retention(book.lake).run().segments == {"orders": 2}
    assert (bases(book), bases(book, number=1)) == ([20, 30, 40], [0, 10])
    book.metadata.update_topic_config("orders", {"retention.bytes": "1"})
    assert Retention(book.lake).run().segments == {"orders": 3}
    # The last stays: something is kept, however large it is.
    assert (bases(book), bases(book, number=1)) == ([40], [10])


def test_what_is_due_by_time_or_by_size_goes(book: Book, clock: ManualClock) -> None:
    book.metadata.create_topic("orders", retention_ms=round(2 * HOUR * 1000), config={"retention.bytes": "400"})
    hourly(book, clock, 5)
    Retention(book.lake).run()
    assert bases(book) == [20, 30, 40]
    book.metadata.update_topic_config("orders", {"retention.bytes": "100"})
    Retention(book.lake).run()
    assert bases(book) == [40]


def test_a_topic_that_keeps_everything_does(book: Book, clock: ManualClock) -> None:
    book.metadata.create_topic("orders")
    hourly(book, clock, 3)
    clock.advance(10_000 * HOUR)
    assert Retention(book.lake).run().records == {}
    assert bases(book) == [0, 10, 20]


def test_a_size_that_was_right_is_not_measured_again_until_there_is_more(
    book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.metadata.create_topic("orders", config={"retention.bytes": "250"})
    hourly(book, clock, 2)
    applying = Retention(book.lake)
    applying.run()
    asked: list[Any] = []
    inner = retention.kept_from

    def counted(*values: Any) -> int | None:
        asked.append(values)
        return inner(*values)

    monkeypatch.setattr(applied, "kept_from", counted)
    applying.run()
    assert asked == []
    hourly(book, clock, 2)
    assert applying.run().segments == {"orders": 1}
    assert len(asked) == 1
    book.metadata.update_topic_config("orders", {"retention.bytes": "100"})
    assert applying.run().segments == {"orders": 2}


# --- groups --------------------------------------------------------------------


def test_where_it_is_asked_for_nothing_goes_that_a_group_has_yet_to_read(book: Book, clock: ManualClock) -> None:
    book.metadata.create_topic("orders", 2, retention_ms=1, config={"retention.groups": "wait"})
    hourly(book, clock, 4)
    hourly(book, clock, 4, number=1)
    clock.advance(HOUR)
    book.metadata.commit_offset("fast", "orders", 0, 40)
    book.metadata.commit_offset("slow", "orders", 0, 15)
    applying = Retention(book.lake)
    applying.run()
    # To the segment that holds the offset. And both groups have yet to come to the other partition.
    assert (begins(book), begins(book, number=1)) == (10, 0)
    book.metadata.commit_offset("slow", "orders", 0, 40)
    book.metadata.commit_offset("slow", "orders", 1, 30)
    applying.run()
    assert (begins(book), begins(book, number=1)) == (40, 0)
    book.metadata.delete_consumer_group("fast")
    applying.run()
    assert (begins(book), begins(book, number=1)) == (40, 30)


def test_a_size_that_waits_for_a_group_goes_when_the_group_has_read(book: Book, clock: ManualClock) -> None:
    book.metadata.create_topic("orders", config={"retention.groups": "wait", "retention.bytes": "100"})
    hourly(book, clock, 4)
    book.metadata.commit_offset("slow", "orders", 0, 0)
    applying = Retention(book.lake)
    assert applying.run().records == {}
    book.metadata.commit_offset("slow", "orders", 0, 25)
    assert applying.run().records == {"orders": 20}


def test_groups_that_have_expired_are_waited_for_no_more(book: Book, clock: ManualClock) -> None:
    book.metadata.create_topic("orders", retention_ms=1, config={"retention.groups": "wait"})
    hourly(book, clock, 2)
    book.metadata.commit_offset("gone", "orders", 0, 0)
    janitor = Janitor(book.lake)
    clock.advance(book.settings.group_kept - HOUR)
    janitor.run_once()
    assert begins(book) == 0
    clock.advance(2 * HOUR)
    assert janitor.run_once("groups") == {"groups": {"groups": 1}}
    assert list(book.metadata.list_consumer_groups()) == []
    janitor.run_once("retention")
    assert begins(book) == 20


def test_groups_are_ignored_unless_they_are_to_be_waited_for(book: Book, clock: ManualClock) -> None:
    book.metadata.create_topic("orders", retention_ms=1)
    hourly(book, clock, 2)
    book.metadata.commit_offset("slow", "orders", 0, 0)
    clock.advance(1)
    Retention(book.lake).run()
    assert begins(book) == 20


# --- leases --------------------------------------------------------------------


def test_a_reader_with_a_lease_reads_on_through_retention_and_a_later_one_cannot_begin(
    book: Book, clock: ManualClock
) -> None:
    book.metadata.create_topic("orders", retention_ms=1000)
    for number in range(4):
        produce(book, "orders", 0, f"{number}.0", f"{number}.1")
    lease_id, topic_id = book.metadata.pin_topic("orders", {0: 3})
    clock.advance(2)
    janitor = Janitor(book.lake)
    janitor.run_once("retention")
    assert begins(book) == 8
    with pytest.raises(OffsetBelowLogStart):
        book.metadata.pin_topic("orders", {0: 3})
    for _ in range(5):
        clock.advance(GRACE)
        book.metadata.renew_pins([lease_id])
        janitor.run_once()
    # What lies before its place is gone, its own is not.
    read = values_of(book, book.metadata.list_segments_in(topic_id, 0, 3, 8), 3)
    assert read == [(3, b"1.1"), (4, b"2.0"), (5, b"2.1"), (6, b"3.0"), (7, b"3.1")]
    assert len(objects(book)) == 3
    book.metadata.advance_pin(lease_id, {(topic_id, 0): 6})
    janitor.run_once("retention")
    assert [row["base_offset"] for row in records(book, schema.segments)] == [6]
    book.metadata.unpin(lease_id)
    for _ in range(3):
        clock.advance(GRACE)
        janitor.run_once()
    assert objects(book) == []
    assert records(book, schema.segments) == []
    assert book.verify().ok


def test_leases_of_readers_that_died_are_ended_and_what_they_kept_goes(book: Book, clock: ManualClock) -> None:
    book.metadata.create_topic("orders", 2, retention_ms=1000)
    for number in range(2):
        produce(book, "orders", number, "a")
    dead, _ = book.metadata.pin_topic("orders", {0: 0, 1: 0})
    living, _ = book.metadata.pin_topic("orders", {1: 0})
    janitor = Janitor(book.lake)
    for _ in range(20):
        clock.advance(LEASE / 4)
        book.metadata.renew_pins([living])
        janitor.run_due()
    assert {row["id"] for row in records(book, schema.topic_leases)} == {living}
    janitor.run_once("retention")
    assert [(row["partition_id"]) for row in records(book, schema.segments)] == [1]
    assert dead != living


def test_a_clean_up_by_hand_waits_for_leases_that_may_yet_be_renewed_and_ends_the_dead(
    book: Book, clock: ManualClock
) -> None:
    book.metadata.create_topic("orders")
    produce(book, "orders", 0, "a")
    book.metadata.pin_topic("orders", {0: 0})
    clock.advance(LEASE + 1)
    assert book.cleaner.delete_expired_temporary_files(wait=False).dead_leases == 0
    assert book.cleaner.delete_expired_temporary_files().dead_leases == 1
    assert records(book, schema.topic_leases) == []


# --- rounds --------------------------------------------------------------------


def test_rounds_are_bounded_and_go_on_where_the_last_one_stopped(book: Book, clock: ManualClock) -> None:
    for topic in ("a", "b", "c"):
        book.metadata.create_topic(topic, retention_ms=1)
        hourly(book, clock, 2, topic)
    clock.advance(1)
    applying = Retention(book.lake)
    for topic in ("a", "b", "c"):
        assert applying.run(lambda: True).segments == {topic: 2}
    assert applying.run(lambda: True).segments == {}


def test_what_a_round_left_below_the_log_start_goes_with_the_next(
    book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applied, "_CHUNK", 2)
    book.metadata.create_topic("orders", retention_ms=1)
    hourly(book, clock, 5)
    clock.advance(1)
    applying = Retention(book.lake)
    assert applying.run(lambda: True).segments == {"orders": 2}
    assert begins(book) == 50
    assert len(records(book, schema.segments)) == 3
    # Also where retention has been turned off meanwhile.
    book.metadata.update_topic_config("orders", retention_ms=None)
    assert applying.run().segments == {"orders": 3}
    assert book.verify().unfinished == ()


def test_two_at_once_do_the_same_as_one(book: Book, clock: ManualClock) -> None:
    book.metadata.create_topic("orders", retention_ms=1)
    hourly(book, clock, 3)
    clock.advance(1)
    other: list[Any] = []

    def meanwhile() -> None:
        if not other:
            other.append(None)
            other[0] = Retention(book.lake).run()

    with failpoints.armed("transaction.after_commit", meanwhile):
        done = Retention(book.lake).run()
    assert (done.records, other[0].records) == ({"orders": 30}, {})
    assert other[0].segments.get("orders", 0) + done.segments.get("orders", 0) == 3
    assert book.verify().ok


def test_one_topic_that_fails_keeps_no_other_from_its_retention(
    book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for topic in ("a", "b"):
        book.metadata.create_topic(topic, retention_ms=1)
        hourly(book, clock, 1, topic)
    clock.advance(1)
    inner = retention.retain

    def failing(transaction: Any, topic: Any, *rest: Any) -> int:
        if topic.name == "a":
            raise RegistryBusy("busy", on="a")
        return inner(transaction, topic, *rest)

    monkeypatch.setattr(applied, "retain", failing)
    janitor = Janitor(book.lake)
    done = janitor.run_once("retention")["retention"]
    assert (done["records"], done["failed"], done["topics"]) == (10, 1, {"b": {"records": 10, "segments": 1}})
    (entry,) = book.maintenance_history(component="janitor")
    assert (entry.action, entry.detail["topics"]) == ("retention", {"b": {"records": 10, "segments": 1}})
    assert "a/0" in janitor.status()["failed"]["retention"][0]


# --- folders -------------------------------------------------------------------


def test_what_a_dead_producer_left_in_its_folder_goes_and_what_it_recorded_stays(
    book: Book, clock: ManualClock
) -> None:
    book.metadata.create_topic("orders")
    kept = produce(book, "orders", 0, "a")
    turn = book.metadata.claim_append("orders", 0, holder="dead")
    left = lay(book, f"{turn.folder}/left.parquet", b"left")
    janitor = Janitor(book.lake)
    janitor.run_once("segments")
    clock.advance(book.settings.append_turn + GRACE + 1)
    janitor.run_once("segments")
    # It may be alive though it is late: only its fence tells.
    assert left in objects(book)
    clock.advance(book.settings.insert_alive)
    assert janitor.run_once("segments")["segments"]["fenced"] == 1
    clock.advance(GRACE + 1)
    assert janitor.run_once("segments")["segments"]["objects"] == 1
    assert objects(book) == [kept.s3_key]
    late = lay(book, f"{turn.folder}/late.parquet", b"late")
    clock.advance(GRACE + 1)
    janitor.run_once("segments")
    assert late not in objects(book)
    for _ in range(2):
        clock.advance(GRACE + 1)
        janitor.run_once("segments")
    assert records(book, schema.stream_folders) == []
    assert book.verify().ok


def test_a_store_that_does_not_answer_leaves_everything_for_the_next_sweep(
    book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.metadata.create_topic("orders")
    for holder in ("a", "b"):
        turn = book.metadata.claim_append("orders", 0, holder=holder, seconds=1)
        lay(book, f"{turn.folder}/left.parquet", b"left")
        clock.advance(book.settings.insert_alive + 2)
    book.metadata.expire_turns()
    clock.advance(GRACE + 1)
    inner = book.lake.store.list

    def listed(prefix: str = "") -> Any:
        if prefix.endswith("/t1"):
            raise StorageUnavailable("no answer", on=prefix)
        return inner(prefix)

    monkeypatch.setattr(book.lake.store, "list", listed)
    done = sweep_streams(book.lake, book.metadata)
    assert (done.objects, len(done.failed)) == (1, 1)
    monkeypatch.undo()
    done = sweep_streams(book.lake, book.metadata)
    assert (done.objects, done.failed) == (1, [])


# --- plans ---------------------------------------------------------------------


@pytest.mark.parametrize("place", [SQLITE, POSTGRESQL], indirect=True)
def test_what_is_due_is_found_by_indexes(book: Book, place: Place) -> None:
    book.metadata.create_topic("orders")
    book.metadata.add_segments([describe(base=base, count=1) for base in range(3000)])
    asked: list[tuple[Statement, tuple[Any, ...]]] = [
        (retention.OLDEST_SEGMENTS, (1, -1, 100)),
        (retention.ENOUGH_BYTES, (1, 0, 0, 1000)),
    ]
    with book._registry.read() as reader:
        if place.kind == POSTGRESQL:
            reader._connection.execute("ANALYZE")
            reader._connection.execute("SET enable_seqscan = off")
        for statement, values in asked:
            compiled = statement.on(reader.kind)
            explain = "EXPLAIN QUERY PLAN" if place.kind == SQLITE else "EXPLAIN"
            arranged = compiled.arrange(values) if compiled.arrange else values
            plan = "\n".join(
                str(row[-1]) for row in reader._connection.execute(f"{explain} {compiled.sql}", arranged).fetchall()
            )
            assert re.search(r"(SEARCH|Index.*) .*segments", plan), plan
            assert not re.search(r"SCAN (segments|other)|Seq Scan on segments|TEMP B-TREE", plan), plan
        if place.kind == POSTGRESQL:
            reader._connection.execute("RESET enable_seqscan")
