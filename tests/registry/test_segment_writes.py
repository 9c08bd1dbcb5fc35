"""Segments with files: folders with a fence, footers, batches of several partitions, and what a sweep may remove."""

from __future__ import annotations

from typing import Any

import pytest
from bench.plans import unindexed

from books import POSTGRESQL, Place, describe
from held import held_before_commit
from lake import lay, numbers, objects, own_warehouse, records, run_sql  # noqa: F401
from lakebook import AppendTurn, Book, SegmentInfo
from lakebook.clock import ManualClock
from lakebook.errors import (
    AppendTurnLost,
    CommitAborted,
    InvalidInput,
    InvalidSegment,
    PartitionNotFound,
    PathInUse,
    SegmentOverlap,
    TopicNotFound,
)
from lakebook.registry import appends, merges, schema, sinks, stream_folders
from lakebook.registry.commits import prune_commit_rows
from lakebook.registry.sinks import AppendResults
from lakebook.registry.stream_folders import (
    StreamFolder,
    forget_folder,
    note_folder_swept,
    unknown_stream_paths,
    unswept_folders,
)
from stream_writes import append, filled, folders, footer_paths, footers_of, in_folder, meanwhile, merge

GRACE = 100.0
ALIVE = 600.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def orders(shared_place: Place, clock: ManualClock) -> Book:
    book = shared_place.open(clock=clock, temporary_file_grace=GRACE, sweep_grace=GRACE, insert_alive=ALIVE)
    book.metadata.create_topic("orders", 3)
    return book


def commit_state(book: Book, commit_id: str | None) -> str:
    (row,) = records(book, schema.commits, id=commit_id)
    return str(row["state"])


# --- folders of turns ----------------------------------------------------------


def test_every_turn_has_a_folder_of_its_own_that_ends_with_it(orders: Book) -> None:
    topic = orders.metadata.get_topic("orders")
    assert topic is not None
    first = orders.metadata.claim_append("orders", 1, holder="a")
    assert first.folder == f"topics/{topic.id}/1/t1"
    assert folders(orders, ended=False) == [first.folder]
    # An append goes on in the same folder, a new claim does not.
    first = append(orders, first)
    assert folders(orders) == [first.folder]
    second = orders.metadata.claim_append("orders", 1, holder="a")
    assert second.folder.endswith("/t2")
    assert folders(orders, ended=True) == [first.folder]
    assert folders(orders, ended=False) == [second.folder]
    assert orders.metadata.release_append(second)
    assert folders(orders, ended=False) == []
    assert orders.verify(files=False).ok


def test_releasing_a_lost_turn_leaves_the_folder_of_the_present_one_open(orders: Book, clock: ManualClock) -> None:
    lost = orders.metadata.claim_append("orders", 0, holder="a")
    clock.advance(60)
    present = orders.metadata.claim_append("orders", 0, holder="b")
    assert not orders.metadata.release_append(lost)
    assert folders(orders, ended=False) == [present.folder]
    append(orders, present)


def test_a_turn_that_ran_out_long_ago_is_released_and_its_folder_ends(orders: Book, clock: ManualClock) -> None:
    silent = orders.metadata.claim_append("orders", 0, holder="a", seconds=10)
    alive = orders.metadata.claim_append("orders", 1, holder="b", seconds=10)
    clock.advance(ALIVE)
    alive = append(orders, alive)
    assert orders.metadata.expire_turns() == 0
    clock.advance(11)
    assert orders.metadata.expire_turns() == 1
    assert folders(orders, ended=False) == [alive.folder]
    assert commit_state(orders, silent.commit_id) == "aborted"
    with pytest.raises(AppendTurnLost):
        append(orders, silent)
    # The token is never given again: its folder may hold what the former holder has left.
    assert orders.metadata.claim_append("orders", 0, holder="c").token == silent.token + 1
    append(orders, alive)
    assert orders.metadata.expire_turns() == 0
    assert orders.verify(files=False).ok


