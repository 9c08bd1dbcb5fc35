"""Which version each state of a table's `main` is, by its metadata files and by what a checkpoint knows.

Snapshots of this book say which versions they cover. A commit of an outside engine says nothing, and a change of the
schema alone has no snapshot; but every metadata file is named after the version it was written for, so that what it
has more than the one before it made the versions in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pyiceberg.table.metadata import TableMetadataV2
from pyiceberg.table.snapshots import Snapshot, SnapshotLogEntry

from lakebook.iceberg.publishing import MOST_VERSIONS, VERSIONS
from lakebook.names import MAX_COUNTED

_NAME = re.compile(r"(\d{5,15})-[0-9a-f-]{36}(?:-v(\d{1,18}))?\.(?:gz\.)?metadata\.json", re.ASCII)
_COVERED = re.compile(r"(?:(\d{1,15})-)?(\d{1,15})", re.ASCII)

Ids = tuple[int, int, int]


@dataclass(frozen=True)
class KnownVersions:
    """What is known already of a table's versions: those of a checkpoint."""

    #: The newest of them.
    newest: int = 0
    #: That of the metadata file which the checkpoint names.
    published: int | None = None
    #: Of snapshots of others by their ids: version, pinned version, whether this book made it.
    snapshots: Mapping[int, tuple[int | None, int, bool]] = field(default_factory=dict)
    #: By the ids of their commits.
    commits: Mapping[str, int] = field(default_factory=dict)
    #: Versions by which `main` went to a snapshot that was there before, or to none.
    jumps: Mapping[int, int | None] = field(default_factory=dict)
    #: Ids of schemas, and those of the newest schema, partition spec and sort order.
    schemas: frozenset[int] = frozenset()
    shape: Ids | None = None


@dataclass(frozen=True)
class State:
    """A version that a snapshot shows, or that is empty."""

    version: int
    snapshot_id: int | None
    at: int
    #: The oldest version that the snapshot covers.
    first: int
    #: Whether `main` went to what was there before, under the schema that it had.
    is_jump: bool = False


@dataclass(frozen=True)
class ShapeChange:
    """A version that changed the schema, the partition spec or the sort order, and the metadata that has them."""

    version: int
    schema_id: int
    metadata: TableMetadataV2


@dataclass
class Numbering:
    """The versions of a table."""

    version: int = 0
    states: list[State] = field(default_factory=list)
    shapes: list[ShapeChange] = field(default_factory=list)
    #: Snapshots that this book made.
    own: set[int] = field(default_factory=set)


def metadata_number(path: str) -> int | None:
    """The number of a metadata file of ours, by its name; none if it is none."""
    found = _NAME.fullmatch(path.rpartition("/")[2])
    return None if found is None else int(found.group(1))


def number_versions(chain: Sequence[tuple[str, TableMetadataV2]], known: KnownVersions) -> Numbering:
    """The versions of a table by its metadata files, each of which follows the one before it.

    If `known.published` is given, the first file is the one that the checkpoint names.
    """
    return _Numbers(chain, known).run()


def ids_of(metadata: TableMetadataV2) -> Ids:
    """By which a metadata file knows its schema, partition spec and sort order."""
    return metadata.current_schema_id, metadata.default_spec_id, metadata.default_sort_order_id


def _written_for(path: str) -> int | None:
    found = _NAME.fullmatch(path.rpartition("/")[2])
    return None if found is None or found.group(2) is None else int(found.group(2))


def _covered(snapshot: Snapshot | None) -> tuple[int, int] | None:
    """The versions that a snapshot says it covers."""
    summary = snapshot.summary if snapshot is not None else None
    said = summary.additional_properties.get(VERSIONS) if summary is not None else None
    found = None if said is None else _COVERED.fullmatch(str(said))
    if found is None:
        return None
    last = int(found.group(2))
    return (int(found.group(1)) if found.group(1) else last, last)


