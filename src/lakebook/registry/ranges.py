"""Ranges of views: what is built, entering a built one in the place of others, and retiring them.

Ranges of one view and instance never overlap, whatever definition of the view they were built by: each is entered
under the lock of the view's table, and takes the place of those that lie within it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import orjson
import sqlalchemy as sa

from lakebook.clock import to_datetime, to_ms
from lakebook.errors import RangeOverlap, RegistryCorrupt
from lakebook.registry import schema
from lakebook.registry.freshness import WIDEST
from lakebook.registry.statements import POSTGRESQL, SQLITE, Statement, among, bind, insert_into
from lakebook.registry.stream_checks import Finding
from lakebook.registry.transactions import Reader, Row, Transaction

#: The form of footers and ranges that is written now.
FORMAT_VERSION = 2

_r = schema.lakehouse_partitions.c
_f = schema.table_files.c
_i = schema.view_instances.c
_v = schema.views.c

_RANGE = (
    _r.id,
    _r.view_instance_id,
    _r.begin_insert_time,
    _r.end_insert_time,
    _r.min_event_time,
    _r.max_event_time,
    _r.schema_hash,
    _r.source_hash,
    _r.num_rows,
    _r.file_path,
    _r.file_size,
    _r.sort_order,
    _r.updated,
    _r.stale_at,
    _r.frozen_at,
)
_of_view = (_r.view_set_name == bind("of_view"), _r.view_instance_id == bind("instance"))
_widest = sa.literal_column(str(WIDEST), sa.BigInteger)
_meeting = (
    *_of_view,
    _r.begin_insert_time > bind("begin") - _widest,
    _r.begin_insert_time < bind("end"),
    _r.end_insert_time > bind("begin"),
)
RANGES_BETWEEN = Statement(
    sa.select(*_RANGE).where(*_meeting).order_by(_r.begin_insert_time), "of_view", "instance", "begin", "end"
)


def _marked(mark: int, is_marked: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.case((is_marked, sa.literal_column(str(mark), sa.Integer)), else_=sa.literal_column("0", sa.Integer))


#: What can be said of a range, each by a bit.
STALE_MARK, FROZEN_MARK, OUTDATED_MARK, EMPTY_MARK = 1, 2, 4, 8
OUTLINES_BETWEEN = Statement(
    sa.select(
        _r.begin_insert_time,
        _r.end_insert_time,
        _r.num_rows,
        _marked(STALE_MARK, _r.stale_at.is_not(None))
        + _marked(FROZEN_MARK, _r.frozen_at.is_not(None))
        + _marked(OUTDATED_MARK, _r.schema_hash != bind("hash"))
        + _marked(EMPTY_MARK, _r.file_path.is_(None)),
    )
    .where(*_meeting)
    .order_by(_r.begin_insert_time),
    "of_view",
    "instance",
    "hash",
    "begin",
    "end",
)
ALL_RANGES = Statement(sa.select(*_RANGE).where(*_of_view).order_by(_r.begin_insert_time), "of_view", "instance")
COUNT_ROWS = Statement(
    sa.select(
        sa.func.coalesce(sa.func.sum(_r.num_rows), sa.literal_column("0")),
        sa.func.coalesce(
            sa.func.sum(
                sa.case(
                    (
                        sa.or_(_r.begin_insert_time < bind("begin"), _r.end_insert_time > bind("end")),
                        sa.literal_column("1"),
                    ),
                    else_=sa.literal_column("0"),
                )
            ),
            sa.literal_column("0"),
        ),
    ).where(*_meeting),
    "of_view",
    "instance",
    "begin",
    "end",
)
COUNT_ALL_ROWS = Statement(
    sa.select(sa.func.coalesce(sa.func.sum(_r.num_rows), sa.literal_column("0"))).where(*_of_view),
    "of_view",
    "instance",
)
COUNT_MARKED = Statement(
    sa.select(_r.view_set_name, sa.func.count(_r.stale_at), sa.func.count(_r.frozen_at)).group_by(_r.view_set_name)
)
_COLUMNS = tuple(str(column.name) for column in schema.lakehouse_partitions.columns)[1:]
INSERT_RANGE = insert_into(schema.lakehouse_partitions, *_COLUMNS)
_locking = {
    database: sa.select(*_RANGE).where(among(_r.id, "ids", database)).order_by(_r.id).with_for_update()
    for database in (SQLITE, POSTGRESQL)
}
LOCK_RANGES = Statement(_locking[SQLITE], "ids", postgresql=_locking[POSTGRESQL])
_deleting = {
    database: sa.delete(schema.lakehouse_partitions).where(among(_r.id, "ids", database))
    for database in (SQLITE, POSTGRESQL)
}
DELETE_RANGES = Statement(_deleting[SQLITE], "ids", postgresql=_deleting[POSTGRESQL])
# --- what must not be: checked by `verify`
_instances = schema.view_instances.join(schema.views, _v.id == _i.view_id)
_own = sa.and_(_r.view_set_name == _v.name, _r.view_instance_id == _i.instance)
WITHOUT_FILE = Statement(
    sa.select(_r.file_path, _r.num_rows, _f.row_count)
    .select_from(
        _instances.join(schema.lakehouse_partitions, _own).outerjoin(
            schema.table_files,
            sa.and_(_f.file_path == _r.file_path, _f.table_id == _i.table_id, _f.to_version.is_(None)),
        )
    )
    .where(_r.file_path.is_not(None), sa.or_(_f.id.is_(None), _f.row_count != _r.num_rows))
)
WITHOUT_RANGE = Statement(
    sa.select(_f.file_path)
    .select_from(
        _instances.join(schema.table_files, sa.and_(_f.table_id == _i.table_id, _f.to_version.is_(None))).outerjoin(
            schema.lakehouse_partitions, sa.and_(_own, _r.file_path == _f.file_path)
        )
    )
    .where(_r.id.is_(None))
)
_other = schema.lakehouse_partitions.alias("other")
OVERLAPPING_RANGES = Statement(
    sa.select(_r.view_set_name, _r.begin_insert_time, _r.end_insert_time)
    .select_from(_instances.join(schema.lakehouse_partitions, _own))
    .where(
        sa.exists(
            sa.select(_other.c.id).where(
                _other.c.view_set_name == _r.view_set_name,
                _other.c.view_instance_id == _r.view_instance_id,
                _other.c.id != _r.id,
                _other.c.begin_insert_time > _r.begin_insert_time - _widest,
                _other.c.begin_insert_time < _r.end_insert_time,
                _other.c.end_insert_time > _r.begin_insert_time,
            )
        )
    )
    .order_by(_r.view_set_name, _r.begin_insert_time)
)


@dataclass(frozen=True)
class Range:
    """A built range of a view: half-open in event time. One without a file is empty."""

    id: int
    instance: str
    begin: datetime
    end: datetime
    min_event_time: datetime | None
    max_event_time: datetime | None
    schema_hash: str
    source_hash: str
    num_rows: int
    file_path: str | None
    file_size: int
    sort_order: tuple[str, ...]
    updated: datetime
    #: Since when its sources have other rows, and since when some of their rows are gone.
    stale_at: datetime | None
    frozen_at: datetime | None

    @property
    def is_empty(self) -> bool:
        """Whether it was built and has no rows."""
        return self.file_path is None


#: Begin, end and rows of a built range, and what can be said of it: a plan of very many needs no more.
Outline = tuple[int, int, int, int]


@dataclass(frozen=True)
class NewRange:
    """A range that was just built."""

    begin: int
    end: int
    schema_hash: str
    source_hash: str
    num_rows: int = 0
    file_path: str | None = None
    file_size: int = 0
    min_event_time: int | None = None
    max_event_time: int | None = None
    sort_order: tuple[str, ...] = ()


def shown_range(begin: int, end: int) -> str:
    """A range as people read it."""
    first, last = (to_datetime(time).replace(tzinfo=None).isoformat(timespec="minutes") for time in (begin, end))
    return f"[{first}, {last})"


def range_from(row: Row) -> Range:
    """A range from its columns."""
    ident, instance, begin, end, least, most, schema_hash, source_hash, rows, path, size, order, updated, *marks = row
    parsed = orjson.loads(order) if isinstance(order, str) else order
    return Range(
        ident,
        instance,
        to_datetime(begin),
        to_datetime(end),
        _moment(least),
        _moment(most),
        schema_hash,
        source_hash,
        rows,
        path,
        size,
        tuple(parsed or ()),
        to_datetime(updated),
        _moment(marks[0]),
        _moment(marks[1]),
    )


def _moment(time: int | None) -> datetime | None:
    return None if time is None else to_datetime(time)


def ranges_between(reader: Reader, view: str, instance: str, begin: int, end: int) -> list[Range]:
    """What is built of an instance that meets a range, in order."""
    return [range_from(row) for row in reader.all(RANGES_BETWEEN, view, instance, begin, end)]


def outlines_between(
    reader: Reader, view: str, instance: str, schema_hash: str, begin: int, end: int
) -> Sequence[Outline]:
    """What is built of an instance that meets a range, in order, in as few words as a plan needs."""
    # As the driver gives them: a view may have very many.
    return reader.all(OUTLINES_BETWEEN, view, instance, schema_hash, begin, end)


def outline_of(item: Range, schema_hash: str) -> Outline:
    """A range in as few words as a plan needs; `schema_hash` is that of the view's present query."""
    marks = (
        STALE_MARK * (item.stale_at is not None)
        + FROZEN_MARK * (item.frozen_at is not None)
        + OUTDATED_MARK * (item.schema_hash != schema_hash)
        + EMPTY_MARK * item.is_empty
    )
    return to_ms(item.begin), to_ms(item.end), item.num_rows, marks


