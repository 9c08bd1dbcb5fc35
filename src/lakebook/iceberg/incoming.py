"""What a commit of an outside engine brings: its manifests, read and checked.

Every location that it carries must lie inside the warehouse, and every file must be of a kind
that is taken.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

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
from pyiceberg.table.snapshots import Snapshot

from lakebook.errors import InvalidInput, LakebookError, NotAccepted, PathOutsideWarehouse, StorageRefused
from lakebook.iceberg.manifests import entries_of, live_entries, read_manifest_list
from lakebook.iceberg.partitioning import partition_path, partition_to_json
from lakebook.iceberg.publishing import Publisher
from lakebook.iceberg.statistics import said_times
from lakebook.names import check_text, shown
from lakebook.registry.outside import known_metadata
from lakebook.registry.table_files import NewFile

ACCEPTED = "Lakebook takes format version 2 with Parquet data files and Parquet position deletes"
# Folders of inserts and of reads.
_OWN_FOLDERS = ("data", "reads")
# The column of a file of deletes that names the file whose rows are deleted.
_REFERENCED_PATH = 2147483546


# More is nobody's honest number, and sums of it would not fit the registry.
_MOST_COUNT = 2**48
_MOST_LONG = 2**63 - 1
# The year 2286: some engines cannot show a later time.
_LAST_TIME = 10**13


@dataclass
class ReadSnapshot:
    """What the manifests of one new snapshot say."""

    snapshot: Snapshot
    manifests: list[ManifestFile]
    added: list[ManifestEntry] = field(default_factory=list)
    deleted: list[ManifestEntry] = field(default_factory=list)
    #: Manifests that its parent had not, with the paths of all files they list.
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
        # A link on the way may lead out of the warehouse.
        self._store.size(f"{path}/_")
        if path.partition("/")[0] in ("", *_OWN_FOLDERS):
            raise NotAccepted(
                "this folder is Lakebook's own", on=shown(location), remedy="Choose another one in the warehouse"
            )
        return path

    def check_snapshot(self, on: str, snapshot: Snapshot) -> None:
        """Refuse a snapshot whose numbers or texts no engine could use."""
        numbers = (snapshot.snapshot_id, snapshot.sequence_number or 0, snapshot.timestamp_ms)
        if not 0 < numbers[0] <= _MOST_LONG or not 0 <= numbers[1] < _MOST_COUNT or not 0 <= numbers[2] < _LAST_TIME:
            raise NotAccepted(f"{shown(numbers)} are no id, sequence number and time of a snapshot", on=on)
        if snapshot.parent_snapshot_id is not None and not 0 < snapshot.parent_snapshot_id <= _MOST_LONG:
            raise NotAccepted(f"{shown(snapshot.parent_snapshot_id)} is no id of a snapshot", on=on)
        if snapshot.summary is None:
            raise NotAccepted("a snapshot has no summary", on=on, remedy=ACCEPTED)
        for key, value in snapshot.summary.additional_properties.items():
            check_text("summary", key)
            check_text("summary", str(value))
        self.inside(snapshot.manifest_list)

    def listed(self, on: str, location: str) -> list[ManifestFile]:
        """The manifests that a list of somebody else's names, each once and inside the warehouse."""
        self.inside(location)
        with _readable(on, location):
            found = read_manifest_list(self._publisher.io, location, strange=True)
            paths = [self.inside(manifest.manifest_path) for manifest in found]
        if len(set(paths)) != len(paths):
            raise NotAccepted("it lists a manifest twice", on=on)
        return found

    def entries(self, on: str, manifest: ManifestFile, *, strange: bool = True) -> list[ManifestEntry]:
        """The entries of a manifest, which must be what it is listed with."""
        with _readable(on, manifest.manifest_path):
            found = list(entries_of(self._publisher.io, manifest, strange=strange))
        counted = dict.fromkeys(ManifestEntryStatus, 0)
        for entry in found:
            counted[entry.status] += 1
            self.check_entry(on, entry)
            if (entry.data_file.content != DataFileContent.DATA) != (manifest.content == ManifestContent.DELETES):
                raise NotAccepted("a manifest of rows lists deletes, or the other way round", on=on)
        said = (manifest.added_files_count, manifest.existing_files_count, manifest.deleted_files_count)
        if said != tuple(counted[status] for status in (_ADDED, _EXISTING, _DELETED)):
            raise NotAccepted("a manifest has not the entries that it is listed with", on=on)
        return found

    def read_snapshot(
        self, on: str, snapshot: Snapshot, parent: Sequence[ManifestFile] | None, table_id: int = 0
    ) -> ReadSnapshot:
        """What a snapshot adds and deletes, beside the manifests of its parent.

        Without a parent it is read as a whole: of a table that is new here, or one that `main` jumps to,
        which may list manifests of that table. Else nothing may come or go without being said: what is
        listed in manifests that the parent had not is what it listed in those that are gone, plus what
        the snapshot adds, less what it deletes.
        """
        found = ReadSnapshot(snapshot, self.listed(on, snapshot.manifest_list))
        before = {manifest.manifest_path: manifest for manifest in parent or ()}
        coming: dict[_Key, int] = {}
        new = [manifest for manifest in found.manifests if manifest.manifest_path not in before]
        paths = [self.inside(manifest.manifest_path) for manifest in new]
        known = self._registry.read_with(lambda reader: known_metadata(reader, paths))
        for path, manifest in zip(paths, new, strict=True):
            if path in known:
                if parent is None and known[path] == table_id:
                    continue
                raise NotAccepted("it lists a manifest that is not its parent's", on=on)
            entries = self.entries(on, manifest)
            found.new[path] = (manifest, [self.inside(entry.data_file.file_path) for entry in entries])
            for entry in entries:
                if entry.status == _ADDED:
                    if parent is not None and entry.snapshot_id != snapshot.snapshot_id:
                        raise NotAccepted("it adds files in the name of another snapshot", on=on)
                    found.added.append(entry)
                elif entry.status == _EXISTING:
                    coming[_key(entry)] = coming.get(_key(entry), 0) + 1
                elif entry.snapshot_id == snapshot.snapshot_id:
                    found.deleted.append(entry)
        if parent is not None:
            self._require_whole(on, found, before, coming)
        return found

    def _require_whole(
        self, on: str, found: ReadSnapshot, before: dict[str, ManifestFile], coming: dict[_Key, int]
    ) -> None:
        after = {manifest.manifest_path: manifest for manifest in found.manifests}
        left: dict[_Key, int] = {}
        for path, manifest in before.items():
            if path not in after:
                for entry in live_entries(self._publisher.io, manifest):
                    left[_key(entry)] = left.get(_key(entry), 0) + 1
            elif not _same(manifest, after[path]):
                raise NotAccepted("it lists a manifest of its parent otherwise than that does", on=on)
        for entry in found.deleted:
            key = _key(entry)
            if not left.get(key):
                raise NotAccepted(f"it deletes {shown(key[0])}, which it does not rewrite", on=on)
            left[key] -= 1
        if {key: number for key, number in left.items() if number} != coming:
            raise NotAccepted(
                "its manifests list other files than are left after what it adds and deletes",
                on=on,
                remedy="Load the table again and repeat the commit",
            )

    def check_entry(self, on: str, entry: ManifestEntry) -> str:
        """Refuse what is not taken; the path of the file in the warehouse."""
        file = entry.data_file
        if not 0 <= file.record_count < _MOST_COUNT or not 0 <= file.file_size_in_bytes < _MOST_COUNT:
            raise NotAccepted("a file has an impossible number of rows or bytes", on=on)
        if entry.sequence_number is not None and not 0 <= entry.sequence_number < _MOST_COUNT:
            raise NotAccepted("a file has an impossible sequence number", on=on)
        if file.content == DataFileContent.EQUALITY_DELETES:
            raise NotAccepted("equality deletes are not taken", on=on, remedy=ACCEPTED)
        if file.file_format != FileFormat.PARQUET:
            kind = "deletion vectors" if file.content == DataFileContent.POSITION_DELETES else "such data files"
            raise NotAccepted(f"{kind} ({file.file_format.value}) are not taken", on=on, remedy=ACCEPTED)
        return self.inside(file.file_path)

    def new_file(
        self,
        on: str,
        entry: ManifestEntry,
        spec: PartitionSpec,
        schema: Schema,
        sequence: int | None,
        times: Mapping[int, str],
    ) -> NewFile:
        """A file of an outside engine; its footer and checksum are owed.

        `times` are the table's columns of timestamps: what the engine says of them tells views what is stale.
        """
        file = entry.data_file
        path = self.check_entry(on, entry)
        self.check_there(on, path, file.file_size_in_bytes)
        is_deletes = file.content == DataFileContent.POSITION_DELETES
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
            content=1 if is_deletes else 0,
            location=None if file.file_path == own else file.file_path,
            sequence_number=sequence,
            referenced_path=self._referenced(file) if is_deletes else None,
            stats=() if is_deletes else said_times(times, file),
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
        found = self.size_of(path)
        if found != size:
            what = "is not there" if found is None else f"has {found} bytes instead of {size}"
            raise NotAccepted(f"the file {shown(path)} {what}", on=on, remedy="Write it first, then commit")

    def size_of(self, path: str) -> int | None:
        """The size of a file; none if it is not there, or cannot be."""
        try:
            return self._store.size(path)
        except StorageRefused:
            return None

    def _referenced(self, file: Any) -> str | None:
        lower = (file.lower_bounds or {}).get(_REFERENCED_PATH)
        upper = (file.upper_bounds or {}).get(_REFERENCED_PATH)
        if lower is None or lower != upper:
            return None
        try:
            return self._store.relative(bytes(lower).decode())
        except (LakebookError, UnicodeDecodeError):
            return None


