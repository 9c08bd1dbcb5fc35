"""What a rebuild found, what it brought back, and what could not be known."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class Left:
    """An object that was left alone, and why."""

    path: str
    size: int
    why: str


@dataclass(frozen=True)
class Hole:
    """Offsets of a partition that no segment has: readers skip them and say so."""

    topic: str
    partition: int
    first: int
    last: int
    why: str


@dataclass(frozen=True)
class Contested:
    """Files that claim the same place, none of which could be proven. None was taken."""

    on: str
    paths: tuple[str, ...]
    why: str
    first: int | None = None
    last: int | None = None


@dataclass(frozen=True)
class RebuiltTable:
    """A table that came back."""

    name: str
    version: int
    rows: int
    files: int
    #: The oldest version that can be read.
    oldest: int
    snapshots: int = 0
    #: Versions between the oldest and the newest that cannot be read any more.
    lost_versions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RebuiltTopic:
    """A topic that came back."""

    name: str
    partitions: int
    segments: int
    records: int


@dataclass(frozen=True)
class MarkedView:
    """A view whose sources did not come back as they were at the checkpoint."""

    name: str
    #: Ranges that are stale for that, and ranges that are frozen for it.
    stale: int
    frozen: int
    #: What is to be said of its sources.
    why: tuple[str, ...]


@dataclass
class RebuildReport:
    """Everything that there is to say of a rebuild."""

    registry: str
    warehouse: str
    book_id: str = ""
    epoch: str = ""
    #: The checkpoint that was begun from; none: there was none that can be read.
    checkpoint: str | None = None
    checkpoint_at: datetime | None = None
    #: Checkpoints that cannot be read, and why.
    torn_checkpoints: list[tuple[str, str]] = field(default_factory=list)
    objects: int = 0
    tables: list[RebuiltTable] = field(default_factory=list)
    topics: list[RebuiltTopic] = field(default_factory=list)
    groups: int = 0
    pipelines: int = 0
    views: int = 0
    #: Views that are not as fresh as they were.
    marked_views: list[MarkedView] = field(default_factory=list)
    #: What was taken on its own word: newer than the checkpoint, and nothing contradicts it.
    unproven: list[str] = field(default_factory=list)
    #: What could not be known.
    unknown: list[str] = field(default_factory=list)
    holes: list[Hole] = field(default_factory=list)
    contested: list[Contested] = field(default_factory=list)
    #: Objects that nothing could place. They were left alone.
    left: list[Left] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether everything came back that the warehouse was known to hold up to the checkpoint."""
        return not (self.unknown or self.holes or self.contested or self.torn_checkpoints)
