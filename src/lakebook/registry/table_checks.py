"""The invariants of tables that the registry alone can tell, on one consistent state of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.registry import schema
from lakebook.registry.changes import insert_new, row_of
from lakebook.registry.commits import is_doubtful
from lakebook.registry.gaps import VERSIONS as LOST_VERSIONS
from lakebook.registry.gaps import known_gaps
from lakebook.registry.mirrors import check_mirrors
from lakebook.registry.publishing import (
    MANIFEST,
    MANIFEST_LIST,
    METADATA,
    Pointer,
    SnapshotRecord,
    pointer_of,
    snapshots_of,
)
from lakebook.registry.ranges import check_ranges
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind
from lakebook.registry.stream_checks import Finding
from lakebook.registry.stream_folders import segment_paths
from lakebook.registry.table_files import ADD_TO_STATS, CHUNK, STATS_ROW
from lakebook.registry.tables import GET_TABLE_BY_ID, TABLE_ROW, TableRecord, captured_update, table_from
from lakebook.registry.temporary_files import NOT_DELETED
from lakebook.registry.transactions import Reader, Transaction

_t = schema.tables.c
_f = schema.table_files.c
_s = schema.table_stats.c
_c = schema.file_column_stats.c
_p = schema.partition_metadata.c
_w = schema.temporary_files.c
_v = schema.table_versions.c
_n = schema.namespaces.c
_m = schema.table_metadata.c
_d = schema.footer_debts.c
_b = schema.branch_files.c
_i = schema.iceberg_tables.c
_x = schema.iceberg_files.c
_l = schema.snapshot_manifests.c
_k = schema.table_snapshots.c
_u = schema.metadata_updates.c


#: The property by which a table lets other engines delete its files.
GC_ENABLED = "gc.enabled"


def _of_rows(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """A value where the file is one of rows, and zero where it is one of deletes."""
    return sa.case((_f.content == ZERO, value), else_=ZERO)


_live_sums = (
    sa.select(
        _f.table_id,
        sa.func.coalesce(sa.func.sum(_of_rows(_f.row_count)), ZERO).label("rows"),
        sa.func.coalesce(sa.func.sum(_of_rows(ONE)), ZERO).label("files"),
        sa.func.coalesce(sa.func.sum(_f.file_size), ZERO).label("size"),
        sa.func.coalesce(sa.func.sum(_f.row_count - _of_rows(_f.row_count)), ZERO).label("deleted"),
    )
    .where(_f.to_version.is_(None))
    .group_by(_f.table_id)
    .subquery()
)
TOTALS = Statement(
    sa.select(
        _t.id,
        _n.name,
        _t.name,
        _t.version,
        _t.deleted_at,
        _t.row_count,
        _t.file_count,
        _t.total_size,
        _t.deleted_rows,
        _s.row_count,
        _s.file_count,
        _s.total_size,
        _s.deleted_rows,
        sa.func.coalesce(_live_sums.c.rows, ZERO),
        sa.func.coalesce(_live_sums.c.files, ZERO),
        sa.func.coalesce(_live_sums.c.size, ZERO),
        sa.func.coalesce(_live_sums.c.deleted, ZERO),
        schema.table_horizons.c.min_readable,
    )
    .select_from(
        schema.tables.join(schema.namespaces, _n.id == _t.namespace_id)
        .outerjoin(schema.table_stats, _s.table_id == _t.id)
        .outerjoin(_live_sums, _live_sums.c.table_id == _t.id)
        .outerjoin(schema.table_horizons, schema.table_horizons.c.table_id == _t.id)
    )
    .order_by(_t.id)
)
VERSIONS = Statement(
    sa.select(_v.table_id, sa.func.count(), sa.func.min(_v.version), sa.func.max(_v.version)).group_by(_v.table_id)
)
BAD_VERSIONS = Statement(
    sa.select(_f.file_path, _f.from_version, _f.to_version, _t.version)
    .select_from(schema.table_files.join(schema.tables, _t.id == _f.table_id))
    .where(
        _t.deleted_at.is_(None),
        sa.or_(_f.from_version > _t.version, _f.to_version > _t.version, _f.id > _t.last_file_id),
    )
)
WITHOUT_COMMIT = Statement(
    sa.select(_f.file_path, schema.commits.c.state)
    .select_from(schema.table_files.outerjoin(schema.commits, schema.commits.c.id == _f.commit_id))
    .where(is_doubtful(_f.created_at))
)
WITHOUT_FOOTER = Statement(
    sa.select(_f.file_path)
    .select_from(
        schema.table_files.outerjoin(schema.partition_metadata, _p.file_path == _f.file_path).outerjoin(
            schema.footer_debts, _d.file_path == _f.file_path
        )
    )
    .where(
        _f.file_type == sa.literal_column("'parquet'"),
        _p.file_path.is_(None),
        # Files of outside engines have until their deadline, of which there is a check of its own.
        _d.file_path.is_(None),
    )
    .distinct()
    .order_by(_f.file_path)
)
OVERDUE = Statement(
    sa.select(_d.file_path, _d.due_at, _d.last_error).where(_d.due_at < bind("now")).order_by(_d.file_path), "now"
)
DEBTS_OF_NOBODY = Statement(
    sa.select(_d.file_path)
    .select_from(
        schema.footer_debts.outerjoin(schema.table_files, _f.file_path == _d.file_path).outerjoin(
            schema.branch_files, _b.file_path == _d.file_path
        )
    )
    .where(_f.file_path.is_(None), _b.file_path.is_(None))
    .order_by(_d.file_path)
)
WRONG_FOOTER = Statement(
    sa.select(_f.file_path, _f.row_count, _p.num_rows, _f.file_size, _p.file_size)
    .select_from(schema.table_files.join(schema.partition_metadata, _p.file_path == _f.file_path))
    .where(sa.or_(_p.num_rows != _f.row_count, _p.file_size != _f.file_size))
    .distinct()
)
# A footer without a file is one that an insert has staged, or that nobody needs.
DANGLING_FOOTERS = Statement(
    sa.select(_p.file_path)
    .select_from(
        schema.partition_metadata.outerjoin(schema.table_files, _f.file_path == _p.file_path)
        .outerjoin(schema.lakehouse_partitions, schema.lakehouse_partitions.c.file_path == _p.file_path)
        .outerjoin(schema.temporary_files, _w.file_path == _p.file_path)
        .outerjoin(schema.branch_files, _b.file_path == _p.file_path)
    )
    .where(
        _f.file_path.is_(None),
        _b.file_path.is_(None),
        schema.lakehouse_partitions.c.file_path.is_(None),
        _w.file_path.is_(None),
        _p.file_path > bind("after"),
    )
    .order_by(_p.file_path)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
DANGLING_STATS = Statement(
    sa.select(_c.table_id, _c.file_id)
    .select_from(
        schema.file_column_stats.outerjoin(schema.table_files, sa.and_(_f.table_id == _c.table_id, _f.id == _c.file_id))
    )
    .where(_f.id.is_(None))
    .distinct()
    .order_by(_c.table_id, _c.file_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "most",
)
_other = schema.table_files.alias("other")
_o = _other.c
# A file that waits is a retired one of a table, in no kept version.
WAITING_BUT_USED = Statement(
    sa.select(_f.file_path)
    .select_from(schema.table_files.join(schema.temporary_files, _w.file_path == _f.file_path))
    .where(sa.or_(_f.retired_at.is_(None), _f.to_version.is_(None)))
    .distinct()
)
# Unless it has been revived meanwhile: then another row has the file.
RETIRED_BUT_NOT_WAITING = Statement(
    sa.select(_f.file_path)
    .select_from(schema.table_files.outerjoin(schema.temporary_files, _w.file_path == _f.file_path))
    .where(
        _f.retired_at.is_not(None),
        _w.file_path.is_(None),
        sa.not_(
            sa.exists(sa.select(ONE).select_from(_other).where(_o.file_path == _f.file_path, _o.retired_at.is_(None)))
        ),
    )
    .distinct()
)
RETIRED_BUT_READABLE = Statement(
    sa.select(_f.file_path)
    .select_from(schema.table_files.join(schema.table_horizons, schema.table_horizons.c.table_id == _f.table_id))
    .where(_f.retired_at.is_not(None), _f.to_version > schema.table_horizons.c.min_readable)
)
RETIRED_BUT_PUBLISHED = Statement(
    sa.select(_f.file_path)
    .select_from(
        schema.table_files.join(schema.tables, _t.id == _f.table_id)
        .join(schema.temporary_files, _w.file_path == _f.file_path)
        .join(
            schema.table_snapshots,
            sa.and_(
                _k.table_id == _f.table_id, _k.pinned_version >= _f.from_version, _k.pinned_version < _f.to_version
            ),
        )
    )
    .where(_t.deleted_at.is_(None))
    .distinct()
)
# A revived file has a row for each time that it was visible.
OVERLAPPING_ROWS = Statement(
    sa.select(_f.file_path)
    .select_from(schema.table_files.join(_other, sa.and_(_o.file_path == _f.file_path, _o.id > _f.id)))
    .where(
        sa.or_(
            _f.table_id != _o.table_id,
            _f.to_version.is_(None),
            _f.to_version > _o.from_version,
            _f.file_size != _o.file_size,
            _f.row_count != _o.row_count,
        )
    )
    .distinct()
)
# How many columns each file has statistics of; partition fields, which are negative, apart.
STATS_PER_FILE = Statement(
    sa.select(
        _f.table_id,
        _f.schema_version,
        _f.file_path,
        sa.func.coalesce(sa.func.sum(sa.case((_c.field_id > ZERO, ONE), else_=ZERO)), ZERO),
    )
    .select_from(
        schema.table_files.outerjoin(schema.file_column_stats, sa.and_(_c.table_id == _f.table_id, _c.file_id == _f.id))
    )
    .where(_f.has_statistics, _f.table_id == bind("of_table"), _f.schema_version == bind("of_schema_version"))
    .group_by(_f.table_id, _f.id, _f.schema_version, _f.file_path)
    .having(sa.func.coalesce(sa.func.sum(sa.case((_c.field_id > ZERO, ONE), else_=ZERO)), ZERO) != bind("columns")),
    "of_table",
    "of_schema_version",
    "columns",
)
SCHEMA_VERSIONS = Statement(
    sa.select(schema.table_metadata.c.table_id, schema.table_metadata.c.schema_version, schema.table_metadata.c.schema)
)
LEASES_BELOW = Statement(
    sa.select(schema.leases.c.id, schema.leases.c.version, schema.table_horizons.c.min_readable)
    .select_from(
        schema.leases.join(schema.table_horizons, schema.table_horizons.c.table_id == schema.leases.c.table_id)
    )
    .where(schema.leases.c.version < schema.table_horizons.c.min_readable)
)
FILES_TO_CHECK = Statement(
    sa.select(
        _f.table_id,
        _f.id,
        _f.file_path,
        _f.file_size,
        _f.file_type,
        _f.row_count,
        _f.checksum,
        _f.schema_version,
        _f.has_statistics,
        _w.state,
        _d.file_path.is_not(None),
    )
    .select_from(
        schema.table_files.outerjoin(schema.temporary_files, _w.file_path == _f.file_path).outerjoin(
            schema.footer_debts, _d.file_path == _f.file_path
        )
    )
    .where(
        _f.file_path > bind("after"),
        # Of a revived file, the newest row alone: its bytes are the same.
        sa.not_(sa.exists(sa.select(ONE).select_from(_other).where(_o.file_path == _f.file_path, _o.id > _f.id))),
    )
    .order_by(_f.file_path)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)


def _present(database: str) -> sa.Select[Any]:
    return (
        sa.select(_f.file_path)
        .select_from(schema.table_files.outerjoin(schema.temporary_files, _w.file_path == _f.file_path))
        .where(
            among(_f.file_path, "paths", database),
            sa.or_(_w.state.is_(None), _w.state != sa.literal_column("'deleting'")),
        )
    )


PRESENT_FILES = Statement(_present(SQLITE), "paths", postgresql=_present(POSTGRESQL))
SET_TOTALS = Statement(
    sa.update(schema.tables)
    .where(_t.id == bind("of_table"))
    .values(
        row_count=bind("rows"),
        file_count=bind("files"),
        total_size=bind("size"),
        deleted_rows=bind("deleted"),
        updated_at=bind("now"),
    )
    .returning(*schema.tables.columns),
    "rows",
    "files",
    "size",
    "deleted",
    "now",
    "of_table",
)
LIVE_TOTALS = Statement(
    sa.select(
        sa.func.coalesce(sa.func.sum(_of_rows(_f.row_count)), ZERO),
        sa.func.coalesce(sa.func.sum(_of_rows(ONE)), ZERO),
        sa.func.coalesce(sa.func.sum(_f.file_size), ZERO),
        sa.func.coalesce(sa.func.sum(_f.row_count - _of_rows(_f.row_count)), ZERO),
    ).where(_f.table_id == bind("of_table"), _f.to_version.is_(None)),
    "of_table",
)
# --- published tables ------------------------------------------------------------


def _kind(kind: str) -> sa.ColumnElement[bool]:
    return _x.kind == sa.literal_column(f"'{kind}'")


_newest = (
    sa.select(_k.table_id, sa.func.max(_k.sequence_number).label("sequence"), sa.func.max(_k.version).label("version"))
    .group_by(_k.table_id)
    .subquery()
)
POINTERS = Statement(
    sa.select(
        _n.name,
        _t.name,
        _t.version,
        _i.version,
        _i.snapshot_id,
        _i.last_sequence,
        _i.metadata_location,
        schema.table_horizons.c.min_readable,
        _x.table_id,
        _k.snapshot_id,
        _newest.c.sequence,
        _newest.c.version,
    )
    .select_from(
        schema.iceberg_tables.join(schema.tables, sa.and_(_t.id == _i.table_id, _t.deleted_at.is_(None)))
        .join(schema.namespaces, _n.id == _t.namespace_id)
        .outerjoin(schema.table_horizons, schema.table_horizons.c.table_id == _t.id)
        .outerjoin(
            schema.iceberg_files,
            sa.and_(_x.file_path == _i.metadata_location, _x.table_id == _i.table_id, _kind(METADATA)),
        )
        .outerjoin(schema.table_snapshots, sa.and_(_k.table_id == _i.table_id, _k.snapshot_id == _i.snapshot_id))
        .outerjoin(_newest, _newest.c.table_id == _i.table_id)
    )
    .order_by(_i.table_id)
)
_is_completed = _u.state == sa.literal_column("'completed'")
WRONG_UPDATES = Statement(
    sa.select(_n.name, _t.name, _u.state, sa.func.min(_u.version), sa.func.max(_u.version), _i.version)
    .select_from(
        schema.metadata_updates.join(schema.tables, sa.and_(_t.id == _u.table_id, _t.deleted_at.is_(None)))
        .join(schema.namespaces, _n.id == _t.namespace_id)
        .outerjoin(schema.iceberg_tables, _i.table_id == _t.id)
    )
    .where(
        sa.or_(
            sa.and_(_is_completed, sa.or_(_i.version.is_(None), _u.version > _i.version)),
            sa.and_(sa.not_(_is_completed), _u.version <= _i.version),
        )
    )
    .group_by(_t.id, _n.name, _t.name, _u.state, _i.version)
    .order_by(_t.id, _u.state)
)
SNAPSHOTS_OF_NOTHING = Statement(
    sa.select(_k.table_id, _k.snapshot_id)
    .select_from(schema.table_snapshots.outerjoin(schema.iceberg_tables, _i.table_id == _k.table_id))
    .where(_i.table_id.is_(None))
)
LISTS_NOT_KNOWN = Statement(
    sa.select(_k.manifest_list)
    .select_from(
        schema.table_snapshots.join(schema.tables, sa.and_(_t.id == _k.table_id, _t.deleted_at.is_(None))).outerjoin(
            schema.iceberg_files,
            sa.and_(_x.file_path == _k.manifest_list, _x.table_id == _k.table_id, _kind(MANIFEST_LIST)),
        )
    )
    .where(_x.file_path.is_(None))
    .order_by(_k.manifest_list)
)
MANIFESTS_NOT_KNOWN = Statement(
    sa.select(_l.file_path)
    .select_from(
        schema.snapshot_manifests.join(schema.tables, sa.and_(_t.id == _l.table_id, _t.deleted_at.is_(None)))
        .outerjoin(
            schema.iceberg_files,
            sa.and_(_x.file_path == _l.file_path, _x.table_id == _l.table_id, _kind(MANIFEST)),
        )
        .outerjoin(schema.table_snapshots, sa.and_(_k.table_id == _l.table_id, _k.snapshot_id == _l.snapshot_id))
    )
    .where(sa.or_(_x.file_path.is_(None), _k.snapshot_id.is_(None)))
    .distinct()
    .order_by(_l.file_path)
)
# Which metadata and statistics files are needed, only the metadata itself can tell.
NEEDED_BY_NOTHING = Statement(
    sa.select(_x.file_path)
    .select_from(
        schema.iceberg_files.outerjoin(schema.tables, _t.id == _x.table_id)
        .outerjoin(schema.table_snapshots, sa.and_(_k.table_id == _x.table_id, _k.manifest_list == _x.file_path))
        .outerjoin(schema.snapshot_manifests, _l.file_path == _x.file_path)
    )
    .where(
        sa.or_(
            _t.id.is_(None),
            sa.and_(
                _t.deleted_at.is_(None),
                sa.or_(
                    sa.and_(_kind(MANIFEST_LIST), _k.snapshot_id.is_(None)),
                    sa.and_(_kind(MANIFEST), _l.file_path.is_(None)),
                ),
            ),
        )
    )
    .distinct()
    .order_by(_x.file_path)
)
METADATA_WAITING = Statement(
    sa.union_all(
        sa.select(_x.file_path).select_from(
            schema.iceberg_files.join(schema.temporary_files, _w.file_path == _x.file_path)
        ),
        sa.select(_b.file_path).select_from(
            schema.branch_files.join(schema.temporary_files, _w.file_path == _b.file_path)
        ),
    )
)
PROPERTIES = Statement(
    sa.select(_n.name, _t.name, _m.properties)
    .select_from(
        schema.tables.join(schema.namespaces, _n.id == _t.namespace_id).join(
            schema.table_metadata, sa.and_(_m.table_id == _t.id, _m.schema_version == _t.schema_version)
        )
    )
    .where(_t.deleted_at.is_(None))
    .order_by(_t.id)
)
LISTINGS = Statement(sa.select(_l.snapshot_id, _l.file_path).where(_l.table_id == bind("of_table")), "of_table")
METADATA_FILES = Statement(
    sa.select(_x.file_path, _x.kind, _x.file_size).where(_x.table_id == bind("of_table")), "of_table"
)
FILES_OF_BRANCHES = Statement(sa.select(_b.file_path, _b.file_size).where(_b.table_id == bind("of_table")), "of_table")
FILES_AT = Statement(
    sa.select(_f.id, _f.file_path, _f.location, _f.content, _f.row_count, _f.file_size)
    .where(
        _f.table_id == bind("of_table"),
        _f.id > bind("after"),
        _f.from_version <= bind("at_version"),
        sa.or_(_f.to_version.is_(None), _f.to_version > bind("at_version")),
    )
    .order_by(_f.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "after",
    "at_version",
    "most",
)
# What subscribers know of a row: the damage was never told to them.
NEWEST_EVENT = Statement(
    sa.select(schema.events.c.row_after)
    .where(schema.events.c.object_id == bind("of_object"), schema.events.c.table_name == bind("of_rows"))
    .order_by(schema.events.c.sequence.desc())
    .limit(ONE)
    .offset(ZERO),
    "of_object",
    "of_rows",
)
COUNTS = {
    table.name: Statement(sa.select(sa.func.count()).select_from(table))
    for table in (
        schema.partition_metadata,
        schema.file_column_stats,
        schema.temporary_files,
        schema.leases,
        schema.iceberg_files,
        schema.footer_debts,
    )
}
# Only files that wait: what was deleted lately has a row, and no file.
COUNTS["temporary_files"] = Statement(sa.select(sa.func.count()).select_from(schema.temporary_files).where(NOT_DELETED))


@dataclass(frozen=True)
class FileToCheck:
    """What the registry says of a file."""

    table_id: int
    id: int
    file_path: str
    file_size: int
    file_type: str
    row_count: int
    checksum: str
    schema_version: int
    has_statistics: bool
    #: `waiting` or `deleting`, where it is retired.
    state: str | None
    #: Whether its checksum and footer have yet to be taken.
    is_owed: bool


@dataclass(frozen=True)
class PublishedState:
    """What the registry says of a table's Iceberg metadata, of one moment."""

    table: TableRecord
    pointer: Pointer
    snapshots: tuple[SnapshotRecord, ...]
    #: The manifests of each snapshot.
    listings: dict[int, set[str]] = field(default_factory=dict)
    #: Kind and size of each file of the metadata.
    files: dict[str, tuple[str, int]] = field(default_factory=dict)
    branch_files: dict[str, int] = field(default_factory=dict)


