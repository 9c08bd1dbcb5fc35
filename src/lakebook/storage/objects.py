"""The bytes of a warehouse: the one place that writes, reads, lists and deletes them.

Nothing above storage knows whether the warehouse is a folder, memory or a bucket.
"""

from __future__ import annotations

import builtins
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from obstore.store import MemoryStore

from lakebook.config import redact
from lakebook.errors import InvalidInput, PathOutsideWarehouse, StorageUnavailable
from lakebook.names import check_path, shown
from lakebook.storage.answers import HASHED_AT_ONCE, XXH3, Failures, Measured, ObjectInfo, Ranges, hashed, in_parallel
from lakebook.storage.bucket import Bucket
from lakebook.storage.folder import Folder
from lakebook.storage.warehouse import Warehouse

CHUNK = 8 << 20
WORKERS = 8
# Where small objects lie for a moment.
_PROBES = ".lakebook-probes"
_PROBED = timedelta(hours=1)


class ObjectStore:
    """The objects of one warehouse, each named by its path below the warehouse's root.

    An object is written once and as a whole: nobody sees a part of it, and nothing replaces it.
    """

    def __init__(self, warehouse: Warehouse) -> None:
        """Use the objects of `warehouse`; those of a warehouse in memory live as long as this store."""
        self.warehouse = warehouse
        self._place = _place_of(warehouse)

    # --- writing ---------------------------------------------------------------

    def put_new(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Store an object that must not be there yet; unless told otherwise it is durable when this returns."""
        self._place.put_new(check_path(path), data, durable)

    def create(self, path: str, *, durable: bool = True) -> AbstractContextManager[BinaryIO]:
        """A file to write an object into that must not be there yet.

        The object appears, complete and durable, when the block ends. If the block raises, it
        does not appear. That an object is there already shows at the end of the block. What is
        not written as `durable` survives a loss of power only after `make_durable`.
        """
        return self._place.create(check_path(path), durable)

    def make_durable(self, paths: Sequence[str], workers: int = WORKERS) -> None:
        """Make sure that objects which others wrote survive a loss of power."""
        self._place.make_durable([check_path(path) for path in paths], _check_workers(workers))

    # --- reading ---------------------------------------------------------------

    def read(self, path: str) -> bytes:
        """The whole object."""
        return self._place.read(check_path(path))

    def read_range(self, path: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start` on; an object that does not have them is an error."""
        return self.read_ranges(path, [(start, length)])[0]

    def read_ranges(self, path: str, ranges: Ranges) -> builtins.list[bytes]:
        """Several ranges of one object, each given as start and length."""
        for start, length in ranges:
            if start < 0 or length < 0:
                raise InvalidInput(f"{shown((start, length))} is not a range", on=check_path(path))
        return self._place.read_ranges(check_path(path), ranges)

    def stream(self, path: str, chunk_size: int = CHUNK) -> Iterator[bytes]:
        """The object in chunks of `chunk_size`; no more than one of them is in memory."""
        if chunk_size < 1:
            raise InvalidInput(f"{shown(chunk_size)} is not a size of chunks", on=check_path(path))
        return self._place.stream(check_path(path), chunk_size)

    def open(self, path: str) -> BinaryIO:
        """A file to read the object from, at any position."""
        return self._place.open(check_path(path))

    def size(self, path: str) -> int | None:
        """The object's size, or None if it is not there."""
        return self._place.size(check_path(path))

    def checksum(self, path: str) -> str:
        """What the bytes of the object are known by; see `measure`."""
        return self._place.measure(check_path(path)).checksum

    def measure(self, paths: Sequence[str], workers: int = WORKERS) -> builtins.list[Measured]:
        """The sizes and checksums of objects, several at once.

        In a folder each byte is read (`xxh3:2d06800538d394c2`). A bucket is asked for what it knows its objects by, so
        that no data comes here: a checksum of the whole object (`crc64nvme:…`) or, where it keeps none, `etag:…`.
        """
        return in_parallel(self._place.measure, [check_path(path) for path in paths], _check_workers(workers))

    def measure_as(self, path: str, recorded: str) -> Measured:
        """The size of an object, and its checksum of the kind that was recorded of it."""
        if recorded.startswith(f"{XXH3}:"):
            return hashed(path, self.stream(path, HASHED_AT_ONCE))
        return self._place.measure(check_path(path), recorded)

    def mark(self, path: str, like: str = "") -> str | None:
        """What the store itself knows the object by, without a byte of it; None where it knows nothing.

        Of what it knows, that of the kind of `like`, another such mark.
        """
        return self._place.mark(check_path(path), like)

    # --- listing and deleting --------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object below a folder, hidden ones too, in no order; "" is the whole warehouse.

        A link in a folder is shown as an object of its own, and not followed.
        """
        return self._place.list(check_path(prefix) if prefix != "" else "")

    def delete(self, paths: Iterable[str]) -> Failures:
        """Delete objects. One that is gone is fine; one that cannot be deleted does not stop the rest."""
        failures: Failures = []
        self._place.delete(_checked(paths, failures), failures)
        return failures

    def delete_one(self, path: str) -> None:
        """Delete an object; one that is gone is fine."""
        for _, error in self.delete([path]):
            raise error

    def delete_folder(self, prefix: str) -> int:
        """Delete everything below a folder, and the folder; returns how many objects that were."""
        return self._place.delete_folder(check_path(prefix))

    def end_uploads(
        self, prefix: str = "", *, before: datetime | None = None, of: Callable[[str], bool] | None = None
    ) -> int:
        """End the uploads below a folder that were begun, before a time, and never finished; how many those were.

        `of` says by its path whether one is meant.
        """
        return self._place.end_uploads(check_path(prefix) if prefix != "" else "", before, of)

    def remove_empty_folders(self, path: str) -> None:
        """Remove the folders above `path` that are empty, up to the warehouse's root."""
        self._place.remove_empty_folders(check_path(path))

    def now(self) -> datetime:
        """What time it is by the clock that dates the objects: that of the store, and no other.

        A small object is stored, and its date looked up where those of all others are. What was there before has
        none that is later, whole seconds or not.
        """
        path = f"{_PROBES}/{uuid.uuid4().hex}"
        self._place.put_new(path, b"", False)
        left = [path]
        try:
            dates = {item.path: item.modified for item in self._place.list(_PROBES)}
            if path not in dates:
                raise StorageUnavailable("what was just stored is not listed", on=self.uri(path))
            # Whoever stored one long ago was killed before it was deleted.
            left += [other for other, date in dates.items() if date < dates[path] - _PROBED]
            return dates[path]
        finally:
            for each in left:
                self.delete_one(each)
            self._place.remove_empty_folders(path)

    # --- names for others ------------------------------------------------------

    def uri(self, path: str = "") -> str:
        """The name by which engines open an object or a folder; nothing in it is escaped."""
        return self._place.uri(check_path(path) if path != "" else "")

    def relative(self, uri: str, *, escaped: bool = False) -> str:
        """The path of what an engine reports by its URI; "" is the warehouse's root.

        Iceberg and Hadoop report names as they are. Spark's `input_file_name()`,
        `_metadata.file_path` and `inputFiles()` report them with percent escapes: these are
        `escaped`. The text alone cannot tell, as a name may hold a percent sign.
        """
        path = self._place.below(unquote(uri) if escaped else uri)
        if path is None:
            raise PathOutsideWarehouse(
                f"{shown(redact(uri))} is not inside", on=self._place.shown_root, remedy="Is it another warehouse's?"
            )
        path = path.rstrip("/")
        return check_path(path) if path else ""

    def local_path(self, path: str) -> Path | None:
        """Where the object is in the file system, for an engine that can do more with a file; else None."""
        return self._place.local_path(check_path(path))


def _place_of(warehouse: Warehouse) -> Folder | Bucket:
    if warehouse.folder is not None:
        return Folder(warehouse.folder)
    if warehouse.root.startswith("memory:"):
        return Bucket(warehouse.root, MemoryStore())
    from lakebook.storage.s3 import S3Bucket  # Only who has a bucket needs what it is reached with.

    return S3Bucket(warehouse.root, warehouse.access)


def _check_workers(workers: int) -> int:
    if workers < 1:
        raise InvalidInput(f"{shown(workers)} is not a number of workers", on="warehouse")
    return workers


def _checked(paths: Iterable[str], failures: Failures) -> Iterator[str]:
    for path in paths:
        try:
            yield check_path(path)
        except PathOutsideWarehouse as error:
            failures.append((path, error))
