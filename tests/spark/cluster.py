"""A program with a cluster of its own: two hosts, executors in processes of their own, and speculation.

During an insert one executor is killed, and a task of the other stands still, so that a second attempt at it is made
on the other host. Spark's `local-cluster` has only one host, on which it makes no second attempt. During a compaction
all executors are killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pyarrow as pa
import pyspark
from pyspark import SparkConf, SparkContext, TaskContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

import lakebook
from lakebook import Book
from lakebook.spark.session import ICEBERG_RUNTIME, spark_session

TABLE = "t"
ROWS = 100
#: Rows whose bytes cannot be made fewer, so that a file of all of them is written for a while.
LARGE, LARGE_SCHEMA, LARGE_ROWS, LARGE_ROW = "large", "id BIGINT, data BINARY", 24, 1 << 20
HOSTS = ("127.0.0.1", "127.0.0.2")
EXECUTOR = "CoarseGrainedExecutorBackend"
SETTINGS = {
    "spark.executor.memory": "512m",
    "spark.driver.host": HOSTS[0],
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1",
    "spark.speculation.quantile": "0.5",
}


def start_cluster(folder: Path) -> str:
    """Start a master and a worker for each host within the driver, as Spark's `local-cluster` does; its address."""
    os.environ |= {
        # What workers start executors with.
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_SCALA_VERSION": "2.13",
        "SPARK_LOCAL_IP": HOSTS[0],
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": f"--driver-memory 768m --packages {ICEBERG_RUNTIME} pyspark-shell",
    }
    launch: Any = launch_gateway
    gateway = launch(SparkConf())
    # The session that is made next is to be one of this JVM.
    SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm
    jvm: Any = gateway.jvm
    conf = jvm.org.apache.spark.SparkConf().set("spark.master.rest.enabled", "false")
    deploy = jvm.org.apache.spark.deploy
    address = deploy.master.Master.startRpcEnvAndEndpoint(HOSTS[0], 0, 0, conf)._1().address().toSparkURL()
    masters = gateway.new_array(jvm.java.lang.String, 1)
    masters[0] = address
    for number, host in enumerate(HOSTS):
        worker = (host, 0, 0, 1, 512, masters, str(folder / host), jvm.scala.Some(number), conf)
        deploy.worker.Worker.startRpcEnvAndEndpoint(*worker, jvm.scala.Option.empty())
    return str(address)


def troubled(marks: str) -> Any:
    """Rows of two partitions: the first attempt at one stands still, that at the other kills its executor.

    Both do so when they have given all their rows.
    """

    def rows(partition: int, numbers: Iterable[int]) -> Iterator[tuple[int]]:
        yield from ((number,) for number in numbers)
        context = TaskContext.get()
        assert context is not None
        attempt = context.attemptNumber()
        (Path(marks) / f"{partition}-{attempt}").touch()
        if attempt == 0 and partition == 0:
            # Until Spark ends it: nobody else has a signal for it.
            signal.pause()
        elif attempt == 0:
            os.kill(executor(), signal.SIGKILL)
            signal.pause()

    return rows


def executor() -> int:
    """The process of the executor that has started this one."""
    process = os.getpid()
    while EXECUTOR not in Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8"):
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
        process = int(status.rpartition(")")[2].split()[1])
        assert process > 1
    return process


def kill_at_the_first_new_file(warehouse: Path, done: threading.Event, seen: list[str]) -> None:
    """Kill all executors as soon as one of them writes a file."""
    before = set(warehouse.rglob("*.parquet"))
    while not done.wait(0.001):
        for file in set(warehouse.rglob("*.parquet")) - before:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if EXECUTOR in " ".join(process.cmdline()):
                        process.kill()
            seen.append(file.relative_to(warehouse).as_posix())
            return


def compact_with_killed_executors(book: Book, spark: SparkSession) -> dict[str, Any]:
    """Compact a table whose executors die while they write: the file, what is there in its place, and its rows."""
    table = book.tables.create(LARGE, LARGE_SCHEMA)
    warehouse = book.warehouse.folder
    assert warehouse is not None
    for part in (range(LARGE_ROWS // 2), range(LARGE_ROWS // 2, LARGE_ROWS)):
        table.insert_arrow(pa.table({"id": list(part), "data": [os.urandom(LARGE_ROW) for _ in part]}))
    done, seen = threading.Event(), list[str]()
    killer = threading.Thread(target=kill_at_the_first_new_file, args=(warehouse, done, seen))
    killer.start()
    try:
        report = table.compact(spark)
    finally:
        done.set()
        killer.join()
    ids = sorted(table.to_arrow(columns=["id"])["id"].to_pylist())
    return {"seen": seen, "files": [file.file_path for file in table.plan()], "out": report.files_out, "ids": ids}


def main(folder: str, marks: str) -> None:
    """Insert rows, compact others, have the executors verify the book, and sweep; what came of it, as JSON."""
    spark = spark_session(master=start_cluster(Path(marks).parent / "workers"), **SETTINGS)
    numbers = spark.sparkContext.parallelize(range(ROWS), 2)
    with lakebook.open(folder, sweep_grace=0, measure_on_spark=0, compact_files=2) as book:
        frame = numbers.mapPartitionsWithIndex(troubled(marks)).toDF("id BIGINT")
        report = book.table(TABLE).insert(frame)
        compacted = compact_with_killed_executors(book, spark)
        found = book.verify(spark=spark)
        # Whoever may still write is ended.
        spark.stop()
        swept = book.cleaner.sweep()
    told = {
        "rows": report.rows,
        "files": report.files,
        "attempts": sorted(mark.name for mark in Path(marks).iterdir()),
        "findings": [finding.what for finding in found.findings],
        "failed": swept.failed,
        "compacted": compacted,
    }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
