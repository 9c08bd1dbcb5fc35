"""Schemas of tables in Iceberg's terms: where they come from, what they may be, what they become.

Every source ends in the same form and under the same rules. A column is found by its id in
files and by its name in frames; names are compared as they are written, but two that differ
only in case cannot stand in one struct, because Spark cannot tell them apart.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NoReturn, TypeVar

import orjson
import pyarrow as pa
from cachetools import LRUCache
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from lakebook.errors import IncompatibleSchema, InvalidSchema
from lakebook.iceberg.ddl import DEFAULT_PRECISION, DEFAULT_SCALE, MAX_DEPTH, NO_ID, parse_ddl
from lakebook.names import MAX_TEXT, shown

#: Columns and all that is nested in them.
MAX_FIELDS = 10_000
MAX_COLUMN_NAME = 1000
#: Iceberg keeps the ids above for columns of its own.
MAX_FIELD_ID = 2_147_483_446
FIRST_SCHEMA_ID = 1

_FIELD_ID = b"PARQUET:field_id"
_DOC = b"doc"
_SHOWN_DIFFERENCES = 5
# Bytes of JSON whose schemas are kept; what is made of them takes about ten times as much.
_MOST_STORED = 4 << 20

Path = tuple[str, ...]
T = TypeVar("T")

# --- the types -----------------------------------------------------------------

# Those of format version 2; of the others, no reader of this version knows what to do.
_SIMPLE: dict[str, PrimitiveType] = {
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "date": DateType(),
    "time": TimeType(),
    "timestamp": TimestampType(),
    "timestamptz": TimestamptzType(),
    "string": StringType(),
    "uuid": UUIDType(),
    "binary": BinaryType(),
}
_KNOWN = (*map(type, _SIMPLE.values()), DecimalType, FixedType, StructType, ListType, MapType)
_DECIMAL = re.compile(r"decimal\(([0-9]{1,9}), ?([0-9]{1,9})\)")
_FIXED = re.compile(r"fixed\[([0-9]{1,9})\]")

_SPARK: dict[str, PrimitiveType] = {
    "boolean": BooleanType(),
    "byte": IntegerType(),
    "short": IntegerType(),
    "integer": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "date": DateType(),
    "timestamp": TimestamptzType(),
    "timestamp_ltz": TimestamptzType(),
    "timestamp_ntz": TimestampType(),
    "string": StringType(),
    "binary": BinaryType(),
    "decimal": DecimalType(DEFAULT_PRECISION, DEFAULT_SCALE),
}
_SPARK_TEXT = re.compile(r"(?:var)?char\([0-9]+\)")
_SPARK_TIME = re.compile(r"time(?:\([0-6]\))?")

_ARROW: dict[pa.DataType, PrimitiveType] = {
    pa.bool_(): BooleanType(),
    pa.int8(): IntegerType(),
    pa.int16(): IntegerType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.uint8(): IntegerType(),
    pa.uint16(): IntegerType(),
    pa.uint32(): LongType(),
    pa.float16(): FloatType(),
    pa.float32(): FloatType(),
    pa.float64(): DoubleType(),
    pa.date32(): DateType(),
    pa.time32("s"): TimeType(),
    pa.time32("ms"): TimeType(),
    pa.time64("us"): TimeType(),
    pa.string(): StringType(),
    pa.large_string(): StringType(),
    pa.string_view(): StringType(),
    pa.binary(): BinaryType(),
    pa.large_binary(): BinaryType(),
    pa.binary_view(): BinaryType(),
    pa.uuid(): UUIDType(),
}
_TO_ARROW: dict[type[IcebergType], pa.DataType] = {
    BooleanType: pa.bool_(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    FloatType: pa.float32(),
    DoubleType: pa.float64(),
    DateType: pa.date32(),
    TimeType: pa.time64("us"),
    TimestampType: pa.timestamp("us"),
    TimestamptzType: pa.timestamp("us", "UTC"),
    StringType: pa.string(),
    UUIDType: pa.uuid(),
    BinaryType: pa.binary(),
}


# --- making a schema -----------------------------------------------------------


def schema_from(source: object) -> Schema:
    """The Iceberg schema that something describes.

    A source is a PyIceberg or Arrow schema, a Spark `StructType`, anything that has one of
    these as its `schema` (a DataFrame, an Arrow table), a text such as `id BIGINT NOT NULL,
    tags ARRAY<STRING>`, or Iceberg's JSON form. Only the JSON form keeps its ids; the columns
    of all others are numbered from 1 as Iceberg does it, and the schema's id is 1.
    """
    if isinstance(source, Mapping):
        return schema_from_json(source)
    old_ids = source.identifier_field_ids if isinstance(source, Schema) else []
    fields = _fields_of(source)
    check_fields(fields)
    numbers = count(1)
    renumbered: dict[int, int] = {}

    def next_id(old: int) -> int:
        renumbered[old] = next(numbers)
        return renumbered[old]

    numbered = number_fields(fields, next_id)
    return build_schema(numbered, FIRST_SCHEMA_ID, [renumbered[old] for old in old_ids])


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """A schema in Iceberg's JSON form."""
    return schema.model_dump(mode="json")


