"""Files of position deletes, as other engines write and enter them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from lake import parquet
from lakebook import Book
from lakebook.lake.attempts import Attempt
from lakebook.lake.footer_store import read_footer
from lakebook.lake.footers import open_footer
from lakebook.lake.formats import FORMATS
from lakebook.lake.table import Table
from lakebook.registry.table_files import Committed, NewFile, PlannedFile, TableChange
from lakebook.registry.transactions import new_id

#: Iceberg's ids of the two columns.
PATH, POSITION = 2147483546, 2147483545


def columns(*, ids: bool = True, names: Sequence[str] = ("file_path", "pos")) -> pa.Schema:
    """The columns of a file of deletes."""
    return pa.schema(
        [
            pa.field(name, kind, nullable=False, metadata={"PARQUET:field_id": str(field_id)} if ids else None)
            for name, kind, field_id in zip(names, (pa.string(), pa.int64()), (PATH, POSITION), strict=True)
        ]
    )


def location_of(book: Book, file: PlannedFile) -> str:
    """How rows of deletes name a file."""
    return file.location or book.lake.store.uri(file.file_path)


def rows_of_deletes(book: Book, gone: Iterable[tuple[PlannedFile | str, int]], schema: pa.Schema) -> pa.Table:
    """Rows of deletes for positions of files, or of locations, in the order of Iceberg."""
    pairs = [(item if isinstance(item, str) else location_of(book, item), position) for item, position in gone]
    pairs.sort()
    return pa.table([[place for place, _ in pairs], [position for _, position in pairs]], schema=schema)


def delete_positions(
    book: Book,
    table: Table,
    gone: Iterable[tuple[PlannedFile | str, int]],
    *,
    about: PlannedFile | None = None,
    like: PlannedFile | None = None,
    schema: pa.Schema | None = None,
    sequence_number: int | None = None,
    **options: Any,
) -> Committed:
    """Delete rows by a new file of deletes: about one file alone, or of the partition that a file is in."""
    data = parquet(rows_of_deletes(book, gone, schema or columns()), **options)
    return enter_deletes(book, table, data, about=about, like=like, sequence_number=sequence_number)


def enter_deletes(
    book: Book,
    table: Table,
    data: bytes,
    *,
    about: PlannedFile | None = None,
    like: PlannedFile | None = None,
    sequence_number: int | None = None,
    damaged: bytes | None = None,
) -> Committed:
    """Enter a file of deletes with these bytes; with others in their place where it shall be damaged."""
    lake, partition = book.lake, about or like
    with Attempt(lake, table.record) as attempt:
        path = f"{attempt.folder}/{new_id()}-deletes.parquet"
        lake.store.put_new(path, data)
        (measured,) = lake.store.measure([path])
        footer = read_footer(lake.store, path, measured.size)
        opened = open_footer(footer, on=path)
        if damaged is not None:
            lake.store.delete_one(path)
            lake.store.put_new(path, damaged)
        file = NewFile(
            file_path=path,
            file_size=measured.size,
            file_type="parquet",
            row_count=opened.num_rows,
            checksum=measured.checksum,
            schema_version=table.record.schema_version,
            modified_at=datetime.now(UTC),
            row_groups=opened.num_row_groups,
            footer=footer,
            content=1,
            sequence_number=sequence_number,
            referenced_path=about.file_path if about is not None else None,
        )
        if partition is not None:
            file = dataclasses.replace(
                file,
                spec_id=partition.spec_id,
                partition_path=partition.partition_path,
                partition_values=partition.partition_values,
            )
        return attempt.commit(TableChange("delete", [file], waits=False))


def enter_rows(book: Book, table: Table, data: pa.Table, *, spelled: bool = False, **changes: Any) -> Committed:
    """Enter a file of rows with a sequence number of its own or, if spelled so, with a location of its own."""
    record = table.record
    with Attempt(book.lake, record) as attempt:
        shape = book.lake.shape_of(record, record.schema_version)
        files = FORMATS[record.format].write_arrow(book.lake, attempt, shape, data)
        entered = [
            dataclasses.replace(
                file,
                location=other_spelling(book.lake.store.uri(file.file_path)) if spelled else None,
                **changes,
            )
            for file in files
        ]
        return attempt.commit(TableChange("append", entered, waits=False))


def other_spelling(uri: str) -> str:
    """The same place as Hadoop would write it."""
    return uri.replace(":///", ":/", 1) if uri.startswith("file:///") else uri.replace("://", "://./", 1)
