"""Storing the bytes of a stream: in the time they have, and looked at before anybody counts on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from lakebook.errors import StorageUnavailable, UploadIncomplete
from lakebook.storage.objects import ObjectStore

T = TypeVar("T")


def upload(store: ObjectStore, path: str, data: bytes, seconds: float | None = None) -> None:
    """Store an object, and see that it is there with all its bytes; it is durable when this returns.

    `seconds` is for how long it may take; none: for any time.
    """

    def put() -> None:
        store.put_new(path, data)
        stored = store.size(path)
        if stored != len(data):
            raise UploadIncomplete(
                f"{len(data)} bytes were stored, and " + ("it is not there" if stored is None else f"it has {stored}"),
                on=path,
                remedy="Store it anew, at another place; look whether the warehouse is sound",
            )

    if seconds is None:
        put()
    else:
        within(seconds, path, put)


def within(seconds: float, path: str, call: Callable[[], T]) -> T:
    """What a call returns, if it does so in time. One that hangs is left behind: what it stores counts for nobody."""
    outcome: list[Any] = []
    ended = threading.Event()

    def run() -> None:
        try:
            outcome.append((True, call()))
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            outcome.append((False, error))
        finally:
            ended.set()

    threading.Thread(target=run, name="lakebook-upload", daemon=True).start()
    if not ended.wait(max(0.0, seconds)):
        raise StorageUnavailable(
            f"storing it took longer than {seconds:.1f} s", on=path, remedy="Store it anew, at another place"
        )
    well, result = outcome[0]
    if not well:
        raise result
    return result  # type: ignore[no-any-return]