def schema_from_json(value: Mapping[str, Any]) -> Schema:
    """The schema of Iceberg's JSON form, with the ids it has there."""
    if not isinstance(value, Mapping) or value.get("type", "struct") != "struct":
        _refuse((), f"{shown(value)} is not a schema in Iceberg's JSON form")
    fields = _fields_from_json(value, ())
    check_fields(fields)
    identifiers = value.get("identifier-field-ids") or []
    if not isinstance(identifiers, list) or not all(_is_number(each, 1) for each in identifiers):
        _refuse((), f"{shown(identifiers)} are not ids of fields")
    return build_schema(fields, value.get("schema-id", 0), identifiers)


_stored: LRUCache[bytes, tuple[Schema, int]] = LRUCache(_MOST_STORED, getsizeof=lambda kept: kept[1])
_stored_lock = threading.Lock()


def stored_schema(value: Mapping[str, Any]) -> Schema:
    """The schema of JSON that the registry has. Many tables and versions have the same one, which is read once."""
    text = orjson.dumps(dict(value))
    with _stored_lock:
        kept = _stored.get(text)
    if kept is not None:
        return kept[0]
    schema = schema_from_json(value)
    # One that takes all the room is read each time.
    if len(text) < _MOST_STORED:
        with _stored_lock:
            _stored[text] = (schema, len(text))
    return schema


def build_schema(fields: Sequence[NestedField], schema_id: int, identifier_field_ids: Sequence[int] = ()) -> Schema:
    """A schema of fields that have been checked and have their ids."""
    if not _is_number(schema_id, 0):
        _refuse((), f"{shown(schema_id)} cannot be the id of a schema")
    seen: set[int] = set()
    for path, field, _ in walk(fields):
        if not _is_number(field.field_id, 1, MAX_FIELD_ID):
            _refuse(path, f"{shown(field.field_id)} cannot be the id of a field")
        if field.field_id in seen:
            _refuse(path, f"another field has the id {field.field_id} too")
        seen.add(field.field_id)
    try:
        return Schema(*fields, schema_id=schema_id, identifier_field_ids=list(identifier_field_ids))
    except ValueError as error:
        raise InvalidSchema(
            f"the columns {shown(list(identifier_field_ids))} cannot identify a row",
            on="schema",
            remedy="Name required columns that are not nested in optional ones, lists or maps",
        ) from error


def number_fields(fields: Iterable[NestedField], next_id: Callable[[int], int]) -> tuple[NestedField, ...]:
    """The same fields with new ids, given in Iceberg's order: a struct's own before those in them."""
    fields = tuple(fields)
    ids = [next_id(field.field_id) for field in fields]
    return tuple(
        with_changes(field, field_id=new_id, field_type=number_type(field.field_type, next_id))
        for new_id, field in zip(ids, fields, strict=True)
    )


