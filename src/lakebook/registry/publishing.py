"""What a table is published as: the pointer to its Iceberg metadata, its snapshots and their files.

The pointer moves by compare-and-swap, in the transaction that enters the snapshots. A file
of the metadata that no listed snapshot needs any more goes into `temporary_files` in the
transaction that takes its last snapshot out of the metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.changes import capture, delete_rows, row_of
from lakebook.registry.file_stats import ColumnStats, stats_of_files
from lakebook.registry.history import TableVersion, version_from
from lakebook.registry.leases import leases_of
from lakebook.registry.owed import complete_updates, reopen_updates
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind, insert_into
from lakebook.registry.table_files import CHUNK, chunks
from lakebook.registry.tables import (
    TableMetadata,
    TableRecord,
    current_table,
    list_metadata,
    locked_table,
)
from lakebook.registry.temporary_files import add_temporary_files
from lakebook.registry.transactions import NoEffect, Reader, Row, Transaction

#: Kinds of `iceberg_files`.
METADATA, MANIFEST_LIST, MANIFEST, STATISTICS = "metadata", "manifest_list", "manifest", "statistics"
UNLISTED = "no snapshot lists it"
SUPERSEDED = "metadata superseded"
LEFT_BRANCH = "no branch has it"

_i = schema.iceberg_tables.c
_n = schema.table_snapshots.c
_x = schema.iceberg_files.c
_l = schema.snapshot_manifests.c
_b = schema.branch_files.c
_f = schema.table_files.c
_v = schema.table_versions.c
_d = schema.footer_debts.c
_m = schema.table_metadata.c

POINTER = Statement(sa.select(schema.iceberg_tables).where(_i.table_id == bind("of_table")), "of_table")
INSERT_POINTER = insert_into(schema.iceberg_tables)
_MOVED = tuple(str(column.name) for column in schema.iceberg_tables.columns if column.name != "table_id")
MOVE_POINTER = Statement(
    sa.update(schema.iceberg_tables)
    .where(_i.table_id == bind("of_table"), _i.metadata_location == bind("expected"))
    .values({name: bind(f"new_{name}") for name in _MOVED}),
    *(f"new_{name}" for name in _MOVED),
    "of_table",
    "expected",
)
VERSIONS_AFTER = Statement(
    sa.select(schema.table_versions)
    .where(_v.table_id == bind("of_table"), _v.version > bind("after"))
    .order_by(_v.version)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "after",
    "most",
)
#: What a manifest says of a file.
LISTED = (
    _f.id,
    _f.file_path,
    _f.file_size,
    _f.row_count,
    _f.spec_id,
    _f.partition_values,
    _f.schema_version,
    _f.from_version,
    _f.content,
    _f.location,
    _f.sequence_number,
    _f.referenced_path,
    _f.has_field_ids,
)
# By the index on versions: ids may have been reserved long before the version came.
FILES_ADDED = Statement(
    sa.select(*LISTED)
    .where(
        _f.table_id == bind("of_table"),
        sa.tuple_(_f.from_version, _f.id) > sa.tuple_(bind("after_version"), bind("after_id")),
        _f.from_version <= bind("last"),
        sa.or_(_f.to_version.is_(None), _f.to_version > bind("last")),
    )
    .order_by(_f.from_version, _f.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "after_version",
    "after_id",
    "last",
    "most",
)
FILES_ENDED = Statement(
    sa.select(*LISTED).where(_f.table_id == bind("of_table"), _f.to_version == bind("ending")).order_by(_f.id),
    "of_table",
    "ending",
)


def _own_spellings(database: str) -> sa.Select[Any]:
    return sa.select(_f.file_path, _f.location).where(among(_f.file_path, "paths", database), _f.location.is_not(None))


OWN_SPELLINGS = Statement(_own_spellings(SQLITE), "paths", postgresql=_own_spellings(POSTGRESQL))
INSERT_SNAPSHOT = insert_into(schema.table_snapshots)
SNAPSHOTS = Statement(
    sa.select(schema.table_snapshots).where(_n.table_id == bind("of_table")).order_by(_n.sequence_number), "of_table"
)
INSERT_FILE = insert_into(schema.iceberg_files)
INSERT_LISTING = insert_into(schema.snapshot_manifests)


def _files_among(database: str) -> sa.Select[Any]:
    return sa.select(_x.file_path, _x.file_size, _x.table_id, _x.kind).where(among(_x.file_path, "paths", database))


FILES_AMONG = Statement(_files_among(SQLITE), "paths", postgresql=_files_among(POSTGRESQL))


def _forget_files(database: str) -> sa.Delete:
    return sa.delete(schema.iceberg_files).where(among(_x.file_path, "paths", database))


FORGET_FILES = Statement(_forget_files(SQLITE), "paths", postgresql=_forget_files(POSTGRESQL))
FORGET_LISTINGS = Statement(
    sa.delete(schema.snapshot_manifests)
    .where(_l.table_id == bind("of_table"), _l.snapshot_id == bind("of_snapshot"))
    .returning(_l.file_path),
    "of_table",
    "of_snapshot",
)


def _still_listed(database: str) -> sa.Select[Any]:
    return sa.select(_l.file_path).where(among(_l.file_path, "paths", database)).distinct()


STILL_LISTED = Statement(_still_listed(SQLITE), "paths", postgresql=_still_listed(POSTGRESQL))
EVERY_POINTER = Statement(
    sa.select(schema.iceberg_tables)
    .where(_i.table_id > bind("after"))
    .order_by(_i.table_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
# Such files are spelled with their address, or spell that of others.
ANY_OUTSIDE_FILE = Statement(
    sa.select(_f.id)
    .where(
        _f.table_id == bind("of_table"),
        sa.or_(_f.location.is_not(None), _f.content != ZERO),
        _f.retired_at.is_(None),
    )
    .limit(ONE)
    .offset(ZERO),
    "of_table",
)
ANY_VERSION = Statement(sa.select(sa.func.min(_v.version)).where(_v.table_id == bind("of_table")), "of_table")
LISTED_MANIFESTS = Statement(
    sa.select(_l.file_path, _x.file_size, _x.first_file_id, _x.last_file_id)
    .select_from(schema.snapshot_manifests.outerjoin(schema.iceberg_files, _x.file_path == _l.file_path))
    .where(_l.table_id == bind("of_table"), _l.snapshot_id == bind("of_snapshot")),
    "of_table",
    "of_snapshot",
)
FILES_OF_TABLE = Statement(
    sa.select(_x.file_path, _x.file_size)
    .where(_x.table_id == bind("of_table"))
    .order_by(_x.file_path)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "most",
)
FILES_OF_KIND = Statement(
    sa.select(_x.file_path, _x.file_size)
    .where(_x.table_id == bind("of_table"), _x.kind == bind("of_kind"))
    .order_by(_x.file_path),
    "of_table",
    "of_kind",
)
BRANCH_FILES = Statement(
    sa.select(_b.file_path, _b.file_size)
    .where(_b.table_id == bind("of_table"))
    .order_by(_b.file_path)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "most",
)


def _forget_branch_files(database: str) -> sa.Delete:
    return sa.delete(schema.branch_files).where(among(_b.file_path, "paths", database))


FORGET_BRANCH_FILES = Statement(_forget_branch_files(SQLITE), "paths", postgresql=_forget_branch_files(POSTGRESQL))


def _of_branches(database: str) -> sa.Select[Any]:
    return sa.select(_b.file_path, _b.table_id, _b.file_size).where(among(_b.file_path, "paths", database))


OF_BRANCHES = Statement(_of_branches(SQLITE), "paths", postgresql=_of_branches(POSTGRESQL))


def _of_versions(database: str) -> sa.Select[Any]:
    return sa.select(_f.file_path).where(among(_f.file_path, "paths", database), _f.retired_at.is_(None))


OF_VERSIONS = Statement(_of_versions(SQLITE), "paths", postgresql=_of_versions(POSTGRESQL))
FORGET_POINTER = Statement(sa.delete(schema.iceberg_tables).where(_i.table_id == bind("of_table")), "of_table")
FORGET_SNAPSHOTS_LISTINGS = Statement(
    sa.delete(schema.snapshot_manifests).where(_l.table_id == bind("of_table")), "of_table"
)
FORGET_DEBTS_OF = Statement(sa.delete(schema.footer_debts).where(_d.table_id == bind("of_table")), "of_table")
_with_pointer = schema.tables.join(
    schema.table_metadata,
    sa.and_(_m.table_id == schema.tables.c.id, _m.schema_version == schema.tables.c.schema_version),
).outerjoin(schema.iceberg_tables, _i.table_id == schema.tables.c.id)
_is_pending = sa.and_(
    schema.tables.c.format == sa.literal_column("'parquet'"),
    sa.or_(_i.version.is_(None), _i.version < schema.tables.c.version, _i.properties_at != _m.updated_at),
)
PENDING_TABLES = Statement(
    sa.select(schema.tables.c.id)
    .select_from(_with_pointer)
    .where(schema.tables.c.deleted_at.is_(None), schema.tables.c.id > bind("after"), _is_pending)
    .order_by(schema.tables.c.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
STANDING = Statement(
    sa.select(sa.case((_is_pending, ONE), else_=ZERO), _i.metadata_number)
    .select_from(_with_pointer)
    .where(schema.tables.c.deleted_at.is_(None), schema.tables.c.id == bind("of_table")),
    "of_table",
)


@dataclass(frozen=True)
class Pointer:
    """Where a table's Iceberg metadata is, and which version it covers."""

    table_id: int
    #: The folder of the table, relative to the warehouse.
    location: str
    #: The metadata file, relative to the warehouse.
    metadata_location: str
    metadata_number: int
    #: The current snapshot of the branch `main`.
    snapshot_id: int | None
    last_sequence: int
    version: int
    properties_at: int
    published_at: int


