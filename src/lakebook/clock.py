"""The one source of time: injected everywhere, so that tests decide what time it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypeAlias

#: Asked between two steps of long work whether to stop there; the next call goes on.
Enough: TypeAlias = Callable[[], bool]


def never() -> bool:
    """Go on until everything is done."""
    return False


class Clock(Protocol):
    """What Lakebook needs to know about time."""

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since 1970, UTC."""

    def monotonic(self) -> float:
        """Seconds that never run backwards, for durations."""

    def sleep(self, seconds: float) -> None:
        """Wait, as a retry or a poll does."""


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since 1970, UTC."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Seconds that never run backwards, for durations."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait, as a retry or a poll does."""
        time.sleep(seconds)


class ManualClock:
    """A clock that moves when it is told to; sleeping moves it too."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 0.0
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since 1970, UTC."""
        return self._now_ms

    def monotonic(self) -> float:
        """Seconds that never run backwards, for durations."""
        return self._monotonic

    def sleep(self, seconds: float) -> None:
        """Move forward by as much as the caller wanted to wait."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move both readings forward."""
        with self._lock:
            self._now_ms += round(seconds * 1000)
            self._monotonic += seconds

    def turn_back(self, seconds: float) -> None:
        """Move the wall clock alone backwards, as a time correction does."""
        with self._lock:
            self._now_ms -= round(seconds * 1000)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


# Up to here a float holds seconds to less than a microsecond.
_EXACT_MS = 4_000_000_000_000


def to_datetime(ms: int) -> datetime:
    """A registry time as an aware datetime."""
    if 0 <= ms < _EXACT_MS:
        return datetime.fromtimestamp(ms / 1000, UTC)
    return _EPOCH + timedelta(milliseconds=ms)


def to_ms(moment: datetime) -> int:
    """An aware datetime as a registry time."""
    return (moment - _EPOCH) // timedelta(milliseconds=1)