def number_type(kind: IcebergType, next_id: Callable[[int], int]) -> IcebergType:
    """The same type, with new ids for all that is nested in it."""
    if isinstance(kind, StructType):
        return StructType(*number_fields(kind.fields, next_id))
    if isinstance(kind, ListType):
        new_id = next_id(kind.element_id)
        return ListType(new_id, number_type(kind.element_type, next_id), element_required=kind.element_required)
    if isinstance(kind, MapType):
        key_id, value_id = next_id(kind.key_id), next_id(kind.value_id)
        key_type = number_type(kind.key_type, next_id)
        value_type = number_type(kind.value_type, next_id)
        return MapType(key_id, key_type, value_id, value_type, value_required=kind.value_required)
    return kind


def with_changes(
    field: NestedField,
    *,
    field_id: int | None = None,
    name: str | None = None,
    field_type: IcebergType | None = None,
    required: bool | None = None,
) -> NestedField:
    """The same field but for what is given."""
    return NestedField(
        field.field_id if field_id is None else field_id,
        field.name if name is None else name,
        field.field_type if field_type is None else field_type,
        field.required if required is None else required,
        field.doc,
    )


# --- what a schema may be ------------------------------------------------------


def check_fields(fields: Sequence[NestedField]) -> None:
    """Refuse columns that a table cannot have; their ids are not looked at."""
    if not fields:
        _refuse((), "there are no columns")
    _check_siblings(fields, ())
    names: set[str] = set()
    for number, (path, field, _) in enumerate(walk(fields), start=1):
        if number > MAX_FIELDS:
            _refuse((), f"there are more than {MAX_FIELDS} columns and nested fields")
        check_depth(path)
        check_doc(field.doc, path)
        if field.initial_default is not None or field.write_default is not None:
            _refuse(path, "a column cannot have a default in format version 2")
        # Iceberg knows a nested field by its names with dots between them.
        full_name = ".".join(path)
        if full_name in names:
            _refuse(path, "a nested field and a column with dots in its name are called the same")
        names.add(full_name)
        _check_type(field.field_type, path)


