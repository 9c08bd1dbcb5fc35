"""What `lakebook produce` reads from Parquet: columns, as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakebook.cli.record_input import Shape
from lakebook.errors import InvalidInput
from lakebook.names import shown
from lakebook.streams.segment_files import HEADERS

_PARTS = ("partition", "timestamp", "key", "value", "headers")


def tables(stream: IO[bytes], shape: Shape) -> Iterator[pa.Table]:
    """The rows of a Parquet file in tables that a producer takes, one after the other."""
    try:
        # Parquet is read from its end: what comes through a pipe has to be there as a whole.
        source = stream if stream.seekable() else pa.BufferReader(stream.read())
        with pq.ParquetFile(source) as file:
            columns = _columns(file.schema_arrow.names, shape)
            for batch in file.iter_batches(columns=list(columns.values())):
                yield _table(batch, columns, shape)
    except pa.ArrowException as error:
        raise InvalidInput(f"it cannot be read as Parquet ({error})", on="input") from None


def _columns(names: list[str], shape: Shape) -> dict[str, str]:
    """Which column is which part of a record."""
    asked = {"key": shape.key_field, "value": shape.value_field, "timestamp": shape.timestamp_field}
    found = {}
    for part in _PARTS:
        name = asked.get(part)
        if name is None and (part in names or part == "value"):
            name = part
        if name is None:
            continue
        if name not in names:
            raise InvalidInput(
                f"there is no column {shown(name)}",
                on="input",
                remedy=f"Name the {part} with --{part}-field; the columns are {', '.join(map(shown, names))}",
            )
        found[part] = name
    return found


def _table(batch: pa.RecordBatch, columns: dict[str, str], shape: Shape) -> pa.Table:
    found = {part: batch.column(name) for part, name in columns.items()}
    if pa.types.is_integer(found.get("timestamp", pa.nulls(0)).type):
        found["timestamp"] = found["timestamp"].cast(pa.int64()).cast(pa.timestamp("ms", "UTC"))
    if shape.partition is not None:
        found["partition"] = pa.repeat(pa.scalar(shape.partition, pa.int64()), batch.num_rows)
    if shape.headers:
        if "headers" in columns:
            raise InvalidInput("the file has headers of its own", on="--header", remedy="Leave the option out")
        fixed = [{"key": name, "value": value} for name, value in shape.headers]
        found["headers"] = pa.repeat(pa.scalar(fixed, HEADERS), batch.num_rows)
    return pa.table(found)


def content_size(table: pa.Table) -> int:
    """The bytes of a table's keys and values."""
    return sum(_bytes_of(table.column(name)) for name in ("key", "value") if name in table.column_names)


def _bytes_of(column: pa.ChunkedArray) -> int:
    kind = column.type
    if not (pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return int(column.nbytes)
    return pc.sum(pc.binary_length(column)).as_py() or 0
