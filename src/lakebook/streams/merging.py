"""Merging: small segments that follow one another become one, with the same records at the same offsets.

A run of them is merged for as long as none is larger than the others together. So whatever is rewritten ends
in a file of at least twice the size of the one it came from, and no byte is rewritten more often than the
logarithm of the target says, however long a topic is fed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc

from lakebook import failpoints
from lakebook.clock import Enough, never, to_ms
from lakebook.errors import (
    CommitAborted,
    InvalidFile,
    LakebookError,
    MergeConflict,
    ObjectNotFound,
    PartitionNotFound,
    TopicNotFound,
)
from lakebook.lake.footers import open_footer
from lakebook.lake.lake import Lake
from lakebook.pages import PAGE_SIZE, every
from lakebook.registry.footers import load_footers, paths_with_footer
from lakebook.registry.partitions import GET_PARTITION, Partition, partition_from
from lakebook.registry.retention import Policy
from lakebook.registry.schema import MAX_INTEGER
from lakebook.registry.segments import BASE_OFFSET, LIST_SEGMENTS, SegmentInfo, segment_from
from lakebook.registry.small_segments import first_of_newest
from lakebook.registry.topics import GET_TOPIC, Topic, not_found, topic_from
from lakebook.registry.transactions import new_id
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.retention import topics_after
from lakebook.streams.segment_facts import facts_of, newest_of, sinks_facts, sinks_in
from lakebook.streams.segment_files import (
    COMPRESSION,
    MOST_ROWS,
    ROW_GROUP_BYTES,
    SEGMENT_SCHEMA,
    SegmentFile,
    SegmentReader,
    check_offsets,
    measured,
    segment_writer,
)
from lakebook.streams.sweeping import remove_unknown
from lakebook.streams.uploading import upload

#: The key of a topic's configuration that switches it off.
MERGE = "segment.merge"
#: Segments that one merge replaces at most, so that its transaction is short.
MOST_SEGMENTS = 1000
# Segments that are looked at together: more than one merge can take.
_AT_ONCE = 4 * MOST_SEGMENTS
# What a merged segment may span of the time and of the size that a topic keeps: retention removes it as a
# whole, when its newest record is due.
_SHARE_OF_RETENTION = 10
_MOST_REMEMBERED = 100_000
# How folders of merges are asked for.
_FOLDER_KIND = "m"


@dataclass(frozen=True)
class Rule:
    """Which segments are worth a merge."""

    #: So many in a row at least.
    least: int
    #: Bytes of the outcome, at most.
    target: int
    #: Milliseconds between its oldest and its newest record, at most; none: any number.
    span: int | None = None

    @classmethod
    def of(cls, lake: Lake, topic: Topic) -> Rule:
        """The rule for the segments of a topic."""
        policy = Policy.of(topic.retention_ms, topic.config)
        target = lake.settings.merge_target
        if policy.bytes is not None:
            target = max(1, min(target, policy.bytes // _SHARE_OF_RETENTION))
        span = None if policy.ms is None else policy.ms // _SHARE_OF_RETENTION
        return cls(lake.settings.merge_segments, target, span)

    def is_small(self, segment: SegmentInfo) -> bool:
        """Whether a segment may be merged with others."""
        return segment.size_bytes < self.target * 3 // 4


@dataclass
class Merged:
    """What merging did."""

    #: By topic: how many segments were replaced, and by how many.
    replaced: dict[str, int] = field(default_factory=dict)
    into: dict[str, int] = field(default_factory=dict)
    #: Bytes of the new ones.
    bytes: int = 0
    #: Merges that were thrown away: their segments were removed or merged by somebody else meanwhile.
    conflicts: int = 0
    #: What could not be merged, and why. It is tried again by the next round.
    failed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def segments(self) -> int:
        """Segments that were replaced."""
        return sum(self.replaced.values())

    def note(self, topic: str, segments: int, size: int) -> None:
        """Count one merge."""
        self.replaced[topic] = self.replaced.get(topic, 0) + segments
        self.into[topic] = self.into.get(topic, 0) + 1
        self.bytes += size


def worth_merging(segments: Sequence[SegmentInfo], rule: Rule) -> Iterator[Sequence[SegmentInfo]]:
    """The parts of a run of small segments that are worth a merge, each as long as can be."""
    first = 0
    while first < len(segments):
        end = _end_of_part(segments, first, rule)
        if end is None:
            first += 1
        else:
            yield segments[first:end]
            first = end


def _end_of_part(segments: Sequence[SegmentInfo], first: int, rule: Rule) -> int | None:
    total = largest = records = 0
    oldest = newest = 0
    found = None
    for place in range(first, min(len(segments), first + MOST_SEGMENTS)):
        segment = segments[place]
        total += segment.size_bytes
        records += segment.record_count
        largest = max(largest, segment.size_bytes)
        times = _times(segment)
        oldest, newest = (times[0], times[1]) if place == first else (min(oldest, times[0]), max(newest, times[1]))
        if total > rule.target or records > MAX_INTEGER or (rule.span is not None and newest - oldest > rule.span):
            break
        if place - first + 1 >= rule.least and 2 * largest <= total:
            found = place + 1
    return found


def _times(segment: SegmentInfo) -> tuple[int, int]:
    assert segment.min_timestamp is not None and segment.max_timestamp is not None
    return to_ms(segment.min_timestamp), to_ms(segment.max_timestamp)


@dataclass
class _Look:
    """What is remembered of a partition, so that the same segments are not looked at again and again."""

    #: Before this offset nothing will ever be worth a merge.
    start: int = 0
    #: Nothing is worth a merge while the watermark is this one; none: look again.
    watermark: int | None = None


@dataclass(frozen=True)
class _Round:
    """What a round works with."""

    metadata: MetadataStore
    enough: Enough
    result: Merged = field(default_factory=Merged)


class Merger:
    """Merges the small segments of all topics; a round that was stopped is followed by one that goes on there."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._after = ""
        # By topic and partition. Only what it has seen itself: after a start everything is looked at once.
        self._looks: dict[tuple[int, int], _Look] = {}

    def run(self, metadata: MetadataStore, enough: Enough = never) -> Merged:
        """Look at every topic once, or until it is enough."""
        work = _Round(metadata, enough)
        after = "" if enough is never else self._after
        self._after = ""
        for topic in topics_after(self._lake, after):
            self._run_topic(work, topic, None)
            if enough():
                self._after = topic.name
                break
        return work.result

    def run_topic(
        self, metadata: MetadataStore, topic: Topic, number: int | None = None, enough: Enough = never
    ) -> Merged:
        """Merge what is worth it in one partition of a topic, or in all."""
        work = _Round(metadata, enough)
        self._run_topic(work, topic, number)
        return work.result

    def _run_topic(self, work: _Round, topic: Topic, number: int | None) -> None:
        if topic.config.get(MERGE) == "false":
            return
        rule = Rule.of(self._lake, topic)
        try:
            for partition in every(lambda after: work.metadata.list_partitions(topic.name, after=after)):
                if partition.topic_id == topic.id and number in (None, partition.partition_id):
                    self._look_at(work, topic, partition, rule)
                if work.enough():
                    return
        except (TopicNotFound, PartitionNotFound):
            return  # It was deleted meanwhile.

    def _look_at(self, work: _Round, topic: Topic, partition: Partition, rule: Rule) -> None:
        if len(self._looks) >= _MOST_REMEMBERED:
            self._looks.clear()
        look = self._looks.setdefault((topic.id, partition.partition_id), _Look())
        if partition.high_watermark in (partition.log_start, look.watermark):
            return
        start, settled = None, True
        for run, is_last in self._runs(partition, rule, look.start):
            again = self._merge_run(work, topic, partition, rule, run)
            if work.enough():
                return
            settled = settled and not again
            if start is None and (again or is_last):
                # What was merged just now may be merged once more, and the last run may grow.
                start = run[0].base_offset
        look.start = partition.high_watermark if start is None else start
        look.watermark = partition.high_watermark if settled else None

    def _runs(self, partition: Partition, rule: Rule, start: int) -> Iterator[tuple[list[SegmentInfo], bool]]:
        """Small segments that follow one another, young ones too, and whether they are the partition's last."""
        run: list[SegmentInfo] = []
        for page in self._pages(partition, start):
            small = self._small(page, rule)
            for segment in page:
                is_next = not run or (run[-1].end_offset + 1 == segment.base_offset and len(run) < _AT_ONCE)
                if run and not (is_next and segment.s3_key in small):
                    yield run, False
                    run = []
                if segment.s3_key in small:
                    run.append(segment)
        if run:
            yield run, True

    def _pages(self, partition: Partition, start: int) -> Iterator[list[SegmentInfo]]:
        after = start - 1
        where = (partition.topic, partition.partition_id)
        while rows := self._lake.registry.all(LIST_SEGMENTS, *where, after, PAGE_SIZE):
            yield [segment_from(row) for row in rows]
            after = rows[-1][BASE_OFFSET]

    def _small(self, segments: Sequence[SegmentInfo], rule: Rule) -> set[str]:
        """The paths of those that may be merged. One without a footer was recorded by hand, and may have no file."""
        paths = [segment.s3_key for segment in segments if rule.is_small(segment)]
        return self._lake.registry.read_with(lambda reader: paths_with_footer(reader, paths))

    def _merge_run(
        self, work: _Round, topic: Topic, partition: Partition, rule: Rule, run: Sequence[SegmentInfo]
    ) -> bool:
        """Merge what is worth it in a run; whether it has to be looked at again."""
        again = False
        for is_quiet, some in groupby(run, self._is_quiet()):
            if not is_quiet:
                again = True
                continue
            for part in worth_merging(list(some), rule):
                self._try(work, topic, partition, part)
                again = True
                if work.enough():
                    return True
        return again

    def count(self, partition: Partition, rule: Rule, start: int) -> int:
        """How many segments from an offset on are worth a merge now."""
        return sum(
            len(part)
            for run, _ in self._runs(partition, rule, start)
            for is_quiet, some in groupby(run, self._is_quiet())
            if is_quiet
            for part in worth_merging(list(some), rule)
        )

    def _is_quiet(self) -> Callable[[SegmentInfo], bool]:
        before = self._lake.clock.now_ms() - round(self._lake.settings.merge_quiet * 1000)
        return lambda segment: _created(segment) <= before

    def _try(self, work: _Round, topic: Topic, partition: Partition, old: Sequence[SegmentInfo]) -> None:
        try:
            new = merge(self._lake, work.metadata, topic, partition.partition_id, old)
        except (MergeConflict, CommitAborted):
            work.result.conflicts += 1
        except (TopicNotFound, PartitionNotFound):
            raise
        except LakebookError as error:
            work.result.failed.append((f"{topic.name}/{partition.partition_id} at {old[0].base_offset}", str(error)))
        else:
            work.result.note(topic.name, len(old), new.size_bytes)


