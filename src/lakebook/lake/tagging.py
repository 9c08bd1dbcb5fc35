"""Tags: states of a table that are kept under a name, for every engine.

A tag is one of Iceberg's own, in the table's metadata. What its snapshot contains stays until the
tag is removed, however short the table's history is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from lakebook.clock import to_datetime, to_ms
from lakebook.errors import (
    InvalidInput,
    InvalidName,
    InvalidTable,
    SnapshotNotFound,
    TagAlreadyExists,
    TagNotFound,
    VersionNotFound,
)
from lakebook.iceberg.publishing import SHOWN_BY
from lakebook.iceberg.refs import OWN_PREFIX, Refs, TagRef, drop_tags, own_name, put_tag, refs_at
from lakebook.lake.catalogs import CatalogParts
from lakebook.lake.lake import Lake
from lakebook.lake.properties import MOST_SECONDS
from lakebook.names import check_name, shown
from lakebook.registry.history import list_versions
from lakebook.registry.publishing import Pointer, SnapshotRecord, snapshots_of
from lakebook.registry.schema import MAX_BIGINT
from lakebook.registry.tables import TableRecord, current_table
from lakebook.registry.transactions import NoEffect, Reader

_MAIN = "main"
_LAST_MS = to_ms(datetime.max.replace(tzinfo=UTC))
_LIST = "`lakebook tables snapshots` shows which there are"


@dataclass(frozen=True)
class Tag:
    """A state of a table that is kept under a name."""

    name: str
    snapshot_id: int
    #: The version that its snapshot stands for; none for a snapshot of a branch.
    version: int | None
    #: When its snapshot was made.
    snapshot_at: datetime
    #: When it goes by itself; none: it stays until it is removed.
    goes_at: datetime | None


class AlreadyKept(NoEffect):
    """Somebody else has dealt with these tags meanwhile."""


# --- by hand -------------------------------------------------------------------


def tag(
    lake: Lake,
    table: TableRecord,
    name: str,
    *,
    version: int | None = None,
    snapshot_id: int | None = None,
    keep_seconds: float | None = None,
) -> Tag:
    """Keep a state of a table under a name: the newest, that of a version, or a snapshot.

    With `keep_seconds` it goes after that time, counted from now. The same name on the same snapshot
    changes only how long it is kept.
    """
    _check_new_name(table, name)
    _check_keep(table, keep_seconds)
    _check_wanted(table, version, snapshot_id)
    refs, snapshots = _published(lake, table)
    wanted = _snapshot(lake, table, refs, snapshots, version, snapshot_id)
    new = _ref(lake, name, wanted, refs.snapshots[wanted], keep_seconds)

    def check(present: Refs) -> None:
        _require_listed(table, present, wanted)
        _require_free(table, present, new)

    check(refs)
    if refs.tags.get(name) != new:
        put_tag(CatalogParts(lake).committer, table, new, check)
    return _shown(new, snapshots)


def untag(lake: Lake, table: TableRecord, name: str) -> Tag:
    """Remove a tag; what only it kept goes with the table's next expiry. The tag as it was."""
    _require_format(table)
    check_name("tag", name)
    pointer = lake.publisher.pointer(table)
    if pointer is None:
        raise _not_found(table, name)
    refs = refs_at(lake.publisher, pointer)

    def check(present: Refs) -> None:
        if name not in present.tags:
            raise _not_found(table, name, is_branch=name in present.branches)

    check(refs)
    snapshots = lake.registry.read_with(lambda reader: snapshots_of(reader, table.id))
    drop_tags(CatalogParts(lake).committer, table, [name], check)
    return _shown(refs.tags[name], snapshots)


def tags(lake: Lake, table: TableRecord) -> list[Tag]:
    """The tags of a table, the one on the oldest snapshot first."""
    _require_format(table)
    pointer = lake.publisher.pointer(table)
    if pointer is None:
        return []
    refs = refs_at(lake.publisher, pointer)
    snapshots = lake.registry.read_with(lambda reader: snapshots_of(reader, table.id))
    found = sorted(refs.tags.values(), key=lambda ref: (ref.timestamp_ms, ref.name))
    return [_shown(ref, snapshots) for ref in found]


