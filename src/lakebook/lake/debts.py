"""Taking the footers and checksums of files that outside engines brought."""

from __future__ import annotations

from dataclasses import dataclass, field

from lakebook import failpoints
from lakebook.clock import Enough, never
from lakebook.errors import CorruptFooter, LakebookError, ObjectNotFound
from lakebook.iceberg.arrow_files import has_field_ids
from lakebook.lake.footer_statistics import statistics_of
from lakebook.lake.footer_store import read_footer
from lakebook.lake.footers import open_footer
from lakebook.lake.lake import Lake
from lakebook.registry.debts import Debt, Taken, list_debts, newest_row, note_debt, pay_debt
from lakebook.registry.file_stats import ColumnStats
from lakebook.registry.table_files import CHUNK


@dataclass
class Settled:
    """What was taken, and what could not be."""

    paid: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    #: The last path that was looked at, where it was stopped before the end.
    stopped_at: str = ""


def settle_debts(lake: Lake, table_id: int | None = None, *, enough: Enough = never, after: str = "") -> Settled:
    """Take what is owed of a table's files, or of all tables'. What fails stays owed.

    `enough` is asked after each file whether to stop; `after` is where a former call has stopped.
    """
    result = Settled()
    while True:
        start = after
        page = lake.registry.read_with(lambda reader: list_debts(reader, table_id, start, CHUNK))  # noqa: B023
        for debt in page:
            after = debt.file_path
            try:
                result.paid += _settle(lake, debt)
            except LakebookError as error:
                reason = str(error)
                result.failed.append((debt.file_path, reason))
                lake.registry.write(lambda transaction: note_debt(transaction, debt, reason))  # noqa: B023
            if enough():
                result.stopped_at = after
                return result
        if len(page) < CHUNK:
            return result


def _settle(lake: Lake, debt: Debt) -> bool:
    row = lake.registry.read_with(lambda reader: newest_row(reader, debt.file_path))
    if row is None:
        return False
    size = lake.store.size(debt.file_path)
    if size is None or size != row["file_size"]:
        raise ObjectNotFound(
            "it is not there" if size is None else f"it has {size} bytes, and its writer said {row['file_size']}",
            on=debt.file_path,
            remedy="Ask whoever wrote it",
        )
    footer = read_footer(lake.store, debt.file_path, size)
    opened = open_footer(footer, on=debt.file_path)
    if opened.num_rows != row["row_count"]:
        raise CorruptFooter(
            f"it has {opened.num_rows} rows, and its writer said {row['row_count']}",
            on=debt.file_path,
            remedy="Ask whoever wrote it",
        )
    columns = opened.schema.to_arrow_schema()
    compressed = (
        any(opened.row_group(0).column(number).compression != "UNCOMPRESSED" for number in range(opened.num_columns))
        if opened.num_row_groups
        else False
    )
    stats: tuple[ColumnStats, ...] = ()
    complete = False
    if row["content"] == 0:
        stats, complete = lake.registry.read_with(lambda reader: statistics_of(reader, row, opened, columns))
    taken = Taken(
        lake.store.checksum(debt.file_path),
        opened.num_row_groups,
        has_field_ids(columns),
        compressed,
        complete,
        stats,
        footer,
    )
    failpoints.reach("debt.taken")
    return lake.registry.write(lambda transaction: pay_debt(transaction, debt, taken))
