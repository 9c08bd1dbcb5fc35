"""Astha, the scheduler: one process at a time delivers the registry's changes to all subscribers.

    standby ──(nobody has the turn, or its beat has stood still)──> active
    active  ──(another has taken the turn)──> standby
    active  ──(something of its own fails)──> standby, after a pause, and it says so
    any     ──(stop)──> stopped

Whatever it writes down asserts its turn. One that was frozen and is woken finds that it has lost the
turn with its next write, and what its subscribers still do is harmless, because each of them can bear
to be told twice.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lakebook import failpoints
from lakebook.cdc.breaker import pause_after
from lakebook.cdc.capture import Capture, Router
from lakebook.cdc.delivery import ASKED, Delivery, Progress, described, moments
from lakebook.cdc.subscribers import Subscriber
from lakebook.clock import Clock
from lakebook.errors import (
    BookClosed,
    EpochChanged,
    RegistryBusy,
    RegistryUnavailable,
    SchedulerLost,
)
from lakebook.registry.deliveries import (
    Turn,
    claim_turn,
    forget_progress,
    has_cursor,
    load_progress,
    park,
    release_turn,
    renew_turn,
    save_lanes,
    save_progress,
    scheduler_state,
)
from lakebook.registry.events import EventLog
from lakebook.registry.maintenance import FAILED, REFRESH, Request, meet, note_work, requests_of_kind
from lakebook.registry.registry import Registry
from lakebook.registry.transactions import Transaction
from lakebook.registry.wakeups import Waiter

LOG = logging.getLogger("lakebook.astha")

NAME = "astha"

# What it waits for its subscribers when it ends, and at most after failures of its own.
_STOP_SECONDS = 30.0
_LONGEST_PAUSE = 30.0
# Between two looks of `wait_idle`.
_LOOK = 0.01

_OUTAGES = (RegistryUnavailable, RegistryBusy)


class Role(enum.StrEnum):
    """What Astha is in this process."""

    STANDBY = "standby"
    ACTIVE = "active"
    STOPPED = "stopped"


class Astha:
    """Delivers events to subscribers while it has the turn, and waits for it while it has not."""

    def __init__(
        self,
        registry: Registry,
        subscribers: Sequence[Subscriber],
        *,
        on_claimed: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
        on_stopped: Callable[[], None] = lambda: None,
        describe: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._registry = registry
        self._clock: Clock = registry.clock
        self._settings = registry.settings
        self._metrics = registry.metrics
        self._subscribers = tuple(subscribers)
        self._on_claimed = on_claimed
        self._on_lost = on_lost
        self._on_stopped = on_stopped
        self._describe = describe
        self._ending = threading.Event()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._deliveries: tuple[Delivery, ...] = ()
        self._failures = 0
        # What made it begin anew, until that is written down.
        self._said: str | None = None
        # Requests that were acted upon, until it is written down.
        self._taken: set[tuple[str, int]] = set()
        self._beat = min(1.0, self._settings.astha_lease / 5)
        self.role = Role.STOPPED
        #: What ended it for good, though nobody asked it to end.
        self.failure: BaseException | None = None

    # --- life ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to wait for the turn."""
        self._set_role(Role.STANDBY)
        self._thread = threading.Thread(target=self._run, name="lakebook-astha", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Deliver nothing more, write down how far everyone has come, and give the turn back."""
        self._ending.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def wait_active(self, timeout: float) -> bool:
        """Wait until this process has the turn; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self.role is not Role.STANDBY, timeout) and self.role is Role.ACTIVE

    def wait_idle(self, timeout: float) -> bool:
        """Wait until everything that is committed by now was taken by everyone; whether it was."""
        begun = next(moments)
        until = self._clock.monotonic() + timeout
        while not self._ending.is_set():
            deliveries = self._deliveries
            if deliveries and all(delivery.quiet_since(begun) for delivery in deliveries):
                return True
            for delivery in deliveries:
                delivery.wake()
            if self._clock.monotonic() >= until:
                return False
            self._ending.wait(_LOOK)
        return False

    def status(self) -> dict[str, Any]:
        """What it does, in plain values."""
        return {
            "role": str(self.role),
            "components": [subscriber.name for subscriber in self._subscribers],
            "subscribers": {delivery.name: delivery.status() for delivery in self._deliveries},
            **self._describe(),
        }

    def _set_role(self, role: Role) -> None:
        with self._changed:
            self.role = role
            self._changed.notify_all()

    # --- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._try_once()
        finally:
            try:
                self._on_stopped()
            except Exception:
                LOG.exception("not everything has ended cleanly")
            self._set_role(Role.STOPPED)

    def _try_once(self) -> None:
        try:
            turn = self._await_turn()
            if turn is not None:
                self._serve(turn)
        except SchedulerLost:
            self._metrics.count_turn("lost")
            LOG.warning("another process delivers events by now; this one waits for its turn")
        except (BookClosed, EpochChanged) as error:
            LOG.error("events are delivered no more through this book (%s)", error)
            self.failure = error
            self._ending.set()
        except BaseException as error:
            self._failures += 1
            self._said = described(error)
            pause = pause_after(self._failures, _LONGEST_PAUSE)
            self._metrics.count_turn("reinitialised")
            LOG.exception("Astha has failed and begins anew in %.1f s", pause)
            self._ending.wait(pause)
        finally:
            if self.role is Role.ACTIVE:
                self._set_role(Role.STANDBY)

    def _await_turn(self) -> Turn | None:
        """Wait until the turn is free, or its holder has not renewed it for a whole lease time while one watched."""
        watched: tuple[int, int] | None = None
        silence = looked = 0.0
        lease = self._settings.astha_lease
        pause = lease / 10
        while not self._ending.is_set():
            try:
                # The time of the reading itself was no watching; nor was one that passed at once, in which this process
                # was frozen or its clock was moved: then its holder may have been frozen too, and is about to go on.
                passed = min(self._clock.monotonic() - looked, 2 * pause)
                state = self._registry.read_with(scheduler_state)
                looked = self._clock.monotonic()
                seen = None if state is None else (state.token, state.beat)
                silence = silence + passed if seen == watched else 0.0
                watched = seen
                silent = seen is not None and silence >= lease
                if state is None or state.holder is None or silent:
                    turn = self._claim(seen if silent else None)
                    if turn is not None:
                        return turn
            except _OUTAGES as error:
                LOG.warning("the registry does not answer (%s)", error)
                watched = None
            self._ending.wait(pause)
        return None

    def _claim(self, seen: tuple[int, int] | None) -> Turn | None:
        status = {"components": [subscriber.name for subscriber in self._subscribers]}
        return self._registry.write(lambda transaction: claim_turn(transaction, seen, status))

    # --- while it has the turn ---------------------------------------------------------

    def _serve(self, turn: Turn) -> None:
        self._metrics.count_turn("claimed")
        LOG.info("this process delivers events from now on (turn %d)", turn.token)
        self._taken = set()
        waiter = Waiter(self._registry.database)
        held = True
        try:
            failpoints.reach("astha.claimed")
            self._say(turn)
            self._begin(waiter)
            self._set_role(Role.ACTIVE)
            while not self._ending.wait(self._beat):
                self._renew(turn)
                self._check()
                self._failures = 0
        except (SchedulerLost, BookClosed, EpochChanged):
            held = False
            raise
        finally:
            waiter.close()
            self._end(turn, held=held)

    def _begin(self, waiter: Waiter) -> None:
        capture = Capture(EventLog(self._registry), Router(self._subscribers))
        self._deliveries = self._loaded(capture)
        waiter.start()
        pumped = (waiter, capture, self._deliveries)
        threading.Thread(target=self._pump, args=pumped, name="lakebook-pump", daemon=True).start()
        self._on_claimed()
        for delivery in self._deliveries:
            delivery.start()

    def _end(self, turn: Turn, *, held: bool) -> None:
        """End all deliveries; if the turn is still held, write down how far they have come and give it back."""
        for delivery in self._deliveries:
            delivery.stop()
        finishing = threading.Thread(target=self._finish, args=(self._deliveries,), name="lakebook-end", daemon=True)
        finishing.start()
        try:
            # What is under way may take longer than a lease: nobody else is to begin with it meanwhile.
            finishing.join(self._beat if held else None)
            while finishing.is_alive():
                self._renew(turn)
                finishing.join(self._beat)
            if held:
                self._release(turn)
        except (SchedulerLost, BookClosed, EpochChanged) as error:
            # What was not written down is delivered once more.
            LOG.warning("the turn could not be given back (%s)", error)
        finally:
            finishing.join()
            self._deliveries = ()

    def _finish(self, deliveries: Sequence[Delivery]) -> None:
        """Wait for whatever is still under way."""
        try:
            self._on_lost()
        except Exception:
            LOG.exception("not everything has ended cleanly")
        until = self._clock.monotonic() + _STOP_SECONDS
        for delivery in deliveries:
            delivery.join(max(0.0, until - self._clock.monotonic()))

    def _release(self, turn: Turn) -> None:
        try:
            self._tick(turn)
            self._registry.write(lambda transaction: release_turn(transaction, turn))
            self._metrics.count_turn("released")
        except _OUTAGES as error:
            LOG.warning("the turn could not be given back (%s)", error)

    def _pump(self, waiter: Waiter, capture: Capture, deliveries: Sequence[Delivery]) -> None:
        """Wake the deliveries when something was committed."""
        while not waiter.closed:
            if waiter.wait(self._settings.event_poll):
                capture.announce()
                for delivery in deliveries:
                    delivery.wake()

    def _loaded(self, capture: Capture) -> tuple[Delivery, ...]:
        found = []
        for subscriber in self._subscribers:
            name = subscriber.name
            delivery = Delivery(self._registry, capture, subscriber)
            delivery.load(*self._registry.in_snapshot(lambda reader: load_progress(reader, name)))  # noqa: B023
            found.append(delivery)
        return tuple(found)

    def _check(self) -> None:
        for delivery in self._deliveries:
            if delivery.failure is not None:
                raise delivery.failure

    def _renew(self, turn: Turn) -> None:
        try:
            self._tick(turn)
        except _OUTAGES as error:
            # If another takes the turn meanwhile, the next write that gets through says so.
            LOG.warning("what was delivered cannot be written down now (%s)", error)

    def _tick(self, turn: Turn) -> None:
        """Renew the turn, and write down how far everyone has come."""
        met = self._take_requests()
        found = [(delivery, delivery.progress()) for delivery in self._deliveries]
        status = self.status()
        silent_ms = max(1000, round(self._settings.astha_lease * 1000))
        dropped = self._registry.write(
            lambda transaction: _write_down(transaction, turn, status, found, met, silent_ms)
        )
        failpoints.reach("astha.saved")
        for delivery, progress in found:
            if delivery.name in dropped:
                LOG.warning("%s has lost its cursor, and takes everything anew", delivery.name)
                delivery.begin_anew()
            else:
                delivery.saved(progress)

    def _take_requests(self) -> list[Request]:
        """Have objects refreshed for whom somebody has asked for it."""
        by_name = {delivery.name: delivery for delivery in self._deliveries}
        asked = self._registry.read_with(lambda reader: requests_of_kind(reader, REFRESH, sorted(by_name)))
        for request in asked:
            # Once: it stays until it is written down that it was met, and that may take several attempts.
            if (request.key, request.requested_at) not in self._taken:
                by_name[request.component].refresh(request.object_id or None, ASKED)
        self._taken = {(request.key, request.requested_at) for request in asked}
        return asked

    def _say(self, turn: Turn) -> None:
        """Write down that it had to begin anew."""
        said = self._said
        if said is None:
            return
        now = self._clock.now_ms()
        self._registry.write(
            lambda transaction: note_work(
                transaction, NAME, None, "reinitialise", "it failed", FAILED, {"error": said, "turn": turn.token}, now
            )
        )
        self._said = None


def _write_down(
    transaction: Transaction,
    turn: Turn,
    status: Mapping[str, Any],
    found: Sequence[tuple[Delivery, Progress]],
    met: Sequence[Request],
    silent_ms: int = 60_000,
) -> set[str]:
    """Write it down; the subscribers whose cursor somebody has taken away meanwhile."""
    renew_turn(transaction, turn, status, silent_ms)
    dropped: set[str] = set()
    for delivery, progress in found:
        if progress.anew:
            forget_progress(transaction, delivery.name)
        elif delivery.was_saved and not has_cursor(transaction, delivery.name):
            # Its lanes are gone with it. To go on from here would leave their events to nobody.
            dropped.add(delivery.name)
            forget_progress(transaction, delivery.name)
            continue
        elif progress.cursor is not None:
            save_progress(transaction, delivery.name, progress.cursor, progress.changed, progress.finished)
        elif progress.is_new:
            save_lanes(transaction, delivery.name, progress.changed, progress.finished)
        for letter in progress.letters:
            park(transaction, delivery.name, letter.event.captured, letter.attempts, letter.error)
    meet(transaction, met)
    return dropped
