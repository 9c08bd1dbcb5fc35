"""The files of a table: the one transaction that changes them, and reading them back.

A file is visible in the versions from_version <= v < to_version. A change adds files,
ends the intervals of others, adds up the totals in SQL, and makes one new version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar

import orjson
import sqlalchemy as sa

from lakebook import failpoints
from lakebook.clock import to_datetime, to_ms
from lakebook.errors import FilesChanged, PathInUse, RegistryCorrupt
from lakebook.registry import schema
from lakebook.registry.changes import insert_rows, row_of
from lakebook.registry.file_stats import ColumnStats, insert_stats, span_of_stats, stats_of_files
from lakebook.registry.footers import insert_footers
from lakebook.registry.freshness import ALWAYS, TABLE, Span, mark_stale
from lakebook.registry.inserts import declared_work
from lakebook.registry.losses import note_losses
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind
from lakebook.registry.stream_folders import RETIRED_AMONG
from lakebook.registry.tables import TableRecord, captured_update, locked_table, record_version, refuse_mirror
from lakebook.registry.temporary_files import FILES_AMONG
from lakebook.registry.transactions import NoEffect, Reader, Row, Transaction

#: Rows that one statement names or returns at most.
CHUNK = 1000
#: Files, rows of statistics, and bytes of footers that one transaction stages.
STAGED = CHUNK
_MOST_STATS = 100_000
_MOST_FOOTERS = 64 * 1024**2

#: The operation of a change that puts the same rows into other files.
REPLACE = "replace"

T = TypeVar("T")

_t = schema.tables.c
_f = schema.table_files.c
_s = schema.table_stats.c

ADD_TO_TABLE = Statement(
    sa.update(schema.tables)
    .where(_t.id == bind("of_table"))
    .values(
        version=_t.version + ONE,
        row_count=_t.row_count + bind("rows"),
        deleted_rows=_t.deleted_rows + bind("deleted"),
        file_count=_t.file_count + bind("files"),
        total_size=_t.total_size + bind("size"),
        hold_until=bind("hold"),
        last_file_id=_t.last_file_id + bind("ids"),
        last_modified=bind("now"),
        updated_at=bind("now"),
    )
    .returning(*schema.tables.columns),
    "rows",
    "deleted",
    "files",
    "size",
    "hold",
    "ids",
    "now",
    "of_table",
)
RESERVE_IDS = Statement(
    sa.update(schema.tables)
    .where(_t.id == bind("of_table"))
    .values(last_file_id=_t.last_file_id + bind("ids"), updated_at=bind("now"))
    .returning(*schema.tables.columns),
    "ids",
    "now",
    "of_table",
)
HOLD_OF = Statement(sa.select(_t.hold_until).where(_t.id == bind("of_table")), "of_table")
STATS_ROW = Statement(sa.select(schema.table_stats).where(_s.table_id == bind("of_table")), "of_table")
ADD_TO_STATS = Statement(
    sa.update(schema.table_stats)
    .where(_s.table_id == bind("of_table"))
    .values(
        row_count=_s.row_count + bind("rows"),
        deleted_rows=_s.deleted_rows + bind("deleted"),
        file_count=_s.file_count + bind("files"),
        total_size=_s.total_size + bind("size"),
        last_modified=bind("now"),
        updated_at=bind("now"),
    )
    .returning(*schema.table_stats.columns),
    "rows",
    "deleted",
    "files",
    "size",
    "now",
    "of_table",
)


def _among(column: sa.ColumnElement[Any], *where: sa.ColumnElement[bool]) -> tuple[Any, Any]:
    clauses = [
        sa.select(schema.table_files).where(*where, among(column, "wanted_ones", database)).order_by(_f.id)
        for database in (SQLITE, POSTGRESQL)
    ]
    return clauses[0], clauses[1]


_by_id, _by_id_pg = _among(_f.id, _f.table_id == bind("of_table"))
FILES_BY_ID = Statement(_by_id, "of_table", "wanted_ones", postgresql=_by_id_pg)
FILE_OF_COMMIT = Statement(
    sa.select(_f.id).where(_f.commit_id == bind("of_commit")).limit(ONE).offset(ZERO), "of_commit"
)
_by_path, _by_path_pg = _among(_f.file_path)
FILES_BY_PATH = Statement(_by_path, "wanted_ones", postgresql=_by_path_pg)


def _path_among(column: sa.ColumnElement[Any]) -> Statement:
    clauses = [
        sa.select(column).where(among(column, "paths", database)).limit(ONE).offset(ZERO)
        for database in (SQLITE, POSTGRESQL)
    ]
    return Statement(clauses[0], "paths", postgresql=clauses[1])


SEGMENTS_AMONG = _path_among(schema.segments.c.s3_key)
RANGES_AMONG = _path_among(schema.lakehouse_partitions.c.file_path)


def _ending(database: str) -> sa.Update:
    return (
        sa.update(schema.table_files)
        .where(_f.table_id == bind("of_table"), _f.to_version.is_(None), among(_f.id, "wanted_ones", database))
        .values(to_version=bind("ending"))
    )


END_FILES = Statement(_ending(SQLITE), "ending", "of_table", "wanted_ones", postgresql=_ending(POSTGRESQL))


def _lone_deletes(database: str) -> sa.Select[Any]:
    return (
        sa.select(schema.table_files)
        .where(
            _f.table_id == bind("of_table"),
            sa.text("table_files.content <> 0"),
            _f.to_version.is_(None),
            among(_f.referenced_path, "paths", database),
        )
        .order_by(_f.id)
    )


#: Live files of deletes, each of which is about one of these files alone.
DELETES_ABOUT = Statement(_lone_deletes(SQLITE), "of_table", "paths", postgresql=_lone_deletes(POSTGRESQL))
DELETES_SINCE = Statement(
    sa.select(schema.table_files)
    .where(
        _f.table_id == bind("of_table"),
        sa.text("table_files.content <> 0"),
        # Those that came, and those that an outside rollback has ended.
        sa.or_(_f.from_version + ZERO > bind("since"), _f.to_version > bind("since")),
    )
    .order_by(_f.id),
    "of_table",
    "since",
)
# Added to zero, so that no database goes by the index on versions, which would walk through all files.
_visible = sa.and_(
    _f.from_version + ZERO <= bind("at_version"),
    sa.or_(_f.to_version.is_(None), _f.to_version > bind("at_version")),
)
#: What a plan needs to know of a file.
PLANNED = (
    _f.id,
    _f.file_path,
    _f.file_size,
    _f.file_type,
    _f.row_count,
    _f.row_groups,
    _f.checksum,
    _f.schema_version,
    _f.has_field_ids,
    _f.has_statistics,
    _f.spec_id,
    _f.partition_path,
    _f.partition_values,
    _f.from_version,
    _f.sequence_number,
    _f.location,
)
_rows_only = sa.text("table_files.content = 0")
VISIBLE_FILES = Statement(
    sa.select(*PLANNED)
    .where(_f.table_id == bind("of_table"), _f.id > bind("after"), _visible, _rows_only)
    .order_by(_f.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "after",
    "at_version",
    "most",
)
VISIBLE_DELETES = Statement(
    sa.select(*PLANNED, _f.referenced_path)
    .where(_f.table_id == bind("of_table"), sa.text("table_files.content <> 0"), _visible)
    .order_by(_f.id),
    "of_table",
    "at_version",
)
_planned_by_id, _planned_by_id_pg = (
    sa.select(*PLANNED)
    .where(_f.table_id == bind("of_table"), _rows_only, among(_f.id, "wanted_ones", database))
    .order_by(_f.id)
    for database in (SQLITE, POSTGRESQL)
)
PLANNED_BY_ID = Statement(_planned_by_id, "of_table", "wanted_ones", postgresql=_planned_by_id_pg)
UNMEASURED_FILES = Statement(
    sa.select(_f.id)
    .where(_f.table_id == bind("of_table"), sa.text("NOT table_files.has_statistics"), _visible, _rows_only)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "at_version",
    "most",
)
_visible_among, _visible_among_pg = (
    sa.select(_f.id)
    .where(_f.table_id == bind("of_table"), _visible, _rows_only, among(_f.id, "wanted_ones", database))
    .order_by(_f.id)
    for database in (SQLITE, POSTGRESQL)
)
VISIBLE_AMONG = Statement(_visible_among, "of_table", "at_version", "wanted_ones", postgresql=_visible_among_pg)
_v = schema.table_versions.c
ADDED_BY_OVERWRITES = Statement(
    sa.select(*PLANNED)
    .select_from(
        schema.table_files.join(
            schema.table_versions, sa.and_(_v.table_id == _f.table_id, _v.version == _f.from_version)
        )
    )
    .where(
        _f.table_id == bind("of_table"),
        _f.to_version.is_(None),
        _v.version > bind("since"),
        # A compaction may have moved their rows on.
        _v.operation.in_([sa.literal_column("'overwrite'"), sa.literal_column("'replace'")]),
        _rows_only,
    )
    .order_by(_f.id),
    "of_table",
    "since",
)
TOTALS_AT = Statement(
    sa.select(
        sa.func.coalesce(sa.func.sum(_f.row_count), ZERO),
        sa.func.count(_f.id),
        sa.func.coalesce(sa.func.sum(_f.file_size), ZERO),
    ).where(_f.table_id == bind("of_table"), _visible, _rows_only),
    "of_table",
    "at_version",
)


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that a change adds: measured, never estimated."""

    file_path: str
    file_size: int
    file_type: str
    row_count: int
    checksum: str
    schema_version: int
    modified_at: datetime
    row_groups: int = 0
    is_compressed: bool = False
    partition_path: str = ""
    partition_values: str = "[]"
    spec_id: int = 0
    has_field_ids: bool = True
    #: Whether there is a row of statistics for every plain column of its schema version.
    has_statistics: bool = False
    stats: tuple[ColumnStats, ...] = ()
    footer: bytes | None = None
    #: 0: rows; 1: positions of rows that are deleted.
    content: int = 0
    location: str | None = None
    sequence_number: int | None = None
    referenced_path: str | None = None


