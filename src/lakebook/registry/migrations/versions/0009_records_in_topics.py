"""Topics hold records: members of groups, readers' leases, folders of segments, merges, and Iceberg tables of topics.

Revision 0009, after 0008.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0009"
down_revision = "0008"


def _json() -> sa.types.TypeEngine[Any]:
    return sa.JSON().with_variant(JSONB(), "postgresql")


def _name() -> sa.types.TypeEngine[str]:
    return sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def _number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def upgrade() -> None:
    _add_appending()
    _add_reading()
    _add_mirrors()
    _add_members()


def _add_appending() -> None:
    op.create_table(
        "sink_batches",
        _number("topic_id"),
        sa.Column("sink_id", sa.Text, nullable=False),
        _number("batch_id"),
        sa.Column("commit_id", sa.Text, nullable=False),
        _number("updated_at"),
        sa.PrimaryKeyConstraint("topic_id", "sink_id", name="pk_sink_batches"),
        sa.ForeignKeyConstraint(["topic_id"], ["topics.id"], name="fk_sink_batches_topic_id"),
        comment="The last batch that each streaming query has appended to a topic: one that is repeated is known.",
    )
    op.create_table(
        "stream_folders",
        sa.Column("folder", _name(), nullable=False),
        _number("topic_id"),
        sa.Column("partition_id", sa.Integer, nullable=True),
        _number("token", nullable=True),
        sa.Column("commit_id", sa.Text, nullable=True),
        _number("opened_at"),
        _number("ended_at", nullable=True),
        _number("swept_at", nullable=True),
        sa.PrimaryKeyConstraint("folder", name="pk_stream_folders"),
        sa.CheckConstraint("(token IS NULL) <> (commit_id IS NULL)", name=op.f("ck_stream_folders_fence")),
        comment="Folders that segments are written to, until they are swept: each has a fence that tells when it is"
        " quiet.",
    )
    op.create_index("idx_stream_folders_turn", "stream_folders", ["topic_id", "partition_id", "token"])
    op.create_index("idx_stream_folders_ended_at", "stream_folders", ["ended_at"])


def _add_reading() -> None:
    op.create_table(
        "retired_segments",
        sa.Column("file_path", _name(), nullable=False),
        _number("topic_id"),
        sa.Column("partition_id", sa.Integer, nullable=False),
        _number("base_offset"),
        _number("end_offset"),
        _number("file_size"),
        _number("sequence"),
        _number("retired_at"),
        sa.PrimaryKeyConstraint("file_path", name="pk_retired_segments"),
        comment="Files of segments that a merge has replaced, while a reader may still use them.",
    )
    op.create_index("idx_retired_segments_place", "retired_segments", ["topic_id", "partition_id", "end_offset"])
    op.create_table(
        "topic_leases",
        sa.Column("id", sa.Text, nullable=False),
        _number("topic_id"),
        sa.Column("partition_id", sa.Integer, nullable=False),
        _number("from_offset"),
        _number("sequence"),
        sa.Column("holder", sa.Text, nullable=False),
        _number("created_at"),
        _number("expires_at"),
        sa.PrimaryKeyConstraint("id", "topic_id", "partition_id", name="pk_topic_leases"),
        comment="Readers of topics at work: each pins a partition from an offset on.",
    )
    op.create_index("idx_topic_leases_place", "topic_leases", ["topic_id", "partition_id", "from_offset"])


def _add_mirrors() -> None:
    op.add_column("tables", sa.Column("topic_id", sa.BigInteger, nullable=True))
    live = sa.text("topic_id IS NOT NULL AND deleted_at IS NULL")
    op.create_index("idx_tables_topic", "tables", ["topic_id"], unique=True, sqlite_where=live, postgresql_where=live)
    op.create_table(
        "mirror_positions",
        _number("topic_id"),
        sa.Column("partition_id", sa.Integer, nullable=False),
        _number("next_offset"),
        sa.PrimaryKeyConstraint("topic_id", "partition_id", name="pk_mirror_positions"),
        sa.CheckConstraint("next_offset >= 0", name=op.f("ck_mirror_positions_next_offset")),
        comment="Up to which offset each partition of a topic is in the topic's Iceberg table.",
    )


def _add_members() -> None:
    op.create_table(
        "group_members",
        _number("consumer_group_id"),
        sa.Column("member_id", sa.Text, nullable=False),
        sa.Column("topics", _json(), nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        _number("joined_at"),
        _number("expires_at"),
        sa.PrimaryKeyConstraint("consumer_group_id", "member_id", name="pk_group_members"),
        sa.ForeignKeyConstraint(
            ["consumer_group_id"], ["consumer_groups.id"], name="fk_group_members_consumer_group_id"
        ),
        comment="Who reads for a group now. A member that is not heard of until expires_at may be removed.",
    )
    op.create_table(
        "group_assignments",
        _number("consumer_group_id"),
        _number("topic_id"),
        sa.Column("partition_id", sa.Integer, nullable=False),
        sa.Column("member_id", sa.Text, nullable=True),
        sa.Column("wanted_by", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("consumer_group_id", "topic_id", "partition_id", name="pk_group_assignments"),
        sa.ForeignKeyConstraint(
            ["consumer_group_id"], ["consumer_groups.id"], name="fk_group_assignments_consumer_group_id"
        ),
        comment="Which member of a group reads which partition: one, or none while it passes on.",
    )
    op.create_index("idx_group_assignments_topic", "group_assignments", ["topic_id"])
