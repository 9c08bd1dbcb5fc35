"""A short life of a table on Spark, in which the Java machine loads the classes that later ones take from an archive.

`make test` starts dozens of them, and each would spend most of its time on loading and compiling the same classes.
"""

from __future__ import annotations

import tempfile
from typing import Any

import lakebook
from lakebook.spark.session import spark_session


def main() -> None:
    spark = spark_session("lakebook-classes", master="local[1]")
    with tempfile.TemporaryDirectory(prefix="lb-") as folder, lakebook.open(folder) as book:
        table = book.tables.create("t", "id BIGINT, word STRING", partition_by=["bucket(2, id)"])
        table.insert(spark.range(10).selectExpr("id", "CAST(id AS STRING) AS word"))
        table.delete("id = 3", spark=spark)
        assert table.read(spark).groupBy("word").count().count() == 9
    # The archive is written when the machine ends, and that takes a while.
    machine: Any = spark.sparkContext._gateway
    spark.stop()
    machine.shutdown()
    machine.proc.stdin.close()
    machine.proc.wait(120)


if __name__ == "__main__":
    main()
