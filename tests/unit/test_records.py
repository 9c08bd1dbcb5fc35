"""Records and their columns: what is counted and converted in bulk is what one by one would give."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from lakebook.errors import InvalidFile
from lakebook.streams.records import records_of
from lakebook.streams.segment_files import CONTENT_SCHEMA, HEADERS, TIMESTAMP, check_offsets, stamped

_TIMES = [
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
    datetime(1970, 1, 1, tzinfo=UTC),
    datetime(2026, 1, 31, 12, 0, 0, 1, UTC),
    datetime(2026, 1, 31, 12, 0, 0, 1, UTC),
    datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC),
]


def rows_at(times: list[datetime], base_offset: int = 0) -> pa.Table:
    """Stamped rows with these times and nothing else."""
    number = len(times)
    columns = [pa.array(times, TIMESTAMP), *(pa.nulls(number, kind) for kind in (pa.binary(), pa.binary(), HEADERS))]
    return stamped(pa.Table.from_arrays(columns, schema=CONTENT_SCHEMA), 3, base_offset)


def test_records_have_the_very_times_of_their_rows_from_the_first_year_to_the_last() -> None:
    (batch,) = rows_at(_TIMES).to_batches()
    read = [record.timestamp for record in records_of("orders", batch)]
    assert read == _TIMES == batch.column("timestamp").to_pylist()
    assert all(moment.utcoffset() == timedelta(0) for moment in read)


@pytest.mark.parametrize("base", [0, 1, 2**53 + 1, 2**62])
def test_rows_are_stamped_with_consecutive_offsets(base: int) -> None:
    rows = rows_at(_TIMES, base)
    assert rows.column("offset").to_pylist() == list(range(base, base + len(_TIMES)))
    assert rows.column("partition").to_pylist() == [3] * len(_TIMES)
    check_offsets(rows, 3, base, "a.parquet")
    for partition, first in ((3, base + 1), (2, base)):
        with pytest.raises(InvalidFile):
            check_offsets(rows, partition, first, "a.parquet")


def test_no_rows_have_no_offsets() -> None:
    assert rows_at([]).column("offset").to_pylist() == []
