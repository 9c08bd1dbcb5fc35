"""Ranges of materialised views, each with its Parquet footer in its own row.

Revision 0003, after 0002.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "lakehouse_partitions",
        sa.Column("id", ID, sa.Identity(always=False), nullable=False),
        sa.Column("view_set_name", NAME, nullable=False),
        sa.Column("view_instance_id", NAME, nullable=False),
        sa.Column("begin_insert_time", sa.BigInteger(), nullable=False),
        sa.Column("end_insert_time", sa.BigInteger(), nullable=False),
        sa.Column("min_event_time", sa.BigInteger(), nullable=True),
        sa.Column("max_event_time", sa.BigInteger(), nullable=True),
        sa.Column("schema_hash", sa.Text(), nullable=False),
        sa.Column("source_hash", sa.Text(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("file_path", NAME, nullable=True),
        sa.Column("file_size", sa.BigInteger(), nullable=False),
        sa.Column("partition_format_version", sa.Integer(), nullable=False),
        sa.Column("sort_order", JSON, nullable=True),
        sa.Column("updated", sa.BigInteger(), nullable=False),
        sa.Column("file_metadata", sa.LargeBinary(), nullable=True),
        sa.CheckConstraint(
            "(min_event_time IS NULL) = (max_event_time IS NULL) AND min_event_time <= max_event_time",
            name=op.f("ck_lakehouse_partitions_event_time"),
        ),
        sa.CheckConstraint("begin_insert_time < end_insert_time", name=op.f("ck_lakehouse_partitions_insert_time")),
        sa.CheckConstraint("file_size >= 0", name=op.f("ck_lakehouse_partitions_file_size")),
        sa.CheckConstraint("num_rows >= 0", name=op.f("ck_lakehouse_partitions_num_rows")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lakehouse_partitions")),
        sa.UniqueConstraint(
            "view_set_name",
            "view_instance_id",
            "schema_hash",
            "begin_insert_time",
            name=op.f("uq_lakehouse_partitions_range"),
        ),
        comment="Ranges of materialised views, half-open in the time of insertion. An empty range has no file.",
        sqlite_autoincrement=True,
    )
    op.create_index("idx_lakehouse_partitions_file_path", "lakehouse_partitions", ["file_path"], unique=True)
