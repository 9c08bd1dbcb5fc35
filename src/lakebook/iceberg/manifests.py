"""Iceberg's manifests and manifest lists: written from rows of the registry, rewritten, merged, and read.

A manifest is written and read in blocks, so that one of many files takes little memory. It appears
as a whole or not at all. The bounds in it are right for every engine: where engines disagree about
an order, a bound is loosened or left out.

A schema that is given with a partition spec has to have the spec's source columns. For a spec whose
column was dropped since, that is an older schema or one that the columns were put back into.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Literal

from cachetools import LRUCache
from pydantic_core import to_json
from pyiceberg.avro.codecs import AVRO_CODEC_KEY
from pyiceberg.avro.codecs.deflate import DeflateCodec
from pyiceberg.avro.decoder import StreamingBinaryDecoder, new_decoder
from pyiceberg.avro.encoder import BinaryEncoder
from pyiceberg.avro.file import MAGIC, META_SCHEMA, SYNC_SIZE, AvroFileHeader
from pyiceberg.avro.resolver import ConstructWriter, construct_reader, construct_writer, resolve_reader
from pyiceberg.avro.writer import BinaryWriter, IntegerWriter, MapWriter, Writer
from pyiceberg.io import FileIO, OutputFile, OutputStream
from pyiceberg.manifest import (
    MANIFEST_ENTRY_SCHEMAS,
    MANIFEST_LIST_FILE_SCHEMAS,
    UNASSIGNED_SEQ,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    PartitionFieldStats,
    PartitionFieldSummary,
    data_file_with_partition,
    manifest_entry_schema_with_data_file,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema, visit
from pyiceberg.typedef import Record
from pyiceberg.types import DoubleType, MapType, NestedField, PrimitiveType, StructType
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from lakebook.errors import InvalidInput, InvalidPartitioning, ObjectTruncated
from lakebook.iceberg.bounds import to_iceberg
from lakebook.iceberg.schemas import leaf_fields
from lakebook.predicates import FLOATING
from lakebook.registry.file_stats import ColumnStats

#: What a manifest lists, and what a file is.
DATA, DELETES = 0, 1
#: How many files a new manifest lists at most.
FILES_PER_MANIFEST = 10_000
#: How many manifests of a size are merged into one of the next.
FANOUT = 8
#: How many files a merged manifest lists at most.
MOST_MERGED = 50_000

_VERSION: Literal[2] = 2
_AVRO_SCHEMA = "avro.schema"
_SCHEMAS_KEPT = 64
# Manifests in the lists that are kept, about a kilobyte each.
_LISTED_KEPT = 10_000
# The id of the field of a data file that has its partition.
_PARTITION = 102
# Bytes that a block of somebody else's may become.
_MOST_BLOCK = 16 * 1024**2
_CUT = 16
_PATH_FIELD = 2_147_483_546
_BLOCK_ENTRIES = 500
_BLOCK_BYTES = 1 << 20
_LEVEL = 3
_HALF = 2**63
_LAST_CHARACTER = 0x10FFFF
_ADDED, _EXISTING, _DELETED = ManifestEntryStatus.ADDED, ManifestEntryStatus.EXISTING, ManifestEntryStatus.DELETED
# From here on a manifest is full. What becomes full does so at once, out of smaller ones.
_FULL = FILES_PER_MANIFEST - 1
_TOP_TIER = next(tier for tier in range(MOST_MERGED) if FANOUT ** (tier + 1) > _FULL)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file as a manifest lists it.

    `stats` are the registry's; those of partition fields and of dropped columns are left out. The data
    sequence number is that of the snapshot unless it is given. `referenced` is the location of the
    data file of which position deletes delete rows, if it is only one.
    """

    location: str
    size: int
    rows: int
    content: int
    spec_id: int
    partition: Record
    stats: Sequence[ColumnStats] = ()
    sequence_number: int | None = None
    sort_order_id: int | None = None
    referenced: str | None = None


# --- files ---------------------------------------------------------------------


def data_file(file: ListedFile, schema: Schema) -> DataFile:
    """A file in PyIceberg's terms; the types of its columns are those of this schema."""
    return _data_file(file, _kinds(schema))


def _kinds(schema: Schema) -> dict[int, str]:
    # A column in a list or a map has any number of values per row: no predicate is about it.
    return {leaf.field_id: leaf.type for leaf in leaf_fields(schema) if not leaf.in_collection}


