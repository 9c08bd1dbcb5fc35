"""Records: what a topic holds, one by one or as Arrow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

#: What a record carries beside its key and value, in the order it was given.
Headers = tuple[tuple[str, bytes | None], ...]


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
    columns = (batch.column(name).to_pylist() for name in ("partition", "offset", "timestamp", "key", "value"))
    for partition, offset, timestamp, key, value, pairs in zip(*columns, given, strict=True):
        yield Record(topic, partition, offset, timestamp, key, value, pairs)


def _headers(pairs: list[dict[str, bytes | None]] | None) -> Headers:
    return tuple((str(pair["key"]), pair["value"]) for pair in pairs or ())
