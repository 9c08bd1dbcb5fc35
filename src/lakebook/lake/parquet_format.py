"""Parquet: written by Spark through a staged Iceberg table, or by Arrow with the same field ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakebook.errors import IncompatibleSchema, InvalidFile, LakebookError, ObjectNotFound
from lakebook.iceberg.arrow_files import (
    aligned,
    check_foreign,
    check_readable_as,
    file_schema,
    has_field_ids,
    nan_counts,
    partitions_of,
    plain_schema,
    projected,
    sorted_rows,
)
from lakebook.iceberg.bounds import ColumnBounds
from lakebook.iceberg.partitioning import partition_path, partition_to_json
from lakebook.iceberg.schemas import leaf_fields
from lakebook.iceberg.staging import ReadDeletes, ReadFile, stage_insert, stage_read, staged_files
from lakebook.iceberg.statistics import (
    column_stats,
    footer_columns,
    partition_of,
    partition_stats,
    stats_from_footer,
)
from lakebook.lake.attempts import Attempt
from lakebook.lake.footer_store import Footer, read_footer
from lakebook.lake.footers import open_footer
from lakebook.lake.lake import Lake, TableShape
from lakebook.lake.leasing import Lease
from lakebook.lake.measuring import PARQUET, WrittenFile, described, parquet_files
from lakebook.lake.planning import Plan
from lakebook.lake.position_deletes import DeleteMarks
from lakebook.lake.steps import Steps
from lakebook.registry.table_files import NewFile, PlannedFile
from lakebook.registry.tables import TableRecord
from lakebook.registry.transactions import new_id
from lakebook.spark import frames
from lakebook.storage.objects import ObjectStore

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession

# What a table may tell Iceberg's writer. Where it writes, and what it records, is not among them.
_WRITER = ("write.parquet.", "write.target-file-size-bytes", "write.distribution-mode", "write.spark.")


class ParquetFormat:
    """The format of tables that every engine can read."""

    name = PARQUET
    compressions: tuple[str, ...] = ("zstd", "snappy", "gzip", "lz4", "none")
    #: Whether tables of it can have partitions and a sort order.
    structured = True

    def check_schema(self, schema: Any) -> None:
        """Refuse nothing: every type has its place in Parquet."""

    def write(self, lake: Lake, attempt: Attempt, shape: TableShape, frame: DataFrame, steps: Steps) -> list[NewFile]:
        """Write a frame of the table's columns into the attempt's folder, and measure the files."""
        with steps.step("stage"):
            location = stage_insert(
                lake.store,
                attempt.folder,
                shape.schema,
                shape.spec,
                shape.order,
                {**_writer_properties(lake, attempt.table, shape), **attempt.writing},
                lake.clock.now_ms(),
            )
        with steps.writing():
            frames.write_staged(frame, location)
        with steps.measuring():
            written = [
                described(file, shape, lake.store.relative(file.file_path))
                for file in staged_files(lake.store, attempt.folder)
            ]
            files = parquet_files(lake, shape, written, frames.session_of(frame))
            _remove_staging(lake, attempt.folder, files)
        return files

    def write_arrow(self, lake: Lake, attempt: Attempt, shape: TableShape, data: pa.Table) -> list[NewFile]:
        """Write rows into the attempt's folder, one file per partition, and measure the files."""
        rows = aligned(data, shape.schema)
        if not rows.num_rows:
            return []
        if not shape.order.is_unsorted:
            rows = sorted_rows(rows, shape.order, shape.schema)
        written = [
            _write_file(lake, attempt, shape, part, record)
            for record, part in partitions_of(rows, shape.spec, shape.schema)
        ]
        # They are durable already: the object store says so when it closes them.
        return parquet_files(lake, shape, written, durable=True)

    def adopt(self, lake: Lake, shape: TableShape, paths: Sequence[str]) -> list[NewFile]:
        """Measure files that others wrote, and check that they fit the table."""
        return [_foreign_file(lake, shape, found) for found in lake.store.measure(paths)]

    def read(self, spark: SparkSession, plan: Plan, lease: Lease) -> DataFrame:
        """A frame over exactly the files of a plan, without the rows that are deleted."""
        now = plan.lake.clock.now_ms()
        marks = DeleteMarks(plan.deletes)
        parts: list[DataFrame] = []
        # What is known of files whose footer is owed changes when it is taken: those are looked at once.
        chosen = plan if all(file.checksum for file in plan) else plan.files
        named = sorted({file.schema_version for file in chosen if _by_names(file)})
        # Files without field ids are read by the names of their own schema version: in another one the
        # same name may be another column.
        for schema_version in (None, *named):
            files = (
                _read_file(plan, file, marks)
                for file in chosen
                if (file.schema_version if _by_names(file) else None) == schema_version
            )
            names = None if schema_version is None else plan.lake.shape_of(plan.table, schema_version).schema
            location = stage_read(
                plan.lake.store,
                lease.staged_folder(),
                plan.schema,
                names,
                files,
                now,
                sequence_number=marks.last_number,
                scoped=marks.scoped,
            )
            frame = frames.read_staged(spark, location)
            own = [field.name for field in plan.schema.fields]
            parts.append(frames.columns(frame, own) if marks.scoped else frame)
        return frames.union(parts)

    def batches(self, plan: Plan, file: PlannedFile, wanted: Any, footer: Footer | None) -> Iterator[pa.RecordBatch]:
        """The rows of a file in the asked-for columns, with its stored footer handed in; deleted rows are left out."""
        names = plan.lake.shape_of(plan.table, file.schema_version).schema
        deleted = plan.deleted_rows(file)
        assert footer is not None
        metadata = footer.open(file.file_path)
        with plan.lake.store.open(file.file_path) as stream, pq.ParquetFile(stream, metadata=metadata) as opened:
            given = file_schema(opened.schema_arrow, names)
            ids = {field.field_id for field in wanted.fields}
            present = [field.name for field in given.fields if field.field_id in ids]
            groups = list(file.row_groups) if file.row_groups is not None else None
            if deleted is not None and groups is not None:
                deleted = deleted.in_ranges(_rows_of(metadata, groups))
            if not present:
                # Every column that is asked for is younger than the file.
                rows = sum(metadata.row_group(number).num_rows for number in groups or range(metadata.num_row_groups))
                rows -= len(deleted) if deleted is not None else 0
                nulls = [pa.nulls(rows, field.type) for field in plain_schema(wanted)]
                yield pa.RecordBatch.from_arrays(nulls, schema=plain_schema(wanted))
                return
            first = 0
            for batch in opened.iter_batches(row_groups=groups, columns=_quoted(opened, present)):
                part = file_schema(batch.schema, names)
                found = projected(batch, wanted, part)
                yield found if deleted is None else deleted.left_out_of(found, first)
                first += batch.num_rows

    def count_rows(self, store: ObjectStore, path: str, size: int) -> tuple[int, bytes | None]:
        """How many rows a file has, by the file itself; and its footer."""
        footer = read_footer(store, path, size)
        return int(open_footer(footer, on=path).num_rows), footer


