"""Processes that back up, restore and copy a book, to be killed on the way."""

from __future__ import annotations

from typing import Any

import lakebook
from table_writers import Line

POINTS = (
    "backup.written",
    "restore.rows_loaded",
    "restore.loaded",
    "copy.object_copied",
    "copy.table_relocated",
    "copy.verified",
    "copy.published",
)


def back_up(line: Line, target: str, settings: dict[str, Any], file: str) -> None:
    """Write a backup of a book, and say so."""
    with lakebook.open(target, **settings) as book:
        book.backup(file)
        line.tell("done")


def restore(line: Line, file: str, target: str) -> None:
    """Restore a book from a backup, and say so."""
    lakebook.restore_book(file, target)
    line.tell("done")


def copy(line: Line, source: str, target: str, warehouse: str) -> None:
    """Copy a book, and say so."""
    lakebook.copy_book(source, target, warehouse=warehouse)
    line.tell("done")
