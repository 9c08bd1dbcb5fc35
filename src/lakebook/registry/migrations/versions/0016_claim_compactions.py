"""Who compacts which table now, so that several workers share the tables.

Revision 0016, after 0015.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"

_CHANGED = {"fillfactor": 70, "autovacuum_vacuum_scale_factor": 0.05, "autovacuum_vacuum_cost_delay": 0}


def upgrade() -> None:
    op.create_table(
        "compaction_claims",
        sa.Column("table_id", sa.BigInteger, nullable=False),
        sa.Column("token", sa.Text, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("table_id", name="pk_compaction_claims"),
        sa.ForeignKeyConstraint(["table_id"], ["tables.id"], name="fk_compaction_claims_table_id"),
        comment="Tables that somebody compacts now. Taken before files are chosen; the token fences a former holder.",
        postgresql_with=_CHANGED,
    )
