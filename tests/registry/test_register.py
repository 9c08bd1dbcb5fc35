"""Tables that another catalog wrote into the warehouse are taken as they are."""

from __future__ import annotations

import gzip
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchNamespaceError, TableAlreadyExistsError
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from books import Place
from by_hand import QUICK, check_ids, nothing_changes, of_duckdb, present_clock, settle
from lake import (
    files_of,
    ids,
    insert,
    numbers,
    own_warehouse,  # noqa: F401
    records,
)
from lakebook import Book
from lakebook.clock import ManualClock
from lakebook.errors import InvalidInput, LakebookError
from lakebook.registry import schema

DAY = 86_400
GRACE = 3600.0
SHAPE = Schema(NestedField(1, "id", LongType()), NestedField(2, "kind", StringType()))
BY_KIND = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "kind"))


@pytest.fixture
def clock() -> ManualClock:
    return present_clock()


@pytest.fixture
def book(shared_place: Place, clock: ManualClock) -> Book:
    return shared_place.open(clock=clock, temporary_file_grace=GRACE, published_grace=GRACE, catalog_lease=60.0)


@pytest.fixture
def elsewhere(book: Book, tmp_path: Path) -> Iterator[SqlCatalog]:
    """Another catalog that writes into the same warehouse."""
    catalog = SqlCatalog("other", uri=f"sqlite:///{tmp_path}/other.db", warehouse=f"{book.lake.store.uri()}/foreign")
    catalog.create_namespace("ns")
    yield catalog
    catalog.close()


def rows(*values: int, kind: str = "a") -> pa.Table:
    return pa.table({"id": pa.array(values, pa.int64()), "kind": [kind] * len(values)})


def head_of(table: Table) -> int:
    head = table.current_snapshot()
    assert head is not None
    return head.snapshot_id


def clean(book: Book, clock: ManualClock) -> None:
    for _ in range(2):
        clock.advance(2 * DAY)
        book.cleaner.expire(seconds=0, versions=1, wait=True)
        clock.advance(2 * DAY)
        book.cleaner.delete_expired_temporary_files()
        book.cleaner.sweep()


def with_history(elsewhere: SqlCatalog) -> Any:
    """A table with a past: specs, schemas, a tag, a branch, and rows that were rewritten."""
    made = elsewhere.create_table("ns.t", SHAPE, partition_spec=BY_KIND, properties=QUICK)
    made.append(rows(1, 2))
    made.manage_snapshots().create_tag(head_of(made), "first").commit()
    made.append(rows(3, 4, kind="b"))
    made.delete("id = 3")
    with made.update_schema() as change:
        change.add_column("more", StringType())
    with made.update_schema() as change:
        change.rename_column("kind", "sort")
    with made.update_spec() as change:
        change.add_field("id", BucketTransform(2), "bucket")
    more = pa.table({"id": pa.array([5], pa.int64()), "sort": ["c"], "more": ["x"]})
    made.append(more)
    made.manage_snapshots().create_branch(head_of(made), "work").commit()
    made.append(pa.table({"id": pa.array([6], pa.int64()), "sort": ["c"], "more": ["y"]}), branch="work")
    return made


def test_a_table_with_history_is_taken_as_it_is(book: Book, elsewhere: SqlCatalog, clock: ManualClock) -> None:
    made = with_history(elsewhere)
    before = {item.path: item.size for item in book.lake.store.list("foreign")}
    taken = book.catalog().register_table("default.t", made.metadata_location)
    table = book.table("t")
    assert taken.metadata.table_uuid == made.metadata.table_uuid
    assert table.record.table_uuid == str(made.metadata.table_uuid)
    check_ids(book, table, 1, 2, 4, 5)
    assert {item.path: item.size for item in book.lake.store.list("foreign") if item.path in before} == before
    assert sorted(taken.scan().use_ref("first").to_arrow()["id"].to_pylist()) == [1, 2]
    assert sorted(taken.scan().use_ref("work").to_arrow()["id"].to_pylist()) == [1, 2, 4, 5, 6]
    settle(book)
    assert records(book, schema.footer_debts) == []
    assert ids(table, "sort = 'b'") == [4]
    for number in (1, 2, 4, 5):
        assert ids(table, f"id = {number}") == [number]
    insert(table, {"id": 7, "sort": "d", "more": "z"})
    check_ids(book, table, 1, 2, 4, 5, 7)
    with table.update_schema() as update:
        update.add_column("last", "INT")
    insert(table, {"id": 8, "last": 1})
    book.catalog().load_table("default.t").delete("id = 1")
    check_ids(book, table, 2, 4, 5, 7, 8)
    table.delete("sort = 'b'")
    check_ids(book, table, 2, 5, 7, 8)
    clean(book, clock)
    check_ids(book, table, 2, 5, 7, 8)
    loaded = book.catalog().load_table("default.t")
    assert sorted(loaded.scan().use_ref("first").to_arrow()["id"].to_pylist()) == [1, 2]
    assert sorted(loaded.scan().use_ref("work").to_arrow()["id"].to_pylist()) == [1, 2, 4, 5, 6]


