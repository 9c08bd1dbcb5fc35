"""Commits of outside engines, checked and entered into the registry.

What a commit changes is taken from the manifest entries that its snapshots added or deleted.
Files, versions, schemas and the pointer change in one transaction. Versions that are pending
are published first. An append that was prepared before them is moved onto the newest snapshot;
anything else is a conflict, and this book's own changes wait a little for the engine's retry.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.exceptions import ValidationError as IcebergError
from pyiceberg.manifest import ManifestContent, ManifestEntry, ManifestEntryStatus, ManifestFile
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
from lakebook.errors import CommitAborted, CommitOutcomeUnknown, FilesChanged, NotAccepted
from lakebook.iceberg.commit_steps import Creation, Preparation, Prepared, check_shape, earlier_specs
from lakebook.iceberg.incoming import ACCEPTED, Incoming, operation_of
from lakebook.iceberg.manifests import only_added
from lakebook.iceberg.partitioning import order_to_json, spec_to_json
from lakebook.iceberg.publishing import Publisher, Work, default_location, require_published
from lakebook.iceberg.schemas import schema_to_json
from lakebook.iceberg.table_metadata import parse_metadata, schema_for, with_totals
from lakebook.names import check_text, shown
from lakebook.registry.leases import leases_of
from lakebook.registry.outside import VersionsPending, apply_outside, flip_commit, hold_back
from lakebook.registry.publishing import (
    MANIFEST_LIST,
    MetadataFile,
    PointerMoved,
    SnapshotRecord,
    snapshots_of,
)
from lakebook.registry.tables import NewTable, TableRecord, create_table, require_free_name
from lakebook.registry.transactions import Transaction

_MOST_ATTEMPTS = 30
# Properties by which an engine is told to write elsewhere.
_PLACES = ("write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path")
_FORMAT_VERSION = "format-version"
# Seconds until a file of an outside engine must have been looked at.
_DEBT = 86_400.0

Change = tuple[TableRecord, Sequence[TableRequirement], Sequence[TableUpdate]]


class Committer:
    """Takes commits of outside engines for the tables of a book."""

    def __init__(self, publisher: Publisher, check_properties: Callable[[Mapping[str, str]], Any]) -> None:
        self._publisher = publisher
        self._registry = publisher.registry
        self._store = publisher.store
        self._incoming = Incoming(publisher)
        self._check_properties = check_properties

    # --- the entrances -----------------------------------------------------------------

    def commit(
        self,
        table: TableRecord,
        requirements: Sequence[TableRequirement],
        updates: Sequence[TableUpdate],
        *,
        precedence: bool = True,
    ) -> tuple[TableMetadataV2, str]:
        """Commit to one table; its metadata then, and the URI of the metadata file."""
        return self.commit_all([(table, requirements, updates)], precedence=precedence)[0]

    def commit_all(self, changes: Sequence[Change], *, precedence: bool = True) -> list[tuple[TableMetadataV2, str]]:
        """Commit to several tables, all or nothing.

        With `precedence`, this book's own changes wait a little for it where others have come first.
        """
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
                    if attempt >= 2 and precedence:
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
                transaction.lock(*(table.object_id for table, _, _ in changes))
                for (table, _, _), item in zip(changes, prepared, strict=True):
                    apply_outside(transaction, table, item.commit, item.work.commit_id, grace, _DEBT)

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
    ) -> Prepared:
        publisher = self._publisher
        pointer = require_published(publisher.publish(table), table)
        base = publisher.load(pointer)
        work = works.enter_context(Work(publisher, table.id, pointer.location))
        listed = self._registry.read_with(lambda reader: snapshots_of(reader, table.id))
        records = {item.snapshot_id: item for item in listed}
        updates = self._placed(work, table, base, requirements, updates, records)
        self._check_removals(table, base, updates, records)
        return Preparation(publisher, work, table, pointer, base, updates, records).finish()

    def _placed(
        self,
        work: Work,
        table: TableRecord,
        base: TableMetadataV2,
        requirements: Sequence[TableRequirement],
        updates: Sequence[TableUpdate],
        records: Mapping[int, SnapshotRecord],
    ) -> Sequence[TableUpdate]:
        """The updates as they stand on the published head; an append is moved onto it where it may be."""
        late: AssertRefSnapshotId | None = None
        failure: CommitFailedException | None = None
        for requirement in requirements:
            try:
                requirement.validate(base)
            except CommitFailedException as error:
                if not isinstance(requirement, AssertRefSnapshotId) or requirement.ref != MAIN_BRANCH:
                    raise
                late, failure = requirement, error
        if late is None or failure is None:
            return updates
        between = _between(base, late.snapshot_id)
        made_here = [item.snapshot_id in records and records[item.snapshot_id].is_ours for item in between or ()]
        if (
            between
            and all(made_here)
            and _is_append(updates)
            # A compaction has changed no row either.
            and all(operation_of(item) in ("append", "replace") for item in between)
        ):
            return self._moved(work, base, updates)
        if any(made_here):
            self._give_precedence([(table, (), ())])
        raise failure

    def _moved(self, work: Work, base: TableMetadataV2, updates: Sequence[TableUpdate]) -> Sequence[TableUpdate]:
        """An append on the newest snapshot: same id, new parent and sequence number, its manifests appended."""
        publisher = self._publisher
        head = base.current_snapshot()
        (adding,) = [update for update in updates if isinstance(update, AddSnapshotUpdate)]
        snapshot = adding.snapshot
        self._incoming.inside(snapshot.manifest_list)
        on = f"table {base.table_uuid}"
        theirs = [
            manifest
            for manifest in self._incoming.listed(on, snapshot.manifest_list)
            if manifest.added_snapshot_id == snapshot.snapshot_id
        ]
        files: list[ManifestEntry] = []
        manifests = publisher.lists.read(head.manifest_list) if head is not None else []
        specs = {spec.spec_id: spec for spec in base.partition_specs}
        for manifest in theirs:
            self._incoming.inside(manifest.manifest_path)
            if manifest.content != ManifestContent.DATA:
                raise CommitFailedException("The table was changed meanwhile")
            entries = self._incoming.entries(on, manifest)
            mine = [entry for entry in entries if entry.snapshot_id == snapshot.snapshot_id]
            files += mine
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
        size, _ = publisher.lists.write(location, snapshot.snapshot_id, parent, sequence, manifests)
        work.written.append(MetadataFile(path, MANIFEST_LIST, size))
        summary = dict(snapshot.summary.additional_properties) if snapshot.summary is not None else {}
        summary |= {
            "added-data-files": str(len(files)),
            "added-records": str(sum(entry.data_file.record_count for entry in files)),
            "added-files-size": str(sum(entry.data_file.file_size_in_bytes for entry in files)),
        }
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
                raise NotAccepted(f"format version {update.format_version} is not taken", on=on, remedy=ACCEPTED)
            if isinstance(update, AddSnapshotUpdate):
                self._incoming.check_snapshot(on, update.snapshot)
            if isinstance(update, SetSnapshotRefUpdate):
                if update.ref_name == MAIN_BRANCH and str(update.type) not in ("branch", "SnapshotRefType.BRANCH"):
                    raise NotAccepted("main is a branch, and cannot be a tag", on=on)
                check_text("ref", update.ref_name)
            if isinstance(update, SetLocationUpdate):
                self._incoming.inside_folder(update.location)
            if isinstance(update, SetPropertiesUpdate):
                self.check_given(on, update.updates)
            if isinstance(update, SetStatisticsUpdate):
                self._incoming.inside(update.statistics.statistics_path)
            place = getattr(getattr(update, "partition_statistics", None), "statistics_path", None)
            if place is not None:
                self._incoming.inside(place)

    def check_given(self, on: str, properties: Mapping[str, str]) -> None:
        """Refuse properties that lead outside the warehouse, or to what is not taken."""
        if str(properties.get(_FORMAT_VERSION, "2")) != "2":
            raise NotAccepted(
                f"format version {shown(properties[_FORMAT_VERSION])} is not taken", on=on, remedy=ACCEPTED
            )
        for key in _PLACES:
            if properties.get(key):
                self._incoming.inside_folder(properties[key])
        default = properties.get("write.format.default", "parquet").lower()
        if default != "parquet":
            raise NotAccepted(f"data files of format {shown(default)} are not taken", on=on, remedy=ACCEPTED)
        self._check_properties(properties)

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
        if any(isinstance(update, SetSnapshotRefUpdate) and update.snapshot_id in gone for update in updates):
            raise NotAccepted("it names a snapshot that it removes", on=table.shown)
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
        self._registry.read_with(lambda reader: require_free_name(reader, namespace, name))
        self._check_updates(on, updates)
        for requirement in requirements:
            if not isinstance(requirement, AssertCreate):
                raise CommitFailedException("The table does not exist")
        try:
            built = update_table_metadata(
                MetastoreCatalog._empty_table_metadata(), tuple(updates), enforce_validation=True
            )
        except (IcebergError, ValueError, TypeError, LookupError, AttributeError, StopIteration) as error:
            raise NotAccepted(f"its updates do not make a table ({type(error).__name__}: {error})", on=on) from None
        if not isinstance(built, TableMetadataV2):
            raise NotAccepted("it has not format version 2", on=on, remedy=ACCEPTED)
        return self.enter_new(namespace, name, built, is_new=True)

    def enter_new(
        self, namespace: str, name: str, metadata: TableMetadataV2, *, is_new: bool = False
    ) -> tuple[TableMetadataV2, str]:
        """Enter a table that begins with this metadata; if `is_new`, with its first snapshot's time now."""
        self._registry.read_with(lambda reader: require_free_name(reader, namespace, name))
        on = f"table {namespace}.{name}"
        place = self._incoming.inside_folder(metadata.location) if metadata.location else ""
        check_shape(metadata.schema(), None, on)
        wanted = NewTable(
            namespace,
            name,
            schema_to_json(metadata.schema()),
            metadata.last_column_id,
            spec_to_json((earlier_specs(metadata) or [metadata.spec()])[0]),
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
        for _ in range(_MOST_ATTEMPTS):
            # Files were swept since they were looked at: look again.
            with as_iceberg_says(), suppress(PointerMoved):
                return self._try_new(wanted, metadata, place, is_new=is_new)
        raise CommitFailedException("The warehouse is swept too often; try again")

    def _try_new(
        self, wanted: NewTable, metadata: TableMetadataV2, place: str, *, is_new: bool
    ) -> tuple[TableMetadataV2, str]:
        publisher = self._publisher
        with Work(publisher, 0, place) as work:
            made = Creation(publisher, work, metadata, place, is_new=is_new).finish()
            grace = publisher.settings.published_grace

            def apply(transaction: Transaction) -> None:
                table = create_table(transaction, wanted, work.commit_id, made.commit.at - 1)
                commit = made.commit
                pointer = replace(commit.publication.pointer, table_id=table.id)
                commit = replace(commit, publication=replace(commit.publication, pointer=pointer))
                apply_outside(transaction, table, commit, work.commit_id, grace, _DEBT)

            work.commit(apply)
            failpoints.reach("outside.created")
        return made.metadata, made.location

    def register(self, namespace: str, name: str, metadata_location: str) -> tuple[TableMetadataV2, str]:
        """Take an Iceberg table that lies in the warehouse, as it is; no data is rewritten."""
        path = self._incoming.inside(metadata_location)
        metadata = parse_metadata(self._store.read(path), path)
        return self.enter_new(namespace, name, metadata)


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


_PROPERTIES = (SetPropertiesUpdate, RemovePropertiesUpdate)


def _is_append(updates: Sequence[TableUpdate]) -> bool:
    """Whether updates are one append on `main`, perhaps with properties."""
    adding = [update for update in updates if isinstance(update, AddSnapshotUpdate)]
    naming = [update for update in updates if isinstance(update, SetSnapshotRefUpdate)]
    return (
        len(adding) == len(naming) == 1
        and operation_of(adding[0].snapshot) == "append"
        and naming[0].ref_name == MAIN_BRANCH
        and naming[0].snapshot_id == adding[0].snapshot.snapshot_id
        and all(isinstance(update, (AddSnapshotUpdate, SetSnapshotRefUpdate, *_PROPERTIES)) for update in updates)
    )


def _can_move(updates: Sequence[TableUpdate]) -> bool:
    """Whether updates can stand behind others that came first: an append, or properties alone."""
    return _is_append(updates) or all(isinstance(update, _PROPERTIES) for update in updates)


def _unassigned(manifest: ManifestFile) -> ManifestFile:
    """A manifest that gets its sequence number from the list it is put into."""
    copied = ManifestFile(*manifest._data)
    copied.sequence_number = -1
    copied.min_sequence_number = -1
    return copied


def _summary(values: Mapping[str, str], operation: str) -> Any:
    return Summary(Operation(operation), **{key: value for key, value in values.items() if key != "operation"})


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
