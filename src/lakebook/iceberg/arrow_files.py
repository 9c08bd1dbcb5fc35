"""Arrow tables in the shape of a table's schema: on their way into a file, and out of one."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator

import pyarrow as pa
import pyarrow.compute as pc
from cachetools import LRUCache, cached
from pyiceberg.io.pyarrow import (
    ParquetFormatModel,
    _determine_partitions,
    _to_requested_schema,
    pyarrow_to_schema,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import create_mapping_from_schema
from pyiceberg.typedef import Record

from lakebook.errors import IncompatibleSchema, InvalidFile
from lakebook.iceberg.schemas import arrow_schema, can_promote, check_writable_from, leaf_fields, schema_from, walk
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
    check_writable_from(schema, schema_from(data.schema))
    try:
        given = pyarrow_to_schema(_without_metadata(data.schema), create_mapping_from_schema(schema))
        batches = [
            _to_requested_schema(schema, given, batch, include_field_ids=True, format_model=ParquetFormatModel())
            for batch in data.to_batches()
        ]
        return pa.Table.from_batches(batches).cast(marked) if batches else pa.Table.from_batches([], marked)
    except (ValueError, pa.ArrowException) as error:
        raise IncompatibleSchema(
            f"the rows do not fit the table's schema ({shown(str(error))})",
            on="insert",
            remedy="Bring the columns into the types of the table first",
        ) from None


def partitions_of(data: pa.Table, spec: PartitionSpec, schema: Schema) -> Iterator[tuple[Record, pa.Table]]:
    """The rows of each partition."""
    if spec.is_unpartitioned():
        yield Record(), data
        return
    for part in _determine_partitions(spec, schema, data):
        yield part.partition_key.partition, part.arrow_table_partition


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
        return pyarrow_to_schema(_without_metadata(columns), create_mapping_from_schema(names))
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise InvalidFile(
            f"its columns cannot be mapped to the table's ({shown(str(error))})",
            on="file",
            remedy="A file may have only columns that the table has",
        ) from None


def projected(batch: pa.RecordBatch, schema: Schema, given: Schema) -> pa.RecordBatch:
    """A batch of a file, as rows of the asked-for schema: by field id at every depth."""
    return _to_requested_schema(schema, given, batch)


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
    known = {field.field_id: (path, field) for path, field, _ in walk(table.fields)}
    present = set()
    for path, field, _ in walk(given.fields):
        present.add(field.field_id)
        if field.field_id not in known:
            raise InvalidFile(f"it has a column {'.'.join(path)!r} that the table has not", on="file")
        expected = known[field.field_id][1]
        kinds = field.field_type, expected.field_type
        if any(kind.is_primitive for kind in kinds):
            if kinds[0] != kinds[1] and not can_promote(*kinds):
                raise InvalidFile(f"its column {'.'.join(path)!r} is {kinds[0]}, the table's is {kinds[1]}", on="file")
        elif type(kinds[0]) is not type(kinds[1]):
            raise InvalidFile(f"its column {'.'.join(path)!r} is of another kind than the table's", on="file")
        if expected.required and not field.required:
            raise InvalidFile(f"its column {'.'.join(path)!r} may be null, the table's may not", on="file")
    for path, field, _ in walk(table.fields):
        if field.required and field.field_id not in present and len(path) == 1:
            raise InvalidFile(f"it lacks the column {'.'.join(path)!r}, which is required", on="file")
