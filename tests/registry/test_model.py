"""Random operations on a registry and on a dictionary have the same outcome."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import lakebook
from books import Postgres, describe
from lakebook import Book, LakebookError
from lakebook.clock import ManualClock

TOPICS = st.sampled_from(["a", "b"])
NUMBERS = st.integers(0, 2)
GROUPS = st.sampled_from(["g", "h"])
OFFSETS = st.integers(0, 40)
COUNTS = st.integers(1, 9)


@dataclass
class Log:
    """A partition, as simply as it can be said."""

    start: int = 0
    segments: list[tuple[int, int]] = field(default_factory=list)
    watermark: int = 0
    holder: str | None = None
    until: float = 0
    token: int = 0


class Model:
    """What the registry has to be, in dictionaries."""

    def __init__(self) -> None:
        self.topics: dict[str, dict[int, Log]] = {}
        self.groups: dict[str, dict[tuple[str, int], int]] = {}
        self.removed = 0

    def log(self, topic: str, number: int) -> Log | None:
        return self.topics.get(topic, {}).get(number)


class Registry(RuleBasedStateMachine):
    """Drives both, one operation after the other."""

    open_book: Callable[[ManualClock], Book]

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.book = type(self).open_book(self.clock)
        self.model = Model()
        self.turns: dict[tuple[str, int, str], Any] = {}

    @initialize()
    def first_topic(self) -> None:
        self.create("a", 2)

    def attempt(self, allowed: bool, call: Callable[[], Any]) -> Any:
        """The call works exactly if the model allows it."""
        try:
            result = call()
        except LakebookError as error:
            if allowed:
                raise
            return error
        assert allowed
        return result

    @rule(topic=TOPICS, count=st.integers(1, 3))
    def create(self, topic: str, count: int) -> None:
        allowed = topic not in self.model.topics
        self.attempt(allowed, lambda: self.book.metadata.create_topic(topic, count))
        if allowed:
            self.model.topics[topic] = {number: Log() for number in range(count)}

    @rule(topic=TOPICS, count=st.integers(1, 3))
    def grow(self, topic: str, count: int) -> None:
        present = self.model.topics.get(topic)
        allowed = present is not None and count >= len(present)
        self.attempt(allowed, lambda: self.book.metadata.grow_topic(topic, count))
        if allowed and present is not None:
            for number in range(len(present), count):
                present[number] = Log()

    @rule(topic=TOPICS)
    def delete(self, topic: str) -> None:
        allowed = topic in self.model.topics
        self.attempt(allowed, lambda: self.book.metadata.delete_topic(topic))
        if allowed:
            self.model.removed += sum(len(log.segments) for log in self.model.topics.pop(topic).values())
            for offsets in self.model.groups.values():
                for place in [place for place in offsets if place[0] == topic]:
                    del offsets[place]

    @rule(topic=TOPICS, number=NUMBERS, away=st.sampled_from([0, 0, 0, -1, 1]), count=COUNTS)
    def add(self, topic: str, number: int, away: int, count: int) -> None:
        log = self.model.log(topic, number)
        base = max(0, (log.watermark if log else 0) + away)
        allowed = log is not None and base == log.watermark
        self.attempt(allowed, lambda: self.book.metadata.add_segment(describe(topic, number, base, count)))
        if allowed and log is not None:
            log.segments.append((base, base + count - 1))
            log.watermark = base + count

    @rule(topic=TOPICS, number=NUMBERS, holder=st.sampled_from(["x", "y"]))
    def claim(self, topic: str, number: int, holder: str) -> None:
        log = self.model.log(topic, number)
        now = self.clock.now_ms()
        allowed = log is not None and (log.holder in (None, holder) or log.until <= now)
        turn = self.attempt(allowed, lambda: self.book.metadata.claim_append(topic, number, holder=holder, seconds=10))
        if allowed and log is not None:
            log.holder, log.until, log.token = holder, now + 10_000, log.token + 1
            assert (turn.token, turn.next_offset) == (log.token, log.watermark)
            self.turns[topic, number, holder] = (log, turn)

    @rule(topic=TOPICS, number=NUMBERS, holder=st.sampled_from(["x", "y"]), count=COUNTS)
    def append(self, topic: str, number: int, holder: str, count: int) -> None:
        if (topic, number, holder) not in self.turns:
            return
        claimed, turn = self.turns[topic, number, holder]
        log = self.model.log(topic, number)
        base = log.watermark if log else 0
        allowed = log is claimed and log.token == turn.token and log.holder == holder
        result = self.attempt(
            allowed, lambda: self.book.metadata.append_segment(turn, describe(topic, number, base, count))
        )
        if allowed and log is not None:
            log.segments.append((base, base + count - 1))
            log.watermark = base + count
            log.until = self.clock.now_ms() + 10_000
            self.turns[topic, number, holder] = (log, result.turn)

    @rule(seconds=st.sampled_from([0.5, 8.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(topic=TOPICS, number=NUMBERS, offset=OFFSETS)
    def retain(self, topic: str, number: int, offset: int) -> None:
        log = self.model.log(topic, number)
        allowed = log is not None and offset <= log.watermark
        removed = self.attempt(allowed, lambda: self.book.metadata.delete_segments_before(topic, number, offset))
        if allowed and log is not None:
            kept = [segment for segment in log.segments if segment[1] >= offset]
            assert removed == len(log.segments) - len(kept)
            self.model.removed += removed
            log.segments = kept
            log.start = max(log.start, kept[0][0] if kept else log.watermark)

    @rule(group=GROUPS, topic=TOPICS, number=NUMBERS, offset=OFFSETS)
    def commit(self, group: str, topic: str, number: int, offset: int) -> None:
        log = self.model.log(topic, number)
        previous = self.model.groups.get(group, {}).get((topic, number), 0)
        allowed = log is not None and previous <= offset <= log.watermark
        done = self.attempt(allowed, lambda: self.book.metadata.commit_offset(group, topic, number, offset))
        if allowed and log is not None:
            assert done.behind == (offset < log.start)
            self.model.groups.setdefault(group, {})[topic, number] = offset

    @rule(group=GROUPS, topic=TOPICS, number=NUMBERS, to=st.sampled_from(["earliest", "latest", 3, 20]))
    def reset(self, group: str, topic: str, number: int, to: str | int) -> None:
        log = self.model.log(topic, number)
        offset = -1
        if log is not None:
            offset = to if isinstance(to, int) else {"earliest": log.start, "latest": log.watermark}[to]
        allowed = log is not None and group in self.model.groups and log.start <= offset <= log.watermark
        self.attempt(allowed, lambda: self.book.metadata.reset_offset(group, topic, number, to))
        if allowed:
            self.model.groups[group][topic, number] = offset

    @rule(group=GROUPS)
    def delete_group(self, group: str) -> None:
        allowed = group in self.model.groups
        self.attempt(allowed, lambda: self.book.metadata.delete_consumer_group(group))
        self.model.groups.pop(group, None)

    @rule(topic=TOPICS, number=NUMBERS, offset=OFFSETS)
    def find(self, topic: str, number: int, offset: int) -> None:
        log = self.model.log(topic, number)
        found = self.attempt(log is not None, lambda: self.book.metadata.find_segment_for_offset(topic, number, offset))
        if log is not None:
            expected = [segment for segment in log.segments if segment[0] <= offset <= segment[1]]
            assert expected == ([] if found is None else [(found.base_offset, found.end_offset)])

    @invariant()
    def the_registry_is_what_the_model_is(self) -> None:
        store = self.book.metadata
        assert [topic.name for topic in store.list_topics()] == sorted(self.model.topics)
        for topic, logs in self.model.topics.items():
            partitions = store.list_partitions(topic)
            assert [(p.log_start, p.high_watermark) for p in partitions] == [
                (log.start, log.watermark) for log in logs.values()
            ]
            for number, log in logs.items():
                assert [(s.base_offset, s.end_offset) for s in store.get_segments(topic, number)] == log.segments
        for group, offsets in self.model.groups.items():
            assert {(o.topic, o.partition_id): o.committed_offset for o in store.get_consumer_offsets(group)} == offsets
            for entry in store.lag(group):
                log = self.model.topics[entry.topic][entry.partition_id]
                assert entry.lag == log.watermark - max(offsets.get((entry.topic, entry.partition_id), 0), log.start)

    def teardown(self) -> None:
        checked = self.book.verify()
        assert checked.ok, checked.findings
        assert self.book.measure().values()["lakebook_temporary_files"] == self.model.removed
        self.book.close()


def drive(open_book: Callable[[ManualClock], Book], examples: int) -> None:
    class Driven(Registry):
        pass

    Driven.open_book = staticmethod(open_book)
    run_state_machine_as_test(
        Driven,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_registry_in_memory_is_what_a_dictionary_would_be() -> None:
    drive(lambda clock: lakebook.open(":memory:", clock=clock), 60)


def test_a_registry_in_memory_with_a_cache_is_what_a_dictionary_would_be() -> None:
    drive(lambda clock: lakebook.open(":memory:", clock=clock, cache_staleness=3600), 30)


def test_a_registry_on_sqlite_is_what_a_dictionary_would_be(tmp_path: Path) -> None:
    drive(lambda clock: lakebook.open(tempfile.mkdtemp(dir=tmp_path), clock=clock), 15)


def test_a_registry_on_postgresql_is_what_a_dictionary_would_be(postgres: Postgres) -> None:
    urls: list[str] = []

    def open_book(clock: ManualClock) -> Book:
        urls.append(postgres.new_database())
        return lakebook.open(urls[-1], clock=clock, warehouse=postgres.warehouse, cache_staleness=3600)

    try:
        drive(open_book, 10)
    finally:
        for url in urls:
            postgres.drop(url)
