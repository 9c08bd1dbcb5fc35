"""Arrow tables in the shape of a table's schema: on their way into a file, and out of one."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from cachetools import LRUCache, cached
from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException, pyarrow_to_schema
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import create_mapping_from_schema
from pyiceberg.table.sorting import NullOrder, SortDirection, SortOrder
from pyiceberg.typedef import Record
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType

from lakebook.errors import IncompatibleSchema, InvalidFile
from lakebook.iceberg.schemas import (
    arrow_schema,
    can_promote,
    check_writable_from,
    children,
    field_at,
    leaf_fields,
    schema_from,
    walk,
    with_changes,
)
from lakebook.names import shown
from lakebook.predicates import FLOATING

_ID = b"PARQUET:field_id"


# By identity, because a schema has no hash; what is kept holds it, so that no other can have its id.
@cached(LRUCache(256), key=id, lock=threading.Lock())
def _plain_and_marked(schema: Schema) -> tuple[pa.Schema, pa.Schema, Schema]:
    marked = arrow_schema(schema)
    return _without_metadata(marked), marked, schema


def _without_metadata(schema: pa.Schema) -> pa.Schema:
    return pa.schema([_plain(field) for field in schema])


def _plain(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _plain_type(field.type), nullable=True)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([_plain(kind.field(number)) for number in range(kind.num_fields)])
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", _plain_type(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    return kind


def aligned(data: pa.Table, schema: Schema) -> pa.Table:
    """The same rows with the table's columns, in its order, with field ids at every depth."""
    plain, marked, _ = _plain_and_marked(schema)
    if _without_metadata(data.schema) == plain:
        return data.cast(marked)
    incoming = schema_from(data.schema)
    check_writable_from(schema, incoming)
    given = Schema(*_numbered(incoming.fields, schema.fields))
    try:
        batches = [_projected(schema, given, batch, plain) for batch in data.to_batches()]
        return pa.Table.from_batches(batches, plain).cast(marked)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise IncompatibleSchema(
            f"the rows do not fit the table's schema ({shown(str(error))})",
            on="insert",
            remedy="Bring the columns into the types of the table first",
        ) from None


def _numbered(given: Sequence[NestedField], table: Sequence[NestedField]) -> list[NestedField]:
    """Fields with the ids that the table's of the same names have, at every depth."""
    known = {field.name: field for field in table}
    return [
        with_changes(
            field,
            field_id=known[field.name].field_id,
            field_type=_numbered_type(field.field_type, known[field.name].field_type),
        )
        for field in given
    ]


def _numbered_type(given: Any, table: Any) -> IcebergType:
    if isinstance(given, StructType):
        return StructType(*_numbered(given.fields, table.fields))
    if isinstance(given, ListType):
        element = _numbered_type(given.element_type, table.element_type)
        return ListType(table.element_id, element, element_required=given.element_required)
    if isinstance(given, MapType):
        key = _numbered_type(given.key_type, table.key_type)
        value = _numbered_type(given.value_type, table.value_type)
        return MapType(table.key_id, key, table.value_id, value, value_required=given.value_required)
    kind: IcebergType = given
    return kind


def partitions_of(data: pa.Table, spec: PartitionSpec, schema: Schema) -> Iterator[tuple[Record, pa.Table]]:
    """The rows of each partition."""
    if spec.is_unpartitioned():
        yield Record(), data
        return
    # Not by PyIceberg: by its comparisons NaN is in no partition, and it finds nested columns by names with dots.
    columns = [_transformed(data, schema, field) for field in spec.fields]
    keys = [_key(column) for column in columns]
    names = [str(number) for number in range(len(keys))]
    rows = pa.table([*keys, pa.array(range(data.num_rows), pa.int64())], names=[*names, "row"])
    for found in rows.group_by(names).aggregate([("row", "list")]).column("row_list"):
        record = Record(*(column[found[0].as_py()].as_py() for column in columns))
        yield record, data.take(found.values).combine_chunks()


def _transformed(data: pa.Table, schema: Schema, field: Any) -> pa.Array:
    """The values of a field of a partition spec or a sort order."""
    path = next(path for path, found, _ in walk(schema.fields) if found.field_id == field.source_id)
    values: pa.ChunkedArray = data.column(path[0])
    for position, name in enumerate(path[1:], 1):
        kind: Any = field_at(schema.fields, path[:position]).field_type
        values = pc.struct_field(values, [[child.name for child in kind.fields].index(name)])
    source = schema.find_field(field.source_id).field_type
    return field.transform.pyarrow_transform(source)(values.combine_chunks())


