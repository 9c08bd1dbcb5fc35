"""Of a published table nothing goes that a snapshot, a tag or a branch still lists, and everything goes after that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import StaticTable
from pyiceberg.table import Table as IcebergTable

from books import Place, describe
from lake import (
    PATIENCE,
    files_of,
    ids,
    in_memory,
    insert,
    lay,
    numbers,
    objects,
    own_warehouse,  # noqa: F401
    records,
    registry_state,
    rows_of,
    run_sql,
    with_ids,
)
from lakebook import Book, failpoints
from lakebook.clock import ManualClock
from lakebook.errors import LakebookError, ObjectNotFound, PathInUse, PublishFailed
from lakebook.iceberg.manifests import live_entries, read_manifest_list
from lakebook.iceberg.publishing import Work
from lakebook.lake import cleaning
from lakebook.lake.table import Table
from lakebook.registry import retirement, schema
from lakebook.registry.publishing import Pointer
from lakebook.registry.retirement import claim_abandoned

GRACE = 3600.0
PUBLISHED = 86_400.0
OUTSIDE = 259_200.0


@pytest.fixture
def clock() -> ManualClock:
    # Objects in a folder have the times of the machine's clock.
    return ManualClock(time.time_ns() // 1_000_000)


def opened(place: Place, clock: ManualClock, **more: Any) -> Book:
    return place.open(
        **{
            "clock": clock,
            "temporary_file_grace": GRACE,
            "published_grace": PUBLISHED,
            "sweep_grace": GRACE,
            "insert_alive": 600.0,
            "catalog_lease": 1.0,
            "lease_seconds": 1.0,
            **more,
        }
    )


@pytest.fixture
def timed(place: Place, clock: ManualClock) -> Book:
    return opened(place, clock)


@pytest.fixture
def shared(shared_place: Place, clock: ManualClock) -> Book:
    """A book whose files other engines can open."""
    return opened(shared_place, clock)


def publish(book: Book, table: Table) -> Pointer:
    pointer = book.lake.publisher.publish(table.record)
    assert pointer is not None
    return pointer


def published(book: Book, clock: ManualClock, name: str = "t", files: int = 3) -> Table:
    """A table of files with one number each, and a snapshot for each of them."""
    table = numbers(book, name)
    for number in range(files):
        insert(table, {"id": number})
        publish(book, table)
        clock.advance(1)
    return table


def expire(book: Book, clock: ManualClock, versions: int = 1, **more: Any) -> Any:
    """End all history but some versions. What was loaded through a catalog is held by nobody any more."""
    clock.advance(2)
    forget_loads(book)
    return book.cleaner.expire(seconds=0, versions=versions, wait=True, **more)


def forget_loads(book: Book) -> None:
    """Let the leases of loads through a catalog have ended long ago."""
    run_sql(book, "DELETE FROM leases WHERE id LIKE 'loaded-%'")


def clean(book: Book, clock: ManualClock, seconds: float = PUBLISHED + 1) -> Any:
    clock.advance(seconds)
    return book.cleaner.delete_expired_temporary_files()


def waiting(book: Book, reason: str | None = None) -> dict[str, dict[str, Any]]:
    rows = [row for row in records(book, schema.temporary_files) if row["reason"] != "deleted"]
    return {row["file_path"]: row for row in rows if reason in (None, row["reason"])}


def path_of(book: Book, table: Table, number: int) -> str:
    """The file that a number is in."""
    (file,) = [file for file in table.plan(f"id = {number}").files if ids(table, f"id = {number}") == [number]]
    return file.file_path


def outside(book: Book, table: Table) -> IcebergTable:
    """The table as another engine has it."""
    return book.catalog().load_table(("default", table.name))


def rows_outside(table: Table, ref: str | int | None = None) -> list[Any]:
    """The numbers that another engine reads with nothing but the metadata file."""
    location = table.metadata_location
    assert location is not None
    static = StaticTable.from_metadata(location)
    snapshot = static.metadata.refs[ref].snapshot_id if isinstance(ref, str) else ref
    return sorted(static.scan(snapshot_id=snapshot).to_arrow().column("id").to_pylist())


def listed(book: Book, table: Table) -> set[str]:
    """Every file that any snapshot of the metadata contains."""
    store, publisher = book.lake.store, book.lake.publisher
    pointer = publisher.pointer(table.record)
    assert pointer is not None
    return {
        store.relative(entry.data_file.file_path)
        for snapshot in publisher.load(pointer).snapshots
        for manifest in read_manifest_list(publisher.io, snapshot.manifest_list)
        for entry in live_entries(publisher.io, manifest)
    }


def check_nothing_listed_goes(book: Book, table: Table) -> None:
    """The rule: what a snapshot lists is there, and does not wait for its removal."""
    found = listed(book, table)
    assert not found & waiting(book).keys()
    assert found <= set(objects(book))


# --- which files ---------------------------------------------------------------


def test_a_file_is_retired_only_after_its_last_snapshot_has_left(timed: Book, clock: ManualClock) -> None:
    table = published(timed, clock)
    first = path_of(timed, table, 0)
    table.delete("id = 0")
    publish(timed, table)
    clock.advance(1)
    assert first in listed(timed, table)
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        seen.append((first in listed(timed, table), first in waiting(timed)))

    with failpoints.armed("publish.committed", look):
        result = expire(timed, clock)
    # First it left the metadata, and then it was retired.
    assert seen == [(False, False)]
    assert (result.files, result.min_readable, result.failed) == (1, {str(table.id): 4}, [])
    assert list(waiting(timed, "retired")) == [first]
    check_nothing_listed_goes(timed, table)
    assert timed.verify().ok
    assert clean(timed, clock).failed == []
    assert first not in objects(timed)
    assert timed.verify().ok
    assert ids(table) == [1, 2]


def test_what_is_not_published_yet_is_published_before_it_expires(timed: Book, clock: ManualClock) -> None:
    table = published(timed, clock, files=1)
    for number in (1, 2):
        table.delete("true")
        insert(table, {"id": number})
        clock.advance(1)
    result = expire(timed, clock)
    pointer = timed.lake.publisher.pointer(table.record)
    assert pointer is not None
    assert pointer.version == table.record.version == result.min_readable[str(table.id)] == 5
    assert result.files == 2
    check_nothing_listed_goes(timed, table)
    assert timed.verify().ok


def test_where_publishing_fails_nothing_that_is_listed_or_pending_expires(timed: Book, clock: ManualClock) -> None:
    table = published(timed, clock)
    other = published(timed, clock, "other")
    table.delete("id < 2")
    other.delete("id < 2")

    def refuse() -> None:
        raise PublishFailed("no", on="table default.t")

    with failpoints.armed("publish.list_written", refuse):
        result = expire(timed, clock)
    assert [on for on, _ in result.failed] == ["table default.t", "table default.other"]
    # Version 4 is not published; version 3 is, with all the files.
    assert (result.files, set(result.min_readable.values())) == (0, {3})
    assert waiting(timed) == {}
    check_nothing_listed_goes(timed, table)
    assert timed.verify().ok
    result = expire(timed, clock)
    assert (result.files, result.failed, set(result.min_readable.values())) == (4, [], {4})
    check_nothing_listed_goes(timed, table)
    assert timed.verify().ok


def test_a_table_that_was_never_published_expires_as_before(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1], [2])
    table.delete("id = 1")
    result = expire(timed, clock)
    assert (result.files, result.min_readable) == (1, {str(table.id): 3})
    assert records(timed, schema.iceberg_tables) == []
    (row,) = waiting(timed).values()
    assert row["expiration"] - row["added_at"] == GRACE * 1000
    assert clean(timed, clock, GRACE).files == 1
    assert timed.verify().ok


@in_memory
def test_a_table_whose_early_history_has_ended_is_published_whole(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", *([number] for number in range(5)))
    assert expire(timed, clock, versions=3).min_readable == {str(table.id): 3}
    publish(timed, table)
    # Versions 3, 4 and 5 are appends: the first of them begins the history, and the others follow.
    assert listed(timed, table) == {row["file_path"] for row in files_of(timed, table)}
    assert timed.verify().ok


@in_memory
def test_a_snapshot_that_the_metadata_has_no_room_for_keeps_no_version(place: Place, clock: ManualClock) -> None:
    book = opened(place, clock, snapshots_kept=1)
    table = published(book, clock)
    table.delete("id = 0")
    publish(book, table)
    # Only one snapshot is listed, but all versions are kept.
    assert len(table.snapshots()) == 1
    assert expire(book, clock, versions=10).files == 0
    assert ids(table, version=3) == [0, 1, 2]
    assert expire(book, clock).files == 1
    assert book.verify().ok


def test_a_lease_keeps_snapshots_and_files_and_a_dead_one_does_not(timed: Book, clock: ManualClock) -> None:
    table = published(timed, clock)
    with table.pin(version=2) as pinned:
        table.delete("true")
        publish(timed, table)
        clock.advance(1)
        result = timed.cleaner.expire(seconds=0, versions=1)
        assert (result.files, result.min_readable) == (0, {str(table.id): 2})
        assert [snapshot.version for snapshot in table.snapshots()] == [2, 3, 4]
        assert ids(pinned) == [0, 1]
        # Its process is gone.
        timed.lake.renewals.let_go(pinned.lease.id)
        result = expire(timed, clock)
        assert (result.files, result.min_readable) == (3, {str(table.id): 4})
        assert [snapshot.version for snapshot in table.snapshots()] == [4]
    check_nothing_listed_goes(timed, table)
    assert timed.verify().ok


def test_a_tag_keeps_what_its_snapshot_contains_and_nothing_newer(shared: Book, clock: ManualClock) -> None:
    table = published(shared, clock)
    tagged = table.snapshots()[1]
    assert tagged.version == 2
    outside(shared, table).manage_snapshots().create_tag(tagged.snapshot_id, "old").commit()
    kept = {path_of(shared, table, number) for number in (0, 1)}
    newer = path_of(shared, table, 2)
    table.delete("true")
    insert(table, {"id": 9})
    publish(shared, table)
    foreseen = expire(shared, clock, dry_run=True)
    result = expire(shared, clock)
    assert (result.files, result.bytes) == (foreseen.files, foreseen.bytes)
    assert (result.files, result.min_readable) == (1, {str(table.id): 5})
    assert set(waiting(shared, "retired")) == {newer}
    check_nothing_listed_goes(shared, table)
    assert shared.verify().ok
    clean(shared, clock)
    assert newer not in objects(shared)
    assert rows_outside(table, "old") == [0, 1]
    # Nothing more, however often it is looked at.
    assert expire(shared, clock).files == 0
    outside(shared, table).manage_snapshots().remove_tag("old").commit()
    foreseen = expire(shared, clock, dry_run=True)
    assert (foreseen.files, expire(shared, clock).files) == (2, 2)
    assert set(waiting(shared, "retired")) == kept
    clean(shared, clock)
    assert not kept & set(objects(shared))
    assert (ids(table), rows_outside(table)) == ([9], [9])
    assert shared.verify().ok


def test_a_branch_keeps_what_it_began_from_and_what_was_added_to_it(shared: Book, clock: ManualClock) -> None:
    table = published(shared, clock)
    old = table.snapshots()[0]
    engine = outside(shared, table)
    engine.manage_snapshots().create_branch(old.snapshot_id, "audit").commit()
    engine = outside(shared, table)
    engine.append(with_ids(table, [{"id": 50}]), branch="audit")
    (own,) = records(shared, schema.branch_files)
    kept = path_of(shared, table, 0)
    table.delete("true")
    publish(shared, table)
    result = expire(shared, clock)
    assert result.files == 2
    clean(shared, clock)
    assert rows_outside(table, "audit") == [0, 50]
    assert rows_outside(table) == []
    assert {kept, own["file_path"]} <= set(objects(shared))
    assert shared.verify().ok
    # The engine lets go of the branch, and of its snapshots.
    engine = outside(shared, table)
    head = engine.metadata.refs["audit"].snapshot_id
    engine.manage_snapshots().remove_branch("audit").commit()
    outside(shared, table).maintenance.expire_snapshots().by_id(head).commit()
    assert expire(shared, clock).files == 1
    assert {kept, own["file_path"]} <= waiting(shared).keys()
    clean(shared, clock)
    assert not {kept, own["file_path"]} & set(objects(shared))
    assert shared.verify().ok


def test_a_branch_that_main_was_moved_to_still_keeps_its_files(shared: Book, clock: ManualClock) -> None:
    table = published(shared, clock, files=1)
    engine = outside(shared, table)
    first = engine.metadata.current_snapshot_id
    assert first is not None
    engine.manage_snapshots().create_branch(first, "audit").commit()
    outside(shared, table).append(with_ids(table, [{"id": 50}]), branch="audit")
    outside(shared, table).manage_snapshots().set_current_snapshot(ref_name="audit").commit()
    assert ids(table) == [0, 50]
    assert shared.verify().ok
    # Main goes on without the file; the branch still has it.
    outside(shared, table).delete("id = 50")
    expire(shared, clock)
    check_nothing_listed_goes(shared, table)
    clean(shared, clock)
    assert rows_outside(table, "audit") == [0, 50]
    assert rows_outside(table) == [0]
    assert shared.verify().ok


def test_a_file_that_a_branch_has_taken_from_history_stays_for_it(shared: Book, clock: ManualClock) -> None:
    table = published(shared, clock, files=1)
    outside(shared, table).append(with_ids(table, [{"id": 50}]))
    ended = path_of(shared, table, 50)
    outside(shared, table).delete("id = 50")
    assert ids(table) == [0]
    engine = outside(shared, table)
    head = engine.metadata.current_snapshot_id
    assert head is not None
    engine.manage_snapshots().create_branch(head, "audit").commit()
    outside(shared, table).add_files([shared.lake.store.uri(ended)], branch="audit", check_duplicate_files=False)
    assert rows_outside(table, "audit") == [0, 50]
    expire(shared, clock)
    check_nothing_listed_goes(shared, table)
    clean(shared, clock)
    assert rows_outside(table, "audit") == [0, 50]
    assert shared.verify().ok


def test_a_dry_run_says_what_would_be_retired_and_publishes_nothing(timed: Book, clock: ManualClock) -> None:
    table = published(timed, clock)
    table.delete("id > 0")
    insert(table, {"id": 9})
    before, there = registry_state(timed), objects(timed)
    foreseen = expire(timed, clock, dry_run=True)
    assert (registry_state(timed), objects(timed)) == (before, there)
    done = expire(timed, clock)
    assert (foreseen.files, foreseen.bytes, foreseen.min_readable) == (done.files, done.bytes, done.min_readable)
    assert done.files == 2


# --- how long ------------------------------------------------------------------


@pytest.mark.parametrize(("plain", "of_published"), [(GRACE, PUBLISHED), (2 * PUBLISHED, PUBLISHED)])
def test_a_published_file_waits_for_the_longer_grace(
    make_place: Any, clock: ManualClock, plain: float, of_published: float
) -> None:
    book = opened(make_place("memory"), clock, temporary_file_grace=plain, published_grace=of_published)
    table = published(book, clock)
    known = published(book, clock, "known", 1)
    never = numbers(book, "never", [1])
    for item in (table, known, never):
        item.delete("true")
    begun = clock.now_ms()
    clock.advance(1000)
    expire(book, clock)
    retired = waiting(book, "retired")
    graces = {path: (row["added_at"], row["expiration"] - row["added_at"]) for path, row in retired.items()}
    longer = max(plain, of_published) * 1000
    for item, grace in ((table, longer), (known, longer), (never, plain * 1000)):
        found = [graces[row["file_path"]] for row in files_of(book, item)]
        assert {length for _, length in found} == {grace}
        assert all(added >= begun + 1_000_000 for added, _ in found)
    clock.advance(max(plain, of_published) - 1)
    before = len(objects(book, "data"))
    book.cleaner.delete_expired_temporary_files()
    assert len(objects(book, "data")) == (before - 1 if plain < of_published else before)
    clock.advance(1)
    book.cleaner.delete_expired_temporary_files()
    assert objects(book, "data") == []
    assert book.verify().ok


def test_metadata_goes_after_its_grace_and_the_rest_stays_readable(shared: Book, clock: ManualClock) -> None:
    table = published(shared, clock, files=4)
    before = len(objects(shared, "iceberg"))
    expire(shared, clock)
    assert waiting(shared, "no snapshot lists it")
    clock.advance(PUBLISHED - 1)
    assert shared.cleaner.delete_expired_temporary_files().files == 0
    clean(shared, clock, 1)
    assert len(objects(shared, "iceberg")) < before
    assert (rows_outside(table), waiting(shared)) == ([0, 1, 2, 3], {})
    assert shared.verify().ok


# --- files with several rows ---------------------------------------------------


def rolled_back(book: Book, clock: ManualClock) -> tuple[Table, str]:
    """A table whose first file was deleted and brought back by a rollback; the file's path."""
    table = published(book, clock, files=2)
    path = path_of(book, table, 0)
    snapshot = table.snapshots()[-1]
    table.delete("id = 0")
    publish(book, table)
    clock.advance(1)
    outside(book, table).manage_snapshots().set_current_snapshot(snapshot_id=snapshot.snapshot_id).commit()
    rows = [row for row in files_of(book, table) if row["file_path"] == path]
    assert [(row["from_version"], row["to_version"]) for row in rows] == [(1, 3), (4, None)]
    assert ids(table) == [0, 1]
    return table, path


