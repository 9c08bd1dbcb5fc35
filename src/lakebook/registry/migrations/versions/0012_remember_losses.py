"""Times of which the sources of views have lost rows for ever.

Revision 0012, after 0011. Of what retention has removed before, nobody knows the times: of a topic whose log does not
begin at its first record, all rows before the first that is left count as lost.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_REMOVED = """
    INSERT INTO source_losses (kind, source_id, part, begin_time, end_time)
    SELECT 'topic', p.topic_id, p.partition_id, -4611686018427387904, (
        COALESCE(
            (
                SELECT MIN(s.min_timestamp) FROM segments AS s
                WHERE s.topic_id = p.topic_id AND s.partition_id = p.partition_id AND s.base_offset >= p.log_start
            ),
            p.updated_at
        ) / 60000 + 1
    ) * 60000
    FROM partitions AS p WHERE p.log_start > 0
"""


def upgrade() -> None:
    op.create_table(
        "source_losses",
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("source_id", sa.BigInteger, nullable=False),
        sa.Column("part", sa.Integer, nullable=False),
        sa.Column("begin_time", sa.BigInteger, nullable=False),
        sa.Column("end_time", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("kind", "source_id", "part", "begin_time", name="pk_source_losses"),
        sa.CheckConstraint("kind IN ('topic', 'table')", name=op.f("ck_source_losses_kind")),
        sa.CheckConstraint("begin_time < end_time", name=op.f("ck_source_losses_range")),
        comment="Times of which topics, and tables of views, have lost rows for ever: whole minutes, each row apart.",
    )
    op.execute(_REMOVED)
