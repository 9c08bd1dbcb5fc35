"""A program with Spark executors in processes of their own, whose bucket fails, and of which some are killed.

It tells as JSON what it did and what was told to it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import SparkSession

import lakebook
from fault_proxy import CLOSED, ENDLESS, ERROR, LOST, SLOW_DOWN, FaultProxy
from lakebook import Book
from lakebook.errors import LakebookError
from spark.cluster import executor
from spark.sessions import QUICK

TABLE, SCHEMA, ROWS = "t", "id BIGINT", 40
FAULTS = (ERROR, SLOW_DOWN, CLOSED, LOST)
#: S3A waits for half a second, and then for longer, before it tries again: the store of a test is well sooner.
S3A = {
    "spark.hadoop.fs.s3a.retry.interval": "20ms",
    "spark.hadoop.fs.s3a.retry.throttle.interval": "20ms",
    "spark.hadoop.fs.s3a.retry.limit": "4",
    "spark.hadoop.fs.s3a.attempts.maximum": "2",
    "spark.task.maxFailures": "3",
}
SETTINGS: dict[str, Any] = {"publish": "off", "compact_files": 2, "s3_retry_seconds": 1.0, "measure_on_spark": 0}


def kills(marks: str) -> Any:
    """Rows of a partition; the first attempt at the first one kills its executor when it has given all of them."""

    def rows(partition: int, numbers: Iterable[int]) -> Iterator[tuple[int]]:
        yield from ((number,) for number in numbers)
        context = TaskContext.get()
        assert context is not None
        if partition == 0 and context.attemptNumber() == 0:
            (Path(marks) / "insert").touch()
            os.kill(executor(), signal.SIGKILL)
            signal.pause()

    return rows


class Program:
    """What is done, and what becomes of it."""

    def __init__(self, book: Book, spark: SparkSession, proxy: FaultProxy) -> None:
        self._book, self._spark, self._proxy = book, spark, proxy
        self._table = book.tables.create(TABLE, SCHEMA)
        self._next = 0
        self.told: dict[str, Any] = {"done": 0, "failed": []}

    def insert(self) -> None:
        """Insert rows that no other insert has."""
        first, self._next = self._next, self._next + ROWS
        self._table.insert(self._spark.range(first, first + ROWS, 1, 2))
        self.told.setdefault("inserted", []).append(first)

    def compact(self) -> None:
        """Make one file of all."""
        before = self._table.count()
        self._table.compact(self._spark)
        assert self._table.count() == before

    def under(self, fault: str, times: int, skipped: int, act: Callable[[], None]) -> None:
        """Do something while the bucket fails."""
        waits = iter([False] * skipped)
        with self._proxy.faulty(fault, times=times, chosen=lambda: next(waits, True)):
            try:
                act()
                self.told["done"] += 1
            except LakebookError as error:
                self.told["failed"].append(type(error).__name__)

    def insert_with_a_killed_executor(self, marks: str) -> None:
        """One of the executors dies when its files are almost written."""
        first, self._next = self._next, self._next + ROWS
        numbers = self._spark.sparkContext.parallelize(range(first, first + ROWS), 2)
        self._table.insert(numbers.mapPartitionsWithIndex(kills(marks)).toDF(SCHEMA))
        self.told.setdefault("inserted", []).append(first)

    def compact_with_a_killed_executor(self, marks: str) -> None:
        """The first file of a compaction is about to be stored when its executor dies, and the other with it."""
        pids = set(self._spark.sparkContext.parallelize(range(2), 2).map(lambda _: executor()).collect())

        def kill() -> bool:
            mark = Path(marks) / "compaction"
            if not mark.exists():
                mark.touch()
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            return False

        with self._proxy.faulty(ERROR, "PUT .*parquet", chosen=kill):
            self.compact()


def main(target: str, folder: str, endpoint: str) -> None:
    chance = random.Random(7)
    with (
        closing(FaultProxy(endpoint)) as proxy,
        lakebook.open(target, s3_endpoint=proxy.endpoint, **SETTINGS) as book,
    ):
        quick: dict[str, Any] = {**{name: value for name, value in QUICK.items() if "driver" not in name}, **S3A}
        spark = book.spark(**quick)
        program = Program(book, spark, proxy)
        for fault, times in [*((fault, 2) for fault in FAULTS), (ERROR, ENDLESS), (LOST, ENDLESS)]:
            program.under(fault, times, chance.randrange(12), program.insert)
            # So that there is something to compact.
            program.insert()
            program.insert()
            program.under(fault, times, chance.randrange(12), program.compact)
        program.insert_with_a_killed_executor(folder)
        program.compact_with_a_killed_executor(folder)
        told = program.told
        told["ids"] = sorted(row["id"] for row in book.table(TABLE).read(spark).collect())
        told["verified"] = [finding.what for finding in book.verify(spark=spark).findings]
        told["killed"] = sorted(mark.name for mark in Path(folder).iterdir())
        # Whoever may still write is ended.
        spark.stop()
    sys.stdout.write(f"\n{json.dumps(told)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
