"""The thread of a process that publishes what this process has changed.

No change of a table waits for it. The first change is noticed and waited upon for a moment, so
that a burst of them becomes one snapshot. What cannot be published now is tried again later, at
ever longer intervals; the registry knows what is published, so nothing is lost with a process.

Where somebody publishes for all processes, that one has precedence. This thread only looks whether
the table gets published, and does it itself when nothing moves.
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
#: Seconds for which somebody else is given precedence, and how often in a row without a sign of work.
OTHERS_PAUSE = 3.0
MOST_PAUSES = 2

# Why a table is published here, and so for how many of its lease times somebody else, whose the work is,
# may have been silent: a due table can be left a little longer, one at the end only to who surely lives.
DUE, CLOSING, ASKED_FOR = 2, 1, 0

# Where one table fails like this, all others would too, each after a long wait.
_OUTAGES = (RegistryUnavailable, StorageUnavailable)


@dataclass(frozen=True)
class Look:
    """How it stands with a table just before it is published."""

    #: Whether there is something to publish.
    is_pending: bool = True
    #: Grows with every publication, whoever makes it.
    publications: int | None = None
    #: Whether somebody publishes it for all processes.
    others: bool = False


@dataclass
class _Notice:
    """A table that has changed, and when it is to be published."""

    table: TableRecord
    due: float
    failures: int = 0
    #: How often it was left to others since a publication was seen, and which that was.
    left: int = 0
    seen: int | None = None


class BackgroundPublisher:
    """Publishes noticed tables after `lag` seconds, each once, however often they were noticed.

    Without `threaded` nothing happens until `run_once` or `flush` is called. `look` is asked before a table
    is published, and told for how many lease times somebody else may have been silent; 0: it is not asked for.
    """

    def __init__(
        self,
        publish: Callable[[TableRecord], object],
        clock: Clock,
        lag: float,
        *,
        threaded: bool = True,
        done: str = "published",
        look: Callable[[TableRecord, int], Look] = lambda table, leases: Look(),
    ) -> None:
        self._publish = publish
        self._look = look
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
            return self._publish_each(due, DUE)

    def flush(self, timeout: float | None = None) -> bool:
        """Publish all that was noticed, now and in this thread; whether all of it is published.

        What fails waits for its next try. After `timeout` seconds no further table is begun. Nothing is left
        to others.
        """
        return self._flush(ASKED_FOR, timeout)

    def publish_at_once(self, table: TableRecord) -> None:
        """Publish one table in this thread, after whoever publishes just now; after a failure not before its time."""
        with self._publishing:
            now = self._clock.monotonic()
            with self._changed:
                notice = self._noticed.get(table.id)
                if self._closed or (notice is not None and notice.failures and notice.due > now):
                    return
                self._noticed.pop(table.id, None)
            self._tried(notice or _Notice(table, now), ASKED_FOR)

    def _flush(self, why: int, timeout: float | None = None) -> bool:
        until = None if timeout is None else self._clock.monotonic() + timeout
        if not self._publishing.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return False
        try:
            with self._changed:
                every = list(self._noticed)
            return self._publish_each(every, why, until)
        finally:
            self._publishing.release()

    def close(self) -> None:
        """End the thread, and publish what was noticed, as far as that is possible now, or leave it to others."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._flush(CLOSING)
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

    def _publish_each(self, table_ids: Iterable[int], why: int, until: float | None = None) -> bool:
        well = True
        for table_id in table_ids:
            if until is not None and self._clock.monotonic() >= until:
                return False
            with self._changed:
                # Taken out first: what changes from now on is noticed anew.
                notice = self._noticed.pop(table_id, None)
            if notice is None:
                continue
            failure = self._tried(notice, why)
            if isinstance(failure, _OUTAGES):
                return False
            well = well and failure is None
        return well

    def _tried(self, notice: _Notice, why: int) -> Exception | None:
        """Publish a table, unless it is or others do it; what kept it from being published."""
        table = notice.table
        try:
            look = self._look(table, why)
            if look.is_pending and not (look.others and self._left(notice, look, why)):
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

    def _left(self, notice: _Notice, look: Look, why: int) -> bool:
        """Leave a table to others; not if it was, and nothing has been published since."""
        if why == CLOSING:
            return True
        if look.publications != notice.seen:
            notice.seen, notice.left = look.publications, 0
        if notice.left >= MOST_PAUSES:
            return False
        notice.left += 1
        self._put_back(notice, OTHERS_PAUSE)
        return True

    def _postpone(self, notice: _Notice) -> None:
        notice.failures += 1
        # The exponent is bounded too: a table may fail for months.
        self._put_back(notice, min(FIRST_PAUSE * 2 ** min(notice.failures - 1, 30), LONGEST_PAUSE))

    def _put_back(self, notice: _Notice, pause: float) -> None:
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
