"""The book as a PyIceberg catalog: namespaces, tables, and tables that are created together with their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import (
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    NoSuchViewError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.table.update import AssertCreate
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType, TimestampNanoType

from books import Place
from by_hand import QUICK, Hand, check, check_ids, check_versions, nothing_changes, present_clock, settle
from lake import (
    files_of,
    ids,
    insert,
    numbers,
    objects,
    own_warehouse,  # noqa: F401
    records,
)
from lakebook import Book
from lakebook.clock import ManualClock
from lakebook.errors import InvalidInput, LakebookError
from lakebook.iceberg.catalog import LakebookCatalog
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
def catalog(book: Book) -> LakebookCatalog:
    return book.catalog()


def rows(*values: int, kind: str = "a") -> pa.Table:
    return pa.table({"id": pa.array(values, pa.int64()), "kind": [kind] * len(values)})


def test_namespaces_are_made_listed_changed_and_dropped(catalog: LakebookCatalog, book: Book) -> None:
    catalog.create_namespace("sales", {"owner": "me"})
    assert ("sales",) in catalog.list_namespaces()
    assert catalog.list_namespaces("sales") == []
    with pytest.raises(NamespaceAlreadyExistsError):
        catalog.create_namespace("sales")
    catalog.create_namespace_if_not_exists("sales")
    assert catalog.load_namespace_properties("sales") == {"owner": "me"}
    done = catalog.update_namespace_properties("sales", {"owner", "never"}, {"team": "x"})
    assert (done.removed, done.updated, done.missing) == (["owner"], ["team"], ["never"])
    assert catalog.load_namespace_properties("sales") == {"team": "x"}
    catalog.create_table("sales.t", SHAPE)
    with pytest.raises(NamespaceNotEmptyError):
        catalog.drop_namespace("sales")
    catalog.create_namespace("empty")
    catalog.drop_namespace("empty")
    assert catalog.namespace_exists("sales")
    assert not catalog.namespace_exists("empty")
    assert book.verify().findings == ()


def test_what_is_not_there_is_told_in_the_words_of_the_library(catalog: LakebookCatalog) -> None:
    for action in (
        lambda: catalog.load_namespace_properties("none"),
        lambda: catalog.drop_namespace("none"),
        lambda: catalog.list_tables("none"),
        lambda: catalog.list_namespaces("none"),
        lambda: catalog.update_namespace_properties("none", set(), {"a": "b"}),
        lambda: catalog.create_table("none.t", SHAPE),
        lambda: catalog.create_table_transaction("none.t", SHAPE),
        lambda: catalog.load_namespace_properties("two.levels"),
    ):
        with pytest.raises(NoSuchNamespaceError):
            action()
    for other in (
        lambda: catalog.load_table("default.none"),
        lambda: catalog.load_table("none.none"),
        lambda: catalog.load_table("one.two.three"),
        lambda: catalog.drop_table("default.none"),
        lambda: catalog.purge_table("default.none"),
        lambda: catalog.rename_table("default.none", "default.other"),
    ):
        with pytest.raises(NoSuchTableError):
            other()
    assert not catalog.table_exists("default.none")
    assert not catalog.table_exists("none.none")
    assert not catalog.view_exists("default.none")
    with pytest.raises(NoSuchViewError):
        catalog.load_view("default.none")


@pytest.mark.parametrize("name", ["a/b", "..", "a\0b", "x" * 300, "ä"])
def test_names_that_cannot_be_are_refused(catalog: LakebookCatalog, book: Book, name: str) -> None:
    for action in (
        lambda: catalog.create_table(("default", name), SHAPE),
        lambda: catalog.create_namespace((name,)),
        lambda: catalog.create_table((name, "t"), SHAPE),
    ):
        with nothing_changes(book), pytest.raises((LakebookError, NoSuchNamespaceError)):
            action()


def test_a_table_is_created_loaded_written_renamed_and_dropped(
    catalog: LakebookCatalog, book: Book, clock: ManualClock
) -> None:
    order = SortOrder(SortField(1, IdentityTransform()), order_id=1)
    made = catalog.create_table(
        "default.t", SHAPE, partition_spec=BY_KIND, sort_order=order, properties={"user.a": "b", **QUICK}
    )
    table = book.table("t")
    assert (table.version, table.record.table_uuid) == (0, str(made.metadata.table_uuid))
    assert table.describe().partition_by
    assert table.describe().sort_by
    assert table.metadata.properties["user.a"] == "b"
    check(book, table)
    made.append(rows(1, 2))
    insert(table, {"id": 3, "kind": "b"})
    check_ids(book, table, 1, 2, 3)
    with pytest.raises(TableAlreadyExistsError):
        catalog.create_table("default.t", SHAPE)
    assert catalog.create_table_if_not_exists("default.t", SHAPE).metadata.table_uuid == made.metadata.table_uuid
    catalog.create_namespace("sales")
    renamed = catalog.rename_table("default.t", "sales.u")
    assert renamed.name() == ("sales", "u")
    assert catalog.list_tables("default") == []
    assert catalog.list_tables("sales") == [("sales", "u")]
    moved = book.table("u", namespace="sales")
    renamed.append(rows(4))
    check_ids(book, moved, 1, 2, 3, 4)
    other = catalog.create_table("default.t", SHAPE)
    with pytest.raises(TableAlreadyExistsError):
        catalog.rename_table("sales.u", "default.t")
    with pytest.raises(NoSuchNamespaceError):
        catalog.rename_table("sales.u", "none.t")
    catalog.drop_table("sales.u")
    assert not catalog.table_exists("sales.u")
    with pytest.raises(NoSuchTableError):
        renamed.append(rows(5))
    clock.advance(2 * DAY)
    book.cleaner.expire(wait=True)
    clock.advance(2 * DAY)
    book.cleaner.delete_expired_temporary_files()
    book.cleaner.sweep()
    assert [path for path in objects(book) if str(made.metadata.table_uuid) in path] == []
    other.refresh()
    other.append(rows(9))
    check_ids(book, book.table("t"), 9)


def test_only_tables_of_parquet_are_shown(catalog: LakebookCatalog, book: Book) -> None:
    book.tables.create("plain", "id BIGINT", format="json")
    numbers(book, "t", [1])
    assert catalog.list_tables("default") == [("default", "t")]
    assert not catalog.table_exists("default.plain")
    with pytest.raises(NoSuchTableError):
        catalog.load_table("default.plain")
    check_ids(book, book.table("t"), 1)


def test_a_table_that_is_loaded_shows_every_acknowledged_version(catalog: LakebookCatalog, book: Book) -> None:
    table = numbers(book, "t", [1])
    loaded = catalog.load_table("default.t")
    for number in range(2, 5):
        insert(table, {"id": number})
        loaded.refresh()
        assert sorted(loaded.scan().to_arrow()["id"].to_pylist()) == list(range(1, number + 1))
    check_ids(book, table, 1, 2, 3, 4)


def test_what_was_loaded_can_be_read_for_a_while(catalog: LakebookCatalog, book: Book, clock: ManualClock) -> None:
    table = numbers(book, "t", [1, 2])
    loaded = catalog.load_table("default.t")
    table.delete("true")
    insert(table, {"id": 3})
    book.cleaner.expire(seconds=0, versions=1)
    assert sorted(loaded.scan().to_arrow()["id"].to_pylist()) == [1, 2]
    clock.advance(DAY)
    book.cleaner.expire(seconds=0, versions=1, wait=True)
    clock.advance(GRACE + 1)
    book.cleaner.delete_expired_temporary_files()
    check_ids(book, table, 3)
    assert len(files_of(book, table)) == 1


# --- created together with rows ---------------------------------------------------------------


def test_a_table_is_created_together_with_its_rows(catalog: LakebookCatalog, book: Book) -> None:
    with catalog.create_table_transaction("default.t", SHAPE, partition_spec=BY_KIND) as transaction:
        transaction.append(rows(1, 2))
        transaction.append(rows(3, kind="b"))
        assert not catalog.table_exists("default.t")
    table = book.table("t")
    check_ids(book, table, 1, 2, 3)
    assert ids(table, "kind = 'b'") == [3]
    settle(book)
    assert records(book, schema.footer_debts) == []
    insert(table, {"id": 4, "kind": "c"})
    catalog.load_table("default.t").append(rows(5))
    check_ids(book, table, 1, 2, 3, 4, 5)


def test_a_table_that_is_created_with_rows_has_a_version_of_its_snapshots_time(
    catalog: LakebookCatalog, book: Book
) -> None:
    with catalog.create_table_transaction("default.t", SHAPE) as transaction:
        transaction.append(rows(1, 2))
    table = book.table("t")
    check_ids(book, table, 1, 2)
    check_versions(book, table)
    first = table.snapshots()[0]
    assert first.version == table.version


def test_a_table_is_created_by_a_transaction_that_changes_it_at_once(catalog: LakebookCatalog, book: Book) -> None:
    with catalog.create_table_transaction("default.t", SHAPE) as transaction:
        with transaction.update_schema() as change:
            change.add_column("more", StringType())
        transaction.set_properties({"user.a": "b"})
    table = book.table("t")
    assert [field.name for field in table.schema.fields] == ["id", "kind", "more"]
    insert(table, {"id": 1, "kind": "a", "more": "x"})
    with table.update_schema() as update:
        update.add_column("last", "INT")
    insert(table, {"id": 2, "last": 3})
    check_ids(book, table, 1, 2)
    assert table.metadata.properties["user.a"] == "b"


def test_of_two_who_create_a_table_one_is_told_that_it_exists(catalog: LakebookCatalog, book: Book) -> None:
    one = catalog.create_table_transaction("default.t", SHAPE)
    other = catalog.create_table_transaction("default.t", SHAPE)
    one.append(rows(1))
    other.append(rows(2))
    one.commit_transaction()
    with nothing_changes(book), pytest.raises(Exception, match="exists") as caught:
        other.commit_transaction()
    assert type(caught.value).__name__ in ("TableAlreadyExistsError", "CommitFailedException")
    check_ids(book, book.table("t"), 1)


def test_a_creation_with_other_requirements_is_refused(catalog: LakebookCatalog, book: Book) -> None:
    table = numbers(book, "t", [1])
    hand = Hand(book, table)
    with nothing_changes(book), pytest.raises(Exception, match="exist"):
        catalog.commit("default.new", (AssertCreate(), hand.requirements()[1]), ())
    with nothing_changes(book), pytest.raises((InvalidInput, TableAlreadyExistsError)):
        catalog.commit("default.t", (AssertCreate(),), ())
    with nothing_changes(book), pytest.raises(InvalidInput):
        catalog.commit_all([("default.new", (AssertCreate(),), ()), ("default.t", (), ())])
    catalog.commit_all([])
    check_ids(book, table, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"properties": {"format-version": "3"}},
        {"properties": {"format-version": "1"}},
        {"properties": {"write.format.default": "orc"}},
        {"properties": {"write.data.path": "s3://elsewhere"}},
        {"properties": {"lakebook.history.versions": "0"}},
        {"properties": {"user.nul": "a\0b"}},
        {"location": "s3://bucket/t"},
        {"location": "file:///elsewhere/t"},
        {"schema": Schema(NestedField(1, "at", TimestampNanoType()))},
        {"schema": Schema(NestedField(1, "a\0b", LongType()))},
        {"schema": Schema(NestedField(1, "id", LongType()), NestedField(2, "ID", LongType()))},
    ],
    ids=lambda options: str(next(iter(options.values())))[:30].replace("\0", "0"),
)
def test_tables_that_cannot_be_are_not_created(book: Book, catalog: LakebookCatalog, options: dict[str, Any]) -> None:
    given = {"schema": SHAPE, **options}
    with nothing_changes(book), pytest.raises(InvalidInput):
        catalog.create_table("default.t", **given)
    assert not catalog.table_exists("default.t")


def test_a_location_of_ones_own_is_taken(book: Book, catalog: LakebookCatalog) -> None:
    place = f"{book.lake.store.uri()}/lake/t"
    made = catalog.create_table("default.t", SHAPE, location=place + "/")
    assert made.location() == place
    made.append(rows(1))
    insert(book.table("t"), {"id": 2})
    check_ids(book, book.table("t"), 1, 2)


def test_two_tables_in_one_location_do_each_other_no_harm(
    book: Book, catalog: LakebookCatalog, clock: ManualClock
) -> None:
    one = catalog.create_table("default.one", SHAPE)
    two = catalog.create_table("default.two", SHAPE, location=one.location())
    one.append(rows(1))
    two.append(rows(2))
    insert(book.table("two"), {"id": 3})
    check_ids(book, book.table("one"), 1)
    check_ids(book, book.table("two"), 2, 3)
    catalog.drop_table("default.one")
    for _ in range(2):
        clock.advance(2 * DAY)
        book.cleaner.expire(wait=True)
        clock.advance(2 * DAY)
        book.cleaner.delete_expired_temporary_files()
        book.cleaner.sweep()
    check_ids(book, book.table("two"), 2, 3)


def test_the_library_opens_a_book_by_its_name(shared_place: Place) -> None:
    book = shared_place.open()
    numbers(book, "t", [1])
    more = {"warehouse": shared_place.settings["warehouse"]} if "warehouse" in shared_place.settings else {}
    catalog = load_catalog(
        "mine", **{"py-catalog-impl": "lakebook.iceberg.LakebookCatalog", "uri": shared_place.target, **more}
    )
    assert isinstance(catalog, LakebookCatalog)
    try:
        loaded = catalog.load_table("default.t")
        loaded.append(pa.table({"id": pa.array([2], pa.int64())}))
        assert loaded.current_snapshot() is not None
        assert loaded.refs()[MAIN_BRANCH].snapshot_id == loaded.metadata.current_snapshot_id
    finally:
        catalog.close()
    check_ids(book, book.table("t"), 1, 2)


def test_a_catalog_without_a_book_is_refused() -> None:
    with pytest.raises(InvalidInput):
        LakebookCatalog("mine")


def test_every_page_of_names_is_listed(book: Book, catalog: LakebookCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    from lakebook.iceberg import catalog as module

    monkeypatch.setattr(module, "CHUNK", 2)
    made: list[Callable[[], object]] = []
    for number in range(5):
        catalog.create_namespace(f"space{number}")
        made.append(lambda number=number: numbers(book, f"t{number}"))  # type: ignore[misc]
    for action in made:
        action()
    assert [name for _, name in catalog.list_tables("default")] == [f"t{number}" for number in range(5)]
    spaces = [space[0] for space in catalog.list_namespaces()]
    assert sorted(spaces) == ["default", *(f"space{number}" for number in range(5))]
    assert len(spaces) == len(set(spaces))
