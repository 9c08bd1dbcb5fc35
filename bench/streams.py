"""Streams: records into topics and out of them, beside PyArrow and Spark on the same rows and the same files.

A producer is measured from the first call to the end of `flush`: everything is durable and in the registry.
Beside it PyArrow makes the same columns of the same values, writes one Parquet file with zstd, and syncs the
file and its folder; it knows no registry, no offsets to be claimed and no acknowledgements. A consumer is
measured from its opening to its last record; beside it PyArrow reads the very segments.

Single records are found in a topic with very many segments. Most of them are rows of the registry only; those
that are asked for have files.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.asked import Asked, Say
from bench.measure import Effort, Latency, Side, latencies, timed
from bench.places import Ground, Place
from bench.registry import _INSERT_SEGMENT, _MOVE_WATERMARK
from bench.report import Result
from lakebook import Book, SegmentInfo
from lakebook.clock import to_ms
from lakebook.registry import schema, segments
from lakebook.registry.footers import insert_footers
from lakebook.registry.statements import SQLITE, Statement
from lakebook.registry.transactions import Transaction, new_id
from lakebook.spark.session import spark_session
from lakebook.streams.fetching import offset_at, open_segment
from lakebook.streams.producer import Producer
from lakebook.streams.records import Record, records_of
from lakebook.streams.segment_files import (
    CONTENT_SCHEMA,
    HEADERS,
    TIMESTAMP,
    SegmentFile,
    rows_per_group,
    stamped,
    store_segment,
)

#: Bytes of a record's value, and different keys where there are some.
_BYTES, _KEYS = 100, 10_000
_PARTITIONS = 8
#: A topic that is read has so many segments; as Arrow there are so many times the records.
_SEGMENTS, _TIMES = 8, 10
_ROUNDS, _FEW_ROUNDS = 7, 3
_SPARK_ROUNDS, _FEW_SPARK_ROUNDS = 9, 3
_SOURCE_ROUNDS, _FEW_SOURCE_ROUNDS = 5, 1
#: Of what Spark alone does.
_LEAST_OF_SPARK = 0.8
#: Single calls have more time than others: their percentiles want many of them.
_SINGLES, _FEW_SINGLES = 2.0, 0.1
_FIRST_TIME = datetime(2026, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_AT_ONCE = 10_000
#: Records of one `send_many`.
_MANY = 1_000
#: Records of segments without a file, and of those with one: how many there are, and what each has.
_RECORDS = 1_000
_FILES = {"0.1 MB": (64, 1_000), "8 MB": (8, 120_000)}
_TOPIC = "orders"
_SEGMENT_COLUMNS = tuple(column.name for column in schema.segments.columns)
_CORES = 2
_SETTINGS = {"spark.driver.memory": "2g", "spark.log.level": "ERROR"}

Work = Callable[[], float]


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """Into topics, out of them, by Spark, and one record at a time."""
    with ground.new(asked.records, "streams") as place:
        book = place.open(publish="off")
        yield from _produce(place, book, asked, say)
        yield from _consume(place, book, asked, say)
        yield from _acknowledge(place, book, asked, say)
        if ground.kind == asked.kinds[0]:
            # The registry's part of it is a few milliseconds on each.
            yield from _spark(place, book, asked, say)
    with ground.new(asked.among, "found") as place:
        yield from _find(place, asked, say)


def _in_turns(works: Mapping[str, Work], rounds: int, say: Say, what: str) -> dict[str, float]:
    """The median seconds of each work. They take turns, and another one goes first each time."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    order = list(works)
    for name in order:
        works[name]()
    gc.collect()
    for number in range(rounds):
        say(f"streams: {what}", number, rounds)
        for name in order:
            taken[name].append(works[name]())
        order = [*order[1:], order[0]]
    return {name: median(seconds) for name, seconds in taken.items()}


def _rates(
    name: str, kind: str, records: int, ours: float, peer: float, at_least: float | None = None
) -> Iterator[Result]:
    """The same as records and as megabytes per second."""
    yield Result(name, kind, records, records / ours, records / peer, "records/s", at_least=at_least)
    megabytes = records * _BYTES / 1e6
    yield Result(name, kind, records, megabytes / ours, megabytes / peer, "MB/s")


