"""Pipelines: a topic into a table, beside a plain Spark job that reads the same segments and writes Parquet.

Both decode the same JSON, apply the same query and write the same rows; the plain job is followed by the same fsync
of its files, looks for no record that does not fit, and knows no offsets and no table. Asking a view of very many
ranges what is to be done, and counting its rows, need the registry alone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pyarrow as pa

from bench.asked import Asked, Say
from bench.measure import Side, compare
from bench.places import Ground, Place
from bench.report import Result
from lakebook import Book
from lakebook.clock import to_ms
from lakebook.registry import schema
from lakebook.registry.ranges import COUNT_ALL_ROWS, INSERT_RANGE, RANGES_BETWEEN
from lakebook.registry.views import GLOBAL
from lakebook.spark.pipelines import transformed
from lakebook.spark.session import spark_session
from lakebook.streams.topic import frame_of

_PARTITIONS, _SEGMENTS = 4, 8
_ROUNDS, _FEW = 7, 3
_LEAST = 0.9
_SCHEMA = "id BIGINT NOT NULL, page STRING, amount DOUBLE"
_SQL = "SELECT id, upper(page) AS page, amount * 2 AS amount FROM source WHERE id % 10 <> 0"
_SETTINGS = {"spark.driver.memory": "2g", "spark.log.level": "ERROR"}
_numbers = count(1)
_RANGES, _MINUTE = 10_000, 60_000
_FIRST = datetime(2026, 1, 1, tzinfo=UTC)


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """Views by the registry alone; and a topic into a table, on the first of the databases: its part is small there."""
    with ground.new(_RANGES, "views") as place:
        yield from _views(place, asked, say)
    if ground.kind != asked.kinds[0]:
        return
    records = 4 * asked.records
    with ground.new(records, "pipelines") as place:
        book = place.open(publish="off")
        say("pipelines: filling a topic")
        _fill(book, records)
        spark = spark_session(master="local[2]", **_SETTINGS)
        try:
            with tempfile.TemporaryDirectory(dir=book.warehouse.folder) as folder:
                yield _throughput(Path(folder), book, spark, records, asked, say, ground.kind)
        finally:
            spark.stop()


def _fill(book: Book, records: int) -> None:
    book.topics.create("clicks", _PARTITIONS)
    each = records // (_PARTITIONS * _SEGMENTS)
    with book.producer("clicks", buffer=1024**3) as producer:
        for number in range(_PARTITIONS * _SEGMENTS):
            first = number * each
            values = [
                b'{"id":%d,"page":"/p%d","amount":%d.5}' % (n, n % 1000, n % 97) for n in range(first, first + each)
            ]
            part = pa.array([number % _PARTITIONS] * each, pa.int32())
            producer.send_table(pa.table({"partition": part, "value": pa.array(values, pa.binary())}))
            producer.flush()


def _throughput(folder: Path, book: Book, spark: Any, records: int, asked: Asked, say: Say, kind: str) -> Result:
    taken: dict[str, list[float]] = {"ours": [], "plain": []}
    works = {"ours": partial(_ours, book, spark), "plain": partial(_plain, folder, book, spark)}
    order = list(works)
    for name in order:
        works[name]()
    rounds = _FEW if asked.quick else _ROUNDS
    for number in range(rounds):
        say("pipelines: a topic into a table", number, rounds)
        for name in order:
            taken[name].append(works[name]())
        order.reverse()
    ours, plain = median(taken["ours"]), median(taken["plain"])
    return Result(
        "pipeline: a topic into a table, beside the same by Spark alone with fsync",
        kind,
        records,
        records / ours,
        records / plain,
        "records/s",
        at_least=_LEAST,
    )


def _ours(book: Book, spark: Any) -> float:
    """A new pipeline over all records into a new table."""
    name = f"p{next(_numbers)}"
    table = book.tables.create(name, _SCHEMA)
    pipeline = book.pipelines.create(name, topics="clicks", into=name, decoder="json", schema=_SCHEMA, sql=_SQL)
    begun = perf_counter()
    report = pipeline.run(spark)
    seconds = perf_counter() - begun
    assert report.batches == 1 and table.count() == report.rows
    pipeline.delete()
    return seconds


def _plain(folder: Path, book: Book, spark: Any) -> float:
    """What one would write by hand: read the segments, decode, transform, write, sync."""
    from pyspark.sql import functions

    from lakebook.streams.pinning import Pin
    from lakebook.streams.ranges import select

    target = folder / f"plain{next(_numbers)}"
    with Pin(book.lake) as pin:
        selection = select(book.lake, book.metadata, pin, "clicks")
        begun = perf_counter()
        frame = frame_of(book.lake, spark, selection)
        parsed = functions.from_json(functions.col("value").cast("string"), _SCHEMA.replace(" NOT NULL", ""))
        rows = frame.select(parsed.alias("record")).select("record.*")
        transformed(rows, _SQL, None).write.option("compression", "zstd").parquet(str(target))
        for file in target.iterdir():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        seconds = perf_counter() - begun
    shutil.rmtree(target)
    return seconds


def _views(place: Place, asked: Asked, say: Say) -> Iterator[Result]:
    """What of a view of many ranges is to be built, and how many rows it has."""
    say("views: filling the registry")
    book = place.open(publish="off")
    book.tables.create("clicks", "id BIGINT, at TIMESTAMP")
    view = book.views.create("v", "SELECT at, id FROM clicks", event_time="at", interval="minute")
    begin = to_ms(_FIRST)
    book._registry.write(
        lambda transaction: transaction.insert_many(
            INSERT_RANGE,
            [_range(view.record.schema_hash, begin + number * _MINUTE) for number in range(_RANGES)],
        )
    )
    end = _FIRST + timedelta(milliseconds=_RANGES * _MINUTE)
    connection = place.connect()
    sql = RANGES_BETWEEN.on(book._registry.kind)
    values = ("v", GLOBAL, begin, to_ms(end))
    arranged = sql.arrange(values) if sql.arrange else values

    def ours(_: Sequence[Any]) -> None:
        assert not any(item.is_due() for item in view.plan(_FIRST, end))

    def peer(_: Sequence[Any]) -> None:
        assert len(connection.execute(sql.sql, arranged).fetchall()) == _RANGES

    def one(number: int) -> Sequence[Any]:
        return [None] * number

    say("views: an up-to-date check")
    found = compare(_each(ours, one), _each(peer, one), asked.effort)
    yield Result(
        "view: up-to-date check of all ranges, beside the same rows by the driver",
        place.kind,
        _RANGES,
        found.ours * 1000,
        found.peer * 1000,
        "ms",
    )
    counting = COUNT_ALL_ROWS.on(book._registry.kind)
    named = ("v", GLOBAL)
    say("views: COUNT(*)")
    found = compare(
        _each(lambda _: view.count(), one),
        _each(lambda _: connection.execute(counting.sql, named).fetchone(), one),
        asked.effort,
    )
    yield Result("view: COUNT(*) from the registry", place.kind, _RANGES, found.ours * 1000, found.peer * 1000, "ms")
    connection.close()


def _each(act: Callable[[Any], object], draw: Callable[[int], Sequence[Any]]) -> Side:
    def run(values: Sequence[Any]) -> None:
        for value in values:
            act(value)

    return Side(run, draw)


def _range(schema_hash: str, begin: int) -> tuple[Any, ...]:
    """A range of a minute without rows, as `lakehouse_partitions` has it."""
    values = {
        "view_set_name": "v",
        "view_instance_id": GLOBAL,
        "begin_insert_time": begin,
        "end_insert_time": begin + _MINUTE,
        "schema_hash": schema_hash,
        "source_hash": "",
        "num_rows": 0,
        "file_size": 0,
        "partition_format_version": 2,
        "updated": begin,
    }
    return tuple(values.get(str(column.name)) for column in list(schema.lakehouse_partitions.columns)[1:])
