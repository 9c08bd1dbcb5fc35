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
from lakebook import Book
from lakebook.errors import LakebookError
from lakebook.spark.pipelines import PROVENANCE
from lakebook.spark.session import ICEBERG_RUNTIME
from spark.sessions import QUICK
from streaming import produce
from viewing import at, order, orders, view_of


def main(folder: Path) -> None:
    """Read and write topics and tables through the session, and tell what came of it."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings: dict[str, Any] = {**QUICK, "spark.ui.enabled": "false", "spark.jars.packages": ICEBERG_RUNTIME}
    spark = SparkSession.builder.remote("local[2]").config(map=settings).getOrCreate()
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
        found |= pipelines(book, spark) | views(book, spark)
        try:
            book.spark(iceberg=True)
            found["catalog"] = ["nothing", ""]
        except LakebookError as error:
            found["catalog"] = [type(error).__name__, error.remedy]
        found["sound"] = book.verify(spark=spark).ok
    spark.stop()
    print(json.dumps(found))  # noqa: T201 - this is what it is for


def pipelines(book: Book, spark: Any) -> dict[str, Any]:
    """From a topic into tables: by SQL and by a function, with dead letters, again, and what is refused."""
    book.topics.create("clicks")
    produce(book, "clicks", 0, b'{"id": 1}', b"{", b'{"id": 2}')
    source: dict[str, Any] = {"topics": "clicks", "decoder": "json", "schema": "id BIGINT NOT NULL"}
    by_sql = book.pipelines.create(
        "sql", into="by_sql", sql=f"SELECT id * 2 AS id, {', '.join(PROVENANCE)} FROM source WHERE id > 0",
        provenance=True, bad_records="dead_letter", spark=spark, **source
    )  # fmt: skip
    report = by_sql.run(spark)
    found: dict[str, Any] = {"pipeline": [report.records, report.rows, report.dead]}
    again = by_sql.backfill(spark, start=1)
    found["backfill"] = [again.rows, again.dead, again.replaced]
    found["by_sql"] = sorted(book.table("by_sql").to_arrow().column("id").to_pylist())
    book.topics.create("avro")
    produce(book, "avro", 0, b"\0\0\0\0\x07\x02", b"\0\0\0\0\x08\x02")
    schemas = {7: '{"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}]}'}
    options: dict[str, Any] = {"decoder": "avro", "header": "confluent", "schemas": schemas}
    by_function = book.pipelines.create(
        "function", into="by_function", topics="avro", function="connect_client:through", bad_records="dead_letter",
        spark=spark, **options
    )  # fmt: skip
    report = by_function.run(spark)
    found["avro"] = [report.records, report.rows, report.dead]
    try:
        book.pipelines.create("sum", into="sums", sql="SELECT sum(id) AS id FROM source", spark=spark, **source)
    except LakebookError as error:
        found["refused"] = type(error).__name__
    return found


def through(frame: Any) -> Any:
    """A transformation as a function."""
    return frame.selectExpr("id + 1 AS id")


def views(book: Book, spark: Any) -> dict[str, Any]:
    """A view that is built, and queries over it, a table and a topic."""
    table = orders(book, "visits")
    order(table, 0.1, 0.2, 1.5)
    view = view_of(book, "visits")
    view.materialize(spark, at(0), at(2))
    found: dict[str, Any] = {"view": view.count(at(0), at(2))}
    found["sql"] = [
        book.sql(spark, f"SELECT count(*) AS n FROM {name}").collect()[0].n for name in ("hourly", "visits", "orders")
    ]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
