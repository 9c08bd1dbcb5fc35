"""Inserting: rows of a Spark frame, of Arrow, or files that are there already.

reserve   a commit row and a folder of its own
stage     the table's exact schema, as an Iceberg table that only this insert knows
insert_data     Spark writes; only files of committed tasks are in the staged manifest
measure   sizes, checksums and footers; the files become durable
update_table_files, update_table_statistics     one transaction
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakebook import failpoints
from lakebook.errors import IncompatibleSchema, InsertFailed, InvalidFile, InvalidTable, LakebookError
from lakebook.iceberg.arrow_files import (
    aligned,
    check_readable_as,
    file_schema,
    has_field_ids,
    nan_counts,
    partitions_of,
)
from lakebook.iceberg.bounds import ColumnBounds
from lakebook.iceberg.schemas import check_writable_from, leaf_fields, schema_from
from lakebook.iceberg.staging import DATA, spark_type, stage_insert, staged_files
from lakebook.iceberg.statistics import column_stats, footer_columns, stats_from_footer
from lakebook.lake.attempts import DATA as ROOT
from lakebook.lake.attempts import Attempt
from lakebook.lake.footer_store import read_footer
from lakebook.lake.footers import open_footer
from lakebook.lake.json_rows import count_lines
from lakebook.lake.lake import Lake, TableShape
from lakebook.lake.leasing import READS
from lakebook.lake.measuring import JSON, PARQUET, WrittenFile, described, measure, parquet_files
from lakebook.names import check_path, check_text, shown
from lakebook.registry.table_files import Committed, NewFile, TableChange, require_unused
from lakebook.registry.tables import TableRecord
from lakebook.registry.transactions import new_id
from lakebook.spark import frames
from lakebook.spark.session import check_session, reason_of

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame

_STEPS = ("stage", "insert_data", "measure", "commit", "update_table_files", "update_table_statistics")
_MOST_PROPERTIES = 100
# What a table may tell Iceberg's writer. Where it writes, and what it records, is not among them.
_WRITER = ("write.parquet.", "write.target-file-size-bytes", "write.distribution-mode", "write.spark.")


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


class Steps:
    """How long each step of a change takes."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure one step."""
        begun = self._lake.clock.monotonic()
        try:
            yield
        finally:
            spent = self._lake.clock.monotonic() - begun
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


def check_properties(properties: Mapping[str, str] | None) -> dict[str, str]:
    """The properties that a caller attaches to a change, which a snapshot's summary will carry."""
    found = dict(properties or {})
    if len(found) > _MOST_PROPERTIES:
        raise InvalidTable(f"{len(found)} properties are too many", on="insert", remedy=f"Use {_MOST_PROPERTIES}")
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str) or not key:
            raise InvalidTable(f"{shown(key)}: {shown(value)} is no property", on="insert", remedy="Use texts")
        check_text("property", key)
        check_text("property", value)
    return found


def report(
    lake: Lake, table: TableRecord, attempt: Attempt, change: TableChange, committed: Committed, steps: Steps
) -> InsertReport:
    """What was done, which also goes to the metrics."""
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
    steps = Steps(lake)
    with one_clear_error(table), Attempt(lake, table) as attempt:
        files = insert_data(lake, table, attempt, frame, steps)
        if not files:
            return nothing_done(table, "append", attempt.commit_id, steps)
        change = TableChange("append", files, (), summary)
        with steps.step("commit"):
            committed = attempt.commit(change)
        return report(lake, table, attempt, change, committed, steps)


