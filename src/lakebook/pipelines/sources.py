"""The records of a batch as a Spark frame: of topics by Spark's own Parquet reader, of tables the files of appends."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lakebook.errors import OffsetBelowLogStart, PipelineStopped
from lakebook.lake.lake import Lake, check_reachable
from lakebook.lake.leasing import acquire
from lakebook.lake.planning import files_of, make_plan
from lakebook.lake.reading import read_frame
from lakebook.lake.rewriting import of_files
from lakebook.pipelines.planning import Planner
from lakebook.registry.pipelines import TOPIC, SourceRange, files_added_between
from lakebook.spark import frames
from lakebook.spark.pipelines import no_records, of_topics
from lakebook.spark.session import check_spark
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.pinning import Pin
from lakebook.streams.ranges import Selection, select
from lakebook.streams.topic import frame_of

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession


class Sources:
    """Reads the ranges of batches. What it reads is pinned until the stack that it is given is closed."""

    def __init__(self, lake: Lake, metadata: MetadataStore, planner: Planner) -> None:
        self._lake = lake
        self._metadata = metadata
        self._planner = planner

    def read(self, spark: SparkSession, ranges: Iterable[SourceRange], held: ExitStack) -> tuple[DataFrame, int]:
        """The records of some ranges, and how many there have to be."""
        check_spark(spark, self._lake.store.warehouse)
        check_reachable(self._lake)
        wanted = list(ranges)
        if wanted[0].kind == TOPIC:
            return self._topics(spark, wanted, held)
        return self._tables(spark, wanted, held)

    def _topics(self, spark: SparkSession, ranges: list[SourceRange], held: ExitStack) -> tuple[DataFrame, int]:
        names = self._planner.topic_names()
        # What the pipeline pins is there, also below a log start that has moved on.
        pin = held.enter_context(Pin(self._lake, inherit=self._planner.lease))
        found: list[tuple[str, DataFrame]] = []
        number = 0
        for topic_id in sorted({item.source_id for item in ranges}):
            own = [item for item in ranges if item.source_id == topic_id]
            selection = self._selected(pin, names[topic_id], own)
            found.append((names[topic_id], frame_of(self._lake, spark, selection)))
            number += selection.record_count
        return of_topics(found) if found else no_records(spark), number

    def _selected(self, pin: Pin, topic: str, ranges: list[SourceRange]) -> Selection:
        try:
            return select(
                self._lake,
                self._metadata,
                pin,
                topic,
                {item.partition: item.start for item in ranges},
                {item.partition: item.end for item in ranges},
                [item.partition for item in ranges],
            )
        except OffsetBelowLogStart as error:
            # Only where retention does not wait: what was planned is gone, and no attempt will find it again.
            raise PipelineStopped(
                f"records of a batch that was planned are gone ({error})",
                on=f"topic {topic}",
                remedy="Resume with skip_lost to go on behind them",
            ) from None

    def _tables(self, spark: SparkSession, ranges: list[SourceRange], held: ExitStack) -> tuple[DataFrame, int]:
        found: list[DataFrame] = []
        number = 0
        for item in ranges:
            table = self._planner.table(item.source_id)
            lease = held.enter_context(acquire(self._lake, table, item.end - 1))
            plan = make_plan(self._lake, table, lease.version, lease.schema_version, None)
            ids = self._lake.registry.read_with(
                lambda reader: files_added_between(reader, table.id, item.start, item.end)  # noqa: B023 - called at once
            )
            files = list(files_of(plan, ids))
            number += sum(file.row_count for file in files)
            found.append(read_frame(spark, of_files(plan, files), lease))
        return frames.union(found), number
