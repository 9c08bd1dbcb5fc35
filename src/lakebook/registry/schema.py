"""The declared schema of the registry. Migrations, replayed from empty, give exactly this.

Times are milliseconds since 1970 (UTC). Every row that has a name also has an internal
id, and everything else refers to the id: a name can be dropped and taken again at once.
Nothing cascades.

States, beside the tables that hold them:

    commits.state           open → committed | aborted       (one way; the fence)
    temporary_files.state   waiting → deleting               (one way; then the row goes)
    topics.deleted_at       null → time                      (one way; then the row goes)
    tables.deleted_at       null → time                      (one way; then the row goes)
    table_files             visible → ended (to_version) → retired (retired_at, and a row in
                            temporary_files) → gone; a rollback gives an ended file a new row
    metadata_updates.state  pending → processing → completed | failed; failed → processing
    views.state             active ⇄ paused
    lakehouse_partitions    fresh → stale (stale_at) → replaced; frozen (frozen_at) is one way, and both may be
    pipelines.state         active ⇄ paused; active → stopped → active
    pipeline_batches.state  planned → landed                 (one way; a planned one may be run again and again)
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import UserDefinedType

MAX_BIGINT = 2**63 - 1
MAX_INTEGER = 2**31 - 1


class Xid8(UserDefinedType[int]):
    """PostgreSQL's 64-bit transaction id, which never wraps around."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "XID8"


def _json() -> sa.types.TypeEngine[Any]:
    return sa.JSON().with_variant(JSONB(), "postgresql")


def _id() -> sa.Column[int]:
    # SQLite counts ids up for ever only if the column is INTEGER PRIMARY KEY AUTOINCREMENT.
    return sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), sa.Identity(), primary_key=True)


