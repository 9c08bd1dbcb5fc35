"""Segments as files: Parquet with field ids, written once, read from any offset on.

A segment is made as a whole in memory, so that its checksum and its footer are known without reading it again.
Its offsets have no gap: which row group holds one is counted from its footer.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from lakebook.errors import InvalidFile
from lakebook.lake.footers import footer_of_tail, open_footer
from lakebook.storage.objects import ObjectStore
from lakebook.streams.segment_facts import PREFIX
from lakebook.streams.uploading import upload

_ID = b"PARQUET:field_id"
#: Of a row group: large enough to be read fast as a whole, small enough for one record not to cost much.
ROW_GROUP_BYTES = 8 * 1024**2
_LEAST_ROWS, MOST_ROWS = 1024, 128 * 1024
#: The compression of topics that name none.
COMPRESSION = "zstd"


def _field(name: str, kind: pa.DataType, number: int, *, nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, nullable, {_ID: str(number).encode()})


TIMESTAMP = pa.timestamp("us", "UTC")
HEADERS = pa.list_(
    _field(
        "element",
        pa.struct([_field("key", pa.string(), 8, nullable=False), _field("value", pa.binary(), 9)]),
        7,
        nullable=False,
    )
)
#: The columns of every segment. Their field ids never change.
SEGMENT_SCHEMA = pa.schema(
    [
        _field("partition", pa.int32(), 1, nullable=False),
        _field("offset", pa.int64(), 2, nullable=False),
        _field("timestamp", TIMESTAMP, 3, nullable=False),
        _field("key", pa.binary(), 4),
        _field("value", pa.binary(), 5),
        _field("headers", HEADERS, 6),
    ]
)
#: What a producer gives: the partition and the offsets are stamped on it.
CONTENT_SCHEMA = pa.schema([field for field in SEGMENT_SCHEMA if field.name not in ("partition", "offset")])


@dataclass(frozen=True)
class SegmentFile:
    """A segment that was stored, as it was measured."""

    path: str
    size: int
    checksum: str
    footer: bytes
    base_offset: int
    record_count: int
    min_timestamp: datetime
    max_timestamp: datetime


def stamped(content: pa.Table, partition: int, base_offset: int) -> pa.Table:
    """Rows of `CONTENT_SCHEMA` with their partition and their offsets."""
    rows = content.num_rows
    columns = [
        pa.repeat(pa.scalar(partition, pa.int32()), rows),
        _offsets(base_offset, rows),
        *(content.column(field.name) for field in CONTENT_SCHEMA),
    ]
    return pa.Table.from_arrays(columns, schema=SEGMENT_SCHEMA)


def _offsets(base: int, number: int) -> pa.Array:
    """Consecutive offsets. Arrow counts in no time; numbers that Python counts cost a third of a segment's writing."""
    return pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), number), start=base - 1)


def segment_writer(
    sink: BinaryIO, *, compression: str = COMPRESSION, facts: Mapping[str, Any] | None = None
) -> pq.ParquetWriter:
    """What writes a segment, one table of rows after the other.

    `facts` go into its key-value metadata: what a rebuild of the registry needs.
    """
    told = {PREFIX + name: str(value) for name, value in (facts or {}).items() if value is not None}
    writer = pq.ParquetWriter(
        sink,
        SEGMENT_SCHEMA,
        compression=compression,
        # Values and offsets hardly repeat: a dictionary of them is work for nothing.
        use_dictionary=["partition", "timestamp", "key", "headers.list.element.key"],
        column_encoding={"offset": "DELTA_BINARY_PACKED"},
        write_statistics=["partition", "offset", "timestamp"],
        store_schema=False,
    )
    writer.add_key_value_metadata(told)
    return writer


def encoded(rows: pa.Table, *, compression: str = COMPRESSION, facts: Mapping[str, Any] | None = None) -> bytes:
    """A segment's bytes."""
    buffer = io.BytesIO()
    with segment_writer(buffer, compression=compression, facts=facts) as writer:
        writer.write_table(rows, row_group_size=rows_per_group(rows))
    return buffer.getvalue()


def rows_per_group(rows: pa.Table) -> int:
    """How many rows like these a row group has at best."""
    each = max(1, rows.nbytes // max(1, rows.num_rows))
    return max(_LEAST_ROWS, min(MOST_ROWS, int(ROW_GROUP_BYTES // each)))


def store_segment(
    store: ObjectStore,
    path: str,
    rows: pa.Table,
    *,
    compression: str = COMPRESSION,
    facts: Mapping[str, Any] | None = None,
    seconds: float | None = None,
) -> SegmentFile:
    """Store stamped rows as a segment; it is durable when this returns. `seconds`: for how long the upload may take."""
    data = encoded(rows, compression=compression, facts=facts)
    upload(store, path, data, seconds)
    return described(path, rows, data)


def described(path: str, rows: pa.Table, data: bytes) -> SegmentFile:
    """What is recorded of a segment, from its rows and its bytes."""
    times = pc.min_max(rows.column("timestamp")).as_py()
    return measured(path, data, rows.column("offset")[0].as_py(), rows.num_rows, (times["min"], times["max"]))


def measured(
    path: str, data: bytes, base_offset: int, record_count: int, times: tuple[datetime, datetime]
) -> SegmentFile:
    """What is recorded of a segment, from its bytes and what is known of its rows."""
    place = footer_of_tail(data[-8:], len(data), on=path)
    return SegmentFile(
        path=path,
        size=len(data),
        checksum=f"xxh3:{xxhash.xxh3_64_hexdigest(data)}",
        footer=data[place.offset : place.offset + place.length],
        base_offset=base_offset,
        record_count=record_count,
        min_timestamp=times[0],
        max_timestamp=times[1],
    )


class SegmentReader:
    """A segment's rows from any offset on, one row group at a time; its footer is handed in."""

    def __init__(self, store: ObjectStore, path: str, footer: bytes, base_offset: int) -> None:
        self._store = store
        self._path = path
        self._metadata = open_footer(footer, on=path)
        sizes = [self._metadata.row_group(number).num_rows for number in range(self._metadata.num_row_groups)]
        self._bases = [base_offset, *accumulate(sizes, initial=base_offset)][1:]
        #: One more than the last offset.
        self.end = base_offset + self._metadata.num_rows

    def batches(self, start: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows at or after an offset, in order."""
        if start >= self.end:
            return
        first = bisect_right(self._bases, start) - 1
        with self._store.open(self._path) as stream, pq.ParquetFile(stream, metadata=self._metadata) as file:
            for number in range(max(0, first), self._metadata.num_row_groups):
                position = self._bases[number]
                for batch in file.iter_batches(row_groups=[number], batch_size=MOST_ROWS, columns=columns):
                    skipped = max(0, start - position)
                    position += batch.num_rows
                    if skipped < batch.num_rows:
                        yield batch.slice(skipped)


def check_offsets(rows: pa.RecordBatch | pa.Table, partition: int, base_offset: int, path: str) -> None:
    """Refuse rows whose partition and offsets are not those that the registry has confirmed."""
    offsets = rows.column("offset")
    same = pc.all(pc.equal(offsets, _offsets(base_offset, rows.num_rows))).as_py()
    if rows.num_rows and not (same and pc.all(pc.equal(rows.column("partition"), partition)).as_py()):
        raise InvalidFile(
            f"its rows are not the records {base_offset} to {base_offset + rows.num_rows - 1} of partition {partition}",
            on=path,
            remedy="Run `lakebook verify`",
        )
