"""The rows of captured tables, as events carry them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row of `tables`."""

    id: int
    object_id: int
    namespace_id: int
    name: str
    table_uuid: str
    format: str
    version: int
    schema_version: int
    last_field_id: int
    last_file_id: int
    row_count: int
    deleted_rows: int
    file_count: int
    total_size: int
    last_modified: int
    created_at: int
    updated_at: int
    deleted_at: int | None = None
    hold_until: int = 0
    topic_id: int | None = None
    #: The view whose ranges are its files, if it is a view's.
    view_id: int | None = None

    @property
    def table_id(self) -> int:
        """The table it is about, under the name that the rows of all other tables have for it."""
        return self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMetadataRow:
    """A row of `table_metadata`."""

    id: int
    table_id: int
    schema_version: int
    from_version: int
    schema: Mapping[str, Any]
    storage_engine: str
    engine_config: Mapping[str, Any]
    format: str
    compression: str
    partition_by: Mapping[str, Any]
    sort_by: Mapping[str, Any]
    properties: Mapping[str, str]
    last_modified: int
    created_at: int
    updated_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFileRow:
    """A row of `table_files`."""

    table_id: int
    id: int
    file_name: str
    file_path: str
    file_size: int
    file_type: str
    partition_path: str
    partition_values: str
    spec_id: int
    row_count: int
    row_groups: int
    checksum: str
    is_compressed: bool
    schema_version: int
    has_field_ids: bool
    has_statistics: bool
    commit_id: str
    from_version: int
    to_version: int | None
    created_at: int
    modified_at: int
    retired_at: int | None
    content: int = 0
    location: str | None = None
    sequence_number: int | None = None
    referenced_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStatsRow:
    """A row of `table_stats`."""

    id: int
    table_id: int
    row_count: int
    deleted_rows: int
    file_count: int
    total_size: int
    last_modified: int
    created_at: int
    updated_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshotRow:
    """A row of `table_snapshots`."""

    table_id: int
    snapshot_id: int
    parent_snapshot_id: int | None
    sequence_number: int
    timestamp_ms: int
    manifest_list: str
    summary: Mapping[str, str]
    schema_id: int | None
    version: int | None
    pinned_version: int
    metadata_location: str
    is_ours: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRow:
    """A row of `topics`."""

    id: int
    object_id: int
    name: str
    partition_count: int
    retention_ms: int | None
    config: Mapping[str, Any]
    created_at: int
    updated_at: int
    deleted_at: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRow:
    """A row of `partitions`."""

    topic_id: int
    partition_id: int
    object_id: int
    log_start: int
    high_watermark: int
    created_at: int
    updated_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRow:
    """A row of `segments`."""

    id: str
    topic_id: int
    partition_id: int
    base_offset: int
    end_offset: int
    record_count: int
    size_bytes: int
    s3_bucket: str
    s3_key: str
    checksum: str | None
    min_timestamp: int
    max_timestamp: int
    newest_timestamp: int
    commit_id: str
    producer_id: str | None
    producer_epoch: int | None
    first_sequence: int | None
    last_sequence: int | None
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroupRow:
    """A row of `consumer_groups`."""

    id: int
    object_id: int
    group_id: str
    generation: int
    created_at: int
    updated_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOffsetRow:
    """A row of `consumer_offsets`."""

    consumer_group_id: int
    topic_id: int
    partition_id: int
    committed_offset: int
    metadata: str | None
    committed_at: int


#: The type of each captured table's rows.
ROWS: Mapping[str, type] = {
    "tables": TableRow,
    "table_metadata": TableMetadataRow,
    "table_files": TableFileRow,
    "table_stats": TableStatsRow,
    "table_snapshots": TableSnapshotRow,
    "topics": TopicRow,
    "partitions": PartitionRow,
    "segments": SegmentRow,
    "consumer_groups": ConsumerGroupRow,
    "consumer_offsets": ConsumerOffsetRow,
}
_NAMES = {table: frozenset(field.name for field in fields(kind)) for table, kind in ROWS.items()}


def row_reader(table: str) -> Callable[[Mapping[str, Any]], Any]:
    """What makes a typed row of the columns of a table; those it does not know are of a newer schema."""
    kind, names = ROWS[table], _NAMES[table]

    def read(values: Mapping[str, Any]) -> Any:
        if values.keys() <= names:
            return kind(**values)
        return kind(**{name: value for name, value in values.items() if name in names})

    return read
