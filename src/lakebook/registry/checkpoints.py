"""What a checkpoint takes from the registry: what the files of the warehouse do not tell by themselves.

Names, ids and configuration; offsets, watermarks and positions; where each table's Iceberg metadata is; and,
file by file, only what no published metadata lists. Footers and statistics are read back from the files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.changes import row_of
from lakebook.registry.statements import ZERO, Statement, bind
from lakebook.registry.transactions import Reader

#: Versions of each table whose rows are kept, the newest; of older ones a rebuild knows what was published.
MOST_VERSIONS = 1000
#: Times that a part of a source has lost and that are told one by one, the newest; older ones count as one time.
MOST_LOSSES = 1000
_PAGE = 5000

_t = schema.tables.c
_f = schema.table_files.c
_i = schema.iceberg_tables.c
_v = schema.table_versions.c
_k = schema.table_snapshots.c
_s = schema.segments.c
_lo = schema.lake_objects.c

#: Registry tables that a checkpoint has as a whole.
WHOLE = (
    schema.namespaces,
    schema.topics,
    schema.partitions,
    schema.consumer_groups,
    schema.consumer_offsets,
    schema.offset_resets,
    schema.producers,
    schema.producer_batches,
    schema.sink_batches,
    schema.mirror_positions,
    schema.tables,
    schema.table_metadata,
    schema.table_horizons,
    schema.iceberg_tables,
    schema.lakehouse_partitions,
    schema.pipelines,
    schema.pipeline_offsets,
    schema.views,
    schema.view_instances,
    schema.view_sources,
    schema.pauses,
    schema.known_gaps,
)
# The paths alone say which files counted; everything else they say themselves. Of one that is gone then, views need to
# know the times.
_SEGMENT_COLUMNS = (
    "topic_id",
    "partition_id",
    "base_offset",
    "record_count",
    "s3_key",
    "min_timestamp",
    "max_timestamp",
)
# Of snapshots that this book published, the summary says which version they are.
_SNAPSHOT_COLUMNS = ("table_id", "snapshot_id", "version", "pinned_version", "is_ours")

IDENTITY = Statement(sa.select(schema.book.c.book_id, schema.book.c.epoch, schema.book.c.created_at))
# Moves with every captured change, and with those of what is not captured.
CHANGES = Statement(
    sa.select(
        sa.select(sa.func.count()).select_from(schema.lake_objects).scalar_subquery(),
        sa.select(sa.func.coalesce(sa.func.sum(_lo.last_sequence), ZERO)).scalar_subquery(),
        sa.select(sa.func.count()).select_from(schema.namespaces).scalar_subquery(),
        *(
            sa.select(value).scalar_subquery()
            for table in (schema.pipelines, schema.views)
            for value in (sa.func.count(table.c.id), sa.func.coalesce(sa.func.max(table.c.updated_at), ZERO))
        ),
    )
)
PENDING_TABLES = Statement(
    sa.select(_t.id, sa.func.coalesce(_i.version, sa.literal_column("-1", sa.BigInteger)))
    .select_from(schema.tables.outerjoin(schema.iceberg_tables, _i.table_id == _t.id))
    .where(_t.deleted_at.is_(None), sa.or_(_i.version.is_(None), _i.version < _t.version))
    .order_by(_t.id)
)


def _since(number: sa.ColumnElement[int], *more: sa.ColumnElement[bool]) -> Statement:
    """Files of a table whose `number` is above that of what is published, a page of them behind the last one's."""
    clause = (
        sa.select(schema.table_files)
        .where(_f.table_id == bind("of_table"), number > bind("published"), _f.retired_at.is_(None), *more)
        .where(sa.tuple_(number, _f.id) > sa.tuple_(bind("after_number"), bind("after_id")))
        .order_by(number, _f.id)
        .limit(bind("most", sa.Integer))
    )
    return Statement(clause, "of_table", "published", "after_number", "after_id", "most")


#: With the column by which each is paged.
SINCE = (
    (_since(_f.from_version), "from_version"),
    (_since(_f.to_version, _f.from_version <= bind("published")), "to_version"),
)


@dataclass(frozen=True)
class Rows:
    """Rows of one registry table, in pages."""

    table: str
    columns: tuple[str, ...]
    pages: Callable[[], Iterator[list[Sequence[Any]]]]


@dataclass(frozen=True)
class Identity:
    """Whose checkpoint it is."""

    book_id: str
    epoch: str
    created_at: int


def identity_of(reader: Reader) -> Identity:
    """Who the book is."""
    row = reader.one(IDENTITY)
    assert row is not None
    return Identity(*row)