def check_tables(reader: Reader, now: int) -> tuple[list[Finding], list[str], dict[str, int]]:
    """What must not be, what is not finished, and how much was looked at."""
    found: list[Finding] = []
    unfinished: list[str] = []
    _check_totals(reader, found, unfinished)
    for statement, check, what in (
        (WITHOUT_FOOTER, "footers", "it has no footer"),
        (DEBTS_OF_NOBODY, "footers", "a footer is owed of a file that is not known"),
        (WAITING_BUT_USED, "files", "it waits for its removal, but a version still has it"),
        (METADATA_WAITING, "files", "it waits for its removal, but a published snapshot still needs it"),
        (RETIRED_BUT_NOT_WAITING, "files", "it is retired, but does not wait for its removal"),
        (RETIRED_BUT_READABLE, "files", "it is retired, but a version that can be read has it"),
        (RETIRED_BUT_PUBLISHED, "files", "it is retired, but a published snapshot has it"),
        (OVERLAPPING_ROWS, "files", "its rows contradict each other"),
    ):
        found += [Finding(check, path, what) for (path,) in reader.all(statement)]
    for path, due, error in reader.all(OVERDUE, now):
        when = to_datetime(due).isoformat(timespec="seconds")
        found.append(Finding("footers", path, f"its footer was due at {when} ({error or 'it was not tried'})"))
    for path, rows, stored, size, stored_size in reader.all(WRONG_FOOTER):
        found.append(
            Finding("footers", path, f"it has {rows} rows and {size} bytes, its footer says {stored} and {stored_size}")
        )
    for path, state in reader.all(WITHOUT_COMMIT):
        found.append(Finding("commits", path, f"its commit is {state or 'missing'}"))
    for path, begin, end, version in reader.all(BAD_VERSIONS):
        found.append(Finding("versions", path, f"it is visible in {begin} to {end}, the table is at {version}"))
    for lease, version, least in reader.all(LEASES_BELOW):
        found.append(Finding("leases", lease, f"it pins version {version}, the oldest readable is {least}"))
    found += check_mirrors(reader)
    found += check_ranges(reader)
    _check_published(reader, found, unfinished)
    counts = {}
    for name, statement in COUNTS.items():
        row = reader.one(statement)
        counts[name] = int(row[0]) if row else 0
    return found, unfinished, counts


