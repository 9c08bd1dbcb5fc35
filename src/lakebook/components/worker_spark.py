"""The Spark of a component. That it fails is a failure of this process, and of nothing that workers share.

Others have a Spark of their own: what a row tells them of a view or of a pipeline must not be what only this one found.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lakebook import forks
from lakebook.clock import Clock
from lakebook.errors import SparkUnsuitable
from lakebook.spark.session import reason_of, require_alive

if TYPE_CHECKING:
    from lakebook.spark.types import SparkSession

LOG = logging.getLogger("lakebook.components")

#: Seconds for which Spark is left alone after it has failed: ever more, up to a limit.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 600.0
#: And for which work is left alone that was at hand when it died: it may be what Spark dies of.
LONGEST_SUSPICION = 3600.0


class WorkerSpark:
    """Gives a component its session, and has it wait for ever longer while that fails."""

    def __init__(self, clock: Clock, component: str, start: Callable[[], SparkSession]) -> None:
        self._clock = clock
        self._component = component
        self._start = start
        self._lock = threading.Lock()
        self._failures = 0
        self._error = ""
        self._due = float("-inf")
        #: By work: how often in a row Spark has died while it was done, and until when it is left alone.
        self._suspects: dict[Hashable, tuple[int, float]] = {}
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        """Let go of what is the parent's: a lock that one of its threads may have held."""
        self._lock = threading.Lock()

    @contextmanager
    def session(self, work: Hashable) -> Iterator[SparkSession]:
        """A session while the block does some work. If Spark is what fails there, it is `SparkUnsuitable`."""
        try:
            spark = self._started()
            try:
                yield spark
            except Exception as error:
                self._check_after(spark, work, error)
                raise
        except SparkUnsuitable as error:
            self._note_failure(error)
            raise
        with self._lock:
            self._failures, self._due = 0, float("-inf")
            self._suspects.pop(work, None)

    def _check_after(self, spark: SparkSession, work: Hashable, error: Exception) -> None:
        try:
            require_alive(spark, error)
        except SparkUnsuitable:
            # Others that were at work just then are suspected too, until they have been done once more.
            with self._lock:
                deaths = self._suspects.get(work, (0, 0.0))[0] + 1
                self._suspects[work] = (deaths, self._clock.monotonic() + _pause(deaths, LONGEST_SUSPICION))
            raise

    def avoids(self, work: Hashable) -> bool:
        """Whether Spark has died while this was done, and it is to be left alone for a while."""
        with self._lock:
            return self._clock.monotonic() < self._suspects.get(work, (0, float("-inf")))[1]

    def _started(self) -> SparkSession:
        try:
            spark = self._start()
        except SparkUnsuitable:
            raise
        except Exception as error:
            raise SparkUnsuitable(
                f"it cannot be started ({reason_of(error)})",
                on="Spark",
                remedy="`lakebook doctor` says what is missing",
            ) from error
        require_alive(spark)
        return spark

    def _note_failure(self, error: SparkUnsuitable) -> None:
        with self._lock:
            if self.is_resting:
                return  # Of several that have used it, one tells.
            self._failures += 1
            self._error = str(error)
            self._due = self._clock.monotonic() + _pause(self._failures, LONGEST_PAUSE)
        LOG.warning("%s has no Spark (%s)", self._component, error)

    @property
    def is_resting(self) -> bool:
        """Whether it has failed only just, and is to be left alone for a while."""
        return self._clock.monotonic() < self._due

    def status(self) -> str:
        """How it stands, in words."""
        with self._lock:
            if not self._failures:
                return "given"
            left = max(0.0, self._due - self._clock.monotonic())
            return f"has failed {self._failures} times in a row, is tried again in {left:.1f} seconds: {self._error}"


def _pause(failures: int, longest: float) -> float:
    # The exponent is bounded too: it may fail for months.
    return min(FIRST_PAUSE * 2.0 ** min(failures - 1, 30), longest) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