def _data_file(file: ListedFile, kinds: Mapping[int, str]) -> DataFile:
    is_data = file.content == DATA
    metrics: dict[str, Any] = _metrics(file.stats, kinds) if is_data else _delete_metrics(file.referenced)
    made = DataFile.from_args(
        content=DataFileContent.DATA if is_data else DataFileContent.POSITION_DELETES,
        file_path=file.location,
        file_format=FileFormat.PARQUET,
        partition=file.partition,
        record_count=file.rows,
        file_size_in_bytes=file.size,
        # Position deletes have an order of their own.
        sort_order_id=file.sort_order_id if is_data else None,
        **{name: values for name, values in metrics.items() if values},
    )
    made.spec_id = file.spec_id
    return made


def _delete_metrics(referenced: str | None) -> dict[str, dict[int, bytes]]:
    # Equal bounds name the one data file; cut ones would name none.
    bound = {} if referenced is None else {_PATH_FIELD: referenced.encode()}
    return {"lower_bounds": bound, "upper_bounds": dict(bound)}


def _metrics(stats: Sequence[ColumnStats], kinds: Mapping[int, str]) -> dict[str, dict[int, Any]]:
    sizes: dict[int, int] = {}
    values: dict[int, int] = {}
    nulls: dict[int, int] = {}
    nans: dict[int, int] = {}
    lowers: dict[int, bytes] = {}
    uppers: dict[int, bytes] = {}
    for column in stats:
        number = column.field_id
        kind = kinds.get(number)
        if kind is None:
            continue
        if column.column_size is not None:
            sizes[number] = column.column_size
        if column.value_count is not None:
            values[number] = column.value_count
        if column.null_count is not None:
            nulls[number] = column.null_count
        if column.nan_count is not None and kind in FLOATING and not _only_nan(column):
            nans[number] = column.nan_count
        lower, upper = _bounds(kind, column)
        if lower is not None:
            lowers[number] = lower
        if upper is not None:
            uppers[number] = upper
    return {
        "column_sizes": sizes,
        "value_counts": values,
        "null_value_counts": nulls,
        "nan_value_counts": nans,
        "lower_bounds": lowers,
        "upper_bounds": uppers,
    }


def _only_nan(column: ColumnStats) -> bool:
    """Whether an engine could take a file for one without any number, though NaN is its largest one."""
    if column.value_count is None or column.null_count is None:
        return bool(column.nan_count)
    return bool(column.nan_count) and column.nan_count == column.value_count - column.null_count


# --- bounds --------------------------------------------------------------------


def _bounds(kind: str, column: ColumnStats) -> tuple[bytes | None, bytes | None]:
    low, high = column.lower, column.upper
    if low is not None and high is not None and low > high:  # No values are between them: they are wrong.
        return None, None
    if kind in FLOATING and column.nan_count != 0:  # For some engines NaN is the largest number.
        high = None
    lower = None if low is None else _written(kind, low)
    upper = None if high is None else _written(kind, high)
    if kind == "string":
        return _lower_text(lower), _upper_text(upper)
    if kind == "binary" or kind.startswith("fixed"):
        return None if lower is None else lower[:_CUT], _upper_bytes(upper)
    return _for_all(kind, lower, upper)


def _written(kind: str, encoded: bytes) -> bytes | None:
    try:
        return to_iceberg(kind, encoded)
    except InvalidInput:
        return None


def _lower_text(bound: bytes | None) -> bytes | None:
    text = _text(bound)
    return None if text is None else text[:_CUT].encode()


def _upper_text(bound: bytes | None) -> bytes | None:
    text = _text(bound)
    if text is None:
        return None
    if len(text) <= _CUT:
        return bound
    for end in range(_CUT, 0, -1):
        code = ord(text[end - 1]) + 1
        if code <= _LAST_CHARACTER:
            # Between these two are the halves of pairs, which are no characters.
            return (text[: end - 1] + chr(0xE000 if code == 0xD800 else code)).encode()
    return None


def _text(bound: bytes | None) -> str | None:
    # A bound that another writer has cut may end within a character.
    try:
        return None if bound is None else bound.decode()
    except UnicodeDecodeError:
        return None


def _upper_bytes(bound: bytes | None) -> bytes | None:
    if bound is None or len(bound) <= _CUT:
        return bound
    kept = bound[:_CUT].rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def _for_all(kind: str, lower: bytes | None, upper: bytes | None) -> tuple[bytes | None, bytes | None]:
    """Bounds in Iceberg's form that are right in the order of every engine."""
    if kind == "uuid":
        return _uuid_bounds(lower, upper)
    if kind in FLOATING:
        # Bytewise -0.0 comes before 0.0, while the rows have either for both.
        return _zero(kind, lower, -0.0), _zero(kind, upper, 0.0)
    return lower, upper


def _zero(kind: str, bound: bytes | None, zero: float) -> bytes | None:
    form = "<f" if kind == "float" else "<d"
    return struct.pack(form, zero) if bound is not None and struct.unpack(form, bound)[0] == 0 else bound