def sorted_rows(data: pa.Table, order: SortOrder, schema: Schema) -> pa.Table:
    """The rows in the table's order, nulls where it says."""
    keys: dict[str, pa.Array] = {}
    directions = []
    for number, field in enumerate(order.fields):
        values = _transformed(data, schema, field)
        down = field.direction == SortDirection.DESC
        # Where nulls go is said for all keys of a sort at once; here each has its own say.
        keys[f"null {number}"] = values.is_null().cast(pa.int8())
        keys[str(number)] = values.storage if isinstance(values, pa.ExtensionArray) else values
        first = field.null_order == NullOrder.NULLS_FIRST
        directions += [(f"null {number}", "descending" if first else "ascending")]
        directions += [(str(number), "descending" if down else "ascending")]
    return data.take(pc.sort_indices(pa.table(keys), sort_keys=directions))


def _key(column: pa.Array) -> pa.Array:
    """What rows of the same partition share, in a type that can be grouped by."""
    if pa.types.is_floating(column.type):
        # Its bits: NaN is not equal to itself, and 0.0 is equal to -0.0.
        return column.view(f"int{column.type.bit_width}")
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def check_foreign(columns: pa.Schema) -> None:
    """Refuse columns that engines read differently: of some types, or with field ids on some of them only."""
    fields = list(_nested(columns, ()))
    marked = [field for _, field in fields if field.metadata is not None and _ID in field.metadata]
    if marked and len(marked) != len(fields):
        raise InvalidFile("some of its columns carry field ids and some do not", on="file", remedy="Write it anew")
    for path, field in fields:
        kind = field.type
        if (
            pa.types.is_unsigned_integer(kind)
            or pa.types.is_float16(kind)
            or (pa.types.is_timestamp(kind) and kind.unit != "us")
        ):
            raise InvalidFile(f"its column {shown('.'.join(path))} is {kind}, which not every engine reads", on="file")


def _nested(fields: Iterable[pa.Field], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], pa.Field]]:
    for field in fields:
        here = (*path, field.name)
        yield here, field
        kind = field.type
        if pa.types.is_struct(kind):
            yield from _nested([kind.field(number) for number in range(kind.num_fields)], here)
        elif pa.types.is_map(kind):
            yield from _nested([kind.key_field, kind.item_field], here)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            yield from _nested([kind.value_field], here)


def nan_counts(data: pa.Table, schema: Schema) -> dict[int, int]:
    """How many NaN each column has that can have some."""
    counts: dict[int, int] = {}
    for leaf in leaf_fields(schema):
        if leaf.type in FLOATING and not leaf.in_collection:
            column = data.column(leaf.path[0])
            if len(leaf.path) > 1:
                column = pc.struct_field(column, list(leaf.path[1:]))
            counts[leaf.field_id] = pc.sum(pc.is_nan(column)).as_py() or 0
    return counts


def has_field_ids(schema: pa.Schema) -> bool:
    """Whether a file's columns carry field ids."""
    return all(field.metadata is not None and _ID in field.metadata for field in schema)


def file_schema(columns: pa.Schema, names: Schema) -> Schema:
    """The schema of a file by field ids: its own, or by the names of `names` where it has none."""
    try:
        if has_field_ids(columns):
            return pyarrow_to_schema(columns)
        plain = pa.schema([_unmarked(field) for field in columns])
        return pyarrow_to_schema(plain, create_mapping_from_schema(names))
    except (ValueError, TypeError, pa.ArrowException, UnsupportedPyArrowTypeException) as error:
        raise InvalidFile(
            f"its columns cannot be mapped to the table's ({shown(str(error))})",
            on="file",
            remedy="A file may have only columns that the table has",
        ) from None


def projected(batch: pa.RecordBatch, schema: Schema, given: Schema) -> pa.RecordBatch:
    """A batch of a file, as rows of the asked-for schema: by field id at every depth."""
    return _projected(schema, given, batch, plain_schema(schema))


