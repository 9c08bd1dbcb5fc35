"""A program with a Spark session of its own: its tasks fail at first, it has no Iceberg, or its JVM is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

import lakebook
from lakebook.errors import LakebookError
from lakebook.spark.keeping import KeptSession
from lakebook.spark.session import is_alive, spark_session

#: The rows of tests are few: making plans fast would take longer than they run.
QUICK = {
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
TABLE = "t"
ROWS = 100
PARTITIONS = 2


def fails_at_first(marks: str) -> Any:
    """Rows of a partition; the first attempt at it fails when it has given all of them."""

    def rows(numbers: Iterable[int]) -> Iterator[tuple[int]]:
        given = list(numbers)
        yield from ((number,) for number in given)
        mark = Path(marks) / str(given[0])
        if not mark.exists():
            mark.touch()
            raise OSError("the disk of this executor is gone")

    return rows


def retried(folder: str, marks: str) -> dict[str, Any]:
    """Insert rows with tasks that are tried three times."""
    spark = spark_session(master="local[2,3]", **QUICK)
    numbers = spark.sparkContext.parallelize(range(ROWS), PARTITIONS)
    with lakebook.open(folder) as book:
        report = book.table(TABLE).insert(numbers.mapPartitions(fails_at_first(marks)).toDF("id BIGINT"))
    spark.stop()
    return {"rows": report.rows, "files": report.files, "failed": len(list(Path(marks).iterdir()))}


def without_runtime(folder: str, _: str) -> dict[str, Any]:
    """What a session that is Spark's alone is told."""
    builder: SparkSession.Builder = SparkSession.builder
    spark = builder.master("local[1]").config(map={**QUICK, "spark.ui.enabled": "false"}).getOrCreate()
    frame = spark.range(3).toDF("id")
    told = {}
    with lakebook.open(folder) as book:
        table = book.table(TABLE)
        acts: dict[str, Callable[[], object]] = {
            "insert": lambda: table.insert(frame),
            "overwrite": lambda: table.overwrite(frame),
            "delete": lambda: table.delete("id = 1", spark=spark),
            "read": lambda: table.read(spark),
            "insert_json": lambda: table.insert_json(spark, folder),
        }
        for name, act in acts.items():
            try:
                act()
                told[name] = ["nothing", ""]
            except LakebookError as error:
                told[name] = [type(error).__name__, str(error)]
        spark.stop()
        try:
            book.verify(spark=spark)
        except LakebookError as error:
            told["stopped"] = [type(error).__name__, str(error)]
    return told


def killed(folder: str, _: str) -> dict[str, Any]:
    """Insert rows, and more of them after the JVM was killed; what lived when."""
    session = KeptSession(lambda: spark_session(master="local[1]", **QUICK))
    lived = []
    with lakebook.open(folder) as book:
        for _time in range(2):
            spark = session()
            book.table(TABLE).insert(spark.range(ROWS).toDF("id"))
            lived.append(is_alive(spark))
            gateway: Any = SparkContext._gateway
            os.kill(gateway.proc.pid, signal.SIGKILL)
            gateway.proc.wait()
            lived.append(is_alive(spark))
    session.close()
    return {"lived": lived, "left": SparkContext._active_spark_context is not None}


if __name__ == "__main__":
    act = {"retried": retried, "without_runtime": without_runtime, "killed": killed}[sys.argv[1]]
    sys.stdout.write(json.dumps(act(*sys.argv[2:])))