def _uuid_bounds(lower: bytes | None, upper: bytes | None) -> tuple[bytes | None, bytes | None]:
    # Java takes a UUID for two signed numbers, and compares these. Where the first numbers are of one
    # sign, it agrees about them with those who compare bytes, but not about the second ones.
    if lower is None or upper is None:
        return None, None
    if lower == upper:
        return lower, upper
    first, last = int.from_bytes(lower[:8], "big"), int.from_bytes(upper[:8], "big")
    if first // _HALF != last // _HALF:
        return None, None
    below = None if first % _HALF == 0 else (first - 1).to_bytes(8, "big") + lower[8:]
    above = None if last % _HALF == _HALF - 1 else (last + 1).to_bytes(8, "big") + upper[8:]
    return below, above


# --- writing -------------------------------------------------------------------


def write_manifests(
    io: FileIO,
    locations: Iterator[str],
    spec: PartitionSpec,
    schema: Schema,
    snapshot_id: int,
    files: Iterable[ListedFile],
) -> list[ManifestFile]:
    """Write manifests of files that a snapshot adds; none if there are no files.

    All files have this partition spec, and are all data files or all position deletes.
    """
    kinds = _kinds(schema)
    remaining = iter(files)
    written = []
    for first in remaining:
        with _manifest_writer(io, next(locations), spec, schema, snapshot_id, first.content) as writer:
            for file in chain([first], islice(remaining, FILES_PER_MANIFEST - 1)):
                if (file.spec_id, file.content) != (spec.spec_id, first.content):
                    raise InvalidInput("a manifest lists files of one partition spec and content", on=file.location)
                writer.write(_ADDED, snapshot_id, file.sequence_number, None, _data_file(file, kinds))
        written.append(writer.manifest_file())
    return written


def without(
    io: FileIO,
    location: str,
    manifest: ManifestFile,
    spec: PartitionSpec,
    schema: Schema,
    snapshot_id: int,
    removed: Collection[str],
) -> tuple[ManifestFile, set[str]]:
    """Rewrite a manifest without the files that a snapshot removes; returns which of them it lists.

    They are listed as deleted by the snapshot, and the others as they were. What an earlier snapshot
    deleted is dropped. If the manifest lists none of them, it is returned as it is, and nothing is written.
    """
    _check_specs([manifest], spec)
    gone = removed if isinstance(removed, Set) else set(removed)
    # Reading twice is cheaper than to write in vain.
    found = {path for entry in live_entries(io, manifest) if (path := entry.data_file.file_path) in gone}
    if not found:
        return manifest, found
    with _manifest_writer(io, location, spec, schema, snapshot_id, manifest.content) as writer:
        for entry, encoded in _entries(io, manifest, writer.described):
            if entry.status == _DELETED or entry.data_file.file_path not in found:
                writer.carry(entry, encoded)
            elif entry.status != _ADDED or entry.snapshot_id != snapshot_id:
                numbers = (snapshot_id, entry.sequence_number, entry.file_sequence_number)
                writer.write(_DELETED, *numbers, entry.data_file, encoded)
            # A file that this very snapshot had added was never there.
    return writer.manifest_file(), found


def merged(
    io: FileIO,
    location: str,
    manifests: Sequence[ManifestFile],
    spec: PartitionSpec,
    schema: Schema,
    snapshot_id: int,
) -> ManifestFile | None:
    """Write one manifest of all the live files of several, in their order; none if they have none.

    All manifests have this partition spec and the same content. What this very snapshot added or deleted
    stays so; all others exist, with the snapshot and the sequence numbers that they had.
    """
    _check_specs(manifests, spec)
    if not any(_live(manifest) for manifest in manifests):
        return None
    with _manifest_writer(io, location, spec, schema, snapshot_id, manifests[0].content) as writer:
        for manifest in manifests:
            for entry, encoded in _entries(io, manifest, writer.described):
                writer.carry(entry, encoded)
    return writer.manifest_file()


def only_added(
    io: FileIO, location: str, manifest: ManifestFile, spec: PartitionSpec, schema: Schema, snapshot_id: int
) -> ManifestFile:
    """Write a manifest of only what a snapshot has added in another; it gets its sequence number anew."""
    with _manifest_writer(io, location, spec, schema, snapshot_id, manifest.content) as writer:
        for entry, encoded in _entries(io, manifest, writer.described):
            if entry.status == _ADDED and entry.snapshot_id == snapshot_id:
                writer.write(_ADDED, snapshot_id, None, None, entry.data_file, encoded)
    return writer.manifest_file()