@dataclass(frozen=True)
class TableChange:
    """Files to add and to end, in one version."""

    operation: str
    added: Sequence[NewFile] = ()
    removed: Sequence[int] = ()
    summary: Mapping[str, str] = field(default_factory=dict)
    #: The first of the ids under which footers and statistics were staged beforehand.
    first_staged_id: int | None = None
    #: Whether others wrote the files: their paths may be in use already.
    foreign: bool = False
    #: Asked under the table's lock, before anything is written; it raises if the change must not be.
    check: Callable[[Transaction], None] | None = None
    #: The version whose rows it worked on: deletes that came since and touch a removed file are a conflict.
    read_version: int | None = None
    #: Whether the caller has looked, in this transaction, who uses the paths.
    checked: bool = False
    #: Whether it waits while an outside engine's retry has precedence.
    waits: bool = True
    #: Whether it gives way to everybody else: to an outside engine's retry, and to work that is declared.
    yields: bool = False
    #: Whether the topic makes it whose segments are the table's files.
    by_topic: bool = False
    #: Whether the view makes it whose ranges are the table's files.
    by_view: bool = False
    #: Whether the rows it takes are gone for ever, and not because they should not be: what views have of them stays.
    gone: bool = False

    @property
    def is_small(self) -> bool:
        """Whether one short transaction can take all of it."""
        return sum(1 for _ in islice(staged_chunks(self.added), 2)) < 2


