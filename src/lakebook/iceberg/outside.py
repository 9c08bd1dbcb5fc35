"""Commits of outside engines, checked and entered into the registry.

What a commit changes is taken from the manifest entries that its snapshots added or deleted.
Files, versions, schemas and the pointer change in one transaction. Versions that are pending
are published first. An append that was prepared before them is moved onto the newest snapshot;
anything else is a conflict, and this book's own changes wait a little for the engine's retry.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.exceptions import ValidationError as IcebergError
from pyiceberg.manifest import (
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadataV2
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertCreate,
    AssertRefSnapshotId,
    RemovePropertiesUpdate,
    RemoveSnapshotRefUpdate,
    RemoveSnapshotsUpdate,
    SetLocationUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    SetStatisticsUpdate,
    TableRequirement,
    TableUpdate,
    UpgradeFormatVersionUpdate,
    update_table_metadata,
)

from lakebook import failpoints
from lakebook.errors import (
    CommitAborted,
    CommitOutcomeUnknown,
    FilesChanged,
    LakebookError,
    NotAccepted,
)
from lakebook.iceberg.manifests import entries_of, live_entries, only_added, read_manifest_list, write_manifest_list
from lakebook.iceberg.partitioning import (
    order_to_json,
    partition_path,
    partition_to_json,
    spec_to_json,
)
from lakebook.iceberg.publishing import VERSIONS, Publisher, Work, default_location, require_published
from lakebook.iceberg.schemas import check_fields, schema_to_json
from lakebook.iceberg.table_metadata import parse_metadata, schema_for, with_log, with_totals
from lakebook.names import shown
from lakebook.registry.leases import leases_of
from lakebook.registry.outside import (
    NewShape,
    OutsideCommit,
    Step,
    VersionsPending,
    apply_outside,
    flip_commit,
    hold_back,
    known_metadata,
    last_commit_at,
    rows_of_paths,
)
from lakebook.registry.publishing import (
    MANIFEST,
    MANIFEST_LIST,
    METADATA,
    STATISTICS,
    MetadataFile,
    Pointer,
    PointerMoved,
    Publication,
    SnapshotRecord,
    properties_at,
    snapshots_of,
)
from lakebook.registry.table_files import CHUNK, NewFile, visible_deletes, visible_files
from lakebook.registry.tables import NewTable, TableMetadata, TableRecord, create_table, current_table, get_metadata
from lakebook.registry.transactions import Transaction

_OPERATIONS = ("append", "overwrite", "delete", "replace")
_ACCEPTED = "Lakebook takes format version 2 with Parquet data files and Parquet position deletes"
_MOST_ATTEMPTS = 30
# Properties by which an engine is told to write elsewhere.
_PLACES = ("write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path")
_FORMAT_VERSION = "format-version"
# Seconds until a file of an outside engine must have been looked at.
_DEBT = 86_400.0
_REFERENCED_PATH = 2147483546

Change = tuple[TableRecord, Sequence[TableRequirement], Sequence[TableUpdate]]


@dataclass
class _Prepared:
    """A commit that is ready for its transaction."""

    table: TableRecord
    work: Work
    commit: OutsideCommit
    metadata: TableMetadataV2
    location: str


@dataclass
class _Read:
    """What the manifests of one new snapshot say."""

    snapshot: Snapshot
    manifests: list[ManifestFile]
    added: list[ManifestEntry] = field(default_factory=list)
    deleted: list[ManifestEntry] = field(default_factory=list)
    #: Manifests that nobody knew before, with the paths of all files they list.
    new: dict[str, tuple[ManifestFile, list[str]]] = field(default_factory=dict)


class Committer:
    """Takes commits of outside engines for the tables of a book."""

    def __init__(self, publisher: Publisher, check_properties: Callable[[Mapping[str, str]], Any]) -> None:
        self._publisher = publisher
        self._registry = publisher.registry
        self._store = publisher.store
        self._check_properties = check_properties

    # --- the entrances -----------------------------------------------------------------

    def commit(
        self, table: TableRecord, requirements: Sequence[TableRequirement], updates: Sequence[TableUpdate]
    ) -> tuple[TableMetadataV2, str]:
        """Commit to one table; its metadata then, and the URI of the metadata file."""
        return self.commit_all([(table, requirements, updates)])[0]

    def commit_all(self, changes: Sequence[Change]) -> list[tuple[TableMetadataV2, str]]:
        """Commit to several tables, all or nothing."""
        if len({table.id for table, _, _ in changes}) != len(changes):
            raise NotAccepted("a table is named twice", on="commit", remedy="Put all its updates together")
        for table, _, updates in changes:
            self._check_updates(table.shown, updates)
        for attempt in range(_MOST_ATTEMPTS):
            with as_iceberg_says():
                try:
                    return self._try(changes)
                except VersionsPending:
                    # An append can be moved behind what came meanwhile; the rest has to begin again.
                    self._give_precedence(changes)
                    if not all(_can_move(updates) for _, _, updates in changes):
                        raise CommitFailedException("The table was changed meanwhile") from None
                except PointerMoved:
                    if attempt >= 2:
                        self._give_precedence(changes)
        raise CommitFailedException("The table is changed too often; try again")

    def _try(self, changes: Sequence[Change]) -> list[tuple[TableMetadataV2, str]]:
        with ExitStack() as works:
            prepared = [self._prepare(works, *change) for change in changes]
            first = prepared[0]
            grace = self._publisher.settings.published_grace

            def apply(transaction: Transaction) -> None:
                for item in prepared[1:]:
                    flip_commit(transaction, item.work.commit_id)
                transaction.lock(*(item.table.object_id for item in prepared))
                for item in prepared:
                    apply_outside(transaction, item.table, item.commit, item.work.commit_id, grace, _DEBT)

            first.work.commit(apply)
            for item in prepared[1:]:
                item.work.done = True
            failpoints.reach("outside.committed")
            return [(item.metadata, item.location) for item in prepared]

    def _give_precedence(self, changes: Sequence[Change]) -> None:
        seconds = self._publisher.settings.outside_hold
        for table, _, _ in changes:
            self._registry.write(lambda transaction: hold_back(transaction, table, seconds))  # noqa: B023 - called at once

    # --- preparing ---------------------------------------------------------------------

    def _prepare(
        self,
        works: ExitStack,
        table: TableRecord,
        requirements: Sequence[TableRequirement],
        updates: Sequence[TableUpdate],
    ) -> _Prepared:
        publisher = self._publisher
        pointer = require_published(publisher.publish(table), table)
        base = publisher.load(pointer)
        work = works.enter_context(Work(publisher, table.id, pointer.location))
        updates = self._placed(work, table, base, requirements, updates)
        records = {
            item.snapshot_id: item for item in self._registry.read_with(lambda reader: snapshots_of(reader, table.id))
        }
        self._check_removals(table, base, updates, records)
        return _Preparation(self, work, table, pointer, base, updates, records).finish()

    def _placed(
        self,
        work: Work,
        table: TableRecord,
        base: TableMetadataV2,
        requirements: Sequence[TableRequirement],
        updates: Sequence[TableUpdate],
    ) -> Sequence[TableUpdate]:
        """The updates as they stand on the published head; an append is moved onto it where it may be."""
        for requirement in requirements:
            try:
                requirement.validate(base)
            except CommitFailedException:
                if not isinstance(requirement, AssertRefSnapshotId) or requirement.ref != MAIN_BRANCH:
                    raise
                between = _between(base, requirement.snapshot_id)
                ours = between is not None and all(_is_ours(snapshot) for snapshot in between)
                if ours and between and _can_move(updates) and all(_operation(item) == "append" for item in between):
                    return self._moved(work, base, updates)
                if ours:
                    self._give_precedence([(table, (), ())])
                raise
        return updates

    def _moved(self, work: Work, base: TableMetadataV2, updates: Sequence[TableUpdate]) -> Sequence[TableUpdate]:
        """An append on the newest snapshot: same id, new parent and sequence number, its manifests appended."""
        publisher = self._publisher
        head = base.current_snapshot()
        (adding,) = [update for update in updates if isinstance(update, AddSnapshotUpdate)]
        snapshot = adding.snapshot
        self._inside(snapshot.manifest_list)
        theirs = [
            manifest
            for manifest in read_manifest_list(publisher.io, snapshot.manifest_list)
            if manifest.added_snapshot_id == snapshot.snapshot_id
        ]
        manifests = read_manifest_list(publisher.io, head.manifest_list) if head is not None else []
        specs = {spec.spec_id: spec for spec in base.partition_specs}
        for manifest in theirs:
            self._inside(manifest.manifest_path)
            if manifest.content != ManifestContent.DATA:
                raise CommitFailedException("The table was changed meanwhile")
            mine = [entry for entry in entries_of(publisher.io, manifest) if entry.snapshot_id == snapshot.snapshot_id]
            if any(entry.status != ManifestEntryStatus.ADDED for entry in mine):
                raise CommitFailedException("The table was changed meanwhile")
            if not manifest.has_existing_files() and not manifest.deleted_files_count:
                # Written again with nothing in it settled: its sequence number comes from the list.
                manifests.append(_unassigned(manifest))
            elif mine:
                spec = specs[manifest.partition_spec_id]
                path = work.manifest_path()
                schema = schema_for(spec, base.schemas)
                new = only_added(publisher.io, self._store.uri(path), manifest, spec, schema, snapshot.snapshot_id)
                work.note_manifest(new, (None, None))
                manifests.append(new)
        sequence = base.last_sequence_number + 1
        path = f"{work.folder}/snap-{snapshot.snapshot_id}-1-{uuid.uuid4()}.avro"
        location = self._store.uri(path)
        parent = head.snapshot_id if head is not None else None
        size = write_manifest_list(publisher.io, location, snapshot.snapshot_id, parent, sequence, manifests)
        work.written.append(MetadataFile(path, MANIFEST_LIST, size))
        summary = dict(snapshot.summary.additional_properties) if snapshot.summary is not None else {}
        former = head.summary.additional_properties if head is not None and head.summary is not None else None
        moved = snapshot.model_copy(
            update={
                "parent_snapshot_id": parent,
                "sequence_number": sequence,
                "manifest_list": location,
                "summary": _summary(with_totals(summary, former), "append"),
            }
        )
        return [update if update is not adding else AddSnapshotUpdate(snapshot=moved) for update in updates]

    # --- refusing ----------------------------------------------------------------------

    def _check_updates(self, on: str, updates: Sequence[TableUpdate]) -> None:
        for update in updates:
            if isinstance(update, UpgradeFormatVersionUpdate) and update.format_version > 2:
                raise NotAccepted(f"format version {update.format_version} is not taken", on=on, remedy=_ACCEPTED)
            if isinstance(update, SetLocationUpdate):
                self._inside(update.location)
            if isinstance(update, SetPropertiesUpdate):
                self.check_given(on, update.updates)
            if isinstance(update, SetStatisticsUpdate):
                self._inside(update.statistics.statistics_path)
            place = getattr(getattr(update, "partition_statistics", None), "statistics_path", None)
            if place is not None:
                self._inside(place)

    def check_given(self, on: str, properties: Mapping[str, str]) -> None:
        """Refuse properties that lead outside the warehouse, or to what is not taken."""
        if str(properties.get(_FORMAT_VERSION, "2")) != "2":
            raise NotAccepted(
                f"format version {shown(properties[_FORMAT_VERSION])} is not taken", on=on, remedy=_ACCEPTED
            )
        for key in _PLACES:
            if properties.get(key):
                self._inside(properties[key])
        default = properties.get("write.format.default", "parquet").lower()
        if default != "parquet":
            raise NotAccepted(f"data files of format {shown(default)} are not taken", on=on, remedy=_ACCEPTED)
        self._check_properties(properties)

    def _inside(self, location: str) -> str:
        """A location's path in the warehouse; one that is not in it is refused."""
        return self._store.relative(location)

    def _check_removals(
        self,
        table: TableRecord,
        base: TableMetadataV2,
        updates: Sequence[TableUpdate],
        records: Mapping[int, SnapshotRecord],
    ) -> None:
        gone = {
            ident for update in updates if isinstance(update, RemoveSnapshotsUpdate) for ident in update.snapshot_ids
        }
        if not gone:
            return
        freed = {update.ref_name for update in updates if isinstance(update, RemoveSnapshotRefUpdate)}
        named = {ref.snapshot_id for name, ref in base.refs.items() if name not in freed}
        if gone & named:
            raise CommitFailedException("A branch or a tag names a snapshot that would be removed")
        leases = self._registry.read_with(lambda reader: leases_of(reader, table.id))
        least = min((lease.version for lease in leases), default=None)
        for ident in gone:
            record = records.get(ident)
            if record is not None and least is not None and record.pinned_version >= least:
                raise CommitFailedException("A reader holds a lease on a snapshot that would be removed")

    # --- creating ----------------------------------------------------------------------

    def create(
        self,
        namespace: str,
        name: str,
        requirements: Sequence[TableRequirement],
        updates: Sequence[TableUpdate],
    ) -> tuple[TableMetadataV2, str]:
        """Create a table by a commit that was staged: its definition, and its first files if it has any."""
        on = f"table {namespace}.{name}"
        self._check_updates(on, updates)
        for requirement in requirements:
            if not isinstance(requirement, AssertCreate):
                raise CommitFailedException("The table does not exist")
        try:
            built = update_table_metadata(
                MetastoreCatalog._empty_table_metadata(), tuple(updates), enforce_validation=True
            )
        except (IcebergError, ValueError, TypeError, KeyError) as error:
            raise NotAccepted(f"its updates do not make a table ({error})", on=on) from None
        if not isinstance(built, TableMetadataV2):
            raise NotAccepted("it has not format version 2", on=on, remedy=_ACCEPTED)
        return self.enter_new(namespace, name, built, "append")

    def enter_new(
        self, namespace: str, name: str, metadata: TableMetadataV2, operation: str, *, keep_refs: bool = False
    ) -> tuple[TableMetadataV2, str]:
        """Enter a table that begins with this metadata."""
        publisher = self._publisher
        on = f"table {namespace}.{name}"
        place = self._inside(metadata.location).rstrip("/") if metadata.location else ""
        check_fields(metadata.schema().fields)
        for snapshot in metadata.snapshots:
            self._inside(snapshot.manifest_list)
        wanted = NewTable(
            namespace,
            name,
            schema_to_json(metadata.schema()),
            metadata.last_column_id,
            spec_to_json(metadata.spec()),
            order_to_json(metadata.sort_order()),
            "parquet",
            _compression(metadata.properties),
            "spark",
            {},
            _own(metadata.properties),
            str(metadata.table_uuid),
        )
        self.check_given(on, wanted.properties)
        place = place or default_location(str(metadata.table_uuid))
        with as_iceberg_says(), Work(publisher, 0, place) as work:
            preparation = _Creation(self, work, metadata, place, operation, keep_refs)
            made = preparation.finish()
            grace = publisher.settings.published_grace

            def apply(transaction: Transaction) -> None:
                table = create_table(transaction, wanted, work.commit_id)
                state = get_metadata(transaction, table, 1)
                commit = made.commit
                pointer = replace(commit.publication.pointer, table_id=table.id, properties_at=properties_at(state))
                commit = replace(
                    commit,
                    at=max(commit.at, transaction.time_of(table.object_id) + 1),
                    publication=replace(commit.publication, pointer=pointer),
                )
                apply_outside(transaction, table, commit, work.commit_id, grace, _DEBT)

            work.commit(apply)
            failpoints.reach("outside.committed")
        return made.metadata, made.location

    def register(self, namespace: str, name: str, metadata_location: str) -> tuple[TableMetadataV2, str]:
        """Take an Iceberg table that lies in the warehouse, as it is; no data is rewritten."""
        path = self._inside(metadata_location)
        metadata = parse_metadata(self._store.read(path), path)
        return self.enter_new(namespace, name, metadata, "append", keep_refs=True)

    # --- reading manifests -------------------------------------------------------------

    def read_snapshot(self, on: str, snapshot: Snapshot, table_id: int) -> _Read:
        """What a snapshot that is not known yet says of its files."""
        publisher = self._publisher
        self._inside(snapshot.manifest_list)
        found = _Read(snapshot, read_manifest_list(publisher.io, snapshot.manifest_list))
        paths = [self._inside(manifest.manifest_path) for manifest in found.manifests]
        known = self._registry.read_with(lambda reader: known_metadata(reader, paths))
        for path, manifest in zip(paths, found.manifests, strict=True):
            if path in known:
                if known[path] != table_id:
                    raise NotAccepted("it lists a manifest of another table", on=on)
                if manifest.added_snapshot_id != snapshot.snapshot_id:
                    continue
            listed: list[str] = []
            for entry in entries_of(publisher.io, manifest):
                listed.append(self.check_entry(on, entry))
                if entry.snapshot_id == snapshot.snapshot_id:
                    if entry.status == ManifestEntryStatus.ADDED:
                        found.added.append(entry)
                    elif entry.status == ManifestEntryStatus.DELETED:
                        found.deleted.append(entry)
            if path not in known:
                found.new[path] = (manifest, listed)
        return found

    def check_entry(self, on: str, entry: ManifestEntry) -> str:
        """Refuse what is not taken; the path of the file in the warehouse."""
        file = entry.data_file
        if file.content == DataFileContent.EQUALITY_DELETES:
            raise NotAccepted("equality deletes are not taken", on=on, remedy=_ACCEPTED)
        if file.file_format != FileFormat.PARQUET:
            kind = "deletion vectors" if file.content == DataFileContent.POSITION_DELETES else "such data files"
            raise NotAccepted(f"{kind} ({file.file_format.value}) are not taken", on=on, remedy=_ACCEPTED)
        return self._inside(file.file_path)

    def new_file(
        self, on: str, entry: ManifestEntry, spec: PartitionSpec, schema: Schema, sequence: int | None
    ) -> NewFile:
        """A file of an outside engine; its footer and checksum are owed."""
        file = entry.data_file
        path = self.check_entry(on, entry)
        self._check_there(on, path, file.file_size_in_bytes)
        referenced = None
        if file.content == DataFileContent.POSITION_DELETES:
            referenced = self._referenced(file)
        own = self._store.uri(path)
        return NewFile(
            file_path=path,
            file_size=file.file_size_in_bytes,
            file_type="parquet",
            row_count=file.record_count,
            checksum="",
            schema_version=0,
            modified_at=datetime.now(UTC),
            partition_path=partition_path(spec, schema, file.partition),
            partition_values=partition_to_json(spec, schema, file.partition),
            spec_id=file.spec_id,
            is_compressed=True,
            content=1 if file.content == DataFileContent.POSITION_DELETES else 0,
            location=None if file.file_path == own else file.file_path,
            sequence_number=sequence,
            referenced_path=referenced,
        )

    def _check_there(self, on: str, path: str, size: int) -> None:
        head = path.partition("/")[0]
        if head in ("data", "reads"):
            raise NotAccepted(
                f"{shown(path)} lies in a folder of Lakebook's own",
                on=on,
                remedy="Write files under the table's location",
            )
        found = self._store.size(path)
        if found != size:
            what = "is not there" if found is None else f"has {found} bytes instead of {size}"
            raise NotAccepted(f"the file {shown(path)} {what}", on=on, remedy="Write it first, then commit")

    def _referenced(self, file: Any) -> str | None:
        lower = (file.lower_bounds or {}).get(_REFERENCED_PATH)
        upper = (file.upper_bounds or {}).get(_REFERENCED_PATH)
        if lower is None or lower != upper:
            return None
        try:
            return self._store.relative(bytes(lower).decode())
        except (LakebookError, UnicodeDecodeError):
            return None


