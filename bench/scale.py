"""Growth of a book: what a commit, a plan, a page of a list, a find and a publication take, large beside small.

A book grows in two ways: one table and one topic with very many files, segments and events; and very many
tables and topics with a few each. Their rows are entered in bulk; nobody opens the files that they name.
Small and large take turns in one process, so that the machine's noise meets both alike.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from typing import Any, ClassVar

import lakebook
from bench.asked import Asked, Say
from bench.measure import Side, compare, latency, timed
from bench.places import Ground, Place
from bench.planning import _AT_ONCE, _SCHEMA, _enter, _Layout
from bench.publishing import _few_rows, _Grown, _Watch
from bench.registry import BATCH, RECORDS, TOPIC, _segment
from bench.report import Result
from lakebook.iceberg.partitioning import order_to_json, partition_spec, sort_order, spec_to_json
from lakebook.iceberg.schemas import last_field_id, schema_from, schema_to_json
from lakebook.lake.table import Table
from lakebook.registry import topics
from lakebook.registry.statements import SQLITE
from lakebook.registry.tables import DEFAULT_NAMESPACE, NewTable, TableRecord, create_table
from lakebook.registry.transactions import Transaction, new_id

_FLAT = 1.5
_MOST_MEMORY = 500
_PAGE = 100
#: Tables of a page: less than the smallest book has.
_FEW = 5
#: Events behind the cursor of a subscriber that is nearly up to date.
_LATE = 500
#: Files of each of many tables and segments of each of many topics.
_EACH = 10
#: Tables and topics that one transaction creates.
_CREATED = 100
_WARMING = 3
_COMMITS, _FEW_COMMITS = 40, 10
#: A plan that is kept is no plan that is made; and nothing is published but by the measure.
_SETTINGS: dict[str, Any] = {"cache_planned_files": 0, "cache_segments": 0, "publish": "off"}


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """Rows of one table and one topic, then tables and topics."""
    yield from _growth(ground, _Deep, asked.grown, asked, say)
    yield from _growth(ground, _Wide, asked.grown_tables, asked, say)


@dataclass
class _Filled(ABC):
    """A book of some size and what is done with it."""

    #: What its size counts.
    counted: ClassVar[str]

    place: Place
    random: random.Random = field(default_factory=lambda: random.Random(7))
    inserts: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    publications: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = self.place.size
        self.book = self.place.open(**_SETTINGS)
        self.data = _few_rows()
        self.layout = _Layout(self.size)

    @abstractmethod
    def fill(self, say: Say) -> None:
        """Enter the rows, and publish what is committed to later."""

    @abstractmethod
    def calls(self) -> Mapping[str, Side]:
        """Everything that only reads, by its name."""

    @abstractmethod
    def written(self, number: int, /) -> Table:
        """The table of the n-th commit."""

    def commit(self, number: int) -> None:
        """An insert of one file, then its publication."""
        table = self.written(number)
        taken, report = timed(lambda: table.insert_arrow(self.data))
        self.inserts.append(taken)
        self.commits.append(report.seconds["commit"])
        self.publications.append(timed(table.publish)[0])

    def forget(self) -> None:
        """The first ones were for warming up."""
        for kept in (self.inserts, self.commits, self.publications):
            kept.clear()


class _Deep(_Filled):
    """One table with so many files, one topic with so many segments, and an event of each segment."""

    counted = "files, segments and events"

    def fill(self, say: Say) -> None:
        self.table = self.book.tables.create("t", _SCHEMA)
        for start in range(0, self.size, _AT_ONCE):
            say(f"scale: filling {self.size:,} files", start, self.size)
            numbers = range(start, min(start + _AT_ONCE, self.size))
            self.book._registry.write(partial(_enter, record=self.table.record, layout=self.layout, numbers=numbers))
        self.book.metadata.create_topic(TOPIC)
        early = self.size - _LATE
        for start in range(0, early, BATCH):
            say(f"scale: filling {self.size:,} segments", start, self.size)
            self._add_segments(start, min(start + BATCH, early))
        self.late = self.book.events.now()
        self._add_segments(early, self.size)
        self.place.analyze()
        say(f"scale: publishing {self.size:,} files")
        self.table.publish()
        if self.place.kind == SQLITE:
            # A process maps a page of the file when it first needs it; here it has been at work for a while.
            for number in range(0, early, _EACH):
                self.book.metadata.find_segment_for_offset(TOPIC, 0, number * RECORDS)

    def _add_segments(self, start: int, end: int) -> None:
        self.book.metadata.add_segments([_segment(number * RECORDS) for number in range(start, end)])

    def calls(self) -> Mapping[str, Side]:
        metadata, events, table = self.book.metadata, self.book.events, self.table
        beginning = events.beginning()
        return {
            "a selective plan, a range of ids": self._plans(self.layout.ids),
            "a selective plan, one text": self._plans(self.layout.one_code),
            "a page of files": _each(lambda _: list(islice(table.plan(), _PAGE)), self._anywhere),
            "a page of segments": _each(
                lambda at: metadata.get_segments(TOPIC, 0, after=at * RECORDS, limit=_PAGE), self._anywhere
            ),
            "a page of events, from the beginning": _each(lambda _: events.read(beginning, _PAGE), self._anywhere),
            f"a page of events, the last {_LATE}": _each(lambda _: events.read(self.late, _PAGE), self._anywhere),
            "find_segment_for_offset": _each(
                lambda at: metadata.find_segment_for_offset(TOPIC, 0, at * RECORDS + 3), self._anywhere
            ),
            "find_segment_for_timestamp": _each(
                lambda at: metadata.find_segment_for_timestamp(TOPIC, 0, _time_of(at)), self._anywhere
            ),
        }

    def _plans(self, where: Callable[[int], Any]) -> Side:
        return Side(
            lambda predicates: [self.table.plan(predicate).files for predicate in predicates],
            lambda number: [where(first) for first in self._anywhere(number)],
        )

    def _anywhere(self, number: int) -> list[int]:
        return [self.random.randrange(self.size - _PAGE - 1) for _ in range(number)]

    def written(self, _: int, /) -> Table:
        return self.table


class _Wide(_Filled):
    """So many tables and topics, each with a few files and segments."""

    counted = "tables and topics"

    def fill(self, say: Say) -> None:
        self.layout = _Layout(_EACH)
        wanted = _wanted_table()
        for start in range(0, self.size, _CREATED):
            say(f"scale: filling {self.size:,} tables and topics", start, self.size)
            numbers = range(start, min(start + _CREATED, self.size))
            self.book._registry.write(partial(_create, numbers=numbers, wanted=wanted, layout=self.layout))
            self.book.metadata.add_segments(
                [_segment_of(number, place * RECORDS) for number in numbers for place in range(_EACH)]
            )
        self.place.analyze()
        # The same number in both, from all over the book.
        self.few = [_table(number * self.size // _EACH) for number in range(_EACH)]
        for name in self.few:
            self.book.table(name).publish()

    def calls(self) -> Mapping[str, Side]:
        book, metadata = self.book, self.book.metadata
        plan = self.layout.one_code(_EACH // 2)
        few = [book.table(name) for name in self.few]
        return {
            "a selective plan": _each(lambda at: few[at % _EACH].plan(plan).files, self._anywhere),
            "a selective plan, any table": _each(lambda at: book.table(_table(at)).plan(plan).files, self._anywhere),
            "a page of tables": _each(lambda at: book.tables.list(after=_table(at), limit=_FEW), self._before_last),
            "a page of topics": _each(lambda at: metadata.list_topics(after=_topic(at), limit=_FEW), self._before_last),
            "a table by its name": _each(lambda at: book.table(_table(at)), self._anywhere),
            "a topic by its name": _each(lambda at: metadata.get_topic(_topic(at)), self._anywhere),
            "find_segment_for_offset": _each(
                lambda at: metadata.find_segment_for_offset(_topic(at), 0, 3), self._anywhere
            ),
        }

    def _anywhere(self, number: int) -> list[int]:
        return [self.random.randrange(self.size) for _ in range(number)]

    def _before_last(self, number: int) -> list[int]:
        return [self.random.randrange(self.size - _FEW) for _ in range(number)]

    def written(self, number: int, /) -> Table:
        return self.book.table(self.few[number % _EACH])


# --- filling -------------------------------------------------------------------


def _table(number: int) -> str:
    return f"t{number:06d}"


def _topic(number: int) -> str:
    return f"topic-{number:06d}"


def _time_of(number: int) -> Any:
    found = _segment(number * RECORDS).min_timestamp
    assert found is not None
    return found


def _segment_of(number: int, base: int) -> Any:
    segment = _segment(base)
    return replace(segment, topic=_topic(number), s3_key=segment.s3_key.replace(TOPIC, _topic(number)))


def _wanted_table() -> NewTable:
    columns = schema_from(_SCHEMA)
    parts = spec_to_json(partition_spec(columns, ())), order_to_json(sort_order(columns, ()))
    known = schema_to_json(columns), last_field_id(columns)
    return NewTable(DEFAULT_NAMESPACE, "", *known, *parts, "parquet", "zstd", "spark", {}, {})


def _create(transaction: Transaction, numbers: range, wanted: NewTable, layout: _Layout) -> None:
    for number in numbers:
        record: TableRecord = create_table(transaction, replace(wanted, name=_table(number)), new_id())
        _enter(transaction, record, layout, range(_EACH), f"data/{number}")
        topics.create_topic(transaction, topics.TopicConfig(_topic(number)))


def _each(call: Callable[[int], object], draw: Callable[[int], Sequence[int]]) -> Side:
    def run(values: Sequence[int]) -> None:
        for value in values:
            call(value)

    return Side(run, draw)


# --- measuring -----------------------------------------------------------------


def _growth(ground: Ground, kind: type[_Filled], sizes: Sequence[int], asked: Asked, say: Say) -> Iterator[Result]:
    with ExitStack() as stack:
        filled: list[_Filled] = []
        for size in (sizes[0], sizes[-1]):
            filled.append(kind(stack.enter_context(ground.new(size, f"scale{kind.__name__.lower()}"))))
            filled[-1].fill(say)
        small, large = filled
        # Many short rounds: what disturbs the machine for a second then meets both sides.
        effort = replace(asked.effort, rounds=asked.effort.rounds * 3, seconds=asked.effort.seconds / 3)
        both = zip(large.calls().items(), small.calls().values(), strict=True)
        for (name, ours), peer in both:
            say(f"scale: growth of {name}")
            found = compare(ours, peer, effort)
            yield _grown(name, large, small, found.ours * 1000, found.peer * 1000)
        _take_turns(filled, _FEW_COMMITS if asked.quick else _COMMITS, say)
        for name in ("inserts", "commits", "publications"):
            title = {"inserts": "an insert of one file", "commits": "its commit", "publications": "its publication"}[
                name
            ]
            now, before = latency(getattr(large, name)).p50, latency(getattr(small, name)).p50
            yield _grown(f"{title}, p50", large, small, now, before)
        yield from _memory(large, say)


def _grown(name: str, large: _Filled, small: _Filled, now: float, before: float) -> Result:
    title = f"growth of {name}, beside {small.size:,} {large.counted}"
    return Result(title, large.place.kind, large.size, now, before, "ms", at_most=_FLAT)


def _take_turns(books: Sequence[_Filled], commits: int, say: Say) -> None:
    for number in range(_WARMING + commits):
        say("scale: commits in turns", number, _WARMING + commits)
        if number == _WARMING:
            for book in books:
                book.forget()
        for book in books if number % 2 else reversed(books):
            book.commit(number)


def _memory(large: _Filled, say: Say) -> Iterator[Result]:
    """By how much all of it together makes a process of its own grow."""
    say("scale: memory")
    target, settings = large.place.target
    name = large.written(0).name
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        grown = pool.submit(_used, target, {**settings, **_SETTINGS}, name, large.layout.one_code(1)).result()
    title = f"memory by which a process grows, {large.counted}"
    yield Result(title, large.place.kind, large.size, grown.resident, None, "MB", below=_MOST_MEMORY)
    if grown.own is not None:
        own = f"{title}, without mapped files"
        yield Result(own, large.place.kind, large.size, grown.own, None, "MB", below=_MOST_MEMORY)


def _used(target: str, settings: dict[str, Any], name: str, where: Any) -> _Grown:
    with lakebook.open(target, **settings) as book, _Watch() as watch:
        table = book.table(name)
        _ = table.plan(where).files
        _ = list(islice(table.plan(), _PAGE)), book.tables.list(), book.metadata.list_topics()
        _ = book.events.read(book.events.beginning(), _PAGE)
        for topic in book.metadata.list_topics(limit=1).items:
            book.metadata.find_segment_for_offset(topic.name, 0, 3)
        table.insert_arrow(_few_rows())
        table.publish()
    return watch.grown
