"""Running a pipeline: one batch after the other, each of which lands as a whole and once.

A batch is planned, read, decoded, transformed and written like an insert. One transaction then makes the files
visible, those of the dead letters too, and moves the offsets of the sources over what was read. Whoever dies before
it has done nothing; whoever runs the same batch a second time finds the offsets moved, and its files are removed.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lakebook import failpoints
from lakebook.clock import Enough, never
from lakebook.errors import (
    CommitOutcomeUnknown,
    InvalidPipeline,
    LakebookError,
    PipelineStopped,
    ReadFailed,
    SparkUnsuitable,
)
from lakebook.iceberg.schemas import schema_from
from lakebook.iceberg.staging import spark_type
from lakebook.lake.attempts import Attempt
from lakebook.lake.inserting import counted, insert_data, one_clear_error, published
from lakebook.lake.lake import Lake
from lakebook.lake.properties import TARGET_SIZE
from lakebook.lake.rewriting import Replaced
from lakebook.lake.steps import Steps
from lakebook.lake.table import Table
from lakebook.pipelines.definitions import DEAD_LETTER, Definition, decoder_of, definition_from
from lakebook.pipelines.planning import Ends, Planner
from lakebook.pipelines.sources import Sources
from lakebook.pipelines.turns import Turn
from lakebook.registry.pipelines import (
    ACTIVE,
    PAUSED,
    STOPPED,
    AlreadyPlanned,
    BatchLanded,
    BatchRecord,
    ClaimLost,
    Landing,
    PipelineRecord,
    land_batch,
    note_failure,
    own_planned_batch,
    pipeline_by_id,
    plan_batch,
    require_turn,
    stop_pipeline,
)
from lakebook.registry.table_files import Committed, NewFile, TableChange
from lakebook.registry.tables import GET_TABLE_BY_ID, TableRecord, current_table, table_from
from lakebook.registry.transactions import Transaction
from lakebook.spark import frames
from lakebook.spark import pipelines as spark_pipelines
from lakebook.spark.session import reason_of, require_alive
from lakebook.streams.metadata_store import MetadataStore

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession

LOG = logging.getLogger("lakebook.pipelines")

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 300.0
_JITTER = 0.2


@dataclass(frozen=True)
class BatchReport:
    """What one batch did."""

    pipeline: str
    batch: int
    records: int
    rows: int
    dead: int
    files: int
    bytes: int
    version: int | None
    seconds: float


@dataclass
class RunReport:
    """What a run of a pipeline did."""

    pipeline: str
    batches: int = 0
    records: int = 0
    rows: int = 0
    dead: int = 0
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    #: Batches that somebody else landed first.
    lost: int = 0
    last: BatchReport | None = field(default=None)

    def add(self, batch: BatchReport) -> None:
        """Count a batch."""
        self.batches += 1
        self.records += batch.records
        self.rows += batch.rows
        self.dead += batch.dead
        self.files += batch.files
        self.bytes += batch.bytes
        self.last = batch


def pause_after(failures: int) -> float:
    """Seconds to wait after so many failures in a row: ever more, up to a limit, and not the same for all."""
    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(failures - 1, 30)) if failures else 0.0
    return longest * random.uniform(1 - _JITTER, 1)  # noqa: S311 - no secret


#: Told of how many records are done, of how many, and what is done now.
Progress = Callable[[int, int | None, str], None]


def no_progress(done: int, total: int | None, step: str) -> None:
    """Tell nobody."""


class Runner:
    """Runs one pipeline in this process."""

    def __init__(self, lake: Lake, metadata: MetadataStore, record: PipelineRecord, definition: Definition) -> None:
        self._lake = lake
        self._metadata = metadata
        self._record = record
        self._definition = definition
        self.planner = Planner(lake, metadata, record, definition)
        self._sources = Sources(lake, metadata, self.planner)
        self._checked = False

    def run(self, spark: SparkSession, progress: Progress = no_progress, enough: Enough = never) -> RunReport:
        """Run batches until everything has landed that is there now; what comes meanwhile is for the next run."""
        clock = self._lake.clock
        begun = clock.monotonic()
        report = RunReport(self._record.name)
        # That it rests is no reason to stop it.
        self._require_active()
        turn = Turn(self._lake, self._record)
        try:
            with turn:
                # What it knew when it was made may have been changed before it had the turn.
                self._know(self._state_of())
                ends = self.planner.ends()
                total = self.planner.waiting(ends)
                while not enough() and self._state() == ACTIVE:
                    progress(report.records, total, "")
                    if not self._run_one(spark, turn, ends, report):
                        break
                progress(report.records, total, "")
        except PipelineStopped as error:
            if self._stop(turn, str(error)):
                raise
            report.lost += 1
        report.seconds = round(clock.monotonic() - begun, 6)
        return report

    def _stop(self, turn: Turn, text: str) -> bool:
        """Stop the pipeline; whether it was this one's to stop."""
        try:
            self._lake.registry.write(lambda transaction: stop_pipeline(transaction, self._record, turn.token, text))
        except ClaimLost:
            LOG.info("another process has taken over %s, where this one would have stopped it", self._record.name)
            return False
        return True

    def _state_of(self) -> PipelineRecord:
        return self._lake.registry.read_with(lambda reader: pipeline_by_id(reader, self._record.id, self._record.name))

    def _know(self, record: PipelineRecord) -> None:
        """Go by what the pipeline is by this record."""
        self._record, self._definition = record, definition_from(record.definition)
        self.planner = Planner(self._lake, self._metadata, record, self._definition)
        self._sources = Sources(self._lake, self._metadata, self.planner)

    def _state(self) -> str:
        """In which state it is now: it may be paused between two batches."""
        self._record = self._state_of()
        return self._record.state

    def _require_active(self) -> None:
        self._state()
        record = self._record
        if record.state == STOPPED:
            raise PipelineStopped(
                f"it has stopped ({record.last_error})", on=record.shown, remedy="Mend the cause, then resume it"
            )
        if record.state == PAUSED:
            raise PipelineStopped("it is paused", on=record.shown, remedy="Resume it")

    def _run_one(self, spark: SparkSession, turn: Turn, ends: Ends, report: RunReport) -> bool:
        """Run the next batch; whether there was one."""
        try:
            batch = self._next(turn, ends)
            if batch is None:
                return False
            failpoints.reach("pipeline.planned")
            with one_clear_error(self._target()):
                done = self._once(spark, batch)
            if done is None:
                report.lost += 1
                LOG.info("another process has landed batch %s of %s first", batch.number, self._record.name)
            else:
                report.add(done)
        except BatchLanded:
            # Between the look at the offsets and the plan: it looks again.
            report.lost += 1
        except ClaimLost:
            LOG.info("another process has taken over %s", self._record.name)
            return False
        except (PipelineStopped, SparkUnsuitable):
            # That Spark cannot do it is a matter of this process: others may run the pipeline on theirs at once.
            raise
        except LakebookError as error:
            require_alive(spark, error)
            self._note(turn, error)
            raise
        return True

    def _once(self, spark: SparkSession, batch: BatchRecord) -> BatchReport | None:
        try:
            return self._run_batch(spark, batch)
        except BatchLanded:
            return None

    def _note(self, turn: Turn, error: LakebookError) -> None:
        text = str(error)

        def work(transaction: Transaction) -> None:
            # What fails where somebody else goes on is no failure of the pipeline.
            require_turn(transaction, self._record.id, turn.token)
            failures = pipeline_by_id(transaction, self._record.id, self._record.name).failures
            note_failure(transaction, self._record.id, text, pause_after(failures + 1))

        try:
            self._lake.registry.write(work)
        except ClaimLost:
            LOG.info("another process has taken over %s", self._record.name)
        except LakebookError as other:
            LOG.warning("%s failed, and that could not be written down (%s)", self._record.name, other)

    def _next(self, turn: Turn, ends: Ends) -> BatchRecord | None:
        """The batch that is planned already, whoever planned it, or a new one."""
        registry, pipeline = self._lake.registry, self._record
        found = registry.read_with(lambda reader: own_planned_batch(reader, pipeline, turn.token))
        if found is not None:
            return found
        planned = self.planner.plan(ends)
        if not planned.ranges:
            return None
        try:
            return registry.write(
                lambda transaction: plan_batch(transaction, pipeline.id, turn.token, planned.ranges, planned.records)
            )
        except AlreadyPlanned as already:
            return already.batch

    def _target(self) -> TableRecord:
        return target_of(self._lake, self._record)

    # --- one batch -----------------------------------------------------------------

    def _run_batch(self, spark: SparkSession, batch: BatchRecord) -> BatchReport:
        clock, definition = self._lake.clock, self._definition
        begun = clock.monotonic()
        steps = Steps(clock)
        with ExitStack() as held:
            self.check_transformation(spark)
            frame, expected = self._sources.read(spark, batch.ranges, held)
            made = Batch(self._lake, self._record, definition, self._target(), steps)
            landing = made.write(frame, expected, held)
            failpoints.reach("pipeline.written")
            version = made.commit(lambda transaction, found: land_batch(transaction, self._record, batch, found))
        failpoints.reach("pipeline.landed")
        seconds = round(clock.monotonic() - begun, 6)
        return BatchReport(
            self._record.name,
            batch.number,
            landing.records,
            landing.rows,
            landing.dead,
            landing.files,
            landing.size,
            version,
            seconds,
        )

    def check_transformation(self, spark: SparkSession) -> None:
        """Refuse a transformation that cannot be run, or that is not row by row."""
        if self._checked:
            return
        if self._definition.of_topics:
            nothing = spark_pipelines.no_records(spark)
        else:
            table = self.planner.table(self.planner.offsets()[0].source_id)
            nothing = frames.empty(spark, spark_type(self._lake.shape_of(table, table.schema_version).schema))
        tried(nothing, self._definition)
        self._checked = True


