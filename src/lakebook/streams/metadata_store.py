"""The metadata store: everything a stream's readers and writers ask of the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import orjson

from lakebook import failpoints
from lakebook.clock import Enough, never
from lakebook.errors import CommitAborted, InvalidInput, InvalidOffset, WatermarkMismatch
from lakebook.names import check_id, check_moment, check_name, check_path, check_text, shown
from lakebook.pages import PAGE_SIZE, Page, check_limit, every, page_of
from lakebook.registry import appends, groups, members, merges, mirrors, schema, segments, sinks, topic_leases, topics
from lakebook.registry.appends import APPEND, AppendResult, AppendTurn, check_footers
from lakebook.registry.changes import row_of
from lakebook.registry.commits import owner
from lakebook.registry.groups import ConsumerGroup, ConsumerOffset, OffsetCommit, OffsetReset, PartitionLag
from lakebook.registry.members import GroupMember, Membership
from lakebook.registry.offsets import MAX_OFFSET, check_offset
from lakebook.registry.partitions import (
    GET_PARTITION,
    GET_PARTITIONS,
    LIST_PARTITIONS,
    Partition,
    check_partition_id,
    locked_partition,
    no_partition,
    partition_from,
    partition_row,
)
from lakebook.registry.rates import TopicTraffic, topic_traffic
from lakebook.registry.registry import Registry
from lakebook.registry.schema import MAX_INTEGER
from lakebook.registry.segments import END_OFFSET, SegmentInfo, segment_from
from lakebook.registry.sinks import AppendResults
from lakebook.registry.stream_folders import (
    StreamFolder,
    batch_folder,
    merge_folder,
    open_folder,
    renew_folder,
    settle_folder,
    silent_folders,
)
from lakebook.registry.temporary_files import TemporaryFile, list_temporary_files
from lakebook.registry.topic_config import check_config, check_retention
from lakebook.registry.topics import GET_TOPIC, Topic, TopicConfig, topic_from
from lakebook.registry.transactions import Transaction, new_id
from lakebook.streams.cache import ReadCache

# Rows that one transaction moves when a topic or many segments are removed: few enough for
# the lock to be short, many enough for the work to be fast.
CHUNK = 1000
# Groups that one transaction forgets: each may have many offsets.
GROUPS_AT_ONCE = 20

_KEEP: Any = object()


class MetadataStore:
    """Topics, partitions, segments and consumer offsets of a book.

    Every method is safe to call from several threads and processes at once. Names of topics
    and groups are resolved at each call; a topic that was deleted and created anew is a new one.
    """

    def __init__(self, registry: Registry, warehouse: str) -> None:
        self._registry = registry
        self._settings = registry.settings
        self._warehouse = warehouse
        self._cache = ReadCache(registry)
        self._known_names: set[str] = set()

    def close(self) -> None:
        """Let go of what the store holds open."""
        self._cache.close()

    # --- topics ------------------------------------------------------------------

    def create_topic(
        self,
        topic: str | TopicConfig,
        partition_count: int = 1,
        *,
        retention_ms: int | None = None,
        config: Mapping[str, str] | None = None,
    ) -> Topic:
        """Create a topic with its partitions."""
        wanted = topic
        if not isinstance(wanted, TopicConfig):
            wanted = TopicConfig(wanted, partition_count, retention_ms, config or {})
        topics.check_topic(wanted, self._settings.max_partitions)
        return self._registry.write(lambda transaction: topics.create_topic(transaction, wanted))

    def delete_topic(self, name: str) -> None:
        """Hide a topic at once and hand its segments to `temporary_files`.

        Its name can be taken again as soon as it is hidden. If the process dies on the way,
        `purge_deleted_topics` does the rest.
        """
        check_name("topic", name)

        def hide(transaction: Transaction) -> int:
            hidden = topics.hide_topic(transaction, name)
            mirrors.drop_mirror(transaction, hidden)
            return hidden

        topic_id = self._registry.write(hide)
        self._cache.forget_topic(name)
        failpoints.reach("topic.hidden")
        self._purge(name, topic_id)

    def purge_deleted_topics(self, *, enough: Enough = never) -> int:
        """Finish deletions that a process left half-way; returns how many topics were emptied.

        `enough` is asked between two transactions whether to stop; the next call goes on.
        """
        purged = 0
        for topic_id, name in self._registry.all(topics.DELETED_TOPICS, CHUNK):
            if not self._purge(name, topic_id, enough):
                break
            purged += 1
        return purged

    def _purge(self, name: str, topic_id: int, enough: Enough = never) -> bool:
        """Empty a hidden topic; whether it is done."""

        def in_chunks(step: Callable[[Transaction], int]) -> bool:
            while self._registry.write(step):
                if enough():
                    return False
            return True

        def segments_of_one_partition(transaction: Transaction) -> int:
            row = transaction.one(segments.PARTITION_WITH_SEGMENTS, topic_id)
            if row is None:
                return 0
            segments.remove_segments_below(
                transaction, name, topic_id, row[0], MAX_OFFSET, grace=self._settings.temporary_file_grace, most=CHUNK
            )
            return 1  # Also if another process was faster: then it is asked for again.

        def what_refers_to_it(transaction: Transaction) -> int:
            return (
                groups.forget_offsets(transaction, topic_id, CHUNK)
                or members.forget_assignments(transaction, topic_id, CHUNK)
                or merges.forget_retired(transaction, topic_id, self._settings.temporary_file_grace, CHUNK)
            )

        def who_holds_it(transaction: Transaction) -> None:
            topic_leases.forget_topic_leases(transaction, topic_id)
            sinks.forget_sinks(transaction, topic_id)
            appends.forget_turns(transaction, topic_id)

        if not in_chunks(segments_of_one_partition) or not in_chunks(what_refers_to_it):
            return False
        self._registry.write(who_holds_it)
        if not in_chunks(lambda transaction: topics.forget_partitions(transaction, topic_id, CHUNK)):
            return False
        self._registry.write(lambda transaction: topics.forget_topic(transaction, topic_id))
        return True

    def get_topic(self, name: str) -> Topic | None:
        """A topic, or none if there is no live one of this name."""
        self._check_topic_name(name)
        if self._cache.enabled:
            return self._cache.topic(name)
        row = self._registry.one(GET_TOPIC, name)
        return None if row is None else topic_from(row)

    def get_topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Those of the named topics that there are."""
        wanted = [check_name("topic", name) for name in names]

        def work(reader: Any) -> dict[str, Topic]:
            return {row[1]: topic_from(row) for row in reader.all(topics.GET_TOPICS, reader.listed(wanted))}

        return self._registry.read_with(work)

    def list_topics(self, *, prefix: str = "", after: str | None = None, limit: int = PAGE_SIZE) -> Page[Topic]:
        """Topics in the order of their names."""
        check_limit(limit)
        if prefix not in ("", ".", ".."):
            check_name("topic", prefix)
        after = "" if after is None else check_name("topic", after)
        found = self._registry.read_with(lambda reader: topics.list_topics(reader, after, prefix, limit + 1))
        return page_of(found, limit, lambda topic: topic.name)

    def update_topic_config(
        self, name: str, config: Mapping[str, str | None] | None = None, *, retention_ms: int | None = _KEEP
    ) -> Topic:
        """Merge into a topic's configuration; a value of none removes its key."""
        check_name("topic", name)
        changes = dict(config) if isinstance(config, Mapping) else {}
        check_config(name, {} if config is None else config, removals=True)
        retention = None
        if retention_ms is not _KEEP:
            check_retention(name, retention_ms)
            retention = (retention_ms,)
        changed = self._registry.write(lambda transaction: topics.update_topic(transaction, name, changes, retention))
        self._cache.forget_topic(name)
        return changed

    def grow_topic(self, name: str, partition_count: int) -> Topic:
        """Give a topic more partitions. Those it has stay as they are."""
        check_name("topic", name)
        topics.check_partition_count(name, partition_count, self._settings.max_partitions)
        grown = self._registry.write(lambda transaction: topics.grow_topic(transaction, name, partition_count))
        self._cache.forget_topic(name)
        return grown

    # --- partitions --------------------------------------------------------------

    def get_partition(self, topic: str, partition_id: int) -> Partition | None:
        """A partition, or none if there is no such topic or no such partition."""
        self._check_topic_name(topic)
        if not isinstance(partition_id, int) or isinstance(partition_id, bool) or not 0 <= partition_id <= MAX_INTEGER:
            return None
        if self._cache.enabled:
            return self._cache.partition(topic, partition_id)
        row = self._registry.one(GET_PARTITION, topic, partition_id)
        return None if row is None else partition_from(row)

    def get_partitions(self, wanted: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Partition]:
        """Those of the (topic, partition) pairs that there are."""
        places = list(dict.fromkeys(wanted))
        for place in places:
            self._check_place(*place)
        rows = self._registry.all(GET_PARTITIONS, orjson.dumps(places).decode())
        found = {(row[0], row[1]): partition_from(row) for row in rows}
        return {place: found[place] for place in places if place in found}

    def list_partitions(self, topic: str, *, after: int | None = None, limit: int = PAGE_SIZE) -> Page[Partition]:
        """The partitions of a topic in order."""
        check_limit(limit)
        self._check_topic_name(topic)
        beyond = -1 if after is None else check_partition_id(topic, after)
        rows = self._registry.all(LIST_PARTITIONS, topic, beyond, limit + 1)
        if not rows and self._registry.one(GET_TOPIC, topic) is None:
            raise topics.not_found(topic)
        return page_of([partition_from(row) for row in rows], limit, lambda partition: partition.partition_id)

    def topic_traffic(self, topic: str) -> TopicTraffic:
        """A topic's partitions with what they hold and how fast it comes in, and the groups that read it."""
        check_name("topic", topic)
        now = self._registry.clock.now_ms()

        def work(reader: Any) -> TopicTraffic:
            row = reader.one(GET_TOPIC, topic)
            if row is None:
                raise topics.not_found(topic)
            return topic_traffic(reader, topic_from(row).id, now)

        return self._registry.in_snapshot(work)

    def update_high_watermark(self, topic: str, partition_id: int, offset: int) -> None:
        """Confirm a partition's high watermark. It moves only with the segments that are recorded."""
        self._check_place(topic, partition_id)
        check_offset(offset, f"{topic}/{partition_id}")
        partition = self._require_partition(topic, partition_id)
        if offset != partition.high_watermark:
            raise WatermarkMismatch(
                f"the high watermark is {partition.high_watermark}, not {offset}",
                on=f"{topic}/{partition_id}",
                remedy="Record segments with add_segment or append_segment; that moves it",
            )

    # --- segments ----------------------------------------------------------------

    def add_segment(self, segment: SegmentInfo) -> SegmentInfo:
        """Record a segment that begins at the high watermark, and move the watermark."""
        return self.add_segments([segment])[0]

    def add_segments(self, new: Sequence[SegmentInfo]) -> list[SegmentInfo]:
        """Record segments, of one partition or several, all in one transaction or none."""
        if not new:
            return []
        by_partition = self._grouped(new)
        segments.check_distinct(new)
        segments.check_without_producer(new)

        def work(transaction: Transaction, commit_id: str) -> list[SegmentInfo]:
            rows = {name: topics.share_topic(transaction, name) for name in sorted({name for name, _ in by_partition})}
            places = {
                place: partition_row(transaction, place[0], rows[place[0]]["id"], place[1]) for place in by_partition
            }
            transaction.lock(*(row["object_id"] for row in places.values()))
            recorded: list[SegmentInfo] = []
            for place, theirs in by_partition.items():
                # Read again under the lock; see `locked_partition`.
                current = locked_partition(transaction, place[0], rows[place[0]]["id"], place[1])
                recorded += segments.record_segments(
                    transaction, current, theirs, commit_id=commit_id, warehouse=self._warehouse
                )
            return recorded

        recorded = self._registry.write_opened(APPEND, work)
        for place in by_partition:
            self._cache.recheck_partition(*place)
        if len(by_partition) == 1:
            return recorded
        by_path = {segment.s3_key: segment for segment in recorded}
        return [by_path[segment.s3_key] for segment in new]

    def get_segments(
        self, topic: str, partition_id: int, *, from_offset: int = 0, after: int | None = None, limit: int = PAGE_SIZE
    ) -> Page[SegmentInfo]:
        """The segments of a partition in order, from the one that holds `from_offset` on."""
        check_limit(limit)
        self._check_place(topic, partition_id)
        check_offset(from_offset, f"{topic}/{partition_id}")
        if after is None:
            first = self.find_segment_for_offset(topic, partition_id, from_offset) if from_offset else None
            beyond = first.base_offset - 1 if first is not None else from_offset - 1
        else:
            beyond = check_offset(after, f"{topic}/{partition_id}")
        rows = self._registry.all(segments.LIST_SEGMENTS, topic, partition_id, beyond, limit + 1)
        if not rows:
            self._require_partition(topic, partition_id)
        return page_of([segment_from(row) for row in rows], limit, lambda segment: segment.base_offset)

    def each_segment(self, topic: str, partition_id: int) -> Iterator[SegmentInfo]:
        """All segments of a partition, fetched page by page."""
        return every(lambda after: self.get_segments(topic, partition_id, after=after))

    def find_segment_for_offset(self, topic: str, partition_id: int, offset: int) -> SegmentInfo | None:
        """The segment that holds an offset; none if it was removed or is not written yet."""
        if type(offset) is not int or not 0 <= offset <= MAX_OFFSET:
            check_offset(offset, f"{topic}/{partition_id}" if type(topic) is str else "segment")
        if type(topic) is not str or topic not in self._known_names or type(partition_id) is not int:
            self._check_place(topic, partition_id)
        if not 0 <= partition_id <= MAX_INTEGER:
            raise no_partition(topic, partition_id)
        cache = self._cache
        if cache.enabled:
            segment = cache.segment(topic, partition_id, offset)
            if segment is not None:
                return segment
        known = cache.known(topic, partition_id) if cache.enabled else None
        row = self._registry.one(segments.FIND_BY_OFFSET, topic, partition_id, offset)
        if row is not None and row[END_OFFSET] >= offset:
            segment = segment_from(row)
            if cache.enabled:
                cache.remember(segment, known)
            return segment
        self._require_partition(topic, partition_id)
        return None

    def find_segments_for_offsets(
        self, wanted: Iterable[tuple[str, int, int]]
    ) -> dict[tuple[str, int, int], SegmentInfo | None]:
        """The segment of each (topic, partition, offset), all from one state of the registry."""
        places = list(dict.fromkeys(wanted))
        for topic, partition_id, offset in places:
            self._check_place(topic, partition_id)
            check_offset(offset, f"{topic}/{partition_id}")
        rows = self._registry.all(segments.FIND_MANY, orjson.dumps(places).decode())
        found = {(row[2], row[0], row[1]): None if row[4] is None else segment_from(row[2:]) for row in rows}
        for place in places:
            if place not in found:
                self._require_partition(place[0], place[1])
        return {place: found.get(place) for place in places}

    def find_segment_for_timestamp(self, topic: str, partition_id: int, moment: datetime) -> SegmentInfo | None:
        """The first segment with a record at or after a time; none if all records are older."""
        self._check_place(topic, partition_id)
        check_moment(moment, f"{topic}/{partition_id}")
        found = self._registry.read_with(lambda reader: segments.find_by_timestamp(reader, topic, partition_id, moment))
        if found is None:
            self._require_partition(topic, partition_id)
        return found

    def delete_segments_before(self, topic: str, partition_id: int, offset: int) -> int:
        """Remove the segments that lie wholly before an offset; returns how many.

        The log start moves first, so that no reader is sent to a segment on its way out; a
        segment that holds the offset stays whole.
        """
        self._check_place(topic, partition_id)
        check_offset(offset, f"{topic}/{partition_id}")
        found: dict[str, Any] = {}

        def move(transaction: Transaction) -> None:
            found.update(topics.share_topic(transaction, topic))
            segments.move_log_start(transaction, found, partition_id, offset)

        self._registry.write(move)
        self._cache.recheck_partition(topic, partition_id)
        failpoints.reach("retention.log_start_moved")
        return self._remove_below_log_start(topic, found["id"], partition_id)

    def _remove_below_log_start(self, topic: str, topic_id: int, partition_id: int) -> int:
        removed = 0
        while True:
            number = self._registry.write(
                lambda transaction: segments.remove_segments_below(
                    transaction,
                    topic,
                    topic_id,
                    partition_id,
                    None,
                    grace=self._settings.temporary_file_grace,
                    most=CHUNK,
                )
            )
            removed += number
            if number < CHUNK:
                return removed

    # --- leases ------------------------------------------------------------------

    def pin_topic(
        self,
        topic: str,
        offsets: Mapping[int, int],
        *,
        lease_id: str | None = None,
        seconds: float | None = None,
        inherit: str | None = None,
    ) -> tuple[str, int]:
        """Pin partitions of a topic, each from an offset on; the lease's id and the topic's.

        With the id of a lease it is extended, renewed and never loosened. An offset below the
        log start is refused, unless that lease, or the one to `inherit` from, pins it already.
        """
        self._check_topic_name(topic)
        for number, offset in offsets.items():
            check_partition_id(topic, number)
            check_offset(offset, f"{topic}/{number}")
        lease = new_id() if lease_id is None else check_id("lease", lease_id)
        lasting = self._lasting(seconds, self._settings.lease_seconds, "lease")
        topic_id = self._registry.write(
            lambda transaction: topic_leases.take_topic_lease(
                transaction, topic, offsets, lease, lasting, inherit=inherit
            )
        )
        return lease, topic_id

    def renew_pins(self, lease_ids: Iterable[str], *, seconds: float | None = None) -> set[str]:
        """Renew leases; the ids of those that are still held. One that pins nothing is not."""
        wanted = sorted({check_id("lease", lease_id) for lease_id in lease_ids})
        lasting = self._lasting(seconds, self._settings.lease_seconds, "lease")
        return self._registry.write(lambda transaction: topic_leases.renew_topic_leases(transaction, wanted, lasting))

    def advance_pin(self, lease_id: str, offsets: Mapping[tuple[int, int], int]) -> set[tuple[int, int]]:
        """Let go of what lies before the offset of each (topic id, partition); a pin never moves back by this.

        Returns the places that the lease does not pin any more: they were lost.
        """
        check_id("lease", lease_id)
        for (topic_id, number), offset in offsets.items():
            check_offset(offset, f"topic {topic_id}/{number}")
        return self._registry.write(
            lambda transaction: topic_leases.advance_topic_lease(transaction, lease_id, offsets)
        )

    def unpin(self, lease_id: str, places: Iterable[tuple[int, int]] | None = None) -> None:
        """Let go of some (topic id, partition) pairs of a lease, or of the lease."""
        check_id("lease", lease_id)
        if places is None:
            self._registry.write(lambda transaction: topic_leases.end_topic_leases(transaction, [lease_id]))
            return
        some = set(places)
        self._registry.write(lambda transaction: topic_leases.drop_from_topic_lease(transaction, lease_id, some))

    def pinned_places(self, lease_id: str) -> dict[tuple[int, int], int]:
        """From which offset on a lease pins which (topic id, partition) pairs; nothing if it was lost."""
        check_id("lease", lease_id)
        return self._registry.read_with(lambda reader: topic_leases.pinned_places(reader, lease_id))

    def find_pinned_segment(self, topic_id: int, partition_id: int, offset: int) -> SegmentInfo | None:
        """The segment that holds an offset, also below the log start: for readers whose lease pins it."""
        check_offset(offset, f"topic {topic_id}/{partition_id}")
        row = self._registry.one(segments.FIND_PINNED, topic_id, partition_id, offset)
        if row is None or row[-1] is not None:
            self._require_live(topic_id)
            return None
        return segment_from(row[:-1]) if row[END_OFFSET] >= offset else None

    def list_segments_in(self, topic_id: int, partition_id: int, start: int, end: int) -> list[SegmentInfo]:
        """The segments that hold an offset from `start` to before `end`, in order, also below the log start.

        They are of one state of the registry, for readers whose lease pins them.
        """
        for offset in (start, end):
            check_offset(offset, f"topic {topic_id}/{partition_id}")
        rows = self._registry.all(segments.LIST_PINNED, topic_id, partition_id, start, end) if start < end else []
        if not rows or rows[0][-1] is not None:
            self._require_live(topic_id)
            return []
        return [segment_from(row[:-1]) for row in rows]

    def _require_live(self, topic_id: int) -> None:
        row = self._registry.one(topics.ANY_TOPIC, topic_id)
        topic = None if row is None else row_of(schema.topics, row)
        if topic is None or topic["deleted_at"] is not None:
            raise topics.not_found(topic_id if topic is None else topic["name"])

    # --- appending ---------------------------------------------------------------

    def register_producer(self, producer_id: str) -> int:
        """Begin a new epoch of a producer and return it; every older one is fenced from then on."""
        check_id("producer", producer_id)
        return self._registry.write(lambda transaction: appends.next_epoch(transaction, producer_id))

    def claim_append(
        self, topic: str, partition_id: int, *, holder: str | None = None, seconds: float | None = None
    ) -> AppendTurn:
        """Take a partition's append turn, for this process or for a named holder.

        A holder that claims again renews its own turn and fences what it had under way: two
        producers in one process need names of their own.
        """
        return self.claim_appends([(topic, partition_id)], holder=holder, seconds=seconds)[0]

    def claim_appends(
        self, places: Sequence[tuple[str, int]], *, holder: str | None = None, seconds: float | None = None
    ) -> list[AppendTurn]:
        """Take the append turns of several partitions, all or none."""
        for topic, partition_id in places:
            self._check_place(topic, partition_id)
        who = owner() if holder is None else check_id("holder", holder)
        lasting = self._turn_seconds(seconds)

        def work(transaction: Transaction) -> list[AppendTurn]:
            turns = {}
            for topic, partition_id in self._in_lock_order(transaction, places):
                turns[topic, partition_id] = appends.claim_turn(transaction, topic, partition_id, who, lasting)
            return [turns[place] for place in places]

        turns = self._registry.write(work)
        failpoints.reach("append.claimed")
        return turns

    def _in_lock_order(self, transaction: Transaction, places: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        rows = {name: topics.share_topic(transaction, name) for name in sorted({name for name, _ in places})}

        def object_id(place: tuple[str, int]) -> int:
            return int(partition_row(transaction, place[0], rows[place[0]]["id"], place[1])["object_id"])

        return sorted(set(places), key=object_id)

    def release_append(self, turn: AppendTurn) -> bool:
        """Give a turn back before its time; false if it had been lost."""
        return self._registry.write(lambda transaction: appends.release_turn(transaction, turn))

    def append_segment(
        self, turn: AppendTurn, segment: SegmentInfo, *, footers: Mapping[str, bytes] | None = None
    ) -> AppendResult:
        """Record a segment under an append turn; the result carries the turn for the next one."""
        return self.append_segments(turn, [segment], footers=footers)

    def append_segments(
        self, turn: AppendTurn, new: Sequence[SegmentInfo], *, footers: Mapping[str, bytes] | None = None
    ) -> AppendResult:
        """Record segments of the turn's partition, all in one transaction or none.

        `footers` are those of their Parquet files by path; these lie in the turn's folder. Repeating
        a call whose outcome is not known is harmless: what landed before is found by its ids or by
        the producer's sequence, and reported as a duplicate.
        """
        if not new:
            return AppendResult((), turn)
        if list(self._grouped(new)) != [(turn.topic, turn.partition_id)]:
            raise InvalidInput("the segments are not of the turn's partition", on=f"{turn.topic}/{turn.partition_id}")
        segments.check_distinct(new)
        appends.check_one_producer(new)
        check_footers(new, footers or {}, turn.folder)
        try:
            result = self._registry.write(
                lambda transaction: appends.append_segments(
                    transaction, turn, new, warehouse=self._warehouse, footers=footers or {}
                ),
                commit_id=turn.commit_id,
            )
        except appends.Landed as landed:
            return AppendResult(landed.segments, replace(turn, next_offset=landed.next_offset), duplicate=True)
        except CommitAborted as aborted:
            before = self._registry.in_snapshot(lambda reader: appends.landed_before(reader, turn, new))
            if before is None:
                raise appends.turn_lost(turn) from aborted
            return before
        self._cache.recheck_partition(turn.topic, turn.partition_id)
        return result

    def expire_turns(self, *, enough: Enough = never) -> int:
        """Release turns that ran out long ago and that nobody took over, so that their folders end; how many."""
        before = self._silent_since()
        released = 0
        while number := self._registry.write(lambda transaction: appends.expire_turns(transaction, before, CHUNK)):
            released += number
            if enough():
                break
        return released

    def _silent_since(self) -> int:
        return self._registry.clock.now_ms() - round(self._settings.insert_alive * 1000)

    # --- batches and merges ------------------------------------------------------

    def open_stream_folder(
        self, topic: str, kind: str, partition_id: int | None = None, *, silent: float = 0.0
    ) -> StreamFolder:
        """Open a folder and the commit that is its fence: `m` for a merge in a partition, `s` for a batch.

        `silent` is for how many seconds it may go unrenewed beyond the time that others may.
        """
        self._check_topic_name(topic)
        if (kind, partition_id is None) not in (("m", False), ("s", True)):
            raise InvalidInput(
                f"{shown(kind)} is not a kind of folder", on=topic, remedy="Use 'm' with a partition, or 's' without"
            )
        if partition_id is not None:
            check_partition_id(topic, partition_id)

        def work(transaction: Transaction) -> StreamFolder:
            row = topics.share_topic(transaction, topic)
            if partition_id is not None:
                partition_row(transaction, topic, row["id"], partition_id)
            return open_folder(transaction, row["id"], partition_id, silent)

        return self._registry.write(work)

    def renew_stream_folder(self, folder: StreamFolder) -> bool:
        """Say that a merge or a batch is still at work; false if it was given up. Else that is done by a sweep."""
        return self._registry.write(lambda transaction: renew_folder(transaction, folder))

    def end_stream_folder(self, folder: StreamFolder) -> None:
        """End a merge or a batch. If it has not been committed it never will be."""
        self._registry.write(lambda transaction: settle_folder(transaction, folder))

    def settle_stream_folders(self, *, enough: Enough = never) -> int:
        """End merges and batches that have been silent for long; how many."""
        before = self._silent_since()
        settled = 0
        while found := self._registry.read_with(lambda reader: silent_folders(reader, before, CHUNK)):
            for folder in found:
                self.end_stream_folder(folder)
                settled += 1
                if enough():
                    return settled
        return settled

    def append_batch(
        self,
        topic: str,
        appends: sinks.Appends,
        *,
        commit_id: str,
        footers: Mapping[str, bytes] | None = None,
        sink: str | None = None,
        batch_id: int | None = None,
    ) -> AppendResults:
        """Record segments of several partitions, each under its turn, all in one transaction or none.

        `commit_id` is that of the batch's folder. A sink's batches are numbered: one that landed before,
        by this call or another, is a duplicate and records nothing.
        """
        self._check_topic_name(topic)
        batch = sinks.sink_batch(sink, batch_id)
        every_one = self._check_batch(topic, appends)
        if footers:
            folders = [batch_folder(appends[0][0].topic_id, commit_id), *(turn.folder for turn, _ in appends)]
            check_footers(every_one, footers, *folders)
        try:
            result = self._registry.write(
                lambda transaction: sinks.append_batch(
                    transaction,
                    topic,
                    appends,
                    commit_id=commit_id,
                    warehouse=self._warehouse,
                    footers=footers or {},
                    batch=batch,
                ),
                commit_id=commit_id,
            )
        except sinks.BatchLanded:
            return AppendResults((), tuple(turn for turn, _ in appends), duplicate=True)
        except CommitAborted:
            before = self._registry.in_snapshot(
                lambda reader: sinks.landed_batch(reader, topic, appends, commit_id, batch)
            )
            if before is None:
                raise
            return before
        for turn, _ in appends:
            self._cache.recheck_partition(topic, turn.partition_id)
        return result

    def _check_batch(self, topic: str, new: sinks.Appends) -> list[SegmentInfo]:
        every_one = [segment for _, theirs in new for segment in theirs]
        for turn, theirs in new:
            if turn.topic != topic or list(self._grouped(theirs)) != [(topic, turn.partition_id)]:
                raise InvalidInput("the segments are not of the turn's partition", on=f"{topic}/{turn.partition_id}")
        if len({turn.partition_id for turn, _ in new}) != len(new):
            raise InvalidInput("a partition is named twice", on=f"topic {topic}")
        segments.check_distinct(every_one)
        segments.check_without_producer(every_one)
        return every_one

    def last_batch(self, topic: str, sink: str) -> int | None:
        """The last batch that a sink has appended to a topic; none if it has appended none."""
        self._check_topic_name(topic)
        check_id("sink", sink)
        return self._registry.read_with(lambda reader: sinks.last_batch(reader, topic, sink))

    def replace_segments(
        self,
        topic_id: int,
        partition_id: int,
        old: Sequence[SegmentInfo],
        new: SegmentInfo,
        *,
        commit_id: str,
        footers: Mapping[str, bytes] | None = None,
        then: merges.Then | None = None,
    ) -> SegmentInfo:
        """Replace segments that follow one another by one with the same offsets; the log stays as it is.

        `then` runs in the same transaction, with the partition's row. `MergeConflict` says that the segments
        are no longer all there; then nothing has changed.
        """
        self._grouped([new])
        merges.check_merge(old, new)
        if new.partition_id != partition_id:
            raise InvalidInput("the segments are of another partition", on=f"{new.topic}/{partition_id}")
        check_footers([new], footers or {}, merge_folder(topic_id, partition_id, commit_id))

        def follow(transaction: Transaction, partition: dict[str, Any]) -> None:
            if mirrors.mirror_of(transaction, topic_id) is not None:
                # Arrow and PyIceberg are loaded by who needs them.
                from lakebook.streams.mirroring import follow_merge

                follow_merge(transaction, topic_id, old, new, commit_id)
            if then is not None:
                then(transaction, partition)

        try:
            merged = self._registry.write(
                lambda transaction: merges.replace_segments(
                    transaction,
                    topic_id,
                    partition_id,
                    old,
                    new,
                    commit_id=commit_id,
                    warehouse=self._warehouse,
                    footers=footers or {},
                    then=follow,
                ),
                commit_id=commit_id,
            )
        except CommitAborted:
            before = self._registry.in_snapshot(
                lambda reader: merges.landed_merge(reader, topic_id, partition_id, new, commit_id)
            )
            if before is None:
                raise
            merged = before
        self._cache.recheck_partition(new.topic, partition_id)
        return merged

    def release_retired(self, *, enough: Enough = never) -> int:
        """Hand files of replaced segments that no lease needs any more to `temporary_files`; how many."""
        grace, released = self._settings.temporary_file_grace, 0
        now = self._registry.clock.now_ms()
        while number := self._registry.write(
            lambda transaction: merges.release_retired(transaction, now, grace, CHUNK)
        ):
            released += number
            if enough():
                break
        return released

    def _turn_seconds(self, seconds: float | None) -> float:
        return self._lasting(seconds, self._settings.append_turn, "turn")

    def _lasting(self, seconds: float | None, otherwise: float, on: str) -> float:
        lasting = otherwise if seconds is None else seconds
        if not isinstance(lasting, int | float) or isinstance(lasting, bool) or not 0 < lasting <= 86_400:
            raise InvalidInput(f"{shown(lasting)} is not a time for a {on}", on=on, remedy="Use up to a day")
        return lasting

    # --- consumer groups ---------------------------------------------------------

    def ensure_consumer_group(self, group_id: str) -> None:
        """Create a consumer group unless it exists."""
        check_name("group", group_id)
        if self._registry.one(groups.GROUP_ROW, group_id) is None:
            self._registry.write(lambda transaction: groups.locked_group(transaction, group_id, create=True))

    def begin_generation(self, group_id: str) -> int:
        """Begin a new generation of a group's members; commits have to carry it from then on."""
        check_name("group", group_id)
        return self._registry.write(lambda transaction: groups.begin_generation(transaction, group_id))

    def commit_offset(
        self,
        group_id: str,
        topic: str,
        partition_id: int,
        offset: int,
        metadata: str | None = None,
        *,
        generation: int | None = None,
        member: str | None = None,
    ) -> OffsetCommit:
        """Commit the next offset a group will read; the group is created if it is new."""
        commit = OffsetCommit(topic, partition_id, offset, metadata)
        return self.commit_offsets(group_id, [commit], generation=generation, member=member)[0]

    def commit_offsets(
        self,
        group_id: str,
        commits: Sequence[OffsetCommit],
        *,
        generation: int | None = None,
        member: str | None = None,
    ) -> list[OffsetCommit]:
        """Commit offsets on several partitions, all in one transaction or none.

        Where the group has members a commit carries their generation, and with `member` is
        accepted only on partitions that this one owns.
        """
        check_name("group", group_id)
        if member is not None:
            check_id("member", member)
        if generation is not None and (type(generation) is not int or generation < 0):
            raise InvalidInput(f"{shown(generation)} is not a generation", on=f"group {group_id}")
        for commit in commits:
            self._check_place(commit.topic, commit.partition_id)
            check_offset(commit.offset, f"group {group_id} on {commit.topic}/{commit.partition_id}")
            check_text("metadata", commit.metadata)
        return self._registry.write(
            lambda transaction: groups.commit_offsets(
                transaction, group_id, commits, generation, member, kept=self._settings.group_kept
            )
        )

    def get_committed_offset(self, group_id: str, topic: str, partition_id: int) -> int | None:
        """The next offset a group will read; none if it has committed nothing there."""
        self._check_place(topic, partition_id)
        self._check_known(group_id, "group")
        row = self._registry.one(groups.GET_COMMITTED, group_id, topic, partition_id)
        if row is None:
            self._require_partition(topic, partition_id)
            return None
        return int(row[0])

    def get_committed_offsets(
        self, group_id: str, places: Iterable[tuple[str, int]]
    ) -> dict[tuple[str, int], int | None]:
        """The committed offset on each (topic, partition), all from one state of the registry."""
        check_name("group", group_id)
        wanted = list(dict.fromkeys(places))
        for place in wanted:
            self._check_place(*place)
        rows = self._registry.all(groups.GET_MANY_COMMITTED, orjson.dumps(wanted).decode(), group_id)
        found: dict[tuple[str, int], int | None] = {(row[0], row[1]): row[2] for row in rows}
        for place in wanted:
            if place not in found:
                self._require_partition(*place)
        return {place: found.get(place) for place in wanted}

    def get_consumer_offsets(
        self, group_id: str, *, after: tuple[str, int] | None = None, limit: int = PAGE_SIZE
    ) -> Page[ConsumerOffset]:
        """All committed offsets of a group, in the order of topics and partitions."""
        check_limit(limit)
        check_name("group", group_id)
        topic, number = ("", -1) if after is None else after
        if after is not None:
            self._check_place(topic, number)
        rows = self._registry.all(groups.GET_OFFSETS, group_id, topic, number, limit + 1)
        if not rows and self._registry.one(groups.GROUP_ROW, group_id) is None:
            raise groups.no_group(group_id)
        found = [groups.offset_from(row) for row in rows]
        return page_of(found, limit, lambda offset: (offset.topic, offset.partition_id))

    def list_consumer_groups(self, *, after: str | None = None, limit: int = PAGE_SIZE) -> Page[ConsumerGroup]:
        """Consumer groups with their state, in the order of their names."""
        check_limit(limit)
        beyond = "" if after is None else check_name("group", after)
        rows = self._registry.all(groups.LIST_GROUPS, beyond, limit + 1)
        return page_of([groups.group_from(row) for row in rows], limit, lambda group: group.group_id)

    def lag(self, group_id: str, topic: str | None = None) -> list[PartitionLag]:
        """What a group has still to read: of one topic, or of all it has committed on.

        Records that retention removed do not count; a partition without a commit counts from
        its log start.
        """
        check_name("group", group_id)
        if topic is not None:
            self._check_topic_name(topic)
        rows = self._registry.all(groups.LAG, group_id, topic or "")
        if not rows:
            if self._registry.one(groups.GROUP_ROW, group_id) is None:
                raise groups.no_group(group_id)
            if topic is not None:
                raise topics.not_found(topic)
        return [groups.lag_from(row) for row in rows]

    def reset_offset(
        self,
        group_id: str,
        topic: str,
        partition_id: int | None = None,
        to: int | str | datetime = "earliest",
        *,
        reason: str | None = None,
    ) -> list[OffsetReset]:
        """Move a group's committed offset on purpose, on one partition or on all, and record it.

        `to` is 'earliest', 'latest', an offset, or a time: then it becomes the beginning of the
        first segment with a record at or after it, so that nothing newer is left out.
        `GroupInUse`: live members of the group read the topic, and would commit over it.
        """
        check_name("group", group_id)
        self._check_topic_name(topic)
        check_text("reason", reason)
        if isinstance(to, bool) or not (isinstance(to, int | datetime) or to in ("earliest", "latest")):
            raise InvalidOffset(
                f"{shown(to)} is not a place to reset to",
                on=f"group {group_id} on {topic}",
                remedy="Use 'earliest', 'latest', an offset or a time",
            )
        if isinstance(to, int):
            check_offset(to, f"group {group_id} on {topic}")
        numbers = [partition_id] if partition_id is not None else self._numbers(topic)
        for number in numbers:
            check_partition_id(topic, number)
        if isinstance(to, datetime):
            check_moment(to, f"group {group_id} on {topic}")

        def work(transaction: Transaction) -> list[OffsetReset]:
            row = topics.share_topic(transaction, topic)
            members.refuse_while_read(transaction, group_id, row)
            return [groups.reset_offset(transaction, group_id, row, number, to, reason) for number in numbers]

        return self._registry.write(work)

    def _numbers(self, topic: str) -> list[int]:
        return [p.partition_id for p in every(lambda after: self.list_partitions(topic, after=after))]

    def delete_consumer_group(self, group_id: str) -> None:
        """Delete a group with its offsets and members; a new one of that name inherits nothing."""
        check_name("group", group_id)
        self._registry.write(lambda transaction: groups.delete_group(transaction, group_id))

    def expire_groups(self, *, enough: Enough = never) -> int:
        """Forget groups that have had no members, commits or changes for the setting `group_kept`.

        `enough` is asked between two transactions whether to stop; the next call goes on.
        """
        expired = 0
        while number := self._registry.write(
            lambda transaction: groups.expire_groups(transaction, self._settings.group_kept, GROUPS_AT_ONCE)
        ):
            expired += number
            if enough():
                break
        return expired

    # --- members of groups -------------------------------------------------------

    def join_group(
        self, group_id: str, topics: Sequence[str], *, member_id: str | None = None, seconds: float | None = None
    ) -> Membership:
        """Become a member of a group that shares these topics' partitions among its members.

        The group is created if it is new. A member that joins again reads these topics from now on.
        """
        check_name("group", group_id)
        if isinstance(topics, str) or not topics:
            raise InvalidInput(
                f"{shown(topics)} is no list of topics", on=f"group {group_id}", remedy="Name at least one"
            )
        for topic in topics:
            self._check_topic_name(topic)
        member = new_id() if member_id is None else check_id("member", member_id)
        lasting = self._lasting(seconds, self._settings.group_session, "member")
        return self._registry.write(
            lambda transaction: members.join_group(transaction, group_id, topics, member, lasting)
        )

    def sync_group(
        self,
        group_id: str,
        member_id: str,
        *,
        released: Iterable[tuple[str, int]] = (),
        seconds: float | None = None,
    ) -> Membership:
        """Say that a member lives, hand over what it has released, and learn what it is to read.

        Whoever syncs sees to what has changed: members that are silent, topics that have grown
        or are gone. `MemberRemoved`: it was silent for too long itself, and has nothing any more.
        """
        check_name("group", group_id)
        check_id("member", member_id)
        places = frozenset(released)
        lasting = self._lasting(seconds, self._settings.group_session, "member")
        return self._registry.write(
            lambda transaction: members.sync_group(transaction, group_id, member_id, places, lasting)
        )

    def leave_group(self, group_id: str, member_id: str) -> None:
        """Leave a group; what the member owned passes on at once. One that is none any more may say so too."""
        check_name("group", group_id)
        check_id("member", member_id)
        self._registry.write(lambda transaction: members.leave_group(transaction, group_id, member_id))

    def group_members(self, group_id: str) -> list[GroupMember]:
        """The members of a group and what each of them owns, in the order of their ids."""
        check_name("group", group_id)
        found = self._registry.read_with(lambda reader: members.group_members(reader, group_id))
        if not found and self._registry.one(groups.GROUP_ROW, group_id) is None:
            raise groups.no_group(group_id)
        return found

    # --- files that wait ---------------------------------------------------------

    def list_temporary_files(self, *, after: str | None = None, limit: int = PAGE_SIZE) -> Page[TemporaryFile]:
        """Files of removed segments that wait for their removal, in the order of their paths."""
        check_limit(limit)
        beyond = "" if after is None else check_path(after)
        found = self._registry.read_with(lambda reader: list_temporary_files(reader, beyond, limit + 1))
        return page_of(found, limit, lambda file: file.file_path)

    # --- checks ------------------------------------------------------------------

    def _check_topic_name(self, name: str) -> None:
        self._check_known(name, "topic")

    def _check_known(self, name: str, kind: str) -> None:
        """Validate a name once: the regular expression costs as much as a cached look-up."""
        if type(name) is str and name in self._known_names:
            return
        check_name(kind, name)
        if len(self._known_names) >= 10_000:
            self._known_names.clear()
        self._known_names.add(name)

    def _check_place(self, topic: str, partition_id: int) -> None:
        self._check_topic_name(topic)
        check_partition_id(topic, partition_id)

    def _require_partition(self, topic: str, partition_id: int) -> Partition:
        row = self._registry.one(GET_PARTITION, topic, partition_id)
        if row is not None:
            return partition_from(row)
        if self._registry.one(GET_TOPIC, topic) is None:
            raise topics.not_found(topic)
        raise no_partition(topic, partition_id)

    def _grouped(self, new: Sequence[SegmentInfo]) -> dict[tuple[str, int], list[SegmentInfo]]:
        grouped: dict[tuple[str, int], list[SegmentInfo]] = {}
        for segment in new:
            segments.check_segment(segment, self._warehouse)
            place = (segment.topic, segment.partition_id)
            if type(place[0]) is not str or type(place[1]) is not int or place not in grouped:
                self._check_place(*place)
                grouped.setdefault(place, [])
            grouped[place].append(segment)
        return grouped
