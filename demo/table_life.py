"""The life of a table on Spark: created, filled, read, shared, evolved, changed, expired, cleaned and verified.

Everything happens in a book in a temporary folder, SQLite and a warehouse beside it, unless the settings say where.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import engines
import pyarrow as pa
from pyspark.sql import SparkSession

import lakebook
from lakebook import Book, Table
from lakebook.errors import InsertFailed, VersionExpired

#: What nobody needs any more goes at once, so that there is something to see.
SETTINGS: dict[str, Any] = {"temporary_file_grace": 0}


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


def show(text: str) -> None:
    print(f"  {text}")


def create(book: Book) -> Table:
    say("A table of orders, partitioned by day: hidden partitioning, nobody has to know")
    book.tables.create_namespace("sales")
    table = book.tables.create(
        "sales.orders",
        "id BIGINT NOT NULL, customer STRING, amount DECIMAL(10, 2), at TIMESTAMP, tags ARRAY<STRING>",
        partition_by=["day(at)"],
    )
    for column in table.describe().columns:
        show(f"{column.field_id} {column.name}: {column.type}")
    return table


def insert(table: Table, spark: SparkSession) -> None:
    say("Spark writes 100,000 rows; one transaction makes them visible")
    rows = spark.range(100_000).selectExpr(
        "id",
        "concat('customer-', id % 1000) AS customer",
        "CAST(id % 500 AS DECIMAL(10, 2)) AS amount",
        "TIMESTAMP '2026-05-01' + make_interval(0, 0, 0, CAST(id % 4 AS INT)) AS at",
        "array('web', 'new') AS tags",
    )
    report = table.insert(rows, properties={"source": "demo"})
    show(f"version {report.version}: {report.rows} rows in {report.files} files, {report.bytes} bytes")
    show(", ".join(f"{step} {seconds:.2f} s" for step, seconds in report.seconds.items()))
    say("An insert that fails half-way leaves nothing")
    try:
        table.insert(rows.selectExpr("id + IF(id = 99999, CAST(raise_error('a bad row') AS BIGINT), 0) AS id"))
    except InsertFailed as error:
        show(f"refused: {error.what[:100]}")
    show(f"the table has {table.count()} rows")


def append(table: Table) -> None:
    say("Records one by one, without Spark")
    with table.appender(max_rows=500) as appender:
        for number in range(1200):
            appender.append({"id": 1_000_000 + number, "customer": "appended", "tags": []})
    show(f"{table.count()} rows, version {table.version}")


def read(table: Table, spark: SparkSession) -> None:
    say("A plan comes from the registry alone, and Spark reads exactly its files")
    plan = table.plan("at < '2026-05-02T00:00:00+00:00' and id < 1000")
    show(f"{len(plan.files)} of {table.record.file_count} files can match")
    with table.pin() as pinned:
        frame = pinned.read(spark, "customer = 'customer-7'")
        show(f"{frame.count()} orders of customer-7 in version {pinned.version}")
    show(f"extremes of id, without a file: {table.min_max('id')}")


def share(book: Book, table: Table) -> None:
    say("The table is an Iceberg table, too: PyIceberg and Spark SQL read it, and write to it")
    orders = book.catalog().load_table("sales.orders")
    show(f"PyIceberg counts {orders.scan().count()} rows in snapshot {orders.metadata.current_snapshot_id}")
    rows = orders.scan("id = 1").to_arrow()
    others = pa.array([2_000_000], pa.int64()), pa.array(["from PyIceberg"], pa.string())
    for number, values in enumerate(others):
        rows = rows.set_column(number, rows.schema.field(number), values)
    orders.append(rows)
    show(f"its append is version {table.version}: {table.to_arrow('id = 2000000')['customer'].to_pylist()}")
    spark = book.spark(iceberg=True)
    spark.sql("DELETE FROM lakebook.sales.orders WHERE id = 2000000")
    counted = spark.sql("SELECT count(*) FROM lakebook.sales.orders").first()
    show(f"Spark SQL has deleted it again, in version {table.version}: {counted[0] if counted else 0} rows")


def evolve(table: Table, spark: SparkSession) -> None:
    say("Columns are renamed, dropped and added; old files keep reading right")
    with table.update_schema() as update:
        update.rename_column("customer", "buyer").drop_column("tags").add_column("note", "STRING")
    row = table.read(spark, "id = 7").first()
    assert row is not None
    show(str(row.asDict()))
    show(f"as it was: {table.to_arrow('id = 7', version=1).column_names}")


def change(table: Table, spark: SparkSession) -> None:
    say("Rows are deleted; files of which only some rows match are rewritten")
    report = table.delete("id < 50000", spark=spark)
    show(f"version {report.version}: {report.removed_rows - report.rows} rows gone, {table.count()} left")


def clean_up(book: Book, table: Table) -> None:
    say("History is expired, and what no version, lease or grace keeps is deleted")
    expired = book.cleaner.expire(seconds=0, versions=1)
    show(f"{expired.files} files retired")
    cleaned = book.cleaner.delete_expired_temporary_files()
    show(f"{cleaned.files} files, {cleaned.bytes} bytes deleted; what was published waits a day for its readers")
    try:
        table.to_arrow(version=1)
    except VersionExpired as error:
        show(f"refused: {error}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, lakebook.open(engines.place(folder), **SETTINGS) as book:
        spark = book.spark(spark_log_level="OFF", spark_sql_shuffle_partitions="4")
        table = create(book)
        insert(table, spark)
        append(table)
        read(table, spark)
        share(book, table)
        evolve(table, spark)
        change(table, spark)
        # The frames that were read outside a `with` block are done with.
        book.release_reads()
        clean_up(book, table)
        say("And at the end")
        found = book.verify()
        show("nothing is wrong" if found.ok else str(found.findings))
        show(f"checked {found.checked['data_files']} files and {found.checked['events']} events")
        spark.stop()


if __name__ == "__main__":
    main()
