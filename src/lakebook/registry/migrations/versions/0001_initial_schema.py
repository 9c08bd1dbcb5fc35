"""The registry as it began: the book's row, lake objects, commits, events, and the streams.

Revision 0001, the first.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import UserDefinedType

revision = "0001"
down_revision = None


class _Xid8(UserDefinedType[int]):
    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "XID8"


ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")
XID8 = _Xid8().with_variant(sa.BigInteger(), "sqlite")


def upgrade() -> None:
    _create_book()
    _create_commits()
    _create_cursors()
    _create_events()
    _create_lake_objects()
    _create_offset_resets()
    _create_producers()
    _create_temporary_files()
    _create_consumer_groups()
    _create_topics()
    _create_partitions()
    _create_append_turns()
    _create_consumer_offsets()
    _create_producer_batches()
    _create_segments()


def _create_book() -> None:
    op.create_table(
        "book",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("book_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("warehouse", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("epoch_since", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_book_single")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_book")),
        comment="One row: who this book is, which life of it this is, where its bytes are.",
    )


def _create_commits() -> None:
    op.create_table(
        "commits",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("(state = 'open') = (finished_at IS NULL)", name=op.f("ck_commits_finished")),
        sa.CheckConstraint("state IN ('open', 'committed', 'aborted')", name=op.f("ck_commits_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_commits")),
        comment="One row per write: the fence that settles a COMMIT whose outcome is unknown.",
    )
    op.create_index("idx_commits_finished_at", "commits", ["kind", "finished_at"], unique=False)
    op.create_index(
        "idx_commits_open",
        "commits",
        ["opened_at"],
        unique=False,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )


def _create_cursors() -> None:
    op.create_table(
        "cursors",
        sa.Column("subscriber", sa.Text(), nullable=False),
        sa.Column("position", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("subscriber", name=op.f("pk_cursors")),
        comment="How far each subscriber has read the events.",
    )


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column("id", ID, sa.Identity(always=False), nullable=False),
        sa.Column("xid", XID8, nullable=True),
        sa.Column("object_id", sa.BigInteger(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("table_name", sa.Text(), nullable=False),
        sa.Column("operation", sa.Text(), nullable=False),
        sa.Column("key", JSON, nullable=False),
        sa.Column("row_after", JSON, nullable=True),
        sa.Column("row_before", JSON, nullable=True),
        sa.Column("occurred_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("operation IN ('insert', 'update', 'delete')", name=op.f("ck_events_operation")),
        sa.CheckConstraint("sequence > 0", name=op.f("ck_events_sequence")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
        sa.UniqueConstraint("object_id", "sequence", name=op.f("uq_events_object_id_sequence")),
        comment="Captured changes, one per changed row, in the order of commits per lake object.",
        sqlite_autoincrement=True,
    )
    op.create_index("idx_events_xid", "events", ["xid"], unique=False, sqlite_where=sa.text("xid IS NOT NULL"))


def _create_lake_objects() -> None:
    op.create_table(
        "lake_objects",
        sa.Column("id", ID, sa.Identity(always=False), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("last_sequence", sa.BigInteger(), nullable=False),
        sa.Column("last_commit_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("kind IN ('topic', 'partition', 'group', 'table')", name=op.f("ck_lake_objects_kind")),
        sa.CheckConstraint("last_sequence >= 0", name=op.f("ck_lake_objects_last_sequence")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lake_objects")),
        comment="The unit of order and of locking. The row is the lock; it hands out the events' sequence.",
        sqlite_autoincrement=True,
    )


def _create_offset_resets() -> None:
    op.create_table(
        "offset_resets",
        sa.Column("id", ID, sa.Identity(always=False), nullable=False),
        sa.Column("consumer_group_id", sa.BigInteger(), nullable=False),
        sa.Column("topic_id", sa.BigInteger(), nullable=False),
        sa.Column("partition_id", sa.Integer(), nullable=False),
        sa.Column("group_sequence", sa.BigInteger(), nullable=False),
        sa.Column("from_offset", sa.BigInteger(), nullable=True),
        sa.Column("to_offset", sa.BigInteger(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("reset_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_offset_resets")),
        comment="Every explicit reset of a committed offset: the only way it can move backwards.",
        sqlite_autoincrement=True,
    )
    op.create_index(
        "idx_offset_resets_group", "offset_resets", ["consumer_group_id", "topic_id", "partition_id"], unique=False
    )


def _create_producers() -> None:
    op.create_table(
        "producers",
        sa.Column("producer_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("epoch >= 0", name=op.f("ck_producers_epoch")),
        sa.PrimaryKeyConstraint("producer_id", name=op.f("pk_producers")),
        comment="The newest epoch of each producer id; older ones are fenced.",
    )


def _create_temporary_files() -> None:
    op.create_table(
        "temporary_files",
        sa.Column("file_path", NAME, nullable=False),
        sa.Column("file_size", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("added_at", sa.BigInteger(), nullable=False),
        sa.Column("expiration", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('waiting', 'deleting')", name=op.f("ck_temporary_files_state")),
        sa.CheckConstraint("file_size >= 0", name=op.f("ck_temporary_files_file_size")),
        sa.PrimaryKeyConstraint("file_path", name=op.f("pk_temporary_files")),
        comment="Files that nothing refers to any more and that go when their grace has passed.",
    )
    op.create_index("idx_temporary_files_expiration", "temporary_files", ["expiration"], unique=False)


def _create_consumer_groups() -> None:
    op.create_table(
        "consumer_groups",
        sa.Column("id", ID, sa.Identity(always=False), nullable=False),
        sa.Column("object_id", sa.BigInteger(), nullable=False),
        sa.Column("group_id", NAME, nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("generation >= 0", name=op.f("ck_consumer_groups_generation")),
        sa.ForeignKeyConstraint(["object_id"], ["lake_objects.id"], name=op.f("fk_consumer_groups_object_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_consumer_groups")),
        sa.UniqueConstraint("group_id", name=op.f("uq_consumer_groups_group_id")),
        comment="Consumer groups. Generation 0: the group has had no members that share its partitions.",
        sqlite_autoincrement=True,
    )


def _create_topics() -> None:
    op.create_table(
        "topics",
        sa.Column("id", ID, sa.Identity(always=False), nullable=False),
        sa.Column("object_id", sa.BigInteger(), nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("partition_count", sa.Integer(), nullable=False),
        sa.Column("retention_ms", sa.BigInteger(), nullable=True),
        sa.Column("config", JSON, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("partition_count > 0", name=op.f("ck_topics_partition_count")),
        sa.CheckConstraint("retention_ms > 0", name=op.f("ck_topics_retention_ms")),
        sa.ForeignKeyConstraint(["object_id"], ["lake_objects.id"], name=op.f("fk_topics_object_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_topics")),
        comment="Streams. A name is unique among live topics; a deleted one keeps its row until it is emptied.",
        sqlite_autoincrement=True,
    )
    op.create_index("idx_topics_created_at", "topics", ["created_at"], unique=False)
    op.create_index(
        "idx_topics_live_name",
        "topics",
        ["name"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )


def _create_partitions() -> None:
    op.create_table(
        "partitions",
        sa.Column("topic_id", sa.BigInteger(), nullable=False),
        sa.Column("partition_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("object_id", sa.BigInteger(), nullable=False),
        sa.Column("log_start", sa.BigInteger(), nullable=False),
        sa.Column("high_watermark", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("log_start >= 0 AND log_start <= high_watermark", name=op.f("ck_partitions_log_start")),
        sa.CheckConstraint("partition_id >= 0", name=op.f("ck_partitions_partition_id")),
        sa.ForeignKeyConstraint(["object_id"], ["lake_objects.id"], name=op.f("fk_partitions_object_id")),
        sa.ForeignKeyConstraint(["topic_id"], ["topics.id"], name=op.f("fk_partitions_topic_id")),
        sa.PrimaryKeyConstraint("topic_id", "partition_id", name=op.f("pk_partitions")),
        comment="Ordered shards of a topic. high_watermark is the next offset to be written.",
    )
    op.create_index("idx_partitions_topic", "partitions", ["topic_id"], unique=False)


def _create_append_turns() -> None:
    op.create_table(
        "append_turns",
        sa.Column("topic_id", sa.BigInteger(), nullable=False),
        sa.Column("partition_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=True),
        sa.Column("commit_id", sa.Text(), nullable=True),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("token > 0", name=op.f("ck_append_turns_token")),
        sa.ForeignKeyConstraint(
            ["topic_id", "partition_id"],
            ["partitions.topic_id", "partitions.partition_id"],
            name=op.f("fk_append_turns_topic_id_partition_id"),
        ),
        sa.PrimaryKeyConstraint("topic_id", "partition_id", name=op.f("pk_append_turns")),
        comment="Who may stamp offsets of a partition now. The token grows with every holder and fences the former.",
    )


def _create_consumer_offsets() -> None:
    op.create_table(
        "consumer_offsets",
        sa.Column("consumer_group_id", sa.BigInteger(), nullable=False),
        sa.Column("topic_id", sa.BigInteger(), nullable=False),
        sa.Column("partition_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("committed_offset", sa.BigInteger(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=True),
        sa.Column("committed_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("committed_offset >= 0", name=op.f("ck_consumer_offsets_committed_offset")),
        sa.ForeignKeyConstraint(
            ["consumer_group_id"], ["consumer_groups.id"], name=op.f("fk_consumer_offsets_consumer_group_id")
        ),
        sa.ForeignKeyConstraint(
            ["topic_id", "partition_id"],
            ["partitions.topic_id", "partitions.partition_id"],
            name=op.f("fk_consumer_offsets_topic_id_partition_id"),
        ),
        sa.PrimaryKeyConstraint("consumer_group_id", "topic_id", "partition_id", name=op.f("pk_consumer_offsets")),
        comment="The next offset each group will read.",
    )
    op.create_index("idx_consumer_offsets_group", "consumer_offsets", ["consumer_group_id"], unique=False)
    op.create_index("idx_consumer_offsets_topic", "consumer_offsets", ["topic_id", "partition_id"], unique=False)


def _create_producer_batches() -> None:
    op.create_table(
        "producer_batches",
        sa.Column("topic_id", sa.BigInteger(), nullable=False),
        sa.Column("partition_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("producer_id", sa.Text(), nullable=False),
        sa.Column("producer_epoch", sa.Integer(), nullable=False),
        sa.Column("first_sequence", sa.BigInteger(), nullable=False),
        sa.Column("last_sequence", sa.BigInteger(), nullable=False),
        sa.Column("base_offset", sa.BigInteger(), nullable=False),
        sa.Column("end_offset", sa.BigInteger(), nullable=False),
        sa.Column("segment_id", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "first_sequence >= 0 AND first_sequence <= last_sequence", name=op.f("ck_producer_batches_sequence")
        ),
        sa.ForeignKeyConstraint(
            ["topic_id", "partition_id"],
            ["partitions.topic_id", "partitions.partition_id"],
            name=op.f("fk_producer_batches_topic_id_partition_id"),
        ),
        sa.PrimaryKeyConstraint("topic_id", "partition_id", "producer_id", name=op.f("pk_producer_batches")),
        comment="The last append of each producer in a partition; it outlives the retention of its segments.",
    )


def _create_segments() -> None:
    op.create_table(
        "segments",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("topic_id", sa.BigInteger(), nullable=False),
        sa.Column("partition_id", sa.Integer(), nullable=False),
        sa.Column("base_offset", sa.BigInteger(), nullable=False),
        sa.Column("end_offset", sa.BigInteger(), nullable=False),
        sa.Column("record_count", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("s3_bucket", sa.Text(), nullable=False),
        sa.Column("s3_key", sa.Text(), nullable=False),
        sa.Column("checksum", sa.Text(), nullable=True),
        sa.Column("min_timestamp", sa.BigInteger(), nullable=False),
        sa.Column("max_timestamp", sa.BigInteger(), nullable=False),
        sa.Column("newest_timestamp", sa.BigInteger(), nullable=False),
        sa.Column("commit_id", sa.Text(), nullable=False),
        sa.Column("producer_id", sa.Text(), nullable=True),
        sa.Column("producer_epoch", sa.Integer(), nullable=True),
        sa.Column("first_sequence", sa.BigInteger(), nullable=True),
        sa.Column("last_sequence", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("base_offset >= 0 AND end_offset >= base_offset", name=op.f("ck_segments_offsets")),
        sa.CheckConstraint("end_offset - base_offset = record_count - 1", name=op.f("ck_segments_record_count")),
        sa.CheckConstraint(
            "min_timestamp <= max_timestamp AND max_timestamp <= newest_timestamp", name=op.f("ck_segments_timestamps")
        ),
        sa.CheckConstraint("size_bytes >= 0", name=op.f("ck_segments_size_bytes")),
        sa.ForeignKeyConstraint(
            ["topic_id", "partition_id"],
            ["partitions.topic_id", "partitions.partition_id"],
            name=op.f("fk_segments_topic_id_partition_id"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_segments")),
        comment="Immutable files of a partition. newest_timestamp is the largest max_timestamp up to here, so that"
        " a time is found by one step into an index.",
    )
    op.create_index(
        "idx_segments_batch",
        "segments",
        ["topic_id", "partition_id", "producer_id", "producer_epoch", "first_sequence"],
        unique=True,
        sqlite_where=sa.text("producer_id IS NOT NULL"),
        postgresql_where=sa.text("producer_id IS NOT NULL"),
    )
    op.create_index("idx_segments_location", "segments", ["topic_id", "partition_id", "base_offset"], unique=True)
    op.create_index(
        "idx_segments_newest_timestamp",
        "segments",
        ["topic_id", "partition_id", "newest_timestamp", "base_offset"],
        unique=False,
    )
    op.create_index(
        "idx_segments_offsets", "segments", ["topic_id", "partition_id", "base_offset", "end_offset"], unique=False
    )
    op.create_index("idx_segments_s3_path", "segments", ["s3_bucket", "s3_key"], unique=True)