def _name() -> sa.types.TypeEngine[str]:
    # Names sort by their bytes on both databases, whatever the server's locale is.
    return sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def _time(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


metadata = sa.MetaData(
    naming_convention={
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)

book = sa.Table(
    "book",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("book_id", sa.Text, nullable=False),
    sa.Column("epoch", sa.Text, nullable=False),
    sa.Column("warehouse", sa.Text, nullable=False),
    _time("created_at"),
    _time("epoch_since"),
    sa.Column("sweeps", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    # The cursor up to which events have been removed; none: all are there.
    sa.Column("events_horizon", sa.Text, nullable=True),
    # Of a restored book: when its backup was taken, and when it was restored.
    _time("backup_at", nullable=True),
    _time("restored_at", nullable=True),
    # Since when nothing is removed, until somebody says so.
    _time("held_at", nullable=True),
    # The same two times by the clock of the store, which dates the objects; none where it is not known.
    _time("store_backup_at", nullable=True),
    _time("store_restored_at", nullable=True),
    sa.CheckConstraint("id = 1", name="single"),
    comment="One row: who this book is, which life of it this is, where its bytes are.",
)

lake_objects = sa.Table(
    "lake_objects",
    metadata,
    _id(),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("last_sequence", sa.BigInteger, nullable=False),
    _time("last_commit_at"),
    sa.CheckConstraint("kind IN ('topic', 'partition', 'group', 'table')", name="kind"),
    sa.CheckConstraint("last_sequence >= 0", name="last_sequence"),
    sqlite_autoincrement=True,
    comment="The unit of order and of locking. The row is the lock; it hands out the events' sequence.",
)

commits = sa.Table(
    "commits",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("epoch", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    _time("opened_at"),
    _time("finished_at", nullable=True),
    sa.CheckConstraint("state IN ('open', 'committed', 'aborted')", name="state"),
    sa.CheckConstraint("(state = 'open') = (finished_at IS NULL)", name="finished"),
    sa.Index("idx_commits_finished_at", "kind", "finished_at"),
    sa.Index(
        "idx_commits_open",
        "opened_at",
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    ),
    comment="One row per write: the fence that settles a COMMIT whose outcome is unknown.",
)

events = sa.Table(
    "events",
    metadata,
    _id(),
    sa.Column("xid", Xid8().with_variant(sa.BigInteger(), "sqlite"), nullable=True),
    # No foreign key: a log of many rows, whose object's lock the transaction holds anyway.
    sa.Column("object_id", sa.BigInteger, nullable=False),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("table_name", sa.Text, nullable=False),
    sa.Column("operation", sa.Text, nullable=False),
    sa.Column("key", _json(), nullable=False),
    sa.Column("row_after", _json(), nullable=True),
    sa.Column("row_before", _json(), nullable=True),
    _time("occurred_at"),
    sa.UniqueConstraint("object_id", "sequence"),
    sa.CheckConstraint("operation IN ('insert', 'update', 'delete')", name="operation"),
    sa.CheckConstraint("sequence > 0", name="sequence"),
    # SQLite has no use for it and keeps it empty.
    sa.Index("idx_events_xid", "xid", sqlite_where=sa.text("xid IS NOT NULL")),
    sqlite_autoincrement=True,
    comment="Captured changes, one per changed row, in the order of commits per lake object.",
)

cursors = sa.Table(
    "cursors",
    metadata,
    sa.Column("subscriber", sa.Text, primary_key=True),
    sa.Column("position", sa.Text, nullable=False),
    _time("updated_at"),
    comment="How far each subscriber has read the events.",
)

topics = sa.Table(
    "topics",
    metadata,
    _id(),
    sa.Column("object_id", sa.BigInteger, sa.ForeignKey("lake_objects.id"), nullable=False),
    sa.Column("name", _name(), nullable=False),
    sa.Column("partition_count", sa.Integer, nullable=False),
    sa.Column("retention_ms", sa.BigInteger, nullable=True),
    sa.Column("config", _json(), nullable=False),
    _time("created_at"),
    _time("updated_at"),
    _time("deleted_at", nullable=True),
    sa.CheckConstraint("partition_count > 0", name="partition_count"),
    sa.CheckConstraint("retention_ms > 0", name="retention_ms"),
    sa.Index(
        "idx_topics_live_name",
        "name",
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    ),
    sa.Index("idx_topics_created_at", "created_at"),
    sqlite_autoincrement=True,
    comment="Streams. A name is unique among live topics; a deleted one keeps its row until it is emptied.",
)

partitions = sa.Table(
    "partitions",
    metadata,
    sa.Column("topic_id", sa.BigInteger, sa.ForeignKey("topics.id"), primary_key=True),
    sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("object_id", sa.BigInteger, sa.ForeignKey("lake_objects.id"), nullable=False),
    sa.Column("log_start", sa.BigInteger, nullable=False),
    sa.Column("high_watermark", sa.BigInteger, nullable=False),
    _time("created_at"),
    _time("updated_at"),
    sa.CheckConstraint("partition_id >= 0", name="partition_id"),
    sa.CheckConstraint("log_start >= 0 AND log_start <= high_watermark", name="log_start"),
    sa.Index("idx_partitions_topic", "topic_id"),
    comment="Ordered shards of a topic. high_watermark is the next offset to be written.",
)

segments = sa.Table(
    "segments",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("topic_id", sa.BigInteger, nullable=False),
    sa.Column("partition_id", sa.Integer, nullable=False),
    sa.Column("base_offset", sa.BigInteger, nullable=False),
    sa.Column("end_offset", sa.BigInteger, nullable=False),
    sa.Column("record_count", sa.Integer, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("s3_bucket", sa.Text, nullable=False),
    sa.Column("s3_key", sa.Text, nullable=False),
    sa.Column("checksum", sa.Text, nullable=True),
    _time("min_timestamp"),
    _time("max_timestamp"),
    _time("newest_timestamp"),
    sa.Column("commit_id", sa.Text, nullable=False),
    sa.Column("producer_id", sa.Text, nullable=True),
    sa.Column("producer_epoch", sa.Integer, nullable=True),
    sa.Column("first_sequence", sa.BigInteger, nullable=True),
    sa.Column("last_sequence", sa.BigInteger, nullable=True),
    _time("created_at"),
    sa.ForeignKeyConstraint(["topic_id", "partition_id"], ["partitions.topic_id", "partitions.partition_id"]),
    sa.CheckConstraint("base_offset >= 0 AND end_offset >= base_offset", name="offsets"),
    sa.CheckConstraint("end_offset - base_offset = record_count - 1", name="record_count"),
    sa.CheckConstraint("size_bytes >= 0", name="size_bytes"),
    sa.CheckConstraint("min_timestamp <= max_timestamp AND max_timestamp <= newest_timestamp", name="timestamps"),
    sa.Index("idx_segments_location", "topic_id", "partition_id", "base_offset", unique=True),
    sa.Index("idx_segments_s3_path", "s3_bucket", "s3_key", unique=True),
    sa.Index("idx_segments_offsets", "topic_id", "partition_id", "base_offset", "end_offset"),
    sa.Index("idx_segments_newest_timestamp", "topic_id", "partition_id", "newest_timestamp", "base_offset"),
    sa.Index(
        "idx_segments_batch",
        "topic_id",
        "partition_id",
        "producer_id",
        "producer_epoch",
        "first_sequence",
        unique=True,
        sqlite_where=sa.text("producer_id IS NOT NULL"),
        postgresql_where=sa.text("producer_id IS NOT NULL"),
    ),
    sa.Index("idx_segments_created_at", "created_at"),
    comment="Immutable files of a partition. newest_timestamp is the largest max_timestamp up to here, so that"
    " a time is found by one step into an index.",
)

append_turns = sa.Table(
    "append_turns",
    metadata,
    sa.Column("topic_id", sa.BigInteger, primary_key=True),
    sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.Text, nullable=True),
    sa.Column("commit_id", sa.Text, nullable=True),
    _time("expires_at"),
    sa.ForeignKeyConstraint(["topic_id", "partition_id"], ["partitions.topic_id", "partitions.partition_id"]),
    sa.CheckConstraint("token > 0", name="token"),
    comment="Who may stamp offsets of a partition now. The token grows with every holder and fences the former.",
)

producers = sa.Table(
    "producers",
    metadata,
    sa.Column("producer_id", sa.Text, primary_key=True),
    sa.Column("epoch", sa.Integer, nullable=False),
    _time("updated_at"),
    sa.CheckConstraint("epoch >= 0", name="epoch"),
    comment="The newest epoch of each producer id; older ones are fenced.",
)

producer_batches = sa.Table(
    "producer_batches",
    metadata,
    sa.Column("topic_id", sa.BigInteger, primary_key=True),
    sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("producer_id", sa.Text, primary_key=True),
    sa.Column("producer_epoch", sa.Integer, nullable=False),
    sa.Column("first_sequence", sa.BigInteger, nullable=False),
    sa.Column("last_sequence", sa.BigInteger, nullable=False),
    sa.Column("base_offset", sa.BigInteger, nullable=False),
    sa.Column("end_offset", sa.BigInteger, nullable=False),
    sa.Column("segment_id", sa.Text, nullable=False),
    sa.ForeignKeyConstraint(["topic_id", "partition_id"], ["partitions.topic_id", "partitions.partition_id"]),
    sa.CheckConstraint("first_sequence >= 0 AND first_sequence <= last_sequence", name="sequence"),
    comment="The last append of each producer in a partition; it outlives the retention of its segments.",
)

sink_batches = sa.Table(
    "sink_batches",
    metadata,
    sa.Column("topic_id", sa.BigInteger, sa.ForeignKey("topics.id"), primary_key=True),
    sa.Column("sink_id", sa.Text, primary_key=True),
    sa.Column("batch_id", sa.BigInteger, nullable=False),
    sa.Column("commit_id", sa.Text, nullable=False),
    _time("updated_at"),
    comment="The last batch that each streaming query has appended to a topic: one that is repeated is known.",
)

stream_folders = sa.Table(
    "stream_folders",
    metadata,
    sa.Column("folder", _name(), primary_key=True),
    # No foreign key: it outlives its topic.
    sa.Column("topic_id", sa.BigInteger, nullable=False),
    sa.Column("partition_id", sa.Integer, nullable=True),
    # Of an append turn: its token. Of a merge or a batch: its commit.
    sa.Column("token", sa.BigInteger, nullable=True),
    sa.Column("commit_id", sa.Text, nullable=True),
    _time("opened_at"),
    _time("ended_at", nullable=True),
    _time("swept_at", nullable=True),
    sa.CheckConstraint("(token IS NULL) <> (commit_id IS NULL)", name="fence"),
    sa.Index("idx_stream_folders_turn", "topic_id", "partition_id", "token"),
    sa.Index("idx_stream_folders_ended_at", "ended_at"),
    comment="Folders that segments are written to, until they are swept: each has a fence that tells when it is quiet.",
)

retired_segments = sa.Table(
    "retired_segments",
    metadata,
    sa.Column("file_path", _name(), primary_key=True),
    sa.Column("topic_id", sa.BigInteger, nullable=False),
    sa.Column("partition_id", sa.Integer, nullable=False),
    sa.Column("base_offset", sa.BigInteger, nullable=False),
    sa.Column("end_offset", sa.BigInteger, nullable=False),
    sa.Column("file_size", sa.BigInteger, nullable=False),
    # The partition's sequence from which on nobody finds it any more.
    sa.Column("sequence", sa.BigInteger, nullable=False),
    _time("retired_at"),
    sa.Index("idx_retired_segments_place", "topic_id", "partition_id", "end_offset"),
    comment="Files of segments that a merge has replaced, while a reader may still use them.",
)

topic_leases = sa.Table(
    "topic_leases",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("topic_id", sa.BigInteger, primary_key=True),
    sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("from_offset", sa.BigInteger, nullable=False),
    # The partition's sequence when it was taken: what was retired before, its reader cannot have found.
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    _time("created_at"),
    _time("expires_at"),
    sa.Index("idx_topic_leases_place", "topic_id", "partition_id", "from_offset"),
    comment="Readers of topics at work: each pins a partition from an offset on.",
)

mirror_positions = sa.Table(
    "mirror_positions",
    metadata,
    sa.Column("topic_id", sa.BigInteger, primary_key=True),
    sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("next_offset", sa.BigInteger, nullable=False),
    sa.CheckConstraint("next_offset >= 0", name="next_offset"),
    comment="Up to which offset each partition of a topic is in the topic's Iceberg table.",
)

group_members = sa.Table(
    "group_members",
    metadata,
    sa.Column("consumer_group_id", sa.BigInteger, sa.ForeignKey("consumer_groups.id"), primary_key=True),
    sa.Column("member_id", sa.Text, primary_key=True),
    sa.Column("topics", _json(), nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    _time("joined_at"),
    _time("expires_at"),
    comment="Who reads for a group now. A member that is not heard of until expires_at may be removed.",
)

group_assignments = sa.Table(
    "group_assignments",
    metadata,
    sa.Column("consumer_group_id", sa.BigInteger, sa.ForeignKey("consumer_groups.id"), primary_key=True),
    sa.Column("topic_id", sa.BigInteger, primary_key=True),
    sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
    # Who reads it now, and who will when that one has let go of it.
    sa.Column("member_id", sa.Text, nullable=True),
    sa.Column("wanted_by", sa.Text, nullable=True),
    sa.Index("idx_group_assignments_topic", "topic_id"),
    comment="Which member of a group reads which partition: one, or none while it passes on.",
)

consumer_groups = sa.Table(
    "consumer_groups",
    metadata,
    _id(),
    sa.Column("object_id", sa.BigInteger, sa.ForeignKey("lake_objects.id"), nullable=False),
    sa.Column("group_id", _name(), nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    _time("created_at"),
    _time("updated_at"),
    sa.UniqueConstraint("group_id"),
    sa.CheckConstraint("generation >= 0", name="generation"),
    sqlite_autoincrement=True,
    comment="Consumer groups. Generation 0: the group has had no members that share its partitions.",
)

consumer_offsets = sa.Table(
    "consumer_offsets",
    metadata,
    sa.Column("consumer_group_id", sa.BigInteger, sa.ForeignKey("consumer_groups.id"), primary_key=True),
    sa.Column("topic_id", sa.BigInteger, primary_key=True),
    sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("committed_offset", sa.BigInteger, nullable=False),
    sa.Column("metadata", sa.Text, nullable=True),
    _time("committed_at"),
    sa.ForeignKeyConstraint(["topic_id", "partition_id"], ["partitions.topic_id", "partitions.partition_id"]),
    sa.CheckConstraint("committed_offset >= 0", name="committed_offset"),
    sa.Index("idx_consumer_offsets_group", "consumer_group_id"),
    sa.Index("idx_consumer_offsets_topic", "topic_id", "partition_id"),
    comment="The next offset each group will read.",
)

offset_resets = sa.Table(
    "offset_resets",
    metadata,
    _id(),
    sa.Column("consumer_group_id", sa.BigInteger, nullable=False),
    sa.Column("topic_id", sa.BigInteger, nullable=False),
    sa.Column("partition_id", sa.Integer, nullable=False),
    sa.Column("group_sequence", sa.BigInteger, nullable=False),
    sa.Column("from_offset", sa.BigInteger, nullable=True),
    sa.Column("to_offset", sa.BigInteger, nullable=False),
    sa.Column("target", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=True),
    _time("reset_at"),
    sa.Index("idx_offset_resets_group", "consumer_group_id", "topic_id", "partition_id"),
    sqlite_autoincrement=True,
    comment="Every explicit reset of a committed offset: the only way it can move backwards.",
)

temporary_files = sa.Table(
    "temporary_files",
    metadata,
    sa.Column("file_path", _name(), primary_key=True),
    sa.Column("file_size", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    _time("added_at"),
    _time("expiration"),
    sa.CheckConstraint("state IN ('waiting', 'deleting')", name="state"),
    sa.CheckConstraint("file_size >= 0", name="file_size"),
    sa.Index("idx_temporary_files_expiration", "expiration"),
    comment="Files that nothing refers to any more and that go when their grace has passed.",
)

lakehouse_partitions = sa.Table(
    "lakehouse_partitions",
    metadata,
    _id(),
    sa.Column("view_set_name", _name(), nullable=False),
    sa.Column("view_instance_id", _name(), nullable=False),
    _time("begin_insert_time"),
    _time("end_insert_time"),
    _time("min_event_time", nullable=True),
    _time("max_event_time", nullable=True),
    sa.Column("schema_hash", sa.Text, nullable=False),
    sa.Column("source_hash", sa.Text, nullable=False),
    sa.Column("num_rows", sa.BigInteger, nullable=False),
    sa.Column("file_path", _name(), nullable=True),
    sa.Column("file_size", sa.BigInteger, nullable=False),
    sa.Column("partition_format_version", sa.Integer, nullable=False),
    sa.Column("sort_order", _json(), nullable=True),
    _time("updated"),
    # Since when its sources have rows that it has not, and since when some of their rows are gone.
    _time("stale_at", nullable=True),
    _time("frozen_at", nullable=True),
    # Named: from its columns, the name would be longer than PostgreSQL takes.
    sa.UniqueConstraint(
        "view_set_name",
        "view_instance_id",
        "schema_hash",
        "begin_insert_time",
        name="uq_lakehouse_partitions_range",
    ),
    sa.CheckConstraint("begin_insert_time < end_insert_time", name="insert_time"),
    sa.CheckConstraint(
        "(min_event_time IS NULL) = (max_event_time IS NULL) AND min_event_time <= max_event_time", name="event_time"
    ),
    sa.CheckConstraint("num_rows >= 0", name="num_rows"),
    sa.CheckConstraint("file_size >= 0", name="file_size"),
    sa.Index("idx_lakehouse_partitions_file_path", "file_path", unique=True),
    sa.Index("idx_lakehouse_partitions_begin", "view_set_name", "begin_insert_time"),
    sqlite_autoincrement=True,
    comment="Ranges of materialised views, half-open in the time of insertion. An empty range has no file.",
)

partition_metadata = sa.Table(
    "partition_metadata",
    metadata,
    sa.Column("file_path", _name(), primary_key=True),
    sa.Column("partition_format_version", sa.Integer, nullable=False),
    # Version 1 of the format had none: null is unknown.
    sa.Column("num_rows", sa.BigInteger, nullable=True),
    sa.Column("file_size", sa.BigInteger, nullable=False),
    _time("insert_time"),
    # Last: SQLite walks through a large value to reach the ones behind it.
    sa.Column("metadata", sa.LargeBinary, nullable=False),
    sa.CheckConstraint("num_rows >= 0", name="num_rows"),
    sa.CheckConstraint("file_size >= 0", name="file_size"),
    sa.Index("idx_partition_metadata_insert_time", "insert_time"),
    comment="Parquet footers by the path of their file, so that a reader plans without opening it.",
)

namespaces = sa.Table(
    "namespaces",
    metadata,
    _id(),
    sa.Column("name", _name(), nullable=False),
    sa.Column("properties", _json(), nullable=False),
    _time("created_at"),
    sa.UniqueConstraint("name"),
    sqlite_autoincrement=True,
    comment="What tables are grouped by.",
)

tables = sa.Table(
    "tables",
    metadata,
    _id(),
    sa.Column("object_id", sa.BigInteger, sa.ForeignKey("lake_objects.id"), nullable=False),
    sa.Column("namespace_id", sa.BigInteger, sa.ForeignKey("namespaces.id"), nullable=False),
    sa.Column("name", _name(), nullable=False),
    sa.Column("table_uuid", sa.Text, nullable=False),
    sa.Column("format", sa.Text, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("schema_version", sa.Integer, nullable=False),
    sa.Column("last_field_id", sa.Integer, nullable=False),
    sa.Column("last_file_id", sa.BigInteger, nullable=False),
    sa.Column("row_count", sa.BigInteger, nullable=False),
    sa.Column("deleted_rows", sa.BigInteger, nullable=False),
    sa.Column("file_count", sa.BigInteger, nullable=False),
    sa.Column("total_size", sa.BigInteger, nullable=False),
    _time("last_modified"),
    _time("created_at"),
    _time("updated_at"),
    _time("deleted_at", nullable=True),
    # Until then this book's own changes wait for an outside engine that had to begin again.
    sa.Column("hold_until", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    # The topic whose segments are its files: nobody else changes it.
    sa.Column("topic_id", sa.BigInteger, nullable=True),
    # The view whose ranges are its files: nobody else changes it.
    sa.Column("view_id", sa.BigInteger, nullable=True),
    sa.CheckConstraint("version >= 0 AND schema_version >= 1 AND last_file_id >= 0", name="counters"),
    sa.CheckConstraint("row_count >= 0 AND file_count >= 0 AND total_size >= 0 AND deleted_rows >= 0", name="totals"),
    sa.Index(
        "idx_tables_live_name",
        "namespace_id",
        "name",
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    ),
    sa.Index("idx_tables_object", "object_id", unique=True),
    sa.Index(
        "idx_tables_topic",
        "topic_id",
        unique=True,
        sqlite_where=sa.text("topic_id IS NOT NULL AND deleted_at IS NULL"),
        postgresql_where=sa.text("topic_id IS NOT NULL AND deleted_at IS NULL"),
    ),
    sqlite_autoincrement=True,
    comment="Tables, with the totals over their visible files. A dropped one keeps its row until it is emptied.",
)

table_metadata = sa.Table(
    "table_metadata",
    metadata,
    _id(),
    sa.Column("table_id", sa.BigInteger, sa.ForeignKey("tables.id"), nullable=False),
    sa.Column("schema_version", sa.Integer, nullable=False),
    sa.Column("from_version", sa.BigInteger, nullable=False),
    sa.Column("schema", _json(), nullable=False),
    sa.Column("storage_engine", sa.Text, nullable=False),
    sa.Column("engine_config", _json(), nullable=False),
    sa.Column("format", sa.Text, nullable=False),
    sa.Column("compression", sa.Text, nullable=False),
    sa.Column("partition_by", _json(), nullable=False),
    sa.Column("sort_by", _json(), nullable=False),
    sa.Column("properties", _json(), nullable=False),
    _time("last_modified"),
    _time("created_at"),
    _time("updated_at"),
    sa.UniqueConstraint("table_id", "schema_version"),
    sa.CheckConstraint("schema_version >= 1", name="schema_version"),
    sqlite_autoincrement=True,
    comment="Each state of a table's schema, partitioning and sort order, with the version it began at.",
)

table_files = sa.Table(
    "table_files",
    metadata,
    sa.Column("table_id", sa.BigInteger, sa.ForeignKey("tables.id"), primary_key=True),
    # Counted per table, so that a batch's ids are known before its rows are there.
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("file_name", sa.Text, nullable=False),
    sa.Column("file_path", _name(), nullable=False),
    sa.Column("file_size", sa.BigInteger, nullable=False),
    sa.Column("file_type", sa.Text, nullable=False),
    sa.Column("partition_path", sa.Text, nullable=False),
    sa.Column("partition_values", sa.Text, nullable=False),
    sa.Column("spec_id", sa.Integer, nullable=False),
    sa.Column("row_count", sa.BigInteger, nullable=False),
    sa.Column("row_groups", sa.Integer, nullable=False),
    sa.Column("checksum", sa.Text, nullable=False),
    sa.Column("is_compressed", sa.Boolean, nullable=False),
    sa.Column("schema_version", sa.Integer, nullable=False),
    sa.Column("has_field_ids", sa.Boolean, nullable=False),
    sa.Column("has_statistics", sa.Boolean, nullable=False),
    sa.Column("commit_id", sa.Text, nullable=False),
    sa.Column("from_version", sa.BigInteger, nullable=False),
    sa.Column("to_version", sa.BigInteger, nullable=True),
    _time("created_at"),
    _time("modified_at"),
    _time("retired_at", nullable=True),
    # 0: rows; 1: positions of rows that are deleted.
    sa.Column("content", sa.Integer, nullable=False, server_default=sa.text("0")),
    # As Iceberg metadata spells it, where that is not the warehouse's own way.
    sa.Column("location", sa.Text, nullable=True),
    # Of the data, where it is not that of the snapshot which publishes the file.
    sa.Column("sequence_number", sa.BigInteger, nullable=True),
    # Of a file of deletes that is about one file alone: that file.
    sa.Column("referenced_path", sa.Text, nullable=True),
    sa.CheckConstraint("file_size >= 0 AND row_count >= 0 AND row_groups >= 0", name="sizes"),
    sa.CheckConstraint("to_version > from_version", name="interval"),
    sa.CheckConstraint("retired_at IS NULL OR to_version IS NOT NULL", name="retired"),
    sa.Index("idx_table_files_path", "file_path"),
    sa.Index(
        "idx_table_files_live_path",
        "file_path",
        unique=True,
        sqlite_where=sa.text("to_version IS NULL"),
        postgresql_where=sa.text("to_version IS NULL"),
    ),
    sa.Index("idx_table_files_from", "table_id", "from_version", "id"),
    sa.Index(
        "idx_table_files_deletes",
        "table_id",
        "id",
        sqlite_where=sa.text("content <> 0"),
        postgresql_where=sa.text("content <> 0"),
    ),
    sa.Index("idx_table_files_commit", "commit_id"),
    sa.Index(
        "idx_table_files_ended",
        "table_id",
        "to_version",
        "id",
        sqlite_where=sa.text("to_version IS NOT NULL AND retired_at IS NULL"),
        postgresql_where=sa.text("to_version IS NOT NULL AND retired_at IS NULL"),
    ),
    sa.Index(
        "idx_table_files_small",
        "table_id",
        "file_size",
        "id",
        sqlite_where=sa.text("to_version IS NULL AND content = 0"),
        postgresql_where=sa.text("to_version IS NULL AND content = 0"),
    ),
    sa.Index(
        "idx_table_files_unmeasured",
        "table_id",
        "id",
        sqlite_where=sa.text("NOT has_statistics"),
        postgresql_where=sa.text("NOT has_statistics"),
    ),
    comment="Write-once files of tables; one is visible in the versions from_version <= v < to_version.",
)

table_stats = sa.Table(
    "table_stats",
    metadata,
    _id(),
    sa.Column("table_id", sa.BigInteger, sa.ForeignKey("tables.id"), nullable=False),
    sa.Column("row_count", sa.BigInteger, nullable=False),
    sa.Column("deleted_rows", sa.BigInteger, nullable=False),
    sa.Column("file_count", sa.BigInteger, nullable=False),
    sa.Column("total_size", sa.BigInteger, nullable=False),
    _time("last_modified"),
    _time("created_at"),
    _time("updated_at"),
    sa.UniqueConstraint("table_id"),
    sqlite_autoincrement=True,
    comment="The totals of each table, for whoever follows its size.",
)

file_column_stats = sa.Table(
    "file_column_stats",
    metadata,
    sa.Column("table_id", sa.BigInteger, primary_key=True),
    sa.Column("file_id", sa.BigInteger, primary_key=True, autoincrement=False),
    # A negative id is that of a partition field.
    sa.Column("field_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("lower_bound", sa.LargeBinary, nullable=True),
    sa.Column("upper_bound", sa.LargeBinary, nullable=True),
    sa.Column("is_exact", sa.Boolean, nullable=False),
    sa.Column("value_count", sa.BigInteger, nullable=True),
    sa.Column("null_count", sa.BigInteger, nullable=True),
    sa.Column("nan_count", sa.BigInteger, nullable=True),
    sa.Column("column_size", sa.BigInteger, nullable=True),
    sa.Column("width", sa.Integer, nullable=False),
    sa.Column("low_key", sa.BigInteger, nullable=False),
    sa.Index("idx_file_column_stats_range", "table_id", "field_id", "width", "low_key", "file_id"),
    sqlite_with_rowid=False,
    comment="Bounds and counts per file and column, in a form whose byte order is the order of the values.",
)

table_versions = sa.Table(
    "table_versions",
    metadata,
    sa.Column("table_id", sa.BigInteger, sa.ForeignKey("tables.id"), primary_key=True),
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("operation", sa.Text, nullable=False),
    sa.Column("schema_version", sa.Integer, nullable=False),
    sa.Column("commit_id", sa.Text, nullable=False),
    sa.Column("added_files", sa.BigInteger, nullable=False),
    sa.Column("added_rows", sa.BigInteger, nullable=False),
    sa.Column("added_size", sa.BigInteger, nullable=False),
    sa.Column("removed_files", sa.BigInteger, nullable=False),
    sa.Column("removed_rows", sa.BigInteger, nullable=False),
    sa.Column("removed_size", sa.BigInteger, nullable=False),
    sa.Column("summary", _json(), nullable=False),
    _time("committed_at"),
    sa.CheckConstraint(
        "operation IN ('create', 'append', 'overwrite', 'delete', 'replace', 'schema')", name="operation"
    ),
    sa.Index("idx_table_versions_committed_at", "table_id", "committed_at"),
    comment="The history of each table: one row per version that can still be read.",
)

inserts = sa.Table(
    "inserts",
    metadata,
    sa.Column("commit_id", sa.Text, primary_key=True),
    sa.Column("table_id", sa.BigInteger, nullable=False),
    sa.Column("folder", sa.Text, nullable=True),
    sa.Column("first_file_id", sa.BigInteger, nullable=True),
    sa.Column("last_file_id", sa.BigInteger, nullable=True),
    _time("opened_at"),
    _time("alive_until"),
    _time("swept_at", nullable=True),
    sa.Index("idx_inserts_swept_at", "swept_at", "opened_at"),
    comment="Attempts to change a table's files, each with a folder of its own, until that folder is quiet.",
)

table_horizons = sa.Table(
    "table_horizons",
    metadata,
    sa.Column("table_id", sa.BigInteger, sa.ForeignKey("tables.id"), primary_key=True),
    sa.Column("min_readable", sa.BigInteger, nullable=False),
    _time("updated_at"),
    sa.CheckConstraint("min_readable >= 0", name="min_readable"),
    comment="The oldest version that may be read. Leases share this row's lock, the cleaner takes it alone.",
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("table_id", sa.BigInteger, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    _time("created_at"),
    _time("expires_at"),
    sa.Index("idx_leases_table", "table_id", "version"),
    comment="Readers at work: each pins its version and all newer ones.",
)

iceberg_tables = sa.Table(
    "iceberg_tables",
    metadata,
    sa.Column("table_id", sa.BigInteger, sa.ForeignKey("tables.id"), primary_key=True),
    sa.Column("location", sa.Text, nullable=False),
    sa.Column("metadata_location", sa.Text, nullable=False),
    sa.Column("metadata_number", sa.BigInteger, nullable=False),
    sa.Column("snapshot_id", sa.BigInteger, nullable=True),
    sa.Column("last_sequence", sa.BigInteger, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    # When the properties that are published were changed last.
    _time("properties_at"),
    _time("published_at"),
    comment="What each table is published as: the pointer to its Iceberg metadata, and the version that covers.",
)

table_snapshots = sa.Table(
    "table_snapshots",
    metadata,
    sa.Column("table_id", sa.BigInteger, sa.ForeignKey("tables.id"), primary_key=True),
    sa.Column("snapshot_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("parent_snapshot_id", sa.BigInteger, nullable=True),
    sa.Column("sequence_number", sa.BigInteger, nullable=False),
    _time("timestamp_ms"),
    sa.Column("manifest_list", sa.Text, nullable=False),
    sa.Column("summary", _json(), nullable=False),
    sa.Column("schema_id", sa.Integer, nullable=True),
    # None: a snapshot of a branch, or one that was staged only.
    sa.Column("version", sa.BigInteger, nullable=True),
    # The version whose files it needs: its own, or the one its branch began from.
    sa.Column("pinned_version", sa.BigInteger, nullable=False),
    sa.Column("metadata_location", sa.Text, nullable=False),
    sa.Column("is_ours", sa.Boolean, nullable=False),
    sa.Index("idx_table_snapshots_pinned", "table_id", "pinned_version"),
    comment="The Iceberg snapshots that a table's metadata lists. What they contain is not retired.",
)

iceberg_files = sa.Table(
    "iceberg_files",
    metadata,
    sa.Column("file_path", _name(), primary_key=True),
    sa.Column("table_id", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("file_size", sa.BigInteger, nullable=False),
    # Of a manifest: the ids of its files lie between these; none: not known.
    sa.Column("first_file_id", sa.BigInteger, nullable=True),
    sa.Column("last_file_id", sa.BigInteger, nullable=True),
    _time("added_at"),
    sa.CheckConstraint("kind IN ('metadata', 'manifest_list', 'manifest', 'statistics')", name="kind"),
    sa.Index("idx_iceberg_files_table", "table_id", "kind"),
    comment="Iceberg's own files of published tables: metadata files, manifest lists and manifests.",
)

snapshot_manifests = sa.Table(
    "snapshot_manifests",
    metadata,
    sa.Column("table_id", sa.BigInteger, primary_key=True),
    sa.Column("snapshot_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("file_path", _name(), primary_key=True),
    sa.Index("idx_snapshot_manifests_path", "file_path"),
    sqlite_with_rowid=False,
    comment="Which manifests each snapshot lists.",
)

branch_files = sa.Table(
    "branch_files",
    metadata,
    sa.Column("file_path", _name(), primary_key=True),
    sa.Column("table_id", sa.BigInteger, nullable=False),
    sa.Column("file_size", sa.BigInteger, nullable=False),
    _time("added_at"),
    sa.Index("idx_branch_files_table", "table_id"),
    comment="Files that only snapshots of branches, or staged ones, contain.",
)

footer_debts = sa.Table(
    "footer_debts",
    metadata,
    sa.Column("file_path", _name(), primary_key=True),
    sa.Column("table_id", sa.BigInteger, nullable=False),
    _time("added_at"),
    _time("due_at"),
    sa.Column("last_error", sa.Text, nullable=True),
    sa.Index("idx_footer_debts_due_at", "due_at"),
    comment="Files of outside engines whose footer and checksum have not been taken yet.",
)

schedulers = sa.Table(
    "schedulers",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.Text, nullable=True),
    # Grows with every renewal: whoever waits for the turn watches it, and no clock decides.
    sa.Column("beat", sa.BigInteger, nullable=False),
    _time("claimed_at"),
    _time("renewed_at"),
    sa.Column("status", _json(), nullable=False),
    sa.CheckConstraint("token > 0", name="token"),
    comment="Who delivers events now. The token grows with every holder and fences the former.",
)

deliveries = sa.Table(
    "deliveries",
    metadata,
    sa.Column("subscriber", sa.Text, primary_key=True),
    sa.Column("object_id", sa.BigInteger, primary_key=True, autoincrement=False),
    # The first event it has not taken, and the last one that its cursor has passed.
    sa.Column("next_sequence", sa.BigInteger, nullable=False),
    sa.Column("known_sequence", sa.BigInteger, nullable=False),
    # Whether it is to be refreshed before it takes events again.
    sa.Column("refresh", sa.Boolean, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("last_error", sa.Text, nullable=True),
    _time("since"),
    _time("retry_at"),
    sa.CheckConstraint("next_sequence > 0 AND attempts >= 0", name="counters"),
    comment="Lake objects of which a subscriber has not taken all events that its cursor has passed.",
)

dead_letters = sa.Table(
    "dead_letters",
    metadata,
    _id(),
    sa.Column("subscriber", sa.Text, nullable=False),
    sa.Column("object_id", sa.BigInteger, nullable=False),
    sa.Column("object_kind", sa.Text, nullable=False),
    sa.Column("event_id", sa.BigInteger, nullable=False),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("table_name", sa.Text, nullable=False),
    sa.Column("operation", sa.Text, nullable=False),
    sa.Column("key", _json(), nullable=False),
    sa.Column("row_after", _json(), nullable=True),
    sa.Column("row_before", _json(), nullable=True),
    _time("occurred_at"),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("error", sa.Text, nullable=False),
    _time("parked_at"),
    _time("redriven_at", nullable=True),
    sa.Index("idx_dead_letters_subscriber", "subscriber", "id"),
    sqlite_autoincrement=True,
    comment="Events that a subscriber could not take after its last attempt.",
)

requests = sa.Table(
    "requests",
    metadata,
    sa.Column("request_key", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("component", sa.Text, nullable=False),
    sa.Column("object_id", sa.BigInteger, nullable=False),
    sa.Column("argument", _json(), nullable=False),
    _time("requested_at"),
    sa.Column("requested_by", sa.Text, nullable=False),
    sa.CheckConstraint("kind IN ('refresh', 'tag')", name="kind"),
    sa.Index("idx_requests_component", "component", "requested_at"),
    comment="What any process asks of the one that runs the components; a request stays until it is met.",
)

pauses = sa.Table(
    "pauses",
    metadata,
    sa.Column("component", sa.Text, primary_key=True),
    sa.Column("table_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("paused_by", sa.Text, nullable=False),
    _time("since"),
    comment="Components that rest: all of them ('*') or one, on all tables (0) or one.",
)

maintenance_history = sa.Table(
    "maintenance_history",
    metadata,
    _id(),
    sa.Column("component", sa.Text, nullable=False),
    sa.Column("table_id", sa.BigInteger, nullable=True),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("detail", _json(), nullable=False),
    _time("started_at"),
    _time("finished_at"),
    sa.CheckConstraint("outcome IN ('done', 'failed', 'yielded')", name="outcome"),
    sa.Index("idx_maintenance_history_component", "component", "id"),
    sa.Index("idx_maintenance_history_table", "table_id", "id"),
    sqlite_autoincrement=True,
    comment="What components have done to which table, when and why.",
)

metadata_updates = sa.Table(
    "metadata_updates",
    metadata,
    sa.Column("table_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("last_error", sa.Text, nullable=True),
    _time("created_at"),
    _time("started_at", nullable=True),
    _time("finished_at", nullable=True),
    sa.CheckConstraint("state IN ('pending', 'processing', 'completed', 'failed')", name="state"),
    sa.Index(
        "idx_metadata_updates_owed",
        "table_id",
        "version",
        sqlite_where=sa.text("state <> 'completed'"),
        postgresql_where=sa.text("state <> 'completed'"),
    ),
    sa.Index("idx_metadata_updates_finished_at", "finished_at"),
    comment="What is owed to Iceberg, per version of each table, and what became of it.",
)

pipelines = sa.Table(
    "pipelines",
    metadata,
    _id(),
    sa.Column("name", _name(), nullable=False),
    sa.Column("target_id", sa.BigInteger, nullable=False),
    sa.Column("dead_letters_id", sa.BigInteger, nullable=True),
    sa.Column("definition", _json(), nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    # Who runs it now, so that two do not do the same work. What has landed is decided by the offsets alone.
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.Text, nullable=True),
    _time("held_until", nullable=True),
    sa.Column("last_batch", sa.BigInteger, nullable=False),
    sa.Column("record_count", sa.BigInteger, nullable=False),
    sa.Column("row_count", sa.BigInteger, nullable=False),
    sa.Column("dead_count", sa.BigInteger, nullable=False),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("last_error", sa.Text, nullable=True),
    _time("failed_at", nullable=True),
    _time("retry_at", nullable=True),
    _time("landed_at", nullable=True),
    _time("created_at"),
    _time("updated_at"),
    sa.UniqueConstraint("name"),
    sa.CheckConstraint("state IN ('active', 'paused', 'stopped')", name="state"),
    sa.Index("idx_pipelines_target", "target_id"),
    sqlite_autoincrement=True,
    comment="From topics or tables into a table: what each pipeline does, who runs it, and how it stands.",
)

pipeline_offsets = sa.Table(
    "pipeline_offsets",
    metadata,
    sa.Column("pipeline_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("source_id", sa.BigInteger, primary_key=True, autoincrement=False),
    # Of a table: 0.
    sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
    # What lies between them has landed. Of a topic they are offsets, of a table versions.
    sa.Column("first_offset", sa.BigInteger, nullable=False),
    sa.Column("next_offset", sa.BigInteger, nullable=False),
    sa.CheckConstraint("kind IN ('topic', 'table')", name="kind"),
    sa.CheckConstraint("0 <= first_offset AND first_offset <= next_offset", name="offsets"),
    sa.Index("idx_pipeline_offsets_source", "kind", "source_id"),
    comment="How far each pipeline has come in each partition of its sources; changed with the files it made.",
)

pipeline_batches = sa.Table(
    "pipeline_batches",
    metadata,
    sa.Column("pipeline_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("ranges", _json(), nullable=False),
    sa.Column("record_count", sa.BigInteger, nullable=False),
    sa.Column("row_count", sa.BigInteger, nullable=True),
    sa.Column("dead_count", sa.BigInteger, nullable=True),
    sa.Column("file_count", sa.BigInteger, nullable=True),
    sa.Column("total_size", sa.BigInteger, nullable=True),
    sa.Column("version", sa.BigInteger, nullable=True),
    _time("planned_at"),
    _time("landed_at", nullable=True),
    sa.CheckConstraint("state IN ('planned', 'landed')", name="state"),
    sa.CheckConstraint("(state = 'landed') = (landed_at IS NOT NULL)", name="landed_at"),
    sa.Index("idx_pipeline_batches_landed_at", "landed_at"),
    comment="Batches of pipelines: the ranges of their sources that each reads, decided before it runs.",
)

views = sa.Table(
    "views",
    metadata,
    _id(),
    sa.Column("name", _name(), nullable=False),
    sa.Column("definition", _json(), nullable=False),
    sa.Column("schema_hash", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("last_error", sa.Text, nullable=True),
    _time("failed_at", nullable=True),
    _time("retry_at", nullable=True),
    _time("created_at"),
    _time("updated_at"),
    sa.UniqueConstraint("name"),
    sa.CheckConstraint("state IN ('active', 'paused')", name="state"),
    sa.CheckConstraint("failures >= 0", name="failures"),
    sqlite_autoincrement=True,
    comment="Queries that are materialised over ranges of time: what each is, and how its upkeep stands.",
)

view_instances = sa.Table(
    "view_instances",
    metadata,
    sa.Column("view_id", sa.BigInteger, sa.ForeignKey("views.id"), primary_key=True, autoincrement=False),
    sa.Column("instance", _name(), primary_key=True),
    sa.Column("table_id", sa.BigInteger, nullable=False),
    comment="The table that holds the rows of each instance of a view; made with its first range.",
)

view_sources = sa.Table(
    "view_sources",
    metadata,
    sa.Column("view_id", sa.BigInteger, sa.ForeignKey("views.id"), primary_key=True, autoincrement=False),
    # As the query spells it.
    sa.Column("name", _name(), primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("source_id", sa.BigInteger, nullable=False),
    sa.Column("event_time", sa.Text, nullable=False),
    # Of a table: the column's field id.
    sa.Column("field_id", sa.Integer, nullable=True),
    sa.CheckConstraint("kind IN ('topic', 'table')", name="kind"),
    sa.CheckConstraint("(kind = 'table') = (field_id IS NOT NULL)", name="field_id"),
    sa.Index("idx_view_sources_source", "kind", "source_id"),
    comment="The topics and tables that each view reads, and the column that is their event time.",
)

source_losses = sa.Table(
    "source_losses",
    metadata,
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("source_id", sa.BigInteger, primary_key=True, autoincrement=False),
    # Of a topic: the partition. Of a table: the field id of the times.
    sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("begin_time", sa.BigInteger, primary_key=True, autoincrement=False),
    _time("end_time"),
    sa.CheckConstraint("kind IN ('topic', 'table')", name="kind"),
    sa.CheckConstraint("begin_time < end_time", name="range"),
    comment="Times of which topics, and tables of views, have lost rows for ever: whole minutes, each row apart.",
)

view_claims = sa.Table(
    "view_claims",
    metadata,
    sa.Column("view_id", sa.BigInteger, sa.ForeignKey("views.id"), primary_key=True, autoincrement=False),
    sa.Column("instance", _name(), primary_key=True),
    sa.Column("begin_time", sa.BigInteger, primary_key=True, autoincrement=False),
    _time("end_time"),
    sa.Column("token", sa.Text, nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    _time("expires_at"),
    # Whether its sources have got, or lost, rows since it was taken.
    sa.Column("dirty", sa.Boolean, nullable=False),
    sa.Column("frozen", sa.Boolean, nullable=False),
    sa.CheckConstraint("begin_time < end_time", name="range"),
    comment="Ranges that somebody builds now. Taken before the sources are read; the token fences a former holder.",
)

compaction_claims = sa.Table(
    "compaction_claims",
    metadata,
    sa.Column("table_id", sa.BigInteger, sa.ForeignKey("tables.id"), primary_key=True, autoincrement=False),
    sa.Column("token", sa.Text, nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    _time("expires_at"),
    comment="Tables that somebody compacts now. Taken before files are chosen; the token fences a former holder.",
)

known_gaps = sa.Table(
    "known_gaps",
    metadata,
    # Offsets of a partition, or versions of a table.
    sa.Column("kind", sa.Text, primary_key=True),
    # The topic or the table.
    sa.Column("owner_id", sa.BigInteger, primary_key=True, autoincrement=False),
    # Of a table: 0.
    sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("first_number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("last_number", sa.BigInteger, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    _time("noted_at"),
    sa.CheckConstraint("kind IN ('offsets', 'versions')", name="kind"),
    sa.CheckConstraint("0 <= first_number AND first_number <= last_number", name="numbers"),
    comment="Offsets and versions that a rebuild of the registry could not bring back, and has reported.",
)

# How PostgreSQL stores and vacuums the tables that are written most; `docs/architecture/registry.md` has the reasons.
# Few rows that every commit changes: room in each page, so that a new state of a row lies beside the old one and no
# index has to know of it, and a vacuum before many of them are dead.
_CHANGED = {"fillfactor": 70, "autovacuum_vacuum_scale_factor": 0.05, "autovacuum_vacuum_cost_delay": 0}
# Rows that come and go by the million: a vacuum before a fiftieth is dead, so that space is used again and not grown.
_PASSING = {
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_analyze_scale_factor": 0.02,
    "autovacuum_vacuum_cost_limit": 2000,
}
# Rows that stay and become many: a fifth of them, which is what PostgreSQL waits for by itself, is too much at once.
_MANY = {
    "autovacuum_vacuum_scale_factor": 0.05,
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_analyze_scale_factor": 0.05,
}
STORAGE: dict[str, dict[str, float]] = {
    **dict.fromkeys(
        (
            "lake_objects",
            "partitions",
            "append_turns",
            "producer_batches",
            "consumer_offsets",
            "group_members",
            "tables",
            "table_stats",
            "iceberg_tables",
            "leases",
            "topic_leases",
            "cursors",
            "deliveries",
            "schedulers",
            "pipelines",
            "pipeline_offsets",
            "view_claims",
            "compaction_claims",
        ),
        _CHANGED,
    ),
    **dict.fromkeys(("events", "commits", "inserts", "stream_folders", "metadata_updates"), _PASSING),
    **dict.fromkeys(("segments", "table_files", "file_column_stats", "table_versions"), _MANY),
    "partition_metadata": {**_MANY, "toast.autovacuum_vacuum_scale_factor": 0.05},
}
for _table, _options in STORAGE.items():
    metadata.tables[_table].dialect_options["postgresql"]["with"] = _options

CAPTURED = (
    topics,
    partitions,
    segments,
    consumer_groups,
    consumer_offsets,
    tables,
    table_metadata,
    table_files,
    table_stats,
    table_snapshots,
)