def check_column_name(name: object, path: Path = ()) -> str:
    """Return `name` if a column or a nested field may have it."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_COLUMN_NAME or not _is_plain(name):
        _refuse(
            path,
            f"{shown(name)} cannot be the name of a column",
            f"Use 1 to {MAX_COLUMN_NAME} characters, and not NUL",
        )
    return name


def check_doc(doc: object, path: Path) -> None:
    """Refuse a comment that not every registry can hold."""
    if doc is not None and (not isinstance(doc, str) or len(doc) > MAX_TEXT or not _is_plain(doc)):
        _refuse(path, f"{shown(doc)} cannot be a comment", f"Use a text of at most {MAX_TEXT} characters, without NUL")


def check_depth(path: Path) -> None:
    """Refuse a field that is nested too deep."""
    if len(path) > MAX_DEPTH:
        _refuse(path[:1], f"it is nested more than {MAX_DEPTH} levels deep")


def folded(name: str) -> str:
    """What of a name remains for Spark, to which `ID` and `id` are the same."""
    # Character by character, as Java compares: 'ß' stays one.
    upper = (char.upper() if len(char.upper()) == 1 else char for char in name)
    return "".join(char.lower()[0] for char in upper)


def _check_siblings(fields: Sequence[NestedField], path: Path) -> None:
    seen: dict[str, str] = {}
    for field in fields:
        check_column_name(field.name, path)
        key = folded(field.name)
        if key in seen:
            remedy = "" if seen[key] == field.name else "Names have to differ in more than case"
            _refuse((*path, field.name), f"there is {shown(seen[key])} already", remedy)
        seen[key] = field.name
    if not fields:
        _refuse(path, "a struct has no fields")


def _check_type(kind: IcebergType, path: Path) -> None:
    if isinstance(kind, StructType):
        _check_siblings(kind.fields, path)
    elif isinstance(kind, DecimalType):
        _decimal(kind.precision, kind.scale, path)
    elif isinstance(kind, FixedType):
        _fixed(len(kind), path)
    elif not isinstance(kind, _KNOWN):
        _refuse_type(kind, path)


def _is_plain(text: str) -> bool:
    return "\0" not in text and text.encode("utf-8", "replace").decode() == text


def _is_number(value: object, least: int, most: int = 2**31 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _decimal(precision: int, scale: int, path: Path) -> DecimalType:
    if not 1 <= precision <= 38 or not 0 <= scale <= precision:
        _refuse(path, f"there is no decimal({precision}, {scale})", "A decimal has 1 to 38 digits")
    return DecimalType(precision, scale)


def _fixed(length: int, path: Path) -> FixedType:
    if not 1 <= length <= 2**31 - 1:
        _refuse(path, f"there is no fixed[{length}]")
    return FixedType(length)


def _refuse(path: Path, what: str, remedy: str = "") -> NoReturn:
    raise InvalidSchema(what, on=f"column {shown('.'.join(path))}" if path else "schema", remedy=remedy)


def _refuse_type(kind: object, path: Path, remedy: str = "") -> NoReturn:
    _refuse(path, f"the type {shown(str(kind))} has no counterpart in a table", remedy)


# --- the sources ---------------------------------------------------------------


def _fields_of(source: object) -> tuple[NestedField, ...]:
    if isinstance(source, Schema):
        return source.fields
    if isinstance(source, pa.Schema):
        return _fields_from_arrow(list(source), ())
    if isinstance(source, str):
        return parse_ddl(source).fields
    # Asked of the class: a frame answers for its columns, whatever they are called.
    if callable(getattr(type(source), "jsonValue", None)):
        described: Any = source
        value = described.jsonValue()
        if isinstance(value, Mapping) and value.get("type") == "struct":
            return _fields_from_spark(value, ())
    elif not callable(getattr(type(source), "schema", len)):
        held: Any = source
        inner = held.schema
        if isinstance(inner, pa.Schema) or callable(getattr(type(inner), "jsonValue", None)):
            return _fields_of(inner)
    _refuse(
        (),
        f"{shown(source)} is not a schema",
        "Give a text, an Arrow, Spark or PyIceberg schema, or a frame that has one",
    )


def _member(value: Mapping[str, Any], key: str, kind: type[T], path: Path) -> T:
    found = value.get(key)
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        _refuse(path, f"{key!r} cannot be {shown(found)}")
    return found


def _members(value: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The fields of a struct in JSON, of Spark or Iceberg, each with its path."""
    for field in _member(value, "fields", list, path):
        if not isinstance(field, Mapping):
            _refuse(path, f"{shown(field)} is not a field")
        yield (*path, check_column_name(field.get("name"), path)), field


def _fields_from_json(value: Mapping[str, Any], path: Path) -> tuple[NestedField, ...]:
    found = []
    for here, field in _members(value, path):
        if field.get("initial-default") is not None or field.get("write-default") is not None:
            _refuse(here, "a column cannot have a default in format version 2")
        check_doc(field.get("doc"), here)
        found.append(
            NestedField(
                _member(field, "id", int, here),
                here[-1],
                _type_from_json(field.get("type"), here),
                _member(field, "required", bool, here),
                field.get("doc"),
            )
        )
    return tuple(found)


def _type_from_json(value: object, path: Path) -> IcebergType:
    check_depth(path)
    if isinstance(value, str):
        if value in _SIMPLE:
            return _SIMPLE[value]
        if match := _DECIMAL.fullmatch(value):
            return _decimal(int(match[1]), int(match[2]), path)
        if match := _FIXED.fullmatch(value):
            return _fixed(int(match[1]), path)
    elif isinstance(value, Mapping):
        match value.get("type"):
            case "struct":
                return StructType(*_nonempty(_fields_from_json(value, path), path))
            case "list":
                return ListType(
                    _member(value, "element-id", int, path),
                    _type_from_json(value.get("element"), (*path, "element")),
                    element_required=_member(value, "element-required", bool, path),
                )
            case "map":
                return MapType(
                    _member(value, "key-id", int, path),
                    _type_from_json(value.get("key"), (*path, "key")),
                    _member(value, "value-id", int, path),
                    _type_from_json(value.get("value"), (*path, "value")),
                    value_required=_member(value, "value-required", bool, path),
                )
    _refuse_type(value, path)


