"""Holds a transaction open just before its COMMIT, for as long as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lakebook import Book, failpoints
from lakebook.registry.statements import POSTGRESQL

PATIENCE = 60


class Held:
    """A call in a thread of its own that stands before its COMMIT."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.result: Any = None
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.error = error

    def stand(self) -> None:
        if threading.current_thread() is self.thread:
            self.reached.set()
            assert self.go_on.wait(PATIENCE)

    def finish(self) -> Any:
        self.go_on.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


@contextmanager
def held_before_commit(call: Callable[[], Any], *, skip: int = 0) -> Iterator[Held]:
    """Start `call` and return when it is about to commit (its transaction number `skip`, from 0)."""
    held = Held(call)
    left = skip

    def stand() -> None:
        nonlocal left
        if threading.current_thread() is held.thread and not held.go_on.is_set():
            if left == 0:
                held.stand()
            left -= 1

    with failpoints.armed("transaction.before_commit", stand):
        held.thread.start()
        assert held.reached.wait(PATIENCE), held.error
        try:
            yield held
        finally:
            held.go_on.set()
            held.thread.join(PATIENCE)


def started(call: Callable[[], Any]) -> Held:
    """A call that runs in a thread of its own, and has come as far as its first transaction or its end."""
    held = Held(call)

    def stand() -> None:
        if threading.current_thread() is held.thread:
            held.reached.set()

    with failpoints.armed("transaction.beginning", stand):
        held.thread.start()
        for _ in range(PATIENCE * 20):
            if held.reached.wait(0.05) or not held.thread.is_alive():
                return held
    raise AssertionError("it has not come to a transaction")


def wait_until_blocked(book: Book) -> None:
    """Return when somebody waits for a lock; SQLite has one for all, which whoever was started waits for."""
    if book._registry.kind != POSTGRESQL:
        return
    for _ in range(100_000):
        with book._registry.read() as reader:
            row = reader._connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            ).fetchone()
        if row[0]:
            return
    raise AssertionError("nobody waits")
