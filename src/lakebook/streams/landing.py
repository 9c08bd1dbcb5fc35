"""Landing a batch: its staged rows become segments of several partitions in one transaction, or none.

Offsets are known under the turns of the partitions only. So the turns are taken first, then the rows are
stamped and stored, one segment at a time, and then all segments are recorded together. A turn that was lost
on the way costs the segments that were stored: they are stamped again from the staged rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from lakebook import failpoints
from lakebook.clock import to_ms
from lakebook.errors import (
    AppendTurnHeld,
    AppendTurnLost,
    CommitAborted,
    InsertFailed,
    LakebookError,
    ObjectNotFound,
    PartitionNotFound,
    SegmentGap,
    SegmentOverlap,
    StaleBatch,
)
from lakebook.lake.lake import Lake
from lakebook.registry.appends import AppendTurn
from lakebook.registry.segments import SegmentInfo
from lakebook.registry.stream_folders import StreamFolder
from lakebook.registry.topics import Topic, not_found
from lakebook.registry.transactions import new_id
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.record_tables import Cuts, sizes_of
from lakebook.streams.segment_facts import batch_facts
from lakebook.streams.segment_files import COMPRESSION, CONTENT_SCHEMA, TIMESTAMP, stamped, store_segment
from lakebook.streams.staging import Stage, Staged, read_staged
from lakebook.streams.sweeping import remove_unknown

LOG = logging.getLogger("lakebook.landing")

# A busy producer leaves its turn to others for a short moment; who waits asks more often than that.
_PAUSE = 0.02
# A segment's rows in memory, unless the topic says otherwise.
_SEGMENT_BYTES = 64 * 1024**2
_SEGMENT_RECORDS = 1_000_000
# A column of bytes must not have 2 GiB, and a record is not divided.
_MOST_RECORD = 512 * 1024**2
# A turn that has less than this part of its time left is claimed anew.
_LEAST_LEFT = 2


@dataclass(frozen=True)
class Landing:
    """What became of a batch. `duplicate`: it had landed before, and nothing was recorded now."""

    segments: tuple[SegmentInfo, ...]
    duplicate: bool = False

    @property
    def record_count(self) -> int:
        """The records that were recorded now."""
        return sum(segment.record_count for segment in self.segments)


def most_record(lake: Lake, topic: Topic) -> int:
    """The bytes that a record of a topic may have, as its producers have it too."""
    return min(int(topic.config.get("max.message.bytes", _MOST_RECORD)), lake.settings.producer_buffer, _MOST_RECORD)


def land_batch(
    lake: Lake,
    metadata: MetadataStore,
    stage: Stage,
    staged: Sequence[Staged],
    *,
    sink: str | None = None,
    batch_id: int | None = None,
    of_query: bool = False,
) -> Landing:
    """Record the staged rows as a batch, and remove what was staged.

    A sink's batch lands once, however often it is tried. A query repeats no batch but its last one: an earlier
    one `of_query` is of another that has the sink's name. Its rows would be lost, and it is refused.
    """
    last = None if sink is None else metadata.last_batch(stage.topic, sink)
    is_known = last is not None and batch_id is not None and last >= batch_id
    if not staged or is_known:
        remove_staged(lake, metadata, stage)
        if staged and of_query and last != batch_id:
            raise StaleBatch(
                f"its last batch is {last}, and this one is {batch_id}",
                on=f"sink {sink} of topic {stage.topic}",
                remedy="A query with a new checkpoint begins at 0: give it a sink of its own",
            )
        if staged:
            LOG.warning("%s: batch %s of the sink %s is there already, and left out", stage.topic, batch_id, sink)
        return Landing((), duplicate=bool(staged))
    landing = _Attempt(lake, metadata, stage, staged).land(sink, batch_id)
    failpoints.reach("batch.landed")
    remove_staged(lake, metadata, stage)
    return landing


def remove_staged(lake: Lake, metadata: MetadataStore, stage: Stage) -> None:
    """End the folder of staged rows, and empty it. What tasks that come late leave there is swept later."""
    _end(lake, metadata, StreamFolder(stage.folder, stage.commit_id, stage.topic_id))


def _end(lake: Lake, metadata: MetadataStore, folder: StreamFolder) -> None:
    """Close a folder's fence and remove what does not count. If that fails, a sweep does it later."""
    with suppress(LakebookError):
        metadata.end_stream_folder(folder)
        remove_unknown(lake, folder.folder)


