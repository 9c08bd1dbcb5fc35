"""Wake-ups: a commit with events, in this process or another, wakes whoever waits for them.

In one process a commit sets the flags of those who wait. Others are told by `NOTIFY` on PostgreSQL,
after the commit and at most once in a moment, and by a look at SQLite's own counter of changes,
which costs some microseconds. A wake-up that is lost costs no event: whoever waits also looks by itself.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any

from lakebook import forks
from lakebook.errors import LakebookError
from lakebook.registry.databases import ChangeProbe, Database, PostgreSQL

CHANNEL = "lakebook_events"

# Between two looks at SQLite's counter, and between two announcements on PostgreSQL.
PROBE_SECONDS = 0.01
ANNOUNCE_SECONDS = 0.01
# After a connection was lost, and for how long a listener waits before it looks whether it is to end.
_PAUSE = 1.0
_LISTEN_SECONDS = 0.5

_waiting: dict[str, weakref.WeakSet[Waiter]] = {}
_lock = threading.Lock()


def _forget_all() -> None:
    global _lock
    _lock = threading.Lock()
    _waiting.clear()


class _Forks:
    """Nobody waits in a child."""

    def after_fork_in_child(self) -> None:
        _forget_all()


_forks = _Forks()
forks.watch(_forks)


def _key_of(database: Database) -> str:
    return database.settings.registry


class Waiter:
    """Waits for commits with events, by any process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._flag = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        with _lock:
            _waiting.setdefault(_key_of(database), weakref.WeakSet()).add(self)

    def start(self) -> None:
        """Begin to listen to other processes."""
        if getattr(self._database, "in_memory", False):
            return  # There are no others.
        if isinstance(self._database, PostgreSQL) and not self._database.can_listen:
            return  # Behind a pooler nothing is heard: whoever waits looks by itself.
        listen = self._listen if isinstance(self._database, PostgreSQL) else self._probe
        self._thread = threading.Thread(target=listen, name="lakebook-wakeups", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for a commit, at most that long; whether there was one."""
        woken = self._flag.wait(seconds)
        if woken:
            self._flag.clear()
        return woken

    @property
    def closed(self) -> bool:
        """Whether nobody is to wait any more."""
        return self._ending.is_set()

    def wake(self) -> None:
        """Let the wait end."""
        self._flag.set()

    def close(self) -> None:
        """End listening, and every wait."""
        with _lock:
            _waiting.get(_key_of(self._database), weakref.WeakSet()).discard(self)
        self._ending.set()
        self._flag.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5 * _PAUSE)

    def _probe(self) -> None:
        probe = self._database.changes()
        assert isinstance(probe, ChangeProbe)
        try:
            last = probe.token()
            # What came before this one is not seen by a change of it.
            self.wake()
            while not self._ending.wait(PROBE_SECONDS):
                token = probe.token()
                if token != last:
                    last = token
                    self.wake()
        finally:
            probe.close()

    def _listen(self) -> None:
        while not self._ending.is_set():
            # While the server restarts, nothing is heard; then polling has to do.
            with suppress(self._database.errors, LakebookError):
                assert isinstance(self._database, PostgreSQL)
                connection = self._database.connect_to_listen()
                try:
                    self._hear(connection)
                finally:
                    connection.close()
            self._ending.wait(_PAUSE)

    def _hear(self, connection: Any) -> None:
        connection.execute(f"LISTEN {CHANNEL}")
        # What came before one listened was not announced.
        self.wake()
        while not self._ending.is_set():
            for _ in connection.notifies(timeout=_LISTEN_SECONDS, stop_after=1):
                self.wake()


class Announcer:
    """Announces commits with events: to this process at once, to others as soon as may be."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._begin()
        forks.watch(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._due = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: Any = None
        self._closed = False

    def after_fork_in_child(self) -> None:
        """Begin anew: the thread and the connection are the parent's."""
        forks.inherited.append(self._connection)
        self._begin()

    def announce(self) -> None:
        """Say that events were committed."""
        if _waiting:
            # Others may begin or cease to wait meanwhile, and a commit must not fail for that.
            with _lock:
                waiters = list(_waiting.get(_key_of(self._database), ()))
            for waiter in waiters:
                waiter.wake()
        if not isinstance(self._database, PostgreSQL) or self._closed:
            return
        self._due.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._run, name="lakebook-announcer", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """Announce what is due, and end."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._due.set()
            thread.join(_PAUSE)

    def _run(self) -> None:
        ended = threading.Event()
        while True:
            self._due.wait()
            self._due.clear()
            # One that cannot be sent is not sent again: who waits for it looks by itself before long.
            try:
                self._send()
            except (self._database.errors, LakebookError):
                self._drop()
                ended.wait(_PAUSE)
            if self._closed:
                self._drop()
                return
            ended.wait(ANNOUNCE_SECONDS)

    def _send(self) -> None:
        if self._connection is None:
            self._connection = self._database.connect()
        self._connection.execute(f"NOTIFY {CHANNEL}")

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*self._errors()):
                connection.close()

    def _errors(self) -> tuple[type[Exception], ...]:
        return (self._database.errors, OSError)