def _fields_from_spark(value: Mapping[str, Any], path: Path) -> tuple[NestedField, ...]:
    found = []
    for here, field in _members(value, path):
        comment = (field.get("metadata") or {}).get("comment")
        check_doc(comment, here)
        kind = _type_from_spark(field.get("type"), here)
        found.append(NestedField(NO_ID, here[-1], kind, not _member(field, "nullable", bool, here), comment))
    return tuple(found)


def _type_from_spark(value: object, path: Path) -> IcebergType:
    check_depth(path)
    if isinstance(value, str):
        if value in _SPARK:
            return _SPARK[value]
        if match := _DECIMAL.fullmatch(value):
            return _decimal(int(match[1]), int(match[2]), path)
        if _SPARK_TEXT.fullmatch(value):
            return StringType()
        if _SPARK_TIME.fullmatch(value):
            return TimeType()
    elif isinstance(value, Mapping):
        match value.get("type"):
            case "struct":
                return StructType(*_nonempty(_fields_from_spark(value, path), path))
            case "array":
                return ListType(
                    NO_ID,
                    _type_from_spark(value.get("elementType"), (*path, "element")),
                    element_required=not _member(value, "containsNull", bool, path),
                )
            case "map":
                return MapType(
                    NO_ID,
                    _type_from_spark(value.get("keyType"), (*path, "key")),
                    NO_ID,
                    _type_from_spark(value.get("valueType"), (*path, "value")),
                    value_required=not _member(value, "valueContainsNull", bool, path),
                )
        value = value.get("type")
    _refuse_type(value, path)


def _fields_from_arrow(fields: Iterable[pa.Field], path: Path) -> tuple[NestedField, ...]:
    found = []
    for field in fields:
        here = (*path, check_column_name(field.name, path))
        doc = (field.metadata or {}).get(_DOC)
        text = None if doc is None else doc.decode("utf-8", "replace")
        check_doc(text, here)
        found.append(NestedField(NO_ID, field.name, _type_from_arrow(field.type, here), not field.nullable, text))
    return tuple(found)


def _type_from_arrow(kind: pa.DataType, path: Path) -> IcebergType:
    """The type whose values hold all that Arrow's can; a type that could lose something is refused."""
    check_depth(path)
    if kind in _ARROW:
        return _ARROW[kind]
    if pa.types.is_dictionary(kind):
        return _type_from_arrow(kind.value_type, path)
    if pa.types.is_struct(kind):
        return StructType(*_nonempty(_fields_from_arrow(list(kind), path), path))
    if pa.types.is_map(kind):
        return MapType(
            NO_ID,
            _type_from_arrow(kind.key_type, (*path, "key")),
            NO_ID,
            _type_from_arrow(kind.item_type, (*path, "value")),
            value_required=not kind.item_field.nullable,
        )
    if isinstance(kind, (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)):
        element = _type_from_arrow(kind.value_type, (*path, "element"))
        return ListType(NO_ID, element, element_required=not kind.value_field.nullable)
    if pa.types.is_decimal(kind):
        return _decimal(kind.precision, kind.scale, path)
    if pa.types.is_fixed_size_binary(kind):
        return _fixed(kind.byte_width, path)
    if pa.types.is_timestamp(kind) and kind.unit != "ns":
        # An instant is the same in every zone; the zone itself is not kept.
        return TimestampType() if kind.tz is None else TimestamptzType()
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        _refuse_type(kind, path, "A table holds microseconds: cast the column")
    _refuse_type(kind, path)


def _nonempty(fields: tuple[NestedField, ...], path: Path) -> tuple[NestedField, ...]:
    # Refused here already: PyIceberg cannot make a list of structs without fields.
    if not fields:
        _refuse(path, "a struct has no fields")
    return fields


# --- looking at a schema -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeafField:
    """A column or nested field that holds values itself.

    `path` has the names from the column down, with `element`, `key` and `value` inside of lists
    and maps. `required` is said of the field alone: one in an optional struct can still be null.
    """

    field_id: int
    path: Path
    type: str
    in_collection: bool
    required: bool


def leaf_fields(schema: Schema) -> list[LeafField]:
    """The fields of a schema that hold values, in the order in which a file has them."""
    return [
        LeafField(field.field_id, path, str(field.field_type), in_collection, field.required)
        for path, field, in_collection in walk(schema.fields)
        if field.field_type.is_primitive
    ]


