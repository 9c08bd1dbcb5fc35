"""Inserts: one row per attempt to change a table's files, beside its commit row.

The row names the folder the attempt writes into. It stays after the commit is settled,
until a sweep has found the folder quiet. While the attempt is at work it says so from
time to time; one that has not for long is fenced by its commit row, never guessed dead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.commits import open_commit_row
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind, insert_into
from lakebook.registry.tables import TableRecord, current_table
from lakebook.registry.transactions import Reader, Transaction

#: What an attempt is for: to add files; to end files that it has read; to put the same rows into other files.
INSERT, REWRITE, COMPACTION = "insert", "rewrite", "compaction"

_i = schema.inserts.c
_c = schema.commits.c

INSERT_INSERT = insert_into(schema.inserts)
RENEW_INSERT = Statement(
    sa.update(schema.inserts).where(_i.commit_id == bind("of_commit")).values(alive_until=bind("until")),
    "until",
    "of_commit",
)
NOTE_IDS = Statement(
    sa.update(schema.inserts)
    .where(_i.commit_id == bind("of_commit"))
    .values(first_file_id=bind("first"), last_file_id=bind("last")),
    "first",
    "last",
    "of_commit",
)
_joined = schema.inserts.outerjoin(schema.commits, _c.id == _i.commit_id)
# Open ones whose attempt has been silent, and finished ones whose folder has not been swept quiet.
TO_SWEEP = Statement(
    sa.select(
        _i.commit_id,
        _i.table_id,
        _i.folder,
        _i.first_file_id,
        _i.last_file_id,
        _c.state,
        _c.finished_at,
        _i.opened_at,
        _i.swept_at,
    )
    .select_from(_joined)
    .where(
        _i.commit_id > bind("after"),
        sa.or_(
            sa.and_(_c.state == "open", _i.alive_until <= bind("silent_since")),
            sa.and_(
                sa.or_(_c.state.is_(None), _c.state != "open"),
                sa.or_(_i.swept_at.is_(None), _i.swept_at <= bind("swept_before")),
            ),
        ),
    )
    .order_by(_i.commit_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "silent_since",
    "swept_before",
    "most",
)
EVERY_INSERT = Statement(
    sa.select(_i.commit_id, _i.table_id, _i.folder, _c.state, _i.alive_until)
    .select_from(_joined)
    .where(_i.commit_id > bind("after"))
    .order_by(_i.commit_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
STAGED_RANGES = Statement(
    sa.select(_i.table_id, _i.first_file_id, _i.last_file_id).where(_i.first_file_id.is_not(None))
)
ANY_INSERT_OR_TABLE = Statement(
    sa.union_all(
        sa.select(schema.tables.c.id), sa.select(schema.inserts.c.table_id), sa.select(schema.leases.c.table_id)
    )
    .limit(ONE)
    .offset(ZERO)
)
# From the few open commits on: there is a row for every attempt of the last hour.
DECLARED_WORK = Statement(
    sa.select(_i.commit_id)
    .select_from(schema.commits.join(schema.inserts, _i.commit_id == _c.id))
    .where(
        # Such that no database goes by the index on kinds, in which all finished ones are.
        sa.text(f"commits.state = 'open' AND commits.kind || '' = '{REWRITE}'"),
        _i.table_id == bind("of_table"),
        _i.alive_until > bind("now"),
    )
    .limit(ONE)
    .offset(ZERO),
    "of_table",
    "now",
)
NOTE_SWEPT = Statement(
    sa.update(schema.inserts).where(_i.commit_id == bind("of_commit")).values(swept_at=bind("now")),
    "now",
    "of_commit",
)
FORGET_INSERT = Statement(sa.delete(schema.inserts).where(_i.commit_id == bind("of_commit")), "of_commit")
_p = schema.partition_metadata.c
_files = schema.table_files.c


def _deleting_footers() -> sa.Delete:
    # Only those that no file row has: a staged footer of an attempt that never committed.
    return sa.delete(schema.partition_metadata).where(
        _p.file_path >= bind("from_path"),
        _p.file_path < bind("to_path"),
        _p.file_path.not_in(
            sa.select(_files.file_path).where(_files.file_path >= bind("from_path"), _files.file_path < bind("to_path"))
        ),
    )


DELETE_STAGED_FOOTERS = Statement(_deleting_footers(), "from_path", "to_path")


def _among_any(*columns: sa.ColumnElement[Any]) -> Statement:
    clauses = [
        sa.union_all(*(sa.select(column).where(among(column, "paths", database)) for column in columns))
        for database in (SQLITE, POSTGRESQL)
    ]
    return Statement(clauses[0], "paths", postgresql=clauses[1])


KNOWN_PATHS = _among_any(
    _files.file_path,
    schema.iceberg_files.c.file_path,
    schema.branch_files.c.file_path,
    schema.temporary_files.c.file_path,
)
# Not by an index of its own: only for the few that nobody else knows.
KNOWN_ELSEWHERE = _among_any(
    schema.segments.c.s3_key, schema.retired_segments.c.file_path, schema.lakehouse_partitions.c.file_path
)
FOLDERS_AMONG = _among_any(_i.folder)


@dataclass(frozen=True)
class UnsweptInsert:
    """An attempt whose folder may hold something that does not count."""

    commit_id: str
    table_id: int
    folder: str | None
    first_file_id: int | None
    last_file_id: int | None
    state: str | None
    finished_at: int | None
    opened_at: int
    swept_at: int | None


def open_insert(
    transaction: Transaction, commit_id: str, table_id: int, folder: str | None, alive: float, kind: str = INSERT
) -> None:
    """Open the commit row of an attempt, and name its folder."""
    open_commit_row(transaction, commit_id, kind)
    now = transaction.clock.now_ms()
    transaction.run(INSERT_INSERT, commit_id, table_id, folder, None, None, now, now + round(alive * 1000), None)


def declare_work(
    transaction: Transaction, table: TableRecord, commit_id: str, folder: str | None, alive: float
) -> None:
    """Open an attempt at ending files, before it has looked at any.

    A compaction asks for such work under the table's lock when it commits, and gives way. This takes the same
    lock: either the compaction sees the work, or whoever declares it reads what the compaction has made.
    """
    current_table(transaction, table)
    transaction.lock(table.object_id)
    open_insert(transaction, commit_id, table.id, folder, alive, REWRITE)


def declared_work(reader: Reader, table_id: int, now: int) -> str | None:
    """An attempt at ending files of a table that is at work; none if there is none."""
    row = reader.one(DECLARED_WORK, table_id, now)
    return None if row is None else str(row[0])


def renew_insert(transaction: Transaction, commit_id: str, alive: float) -> None:
    """Say that an attempt is still at work."""
    transaction.run(RENEW_INSERT, transaction.clock.now_ms() + round(alive * 1000), commit_id)


def unswept_inserts(reader: Reader, after: str, silent_since: int, swept_before: int, most: int) -> list[UnsweptInsert]:
    """Attempts to look at, in the order of their ids."""
    return [UnsweptInsert(*row) for row in reader.all(TO_SWEEP, after, silent_since, swept_before, most)]


def known_paths(reader: Reader, paths: list[str]) -> set[str]:
    """Which of these paths a table has, or its Iceberg metadata or a branch, or that wait for their removal."""
    return {row[0] for row in reader.all(KNOWN_PATHS, reader.listed(paths))}


def unaccounted_paths(reader: Reader, paths: list[str]) -> set[str]:
    """Which of these paths no row knows, and that lie in no folder of an attempt that is not forgotten yet."""
    unknown = set(paths) - known_paths(reader, paths)
    if not unknown:
        return unknown
    unknown -= {row[0] for row in reader.all(KNOWN_ELSEWHERE, reader.listed(sorted(unknown)))}
    above = sorted({folder for path in unknown for folder in folders_above(path)})
    folders = {row[0] for row in reader.all(FOLDERS_AMONG, reader.listed(above))}
    return {path for path in unknown if folders.isdisjoint(folders_above(path))}


def folders_above(path: str) -> list[str]:
    """The folders that a path lies in, the outermost first."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]
