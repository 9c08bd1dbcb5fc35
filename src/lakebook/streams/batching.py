"""Records on their way: checked, gathered in batches, and acknowledged when their batch has landed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

import pyarrow as pa

from lakebook.clock import to_datetime, to_ms
from lakebook.errors import InvalidRecord
from lakebook.names import is_moment, shown
from lakebook.registry.appends import AppendTurn
from lakebook.registry.segments import SegmentInfo
from lakebook.streams.records import Headers, size_of
from lakebook.streams.segment_files import CONTENT_SCHEMA, HEADERS, TIMESTAMP

LOG = logging.getLogger("lakebook.producing")

#: What a key, a value or the value of a header may be. Texts are stored as UTF-8.
Content: TypeAlias = bytes | bytearray | memoryview | str | None
#: Headers as they are given: pairs, or a mapping.
GivenHeaders: TypeAlias = Mapping[str, Content] | Iterable[tuple[str, Content]]
#: What a record costs in memory beside its bytes, roughly: it counts, so that empty records fill a buffer too.
OVERHEAD = 100


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Where a record is. It is durable: stored, and in the registry."""

    topic: str
    partition: int
    offset: int
    timestamp: datetime


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Where consecutive rows of a table are: at the offsets `base_offset` to `end_offset` of a partition."""

    topic: str
    partition: int
    base_offset: int
    end_offset: int

    @property
    def record_count(self) -> int:
        """How many records that are."""
        return self.end_offset - self.base_offset + 1


#: A record that can be sent: its time in milliseconds, key, value, headers, and what it weighs.
Checked: TypeAlias = tuple[int, bytes | None, bytes | None, Headers, int]


def check_record(topic: str, value: object, key: object, headers: object, timestamp: object, now_ms: int) -> Checked:
    """A record in the form in which it is stored; refuse what cannot be one."""
    if value is not None and type(value) is not bytes:
        value = _content(topic, "value", value)
    if key is not None and type(key) is not bytes:
        key = _content(topic, "key", key)
    pairs = _headers(topic, headers) if headers else ()
    if timestamp is not None:
        if not isinstance(timestamp, datetime) or not is_moment(timestamp):
            raise _refused(topic, "timestamp", timestamp, "a datetime with a time zone, or nothing for now")
        now_ms = to_ms(timestamp)
    return now_ms, key, value, pairs, size_of(key, value, pairs) + OVERHEAD


def _content(topic: str, name: str, value: object) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise _refused(topic, name, value, "a text without lone surrogates") from None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise _refused(topic, name, value, "bytes, a text (stored as UTF-8) or none")


def _headers(topic: str, headers: object) -> Headers:
    wanted = "pairs of a text and bytes, a text or none"
    if isinstance(headers, str | bytes):
        raise _refused(topic, "headers", headers, wanted)
    pairs = []
    try:
        for name, content in headers.items() if isinstance(headers, Mapping) else headers:  # type: ignore[attr-defined]
            if not isinstance(name, str):
                raise TypeError
            _content(topic, "header's name", name)
            pairs.append((name, None if content is None else _content(topic, "header", content)))
    except (TypeError, ValueError):
        raise _refused(topic, "headers", headers, wanted) from None
    return tuple(pairs)


def _refused(topic: str, name: str, value: object, wanted: str) -> InvalidRecord:
    return InvalidRecord(f"its {name} cannot be {shown(value)}", on=f"record for {topic}", remedy=f"Give {wanted}")


class Singles:
    """Records that were sent one by one, in order, and what became of them."""

    def __init__(self) -> None:
        self._times: list[int] = []
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        #: Of those that have some, by their places.
        self._headers: dict[int, Headers] = {}
        self._outcome = Outcome()

    def add(self, record: Checked) -> Sent:
        """Take one more."""
        place = len(self._times)
        time_ms, key, value, headers, _ = record
        self._times.append(time_ms)
        self._keys.append(key)
        self._values.append(value)
        if headers:
            self._headers[place] = headers
        return Sent(self._outcome, place)

    def content(self) -> pa.Table:
        """The records as Arrow."""
        times = pa.array([time * 1000 for time in self._times], pa.int64()).cast(TIMESTAMP)
        headers = pa.nulls(len(self._times), HEADERS)
        if self._headers:
            given = (self._headers.get(place) for place in range(len(self._times)))
            named = [pairs and [{"key": name, "value": value} for name, value in pairs] for pairs in given]
            headers = pa.array(named, HEADERS)
        columns = [times, pa.array(self._keys, pa.binary()), pa.array(self._values, pa.binary()), headers]
        return pa.Table.from_arrays(columns, schema=CONTENT_SCHEMA)

    def forget_content(self) -> None:
        """Keep only what the acknowledgements need."""
        self._keys, self._values, self._headers = [], [], {}

    def landed(self, topic: str, partition: int, base: int, time_ms: int | None) -> int:
        """Acknowledge the records; how many they are."""
        self._outcome.landed(topic, partition, base, self._times if time_ms is None else [time_ms] * len(self._times))
        return len(self._times)

    def failed(self, error: BaseException) -> None:
        """Say that the records were not stored."""
        self._outcome.failed(error)


class Outcome:
    """What became of records that were sent one by one: one for all of them, for they land or fail together."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.done = False
        self.error: BaseException | None = None
        #: Who waits for single records, by their places.
        self.waiters: dict[int, list[Any]] = {}
        self.callbacks: dict[int, list[Callable[[], None]]] = {}
        self._topic, self._partition, self._base = "", 0, 0
        self._times: list[int] = []

    def landed(self, topic: str, partition: int, base: int, times: list[int]) -> None:
        """All records are there, from an offset on."""
        self._topic, self._partition, self._base, self._times = topic, partition, base, times
        self._end()

    def failed(self, error: BaseException) -> None:
        """No record is there, as far as is known."""
        self.error = error
        self._end()

    def _end(self) -> None:
        with self.condition:
            self.done = True
            for place, waiters in self.waiters.items():
                for waiter in waiters:
                    sent = Sent(self, place)
                    waiter.add_result(sent) if self.error is None else waiter.add_exception(sent)
            callbacks = [self.callbacks[place] for place in sorted(self.callbacks)]
            self.condition.notify_all()
        for call in (call for calls in callbacks for call in calls):
            call()

    def acknowledgement(self, place: int) -> Acknowledgement:
        """That of one of the records; all are there."""
        moment = to_datetime(self._times[place])
        return Acknowledgement(self._topic, self._partition, self._base + place, moment)