@dataclass(frozen=True)
class Committed:
    """A change that has become a version."""

    version: int
    committed_at: datetime
    added_rows: int = 0
    removed_rows: int = 0
    removed_files: int = 0
    #: Files of deletes that were ended.
    removed_deletes: int = 0
    #: How long each step of the transaction took.
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file that a plan has chosen."""

    id: int
    file_path: str
    file_size: int
    file_type: str
    row_count: int
    row_group_count: int
    checksum: str
    schema_version: int
    has_field_ids: bool
    has_statistics: bool
    spec_id: int
    partition_path: str
    partition_values: str
    from_version: int = 0
    sequence_number: int | None = None
    location: str | None = None
    #: The row groups that can match; none: all of them.
    row_groups: tuple[int, ...] | None = None


def planned_from(row: Row) -> PlannedFile:
    """A file from the columns of `PLANNED`."""
    ident, path, size, kind, rows, groups, checksum, version, has_ids, has_stats, *rest = row
    return PlannedFile(ident, path, size, kind, rows, groups, checksum, version, bool(has_ids), bool(has_stats), *rest)


@dataclass(frozen=True, slots=True)
class DeleteFile:
    """A file of positions of deleted rows, visible in some version."""

    id: int
    file_path: str
    file_size: int
    row_count: int
    spec_id: int
    partition_values: str
    from_version: int
    sequence_number: int | None
    location: str | None
    referenced_path: str | None

    def applies_to(self, file: PlannedFile) -> bool:
        """Whether rows of a file may be among those it deletes.

        A file that was there when it came has a lower or the same sequence number. A file of this book
        has none of its own: it got one before any delete that came later.
        """
        if self.referenced_path is not None and self.referenced_path != file.file_path:
            return False
        if file.sequence_number is not None and self.sequence_number is not None:
            return file.sequence_number <= self.sequence_number
        return file.from_version <= self.from_version


def delete_file_from(row: Row) -> DeleteFile:
    """A file of deletes from the columns of `VISIBLE_DELETES`."""
    return DeleteFile(row[0], row[1], row[2], row[4], row[10], row[12], row[13], row[14], row[15], row[16])


def chunks(items: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    """Some of the items at a time."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def staged_chunks(files: Sequence[NewFile]) -> Iterator[Sequence[NewFile]]:
    """Some files at a time: so many that their statistics and footers make one short transaction."""
    begin = stats = size = 0
    for number, file in enumerate(files):
        stats += len(file.stats)
        size += len(file.footer or b"")
        if number - begin + 1 >= STAGED or stats >= _MOST_STATS or size >= _MOST_FOOTERS:
            yield files[begin : number + 1]
            begin, stats, size = number + 1, 0, 0
    if begin < len(files):
        yield files[begin:]