def insert_data(lake: Lake, table: TableRecord, attempt: Attempt, frame: DataFrame, steps: Steps) -> list[NewFile]:
    """Write the rows of a frame into the attempt's folder, and measure the files."""
    shape = lake.shape_of(table, table.schema_version)
    check_writable_from(shape.schema, schema_from(frame))
    spark = frames.session_of(frame)
    check_session(spark)
    shaped = frames.shaped(frame, spark_type(shape.schema))
    if table.format == JSON:
        return _insert_json(lake, attempt, shape, shaped, steps)
    with steps.step("stage"):
        location = stage_insert(
            lake.store,
            attempt.folder,
            shape.schema,
            shape.spec,
            shape.order,
            _writer_properties(lake, table, shape),
            lake.clock.now_ms(),
        )
    failpoints.reach("insert.staged")
    with steps.step("insert_data"):
        frames.write_staged(shaped, location)
    failpoints.reach("insert.written")
    with steps.step("measure"):
        written = [
            described(file, shape, lake.store.relative(file.file_path))
            for file in staged_files(lake.store, attempt.folder)
        ]
        files = parquet_files(lake, shape, written, spark)
        remove_staging(lake, attempt.folder, files)
    failpoints.reach("insert.measured")
    return files


def _writer_properties(lake: Lake, table: TableRecord, shape: TableShape) -> dict[str, str]:
    own = lake.metadata_of(table, shape.schema_version).properties
    codec = {"none": "uncompressed"}.get(shape.compression, shape.compression)
    kept = {name: value for name, value in own.items() if name.startswith(_WRITER)}
    return {**kept, "write.parquet.compression-codec": codec}


def remove_staging(lake: Lake, folder: str, files: Sequence[NewFile]) -> None:
    """Remove what a writer leaves beside its files: staged metadata and checksum sidecars."""
    lake.store.delete_folder(f"{folder}/metadata")
    sidecars = []
    for file in files:
        parent, _, name = file.file_path.rpartition("/")
        sidecars.append(f"{parent}/.{name}.crc")
    # One that stays is found by the sweep of this insert's folder.
    with suppress(LakebookError):
        lake.store.delete(sidecars)


def _insert_json(lake: Lake, attempt: Attempt, shape: TableShape, frame: Any, steps: Steps) -> list[NewFile]:
    folder = f"{attempt.folder}/{DATA}"
    with steps.step("insert_data"):
        frames.write_json(frame, lake.store.uri(folder), shape.compression)
    with steps.step("measure"):
        # The folder is this insert's own, and Spark has moved only files of committed tasks into it.
        found = [item.path for item in lake.store.list(folder) if _is_json(item.path)]
        leftover = [item.path for item in lake.store.list(folder) if not _is_json(item.path)]
        lake.store.make_durable(found)
        files = json_files(lake, shape, found, frames.session_of(frame))
        empty = [file.file_path for file in files if file.row_count == 0]
        lake.store.delete([*leftover, *empty])
    return [file for file in files if file.row_count]


