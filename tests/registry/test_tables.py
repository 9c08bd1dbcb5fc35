"""Tables and namespaces: made, found, listed, described, renamed, dropped; their totals are exact at all times."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC
from typing import Any

import pyarrow as pa
import pytest
from pyarrow.parquet import read_metadata
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from books import Place
from lake import PATIENCE, check_totals, files_of, ids, in_memory, insert, lay, numbers, own_warehouse, records, rows_of  # noqa: F401
from lakebook import Book, failpoints
from lakebook.clock import ManualClock, to_datetime
from lakebook.errors import (
    FilesChanged,
    InvalidInput,
    InvalidName,
    InvalidPage,
    InvalidPartitioning,
    InvalidSchema,
    InvalidTable,
    LakebookError,
    NamespaceAlreadyExists,
    NamespaceNotEmpty,
    NamespaceNotFound,
    TableAlreadyExists,
    TableNotFound,
)
from lakebook.lake.table import Table
from lakebook.pages import every
from lakebook.registry import schema

NOW = 1_700_000_000_123


def names(book: Book, namespace: str = "default", **how: Any) -> list[str]:
    return [table.name for table in book.tables.list(namespace, **how)]


def empty_dropped(book: Book) -> None:
    """Let go of all that dropped tables have left."""
    book.cleaner.expire()
    book.cleaner.delete_expired_temporary_files()
    book.cleaner.expire()


# --- namespaces ----------------------------------------------------------------


def test_a_namespace_is_made_found_listed_and_removed(place: Place) -> None:
    book = place.open(clock=ManualClock(NOW))
    made = book.tables.create_namespace("sales", properties={"owner": "me", "é": "漢 ' \" \\"})
    assert made == book.tables.get_namespace("sales")
    assert made.created_at == to_datetime(NOW)
    for name in ("b", "a", "A", "a.b", "a-b"):
        book.tables.create_namespace(name)
    assert [space.name for space in book.tables.list_namespaces()] == ["A", "a", "a-b", "a.b", "b", "sales"]
    page = book.tables.list_namespaces(limit=2)
    assert [space.name for space in page] == ["A", "a"]
    assert [space.name for space in book.tables.list_namespaces(limit=2, after=page.next)] == ["a-b", "a.b"]
    book.tables.drop_namespace("a")
    with pytest.raises(NamespaceNotFound):
        book.tables.get_namespace("a")
    with pytest.raises(NamespaceNotFound):
        book.tables.drop_namespace("a")
    with pytest.raises(NamespaceAlreadyExists):
        book.tables.create_namespace("sales")
    assert book.tables.get_namespace("sales").properties["owner"] == "me"
    assert book.verify().ok


def test_a_namespace_with_tables_stays_also_while_a_dropped_one_has_files(place: Place) -> None:
    book = place.open(temporary_file_grace=0)
    book.tables.create_namespace("sales")
    numbers(book, "sales.orders", [1, 2])
    with pytest.raises(NamespaceNotEmpty):
        book.tables.drop_namespace("sales")
    book.tables.drop("sales.orders")
    with pytest.raises(NamespaceNotEmpty):
        book.tables.drop_namespace("sales")
    empty_dropped(book)
    book.tables.drop_namespace("sales")
    assert [space.name for space in book.tables.list_namespaces()] == []
    assert book.verify().ok


def test_the_default_namespace_is_there_when_it_is_needed_and_others_are_not(book: Book) -> None:
    assert names(book) == []
    numbers(book, "orders")
    assert [space.name for space in book.tables.list_namespaces()] == ["default"]
    for call in (
        lambda: numbers(book, "sales.orders"),
        lambda: book.tables.rename("orders", "sales.orders"),
        lambda: book.tables.list("sales"),
    ):
        with pytest.raises(NamespaceNotFound):
            call()
    with pytest.raises(TableNotFound):
        book.table("sales.orders")
    assert names(book) == ["orders"]


# --- creating and finding ------------------------------------------------------


def test_a_new_table_is_empty_and_says_all_about_itself(place: Place) -> None:
    book = place.open(clock=ManualClock(NOW))
    book.tables.create_namespace("sales")
    table = book.tables.create(
        "sales.orders",
        "id BIGINT NOT NULL COMMENT 'the key', at TIMESTAMP, tags ARRAY<STRING>, where STRUCT<city: STRING, zip: INT>",
        partition_by=["day(at)", "bucket(16, id)"],
        sort_by=["id desc", "at"],
        properties={"owner": "me"},
    )
    found = table.describe()
    assert (found.namespace, found.name, found.id, found.format) == ("sales", "orders", table.id, "parquet")
    assert (found.compression, found.storage_engine) == ("zstd", "spark")
    assert (found.version, found.schema_version) == (0, 1)
    assert [(c.field_id, c.name, c.type, c.required, c.doc) for c in found.columns] == [
        (1, "id", "long", True, "the key"),
        (2, "at", "timestamptz", False, None),
        (3, "tags", "list<string>", False, None),
        (4, "where", "struct<city: string, zip: int>", False, None),
    ]
    assert found.partition_by == ("day(at)", "bucket(16, id)")
    assert found.sort_by == ("id desc nulls last", "at asc nulls first")
    assert found.properties == {"owner": "me"}
    assert (found.row_count, found.file_count, found.total_size) == (0, 0, 0) == check_totals(book, table)
    assert found.created_at == found.last_modified == to_datetime(NOW)
    assert found.created_at.tzinfo is UTC
    (first,) = table.history()
    assert (first.version, first.operation, first.added_rows, first.summary) == (0, "create", 0, {})
    assert table.to_arrow().schema.names == ["id", "at", "tags", "where"]
    assert list(table.plan()) == []
    assert len(found.table_uuid) == 36
    assert book.verify().ok


def test_a_table_is_found_by_every_form_of_its_name(book: Book) -> None:
    book.tables.create_namespace("a.b")
    table = book.tables.create("a.b.orders", "id BIGINT")
    assert (table.namespace, table.name) == ("a.b", "orders")
    assert book.table("a.b.orders").id == book.table("orders", namespace="a.b").id == table.id
    dotted = book.tables.create("x.y", "id BIGINT", namespace="a.b")
    assert (dotted.namespace, dotted.name) == ("a.b", "x.y")
    assert book.tables.get("x.y", namespace="a.b").id == dotted.id
    for missing in ("orders", "a.b.x.y", "a.b.Orders", "a.orders"):
        with pytest.raises(TableNotFound):
            book.table(missing)


HOSTILE_NAMES: list[Any] = [
    *("", ".", "..", "a b", "a/b", "a\0", "é", "a\n", "x" * 250, "'; DROP TABLE tables; --"),
    *("\ud800", None, 7, b"a", ["a"]),
]


@in_memory
def test_a_hostile_name_is_refused_everywhere(book: Book) -> None:
    numbers(book, "orders")
    for name in HOSTILE_NAMES:
        calls: list[Any] = [
            lambda name: book.tables.create(name, "id BIGINT"),
            lambda name: book.tables.rename("orders", name),
            lambda name: book.tables.create_namespace(name),
            lambda name: book.tables.get_namespace(name),
            lambda name: book.tables.drop_namespace(name),
            lambda name: book.tables.list(name),
            lambda name: book.table(name),
            lambda name: book.tables.drop(name),
        ]
        if name is not None:
            calls.append(lambda name: book.tables.create("t", "id BIGINT", namespace=name))
        for call in calls:
            with pytest.raises(InvalidName):
                call(name)
    for name in ("a.", ".a", "default."):
        with pytest.raises(InvalidName):
            book.tables.create(name, "id BIGINT")
    assert names(book) == ["orders"]


def test_the_same_name_cannot_be_used_twice(book: Book) -> None:
    first = numbers(book, "orders", [1])
    with pytest.raises(TableAlreadyExists):
        numbers(book, "orders")
    assert book.table("orders").id == first.id
    # Names differ in case, and namespaces are apart.
    numbers(book, "Orders")
    book.tables.create_namespace("sales")
    numbers(book, "sales.orders")
    assert names(book) == ["Orders", "orders"]
    assert names(book, "sales") == ["orders"]


def test_of_two_who_create_the_same_table_at_once_one_wins(shared_place: Place) -> None:
    books = [shared_place.open(), shared_place.open()]
    gate = threading.Barrier(2)
    results: list[Table | LakebookError] = []

    def create(book: Book) -> None:
        gate.wait(PATIENCE)
        try:
            results.append(numbers(book, "orders"))
        except LakebookError as error:
            results.append(error)

    threads = [threading.Thread(target=create, args=(book,)) for book in books]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(type(result).__name__ for result in results) == ["Table", "TableAlreadyExists"]
    assert books[0].table("orders").id == books[1].table("orders").id
    assert books[0].verify().ok


@in_memory
def test_a_schema_can_come_from_arrow_and_pyiceberg_too(book: Book) -> None:
    sources: list[Any] = [
        "id BIGINT NOT NULL, name STRING",
        pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())]),
        Schema(NestedField(17, "id", LongType(), required=True), NestedField(4, "name", StringType())),
        pa.table({"id": [1], "name": ["x"]}).cast(
            pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
        ),
    ]
    for number, source in enumerate(sources):
        table = book.tables.create(f"t{number}", source)
        columns = [(c.field_id, c.name, c.type, c.required) for c in table.describe().columns]
        assert columns == [(1, "id", "long", True), (2, "name", "string", False)]


@in_memory
def test_what_no_table_can_be_is_refused_and_leaves_nothing(book: Book) -> None:
    calls: list[tuple[type[LakebookError], dict[str, Any]]] = [
        (InvalidTable, {"format": "avro"}),
        (InvalidTable, {"format": None}),
        (InvalidTable, {"compression": "brotli"}),
        (InvalidTable, {"format": "json", "compression": "zstd"}),
        (InvalidTable, {"format": "json", "partition_by": ["id"]}),
        (InvalidTable, {"format": "json", "sort_by": ["id"]}),
        (InvalidSchema, {"schema": "id NOTHING"}),
        (InvalidSchema, {"schema": "id INT, ID INT"}),
        (InvalidSchema, {"schema": ""}),
        (InvalidSchema, {"schema": 5}),
        (InvalidPartitioning, {"partition_by": ["missing"]}),
        (InvalidPartitioning, {"partition_by": ["day(id)"]}),
        (InvalidPartitioning, {"partition_by": "id"}),
        (InvalidPartitioning, {"sort_by": ["missing desc"]}),
        (InvalidTable, {"properties": {"": "x"}}),
        (InvalidTable, {"properties": {"a": 1}}),
        (InvalidInput, {"properties": {"a": "\0"}}),
        (InvalidInput, {"properties": {"\ud800": "x"}}),
        (InvalidTable, {"properties": {"lakebook.history.seconds": "-1"}}),
        (InvalidTable, {"properties": {"lakebook.history.versions": "0"}}),
        (InvalidTable, {"properties": {"lakebook.history.seconds": "nan"}}),
    ]
    for error, options in calls:
        given = {"schema": "id BIGINT", **options}
        with pytest.raises(error):
            book.tables.create("orders", given.pop("schema"), **given)
    assert names(book) == []
    assert records(book, schema.tables) == []
    assert book.verify().ok


@in_memory
def test_every_compression_is_used_and_recorded(book: Book) -> None:
    for codec in ("zstd", "snappy", "gzip", "lz4", "none"):
        table = book.tables.create(codec, "id BIGINT, text STRING", compression=codec)
        insert(table, *({"id": number, "text": "abc" * 100} for number in range(100)))
        (file,) = files_of(book, table)
        assert file["is_compressed"] is (codec != "none")
        assert table.describe().compression == codec
        assert table.to_arrow("id = 50").to_pylist() == [{"id": 50, "text": "abc" * 100}]
        with book.lake.store.open(file["file_path"]) as stream:
            column = read_metadata(stream).row_group(0).column(1)
        assert column.compression == {"none": "UNCOMPRESSED"}.get(codec, codec.upper())


# --- listing -------------------------------------------------------------------


def test_tables_come_in_order_in_pages_and_by_prefix(book: Book) -> None:
    for name in ("b", "a_1", "a1", "a-1", "A", "a", "c"):
        numbers(book, name)
    book.tables.drop("c")
    assert names(book) == ["A", "a", "a-1", "a1", "a_1", "b"]
    assert names(book, prefix="a") == ["a", "a-1", "a1", "a_1"]
    assert names(book, prefix="a_") == ["a_1"]
    assert names(book, prefix=".") == []
    page = book.tables.list(limit=4)
    assert [table.name for table in page] == ["A", "a", "a-1", "a1"]
    assert [table.name for table in book.tables.list(limit=4, after=page.next)] == ["a_1", "b"]
    listed = every(lambda after: book.tables.list(limit=2, after=after))
    assert [table.name for table in listed] == ["A", "a", "a-1", "a1", "a_1", "b"]
    for limit in (0, -1, True, 2.5):
        with pytest.raises(InvalidPage):
            book.tables.list(limit=limit)  # type: ignore[arg-type]


def test_a_hostile_prefix_or_place_is_refused(book: Book) -> None:
    table = numbers(book, "orders")
    hostile: list[Any] = ["a\0", "\ud800", 3, b"a"]
    for text in hostile:
        for how in ({"prefix": text}, {"after": text}):
            with pytest.raises(InvalidInput):
                book.tables.list(**how)
        with pytest.raises(InvalidInput):
            book.tables.list_namespaces(after=text)
    places: list[Any] = ["x", 1.5, 2**70, b"1"]
    for after in places:
        with pytest.raises(InvalidInput):
            table.history(after=after)


# --- renaming and dropping -----------------------------------------------------


def test_a_table_keeps_all_but_its_name_when_it_is_renamed(book: Book) -> None:
    book.tables.create_namespace("sales")
    table = numbers(book, "orders", [1, 2], [3])
    before = table.describe()
    renamed = book.tables.rename("orders", "bills")
    assert (renamed.namespace, renamed.name, renamed.id) == ("default", "bills", table.id)
    moved = book.tables.rename("bills", "sales.orders")
    assert (moved.namespace, moved.name, moved.id) == ("sales", "orders", table.id)
    assert names(book) == []
    assert ids(book.table("sales.orders")) == [1, 2, 3]
    # The handle from before follows the table.
    assert ids(table) == [1, 2, 3]
    after = table.describe()
    assert (after.namespace, after.name) == ("sales", "orders")
    assert (after.table_uuid, after.version, after.row_count) == (before.table_uuid, 2, 3)
    insert(table, {"id": 4})
    assert ids(moved) == [1, 2, 3, 4]
    assert book.tables.rename("sales.orders", "orders").namespace == "sales"
    with pytest.raises(TableNotFound):
        book.table("orders")
    assert book.tables.rename("orders", "x.y", namespace="sales", new_namespace="default").name == "x.y"
    assert book.verify().ok


def test_a_table_cannot_take_the_name_of_another(book: Book) -> None:
    first, second = numbers(book, "a", [1]), numbers(book, "b", [2])
    with pytest.raises(TableAlreadyExists):
        book.tables.rename("a", "b")
    with pytest.raises(TableNotFound):
        book.tables.rename("c", "d")
    assert (ids(book.table("a")), ids(book.table("b"))) == ([1], [2])
    book.tables.drop("b")
    assert book.tables.rename("a", "b").id == first.id != second.id
    assert ids(book.table("b")) == [1]


def test_a_dropped_table_is_gone_at_once_for_everyone(place: Place) -> None:
    book = place.open(temporary_file_grace=0)
    table = numbers(book, "orders", [1, 2])
    book.tables.drop("orders")
    assert names(book) == []
    with pytest.raises(TableNotFound):
        book.tables.drop("orders")
    calls: list[Any] = [
        lambda: book.table("orders"),
        table.describe,
        table.count,
        table.plan,
        table.pin,
        table.to_arrow,
        table.metadata_history,
        lambda: table.record,
        lambda: table.min_max("id"),
        lambda: insert(table, {"id": 3}),
        lambda: table.add_files(["x.parquet"]),
        lambda: table.appender(),
        lambda: table.delete("id = 1"),
        lambda: table.set_properties(a="b"),
        lambda: book.tables.rename("orders", "bills"),
    ]
    for call in calls:
        with pytest.raises(TableNotFound):
            call()
    with pytest.raises(TableNotFound), table.update_schema() as update:
        update.add_column("x", "INT")
    assert book.verify().ok
    empty_dropped(book)
    for call in calls:
        with pytest.raises(TableNotFound):
            call()


def test_a_name_can_be_used_again_after_a_drop_and_the_id_cannot(place: Place) -> None:
    book = place.open(temporary_file_grace=0)
    seen: set[int] = set()
    uuids: set[str] = set()
    for number in range(4):
        table = numbers(book, "orders", [number])
        assert table.id not in seen
        assert ids(book.table("orders")) == [number]
        assert [file["id"] for file in files_of(book, table)] == [1]
        seen.add(table.id)
        uuids.add(table.describe().table_uuid)
        book.tables.drop("orders")
        if number % 2:
            # Also when the newest row of all is gone.
            empty_dropped(book)
            assert records(book, schema.tables) == []
    assert len(uuids) == 4
    assert book.verify().ok


# --- properties ----------------------------------------------------------------

HOSTILE = {"a.b": "c", "é漢": "😀", "quote'\"`": "\\ \n\t '; DROP TABLE tables; --", "x" * 4096: "y" * 4096, "e": ""}


def test_properties_are_merged_removed_and_make_no_version(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT", properties={"a": "1", "b": "2"})
    assert table.set_properties(b="3", c="4") == {"a": "1", "b": "3", "c": "4"}
    assert table.set_properties(a=None, missing=None) == {"b": "3", "c": "4"}
    assert table.set_properties(**HOSTILE) == {"b": "3", "c": "4", **HOSTILE}
    assert book.table("t").describe().properties == {"b": "3", "c": "4", **HOSTILE}
    assert table.version == 0
    assert len(table.history()) == 1
    with table.update_schema() as update:
        update.add_column("x", "INT")
    assert table.describe().properties == {"b": "3", "c": "4", **HOSTILE}
    assert book.verify().ok


def test_properties_that_change_nothing_are_no_event(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT", properties={"a": "1"})
    before = len(list(book.events.read(book.events.beginning()).events))
    table.set_properties(a="1", b=None)
    assert len(list(book.events.read(book.events.beginning()).events)) == before


@in_memory
def test_bad_properties_are_refused_and_change_nothing(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT", properties={"a": "1"})
    bad: list[dict[str, Any]] = [
        {"a": 1},
        {"": "x"},
        {"a": "x" * 4097},
        {"a\0": "x"},
        {"a": "\0"},
        {"a": "\ud800"},
        {"\0": None},
        {"lakebook.history.seconds": "a day"},
        {"lakebook.history.seconds": "inf"},
        {"lakebook.history.versions": "1.5"},
        {"lakebook.history.versions": "0"},
        {f"p{number}": "x" for number in range(1001)},
    ]
    for changes in bad[:6] + bad[7:]:
        with pytest.raises(InvalidInput):
            table.set_properties(**changes)
    # To remove what cannot be there is no harm.
    table.set_properties(**bad[6])
    assert table.describe().properties == {"a": "1"}


# --- totals --------------------------------------------------------------------


def test_the_totals_are_exact_after_every_operation(place: Place) -> None:
    book = place.open(temporary_file_grace=0)
    table = book.tables.create("t", "id BIGINT, text STRING")
    assert check_totals(book, table) == (0, 0, 0)
    insert(table, *({"id": number, "text": "x" * number} for number in range(10)))
    insert(table, {"id": 10}, {"id": 11})
    assert check_totals(book, table)[:2] == (12, 2)
    lay(book, "in/a.parquet", rows_of(table, [{"id": 20}, {"id": 21}, {"id": 22}]))
    table.add_files(["in/a.parquet"])
    assert check_totals(book, table)[:2] == (15, 3)
    with table.appender(max_rows=2, files_per_commit=3) as appender:
        for number in range(30, 35):
            appender.append({"id": number})
    assert check_totals(book, table)[:2] == (20, 6)
    with table.update_schema() as update:
        update.drop_column("text").add_column("text", "INT")
    assert check_totals(book, table)[:2] == (20, 6)
    table.set_properties(a="b")
    book.tables.rename("t", "u")
    assert check_totals(book, table)[:2] == (20, 6)
    assert table.delete("id < 10").removed_rows == 10
    assert check_totals(book, table)[:2] == (10, 5)
    table.delete("id >= 20 AND id < 30")
    assert check_totals(book, table)[:2] == (7, 4)
    book.cleaner.expire(seconds=0, versions=1)
    assert check_totals(book, table)[:2] == (7, 4)
    assert book.cleaner.delete_expired_temporary_files().files == 2
    assert check_totals(book, table)[:2] == (7, 4)
    book.cleaner.sweep()
    table.delete("true")
    assert check_totals(book, table) == (0, 0, 0)
    insert(table, {"id": 1})
    assert check_totals(book, table)[:2] == (1, 1)
    assert book.verify().ok


def test_a_refused_change_leaves_totals_version_and_history_as_they_were(book: Book) -> None:
    table = numbers(book, "t", [1, 2])
    before = (table.describe(), list(table.history()))
    no_table: Any = [{"id": 1}]
    calls: list[Callable[[], Any]] = [
        lambda: table.insert_arrow(pa.table({"id": ["x"]})),
        lambda: table.insert_arrow(pa.table({"other": [1]})),
        lambda: table.insert_arrow(no_table),
        lambda: table.insert(no_table),
        lambda: table.add_files(["missing.parquet"]),
        lambda: table.delete(None),
        lambda: table.delete("id = 1"),
        lambda: table.delete("nothing = 1"),
    ]
    for call in calls:
        with pytest.raises(LakebookError):
            call()
    assert (table.describe(), list(table.history())) == before
    assert check_totals(book, table)[:2] == (2, 1)
    assert book.verify().ok


def test_of_two_deletions_of_the_same_file_the_second_is_refused(book: Book) -> None:
    table = numbers(book, "t", [1], [2], [3])
    busy = [True]

    def be_faster() -> None:
        if busy[0]:
            busy[0] = False
            table.delete("id = 2")

    with failpoints.armed("lease.taken", be_faster), pytest.raises(FilesChanged) as refused:
        table.delete("id <= 2")
    assert refused.value.transient
    assert ids(table) == [1, 3]
    assert check_totals(book, table)[:2] == (2, 2)
    # On other files they do not disturb each other.
    busy[0] = True
    insert(table, {"id": 2})
    with failpoints.armed("lease.taken", be_faster):
        table.delete("id = 3")
    assert ids(table) == [1]
    assert book.verify().ok


def test_history_tells_each_version_the_newest_first(book: Book) -> None:
    table = numbers(book, "t", [1, 2, 3], [4])
    table.delete("id = 4", properties={"why": "wrong"})
    with table.update_schema() as update:
        update.add_column("x", "INT")
    found = list(table.history())
    assert [(v.version, v.operation, v.schema_version) for v in found] == [
        (4, "schema", 2),
        (3, "delete", 1),
        (2, "append", 1),
        (1, "append", 1),
        (0, "create", 1),
    ]
    assert [(v.added_files, v.added_rows, v.removed_files, v.removed_rows) for v in found] == [
        (0, 0, 0, 0),
        (0, 0, 1, 1),
        (1, 1, 0, 0),
        (1, 3, 0, 0),
        (0, 0, 0, 0),
    ]
    assert found[1].removed_size == found[2].added_size > 0
    assert [version.summary for version in found] == [{}, {"why": "wrong"}, {}, {}, {}]
    assert len({version.commit_id for version in found}) == 5
    times = [version.committed_at for version in found]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 5
    page = table.history(limit=2)
    assert [version.version for version in page] == [4, 3]
    assert [version.version for version in table.history(limit=2, after=page.next)] == [2, 1]
    listed = every(lambda after: table.history(limit=1, after=after))
    assert [version.version for version in listed] == [4, 3, 2, 1, 0]
    assert list(table.history(after=0)) == []
    assert len(table.history(after=2**62)) == 5


def test_each_change_of_a_table_is_an_event(book: Book) -> None:
    table = numbers(book, "t", [1])
    table.delete("true")
    with table.update_schema() as update:
        update.add_column("x", "INT")
    book.tables.drop("t")
    events = list(book.events.read(book.events.beginning()).events)
    seen = [(event.table, event.operation) for event in events]
    assert seen[:3] == [("tables", "insert"), ("table_metadata", "insert"), ("table_stats", "insert")]
    files = [event for event in events if event.table == "table_files"]
    assert [event.operation for event in files] == ["insert", "update"]
    assert files[0].row_after is not None and files[0].row_after["to_version"] is None
    assert files[1].row_after is not None and files[1].row_after["to_version"] == 2
    totals = [event.row_after["row_count"] for event in events if event.table == "table_stats" and event.row_after]
    assert totals == [0, 1, 0]
    last = events[-1]
    assert last.table == "tables" and last.row_after is not None and last.row_after["deleted_at"] is not None
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
