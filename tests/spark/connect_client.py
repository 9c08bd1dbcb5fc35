"""What a client of Spark Connect does with a book, in a process of its own: none may have a session of the other kind.

It prints one line of JSON with what it found.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import lakebook
from lakebook.spark.session import ICEBERG_RUNTIME
from streaming import produce


def main(folder: Path) -> None:
    """Read and write topics and tables through the session, and tell what came of it."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.remote("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.jars.packages", ICEBERG_RUNTIME)
        .getOrCreate()
    )
    found: dict[str, Any] = {"session": type(spark).__module__}
    with lakebook.open(folder / "book", publish="off", measure_on_spark=0) as book:
        book.topics.create("orders", 2)
        book.topics.create("copies")
        produce(book, "orders", 0, *range(5))
        produce(book, "orders", 1, "a")
        options = {"book": str(folder / "book"), "topic": "orders"}
        found["source"] = spark.read.format("lakebook").options(**options).load().count()
        found["native"] = book.topics["orders"].read(spark, start={0: 2}).count()
        frame = spark.sql("SELECT 'x' AS value")
        frame.write.format("lakebook").options(**{**options, "topic": "copies"}).mode("append").save()
        stream = (
            spark.readStream.format("lakebook")
            .options(**options)
            .load()
            .select("value")
            .writeStream.format("lakebook")
            .options(**{**options, "topic": "copies", "checkpointLocation": str(folder / "checkpoint")})
            .start()
        )
        stream.processAllAvailable()
        stream.stop()
        found["copies"] = sum(part.high_watermark for part in book.metadata.list_partitions("copies").items)
        table = book.tables.create("t", "id BIGINT")
        found["inserted"] = table.insert(spark.range(3)).rows
        found["table"] = sorted(row.id for row in table.read(spark).collect())
        found["by_source"] = spark.read.format("lakebook").options(book=options["book"], table="t").load().count()
        found["sound"] = book.verify(spark=spark).ok
    spark.stop()
    print(json.dumps(found))  # noqa: T201 - this is what it is for


main(Path(sys.argv[1]))