def _read_file(plan: Plan, file: PlannedFile, marks: DeleteMarks) -> ReadFile:
    """A file as Spark shall read it."""
    location = plan.location_of(file)
    found = plan.deletes_for(file)
    deletes = tuple(
        ReadDeletes(
            plan.location_of(delete),
            delete.file_size,
            delete.row_count,
            marks.number_of(delete),
            marks.scope_of(delete),
            location if delete.referenced_path is not None else None,
        )
        for delete in found
    )
    return ReadFile(location, file.file_size, file.row_count, marks.first_number(found), marks.scope_of(file), deletes)


def _writer_properties(lake: Lake, table: TableRecord, shape: TableShape) -> dict[str, str]:
    own = lake.metadata_of(table, shape.schema_version).properties
    codec = {"none": "uncompressed"}.get(shape.compression, shape.compression)
    kept = {name: value for name, value in own.items() if name.startswith(_WRITER)}
    return {**kept, "write.parquet.compression-codec": codec}


def _remove_staging(lake: Lake, folder: str, files: Sequence[NewFile]) -> None:
    """Remove what a writer leaves beside its files: staged metadata and checksum sidecars."""
    lake.store.delete_folder(f"{folder}/metadata")
    sidecars = []
    for file in files:
        parent, _, name = file.file_path.rpartition("/")
        sidecars.append(f"{parent}/.{name}.crc")
    # One that stays is found by the sweep of this insert's folder.
    with suppress(LakebookError):
        lake.store.delete(sidecars)


