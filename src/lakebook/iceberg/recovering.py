"""What the Iceberg metadata of a table tells of it when the registry is gone: files, versions and snapshots.

Manifests are compared from one state of the table to the next, and those that both have are not read: the work
grows with what has changed. No data file is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.manifest import DataFileContent, ManifestEntry, ManifestFile
from pyiceberg.table.metadata import TableMetadataV2
from pyiceberg.table.snapshots import Snapshot

from lakebook.errors import InvalidMetadata, LakebookError
from lakebook.iceberg.file_io import WarehouseIO
from lakebook.iceberg.incoming import operation_of
from lakebook.iceberg.manifests import live_entries, read_manifest_list
from lakebook.iceberg.numbering import KnownVersions, ShapeChange, State, metadata_number, number_versions
from lakebook.iceberg.partitioning import order_to_json, partition_path, partition_to_json, spec_to_json
from lakebook.iceberg.schemas import schema_to_json
from lakebook.iceberg.table_metadata import CODEC, GC_ENABLED, NAME_MAPPING, parse_metadata, schema_for
from lakebook.registry.publishing import MANIFEST, MANIFEST_LIST, METADATA, STATISTICS, MetadataFile, SnapshotRecord
from lakebook.registry.schema import MAX_BIGINT, MAX_INTEGER
from lakebook.storage.answers import NO_ANSWER
from lakebook.storage.objects import ObjectStore

# The column of a file of deletes that names the file whose rows are deleted.
_REFERENCED_PATH = 2147483546
_GENERATED = (NAME_MAPPING, "format-version")
# The end of the year 9999, in milliseconds.
_LAST_TIME = 253_402_300_799_999


@dataclass
class RecoveredFile:
    """A file of a table, and in which versions it is visible."""

    id: int
    path: str
    location: str | None
    size: int
    rows: int
    content: int
    spec_id: int
    partition_path: str
    partition_values: str
    sequence_number: int | None
    referenced_path: str | None
    from_version: int
    to_version: int | None = None
    nans: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RecoveredVersion:
    """A version that a snapshot stands for, or that is empty."""

    version: int
    snapshot_id: int | None
    operation: str
    schema_id: int | None
    timestamp_ms: int
    summary: Mapping[str, str]
    #: Whether `main` went to what was there before: the snapshot does not tell what changed.
    is_jump: bool


@dataclass(frozen=True)
class Shape:
    """A schema, a partition spec and a sort order, as the registry keeps them."""

    schema: Mapping[str, Any]
    spec: Mapping[str, Any]
    order: Mapping[str, Any]

    @property
    def ids(self) -> tuple[int, int, int]:
        """The numbers by which Iceberg knows them."""
        return int(self.schema["schema-id"]), int(self.spec["spec-id"]), int(self.order["order-id"])


@dataclass
class RecoveredTable:
    """What the metadata of a table tells."""

    table_uuid: str
    location: str
    metadata_path: str
    metadata_number: int
    snapshot_id: int | None
    last_sequence: int
    last_field_id: int
    updated_ms: int
    current: Shape
    schemas: Mapping[int, Mapping[str, Any]]
    specs: Mapping[int, Mapping[str, Any]]
    #: Without those that publishing adds by itself.
    properties: dict[str, str]
    compression: str
    #: The newest version that its metadata files tell of.
    version: int = 0
    #: The versions, newer than the checkpoint, that changed its schema, partition spec or sort order, and until when.
    shapes: list[tuple[int, Shape, int]] = field(default_factory=list)
    #: The versions that snapshots stand for and those that are empty, the oldest first.
    versions: list[RecoveredVersion] = field(default_factory=list)
    files: list[RecoveredFile] = field(default_factory=list)
    #: Versions between those of snapshots of which each file's beginning is known.
    between: set[int] = field(default_factory=set)
    snapshots: list[SnapshotRecord] = field(default_factory=list)
    metadata_files: list[MetadataFile] = field(default_factory=list)
    listings: dict[int, list[str]] = field(default_factory=dict)
    branch_files: dict[str, int] = field(default_factory=dict)


# --- which metadata ------------------------------------------------------------


@dataclass
class Newest:
    """Which metadata file of a table is the newest, and what there is to say of the others."""

    path: str | None = None
    metadata: TableMetadataV2 | None = None
    #: No later one names it: that it was ever committed, only the registry knew.
    is_unproven: bool = False
    #: Files that each claim to follow the same one.
    contested: list[str] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    #: The files that lead to it, itself the last.
    chain: list[tuple[str, TableMetadataV2]] = field(default_factory=list)


def newest_metadata(store: ObjectStore, candidates: Iterable[str], known: str | None) -> Newest:
    """The newest metadata file that follows from the one which is known, or from the oldest there is.

    Each file names the one before it. One that another follows was committed. Where two follow the same one and
    nobody follows either, neither is taken.
    """
    result = Newest()
    least = metadata_number(known) if known is not None else None
    parsed: dict[str, TableMetadataV2] = {}
    for path in sorted(candidates):
        number = metadata_number(path)
        if number is None or (least is not None and number < least):
            continue
        try:
            parsed[path] = _checked(parse_metadata(store.read(path), path), path)
        except NO_ANSWER:
            raise  # It may be whole, and the one before it has fewer rows.
        except LakebookError as error:
            result.unreadable.append((path, error.what))
    followers: dict[str | None, list[str]] = {}
    for path, metadata in parsed.items():
        followers.setdefault(_former(store, metadata), []).append(path)
    here = known if known in parsed else _beginning(parsed, followers, result)
    followed = False
    while here is not None:
        result.chain.append((here, parsed[here]))
        following = followers.get(here, [])
        if len(following) > 1:
            proven = [path for path in following if followers.get(path)]
            if len(proven) != 1:
                result.contested = sorted(following)
                break
            following = proven
        if not following:
            break
        here, followed = following[0], True
    result.path = here
    result.metadata = None if here is None else parsed[here]
    result.is_unproven = here is not None and not result.contested and here != known and (followed or known is None)
    return result


def _checked(metadata: TableMetadataV2, path: str) -> TableMetadataV2:
    """Refuse metadata with numbers that no registry holds: anybody can write JSON."""
    snapshots = metadata.snapshots
    times = [metadata.last_updated_ms, *(item.timestamp_ms for item in snapshots)]
    times += [entry.timestamp_ms for entry in metadata.snapshot_log]
    large = [metadata.last_sequence_number, *(item.snapshot_id for item in snapshots)]
    large += [number or 0 for item in snapshots for number in (item.parent_snapshot_id, item.sequence_number)]
    small = [metadata.last_column_id, *(item.schema_id or 0 for item in snapshots)]
    small += [item.schema_id for item in metadata.schemas] + [item.spec_id for item in metadata.partition_specs]
    if (
        all(0 <= number <= _LAST_TIME for number in times)
        and all(abs(number) <= MAX_BIGINT for number in large)
        and all(abs(number) <= MAX_INTEGER for number in small)
    ):
        return metadata
    raise InvalidMetadata("it has numbers that cannot be", on=path)


def _beginning(
    parsed: Mapping[str, TableMetadataV2], followers: Mapping[str | None, list[str]], result: Newest
) -> str | None:
    """Where to begin if nothing is known: the file from which the longest way leads on."""
    starts = [path for former, paths in followers.items() if former not in parsed for path in paths]
    reached = {path: _reach(path, followers) for path in starts}
    longest = [path for path in starts if reached[path] == max(reached.values())]
    if len(longest) > 1:
        result.contested = sorted(longest)
        return None
    return longest[0] if longest else None


def _reach(path: str, followers: Mapping[str | None, list[str]]) -> int:
    """The highest number that a way from here leads to."""
    highest, waiting = 0, [path]
    while waiting:
        here = waiting.pop()
        highest = max(highest, metadata_number(here) or 0)
        waiting += followers.get(here, [])
    return highest


def _former(store: ObjectStore, metadata: TableMetadataV2) -> str | None:
    try:
        return store.relative(metadata.metadata_log[-1].metadata_file) if metadata.metadata_log else None
    except LakebookError:
        return None


# --- what it tells -------------------------------------------------------------


class _Recovery:
    """Reads one table's metadata."""

    def __init__(
        self,
        store: ObjectStore,
        chain: Sequence[tuple[str, TableMetadataV2]],
        sizes: Mapping[str, int],
        known: KnownVersions,
    ) -> None:
        path, metadata = chain[-1]
        self._store = store
        self._io = WarehouseIO(store)
        self._metadata = metadata
        self._sizes = sizes
        self._known = known.snapshots
        self._commits = known.commits
        self._numbers = number_versions(chain, known)
        self._specs = {spec.spec_id: spec for spec in metadata.partition_specs}
        self._lists: dict[int, dict[str, ManifestFile]] = {}
        self._ranges: dict[str, tuple[int, int]] = {}
        # What the manifests of the state that was reached last have: none is read twice.
        self._paths: dict[str, list[str]] = {}
        self._live: dict[str, RecoveredFile] = {}
        self._next_id = 1
        self.table = _described(store, path, metadata)

    def run(self) -> RecoveredTable:
        table, metadata = self.table, self._metadata
        for snapshot in metadata.snapshots:
            self._lists[snapshot.snapshot_id] = {
                self._store.relative(item.manifest_path): item
                for item in read_manifest_list(self._io, snapshot.manifest_list)
            }
        states = self._numbers.states
        before: State | None = None
        for state in states:
            self._go_to(before, state)
            before = state
        table.version = max([self._numbers.version, *(state.version for state in states[-1:])])
        table.shapes = [
            (change.version, _shape(change), change.metadata.last_updated_ms) for change in self._numbers.shapes
        ]
        self._enter_snapshots(states)
        self._enter_branches(states)
        self._enter_files()
        return table

    def _go_to(self, before: State | None, state: State) -> None:
        """From one state to the next: which files come and go."""
        snapshot = None if state.snapshot_id is None else self._metadata.snapshot_by_id(state.snapshot_id)
        old = self._listed(before)
        new = self._listed(state)
        left = {path for name in old.keys() - new.keys() for path in self._paths.pop(name)}
        arriving: dict[str, ManifestEntry] = {}
        for name in sorted(new.keys() - old.keys()):
            entries = self._entries(new[name])
            self._paths[name] = [path for path, _ in entries]
            arriving.update(entries)
        ended = left - arriving.keys()
        for path in ended:
            self._live.pop(path).to_version = state.version
        last = before.version if before is not None else -1
        late = uncertain = False
        for path, entry in arriving.items():
            if path in self._live:
                continue
            commit_id = _commit_of(path)
            begun = self._commits.get(commit_id, -1)
            exact = last < begun <= state.version
            late = late or (not exact and commit_id != "")
            uncertain = uncertain or (not exact and commit_id == "")
            assert snapshot is not None
            file = self._file(path, entry, begun if exact else state.version, snapshot)
            self._live[path] = file
            self.table.files.append(file)
        for name in new.keys() - old.keys():
            ids = [self._live[path].id for path in self._paths[name] if path in self._live]
            if ids:
                self._ranges[name] = (min(ids), max(ids))
        if not ended and not uncertain:
            self.table.between |= self._between(state, last, late=late)
        summary = dict(snapshot.summary.additional_properties) if snapshot is not None and snapshot.summary else {}
        self.table.versions.append(
            RecoveredVersion(
                state.version,
                state.snapshot_id,
                "delete" if snapshot is None else operation_of(snapshot),
                None if snapshot is None or state.is_jump else snapshot.schema_id,
                state.at,
                {key: str(value) for key, value in summary.items()},
                state.is_jump,
            )
        )

    def _listed(self, state: State | None) -> dict[str, ManifestFile]:
        """The manifests of a state; none of one that is empty."""
        return {} if state is None or state.snapshot_id is None else self._lists[state.snapshot_id]

    def _between(self, state: State, last: int, *, late: bool) -> set[int]:
        """The versions that a snapshot covers beside its newest, of which it is known which files each has.

        A file of a commit that is not known (`late`) is of a later version than all that are, as far as none of
        those is missing.
        """
        covered = (state.first, state.version)
        found = set(range(max(covered[0], last + 1), covered[1]))
        known = set(self._commits.values())
        if not late:
            return found
        newest = max(known, default=-1)
        if not known.issuperset(range(covered[0], min(covered[1], newest) + 1)):
            return set()
        return {version for version in found if version <= newest}

    def _entries(self, manifest: ManifestFile) -> list[tuple[str, ManifestEntry]]:
        return [(self._store.relative(entry.data_file.file_path), entry) for entry in live_entries(self._io, manifest)]

    def _file(self, path: str, entry: ManifestEntry, begun: int, snapshot: Snapshot) -> RecoveredFile:
        file = entry.data_file
        spec = self._specs[file.spec_id]
        schema = schema_for(spec, self._metadata.schemas)
        ident, self._next_id = self._next_id, self._next_id + 1
        sequence = entry.sequence_number
        return RecoveredFile(
            ident,
            path,
            None if file.file_path == self._store.uri(path) else file.file_path,
            file.file_size_in_bytes,
            file.record_count,
            1 if file.content == DataFileContent.POSITION_DELETES else 0,
            file.spec_id,
            partition_path(spec, schema, file.partition),
            partition_to_json(spec, schema, file.partition),
            None if sequence == snapshot.sequence_number else sequence,
            self._referenced(file),
            begun,
            None,
            dict(file.nan_value_counts or {}),
        )

    def _referenced(self, file: Any) -> str | None:
        lower = (file.lower_bounds or {}).get(_REFERENCED_PATH)
        if file.content != DataFileContent.POSITION_DELETES or lower is None:
            return None
        if lower != (file.upper_bounds or {}).get(_REFERENCED_PATH):
            return None
        try:
            return self._store.relative(bytes(lower).decode())
        except (LakebookError, UnicodeDecodeError):
            return None

    # --- snapshots ---------------------------------------------------------------------

    def _enter_snapshots(self, states: Sequence[State]) -> None:
        first: dict[int, int] = {}
        for state in states:
            if state.snapshot_id is not None:
                first.setdefault(state.snapshot_id, state.version)
        pinned = dict(first)
        for snapshot in sorted(self._metadata.snapshots, key=lambda item: item.sequence_number or 0):
            ident = snapshot.snapshot_id
            version, ours = first.get(ident), ident in self._numbers.own
            if ident in self._known:
                _, kept, ours = self._known[ident]
                pinned.setdefault(ident, kept)
            parent = snapshot.parent_snapshot_id
            pinned.setdefault(ident, pinned.get(parent, self.table.version) if parent else self.table.version)
            summary = dict(snapshot.summary.additional_properties) if snapshot.summary is not None else {}
            self.table.snapshots.append(
                SnapshotRecord(
                    ident,
                    parent,
                    snapshot.sequence_number or 0,
                    snapshot.timestamp_ms,
                    self._store.relative(snapshot.manifest_list),
                    {**{key: str(value) for key, value in summary.items()}, "operation": operation_of(snapshot)},
                    snapshot.schema_id,
                    version,
                    pinned[ident],
                    self.table.metadata_path,
                    is_ours=ours,
                )
            )
            self.table.listings[ident] = sorted(self._lists[ident])

    def _enter_branches(self, states: Sequence[State]) -> None:
        """Files that only snapshots have which stand for no version."""
        of_main = {state.snapshot_id for state in states if state.snapshot_id is not None}
        paths = {file.path for file in self.table.files}
        seen = {name for ident in of_main for name in self._lists[ident]}
        for snapshot in self._metadata.snapshots:
            if snapshot.snapshot_id in of_main:
                continue
            for name, manifest in self._lists[snapshot.snapshot_id].items():
                if name in seen:
                    continue
                seen.add(name)
                for path, entry in self._entries(manifest):
                    if path not in paths:
                        self.table.branch_files[path] = entry.data_file.file_size_in_bytes

    def _enter_files(self) -> None:
        metadata, store = self._metadata, self._store
        found: dict[str, MetadataFile] = {}

        def note(path: str, kind: str, size: int, ids: tuple[int | None, int | None] = (None, None)) -> None:
            found.setdefault(path, MetadataFile(path, kind, size, *ids))

        for location in (
            *(entry.metadata_file for entry in metadata.metadata_log),
            store.uri(self.table.metadata_path),
        ):
            path = store.relative(location)
            note(path, METADATA, self._sizes.get(path, 0))
        for snapshot in metadata.snapshots:
            path = store.relative(snapshot.manifest_list)
            note(path, MANIFEST_LIST, self._sizes.get(path, 0))
            for name, manifest in self._lists[snapshot.snapshot_id].items():
                note(name, MANIFEST, manifest.manifest_length, self._ranges.get(name, (None, None)))
        for item in (*metadata.statistics, *metadata.partition_statistics):
            path = store.relative(item.statistics_path)
            note(path, STATISTICS, self._sizes.get(path, item.file_size_in_bytes))
        self.table.metadata_files = list(found.values())


