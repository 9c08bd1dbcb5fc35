"""One partition's way into the topic: take the turn, stamp, store, record.

A producer keeps the turn while it has something to send. Since nobody can see who waits for it, it
gives the turn back now and then, and sooner where it has found that others send to the partition too.
The sequence that its records get is used up by what has landed alone: whoever does not know whether a batch
has landed fences it first by claiming the turn anew, and then looks which batch was the last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lakebook import failpoints
from lakebook.clock import to_ms
from lakebook.errors import (
    AppendTurnHeld,
    AppendTurnLost,
    LakebookError,
    PartitionNotFound,
    SegmentGap,
    SegmentOverlap,
)
from lakebook.lake.lake import Lake
from lakebook.registry import schema
from lakebook.registry.appends import LAST_BATCH, AppendTurn
from lakebook.registry.changes import row_of
from lakebook.registry.segments import SegmentInfo
from lakebook.registry.topics import Topic, not_found
from lakebook.registry.transactions import new_id
from lakebook.streams.batching import Attempt, Batch
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.segment_files import SegmentFile, stamped, store_segment

LOG = logging.getLogger("lakebook.producing")

#: Seconds for which a turn is kept without a pause, by a producer alone and by one among others.
_ALONE, _SHARED = 2.0, 0.25
#: Seconds after which an idle producer gives its turn back.
_IDLE_ALONE, _IDLE_SHARED = 1.0, 0.01
#: Seconds for which a busy producer leaves the turn to others. Who waits asks more often than this.
YIELD = 0.05
# A turn that has less than this part of its time left is claimed anew before something is stored.
_LEAST_LEFT = 3


@dataclass(frozen=True)
class Identity:
    """Who sends: a producer, in one of its lives."""

    producer_id: str
    epoch: int


class PartitionSender:
    """Sends batches to one partition, one after the other. One thread at a time uses it."""

    def __init__(
        self, lake: Lake, metadata: MetadataStore, topic: Callable[[], Topic], number: int, identity: Identity
    ) -> None:
        self._lake, self._metadata, self._topic = lake, metadata, topic
        self._number = number
        self._identity = identity
        self._turn: AppendTurn | None = None
        self._last_token: int | None = None
        self._shared = False
        self._claimed_at = 0.0
        self._used_at = 0.0
        self._slowest_upload = 0.0
        # The sequence of the next record, and the batch of which nobody knows whether it has used it up.
        self._sequence = 0
        self._doubt: Batch | None = None

    # --- the turn --------------------------------------------------------------------

    @property
    def idle_until(self) -> float | None:
        """When the turn is to be given back if nothing more comes; none if it is not held."""
        if self._turn is None:
            return None
        return self._used_at + (_IDLE_SHARED if self._shared else _IDLE_ALONE)

    def release(self) -> bool:
        """Give the turn back, if it is held; false if that fails, which is left to the turn's time limit."""
        turn, self._turn = self._turn, None
        try:
            if turn is not None:
                failpoints.reach("produce.releasing")
                self._metadata.release_append(turn)
        except LakebookError:
            return False
        return True

    def rest(self) -> bool:
        """Give the turn back if it was kept for long; whether others are to be left a moment for it."""
        now = self._lake.clock.monotonic()
        if self._turn is None or now - self._claimed_at < (_SHARED if self._shared else _ALONE):
            return False
        self.release()
        return True

    def _claim(self) -> AppendTurn:
        topic = self._topic()
        seconds = max(self._lake.settings.append_turn, min(3 * self._slowest_upload, 86_400.0))
        self._turn = None
        try:
            turn = self._metadata.claim_append(
                topic.name, self._number, holder=self._identity.producer_id, seconds=seconds
            )
        except AppendTurnHeld:
            self._shared = True
            raise
        except PartitionNotFound:
            # A topic loses no partition: this is another one of the same name.
            raise not_found(topic.name) from None
        if turn.topic_id != topic.id:
            # Another one has taken its name.
            with suppress(LakebookError):
                self._metadata.release_append(turn)
            raise not_found(topic.name)
        if self._last_token is not None:
            self._shared = turn.token != self._last_token + 1
        self._turn, self._last_token = turn, turn.token
        self._claimed_at = self._used_at = self._lake.clock.monotonic()
        return turn

    def _fresh_turn(self) -> AppendTurn:
        """A turn with enough time left to store something."""
        turn = self._turn
        if turn is not None and self._doubt is None:
            left = to_ms(turn.expires_at) - self._lake.clock.now_ms()
            if left * _LEAST_LEFT > turn.seconds * 1000:
                return turn
        return self._claim()

    # --- a batch ---------------------------------------------------------------------

    def is_doubtful(self, batch: Batch) -> bool:
        """Whether a batch was tried, and nobody knows if it has landed."""
        return self._doubt is batch

    def send(self, batch: Batch, seconds: float, *, compression: str, log_append_time: bool) -> int:
        """Store and record a batch; the offset of its first record.

        Whatever it raises, the batch has not been acknowledged and can be sent again: if it has landed
        after all, that is found. `seconds` is for how long it may be tried to store it.
        """
        if batch.attempt is None:
            landed = self._prepare(batch, seconds, compression, log_append_time)
            if landed is not None:
                return landed
        attempt = batch.attempt
        assert attempt is not None
        self._doubt = batch
        try:
            result = self._metadata.append_segments(
                attempt.turn, [attempt.segment], footers={attempt.segment.s3_key: attempt.footer}
            )
        except (AppendTurnLost, SegmentOverlap, SegmentGap):
            # It has to be stamped anew; the next turn tells whether it has landed nevertheless.
            self._turn = batch.attempt = None
            raise
        failpoints.reach("produce.committed")
        self._turn = result.turn
        self._settled(batch.count)
        return result.segments[0].base_offset

    def give_up(self, batch: Batch) -> None:
        """Send a batch no more. If it may have landed, the next one finds that out first."""
        batch.attempt = None
        if self._doubt is batch:
            self._turn = None

    def _prepare(self, batch: Batch, seconds: float, compression: str, log_append_time: bool) -> int | None:
        """Stamp and store a batch; where an earlier attempt has landed, the offset of its first record."""
        try:
            turn = self._fresh_turn()
        except AppendTurnHeld:
            # Whoever holds it has fenced what was under way.
            landed = self._settle(batch)
            if landed is not None:
                return landed
            raise
        landed = self._settle(batch)
        if landed is None:
            batch.attempt = self._stored(turn, batch, seconds, compression, log_append_time)
        return landed

    def _settle(self, batch: Batch) -> int | None:
        """Find out whether a batch in doubt has landed, which is fenced by now; if it is this one, where."""
        doubtful = self._doubt
        if doubtful is None:
            return None
        topic = self._topic()
        row = self._lake.registry.one(LAST_BATCH, topic.id, self._number, self._identity.producer_id)
        last = None if row is None else row_of(schema.producer_batches, row)
        if last is None or last["producer_epoch"] != self._identity.epoch or last["last_sequence"] < self._sequence:
            self._doubt = None
            return None
        base = int(last["base_offset"]) + self._sequence - int(last["first_sequence"])
        if doubtful is not batch:
            LOG.warning(
                "%s/%s: %s records that were given up have landed at %s", topic.name, self._number, doubtful.count, base
            )
        self._settled(doubtful.count)
        return base if doubtful is batch else None

    def _settled(self, count: int) -> None:
        self._doubt = None
        self._sequence += count
        self._used_at = self._lake.clock.monotonic()

    def _stored(
        self, turn: AppendTurn, batch: Batch, seconds: float, compression: str, log_append_time: bool
    ) -> Attempt:
        clock = self._lake.clock
        content = batch.content(clock.now_ms() if log_append_time else None)
        first, last = self._sequence, self._sequence + batch.count - 1
        facts = {
            "topic_id": turn.topic_id,
            "partition": self._number,
            "base_offset": turn.next_offset,
            "producer_id": self._identity.producer_id,
            "producer_epoch": self._identity.epoch,
            "first_sequence": first,
            "last_sequence": last,
        }
        path = f"{turn.folder}/{new_id()}.parquet"
        failpoints.reach("produce.stamped")
        rows = stamped(content, self._number, turn.next_offset)
        begun = clock.monotonic()
        file = store_segment(self._lake.store, path, rows, compression=compression, facts=facts, seconds=seconds)
        self._slowest_upload = max(self._slowest_upload / 2, clock.monotonic() - begun)
        failpoints.reach("produce.stored")
        return Attempt(turn, self._described(turn, file, first, last), file.footer)

    def _described(self, turn: AppendTurn, file: SegmentFile, first: int, last: int) -> SegmentInfo:
        return SegmentInfo(
            topic=turn.topic,
            partition_id=self._number,
            base_offset=file.base_offset,
            end_offset=file.base_offset + file.record_count - 1,
            record_count=file.record_count,
            size_bytes=file.size,
            s3_key=file.path,
            id=new_id(),
            min_timestamp=file.min_timestamp,
            max_timestamp=file.max_timestamp,
            checksum=file.checksum,
            producer_id=self._identity.producer_id,
            producer_epoch=self._identity.epoch,
            first_sequence=first,
            last_sequence=last,
        )
