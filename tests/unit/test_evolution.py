"""A schema changes without a file being rewritten: a column is its id, whatever becomes of its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.schema import Schema
from pyiceberg.types import GeometryType, IcebergType, ListType, LongType, NestedField, StringType, StructType

from lakebook.errors import IncompatibleSchema, InvalidSchema, LakebookError
from lakebook.iceberg.evolution import SchemaUpdate
from lakebook.iceberg.schemas import (
    Path,
    check_fields,
    describe_type,
    field_at,
    find_column,
    folded,
    last_field_id,
    schema_from,
    schema_from_json,
    schema_to_json,
    walk,
)

SCHEMA = schema_from(
    """
    id INT NOT NULL, name STRING COMMENT 'who', ratio FLOAT, price DECIMAL(9, 2), `a.b` INT,
    place STRUCT<city: STRING NOT NULL, zip: INT>, items ARRAY<STRUCT<n: INT, `x.y`: INT>>,
    counts MAP<STRUCT<k: INT>, INT>, only STRUCT<one: INT>
    """
)
LAST = last_field_id(SCHEMA)


def update(**protected: str) -> SchemaUpdate:
    return SchemaUpdate(SCHEMA, LAST, {SCHEMA.find_field(name).field_id: why for name, why in protected.items()})


def ids(schema: Schema) -> dict[Path, int]:
    return {path: field.field_id for path, field, _ in walk(schema.fields)}


def names(schema: Schema) -> list[str]:
    return [field.name for field in schema.fields]


def test_a_new_column_is_optional_and_has_a_new_id_at_every_depth() -> None:
    schema, last = (
        update()
        .add_column("note", "STRING", doc="free text")
        .add_column("place.at", "STRUCT<x: DOUBLE NOT NULL, tags: ARRAY<STRING>>")
        .add_column(("items", "element", "more"), ListType(1, LongType(), element_required=True))
        .apply(2)
    )
    assert (schema.schema_id, last) == (2, LAST + 7)
    found = ids(schema)
    assert found[("note",)] == LAST + 1
    assert found[("place", "at")] == LAST + 2
    assert found[("place", "at", "x")] == LAST + 3
    assert found[("place", "at", "tags")] == LAST + 4
    assert found[("place", "at", "tags", "element")] == LAST + 5
    assert found[("items", "element", "more")] == LAST + 6
    assert found[("items", "element", "more", "element")] == LAST + 7
    assert {path: field_id for path, field_id in found.items() if field_id <= LAST} == ids(SCHEMA)
    assert names(schema) == [*names(SCHEMA), "note"]
    note = schema.find_field("note")
    assert (note.required, note.doc, schema.find_field("place.at").required) == (False, "free text", False)
    assert describe_type(schema.find_type("place")).startswith("struct<city: string, zip: int, at: struct<x: double")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("new", ("new",)),
        ("place.new", ("place", "new")),
        ("`new.er`", ("new.er",)),
        (("new.er",), ("new.er",)),
        (["new"], ("new",)),
        ("place.`new.er`", ("place", "new.er")),
        ("items.element.new", ("items", "element", "new")),
        ('"with ""quotes"""', ('with "quotes"',)),
    ],
)
def test_the_place_of_a_new_column_is_a_path(path: Any, expected: Path) -> None:
    schema, _ = update().add_column(path, "INT").apply(2)
    assert ids(schema)[expected] == LAST + 1


def test_a_column_with_the_name_of_a_dropped_one_is_another_column() -> None:
    schema, last = update().drop_column("name").add_column("name", "STRING").apply(2)
    assert schema.find_field("name").field_id == LAST + 1 != SCHEMA.find_field("name").field_id
    schema, last = SchemaUpdate(schema, last).drop_column("name").apply(3)
    assert last == LAST + 1
    schema, last = SchemaUpdate(schema, last).add_column("name", "INT").apply(4)
    assert (schema.find_field("name").field_id, last) == (LAST + 2, LAST + 2)


