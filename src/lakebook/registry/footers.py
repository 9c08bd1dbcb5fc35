"""Parquet footers by the path of their file. Here they are bytes; who parses them is above.

They are stored as they are. PostgreSQL compresses large values by itself; on SQLite a footer
that is not compressed is read several times faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import FooterNotFound
from lakebook.registry import schema
from lakebook.registry.statements import POSTGRESQL, SQLITE, ZERO, Statement, among, bind, insert_into
from lakebook.registry.transactions import Reader, Row, Transaction

#: The version of the format in which footers are written.
FORMAT_VERSION = 2

# More would save little, and the values of one statement stay small.
_PATHS_AT_ONCE = 1000

_m = schema.partition_metadata.c
_FOOTER = (_m.file_path, _m.metadata, _m.partition_format_version, _m.num_rows, _m.file_size, _m.insert_time)

INSERT_FOOTER = insert_into(schema.partition_metadata)
GET_FOOTER = Statement(sa.select(*_FOOTER).where(_m.file_path == bind("path")), "path")
_get_footers = {
    database: sa.select(*_FOOTER).where(among(_m.file_path, "paths", database)) for database in (SQLITE, POSTGRESQL)
}
GET_FOOTERS = Statement(_get_footers[SQLITE], "paths", postgresql=_get_footers[POSTGRESQL])
_paths_with_footer = {
    database: sa.select(_m.file_path).where(among(_m.file_path, "paths", database)) for database in (SQLITE, POSTGRESQL)
}
PATHS_WITH_FOOTER = Statement(_paths_with_footer[SQLITE], "paths", postgresql=_paths_with_footer[POSTGRESQL])
_delete_footers = {
    database: sa.delete(schema.partition_metadata).where(among(_m.file_path, "paths", database))
    for database in (SQLITE, POSTGRESQL)
}
DELETE_FOOTERS = Statement(_delete_footers[SQLITE], "paths", postgresql=_delete_footers[POSTGRESQL])
# Of a value that is stored apart from its row, either database tells the length without reading it.
_sizes = {
    database: sa.select(_m.file_path, sa.func.length(_m.metadata))
    .where(among(_m.file_path, "paths", database))
    .order_by(_m.file_path)
    for database in (SQLITE, POSTGRESQL)
}
FOOTER_SIZES = Statement(_sizes[SQLITE], "paths", postgresql=_sizes[POSTGRESQL])
SIZES_OF_VERSION = Statement(
    sa.select(_m.file_path, sa.func.length(_m.metadata))
    .where(_m.file_path > bind("after"), _m.partition_format_version == bind("version"))
    .order_by(_m.file_path)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "version",
    "most",
)
REPLACE_FOOTER = Statement(
    sa.update(schema.partition_metadata)
    .where(_m.file_path == bind("path"), _m.partition_format_version == bind("old_version"))
    .values(partition_format_version=bind("new_version"), num_rows=bind("rows"), metadata=bind("footer")),
    "new_version",
    "rows",
    "footer",
    "path",
    "old_version",
)


@dataclass(frozen=True)
class StoredFooter:
    """A footer as the registry holds it. No `num_rows`: version 1 of the format did not have it."""

    file_path: str
    metadata: bytes
    partition_format_version: int
    num_rows: int | None
    file_size: int
    insert_time: datetime


def insert_footers(transaction: Transaction, rows: Iterable[tuple[str, bytes, int, int]]) -> None:
    """Add footers of new files: path, footer, number of rows, size of the file."""
    now = transaction.clock.now_ms()
    transaction.insert_many(
        INSERT_FOOTER,
        [(path, FORMAT_VERSION, num_rows, file_size, now, metadata) for path, metadata, num_rows, file_size in rows],
    )


def load_partition_metadata(reader: Reader, file_path: str) -> StoredFooter:
    """The footer of a file."""
    row = _run(reader, GET_FOOTER, file_path).fetchone()
    if row is None:
        raise FooterNotFound("the registry has no footer of it", on=f"file {file_path}", remedy="Read it from the file")
    return _footer(row)


def load_footers(reader: Reader, paths: Iterable[str]) -> dict[str, StoredFooter]:
    """The footers of files by their paths; a path that has none is left out."""
    found: dict[str, StoredFooter] = {}
    for some in _batches(paths):
        for row in _run(reader, GET_FOOTERS, reader.listed(some)):
            footer = _footer(row)
            found[footer.file_path] = footer
    return found


def paths_with_footer(reader: Reader, paths: Iterable[str]) -> set[str]:
    """Which of these files have a footer here."""
    return {row[0] for some in _batches(paths) for row in reader.all(PATHS_WITH_FOOTER, reader.listed(some))}


def delete_partition_metadata_batch(transaction: Transaction, paths: Iterable[str]) -> int:
    """Remove the footers of any number of files, and say how many there were."""
    return sum(transaction.run(DELETE_FOOTERS, transaction.listed(some)) for some in _batches(paths))


def footer_sizes(reader: Reader, paths: Iterable[str]) -> list[tuple[str, int]]:
    """The files that have a footer here, with its size, so that whoever loads them knows what comes."""
    return [(row[0], row[1]) for some in _batches(paths) for row in reader.all(FOOTER_SIZES, reader.listed(some))]


def sizes_of_version(reader: Reader, version: int, after: str, most: int) -> list[tuple[str, int]]:
    """The same of footers in a version of the format, in the order of their paths; `after` is the last path seen."""
    return [(row[0], row[1]) for row in reader.all(SIZES_OF_VERSION, after, version, most)]


def replace_footer(
    transaction: Transaction, file_path: str, old_version: int, metadata: bytes, version: int, num_rows: int | None
) -> bool:
    """Replace a footer that is still in its old version; false if it is not, or is gone."""
    return transaction.run(REPLACE_FOOTER, version, num_rows, metadata, file_path, old_version) == 1


def _run(reader: Reader, statement: Statement, *values: Any) -> Any:
    compiled = statement.on(reader.kind)
    arranged = compiled.arrange(values) if compiled.arrange else values
    # As text, PostgreSQL sends two digits for each byte: a large footer takes five times as long.
    options = {"binary": True} if reader.kind == POSTGRESQL else {}
    return reader.run_sql(compiled.sql, arranged, **options)


def _footer(row: Row) -> StoredFooter:
    path, metadata, version, num_rows, file_size, insert_time = row
    return StoredFooter(path, bytes(metadata), version, num_rows, file_size, to_datetime(insert_time))


def _batches(paths: Iterable[str]) -> Iterator[list[str]]:
    distinct = list(dict.fromkeys(paths))
    for start in range(0, len(distinct), _PATHS_AT_ONCE):
        yield distinct[start : start + _PATHS_AT_ONCE]
