"""Commits of outside engines become versions: every engine reads the same rows afterwards, and nothing is lost."""

from __future__ import annotations

from datetime import date
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import SortDirection, SortField, SortOrder
from pyiceberg.table.update import (
    AddSchemaUpdate,
    AddSnapshotUpdate,
    AddSortOrderUpdate,
    AssertCurrentSchemaId,
    AssertDefaultSortOrderId,
    AssertDefaultSpecId,
    AssertLastAssignedFieldId,
    AssertLastAssignedPartitionId,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemovePropertiesUpdate,
    RemoveSnapshotRefUpdate,
    RemoveSnapshotsUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSortOrderUpdate,
    SetPropertiesUpdate,
)
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from books import Place
from by_hand import (
    ADDED,
    DELETED,
    EXISTING,
    QUICK,
    Hand,
    check,
    check_ids,
    check_versions,
    in_order,
    made,
    new_snapshot_id,
    nothing_changes,
    of_duckdb,
    present_clock,
    refused,
    settle,
    to_ref,
)
from lake import (
    files_of,
    ids,
    insert,
    lay,
    numbers,
    objects,
    own_warehouse,  # noqa: F401
    parquet,
    records,
)
from lakebook import Book, failpoints
from lakebook.clock import ManualClock
from lakebook.errors import LakebookError
from lakebook.lake.extremes import Extremes
from lakebook.lake.table import Table
from lakebook.registry import schema

DAY = 86_400
GRACE = 3600.0
HOLD = 5.0


@pytest.fixture
def clock() -> ManualClock:
    return present_clock()


@pytest.fixture
def book(shared_place: Place, clock: ManualClock) -> Book:
    """A book whose files go soon, and which other programs can read."""
    return shared_place.open(
        clock=clock, temporary_file_grace=GRACE, published_grace=GRACE, outside_hold=HOLD, catalog_lease=60.0
    )


def iceberg(book: Book, table: Table) -> Any:
    """The table as PyIceberg has it."""
    return book.catalog().load_table((table.namespace, table.name))


def rows(*values: int) -> pa.Table:
    return pa.table({"id": pa.array(values, pa.int64())})


def clean(book: Book, clock: ManualClock) -> None:
    """Expire what can be, delete what may be, and sweep, long after everyone has gone."""
    for _ in range(2):
        clock.advance(2 * DAY)
        book.cleaner.expire(seconds=0, versions=1, wait=True)
        clock.advance(2 * DAY)
        book.cleaner.delete_expired_temporary_files()
        book.cleaner.sweep()


def let_go(book: Book, clock: ManualClock) -> None:
    """Let the leases of those who loaded tables run out."""
    clock.advance(DAY)
    book.cleaner.delete_expired_temporary_files()


def operations(table: Table) -> list[str]:
    """The operations of the history, the oldest first."""
    return [item.operation for item in reversed(table.history().items)]


# --- appends, overwrites and deletes -----------------------------------------------


def test_an_append_is_a_version_with_exact_numbers(book: Book) -> None:
    table = numbers(book, "t", [1, 2], [3])
    iceberg(book, table).append(rows(10, 11), snapshot_properties={"user.note": "mine"})
    check_ids(book, table, 1, 2, 3, 10, 11)
    assert operations(table) == ["create", "append", "append", "append"]
    newest = table.history()[0]
    assert (newest.added_files, newest.added_rows, newest.removed_files) == (1, 2, 0)
    assert newest.summary["user.note"] == "mine"
    record = table.snapshots()[-1]
    assert (record.version, record.is_ours, record.summary["user.note"]) == (3, False, "mine")
    check_versions(book, table, with_duckdb=True)


def test_rows_of_an_outside_engine_are_found_by_their_statistics(book: Book) -> None:
    table = numbers(book, "t", [1, 2])
    iceberg(book, table).append(rows(10, 20))
    settle(book)
    assert ids(table, "id > 15") == [20]
    assert len(table.plan("id > 15").files) == 1
    assert table.min_max("id") == Extremes(1, 20)
    assert records(book, schema.footer_debts) == []
    check_ids(book, table, 1, 2, 10, 20)


def test_overwrites_and_deletes_are_versions(book: Book) -> None:
    table = numbers(book, "t", [1, 2, 3], [4, 5])
    theirs = iceberg(book, table)
    theirs.delete("id = 2")
    check_ids(book, table, 1, 3, 4, 5)
    theirs.overwrite(rows(40), "id >= 4")
    check_ids(book, table, 1, 3, 40)
    insert(table, {"id": 6})
    theirs = iceberg(book, table)
    theirs.delete("id = 40")
    check_ids(book, table, 1, 3, 6)
    theirs.overwrite(rows(7))
    check_ids(book, table, 7)
    check_versions(book, table, with_duckdb=True)
    assert ids(table, version=2) == [1, 2, 3, 4, 5]


def test_a_delete_of_all_rows_leaves_an_empty_table(book: Book) -> None:
    table = numbers(book, "t", [1], [2])
    iceberg(book, table).delete()
    check_ids(book, table, with_duckdb=False)
    insert(table, {"id": 3})
    check_ids(book, table, 3)


def test_an_upsert_of_an_outside_engine_changes_and_adds_rows(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT NOT NULL, name STRING", properties=QUICK)
    insert(table, {"id": 1, "name": "a"}, {"id": 2, "name": "b"})
    given = pa.table(
        {"id": [2, 3], "name": ["B", "c"]},
        schema=pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())]),
    )
    iceberg(book, table).upsert(given, join_cols=["id"])
    assert {row["id"]: row["name"] for row in check(book, table)} == {1: "a", 2: "B", 3: "c"}


