"""Tags: names that keep a snapshot of a table in its metadata.

A tag is put and removed by the one commit function that outside engines use. What must be true for
it is looked at in every attempt, on the very metadata that the attempt goes on from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.update import RemoveSnapshotRefUpdate, SetSnapshotRefUpdate, TableRequirement, TableUpdate

from lakebook.clock import to_datetime, to_ms
from lakebook.errors import CommitOutcomeUnknown, FilesChanged
from lakebook.iceberg.outside import Committer
from lakebook.iceberg.publishing import Publisher
from lakebook.registry.publishing import Pointer
from lakebook.registry.tables import TableRecord

#: The property that says whether a state that was loaded through a catalog gets a tag.
TAG_QUERIES = "lakebook.tag.queries"
#: Names of tags that begin with this are the snapshotter's own.
OWN_PREFIX = "lb-"
#: Why the snapshotter makes tags.
TIME, SIZE, QUERY = "time", "size", "query"

_OWN_NAME = re.compile(rf"{OWN_PREFIX}(?:{TIME}|{SIZE}|{QUERY})-(\d{{8}}T\d{{6}}\.\d{{3}})Z", re.ASCII)
_MOMENT = "%Y%m%dT%H%M%S"


@dataclass(frozen=True)
class TagRef:
    """A tag as the metadata has it."""

    name: str
    snapshot_id: int
    #: When its snapshot was made.
    timestamp_ms: int
    #: How old its snapshot may become before the tag goes; none: it stays.
    max_age_ms: int | None = None

    @property
    def goes_at(self) -> int | None:
        """After which time it is to go, as Iceberg counts: by the age of the snapshot."""
        return None if self.max_age_ms is None else self.timestamp_ms + self.max_age_ms

    @property
    def own_since(self) -> int | None:
        """When the snapshotter made it; none if it is not one of its own."""
        return made_at(self.name)


@dataclass(frozen=True)
class Refs:
    """What the metadata of a table names, and which snapshots it lists."""

    tags: Mapping[str, TagRef]
    branches: frozenset[str]
    #: The snapshots that a tag or a branch names.
    named: frozenset[int]
    #: When each snapshot was made.
    snapshots: Mapping[int, int]
    #: The newest of the branch `main`.
    current: int | None

    @property
    def own(self) -> list[TagRef]:
        """The snapshotter's own tags, the newest first."""
        return own_among(self.tags.values())

    def is_kept(self, snapshot_id: int) -> bool:
        """Whether the snapshotter has tagged a snapshot already."""
        return any(tag.snapshot_id == snapshot_id for tag in self.own)


def own_among(tags: Iterable[TagRef]) -> list[TagRef]:
    """Those of some tags that the snapshotter made, the newest first."""
    found = [tag for tag in tags if tag.own_since is not None]
    return sorted(found, key=lambda tag: (tag.own_since or 0, tag.name), reverse=True)


def own_name(kind: str, moment: int) -> str:
    """The name of a tag that the snapshotter makes: why, and when."""
    at = to_datetime(moment)
    return f"{OWN_PREFIX}{kind}-{at:{_MOMENT}}.{at.microsecond // 1000:03d}Z"


def made_at(name: str) -> int | None:
    """When the snapshotter made a tag, by its name; none if the name is not one that it gives."""
    found = _OWN_NAME.fullmatch(name)
    if found is None:
        return None
    whole, _, thousandths = found.group(1).partition(".")
    try:
        return to_ms(datetime.strptime(whole, _MOMENT).replace(tzinfo=UTC)) + int(thousandths)
    except ValueError:
        return None


def refs_in(metadata: TableMetadata) -> Refs:
    """The tags and branches of a table's metadata."""
    times = {snapshot.snapshot_id: snapshot.timestamp_ms for snapshot in metadata.snapshots}
    tags = {
        name: TagRef(name, ref.snapshot_id, times[ref.snapshot_id], ref.max_ref_age_ms)
        for name, ref in metadata.refs.items()
        if ref.snapshot_ref_type == SnapshotRefType.TAG and ref.snapshot_id in times
    }
    branches = frozenset(name for name, ref in metadata.refs.items() if ref.snapshot_ref_type == SnapshotRefType.BRANCH)
    named = frozenset(ref.snapshot_id for ref in metadata.refs.values())
    return Refs(tags, branches, named, times, metadata.current_snapshot_id)


def refs_at(publisher: Publisher, pointer: Pointer) -> Refs:
    """The tags and branches of what a table is published as."""
    return refs_in(publisher.load(pointer))


def queried(metadata: TableMetadata, default: str) -> int | None:
    """The snapshot that is to be kept because it is loaded through a catalog; none if none is."""
    if metadata.properties.get(TAG_QUERIES, default) != "yes" or metadata.current_snapshot_id is None:
        return None
    return None if refs_in(metadata).is_kept(metadata.current_snapshot_id) else metadata.current_snapshot_id


class _Demand:
    """A requirement of a commit, in the words of whoever commits; whatever it raises ends the commit."""

    def __init__(self, check: Callable[[Refs], None]) -> None:
        self._check = check

    def validate(self, base_metadata: TableMetadata) -> None:
        self._check(refs_in(base_metadata))


def put_tag(committer: Committer, table: TableRecord, tag: TagRef, check: Callable[[Refs], None]) -> None:
    """Put a tag on a snapshot, unless `check` raises; a tag of that name is changed."""
    values: dict[str, Any] = {"ref-name": tag.name, "type": SnapshotRefType.TAG, "snapshot-id": tag.snapshot_id}
    if tag.max_age_ms is not None:
        values["max-ref-age-ms"] = tag.max_age_ms
    _commit(committer, table, [SetSnapshotRefUpdate.model_validate(values)], check)


def drop_tags(committer: Committer, table: TableRecord, names: Sequence[str], check: Callable[[Refs], None]) -> None:
    """Remove tags, unless `check` raises."""
    _commit(committer, table, [RemoveSnapshotRefUpdate.model_validate({"ref-name": name}) for name in names], check)


def _commit(
    committer: Committer, table: TableRecord, updates: Sequence[TableUpdate], check: Callable[[Refs], None]
) -> None:
    demands = [cast("TableRequirement", _Demand(check))]
    with _own_words(table):
        # Nobody waits for a tag: the book's own writers are not held back for it.
        committer.commit(table, demands, updates, precedence=False)


@contextmanager
def _own_words(table: TableRecord) -> Iterator[None]:
    try:
        yield
    except CommitStateUnknownException as error:
        if isinstance(error.__cause__, CommitOutcomeUnknown):
            raise error.__cause__ from None
        raise
    except CommitFailedException as error:
        raise FilesChanged(
            f"its tags could not be changed ({error})", on=table.shown, remedy="Try again in a moment"
        ) from error
