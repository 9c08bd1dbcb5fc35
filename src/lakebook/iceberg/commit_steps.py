"""What a commit of an outside engine becomes: versions, snapshots and a new metadata file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.exceptions import ValidationError as IcebergError
from pyiceberg.manifest import ManifestEntry, ManifestEntryStatus, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadataV2
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.sorting import SortOrder
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    RemovePropertiesUpdate,
    RemoveSnapshotRefUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableUpdate,
    update_table_metadata,
)
from pyiceberg.transforms import IdentityTransform, VoidTransform

from lakebook import failpoints
from lakebook.errors import NotAccepted
from lakebook.iceberg.incoming import ACCEPTED, Incoming, ReadSnapshot, operation_of
from lakebook.iceberg.partitioning import order_to_json, spec_to_json
from lakebook.iceberg.publishing import SHOWN_BY, Publisher, Work, files_only_of
from lakebook.iceberg.schemas import MAX_FIELD_ID, can_promote, check_fields, schema_to_json, walk
from lakebook.iceberg.statistics import time_fields
from lakebook.iceberg.table_metadata import schema_for, with_log
from lakebook.iceberg.update_ids import with_settled_ids
from lakebook.names import shown
from lakebook.registry.outside import NewShape, OutsideCommit, Step, known_metadata, last_commit_at, rows_of_paths
from lakebook.registry.publishing import (
    MANIFEST,
    MANIFEST_LIST,
    METADATA,
    STATISTICS,
    MetadataFile,
    Pointer,
    Publication,
    SnapshotRecord,
)
from lakebook.registry.sweeps import sweeps
from lakebook.registry.table_files import CHUNK, NewFile, visible_deletes, visible_files
from lakebook.registry.tables import TableRecord

_OPERATIONS = ("append", "overwrite", "delete", "replace")


@dataclass
class Prepared:
    """A commit that is ready for its transaction."""

    work: Work
    commit: OutsideCommit
    metadata: TableMetadataV2
    location: str


class _Steps:
    """What preparing a commit and preparing a new table have in common."""

    def __init__(self, publisher: Publisher, work: Work, on: str, table_id: int, metadata: TableMetadataV2) -> None:
        self._incoming = Incoming(publisher)
        self._publisher = publisher
        self._store = publisher.store
        self._registry = publisher.registry
        self._work = work
        self._on = on
        self._table_id = table_id
        self._metadata = metadata
        self._specs = {spec.spec_id: spec for spec in metadata.partition_specs}
        self._times: tuple[Sequence[Schema], Mapping[int, str]] = ((), {})
        self._listings: dict[int, list[str]] = {}
        self._snapshots: list[SnapshotRecord] = []
        self._files: list[MetadataFile] = []
        self._branch_files: list[tuple[str, int]] = []
        # Before any file is looked at.
        self._sweeps = self._registry.read_with(sweeps)

    def _file(self, entry: ManifestEntry, *, explicit: int | None = None) -> NewFile:
        self._work.renew()
        spec = self._specs.get(entry.data_file.spec_id)
        if spec is None:
            raise NotAccepted(f"there is no partition spec {entry.data_file.spec_id}", on=self._on)
        schema = schema_for(spec, self._metadata.schemas)
        return self._incoming.new_file(self._on, entry, spec, schema, explicit, self._time_fields())

    def _time_fields(self) -> Mapping[int, str]:
        """The table's columns of timestamps; looked for once, however many files there are."""
        schemas, fields = self._times
        if schemas is not self._metadata.schemas:
            schemas, fields = self._times = (self._metadata.schemas, time_fields(self._metadata.schemas))
        return fields

    def _enter(self, read: ReadSnapshot, version: int | None, pinned: int) -> None:
        """Enter a snapshot's row, its manifests and its list."""
        self._work.renew()
        snapshot = read.snapshot
        path = self._store.relative(snapshot.manifest_list)
        self._listings[snapshot.snapshot_id] = [self._store.relative(item.manifest_path) for item in read.manifests]
        self._files.append(MetadataFile(path, MANIFEST_LIST, self._store.size(path) or 0))
        for location, (manifest, listed) in read.new.items():
            first, last = self._range(listed)
            self._files.append(MetadataFile(location, MANIFEST, manifest.manifest_length, first, last))
        summary = dict(snapshot.summary.additional_properties) if snapshot.summary is not None else {}
        self._snapshots.append(
            SnapshotRecord(
                snapshot.snapshot_id,
                snapshot.parent_snapshot_id,
                snapshot.sequence_number or 0,
                snapshot.timestamp_ms,
                path,
                {**summary, "operation": operation_of(snapshot)},
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
        manifests = self._incoming.listed(self._on, snapshot.manifest_list)
        paths = [self._incoming.inside(manifest.manifest_path) for manifest in manifests]
        known = self._registry.read_with(lambda reader: known_metadata(reader, paths))
        for path, manifest in zip(paths, manifests, strict=True):
            # What has been read before is read again with the quicker decoder.
            for entry in self._incoming.entries(self._on, manifest, strange=path not in known):
                if entry.status == ManifestEntryStatus.DELETED:
                    continue
                file = self._incoming.inside(entry.data_file.file_path)
                if file in found:
                    raise NotAccepted(f"the file {shown(file)} is listed twice", on=self._on)
                found[file] = entry
        return found

    def _manifests_of(self, snapshot_id: int | None) -> list[ManifestFile]:
        """The manifests of a snapshot that the metadata lists; none of one that it does not."""
        snapshot = self._metadata.snapshot_by_id(snapshot_id) if snapshot_id is not None else None
        return [] if snapshot is None else self._incoming.listed(self._on, snapshot.manifest_list)

    def _written(self, number: int, version: int, former: Pointer | None) -> tuple[str, int, list[str]]:
        location = self._store.uri(former.metadata_location) if former is not None else None
        at = former.published_at if former is not None else 0
        self._metadata, superseded = with_log(self._metadata, location, at, self._publisher.settings.metadata_kept)
        path, size = self._publisher.metadata.write(self._work.folder, number, version, self._metadata)
        failpoints.reach("outside.metadata_written")
        self._files.append(MetadataFile(path, METADATA, size))
        return path, size, [self._store.relative(item) for item in superseded]


class Preparation(_Steps):
    """One commit on one table, from its updates to what its transaction needs."""

    def __init__(
        self,
        publisher: Publisher,
        work: Work,
        table: TableRecord,
        pointer: Pointer,
        base: TableMetadataV2,
        updates: Sequence[TableUpdate],
        records: Mapping[int, SnapshotRecord],
    ) -> None:
        super().__init__(publisher, work, table.shown, table.id, base)
        self._table = table
        self._pointer = pointer
        self._base = base
        self._updates = list(updates)
        self._records = dict(records)
        self._steps: list[Step] = []
        self._taken: tuple[int, int] | None = None
        self._left_files: list[str] = []

    def finish(self) -> Prepared:
        """Everything that the transaction needs; the metadata file is written."""
        base, table = self._base, self._table
        now = self._publisher.clock.now_ms()
        last = self._registry.read_with(lambda reader: last_commit_at(reader, table))
        at = max(now, last + 1, base.last_updated_ms)
        self._check_sequence()
        chain = self._chain()
        changes_shape = self._changes_shape()
        self._stamp(chain, at + changes_shape)
        self._metadata = self._applied(at + changes_shape)
        self._specs = {spec.spec_id: spec for spec in self._metadata.partition_specs}
        shape = self._shape()
        if (shape is not None) != bool(changes_shape):
            # Updates that name the present shape again change nothing.
            self._stamp(chain, at + (shape is not None))
            self._metadata = self._applied(at + (shape is not None))
        version = self._pointer.version + (shape is not None)
        self._read_main(chain, version)
        self._read_branches(chain)
        self._metadata = self._metadata.model_copy(update={"properties": self._properties()})
        final = version + len(self._steps)
        path, _, superseded = self._written(self._pointer.metadata_number + 1, final, self._pointer)
        removed = [
            item.snapshot_id for item in base.snapshots if self._metadata.snapshot_by_id(item.snapshot_id) is None
        ]
        pointer = Pointer(
            table.id,
            self._incoming.inside(self._metadata.location).rstrip("/"),
            path,
            self._pointer.metadata_number + 1,
            self._metadata.current_snapshot_id,
            self._metadata.last_sequence_number,
            final,
            self._pointer.properties_at,
            self._metadata.last_updated_ms,
        )
        properties = self._property_changes()
        unlisted = self._unlisted_statistics()
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
            () if shape is None else (shape,),
            self._steps,
            properties,
            self._branch_files,
            self._left(removed),
            unlisted,
            self._sweeps,
            self._taken,
        )
        return Prepared(self._work, commit, self._metadata, self._store.uri(path))

    # --- the metadata ------------------------------------------------------------------

    def _check_sequence(self) -> None:
        """The sequence numbers of new snapshots follow those that there are, without a gap."""
        expected = self._base.last_sequence_number
        for snapshot in self._new():
            self._incoming.check_snapshot(self._on, snapshot)
            expected += 1
            found = snapshot.sequence_number or 0
            if found < expected:
                raise CommitFailedException(f"Sequence number {found} has been used, the next one is {expected}")
            if found > expected:
                raise NotAccepted(f"sequence number {found} is too high, the next one is {expected}", on=self._on)

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
        # Those of branches, and one that `main` jumps to, have the time of the commit.
        times = {snapshot.snapshot_id: at for snapshot in self._new()}
        times |= {ident: at + number for number, ident in enumerate(chain)}
        self._updates = [
            AddSnapshotUpdate(
                snapshot=update.snapshot.model_copy(update={"timestamp_ms": times[update.snapshot.snapshot_id]})
            )
            if isinstance(update, AddSnapshotUpdate) and update.snapshot.snapshot_id in times
            else update
            for update in self._updates
        ]

    def _applied(self, at: int) -> TableMetadataV2:
        base = self._base
        present = set(base.properties)
        updates: list[TableUpdate] = []
        for update in with_settled_ids(base, self._updates):
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
            raise NotAccepted("a table keeps its uuid and format version 2", on=self._on, remedy=ACCEPTED)
        self._check_schemas(new)
        log = list(new.snapshot_log)
        added = {snapshot.snapshot_id for snapshot in self._new()}
        if len(log) > len(base.snapshot_log) and log[-1].snapshot_id not in added:
            # A jump back: the log has the time of the version that it makes.
            log[-1] = log[-1].model_copy(update={"timestamp_ms": at})
        return new.model_copy(
            update={
                "snapshot_log": log,
                "last_sequence_number": max(base.last_sequence_number, new.last_sequence_number),
                "last_updated_ms": max(base.last_updated_ms, new.last_updated_ms, self._publisher.clock.now_ms()),
            }
        )

    def _check_schemas(self, new: TableMetadataV2) -> None:
        """Refuse fields that old files could not be read with."""
        known = {schema.schema_id for schema in self._base.schemas}
        is_empty = self._base.current_snapshot() is None
        before = None if self._is_replacement() else self._base.schema()
        for schema in new.schemas:
            if schema.schema_id not in known:
                check_shape(schema, before, self._on)
        if before is not None and not is_empty:
            check_required(new.schema(), before, self._on)
        check_names(new.schema(), new.partition_specs, self._on)

    def _new(self) -> list[Snapshot]:
        return [update.snapshot for update in self._updates if isinstance(update, AddSnapshotUpdate)]

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
            for ident in chain:
                version += 1
                snapshot = self._metadata.snapshot_by_id(ident)
                assert snapshot is not None
                read = self._read(snapshot)
                self._steps.append(self._step(read))
                self._enter(read, version, version)
                self._remember(ident, version)
        elif old != new or self._is_replacement():
            self._jump(version + 1)

    def _read(self, snapshot: Snapshot) -> ReadSnapshot:
        parent = self._manifests_of(snapshot.parent_snapshot_id)
        return self._incoming.read_snapshot(self._on, snapshot, parent)

    def _remember(self, ident: int, version: int) -> None:
        self._records[ident] = replace(self._snapshots[-1], version=version, pinned_version=version)

    def _step(self, read: ReadSnapshot) -> Step:
        operation = operation_of(read.snapshot)
        if operation not in _OPERATIONS:
            raise NotAccepted(f"{shown(operation)} is no operation of a snapshot", on=self._on)
        sequence = read.snapshot.sequence_number
        added = [self._file(entry, explicit=_sequence(entry, sequence)) for entry in read.added]
        removed = [self._incoming.check_entry(self._on, entry) for entry in read.deleted]
        _require_unique([file.file_path for file in added], self._on)
        _require_unique(removed, self._on)
        return Step(operation, added, removed, {}, _said_by(read.snapshot))

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
        summary = {SHOWN_BY: str(target.snapshot_id) if target is not None else "none"}
        self._steps.append(Step(operation, added, removed, revived, summary))
        if target is None:
            return
        record = self._records.get(target.snapshot_id)
        if record is not None and record.version is None:
            # A snapshot of a branch stands for a version from now on, which keeps its files.
            self._taken = (target.snapshot_id, version)
            self._records[target.snapshot_id] = replace(record, version=version, pinned_version=version)
            self._left_files += self._left_by([target], ())
        if self._base.snapshot_by_id(target.snapshot_id) is None:
            read = self._incoming.read_snapshot(self._on, target, None, self._table_id)
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
            read = self._read(snapshot)
            files = [self._file(entry) for entry in read.added]
            _require_unique([file.file_path for file in files], self._on)
            self._branch_files += [(file.file_path, file.file_size) for file in files]
            parent = self._records.get(snapshot.parent_snapshot_id or 0)
            pinned = parent.pinned_version if parent is not None else self._pointer.version
            self._enter(read, None, pinned)
            self._records[ident] = self._snapshots[-1]

    def _left(self, removed: Sequence[int]) -> list[str]:
        """Files of branches that no snapshot has any more, if snapshots of branches are removed."""
        gone = {ident for ident in removed if ident in self._records and self._records[ident].version is None}
        found = [self._base.snapshot_by_id(ident) for ident in gone]
        return [*self._left_files, *self._left_by([item for item in found if item is not None], gone)]

    def _left_by(self, snapshots: Sequence[Snapshot], gone: Collection[int]) -> list[str]:
        """Files that these snapshots have, and no other of a branch."""
        if not snapshots:
            return []
        others = [
            self._metadata.snapshot_by_id(ident)
            for ident, record in self._records.items()
            if record.version is None and ident not in gone
        ]
        return files_only_of(self._publisher, snapshots, [item for item in others if item is not None])

    def _unlisted_statistics(self) -> list[str]:
        def paths(metadata: TableMetadataV2) -> set[str]:
            items = (*metadata.statistics, *metadata.partition_statistics)
            return {self._incoming.inside(item.statistics_path) for item in items}

        before, after = paths(self._base), paths(self._metadata)
        for path in sorted(after - before):
            size = self._incoming.size_of(path)
            if size is None:
                raise NotAccepted(f"the statistics file {shown(path)} is not there", on=self._on)
            self._files.append(MetadataFile(path, STATISTICS, size))
        return sorted(before - after)


class Creation(_Steps):
    """A table that begins with metadata of somebody else."""

    def __init__(
        self, publisher: Publisher, work: Work, metadata: TableMetadataV2, place: str, *, is_new: bool
    ) -> None:
        super().__init__(publisher, work, f"table {metadata.table_uuid}", 0, metadata)
        self._place = place
        self._is_new = is_new

    def finish(self) -> Prepared:
        """Everything that the transaction needs; the metadata file is written."""
        metadata = self._metadata
        self._check()
        named = {ref.snapshot_id for ref in metadata.refs.values()}
        now = self._publisher.clock.now_ms()
        shapes = later_shapes(metadata)
        kept = [snapshot for snapshot in metadata.snapshots if snapshot.snapshot_id in named]
        log = [entry for entry in metadata.snapshot_log if entry.snapshot_id in named]
        if self._is_new:
            # Its rows are of a version that it has from its beginning.
            at = now + len(shapes)
            kept = [snapshot.model_copy(update={"timestamp_ms": at}) for snapshot in kept]
            log = [entry.model_copy(update={"timestamp_ms": at}) for entry in log]
        properties = {"gc.enabled": "false", **metadata.properties}
        orders = metadata.sort_orders
        if not any(order.order_id == 0 for order in orders):
            orders = [SortOrder(order_id=0), *orders]
        self._metadata = metadata.model_copy(
            update={
                "sort_orders": orders,
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
        steps = self._read_files(len(shapes))
        version = len(shapes) + len(steps)
        path, _, _ = self._written(0, version, None)
        self._files += [
            MetadataFile(self._incoming.inside(item.statistics_path), STATISTICS, item.file_size_in_bytes)
            for item in (*self._metadata.statistics, *self._metadata.partition_statistics)
        ]
        pointer = Pointer(
            0,
            self._place,
            path,
            0,
            self._metadata.current_snapshot_id,
            self._metadata.last_sequence_number,
            version,
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
        commit = OutsideCommit(0, now, publication, shapes, steps, {}, self._branch_files, sweeps=self._sweeps)
        return Prepared(self._work, commit, self._metadata, self._store.uri(path))

    def _check(self) -> None:
        """Refuse metadata that contradicts itself, or whose numbers no engine could use."""
        metadata = self._metadata
        known = {snapshot.snapshot_id for snapshot in metadata.snapshots}
        named = {ref.snapshot_id for ref in metadata.refs.values()}
        current = metadata.current_snapshot_id
        main = metadata.refs.get(MAIN_BRANCH)
        if len(known) != len(metadata.snapshots) or not named <= known:
            raise NotAccepted("its branches and tags name other snapshots than it has", on=self._on)
        if (main.snapshot_id if main is not None else None) != current:
            raise NotAccepted("its current snapshot is not that of the branch main", on=self._on)
        for snapshot in metadata.snapshots:
            self._incoming.check_snapshot(self._on, snapshot)
            if (snapshot.sequence_number or 0) > metadata.last_sequence_number:
                raise NotAccepted("a snapshot has a higher sequence number than the table", on=self._on)
        for ids in (
            [item.schema_id for item in metadata.schemas],
            [item.spec_id for item in metadata.partition_specs],
            [item.order_id for item in metadata.sort_orders],
        ):
            if len(set(ids)) != len(ids):
                raise NotAccepted("an id of a schema, a spec or an order is given twice", on=self._on)
        if not 0 <= metadata.last_sequence_number < 2**48:
            raise NotAccepted("its last sequence number is impossible", on=self._on)

    def _read_files(self, version: int) -> list[Step]:
        main = self._metadata.current_snapshot()
        live = self._live(main)
        steps: list[Step] = []
        if main is not None:
            version += 1
            added = [self._file(entry, explicit=entry.sequence_number) for entry in live.values()]
            steps.append(Step("append", added, (), {}, _said_by(main)))
        for snapshot in self._metadata.snapshots:
            read = self._incoming.read_snapshot(self._on, snapshot, None)
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


def _said_by(snapshot: Snapshot) -> dict[str, str]:
    """The summary of a version that an outside engine made, as that of its snapshot."""
    said = dict(snapshot.summary.additional_properties) if snapshot.summary is not None else {}
    # By this one the book notes what a version without a snapshot of its own shows: nobody else says so.
    said.pop(SHOWN_BY, None)
    return said


def check_shape(schema: Schema, before: Schema | None, on: str) -> None:
    """Refuse a schema that Lakebook cannot have, or that gives a field another type than its files have."""
    check_fields(schema.fields)
    fields = {field.field_id: field for _, field, _ in walk(schema.fields)}
    if any(not 0 < ident <= MAX_FIELD_ID for ident in fields):
        raise NotAccepted("a field has an impossible id", on=on)
    for _, field, _ in walk(before.fields) if before is not None else ():
        same = fields.get(field.field_id)
        if same is None:
            continue
        old, new = field.field_type, same.field_type
        plain = old.is_primitive and new.is_primitive
        if (plain and old != new and not can_promote(old, new)) or (not plain and type(old) is not type(new)):
            raise NotAccepted(f"the field {field.field_id} cannot change from {old} to {new}", on=on)


def check_required(schema: Schema, before: Schema, on: str) -> None:
    """Refuse columns that rows which are there already cannot have a value of."""
    known = {field.field_id: field for field in before.fields}
    for field in schema.fields:
        same = known.get(field.field_id)
        if field.required and (same is None or not same.required):
            raise NotAccepted(
                f"the column {shown(field.name)} is required, and rows that are there may have none",
                on=on,
                remedy="Add it as an optional one",
            )


def check_names(schema: Schema, specs: Sequence[PartitionSpec], on: str) -> None:
    """Refuse a column with the name of a partition field that is not made of it: engines cannot load that."""
    for spec in specs:
        for field in spec.fields:
            if field.source_id not in schema.field_ids or isinstance(field.transform, VoidTransform):
                continue
            column = next((item for item in schema.fields if item.name == field.name), None)
            plain = column is not None and column.field_id == field.source_id
            if column is not None and not (plain and isinstance(field.transform, IdentityTransform)):
                raise NotAccepted(
                    f"{shown(field.name)} is a column and a partition field of another meaning",
                    on=on,
                    remedy="Choose another name",
                )


def earlier_specs(metadata: TableMetadataV2) -> list[PartitionSpec]:
    """Partition specs that are not the present one; files may still have them."""
    return [spec for spec in metadata.partition_specs if spec.spec_id != metadata.default_spec_id]


def later_shapes(metadata: TableMetadataV2) -> list[NewShape]:
    """What becomes of a table that begins with its first spec, so that the registry knows each of them."""
    earlier = earlier_specs(metadata)
    following = [*earlier[1:], metadata.spec()] if earlier else []
    return [
        NewShape(
            schema_to_json(metadata.schema()),
            spec_to_json(spec),
            order_to_json(metadata.sort_order()),
            metadata.last_column_id,
        )
        for spec in following
    ]


def _sequence(entry: ManifestEntry, of_snapshot: int | None) -> int | None:
    return entry.sequence_number if entry.sequence_number is not None else of_snapshot


def _require_unique(paths: Sequence[str], on: str) -> None:
    if len(set(paths)) != len(paths):
        raise NotAccepted("a file is named twice", on=on)