_ADDED, _EXISTING, _DELETED = ManifestEntryStatus.ADDED, ManifestEntryStatus.EXISTING, ManifestEntryStatus.DELETED
# What makes a file the same in two manifests.
_Key = tuple[str, int, int | None, int, int, int]


def _key(entry: ManifestEntry) -> _Key:
    file = entry.data_file
    sizes = (file.spec_id, file.record_count, file.file_size_in_bytes)
    return (file.file_path, int(file.content), entry.sequence_number, *sizes)


def _same(ours: ManifestFile, theirs: ManifestFile) -> bool:
    """Whether two lists mean the same by a manifest."""
    # Without the summaries of partitions, which engines write differently.
    return all(ours[position] == theirs[position] for position in range(13))


@contextmanager
def _readable(on: str, location: str) -> Iterator[None]:
    """Whatever is wrong with a stranger's file: it is refused."""
    try:
        yield
    except (PathOutsideWarehouse, InvalidInput):
        raise
    except (LakebookError, OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _broken(on, location, error) from None
    except (
        EOFError,
        MemoryError,
        OverflowError,
        RecursionError,
        ZeroDivisionError,
        zlib.error,
        AssertionError,
    ) as error:
        raise _broken(on, location, error) from None


def _broken(on: str, location: str, error: BaseException) -> NotAccepted:
    return NotAccepted(
        f"the metadata file {shown(location)} cannot be read ({type(error).__name__})",
        on=on,
        remedy="Write it again, and commit anew",
    )


def operation_of(snapshot: Snapshot) -> str:
    """What a snapshot says it did."""
    return snapshot.summary.operation.value if snapshot.summary is not None else "append"
