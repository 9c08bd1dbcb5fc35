"""Objects that obstore reaches: in memory, or in a bucket."""

from __future__ import annotations

import builtins
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any, BinaryIO, cast

import obstore
from obstore.exceptions import GenericError

from lakebook.config import redact
from lakebook.errors import LakebookError, ObjectNotFound
from lakebook.storage.answers import (
    BUFFER,
    HASHED_AT_ONCE,
    Failures,
    Measured,
    ObjectInfo,
    Ranges,
    Sink,
    check_range,
    hashed,
    truncated,
    typed,
)

# Ranges that are closer than this are read as one.
_GAP = 1 << 20
_SPOOLED_IN_MEMORY = 16 << 20
DELETED_AT_ONCE = 1000
_LISTED_AT_ONCE = 1000


class Bucket:
    """A warehouse that obstore reaches. What it took is durable."""

    def __init__(self, root: str, store: Any) -> None:
        head = redact(root)
        # "memory://" has no name to which a path could be added.
        self._base = f"{head}/" if head.endswith("://") else f"{head.rstrip('/')}/"
        self.shown_root = head
        self._reached = store

    @property
    def _store(self) -> Any:
        self._check_process()
        return self._reached

    def _check_process(self) -> None:
        """Raise if this process cannot use it."""

    def _on(self, path: str) -> str:
        return self._base + path

    def put_new(self, path: str, data: bytes, _durable: bool) -> None:
        with typed(self._on(path)):
            obstore.put(self._store, path, data, mode="create")

    @contextmanager
    def create(self, path: str, _durable: bool) -> Iterator[BinaryIO]:
        # An upload in parts cannot be made to fail where something is already. So the bytes wait
        # here, beyond a certain size in a file without name, and go in one request.
        on = self._on(path)
        with tempfile.SpooledTemporaryFile(max_size=_SPOOLED_IN_MEMORY) as spool:
            with Sink(cast("BinaryIO", spool), on) as sink:
                yield cast("BinaryIO", sink)
            with typed(on):
                spool.seek(0)
                obstore.put(self._store, path, cast("BinaryIO", spool), mode="create")

    def make_durable(self, paths: Sequence[str], workers: int) -> None:
        """What was stored is durable already."""

    def read(self, path: str) -> bytes:
        with typed(self._on(path)):
            return bytes(obstore.get(self._store, path).bytes())

    def read_ranges(self, path: str, ranges: Ranges) -> builtins.list[bytes]:
        on = self._on(path)
        # A store takes a range without bytes for a mistake.
        spans = _spans(ranges)
        fetched: dict[int, bytes] = {}
        if spans:
            starts, ends = zip(*spans, strict=True)
            with typed(on):
                try:
                    # Not put together by obstore: it panics if one of them begins behind the end.
                    found = obstore.get_ranges(self._store, path, starts=starts, ends=ends, coalesce=0)
                except GenericError:
                    # Each store has its own words for a range that begins behind the end.
                    self._check_ranges(path, ranges)
                    raise
            fetched = {start: bytes(data) for start, data in zip(starts, found, strict=True)}
        if not all(length for _, length in ranges) or not ranges:
            self._check_ranges(path, ranges)
        return [_cut(on, fetched, start, length) if length else b"" for start, length in ranges]

    def _check_ranges(self, path: str, ranges: Ranges) -> None:
        size = self._size(path)
        for start, length in ranges:
            check_range(self._on(path), start, length, size)

    def stream(self, path: str, chunk_size: int) -> Iterator[bytes]:
        # One request per chunk: a single one would time out if the chunks are used slowly.
        size = self._size(path)
        for start in range(0, size, chunk_size):
            yield self.read_ranges(path, [(start, min(chunk_size, size - start))])[0]

    def open(self, path: str) -> BinaryIO:
        # Not obstore's reader: PyArrow misses `closed` in it.
        return io.BufferedReader(_RangeReader(self, path, self._size(path)), BUFFER)

    def _size(self, path: str) -> int:
        with typed(self._on(path)):
            return obstore.head(self._store, path)["size"]

    def size(self, path: str) -> int | None:
        try:
            return self._size(path)
        except ObjectNotFound:
            return None

    def measure(self, path: str, _like: str = "") -> Measured:
        return hashed(path, self.stream(path, HASHED_AT_ONCE))

    def mark(self, _path: str, _like: str = "") -> str | None:
        """It has none that lasts."""
        return None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._listed(prefix, None)

    def _listed(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        with typed(self._on(prefix)):
            for batch in obstore.list(self._store, prefix or None, offset=after, chunk_size=_LISTED_AT_ONCE):
                for found in batch:
                    yield ObjectInfo(found["path"], found["size"], found["last_modified"])

    def delete(self, paths: Iterable[str], failures: Failures) -> None:
        rest = iter(paths)
        while batch := list(islice(rest, DELETED_AT_ONCE)):
            try:
                with typed(self._on(batch[0])):
                    obstore.delete(self._store, batch)
            except LakebookError as error:
                failures.extend((path, error) for path in batch)

    def delete_folder(self, prefix: str) -> int:
        failures: Failures = []
        count = 0
        listed = (found.path for found in self.list(prefix))
        while batch := list(islice(listed, DELETED_AT_ONCE)):
            self.delete(batch, failures)
            count += len(batch)
        for _, error in failures:
            raise error
        return count

    def end_uploads(self, _prefix: str, _before: datetime | None, _of: Callable[[str], bool] | None = None) -> int:
        """Nothing is uploaded in parts."""
        return 0

    def remove_empty_folders(self, path: str) -> None:
        """There are no folders."""

    def uri(self, path: str) -> str:
        return self._base + path if path else self.shown_root

    def below(self, uri: str) -> str | None:
        scheme, separator, rest = uri.partition("://")
        own_scheme, _, base = self._base.partition("://")
        # Hadoop knows S3 by other names.
        if not separator or {"s3a": "s3", "s3n": "s3"}.get(scheme, scheme) != own_scheme:
            return None
        return f"{rest}/"[len(base) :] if f"{rest}/".startswith(base) else None

    def local_path(self, _path: str) -> None:
        return None


class _RangeReader(io.RawIOBase):
    """Reads an object piece by piece."""

    def __init__(self, bucket: Bucket, path: str, size: int) -> None:
        self._bucket = bucket
        self._path = path
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"negative seek position {start + offset}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), max(self._size - self._position, 0))
        if length:
            buffer[:length] = self._bucket.read_ranges(self._path, [(self._position, length)])[0]
            self._position += length
        return length


def _spans(ranges: Ranges) -> list[tuple[int, int]]:
    """What to ask for, as starts and ends, so that ranges close to each other cost one request."""
    spans: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if not length:
            continue
        if spans and start <= spans[-1][1] + _GAP:
            spans[-1] = (spans[-1][0], max(spans[-1][1], start + length))
        else:
            spans.append((start, start + length))
    return spans


def _cut(on: str, fetched: dict[int, bytes], start: int, length: int) -> bytes:
    """One range out of the span in which it was asked for."""
    begin = max(span for span in fetched if span <= start)
    data = fetched[begin][start - begin : start - begin + length]
    if len(data) != length:
        raise truncated(on, start, length, begin + len(fetched[begin]))
    return data