def _write_file(lake: Lake, attempt: Attempt, shape: TableShape, rows: pa.Table, record: Any) -> WrittenFile:
    path = f"{attempt.folder}/{new_id()}.parquet"
    codec = {"none": "NONE", "lz4": "LZ4"}.get(shape.compression, shape.compression)
    with lake.store.create(path) as stream:
        pq.write_table(rows, stream, compression=codec, store_schema=False, write_page_index=False)
    size = lake.store.size(path)
    if size is None:
        raise ObjectNotFound("the file that was just written is gone", on=path, remedy="Was this insert fenced?")
    opened = open_footer(read_footer(lake.store, path, size), on=path)
    columns = footer_columns(opened, shape.schema)
    stats = None if columns is None else stats_from_footer(columns, nan_counts(rows, shape.schema), ours=True)
    return WrittenFile(path, size, rows.num_rows, record, stats)


def _by_names(file: PlannedFile) -> bool:
    """Whether a file may have no field ids; one that has them is read by them all the same."""
    return not file.has_field_ids or not file.checksum


def _foreign_file(lake: Lake, shape: TableShape, found: Any) -> NewFile:
    footer = read_footer(lake.store, found.path, found.size)
    opened = open_footer(footer, on=found.path)
    if opened.num_rows != sum(opened.row_group(number).num_rows for number in range(opened.num_row_groups)):
        raise InvalidFile("its footer contradicts itself about the number of rows", on=found.path)
    columns = opened.schema.to_arrow_schema()
    try:
        check_foreign(columns)
        given = file_schema(columns, shape.schema)
        check_readable_as(given, shape.schema)
        laid_out = footer_columns(opened, given)
        stats = () if laid_out is None else stats_from_footer(laid_out)
        record = partition_of(shape.spec, shape.schema, stats)
    except (InvalidFile, IncompatibleSchema) as error:
        raise InvalidFile(error.what, on=found.path, remedy=error.remedy) from None
    known = {item.field_id for item in stats}
    # A column that the file does not have is null in every row.
    absent = tuple(
        column_stats(
            leaf.field_id,
            leaf.type,
            ColumnBounds(None, None, opened.num_rows, opened.num_rows, 0),
            is_exact=True,
        )
        for leaf in leaf_fields(shape.schema)
        if not leaf.in_collection and leaf.field_id not in known
    )
    compression = {
        opened.row_group(group).column(column).compression
        for group in range(min(1, opened.num_row_groups))
        for column in range(opened.num_columns)
    }
    return NewFile(
        file_path=found.path,
        file_size=found.size,
        file_type=PARQUET,
        row_count=opened.num_rows,
        checksum=found.checksum,
        schema_version=shape.schema_version,
        modified_at=datetime.now(UTC),
        row_groups=opened.num_row_groups,
        is_compressed=bool(compression - {"UNCOMPRESSED"}),
        partition_path=partition_path(shape.spec, shape.schema, record),
        partition_values=partition_to_json(shape.spec, shape.schema, record),
        spec_id=shape.spec.spec_id,
        has_field_ids=has_field_ids(columns),
        has_statistics=bool(stats),
        stats=(stats + absent if laid_out is not None else ()) + partition_stats(shape.spec, shape.schema, record),
        footer=footer,
    )


def _rows_of(metadata: pq.FileMetaData, groups: Sequence[int]) -> list[tuple[int, int]]:
    """The numbers of the rows of row groups: for each the first, and the one after the last."""
    ends = list(accumulate(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)))
    return [(ends[number] - metadata.row_group(number).num_rows, ends[number]) for number in groups]


def _quoted(opened: pq.ParquetFile, names: Sequence[str]) -> list[str] | None:
    # PyArrow takes a name with a dot for a path; it is then safer to read all columns.
    if any("." in name for name in opened.schema_arrow.names):
        return None
    return list(names)