@dataclass(frozen=True)
class Standing:
    """Whether a live table has something to publish, and how often it was published."""

    is_pending: bool
    #: Grows with every publication, whoever makes it; none before the first.
    metadata_number: int | None


@dataclass(frozen=True)
class ListedRow:
    """A file as a manifest needs it."""

    id: int
    file_path: str
    file_size: int
    row_count: int
    spec_id: int
    partition_values: str
    schema_version: int
    from_version: int
    content: int
    location: str | None
    sequence_number: int | None
    referenced_path: str | None
    has_field_ids: bool
    stats: tuple[ColumnStats, ...] = ()


@dataclass(frozen=True)
class SnapshotRecord:
    """A snapshot that a table's metadata lists."""

    snapshot_id: int
    parent_snapshot_id: int | None
    sequence_number: int
    timestamp_ms: int
    #: Relative to the warehouse.
    manifest_list: str
    summary: Mapping[str, str]
    schema_id: int | None
    #: The version it stands for; none for one of a branch.
    version: int | None
    pinned_version: int
    metadata_location: str
    #: Whether this book made it, from its own versions.
    is_ours: bool


@dataclass(frozen=True)
class MetadataFile:
    """A file of Iceberg's own."""

    file_path: str
    kind: str
    file_size: int
    first_file_id: int | None = None
    last_file_id: int | None = None


