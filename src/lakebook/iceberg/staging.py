"""Staged tables: the Iceberg metadata through which Spark writes an insert and reads a plan.

A staged table is a folder of its own with one metadata file. Nobody else knows it; it goes
when the insert or the read is over. It carries the table's exact schema, so that every
field has its id at every depth.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal

from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.serializers import FromInputFile
from pyiceberg.table.metadata import TableMetadata, TableMetadataV2
from pyiceberg.table.name_mapping import create_mapping_from_schema
from pyiceberg.table.refs import SnapshotRef
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.sorting import SortOrder
from pyiceberg.typedef import Record

from lakebook.iceberg.file_io import WarehouseIO
from lakebook.iceberg.schemas import last_field_id, schema_to_json, walk
from lakebook.storage.objects import ObjectStore

_HINT = "metadata/version-hint.text"
_FIRST = "metadata/v1.metadata.json"
_SECOND = "metadata/v2.metadata.json"
_SEQUENCE = 1
_FILES_PER_MANIFEST = 10_000
_CODEC: Literal["null"] = "null"

#: Where the data of a staged table lies in its folder.
DATA = "d"


@dataclass(frozen=True)
class ReadFile:
    """A file that Spark shall read."""

    path: str
    size: int
    rows: int


def stage_insert(
    store: ObjectStore,
    folder: str,
    schema: Schema,
    spec: PartitionSpec,
    order: SortOrder,
    properties: Mapping[str, str],
    now_ms: int,
) -> str:
    """Stage an empty table for an insert; the location Spark writes to."""
    location = store.uri(folder)
    staged = {
        **properties,
        "write.data.path": store.uri(f"{folder}/{DATA}"),
        # Bounds as they are: by default strings are cut, and only some columns have any.
        "write.metadata.metrics.default": "full",
    }
    if not spec.is_unpartitioned():
        # Without it a path would be made of partition values, which may be longer than a name can be.
        staged |= {"write.object-storage.enabled": "true", "write.object-storage.partitioned-paths": "false"}
    _write_metadata(store, folder, _metadata(location, schema, spec, order, staged, now_ms))
    return location


def staged_files(store: ObjectStore, folder: str) -> Iterator[DataFile]:
    """The files that committed tasks wrote into a staged table."""
    path = f"{folder}/{_SECOND}"
    if store.size(path) is None:
        return
    io = WarehouseIO(store)
    metadata: TableMetadata = FromInputFile.table_metadata(io.new_input(store.uri(path)))
    snapshot = metadata.current_snapshot()
    if snapshot is None:
        return
    for manifest in snapshot.manifests(io):
        for entry in manifest.fetch_manifest_entry(io, discard_deleted=True):
            yield entry.data_file


def stage_read(
    store: ObjectStore, folder: str, schema: Schema, names: Schema | None, files: Iterator[ReadFile], now_ms: int
) -> str:
    """Stage a table of exactly these files; the location Spark reads from.

    `names` is the schema whose names the files' columns have, where they carry no field ids.
    """
    location = store.uri(folder)
    io = WarehouseIO(store, durable=False)
    snapshot_id = uuid.uuid4().int >> 65
    manifests = list(_write_manifests(store, io, folder, schema, files, snapshot_id))
    list_location = store.uri(f"{folder}/metadata/snap.avro")
    with write_manifest_list(2, io.new_output(list_location), snapshot_id, None, _SEQUENCE, _CODEC) as writer:
        writer.add_manifests(manifests)
    properties = {}
    if names is not None:
        properties["schema.name-mapping.default"] = create_mapping_from_schema(names).model_dump_json()
    metadata = _metadata(location, schema, UNPARTITIONED_PARTITION_SPEC, SortOrder(order_id=0), properties, now_ms)
    snapshot = Snapshot.model_validate(
        {
            "snapshot-id": snapshot_id,
            "parent-snapshot-id": None,
            "sequence-number": _SEQUENCE,
            "timestamp-ms": now_ms,
            "manifest-list": list_location,
            "summary": {"operation": "append"},
            "schema-id": schema.schema_id,
        }
    )
    metadata = metadata.model_copy(
        update={
            "last_sequence_number": _SEQUENCE,
            "snapshots": [snapshot],
            "current_snapshot_id": snapshot_id,
            "refs": {"main": SnapshotRef.model_validate({"snapshot-id": snapshot_id, "type": "branch"})},
        }
    )
    _write_metadata(store, folder, metadata)
    return location


def _write_manifests(
    store: ObjectStore, io: WarehouseIO, folder: str, schema: Schema, files: Iterator[ReadFile], snapshot_id: int
) -> Iterator[ManifestFile]:
    # None for an empty plan: a manifest without entries cannot be written.
    for number in count():
        some = list(islice(files, _FILES_PER_MANIFEST))
        if not some:
            return
        output = io.new_output(store.uri(f"{folder}/metadata/m{number}.avro"))
        with write_manifest(2, UNPARTITIONED_PARTITION_SPEC, schema, output, snapshot_id, _CODEC) as writer:
            for file in some:
                writer.add_entry(_entry(store, file, snapshot_id))
        yield writer.to_manifest_file()


def _entry(store: ObjectStore, file: ReadFile, snapshot_id: int) -> ManifestEntry:
    data_file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=store.uri(file.path),
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=file.rows,
        file_size_in_bytes=file.size,
    )
    data_file.spec_id = 0
    return ManifestEntry.from_args(
        status=ManifestEntryStatus.ADDED, snapshot_id=snapshot_id, sequence_number=None, data_file=data_file
    )


def _metadata(
    location: str,
    schema: Schema,
    spec: PartitionSpec,
    order: SortOrder,
    properties: Mapping[str, str],
    now_ms: int,
) -> TableMetadataV2:
    return TableMetadataV2.model_validate(
        {
            "location": location,
            "table-uuid": uuid.uuid4(),
            "last-updated-ms": now_ms,
            "last-column-id": last_field_id(schema),
            "schemas": [schema],
            "current-schema-id": schema.schema_id,
            "partition-specs": [spec],
            "default-spec-id": spec.spec_id,
            "last-partition-id": max((field.field_id for field in spec.fields), default=999),
            "sort-orders": [order],
            "default-sort-order-id": order.order_id,
            "properties": dict(properties),
        }
    )


def _write_metadata(store: ObjectStore, folder: str, metadata: TableMetadataV2) -> None:
    store.put_new(f"{folder}/{_FIRST}", metadata.model_dump_json().encode(), durable=False)
    store.put_new(f"{folder}/{_HINT}", b"1", durable=False)


def spark_type(schema: Schema) -> dict[str, object]:
    """The schema as Spark describes it in JSON, every column nullable; a writer checks what is required."""
    return spark_type_named(schema, schema)


def spark_type_named(schema: Schema, names: Schema) -> dict[str, object]:
    """The same types in the same order, with the names that the fields have in another schema.

    A field that is not in it gets a name that no file has, so that it reads as null.
    """
    found = {field.field_id: field.name for _, field, _ in walk(names.fields)}
    return _spark_struct(schema_to_json(schema)["fields"], found)


def _spark_struct(fields: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> dict[str, object]:
    return {
        "type": "struct",
        "fields": [
            {
                "name": names.get(field["id"], f"\x00{field['id']}"),
                "type": _spark_type(field["type"], names),
                "nullable": True,
                "metadata": {},
            }
            for field in fields
        ],
    }


_SPARK_NAMES = {"int": "integer", "timestamptz": "timestamp", "timestamp": "timestamp_ntz", "uuid": "string"}


def _spark_type(kind: Any, names: Mapping[int, str]) -> object:
    if isinstance(kind, str):
        if kind.startswith("fixed"):
            return "binary"
        return kind.replace(" ", "") if kind.startswith("decimal") else _SPARK_NAMES.get(kind, kind)
    if kind["type"] == "struct":
        return _spark_struct(kind["fields"], names)
    if kind["type"] == "list":
        return {"type": "array", "elementType": _spark_type(kind["element"], names), "containsNull": True}
    return {
        "type": "map",
        "keyType": _spark_type(kind["key"], names),
        "valueType": _spark_type(kind["value"], names),
        "valueContainsNull": True,
    }