def _check_published(reader: Reader, found: list[Finding], unfinished: list[str]) -> None:
    """Pointers, snapshots and Iceberg's own files, as far as the registry alone can tell."""
    for row in reader.all(POINTERS):
        space, name, version, covered, snapshot, last, location, least, known, current, sequence, newest = row
        on = f"table {space}.{name}"
        for is_wrong, what in (
            (covered > version, f"it is published up to version {covered}, but it is at {version}"),
            ((newest or 0) > covered, f"it is published up to version {covered}, but a snapshot has {newest}"),
            ((least or 0) > covered, f"versions up to {least} have expired, but only {covered} is published"),
            (known is None, f"its metadata file {location} is not known"),
            (snapshot is not None and current is None, f"its current snapshot {snapshot} is not known"),
            ((sequence or 0) > last, f"its last sequence number is {last}, but a snapshot has {sequence}"),
        ):
            if is_wrong:
                found.append(Finding("published", on, what))
        if covered < version:
            unfinished.append(f"{on}: versions {covered + 1} to {version} are not published yet")
    for space, name, state, first, last, covered in reader.all(WRONG_UPDATES):
        published = "nothing is published" if covered is None else f"it is published up to version {covered}"
        what = f"updates of versions {first} to {last} are {state}, but {published}"
        found.append(Finding("published", f"table {space}.{name}", what))
    for table_id, snapshot in reader.all(SNAPSHOTS_OF_NOTHING):
        found.append(Finding("published", f"table {table_id}", f"it has a snapshot {snapshot}, but is not published"))
    for statement, what in (
        (LISTS_NOT_KNOWN, "a snapshot has this manifest list, which is not known"),
        (MANIFESTS_NOT_KNOWN, "a snapshot that is gone lists it, or it is not known"),
        (NEEDED_BY_NOTHING, "nothing refers to it"),
    ):
        found += [Finding("published", path, what) for (path,) in reader.all(statement)]
    for space, name, properties in reader.all(PROPERTIES):
        given = orjson.loads(properties) if isinstance(properties, str) else properties
        if str(given.get(GC_ENABLED, "")).strip().lower() == "true":
            unfinished.append(
                f"table {space}.{name} has {GC_ENABLED}=true: other engines may delete its files,"
                " and leases do not protect them"
            )