def changes_of(reader: Reader) -> tuple[int, ...]:
    """Numbers that are others when something has changed that a checkpoint has."""
    row = reader.one(CHANGES)
    assert row is not None
    return tuple(int(number) for number in row)


def checkpoint_rows(reader: Reader) -> Iterator[Rows]:
    """Everything that a checkpoint has; the caller reads on one consistent state."""
    for table in WHOLE:
        yield _of(reader, table, tuple(str(column.name) for column in table.columns))
    newest = _v.version > sa.select(_t.version - MOST_VERSIONS).where(_t.id == _v.table_id).scalar_subquery()
    yield _of(
        reader, schema.table_versions, tuple(str(column.name) for column in schema.table_versions.columns), newest
    )
    foreign = sa.or_(sa.not_(_k.is_ours), _k.version.is_(None))
    yield _of(reader, schema.table_snapshots, _SNAPSHOT_COLUMNS, foreign)
    yield _of(reader, schema.segments, _SEGMENT_COLUMNS, by=("topic_id", "partition_id", "base_offset"))
    losses = _of(reader, schema.source_losses, tuple(str(column.name) for column in schema.source_losses.columns))
    yield Rows(losses.table, losses.columns, lambda: _few_losses(losses.pages()))
    names = tuple(str(column.name) for column in schema.table_files.columns)
    yield Rows("table_files", names, lambda: _unpublished(reader))


def _unpublished(reader: Reader) -> Iterator[list[Sequence[Any]]]:
    """Files that published metadata does not list, or that it still lists though they were ended."""
    for table_id, published in reader.all(PENDING_TABLES):
        for statement, number in SINCE:
            after = (-1, 0)
            while True:
                found = [
                    row_of(schema.table_files, row) for row in reader.all(statement, table_id, published, *after, _PAGE)
                ]
                yield [list(row.values()) for row in found]
                if len(found) < _PAGE:
                    break
                after = (found[-1][number], found[-1]["id"])


def _few_losses(pages: Iterable[list[Sequence[Any]]]) -> Iterator[list[Sequence[Any]]]:
    """Times that sources have lost, which come in the order of their key: of each part of a source only so many."""
    newest: deque[Sequence[Any]] = deque()
    older: Sequence[Any] | None = None

    def told() -> list[Sequence[Any]]:
        return [*([] if older is None else [older]), *newest]

    for page in pages:
        for row in page:
            *part, _, _ = row
            if newest and list(newest[0][:-2]) != part:
                yield told()
                newest.clear()
                older = None
            newest.append(row)
            if len(newest) == MOST_LOSSES:
                *_, begin, end = newest.popleft()
                older = [*part, begin if older is None else older[-2], end]
    yield told()


def _of(
    reader: Reader,
    table: sa.Table,
    columns: tuple[str, ...],
    where: sa.ColumnElement[bool] | None = None,
    by: tuple[str, ...] = (),
) -> Rows:
    key = by or tuple(str(column.name) for column in table.primary_key.columns)
    whole = len(columns) == len(table.columns)

    def pages() -> Iterator[list[Sequence[Any]]]:
        first, following = _paged(table, columns, key) if where is None else _statements(table, columns, key, where)
        rows = reader.all(first, _PAGE)
        places = [columns.index(name) for name in key]
        while rows:
            yield [list(row_of(table, row).values()) for row in rows] if whole else list(rows)
            rows = reader.all(following, *(rows[-1][place] for place in places), _PAGE) if len(rows) == _PAGE else []

    return Rows(str(table.name), columns, pages)


@cache
def _paged(table: sa.Table, columns: tuple[str, ...], key: tuple[str, ...]) -> tuple[Statement, Statement]:
    return _statements(table, columns, key, None)


def _statements(
    table: sa.Table, columns: tuple[str, ...], key: tuple[str, ...], where: sa.ColumnElement[bool] | None
) -> tuple[Statement, Statement]:
    """The first page of some rows in the order of their key, and the one after a key."""
    clause = sa.select(*(table.c[name] for name in columns)).order_by(*(table.c[name] for name in key))
    if where is not None:
        clause = clause.where(where)
    names = [f"after_{name}" for name in key]
    after = sa.tuple_(*(table.c[name] for name in key)) > sa.tuple_(
        *(bind(given, table.c[name].type) for given, name in zip(names, key, strict=True))
    )
    paged = [item.limit(bind("most", sa.Integer)).offset(ZERO) for item in (clause, clause.where(after))]
    return Statement(paged[0], "most"), Statement(paged[1], *names, "most")
