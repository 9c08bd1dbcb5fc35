"""Letting go of files: history that ends, files that wait, rows that follow their file.

ended (to_version)  →  retired: no kept version has it, nor a published snapshot, tag or branch;
                       a row in temporary_files, with a grace
                    →  deleting: the cleaner has made sure that no lease can need it (one way)
                    →  the object is deleted; then rows, footer and statistics go together

Of a path that somebody else chose, a row stays for a day after that: a cleaner that was slow may still be
about to delete the object, and must not meet a new one that was added under the same path meanwhile.

A file that a rollback has revived has several rows. Only the last of them hands the file over;
the others just go. A topic's segment that is a file of the topic's table goes when both have let go
of it: whoever is last hands it over, and both decide under the table's lock.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from lakebook import failpoints
from lakebook.registry import schema
from lakebook.registry.changes import delete_rows, row_of
from lakebook.registry.file_stats import DELETE_STATS
from lakebook.registry.footers import delete_partition_metadata_batch
from lakebook.registry.inserts import folders_above, unaccounted_paths
from lakebook.registry.leases import HORIZON, LeaseRecord, claim_horizon, end_dead_leases, leases_of, raise_horizon
from lakebook.registry.owed import FORGET_UPDATES_OF
from lakebook.registry.publishing import (
    BRANCH_FILES,
    FILES_OF_TABLE,
    FORGET_BRANCH_FILES,
    FORGET_DEBTS_OF,
    FORGET_POINTER,
    FORGET_SNAPSHOTS_LISTINGS,
    Pointer,
    pointer_of,
    retire_metadata,
)
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind
from lakebook.registry.stream_folders import segment_paths
from lakebook.registry.sweeps import ADVANCE_SWEEPS
from lakebook.registry.table_files import CHUNK, FILES_BY_PATH, chunks, file_update
from lakebook.registry.tables import TABLE_ROW
from lakebook.registry.temporary_files import NOT_DELETED, TOMBSTONE, TOMBSTONE_MS, add_temporary_files
from lakebook.registry.transactions import Reader, Transaction

RETIRED = "retired"
DROPPED = "table dropped"
ABANDONED = "no row knows it"

# The folders of attempts: named by their commits, so that no path in them comes a second time.
_OWN_PATH = re.compile(r"data/\d+/[0-9a-f]{32}/|.*/metadata/[0-9a-f]{32}/", re.ASCII)

_t = schema.tables.c
_f = schema.table_files.c
_v = schema.table_versions.c
_w = schema.temporary_files.c
_n = schema.table_snapshots.c
_b = schema.branch_files.c
_x = schema.iceberg_files.c
_i = schema.iceberg_tables.c
_d = schema.footer_debts.c

OLDEST_KEPT = Statement(
    sa.select(sa.func.min(_v.version)).where(
        _v.table_id == bind("of_table"), sa.or_(_v.committed_at > bind("since"), _v.version > bind("above"))
    ),
    "of_table",
    "since",
    "above",
)
# The newest version from before that time was still the state of the table at it.
STATE_AT = Statement(
    sa.select(sa.func.max(_v.version)).where(_v.table_id == bind("of_table"), _v.committed_at <= bind("since")),
    "of_table",
    "since",
)


def _in_snapshot(files: Any, *which: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Whether a published snapshot contains a file. Of a tag, what it contains, and nothing newer."""
    return sa.exists(
        sa.select(ONE)
        .select_from(schema.table_snapshots)
        .where(
            _n.table_id == files.table_id,
            _n.pinned_version >= files.from_version,
            _n.pinned_version < files.to_version,
            *which,
        )
    )


def _to_retire(*which: sa.ColumnElement[bool]) -> Statement:
    return Statement(
        sa.select(schema.table_files)
        .where(_f.table_id == bind("of_table"), _f.to_version <= bind("least"), _f.retired_at.is_(None), *which)
        .order_by(_f.to_version, _f.id)
        .limit(bind("most", sa.Integer))
        .offset(ZERO),
        "of_table",
        "least",
        "most",
    )