def _projected(schema: Schema, given: Schema, batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    # Not PyIceberg's: two collections deep it goes by names, and it takes a null list of structs for an empty one.
    found = {field.field_id: batch.column(at) for at, field in enumerate(given.fields)}
    kinds = {field.field_id: field.field_type for field in given.fields}
    columns = [
        _array(found[field.field_id], kinds[field.field_id], field.field_type, target.field(at).type)
        if field.field_id in found
        else pa.nulls(batch.num_rows, target.field(at).type)
        for at, field in enumerate(schema.fields)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _array(values: pa.Array, given: Any, wanted: IcebergType, target: pa.DataType) -> pa.Array:
    """An array of a file in the type of the asked-for field, whose children are found by their ids."""
    if isinstance(values, pa.DictionaryArray):
        values = values.dictionary_decode()
    if isinstance(wanted, StructType):
        there = {field.field_id: (values.field(at), field.field_type) for at, field in enumerate(given.fields)}
        inner = [
            _array(*there[field.field_id], field.field_type, kind.type)
            if field.field_id in there
            else pa.nulls(len(values), kind.type)
            for field, kind in zip(wanted.fields, target, strict=True)
        ]
        return pa.StructArray.from_arrays(inner, fields=list(target), mask=values.is_null())
    if isinstance(wanted, ListType):
        whole = _flat(values)
        inside = _array(whole.values, given.element_type, wanted.element_type, target.value_type)
        return pa.ListArray.from_arrays(whole.offsets, inside, type=target, mask=whole.is_null())
    if isinstance(wanted, MapType):
        whole = pa.concat_arrays([values]) if values.offset else values
        keys = _array(whole.keys, given.key_type, wanted.key_type, target.key_type)
        items = _array(whole.items, given.value_type, wanted.value_type, target.item_type)
        return pa.MapArray.from_arrays(whole.offsets, keys, items, type=target, mask=whole.is_null())
    if isinstance(target, pa.BaseExtensionType) and not isinstance(values.type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(target, values.cast(target.storage_type))
    return values if values.type == target else values.cast(target)


def _flat(values: pa.Array) -> pa.ListArray:
    """A list array that begins at its first value, with offsets of 32 bits."""
    kind = pa.list_(values.type.value_field)
    plain = values.cast(kind) if values.type != kind else values
    return pa.concat_arrays([plain]) if plain.offset else plain


def plain_schema(schema: Schema) -> pa.Schema:
    """The columns of a schema as Arrow has them, without field ids."""
    marked = arrow_schema(schema)
    return pa.schema([_unmarked(field) for field in marked])


def _unmarked(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _unmarked_type(field.type), nullable=field.nullable)


def _unmarked_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([_unmarked(kind.field(number)) for number in range(kind.num_fields)])
    if pa.types.is_list(kind):
        return pa.list_(_unmarked(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(_unmarked(kind.key_field), _unmarked(kind.item_field))
    return kind


def selected(schema: Schema, names: Collection[str], field_ids: Collection[int]) -> Schema:
    """The columns of these names, and those that have these fields in them."""
    holding = {leaf.path[0] for leaf in leaf_fields(schema) if leaf.field_id in field_ids}
    kept = [field for field in schema.fields if field.name in names or field.name in holding]
    return Schema(*kept, schema_id=schema.schema_id)


def check_readable_as(given: Schema, table: Schema) -> None:
    """Refuse a file whose columns, by their ids, cannot be read as the table's."""
    _check_fields(given.fields, table.fields, ())


def _check_fields(given: Sequence[NestedField], table: Sequence[NestedField], path: tuple[str, ...]) -> None:
    known = {field.field_id: field for field in table}
    present: set[int] = set()
    for field in given:
        here = (*path, field.name)
        expected = known.get(field.field_id)
        if expected is None or field.field_id in present:
            raise _unreadable(here, "is not the table's" if expected is None else "has an id that is given twice")
        present.add(field.field_id)
        if expected.required and not field.required:
            raise _unreadable(here, "may be null, the table's may not")
        kinds = field.field_type, expected.field_type
        if any(kind.is_primitive for kind in kinds):
            if kinds[0] != kinds[1] and not can_promote(*kinds):
                raise _unreadable(here, f"is {kinds[0]}, the table's is {kinds[1]}")
        elif type(kinds[0]) is not type(kinds[1]):
            raise _unreadable(here, "is of another kind than the table's")
        else:
            _check_fields(children(kinds[0]), children(kinds[1]), here)
    for field in table:
        if field.required and field.field_id not in present:
            raise _unreadable((*path, field.name), "is required, and the file has it not")


def _unreadable(path: tuple[str, ...], what: str) -> InvalidFile:
    return InvalidFile(f"the column {shown('.'.join(path))} {what}", on="file")