def recover_table(
    store: ObjectStore,
    chain: Sequence[tuple[str, TableMetadataV2]],
    sizes: Mapping[str, int],
    known: KnownVersions,
) -> RecoveredTable:
    """What a table's metadata files tell, each of which follows the one before it."""
    try:
        return _Recovery(store, chain, sizes, known).run()
    except LakebookError:
        raise
    except Exception as error:
        # Whatever a parser says of a damaged file.
        raise InvalidMetadata(
            f"its manifests cannot be read ({type(error).__name__}: {error})",
            on=chain[-1][0],
            remedy="Restore a backup",
        ) from error


def _described(store: ObjectStore, path: str, metadata: TableMetadataV2) -> RecoveredTable:
    schemas = {schema.schema_id: schema_to_json(schema) for schema in metadata.schemas}
    specs = {spec.spec_id: spec_to_json(spec) for spec in metadata.partition_specs}
    codec = metadata.properties.get(CODEC, "zstd").lower()
    given = {key: value for key, value in metadata.properties.items() if key not in _GENERATED}
    if given.get(GC_ENABLED) == "false":
        del given[GC_ENABLED]
    given.pop(CODEC, None)
    return RecoveredTable(
        str(metadata.table_uuid),
        store.relative(metadata.location).rstrip("/"),
        path,
        metadata_number(path) or 0,
        metadata.current_snapshot_id,
        metadata.last_sequence_number,
        metadata.last_column_id,
        metadata.last_updated_ms,
        Shape(
            schemas[metadata.current_schema_id], specs[metadata.default_spec_id], order_to_json(metadata.sort_order())
        ),
        schemas,
        specs,
        given,
        "none" if codec == "uncompressed" else codec,
    )


def _shape(change: ShapeChange) -> Shape:
    metadata = change.metadata
    schema = next(item for item in metadata.schemas if item.schema_id == change.schema_id)
    return Shape(schema_to_json(schema), spec_to_json(metadata.spec()), order_to_json(metadata.sort_order()))


def _commit_of(path: str) -> str:
    """The commit in whose folder a file lies; empty if it lies in none."""
    parts = path.split("/")
    return parts[2] if len(parts) > 3 and parts[0] == "data" else ""