@dataclass(frozen=True)
class Unpublished:
    """All that publishing a table begins from, of one moment."""

    table: TableRecord
    pointer: Pointer | None
    metadata: tuple[TableMetadata, ...]
    versions: tuple[TableVersion, ...]
    snapshots: tuple[SnapshotRecord, ...]
    #: The oldest version that a lease pins.
    leased: int | None
    #: Where history begins; files of before are in no version.
    oldest: int
    #: Whether what is published lies elsewhere, because the warehouse was moved: all of it is published again.
    anew: bool = False

    @property
    def current(self) -> TableMetadata:
        """The present schema, partitioning and properties."""
        return self.metadata[-1]

    def covers(self, version: int) -> bool:
        """Whether a version is published, with the present properties."""
        return (
            self.pointer is not None
            and not self.anew
            and self.pointer.version >= version
            and self.pointer.properties_at == properties_at(self.current)
        )

    @property
    def is_current(self) -> bool:
        """Whether there is nothing to publish."""
        return (
            self.pointer is not None
            and not self.anew
            and self.pointer.version == self.table.version
            and self.pointer.properties_at == properties_at(self.current)
        )


@dataclass(frozen=True)
class Publication:
    """A new state of a table's Iceberg metadata."""

    #: The metadata file it was made from.
    based_on: str | None
    pointer: Pointer
    snapshots: Sequence[SnapshotRecord] = ()
    files: Sequence[MetadataFile] = ()
    #: The manifests that each new snapshot lists.
    listings: Mapping[int, Sequence[str]] = field(default_factory=dict)
    #: Snapshots that the new metadata no longer lists.
    removed: Sequence[int] = ()
    #: Metadata files that the new one no longer names.
    superseded: Sequence[str] = ()
    #: The schema version that it was made with, where that must not have changed.
    schema_version: int | None = None
    #: Where history began, where all of it was published.
    oldest: int | None = None
    #: Files that no branch has any more.
    left: Sequence[str] = ()


