"""The thread of a process that publishes what this process has changed.

No change of a table waits for it. The first change is noticed and waited upon for a moment, so
that a burst of them becomes one snapshot. What cannot be published now is tried again later, at
ever longer intervals; the registry knows what is published, so nothing is lost with a process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lakebook import forks
from lakebook.clock import Clock
from lakebook.errors import (
    BookClosed,
    EpochChanged,
    NotPublishable,
    RegistryUnavailable,
    StorageUnavailable,
    TableNotFound,
)
from lakebook.registry.tables import TableRecord

LOG = logging.getLogger("lakebook.publishing")

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 60.0

# Where one table fails like this, all others would too, each after a long wait.
_OUTAGES = (RegistryUnavailable, StorageUnavailable)


@dataclass
class _Notice:
    """A table that has changed, and when it is to be published."""

    table: TableRecord
    due: float
    failures: int = 0


class BackgroundPublisher:
    """Publishes noticed tables after `lag` seconds, each once, however often they were noticed.

    Without `threaded` nothing happens until `run_once` or `flush` is called.
    """

    def __init__(
        self,
        publish: Callable[[TableRecord], object],
        clock: Clock,
        lag: float,
        *,
        threaded: bool = True,
        done: str = "published",
    ) -> None:
        self._publish = publish
        self._clock = clock
        self._lag = lag
        self._threaded = threaded
        # What it does, in the words of the log.
        self._done = done
        # Guards the notices; `_publishing` is held by who publishes.
        self._changed = threading.Condition()
        self._publishing = threading.Lock()
        self._noticed: dict[int, _Notice] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        """Let go of what is the parent's: its notices, its thread, and locks that it may have held."""
        self._changed, self._publishing = threading.Condition(), threading.Lock()
        self._noticed, self._thread = {}, None

    def notice(self, table: TableRecord) -> None:
        """Say that a table has changed."""
        with self._changed:
            if self._closed:
                return
            waiting = self._noticed.get(table.id)
            if waiting is not None:
                # It waits no longer for being noticed again, nor less for having failed.
                waiting.table = table
                return
            self._noticed[table.id] = _Notice(table, self._clock.monotonic() + self._lag)
            self._changed.notify_all()
            if self._threaded and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._run, name="lakebook-publishing", daemon=True)
                self._thread.start()

    def waiting(self) -> int:
        """How many tables are to be published."""
        with self._changed:
            return len(self._noticed)

    def run_once(self) -> bool:
        """Publish every table that is due; whether none of them failed."""
        with self._publishing:
            now = self._clock.monotonic()
            with self._changed:
                due = [table_id for table_id, notice in self._noticed.items() if notice.due <= now]
            return self._publish_each(due)

    def flush(self, timeout: float | None = None) -> bool:
        """Publish all that was noticed, now and in this thread; whether all of it is published.

        What fails waits for its next try. After `timeout` seconds no further table is begun.
        """
        until = None if timeout is None else self._clock.monotonic() + timeout
        if not self._publishing.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return False
        try:
            with self._changed:
                every = list(self._noticed)
            return self._publish_each(every, until)
        finally:
            self._publishing.release()

    def close(self) -> None:
        """End the thread, and publish what was noticed, as far as that is possible now."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.flush()
        with self._changed:
            self._noticed.clear()

    def _run(self) -> None:
        while self._await_due():
            self.run_once()

    def _await_due(self) -> bool:
        """Wait until a table is due; whether to go on."""
        with self._changed:
            while not self._closed:
                due = min((notice.due for notice in self._noticed.values()), default=None)
                left = None if due is None else due - self._clock.monotonic()
                if left is not None and left <= 0:
                    return True
                self._changed.wait(left)
            return False

    def _publish_each(self, table_ids: Iterable[int], until: float | None = None) -> bool:
        well = True
        for table_id in table_ids:
            if until is not None and self._clock.monotonic() >= until:
                return False
            with self._changed:
                # Taken out first: what changes from now on is noticed anew.
                notice = self._noticed.pop(table_id, None)
            if notice is None:
                continue
            failure = self._tried(notice)
            if isinstance(failure, _OUTAGES):
                return False
            well = well and failure is None
        return well

    def _tried(self, notice: _Notice) -> Exception | None:
        """Publish a table; what kept it from being published."""
        table = notice.table
        try:
            self._publish(table)
        except TableNotFound:
            return None  # It was dropped: there is nothing left to publish.
        except NotPublishable as error:
            LOG.warning("%s", error)
            return error  # Not before it changes again, and is noticed for that.
        except (BookClosed, EpochChanged) as error:
            self._end()
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, changes of tables go on
            self._postpone(notice)
            LOG.warning("%s could not be %s (%s: %s)", table.shown, self._done, type(error).__name__, error)
            return error
        except BaseException:
            self._postpone(notice)
            raise
        return None

    def _postpone(self, notice: _Notice) -> None:
        notice.failures += 1
        # The exponent is bounded too: a table may fail for months.
        pause = min(FIRST_PAUSE * 2 ** min(notice.failures - 1, 30), LONGEST_PAUSE)
        notice.due = self._clock.monotonic() + pause
        with self._changed:
            self._noticed[notice.table.id] = notice
            self._changed.notify_all()

    def _end(self) -> None:
        """Nothing can be published through this book any more."""
        with self._changed:
            self._closed = True
            self._noticed.clear()
            self._changed.notify_all()
