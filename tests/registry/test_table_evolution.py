"""A table's schema changes, and every file that was written before is still read right."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from books import Place
from lake import check_totals, ids, in_memory, insert, lay, numbers, own_warehouse, rows_of, with_ids  # noqa: F401
from lakebook import Book
from lakebook.errors import (
    IncompatibleSchema,
    InvalidFile,
    InvalidPredicate,
    InvalidSchema,
    LakebookError,
    SchemaChanged,
)
from lakebook.iceberg.evolution import SchemaUpdate
from lakebook.lake.table import Table

NESTED = (
    "id BIGINT NOT NULL, s STRUCT<a: INT, b: STRING>, l ARRAY<STRUCT<x: INT, y: FLOAT>>, m MAP<STRING, STRUCT<p: INT>>"
)
FULL = {"id": 1, "s": {"a": 5, "b": "five"}, "l": [{"x": 1, "y": 2.5}, None], "m": [("k", {"p": 3}), ("n", None)]}
EMPTY = {"id": 2, "s": {"a": None, "b": None}, "l": [], "m": []}
NULLS = {"id": 3, "s": None, "l": None, "m": None}


def by_id(table: Table, where: Any = None, **how: Any) -> dict[int, dict[str, Any]]:
    found = sorted(table.to_arrow(where, **how).to_pylist(), key=lambda row: row["id"])
    return {row.pop("id"): row for row in found}


def matches(table: Table, where: str) -> tuple[int, list[int]]:
    """How many files are planned for a predicate, and the ids it finds."""
    return len(table.plan(where).files), ids(table, where)


# --- columns -------------------------------------------------------------------


def test_an_added_column_is_null_in_older_files(book: Book) -> None:
    table = numbers(book, "t", [1, 2])
    with table.update_schema() as update:
        update.add_column("text", "STRING", doc="a text")
    insert(table, {"id": 3, "text": "three"}, {"id": 4})
    assert by_id(table) == {1: {"text": None}, 2: {"text": None}, 3: {"text": "three"}, 4: {"text": None}}
    assert matches(table, "text = 'three'") == (1, [3])
    assert matches(table, "text IS NULL") == (2, [1, 2, 4])
    assert matches(table, "text IS NOT NULL") == (1, [3])
    assert matches(table, "text != 'x'") == (1, [3])
    assert matches(table, "NOT text = 'three'") == (0, [])
    assert table.min_max("text") is not None
    found = table.min_max("text")
    assert found is not None and (found.least, found.largest) == ("three", "three")
    assert table.to_arrow(columns=["text"]).column("text").to_pylist().count(None) == 3
    assert [(c.field_id, c.name, c.doc) for c in table.describe().columns] == [(1, "id", None), (2, "text", "a text")]
    assert book.verify().ok


@in_memory
def test_only_younger_columns_can_be_read_of_an_older_file(book: Book) -> None:
    table = numbers(book, "t", [1, 2], [3])
    with table.update_schema() as update:
        update.add_column("a", "ARRAY<INT>").add_column("s", "STRUCT<x: INT, y: MAP<STRING, INT>>")
    found = table.to_arrow(columns=["s", "a"])
    assert found.schema.names == ["s", "a"]
    assert found.to_pylist() == [{"s": None, "a": None}] * 3
    assert table.to_arrow("s.x IS NULL", columns=["a"]).num_rows == 3
    assert table.to_arrow("s.x = 1", columns=["a"]).num_rows == 0
    assert table.to_arrow("id > 1 AND s.x IS NULL", columns=["a"]).num_rows == 2


def test_a_dropped_column_is_gone_and_one_of_its_name_is_empty_in_older_files(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, v STRING, w INT")
    insert(table, {"id": 1, "v": "old", "w": 1})
    with table.update_schema() as update:
        update.drop_column("v")
    assert table.to_arrow().schema.names == ["id", "w"]
    with pytest.raises(InvalidPredicate):
        table.plan("v = 'old'")
    with table.update_schema() as update:
        update.add_column("v", "STRING")
    insert(table, {"id": 2, "v": "new", "w": 2})
    assert by_id(table) == {1: {"v": None, "w": 1}, 2: {"v": "new", "w": 2}}
    assert matches(table, "v = 'old'") == (0, [])
    assert matches(table, "v IS NULL") == (1, [1])
    # Another type under the old name is no trouble either.
    with table.update_schema() as update:
        update.drop_column("v").add_column("v", "DOUBLE")
    assert by_id(table) == {1: {"v": None, "w": 1}, 2: {"v": None, "w": 2}}
    assert [c.field_id for c in table.describe().columns] == [1, 3, 5]
    # The past has the columns it had.
    assert by_id(table, version=1) == {1: {"v": "old", "w": 1}}
    assert by_id(table, "v = 'new'", version=4) == {2: {"v": "new", "w": 2}}
    assert book.verify().ok


@in_memory
def test_a_renamed_column_is_found_by_its_id_and_names_can_be_swapped(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, a INT, b INT")
    insert(table, {"id": 1, "a": 10, "b": 20})
    with table.update_schema() as update:
        update.rename_column("a", "c").rename_column("b", "a").rename_column("c", "b")
    insert(table, {"id": 2, "a": 200, "b": 100})
    assert by_id(table) == {1: {"b": 10, "a": 20}, 2: {"b": 100, "a": 200}}
    assert table.to_arrow().schema.names == ["id", "b", "a"]
    assert matches(table, "a = 20") == (1, [1])
    assert matches(table, "b <= 100") == (2, [1, 2])
    assert table.to_arrow(columns=["a"]).column("a").to_pylist() == [20, 200]
    assert by_id(table, version=1) == {1: {"a": 10, "b": 20}}
    assert book.verify().ok


@in_memory
def test_columns_can_be_put_into_another_order(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, a INT, b INT, c INT")
    insert(table, {"id": 1, "a": 1, "b": 2, "c": 3})
    with table.update_schema() as update:
        update.move_first("c").move_after("id", "b").move_before("a", "b")
    assert table.to_arrow().schema.names == ["c", "a", "b", "id"]
    insert(table, {"id": 2, "a": 4, "b": 5, "c": 6})
    assert by_id(table) == {1: {"c": 3, "a": 1, "b": 2}, 2: {"c": 6, "a": 4, "b": 5}}


@in_memory
def test_a_widened_column_shows_old_values_exactly(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, i INT, f FLOAT, d DECIMAL(5, 2)")
    insert(
        table,
        {"id": 1, "i": 2**31 - 1, "f": 0.1, "d": Decimal("999.99")},
        {"id": 2, "i": -(2**31), "f": -0.5, "d": Decimal("-999.99")},
        {"id": 3},
    )
    with table.update_schema() as update:
        update.widen_column("i", "BIGINT").widen_column("f", "DOUBLE").widen_column("d", "DECIMAL(38, 2)")
    insert(table, {"id": 4, "i": 2**62, "f": 0.1, "d": Decimal("9" * 36 + ".99")})
    kinds = table.to_arrow().schema
    assert (kinds.field("i").type, kinds.field("f").type, kinds.field("d").type) == (
        pa.int64(),
        pa.float64(),
        pa.decimal128(38, 2),
    )
    found = by_id(table)
    assert found[1] == {"i": 2**31 - 1, "f": 0.10000000149011612, "d": Decimal("999.99")}
    assert found[3] == {"i": None, "f": None, "d": None}
    assert matches(table, "i > 2147483646") == (2, [1, 4])
    assert matches(table, "i < -2147483647") == (1, [2])
    assert matches(table, "f = 0.1") == (2, [4])
    assert matches(table, "f > 0.1") == (1, [1])
    assert matches(table, "d = -999.99") == (1, [2])
    assert matches(table, "d >= 999.99") == (2, [1, 4])
    for column, least, largest in (
        ("i", -(2**31), 2**62),
        ("f", -0.5, 0.10000000149011612),
        ("d", Decimal("-999.99"), Decimal("9" * 36 + ".99")),
    ):
        extremes = table.min_max(column)
        assert extremes is not None and (extremes.least, extremes.largest) == (least, largest)
    assert book.verify().ok


@in_memory
def test_a_required_column_can_become_optional(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT NOT NULL, s STRUCT<a: INT NOT NULL> NOT NULL")
    insert(table, {"id": 1, "s": {"a": 1}})
    with table.update_schema() as update:
        update.make_optional("s.a").make_optional("s").make_optional("id")
    insert(table, {"id": None, "s": None}, {"id": 2, "s": {"a": None}})
    assert table.to_arrow().to_pylist() == [
        {"id": 1, "s": {"a": 1}},
        {"id": None, "s": None},
        {"id": 2, "s": {"a": None}},
    ]
    assert [c.required for c in table.describe().columns] == [False, False]
    assert matches(table, "s.a IS NULL") == (1, [2, None])
    assert book.verify().ok


@in_memory
def test_partition_and_sort_columns_are_protected_but_for_their_names(book: Book) -> None:
    table = book.tables.create("t", "id INT, k INT, o INT, v INT", partition_by=["bucket(2, k)"], sort_by=["o"])
    insert(table, {"id": 1, "k": 1, "o": 2, "v": 3})
    changes: list[Callable[[SchemaUpdate], Any]] = [
        lambda update: update.drop_column("k"),
        lambda update: update.drop_column("o"),
        lambda update: update.widen_column("k", "BIGINT"),
    ]
    for change in changes:
        with pytest.raises(IncompatibleSchema), table.update_schema() as update:
            change(update)
    with table.update_schema() as update:
        update.rename_column("k", "key").rename_column("o", "order")
    insert(table, {"id": 2, "key": 1, "order": 1, "v": 4}, {"id": 3, "key": 2, "order": 1, "v": 4})
    assert matches(table, "key = 1") == (2, [1, 2])
    assert table.describe().partition_by == ("bucket(2, key)",)
    assert table.describe().sort_by == ("order asc nulls first",)
    assert check_totals(book, table)[0] == 3


# --- nested --------------------------------------------------------------------


@pytest.fixture
def nested(book: Book) -> Table:
    table = book.tables.create("nested", NESTED)
    insert(table, FULL, EMPTY, NULLS)
    return table


@in_memory
def test_nested_fields_are_added_at_every_depth(nested: Table) -> None:
    with nested.update_schema() as update:
        update.add_column("s.c", "INT").add_column("l.element.z", "STRING").add_column("m.value.q", "ARRAY<INT>")
    found = by_id(nested)
    assert found[1] == {
        "s": {"a": 5, "b": "five", "c": None},
        "l": [{"x": 1, "y": 2.5, "z": None}, None],
        "m": [("k", {"p": 3, "q": None}), ("n", None)],
    }
    assert found[2] == {"s": {"a": None, "b": None, "c": None}, "l": [], "m": []}
    # A list that is not there is not an empty one.
    assert found[3] == {"s": None, "l": None, "m": None}
    insert(nested, {"id": 4, "s": {"c": 7}, "l": [{"z": "z"}], "m": [("k", {"q": [1]})]})
    assert by_id(nested, "s.c = 7")[4] == {
        "s": {"a": None, "b": None, "c": 7},
        "l": [{"x": None, "y": None, "z": "z"}],
        "m": [("k", {"p": None, "q": [1]})],
    }
    assert matches(nested, "s.c IS NULL") == (1, [1, 2, 3])
    assert matches(nested, "s.a = 5") == (1, [1])


@in_memory
def test_nested_fields_are_renamed_moved_and_widened_at_every_depth(nested: Table) -> None:
    with nested.update_schema() as update:
        update.rename_column("s.a", "b2").rename_column("s.b", "a").move_first("s.a")
        update.rename_column("l.element.x", "n").widen_column("l.element.n", "BIGINT")
        update.widen_column("l.element.y", "DOUBLE").move_first("l.element.y")
        update.rename_column("m.value.p", "r").widen_column("m.value.r", "BIGINT")
    found = by_id(nested)
    assert found[1] == {
        "s": {"a": "five", "b2": 5},
        "l": [{"y": 2.5, "n": 1}, None],
        "m": [("k", {"r": 3}), ("n", None)],
    }
    assert found[2] == {"s": {"a": None, "b2": None}, "l": [], "m": []}
    assert found[3] == {"s": None, "l": None, "m": None}
    assert matches(nested, "s.a = 'five'") == (1, [1])
    assert matches(nested, "s.b2 = 5") == (1, [1])
    assert matches(nested, "s.a IS NULL") == (1, [2, 3])


@in_memory
def test_a_struct_whose_fields_are_all_new_is_null_only_where_it_was(nested: Table) -> None:
    with nested.update_schema() as update:
        update.add_column("s.c", "INT").drop_column("s.a").drop_column("s.b")
        update.add_column("l.element.a", "INT").drop_column("l.element.x").drop_column("l.element.y")
    found = by_id(nested)
    assert [row["s"] for row in found.values()] == [{"c": None}, {"c": None}, None]
    assert [row["l"] for row in found.values()] == [[{"a": None}, None], [], None]
    assert matches(nested, "s.c IS NULL") == (1, [1, 2, 3])


@in_memory
def test_a_nested_field_with_a_dropped_ones_name_is_empty_in_older_files(nested: Table) -> None:
    with nested.update_schema() as update:
        update.drop_column("s.a")
    with nested.update_schema() as update:
        update.add_column("s.a", "INT")
    insert(nested, {"id": 4, "s": {"a": 5, "b": "new"}})
    assert [row["s"] and row["s"]["a"] for row in by_id(nested).values()] == [None, None, None, 5]
    assert matches(nested, "s.a = 5") == (1, [4])


# --- files of others -----------------------------------------------------------


def test_files_without_field_ids_keep_the_names_they_were_added_with(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, a INT, b INT")
    lay(book, "in/1.parquet", rows_of(table, [{"id": 1, "a": 10, "b": 20}]))
    table.add_files(["in/1.parquet"])
    with table.update_schema() as update:
        update.rename_column("a", "c").drop_column("b")
    with table.update_schema() as update:
        update.add_column("a", "INT").add_column("b", "STRING")
    assert by_id(table) == {1: {"c": 10, "a": None, "b": None}}
    lay(book, "in/2.parquet", rows_of(table, [{"id": 2, "a": 1, "b": "x", "c": 2}]))
    table.add_files(["in/2.parquet"])
    assert by_id(table) == {1: {"c": 10, "a": None, "b": None}, 2: {"c": 2, "a": 1, "b": "x"}}
    assert matches(table, "a = 10") == (0, [])
    assert matches(table, "c = 10") == (1, [1])
    assert matches(table, "a = 1") == (1, [2])
    # A file with the old names would now be read wrong: its b is a number.
    lay(book, "in/3.parquet", pa.table({"id": [3], "b": [1]}))
    with pytest.raises(InvalidFile):
        table.add_files(["in/3.parquet"])
    assert book.verify().ok


@in_memory
def test_row_groups_of_older_files_are_chosen_by_columns_they_have(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, n INT")
    for number, make in enumerate((rows_of, with_ids)):
        data = make(table, [{"id": value, "n": value // 10} for value in range(number * 100, number * 100 + 100)])
        lay(book, f"in/{number}.parquet", data, row_group_size=10)
        table.add_files([f"in/{number}.parquet"])
    with table.update_schema() as update:
        update.rename_column("n", "m").widen_column("m", "BIGINT").add_column("v", "STRING")
    plan = table.plan("m = 3 AND v IS NULL")
    assert [file.row_groups for file in plan] == [(3,)]
    assert ids(table, "m = 3 AND v IS NULL") == list(range(30, 40))
    assert [file.row_groups for file in table.plan("m IN (5, 12)")] == [(5,), (2,)]
    assert ids(table, "m IN (5, 12)") == [*range(50, 60), *range(120, 130)]
    assert table.to_arrow("m = 12", columns=["v"]).column("v").to_pylist() == [None] * 10
    assert list(table.plan("v = 'x'")) == []


# --- versions of the schema ----------------------------------------------------


def test_each_change_is_a_version_and_all_are_listed(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT")
    with table.update_schema() as update:
        update.add_column("a", "INT").add_column("b", "INT")
    insert(table, {"id": 1})
    with table.update_schema() as update:
        update.rename_column("a", "c")
    listed = table.metadata_history()
    assert [(state.schema_version, state.from_version) for state in listed] == [(1, 0), (2, 1), (3, 3)]
    columns = [[field["name"] for field in state.schema["fields"]] for state in listed]
    assert columns == [["id"], ["id", "a", "b"], ["id", "c", "b"]]
    assert [state.schema["schema-id"] for state in listed] == [1, 2, 3]
    assert table.metadata == listed[-1]
    assert [(v.version, v.operation, v.schema_version) for v in table.history()] == [
        (3, "schema", 3),
        (2, "append", 2),
        (1, "schema", 2),
        (0, "create", 1),
    ]
    assert table.to_arrow(version=0).schema.names == ["id"]
    assert table.to_arrow(version=2).schema.names == ["id", "a", "b"]
    assert book.verify().ok


@in_memory
def test_a_change_of_nothing_or_with_an_error_makes_no_version(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, a INT")
    with table.update_schema():
        pass
    with table.update_schema() as update:
        update.rename_column("a", "b").rename_column("b", "a")
    with pytest.raises(ZeroDivisionError), table.update_schema() as update:
        update.add_column("x", f"DECIMAL({1 // 0}, 0)")
    changes: list[tuple[Callable[[SchemaUpdate], Any], type[LakebookError]]] = [
        (lambda update: update.add_column("a", "INT"), IncompatibleSchema),
        (lambda update: update.add_column("A", "INT"), IncompatibleSchema),
        (lambda update: update.drop_column("x"), IncompatibleSchema),
        (lambda update: update.widen_column("id", "INT"), IncompatibleSchema),
        (lambda update: update.widen_column("a", "DOUBLE"), IncompatibleSchema),
        (lambda update: update.rename_column("a", "id"), IncompatibleSchema),
        (lambda update: update.add_column("x", "NOTHING"), InvalidSchema),
        (lambda update: update.drop_column("a").drop_column("id"), IncompatibleSchema),
    ]
    for change, error in changes:
        with pytest.raises(error), table.update_schema() as update:
            change(update)
    assert (table.version, table.record.schema_version) == (0, 1)
    assert table.to_arrow().schema.names == ["id", "a"]


@in_memory
def test_an_id_is_never_given_twice_also_not_after_a_refused_change(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, s STRUCT<a: INT>")
    for _ in range(3):
        with table.update_schema() as update:
            update.add_column("x", "STRUCT<y: INT, z: ARRAY<INT>>")
        with table.update_schema() as update:
            update.drop_column("x")
    with table.update_schema() as update:
        update.add_column("x", "INT")
    # Three for the table, four for each struct that is gone.
    assert table.describe().columns[-1].field_id == 3 + 3 * 4 + 1
    assert table.record.last_field_id == 16


def test_of_two_changes_of_the_same_schema_the_second_is_refused(book: Book) -> None:
    table = numbers(book, "t", [1])
    other = book.table("t")

    def be_late() -> None:
        with table.update_schema() as update:
            update.add_column("a", "INT")
            with other.update_schema() as sooner:
                sooner.add_column("a", "STRING")

    with pytest.raises(SchemaChanged) as refused:
        be_late()
    assert refused.value.transient
    assert [c.type for c in table.describe().columns] == ["long", "string"]
    with table.update_schema() as update:
        update.add_column("b", "INT")
    assert [c.name for c in other.describe().columns] == ["id", "a", "b"]
    assert table.version == 3
    assert book.verify().ok


def test_a_change_of_rows_does_not_disturb_a_change_of_the_schema(book: Book) -> None:
    table = numbers(book, "t", [1])
    with table.update_schema() as update:
        update.add_column("a", "INT")
        insert(book.table("t"), {"id": 2})
        book.table("t").set_properties(x="y")
    assert [(v.version, v.operation) for v in table.history(limit=2)] == [(3, "schema"), (2, "append")]
    assert by_id(table) == {1: {"a": None}, 2: {"a": None}}
    assert table.describe().properties == {"x": "y"}


def test_a_handle_and_another_book_see_a_new_schema_at_once(shared_place: Place) -> None:
    book, other = shared_place.open(), shared_place.open()
    table = numbers(book, "t", [1])
    seen = other.table("t")
    assert seen.to_arrow("id = 1").schema.names == ["id"]
    with table.update_schema() as update:
        update.rename_column("id", "key").add_column("id", "STRING")
    assert seen.to_arrow("key = 1").to_pylist() == [{"key": 1, "id": None}]
    seen.insert_arrow(pa.table({"key": [2], "id": ["two"]}))
    assert table.to_arrow("id = 'two'").to_pylist() == [{"key": 2, "id": "two"}]
    with pytest.raises(IncompatibleSchema):
        seen.insert_arrow(pa.table({"id": [3]}))
    assert other.verify().ok


@in_memory
def test_an_appender_goes_on_with_the_columns_it_began_with(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, a INT, b INT")
    with table.appender() as appender:
        appender.append({"id": 1, "a": 1, "b": 1})
        appender.flush()
        with table.update_schema() as update:
            update.rename_column("a", "c").drop_column("b")
        appender.append({"id": 2, "a": 2, "b": 2})
    assert by_id(table) == {1: {"c": 1}, 2: {"c": 2}}
    assert matches(table, "c = 2") == (1, [2])
    assert [v.schema_version for v in table.history()] == [2, 2, 1, 1]
    assert book.verify().ok