def _values(number: int) -> list[bytes]:
    """Values of which compression makes half, as it does of much that people write."""
    chance = random.Random(7)
    return [chance.randbytes(_BYTES // 2).hex().encode() for _ in range(number)]


def _times(first_ms: int, number: int) -> pa.Array:
    """Times a millisecond apart."""
    return pa.array(range(first_ms * 1000, (first_ms + number) * 1000, 1000), pa.int64()).cast(TIMESTAMP)


# --- producing ------------------------------------------------------------------


@dataclass
class _Bare:
    """What PyArrow does with the same rows: one durable Parquet file, and nothing else."""

    folder: Path
    names: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)

    def write(self, rows: pa.Table) -> Path:
        """Write the columns of a segment to a new file, and sync it and its folder."""
        path = self.folder / f"{next(self.names)}.parquet"
        with path.open("wb") as file:
            # Values do not repeat; a dictionary would only slow it down.
            pq.write_table(rows, file, compression="zstd", use_dictionary=["key"], row_group_size=rows_per_group(rows))
            file.flush()
            os.fsync(file.fileno())
        number = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
        return path

    def from_objects(self, values: Sequence[bytes], keys: Sequence[bytes | None]) -> float:
        """Seconds from lists of bytes to a file."""
        return self._timed(lambda: _columns(pa.array(values, pa.binary()), pa.array(keys, pa.binary())))

    def from_arrow(self, values: pa.Array, keys: pa.Array) -> float:
        """Seconds from Arrow to a file."""
        return self._timed(lambda: _columns(values, keys))

    def _timed(self, make: Callable[[], pa.Table]) -> float:
        taken, path = timed(lambda: self.write(make()))
        path.unlink()
        return taken


def _columns(values: pa.Array, keys: pa.Array, times: pa.Array | None = None, base: int = 0) -> pa.Table:
    """The columns of a segment."""
    number = len(values)
    if times is None:
        times = pa.repeat(pa.scalar(_FIRST_TIME, TIMESTAMP), number)
    content = pa.Table.from_arrays([times, keys, values, pa.nulls(number, HEADERS)], schema=CONTENT_SCHEMA)
    return stamped(content, 0, base)


@dataclass(frozen=True)
class _Given:
    """What is sent: as objects, and as Arrow."""

    values: list[bytes]
    keys: list[bytes | None]

    def arrow(self) -> tuple[pa.Array, pa.Array]:
        return pa.array(self.values, pa.binary()), pa.array(self.keys, pa.binary())

    def table(self) -> pa.Table:
        values, keys = self.arrow()
        return pa.table({"value": values} if self.keys[0] is None else {"key": keys, "value": values})


def _produce(place: Place, book: Book, asked: Asked, say: Say) -> Iterator[Result]:
    values = _values(asked.records)
    keys: list[bytes | None] = [f"customer-{number % _KEYS:07}".encode() for number in range(len(values))]
    bare = _Bare(book.lake.store.local_path("bare") or Path())
    rounds = _FEW_ROUNDS if asked.quick else _ROUNDS
    for how, partitions, given in (
        ("", 1, _Given(values, [None] * len(values))),
        (f", by key to {_PARTITIONS} partitions", _PARTITIONS, _Given(values, keys)),
    ):
        topic = f"sent-{partitions}"
        book.metadata.create_topic(topic, partitions)
        with book.producer(topic) as producer:
            works = _produce_works(producer, given, bare)
            found = _in_turns(works, rounds, say, f"producing{how}")
        for name, peer, times in (("send", "objects", 1), ("send_many", "objects", 1), ("send_table", "Arrow", _TIMES)):
            yield from _rates(f"produce: {name}{how}", place.kind, asked.records * times, found[name], found[peer])


def _produce_works(producer: Producer, given: _Given, bare: _Bare) -> dict[str, Work]:
    many: Sequence[Any] = given.values
    if given.keys[0] is not None:
        many = [{"key": key, "value": value} for key, value in zip(given.keys, given.values, strict=True)]
    table = given.table()
    repeated = [pa.chunked_array([column] * _TIMES).combine_chunks() for column in given.arrow()]

    def send() -> None:
        for value, key in zip(given.values, given.keys, strict=True):
            producer.send(value, key)
        producer.flush()

    def send_many() -> None:
        for start in range(0, len(many), _MANY):
            producer.send_many(many[start : start + _MANY])
        producer.flush()

    def send_table() -> None:
        for _ in range(_TIMES):
            producer.send_table(table)
        producer.flush()

    return {
        "send": lambda: timed(send)[0],
        "send_many": lambda: timed(send_many)[0],
        "objects": lambda: bare.from_objects(given.values, given.keys),
        "send_table": lambda: timed(send_table)[0],
        "Arrow": lambda: bare.from_arrow(*repeated),
    }


# --- consuming ------------------------------------------------------------------


def _fill(book: Book, topic: str, number: int, times: int = 1) -> list[str]:
    """A topic of one partition with so many records in a few segments; where these are."""
    book.metadata.create_topic(topic, 1, config={"segment.records": str(-(-number * times // _SEGMENTS))})
    # Each with a time of its own: equal ones would be converted once for all.
    table = _Given(_values(number), [None]).table()
    table = table.append_column("timestamp", _times(to_ms(_FIRST_TIME), number))
    with book.producer(topic) as producer:
        for _ in range(times):
            producer.send_table(table)
    return _paths(book, topic)


def _paths(book: Book, topic: str) -> list[str]:
    """Where the segments of a topic are."""
    return [str(book.lake.store.local_path(item.s3_key)) for item in book.metadata.each_segment(topic, 0)]


def _consume(place: Place, book: Book, asked: Asked, say: Say) -> Iterator[Result]:
    say("streams: filling")
    few, many = asked.records, asked.records * _TIMES
    paths, more_paths = _fill(book, "few", few), _fill(book, "many", many // _TIMES, _TIMES)

    def polled() -> int:
        left = few
        with book.consumer("few") as consumer:
            while left:
                left -= len(consumer.poll())
        return few

    def iterated() -> int:
        with book.consumer("few") as consumer:
            return sum(1 for _ in consumer.until_end())

    def in_python() -> int:
        table = pq.read_table(paths)
        columns = [table.column(name).to_pylist() for name in ("partition", "offset", "timestamp", "key", "value")]
        return sum(1 for _ in zip(*columns, strict=True))

    def batches() -> int:
        left = many
        with book.consumer("many") as consumer:
            while left:
                left -= sum(batch.num_rows for _, batch in consumer.poll_batches())
        return many

    rounds = _FEW_ROUNDS if asked.quick else _ROUNDS
    works = {"poll": polled, "iterating": iterated, "bare": lambda: pq.read_table(paths).num_rows, "Python": in_python}
    found = _in_turns({name: _counting(work, few) for name, work in works.items()}, rounds, say, "consuming")
    yield from _rates("consume: poll, beside read_table", place.kind, few, found["poll"], found["bare"])
    for name in ("poll", "iterating"):
        yield from _rates(
            f"consume: {name}, beside read_table and to_pylist", place.kind, few, found[name], found["Python"]
        )
    works = {"poll_batches": batches, "read_table": lambda: pq.read_table(more_paths).num_rows}
    found = _in_turns({name: _counting(work, many) for name, work in works.items()}, rounds, say, "consuming Arrow")
    ours, peer = found["poll_batches"], found["read_table"]
    yield from _rates("consume: poll_batches, beside read_table", place.kind, many, ours, peer)


def _counting(work: Callable[[], int], number: int) -> Work:
    """A work that finds so many records."""

    def run() -> float:
        taken, found = timed(work)
        assert found == number
        return taken

    return run


# --- acknowledgements -----------------------------------------------------------


@dataclass
class _BareAppends:
    """The least that makes one record durable and known: a file, and a transaction that says so."""

    place: Place
    book: Book
    bare: _Bare
    topic_id: int
    offset: int = 0

    def __post_init__(self) -> None:
        self.connection = self.place.connect(copy=True)

    def append(self, value: bytes) -> None:
        """Write a file, record it in the copy of the book, and move the watermark."""
        path = self.bare.write(_columns(pa.array([value], pa.binary()), pa.nulls(1, pa.binary()), base=self.offset))
        now = to_ms(datetime.now(UTC))
        known: dict[str, Any] = dict.fromkeys(("min_timestamp", "max_timestamp", "newest_timestamp", "created_at"), now)
        known |= {"id": new_id(), "topic_id": self.topic_id, "partition_id": 0, "record_count": 1}
        known |= {"base_offset": self.offset, "end_offset": self.offset, "size_bytes": path.stat().st_size}
        # The book's epoch stands for the commit's id, which is as long.
        known |= {"s3_bucket": str(self.book.warehouse.recorded), "commit_id": self.book.identity.epoch}
        known["s3_key"] = f"bare/{path.name}"
        execute = self.connection.execute
        execute("BEGIN IMMEDIATE" if self.place.kind == SQLITE else "BEGIN")
        execute(_INSERT_SEGMENT.on(self.place.kind).sql, [known.get(name) for name in _SEGMENT_COLUMNS])
        execute(_MOVE_WATERMARK.on(self.place.kind).sql, (self.offset + 1, now, self.topic_id, 0))
        execute("COMMIT")
        self.offset += 1


def _acknowledge(place: Place, book: Book, asked: Asked, say: Say) -> Iterator[Result]:
    say("streams: acknowledgements")
    book.metadata.create_topic("single", 1)
    with place.open_copy() as copy:
        topic_id = copy.metadata.create_topic("single", 1).id
    bare = _BareAppends(place, book, _Bare(book.lake.store.local_path("bare-single") or Path()), topic_id)
    values = _values(1)
    with book.producer("single") as producer:

        def acknowledged(value: bytes) -> None:
            producer.send(value)
            producer.flush()

        sides = [Side(_each(call), lambda number: values * number) for call in (acknowledged, bare.append)]
        ours, peer = latencies(sides[0], sides[1], _singles(asked), turn=20)
    yield from _percentiles("the acknowledgement of one record", place.kind, 1, ours, peer)


def _singles(asked: Asked) -> Effort:
    return replace(asked.effort, seconds=_FEW_SINGLES if asked.quick else _SINGLES)


def _each(call: Callable[[Any], object]) -> Callable[[Sequence[Any]], None]:
    def run(values: Sequence[Any]) -> None:
        for value in values:
            call(value)

    return run


def _percentiles(title: str, kind: str, size: int, ours: Latency, peer: Latency) -> Iterator[Result]:
    yield Result(f"p50 of {title}", kind, size, ours.p50, peer.p50, "ms")
    yield Result(f"p99 of {title}", kind, size, ours.p99, peer.p99, "ms")


# --- Spark ----------------------------------------------------------------------


def _spark(place: Place, book: Book, asked: Asked, say: Say) -> Iterator[Result]:
    say("streams: starting Spark")
    paths = _paths(book, "many")
    spark: Any = spark_session("bench", master=f"local[{_CORES}]", **_SETTINGS)
    try:
        yield from _spark_reads(place, book, spark, paths, asked, say)
    finally:
        spark.stop()


def _spark_reads(place: Place, book: Book, spark: Any, paths: list[str], asked: Asked, say: Say) -> Iterator[Result]:
    number = asked.records * _TIMES
    columns = book.topics["many"].read(spark).schema
    frames: dict[str, Callable[[], Any]] = {
        "topic.read": lambda: book.topics["many"].read(spark),
        "spark.read.parquet": lambda: spark.read.parquet(*paths),
        "the same with its schema": lambda: spark.read.schema(columns).parquet(*paths),
    }
    source = spark.read.format("lakebook").options(book=place.target[0], topic="many")

    def work(frame: Callable[[], Any]) -> Work:
        def run() -> None:
            (row,) = frame().selectExpr("sum(length(value)) AS bytes", "count(*) AS records").collect()
            assert (row.bytes, row.records) == (number * _BYTES, number)

        return lambda: timed(run)[0]

    rounds = _FEW_SPARK_ROUNDS if asked.quick else _SPARK_ROUNDS
    works = {name: work(frame) for name, frame in frames.items()}
    found = _in_turns(works, rounds, say, "Spark")
    ours = found["topic.read"]
    for peer in list(frames)[1:]:
        target = _LEAST_OF_SPARK if peer == "spark.read.parquet" else None
        yield from _rates(f"Spark: topic.read, beside {peer}", place.kind, number, ours, found[peer], target)
    two = {"source": work(source.load), "peer": works["spark.read.parquet"]}
    found = _in_turns(two, _FEW_SOURCE_ROUNDS if asked.quick else _SOURCE_ROUNDS, say, "the data source")
    title = "Spark: format('lakebook'), beside spark.read.parquet"
    yield from _rates(title, place.kind, number, found["source"], found["peer"])


# --- one record among many ------------------------------------------------------


@dataclass
class _Log:
    """A partition with very many segments, of which some have files."""

    place: Place
    book: Book
    random: random.Random = field(default_factory=lambda: random.Random(7))
    #: By their sort: the segments with a file.
    files: dict[str, list[SegmentInfo]] = field(default_factory=lambda: {name: [] for name in _FILES})

    def fill(self, among: int, say: Say) -> None:
        """Record the segments. Those with a file lie evenly among the others."""
        self.book.metadata.create_topic(_TOPIC, 1)
        kinds: dict[int, str] = {}
        for name, (number, _) in _FILES.items():
            kinds |= {place * among // (number + 1): name for place in range(1, number + 1)}
        values = pa.array(_values(max(records for _, records in _FILES.values())), pa.binary())
        base = 0
        for start in range(0, among, _AT_ONCE):
            say("streams: segments", start, among)
            new, footers = [], []
            for place in range(start, min(start + _AT_ONCE, among)):
                if place in kinds:
                    file = self._store(values[: _FILES[kinds[place]][1]], base)
                    footers.append((file.path, file.footer, file.record_count, file.size))
                    new.append(_described(file))
                    self.files[kinds[place]].append(new[-1])
                else:
                    new.append(_row(base))
                base = new[-1].end_offset + 1
            self.book.metadata.add_segments(new)

            def enter(transaction: Transaction, rows: Sequence[tuple[str, bytes, int, int]] = footers) -> None:
                insert_footers(transaction, rows)

            self.book.lake.registry.write(enter)
        self.place.analyze()

    def _store(self, values: pa.Array, base: int) -> SegmentFile:
        times = _times(to_ms(_FIRST_TIME) + base, len(values))
        rows = _columns(values, pa.nulls(len(values), pa.binary()), times, base)
        return store_segment(self.book.lake.store, f"found/{base}.parquet", rows)

    def draw(self, sort: str) -> Callable[[int], list[int]]:
        """Offsets of records that have a file of this sort."""
        files = self.files[sort]
        chance = self.random

        def some(number: int) -> list[int]:
            chosen = [chance.choice(files) for _ in range(number)]
            return [chance.randint(item.base_offset, item.end_offset) for item in chosen]

        return some


def _row(base: int) -> SegmentInfo:
    """A segment without a file."""
    first = _FIRST_TIME + base * _MILLISECOND
    return SegmentInfo(
        topic=_TOPIC,
        partition_id=0,
        base_offset=base,
        end_offset=base + _RECORDS - 1,
        record_count=_RECORDS,
        size_bytes=_RECORDS * _BYTES,
        s3_key=f"found/{base}.parquet",
        min_timestamp=first,
        max_timestamp=first + (_RECORDS - 1) * _MILLISECOND,
    )


def _described(file: SegmentFile) -> SegmentInfo:
    return replace(
        _row(file.base_offset),
        end_offset=file.base_offset + file.record_count - 1,
        record_count=file.record_count,
        size_bytes=file.size,
        min_timestamp=file.min_timestamp,
        max_timestamp=file.max_timestamp,
        checksum=file.checksum,
    )


@dataclass
class _BareFinds:
    """The driver finds the segment, and PyArrow reads the row group from its file."""

    log: _Log

    def __post_init__(self) -> None:
        self.connection = self.log.place.connect()
        self.store = self.log.book.lake.store

    def _segment(self, statement: Statement, value: int) -> tuple[Path, int]:
        compiled = statement.on(self.log.place.kind)
        values = (_TOPIC, 0, value)
        row = self.connection.execute(compiled.sql, compiled.arrange(values) if compiled.arrange else values).fetchone()
        path = self.store.local_path(row[segments.S3_KEY])
        assert path is not None
        return path, row[segments.BASE_OFFSET]

    def by_offset(self, offset: int) -> pa.Table:
        """The record of an offset."""
        path, base = self._segment(segments.FIND_BY_OFFSET, offset)
        with pq.ParquetFile(path) as file:
            return _record_in(file, offset - base)

    def by_time(self, offset: int) -> pa.Table:
        """The record of the time that the record of an offset has."""
        moment = _FIRST_TIME + offset * _MILLISECOND
        path, _ = self._segment(segments.FIND_BY_TIMESTAMP, to_ms(moment))
        with pq.ParquetFile(path) as file:
            times = file.read(["timestamp"]).column(0)
            return _record_in(file, pc.index(times, pa.scalar(moment, TIMESTAMP)).as_py())


def _record_in(file: pq.ParquetFile, place: int) -> pa.Table:
    """The row at a place of a file, out of the one row group that has it."""
    for number in range(file.num_row_groups):
        rows = file.metadata.row_group(number).num_rows
        if place < rows:
            return file.read_row_group(number).slice(place, 1)
        place -= rows
    raise RuntimeError("the file has no such row")


def _find(place: Place, asked: Asked, say: Say) -> Iterator[Result]:
    # Nothing is found in memory: each record costs a look-up, a footer and a row group.
    book = place.open(publish="off", cache_segments=0, cache_footers=0)
    log = _Log(place, book)
    log.fill(asked.among, say)
    bare = _BareFinds(log)
    with book.consumer(_TOPIC, partitions=[0], start="latest") as consumer:

        def sought(where: Any) -> Record:
            consumer.seek(_TOPIC, 0, where)
            (record,) = consumer.poll(timeout=60, max_records=1)
            return record

        ways: dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]] = {
            "by its offset": (sought, bare.by_offset),
            "by its offset, without a lease": (lambda offset: _looked_up(book, offset), bare.by_offset),
            "by its time": (lambda offset: sought(_FIRST_TIME + offset * _MILLISECOND), bare.by_time),
            "by its time, without a lease": (
                lambda offset: _looked_up(book, _offset_of(book, _FIRST_TIME + offset * _MILLISECOND)),
                bare.by_time,
            ),
        }
        for sort, (_, records) in _FILES.items():
            for way, (ours, peer) in ways.items():
                if records > _RECORDS and ours is not sought:
                    continue  # The row group is what takes time.
                say(f"streams: one record {way}, row groups of {sort}")
                draw = log.draw(sort)
                _check(draw(1)[0], ours, peer)
                found = latencies(Side(_each(ours), draw), Side(_each(peer), draw), _singles(asked), turn=20)
                yield from _percentiles(
                    f"reading one record {way}, row groups of {sort}", place.kind, asked.among, *found
                )


def _check(offset: int, ours: Callable[[int], Record], peer: Callable[[int], pa.Table]) -> None:
    """Both find the record that was meant."""
    (row,) = peer(offset).to_pylist()
    record = ours(offset)
    assert (record.offset, record.value) == (offset, row["value"]) and row["offset"] == offset


def _looked_up(book: Book, offset: int) -> Record:
    segment = book.metadata.find_segment_for_offset(_TOPIC, 0, offset)
    assert segment is not None
    batch = next(open_segment(book.lake, segment).batches(offset))
    return next(iter(records_of(_TOPIC, batch.slice(0, 1))))


def _offset_of(book: Book, moment: datetime) -> int:
    offset = offset_at(book.lake, book.metadata, _TOPIC, 0, moment)
    assert offset is not None
    return offset