def _created(segment: SegmentInfo) -> int:
    assert segment.created_at is not None
    return to_ms(segment.created_at)


def count_mergeable(lake: Lake, topic: str, number: int, most: int) -> int:
    """How many of the newest segments of a partition are worth a merge; nothing is merged."""
    of_topic, of_partition = lake.registry.one(GET_TOPIC, topic), lake.registry.one(GET_PARTITION, topic, number)
    if of_topic is None or of_partition is None:
        return 0  # It was deleted meanwhile.
    found, partition = topic_from(of_topic), partition_from(of_partition)
    if found.config.get(MERGE) == "false":
        return 0
    start = lake.registry.read_with(lambda reader: first_of_newest(reader, found.id, number, most))
    return Merger(lake).count(partition, Rule.of(lake, found), start)


def merge_topic(
    lake: Lake, metadata: MetadataStore, topic: str, partition: int | None = None, enough: Enough = never
) -> Merged:
    """Merge the small segments of a topic, or of one partition of it, as far as they are quiet and it is worth it."""
    found = metadata.get_topic(topic)
    if found is None:
        raise not_found(topic)
    return Merger(lake).run_topic(metadata, found, partition, enough)


# --- one merge -----------------------------------------------------------------


def merge(lake: Lake, metadata: MetadataStore, topic: Topic, number: int, old: Sequence[SegmentInfo]) -> SegmentInfo:
    """Replace segments by one; `MergeConflict` if one of them is no longer there.

    If it fails, nothing has changed, and what it wrote is removed: by the janitor at the latest.
    """
    folder = metadata.open_stream_folder(topic.name, _FOLDER_KIND, number)
    try:
        file = _write(lake, f"{folder.folder}/{new_id()}.parquet", topic, number, old)
        failpoints.reach("merge.written")
        new = _described(topic, number, file)
        assert folder.commit_id is not None
        merged = metadata.replace_segments(
            topic.id, number, old, new, commit_id=folder.commit_id, footers={file.path: file.footer}
        )
    except BaseException:
        # If the registry does not answer, the janitor ends it.
        with suppress(LakebookError):
            metadata.end_stream_folder(folder)
            remove_unknown(lake, folder.folder)
        raise
    failpoints.reach("merge.committed")
    return merged


