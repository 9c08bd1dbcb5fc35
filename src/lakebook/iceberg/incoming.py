"""What a commit of an outside engine brings: its manifests, read and checked.

Every location that it carries must lie inside the warehouse, and every file must be of a kind
that is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pyiceberg.manifest import DataFileContent, FileFormat, ManifestEntry, ManifestEntryStatus, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.snapshots import Snapshot

from lakebook.errors import LakebookError, NotAccepted
from lakebook.iceberg.manifests import entries_of, read_manifest_list
from lakebook.iceberg.partitioning import partition_path, partition_to_json
from lakebook.iceberg.publishing import Publisher
from lakebook.names import shown
from lakebook.registry.outside import known_metadata
from lakebook.registry.table_files import NewFile

ACCEPTED = "Lakebook takes format version 2 with Parquet data files and Parquet position deletes"
# Folders of inserts and of reads.
_OWN_FOLDERS = ("data", "reads")
# The column of a file of deletes that names the file whose rows are deleted.
_REFERENCED_PATH = 2147483546


@dataclass
class ReadSnapshot:
    """What the manifests of one new snapshot say."""

    snapshot: Snapshot
    manifests: list[ManifestFile]
    added: list[ManifestEntry] = field(default_factory=list)
    deleted: list[ManifestEntry] = field(default_factory=list)
    #: Manifests that nobody knew before, with the paths of all files they list.
    new: dict[str, tuple[ManifestFile, list[str]]] = field(default_factory=dict)


class Incoming:
    """Reads what an outside engine has written."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._registry = publisher.registry
        self._store = publisher.store

    def inside(self, location: str) -> str:
        """A location's path in the warehouse; one that is not in it is refused."""
        return self._store.relative(location)

    def inside_folder(self, location: str) -> str:
        """The path of a folder that others may write to; those of Lakebook's own are refused."""
        path = self.inside(location).rstrip("/")
        if path.partition("/")[0] in ("", *_OWN_FOLDERS):
            raise NotAccepted(
                "this folder is Lakebook's own", on=shown(location), remedy="Choose another one in the warehouse"
            )
        return path

    def read_snapshot(self, on: str, snapshot: Snapshot, table_id: int) -> ReadSnapshot:
        """What a snapshot that is not known yet says of its files."""
        publisher = self._publisher
        self.inside(snapshot.manifest_list)
        found = ReadSnapshot(snapshot, read_manifest_list(publisher.io, snapshot.manifest_list))
        paths = [self.inside(manifest.manifest_path) for manifest in found.manifests]
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
            raise NotAccepted("equality deletes are not taken", on=on, remedy=ACCEPTED)
        if file.file_format != FileFormat.PARQUET:
            kind = "deletion vectors" if file.content == DataFileContent.POSITION_DELETES else "such data files"
            raise NotAccepted(f"{kind} ({file.file_format.value}) are not taken", on=on, remedy=ACCEPTED)
        return self.inside(file.file_path)

    def new_file(
        self, on: str, entry: ManifestEntry, spec: PartitionSpec, schema: Schema, sequence: int | None
    ) -> NewFile:
        """A file of an outside engine; its footer and checksum are owed."""
        file = entry.data_file
        path = self.check_entry(on, entry)
        self.check_there(on, path, file.file_size_in_bytes)
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

    def check_there(self, on: str, path: str, size: int) -> None:
        """Refuse a file that is not there as it is said to be, or that is not an outside engine's to give."""
        head = path.partition("/")[0]
        if head in _OWN_FOLDERS:
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


def operation_of(snapshot: Snapshot) -> str:
    """What a snapshot says it did."""
    return snapshot.summary.operation.value if snapshot.summary is not None else "append"
