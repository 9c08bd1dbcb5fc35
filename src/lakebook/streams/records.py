"""Records: what a topic holds, one by one or as Arrow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa

#: What a record carries beside its key and value, in the order it was given.
Headers = tuple[tuple[str, bytes | None], ...]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it was read. Its time has milliseconds."""

    topic: str
    partition: int
    offset: int
    timestamp: datetime
    key: bytes | None
    value: bytes | None
    headers: Headers = ()

    @property
    def size(self) -> int:
        """The bytes of its key, value and headers."""
        return size_of(self.key, self.value, self.headers)


def size_of(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """The bytes that a record's key, value and headers have."""
    size = len(key or b"") + len(value or b"")
    for name, content in headers:
        size += len(name) + len(content or b"")
    return size


def records_of(topic: str, batch: pa.RecordBatch) -> Iterator[Record]:
    """The rows of a segment, one after the other."""
    headers = batch.column("headers")
    # Most topics have none: then no row is looked at.
    given = iter([()] * batch.num_rows) if headers.null_count == batch.num_rows else map(_headers, headers.to_pylist())
    times = _moments(batch.column("timestamp"))
    columns = (batch.column(name).to_pylist() for name in ("partition", "offset", "key", "value"))
    for partition, offset, key, value, timestamp, pairs in zip(*columns, times, given, strict=True):
        yield Record(topic, partition, offset, timestamp, key, value, pairs)


def _moments(times: pa.Array) -> list[datetime]:
    """Times as Python has them. Arrow would take several microseconds for each, more than all the rest of a record."""
    numbers = times.cast(pa.int64()).to_pylist()
    # Records that come fast share their milliseconds.
    known = {number: _EPOCH + timedelta(0, 0, number) for number in set(numbers)}
    return [known[number] for number in numbers]


def _headers(pairs: list[dict[str, bytes | None]] | None) -> Headers:
    return tuple((str(pair["key"]), pair["value"]) for pair in pairs or ())
