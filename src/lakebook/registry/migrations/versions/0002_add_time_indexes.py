"""Indexes to find segments and committed offsets by their time.

Revision 0002, after 0001.
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_index("idx_segments_created_at", "segments", ["created_at"])
    op.create_index("idx_consumer_offsets_committed_at", "consumer_offsets", ["committed_at"])
