"""A topic and the lists that it has to agree with, for tests that drive both by any sequence of operations."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lakebook
from books import Postgres
from lake import objects
from lakebook import Book, LakebookError, SegmentInfo
from lakebook.clock import ManualClock, to_datetime
from lakebook.components.janitor import Janitor
from segment_logs import log_of, values_of
from streaming import produce

TOPIC, PARTITIONS = "orders", 2
NUMBERS = st.integers(0, PARTITIONS - 1)
SHARES = st.integers(0, 100)
GROUPS = st.sampled_from(["g", "h"])
HOUR = 3600
GRACE = 100.0
#: Segments are merged as soon as there are two of them.
SETTINGS: dict[str, Any] = {"merge_quiet": 0, "merge_segments": 2, "temporary_file_grace": GRACE, "sweep_grace": GRACE}


@dataclass
class Log:
    """A partition: all records that were ever written, and how many of them are gone."""

    values: list[bytes] = field(default_factory=list)
    times: list[datetime] = field(default_factory=list)
    start: int = 0

    @property
    def end(self) -> int:
        return len(self.values)

    def records(self, start: int, end: int) -> list[tuple[int, bytes | None]]:
        return [(offset, self.values[offset]) for offset in range(start, end)]

    def at(self, share: int) -> int:
        """An offset of those there were, are, or may be next."""
        return self.end * share // 100


@dataclass
class Reader:
    """One who has planned what it reads, and holds a lease."""

    lease_id: str
    number: int
    start: int
    end: int
    planned: list[SegmentInfo]


class Streams:
    """Drives a topic and its lists, one operation after the other."""

    def __init__(self, open_book: Callable[[ManualClock], Book]) -> None:
        self.clock = ManualClock()
        self.book = open_book(self.clock)
        self.janitor = Janitor(self.book.lake)
        self.logs = [Log() for _ in range(PARTITIONS)]
        self.readers: list[Reader] = []
        self.committed: dict[tuple[str, int], int] = {}

    def begin(self) -> None:
        self.topic_id = self.book.metadata.create_topic(TOPIC, PARTITIONS).id
        for _ in range(4):
            for number in range(PARTITIONS):
                self.append(number, [2, 1], 0)
            self.clock.advance(HOUR)
        self.pin(0, 0)
        self.pin(1, 30)

    @property
    def now(self) -> datetime:
        return to_datetime(self.clock.now_ms())

    def segments(self, number: int) -> list[SegmentInfo]:
        return list(self.book.metadata.each_segment(TOPIC, number))

    # --- writing -------------------------------------------------------------------

    def append(self, number: int, counts: list[int], late: int) -> None:
        log = self.logs[number]
        for count in counts:
            values = [f"{number}.{log.end + place}".encode() for place in range(count)]
            times = [self.now - timedelta(hours=late, seconds=place) for place in range(count)]
            segment = produce(self.book, TOPIC, number, *values, times=times)
            assert segment.base_offset == log.end
            log.values += values
            log.times += times

    def wait(self, hours: int) -> None:
        self.clock.advance(hours * HOUR + 1)
        # Whoever reads is alive.
        if self.readers:
            held = [reader.lease_id for reader in self.readers]
            assert self.book.metadata.renew_pins(held) == set(held)

    # --- upkeep --------------------------------------------------------------------

    def merge(self) -> None:
        before = [len(self.segments(number)) for number in range(PARTITIONS)]
        done = self.janitor.run_once("merging")["merging"]
        after = [len(self.segments(number)) for number in range(PARTITIONS)]
        assert sum(before) - sum(after) == done["segments"] - done["into"]
        assert "failed" not in done

    def retain_by_time(self, hours: int) -> None:
        due = self.now - timedelta(hours=hours)
        for number, log in enumerate(self.logs):
            for segment in self.segments(number):
                if any(moment >= due for moment in log.times[segment.base_offset : segment.end_offset + 1]):
                    break
                log.start = segment.end_offset + 1
        self.book.metadata.update_topic_config(TOPIC, retention_ms=hours * HOUR * 1000)
        self.janitor.run_once("retention")
        self.book.metadata.update_topic_config(TOPIC, retention_ms=None)

    def retain_by_size(self, size: int) -> None:
        for number, log in enumerate(self.logs):
            found = self.segments(number)
            left = sum(segment.size_bytes for segment in found)
            for segment in found:
                left -= segment.size_bytes
                if left < size:
                    break
                log.start = segment.end_offset + 1
        self.book.metadata.update_topic_config(TOPIC, {"retention.bytes": str(size)})
        self.janitor.run_once("retention")
        self.book.metadata.update_topic_config(TOPIC, {"retention.bytes": None})

    def retain_but_wait_for_groups(self) -> None:
        readers = {group for group, _ in self.committed}
        for number, log in enumerate(self.logs):
            slowest = min((self.committed.get((group, number), 0) for group in readers), default=log.end)
            for segment in self.segments(number):
                if segment.end_offset < slowest:
                    log.start = segment.end_offset + 1
        self.clock.advance(10 * HOUR)
        self.wait(0)
        self.book.metadata.update_topic_config(TOPIC, {"retention.groups": "wait"}, retention_ms=HOUR * 1000)
        self.janitor.run_once("retention")
        self.book.metadata.update_topic_config(TOPIC, {"retention.groups": None}, retention_ms=None)

    def remove(self, number: int, share: int) -> None:
        log = self.logs[number]
        offset = log.at(share)
        for segment in self.segments(number):
            if segment.end_offset < offset:
                log.start = segment.end_offset + 1
        self.book.metadata.delete_segments_before(TOPIC, number, offset)

    def clean(self) -> None:
        for action in ("retention", "segments", "files"):
            assert "failed" not in self.janitor.run_once(action)[action]
            self.clock.advance(GRACE + 1)
        self.wait(0)

    # --- reading -------------------------------------------------------------------

    def pin(self, number: int, share: int) -> None:
        log = self.logs[number]
        offset = log.at(share)
        try:
            lease_id, topic_id = self.book.metadata.pin_topic(TOPIC, {number: offset})
        except LakebookError:
            assert offset < log.start
            return
        assert offset >= log.start
        planned = self.book.metadata.list_segments_in(topic_id, number, offset, log.end)
        self.readers.append(Reader(lease_id, number, offset, log.end, planned))

    def read_with_lease(self, which: int, share: int, again: bool) -> None:
        if not self.readers:
            return
        reader = self.readers[which % len(self.readers)]
        if again:
            reader.planned = self.book.metadata.list_segments_in(self.topic_id, reader.number, reader.start, reader.end)
        place = reader.start + (reader.end - reader.start) * share // 100
        expected = self.logs[reader.number].records(place, reader.end)
        found = values_of(self.book, reader.planned, place)
        assert [record for record in found if place <= record[0] < reader.end] == expected
        # Nothing before its place is needed any more.
        self.book.metadata.advance_pin(reader.lease_id, {(self.topic_id, reader.number): place})
        reader.start = place
        reader.planned = [segment for segment in reader.planned if segment.end_offset >= place]

    def unpin(self, which: int) -> None:
        if self.readers:
            self.book.metadata.unpin(self.readers.pop(which % len(self.readers)).lease_id)

    def seek(self, number: int, share: int) -> None:
        log = self.logs[number]
        offset = log.at(share)
        found = self.book.metadata.find_segment_for_offset(TOPIC, number, offset)
        if not log.start <= offset < log.end:
            assert found is None
            return
        assert found is not None
        assert values_of(self.book, [found], offset)[0] == (offset, log.values[offset])

    def seek_to_a_time(self, number: int, hours: int) -> None:
        log, moment = self.logs[number], self.now - timedelta(hours=hours)
        later = [offset for offset in range(log.start, log.end) if log.times[offset] >= moment]
        found = self.book.metadata.find_segment_for_timestamp(TOPIC, number, moment)
        assert (found is None) == (later == [])
        assert found is None or found.base_offset <= later[0] <= found.end_offset

    def commit(self, group: str, number: int, share: int) -> None:
        log, before = self.logs[number], self.committed.get((group, number), 0)
        offset = log.at(share)
        try:
            done = self.book.metadata.commit_offset(group, TOPIC, number, offset)
        except LakebookError:
            assert offset < before
            return
        assert offset >= before
        assert done.behind == (offset < log.start)
        self.committed[group, number] = offset

    # --- always --------------------------------------------------------------------

    def check(self) -> None:
        for number, log in enumerate(self.logs):
            partition = self.book.metadata.get_partition(TOPIC, number)
            if partition is not None:
                assert (partition.log_start, partition.high_watermark) == (log.start, log.end)
                assert log_of(self.book, TOPIC, number) == log.records(log.start, log.end)
        for (group, number), offset in self.committed.items():
            assert self.book.metadata.get_committed_offset(group, TOPIC, number) == offset

    def end(self) -> None:
        checked = self.book.verify()
        assert checked.ok, checked.findings
        for reader in self.readers:
            self.book.metadata.unpin(reader.lease_id)
        self.readers = []
        for _ in range(3):
            self.clean()
        live = [segment.s3_key for number in range(PARTITIONS) for segment in self.segments(number)]
        assert objects(self.book, "topics") == sorted(live)
        assert self.book.verify().ok


#: What may happen, and to what.
OPERATIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "append": {
        "number": NUMBERS,
        "counts": st.lists(st.integers(1, 3), min_size=1, max_size=4),
        "late": st.sampled_from([0, 0, 2]),
    },
    "wait": {"hours": st.sampled_from([0, 1, 4])},
    "merge": {},
    "retain_by_time": {"hours": st.sampled_from([1, 3, 8])},
    "retain_by_size": {"size": st.sampled_from([1, 4000, 12_000])},
    "retain_but_wait_for_groups": {},
    "remove": {"number": NUMBERS, "share": SHARES},
    "clean": {},
    "pin": {"number": NUMBERS, "share": SHARES},
    "read_with_lease": {"which": st.integers(0, 9), "share": SHARES, "again": st.sampled_from([False, False, True])},
    "unpin": {"which": st.integers(0, 9)},
    "seek": {"number": NUMBERS, "share": SHARES},
    "seek_to_a_time": {"number": NUMBERS, "hours": st.sampled_from([0, 1, 5])},
    "commit": {"group": GROUPS, "number": NUMBERS, "share": SHARES},
}


OpenBook = Callable[[ManualClock], Book]
Steps = list[tuple[str, dict[str, Any]]]


def steps_of(
    operations: Mapping[str, Mapping[str, st.SearchStrategy[Any]]], often: Sequence[str]
) -> st.SearchStrategy[Steps]:
    """Sequences of operations, some of which happen more often."""
    each = [st.tuples(st.just(name), st.fixed_dictionaries(dict(operations[name]))) for name in (*operations, *often)]
    return st.lists(st.one_of(each), min_size=25, max_size=35)


def drive(
    make: Callable[[OpenBook], Streams], steps: st.SearchStrategy[Steps], open_book: OpenBook, examples: int
) -> None:
    """Drive a topic and its lists by so many sequences of operations."""

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(steps)
    def driven(taken: Steps) -> None:
        streams = make(open_book)
        try:
            streams.begin()
            for name, values in taken:
                getattr(streams, name)(**values)
                streams.check()
            streams.end()
        finally:
            streams.book.close()

    driven()


def in_memory(options: Mapping[str, Any]) -> OpenBook:
    """What opens books in memory."""
    return lambda clock: lakebook.open(":memory:", clock=clock, **options)


@contextmanager
def on_postgresql(postgres: Postgres, folder: Path, options: Mapping[str, Any]) -> Iterator[OpenBook]:
    """What opens books on PostgreSQL, each with a database and a warehouse of its own: what is left over is counted."""
    urls: list[str] = []

    def open_book(clock: ManualClock) -> Book:
        urls.append(postgres.new_database(with_book=False))
        return lakebook.open(urls[-1], clock=clock, warehouse=str(folder / str(len(urls))), **options)

    try:
        yield open_book
    finally:
        for url in urls:
            postgres.drop(url)
        shutil.rmtree(folder, ignore_errors=True)
