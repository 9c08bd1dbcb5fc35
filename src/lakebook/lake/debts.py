"""Taking the footers and checksums of files that outside engines brought."""

from __future__ import annotations

from dataclasses import dataclass, field

from lakebook import failpoints
from lakebook.clock import Enough, never
from lakebook.errors import CorruptFooter, LakebookError, ObjectNotFound
from lakebook.iceberg.arrow_files import check_readable_as, file_schema, has_field_ids
from lakebook.iceberg.bounds import ColumnBounds
from lakebook.iceberg.partitioning import partition_from_json
from lakebook.iceberg.schemas import leaf_fields
from lakebook.iceberg.statistics import column_stats, footer_columns, partition_stats, stats_from_footer
from lakebook.iceberg.table_metadata import schema_for, shapes_of
from lakebook.lake.footer_store import read_footer
from lakebook.lake.footers import open_footer
from lakebook.lake.lake import Lake
from lakebook.registry.debts import Debt, Taken, list_debts, newest_row, note_debt, pay_debt
from lakebook.registry.file_stats import ColumnStats
from lakebook.registry.table_files import CHUNK
from lakebook.registry.tables import GET_TABLE_BY_ID, list_metadata, table_from
from lakebook.registry.transactions import Reader


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
        stats, complete = lake.registry.read_with(
            lambda reader: _statistics(reader, row["table_id"], row, opened, columns)
        )
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


def _statistics(reader: Reader, table_id: int, row, opened, columns) -> tuple[tuple[ColumnStats, ...], bool]:  # type: ignore[no-untyped-def]
    """Statistics of every plain column, as far as the footer tells them."""
    found = reader.one(GET_TABLE_BY_ID, table_id)
    if found is None:
        return (), False
    states = list_metadata(reader, table_from(found))
    schemas, specs, _ = shapes_of(states)
    state = next(item for item in states if item.schema_version == row["schema_version"])
    schema = schemas[state.schema.get("schema-id", 0)]
    partitions: tuple[ColumnStats, ...] = ()
    if row["spec_id"] in specs:
        spec = specs[row["spec_id"]]
        with_columns = schema_for(spec, list(schemas.values()))
        partitions = partition_stats(
            spec, with_columns, partition_from_json(spec, with_columns, row["partition_values"])
        )
    given = file_schema(columns, schema)
    check_readable_as(given, schema)
    laid_out = footer_columns(opened, given)
    if laid_out is None:
        return partitions, False
    stats = stats_from_footer(laid_out)
    known = {item.field_id for item in stats}
    nothing = ColumnBounds(None, None, opened.num_rows, opened.num_rows, 0)
    # A column that the file does not have is null in every row.
    absent = tuple(
        column_stats(leaf.field_id, leaf.type, nothing, is_exact=True)
        for leaf in leaf_fields(schema)
        if not leaf.in_collection and leaf.field_id not in known
    )
    return (*stats, *absent, *partitions), True
