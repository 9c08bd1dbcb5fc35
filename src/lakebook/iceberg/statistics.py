"""Column statistics of data files, from a staged manifest or from a Parquet footer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow.parquet import FileMetaData
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record

from lakebook.errors import InvalidFile, LakebookError
from lakebook.iceberg.bounds import (
    NOTHING,
    ColumnBounds,
    decode,
    encode,
    encode_iceberg,
    interval_key,
    sort_key,
)
from lakebook.iceberg.schemas import LeafField, leaf_fields
from lakebook.predicates import FLOATING
from lakebook.registry.file_stats import ColumnStats

#: Types whose bounds another writer may have cut.
_CUT = ("string", "binary", "fixed")


def column_stats(
    field_id: int, kind: str, bounds: ColumnBounds, *, is_exact: bool, column_size: int | None = None
) -> ColumnStats:
    """A row of statistics, with what the index over it needs."""
    width, low_key = interval_key(kind, bounds)
    lower, upper = (None, None) if width == NOTHING else (bounds.lower, bounds.upper)
    exact = is_exact and (width == NOTHING or (lower is not None and upper is not None))
    return ColumnStats(
        field_id,
        lower,
        upper,
        exact,
        bounds.value_count,
        bounds.null_count,
        bounds.nan_count,
        column_size,
        width,
        low_key,
    )


def bounds_of(stats: ColumnStats | None) -> ColumnBounds | None:
    """What a predicate is tested against."""
    if stats is None:
        return None
    return ColumnBounds(stats.lower, stats.upper, stats.value_count, stats.null_count, stats.nan_count)


def stats_from_manifest(schema: Schema, file: DataFile) -> tuple[ColumnStats, ...]:
    """The statistics that the writer of a staged table recorded."""
    lowers, uppers = file.lower_bounds or {}, file.upper_bounds or {}
    values, nulls = file.value_counts or {}, file.null_value_counts or {}
    nans, sizes = file.nan_value_counts or {}, file.column_sizes or {}
    found = []
    for leaf in leaf_fields(schema):
        if leaf.in_collection:
            continue
        number = leaf.field_id
        bounds = ColumnBounds(
            _encoded(leaf.type, lowers.get(number)),
            _encoded(leaf.type, uppers.get(number)),
            values.get(number),
            nulls.get(number),
            nans.get(number),
        )
        found.append(column_stats(number, leaf.type, bounds, is_exact=True, column_size=sizes.get(number)))
    return tuple(found)


_TIMES = ("timestamp", "timestamptz")


def time_fields(schemas: Iterable[Schema]) -> dict[int, str]:
    """The columns of timestamps that schemas have, with their types, by field id."""
    leaves = (leaf for schema in schemas for leaf in leaf_fields(schema))
    return {leaf.field_id: leaf.type for leaf in leaves if leaf.type in _TIMES and not leaf.in_collection}


def said_times(fields: Mapping[int, str], file: DataFile) -> tuple[ColumnStats, ...]:
    """What the writer of a file says of its columns of timestamps, as far as it can be true.

    Bounds of timestamps are never cut, so they tell which times have rows. Nobody has compared them with the file.
    """
    lowers, uppers = file.lower_bounds or {}, file.upper_bounds or {}
    nulls = file.null_value_counts or {}
    found = []
    for number, kind in fields.items():
        lower, upper = _encoded(kind, lowers.get(number)), _encoded(kind, uppers.get(number))
        count = nulls.get(number)
        is_bounded = lower is not None and upper is not None and lower <= upper
        if not is_bounded and count != file.record_count:
            continue
        bounds = ColumnBounds(lower, upper, file.record_count, None if is_bounded else count, 0)
        found.append(column_stats(number, kind, bounds, is_exact=False))
    return tuple(found)


def _encoded(kind: str, stored: bytes | None) -> bytes | None:
    return None if stored is None else encode_iceberg(kind, stored)


def partition_stats(spec: PartitionSpec, schema: Schema, record: Record) -> tuple[ColumnStats, ...]:
    """A file's partition values as statistics, so that the same search finds them."""
    found = []
    for position, field in enumerate(spec.fields):
        kind = str(field.transform.result_type(schema.find_type(field.source_id)))
        value = record[position]
        encoded = None
        if value is not None:
            try:
                encoded = encode(kind, value)
            except LakebookError:
                encoded = None
        nulls = 1 if value is None else 0
        nans = 1 if value is not None and encoded is None else 0
        bounds = ColumnBounds(encoded, encoded, 1, nulls, nans)
        found.append(column_stats(-field.field_id, kind, bounds, is_exact=True))
    return tuple(found)


_NUMBERS = ("int", "long", "date", "time", "timestamp", "timestamptz")


def partition_of(spec: PartitionSpec, schema: Schema, stats: Sequence[ColumnStats]) -> Record:
    """The partition of a file that others wrote, from the bounds of its columns; its rows must be of one."""
    known = {item.field_id: item for item in stats}
    values = []
    for field in spec.fields:
        kind = str(schema.find_type(field.source_id))
        found = known.get(field.source_id)
        values.append(_only_value(field, kind, found, schema))
    return Record(*values)