def all_ranges(reader: Reader, view: str, instance: str) -> list[Range]:
    """All that is built of an instance, in order."""
    return [range_from(row) for row in reader.all(ALL_RANGES, view, instance)]


def count_rows(reader: Reader, view: str, instance: str, span: tuple[int, int] | None) -> int | None:
    """The rows of all ranges, or of those of a time; none if a range lies in that time only in part."""
    if span is None:
        row = reader.one(COUNT_ALL_ROWS, view, instance)
        assert row is not None
        return int(row[0])
    row = reader.one(COUNT_ROWS, view, instance, *span)
    assert row is not None
    return None if row[1] else int(row[0])


def count_marked(reader: Reader) -> dict[str, tuple[int, int]]:
    """How many ranges of each view are stale, and how many are frozen."""
    return {name: (int(stale), int(frozen)) for name, stale, frozen in reader.all(COUNT_MARKED)}


def locked_ranges(transaction: Transaction, ids: Sequence[int]) -> list[Range]:
    """Ranges by their ids, which nobody can mark or remove until the transaction ends."""
    return [range_from(row) for row in transaction.all(LOCK_RANGES, transaction.listed(ids))]


def replaced_by(transaction: Transaction, view: str, instance: str, begin: int, end: int) -> list[Range]:
    """The ranges in whose place a new one comes, locked; one that lies only partly in it is refused."""
    found = ranges_between(transaction, view, instance, begin, end)
    locked = locked_ranges(transaction, [item.id for item in found])
    for item in locked:
        low, high = to_ms(item.begin), to_ms(item.end)
        if low < begin or high > end:
            raise RangeOverlap(
                f"{shown_range(begin, end)} would overlap {shown_range(low, high)}, which is built",
                on=f"view {view}",
                remedy="Build a range that covers the other, or retire that one first",
            )
    return locked