def test_the_old_row_of_a_revived_file_just_goes(shared: Book, clock: ManualClock) -> None:
    table, path = rolled_back(shared, clock)
    old, new = [row for row in files_of(shared, table) if row["file_path"] == path]
    insert(table, {"id": 5})
    publish(shared, table)
    foreseen = expire(shared, clock, dry_run=True)
    assert (foreseen.files, expire(shared, clock).files) == (0, 0)
    left = [row for row in files_of(shared, table) if row["file_path"] == path]
    assert left == [new]
    assert waiting(shared, "retired") == {}
    # Its statistics went with it, and an event tells of it; those of the other row are there.
    assert {row["file_id"] for row in records(shared, schema.file_column_stats)} == {
        row["id"] for row in files_of(shared, table)
    }
    told = [row for row in records(shared, schema.events) if row["table_name"] == "table_files"]
    assert [row["key"]["id"] for row in told if row["operation"] == "delete"] == [old["id"]]
    assert ids(table, "id = 0") == [0]
    assert shared.verify().ok
    # When it ends for good it is handed over once.
    table.delete("id = 0")
    assert expire(shared, clock).files == 1
    assert list(waiting(shared, "retired")) == [path]
    clean(shared, clock)
    assert path not in objects(shared)
    assert [row for row in files_of(shared, table) if row["file_path"] == path] == []
    assert (ids(table), rows_outside(table)) == ([1, 5], [1, 5])
    assert shared.verify().ok


