"""A pipeline as its users see it: what it is, how it stands, and running it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from lakebook.clock import Enough, never
from lakebook.errors import LakebookError, PipelineBusy, PipelineStopped
from lakebook.lake.lake import Lake
from lakebook.pages import PAGE_SIZE, Page, check_limit, page_of
from lakebook.pipelines.backfill import Backfill, BackfillReport
from lakebook.pipelines.definitions import Definition, definition_from
from lakebook.pipelines.running import Progress, Runner, RunReport, no_progress, pause_after
from lakebook.registry.pipelines import (
    ACTIVE,
    PAUSED,
    BatchRecord,
    PipelineRecord,
    delete_pipeline,
    list_batches,
    pipeline_by_id,
    set_state,
    skip_to,
)
from lakebook.registry.schema import MAX_BIGINT
from lakebook.registry.tables import GET_TABLE_BY_ID, table_from
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.ranges import EARLIEST, Places

if TYPE_CHECKING:
    from lakebook.spark.types import SparkSession

# How often a pipeline that runs on and on looks at its sources.
_LOOK = 0.2
_RATE_BATCHES = 20


@dataclass(frozen=True)
class SourceStatus:
    """How far a pipeline has come in one partition of a source; of a table, in its versions."""

    kind: str
    name: str
    partition: int
    first: int
    next: int
    end: int

    @property
    def lag(self) -> int:
        """How many records, or versions, it has not read yet."""
        return max(0, self.end - self.next)


@dataclass(frozen=True)
class PipelineDescription:
    """Everything there is to say about a pipeline."""

    name: str
    id: int
    state: str
    definition: Definition
    target: str
    dead_letters: str | None
    sources: tuple[SourceStatus, ...]
    #: Records, or versions of tables, that it has not read; none if a source is gone.
    lag: int | None
    records: int
    rows: int
    dead: int
    batches: int
    #: Records in a second, over its last batches; none before there are any.
    rate: float | None
    running: bool
    failures: int
    last_error: str | None
    failed_at: datetime | None
    retry_at: datetime | None
    landed_at: datetime | None
    created_at: datetime


class Pipeline:
    """One pipeline, by its name."""

    def __init__(self, lake: Lake, metadata: MetadataStore, record: PipelineRecord) -> None:
        self._lake = lake
        self._metadata = metadata
        self._record = record

    def __repr__(self) -> str:
        return f"Pipeline({self._record.name!r})"

    @property
    def name(self) -> str:
        """Its name."""
        return self._record.name

    @property
    def listed(self) -> PipelineRecord:
        """The pipeline's row as it was when it was last looked at."""
        return self._record

    @property
    def record(self) -> PipelineRecord:
        """The pipeline's row as it is now."""
        self._record = self._lake.registry.read_with(
            lambda reader: pipeline_by_id(reader, self._record.id, self._record.name)
        )
        return self._record

    @property
    def definition(self) -> Definition:
        """What it reads, what it makes of it, and how."""
        return definition_from(self._record.definition)

    def _runner(self) -> Runner:
        return Runner(self._lake, self._metadata, self.record, self.definition)

    # --- describing ----------------------------------------------------------------

    def describe(self) -> PipelineDescription:
        """Everything there is to say about it, with its lag as it is now."""
        record, definition = self.record, self.definition
        now = self._lake.clock.now_ms()
        try:
            sources = self._sources()
            lag: int | None = sum(item.lag for item in sources)
        except PipelineStopped:
            sources, lag = (), None  # One of them is gone.
        held = record.held_until
        return PipelineDescription(
            record.name,
            record.id,
            record.state,
            definition,
            self._table_name(record.target_id) or "(dropped)",
            self._table_name(record.dead_letters_id),
            sources,
            lag,
            record.record_count,
            record.row_count,
            record.dead_count,
            record.last_batch,
            self._rate(),
            record.holder is not None and held is not None and held.timestamp() * 1000 > now,
            record.failures,
            record.last_error,
            record.failed_at,
            record.retry_at,
            record.landed_at,
            record.created_at,
        )

    def _sources(self) -> tuple[SourceStatus, ...]:
        planner = self._runner().planner
        ends = planner.ends()
        topics = planner.topic_names() if self.definition.of_topics else {}
        found = []
        for item in planner.offsets():
            name = topics.get(item.source_id) or self._table_name(item.source_id) or str(item.source_id)
            end = ends.get((item.kind, item.source_id, item.partition), item.next)
            found.append(SourceStatus(item.kind, name, item.partition, item.first, item.next, end))
        return tuple(found)

    def _table_name(self, table_id: int | None) -> str | None:
        row = None if table_id is None else self._lake.registry.one(GET_TABLE_BY_ID, table_id)
        if row is None:
            return None
        table = table_from(row)
        return f"{table.namespace}.{table.name}"

    def _rate(self) -> float | None:
        landed = [item for item in self.batches(limit=_RATE_BATCHES) if item.landed_at is not None]
        if not landed:
            return None
        begun = min(item.planned_at for item in landed)
        ended = max(item.landed_at for item in landed if item.landed_at is not None)
        seconds = max((ended - begun).total_seconds(), 0.001)
        return round(sum(item.record_count for item in landed) / seconds, 1)

    def batches(self, *, limit: int = PAGE_SIZE, after: int | None = None) -> Page[BatchRecord]:
        """Its batches, the newest first; those that landed long ago are forgotten."""
        check_limit(limit)
        below = MAX_BIGINT if after is None else after
        found = self._lake.registry.read_with(lambda reader: list_batches(reader, self._record.id, below, limit + 1))
        return page_of(found, limit, lambda item: item.number)

    # --- changing ------------------------------------------------------------------

    def pause(self) -> None:
        """Let it rest: a batch that is at work lands, and no other begins."""
        self._set(PAUSED)

    def resume(self, *, skip_lost: bool = False) -> None:
        """Let it go on, after a pause or when what stopped it is mended.

        With `skip_lost` it goes on behind records that are gone, or behind a version of a source table that
        is no append.
        """
        if skip_lost:
            runner = self._runner()
            places = runner.planner.behind_what_is_lost()
            self._lake.registry.write(lambda transaction: skip_to(transaction, self._record.id, places))
        self._set(ACTIVE)

    def _set(self, state: str) -> None:
        self._lake.registry.write(lambda transaction: set_state(transaction, self._record.id, self._record.name, state))

    def delete(self) -> None:
        """Forget it, and what it pinned. Its target stays as it is."""
        self._lake.registry.write(lambda transaction: delete_pipeline(transaction, self._record.id, self._record.name))

    # --- running -------------------------------------------------------------------

    def run(self, spark: SparkSession, *, progress: Progress = no_progress, enough: Enough = never) -> RunReport:
        """Run until everything has landed that is there now. What comes meanwhile is for the next run.

        It may be killed anywhere, and run by two at once: each record lands once.
        """
        return self._runner().run(spark, progress, enough)

    def backfill(
        self,
        spark: SparkSession,
        *,
        topic: str | None = None,
        start: Places = EARLIEST,
        end: Places | None = None,
    ) -> BackfillReport:
        """Run it over a range of a topic that lies before its first record, or whose rows are replaced by provenance.

        `start` and `end` are places as `Topic.read` takes them. Without provenance columns, records that have
        landed are refused: they would land twice.
        """
        return Backfill(self._lake, self._metadata, self.record, self.definition).run(spark, topic, start, end)

    def follow(
        self,
        spark: SparkSession,
        *,
        interval: float = 1.0,
        records: int | None = None,
        stop: threading.Event | None = None,
        told: Callable[[RunReport | LakebookError], None] = lambda report: None,
        progress: Progress = no_progress,
    ) -> None:
        """Run on and on: a batch every `interval` seconds, or sooner when so many records wait; until `stop` is set.

        What fails is tried again after ever longer pauses; what cannot go on by itself raises.
        """
        ended = stop or threading.Event()
        failures = 0
        clock = self._lake.clock
        due = clock.monotonic()
        while not ended.is_set():
            try:
                if clock.monotonic() < due and not self._enough_wait(records):
                    ended.wait(min(_LOOK, max(0.001, due - clock.monotonic())))
                    continue
                due = clock.monotonic() + interval
                report = self.run(spark, progress=progress, enough=ended.is_set)
                failures = 0
                if report.batches:
                    told(report)
            except PipelineStopped:
                raise
            except LakebookError as error:
                told(error)
                if not isinstance(error, PipelineBusy):
                    failures += 1
                # By a count of its own: the registry may be what does not answer.
                due = clock.monotonic() + max(interval, pause_after(failures))

    def _enough_wait(self, records: int | None) -> bool:
        return records is not None and self.waits() >= records

    def waits(self) -> int:
        """How many records, or versions of tables, it has not read yet."""
        planner = self._runner().planner
        return planner.waiting(planner.ends())
