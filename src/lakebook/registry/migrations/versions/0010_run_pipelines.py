"""Pipelines: what they do, how far they have come in their sources, and the batches they run.

Revision 0010, after 0009.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0010"
down_revision = "0009"


def _json() -> sa.types.TypeEngine[Any]:
    return sa.JSON().with_variant(JSONB(), "postgresql")


def _name() -> sa.types.TypeEngine[str]:
    return sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def _number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def upgrade() -> None:
    _add_pipelines()
    _add_offsets()
    _add_batches()


def _add_pipelines() -> None:
    op.create_table(
        "pipelines",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), sa.Identity(), nullable=False),
        sa.Column("name", _name(), nullable=False),
        _number("target_id"),
        _number("dead_letters_id", nullable=True),
        sa.Column("definition", _json(), nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        _number("token"),
        sa.Column("holder", sa.Text, nullable=True),
        _number("held_until", nullable=True),
        _number("last_batch"),
        _number("record_count"),
        _number("row_count"),
        _number("dead_count"),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("last_error", sa.Text, nullable=True),
        _number("failed_at", nullable=True),
        _number("retry_at", nullable=True),
        _number("landed_at", nullable=True),
        _number("created_at"),
        _number("updated_at"),
        sa.PrimaryKeyConstraint("id", name="pk_pipelines"),
        sa.UniqueConstraint("name", name="uq_pipelines_name"),
        sa.CheckConstraint("state IN ('active', 'paused', 'stopped')", name=op.f("ck_pipelines_state")),
        sqlite_autoincrement=True,
        comment="From topics or tables into a table: what each pipeline does, who runs it, and how it stands.",
    )
    op.create_index("idx_pipelines_target", "pipelines", ["target_id"])


def _add_offsets() -> None:
    op.create_table(
        "pipeline_offsets",
        _number("pipeline_id"),
        sa.Column("kind", sa.Text, nullable=False),
        _number("source_id"),
        sa.Column("partition_id", sa.Integer, nullable=False),
        _number("first_offset"),
        _number("next_offset"),
        sa.PrimaryKeyConstraint("pipeline_id", "kind", "source_id", "partition_id", name="pk_pipeline_offsets"),
        sa.CheckConstraint("kind IN ('topic', 'table')", name=op.f("ck_pipeline_offsets_kind")),
        sa.CheckConstraint(
            "0 <= first_offset AND first_offset <= next_offset", name=op.f("ck_pipeline_offsets_offsets")
        ),
        comment="How far each pipeline has come in each partition of its sources; changed with the files it made.",
    )
    op.create_index("idx_pipeline_offsets_source", "pipeline_offsets", ["kind", "source_id"])


def _add_batches() -> None:
    op.create_table(
        "pipeline_batches",
        _number("pipeline_id"),
        _number("number"),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("ranges", _json(), nullable=False),
        _number("record_count"),
        _number("row_count", nullable=True),
        _number("dead_count", nullable=True),
        _number("file_count", nullable=True),
        _number("total_size", nullable=True),
        _number("version", nullable=True),
        _number("planned_at"),
        _number("landed_at", nullable=True),
        sa.PrimaryKeyConstraint("pipeline_id", "number", name="pk_pipeline_batches"),
        sa.CheckConstraint("state IN ('planned', 'landed')", name=op.f("ck_pipeline_batches_state")),
        sa.CheckConstraint("(state = 'landed') = (landed_at IS NOT NULL)", name=op.f("ck_pipeline_batches_landed_at")),
        comment="Batches of pipelines: the ranges of their sources that each reads, decided before it runs.",
    )
    op.create_index("idx_pipeline_batches_landed_at", "pipeline_batches", ["landed_at"])
