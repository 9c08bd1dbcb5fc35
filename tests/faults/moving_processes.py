"""Processes that back up, restore and copy a book, to be killed on the way."""

from __future__ import annotations

from typing import Any

import lakebook
from compacting import by_arrow
from flowing import flow
from lake import insert
from mirrored import append, merge
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


def write_on(line: Line, target: str, settings: dict[str, Any]) -> None:
    """Change everything in a book until told to stop, and say which rows each version of a table has.

    Rows of a part come and go together; records say their own offsets, and a pipeline lands each once.
    """
    with lakebook.open(target, **settings, publish="off", temporary_file_grace=0, lease_seconds=1) as book:
        table, metadata = book.table("numbers"), book.metadata
        parts: list[int] = []
        number = 0
        while not line.stopped():
            number += 1
            insert(table, {"id": 2 * number, "part": number // 2}, {"id": 2 * number + 1, "part": number // 2})
            parts.append(number)
            line.tell("version", table.record.version, _ids(parts))
            partition = metadata.get_partition("orders", 0)
            assert partition is not None
            append(book, str(partition.high_watermark))
            match number % 4:
                case 0:
                    by_arrow(book, table)
                    # Of a topic, too, small ones are put together, and old ones go.
                    segments = list(metadata.each_segment("orders", 0))
                    if len(segments) > 2:
                        merge(book, segments[:2])
                    metadata.delete_segments_before("orders", 0, partition.high_watermark - 3)
                case 1:
                    table.delete(f"part <= {number // 2 - 3}")
                    parts = [item for item in parts if item // 2 > number // 2 - 3]
                case 2:
                    table.publish()
                    flow(book, book.pipelines["flow"], book.table("flowed"))
                case _:
                    book.tables.create(f"passing_{number}", "id BIGINT")
                    insert(book.table(f"passing_{number}"), {"id": number})
                    if number > 4:
                        book.tables.drop(f"passing_{number - 4}")
                    book.cleaner.expire(seconds=0, versions=1)
                    book.cleaner.empty_dropped()
                    book.cleaner.delete_expired_temporary_files(wait=False)
            line.tell("version", table.record.version, _ids(parts))
        line.tell("done")


def _ids(numbers: list[int]) -> list[int]:
    return sorted(ident for number in numbers for ident in (2 * number, 2 * number + 1))


def back_up(line: Line, target: str, settings: dict[str, Any], file: str) -> None:
    """Write a backup of a book, and say so."""
    with lakebook.open(target, **settings) as book:
        book.backup(file)
        line.tell("done")


def restore(line: Line, file: str, target: str, **settings: Any) -> None:
    """Restore a book from a backup, and say so."""
    lakebook.restore_book(file, target, **settings)
    line.tell("done")


def copy(line: Line, source: str, target: str, warehouse: str, **settings: Any) -> None:
    """Copy a book, and say so."""
    lakebook.copy_book(source, target, warehouse=warehouse, **settings)
    line.tell("done")
