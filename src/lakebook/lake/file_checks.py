"""The files of tables against what the registry says of them, looked at here or by Spark's executors.

Whoever looks at a file gets what is recorded of it, a digest of its stored footer among it, and gives back what
is wrong. So the driver opens none of them, and one that cannot be read is a finding like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from lakebook.errors import CorruptFooter, LakebookError, ObjectNotFound, SparkUnsuitable
from lakebook.iceberg.arrow_files import file_schema
from lakebook.iceberg.bounds import NOTHING
from lakebook.iceberg.statistics import footer_columns, stats_from_footer
from lakebook.lake.footer_store import stored_footers
from lakebook.lake.footers import LEGACY_FOOTER_VERSION, open_footer, upgraded
from lakebook.lake.formats import FORMATS
from lakebook.lake.lake import Lake
from lakebook.registry.file_stats import stats_of_files
from lakebook.registry.stream_checks import Finding
from lakebook.registry.table_checks import FileToCheck
from lakebook.registry.tables import GET_TABLE_BY_ID, table_from
from lakebook.spark.jobs import on_executors
from lakebook.spark.session import reason_of
from lakebook.storage.objects import ObjectStore

FILES, FOOTERS, STATISTICS = "files", "footers", "statistics"
#: What `repair` takes from the file anew.
FOOTER_DIFFERS = "the stored footer differs from the file's"
FOOTER_BROKEN = "the stored footer is broken"
STATISTICS_CONTRADICT = "its column statistics contradict its footer"

_GONE = "it does not exist"
_READERS = 8


@dataclass(frozen=True)
class Recorded:
    """What the registry says of a file."""

    path: str
    kind: str
    size: int
    rows: int
    checksum: str
    #: Of one that is owed, nothing but the size is known for certain.
    is_owed: bool
    #: The digest of its stored footer in today's version; none if it has none that can be used.
    footer: str | None


def wrong_files(lake: Lake, files: Sequence[FileToCheck], spark: Any = None) -> Iterator[Finding]:
    """What is wrong with files, their footers, row counts and column statistics; with `spark`, in one job."""
    digests: dict[str, str] = {}
    # What is said of footers as they are stored, and of statistics beside them.
    suspects: list[Finding] = []
    by_path = {file.file_path: file for file in files if not file.is_owed}
    for record in stored_footers(lake, by_path):
        file = by_path[record.file_path]
        try:
            ours = upgraded(record.metadata, record.partition_format_version, file.row_count, on=file.file_path)
            digests[file.file_path] = _digest(ours)
            if _contradicts(lake, file, ours):
                suspects.append(Finding(STATISTICS, file.file_path, STATISTICS_CONTRADICT))
        except CorruptFooter as error:
            suspects.append(Finding(FOOTERS, file.file_path, f"{FOOTER_BROKEN} ({error.what})"))
        except Exception as error:  # noqa: BLE001 - whatever a parser says of a damaged footer
            suspects.append(Finding(FOOTERS, file.file_path, f"the stored footer cannot be used ({_reason(error)})"))
    wanted = [
        Recorded(
            file.file_path,
            file.file_type,
            file.file_size,
            file.row_count,
            file.checksum,
            file.is_owed,
            digests.get(file.file_path),
        )
        for file in files
    ]
    found = [
        Finding(check, file.path, what)
        for file, wrong in zip(wanted, _looked_at(lake, wanted, spark), strict=True)
        for check, what in wrong
    ]
    # A broken footer that is another than the file's is told of once; beside it statistics mean nothing.
    differing = {finding.on for finding in found if finding.what == FOOTER_DIFFERS}
    yield from found
    yield from (finding for finding in suspects if finding.on not in differing)


def _looked_at(lake: Lake, files: Sequence[Recorded], spark: Any) -> list[list[tuple[str, str]]]:
    if spark is None:
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(lambda file: wrong_with(lake.store, file), files))
    try:
        return on_executors(spark, lake.store.warehouse, files, wrong_with)
    except Exception as error:
        raise SparkUnsuitable(
            f"its executors could not look at the files ({reason_of(error)})",
            on="Spark",
            remedy="Check that they have Lakebook and reach the warehouse, or verify without Spark",
        ) from error


def wrong_with(store: ObjectStore, file: Recorded) -> list[tuple[str, str]]:
    """What is wrong with one file: the check that says so, and what it says."""
    try:
        size = store.size(file.path)
        if size is None:
            return [(FILES, _GONE)]
        if file.is_owed:
            return [] if size == file.size else [(FILES, f"it has {size} bytes instead of {file.size}")]
        found = store.measure_as(file.path, file.checksum)
    except ObjectNotFound:
        return [(FILES, _GONE)]
    except LakebookError as error:
        return [(FILES, f"it cannot be read ({error.what})")]
    wrong = []
    if (found.size, found.checksum) != (file.size, file.checksum):
        what = f"its bytes are not those that were recorded ({found.size} bytes, {found.checksum})"
        wrong.append((FILES, what))
    try:
        rows, footer = FORMATS[file.kind].count_rows(store, file.path, file.size)
        if rows != file.rows:
            wrong.append((FILES, f"it has {rows} rows instead of {file.rows}"))
        if footer is not None and file.footer is not None and not _is_of(footer, rows, file.footer):
            wrong.append((FOOTERS, FOOTER_DIFFERS))
    except Exception as error:  # noqa: BLE001 - whatever a parser says of a damaged file
        wrong.append((FOOTERS, f"its rows cannot be counted ({_reason(error)})"))
    return wrong


def _is_of(footer: bytes, rows: int, stored: str) -> bool:
    """Whether a stored footer is that of the file, as it stands there or as it is upgraded from the first version."""
    return _digest(footer) == stored or _digest(upgraded(footer, LEGACY_FOOTER_VERSION, rows)) == stored


def _digest(footer: bytes) -> str:
    return blake2b(footer, digest_size=16).hexdigest()


def _reason(error: Exception) -> str:
    return error.what if isinstance(error, LakebookError) else str(error)


def _contradicts(lake: Lake, file: FileToCheck, footer: bytes) -> bool:
    """Whether bounds leave out values that the footer says are there."""
    table = lake.registry.read_with(lambda reader: reader.one(GET_TABLE_BY_ID, file.table_id))
    if table is None or not file.has_statistics:
        return False
    opened = open_footer(footer, on=file.file_path)
    names = lake.shape_of(table_from(table), file.schema_version).schema
    columns = footer_columns(opened, file_schema(opened.schema.to_arrow_schema(), names))
    if columns is None:
        return False
    fields = sorted(columns.indexes())
    stats = lake.registry.read_with(lambda reader: stats_of_files(reader, file.table_id, [file.id], fields))
    for found in stats_from_footer(columns):
        kept = stats.get((file.id, found.field_id))
        if kept is None:
            continue
        below = found.lower is not None and kept.lower is not None and kept.lower > found.lower
        above = found.upper is not None and kept.upper is not None and kept.upper < found.upper
        if below or above or (kept.width == NOTHING and found.lower is not None):
            return True
    return False