def _described(topic: Topic, number: int, file: SegmentFile) -> SegmentInfo:
    return SegmentInfo(
        topic=topic.name,
        partition_id=number,
        base_offset=file.base_offset,
        end_offset=file.base_offset + file.record_count - 1,
        record_count=file.record_count,
        size_bytes=file.size,
        s3_key=file.path,
        checksum=file.checksum,
        min_timestamp=file.min_timestamp,
        max_timestamp=file.max_timestamp,
    )


def _write(lake: Lake, path: str, topic: Topic, number: int, old: Sequence[SegmentInfo]) -> SegmentFile:
    """Write the records of segments into one. No more than a row group of them is in memory, beside its bytes."""
    footers = _footers_of(lake, old)
    # Those that are replaced go, and what they say of batches has to stay.
    sinks = newest_of(sinks_in(facts_of(open_footer(footers[item.s3_key], on=item.s3_key))) for item in old)
    facts = {"topic_id": topic.id, "partition": number, "base_offset": old[0].base_offset, **sinks_facts(sinks)}
    buffer = io.BytesIO()
    least: list[datetime] = []
    most: list[datetime] = []
    with segment_writer(buffer, compression=topic.config.get("compression.type", COMPRESSION), facts=facts) as writer:
        for rows in _grouped(_rows_of(lake, number, old, footers)):
            writer.write_table(rows, row_group_size=rows.num_rows)
            times = pc.min_max(rows.column("timestamp")).as_py()
            least.append(times["min"])
            most.append(times["max"])
    data = buffer.getvalue()
    upload(lake.store, path, data, lake.settings.upload_seconds)
    return measured(path, data, old[0].base_offset, sum(item.record_count for item in old), (min(least), max(most)))


