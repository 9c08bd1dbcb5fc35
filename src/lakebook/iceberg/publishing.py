"""Publishing: registry versions become Iceberg snapshots, manifests and metadata, exactly once.

All unpublished versions of a table go in one step. A run of appends is one snapshot, every
other change of files its own; a change of the schema adds none. Nothing but registry rows is
read, and the metadata that is there already. The pointer moves by compare-and-swap; whoever
loses throws away what it wrote and looks again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from pyiceberg.exceptions import ValidationError as IcebergError
from pyiceberg.manifest import ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadataV2
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Snapshot

from lakebook import failpoints
from lakebook.clock import Clock, to_ms
from lakebook.config import Settings
from lakebook.errors import (
    CommitOutcomeUnknown,
    LakebookError,
    NotPublishable,
    PathOutsideWarehouse,
    PublishFailed,
    TableNotFound,
)
from lakebook.iceberg.file_io import WarehouseIO
from lakebook.iceberg.manifests import (
    FILES_PER_MANIFEST,
    ListedFile,
    ManifestLists,
    live_entries,
    merged,
    to_merge,
    without,
    write_manifests,
)
from lakebook.iceberg.partitioning import partition_from_json
from lakebook.iceberg.schemas import leaf_fields
from lakebook.iceberg.table_metadata import (
    NAME_MAPPING,
    MetadataFiles,
    extended_mapping,
    new_metadata,
    published_properties,
    schema_for,
    shapes_of,
    with_log,
    with_shapes,
    with_snapshot,
    with_totals,
    without_snapshots,
)
from lakebook.registry.history import TableVersion
from lakebook.registry.inserts import NOTE_SWEPT, open_insert, renew_insert
from lakebook.registry.publishing import (
    ANY_OUTSIDE_FILE,
    MANIFEST,
    MANIFEST_LIST,
    METADATA,
    ListedRow,
    MetadataFile,
    Pointer,
    PointerMoved,
    Publication,
    SnapshotRecord,
    Unpublished,
    files_added,
    files_ended,
    manifest_ranges,
    metadata_files,
    own_spellings,
    pointer_of,
    properties_at,
    publish_metadata,
    unpublished,
    with_stats,
)
from lakebook.registry.registry import Registry
from lakebook.registry.table_files import CHUNK, totals_at, visible_deletes
from lakebook.registry.tables import TableRecord
from lakebook.registry.transactions import new_id
from lakebook.storage.objects import ObjectStore

#: Where the Iceberg locations of tables lie, apart from the folders of inserts.
ICEBERG = "iceberg"
PUBLISH = "publish"
#: The summary's entry with the versions that a snapshot covers.
VERSIONS = "lakebook.versions"
#: The entry of a version by which `main` went to what was there before: which snapshot shows it, or `none`.
SHOWN_BY = "lakebook.snapshot"

#: What one step publishes at most; more goes on in the next.
MOST_VERSIONS = 5_000
_MOST_ATTEMPTS = 20
# Statistics that a manifest's files may have together, so that memory stays bounded.
_MOST_STATS = 200_000
_RENEWALS_PER_LIFE = 3


def default_location(table_uuid: str) -> str:
    """The folder of a table's Iceberg metadata, and of what outside engines write."""
    return f"{ICEBERG}/{table_uuid}"


@dataclass(frozen=True)
class Group:
    """Versions that become one snapshot; none of a change of the schema alone."""

    first: int
    last: int
    operation: str
    versions: tuple[TableVersion, ...]

    @property
    def adds_snapshot(self) -> bool:
        """Whether files changed."""
        return self.operation not in ("create", "schema")


def grouped(versions: Sequence[TableVersion]) -> list[Group]:
    """Runs of appends with one schema, and every other version by itself."""
    groups: list[Group] = []
    for version in versions:
        last = groups[-1] if groups else None
        if (
            last is not None
            and version.operation == last.operation == "append"
            and version.schema_version == last.versions[-1].schema_version
        ):
            groups[-1] = Group(last.first, version.version, "append", (*last.versions, version))
        else:
            groups.append(Group(version.version, version.version, version.operation, (version,)))
    return groups