class _Steps:
    """What preparing a commit and preparing a new table have in common."""

    def __init__(self, committer: Committer, work: Work, on: str, table_id: int, metadata: TableMetadataV2) -> None:
        self._committer = committer
        self._publisher = committer._publisher
        self._store = committer._store
        self._registry = committer._registry
        self._work = work
        self._on = on
        self._table_id = table_id
        self._metadata = metadata
        self._specs = {spec.spec_id: spec for spec in metadata.partition_specs}
        self._listings: dict[int, list[str]] = {}
        self._snapshots: list[SnapshotRecord] = []
        self._files: list[MetadataFile] = []
        self._branch_files: list[tuple[str, int]] = []

    def _file(self, entry: ManifestEntry, *, explicit: int | None = None) -> NewFile:
        spec = self._specs.get(entry.data_file.spec_id)
        if spec is None:
            raise NotAccepted(f"there is no partition spec {entry.data_file.spec_id}", on=self._on)
        schema = schema_for(spec, self._metadata.schemas)
        return self._committer.new_file(self._on, entry, spec, schema, explicit)

    def _enter(self, read: _Read, version: int | None, pinned: int, *, ids: tuple[int, int] | None = None) -> None:
        """Enter a snapshot's row, its manifests and its list."""
        snapshot = read.snapshot
        path = self._store.relative(snapshot.manifest_list)
        self._listings[snapshot.snapshot_id] = [self._store.relative(item.manifest_path) for item in read.manifests]
        self._files.append(MetadataFile(path, MANIFEST_LIST, self._store.size(path) or 0))
        for location, (manifest, listed) in read.new.items():
            first, last = self._range(listed) if ids is None else ids
            self._files.append(MetadataFile(location, MANIFEST, manifest.manifest_length, first, last))
        summary = dict(snapshot.summary.additional_properties) if snapshot.summary is not None else {}
        self._snapshots.append(
            SnapshotRecord(
                snapshot.snapshot_id,
                snapshot.parent_snapshot_id,
                snapshot.sequence_number or 0,
                snapshot.timestamp_ms,
                path,
                {**summary, "operation": _operation(snapshot)},
                snapshot.schema_id,
                version,
                pinned,
                "",
                is_ours=False,
            )
        )

    def _range(self, _paths: Sequence[str]) -> tuple[int | None, int | None]:
        return None, None

    def _live(self, snapshot: Snapshot | None) -> dict[str, ManifestEntry]:
        """Every file that a snapshot contains, by its path."""
        if snapshot is None:
            return {}
        found: dict[str, ManifestEntry] = {}
        for manifest in read_manifest_list(self._publisher.io, snapshot.manifest_list):
            self._committer._inside(manifest.manifest_path)
            for entry in live_entries(self._publisher.io, manifest):
                path = self._committer.check_entry(self._on, entry)
                if path in found:
                    raise NotAccepted(f"the file {shown(path)} is listed twice", on=self._on)
                found[path] = entry
        return found

    def _require_whole(self, read: _Read, expected: int) -> None:
        """Refuse a snapshot that drops or doubles files without saying so."""
        live = 0
        for manifest in read.manifests:
            if manifest.content == ManifestContent.DATA:
                if manifest.added_files_count is None or manifest.existing_files_count is None:
                    return
                live += manifest.added_files_count + manifest.existing_files_count
        if live != expected:
            raise NotAccepted(
                f"its manifests list {live} data files, and {expected} are left after what it adds and deletes",
                on=self._on,
                remedy="Load the table again and repeat the commit",
            )

    def _written(self, number: int, former: Pointer | None) -> tuple[str, int, list[str]]:
        location = self._store.uri(former.metadata_location) if former is not None else None
        at = former.published_at if former is not None else 0
        self._metadata, superseded = with_log(self._metadata, location, at, self._publisher.settings.metadata_kept)
        path, size = self._publisher.metadata.write(self._work.folder, number, self._metadata)
        failpoints.reach("outside.metadata_written")
        self._files.append(MetadataFile(path, METADATA, size))
        return path, size, [self._store.relative(item) for item in superseded]


