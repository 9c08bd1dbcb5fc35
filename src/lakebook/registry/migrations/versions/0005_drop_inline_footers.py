"""Footers are no longer kept in the rows of the ranges.

Not before each of them is found in `partition_metadata`, byte for byte.

Revision 0005, after 0004.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from lakebook.errors import MigrationFailed

revision = "0005"
down_revision = "0004"

LOCK = "LOCK TABLE lakehouse_partitions, partition_metadata IN ACCESS EXCLUSIVE MODE"
COUNT_LOST = sa.text(
    "SELECT count(*), count(m.file_path) FROM lakehouse_partitions AS p"
    " LEFT JOIN partition_metadata AS m ON m.file_path = p.file_path"
    " WHERE p.file_metadata IS NOT NULL AND (m.file_path IS NULL OR m.metadata <> p.file_metadata)"
)


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        # Nobody may add a footer between the look and the drop. On SQLite nobody can.
        op.execute(LOCK)
    lost, different = connection.execute(COUNT_LOST).one()
    if lost:
        raise MigrationFailed(
            f"{lost - different} footers are missing in partition_metadata and {different} differ there",
            on=f"revision {revision}",
            remedy="Remove those that differ there, set schema_version back to 0003 and run `lakebook migrate`"
            " again: it copies what is missing",
        )
    # In place on SQLite too: making the table anew would forget which ids were given before.
    op.drop_column("lakehouse_partitions", "file_metadata")
