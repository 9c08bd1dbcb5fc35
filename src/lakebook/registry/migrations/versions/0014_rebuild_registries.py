"""What a rebuild of the registry could not bring back, and what it left alone.

Revision 0014, after 0013.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "known_gaps",
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("owner_id", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("partition_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("first_number", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("last_number", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("noted_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("kind", "owner_id", "partition_id", "first_number", name="pk_known_gaps"),
        sa.CheckConstraint("kind IN ('offsets', 'versions')", name=op.f("ck_known_gaps_kind")),
        sa.CheckConstraint("0 <= first_number AND first_number <= last_number", name=op.f("ck_known_gaps_numbers")),
        comment="Offsets and versions that a rebuild of the registry could not bring back, and has reported.",
    )
    op.create_table(
        "unknown_objects",
        sa.Column("file_path", sa.Text().with_variant(sa.Text(collation="C"), "postgresql"), nullable=False),
        sa.Column("file_size", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("noted_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("file_path", name="pk_unknown_objects"),
        sa.CheckConstraint("file_size >= 0", name=op.f("ck_unknown_objects_file_size")),
        comment="Objects that a rebuild of the registry found in the warehouse, could not place, and left alone.",
    )