class _Preparation(_Steps):
    """One commit on one table, from its updates to what its transaction needs."""

    def __init__(
        self,
        committer: Committer,
        work: Work,
        table: TableRecord,
        pointer: Pointer,
        base: TableMetadataV2,
        updates: Sequence[TableUpdate],
        records: Mapping[int, SnapshotRecord],
    ) -> None:
        super().__init__(committer, work, table.shown, table.id, base)
        self._table = table
        self._pointer = pointer
        self._base = base
        self._updates = list(updates)
        self._records = dict(records)
        self._steps: list[Step] = []
        self._state: TableMetadata | None = None

    def finish(self) -> _Prepared:
        """Everything that the transaction needs; the metadata file is written."""
        base, table = self._base, self._table
        now = self._publisher.clock.now_ms()
        last = self._registry.read_with(lambda reader: last_commit_at(reader, table))
        at = max(now, last + 1, base.last_updated_ms)
        chain = self._chain()
        changes_shape = self._changes_shape()
        self._stamp(chain, at + changes_shape)
        self._metadata = self._applied()
        self._specs = {spec.spec_id: spec for spec in self._metadata.partition_specs}
        shape = self._shape()
        if (shape is not None) != bool(changes_shape):
            # Updates that name the present shape again change nothing.
            self._stamp(chain, at + (shape is not None))
            self._metadata = self._applied()
        version = self._pointer.version + (shape is not None)
        self._read_main(chain, version)
        self._read_branches(chain)
        self._metadata = self._metadata.model_copy(update={"properties": self._properties()})
        final = version + len(self._steps)
        path, _, superseded = self._written(self._pointer.metadata_number + 1, self._pointer)
        removed = [
            item.snapshot_id for item in base.snapshots if self._metadata.snapshot_by_id(item.snapshot_id) is None
        ]
        pointer = Pointer(
            table.id,
            self._committer._inside(self._metadata.location).rstrip("/"),
            path,
            self._pointer.metadata_number + 1,
            self._metadata.current_snapshot_id,
            self._metadata.last_sequence_number,
            final,
            self._pointer.properties_at,
            self._metadata.last_updated_ms,
        )
        properties = self._property_changes()
        if shape is not None or properties:
            # The next look at the registry finds other properties than were published; it compares then.
            pointer = replace(pointer, properties_at=-1)
        publication = Publication(
            self._pointer.metadata_location,
            pointer,
            [replace(item, metadata_location=path) for item in self._snapshots],
            list({file.file_path: file for file in (*self._files, *self._work.written)}.values()),
            self._listings,
            removed,
            superseded,
        )
        commit = OutsideCommit(
            self._pointer.version,
            at,
            publication,
            shape,
            self._steps,
            properties,
            self._branch_files,
            self._left(removed),
            self._unlisted_statistics(),
        )
        return _Prepared(table, self._work, commit, self._metadata, self._store.uri(path))

    # --- the metadata ------------------------------------------------------------------

    def _chain(self) -> list[int]:
        """The new snapshots of `main`, the oldest first, where they follow one another from the present head."""
        new = {
            update.snapshot.snapshot_id: update.snapshot
            for update in self._updates
            if isinstance(update, AddSnapshotUpdate)
        }
        head = self._base.current_snapshot_id
        target = head
        for update in self._updates:
            if isinstance(update, SetSnapshotRefUpdate) and update.ref_name == MAIN_BRANCH:
                target = update.snapshot_id
            elif isinstance(update, RemoveSnapshotRefUpdate) and update.ref_name == MAIN_BRANCH:
                target = None
        found: list[int] = []
        at = target
        while at is not None and at in new and at not in found:
            found.append(at)
            at = new[at].parent_snapshot_id
        return found[::-1] if found and at == head and not self._is_replacement() else []

    def _is_replacement(self) -> bool:
        return any(
            isinstance(update, RemoveSnapshotRefUpdate) and update.ref_name == MAIN_BRANCH for update in self._updates
        )

    def _changes_shape(self) -> int:
        actions = {"set-current-schema", "set-default-spec", "set-default-sort-order"}
        return int(any(update.action in actions for update in self._updates))

    def _stamp(self, chain: Sequence[int], at: int) -> None:
        """Give the snapshots of `main` the times of the versions they become."""
        times = {ident: at + number for number, ident in enumerate(chain)}
        if not chain:
            # A snapshot that `main` jumps to has one version.
            for update in self._updates:
                if isinstance(update, SetSnapshotRefUpdate) and update.ref_name == MAIN_BRANCH:
                    times[update.snapshot_id] = at
        self._updates = [
            AddSnapshotUpdate(
                snapshot=update.snapshot.model_copy(update={"timestamp_ms": times[update.snapshot.snapshot_id]})
            )
            if isinstance(update, AddSnapshotUpdate) and update.snapshot.snapshot_id in times
            else update
            for update in self._updates
        ]

    def _applied(self) -> TableMetadataV2:
        base = self._base
        present = set(base.properties)
        updates: list[TableUpdate] = []
        for update in self._updates:
            if isinstance(update, SetPropertiesUpdate):
                present |= set(update.updates)
            if isinstance(update, RemovePropertiesUpdate):
                update = RemovePropertiesUpdate(removals=[key for key in update.removals if key in present])
                present -= set(update.removals)
            updates.append(update)
        try:
            new = update_table_metadata(base, tuple(updates))
        except (IcebergError, ValueError, TypeError, KeyError) as error:
            if "older than last sequence number" in str(error) or "already exists" in str(error):
                raise CommitFailedException(str(error)) from None
            raise NotAccepted(f"its updates do not fit the table ({error})", on=self._on) from None
        if not isinstance(new, TableMetadataV2) or new.table_uuid != base.table_uuid:
            raise NotAccepted("a table keeps its uuid and format version 2", on=self._on, remedy=_ACCEPTED)
        check_fields(new.schema().fields)
        current = new.current_snapshot_id
        return new.model_copy(
            update={
                "last_sequence_number": max(base.last_sequence_number, new.last_sequence_number),
                "last_updated_ms": max(base.last_updated_ms, new.last_updated_ms, self._publisher.clock.now_ms()),
                "current_snapshot_id": current,
            }
        )

    def _shape(self) -> NewShape | None:
        base, new = self._base, self._metadata
        before = (base.current_schema_id, base.default_spec_id, base.default_sort_order_id)
        if before == (new.current_schema_id, new.default_spec_id, new.default_sort_order_id):
            return None
        return NewShape(
            schema_to_json(new.schema()),
            spec_to_json(new.spec()),
            order_to_json(new.sort_order()),
            new.last_column_id,
        )

    def _properties(self) -> dict[str, str]:
        # What is Lakebook's own comes back if somebody removes it; a value that is given stays.
        kept = dict(self._metadata.properties)
        kept.setdefault("gc.enabled", "false")
        return kept

    def _property_changes(self) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for update in self._updates:
            if isinstance(update, SetPropertiesUpdate):
                found |= update.updates
            elif isinstance(update, RemovePropertiesUpdate):
                found |= dict.fromkeys(update.removals)
        return found

    # --- the branch main ---------------------------------------------------------------

    def _read_main(self, chain: Sequence[int], version: int) -> None:
        old, new = self._base.current_snapshot_id, self._metadata.current_snapshot_id
        if chain:
            files = self._file_count()
            for ident in chain:
                version += 1
                snapshot = self._metadata.snapshot_by_id(ident)
                assert snapshot is not None
                read = self._committer.read_snapshot(self._on, snapshot, self._table_id)
                step = self._step(read)
                files += sum(not file.content for file in step.added) - self._removed_rows(read)
                self._require_whole(read, files)
                self._steps.append(step)
                self._enter(read, version, version)
                self._remember(ident, version)
        elif old != new or self._is_replacement():
            self._jump(version + 1)

    def _file_count(self) -> int:
        return self._registry.read_with(lambda reader: current_table(reader, self._table)).file_count

    def _removed_rows(self, read: _Read) -> int:
        return sum(entry.data_file.content == DataFileContent.DATA for entry in read.deleted)

    def _remember(self, ident: int, version: int) -> None:
        self._records[ident] = replace(self._snapshots[-1], version=version, pinned_version=version)

    def _step(self, read: _Read) -> Step:
        operation = _operation(read.snapshot)
        if operation not in _OPERATIONS:
            raise NotAccepted(f"{shown(operation)} is no operation of a snapshot", on=self._on)
        sequence = read.snapshot.sequence_number
        added = [self._file(entry, explicit=_sequence(entry, sequence)) for entry in read.added]
        removed = [self._committer.check_entry(self._on, entry) for entry in read.deleted]
        _require_unique([file.file_path for file in added], self._on)
        _require_unique(removed, self._on)
        summary = dict(read.snapshot.summary.additional_properties) if read.snapshot.summary is not None else {}
        return Step(operation, added, removed, {}, summary)

    def _jump(self, version: int) -> None:
        """`main` goes to a snapshot that does not follow from it: a rollback, a branch, or a new table."""
        target = self._metadata.current_snapshot()
        live = self._live(target)
        visible = set(self._visible())
        arriving = [path for path in live if path not in visible]
        rows = self._registry.read_with(lambda reader: rows_of_paths(reader, self._table_id, arriving))
        revived = {path: live[path].sequence_number for path in arriving if path in rows}
        added = [self._file(live[path], explicit=live[path].sequence_number) for path in arriving if path not in rows]
        removed = [path for path in visible if path not in live]
        operation = "overwrite" if removed and arriving else "delete" if removed else "append" if added else "overwrite"
        summary = {"lakebook.snapshot": str(target.snapshot_id) if target is not None else "none"}
        self._steps.append(Step(operation, added, removed, revived, summary))
        if target is not None and self._base.snapshot_by_id(target.snapshot_id) is None:
            read = self._committer.read_snapshot(self._on, target, self._table_id)
            self._enter(read, version, version)
            self._remember(target.snapshot_id, version)

    def _visible(self) -> Iterator[str]:
        after, table_id, version = 0, self._table_id, self._pointer.version
        while True:
            start = after
            page = self._registry.read_with(lambda reader: visible_files(reader, table_id, version, start, CHUNK))  # noqa: B023
            yield from (file.file_path for file in page)
            if len(page) < CHUNK:
                break
            after = page[-1].id
        yield from (
            file.file_path
            for file in self._registry.read_with(lambda reader: visible_deletes(reader, table_id, version))
        )

    def _range(self, paths: Sequence[str]) -> tuple[int | None, int | None]:
        """Between which ids the files of a manifest are; files that it adds get theirs in the transaction."""
        rows = self._registry.read_with(lambda reader: rows_of_paths(reader, self._table_id, list(paths)))
        if len(rows) < len(set(paths)):
            return None, None
        ids = [row["id"] for found in rows.values() for row in found]
        return min(ids), max(ids)

    # --- branches ----------------------------------------------------------------------

    def _read_branches(self, chain: Sequence[int]) -> None:
        """Snapshots that make no version: of branches, or staged ones. Their files are pinned."""
        for update in self._updates:
            if not isinstance(update, AddSnapshotUpdate):
                continue
            ident = update.snapshot.snapshot_id
            if ident in chain or ident == self._metadata.current_snapshot_id:
                continue
            snapshot = self._metadata.snapshot_by_id(ident)
            if snapshot is None:
                continue
            read = self._committer.read_snapshot(self._on, snapshot, self._table_id)
            for entry in read.added:
                path = self._committer.check_entry(self._on, entry)
                self._committer._check_there(self._on, path, entry.data_file.file_size_in_bytes)
                self._branch_files.append((path, entry.data_file.file_size_in_bytes))
            parent = self._records.get(snapshot.parent_snapshot_id or 0)
            pinned = parent.pinned_version if parent is not None else self._pointer.version
            self._enter(read, None, pinned)
            self._records[ident] = self._snapshots[-1]

    def _left(self, removed: Sequence[int]) -> list[str]:
        """Files of branches that no snapshot has any more, if snapshots of branches are removed."""
        gone = {ident for ident in removed if ident in self._records and self._records[ident].version is None}
        if not gone:
            return []
        kept: set[str] = set()
        for ident, record in self._records.items():
            if record.version is None and ident not in gone:
                kept |= self._live(self._metadata.snapshot_by_id(ident)).keys()
        found: set[str] = set()
        for ident in gone:
            found |= self._live(self._base.snapshot_by_id(ident)).keys()
        return sorted(found - kept)

    def _unlisted_statistics(self) -> list[str]:
        def paths(metadata: TableMetadataV2) -> set[str]:
            items = (*metadata.statistics, *metadata.partition_statistics)
            return {self._committer._inside(item.statistics_path) for item in items}

        before, after = paths(self._base), paths(self._metadata)
        self._files += [MetadataFile(path, STATISTICS, self._store.size(path) or 0) for path in sorted(after - before)]
        return sorted(before - after)