def test_rows_of_one_file_that_go_together_hand_it_over_once(shared: Book, clock: ManualClock) -> None:
    table, path = rolled_back(shared, clock)
    table.delete("true")
    insert(table, {"id": 7})
    foreseen = expire(shared, clock, dry_run=True)
    result = expire(shared, clock)
    assert (foreseen.files, foreseen.bytes) == (result.files, result.bytes)
    assert result.files == 2
    assert len([row for row in files_of(shared, table) if row["file_path"] == path]) == 1
    assert path in waiting(shared, "retired")
    assert shared.verify().ok
    clean(shared, clock)
    assert [row["file_path"] for row in files_of(shared, table)] == [path_of(shared, table, 7)]
    assert path not in objects(shared)
    assert shared.verify().ok


def test_a_file_is_handed_over_by_whichever_of_its_rows_is_the_last(shared: Book, clock: ManualClock) -> None:
    table, path = rolled_back(shared, clock)
    tagged = next(item for item in table.snapshots() if item.version == 1)
    outside(shared, table).manage_snapshots().create_tag(tagged.snapshot_id, "old").commit()
    table.delete("true")
    insert(table, {"id": 7})
    # The newer row goes first: the tag has the older one.
    assert expire(shared, clock).files == 1
    (left,) = [row for row in files_of(shared, table) if row["file_path"] == path]
    assert (left["from_version"], left["to_version"], left["retired_at"]) == (1, 3, None)
    clean(shared, clock)
    assert rows_outside(table, "old") == [0]
    assert shared.verify().ok
    outside(shared, table).manage_snapshots().remove_tag("old").commit()
    assert expire(shared, clock).files == 1
    assert list(waiting(shared, "retired")) == [path]
    clean(shared, clock)
    assert path not in objects(shared)
    assert shared.verify().ok


