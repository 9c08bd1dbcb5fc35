"""Files of outside engines whose footer and checksum are owed, until they have been taken.

A late footer is entered only where its file still has a row and is not being deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.changes import row_of, update_row
from lakebook.registry.file_stats import DELETE_STATS, ColumnStats, all_stats_of, insert_stats, span_of_stats
from lakebook.registry.footers import insert_footers, load_footers
from lakebook.registry.freshness import ALWAYS, TABLE, Span, mark_stale
from lakebook.registry.outside import ROWS_BY_PATH, WAITING
from lakebook.registry.statements import ZERO, Statement, bind
from lakebook.registry.tables import TABLE_ROW
from lakebook.registry.transactions import Reader, Transaction

_d = schema.footer_debts.c

DEBTS = Statement(
    sa.select(_d.file_path, _d.table_id, _d.due_at, _d.last_error)
    .where(_d.file_path > bind("after"))
    .order_by(_d.file_path)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
DEBTS_OF = Statement(
    sa.select(_d.file_path, _d.table_id, _d.due_at, _d.last_error)
    .where(_d.table_id == bind("of_table"), _d.file_path > bind("after"))
    .order_by(_d.file_path)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "after",
    "most",
)
NOTE_DEBT = Statement(
    sa.update(schema.footer_debts).where(_d.file_path == bind("of_path")).values(last_error=bind("reason")),
    "reason",
    "of_path",
)
FORGET_DEBT = Statement(
    sa.delete(schema.footer_debts).where(
        _d.file_path == bind("of_path"), _d.table_id == bind("of_table"), _d.due_at == bind("due")
    ),
    "of_path",
    "of_table",
    "due",
)


@dataclass(frozen=True)
class Debt:
    """A file whose footer is owed."""

    file_path: str
    table_id: int
    due_at: int
    last_error: str | None


@dataclass(frozen=True)
class Taken:
    """What a look at a file has found."""

    checksum: str
    row_groups: int
    has_field_ids: bool
    is_compressed: bool
    has_statistics: bool
    stats: Sequence[ColumnStats]
    footer: bytes


def list_debts(reader: Reader, table_id: int | None, after: str, most: int) -> list[Debt]:
    """Debts of a table, or of all, in the order of their paths."""
    if table_id is None:
        return [Debt(*row) for row in reader.all(DEBTS, after, most)]
    return [Debt(*row) for row in reader.all(DEBTS_OF, table_id, after, most)]


def newest_row(reader: Reader, path: str) -> Mapping[str, Any] | None:
    """The newest row of a file."""
    rows = reader.all(ROWS_BY_PATH, reader.listed([path]))
    return row_of(schema.table_files, rows[-1]) if rows else None


def pay_debt(transaction: Transaction, debt: Debt, taken: Taken) -> bool:
    """Enter what was taken of a file; not if the file has gone or is going."""
    found = transaction.one(TABLE_ROW, debt.table_id)
    if found is not None:
        transaction.lock(row_of(schema.tables, found)["object_id"])
    listed = transaction.listed([debt.file_path])
    rows = [row_of(schema.table_files, row) for row in transaction.all(ROWS_BY_PATH, listed)]
    going = any(state == "deleting" for _, state in transaction.all(WAITING, listed))
    # Another may have paid it, or the path be that of another file by now.
    mine = transaction.run(FORGET_DEBT, debt.file_path, debt.table_id, debt.due_at) == 1
    if found is None or not rows or going or not mine:
        return False
    object_id = row_of(schema.tables, found)["object_id"]
    changes = {
        "checksum": taken.checksum,
        "row_groups": taken.row_groups,
        "has_field_ids": taken.has_field_ids,
        "is_compressed": taken.is_compressed,
        "has_statistics": taken.has_statistics,
    }
    for row in rows:
        _tell_views(transaction, row, taken.stats)
        update_row(transaction, object_id, schema.table_files, row, changes)
        transaction.run(DELETE_STATS, row["table_id"], transaction.listed([row["id"]]))
        insert_stats(transaction, row["table_id"], [(row["id"], taken.stats)])
    if debt.file_path not in load_footers(transaction, [debt.file_path]):
        insert_footers(transaction, [(debt.file_path, taken.footer, rows[0]["row_count"], rows[0]["file_size"])])
    return True


def _tell_views(transaction: Transaction, row: Mapping[str, Any], found: Sequence[ColumnStats]) -> None:
    """Mark the ranges of views that have rows of a file where, by what its writer said of it, it has none."""
    said = {item.field_id: item for item in all_stats_of(transaction, row["table_id"], row["id"])}

    def beyond(field_id: int | None) -> Iterator[Span]:
        for item in found:
            if item.field_id == field_id and field_id in said:
                least, most = span_of_stats(said[field_id]) or (1, 0)
                low, high = span_of_stats(item) or (1, 0)
                if low <= high and (low < least or high > most) and (low, high) != ALWAYS:
                    yield low, high

    mark_stale(transaction, TABLE, row["table_id"], beyond)


def note_debt(transaction: Transaction, debt: Debt, reason: str) -> None:
    """Remember why a debt could not be paid."""
    transaction.run(NOTE_DEBT, reason, debt.file_path)