TO_RETIRE = _to_retire(sa.not_(_in_snapshot(_f)))
#: Of a dropped table, whose snapshots nobody can reach any more.
TO_RETIRE_DROPPED = _to_retire()
NOT_ENDED = Statement(
    sa.select(schema.table_files)
    .where(_f.table_id == bind("of_table"), _f.to_version.is_(None))
    .order_by(_f.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "most",
)


_other = schema.table_files.alias("other")
_o = _other.c


def _last_row(goes: Any) -> sa.ColumnElement[bool]:
    """Whether a row is the one that hands its file over when all go that can: the last of its path."""
    return sa.not_(
        sa.or_(
            sa.exists(
                sa.select(ONE)
                .select_from(_other)
                .where(
                    _o.file_path == _f.file_path,
                    _o.id != _f.id,
                    _o.retired_at.is_(None),
                    sa.or_(_o.id > _f.id, sa.not_(goes)),
                )
            ),
            sa.exists(sa.select(ONE).select_from(schema.branch_files).where(_b.file_path == _f.file_path)),
        )
    )


def _counting(database: str) -> sa.Select[Any]:
    stays = sa.not_(among(_n.snapshot_id, "leaving", database))

    def goes(files: Any) -> sa.ColumnElement[bool]:
        return sa.and_(
            files.table_id == bind("of_table"),
            files.to_version.is_not(None),
            files.to_version <= bind("least"),
            files.retired_at.is_(None),
            sa.not_(_in_snapshot(files, stays)),
        )

    return sa.select(sa.func.count(_f.id), sa.func.coalesce(sa.func.sum(_f.file_size), ZERO)).where(
        goes(_f), _last_row(goes(_o))
    )


COUNT_RETIRABLE = Statement(_counting(SQLITE), "of_table", "least", "leaving", postgresql=_counting(POSTGRESQL))
_files_left = (
    sa.select(_f.file_size.label("size"))
    .where(_f.table_id == bind("of_table"), _f.retired_at.is_(None))
    .where(
        sa.not_(
            sa.exists(
                sa.select(ONE)
                .select_from(_other)
                .where(_o.file_path == _f.file_path, _o.id > _f.id, _o.retired_at.is_(None))
            )
        )
    )
)
_branch_files_left = sa.select(_b.file_size.label("size")).where(
    _b.table_id == bind("of_table"),
    sa.not_(sa.exists(sa.select(ONE).select_from(schema.table_files).where(_f.file_path == _b.file_path))),
)
_metadata_left = sa.select(_x.file_size.label("size")).where(_x.table_id == bind("of_table"))
_left = sa.union_all(_files_left, _branch_files_left, _metadata_left).subquery()
COUNT_DROPPED = Statement(
    sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(_left.c.size), ZERO)).select_from(_left), "of_table"
)


def _paths_among(column: sa.ColumnElement[Any]) -> Statement:
    clauses = [sa.select(column).where(among(column, "paths", database)) for database in (SQLITE, POSTGRESQL)]
    return Statement(clauses[0], "paths", postgresql=clauses[1])


WAITING_AMONG = _paths_among(_w.file_path)
BRANCH_FILES_AMONG = _paths_among(_b.file_path)
METADATA_AMONG = _paths_among(_x.file_path)
PINNED_VERSIONS = Statement(
    sa.select(_n.pinned_version)
    .select_from(schema.table_snapshots.join(schema.tables, _t.id == _n.table_id))
    .where(_n.table_id == bind("of_table"), _t.deleted_at.is_(None))
    .distinct()
    .order_by(_n.pinned_version),
    "of_table",
)


def _forget_debts(database: str) -> sa.Delete:
    return sa.delete(schema.footer_debts).where(among(_d.file_path, "paths", database))


FORGET_DEBTS = Statement(_forget_debts(SQLITE), "paths", postgresql=_forget_debts(POSTGRESQL))


def _objects_at(database: str) -> sa.Select[Any]:
    return (
        sa.select(_t.object_id)
        .select_from(schema.tables.outerjoin(schema.iceberg_tables, _i.table_id == _t.id))
        .where(sa.or_(among(_i.location, "folders", database), among(_t.table_uuid, "names", database)))
    )


#: Tables whose Iceberg location is one of these folders, or will be one that has such a name.
OBJECTS_AT = Statement(_objects_at(SQLITE), "folders", "names", postgresql=_objects_at(POSTGRESQL))


def _on_ids(make: Any) -> dict[str, Any]:
    return {
        database: make(sa.and_(_f.table_id == bind("of_table"), among(_f.id, "files", database)))
        for database in (SQLITE, POSTGRESQL)
    }


