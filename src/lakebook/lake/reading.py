"""Reading a plan: with Spark through a staged table, or into Arrow with the stored footers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakebook.errors import InvalidInput, ObjectNotFound, ObjectTruncated, ReadFailed
from lakebook.iceberg.arrow_files import file_schema, plain_schema, projected, selected
from lakebook.iceberg.staging import ReadFile, spark_type, spark_type_named, stage_read
from lakebook.lake.arrow_filter import expression_of
from lakebook.lake.footer_store import footers_for
from lakebook.lake.json_rows import read_json_rows
from lakebook.lake.leasing import Lease
from lakebook.lake.measuring import JSON
from lakebook.lake.planning import Plan
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
        raise InvalidInput(f"the table has no columns {unknown!r}", on=plan.table.shown)


# --- Spark ---------------------------------------------------------------------


def read_frame(spark: SparkSession, plan: Plan, lease: Lease, columns: Sequence[str] | None = None) -> DataFrame:
    """A DataFrame over exactly the files of a plan, right by field id at every depth."""
    check_columns(columns, plan)
    check_session(spark)
    lease.check()
    frame = _json_frame(spark, plan) if plan.table.format == JSON else _parquet_frame(spark, plan, lease)
    if not isinstance(plan.predicate, Always):
        frame = frames.matching(frame, plan.predicate)
    if columns is not None:
        frame = frames.columns(frame, columns)
    return frame


def _parquet_frame(spark: SparkSession, plan: Plan, lease: Lease) -> DataFrame:
    now = plan.lake.clock.now_ms()
    parts: list[DataFrame] = []
    named = sorted({file.schema_version for file in plan if not file.has_field_ids})
    # Files without field ids are read by the names of their own schema version: in another one the
    # same name may be another column.
    for schema_version in (None, *named):
        files = (
            ReadFile(file.file_path, file.file_size, file.row_count)
            for file in plan
            if (file.has_field_ids and schema_version is None)
            or (not file.has_field_ids and file.schema_version == schema_version)
        )
        names = None if schema_version is None else plan.lake.shape_of(plan.table, schema_version).schema
        location = stage_read(plan.lake.store, lease.staged_folder(), plan.schema, names, files, now)
        parts.append(frames.read_staged(spark, location))
    return frames.union(parts)


def _json_frame(spark: SparkSession, plan: Plan) -> DataFrame:
    by_version: dict[int, list[str]] = {}
    for file in plan:
        by_version.setdefault(file.schema_version, []).append(plan.lake.store.uri(file.file_path))
    target = spark_type(plan.schema)
    parts = [frames.empty(spark, target)]
    for schema_version, paths in sorted(by_version.items()):
        source = plan.lake.shape_of(plan.table, schema_version).schema
        frame = frames.read_json(spark, paths, spark_type_named(plan.schema, source))
        parts.append(frames.renamed(frame, target))
    return frames.union(parts)


# --- Arrow ---------------------------------------------------------------------


def read_batches(plan: Plan, lease: Lease, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a plan, batch by batch; no footer is fetched from storage."""
    check_columns(columns, plan)
    wanted = _wanted_schema(plan, columns)
    keep = list(columns) if columns is not None else [field.name for field in plan.schema.fields]
    for chunk in chunks(plan, _AT_ONCE):
        lease.check()
        footers = footers_for(
            plan.lake,
            ((file.file_path, file.file_size, file.row_count) for file in chunk if file.file_type != JSON),
        )
        for file in chunk:
            try:
                for batch in _file_batches(plan, file, wanted, footers.get(file.file_path)):
                    rows = _filtered(plan, batch)
                    if rows.num_rows:
                        yield from rows.select(keep).to_batches()
            except (ObjectNotFound, ObjectTruncated, FileNotFoundError, OSError, pa.ArrowException) as error:
                # Only a lost lease can take a file away from under a reader.
                lease.confirm()
                raise ReadFailed(
                    f"the file cannot be read ({reason_of(error)})", on=file.file_path, remedy="Run `lakebook verify`"
                ) from error


def _wanted_schema(plan: Plan, columns: Sequence[str] | None) -> Any:
    """The columns to read: those that are asked for, and those the predicate tests."""
    if columns is None:
        return plan.schema
    return selected(plan.schema, set(columns), fields_of(plan.predicate))


def _file_batches(plan: Plan, file: PlannedFile, wanted: Any, footer: Any) -> Iterator[pa.RecordBatch]:
    names = plan.lake.shape_of(plan.table, file.schema_version).schema
    if file.file_type == JSON:
        yield from read_json_rows(plan.lake.store, file.file_path, wanted, names)
        return
    metadata = footer.open(file.file_path)
    with plan.lake.store.open(file.file_path) as stream, pq.ParquetFile(stream, metadata=metadata) as opened:
        given = file_schema(opened.schema_arrow, names)
        ids = {field.field_id for field in wanted.fields}
        present = [field.name for field in given.fields if field.field_id in ids]
        groups = list(file.row_groups) if file.row_groups is not None else None
        if not present:
            # Every column that is asked for is younger than the file.
            rows = sum(metadata.row_group(number).num_rows for number in groups or range(metadata.num_row_groups))
            nulls = [pa.nulls(rows, field.type) for field in plain_schema(wanted)]
            yield pa.RecordBatch.from_arrays(nulls, schema=plain_schema(wanted))
            return
        for batch in opened.iter_batches(row_groups=groups, columns=_quoted(opened, present)):
            part = file_schema(batch.schema, names)
            yield projected(batch, wanted, part)


def _quoted(opened: pq.ParquetFile, names: Sequence[str]) -> list[str] | None:
    # PyArrow takes a name with a dot for a path; it is then safer to read all columns.
    if any("." in name for name in opened.schema_arrow.names):
        return None
    return list(names)


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
