"""Commits of outside engines: the one transaction in which pointer, files and versions change together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import FilesChanged, PathInUse, RegistryCorrupt
from lakebook.registry import schema
from lakebook.registry.changes import insert_new, row_of, update_row
from lakebook.registry.commits import COMMIT_OPEN
from lakebook.registry.file_stats import all_stats_of
from lakebook.registry.publishing import (
    METADATA,
    OF_BRANCHES,
    SNAPSHOTS,
    STATISTICS,
    SUPERSEDED,
    UNLISTED,
    PointerMoved,
    Publication,
    enter_snapshots,
    leave_branches,
    move_pointer,
    properties_at,
    remove_snapshots,
    require_pointer,
    retire_metadata,
)
from lakebook.registry.statements import POSTGRESQL, SQLITE, Statement, among, bind, insert_into
from lakebook.registry.stream_folders import RETIRED_AMONG
from lakebook.registry.sweeps import same_sweep
from lakebook.registry.table_files import (
    RANGES_AMONG,
    SEGMENTS_AMONG,
    NewFile,
    TableChange,
    chunks,
    commit_change,
)
from lakebook.registry.tables import (
    GET_METADATA,
    TableRecord,
    change_properties,
    locked_table,
    metadata_from,
    record_version,
    refuse_mirror,
)
from lakebook.registry.transactions import NoEffect, Reader, Transaction

_f = schema.table_files.c
_w = schema.temporary_files.c
_x = schema.iceberg_files.c
_d = schema.footer_debts.c


def _rows_by_path(database: str) -> sa.Select[Any]:
    return sa.select(schema.table_files).where(among(_f.file_path, "paths", database)).order_by(_f.id)


ROWS_BY_PATH = Statement(_rows_by_path(SQLITE), "paths", postgresql=_rows_by_path(POSTGRESQL))


def _waiting(database: str) -> sa.Select[Any]:
    return sa.select(_w.file_path, _w.state).where(among(_w.file_path, "paths", database))


WAITING = Statement(_waiting(SQLITE), "paths", postgresql=_waiting(POSTGRESQL).with_for_update())


def _take_back(database: str) -> sa.Delete:
    return sa.delete(schema.temporary_files).where(
        among(_w.file_path, "paths", database), _w.state == sa.literal_column("'waiting'")
    )


TAKE_BACK = Statement(_take_back(SQLITE), "paths", postgresql=_take_back(POSTGRESQL))


def _metadata_among(database: str) -> sa.Select[Any]:
    return sa.select(_x.file_path, _x.table_id).where(among(_x.file_path, "paths", database))


METADATA_AMONG = Statement(_metadata_among(SQLITE), "paths", postgresql=_metadata_among(POSTGRESQL))
INSERT_BRANCH_FILE = insert_into(schema.branch_files)
INSERT_DEBT = insert_into(schema.footer_debts)
NEWEST_TIME = Statement(
    sa.select(sa.func.max(schema.table_versions.c.committed_at)).where(
        schema.table_versions.c.table_id == bind("of_table")
    ),
    "of_table",
)
LAST_COMMIT = Statement(
    sa.select(schema.lake_objects.c.last_commit_at).where(schema.lake_objects.c.id == bind("object_id")), "object_id"
)


class VersionsPending(NoEffect):
    """This book has changed the table since; those versions have to be published first."""


@dataclass(frozen=True)
class NewShape:
    """A schema, partition spec and sort order that an outside engine has made the present ones."""

    schema: Mapping[str, Any]
    partition_by: Mapping[str, Any]
    sort_by: Mapping[str, Any]
    last_field_id: int


@dataclass(frozen=True)
class Step:
    """One version that an outside commit makes."""

    operation: str
    added: Sequence[NewFile] = ()
    removed: Sequence[str] = ()
    #: Paths of files that were ended and are visible again, with the sequence number of their data.
    revived: Mapping[str, int | None] = field(default_factory=dict)
    summary: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OutsideCommit:
    """What an outside engine's commit changes in the registry."""

    #: The version it was prepared for.
    version: int
    #: The time of its first version, which its snapshot carries.
    at: int
    publication: Publication
    #: Schemas, specs and orders that become the present ones, one after the other.
    shapes: Sequence[NewShape] = ()
    steps: Sequence[Step] = ()
    properties: Mapping[str, str | None] = field(default_factory=dict)
    #: Files that only a branch, or a staged snapshot, has.
    branch_files: Sequence[tuple[str, int]] = ()
    #: Files that no branch has any more.
    left: Sequence[str] = ()
    #: Metadata and statistics files that nothing names any more.
    unlisted: Sequence[str] = ()
    #: The number of sweeps when its files were looked at.
    sweeps: int | None = None
    #: A snapshot of a branch that stands for a version now, and that version.
    taken: tuple[int, int] | None = None

    @property
    def versions(self) -> int:
        """How many versions it makes."""
        return len(self.steps) + len(self.shapes)


