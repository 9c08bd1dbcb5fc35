"""Changes to a schema that leave every file readable.

A column is its id: renaming, moving and widening keep it, and no id is ever given twice, so that
a new column never shows the values of a dropped one that had its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, Self

from pyiceberg.schema import Schema
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType

from lakebook.errors import IncompatibleSchema, InvalidSchema
from lakebook.iceberg.ddl import NO_ID, parse_type
from lakebook.iceberg.schemas import (
    MAX_FIELD_ID,
    Path,
    build_schema,
    can_promote,
    check_column_name,
    check_doc,
    check_fields,
    children,
    describe_type,
    field_at,
    find_column,
    folded,
    number_type,
    split_path,
    walk,
    with_changes,
)
from lakebook.iceberg.schemas import last_field_id as highest_field_id
from lakebook.names import shown

_Siblings = tuple[NestedField, ...]


class SchemaUpdate:
    """Changes to a schema, one after the other; each sees what the ones before it have done.

    A column is named by a tuple of names, or by a text: the name of a column, or names with dots
    between them, in back quotes if they have dots themselves. Inside of lists and maps the names
    are `element`, `key` and `value`. `protected` has the fields that cannot go or change their
    type, each with the reason. A change that is refused leaves the update as it was.
    """

    def __init__(self, schema: Schema, last_field_id: int, protected: Mapping[int, str] | None = None) -> None:
        if last_field_id < highest_field_id(schema):
            raise InvalidSchema(
                f"the last id cannot be {last_field_id}", on="schema", remedy="Give the highest one ever used"
            )
        self._root = StructType(*schema.fields)
        self._last_id = last_field_id
        self._protected = dict(protected or {})
        self._identifiers = tuple(schema.identifier_field_ids)

    def add_column(self, path: str | Path, type: str | IcebergType, doc: str | None = None) -> Self:  # noqa: A002
        """Add an optional column, or a field to a struct, as its last.

        The type is one of PyIceberg's or a text such as `ARRAY<STRING>`. A text as a path is a
        new column if it has no dots, and else a field of the struct before the last dot.
        """
        parent, name = self._new_place(path)
        here = (*parent, name)
        check_doc(doc, here)
        kind = _type(type)
        last = self._last_id

        def next_id(_: int) -> int:
            nonlocal last
            last += 1
            return last

        # Checked before it is numbered: a type can be deeper than that could go.
        check_fields([NestedField(NO_ID, name, kind, doc=doc)])
        new_id = next_id(NO_ID)
        field = NestedField(new_id, name, number_type(kind, next_id), required=False, doc=doc)
        if last > MAX_FIELD_ID:
            _refuse(here, "the table has used up all ids for columns")

        def add(siblings: _Siblings) -> _Siblings:
            _check_free(name, siblings, here)
            return (*siblings, field)

        self._change_struct(parent, add)
        self._last_id = last
        return self

    def drop_column(self, path: str | Path) -> Self:
        """Drop a column or a field of a struct, with all that is nested in it."""
        here = self._find(path)
        kept = {*self._protected, *self._identifiers}
        for inner, field, _ in walk([field_at(self._root.fields, here)]):
            if field.field_id in kept:
                self._refuse_protected((*here, *inner[1:]), field)

        def drop(siblings: _Siblings) -> _Siblings:
            if len(siblings) == 1:
                _refuse(here, "it is the last column" if len(here) == 1 else "it is the last field of its struct")
            return tuple(field for field in siblings if field.name != here[-1])

        return self._change_struct(here[:-1], drop)

    def rename_column(self, path: str | Path, new_name: str) -> Self:
        """Give a column or a field of a struct another name, in the same place."""
        here = self._find(path)
        check_column_name(new_name, here)

        def rename(siblings: _Siblings) -> _Siblings:
            _check_free(new_name, [field for field in siblings if field.name != here[-1]], here)
            return _replaced(siblings, here[-1], lambda field: with_changes(field, name=new_name))

        return self._change_struct(here[:-1], rename)

    def widen_column(self, path: str | Path, type: str | IcebergType) -> Self:  # noqa: A002
        """Let a column hold more: int to long, float to double, a decimal to more digits."""
        here, kind = self._find(path), _type(type)
        field = field_at(self._root.fields, here)
        if not (field.field_type.is_primitive and kind.is_primitive and can_promote(field.field_type, kind)):
            old, new = shown(describe_type(field.field_type)), shown(describe_type(kind))
            _refuse(
                here,
                f"{old} cannot become {new}",
                "Allowed are int to long, float to double, and more digits of a decimal with the same scale",
            )
        if field.field_id in self._protected and field.field_type != kind:
            self._refuse_protected(here, field)
        return self._change_field(here, lambda field: with_changes(field, field_type=kind))

    def make_optional(self, path: str | Path) -> Self:
        """Let a column be null."""
        here = self._find(path)
        inside = walk([field_at(self._root.fields, here)])
        if any(field.field_id in self._identifiers for _, field, _ in inside):
            _refuse(here, "it identifies the rows, and no part of that can be null")
        return self._change_field(here, lambda field: with_changes(field, required=False))

    def set_doc(self, path: str | Path, doc: str | None) -> Self:
        """Give a column or a field of a struct another comment, or none."""
        here = self._find(path)
        check_doc(doc, here)

        def describe(field: NestedField) -> NestedField:
            return NestedField(field.field_id, field.name, field.field_type, field.required, doc)

        return self._change_struct(here[:-1], lambda siblings: _replaced(siblings, here[-1], describe))

    def move_first(self, path: str | Path) -> Self:
        """Put a column before all others, or a field before those of its struct."""
        return self._move(self._find(path), lambda _: 0)

    def move_before(self, path: str | Path, other: str | Path) -> Self:
        """Put a column before another, or a field before another of the same struct."""
        here, there = self._two(path, other)
        return self._move(here, lambda names: names.index(there))

    def move_after(self, path: str | Path, other: str | Path) -> Self:
        """Put a column after another, or a field after another of the same struct."""
        here, there = self._two(path, other)
        return self._move(here, lambda names: names.index(there) + 1)

    def apply(self, schema_id: int) -> tuple[Schema, int]:
        """The new schema with this id, and the highest id that has ever been given to a field."""
        check_fields(self._root.fields)
        return build_schema(self._root.fields, schema_id, self._identifiers), self._last_id

    def _find(self, path: object) -> Path:
        found = find_column(self._root.fields, path)
        if found is None:
            raise IncompatibleSchema(
                f"there is no column {shown(path)}", on="schema", remedy="Write it as the schema has it"
            )
        return found

    def _new_place(self, given: object) -> tuple[Path, str]:
        """The struct that gets a new field, and the field's name."""
        path = given
        if isinstance(given, str):
            if find_column(self._root.fields, given) is not None:
                _refuse((given,), "there is such a column already")
            before, dot, last = given.rpartition(".")
            parent = find_column(self._root.fields, before) if dot and last and not last.endswith(("`", '"')) else None
            path = (*parent, last) if parent else split_path(given)
        if not isinstance(path, (tuple, list)) or not path:
            raise InvalidSchema(f"{shown(given)} names no column", on="schema", remedy="Give a tuple of names")
        name = check_column_name(path[-1])
        parent = find_column(self._root.fields, path[:-1]) if len(path) > 1 else ()
        if parent is None:
            raise IncompatibleSchema(
                f"there is no column {shown('.'.join(map(str, path[:-1])))} that {shown(name)} could be added to",
                on="schema",
                remedy="Give a name that has dots itself in a tuple",
            )
        return parent, name

    def _two(self, path: object, other: object) -> tuple[Path, str]:
        here, there = self._find(path), self._find(other)
        if here[:-1] != there[:-1] or here == there:
            _refuse(
                here, f"it cannot be moved next to {shown('.'.join(there))}", "Name another field of the same struct"
            )
        return here, there[-1]

    def _move(self, here: Path, place: Callable[[list[str]], int]) -> Self:
        def move(siblings: _Siblings) -> _Siblings:
            others = [field for field in siblings if field.name != here[-1]]
            moved = next(field for field in siblings if field.name == here[-1])
            others.insert(place([field.name for field in others]), moved)
            return tuple(others)

        return self._change_struct(here[:-1], move)

    def _change_struct(self, parent: Path, change: Callable[[_Siblings], _Siblings]) -> Self:
        """Change the fields of the struct at a path."""

        def edit(kind: IcebergType) -> IcebergType:
            if not isinstance(kind, StructType):
                _refuse(parent, f"it is {shown(describe_type(kind))}, and only a struct has fields of its own")
            return StructType(*change(kind.fields))

        self._root = _struct(_edited(self._root, parent, (), edit))
        return self

    def _change_field(self, here: Path, change: Callable[[NestedField], NestedField]) -> Self:
        """Change the type of a field, or whether it is required; also of an element or a value."""

        def edit(kind: IcebergType) -> IcebergType:
            return _with_child(kind, here, change)

        self._root = _struct(_edited(self._root, here[:-1], (), edit))
        return self

    def _refuse_protected(self, path: Path, field: NestedField) -> NoReturn:
        reason = self._protected.get(field.field_id, "it identifies the rows")
        _refuse(path, f"it cannot be dropped or get another type: {reason}")


