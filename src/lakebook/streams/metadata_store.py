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
from lakebook.registry import appends, groups, segments, topics
from lakebook.registry.appends import APPEND, AppendResult, AppendTurn
from lakebook.registry.commits import owner
from lakebook.registry.groups import ConsumerGroup, ConsumerOffset, OffsetCommit, OffsetReset, PartitionLag
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
from lakebook.registry.registry import Registry
from lakebook.registry.schema import MAX_INTEGER
from lakebook.registry.segments import END_OFFSET, SegmentInfo, segment_from
from lakebook.registry.temporary_files import TemporaryFile, list_temporary_files
from lakebook.registry.topic_config import check_config, check_retention
from lakebook.registry.topics import GET_TOPIC, Topic, TopicConfig, topic_from
from lakebook.registry.transactions import Transaction
from lakebook.streams.cache import ReadCache

# Rows that one transaction moves when a topic or many segments are removed: few enough for
# the lock to be short, many enough for the work to be fast.
CHUNK = 1000

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
        topic_id = self._registry.write(lambda transaction: topics.hide_topic(transaction, name))
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

        if not in_chunks(segments_of_one_partition):
            return False
        if not in_chunks(lambda transaction: groups.forget_offsets(transaction, topic_id, CHUNK)):
            return False
        self._registry.write(lambda transaction: appends.forget_turns(transaction, topic_id))
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

    def append_segment(self, turn: AppendTurn, segment: SegmentInfo) -> AppendResult:
        """Record a segment under an append turn; the result carries the turn for the next one."""
        return self.append_segments(turn, [segment])

    def append_segments(self, turn: AppendTurn, new: Sequence[SegmentInfo]) -> AppendResult:
        """Record segments of the turn's partition, all in one transaction or none.

        Repeating a call whose outcome is not known is harmless: what landed before is found
        by its ids or by the producer's sequence, and reported as a duplicate.
        """
        if not new:
            return AppendResult((), turn)
        if list(self._grouped(new)) != [(turn.topic, turn.partition_id)]:
            raise InvalidInput("the segments are not of the turn's partition", on=f"{turn.topic}/{turn.partition_id}")
        segments.check_distinct(new)
        appends.check_one_producer(new)
        try:
            result = self._registry.write(
                lambda transaction: appends.append_segments(transaction, turn, new, warehouse=self._warehouse),
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

    def _turn_seconds(self, seconds: float | None) -> float:
        lasting = self._settings.append_turn if seconds is None else seconds
        if not isinstance(lasting, int | float) or isinstance(lasting, bool) or not 0 < lasting <= 86_400:
            raise InvalidInput(f"{shown(lasting)} is not a time for a turn", on="turn", remedy="Use up to a day")
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
    ) -> OffsetCommit:
        """Commit the next offset a group will read; the group is created if it is new."""
        commit = OffsetCommit(topic, partition_id, offset, metadata)
        return self.commit_offsets(group_id, [commit], generation=generation)[0]

    def commit_offsets(
        self, group_id: str, commits: Sequence[OffsetCommit], *, generation: int | None = None
    ) -> list[OffsetCommit]:
        """Commit offsets on several partitions, all in one transaction or none."""
        check_name("group", group_id)
        if generation is not None and (type(generation) is not int or generation < 0):
            raise InvalidInput(f"{shown(generation)} is not a generation", on=f"group {group_id}")
        for commit in commits:
            self._check_place(commit.topic, commit.partition_id)
            check_offset(commit.offset, f"group {group_id} on {commit.topic}/{commit.partition_id}")
            check_text("metadata", commit.metadata)
        return self._registry.write(
            lambda transaction: groups.commit_offsets(transaction, group_id, commits, generation)
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
            return [groups.reset_offset(transaction, group_id, row, number, to, reason) for number in numbers]

        return self._registry.write(work)

    def _numbers(self, topic: str) -> list[int]:
        return [p.partition_id for p in every(lambda after: self.list_partitions(topic, after=after))]

    def delete_consumer_group(self, group_id: str) -> None:
        """Delete a group with its offsets; a new one of that name inherits nothing."""
        check_name("group", group_id)
        self._registry.write(lambda transaction: groups.delete_group(transaction, group_id))

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
