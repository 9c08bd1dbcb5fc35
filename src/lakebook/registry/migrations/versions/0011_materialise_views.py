"""Views: what they are, their tables and sources, which ranges are stale or frozen, and who builds what.

Revision 0011, after 0010.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0011"
down_revision = "0010"


def _json() -> sa.types.TypeEngine[Any]:
    return sa.JSON().with_variant(JSONB(), "postgresql")


def _name() -> sa.types.TypeEngine[str]:
    return sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def _number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def upgrade() -> None:
    _mark_ranges()
    _add_views()
    _add_sources()
    _add_claims()


def _mark_ranges() -> None:
    op.add_column("lakehouse_partitions", _number("stale_at", nullable=True))
    op.add_column("lakehouse_partitions", _number("frozen_at", nullable=True))
    op.create_index("idx_lakehouse_partitions_begin", "lakehouse_partitions", ["view_set_name", "begin_insert_time"])
    op.add_column("tables", _number("view_id", nullable=True))


def _add_views() -> None:
    op.create_table(
        "views",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), sa.Identity(), nullable=False),
        sa.Column("name", _name(), nullable=False),
        sa.Column("definition", _json(), nullable=False),
        sa.Column("schema_hash", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("last_error", sa.Text, nullable=True),
        _number("failed_at", nullable=True),
        _number("retry_at", nullable=True),
        _number("created_at"),
        _number("updated_at"),
        sa.PrimaryKeyConstraint("id", name="pk_views"),
        sa.UniqueConstraint("name", name="uq_views_name"),
        sa.CheckConstraint("state IN ('active', 'paused')", name=op.f("ck_views_state")),
        sa.CheckConstraint("failures >= 0", name=op.f("ck_views_failures")),
        sqlite_autoincrement=True,
        comment="Queries that are materialised over ranges of time: what each is, and how its upkeep stands.",
    )
    op.create_table(
        "view_instances",
        _number("view_id"),
        sa.Column("instance", _name(), nullable=False),
        _number("table_id"),
        sa.PrimaryKeyConstraint("view_id", "instance", name="pk_view_instances"),
        sa.ForeignKeyConstraint(["view_id"], ["views.id"], name="fk_view_instances_view_id"),
        comment="The table that holds the rows of each instance of a view; made with its first range.",
    )


def _add_sources() -> None:
    op.create_table(
        "view_sources",
        _number("view_id"),
        sa.Column("name", _name(), nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        _number("source_id"),
        sa.Column("event_time", sa.Text, nullable=False),
        sa.Column("field_id", sa.Integer, nullable=True),
        sa.PrimaryKeyConstraint("view_id", "name", name="pk_view_sources"),
        sa.ForeignKeyConstraint(["view_id"], ["views.id"], name="fk_view_sources_view_id"),
        sa.CheckConstraint("kind IN ('topic', 'table')", name=op.f("ck_view_sources_kind")),
        sa.CheckConstraint("(kind = 'table') = (field_id IS NOT NULL)", name=op.f("ck_view_sources_field_id")),
        comment="The topics and tables that each view reads, and the column that is their event time.",
    )
    op.create_index("idx_view_sources_source", "view_sources", ["kind", "source_id"])


def _add_claims() -> None:
    op.create_table(
        "view_claims",
        _number("view_id"),
        sa.Column("instance", _name(), nullable=False),
        _number("begin_time"),
        _number("end_time"),
        sa.Column("token", sa.Text, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        _number("expires_at"),
        sa.Column("dirty", sa.Boolean, nullable=False),
        sa.Column("frozen", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("view_id", "instance", "begin_time", name="pk_view_claims"),
        sa.ForeignKeyConstraint(["view_id"], ["views.id"], name="fk_view_claims_view_id"),
        sa.CheckConstraint("begin_time < end_time", name=op.f("ck_view_claims_range")),
        comment="Ranges that somebody builds now. Taken before the sources are read; the token fences a former holder.",
    )
