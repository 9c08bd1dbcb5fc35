"""What every kind of warehouse answers, and what can go wrong with it, as errors of Lakebook."""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, TypeAlias, TypeVar

import xxhash
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from lakebook.config import redact
from lakebook.errors import (
    LakebookError,
    ObjectExists,
    ObjectNotFound,
    ObjectTruncated,
    PathOutsideWarehouse,
    StorageRefused,
    StorageUnavailable,
)

BUFFER = 1 << 20
#: The checksum of bytes that are read; it stands before the value.
XXH3 = "xxh3"
# A chunk of this size still lies in the processor's cache when it is hashed.
HASHED_AT_ONCE = 1 << 20

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
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

# What a store answers is XML, and obstore's errors have it in them.
_TOLD = re.compile(r"<(Code|Message)>([^<]*)<")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Ranges: TypeAlias = Sequence[tuple[int, int]]

#: A store that is away or refuses says nothing of an object: who takes it for a damaged one loses what is whole.
NO_ANSWER = (StorageUnavailable, StorageRefused)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as a listing shows it."""

    path: str
    size: int
    modified: datetime


@dataclass(frozen=True, slots=True)
class Measured:
    """An object's size, and what its bytes are known by."""

    path: str
    size: int
    checksum: str


#: What could not be deleted, and why.
Failures: TypeAlias = list[tuple[str, LakebookError]]


class Sink(io.BufferedIOBase):
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
        with typed(self._on):
            count = self._file.write(data)
        self._written += count
        return count

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        """Nothing to do: only the whole object can be seen."""


@contextmanager
def typed(on: str, absent: tuple[type[OSError], ...] = (FileNotFoundError,)) -> Iterator[None]:
    """Raise what went wrong on an object as an error of Lakebook."""
    try:
        yield
    except absent:
        raise ObjectNotFound("there is no such object", on=on) from None
    except (AlreadyExistsError, FileExistsError):
        raise ObjectExists("the object is there already", on=on, remedy="Write to a new path") from None
    except InvalidPathError as error:
        raise PathOutsideWarehouse(f"it cannot be a path there ({reason_of(error)})", on=on) from None
    except (PermissionDeniedError, UnauthenticatedError, NotSupportedError, UnknownConfigurationKeyError) as error:
        raise refused(error, on) from None
    except OSError as error:
        if error.errno in _REFUSED:
            raise refused(error, on) from None
        raise unavailable(error, on) from None
    except BaseError as error:
        raise unavailable(error, on) from None


def refused(error: Exception, on: str) -> StorageRefused:
    """What trying again does not help against."""
    return StorageRefused(
        f"the storage refuses it ({reason_of(error)})",
        on=on,
        remedy="Check rights, room and what else is at this place",
    )


def unavailable(error: Exception, on: str) -> StorageUnavailable:
    """What may go well later."""
    return StorageUnavailable(f"the storage failed ({reason_of(error)})", on=on, remedy="Try again")


def reason_of(error: Exception) -> str:
    """The first line of what went wrong: what follows in obstore's errors is for its developers.

    Of a store's own answer only its code and message count: it repeats keys and tokens that it did not like.
    """
    text = (error.strerror if isinstance(error, OSError) else None) or str(error).strip()
    if told := {name: found for name, found in _TOLD.findall(text) if found}:
        return redact(": ".join(told[name] for name in ("Code", "Message") if name in told))[:200]
    before = text.partition("<")[0].strip()
    return redact(before.splitlines()[0])[:200] if before else type(error).__name__


def check_range(on: str, start: int, length: int, size: int) -> None:
    """Refuse a range that an object of this size does not have."""
    if start + length > size:
        raise truncated(on, start, length, size)


def truncated(on: str, start: int, length: int, size: int) -> ObjectTruncated:
    """An object that ends before a range does."""
    return ObjectTruncated(
        f"it ends at {size}, and {length} bytes from {start} on were asked for",
        on=on,
        remedy="Compare the object with what was recorded about it",
    )


def in_parallel(act: Callable[[_Item], _Result], items: Sequence[_Item], workers: int) -> list[_Result]:
    """Do the same with several things at once; the first error ends it."""
    if len(items) < 2 or workers == 1:
        return [act(item) for item in items]
    with ThreadPoolExecutor(min(workers, len(items)), thread_name_prefix="lakebook-storage") as pool:
        try:
            return list(pool.map(act, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def hashed(path: str, chunks: Iterator[bytes]) -> Measured:
    """Size and checksum of an object of which each byte is read."""
    digest = xxhash.xxh3_64()
    size = 0
    for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
    return Measured(path, size, f"{XXH3}:{digest.hexdigest()}")