class PointerMoved(NoEffect):
    """Somebody else has published the table meanwhile."""


def properties_at(metadata: TableMetadata) -> int:
    """When the properties of a table were changed last."""
    return round(metadata.updated_at.timestamp() * 1000)


def _pointer_from(row: Row) -> Pointer:
    return Pointer(*row)


def pointer_of(reader: Reader, table_id: int) -> Pointer | None:
    """What a table is published as; none if it never was."""
    row = reader.one(POINTER, table_id)
    return None if row is None else _pointer_from(row)


def standing_of(reader: Reader, table_id: int) -> Standing | None:
    """Whether a table has something to publish; none if it is gone."""
    row = reader.one(STANDING, table_id)
    return None if row is None else Standing(bool(row[0]), row[1])


def snapshot_from(row: Row) -> SnapshotRecord:
    """A snapshot from a row of all columns."""
    values = row_of(schema.table_snapshots, row)
    del values["table_id"]
    return SnapshotRecord(**values)


def snapshots_of(reader: Reader, table_id: int) -> list[SnapshotRecord]:
    """The snapshots that a table's metadata lists, the oldest first."""
    return [snapshot_from(row) for row in reader.all(SNAPSHOTS, table_id)]


def unpublished(reader: Reader, table: TableRecord, most: int, *, anew: bool = False) -> Unpublished:
    """What publishing begins from; the caller reads on one consistent state."""
    current = current_table(reader, table)
    pointer = pointer_of(reader, table.id)
    oldest = reader.one(ANY_VERSION, table.id)
    least = int(oldest[0]) if oldest is not None and oldest[0] is not None else current.version
    after = pointer.version if pointer is not None and not anew else least - 1
    versions = tuple(version_from(row) for row in reader.all(VERSIONS_AFTER, table.id, after, most))
    leases = leases_of(reader, table.id)
    return Unpublished(
        current,
        pointer,
        tuple(list_metadata(reader, current)),
        versions,
        tuple(snapshots_of(reader, table.id)),
        min((lease.version for lease in leases), default=None),
        least,
        anew,
    )


def files_added(reader: Reader, table_id: int, first: int, last: int, after: tuple[int, int] | None) -> list[ListedRow]:
    """Files that versions have added and that are visible in the last of them, a chunk at a time."""
    start = (first, 0) if after is None else after
    rows = reader.all(FILES_ADDED, table_id, start[0], start[1], last, CHUNK)
    return [_listed(row) for row in rows]


