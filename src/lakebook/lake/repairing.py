"""`repair` of tables: what `verify` finds is mended where that needs no guess, and told where it does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pyarrow.parquet import FileMetaData

from lakebook.errors import LakebookError
from lakebook.iceberg.publishing import ICEBERG
from lakebook.lake.attempts import DATA
from lakebook.lake.checking import STATISTICS_GONE, Progress, is_sidecar, is_staged, is_there, verify_tables
from lakebook.lake.cleaning import Cleaner
from lakebook.lake.file_checks import FOOTER_BROKEN, FOOTER_DIFFERS, STATISTICS_CONTRADICT
from lakebook.lake.footer_statistics import statistics_of
from lakebook.lake.footer_store import mend_footer, read_footer
from lakebook.lake.footers import open_footer
from lakebook.lake.lake import Lake
from lakebook.lake.measuring import PARQUET
from lakebook.registry import schema
from lakebook.registry.changes import row_of
from lakebook.registry.file_stats import DELETE_STATS_BETWEEN, ColumnStats, insert_stats
from lakebook.registry.footers import delete_partition_metadata_batch
from lakebook.registry.holding import held_since
from lakebook.registry.inserts import STAGED_RANGES
from lakebook.registry.stream_checks import Finding
from lakebook.registry.table_checks import dangling_stats, mend_totals, present_files
from lakebook.registry.table_files import FILES_BY_PATH, files_by_path
from lakebook.registry.tables import EVERY_TABLE, TABLE_ROW
from lakebook.registry.transactions import Reader, Transaction


@dataclass
class Repaired:
    """What was mended, or would be, and what cannot be without guessing."""

    dry_run: bool
    mended: list[str] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)


def repair_tables(lake: Lake, *, dry_run: bool = False, progress: Progress = lambda step: None) -> Repaired:
    """Mend what can be mended without guessing: totals, footers, statistics, leftovers; and say what cannot."""
    result = Repaired(dry_run)
    before = verify_tables(lake, progress, files=True)
    # Of a restored book that is held nothing is removed, only mended.
    held = held_since(lake.registry) is not None
    if not dry_run:
        progress("sweep")
    swept = Cleaner(lake).sweep(dry_run=dry_run or held)
    if not held and (swept.objects or swept.fenced):
        result.mended.append(f"{swept.fenced} dead inserts fenced, {swept.objects} leftover objects removed")
    for finding in before.findings:
        progress(finding.on)
        mended = _mend(lake, finding, dry_run=dry_run)
        if mended is None:
            result.left.append(finding)
        else:
            result.mended.append(mended)
    if any(finding.check == "statistics" for finding in before.findings):
        _mend_statistics(lake, before.findings, result, dry_run=dry_run)
    result.mended = [text for text in result.mended if text]
    return result


def _mend(lake: Lake, finding: Finding, *, dry_run: bool) -> str | None:
    """What was done about a finding; none if nothing can be without guessing."""
    if finding.check == "footers" and finding.what.startswith(("it has no footer", FOOTER_DIFFERS, FOOTER_BROKEN)):
        return _mend_footer(lake, finding.on, dry_run=dry_run)
    if finding.check == "statistics" and finding.what in (STATISTICS_GONE, STATISTICS_CONTRADICT):
        return _mend_column_stats(lake, finding.on, dry_run=dry_run)
    if finding.check == "footers" and finding.what == "the footer's file is not known":
        if not dry_run:
            lake.registry.write(lambda transaction: delete_partition_metadata_batch(transaction, [finding.on]))
        return f"{finding.on}: a footer that nothing refers to was removed"
    if finding.check == "orphans" and finding.on.startswith(f"{ICEBERG}/"):
        # The sweep removes it, and counts it.
        return "" if dry_run or not is_there(lake, finding.on) else None
    if finding.check == "orphans" and is_sidecar(finding.on) and held_since(lake.registry) is None:
        if not dry_run:
            lake.store.delete_one(finding.on)
        return f"{finding.on}: a sidecar was removed"
    if finding.check == "statistics" and finding.on.startswith("table "):
        return ""  # All at once, below.
    return None


def _mend_footer(lake: Lake, path: str, *, dry_run: bool) -> str | None:
    """Take a footer from its file, if the file is the one that was recorded."""
    row = lake.registry.read_with(lambda reader: files_by_path(reader, [path])).get(path)
    found = None if row is None else _own_footer(lake, row)
    if row is None or found is None:
        return None
    if not dry_run:
        lake.registry.write(lambda transaction: delete_partition_metadata_batch(transaction, [path]))
        mend_footer(lake, path, found[0], row["row_count"], row["file_size"])
        lake.metrics.count_repair("footer")
    return f"{path}: its footer was taken from the file"


def _own_footer(lake: Lake, row: dict[str, Any]) -> tuple[bytes, FileMetaData] | None:
    """The footer of a file by the file itself; none unless the file is the one that was recorded."""
    path = row["file_path"]
    try:
        if row["file_type"] != PARQUET or lake.store.size(path) != row["file_size"]:
            return None
        if lake.store.measure_as(path, row["checksum"]).checksum != row["checksum"]:
            return None
        footer = read_footer(lake.store, path, row["file_size"])
        opened = open_footer(footer, on=path)
    except LakebookError:
        return None
    return (footer, opened) if opened.num_rows == row["row_count"] else None


def _mend_column_stats(lake: Lake, path: str, *, dry_run: bool) -> str | None:
    """Take column statistics from a file's footer, if the file is the one that was recorded."""
    # One that was revived has a row, and statistics, for each time that it was visible.
    rows = lake.registry.read_with(lambda reader: _rows_of(reader, path))
    taken: list[tuple[dict[str, Any], tuple[ColumnStats, ...]]] = []
    for row in rows:
        found = _own_footer(lake, row)
        if found is None:
            return None
        columns, ours = found[1].schema.to_arrow_schema(), path.startswith(f"{DATA}/")
        try:
            stats, complete = lake.registry.read_with(
                lambda reader: statistics_of(reader, row, found[1], columns, ours=ours)  # noqa: B023 - called at once
            )
        except LakebookError:
            return None
        if not complete:
            return None
        taken.append((row, stats))
    if not taken:
        return None
    if not dry_run:
        lake.registry.write(lambda transaction: _put_stats(transaction, path, taken))
        # Plans that were made with the statistics of before may lack the file.
        lake.plans.clear()
        lake.metrics.count_repair("statistics")
    return f"{path}: its column statistics were taken from its footer"


