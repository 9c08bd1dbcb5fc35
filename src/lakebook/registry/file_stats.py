"""Column statistics of files, and the indexed search for the files a predicate can match.

Bounds are stored in a form whose byte order is the order of the values. To find the
intervals that meet a range without walking through all of them, every row also carries
the order key of its lower bound and the class of its width (a power of two): within one
class a range of keys finds all of them, so a search is a handful of index ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.freshness import Span, span_of
from lakebook.registry.statements import POSTGRESQL, SQLITE, ZERO, Statement, among, bind, insert_into
from lakebook.registry.transactions import Reader, Row, Transaction

_s = schema.file_column_stats.c
_f = schema.table_files.c

INSERT_STATS = insert_into(schema.file_column_stats)


@dataclass(frozen=True, slots=True)
class ColumnStats:
    """What is known of one column in one file; none: not known."""

    field_id: int
    lower: bytes | None
    upper: bytes | None
    is_exact: bool
    value_count: int | None
    null_count: int | None
    nan_count: int | None
    column_size: int | None
    width: int
    low_key: int


def insert_stats(transaction: Transaction, table_id: int, files: Iterable[tuple[int, Sequence[ColumnStats]]]) -> None:
    """Store the statistics of files."""
    rows = [
        (
            table_id,
            file_id,
            stats.field_id,
            stats.lower,
            stats.upper,
            stats.is_exact,
            stats.value_count,
            stats.null_count,
            stats.nan_count,
            stats.column_size,
            stats.width,
            stats.low_key,
        )
        for file_id, columns in files
        for stats in columns
    ]
    transaction.insert_many(INSERT_STATS, rows)


def _stats_among(database: str) -> sa.Select[Any]:
    return sa.select(schema.file_column_stats).where(
        _s.table_id == bind("of_table"),
        _s.file_id >= bind("first"),
        _s.file_id <= bind("last"),
        among(_s.field_id, "fields", database),
    )


STATS_BETWEEN = Statement(
    _stats_among(SQLITE), "of_table", "first", "last", "fields", postgresql=_stats_among(POSTGRESQL)
)


def _stats_of(database: str) -> sa.Select[Any]:
    return sa.select(schema.file_column_stats).where(
        _s.table_id == bind("of_table"), among(_s.file_id, "files", database), among(_s.field_id, "fields", database)
    )


STATS_OF = Statement(_stats_of(SQLITE), "of_table", "files", "fields", postgresql=_stats_of(POSTGRESQL))


def _deleting(database: str) -> sa.Delete:
    return sa.delete(schema.file_column_stats).where(
        _s.table_id == bind("of_table"), among(_s.file_id, "files", database)
    )


DELETE_STATS = Statement(_deleting(SQLITE), "of_table", "files", postgresql=_deleting(POSTGRESQL))
DELETE_STATS_BETWEEN = Statement(
    sa.delete(schema.file_column_stats).where(
        _s.table_id == bind("of_table"), _s.file_id >= bind("first"), _s.file_id <= bind("last")
    ),
    "of_table",
    "first",
    "last",
)


# In plain SQL, for the order of the joins is what makes it fast: for each class of widths one range of
# the index, and then the file. Left to itself, either database walks through all files of the table.
_MEETING = {
    SQLITE: """
SELECT f.id
FROM json_each(:probes) AS probe CROSS JOIN file_column_stats AS s CROSS JOIN table_files AS f
WHERE s.table_id = :of_table AND s.field_id = :of_field AND s.width = json_extract(probe.value, '$[0]')
AND s.low_key >= json_extract(probe.value, '$[1]') AND s.low_key <= json_extract(probe.value, '$[2]')
AND (s.width = 65 OR s.upper_bound >= :range_low) {below}
AND f.table_id = s.table_id AND f.id = s.file_id
AND f.from_version <= :at_version AND (f.to_version IS NULL OR f.to_version > :at_version)
LIMIT :most
""",
    POSTGRESQL: """
SELECT f.id
FROM jsonb_array_elements(CAST(:probes AS JSONB)) AS probe
CROSS JOIN LATERAL (
    SELECT s.file_id FROM file_column_stats AS s
    WHERE s.table_id = CAST(:of_table AS BIGINT) AND s.field_id = CAST(:of_field AS INTEGER)
    AND s.width = CAST(probe.value ->> 0 AS INTEGER)
    AND s.low_key >= CAST(probe.value ->> 1 AS BIGINT) AND s.low_key <= CAST(probe.value ->> 2 AS BIGINT)
    AND (s.width = 65 OR s.upper_bound >= :range_low) {below}
    OFFSET 0
) AS met
JOIN table_files AS f ON f.table_id = CAST(:of_table AS BIGINT) AND f.id = met.file_id
WHERE f.from_version <= CAST(:at_version AS BIGINT)
AND (f.to_version IS NULL OR f.to_version > CAST(:at_version AS BIGINT))
LIMIT CAST(:most AS INTEGER)
""",
}


def _meeting_statement(*, open_above: bool) -> Statement:
    names = ["of_table", "of_field", "at_version", "probes", "range_low"]
    if not open_above:
        names.append("range_high")
    below = "" if open_above else "AND (s.lower_bound IS NULL OR s.lower_bound <= :range_high)"
    clauses = {database: text.format(below=below) for database, text in _MEETING.items()}
    return Statement(clauses[SQLITE], *names, "most", postgresql=clauses[POSTGRESQL])


FILES_MEETING = _meeting_statement(open_above=False)
FILES_MEETING_ABOVE = _meeting_statement(open_above=True)


def files_meeting(
    reader: Reader,
    table_id: int,
    field_id: int,
    version: int,
    probes: Sequence[tuple[int, int, int]],
    low: bytes | None,
    high: bytes | None,
    most: int,
) -> list[int]:
    """Ids of a version's files whose interval of a column meets a range; at most that many."""
    given = (table_id, field_id, version, orjson.dumps(probes).decode(), low or b"")
    if high is None:
        rows = reader.all(FILES_MEETING_ABOVE, *given, most)
    else:
        rows = reader.all(FILES_MEETING, *given, high, most)
    return [int(row[0]) for row in rows]


