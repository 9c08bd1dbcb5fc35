"""Delivery to one subscriber: in order per lake object, at least once, and nobody waits for anybody else.

A thread of the subscriber's own reads the log and keeps a lane for every object that has events to be
taken. Workers hand them over. What fails comes again after a pause, in its own lane; others go on. A
lane that grows long is not kept in memory: its events are read from the log when their turn comes.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from lakebook import failpoints
from lakebook.cdc.breaker import Breaker, State, pause_after
from lakebook.cdc.capture import Capture, RoutedPage
from lakebook.cdc.subscribers import Event, Refresh, Subscriber
from lakebook.clock import Clock, to_ms
from lakebook.errors import (
    BookClosed,
    CursorExpired,
    InvalidCursor,
    RegistryBusy,
    RegistryUnavailable,
    StorageUnavailable,
    SubscriberFailed,
)
from lakebook.registry import deliveries
from lakebook.registry.events import Cursor
from lakebook.registry.registry import Registry

LOG = logging.getLogger("lakebook.astha")

#: Events of one object that are handed over together, and those kept in memory, per object and in all.
BATCH = 500
_MOST_IN_LANE = 2000
_MOST_IN_MEMORY = 50_000
#: Seconds in which a subscriber has to say whether it is well, and between two such questions.
HEALTH_SECONDS = 5.0
_HEALTH_INTERVAL = 10.0
# Calls that were given up and have not come back: beyond this, nothing more is handed over, of one object
# and of all together. Each of them keeps a thread.
_MOST_ABANDONED_OF_ONE = 2
_MOST_ABANDONED = 8
# Of what an error says.
_LONGEST_ERROR = 2000

#: What is before what in this process; clocks may stand still.
moments = itertools.count(1)

# Where a call fails like this, the subscriber cannot help it, and any other call would too.
_REGISTRY_AWAY = (RegistryUnavailable, RegistryBusy)
# Of storage one object alone may be the reason; then the subscriber says that it is well.
_OUTAGES = (*_REGISTRY_AWAY, StorageUnavailable)

START = "start"
PARKED = "an event was parked"
GIVEN_UP = "a call took too long"
NOT_SAID = "it did not say in time whether it is well"
LEFT_BEHIND = "its cursor was too old"
ASKED = "it was asked for"


@dataclass(eq=False)
class _Lane:
    """What one object's events are to this subscriber."""

    object_id: int
    next_sequence: int
    known: int
    since: int
    queue: deque[Event[Any]] = field(default_factory=deque)
    #: Whether some of its events are in the log only.
    spilled: bool = False
    #: Why it is to be refreshed first; none if it is not. And how often that was asked for.
    refresh: str | None = None
    asked: int = 0
    attempts: int = 0
    error: str | None = None
    #: When it may be handed over, by the monotonic clock.
    due: float = 0.0
    #: So many events are handed over one by one: one of them has made a batch fail.
    careful: int = 0

    @property
    def done(self) -> bool:
        return self.refresh is None and self.next_sequence > self.known


@dataclass(eq=False)
class _Call:
    """Something that is handed to the subscriber."""

    object_id: int
    events: Sequence[Event[Any]] = ()
    #: To be read from the log first: from, to, and how many at most.
    fetch: tuple[int, int, int] | None = None
    refresh: str | None = None
    asked: int = 0
    health: bool = False
    #: Whether the subscriber has to say first that it is well.
    probe: bool = False
    #: Whether it is just being asked that.
    asking: bool = False
    deadline: float = 0.0
    abandoned: bool = False
    lane: _Lane | None = None


@dataclass(frozen=True)
class _Outcome:
    call: _Call
    events: Sequence[Event[Any]] = ()
    #: The last event that the state of a refresh covers.
    covered: int = 0
    #: Whether the events that it was to take are no longer kept.
    gone: bool = False
    error: BaseException | None = None
    #: Why the subscriber is not well; none if it is.
    unwell: str | None = None


@dataclass(frozen=True)
class Letter:
    """An event that is to be parked."""

    event: Event[Any]
    attempts: int
    error: str


@dataclass(frozen=True)
class Progress:
    """What is to be written down about a subscriber."""

    cursor: Cursor | None
    changed: tuple[deliveries.Lane, ...]
    finished: tuple[int, ...]
    letters: tuple[Letter, ...]
    #: All lanes, as they are written down then.
    lanes: dict[int, deliveries.Lane]
    #: Whether it takes everything anew, so that whatever was written down means nothing any more.
    anew: bool = False

    @property
    def is_new(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.changed or self.finished or self.letters)


