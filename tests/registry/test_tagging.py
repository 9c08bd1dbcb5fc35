"""Tags keep states of a table under a name, for every engine, until they are removed."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table.refs import SnapshotRefType

from books import Place
from by_hand import Hand, nothing_changes, present_clock, to_ref
from lake import (
    PATIENCE,
    ids,
    in_memory,
    insert,
    numbers,
    objects,
    own_warehouse,  # noqa: F401
    records,
)
from lakebook import Book, failpoints
from lakebook.clock import ManualClock, to_datetime
from lakebook.errors import (
    InvalidInput,
    InvalidName,
    InvalidTable,
    LakebookError,
    SnapshotNotFound,
    TableNotFound,
    TagAlreadyExists,
    TagNotFound,
    VersionNotFound,
)
from lakebook.iceberg.refs import made_at, own_name
from lakebook.lake.table import Table
from lakebook.registry import schema

DAY = 86_400


@pytest.fixture
def clock() -> ManualClock:
    return present_clock()


@pytest.fixture
def book(place: Place, clock: ManualClock) -> Book:
    return opened(place, clock)


@pytest.fixture
def shared(shared_place: Place, clock: ManualClock) -> Book:
    """A book whose files other engines can open."""
    return opened(shared_place, clock)


def opened(place: Place, clock: ManualClock) -> Book:
    return place.open(clock=clock, temporary_file_grace=3600.0, published_grace=DAY, catalog_lease=60.0)


def published(book: Book, clock: ManualClock, *values: int, name: str = "t") -> Table:
    """A table with a version and a snapshot for each number."""
    table = numbers(book, name)
    for value in values:
        insert(table, {"id": value})
        table.publish()
        clock.advance(1)
    return table


def outside(book: Book, table: Table) -> Any:
    """The table as another engine has it."""
    return book.catalog().load_table((table.namespace, table.name))


def ids_of(book: Book, table: Table, ref: str) -> list[int]:
    """What another engine reads by the name of a tag or a branch."""
    found: list[int] = outside(book, table).scan().use_ref(ref).to_arrow()["id"].to_pylist()
    return sorted(found)


def end_history(book: Book, clock: ManualClock) -> int:
    """End all history but the newest version, long after everyone has gone; how many files were retired."""
    clock.advance(2 * DAY)
    return book.cleaner.expire(seconds=0, versions=1, wait=True).files


def clean(book: Book, clock: ManualClock, seconds: float = DAY + 1) -> int:
    clock.advance(seconds)
    return book.cleaner.delete_expired_temporary_files().files


# --- which state ---------------------------------------------------------------------


def test_the_newest_state_is_published_and_tagged(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1], [2])
    assert table.tags() == []
    tag = table.tag("now")
    (snapshot,) = table.snapshots()
    assert (tag.name, tag.snapshot_id, tag.version, tag.goes_at) == ("now", snapshot.snapshot_id, 2, None)
    assert tag.snapshot_at == to_datetime(snapshot.timestamp_ms)
    assert table.tags() == [tag]
    ref = outside(book, table).metadata.refs["now"]
    assert (ref.snapshot_id, ref.snapshot_ref_type, ref.max_ref_age_ms) == (
        tag.snapshot_id, SnapshotRefType.TAG, None,
    )  # fmt: skip
    # It makes no version, and what comes later leaves it as it is.
    assert table.version == 2
    insert(table, {"id": 3})
    table.publish()
    assert table.tags() == [tag]
    assert book.verify().ok


def test_a_version_and_a_snapshot_can_be_tagged(book: Book, clock: ManualClock) -> None:
    table = published(book, clock, 1, 2, 3)
    snapshots = {item.version: item.snapshot_id for item in table.snapshots()}
    assert table.tag("second", version=2).snapshot_id == snapshots[2]
    assert table.tag("first", snapshot_id=snapshots[1]).version == 1
    assert [(tag.name, tag.version) for tag in table.tags()] == [("first", 1), ("second", 2)]


def test_a_version_without_a_snapshot_of_its_own_names_those_nearby(book: Book, clock: ManualClock) -> None:
    table = published(book, clock, 1)
    for value in range(2, 6):
        insert(table, {"id": value})
    with pytest.raises(SnapshotNotFound) as error:
        table.tag("middle", version=3)
    assert error.value.remedy == "Tag version 1 or 5"
    with pytest.raises(SnapshotNotFound) as error:
        table.tag("begin", version=0)
    assert error.value.remedy == "Tag version 1"
    with pytest.raises(VersionNotFound, match="the newest is 5"):
        table.tag("next", version=6)
    with pytest.raises(VersionNotFound):
        table.tag("before", version=-1)
    with pytest.raises(SnapshotNotFound, match="lists no snapshot 4711"):
        table.tag("none", snapshot_id=4711)
    assert table.tags() == []
    assert table.tag("last", version=5).version == 5


def test_a_change_of_the_schema_has_no_snapshot_and_the_newest_state_has(book: Book) -> None:
    table = numbers(book, "t", [1])
    with table.update_schema() as update:
        update.add_column("name", "STRING")
    with pytest.raises(SnapshotNotFound) as error:
        table.tag("now", version=2)
    assert error.value.remedy == "Tag version 1"
    assert table.tag("now").version == 1


def test_a_rolled_back_version_is_tagged_by_the_snapshot_that_shows_it(shared: Book, clock: ManualClock) -> None:
    table = published(shared, clock, 1, 2)
    first = table.snapshots()[0]
    Hand(shared, table).commit(to_ref(first.snapshot_id))
    assert (table.version, ids(table)) == (3, [1])
    assert table.tag("again", version=3).snapshot_id == table.tag("newest").snapshot_id == first.snapshot_id
    assert ids_of(shared, table, "again") == [1]


def test_a_table_without_rows_has_nothing_to_tag(book: Book) -> None:
    table = numbers(book, "t")
    with pytest.raises(SnapshotNotFound, match="no snapshot yet"):
        table.tag("now")
    with pytest.raises(TagNotFound):
        table.untag("now")


# --- names ---------------------------------------------------------------------------


def test_a_name_is_taken_once(book: Book, clock: ManualClock) -> None:
    table = published(book, clock, 1, 2)
    first = table.tag("a", version=1)
    with pytest.raises(TagAlreadyExists, match=str(first.snapshot_id)):
        table.tag("a")
    pointer = book.lake.publisher.pointer(table.record)
    # The same once more is no error, and changes nothing.
    assert table.tag("a", version=1) == first
    assert book.lake.publisher.pointer(table.record) == pointer
    assert table.tags() == [first]


@pytest.mark.parametrize("name", ["main", "lb-mine", "", ".", "..", "a/b", "a b", "x" * 250, None, 7])
@in_memory
def test_some_names_are_refused(book: Book, name: Any) -> None:
    table = numbers(book, "t", [1])
    with nothing_changes(book), pytest.raises(InvalidName):
        table.tag(name)


@pytest.mark.parametrize(
    "given",
    [
        {"keep_seconds": 0},
        {"keep_seconds": -1},
        {"keep_seconds": float("nan")},
        {"keep_seconds": float("inf")},
        {"keep_seconds": True},
        {"keep_seconds": "1"},
        {"version": "1"},
        {"version": True},
        {"version": 2**70},
        {"snapshot_id": 1.5},
        {"version": 1, "snapshot_id": 1},
    ],
    ids=str,
)
@in_memory
def test_impossible_arguments_are_refused(book: Book, given: dict[str, Any]) -> None:
    table = numbers(book, "t", [1])
    with nothing_changes(book), pytest.raises(InvalidInput):
        table.tag("a", **given)


def test_a_table_of_json_has_no_tags(book: Book) -> None:
    table = numbers(book, "t", format="json")
    for action in (lambda: table.tag("a"), lambda: table.untag("a"), table.tags):
        with pytest.raises(InvalidTable, match="format json"):
            action()


def test_a_dropped_table_is_not_tagged(book: Book, clock: ManualClock) -> None:
    table = published(book, clock, 1)
    book.tables.drop("t")
    for action in (lambda: table.tag("a"), lambda: table.untag("a"), table.tags):
        with pytest.raises(TableNotFound):
            action()


def test_a_branch_is_no_tag(shared: Book, clock: ManualClock) -> None:
    table = published(shared, clock, 1)
    head = table.snapshots()[0].snapshot_id
    outside(shared, table).manage_snapshots().create_branch(head, "work").commit()
    with pytest.raises(TagAlreadyExists, match="a branch"):
        table.tag("work", snapshot_id=head)
    for name in ("work", "main"):
        with pytest.raises(TagNotFound, match="is a branch"):
            table.untag(name)
    assert set(outside(shared, table).metadata.refs) == {"main", "work"}
    assert table.tags() == []


def test_a_tag_of_another_engine_is_listed_and_removed(shared: Book, clock: ManualClock) -> None:
    table = published(shared, clock, 1)
    head = table.snapshots()[0]
    hand = Hand(shared, table)
    # As old as no time is.
    hand.commit(to_ref(head.snapshot_id, "theirs", "tag", max_ref_age_ms=2**62), requirements=())
    assert outside(shared, table).metadata.refs["theirs"].max_ref_age_ms == 2**62
    (tag,) = table.tags()
    assert (tag.name, tag.version, tag.goes_at) == ("theirs", 1, None)
    assert table.untag("theirs") == tag
    assert "theirs" not in outside(shared, table).metadata.refs
    with pytest.raises(TagNotFound):
        table.untag("theirs")


# --- how long ------------------------------------------------------------------------


def test_a_tag_is_kept_for_a_time_that_counts_from_now(book: Book, clock: ManualClock) -> None:
    table = published(book, clock, 1)
    clock.advance(10 * DAY)
    tag = table.tag("week", keep_seconds=7 * DAY)
    now = to_datetime(clock.now_ms())
    assert tag.goes_at == now + timedelta(days=7)
    # Iceberg counts from the time of the snapshot.
    ref = outside(book, table).metadata.refs["week"]
    assert ref.max_ref_age_ms == (tag.goes_at - tag.snapshot_at) / timedelta(milliseconds=1)
    assert table.tags() == [tag]
    longer = table.tag("week", keep_seconds=30 * DAY)
    assert (longer.snapshot_id, longer.goes_at) == (tag.snapshot_id, now + timedelta(days=30))
    assert table.tag("week").goes_at is None
    (tag,) = table.tags()
    assert tag.goes_at is None


def test_names_of_own_tags_say_when_they_were_made() -> None:
    moment = datetime(2026, 1, 31, 12, 30, 5, 7000, UTC)
    name = own_name("time", round(moment.timestamp() * 1000))
    assert name == "lb-time-20260131T123005.007Z"
    assert made_at(name) == round(moment.timestamp() * 1000)
    for other in ("lb-mine", "lb-time-20269931T123005.007Z", "lb-day-20260131T123005.007Z", "time", f"{name}x"):
        assert made_at(other) is None


# --- what they keep ------------------------------------------------------------------


def test_a_tag_keeps_its_files_until_it_is_removed_and_their_grace_has_passed(shared: Book, clock: ManualClock) -> None:
    table = published(shared, clock, 1, 2)
    kept = {file.file_path for file in table.plan().files}
    table.tag("old")
    table.delete("true")
    insert(table, {"id": 9})
    table.publish()
    assert end_history(shared, clock) == 0
    clean(shared, clock)
    assert kept <= set(objects(shared))
    assert ids_of(shared, table, "old") == [1, 2]
    assert shared.verify().ok
    table.untag("old")
    clock.advance(2 * DAY)
    assert end_history(shared, clock) == 2
    # Somebody may still read it: the grace for what was published begins now.
    clean(shared, clock, DAY - 1)
    assert kept <= set(objects(shared))
    clean(shared, clock, 2)
    assert not kept & set(objects(shared))
    assert ids(table) == [9]
    assert shared.verify().ok


# --- at the same time ----------------------------------------------------------------


def test_of_two_that_want_one_name_one_gets_it(shared_place: Place, clock: ManualClock) -> None:
    books = [opened(shared_place, clock), opened(shared_place, clock)]
    published(books[0], clock, 1, 2)
    ready = threading.Barrier(2)
    done: list[Any] = []

    def put(number: int) -> None:
        table = books[number].table("t")
        ready.wait(PATIENCE)
        try:
            done.append(table.tag("a", version=number + 1).version)
        except LakebookError as error:
            done.append(type(error))

    threads = [threading.Thread(target=put, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (tag,) = books[0].table("t").tags()
    assert sorted(map(str, done)) == sorted([str(tag.version), str(TagAlreadyExists)])


@in_memory
def test_a_snapshot_that_leaves_meanwhile_is_not_tagged(book: Book, clock: ManualClock) -> None:
    table = published(book, clock, 1, 2)
    first = table.snapshots()[0].snapshot_id
    once = [lambda: book.cleaner.expire(seconds=0, versions=1)]

    def expire() -> None:
        if once:
            once.pop()()

    # The tag's attempt has begun, and loses.
    with failpoints.armed("outside.metadata_written", expire), pytest.raises(SnapshotNotFound):
        table.tag("late", snapshot_id=first)
    assert table.tags() == []
    assert book.verify().ok


@in_memory
def test_a_tag_comes_through_while_others_publish_and_holds_nobody_back(book: Book, clock: ManualClock) -> None:
    table = published(book, clock, 1)
    left = list(range(2, 7))

    def publish() -> None:
        if left:
            insert(table, {"id": left.pop(0)})
            book.lake.publisher.publish(table.record)

    with failpoints.armed("outside.metadata_written", publish):
        tag = table.tag("kept", version=1)
    assert left == []
    assert [item.name for item in table.tags()] == [tag.name]
    (row,) = records(book, schema.tables)
    assert row["hold_until"] == 0
    assert ids(table) == [1, 2, 3, 4, 5, 6]
    assert book.verify().ok


def test_rows_can_be_appended_beside_a_tag(shared: Book, clock: ManualClock) -> None:
    table = published(shared, clock, 1)
    theirs = outside(shared, table)
    table.tag("first")
    # Prepared before the tag came.
    theirs.append(pa.table({"id": pa.array([2], pa.int64())}))
    assert ids(table) == [1, 2]
    assert ids_of(shared, table, "first") == [1]