@dataclass
class _Listing:
    """The manifests of the newest snapshot, where each is in the warehouse, and between which ids its files are."""

    manifests: list[ManifestFile] = field(default_factory=list)
    ranges: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)

    def may_have(self, manifest: ManifestFile, ids: Sequence[int]) -> bool:
        """Whether a manifest can have one of these files; the ids are sorted."""
        first, last = self.ranges.get(manifest.manifest_path, (None, None))
        if first is None or last is None:
            return True
        return any(first <= ident <= last for ident in ids)


class Work:
    """One attempt to write Iceberg metadata: its commit row, its folder, and what it wrote."""

    def __init__(self, publisher: Publisher, table_id: int, location: str) -> None:
        self._publisher = publisher
        self._table_id = table_id
        self.commit_id = new_id()
        self.folder = f"{location}/metadata/{self.commit_id}"
        self.written: list[MetadataFile] = []
        self.done = False
        self.outcome_unknown = False
        self._renewed = publisher.clock.monotonic()
        self._numbers = count()

    def __enter__(self) -> Work:
        publisher = self._publisher
        alive = publisher.settings.insert_alive
        publisher.registry.write(
            lambda transaction: open_insert(transaction, self.commit_id, self._table_id, self.folder, alive, PUBLISH)
        )
        try:
            failpoints.reach("publish.reserved")
        except BaseException:
            self.discard()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self.done and not self.outcome_unknown:
            # What is left over, a sweep finds by the commit row.
            with suppress(LakebookError):
                self.discard()

    def renew(self) -> None:
        """Say that it is still at work, where it takes long."""
        publisher = self._publisher
        now, alive = publisher.clock.monotonic(), publisher.settings.insert_alive
        if now - self._renewed > alive / _RENEWALS_PER_LIFE:
            publisher.registry.write(lambda transaction: renew_insert(transaction, self.commit_id, alive))
            self._renewed = now

    def discard(self) -> None:
        """Fence it, and remove what it wrote."""
        publisher = self._publisher
        if publisher.registry.settle(self.commit_id) == "committed":
            return
        publisher.store.delete_folder(self.folder)
        now = publisher.clock.now_ms()
        publisher.registry.write(lambda transaction: transaction.run(NOTE_SWEPT, now, self.commit_id))
        failpoints.reach("publish.discarded")

    def commit(self, work: Callable[[Any], Any]) -> Any:
        """Run the transaction that makes it count."""
        try:
            result = self._publisher.registry.write(work, commit_id=self.commit_id)
        except CommitOutcomeUnknown:
            self.outcome_unknown = True
            raise
        self.done = True
        failpoints.reach("publish.committed")
        return result

    def manifest_path(self) -> str:
        """A path for a new manifest."""
        return f"{self.folder}/{uuid.uuid4()}-m{next(self._numbers)}.avro"

    def note_manifest(self, manifest: ManifestFile, ids: tuple[int | None, int | None]) -> None:
        """Remember a manifest that was written."""
        path = self._publisher.store.relative(manifest.manifest_path)
        self.written.append(MetadataFile(path, MANIFEST, manifest.manifest_length, *ids))
        self.renew()


