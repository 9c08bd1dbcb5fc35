"""Tables: their metadata, files, statistics, versions, inserts, horizons and leases.

Revision 0006, after 0005.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006"
down_revision = "0005"

NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def _id() -> sa.Column[int]:
    kind = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    return sa.Column("id", kind, sa.Identity(), primary_key=True)


def _time(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def upgrade() -> None:
    op.create_table(
        "namespaces",
        _id(),
        sa.Column("name", NAME, nullable=False),
        sa.Column("properties", JSON, nullable=False),
        _time("created_at"),
        sa.UniqueConstraint("name"),
        sqlite_autoincrement=True,
        comment="What tables are grouped by.",
    )
    op.create_table(
        "tables",
        _id(),
        sa.Column("object_id", sa.BigInteger, sa.ForeignKey("lake_objects.id"), nullable=False),
        sa.Column("namespace_id", sa.BigInteger, sa.ForeignKey("namespaces.id"), nullable=False),
        sa.Column("name", NAME, nullable=False),
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
        sa.CheckConstraint("version >= 0 AND schema_version >= 1 AND last_file_id >= 0", name="counters"),
        sa.CheckConstraint(
            "row_count >= 0 AND file_count >= 0 AND total_size >= 0 AND deleted_rows >= 0", name="totals"
        ),
        sqlite_autoincrement=True,
        comment="Tables, with the totals over their visible files. A dropped one keeps its row until it is emptied.",
    )
    op.create_index(
        "idx_tables_live_name",
        "tables",
        ["namespace_id", "name"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_index("idx_tables_object", "tables", ["object_id"], unique=True)
    op.create_table(
        "table_metadata",
        _id(),
        sa.Column("table_id", sa.BigInteger, sa.ForeignKey("tables.id"), nullable=False),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("from_version", sa.BigInteger, nullable=False),
        sa.Column("schema", JSON, nullable=False),
        sa.Column("storage_engine", sa.Text, nullable=False),
        sa.Column("engine_config", JSON, nullable=False),
        sa.Column("format", sa.Text, nullable=False),
        sa.Column("compression", sa.Text, nullable=False),
        sa.Column("partition_by", JSON, nullable=False),
        sa.Column("sort_by", JSON, nullable=False),
        sa.Column("properties", JSON, nullable=False),
        _time("last_modified"),
        _time("created_at"),
        _time("updated_at"),
        sa.UniqueConstraint("table_id", "schema_version"),
        sa.CheckConstraint("schema_version >= 1", name="schema_version"),
        sqlite_autoincrement=True,
        comment="Each state of a table's schema, partitioning and sort order, with the version it began at.",
    )
    op.create_table(
        "table_files",
        sa.Column("table_id", sa.BigInteger, sa.ForeignKey("tables.id"), primary_key=True),
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("file_name", sa.Text, nullable=False),
        sa.Column("file_path", NAME, nullable=False),
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
        sa.CheckConstraint("file_size >= 0 AND row_count >= 0 AND row_groups >= 0", name="sizes"),
        sa.CheckConstraint("to_version > from_version", name="interval"),
        sa.CheckConstraint("retired_at IS NULL OR to_version IS NOT NULL", name="retired"),
        comment="Write-once files of tables; one is visible in the versions from_version <= v < to_version.",
    )
    op.create_index("idx_table_files_path", "table_files", ["file_path"], unique=True)
    op.create_index("idx_table_files_commit", "table_files", ["commit_id"])
    op.create_index(
        "idx_table_files_ended",
        "table_files",
        ["table_id", "to_version", "id"],
        sqlite_where=sa.text("to_version IS NOT NULL AND retired_at IS NULL"),
        postgresql_where=sa.text("to_version IS NOT NULL AND retired_at IS NULL"),
    )
    op.create_index(
        "idx_table_files_unmeasured",
        "table_files",
        ["table_id", "id"],
        sqlite_where=sa.text("NOT has_statistics"),
        postgresql_where=sa.text("NOT has_statistics"),
    )
    op.create_table(
        "table_stats",
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
    op.create_table(
        "file_column_stats",
        sa.Column("table_id", sa.BigInteger, primary_key=True),
        sa.Column("file_id", sa.BigInteger, primary_key=True, autoincrement=False),
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
        sqlite_with_rowid=False,
        comment="Bounds and counts per file and column, in a form whose byte order is the order of the values.",
    )
    op.create_index(
        "idx_file_column_stats_range", "file_column_stats", ["table_id", "field_id", "width", "low_key", "file_id"]
    )
    op.create_table(
        "table_versions",
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
        sa.Column("summary", JSON, nullable=False),
        _time("committed_at"),
        sa.CheckConstraint(
            "operation IN ('create', 'append', 'overwrite', 'delete', 'replace', 'schema')", name="operation"
        ),
        comment="The history of each table: one row per version that can still be read.",
    )
    op.create_index("idx_table_versions_committed_at", "table_versions", ["table_id", "committed_at"])
    op.create_table(
        "inserts",
        sa.Column("commit_id", sa.Text, primary_key=True),
        sa.Column("table_id", sa.BigInteger, nullable=False),
        sa.Column("folder", sa.Text, nullable=True),
        sa.Column("first_file_id", sa.BigInteger, nullable=True),
        sa.Column("last_file_id", sa.BigInteger, nullable=True),
        _time("opened_at"),
        _time("alive_until"),
        _time("swept_at", nullable=True),
        comment="Attempts to change a table's files, each with a folder of its own, until that folder is quiet.",
    )
    op.create_index("idx_inserts_swept_at", "inserts", ["swept_at", "opened_at"])
    op.create_table(
        "table_horizons",
        sa.Column("table_id", sa.BigInteger, sa.ForeignKey("tables.id"), primary_key=True),
        sa.Column("min_readable", sa.BigInteger, nullable=False),
        _time("updated_at"),
        sa.CheckConstraint("min_readable >= 0", name="min_readable"),
        comment="The oldest version that may be read. Leases share this row's lock, the cleaner takes it alone.",
    )
    op.create_table(
        "leases",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("table_id", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        _time("created_at"),
        _time("expires_at"),
        comment="Readers at work: each pins its version and all newer ones.",
    )
    op.create_index("idx_leases_table", "leases", ["table_id", "version"])
