"""Small files of tables: which of them are worth a compaction, by the rows of files alone.

In each partition the files are taken from the smallest on, for as long as none of them is larger than the
others together. So whatever is rewritten ends in a file of twice its size or more, and no byte is rewritten
more often than the logarithm of the target says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.statements import ZERO, Statement, bind
from lakebook.registry.table_files import CHUNK, PLANNED, PlannedFile, planned_from
from lakebook.registry.transactions import Reader

_f = schema.table_files.c
_t = schema.tables.c
# Spelled out, so that the index on small files is met.
_live_rows = (
    _f.table_id == bind("of_table"),
    sa.text("table_files.to_version IS NULL AND table_files.content = 0"),
)


def _sized(files: Any) -> sa.Select[Any]:
    """Files, each with its number and the bytes up to it, from the smallest of its partition on."""
    within: dict[str, Any] = {
        "partition_by": (files.spec_id, files.partition_values),
        "order_by": (files.file_size, files.id),
    }
    return sa.select(
        files.spec_id,
        files.partition_values,
        files.file_size,
        sa.func.row_number().over(**within).label("number"),
        sa.func.sum(files.file_size).over(**within, rows=(None, 0)).label("total"),
    )


def _in_runs(sized: sa.Subquery, *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    each = sized.c
    return (
        sa.select(*columns)
        .where(each.file_size <= each.total - each.file_size)
        .group_by(each.spec_id, each.partition_values)
        .having(sa.func.max(each.number) >= bind("least", sa.BigInteger))
    )


_all = _sized(_f).where(*_live_rows, _f.file_size < bind("below")).subquery("sized")
_z = _all.c
RUNS = Statement(
    _in_runs(_all, _z.spec_id, _z.partition_values, sa.func.max(_z.number), sa.func.max(_z.total))
    .where(_z.number <= bind("most_files", sa.BigInteger), _z.total <= bind("most_bytes", sa.BigInteger))
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
# Of the smallest alone, however many there are: those of a partition come in the same order.
_smallest = (
    sa.select(_f.spec_id, _f.partition_values, _f.file_size, _f.id)
    .where(*_live_rows, _f.file_size < bind("below"))
    .order_by(_f.file_size, _f.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO)
    .subquery("smallest")
)
_some = _sized(_smallest.c).subquery("sized")
_runs = _in_runs(_some, sa.func.max(_some.c.number).label("files")).subquery("runs")
COUNT_IN_RUNS = Statement(
    sa.select(sa.func.coalesce(sa.func.sum(_runs.c.files), 0)), "of_table", "below", "most", "least"
)
TABLES_WITH_MOST_FILES = Statement(
    sa.select(_t.id)
    # Small files of a topic's table are small segments: the topic merges those.
    .where(_t.deleted_at.is_(None), _t.topic_id.is_(None), _t.file_count >= bind("least"))
    .order_by(_t.file_count.desc(), _t.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "least",
    "most",
)
# By its key, so that a walk through all tables takes some at a time.
TABLES_OF_SEVERAL_FILES = Statement(
    sa.select(_t.id)
    .where(
        _t.id > bind("since"),
        _t.deleted_at.is_(None),
        _t.topic_id.is_(None),
        _t.view_id.is_(None),
        sa.or_(_t.file_count > 1, _t.deleted_rows > 0),
    )
    .order_by(_t.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "since",
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


def count_in_runs(reader: Reader, table_id: int, below: int, least: int, most: int) -> int:
    """How many of so many smallest files of a table are worth a compaction: no more than there are, perhaps fewer."""
    row = reader.one(COUNT_IN_RUNS, table_id, below, most, least)
    return 0 if row is None else int(row[0])


def tables_with_most_files(reader: Reader, least: int, most: int) -> list[int]:
    """The tables with at least so many files, those with the most first."""
    return [int(row[0]) for row in reader.all(TABLES_WITH_MOST_FILES, least, most)]


def tables_of_several_files(reader: Reader, since: int, most: int) -> list[int]:
    """Some tables in which there may be something to gain, in the order of their ids, after one of these."""
    return [int(row[0]) for row in reader.all(TABLES_OF_SEVERAL_FILES, since, most)]


def small_files(reader: Reader, table_id: int, below: int, version: int, after: tuple[int, int]) -> list[PlannedFile]:
    """Some small files of a version that are still live, the smallest first; `after` is a size and an id."""
    return [planned_from(row) for row in reader.all(SMALL_FILES, table_id, below, version, *after, CHUNK)]


def live_since(reader: Reader, table_id: int, version: int) -> list[PlannedFile]:
    """The live files that came after a version."""
    return [planned_from(row) for row in reader.all(LIVE_SINCE, table_id, version)]