def test_dynamic_overwrites_replace_the_partitions_they_name(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, day DATE", partition_by=["day"])
    for number in range(4):
        insert(table, {"id": number, "day": date(2024, 1, 1 + number % 2)})
    given = pa.table({"id": pa.array([10], pa.int64()), "day": [date(2024, 1, 2)]})
    iceberg(book, table).dynamic_partition_overwrite(given)
    check_ids(book, table, 0, 2, 10)
    assert ids(table, "day = '2024-01-02'") == [10]
    check_versions(book, table, with_duckdb=True)


def test_several_snapshots_of_one_transaction_are_several_versions(book: Book) -> None:
    table = numbers(book, "t", [1])
    with iceberg(book, table).transaction() as transaction:
        transaction.append(rows(2))
        transaction.delete("id = 1")
        transaction.append(rows(3, 4))
        transaction.overwrite(rows(5), "id = 3")
    check_ids(book, table, 2, 4, 5)
    check_versions(book, table, with_duckdb=True)
    assert table.version == len(table.history().items) - 1
    versions = [item.version for item in table.snapshots()]
    assert versions == list(range(1, table.version + 1))


def test_a_file_that_one_transaction_adds_and_removes_is_of_one_version(book: Book) -> None:
    table = numbers(book, "t", [1])
    with iceberg(book, table).transaction() as transaction:
        transaction.append(rows(2))
        transaction.delete("id = 2")
    check_ids(book, table, 1)
    check_versions(book, table)
    assert ids(table, version=2) == [1, 2]


def test_files_without_field_ids_are_read_by_name_even_after_a_rename(book: Book) -> None:
    table = numbers(book, "t", [1])
    place = lay(book, "elsewhere/plain.parquet", parquet(rows(7, 8)))
    iceberg(book, table).add_files([book.lake.store.uri(place)])
    check_ids(book, table, 1, 7, 8)
    with table.update_schema() as update:
        update.rename_column("id", "number")
    assert sorted(row["number"] for row in check(book, table, with_duckdb=False)) == [1, 7, 8]
    with iceberg(book, table).update_schema() as change:
        change.rename_column("number", "id")
    check_ids(book, table, 1, 7, 8, with_duckdb=False)


# --- position deletes ----------------------------------------------------------------


def only_file(hand: Hand) -> str:
    (place,) = hand.live()
    return place


def test_position_deletes_hide_rows_for_every_engine(book: Book) -> None:
    table = numbers(book, "t", [1, 2, 3, 4])
    hand = Hand(book, table)
    hand.delete_positions((only_file(hand), 1))
    check_ids(book, table, 1, 3, 4)
    assert table.record.deleted_rows == 1
    insert(table, {"id": 2})
    check_ids(book, table, 1, 2, 3, 4)
    hand.load()
    hand.append(hand.data_file(20, 21))
    check_ids(book, table, 1, 2, 3, 4, 20, 21)
    check_versions(book, table, with_duckdb=True)


def test_deletes_about_a_file_do_not_outlive_it(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1, 2, 3], [4])
    hand = Hand(book, table)
    first = next(place for place, file in hand.live().items() if file.record_count == 3)
    hand.delete_positions((first, 0), about=first)
    check_ids(book, table, 2, 3, 4)
    iceberg(book, table).delete("id <= 3")
    check_ids(book, table, 4)
    clean(book, clock)
    check_ids(book, table, 4)
    insert(table, {"id": 5})
    iceberg(book, table).append(rows(6))
    clean(book, clock)
    check_ids(book, table, 4, 5, 6)


def test_rows_that_were_deleted_by_position_stay_deleted_when_an_engine_rewrites_the_file(book: Book) -> None:
    table = numbers(book, "t", [1, 2, 3, 4])
    hand = Hand(book, table)
    place = only_file(hand)
    hand.delete_positions((place, 0), about=place)
    iceberg(book, table).delete("id = 4")
    check_ids(book, table, 2, 3)


def test_own_deletes_work_on_files_with_position_deletes(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1, 2], [30, 40])
    hand = Hand(book, table)
    for place in sorted(hand.live()):
        hand.delete_positions((place, 0), about=place)
    assert ids(table) == [2, 40]
    table.delete("id < 20")
    check_ids(book, table, 40)
    clean(book, clock)
    check_ids(book, table, 40)


def test_a_removed_file_of_deletes_lets_its_rows_come_back(book: Book) -> None:
    table = numbers(book, "t", [1, 2])
    hand = Hand(book, table)
    place = only_file(hand)
    hand.delete_positions((place, 0), about=place)
    check_ids(book, table, 2)
    ident = new_snapshot_id()
    manifests = []
    for manifest in hand.kept():
        if manifest.content == 0:
            manifests.append(manifest)
            continue
        (entry,) = manifest.fetch_manifest_entry(hand.loaded.io)
        gone = hand.manifest(ident, (DELETED, ident, entry.sequence_number, entry.data_file), content=1, spec_id=0)
        manifests.append(gone)
    hand.commit(*hand.onto_main(hand.snapshot(ident, manifests, operation="delete")))
    check_ids(book, table, 1, 2)


# --- schemas ---------------------------------------------------------------------------


def test_both_sides_change_the_schema_in_turn(book: Book) -> None:
    table = book.tables.create("t", "id INT NOT NULL, name STRING", properties=QUICK)
    insert(table, {"id": 1, "name": "a"})
    theirs = iceberg(book, table)
    with theirs.update_schema() as change:
        change.add_column("size", IntegerType())
    insert(table, {"id": 2, "name": "b", "size": 5})
    with table.update_schema() as update:
        update.rename_column("name", "title")
    theirs = iceberg(book, table)
    with theirs.update_schema() as change:
        change.update_column("id", LongType())
    with table.update_schema() as update:
        update.make_optional("id")
    theirs = iceberg(book, table)
    with theirs.update_schema() as change:
        change.move_first("size")
    theirs.append(
        pa.table(
            {
                "size": pa.array([7], pa.int32()),
                "id": pa.array([2**40], pa.int64()),
                "title": ["c"],
            }
        )
    )
    insert(table, {"id": None, "title": "d", "size": None})
    with table.update_schema() as update:
        update.drop_column("size")
    theirs = iceberg(book, table)
    with theirs.update_schema() as change:
        change.add_column("size", StringType())
    theirs.append(pa.table({"id": pa.array([9], pa.int64()), "title": ["e"], "size": ["big"]}))
    found = {row["title"]: (row["id"], row["size"]) for row in check(book, table)}
    assert found == {"a": (1, None), "b": (2, None), "c": (2**40, None), "d": (None, None), "e": (9, "big")}
    check_versions(book, table)


def test_a_stale_engine_appends_files_of_the_schema_it_knows(book: Book) -> None:
    table = book.tables.create("t", "id INT, name STRING", properties=QUICK)
    insert(table, {"id": 1, "name": "a"})
    stale = iceberg(book, table)
    with table.update_schema() as update:
        update.rename_column("name", "title")
        update.widen_column("id", "BIGINT")
    stale.append(pa.table({"id": pa.array([2], pa.int32()), "name": ["b"]}))
    found = {row["id"]: row["title"] for row in check(book, table)}
    assert found == {1: "a", 2: "b"}
    assert ids(table, "id = 2") == [2]


def test_a_schema_of_this_book_after_two_of_an_engine_in_one_commit_is_seen_by_all(book: Book) -> None:
    table = numbers(book, "t", [1])
    with iceberg(book, table).transaction() as transaction:
        with transaction.update_schema() as change:
            change.add_column("one", IntegerType())
        with transaction.update_schema() as change:
            change.add_column("two", IntegerType())
    with table.update_schema() as update:
        update.add_column("three", "INT")
    insert(table, {"id": 2, "one": 1, "two": 2, "three": 3})
    assert {"id": 2, "one": 1, "two": 2, "three": 3} in check(book, table)
    with iceberg(book, table).update_schema() as change:
        change.delete_column("one")
    with table.update_schema() as update:
        update.add_column("four", "INT")
    insert(table, {"id": 3, "four": 4})
    assert {"id": 3, "two": None, "three": None, "four": 4} in check(book, table)


