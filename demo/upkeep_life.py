"""A table that looks after itself: fed by many small inserts, it is published, compacted and cleaned up.

Everything happens in a book in a temporary folder, unless the settings say where. Nobody publishes, compacts or deletes
anything here: whoever runs `lakebook run`, or the block `book.running()`, does.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from threading import Event
from time import monotonic
from typing import Any

import engines
import pyarrow as pa

import lakebook
from lakebook import Book, Table

INSERTS = 100
SCHEMA = "id BIGINT, page STRING"
#: As soon as may be, so that there is something to see in a minute.
SETTINGS: dict[str, Any] = {
    "publish_lag": 0.5,
    "compact_delay": 1.0,
    "maintenance_interval": 1.0,
    "history_seconds": 0.0,
    "history_versions": 5,
    "snapshots_kept": 5,
}


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


def show(text: str) -> None:
    print(f"  {text}")


def feed(table: Table) -> None:
    say(f"{INSERTS} inserts of one row each, while the components are at work")
    for number in range(INSERTS):
        table.insert_arrow(pa.table({"id": [number], "page": [f"page-{number % 7}"]}))
    show(f"version {table.version}, {table.record.file_count} files just now")


def settle(table: Table, seconds: float = 90.0) -> None:
    say("A while later, without a manual step")
    waiting, until = Event(), monotonic() + seconds
    while monotonic() < until and (table.record.file_count > 10 or len(table.snapshots()) > 5):
        waiting.wait(0.2)
    description = table.describe()
    show(f"{description.file_count} file(s), {description.row_count} rows, {len(table.snapshots())} snapshot(s)")
    show(f"published up to version {description.published_version} of {description.version}")


def look(book: Book) -> None:
    say("What was done, and why")
    for work in reversed(book.maintenance_history(limit=200).items):
        if work.component in ("compactor", "snapshotter"):
            detail = ", ".join(f"{key} {value}" for key, value in work.detail.items())
            show(f"{work.component}: {work.action} ({work.outcome}) because {work.reason}: {detail}"[:160])
    overview = book.overview()
    show(f"waiting: {dict(overview.owed)}")
    for warning in overview.warnings:
        show(f"warning: {warning}")


def keep(table: Table) -> None:
    say("A state worth keeping gets a tag; history comes and goes, the tag stays")
    table.tag("first-hundred")
    for tag in table.tags():
        show(f"{tag.name}: snapshot {tag.snapshot_id}, version {tag.version}")


def rest(book: Book) -> None:
    say("The compactor rests while somebody backfills, and goes on afterwards")
    book.pause("compactor", table="clicks", reason="a large backfill")
    for warning in book.overview().warnings:
        show(warning)
    show(f"resumed: {book.resume('compactor', table='clicks')}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, lakebook.open(engines.place(folder), **SETTINGS) as book:
        spark = book.spark(spark_log_level="ERROR")
        try:
            table = book.tables.create("clicks", SCHEMA)
            with book.running(spark=spark) as upkeep:
                upkeep.wait_active(30)
                feed(table)
                upkeep.wait_idle(60)
                settle(table)
                keep(table)
                rest(book)
                look(book)
        finally:
            with suppress(Exception):
                spark.stop()
        checked = book.verify()
        assert checked.ok, checked.findings
        say(f"verify: {sum(checked.checked.values())} things checked, nothing is wrong")


if __name__ == "__main__":
    main()
