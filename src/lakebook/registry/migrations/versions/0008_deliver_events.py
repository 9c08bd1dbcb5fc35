"""Events are delivered, and tables looked after: the scheduler, deliveries, dead letters and maintenance.

Revision 0008, after 0007.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0008"
down_revision = "0007"


def _json() -> sa.types.TypeEngine[Any]:
    return sa.JSON().with_variant(JSONB(), "postgresql")


def _id() -> sa.Column[int]:
    return sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), sa.Identity(), nullable=False)


def _number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def upgrade() -> None:
    op.add_column("book", sa.Column("events_horizon", sa.Text, nullable=True))
    _add_delivery()
    _add_maintenance()
    _add_updates()
    _add_small_files()


def _add_delivery() -> None:
    op.create_table(
        "schedulers",
        sa.Column("name", sa.Text, nullable=False),
        _number("token"),
        sa.Column("holder", sa.Text, nullable=True),
        _number("beat"),
        _number("claimed_at"),
        _number("renewed_at"),
        sa.Column("status", _json(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_schedulers"),
        sa.CheckConstraint("token > 0", name=op.f("ck_schedulers_token")),
        comment="Who delivers events now. The token grows with every holder and fences the former.",
    )
    op.create_table(
        "deliveries",
        sa.Column("subscriber", sa.Text, nullable=False),
        _number("object_id"),
        _number("next_sequence"),
        _number("known_sequence"),
        sa.Column("refresh", sa.Boolean, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("last_error", sa.Text, nullable=True),
        _number("since"),
        _number("retry_at"),
        sa.PrimaryKeyConstraint("subscriber", "object_id", name="pk_deliveries"),
        sa.CheckConstraint("next_sequence > 0 AND attempts >= 0", name=op.f("ck_deliveries_counters")),
        comment="Lake objects of which a subscriber has not taken all events that its cursor has passed.",
    )
    op.create_table(
        "dead_letters",
        _id(),
        sa.Column("subscriber", sa.Text, nullable=False),
        _number("object_id"),
        sa.Column("object_kind", sa.Text, nullable=False),
        _number("event_id"),
        _number("sequence"),
        sa.Column("table_name", sa.Text, nullable=False),
        sa.Column("operation", sa.Text, nullable=False),
        sa.Column("key", _json(), nullable=False),
        sa.Column("row_after", _json(), nullable=True),
        sa.Column("row_before", _json(), nullable=True),
        _number("occurred_at"),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        _number("parked_at"),
        _number("redriven_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_dead_letters"),
        sqlite_autoincrement=True,
        comment="Events that a subscriber could not take after its last attempt.",
    )
    op.create_index("idx_dead_letters_subscriber", "dead_letters", ["subscriber", "id"])


def _add_maintenance() -> None:
    op.create_table(
        "requests",
        sa.Column("request_key", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("component", sa.Text, nullable=False),
        _number("object_id"),
        sa.Column("argument", _json(), nullable=False),
        _number("requested_at"),
        sa.Column("requested_by", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("request_key", name="pk_requests"),
        sa.CheckConstraint("kind IN ('refresh', 'tag')", name=op.f("ck_requests_kind")),
        comment="What any process asks of the one that runs the components; a request stays until it is met.",
    )
    op.create_index("idx_requests_component", "requests", ["component", "requested_at"])
    op.create_table(
        "pauses",
        sa.Column("component", sa.Text, nullable=False),
        _number("table_id"),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("paused_by", sa.Text, nullable=False),
        _number("since"),
        sa.PrimaryKeyConstraint("component", "table_id", name="pk_pauses"),
        comment="Components that rest: all of them ('*') or one, on all tables (0) or one.",
    )
    op.create_table(
        "maintenance_history",
        _id(),
        sa.Column("component", sa.Text, nullable=False),
        _number("table_id", nullable=True),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("detail", _json(), nullable=False),
        _number("started_at"),
        _number("finished_at"),
        sa.PrimaryKeyConstraint("id", name="pk_maintenance_history"),
        sa.CheckConstraint("outcome IN ('done', 'failed', 'yielded')", name=op.f("ck_maintenance_history_outcome")),
        sqlite_autoincrement=True,
        comment="What components have done to which table, when and why.",
    )
    op.create_index("idx_maintenance_history_component", "maintenance_history", ["component", "id"])
    op.create_index("idx_maintenance_history_table", "maintenance_history", ["table_id", "id"])


def _add_updates() -> None:
    op.create_table(
        "metadata_updates",
        _number("table_id"),
        _number("version"),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("last_error", sa.Text, nullable=True),
        _number("created_at"),
        _number("started_at", nullable=True),
        _number("finished_at", nullable=True),
        sa.PrimaryKeyConstraint("table_id", "version", name="pk_metadata_updates"),
        sa.CheckConstraint(
            "state IN ('pending', 'processing', 'completed', 'failed')", name=op.f("ck_metadata_updates_state")
        ),
        comment="What is owed to Iceberg, per version of each table, and what became of it.",
    )
    unfinished = sa.text("state <> 'completed'")
    op.create_index(
        "idx_metadata_updates_owed",
        "metadata_updates",
        ["table_id", "version"],
        sqlite_where=unfinished,
        postgresql_where=unfinished,
    )
    op.create_index("idx_metadata_updates_finished_at", "metadata_updates", ["finished_at"])


def _add_small_files() -> None:
    live = sa.text("to_version IS NULL AND content = 0")
    op.create_index(
        "idx_table_files_small",
        "table_files",
        ["table_id", "file_size", "id"],
        sqlite_where=live,
        postgresql_where=live,
    )
