"""Measuring new files: sizes, checksums, footers and statistics, and making them durable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lakebook.errors import InsertFailed
from lakebook.iceberg.partitioning import partition_path, partition_to_json
from lakebook.iceberg.statistics import partition_stats, stats_from_manifest
from lakebook.lake.footer_store import read_footers
from lakebook.lake.footers import open_footer
from lakebook.lake.lake import Lake, TableShape
from lakebook.registry.file_stats import ColumnStats
from lakebook.registry.table_files import NewFile
from lakebook.spark.jobs import measured, on_executors
from lakebook.storage.answers import Measured

PARQUET = "parquet"
JSON = "json"
_ON_EXECUTORS = 500


@dataclass(frozen=True)
class WrittenFile:
    """A file as its writer describes it."""

    path: str
    size: int
    rows: int
    partition: Any
    #: None: nothing is known of its columns.
    stats: tuple[ColumnStats, ...] | None


def measure(lake: Lake, paths: Sequence[str], sizes: int, spark: Any = None) -> list[Measured]:
    """Sizes and checksums; many or large files are measured by Spark's executors."""
    if by_executors(lake, len(paths), sizes, spark):
        return on_executors(spark, lake.store.warehouse, paths, measured)
    return lake.store.measure(paths)


def by_executors(lake: Lake, files: int, sizes: int, spark: Any) -> bool:
    """Whether there are so many or so large files that Spark's executors shall read them."""
    return spark is not None and (sizes >= lake.settings.measure_on_spark or files >= _ON_EXECUTORS)


def described(file: Any, shape: TableShape, path: str) -> WrittenFile:
    """A file from the manifest of a staged table."""
    return WrittenFile(
        path,
        file.file_size_in_bytes,
        file.record_count,
        file.partition,
        stats_from_manifest(shape.schema, file),
    )


def parquet_files(
    lake: Lake, shape: TableShape, written: Sequence[WrittenFile], spark: Any = None, *, durable: bool = False
) -> list[NewFile]:
    """Parquet files, made durable and measured, with their footers and statistics."""
    if not written:
        return []
    paths = [file.path for file in written]
    if not durable:
        lake.store.make_durable(paths)
    sizes = measure(lake, paths, sum(file.size for file in written), spark)
    footers = read_footers(lake.store, [(found.path, found.size) for found in sizes])
    now = datetime.now(UTC)
    compressed = shape.compression != "none"
    files = []
    for file, found, footer in zip(written, sizes, footers, strict=True):
        opened = open_footer(footer, on=file.path)
        if found.size != file.size or opened.num_rows != file.rows:
            raise InsertFailed(
                f"the file has {found.size} bytes and {opened.num_rows} rows,"
                f" its writer said {file.size} and {file.rows}",
                on=file.path,
                remedy="Look for a second writer, or for a failing disk",
            )
        files.append(
            NewFile(
                file_path=file.path,
                file_size=found.size,
                file_type=PARQUET,
                row_count=file.rows,
                checksum=found.checksum,
                schema_version=shape.schema_version,
                modified_at=now,
                row_groups=opened.num_row_groups,
                is_compressed=compressed,
                partition_path=partition_path(shape.spec, shape.schema, file.partition),
                partition_values=partition_to_json(shape.spec, shape.schema, file.partition),
                spec_id=shape.spec.spec_id,
                has_statistics=bool(file.stats),
                stats=(file.stats or ()) + partition_stats(shape.spec, shape.schema, file.partition),
                footer=footer,
            )
        )
    return files
