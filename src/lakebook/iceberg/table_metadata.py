"""Metadata files of tables: reading, writing, and bringing one up to date with the registry.

A metadata file is written once and found by its path alone, so what was read can be kept.
"""

from __future__ import annotations

import gzip
import threading
import uuid
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cachetools import LRUCache
from pydantic import ValidationError
from pyiceberg.exceptions import ValidationError as IcebergError
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata as AnyMetadata
from pyiceberg.table.metadata import TableMetadataUtil, TableMetadataV2
from pyiceberg.table.name_mapping import MappedField, NameMapping, create_mapping_from_schema, parse_mapping_from_json
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRef
from pyiceberg.table.snapshots import MetadataLogEntry, Snapshot, SnapshotLogEntry
from pyiceberg.table.sorting import SortOrder

from lakebook.errors import InvalidMetadata, NotPublishable
from lakebook.iceberg.partitioning import order_from_json, spec_from_json
from lakebook.iceberg.schemas import stored_schema
from lakebook.registry.tables import TableMetadata
from lakebook.storage.objects import ObjectStore

NAME_MAPPING = "schema.name-mapping.default"
GC_ENABLED = "gc.enabled"
CODEC = "write.parquet.compression-codec"
#: Metadata files above this size are compressed.
COMPRESSED_FROM = 256 * 1024
#: A metadata file above this is refused: nobody made it in good faith.
MOST_BYTES = 512 * 1024 * 1024

_FIRST_PARTITION_ID = 999
_KEPT = 32


class MetadataFiles:
    """Reads and writes metadata files of a warehouse, and keeps the last ones that were read."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._read: LRUCache[str, TableMetadataV2] = LRUCache(_KEPT)
        self._lock = threading.Lock()

    def read(self, path: str) -> TableMetadataV2:
        """A metadata file by its path in the warehouse."""
        with self._lock:
            found = self._read.get(path)
        if found is None:
            found = parse_metadata(self._store.read(path), path)
            self._keep(path, found)
        return found

    def write(self, folder: str, number: int, version: int, metadata: TableMetadataV2) -> tuple[str, int]:
        """Write a metadata file; its path and size."""
        data = metadata.model_dump_json().encode()
        suffix = "metadata.json"
        if len(data) >= COMPRESSED_FROM:
            # Without a time in it: the same metadata is the same file.
            data, suffix = gzip.compress(data, 6, mtime=0), "gz.metadata.json"
        # The name tells the version: snapshots of outside engines and changes of the schema alone do not.
        path = f"{folder}/{number:05d}-{uuid.uuid4()}-v{version}.{suffix}"
        self._store.put_new(path, data)
        self._keep(path, metadata)
        return path, len(data)

    def _keep(self, path: str, metadata: TableMetadataV2) -> None:
        with self._lock:
            self._read[path] = metadata


def parse_metadata(data: bytes, on: str) -> TableMetadataV2:
    """The metadata that a file holds; format version 1 is read as 2."""
    try:
        if data[:2] == b"\x1f\x8b":
            data = _decompressed(data)
        parsed: AnyMetadata = TableMetadataUtil.parse_raw(data.decode())
        if parsed.format_version == 1:
            parsed = parsed.to_v2()
    except (ValidationError, IcebergError, ValueError, TypeError, KeyError, EOFError, OSError, zlib.error) as error:
        raise InvalidMetadata(
            f"it is not the metadata of an Iceberg table ({type(error).__name__})",
            on=on,
            remedy="Name a metadata.json file of format version 2",
        ) from None
    if not isinstance(parsed, TableMetadataV2):
        raise InvalidMetadata(
            f"it has format version {parsed.format_version}", on=on, remedy="Lakebook takes format version 2 and 1"
        )
    return parsed


def _decompressed(data: bytes) -> bytes:
    # Bounded: a small file can claim to be a very large one.
    unpacker = zlib.decompressobj(wbits=31)
    out = unpacker.decompress(data, MOST_BYTES)
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError("too large, or cut short")
    return out


# --- from the registry ---------------------------------------------------------


def shapes_of(
    states: Sequence[TableMetadata],
) -> tuple[dict[int, Schema], dict[int, PartitionSpec], dict[int, SortOrder]]:
    """Every schema, partition spec and sort order that a table has had, by Iceberg's ids."""
    schemas: dict[int, Schema] = {}
    specs: dict[int, PartitionSpec] = {}
    orders: dict[int, SortOrder] = {}
    for state in states:
        schema = stored_schema(state.schema)
        spec = spec_from_json(dict(state.partition_by))
        order = order_from_json(dict(state.sort_by))
        schemas[schema.schema_id] = schema
        specs[spec.spec_id] = spec
        orders[order.order_id] = order
    # Engines go back to no order by this one.
    orders.setdefault(0, SortOrder(order_id=0))
    return schemas, specs, orders