def target_of(lake: Lake, record: PipelineRecord) -> TableRecord:
    """The table that a pipeline fills, as it is now."""
    row = lake.registry.one(GET_TABLE_BY_ID, record.target_id)
    if row is None:
        raise PipelineStopped("its target was dropped", on=record.shown, remedy="Delete the pipeline, or make it anew")
    return table_from(row)


def tried(nothing: DataFrame, definition: Definition) -> DataFrame:
    """What a definition makes of no records; refused if it is not made of them row by row, each with its provenance."""
    decoder = decoder_of(definition)
    watched, _ = spark_pipelines.observing(spark_pipelines.decoded(nothing, decoder))
    if definition.of_topics:
        rows = spark_pipelines.good_rows(watched, decoder, provenance=definition.provenance)
    else:
        rows = spark_pipelines.without_reason(watched)
    made = spark_pipelines.transformed(rows, definition.sql, definition.function)
    spark_pipelines.check_row_wise(made)
    missing = [name for name in spark_pipelines.PROVENANCE if definition.provenance and name not in made.columns]
    if missing:
        raise InvalidPipeline(
            f"the transformation does not give {', '.join(missing)}",
            on="pipeline",
            remedy="Select them from `source`, as they are: by them rows are replaced when they are made again",
        )
    return made


