"""Footers get a table of their own, so that listing ranges does not drag them along.

They are copied by the database itself, in chunks that are committed one by one. A run that
was stopped has left whole chunks, and the next one goes on with what is missing. The footers
stay in the ranges' rows too: until revision 0005, who reads them there still finds them.

Revision 0004, after 0003.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from lakebook import failpoints
from lakebook.errors import MigrationFailed

revision = "0004"
down_revision = "0003"

NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

CHUNK_ROWS = 500
CHUNK_BYTES = 16 * 2**20
BEFORE_ALL = -(2**63)

_MISSING = """
    FROM lakehouse_partitions AS p
    WHERE p.id > :after AND p.file_metadata IS NOT NULL AND p.file_path IS NOT NULL
      AND NOT EXISTS (SELECT 1 FROM partition_metadata AS m WHERE m.file_path = p.file_path)
"""
NEXT_LENGTHS = sa.text(f"SELECT p.id, length(p.file_metadata) {_MISSING} ORDER BY p.id LIMIT :most")
COPY_CHUNK = sa.text(
    "INSERT INTO partition_metadata"
    " (file_path, partition_format_version, num_rows, file_size, insert_time, metadata)"
    f" SELECT p.file_path, p.partition_format_version, p.num_rows, p.file_size, p.updated, p.file_metadata {_MISSING}"
    " AND p.id <= :upto"
)
COUNT_INLINE = sa.text(
    "SELECT count(*), coalesce(sum(length(file_metadata)), 0) FROM lakehouse_partitions WHERE file_metadata IS NOT NULL"
)
COUNT_MOVED = sa.text(
    "SELECT count(*), coalesce(sum(length(m.metadata)), 0)"
    " FROM lakehouse_partitions AS p JOIN partition_metadata AS m ON m.file_path = p.file_path"
    " WHERE p.file_metadata IS NOT NULL"
)


def upgrade() -> None:
    connection = op.get_bind()
    _create_table()
    _commit(connection)
    after = BEFORE_ALL
    while (upto := _end_of_chunk(connection, after)) is not None:
        connection.execute(COPY_CHUNK, {"after": after, "upto": upto})
        _commit(connection)
        failpoints.reach("migration.footers_moved")
        after = upto
    _verify(connection)


def _create_table() -> None:
    # A run that was stopped after its first chunks has left the table.
    op.create_table(
        "partition_metadata",
        sa.Column("file_path", NAME, nullable=False),
        sa.Column("partition_format_version", sa.Integer(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=True),
        sa.Column("file_size", sa.BigInteger(), nullable=False),
        sa.Column("insert_time", sa.BigInteger(), nullable=False),
        sa.Column("metadata", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("file_size >= 0", name=op.f("ck_partition_metadata_file_size")),
        sa.CheckConstraint("num_rows >= 0", name=op.f("ck_partition_metadata_num_rows")),
        sa.PrimaryKeyConstraint("file_path", name=op.f("pk_partition_metadata")),
        comment="Parquet footers by the path of their file, so that a reader plans without opening it.",
        if_not_exists=True,
    )
    op.create_index("idx_partition_metadata_insert_time", "partition_metadata", ["insert_time"], if_not_exists=True)


def _commit(connection: sa.Connection) -> None:
    """Commit what was done so far, and begin anew for what comes.

    Alembic's autocommit block would leave both drivers in a mode in which they begin transactions
    by themselves. Here they never do: the engine sends BEGIN as a statement, so this may too.
    """
    connection.exec_driver_sql("COMMIT")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.dialect.name == "sqlite" else "BEGIN")


def _end_of_chunk(connection: sa.Connection, after: int) -> int | None:
    """The last id of the next chunk: a bounded number of rows and bytes, and at least one row."""
    rows = connection.execute(NEXT_LENGTHS, {"after": after, "most": CHUNK_ROWS}).all()
    upto, size = None, 0
    for number, length in rows:
        size += length
        if upto is not None and size > CHUNK_BYTES:
            break
        upto = int(number)
    return upto


def _verify(connection: sa.Connection) -> None:
    inline = connection.execute(COUNT_INLINE).one()
    moved = connection.execute(COUNT_MOVED).one()
    if tuple(inline) != tuple(moved):
        raise MigrationFailed(
            f"the ranges hold {inline[0]} footers of {inline[1]} bytes,"
            f" and partition_metadata {moved[0]} of {moved[1]} bytes",
            on=f"revision {revision}",
            remedy="Look for footers without a file_path or with other bytes there, then run `lakebook migrate` again",
        )