# --- by the snapshotter --------------------------------------------------------


def keep_snapshot(
    lake: Lake,
    table: TableRecord,
    kind: str,
    snapshot_id: int,
    keep_seconds: float | None,
    check: Callable[[Refs], None] = lambda refs: None,
) -> TagRef:
    """Put a tag of the snapshotter's own on a snapshot, which must not have one yet.

    `check` sees what the tag is put beside, whoever else was at work meanwhile; it may raise `AlreadyKept`.
    """
    pointer = lake.publisher.pointer(table)
    refs = None if pointer is None else refs_at(lake.publisher, pointer)
    if refs is None or snapshot_id not in refs.snapshots:
        raise AlreadyKept
    moment = lake.clock.now_ms()
    while own_name(kind, moment) in refs.tags:
        moment += 1
    new = _ref(lake, own_name(kind, moment), snapshot_id, refs.snapshots[snapshot_id], keep_seconds)

    def check_all(present: Refs) -> None:
        taken = new.name in present.tags or new.name in present.branches
        if taken or snapshot_id not in present.snapshots or present.is_kept(snapshot_id):
            raise AlreadyKept
        check(present)

    check_all(refs)
    put_tag(CatalogParts(lake).committer, table, new, check_all)
    return new


def let_go(lake: Lake, table: TableRecord, seen: Sequence[TagRef]) -> None:
    """Remove tags that are still as they were seen; if one is not, none goes and `AlreadyKept` is raised."""

    def check(present: Refs) -> None:
        if any(present.tags.get(ref.name) != ref for ref in seen):
            raise AlreadyKept

    drop_tags(CatalogParts(lake).committer, table, [ref.name for ref in seen], check)


# --- checks --------------------------------------------------------------------


def _check_new_name(table: TableRecord, name: str) -> None:
    _require_format(table)
    check_name("tag", name)
    if name == _MAIN:
        raise InvalidName("main is the name of the branch that every table has", on="tag", remedy="Choose another name")
    if name.startswith(OWN_PREFIX):
        raise InvalidName(
            f"{shown(name)} begins like the snapshotter's own tags, which it removes by itself",
            on="tag",
            remedy=f"Choose a name that does not begin with {OWN_PREFIX}",
        )


def _check_keep(table: TableRecord, keep_seconds: float | None) -> None:
    if keep_seconds is None:
        return
    is_number = isinstance(keep_seconds, (int, float)) and not isinstance(keep_seconds, bool)
    if not is_number or not 0.001 <= keep_seconds < MOST_SECONDS:
        raise InvalidInput(
            f"a tag cannot be kept for {shown(keep_seconds)} seconds", on=table.shown, remedy="Give a positive number"
        )


def _check_wanted(table: TableRecord, version: int | None, snapshot_id: int | None) -> None:
    if version is not None and snapshot_id is not None:
        raise InvalidInput("a version and a snapshot were given", on=table.shown, remedy="Give one of them")
    for what, number in (("version", version), ("snapshot", snapshot_id)):
        is_number = isinstance(number, int) and not isinstance(number, bool) and abs(number) <= MAX_BIGINT
        if number is not None and not is_number:
            raise InvalidInput(f"{shown(number)} is not a {what}", on=table.shown)


def _require_format(table: TableRecord) -> None:
    if table.format != "parquet":
        raise InvalidTable(
            f"a table of format {table.format} is not published as Iceberg, and has no tags",
            on=table.shown,
            remedy="Only tables of format parquet have",
        )


def _require_listed(table: TableRecord, refs: Refs, snapshot_id: int) -> None:
    if snapshot_id not in refs.snapshots:
        raise SnapshotNotFound(f"its metadata lists no snapshot {snapshot_id}", on=table.shown, remedy=_LIST)


