"""The registry's workload: filling a partition, then looking up and adding, each beside the bare driver."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from statistics import median
from time import monotonic
from typing import Any

from bench.measure import Effort, Side, compare, latencies, timed
from bench.places import Place
from bench.plans import plans, unindexed
from bench.report import Result
from lakebook import Book, SegmentInfo
from lakebook.clock import to_ms
from lakebook.registry import groups, partitions, schema, segments, topics
from lakebook.registry.statements import POSTGRESQL, SQLITE, Statement, bind, insert_into
from lakebook.registry.transactions import new_id

TOPIC, GROUP = "orders", "readers"
BATCH = 10_000
HOT = 1_000
PAGE = 100
#: Other topics and groups, so that the tables beside `segments` have rows too.
OTHERS = 1_000
RECORDS = 10
#: Seconds for filling the read cache before it is measured.
WARMING = 60
REMOVED = 5
_FIRST_TIME = datetime(2025, 1, 1, tzinfo=UTC)

Progress = Callable[[str, int, int], None]

#: The best that can be asked of PostgreSQL: inside the lateral query the partition is a constant,
#: so the order comes from the index and the limit ends the walk along it.
_LATERAL = """
SELECT t.name, s.partition_id, s.base_offset, s.end_offset, s.record_count, s.size_bytes, s.s3_key, s.id,
       s.s3_bucket, s.created_at, s.min_timestamp, s.max_timestamp, s.checksum, s.producer_id,
       s.producer_epoch, s.first_sequence, s.last_sequence
