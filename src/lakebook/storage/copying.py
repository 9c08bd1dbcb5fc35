"""Copying objects from one warehouse to another, several at once, as they are."""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import orjson
import xxhash

from lakebook import failpoints
from lakebook.errors import CopyFailed, LakebookError
from lakebook.storage.objects import WORKERS, ObjectStore

XXH3 = "xxh3:"
# Made durable together: then a folder is synchronised once for many files.
_AT_ONCE = 500
# What is copied again at most, of objects without a checksum of their bytes, after a kill.
_NOTED_OBJECTS, _NOTED_BYTES = 500, 256 << 20


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


class Journal:
    """Checksums of bytes that were copied, where none of them is recorded: only a store's own mark, or nothing.

    It lies in a folder of the target. Every attempt writes some files there, each about some hundred objects, in the
    order of their paths. It is no proof that an object is there: whoever goes on compares the bytes that are. So it
    does not matter which of the two survives a loss of power.
    """

    def __init__(self, store: ObjectStore, folder: str) -> None:
        """Begin the notes of an attempt, in a folder with those of the former ones."""
        self._store = store
        self._folder = folder
        self._attempt = uuid.uuid4().hex
        self._number = 0
        self._waiting: list[tuple[str, int, str | None, str]] = []
        self._bytes = 0

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()
            return
        # What went wrong before is what counts.
        with suppress(LakebookError):
            self.flush()

    def note(self, item: KnownObject, checksum: str) -> None:
        """Remember the checksum of the bytes that an object was found to have; kept soon."""
        self._waiting.append((item.path, item.size, item.checksum, checksum))
        self._bytes += item.size
        if len(self._waiting) >= _NOTED_OBJECTS or self._bytes >= _NOTED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Keep what was noted."""
        if self._waiting:
            self._number += 1
            path = f"{self._folder}/{self._attempt}/{self._number:08}.json"
            self._store.put_new(path, orjson.dumps(self._waiting))
            self._waiting, self._bytes = [], 0

    def known(self, wanted: Iterable[KnownObject]) -> Iterator[tuple[KnownObject, str | None]]:
        """Objects in the order of their paths, each with the checksum of its bytes if somebody knows it."""
        notes = self._notes()
        note = next(notes, None)
        for item in wanted:
            checksum = item.checksum if item.is_of_bytes else None
            while note is not None and note[0] <= item.path:
                # The same path may have been noted when something else was recorded of it.
                if note[:3] == [item.path, item.size, item.checksum]:
                    checksum = note[3]
                note = next(notes, None)
            yield item, checksum

    def _notes(self) -> Iterator[list[Any]]:
        paths = sorted(item.path for item in self._store.list(self._folder))
        attempts = [list(group) for _, group in groupby(paths, lambda path: path.rpartition("/")[0])]
        return heapq.merge(*(self._read(attempt) for attempt in attempts), key=lambda note: note[0])

    def _read(self, paths: list[str]) -> Iterator[list[Any]]:
        for path in paths:
            # One that cannot be read costs that its objects are copied again.
            with suppress(orjson.JSONDecodeError):
                yield from orjson.loads(self._store.read(path))


def copy_objects(
    source: ObjectStore,
    target: ObjectStore,
    wanted: Iterable[KnownObject],
    copied: Copied,
    journal: Journal,
    workers: int = WORKERS,
) -> Iterator[tuple[KnownObject, str]]:
    """Copy objects, which come in the order of their paths; each that is there, with the checksum of its bytes.

    One that was there already, and is the same, is left as it is.
    """
    rest = journal.known(wanted)
    with ThreadPoolExecutor(workers, thread_name_prefix="lakebook-copy") as pool:
        while batch := list(islice(rest, _AT_ONCE)):
            try:
                done = pool.map(lambda pair: _copy(source, target, *pair), batch)
                for (item, known), found in zip(batch, done, strict=True):
                    copied.objects += 1
                    copied.bytes += item.size
                    copied.skipped += found is None
                    if found is not None and not item.is_of_bytes:
                        journal.note(item, found)
                    yield item, found or known or ""
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            # Also those that were there: who wrote them may have been killed before this.
            target.make_durable([item.path for item, _ in batch], workers)


def differing(
    target: ObjectStore, wanted: Iterable[KnownObject], journal: Journal, workers: int = WORKERS
) -> Iterator[str]:
    """Which of these objects, in the order of their paths, have other bytes at the target than were copied."""
    rest = journal.known(wanted)
    with ThreadPoolExecutor(workers, thread_name_prefix="lakebook-copy") as pool:
        while batch := list(islice(rest, _AT_ONCE)):
            sums = pool.map(lambda pair: _checksum(target, pair[0].path), batch)
            yield from (item.path for (item, known), found in zip(batch, sums, strict=True) if found != known)


def _copy(source: ObjectStore, target: ObjectStore, item: KnownObject, known: str | None) -> str | None:
    """Copy an object, unless it is there; its checksum, or none if it was."""
    found = target.size(item.path)
    if found is not None:
        # An object appears as a whole. But nobody says that it was this copy which put it there.
        if found == item.size and known is not None and _checksum(target, item.path) == known:
            return None
        target.delete_one(item.path)
    mark = None if item.is_of_bytes else source.mark(item.path, item.checksum or "")
    digest = xxhash.xxh3_64()
    size = 0
    with target.create(item.path, durable=False) as file:
        for chunk in source.stream(item.path):
            digest.update(chunk)
            size += len(chunk)
            file.write(chunk)
        # Within the block: what is not as it was recorded does not appear.
        _check(source, item, size, f"{XXH3}{digest.hexdigest()}")
        if mark is not None:
            # Before and after it was read: else it could have been read half as it was and half as it is.
            _check_marks(source, item, mark, source.mark(item.path, mark))
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


def _check_marks(source: ObjectStore, item: KnownObject, before: str, after: str | None) -> None:
    recorded = item.checksum or before
    if before == after == recorded:
        return
    raise CopyFailed(
        f"it is not what was recorded: its store knows it by {before if before != recorded else after}, and knew it by"
        f" {recorded}",
        on=source.uri(item.path),
        remedy="Run `lakebook verify` on the source. If another tool has brought it there, let that do so in parts of"
        " 16 MiB, as Lakebook and Spark do: in other parts, a store knows the same bytes by another mark",
    )
