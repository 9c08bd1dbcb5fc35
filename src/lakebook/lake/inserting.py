"""Inserting: rows of a Spark frame, of Arrow, or files that are there already.

The steps: reserve a commit row and a folder; stage the table's exact schema, as an Iceberg table
that only this insert knows; `insert_data`, in which Spark writes; measure sizes, checksums and
footers of what committed tasks wrote; and one transaction, with `update_table_files` and
`update_table_statistics`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from lakebook import failpoints
from lakebook.errors import FilesChanged, InsertFailed, InvalidFile, InvalidInput, InvalidTable, LakebookError
from lakebook.iceberg.publishing import SHOWN_BY
from lakebook.iceberg.schemas import as_spark_has, check_writable_from, schema_from
from lakebook.iceberg.staging import spark_type
from lakebook.lake.attempts import DATA, Attempt
from lakebook.lake.formats import FORMATS
from lakebook.lake.lake import Lake, TableShape, check_reachable
from lakebook.lake.leasing import READS
from lakebook.lake.steps import Steps
from lakebook.names import check_path, check_text, shown
from lakebook.registry.sweeps import same_sweep, sweeps
from lakebook.registry.table_files import Committed, NewFile, TableChange, require_unused
from lakebook.registry.tables import TableRecord
from lakebook.registry.transactions import Transaction
from lakebook.spark import frames
from lakebook.spark.session import check_session, reason_of

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame

_STEPS = ("stage", "insert_data", "measure", "commit", "update_table_files", "update_table_statistics")
PUBLISH = "publish"
_MOST_PROPERTIES = 100


@dataclass(frozen=True)
class InsertReport:
    """What an insert, or another change of a table's files, did."""

    table: str
    operation: str
    version: int
    rows: int
    files: int
    bytes: int
    commit_id: str
    removed_rows: int = 0
    removed_files: int = 0
    #: How long each step took.
    seconds: Mapping[str, float] = field(default_factory=dict)
    #: The Iceberg snapshot that covers the version, where the insert waited for it.
    snapshot_id: int | None = None


def check_properties(properties: Mapping[str, str] | None) -> dict[str, str]:
    """The properties that a caller attaches to a change, which a snapshot's summary will carry."""
    found = dict(properties or {})
    if len(found) > _MOST_PROPERTIES:
        raise InvalidTable(f"{len(found)} properties are too many", on="insert", remedy=f"Use {_MOST_PROPERTIES}")
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str) or not key:
            raise InvalidTable(f"{shown(key)}: {shown(value)} is no property", on="insert", remedy="Use texts")
        if key == SHOWN_BY:
            raise InvalidTable(f"the property {key} is Lakebook's own", on="insert", remedy="Choose another name")
        check_text("property", key)
        check_text("property", value)
    return found


def report(
    lake: Lake, table: TableRecord, attempt: Attempt, change: TableChange, committed: Committed, steps: Steps
) -> InsertReport:
    """What was done, which also goes to the metrics; published as the book is set."""
    return published(lake, table, counted(lake, table, attempt, change, committed, steps))


def counted(
    lake: Lake, table: TableRecord, attempt: Attempt, change: TableChange, committed: Committed, steps: Steps
) -> InsertReport:
    """What was committed, which also goes to the metrics."""
    seconds = {**steps.seconds, **committed.seconds}
    size = sum(file.file_size for file in change.added)
    lake.metrics.count_change(change.operation, committed.added_rows, len(change.added), size, seconds)
    return InsertReport(
        f"{table.namespace}.{table.name}",
        change.operation,
        committed.version,
        committed.added_rows,
        len(change.added),
        size,
        attempt.commit_id,
        committed.removed_rows,
        committed.removed_files,
        {name: round(seconds[name], 6) for name in _STEPS if name in seconds},
    )


def published(lake: Lake, table: TableRecord, done: InsertReport) -> InsertReport:
    """The report of a committed change, after it was published or left to the background."""
    steps = Steps(lake.clock)
    with steps.step(PUBLISH):
        snapshot_id = lake.changed(table, done.version)
    if snapshot_id is None:
        return done
    seconds = {**done.seconds, PUBLISH: round(steps.seconds[PUBLISH], 6)}
    return replace(done, seconds=seconds, snapshot_id=snapshot_id)


def nothing_done(table: TableRecord, operation: str, commit_id: str, steps: Steps) -> InsertReport:
    """The report of a change that had nothing to change: it makes no version."""
    return InsertReport(
        f"{table.namespace}.{table.name}", operation, table.version, 0, 0, 0, commit_id, seconds=steps.seconds
    )


@contextmanager
def one_clear_error(table: TableRecord) -> Iterator[None]:
    """Whatever Spark, Arrow or the disk say: the caller gets one error of ours."""
    try:
        yield
    except LakebookError:
        raise
    except Exception as error:
        raise InsertFailed(
            f"the rows could not be written ({reason_of(error)})",
            on=table.shown,
            remedy="Nothing of it is visible. Mend the cause and insert again",
        ) from error


# --- Spark ---------------------------------------------------------------------


