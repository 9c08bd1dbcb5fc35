"""Commits of one small file: from an Arrow table in memory to an acknowledged version, beside DuckLake.

Both sides get the same thousand rows, write one Parquet file (zstd) into the same file system and
commit to a catalog in SQLite with synchronous=FULL. Ours also makes the data file and its folders
durable before it commits, and stores footer, checksum and an event; DuckLake syncs only its catalog.
Each size has a book and a DuckLake of its own. All of them take turns, commit by commit.
"""

from __future__ import annotations

import importlib
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import duckdb
import pyarrow as pa

from bench.asked import Asked, Say
from bench.measure import latency, timed
from bench.places import Ground
from bench.report import Result
from lakebook.lake.attempts import Attempt
from lakebook.lake.inserting import InsertReport, write_arrow
from lakebook.lake.table import Table
from lakebook.registry.statements import SQLITE
from lakebook.registry.table_files import TableChange
from lakebook.registry.transactions import new_id

ROWS = 1_000
_COMMITS, _FEW_COMMITS = 50, 20
_WARMING = 3
#: Files that are entered at once before the measure.
_AT_ONCE = 1_000


class DuckLake:
    """A DuckLake with its catalog in SQLite and one table."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, folder: Path, name: str) -> None:
        self._connection, self._folder, self._name = connection, folder, name
        folder.mkdir()
        connection.execute(
            f"ATTACH 'ducklake:sqlite:{folder / 'catalog.sqlite'}' AS {name}"
            f" (DATA_PATH '{folder / 'data'}', DATA_INLINING_ROW_LIMIT 0)"
        )
        connection.execute(f"CALL {name}.set_option('parquet_compression', 'zstd')")
        connection.execute(f"CREATE TABLE {name}.t (id BIGINT, name VARCHAR, value DOUBLE, moment TIMESTAMP)")

    def fill(self, file: Path, number: int) -> None:
        """Enter copies of a file, in its own way for files that are there already."""
        folder = self._folder / new_id()
        folder.mkdir()
        for count in range(number):
            shutil.copyfile(file, folder / f"{count}.parquet")
        self._connection.execute(f"CALL ducklake_add_data_files('{self._name}', 't', '{folder}/*.parquet')")

    def commit(self) -> None:
        """Insert the rows that are registered as `data`."""
        self._connection.execute(f"INSERT INTO {self._name}.t SELECT * FROM data")


def connect(data: pa.Table) -> duckdb.DuckDBPyConnection:
    """DuckDB with DuckLake loaded, and the rows to insert registered as `data`."""
    connection = duckdb.connect()
    extensions: Any = importlib.import_module("duckdb_extensions")
    for name in ("ducklake", "sqlite_scanner"):
        extensions.import_extension(name)
        connection.execute(f"LOAD {name}")
    connection.register("data", data)
    return connection


@dataclass
class _Sized:
    """A table that has so many files, the DuckLake beside it, and what their commits took."""

    size: int
    data: pa.Table
    table: Table
    peer: DuckLake | None
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    reports: list[InsertReport] = field(default_factory=list)

    def fill(self) -> None:
        """Enter copies of a real file by the thousand; each is there, with its footer and statistics."""
        for start in range(0, self.size, _AT_ONCE):
            number = min(_AT_ONCE, self.size - start)
            file = self._enter(number)
            if self.peer is not None:
                self.peer.fill(file, number)

    def _enter(self, number: int) -> Path:
        lake, record = self.table._lake, self.table.record
        with Attempt(lake, record) as attempt:
            shape = lake.shape_of(record, record.schema_version)
            (file,) = write_arrow(lake, record, attempt, shape, self.data)
            content = lake.store.read(file.file_path)
            copies = [replace(file, file_path=f"{attempt.folder}/{new_id()}.parquet") for _ in range(number - 1)]
            for copy in copies:
                lake.store.put_new(copy.file_path, content, durable=False)
            attempt.commit(TableChange("append", [file, *copies]))
        path = lake.store.local_path(file.file_path)
        assert path is not None
        return path

    def commit(self) -> None:
        """One commit of ours."""
        taken, report = timed(lambda: self.table.insert_arrow(self.data))
        self.ours.append(taken)
        self.reports.append(report)

    def commit_theirs(self) -> None:
        """One commit of the peer."""
        if self.peer is not None:
            self.theirs.append(timed(self.peer.commit)[0])

    def forget(self) -> None:
        """The first ones were for warming up."""
        for kept in (self.ours, self.theirs, self.reports):
            kept.clear()


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """Latencies for each size, then the largest beside the smallest."""
    data = rows(ROWS)
    with ExitStack() as stack:
        connection = stack.enter_context(connect(data)) if ground.kind == SQLITE else None
        tables: list[_Sized] = []
        for size in asked.files:
            say(f"commits: {size:,} files", len(tables), len(asked.files))
            book = stack.enter_context(ground.new(size, "commits")).open()
            table = book.tables.create("t", data.schema)
            peer = None
            if connection is not None:
                peer = DuckLake(connection, ground.folder / f"ducklake-{size}", f"lake_{size}")
            tables.append(_Sized(size, data, table, peer))
            tables[-1].fill()
        _take_turns(tables, _FEW_COMMITS if asked.quick else _COMMITS, say)
        for each in tables:
            yield from _results(ground.kind, each)
        if len(tables) > 1:
            yield from _growth(ground.kind, tables[0], tables[-1])


def rows(number: int) -> pa.Table:
    """Rows with a column of each usual kind."""
    drawn = random.Random(7)
    return pa.table(
        {
            "id": pa.array(range(number), pa.int64()),
            "name": pa.array([f"{drawn.getrandbits(64):016x}" for _ in range(number)]),
            "value": pa.array([drawn.random() for _ in range(number)]),
            "moment": pa.array(
                [1_700_000_000_000_000 + drawn.randrange(10**12) for _ in range(number)], pa.timestamp("us")
            ),
        }
    )


def _take_turns(tables: list[_Sized], commits: int, say: Say) -> None:
    for number in range(_WARMING + commits):
        say("commits: in turns", number, _WARMING + commits)
        if number == _WARMING:
            for table in tables:
                table.forget()
        for table in tables:
            sides: list[Callable[[], None]] = [table.commit, table.commit_theirs]
            for side in sides if number % 2 else reversed(sides):
                side()


def _results(kind: str, table: _Sized) -> Iterator[Result]:
    name = f"commit of a file of {ROWS:,} rows"
    ours, theirs = latency(table.ours), latency(table.theirs) if table.theirs else None
    p50, p99 = (theirs.p50, theirs.p99) if theirs else (None, None)
    yield Result(f"p50 of {name}", kind, table.size, ours.p50, p50, "ms", at_most=1 if theirs else None)
    yield Result(f"p99 of {name}", kind, table.size, ours.p99, p99, "ms")
    for step in ("insert_data", "commit"):
        taken = median(report.seconds[step] for report in table.reports) * 1000
        yield Result(f"p50 of {name}, its step {step}", kind, table.size, taken, None, "ms")


def _growth(kind: str, small: _Sized, large: _Sized) -> Iterator[Result]:
    at_most = 1.2 if kind == SQLITE else None
    beside = f"beside {small.size:,} files"
    now, before = latency(large.ours).p50, latency(small.ours).p50
    yield Result(f"growth of a commit, {beside}", kind, large.size, now, before, "ms", at_most=at_most)
    if large.theirs:
        now, before = latency(large.theirs).p50, latency(small.theirs).p50
        yield Result(f"growth of DuckLake's commit, {beside}", kind, large.size, now, before, "ms")