def _footers_of(lake: Lake, old: Sequence[SegmentInfo]) -> dict[str, bytes]:
    found = lake.registry.read_with(lambda reader: load_footers(reader, [segment.s3_key for segment in old]))
    for segment in old:
        if segment.s3_key not in found:
            raise _gone(segment)
    return {path: footer.metadata for path, footer in found.items()}


def _rows_of(
    lake: Lake, number: int, old: Sequence[SegmentInfo], footers: Mapping[str, bytes]
) -> Iterator[pa.RecordBatch]:
    """The rows of segments, one after the other; each is what the registry has confirmed."""
    for segment in old:
        place = segment.base_offset
        try:
            for batch in SegmentReader(lake.store, segment.s3_key, footers[segment.s3_key], place).batches(place):
                check_offsets(batch, number, place, segment.s3_key)
                place += batch.num_rows
                yield batch
        except ObjectNotFound as error:
            raise _gone(segment) from error
        if place != segment.end_offset + 1:
            raise InvalidFile(
                f"it has {place - segment.base_offset} records instead of {segment.record_count}",
                on=segment.s3_key,
                remedy="Run `lakebook verify`",
            )


def _gone(segment: SegmentInfo) -> MergeConflict:
    return MergeConflict(
        "a segment was removed meanwhile", on=f"{segment.topic}/{segment.partition_id}", remedy="Look again"
    )


def _grouped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows as tables that make good row groups."""
    kept: list[pa.RecordBatch] = []
    size = rows = 0
    for batch in batches:
        kept.append(batch)
        size, rows = size + batch.nbytes, rows + batch.num_rows
        if size >= ROW_GROUP_BYTES or rows >= MOST_ROWS:
            yield pa.Table.from_batches(kept).cast(SEGMENT_SCHEMA)
            kept, size, rows = [], 0, 0
    if kept:
        yield pa.Table.from_batches(kept).cast(SEGMENT_SCHEMA)
