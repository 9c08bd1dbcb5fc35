"""Reading a plan: with Spark through a staged table, or into Arrow with the stored footers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lakebook.errors import InvalidInput, LakebookError, ObjectNotFound, ObjectTruncated, ReadFailed, VersionExpired
from lakebook.iceberg.arrow_files import plain_schema, selected
from lakebook.lake.arrow_filter import expression_of
from lakebook.lake.footer_store import footers_for
from lakebook.lake.formats import FORMATS
from lakebook.lake.lake import check_reachable
from lakebook.lake.leasing import Lease
from lakebook.lake.measuring import PARQUET
from lakebook.lake.planning import Plan
from lakebook.names import shown
from lakebook.predicates import Always, fields_of
from lakebook.registry.table_files import PlannedFile, chunks
from lakebook.spark import frames
from lakebook.spark.session import check_session, reason_of

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession

_AT_ONCE = 64


def check_columns(columns: Sequence[str] | None, plan: Plan) -> None:
    """Refuse columns that the version does not have."""
    if columns is None:
        return
    names = {field.name for field in plan.schema.fields}
    if isinstance(columns, str) or not columns or [name for name in columns if name not in names]:
        unknown = [name for name in columns if name not in names] if not isinstance(columns, str) else columns
        raise InvalidInput(f"the table has no columns {shown(unknown)}", on=plan.table.shown)


# --- Spark ---------------------------------------------------------------------


def read_frame(spark: SparkSession, plan: Plan, lease: Lease, columns: Sequence[str] | None = None) -> DataFrame:
    """A DataFrame over exactly the files of a plan, right by field id at every depth, without deleted rows."""
    check_columns(columns, plan)
    check_session(spark, plan.lake.store.warehouse)
    lease.check()
    check_reachable(plan.lake)
    try:
        frame = FORMATS[plan.table.format].read(spark, plan, lease)
        lease.check()
        if not isinstance(plan.predicate, Always):
            frame = frames.matching(frame, plan.predicate)
        return frame if columns is None else frames.columns(frame, columns)
    except LakebookError:
        raise
    except Exception as error:
        raise ReadFailed(f"Spark cannot read it ({reason_of(error)})", on=plan.table.shown) from error


# --- Arrow ---------------------------------------------------------------------


def read_batches(plan: Plan, lease: Lease, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a plan, batch by batch; no footer is fetched from storage."""
    check_columns(columns, plan)
    wanted = _wanted_schema(plan, columns)
    keep = list(columns) if columns is not None else [field.name for field in plan.schema.fields]
    handler = FORMATS[plan.table.format]
    for chunk in _planned(plan, lease):
        # What a lost lease no longer pins may be gone from the registry too, and the plan be short of it.
        lease.check()
        with _pinned_files(lease):
            footers = footers_for(plan.lake, (file for file in chunk if file.file_type == PARQUET))
        for file in chunk:
            with _pinned_files(lease, file.file_path):
                for batch in handler.batches(plan, file, wanted, footers.get(file.file_path)):
                    rows = _filtered(plan, batch)
                    if rows.num_rows:
                        yield from rows.select(keep).to_batches()
    lease.check()


def rows_left(plan: Plan, lease: Lease) -> int:
    """How many rows the files of a plan have, without those that are deleted; only files of deletes are read."""
    number = 0
    for chunk in _planned(plan, lease):
        lease.check()
        for file in chunk:
            with _pinned_files(lease, file.file_path):
                deleted = plan.deleted_rows(file)
            number += file.row_count - (0 if deleted is None else len(deleted))
    lease.check()
    return number


def _planned(plan: Plan, lease: Lease) -> Iterator[list[PlannedFile]]:
    with _pinned_files(lease):
        yield from chunks(plan, _AT_ONCE)


@contextmanager
def _pinned_files(lease: Lease, path: str = "") -> Iterator[None]:
    """Only a lost lease can take a file away from under a reader."""
    try:
        yield
    except VersionExpired:
        lease.confirm()
        raise
    except LakebookError as error:
        if not isinstance(error, (ObjectNotFound, ObjectTruncated)):
            raise
        lease.confirm()
        raise _unreadable(error, error.on) from error
    except Exception as error:
        lease.confirm()
        raise _unreadable(error, path) from error


def _unreadable(error: Exception, on: str) -> ReadFailed:
    return ReadFailed(f"the file cannot be read ({reason_of(error)})", on=on, remedy="Run `lakebook verify`")


def _wanted_schema(plan: Plan, columns: Sequence[str] | None) -> Any:
    """The columns to read: those that are asked for, and those the predicate tests."""
    if columns is None:
        return plan.schema
    return selected(plan.schema, set(columns), fields_of(plan.predicate))


def _filtered(plan: Plan, batch: pa.RecordBatch) -> pa.Table:
    rows = pa.Table.from_batches([batch])
    if isinstance(plan.predicate, Always):
        return rows
    return rows.filter(expression_of(plan.predicate, rows.schema))


def read_table(plan: Plan, lease: Lease, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a plan as one Arrow table."""
    schema = plain_schema(plan.schema)
    if columns is not None:
        check_columns(columns, plan)
        schema = pa.schema([schema.field(name) for name in columns])
    return pa.Table.from_batches([batch.cast(schema) for batch in read_batches(plan, lease, columns)], schema=schema)
