"""A program with Spark executors in processes of their own, whose bucket fails, and of which some are killed.

It tells as JSON what it did and what was told to it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import SparkSession

import lakebook
from extent import EVERYWHERE
from fault_proxy import CLOSED, ENDLESS, ERROR, HELD, LATE, LOST, SHORT, SLOW_DOWN, FaultProxy
from lakebook import Book
from lakebook.errors import LakebookError
from spark.cluster import executor
from spark.sessions import QUICK

TABLE, SCHEMA, ROWS = "t", "id BIGINT", 40
#: What the bucket does one after the other, and how often each, to an insert and to a compaction. The last one fails.
FAULTS: tuple[tuple[tuple[str, ...], int], ...] = (((SHORT, LATE, LOST), 2), ((ERROR,), ENDLESS))
if EVERYWHERE:
    FAULTS = (
        *(((fault,), 2) for fault in (ERROR, SLOW_DOWN, CLOSED, SHORT, LATE)),
        *(((fault,), ENDLESS) for fault in (SHORT, LATE)),
        *FAULTS,
        ((LOST,), 2),
        ((LOST,), ENDLESS),
    )
#: How late an answer comes that is late, but not too late.
SECONDS = 0.5
#: Rows whose bytes cannot be made fewer, so that each task's file goes in parts of the smallest size there is.
LARGE, LARGE_SCHEMA, LARGE_FILES, LARGE_ROWS, LARGE_ROW = "large", "id BIGINT, data BINARY", 3, 18, 1 << 20
PART = 5 << 20
S3A = {
    "spark.hadoop.fs.s3a.attempts.maximum": "2",
    "spark.hadoop.fs.s3a.multipart.size": str(PART),
    "spark.task.maxFailures": "3",
}
SETTINGS: dict[str, Any] = {"publish": "off", "compact_files": 2, "s3_retry_seconds": 1.0, "measure_on_spark": 0}
#: Spark's JVMs remember a bucket with its limits: others need another. A busy machine has to keep to them.
SILENT: dict[str, Any] = {**SETTINGS, "s3_request_seconds": 5.0, "s3_retry_seconds": 0.0}


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

    def under(self, faults: Sequence[str], times: int, skipped: int, act: Callable[[], None]) -> None:
        """Do something while the bucket fails."""
        with ExitStack() as stack:
            rules = [stack.enter_context(self._after(skipped, fault, times)) for fault in faults]
            try:
                act()
                self.told["done"] += 1
            except LakebookError as error:
                self.told["failed"].append(type(error).__name__)
        assert all(rule.left < times for rule in rules), rules

    def _after(self, skipped: int, fault: str, times: int) -> Any:
        """The bucket fails when it has answered some requests."""
        waits = iter([False] * skipped)
        return self._proxy.faulty(fault, times=times, seconds=SECONDS, chosen=lambda: next(waits, True))

    def insert_with_a_killed_executor(self, marks: str) -> None:
        """One of the executors dies when its files are almost written."""
        first, self._next = self._next, self._next + ROWS
        numbers = self._spark.sparkContext.parallelize(range(first, first + ROWS), 2)
        self._table.insert(numbers.mapPartitionsWithIndex(kills(marks)).toDF(SCHEMA))
        self.told.setdefault("inserted", []).append(first)

    def killing(self, mark: Path, fits: str) -> Any:
        """The executors die when the first request that fits has come, and before the store has it."""
        pids = set(self._spark.sparkContext.parallelize(range(2), 2).map(lambda _: executor()).collect())

        def kill() -> bool:
            if not mark.exists():
                mark.touch()
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            return False

        return self._proxy.faulty(ERROR, fits, chosen=kill)

    def compact_with_a_killed_executor(self, marks: str) -> None:
        """The first file of a compaction is about to be stored when its executor dies, and the other with it."""
        with self.killing(Path(marks) / "compaction", "PUT .*parquet"):
            self.compact()

    def kill_amid_parts(self, marks: str) -> None:
        """The executors die while they upload files in parts: those of an insert, and that of a compaction."""
        table = self._book.tables.create(LARGE, LARGE_SCHEMA)
        # Of two files the one that is a little larger would not be worth a compaction.
        numbers = self._spark.sparkContext.parallelize(range(LARGE_ROWS), LARGE_FILES)
        large = numbers.map(lambda number: (number, os.urandom(LARGE_ROW))).toDF(LARGE_SCHEMA)
        with self.killing(Path(marks) / "parts of an insert", "PUT .*parquet.*partNumber=2"):
            self.told["large"] = table.insert(large).files
        with self.killing(Path(marks) / "parts of a compaction", "PUT .*parquet.*partNumber=3"):
            table.compact(self._spark)
        self.told["large ids"] = sorted(row["id"] for row in table.read(self._spark).select("id").collect())


def write_into_silence(book: Book, spark: SparkSession, proxy: FaultProxy) -> list[str]:
    """What an insert and a compaction are told whose files the store takes without ever a word.

    Before that it answers once too late.
    """
    table = book.tables.create(TABLE, SCHEMA)
    with proxy.faulty(LATE, "PUT .*parquet", seconds=2 * SILENT["s3_request_seconds"]) as late:
        table.insert(spark.range(0, ROWS, 1, 2))
        assert late.left == 0
    told = []
    for act in (lambda: table.insert(spark.range(0, ROWS, 1, 2)), lambda: table.compact(spark)):
        with proxy.faulty(HELD, "PUT .*parquet", ENDLESS) as held:
            try:
                act()
                told.append("nothing")
            except LakebookError as error:
                told.append(type(error).__name__)
            assert held.left < ENDLESS
        assert table.count() == ROWS
    return told


def said_while_debugging(book: Book, spark: SparkSession) -> list[bool]:
    """Whether py4j's log has the bucket's name, and its key and secret, when a session is let into the bucket."""
    said, speaker = io.StringIO(), logging.getLogger("py4j")
    handler, level = logging.StreamHandler(said), speaker.level
    speaker.addHandler(handler)
    speaker.setLevel(logging.DEBUG)
    try:
        book.table(TABLE).read(spark)
    finally:
        speaker.setLevel(level)
        speaker.removeHandler(handler)
    settings = book.settings
    words = (settings.warehouse.split("/")[2], settings.s3_access_key_id, settings.s3_secret_access_key)
    return [word in said.getvalue() for word in words]


def main(target: str, folder: str, endpoint: str, silent: str, silent_bucket: str) -> None:
    chance = random.Random(7)
    with (
        closing(FaultProxy(endpoint)) as proxy,
        lakebook.open(target, s3_endpoint=proxy.endpoint, **SETTINGS) as book,
        lakebook.open(silent, s3_endpoint=proxy.endpoint, warehouse=silent_bucket, **SILENT) as other,
    ):
        quick: dict[str, Any] = {**{name: value for name, value in QUICK.items() if "driver" not in name}, **S3A}
        spark = book.spark(**quick)
        program = Program(book, spark, proxy)
        for faults, times in FAULTS:
            program.under(faults, times, chance.randrange(12), program.insert)
            # So that there is something to compact.
            program.insert()
            program.insert()
            program.under(faults, times, chance.randrange(12), program.compact)
        if EVERYWHERE:
            program.insert_with_a_killed_executor(folder)
            program.compact_with_a_killed_executor(folder)
        program.kill_amid_parts(folder)
        told = program.told
        told["said"] = said_while_debugging(book, spark)
        if EVERYWHERE:
            told["silent"] = write_into_silence(other, spark, proxy)
        told["ids"] = sorted(row["id"] for row in book.table(TABLE).read(spark).collect())
        told["verified"] = [finding.what for finding in book.verify(spark=spark).findings]
        told["killed"] = sorted(mark.name for mark in Path(folder).iterdir())
        # Whoever may still write is ended.
        spark.stop()
    sys.stdout.write(f"\n{json.dumps(told)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
