"""Copying objects from one warehouse to another, several at once, as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import xxhash

from lakebook import failpoints
from lakebook.errors import CopyFailed
from lakebook.storage.objects import WORKERS, ObjectStore

XXH3 = "xxh3:"
# Made durable together: then a folder is synchronised once for many files.
_AT_ONCE = 500


@dataclass(frozen=True)
class KnownObject:
    """An object that is to be copied, with what is recorded of it."""

    path: str
    size: int
    #: None where none was recorded. That of the bytes themselves (`xxh3:…`), or what a store knew them by.
    checksum: str | None

    @property
    def is_of_bytes(self) -> bool:
        """Whether its checksum can be compared with that of bytes that lie elsewhere."""
        return self.checksum is not None and self.checksum.startswith(XXH3)


@dataclass
class Copied:
    """What was copied, and what was there already."""

    objects: int = 0
    bytes: int = 0
    skipped: int = 0


def copy_objects(
    source: ObjectStore, target: ObjectStore, wanted: Iterable[KnownObject], copied: Copied, workers: int = WORKERS
) -> Iterator[tuple[KnownObject, str]]:
    """Copy objects; each that is there, with the checksum of its bytes.

    One that was there already, and is the same, is left as it is.
    """
    rest = iter(wanted)
    with ThreadPoolExecutor(workers, thread_name_prefix="lakebook-copy") as pool:
        while batch := list(islice(rest, _AT_ONCE)):
            written: list[str] = []
            try:
                for item, found in zip(batch, pool.map(lambda item: _copy(source, target, item), batch), strict=True):
                    copied.objects += 1
                    copied.bytes += item.size
                    copied.skipped += found is None
                    if found is not None:
                        written.append(item.path)
                    yield item, found or item.checksum or ""
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            target.make_durable(written, workers)


def _copy(source: ObjectStore, target: ObjectStore, item: KnownObject) -> str | None:
    """Copy an object, unless it is there; its checksum, or none if it was."""
    found = target.size(item.path)
    if found is not None:
        # An object appears as a whole. But nobody says that it was this copy which put it there.
        if found == item.size and item.is_of_bytes and _checksum(target, item.path) == item.checksum:
            return None
        target.delete_one(item.path)
    digest = xxhash.xxh3_64()
    size = 0
    with target.create(item.path, durable=False) as file:
        for chunk in source.stream(item.path):
            digest.update(chunk)
            size += len(chunk)
            file.write(chunk)
        # Within the block: what is not as it was recorded does not appear.
        _check(source, item, size, f"{XXH3}{digest.hexdigest()}")
    failpoints.reach("copy.object_copied")
    return f"{XXH3}{digest.hexdigest()}"


def _checksum(store: ObjectStore, path: str) -> str:
    """The checksum of an object's bytes, whatever its store knows it by."""
    digest = xxhash.xxh3_64()
    for chunk in store.stream(path):
        digest.update(chunk)
    return f"{XXH3}{digest.hexdigest()}"


def _check(source: ObjectStore, item: KnownObject, size: int, checksum: str) -> None:
    if size == item.size and (not item.is_of_bytes or item.checksum == checksum):
        return
    raise CopyFailed(
        f"it has {size} bytes ({checksum}), and {item.size} were recorded ({item.checksum or 'without a checksum'})",
        on=source.uri(item.path),
        remedy="Run `lakebook verify` on the source",
    )