def _is_json(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.startswith("part-") and name.endswith((".json", ".json.gz"))


def json_files(lake: Lake, shape: TableShape, paths: Sequence[str], spark: Any = None) -> list[NewFile]:
    """JSON files, measured."""
    if not paths:
        return []
    now = datetime.now(UTC)
    return [
        NewFile(
            file_path=found.path,
            file_size=found.size,
            file_type=JSON,
            row_count=count_lines(lake.store, found.path),
            checksum=found.checksum,
            schema_version=shape.schema_version,
            modified_at=now,
            is_compressed=found.path.endswith(".gz"),
            has_field_ids=True,
        )
        for found in measure(lake, paths, 0, spark)
    ]


# --- Arrow ---------------------------------------------------------------------


def insert_arrow(
    lake: Lake, table: TableRecord, data: pa.Table, properties: Mapping[str, str] | None = None
) -> InsertReport:
    """Insert an Arrow table, without Spark: one file per partition."""
    summary = check_properties(properties)
    steps = Steps(lake)
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


def write_arrow(lake: Lake, table: TableRecord, attempt: Attempt, shape: TableShape, data: pa.Table) -> list[NewFile]:
    """Write rows into the attempt's folder, one file per partition, and measure the files."""
    if table.format == JSON:
        raise InvalidTable(
            "a table of format json takes rows from Spark only", on=table.shown, remedy="Use table.insert(frame)"
        )
    rows = aligned(data, shape.schema)
    if not rows.num_rows:
        return []
    if not shape.order.is_unsorted:
        rows = _sorted(rows, shape)
    written = [
        _write_file(lake, attempt, shape, part, record)
        for record, part in partitions_of(rows, shape.spec, shape.schema)
    ]
    # They are durable already: the object store says so when it closes them.
    return parquet_files(lake, shape, written, durable=True)


def _sorted(rows: pa.Table, shape: TableShape) -> pa.Table:
    """The rows in the table's order, as far as it is of plain columns."""
    keys = []
    for term in shape.order.fields:
        column = shape.schema.find_field(term.source_id)
        if str(term.transform) != "identity" or column.name not in rows.column_names:
            break
        keys.append((column.name, "ascending" if term.direction.name == "ASC" else "descending"))
    return rows.sort_by(keys) if keys else rows


def _write_file(lake: Lake, attempt: Attempt, shape: TableShape, rows: pa.Table, record: Any) -> WrittenFile:
    path = f"{attempt.folder}/{new_id()}.parquet"
    codec = {"none": "NONE", "lz4": "LZ4"}.get(shape.compression, shape.compression)
    with lake.store.create(path) as stream:
        pq.write_table(rows, stream, compression=codec, store_schema=False, write_page_index=False)
    size = lake.store.size(path)
    assert size is not None
    opened = open_footer(read_footer(lake.store, path, size), on=path)
    columns = footer_columns(opened, shape.schema)
    stats = None if columns is None else stats_from_footer(columns, nan_counts(rows, shape.schema), ours=True)
    return WrittenFile(path, size, rows.num_rows, record, stats)


# --- files that are there ------------------------------------------------------


def add_files(
    lake: Lake, table: TableRecord, paths: Sequence[str], properties: Mapping[str, str] | None = None
) -> InsertReport:
    """Take files that lie in the warehouse already. If it fails nothing is deleted."""
    summary = check_properties(properties)
    if isinstance(paths, str):
        raise InvalidFile("give a list of paths", on=table.shown)
    relative = [check_path(path) for path in paths]
    if len(set(relative)) != len(relative):
        raise InvalidFile("a path is named twice", on=table.shown)
    steps = Steps(lake)
    shape = lake.shape_of(table, table.schema_version)
    if not shape.spec.is_unpartitioned():
        raise InvalidTable(
            "files cannot be added to a partitioned table", on=table.shown, remedy="Insert their rows with Spark"
        )
    with one_clear_error(table), Attempt(lake, table, writes=False) as attempt:
        lake.registry.read_with(lambda reader: require_unused(reader, relative))
        with steps.step("measure"):
            files = [] if not relative else _foreign_files(lake, table, shape, relative)
        if not files:
            return nothing_done(table, "append", attempt.commit_id, steps)
        change = TableChange("append", files, (), summary, foreign=True)
        with steps.step("commit"):
            committed = attempt.commit(change)
        return report(lake, table, attempt, change, committed, steps)


def _foreign_files(lake: Lake, table: TableRecord, shape: TableShape, paths: Sequence[str]) -> list[NewFile]:
    for path in paths:
        if path.startswith((f"{ROOT}/", f"{READS}/")):
            raise InvalidFile("this folder is Lakebook's own", on=path, remedy="Lay the file elsewhere")
    lake.store.make_durable(paths)
    if table.format == JSON:
        return json_files(lake, shape, paths)
    return [_foreign_file(lake, shape, found) for found in lake.store.measure(paths)]


def _foreign_file(lake: Lake, shape: TableShape, found: Any) -> NewFile:
    footer = read_footer(lake.store, found.path, found.size)
    opened = open_footer(footer, on=found.path)
    columns = opened.schema.to_arrow_schema()
    try:
        given = file_schema(columns, shape.schema)
        check_readable_as(given, shape.schema)
    except (InvalidFile, IncompatibleSchema) as error:
        raise InvalidFile(error.what, on=found.path, remedy=error.remedy) from None
    laid_out = footer_columns(opened, given)
    stats = () if laid_out is None else stats_from_footer(laid_out)
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
        has_field_ids=has_field_ids(columns),
        has_statistics=laid_out is not None,
        stats=stats + absent if laid_out is not None else (),
        footer=footer,
    )
