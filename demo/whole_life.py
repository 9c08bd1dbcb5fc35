"""The whole story: events are produced, a pipeline feeds a table, a view is built, maintenance looks after all of it.

Everything happens in a book in a temporary folder, on SQLite and a local Spark, unless the settings say where. In the
end DuckDB and PyIceberg read the same numbers, nothing is wrong, and a picture shows what happened.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from threading import Event, Thread
from time import monotonic
from typing import Any

import duckdb
import engines

import lakebook
from lakebook import Book

EVENTS, LOTS, PARTITIONS = 4_000, 6, 2
SCHEMA = "id BIGINT NOT NULL, page STRING, at TIMESTAMP"
#: As soon as may be, so that there is something to see in a minute.
SETTINGS: dict[str, Any] = {
    "publish_lag": 0.5,
    "compact_delay": 0.5,
    "compact_files": 3,
    "maintenance_interval": 1.0,
    "history_seconds": 0.0,
    "history_versions": 3,
    "snapshots_kept": 5,
}
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_BARS = "▁▂▃▄▅▆▇█"


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


def show(text: str) -> None:
    print(f"  {text}")


class Watch:
    """Looks at the book every now and then: records, lag, files and snapshots over time."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._ended = Event()
        self.seen: list[tuple[float, int, int, int, int]] = []
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        begun = monotonic()
        while True:
            pipeline = self._book.pipelines["clicks"].describe()
            table = self._book.table("clicks")
            record = table.record
            lag = pipeline.lag or 0
            self.seen.append((monotonic() - begun, pipeline.records, lag, record.file_count, len(table.snapshots())))
            if self._ended.wait(0.5):
                return

    def picture(self) -> None:
        """What happened, as lines of bars from left to right."""
        times = [item[0] for item in self.seen]
        landed = [item[1] for item in self.seen]
        rates = [max(0, after - before) for before, after in zip([0, *landed], landed, strict=False)]
        rows: Sequence[tuple[str, Sequence[float]]] = (
            ("records landed / look", rates),
            ("lag", [item[2] for item in self.seen]),
            ("files", [item[3] for item in self.seen]),
            ("snapshots", [item[4] for item in self.seen]),
        )
        for name, numbers in rows:
            print(f"  {name:<22} {_bars(numbers)}  at most {max(numbers):g}, in the end {numbers[-1]:g}")
        print(f"  {'':<22} 0 s {' ' * max(0, min(60, len(times)) - 8)} {times[-1]:.0f} s")


def _bars(numbers: Sequence[float], width: int = 60) -> str:
    step = max(1, -(-len(numbers) // width))
    most = max(numbers) or 1
    merged = [max(numbers[start : start + step]) for start in range(0, len(numbers), step)]
    return "".join(_BARS[min(7, int(value / most * 7.99))] for value in merged)


def produce(book: Book, number: int) -> None:
    """One lot of events; each has one that is no JSON."""
    with book.producer("clicks") as producer:
        for item in range(EVENTS):
            identity = number * EVENTS + item
            at = BEGIN + timedelta(seconds=identity % 7200)
            event = {"id": identity, "page": f"/page-{identity % 5}", "at": at.isoformat()}
            producer.send(json.dumps(event), key=str(identity))
        producer.send("this is not JSON")


def wait_until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    waiting, until = Event(), monotonic() + seconds
    while not done() and monotonic() < until:
        waiting.wait(0.2)


def live(book: Book, spark: Any) -> Watch:
    say(f"{LOTS} lots of {EVENTS} events are produced; the daemon runs the pipeline and looks after the table")
    pipeline = book.pipelines["clicks"]
    with Watch(book) as watch, book.running(spark=spark) as upkeep:
        upkeep.wait_active(30)
        for number in range(LOTS):
            produce(book, number)
            wait_until(lambda: pipeline.waits() == 0)
        described = pipeline.describe()
        show(f"{described.records} records became {described.rows} rows, and {described.dead} dead letters")
        wait_until(lambda: book.table("clicks").record.file_count <= 3)
        upkeep.wait_idle(30)
    table = book.table("clicks").describe()
    show(f"the table has {table.row_count} rows in {table.file_count} file(s), at version {table.version}")
    return watch


def build(book: Book, spark: Any) -> None:
    say("A view counts clicks by page and minute; it is built in ranges of an hour")
    view = book.views.create(
        "by_page",
        "SELECT date_trunc('MINUTE', at) AS at, page, count(*) AS clicks FROM clicks GROUP BY 1, 2",
        event_time="at",
        interval="hour",
    )
    end = BEGIN + timedelta(hours=3)
    view.materialize(spark, BEGIN, end)
    for item in view.coverage(BEGIN, end):
        show(f"{item.begin:%H:%M} to {item.end:%H:%M}: {item.state}, {item.rows} rows")
    rows = book.sql(spark, "SELECT page, sum(clicks) AS clicks FROM by_page GROUP BY page ORDER BY page").collect()
    for row in rows:
        show(f"{row['page']}: {row['clicks']}")
    total = sum(row["clicks"] for row in rows)
    assert total == book.table("clicks").count(), total
    book.release_reads()


def compare(book: Book) -> None:
    say("DuckDB and PyIceberg read the same")
    table = book.table("clicks")
    table.publish()
    loaded = book.catalog().load_table(("default", "clicks"))
    theirs = loaded.scan(selected_fields=("id",)).to_arrow()
    with duckdb.connect() as connection:
        path = engines.readable(connection, book, table.metadata_location or "")
        found = connection.execute(f"SELECT count(*), count(DISTINCT id) FROM iceberg_scan('{path}')").fetchone()
    assert found is not None
    show(f"Lakebook {table.count()}, PyIceberg {theirs.num_rows}, DuckDB {found[0]} rows with {found[1]} different ids")
    assert {table.count(), theirs.num_rows, *found} == {LOTS * EVENTS}
    show(f"and {book.table('clicks_dead_letters').count()} records that are no JSON are kept with the reason")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, lakebook.open(engines.place(folder), **SETTINGS) as book:
        spark = book.spark(spark_log_level="ERROR", spark_sql_shuffle_partitions="2")
        try:
            book.topics.create("clicks", PARTITIONS)
            book.pipelines.create(
                "clicks",
                topics="clicks",
                into="clicks",
                decoder="json",
                schema=SCHEMA,
                bad_records="dead_letter",
                interval=0.5,
                spark=spark,
            )
            watch = live(book, spark)
            build(book, spark)
            compare(book)
        finally:
            with suppress(Exception):
                spark.stop()
        checked = book.verify()
        assert checked.ok, checked.findings
        say(f"verify: {sum(checked.checked.values())} things checked, nothing is wrong")
        say("What happened")
        watch.picture()


if __name__ == "__main__":
    main()
