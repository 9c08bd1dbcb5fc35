"""Plans of a selective predicate on a table of very many files, beside PyIceberg and beside the bare driver.

The rows of the files are entered in bulk, with their statistics and totals; the files themselves are
not there, for no plan opens them. PyIceberg plans the same files with the same bounds from manifests
in a local folder. The bare driver knows already which files match, and fetches their rows.
"""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

from pyiceberg import expressions
from pyiceberg.conversions import to_bytes
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table import StaticTable
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.refs import SnapshotRef
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.typedef import Record

import lakebook
from bench.asked import Asked, Say
from bench.measure import Comparison, Side, compare, timed
from bench.places import Ground, Place
from bench.report import Result
from lakebook.iceberg.bounds import ColumnBounds, encode
from lakebook.iceberg.statistics import column_stats
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.file_stats import insert_stats
from lakebook.registry.statements import POSTGRESQL, Statement, insert_into
from lakebook.registry.table_files import ADD_TO_TABLE, PLANNED_BY_ID, update_table_statistics
from lakebook.registry.tables import TableRecord, captured_update, locked_table, record_version
from lakebook.registry.transactions import Reader, Transaction, new_id

_SCHEMA = "id BIGINT, code STRING, url STRING, value DOUBLE"
_KINDS = ("long", "string", "string", "double")
_ROWS, _BYTES = 1_000, 50_000
#: Files that a range of ids meets.
_HITS = 10
_AT_ONCE = 10_000
_PER_MANIFEST = 20_000
_SNAPSHOT = 1
#: Seconds that PyIceberg gets for each predicate; once is enough if it takes longer.
_PATIENCE, _LITTLE_PATIENCE = 20.0, 0.0
_MOST_MEMORY = 500

#: What PyIceberg has taken, by its folder and the predicate.
_TAKEN: dict[tuple[Path, str], float] = {}
# Their constructors take more than their types tell.
_ice: Any = expressions
_INSERT_FILE = insert_into(schema.table_files)


@dataclass(frozen=True)
class _Layout:
    """A table of so many files: what is in each column of each file."""

    files: int

    def bounds(self, number: int) -> tuple[tuple[Any, Any], ...]:
        """The least and the largest value of each column in a file."""
        first, last = number * _ROWS, number * _ROWS + _ROWS - 1
        return (first, last), (self.code(number), self.code(number + 1)), (_url(first), _url(last)), (0.0, 1.0)

    def code(self, number: int) -> str:
        """A text that tells files apart by its first characters."""
        return f"{number * (2**60 // self.files):016x}"

    def ids(self, number: int) -> Any:
        """A range of ids that meets the next few files, from this one on."""
        last = (number + _HITS - 1) * _ROWS + 7
        return _ice.And(_ice.GreaterThanOrEqual("id", number * _ROWS + 5), _ice.LessThanOrEqual("id", last))

    def one_code(self, number: int) -> Any:
        """A text that only this file can have."""
        return _ice.EqualTo("code", f"{self.code(number)}5")

    def one_url(self, number: int) -> Any:
        """Another, that all files begin alike."""
        return _ice.EqualTo("url", _url(number * _ROWS + 5))


def _url(number: int) -> str:
    return f"https://example.org/items/{number:012d}"