def _check_totals(reader: Reader, found: list[Finding], unfinished: list[str]) -> None:
    versions = {row[0]: row[1:] for row in reader.all(VERSIONS)}
    gaps = known_gaps(reader, LOST_VERSIONS)
    for ident, space, name, version, deleted, *numbers, least in reader.all(TOTALS):
        on = f"table {space}.{name}"
        if deleted is not None:
            unfinished.append(f"{on} was dropped and is not emptied yet")
            continue
        own, stats, live = numbers[:4], numbers[4:8], numbers[8:]
        if list(map(int, own)) != list(map(int, live)):
            found.append(
                Finding(
                    "statistics", on, f"tables says {own} rows, files, bytes and deleted rows; the files have {live}"
                )
            )
        if None in stats or list(map(int, stats)) != list(map(int, live)):
            found.append(Finding("statistics", on, f"table_stats says {stats}; the files have {live}"))
        if least is None:
            found.append(Finding("versions", on, "it has no horizon row"))
            continue
        number, first, last = versions.get(ident, (0, None, None))
        lost = [(begin, end) for begin, end, _ in gaps.get((ident, 0), []) if begin >= least]
        expected = version - min(least, version) + 1 - sum(end - begin + 1 for begin, end in lost)
        unfinished += [
            f"{on}: versions {begin} to {end} are lost since the registry was rebuilt" for begin, end in lost
        ]
        if last != version or first != min(least, version) or number != expected:
            found.append(
                Finding(
                    "versions",
                    on,
                    f"its history has {number} versions from {first} to {last},"
                    f" it is at {version} and {least} can be read",
                )
            )