_retiring = _on_ids(lambda these: sa.update(schema.table_files).where(these).values(retired_at=bind("now")))
RETIRE_FILES = Statement(_retiring[SQLITE], "now", "of_table", "files", postgresql=_retiring[POSTGRESQL])
_dropping = _on_ids(
    lambda these: sa.update(schema.table_files).where(these).values(to_version=bind("ending"), retired_at=bind("now"))
)
DROP_FILES = Statement(_dropping[SQLITE], "ending", "now", "of_table", "files", postgresql=_dropping[POSTGRESQL])
FORGET_VERSIONS = Statement(
    sa.delete(schema.table_versions).where(_v.table_id == bind("of_table"), _v.version < bind("least")),
    "of_table",
    "least",
)
EXPIRED_FILES = Statement(
    sa.select(_w.file_path, _w.file_size, _w.state)
    .where(_w.expiration <= bind("now"), _w.file_path > bind("after"), NOT_DELETED)
    .order_by(_w.file_path)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "now",
    "after",
    "most",
)


def _marking(database: str) -> sa.Update:
    return (
        sa.update(schema.temporary_files)
        .where(among(_w.file_path, "paths", database), _w.expiration <= bind("now"), NOT_DELETED)
        .values(state="deleting")
        .returning(_w.file_path)
    )


MARK_DELETING = Statement(_marking(SQLITE), "paths", "now", postgresql=_marking(POSTGRESQL))


def _forgetting(database: str) -> sa.Delete:
    return sa.delete(schema.temporary_files).where(
        among(_w.file_path, "paths", database), _w.state == sa.literal_column("'deleting'"), NOT_DELETED
    )


def _burying(database: str) -> sa.Update:
    return (
        sa.update(schema.temporary_files)
        .where(among(_w.file_path, "paths", database), _w.state == sa.literal_column("'deleting'"), NOT_DELETED)
        .values(reason=sa.literal_column(f"'{TOMBSTONE}'"), expiration=bind("until"))
    )


def _deleting(database: str) -> sa.Select[Any]:
    return (
        sa.select(_w.file_path)
        .where(among(_w.file_path, "paths", database), _w.state == sa.literal_column("'deleting'"), NOT_DELETED)
        .order_by(_w.file_path)
    )


STILL_DELETING = Statement(_deleting(SQLITE), "paths", postgresql=_deleting(POSTGRESQL))
CLAIM_DELETING = Statement(_deleting(SQLITE), "paths", postgresql=_deleting(POSTGRESQL).with_for_update())
FORGET_FILES = Statement(_forgetting(SQLITE), "paths", postgresql=_forgetting(POSTGRESQL))
BURY_FILES = Statement(_burying(SQLITE), "until", "paths", postgresql=_burying(POSTGRESQL))
_old_tombstones = sa.select(_w.file_path).where(_w.expiration <= bind("now"), sa.not_(NOT_DELETED))
OLD_TOMBSTONE = Statement(_old_tombstones.limit(ONE).offset(ZERO), "now")
FORGET_TOMBSTONES = Statement(
    sa.delete(schema.temporary_files).where(
        _w.file_path.in_(_old_tombstones.order_by(_w.expiration).limit(bind("most", sa.Integer)).offset(ZERO))
    ),
    "now",
    "most",
)
ANY_FILE = Statement(sa.select(_f.id).where(_f.table_id == bind("of_table")).limit(ONE).offset(ZERO), "of_table")
_EMPTIED = (
    (schema.table_stats, schema.table_stats.c.table_id),
    (schema.table_metadata, schema.table_metadata.c.table_id),
    (schema.table_snapshots, schema.table_snapshots.c.table_id),
)
ROWS_OF_TABLE = {
    table.name: Statement(sa.select(table).where(column == bind("of_table")), "of_table") for table, column in _EMPTIED
}
DELETE_VERSIONS = Statement(sa.delete(schema.table_versions).where(_v.table_id == bind("of_table")), "of_table")
DELETE_COMPACTION_CLAIM = Statement(
    sa.delete(schema.compaction_claims).where(schema.compaction_claims.c.table_id == bind("of_table")), "of_table"
)
DELETE_HORIZON = Statement(
    sa.delete(schema.table_horizons).where(schema.table_horizons.c.table_id == bind("of_table")), "of_table"
)