@in_memory
def test_a_row_that_was_retired_before_its_file_came_back_does_not_keep_it(timed: Book, clock: ManualClock) -> None:
    table = published(timed, clock)
    path = path_of(timed, table, 0)
    table.delete("id = 0")
    expire(timed, clock)
    # Taken back from those that wait, and visible again.
    run_sql(timed, f"DELETE FROM temporary_files WHERE file_path = '{path}'")
    columns = [column.name for column in schema.table_files.columns]
    given = {"id": "99", "from_version": "4", "to_version": "NULL", "retired_at": "NULL"}
    values = [given.get(str(name), str(name)) for name in columns]
    run_sql(
        timed,
        f"INSERT INTO table_files ({', '.join(columns)}) SELECT {', '.join(values)} FROM table_files"
        f" WHERE file_path = '{path}'",
    )
    assert "files" not in {finding.check for finding in timed.verify(files=False).findings}
    run_sql(timed, "UPDATE table_files SET to_version = 5 WHERE id = 99")
    run_sql(timed, "UPDATE tables SET last_file_id = 99")
    insert(table, {"id": 5})
    assert expire(timed, clock).files == 1
    assert [row["id"] for row in files_of(timed, table) if row["file_path"] == path] == [99]
    assert path in waiting(timed, "retired")
    clean(timed, clock)
    assert path not in objects(timed)
    assert [row for row in files_of(timed, table) if row["file_path"] == path] == []


