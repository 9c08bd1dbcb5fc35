"""What the processes of the upkeep tests do: write, read under leases, and look after the tables.

A table is partitioned by its writer, and each writer counts: its rows are always a run of numbers
without a gap. It begins anew behind the highest number when it deletes all of them. So any reader can
tell from one state alone whether a row is missing or there twice.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import lakebook
from lakebook import Book, failpoints
from lakebook.errors import LakebookError
from lakebook.lake.table import Table
from lakebook.registry.commits import owner
from table_writers import Line

SCHEMA = "writer BIGINT, number BIGINT"
#: Published as Iceberg; and one that never is, whose files go as soon as nobody needs them.
KEPT, BARE = "kept", "bare"
#: Everything happens as soon as it may.
IMPATIENT: dict[str, Any] = {
    "publish": "async",
    "publish_lag": 0.3,
    "maintenance_interval": 0.5,
    "compact_delay": 0.5,
    "compact_files": 4,
    "history_seconds": 0,
    "history_versions": 2,
    "temporary_file_grace": 0,
    "lease_seconds": 3,
    "insert_alive": 10,
    "sweep_grace": 1,
    "snapshots_kept": 10,
    "metadata_kept": 2,
    "astha_lease": 2,
    "tag_seconds": 5,
    "tags_kept": 2,
    "events_kept": 1,
}

_DELETE, _FAIL = 0.03, 0.05


def create_tables(book: Book) -> None:
    """Both tables; the updater leaves one of them alone."""
    for name in (KEPT, BARE):
        book.tables.create(name, SCHEMA, partition_by=["writer"])
    book.table(BARE).set_properties(**{"lakebook.tag.seconds": "0"})
    book.pause("iceberg_updater", table=BARE, reason="its files are to go at once")


def rows_of(writer: int, first: int, last: int) -> pa.Table:
    """Rows of a writer, from a number to another."""
    return pa.table({"writer": [writer] * (last - first), "number": list(range(first, last))})


def check_runs(rows: pa.Table) -> dict[int, range]:
    """Each writer's rows are a run without a gap, and each is there once."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for writer, number in zip(rows["writer"].to_pylist(), rows["number"].to_pylist(), strict=True):
        found[writer].append(number)
    for writer, numbers in found.items():
        expected = Counter(range(min(numbers), max(numbers) + 1))
        assert Counter(numbers) == expected, (writer, _odd(Counter(numbers), expected))
    return {writer: range(min(numbers), max(numbers) + 1) for writer, numbers in found.items()}


def _odd(found: Counter[int], expected: Counter[int]) -> Sequence[Any]:
    return [*(found - expected).items(), *((number, -missing) for number, missing in (expected - found).items())][:10]


def write(line: Line, target: str, settings: Mapping[str, Any], name: str, writer: int) -> None:
    """Insert, delete and fail until told to stop; then tell what the table has to hold of this writer."""
    choose = random.Random(writer)
    counts: Counter[str] = Counter()
    first = following = 0
    with lakebook.open(target, **settings) as book:
        table = book.table(name)
        line.tell("ready")
        while not line.stopped():
            what = choose.random()
            if what < _DELETE and following > first:
                table.delete(f"writer = {writer}")
                first = following
                counts["deleted"] += 1
            elif what < _DELETE + _FAIL:
                counts["failed"] += 1
                counts["rolled_back"] += _fail_to_insert(book, table, writer, following)
            else:
                last = following + choose.randint(1, 5)
                table.insert_arrow(rows_of(writer, following, last))
                following = last
                counts["inserted"] += 1
    line.tell("written", name, writer, first, following, dict(counts))


def _fail_to_insert(book: Book, table: Table, writer: int, following: int) -> bool:
    """Fail when the rows are written; whether nothing of them is left right after."""
    folders: list[Path] = []

    def fail() -> None:
        folders.extend(_folders_at_work(book))
        raise RuntimeError("it fails on purpose")

    with failpoints.armed("insert.arrow_written", fail):
        try:
            table.insert_arrow(rows_of(writer, following, following + 3))
        except (RuntimeError, LakebookError):
            (folder,) = folders
            return not any(folder.rglob("*")) and _folders_at_work(book) == []
    raise AssertionError("it did not fail")


def _folders_at_work(book: Book) -> list[Path]:
    """Where this process writes what it has not committed yet."""
    sql = (
        "SELECT inserts.folder FROM commits JOIN inserts ON inserts.commit_id = commits.id"
        f" WHERE commits.state = 'open' AND commits.owner = '{owner()}' AND inserts.folder LIKE 'data/%'"
    )
    rows = book._registry.read_with(lambda reader: reader._connection.execute(sql).fetchall())
    assert book.warehouse.folder is not None
    return [book.warehouse.folder / row[0] for row in rows]


def read(line: Line, target: str, settings: Mapping[str, Any], seed: int) -> None:
    """Read pinned versions until told to stop, some of them long after they were pinned."""
    choose = random.Random(seed)
    reads = 0
    with lakebook.open(target, **settings) as book:
        line.tell("ready")
        while not line.stopped():
            with book.table(choose.choice((KEPT, BARE))).pin() as pinned:
                count = pinned.count()
                # While it waits, others replace, expire and delete what it is about to read.
                line.pause(choose.choice((0.0, 0.0, 0.3, 1.0)))
                rows = pinned.to_arrow()
                assert rows.num_rows == count, (rows.num_rows, count)
                check_runs(rows)
            reads += 1
    line.tell("read", reads)


def read_outside(line: Line, target: str, settings: Mapping[str, Any], seed: int) -> None:
    """Read the published table through a catalog, as other engines do, until told to stop."""
    choose = random.Random(seed)
    reads = 0
    with lakebook.open(target, **settings) as book:
        catalog = book.catalog()
        line.tell("ready")
        while not line.stopped():
            scan = catalog.load_table(f"default.{KEPT}").scan()
            line.pause(choose.choice((0.0, 0.3, 1.0)))
            check_runs(scan.to_arrow())
            reads += 1
    line.tell("read", reads)


class Daemon:
    """`lakebook run` as its users start it."""

    def __init__(self, place: Any, log: Path, settings: Mapping[str, Any], *options: str) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LAKEBOOK_")}
        environment |= {f"LAKEBOOK_{name.upper()}": str(value) for name, value in settings.items()}
        warehouse = place.settings.get("warehouse")
        where = ["--warehouse", warehouse] if warehouse else []
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lakebook.cli.main", "--book", place.target, *where, "run", *options],
                env=environment,
                stdout=output,
                stderr=output,
            )

    @property
    def log(self) -> str:
        """What it has said."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """Ask it to end, and see that it does so cleanly."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(120) == 0, self.log[-4000:]

    def kill(self) -> None:
        """End it at once, if it is still there."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