@dataclass(frozen=True)
class Grace:
    """Seconds for which files wait before they may be deleted."""

    unpublished: float
    #: Of files that other engines may know: their readers hold no lease.
    published: float

    def of(self, file: dict[str, Any], pointer: Pointer | None) -> float:
        """The grace of a file, by whether a snapshot may have had it."""
        if pointer is None or file["from_version"] > pointer.version:
            return self.unpublished
        return self.after_publishing

    @property
    def after_publishing(self) -> float:
        """The grace of what was ever published."""
        return max(self.published, self.unpublished)


@dataclass(frozen=True)
class Retired:
    """What one step of an expiry did."""

    files: int
    size: int
    min_readable: int
    #: Whether there may be more to do.
    more: bool


def oldest_kept_version(reader: Reader, table_id: int, current: int, since: int, versions: int) -> int:
    """The oldest version that a policy of time and number keeps."""
    row = reader.one(OLDEST_KEPT, table_id, since, current - versions)
    kept = current if row is None or row[0] is None else int(row[0])
    at = reader.one(STATE_AT, table_id, since)
    if at is not None and at[0] is not None:
        kept = min(kept, int(at[0]))
    return min(kept, current)


def oldest_needed_version(reader: Reader, table_id: int, current: int, since: int, versions: int) -> int:
    """The oldest version that the policy or a lease keeps; snapshots of older ones need not be listed."""
    leases = [lease.version for lease in leases_of(reader, table_id)]
    return min([oldest_kept_version(reader, table_id, current, since, versions), *leases])


def expire_versions(
    transaction: Transaction,
    table_id: int,
    object_id: int,
    since: int,
    versions: int,
    grace: Grace,
    dead: Sequence[LeaseRecord],
) -> Retired:
    """End the history below what the policy and live leases keep; hand over at most a chunk of files.

    Of a published table, a version stays until it is published, and a file until no snapshot lists it.
    """
    # Whoever publishes takes the same lock to move the pointer and to enter its snapshots. What it will
    # enter was read long before, and is still there, whichever of the two comes first:
    # - Its new snapshots are of versions above the pointer. What is retired here has ended at or below
    #   the pointer, so that none of them contains it.
    # - Snapshots that it carries on were listed by the metadata that it began from. If one of them has
    #   left since, so has that metadata, and the compare-and-swap fails. If not, its row is seen here.
    # - If its pointer comes later, less is expired here than could be; the next expiry makes up for it.
    # That leaves a publication of all history: the very first, before which no pointer holds history back,
    # and one after the warehouse was moved. It makes sure under the lock that history still begins where it
    # began when it was read; what is retired has ended at or before that.
    transaction.lock(object_id)
    row = transaction.one(TABLE_ROW, table_id)
    if row is None:
        return Retired(0, 0, 0, more=False)
    table = row_of(schema.tables, row)
    pointer = pointer_of(transaction, table_id)
    least = claim_horizon(transaction, table_id)
    pinned = _pinned(transaction, table_id, dead)
    if table["deleted_at"] is not None:
        return _empty_dropped(transaction, table, pointer, pinned, grace)
    kept = oldest_kept_version(transaction, table_id, table["version"], since, versions)
    published = [] if pointer is None else [pointer.version]
    wanted = max(least, min([kept, *pinned, *published]))
    files = _files(transaction.all(TO_RETIRE, table_id, wanted, CHUNK))
    if wanted > least:
        raise_horizon(transaction, table_id, wanted)
        transaction.run(FORGET_VERSIONS, table_id, wanted)
    gone = _retire(transaction, table, files, pointer, RETIRED, grace)
    failpoints.reach("expire.retired")
    return Retired(len(gone), _size(gone), wanted, more=len(files) == CHUNK)


def retirable(
    reader: Reader, table_id: int, since: int, versions: int, *, dropped: bool, leaving: Sequence[int] = ()
) -> tuple[int, int, int]:
    """What an expiry would retire: files, bytes, and the oldest version that could be read then.

    `leaving` are the snapshots that would leave the metadata first.
    """
    row = reader.one(TABLE_ROW, table_id)
    if row is None:
        return 0, 0, 0
    current = row_of(schema.tables, row)["version"]
    if dropped:
        if leases_of(reader, table_id):
            return 0, 0, 0
        found, least = reader.one(COUNT_DROPPED, table_id), current + 1
    else:
        least = oldest_needed_version(reader, table_id, current, since, versions)
        found = reader.one(COUNT_RETIRABLE, table_id, least, reader.listed(leaving))
    assert found is not None
    return int(found[0]), int(found[1]), least


