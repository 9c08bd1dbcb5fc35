"""Arrow tables as records: brought into the form of segments, measured and sorted, without an object per record."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from lakebook.clock import to_datetime
from lakebook.errors import InvalidRecord, RecordTooLarge
from lakebook.names import shown
from lakebook.streams.batching import OVERHEAD
from lakebook.streams.partitioners import partitions_of_keys
from lakebook.streams.segment_files import CONTENT_SCHEMA, HEADERS, TIMESTAMP

COLUMNS = ("value", "key", "timestamp", "headers", "partition")
# Parts of a table that are worked on at once: a column of bytes must not have 2 GiB.
_PART_BYTES = 256 * 1024**2
# The times that Python has, in milliseconds.
_FIRST_MS, _LAST_MS = -62_135_596_800_000, 253_402_300_799_999


@dataclass(frozen=True)
class Part:
    """Rows of `CONTENT_SCHEMA`, what each weighs, and the partition of each; none: whichever is in use."""

    rows: pa.Table
    sizes: pa.Array
    partitions: pa.Array


def parts_of(
    topic: str, given: pa.Table | pa.RecordBatch, now_ms: int, *, by_key: bool, partitions: int
) -> Iterator[Part]:
    """The rows of a table in parts; refuse a table that does not hold records."""
    table = _checked(topic, given)
    each = max(1, table.nbytes // max(1, table.num_rows))
    rows = max(1, _PART_BYTES // each)
    for start in range(0, table.num_rows, rows):
        yield _part(topic, table.slice(start, rows), now_ms, by_key, partitions)


def _checked(topic: str, given: object) -> pa.Table:
    if isinstance(given, pa.RecordBatch):
        given = pa.Table.from_batches([given])
    if not isinstance(given, pa.Table):
        raise _refused(topic, f"{shown(given)} is no table", "Give a pyarrow Table or RecordBatch")
    names = given.column_names
    if "value" not in names or len(set(names)) < len(names) or set(names) - set(COLUMNS):
        raise _refused(
            topic, f"its columns are {', '.join(map(shown, names))}", f"Give value, and if you like {COLUMNS[1:]}"
        )
    for name, wanted, fits in (
        ("value", "bytes or texts", _is_content),
        ("key", "bytes or texts", _is_content),
        ("timestamp", "timestamps with a time zone", lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None),
        ("headers", "lists of structs with key and value", pa.types.is_list),
        ("partition", "whole numbers", pa.types.is_integer),
    ):
        kind = given.schema.field(name).type if name in names else pa.null()
        if not pa.types.is_null(kind) and not fits(kind):
            raise _refused(topic, f"the column {name} is of type {kind}", f"Give {wanted}")
    return given


def _is_content(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
    return any(test(kind) for test in tests)


def _part(topic: str, table: pa.Table, now_ms: int, by_key: bool, partitions: int) -> Part:
    def column(name: str, kind: pa.DataType) -> pa.Array:
        given = table.column(name).combine_chunks() if name in table.column_names else None
        # Not by a cast: that of nulls to lists is slow.
        return pa.nulls(table.num_rows, kind) if given is None or given.type == pa.null() else given.cast(kind)

    try:
        times, key = _times(topic, table, now_ms), column("key", pa.binary())
        content = [times, key, column("value", pa.binary()), column("headers", HEADERS)]
        rows = pa.Table.from_arrays(content, schema=CONTENT_SCHEMA)
        rows.validate()
        explicit = column("partition", pa.int32())
    except pa.ArrowException as error:
        raise _refused(topic, f"its rows are not records ({shown(str(error))})", "Look at its columns") from None
    by_hash = partitions_of_keys(key, partitions) if by_key else pa.nulls(len(key), pa.int32())
    return Part(rows, sizes_of(rows), pc.coalesce(explicit, by_hash))


def _times(topic: str, table: pa.Table, now_ms: int) -> pa.Array:
    now = pa.scalar(now_ms * 1000, pa.int64()).cast(TIMESTAMP)
    given = table.column("timestamp").combine_chunks() if "timestamp" in table.column_names else None
    if given is None or given.null_count == len(given):
        return pa.repeat(now, table.num_rows)
    bounds = pc.min_max(given.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())).as_py()
    if not _FIRST_MS < bounds["min"] <= bounds["max"] < _LAST_MS:
        raise _refused(topic, "it has times that no calendar has", f"Use up to {to_datetime(_LAST_MS)}")
    moments = given.cast(TIMESTAMP, safe=False)
    return pc.coalesce(pc.floor_temporal(moments, unit="millisecond"), now)


def sizes_of(rows: pa.Table) -> pa.Array:
    """What each of some rows of `CONTENT_SCHEMA` weighs."""
    zero = pa.scalar(0, pa.int64())
    sizes = pa.repeat(pa.scalar(OVERHEAD, pa.int64()), rows.num_rows)
    for name in ("key", "value"):
        lengths = pc.binary_length(rows.column(name).combine_chunks()).cast(pa.int64())
        sizes = pc.add(sizes, pc.coalesce(lengths, zero))
    headers = rows.column("headers").combine_chunks()
    pairs = headers.flatten()
    if not len(pairs):
        return sizes
    names = pc.binary_length(pairs.field("key").cast(pa.binary())).cast(pa.int64())
    contents = pc.coalesce(pc.binary_length(pairs.field("value")).cast(pa.int64()), zero)
    of_rows = pa.table({"row": pc.list_parent_indices(headers), "size": pc.add(names, contents)})
    summed = of_rows.group_by("row").aggregate([("size", "sum")])
    found = pc.index_in(pa.array(range(rows.num_rows), pa.int64()), summed.column("row").combine_chunks())
    return pc.add(sizes, pc.coalesce(summed.column("size_sum").combine_chunks().take(found), zero))


def check_sizes(topic: str, sizes: pa.Array, most: int) -> None:
    """Refuse rows of which one is too large."""
    largest = pc.max(sizes).as_py()
    if largest is not None and largest - OVERHEAD > most:
        raise too_large(topic, largest - OVERHEAD, most)


def too_large(topic: str, size: int, most: int) -> RecordTooLarge:
    """The error for a record that has too many bytes."""
    return RecordTooLarge(
        f"a record of {size} bytes is larger than {most}",
        on=f"topic {topic}",
        remedy="Send less at once, or raise max.message.bytes of the topic and the producer's buffer",
    )


def by_partition(part: Part) -> Iterator[tuple[int | None, pa.Table, pa.Array]]:
    """The rows of each partition, in the order they had, and what they weigh."""
    if part.partitions.null_count == len(part.partitions):
        yield None, part.rows, part.sizes
        return
    order = pc.sort_indices(part.partitions)
    rows, sizes, numbers = part.rows.take(order), part.sizes.take(order), part.partitions.take(order)
    runs = pc.run_end_encode(numbers)
    start = 0
    for number, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        yield number, rows.slice(start, end - start), sizes.slice(start, end - start)
        start = end


class Cuts:
    """Rows that are cut into pieces, each as large as there is room for."""

    def __init__(self, sizes: pa.Array) -> None:
        self._sums = pc.cumulative_sum(sizes)

    def piece(self, start: int, most_bytes: int, most_rows: int) -> tuple[int, int]:
        """Where the piece that begins at `start` ends, and what it weighs; it has at least one row."""
        before = self._sums[start - 1].as_py() if start else 0
        last = min(len(self._sums), start + max(1, most_rows))
        end = bisect_right(range(last), before + most_bytes, start, key=lambda place: self._sums[place].as_py())
        end = max(start + 1, end)
        return end, self._sums[end - 1].as_py() - before


def _refused(topic: str, what: str, remedy: str) -> InvalidRecord:
    return InvalidRecord(what, on=f"records for {topic}", remedy=remedy)