@dataclass
class _Part:
    """What a batch does to one table: the target, or that of the dead letters."""

    table: TableRecord
    attempt: Attempt
    files: list[NewFile]
    replaced: Replaced | None = None
    #: Rows among them that were there before.
    stayed: int = 0

    def change(self, summary: Mapping[str, str]) -> TableChange | None:
        """The change of the table; none if there is nothing to change."""
        if self.replaced is not None:
            return self.replaced.change(self.files, summary)
        return TableChange("append", self.files, (), summary) if self.files else None

    @property
    def made(self) -> int:
        """How many rows are new."""
        return sum(file.row_count for file in self.files) - self.stayed


#: Begins to replace rows of a table, as it is by then.
Replacing = Callable[[TableRecord, Mapping[str, str]], AbstractContextManager[Replaced]]


class Batch:
    """One batch at work: the files it makes, and the transaction in which they land."""

    def __init__(
        self, lake: Lake, record: PipelineRecord, definition: Definition, target: TableRecord, steps: Steps
    ) -> None:
        self._lake = lake
        self._record = record
        self._definition = definition
        self._table = target
        self._steps = steps
        self._target: _Part | None = None
        self._dead: _Part | None = None
        self._replacing: Replacing | None = None
        self._replacing_dead: Replacing | None = None
        self._landing = Landing(0, 0, 0, 0, 0)

    def replace(self, rows: Replacing, dead: Replacing) -> None:
        """Let the rows that it makes take the place of others, in the target and among the dead letters."""
        self._replacing, self._replacing_dead = rows, dead

    # --- writing -------------------------------------------------------------------

    def write(self, frame: DataFrame, expected: int, held: ExitStack) -> Landing:
        """Write what is made of the records; every one of them has to have been read."""
        definition = self._definition
        decoded = spark_pipelines.decoded(frame, decoder_of(definition))
        watched, seen = spark_pipelines.observing(decoded)
        rows = self._rows(watched)
        if definition.evolve:
            self._table = _evolved(self._lake, self._table, rows)
        writing = {} if definition.target_file_size is None else {TARGET_SIZE: str(definition.target_file_size)}
        self._target = self._written(self._table, rows, self._replacing, writing, held)
        # Where nothing was written, or only what stays, Spark may have found out without a look at the records.
        certain = bool(self._target.files) and self._replacing is None
        records, dead = spark_pipelines.observed(seen) if certain else spark_pipelines.counted(decoded)
        if records != expected:
            # A job that samples rows before it sorts them has them counted twice.
            records, dead = spark_pipelines.counted(decoded)
        if records != expected:
            raise ReadFailed(
                f"{records} records were read where there are {expected}",
                on=self._record.shown,
                remedy="The batch is tried again; run `lakebook verify` if that does not help",
            )
        if dead or (self._replacing_dead is not None and self._dead_letters() is not None):
            self._write_dead(decoded, dead, held)
        files = [*self._target.files, *(self._dead.files if self._dead is not None else ())]
        size = sum(file.file_size for file in files)
        self._landing = Landing(records, self._target.made, dead, len(files), size)
        return self._landing

    def _rows(self, decoded: DataFrame) -> DataFrame:
        definition = self._definition
        if definition.of_topics:
            rows = spark_pipelines.good_rows(decoded, decoder_of(definition), provenance=definition.provenance)
        else:
            rows = spark_pipelines.without_reason(decoded)
        return spark_pipelines.transformed(rows, definition.sql, definition.function)

    def _written(
        self,
        table: TableRecord,
        rows: DataFrame,
        replacing: Replacing | None,
        writing: Mapping[str, str],
        held: ExitStack,
    ) -> _Part:
        """Write rows, and with them those that stay of the files that end."""
        if replacing is None:
            attempt = held.enter_context(Attempt(self._lake, table, writing=writing))
            return _Part(table, attempt, insert_data(self._lake, table, attempt, rows, self._steps))
        replaced = held.enter_context(replacing(table, writing))
        every, rest = replaced.with_rest(rows)
        files = insert_data(self._lake, table, replaced.attempt, every, self._steps, replaced.schema_version)
        return _Part(table, replaced.attempt, files, replaced, 0 if rest is None else rest.count())

    def _write_dead(self, decoded: DataFrame, dead: int, held: ExitStack) -> None:
        if dead and self._definition.bad_records != DEAD_LETTER:
            example = spark_pipelines.first_dead(decoded)
            raise PipelineStopped(
                f"{dead} records do not fit, one of them at {example}",
                on=self._record.shown,
                remedy="Alter its schema, or alter it to bad_records='dead_letter', and resume it",
            )
        table = self._dead_letters()
        if table is None:
            raise PipelineStopped(
                "its table of dead letters was dropped", on=self._record.shown, remedy="Make the pipeline anew"
            )
        rows = spark_pipelines.dead_rows(decoded, self._record.name)
        self._dead = self._written(table, rows, self._replacing_dead, {}, held)
        if self._dead.made != dead:
            raise ReadFailed(f"{self._dead.made} dead letters were written for {dead} records", on=self._record.shown)

    def _dead_letters(self) -> TableRecord | None:
        row = self._lake.registry.one(GET_TABLE_BY_ID, self._record.dead_letters_id or 0)
        return None if row is None else table_from(row)

    # --- landing -------------------------------------------------------------------

    def commit(self, land: Callable[[Transaction, Landing], None]) -> int | None:
        """Make all files visible and move the offsets, in one transaction; the target's new version, if it has one."""
        assert self._target is not None
        summary = {"lakebook.pipeline": self._record.name}
        changes = [(part, part.change(summary)) for part in (self._target, self._dead) if part is not None]
        wanted = [(part, change) for part, change in changes if change is not None]
        if not wanted:
            with self._steps.step("commit"):
                self._lake.registry.write(lambda transaction: land(transaction, self._landing))
            return None
        (first, change), *others = wanted
        beside = [(part, part.attempt.prepared(other)) for part, other in others]
        found: list[Committed] = []

        def within(transaction: Transaction) -> None:
            found.clear()
            for _, own in wanted:
                if own.check is not None:
                    own.check(transaction)
            version = current_table(transaction, self._table).version + 1 if first is self._target else None
            land(transaction, replace(self._landing, version=version))
            found.extend(part.attempt.commit_within(transaction, replace(other, check=None)) for part, other in beside)

        try:
            with self._steps.step("commit"):
                committed = first.attempt.commit(replace(change, check=within))
        except CommitOutcomeUnknown:
            for part, _ in beside:
                part.attempt.outcome_unknown = True
            raise
        for (part, other), done in zip(beside, found, strict=True):
            part.attempt.committed = done
            self._report(part, other, done, Steps(self._lake.clock))
        self._report(first, change, committed, self._steps)
        return committed.version if first is self._target else None

    def _report(self, part: _Part, change: TableChange, committed: Committed, steps: Steps) -> None:
        published(self._lake, part.table, counted(self._lake, part.table, part.attempt, change, committed, steps))


def _evolved(lake: Lake, target: TableRecord, frame: DataFrame) -> TableRecord:
    """The target with the columns that a frame has and it has not, and with wider types where they are needed."""
    table = Table(lake, target)
    try:
        wanted = schema_from(frame)
    except LakebookError:
        raise
    except Exception as error:
        raise ReadFailed(f"the columns cannot be told ({reason_of(error)})", on=target.shown) from error
    present = {item.name: item for item in table.schema.fields}
    with table.update_schema() as update:
        for item in wanted.fields:
            known = present.get(item.name)
            if known is None:
                update.add_column((item.name,), item.field_type)
            elif known.field_type != item.field_type and _is_wider(known.field_type, item.field_type):
                update.widen_column((item.name,), item.field_type)
    return table.record


def _is_wider(present: Any, wanted: Any) -> bool:
    return (str(present), str(wanted)) in {("int", "long"), ("float", "double")}
