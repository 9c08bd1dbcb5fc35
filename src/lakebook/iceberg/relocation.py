"""Iceberg's own files for another place: all that they say of locations is put into its words.

Metadata files, manifest lists and manifests name everything by absolute addresses. Each is written anew under the same
path of the other warehouse, for every snapshot that is kept.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
from pyiceberg.manifest import DataFile, ManifestEntryStatus, ManifestFile
from pyiceberg.table.metadata import TableMetadataV2

from lakebook.errors import InvalidMetadata, LakebookError, PathOutsideWarehouse
from lakebook.iceberg.file_io import WarehouseIO
from lakebook.iceberg.manifests import (
    DELETES,
    entries_of,
    read_manifest_list,
    relocated_manifest,
    write_manifest_list,
)
from lakebook.iceberg.table_metadata import parse_metadata, schema_for
from lakebook.registry.relocation import grown_summary
from lakebook.storage.objects import ObjectStore

_PATH_FIELD = 2_147_483_546
# Their places among the fields of a data file.
_FILE_PATH, _FILE_SIZE, _LOWER, _UPPER = 1, 5, 10, 11
_ADDED_SIZE, _REMOVED_SIZE, _TOTAL_SIZE = "added-files-size", "removed-files-size", "total-files-size"
# What may be a property that names a place.
_PLACES = (".path", ".location", "-path", "-location")


@dataclass(frozen=True)
class _Deletes:
    """A file of deletes, as a manifest has it."""

    path: str
    size: int
    is_added: bool
    is_removed: bool
    snapshot_id: int | None


class Relocation:
    """Puts what one warehouse says of itself into the words of another."""

    def __init__(self, source: ObjectStore, target: ObjectStore) -> None:
        self.source = source
        self.target = target
        self._source_io = WarehouseIO(source)
        self._target_io = WarehouseIO(target)
        # By the manifests that list them, which several snapshots have.
        self._deletes: dict[str, list[_Deletes]] = {}

    def moved(self, location: str) -> str:
        """Where something is in the other warehouse; what is in none of them stays where it is."""
        try:
            return self.target.uri(self.source.relative(location))
        except PathOutsideWarehouse:
            return location

    # --- metadata ------------------------------------------------------------------

    def metadata(self, path: str, grown: Mapping[int, Mapping[str, int]]) -> int:
        """Write a metadata file anew; its size. `grown` has what `grown` says of each snapshot."""
        data = self.source.read(path)
        packed = data[:2] == b"\x1f\x8b"
        try:
            said = orjson.loads(gzip.decompress(data) if packed else data)
            said = self._moved_metadata(said)
            if grown and said.get("snapshots"):
                said["snapshots"] = [
                    _with_sizes(item, grown.get(item["snapshot-id"], {})) for item in said["snapshots"]
                ]
        except (orjson.JSONDecodeError, EOFError, OSError, zlib.error, TypeError, KeyError, AttributeError) as error:
            raise InvalidMetadata(
                f"it is not the metadata of an Iceberg table ({type(error).__name__})",
                on=path,
                remedy="Run `lakebook verify` on the source",
            ) from None
        written = orjson.dumps(said)
        if packed:
            written = gzip.compress(written, 6, mtime=0)
        self._put(path, written)
        return len(written)

    def _moved_metadata(self, said: dict[str, Any]) -> dict[str, Any]:
        found = {**said, "location": self.moved(said["location"])}
        for name, key in (
            ("snapshots", "manifest-list"),
            ("metadata-log", "metadata-file"),
            ("statistics", "statistics-path"),
            ("partition-statistics", "statistics-path"),
        ):
            if said.get(name):
                found[name] = [{**item, key: self.moved(item[key])} if item.get(key) else item for item in said[name]]
        if said.get("properties"):
            found["properties"] = {
                name: self.moved(value) if name.endswith(_PLACES) else value
                for name, value in said["properties"].items()
            }
        return found

    def _put(self, path: str, data: bytes) -> None:
        # What a former attempt has left may be of another snapshot of the source.
        self.target.delete_one(path)
        self.target.put_new(path, data)

    # --- manifests -----------------------------------------------------------------

    def lists(self, metadata_path: str, wanted: set[str]) -> Iterator[tuple[Any, list[ManifestFile]]]:
        """The snapshots of a table whose manifest lists are wanted, each with its manifests."""
        for snapshot in self.read_metadata(metadata_path).snapshots:
            if self.source.relative(snapshot.manifest_list) in wanted:
                yield snapshot, read_manifest_list(self._source_io, snapshot.manifest_list)

    def read_metadata(self, path: str) -> TableMetadataV2:
        """A metadata file of the source."""
        return parse_metadata(self.source.read(path), path)

    def delete_files(self, manifest: ManifestFile) -> Iterator[str]:
        """The paths of files of deletes that a manifest lists and that are in the warehouse."""
        return (file.path for file in self._deletes_in(manifest))

    def _deletes_in(self, manifest: ManifestFile) -> list[_Deletes]:
        if manifest.content != DELETES:
            return []
        found = self._deletes.get(manifest.manifest_path)
        if found is None:
            found = self._deletes[manifest.manifest_path] = []
            for entry in entries_of(self._source_io, manifest):
                with suppress(PathOutsideWarehouse):
                    found.append(
                        _Deletes(
                            self.source.relative(entry.data_file.file_path),
                            entry.data_file.file_size_in_bytes,
                            entry.status == ManifestEntryStatus.ADDED,
                            entry.status == ManifestEntryStatus.DELETED,
                            entry.snapshot_id,
                        )
                    )
        return found

    def grown(self, snapshot: Any, manifests: list[ManifestFile], sizes: Mapping[str, int]) -> dict[str, int]:
        """By how many bytes the sizes in a snapshot's summary differ where files have other `sizes` now."""
        found = dict.fromkeys((_ADDED_SIZE, _REMOVED_SIZE, _TOTAL_SIZE), 0)
        for file in (file for manifest in manifests for file in self._deletes_in(manifest)):
            more = sizes.get(file.path, file.size) - file.size
            own = file.snapshot_id == snapshot.snapshot_id
            found[_TOTAL_SIZE] += 0 if file.is_removed else more
            found[_ADDED_SIZE] += more if own and file.is_added else 0
            found[_REMOVED_SIZE] += more if own and file.is_removed else 0
        return {name: more for name, more in found.items() if more}

    def manifest(self, manifest: ManifestFile, metadata: TableMetadataV2, sizes: Mapping[str, int]) -> int:
        """Write a manifest anew; its size. `sizes` has those of files that are of another size now."""
        path = self.source.relative(manifest.manifest_path)
        self.target.delete_one(path)
        spec = metadata.specs()[manifest.partition_spec_id]
        schema = schema_for(spec, metadata.schemas)
        location = self.target.uri(path)
        return relocated_manifest(
            self._source_io, self._target_io, location, manifest, spec, schema, self._mover(sizes)
        )

    def renamed(self, manifest: ManifestFile, size: int) -> ManifestFile:
        """What the list of a snapshot says of a manifest that was written anew."""
        rest = (manifest[position] for position in range(2, len(manifest)))
        return ManifestFile(self.moved(manifest.manifest_path), size, *rest)

    def _mover(self, sizes: Mapping[str, int]) -> Callable[[DataFile], DataFile]:
        def move(file: DataFile) -> DataFile:
            values = [file[position] for position in range(len(file))]
            values[_FILE_PATH] = self.moved(file.file_path)
            with suppress(PathOutsideWarehouse):
                values[_FILE_SIZE] = sizes.get(self.source.relative(file.file_path), file.file_size_in_bytes)
            for place in (_LOWER, _UPPER):
                if values[place] and _PATH_FIELD in values[place]:
                    values[place] = self._moved_bounds(values[place])
            return DataFile(*values)

        return move

    def _moved_bounds(self, bounds: Mapping[int, bytes]) -> dict[int, bytes]:
        """Bounds of the column that names files: the beginning of all of them changes, and not their order."""
        found = dict(bounds)
        try:
            found[_PATH_FIELD] = self.target.uri(self.source.relative(bounds[_PATH_FIELD].decode())).encode()
        except (LakebookError, UnicodeDecodeError):
            # It was cut short within the warehouse's own address. Without it, nothing is passed over.
            del found[_PATH_FIELD]
        return found

    def manifest_list(self, snapshot: Any, manifests: list[ManifestFile]) -> int:
        """Write the list of a snapshot's manifests anew; its size."""
        path = self.source.relative(snapshot.manifest_list)
        self.target.delete_one(path)
        return write_manifest_list(
            self._target_io,
            self.target.uri(path),
            snapshot.snapshot_id,
            snapshot.parent_snapshot_id,
            snapshot.sequence_number or 0,
            manifests,
        )


def _with_sizes(snapshot: dict[str, Any], grown: Mapping[str, int]) -> dict[str, Any]:
    return {**snapshot, "summary": grown_summary(snapshot["summary"], grown)} if grown else snapshot