def flip_commit(transaction: Transaction, commit_id: str) -> None:
    """Commit a second opened row in the same transaction."""
    if transaction.run(COMMIT_OPEN, transaction.clock.now_ms(), commit_id, transaction.epoch) != 1:
        raise PointerMoved("it was fenced")


def apply_outside(
    transaction: Transaction, table: TableRecord, made: OutsideCommit, commit_id: str, grace: float, debt: float
) -> int:
    """Enter the commit of an outside engine, or nothing of it; the newest version then."""
    if made.versions or made.branch_files:
        refuse_mirror(table)
    before = locked_table(transaction, table)
    version: int = before["version"]
    if made.versions and version != made.version:
        raise VersionsPending
    require_pointer(transaction, table.id, made.publication)
    _require_new_metadata(transaction, table, made.publication)
    moment = made.at
    _require_unchanged(transaction, table, made)
    for number, shape in enumerate(made.shapes):
        transaction.set_time(table.object_id, moment + number)
        _change_shape(transaction, table, shape, commit_id)
    for number, step in enumerate(made.steps, len(made.shapes)):
        transaction.set_time(table.object_id, moment + number)
        _apply_step(transaction, table, step, commit_id, debt)
    if made.properties:
        change_properties(transaction, table, made.properties)
    move_pointer(transaction, table.id, _as_published(transaction, table, made))
    enter_snapshots(transaction, table, made.publication)
    _enter_branch_files(transaction, table, made.branch_files)
    leave_branches(transaction, table, made.left, grace)
    if made.taken is not None:
        _take_snapshot(transaction, table, *made.taken)
    remove_snapshots(transaction, table, made.publication.removed, grace)
    retire_metadata(transaction, table.id, made.publication.superseded, SUPERSEDED, grace, METADATA)
    retire_metadata(transaction, table.id, made.unlisted, UNLISTED, grace, STATISTICS)
    return version + made.versions


def _take_snapshot(transaction: Transaction, table: TableRecord, snapshot_id: int, version: int) -> None:
    for found in transaction.all(SNAPSHOTS, table.id):
        row = row_of(schema.table_snapshots, found)
        if row["snapshot_id"] == snapshot_id:
            changes = {"version": version, "pinned_version": version}
            update_row(transaction, table.object_id, schema.table_snapshots, row, changes)


def _require_unchanged(transaction: Transaction, table: TableRecord, made: OutsideCommit) -> None:
    """Refuse to go on from what was looked at, if it may be otherwise by now."""
    if made.sweeps is not None and not same_sweep(transaction, made.sweeps):
        raise PointerMoved("files were swept meanwhile")
    newest = transaction.one(NEWEST_TIME, table.id)
    if made.versions and newest is not None and newest[0] is not None and made.at <= newest[0]:
        raise PointerMoved("its time has passed")
    if (made.properties or made.shapes) and made.publication.based_on is not None:
        row = locked_table(transaction, table)
        found = transaction.one(GET_METADATA, table.id, row["schema_version"])
        if found is None or properties_at(metadata_from(found)) != made.publication.pointer.properties_at:
            raise PointerMoved("its properties were changed meanwhile")


def _as_published(transaction: Transaction, table: TableRecord, made: OutsideCommit) -> Publication:
    """With the time of the properties that its metadata file has, if it has changed them."""
    if not made.shapes and not made.properties and made.publication.based_on is not None:
        return made.publication
    row = locked_table(transaction, table)
    found = transaction.one(GET_METADATA, table.id, row["schema_version"])
    if found is None:
        raise RegistryCorrupt("its present schema has no row", on=table.shown, remedy="Run `lakebook verify`")
    changed = properties_at(metadata_from(found))
    return replace(made.publication, pointer=replace(made.publication.pointer, properties_at=changed))


