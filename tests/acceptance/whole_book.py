"""A program that uses a book in every way. Where registry, warehouse and Spark are, its settings alone say.

It tells what it found as JSON, which is the same wherever it runs.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import engines
import pyarrow as pa
from pyspark.sql import SparkSession

import lakebook
from lakebook import Book
from lakebook.cli.main import cli
from spark.sessions import QUICK

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
ROWS = 300
Told = dict[str, Any]
#: So that what is done with goes at once; what was published waits for a minute at least.
SETTINGS: dict[str, Any] = {
    "temporary_file_grace": 0.0,
    "sweep_grace": 0.0,
    "history_seconds": 0.0,
    "history_versions": 1,
    "compact_files": 2,
    "merge_segments": 2,
    "merge_quiet": 0.0,
    "publish": "off",
    "measure_on_spark": 0,
}


def tables(book: Book, spark: SparkSession) -> Told:
    table = book.tables.create("orders", "id BIGINT NOT NULL, name STRING, day DATE", partition_by=["day"])
    day_of = "date_add(DATE'2026-01-01', int(id % 3)) AS day"
    frame = spark.range(ROWS).selectExpr("id", "concat('n', id) AS name", day_of)
    table.insert(frame)
    day = pa.array([BEGIN.date()] * 2)
    table.insert_arrow(pa.table({"id": pa.array([1000, 1001]), "name": ["a", "b"], "day": day}))
    with table.appender() as appender:
        appender.append({"id": 1002, "name": "c", "day": BEGIN.date()})
    table.delete("id >= 10 AND id < 20", spark=spark)
    table.overwrite(frame.where("id = 5").selectExpr("id", "'new' AS name", "day"), where="id = 5")
    with table.pin(version=1) as first:
        before = first.read(spark).count()
    return {
        "first": before,
        "rows": table.count(),
        "spark": table.read(spark).count(),
        "arrow": table.to_arrow(where="id >= 1000").num_rows,
        "five": table.read(spark, "id = 5").collect()[0]["name"],
        "files": len(table.plan("day = '2026-01-02'").paths) > 0,
    }


def lines(book: Book, spark: SparkSession) -> Told:
    table = book.tables.create("lines", "id BIGINT, name STRING", format="json")
    for number in range(2):
        table.insert(spark.range(number * 10, number * 10 + 10).selectExpr("id", "'x' AS name"))
    table.compact(spark)
    return {"json": sorted(row["id"] for row in table.read(spark).collect())}


def streams(book: Book, spark: SparkSession) -> Told:
    topic = book.topics.create("clicks", 2)
    for lot in range(3):
        with book.producer("clicks") as producer:
            for number in range(100):
                at = BEGIN + timedelta(minutes=number)
                event = {"id": lot * 100 + number, "at": at.isoformat()}
                producer.send(json.dumps(event), key=str(number))
            producer.send("this is not JSON")
    with book.consumer("clicks", group="billing") as consumer:
        read = 0
        while read < 303:
            read += len(consumer.poll(timeout=30.0))
        consumer.commit()
    by_source = spark.read.format("lakebook").option("topic", "clicks").load().count()
    return {"consumed": read, "native": topic.read(spark).count(), "data source": by_source}


def pipelines(book: Book, spark: SparkSession) -> Told:
    pipeline = book.pipelines.create(
        "clicks",
        topics="clicks",
        into="events",
        decoder="json",
        schema="id BIGINT NOT NULL, at TIMESTAMP",
        bad_records="dead_letter",
        spark=spark,
    )
    pipeline.run(spark)
    view = book.views.create(
        "by_hour",
        "SELECT date_trunc('HOUR', at) AS at, count(*) AS clicks FROM events GROUP BY 1",
        event_time="at",
        interval="hour",
    )
    view.materialize(spark, BEGIN, BEGIN + timedelta(hours=3))
    found = book.sql(spark, "SELECT sum(clicks) AS n FROM by_hour").collect()[0]["n"]
    book.release_reads()
    return {"events": book.table("events").count(), "dead": book.table("events_dead_letters").count(), "view": found}


def others(book: Book, spark: SparkSession) -> Told:
    table = book.table("orders")
    table.publish()
    session = book.spark(iceberg=True)
    session.sql("INSERT INTO lakebook.default.orders VALUES (2000, 'spark', DATE'2026-01-01')")
    session.sql("DELETE FROM lakebook.default.orders WHERE id = 7")
    loaded = book.catalog().load_table(("default", "orders"))
    loaded.append(pa.Table.from_pylist([{"id": 3000, "name": "py", "day": BEGIN.date()}], schema=_required()))
    loaded.refresh()
    with duckdb.connect() as connection:
        location = engines.readable(connection, book, table.metadata_location or "")
        in_duckdb = connection.execute(f"SELECT count(*) FROM iceberg_scan('{location}')").fetchone()
    book.settle_debts()
    return {
        "pyiceberg": loaded.scan().to_arrow().num_rows,
        "duckdb": in_duckdb[0] if in_duckdb else None,
        "sql": session.table("lakebook.default.orders").count(),
        "ours": table.to_arrow().num_rows,
    }


def _required() -> pa.Schema:
    return pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string()), ("day", pa.date32())])


def upkeep(book: Book, spark: SparkSession) -> Told:
    rows = book.table("orders").count()
    done = book.maintain(spark=spark)
    book.tables.drop("lines")
    book.maintain(["janitor"], spark=None)
    found = book.verify(spark=spark)
    assert found.ok, found.findings
    return {
        "failed": sorted(name for name, told in done.items() if told.get("failed")),
        "same": book.table("orders").count() == rows,
        "one file per day": len(book.table("orders").plan().paths),
    }


def secrets(book: Book, spark: SparkSession) -> Told:
    """What Spark shows of its settings has no secret in it, nor has what the registry and Iceberg keep."""
    shown = [*spark.sparkContext.getConf().getAll(), *map(tuple, spark.sql("SET -v").collect())]
    kept = [book.lake.store.read(item.path) for item in book.lake.store.list() if item.path.endswith(".json")]
    hidden = [book.settings.s3_access_key_id, book.settings.s3_secret_access_key]
    texts = [str(shown), repr(book), repr(book.settings), repr(book.warehouse), *map(repr, kept)]
    with tempfile.TemporaryDirectory() as folder:
        book.backup(Path(folder) / "backup")
        texts.append(gzip.decompress((Path(folder) / "backup").read_bytes()).decode())
    return {
        "shown": [text[:100] for text in texts for secret in hidden if secret and secret in text],
        "looked": len(shown) > 0,
    }


def commands() -> Told:
    """The command line, with the same settings."""
    from click.testing import CliRunner

    told = {}
    for words in ("topics list --json", "tables list --json", "verify --json", "doctor --json"):
        result = CliRunner().invoke(cli, words.split())
        assert result.exit_code == 0, (words, result.output)
        told[words] = len(json.loads(result.stdout)) > 0
    return told


def main(folder: str) -> None:
    told: Told = {}
    with lakebook.open(engines.place(folder), **SETTINGS) as book:
        # Some of them are for the driver, which has been started by then.
        quick: Told = {name: value for name, value in QUICK.items() if "driver" not in name}
        spark = book.spark(**quick)
        try:
            for act in (tables, lines, streams, pipelines, others, upkeep, secrets):
                sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {act.__name__}\n")
                told |= {f"{act.__name__}: {name}": found for name, found in act(book, spark).items()}
        finally:
            spark.stop()
    told |= commands()
    sys.stdout.write(f"\n{json.dumps(told)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
