"""Staged tables: the Iceberg metadata through which Spark writes an insert and reads a plan.

A staged table is a folder of its own with one metadata file. Nobody else knows it; it goes
when the insert or the read is over. It carries the table's exact schema, so that every
field has its id at every depth.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import (
    PARTITION_FIELD_ID_START,
    UNPARTITIONED_PARTITION_SPEC,
    PartitionField,
    PartitionSpec,
)
from pyiceberg.schema import Schema
from pyiceberg.serializers import FromInputFile
from pyiceberg.table.metadata import TableMetadata, TableMetadataV2
from pyiceberg.table.name_mapping import create_mapping_from_schema
from pyiceberg.table.refs import SnapshotRef
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.sorting import SortOrder
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import IntegerType, NestedField

from lakebook.iceberg.file_io import WarehouseIO
from lakebook.iceberg.manifests import DATA as ROWS
from lakebook.iceberg.manifests import (
    DELETES,
    ListedFile,
    live_entries,
    read_manifest_list,
    write_manifest_list,
    write_manifests,
)
from lakebook.iceberg.schemas import last_field_id, schema_to_json, walk
from lakebook.storage.objects import ObjectStore

_HINT = "metadata/version-hint.text"
_FIRST = "metadata/v1.metadata.json"
_SECOND = "metadata/v2.metadata.json"
# Above those that any schema has come to, and below those that Iceberg keeps for itself.
_SCOPE_ID = 2_000_000_000

#: Where the data of a staged table lies in its folder.
DATA = "d"


@dataclass(frozen=True, slots=True)
class ReadDeletes:
    """A file of position deletes.

    It is applied to files of its scope whose sequence number is not above its own or, if it is about
    one file alone, to that one.
    """

    location: str
    size: int
    rows: int
    sequence_number: int
    scope: int = 0
    #: The location of the only file it is about, if it is one.
    referenced: str | None = None


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file that Spark shall read, without the rows that are deleted."""

    location: str
    size: int
    rows: int
    #: That of the snapshot, unless it is given.
    sequence_number: int | None = None
    #: Files of deletes apply to files of the same scope.
    scope: int = 0
    deletes: tuple[ReadDeletes, ...] = ()


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
    for manifest in read_manifest_list(io, snapshot.manifest_list):
        for entry in live_entries(io, manifest):
            yield entry.data_file


def stage_read(
    store: ObjectStore,
    folder: str,
    schema: Schema,
    names: Schema | None,
    files: Iterable[ReadFile],
    now_ms: int,
    *,
    sequence_number: int = 1,
    scoped: bool = False,
) -> str:
    """Stage a table of exactly these files; the location Spark reads from.

    `names` is the schema whose names the files' columns have, where they carry no field ids. The
    sequence number is that of the snapshot: none of the files has a larger one. If it is scoped, the
    table has one column more, after the others, by which it is partitioned.
    """
    location = store.uri(folder)
    io = WarehouseIO(store, durable=False)
    snapshot_id = uuid.uuid4().int >> 65
    spec = UNPARTITIONED_PARTITION_SPEC
    if scoped:
        schema, spec = _with_scope(schema)
    places = (store.uri(f"{folder}/metadata/m{number}.avro") for number in count())
    deletes: dict[str, ReadDeletes] = {}
    manifests = [
        *write_manifests(io, places, spec, schema, snapshot_id, _listed(files, deletes, scoped)),
        *write_manifests(io, places, spec, schema, snapshot_id, _listed_deletes(deletes, scoped)),
    ]
    list_location = store.uri(f"{folder}/metadata/snap.avro")
    write_manifest_list(io, list_location, snapshot_id, None, sequence_number, manifests)
    properties = {}
    if names is not None:
        properties["schema.name-mapping.default"] = create_mapping_from_schema(names).model_dump_json()
    metadata = _metadata(location, schema, spec, SortOrder(order_id=0), properties, now_ms)
    snapshot = Snapshot.model_validate(
        {
            "snapshot-id": snapshot_id,
            "parent-snapshot-id": None,
            "sequence-number": sequence_number,
            "timestamp-ms": now_ms,
            "manifest-list": list_location,
            "summary": {"operation": "append"},
            "schema-id": schema.schema_id,
        }
    )
    metadata = metadata.model_copy(
        update={
            "last_sequence_number": sequence_number,
            "snapshots": [snapshot],
            "current_snapshot_id": snapshot_id,
            "refs": {"main": SnapshotRef.model_validate({"snapshot-id": snapshot_id, "type": "branch"})},
        }
    )
    _write_metadata(store, folder, metadata)
    return location


def _with_scope(schema: Schema) -> tuple[Schema, PartitionSpec]:
    """A schema with a column for the scope of each file, which is in no file, and the spec that partitions by it."""
    name, taken = "scope", {field.name.lower() for field in schema.fields}
    while name in taken:
        name = f"_{name}"
    column = NestedField(_SCOPE_ID, name, IntegerType(), required=False)
    spec = PartitionSpec(PartitionField(_SCOPE_ID, PARTITION_FIELD_ID_START, IdentityTransform(), name), spec_id=0)
    return Schema(*schema.fields, column, schema_id=schema.schema_id), spec


def _listed(files: Iterable[ReadFile], deletes: dict[str, ReadDeletes], scoped: bool) -> Iterator[ListedFile]:
    """The files as a manifest has them; their deletes are noted, each once."""
    for file in files:
        for delete in file.deletes:
            deletes[delete.location] = delete
        partition, number = Record(file.scope) if scoped else Record(), file.sequence_number
        yield ListedFile(file.location, file.size, file.rows, ROWS, 0, partition, sequence_number=number)


def _listed_deletes(deletes: Mapping[str, ReadDeletes], scoped: bool) -> Iterator[ListedFile]:
    for file in deletes.values():
        yield ListedFile(
            file.location,
            file.size,
            file.rows,
            DELETES,
            0,
            Record(file.scope) if scoped else Record(),
            sequence_number=file.sequence_number,
            referenced=file.referenced,
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