def relocated_manifest(
    source: FileIO,
    target: FileIO,
    location: str,
    manifest: ManifestFile,
    spec: PartitionSpec,
    schema: Schema,
    change: Callable[[DataFile], DataFile],
) -> int:
    """Write the same entries to another place, each of their files changed; the size of the new manifest."""
    _check_specs([manifest], spec)
    with _manifest_writer(target, location, spec, schema, manifest.added_snapshot_id or 0, manifest.content) as writer:
        for entry, _ in _entries(source, manifest):
            numbers = (entry.snapshot_id, entry.sequence_number, entry.file_sequence_number)
            writer.write(entry.status, *numbers, change(entry.data_file))
    return writer.manifest_file().manifest_length


def _check_specs(manifests: Sequence[ManifestFile], spec: PartitionSpec) -> None:
    for manifest in manifests:
        if (manifest.partition_spec_id, manifest.content) != (spec.spec_id, manifests[0].content):
            raise InvalidInput("a manifest lists files of one partition spec and content", on=manifest.manifest_path)


def write_manifest_list(
    io: FileIO,
    location: str,
    snapshot_id: int,
    parent_id: int | None,
    sequence_number: int,
    manifests: Iterable[ManifestFile],
    encoded: MutableMapping[tuple[str, int], bytes] | None = None,
) -> int:
    """Write the list of a snapshot's manifests; returns its size in bytes.

    Manifests that were written for this snapshot get its sequence number, in the list only: they can be
    listed again with another. What is in `encoded` is not encoded again, and the others are put there.
    """
    metadata = {
        "snapshot-id": str(snapshot_id),
        "parent-snapshot-id": "null" if parent_id is None else str(parent_id),
        "sequence-number": str(sequence_number),
        "format-version": str(_VERSION),
    }
    listed = MANIFEST_LIST_FILE_SCHEMAS[_VERSION]
    with _avro_file(io.new_output(location), listed, "manifest_file", metadata) as blocks:
        for manifest in manifests:
            record = _numbered(manifest, snapshot_id, sequence_number)
            key = _key(record)
            data = None if encoded is None else encoded.get(key)
            if data is None:
                data = blocks.encode(record)
                if encoded is not None:
                    encoded[key] = data
            blocks.add_encoded(data)
    return blocks.size


def _key(manifest: ManifestFile) -> tuple[str, int]:
    return manifest.manifest_path, manifest.sequence_number


def _numbered(manifest: ManifestFile, snapshot_id: int, sequence_number: int) -> ManifestFile:
    if manifest.sequence_number != UNASSIGNED_SEQ:
        return manifest
    if manifest.added_snapshot_id != snapshot_id:
        raise InvalidInput("a manifest of another snapshot has no sequence number", on=manifest.manifest_path)
    # The copy module would share the values with the original.
    numbered = ManifestFile(*(manifest[position] for position in range(len(manifest))))
    numbered.sequence_number = sequence_number
    least = manifest.min_sequence_number
    # Those of the entries that inherit it are not among the least yet.
    numbered.min_sequence_number = sequence_number if least == UNASSIGNED_SEQ else min(least, sequence_number)
    return numbered


# --- reading -------------------------------------------------------------------


def entries_of(io: FileIO, manifest: ManifestFile, *, strange: bool = False) -> Iterator[ManifestEntry]:
    """All entries of a manifest, deleted ones too, with what they inherit from it.

    The sequence numbers of a manifest that is not in a list yet are not known: they stay none. One that
    a stranger wrote is read with a decoder that never looks behind its data.
    """
    return (entry for entry, _ in _entries(io, manifest, strange=strange))


def live_entries(io: FileIO, manifest: ManifestFile) -> Iterator[ManifestEntry]:
    """The entries of a manifest whose files are there."""
    return (entry for entry, _ in _entries(io, manifest) if entry.status != _DELETED)


def read_manifest_list(io: FileIO, location: str, *, strange: bool = False) -> list[ManifestFile]:
    """The manifests of a snapshot."""
    source = _AvroInput(io, location)
    reader = _list_reader(source.described)
    found = []
    for count, block in source.blocks():
        decoder = _decoder_of(block, strange)
        found += [reader.read(decoder) for _ in range(count)]
    return found