@dataclass
class Planned:
    """A table of very many files in a book, and what plans are drawn for it."""

    place: Place
    random: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.layout = _Layout(self.place.size)
        # A plan that is kept is no plan that is made.
        book = self.place.open(cache_planned_files=0)
        self.table: Table = book.tables.create("t", _SCHEMA)
        self.registry = book._registry
        self.bare = self.place.connect()

    def fill(self, say: Say) -> None:
        """Enter the rows, some thousands in each version."""
        for start in range(0, self.place.size, _AT_ONCE):
            say(f"plans: filling {self.place.size:,} files", start, self.place.size)
            numbers = range(start, min(start + _AT_ONCE, self.place.size))
            self.registry.write(partial(_enter, record=self.table.record, layout=self.layout, numbers=numbers))
        self.place.analyze()

    def draw(self, number: int) -> list[int]:
        """Files from anywhere in the table."""
        return [self.random.randrange(self.place.size - _HITS) for _ in range(number)]

    def plans(self, where: Callable[[int], Any]) -> Side:
        """Ours: from a predicate to the files."""
        plan = self.table.plan

        def run(predicates: Sequence[Any]) -> None:
            for predicate in predicates:
                _ = plan(predicate).files

        return Side(run, lambda number: [where(first) for first in self.draw(number)])

    def fetches(self, hits: int) -> Side:
        """The bare driver: the rows of files whose ids are known."""
        compiled, execute = PLANNED_BY_ID.on(self.place.kind), self.bare.execute

        def draw(number: int) -> list[tuple[Any, ...]]:
            # Ids count from one.
            wanted = [list(range(first + 1, first + 1 + hits)) for first in self.draw(number)]
            values = [(self.table.id, ids if self.place.kind == POSTGRESQL else str(ids)) for ids in wanted]
            return [compiled.arrange(row) for row in values] if compiled.arrange else values

        def run(rows: Sequence[tuple[Any, ...]]) -> None:
            for values in rows:
                execute(compiled.sql, values).fetchall()

        return Side(run, draw)

    def statements(self, where: Callable[[int], Any]) -> Side:
        """The bare driver: the very statements of a plan, one after the other, and nothing but them."""
        execute = self.bare.execute

        def run(plans: Sequence[Sequence[tuple[str, Any]]]) -> None:
            for plan in plans:
                for sql, values in plan:
                    execute(sql, values).fetchall()

        return Side(run, lambda number: [self._recorded(where(first)) for first in self.draw(number)])

    def _recorded(self, predicate: Any) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        run = Reader._execute

        def record(reader: Reader, statement: Statement, values: Sequence[Any]) -> Any:
            compiled = statement.on(reader.kind)
            found.append((compiled.sql, compiled.arrange(values) if compiled.arrange else values))
            return run(reader, statement, values)

        with patch.object(Reader, "_execute", record):
            _ = self.table.plan(predicate).files
        return found


def _path(number: int, folder: str = "data") -> str:
    return f"{folder}/{number:09d}.parquet"


def _enter(
    transaction: Transaction, record: TableRecord, layout: _Layout, numbers: range, folder: str = "data"
) -> None:
    """Rows and totals as an insert would leave them, but without events, footers and commit rows."""
    before = locked_table(transaction, record)
    now, version, commit_id = transaction.time_of(record.object_id), before["version"] + 1, new_id()
    files, rows, size = len(numbers), len(numbers) * _ROWS, len(numbers) * _BYTES
    transaction.insert_many(
        _INSERT_FILE,
        [
            (
                *(record.id, number + 1, _path(number, "").lstrip("/"), _path(number, folder), _BYTES),
                *("parquet", "", "[]"),
                *(0, _ROWS, 1, "xxh3:2d06800538d394c2", True, 1, True, True, commit_id, version, None, now, now, None),
                *(0, None, None, None),
            )
            for number in numbers
        ],
    )
    insert_stats(
        transaction,
        record.id,
        (
            (
                number + 1,
                [
                    column_stats(
                        field_id,
                        kind,
                        ColumnBounds(encode(kind, low), encode(kind, high), _ROWS, 0, 0),
                        is_exact=True,
                        column_size=_BYTES // len(_KINDS),
                    )
                    for field_id, (kind, (low, high)) in enumerate(
                        zip(_KINDS, layout.bounds(number), strict=True), start=1
                    )
                ],
            )
            for number in numbers
        ),
    )
    row = transaction.one(ADD_TO_TABLE, rows, 0, files, size, 0, files, now, record.id)
    assert row is not None
    captured_update(transaction, record.object_id, schema.tables, before, row)
    update_table_statistics(transaction, record, rows, files, size, now)
    record_version(transaction, record.id, version, "append", 1, commit_id, now, (files, rows, size))


# --- the peer ------------------------------------------------------------------