def schema_for(spec: PartitionSpec, states: Sequence[Schema]) -> Schema:
    """The newest schema that still has every column of a spec; a dropped one is in an older schema."""
    wanted = {field.source_id for field in spec.fields}
    for schema in reversed(states):
        if wanted <= schema.field_ids:
            return schema
    return states[-1]


def published_properties(state: TableMetadata, mapping: str | None) -> dict[str, str]:
    """The properties that other engines see."""
    found = {GC_ENABLED: "false", CODEC: _CODECS.get(state.compression, state.compression)}
    if mapping is not None:
        found[NAME_MAPPING] = mapping
    return found | dict(state.properties)


_CODECS = {"none": "uncompressed"}


def new_metadata(
    table_uuid: str, location: str, states: Sequence[TableMetadata], last_field_id: int
) -> TableMetadataV2:
    """The metadata of a table that has none yet, at its present schema."""
    schemas, specs, orders = shapes_of(states)
    current = states[-1]
    return TableMetadataV2.model_validate(
        {
            "location": location,
            "table-uuid": table_uuid,
            "last-updated-ms": round(current.updated_at.timestamp() * 1000),
            "last-column-id": last_field_id,
            "schemas": list(schemas.values()),
            "current-schema-id": current.schema.get("schema-id", 0),
            "partition-specs": list(specs.values()),
            "default-spec-id": current.partition_by.get("spec-id", 0),
            "last-partition-id": _last_partition_id(specs.values()),
            "sort-orders": list(orders.values()),
            "default-sort-order-id": current.sort_by.get("order-id", 0),
            "properties": {},
        }
    )


def _last_partition_id(specs: Iterable[PartitionSpec]) -> int:
    return max((field.field_id for spec in specs for field in spec.fields), default=_FIRST_PARTITION_ID)


def with_shapes(metadata: TableMetadataV2, states: Sequence[TableMetadata], last_field_id: int) -> TableMetadataV2:
    """The same metadata with every schema, spec and order the registry has, at the present ones."""
    schemas, specs, orders = shapes_of(states)
    current = states[-1]
    known = {schema.schema_id: schema for schema in metadata.schemas}
    for ident, schema in schemas.items():
        if ident in known and known[ident].as_struct() != schema.as_struct():
            raise NotPublishable(
                f"an outside engine has given the id {ident} to another schema",
                on=f"table {metadata.table_uuid}",
                remedy="Change the schema once more",
            )
    known_specs = {spec.spec_id for spec in metadata.partition_specs}
    known_orders = {order.order_id for order in metadata.sort_orders}
    return metadata.model_copy(
        update={
            "schemas": [*metadata.schemas, *(schema for ident, schema in schemas.items() if ident not in known)],
            "current_schema_id": current.schema.get("schema-id", 0),
            "last_column_id": max(metadata.last_column_id, last_field_id),
            "partition_specs": [
                *metadata.partition_specs,
                *(spec for ident, spec in specs.items() if ident not in known_specs),
            ],
            "default_spec_id": current.partition_by.get("spec-id", 0),
            "last_partition_id": max(metadata.last_partition_id or 0, _last_partition_id(specs.values())),
            "sort_orders": [
                *metadata.sort_orders,
                *(order for ident, order in orders.items() if ident not in known_orders),
            ],
            "default_sort_order_id": current.sort_by.get("order-id", 0),
        }
    )


# --- snapshots -----------------------------------------------------------------


def with_snapshot(metadata: TableMetadataV2, snapshot: Snapshot) -> TableMetadataV2:
    """The metadata after a snapshot of the branch `main`."""
    main = metadata.refs.get(MAIN_BRANCH)
    kept = main.model_dump(by_alias=True, exclude_none=True) if main is not None else {}
    ref = SnapshotRef.model_validate({**kept, "snapshot-id": snapshot.snapshot_id, "type": "branch"})
    return metadata.model_copy(
        update={
            "last_sequence_number": snapshot.sequence_number,
            "snapshots": [*metadata.snapshots, snapshot],
            "current_snapshot_id": snapshot.snapshot_id,
            "refs": {**metadata.refs, MAIN_BRANCH: ref},
            "snapshot_log": [
                *metadata.snapshot_log,
                SnapshotLogEntry.model_validate(
                    {"snapshot-id": snapshot.snapshot_id, "timestamp-ms": snapshot.timestamp_ms}
                ),
            ],
            "last_updated_ms": max(metadata.last_updated_ms, snapshot.timestamp_ms),
        }
    )