class ManifestLists:
    """Reads and writes the lists of a warehouse, and keeps the last ones: one is written once, and never changes."""

    def __init__(self, io: FileIO) -> None:
        self._io = io
        self._kept: LRUCache[str, tuple[ManifestFile, ...]] = LRUCache(
            _LISTED_KEPT, getsizeof=lambda found: 1 + len(found)
        )
        # Each with the very record that was encoded: somebody else could list the same manifest in other words.
        self._encoded: LRUCache[tuple[str, int], tuple[ManifestFile, bytes]] = LRUCache(_LISTED_KEPT)
        self._lock = threading.Lock()

    def read(self, location: str) -> list[ManifestFile]:
        """The manifests of a snapshot."""
        with self._lock:
            found = self._kept.get(location)
        if found is None:
            found = tuple(read_manifest_list(self._io, location))
            self._keep(location, found)
        return list(found)

    def write(
        self,
        location: str,
        snapshot_id: int,
        parent_id: int | None,
        sequence_number: int,
        manifests: Iterable[ManifestFile],
    ) -> tuple[int, list[ManifestFile]]:
        """Write a list; its size in bytes, and the manifests with the sequence numbers they have in it."""
        listed = [_numbered(manifest, snapshot_id, sequence_number) for manifest in manifests]
        with self._lock:
            kept = [(record, self._encoded.get(_key(record))) for record in listed]
        known = {_key(record): found[1] for record, found in kept if found is not None and found[0] is record}
        size = write_manifest_list(self._io, location, snapshot_id, parent_id, sequence_number, listed, known)
        with self._lock:
            self._encoded.update({_key(record): (record, known[_key(record)]) for record in listed})
        self._keep(location, tuple(listed))
        return size, listed

    def _keep(self, location: str, manifests: tuple[ManifestFile, ...]) -> None:
        # One that is larger than all that is kept would be refused.
        if len(manifests) < _LISTED_KEPT:
            with self._lock:
                self._kept[location] = manifests


def _entries(
    io: FileIO, manifest: ManifestFile, described: str | None = None, *, strange: bool = False
) -> Iterator[tuple[ManifestEntry, bytes | None]]:
    """All entries of a manifest, each with its data file as bytes if the manifest is of this Avro schema."""
    source = _AvroInput(io, manifest.manifest_path)
    reader = _entry_reader(source.described)
    total = 0
    careful = strange or _has_doubles(source.schema)
    for count, block in source.blocks():
        decoder = _decoder_of(block, careful)
        for _ in range(count):
            start = decoder.tell()
            entry: ManifestEntry = reader.read(decoder)
            encoded = None
            if source.described == described:
                # Written here, and so after the head and without anything behind it.
                encoded = block[start + len(_head(entry)) : decoder.tell()]
            _inherit(entry, manifest)
            yield entry, encoded
        total += count
    if total != _live(manifest) + (manifest.deleted_files_count or 0):
        raise ObjectTruncated(f"it has {total} entries, and not those it was listed with", on=manifest.manifest_path)


# The manifests of a table have the same few schemas, and to understand one takes longer than to read a small manifest.
@lru_cache(maxsize=_SCHEMAS_KEPT)
def _schema_in(described: str) -> Schema:
    return AvroSchemaConversion().avro_to_iceberg(json.loads(described))


@lru_cache(maxsize=_SCHEMAS_KEPT)
def _list_reader(described: str) -> Any:
    types: dict[int, Any] = {-1: ManifestFile, 508: PartitionFieldSummary}
    wanted = MANIFEST_LIST_FILE_SCHEMAS[_VERSION]
    return resolve_reader(_schema_in(described), wanted, types, {517: ManifestContent})


@lru_cache(maxsize=_SCHEMAS_KEPT)
def _entry_reader(described: str) -> Any:
    types: dict[int, Any] = {-1: ManifestEntry, 2: DataFile}
    enums: dict[int, Any] = {0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent}
    return resolve_reader(_schema_in(described), MANIFEST_ENTRY_SCHEMAS[_VERSION], types, enums)


def _decoder_of(block: bytes, careful: bool) -> Any:
    return StreamingBinaryDecoder(block) if careful else new_decoder(block)


def _has_doubles(entries: Schema) -> bool:
    """Whether partitions have doubles, of which the fast decoder makes floats."""
    partition = entries.find_type(_PARTITION)
    return isinstance(partition, StructType) and any(
        isinstance(field.field_type, DoubleType) for field in partition.fields
    )


def _inherit(entry: ManifestEntry, manifest: ManifestFile) -> None:
    if entry.snapshot_id is None and manifest.added_snapshot_id is not None:
        entry.snapshot_id = manifest.added_snapshot_id
    if entry.status == _ADDED and manifest.sequence_number != UNASSIGNED_SEQ:
        if entry.sequence_number is None:
            entry.sequence_number = manifest.sequence_number
        if entry.file_sequence_number is None:
            entry.file_sequence_number = manifest.sequence_number
    entry.data_file.spec_id = manifest.partition_spec_id


# --- merging -------------------------------------------------------------------


class _Pile:
    """Neighbouring manifests that shall become one, or one that stays."""

    def __init__(self, manifests: list[ManifestFile], live: int) -> None:
        self.manifests = manifests
        self.live = live
        self.tier = _tier(live)


