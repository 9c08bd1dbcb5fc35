"""What a rebuild of the registry could not bring back.

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