def test_renaming_and_widening_keep_the_id() -> None:
    schema, last = (
        update()
        .rename_column("name", "called.so")
        .rename_column("id", "ID")
        .widen_column("ID", "BIGINT")
        .widen_column("ratio", "DOUBLE")
        .widen_column("price", "DECIMAL(12, 2)")
        .widen_column("items.element.n", LongType())
        .rename_column(("items", "element", "x.y"), "z")
        .widen_column("counts.value", "BIGINT")
        .make_optional("ID")
        .make_optional(("place", "city"))
        .set_doc("ratio", "of both")
        .set_doc("`called.so`", None)
        .apply(2)
    )
    assert last == LAST
    assert set(ids(schema).values()) == set(ids(SCHEMA).values())
    assert ids(schema)[("called.so",)] == ids(SCHEMA)[("name",)]
    assert ids(schema)[("items", "element", "z")] == ids(SCHEMA)[("items", "element", "x.y")]
    kinds = {name: str(schema.find_type(name)) for name in ("ID", "ratio", "price", "items.element.n", "counts.value")}
    assert list(kinds.values()) == ["long", "double", "decimal(12, 2)", "long", "long"]
    assert not schema.find_field("ID").required
    assert not schema.find_field("place.city").required
    assert (schema.find_field("ratio").doc, schema.find_field("called.so").doc) == ("of both", None)
    assert SCHEMA.find_field("name").doc == "who"


def test_columns_can_be_moved_among_their_own() -> None:
    schema, _ = (
        update()
        .move_first("price")
        .move_before("only", "id")
        .move_after("id", "a.b")
        .move_first("place.zip")
        .move_after(("items", "element", "n"), ("items", "element", "x.y"))
        .apply(2)
    )
    assert names(schema) == ["price", "only", "name", "ratio", "a.b", "id", "place", "items", "counts"]
    assert describe_type(schema.find_type("place")) == "struct<zip: int, city: string>"
    assert describe_type(schema.find_type("items")) == "list<struct<x.y: int, n: int>>"
    assert ids(schema) == ids(SCHEMA)


def test_without_a_change_the_schema_is_the_same() -> None:
    schema, last = update().apply(7)
    assert (schema, schema.schema_id, last) == (SCHEMA, 7, LAST)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda u: u.add_column("name", "INT"), "already"),
        (lambda u: u.add_column("NAME", "INT"), "already"),
        (lambda u: u.add_column("a.b", "INT"), "already"),
        (lambda u: u.add_column("place.CITY", "INT"), "already"),
        (lambda u: u.add_column("nowhere.x", "INT"), "no column 'nowhere'"),
        (lambda u: u.add_column(("nowhere", "x"), "INT"), "no column 'nowhere'"),
        (lambda u: u.add_column("name.x", "INT"), "only a struct"),
        (lambda u: u.add_column("items.x", "INT"), "only a struct"),
        (lambda u: u.add_column("counts.key.x", "INT"), "keys of a map"),
        (lambda u: u.drop_column("nothing"), "no column 'nothing'"),
        (lambda u: u.drop_column("Name"), "no column 'Name'"),
        (lambda u: u.drop_column(None), "no column None"),
        (lambda u: u.drop_column(()), "no column"),
        (lambda u: u.drop_column("only.one"), "last field of its struct"),
        (lambda u: u.drop_column("items.element"), "only a struct"),
        (lambda u: u.drop_column("counts.value"), "only a struct"),
        (lambda u: u.drop_column("counts.key.k"), "keys of a map"),
        (lambda u: u.rename_column("nothing", "x"), "no column"),
        (lambda u: u.rename_column("id", "NAME"), "already"),
        (lambda u: u.rename_column("place.zip", "City"), "already"),
        (lambda u: u.rename_column("items.element", "x"), "only a struct"),
        (lambda u: u.rename_column("counts.key.k", "x"), "keys of a map"),
        (lambda u: u.widen_column("id", "STRING"), "'int' cannot become 'string'"),
        (lambda u: u.widen_column("name", "BINARY"), "cannot become"),
        (lambda u: u.widen_column("ratio", "INT"), "cannot become"),
        (lambda u: u.widen_column("price", "DECIMAL(8, 2)"), "cannot become"),
        (lambda u: u.widen_column("price", "DECIMAL(12, 3)"), "cannot become"),
        (lambda u: u.widen_column("place", "STRUCT<city: STRING>"), "cannot become"),
        (lambda u: u.widen_column("items", "ARRAY<BIGINT>"), "cannot become"),
        (lambda u: u.widen_column("counts.key.k", "BIGINT"), "keys of a map"),
        (lambda u: u.make_optional("nothing"), "no column"),
        (lambda u: u.make_optional("counts.key"), "keys of a map"),
        (lambda u: u.set_doc("items.element", "x"), "only a struct"),
        (lambda u: u.move_first("nothing"), "no column"),
        (lambda u: u.move_first("items.element"), "only a struct"),
        (lambda u: u.move_before("id", "place.city"), "cannot be moved next to 'place.city'"),
        (lambda u: u.move_after("id", "id"), "cannot be moved next to 'id'"),
        (lambda u: u.move_after("id", "nothing"), "no column"),
    ],
)
def test_a_change_that_the_schema_does_not_allow_is_refused(change: Callable[[Any], object], reason: str) -> None:
    changed = update().rename_column("id", "key").rename_column("key", "id")
    with pytest.raises(IncompatibleSchema, match=reason):
        change(changed)
    assert changed.apply(2) == (SCHEMA, LAST)


