"""Making a book from a backup."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from lakebook.book import warehouse_of
from lakebook.clock import Clock, SystemClock, to_datetime, to_ms
from lakebook.config import MEMORY, load_settings, redact
from lakebook.errors import InvalidSetting
from lakebook.registry.backup_files import Header, backup_at
from lakebook.registry.databases import database_for
from lakebook.registry.lives import begin_life
from lakebook.registry.portable import Arrival, read_backup
from lakebook.registry.transactions import Transaction
from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse


@dataclass(frozen=True)
class RestoreReport:
    """What was restored."""

    book_id: str
    #: Where the registry is now, and the bytes that it speaks of.
    registry: str
    warehouse: str
    #: When the backup was taken.
    backup_at: datetime
    #: Rows of the registry, by table.
    rows: dict[str, int]


def restore_book(
    file: str | os.PathLike[str],
    into: str | os.PathLike[str],
    *,
    clock: Clock | None = None,
    progress: Callable[[int, int | None, str], None] = lambda done, total, table: None,
    **settings: Any,
) -> RestoreReport:
    """Make a book at `into`, where there is none, from a backup in `file`.

    Its bytes are where they were when the backup was taken, or in `warehouse=`: what the environment says about a
    registry and a warehouse does not count. It begins a new epoch, and nothing is removed from it until
    `Book.resume_after_restore`: the warehouse may hold what came after the backup.
    """
    resolved = load_settings(into, settings, named=True)
    if resolved.registry == MEMORY:
        raise InvalidSetting("a book in memory would be gone at once", on=MEMORY, remedy="Name a folder or a URL")
    database = database_for(resolved)
    backup = backup_at(file)
    clock = clock or SystemClock()
    warehouses: list[Warehouse] = []

    def begin(transaction: Transaction, header: Header) -> None:
        warehouse = _warehouse(header)
        warehouse.check_writable()
        warehouses.append(warehouse)
        # Whatever lies there now is dated no later than this, whatever the clock here says.
        store_at = to_ms(ObjectStore(warehouse).now())
        begin_life(transaction, header, warehouse.recorded, held=True, store_at=store_at)

    def _warehouse(header: Header) -> Warehouse:
        if resolved.warehouse:
            return warehouse_of(resolved, database)
        if header.warehouse.startswith("memory:"):
            raise InvalidSetting("the bytes of its book were in memory", on=os.fspath(file), remedy="Give a warehouse")
        return warehouse_of(replace(resolved, warehouse=header.warehouse), database)

    summary = read_backup(database, backup, Arrival(begin), clock, progress)
    return RestoreReport(
        summary.header.book_id,
        database.shown,
        redact(warehouses[-1].root),
        to_datetime(summary.header.taken_at),
        summary.rows,
    )
