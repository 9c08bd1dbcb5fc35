"""Running a pipeline over records again, or over those before its first one.

What has landed already is replaced by its provenance columns. Without them it could only land twice, and is refused;
then only what lies directly before the first record that has landed can be backfilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lakebook.errors import InvalidPipeline, OffsetBeyondWatermark, PipelineBusy, PipelineStopped
from lakebook.lake.inserting import one_clear_error
from lakebook.lake.lake import Lake
from lakebook.lake.rewriting import replacing
from lakebook.lake.steps import Steps
from lakebook.pipelines.definitions import Definition
from lakebook.pipelines.planning import Planner
from lakebook.pipelines.running import Batch, Replacing, Runner, target_of
from lakebook.pipelines.sources import Sources
from lakebook.pipelines.turns import Turn
from lakebook.registry.pipelines import (
    TOPIC,
    BatchLanded,
    ClaimLost,
    Landing,
    PipelineRecord,
    SourceOffset,
    SourceRange,
    land_backfill,
    offsets_of,
    pipelines_into,
    require_turn,
)
from lakebook.registry.tables import TableRecord
from lakebook.registry.transactions import Transaction
from lakebook.spark.pipelines import PROVENANCE
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.ranges import EARLIEST, Places, offset_of, partitions_of, places_by_partition

if TYPE_CHECKING:
    from lakebook.spark.types import SparkSession


@dataclass(frozen=True)
class BackfillReport:
    """What a backfill did: the records it read, and whether they took the place of rows that were there."""

    pipeline: str
    topic: str
    ranges: dict[int, tuple[int, int]]
    records: int
    rows: int
    dead: int
    replaced: bool
    version: int | None


class Backfill:
    """One range of a topic of a pipeline, from places to before others; by default all that it still has."""

    def __init__(self, lake: Lake, metadata: MetadataStore, record: PipelineRecord, definition: Definition) -> None:
        self._lake = lake
        self._metadata = metadata
        self._record = record
        self._definition = definition
        self._planner = Planner(lake, metadata, record, definition)
        self._sources = Sources(lake, metadata, self._planner)

    def run(self, spark: SparkSession, topic: str | None, start: Places, end: Places | None) -> BackfillReport:
        """Run the transformation over the range, and land it as one change."""
        if not self._definition.of_topics:
            raise InvalidPipeline(
                "its sources are tables", on=self._record.shown, remedy="Delete it and make it anew from the beginning"
            )
        name = self._topic(topic)
        with Turn(self._lake, self._record) as turn, ExitStack() as held:
            ranges, replaces = self._ranges(name, start, end)
            if not ranges:
                return BackfillReport(self._record.name, name, {}, 0, 0, 0, False, None)
            with one_clear_error(target_of(self._lake, self._record)):
                return self._land(spark, turn, name, ranges, replaces, held)

    def _topic(self, topic: str | None) -> str:
        names = [source.name for source in self._definition.sources]
        if topic is None and len(names) == 1:
            return names[0]
        if topic is None or topic not in names:
            raise InvalidPipeline(
                "which of its topics is meant is not said", on=self._record.shown, remedy=f"Name one of {names}"
            )
        return topic

    # --- which records -------------------------------------------------------------

    def _ranges(self, topic: str, start: Places, end: Places | None) -> tuple[list[SourceRange], bool]:
        """The ranges, and whether they have landed and are to be replaced."""
        partitions = partitions_of(self._metadata, topic)
        stands = self._stands(topic)
        starts = places_by_partition(start, EARLIEST, partitions, topic)
        ends = None if end is None else places_by_partition(end, EARLIEST, partitions, topic)
        found: list[SourceRange] = []
        kinds: set[bool] = set()
        for number, partition in partitions.items():
            if number not in stands:
                continue
            item = stands[number]
            first = offset_of(self._lake, self._metadata, partition, starts[number])
            # By default up to what has landed already; with provenance, all of that too.
            default = item.next if self._definition.provenance else item.first
            last = default if ends is None else offset_of(self._lake, self._metadata, partition, ends[number])
            if first < last:
                kinds.add(self._check(topic, item, first, last))
                found.append(SourceRange(TOPIC, item.source_id, number, first, last))
        if len(kinds) > 1:
            raise InvalidPipeline(
                "some of the partitions have landed there, and others have not",
                on=self._record.shown,
                remedy="Backfill them one after the other, by ranges of their own",
            )
        return found, True in kinds

    def _stands(self, topic: str) -> dict[int, SourceOffset]:
        found = self._metadata.get_topic(topic)
        if found is None:
            raise PipelineStopped("its topic was deleted", on=self._record.shown)
        return {item.partition: item for item in self._planner.offsets() if item.source_id == found.id}

    def _check(self, topic: str, item: SourceOffset, first: int, last: int) -> bool:
        """Whether a range has landed; one that can be neither replaced nor added is refused."""
        place = f"{topic}/{item.partition}"
        if last > item.next:
            raise OffsetBeyondWatermark(
                f"the records from {item.next} on have not landed yet", on=place, remedy="Run the pipeline for them"
            )
        if last == item.first:
            return False
        if not self._definition.provenance:
            raise InvalidPipeline(
                f"the records {max(first, item.first)} to {last - 1} of {place} have landed, and would land twice",
                on=self._record.shown,
                remedy=f"End the range at {item.first}, or make a pipeline with provenance, whose rows can be replaced",
            )
        if first < item.first:
            raise InvalidPipeline(
                f"the range {first} to {last - 1} of {place} has landed only in part",
                on=self._record.shown,
                remedy=f"Backfill {first} to {item.first - 1} first, and the rest by a second range",
            )
        return True

    # --- landing -------------------------------------------------------------------

    def _land(
        self, spark: SparkSession, turn: Turn, topic: str, ranges: list[SourceRange], replaces: bool, held: ExitStack
    ) -> BackfillReport:
        target = target_of(self._lake, self._record)
        Runner(self._lake, self._metadata, self._record, self._definition).check_transformation(spark)
        batch = Batch(self._lake, self._record, self._definition, target, Steps(self._lake.clock))
        if replaces:
            self._refuse_others(target)
            # A pipeline's name, like a topic's, has neither quotes nor backslashes.
            mine = f" AND \"pipeline\" = '{self._record.name}'"
            batch.replace(
                self._replacing(topic, ranges, PROVENANCE[:3]),
                self._replacing(topic, ranges, ("topic", "partition", "offset"), mine),
            )
        frame, expected = self._sources.read(spark, ranges, held)
        landing = batch.write(frame, expected, held)

        def land(transaction: Transaction, found: Landing) -> None:
            if replaces:
                # The pipeline may be another one by now, or gone, and its rows those of another.
                require_turn(transaction, self._record.id, turn.token)
            else:
                land_backfill(transaction, self._record, turn.token, ranges, found)

        try:
            version = batch.commit(land)
        except ClaimLost:
            raise PipelineBusy(
                "another process has run or changed it meanwhile; nothing was backfilled",
                on=self._record.shown,
                remedy="Begin again",
            ) from None
        except BatchLanded:
            raise InvalidPipeline(
                "the same records were backfilled by somebody else meanwhile", on=self._record.shown
            ) from None
        return BackfillReport(
            self._record.name,
            topic,
            {item.partition: (item.start, item.end) for item in ranges},
            landing.records,
            landing.rows,
            landing.dead,
            replaces,
            version,
        )

    def _refuse_others(self, target: TableRecord) -> None:
        """Refuse to replace rows where another pipeline has put rows of the same records."""
        own = {item.source_id for item in self._planner.offsets()}
        for other in self._lake.registry.read_with(lambda reader: pipelines_into(reader, target.id)):
            theirs = self._lake.registry.read_with(lambda reader: offsets_of(reader, other.id))  # noqa: B023
            if other.id != self._record.id and own & {item.source_id for item in theirs if item.kind == TOPIC}:
                raise InvalidPipeline(
                    f"{other.shown} puts rows of the same topic into {target.shown}, which would be removed",
                    on=self._record.shown,
                    remedy="Let each of them have a table of its own",
                )

    def _replacing(self, topic: str, ranges: list[SourceRange], columns: Sequence[str], also: str = "") -> Replacing:
        """What begins to replace the rows of these records in a table that has such columns."""
        named, numbered, placed = columns
        parts = [
            f'("{numbered}" = {item.partition} AND "{placed}" >= {item.start} AND "{placed}" < {item.end})'
            for item in ranges
        ]
        where = f"\"{named}\" = '{topic}' AND ({' OR '.join(parts)}){also}"
        return lambda table, writing: replacing(self._lake, table, where, writing=writing)