class Sent(Future[Acknowledgement]):
    """A record that was sent: a future that becomes its acknowledgement. It cannot be called back.

    All that a future of its own would hold is shared with the records beside it: a producer has many of them.
    """

    __slots__ = ("_outcome", "_place")

    def __init__(self, outcome: Outcome, place: int) -> None:
        # The state of a future is not set up on purpose: see the properties below.
        self._outcome = outcome
        self._place = place

    def __repr__(self) -> str:
        return f"<Sent {self._state.lower()}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sent) and (self._outcome, self._place) == (other._outcome, other._place)

    def __hash__(self) -> int:
        return hash((id(self._outcome), self._place))

    def cancel(self) -> bool:
        """False: it is sent."""
        return False

    def cancelled(self) -> bool:
        """False: it is sent."""
        return False

    def running(self) -> bool:
        """Whether it is neither acknowledged nor has failed."""
        return not self._outcome.done

    def done(self) -> bool:
        """Whether it is acknowledged or has failed."""
        return self._outcome.done

    def result(self, timeout: float | None = None) -> Acknowledgement:
        """Wait for the acknowledgement; raise the reason if there will be none."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._outcome.acknowledgement(self._place)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for how it ends; the reason why it failed, if it did."""
        outcome = self._outcome
        if not outcome.done:
            with outcome.condition:
                if not outcome.condition.wait_for(lambda: outcome.done, timeout):
                    raise TimeoutError
        return outcome.error

    def add_done_callback(self, fn: Callable[[Future[Acknowledgement]], object]) -> None:
        """Have `fn` called with this when it is acknowledged or has failed, or at once if it is."""

        def call() -> None:
            try:
                fn(self)
            except BaseException:
                # Also one that wants to end its thread, which is not its own: others wait for what comes after.
                LOG.exception("a callback of a record failed")

        with self._outcome.condition:
            if not self._outcome.done:
                self._outcome.callbacks.setdefault(self._place, []).append(call)
                return
        call()

    # --- what `concurrent.futures.wait` and `as_completed` look at ---------------------

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        return self._outcome.condition

    @property
    def _state(self) -> str:  # type: ignore[override]
        return "FINISHED" if self._outcome.done else "RUNNING"

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        return self._outcome.waiters.setdefault(self._place, [])


def failed(error: BaseException) -> Sent:
    """A record that was not even taken."""
    outcome = Outcome()
    outcome.failed(error)
    return Sent(outcome, 0)


