"""What the rows of a book mean in another life of it, which begins with a restore or a copy.

Writers of the former life are refused by the new epoch, and what was open can never be committed. Its folders are
forgotten, and not swept: in the life that went on it may have been committed, or it may still be at work.
"""

from __future__ import annotations

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.backup_files import Header
from lakebook.registry.epoch import ABORT_FORMER_COMMITS, END_TURNS, END_VIEW_CLAIMS
from lakebook.registry.file_stats import DELETE_STATS_BETWEEN
from lakebook.registry.inserts import DELETE_STAGED_FOOTERS, FORGET_INSERT
from lakebook.registry.statements import Statement, bind
from lakebook.registry.transactions import Transaction, new_id

_b = schema.book.c
_i = schema.inserts.c
_c = schema.commits.c
_s = schema.segments.c

OPEN_INSERTS = Statement(
    sa.select(_i.commit_id, _i.table_id, _i.folder, _i.first_file_id, _i.last_file_id)
    .select_from(schema.inserts.join(schema.commits, _c.id == _i.commit_id))
    .where(_c.state == "open")
)
MOVE_SEGMENTS = Statement(
    sa.update(schema.segments).where(_s.s3_bucket == bind("former")).values(s3_bucket=bind("bucket")),
    "bucket",
    "former",
)
BEGIN_LIFE = Statement(
    sa.update(schema.book).values(
        epoch=bind("new_epoch"),
        epoch_since=bind("now"),
        warehouse=bind("place"),
        events_horizon=sa.null(),
        backup_at=bind("taken"),
        restored_at=bind("since"),
        held_at=bind("since"),
        store_backup_at=bind("store_taken"),
        store_restored_at=bind("store_since"),
    ),
    "new_epoch",
    "now",
    "place",
    "taken",
    "since",
    "store_taken",
    "store_since",
)


def begin_life(
    transaction: Transaction, former: Header, warehouse: str, *, held: bool, store_at: int | None = None
) -> None:
    """Make the rows of a former life a book of their own, whose bytes are in `warehouse`.

    With `held` it lies over the same bytes as before: then nothing is removed until somebody says so. `store_at` is
    the time by the clock of the store.
    """
    now = transaction.clock.now_ms()
    for commit_id, table_id, folder, first, last in transaction.all(OPEN_INSERTS):
        if folder is not None:
            # Up to the character that follows the slash.
            transaction.run(DELETE_STAGED_FOOTERS, f"{folder}/", f"{folder}0")
        if first is not None:
            transaction.run(DELETE_STATS_BETWEEN, table_id, first, last)
        transaction.run(FORGET_INSERT, commit_id)
    transaction.run(ABORT_FORMER_COMMITS, now)
    # Those on compactions are in no backup. These are: backups have had them from the beginning.
    transaction.run(END_VIEW_CLAIMS)
    transaction.run(END_TURNS)
    if warehouse != former.recorded:
        transaction.run(MOVE_SEGMENTS, warehouse, former.recorded)
    times = (former.taken_at, now, former.store_at, store_at) if held else (None,) * 4
    transaction.run(BEGIN_LIFE, new_id(), now, warehouse, *times)