def test_a_registered_table_has_a_version_of_its_snapshot(
    book: Book, elsewhere: SqlCatalog, clock: ManualClock
) -> None:
    made = elsewhere.create_table("ns.t", SHAPE, properties=QUICK)
    made.append(rows(1))
    made.append(rows(2))
    clock.advance(60)
    book.catalog().register_table("default.t", made.metadata_location)
    table = book.table("t")
    (record,) = [item for item in table.snapshots() if item.version is not None]
    assert record.snapshot_id == head_of(made)
    assert record.version == table.version
    check_ids(book, table, 1, 2)
    # Its time is that of the other catalog: for this book it was not there then.
    assert table.history()[0].committed_at.timestamp() * 1000 >= record.timestamp_ms


def test_an_empty_table_is_taken(book: Book, elsewhere: SqlCatalog) -> None:
    made = elsewhere.create_table("ns.t", SHAPE, partition_spec=BY_KIND, properties=QUICK)
    book.catalog().register_table("default.t", made.metadata_location)
    table = book.table("t")
    assert table.version == 0
    insert(table, {"id": 1, "kind": "a"})
    book.catalog().load_table("default.t").append(rows(2))
    check_ids(book, table, 1, 2)


def test_a_table_that_was_rolled_back_is_taken_at_its_head(book: Book, elsewhere: SqlCatalog) -> None:
    made = elsewhere.create_table("ns.t", SHAPE, properties=QUICK)
    made.append(rows(1))
    first = head_of(made)
    made.append(rows(2))
    made.manage_snapshots().rollback_to_snapshot(first).commit()
    book.catalog().register_table("default.t", made.metadata_location)
    table = book.table("t")
    check_ids(book, table, 1)
    insert(table, {"id": 3})
    book.catalog().load_table("default.t").append(rows(4))
    check_ids(book, table, 1, 3, 4)


def test_a_compressed_metadata_file_is_taken(book: Book, elsewhere: SqlCatalog) -> None:
    made = elsewhere.create_table("ns.t", SHAPE)
    made.append(rows(1))
    path = book.lake.store.relative(made.metadata_location)
    packed = path.replace(".metadata.json", ".gz.metadata.json")
    book.lake.store.put_new(packed, gzip.compress(book.lake.store.read(path)))
    book.catalog().register_table("default.t", book.lake.store.uri(packed))
    check_ids(book, book.table("t"), 1)


@pytest.mark.parametrize("with_rows", [True, False])
def test_a_table_is_not_taken_twice(book: Book, elsewhere: SqlCatalog, with_rows: bool) -> None:
    made = elsewhere.create_table("ns.t", SHAPE)
    if with_rows:
        made.append(rows(1))
    catalog = book.catalog()
    catalog.register_table("default.t", made.metadata_location)
    settle(book)
    with nothing_changes(book), pytest.raises((LakebookError, TableAlreadyExistsError)):
        catalog.register_table("default.other", made.metadata_location)
    with nothing_changes(book), pytest.raises(TableAlreadyExistsError):
        catalog.register_table("default.t", made.metadata_location)
    with nothing_changes(book), pytest.raises(InvalidInput):
        catalog.register_table("default.t", made.metadata_location, overwrite=True)
    check_ids(book, book.table("t"), *([1] if with_rows else []))


def test_a_table_of_this_book_is_not_taken_again(book: Book) -> None:
    table = numbers(book, "t", [1])
    table.publish()
    with nothing_changes(book), pytest.raises((LakebookError, TableAlreadyExistsError)):
        book.catalog().register_table("default.other", table.metadata_location or "")
    check_ids(book, table, 1)


def test_a_table_that_was_dropped_and_not_emptied_is_not_taken_again(
    book: Book, elsewhere: SqlCatalog, clock: ManualClock
) -> None:
    made = elsewhere.create_table("ns.t", SHAPE)
    made.append(rows(1))
    catalog = book.catalog()
    catalog.register_table("default.t", made.metadata_location)
    settle(book)
    catalog.drop_table("default.t")
    with nothing_changes(book), pytest.raises(LakebookError):
        catalog.register_table("default.t", made.metadata_location)
    clean(book, clock)
    assert book.verify().findings == ()


def test_names_and_places_that_cannot_be_are_refused(book: Book, elsewhere: SqlCatalog, tmp_path: Path) -> None:
    made = elsewhere.create_table("ns.t", SHAPE)
    made.append(rows(1))
    numbers(book, "taken", [1]).publish()
    catalog = book.catalog()
    with nothing_changes(book), pytest.raises(NoSuchNamespaceError):
        catalog.register_table("none.t", made.metadata_location)
    with nothing_changes(book), pytest.raises(TableAlreadyExistsError):
        catalog.register_table("default.taken", made.metadata_location)
    outside = tmp_path / "v1.metadata.json"
    outside.write_bytes(book.lake.store.read(book.lake.store.relative(made.metadata_location)))
    root = book.lake.store.uri()
    for place in (str(outside), f"file://{outside}", f"{root}/../v1.metadata.json", "s3://b/v1.metadata.json", ""):
        with nothing_changes(book), pytest.raises(InvalidInput):
            catalog.register_table("default.t", place)
    with nothing_changes(book), pytest.raises(LakebookError):
        catalog.register_table("default.t", f"{root}/foreign/nothing.metadata.json")
    check_ids(book, book.table("taken"), 1)


