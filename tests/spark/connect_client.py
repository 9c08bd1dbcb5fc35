"""What a client of Spark Connect does with a book, in a process of its own: none may have a session of the other kind.

It prints one line of JSON with what it found.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import lakebook
from buckets import BUCKET, FOLDER
from lakebook import Book
from lakebook.errors import LakebookError
from lakebook.spark.buckets import with_packages
from lakebook.spark.pipelines import PROVENANCE
from lakebook.spark.session import ICEBERG_RUNTIME
from spark.sessions import QUICK
from streaming import produce
from viewing import at, order, orders, view_of


def main(folder: Path, bucket: dict[str, Any], warehouse: str, extent: str) -> None:
    """Read and write topics and tables through the session, and tell what came of it: all of it in long runs."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings: dict[str, Any] = {**QUICK, "spark.ui.enabled": "false", "spark.jars.packages": ICEBERG_RUNTIME}
    if warehouse == BUCKET:
        settings = with_packages(settings) | knowing(bucket)
        # Executors that open the book by its folder are told there.
        (folder / "book").mkdir()
        said = "".join(f"{name} = {json.dumps(value)}\n" for name, value in bucket.items())
        (folder / "book" / "lakebook.toml").write_text(said)
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
        if extent == "all":
            found["copies"] = copies(book, spark, folder, options)
        table = book.tables.create("t", "id BIGINT")
        found["inserted"] = table.insert(spark.range(3)).rows
        found["table"] = sorted(row.id for row in table.read(spark).collect())
        found["by_source"] = spark.read.format("lakebook").options(book=options["book"], table="t").load().count()
        found |= pipelines(book, spark)
        if extent == "all":
            found |= functions(book, spark) | views(book, spark)
        try:
            book.spark(iceberg=True)
            found["catalog"] = ["nothing", ""]
        except LakebookError as error:
            found["catalog"] = [type(error).__name__, error.remedy]
        found["sound"] = book.verify(spark=spark).ok
    if warehouse == FOLDER:
        found["bucket"] = without_s3a(folder, bucket, spark)
    spark.stop()
    print(json.dumps(found))  # noqa: T201 - this is what it is for


def copies(book: Book, spark: Any, folder: Path, options: dict[str, str]) -> int:
    """How many records a batch and a stream have put into a topic."""
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
    return sum(part.high_watermark for part in book.metadata.list_partitions("copies").items)


def knowing(bucket: dict[str, Any]) -> dict[str, str]:
    """What the operator of a server tells it of a bucket."""
    told = {
        "endpoint": bucket["s3_endpoint"],
        "endpoint.region": bucket["s3_region"],
        "path.style.access": "true",
        "access.key": bucket["s3_access_key_id"],
        "secret.key": bucket["s3_secret_access_key"],
    }
    filesystem = {"spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem"}
    return filesystem | {f"spark.hadoop.fs.s3a.{name}": value for name, value in told.items()}


def without_s3a(folder: Path, bucket: dict[str, Any], spark: Any) -> dict[str, Any]:
    """What is said where the warehouse is in a bucket, which this server cannot open."""
    told: dict[str, Any] = {}
    with lakebook.open(folder / "remote", publish="off", **bucket) as book:
        table = book.tables.create("t", "id BIGINT")
        for number in range(2):
            table.insert_arrow(pa.table({"id": pa.array([number])}))
        lines = book.tables.create("lines", "id BIGINT", format="json")
        book.topics.create("orders")
        produce(book, "orders", 0, b'{"id": 1}')
        options: dict[str, Any] = {"topics": "orders", "decoder": "json", "schema": "id BIGINT NOT NULL"}
        book.tables.create("landed", "id BIGINT NOT NULL")
        book.pipelines.create("p", into="landed", **options)
        acts: dict[str, Any] = {
            "insert": lambda: table.insert(spark.range(3)),
            "insert of lines": lambda: lines.insert(spark.range(3)),
            "read": lambda: table.read(spark).count(),
            "topic": lambda: book.topics["orders"].read(spark).count(),
            "sql": lambda: book.sql(spark, "SELECT * FROM t").collect(),
            "pipeline": lambda: book.pipelines["p"].run(spark),
        }
        for name, act in acts.items():
            try:
                act()
                told[name] = ["nothing", ""]
            except LakebookError as error:
                told[name] = [type(error).__name__, error.remedy]
            except Exception as error:  # noqa: BLE001 - this is what must not be
                told[name] = [type(error).__name__, str(error)[:500]]
        # What Python does by itself goes on.
        told["rows"] = [table.to_arrow().num_rows, table.count()]
    return told


def pipelines(book: Book, spark: Any) -> dict[str, Any]:
    """From a topic into a table by SQL, with dead letters, again, and what is refused."""
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
    try:
        book.pipelines.create("sum", into="sums", sql="SELECT sum(id) AS id FROM source", spark=spark, **source)
    except LakebookError as error:
        found["refused"] = type(error).__name__
    return found


def functions(book: Book, spark: Any) -> dict[str, Any]:
    """From a topic of Avro into a table, by a function."""
    book.topics.create("avro")
    produce(book, "avro", 0, b"\0\0\0\0\x07\x02", b"\0\0\0\0\x08\x02")
    schemas = {7: '{"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}]}'}
    options: dict[str, Any] = {"decoder": "avro", "header": "confluent", "schemas": schemas}
    by_function = book.pipelines.create(
        "function", into="by_function", topics="avro", function="connect_client:through", bad_records="dead_letter",
        spark=spark, **options
    )  # fmt: skip
    report = by_function.run(spark)
    return {"avro": [report.records, report.rows, report.dead]}


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
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:])