def _stats_from(row: Row) -> tuple[int, ColumnStats]:
    _, file_id, field_id, lower, upper, exact, *rest = row
    return file_id, ColumnStats(field_id, lower, upper, bool(exact), *rest)


def stats_of_files(
    reader: Reader, table_id: int, files: Sequence[int], fields: Sequence[int]
) -> dict[tuple[int, int], ColumnStats]:
    """Statistics by file and field, for a chunk of files in the order of their ids."""
    if not files:
        return {}
    if files[-1] - files[0] < 2 * len(files):
        rows = reader.all(STATS_BETWEEN, table_id, files[0], files[-1], reader.listed(fields))
    else:
        rows = reader.all(STATS_OF, table_id, reader.listed(files), reader.listed(fields))
    return {(file_id, stats.field_id): stats for file_id, stats in map(_stats_from, rows)}


_mine = sa.and_(_s.table_id == _f.table_id, _s.file_id == _f.id, _s.field_id == bind("of_field"))


def _short(database: str) -> sa.Select[Any]:
    return (
        sa.select(_f.id)
        .where(
            _f.table_id == bind("of_table"),
            _f.from_version > bind("since_version"),
            _f.from_version <= bind("at_version"),
            _f.has_statistics,
            sa.text("table_files.content = 0"),
            among(_f.schema_version, "schema_versions", database),
            sa.not_(sa.exists(sa.select(sa.literal_column("1")).select_from(schema.file_column_stats).where(_mine))),
        )
        .limit(bind("most", sa.Integer))
        .offset(ZERO)
    )


FILES_SHORT_OF = Statement(
    _short(SQLITE),
    "of_table",
    "of_field",
    "schema_versions",
    "since_version",
    "at_version",
    "most",
    postgresql=_short(POSTGRESQL),
)


def files_short_of(
    reader: Reader,
    table_id: int,
    field_id: int,
    schema_versions: Sequence[int],
    since: int,
    version: int,
    most: int,
) -> list[int]:
    """Ids of files that came after one version and up to another, and lack the statistics of a column they have."""
    given = (table_id, field_id, reader.listed(schema_versions), since, version, most)
    return [int(row[0]) for row in reader.all(FILES_SHORT_OF, *given)]


_at = sa.and_(
    _f.table_id == bind("of_table"),
    _f.from_version <= bind("at_version"),
    sa.or_(_f.to_version.is_(None), _f.to_version > bind("at_version")),
)


def _unknown_extremes(database: str) -> sa.Select[Any]:
    """Files that leave the answer to their bytes: those without statistics of the column, or with cut bounds.

    One that is older than the column has no row for it either: it has only nulls.
    """
    has_row = _s.is_exact.is_not(None)
    return (
        sa.select(sa.func.count(_f.id))
        .select_from(schema.table_files.outerjoin(schema.file_column_stats, _mine))
        .where(
            _at,
            sa.or_(
                sa.not_(_f.has_statistics),
                sa.and_(sa.not_(has_row), among(_f.schema_version, "schema_versions", database)),
                sa.and_(has_row, sa.not_(_s.is_exact)),
                sa.and_(
                    sa.literal_column("1") == bind("has_nan", sa.Integer),
                    has_row,
                    sa.or_(_s.nan_count.is_(None), _s.nan_count > sa.literal_column("0")),
                    sa.or_(_s.null_count.is_(None), _s.value_count.is_(None), _s.null_count < _s.value_count),
                ),
            ),
        )
    )


UNKNOWN_EXTREMES = Statement(
    _unknown_extremes(SQLITE),
    "of_table",
    "at_version",
    "of_field",
    "has_nan",
    "schema_versions",
    postgresql=_unknown_extremes(POSTGRESQL),
)
EXTREMES = Statement(
    sa.select(sa.func.min(_s.lower_bound), sa.func.max(_s.upper_bound))
    .select_from(schema.table_files.join(schema.file_column_stats, _mine))
    .where(_at),
    "of_table",
    "at_version",
    "of_field",
)


def extremes_of(
    reader: Reader, table_id: int, version: int, field_id: int, schema_versions: Sequence[int], *, has_nan: bool
) -> tuple[bytes | None, bytes | None] | None:
    """The least and the largest bound of a column in a version; none unless all are exact.

    `schema_versions` are those that have the column.
    """
    having = reader.listed(schema_versions)
    unknown = reader.one(UNKNOWN_EXTREMES, table_id, version, field_id, int(has_nan), having)
    if unknown is None or unknown[0]:
        return None
    row = reader.one(EXTREMES, table_id, version, field_id)
    assert row is not None
    return row[0], row[1]


STATS_OF_ONE = Statement(
    sa.select(schema.file_column_stats).where(_s.table_id == bind("of_table"), _s.file_id == bind("of_file")),
    "of_table",
    "of_file",
)


def all_stats_of(reader: Reader, table_id: int, file_id: int) -> tuple[ColumnStats, ...]:
    """All statistics of one file."""
    return tuple(_stats_from(row)[1] for row in reader.all(STATS_OF_ONE, table_id, file_id))


def span_of_stats(stats: ColumnStats) -> Span | None:
    """The times that the statistics of a column of timestamps stand for; none if it has nothing but nulls."""
    return span_of(stats.lower, stats.upper, stats.value_count, stats.null_count)
