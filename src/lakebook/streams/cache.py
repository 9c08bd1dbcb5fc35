"""The read cache: topics, partitions and the segment index, never older than its staleness.

An entry may answer without asking the registry for `cache_staleness` seconds. After that,
on SQLite, a probe that costs less than a look-up tells whether anything at all was
committed since; on PostgreSQL the partition's row is read again. Segments come and go, by
appends, retention and merges, only together with a change of their partition's row: while
that is the same, the remembered ones count. Only what was found is remembered: "there is
none" always comes from the registry.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from lakebook import forks
from lakebook.registry.partitions import WATCH_PARTITION, Partition, partition_from
from lakebook.registry.registry import Registry
from lakebook.registry.segments import SegmentInfo
from lakebook.registry.topics import GET_TOPIC, Topic, topic_from

_MOST_ENTRIES = 10_000


@dataclass(slots=True)
class _TopicEntry:
    topic: Topic
    token: Hashable
    checked_at: float


@dataclass(slots=True)
class _PartitionEntry:
    partition: Partition
    #: Which topic it is of, and when its row was changed last.
    state: tuple[int, int]
    token: Hashable
    checked_at: float
    #: Base offsets, sorted, and the segment of each. Entries are added to the dictionary first, so
    #: that a reader without the lock that finds a base finds its segment too.
    bases: list[int] = field(default_factory=list)
    segments: dict[int, SegmentInfo] = field(default_factory=dict)


class ReadCache:
    """Remembers what the registry said, for as long as that may be relied on."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._clock = registry.clock
        self._count = registry.metrics.hot
        self._staleness = registry.settings.cache_staleness
        self._most_segments = registry.settings.cache_segments
        self._probe = registry.database.changes() if self._most_segments else None
        self.enabled = self._most_segments > 0 and (self._staleness > 0 or self._probe is not None)
        self._lock = threading.Lock()
        self._topics: dict[str, _TopicEntry] = {}
        self._partitions: dict[tuple[str, int], _PartitionEntry] = {}
        self._segments = 0
        forks.watch(self)

    def close(self) -> None:
        """Answer nothing any more, and let go of the probe's connection."""
        self.enabled = False
        if self._probe is not None:
            self._probe.close()

    def after_fork_in_child(self) -> None:
        """Start empty: a thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self._topics, self._partitions, self._segments = {}, {}, 0

    # --- answering ---------------------------------------------------------------

    def topic(self, name: str) -> Topic | None:
        """A live topic, or none."""
        entry = self._topics.get(name)
        if entry is not None and self._is_fresh(entry):
            self._count.cache_hits += 1
            # A copy of the configuration: whoever changes what was handed out changes nothing here.
            return replace(entry.topic, config=dict(entry.topic.config))
        self._count.cache_misses += 1
        token = self._token()
        checked_at = self._clock.monotonic()
        row = self._registry.one(GET_TOPIC, name)
        with self._lock:
            if row is None:
                self._topics.pop(name, None)
                return None
            if len(self._topics) >= _MOST_ENTRIES:
                self._topics.clear()
            self._topics[name] = _TopicEntry(topic_from(row), token, checked_at)
        return topic_from(row)

    def partition(self, name: str, number: int) -> Partition | None:
        """A partition of a live topic, or none."""
        entry = self._partition_entry(name, number)
        return None if entry is None else entry.partition

    def segment(self, name: str, number: int, offset: int) -> SegmentInfo | None:
        """A remembered segment that holds the offset; none says only that it is not remembered."""
        entry = self._partition_entry(name, number)
        if entry is None:
            return None
        bases = entry.bases
        place = bisect_right(bases, offset)
        if place:
            segment = entry.segments.get(bases[place - 1])
            if segment is not None and segment.end_offset >= offset:
                return segment
        return None

    def _partition_entry(self, name: str, number: int) -> _PartitionEntry | None:
        entry = self._partitions.get((name, number))
        if entry is not None and self._is_fresh(entry):
            self._count.cache_hits += 1
            return entry
        self._count.cache_misses += 1
        token = self._token()
        checked_at = self._clock.monotonic()
        row = self._registry.one(WATCH_PARTITION, name, number)
        with self._lock:
            if row is None:
                self._drop((name, number))
                return None
            return self._renew((name, number), partition_from(row[:-1]), row[-1], token, checked_at)

    def _renew(
        self, key: tuple[str, int], partition: Partition, changed: int, token: Hashable, checked_at: float
    ) -> _PartitionEntry:
        """Replace an entry by one that keeps the segments if they still count."""
        former = self._partitions.get(key)
        if former is None and len(self._partitions) >= _MOST_ENTRIES:
            self._partitions.clear()
            self._segments = 0
        entry = _PartitionEntry(partition, (partition.topic_id, changed), token, checked_at)
        if former is not None and former.state == entry.state:
            entry.bases, entry.segments = former.bases, former.segments
        self._segments += len(entry.bases) - (len(former.bases) if former is not None else 0)
        self._partitions[key] = entry
        return entry

    def _token(self) -> Hashable:
        return self._probe.token() if self._probe is not None else None

    def _is_fresh(self, entry: _TopicEntry | _PartitionEntry) -> bool:
        now = 0.0
        if self._staleness:
            now = self._clock.monotonic()
            if now - entry.checked_at <= self._staleness:
                return True
        if self._probe is None or entry.token != self._probe.token():
            return False
        entry.checked_at = now  # Nothing was committed up to the probe, which came after this reading.
        return True

    # --- learning and forgetting -------------------------------------------------

    def known(self, name: str, number: int) -> tuple[int, int] | None:
        """The state of a partition that is remembered; to be asked before the registry is."""
        entry = self._partitions.get((name, number))
        return None if entry is None else entry.state

    def remember(self, segment: SegmentInfo, state: tuple[int, int] | None) -> None:
        """Keep a segment that the registry has returned, unless its partition changed meanwhile.

        `state` is what `known` said before: another thread may have learned since that the topic is a
        new one of that name, that the log start has passed the segment, or that it was merged.
        """
        key = (segment.topic, segment.partition_id)
        with self._lock:
            if self._segments >= self._most_segments:
                for entry in self._partitions.values():
                    entry.bases, entry.segments = [], {}
                self._segments = 0
            found = self._partitions.get(key)
            if found is None or segment.base_offset in found.segments:
                return
            if found.state != state or segment.base_offset < found.partition.log_start:
                return
            found.segments[segment.base_offset] = segment
            insort(found.bases, segment.base_offset)
            self._segments += 1

    def forget_topic(self, name: str) -> None:
        """This process has changed a topic: nothing remembered of it may answer."""
        with self._lock:
            self._topics.pop(name, None)
            for key in [key for key in self._partitions if key[0] == name]:
                self._drop(key)

    def recheck_partition(self, name: str, number: int) -> None:
        """This process has changed a partition: ask before answering again."""
        entry = self._partitions.get((name, number))
        if entry is not None:
            entry.token, entry.checked_at = None, float("-inf")

    def _drop(self, key: tuple[str, int]) -> None:
        entry = self._partitions.pop(key, None)
        if entry is not None:
            self._segments -= len(entry.bases)
