"""JSON lines: written and read by Spark's own source, tracked like any other file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lakebook.errors import InvalidFile, InvalidTable, LakebookError
from lakebook.iceberg.schemas import schema_to_json, walk
from lakebook.iceberg.staging import DATA, spark_type, spark_type_named
from lakebook.lake.attempts import Attempt
from lakebook.lake.footer_store import Footer
from lakebook.lake.json_lines import count_lines, measured_lines
from lakebook.lake.json_rows import read_json_rows
from lakebook.lake.lake import Lake, TableShape
from lakebook.lake.leasing import Lease
from lakebook.lake.measuring import JSON, by_executors
from lakebook.lake.planning import Plan
from lakebook.lake.steps import Steps
from lakebook.names import shown
from lakebook.registry.table_files import NewFile, PlannedFile
from lakebook.spark import frames
from lakebook.spark.jobs import on_executors
from lakebook.storage.objects import ObjectStore

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession


class JsonFormat:
    """The format of tables that are lines of JSON: no footers, no column statistics."""

    name = JSON
    compressions: tuple[str, ...] = ("gzip", "none")
    structured = False

    def check_schema(self, schema: Any) -> None:
        """Refuse what JSON, as Spark writes it, cannot carry."""
        for path, field, _ in walk(schema.fields):
            kind = str(field.field_type)
            key = getattr(field.field_type, "key_type", None)
            if kind in ("uuid", "time") or (key is not None and str(key) != "string"):
                raise InvalidTable(
                    f"the column {shown('.'.join(path))} of type {kind} cannot be kept as JSON",
                    on="table",
                    remedy="Use format parquet, or text",
                )

    def write(self, lake: Lake, attempt: Attempt, shape: TableShape, frame: DataFrame, steps: Steps) -> list[NewFile]:
        """Write a frame of the table's columns into the attempt's folder, and measure the files."""
        folder = f"{attempt.folder}/{DATA}"
        with steps.writing():
            # Spark's own source does not know what is required.
            checked = frames.refusing_nulls(frame, schema_to_json(shape.schema)["fields"])
            frames.write_json(checked, lake.store.uri(folder), shape.compression)
        with steps.measuring():
            # The folder is this insert's own, and Spark has moved only files of committed tasks into it.
            listed = list(lake.store.list(folder))
            found = [item.path for item in listed if _is_json(item.path, folder)]
            leftover = [item.path for item in listed if not _is_json(item.path, folder)]
            lake.store.make_durable(found)
            sizes = sum(item.size for item in listed)
            files = _json_files(lake, shape, found, sizes, frames.session_of(frame))
            empty = [file.file_path for file in files if file.row_count == 0]
            lake.store.delete([*leftover, *empty])
        return [file for file in files if file.row_count]

    def write_arrow(self, lake: Lake, attempt: Attempt, shape: TableShape, data: pa.Table) -> list[NewFile]:  # noqa: ARG002
        """Refused: rows of JSON come from Spark."""
        raise InvalidTable(
            "a table of format json takes rows from Spark only",
            on=attempt.table.shown,
            remedy="Use table.insert(frame)",
        )

    def adopt(self, lake: Lake, shape: TableShape, paths: Sequence[str]) -> list[NewFile]:
        """Measure files that others wrote, and read them once: what cannot be read is refused now."""
        for path in paths:
            try:
                for _ in read_json_rows(lake.store, path, shape.schema, shape.schema):
                    pass
            except LakebookError:
                raise
            except Exception as error:
                raise InvalidFile(f"it is not JSON of the table's rows ({shown(str(error))})", on=path) from error
        return _json_files(lake, shape, paths)

    def read(self, spark: SparkSession, plan: Plan, lease: Lease) -> DataFrame:  # noqa: ARG002
        """A frame over exactly the files of a plan."""
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

    def batches(self, plan: Plan, file: PlannedFile, wanted: Any, footer: Footer | None) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """The rows of a file in the asked-for columns."""
        names = plan.lake.shape_of(plan.table, file.schema_version).schema
        yield from read_json_rows(plan.lake.store, file.file_path, wanted, names)

    def count_rows(self, store: ObjectStore, path: str, size: int) -> tuple[int, bytes | None]:  # noqa: ARG002
        """How many rows a file has."""
        return count_lines(store, path), None


def _is_json(path: str, folder: str) -> bool:
    """Whether Spark has committed a file: what lies deeper is of an attempt that is late or was given up."""
    parent, _, name = path.rpartition("/")
    return parent == folder and name.startswith("part-") and name.endswith((".json", ".json.gz"))


def _json_files(
    lake: Lake, shape: TableShape, paths: Sequence[str], sizes: int = 0, spark: Any = None
) -> list[NewFile]:
    """JSON files, measured and their rows counted; many or large ones by Spark's executors."""
    if by_executors(lake, len(paths), sizes, spark):
        measured = on_executors(spark, lake.store.warehouse, paths, measured_lines)
    elif spark is not None and paths and lake.store.warehouse.bucket is not None:
        # By Spark's own reader, which needs no Python there: nothing of a bucket comes to the driver.
        lines = frames.count_lines(spark, [lake.store.uri(path) for path in paths])
        measured = [(found, lines.get(found.path.rpartition("/")[2], 0)) for found in lake.store.measure(paths)]
    else:
        measured = [(found, count_lines(lake.store, found.path)) for found in lake.store.measure(paths)]
    now = datetime.now(UTC)
    return [
        NewFile(
            file_path=found.path,
            file_size=found.size,
            file_type=JSON,
            row_count=rows,
            checksum=found.checksum,
            schema_version=shape.schema_version,
            modified_at=now,
            is_compressed=found.path.endswith(".gz"),
            has_field_ids=True,
        )
        for found, rows in measured
    ]