def last_field_id(schema: Schema) -> int:
    """The highest id of a field that a schema has."""
    return max((field.field_id for _, field, _ in walk(schema.fields)), default=0)


def describe_type(kind: IcebergType) -> str:
    """A type for people, such as `struct<a: int, b: list<string>>`."""
    if isinstance(kind, StructType):
        return f"struct<{', '.join(f'{field.name}: {describe_type(field.field_type)}' for field in kind.fields)}>"
    if isinstance(kind, ListType):
        return f"list<{describe_type(kind.element_type)}>"
    if isinstance(kind, MapType):
        return f"map<{describe_type(kind.key_type)}, {describe_type(kind.value_type)}>"
    return str(kind)


def children(kind: IcebergType) -> tuple[NestedField, ...]:
    """The fields that a type consists of, and none for a type that holds values itself."""
    if isinstance(kind, StructType):
        return kind.fields
    if isinstance(kind, ListType):
        return (kind.element_field,)
    if isinstance(kind, MapType):
        return (kind.key_field, kind.value_field)
    return ()


def walk(fields: Sequence[NestedField]) -> Iterator[tuple[Path, NestedField, bool]]:
    """Every field, each before what is nested in it, with its path and whether a list or map holds it."""
    waiting: list[tuple[Path, NestedField, bool]] = [((field.name,), field, False) for field in reversed(fields)]
    while waiting:
        path, field, in_collection = waiting.pop()
        yield path, field, in_collection
        inside = in_collection or not field.field_type.is_struct
        waiting.extend(((*path, child.name), child, inside) for child in reversed(children(field.field_type)))


def find_column(fields: Sequence[NestedField], path: object) -> Path | None:
    """The path of a column or nested field, or None if there is none.

    It is given as a tuple of names or as a text. A text is first taken for the name of a column,
    then for names with dots between them, and then for such names in back or double quotes.
    """
    if isinstance(path, str):
        found = _find_dotted(fields, path)
        if found is not None:
            return found
        path = split_path(path)
    if not isinstance(path, (tuple, list)) or not path:
        return None
    here: Sequence[NestedField] = fields
    for name in path:
        field = next((field for field in here if field.name == name), None)
        if field is None:
            return None
        here = children(field.field_type)
    return tuple(path)


def field_at(fields: Sequence[NestedField], path: Path) -> NestedField:
    """The field that a path from `find_column` leads to."""
    field = next(field for field in fields if field.name == path[0])
    for name in path[1:]:
        field = next(child for child in children(field.field_type) if child.name == name)
    return field


_PART = re.compile(r'`((?:[^`]|``)+)`|"((?:[^"]|"")+)"|([^.`"][^.]*)')


def split_path(text: str) -> Path | None:
    """The names in a text such as ``a.`b.c` ``, or None if it has no such form."""
    found, at = [], 0
    while match := _PART.match(text, at):
        back, double, plain = match.groups()
        found.append(plain or (back.replace("``", "`") if back else double.replace('""', '"')))
        at = match.end()
        if at == len(text):
            return tuple(found)
        if text[at] != ".":
            return None
        at += 1
    return None


def _find_dotted(fields: Sequence[NestedField], text: str) -> Path | None:
    if any(field.name == text for field in fields):
        return (text,)
    for field in fields:
        if text.startswith(field.name + "."):
            inside = _find_dotted(children(field.field_type), text[len(field.name) + 1 :])
            if inside is not None:
                return (field.name, *inside)
    return None


# --- into Arrow ----------------------------------------------------------------


def arrow_schema(schema: Schema) -> pa.Schema:
    """The schema of a table's Parquet files, with the id of every field in its metadata."""
    return pa.schema([_to_arrow_field(field) for field in schema.fields])


def _to_arrow_field(field: NestedField) -> pa.Field:
    metadata = {_FIELD_ID: str(field.field_id).encode()}
    return pa.field(field.name, _to_arrow(field.field_type), nullable=field.optional, metadata=metadata)


