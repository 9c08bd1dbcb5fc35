"""Publishing tables as their users ask for it, and what they are published as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from lakebook.clock import to_datetime
from lakebook.errors import BookClosed, InvalidTable, LakebookError, TableNotFound
from lakebook.lake.lake import Lake
from lakebook.registry.publishing import Pointer, pending_tables, pointer_of
from lakebook.registry.tables import GET_TABLE_BY_ID, TableRecord, table_from
from lakebook.registry.transactions import Reader

_PAGE = 1000


@dataclass(frozen=True)
class PublishReport:
    """What a table is published as."""

    table: str
    #: The newest version that is published.
    version: int
    #: The current snapshot; none before the first rows came.
    snapshot_id: int | None
    sequence_number: int
    #: Where the metadata file is, for engines that read it without a catalog.
    metadata_location: str
    published_at: datetime


@dataclass(frozen=True)
class PendingReport:
    """What became of all tables that had something to publish."""

    published: tuple[PublishReport, ...]
    #: Tables that could not be published, and why.
    failed: tuple[tuple[str, str], ...]


def report_of(lake: Lake, table: TableRecord, pointer: Pointer) -> PublishReport:
    """What a pointer says, with addresses that other programs can open."""
    return PublishReport(
        f"{table.namespace}.{table.name}",
        pointer.version,
        pointer.snapshot_id,
        pointer.last_sequence,
        lake.store.uri(pointer.metadata_location),
        to_datetime(pointer.published_at),
    )


def publish_now(lake: Lake, table: TableRecord) -> PublishReport:
    """Publish a table, however the book is set."""
    pointer = lake.publish(table)
    if pointer is None:
        raise InvalidTable(
            f"a table of format {table.format} cannot be published as Iceberg",
            on=table.shown,
            remedy="Only tables of format parquet can be",
        )
    return report_of(lake, table, pointer)


def published_as(lake: Lake, table: TableRecord) -> PublishReport | None:
    """What a table is published as; none if it never was."""
    pointer = lake.registry.read_with(lambda reader: pointer_of(reader, table.id))
    return None if pointer is None else report_of(lake, table, pointer)


def publish_pending(lake: Lake, progress: Callable[[int, int, str], None]) -> PendingReport:
    """Publish every table that has versions which are not; one that fails stops no other."""
    tables = lake.registry.read_with(_pending)
    published: list[PublishReport] = []
    failed: list[tuple[str, str]] = []
    for number, table in enumerate(tables):
        progress(number, len(tables), f"{table.namespace}.{table.name}")
        try:
            published.append(publish_now(lake, table))
        except TableNotFound:
            continue  # Dropped meanwhile.
        except BookClosed:
            raise
        except LakebookError as error:
            failed.append((f"{table.namespace}.{table.name}", str(error)))
    return PendingReport(tuple(published), tuple(failed))


def _pending(reader: Reader) -> list[TableRecord]:
    found: list[TableRecord] = []
    after = 0
    while page := pending_tables(reader, after, _PAGE):
        after = page[-1]
        rows = (reader.one(GET_TABLE_BY_ID, table_id) for table_id in page)
        found += [table_from(row) for row in rows if row is not None]
    return found