FROM topics t JOIN partitions p ON p.topic_id = t.id
CROSS JOIN LATERAL (
    SELECT * FROM segments
    WHERE topic_id = p.topic_id AND partition_id = p.partition_id AND base_offset >= p.log_start AND {}
) s
WHERE t.name = %s AND t.deleted_at IS NULL AND p.partition_id = %s
"""
_BEST_FIND = _LATERAL.format("base_offset <= %s ORDER BY base_offset DESC LIMIT 1")
_BEST_PAGE = _LATERAL.format("base_offset > %s ORDER BY base_offset LIMIT %s") + " ORDER BY s.base_offset"

_INSERT_SEGMENT = insert_into(schema.segments)
_p = schema.partitions.c
_MOVE_WATERMARK = Statement(
    schema.partitions.update()
    .where(_p.topic_id == bind("topic_id"), _p.partition_id == bind("number"))
    .values(high_watermark=bind("offset"), updated_at=bind("now")),
    "offset",
    "now",
    "topic_id",
    "number",
)
_UPSERT_OFFSET = Statement(
    "INSERT INTO consumer_offsets"
    " (consumer_group_id, topic_id, partition_id, committed_offset, metadata, committed_at)"
    " VALUES (:of_group, :of_topic, :number, :offset, NULL, :now)"
    " ON CONFLICT (consumer_group_id, topic_id, partition_id)"
    " DO UPDATE SET committed_offset = excluded.committed_offset, committed_at = excluded.committed_at",
    "of_group",
    "of_topic",
    "number",
    "offset",
    "now",
)


@dataclass
class Workload:
    """A book with so many segments in one partition, its copy, and what is measured on them."""

    place: Place
    effort: Effort
    quick: bool
    random: random.Random = field(default_factory=lambda: random.Random(7))
    watermark: int = 0
    copy_watermark: int = 0
    others: int = OTHERS
    plans: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.book = self.place.open(cache_segments=0)
        self.bare = self.place.connect()
        with self.place.open_copy() as copy:
            self._create_topic(copy)
        self.copy = self.place.connect(copy=True)
        self.topic_id = self._create_topic(self.book)
        row = self.bare.execute("SELECT id FROM consumer_groups").fetchone()
        self.group_id = int(row[0])
        self.others = 100 if self.quick else OTHERS

    @staticmethod
    def _create_topic(book: Book) -> int:
        topic = book.metadata.create_topic(TOPIC)
        book.metadata.commit_offset(GROUP, TOPIC, 0, 0)
        return topic.id

    # --- filling -----------------------------------------------------------------

    def fill(self, progress: Progress) -> Iterator[Result]:
        """Record the segments through the library, and the same rows with the driver into the copy."""
        ours, peer, rows = [], [], []
        while self.watermark < self.place.size * RECORDS:
            number = min(BATCH, self.place.size - self.watermark // RECORDS)
            new = self._next_segments(number)
            taken, recorded = timed(partial(self.book.metadata.add_segments, new))
            ours.append(taken)
            peer.append(timed(partial(self._insert_bare, [self._row(segment) for segment in recorded]))[0])
            rows.append(number)
            self.copy_watermark = self.watermark
            progress("segments", self.watermark // RECORDS, self.place.size)
        self._fill_the_rest(progress)
        if self.place.size >= BATCH:
            name = f"add_segments, {BATCH:,} at a time"
            yield self._result(
                name,
                1 / median(s / n for s, n in zip(ours, rows, strict=True)),
                1 / median(s / n for s, n in zip(peer, rows, strict=True)),
                unit="rows/s",
                at_least=0.4,
                promised=50_000 if self.place.kind == SQLITE else None,
            )
            yield self._result(f"{name}, whole fill", sum(rows) / sum(ours), sum(rows) / sum(peer), unit="rows/s")

    def _next_segments(self, number: int) -> list[SegmentInfo]:
        first = self.watermark
        self.watermark += number * RECORDS
        return [_segment(base) for base in range(first, self.watermark, RECORDS)]

    def _row(self, segment: SegmentInfo) -> tuple[Any, ...]:
        assert segment.created_at and segment.min_timestamp and segment.max_timestamp
        newest = to_ms(segment.max_timestamp)
        return (
            segment.id,
            self.topic_id,
            segment.partition_id,
            segment.base_offset,
            segment.end_offset,
            segment.record_count,
            segment.size_bytes,
            segment.s3_bucket,
            segment.s3_key,
            segment.checksum,
            to_ms(segment.min_timestamp),
            newest,
            newest,
            self.book.identity.epoch,  # Stands for the commit's id, which is as long.
            None,
            None,
            None,
            None,
            to_ms(segment.created_at),
        )

    def _insert_bare(self, rows: Sequence[tuple[Any, ...]]) -> None:
        self.copy.execute("BEGIN")
        self.copy.cursor().executemany(_INSERT_SEGMENT.on(self.place.kind).sql, rows)
        self.copy.execute("COMMIT")

    def _fill_the_rest(self, progress: Progress) -> None:
        metadata = self.book.metadata
        metadata.delete_segments_before(TOPIC, 0, REMOVED * RECORDS)
        for number in range(self.others):
            topic, group = _other(number)
            metadata.create_topic(topic)
            metadata.commit_offset(group, topic, 0, 0)
            progress("other topics", number + 1, self.others)
        self.place.analyze()

    # --- looking up --------------------------------------------------------------

    def look_up(self, progress: Callable[[str], None]) -> Iterator[Result]:
        """Everything that only reads, without the read cache."""
        progress("find, hit")
        hit, bare_hit = self.find(self.book, self.draw_hits), self.bare_find(self.draw_hits)
        yield self._rates("find_segment_for_offset, hit", hit, bare_hit, at_least=0.7)
        yield self._p99("find_segment_for_offset", hit, bare_hit, below=1)
        if self.place.kind == POSTGRESQL:
            best = self._bare(_BEST_FIND, lambda number: [(offset, TOPIC, 0) for offset in self.draw_hits(number)])
            yield self._rates("find_segment_for_offset, hit, beside LATERAL", hit, best)
        for where, draw in (("above the watermark", self._draw_above), ("below the log start", self._draw_below)):
            progress(f"find, miss {where}")
            name = f"find_segment_for_offset, miss {where}"
            yield self._rates(name, self.find(self.book, draw), self._bare_miss(draw))
        yield from self._look_up_others(progress)
        yield from self._look_up_pages(progress)

    def _look_up_others(self, progress: Callable[[str], None]) -> Iterator[Result]:
        metadata, draw = self.book.metadata, self._draw_others
        get_partition, get_committed = metadata.get_partition, metadata.get_committed_offset
        looked_up: dict[str, tuple[Side, Side]] = {
            "get_topic": (
                Side(_each(metadata.get_topic), lambda number: [topic for topic, _ in draw(number)]),
                self._bare(topics.GET_TOPIC, lambda number: [(topic,) for topic, _ in draw(number)]),
            ),
            "get_partition": (
                Side(_each(lambda other: get_partition(other[0], 0)), draw),
                self._bare(partitions.GET_PARTITION, lambda number: [(topic, 0) for topic, _ in draw(number)]),
            ),
            "get_committed_offset": (
                Side(_each(lambda other: get_committed(other[1], other[0], 0)), draw),
                self._bare(groups.GET_COMMITTED, lambda number: [(group, topic, 0) for topic, group in draw(number)]),
            ),
        }
        for name, sides in looked_up.items():
            progress(name)
            yield self._rates(name, *sides)
            yield self._p99(name, *sides, below=1)

    def _look_up_pages(self, progress: Callable[[str], None]) -> Iterator[Result]:
        name, draw = "get_segments, page of 100", self.draw_hits
        progress(name)
        ours, same = self.pages()
        yield self._rates(name, ours, same)
        yield self._p99(name, ours, same, below=10)
        if self.place.kind == POSTGRESQL:
            best = self._bare(_BEST_PAGE, lambda number: [(offset, PAGE + 1, TOPIC, 0) for offset in draw(number)])
            yield self._rates(f"{name}, beside LATERAL", ours, best)

    def pages(self) -> tuple[Side, Side]:
        """A page from anywhere in the partition: by the library, and by the driver with the same SQL."""
        get_segments, draw = self.book.metadata.get_segments, self.draw_hits
        return Side(_each(lambda offset: get_segments(TOPIC, 0, after=offset, limit=PAGE)), draw), self._bare(
            segments.LIST_SEGMENTS, lambda number: [(TOPIC, 0, offset, PAGE + 1) for offset in draw(number)]
        )

    def look_up_cached(self, progress: Callable[[str], None]) -> Iterator[Result]:
        """Finding through the read cache, beside the driver, which has none."""
        sets = {"hot set of 1,000": self.draw_hot}
        if HOT < self.place.size <= 100_000:
            sets["all segments"] = self.draw_hits
        # On PostgreSQL a staleness of 0 turns the cache off.
        for staleness in (0, 1) if self.place.kind == SQLITE else (1,):
            for name, draw in sets.items():
                progress(f"find, cached, {name}")
                title = f"find_segment_for_offset, cached, {name}, staleness {staleness} s"
                with self.place.open(cache_staleness=staleness) as book:
                    ours = self.find(book, draw)
                    if _warmed(ours, range(REMOVED, HOT if draw == self.draw_hot else self.place.size)):
                        yield self._rates(title, ours, self.bare_find(draw), at_least=1.5, promised=100_000)
                    else:
                        yield self._result(title, None, None, unit="calls/s", at_least=1.5, promised=100_000)

    def find(self, book: Book, draw: Callable[[int], Sequence[int]]) -> Side:
        """The library finds the segment of an offset."""
        find = book.metadata.find_segment_for_offset

        def run(offsets: Sequence[int]) -> None:
            for offset in offsets:
                find(TOPIC, 0, offset)

        return Side(run, draw)

    def bare_find(self, draw: Callable[[int], Sequence[int]]) -> Side:
        """The driver runs the same SQL."""
        return self._bare(segments.FIND_BY_OFFSET, lambda number: [(TOPIC, 0, offset) for offset in draw(number)])

    def _bare(self, statement: Statement | str, draw: Callable[[int], Sequence[tuple[Any, ...]]]) -> Side:
        """The driver runs a statement whose values lie ready, and fetches all of it."""
        execute = self.bare.execute
        sql = statement if isinstance(statement, str) else statement.on(self.place.kind).sql

        def run(rows: Sequence[tuple[Any, ...]]) -> None:
            for values in rows:
                execute(sql, values).fetchall()

        def run_for_one(rows: Sequence[tuple[Any, ...]]) -> None:
            for values in rows:
                execute(sql, values).fetchone()

        several = statement in (segments.LIST_SEGMENTS, _BEST_PAGE)
        return Side(run if several else run_for_one, lambda number: self._arranged(statement, draw(number)))

    def _arranged(self, statement: Statement | str, rows: Sequence[tuple[Any, ...]]) -> Sequence[tuple[Any, ...]]:
        arrange = None if isinstance(statement, str) else statement.on(self.place.kind).arrange
        return [arrange(values) for values in rows] if arrange else rows

    def _bare_miss(self, draw: Callable[[int], Sequence[int]]) -> Side:
        """After a miss the partition is asked for, to tell an offset without a segment from a wrong place."""
        execute = self.bare.execute
        partition = partitions.GET_PARTITION.on(self.place.kind).sql
        find = segments.FIND_BY_OFFSET.on(self.place.kind).sql
        place = self._arranged(partitions.GET_PARTITION, [(TOPIC, 0)])[0]

        def run(rows: Sequence[tuple[Any, ...]]) -> None:
            for values in rows:
                execute(find, values).fetchone()
                execute(partition, place).fetchone()

        return Side(run, self.bare_find(draw).draw)

    def draw_hits(self, number: int) -> list[int]:
        """Offsets that some segment holds."""
        return self._draw(REMOVED * RECORDS, self.place.size * RECORDS, number)

    def draw_hot(self, number: int) -> list[int]:
        """Offsets of the first thousand segments."""
        return self._draw(REMOVED * RECORDS, min(HOT, self.place.size) * RECORDS, number)

    def _draw_above(self, number: int) -> list[int]:
        return self._draw(self.watermark, self.watermark + 1_000, number)

    def _draw_below(self, number: int) -> list[int]:
        return self._draw(0, REMOVED * RECORDS, number)

    def _draw_others(self, number: int) -> list[tuple[str, str]]:
        return [_other(which) for which in self._draw(0, self.others, number)]

    def _draw(self, first: int, beyond: int, number: int) -> list[int]:
        width = beyond - first
        return [first + int(part * width) for part in (self.random.random() for _ in range(number))]

    # --- writing -----------------------------------------------------------------

    def write(self, progress: Callable[[str], None]) -> Iterator[Result]:
        """Small write transactions, one after the other, each on disk before the next begins."""
        progress("single writes")
        add = Side(_each(self.book.metadata.add_segment), self._next_segments)
        yield self._rates("add_segment, one at a time", add, Side(_each(self._add_bare), self._next_rows))
        commit = self.book.metadata.commit_offset
        commits = Side(_each(lambda offset: commit(GROUP, TOPIC, 0, offset)), self._rising_offsets(0))
        upsert = Side(_each(self._commit_bare), self._rising_offsets(0))
        yield self._rates("commit_offset, one at a time", commits, upsert)

    def _next_rows(self, number: int) -> list[tuple[Any, ...]]:
        first = self.copy_watermark
        self.copy_watermark += number * RECORDS
        rows = []
        for base in range(first, self.copy_watermark, RECORDS):
            segment = _segment(base)
            moment = segment.max_timestamp
            made = {"id": new_id(), "s3_bucket": str(self.book.warehouse.recorded), "created_at": moment}
            rows.append(self._row(SegmentInfo(**{**segment.__dict__, **made})))
        return rows

    def _add_bare(self, row: tuple[Any, ...]) -> None:
        execute = self.copy.execute
        execute("BEGIN IMMEDIATE" if self.place.kind == SQLITE else "BEGIN")
        execute(_INSERT_SEGMENT.on(self.place.kind).sql, row)
        execute(_MOVE_WATERMARK.on(self.place.kind).sql, (row[4] + 1, row[-1], self.topic_id, 0))
        execute("COMMIT")

    def _commit_bare(self, offset: int) -> None:
        # The time stands in for the clock's; it only has to change.
        values = (self.group_id, self.topic_id, 0, offset, 1_700_000_000_000 + offset)
        self.copy.execute(_UPSERT_OFFSET.on(self.place.kind).sql, values)

    def _rising_offsets(self, first: int) -> Callable[[int], range]:
        taken = first

        def draw(number: int) -> range:
            nonlocal taken
            taken += number
            return range(taken - number, taken)

        return draw

    # --- plans -------------------------------------------------------------------

    def explain(self) -> Result:
        """Whether every hot statement has an index for what it asks."""
        self.place.analyze()
        self.plans = plans(self.book, only_indexes=self.quick)
        return self._result("hot statements use indexes only", None, None, unit="", holds=not unindexed(self.plans))

    # --- results -----------------------------------------------------------------

    def _rates(self, name: str, ours: Side, peer: Side, **target: float) -> Result:
        found = compare(ours, peer, self.effort)
        return self._result(name, 1 / found.ours, 1 / found.peer, unit="calls/s", **target)

    def _p99(self, name: str, ours: Side, peer: Side, *, below: float) -> Result:
        found, other = latencies(ours, peer, self.effort)
        return self._result(f"p99 of {name}", found.p99, other.p99, unit="ms", below=below)

    def _result(self, name: str, ours: float | None, peer: float | None, **more: Any) -> Result:
        return Result(name, self.place.kind, self.place.size, ours, peer, **more)


def growth(smallest: Workload, largest: Workload) -> Iterator[Result]:
    """How much longer finding takes in the largest book than in the smallest, measured side by side."""
    kind, size, effort = largest.place.kind, largest.place.size, largest.effort
    pairs = {
        "find_segment_for_offset": [work.find(work.book, work.draw_hits) for work in (largest, smallest)],
        "the bare driver's find": [work.bare_find(work.draw_hits) for work in (largest, smallest)],
        "get_segments, page of 100": [work.pages()[0] for work in (largest, smallest)],
    }
    for name, (large, small) in pairs.items():
        found = compare(large, small, effort)
        at_most = 1.5 if name == "find_segment_for_offset" else None
        title = f"growth of {name}, beside {smallest.place.size:,} segments"
        yield Result(title, kind, size, found.ours * 1e6, found.peer * 1e6, unit="µs", at_most=at_most)


def _warmed(ours: Side, numbers: range) -> bool:
    """Find each segment once, so that the cache has them all; false if that takes too long."""
    deadline = monotonic() + WARMING
    for start in range(numbers.start, numbers.stop, 100):
        if monotonic() > deadline:
            return False
        ours.run([number * RECORDS for number in range(start, min(start + 100, numbers.stop))])
    return True


def _segment(base: int) -> SegmentInfo:
    written = _FIRST_TIME + timedelta(seconds=base)
    return SegmentInfo(
        topic=TOPIC,
        partition_id=0,
        base_offset=base,
        end_offset=base + RECORDS - 1,
        record_count=RECORDS,
        size_bytes=RECORDS * 120,
        s3_key=f"topics/{TOPIC}/0/{base:020d}-0d5c3f1e.parquet",
        min_timestamp=written,
        max_timestamp=written + timedelta(seconds=RECORDS - 1),
        checksum="crc32c:8a9136aa",
    )


def _other(number: int) -> tuple[str, str]:
    return f"topic-{number}", f"group-{number}"


def _each(call: Callable[[Any], object]) -> Callable[[Sequence[Any]], None]:
    def run(values: Sequence[Any]) -> None:
        for value in values:
            call(value)

    return run
