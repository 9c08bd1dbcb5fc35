"""A reader's lease on topics: what it has still to read stays where it is, while the reader lives."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress

from lakebook.errors import LakebookError, LeaseLost, TransientError
from lakebook.lake.lake import Lake
from lakebook.registry.topic_leases import (
    Place,
    advance_topic_lease,
    drop_from_topic_lease,
    end_topic_leases,
    renew_topic_leases,
    take_topic_lease,
)
from lakebook.registry.transactions import Transaction, new_id


class Pin:
    """Pins partitions, each from an offset on. It is renewed in the background until it is closed.

    One whose reader has not asked for anything for `lease_maximum` seconds is renewed no more.
    """

    def __init__(self, lake: Lake, inherit: str | None = None) -> None:
        """With `inherit`, what that lease pins can be pinned too, also below the log start."""
        self._lake = lake
        self._inherit = inherit
        self.id = new_id()
        # Held by who asks the registry: a renewal must not undo what was just pinned.
        self._asking = threading.RLock()
        self._needed: dict[Place, int] = {}
        #: What is needed no more, and the registry may not have heard of that.
        self._dropped: set[Place] = set()
        self._lost = False
        self._closed = False
        self._renewed = self._used = lake.clock.monotonic()

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, topic: str, offsets: Mapping[int, int]) -> int:
        """Pin partitions of a topic, each from an offset on; the topic's id.

        Below the log start it is refused, unless this lease pins that offset already.
        """
        with self._asking:
            self.check()
            seconds = self._lake.settings.lease_seconds
            topic_id = self._lake.registry.write(
                lambda transaction: take_topic_lease(
                    transaction, topic, offsets, self.id, seconds, inherit=self._inherit
                )
            )
            if not self._needed:
                self._renewed = self._used
            self._needed.update({(topic_id, number): offset for number, offset in offsets.items()})
            self._dropped -= self._needed.keys()
            self._lake.renewals.hold_pin(self)
            return topic_id

    def advance(self, place: Place, offset: int) -> None:
        """Say that nothing before an offset is needed any more. The registry learns of it with the next renewal."""
        if place in self._needed:
            self._needed[place] = offset

    def drop(self, places: Iterable[Place]) -> None:
        """Let go of some partitions. If the registry does not answer, it learns of it with the next renewal."""
        with self._asking:
            mine = {place for place in places if place in self._needed}
            for place in mine:
                del self._needed[place]
            self._dropped |= mine
            if mine and not self._lost:
                with suppress(TransientError):
                    self._lake.registry.write(self._drop)
                    self._dropped.clear()

    def _drop(self, transaction: Transaction) -> None:
        drop_from_topic_lease(transaction, self.id, self._dropped)

    def check(self) -> None:
        """Raise `LeaseLost` unless it is still held.

        The registry is asked only if it could have run out: if nobody has renewed it for its time.
        """
        self._raise_lost()
        self._used = self._lake.clock.monotonic()
        if self._needed and self._used - self._renewed >= self._lake.settings.lease_seconds:
            self.confirm()

    def confirm(self) -> None:
        """Ask the registry whether it is still held, and renew it."""
        self._used = self._lake.clock.monotonic()
        self.renew()
        self._raise_lost()

    def _raise_lost(self) -> None:
        if self._lost or self._closed:
            raise LeaseLost(
                "the lease was closed" if self._closed else "the lease ran out before it was renewed",
                on="topics",
                remedy="Begin the read again",
            )

    def renew(self) -> None:
        """Renew it, and let go of what is not needed any more, if somebody still reads what it pins."""
        clock, settings = self._lake.clock, self._lake.settings
        with self._asking:
            asked = clock.monotonic()
            if self._closed or self._lost or not self._needed or asked - self._used >= settings.lease_maximum:
                return
            needed = dict(self._needed)

            def work(transaction: Transaction) -> bool:
                self._drop(transaction)
                # All of a lease goes at once, unless a topic is deleted: then nothing of it is left to be read.
                lost = advance_topic_lease(transaction, self.id, needed)
                return bool(renew_topic_leases(transaction, [self.id], settings.lease_seconds)) and not lost

            if self._lake.registry.write(work):
                self._renewed = asked
                self._dropped.clear()
            else:
                self._lost = True

    def close(self) -> None:
        """Let go of everything. If the registry does not answer, the lease runs out by itself."""
        self._lake.renewals.let_go(self.id)
        with self._asking:
            pinned, self._closed = bool(self._needed) and not self._closed, True
            if pinned:
                with suppress(LakebookError):
                    self._lake.registry.write(lambda transaction: end_topic_leases(transaction, [self.id]))