def _pinned(transaction: Transaction, table_id: int, dead: Sequence[LeaseRecord]) -> list[int]:
    """The versions that leases pin, after those of `dead` that have run out are gone."""
    end_dead_leases(transaction, dead)
    return [lease.version for lease in leases_of(transaction, table_id)]


def _empty_dropped(
    transaction: Transaction, table: dict[str, Any], pointer: Pointer | None, pinned: list[int], grace: Grace
) -> Retired:
    """Hand over files of a dropped table, Iceberg's own too; when none is left, its rows go."""
    table_id, version = table["id"], table["version"]
    if pinned:
        return Retired(0, 0, min(pinned), more=False)
    raise_horizon(transaction, table_id, version + 1)
    branch = [(row[0], row[1]) for row in transaction.all(BRANCH_FILES, table_id, CHUNK)]
    gone = _leave_branches(transaction, branch, grace)
    number, size, looked = len(gone), sum(length for _, length in gone), len(branch)
    for statement, values, ending in (
        (TO_RETIRE_DROPPED, (version + 1,), None),
        (NOT_ENDED, (), version + 1),
    ):
        files = _files(transaction.all(statement, table_id, *values, CHUNK - looked))
        retired = _retire(transaction, table, files, pointer, DROPPED, grace, ending)
        number, size, looked = number + len(retired), size + _size(retired), looked + len(files)
    metadata = transaction.all(FILES_OF_TABLE, table_id, CHUNK - looked)
    retire_metadata(transaction, table_id, [row[0] for row in metadata], DROPPED, grace.after_publishing)
    number, size = number + len(metadata), size + sum(row[1] for row in metadata)
    looked += len(metadata)
    if not looked and transaction.one(ANY_FILE, table_id) is None:
        _forget_table(transaction, table)
    return Retired(number, size, version + 1, more=looked == CHUNK)


def _leave_branches(transaction: Transaction, files: Sequence[tuple[str, int]], grace: Grace) -> list[tuple[str, int]]:
    """Hand over files that only branches had; those that a row of the table knows go with that row."""
    if not files:
        return []
    paths = [path for path, _ in files]
    listed = transaction.listed(paths)
    rows = _rows_by_path(transaction, paths)
    kept = {path for path, found in rows.items() if any(row["retired_at"] is None for row in found)}
    kept |= {row[0] for row in transaction.all(WAITING_AMONG, listed)}
    transaction.run(FORGET_BRANCH_FILES, listed)
    gone = [(path, size) for path, size in files if path not in kept]
    add_temporary_files(transaction, gone, DROPPED, transaction.clock.now_ms(), grace.after_publishing)
    return gone