def files_short_of_stats(reader: Reader, table_id: int, schema_version: int, columns: int) -> list[str]:
    """Files of a schema version that have not statistics of that many columns."""
    return [row[2] for row in reader.all(STATS_PER_FILE, table_id, schema_version, columns)]


def schema_versions(reader: Reader) -> list[tuple[int, int, Any]]:
    """Every schema that a table has had, by table and schema version."""
    return [
        (row[0], row[1], orjson.loads(row[2]) if isinstance(row[2], str) else row[2])
        for row in reader.all(SCHEMA_VERSIONS)
    ]


def dangling_footers(reader: Reader) -> Iterator[str]:
    """Paths of footers that nothing refers to."""
    after = ""
    while page := [row[0] for row in reader.all(DANGLING_FOOTERS, after, CHUNK)]:
        of_segments = segment_paths(reader, page)
        yield from (path for path in page if path not in of_segments)
        after = page[-1]


def dangling_stats(reader: Reader) -> list[tuple[int, int]]:
    """Files by table and id that have statistics but no row; at most a chunk."""
    return [(row[0], row[1]) for row in reader.all(DANGLING_STATS, CHUNK)]


def published_state(reader: Reader, table_id: int) -> PublishedState | None:
    """What a live table is published as; none if it is not, or no longer there."""
    row = reader.one(GET_TABLE_BY_ID, table_id)
    pointer = pointer_of(reader, table_id)
    if row is None or pointer is None:
        return None
    listings: dict[int, set[str]] = {}
    for snapshot, path in reader.all(LISTINGS, table_id):
        listings.setdefault(snapshot, set()).add(path)
    return PublishedState(
        table_from(row),
        pointer,
        tuple(snapshots_of(reader, table_id)),
        listings,
        {path: (kind, size) for path, kind, size in reader.all(METADATA_FILES, table_id)},
        {row[0]: row[1] for row in reader.all(FILES_OF_BRANCHES, table_id)},
    )