def without_snapshots(metadata: TableMetadataV2, ids: Collection[int]) -> TableMetadataV2:
    """The metadata without some snapshots. The log begins after the last of them."""
    gone = set(ids)
    if not gone:
        return metadata
    log: list[SnapshotLogEntry] = []
    for entry in metadata.snapshot_log:
        if entry.snapshot_id in gone:
            log.clear()
        else:
            log.append(entry)
    return metadata.model_copy(
        update={
            "snapshots": [snapshot for snapshot in metadata.snapshots if snapshot.snapshot_id not in gone],
            "snapshot_log": log,
            "statistics": [item for item in metadata.statistics if item.snapshot_id not in gone],
            "partition_statistics": [item for item in metadata.partition_statistics if item.snapshot_id not in gone],
        }
    )


def with_log(
    metadata: TableMetadataV2, former: str | None, former_at: int, kept: int
) -> tuple[TableMetadataV2, list[str]]:
    """The metadata with its predecessor in the log, and the files that the log no longer names."""
    log = list(metadata.metadata_log)
    if former is not None:
        log.append(MetadataLogEntry.model_validate({"metadata-file": former, "timestamp-ms": former_at}))
    cut, rest = log[:-kept], log[-kept:]
    return metadata.model_copy(update={"metadata_log": rest}), [entry.metadata_file for entry in cut]


# --- names ---------------------------------------------------------------------


def extended_mapping(present: str | None, schemas: Iterable[Schema], on: str) -> str | None:
    """A name mapping that also serves files without field ids which were written with these schemas.

    A name that has meant two columns cannot be told apart by any other engine.
    """
    fields = list(parse_mapping_from_json(present).root) if present else []
    for schema in schemas:
        fields = _united(fields, create_mapping_from_schema(schema).root, on)
    return NameMapping(fields).model_dump_json() if fields else None


def _united(ours: Sequence[MappedField], theirs: Sequence[MappedField], on: str) -> list[MappedField]:
    by_id: dict[int | None, MappedField] = {field.field_id: field for field in ours}
    for field in theirs:
        known = by_id.get(field.field_id)
        if known is None:
            by_id[field.field_id] = field
        else:
            names = list(dict.fromkeys([*known.names, *field.names]))
            children = _united(known.fields, field.fields, on)
            by_id[field.field_id] = MappedField.model_validate(
                {"field-id": field.field_id, "names": names, "fields": children}
            )
    owner: dict[str, int | None] = {}
    for ident, field in by_id.items():
        for name in field.names:
            if owner.setdefault(name, ident) != ident:
                raise NotPublishable(
                    f"files without field ids know two columns as {name!r}, which Iceberg cannot tell apart",
                    on=on,
                    remedy="Rewrite those files: overwrite or replace them",
                )
    return list(by_id.values())


# --- summaries -----------------------------------------------------------------

_TOTALS = {
    "total-data-files": ("added-data-files", "deleted-data-files"),
    "total-delete-files": ("added-delete-files", "removed-delete-files"),
    "total-records": ("added-records", "deleted-records"),
    "total-files-size": ("added-files-size", "removed-files-size"),
    "total-position-deletes": ("added-position-deletes", "removed-position-deletes"),
    "total-equality-deletes": ("added-equality-deletes", "removed-equality-deletes"),
}


def with_totals(
    changed: Mapping[str, str], former: Mapping[str, Any] | None, *, replaced: bool = False
) -> dict[str, str]:
    """A summary with totals, added up from those of the snapshot before.

    A total that the snapshot before did not have is not known here either.
    """
    found = dict(changed)
    for total, (plus, minus) in _TOTALS.items():
        base = 0 if former is None or replaced else _number(former.get(total))
        gained, lost = _number(changed.get(plus, "0")), _number(changed.get(minus, "0"))
        found.pop(total, None)
        if base is not None and gained is not None and lost is not None and base + gained - lost >= 0:
            found[total] = str(base + gained - lost)
    return found


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None