class _Creation(_Steps):
    """A table that begins with metadata of somebody else."""

    def __init__(
        self, committer: Committer, work: Work, metadata: TableMetadataV2, place: str, operation: str, keep_refs: bool
    ) -> None:
        super().__init__(committer, work, f"table {metadata.table_uuid}", 0, metadata)
        self._place = place
        self._operation = operation
        self._keep_refs = keep_refs

    def finish(self) -> _Prepared:
        """Everything that the transaction needs; the metadata file is written."""
        metadata = self._metadata
        named = {ref.snapshot_id for ref in metadata.refs.values()}
        kept = [snapshot for snapshot in metadata.snapshots if snapshot.snapshot_id in named]
        log = [entry for entry in metadata.snapshot_log if entry.snapshot_id in named]
        now = self._publisher.clock.now_ms()
        properties = {"gc.enabled": "false", **metadata.properties}
        self._metadata = metadata.model_copy(
            update={
                "location": self._store.uri(self._place) if not metadata.location else metadata.location,
                "snapshots": kept,
                "snapshot_log": log,
                "metadata_log": [],
                "properties": properties,
                "statistics": [item for item in metadata.statistics if item.snapshot_id in named],
                "partition_statistics": [item for item in metadata.partition_statistics if item.snapshot_id in named],
                "last_updated_ms": max(metadata.last_updated_ms, now),
            }
        )
        steps = self._read_files()
        path, _, _ = self._written(0, None)
        self._files += [
            MetadataFile(self._committer._inside(item.statistics_path), STATISTICS, item.file_size_in_bytes)
            for item in self._metadata.statistics
        ]
        pointer = Pointer(
            0,
            self._place,
            path,
            0,
            self._metadata.current_snapshot_id,
            self._metadata.last_sequence_number,
            len(steps),
            -1,
            self._metadata.last_updated_ms,
        )
        publication = Publication(
            None,
            pointer,
            [replace(item, metadata_location=path) for item in self._snapshots],
            self._files,
            self._listings,
        )
        commit = OutsideCommit(0, now, publication, None, steps, {}, self._branch_files)
        # The record is that of a table which is not there yet.
        return _Prepared(None, self._work, commit, self._metadata, self._store.uri(path))  # type: ignore[arg-type]

    def _read_files(self) -> list[Step]:
        main = self._metadata.current_snapshot()
        live = self._live(main)
        steps: list[Step] = []
        version = 0
        if main is not None:
            version = 1
            added = [self._file(entry, explicit=entry.sequence_number) for entry in live.values()]
            summary = dict(main.summary.additional_properties) if main.summary is not None else {}
            steps.append(Step(self._operation, added, (), {}, summary))
        for snapshot in self._metadata.snapshots:
            read = self._committer.read_snapshot(self._on, snapshot, 0)
            is_main = main is not None and snapshot.snapshot_id == main.snapshot_id
            self._enter(read, version if is_main else None, version)
            if not is_main:
                self._branch_files += [
                    (path, entry.data_file.file_size_in_bytes)
                    for path, entry in self._live(snapshot).items()
                    if path not in live
                ]
        self._branch_files = list(dict(self._branch_files).items())
        unique: dict[str, MetadataFile] = {}
        for file in self._files:
            unique.setdefault(file.file_path, file)
        self._files = list(unique.values())
        return steps