# --- changing ------------------------------------------------------------------


def reserve_file_ids(transaction: Transaction, table: TableRecord, number: int) -> int:
    """Take ids for files whose footers and statistics are staged; the first of them."""
    before = locked_table(transaction, table)
    row = transaction.one(RESERVE_IDS, number, transaction.time_of(table.object_id), table.id)
    assert row is not None
    captured_update(transaction, table.object_id, schema.tables, before, row)
    return int(before["last_file_id"]) + 1


def stage_footers(transaction: Transaction, files: Sequence[NewFile]) -> None:
    """Store footers of files that no version shows yet."""
    insert_footers(
        transaction,
        [(file.file_path, file.footer, file.row_count, file.file_size) for file in files if file.footer is not None],
    )


def stage_stats(transaction: Transaction, table: TableRecord, files: Sequence[NewFile], first_id: int) -> None:
    """Store statistics of files that no version shows yet."""
    insert_stats(transaction, table.id, ((first_id + index, file.stats) for index, file in enumerate(files)))


def commit_change(transaction: Transaction, table: TableRecord, change: TableChange, commit_id: str) -> Committed:
    """Make one version of a change, or nothing at all."""
    if not change.by_topic and not change.by_view:
        refuse_mirror(table)
    before = locked_table(transaction, table)
    now = transaction.time_of(table.object_id)
    version = before["version"] + 1
    added, number = change.added, len(change.added)
    if change.yields:
        give_way(transaction, table, transaction.clock.now_ms())
    elif change.waits and before["hold_until"] > transaction.clock.now_ms():
        raise HeldBack(before["hold_until"])
    if change.check is not None:
        change.check(transaction)
    removed = _end_files(transaction, table, change.removed, version)
    if change.read_version is not None and removed:
        _refuse_new_deletes(transaction, table, removed, change.read_version)
    if before["deleted_rows"] and removed and not change.checked:
        # An outside engine says itself which files of deletes go.
        removed += _end_lone_deletes(transaction, table, removed, version)
    plus, deletes = _totals((file.content, file.row_count, file.file_size) for file in added)
    minus, undone = _totals((row["content"], row["row_count"], row["file_size"]) for row in removed)
    files, rows, size = (gained - lost for gained, lost in zip(plus, minus, strict=True))
    deleted = deletes - undone
    staged = change.first_staged_id is not None
    # An append of one engine does not end what another one waits for.
    hold = before["hold_until"] if change.waits or change.operation == "append" else 0
    row = transaction.one(ADD_TO_TABLE, rows, deleted, files, size, hold, 0 if staged else number, now, table.id)
    assert row is not None
    captured_update(transaction, table.object_id, schema.tables, before, row)
    tick = transaction.clock.monotonic
    begun = tick()
    update_table_statistics(transaction, table, rows, files, size, now, deleted)
    counted = tick()
    if not change.checked and (change.foreign or transaction.retried_after is not None):
        require_unused(transaction, [file.file_path for file in added])
    first_id = change.first_staged_id if change.first_staged_id is not None else before["last_file_id"] + 1
    if not staged:
        stage_stats(transaction, table, added, first_id)
    if not staged or change.foreign:
        # Under others' paths nothing is staged: if this fails, nobody would know whose it was.
        stage_footers(transaction, added)
    update_table_files(transaction, table, added, first_id, version, commit_id, now)
    seconds = {"update_table_statistics": counted - begun, "update_table_files": tick() - counted}
    record_version(
        transaction,
        table.id,
        version,
        change.operation,
        before["schema_version"],
        commit_id,
        now,
        plus,
        minus,
        change.summary,
    )
    _tell_views(transaction, table, change, removed)
    failpoints.reach("change.written")
    ended = sum(1 for row in removed if row["content"])
    return Committed(version, to_datetime(now), plus[1], minus[1], minus[0], ended, seconds)