def _files(rows: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    return [row_of(schema.table_files, row) for row in rows]


def _size(files: Iterable[dict[str, Any]]) -> int:
    return sum(file["file_size"] for file in files)


def _rows_by_path(reader: Reader, paths: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """All rows of files by their paths, the newest last."""
    found: dict[str, list[dict[str, Any]]] = {}
    for chunk in chunks(paths):
        for row in _files(reader.all(FILES_BY_PATH, reader.listed(chunk))):
            found.setdefault(row["file_path"], []).append(row)
    return found


def _retire(
    transaction: Transaction,
    table: dict[str, Any],
    files: Sequence[dict[str, Any]],
    pointer: Pointer | None,
    reason: str,
    grace: Grace,
    ending: int | None = None,
) -> list[dict[str, Any]]:
    """Retire rows of a table, and hand their files over; which those are.

    A file that has another row, is in a branch or is a topic's, is still needed: then the row goes, and the
    file stays.
    """
    if not files:
        return []
    table_id, object_id = table["id"], table["object_id"]
    handed, surplus = _parted(transaction, table, files)
    if surplus:
        transaction.run(DELETE_STATS, table_id, transaction.listed([row["id"] for row in surplus]))
        delete_rows(transaction, object_id, schema.table_files, surplus)
    if not handed:
        return []
    now = transaction.time_of(object_id)
    changes = {"retired_at": now} if ending is None else {"to_version": ending, "retired_at": now}
    listed = transaction.listed([row["id"] for row in handed])
    if ending is None:
        transaction.run(RETIRE_FILES, now, table_id, listed)
    else:
        transaction.run(DROP_FILES, ending, now, table_id, listed)
    transaction.capture(object_id, "table_files", [file_update(row, changes) for row in handed])
    paths = transaction.listed([row["file_path"] for row in handed])
    waiting = {row[0] for row in transaction.all(WAITING_AMONG, paths)}
    by_grace: dict[float, list[tuple[str, int]]] = {}
    for row in handed:
        if row["file_path"] not in waiting:
            by_grace.setdefault(grace.of(row, pointer), []).append((row["file_path"], row["file_size"]))
    for seconds, some in by_grace.items():
        # By the clock itself: an object's commit times may run ahead of it by a little, the cleaner's do not.
        add_temporary_files(transaction, some, reason, transaction.clock.now_ms(), seconds)
    return handed


def _parted(
    transaction: Transaction, table: dict[str, Any], files: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows that hand their file over, and rows that just go, because another one has the file."""
    table_id = table["id"]
    going = {row["id"] for row in files}
    paths = list(dict.fromkeys(row["file_path"] for row in files))
    elsewhere = {row[0] for row in transaction.all(BRANCH_FILES_AMONG, transaction.listed(paths))}
    # Whichever table it is: one of a topic that a rebuild did not know as such has its segments too.
    elsewhere |= segment_paths(transaction, paths)
    everything = _rows_by_path(transaction, paths)
    handed: list[dict[str, Any]] = []
    surplus: list[dict[str, Any]] = []
    for path in paths:
        own = [row for row in everything[path] if row["table_id"] == table_id]
        mine = [row for row in own if row["id"] in going]
        others = [row for row in everything[path] if row["table_id"] != table_id or row["id"] not in going]
        # One that was retired when the file was revived says nothing any more.
        surplus += [row for row in own if row["id"] not in going and row["retired_at"] is not None]
        if path in elsewhere or any(row["retired_at"] is None for row in others):
            surplus += mine
        else:
            handed.append(mine[-1])
            surplus += mine[:-1]
    return handed, surplus


def _forget_table(transaction: Transaction, table: dict[str, Any]) -> None:
    """Delete the rows of a dropped table that has been emptied."""
    for rows, _ in _EMPTIED:
        found = [row_of(rows, row) for row in transaction.all(ROWS_OF_TABLE[rows.name], table["id"])]
        delete_rows(transaction, table["object_id"], rows, found)
    for statement in (
        FORGET_SNAPSHOTS_LISTINGS,
        FORGET_DEBTS_OF,
        FORGET_POINTER,
        FORGET_UPDATES_OF,
        DELETE_VERSIONS,
        DELETE_COMPACTION_CLAIM,
        DELETE_HORIZON,
    ):
        transaction.run(statement, table["id"])
    delete_rows(transaction, table["object_id"], schema.tables, [table])


# --- deleting ------------------------------------------------------------------


@dataclass(frozen=True)
class Marked:
    """Files that may be deleted now, and how many leases keep from it."""

    paths: tuple[str, ...]
    size: int
    pinned: int


def expired_files(reader: Reader, now: int, after: str, most: int) -> list[tuple[str, int, str]]:
    """Files whose grace has passed: path, size and state, in the order of their paths."""
    return [(row[0], row[1], row[2]) for row in reader.all(EXPIRED_FILES, now, after, most)]


def mark_deleting(
    transaction: Transaction, paths: Sequence[str], dead: Sequence[LeaseRecord], *, dry_run: bool
) -> Marked:
    """Make sure that nobody needs these files or ever will, and mark them.

    The caller deletes the objects only after this transaction has committed.
    """
    least: dict[int, int | None] = {}
    contained: dict[int, list[int]] = {}
    for table_id in sorted({row["table_id"] for rows in _rows_by_path(transaction, paths).values() for row in rows}):
        if transaction.one(HORIZON, table_id) is None and transaction.one(TABLE_ROW, table_id) is None:
            continue  # Another cleaner has forgotten the table meanwhile, and its files with it.
        claim_horizon(transaction, table_id)
        least[table_id] = min(_pinned(transaction, table_id, () if dry_run else dead), default=None)
        contained[table_id] = [row[0] for row in transaction.all(PINNED_VERSIONS, table_id)]
    # Read again: from here on no lease comes, and a file that was taken back shows its new row.
    rows = _rows_by_path(transaction, paths)
    listed = transaction.listed(paths)
    used = {row[0] for statement in (BRANCH_FILES_AMONG, METADATA_AMONG) for row in transaction.all(statement, listed)}

    def needed(row: dict[str, Any]) -> bool:
        table_id, end = row["table_id"], row["to_version"]
        if table_id not in least or end is None or row["retired_at"] is None:
            return True
        pinned, snapshots = least[table_id], contained[table_id]
        first = bisect_left(snapshots, row["from_version"])
        return (pinned is not None and end > pinned) or (first < len(snapshots) and snapshots[first] < end)

    free = [path for path in paths if path not in used and not any(map(needed, rows.get(path, ())))]
    size = sum(rows[path][-1]["file_size"] for path in free if path in rows)
    if dry_run:
        return Marked(tuple(free), size, len(paths) - len(free))
    highest: dict[int, int] = {}
    for path in free:
        for row in rows.get(path, ()):
            highest[row["table_id"]] = max(row["to_version"], highest.get(row["table_id"], 0))
    for table_id, version in sorted(highest.items()):
        raise_horizon(transaction, table_id, version)
    marked = transaction.all(MARK_DELETING, transaction.listed(free), transaction.clock.now_ms()) if free else []
    return Marked(tuple(sorted(row[0] for row in marked)), size, len(paths) - len(free))


def claim_abandoned(transaction: Transaction, files: Sequence[tuple[str, int]]) -> list[str]:
    """Mark objects in Iceberg locations that no row accounts for; from then on no commit can take them.

    An outside engine's commit that names one of them is either seen here, or sees the mark and is
    refused, or, if it looked at the file before and the mark has gone with it, sees that a sweep came.
    """
    folders = sorted({folder for path, _ in files for folder in folders_above(path)})
    names = sorted({folder.rpartition("/")[2] for folder in folders})
    found = transaction.all(OBJECTS_AT, transaction.listed(folders), transaction.listed(names))
    transaction.lock(*(row[0] for row in found))
    # Whoever has looked at a file before this looks again; see `require_same_sweep`.
    transaction.run(ADVANCE_SWEEPS)
    free = unaccounted_paths(transaction, [path for path, _ in files])
    now = transaction.clock.now_ms()
    add_temporary_files(transaction, [(path, size) for path, size in files if path in free], ABANDONED, now, 0)
    return sorted(row[0] for row in transaction.all(MARK_DELETING, transaction.listed(sorted(free)), now))


def forget_files(transaction: Transaction, paths: Sequence[str]) -> int:
    """All rows, footers, debts and statistics of deleted objects, in one transaction.

    Only of those that are still marked: another cleaner may have been faster. What somebody else chose the
    path of leaves a tombstone, so that the path cannot be used again at once.
    """
    paths = still_deleting(transaction, paths)
    if not paths:
        return 0
    tables: dict[int, int] = {}
    for table_id in {row["table_id"] for rows in _rows_by_path(transaction, paths).values() for row in rows}:
        found = transaction.one(TABLE_ROW, table_id)
        if found is not None:
            tables[table_id] = row_of(schema.tables, found)["object_id"]
    # Objects before files, as an outside commit takes them.
    transaction.lock(*tables.values())
    paths = still_deleting(transaction, paths, claim=True)
    rows = [row for rows in _rows_by_path(transaction, paths).values() for row in rows]
    for table_id in sorted(tables):
        files = [row for row in rows if row["table_id"] == table_id]
        if files:
            transaction.run(DELETE_STATS, table_id, transaction.listed([row["id"] for row in files]))
            delete_rows(transaction, tables[table_id], schema.table_files, files)
    listed = transaction.listed(paths)
    delete_partition_metadata_batch(transaction, paths)
    transaction.run(FORGET_DEBTS, listed)
    others = [path for path in paths if _OWN_PATH.match(path) is None]
    until = transaction.clock.now_ms() + TOMBSTONE_MS
    buried = transaction.run(BURY_FILES, until, transaction.listed(others)) if others else 0
    return buried + transaction.run(FORGET_FILES, listed)


def forget_tombstones(transaction: Transaction, most: int) -> int:
    """Let paths be used again whose files were deleted long enough ago; how many. No object is touched."""
    return transaction.run(FORGET_TOMBSTONES, transaction.clock.now_ms(), most)


def still_deleting(reader: Reader, paths: Sequence[str], *, claim: bool = False) -> list[str]:
    """Which of these files are marked; with `claim`, nobody else can forget them until the transaction ends."""
    return [row[0] for row in reader.all(CLAIM_DELETING if claim else STILL_DELETING, reader.listed(paths))]
