"""Work by the clock: named pieces of it, each at its own interval, one after the other in one thread.

What fails is logged and counted, and comes again at ever longer intervals; the others go on. Only the
monotonic clock decides what is due, so that setting the time does nothing, and after a long sleep each
piece of work comes once and not as often as it was missed.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lakebook import forks
from lakebook.clock import Clock, to_datetime
from lakebook.errors import BookClosed, EpochChanged, InvalidInput
from lakebook.metrics import Metrics
from lakebook.names import shown

LOG = logging.getLogger("lakebook.components")

#: Seconds after which a piece of work that fails comes again at the latest, unless its interval is longer.
LONGEST_PAUSE = 3600.0

DONE, FAILED = "done", "failed"

# Several processes that were started together do not stay in step.
_JITTER = 0.1
# Never waited for at once; a thread cannot be told to wait for years.
_LONGEST_WAIT = 3600.0
# Never more often than this: a thread that does nothing else would take a whole processor.
_SHORTEST_INTERVAL = 0.01


@dataclass(eq=False)
class _Chore:
    """A piece of work, when it is due, and how it went."""

    name: str
    interval: float
    work: Callable[[], object]
    due: float
    failures: int = 0
    last_run: int | None = None
    outcome: str | None = None
    error: str | None = None
    running: bool = False


class Chores:
    """Runs pieces of work by the clock, in a thread or, for who has a clock of its own, by `run_due`."""

    def __init__(self, clock: Clock, name: str, metrics: Metrics) -> None:
        self._clock = clock
        self._name = name
        self._metrics = metrics
        self._chores: dict[str, _Chore] = {}
        # Guards what is due; `_working` is held by who works. Reentrant: a chore may stop its own kind.
        self._changed = threading.Condition()
        self._working = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        """Let go of what is the parent's: its thread, and locks that it may have held."""
        self._changed, self._working = threading.Condition(), threading.RLock()
        self._thread = None
        for chore in self._chores.values():
            chore.running = False

    def add(self, name: str, interval: float, work: Callable[[], object]) -> None:
        """Have something done every `interval` seconds; the first time at some moment within the first."""
        interval = max(interval, _SHORTEST_INTERVAL)
        with self._changed:
            # Not all at once when a process starts.
            first = self._clock.monotonic() + interval * random.random()  # noqa: S311 - no secret
            self._chores[name] = _Chore(name, interval, work, first)
            self._changed.notify_all()

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop: long work looks at it now and then."""
        return self._stopping

    def start(self) -> None:
        """Begin to work; once is enough."""
        with self._changed:
            self._stopping = False
            if self._thread is not None and self._thread.is_alive():
                return
            self._thread = threading.Thread(target=self._run, name=f"lakebook-{self._name}", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; what is at work is waited for, and nothing more is begun."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._working:  # Also what `run_now` has begun in another thread.
            pass

    def run_due(self) -> int:
        """Do everything that is due, the longest due first; how many pieces of work."""
        now = self._clock.monotonic()
        with self._changed:
            due = sorted((item for item in self._chores.values() if item.due <= now), key=lambda item: item.due)
        done = 0
        for chore in due:
            if self._stopping:
                break
            with self._working:
                self._try(chore)
            done += 1
        return done

    def run_now(self, name: str) -> Any:
        """Do a piece of work at once, in this thread, and return what it returns, or raise what it raises."""
        chore = self._chores.get(name)
        if chore is None:
            raise InvalidInput(
                f"there is no such work as {shown(name)}", on=self._name, remedy=f"Use {', '.join(self._chores)}"
            )
        with self._working:
            return self._do(chore)

    def status(self) -> dict[str, dict[str, Any]]:
        """Of each piece of work, when it was done last, how it went, and when it comes next."""
        with self._changed:
            now, wall = self._clock.monotonic(), self._clock.now_ms()
            return {
                chore.name: {
                    "interval": chore.interval,
                    "running": chore.running,
                    "last_run": None if chore.last_run is None else _time(chore.last_run),
                    "outcome": chore.outcome,
                    "error": chore.error,
                    "failures": chore.failures,
                    "next_run": _time(wall + round(max(0.0, chore.due - now) * 1000)),
                }
                for chore in self._chores.values()
            }

    # --- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        while self._await_due():
            self.run_due()

    def _await_due(self) -> bool:
        """Wait until something is due; whether to go on."""
        with self._changed:
            while not self._stopping:
                due = min((chore.due for chore in self._chores.values()), default=None)
                left = _LONGEST_WAIT if due is None else due - self._clock.monotonic()
                if left <= 0:
                    return True
                self._changed.wait(min(left, _LONGEST_WAIT))
            return False

    def _try(self, chore: _Chore) -> None:
        try:
            self._do(chore)
        except (BookClosed, EpochChanged) as error:
            LOG.warning("%s ends: nothing can be done through this book any more (%s)", self._name, error)
            self._stopping = True
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            LOG.warning("%s failed at %s (%s: %s)", self._name, chore.name, type(error).__name__, error)

    def _do(self, chore: _Chore) -> Any:
        with self._changed:
            chore.running = True
        outcome, error = FAILED, None
        started = self._clock.now_ms()
        try:
            result = chore.work()
            outcome = DONE
            return result
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            self._metrics.count_chore(self._name, chore.name, outcome)
            self._note(chore, started, outcome, error)

    def _note(self, chore: _Chore, started: int, outcome: str, error: str | None) -> None:
        with self._changed:
            chore.running = False
            chore.last_run, chore.outcome, chore.error = started, outcome, error
            chore.failures = 0 if error is None else chore.failures + 1
            pause = chore.interval
            if chore.failures:
                # The exponent is bounded too: something may fail for months.
                longer = chore.interval * 2.0 ** min(chore.failures - 1, 30)
                pause = max(chore.interval, min(longer, LONGEST_PAUSE))
            # From its end on, not from when it was due: what was missed is not made up for.
            spread = random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret
            chore.due = self._clock.monotonic() + pause * spread


def _time(ms: int) -> str:
    return to_datetime(ms).isoformat(timespec="seconds")