def test_an_engine_goes_back_to_an_earlier_schema(book: Book) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    before = hand.metadata.current_schema_id
    with table.update_schema() as update:
        update.add_column("more", "INT")
    insert(table, {"id": 2, "more": 5})
    hand.load()
    hand.commit(made(SetCurrentSchemaUpdate, schema_id=before))
    check_ids(book, table, 1, 2)
    assert [field.name for field in table.schema.fields] == ["id"]
    with table.update_schema() as update:
        update.add_column("other", "STRING")
    insert(table, {"id": 3, "other": "x"})
    assert {row["id"]: row["other"] for row in check(book, table)} == {1: None, 2: None, 3: "x"}


def test_an_append_and_a_schema_of_one_transaction_are_one_commit(book: Book) -> None:
    table = numbers(book, "t", [1])
    with iceberg(book, table).transaction() as transaction:
        with transaction.update_schema() as change:
            change.add_column("name", StringType())
        transaction.append(pa.table({"id": pa.array([2], pa.int64()), "name": ["b"]}))
    assert operations(table)[-2:] == ["schema", "append"]
    assert {row["id"]: row["name"] for row in check(book, table)} == {1: None, 2: "b"}
    check_versions(book, table)


def test_a_column_with_a_default_is_the_same_for_all_or_refused(book: Book) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    fields = [*hand.metadata.schema().fields, NestedField(2, "kind", StringType(), initial_default="old")]
    built = Schema(*fields, schema_id=hand.metadata.current_schema_id + 1)
    with refused(book):
        hand.commit(made(AddSchemaUpdate, schema_=built), made(SetCurrentSchemaUpdate, schema_id=-1))
    check_ids(book, table, 1)


# --- partition specs and sort orders -----------------------------------------------------


def test_both_sides_write_after_a_change_of_the_partition_spec(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, day DATE", partition_by=["day"], properties=QUICK)
    insert(table, {"id": 1, "day": date(2024, 1, 1)}, {"id": 2, "day": date(2024, 1, 2)})
    theirs = iceberg(book, table)
    with theirs.update_spec() as change:
        change.add_field("id", BucketTransform(2), "bucket")
    insert(table, {"id": 3, "day": date(2024, 1, 1)}, {"id": 4, "day": date(2024, 1, 2)})
    theirs = iceberg(book, table)
    theirs.append(pa.table({"id": pa.array([5, 6], pa.int64()), "day": [date(2024, 1, 1), None]}))
    check_ids(book, table, 1, 2, 3, 4, 5, 6)
    with iceberg(book, table).update_spec() as change:
        change.remove_field("day")
    insert(table, {"id": 7, "day": date(2024, 1, 1)})
    iceberg(book, table).append(pa.table({"id": pa.array([8], pa.int64()), "day": [date(2024, 1, 2)]}))
    check_ids(book, table, 1, 2, 3, 4, 5, 6, 7, 8)
    for number in range(1, 9):
        assert ids(table, f"id = {number}") == [number]
    assert ids(table, "day = '2024-01-01'") == [1, 3, 5, 7]
    assert {row["spec_id"] for row in files_of(book, table)} == {0, 1, 2}
    table.delete("day = '2024-01-02' AND id = 2")
    check_ids(book, table, 1, 3, 4, 5, 6, 7, 8)
    iceberg(book, table).overwrite(pa.table({"id": pa.array([50], pa.int64()), "day": [date(2024, 1, 1)]}), "id = 5")
    check_ids(book, table, 1, 3, 4, 50, 6, 7, 8)
    check_versions(book, table)


def test_a_partition_column_that_is_dropped_stays_readable(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, kind STRING", partition_by=["kind"], properties=QUICK)
    insert(table, {"id": 1, "kind": "a"}, {"id": 2, "kind": "b"})
    theirs = iceberg(book, table)
    with theirs.transaction() as transaction, transaction.update_spec() as change:
        change.remove_field("kind")
    with table.update_schema() as update:
        update.drop_column("kind")
    insert(table, {"id": 3})
    iceberg(book, table).append(rows(4))
    settle(book)
    table.delete("id = 1")
    assert sorted(row["id"] for row in table.to_arrow().to_pylist()) == [2, 3, 4]
    check_ids(book, table, 2, 3, 4, with_duckdb=False)


def test_a_sort_order_is_followed_by_this_book(book: Book) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    order = SortOrder(SortField(1, IdentityTransform(), SortDirection.DESC), order_id=1)
    hand.commit(made(AddSortOrderUpdate, sort_order=order), made(SetDefaultSortOrderUpdate, sort_order_id=-1))
    assert len(table.describe().sort_by) == 1
    assert operations(table)[-1] == "schema"
    insert(table, {"id": 5}, {"id": 7}, {"id": 6})
    assert table.to_arrow("id > 4").column("id").to_pylist() == [7, 6, 5]
    iceberg(book, table).append(rows(8))
    check_ids(book, table, 1, 5, 6, 7, 8)
    assert iceberg(book, table).sort_order().order_id == 1


# --- properties ------------------------------------------------------------------------


def test_properties_follow_into_the_registry_and_back(book: Book) -> None:
    table = numbers(book, "t", [1], properties={"user.kept": "1"})
    version = table.version
    theirs = iceberg(book, table)
    with theirs.transaction() as transaction:
        transaction.set_properties({"user.team": "sales", "user.kept": "2"})
    assert table.metadata.properties == {"user.kept": "2", "user.team": "sales"}
    table.set_properties(**{"user.team": None, "user.own": "x"})
    theirs = iceberg(book, table)
    assert {key: value for key, value in theirs.properties.items() if key.startswith("user.")} == {
        "user.kept": "2",
        "user.own": "x",
    }
    with theirs.transaction() as transaction:
        transaction.remove_properties("user.kept", "user.own")
    assert dict(table.metadata.properties) == {}
    assert table.version == version
    check_ids(book, table, 1)


def test_what_is_removed_that_is_not_there_is_no_error(book: Book) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    hand.commit(made(RemovePropertiesUpdate, removals=["never.there"]), requirements=())
    check_ids(book, table, 1)


def test_garbage_collection_stays_off_unless_it_is_turned_on(book: Book) -> None:
    table = numbers(book, "t", [1])
    theirs = iceberg(book, table)
    assert theirs.properties["gc.enabled"] == "false"
    with theirs.transaction() as transaction:
        transaction.remove_properties("gc.enabled")
    assert iceberg(book, table).properties["gc.enabled"] == "false"
    with iceberg(book, table).transaction() as transaction:
        transaction.set_properties({"gc.enabled": "true"})
    insert(table, {"id": 2})
    assert iceberg(book, table).properties["gc.enabled"] == "true"
    assert any("gc.enabled" in text for text in book.verify().unfinished)
    check_ids(book, table, 1, 2)


@pytest.mark.parametrize(
    "given",
    [
        {"lakebook.history.seconds": "never"},
        {"lakebook.history.versions": "0"},
        {"user.long": "x" * 5000},
        {"user.nul": "a\0b"},
        {"": "x"},
        {"format-version": "3"},
        {"format-version": "1"},
        {"write.format.default": "orc"},
        {"write.format.default": "AVRO"},
    ],
)
def test_properties_that_cannot_be_are_refused(book: Book, given: dict[str, str]) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    with refused(book, LakebookError):
        hand.commit(made(SetPropertiesUpdate, updates=given), requirements=())
    check_ids(book, table, 1)


# --- tags and branches -------------------------------------------------------------------


def test_a_tag_keeps_its_rows_through_every_cleaning(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1, 2])
    theirs = iceberg(book, table)
    tagged = theirs.current_snapshot().snapshot_id
    theirs.manage_snapshots().create_tag(tagged, "kept").commit()
    table.delete("true")
    insert(table, {"id": 3})
    iceberg(book, table).append(rows(4))
    clean(book, clock)
    check_ids(book, table, 3, 4)
    found = iceberg(book, table).scan().use_ref("kept").to_arrow()
    assert sorted(found["id"].to_pylist()) == [1, 2]
    assert of_duckdb(table.metadata_location or "", tagged) == in_order([{"id": 1}, {"id": 2}])
    iceberg(book, table).manage_snapshots().remove_tag("kept").commit()
    before = len(objects(book))
    clean(book, clock)
    assert len(objects(book)) < before
    assert len([row for row in files_of(book, table) if row["to_version"] is not None]) == 0
    check_ids(book, table, 3, 4)


def test_a_branch_makes_no_version_and_keeps_its_files(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1])
    theirs = iceberg(book, table)
    theirs.manage_snapshots().create_branch(theirs.current_snapshot().snapshot_id, "work").commit()
    version = table.version
    theirs = iceberg(book, table)
    theirs.append(rows(2), branch="work")
    theirs.append(rows(3), branch="work")
    assert table.version == version
    check_ids(book, table, 1)
    table.delete("true")
    insert(table, {"id": 9})
    clean(book, clock)
    check_ids(book, table, 9)
    assert sorted(iceberg(book, table).scan().use_ref("work").to_arrow()["id"].to_pylist()) == [1, 2, 3]