class _Attempt:
    """One attempt to land a batch, in a folder of its own."""

    def __init__(self, lake: Lake, metadata: MetadataStore, stage: Stage, staged: Sequence[Staged]) -> None:
        self._lake, self._metadata, self._stage = lake, metadata, stage
        topic = metadata.get_topic(stage.topic)
        if topic is None or topic.id != stage.topic_id:
            raise not_found(stage.topic)
        self._topic: Topic = topic
        self._files: dict[int, list[Staged]] = {}
        for item in staged:
            self._files.setdefault(item.partition, []).append(item)
        self._records = sum(item.records for item in staged)
        self._folder = metadata.open_stream_folder(stage.topic, "s")
        assert self._folder.commit_id is not None
        self._commit_id = self._folder.commit_id
        self._turns: dict[int, AppendTurn] = {}
        #: Whether the folder may have files that do not count.
        self._spare = True
        self._tried = 0

    def land(self, sink: str | None, batch_id: int | None) -> Landing:
        """Record the batch, however often its turns are lost on the way."""
        try:
            while True:
                self._claim()
                try:
                    return self._append(sink, batch_id)
                except (AppendTurnHeld, AppendTurnLost, SegmentOverlap, SegmentGap):
                    self._give_back(self._turns)
        except CommitAborted as error:
            raise InsertFailed(
                "the batch was given up by a sweep before it landed",
                on=f"topic {self._stage.topic}",
                remedy="Repeat it",
            ) from error
        finally:
            self._give_back(self._turns)
            if self._spare:
                _end(self._lake, self._metadata, self._folder)

    def _append(self, sink: str | None, batch_id: int | None) -> Landing:
        self._tried += 1
        segments, footers = self._store(batch_facts(new_id(), self._records, sink, batch_id))
        failpoints.reach("batch.stored")
        result = self._metadata.append_batch(
            self._stage.topic,
            [(self._turns[number], segments[number]) for number in sorted(segments)],
            commit_id=self._commit_id,
            footers=footers,
            sink=sink,
            batch_id=batch_id,
        )
        self._turns = {turn.partition_id: turn for turn in result.turns}
        self._spare = self._tried > 1 or result.duplicate
        return Landing(result.segments, result.duplicate)

    # --- turns -----------------------------------------------------------------------

    def _claim(self) -> None:
        """Take the turns of all partitions, in order, so that two batches do not wait for each other."""
        clock = self._lake.clock
        until = clock.monotonic() + self._lake.settings.produce_seconds
        while True:
            # Nothing is stored yet: whatever was lost is claimed again.
            with suppress(AppendTurnHeld, AppendTurnLost):
                self._renew()
            absent = sorted(self._files.keys() - self._turns.keys())
            if not absent:
                return
            self._give_back([number for number in self._turns if number > absent[0]])
            try:
                self._turns[absent[0]] = self._claimed(absent[0])
            except AppendTurnHeld:
                if clock.monotonic() >= until:
                    raise
                clock.sleep(_PAUSE)

    def _give_back(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            with suppress(LakebookError):
                self._metadata.release_append(self._turns.pop(number))

    def _claimed(self, number: int) -> AppendTurn:
        try:
            turn = self._metadata.claim_append(self._stage.topic, number, holder=f"batch-{self._commit_id}")
        except PartitionNotFound:
            # A topic loses no partition: this is another one of the same name.
            raise not_found(self._stage.topic) from None
        if turn.topic_id != self._stage.topic_id:
            with suppress(LakebookError):
                self._metadata.release_append(turn)
            raise not_found(self._stage.topic)
        return turn

    def _renew(self) -> None:
        """Claim turns anew that have little time left. Whoever has appended meanwhile makes the batch begin again."""
        now = self._lake.clock.now_ms()
        for number, turn in list(self._turns.items()):
            if (to_ms(turn.expires_at) - now) * _LEAST_LEFT > turn.seconds * 1000:
                continue
            self._metadata.renew_stream_folder(self._folder)
            del self._turns[number]
            renewed = self._claimed(number)
            self._turns[number] = renewed
            if renewed.next_offset != turn.next_offset:
                raise AppendTurnLost("another producer has appended meanwhile", on=f"{turn.topic}/{number}")

    # --- segments --------------------------------------------------------------------

    def _store(self, of_batch: Mapping[str, Any]) -> tuple[dict[int, list[SegmentInfo]], dict[str, bytes]]:
        """Stamp and store the rows of all partitions; the segments, and their footers by path.

        All of them say of which batch they are: it is known again from them if the registry is lost.
        """
        segments: dict[int, list[SegmentInfo]] = {}
        footers: dict[str, bytes] = {}
        for number in sorted(self._files):
            base = self._turns[number].next_offset
            for content in self._contents(self._files[number]):
                self._renew()
                path = f"{self._folder.folder}/{new_id()}.parquet"
                facts = {"topic_id": self._topic.id, "partition": number, "base_offset": base, **of_batch}
                rows = stamped(content, number, base)
                file = store_segment(
                    self._lake.store,
                    path,
                    rows,
                    compression=self._topic.config.get("compression.type", COMPRESSION),
                    facts=facts,
                    seconds=self._lake.settings.upload_seconds,
                )
                footers[path] = file.footer
                base += file.record_count
                segments.setdefault(number, []).append(
                    SegmentInfo(
                        topic=self._topic.name,
                        partition_id=number,
                        base_offset=file.base_offset,
                        end_offset=base - 1,
                        record_count=file.record_count,
                        size_bytes=file.size,
                        s3_key=path,
                        min_timestamp=file.min_timestamp,
                        max_timestamp=file.max_timestamp,
                        checksum=file.checksum,
                    )
                )
        return segments, footers

    def _contents(self, files: Sequence[Staged]) -> Iterator[pa.Table]:
        """The rows of one partition, cut as its segments shall be; no more than one of them is held, and one file."""
        config = self._topic.config
        most_bytes = int(config.get("segment.bytes", _SEGMENT_BYTES))
        most_records = int(config.get("segment.records", _SEGMENT_RECORDS))
        held: list[pa.Table] = []
        size = records = 0
        for item in files:
            rows = self._read(item.path)
            cuts, start = Cuts(sizes_of(rows)), 0
            while start < rows.num_rows:
                end, weight = cuts.piece(start, most_bytes - size, most_records - records)
                if held and (size + weight > most_bytes or records == most_records):
                    yield self._timed(pa.concat_tables(held))
                    held, size, records = [], 0, 0
                    continue
                held.append(rows.slice(start, end - start))
                size, records, start = size + weight, records + end - start, end
        if held:
            yield self._timed(pa.concat_tables(held))

    def _read(self, path: str) -> pa.Table:
        try:
            return read_staged(self._lake.store, path)
        except ObjectNotFound as error:
            raise InsertFailed(
                "rows that were staged are gone: the job took too long, or its batch was given up",
                on=f"topic {self._stage.topic}",
                remedy="Repeat it",
            ) from error

    def _timed(self, content: pa.Table) -> pa.Table:
        if self._topic.config.get("message.timestamp.type") != "LogAppendTime":
            return content
        now = pa.scalar(self._lake.clock.now_ms() * 1000, pa.int64()).cast(TIMESTAMP)
        return content.set_column(0, CONTENT_SCHEMA.field(0), pa.repeat(now, content.num_rows))
