"""Which records the next batch of a pipeline reads: decided once and written down, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lakebook.errors import PipelineStopped, TopicNotFound
from lakebook.lake.lake import Lake
from lakebook.pipelines.definitions import WAIT, Definition
from lakebook.registry.partitions import Partition
from lakebook.registry.pipelines import (
    TABLE,
    TOPIC,
    WHOLE,
    PipelineRecord,
    SourceOffset,
    SourceRange,
    add_partitions,
    lease_of,
    offsets_of,
    versions_between,
)
from lakebook.registry.tables import GET_TABLE_BY_ID, TableRecord, table_from
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.ranges import partitions_of

# The operation of which every row is new, and those that change no row. By their names: a version that only adds
# files of deletes ends no file.
_APPEND = "append"
_WITHOUT_ROWS = ("replace", "schema", "create")
_MOST_VERSIONS = 1000


@dataclass(frozen=True)
class Planned:
    """The ranges of a batch, and how many records they have."""

    ranges: tuple[SourceRange, ...]
    records: int


#: Up to where a run reads: by kind, source and partition.
Ends = Mapping[tuple[str, int, int], int]


class Planner:
    """Looks at the sources of a pipeline."""

    def __init__(self, lake: Lake, metadata: MetadataStore, record: PipelineRecord, definition: Definition) -> None:
        self._lake = lake
        self._metadata = metadata
        self._record = record
        self._definition = definition

    @property
    def lease(self) -> str:
        """The lease that pins what the pipeline has still to read of topics."""
        return lease_of(self._record.id)

    def offsets(self) -> list[SourceOffset]:
        """How far the pipeline has come."""
        return self._lake.registry.read_with(lambda reader: offsets_of(reader, self._record.id))

    def topic_names(self) -> dict[int, str]:
        """The names of its topics, by their ids. One that was deleted stops the pipeline."""
        found: dict[int, str] = {}
        for source in self._definition.sources:
            topic = self._metadata.get_topic(source.name)
            if topic is not None:
                found[topic.id] = source.name
        known = {item.source_id for item in self.offsets() if item.kind == TOPIC}
        if not known <= found.keys():
            raise self._stopped("one of its topics was deleted", "Delete the pipeline, or make it anew")
        return found

    def table(self, table_id: int) -> TableRecord:
        """A table that is a source, as it is now."""
        row = self._lake.registry.one(GET_TABLE_BY_ID, table_id)
        if row is None:
            raise self._stopped("one of its source tables was dropped", "Delete the pipeline, or make it anew")
        return table_from(row)

    def ends(self) -> dict[tuple[str, int, int], int]:
        """Up to where there is something to read now. Partitions that came since the last look begin at 0."""
        if not self._definition.of_topics:
            return {(TABLE, item.source_id, WHOLE): self.table(item.source_id).version + 1 for item in self.offsets()}
        found: dict[tuple[str, int, int], int] = {}
        for topic_id, name in self.topic_names().items():
            partitions = self._partitions(name)
            self._add_partitions(topic_id, name, partitions)
            for number, partition in partitions.items():
                found[TOPIC, topic_id, number] = partition.high_watermark
        return found

    def _partitions(self, topic: str) -> dict[int, Partition]:
        try:
            return partitions_of(self._metadata, topic)
        except TopicNotFound:
            raise self._stopped("one of its topics was deleted", "Delete the pipeline, or make it anew") from None

    def _add_partitions(self, topic_id: int, topic: str, partitions: Mapping[int, Partition]) -> None:
        known = {item.partition for item in self.offsets() if (item.kind, item.source_id) == (TOPIC, topic_id)}
        new = {number: partition.log_start for number, partition in partitions.items() if number not in known}
        if new:
            pins = self._definition.retention == WAIT
            self._lake.registry.write(
                lambda transaction: add_partitions(transaction, self._record, topic_id, topic, new, pins=pins)
            )

    def waiting(self, ends: Ends) -> int:
        """How many records, or versions of tables, lie between where it stands and these ends."""
        return sum(
            max(0, ends.get((item.kind, item.source_id, item.partition), item.next) - item.next)
            for item in self.offsets()
        )

    def plan(self, ends: Ends) -> Planned:
        """The ranges of the next batch: no more than the definition allows, and nothing beyond the ends."""
        behind = [
            (item, end)
            for item in self.offsets()
            if (end := ends.get((item.kind, item.source_id, item.partition), item.next)) > item.next
        ]
        if not behind:
            return Planned((), 0)
        return self._of_topics(behind) if self._definition.of_topics else self._of_tables(behind)

    # --- topics --------------------------------------------------------------------

    def _of_topics(self, behind: list[tuple[SourceOffset, int]]) -> Planned:
        names = self.topic_names()
        ranges: list[SourceRange] = []
        records, size = 0, 0
        # Each partition gets its share, so that none waits for the others.
        share = max(1, self._definition.batch_records // len(behind))
        for item, end in behind:
            left = self._definition.batch_bytes - size
            if ranges and left <= 0:
                break
            stop, weight = self._cut(names[item.source_id], item, min(end, item.next + share), left)
            ranges.append(SourceRange(TOPIC, item.source_id, item.partition, item.next, stop))
            records += stop - item.next
            size += weight
        return Planned(tuple(ranges), records)

    def _cut(self, topic: str, item: SourceOffset, end: int, bytes_left: int) -> tuple[int, int]:
        """Where a range ends: at the end of a segment if it can, so that segments are read whole; and its bytes."""
        left = self._first_left(topic, item)
        if left > item.next:
            raise self._stopped(
                f"the records {item.next} to {left - 1} of {topic}/{item.partition} are gone",
                "Resume it with skip_lost to go on behind them",
            )
        stop, size = item.next, 0
        for segment in self._metadata.list_segments_in(item.source_id, item.partition, item.next, end):
            if stop > item.next and (size + segment.size_bytes > bytes_left or segment.end_offset + 1 > end):
                return stop, size
            stop = min(end, segment.end_offset + 1)
            size += segment.size_bytes
        # What no segment has is a hole that a rebuild has left, and readers skip it.
        return (stop if stop > item.next else end), size

    def _first_left(self, topic: str, item: SourceOffset) -> int:
        """The first of the records from where it stands that retention has left: what a lease pins is there still."""
        partition = self._metadata.get_partition(topic, item.partition)
        if partition is None or partition.log_start <= item.next:
            return item.next
        below = self._metadata.list_segments_in(item.source_id, item.partition, item.next, partition.log_start)
        return max(item.next, below[0].base_offset) if below else partition.log_start

    # --- tables --------------------------------------------------------------------

    def _of_tables(self, behind: list[tuple[SourceOffset, int]]) -> Planned:
        ranges: list[SourceRange] = []
        records = 0
        for item, end in behind:
            table = self.table(item.source_id)
            stop, rows = self._walk(table, item, end, self._definition.batch_records - records)
            if stop > item.next:
                ranges.append(SourceRange(TABLE, item.source_id, WHOLE, item.next, stop))
                records += rows
        return Planned(tuple(ranges), records)

    def _walk(self, table: TableRecord, item: SourceOffset, end: int, most: int) -> tuple[int, int]:
        """The first version that is not read any more, and how many rows are new up to it."""
        versions = self._lake.registry.read_with(
            lambda reader: versions_between(reader, table.id, item.next, end, _MOST_VERSIONS)
        )
        stop, rows = item.next, 0
        for version in versions:
            if version.version != stop:
                break
            if version.operation == _APPEND:
                if rows and rows + version.rows > most:
                    break
                rows += version.rows
            elif version.operation not in _WITHOUT_ROWS:
                if stop > item.next:
                    break
                raise self._stopped(
                    f"version {version.version} of {table.shown} is no append but {version.operation}: rows that"
                    " have landed are gone there",
                    "Backfill or rebuild the target as you need it, and resume with skip_lost to go on behind it",
                )
            stop = version.version + 1
        return stop, rows

    def behind_what_is_lost(self) -> dict[tuple[str, int, int], int]:
        """Where it could go on: behind records that are gone, and behind a version that is no append."""
        found: dict[tuple[str, int, int], int] = {}
        names = self.topic_names() if self._definition.of_topics else {}
        for item in self.offsets():
            place = (item.kind, item.source_id, item.partition)
            if item.kind == TOPIC:
                left = self._first_left(names[item.source_id], item)
                if left > item.next:
                    found[place] = left
            elif (version := self._refused(item)) is not None:
                found[place] = version + 1
        return found

    def _refused(self, item: SourceOffset) -> int | None:
        """The next version of a table, if it is one that stops the pipeline."""
        versions = self._lake.registry.read_with(
            lambda reader: versions_between(reader, item.source_id, item.next, item.next + 1, 1)
        )
        stops = versions and versions[0].operation not in (_APPEND, *_WITHOUT_ROWS)
        return versions[0].version if stops else None

    def _stopped(self, what: str, remedy: str) -> PipelineStopped:
        return PipelineStopped(what, on=self._record.shown, remedy=remedy)