@pytest.mark.parametrize(
    "change",
    [
        lambda u: u.add_column("x", "NONSENSE"),
        lambda u: u.add_column("x", "INT NOT NULL"),
        lambda u: u.add_column("x", None),
        lambda u: u.add_column("x", NestedField(1, "y", StringType())),
        lambda u: u.add_column("x", StructType()),
        lambda u: u.add_column("x", GeometryType()),
        lambda u: u.add_column("x", "STRUCT<a: INT, A: INT>"),
        lambda u: u.add_column("x", "INT", doc="\0"),
        lambda u: u.add_column("", "INT"),
        lambda u: u.add_column("`x", "INT"),
        lambda u: u.add_column("place.", "INT"),
        lambda u: u.add_column(("x" * 1001,), "INT"),
        lambda u: u.add_column(("a\0b",), "INT"),
        lambda u: u.add_column((), "INT"),
        lambda u: u.add_column((5,), "INT"),
        lambda u: u.add_column(None, "INT"),
        lambda u: u.rename_column("id", ""),
        lambda u: u.rename_column("id", "\ud800"),
        lambda u: u.rename_column("id", None),
        lambda u: u.set_doc("id", 5),
        lambda u: u.widen_column("id", "NONSENSE"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(change: Callable[[Any], object]) -> None:
    changed = update()
    with pytest.raises(InvalidSchema):
        change(changed)
    assert changed.apply(2) == (SCHEMA, LAST)


def test_what_the_whole_schema_cannot_be_is_refused_at_the_end() -> None:
    with pytest.raises(InvalidSchema, match="called the same"):
        update().add_column(("place.city",), "INT").apply(2)
    deep = "STRUCT<f: " * 99 + "INT" + ">" * 99
    assert SchemaUpdate(SCHEMA, LAST).add_column("deep", deep).apply(2)[1] == LAST + 100
    with pytest.raises(InvalidSchema, match="100 levels"):
        update().add_column("place.deep", deep).apply(2)
    with pytest.raises(InvalidSchema, match="100 levels"):
        update().add_column("deep", f"ARRAY<{deep}>")
    with pytest.raises(InvalidSchema, match="id of a schema"):
        update().apply(-1)


def test_the_last_column_stays() -> None:
    one = schema_from("a INT")
    with pytest.raises(IncompatibleSchema, match="the last column"):
        SchemaUpdate(one, 1).drop_column("a")
    schema, _ = SchemaUpdate(one, 1).add_column("b", "INT").drop_column("a").apply(2)
    assert ids(schema) == {("b",): 2}


def test_a_column_in_use_keeps_its_place_and_its_type() -> None:
    changed = update(**{"id": "the table is partitioned by it", "place.zip": "the table is sorted by it"})
    changes: list[Callable[[], object]] = [
        lambda: changed.drop_column("id"),
        lambda: changed.drop_column("place.zip"),
        lambda: changed.drop_column("place"),
        lambda: changed.widen_column("id", "BIGINT"),
        lambda: changed.widen_column("place.zip", "BIGINT"),
    ]
    for change in changes:
        with pytest.raises(IncompatibleSchema, match=r"the table is (partitioned|sorted) by it"):
            change()
    schema, _ = changed.rename_column("id", "key").make_optional("key").move_after("key", "only").apply(2)
    assert schema.find_field("key").field_id == SCHEMA.find_field("id").field_id
    assert schema == changed.widen_column("key", "INT").apply(2)[0]


def test_a_column_that_identifies_the_rows_stays_as_it_is() -> None:
    inner = StructType(NestedField(3, "key", LongType(), required=True), NestedField(4, "x", LongType()))
    schema = Schema(
        NestedField(1, "s", inner, required=True), NestedField(2, "other", LongType()), identifier_field_ids=[3]
    )
    changes: list[Callable[[], object]] = [
        lambda: SchemaUpdate(schema, 4).drop_column("s.key"),
        lambda: SchemaUpdate(schema, 4).drop_column("s"),
        lambda: SchemaUpdate(schema, 4).make_optional("s.key"),
        lambda: SchemaUpdate(schema, 4).make_optional("s"),
    ]
    for change in changes:
        with pytest.raises(IncompatibleSchema, match="identifies the rows"):
            change()
    changed, _ = SchemaUpdate(schema, 4).rename_column("s.key", "k").drop_column("s.x").apply(2)
    assert changed.identifier_field_ids == [3]


def test_ids_do_not_begin_again_and_do_not_run_out_unnoticed() -> None:
    with pytest.raises(InvalidSchema, match="last id"):
        SchemaUpdate(SCHEMA, LAST - 1)
    schema, last = SchemaUpdate(SCHEMA, 5000).add_column("x", "INT").apply(2)
    assert (schema.find_field("x").field_id, last) == (5001, 5001)
    with pytest.raises(IncompatibleSchema, match="used up"):
        SchemaUpdate(SCHEMA, 2_147_483_446).add_column("x", "INT")


# --- any changes ---------------------------------------------------------------

NAMES = st.sampled_from(["a", "A", "b", "a.b", "c d", "element", "key", "value", "`q`", "é"])
TYPES = st.sampled_from(
    ["INT", "BIGINT", "FLOAT", "DOUBLE", "DECIMAL(5, 2)", "DECIMAL(9, 2)", "STRING", "ARRAY<INT>", "MAP<STRING, FLOAT>",
     "STRUCT<a: INT NOT NULL, b: ARRAY<STRUCT<a: INT>>>", "MAP<STRUCT<a: INT>, STRUCT<a: INT>>"]
)  # fmt: skip
CHANGES = ["add", "add", "add_inside", "drop", "rename", "widen", "make_optional", "first", "before", "after", "doc"]


def make_one_change(data: st.DataObject, schema: Schema, changed: SchemaUpdate) -> None:
    paths = st.sampled_from([path for path, _, _ in walk(schema.fields)])
    match data.draw(st.sampled_from(CHANGES)):
        case "add":
            changed.add_column((data.draw(NAMES),), data.draw(TYPES))
        case "add_inside":
            changed.add_column((*data.draw(paths), data.draw(NAMES)), data.draw(TYPES))
        case "drop":
            changed.drop_column(data.draw(paths))
        case "rename":
            changed.rename_column(data.draw(paths), data.draw(NAMES))
        case "widen":
            changed.widen_column(data.draw(paths), data.draw(TYPES))
        case "make_optional":
            changed.make_optional(data.draw(paths))
        case "first":
            changed.move_first(data.draw(paths))
        case "before":
            changed.move_before(data.draw(paths), data.draw(paths))
        case "after":
            changed.move_after(data.draw(paths), data.draw(paths))
        case "doc":
            changed.set_doc(data.draw(paths), data.draw(st.none() | st.just("said")))


def readable(old: IcebergType, new: IcebergType) -> bool:
    """Whether files with the old type can be read as the new one."""
    if old.is_primitive:
        return (str(old), str(new)) in {
            ("int", "long"), ("float", "double"), ("decimal(5, 2)", "decimal(9, 2)"),
        } or old == new  # fmt: skip
    return type(old) is type(new)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_after_any_changes_every_column_is_still_itself(data: st.DataObject) -> None:
    schema = schema_from("a INT NOT NULL, s STRUCT<x: FLOAT, l: ARRAY<INT>>, m MAP<STRING, STRUCT<y: DECIMAL(5, 2)>>")
    last = last_field_id(schema)
    protected = {data.draw(st.integers(1, last)): "it is in use"}
    ever: dict[int, IcebergType] = {field.field_id: field.field_type for _, field, _ in walk(schema.fields)}
    gone: set[int] = set()
    for schema_id in range(2, 2 + data.draw(st.integers(1, 12))):
        changed = SchemaUpdate(schema, last, protected)
        try:
            make_one_change(data, schema, changed)
            new, new_last = changed.apply(schema_id)
        except LakebookError:
            continue
        fields = {field.field_id: field for _, field, _ in walk(new.fields)}
        assert len(fields) == len(list(walk(new.fields))), "an id stands for two fields"
        assert not gone & fields.keys(), "an id was given again"
        assert all(field_id in ever or last < field_id <= new_last for field_id in fields)
        assert protected.keys() <= fields.keys()
        for field_id, field in fields.items():
            assert readable(ever.get(field_id, field.field_type), field.field_type)
        for path, field, _ in walk(new.fields):
            assert find_column(new.fields, path) == path
            assert field_at(new.fields, path) == field
        groups = [new.fields, *(f.field_type.fields for f in fields.values() if isinstance(f.field_type, StructType))]
        for group in groups:
            assert len({folded(field.name) for field in group}) == len(group)
        check_fields(new.fields)
        again = schema_from_json(schema_to_json(new))
        assert (again, again.schema_id) == (new, schema_id)
        gone |= ever.keys() - fields.keys()
        ever.update((field_id, field.field_type) for field_id, field in fields.items())
        schema, last = new, new_last
