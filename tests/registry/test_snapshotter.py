"""The snapshotter keeps states as tags, by time, by size and by query, and ends history that nothing needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from books import Place
from by_hand import Hand, present_clock, to_ref
from lake import (
    PATIENCE,
    files_of,
    ids,
    in_memory,
    insert,
    numbers,
    objects,
    own_warehouse,  # noqa: F401
    records,
    run_sql,
)
from lakebook import Book, failpoints
from lakebook.cdc.subscribers import SUBSCRIPTIONS, Event, Refresh
from lakebook.clock import ManualClock
from lakebook.components import snapshotter as module
from lakebook.components.snapshotter import Snapshotter
from lakebook.errors import InvalidTable, PublishFailed, RegistryBusy, StorageUnavailable, SubscriberFailed
from lakebook.lake.lake import Lake
from lakebook.lake.properties import tag_policy
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.events import EventLog
from lakebook.registry.maintenance import Work, list_requests, list_work, pause
from lakebook.registry.schema import MAX_BIGINT

HOUR = 3600
DAY = 86_400
HISTORY = {"lakebook.history.seconds": "0", "lakebook.history.versions": "1"}
HOURLY = {"lakebook.tag.seconds": str(HOUR)}
QUERIES = {"lakebook.tag.queries": "yes"}


@pytest.fixture
def clock() -> ManualClock:
    return present_clock()


def opened(place: Place, clock: ManualClock | None, **more: Any) -> Book:
    settings = {"temporary_file_grace": float(HOUR), "published_grace": float(DAY), "catalog_lease": 60.0, **more}
    return place.open(clock=clock, **settings)


@pytest.fixture
def book(place: Place, clock: ManualClock) -> Book:
    return opened(place, clock)


@pytest.fixture
def shared(shared_place: Place, clock: ManualClock) -> Book:
    """A book whose files other engines can open."""
    return opened(shared_place, clock)


def table_of(book: Book, *values: int, name: str = "t", **properties: str) -> Table:
    """A table with these properties, and a version for each number."""
    return numbers(book, name, *([value] for value in values), properties=properties)


def add(table: Table, value: int) -> None:
    insert(table, {"id": value})


def replace(table: Table, value: int, clock: ManualClock) -> None:
    """Two versions, after which no row is there that was there before."""
    table.delete("true")
    add(table, value)
    # Commit times of a table run ahead of a clock that stands still.
    clock.advance(1)


def events_of(lake: Lake, object_id: int) -> list[Event[Any]]:
    """What the snapshotter is told of a table."""
    log = EventLog(lake.registry)
    batch = log.read(log.beginning())
    assert not batch.more
    told = SUBSCRIPTIONS["snapshotter"]
    return [Event(item) for item in batch.events if item.object_id == object_id and item.table in told]


def look(snapshotter: Snapshotter, *tables: Table) -> int:
    """A round after the tables have changed."""
    for table in tables:
        snapshotter.on_events(events_of(snapshotter.lake, table.record.object_id))
    return snapshotter.run_once()


def versions(table: Table) -> list[int | None]:
    """The versions of the states that are kept."""
    return [tag.version for tag in table.tags()]


def kinds(table: Table) -> list[str]:
    return [tag.name.rpartition("-")[0] for tag in table.tags()]


def work(book: Book, action: str | None = None) -> list[Work]:
    """What the journal says, the oldest first."""
    found = book.lake.registry.read_with(lambda reader: list_work(reader, "snapshotter", None, MAX_BIGINT, 1000))
    return [item for item in reversed(found) if action in (None, item.action)]


def requests(book: Book) -> list[Any]:
    return book.lake.registry.read_with(lambda reader: list_requests(reader, "snapshotter"))


def outside(book: Book, table: Table) -> Any:
    return book.catalog().load_table((table.namespace, table.name))


def let_readers_go(book: Book) -> None:
    """Let the leases of loads through a catalog have ended long ago."""
    run_sql(book, "DELETE FROM leases WHERE id LIKE 'loaded-%'")


# --- by time -------------------------------------------------------------------------


def test_a_table_that_has_changed_is_tagged_when_the_time_has_passed(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1, **HOURLY)
    snapshotter = Snapshotter(book.lake)
    look(snapshotter, table)
    assert table.tags() == []
    clock.advance(HOUR - 1)
    assert snapshotter.run_once() == 0
    clock.advance(1)
    assert snapshotter.run_once() == 1
    (tag,) = table.tags()
    assert (tag.version, tag.goes_at) == (1, None)
    assert tag.name.startswith("lb-time-")
    # Nothing new has come: nothing new is to be kept.
    clock.advance(2 * HOUR)
    assert look(snapshotter, table) == 1
    assert table.tags() == [tag]
    # Its time has long passed.
    add(table, 2)
    look(snapshotter, table)
    assert versions(table) == [1, 2]
    add(table, 3)
    look(snapshotter, table)
    assert versions(table) == [1, 2]
    clock.advance(HOUR)
    snapshotter.run_once()
    assert versions(table) == [1, 2, 3]
    assert [(item.action, item.reason) for item in work(book)] == [
        ("tag", "3600 s since it was created"),
        ("tag", "3600 s since the last tag"),
        ("tag", "3600 s since the last tag"),
    ]
    assert [item.detail["tag"] for item in work(book)] == [tag.name for tag in table.tags()]
    assert book.verify().ok


def test_what_is_not_published_is_published_before_it_is_tagged(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1, 2, 3, **HOURLY)
    clock.advance(HOUR)
    look(Snapshotter(book.lake), table)
    assert versions(table) == [3]
    pointer = book.lake.publisher.pointer(table.record)
    assert pointer is not None
    assert pointer.version == 3


def test_the_settings_of_the_book_count_where_a_table_says_nothing(place: Place, clock: ManualClock) -> None:
    book = opened(place, clock, tag_seconds=60.0, tags_kept=1)
    plain, own = table_of(book, 1, name="plain"), table_of(book, 1, name="own", **{"lakebook.tag.seconds": "0"})
    snapshotter = Snapshotter(book.lake)
    for value in (2, 3):
        clock.advance(60)
        add(plain, value)
        add(own, value)
        look(snapshotter, plain, own)
    assert (versions(plain), versions(own)) == ([3], [])


def test_a_change_of_the_schema_alone_gets_no_second_tag(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1, **HOURLY)
    empty = table_of(book, name="empty", **HOURLY)
    snapshotter = Snapshotter(book.lake)
    for column in ("a", "b"):
        clock.advance(HOUR)
        for item in (table, empty):
            with item.update_schema() as update:
                update.add_column(column, "STRING")
        look(snapshotter, table, empty)
    assert (versions(table), versions(empty)) == ([1], [])


# --- by size -------------------------------------------------------------------------


def test_a_table_is_tagged_when_enough_bytes_have_come(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1)
    size = table.record.total_size
    table.set_properties(**{"lakebook.tag.bytes": str(2 * size)})
    snapshotter = Snapshotter(book.lake)
    look(snapshotter, table)
    assert table.tags() == []
    for value in range(2, 8):
        clock.advance(1)
        add(table, value)
        look(snapshotter, table)
    assert (versions(table), set(kinds(table))) == ([2, 4, 6], {"lb-size"})
    reasons = [item.reason for item in work(book, "tag")]
    assert reasons[0] == f"{table.record.total_size * 2 // 7} bytes since it was created"
    assert reasons[1].endswith("bytes since the last tag")


def test_bytes_count_once_though_history_ends_meanwhile(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1, **HISTORY)
    table.set_properties(**{"lakebook.tag.bytes": str(3 * table.record.total_size)})
    snapshotter = Snapshotter(book.lake)
    look(snapshotter, table)
    for value in (2, 3):
        replace(table, value, clock)
        look(snapshotter, table)
        assert len(table.history().items) == 1
    assert versions(table) == [5]
    # Of a table that only grows, a new process knows it too.
    table.set_properties(**{"lakebook.tag.bytes": str(3 * table.record.total_size)})
    for value in (4, 5):
        add(table, value)
        clock.advance(1)
        look(Snapshotter(book.lake), table)
    assert versions(table) == [5]
    add(table, 6)
    assert len(table.history().items) == 2
    look(Snapshotter(book.lake), table)
    assert versions(table) == [5, 8]


def test_the_same_rows_in_other_files_are_nothing_new(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1, 2)
    snapshotter = Snapshotter(book.lake)
    table.set_properties(**{"lakebook.tag.bytes": str(table.record.total_size)})
    look(snapshotter, table)
    assert versions(table) == [2]
    size = table.record.total_size
    add(table, 3)
    add(table, 4)
    # As a compaction leaves it: other files, and no more bytes than before.
    run_sql(book, "UPDATE table_versions SET operation = 'replace' WHERE version > 2")
    run_sql(book, f"UPDATE tables SET total_size = {size}")
    look(snapshotter, table)
    assert versions(table) == [2]


# --- by query ------------------------------------------------------------------------


def test_what_is_loaded_through_the_catalog_is_tagged_where_that_is_wanted(book: Book, clock: ManualClock) -> None:
    table, other = table_of(book, 1, **QUERIES), table_of(book, 1, name="other")
    loaded = outside(book, table).metadata.current_snapshot_id
    outside(book, other)
    for _ in range(3):
        outside(book, table)
        clock.advance(60)
    # Asked several times, it is asked once.
    (request,) = requests(book)
    assert (request.kind, request.object_id) == ("tag", table.record.object_id)
    assert request.argument == {"snapshot_id": loaded}
    add(table, 2)
    table.publish()
    snapshotter = Snapshotter(book.lake)
    snapshotter.run_once()
    (tag,) = table.tags()
    # The state that was loaded, though there is a newer one.
    assert (tag.snapshot_id, tag.version, kinds(table)) == (loaded, 1, ["lb-query"])
    assert (requests(book), other.tags()) == ([], [])
    (entry,) = work(book)
    assert (entry.reason, entry.detail["version"]) == ("it was loaded through the catalog", 1)
    # Once it is kept nobody asks again.
    outside(book, table)
    snapshotter.run_once()
    assert (versions(table), requests(book)) == ([1, 2], [])
    outside(book, table)
    assert requests(book) == []


def test_the_request_comes_with_the_pin_and_also_where_the_pin_is_there(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1)
    outside(book, table)
    assert requests(book) == []
    table.set_properties(**QUERIES)
    outside(book, table)
    assert len(requests(book)) == 1
    add(table, 2)
    committed: list[int] = []
    with failpoints.armed("transaction.after_commit", lambda: committed.append(len(requests(book)))):
        table.publish()
        before = len(committed)
        outside(book, table)
    # One transaction pins, and asks.
    assert committed[before:] == [2]
    leases = {row["version"] for row in records(book, schema.leases)}
    assert leases == {1, 2}


def test_a_load_does_not_fail_because_nothing_can_be_asked_for(
    book: Book, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = table_of(book, 1, **QUERIES)

    def refuse(*_: object) -> None:
        raise RegistryBusy("it is locked")

    monkeypatch.setattr("lakebook.iceberg.catalog.ask_for_tag", refuse)
    assert outside(book, table).metadata.current_snapshot_id is not None
    assert "a tag could not be asked for" in caplog.text
    assert requests(book) == []
    assert len(records(book, schema.leases)) == 1


def test_requests_that_cannot_be_met_go(book: Book, clock: ManualClock) -> None:
    gone, dropped, off = (table_of(book, 1, name=name, **QUERIES) for name in ("gone", "dropped", "off"))
    for table in (gone, dropped, off):
        outside(book, table)
    let_readers_go(book)
    for table in (gone, off):
        clock.advance(1)
        add(table, 2)
    book.cleaner.expire(seconds=0, versions=1, wait=True)
    book.tables.drop("dropped")
    off.set_properties(**{"lakebook.tag.queries": "no"})
    assert len(requests(book)) == 3
    snapshotter = Snapshotter(book.lake)
    snapshotter.run_once()
    assert (requests(book), gone.tags(), off.tags()) == ([], [], [])
    assert snapshotter.status()["tables"] == 2


def test_a_tag_that_was_made_just_before_the_end_is_not_made_twice(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1, **QUERIES)
    outside(book, table)

    def die() -> None:
        raise KeyboardInterrupt

    with failpoints.armed("outside.committed", die), pytest.raises(KeyboardInterrupt):
        Snapshotter(book.lake).run_once()
    assert (versions(table), len(requests(book))) == ([1], 1)
    Snapshotter(book.lake).run_once()
    assert (versions(table), requests(book)) == ([1], [])


# --- which tags go -------------------------------------------------------------------


def test_only_so_many_own_tags_are_kept_and_those_by_hand_do_not_count(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1, **HOURLY, **{"lakebook.tag.kept": "2"})
    table.tag("mine")
    table.tag("mine-too", keep_seconds=1000 * DAY)
    snapshotter = Snapshotter(book.lake)
    for value in range(2, 6):
        clock.advance(HOUR)
        add(table, value)
        look(snapshotter, table)
    assert [(tag.name[:7], tag.version) for tag in table.tags()] == [
        ("mine", 1), ("mine-to", 1), ("lb-time", 4), ("lb-time", 5),
    ]  # fmt: skip
    removed = work(book, "untag")
    assert [item.reason for item in removed] == ["more than 2 tags"] * 2
    made = [item.detail["tag"] for item in work(book, "tag")]
    assert [item.detail["tags"] for item in removed] == [[name] for name in made[:2]]
    # Fewer are wanted: all others go in one step.
    table.set_properties(**{"lakebook.tag.kept": "1"})
    look(snapshotter, table)
    assert versions(table) == [1, 1, 5]
    assert book.verify().ok


def test_a_tag_goes_when_its_time_is_over_whoever_made_it(shared: Book, clock: ManualClock) -> None:
    table = table_of(shared, 1, **HOURLY, **{"lakebook.tag.keep-seconds": str(2 * HOUR)})
    head = table.publish().snapshot_id
    assert head is not None
    snapshotter = Snapshotter(shared.lake)
    clock.advance(HOUR)
    look(snapshotter, table)
    (own,) = table.tags()
    table.tag("mine", keep_seconds=HOUR)
    table.tag("kept")
    Hand(shared, table).commit(
        to_ref(head, "work", max_ref_age_ms=1), to_ref(head, "theirs", "tag", max_ref_age_ms=3 * HOUR * 1000),
        requirements=(),
    )  # fmt: skip
    # No event tells of a tag: its metadata does.
    assert snapshotter.run_once() == 1
    clock.advance(HOUR)
    assert snapshotter.run_once() == 0
    clock.advance(1)
    assert snapshotter.run_once() == 1
    assert {tag.name for tag in table.tags()} == {own.name, "kept", "theirs"}
    clock.advance(HOUR)
    snapshotter.run_once()
    # As Iceberg has it, ages count from the snapshot; branches are left alone.
    assert {tag.name for tag in table.tags()} == {"kept"}
    assert set(outside(shared, table).metadata.refs) == {"main", "work", "kept"}
    assert [(item.reason, sorted(item.detail["tags"])) for item in work(shared, "untag")] == [
        ("its time is over", ["mine"]),
        ("its time is over", sorted([own.name, "theirs"])),
    ]


def test_a_tag_that_is_kept_longer_meanwhile_stays(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1)
    table.tag("mine", keep_seconds=HOUR)
    clock.advance(HOUR + 1)
    once = [lambda: table.tag("mine", keep_seconds=DAY)]

    def extend() -> None:
        if once:
            once.pop()()

    with failpoints.armed("outside.metadata_written", extend):
        look(Snapshotter(book.lake), table)
    assert [tag.name for tag in table.tags()] == ["mine"]
    assert work(book) == []


def test_names_that_only_look_like_own_ones_are_left_alone(shared: Book, clock: ManualClock) -> None:
    table = table_of(shared, 1, **HOURLY, **{"lakebook.tag.kept": "1"})
    head = table.publish().snapshot_id
    assert head is not None
    Hand(shared, table).commit(to_ref(head, "lb-mine", "tag"), to_ref(head, "lb-time-now", "tag"), requirements=())
    clock.advance(HOUR)
    look(Snapshotter(shared.lake), table)
    assert sorted(kinds(table)) == ["lb", "lb-time", "lb-time"]


# --- history -------------------------------------------------------------------------


def test_history_ends_by_age_and_count_and_what_tags_and_branches_need_stays(shared: Book, clock: ManualClock) -> None:
    table = table_of(shared, 1, **{"lakebook.history.seconds": str(DAY), "lakebook.history.versions": "3"})
    first = table.tag("mine")
    for value in (2, 3, 4, 5):
        clock.advance(HOUR)
        table.delete("true")
        add(table, value)
        table.publish()
        if value == 2:
            theirs = outside(shared, table)
            theirs.manage_snapshots().create_branch(theirs.metadata.current_snapshot_id, "work").commit()
            outside(shared, table).append(pa.table({"id": pa.array([50], pa.int64())}), branch="work")
    let_readers_go(shared)
    snapshotter = Snapshotter(shared.lake)
    look(snapshotter, table)
    # All of it is younger than a day.
    assert (len(table.history().items), work(shared)) == (10, [])
    clock.advance(DAY)
    assert snapshotter.run_once() == 1
    assert [item.version for item in table.history().items] == [9, 8, 7]
    (entry,) = work(shared)
    assert (entry.action, entry.reason) == ("expire", "history: 3 versions, 24 hours")
    # The rows 3: row 1 is in a tag, row 2 in a branch, and row 4 in a version that is kept.
    assert (entry.detail["files"], entry.detail["min_readable"]) == (1, 7)
    clock.advance(2 * DAY)
    assert shared.cleaner.delete_expired_temporary_files().failed == []
    assert sorted(outside(shared, table).scan().use_ref("mine").to_arrow()["id"].to_pylist()) == [1]
    assert sorted(outside(shared, table).scan().use_ref("work").to_arrow()["id"].to_pylist()) == [2, 50]
    assert table.tags() == [first]
    assert ids(table) == [5]
    assert shared.verify().ok


def test_what_a_removed_tag_kept_is_retired_and_deleted_after_its_grace(shared: Book, clock: ManualClock) -> None:
    table = table_of(shared, 1, **HISTORY)
    table.tag("mine", keep_seconds=10 * DAY)
    (kept,) = (file.file_path for file in table.plan().files)
    replace(table, 2, clock)
    snapshotter = Snapshotter(shared.lake)
    look(snapshotter, table)
    assert snapshotter.run_once() == 0
    clock.advance(9 * DAY)
    assert snapshotter.run_once() == 0
    shared.cleaner.delete_expired_temporary_files()
    assert kept in objects(shared)
    clock.advance(2 * DAY)
    assert snapshotter.run_once() == 1
    assert [(item.action, item.detail.get("files")) for item in work(shared)] == [
        ("expire", 0), ("untag", None), ("expire", 1),
    ]  # fmt: skip
    clock.advance(DAY - 1)
    shared.cleaner.delete_expired_temporary_files()
    assert kept in objects(shared)
    clock.advance(2)
    shared.cleaner.delete_expired_temporary_files()
    assert kept not in objects(shared)
    assert ids(table) == [2]
    assert shared.verify().ok


def test_an_untagged_state_goes_though_the_table_is_idle(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1, **HISTORY)
    table.tag("mine")
    clock.advance(1)
    table.delete("true")
    snapshotter = Snapshotter(book.lake)
    look(snapshotter, table)
    assert [row["retired_at"] for row in files_of(book, table)] == [None]
    table.untag("mine")
    assert snapshotter.run_once() == 1
    assert [row["retired_at"] for row in files_of(book, table)] != [None]
    # There is nothing left to do, and it is not done again and again.
    assert snapshotter.run_once() == 0
    assert look(snapshotter, table) == 1
    assert len(work(book, "expire")) == 2


def test_a_lease_stops_expiry_and_a_dead_one_does_not(place: Place, clock: ManualClock) -> None:
    book = opened(place, clock, lease_seconds=60.0, maintenance_interval=40.0)
    table = table_of(book, 1, **HISTORY)
    snapshotter = Snapshotter(book.lake)
    with table.pin(version=1) as pinned:
        replace(table, 2, clock)
        look(snapshotter, table)
        for _ in range(5):
            clock.advance(40)
            book.lake.renewals.renew()
            snapshotter.run_once()
        # It began with version 0, and the reader holds version 1.
        assert [item.version for item in table.history().items] == [3, 2, 1]
        assert ids(pinned) == [1]
        # Its process is gone.
        book.lake.renewals.let_go(pinned.lease.id)
        rounds = 0
        while len(table.history().items) > 1:
            clock.advance(40)
            snapshotter.run_once()
            rounds += 1
        # It had to run out, and then to stand still for a whole lease time while somebody watched.
        assert 3 <= rounds <= 5
        assert [row["id"] for row in records(book, schema.leases)] == []
    assert book.verify().ok


def test_history_of_unpublished_and_of_json_tables_ends_too(book: Book, clock: ManualClock) -> None:
    plain = table_of(book, 1, name="plain", **HISTORY)
    raw = numbers(book, "raw", format="json", properties={**HISTORY, **HOURLY, **QUERIES})
    with raw.update_schema() as update:
        update.add_column("name", "STRING")
    clock.advance(HOUR)
    plain.delete("true")
    snapshotter = Snapshotter(book.lake)
    snapshotter.run_once()
    assert [len(table.history().items) for table in (plain, raw)] == [1, 1]
    assert records(book, schema.iceberg_tables) == []
    assert [item.outcome for item in work(book)] == ["done", "done"]


def test_history_does_not_end_version_by_version(book: Book, clock: ManualClock) -> None:
    table = table_of(book, **{"lakebook.history.seconds": str(DAY), "lakebook.history.versions": "1"})
    for value in range(30):
        add(table, value)
        clock.advance(60)
    clock.advance(DAY - 15 * 60)
    snapshotter = Snapshotter(book.lake)
    look(snapshotter, table)
    assert len(work(book, "expire")) == 1
    for _ in range(60):
        clock.advance(60)
        snapshotter.run_once()
    # Once more, after the 24th part of a day.
    assert len(work(book, "expire")) == 2
    assert len(table.history().items) == 1


# --- tables and failures -------------------------------------------------------------


def test_a_dropped_table_is_forgotten(book: Book, clock: ManualClock) -> None:
    table, other = table_of(book, 1, **HOURLY), table_of(book, 1, name="other")
    table.publish()
    snapshotter = Snapshotter(book.lake)
    assert snapshotter.run_once() == 2
    record = table.record
    book.tables.drop("t")
    clock.advance(2 * HOUR)
    # Its time had come, and it is gone.
    assert snapshotter.run_once() == 1
    assert [item["table"] for item in snapshotter.status()["of_tables"]] == ["default.other"]
    assert snapshotter.run_once() == 0
    snapshotter.on_refresh(Refresh(other.record.object_id, "table", None, "test"))
    assert snapshotter.status()["tables"] == 0
    # An event of its past brings it back for a moment.
    snapshotter.on_events(events_of(book.lake, record.object_id))
    snapshotter.run_once()
    assert snapshotter.status()["tables"] == 0
    assert work(book) == []


def test_one_table_that_fails_stops_no_other_and_is_tried_later(book: Book, clock: ManualClock) -> None:
    bad, good = table_of(book, 1, name="bad", **HOURLY), table_of(book, 1, name="good", **HOURLY)
    clock.advance(HOUR)
    snapshotter = Snapshotter(book.lake)

    def refuse() -> None:
        if not bad.tags() and not good.tags():
            raise PublishFailed("no")

    with failpoints.armed("publish.metadata_written", refuse):
        assert look(snapshotter, bad, good) == 2
    assert (bad.tags(), good.tags()) == ([], [])
    shown = {item["table"]: item for item in snapshotter.status()["of_tables"]}
    assert shown["default.bad"]["failures"] == 1
    assert shown["default.bad"]["error"] == "PublishFailed: no"
    assert [item.outcome for item in work(book)] == ["failed", "failed"]
    # Not at once, though it has changed.
    add(bad, 2)
    snapshotter.on_event(events_of(book.lake, bad.record.object_id)[-1])
    assert snapshotter.run_once() == 0
    clock.advance(book.settings.maintenance_interval)
    assert snapshotter.run_once() == 2
    assert (versions(bad), versions(good)) == ([2], [1])
    assert {item["failures"] for item in snapshotter.status()["of_tables"]} == {0}


def test_the_history_of_a_table_that_cannot_be_tagged_ends_all_the_same(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1, **HOURLY, **HISTORY)
    clock.advance(HOUR)
    replace(table, 2, clock)
    snapshotter = Snapshotter(book.lake)

    def refuse() -> None:
        raise PublishFailed("no")

    with failpoints.armed("outside.metadata_written", refuse):
        snapshotter.run_once()
    assert table.tags() == []
    assert [(item.action, item.outcome) for item in work(book)] == [("tag", "failed"), ("expire", "done")]
    assert snapshotter.status()["of_tables"][0]["failures"] == 1
    clock.advance(book.settings.maintenance_interval)
    snapshotter.run_once()
    assert versions(table) == [3]


def test_what_has_changed_is_seen_though_the_clock_was_set_back(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1, **HISTORY)
    snapshotter = Snapshotter(book.lake)
    look(snapshotter, table)
    table.tag("mine")
    clock.turn_back(DAY)
    assert snapshotter.run_once() == 1


def test_in_an_outage_no_further_table_is_tried(book: Book, clock: ManualClock) -> None:
    tables = [table_of(book, 1, name=f"t{number}", **HOURLY) for number in range(3)]
    clock.advance(HOUR)
    snapshotter = Snapshotter(book.lake)

    def refuse() -> None:
        raise StorageUnavailable("it is away")

    with failpoints.armed("publish.metadata_written", refuse):
        assert look(snapshotter, *tables) == 0
    assert len(work(book)) == 1
    clock.advance(book.settings.maintenance_interval)
    assert snapshotter.run_once() == 3
    assert [versions(table) for table in tables] == [[1]] * 3


def test_a_round_is_bounded_and_the_next_one_goes_on(
    book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TABLES_PER_ROUND", 2)
    monkeypatch.setattr(module, "TABLES_SHOWN", 3)
    snapshotter = Snapshotter(book.lake)
    tables = [table_of(book, 1, name=f"t{number}", **HISTORY) for number in range(5)]
    for table in tables:
        clock.advance(1)
        table.delete("true")
    assert snapshotter.due() == 0
    rounds = []
    while snapshotter.due() == 0:
        rounds.append(snapshotter.run_once())
    assert rounds == [2, 2, 1]
    assert snapshotter.due() == book.settings.maintenance_interval
    # The oldest first.
    assert [item.table_id for item in work(book)] == [table.id for table in tables]
    status = snapshotter.status()
    assert (status["tables"], len(status["of_tables"])) == (5, 3)
    clock.advance(book.settings.maintenance_interval)
    assert snapshotter.due() == 0


def test_a_paused_snapshotter_rests_on_a_table_or_altogether(book: Book, clock: ManualClock) -> None:
    table, other = table_of(book, 1, **HOURLY, **QUERIES), table_of(book, 1, name="other", **HOURLY)
    clock.advance(HOUR)
    outside(book, table)
    snapshotter = Snapshotter(book.lake)
    book.lake.registry.write(lambda transaction: pause(transaction, "snapshotter", table.id, "test"))
    look(snapshotter, table, other)
    assert (versions(table), versions(other), len(requests(book))) == ([], [1], 1)
    book.lake.registry.write(lambda transaction: pause(transaction, "*", None, "test"))
    run_sql(book, f"DELETE FROM pauses WHERE table_id = {table.id}")
    assert look(snapshotter, table) == 0
    assert versions(table) == []
    run_sql(book, "DELETE FROM pauses")
    # Nobody has asked for a refresh; then it looks again after a while.
    clock.advance(book.settings.maintenance_interval)
    snapshotter.run_once()
    assert (versions(table), requests(book)) == ([1], [])


def test_status_tells_the_last_tag_the_next_and_the_last_expiry(book: Book, clock: ManualClock) -> None:
    table, quiet = table_of(book, 1, **HOURLY, **HISTORY), table_of(book, 1, name="a-quiet-one")
    clock.advance(HOUR)
    snapshotter = Snapshotter(book.lake)
    look(snapshotter, quiet, table)
    add(table, 2)
    look(snapshotter, table)
    first, second = snapshotter.status()["of_tables"]
    assert (first["table"], second["table"]) == ("default.t", "default.a-quiet-one")
    (tag,) = table.tags()
    assert first["last_tag"] == tag.name
    assert first["next_tag_at"] > first["last_tag_at"]
    assert first["last_expiry_at"] is not None
    assert second["last_tag"] is second["next_tag_at"] is second["last_expiry_at"] is None


# --- several, and again --------------------------------------------------------------


def test_a_new_snapshotter_knows_when_the_last_tag_was_made(book: Book, clock: ManualClock) -> None:
    table = table_of(book, 1, **HOURLY)
    clock.advance(HOUR)
    look(Snapshotter(book.lake), table)
    add(table, 2)
    clock.advance(HOUR - 1)
    again = Snapshotter(book.lake)
    again.on_refresh(Refresh(table.record.object_id, "table", table.record, "at the start"))
    assert again.run_once() == 1
    assert versions(table) == [1]
    clock.advance(1)
    again.run_once()
    assert versions(table) == [1, 2]
    # The tags are gone, and it is known all the same.
    for tag in table.tags():
        table.untag(tag.name)
    add(table, 3)
    clock.advance(HOUR - 1)
    again = Snapshotter(book.lake)
    look(again, table)
    assert table.tags() == []
    assert again.status()["of_tables"][0]["last_tag"] == work(book, "tag")[-1].detail["tag"]
    clock.advance(1)
    again.run_once()
    assert versions(table) == [3]


def test_two_that_decide_the_same_make_one_tag(shared_place: Place, clock: ManualClock) -> None:
    books = [opened(shared_place, clock) for _ in range(2)]
    table = table_of(books[0], 1, **HOURLY, **HISTORY)
    clock.advance(HOUR)
    table.delete("true")
    add(table, 2)
    waiting: list[Callable[[], object]] = [Snapshotter(books[1].lake).run_once]

    def interfere() -> None:
        if waiting:
            clock.advance(0.25)
            waiting.pop()()

    # The other comes while the first is about to commit its tag.
    with failpoints.armed("outside.metadata_written", interfere):
        Snapshotter(books[0].lake).run_once()
    assert versions(table) == [3]
    assert len(work(books[0], "tag")) == 1

    def insert_and_run() -> None:
        add(table, 4)
        Snapshotter(books[1].lake).run_once()

    # Something was inserted between the two decisions: it is the same moment all the same.
    clock.advance(HOUR)
    add(table, 3)
    waiting.append(insert_and_run)
    with failpoints.armed("outside.metadata_written", interfere):
        look(Snapshotter(books[0].lake), table)
    assert versions(table) == [3, 5]
    assert books[0].verify().ok


def test_many_at_once_do_no_harm(shared_place: Place, clock: ManualClock) -> None:
    books = [opened(shared_place, clock) for _ in range(3)]
    tables = [table_of(books[0], 1, name=f"t{number}", **HOURLY, **HISTORY) for number in range(3)]
    clock.advance(HOUR)
    for table in tables:
        table.delete("true")
        add(table, 2)
    ready = threading.Barrier(3)
    failures: list[BaseException] = []

    def run(book: Book) -> None:
        snapshotter = Snapshotter(book.lake)
        try:
            ready.wait(PATIENCE)
            for _ in range(3):
                look(snapshotter, *(book.table(table.name) for table in tables))
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(book,)) for book in books]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    # Whoever lost may have to wait for its next try.
    clock.advance(HOUR)
    Snapshotter(books[0].lake).run_once()
    assert [versions(table) for table in tables] == [[3]] * 3
    assert [len(table.history().items) for table in tables] == [1] * 3
    assert [ids(table) for table in tables] == [[2]] * 3
    assert books[0].verify().ok


# --- its life ------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    done = threading.Event()
    while not condition():
        assert time.monotonic() < until
        done.wait(0.02)


def test_it_works_by_the_clock_until_it_is_stopped(shared_place: Place) -> None:
    book = opened(shared_place, None, maintenance_interval=0.05, lease_seconds=0.3)
    table = table_of(book, 1, **{"lakebook.tag.seconds": "0.001"})
    snapshotter = Snapshotter(book.lake)
    snapshotter.start()
    snapshotter.start()
    try:
        wait_until(lambda: len(table.tags()) == 1)
        add(table, 2)
        snapshotter.on_events(events_of(book.lake, table.record.object_id))
        wait_until(lambda: len(table.tags()) == 2)
        snapshotter.on_health()
    finally:
        snapshotter.stop()
    snapshotter.stop()
    add(table, 3)
    # It can begin again, and finds what came meanwhile.
    snapshotter.start()
    wait_until(lambda: len(table.tags()) == 3)
    snapshotter.stop()


def test_it_is_not_well_when_its_thread_has_ended(shared_place: Place) -> None:
    book = opened(shared_place, None, maintenance_interval=0.05)
    table_of(book, 1, **{"lakebook.tag.seconds": "0.001"})
    snapshotter = Snapshotter(book.lake)
    snapshotter.on_health()
    # The book begins a new life, in which this process has no place.
    opened(shared_place, None).begin_epoch()
    snapshotter.start()
    thread = snapshotter._thread
    assert thread is not None
    thread.join(PATIENCE)
    with pytest.raises(SubscriberFailed, match="its thread has ended"):
        snapshotter.on_health()
    snapshotter.stop()
    snapshotter.on_health()


# --- settings of tables --------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lakebook.tag.seconds", "soon"),
        ("lakebook.tag.seconds", "-1"),
        ("lakebook.tag.seconds", "nan"),
        ("lakebook.tag.seconds", "1e12"),
        ("lakebook.tag.bytes", "1.5"),
        ("lakebook.tag.bytes", "-1"),
        ("lakebook.tag.bytes", str(2**63)),
        ("lakebook.tag.queries", "true"),
        ("lakebook.tag.queries", ""),
        ("lakebook.tag.kept", "0"),
        ("lakebook.tag.kept", "many"),
        ("lakebook.tag.keep-seconds", "-5"),
        ("lakebook.tag.keep-seconds", ""),
    ],
)
@in_memory
def test_settings_of_a_table_that_mean_nothing_are_refused(book: Book, key: str, value: str) -> None:
    with pytest.raises(InvalidTable, match=key):
        table_of(book, **{key: value})
    table = table_of(book, 1)
    with pytest.raises(InvalidTable, match=key):
        table.set_properties(**{key: value})
    with pytest.raises(InvalidTable, match=key), outside(book, table).transaction() as transaction:
        transaction.set_properties({key: value})
    assert dict(table.metadata.properties) == {}


@in_memory
def test_settings_of_a_table_are_read(book: Book) -> None:
    policy = tag_policy(book.lake, {})
    assert (policy.seconds, policy.bytes, policy.queries, policy.kept, policy.keep_seconds) == (0, 0, False, 10, None)
    table = table_of(
        book,
        **HOURLY,
        **QUERIES,
        **{"lakebook.tag.bytes": "5", "lakebook.tag.kept": "3", "lakebook.tag.keep-seconds": "0.5"},
    )
    policy = tag_policy(book.lake, table.metadata.properties)
    assert (policy.seconds, policy.bytes, policy.queries, policy.kept, policy.keep_seconds) == (HOUR, 5, True, 3, 0.5)
