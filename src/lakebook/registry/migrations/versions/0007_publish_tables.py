"""Tables are published as Iceberg: pointers, snapshots, manifests, deletes, and what outside engines bring.

Revision 0007, after 0006.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0007"
down_revision = "0006"


def _json() -> sa.types.TypeEngine[Any]:
    return sa.JSON().with_variant(JSONB(), "postgresql")


def _name() -> sa.types.TypeEngine[str]:
    return sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def _number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def upgrade() -> None:
    _change_tables()
    _add_publishing()
    _add_debts()


def _change_tables() -> None:
    op.add_column("book", sa.Column("sweeps", sa.BigInteger, nullable=False, server_default=sa.text("0")))
    op.add_column("tables", sa.Column("hold_until", sa.BigInteger, nullable=False, server_default=sa.text("0")))
    op.add_column("table_files", sa.Column("content", sa.Integer, nullable=False, server_default=sa.text("0")))
    op.add_column("table_files", sa.Column("location", sa.Text, nullable=True))
    op.add_column("table_files", _number("sequence_number", nullable=True))
    op.add_column("table_files", sa.Column("referenced_path", sa.Text, nullable=True))
    op.drop_index("idx_table_files_path", table_name="table_files")
    op.create_index("idx_table_files_path", "table_files", ["file_path"])
    live = sa.text("to_version IS NULL")
    op.create_index(
        "idx_table_files_live_path",
        "table_files",
        ["file_path"],
        unique=True,
        sqlite_where=live,
        postgresql_where=live,
    )
    op.create_index("idx_table_files_from", "table_files", ["table_id", "from_version", "id"])
    deletes = sa.text("content <> 0")
    op.create_index(
        "idx_table_files_deletes", "table_files", ["table_id", "id"], sqlite_where=deletes, postgresql_where=deletes
    )


def _add_publishing() -> None:
    op.create_table(
        "iceberg_tables",
        sa.Column("table_id", sa.BigInteger, nullable=False),
        sa.Column("location", sa.Text, nullable=False),
        sa.Column("metadata_location", sa.Text, nullable=False),
        _number("metadata_number"),
        _number("snapshot_id", nullable=True),
        _number("last_sequence"),
        _number("version"),
        _number("properties_at"),
        _number("published_at"),
        sa.PrimaryKeyConstraint("table_id", name="pk_iceberg_tables"),
        sa.ForeignKeyConstraint(["table_id"], ["tables.id"], name="fk_iceberg_tables_table_id"),
        comment="What each table is published as: the pointer to its Iceberg metadata, and the version that covers.",
    )
    op.create_table(
        "table_snapshots",
        _number("table_id"),
        _number("snapshot_id"),
        _number("parent_snapshot_id", nullable=True),
        _number("sequence_number"),
        _number("timestamp_ms"),
        sa.Column("manifest_list", sa.Text, nullable=False),
        sa.Column("summary", _json(), nullable=False),
        sa.Column("schema_id", sa.Integer, nullable=True),
        _number("version", nullable=True),
        _number("pinned_version"),
        sa.Column("metadata_location", sa.Text, nullable=False),
        sa.Column("is_ours", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("table_id", "snapshot_id", name="pk_table_snapshots"),
        sa.ForeignKeyConstraint(["table_id"], ["tables.id"], name="fk_table_snapshots_table_id"),
        comment="The Iceberg snapshots that a table's metadata lists. What they contain is not retired.",
    )
    op.create_index("idx_table_snapshots_pinned", "table_snapshots", ["table_id", "pinned_version"])
    op.create_table(
        "iceberg_files",
        sa.Column("file_path", _name(), nullable=False),
        _number("table_id"),
        sa.Column("kind", sa.Text, nullable=False),
        _number("file_size"),
        _number("first_file_id", nullable=True),
        _number("last_file_id", nullable=True),
        _number("added_at"),
        sa.PrimaryKeyConstraint("file_path", name="pk_iceberg_files"),
        sa.CheckConstraint(
            "kind IN ('metadata', 'manifest_list', 'manifest', 'statistics')", name=op.f("ck_iceberg_files_kind")
        ),
        comment="Iceberg's own files of published tables: metadata files, manifest lists and manifests.",
    )
    op.create_index("idx_iceberg_files_table", "iceberg_files", ["table_id", "kind"])
    op.create_table(
        "snapshot_manifests",
        _number("table_id"),
        _number("snapshot_id"),
        sa.Column("file_path", _name(), nullable=False),
        sa.PrimaryKeyConstraint("table_id", "snapshot_id", "file_path", name="pk_snapshot_manifests"),
        sqlite_with_rowid=False,
        comment="Which manifests each snapshot lists.",
    )
    op.create_index("idx_snapshot_manifests_path", "snapshot_manifests", ["file_path"])


def _add_debts() -> None:
    op.create_table(
        "branch_files",
        sa.Column("file_path", _name(), nullable=False),
        _number("table_id"),
        _number("file_size"),
        _number("added_at"),
        sa.PrimaryKeyConstraint("file_path", name="pk_branch_files"),
        comment="Files that only snapshots of branches, or staged ones, contain.",
    )
    op.create_index("idx_branch_files_table", "branch_files", ["table_id"])
    op.create_table(
        "footer_debts",
        sa.Column("file_path", _name(), nullable=False),
        _number("table_id"),
        _number("added_at"),
        _number("due_at"),
        sa.Column("last_error", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("file_path", name="pk_footer_debts"),
        comment="Files of outside engines whose footer and checksum have not been taken yet.",
    )
    op.create_index("idx_footer_debts_due_at", "footer_debts", ["due_at"])