def files_ended(reader: Reader, table_id: int, version: int) -> list[ListedRow]:
    """Files that a version has ended."""
    return [_listed(row) for row in reader.all(FILES_ENDED, table_id, version)]


def _listed(row: Row) -> ListedRow:
    return ListedRow(*row)


def own_spellings(reader: Reader, paths: Sequence[str]) -> dict[str, str]:
    """How manifests name those of some files that an outside engine has spelled in its own way."""
    return {row[0]: row[1] for row in reader.all(OWN_SPELLINGS, reader.listed(paths))}


def with_stats(reader: Reader, table_id: int, files: Sequence[ListedRow], fields: Sequence[int]) -> list[ListedRow]:
    """The same files with the statistics of these columns."""
    found: dict[int, list[ColumnStats]] = {}
    for (file_id, _), stats in stats_of_files(reader, table_id, sorted(file.id for file in files), fields).items():
        found.setdefault(file_id, []).append(stats)
    return [replace(file, stats=tuple(found.get(file.id, ()))) for file in files]


def manifest_ranges(reader: Reader, table_id: int, snapshot_id: int) -> dict[str, tuple[int | None, int | None]]:
    """The manifests of a snapshot, and between which ids their files are."""
    return {row[0]: (row[2], row[3]) for row in reader.all(LISTED_MANIFESTS, table_id, snapshot_id)}


# --- publishing ----------------------------------------------------------------


def publish_metadata(transaction: Transaction, table: TableRecord, made: Publication, grace: float) -> None:
    """Move a table's pointer to new metadata, unless somebody else has moved it."""
    before = locked_table(transaction, table)
    if made.schema_version is not None and before["schema_version"] != made.schema_version:
        raise PointerMoved("the schema has changed")
    if made.oldest is not None and transaction.one(ANY_VERSION, table.id) != (made.oldest,):
        raise PointerMoved("history has ended meanwhile")
    move_pointer(transaction, table.id, made)
    enter_snapshots(transaction, table, made)
    remove_snapshots(transaction, table, made.removed, grace)
    leave_branches(transaction, table, made.left, grace)
    retire_metadata(transaction, table.id, made.superseded, SUPERSEDED, grace, METADATA)


def require_pointer(transaction: Transaction, table_id: int, made: Publication) -> Pointer | None:
    """Refuse to go on from metadata that is no longer the table's; what it is published as."""
    present = pointer_of(transaction, table_id)
    if (present.metadata_location if present is not None else None) != made.based_on:
        raise PointerMoved("the table was published meanwhile")
    return present


def move_pointer(transaction: Transaction, table_id: int, made: Publication) -> None:
    """Compare and swap; what is owed to Iceberg follows."""
    present = require_pointer(transaction, table_id, made)
    new = made.pointer
    values = (
        new.location,
        new.metadata_location,
        new.metadata_number,
        new.snapshot_id,
        new.last_sequence,
        new.version,
        new.properties_at,
        new.published_at,
    )
    if made.based_on is None:
        transaction.run(INSERT_POINTER, table_id, *values)
    elif transaction.run(MOVE_POINTER, *values, table_id, made.based_on) != 1:
        raise PointerMoved("the table was published meanwhile")
    complete_updates(transaction, table_id, new.version)
    if present is not None and present.version > new.version:
        # The first step of several that publish all of it anew.
        reopen_updates(transaction, table_id, new.version)