class Delivery:
    """Hands events to one subscriber. It writes nothing down: whoever has the turn does, from `progress`."""

    def __init__(self, registry: Registry, capture: Capture, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.name = subscriber.name
        self._registry = registry
        self._capture = capture
        self._clock: Clock = registry.clock
        self._settings = registry.settings
        self._metrics = registry.metrics
        self.breaker = Breaker(self._clock, self._settings.delivery_pause)
        self._lock = threading.Lock()
        self._cursor: Cursor | None = None
        self._saved_cursor: Cursor | None = None
        self._lanes: dict[int, _Lane] = {}
        self._saved: dict[int, deliveries.Lane] = {}
        self._letters: list[Letter] = []
        self._timed: list[tuple[float, int]] = []
        self._ready: deque[int] = deque()
        self._in_memory = 0
        self._busy: dict[int, _Call] = {}
        # The objects of calls that were given up, by the call.
        self._abandoned: dict[int, int] = {}
        self._inbox: SimpleQueue[_Outcome | None] = SimpleQueue()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._woken = True
        self._next_read = 0.0
        self._read_failures = 0
        # How often in a row its cursor was too old.
        self._expired = 0
        self._next_health = 0.0
        self._quiet_from: int | None = None
        self.taken = 0
        #: What ended the thread, if it was not asked to end.
        self.failure: BaseException | None = None

    # --- from outside ----------------------------------------------------------------

    def load(self, cursor: Cursor | None, lanes: Sequence[deliveries.Lane]) -> None:
        """Begin where it was left; without a cursor, or for one that forgets, with a refresh."""
        self._saved = {lane.object_id: lane for lane in lanes}
        self._saved_cursor = cursor
        if cursor is None or not self.subscriber.durable:
            return
        self._cursor = cursor
        now, wall = self._clock.monotonic(), self._clock.now_ms()
        for lane in lanes:
            # Never longer than the longest pause: the clock may have been set.
            wait = min(max(0.0, (lane.retry_at - wall) / 1000), self._settings.delivery_pause)
            self._lanes[lane.object_id] = _Lane(
                lane.object_id,
                lane.next_sequence,
                lane.known_sequence,
                lane.since,
                spilled=True,
                refresh=ASKED if lane.refresh else None,
                attempts=lane.attempts,
                error=lane.last_error,
                due=now + wait,
            )
            heapq.heappush(self._timed, (now + wait, lane.object_id))

    def start(self) -> None:
        """Begin to deliver."""
        for _ in range(self.subscriber.workers):
            self._add_worker()
        self._thread = threading.Thread(target=self._run, name=f"lakebook-{self.name}", daemon=True)
        self._thread.start()

    def _add_worker(self) -> None:
        threading.Thread(target=self._work, name=f"lakebook-{self.name}-worker", daemon=True).start()

    def wake(self) -> None:
        """Say that there may be new events."""
        self._woken = True
        self._inbox.put(None)

    def stop(self) -> None:
        """Hand nothing more over."""
        with self._lock:
            self._stopping = True
        self._inbox.put(None)

    def join(self, timeout: float) -> None:
        """Wait for what is under way after a stop, at most that long."""
        if self._thread is not None:
            self._thread.join(timeout)

    def refresh(self, object_id: int | None, reason: str = ASKED) -> None:
        """Have an object taken from the registry anew, or all of them."""
        with self._lock:
            if object_id is None:
                self._cursor = None
            else:
                self._refresh_lane(object_id, reason)
        self.wake()

    def begin_anew(self) -> None:
        """Take everything anew: nothing of what was written down is there any more."""
        with self._lock:
            self._cursor = self._saved_cursor = None
            self._saved = {}
        self.wake()

    def progress(self) -> Progress:
        """What has changed since it was written down last."""
        with self._lock:
            if self._cursor is None:
                known = self._saved_cursor is not None or bool(self._saved)
                return Progress(None, (), (), tuple(self._letters), {}, anew=known)
            longest = self._settings.delivery_pause
            now, wall = self._clock.monotonic(), self._clock.now_ms()
            lanes = {
                lane.object_id: _written(lane, wall, min(max(0.0, lane.due - now), longest))
                for lane in self._lanes.values()
                if not lane.done
            }
            changed = tuple(lane for lane in lanes.values() if not _same(self._saved.get(lane.object_id), lane))
            finished = tuple(object_id for object_id in self._saved if object_id not in lanes)
            cursor = self._cursor if self._cursor != self._saved_cursor else None
            return Progress(cursor, changed, finished, tuple(self._letters), lanes)

    @property
    def was_saved(self) -> bool:
        """Whether its cursor is written down, as far as it knows."""
        return self._saved_cursor is not None

    def saved(self, progress: Progress) -> None:
        """Say that it was written down."""
        with self._lock:
            self._saved = progress.lanes
            del self._letters[: len(progress.letters)]
            if progress.cursor is not None or progress.anew:
                self._saved_cursor = progress.cursor

    @property
    def cursor(self) -> Cursor | None:
        """How far it has read; none before its first refresh."""
        return self._cursor

    def quiet_since(self, moment: int) -> bool:
        """Whether it has found nothing to do in a look that began after a moment of `moments`."""
        with self._lock:
            return self._quiet_from is not None and self._quiet_from > moment and not self._letters

    def status(self) -> dict[str, Any]:
        """How it stands, in plain values."""
        with self._lock:
            waiting = [lane for lane in self._lanes.values() if not lane.done]
            failing = [lane for lane in waiting if lane.attempts or lane.error]
            opens = self.breaker.opens_in()
            return {
                "breaker": str(self.breaker.state),
                "reason": self.breaker.reason,
                "opens_in": None if opens is None else round(opens, 1),
                "objects": len(waiting),
                "failing": len(failing),
                "refreshing": sum(lane.refresh is not None for lane in waiting),
                "running": sum(not call.health for call in self._busy.values()),
                "abandoned": len(self._abandoned),
                "taken": self.taken,
            }

    # --- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._read()
                with self._lock:
                    now = self._clock.monotonic()
                    self._give_up_late(now)
                    self._ask_for_health(now)
                    wait = self._dispatch(now)
                self._receive(wait)
        except BaseException as error:  # noqa: BLE001 - whoever supervises it decides
            self.failure = error
        try:
            # Also then: whoever begins anew must not call for an object that is still being called for.
            self._finish_calls()
        except BaseException as error:  # noqa: BLE001 - whoever supervises it decides
            self.failure = self.failure or error
        finally:
            self._calls.put(None)

    def _receive(self, wait: float) -> None:
        try:
            message = self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait()
            with self._lock:
                while True:
                    if message is not None:
                        self._settle(message)
                    message = self._inbox.get_nowait()
        except Empty:
            return

    def _finish_calls(self) -> None:
        """Wait for what is under way, and note how it went."""
        while True:
            with self._lock:
                now = self._clock.monotonic()
                self._give_up_late(now)
                deadlines = [call.deadline for call in self._busy.values()]
            if not deadlines:
                return
            self._receive(max(0.001, min(deadlines) - now))

    # --- reading ---------------------------------------------------------------------

    def _read(self) -> None:
        """Read what is new, as long as there is more of it."""
        begun = self._clock.monotonic()
        if self._reads_in(begun) > 0:
            return
        look = next(moments)
        self._woken = False
        self._next_read = begun + self._settings.event_poll
        try:
            if self._cursor is None:
                self._begin_anew()
            while not self._stopping:
                cursor = self._cursor
                if cursor is None:
                    return
                page = self._capture.read(cursor)
                self._read_failures = self._expired = 0
                with self._lock:
                    self._accept(page, cursor)
                    if not page.number and not self._lanes and not self._busy:
                        self._quiet_from = look
                if not page.more:
                    break
                if self._in_memory >= _MOST_IN_LANE:
                    # Handing over goes first; the rest is read in the next turn of the loop.
                    self._woken = True
                    break
        except (CursorExpired, InvalidCursor) as error:
            LOG.warning("%s takes everything anew: %s", self.name, error)
            self._metrics.count_refresh(self.name, "left_behind")
            with self._lock:
                self._cursor = None
            # The first time at once. If the new one has expired as well, something else is wrong.
            self._read_failures, self._expired = self._expired, self._expired + 1
            self._next_read = self._clock.monotonic()
            if self._read_failures:
                self._next_read += pause_after(self._read_failures, min(5.0, self._settings.delivery_pause))
            self._woken = True
        except BookClosed:
            raise
        except _OUTAGES as error:
            self._read_failures += 1
            pause = pause_after(self._read_failures, min(5.0, self._settings.delivery_pause))
            LOG.warning("%s cannot read events, and tries again in %.1f s: %s", self.name, pause, error)
            self._next_read = self._clock.monotonic() + pause

    def _reads_in(self, now: float) -> float:
        """Seconds until the log is read again. No wake-up shortens the pause after a failure."""
        if self._woken and not self._read_failures:
            return 0.0
        return max(0.0, self._next_read - now)

    def _begin_anew(self) -> None:
        """Refresh every object, and go on with what is committed after that."""
        tables = self.subscriber.subscribed_tables
        cursor, objects = self._registry.in_snapshot(lambda reader: deliveries.objects_of(reader, tables))
        wall = self._clock.now_ms()
        with self._lock:
            self._lanes.clear()
            self._timed.clear()
            self._ready.clear()
            self._in_memory = 0
            for object_id, last in objects:
                lane = _Lane(object_id, last + 1, last, wall, refresh=START)
                self._lanes[object_id] = lane
                self._ready.append(object_id)
            self._cursor = cursor
            self._quiet_from = None
        LOG.info("%s takes the state of %d objects", self.name, len(objects))

    def _accept(self, page: RoutedPage, read_from: Cursor) -> None:
        if self._cursor != read_from:
            return  # It was told meanwhile to take everything anew.
        events = page.routed.get(self.name, ())
        if events:
            self._quiet_from = None
            self._line_up(events)
        # Last: a cursor that has passed an event which is in no lane would lose it.
        self._cursor = page.cursor

    def _line_up(self, events: Sequence[Event[Any]]) -> None:
        """Put events into the lanes of their objects."""
        now, wall = self._clock.monotonic(), self._clock.now_ms()
        for event in events:
            lane = self._lanes.get(event.object_id)
            if lane is None:
                lane = _Lane(event.object_id, event.sequence, event.sequence - 1, wall)
                lane.due = now + self.subscriber.linger
                self._lanes[event.object_id] = lane
                self._schedule(lane, now)
            if event.sequence <= lane.known:
                continue  # It has it already, or its refresh covered it.
            lane.known = event.sequence
            if lane.spilled or len(lane.queue) >= _MOST_IN_LANE or self._in_memory >= _MOST_IN_MEMORY:
                lane.spilled = True
                continue
            lane.queue.append(event)
            self._in_memory += 1

    # --- handing over ----------------------------------------------------------------

    def _schedule(self, lane: _Lane, now: float) -> None:
        if lane.due > now:
            heapq.heappush(self._timed, (lane.due, lane.object_id))
        else:
            self._ready.append(lane.object_id)

    def _dispatch(self, now: float) -> float:
        """Hand over what may be; how long there is nothing else to do."""
        while self._timed and self._timed[0][0] <= now:
            _, object_id = heapq.heappop(self._timed)
            lane = self._lanes.get(object_id)
            if lane is not None and lane.due <= now:
                self._ready.append(object_id)
        put_back: list[int] = []
        while self._ready and self._has_room() and self.breaker.allows():
            object_id = self._ready.popleft()
            lane = self._lanes.get(object_id)
            if lane is None or lane.due > now:
                continue
            if object_id in self._busy or self._hangs(object_id):
                put_back.append(object_id)
                continue
            if lane.done:
                self._drop(lane)
                continue
            self._hand_over(lane, now)
        # A former call for the same object is still under way; its end looks again.
        self._ready.extend(put_back)
        self._metrics.set_breaker(self.name, _SHOWN[self.breaker.state])
        return self._next_turn(now)

    def _has_room(self) -> bool:
        return len(self._busy) < self.subscriber.workers and len(self._abandoned) < _MOST_ABANDONED

    def _hangs(self, object_id: int) -> bool:
        """Whether so many calls for an object have not come back that another would only be one more."""
        return list(self._abandoned.values()).count(object_id) >= _MOST_ABANDONED_OF_ONE

    def _next_turn(self, now: float) -> float:
        waits = [self._reads_in(now), self._next_health - now]
        if self._timed:
            waits.append(self._timed[0][0] - now)
        opens = self.breaker.opens_in()
        if opens is not None and self._ready and self._has_room():
            waits.append(opens)
        waits += [call.deadline - now for call in self._busy.values()]
        return max(0.0, min(waits))

    def _hand_over(self, lane: _Lane, now: float) -> None:
        probe = self.breaker.state is State.HALF_OPEN
        call = _Call(lane.object_id, probe=probe, asking=probe, lane=lane)
        most = 1 if lane.careful else BATCH
        if lane.refresh is not None:
            call.refresh, call.asked = lane.refresh, lane.asked
        elif lane.queue:
            call.events = [lane.queue[index] for index in range(min(most, len(lane.queue)))]
        else:
            call.fetch = (lane.next_sequence, lane.known, most)
        call.deadline = now + (HEALTH_SECONDS if call.probe else self.subscriber.timeout)
        self._busy[lane.object_id] = call
        self.breaker.began()
        self._calls.put(call)

    def _ask_for_health(self, now: float) -> None:
        """Ask an idle subscriber now and then whether it is well: it may recover, or fall ill, unasked."""
        if now < self._next_health:
            return
        self._next_health = now + _HEALTH_INTERVAL
        if self._busy or not self._has_room():
            return
        # Where there is something to hand over, a breaker that is not closed asks by itself, with its next call.
        if self.breaker.state is not State.CLOSED and (self._ready or not self.breaker.allows()):
            return
        call = _Call(_HEALTH, health=True, asking=True, deadline=now + HEALTH_SECONDS)
        self._busy[_HEALTH] = call
        self.breaker.began()
        self._calls.put(call)

    def _give_up_late(self, now: float) -> None:
        for call in list(self._busy.values()):
            if call.deadline <= now:
                self._give_up(call, now)

    def _give_up(self, call: _Call, now: float) -> None:
        """Leave a call alone: its thread cannot be ended. What it returns is not heard."""
        call.abandoned = True
        object_id = call.object_id
        asking = call.asking
        self._abandoned[id(call)] = _HEALTH if asking else object_id
        del self._busy[object_id]
        self._add_worker()
        LOG.warning("%s did not answer in time and is given up for object %d", self.name, object_id)
        if len(self._abandoned) >= _MOST_ABANDONED:
            LOG.error("%s is handed nothing more until one of %d calls returns", self.name, len(self._abandoned))
        if asking:
            self.breaker.trip(NOT_SAID)
        else:
            self._metrics.count_deliveries(self.name, "given_up", max(1, len(call.events)))
            self.breaker.failed(object_id, GIVEN_UP)
            # One object that hangs says nothing about the others. What the subscriber says of itself does.
            self._next_health = now
        lane = call.lane
        if lane is None or self._lanes.get(object_id) is not lane:
            return
        lane.error = NOT_SAID if asking else GIVEN_UP
        if asking:
            self._ready.append(object_id)  # It was not being told anything, so nothing is in doubt.
        else:
            self._refresh_lane(object_id, GIVEN_UP)

    def _refresh_lane(self, object_id: int, reason: str) -> None:
        lane = self._lanes.get(object_id)
        if lane is None:
            lane = _Lane(object_id, 1, 0, self._clock.now_ms())
            self._lanes[object_id] = lane
        lane.refresh = reason
        lane.asked += 1
        lane.due = 0.0
        lane.careful = 0
        lane.attempts = 0
        self._quiet_from = None
        self._ready.append(object_id)

    # --- outcomes --------------------------------------------------------------------

    def _settle(self, outcome: _Outcome) -> None:
        call = outcome.call
        if call.abandoned:
            self._abandoned.pop(id(call), None)
            return
        if self._busy.get(call.object_id) is call:
            del self._busy[call.object_id]
        if call.health:
            if outcome.unwell is not None:
                self.breaker.trip(outcome.unwell)
            elif self.breaker.state is State.HALF_OPEN:
                self.breaker.succeeded()
            return
        # Whatever became of its object meanwhile: a breaker that let one call through waits for its end.
        if outcome.error is None:
            self.breaker.succeeded()
        elif outcome.unwell is not None:
            self.breaker.trip(outcome.unwell)
        else:
            self.breaker.failed(call.object_id, described(outcome.error))
        lane = self._lanes.get(call.object_id)
        if lane is None or lane is not call.lane:
            # Everything is taken anew by now; a lane that waited for this call may go.
            if lane is not None:
                self._ready.append(lane.object_id)
            return
        if outcome.error is None:
            self._advance(lane, outcome)
        else:
            self._fail(lane, outcome)

    def _advance(self, lane: _Lane, outcome: _Outcome) -> None:
        now = self._clock.monotonic()
        if outcome.gone:
            self._metrics.count_refresh(self.name, "left_behind")
            self._refresh_lane(lane.object_id, LEFT_BEHIND)
            return
        if outcome.call.refresh is not None:
            self._metrics.count_refresh(self.name, "done")
            if lane.asked == outcome.call.asked:
                lane.refresh = None  # Else somebody has asked for one after it had read the state.
            # What the state covers need not be told again.
            self._skip_to(lane, max(lane.next_sequence, outcome.covered + 1))
            lane.known = max(lane.known, outcome.covered)
        elif outcome.events:
            last = outcome.events[-1]
            self.taken += len(outcome.events)
            self._metrics.count_deliveries(self.name, "taken", len(outcome.events))
            self._metrics.observe_delivery(self.name, (self._clock.now_ms() - to_ms(last.timestamp)) / 1000)
            self._skip_to(lane, last.sequence + 1)
            lane.careful = max(0, lane.careful - len(outcome.events))
        elif outcome.call.fetch is not None:
            # There is nothing for this subscriber between them.
            self._skip_to(lane, outcome.call.fetch[1] + 1)
        lane.attempts, lane.error = 0, None
        if lane.done:
            self._drop(lane)
            return
        lane.since = self._clock.now_ms()
        lingers = lane.refresh is None and not lane.careful and not lane.spilled
        lane.due = now + (self.subscriber.linger if lingers else 0.0)
        self._schedule(lane, now)

    def _skip_to(self, lane: _Lane, sequence: int) -> None:
        lane.next_sequence = max(lane.next_sequence, sequence)
        while lane.queue and lane.queue[0].sequence < lane.next_sequence:
            lane.queue.popleft()
            self._in_memory -= 1
        if lane.next_sequence > lane.known:
            lane.spilled = False

    def _drop(self, lane: _Lane) -> None:
        self._in_memory -= len(lane.queue)
        del self._lanes[lane.object_id]

    def _fail(self, lane: _Lane, outcome: _Outcome) -> None:
        error = outcome.error
        assert error is not None
        lane.error = described(error)
        if outcome.call.refresh is not None:
            self._metrics.count_refresh(self.name, "failed")
        else:
            self._metrics.count_deliveries(self.name, "failed", max(1, len(outcome.events)))
        now = self._clock.monotonic()
        if outcome.unwell is not None:
            # It does not count: it could not have taken anything.
            lane.due = now
            self._schedule(lane, now)
            return
        if outcome.call.refresh is None and len(outcome.events) > 1:
            # One of them is it: which, is found out one by one.
            lane.careful = len(outcome.events)
            lane.due = now
            self._schedule(lane, now)
            return
        lane.attempts += 1
        parked = lane.attempts >= self._settings.delivery_attempts and outcome.call.refresh is None
        if parked and outcome.events:
            self._park(lane, outcome.events[0])
            return
        pause = pause_after(lane.attempts, self._settings.delivery_pause)
        LOG.warning(
            "%s has failed %d times at object %d and is asked again in %.1f s (%s)",
            self.name,
            lane.attempts,
            lane.object_id,
            pause,
            lane.error,
        )
        lane.due = now + pause
        self._schedule(lane, now)

    def _park(self, lane: _Lane, event: Event[Any]) -> None:
        LOG.error("%s could not take %r in %d attempts; it is parked (%s)", self.name, event, lane.attempts, lane.error)
        self._metrics.count_deliveries(self.name, "parked", 1)
        self._letters.append(Letter(event, lane.attempts, lane.error or ""))
        self._skip_to(lane, event.sequence + 1)
        self._refresh_lane(lane.object_id, PARKED)

    # --- workers ---------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                self._calls.put(None)  # For the next one.
                return
            outcome = self._perform(call)
            abandoned = call.abandoned
            self._inbox.put(outcome)
            if abandoned:
                return  # Another thread has its place.

    def _perform(self, call: _Call) -> _Outcome:
        events: Sequence[Event[Any]] = call.events
        covered = 0
        try:
            if call.health or call.probe:
                unwell = self._unwell(call)
                if unwell is not None:
                    return _Outcome(call, events, error=SubscriberFailed(unwell, on=self.name), unwell=unwell)
                self._go_on(call, self.subscriber.timeout)
            if call.fetch is not None:
                found = self._fetched(call.object_id, *call.fetch)
                if found is None:
                    return _Outcome(call, gone=True)
                events = found
            if call.refresh is not None:
                covered = self._take_anew(call, call.refresh)
            elif events:
                self._tell(call, events)
        except _GivenUp:
            return _Outcome(call, events)
        except _REGISTRY_AWAY as error:
            return _Outcome(call, events, error=error, unwell=described(error))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it was not taken
            return _Outcome(call, events, error=error, unwell=self._unwell(call))
        failpoints.reach("delivery.taken")
        return _Outcome(call, events, covered)

    def _fetched(self, object_id: int, first: int, last: int, most: int) -> list[Event[Any]] | None:
        """Events of an object from the log; none if they are no longer kept."""
        tables = self.subscriber.subscribed_tables
        try:
            found = self._registry.read_with(
                lambda reader: deliveries.events_of_object(reader, object_id, first, last, tables, most)
            )
        except CursorExpired as error:
            LOG.warning("%s takes object %d anew: %s", self.name, object_id, error)
            return None
        return [Event(captured) for captured in found]

    def _tell(self, call: _Call, events: Sequence[Event[Any]]) -> None:
        self._go_on(call, self.subscriber.timeout)
        if len(events) == 1:
            _require_nothing(self.subscriber.on_event, events[0])
        else:
            _require_nothing(self.subscriber.on_events, events)

    def _take_anew(self, call: _Call, reason: str) -> int:
        """Have the subscriber take an object's state; the last event that the state covers."""
        object_id = call.object_id
        kind, last, table = self._registry.in_snapshot(lambda reader: deliveries.object_state(reader, object_id))
        self._go_on(call, self.subscriber.timeout)
        _require_nothing(self.subscriber.on_refresh, Refresh(object_id, kind, table, reason))
        return last

    def _go_on(self, call: _Call, seconds: float, *, asking: bool = False) -> None:
        """Give a call so much time from now on; refused if it was given up, since another has its turn by then.

        Under the lock, and right before the subscriber is called: whatever took so long, it is not told
        what others were told since.
        """
        with self._lock:
            if call.abandoned:
                raise _GivenUp
            deadline = self._clock.monotonic() + seconds
            is_sooner = deadline < call.deadline
            call.asking, call.deadline = asking, deadline
        if is_sooner:
            self._inbox.put(None)  # The thread waits for the former deadline.

    def _unwell(self, call: _Call) -> str | None:
        """Why the subscriber is not well; none if it is, and none of a call that was given up."""
        try:
            self._go_on(call, HEALTH_SECONDS, asking=True)
            _require_nothing(self.subscriber.on_health)
        except _GivenUp:
            return None
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is not well
            return f"it is not well ({described(error)})"
        return None


class _GivenUp(Exception):
    """The call was given up before the subscriber was told anything."""


# The object id of a question for health: no lake object has it.
_HEALTH = 0

_SHOWN = {State.CLOSED: 0.0, State.HALF_OPEN: 0.5, State.OPEN: 1.0}


def described(error: BaseException) -> str:
    """An error in words that every database can keep, whatever it says of itself."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - it has no words
        text = type(error).__name__
    text = text[:_LONGEST_ERROR].replace("\0", "\\0")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")[:_LONGEST_ERROR]


def _require_nothing(method: Callable[..., object], *given: object) -> None:
    """Call a subscriber. It returns nothing; whatever else it returns was not meant for this."""
    returned = method(*given)
    if returned is not None:
        raise SubscriberFailed(f"it returned {type(returned).__name__} instead of nothing", on="subscriber")


def _written(lane: _Lane, wall: int, wait: float) -> deliveries.Lane:
    return deliveries.Lane(
        lane.object_id,
        lane.next_sequence,
        lane.known,
        lane.refresh is not None,
        lane.attempts,
        lane.error,
        lane.since,
        wall + round(wait * 1000),
    )


def _same(saved: deliveries.Lane | None, lane: deliveries.Lane) -> bool:
    """Whether what is saved will do: the time of the next attempt alone is not worth a write."""
    if saved is None:
        return False
    return (
        saved.next_sequence == lane.next_sequence
        and saved.known_sequence == lane.known_sequence
        and saved.refresh == lane.refresh
        and saved.attempts == lane.attempts
        and saved.last_error == lane.last_error
    )