def _tell_views(
    transaction: Transaction, table: TableRecord, change: TableChange, removed: Sequence[dict[str, Any]]
) -> None:
    """Mark the ranges of views that have rows of the files a change adds and ends."""
    if change.operation == REPLACE:
        return  # The same rows in other files.
    # What a topic's table loses, the topic has lost.
    gone = change.gone or (change.by_topic and not change.added)
    met: dict[int | None, Sequence[Span]] = {}

    def spans_of(field_id: int | None) -> Sequence[Span]:
        met[field_id] = tuple(changed_spans(transaction, table.id, change.added, removed, field_id))
        return met[field_id]

    mark_stale(transaction, TABLE, table.id, spans_of, gone=gone)
    for field_id, spans in met.items() if change.gone else ():
        assert field_id is not None
        # Not where times are unknown: nothing of a view that reads it could ever be built again.
        note_losses(transaction, TABLE, table.id, field_id, (span for span in spans if span != ALWAYS))


def changed_spans(
    reader: Reader,
    table_id: int,
    added: Sequence[NewFile],
    removed: Sequence[dict[str, Any]],
    field_id: int | None,
) -> Iterator[Span]:
    """The times of a column in files that come or go; of deleted rows, those of the file they are in."""
    assert field_id is not None
    gone = [row["id"] for row in removed if not row["content"]]
    about = [file.referenced_path for file in added if file.content]
    about += [row["referenced_path"] for row in removed if row["content"]]
    if None in about:
        yield ALWAYS
    gone += [row["id"] for row in files_by_path(reader, filter(None, about)).values()]
    for file in added:
        if not file.content and file.row_count:
            yield from _known_span([item for item in file.stats if item.field_id == field_id])
    for chunk in chunks(sorted(set(gone))):
        stats = stats_of_files(reader, table_id, chunk, [field_id])
        for file_id in chunk:
            found = stats.get((file_id, field_id))
            yield from _known_span([] if found is None else [found])


def _known_span(stats: Sequence[ColumnStats]) -> Iterator[Span]:
    for item in stats:
        span = span_of_stats(item)
        if span is not None:
            yield span
    if not stats:
        yield ALWAYS


class HeldBack(NoEffect):
    """This book's own changes of the table wait a little for an outside engine."""

    def __init__(self, until: int) -> None:
        super().__init__(until)
        self.until = until


def precedence(reader: Reader, table_id: int, now: int) -> str | None:
    """Whose work a change that gives way would spoil now; none if nobody's."""
    row = reader.one(HOLD_OF, table_id)
    if row is not None and row[0] > now:
        return "an outside engine that had to begin again has precedence"
    if declared_work(reader, table_id, now) is not None:
        return "a writer is about to replace or delete rows of it"
    return None