class Publisher:
    """Publishes tables of a book as Iceberg."""

    def __init__(self, registry: Registry, store: ObjectStore) -> None:
        self.registry = registry
        self.store = store
        self.settings: Settings = registry.settings
        self.clock: Clock = registry.clock
        self.io = WarehouseIO(store)
        self.metadata = MetadataFiles(store)
        self.lists = ManifestLists(self.io)

    def publish(
        self, table: TableRecord, *, location: str | None = None, drop_below: int | None = None
    ) -> Pointer | None:
        """Publish every version that is not yet; what the table is published as then.

        With `drop_below`, snapshots of versions below it leave the metadata, unless a tag or a branch
        names them. A table of a format that Iceberg does not know is not published.
        """
        if table.format != "parquet":
            return None
        attempts = 0
        wanted: int | None = None
        while attempts < _MOST_ATTEMPTS:
            state = self._state(table)
            droppable = self._droppable(state, drop_below)
            if state.is_current and not droppable:
                return state.pointer
            # What comes after the call is somebody else's to publish.
            wanted = state.table.version if wanted is None else wanted
            if attempts and not droppable and state.covers(wanted):
                return state.pointer
            try:
                pointer = self._publish_once(state, location, drop_below)
            except PointerMoved:
                attempts += 1
                continue
            if pointer.version >= wanted:
                return pointer
        raise PublishFailed(
            f"others published it {_MOST_ATTEMPTS} times meanwhile", on=table.shown, remedy="Try again later"
        )

    def _state(self, table: TableRecord) -> Unpublished:
        state = self.registry.in_snapshot(lambda reader: unpublished(reader, table, MOST_VERSIONS))
        if state.pointer is None or not self._is_moved(state.pointer):
            return state
        # Iceberg knows absolute addresses only, and the warehouse has been moved: all is published again.
        has_branches = any(item.version is None for item in state.snapshots)
        named = set(self.load(state.pointer).refs) - {MAIN_BRANCH}
        if named or has_branches or self.registry.one(ANY_OUTSIDE_FILE, table.id):
            raise NotPublishable(
                "the warehouse was moved, and what outside engines wrote names files where they were",
                on=table.shown,
                remedy="Move the warehouse back",
            )
        again = self.registry.in_snapshot(lambda reader: unpublished(reader, table, MOST_VERSIONS, anew=True))
        # Somebody else may have published it anew, and an engine have written to that.
        return again if again.pointer == state.pointer else self._state(table)

    def _is_moved(self, pointer: Pointer) -> bool:
        try:
            return self.store.relative(self.load(pointer).location).rstrip("/") != pointer.location
        except PathOutsideWarehouse:
            return True

    def pointer(self, table: TableRecord) -> Pointer | None:
        """What a table is published as now."""
        return self.registry.read_with(lambda reader: pointer_of(reader, table.id))

    def load(self, pointer: Pointer) -> TableMetadataV2:
        """The metadata that a pointer names."""
        return self.metadata.read(pointer.metadata_location)

    def _publish_once(self, state: Unpublished, location: str | None, drop_below: int | None) -> Pointer:
        table, old = state.table, state.pointer
        place = old.location if old is not None else location or default_location(table.table_uuid)
        with Work(self, table.id, place) as work:
            try:
                made = self._build(work, state, place, drop_below)
            except LakebookError:
                raise
            except (IcebergError, ValueError, TypeError, KeyError, OSError) as error:
                raise PublishFailed(
                    f"its metadata could not be written ({type(error).__name__}: {error})",
                    on=table.shown,
                    remedy="What is published is as it was before; run `lakebook verify`",
                ) from error
            grace = self.settings.published_grace
            work.commit(lambda transaction: publish_metadata(transaction, table, made, grace))
        return made.pointer

    def _build(self, work: Work, state: Unpublished, place: str, drop_below: int | None) -> Publication:
        table, old = state.table, state.pointer
        base = self._base(state, place)
        metadata = with_shapes(base, state.metadata, table.last_field_id)
        listing = self._listing(table, old, metadata)
        builder = _Builder(self, work, state, metadata, listing)
        versions = state.versions
        if (old is None or state.anew) and versions and versions[0].version > 0:
            builder.add_beginning(versions[0])
            versions = versions[1:]
        for group in grouped(versions):
            if group.adds_snapshot:
                builder.create_iceberg_snapshot(group)
        return self.update_iceberg_metadata(builder, state, place, drop_below)

    def update_iceberg_metadata(
        self, builder: _Builder, state: Unpublished, place: str, drop_below: int | None
    ) -> Publication:
        """Write the metadata file that lists the new snapshots."""
        table, old = state.table, state.pointer
        work = builder.work
        dropped = self._to_drop(builder.metadata, state, builder.snapshots, drop_below)
        removed = builder.drop(dropped)
        metadata = without_snapshots(builder.metadata, dropped)
        metadata = metadata.model_copy(
            update={
                "properties": published_properties(state.current, builder.mapping),
                "last_updated_ms": max(metadata.last_updated_ms, self.clock.now_ms()),
            }
        )
        former = self.store.uri(old.metadata_location) if old is not None and not state.anew else None
        former_at = old.published_at if old is not None else 0
        metadata, superseded = with_log(metadata, former, former_at, self.settings.metadata_kept)
        gone = [self.store.relative(location) for location in superseded]
        if state.anew:
            gone = self.registry.read_with(lambda reader: metadata_files(reader, table.id))
            removed = [snapshot.snapshot_id for snapshot in state.snapshots]
        left = self._left(builder.metadata, metadata, state, removed)
        number = old.metadata_number + 1 if old is not None else 0
        version = state.versions[-1].version if state.versions else table.version
        path, size = self.metadata.write(work.folder, number, version, metadata)
        work.written.append(MetadataFile(path, METADATA, size))
        failpoints.reach("publish.metadata_written")
        pointer = Pointer(
            table.id,
            place,
            path,
            number,
            metadata.current_snapshot_id,
            metadata.last_sequence_number,
            version,
            properties_at(state.current),
            metadata.last_updated_ms,
        )
        return Publication(
            old.metadata_location if old is not None else None,
            pointer,
            [replace(snapshot, metadata_location=path) for snapshot in builder.snapshots],
            work.written,
            builder.listings,
            removed,
            gone,
            table.schema_version,
            state.oldest if old is None or state.anew else None,
            left,
        )

    def _left(
        self, before: TableMetadataV2, after: TableMetadataV2, state: Unpublished, removed: Sequence[int]
    ) -> list[str]:
        """Files that only snapshots of branches had which are removed now."""
        branches = {item.snapshot_id for item in state.snapshots if item.version is None}
        gone = [item for item in before.snapshots if item.snapshot_id in branches and item.snapshot_id in removed]
        if not gone:
            return []
        return files_only_of(self, gone, [item for item in after.snapshots if item.snapshot_id in branches])

    def _base(self, state: Unpublished, place: str) -> TableMetadataV2:
        if state.pointer is not None and not state.anew:
            return self.metadata.read(state.pointer.metadata_location)
        table = state.table
        new = new_metadata(table.table_uuid, self.store.uri(place), state.metadata, table.last_field_id)
        if state.pointer is None:
            return new
        return new.model_copy(update={"last_sequence_number": state.pointer.last_sequence})

    def _listing(self, table: TableRecord, old: Pointer | None, metadata: TableMetadataV2) -> _Listing:
        snapshot = metadata.current_snapshot()
        if old is None or snapshot is None:
            return _Listing()
        ranges = self.registry.read_with(lambda reader: manifest_ranges(reader, table.id, snapshot.snapshot_id))
        paths = {self.store.uri(path): path for path in ranges}
        return _Listing(
            self.lists.read(snapshot.manifest_list),
            {location: ranges[path] for location, path in paths.items()},
            paths,
        )

    # --- which snapshots stay --------------------------------------------------------

    def _to_drop(
        self,
        metadata: TableMetadataV2,
        state: Unpublished,
        new: Sequence[SnapshotRecord],
        drop_below: int | None,
    ) -> list[int]:
        """Snapshots that leave the metadata: more than are kept, or of versions that are not."""
        named = {ref.snapshot_id for ref in metadata.refs.values()}
        former = () if state.anew else state.snapshots
        ours = [snapshot for snapshot in (*former, *new) if snapshot.version is not None]
        ours.sort(key=lambda snapshot: snapshot.sequence_number)
        many = {snapshot.snapshot_id for snapshot in ours[: -self.settings.snapshots_kept]}
        leased = state.leased
        if leased is not None:
            # A version without a snapshot of its own is shown by the one before it.
            leased = max(
                (item.version for item in ours if item.version is not None and item.version <= leased), default=0
            )
        return [
            snapshot.snapshot_id
            for snapshot in ours
            if snapshot.snapshot_id not in named
            and snapshot.version is not None
            and (leased is None or snapshot.version < leased)
            and (snapshot.snapshot_id in many or (drop_below is not None and snapshot.version < drop_below))
        ] + self._lost(metadata, state, drop_below)

    def _lost(self, metadata: TableMetadataV2, state: Unpublished, drop_below: int | None) -> list[int]:
        """Snapshots of branches that are gone, or staged ones that nobody took, when their history ends."""
        if drop_below is None or state.anew:
            return []
        candidates = [item for item in state.snapshots if item.version is None and item.pinned_version < drop_below]
        if not candidates:
            return []
        kept = _reachable(metadata)
        return [item.snapshot_id for item in candidates if item.snapshot_id not in kept]

    def _droppable(self, state: Unpublished, drop_below: int | None) -> bool:
        if drop_below is None or state.pointer is None:
            return False
        if not any(item.pinned_version < drop_below for item in state.snapshots):
            return False
        return bool(self._to_drop(self.load(state.pointer), state, (), drop_below))


