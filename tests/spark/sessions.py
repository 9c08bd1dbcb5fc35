"""A program with a Spark session of its own: one whose tasks fail at first, or one without Iceberg's runtime."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import lakebook
from lakebook.errors import LakebookError
from lakebook.spark.session import spark_session

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


if __name__ == "__main__":
    act = {"retried": retried, "without_runtime": without_runtime}[sys.argv[1]]
    sys.stdout.write(json.dumps(act(*sys.argv[2:])))
