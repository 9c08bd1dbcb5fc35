"""Overwriting, deleting and replacing: the same transaction as an insert, which also ends files.

A change works on the files of one version. It conflicts with another if that one has ended a
file it works on or has deleted rows of it, or if both overwrite the same rows; then nothing happens
and the error says that it can be repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lakebook.errors import FilesChanged, InvalidInput, InvalidTable, SparkUnsuitable
from lakebook.iceberg.partitioning import in_partition
from lakebook.iceberg.pruning import compile_may_match, compile_must_match
from lakebook.lake.attempts import Attempt
from lakebook.lake.inserting import (
    InsertReport,
    check_frame,
    check_properties,
    insert_data,
    nothing_done,
    one_clear_error,
    report,
)
from lakebook.lake.lake import Lake
from lakebook.lake.leasing import Lease, acquire
from lakebook.lake.planning import Plan, files_of, known_bounds, make_plan
from lakebook.lake.reading import read_frame, rows_left
from lakebook.lake.steps import Steps
from lakebook.names import shown
from lakebook.predicates import Always, fields_of
from lakebook.registry.file_stats import stats_of_files
from lakebook.registry.inserts import REWRITE
from lakebook.registry.table_files import (
    NewFile,
    PlannedFile,
    TableChange,
    added_by_overwrites,
    chunks,
    files_by_path,
)
from lakebook.registry.tables import TableRecord
from lakebook.registry.transactions import Transaction
from lakebook.spark import frames

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession


def overwrite(
    lake: Lake,
    table: TableRecord,
    frame: DataFrame,
    where: Any = None,
    partition: Mapping[str, Any] | None = None,
    properties: Mapping[str, str] | None = None,
) -> InsertReport:
    """Replace the rows of a predicate, of a partition, or all, by those of a frame."""
    if where is not None and partition is not None:
        raise InvalidInput("a predicate and a partition were given; only one can be", on=table.shown)
    summary = check_properties(properties)
    steps = Steps(lake.clock)
    with one_clear_error(table), replacing(lake, table, where, partition) as replaced:
        attempt = replaced.attempt
        rows, _ = replaced.with_rest(frame)
        files = insert_data(lake, table, attempt, rows, steps, replaced.schema_version)
        if replaced.wanted is not None:
            _require_partition(table, files, replaced.wanted)
        change = replaced.change(files, summary)
        if change is None:
            return nothing_done(table, "overwrite", attempt.commit_id, steps)
        with steps.step("commit"):
            committed = attempt.commit(change)
        return report(lake, table, attempt, change, committed, steps)


@dataclasses.dataclass(frozen=True)
class Replaced:
    """Rows of a predicate, or of a partition, that are being replaced: which files end, and which rows of them stay."""

    #: Declared before anything was looked at.
    attempt: Attempt
    lease: Lease
    plan: Plan
    whole: Sequence[PlannedFile]
    partly: Sequence[PlannedFile]
    #: Tells the files of the partition; none where a predicate was given.
    wanted: Callable[[Any], bool] | None = None

    @property
    def schema_version(self) -> int:
        """The columns that the new files have to have: those of the rows that stay."""
        return self.lease.schema_version

    def with_rest(self, frame: DataFrame) -> tuple[DataFrame, DataFrame | None]:
        """New rows with those that stay of the files that end; and the latter alone."""
        # Judged by itself: beside the rows that stay, its types would be brought into theirs.
        shaped = check_frame(self.plan.lake, self.plan.table, self.plan.shape, frame)
        rest = _remaining(frames.session_of(frame), self.plan, self.partly, self.lease)
        return (shaped if rest is None else frames.union([shaped, rest])), rest

    def change(self, files: Sequence[NewFile], summary: Mapping[str, str]) -> TableChange | None:
        """The change of the table, which refuses to land beside a rival; none if there is nothing to change."""
        ended = [file.id for file in (*self.whole, *self.partly)]
        if not files and not ended:
            return None
        return TableChange(
            "overwrite",
            files,
            ended,
            summary,
            check=lambda transaction: _refuse_rivals(transaction, self.plan, self.wanted),
            read_version=self.lease.version,
        )


@contextmanager
def replacing(
    lake: Lake,
    table: TableRecord,
    where: Any = None,
    partition: Mapping[str, Any] | None = None,
    writing: Mapping[str, str] | None = None,
) -> Iterator[Replaced]:
    """Begin to replace the rows of a predicate, of a partition, or all: declared first, then looked up and pinned."""
    with _declared(lake, table, writing) as attempt, acquire(lake, table) as lease:
        plan = make_plan(lake, table, lease.version, lease.schema_version, where)
        if partition is None:
            yield Replaced(attempt, lease, plan, *_split(plan))
        else:
            wanted = _partition_record(plan, partition)
            yield Replaced(attempt, lease, plan, [file for file in plan if wanted(file)], [], wanted)


def _declared(lake: Lake, table: TableRecord, writing: Mapping[str, str] | None = None) -> Attempt:
    """An attempt at ending files: it is declared before it looks at a version, so that compactions give way."""
    return Attempt(lake, table, kind=REWRITE, writing=writing or {})


def _refuse_rivals(transaction: Transaction, plan: Plan, wanted: Callable[[Any], bool] | None) -> None:
    """Refuse to land beside another overwrite of the same rows, which began from the same version."""
    rivals = added_by_overwrites(transaction, plan.table.id, plan.version)
    if wanted is None:
        matching, fields = compile_may_match(plan.predicate), sorted(fields_of(plan.predicate))
        ids = sorted(file.id for file in rivals)
        stats = stats_of_files(transaction, plan.table.id, ids, fields)
        rivals = [file for file in rivals if matching(known_bounds(plan, file, stats, transaction))]
    else:
        rivals = [file for file in rivals if wanted(file)]
    if rivals:
        raise FilesChanged(
            "another overwrite of the same rows has landed meanwhile",
            on=plan.table.shown,
            remedy="Look at what it wrote, and repeat this one if it is still meant",
        )


def delete(
    lake: Lake,
    table: TableRecord,
    where: Any,
    spark: SparkSession | None = None,
    properties: Mapping[str, str] | None = None,
) -> InsertReport:
    """Delete the rows of a predicate. Files of which only some rows match are rewritten on Spark."""
    summary = check_properties(properties)
    steps = Steps(lake.clock)
    with one_clear_error(table), _declared(lake, table) as attempt, acquire(lake, table) as lease:
        plan = make_plan(lake, table, lease.version, lease.schema_version, where)
        whole, partly = _split(plan)
        files: list[NewFile] = []
        if partly:
            if spark is None:
                raise SparkUnsuitable(
                    f"{len(partly)} files match only in part and have to be rewritten, which needs Spark",
                    on=table.shown,
                    remedy="Give spark=",
                )
            rest = _remaining(spark, plan, partly, lease)
            assert rest is not None
            files = insert_data(lake, table, attempt, rest, steps, lease.schema_version)
            # Nothing matched in the end: leave the files as they are.
            if sum(file.row_count for file in files) == rows_left(of_files(plan, partly), lease):
                partly, files = [], []
                lake.store.delete_folder(attempt.folder)
        if not whole and not partly:
            return nothing_done(table, "delete", attempt.commit_id, steps)
        change = TableChange(
            "delete" if not files else "overwrite",
            files,
            [file.id for file in (*whole, *partly)],
            summary,
            read_version=lease.version,
        )
        with steps.step("commit"):
            committed = attempt.commit(change)
        return report(lake, table, attempt, change, committed, steps)


def replace(
    lake: Lake,
    table: TableRecord,
    paths: Iterable[str],
    frame: DataFrame,
    properties: Mapping[str, str] | None = None,
) -> InsertReport:
    """Replace files by the same rows in other files, as a compaction does."""
    summary = check_properties(properties)
    steps = Steps(lake.clock)
    wanted = list(dict.fromkeys(paths))
    with one_clear_error(table), _declared(lake, table) as attempt, acquire(lake, table) as lease:
        rows = lake.registry.read_with(lambda reader: files_by_path(reader, wanted))
        own = {path for path, row in rows.items() if row["table_id"] == table.id and not row["content"]}
        strange = [path for path in wanted if path not in own]
        if strange or not wanted:
            raise InvalidInput(
                f"the table has no file {shown(strange[0])}" if strange else "no file was named", on=table.shown
            )
        files = insert_data(lake, table, attempt, frame, steps)
        plan = make_plan(lake, table, lease.version, lease.schema_version, None)
        ids = sorted(row["id"] for row in rows.values())
        require_same_rows(of_files(plan, files_of(plan, ids)), lease, files)
        change = TableChange("replace", files, ids, summary, read_version=lease.version)
        with steps.step("commit"):
            committed = attempt.commit(change)
        return report(lake, table, attempt, change, committed, steps)


def _split(plan: Plan) -> tuple[list[PlannedFile], list[PlannedFile]]:
    """The files of which every row matches, and those of which some may."""
    predicate = plan.predicate
    if isinstance(predicate, Always):
        return list(plan), []
    certain = compile_must_match(predicate)
    fields = sorted(fields_of(predicate))
    whole: list[PlannedFile] = []
    partly: list[PlannedFile] = []
    for chunk in chunks(plan):
        ids = sorted(file.id for file in chunk)
        stats = plan.lake.registry.read_with(lambda reader: stats_of_files(reader, plan.table.id, ids, fields))  # noqa: B023
        for file in chunk:
            (whole if certain(known_bounds(plan, file, stats)) else partly).append(file)
    return whole, partly


def _remaining(spark: SparkSession, plan: Plan, files: Sequence[PlannedFile], lease: Lease) -> DataFrame | None:
    """The rows of partly matching files that stay."""
    if not files:
        return None
    return frames.not_matching(read_frame(spark, of_files(plan, files), lease), plan.predicate)


def require_same_rows(plan: Plan, lease: Lease, files: Iterable[NewFile]) -> int:
    """Refuse files that have not as many rows as are left in those of a plan, which they replace; how many."""
    before, after = rows_left(plan, lease), sum(file.row_count for file in files)
    if before != after:
        raise InvalidTable(
            f"the files have {before} rows and their replacement {after}",
            on=plan.table.shown,
            remedy="A replacement changes no rows; use overwrite",
        )
    return after


def of_files(plan: Plan, files: Iterable[PlannedFile]) -> Plan:
    """A plan of all rows of some files: also of row groups that cannot match, for their rows stay."""
    every = tuple(dataclasses.replace(file, row_groups=None) for file in files)
    return dataclasses.replace(plan, predicate=Always(True), given=every)


def _partition_record(plan: Plan, partition: Mapping[str, Any]) -> Callable[[Any], bool]:
    """Tells whether a file is of a partition that is given by some of its fields, as they are shown."""
    spec, schema = plan.shape.spec, plan.schema
    names = [field.name for field in spec.fields]
    unknown = [name for name in partition if name not in names]
    if unknown or not partition:
        raise InvalidInput(
            f"it is not partitioned by {shown(unknown)}" if unknown else "no partition was named",
            on=plan.table.shown,
            remedy=f"Its partition fields are {names!r}",
        )

    def is_in(file: Any) -> bool:
        if file.spec_id != spec.spec_id:
            raise InvalidInput(
                "it has files of an earlier partition spec, which are not of one such partition",
                on=plan.table.shown,
                remedy="Overwrite by a predicate, or rewrite those files first",
            )
        return in_partition(spec, schema, file.partition_values, partition)

    return is_in


def _require_partition(table: TableRecord, files: Sequence[NewFile], wanted: Callable[[Any], bool]) -> None:
    for file in files:
        if not wanted(file):
            raise InvalidInput(
                f"rows of the partition {shown(file.partition_path)} are among those for another",
                on=table.shown,
                remedy="Filter the frame, or overwrite by a predicate",
            )
