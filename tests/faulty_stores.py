"""Warehouses that fail: the fault is in the storage, and not in what uses it."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from lakebook import Book
from lakebook.errors import StorageUnavailable
from lakebook.storage.objects import ObjectStore

PATIENCE = 60
#: What becomes of an upload: an error before anything is stored, a wait before it is, or something of its own.
Fault: TypeAlias = Exception | threading.Event | Callable[[ObjectStore, str, bytes], None]


class Failing(ObjectStore):
    """A warehouse whose next uploads fail, each in its own way."""

    def __init__(self, store: ObjectStore, *faults: Fault) -> None:
        super().__init__(store.warehouse)
        # The same objects, also where they are in memory.
        self._place = store._place
        self.faults = list(faults)
        self.tried: list[str] = []

    def put_new(self, path: str, data: bytes, *, durable: bool = True) -> None:
        self.tried.append(path)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        if isinstance(fault, threading.Event):
            assert fault.wait(PATIENCE)
        elif fault is not None:
            fault(self, path, data)
            return
        super().put_new(path, data, durable=durable)


def failing(book: Book, *faults: Fault) -> Failing:
    """Let the next uploads of a book fail."""
    store = Failing(book.lake.store, *faults)
    book.lake.store = store
    return store


def half_is_left(store: ObjectStore, path: str, data: bytes) -> None:
    """The connection breaks, and half of the bytes stay."""
    half_is_stored(store, path, data)
    raise StorageUnavailable("the connection broke")


def answer_is_lost(store: ObjectStore, path: str, data: bytes) -> None:
    """All is stored, and nobody hears of it."""
    ObjectStore.put_new(store, path, data)
    raise StorageUnavailable("no answer")


def half_is_stored(store: ObjectStore, path: str, data: bytes) -> None:
    """Half of the bytes are stored, and the storage says that all is well."""
    ObjectStore.put_new(store, path, data[: len(data) // 2])


def nothing_is_stored(_store: ObjectStore, _path: str, _data: bytes) -> None:
    """Nothing is stored, and the storage says that all is well."""


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """As on a full disk: no file of this process may become larger than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