class _Builder:
    """Builds the snapshots of one step, one after the other."""

    def __init__(
        self, publisher: Publisher, work: Work, state: Unpublished, metadata: TableMetadataV2, listing: _Listing
    ) -> None:
        self._publisher = publisher
        self.work = work
        self._state = state
        self.metadata = metadata
        self._listing = listing
        self.snapshots: list[SnapshotRecord] = []
        self.listings: dict[int, list[str]] = {}
        self.mapping = metadata.properties.get(NAME_MAPPING)
        _, self._specs, _ = shapes_of(state.metadata)
        self._specs |= {spec.spec_id: spec for spec in metadata.partition_specs}
        self._schemas = list(shapes_of(state.metadata)[0].values())

    # --- groups ----------------------------------------------------------------------

    def add_beginning(self, version: TableVersion) -> None:
        """A first snapshot of all that is visible in the oldest version there is."""
        self._snapshot(Group(-1, version.version, "append", (version,)), [])

    def create_iceberg_snapshot(self, group: Group) -> None:
        """Make one snapshot of a group of versions, and its manifests."""
        ended: list[ListedRow] = []
        if group.operation != "append":
            ended = self._publisher.registry.read_with(
                lambda reader: files_ended(reader, self._state.table.id, group.last)
            )
        self._snapshot(group, ended)

    def _snapshot(self, group: Group, ended: Sequence[ListedRow]) -> None:
        snapshot_id = self._new_id()
        self._end(ended, snapshot_id)
        self._merge(snapshot_id)
        counted = _Counted()
        for file in ended:
            counted.remove(file)
        self._add(group, snapshot_id, counted)
        failpoints.reach("publish.manifests_written")
        self._finish(group, snapshot_id, counted)

    def _new_id(self) -> int:
        known = {snapshot.snapshot_id for snapshot in self.metadata.snapshots}
        while (ident := uuid.uuid4().int >> 65) in known or not ident:
            pass
        return ident

    def drop(self, dropped: Sequence[int]) -> list[int]:
        """Forget snapshots of this very step that the metadata will not list after all; the others among them."""
        gone = {snapshot.snapshot_id for snapshot in self.snapshots} & set(dropped)
        others = [ident for ident in dropped if ident not in gone]
        if not gone:
            return others
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot.snapshot_id not in gone]
        self.listings = {ident: paths for ident, paths in self.listings.items() if ident not in gone}
        needed = {path for paths in self.listings.values() for path in paths}
        needed |= {snapshot.manifest_list for snapshot in self.snapshots}
        unneeded = {file.file_path for file in self.work.written} - needed
        self._publisher.store.delete(sorted(unneeded))
        self.work.written = [file for file in self.work.written if file.file_path not in unneeded]
        return others

    # --- manifests -------------------------------------------------------------------

    def _shape(self, spec_id: int) -> tuple[PartitionSpec, Schema]:
        spec = self._specs[spec_id]
        return spec, schema_for(spec, self._schemas)

    def _end(self, ended: Sequence[ListedRow], snapshot_id: int) -> None:
        """Rewrite the manifests that have files which were ended."""
        # What only says that something was deleted is of no use to the next snapshot.
        self._listing.manifests = [manifest for manifest in self._listing.manifests if _live(manifest)]
        if not ended:
            return
        publisher = self._publisher
        left = {self._location(file) for file in ended}
        ids = sorted(file.id for file in ended)
        likely = {item.manifest_path for item in self._listing.manifests if self._listing.may_have(item, ids)}
        rewritten = list(self._listing.manifests)
        # A file that a rollback has revived has another id than when its manifest was written.
        for first in (True, False):
            for position, manifest in enumerate(rewritten):
                if not left or (manifest.manifest_path in likely) != first:
                    continue
                path = self.work.manifest_path()
                spec, schema = self._shape(manifest.partition_spec_id)
                new, found = without(publisher.io, publisher.store.uri(path), manifest, spec, schema, snapshot_id, left)
                if found:
                    self._note(new, self._listing.ranges.get(manifest.manifest_path, (None, None)))
                    left -= found
                    rewritten[position] = new
        if left:
            raise PublishFailed(
                f"{len(left)} files that were ended are in no manifest, {min(left)!r} for one",
                on=self._state.table.shown,
                remedy="Run `lakebook verify`",
            )
        self._listing.manifests = rewritten

    def _merge(self, snapshot_id: int) -> None:
        """Merge small manifests of earlier snapshots, so that their number grows with the logarithm."""
        publisher, listing = self._publisher, self._listing
        mine = {file.file_path for file in self.work.written}
        settled = [
            manifest
            for manifest in sorted(listing.manifests, key=self._order)
            if manifest.added_snapshot_id != snapshot_id
        ]
        for some in to_merge(settled):
            spec, schema = self._shape(some[0].partition_spec_id)
            path = self.work.manifest_path()
            new = merged(publisher.io, publisher.store.uri(path), some, spec, schema, snapshot_id)
            gone = {manifest.manifest_path for manifest in some}
            listing.manifests = [item for item in listing.manifests if item.manifest_path not in gone]
            if new is not None:
                listing.manifests.append(new)
                ranges = [listing.ranges.get(location, (None, None)) for location in gone]
                firsts = [first for first, _ in ranges]
                lasts = [last for _, last in ranges]
                known = None not in firsts and None not in lasts
                self._note(
                    new,
                    (
                        min(item for item in firsts if item is not None) if known else None,
                        max(item for item in lasts if item is not None) if known else None,
                    ),
                )
            self._forget_unlisted(gone, mine)

    def _forget_unlisted(self, gone: set[str], mine: set[str]) -> None:
        """Manifests that this very step wrote and merged again, before any snapshot listed them."""
        listed = {path for paths in self.listings.values() for path in paths}
        relative = {self._publisher.store.relative(location) for location in gone}
        unneeded = (relative & mine) - listed
        if unneeded:
            self._publisher.store.delete(sorted(unneeded))
            self.work.written = [file for file in self.work.written if file.file_path not in unneeded]

    def _order(self, manifest: ManifestFile) -> int:
        return self._listing.ranges.get(manifest.manifest_path, (None, None))[0] or 0

    def _path_of(self, manifest: ManifestFile) -> str:
        # Those of former snapshots are in the registry: to look where each of a thousand is takes longer than the rest.
        found = self._listing.paths.get(manifest.manifest_path)
        return self._publisher.store.relative(manifest.manifest_path) if found is None else found

    def _note(self, manifest: ManifestFile, ids: tuple[int | None, int | None]) -> None:
        self._listing.ranges[manifest.manifest_path] = ids
        self.work.note_manifest(manifest, ids)

    def _add(self, group: Group, snapshot_id: int, counted: _Counted) -> None:
        """Write manifests of the files that a group has added."""
        waiting: dict[tuple[int, int], list[ListedRow]] = {}
        sizes: dict[tuple[int, int], int] = {}
        without_ids: set[int] = set()
        for file in self._added(group):
            counted.add(file)
            if not file.has_field_ids and not file.content:
                without_ids.add(file.schema_version)
            key = (file.spec_id, file.content)
            waiting.setdefault(key, []).append(file)
            sizes[key] = sizes.get(key, 0) + len(file.stats) + 1
            if len(waiting[key]) >= FILES_PER_MANIFEST or sizes[key] >= _MOST_STATS:
                self._write(waiting.pop(key), snapshot_id)
                sizes.pop(key)
        for files in waiting.values():
            self._write(files, snapshot_id)
        if without_ids:
            states = {state.schema_version: state for state in self._state.metadata}
            schemas = shapes_of([states[number] for number in sorted(without_ids)])[0]
            self.mapping = extended_mapping(self.mapping, schemas.values(), self._state.table.shown)

    def _added(self, group: Group) -> Iterator[ListedRow]:
        registry, table_id = self._publisher.registry, self._state.table.id
        fields = sorted({leaf.field_id for schema in self._schemas for leaf in leaf_fields(schema)})
        after: tuple[int, int] | None = None
        while True:
            start = after
            page = registry.read_with(lambda reader: files_added(reader, table_id, group.first, group.last, start))  # noqa: B023
            yield from registry.read_with(lambda reader: with_stats(reader, table_id, page, fields))  # noqa: B023
            if len(page) < CHUNK:
                return
            after = (page[-1].from_version, page[-1].id)

    def _write(self, files: Sequence[ListedRow], snapshot_id: int) -> None:
        spec, schema = self._shape(files[0].spec_id)
        publisher = self._publisher
        about = sorted({file.referenced_path for file in files if file.referenced_path is not None})
        # Rows of deletes name a file as its own entry does, and so do their bounds: readers compare the texts.
        spelled = publisher.registry.read_with(lambda reader: own_spellings(reader, about)) if about else {}
        listed = (self._listed(file, spec, schema, spelled) for file in files)
        locations = (publisher.store.uri(self.work.manifest_path()) for _ in count())
        for manifest in write_manifests(publisher.io, locations, spec, schema, snapshot_id, listed):
            self._listing.manifests.append(manifest)
            self._note(manifest, (min(file.id for file in files), max(file.id for file in files)))

    def _listed(self, file: ListedRow, spec: PartitionSpec, schema: Schema, spelled: Mapping[str, str]) -> ListedFile:
        about = file.referenced_path
        return ListedFile(
            location=self._location(file),
            size=file.file_size,
            rows=file.row_count,
            content=file.content,
            spec_id=file.spec_id,
            partition=partition_from_json(spec, schema, file.partition_values),
            stats=file.stats,
            sequence_number=file.sequence_number,
            referenced=None if about is None else spelled.get(about) or self._publisher.store.uri(about),
        )

    def _location(self, file: ListedRow) -> str:
        return file.location or self._publisher.store.uri(file.file_path)

    # --- the snapshot ----------------------------------------------------------------

    def _finish(self, group: Group, snapshot_id: int, counted: _Counted) -> None:
        publisher, metadata = self._publisher, self.metadata
        parent = metadata.current_snapshot()
        sequence = metadata.last_sequence_number + 1
        newest = group.versions[-1]
        path = f"{self.work.folder}/snap-{snapshot_id}-1-{uuid.uuid4()}.avro"
        location = publisher.store.uri(path)
        manifests = self._listing.manifests
        parent_id = parent.snapshot_id if parent is not None else None
        # The list gives new manifests their sequence number; those that follow need it.
        size, self._listing.manifests = publisher.lists.write(location, snapshot_id, parent_id, sequence, manifests)
        failpoints.reach("publish.list_written")
        self.work.written.append(MetadataFile(path, MANIFEST_LIST, size))
        schema_id = self._schema_id(newest.schema_version)
        summary = self._summary(group, counted, parent)
        snapshot = Snapshot.model_validate(
            {
                "snapshot-id": snapshot_id,
                "parent-snapshot-id": parent_id,
                "sequence-number": sequence,
                "timestamp-ms": to_ms(newest.committed_at),
                "manifest-list": location,
                "summary": summary,
                "schema-id": schema_id,
            }
        )
        self.metadata = with_snapshot(metadata, snapshot)
        self.listings[snapshot_id] = [self._path_of(manifest) for manifest in manifests]
        self.snapshots.append(
            SnapshotRecord(
                snapshot_id,
                parent_id,
                sequence,
                to_ms(newest.committed_at),
                path,
                summary,
                schema_id,
                group.last,
                group.last,
                "",
                is_ours=True,
            )
        )

    def _schema_id(self, schema_version: int) -> int:
        for state in self._state.metadata:
            if state.schema_version == schema_version:
                return int(state.schema.get("schema-id", 0))
        return int(self._state.current.schema.get("schema-id", 0))

    def _summary(self, group: Group, counted: _Counted, parent: Snapshot | None) -> dict[str, str]:
        given: dict[str, str] = {}
        for version in group.versions:
            given |= version.summary
        former = parent.summary.additional_properties if parent is not None and parent.summary is not None else None
        whole = with_totals(counted.summary(), former)
        if "total-records" not in whole:
            whole |= self._totals(group.last)
        first = group.versions[0].version
        covered = str(group.last) if first == group.last else f"{first}-{group.last}"
        return {**given, **whole, "operation": group.operation, VERSIONS: covered}

    def _totals(self, version: int) -> dict[str, str]:
        """The totals of a version from the registry, where the snapshot before has none to go on from."""

        def read(reader: Any) -> tuple[tuple[int, int, int], list[Any]]:
            table_id = self._state.table.id
            return totals_at(reader, table_id, version), visible_deletes(reader, table_id, version)

        (rows, files, size), deletes = self._publisher.registry.read_with(read)
        return {
            "total-records": str(rows),
            "total-data-files": str(files),
            "total-files-size": str(size + sum(item.file_size for item in deletes)),
            "total-delete-files": str(len(deletes)),
            "total-position-deletes": str(sum(item.row_count for item in deletes)),
            "total-equality-deletes": "0",
        }