def insert_frame(
    lake: Lake, table: TableRecord, frame: DataFrame, properties: Mapping[str, str] | None = None
) -> InsertReport:
    """Insert the rows of a Spark frame."""
    summary = check_properties(properties)
    steps = Steps(lake.clock)
    with one_clear_error(table), Attempt(lake, table) as attempt:
        files = insert_data(lake, table, attempt, frame, steps)
        if not files:
            return nothing_done(table, "append", attempt.commit_id, steps)
        change = TableChange("append", files, (), summary)
        with steps.step("commit"):
            committed = attempt.commit(change)
        return report(lake, table, attempt, change, committed, steps)


def insert_data(
    lake: Lake,
    table: TableRecord,
    attempt: Attempt,
    frame: DataFrame,
    steps: Steps,
    schema_version: int | None = None,
) -> list[NewFile]:
    """Write the rows of a frame into the attempt's folder, and measure the files."""
    shape = lake.shape_of(table, table.schema_version if schema_version is None else schema_version)
    check_reachable(lake)
    shaped = check_frame(lake, table, shape, frame)
    files = FORMATS[table.format].write(lake, attempt, shape, shaped, steps)
    if not files:
        # Its folder may be there still, with nothing in it.
        lake.store.delete_folder(attempt.folder)
    return files


def check_frame(lake: Lake, table: TableRecord, shape: TableShape, frame: DataFrame) -> DataFrame:
    """A frame with the columns of the table, or an error that says what does not fit."""
    if not hasattr(frame, "sparkSession"):
        raise InvalidInput(
            f"{shown(type(frame).__name__)} is not a Spark DataFrame",
            on=table.shown,
            remedy="Use insert_arrow for an Arrow table",
        )
    check_writable_from(as_spark_has(shape.schema), schema_from(frame))
    check_session(frames.session_of(frame), lake.store.warehouse)
    return frames.shaped(frame, spark_type(shape.schema))


# --- Arrow ---------------------------------------------------------------------


def insert_arrow(
    lake: Lake, table: TableRecord, data: pa.Table, properties: Mapping[str, str] | None = None
) -> InsertReport:
    """Insert an Arrow table, without Spark: one file per partition."""
    summary = check_properties(properties)
    steps = Steps(lake.clock)
    with one_clear_error(table), Attempt(lake, table) as attempt:
        shape = lake.shape_of(table, table.schema_version)
        with steps.step("insert_data"):
            files = write_arrow(lake, table, attempt, shape, data)
        failpoints.reach("insert.arrow_written")
        if not files:
            return nothing_done(table, "append", attempt.commit_id, steps)
        change = TableChange("append", files, (), summary)
        with steps.step("commit"):
            committed = attempt.commit(change)
        return report(lake, table, attempt, change, committed, steps)


# --- files that are there ------------------------------------------------------


def write_arrow(lake: Lake, table: TableRecord, attempt: Attempt, shape: TableShape, data: pa.Table) -> list[NewFile]:
    """Write rows into the attempt's folder without Spark, and measure the files."""
    return FORMATS[table.format].write_arrow(lake, attempt, shape, data)


def add_files(
    lake: Lake, table: TableRecord, paths: Sequence[str], properties: Mapping[str, str] | None = None
) -> InsertReport:
    """Take files that lie in the warehouse already. If it fails nothing is deleted."""
    summary = check_properties(properties)
    if not isinstance(paths, Sequence) or isinstance(paths, (str, bytes)):
        raise InvalidFile(f"{shown(paths)} is not a list of paths", on=table.shown)
    relative = [check_path(path) for path in paths]
    if len(set(relative)) != len(relative):
        raise InvalidFile("a path is named twice", on=table.shown)
    steps = Steps(lake.clock)
    shape = lake.shape_of(table, table.schema_version)
    with one_clear_error(table), Attempt(lake, table, writes=False) as attempt:
        seen = lake.registry.read_with(sweeps)
        lake.registry.read_with(lambda reader: require_unused(reader, relative))
        with steps.step("measure"):
            files = _adopted(lake, table, shape, relative) if relative else []
        if not files:
            return nothing_done(table, "append", attempt.commit_id, steps)
        change = TableChange(
            "append",
            files,
            (),
            summary,
            foreign=True,
            check=lambda transaction: _require_same_sweep(transaction, table, seen),
        )
        with steps.step("commit"):
            committed = attempt.commit(change)
        return report(lake, table, attempt, change, committed, steps)


def _require_same_sweep(transaction: Transaction, table: TableRecord, seen: int) -> None:
    if not same_sweep(transaction, seen):
        raise FilesChanged("files were swept meanwhile", on=table.shown, remedy="Add the files again")


def _adopted(lake: Lake, table: TableRecord, shape: TableShape, paths: Sequence[str]) -> list[NewFile]:
    for path in paths:
        if path.startswith((f"{DATA}/", f"{READS}/")):
            raise InvalidFile("this folder is Lakebook's own", on=path, remedy="Lay the file elsewhere")
    lake.store.make_durable(paths)
    return FORMATS[table.format].adopt(lake, shape, paths)