def wait_by_hand(book: Book, path: str) -> None:
    run_sql(book, f"INSERT INTO temporary_files VALUES ('{path}', 1, 'waiting', 'retired', 1, 1)")


Need = Callable[[Book, Table, str], str]


def a_live_row(book: Book, table: Table, path: str) -> str:
    wait_by_hand(book, path)
    return path


def an_unretired_row(book: Book, table: Table, path: str) -> str:
    table.delete("id = 0")
    wait_by_hand(book, path)
    return path


def a_snapshot(book: Book, table: Table, path: str) -> str:
    table.delete("id = 0")
    run_sql(book, f"UPDATE table_files SET retired_at = 1 WHERE file_path = '{path}'")
    wait_by_hand(book, path)
    return path


def a_branch(book: Book, table: Table, path: str) -> str:
    lay(book, "iceberg/x/data/f.parquet", b"x")
    run_sql(book, f"INSERT INTO branch_files VALUES ('iceberg/x/data/f.parquet', {table.id}, 1, 1)")
    wait_by_hand(book, "iceberg/x/data/f.parquet")
    return "iceberg/x/data/f.parquet"


def the_metadata(book: Book, table: Table, path: str) -> str:
    pointer = book.lake.publisher.pointer(table.record)
    assert pointer is not None
    wait_by_hand(book, pointer.metadata_location)
    return pointer.metadata_location


@pytest.mark.parametrize("need", [a_live_row, an_unretired_row, a_snapshot, a_branch, the_metadata])
@pytest.mark.parametrize("kind", ["memory", "postgresql"])
def test_what_is_needed_is_never_marked_even_if_it_waits(
    make_place: Any, clock: ManualClock, kind: str, need: Need
) -> None:
    book = opened(make_place(kind), clock)
    table = published(book, clock)
    path = need(book, table, path_of(book, table, 0))
    result = clean(book, clock)
    assert (result.files, result.pinned) == (0, 1)
    assert path in objects(book)
    assert waiting(book)[path]["state"] == "waiting"
    assert not book.verify().ok


# --- dropped tables ------------------------------------------------------------


def everything_known(book: Book) -> dict[str, list[dict[str, Any]]]:
    kinds = (
        schema.iceberg_tables,
        schema.table_snapshots,
        schema.iceberg_files,
        schema.snapshot_manifests,
        schema.branch_files,
        schema.footer_debts,
    )
    return registry_state(book) | {str(kind.name): records(book, kind) for kind in kinds}