def _edited(kind: IcebergType, path: Path, before: Path, edit: Callable[[IcebergType], IcebergType]) -> IcebergType:
    """A type in which the one at a path has been edited."""
    if not path:
        return edit(kind)
    here = (*before, path[0])

    def change(child: NestedField) -> NestedField:
        return with_changes(child, field_type=_edited(child.field_type, path[1:], here, edit))

    return _with_child(kind, here, change)


def _with_child(kind: IcebergType, here: Path, change: Callable[[NestedField], NestedField]) -> IcebergType:
    """A type in which the child at the end of a path has been changed."""
    if isinstance(kind, StructType):
        return StructType(*_replaced(kind.fields, here[-1], change))
    if isinstance(kind, MapType) and here[-1] == "key":
        # Two keys that differ could become the same.
        _refuse(here, "the keys of a map cannot be changed")
    changed = change(next(child for child in children(kind) if child.name == here[-1]))
    if isinstance(kind, ListType):
        return ListType(changed.field_id, changed.field_type, element_required=changed.required)
    assert isinstance(kind, MapType)
    return MapType(kind.key_id, kind.key_type, changed.field_id, changed.field_type, value_required=changed.required)


def _replaced(siblings: _Siblings, name: str, change: Callable[[NestedField], NestedField]) -> _Siblings:
    return tuple(change(field) if field.name == name else field for field in siblings)


def _struct(kind: IcebergType) -> StructType:
    assert isinstance(kind, StructType)
    return kind


def _check_free(name: str, others: _Siblings | list[NestedField], here: Path) -> None:
    taken = next((field.name for field in others if folded(field.name) == folded(name)), None)
    if taken is not None:
        _refuse(here, f"there is a column {shown(taken)} already", "Names have to differ in more than case")


def _type(given: object) -> IcebergType:
    if isinstance(given, str):
        return parse_type(given)
    if isinstance(given, IcebergType) and not isinstance(given, NestedField):
        return given
    raise InvalidSchema(f"{shown(given)} is not a type", on="schema", remedy="Give a text such as 'ARRAY<STRING>'")


def _refuse(path: Path, what: str, remedy: str = "") -> NoReturn:
    raise IncompatibleSchema(what, on=f"column {shown('.'.join(path))}", remedy=remedy)