def test_a_fast_forward_brings_a_branch_to_main(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    hand.commit(to_ref(hand.metadata.current_snapshot_id or 0, "work"), requirements=())
    hand.load().append(rows(2, 3), branch="work")
    hand.load()
    tip = hand.metadata.refs["work"].snapshot_id
    hand.commit(to_ref(tip))
    check_ids(book, table, 1, 2, 3)
    assert iceberg(book, table).current_snapshot().snapshot_id == tip
    insert(table, {"id": 4})
    iceberg(book, table).append(rows(5))
    check_ids(book, table, 1, 2, 3, 4, 5)
    clean(book, clock)
    check_ids(book, table, 1, 2, 3, 4, 5)
    assert sorted(iceberg(book, table).scan().use_ref("work").to_arrow()["id"].to_pylist()) == [1, 2, 3]


def test_a_branch_that_main_was_forwarded_to_keeps_its_files_when_main_goes_on(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    hand.commit(to_ref(hand.metadata.current_snapshot_id or 0, "work"), requirements=())
    hand.load().append(rows(2, 3), branch="work")
    hand.load()
    hand.commit(to_ref(hand.metadata.refs["work"].snapshot_id))
    table.delete("true")
    insert(table, {"id": 9})
    clean(book, clock)
    check_ids(book, table, 9)
    assert sorted(iceberg(book, table).scan().use_ref("work").to_arrow()["id"].to_pylist()) == [1, 2, 3]


def test_a_tag_on_a_snapshot_that_was_staged_and_taken_keeps_its_files(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    ident = new_snapshot_id()
    staged = hand.snapshot(ident, [*hand.kept(), hand.added(ident, hand.data_file(2))])
    hand.commit(made(AddSnapshotUpdate, snapshot=staged), requirements=())
    check_ids(book, table, 1)
    hand.commit(to_ref(ident), to_ref(ident, "kept", "tag"))
    check_ids(book, table, 1, 2)
    table.delete("true")
    insert(table, {"id": 9})
    clean(book, clock)
    check_ids(book, table, 9)
    assert sorted(iceberg(book, table).scan().use_ref("kept").to_arrow()["id"].to_pylist()) == [1, 2]


def test_a_staged_snapshot_is_pinned_and_then_taken(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    ident = new_snapshot_id()
    staged = hand.snapshot(ident, [*hand.kept(), hand.added(ident, hand.data_file(2))])
    version = table.version
    hand.commit(made(AddSnapshotUpdate, snapshot=staged), requirements=())
    assert table.version == version
    assert [row["file_size"] > 0 for row in records(book, schema.branch_files)] == [True]
    clean(book, clock)
    check_ids(book, table, 1)
    hand.load()
    hand.commit(to_ref(ident))
    assert table.version == version + 1
    assert records(book, schema.branch_files) == []
    check_ids(book, table, 1, 2)
    insert(table, {"id": 3})
    check_ids(book, table, 1, 2, 3)


def test_a_branch_that_is_removed_lets_its_files_go(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1])
    theirs = iceberg(book, table)
    theirs.manage_snapshots().create_branch(theirs.current_snapshot().snapshot_id, "work").commit()
    iceberg(book, table).append(rows(2), branch="work")
    hand = Hand(book, table)
    let_go(book, clock)
    tip = hand.metadata.refs["work"].snapshot_id
    (own,) = [row["file_path"] for row in records(book, schema.branch_files)]
    hand.commit(made(RemoveSnapshotRefUpdate, ref_name="work"), made(RemoveSnapshotsUpdate, snapshot_ids=[tip]))
    assert records(book, schema.branch_files) == []
    (waiting,) = records(book, schema.temporary_files, file_path=own)
    assert waiting["state"] == "waiting"
    assert book.lake.store.size(own) is not None
    clean(book, clock)
    assert book.lake.store.size(own) is None
    check_ids(book, table, 1)


def test_the_files_of_a_branch_whose_name_is_removed_go_with_history(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1])
    theirs = iceberg(book, table)
    theirs.manage_snapshots().create_branch(theirs.current_snapshot().snapshot_id, "work").commit()
    iceberg(book, table).append(rows(2), branch="work")
    iceberg(book, table).manage_snapshots().remove_branch("work").commit()
    (own,) = [row["file_path"] for row in records(book, schema.branch_files)]
    insert(table, {"id": 3})
    clean(book, clock)
    check_ids(book, table, 1, 3)
    assert book.lake.store.size(own) is None


def test_a_branch_may_delete_what_main_keeps(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1, 2], [3])
    theirs = iceberg(book, table)
    theirs.manage_snapshots().create_branch(theirs.current_snapshot().snapshot_id, "work").commit()
    theirs = iceberg(book, table)
    theirs.delete("id = 1", branch="work")
    check_ids(book, table, 1, 2, 3)
    assert sorted(iceberg(book, table).scan().use_ref("work").to_arrow()["id"].to_pylist()) == [2, 3]
    hand = Hand(book, table)
    hand.commit(to_ref(hand.metadata.refs["work"].snapshot_id))
    check_ids(book, table, 2, 3)
    clean(book, clock)
    check_ids(book, table, 2, 3)


def test_a_branch_that_was_left_behind_can_still_replace_main(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1])
    theirs = iceberg(book, table)
    theirs.manage_snapshots().create_branch(theirs.current_snapshot().snapshot_id, "work").commit()
    iceberg(book, table).append(rows(2), branch="work")
    insert(table, {"id": 3})
    clean(book, clock)
    hand = Hand(book, table)
    hand.commit(to_ref(hand.metadata.refs["work"].snapshot_id))
    check_ids(book, table, 1, 2)
    clean(book, clock)
    check_ids(book, table, 1, 2)