def enter_snapshots(transaction: Transaction, table: TableRecord, made: Publication) -> None:
    """Enter new snapshots, the files of their metadata, and which manifests each lists."""
    now = transaction.clock.now_ms()
    for snapshot in made.snapshots:
        row = {"table_id": table.id, **{name: getattr(snapshot, name) for name in snapshot.__dataclass_fields__}}
        row["summary"] = dict(snapshot.summary)
        values = [orjson.dumps(value).decode() if name == "summary" else value for name, value in row.items()]
        transaction.run(INSERT_SNAPSHOT, *values)
        capture(transaction, table.object_id, schema.table_snapshots, "insert", after=row)
    known: set[str] = set()
    for chunk in chunks(file.file_path for file in made.files):
        known |= {row[0] for row in transaction.all(FILES_AMONG, transaction.listed(chunk))}
    transaction.insert_many(
        INSERT_FILE,
        [
            (file.file_path, table.id, file.kind, file.file_size, file.first_file_id, file.last_file_id, now)
            for file in made.files
            if file.file_path not in known
        ],
    )
    transaction.insert_many(
        INSERT_LISTING,
        [
            (table.id, snapshot_id, path)
            for snapshot_id, paths in made.listings.items()
            for path in dict.fromkeys(paths)
        ],
    )


def remove_snapshots(transaction: Transaction, table: TableRecord, ids: Sequence[int], grace: float) -> None:
    """Forget snapshots that the metadata no longer lists; what only they needed waits for its removal."""
    if not ids:
        return
    wanted = set(ids)
    rows = [row_of(schema.table_snapshots, row) for row in transaction.all(SNAPSHOTS, table.id)]
    gone = [row for row in rows if row["snapshot_id"] in wanted]
    listed: set[str] = set()
    for row in gone:
        listed |= {found[0] for found in transaction.all(FORGET_LISTINGS, table.id, row["snapshot_id"])}
    delete_rows(transaction, table.object_id, schema.table_snapshots, gone)
    kept: set[str] = set()
    for chunk in chunks(sorted(listed)):
        kept |= {row[0] for row in transaction.all(STILL_LISTED, transaction.listed(chunk))}
    needed = {row["manifest_list"] for row in rows if row["snapshot_id"] not in wanted}
    lists = {row["manifest_list"] for row in gone} - needed
    retire_metadata(transaction, table.id, sorted(lists | (listed - kept)), UNLISTED, grace)


def leave_branches(transaction: Transaction, table: TableRecord, paths: Sequence[str], grace: float) -> None:
    """Let go of files that no branch has any more; those that a version has, or had, go with it."""
    now = transaction.clock.now_ms()
    for chunk in chunks(paths):
        listed = transaction.listed(chunk)
        found = [(path, size) for path, owner, size in transaction.all(OF_BRANCHES, listed) if owner == table.id]
        if not found:
            continue
        mine = transaction.listed([path for path, _ in found])
        transaction.run(FORGET_BRANCH_FILES, mine)
        versioned = {row[0] for row in transaction.all(OF_VERSIONS, mine)}
        add_temporary_files(transaction, [item for item in found if item[0] not in versioned], LEFT_BRANCH, now, grace)


def retire_metadata(
    transaction: Transaction,
    table_id: int,
    paths: Iterable[str],
    reason: str,
    grace: float,
    kind: str | None = None,
) -> None:
    """Let Iceberg's own files of a table go, after the grace for published ones."""
    now = transaction.clock.now_ms()
    for chunk in chunks(paths):
        found = [
            (path, size)
            for path, size, owner, what in transaction.all(FILES_AMONG, transaction.listed(chunk))
            if owner == table_id and kind in (None, what)
        ]
        if found:
            transaction.run(FORGET_FILES, transaction.listed([path for path, _ in found]))
            add_temporary_files(transaction, found, reason, now, grace)


def metadata_files(reader: Reader, table_id: int) -> list[str]:
    """The metadata files of a table that are kept."""
    return [row[0] for row in reader.all(FILES_OF_KIND, table_id, METADATA)]


def pending_tables(reader: Reader, after: int, most: int) -> list[int]:
    """Ids of tables that have versions which are not published."""
    return [int(row[0]) for row in reader.all(PENDING_TABLES, after, most)]


def every_pointer(reader: Reader) -> Iterator[Pointer]:
    """What each table is published as."""
    after = 0
    while page := reader.all(EVERY_POINTER, after, CHUNK):
        yield from map(_pointer_from, page)
        after = page[-1][0]
