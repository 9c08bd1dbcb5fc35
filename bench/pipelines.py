"""Pipelines: a topic into a table, beside a plain Spark job that reads the same segments and writes Parquet.

Both decode the same JSON, apply the same query and write the same rows; the plain job is followed by the same fsync
of its files, and knows no offsets, no table and no dead letters. Asking a view of very many ranges what is to be
done, and counting its rows, need the registry alone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pyarrow as pa

from bench.asked import Asked, Say
from bench.places import Ground
from bench.report import Result
from lakebook import Book
from lakebook.spark.pipelines import Decoder, decoded, good_rows, transformed
from lakebook.spark.session import spark_session
from lakebook.streams.topic import frame_of

_PARTITIONS, _SEGMENTS = 4, 8
_ROUNDS, _FEW = 7, 3
_LEAST = 0.9
_SCHEMA = "id BIGINT NOT NULL, page STRING, amount DOUBLE"
_SQL = "SELECT id, upper(page) AS page, amount * 2 AS amount FROM source WHERE id % 10 <> 0"
_COLUMNS = {
    "type": "struct",
    "fields": [
        {"name": "id", "type": "long", "nullable": False, "metadata": {}},
        {"name": "page", "type": "string", "nullable": True, "metadata": {}},
        {"name": "amount", "type": "double", "nullable": True, "metadata": {}},
    ],
}
_SETTINGS = {"spark.driver.memory": "2g", "spark.log.level": "ERROR"}
_numbers = count(1)


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """A topic into a table; on the first of the databases only, for the registry's part is a few milliseconds."""
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
    from lakebook.streams.pinning import Pin
    from lakebook.streams.ranges import select

    target = folder / f"plain{next(_numbers)}"
    with Pin(book.lake) as pin:
        selection = select(book.lake, book.metadata, pin, "clicks")
        begun = perf_counter()
        frame = frame_of(book.lake, spark, selection)
        rows = good_rows(
            decoded(frame.selectExpr("'clicks' AS topic", "*"), Decoder("json", _COLUMNS)),
            Decoder("json", _COLUMNS),
            provenance=False,
        )
        transformed(rows, _SQL, None).write.option("compression", "zstd").parquet(str(target))
        for file in target.iterdir():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        seconds = perf_counter() - begun
    shutil.rmtree(target)
    return seconds
