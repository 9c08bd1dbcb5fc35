"""`verify` of tables: the registry against itself, and against the bytes.

Verifying a live book must not cry wolf: what looks wrong is looked at again, because a
cleaner or an insert may have been at work between the two looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lakebook.errors import LakebookError
from lakebook.iceberg.manifests import live_entries, read_manifest_list
from lakebook.iceberg.publishing import ICEBERG
from lakebook.iceberg.schemas import leaf_fields, stored_schema
from lakebook.iceberg.table_metadata import parse_metadata
from lakebook.lake.attempts import DATA
from lakebook.lake.cleaning import LeaseWatch, is_past_grace
from lakebook.lake.file_checks import wrong_files
from lakebook.lake.lake import Lake
from lakebook.lake.leasing import READS
from lakebook.registry.holding import restored
from lakebook.registry.inserts import (
    EVERY_INSERT,
    STAGED_RANGES,
    folders_above,
    known_paths,
    unaccounted_paths,
)
from lakebook.registry.publishing import METADATA, STATISTICS, Pointer, every_pointer, pointer_of
from lakebook.registry.stream_checks import Finding
from lakebook.registry.table_checks import (
    FileToCheck,
    PublishedState,
    check_tables,
    dangling_footers,
    dangling_stats,
    files_at,
    files_short_of_stats,
    files_to_check,
    present_files,
    published_state,
    schema_versions,
)
from lakebook.registry.table_files import CHUNK, chunks
from lakebook.registry.tables import GET_TABLE_BY_ID
from lakebook.registry.transactions import Reader
from lakebook.storage.answers import ObjectInfo

Progress = Callable[[str], None]

_SIDECARS = ("_SUCCESS",)
_SIDECAR_ENDS = (".crc",)
#: What `repair` takes from the file anew.
STATISTICS_GONE = "its column statistics are gone"
# How often a table is looked at that others publish meanwhile.
_LOOKS = 5
# A job costs the same whether its files are few or many; their rows are all that the driver holds.
_FILES_PER_JOB = 20_000
# What a comparison tells of at most.
_MOST_TOLD = 5


@dataclass
class Checked:
    """What verifying the tables found."""

    findings: list[Finding] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)


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
    now = lake.clock.now_ms()
    found, unfinished, counts = lake.registry.in_snapshot(lambda reader: check_tables(reader, now))
    result.findings += found
    result.unfinished += unfinished
    result.checked |= counts
    result.findings += lake.registry.in_snapshot(lambda reader: list(_dangling(reader)))
    result.findings += lake.registry.in_snapshot(lambda reader: list(_short_of_stats(reader)))
    if files:
        progress("data files")
        result.checked["data_files"] = _check_files(lake, result.findings, spark)
        progress("published tables")
        result.checked["published_tables"] = _check_published(lake, result)
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
        if folders.isdisjoint(folders_above(path)):
            yield Finding("footers", path, "the footer's file is not known")
    for table_id, file_id in dangling_stats(reader):
        if not is_staged(ranges, table_id, file_id):
            yield Finding("statistics", f"table {table_id}, file {file_id}", "statistics of a file that is not known")


def _short_of_stats(reader: Reader) -> Iterator[Finding]:
    """Files that lack a row of statistics for a column: a plan has to look into them whatever is asked."""
    for table_id, schema_version, schema in schema_versions(reader):
        plain = [leaf for leaf in leaf_fields(stored_schema(schema)) if not leaf.in_collection]
        for path in files_short_of_stats(reader, table_id, schema_version, len(plain)):
            yield Finding("statistics", path, STATISTICS_GONE)


def is_staged(ranges: list[tuple[Any, ...]], table_id: int, file_id: int) -> bool:
    """Whether an insert that is at work, or not settled yet, has reserved the id of a file."""
    return any(table == table_id and first <= file_id <= last for table, first, last in ranges)


# --- bytes ---------------------------------------------------------------------


def _pages(lake: Lake, most: int) -> Iterator[list[FileToCheck]]:
    after = ""
    while True:
        start = after
        page = lake.registry.read_with(lambda reader: files_to_check(reader, start, most))  # noqa: B023
        if not page:
            return
        yield page
        after = page[-1].file_path


def _check_files(lake: Lake, findings: list[Finding], spark: Any) -> int:
    number = 0
    for page in _pages(lake, CHUNK if spark is None else _FILES_PER_JOB):
        # The object of a file that is being deleted may be there or not.
        files = [file for file in page if file.state != "deleting"]
        number += len(files)
        suspects = list(wrong_files(lake, files, spark))
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


# --- published tables ------------------------------------------------------------


def _check_published(lake: Lake, result: Checked) -> int:
    """The metadata, manifests and live files of every published table, against its rows."""
    pointers = lake.registry.in_snapshot(lambda reader: list(every_pointer(reader)))
    for pointer in pointers:
        _check_table(lake, pointer.table_id, result)
    return len(pointers)


def _check_table(lake: Lake, table_id: int, result: Checked) -> None:
    def present(reader: Reader) -> Pointer | None:
        return None if reader.one(GET_TABLE_BY_ID, table_id) is None else pointer_of(reader, table_id)

    shown = ""
    for _ in range(_LOOKS):
        state = lake.registry.in_snapshot(lambda reader: published_state(reader, table_id))
        if state is None:
            return
        shown = state.table.shown
        found = list(_wrong_metadata(lake, state))
        # What is wrong only because it was published again or dropped meanwhile, is not wrong.
        if not found or lake.registry.in_snapshot(present) == state.pointer:
            result.findings += found
            return
    result.unfinished.append(f"{shown} was published again and again while it was looked at")


def _wrong_metadata(lake: Lake, state: PublishedState) -> Iterator[Finding]:
    pointer, table = state.pointer, state.table
    sizes = {path: size for path, (_, size) in state.files.items()}
    for path, size in sorted((sizes | state.branch_files).items()):
        try:
            found = lake.store.size(path)
        except LakebookError as error:
            yield _unreadable(path, "the file", error)
            continue
        if found != size:
            what = "it does not exist" if found is None else f"it has {found} bytes instead of {size}"
            yield Finding("published", path, what)
    path = pointer.metadata_location
    try:
        # Not the publisher's own copy of it, which no damage to the file reaches.
        metadata = parse_metadata(lake.store.read(path), path)
    except Exception as error:  # noqa: BLE001 - whatever a parser says of a damaged file
        yield _unreadable(path, "the metadata", error)
        return
    if _relative(lake, metadata.location) == metadata.location:
        yield Finding("published", table.shown, f"its metadata is that of another place ({metadata.location})")
        return
    for what, said, known in (
        ("uuid", str(metadata.table_uuid), table.table_uuid),
        ("location", _relative(lake, metadata.location), pointer.location),
        ("current snapshot", metadata.current_snapshot_id, pointer.snapshot_id),
        ("last sequence number", metadata.last_sequence_number, pointer.last_sequence),
    ):
        if said != known:
            yield Finding("published", table.shown, f"its metadata says that its {what} is {said}, and not {known}")
    yield from _wrong_names(lake, state, metadata)
    yield from _wrong_snapshots(lake, state, metadata)


def _wrong_names(lake: Lake, state: PublishedState, metadata: Any) -> Iterator[Finding]:
    """Metadata and statistics files that the metadata names and nobody knows, or the other way round."""
    named = {
        METADATA: {state.pointer.metadata_location, *(entry.metadata_file for entry in metadata.metadata_log)},
        STATISTICS: {item.statistics_path for item in (*metadata.statistics, *metadata.partition_statistics)},
    }
    for kind, locations in named.items():
        wanted = {_relative(lake, location) for location in locations}
        known = {path for path, (of_kind, _) in state.files.items() if of_kind == kind}
        for path in sorted(wanted - known - {state.pointer.metadata_location}):
            yield Finding("published", path, "the metadata names it, but it is not known")
        for path in sorted(known - wanted):
            yield Finding("published", path, "nothing refers to it")


def _wrong_snapshots(lake: Lake, state: PublishedState, metadata: Any) -> Iterator[Finding]:
    on, io = state.table.shown, lake.publisher.io
    rows = {row.snapshot_id: row for row in state.snapshots}
    listed = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
    for ident in sorted(rows.keys() - listed.keys()):
        yield Finding("published", on, f"its metadata does not list snapshot {ident}, which has a row")
    for ident in sorted(listed.keys() - rows.keys()):
        yield Finding("published", on, f"its metadata lists snapshot {ident}, which has no row")
    manifests: dict[str, Any] = {}
    current: list[Any] | None = []
    for ident, snapshot in sorted(listed.items()):
        path = _relative(lake, snapshot.manifest_list)
        row = rows.get(ident)
        if row is not None and (path, snapshot.sequence_number) != (row.manifest_list, row.sequence_number):
            yield Finding("published", on, f"snapshot {ident} is another than its row says")
        try:
            found = read_manifest_list(io, snapshot.manifest_list)
        except Exception as error:  # noqa: BLE001 - whatever a parser says of a damaged file
            yield _unreadable(path, "the manifest list", error)
            current = None if ident == metadata.current_snapshot_id else current
            continue
        by_path = {_relative(lake, manifest.manifest_path): manifest for manifest in found}
        if row is not None and by_path.keys() != state.listings.get(ident, set()):
            yield Finding("published", path, f"snapshot {ident} lists other manifests than its rows say")
        for name, manifest in by_path.items():
            if name in state.files and state.files[name][1] != manifest.manifest_length:
                yield Finding("published", name, f"a snapshot lists it with {manifest.manifest_length} bytes")
        manifests |= by_path
        current = found if ident == metadata.current_snapshot_id else current
    if current is not None:
        yield from _wrong_live_files(lake, state, current)
        for manifest in current:
            manifests.pop(_relative(lake, manifest.manifest_path), None)
    for path, manifest in sorted(manifests.items()):
        try:
            for _ in live_entries(io, manifest):
                pass
        except Exception as error:  # noqa: BLE001 - whatever a parser says of a damaged file
            yield _unreadable(path, "the manifest", error)


def _wrong_live_files(lake: Lake, state: PublishedState, manifests: Iterable[Any]) -> Iterator[Finding]:
    """Whether the current snapshot of `main` has exactly the files of the version that it stands for."""
    version, on = state.pointer.version, state.table.shown
    expected = {
        location or lake.store.uri(path): (content, rows, size)
        for path, location, content, rows, size in lake.registry.in_snapshot(
            lambda reader: list(files_at(reader, state.table.id, version))
        )
    }
    wrong: list[str] = []
    for manifest in manifests:
        try:
            for entry in live_entries(lake.publisher.io, manifest):
                file = entry.data_file
                facts = (int(file.content), file.record_count, file.file_size_in_bytes)
                known = expected.pop(file.file_path, None)
                if known is None:
                    wrong.append(f"its current snapshot lists {file.file_path}, which version {version} has not")
                elif known != facts:
                    wrong.append(f"its current snapshot says {facts} of {file.file_path}, and not {known}")
        except Exception as error:  # noqa: BLE001 - whatever a parser says of a damaged file
            yield _unreadable(_relative(lake, manifest.manifest_path), "the manifest", error)
            return
    wrong += [f"its current snapshot does not list {location}, which version {version} has" for location in expected]
    yield from (Finding("published", on, what) for what in wrong[:_MOST_TOLD])
    if len(wrong) > _MOST_TOLD:
        yield Finding("published", on, f"{len(wrong) - _MOST_TOLD} more files of its current snapshot are wrong")


def _unreadable(path: str, what: str, error: Exception) -> Finding:
    reason = error.what if isinstance(error, LakebookError) else f"{type(error).__name__}: {error}"
    return Finding("published", path, f"{what} cannot be read ({reason})")


def _relative(lake: Lake, location: str) -> str:
    """The path of a location, or the location itself if it is in no warehouse of ours."""
    try:
        return lake.store.relative(location)
    except LakebookError:
        return location


# --- objects -------------------------------------------------------------------


def _check_objects(lake: Lake, result: Checked) -> int:
    """Objects that nothing accounts for: orphans, sidecars, staged tables without a lease."""
    number = 0
    former = restored(lake.registry)
    suspects: list[tuple[str, str, bool]] = []
    for folder in (DATA, ICEBERG):
        for items in _listed(lake, folder, result):
            number += len(items)
            known = lake.registry.read_with(lambda reader: known_paths(reader, [item.path for item in items]))  # noqa: B023
            if former is not None:
                left_there = [item for item in items if item.path not in known and former.was_there(item.modified)]
                unknown = lake.registry.read_with(
                    lambda reader: unaccounted_paths(reader, [item.path for item in left_there])  # noqa: B023
                )
                result.unfinished += [
                    former.unknown(item.path, item.modified) for item in left_there if item.path in unknown
                ]
                known |= unknown
            suspects += [
                (
                    item.path,
                    "a sidecar that its writer left" if is_sidecar(item.path) else "no row refers to it",
                    # Outside engines may be at work: they have no commit rows.
                    folder == DATA or is_past_grace(lake, item),
                )
                for item in items
                if item.path not in known
            ]
    attempts = lake.registry.read_with(lambda reader: {row[2]: row for row in _attempts(reader) if row[2]})
    left: dict[str, int] = {}
    for path, what, is_left in suspects:
        attempt = next((attempts[folder] for folder in folders_above(path) if folder in attempts), None)
        if attempt is not None:
            left[attempt[0]] = left.get(attempt[0], 0) + 1
        # In this order: what is forgotten between the two looks is gone by then.
        elif is_left and _unaccounted_now(lake, path) and is_there(lake, path):
            result.findings.append(Finding("orphans", path, what))
    result.unfinished += [
        f"insert {commit_id} ({attempts_state(attempts, commit_id)}): {count} objects are not swept yet"
        for commit_id, count in sorted(left.items())
    ]
    number += _check_reads(lake, result)
    return number


def _listed(lake: Lake, folder: str, result: Checked) -> Iterator[list[ObjectInfo]]:
    try:
        yield from chunks(lake.store.list(folder))
    except LakebookError as error:
        result.findings.append(Finding("orphans", folder, f"it cannot be listed ({error.what})"))


def attempts_state(attempts: dict[Any, Any], commit_id: str) -> str:
    """The state of the commit of an insert."""
    return next((str(row[3]) for row in attempts.values() if row[0] == commit_id), "unknown")


def is_there(lake: Lake, path: str) -> bool:
    """Whether an object is there, be it one that cannot be read."""
    try:
        return lake.store.size(path) is not None
    except LakebookError:
        return True


def _unaccounted_now(lake: Lake, path: str) -> bool:
    return bool(lake.registry.read_with(lambda reader: unaccounted_paths(reader, [path])))


def _check_reads(lake: Lake, result: Checked) -> int:
    found: dict[str, int] = {}
    for items in _listed(lake, READS, result):
        for item in items:
            lease_id = item.path.split("/")[1]
            found[lease_id] = found.get(lease_id, 0) + 1
    held = {lease.id for lease in LeaseWatch(lake).every()}
    for lease_id in sorted(set(found) - held):
        if any(True for _ in lake.store.list(f"{READS}/{lease_id}")):
            result.unfinished.append(f"the staged tables of lease {lease_id}, which is over, are not removed yet")
    return sum(found.values())
