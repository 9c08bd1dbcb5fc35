"""Published values and shapes that engines are particular about: doubles, NaN, names, ids and orders."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import SortOrder
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AddSortOrderUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSortOrderUpdate,
    SetDefaultSpecUpdate,
)
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import IntegerType, LongType, NestedField

from books import POSTGRESQL, SQLITE, Place
from by_hand import _connection, made
from lake import insert, numbers, own_warehouse  # noqa: F401
from lakebook import Book
from lakebook.errors import IncompatibleSchema, NotAccepted
from lakebook.iceberg.manifests import live_entries, read_manifest_list
from lakebook.lake.table import Table

pytestmark = pytest.mark.parametrize("place", [SQLITE, POSTGRESQL], indirect=True)


@pytest.fixture
def book(place: Place) -> Book:
    return place.open()


def entries(book: Book, table: Table) -> list[Any]:
    """What the published snapshot lists."""
    publisher = book.lake.publisher
    pointer = publisher.publish(table.record)
    assert pointer is not None
    snapshot = publisher.load(pointer).current_snapshot()
    assert snapshot is not None
    manifests = read_manifest_list(publisher.io, snapshot.manifest_list)
    return [entry for manifest in manifests for entry in live_entries(publisher.io, manifest)]


def counted(table: Table, where: str) -> int:
    location = table.metadata_location
    assert location is not None
    found = _connection().execute(f"SELECT count(*) FROM iceberg_scan(?) WHERE {where}", [location]).fetchone()
    assert found is not None
    return int(found[0])


def test_doubles_in_partitions_survive_the_merging_and_rewriting_of_manifests(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, d DOUBLE", partition_by=["d"])
    values = [0.1, -1.5e300, 0.2]
    for number in range(12):
        insert(table, *({"id": number, "d": value} for value in values))
        table.publish()
    table.delete("d = 0.2")
    found = {entry.data_file.partition[0] for entry in entries(book, table)}
    assert found == {0.1, -1.5e300}
    assert counted(table, "d = 0.1") == counted(table, "d < -1e300") == 12
    assert len(table.to_arrow("d = 0.1")) == 12
    assert book.verify().findings == ()


def test_a_file_of_nothing_but_nan_is_not_told_as_one_without_numbers(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, f DOUBLE")
    insert(table, {"id": 1, "f": math.nan}, {"id": 2, "f": None})
    insert(table, {"id": 3, "f": math.nan}, {"id": 4, "f": 1.0})
    counts = [dict(entry.data_file.nan_value_counts or {}) for entry in entries(book, table)]
    assert sorted(counts, key=len) == [{}, {2: 1}]


@pytest.mark.parametrize("name", ["at_day", "id_bucket"])
def test_no_column_gets_the_name_of_a_partition_field(book: Book, name: str) -> None:
    table = book.tables.create("t", "id BIGINT, at DATE, other STRING", partition_by=["day(at)", "bucket(4, id)"])
    with pytest.raises(IncompatibleSchema, match="partition field"), table.update_schema() as update:
        update.add_column(name, "STRING")
    with pytest.raises(IncompatibleSchema, match="partition field"), table.update_schema() as update:
        update.rename_column("other", name)
    assert table.version == 0


def test_a_spec_a_schema_and_an_order_that_are_there_are_not_added_again(book: Book) -> None:
    table = numbers(book, "t", [1])
    catalog = book.catalog()
    before = catalog.load_table("default.t").metadata
    catalog.commit(
        "default.t",
        (),
        (
            made(AddSchemaUpdate, schema=before.schema()),
            made(SetCurrentSchemaUpdate, schema_id=-1),
            made(AddPartitionSpecUpdate, spec=before.spec()),
            made(SetDefaultSpecUpdate, spec_id=-1),
            made(AddSortOrderUpdate, sort_order=SortOrder(order_id=0)),
            made(SetDefaultSortOrderUpdate, sort_order_id=-1),
        ),
    )
    after = catalog.load_table("default.t").metadata
    assert (after.schemas, after.partition_specs, after.sort_orders) == (
        before.schemas,
        before.partition_specs,
        before.sort_orders,
    )
    assert table.version == 1


def test_ids_that_are_taken_are_given_anew(book: Book) -> None:
    table = numbers(book, "t", [1])
    catalog = book.catalog()
    before = catalog.load_table("default.t").metadata
    wider = Schema(*before.schema().fields, NestedField(7, "n", LongType()), schema_id=before.schema().schema_id)
    spec = PartitionSpec(PartitionField(1, 1000, BucketTransform(4), "id_bucket"), spec_id=before.spec().spec_id)
    catalog.commit(
        "default.t",
        (),
        (
            made(AddSchemaUpdate, schema=wider),
            made(SetCurrentSchemaUpdate, schema_id=-1),
            made(AddPartitionSpecUpdate, spec=spec),
            made(SetDefaultSpecUpdate, spec_id=-1),
        ),
    )
    after = catalog.load_table("default.t").metadata
    assert len({item.schema_id for item in after.schemas}) == len(after.schemas) == 2
    assert len({item.spec_id for item in after.partition_specs}) == len(after.partition_specs) == 2
    assert [field.name for field in after.schema().fields] == ["id", "n"]
    assert [field.name for field in table.schema.fields] == ["id", "n"]
    insert(table, {"id": 2, "n": 3})
    assert catalog.load_table("default.t").scan().to_arrow().sort_by("id").to_pylist() == [
        {"id": 1, "n": None},
        {"id": 2, "n": 3},
    ]
    assert book.verify().findings == ()


def test_a_required_column_is_not_added_to_rows_that_have_no_value_of_it(book: Book) -> None:
    table = numbers(book, "t", [1])
    catalog = book.catalog()
    before = catalog.load_table("default.t").metadata
    wider = Schema(*before.schema().fields, NestedField(7, "n", IntegerType(), required=True), schema_id=9)
    with pytest.raises(NotAccepted, match="is required"):
        catalog.commit(
            "default.t",
            (),
            (made(AddSchemaUpdate, schema=wider), made(SetCurrentSchemaUpdate, schema_id=9)),
        )
    assert table.to_arrow().to_pylist() == [{"id": 1}]


def test_a_sorted_table_can_go_back_to_no_order(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT", sort_by=["id"])
    insert(table, {"id": 1})
    catalog = book.catalog()
    catalog.commit(
        "default.t",
        (),
        (
            made(AddSortOrderUpdate, sort_order=SortOrder(order_id=0)),
            made(SetDefaultSortOrderUpdate, sort_order_id=-1),
        ),
    )
    assert catalog.load_table("default.t").sort_order().is_unsorted
    assert table.describe().sort_by == ()
