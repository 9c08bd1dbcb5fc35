"""Restored books: when the backup was taken, and when it was restored, by the clock of the store.

Revision 0017, after 0016.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    for name in ("store_backup_at", "store_restored_at"):
        op.add_column("book", sa.Column(name, sa.BigInteger, nullable=True))