def iceberg_table(folder: Path, columns: Schema, layout: _Layout, say: Say) -> StaticTable:
    """The same files as an Iceberg table, as PyIceberg writes and opens it."""
    metadata_file = f"{folder}/metadata/v1.metadata.json"
    if not folder.exists():
        io = PyArrowFileIO()
        manifests = list(_manifests(io, folder, columns, layout, say))
        manifest_list = f"{folder}/metadata/snap.avro"
        with write_manifest_list(2, io.new_output(manifest_list), _SNAPSHOT, None, 1, "null") as writer:
            writer.add_manifests(manifests)
        empty = new_table_metadata(columns, UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, str(folder))
        snapshot = Snapshot.model_validate(
            {
                "snapshot-id": _SNAPSHOT,
                "sequence-number": 1,
                "timestamp-ms": empty.last_updated_ms,
                "manifest-list": manifest_list,
                "summary": {"operation": "append"},
                "schema-id": empty.current_schema_id,
            }
        )
        main = SnapshotRef.model_validate({"snapshot-id": _SNAPSHOT, "type": "branch"})
        filled = {"last_sequence_number": 1, "snapshots": [snapshot], "current_snapshot_id": _SNAPSHOT}
        metadata = empty.model_copy(update={**filled, "refs": {"main": main}})
        ToOutputFile.table_metadata(metadata, io.new_output(metadata_file))
    return StaticTable.from_metadata(metadata_file)


def _manifests(io: PyArrowFileIO, folder: Path, columns: Schema, layout: _Layout, say: Say) -> Iterator[ManifestFile]:
    for start in range(0, layout.files, _PER_MANIFEST):
        say("plans: writing PyIceberg's manifests", start, layout.files)
        # Not compressed: so they are read fastest.
        output = io.new_output(f"{folder}/metadata/m{start}.avro")
        with write_manifest(2, UNPARTITIONED_PARTITION_SPEC, columns, output, _SNAPSHOT, "null") as writer:
            for number in range(start, min(start + _PER_MANIFEST, layout.files)):
                writer.add_entry(_entry(columns, layout, number))
        yield writer.to_manifest_file()


def _entry(columns: Schema, layout: _Layout, number: int) -> ManifestEntry:
    ids = [column.field_id for column in columns.fields]
    types: list[Any] = [column.field_type for column in columns.fields]
    bounds = layout.bounds(number)
    data_file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"file:///{_path(number)}",
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=_ROWS,
        file_size_in_bytes=_BYTES,
        column_sizes=dict.fromkeys(ids, _BYTES // len(ids)),
        value_counts=dict.fromkeys(ids, _ROWS),
        null_value_counts=dict.fromkeys(ids, 0),
        nan_value_counts=dict.fromkeys(ids[-1:], 0),
        lower_bounds={key: to_bytes(kind, low) for key, kind, (low, _) in zip(ids, types, bounds, strict=True)},
        upper_bounds={key: to_bytes(kind, high) for key, kind, (_, high) in zip(ids, types, bounds, strict=True)},
    )
    data_file.spec_id = 0
    return ManifestEntry.from_args(
        status=ManifestEntryStatus.ADDED, snapshot_id=_SNAPSHOT, sequence_number=None, data_file=data_file
    )


# --- measuring -----------------------------------------------------------------


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """The largest table by itself, and beside the smallest."""
    with ExitStack() as stack:
        tables = []
        for size in asked.planned:
            table = Planned(stack.enter_context(ground.new(size, "plans")))
            tables.append(table)
            table.fill(say)
        yield from _beside_driver(table, asked, say)
        yield from _beside_pyiceberg(table, ground.folder / f"iceberg-{size}", asked, say)
        yield from _memory(table, say)
        if len(tables) > 1:
            yield from _growth(tables[0], table, asked, say)


def _predicates(layout: _Layout) -> list[tuple[str, Callable[[int], Any], int]]:
    """Their names, the predicates by the file they begin with, and how many files they meet."""
    return [
        ("a range of ids", layout.ids, _HITS),
        ("one text", layout.one_code, 1),
        ("one text of many that begin alike", layout.one_url, 1),
    ]


def _beside_driver(table: Planned, asked: Asked, say: Say) -> Iterator[Result]:
    for name, where, hits in _predicates(table.layout):
        say(f"plans: {name}, {table.place.size:,} files")
        first = table.draw(1)[0]
        assert _numbers(table.table.plan(where(first))) == list(range(first, first + hits))
        ours = table.plans(where)
        found = compare(ours, table.fetches(hits), asked.effort)
        yield _micros(f"plan, {name}, beside fetching its files by id", table, found)
        found = compare(ours, table.statements(where), asked.effort)
        yield _micros(f"plan, {name}, beside its statements", table, found, at_most=3)
    texts = table.plans(lambda first: f"id BETWEEN {first * _ROWS + 5} AND {(first + _HITS - 1) * _ROWS + 7}")
    found = compare(texts, table.plans(table.layout.ids), asked.effort)
    yield _micros("plan, a range of ids, as text, beside an expression", table, found)


