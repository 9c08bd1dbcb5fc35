"""Files that nothing refers to any more and that wait for their removal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.registry import schema
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind, insert_into
from lakebook.registry.transactions import Reader, Transaction

#: The reason of a row whose file was deleted already. It keeps its path from being used again for a day, in
#: which a cleaner that was slow may still be about to delete what lies there. No cleaner touches its object.
TOMBSTONE = "deleted"
TOMBSTONE_MS = 86_400_000

_f = schema.temporary_files.c
NOT_DELETED = _f.reason != sa.literal_column(f"'{TOMBSTONE}'")
INSERT_FILE = insert_into(schema.temporary_files)
LIST_FILES = Statement(
    sa.select(schema.temporary_files)
    .where(_f.file_path > bind("after"), NOT_DELETED)
    .order_by(_f.file_path)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
FILES_AMONG = Statement(
    sa.select(_f.file_path).where(among(_f.file_path, "paths", SQLITE)).limit(ONE).offset(ZERO),
    "paths",
    postgresql=sa.select(_f.file_path).where(among(_f.file_path, "paths", POSTGRESQL)).limit(ONE).offset(ZERO),
)


def _used_by_others(database: str) -> sa.CompoundSelect[Any]:
    tables, retired = schema.table_files.c.file_path, schema.retired_segments.c.file_path
    return sa.union_all(
        sa.select(_f.file_path, sa.literal_column("'waits for its removal, or was removed within the last day'")).where(
            among(_f.file_path, "paths", database)
        ),
        sa.select(tables, sa.literal_column("'belongs to a table'")).where(among(tables, "paths", database)),
        sa.select(retired, sa.literal_column("'was a segment that was merged'")).where(
            among(retired, "paths", database)
        ),
    )


#: Paths that something else than a segment has, and what it is.
USED_BY_OTHERS = Statement(_used_by_others(SQLITE), "paths", postgresql=_used_by_others(POSTGRESQL))
COUNT_FILES = Statement(
    sa.select(
        sa.func.count(),
        sa.func.coalesce(sa.func.sum(_f.file_size), 0),
        sa.func.coalesce(sa.func.sum(sa.case((_f.expiration <= bind("now"), 1), else_=0)), 0),
    )
    .select_from(schema.temporary_files)
    .where(NOT_DELETED),
    "now",
)


@dataclass(frozen=True)
class TemporaryFile:
    """A file that goes when its grace has passed."""

    file_path: str
    file_size: int
    state: str
    reason: str
    added_at: datetime
    expiration: datetime


def add_temporary_files(
    transaction: Transaction, files: Iterable[tuple[str, int]], reason: str, now: int, grace: float
) -> None:
    """Hand files over, with their sizes, in the transaction that lets go of them."""
    expiration = now + round(grace * 1000)
    transaction.insert_many(INSERT_FILE, [(path, size, "waiting", reason, now, expiration) for path, size in files])


def list_temporary_files(reader: Reader, after: str, most: int) -> list[TemporaryFile]:
    """Files that wait, in the order of their paths."""
    return [
        TemporaryFile(path, size, state, reason, to_datetime(added), to_datetime(expiration))
        for path, size, state, reason, added, expiration in reader.all(LIST_FILES, after, most)
    ]