def changed(book: Book, location: str, change: Any) -> str:
    """The same metadata with a change, beside it."""
    path = book.lake.store.relative(location)
    data = json.loads(book.lake.store.read(path))
    change(data)
    place = f"{path.rpartition('/')[0]}/{uuid.uuid4()}.metadata.json"
    book.lake.store.put_new(place, json.dumps(data).encode())
    return book.lake.store.uri(place)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update({"format-version": 3}),
        lambda data: data.update({"format-version": 7}),
        lambda data: data.clear(),
        lambda data: data.update({"location": "s3://bucket/t"}),
        lambda data: data.update({"location": "file:///elsewhere"}),
        lambda data: data["properties"].update({"write.data.path": "s3://bucket"}),
        lambda data: data["properties"].update({"write.format.default": "orc"}),
        lambda data: data["snapshots"][-1].update({"manifest-list": "s3://bucket/list.avro"}),
        lambda data: data["snapshots"][-1].update({"manifest-list": "file:///elsewhere/list.avro"}),
        lambda data: data["snapshots"][-1].update({"manifest-list": data["location"] + "/metadata/none.avro"}),
        lambda data: data.update({"current-snapshot-id": 5}),
        lambda data: data.update({"current-schema-id": 5}),
        lambda data: data.update({"statistics": [_statistics(data, "s3://bucket/x")]}),
        lambda data: data.update({"last-sequence-number": 2**63 - 1}),
    ],
    ids=[
        "v3", "v7", "nothing", "bucket", "elsewhere", "data path", "orc", "list in a bucket", "list elsewhere",
        "no list", "no snapshot", "no schema", "statistics", "sequence",
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_taken_is_refused(book: Book, elsewhere: SqlCatalog, change: Any) -> None:
    made = elsewhere.create_table("ns.t", SHAPE)
    made.append(rows(1))
    place = changed(book, made.metadata_location, change)
    with nothing_changes(book), pytest.raises(InvalidInput):
        book.catalog().register_table("default.t", place)
    assert not book.catalog().table_exists("default.t")
    assert book.verify().findings == ()


def _statistics(data: dict[str, Any], place: str) -> dict[str, Any]:
    return {
        "snapshot-id": data["current-snapshot-id"],
        "statistics-path": place,
        "file-size-in-bytes": 1,
        "file-footer-size-in-bytes": 1,
        "blob-metadata": [],
    }


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"\x1f\x8bnot", b"\xff\xfe", b"[" * 5000])
def test_what_is_no_metadata_is_refused(book: Book, data: bytes) -> None:
    book.lake.store.put_new("foreign/x.metadata.json", data)
    with nothing_changes(book), pytest.raises(InvalidInput):
        book.catalog().register_table("default.t", f"{book.lake.store.uri()}/foreign/x.metadata.json")


def test_a_table_of_format_version_1_is_taken_as_2(book: Book, elsewhere: SqlCatalog, clock: ManualClock) -> None:
    made = elsewhere.create_table("ns.t", SHAPE, partition_spec=BY_KIND, properties={"format-version": "1", **QUICK})
    made.append(rows(1, 2))
    made.append(rows(3, kind="b"))
    made.delete("id = 2")
    assert made.format_version == 1
    taken = book.catalog().register_table("default.t", made.metadata_location)
    assert taken.format_version == 2
    # DuckDB does not read manifests of version 1 in a table of version 2.
    table = book.table("t")
    check_ids(book, table, 1, 3, with_duckdb=False)
    insert(table, {"id": 4, "kind": "b"})
    book.catalog().load_table("default.t").append(rows(5))
    check_ids(book, table, 1, 3, 4, 5, with_duckdb=False)
    book.catalog().load_table("default.t").delete("id = 1")
    table.delete("kind = 'b' AND id = 4")
    check_ids(book, table, 3, 5, with_duckdb=False)
    clean(book, clock)
    check_ids(book, table, 3, 5, with_duckdb=False)
    assert len(files_of(book, table)) == len({row["file_path"] for row in files_of(book, table)})


def test_position_deletes_of_a_registered_table_hold(book: Book, elsewhere: SqlCatalog) -> None:
    from by_hand import Hand

    table = numbers(book, "source", [1, 2, 3], properties=QUICK)
    hand = Hand(book, table)
    made = elsewhere.create_table("ns.t", Schema(NestedField(1, "id", LongType())), properties=QUICK)
    made.append(pa.table({"id": pa.array([1, 2, 3], pa.int64())}))
    # The same engine by hand, on a table that is taken first and written then.
    book.catalog().register_table("default.t", made.metadata_location)
    hand = Hand(book, book.table("t"))
    (place,) = hand.live()
    hand.delete_positions((place, 1), about=place)
    check_ids(book, book.table("t"), 1, 3)
    check_ids(book, table, 1, 2, 3)
    assert of_duckdb(hand.loaded.metadata_location) == ["[('id', 1)]", "[('id', 3)]"]
