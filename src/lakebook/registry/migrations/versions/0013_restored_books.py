"""Restored books: of when the backup was, when it was restored, and since when nothing is removed.

Revision 0013, after 0012.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    for name in ("backup_at", "restored_at", "held_at"):
        op.add_column("book", sa.Column(name, sa.BigInteger, nullable=True))
