"""An insert through Spark, beside the same frame written by Spark alone and then made durable in the same way.

Both write Parquet with zstd, one file per task, timestamps in microseconds, into the same file
system. Ours also takes checksums, reads footers and commits a version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.asked import Asked, Say
from bench.measure import timed
from bench.places import Ground
from bench.report import Result
from lakebook import Book
from lakebook.lake.inserting import InsertReport
from lakebook.spark.session import spark_session
from lakebook.storage.objects import WORKERS, ObjectStore

_CORES = 2
#: Files of about a hundred megabytes at full size.
_TASKS = 4
_WARMING = 20_000
_ROUNDS, _FEW_ROUNDS = 5, 3
_SCHEMA = "id BIGINT, a DOUBLE, b DOUBLE, name STRING, other STRING, number INT, at TIMESTAMP"
# About fifty bytes a row, for less than the writing of them costs.
_COLUMNS = (
    "id",
    "rand(1) AS a",
    "rand(2) AS b",
    "lpad(hex(xxhash64(id)), 16, '0') AS name",
    "lpad(hex(xxhash64(id, 7)), 16, '0') AS other",
    "CAST(rand(3) * 1000000000 AS INT) AS number",
    "timestamp_micros(CAST(1700000000000000 + rand(4) * 10000000000000 AS BIGINT)) AS at",
)
_SETTINGS = {
    "spark.driver.memory": "2g",
    # As Iceberg writes them; Spark's own default is a format of the past.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.log.level": "ERROR",
}


class _TimedStore(ObjectStore):
    """A store that says how long it took to make files durable."""

    synced = 0.0

    def make_durable(self, paths: Sequence[str], workers: int = WORKERS) -> None:
        self.synced += timed(lambda: super(_TimedStore, self).make_durable(paths, workers))[0]


@dataclass
class _Sides:
    """Both sides, and what they took."""

    book: Book
    spark: Any
    store: _TimedStore
    reports: list[InsertReport] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    own_syncs: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)
    syncs: list[float] = field(default_factory=list)
    written: int = 0

    def frame(self, rows: int) -> Any:
        return self.spark.range(0, rows, 1, _TASKS).selectExpr(*_COLUMNS)

    def insert(self, rows: int) -> None:
        """Ours: acknowledged, so durable."""
        table, frame = self.book.table("t"), self.frame(rows)
        before = self.store.synced
        taken, report = timed(lambda: table.insert(frame))
        self.ours.append(taken)
        self.own_syncs.append(self.store.synced - before)
        self.reports.append(report)

    def write(self, rows: int) -> None:
        """Spark alone, into a folder of the same warehouse; then every file and folder is synced."""
        store, frame = self.store, self.frame(rows)
        folder = f"plain/{len(self.writes)}-{rows}"
        writer = frame.write.option("compression", "zstd")
        self.writes.append(timed(lambda: writer.parquet(store.uri(folder)))[0])
        found = [item for item in store.list(folder) if item.path.endswith(".parquet")]
        self.syncs.append(timed(lambda: store.make_durable([item.path for item in found]))[0])
        self.written = sum(item.size for item in found)

    def forget(self) -> None:
        """The first ones were for warming up."""
        for kept in (self.reports, self.ours, self.own_syncs, self.writes, self.syncs):
            kept.clear()


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """The whole insert, and its steps beside those of the peer."""
    if ground.kind != asked.kinds[0]:
        return  # The registry's part of it is a few milliseconds on each.
    say("inserts: starting Spark")
    spark = spark_session("bench", master=f"local[{_CORES}]", **_SETTINGS)
    try:
        with ground.new(asked.rows, "inserts") as place, closing(place.open()) as book:
            book.tables.create("t", _SCHEMA)
            # The insert is the same one; its own syncs are told apart.
            store = book.lake.store = _TimedStore(book.lake.store.warehouse)
            sides = _Sides(book, spark, store)
            _take_turns(sides, asked, say)
            yield from _results(ground.kind, asked.rows, sides)
    finally:
        spark.stop()


def _take_turns(sides: _Sides, asked: Asked, say: Say) -> None:
    sides.insert(_WARMING)
    sides.write(_WARMING)
    sides.forget()
    rounds = _FEW_ROUNDS if asked.quick else _ROUNDS
    for number in range(rounds):
        say(f"inserts: {asked.rows:,} rows", number, rounds)
        for side in (sides.insert, sides.write) if number % 2 else (sides.write, sides.insert):
            side(asked.rows)


def _results(kind: str, rows: int, sides: _Sides) -> Iterator[Result]:
    name = "insert through Spark"
    steps = {step: median(report.seconds[step] for report in sides.reports) for step in sides.reports[0].seconds}
    peer = [sum(taken) for taken in zip(sides.writes, sides.syncs, strict=True)]
    rest = median(
        taken - sum(report.seconds[step] for step in ("stage", "insert_data", "measure", "commit"))
        for taken, report in zip(sides.ours, sides.reports, strict=True)
    )
    sync, write = median(sides.syncs), median(sides.writes)
    unsynced = median(taken - synced for taken, synced in zip(sides.ours, sides.own_syncs, strict=True))
    yield Result(f"{name}, durable", kind, rows, median(sides.ours), median(peer), "s", at_most=1.05)
    yield Result(f"{name}, without the sync of its files", kind, rows, unsynced, write, "s")
    yield Result(f"{name}, its bytes", kind, rows, sides.reports[-1].bytes / 1e6, sides.written / 1e6, "MB")
    yield Result(f"{name}, only writing", kind, rows, steps["insert_data"], write, "s")
    yield Result(f"{name}, sync, checksums and footers, beside sync", kind, rows, steps["measure"], sync, "s")
    for step in ("stage", "commit"):
        yield Result(f"{name}, its step {step}", kind, rows, steps[step], None, "s")
    yield Result(f"{name}, before, between and after its steps", kind, rows, rest, None, "s")