def to_merge(manifests: Sequence[ManifestFile]) -> list[list[ManifestFile]]:
    """The groups of manifests that shall each be merged into one.

    The number of manifests then grows with the logarithm of the number of files, and so does the number
    of times that a file's entry is written again. A group has neighbours only, among the manifests of
    its partition spec and content, so that ranges of files stay ranges; its merged manifest belongs in
    the place of its first. Manifests without any live file are passed over: the caller drops them.
    """
    kinds: dict[tuple[int, int], list[_Pile]] = {}
    for manifest in manifests:
        if live := _live(manifest):
            kinds.setdefault((manifest.partition_spec_id, manifest.content), []).append(_Pile([manifest], live))
    groups = []
    for piles in kinds.values():
        for tier in range(_TOP_TIER + 1):
            if len(piles) >= FANOUT:
                piles = _merged_up_to(piles, tier)
        groups += [pile.manifests for pile in piles if len(pile.manifests) > 1]
    return groups


def _merged_up_to(piles: list[_Pile], tier: int) -> list[_Pile]:
    """The piles, those of runs of this tier or smaller merged where it is worth it."""
    found: list[_Pile] = []
    run: list[_Pile] = []
    for pile in piles:
        if pile.tier <= tier:
            run.append(pile)
        else:
            if run:
                found += _merged_run(run, tier)
                run = []
            found.append(pile)
    return found + _merged_run(run, tier)


def _merged_run(run: list[_Pile], tier: int) -> list[_Pile]:
    # A run is merged when it gets into a higher tier: as often is an entry written again. One of many
    # more manifests than merging leaves, as removals may make it, is merged at once.
    next_tier = MOST_MERGED if tier == _TOP_TIER else FANOUT ** (tier + 1)
    is_large = sum(pile.live for pile in run) >= next_tier
    is_long = len(run) >= FANOUT * (tier + 1)
    if len(run) < FANOUT or not (is_large or is_long):
        return run
    found: list[_Pile] = []
    part: list[_Pile] = []
    live = 0
    for pile in run:
        if live + pile.live > MOST_MERGED:
            found.append(_piled(part, live))
            part, live = [], 0
        part.append(pile)
        live += pile.live
    # What does not fill the largest manifest waits for more.
    if tier < _TOP_TIER or is_long or live == MOST_MERGED:
        return [*found, _piled(part, live)]
    return found + part


def _piled(piles: list[_Pile], live: int) -> _Pile:
    return _Pile([manifest for pile in piles for manifest in pile.manifests], live)


def _tier(live: int) -> int:
    """The tier of a manifest; a full one is above all that are merged."""
    if live > _FULL:
        return _TOP_TIER + 1
    return next(tier for tier in range(_TOP_TIER + 1) if live < FANOUT ** (tier + 1))


def _live(manifest: ManifestFile) -> int:
    return (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)


# --- a manifest that is being written --------------------------------------------


@contextmanager
def _manifest_writer(
    io: FileIO, location: str, spec: PartitionSpec, schema: Schema, snapshot_id: int, content: int
) -> Iterator[_ManifestWriter]:
    partition_type = _partition_type(spec, schema)
    entries = manifest_entry_schema_with_data_file(_VERSION, data_file_with_partition(partition_type, _VERSION))
    metadata = {
        "schema": schema.model_dump_json(),
        "schema-id": str(schema.schema_id),
        "partition-spec": to_json(spec.fields).decode(),
        "partition-spec-id": str(spec.spec_id),
        "format-version": str(_VERSION),
        "content": "data" if content == DATA else "deletes",
    }
    with _avro_file(io.new_output(location), entries, "manifest_entry", metadata) as blocks:
        yield _ManifestWriter(blocks, location, spec.spec_id, partition_type, snapshot_id, content)


def _partition_type(spec: PartitionSpec, schema: Schema) -> StructType:
    # PyIceberg's own would take the values of a dropped column for nulls, and one that is required for
    # never null, which a void transform makes it.
    fields = []
    for field in spec.fields:
        try:
            source = schema.find_type(field.source_id)
        except ValueError as error:
            raise InvalidPartitioning(
                "the schema has not all columns of the partition spec", on="manifest", remedy="Give one that has them"
            ) from error
        fields.append(NestedField(field.field_id, field.name, field.transform.result_type(source), required=False))
    return StructType(*fields)


