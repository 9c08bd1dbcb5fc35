"""A warehouse that is a folder.

It is used through the operating system, and not through obstore: there a write is not durable, a
link out of the folder is followed, and a name that ends in `#1` can be neither written nor seen.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from lakebook import failpoints
from lakebook.config import redact
from lakebook.errors import LakebookError, PathOutsideWarehouse
from lakebook.names import shown
from lakebook.storage.answers import (
    ABSENT,
    BUFFER,
    HASHED_AT_ONCE,
    Failures,
    Measured,
    ObjectInfo,
    Ranges,
    Sink,
    check_range,
    hashed,
    in_parallel,
    truncated,
    typed,
)

# How often a folder is made anew that someone who tidies up removes at the same time.
_TRIES = 1000

_Result = TypeVar("_Result")


class Folder:
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
        with typed(on):
            file = _NewFile(self._find(path, last=False), durable)
        try:
            with Sink(file.writer, on) as sink:
                yield cast("BinaryIO", sink)
            failpoints.reach("object.written")
            with typed(on):
                file.publish()
        except BaseException:
            file.discard()
            raise

    def make_durable(self, paths: Sequence[str], workers: int) -> None:
        in_parallel(self._sync, paths, workers)
        folders = {""}
        for path in paths:
            folder = os.path.dirname(path)
            while folder not in folders:
                folders.add(folder)
                folder = os.path.dirname(folder)
        if paths:
            in_parallel(self._sync_folder, sorted(folders), workers)

    def _sync(self, path: str) -> None:
        with typed(self._on(path), ABSENT), open(self._find(path), "rb", buffering=0) as file:
            os.fsync(file.fileno())

    def _sync_folder(self, path: str) -> None:
        with typed(self._on(path)):
            _sync_folder(f"{self._root}/{path}")

    def read(self, path: str) -> bytes:
        with typed(self._on(path), ABSENT), open(self._find(path), "rb", buffering=0) as file:
            return file.readall()

    def read_ranges(self, path: str, ranges: Ranges) -> builtins.list[bytes]:
        on = self._on(path)
        with typed(on, ABSENT), open(self._find(path), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            found = []
            for start, length in ranges:
                check_range(on, start, length, size)
                data = os.pread(file.fileno(), length, start)
                # The system hands over no more than 2 GiB at once.
                while len(data) < length:
                    more = os.pread(file.fileno(), length - len(data), start + len(data))
                    if not more:
                        raise truncated(on, start, length, start + len(data))
                    data += more
                found.append(data)
            return found

    def stream(self, path: str, chunk_size: int) -> Iterator[bytes]:
        with typed(self._on(path), ABSENT), open(self._find(path), "rb", buffering=0) as file:
            while chunk := file.read(chunk_size):
                yield chunk

    def open(self, path: str) -> BinaryIO:
        with typed(self._on(path), ABSENT):
            return open(self._find(path), "rb")

    def size(self, path: str) -> int | None:
        with typed(self._on(path)):
            try:
                found = os.stat(self._find(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return None if stat.S_ISDIR(found.st_mode) else found.st_size

    def measure(self, path: str, _like: str = "") -> Measured:
        return hashed(path, self.stream(path, HASHED_AT_ONCE))

    def mark(self, _path: str, _like: str = "") -> str | None:
        """A file is known by nothing but its bytes."""
        return None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with typed(self._on(prefix)):
            folder = self._find(prefix) if prefix else self._root or "/"
        return self._walk(folder, f"{prefix}/" if prefix else "")

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        # A folder may be removed before it is read, and also while it is.
        with typed(self._on(prefix)), suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
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
                with typed(self._on(path)), suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(self._find(path, last=False))
            except LakebookError as error:
                failures.append((path, error))

    def delete_folder(self, prefix: str) -> int:
        on = self._on(prefix)
        with typed(on):
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

    def end_uploads(self, _prefix: str, _before: datetime | None, _of: Callable[[str], bool] | None = None) -> int:
        """What is not complete has no name, and ends with its process."""
        return 0

    def remove_empty_folders(self, path: str) -> None:
        with typed(self._on(path)):
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
        with typed(self._on(path)):
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
            self._writer = io.BufferedWriter(io.FileIO(self._in_folder(self._open), "wb"), BUFFER)
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