def _only_value(field: PartitionField, kind: str, stats: ColumnStats | None, schema: Schema) -> Any:
    if stats is not None and stats.width == NOTHING:
        return None
    if stats is not None and stats.lower is not None and stats.upper is not None and stats.null_count == 0:
        nan_free = kind not in FLOATING or stats.nan_count == 0
        ends = (stats.lower, stats.upper)
        transform = field.transform.transform(schema.find_type(field.source_id))
        # A date or a time in Iceberg's own number, which is also its key in the index.
        least, largest = (transform(sort_key(kind, end) if kind in _NUMBERS else decode(kind, end)) for end in ends)
        if nan_free and least == largest and (field.transform.preserves_order or stats.lower == stats.upper):
            return least
    raise InvalidFile(
        f"it cannot be told that all its rows are of one partition by {field.name!r}",
        on="file",
        remedy="Write one file per partition, with column statistics, or insert its rows with Spark",
    )


# --- footers -------------------------------------------------------------------


@dataclass(frozen=True)
class FooterColumns:
    """The columns of a Parquet file, by field id."""

    metadata: FileMetaData
    leaves: Sequence[LeafField]

    def indexes(self) -> dict[int, int]:
        """The position of each column that is not in a list or a map."""
        return {leaf.field_id: index for index, leaf in enumerate(self.leaves) if not leaf.in_collection}


def footer_columns(metadata: FileMetaData, file_schema: Schema) -> FooterColumns | None:
    """A footer's columns; none if they cannot be told apart."""
    leaves = leaf_fields(file_schema)
    # Parquet's columns are the leaves of its schema in order; names would not do, as they may have dots.
    return FooterColumns(metadata, leaves) if len(leaves) == metadata.num_columns else None


def stats_from_footer(
    columns: FooterColumns, nan_counts: Mapping[int, int] | None = None, *, ours: bool = False
) -> tuple[ColumnStats, ...]:
    """The statistics of a file from its footer; `nan_counts` is what its writer counted.

    `ours`: the file was written here, with bounds that were not cut.
    """
    found = []
    groups = [columns.metadata.row_group(number) for number in range(columns.metadata.num_row_groups)]
    for field_id, index in columns.indexes().items():
        kind = columns.leaves[index].type
        chunks = [group.column(index) for group in groups]
        bounds = [_chunk_bounds(chunk, kind) for chunk in chunks]
        nans = 0 if kind not in FLOATING else (nan_counts or {}).get(field_id)
        merged = ColumnBounds(
            _extreme(min, [item.lower for item in bounds], bounds),
            _extreme(max, [item.upper for item in bounds], bounds),
            _total([item.value_count for item in bounds]),
            _total([item.null_count for item in bounds]),
            nans,
        )
        exact = ours or not kind.startswith(_CUT)
        size = sum(chunk.total_compressed_size for chunk in chunks)
        found.append(column_stats(field_id, kind, merged, is_exact=exact, column_size=size))
    return tuple(found)


def _chunk_bounds(chunk: Any, kind: str, nans: int | None = None) -> ColumnBounds:
    values = chunk.num_values
    stats = chunk.statistics if chunk.is_stats_set else None
    if stats is None:
        return ColumnBounds(value_count=values, nan_count=nans)
    nulls = stats.null_count if stats.has_null_count else None
    lower = upper = None
    if stats.has_min_max:
        lower, upper = _value(kind, lambda: stats.min), _value(kind, lambda: stats.max)
    return ColumnBounds(lower, upper, values, nulls, nans)


def _value(kind: str, get: Callable[[], Any]) -> bytes | None:
    # A time that Python cannot hold, or text that is none, is no bound.
    try:
        return encode(kind, get())
    except (LakebookError, ValueError, OverflowError, TypeError, pa.ArrowException):
        return None


def _without_values(chunk: ColumnBounds) -> bool:
    return chunk.value_count is not None and chunk.value_count == chunk.null_count


def _extreme(
    choose: Callable[[list[bytes]], bytes], found: Sequence[bytes | None], chunks: Sequence[ColumnBounds]
) -> bytes | None:
    """The least or largest bound, if every chunk that has values has one."""
    kept = [item for item, chunk in zip(found, chunks, strict=True) if not _without_values(chunk)]
    known = [item for item in kept if item is not None]
    return choose(known) if known and len(known) == len(kept) else None


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def matching_row_groups(
    columns: FooterColumns, may_match: Callable[[Callable[[int], ColumnBounds | None]], bool]
) -> tuple[int, ...]:
    """The row groups in which some row can match."""
    indexes = columns.indexes()
    kept = []
    for number in range(columns.metadata.num_row_groups):
        group = columns.metadata.row_group(number)

        def of(field_id: int, group: Any = group) -> ColumnBounds | None:
            index = indexes.get(field_id)
            if index is None:
                return None
            return _chunk_bounds(group.column(index), columns.leaves[index].type)

        if may_match(of):
            kept.append(number)
    return tuple(kept)
