"""Merges change no record and no offset, take no file from a reader, and let no retry land twice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from books import Place
from held import held_before_commit
from lake import objects, own_warehouse, records, run_sql  # noqa: F401
from lakebook import AppendTurn, Book, SegmentInfo
from lakebook.clock import ManualClock
from lakebook.errors import CommitAborted, InvalidSegment, MergeConflict, SequenceConflict, TopicNotFound
from lakebook.registry import schema
from stream_writes import (
    append,
    filled,
    folders,
    footer_paths,
    footers_of,
    in_folder,
    meanwhile,
    merge,
    merged,
    replace_with,
)

GRACE = 100.0
START = datetime(2024, 1, 1, tzinfo=UTC)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def orders(shared_place: Place, clock: ManualClock) -> Book:
    book = shared_place.open(clock=clock, temporary_file_grace=GRACE)
    book.metadata.create_topic("orders", 2)
    return book


def spans(book: Book, partition: int = 0) -> list[tuple[int, int]]:
    return [(segment.base_offset, segment.end_offset) for segment in book.metadata.get_segments("orders", partition)]


def retired(book: Book) -> set[str]:
    return {row["file_path"] for row in records(book, schema.retired_segments)}


def waiting(book: Book) -> set[str]:
    return {file.file_path for file in book.metadata.list_temporary_files()}


# --- the log -------------------------------------------------------------------


def test_a_merge_keeps_the_log_as_it_is(orders: Book) -> None:
    old = filled(orders, 6)
    new = merge(orders, old[1:4])
    assert spans(orders) == [(0, 9), (10, 39), (40, 49), (50, 59)]
    assert orders.metadata.find_segment_for_offset("orders", 0, 25) == new
    partition = orders.metadata.get_partition("orders", 0)
    assert partition is not None
    assert (partition.log_start, partition.high_watermark) == (0, 60)
    assert footer_paths(orders) == {segment.s3_key for segment in (*old, new)}
    assert orders.verify(files=False).ok
    # Also when what was merged is merged again, with all that is there.
    merge(orders, list(orders.metadata.get_segments("orders", 0)))
    assert spans(orders) == [(0, 59)]
    assert append(orders, orders.metadata.claim_append("orders", 0)).next_offset == 70
    assert orders.verify(files=False).ok


def test_records_are_found_by_time_after_a_merge_as_before(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    # The newest record of all is in the second segment: those after it are older.
    for least, most in ((0, 1), (2, 9), (3, 4), (5, 6), (10, 11)):
        times: dict[str, Any] = {
            "min_timestamp": START + timedelta(hours=least),
            "max_timestamp": START + timedelta(hours=most),
        }
        turn = append(orders, turn, **times)

    def found(hour: int) -> int | None:
        segment = orders.metadata.find_segment_for_timestamp("orders", 0, START + timedelta(hours=hour))
        return None if segment is None else segment.base_offset

    assert [found(hour) for hour in (0, 1, 2, 9, 10, 12)] == [0, 0, 10, 10, 40, None]
    new = merge(orders, list(orders.metadata.get_segments("orders", 0))[2:4])
    assert (new.min_timestamp, new.max_timestamp) == (START + timedelta(hours=3), START + timedelta(hours=6))
    assert [found(hour) for hour in (0, 1, 2, 9, 10, 12)] == [0, 0, 10, 10, 40, None]
    merge(orders, list(orders.metadata.get_segments("orders", 0))[:2])
    assert [found(hour) for hour in (0, 1, 2, 9, 10, 12)] == [0, 0, 0, 0, 40, None]
    assert orders.verify(files=False).ok


def test_a_book_that_remembers_segments_sees_that_they_were_merged(shared_place: Place) -> None:
    book, reader = shared_place.open(), shared_place.open()
    book.metadata.create_topic("orders", 2)
    old = filled(book, 4)
    for segment in old:
        assert reader.metadata.find_segment_for_offset("orders", 0, segment.base_offset) == segment
    known = reader.metadata._cache.known("orders", 0)
    new = merge(book, old[1:3])
    assert reader.metadata.find_segment_for_offset("orders", 0, 25) == new
    # One that was looked up before the merge, and is remembered after it, is not.
    reader.metadata._cache.remember(old[2], known)
    assert reader.metadata.find_segment_for_offset("orders", 0, 25) == new
    assert book.metadata.find_segment_for_offset("orders", 0, 15) == new


# --- conflicts -----------------------------------------------------------------


def test_a_merge_of_what_is_no_longer_there_changes_nothing(orders: Book) -> None:
    old = filled(orders, 6)
    merge(orders, old[1:3])
    orders.metadata.delete_segments_before("orders", 0, 10)
    before = spans(orders)
    for some in (old[0:2], old[1:3], old[2:4]):
        with pytest.raises(MergeConflict) as caught:
            merge(orders, some)
        assert caught.value.transient
    assert spans(orders) == before == [(10, 29), (30, 39), (40, 49), (50, 59)]
    assert orders.verify(files=False).ok


def test_segments_below_the_log_start_are_not_merged_though_a_reader_keeps_them(orders: Book) -> None:
    old = filled(orders, 4)
    orders.metadata.pin_topic("orders", {0: 0})
    orders.metadata.delete_segments_before("orders", 0, 20)
    for some in (old[0:2], old[1:3]):
        with pytest.raises(MergeConflict):
            merge(orders, some)
    merge(orders, old[2:4])
    assert spans(orders) == [(20, 39)]
    assert len(records(orders, schema.segments)) == 3


def test_a_merge_that_makes_no_sense_is_refused(orders: Book) -> None:
    old = filled(orders, 4)
    other = filled(orders, 1, partition=1)
    folder = orders.metadata.open_stream_folder("orders", "m", 0)
    good = merged(folder, old[:2])
    producer: dict[str, Any] = {"producer_id": "p", "producer_epoch": 0, "first_sequence": 0, "last_sequence": 19}
    for some, new in (
        ([], good),
        (old[:3], good),
        ([old[0], old[2]], in_folder(folder.folder, 0, count=30)),
        ([old[1], old[0]], good),
        ([old[0], *other], good),
        ([in_folder("x", 0), old[1]], good),
        (old[:2], merged(folder, old[:2], **producer)),
        (old[:2], in_folder("topics/elsewhere", 0, count=20)),
    ):
        with pytest.raises(InvalidSegment):
            replace_with(orders, folder, some, new)
    assert spans(orders) == [(0, 9), (10, 19), (20, 29), (30, 39)]
    replace_with(orders, folder, old[:2], good)


def test_of_two_merges_that_race_one_wins(shared_place: Place) -> None:
    one, two = shared_place.open(), shared_place.open()
    one.metadata.create_topic("orders", 2)
    old = filled(one, 5)
    with held_before_commit(lambda: merge(one, old[:3]), skip=1) as first, pytest.raises(MergeConflict):
        meanwhile(lambda: merge(two, old[2:5]), first)
    assert spans(one) == [(0, 29), (30, 39), (40, 49)]
    assert retired(one) == {segment.s3_key for segment in old[:3]}
    assert one.verify(files=False).ok


def test_retention_and_a_merge_that_race_lose_nothing(shared_place: Place) -> None:
    one, two = shared_place.open(), shared_place.open()
    one.metadata.create_topic("orders", 2)
    old = filled(one, 6)
    # The merge is first: the segment that holds the offset stays whole.
    with held_before_commit(lambda: merge(one, old[:3]), skip=1) as merging:
        assert meanwhile(lambda: two.metadata.delete_segments_before("orders", 0, 20), merging) == 0
    assert spans(one)[0] == (0, 29)
    # Retention is first: its log start has moved, and its rows go later.
    moving = lambda: two.metadata.delete_segments_before("orders", 0, 40)  # noqa: E731
    with held_before_commit(moving) as removing, pytest.raises(MergeConflict):
        meanwhile(lambda: merge(one, old[3:6]), removing)
    assert spans(one) == [(40, 49), (50, 59)]
    assert one.verify(files=False).ok


def test_appends_go_on_while_segments_are_merged(shared_place: Place) -> None:
    one, two = shared_place.open(), shared_place.open()
    one.metadata.create_topic("orders", 2)
    old = filled(one, 3)
    turn = two.metadata.claim_append("orders", 0)
    with held_before_commit(lambda: merge(one, old), skip=1) as merging:
        turn = meanwhile(lambda: append(two, turn), merging)
    assert spans(one) == [(0, 29), (30, 39)]
    append(two, turn)
    assert one.verify(files=False).ok


# --- the fence -----------------------------------------------------------------


def test_a_merge_that_was_given_up_cannot_land(orders: Book) -> None:
    old = filled(orders, 2)
    folder = orders.metadata.open_stream_folder("orders", "m", 0)
    orders.metadata.end_stream_folder(folder)
    with pytest.raises(CommitAborted):
        replace_with(orders, folder, old, merged(folder, old))
    assert spans(orders) == [(0, 9), (10, 19)]
    assert retired(orders) == set()


def test_a_merge_in_flight_is_waited_for_by_whoever_would_give_it_up(shared_place: Place) -> None:
    one, two = shared_place.open(), shared_place.open()
    one.metadata.create_topic("orders", 2)
    old = filled(one, 2)
    folder = one.metadata.open_stream_folder("orders", "m", 0)
    with held_before_commit(lambda: replace_with(one, folder, old, merged(folder, old))) as merging:
        meanwhile(lambda: two.metadata.end_stream_folder(folder), merging)
    assert spans(one) == [(0, 19)]
    assert folders(one, ended=False) == []


def test_a_repeated_merge_is_known(orders: Book) -> None:
    old = filled(orders, 2)
    folder = orders.metadata.open_stream_folder("orders", "m", 0)
    new = merged(folder, old)
    first = replace_with(orders, folder, old, new)
    again = replace_with(orders, folder, old, new)
    assert (again.id, again.s3_key) == (first.id, first.s3_key)
    assert folder.folder in folders(orders, ended=True)
    # Ending it afterwards takes nothing back.
    orders.metadata.end_stream_folder(folder)
    assert spans(orders) == [(0, 19)]


def test_a_merge_in_a_deleted_topic_is_refused(orders: Book) -> None:
    old = filled(orders, 2)
    folder = orders.metadata.open_stream_folder("orders", "m", 0)
    orders.metadata.delete_topic("orders")
    orders.metadata.create_topic("orders", 2)
    with pytest.raises((TopicNotFound, CommitAborted)):
        replace_with(orders, folder, old, merged(folder, old))
    assert spans(orders) == []


def test_what_follows_a_merge_happens_with_it_or_not_at_all(orders: Book) -> None:
    old = filled(orders, 4)
    folder = orders.metadata.open_stream_folder("orders", "m", 0)
    new = merged(folder, old[:2])
    told: list[dict[str, Any]] = []

    def refuse(transaction: Any, partition: dict[str, Any]) -> None:
        told.append(partition)
        raise MergeConflict("not now", on="a table")

    with pytest.raises(MergeConflict):
        replace_with(orders, folder, old[:2], new, then=refuse)
    assert spans(orders) == [(0, 9), (10, 19), (20, 29), (30, 39)]
    replace_with(orders, folder, old[:2], new, then=lambda transaction, partition: told.append(partition))
    assert spans(orders) == [(0, 19), (20, 29), (30, 39)]
    assert [(row["partition_id"], row["high_watermark"]) for row in told] == [(0, 40), (0, 40)]


# --- files ---------------------------------------------------------------------


def test_files_of_merged_segments_stay_for_readers_that_may_know_them(orders: Book, clock: ManualClock) -> None:
    old = filled(orders, 6, files=True)
    before, _ = orders.metadata.pin_topic("orders", {0: 0})
    ahead, topic_id = orders.metadata.pin_topic("orders", {0: 25})
    merge(orders, old[:2], files=True)
    merge(orders, old[2:4], files=True)
    after, _ = orders.metadata.pin_topic("orders", {0: 0})
    orders.metadata.pin_topic("orders", {1: 0})
    assert orders.metadata.release_retired() == 0
    # The one that begins at 25 needs what holds that offset, and nothing before.
    orders.metadata.unpin(before)
    assert orders.metadata.release_retired() == 2
    assert retired(orders) == {old[2].s3_key, old[3].s3_key}
    orders.metadata.advance_pin(ahead, {(topic_id, 0): 30})
    assert orders.metadata.release_retired() == 1
    assert retired(orders) == {old[3].s3_key}
    orders.metadata.advance_pin(ahead, {(topic_id, 0): 40})
    assert orders.metadata.release_retired() == 1
    assert retired(orders) == set()
    assert waiting(orders) == {segment.s3_key for segment in old[:4]}
    assert orders.verify(files=False).ok
    clock.advance(GRACE + 1)
    assert orders.cleaner.delete_expired_temporary_files(wait=False).files == 4
    live = {segment.s3_key for segment in orders.metadata.get_segments("orders", 0)}
    assert footer_paths(orders) == set(objects(orders)) == live
    # A lease that came after the merges keeps none of it, and needs none.
    assert after in {row["id"] for row in records(orders, schema.topic_leases)}
    assert orders.verify(files=False).ok


def test_a_lease_that_inherits_keeps_what_the_former_one_may_have_found(orders: Book) -> None:
    old = filled(orders, 2)
    former, _ = orders.metadata.pin_topic("orders", {0: 0})
    merge(orders, old)
    heir, _ = orders.metadata.pin_topic("orders", {0: 0}, inherit=former)
    orders.metadata.unpin(former)
    assert orders.metadata.release_retired() == 0
    orders.metadata.unpin(heir)
    assert orders.metadata.release_retired() == 2


def test_a_lease_that_is_taken_while_segments_are_merged_is_before_or_after(shared_place: Place) -> None:
    one, two = shared_place.open(), shared_place.open()
    one.metadata.create_topic("orders", 2)
    old = filled(one, 4)
    # The merge is first: whoever comes then finds the merged one.
    with held_before_commit(lambda: merge(one, old[:2]), skip=1) as merging:
        meanwhile(lambda: two.metadata.pin_topic("orders", {0: 0}), merging)
    assert one.metadata.release_retired() == 2
    # The lease is first.
    with held_before_commit(lambda: two.metadata.pin_topic("orders", {0: 0})) as pinning:
        meanwhile(lambda: merge(one, old[2:]), pinning)
    assert one.metadata.release_retired() == 0


def test_verify_tells_of_files_that_are_retired_and_used(orders: Book) -> None:
    old = filled(orders, 3)
    merge(orders, old[:2])
    run_sql(orders, f"UPDATE retired_segments SET file_path = '{old[2].s3_key}' WHERE base_offset = 0")
    run_sql(
        orders,
        "INSERT INTO temporary_files (file_path, file_size, state, reason, added_at, expiration)"
        f" VALUES ('{old[1].s3_key}', 1, 'waiting', 'merged', 1, 1)",
    )
    findings = {finding.on for finding in orders.verify(files=False).findings if finding.check == "files"}
    assert findings == {old[1].s3_key, old[2].s3_key}


# --- producers -----------------------------------------------------------------


def batch(turn: AppendTurn, first: int, *, base: int | None = None, count: int = 10, epoch: int = 0) -> SegmentInfo:
    facts: dict[str, Any] = {"producer_id": "p", "producer_epoch": epoch, "first_sequence": first}
    start = turn.next_offset if base is None else base
    return in_folder(turn.folder, start, count=count, last_sequence=first + count - 1, **facts)


def produce(book: Book, turn: AppendTurn, *new: SegmentInfo) -> Any:
    return book.metadata.append_segments(turn, new, footers=footers_of(*new))


def everything(book: Book) -> list[SegmentInfo]:
    return list(book.metadata.get_segments("orders", 0))


def test_a_retry_of_the_last_batch_after_a_merge_is_a_duplicate_with_its_offsets(orders: Book) -> None:
    turn = append(orders, orders.metadata.claim_append("orders", 0))
    turn = produce(orders, turn, batch(turn, 0)).turn
    turn = produce(orders, turn, batch(turn, 10)).turn
    turn = append(orders, turn)
    merge(orders, everything(orders))
    again = produce(orders, turn, batch(turn, 10))
    assert again.duplicate
    assert [(segment.base_offset, segment.end_offset) for segment in again.segments] == [(20, 29)]
    assert again.turn.next_offset == 40
    # An older one, or one of another cut, never lands twice.
    for first, count in ((0, 10), (0, 20), (5, 10), (15, 10)):
        with pytest.raises(SequenceConflict):
            produce(orders, turn, batch(turn, first, count=count))
    assert spans(orders) == [(0, 39)]
    turn = produce(orders, turn, batch(turn, 20)).turn
    assert produce(orders, turn, batch(turn, 0, epoch=1)).turn.next_offset == 60
    assert orders.verify(files=False).ok


def test_a_retry_of_several_segments_is_found_though_some_were_merged(orders: Book) -> None:
    turn = append(orders, orders.metadata.claim_append("orders", 0))
    first = [batch(turn, 0), batch(turn, 10, base=20), batch(turn, 20, base=30)]
    turn = produce(orders, turn, *first).turn

    def repeat() -> list[tuple[int, int]]:
        again = produce(orders, turn, batch(turn, 0), batch(turn, 10, base=50), batch(turn, 20, base=60))
        assert again.duplicate
        return [(segment.base_offset, segment.end_offset) for segment in again.segments]

    expected = [(10, 19), (20, 29), (30, 39)]
    assert repeat() == expected
    merge(orders, everything(orders)[:2])
    assert repeat() == expected
    merge(orders, everything(orders)[:2])
    assert repeat() == expected
    # Merged, and then removed.
    orders.metadata.delete_segments_before("orders", 0, 30)
    assert repeat() == expected
    merge(orders, everything(orders))
    assert repeat() == expected
    orders.metadata.delete_segments_before("orders", 0, 40)
    assert repeat() == expected
    assert orders.verify(files=False).ok


def test_a_call_that_is_repeated_after_a_merge_is_known_by_its_file(orders: Book, clock: ManualClock) -> None:
    turn = orders.metadata.claim_append("orders", 0, holder="a")
    segment = in_folder(turn.folder, 0)
    later = orders.metadata.append_segment(turn, segment, footers=footers_of(segment)).turn
    append(orders, later)
    merge(orders, everything(orders))
    for _ in range(3):
        again = orders.metadata.append_segment(turn, segment, footers=footers_of(segment))
        assert again.duplicate
        assert again.segments[0].end_offset == 9
        # First it is retired, then it waits, then it is gone.
        orders.metadata.release_retired()
        clock.advance(GRACE + 1)
        orders.cleaner.delete_expired_temporary_files(wait=False)
    assert spans(orders) == [(0, 19)]
