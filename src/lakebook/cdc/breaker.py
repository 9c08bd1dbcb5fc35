"""The circuit breaker of a subscriber, and the pauses between attempts.

closed ──(not well, or many objects fail in a row)──> open
open ──(its pause has passed)──> half open ──(one call succeeds)──> closed
                                 half open ──(it fails)──> open, for twice as long
"""

from __future__ import annotations

import enum
import random

from lakebook.clock import Clock

FIRST_PAUSE = 0.1

# Objects that fail, and nothing is taken between: a few poisoned ones say nothing about a subscriber.
THRESHOLD = 5
_FIRST_COOLING = 0.5


class State(enum.StrEnum):
    """What a breaker lets through: everything, nothing, or one call at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


def pause_after(attempts: int, longest: float) -> float:
    """Seconds to wait after so many failed attempts: ever more, up to the longest, and never all alike."""
    # The exponent is bounded too: an object may fail for months.
    most = min(longest, FIRST_PAUSE * 2.0 ** min(max(attempts, 1) - 1, 30))
    return most * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, no secret


class Breaker:
    """Tells whether a subscriber may be called. One thread uses it."""

    def __init__(self, clock: Clock, longest: float) -> None:
        self._clock = clock
        self._longest = longest
        self.state = State.CLOSED
        #: Why it was opened last.
        self.reason = ""
        #: How often it has opened since it was closed last.
        self.openings = 0
        self._until = 0.0
        self._failed: set[int] = set()
        self._probing = False

    def allows(self) -> bool:
        """Whether a call may begin now; while it is half open, one at a time."""
        if self.state is State.OPEN and self._clock.monotonic() >= self._until:
            self.state = State.HALF_OPEN
            self._probing = False
        return self.state is State.CLOSED or (self.state is State.HALF_OPEN and not self._probing)

    def began(self) -> None:
        """A call has begun."""
        self._probing = self.state is State.HALF_OPEN

    def succeeded(self) -> None:
        """A call has gone well."""
        self._failed.clear()
        self._probing = False
        # One that began before it was opened proves nothing about now.
        if self.state is State.HALF_OPEN:
            self.state = State.CLOSED
            self.openings = 0
            self.reason = ""

    def failed(self, object_id: int, reason: str) -> None:
        """A call has failed, though the subscriber is well."""
        self._failed.add(object_id)
        if self.state is State.HALF_OPEN or len(self._failed) >= THRESHOLD:
            self.trip(reason)

    def trip(self, reason: str) -> None:
        """Let nothing through for a while."""
        self._failed.clear()
        self._probing = False
        if self.state is State.OPEN:
            return
        self.openings += 1
        cooling = min(self._longest, _FIRST_COOLING * 2.0 ** min(self.openings - 1, 30))
        self._until = self._clock.monotonic() + cooling * random.uniform(0.8, 1.0)  # noqa: S311 - jitter, no secret
        self.state = State.OPEN
        self.reason = reason

    def opens_in(self) -> float | None:
        """Seconds until it lets a call through again; none if it does."""
        if self.state is not State.OPEN:
            return None
        return max(0.0, self._until - self._clock.monotonic())