def test_a_dropped_table_takes_its_metadata_tags_and_branches_with_it(
    shared: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retirement, "CHUNK", 3)
    monkeypatch.setattr(cleaning, "CHUNK", 3)
    table, _ = rolled_back(shared, clock)
    first = table.snapshots()[0]
    engine = outside(shared, table)
    engine.manage_snapshots().create_tag(first.snapshot_id, "old").create_branch(first.snapshot_id, "audit").commit()
    outside(shared, table).append(with_ids(table, [{"id": 50}]), branch="audit")
    table.delete("id = 0")
    insert(table, {"id": 8})
    unpublished = path_of(shared, table, 8)
    run_sql(shared, f"INSERT INTO footer_debts VALUES ('{unpublished}', {table.id}, 1, {clock.now_ms() * 2}, NULL)")
    other = published(shared, clock, "other", 1)
    kept = (
        set(objects(shared))
        - set(objects(shared, f"iceberg/{table.record.table_uuid}"))
        - {row["file_path"] for row in files_of(shared, table)}
    )
    shared.tables.drop("t")
    clock.advance(2)
    forget_loads(shared)
    foreseen = shared.cleaner.expire(dry_run=True)
    done = shared.cleaner.expire()
    assert (foreseen.files, foreseen.bytes) == (done.files, done.bytes)
    found = waiting(shared, "table dropped")
    assert done.files == len(found) > 10
    assert set(objects(shared)) - kept <= waiting(shared).keys()
    graces = {path: row["expiration"] - row["added_at"] for path, row in found.items()}
    assert graces.pop(unpublished) == GRACE * 1000
    assert set(graces.values()) == {PUBLISHED * 1000}
    assert shared.verify().ok
    # What was never published goes first.
    assert clean(shared, clock, GRACE + 1).files == 1
    assert unpublished not in objects(shared)
    assert len(records(shared, schema.tables)) == 2
    clean(shared, clock)
    shared.cleaner.expire(wait=True)
    assert len(records(shared, schema.tables)) == 1
    state = everything_known(shared)
    for name in state.keys() - {"commits", "inserts", "temporary_files", "partition_metadata"}:
        assert all(row.get("table_id", other.id) == other.id for row in state[name]), name
    assert len(state["partition_metadata"]) == 1
    assert state["footer_debts"] == state["branch_files"] == []
    assert set(objects(shared)) == kept
    assert rows_outside(other) == [0]
    assert shared.verify().ok