def _to_arrow(kind: IcebergType) -> pa.DataType:
    if isinstance(kind, StructType):
        return pa.struct([_to_arrow_field(field) for field in kind.fields])
    if isinstance(kind, ListType):
        return pa.list_(_to_arrow_field(kind.element_field))
    if isinstance(kind, MapType):
        return pa.map_(_to_arrow_field(kind.key_field), _to_arrow_field(kind.value_field))
    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, FixedType):
        return pa.binary(len(kind))
    return _TO_ARROW[type(kind)]


# --- fitting together ----------------------------------------------------------


def can_promote(old: IcebergType, new: IcebergType) -> bool:
    """Whether every value of the old type is one of the new: the same, or wider as Iceberg allows."""
    # Not PyIceberg's `promote`: it takes a string for binary, and any scale of a decimal.
    if isinstance(old, DecimalType) and isinstance(new, DecimalType):
        return old.scale == new.scale and old.precision <= new.precision
    widened = (isinstance(old, IntegerType) and isinstance(new, LongType)) or (
        isinstance(old, FloatType) and isinstance(new, DoubleType)
    )
    return widened or old == new


def as_spark_has(schema: Schema) -> Schema:
    """The schema with texts for UUIDs and bytes for fixed ones, as Spark reads and writes them."""

    def changed(kind: IcebergType) -> IcebergType:
        if isinstance(kind, StructType):
            return StructType(*(with_changes(field, field_type=changed(field.field_type)) for field in kind.fields))
        if isinstance(kind, ListType):
            return ListType(kind.element_id, changed(kind.element_type), element_required=kind.element_required)
        if isinstance(kind, MapType):
            key, value = changed(kind.key_type), changed(kind.value_type)
            return MapType(kind.key_id, key, kind.value_id, value, value_required=kind.value_required)
        return StringType() if isinstance(kind, UUIDType) else BinaryType() if isinstance(kind, FixedType) else kind

    found = changed(schema.as_struct())
    assert isinstance(found, StructType)
    return Schema(*found.fields, schema_id=schema.schema_id)


def check_writable_from(table_schema: Schema, incoming: Schema) -> None:
    """Refuse a frame whose schema does not fit the table's.

    Columns are matched by name at every depth, in any order. An optional one may be missing: it
    becomes null. A type may be narrower. Whether a column that may be null has a null where the
    table allows none is for the writer to see.
    """
    found = list(_differences(table_schema.fields, incoming.fields, ()))
    if found:
        more = f"; and {len(found) - _SHOWN_DIFFERENCES} more" if len(found) > _SHOWN_DIFFERENCES else ""
        raise IncompatibleSchema(
            "; ".join(found[:_SHOWN_DIFFERENCES]) + more,
            on="schema",
            remedy="Select, rename and cast the columns to those of the table, or change the table's schema first",
        )


def _differences(table: Sequence[NestedField], incoming: Sequence[NestedField], path: Path) -> Iterator[str]:
    given = {field.name: field for field in incoming}
    for field in table:
        here = (*path, field.name)
        other = given.pop(field.name, None)
        if other is not None:
            yield from _type_differences(field.field_type, other.field_type, here)
        elif field.required:
            yield f"the required column {shown('.'.join(here))} is missing"
    for name in given:
        yield f"the table has no column {shown('.'.join((*path, name)))}"


def _type_differences(table: IcebergType, incoming: IcebergType, path: Path) -> Iterator[str]:
    if isinstance(table, StructType) and isinstance(incoming, StructType):
        yield from _differences(table.fields, incoming.fields, path)
    elif isinstance(table, ListType) and isinstance(incoming, ListType):
        yield from _type_differences(table.element_type, incoming.element_type, (*path, "element"))
    elif isinstance(table, MapType) and isinstance(incoming, MapType):
        yield from _type_differences(table.key_type, incoming.key_type, (*path, "key"))
        yield from _type_differences(table.value_type, incoming.value_type, (*path, "value"))
    elif not can_promote(incoming, table):
        wanted, given = shown(describe_type(table)), shown(describe_type(incoming))
        yield f"the column {shown('.'.join(path))} is {wanted} in the table and cannot take {given}"