class _ManifestWriter:
    """Writes the entries of a manifest, and keeps what a manifest list has to say of it."""

    def __init__(
        self,
        blocks: _Blocks,
        location: str,
        spec_id: int,
        partition_type: StructType,
        snapshot_id: int,
        content: int,
    ) -> None:
        self._blocks = blocks
        self.described = blocks.described
        self._location = location
        self._spec_id = spec_id
        self._snapshot_id = snapshot_id
        self._content = ManifestContent(content)
        self._files = dict.fromkeys(ManifestEntryStatus, 0)
        self._rows = dict.fromkeys(ManifestEntryStatus, 0)
        self._least_sequence: int | None = None
        self._summaries = [_Summary(field.field_type) for field in partition_type.fields]

    def write(
        self,
        status: ManifestEntryStatus,
        snapshot_id: int | None,
        sequence_number: int | None,
        file_sequence_number: int | None,
        file: DataFile,
        encoded: bytes | None = None,
    ) -> None:
        """Write an entry; its data file may have been encoded before."""
        entry = ManifestEntry(status, snapshot_id, sequence_number, file_sequence_number, file)
        if encoded is None:
            self._blocks.add(entry)
        else:
            self._blocks.add_encoded(_head(entry) + encoded)
        self._files[status] += 1
        self._rows[status] += file.record_count
        for position, summary in enumerate(self._summaries):
            summary.update(file.partition[position])
        if status != _DELETED and sequence_number is not None:
            least = self._least_sequence
            self._least_sequence = sequence_number if least is None else min(least, sequence_number)

    def carry(self, entry: ManifestEntry, encoded: bytes | None) -> None:
        """Write an entry of another manifest that has not changed; one that was deleted before is dropped."""
        status = entry.status
        if entry.snapshot_id != self._snapshot_id:
            if status == _DELETED:
                return
            status = _EXISTING
        numbers = (entry.snapshot_id, entry.sequence_number, entry.file_sequence_number)
        self.write(status, *numbers, entry.data_file, encoded)

    def manifest_file(self) -> ManifestFile:
        """The manifest, when it is complete; its sequence number is not known before it is listed."""
        summaries = [summary.for_all() for summary in self._summaries]
        return ManifestFile.from_args(
            manifest_path=self._location,
            manifest_length=self._blocks.size,
            partition_spec_id=self._spec_id,
            content=self._content,
            sequence_number=UNASSIGNED_SEQ,
            min_sequence_number=UNASSIGNED_SEQ if self._least_sequence is None else self._least_sequence,
            added_snapshot_id=self._snapshot_id,
            added_files_count=self._files[_ADDED],
            existing_files_count=self._files[_EXISTING],
            deleted_files_count=self._files[_DELETED],
            added_rows_count=self._rows[_ADDED],
            existing_rows_count=self._rows[_EXISTING],
            deleted_rows_count=self._rows[_DELETED],
            # Without any summaries, nothing is passed over.
            partitions=None if None in summaries else summaries,
            key_metadata=None,
        )


class _Summary(PartitionFieldStats):
    """What a manifest list says of one partition field."""

    def __init__(self, kind: Any) -> None:
        assert isinstance(kind, PrimitiveType)
        super().__init__(kind)
        self._kind = str(kind)

    def for_all(self) -> PartitionFieldSummary | None:
        """The summary; none if there is none that is right for every engine."""
        summary = self.to_summary()
        if summary.contains_nan:  # For some engines NaN is the largest number.
            return None
        if summary.lower_bound is None:
            return summary
        # Unlike in a file, here a missing bound says that there are no values.
        lower, upper = _for_all(self._kind, summary.lower_bound, summary.upper_bound)
        if lower is None or upper is None:
            return None
        return PartitionFieldSummary(summary.contains_null, False, lower, upper)


# --- Avro ----------------------------------------------------------------------


class _AvroInput:
    """An Avro file that is read a block at a time.

    PyIceberg's own takes a file that ends too early for a whole one, or reads on behind its end.
    """

    def __init__(self, io: FileIO, location: str) -> None:
        self._location = location
        with io.new_input(location).open() as stream:
            self._data = stream.read()
        # The fast decoder does not see where the data ends.
        self._decoder = StreamingBinaryDecoder(self._data)
        if self._data[: len(MAGIC)] != MAGIC:
            raise ObjectTruncated("it is not an Avro file", on=location)
        with self._whole():
            self._header: AvroFileHeader = construct_reader(META_SCHEMA, {-1: AvroFileHeader}).read(self._decoder)
        if _AVRO_SCHEMA not in self._header.meta:
            raise ValueError("it does not say what its records are")
        self.described = self._header.meta[_AVRO_SCHEMA]
        self.schema = _schema_in(self.described)

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """The blocks, each with the number of records in it."""
        while self._decoder.tell() < len(self._data):
            with self._whole():
                count, block = self._decoder.read_int(), self._decoder.read_bytes()
                sync = self._decoder.read(SYNC_SIZE)
            if sync != self._header.sync:
                raise ObjectTruncated("its blocks do not fit together", on=self._location)
            yield count, self._decompressed(block)

    def _decompressed(self, block: bytes) -> bytes:
        codec = self._header.compression_codec()
        if codec is None:
            return block
        if codec is not DeflateCodec:
            return codec.decompress(block)
        # Bounded: a small block can claim to be a very large one.
        unpacker = zlib.decompressobj(wbits=-15)
        data = unpacker.decompress(block, _MOST_BLOCK)
        if unpacker.unconsumed_tail:
            raise ObjectTruncated("a block is too large", on=self._location)
        return data

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except EOFError as error:
            raise ObjectTruncated("it ends too early", on=self._location) from error