def _change_shape(transaction: Transaction, table: TableRecord, shape: NewShape, commit_id: str) -> None:
    row = locked_table(transaction, table)
    found = transaction.one(GET_METADATA, table.id, row["schema_version"])
    if found is None:
        raise RegistryCorrupt("its present schema has no row", on=table.shown, remedy="Run `lakebook verify`")
    current = row_of(schema.table_metadata, found)
    now = transaction.time_of(table.object_id)
    version, schema_version = row["version"] + 1, row["schema_version"] + 1
    update_row(
        transaction,
        table.object_id,
        schema.tables,
        row,
        {
            "version": version,
            "schema_version": schema_version,
            "last_field_id": max(row["last_field_id"], shape.last_field_id),
            "hold_until": 0,
            "last_modified": now,
            "updated_at": now,
        },
    )
    metadata = {
        **{name: value for name, value in current.items() if name != "id"},
        "schema_version": schema_version,
        "from_version": version,
        "schema": dict(shape.schema),
        "partition_by": dict(shape.partition_by),
        "sort_by": dict(shape.sort_by),
        "last_modified": now,
        "created_at": now,
        "updated_at": now,
    }
    insert_new(transaction, table.object_id, schema.table_metadata, metadata)
    record_version(transaction, table.id, version, "schema", schema_version, commit_id, now)


def _apply_step(transaction: Transaction, table: TableRecord, step: Step, commit_id: str, debt: float) -> None:
    row = locked_table(transaction, table)
    added = [replace(file, schema_version=row["schema_version"]) for file in step.added]
    _require_free(transaction, table, added)
    ids = _live_ids(transaction, table, step.removed)
    revived = _revived(transaction, table, step.revived)
    change = TableChange(step.operation, [*added, *revived], ids, step.summary, waits=False, checked=True)
    commit_change(transaction, table, change, commit_id)
    now = transaction.clock.now_ms()
    due = now + round(debt * 1000)
    transaction.insert_many(
        INSERT_DEBT, [(file.file_path, table.id, now, due, None) for file in added if not file.checksum]
    )


def _live_ids(transaction: Transaction, table: TableRecord, paths: Sequence[str]) -> list[int]:
    ids: list[int] = []
    for chunk in chunks(paths):
        rows = [row_of(schema.table_files, row) for row in transaction.all(ROWS_BY_PATH, transaction.listed(chunk))]
        live = {
            row["file_path"]: row["id"] for row in rows if row["table_id"] == table.id and row["to_version"] is None
        }
        missing = [path for path in chunk if path not in live]
        if missing:
            raise FilesChanged(
                f"{len(missing)} files that it removes are not in the table",
                on=table.shown,
                remedy="Load the table again and repeat the commit",
            )
        ids += live.values()
    return ids


_USES = (
    (METADATA_AMONG, "it is a metadata file"),
    (SEGMENTS_AMONG, "it is a topic's segment"),
    (RETIRED_AMONG, "it was a topic's segment"),
    (RANGES_AMONG, "it is a view's"),
)
_NEW_FILES = "Write new files under the table's location"


def _require_unused(transaction: Transaction, table: TableRecord, listed: Any) -> None:
    for statement, what in _USES:
        if transaction.one(statement, listed) is not None:
            raise PathInUse(what, on=table.shown, remedy=_NEW_FILES)
    if any(row[1] != table.id for row in transaction.all(OF_BRANCHES, listed)):
        raise PathInUse("it is a file of another table's branch", on=table.shown, remedy=_NEW_FILES)


def _require_free(transaction: Transaction, table: TableRecord, files: Sequence[NewFile]) -> None:
    """Refuse files that are in use already, by this table or by anything else."""
    for chunk in chunks(file.file_path for file in files):
        listed = transaction.listed(chunk)
        _require_unused(transaction, table, listed)
        for statement, what in (
            (ROWS_BY_PATH, "it is or was a file of a table"),
            (WAITING, "it waits for its removal, or was removed within the last day"),
        ):
            if transaction.one(statement, listed) is not None:
                raise PathInUse(what, on=table.shown, remedy=_NEW_FILES)


def _require_new_metadata(transaction: Transaction, table: TableRecord, made: Publication) -> None:
    """Refuse metadata files that are in use already, as whatever."""
    for chunk in chunks(file.file_path for file in made.files):
        listed = transaction.listed(chunk)
        _require_unused(transaction, table, listed)
        for statement in (ROWS_BY_PATH, WAITING, OF_BRANCHES):
            if transaction.one(statement, listed) is not None:
                raise PathInUse("a metadata file is something else already", on=table.shown, remedy=_NEW_FILES)