def give_way(reader: Reader, table: TableRecord, now: int) -> None:
    """Refuse a change that changes no row, where it would cost somebody else their work."""
    reason = precedence(reader, table.id, now)
    if reason is not None:
        raise FilesChanged(reason, on=table.shown, remedy="Try again when that has ended")


def _totals(files: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], int]:
    """Files, rows and bytes, and the rows that files of deletes name; of those, only the bytes count."""
    number = rows = size = deletes = 0
    for content, row_count, file_size in files:
        size += file_size
        if content:
            deletes += row_count
        else:
            number += 1
            rows += row_count
    return (number, rows, size), deletes


def _refuse_new_deletes(
    transaction: Transaction, table: TableRecord, removed: Sequence[dict[str, Any]], since: int
) -> None:
    """Refuse to end files of which rows were deleted after they were read: they would come back."""
    rows = [row_of(schema.table_files, row) for row in transaction.all(DELETES_SINCE, table.id, since)]
    # Those that it has just ended itself are not somebody else's.
    own = {row["id"] for row in removed}
    touched = [row["referenced_path"] for row in rows if row["id"] not in own]
    paths = {row["file_path"] for row in removed}
    if any(path is None or path in paths for path in touched):
        raise FilesChanged(
            "rows of the files were deleted, or brought back, by another change meanwhile",
            on=table.shown,
            remedy="Read the table again and repeat the change",
        )


def _end_lone_deletes(
    transaction: Transaction, table: TableRecord, removed: Sequence[dict[str, Any]], version: int
) -> list[dict[str, Any]]:
    """End files of deletes whose only file has just been ended."""
    already = {row["id"] for row in removed}
    ended: list[dict[str, Any]] = []
    for chunk in chunks(row["file_path"] for row in removed):
        found = transaction.all(DELETES_ABOUT, table.id, transaction.listed(chunk))
        ids = {row_of(schema.table_files, row)["id"] for row in found}
        ended += _end_files(transaction, table, sorted(ids - already), version)
    return ended


def update_table_statistics(
    transaction: Transaction, table: TableRecord, rows: int, files: int, size: int, now: int, deleted: int = 0
) -> None:
    """Add to the totals in `table_stats`."""
    found = transaction.one(STATS_ROW, table.id)
    if found is None:
        raise RegistryCorrupt("it has no statistics row", on=table.shown, remedy="Run `lakebook repair`")
    row = transaction.one(ADD_TO_STATS, rows, deleted, files, size, now, table.id)
    assert row is not None
    captured_update(transaction, table.object_id, schema.table_stats, row_of(schema.table_stats, found), row)


def update_table_files(
    transaction: Transaction,
    table: TableRecord,
    files: Sequence[NewFile],
    first_id: int,
    version: int,
    commit_id: str,
    now: int,
) -> None:
    """Enter new files, visible from this version on."""
    rows = (
        {
            "table_id": table.id,
            "id": first_id + index,
            "file_name": file.file_path.rpartition("/")[2],
            "file_path": file.file_path,
            "file_size": file.file_size,
            "file_type": file.file_type,
            "partition_path": file.partition_path,
            "partition_values": file.partition_values,
            "spec_id": file.spec_id,
            "row_count": file.row_count,
            "row_groups": file.row_groups,
            "checksum": file.checksum,
            "is_compressed": file.is_compressed,
            "schema_version": file.schema_version,
            "has_field_ids": file.has_field_ids,
            "has_statistics": file.has_statistics,
            "commit_id": commit_id,
            "from_version": version,
            "to_version": None,
            "created_at": now,
            "modified_at": to_ms(file.modified_at),
            "retired_at": None,
            "content": file.content,
            "location": file.location,
            "sequence_number": file.sequence_number,
            "referenced_path": file.referenced_path,
        }
        for index, file in enumerate(files)
    )
    insert_rows(transaction, table.object_id, schema.table_files, rows)


def require_unused(reader: Reader, paths: Sequence[str]) -> None:
    """Refuse paths that a table has, or that wait for their removal."""
    for chunk in chunks(paths):
        listed = reader.listed(chunk)
        found = [row_of(schema.table_files, row)["file_path"] for row in reader.all(FILES_BY_PATH, listed)]
        for path in found:
            raise _in_use(path, "the file belongs to a table already")
        for statement, what in (
            (FILES_AMONG, "the file waits for its removal, or was removed within the last day"),
            (SEGMENTS_AMONG, "the file is a topic's segment"),
            (RETIRED_AMONG, "the file was a topic's segment"),
            (RANGES_AMONG, "the file is a view's"),
        ):
            other = reader.one(statement, listed)
            if other is not None:
                raise _in_use(other[0], what)


