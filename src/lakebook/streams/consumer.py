"""A consumer: the records of topics in order, for one reader or shared among the members of a group.

With a group, each partition has one reader at a time; positions are committed to the registry, and who takes
a partition over goes on from there. What follows from a change in the group is done by who polls.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from lakebook.errors import (
    Conflict,
    ConsumerClosed,
    GenerationFenced,
    GroupNotFound,
    InvalidInput,
    LakebookError,
    MemberRemoved,
    OffsetRegression,
)
from lakebook.lake.lake import Lake
from lakebook.names import check_name, shown
from lakebook.pages import every
from lakebook.registry.groups import OffsetCommit
from lakebook.registry.members import Membership
from lakebook.registry.offsets import check_offset
from lakebook.registry.partitions import Partition, check_partition_id, no_partition
from lakebook.registry.topics import not_found
from lakebook.registry.wakeups import Waiter
from lakebook.streams.membership import Member
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.positions import COMMITTED, NEW, RESETS, Skipped, Start, TopicPartition, check_start
from lakebook.streams.reader import Reader, Reading
from lakebook.streams.records import Record, records_of

LOG = logging.getLogger("lakebook.consumer")

#: What is called with the partitions that a consumer has got, or is about to give away.
OnChange: TypeAlias = Callable[[list[TopicPartition]], None]
_Taken: TypeAlias = list[tuple[Reading, pa.RecordBatch]]

# Seconds between two automatic commits, where none are given; and between two looks at an idle topic.
AUTO_COMMIT = 5.0
_PAUSE = 0.005
# A group may change while one follows it; hardly ever that often.
_TRIES = 10


@dataclass(frozen=True)
class ConsumerOptions:
    """How a consumer reads; see `Book.consumer`."""

    start: Start | None = None
    reset: str = "error"
    auto_commit: bool | float = True
    max_records: int = 1000
    read_ahead: int = 64 * 1024**2
    on_assigned: OnChange = lambda partitions: None
    on_revoked: OnChange = lambda partitions: None

    def check(self, group: str | None) -> None:
        """Refuse what cannot be."""
        if self.start is not None:
            check_start(self.start, "consumer", *(() if group is None else (COMMITTED,)))
        if self.reset not in RESETS:
            raise InvalidInput(
                f"{shown(self.reset)} is not a reset policy", on="consumer", remedy=f"Use {', '.join(RESETS)}"
            )
        for name, value in (("max_records", self.max_records), ("read_ahead", self.read_ahead)):
            if type(value) is not int or value < 1:
                raise InvalidInput(f"{shown(value)} cannot be {name}", on="consumer", remedy="Use at least 1")
        if not isinstance(self.auto_commit, (bool, int, float)) or not self.auto_commit >= 0:
            raise InvalidInput(
                f"{shown(self.auto_commit)} cannot be auto_commit", on="consumer", remedy="Use true, false or seconds"
            )

    @property
    def commit_seconds(self) -> float | None:
        """Seconds between two automatic commits; none: there are none."""
        if self.auto_commit is False:
            return None
        return AUTO_COMMIT if self.auto_commit is True else float(self.auto_commit)


class Consumer:
    """Reads topics. Close it, or use it in a `with` block.

    One thread polls; any other may commit, seek or close meanwhile.
    """

    def __init__(
        self,
        lake: Lake,
        metadata: MetadataStore,
        topics: str | Sequence[str],
        group: str | None = None,
        partitions: Iterable[int | TopicPartition] | None = None,
        options: ConsumerOptions | None = None,
        on_close: Callable[[Consumer], None] = lambda consumer: None,
    ) -> None:
        self.topics = _names(topics)
        self.group = None if group is None else check_name("group", group)
        self._options = options or ConsumerOptions()
        self._options.check(self.group)
        self._on_close = on_close
        self._lake, self._metadata, self._clock = lake, metadata, lake.clock
        chosen = self._chosen(partitions)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._closed = False
        # What the group has committed, as far as this consumer knows, and when it committed last.
        self._committed: dict[TopicPartition, int | None] = {}
        self._committed_at = self._clock.monotonic()
        #: What the application was told that it has got.
        self._told: set[TopicPartition] = set()
        self._waiter = Waiter(lake.registry.database)
        self._listening = False
        self._reader = Reader(
            lake,
            metadata,
            self._topic_ids,
            reset=self._options.reset,
            read_ahead=self._options.read_ahead,
            tell=self._waiter.wake,
        )
        self._follows_growth = group is None and partitions is None
        self._member: Member | None = None
        self._member_id = ""
        if self.group is not None and partitions is None:
            self._member = Member(lake, metadata, self.group, self.topics, self._waiter.wake)
        else:
            self._assign_at_once(chosen)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(finished=kind is None)

    def __repr__(self) -> str:
        group = "" if self.group is None else f", group={self.group!r}"
        return f"Consumer({', '.join(self.topics)}{group})"

    @property
    def skipped(self) -> list[Skipped]:
        """What was left out: offsets below a log start or above a watermark, and holes."""
        return self._reader.skipped

    # --- what it reads ---------------------------------------------------------------

    def _chosen(self, partitions: Iterable[int | TopicPartition] | None) -> list[TopicPartition]:
        """The partitions that were named, or all there are."""
        found = self._metadata.get_topics(self.topics)
        for name in self.topics:
            if name not in found:
                raise not_found(name)
        self._topic_ids = {name: topic.id for name, topic in found.items()}
        if partitions is None:
            return [(name, number) for name in self.topics for number in range(found[name].partition_count)]
        chosen: list[TopicPartition] = []
        for item in partitions:
            for name, number in [item] if isinstance(item, tuple) else [(name, item) for name in self.topics]:
                if name not in found:
                    raise InvalidInput(f"{shown(name)} is not one of its topics", on="consumer")
                if check_partition_id(name, number) >= found[name].partition_count:
                    raise no_partition(name, number)
                chosen.append((name, number))
        return list(dict.fromkeys(chosen))

    def _assign_at_once(self, places: list[TopicPartition]) -> None:
        try:
            self._reader.waiting = self._begin_at(places)
            self._reader.begin_waiting()
        except BaseException:
            self._close(finished=False)
            raise

    def _begin_at(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, Start]:
        """Where partitions begin: where the group has committed, or else where the consumer was told to."""
        if self.group is None:
            return dict.fromkeys(places, "earliest" if self._options.start is None else self._options.start)
        committed = self._metadata.get_committed_offsets(self.group, places)
        self._committed |= committed
        fresh = {topic for (topic, _), offset in committed.items() if offset is None}
        begun = {topic: self._has_begun(topic) for topic in fresh}
        return {
            place: offset if offset is not None else self._first_start(place, begun[place[0]])
            for place, offset in committed.items()
        }

    def _has_begun(self, topic: str) -> bool:
        """Whether the group has committed on a topic: then a partition without a commit was created later."""
        assert self.group is not None
        try:
            return any(item.committed_offset is not None for item in self._metadata.lag(self.group, topic))
        except GroupNotFound:
            return False

    def _first_start(self, place: TopicPartition, begun: bool) -> Start:
        start, reset = self._options.start, self._options.reset
        if begun:
            return NEW  # Whatever the policy is.
        if start == COMMITTED and reset == "error":
            raise InvalidInput(
                "the group has committed nothing",
                on=f"group {self.group} on {place[0]}/{place[1]}",
                remedy="Leave `start` out, or give a reset policy",
            )
        if start is None or start == COMMITTED:
            return "earliest" if reset == "error" else reset
        return start

    def _begin_waiting(self) -> None:
        """Begin to read what was assigned."""
        try:
            self._reader.begin_waiting()
        finally:
            fresh = [place for place in self._reader.readings if place not in self._told]
            if fresh and self._member is not None:
                self._record_starts(fresh)
                self._told.update(fresh)
                self._options.on_assigned(fresh)

    def _record_starts(self, places: Iterable[TopicPartition]) -> None:
        """Commit where a group begins, so that whoever comes later begins there too."""
        begun = {place: self._reader.readings[place].position for place in places}
        self._commit({place: offset for place, offset in begun.items() if self._committed.get(place) is None})

    def _forget(self, places: Iterable[TopicPartition]) -> None:
        gone = list(places)
        self._reader.forget(gone)
        self._told.difference_update(gone)
        for place in gone:
            self._committed.pop(place, None)

    # --- being a member --------------------------------------------------------------

    def _follow_group(self) -> None:
        member = self._member
        if member is None or not member.is_due:
            return
        try:
            state = member.follow()
            if state.member_id != self._member_id:
                # What it had as another member is not its own any more.
                self._lose_all()
                self._member_id = state.member_id
            self._adopt(member, state)
        except BaseException:
            # What was not done is to be done by the next poll.
            member.changed = True
            raise

    def _adopt(self, member: Member, state: Membership) -> None:
        """Give away what others shall read, and take what is new."""
        while state.releasing:
            self._give_away(state.releasing)
            state = member.sync(released=state.releasing)
        known = self._reader.places
        gone = [place for place in known if place not in state.partitions]
        if gone:
            self._give_away(gone, commit=False)
        gained = [place for place in state.partitions if place not in known]
        if gained:
            self._lake.metrics.count_rebalance()
            self._reader.waiting |= self._begin_at(gained)

    def _give_away(self, places: Sequence[TopicPartition], *, commit: bool = True) -> None:
        """Stop reading partitions, after what was read of them is committed."""
        held = [place for place in places if place in self._reader.readings]
        if held:
            if commit and self._options.commit_seconds is not None:
                self._commit_done(held)
            self._options.on_revoked(list(held))
        self._forget(places)

    def _lose_all(self) -> None:
        """Stop reading what others read by now; nothing of it can be committed."""
        held = list(self._reader.readings)
        self._forget(self._reader.places)
        if held:
            self._options.on_revoked(held)

    # --- reading ---------------------------------------------------------------------

    def poll(self, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record]:
        """The next records, at most so many; it waits up to `timeout` seconds (none: for ever) for the first."""
        most = self._options.max_records if max_records is None else _most(max_records)
        taken = self._taken(timeout, most)
        try:
            return [record for reading, batch in taken for record in records_of(reading.topic, batch)]
        except BaseException:
            # An interrupt, or too little memory. Whoever has not got them must not commit them.
            with self._lock:
                self._reader.take_back(taken)
            raise

    def poll_batches(
        self, timeout: float | None = 1.0, max_records: int | None = None
    ) -> list[tuple[str, pa.RecordBatch]]:
        """The next records as Arrow, each batch with its topic: all that have been read ahead, or at most so many."""
        most = sys.maxsize if max_records is None else _most(max_records)
        return [(reading.topic, batch) for reading, batch in self._taken(timeout, most)]

    def _taken(self, timeout: float | None, most: int) -> _Taken:
        self._check_open()
        found = self._wait_for(timeout, lambda: self._reader.take(most)) or []
        self._lake.metrics.count_consumed(sum(batch.num_rows for _, batch in found))
        return found

    def __iter__(self) -> Iterator[Record]:
        """All records one by one; it waits for more, until the consumer is closed."""
        self._check_open()
        return self._each(None)

    def until_end(self) -> Iterator[Record]:
        """The records up to the high watermarks as they are now; of what is assigned later, as they are then."""
        self._check_open()
        with self._lock:
            self._prepare()
            self._look()
            return self._each({place: reading.watermark for place, reading in self._reader.readings.items()})

    def _each(self, ends: dict[TopicPartition, int] | None) -> Iterator[Record]:
        def peek() -> _Taken | None:
            if ends is not None:
                readings = self._reader.readings
                ends.update({place: item.watermark for place, item in readings.items() if place not in ends})
                if all(item.paused or item.position >= ends[place] for place, item in readings.items()):
                    return None
            return self._reader.take(self._options.max_records, ends, moving=False)

        while not self._closing.is_set():
            found = self._wait_for(None, peek)
            if found is None:
                return
            for reading, batch in found:
                yield from self._each_of(reading, batch)

    def _each_of(self, reading: Reading, batch: pa.RecordBatch) -> Iterator[Record]:
        """The records of a batch, as long as its partition is read on from there."""
        begun = reading.position
        try:
            for record in records_of(reading.topic, batch):
                self._check_process()
                with self._lock:
                    if not self._is_next(reading, record.offset):
                        return
                    self._reader.move(reading, record.offset + 1)
                yield record
                reading.done = max(reading.done, record.offset + 1)
                if self.group is not None:
                    with self._lock, suppress(MemberRemoved):  # Then it joins anew before it reads on.
                        self._commit_in_time()
        finally:
            self._lake.metrics.count_consumed(max(0, reading.position - begun))

    def _is_next(self, reading: Reading, offset: int) -> bool:
        """Whether a record is to be handed out: no seek and no news of the group have come between."""
        if self._closed or reading.paused or reading.position != offset:
            return False
        if self._member is not None:
            if self._member.is_due:
                return False
            self._member.note_poll()
        return self._reader.readings.get(reading.place) is reading

    def _wait_for(self, timeout: float | None, take: Callable[[], _Taken | None]) -> _Taken | None:
        """Wait until there is something to take. None from `take`: that there will be nothing more."""
        self._check_process()
        left = float("inf") if timeout is None else float(timeout)
        deadline = self._clock.monotonic() + left
        with self._lock:
            for reading in self._reader.readings.values():
                reading.done = reading.position
        while True:
            with self._lock:
                if self._closing.is_set():
                    return []
                self._prepare()
                found = take()
                if found == [] and not self._reader.is_behind:
                    self._listen()
                try:
                    self._reader.read_ahead()
                except BaseException:
                    self._reader.take_back(found or [])
                    raise
                if found != [] or left <= 0:
                    return found
                is_idle = not self._reader.is_behind
            pause = min(left, self._lake.settings.event_poll)
            is_woken = self._waiter.wait(pause)
            left = min(deadline - self._clock.monotonic(), left if is_woken else left - pause)
            if is_woken and is_idle:
                # Others may commit a thousand times in a second, and not to these partitions.
                self._closing.wait(max(0.0, min(_PAUSE, left)))

    def _prepare(self) -> None:
        """Whatever comes before reading: the group, the lease, what was assigned, what is to be committed."""
        if self._member is not None:
            self._member.note_poll()
        for left in reversed(range(_TRIES)):
            try:
                self._follow_group()
                self._reader.hold()
                self._begin_waiting()
                self._commit_in_time()
                return
            except MemberRemoved as error:
                LOG.warning("%s: %s", self, error)
                self._lose_all()
                if not left:
                    raise

    def _listen(self) -> None:
        """Look for new records, and be woken by the next ones."""
        if not self._listening:
            self._waiter.start()
            self._listening = True
        self._look()

    def _look(self) -> None:
        """Learn of new records, and of new partitions where no group shares them out."""
        reader = self._reader
        if self._follows_growth:
            found = {(item.topic, item.partition_id): item for topic in self.topics for item in self._all_of(topic)}
            reader.waiting |= dict.fromkeys(found.keys() - set(reader.places), NEW)
            self._begin_waiting()
        else:
            found = self._metadata.get_partitions(reader.readings) if reader.readings else {}
            self._check_topics({topic for topic, _ in found})
        reader.look(found)

    def _all_of(self, topic: str) -> Iterator[Partition]:
        return every(lambda after: self._metadata.list_partitions(topic, after=after))

    def _check_topics(self, present: set[str]) -> None:
        """Say that a topic was deleted: its partitions are shared out no more, and nobody else would say so."""
        unread = set(self.topics) - present
        if unread:
            found = self._metadata.get_topics(unread)
            for topic in sorted(unread):
                # One of the same name is another topic, of which this member reads nothing.
                if topic not in found or found[topic].id != self._topic_ids[topic]:
                    raise not_found(topic)

    # --- positions -------------------------------------------------------------------

    def assignment(self) -> list[TopicPartition]:
        """The partitions that this consumer reads."""
        self._check_process()
        with self._lock:
            return self._reader.places

    def position(self) -> dict[TopicPartition, int]:
        """The next offset of each partition that will be handed out."""
        self._check_process()
        with self._lock:
            return {place: reading.position for place, reading in sorted(self._reader.readings.items())}

    def committed(self) -> dict[TopicPartition, int | None]:
        """The next offset of each partition that the group would read on from."""
        self._check_open()
        return self._metadata.get_committed_offsets(self._require_group(), self.assignment())

    def lag(self) -> dict[TopicPartition, int]:
        """How many records of each partition have not been handed out yet."""
        self._check_open()
        positions = self.position()
        found = self._reader.present(positions)
        return {place: max(0, found[place].high_watermark - offset) for place, offset in positions.items()}

    def seek(self, topic: str, partition: int, to: Start) -> None:
        """Go on reading at an offset, at the first record at or after a time, at 'beginning' or at 'end'."""
        self._check_open()
        where = check_start(to, f"{topic}/{partition}")
        with self._lock:
            self._check_assigned([(topic, partition)])
            self._reader.hold()
            self._reader.begin({(topic, partition): where})

    def pause(self, partitions: Iterable[TopicPartition] | None = None) -> None:
        """Hand out nothing of some partitions, or of all, until `resume`."""
        self._check_open()
        with self._lock:
            for reading in self._named(partitions):
                self._reader.pause(reading)

    def resume(self, partitions: Iterable[TopicPartition] | None = None) -> None:
        """Hand out records of some partitions again, or of all."""
        self._check_open()
        with self._lock:
            for reading in self._named(partitions):
                reading.paused = False
        self._waiter.wake()

    def _named(self, partitions: Iterable[TopicPartition] | None) -> list[Reading]:
        readings = self._reader.readings
        places = list(readings) if partitions is None else list(partitions)
        self._check_assigned(places)
        return [readings[place] for place in places if place in readings]

    def _check_assigned(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            if place not in self._reader.readings and place not in self._reader.waiting:
                raise InvalidInput(
                    f"{shown(place)} is not assigned to this consumer",
                    on=repr(self),
                    remedy="`assignment()` says what is; a member of a group gets its partitions when it polls",
                )

    # --- committing ------------------------------------------------------------------

    def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Commit the given offsets, or the positions of all partitions. They only move forward.

        `GenerationFenced`: another member reads some of them now; what is still this one's is committed.
        `MemberRemoved`: this consumer was silent for too long, and all its partitions are others'.
        """
        self._require_group()
        self._check_open()
        with self._lock:
            if offsets is None:
                now = {place: reading.position for place, reading in self._reader.readings.items()}
                self._commit({place: offset for place, offset in now.items() if offset != self._committed.get(place)})
                return
            self._check_assigned(offsets)
            for (topic, number), offset in offsets.items():
                check_offset(offset, f"group {self.group} on {topic}/{number}")
            self._commit(offsets)

    def _done(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """What an automatic commit takes: what the reader is done with. After a seek back that is nothing."""
        done = {place: self._reader.readings[place].done for place in places}
        known = {place: self._committed.get(place) for place in done}
        return {place: offset for place, offset in done.items() if (before := known[place]) is None or offset > before}

    def _commit_done(self, places: Iterable[TopicPartition]) -> None:
        """Commit what the reader is done with, but for partitions on which the group was moved ahead of it."""
        held, tries = list(places), _TRIES
        while True:
            try:
                self._commit(self._done(held))
                return
            except OffsetRegression as error:
                tries -= 1
                if not tries:
                    raise
                LOG.warning("%s: not everything is committed (%s)", self, error)
            self._committed |= self._metadata.get_committed_offsets(self._require_group(), held)

    def _commit(self, wanted: Mapping[TopicPartition, int]) -> None:
        """Commit, for the generation that the group is at; what is not this consumer's any more is raised."""
        left, tries = dict(wanted), _TRIES
        while left:
            try:
                self._commit_now(left)
                break
            except GenerationFenced:
                tries -= 1
                if self._member is None or not tries:
                    raise
            # Others have come or gone. What this one had is its own until it gives it away, or is removed.
            state = self._member.sync()
            left = {place: left[place] for place in (*state.partitions, *state.releasing) if place in left}
        lost = sorted(wanted.keys() - left.keys())
        if lost:
            raise GenerationFenced(
                f"another member reads {', '.join(f'{topic}/{number}' for topic, number in lost)} now",
                on=f"group {self.group}",
                remedy="Poll again; what is still this consumer's is committed",
            )

    def _commit_now(self, wanted: Mapping[TopicPartition, int]) -> None:
        commits = [OffsetCommit(topic, number, offset) for (topic, number), offset in wanted.items()]
        named: dict[str, Any] = {}
        if self._member is not None:
            named = {"generation": self._member.generation, "member": self._member.id}
        self._metadata.commit_offsets(self._require_group(), commits, **named)
        self._committed |= wanted

    def _commit_in_time(self) -> None:
        seconds = self._options.commit_seconds
        if self.group is None or seconds is None or self._closed:
            return
        if self._clock.monotonic() - self._committed_at < seconds:
            return
        try:
            self._commit_done(self._reader.readings)
        except GenerationFenced as error:
            LOG.warning("%s: not everything is committed (%s)", self, error)
        self._committed_at = self._clock.monotonic()

    def _require_group(self) -> str:
        if self.group is None:
            raise InvalidInput("it has no group to commit for", on=repr(self), remedy="Give it a group")
        return self.group

    # --- the end ---------------------------------------------------------------------

    def close(self) -> None:
        """Commit what was handed out, if that is done automatically; leave the group, and let go of the lease."""
        self._close(finished=True)

    def _close(self, *, finished: bool) -> None:
        if os.getpid() != self._pid:
            return  # All it has is the parent's.
        self._closing.set()
        self._waiter.wake()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._commit_last(finished)
                if self._member is not None and self._reader.readings:
                    self._options.on_revoked(sorted(self._reader.readings))
            finally:
                # One after the other, also if somebody is tired of waiting for one of them.
                with ExitStack() as closing:
                    closing.callback(self._on_close, self)
                    closing.callback(self._waiter.close)
                    closing.callback(self._reader.close)
                    if self._member is not None:
                        self._member.leave()

    def _commit_last(self, finished: bool) -> None:
        if self.group is None or self._options.commit_seconds is None:
            return
        for reading in self._reader.readings.values():
            # Who was interrupted may not be done with the last ones: they are read again.
            reading.done = reading.position if finished else reading.done
        try:
            self._commit_done(self._reader.readings)
        except LakebookError as error:
            if finished and not isinstance(error, Conflict):
                raise
            # Where others read them by now, they go on from where this consumer committed last.
            LOG.warning("%s: the last positions are not committed (%s)", self, error)

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ConsumerClosed("the consumer is closed", on=repr(self), remedy="Make another one")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConsumerClosed(
                "it belongs to the process that forked this one", on=repr(self), remedy="Make one here"
            )


def _names(topics: str | Sequence[str]) -> list[str]:
    named = [topics] if isinstance(topics, str) else list(topics)
    if not named:
        raise InvalidInput("it reads no topic", on="consumer", remedy="Name at least one")
    return [check_name("topic", name) for name in dict.fromkeys(named)]


def _most(number: int) -> int:
    if type(number) is not int or number < 1:
        raise InvalidInput(f"{shown(number)} is not a number of records", on="poll", remedy="Use at least 1")
    return number