@contextmanager
def _avro_file(output: OutputFile, schema: Schema, name: str, metadata: Mapping[str, str]) -> Iterator[_Blocks]:
    """A file to write records into; it appears when the block ends, and not if the block raises."""
    with output.create() as stream:
        blocks = _Blocks(stream, schema, name, metadata)
        yield blocks
        blocks.flush()


class _Blocks:
    """Records of an Avro file, written in compressed blocks of many."""

    def __init__(self, stream: OutputStream, schema: Schema, name: str, metadata: Mapping[str, str]) -> None:
        self._stream = stream
        self._writer = visit(schema, _WRITERS)
        self._sync = os.urandom(SYNC_SIZE)
        self._block = _Encoder()
        self._records = 0
        self.size = 0
        described = AvroSchemaConversion().iceberg_to_avro(schema, schema_name=name)
        _name_apart(described, set())
        self.described = json.dumps(described)
        header = AvroFileHeader(
            MAGIC, {**metadata, _AVRO_SCHEMA: self.described, AVRO_CODEC_KEY: "deflate"}, self._sync
        )
        encoder = _Encoder()
        construct_writer(META_SCHEMA).write(encoder, header)
        self._put(encoder.data)

    def add(self, record: Record) -> None:
        """Write a record."""
        self._writer.write(self._block, record)
        self._count()

    def encode(self, record: Record) -> bytes:
        """A record as `add_encoded` takes it."""
        encoder = _Encoder()
        self._writer.write(encoder, record)
        return bytes(encoder.data)

    def add_encoded(self, record: bytes) -> None:
        """Write a record that is encoded."""
        self._block.write(record)
        self._count()

    def _count(self) -> None:
        self._records += 1
        if self._records >= _BLOCK_ENTRIES or len(self._block.data) >= _BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the records of the block that is open."""
        if not self._records:
            return
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = packer.compress(self._block.data) + packer.flush()
        encoder = _Encoder()
        encoder.write_int(self._records)
        encoder.write_bytes(packed)
        encoder.write(self._sync)
        self._put(encoder.data)
        self._block = _Encoder()
        self._records = 0

    def _put(self, data: bytearray) -> None:
        self._stream.write(bytes(data))
        self.size += len(data)


def _name_apart(described: Any, names: set[str]) -> None:
    """Give each type of bytes in an Avro schema a name of its own; to define one twice is an error."""
    for part in described.values() if isinstance(described, dict) else described:
        if isinstance(part, (dict, list)):
            _name_apart(part, names)
    if isinstance(described, dict) and described.get("type") == "fixed":
        if described["name"] in names:
            described["name"] += f"_{len(names)}"
        names.add(described["name"])


@lru_cache(maxsize=1 << 16)
def _varint(number: int) -> bytes:
    rest = (number << 1) ^ (number >> 63)
    data = bytearray()
    while rest > 0x7F:
        data.append(rest & 0x7F | 0x80)
        rest >>= 7
    data.append(rest)
    return bytes(data)


def _head(entry: ManifestEntry) -> bytes:
    """An entry without its data file."""
    numbers = (entry.snapshot_id, entry.sequence_number, entry.file_sequence_number)
    return _varint(int(entry.status)) + b"".join(
        _varint(0) if number is None else _varint(1) + _varint(number) for number in numbers
    )


class _Encoder(BinaryEncoder):
    """Encodes into memory. Most numbers are there again and again."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, b: bytes) -> None:
        self.data += b

    def write_int(self, integer: int) -> None:
        self.data += _varint(integer)


class _MapWriter(MapWriter):
    """Writes maps to numbers or bytes, of which an entry has six, without a call for each value."""

    def write(self, encoder: BinaryEncoder, val: Mapping[int, Any]) -> None:
        parts = [_varint(len(val))] if val else []
        if isinstance(self.value_writer, IntegerWriter):
            for key, number in val.items():
                parts += (_varint(key), _varint(number))
        else:
            for key, data in val.items():
                parts += (_varint(key), _varint(len(data)), data)
        parts.append(_varint(0))
        encoder.write(b"".join(parts))


class _Writers(ConstructWriter):
    def map(self, _map_type: MapType, key_result: Writer, value_result: Writer) -> Writer:
        is_known = isinstance(key_result, IntegerWriter) and isinstance(value_result, (IntegerWriter, BinaryWriter))
        return (_MapWriter if is_known else MapWriter)(key_result, value_result)


_WRITERS = _Writers()