class _Numbers:
    """Walks through the metadata files of one table."""

    def __init__(self, chain: Sequence[tuple[str, TableMetadataV2]], known: KnownVersions) -> None:
        self._chain = chain
        self._known = known
        self._states: dict[int, State] = {}
        self._found = Numbering()

    def run(self) -> Numbering:
        path, first = self._chain[0]
        newest = self._chain[-1][1]
        times = {snapshot.snapshot_id: snapshot.timestamp_ms for snapshot in newest.snapshots}
        for ident, (version, _, _) in self._known.snapshots.items():
            if version is not None and ident in times:
                self._place(version, ident, times[ident])
        made = {version: ident for ident, (version, _, _) in self._known.snapshots.items()}
        for version, target in self._known.jumps.items():
            if made.get(version, target) != target:
                # Older releases believed what an outside engine had written into the summary of its own snapshot.
                continue
            self._place(version, target, times.get(target or 0, 0), is_jump=True)
        last = self._take_first(path, first)
        for (_, before), (path, after) in pairwise(self._chain):
            held = {snapshot.snapshot_id for snapshot in before.snapshots}
            new = [snapshot for snapshot in after.snapshots if snapshot.snapshot_id not in held]
            last = self._take_step(before, after, last, self._believed(path, after, new, last))
        self._found.version = last
        self._found.states = [
            state
            for _, state in sorted(self._states.items())
            if state.snapshot_id is None or state.snapshot_id in times
        ]
        return self._found

    def _believed(self, path: str, metadata: TableMetadataV2, new: Sequence[Snapshot], last: int) -> int | None:
        """The version that a file is named after; none if it does not say one, or if nothing in it justifies that.

        One step publishes so many versions at most. Where more lie between, as after a rebuild or where history has
        ended unpublished, the file's snapshots say which they cover. Of the first file there is nothing before it but
        its number, and those of all snapshots that have ever been.
        """
        version = _written_for(path)
        if version is None:
            return None
        claims = (covered[1] for snapshot in new if (covered := _covered(snapshot)) is not None)
        ever = (metadata_number(path) or 0) + metadata.last_sequence_number
        most = max([last, ever, *claims]) + MOST_VERSIONS + len(new) + len(metadata.schemas)
        return version if version <= min(most, MAX_COUNTED) else None

    def _place(
        self, version: int, snapshot_id: int | None, at: int, *, first: int | None = None, is_jump: bool = False
    ) -> None:
        self._states[version] = State(version, snapshot_id, at, version if first is None else first, is_jump)

    def _is_own(self, snapshot: Snapshot | None, above: int, most: int | None) -> tuple[int, int] | None:
        """The versions that a snapshot of this book covers; what others say there is believed within bounds only."""
        covered = _covered(snapshot)
        if snapshot is None or covered is None or snapshot.snapshot_id in self._known.snapshots:
            return None
        first, last = covered
        is_sane = above < first <= last <= first + MOST_VERSIONS and (most is None or last <= most)
        return covered if is_sane else None

    # --- the first file ----------------------------------------------------------------

    def _take_first(self, path: str, first: TableMetadataV2) -> int:
        published = self._known.published
        version = self._believed(path, first, first.snapshots, self._known.newest) if published is None else published
        for snapshot in first.snapshots:
            covered = self._is_own(snapshot, -1, version)
            if covered is not None:
                self._found.own.add(snapshot.snapshot_id)
                self._place(covered[1], snapshot.snapshot_id, snapshot.timestamp_ms, first=covered[0])
        if published is not None:
            return published
        is_told = version is not None
        if version is not None and metadata_number(path) == 0 and not self._found.own:
            # A table that began with snapshots of somebody else: they are of one version.
            if first.current_snapshot_id is not None:
                self._place(version, first.current_snapshot_id, first.last_updated_ms)
        else:
            version = self._count(first, version)
        return version if self._known.shape is None else self._take_earlier_shapes(first, version, is_told=is_told)

    def _take_earlier_shapes(self, first: TableMetadataV2, version: int, *, is_told: bool) -> int:
        """Changes of the schema between the checkpoint and the first file that is there; the file's version."""
        taken: list[tuple[int, int]] = []
        uses: dict[int | None, int] = {}
        for state in self._states.values():
            taken.append((state.first, state.version))
            snapshot = None if state.snapshot_id is None else first.snapshot_by_id(state.snapshot_id)
            if snapshot is not None and state.version > self._known.newest:
                uses[snapshot.schema_id] = min(state.first, uses.get(snapshot.schema_id, state.first))
        free = _free(self._known.newest + 1, version, taken)
        if not is_told and first.current_schema_id not in {*self._known.schemas, *uses}:
            # As in the files after it: what nothing uses came last.
            version = max(version, self._known.newest) + 1
            free.append(range(version, version + 1))
        self._take_shapes(set(), first, free, uses)
        return version

    def _count(self, first: TableMetadataV2, most: int | None) -> int:
        """Number what nothing tells of: one after the other, as far as that contradicts nothing."""
        numbers: dict[int, int] = {}
        for state in self._states.values():
            if state.snapshot_id is not None and not state.is_jump:
                numbers[state.snapshot_id] = state.version
        last, seen = 0, set[int]()
        for entry in _log(first):
            known = numbers.get(entry[0]) if entry[0] not in seen else None
            if known is not None:
                last = known
            elif last + 1 not in self._states and (most is None or last + 1 <= most):
                last += 1
                self._place(last, *entry, is_jump=entry[0] in seen)
            seen.add(entry[0])
        return max(self._states, default=0) if most is None else most

    # --- the files after it ------------------------------------------------------------

    def _take_step(self, before: TableMetadataV2, after: TableMetadataV2, last: int, version: int | None) -> int:
        former = set(_log(before))
        new = [entry for entry in _log(after) if entry not in former]
        held = {snapshot.snapshot_id for snapshot in before.snapshots}
        own = {
            ident: covered
            for ident, _ in new
            if ident not in held and (covered := self._is_own(after.snapshot_by_id(ident), last, version)) is not None
        }
        if own:
            return self._take_own(before, after, own, last, version)
        is_moved = before.current_snapshot_id != after.current_snapshot_id
        changes_shape = ids_of(before) != ids_of(after)
        if version is None:
            version = last + changes_shape + max(len(new), is_moved)
        if version <= last:
            # Tags, branches, properties, and for how long snapshots are kept: no version, whatever the log has.
            return last
        if not new and not is_moved:
            self._take_shapes(_schemas(before), after, [range(last + 1, version + 1)], {})
            return version
        if changes_shape:
            self._found.shapes.append(ShapeChange(last + 1, after.current_schema_id, after))
        self._take_outside(after, new, held, version, version - last - changes_shape)
        return version

    def _take_outside(
        self, after: TableMetadataV2, new: Sequence[tuple[int, int]], held: set[int], version: int, count: int
    ) -> None:
        """The last entries of the log are the versions of an outside commit, the newest of them where `main` stands."""
        head = after.current_snapshot_id
        if head is None:
            self._place(version, None, after.last_updated_ms, is_jump=True)
            return
        entries = [*new] if new and new[-1][0] == head else [*new, (head, after.last_updated_ms)]
        for number, (ident, at) in enumerate(reversed(entries[-count:] if count > 0 else ())):
            self._place(version - number, ident, at, is_jump=ident in held)

    def _take_own(
        self,
        before: TableMetadataV2,
        after: TableMetadataV2,
        own: Mapping[int, tuple[int, int]],
        last: int,
        version: int | None,
    ) -> int:
        uses: dict[int | None, int] = {}
        for ident, (first, end) in own.items():
            snapshot = after.snapshot_by_id(ident)
            assert snapshot is not None
            self._place(end, ident, snapshot.timestamp_ms, first=first)
            self._found.own.add(ident)
            uses[snapshot.schema_id] = min(first, uses.get(snapshot.schema_id, first))
        newest = max(end for _, end in own.values()) if version is None else version
        free = _free(max(last, self._known.newest) + 1, newest, own.values())
        if version is None and ids_of(after) != ids_of(before) and after.current_schema_id not in uses:
            # A file that does not say so: what nothing uses came last.
            newest += 1
            free.append(range(newest, newest + 1))
        self._take_shapes(_schemas(before), after, free, uses)
        return newest

    def _take_shapes(
        self, before: set[int], after: TableMetadataV2, free: Sequence[range], uses: Mapping[int | None, int]
    ) -> None:
        """Changes of the schema that this book has published: each made one of the versions that no snapshot has."""
        known = self._known
        present = before | known.schemas
        left = _above(free, known.newest)
        new = [schema.schema_id for schema in after.schemas if schema.schema_id not in present]
        shapes = self._found.shapes
        former = ids_of(shapes[-1].metadata) if shapes else known.shape
        if former is not None and ids_of(after) != former and (not new or new[-1] != after.current_schema_id) and left:
            new.append(after.current_schema_id)
        if not uses:
            # An outside engine can make several schemas in one commit, and only the last one becomes the table's.
            new = new[max(0, len(new) - sum(map(len, left))) :]
        exact = sum(map(len, left)) == len(new)
        for schema_id in new:
            used = uses.get(schema_id)
            earlier = [min(some.stop, used) - 1 for some in left if some.start < used] if used is not None else []
            version = left[0].start if exact else earlier[-1] if earlier else (used or (left[0].start if left else 0))
            if version:
                left = _above(left, version)
                self._found.shapes.append(ShapeChange(version, schema_id, after))


def _free(first: int, last: int, taken: Iterable[tuple[int, int]]) -> list[range]:
    """The numbers from one to another that nothing has taken. As ranges: whoever writes files can name any number."""
    found: list[range] = []
    for start, end in sorted(taken):
        found.append(range(first, min(start, last + 1)))
        first = max(first, end + 1)
    return [some for some in (*found, range(first, last + 1)) if some]


def _above(free: Iterable[range], least: int) -> list[range]:
    """Those that are larger than a number."""
    return [some for item in free if (some := range(max(item.start, least + 1), item.stop))]


def _schemas(metadata: TableMetadataV2) -> set[int]:
    return {schema.schema_id for schema in metadata.schemas}


def _log(metadata: TableMetadataV2) -> list[tuple[int, int]]:
    """Where `main` has stood, and since when."""
    entries: Sequence[SnapshotLogEntry] = metadata.snapshot_log
    found = [(entry.snapshot_id, entry.timestamp_ms) for entry in entries]
    current = metadata.current_snapshot()
    if current is not None and (not found or found[-1][0] != current.snapshot_id):
        found.append((current.snapshot_id, current.timestamp_ms))
    return found
