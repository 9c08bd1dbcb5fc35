"""A program that uses a book in every way. Where registry, warehouse and Spark are, its settings alone say.

It tells what it found as JSON, which is the same wherever it runs. What a secret might show up in, it leaves in the
folder `seen`: what is logged, what Spark's pages show, what objects and errors say, a backup, and what commands print.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import duckdb
import engines
import fastavro
import pyarrow as pa
from click.testing import CliRunner
from pyspark.sql import SparkSession

import lakebook
from fault_proxy import ENDLESS, REFUSED, FaultProxy
from lakebook import Book
from lakebook.cli.main import cli
from secret_search import shown_by, told_by
from spark.sessions import QUICK

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
ROWS = 300
Told = dict[str, Any]
#: A word that is no secret, and is put where secrets are looked for: who does not find it has not looked well.
PLANTED = os.environ.get("LAKEBOOK_TEST_PLANTED", "planted")
SEEN = Path("seen").absolute()
#: Pages of Spark's own, below the address of its UI or below that of the application.
PAGES = ("environment/", "executors/", "jobs/", "stages/", "SQL/")
FACTS = ("environment", "allexecutors", "jobs", "sql?details=true&planDescription=true&length=1000")
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
    table = book.tables.create(
        "orders",
        "id BIGINT NOT NULL, name STRING, day DATE",
        partition_by=["day"],
        properties={"owner": PLANTED},
    )
    day_of = "date_add(DATE'2026-01-01', int(id % 3)) AS day"
    frame = spark.range(ROWS).selectExpr("id", "concat('n', id) AS name", day_of)
    table.insert(frame)
    day = pa.array([BEGIN.date()] * 2)
    table.insert_arrow(pa.table({"id": pa.array([1000, 1001]), "name": ["a", "b"], "day": day}))
    with table.appender() as appender:
        appender.append({"id": 1002, "name": f"!{PLANTED}", "day": BEGIN.date()})
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
            producer.send(f"{PLANTED} is not JSON")
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
    """Leave what Spark shows of its settings and its work, what objects say of themselves, and a backup."""
    spark.sql(f"SELECT '{PLANTED}' AS word").collect()
    settings = [*spark.sparkContext.getConf().getAll(), *map(tuple, spark.sql("SET -v").collect())]
    leave("settings of Spark", map(str, settings))
    below = f"api/v1/applications/{spark.sparkContext.applicationId}"
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for page in (*PAGES, *(f"{below}/{fact}" for fact in FACTS)):
        with ask.open(f"{spark.sparkContext.uiWebUrl}/{page}", timeout=60) as answer:
            leave(f"page {page.removeprefix(below).partition('?')[0]}", [answer.read().decode()])
    leave("objects", (f"{name}: {text}" for thing in (book, book.lake.store, spark) for name, text in shown_by(thing)))
    book.backup(SEEN / "backup")
    return {"looked": len(settings) > 0}


def failures(book: Book, spark: SparkSession) -> Told:
    """Leave what is said where a bucket cannot be had: by Python, and by Spark."""
    settings = book.settings
    if book.warehouse.bucket is None:
        return {}
    away: Told = {"s3_endpoint": "http://127.0.0.1:1", "s3_retry_seconds": 0.0}
    errors: list[Exception] = []
    with closing(FaultProxy(settings.s3_endpoint)) as proxy:
        near: Told = {"registry": "sqlite:///refused/registry.db", "warehouse": f"{book.warehouse.root}-refused"}
        with lakebook.open(Path("refused"), **{**near, "s3_endpoint": proxy.endpoint, "publish": "off"}) as other:
            table = other.tables.create("t", "id BIGINT")
            table.insert(spark.range(1))
            acts: list[Callable[[], object]] = [
                lambda: table.insert(spark.range(1)),
                lambda: table.read(spark).collect(),
                lambda: table.to_arrow(),
                lambda: lakebook.open("away", **{**near, **away, "registry": "sqlite:///away/registry.db"}),
            ]
            with proxy.faulty(REFUSED, times=ENDLESS):
                for act in acts:
                    try:
                        act()
                    except Exception as error:  # noqa: BLE001 - a frame is Spark's, and so are its errors
                        errors.append(error)
            assert len(errors) == len(acts)
    leave("errors", (text for error in errors for text in told_by(error)))
    return {}


#: So that a daemon has done what there is to do in a moment.
IMPATIENT = {**SETTINGS, "compact_delay": 0.0, "maintenance_interval": 0.5}
TICK = {
    "type": "record",
    "name": "Tick",
    "fields": [{"name": "id", "type": "long"}, {"name": "what", "type": "string"}],
}
PATIENCE = 240.0


def command(*words: str) -> str:
    """What a command says, with the same settings; one that needs Spark uses the session that is there."""
    environment = {f"LAKEBOOK_{name.upper()}": str(value) for name, value in IMPATIENT.items()}
    result = CliRunner().invoke(cli, words, env=environment)
    assert result.exit_code == 0, (words, result.output, result.exception)
    return result.stdout


def tick(book: Book, first: int, number: int) -> None:
    """Send records of Avro, and one that is none."""
    with book.producer("ticks") as producer:
        for item in range(first, first + number):
            stream = io.BytesIO()
            fastavro.schemaless_writer(stream, TICK, {"id": item, "what": f"tick {item}"})
            producer.send(stream.getvalue())
        producer.send(b"")


def commands_on_spark(book: Book, spark: SparkSession) -> Told:
    """The command line where it needs Spark. Records of Avro are read by Python, where the executors are."""
    book.topics.create("ticks", 1)
    tick(book, 0, 50)
    avro = ("--decoder", "avro", "--schema", json.dumps(TICK), "--bad-records", "dead_letter", "--interval", "0.2")
    command("pipelines", "create", "ticks", "--from", "ticks", "--into", "ticks", *avro)
    ran = json.loads(command("pipelines", "run", "ticks", "--json"))
    query = "SELECT count(*) AS n, max(id) AS most FROM orders WHERE id NOT IN (SELECT id FROM ticks)"
    small = book.tables.create("small", "id BIGINT")
    for number in range(3):
        small.insert_arrow(pa.table({"id": [number]}))
    command("maintenance", "run", "compactor", "--table", "small")
    return {
        "small files": (small.record.file_count, sorted(small.to_arrow()["id"].to_pylist())),
        "ran": (ran["records"], ran["rows"], ran["dead"]),
        "ticks": sum(book.table("ticks").to_arrow()["id"].to_pylist()),
        "queried": json.loads(command("sql", query, "--json")),
    }


def more_commands(book: Book, _: SparkSession) -> Told:
    """All else of the command line that needs Spark."""
    end = BEGIN + timedelta(hours=3)
    span = ("--begin", BEGIN.isoformat(), "--end", end.isoformat())
    built = json.loads(command("views", "materialize", "by_hour", *span, "--force", "--json"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "more.jsonl").write_text('{"id": 4000, "name": "shell", "day": "2026-01-03"}\n')
        command("tables", "insert", "orders", "--format", "json", folder)
    command("tables", "delete-rows", "orders", "--where", "id = 8")
    checked = json.loads(command("verify", "--spark", "--json"))
    return {
        "built": (built["built"], built["rows"]),
        "inserted": book.table("orders").to_arrow(where="id = 4000").num_rows,
        "deleted": book.table("orders").to_arrow(where="id = 8").num_rows,
        "verified": checked["ok"],
    }


def daemon(book: Book, _: SparkSession) -> Told:
    """`lakebook run` until it has done everything: batches of a pipeline, ranges of a view, a compaction."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=2)
    book.tables.create("recent", "id BIGINT, ts TIMESTAMP")
    for number in range(3):
        book.table("recent").insert_arrow(pa.table({"id": [number], "ts": pa.array([hour], pa.timestamp("us", "UTC"))}))
    book.views.create("of_recent", "SELECT * FROM recent", event_time="ts", lookback=6 * 3600.0)
    tick(book, 50, 25)

    def is_done() -> bool:
        return (
            book.pipelines["ticks"].waits() == 0
            and book.views["of_recent"].count() == 3
            and book.table("recent").record.file_count == 1
        )

    def end_it() -> None:
        waiting, late = threading.Event(), monotonic() + PATIENCE
        while not is_done() and monotonic() < late:
            waiting.wait(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    watch = threading.Thread(target=end_it)
    watch.start()
    said = [json.loads(line)["state"] for line in command("run", "--json", "--log-level", "warning").splitlines()]
    watch.join()
    assert is_done(), book.overview()
    failed = [item for item in book.maintenance_history(limit=1000) if item.outcome == "failed"]
    return {
        "said": said,
        "ticks": sum(book.table("ticks").to_arrow()["id"].to_pylist()),
        "dead": book.table("ticks_dead_letters").count(),
        "view": book.views["of_recent"].to_arrow().num_rows,
        "rows": book.table("recent").count(),
        "failed": [f"{item.component}: {item.detail}" for item in failed],
    }


def commands() -> Told:
    """The command line without Spark."""
    told = {}
    for words in ("topics list --json", "tables list --json", "verify --json", "doctor --json"):
        said = command(*words.split())
        told[words] = len(json.loads(said)) > 0
        leave(f"command {words}", [said])
    leave("command doctor", [command("doctor")])
    return told


def leave(name: str, lines: Iterable[str]) -> None:
    (SEEN / name.replace("/", "-")).write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")


ACTS = (tables, lines, streams, pipelines, others, upkeep, commands_on_spark, secrets, failures)
#: For long runs.
MORE = (more_commands, daemon)


def main(folder: str, extent: str) -> None:
    told: Told = {}
    (SEEN / "events").mkdir(parents=True)
    # Every logger, as talkative as it can be.
    logging.basicConfig(level=logging.DEBUG, filename=SEEN / "log", format="%(name)s %(message)s %(args)s")
    with lakebook.open(engines.place(folder), **SETTINGS) as book:
        # Some of them are for the driver, which has been started by then.
        quick: Told = {name: value for name, value in QUICK.items() if "driver" not in name}
        shown: Told = {
            "spark.ui.enabled": "true",
            "spark.ui.port": "0",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": (SEEN / "events").as_uri(),
            "spark.eventLog.compress": "false",
            "spark.lakebook.word": PLANTED,
        }
        spark = book.spark(**quick, **shown)
        try:
            for act in (*ACTS, *(MORE if extent == "all" else ())):
                sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {act.__name__}\n")
                told |= {f"{act.__name__}: {name}": found for name, found in act(book, spark).items()}
        finally:
            spark.stop()
    told |= commands()
    sys.stdout.write(f"\n{json.dumps(told)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