# --- helpers -------------------------------------------------------------------


def _between(base: TableMetadataV2, ancestor: int | None) -> list[Snapshot] | None:
    """The snapshots of `main` after an ancestor; none if it is none."""
    found: list[Snapshot] = []
    at = base.current_snapshot()
    while at is not None:
        if at.snapshot_id == ancestor:
            return found
        found.append(at)
        at = base.snapshot_by_id(at.parent_snapshot_id) if at.parent_snapshot_id is not None else None
    return found if ancestor is None and all(item.parent_snapshot_id is None for item in found[-1:]) else None


def _is_ours(snapshot: Snapshot) -> bool:
    return snapshot.summary is not None and VERSIONS in snapshot.summary.additional_properties


def _operation(snapshot: Snapshot) -> str:
    return snapshot.summary.operation.value if snapshot.summary is not None else "append"


def _can_move(updates: Iterable[TableUpdate]) -> bool:
    """Whether updates are one append on `main`, or do not touch data at all."""
    snapshots = 0
    for update in updates:
        if isinstance(update, AddSnapshotUpdate):
            snapshots += 1
            if _operation(update.snapshot) != "append":
                return False
        elif isinstance(update, SetSnapshotRefUpdate):
            if update.ref_name != MAIN_BRANCH and snapshots:
                return False
        elif not isinstance(update, (SetPropertiesUpdate, RemovePropertiesUpdate)):
            return False
    return snapshots <= 1