def _beside_pyiceberg(table: Planned, folder: Path, asked: Asked, say: Say) -> Iterator[Result]:
    peer = iceberg_table(folder, table.table.schema, table.layout, say)
    for name, where, hits in _predicates(table.layout):
        say(f"plans: {name}, PyIceberg")
        if (folder, name) not in _TAKEN:
            # Once for both databases: it takes a minute, and has nothing to do with them.
            _TAKEN[folder, name] = _pyiceberg_seconds(table, peer, where, hits, asked)
        ours = table.plans(where)
        taken = median(timed(partial(ours.run, [value]))[0] for value in ours.draw(50))
        rates = 1 / taken, 1 / _TAKEN[folder, name]
        title = f"plan, {name}, beside PyIceberg"
        yield Result(title, table.place.kind, table.place.size, *rates, "plans/s", at_least=50)


def _pyiceberg_seconds(
    table: Planned, peer: StaticTable, where: Callable[[int], Any], hits: int, asked: Asked
) -> float:
    deadline = perf_counter() + (_LITTLE_PATIENCE if asked.quick else _PATIENCE)
    taken: list[float] = []
    while not taken or perf_counter() < deadline:
        first = table.draw(1)[0]
        value = where(first)
        spent, found = timed(lambda: list(peer.scan(row_filter=value).plan_files()))  # noqa: B023 - called at once
        assert _numbers(task.file for task in found) == list(range(first, first + hits))
        taken.append(spent)
    return median(taken)


def _numbers(files: Iterable[Any]) -> list[int]:
    return sorted(int(Path(file.file_path).stem) for file in files)


def _growth(small: Planned, large: Planned, asked: Asked, say: Say) -> Iterator[Result]:
    beside = f"beside {small.place.size:,} files"
    both = zip(_predicates(large.layout), _predicates(small.layout), strict=True)
    for (name, where, _), (_, where_small, _) in both:
        say(f"plans: growth, {name}")
        found = compare(large.plans(where), small.plans(where_small), asked.effort)
        yield _micros(f"growth of a plan, {name}, {beside}", large, found)
    found = compare(large.fetches(_HITS), small.fetches(_HITS), asked.effort)
    yield _micros(f"growth of fetching {_HITS} files by id, {beside}", large, found)


def _micros(name: str, table: Planned, found: Comparison, at_most: float | None = None) -> Result:
    kind, size = table.place.kind, table.place.size
    return Result(name, kind, size, found.ours * 1e6, found.peer * 1e6, "µs", at_most=at_most)


# --- memory --------------------------------------------------------------------


def _memory(table: Planned, say: Say) -> Iterator[Result]:
    """By how much planning makes a process of its own grow."""
    for name, wanted in (("a selective plan", True), ("a plan of every file", False)):
        say(f"plans: memory of {name}")
        where = table.layout.ids(table.draw(1)[0]) if wanted else None
        target, settings = table.place.target
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            grown, number = pool.submit(_planned_memory, target, settings, where).result()
        assert number == (_HITS if wanted else table.place.size)
        kind, size = table.place.kind, table.place.size
        yield Result(f"memory by which {name} grows", kind, size, grown, None, "MB", below=_MOST_MEMORY)


def _planned_memory(target: str, settings: dict[str, Any], where: Any) -> tuple[float, int]:
    with lakebook.open(target, **settings) as book:
        table = book.table("t")
        before = _megabytes("VmRSS")
        number = sum(1 for _ in table.plan(where))
        return _megabytes("VmHWM") - before, number


def _megabytes(line: str) -> float:
    """Resident memory, now (`VmRSS`) or at most (`VmHWM`)."""
    # What Linux tells of a process by getrusage begins with the memory of the one that started it.
    status = Path("/proc/self/status")
    if status.exists():
        found = dict(row.split(":", 1) for row in status.read_text().splitlines())
        return int(found[line].split()[0]) / 1000
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage / 1e6 if sys.platform == "darwin" else usage / 1000