class _Counted:
    """What a snapshot adds and removes."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def _count(self, **numbers: int) -> None:
        for name, number in numbers.items():
            key = name.replace("_", "-")
            self._numbers[key] = self._numbers.get(key, 0) + number

    def add(self, file: ListedRow) -> None:
        """Count a file that is added."""
        if file.content:
            self._count(
                added_delete_files=1,
                added_position_delete_files=1,
                added_position_deletes=file.row_count,
                added_files_size=file.file_size,
            )
        else:
            self._count(added_data_files=1, added_records=file.row_count, added_files_size=file.file_size)

    def remove(self, file: ListedRow) -> None:
        """Count a file that is removed."""
        if file.content:
            self._count(
                removed_delete_files=1,
                removed_position_delete_files=1,
                removed_position_deletes=file.row_count,
                removed_files_size=file.file_size,
            )
        else:
            self._count(deleted_data_files=1, deleted_records=file.row_count, removed_files_size=file.file_size)

    def summary(self) -> Mapping[str, str]:
        """The numbers as a summary has them."""
        return {key: str(number) for key, number in self._numbers.items()}


def files_only_of(publisher: Publisher, snapshots: Sequence[Snapshot], others: Sequence[Snapshot]) -> list[str]:
    """Paths of files that some snapshots have and others have not."""

    def paths(of: Sequence[Snapshot]) -> set[str]:
        lists = {item.manifest_list for item in of}
        manifests = {
            manifest.manifest_path: manifest for location in lists for manifest in publisher.lists.read(location)
        }
        return {
            publisher.store.relative(entry.data_file.file_path)
            for manifest in manifests.values()
            for entry in live_entries(publisher.io, manifest)
        }

    return sorted(paths(snapshots) - paths(others))


def _reachable(metadata: TableMetadataV2) -> set[int]:
    """The snapshots that a branch or a tag leads to."""
    parents = {snapshot.snapshot_id: snapshot.parent_snapshot_id for snapshot in metadata.snapshots}
    found: set[int] = set()
    for ref in metadata.refs.values():
        at: int | None = ref.snapshot_id
        while at is not None and at in parents and at not in found:
            found.add(at)
            at = parents[at]
    return found


def _live(manifest: ManifestFile) -> bool:
    return manifest.has_added_files() or manifest.has_existing_files()


def require_published(pointer: Pointer | None, table: TableRecord) -> Pointer:
    """What a table is published as, or an error where it cannot be."""
    if pointer is None:
        raise TableNotFound(
            f"a table of format {table.format} is not published as Iceberg",
            on=table.shown,
            remedy="Create it with format parquet",
        )
    return pointer
