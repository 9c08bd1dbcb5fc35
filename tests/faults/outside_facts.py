"""Compares what is published with the registry, with other engines, and a warehouse with what counts in it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import duckdb
import pyarrow as pa
from pyiceberg.table import StaticTable

import lakebook
from books import Place
from extent import EVERYWHERE
from lakebook import Book
from lakebook.lake.table import Table
from lakebook.registry.inserts import EVERY_INSERT, known_paths
from lakebook.registry.publishing import SnapshotRecord
from table_facts import IMPATIENT, later, objects_of
from table_writers import ROWS, TABLE

DAYS = 86_400.0
VERSIONS = "lakebook.versions"


def in_order(rows: pa.Table) -> list[str]:
    """Rows that can be compared."""
    return sorted(repr(sorted(row.items())) for row in rows.to_pylist())


def of_pyiceberg(table: Table, snapshot_id: int | None = None) -> list[str]:
    """What PyIceberg reads with nothing but the metadata file."""
    location = table.metadata_location
    assert location is not None
    return in_order(StaticTable.from_metadata(location).scan(snapshot_id=snapshot_id).to_arrow())


def of_duckdb(table: Table) -> list[str]:
    """What DuckDB reads with nothing but the metadata file."""
    location = table.metadata_location
    assert location is not None
    with duckdb.connect() as connection:
        connection.execute("LOAD avro; LOAD iceberg; SET TimeZone = 'UTC'")
        found = connection.execute(f"SELECT * FROM iceberg_scan('{unquote(urlsplit(location).path)}')")
        return in_order(found.to_arrow_table())


def covered(snapshot: SnapshotRecord) -> range:
    """The versions that a snapshot of this book stands for."""
    first, _, last = snapshot.summary[VERSIONS].partition("-")
    return range(int(first), int(last or first) + 1)


def check_history(table: Table) -> list[SnapshotRecord]:
    """One line of snapshots, in which every version has one; the snapshots, the oldest first."""
    found = [snapshot for snapshot in table.snapshots() if snapshot.version is not None]
    location = table.metadata_location
    assert location is not None
    metadata = StaticTable.from_metadata(location).metadata
    listed = sorted(metadata.snapshots, key=lambda snapshot: snapshot.sequence_number or 0)
    assert [item.snapshot_id for item in listed] == [item.snapshot_id for item in found]
    assert metadata.current_snapshot_id == (listed[-1].snapshot_id if listed else None)
    for before, after in itertools.pairwise(listed):
        assert after.parent_snapshot_id == before.snapshot_id
        assert (after.sequence_number or 0) > (before.sequence_number or 0)
        assert after.timestamp_ms >= before.timestamp_ms
    versions = {item.version: item for item in table.history(limit=10_000).items}
    times: Counter[int] = Counter()
    for snapshot in found:
        mine = covered(snapshot) if snapshot.is_ours else [snapshot.version or 0]
        times.update(mine)
        assert max(mine) == snapshot.version
        if snapshot.summary["operation"] != "append":
            assert len(mine) == 1
        for version in mine:
            if version in versions:
                assert versions[version].operation == snapshot.summary["operation"]
    wanted = {number for number, item in versions.items() if item.operation not in ("create", "schema")}
    assert {number for number in times if times[number] > 1} == set()
    assert times.keys() & versions.keys() == {number for number in wanted if number >= min(times, default=number)}
    return found


def check_everywhere(table: Table, *, every: bool = True) -> None:
    """All engines see the same rows; with `every`, PyIceberg those of every version that a snapshot stands for.

    Small runs ask it for a few of them, and DuckDB only then.
    """
    assert table.describe().published_version == table.version
    assert of_pyiceberg(table) == in_order(table.to_arrow())
    if every or EVERYWHERE:
        assert of_duckdb(table) == in_order(table.to_arrow())
    readable = {item.version for item in table.history(limit=10_000).items}
    found = table.snapshots() if every else []
    for snapshot in found if EVERYWHERE else found[:: max(1, len(found) // 4)]:
        if snapshot.version in readable:
            assert of_pyiceberg(table, snapshot.snapshot_id) == in_order(table.to_arrow(version=snapshot.version))


def check_sound(book: Book) -> None:
    """Nothing is wrong."""
    checked = book.verify()
    assert checked.ok, checked.findings[:5]


def of_outside_engines(path: str) -> bool:
    """Whether an object is one that outside engines write themselves, not in the folder of an attempt."""
    _, _, kind, *rest = path.split("/")
    return kind == "data" or (kind == "metadata" and len(rest) == 1)


def check_that_nothing_unknown_lies_in_locations(place: Place) -> None:
    """Sweep at a later time: what no row knows has gone, except what outside engines may yet commit."""
    for seconds, stays in ((3600.0, of_outside_engines), (5 * DAYS, lambda path: False)):
        clock = later(seconds)
        with lakebook.open(place.target, clock=clock, **{**place.settings, **IMPATIENT}) as book:
            for _ in range(3):
                swept = book.cleaner.sweep()
                assert not swept.failed, swept.failed
                clock.advance(60)
            assert book._registry.all(EVERY_INSERT, "", 1) == []
            there = [path for path in objects_of(book) if path.startswith("iceberg/")]
            known = book._registry.read_with(lambda reader: known_paths(reader, there))  # noqa: B023 - called at once
            assert [path for path in there if path not in known and not stays(path)] == []
            known_to_us = book._registry.read_with(lambda reader: known_paths(reader, list(objects_of(book))))
            assert {path for path in objects_of(book) if not path.startswith("iceberg/")} <= known_to_us
            # Whatever a row knows is still there.
            check_sound(book)


# --- what processes noted --------------------------------------------------------


class Noted:
    """What the logs of processes say that the table has to hold."""

    def __init__(self, folder: Path) -> None:
        self.sure: set[int] = set()
        self.open: set[int] = set()
        self.gone: set[int] = set()
        self.added = self.removed = 0
        for file in folder.glob("*.log"):
            for line in file.read_text(encoding="ascii").splitlines():
                what, *numbers = line.split()
                self._take(what, {int(number) for number in numbers})

    def _take(self, what: str, batches: set[int]) -> None:
        if what == "adding":
            self.open |= batches
        elif what == "added":
            self.open -= batches
            self.sure |= batches
            self.added += len(batches)
        elif what == "failed":
            self.open -= batches
            self.gone |= batches
        elif what == "removing":
            self.sure -= batches
            self.open |= batches
        elif what == "removed":
            self.open -= batches
            self.gone |= batches
            self.removed += len(batches)
        elif what == "kept":
            self.open -= batches
            self.sure |= batches
        else:
            raise AssertionError(what)

    def check(self, book: Book) -> None:
        """All that was acknowledged is there once and whole; nothing is there that was removed or refused."""
        rows = book.table(TABLE).to_arrow(columns=["batch", "number"])
        found = Counter(zip(rows["batch"].to_pylist(), rows["number"].to_pylist(), strict=True))
        batches = {batch for batch, _ in found}
        assert found == Counter((batch, number) for batch in batches for number in range(ROWS)), _odd(found)
        assert (sorted(self.sure - batches), sorted(batches & self.gone)) == ([], [])
        assert batches <= self.sure | self.open
        assert book.table(TABLE).count() == len(batches) * ROWS


def _odd(found: Counter[Any]) -> Sequence[Any]:
    whole = Counter(batch for batch, _ in found)
    return [item for item in found.items() if item[1] != 1][:10] + [item for item in whole.items() if item[1] != ROWS]