class Receipt:
    """What becomes of the rows of one table, which may go several ways."""

    def __init__(self, topic: str, rows: int) -> None:
        self.pending: Future[tuple[OffsetRange, ...]] = Future()
        # It cannot be called back.
        self.pending.set_running_or_notify_cancel()
        self._topic = topic
        self._left = rows
        self._ranges: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def landed(self, partition: int, base: int, rows: int) -> None:
        """Some rows have landed; with the last of them the table has."""
        with self._lock:
            self._ranges.append((partition, base, rows))
            self._left -= rows
            complete = self._left == 0 and not self.pending.done()
        if complete:
            self.pending.set_result(self._merged())

    def failed(self, error: BaseException) -> None:
        """Some rows have not landed. The others may have."""
        with self._lock:
            if self.pending.done():
                return
            self._left = -1
        self.pending.set_exception(error)

    def _merged(self) -> tuple[OffsetRange, ...]:
        found: list[OffsetRange] = []
        for partition, base, rows in sorted(self._ranges):
            last = found[-1] if found else None
            if last is not None and (last.partition, last.end_offset + 1) == (partition, base):
                found[-1] = OffsetRange(self._topic, partition, last.base_offset, base + rows - 1)
            else:
                found.append(OffsetRange(self._topic, partition, base, base + rows - 1))
        return tuple(found)


class Piece:
    """Rows of a table that go to one partition."""

    def __init__(self, rows: pa.Table, receipt: Receipt) -> None:
        self._rows: pa.Table | None = rows
        self._count = int(rows.num_rows)
        self._receipt = receipt

    def content(self) -> pa.Table:
        """The rows."""
        return self._rows

    def forget_content(self) -> None:
        """Keep only what the receipt needs."""
        self._rows = None

    def landed(self, _topic: str, partition: int, base: int, _time_ms: int | None) -> int:
        """Acknowledge the rows; how many they are."""
        self._receipt.landed(partition, base, self._count)
        return self._count

    def failed(self, error: BaseException) -> None:
        """Say that the rows were not stored."""
        self._receipt.failed(error)


@dataclass(frozen=True)
class Attempt:
    """A segment that is stored, and the turn under which it is to be recorded."""

    turn: AppendTurn
    segment: SegmentInfo
    footer: bytes


class Batch:
    """Records of one partition that become one segment. Once it was tried it stays as it is."""

    def __init__(self, serial: int, born: float) -> None:
        self.serial = serial
        #: When its first record came.
        self.born = born
        #: When it is given up.
        self.deadline = born
        self.count = 0
        self.size = 0
        #: The one time of all its records, where the topic wants that.
        self.time_ms: int | None = None
        #: Set while it is stored, and nobody knows yet whether it is recorded.
        self.attempt: Attempt | None = None
        self._parts: list[Singles | Piece] = []
        #: The last part, if records go on to be added to it.
        self._singles: Singles | None = None
        self._content: pa.Table | None = None

    def add(self, record: Checked) -> Sent:
        """Take a record."""
        singles = self._singles
        if singles is None:
            singles = self._singles = Singles()
            self._parts.append(singles)
        self.count += 1
        self.size += record[-1]
        return singles.add(record)

    def add_rows(self, rows: pa.Table, size: int, receipt: Receipt) -> None:
        """Take rows of `CONTENT_SCHEMA`."""
        self._parts.append(Piece(rows, receipt))
        self._singles = None
        self.count += rows.num_rows
        self.size += size

    def content(self, time_ms: int | None) -> pa.Table:
        """Its records as Arrow, the same at every call; with `time_ms` all of them have the time of the first call."""
        if self._content is None:
            content = pa.concat_tables([part.content() for part in self._parts])
            if time_ms is not None:
                times = pa.repeat(pa.scalar(time_ms * 1000, pa.int64()).cast(TIMESTAMP), content.num_rows)
                content = content.set_column(0, CONTENT_SCHEMA.field(0), times)
            self._content, self.time_ms = content, time_ms
            for part in self._parts:
                part.forget_content()
        return self._content

    def landed(self, topic: str, partition: int, base: int) -> None:
        """Acknowledge every record."""
        self._content = None
        for part in self._parts:
            base += part.landed(topic, partition, base, self.time_ms)

    def failed(self, error: BaseException) -> None:
        """Tell every sender that its record was not stored."""
        self._content = None
        for part in self._parts:
            part.failed(error)
