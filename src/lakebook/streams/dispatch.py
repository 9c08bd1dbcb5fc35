"""Batches of all partitions of a producer, and the threads that send them.

Each partition has a lane: batches in order, of which the first is sent until it has landed or is given up.
A thread takes a lane that is due, tries once, and leaves it again; so no lane that waits keeps a thread.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lakebook.clock import Clock
from lakebook.errors import (
    AppendTurnHeld,
    AppendTurnLost,
    BookClosed,
    BufferFull,
    CommitOutcomeUnknown,
    EpochChanged,
    FlushTimeout,
    InvalidInput,
    LakebookError,
    ObjectExists,
    ProduceFailed,
    ProducerFenced,
    RegistryNotWritable,
    SegmentGap,
    SegmentOverlap,
    SequenceConflict,
    StorageRefused,
    TopicNotFound,
    TransientError,
)
from lakebook.metrics import Metrics
from lakebook.streams.batching import OVERHEAD, Batch
from lakebook.streams.sending import YIELD, PartitionSender

LOG = logging.getLogger("lakebook.producing")

#: Threads of one producer at most: so many partitions are stored at the same time.
MOST_THREADS = 8
#: Seconds for which threads are waited for that are in the middle of something when all is over.
_PARTING = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
# Who waits for a turn asks often: the holder leaves it for a moment only.
_LONGEST_WAIT_FOR_TURN = YIELD

#: After these the producer can send nothing more.
_FINAL = (TopicNotFound, ProducerFenced, SequenceConflict, BookClosed, EpochChanged)
#: After these the same batch is sent again: the cause may pass, or is mended by a new turn or a new path.
_PASSING = (
    TransientError,
    AppendTurnLost,
    SegmentOverlap,
    SegmentGap,
    StorageRefused,
    ObjectExists,
    RegistryNotWritable,
    CommitOutcomeUnknown,
    MemoryError,
)


@dataclass(frozen=True)
class Limits:
    """When a batch is complete: by its bytes, its records or its age; and when it is given up."""

    batch_bytes: int
    batch_records: int
    linger: float
    seconds: float


class Lane:
    """The batches of one partition."""

    def __init__(self, number: int, sender: PartitionSender) -> None:
        self.number = number
        self.sender = sender
        #: The batch that still takes records, and those before it that take no more.
        self.open: Batch | None = None
        self.closed: deque[Batch] = deque()
        #: Whether a thread works on it, and the batch that it sends, until that has landed or is given up.
        self.busy = False
        self.sent: Batch | None = None
        self.not_before = 0.0
        self.failures = 0
        self.last_error: Exception | None = None

    def due(self, linger: float) -> float | None:
        """When something is to be done here."""
        if self.busy:
            return None
        if self.closed:
            return min(self.not_before, self.closed[0].deadline)
        if self.open is not None:
            return min(max(self.open.born + linger, self.not_before), self.open.deadline)
        return self.sender.idle_until

    def close_batch(self) -> None:
        """Let the open batch take no more records."""
        if self.open is not None:
            self.closed.append(self.open)
            self.open = None


class Dispatcher:
    """Gathers batches within a bound, and sends them by threads of its own."""

    def __init__(
        self,
        topic: str,
        clock: Clock,
        metrics: Metrics,
        most_bytes: int,
        send: Callable[[Lane, Batch], int],
    ) -> None:
        self._topic, self._clock, self._metrics = topic, clock, metrics
        self._most_bytes = most_bytes
        self._send = send
        self.lanes: dict[int, Lane] = {}
        self.limits = Limits(1, 1, 0.0, 0.0)
        self._serial = 0
        self._bytes = 0
        #: By their numbers, in order: what was taken and is neither acknowledged nor given up.
        self._unfinished: dict[int, Batch] = {}
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        #: For when the thread waits that watches the time.
        self._watched: float | None = None
        #: Why nothing more is taken.
        self._refusal: LakebookError | None = None
        self._ended = False
        #: The first failure that no `flush` has told of yet.
        self._failure: BaseException | None = None
        self.make_locks()

    def make_locks(self) -> None:
        """New locks, also for the child of a fork: a thread of the parent may have held them."""
        self.lock = threading.Lock()
        self._work = threading.Condition(self.lock)
        self._room = threading.Condition(self.lock)
        self._done = threading.Condition(self.lock)

    # --- taking ----------------------------------------------------------------------

    def refuse(self, error: LakebookError) -> None:
        """Take nothing more from now on; what was taken is sent."""
        with self.lock:
            self._refusal = self._refusal or error
            self._room.notify_all()

    def make_room(self, size: int) -> None:
        """Wait until there is room for so many bytes. The lock is held, and given back while waiting."""
        if self._refusal is not None:
            raise self._refusal
        if self._bytes + size <= self._most_bytes or not self._bytes:
            return
        if threading.current_thread() in self._threads:
            return  # A callback of an acknowledgement: there is nobody else to make room.
        until = self._clock.monotonic() + self.limits.seconds
        while self._bytes and self._bytes + size > self._most_bytes:
            self._close_all()
            left = until - self._clock.monotonic()
            if left <= 0:
                raise BufferFull(
                    f"for {self.limits.seconds:.1f} s there was no room for {size} bytes in a buffer of"
                    f" {self._most_bytes}",
                    on=f"producer of {self._topic}",
                    remedy="Send it again later; it was not taken. Is the warehouse or the registry away?",
                )
            self._room.wait(left)
            if self._refusal is not None:
                raise self._refusal

    def batch_for(self, lane: Lane, size: int) -> Batch:
        """The batch that takes a record of this size. The lock is held, and there is room."""
        batch = lane.open
        if batch is not None and batch.size + size > self.limits.batch_bytes:
            self._close(lane)
            batch = None
        if batch is None:
            self._serial += 1
            batch = lane.open = Batch(self._serial, self._clock.monotonic())
            batch.deadline = batch.born + self.limits.linger + self.limits.seconds
            self._unfinished[batch.serial] = batch
            self._rouse(lane)
        return batch

    def added(self, lane: Lane, batch: Batch, size: int) -> None:
        """Say that a batch has taken so many bytes. The lock is held."""
        self._bytes += size
        if batch.size >= self.limits.batch_bytes or batch.count >= self.limits.batch_records:
            self._close(lane)

    def _close(self, lane: Lane) -> None:
        lane.close_batch()
        self._rouse(lane)

    def _close_all(self) -> None:
        for lane in self.lanes.values():
            if lane.open is not None:
                self._close(lane)

    # --- waiting ---------------------------------------------------------------------

    def flush(self, timeout: float | None) -> None:
        """Wait until all that was taken is acknowledged or given up; raise the first failure."""
        until = None if timeout is None else self._clock.monotonic() + timeout
        with self.lock:
            if threading.current_thread() in self._threads:
                raise InvalidInput("a callback cannot wait for others", on=f"producer of {self._topic}")
            self._close_all()
            last = self._serial
            while self._unfinished and next(iter(self._unfinished)) <= last:
                left = None if until is None else until - self._clock.monotonic()
                if left is not None and left <= 0:
                    raise FlushTimeout(
                        f"after {timeout} s {sum(batch.count for batch in self._unfinished.values())} records are not"
                        " stored yet",
                        on=f"producer of {self._topic}",
                        remedy="They are kept and sent on; flush again",
                    )
                self._done.wait(left)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def end(self, error: LakebookError) -> None:
        """Send nothing more: what is left fails with this, but for what is being sent at this moment."""
        self.refuse(error)
        with self.lock:
            self._ended = True
            left = self._take_waiting()
            threads = list(self._threads)
            self._work.notify_all()
        for lane, batch in left:
            self._finish(batch, self._doubt(lane, batch) or error)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_PARTING)
        for lane in self.lanes.values():
            if not lane.busy and not lane.sender.release():
                break  # The registry does not answer: it would be waited for once per partition.

    def _take_waiting(self) -> list[tuple[Lane, Batch]]:
        """All batches on which no thread works, in order; the lock is held."""
        left: list[tuple[Lane, Batch]] = []
        for lane in self.lanes.values():
            lane.close_batch()
            while lane.closed and lane.closed[-1] is not lane.sent:
                left.append((lane, lane.closed.pop()))
        return sorted(left, key=lambda found: found[1].serial)

    # --- threads ---------------------------------------------------------------------

    def _rouse(self, lane: Lane) -> None:
        """Have somebody look at a lane, now or when it is due; the lock is held."""
        if lane.busy or self._ended:
            return
        if self._idle:
            # All of them: who watches the time has to learn that something is due earlier.
            self._work.notify_all()
        elif len(self._threads) < MOST_THREADS:
            thread = threading.Thread(target=self._run, name=f"lakebook-producer-{self._topic}", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _run(self) -> None:
        try:
            while (lane := self._next()) is not None:
                try:
                    self._work_on(lane)
                except BaseException:
                    # A callback may want to end its thread, which is not its own.
                    LOG.exception("%s/%s: a thread was disturbed", self._topic, lane.number)
                self._leave(lane)
        finally:
            with self.lock:
                self._threads.discard(threading.current_thread())

    def _leave(self, lane: Lane) -> None:
        """Let others work on a lane. If all is over meanwhile, nobody else will."""
        with self.lock:
            lane.busy, lane.sent = False, None
            left = self._take_waiting() if self._ended else []
        for one, batch in left:
            self._finish(batch, self._doubt(one, batch) or self._refusal)

    def _next(self) -> Lane | None:
        """Wait for a lane that is due; none at the end. One idle thread watches the time, the others sleep."""
        with self.lock:
            while not self._ended:
                lane, when = self._first_due()
                left = None if when is None else when - self._clock.monotonic()
                if lane is not None and left is not None and left <= 0:
                    lane.busy = True
                    if lane.open is not None and not lane.closed:
                        lane.close_batch()
                    self._hand_over()
                    return lane
                self._sleep(when, left)
        return None

    def _sleep(self, when: float | None, left: float | None) -> None:
        """Wait until somebody calls, or until something is due, unless another thread waits for that already."""
        watching = when is not None and (self._watched is None or when < self._watched)
        if watching:
            self._watched = when
        self._idle += 1
        try:
            self._work.wait(left if watching else None)
        finally:
            self._idle -= 1
            if watching and self._watched == when:
                self._watched = None

    def _first_due(self) -> tuple[Lane | None, float | None]:
        found: Lane | None = None
        first: float | None = None
        for lane in self.lanes.values():
            when = lane.due(self.limits.linger)
            if when is not None and (first is None or when < first):
                found, first = lane, when
        return found, first

    def _hand_over(self) -> None:
        """Somebody else watches the time while this thread works, if there is something to watch."""
        lane, _ = self._first_due()
        if lane is not None:
            self._rouse(lane)

    # --- one try ---------------------------------------------------------------------

    def _work_on(self, lane: Lane) -> None:
        with self.lock:
            batch = lane.sent = lane.closed[0] if lane.closed and not self._ended else None
        if batch is None:
            lane.sender.release()
            return
        try:
            if self._clock.monotonic() >= batch.deadline:
                self._give_up(lane, batch, self._too_late(lane, batch))
                return
            base = self._send(lane, batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, its senders are told
            lane.last_error = error
            self._after_failure(lane, batch, error)
            return
        self._metrics.count_produced(batch.count, batch.size - OVERHEAD * batch.count)
        lane.failures, lane.last_error = 0, None
        with self.lock:
            self._pop(lane)
            more = bool(lane.closed or lane.open)
        self._finish(batch, None, lambda: batch.landed(self._topic, lane.number, base))
        if lane.sender.rest() and more:
            lane.not_before = self._clock.monotonic() + YIELD

    def _after_failure(self, lane: Lane, batch: Batch, error: Exception) -> None:
        if isinstance(error, _FINAL):
            self._fail_all(lane, batch, error)
            return
        now = self._clock.monotonic()
        if not isinstance(error, _PASSING):
            self._give_up(lane, batch, error)
        elif now >= batch.deadline or self._ended:
            self._give_up(lane, batch, self._too_late(lane, batch))
        else:
            self._metrics.count_produce_retry(_reason(error))
            lane.not_before = now + self._pause(lane, error)

    def _give_up(self, lane: Lane, batch: Batch, error: Exception) -> None:
        LOG.warning("%s/%s: %s records were given up (%s)", self._topic, lane.number, batch.count, error)
        lane.sender.give_up(batch)
        lane.failures, lane.not_before, lane.last_error = 0, 0.0, None
        with self.lock:
            self._pop(lane)
        self._finish(batch, error)

    def _pop(self, lane: Lane) -> None:
        """Take the batch that was sent from its lane; the lock is held."""
        lane.closed.popleft()
        lane.sent = None

    def _pause(self, lane: Lane, error: Exception) -> float:
        if isinstance(error, AppendTurnLost | SegmentOverlap):
            return 0.0
        lane.failures += 1
        longest = _LONGEST_WAIT_FOR_TURN if isinstance(error, AppendTurnHeld) else _LONGEST_PAUSE
        # The exponent is bounded too: a turn may be waited for for long.
        pause = min(longest, _FIRST_PAUSE * 2.0 ** min(lane.failures - 1, 30))
        return pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, no secret

    def _too_late(self, lane: Lane, batch: Batch) -> LakebookError:
        """What the senders of a batch are told that was not stored in time."""
        doubt = self._doubt(lane, batch)
        if doubt is not None:
            return doubt
        if self._ended and self._refusal is not None:
            return self._refusal
        told = ProduceFailed(
            f"{batch.count} records could not be stored in time, and are not in the topic{_because(lane)}",
            on=f"{self._topic}/{lane.number}",
            remedy="Send them again when the cause is mended",
        )
        told.__cause__ = lane.last_error
        return told

    def _doubt(self, lane: Lane, batch: Batch) -> LakebookError | None:
        """What the senders of a batch are told that was tried, if nobody knows whether it has landed."""
        if not lane.sender.is_doubtful(batch):
            return None
        told = CommitOutcomeUnknown(
            f"it is not known whether {batch.count} records were stored{_because(lane)}",
            on=f"{self._topic}/{lane.number}",
            remedy="Look whether they are there before you send them again",
        )
        told.__cause__ = lane.last_error
        return told

    def _fail_all(self, lane: Lane, batch: Batch, error: LakebookError) -> None:
        """The producer can send nothing more."""
        self.refuse(error)
        with self.lock:
            self._ended = True
            self._pop(lane)
            left = self._take_waiting()
            self._work.notify_all()
        self._finish(batch, error)
        for other, one in left:
            self._finish(one, self._doubt(other, one) or error)

    def _finish(self, batch: Batch, error: BaseException | None, tell: Callable[[], None] | None = None) -> None:
        """Tell the senders of a batch what became of it, and make room."""
        try:
            if error is not None:
                batch.failed(error)
            elif tell is not None:
                tell()
        finally:
            with self.lock:
                self._bytes -= batch.size
                self._failure = self._failure or error
                del self._unfinished[batch.serial]
                self._room.notify_all()
                self._done.notify_all()


def _because(lane: Lane) -> str:
    error = lane.last_error
    return "" if error is None else f" ({type(error).__name__}: {error})"


def _reason(error: Exception) -> str:
    return error.code if isinstance(error, LakebookError) else "no_memory"
