"""The bytes of a warehouse: the one place that writes, reads, lists and deletes them.

Nothing above storage knows whether the warehouse is a folder, memory or a bucket. A folder is
used through the operating system, and not through obstore: there a write is not durable, a
link out of the folder is followed, and a name that ends in `#1` can be neither written nor seen.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast
from urllib.parse import unquote

import obstore
import xxhash
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import MemoryStore, from_url

from lakebook import failpoints
from lakebook.config import redact
from lakebook.errors import (
    InvalidInput,
    InvalidSetting,
    LakebookError,
    ObjectExists,
    ObjectNotFound,
    ObjectTruncated,
    PathOutsideWarehouse,
    StorageRefused,
    StorageUnavailable,
)
from lakebook.names import check_path, shown
from lakebook.storage.warehouse import Warehouse

CHUNK = 8 << 20
WORKERS = 8

# A chunk of this size still lies in the processor's cache when it is hashed.
_HASHED_AT_ONCE = 1 << 20
_BUFFER = 1 << 20
# Ranges that are closer than this are read as one.
_GAP = 1 << 20
_SPOOLED_IN_MEMORY = 16 << 20
_DELETED_AT_ONCE = 1000
_LISTED_AT_ONCE = 1000
# How often a folder is made anew that someone who tidies up removes at the same time.
_TRIES = 1000

# Trying again does not help against these.
_REFUSED = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.ENAMETOOLONG,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ELOOP,
        errno.EMLINK,
        errno.EXDEV,
        errno.EINVAL,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
    }
)
# A folder is no object, and there is none below a file.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Ranges: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as a listing shows it."""

    path: str
    size: int
    modified: datetime


@dataclass(frozen=True, slots=True)
class Measured:
    """An object as it was read from its first byte to its last."""

    path: str
    size: int
    checksum: str


#: What could not be deleted, and why.
Failures: TypeAlias = list[tuple[str, LakebookError]]


class ObjectStore:
    """The objects of one warehouse, each named by its path below the warehouse's root.

    An object is written once and as a whole: nobody sees a part of it, and nothing replaces it.
    """

    def __init__(self, warehouse: Warehouse) -> None:
        """Use the objects of `warehouse`; those of a warehouse in memory live as long as this store."""
        self.warehouse = warehouse
        self._place: _Folder | _Bucket = (
            _Folder(warehouse.folder) if warehouse.folder is not None else _Bucket(warehouse.root)
        )

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

    def read_ranges(self, path: str, ranges: _Ranges) -> builtins.list[bytes]:
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
        """The checksum of the object's bytes, such as `xxh3:2d06800538d394c2`."""
        return self._measure(path).checksum

    def measure(self, paths: Sequence[str], workers: int = WORKERS) -> builtins.list[Measured]:
        """Read whole objects, several at once, for their sizes and checksums."""
        return _in_parallel(self._measure, paths, _check_workers(workers))

    def _measure(self, path: str) -> Measured:
        digest = xxhash.xxh3_64()
        size = 0
        for chunk in self.stream(path, _HASHED_AT_ONCE):
            digest.update(chunk)
            size += len(chunk)
        return Measured(path, size, f"xxh3:{digest.hexdigest()}")

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

    def remove_empty_folders(self, path: str) -> None:
        """Remove the folders above `path` that are empty, up to the warehouse's root."""
        self._place.remove_empty_folders(check_path(path))

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