def _require_free(table: TableRecord, refs: Refs, new: TagRef) -> None:
    """Refuse a name that is taken, unless it is by a tag on the same snapshot."""
    present = refs.tags.get(new.name)
    if new.name in refs.branches or (present is not None and present.snapshot_id != new.snapshot_id):
        what = "a branch" if present is None else f"a tag on snapshot {present.snapshot_id}"
        raise TagAlreadyExists(
            f"{what} has the name {new.name!r}", on=table.shown, remedy="Choose another name, or remove that one first"
        )


def _not_found(table: TableRecord, name: str, *, is_branch: bool = False) -> TagNotFound:
    what = f"{name!r} is a branch, and no tag" if is_branch else f"there is no tag {name!r}"
    return TagNotFound(what, on=table.shown, remedy="`lakebook tables tags` shows which there are")


# --- finding -------------------------------------------------------------------


def _published(lake: Lake, table: TableRecord) -> tuple[Refs, list[SnapshotRecord]]:
    """What a table is published as, with everything that is committed."""
    pointer: Pointer | None = lake.publish(table)
    assert pointer is not None
    return refs_at(lake.publisher, pointer), lake.registry.read_with(lambda reader: snapshots_of(reader, table.id))


def _snapshot(
    lake: Lake,
    table: TableRecord,
    refs: Refs,
    snapshots: Sequence[SnapshotRecord],
    version: int | None,
    snapshot_id: int | None,
) -> int:
    """The snapshot that is asked for."""
    if snapshot_id is not None:
        _require_listed(table, refs, snapshot_id)
        return snapshot_id
    if version is not None:
        return _of_version(lake, table, refs, snapshots, version)
    if refs.current is None:
        raise SnapshotNotFound("it has no snapshot yet", on=table.shown, remedy="Insert rows first")
    return refs.current


def _of_version(lake: Lake, table: TableRecord, refs: Refs, snapshots: Sequence[SnapshotRecord], version: int) -> int:
    """The snapshot that stands for exactly a version."""
    listed = {item.version: item.snapshot_id for item in snapshots if item.snapshot_id in refs.snapshots}
    if version in listed:
        return listed[version]

    def read(reader: Reader) -> str | None:
        found = list_versions(reader, table.id, version + 1, 1)
        return found[0].summary.get(SHOWN_BY) if found and found[0].version == version else None

    shown_by = lake.registry.read_with(read) if 0 <= version < MAX_BIGINT else None
    if shown_by is not None and shown_by.isdecimal() and int(shown_by) in refs.snapshots:
        return int(shown_by)
    newest = lake.registry.read_with(lambda reader: current_table(reader, table)).version
    if not 0 <= version <= newest:
        raise VersionNotFound(f"there is no version {version}; the newest is {newest}", on=table.shown)
    there = sorted(number for number in listed if number is not None)
    below = [number for number in there if number < version][-1:]
    near = [*below, *[number for number in there if number > version][:1]]
    raise SnapshotNotFound(
        f"no snapshot stands for exactly version {version}: several versions can be one snapshot",
        on=table.shown,
        remedy=f"Tag version {' or '.join(map(str, near))}" if near else _LIST,
    )


def _ref(lake: Lake, name: str, snapshot_id: int, timestamp_ms: int, keep_seconds: float | None) -> TagRef:
    if keep_seconds is None:
        return TagRef(name, snapshot_id, timestamp_ms)
    # Iceberg counts from the time of the snapshot, and whoever tags counts from now.
    age = lake.clock.now_ms() - timestamp_ms + round(keep_seconds * 1000)
    return TagRef(name, snapshot_id, timestamp_ms, max(1, age))


def _shown(ref: TagRef, snapshots: Sequence[SnapshotRecord]) -> Tag:
    version = next((item.version for item in snapshots if item.snapshot_id == ref.snapshot_id), None)
    # An engine may have given it an age beyond all times.
    goes = None if ref.goes_at is None or ref.goes_at > _LAST_MS else to_datetime(ref.goes_at)
    return Tag(ref.name, ref.snapshot_id, version, to_datetime(ref.timestamp_ms), goes)
