"""Spark leaves out the rows that position deletes name, as Arrow does; rewriting brings none of them back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from deletes import delete_positions, enter_rows
from lake import files_of, lay, rows_of, with_ids
from lakebook import Book
from lakebook.errors import FilesChanged, InvalidTable
from lakebook.lake.table import Table
from spark.rows import arrow_rows, frame_of, ids, in_spark, once_at


def numbered(book: Book, *files: Sequence[int], name: str = "t", **options: Any) -> Table:
    """A table of numbers, with a file for each sequence of them; `v` is ten times the number."""
    table = book.tables.create(name, "id BIGINT, v BIGINT", **options)
    for values in files:
        table.insert_arrow(arrow_rows(table, [{"id": value, "v": 10 * value} for value in values]))
    return table


def check(spark: SparkSession, table: Table, left: Sequence[int], where: Any = None, **at: Any) -> None:
    """Spark and Arrow read these rows; without a condition both count them too."""
    frame = table.read(spark, where, **at)
    assert ids(frame.toArrow()) == sorted(left)
    assert ids(table.to_arrow(where, **at)) == sorted(left)
    # By its own plan: Iceberg would answer it from its metadata if it could.
    assert frame.count() == len(left)
    if where is None and not at:
        assert table.count() == len(left)


# --- reading -------------------------------------------------------------------


def test_spark_leaves_out_the_rows_that_deletes_name(spark: SparkSession, book: Book) -> None:
    table = numbered(book, range(5), range(5, 10), range(10, 15))
    first, second, third = table.plan().files
    delete_positions(book, table, [(first, 0), (second, 1), (second, 99), (third, 4), ("nowhere", 1)])
    delete_positions(book, table, [(second, 1), (second, 2), (first, 3)], about=second)
    table.insert_arrow(arrow_rows(table, [{"id": 15, "v": 150}]))
    left = [1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 15]
    check(spark, table, left)
    check(spark, table, [5, 8, 9, 10], "id >= 5 AND v < 110")
    check(spark, table, list(range(15)), version=3)
    check(spark, table, sorted({*range(15)} - {0, 6, 14}), version=4)
    found = table.read(spark, columns=["v"]).toArrow()
    assert sorted(found.column("v").to_pylist()) == [10 * number for number in left]
    # Of the first file alone, and of one that has no deletes.
    check(spark, table, [1, 2, 3, 4], "id < 5")
    check(spark, table, [15], "id >= 15")


def test_spark_applies_deletes_by_sequence_number_and_spelling(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, v BIGINT")
    for number in (3, 4, 5):
        rows = [{"id": 10 * number + row, "v": 0} for row in range(4)]
        enter_rows(book, table, rows_of(table, rows), spelled=number == 4, sequence_number=number)
    files = table.plan().files
    delete_positions(book, table, [(file, 1) for file in files], sequence_number=4)
    check(spark, table, [30, 32, 33, 40, 42, 43, 50, 51, 52, 53])
    delete_positions(book, table, [(file, 0) for file in files], sequence_number=3)
    delete_positions(book, table, [(files[1], 2), (files[2], 2)], about=files[1], sequence_number=6)
    check(spark, table, [32, 33, 40, 43, 50, 51, 52, 53])
    delete_positions(book, table, [(file, 3) for file in files], sequence_number=7)
    check(spark, table, [32, 40, 50, 51, 52])


def test_spark_applies_deletes_to_files_without_field_ids(spark: SparkSession, book: Book) -> None:
    table = numbered(book, range(3))
    plain = rows_of(table, [{"id": number, "v": 10 * number} for number in range(3, 6)])
    table.add_files([lay(book, "in/plain.parquet", plain, row_group_size=1)])
    with table.update_schema() as update:
        update.rename_column("v", "w")
    renamed = rows_of(table, [{"id": number, "w": 10 * number} for number in range(6, 9)])
    table.add_files([lay(book, "in/renamed.parquet", renamed, row_group_size=2)])
    files = table.plan().files
    assert [file.has_field_ids for file in files] == [True, False, False]
    delete_positions(book, table, [(file, position) for file, position in zip(files, (0, 1, 2), strict=True)])
    delete_positions(book, table, [(files[2], 0)], about=files[2])
    check(spark, table, [1, 2, 3, 5, 7])
    assert sorted(in_spark(table, spark).column("w").to_pylist()) == [10, 20, 30, 50, 70]


def test_spark_applies_deletes_to_files_of_their_partition_alone(spark: SparkSession, book: Book) -> None:
    # A column has the name that a staged table would give to its own.
    table = book.tables.create("t", "id BIGINT, Scope STRING", partition_by=["Scope"])
    for start in (0, 10):
        rows = [{"id": start + number, "Scope": "ab"[number % 2]} for number in range(4)]
        table.insert_arrow(arrow_rows(table, rows))
        a, b = sorted(table.plan(f"id >= {start}").files, key=lambda file: file.partition_path)
        # They name the first rows of both.
        delete_positions(book, table, [(a, 0), (b, 0)], like=a)
    check(spark, table, [1, 2, 3, 11, 12, 13])
    delete_positions(book, table, [(file, 0) for file in table.plan()], like=b)
    check(spark, table, [2, 3, 12, 13])
    delete_positions(book, table, [(file, 1) for file in table.plan()], about=a)
    check(spark, table, [2, 3, 13])
    check(spark, table, [3, 13], "Scope = 'b'")
    assert in_spark(table, spark).column_names == ["id", "Scope"]


# --- rewriting -----------------------------------------------------------------


def test_deleted_rows_do_not_come_back_when_their_files_are_rewritten(spark: SparkSession, book: Book) -> None:
    table = numbered(book, range(5), range(5, 10), range(10, 15))
    first, second, third = table.plan().files
    delete_positions(book, table, [(first, 0), (second, 0), (third, 0)])
    delete_positions(book, table, [(first, 1)], about=first)
    report = table.delete("id = 2 OR id = 7", spark=spark)
    assert report.removed_files == 2
    check(spark, table, [3, 4, 6, 8, 9, 11, 12, 13, 14])
    # Of the deletes, only those about the first file alone have gone with it.
    assert [row["to_version"] for row in files_of(book, table) if row["content"]] == [None, 6]
    report = table.overwrite(frame_of(spark, table, [{"id": 100, "v": 0}]), where="id > 12")
    assert (report.rows, report.removed_files) == (3, 1)
    check(spark, table, [3, 4, 6, 8, 9, 11, 12, 100])
    table.overwrite(frame_of(spark, table, [{"id": 1, "v": 0}]))
    check(spark, table, [1])


def test_files_stay_when_no_row_that_is_left_matches(spark: SparkSession, book: Book) -> None:
    table = numbered(book, range(5), range(5, 10))
    first, second = table.plan().files
    delete_positions(book, table, [(first, 2), (second, 1), (second, 3)])
    for where in ("id = 2", "id = 6 OR id = 8", "id < 1 AND v > 0"):
        report = table.delete(where, spark=spark)
        assert (report.version, report.removed_files) == (3, 0), where
    assert table.plan().files == (first, second)
    check(spark, table, [0, 1, 3, 4, 5, 7, 9])


def test_a_replacement_has_the_rows_that_are_left(spark: SparkSession, book: Book) -> None:
    table = numbered(book, range(5), range(5, 10), range(10, 12))
    first, second, third = table.plan().files
    delete_positions(book, table, [(first, 2), (second, 1), (third, 0)])
    delete_positions(book, table, [(first, 0), (first, 2)], about=first)
    paths = [first.file_path, second.file_path]
    with pytest.raises(InvalidTable, match="7 rows and their replacement 10"):
        table.replace(paths, table.read(spark, "id < 10", version=3))
    report = table.replace(paths, table.read(spark, "id < 10").coalesce(1))
    assert (report.rows, report.removed_files) == (7, 2)
    check(spark, table, [1, 3, 4, 5, 7, 8, 9, 11])


def test_deletes_that_come_while_files_are_rewritten_are_a_conflict(spark: SparkSession, book: Book) -> None:
    table = numbered(book, range(5), range(5, 10))
    first, _ = table.plan().files
    positions = itertools.count()

    def meanwhile() -> None:
        delete_positions(book, table, [(first, next(positions))])

    frame = frame_of(spark, table, [{"id": 100, "v": 0}])
    with once_at("insert.measured", meanwhile), pytest.raises(FilesChanged):
        table.delete("id = 4", spark=spark)
    with once_at("insert.measured", meanwhile), pytest.raises(FilesChanged):
        table.overwrite(frame, where="id = 4")
    with once_at("insert.measured", meanwhile), pytest.raises(FilesChanged):
        table.replace([first.file_path], table.read(spark, "id < 5").coalesce(1))
    check(spark, table, [3, 4, 5, 6, 7, 8, 9])
    table.delete("id = 4", spark=spark)
    check(spark, table, [3, 5, 6, 7, 8, 9])


# --- any rows, any deletes, any predicate --------------------------------------

#: Rows per file and per row group, and the deletes that come after it: about it alone, and which of its rows
#: and of those of the files before it.
STEPS = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.integers(1, 4),
        st.lists(st.tuples(st.booleans(), st.sets(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=12))),
    ),
    min_size=1,
    max_size=4,
)


def test_spark_and_arrow_read_all_rows_but_the_deleted(spark: SparkSession, book: Book) -> None:
    number = itertools.count()

    @settings(
        max_examples=8,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        phases=(Phase.generate,),
    )
    @given(STEPS, st.integers(0, 30), st.integers(0, 30))
    def compare(steps: list[tuple[int, int, list[tuple[bool, set[tuple[int, int]]]]]], low: int, more: int) -> None:
        table = book.tables.create(f"t{next(number)}", "id BIGINT, v BIGINT")
        left: dict[tuple[int, int], int] = {}
        values = itertools.count()
        for place, (size, group, deletes) in enumerate(steps):
            fresh = {(place, position): next(values) for position in range(size)}
            data = with_ids(table, [{"id": value, "v": 10 * value} for value in fresh.values()])
            table.add_files([lay(book, f"in/{table.id}-{place}.parquet", data, row_group_size=group)])
            left |= fresh
            files = table.plan().files
            for alone, pairs in deletes:
                named = [(place if alone else max(0, place - back), position) for back, position in pairs]
                gone = [(files[at], position) for at, position in named]
                delete_positions(book, table, gone, about=files[place] if alone else None, row_group_size=2)
                for key in named:
                    left.pop(key, None)
        check(spark, table, list(left.values()))
        high = low + more
        chosen = [value for value in left.values() if low <= value < high]
        check(spark, table, chosen, f"id >= {low} AND v < {10 * high}")

    compare()