class _Folder:
    """A warehouse that is a folder."""

    def __init__(self, folder: Path) -> None:
        self._root = str(folder).rstrip("/")
        self.shown_root = redact(str(folder))

    def _on(self, path: str) -> str:
        return f"{self.shown_root}/{path}"

    def _find(self, path: str, *, last: bool = True) -> str:
        """Where a path is; links below the root may be on the way, if they do not lead out of it.

        `last` is false for what acts on the last part itself, as creating and deleting do.
        """
        parts = path.split("/")
        here = self._root
        for part in parts if last else parts[:-1]:
            here = f"{here}/{part}"
            try:
                is_link = stat.S_ISLNK(os.lstat(here).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                break
            if is_link:
                whole = f"{self._root}/{path}"
                self._refuse_outside(path, whole if last else os.path.dirname(whole))
                break
        return f"{self._root}/{path}"

    def _refuse_outside(self, path: str, place: str) -> None:
        root = os.path.realpath(self._root or "/")
        if os.path.commonpath([root, os.path.realpath(place)]) != root:
            raise PathOutsideWarehouse(
                f"the path {shown(path)} leads out of the warehouse through a link",
                on=self.shown_root,
                remedy="Put what the link leads to into the warehouse",
            )

    def put_new(self, path: str, data: bytes, durable: bool) -> None:
        with self.create(path, durable) as file:
            file.write(data)

    @contextmanager
    def create(self, path: str, durable: bool) -> Iterator[BinaryIO]:
        on = self._on(path)
        with _typed(on):
            file = _NewFile(self._find(path, last=False), durable)
        try:
            with _Sink(file.writer, on) as sink:
                yield cast("BinaryIO", sink)
            failpoints.reach("object.written")
            with _typed(on):
                file.publish()
        except BaseException:
            file.discard()
            raise

    def make_durable(self, paths: Sequence[str], workers: int) -> None:
        _in_parallel(self._sync, paths, workers)
        folders = {""}
        for path in paths:
            folder = os.path.dirname(path)
            while folder not in folders:
                folders.add(folder)
                folder = os.path.dirname(folder)
        if paths:
            _in_parallel(self._sync_folder, sorted(folders), workers)

    def _sync(self, path: str) -> None:
        with _typed(self._on(path), _ABSENT), open(self._find(path), "rb", buffering=0) as file:
            os.fsync(file.fileno())

    def _sync_folder(self, path: str) -> None:
        with _typed(self._on(path)):
            _sync_folder(f"{self._root}/{path}")

    def read(self, path: str) -> bytes:
        with _typed(self._on(path), _ABSENT), open(self._find(path), "rb", buffering=0) as file:
            return file.readall()

    def read_ranges(self, path: str, ranges: _Ranges) -> builtins.list[bytes]:
        on = self._on(path)
        with _typed(on, _ABSENT), open(self._find(path), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            found = []
            for start, length in ranges:
                _check_range(on, start, length, size)
                data = os.pread(file.fileno(), length, start)
                # The system hands over no more than 2 GiB at once.
                while len(data) < length:
                    more = os.pread(file.fileno(), length - len(data), start + len(data))
                    if not more:
                        raise _truncated(on, start, length, start + len(data))
                    data += more
                found.append(data)
            return found

    def stream(self, path: str, chunk_size: int) -> Iterator[bytes]:
        with _typed(self._on(path), _ABSENT), open(self._find(path), "rb", buffering=0) as file:
            while chunk := file.read(chunk_size):
                yield chunk

    def open(self, path: str) -> BinaryIO:
        with _typed(self._on(path), _ABSENT):
            return open(self._find(path), "rb")

    def size(self, path: str) -> int | None:
        with _typed(self._on(path)):
            try:
                found = os.stat(self._find(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return None if stat.S_ISDIR(found.st_mode) else found.st_size

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with _typed(self._on(prefix)):
            folder = self._find(prefix) if prefix else self._root or "/"
        return self._walk(folder, f"{prefix}/" if prefix else "")

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        # A folder may be removed before it is read, and also while it is.
        with _typed(self._on(prefix)), suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    yield from self._walk(entry.path, f"{path}/")
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # Someone has just deleted it.
                    continue
                yield ObjectInfo(path, found.st_size, datetime.fromtimestamp(found.st_mtime, UTC))

    def delete(self, paths: Iterable[str], failures: Failures) -> None:
        for path in paths:
            try:
                with _typed(self._on(path)), suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(self._find(path, last=False))
            except LakebookError as error:
                failures.append((path, error))

    def delete_folder(self, prefix: str) -> int:
        on = self._on(prefix)
        with _typed(on):
            here = self._root
            for part in prefix.split("/"):
                here = f"{here}/{part}"
                # Also not through a link that stays inside: it would delete what lies elsewhere.
                if os.path.islink(here):
                    raise PathOutsideWarehouse(
                        "a folder is not deleted through a link", on=on, remedy="Remove the link, or name its target"
                    )
            try:
                folder = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                return 0
            try:
                count = _empty(folder)
            finally:
                os.close(folder)
            _remove_folder(here)
            return count

    def remove_empty_folders(self, path: str) -> None:
        with _typed(self._on(path)):
            folder = os.path.dirname(self._find(path, last=False))
        while folder != self._root:
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:  # It is not empty, or has to stay for another reason.
                return
            folder = os.path.dirname(folder)

    def uri(self, path: str) -> str:
        place = f"{self._root}/{path}" if path else self._root or "/"
        # Hadoop, and so Spark and Iceberg, take all that follows as the name, and escape nothing.
        # PyIceberg ends a URI's path at these two, but takes a path without scheme as it is.
        return place if "#" in place or "?" in place else f"file://{place}"

    def below(self, uri: str) -> str | None:
        place = uri
        if uri.startswith("file:"):
            place = uri.removeprefix("file:")
            if place.startswith("//"):
                host, slash, place = place[2:].partition("/")
                place = slash + place
                if host not in ("", "localhost"):
                    return None
        # An engine may have followed a link on the way to the root.
        for root in (self._root, os.path.realpath(self._root or "/").rstrip("/")):
            if f"{place}/".startswith(f"{root}/"):
                return place[len(root) + 1 :]
        return None

    def local_path(self, path: str) -> Path:
        with _typed(self._on(path)):
            return Path(self._find(path))


class _NewFile:
    """A file that gets its name when it is complete.

    Written under its own name, it could be seen in parts, and would stay in parts if the process
    were killed. So it has no name while it is written (`O_TMPFILE`), and the system removes it
    with the process. Linking it does not replace what is there, as a rename would. Where a file
    system knows no such files it has a hidden name until then.
    """

    def __init__(self, target: str, durable: bool) -> None:
        self._target = target
        self._durable = durable
        self._folder, self._name = os.path.split(target)
        self._made: list[str] = []
        self._hidden: str | None = None
        self._linked = False
        self._writer: BinaryIO | None = None
        try:
            self._writer = io.BufferedWriter(io.FileIO(self._in_folder(self._open), "wb"), _BUFFER)
        except BaseException:
            self.discard()
            raise

    @property
    def writer(self) -> BinaryIO:
        """Where to write to."""
        assert self._writer is not None
        return self._writer

    def publish(self) -> None:
        """Give the file its name, for good."""
        self.writer.flush()
        if self._durable:
            os.fsync(self.writer.fileno())
        self._in_folder(self._link)
        for folder in self._made if self._durable else ():
            _sync_folder(os.path.dirname(folder))
        self.writer.close()

    def discard(self) -> None:
        """Leave nothing behind."""
        with suppress(OSError):
            if self._writer is not None:
                self._writer.close()
        for file in (self._hidden, self._target if self._linked else None):
            with suppress(OSError):
                if file is not None:
                    os.unlink(file)
        for folder in reversed(self._made):
            with suppress(OSError):
                os.rmdir(folder)

    def _in_folder(self, act: Callable[[], _Result]) -> _Result:
        for attempt in range(_TRIES):
            try:
                if attempt:
                    self._make_folder()
                return act()
            except FileNotFoundError:
                continue
        raise OSError(errno.EBUSY, "its folder cannot be made, or is removed again and again")

    def _make_folder(self) -> None:
        missing = []
        folder = self._folder
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        self._made = [*reversed(missing), *(known for known in self._made if known not in missing)]
        # It is raised for a file in the place of the folder, which opening it will tell, and also
        # for a folder that was there for a moment.
        with suppress(FileExistsError):
            os.makedirs(self._folder, exist_ok=True)

    def _open(self) -> int:
        if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
            try:
                return os.open(self._folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            except OSError as error:
                # EPERM is also what a folder answers that was removed while it was being opened.
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.EPERM):
                    raise
        hidden = f"{self._folder}/.lakebook-{uuid.uuid4().hex}.tmp"
        descriptor = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        self._hidden = hidden
        return descriptor

    def _link(self) -> None:
        source = self._hidden or f"/proc/self/fd/{self.writer.fileno()}"
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # The descriptor is also what makes Python follow the link in /proc.
            os.link(source, self._name, dst_dir_fd=folder)
            self._linked = True
            if self._hidden is not None:
                os.unlink(self._hidden)
                self._hidden = None
            if self._durable:
                os.fsync(folder)
        except FileExistsError:
            if os.path.isdir(self._target):
                raise IsADirectoryError(errno.EISDIR, "there is a folder in its place") from None
            raise
        finally:
            os.close(folder)


class _Bucket:
    """A warehouse that obstore reaches: memory, or a bucket. What it took is durable."""

    def __init__(self, root: str) -> None:
        head = redact(root)
        # "memory://" has no name to which a path could be added.
        self._base = f"{head}/" if head.endswith("://") else f"{head.rstrip('/')}/"
        self.shown_root = head
        try:
            self._store: Any = MemoryStore() if root.startswith("memory:") else from_url(root)
        except (BaseError, ValueError) as error:
            raise InvalidSetting(f"it cannot be used ({_reason(error)})", on=head) from None

    def _on(self, path: str) -> str:
        return self._base + path

    def put_new(self, path: str, data: bytes, _durable: bool) -> None:
        with _typed(self._on(path)):
            obstore.put(self._store, path, data, mode="create")

    @contextmanager
    def create(self, path: str, _durable: bool) -> Iterator[BinaryIO]:
        # An upload in parts cannot be made to fail where something is already. So the bytes wait
        # here, beyond a certain size in a file without name, and go in one request.
        on = self._on(path)
        with tempfile.SpooledTemporaryFile(max_size=_SPOOLED_IN_MEMORY) as spool:
            with _Sink(cast("BinaryIO", spool), on) as sink:
                yield cast("BinaryIO", sink)
            with _typed(on):
                spool.seek(0)
                obstore.put(self._store, path, cast("BinaryIO", spool), mode="create")

    def make_durable(self, paths: Sequence[str], workers: int) -> None:
        """What was stored is durable already."""

    def read(self, path: str) -> bytes:
        with _typed(self._on(path)):
            return bytes(obstore.get(self._store, path).bytes())

    def read_ranges(self, path: str, ranges: _Ranges) -> builtins.list[bytes]:
        on = self._on(path)
        # A store takes a range without bytes for a mistake.
        spans = _spans(ranges)
        fetched: dict[int, bytes] = {}
        if spans:
            starts, ends = zip(*spans, strict=True)
            with _typed(on):
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

    def _check_ranges(self, path: str, ranges: _Ranges) -> None:
        size = self._size(path)
        for start, length in ranges:
            _check_range(self._on(path), start, length, size)

    def stream(self, path: str, chunk_size: int) -> Iterator[bytes]:
        # One request per chunk: a single one would time out if the chunks are used slowly.
        size = self._size(path)
        for start in range(0, size, chunk_size):
            yield self.read_ranges(path, [(start, min(chunk_size, size - start))])[0]

    def open(self, path: str) -> BinaryIO:
        # Not obstore's reader: PyArrow misses `closed` in it.
        return io.BufferedReader(_RangeReader(self, path, self._size(path)), _BUFFER)

    def _size(self, path: str) -> int:
        with _typed(self._on(path)):
            return obstore.head(self._store, path)["size"]

    def size(self, path: str) -> int | None:
        try:
            return self._size(path)
        except ObjectNotFound:
            return None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with _typed(self._on(prefix)):
            for batch in obstore.list(self._store, prefix or None, chunk_size=_LISTED_AT_ONCE):
                for found in batch:
                    yield ObjectInfo(found["path"], found["size"], found["last_modified"])

    def delete(self, paths: Iterable[str], failures: Failures) -> None:
        rest = iter(paths)
        while batch := list(islice(rest, _DELETED_AT_ONCE)):
            try:
                obstore.delete(self._store, batch)
            except (BaseError, OSError):
                # A batch that fails does not say which of them failed.
                self._delete_each(batch, failures)

    def _delete_each(self, paths: Sequence[str], failures: Failures) -> None:
        outage: LakebookError | None = None
        for path in paths:
            if outage is not None:
                failures.append((path, outage))
                continue
            try:
                with _typed(self._on(path)), suppress(FileNotFoundError):
                    obstore.delete(self._store, path)
            except LakebookError as error:
                failures.append((path, error))
                # Each request is tried for a while, so it matters whether this object alone fails.
                outage = error if error.transient and not self._answers(path) else None

    def _answers(self, path: str) -> bool:
        try:
            self._size(path)
        except StorageUnavailable:
            return False
        except LakebookError:
            return True
        return True

    def delete_folder(self, prefix: str) -> int:
        failures: Failures = []
        count = 0
        listed = (found.path for found in self.list(prefix))
        while batch := list(islice(listed, _DELETED_AT_ONCE)):
            self.delete(batch, failures)
            count += len(batch)
        for _, error in failures:
            raise error
        return count

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


class _Sink(io.BufferedIOBase):
    """What a caller writes an object into.

    Closing it does not end the object: PyArrow closes what it has written to.
    """

    def __init__(self, file: BinaryIO, on: str) -> None:
        self._file = file
        self._on = on
        self._written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.closed:
            raise ValueError("write to closed file")
        with _typed(self._on):
            count = self._file.write(data)
        self._written += count
        return count

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        """Nothing to do: only the whole object can be seen."""


class _RangeReader(io.RawIOBase):
    """Reads an object piece by piece."""

    def __init__(self, bucket: _Bucket, path: str, size: int) -> None:
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


@contextmanager
def _typed(on: str, absent: tuple[type[OSError], ...] = (FileNotFoundError,)) -> Iterator[None]:
    """Raise what went wrong on an object as an error of Lakebook."""
    try:
        yield
    except absent:
        raise ObjectNotFound("there is no such object", on=on) from None
    except (AlreadyExistsError, FileExistsError):
        raise ObjectExists("the object is there already", on=on, remedy="Write to a new path") from None
    except InvalidPathError as error:
        raise PathOutsideWarehouse(f"it cannot be a path there ({_reason(error)})", on=on) from None
    except (PermissionDeniedError, UnauthenticatedError, NotSupportedError, UnknownConfigurationKeyError) as error:
        raise _refused(error, on) from None
    except OSError as error:
        if error.errno in _REFUSED:
            raise _refused(error, on) from None
        raise _unavailable(error, on) from None
    except BaseError as error:
        raise _unavailable(error, on) from None


def _refused(error: Exception, on: str) -> StorageRefused:
    return StorageRefused(
        f"the storage refuses it ({_reason(error)})",
        on=on,
        remedy="Check rights, room and what else is at this place",
    )


def _unavailable(error: Exception, on: str) -> StorageUnavailable:
    return StorageUnavailable(f"the storage failed ({_reason(error)})", on=on, remedy="Try again")


def _reason(error: Exception) -> str:
    """The first line of what went wrong: what follows in obstore's errors is for its developers."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error).strip()
    return redact(text.splitlines()[0])[:200] if text else type(error).__name__


def _check_range(on: str, start: int, length: int, size: int) -> None:
    if start + length > size:
        raise _truncated(on, start, length, size)


def _truncated(on: str, start: int, length: int, size: int) -> ObjectTruncated:
    return ObjectTruncated(
        f"it ends at {size}, and {length} bytes from {start} on were asked for",
        on=on,
        remedy="Compare the object with what was recorded about it",
    )


def _spans(ranges: _Ranges) -> list[tuple[int, int]]:
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
        raise _truncated(on, start, length, begin + len(fetched[begin]))
    return data


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


def _in_parallel(act: Callable[[_Item], _Result], items: Sequence[_Item], workers: int) -> list[_Result]:
    """Do the same with several things at once; the first error ends it."""
    if len(items) < 2 or workers == 1:
        return [act(item) for item in items]
    with ThreadPoolExecutor(min(workers, len(items)), thread_name_prefix="lakebook-storage") as pool:
        try:
            return list(pool.map(act, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _empty(folder: int) -> int:
    """Delete what is in an open folder, and count the files.

    Everything is named relative to open folders, so that a link which someone puts in the place
    of a folder meanwhile is not followed. Someone else may delete the same at the same time.
    """
    found: list[tuple[str, bool]] = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        found.extend((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    count = 0
    for name, is_folder in found:
        with suppress(FileNotFoundError):
            if not is_folder:
                os.unlink(name, dir_fd=folder)
                count += 1
                continue
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                count += _empty(below)
            finally:
                os.close(below)
            _remove_folder(name, folder)
    return count


def _remove_folder(folder: str, beside: int | None = None) -> None:
    """Remove a folder, unless it is gone or someone has just put something into it."""
    try:
        os.rmdir(folder, dir_fd=beside)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise
