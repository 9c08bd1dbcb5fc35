"""`verify` and `repair` of tables: the registry against itself, and against the bytes.

Verifying a live book must not cry wolf: what looks wrong is looked at again, because a
cleaner or an insert may have been at work between the two looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lakebook.errors import LakebookError
from lakebook.iceberg.arrow_files import file_schema
from lakebook.iceberg.bounds import NOTHING
from lakebook.iceberg.schemas import leaf_fields, schema_from_json
from lakebook.iceberg.statistics import footer_columns, stats_from_footer
from lakebook.lake.attempts import DATA
from lakebook.lake.cleaning import Cleaner, LeaseWatch
from lakebook.lake.footer_store import mend_footer, read_footer
from lakebook.lake.footers import open_footer, upgraded
from lakebook.lake.formats import FORMATS
from lakebook.lake.lake import Lake
from lakebook.lake.leasing import READS
from lakebook.registry.file_stats import DELETE_STATS_BETWEEN, stats_of_files
from lakebook.registry.footers import delete_partition_metadata_batch, load_footers
from lakebook.registry.inserts import EVERY_INSERT, STAGED_RANGES, known_paths
from lakebook.registry.stream_checks import Finding
from lakebook.registry.table_checks import (
    FileToCheck,
    check_tables,
    dangling_footers,
    dangling_stats,
    files_short_of_stats,
    files_to_check,
    mend_totals,
    present_files,
    schema_versions,
)
from lakebook.registry.table_files import CHUNK, chunks, files_by_path
from lakebook.registry.tables import EVERY_TABLE, GET_TABLE_BY_ID, table_from
from lakebook.registry.transactions import Reader, Transaction
from lakebook.spark.jobs import check_on_executors

Progress = Callable[[str], None]

_SIDECARS = ("_SUCCESS",)
_SIDECAR_ENDS = (".crc",)


@dataclass
class Checked:
    """What verifying the tables found."""

    findings: list[Finding] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)


@dataclass
class Repaired:
    """What was mended, or would be, and what cannot be without guessing."""

    dry_run: bool
    mended: list[str] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)


def is_sidecar(path: str) -> bool:
    """Whether a file is one that a writer leaves beside its own."""
    name = path.rpartition("/")[2]
    return name in _SIDECARS or (name.startswith(".") and name.endswith(_SIDECAR_ENDS))


def verify_tables(
    lake: Lake, progress: Progress = lambda step: None, *, files: bool = True, spark: Any = None
) -> Checked:
    """Check tables in the registry and, with `files`, every byte of them; with `spark`, on its executors."""
    result = Checked()
    progress("tables")
    found, unfinished, counts = lake.registry.in_snapshot(check_tables)
    result.findings += found
    result.unfinished += unfinished
    result.checked |= counts
    result.findings += lake.registry.in_snapshot(lambda reader: list(_dangling(reader)))
    result.findings += lake.registry.in_snapshot(lambda reader: list(_short_of_stats(reader)))
    if files:
        progress("data files")
        result.checked["data_files"] = _check_files(lake, result.findings, spark)
        progress("orphans")
        result.checked["objects"] = _check_objects(lake, result)
    return result


def _attempts(reader: Reader) -> Iterator[tuple[str, int, str | None, str | None]]:
    after = ""
    while page := reader.all(EVERY_INSERT, after, CHUNK):
        yield from ((row[0], row[1], row[2], row[3]) for row in page)
        after = page[-1][0]


def _dangling(reader: Reader) -> Iterator[Finding]:
    folders = {folder for _, _, folder, _ in _attempts(reader) if folder is not None}
    ranges = reader.all(STAGED_RANGES)
    for path in dangling_footers(reader):
        # Staged by an insert that is at work, or that a sweep has yet to settle.
        if _folder_of(path) not in folders:
            yield Finding("footers", path, "the footer's file is not known")
    for table_id, file_id in dangling_stats(reader):
        if not _is_staged(ranges, table_id, file_id):
            yield Finding("statistics", f"table {table_id}, file {file_id}", "statistics of a file that is not known")


def _short_of_stats(reader: Reader) -> Iterator[Finding]:
    """Files that lack a row of statistics for a column: a plan would take it for one of nulls alone."""
    for table_id, schema_version, schema in schema_versions(reader):
        plain = [leaf for leaf in leaf_fields(schema_from_json(schema)) if not leaf.in_collection]
        for path in files_short_of_stats(reader, table_id, schema_version, len(plain)):
            yield Finding("statistics", path, "its column statistics are gone")


def _is_staged(ranges: list[tuple[Any, ...]], table_id: int, file_id: int) -> bool:
    return any(table == table_id and first <= file_id <= last for table, first, last in ranges)


def _folder_of(path: str) -> str:
    """The folder of the insert that a path belongs to, if it lies in one."""
    return "/".join(path.split("/")[:3])


# --- bytes ---------------------------------------------------------------------


def _pages(lake: Lake) -> Iterator[list[FileToCheck]]:
    after = ""
    while True:
        start = after
        page = lake.registry.read_with(lambda reader: files_to_check(reader, start, CHUNK))  # noqa: B023
        if not page:
            return
        yield page
        after = page[-1].file_path


def _check_files(lake: Lake, findings: list[Finding], spark: Any) -> int:
    number = 0
    for page in _pages(lake):
        # The object of a file that is being deleted may be there or not.
        files = [file for file in page if file.state != "deleting"]
        number += len(files)
        suspects = [*_wrong_bytes(lake, files, spark), *_wrong_footers(lake, files)]
        gone = _removed_meanwhile(lake, [finding.on for finding in suspects])
        findings += [finding for finding in suspects if finding.on not in gone]
    return number


def _removed_meanwhile(lake: Lake, paths: list[str]) -> set[str]:
    if not paths:
        return set()
    gone: set[str] = set()
    for chunk in chunks(sorted(set(paths))):
        there = lake.registry.read_with(lambda reader: present_files(reader, chunk))  # noqa: B023
        gone |= set(chunk) - there
    return gone


def _wrong_bytes(lake: Lake, files: list[FileToCheck], spark: Any) -> Iterator[Finding]:
    if spark is not None:
        wanted = [(file.file_path, file.file_size, file.checksum) for file in files]
        for path, size, checksum in check_on_executors(spark, lake.store.warehouse.root, wanted):
            yield _byte_finding(path, size, checksum)
        return
    present = []
    for file in files:
        if lake.store.size(file.file_path) is None:
            yield _byte_finding(file.file_path, None, None)
        else:
            present.append(file)
    try:
        measured = {found.path: found for found in lake.store.measure([file.file_path for file in present])}
    except LakebookError:
        measured = {}
        for file in present:
            try:
                (measured[file.file_path],) = lake.store.measure([file.file_path])
            except LakebookError as error:
                yield Finding("files", file.file_path, f"it cannot be read ({error.what})")
    for file in present:
        found = measured.get(file.file_path)
        if found is not None and (found.size, found.checksum) != (file.file_size, file.checksum):
            yield _byte_finding(file.file_path, found.size, found.checksum)


def _byte_finding(path: str, size: int | None, checksum: str | None) -> Finding:
    if size is None:
        return Finding("files", path, "it does not exist")
    return Finding("files", path, f"its bytes are not those that were recorded ({size} bytes, {checksum})")


def _wrong_footers(lake: Lake, files: list[FileToCheck]) -> Iterator[Finding]:
    """Footers that differ from those in the files, and row counts that differ from either."""
    stored = lake.registry.read_with(lambda reader: load_footers(reader, [file.file_path for file in files]))
    for file in files:
        if lake.store.size(file.file_path) is None:
            continue
        try:
            rows = FORMATS[file.file_type].count_rows(lake, file.file_path, file.file_size)
            if rows != file.row_count:
                yield Finding("files", file.file_path, f"it has {rows} rows instead of {file.row_count}")
            record = stored.get(file.file_path)
            if record is None:
                continue  # If it should have one, the registry's own check says so.
            ours = upgraded(record.metadata, record.partition_format_version, file.row_count, on=file.file_path)
            theirs = read_footer(lake.store, file.file_path, file.file_size)
            if record.partition_format_version == 2 and ours != theirs:
                yield Finding("footers", file.file_path, "the stored footer differs from the file's")
            elif _contradicts(lake, file, ours):
                yield Finding("statistics", file.file_path, "its column statistics contradict its footer")
        except Exception as error:  # noqa: BLE001 - whatever a parser says of a damaged file
            what = error.what if isinstance(error, LakebookError) else str(error)
            yield Finding("footers", file.file_path, f"its rows cannot be counted ({what})")


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


def _check_objects(lake: Lake, result: Checked) -> int:
    """Objects that nothing accounts for: orphans, sidecars, staged tables without a lease."""
    number = 0
    suspects: list[tuple[str, str]] = []
    for chunk in chunks(item.path for item in lake.store.list(DATA)):
        number += len(chunk)
        known = lake.registry.read_with(lambda reader: known_paths(reader, chunk))  # noqa: B023
        suspects += [
            (path, "a sidecar that its writer left" if is_sidecar(path) else "no row refers to it")
            for path in chunk
            if path not in known
        ]
    attempts = lake.registry.read_with(lambda reader: {row[2]: row for row in _attempts(reader) if row[2]})
    left: dict[str, int] = {}
    for path, what in suspects:
        attempt = attempts.get(_folder_of(path))
        if attempt is None:
            # In this order: what is forgotten between the two looks is gone by then.
            if not _known_now(lake, path) and lake.store.size(path) is not None:
                result.findings.append(Finding("orphans", path, what))
        else:
            left[attempt[0]] = left.get(attempt[0], 0) + 1
    result.unfinished += [
        f"insert {commit_id} ({attempts_state(attempts, commit_id)}): {count} objects are not swept yet"
        for commit_id, count in sorted(left.items())
    ]
    number += _check_reads(lake, result)
    return number


def attempts_state(attempts: dict[Any, Any], commit_id: str) -> str:
    """The state of the commit of an insert."""
    return next((str(row[3]) for row in attempts.values() if row[0] == commit_id), "unknown")


def _known_now(lake: Lake, path: str) -> bool:
    return bool(lake.registry.read_with(lambda reader: known_paths(reader, [path])))


def _check_reads(lake: Lake, result: Checked) -> int:
    found: dict[str, int] = {}
    for item in lake.store.list(READS):
        lease_id = item.path.split("/")[1]
        found[lease_id] = found.get(lease_id, 0) + 1
    held = {lease.id for lease in LeaseWatch(lake).every()}
    for lease_id in sorted(set(found) - held):
        if any(True for _ in lake.store.list(f"{READS}/{lease_id}")):
            result.unfinished.append(f"the staged tables of lease {lease_id}, which is over, are not removed yet")
    return sum(found.values())


# --- repair --------------------------------------------------------------------


def repair_tables(lake: Lake, *, dry_run: bool = False, progress: Progress = lambda step: None) -> Repaired:
    """Mend what can be mended without guessing: totals, missing footers, leftovers; and say what cannot."""
    result = Repaired(dry_run)
    before = verify_tables(lake, progress, files=True)
    if not dry_run:
        progress("sweep")
    swept = Cleaner(lake).sweep(dry_run=dry_run)
    if swept.objects or swept.fenced:
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
    return result


def _mend(lake: Lake, finding: Finding, *, dry_run: bool) -> str | None:
    """What was done about a finding; none if nothing can be without guessing."""
    if finding.check == "footers" and finding.what in ("it has no footer", "the stored footer differs from the file's"):
        return _mend_footer(lake, finding.on, dry_run=dry_run)
    if finding.check == "footers" and finding.what == "the footer's file is not known":
        if not dry_run:
            lake.registry.write(lambda transaction: delete_partition_metadata_batch(transaction, [finding.on]))
        return f"{finding.on}: a footer that nothing refers to was removed"
    if finding.check == "orphans" and is_sidecar(finding.on):
        if not dry_run:
            lake.store.delete_one(finding.on)
        return f"{finding.on}: a sidecar was removed"
    if finding.check == "statistics" and finding.on.startswith("table "):
        return ""  # All at once, below.
    return None


def _mend_footer(lake: Lake, path: str, *, dry_run: bool) -> str | None:
    """Take a footer from its file, if the file is the one that was recorded."""
    row = lake.registry.read_with(lambda reader: files_by_path(reader, [path])).get(path)
    if row is None or lake.store.size(path) != row["file_size"] or lake.store.checksum(path) != row["checksum"]:
        return None
    try:
        footer = read_footer(lake.store, path, row["file_size"])
        if open_footer(footer, on=path).num_rows != row["row_count"]:
            return None
    except LakebookError:
        return None
    if not dry_run:
        lake.registry.write(lambda transaction: delete_partition_metadata_batch(transaction, [path]))
        mend_footer(lake, path, footer, row["row_count"], row["file_size"])
        lake.metrics.count_repair("footer")
    return f"{path}: its footer was taken from the file"


def _mend_statistics(lake: Lake, findings: Iterable[Finding], result: Repaired, *, dry_run: bool) -> None:
    result.mended = [text for text in result.mended if text]
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
        lost = [found for found in dangling_stats(transaction) if not _is_staged(ranges, *found)]
        for table_id, file_id in lost:
            transaction.run(DELETE_STATS_BETWEEN, table_id, file_id, file_id)
        return len(lost)

    while number := lake.registry.write(forget):
        result.mended.append(f"statistics of {number} files that are not known were removed")