def _revived(transaction: Transaction, table: TableRecord, wanted: Mapping[str, int | None]) -> list[NewFile]:
    """New rows for files that were ended: from retired they come back, from `deleting` never."""
    files: list[NewFile] = []
    for chunk in chunks(wanted):
        listed = transaction.listed(chunk)
        if any(state == "deleting" for _, state in transaction.all(WAITING, listed)):
            raise FilesChanged(
                "files that it brings back are being deleted", on=table.shown, remedy="Go back to a newer snapshot"
            )
        transaction.run(TAKE_BACK, listed)
        newest: dict[str, dict[str, Any]] = {}
        for found in transaction.all(ROWS_BY_PATH, listed):
            row = row_of(schema.table_files, found)
            newest[row["file_path"]] = row
        for path in chunk:
            row = newest.get(path, {})
            if row.get("table_id") != table.id:
                raise FilesChanged(
                    "files that it brings back are gone", on=table.shown, remedy="Choose a newer snapshot"
                )
            files.append(_copied(transaction, row, wanted[path]))
    return files


def _copied(transaction: Transaction, row: Mapping[str, Any], sequence: int | None) -> NewFile:
    stats = all_stats_of(transaction, row["table_id"], row["id"])
    return NewFile(
        file_path=row["file_path"],
        file_size=row["file_size"],
        file_type=row["file_type"],
        row_count=row["row_count"],
        checksum=row["checksum"],
        schema_version=row["schema_version"],
        modified_at=to_datetime(row["modified_at"]),
        row_groups=row["row_groups"],
        is_compressed=row["is_compressed"],
        partition_path=row["partition_path"],
        partition_values=row["partition_values"],
        spec_id=row["spec_id"],
        has_field_ids=row["has_field_ids"],
        has_statistics=row["has_statistics"],
        stats=stats,
        content=row["content"],
        location=row["location"],
        sequence_number=sequence,
        referenced_path=row["referenced_path"],
    )


def _enter_branch_files(transaction: Transaction, table: TableRecord, files: Sequence[tuple[str, int]]) -> None:
    now = transaction.clock.now_ms()
    for chunk in chunks(files):
        listed = transaction.listed([path for path, _ in chunk])
        _require_unused(transaction, table, listed)
        # A branch may have files of main's; its row pins them.
        rows = [row_of(schema.table_files, row) for row in transaction.all(ROWS_BY_PATH, listed)]
        if any(row["table_id"] != table.id for row in rows):
            raise PathInUse("it is a file of another table", on=table.shown, remedy=_NEW_FILES)
        taken = {row[0] for row in transaction.all(OF_BRANCHES, listed)}
        if any(state == "deleting" for _, state in transaction.all(WAITING, listed)):
            raise FilesChanged("files of the branch are being deleted", on=table.shown)
        transaction.run(TAKE_BACK, listed)
        transaction.insert_many(
            INSERT_BRANCH_FILE, [(path, table.id, size, now) for path, size in chunk if path not in taken]
        )


def hold_back(transaction: Transaction, table: TableRecord, seconds: float) -> bool:
    """Let this book's own changes of a table wait a little; not again right after the last time."""
    row = locked_table(transaction, table)
    now = transaction.clock.now_ms()
    length = round(seconds * 1000)
    if not length or now < row["hold_until"] + length:
        return False
    update_row(transaction, table.object_id, schema.tables, row, {"hold_until": now + length})
    return True


def last_commit_at(reader: Reader, table: TableRecord) -> int:
    """The commit time of a table's last change."""
    row = reader.one(LAST_COMMIT, table.object_id)
    return int(row[0]) if row is not None else 0


def rows_of_paths(reader: Reader, table_id: int, paths: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The rows of a table's files by path, the newest last."""
    found: dict[str, list[dict[str, Any]]] = {}
    for chunk in chunks(paths):
        for row in reader.all(ROWS_BY_PATH, reader.listed(chunk)):
            values = row_of(schema.table_files, row)
            if values["table_id"] == table_id:
                found.setdefault(values["file_path"], []).append(values)
    return found


def known_metadata(reader: Reader, paths: Sequence[str]) -> dict[str, int]:
    """Which of these are metadata files, and of which table."""
    found: dict[str, int] = {}
    for chunk in chunks(paths):
        found |= {row[0]: row[1] for row in reader.all(METADATA_AMONG, reader.listed(chunk))}
    return found