def _rows_of(reader: Reader, path: str) -> list[dict[str, Any]]:
    return [row_of(schema.table_files, row) for row in reader.all(FILES_BY_PATH, reader.listed([path]))]


def _put_stats(
    transaction: Transaction, path: str, taken: Iterable[tuple[dict[str, Any], tuple[ColumnStats, ...]]]
) -> None:
    for row, stats in taken:
        table_id, file_id = row["table_id"], row["id"]
        table = transaction.one(TABLE_ROW, table_id)
        if table is None:
            continue
        # Under the table's lock, so that no cleaner can forget the file meanwhile.
        transaction.lock(row_of(schema.tables, table)["object_id"])
        if path not in present_files(transaction, [path]) or file_id not in {
            found["id"] for found in _rows_of(transaction, path)
        }:
            continue
        transaction.run(DELETE_STATS_BETWEEN, table_id, file_id, file_id)
        insert_stats(transaction, table_id, [(file_id, stats)])


def _mend_statistics(lake: Lake, findings: Iterable[Finding], result: Repaired, *, dry_run: bool) -> None:
    wrong = [finding for finding in findings if finding.check == "statistics"]
    if dry_run:
        result.mended += [f"{finding.on}: {finding.what}" for finding in wrong if finding.on.startswith("table ")]
        return
    for row in lake.registry.all(EVERY_TABLE, 0, 1_000_000):
        if lake.registry.write(lambda transaction: mend_totals(transaction, row[0])):  # noqa: B023
            result.mended.append(f"table {row[0]}: its totals were added up again")
            lake.metrics.count_repair("totals")

    def forget(transaction: Transaction) -> int:
        ranges = transaction.all(STAGED_RANGES)
        lost = [found for found in dangling_stats(transaction) if not is_staged(ranges, *found)]
        for table_id, file_id in lost:
            transaction.run(DELETE_STATS_BETWEEN, table_id, file_id, file_id)
        return len(lost)

    while number := lake.registry.write(forget):
        result.mended.append(f"statistics of {number} files that are not known were removed")