def retire_ranges(transaction: Transaction, view: str, ranges: Sequence[Range]) -> int:
    """Remove the rows of ranges that were locked; how many, which is how many were asked for."""
    if not ranges:
        return 0
    removed = transaction.run(DELETE_RANGES, transaction.listed([item.id for item in ranges]))
    if removed != len(ranges):
        raise RegistryCorrupt(
            f"{removed} ranges were removed instead of {len(ranges)}", on=f"view {view}", remedy="Run lakebook verify"
        )
    return removed


def enter_range(
    transaction: Transaction, view: str, instance: str, made: NewRange, *, stale: bool, frozen: bool
) -> None:
    """Enter a built range. The transaction holds the lock of the view's table."""
    now = transaction.clock.now_ms()
    order = orjson.dumps(list(made.sort_order)).decode()
    transaction.insert_many(
        INSERT_RANGE,
        [
            (
                view,
                instance,
                made.begin,
                made.end,
                made.min_event_time,
                made.max_event_time,
                made.schema_hash,
                made.source_hash,
                made.num_rows,
                made.file_path,
                made.file_size,
                FORMAT_VERSION,
                order,
                now,
                now if stale else None,
                now if frozen else None,
            )
        ],
    )


def check_ranges(reader: Reader) -> Iterator[Finding]:
    """What must not be: ranges that overlap, or that are not exactly the files of their view's table."""
    for path, rows, found in reader.all(WITHOUT_FILE):
        yield Finding("ranges", path, f"the range has {rows} rows, its file in the view's table {found}")
    for (path,) in reader.all(WITHOUT_RANGE):
        yield Finding("ranges", path, "the view's table has it, and no range has")
    for view, begin, end in reader.all(OVERLAPPING_RANGES):
        yield Finding("ranges", f"view {view}", f"{shown_range(begin, end)} overlaps another range")