@in_memory
def test_a_dropped_table_without_files_leaves_no_metadata(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t")
    publish(timed, table)
    timed.tables.drop("t")
    assert timed.cleaner.expire(dry_run=True).files == timed.cleaner.expire().files == 1
    timed.cleaner.expire()
    assert records(timed, schema.tables) == []
    assert clean(timed, clock).files == 1
    assert objects(timed) == []
    assert timed.verify().ok


@in_memory
def test_a_lease_holds_a_dropped_published_table_back(timed: Book, clock: ManualClock) -> None:
    table = published(timed, clock)
    with table.pin() as pinned:
        timed.tables.drop("t")
        assert timed.cleaner.expire(dry_run=True).files == timed.cleaner.expire().files == 0
        clean(timed, clock, 0.1)
        assert waiting(timed) == {}
        assert ids(pinned) == [0, 1, 2]
    assert timed.cleaner.expire().files > 3
    clean(timed, clock)
    timed.cleaner.expire()
    assert (objects(timed), records(timed, schema.tables)) == ([], [])


@in_memory
def test_debts_go_with_their_files(timed: Book, clock: ManualClock) -> None:
    table = published(timed, clock)
    path = path_of(timed, table, 0)
    kept = path_of(timed, table, 1)
    for item in (path, kept):
        run_sql(timed, f"INSERT INTO footer_debts VALUES ('{item}', {table.id}, 1, {clock.now_ms() * 2}, NULL)")
    table.delete("id = 0")
    expire(timed, clock)
    assert len(records(timed, schema.footer_debts)) == 2
    clean(timed, clock)
    assert [row["file_path"] for row in records(timed, schema.footer_debts)] == [kept]


# --- sweeping ------------------------------------------------------------------


def test_a_publisher_that_died_is_fenced_and_its_folder_removed(timed: Book, clock: ManualClock) -> None:
    table = published(timed, clock)
    pointer = publish(timed, table)
    dead = Work(timed.lake.publisher, table.id, pointer.location).__enter__()
    left = lay(timed, f"{dead.folder}/x-m0.avro", b"manifest")
    clock.advance(599)
    timed.cleaner.sweep()
    assert left in objects(timed)
    assert f"insert {dead.commit_id} (open): 1 objects are not swept yet" in timed.verify().unfinished
    clock.advance(1)
    result = timed.cleaner.sweep()
    assert (result.fenced, result.objects, result.failed) == (1, 1, [])
    assert left not in objects(timed)
    check_nothing_listed_goes(timed, table)
    assert timed.verify().ok


def test_of_a_committed_publication_only_what_no_row_knows_is_swept(timed: Book, clock: ManualClock) -> None:
    table = published(timed, clock)
    expire(timed, clock)
    there = objects(timed)
    pointer = publish(timed, table)
    left = lay(timed, f"{pointer.metadata_location.rpartition('/')[0]}/late.avro", b"late")
    assert timed.verify().ok
    preview = timed.cleaner.sweep(dry_run=True)
    assert (preview.objects, left in objects(timed)) == (1, True)
    assert timed.cleaner.sweep().objects == 1
    assert objects(timed) == there
    clock.advance(GRACE + 1)
    timed.cleaner.sweep()
    clock.advance(GRACE + 1)
    timed.cleaner.sweep()
    assert records(timed, schema.inserts) == []
    # All that is known stays, though the listing shows it and it is as old as anything.
    clock.advance(10 * OUTSIDE)
    assert timed.cleaner.sweep().objects == 0
    assert objects(timed) == there
    assert timed.verify().ok


def test_what_outside_engines_left_goes_when_it_is_old_and_no_row_knows_it(timed: Book, clock: ManualClock) -> None:
    table = published(timed, clock)
    pointer = publish(timed, table)
    settled = objects(timed)
    for _ in range(3):
        clock.advance(GRACE + 1)
        timed.cleaner.sweep()
    assert objects(timed) == settled
    work = Work(timed.lake.publisher, table.id, pointer.location).__enter__()
    timed.metadata.create_topic("orders", 1)
    left = [
        lay(timed, f"{pointer.location}/data/part.parquet", b"left"),
        lay(timed, f"{pointer.location}/data/.part.parquet.crc", b"crc"),
        lay(timed, f"{pointer.location}/metadata/x.avro", b"left"),
        lay(timed, "iceberg/00000000-0000-0000-0000-000000000000/data/x.parquet", b"staged, and never came"),
        lay(timed, "iceberg/x", b"left"),
    ]
    kept = [
        *settled,
        lay(timed, f"{work.folder}/x.avro", b"at work"),
        lay(timed, f"{pointer.location}/data/segment.parquet", b"segment"),
        lay(timed, "iceberg.parquet", b"elsewhere"),
        lay(timed, "icebergs/x", b"elsewhere"),
        lay(timed, f"data/{table.id}/x.parquet", b"elsewhere"),
    ]
    timed.metadata.add_segments([describe(base=0, s3_key=f"{pointer.location}/data/segment.parquet")])
    branch = lay(timed, f"{pointer.location}/data/branch.parquet", b"branch")
    run_sql(timed, f"INSERT INTO branch_files VALUES ('{branch}', {table.id}, 6, 1)")
    kept.append(branch)
    clock.advance(OUTSIDE - 2 * 3 * GRACE)
    run_sql(timed, f"UPDATE inserts SET alive_until = {10 * clock.now_ms()}")
    timed.cleaner.sweep()
    assert set(objects(timed)) == {*left, *kept}
    assert not [finding for finding in timed.verify().findings if finding.on in left]
    clock.advance(2 * 3 * GRACE)
    found = {finding.on for finding in timed.verify().findings if finding.check == "orphans"}
    assert found - {f"data/{table.id}/x.parquet"} == set(left)
    preview = timed.cleaner.sweep(dry_run=True)
    assert preview.objects == len(left)
    assert set(objects(timed)) == {*left, *kept}
    result = timed.cleaner.sweep()
    assert (result.objects, result.failed) == (len(left), [])
    assert set(objects(timed)) == set(kept)
    assert waiting(timed).keys().isdisjoint(left)
    assert timed.cleaner.sweep().objects == 0
    assert {finding.on for finding in timed.verify().findings} == {f"data/{table.id}/x.parquet"}


def test_nobody_can_take_a_file_that_is_just_being_swept(timed: Book, clock: ManualClock) -> None:
    table = published(timed, clock)
    pointer = publish(timed, table)
    path = lay(timed, f"{pointer.location}/data/late.parquet", rows_of(table, [{"id": 9}]))
    clock.advance(OUTSIDE + 10)
    refused: list[str] = []

    def take() -> None:
        with pytest.raises(PathInUse):
            table.add_files([path])
        refused.append(path)

    with failpoints.armed("clean.marked", take):
        assert timed.cleaner.sweep().objects == 1
    assert refused == [path]
    assert ids(table) == [0, 1, 2]
    # And the other way round: what somebody has taken since the listing is not marked.
    path = lay(timed, f"{pointer.location}/data/early.parquet", rows_of(table, [{"id": 9}]))
    table.add_files([path])
    assert timed._registry.write(lambda transaction: claim_abandoned(transaction, [(path, 1)])) == []
    assert waiting(timed).keys().isdisjoint([path])
    assert ids(table) == [0, 1, 2, 9]
    assert timed.verify().ok


def test_a_sweep_that_died_is_finished_by_the_cleaner(timed: Book, clock: ManualClock) -> None:
    class Died(BaseException):
        pass

    def die() -> None:
        raise Died

    table = published(timed, clock)
    pointer = publish(timed, table)
    for point in ("clean.marked", "clean.object_deleted"):
        path = lay(timed, f"{pointer.location}/data/left.parquet", b"left")
        clock.advance(OUTSIDE + 10)
        with failpoints.armed(point, die), pytest.raises(Died):
            timed.cleaner.sweep()
        assert timed.verify().ok
        assert timed.cleaner.delete_expired_temporary_files().files >= 1
        assert path not in objects(timed)
        assert path not in waiting(timed)
        assert timed.verify().ok


@in_memory
def test_leftovers_are_swept_in_batches(timed: Book, clock: ManualClock) -> None:
    paths = [lay(timed, f"iceberg/none/{number}.parquet", b"left") for number in range(2100)]
    clock.advance(OUTSIDE + 10)
    assert timed.cleaner.sweep(dry_run=True).objects == len(paths)
    steps: list[str] = []
    assert timed.cleaner.sweep(progress=steps.append).objects == len(paths)
    assert steps[-1] == f"{len(paths)} objects removed"
    assert objects(timed) == []


# --- with publishers at work ----------------------------------------------------


@pytest.fixture
def two(shared_place: Place, clock: ManualClock) -> tuple[Book, Book]:
    """The same book in two processes, as far as it can tell."""
    return opened(shared_place, clock), opened(shared_place, clock)


POINTS = ["publish.reserved", "publish.metadata_written"]


@pytest.mark.parametrize("point", POINTS)
def test_an_expiry_while_another_publishes_retires_nothing_that_it_lists(
    two: tuple[Book, Book], clock: ManualClock, point: str
) -> None:
    book, other = two
    table = published(book, clock)
    table.delete("id = 0")
    insert(table, {"id": 7})
    table.delete("id = 1")
    times: list[int] = []

    def be_second() -> None:
        if not times:
            times.append(0)
            times[0] = expire(other, clock).files
            check_nothing_listed_goes(other, table)

    with failpoints.armed(point, be_second):
        publish(book, table)
    assert times == [2]
    check_nothing_listed_goes(book, table)
    assert book.verify().ok
    clean(book, clock)
    assert (ids(table), rows_outside(table)) == ([2, 7], [2, 7])
    assert book.verify().ok


@pytest.mark.parametrize("point", POINTS)
def test_history_that_ends_while_a_table_is_first_published_is_not_listed(
    two: tuple[Book, Book], clock: ManualClock, point: str
) -> None:
    book, other = two
    table = numbers(book, "t", [0], [1], [2])
    table.delete("id = 0")
    insert(table, {"id": 7})
    table.delete("id = 1")
    clock.advance(1)
    times: list[int] = []

    def be_second() -> None:
        if not times:
            times.append(0)
            times[0] = other.cleaner.expire(seconds=0, versions=1).files

    with failpoints.armed(point, be_second):
        publish(book, table)
    assert times == [2]
    check_nothing_listed_goes(book, table)
    assert book.verify().ok
    clean(book, clock)
    assert (ids(table), rows_outside(table)) == ([2, 7], [2, 7])
    assert book.verify().ok


def test_a_table_dropped_while_it_is_published_is_emptied(two: tuple[Book, Book], clock: ManualClock) -> None:
    book, other = two
    table = published(book, clock)
    insert(table, {"id": 7})

    def drop() -> None:
        other.tables.drop("t")
        other.cleaner.expire()

    with failpoints.armed("publish.metadata_written", drop), pytest.raises(LakebookError):
        publish(book, table)
    assert book.verify().ok
    clean(book, clock)
    book.cleaner.expire()
    assert records(book, schema.tables) == []
    for _ in range(3):
        clock.advance(GRACE + 1)
        book.cleaner.sweep()
    assert objects(book) == []
    assert book.verify().ok


def test_publishers_cleaners_and_writers_at_once_lose_nothing(shared_place: Place) -> None:
    settings: dict[str, Any] = {"temporary_file_grace": 0, "published_grace": 60, "sweep_grace": 0, "insert_alive": 1e6}
    # Far ahead of the others: for this one every grace has passed.
    ahead = ManualClock(time.time_ns() // 1_000_000 + 3_600_000)
    book = shared_place.open(**settings)
    table = numbers(book, "t", [0])
    failures: list[BaseException] = []
    done = threading.Event()

    def write() -> None:
        mine = shared_place.open(**settings)
        for number in range(1, 16):
            insert(mine.table("t"), {"id": number})
            if number % 2 == 0:
                mine.table("t").delete(f"id = {number - 1}")
        done.set()

    def keep_publishing() -> None:
        mine = shared_place.open(**settings)
        while not done.is_set():
            # For the cleaner no grace is left: metadata may go from under who has just read where it is.
            with suppress(ObjectNotFound):
                mine.lake.publisher.publish(mine.table("t").record)

    def keep_cleaning() -> None:
        mine = shared_place.open(clock=ahead, **settings)
        while not done.is_set():
            ahead.advance(61)
            mine.cleaner.expire(seconds=0, versions=1)
            mine.cleaner.delete_expired_temporary_files()
            mine.cleaner.sweep()

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - handed to the test
                failures.append(error)
                done.set()

        return run

    threads = [threading.Thread(target=guarded(work)) for work in (write, keep_publishing, keep_cleaning)]
    for thread in threads:
        thread.start()
    while not done.is_set():
        found = book.verify()
        assert found.ok, found.findings
    for thread in threads:
        thread.join(PATIENCE)
    assert failures == []
    publish(book, table)
    check_nothing_listed_goes(book, table)
    expected = [number for number in range(16) if number % 2 == 0 or number == 15]
    assert ids(table) == rows_outside(table) == expected
    assert pa.table({"id": expected}).num_rows == table.count()
    assert book.verify().ok