def _in_use(path: str, what: str) -> PathInUse:
    return PathInUse(what, on=path, remedy="A file can be added once, to one table")


def _end_files(transaction: Transaction, table: TableRecord, ids: Sequence[int], version: int) -> list[dict[str, Any]]:
    ended: list[dict[str, Any]] = []
    for chunk in chunks(sorted(set(ids))):
        listed = transaction.listed(chunk)
        rows = [row_of(schema.table_files, row) for row in transaction.all(FILES_BY_ID, table.id, listed)]
        live = [row for row in rows if row["to_version"] is None]
        if len(live) != len(chunk) or transaction.run(END_FILES, version, table.id, listed) != len(chunk):
            gone = len(chunk) - len(live)
            raise FilesChanged(
                f"{gone} of the files were replaced or removed by another change meanwhile",
                on=table.shown,
                remedy="Read the table again and repeat the change",
            )
        transaction.capture(table.object_id, str(schema.table_files.name), _endings(live, version))
        ended += live
    return ended


def _endings(rows: Sequence[dict[str, Any]], version: int) -> list[tuple[str, str, str | None, str | None]]:
    return [file_update(row, {"to_version": version}) for row in rows]


def file_update(row: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[str, str, str | None, str | None]:
    """The event of a changed file."""
    key = orjson.dumps({"table_id": row["table_id"], "id": row["id"]}).decode()
    return "update", key, orjson.dumps({**row, **changes}).decode(), orjson.dumps(dict(row)).decode()


# --- reading -------------------------------------------------------------------


def visible_files(reader: Reader, table_id: int, version: int, after: int, most: int) -> list[PlannedFile]:
    """Files of a version, in the order of their ids."""
    return [planned_from(row) for row in reader.all(VISIBLE_FILES, table_id, after, version, most)]


def visible_deletes(reader: Reader, table_id: int, version: int) -> list[DeleteFile]:
    """Files of deletes that a version has."""
    return [delete_file_from(row) for row in reader.all(VISIBLE_DELETES, table_id, version)]


def planned_by_id(reader: Reader, table_id: int, ids: Sequence[int]) -> list[PlannedFile]:
    """A chunk of files by their ids."""
    return [planned_from(row) for row in reader.all(PLANNED_BY_ID, table_id, reader.listed(ids))]


def unmeasured_files(reader: Reader, table_id: int, version: int, most: int) -> list[int]:
    """Ids of a version's files that have no statistics; at most that many."""
    return [int(row[0]) for row in reader.all(UNMEASURED_FILES, table_id, version, most)]


def visible_among(reader: Reader, table_id: int, version: int, ids: Sequence[int]) -> list[int]:
    """Which of these files a version has."""
    return [
        int(row[0])
        for chunk in chunks(ids)
        for row in reader.all(VISIBLE_AMONG, table_id, version, reader.listed(chunk))
    ]


def added_by_overwrites(reader: Reader, table_id: int, since: int) -> list[PlannedFile]:
    """Live files that overwrites after a version have added."""
    return [planned_from(row) for row in reader.all(ADDED_BY_OVERWRITES, table_id, since)]


def totals_at(reader: Reader, table_id: int, version: int) -> tuple[int, int, int]:
    """Rows, files and bytes of a version."""
    row = reader.one(TOTALS_AT, table_id, version)
    assert row is not None
    return int(row[0]), int(row[1]), int(row[2])


def has_files_of(reader: Reader, commit_id: str) -> bool:
    """Whether a commit has added files that are still known."""
    return reader.one(FILE_OF_COMMIT, commit_id) is not None


def files_by_path(reader: Reader, paths: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The rows of files, by their paths."""
    found: dict[str, dict[str, Any]] = {}
    for chunk in chunks(paths):
        for row in reader.all(FILES_BY_PATH, reader.listed(chunk)):
            values = row_of(schema.table_files, row)
            found[values["file_path"]] = values
    return found