# --- rollbacks and replacements --------------------------------------------------------------


def test_a_rollback_is_a_version_and_can_be_undone(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    first = hand.metadata.current_snapshot_id
    assert first is not None
    hand.loaded.append(rows(2))
    hand.load().delete("id = 1")
    last = hand.load().metadata.current_snapshot_id
    assert last is not None
    for _ in range(2):
        hand.commit(to_ref(first))
        check_ids(book, table, 1)
        hand.commit(to_ref(last))
        check_ids(book, table, 2)
    hand.commit(to_ref(first))
    insert(table, {"id": 3})
    check_ids(book, table, 1, 3)
    iceberg(book, table).append(rows(4))
    check_ids(book, table, 1, 3, 4)
    assert [ids(table, version=version) for version in range(1, table.version + 1)] == [
        [1], [1, 2], [2], [1], [2], [1], [2], [1], [1, 3], [1, 3, 4],
    ]  # fmt: skip
    clean(book, clock)
    check_ids(book, table, 1, 3, 4)
    assert all(row["to_version"] is None for row in files_of(book, table))


def test_a_rollback_with_the_library_is_a_version(book: Book) -> None:
    table = numbers(book, "t", [1])
    theirs = iceberg(book, table)
    first = theirs.current_snapshot().snapshot_id
    theirs.append(rows(2))
    theirs.append(rows(3))
    theirs.manage_snapshots().rollback_to_snapshot(first).commit()
    check_ids(book, table, 1)
    newest = table.history()[0]
    assert (newest.removed_files, newest.removed_rows, newest.added_files) == (2, 2, 0)


def test_a_rollback_while_versions_are_pending_is_a_conflict(book: Book) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    first = hand.metadata.current_snapshot_id
    assert first is not None
    hand.loaded.append(rows(2))
    hand.load()
    insert(table, {"id": 3})
    with pytest.raises(CommitFailedException):
        hand.commit(to_ref(first))
    check_ids(book, table, 1, 2, 3)
    hand.load()
    hand.commit(to_ref(first))
    check_ids(book, table, 1)


def test_files_that_wait_for_their_removal_come_back_with_a_snapshot_that_lists_them(
    book: Book, clock: ManualClock
) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    (old,) = hand.live().values()
    first = hand.metadata.current_snapshot_id
    table.delete("true")
    insert(table, {"id": 2})
    hand.load()
    clock.advance(2 * DAY)
    book.cleaner.expire(seconds=0, versions=1, wait=True)
    assert hand.load().metadata.snapshot_by_id(first or 0) is None
    assert [row["state"] for row in records(book, schema.temporary_files, file_path=hand.path(old.file_path))] == [
        "waiting"
    ]
    ident = new_snapshot_id()
    manifest = hand.manifest(ident, (EXISTING, first, 1, old), spec_id=0)
    restored = hand.snapshot(ident, [manifest], operation="overwrite", parent=None)
    hand.commit(made(RemoveSnapshotRefUpdate, ref_name="main"), *hand.onto_main(restored))
    check_ids(book, table, 1)
    clock.advance(2 * DAY)
    book.cleaner.delete_expired_temporary_files()
    check_ids(book, table, 1)
    assert ids(table) == [1]


def test_files_that_are_being_deleted_do_not_come_back(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    (old,) = hand.live().values()
    first = hand.metadata.current_snapshot_id
    table.delete("true")
    insert(table, {"id": 2})
    hand.load()
    clock.advance(2 * DAY)
    book.cleaner.expire(seconds=0, versions=1, wait=True)
    clock.advance(2 * DAY)

    def stop() -> None:
        raise KeyboardInterrupt

    with failpoints.armed("clean.marked", stop), pytest.raises(KeyboardInterrupt):
        book.cleaner.delete_expired_temporary_files()
    assert [row["state"] for row in records(book, schema.temporary_files, file_path=hand.path(old.file_path))] == [
        "deleting"
    ]
    hand.load()
    ident = new_snapshot_id()
    manifest = hand.manifest(ident, (EXISTING, first, 1, old), spec_id=0)
    restored = hand.snapshot(ident, [manifest], operation="overwrite", parent=None)
    with refused(book, CommitFailedException):
        hand.commit(made(RemoveSnapshotRefUpdate, ref_name="main"), *hand.onto_main(restored))
    staged = hand.snapshot(ident, [hand.added(ident, old)])
    with refused(book):
        hand.commit(made(AddSnapshotUpdate, snapshot=staged), requirements=())
    book.cleaner.delete_expired_temporary_files()
    clean(book, clock)  # Of what the engine left, too.
    check_ids(book, table, 2)


def test_a_table_is_replaced_by_another_schema_and_other_rows(book: Book) -> None:
    table = numbers(book, "t", [1], [2])
    hand = Hand(book, table)
    fields = Schema(NestedField(2, "word", StringType()), schema_id=hand.metadata.current_schema_id + 1)
    words = pa.table(
        {"word": ["a", "b"]}, schema=pa.schema([pa.field("word", pa.string(), metadata={"PARQUET:field_id": "2"})])
    )
    ident = new_snapshot_id()
    file = hand.data_file(arrow=words)
    built = hand.snapshot(ident, [hand.added(ident, file)], parent=None, schema_id=fields.schema_id)
    hand.commit(
        made(RemoveSnapshotRefUpdate, ref_name="main"),
        made(AddSchemaUpdate, schema_=fields),
        made(SetCurrentSchemaUpdate, schema_id=-1),
        *hand.onto_main(built),
        requirements=(made(AssertTableUUID, uuid=hand.metadata.table_uuid),),
    )
    assert sorted(row["word"] for row in check(book, table)) == ["a", "b"]
    assert ids(table, version=2) == [1, 2]
    insert(table, {"word": "c"})
    assert sorted(row["word"] for row in check(book, table)) == ["a", "b", "c"]
    check_versions(book, table)


def test_main_without_a_snapshot_is_an_empty_table(book: Book) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    first = hand.metadata.current_snapshot_id
    assert first is not None
    hand.commit(made(RemoveSnapshotRefUpdate, ref_name="main"))
    check_ids(book, table, with_duckdb=False)
    insert(table, {"id": 2})
    check_ids(book, table, 2)
    hand.load()
    hand.commit(to_ref(first))
    check_ids(book, table, 1)


# --- what is pending ----------------------------------------------------------------------------


def test_an_append_is_moved_behind_pending_appends(book: Book) -> None:
    table = numbers(book, "t", [1], properties=QUICK)
    hand = Hand(book, table)
    insert(table, {"id": 2}, {"id": 3})
    insert(table, {"id": 4})
    ident = new_snapshot_id()
    file = hand.data_file(10, 11)
    built = hand.snapshot(
        ident,
        [*hand.kept(), hand.added(ident, file)],
        summary={"operation": "append", "added-data-files": "1", "added-records": "2", "total-records": "3"},
    )
    hand.commit(*hand.onto_main(built))
    head = hand.head
    assert head is not None
    pending = table.snapshots()[-2]
    assert head.snapshot_id == ident
    assert (head.parent_snapshot_id, head.sequence_number) == (pending.snapshot_id, pending.sequence_number + 1)
    assert head.summary is not None
    numbers_of = head.summary.additional_properties
    assert (numbers_of["total-records"], numbers_of["total-data-files"]) == ("6", "4")
    check_ids(book, table, 1, 2, 3, 4, 10, 11)
    check_versions(book, table, with_duckdb=True)
    insert(table, {"id": 20})
    check_ids(book, table, 1, 2, 3, 4, 10, 11, 20)


def test_an_append_with_existing_files_in_its_manifest_is_moved_with_its_own_alone(book: Book) -> None:
    table = numbers(book, "t", [1], properties=QUICK)
    hand = Hand(book, table)
    (old,) = hand.live().values()
    first = hand.metadata.current_snapshot_id
    insert(table, {"id": 2})
    ident = new_snapshot_id()
    manifest = hand.manifest(ident, (EXISTING, first, 1, old), (ADDED, ident, None, hand.data_file(10)))
    hand.commit(*hand.onto_main(hand.snapshot(ident, [manifest])))
    check_ids(book, table, 1, 2, 10)


def test_the_first_append_of_an_engine_is_moved_behind_the_first_of_this_book(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT", properties=QUICK)
    theirs = iceberg(book, table)
    insert(table, {"id": 1})
    theirs.append(rows(2))
    check_ids(book, table, 1, 2)
    check_versions(book, table)


def test_an_append_waits_for_no_schema_change(book: Book) -> None:
    table = numbers(book, "t", [1], properties=QUICK)
    theirs = iceberg(book, table)
    with table.update_schema() as update:
        update.add_column("more", "INT")
    insert(table, {"id": 2, "more": 1})
    theirs.append(rows(3))
    assert {row["id"]: row["more"] for row in check(book, table)} == {1: None, 2: 1, 3: None}


def without_retries(table: Table) -> None:
    table.set_properties(**{"commit.retry.num-retries": "0"})


@pytest.mark.parametrize("change", ["delete", "overwrite"])
def test_anything_else_than_an_append_conflicts_with_what_is_pending(
    book: Book, clock: ManualClock, change: str
) -> None:
    table = numbers(book, "t", [1], [2], properties=QUICK)
    without_retries(table)
    theirs = iceberg(book, table)
    insert(table, {"id": 3})
    with pytest.raises(CommitFailedException):
        theirs.delete("id = 1") if change == "delete" else theirs.overwrite(rows(7), "id = 1")
    (row,) = records(book, schema.tables, id=table.id)
    assert clock.now_ms() < row["hold_until"] <= clock.now_ms() + HOLD * 1000
    check_ids(book, table, 1, 2, 3)
    begun = clock.now_ms()
    insert(table, {"id": 4})  # It waits, and comes.
    assert HOLD * 1000 <= clock.now_ms() - begun <= HOLD * 1000 + 1000
    check_ids(book, table, 1, 2, 3, 4)
    table.set_properties(**{"commit.retry.num-retries": None})
    theirs = iceberg(book, table)
    theirs.delete("id = 1")
    check_ids(book, table, 2, 3, 4)


def test_the_retry_of_the_library_succeeds(book: Book) -> None:
    table = numbers(book, "t", [1], [2], properties=QUICK)
    theirs = iceberg(book, table)
    insert(table, {"id": 3})
    theirs.delete("id = 1")
    check_ids(book, table, 2, 3)
    theirs = iceberg(book, table)
    insert(table, {"id": 4})
    theirs.overwrite(rows(20), "id = 2")
    check_ids(book, table, 20, 3, 4)


def test_an_append_conflicts_with_a_pending_delete_and_then_succeeds(book: Book) -> None:
    table = numbers(book, "t", [1], [2], properties=QUICK)
    theirs = iceberg(book, table)
    table.delete("id = 1")
    theirs.append(rows(3))
    check_ids(book, table, 2, 3)


def test_conflicts_cannot_starve_the_inserts_of_this_book(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1], properties=QUICK)
    without_retries(table)
    begun, waited = clock.now_ms(), 0
    for number in range(2, 12):
        theirs = iceberg(book, table)
        before = clock.now_ms()
        insert(table, {"id": number})
        waited += clock.now_ms() - before
        with pytest.raises(CommitFailedException):
            theirs.delete("id = 1")
        clock.advance(1)
    assert waited <= (clock.now_ms() - begun) * 0.6
    check_ids(book, table, *range(1, 12))


def test_a_commit_that_succeeds_ends_the_hold(book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1], [2], properties=QUICK)
    theirs = iceberg(book, table)
    insert(table, {"id": 3})
    theirs.delete("id = 1")
    begun = clock.now_ms()
    insert(table, {"id": 4})
    assert clock.now_ms() - begun < HOLD * 1000
    check_ids(book, table, 2, 3, 4)


def test_the_head_of_another_engine_is_never_gone_over(book: Book) -> None:
    table = numbers(book, "t", [1], properties=QUICK)
    without_retries(table)
    one, other = iceberg(book, table), iceberg(book, table)
    one.append(rows(2))
    with pytest.raises(CommitFailedException):
        other.append(rows(3))
    check_ids(book, table, 1, 2)
    insert(table, {"id": 4})
    with pytest.raises(CommitFailedException):
        other.append(rows(3))
    check_ids(book, table, 1, 2, 4)


def test_an_engine_cannot_pass_its_snapshots_off_as_those_of_this_book(book: Book) -> None:
    table = numbers(book, "t", [1], properties=QUICK)
    without_retries(table)
    one, other = iceberg(book, table), iceberg(book, table)
    one.append(rows(2), snapshot_properties={"lakebook.versions": "2"})
    with pytest.raises(CommitFailedException):
        other.append(rows(3))
    check_ids(book, table, 1, 2)


def test_what_an_engine_knows_of_a_dropped_table_does_not_reach_its_successor(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT", properties=QUICK)
    without_retries(table)
    stale = iceberg(book, table)
    book.tables.drop("t")
    other = numbers(book, "t", [1], properties=QUICK)
    without_retries(other)
    with pytest.raises(Exception) as caught:
        stale.append(rows(666))
    check_ids(book, other, 1)
    assert isinstance(caught.value, CommitFailedException)


def test_requirements_after_that_of_the_head_count_for_a_moved_append_too(book: Book) -> None:
    table = numbers(book, "t", [1], properties=QUICK)
    hand = Hand(book, table)
    head = hand.requirements()[0]
    insert(table, {"id": 2})
    ident = new_snapshot_id()
    built = hand.onto_main(hand.snapshot(ident, [*hand.kept(), hand.added(ident, hand.data_file(3))]))
    with pytest.raises(CommitFailedException):
        hand.commit(*built, requirements=(head, made(AssertCurrentSchemaId, current_schema_id=99)))
    with pytest.raises(CommitFailedException):
        hand.commit(*built, requirements=(head, made(AssertRefSnapshotId, ref="other", snapshot_id=5)))
    check_ids(book, table, 1, 2)


@pytest.mark.parametrize(
    "requirement",
    [
        made(AssertTableUUID, uuid="11111111-1111-1111-1111-111111111111"),
        made(AssertRefSnapshotId, ref="main", snapshot_id=5),
        made(AssertRefSnapshotId, ref="main", snapshot_id=None),
        made(AssertRefSnapshotId, ref="nobody", snapshot_id=5),
        made(AssertCurrentSchemaId, current_schema_id=7),
        made(AssertLastAssignedFieldId, last_assigned_field_id=7),
        made(AssertLastAssignedPartitionId, last_assigned_partition_id=7),
        made(AssertDefaultSpecId, default_spec_id=7),
        made(AssertDefaultSortOrderId, default_sort_order_id=7),
    ],
)
def test_each_requirement_that_fails_is_a_conflict(book: Book, requirement: Any) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    hand.loaded.append(rows(2))
    hand.load()
    ident = new_snapshot_id()
    built = hand.onto_main(hand.snapshot(ident, [*hand.kept(), hand.added(ident, hand.data_file(3))]))
    with refused(book, CommitFailedException):
        hand.commit(*built, requirements=(requirement,))
    with refused(book, CommitFailedException):
        hand.commit(made(SetPropertiesUpdate, updates={"a": "b"}), requirements=(requirement,))
    check_ids(book, table, 1, 2)


def test_properties_and_tags_need_no_agreement_about_the_head(book: Book) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    first = hand.metadata.current_snapshot_id
    assert first is not None
    insert(table, {"id": 2})
    hand.commit(made(SetPropertiesUpdate, updates={"a": "b"}), requirements=hand.requirements()[1:])
    insert(table, {"id": 3})
    hand.commit(to_ref(first, "old", "tag"), requirements=hand.requirements("old"))
    assert iceberg(book, table).scan().use_ref("old").to_arrow()["id"].to_pylist() == [1]
    check_ids(book, table, 1, 2, 3)


def test_properties_that_ask_for_a_head_that_is_gone_are_a_conflict(book: Book) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    insert(table, {"id": 2})
    with pytest.raises(CommitFailedException):
        hand.commit(made(SetPropertiesUpdate, updates={"a": "b"}))
    check_ids(book, table, 1, 2)


def once(action: Any) -> Any:
    """An action that is taken the first time only."""
    left = [action]

    def act() -> None:
        if left:
            left.pop()()

    return act


@pytest.mark.parametrize("point", ["publish.reserved", "outside.metadata_written"])
@pytest.mark.parametrize("change", ["append", "delete"])
def test_an_insert_that_comes_while_a_commit_is_prepared_is_at_most_a_conflict(
    book: Book, point: str, change: str
) -> None:
    table = numbers(book, "t", [1], [2], properties=QUICK)
    theirs = iceberg(book, table)
    with failpoints.armed(point, once(lambda: insert(table, {"id": 3}))):
        theirs.append(rows(4)) if change == "append" else theirs.delete("id = 1")
    check_ids(book, table, *([1, 2, 3, 4] if change == "append" else [2, 3]))
    check_versions(book, table)


def test_a_delete_that_comes_while_a_commit_is_prepared_is_at_most_a_conflict(book: Book) -> None:
    table = numbers(book, "t", [1], [2], properties=QUICK)
    theirs = iceberg(book, table)
    with failpoints.armed("publish.reserved", once(lambda: table.delete("id = 1"))):
        theirs.append(rows(4))
    check_ids(book, table, 2, 4)


def test_a_table_that_is_renamed_after_a_commit_does_not_make_it_fail(book: Book) -> None:
    table = numbers(book, "t", [1], properties=QUICK)
    theirs = iceberg(book, table)
    with failpoints.armed("outside.committed", once(lambda: book.tables.rename("t", "other"))):
        theirs.append(rows(2))
    check_ids(book, book.table("other"), 1, 2)


def test_a_footer_that_cannot_be_taken_does_not_make_a_commit_fail(book: Book) -> None:
    table = numbers(book, "t", [1], properties=QUICK)
    theirs = iceberg(book, table)

    def fail() -> None:
        raise RuntimeError("the disk is on fire")

    with failpoints.armed("debt.taken", fail):
        theirs.append(rows(2))
        settle(book)
    assert len(records(book, schema.footer_debts)) == 1
    assert sorted(ids(table)) == [1, 2]
    book.settle_debts()
    assert records(book, schema.footer_debts) == []
    check_ids(book, table, 1, 2)


def test_a_commit_on_a_dropped_table_changes_nothing(book: Book) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    ident = new_snapshot_id()
    built = hand.onto_main(hand.snapshot(ident, [*hand.kept(), hand.added(ident, hand.data_file(3))]))
    book.tables.drop("t")
    with nothing_changes(book), pytest.raises(Exception, match="t") as caught:
        hand.catalog.commit(hand.name, hand.requirements(), built)
    assert type(caught.value).__name__ in ("NoSuchTableError", "CommitFailedException", "TableNotFound")
    assert book.verify().findings == ()


# --- removing snapshots ---------------------------------------------------------------------------


def with_history(book: Book) -> tuple[Table, Hand, list[int]]:
    """A table of three snapshots, each of other rows."""
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    hand.loaded.overwrite(rows(2))
    hand.load().overwrite(rows(3))
    hand.load()
    found = [item.snapshot_id for item in hand.metadata.snapshots]
    return table, hand, found


def test_snapshots_that_nobody_needs_can_be_removed(book: Book, clock: ManualClock) -> None:
    table, hand, found = with_history(book)
    let_go(book, clock)
    gone = found[:-1]
    lists = [row.manifest_list for row in table.snapshots() if row.snapshot_id in gone]
    hand.commit(made(RemoveSnapshotsUpdate, snapshot_ids=gone), requirements=())
    assert [item.snapshot_id for item in table.snapshots()] == found[-1:]
    waiting = {row["file_path"]: row for row in records(book, schema.temporary_files)}
    for path in lists:
        assert waiting[path]["expiration"] >= clock.now_ms() + GRACE * 1000
        assert book.lake.store.size(path) is not None
    check_ids(book, table, 3)
    assert ids(table, version=1) == [1]
    clean(book, clock)
    check_ids(book, table, 3)
    assert len(files_of(book, table)) == 1
    assert all(book.lake.store.size(path) is None for path in lists)


def test_a_snapshot_that_a_lease_needs_is_not_removed(book: Book, clock: ManualClock) -> None:
    table, hand, found = with_history(book)
    let_go(book, clock)
    with table.pin(version=1) as pinned:
        with refused(book, CommitFailedException):
            hand.commit(made(RemoveSnapshotsUpdate, snapshot_ids=found[:1]), requirements=())
        assert pinned.to_arrow()["id"].to_pylist() == [1]
    hand.commit(made(RemoveSnapshotsUpdate, snapshot_ids=found[:1]), requirements=())
    check_ids(book, table, 3)


@pytest.mark.parametrize("kind", ["tag", "branch", "main"])
def test_a_snapshot_that_is_named_is_not_removed(book: Book, clock: ManualClock, kind: str) -> None:
    table, hand, found = with_history(book)
    let_go(book, clock)
    if kind != "main":
        hand.commit(to_ref(found[0], "kept", kind), requirements=())
    gone = found[-1:] if kind == "main" else found[:1]
    with refused(book, CommitFailedException):
        hand.commit(made(RemoveSnapshotsUpdate, snapshot_ids=gone), requirements=())
    check_ids(book, table, 3)


def test_a_snapshot_that_the_same_commit_names_is_not_removed(book: Book, clock: ManualClock) -> None:
    table, hand, found = with_history(book)
    let_go(book, clock)
    with refused(book):
        hand.commit(
            to_ref(found[0], "kept", "tag"), made(RemoveSnapshotsUpdate, snapshot_ids=found[:1]), requirements=()
        )
    with refused(book):
        hand.commit(made(RemoveSnapshotsUpdate, snapshot_ids=[12345]), requirements=())
    check_ids(book, table, 3)


# --- several tables ---------------------------------------------------------------------------------


def append_of(hand: Hand, value: int) -> tuple[Any, Any, Any]:
    ident = new_snapshot_id()
    built = hand.snapshot(ident, [*hand.kept(), hand.added(ident, hand.data_file(value))])
    return hand.name, hand.requirements(), hand.onto_main(built)


def test_several_tables_change_together(book: Book) -> None:
    one, two = numbers(book, "one", [1]), numbers(book, "two", [2])
    book.catalog().commit_all([append_of(Hand(book, one), 10), append_of(Hand(book, two), 20)])
    check_ids(book, one, 1, 10)
    check_ids(book, two, 2, 20)


def test_several_tables_change_together_behind_what_is_pending(book: Book) -> None:
    one, two = numbers(book, "one", [1]), numbers(book, "two", [2])
    changes = [append_of(Hand(book, one), 10), append_of(Hand(book, two), 20)]
    insert(two, {"id": 3})
    book.catalog().commit_all(changes)
    check_ids(book, one, 1, 10)
    check_ids(book, two, 2, 3, 20)


def test_of_several_tables_none_changes_where_one_conflicts(book: Book) -> None:
    one, two = numbers(book, "one", [1]), numbers(book, "two", [2])
    changes = [append_of(Hand(book, one), 10), append_of(Hand(book, two), 20)]
    iceberg(book, two).append(rows(3))
    with refused(book, CommitFailedException):
        book.catalog().commit_all(changes)
    check_ids(book, one, 1)
    check_ids(book, two, 2, 3)


def test_of_several_tables_none_changes_where_one_is_refused(book: Book) -> None:
    one, two = numbers(book, "one", [1]), numbers(book, "two", [2])
    hand = Hand(book, two)
    ident = new_snapshot_id()
    bad = hand.snapshot(ident, [*hand.kept(), hand.added(ident, hand.data_file(20, lay=False))])
    good, wrong = append_of(Hand(book, one), 10), (hand.name, hand.requirements(), hand.onto_main(bad))
    with refused(book):
        book.catalog().commit_all([good, wrong])
    with refused(book):
        book.catalog().commit_all([good, good])
    check_ids(book, one, 1)
    check_ids(book, two, 2)


# --- what is told -----------------------------------------------------------------------------------


def test_every_change_is_told_as_an_event(book: Book) -> None:
    table = numbers(book, "t", [1])
    table.publish()
    start = len(records(book, schema.events))
    with iceberg(book, table).transaction() as transaction:
        with transaction.update_schema() as change:
            change.add_column("name", StringType())
        transaction.set_properties({"user.a": "b"})
        transaction.append(pa.table({"id": pa.array([2], pa.int64()), "name": ["b"]}))
    told = [(row["table_name"], row["operation"]) for row in records(book, schema.events)[start:]]
    assert told.count(("table_files", "insert")) == 1
    assert told.count(("table_snapshots", "insert")) == 1
    assert told.count(("table_metadata", "insert")) == 1
    assert ("table_metadata", "update") in told
    assert ("tables", "update") in told
    assert ("table_stats", "update") in told
    iceberg(book, table).delete("id = 1")
    more = [(row["table_name"], row["operation"]) for row in records(book, schema.events)[start + len(told) :]]
    assert ("table_files", "update") in more
    assert ("table_snapshots", "insert") in more
    check_ids(book, table, 2)


def test_a_partitioned_day_is_the_same_for_all(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, at TIMESTAMP", partition_by=["day(at)"], properties=QUICK)
    theirs = iceberg(book, table)
    assert isinstance(theirs.spec().fields[0].transform, DayTransform)
    from datetime import UTC, datetime

    times = [datetime(2024, 1, number, 12, tzinfo=UTC) for number in (1, 2, 2)]
    insert(table, {"id": 1, "at": times[0]})
    theirs = iceberg(book, table)
    theirs.append(
        pa.table({"id": pa.array([2, 3], pa.int64()), "at": pa.array(times[1:], pa.timestamp("us", tz="UTC"))})
    )
    check_ids(book, table, 1, 2, 3)
    assert ids(table, "at >= '2024-01-02T00:00:00+00:00'") == [2, 3]
    theirs.delete("id = 2")
    check_ids(book, table, 1, 3)