def files_at(reader: Reader, table_id: int, version: int) -> Iterator[tuple[str, str | None, int, int, int]]:
    """Every file of a version: its path, location, content, rows and size."""
    after = 0
    while page := reader.all(FILES_AT, table_id, after, version, CHUNK):
        yield from ((row[1], row[2], row[3], row[4], row[5]) for row in page)
        after = page[-1][0]


def files_to_check(reader: Reader, after: str, most: int) -> list[FileToCheck]:
    """Files in the order of their paths."""
    return [FileToCheck(*row) for row in reader.all(FILES_TO_CHECK, after, most)]


def present_files(reader: Reader, paths: list[str]) -> set[str]:
    """Which of these files have a row and are not being deleted."""
    return {row[0] for row in reader.all(PRESENT_FILES, reader.listed(paths))}


def mend_totals(transaction: Transaction, table_id: int) -> bool:
    """Set the totals of a table to what its files have; whether they were wrong."""
    found = transaction.one(TABLE_ROW, table_id)
    if found is None:
        return False
    transaction.lock(row_of(schema.tables, found)["object_id"])
    found = transaction.one(TABLE_ROW, table_id)
    live = transaction.one(LIVE_TOTALS, table_id)
    stats = transaction.one(STATS_ROW, table_id)
    if found is None or live is None:
        return False
    before = row_of(schema.tables, found)
    rows, files, size, deleted = (int(number) for number in live)
    now = transaction.time_of(before["object_id"])
    mended = False
    kept_totals = tuple(before[name] for name in ("row_count", "file_count", "total_size", "deleted_rows"))
    if kept_totals != (rows, files, size, deleted):
        row = transaction.one(SET_TOTALS, rows, files, size, deleted, now, table_id)
        assert row is not None
        captured_update(
            transaction,
            before["object_id"],
            schema.tables,
            _told(transaction, before["object_id"], "tables", before),
            row,
        )
        mended = True
    if stats is None:
        totals = {"row_count": rows, "deleted_rows": deleted, "file_count": files, "total_size": size}
        times = {"last_modified": now, "created_at": now, "updated_at": now}
        insert_new(transaction, before["object_id"], schema.table_stats, {"table_id": table_id, **totals, **times})
        mended = True
    else:
        kept: dict[str, Any] = row_of(schema.table_stats, stats)
        difference = (
            rows - kept["row_count"],
            deleted - kept["deleted_rows"],
            files - kept["file_count"],
            size - kept["total_size"],
        )
        if any(difference):
            row = transaction.one(ADD_TO_STATS, *difference, now, table_id)
            assert row is not None
            told = _told(transaction, before["object_id"], "table_stats", kept)
            captured_update(transaction, before["object_id"], schema.table_stats, told, row)
            mended = True
    return mended


def _told(transaction: Transaction, object_id: int, rows: str, present: dict[str, Any]) -> dict[str, Any]:
    """A row as the events say it is, so that the event of its repair follows from the one before it."""
    found = transaction.one(NEWEST_EVENT, object_id, rows)
    if found is None or found[0] is None:
        return present
    told: dict[str, Any] = orjson.loads(found[0]) if isinstance(found[0], str) else dict(found[0])
    return told
