"""Compares tables with what their writers were told, and a warehouse with what counts in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg

import lakebook
from books import POSTGRESQL, Place
from buckets import Buckets, left_in
from lakebook import Book
from lakebook.clock import ManualClock, SystemClock
from lakebook.lake.checking import verify_tables
from lakebook.registry.inserts import EVERY_INSERT
from lakebook.registry.table_files import files_by_path
from table_writers import ROWS, TABLE

#: Whoever opens a book with these finds at once what others leave behind.
IMPATIENT = {"insert_alive": 0.1, "sweep_grace": 0, "lease_seconds": 0.1, "temporary_file_grace": 0}


def with_own_warehouse(place: Place, folder: Path) -> Place:
    """The same place with a warehouse that no other book has: its files are counted."""
    if place.kind == POSTGRESQL:
        _move(place, str(folder / "warehouse"))
    return place


def with_bucket(place: Place, buckets: Buckets) -> Place:
    """The same place on PostgreSQL with a bucket that no other book has."""
    place.settings |= buckets.settings
    _move(place, f"s3://{buckets.new_bucket()}/lake")
    return place


def _move(place: Place, warehouse: str) -> None:
    """Give a book on PostgreSQL another warehouse; there is nothing in either."""
    place.settings["warehouse"] = warehouse
    with psycopg.connect(place.target, autocommit=True) as connection:
        connection.execute("UPDATE book SET warehouse = %s", (warehouse,))


def later(seconds: float = 3600.0) -> ManualClock:
    """A clock that stands still, some time from now."""
    return ManualClock(SystemClock().now_ms() + round(seconds * 1000))


def objects_of(book: Book) -> set[str]:
    """Every file in the warehouse, found without the library's help."""
    folder = book.warehouse.folder
    if folder is None:
        return left_in(book.settings.warehouse, book.settings.s3_endpoint)[0]
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def uploads_of(book: Book) -> list[str]:
    """What was begun to be uploaded into the warehouse in parts and neither finished nor ended."""
    if book.warehouse.folder is not None:
        return []
    return left_in(book.settings.warehouse, book.settings.s3_endpoint)[1]


def batches_of(book: Book) -> set[int]:
    """The batches of the table, each of which must be whole and there once."""
    rows = book.table(TABLE).to_arrow()
    found = Counter(zip(rows["batch"].to_pylist(), rows["number"].to_pylist(), strict=True))
    batches = {batch for batch, _ in found}
    assert found == Counter((batch, number) for batch in batches for number in range(ROWS))
    return batches


class Told:
    """What the table must hold, by what its writers told: each says what it begins, and that it is done."""

    def __init__(self) -> None:
        self.batches: set[int] = set()
        self.changes = 0
        self._begun: tuple[set[int], set[int]] | None = None

    def hear(self, facts: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Take in facts, and pass them on."""
        for fact in facts:
            kind, *rest = fact
            if kind == "begin":
                self._begun = set(rest[0]), set(rest[1])
            elif kind == "done":
                assert self._begun is not None
                self.batches = (self.batches | self._begun[0]) - self._begun[1]
                self._begun = None
                self.changes += 1
            else:
                assert kind in ("ready", "step"), fact
            yield fact

    def check(self, book: Book) -> None:
        """All that was acknowledged is there, and at most the one change that was not."""
        allowed = [self.batches]
        if self._begun is not None:
            allowed.append((self.batches | self._begun[0]) - self._begun[1])
        table = book.table(TABLE)
        # Under the table's lock: a server may still have the COMMIT of one under way who is dead already.
        table.set_properties()
        found = batches_of(book)
        assert found in allowed, [(found - one, one - found) for one in allowed]
        self.batches, self._begun = found, None
        assert table.count() == len(found) * ROWS
        checked = book.verify()
        assert checked.ok, checked.findings[:5]


def check_that_only_what_counts_is_left(place: Place) -> None:
    """Expire, clean and sweep at a later time; then every file belongs to a version, and nothing is unfinished."""
    clock = later()
    with lakebook.open(place.target, clock=clock, **{**place.settings, **IMPATIENT}) as book:
        # What goes in one round frees what goes in the next: leases, history, files, rows of dropped tables.
        for _ in range(3):
            book.cleaner.expire(seconds=0, versions=1, wait=True)
            cleaned = book.cleaner.delete_expired_temporary_files()
            swept = book.cleaner.sweep()
            assert not cleaned.failed
            assert not swept.failed
            clock.advance(60)
        # Not through the book, which has nothing to look at when the last table is gone.
        checked = verify_tables(book.lake)
        assert (checked.findings, checked.unfinished) == ([], [])
        assert (checked.checked["temporary_files"], checked.checked["leases"]) == (0, 0)
        assert book._registry.all(EVERY_INSERT, "", 1) == []
        assert uploads_of(book) == []
        there = objects_of(book)
        known = book._registry.read_with(lambda reader: files_by_path(reader, there))
        assert there == {path for path, row in known.items() if row["to_version"] is None}
        assert checked.checked["data_files"] == len(there)
        footers = sum(row["file_type"] == "parquet" for row in known.values())
        assert checked.checked["partition_metadata"] == footers
        assert book.verify().ok
