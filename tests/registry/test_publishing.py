"""What is published as Iceberg is what the registry says, version by version, and other engines read the same rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.table import StaticTable
from pyiceberg.table.metadata import TableMetadataV2

import lakebook
from books import POSTGRESQL, SQLITE, Place
from lake import (
    PATIENCE,
    files_of,
    in_memory,
    insert,
    lay,
    numbers,
    objects,
    own_warehouse,  # noqa: F401
    records,
    rows_of,
    with_ids,
)
from lakebook import Book, SnapshotRecord, failpoints
from lakebook.clock import ManualClock
from lakebook.errors import InvalidTable, NotPublishable, PublishFailed, TableNotFound
from lakebook.iceberg.manifests import live_entries, read_manifest_list
from lakebook.iceberg.table_metadata import COMPRESSED_FROM, NAME_MAPPING
from lakebook.lake.attempts import Attempt
from lakebook.lake.inserting import write_arrow
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.table_files import TableChange

DAY = 86_400
#: Where other programs can open the files too.
on_disk = pytest.mark.parametrize("place", [SQLITE, POSTGRESQL], indirect=True)


@pytest.fixture
def book(place: Place) -> Book:
    """A book that publishes when it is asked to."""
    return place.open(clock=ManualClock())


def metadata_of(book: Book, table: Table) -> TableMetadataV2:
    """The metadata that a table is published as."""
    pointer = book.lake.publisher.pointer(table.record)
    assert pointer is not None
    return book.lake.publisher.load(pointer)


def change(
    book: Book, table: Table, operation: str, added: Sequence[Mapping[str, Any]], removed: Sequence[str], **more: str
) -> int:
    """A change that Spark would make: files of these rows instead of the named files."""
    record = table.record
    ended = [row["id"] for row in files_of(book, table) if row["file_path"] in removed and row["to_version"] is None]
    assert len(ended) == len(removed)
    with Attempt(book.lake, record) as attempt:
        shape = book.lake.shape_of(record, record.schema_version)
        files = write_arrow(book.lake, record, attempt, shape, rows_of(table, added)) if added else []
        return attempt.commit(TableChange(operation, files, ended, more)).version


def paths_of(table: Table, **at: Any) -> list[str]:
    return [file.file_path for file in table.plan(**at)]


def operations(table: Table) -> list[tuple[str, str]]:
    return [(item.summary["operation"], item.summary["lakebook.versions"]) for item in table.snapshots()]


def in_order(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows)


def of_pyiceberg(table: Table, snapshot_id: int | None = None) -> list[str]:
    """The rows that PyIceberg reads with nothing but the metadata file."""
    location = table.metadata_location
    assert location is not None
    return in_order(StaticTable.from_metadata(location).scan(snapshot_id=snapshot_id).to_arrow().to_pylist())


def of_duckdb(table: Table, snapshot_id: int | None = None) -> list[str]:
    """The rows that DuckDB reads with nothing but the metadata file."""
    location = table.metadata_location
    assert location is not None
    path = unquote(urlsplit(location).path)
    asked = "" if snapshot_id is None else f", snapshot_from_id := {snapshot_id}"
    with duckdb.connect() as connection:
        connection.execute("LOAD avro; LOAD iceberg; SET TimeZone = 'UTC'")
        found = connection.execute(f"SELECT * FROM iceberg_scan('{path}'{asked})").to_arrow_table()
    return in_order(found.to_pylist())


def listed_files(book: Book, snapshot: SnapshotRecord) -> list[str]:
    """The files that the manifests of a snapshot list; what a book keeps of the list is what is in its file."""
    io, store, location = book.lake.publisher.io, book.lake.store, book.lake.store.uri(snapshot.manifest_list)
    manifests = read_manifest_list(io, location)
    # Not the manifests themselves: to PyIceberg two are equal if their paths are.
    assert [item._data for item in book.lake.publisher.lists.read(location)] == [item._data for item in manifests]
    return sorted(
        store.relative(entry.data_file.file_path) for manifest in manifests for entry in live_entries(io, manifest)
    )


def check_files(book: Book, table: Table) -> None:
    """Every snapshot lists exactly the files of the version that it stands for."""
    found = table.snapshots()
    assert [item.snapshot_id for item in metadata_of(book, table).snapshots] == [item.snapshot_id for item in found]
    for snapshot in found:
        files = list(table.plan(version=snapshot.version))
        assert listed_files(book, snapshot) == sorted(file.file_path for file in files)
        assert snapshot.summary["total-data-files"] == str(len(files))
        assert snapshot.summary["total-records"] == str(sum(file.row_count for file in files))
        assert snapshot.summary["total-files-size"] == str(sum(file.file_size for file in files))
    if found:
        assert listed_files(book, found[-1]) == sorted(paths_of(table))


def check_versions(table: Table) -> None:
    """Every version that a snapshot stands for has the same rows in every engine."""
    for snapshot in table.snapshots():
        expected = in_order(table.to_arrow(version=snapshot.version).to_pylist())
        assert of_pyiceberg(table, snapshot.snapshot_id) == expected
        assert of_duckdb(table, snapshot.snapshot_id) == expected
    assert of_pyiceberg(table) == of_duckdb(table) == in_order(table.to_arrow().to_pylist())


# --- which snapshots there are ---------------------------------------------------


def test_a_table_without_rows_is_published_without_a_snapshot(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT NOT NULL, name STRING", properties={"user.team": "sales"})
    done = table.publish()
    assert (done.table, done.version, done.snapshot_id, done.sequence_number) == ("default.t", 0, None, 0)
    assert done.metadata_location == table.metadata_location
    metadata = metadata_of(book, table)
    assert (metadata.snapshots, metadata.current_snapshot_id, metadata.refs) == ([], None, {})
    assert str(metadata.table_uuid) == table.record.table_uuid
    assert metadata.schema() == table.schema
    assert metadata.properties["user.team"] == "sales"
    assert metadata.properties["gc.enabled"] == "false"
    assert table.snapshots() == []


def test_a_run_of_appends_is_one_snapshot_and_every_other_change_its_own(book: Book) -> None:
    table = numbers(book, "t", [1, 2], [3], [4])
    change(book, table, "overwrite", [{"id": 30}], [paths_of(table)[1]])
    insert(table, {"id": 5})
    insert(table, {"id": 6})
    change(book, table, "replace", [{"id": 5}, {"id": 6}], paths_of(table)[-2:])
    with table.update_schema() as update:
        update.add_column("name", "STRING")
    insert(table, {"id": 7, "name": "a"})
    table.delete("true")
    insert(table, {"id": 8})
    with table.update_schema() as update:
        update.add_column("more", "STRING")
    done = table.publish()
    assert operations(table) == [
        ("append", "1-3"),
        ("overwrite", "4"),
        ("append", "5-6"),
        ("replace", "7"),
        ("append", "9"),
        ("delete", "10"),
        ("append", "11"),
    ]
    assert [item.version for item in table.snapshots()] == [3, 4, 6, 7, 9, 10, 11]
    assert [item.schema_id for item in table.snapshots()] == [1, 1, 1, 1, 2, 2, 2]
    assert (done.version, done.sequence_number) == (12, 7)
    metadata = metadata_of(book, table)
    assert [shape.schema_id for shape in metadata.schemas] == [1, 2, 3]
    assert metadata.current_schema_id == 3
    assert book.verify().ok


def test_appends_with_different_schemas_are_different_snapshots(book: Book) -> None:
    table = numbers(book, "t", [1])
    with table.update_schema() as update:
        update.add_column("name", "STRING")
    insert(table, {"id": 2, "name": "b"})
    table.publish()
    assert [(item.version, item.schema_id) for item in table.snapshots()] == [(1, 1), (3, 2)]


def test_what_is_published_is_not_published_again(book: Book) -> None:
    table = numbers(book, "t", [1])
    first = table.publish()
    before = objects(book, "iceberg")
    assert table.publish() == first
    assert objects(book, "iceberg") == before
    assert len(table.snapshots()) == 1


def test_a_change_of_properties_makes_new_metadata_without_a_snapshot(book: Book) -> None:
    table = numbers(book, "t", [1])
    first = table.publish()
    table.set_properties(**{"user.team": "sales"})
    second = table.publish()
    assert second.metadata_location != first.metadata_location
    assert (second.version, second.snapshot_id) == (first.version, first.snapshot_id)
    assert metadata_of(book, table).properties["user.team"] == "sales"
    table.set_properties(**{"user.team": None})
    table.publish()
    assert "user.team" not in metadata_of(book, table).properties


def test_snapshots_are_captured_as_events(book: Book) -> None:
    table = numbers(book, "t", [1], [2])
    start = book.events.now()
    table.publish()
    batch = book.events.read(start)
    (event,) = [event for event in batch.events if event.table == "table_snapshots"]
    assert event.operation == "insert"
    assert event.row_after is not None
    assert event.row_after["summary"]["lakebook.versions"] == "1-2"


# --- what a snapshot says --------------------------------------------------------


def test_a_summary_counts_what_changed_and_what_there_is(book: Book) -> None:
    table = numbers(book, "t", [1, 2])
    first = paths_of(table)
    sizes = {row["file_path"]: row["file_size"] for row in files_of(book, table)}
    insert(table, {"id": 3}, source="kafka", batch="1")
    insert(table, {"id": 4}, batch="2")
    change(book, table, "overwrite", [{"id": 9}], first, why="mistake")
    table.publish()
    appended, overwritten = table.snapshots()
    live = {row["file_path"]: row for row in files_of(book, table)}
    assert appended.summary == {
        "operation": "append",
        "lakebook.versions": "1-3",
        "source": "kafka",
        "batch": "2",
        "added-data-files": "3",
        "added-records": "4",
        "added-files-size": str(sum(row["file_size"] for row in live.values() if row["from_version"] <= 3)),
        "total-data-files": "3",
        "total-records": "4",
        "total-files-size": str(sum(row["file_size"] for row in live.values() if row["from_version"] <= 3)),
        "total-delete-files": "0",
        "total-position-deletes": "0",
        "total-equality-deletes": "0",
    }
    assert overwritten.summary == {
        "operation": "overwrite",
        "lakebook.versions": "4",
        "why": "mistake",
        "added-data-files": "1",
        "added-records": "1",
        "added-files-size": str(next(row["file_size"] for row in live.values() if row["from_version"] == 4)),
        "deleted-data-files": "1",
        "deleted-records": "2",
        "removed-files-size": str(sizes[first[0]]),
        "total-data-files": "3",
        "total-records": "3",
        "total-files-size": str(table.record.total_size),
        "total-delete-files": "0",
        "total-position-deletes": "0",
        "total-equality-deletes": "0",
    }


def test_snapshots_follow_each_other_in_sequence_and_time(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock)
    table = numbers(book, "t")
    for number in range(4):
        clock.advance(10)
        insert(table, {"id": number})
        if number != 1:
            table.publish()
    found = table.snapshots()
    history = {version.version: version.committed_at for version in table.history().items}
    assert [item.version for item in found] == [1, 3, 4]
    assert [item.sequence_number for item in found] == [1, 2, 3]
    assert [item.parent_snapshot_id for item in found] == [None, found[0].snapshot_id, found[1].snapshot_id]
    assert [datetime.fromtimestamp(item.timestamp_ms / 1000, UTC) for item in found] == [
        history[version] for version in (1, 3, 4)
    ]
    metadata = metadata_of(book, table)
    assert metadata.last_sequence_number == 3
    assert metadata.current_snapshot_id == found[-1].snapshot_id == metadata.refs["main"].snapshot_id
    assert [(entry.snapshot_id, entry.timestamp_ms) for entry in metadata.snapshot_log] == [
        (item.snapshot_id, item.timestamp_ms) for item in found
    ]
    assert [item.snapshot_id for item in metadata.snapshots] == [item.snapshot_id for item in found]
    assert metadata.last_updated_ms >= found[-1].timestamp_ms


def test_files_have_the_sequence_number_of_the_snapshot_that_added_them(book: Book) -> None:
    table = numbers(book, "t", [1])
    table.publish()
    insert(table, {"id": 2})
    table.publish()
    change(book, table, "overwrite", [{"id": 3}], paths_of(table)[:1])
    table.publish()
    io = book.lake.publisher.io
    numbered = {
        entry.data_file.file_path.rpartition("/")[2]: (entry.sequence_number, entry.file_sequence_number)
        for manifest in read_manifest_list(io, book.lake.store.uri(table.snapshots()[-1].manifest_list))
        for entry in manifest.fetch_manifest_entry(io, discard_deleted=True)
    }
    by_version = {row["from_version"]: row["file_path"].rpartition("/")[2] for row in files_of(book, table)}
    assert numbered == {by_version[2]: (2, 2), by_version[3]: (3, 3)}


# --- what is kept ----------------------------------------------------------------


def waiting_for_removal(book: Book) -> dict[str, str]:
    return {row["file_path"]: row["reason"] for row in records(book, schema.temporary_files)}


def test_former_metadata_files_are_kept_up_to_a_number_and_then_wait_for_their_removal(place: Place) -> None:
    book = place.open(clock=ManualClock(), metadata_kept=2, published_grace=DAY)
    table = numbers(book, "t")
    made = []
    for number in range(5):
        insert(table, {"id": number})
        table.publish()
        pointer = book.lake.publisher.pointer(table.record)
        assert pointer is not None
        made.append(pointer.metadata_location)
    log = [book.lake.store.relative(entry.metadata_file) for entry in metadata_of(book, table).metadata_log]
    assert log == made[2:4]
    assert waiting_for_removal(book) == dict.fromkeys(made[:2], "metadata superseded")
    known = {row["file_path"] for row in records(book, schema.iceberg_files, kind="metadata")}
    assert known == set(made[2:])
    assert [path for path in made if path not in objects(book, "iceberg")] == []
    (row,) = [row for row in records(book, schema.temporary_files) if row["file_path"] == made[0]]
    assert row["expiration"] - row["added_at"] >= DAY * 1000


def test_snapshots_are_kept_up_to_a_number(place: Place) -> None:
    book = place.open(clock=ManualClock(), snapshots_kept=3)
    table = numbers(book, "t")
    lists = {}
    for number in range(6):
        insert(table, {"id": number})
        table.publish()
        lists[number + 1] = table.snapshots()[-1].manifest_list
    assert [item.version for item in table.snapshots()] == [4, 5, 6]
    metadata = metadata_of(book, table)
    assert [item.snapshot_id for item in metadata.snapshots] == [item.snapshot_id for item in table.snapshots()]
    assert [entry.snapshot_id for entry in metadata.snapshot_log] == [item.snapshot_id for item in table.snapshots()]
    gone = waiting_for_removal(book)
    assert {path for path in gone if "/snap-" in path} == {lists[number] for number in (1, 2, 3)}
    listed = {row["file_path"] for row in records(book, schema.snapshot_manifests)}
    assert listed.isdisjoint(gone)
    assert listed == {row["file_path"] for row in records(book, schema.iceberg_files, kind="manifest")}
    assert book.verify().ok


def test_of_many_changes_that_are_published_at_once_only_the_last_snapshots_are_kept(place: Place) -> None:
    book = place.open(clock=ManualClock(), snapshots_kept=2)
    table = numbers(book, "t", [1], [2])
    for number in range(4):
        change(book, table, "overwrite", [{"id": 10 + number}], paths_of(table)[:1])
    table.publish()
    assert [item.version for item in table.snapshots()] == [5, 6]
    check_files(book, table)
    found = {row["file_path"] for row in records(book, schema.iceberg_files)}
    assert set(objects(book, "iceberg")) - waiting_for_removal(book).keys() == found


def test_a_snapshot_of_a_version_that_is_read_is_kept(place: Place) -> None:
    book = place.open(clock=ManualClock(), snapshots_kept=1)
    table = numbers(book, "t", [1])
    table.publish()
    with table.pin() as pinned:
        for number in (2, 3):
            insert(table, {"id": number})
            table.publish()
        assert [item.version for item in table.snapshots()] == [1, 2, 3]
        assert pinned.count() == 1
    insert(table, {"id": 4})
    table.publish()
    assert [item.version for item in table.snapshots()] == [4]


def test_a_table_whose_history_has_ended_is_published_from_where_it_begins(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock)
    table = numbers(book, "t", [1], [2], [3])
    change(book, table, "overwrite", [{"id": 20}], [paths_of(table)[1]])
    insert(table, {"id": 5})
    clock.advance(100 * DAY)
    book.cleaner.expire(table.record, seconds=0, versions=2)
    insert(table, {"id": 6})
    table.publish()
    assert [item.version for item in table.snapshots()] == [4, 6]
    assert [item.summary["total-records"] for item in table.snapshots()] == ["3", "5"]
    check_files(book, table)


def test_a_history_that_begins_with_an_append_is_published_with_the_appends_after_it(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock)
    table = numbers(book, "t", [1], [2], [3], [4])
    clock.advance(100 * DAY)
    book.cleaner.expire(table.record, seconds=0, versions=2)
    insert(table, {"id": 5})
    table.publish()
    assert table.snapshots()[-1].summary["total-records"] == "5"
    check_files(book, table)


@in_memory
def test_the_number_of_manifests_grows_with_the_logarithm_of_that_of_snapshots(book: Book) -> None:
    table = numbers(book, "t")
    most = 0
    for number in range(70):
        insert(table, {"id": number})
        table.publish()
        manifests = read_manifest_list(book.lake.publisher.io, book.lake.store.uri(table.snapshots()[-1].manifest_list))
        assert sum((item.added_files_count or 0) + (item.existing_files_count or 0) for item in manifests) == number + 1
        most = max(most, len(manifests))
    assert most <= 20
    assert table.snapshots()[-1].summary["total-data-files"] == "70"


STEPS = ("insert", "overwrite", "replace", "delete", "widen", "expire", "publish")


class _Life:
    """A table that anything may happen to."""

    def __init__(self, book: Book, clock: ManualClock) -> None:
        self.book, self.clock = book, clock
        self.table = book.tables.create("t", "id BIGINT, kind BIGINT", partition_by=["kind"])
        self.count = 0

    def rows(self, number: int = 2) -> list[dict[str, int]]:
        self.count += 1
        return [{"id": self.count, "kind": kind} for kind in range(number)]

    def insert(self) -> None:
        insert(self.table, *self.rows())

    def overwrite(self) -> None:
        change(self.book, self.table, "overwrite", self.rows(1), paths_of(self.table)[::2])

    def replace(self) -> None:
        if paths := paths_of(self.table)[:1]:
            (file,) = [file for file in self.table.plan() if file.file_path in paths]
            change(self.book, self.table, "replace", self.rows(file.row_count), paths)

    def delete(self) -> None:
        self.table.delete("kind = 0")

    def widen(self) -> None:
        with self.table.update_schema() as update:
            self.count += 1
            update.add_column(f"c{self.count}", "STRING")

    def expire(self) -> None:
        self.clock.advance(DAY)
        self.book.cleaner.expire(self.table.record, seconds=0, versions=3)

    def publish(self) -> None:
        self.table.publish()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(["insert", "overwrite", "replace", "delete", "widen", "expire", "publish"]), max_size=14)
)
def test_whatever_happened_to_a_table_is_published_as_it_is(steps: list[str]) -> None:
    clock = ManualClock()
    with lakebook.open(":memory:", clock=clock, publish="off") as book:
        life = _Life(book, clock)
        for step in [*steps, "publish"]:
            getattr(life, step)()
        assert life.table.describe().published_version == life.table.version
        check_files(book, life.table)
        found = {row["file_path"] for row in records(book, schema.iceberg_files)}
        assert set(objects(book, "iceberg")) - waiting_for_removal(book).keys() == found


# --- other engines ---------------------------------------------------------------


@on_disk
def test_every_version_of_a_partitioned_table_is_the_same_elsewhere(book: Book) -> None:
    table = book.tables.create(
        "t", "id BIGINT, at TIMESTAMP, kind STRING", partition_by=["day(at)", "kind", "bucket(4, id)"]
    )
    for hour in (1, 30):
        at = datetime.fromtimestamp(1_700_000_000 + hour * 3600, UTC)
        insert(table, *({"id": number, "at": at, "kind": kind} for number in range(3) for kind in ("a", None)))
        table.publish()
    change(book, table, "overwrite", [{"id": 9, "at": None, "kind": "x"}], paths_of(table)[:2])
    change(book, table, "replace", [{"id": 9, "at": None, "kind": "x"}], paths_of(table)[-1:])
    table.publish()
    table.delete("kind IS NULL")
    table.publish()
    assert len(table.snapshots()) == 5
    check_versions(table)


@on_disk
def test_every_version_of_an_evolved_table_is_the_same_elsewhere(book: Book) -> None:
    table = book.tables.create("t", "id INT, name STRING, gone STRING, price DECIMAL(5,2)")
    insert(table, {"id": 1, "name": "a", "gone": "x", "price": Decimal("1.50")})
    table.publish()
    with table.update_schema() as update:
        update.rename_column("name", "title")
        update.widen_column("id", "BIGINT")
        update.widen_column("price", "DECIMAL(9,2)")
        update.drop_column("gone")
        update.add_column("day", "DATE")
    insert(table, {"id": 2**40, "title": "b", "price": Decimal("1234567.89"), "day": date(2026, 1, 31)})
    table.publish()
    with table.update_schema() as update:
        update.add_column("gone", "INT")  # Another column of the same name.
    insert(table, {"id": 3, "title": None, "gone": 5})
    table.publish()
    # Each snapshot is read with its own schema, as each version is.
    for snapshot in table.snapshots():
        expected = table.to_arrow(version=snapshot.version)
        assert of_pyiceberg(table, snapshot.snapshot_id) == in_order(expected.to_pylist())
    assert of_pyiceberg(table) == of_duckdb(table) == in_order(table.to_arrow().to_pylist())
    assert [row["gone"] for row in table.to_arrow("id < 3").to_pylist()] == [None]


@on_disk
def test_every_version_of_a_nested_table_is_the_same_elsewhere(book: Book) -> None:
    table = book.tables.create(
        "t", "id BIGINT, address STRUCT<city: STRING, zip: INT>, tags ARRAY<STRING>, at TIMESTAMP, raw BINARY"
    )
    insert(table, {"id": 1, "address": {"city": "Ulm", "zip": 89073}, "tags": ["a", None], "raw": b"\x00\xff"})
    insert(table, {"id": 2, "address": None, "tags": []})
    table.publish()
    insert(
        table, {"id": 3, "address": {"city": None, "zip": None}, "tags": None, "at": datetime(2026, 1, 31, tzinfo=UTC)}
    )
    table.publish()
    check_versions(table)


@on_disk
def test_files_without_field_ids_are_read_by_their_names(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, name STRING")
    insert(table, {"id": 1, "name": "own"})
    table.add_files([lay(book, "outside/a.parquet", pa.table({"id": [2], "name": ["laid"]}))])
    table.publish()
    mapping = metadata_of(book, table).properties[NAME_MAPPING]
    assert '"names":["name"]' in mapping.replace(" ", "")
    with table.update_schema() as update:
        update.rename_column("name", "title")
    table.publish()
    assert of_pyiceberg(table) == in_order(table.to_arrow().to_pylist())
    assert of_duckdb(table) == in_order(table.to_arrow().to_pylist())


def test_a_table_of_own_files_needs_no_mapping_of_names(book: Book) -> None:
    table = numbers(book, "t", [1])
    table.add_files([lay(book, "outside/a.parquet", with_ids(table, [{"id": 2}]))])
    table.publish()
    assert NAME_MAPPING not in metadata_of(book, table).properties


def test_a_name_that_meant_two_columns_in_files_without_ids_cannot_be_published(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, name STRING")
    table.add_files([lay(book, "outside/a.parquet", pa.table({"id": [1], "name": ["x"]}))])
    first = table.publish()
    with table.update_schema() as update:
        update.drop_column("name")
    with table.update_schema() as update:
        update.add_column("name", "STRING")
    table.add_files([lay(book, "outside/b.parquet", pa.table({"id": [2], "name": ["y"]}))])
    before = objects(book, "iceberg")
    with pytest.raises(NotPublishable, match="two columns as 'name'"):
        table.publish()
    assert objects(book, "iceberg") == before
    assert table.metadata_location == first.metadata_location
    assert [row["name"] for row in table.to_arrow("id = 1").to_pylist()] == [None]


@on_disk
def test_large_metadata_is_compressed(book: Book) -> None:
    table = numbers(book, "t")
    note = "x" * 2000
    for number in range(2):
        insert(table, {"id": number}, **{f"note{item}": note + str(item) for item in range(90)})
        table.publish()
    small, large = (item.metadata_location for item in table.snapshots())
    assert small.endswith(".metadata.json")
    assert not small.endswith(".gz.metadata.json")
    assert large.endswith(".gz.metadata.json")
    raw = book.lake.store.read(large)
    assert raw[:2] == b"\x1f\x8b"
    assert len(raw) < COMPRESSED_FROM / 4
    assert of_pyiceberg(table) == in_order([{"id": 0}, {"id": 1}])


def test_a_book_whose_folder_was_moved_is_published_anew(tmp_path: Path) -> None:
    with lakebook.open(tmp_path / "before", publish="sync") as book:
        table = numbers(book, "t", [1], [2])
        change(book, table, "overwrite", [{"id": 3}], paths_of(table)[:1])
        former = table.publish()
    (tmp_path / "before").rename(tmp_path / "after")
    with lakebook.open(tmp_path / "after", publish="sync") as book:
        table = book.table("t")
        done = table.publish()
        assert done.metadata_location.startswith((tmp_path / "after").as_uri())
        assert (done.version, done.metadata_location != former.metadata_location) == (3, True)
        check_files(book, table)
        insert(table, {"id": 4})
        check_versions(table)
        assert book.verify().ok


# --- failures --------------------------------------------------------------------


def open_changes(book: Book) -> list[dict[str, Any]]:
    return [row for row in records(book, schema.commits) if row["state"] == "open"]


@pytest.mark.parametrize("error", [OSError("the disk is full"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize(
    "point", ["publish.reserved", "publish.manifests_written", "publish.list_written", "publish.metadata_written"]
)
@in_memory
def test_a_publish_that_fails_leaves_nothing_behind(book: Book, point: str, error: BaseException) -> None:
    table = numbers(book, "t", [1])
    table.publish()
    insert(table, {"id": 2})
    table.delete("id = 1")
    before = objects(book), table.describe(), table.snapshots(), records(book, schema.iceberg_files)

    def fail() -> None:
        raise error

    with failpoints.armed(point, fail), pytest.raises((PublishFailed, OSError, KeyboardInterrupt)):
        table.publish()
    assert (objects(book), table.describe(), table.snapshots(), records(book, schema.iceberg_files)) == before
    assert open_changes(book) == []
    assert book.verify().ok
    table.publish()
    assert operations(table) == [("append", "1"), ("append", "2"), ("delete", "3")]


@in_memory
def test_the_reason_of_a_failure_is_told(book: Book) -> None:
    table = numbers(book, "t", [1])

    def fail() -> None:
        raise OSError("the disk is full")

    with (
        failpoints.armed("publish.list_written", fail),
        pytest.raises(PublishFailed, match=r"could not be written \(OSError: the disk is full"),
    ):
        table.publish()
    assert book.metrics.values()["lakebook_publishes_total{outcome=failed}"] == 1


def test_a_dropped_table_is_not_published(book: Book) -> None:
    table = numbers(book, "t", [1])
    book.tables.drop("t")
    with pytest.raises(TableNotFound):
        table.publish()
    assert objects(book, "iceberg") == []


def test_a_table_of_json_is_not_published(book: Book) -> None:
    table = numbers(book, "t", format="json")
    with pytest.raises(InvalidTable, match="format json cannot be published"):
        table.publish()
    assert (table.metadata_location, table.snapshots()) == (None, [])
    assert table.describe().published_version is None


# --- several at once -------------------------------------------------------------


def in_threads(number: int, action: Callable[[int], object]) -> list[BaseException]:
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            action(index)
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    return failures


def covered(found: Sequence[SnapshotRecord]) -> list[int]:
    """The versions that snapshots cover, one after the other."""
    versions: list[int] = []
    for snapshot in found:
        first, _, last = snapshot.summary["lakebook.versions"].partition("-")
        versions += range(int(first), int(last or first) + 1)
    return versions


def test_two_who_publish_at_once_publish_each_version_once(shared_place: Place) -> None:
    books = [shared_place.open(), shared_place.open()]
    tables = [numbers(books[0], "t", [1], [2])]
    tables.append(books[1].table("t"))
    meeting = threading.Barrier(2)
    met = threading.local()

    def meet() -> None:
        # Both have written all there is to write, and only one can be the first.
        if not getattr(met, "once", False):
            met.once = True
            meeting.wait(PATIENCE)

    with failpoints.armed("publish.metadata_written", meet):
        assert in_threads(2, lambda index: tables[index].publish()) == []
    assert covered(tables[0].snapshots()) == [1, 2]
    pointer = books[0].lake.publisher.pointer(tables[0].record)
    assert pointer is not None
    assert pointer.metadata_number == 0
    kept = {row["file_path"] for row in records(books[0], schema.iceberg_files)}
    assert set(objects(books[0], "iceberg")) == kept
    assert books[0].verify().ok


def test_many_who_insert_and_publish_at_once_publish_each_version_once(shared_place: Place) -> None:
    books = [shared_place.open(publish="sync") for _ in range(3)]
    numbers(books[0], "t")

    def work(index: int) -> None:
        table = books[index].table("t")
        for number in range(4):
            done = insert(table, {"id": index * 10 + number})
            assert done.snapshot_id is not None
            assert any(item.snapshot_id == done.snapshot_id for item in table.snapshots())

    assert in_threads(3, work) == []
    table = books[0].table("t")
    assert covered(table.snapshots()) == list(range(1, 13))
    assert table.describe().published_version == 12
    assert of_pyiceberg(table) == in_order(table.to_arrow().to_pylist())
    kept = {row["file_path"] for row in records(books[0], schema.iceberg_files)}
    assert set(objects(books[0], "iceberg")) - waiting_for_removal(books[0]).keys() == kept


def once(action: Callable[[], object]) -> Callable[[], None]:
    left = [action]

    def act() -> None:
        if left:
            left.pop()()

    return act


def test_what_is_inserted_while_a_table_is_published_is_published_next(book: Book) -> None:
    table = numbers(book, "t", [1])
    with failpoints.armed("publish.metadata_written", once(lambda: insert(table, {"id": 2}))):
        assert table.publish().version == 1
    assert table.publish().version == 2
    assert covered(table.snapshots()) == [1, 2]


def test_a_table_whose_schema_changes_while_it_is_published_is_published_with_the_new_one(book: Book) -> None:
    table = numbers(book, "t", [1])

    def widen() -> None:
        with table.update_schema() as update:
            update.add_column("name", "STRING")

    with failpoints.armed("publish.metadata_written", once(widen)):
        assert table.publish().version == 2
    assert covered(table.snapshots()) == [1]
    assert metadata_of(book, table).schema() == table.schema
    kept = {row["file_path"] for row in records(book, schema.iceberg_files)}
    assert set(objects(book, "iceberg")) == kept


def test_a_history_that_ends_while_a_table_is_published_first_is_not_published(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock)
    table = numbers(book, "t", [1])
    change(book, table, "overwrite", [{"id": 2}], paths_of(table))
    insert(table, {"id": 3})

    def expire() -> None:
        clock.advance(100 * DAY)
        book.cleaner.expire(table.record, seconds=0, versions=1)

    with failpoints.armed("publish.metadata_written", once(expire)):
        table.publish()
    assert [item.version for item in table.snapshots()] == [3]
    check_files(book, table)


# --- all tables of a book --------------------------------------------------------


def test_every_table_with_something_to_publish_is_published(book: Book) -> None:
    first, second = numbers(book, "a", [1]), numbers(book, "b", [2])
    numbers(book, "c", format="json")
    first.publish()
    insert(first, {"id": 4})
    book.tables.create_namespace("sales")
    third = book.tables.create("sales.t", "id BIGINT")
    told: list[tuple[int, int, str]] = []
    done = book.publish_pending(lambda *step: told.append(step))
    assert told == [(0, 3, "default.a"), (1, 3, "default.b"), (2, 3, "sales.t")]
    assert [(item.table, item.version) for item in done.published] == [
        ("default.a", 2),
        ("default.b", 1),
        ("sales.t", 0),
    ]
    assert done.failed == ()
    assert [table.describe().published_version for table in (first, second, third)] == [2, 1, 0]
    assert book.publish_pending().published == ()
    assert book.measure().values()["lakebook_unpublished_tables"] == 0


def test_a_table_that_cannot_be_published_keeps_no_other_from_it(book: Book) -> None:
    numbers(book, "a", [1])
    numbers(book, "b", [2])
    failures = [OSError("the disk is full")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    with failpoints.armed("publish.metadata_written", fail):
        done = book.publish_pending()
    assert [item.table for item in done.published] == ["default.b"]
    ((name, why),) = done.failed
    assert name == "default.a"
    assert "the disk is full" in why
    assert [item.table for item in book.publish_pending().published] == ["default.a"]


def test_properties_alone_are_something_to_publish(book: Book) -> None:
    table = numbers(book, "t", [1])
    table.publish()
    table.set_properties(**{"user.team": "sales"})
    assert [item.table for item in book.publish_pending().published] == ["default.t"]
    assert metadata_of(book, table).properties["user.team"] == "sales"


@on_disk
def test_a_description_says_what_is_published(book: Book) -> None:
    table = numbers(book, "t", [1])
    assert (table.describe().published_version, table.describe().metadata_location) == (None, None)
    done = table.publish()
    insert(table, {"id": 2})
    described = table.describe()
    assert (described.version, described.published_version) == (2, 1)
    assert described.metadata_location == done.metadata_location == table.metadata_location
    assert Path(unquote(urlsplit(done.metadata_location).path)).is_file()