def test_a_turn_whose_append_is_under_way_is_not_released(shared_place: Place, clock: ManualClock) -> None:
    book = shared_place.open(clock=clock, insert_alive=ALIVE)
    book.metadata.create_topic("orders")
    turn = book.metadata.claim_append("orders", 0, holder="a", seconds=10)
    clock.advance(ALIVE + 60)
    other = shared_place.open(clock=clock, insert_alive=ALIVE)
    with held_before_commit(lambda: append(book, turn)) as appending:
        assert meanwhile(other.metadata.expire_turns, appending) == 0
    assert folders(book, ended=False) == [turn.folder]
    append(book, appending.result)


# --- footers -------------------------------------------------------------------


def test_a_footer_is_recorded_with_its_segment_and_only_once(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    new = [in_folder(turn.folder, 0), in_folder(turn.folder, 10)]
    landed = orders.metadata.append_segments(turn, new, footers=footers_of(*new))
    rows = records(orders, schema.partition_metadata)
    assert {(row["file_path"], row["num_rows"], row["file_size"]) for row in rows} == {
        (segment.s3_key, 10, 100) for segment in new
    }
    assert {(row["partition_format_version"], bytes(row["metadata"])) for row in rows} == {(2, b"the end of a file")}
    assert orders.metadata.append_segments(turn, new, footers=footers_of(*new)).duplicate
    assert records(orders, schema.partition_metadata) == rows
    # Of an append that is refused nothing stays.
    late = in_folder(turn.folder, 10)
    with pytest.raises(SegmentOverlap):
        orders.metadata.append_segment(landed.turn, late, footers=footers_of(late))
    assert records(orders, schema.partition_metadata) == rows
    assert orders.verify(files=False).ok


def test_a_producers_repeated_batch_leaves_no_footer_of_the_file_that_does_not_count(orders: Book) -> None:
    def batch(turn: AppendTurn) -> SegmentInfo:
        facts: dict[str, Any] = {"producer_id": "p", "producer_epoch": 0, "first_sequence": 0, "last_sequence": 9}
        return in_folder(turn.folder, turn.next_offset, **facts)

    turn = orders.metadata.claim_append("orders", 0)
    first = batch(turn)
    turn = orders.metadata.append_segment(turn, first, footers=footers_of(first)).turn
    again = batch(turn)
    assert orders.metadata.append_segment(turn, again, footers=footers_of(again)).duplicate
    assert footer_paths(orders) == {first.s3_key}


def test_a_file_has_to_lie_in_the_folder_of_its_turn(orders: Book) -> None:
    former = orders.metadata.claim_append("orders", 0)
    turn = orders.metadata.claim_append("orders", 0)
    old = in_folder(former.folder, 0)
    with pytest.raises(InvalidSegment):
        orders.metadata.append_segment(turn, old, footers=footers_of(old))
    mine = in_folder(turn.folder, 0)
    for footers in (footers_of(mine, old), {mine.s3_key: b""}, {mine.s3_key: "text"}):
        with pytest.raises(InvalidSegment):
            orders.metadata.append_segment(turn, mine, footers=footers)  # type: ignore[arg-type]
    assert footer_paths(orders) == set()
    assert not orders.metadata.append_segment(turn, mine, footers=footers_of(mine)).duplicate


def test_a_footer_goes_with_its_file_and_not_before(orders: Book, clock: ManualClock) -> None:
    kept = filled(orders, 2, files=True)
    orders.metadata.delete_segments_before("orders", 0, 10)
    assert footer_paths(orders) == {segment.s3_key for segment in kept}
    orders.cleaner.delete_expired_temporary_files(wait=False)
    assert len(objects(orders)) == 2
    clock.advance(GRACE + 1)
    assert orders.cleaner.delete_expired_temporary_files(wait=False).files == 1
    assert footer_paths(orders) == {kept[1].s3_key}
    assert objects(orders) == [kept[1].s3_key]
    assert orders.verify(files=False).ok


def test_footers_of_segments_are_not_taken_for_leftovers(orders: Book) -> None:
    numbers(orders, "t", [1])
    segments = filled(orders, 3)
    merge(orders, segments[:2])
    before = footer_paths(orders)
    assert orders.verify(files=False).ok
    assert orders.repair().mended == []
    assert footer_paths(orders) == before


def test_verify_tells_of_footers_and_folders_that_cannot_be(orders: Book) -> None:
    turn = append(orders, orders.metadata.claim_append("orders", 0, holder="a"))
    batch = orders.metadata.open_stream_folder("orders", "s")
    assert orders.verify(files=False).ok
    run_sql(orders, "UPDATE partition_metadata SET num_rows = 9")
    run_sql(orders, "UPDATE stream_folders SET ended_at = 1")
    found = {(finding.check, finding.on) for finding in orders.verify(files=False).findings}
    (path,) = footer_paths(orders)
    assert found == {("footers", path), ("folders", turn.folder), ("folders", batch.folder)}


# --- batches -------------------------------------------------------------------


def claimed(book: Book, *partitions: int, holder: str = "sink") -> list[AppendTurn]:
    return book.metadata.claim_appends([("orders", number) for number in partitions], holder=holder)


def send(
    book: Book, turns: list[AppendTurn], *, folder: StreamFolder | None = None, count: int = 10, **more: Any
) -> AppendResults:
    """Append a batch: one segment to the partition of each turn."""
    folder = folder or book.metadata.open_stream_folder("orders", "s")
    assert folder.commit_id is not None
    new = [
        (turn, [in_folder(folder.folder, turn.next_offset, partition=turn.partition_id, count=count)]) for turn in turns
    ]
    footers = footers_of(*(segment for _, theirs in new for segment in theirs))
    return book.metadata.append_batch("orders", new, commit_id=folder.commit_id, footers=footers, **more)


def ends(book: Book) -> list[int]:
    return [partition.high_watermark for partition in book.metadata.list_partitions("orders")]


def test_a_batch_lands_in_all_its_partitions_at_once(orders: Book) -> None:
    folder = orders.metadata.open_stream_folder("orders", "s")
    topic = orders.metadata.get_topic("orders")
    assert topic is not None
    assert (folder.folder, folder.topic_id) == (f"topics/{topic.id}/s-{folder.commit_id}", topic.id)
    result = send(orders, claimed(orders, 2, 0), folder=folder)
    assert not result.duplicate
    assert [segment.partition_id for segment in result.segments] == [2, 0]
    assert ends(orders) == [10, 0, 10]
    assert footer_paths(orders) == {segment.s3_key for segment in result.segments}
    # Its own commit and folder are finished, the turns go on.
    assert commit_state(orders, folder.commit_id) == "committed"
    assert folder.folder in folders(orders, ended=True)
    assert [turn.next_offset for turn in result.turns] == [10, 10]
    assert not send(orders, list(result.turns)).duplicate
    assert ends(orders) == [20, 0, 20]
    assert orders.verify(files=False).ok


def test_a_repeated_batch_of_a_sink_records_nothing(orders: Book) -> None:
    assert orders.metadata.last_batch("orders", "q") is None
    first = send(orders, claimed(orders, 0, 1), sink="q", batch_id=7)
    assert orders.metadata.last_batch("orders", "q") == 7
    # By whoever comes after a crash, with turns, a folder and files of its own; also an older one.
    for number in (7, 3):
        again = send(orders, claimed(orders, 0, 1), sink="q", batch_id=number)
        assert again.duplicate
        assert again.segments == ()
    # By the former process, whose turns are lost.
    assert send(orders, list(first.turns), sink="q", batch_id=7).duplicate
    assert ends(orders) == [10, 10, 0]
    assert len(footer_paths(orders)) == 2
    # Sinks count by themselves.
    assert not send(orders, claimed(orders, 0), sink="r", batch_id=0).duplicate
    assert not send(orders, claimed(orders, 0), sink="q", batch_id=8).duplicate
    assert (orders.metadata.last_batch("orders", "q"), orders.metadata.last_batch("orders", "r")) == (8, 0)
    assert orders.verify(files=False).ok


def test_a_batch_is_known_by_its_commit_if_its_outcome_was_not(orders: Book) -> None:
    folder = orders.metadata.open_stream_folder("orders", "s")
    turns = claimed(orders, 0, 1)
    first = send(orders, turns, folder=folder)
    again = send(orders, turns, folder=folder)
    assert again.duplicate
    assert [segment.base_offset for segment in again.segments] == [0, 0]
    # The turns that come with it are the ones to go on with.
    assert [turn.commit_id for turn in again.turns] == [turn.commit_id for turn in first.turns]
    assert not send(orders, list(again.turns)).duplicate
    assert ends(orders) == [20, 20, 0]


def test_a_batch_with_one_lost_turn_lands_nothing(orders: Book, clock: ManualClock) -> None:
    turns = claimed(orders, 0, 1, 2)
    clock.advance(60)
    taken = orders.metadata.claim_append("orders", 1, holder="other")
    folder = orders.metadata.open_stream_folder("orders", "s")
    with pytest.raises(AppendTurnLost):
        send(orders, turns, folder=folder, sink="q", batch_id=1)
    assert ends(orders) == [0, 0, 0]
    assert footer_paths(orders) == set()
    assert orders.metadata.last_batch("orders", "q") is None
    # What was not lost is as it was, and the batch too.
    assert commit_state(orders, folder.commit_id) == "open"
    append(orders, taken)
    append(orders, turns[0])
    assert orders.verify(files=False).ok


def test_a_batch_whose_folder_was_ended_lands_nothing(orders: Book) -> None:
    folder = orders.metadata.open_stream_folder("orders", "s")
    turns = claimed(orders, 0, 1)
    orders.metadata.end_stream_folder(folder)
    with pytest.raises(CommitAborted):
        send(orders, turns, folder=folder, sink="q", batch_id=1)
    assert ends(orders) == [0, 0, 0]
    assert not send(orders, turns, sink="q", batch_id=1).duplicate


def test_an_empty_batch_of_a_sink_is_remembered(orders: Book) -> None:
    assert not send(orders, [], sink="q", batch_id=4).duplicate
    assert send(orders, [], sink="q", batch_id=4).duplicate
    assert orders.metadata.last_batch("orders", "q") == 4


def test_a_batch_that_makes_no_sense_is_refused(orders: Book) -> None:
    turns = claimed(orders, 0, 1)
    folder = orders.metadata.open_stream_folder("orders", "s")
    commit = str(folder.commit_id)
    store = orders.metadata
    one, two = in_folder(folder.folder, 0), in_folder(folder.folder, 0, partition=1)
    for more in ({"sink": "q"}, {"batch_id": 1}, {"sink": "q", "batch_id": -1}, {"sink": "q", "batch_id": True}):
        with pytest.raises(InvalidInput):
            store.append_batch("orders", [(turns[0], [one])], commit_id=commit, **more)
    broken: list[list[tuple[AppendTurn, list[SegmentInfo]]]] = [
        [(turns[0], [two])],
        [(turns[0], [])],
        [(turns[0], [one]), (turns[0], [in_folder("a", 10)])],
    ]
    for new in broken:
        with pytest.raises(InvalidInput):
            store.append_batch("orders", new, commit_id=commit)
    elsewhere = in_folder("topics/elsewhere", 0)
    with pytest.raises(InvalidSegment):
        store.append_batch("orders", [(turns[0], [elsewhere])], commit_id=commit, footers=footers_of(elsewhere))
    for kind, number in (("m", None), ("s", 0), ("x", None)):
        with pytest.raises(InvalidInput):
            store.open_stream_folder("orders", kind, number)
    with pytest.raises(PartitionNotFound):
        store.open_stream_folder("orders", "m", 3)
    with pytest.raises(TopicNotFound):
        store.open_stream_folder("nothing", "s")
    assert ends(orders) == [0, 0, 0]
    # Another topic of that name has other partitions.
    store.delete_topic("orders")
    store.create_topic("orders", 3)
    with pytest.raises((TopicNotFound, CommitAborted)):
        send(orders, turns, folder=folder)


def test_of_two_attempts_at_a_batch_one_lands(shared_place: Place) -> None:
    one, two = shared_place.open(), shared_place.open()
    one.metadata.create_topic("orders", 3)
    former, latter = claimed(one, 0, holder="a"), claimed(two, 1, holder="b")
    with held_before_commit(lambda: send(one, former, sink="q", batch_id=1), skip=1) as first:
        second = meanwhile(lambda: send(two, latter, sink="q", batch_id=1), first)
    assert (first.result.duplicate, second.duplicate) == (False, True)
    assert ends(one) == [10, 0, 0]
    assert one.verify(files=False).ok


def test_a_batch_in_flight_is_waited_for_by_whoever_would_end_it(shared_place: Place) -> None:
    book, janitor = shared_place.open(), shared_place.open()
    book.metadata.create_topic("orders", 3)
    turns = claimed(book, 0, 1)
    folder = book.metadata.open_stream_folder("orders", "s")
    with held_before_commit(lambda: send(book, turns, folder=folder)) as sending:
        meanwhile(lambda: janitor.metadata.end_stream_folder(folder), sending)
    assert commit_state(book, folder.commit_id) == "committed"
    assert ends(book) == [10, 10, 0]


# --- sweeping ------------------------------------------------------------------


def unswept(book: Book, clock: ManualClock, most: int = 100) -> list[StreamFolder]:
    return book._registry.read_with(lambda reader: unswept_folders(reader, clock.now_ms(), GRACE, most))


def unknown(book: Book, *paths: str) -> list[str]:
    return book._registry.read_with(lambda reader: unknown_stream_paths(reader, paths))


def test_a_folder_is_swept_a_grace_after_its_end_and_once_more_a_grace_later(orders: Book, clock: ManualClock) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    clock.advance(10 * GRACE)
    assert unswept(orders, clock) == []
    orders.metadata.release_append(turn)
    clock.advance(GRACE - 1)
    assert unswept(orders, clock) == []
    clock.advance(2)
    (found,) = unswept(orders, clock)
    assert (found.folder, found.token, found.swept_at) == (turn.folder, 1, None)
    orders._registry.write(lambda transaction: note_folder_swept(transaction, found.folder))
    clock.advance(GRACE - 1)
    assert unswept(orders, clock) == []
    clock.advance(2)
    (found,) = unswept(orders, clock)
    assert found.swept_at is not None
    orders._registry.write(lambda transaction: forget_folder(transaction, found.folder))
    assert folders(orders) == []


def test_a_folder_that_is_not_ended_is_never_forgotten(orders: Book) -> None:
    turn = orders.metadata.claim_append("orders", 0)
    orders._registry.write(lambda transaction: forget_folder(transaction, turn.folder))
    assert folders(orders) == [turn.folder]


def test_the_folder_that_ended_first_is_swept_first(orders: Book, clock: ManualClock) -> None:
    turns = claimed(orders, 0, 1, 2)
    for turn in (turns[1], turns[2], turns[0]):
        orders.metadata.release_append(turn)
        clock.advance(1)
    clock.advance(GRACE)
    assert [folder.folder for folder in unswept(orders, clock, 2)] == [turns[1].folder, turns[2].folder]


def test_silent_merges_and_batches_are_fenced_before_their_folders_end(orders: Book, clock: ManualClock) -> None:
    silent = orders.metadata.open_stream_folder("orders", "m", 0)
    alive = orders.metadata.open_stream_folder("orders", "s")
    clock.advance(ALIVE - 1)
    assert orders.metadata.settle_stream_folders() == 0
    assert orders.metadata.renew_stream_folder(alive)
    clock.advance(2)
    assert orders.metadata.settle_stream_folders() == 1
    assert folders(orders, ended=False) == [alive.folder]
    assert commit_state(orders, silent.commit_id) == "aborted"
    assert not orders.metadata.renew_stream_folder(silent)
    assert not send(orders, claimed(orders, 0), folder=alive).duplicate
    assert orders.verify(files=False).ok


def test_only_paths_that_no_row_knows_are_unknown(orders: Book, clock: ManualClock) -> None:
    segments = filled(orders, 6, files=True)
    merge(orders, segments[2:4], files=True)
    orders.metadata.delete_segments_before("orders", 0, 20)
    table = numbers(orders, "t", [1])
    (file,) = records(orders, schema.table_files, table_id=table.id)
    every = objects(orders, "topics")
    assert len(every) == 7
    left = lay(orders, f"{segments[0].s3_key}.late", b"x")
    assert unknown(orders, *every, left, file["file_path"]) == [left]
    assert unknown(orders) == []
    # A path whose file was deleted counts for nobody, should a late upload bring it back.
    clock.advance(GRACE + 1)
    assert orders.cleaner.delete_expired_temporary_files(wait=False).files == 2
    assert set(unknown(orders, *every, left)) == {left, segments[0].s3_key, segments[1].s3_key}


def test_segments_of_a_warehouse_that_was_moved_are_known(orders: Book) -> None:
    segments = filled(orders, 2)
    run_sql(orders, f"UPDATE segments SET s3_bucket = 'elsewhere' WHERE id = '{segments[0].id}'")
    assert unknown(orders, *(segment.s3_key for segment in segments), "topics/x") == ["topics/x"]


def test_commits_stay_for_as_long_as_a_folder_names_them(orders: Book) -> None:
    folder = orders.metadata.open_stream_folder("orders", "m", 0)
    orders.metadata.end_stream_folder(folder)
    run_sql(orders, f"UPDATE commits SET finished_at = 1 WHERE id = '{folder.commit_id}'")
    orders._registry.write(lambda transaction: prune_commit_rows(transaction, 100))
    assert commit_state(orders, folder.commit_id) == "aborted"
    orders._registry.write(lambda transaction: forget_folder(transaction, folder.folder))
    orders._registry.write(lambda transaction: prune_commit_rows(transaction, 100))
    assert records(orders, schema.commits, id=folder.commit_id) == []


# --- deletion ------------------------------------------------------------------


def test_a_topic_is_deleted_with_everything_in_it(orders: Book, clock: ManualClock) -> None:
    segments = filled(orders, 4, files=True)
    merge(orders, segments[:2], files=True)
    orders.metadata.pin_topic("orders", {0: 0})
    send(orders, claimed(orders, 1), sink="q", batch_id=1)
    turn = orders.metadata.claim_append("orders", 2, holder="a")
    under_way = [
        orders.metadata.open_stream_folder("orders", "m", 0),
        orders.metadata.open_stream_folder("orders", "s"),
    ]
    orders.metadata.delete_topic("orders")
    for table in (schema.retired_segments, schema.sink_batches, schema.append_turns, schema.topics, schema.segments):
        assert records(orders, table) == []
    assert folders(orders, ended=False) == []
    assert len(folders(orders)) == 7
    for commit_id in (turn.commit_id, *(folder.commit_id for folder in under_way)):
        assert commit_state(orders, commit_id) == "aborted"
    assert orders.verify(files=False).ok
    # All files wait, with their footers, and then all are gone.
    assert len(records(orders, schema.temporary_files)) == len(footer_paths(orders)) == 6
    clock.advance(GRACE + 1)
    assert orders.cleaner.delete_expired_temporary_files(wait=False).files == 6
    assert footer_paths(orders) == set()
    assert objects(orders) == []
    # The next topic of that name knows nothing of its sinks.
    orders.metadata.create_topic("orders", 1)
    assert orders.metadata.last_batch("orders", "q") is None


def test_a_deletion_waits_for_a_batch_in_flight(shared_place: Place) -> None:
    book, other = shared_place.open(), shared_place.open()
    book.metadata.create_topic("orders", 3)
    turns = claimed(book, 0, 1)
    with held_before_commit(lambda: send(book, turns, sink="q", batch_id=1), skip=1) as sending:
        meanwhile(lambda: other.metadata.delete_topic("orders"), sending)
    assert records(book, schema.sink_batches) == []
    assert len(records(book, schema.temporary_files)) == 2
    assert folders(book, ended=False) == []
    assert book.verify(files=False).ok


def test_a_path_that_was_merged_away_is_not_used_again(orders: Book) -> None:
    segments = filled(orders, 2)
    merge(orders, segments)
    turn = orders.metadata.claim_append("orders", 1)
    with pytest.raises(PathInUse):
        orders.metadata.append_segment(turn, describe(partition=1, s3_key=segments[0].s3_key))


# --- plans ---------------------------------------------------------------------

PATHS = ["topics/1/0/t1/a.parquet"]


def test_the_statements_of_writing_and_sweeping_use_indexes(shared_place: Place) -> None:
    book = shared_place.open()
    book.metadata.create_topic("orders", 3)
    filled(book, 50)
    statements: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "HOLDING": (appends.HOLDING, (1, 0, 100)),
        "EXPIRED_TURNS": (appends.EXPIRED_TURNS, (1, 100)),
        "RUN": (merges.RUN, (1, 0, 0, 100)),
        "LAST_BATCH": (sinks.LAST_BATCH, ("orders", "q")),
        "ADVANCE_BATCH": (sinks.ADVANCE_BATCH, (1, "c", 1, 1, "q")),
        "END_FOLDER": (stream_folders.END_FOLDER, (1, "f")),
        "SILENT_FOLDERS": (stream_folders.SILENT_FOLDERS, (1, 100)),
        "TO_SWEEP": (stream_folders.TO_SWEEP, (1, 1, 100)),
        "NEXT_BUCKET": (stream_folders.NEXT_BUCKET, ("",)),
    }

    def explained(reader: Any) -> dict[str, str]:
        listed = reader.listed(PATHS)
        statements["SEGMENT_KEYS"] = (stream_folders.SEGMENT_KEYS, ("w", listed))
        statements["KNOWN_ELSEWHERE"] = (stream_folders.KNOWN_ELSEWHERE, (listed,))
        statements["LEFT_BEHIND"] = (appends.LEFT_BEHIND, (listed,))
        found = {}
        head, column = ("EXPLAIN", 0) if reader.kind == POSTGRESQL else ("EXPLAIN QUERY PLAN", 3)
        for name, (statement, values) in statements.items():
            compiled = statement.on(reader.kind)
            arranged = compiled.arrange(values) if compiled.arrange else values
            rows = reader._connection.execute(f"{head} {compiled.sql}", arranged).fetchall()
            # The paths that are asked for are no table.
            found[name] = "\n".join(str(row[column]) for row in rows if "json_each" not in str(row[column]))
        return found

    with book._registry.read() as reader:
        if reader.kind == POSTGRESQL:
            reader._connection.execute("SET enable_seqscan = off")
        try:
            found = explained(reader)
        finally:
            if reader.kind == POSTGRESQL:
                reader._connection.execute("RESET enable_seqscan")
    assert unindexed(found) == []
