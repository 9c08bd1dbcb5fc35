"""`SELECT COUNT(*)` on a view while its ranges are rebuilt, merged, retired and cleaned up with a grace of zero."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import lakebook
from lake import insert, records
from lakebook import Book
from lakebook.errors import LakebookError
from lakebook.lake.footer_store import footers_for
from lakebook.registry import schema
from lakebook.views.view import View
from streaming import in_thread
from viewing import DAY, T0, at

#: How often it is counted.
COUNTS = int(os.environ.get("LAKEBOOK_TEST_COUNTS", "1000"))
COLUMNS = 120
LARGE = 8 * 1024
#: Hours with rows: of the first day, which is always there, and of the second.
KEPT, RETIRED = (1, 2, 3), (25, 26)
ROWS = 2


@pytest.fixture
def book(tmp_path: Path, empty_book: Path) -> Book:
    """A book that keeps nothing in memory and no file longer than it has to."""
    return lakebook.open(tmp_path / "book", publish="off", temporary_file_grace=0, cache_footers=0)


def wide_view(book: Book) -> View:
    columns = ", ".join(f"c{number} STRING" for number in range(COLUMNS))
    table = book.tables.create("wide", f"id BIGINT, ts TIMESTAMP, {columns}")
    for hour in (*KEPT, *RETIRED):
        values = {f"c{number}": f"value {number} of {hour}" for number in range(COLUMNS)}
        insert(table, *({"id": n, "ts": at(hour + 0.1 * n), **values} for n in range(ROWS)))
    return book.views.create("blocks", "SELECT * FROM wide", event_time="ts")


def churn(book: Book, view: View, spark: SparkSession, done: threading.Event) -> int:
    """Rebuild, merge, retire and clean up until it is enough; how many times."""
    cleaner, rounds = book.cleaner, 0
    while not done.is_set() or rounds == 0:
        view.materialize(spark, T0 + DAY, T0 + 2 * DAY)
        view.merge_partitions(spark, "day")
        view.regenerate_partitions(spark, at(1), at(4))
        assert view.retire_partitions(T0 + DAY, T0 + 2 * DAY) >= 1
        cleaner.delete_expired_temporary_files()
        rounds += 1
    return rounds


def counted(book: Book, view: View) -> tuple[int, int]:
    """The rows of a view by the stored footers of its files, and by its plan."""
    with book.table("lakebook_views.blocks").pin() as pinned:
        plan = pinned.plan()
        footers = footers_for(book.lake, plan.files)
        assert len(footers) == len(plan.files)
        return sum(footers[file.file_path].open(file.file_path).num_rows for file in plan.files), plan.row_count


def test_a_view_with_large_footers_is_counted_whatever_happens_to_its_ranges(book: Book, spark: SparkSession) -> None:
    view = wide_view(book)
    view.materialize(spark, T0, T0 + DAY)
    assert min(len(row["metadata"]) for row in records(book, schema.partition_metadata)) > LARGE
    done = threading.Event()
    total = ROWS * len(KEPT)
    possible = {total + ROWS * number for number in range(len(RETIRED) + 1)}
    try:
        with in_thread(lambda: churn(book, view, spark, done)) as outcome:
            try:
                for _ in range(COUNTS):
                    assert view.count(T0, T0 + DAY) == total
                    assert book.sql_count("SELECT COUNT(*) FROM blocks") in possible
                    by_footers, by_plan = counted(book, view)
                    assert by_footers == by_plan
                    assert by_footers in possible
            finally:
                done.set()
        assert not isinstance(outcome[0], BaseException | LakebookError), outcome[0]
        assert book.verify().findings == ()
    finally:
        book.close()