def _sequence(entry: ManifestEntry, of_snapshot: int | None) -> int | None:
    return entry.sequence_number if entry.sequence_number is not None else of_snapshot


def _unassigned(manifest: ManifestFile) -> ManifestFile:
    """A manifest that gets its sequence number from the list it is put into."""
    copied = ManifestFile(*manifest._data)
    copied.sequence_number = -1
    copied.min_sequence_number = -1
    return copied


def _summary(values: Mapping[str, str], operation: str) -> Any:
    return Summary(Operation(operation), **{key: value for key, value in values.items() if key != "operation"})


def _require_unique(paths: Sequence[str], on: str) -> None:
    if len(set(paths)) != len(paths):
        raise NotAccepted("a file is named twice", on=on)


def _compression(properties: Mapping[str, str]) -> str:
    codec = properties.get("write.parquet.compression-codec", "zstd").lower()
    return {"uncompressed": "none"}.get(codec, codec if codec in ("zstd", "snappy", "gzip", "lz4") else "zstd")


def _own(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties that the registry keeps; some say only what it knows itself."""
    return {key: value for key, value in properties.items() if key != _FORMAT_VERSION}


@contextmanager
def as_iceberg_says() -> Iterator[None]:
    """Errors of a commit in PyIceberg's words: a conflict may be tried again, an unknown outcome must not."""
    try:
        yield
    except CommitOutcomeUnknown as error:
        raise CommitStateUnknownException(str(error)) from error
    except (FilesChanged, CommitAborted) as error:
        raise CommitFailedException(str(error)) from error
