"""Letting go of files: history that ends, files that wait, rows that follow their file.

ended (to_version)  →  retired: no kept version has it; a row in temporary_files, with a grace
                    →  deleting: the cleaner has made sure that no lease can need it (one way)
                    →  the object is deleted; then rows, footer and statistics go together
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from lakebook import failpoints
from lakebook.registry import schema
from lakebook.registry.changes import delete_rows, row_of
from lakebook.registry.file_stats import DELETE_STATS
from lakebook.registry.footers import delete_partition_metadata_batch
from lakebook.registry.leases import HORIZON, LeaseRecord, claim_horizon, end_dead_leases, leases_of, raise_horizon
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind
from lakebook.registry.table_files import CHUNK, file_update, files_by_path
from lakebook.registry.tables import TABLE_ROW
from lakebook.registry.temporary_files import add_temporary_files
from lakebook.registry.transactions import Reader, Transaction

RETIRED = "retired"
DROPPED = "table dropped"

_t = schema.tables.c
_f = schema.table_files.c
_v = schema.table_versions.c
_w = schema.temporary_files.c

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
TO_RETIRE = Statement(
    sa.select(schema.table_files)
    .where(_f.table_id == bind("of_table"), _f.to_version <= bind("least"), _f.retired_at.is_(None))
    .order_by(_f.to_version, _f.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "least",
    "most",
)
NOT_ENDED = Statement(
    sa.select(schema.table_files)
    .where(_f.table_id == bind("of_table"), _f.to_version.is_(None))
    .order_by(_f.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "most",
)


_counted = (sa.func.count(_f.id), sa.func.coalesce(sa.func.sum(_f.file_size), ZERO))
COUNT_RETIRABLE = Statement(
    sa.select(*_counted).where(
        _f.table_id == bind("of_table"), _f.to_version <= bind("least"), _f.retired_at.is_(None)
    ),
    "of_table",
    "least",
)
COUNT_RETIRABLE_DROPPED = Statement(
    sa.select(*_counted).where(
        _f.table_id == bind("of_table"),
        _f.from_version <= bind("least"),
        _f.retired_at.is_(None),
    ),
    "of_table",
    "least",
)


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
    .where(_w.expiration <= bind("now"), _w.file_path > bind("after"))
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
        .where(among(_w.file_path, "paths", database), _w.expiration <= bind("now"))
        .values(state="deleting")
        .returning(_w.file_path)
    )


MARK_DELETING = Statement(_marking(SQLITE), "paths", "now", postgresql=_marking(POSTGRESQL))


def _forgetting(database: str) -> sa.Delete:
    return sa.delete(schema.temporary_files).where(
        among(_w.file_path, "paths", database), _w.state == sa.literal_column("'deleting'")
    )


def _deleting(database: str) -> sa.Select[Any]:
    return (
        sa.select(_w.file_path)
        .where(among(_w.file_path, "paths", database), _w.state == sa.literal_column("'deleting'"))
        .order_by(_w.file_path)
    )


STILL_DELETING = Statement(_deleting(SQLITE), "paths", postgresql=_deleting(POSTGRESQL))
CLAIM_DELETING = Statement(_deleting(SQLITE), "paths", postgresql=_deleting(POSTGRESQL).with_for_update())
FORGET_FILES = Statement(_forgetting(SQLITE), "paths", postgresql=_forgetting(POSTGRESQL))
ANY_FILE = Statement(sa.select(_f.id).where(_f.table_id == bind("of_table")).limit(ONE).offset(ZERO), "of_table")
_EMPTIED = (
    (schema.table_stats, schema.table_stats.c.table_id),
    (schema.table_metadata, schema.table_metadata.c.table_id),
)
ROWS_OF_TABLE = {
    table.name: Statement(sa.select(table).where(column == bind("of_table")), "of_table") for table, column in _EMPTIED
}
DELETE_VERSIONS = Statement(sa.delete(schema.table_versions).where(_v.table_id == bind("of_table")), "of_table")
DELETE_HORIZON = Statement(
    sa.delete(schema.table_horizons).where(schema.table_horizons.c.table_id == bind("of_table")), "of_table"
)


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


def expire_versions(
    transaction: Transaction,
    table_id: int,
    object_id: int,
    since: int,
    versions: int,
    grace: float,
    dead: Sequence[LeaseRecord],
) -> Retired:
    """End the history below what the policy and live leases keep; hand over at most a chunk of files."""
    transaction.lock(object_id)
    row = transaction.one(TABLE_ROW, table_id)
    if row is None:
        return Retired(0, 0, 0, more=False)
    table = row_of(schema.tables, row)
    least = claim_horizon(transaction, table_id)
    pinned = _pinned(transaction, table_id, dead)
    if table["deleted_at"] is not None:
        return _empty_dropped(transaction, table, pinned, grace)
    kept = oldest_kept_version(transaction, table_id, table["version"], since, versions)
    wanted = max(least, min([kept, *pinned]))
    now = transaction.time_of(object_id)
    files = [row_of(schema.table_files, found) for found in transaction.all(TO_RETIRE, table_id, wanted, CHUNK)]
    if wanted > least:
        raise_horizon(transaction, table_id, wanted)
        transaction.run(FORGET_VERSIONS, table_id, wanted)
    _hand_over(transaction, table, files, {"retired_at": now}, RETIRED, grace)
    if files:
        transaction.run(RETIRE_FILES, now, table_id, transaction.listed([file["id"] for file in files]))
    failpoints.reach("expire.retired")
    return Retired(len(files), sum(file["file_size"] for file in files), wanted, more=len(files) == CHUNK)


def retirable(reader: Reader, table_id: int, since: int, versions: int, *, dropped: bool) -> tuple[int, int, int]:
    """What an expiry would retire: files, bytes, and the oldest version that could be read then."""
    row = reader.one(TABLE_ROW, table_id)
    if row is None:
        return 0, 0, 0
    current = row_of(schema.tables, row)["version"]
    pinned = [lease.version for lease in leases_of(reader, table_id)]
    if dropped:
        least = current + 1 if not pinned else 0
    else:
        least = min([oldest_kept_version(reader, table_id, current, since, versions), *pinned])
    found = reader.one(COUNT_RETIRABLE_DROPPED if dropped and not pinned else COUNT_RETIRABLE, table_id, least)
    assert found is not None
    return int(found[0]), int(found[1]), least


def _pinned(transaction: Transaction, table_id: int, dead: Sequence[LeaseRecord]) -> list[int]:
    """The versions that leases pin, after those of `dead` that have run out are gone."""
    end_dead_leases(transaction, dead)
    return [lease.version for lease in leases_of(transaction, table_id)]


def _empty_dropped(transaction: Transaction, table: dict[str, Any], pinned: list[int], grace: float) -> Retired:
    """Hand over files of a dropped table; when none is left, its rows go."""
    table_id, version = table["id"], table["version"]
    if pinned:
        return Retired(0, 0, min(pinned), more=False)
    now = transaction.time_of(table["object_id"])
    raise_horizon(transaction, table_id, version + 1)
    ended = [row_of(schema.table_files, row) for row in transaction.all(TO_RETIRE, table_id, version + 1, CHUNK)]
    live = [row_of(schema.table_files, row) for row in transaction.all(NOT_ENDED, table_id, CHUNK - len(ended))]
    for files, changes in (
        (ended, {"retired_at": now}),
        (live, {"to_version": version + 1, "retired_at": now}),
    ):
        _hand_over(transaction, table, files, changes, DROPPED, grace)
        if files:
            listed = transaction.listed([file["id"] for file in files])
            if "to_version" in changes:
                transaction.run(DROP_FILES, version + 1, now, table_id, listed)
            else:
                transaction.run(RETIRE_FILES, now, table_id, listed)
    number = len(ended) + len(live)
    if not number and transaction.one(ANY_FILE, table_id) is None:
        _forget_table(transaction, table)
    size = sum(file["file_size"] for file in (*ended, *live))
    return Retired(number, size, version + 1, more=number == CHUNK)


def _hand_over(
    transaction: Transaction,
    table: dict[str, Any],
    files: Sequence[dict[str, Any]],
    changes: dict[str, Any],
    reason: str,
    grace: float,
) -> None:
    # By the clock itself: an object's commit times may run ahead of it by a little, the cleaner's do not.
    now = transaction.clock.now_ms()
    add_temporary_files(transaction, [(file["file_path"], file["file_size"]) for file in files], reason, now, grace)
    if files:
        transaction.capture(table["object_id"], "table_files", [file_update(file, changes) for file in files])


def _forget_table(transaction: Transaction, table: dict[str, Any]) -> None:
    """Delete the rows of a dropped table that has been emptied."""
    for rows, _ in _EMPTIED:
        found = [row_of(rows, row) for row in transaction.all(ROWS_OF_TABLE[rows.name], table["id"])]
        delete_rows(transaction, table["object_id"], rows, found)
    transaction.run(DELETE_VERSIONS, table["id"])
    transaction.run(DELETE_HORIZON, table["id"])
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
    """Make sure that no lease needs these files or ever will, and mark them.

    The caller deletes the objects only after this transaction has committed.
    """
    rows = files_by_path(transaction, paths)
    least: dict[int, int | None] = {}
    for table_id in sorted({row["table_id"] for row in rows.values()}):
        if transaction.one(HORIZON, table_id) is None and transaction.one(TABLE_ROW, table_id) is None:
            continue  # Another cleaner has forgotten the table meanwhile, and its files with it.
        claim_horizon(transaction, table_id)
        least[table_id] = min(_pinned(transaction, table_id, () if dry_run else dead), default=None)
    free: list[str] = []
    highest: dict[int, int] = {}
    for path in paths:
        row = rows.get(path)
        if row is not None:
            if row["table_id"] not in least:
                continue
            pinned = least[row["table_id"]]
            if row["to_version"] is None or (pinned is not None and row["to_version"] > pinned):
                continue
            highest[row["table_id"]] = max(row["to_version"], highest.get(row["table_id"], 0))
        free.append(path)
    size = sum(rows[path]["file_size"] for path in free if path in rows)
    if dry_run:
        return Marked(tuple(free), size, len(paths) - len(free))
    for table_id, version in sorted(highest.items()):
        raise_horizon(transaction, table_id, version)
    marked = transaction.all(MARK_DELETING, transaction.listed(free), transaction.clock.now_ms()) if free else []
    return Marked(tuple(sorted(row[0] for row in marked)), size, len(paths) - len(free))


def forget_files(transaction: Transaction, paths: Sequence[str]) -> int:
    """Rows, footers and statistics of deleted objects, in one transaction.

    Only of those that are still marked: another cleaner may have been faster, and somebody else's path
    be in use again.
    """
    paths = still_deleting(transaction, paths, claim=True)
    if not paths:
        return 0
    tables: dict[int, int] = {}
    for row in files_by_path(transaction, paths).values():
        found = transaction.one(TABLE_ROW, row["table_id"])
        if found is not None:
            tables[row["table_id"]] = row_of(schema.tables, found)["object_id"]
    transaction.lock(*tables.values())
    rows = files_by_path(transaction, paths)
    for table_id in sorted(tables):
        files = [row for row in rows.values() if row["table_id"] == table_id]
        if files:
            transaction.run(DELETE_STATS, table_id, transaction.listed([row["id"] for row in files]))
            delete_rows(transaction, tables[table_id], schema.table_files, files)
    delete_partition_metadata_batch(transaction, paths)
    return transaction.run(FORGET_FILES, transaction.listed(paths))


def still_deleting(reader: Reader, paths: Sequence[str], *, claim: bool = False) -> list[str]:
    """Which of these files are marked; with `claim`, nobody else can forget them until the transaction ends."""
    return [row[0] for row in reader.all(CLAIM_DELETING if claim else STILL_DELETING, reader.listed(paths))]
