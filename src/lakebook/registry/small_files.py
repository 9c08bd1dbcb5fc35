"""Small files of tables: which of them are worth a compaction, by the rows of files alone.

In each partition the files are taken from the smallest on, for as long as none of them is larger than the
others together. So whatever is rewritten ends in a file of twice its size or more, and no byte is rewritten
more often than the logarithm of the target says.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.statements import ZERO, Statement, bind
from lakebook.registry.table_files import CHUNK, PLANNED, PlannedFile, planned_from
from lakebook.registry.transactions import Reader

_f = schema.table_files.c
# Spelled out, so that the index on small files is met.
_live_rows = (
    _f.table_id == bind("of_table"),
    sa.text("table_files.to_version IS NULL AND table_files.content = 0"),
)
_sized = (
    sa.select(
        _f.spec_id,
        _f.partition_values,
        _f.file_size,
        sa.func.row_number()
        .over(partition_by=(_f.spec_id, _f.partition_values), order_by=(_f.file_size, _f.id))
        .label("number"),
        sa.func.sum(_f.file_size)
        .over(partition_by=(_f.spec_id, _f.partition_values), order_by=(_f.file_size, _f.id), rows=(None, 0))
        .label("total"),
    )
    .where(*_live_rows, _f.file_size < bind("below"))
    .subquery("sized")
)
_z = _sized.c
RUNS = Statement(
    sa.select(_z.spec_id, _z.partition_values, sa.func.max(_z.number), sa.func.max(_z.total))
    .where(
        _z.file_size <= _z.total - _z.file_size,
        _z.number <= bind("most_files", sa.BigInteger),
        _z.total <= bind("most_bytes", sa.BigInteger),
    )
    .group_by(_z.spec_id, _z.partition_values)
    .having(sa.func.max(_z.number) >= bind("least", sa.BigInteger))
    .order_by(sa.func.max(_z.number).desc(), _z.spec_id, _z.partition_values)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "below",
    "most_files",
    "most_bytes",
    "least",
    "most",
)
SMALL_FILES = Statement(
    sa.select(*PLANNED)
    .where(
        *_live_rows,
        _f.file_size < bind("below"),
        # Added to zero, so that no database goes by the index on versions.
        _f.from_version + ZERO <= bind("at_version"),
        sa.tuple_(_f.file_size, _f.id) > sa.tuple_(bind("after_size"), bind("after_id")),
    )
    .order_by(_f.file_size, _f.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "below",
    "at_version",
    "after_size",
    "after_id",
    "most",
)
LIVE_SINCE = Statement(
    sa.select(*PLANNED).where(*_live_rows, _f.from_version > bind("since")).order_by(_f.id),
    "of_table",
    "since",
)

#: A partition: its spec, and its values as the rows of files have them.
Partition = tuple[int, str]


@dataclass(frozen=True)
class Run:
    """Small files of a partition that are worth a compaction: so many, from the smallest on."""

    partition: Partition
    files: int
    bytes: int


def runs_of(reader: Reader, table_id: int, below: int, least: int, bounds: tuple[int, int], most: int) -> list[Run]:
    """The partitions with at least so many small files to compact, those with the most first.

    `bounds` is how many files, and how many bytes, one of them has at most.
    """
    rows = reader.all(RUNS, table_id, below, *bounds, least, most)
    return [Run((spec_id, values), int(number), int(size)) for spec_id, values, number, size in rows]


def small_files(reader: Reader, table_id: int, below: int, version: int, after: tuple[int, int]) -> list[PlannedFile]:
    """Some small files of a version that are still live, the smallest first; `after` is a size and an id."""
    return [planned_from(row) for row in reader.all(SMALL_FILES, table_id, below, version, *after, CHUNK)]


def live_since(reader: Reader, table_id: int, version: int) -> list[PlannedFile]:
    """The live files that came after a version."""
    return [planned_from(row) for row in reader.all(LIVE_SINCE, table_id, version)]
