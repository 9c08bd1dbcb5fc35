"""Overwriting, deleting and replacing through Spark; what fails leaves nothing, and what races is told so."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

import lakebook
from extent import long
from lakebook import Book, failpoints
from lakebook.errors import (
    FilesChanged,
    InsertFailed,
    InvalidInput,
    InvalidTable,
    LakebookError,
    SparkUnsuitable,
    TableNotFound,
)
from lakebook.lake.table import Table
from spark.rows import (
    arrow_rows,
    check_same,
    frame_of,
    ids,
    in_spark,
    known_files,
    once_at,
    raising,
    remains,
    values,
    warehouse_of,
)
from spark.sessions import PARTITIONS as TASKS
from spark.sessions import ROWS as MANY
from spark.sessions import TABLE
from streaming import in_thread

PROGRAM = Path(__file__).parent / "sessions.py"
CLUSTER = Path(__file__).parent / "cluster.py"
COLUMNS = "id BIGINT NOT NULL, g STRING, v DOUBLE"
ROWS: list[dict[str, Any]] = [
    {"id": 1, "g": "a", "v": 1.0},
    {"id": 2, "g": "a", "v": 2.0},
    {"id": 3, "g": "a", "v": None},
    {"id": 4, "g": "b", "v": 1.0},
    {"id": 5, "g": "b", "v": 2.0},
    {"id": 6, "g": None, "v": 3.0},
    {"id": 7, "g": "c", "v": None},
]


def grouped(book: Book, name: str = "t", rows: list[dict[str, Any]] = ROWS) -> Table:
    """A table with one file for each group."""
    table = book.tables.create(name, COLUMNS, partition_by=["g"])
    table.insert_arrow(arrow_rows(table, rows))
    return table


def without(*gone: int) -> list[dict[str, Any]]:
    return [row for row in ROWS if row["id"] not in gone]


# --- overwriting ---------------------------------------------------------------


def test_all_rows_are_overwritten_and_the_old_version_still_has_them(spark: SparkSession, book: Book) -> None:
    table = grouped(book)
    new = [{"id": 10, "g": "a", "v": 1.0}, {"id": 11, "g": "new"}]
    report = table.overwrite(frame_of(spark, table, new), properties={"why": "a test"})
    assert (report.operation, report.version, report.rows, report.files) == ("overwrite", 2, 2, 2)
    assert (report.removed_rows, report.removed_files) == (7, 4)
    check_same(table, spark, new)
    assert values(in_spark(table, spark, version=1)) == values(arrow_rows(table, ROWS))
    assert table.history().items[0].summary == {"why": "a test"}
    # By nothing: the table is empty, and doing it again changes nothing.
    assert table.overwrite(frame_of(spark, table, [])).version == 3
    assert (table.count(), in_spark(table, spark).num_rows, table.record.file_count) == (0, 0, 0)
    assert table.overwrite(frame_of(spark, table, [])).version == 3


def test_the_rows_of_a_predicate_are_overwritten_and_those_it_is_unknown_of_stay(
    spark: SparkSession, book: Book
) -> None:
    table = grouped(book)
    # Columns that the frame does not have are null in its rows, and stay what they are in the others.
    report = table.overwrite(spark.sql("SELECT 10L id, 'z' g"), where="v < 2")
    assert (report.operation, report.rows, report.removed_files) == ("overwrite", 4, 2)
    check_same(table, spark, [*without(1, 4), {"id": 10, "g": "z"}])
    # Files that cannot match are not touched.
    untouched = {file.file_path for file in table.plan("g = 'c'")}
    assert untouched <= {file.file_path for file in table.plan(version=1)}
    # Nothing matches: then it is an append.
    report = table.overwrite(spark.sql("SELECT 11L id, 'z' g"), where="v = 77")
    assert (report.rows, report.removed_files) == (1, 0)
    check_same(table, spark, [*without(1, 4), {"id": 10, "g": "z"}, {"id": 11, "g": "z"}])


def test_rows_are_overwritten_by_what_was_read_from_the_table_itself(spark: SparkSession, book: Book) -> None:
    for kind in ("parquet", "json"):
        table = book.tables.create(kind, COLUMNS, format=kind)
        table.insert(frame_of(spark, table, ROWS))
        doubled = table.read(spark, "g = 'a'").withColumn("v", F.col("v") * 2)
        table.overwrite(doubled, where="g = 'a'")
        check_same(table, spark, [{**row, "v": row["v"] * 2} if row["g"] == "a" and row["v"] else row for row in ROWS])


def test_exactly_the_rows_of_a_partition_are_overwritten(spark: SparkSession, book: Book) -> None:
    odd = ["null", None, "a b", "a+b", "a%20b", "x" * 300, "x" * 301, "", "1", "true", "ü/名"]
    rows = [{"id": number, "g": text} for number, text in enumerate(odd)]
    table = grouped(book, rows=rows)
    for number, text in enumerate(odd):
        report = table.overwrite(frame_of(spark, table, [{"id": 100 + number, "g": text}]), partition={"g": text})
        rows[number] = {"id": 100 + number, "g": text}
        assert (report.rows, report.removed_rows) == (1, 1), text
        assert values(table.to_arrow()) == values(arrow_rows(table, rows)), text
    check_same(table, spark, rows)


def test_a_partition_of_a_transform_is_overwritten(spark: SparkSession, book: Book) -> None:
    table = book.tables.create(
        "days", "id INT, ts TIMESTAMP, n INT, b BOOLEAN", partition_by=["day(ts)", "truncate(10, n)", "b"]
    )
    noon = datetime(1969, 12, 31, 12, tzinfo=UTC)
    rows = [
        {"id": 1, "ts": noon, "n": 5, "b": True},
        {"id": 2, "ts": noon, "n": 15, "b": False},
        {"id": 3, "ts": datetime(1970, 1, 1, tzinfo=UTC), "n": 5, "b": None},
    ]
    table.insert(frame_of(spark, table, rows))
    for partition, number in (({"ts_day": "1969-12-31", "n_trunc": 0}, 0), ({"b": False}, 1), ({"b": None}, 2)):
        rows[number] = {**rows[number], "id": 10 + number}
        report = table.overwrite(frame_of(spark, table, [rows[number]]), partition=partition)
        assert (report.rows, report.removed_rows) == (1, 1)
        assert values(table.to_arrow()) == values(arrow_rows(table, rows))


def test_an_overwrite_that_makes_no_sense_is_refused(spark: SparkSession, book: Book) -> None:
    table = grouped(book)
    frame = frame_of(spark, table, [{"id": 10, "g": "z"}])
    wrong: list[dict[str, Any]] = [
        {"where": "g = 'a'", "partition": {"g": "a"}},
        {"partition": {"nope": 1}},
        {"partition": {}},
        # Its rows are of another partition.
        {"partition": {"g": "a"}},
        {"where": "nope = 1"},
        {"where": "g = 'a"},
    ]
    for how in wrong:
        with pytest.raises(InvalidInput):
            table.overwrite(frame, **how)
    check_same(table, spark, ROWS)
    assert table.version == 1


# --- deleting ------------------------------------------------------------------


def test_whole_files_are_deleted_without_spark(spark: SparkSession, book: Book) -> None:
    table = grouped(book)
    report = table.delete("g = 'a'")
    assert (report.operation, report.version, report.rows, report.removed_rows) == ("delete", 2, 0, 3)
    table.delete("g is null or v = 77")
    check_same(table, spark, without(1, 2, 3, 6))
    table.delete("true")
    assert (table.count(), table.record.total_size) == (0, 0)
    assert in_spark(table, spark).num_rows == 0
    assert table.delete("true").version == table.version
    assert table.delete("false").version == table.version


def test_files_that_match_in_part_are_rewritten_without_those_rows(spark: SparkSession, book: Book) -> None:
    table = grouped(book)
    with pytest.raises(SparkUnsuitable) as raised:
        table.delete("v = 1")
    assert "spark=" in raised.value.remedy
    assert table.version == 1
    report = table.delete("v = 1", spark=spark)
    assert (report.operation, report.rows, report.removed_rows, report.removed_files) == ("overwrite", 3, 5, 2)
    check_same(table, spark, without(1, 4))
    # A row of which it is unknown whether it matches stays.
    table.delete("not (v = 2)", spark=spark)
    check_same(table, spark, without(1, 4, 6))
    table.delete("v != 2 or id = 7", spark=spark)
    check_same(table, spark, without(1, 4, 6, 7))
    # What could match by the bounds of its file but does not makes no version.
    version = table.version
    report = table.delete("id = 2 and v > 2", spark=spark)
    assert (report.version, report.rows, report.removed_files) == (version, 0, 0)
    report = table.delete("v > 1.5 and v < 1.75", spark=spark)
    assert (report.version, report.rows, report.removed_files) == (version, 0, 0)
    for nothing in (None, "", "nope = 1"):
        with pytest.raises(InvalidInput):
            table.delete(nothing, spark=spark)
    check_same(table, spark, without(1, 4, 6, 7))


def test_rows_of_files_of_every_age_are_deleted(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("old", "id INT, a STRING, s STRUCT<x: INT>")
    table.insert_arrow(arrow_rows(table, [{"id": 1, "a": "one", "s": {"x": 1}}, {"id": 2, "a": "two", "s": {"x": 2}}]))
    (warehouse_of(book) / "foreign").mkdir()
    pq.write_table(
        arrow_rows(table, [{"id": 3, "a": "three", "s": {"x": 3}}, {"id": 4, "a": "four"}]),
        warehouse_of(book) / "foreign/one.parquet",
    )
    table.add_files(["foreign/one.parquet"])
    with table.update_schema() as update:
        update.rename_column("s.x", "y").rename_column("a", "b").add_column("a", "INT").widen_column("id", "BIGINT")
    table.insert_arrow(arrow_rows(table, [{"id": 5, "a": 5, "b": "five"}, {"id": 6, "a": 6}]))
    table.delete("id = 1 or s.y = 3 or a = 5", spark=spark)
    check_same(table, spark, [{"id": 2, "b": "two", "s": {"y": 2}}, {"id": 4, "b": "four"}, {"id": 6, "a": 6}])


def test_a_table_of_json_is_overwritten_and_deleted_from(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("lines", COLUMNS, format="json")
    table.insert(frame_of(spark, table, ROWS))
    assert table.delete("v = 77", spark=spark).version == 1
    table.delete("v = 1", spark=spark)
    check_same(table, spark, without(1, 4))
    table.overwrite(frame_of(spark, table, [{"id": 10}]), where="g = 'a' or g is null")
    check_same(table, spark, [*without(1, 2, 3, 4, 6), {"id": 10}])
    table.delete("true")
    assert (table.count(), in_spark(table, spark).num_rows) == (0, 0)


def test_types_that_spark_does_not_have_are_read_and_rewritten_as_what_they_are(
    spark: SparkSession, book: Book
) -> None:
    known = [uuid.UUID(int=2**127 + number) for number in range(3)]
    columns = pa.schema([("id", pa.int64()), ("u", pa.uuid()), ("f", pa.binary(4))])
    table = book.tables.create("types", columns)
    fixed = [b"abcd", None, b"\0\0\0\0"]
    rows = [{"id": number + 1, "u": known[number], "f": fixed[number]} for number in range(3)]
    table.insert_arrow(arrow_rows(table, rows))
    assert in_spark(table, spark).column("u").to_pylist() == [str(item) for item in known]
    assert ids(table.to_arrow(f"u = '{known[1]}'")) == [2]
    assert ids(in_spark(table, spark, f"u = '{known[1]}'")) == [2]
    table.delete("id = 1", spark=spark)
    rest = table.to_arrow().sort_by("id")
    assert (rest.column("u").to_pylist(), rest.column("f").to_pylist()) == (known[1:], fixed[1:])


def test_a_column_of_times_is_refused_by_spark_in_our_words(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("times", "id BIGINT, at TIME")
    table.insert_arrow(arrow_rows(table, [{"id": 1, "at": time(1, 2, 3, 4)}]))
    for act in (lambda: table.read(spark), lambda: table.insert(spark.range(1).toDF("id"))):
        with pytest.raises(LakebookError):
            act()
    assert table.to_arrow().to_pylist() == [{"id": 1, "at": time(1, 2, 3, 4)}]


# --- replacing -----------------------------------------------------------------


def test_files_are_replaced_by_the_same_rows_in_other_files(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("small", COLUMNS)
    for row in ROWS:
        table.insert_arrow(arrow_rows(table, [row]))
    paths = [file.file_path for file in table.plan()]
    report = table.replace(paths, table.read(spark).coalesce(1))
    assert (report.operation, report.rows, report.files, report.removed_files) == ("replace", 7, 1, 7)
    check_same(table, spark, ROWS)
    assert set(paths) < known_files(book)
    other = book.tables.create("other", COLUMNS)
    other.insert_arrow(arrow_rows(other, ROWS))
    (present,) = (file.file_path for file in table.plan())
    (strange,) = (file.file_path for file in other.plan())
    frame = frame_of(spark, table, ROWS)
    refused: list[tuple[list[str], DataFrame, type[LakebookError]]] = [
        ([present], frame_of(spark, table, ROWS[1:]), InvalidTable),
        ([present], frame.union(frame), InvalidTable),
        ([present], frame_of(spark, table, []), InvalidTable),
        ([present, strange], frame, InvalidInput),
        (["data/nope.parquet"], frame, InvalidInput),
        ([], frame, InvalidInput),
        # They are gone from the table, though not yet from the warehouse.
        (paths, frame, FilesChanged),
    ]
    for wrong, rows, error in refused:
        with pytest.raises(error):
            table.replace(wrong, rows)
    assert table.version == report.version
    check_same(table, spark, ROWS)


# --- at the same time ----------------------------------------------------------


@pytest.fixture
def rival(book: Book, tmp_path: Path) -> Book:
    """The same book, opened by somebody else."""
    return lakebook.open(tmp_path / "book", publish="off")


def test_a_change_of_files_that_another_has_ended_is_refused_and_leaves_nothing(
    spark: SparkSession, book: Book, rival: Book
) -> None:
    table = grouped(book)
    changes: dict[str, Callable[[], object]] = {
        "overwrite": lambda: table.overwrite(frame_of(spark, table, [{"id": 10, "g": "a"}]), where="id = 1"),
        "partition": lambda: table.overwrite(frame_of(spark, table, [{"id": 10, "g": "a"}]), partition={"g": "a"}),
        "delete": lambda: table.delete("id = 1", spark=spark),
        "replace": lambda: table.replace([_path(table, "a")], table.read(spark, "g = 'a'")),
    }
    for name, change in changes.items():
        before = ids(table.to_arrow())
        version = table.version
        with once_at("insert.measured", lambda: rival.table("t").delete("g = 'a'")), pytest.raises(FilesChanged):
            change()
        assert table.version == version + 1, name
        assert ids(table.to_arrow()) == [number for number in before if number not in (1, 2, 3)], name
        assert {path for path in remains(warehouse_of(book)) if path.startswith("data/")} == known_files(book), name
        # It can be repeated: its rows are no longer there, or are there again.
        table.insert_arrow(arrow_rows(table, ROWS[:3]))
    check_same(table, spark, ROWS)
    rival.close()


def _path(table: Table, group: str) -> str:
    (file,) = table.plan(f"g = '{group}'")
    return file.file_path


def test_changes_of_other_files_and_appends_do_not_conflict(spark: SparkSession, book: Book, rival: Book) -> None:
    table = grouped(book)
    late = {"id": 20, "g": "a", "v": 1.0}

    def interfere() -> None:
        other = rival.table("t")
        other.delete("g = 'c'")
        other.insert_arrow(arrow_rows(other, [late]))
        other.overwrite(frame_of(spark, other, [{"id": 21, "g": "b"}]), partition={"g": "b"})

    with once_at("insert.measured", interfere):
        report = table.overwrite(frame_of(spark, table, [{"id": 10, "g": "a"}]), where="g = 'a'")
    assert report.version == 5
    # The late row came after the overwrite had looked: it is not one of those that were replaced.
    check_same(table, spark, [ROWS[5], late, {"id": 21, "g": "b"}, {"id": 10, "g": "a"}])
    with once_at("insert.measured", lambda: rival.table("t").insert_arrow(arrow_rows(table, [{"id": 22, "g": "a"}]))):
        table.overwrite(frame_of(spark, table, [{"id": 30, "g": "z"}]))
    check_same(table, spark, [{"id": 22, "g": "a"}, {"id": 30, "g": "z"}])
    rival.close()


def test_a_schema_that_changes_during_an_insert_is_the_one_its_rows_are_read_with(
    spark: SparkSession, book: Book, rival: Book
) -> None:
    table = book.tables.create("t", "id BIGINT, s STRUCT<a: INT>, b STRING")

    def rename() -> None:
        with rival.table("t").update_schema() as update:
            update.rename_column("s.a", "c").rename_column("b", "a").add_column("b", "INT")

    with once_at("insert.measured", rename):
        table.insert(frame_of(spark, table, [{"id": 1, "s": {"a": 7}, "b": "text"}]))
    check_same(table, spark, [{"id": 1, "s": {"c": 7}, "a": "text"}])
    rival.close()


def test_a_table_that_is_dropped_during_an_insert_takes_nothing(spark: SparkSession, book: Book, rival: Book) -> None:
    other = grouped(book, "other")
    for point in ("insert.staged", "insert.measured"):
        table = book.tables.create("t", COLUMNS)
        with once_at(point, lambda: rival.tables.drop("t")), pytest.raises(TableNotFound):
            table.insert(frame_of(spark, other, ROWS))
    rival.close()
    check_same(other, spark, ROWS)
    book.cleaner.expire()


# --- failing -------------------------------------------------------------------


def inserts(spark: SparkSession, table: Table) -> dict[str, Callable[[], object]]:
    """Each way to write through Spark."""
    frame = frame_of(spark, table, [{"id": 10, "g": "a"}, {"id": 11, "g": "b"}])
    return {
        "insert": lambda: table.insert(frame),
        "overwrite": lambda: table.overwrite(frame, where="v = 1"),
        "delete": lambda: table.delete("v = 1", spark=spark),
        "replace": lambda: table.replace([_path(table, "b")], frame),
    }


@pytest.mark.parametrize(
    "point", ["insert.reserved", "insert.staged", "insert.written", "insert.measured", "change.written"]
)
def test_a_step_that_fails_leaves_no_row_no_version_and_no_file(spark: SparkSession, book: Book, point: str) -> None:
    table = grouped(book)
    before = remains(warehouse_of(book))
    with failpoints.armed(point, raising(RuntimeError("the driver stumbled"))):
        for name, act in inserts(spark, table).items():
            with pytest.raises(InsertFailed) as raised:
                act()
            assert "the driver stumbled" in raised.value.what
            assert (table.version, table.count()) == (1, 7), name
            assert remains(warehouse_of(book)) == before, name
    assert book.verify().ok
    check_same(table, spark, ROWS)


def test_an_interrupted_insert_leaves_nothing_either(spark: SparkSession, book: Book) -> None:
    table = grouped(book)
    before = remains(warehouse_of(book))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with failpoints.armed("insert.written", interrupt), pytest.raises(KeyboardInterrupt):
        table.insert(frame_of(spark, table, ROWS))
    assert (table.version, remains(warehouse_of(book))) == (1, before)


def test_an_error_on_an_executor_is_one_clear_error_and_leaves_nothing(spark: SparkSession, book: Book) -> None:
    other = grouped(book, "other")
    tables = [
        book.tables.create("plain", "id BIGINT"),
        book.tables.create("lines", "id BIGINT", format="json"),
        book.tables.create("parts", "id BIGINT", partition_by=["bucket(8, id)"]),
    ]

    def stumble(number: int) -> int:
        if number == 900:
            raise ValueError("row 900 is not to be had")
        return number

    # Not the function itself: for one with types PySpark would ask for Pandas.
    own = F.udf(lambda number: stumble(number), "bigint")
    numbers = spark.range(0, 1000, 1, 4)
    failing = {
        "no luck today": numbers.selectExpr("if(id = 900, raise_error('no luck today'), id) id"),
        "row 900 is not to be had": numbers.select(own("id").alias("id")),
        "DIVIDE_BY_ZERO": numbers.selectExpr("CAST(1000 / (id - 900) AS BIGINT) id"),
    }
    before = remains(warehouse_of(book))
    for reason, frame in failing.items():
        for table in tables if reason == "no luck today" else tables[:1]:
            with pytest.raises(InsertFailed) as raised:
                table.insert(frame)
            assert reason in str(raised.value)
            assert "\n" not in str(raised.value)
            assert len(str(raised.value)) < 600
            assert (table.version, table.count()) == (0, 0)
            if remains(warehouse_of(book)) != before:
                # A task of the same job that was late made its folder anew: that is what sweeps are for.
                with lakebook.open(warehouse_of(book).parent, sweep_grace=0) as janitor:
                    janitor.cleaner.sweep()
            assert remains(warehouse_of(book)) == before
    with pytest.raises(InsertFailed):
        other.overwrite(numbers.selectExpr("if(id = 900, raise_error('no luck today'), id) id"), where="v = 1")
    check_same(other, spark, ROWS)
    # The session is as good as before.
    tables[0].insert(numbers.toDF("id"))
    assert (tables[0].count(), len(set(ids(in_spark(tables[0], spark))))) == (1000, 1000)


def test_a_file_that_no_committed_task_wrote_is_never_visible_and_is_swept(
    spark: SparkSession, book: Book, tmp_path: Path
) -> None:
    with lakebook.open(tmp_path / "book", sweep_grace=0) as other:
        table = other.tables.create("t", "id BIGINT")

        def leave() -> None:
            (folder,) = (warehouse_of(other) / f"data/{table.id}").iterdir()
            (folder / "d/00099-99-late.parquet").write_bytes(b"half of a file")

        with once_at("insert.written", leave):
            table.insert(spark.range(5).toDF("id"))
        check_same(table, spark, [{"id": number} for number in range(5)])
        other.cleaner.sweep()
    assert remains(warehouse_of(book)) == known_files(book)


# --- sessions of their own -----------------------------------------------------


def run(act: str, book: Book, marks: Path) -> dict[str, Any]:
    """What a program with a session of its own says."""
    return run_program(book, marks, PROGRAM, act)


def run_program(book: Book, marks: Path, program: Path, *words: str) -> dict[str, Any]:
    folder = warehouse_of(book).parent
    marks.mkdir()
    child = subprocess.run(
        [sys.executable, str(program), *words, str(folder), str(marks)], capture_output=True, text=True, timeout=250
    )
    assert child.returncode == 0, child.stderr[-3000:]
    found: dict[str, Any] = json.loads(child.stdout)
    return found


def test_rows_of_tasks_that_were_tried_again_are_there_once(spark: SparkSession, book: Book, tmp_path: Path) -> None:
    table = book.tables.create(TABLE, "id BIGINT")
    told = run("retried", book, tmp_path / "marks")
    assert (told["rows"], told["files"], told["failed"]) == (MANY, TASKS, TASKS)
    assert ids(in_spark(table, spark)) == ids(table.to_arrow()) == list(range(MANY))
    assert (table.count(), table.record.file_count) == (MANY, TASKS)


@long
def test_rows_are_there_once_when_executors_are_killed_and_a_slow_task_is_run_twice(book: Book, tmp_path: Path) -> None:
    table = book.tables.create(TABLE, "id BIGINT")
    told = run_program(book, tmp_path / "marks", CLUSTER)
    assert (told["rows"], told["files"], told["findings"], told["failed"]) == (MANY, 2, [], [])
    # Each partition had a second attempt: one as the first was lost, and one beside it.
    assert set(told["attempts"]) >= {"0-0", "0-1", "1-0", "1-1"}
    assert ids(table.to_arrow()) == list(range(MANY))
    # The file that was being written when its executor died does not count: another one was written.
    compacted = told["compacted"]
    assert (len(compacted["files"]), len(compacted["seen"]), compacted["out"]) == (1, 1, 1)
    assert set(compacted["seen"]).isdisjoint(compacted["files"])
    assert compacted["ids"] == list(range(len(compacted["ids"]))) != []
    assert remains(warehouse_of(book)) == known_files(book)


@long
def test_a_jvm_that_was_killed_is_followed_by_another(book: Book, tmp_path: Path) -> None:
    table = book.tables.create(TABLE, "id BIGINT")
    told = run("killed", book, tmp_path / "marks")
    assert (told["lived"], told["left"]) == ([True, False] * 2, False)
    assert ids(table.to_arrow()) == sorted([*range(MANY), *range(MANY)])


def test_a_session_without_icebergs_runtime_is_told_so(book: Book, tmp_path: Path) -> None:
    table = book.tables.create(TABLE, "id BIGINT")
    table.insert_arrow(pa.table({"id": [1, 2]}))
    told = run("without_runtime", book, tmp_path / "marks")
    assert {name: kind for name, (kind, _) in told.items()} == dict.fromkeys(told, "SparkUnsuitable")
    # Whatever it is that its executors say, it is one line.
    _, stopped = told.pop("stopped")
    assert "could not look at the files" in stopped
    assert len(stopped.splitlines()) == 1
    assert all("iceberg-spark-runtime" in text for _, text in told.values())
    assert (table.version, ids(table.to_arrow())) == (1, [1, 2])


def test_the_first_insert_of_a_session_may_be_made_in_any_thread(book: Book, spark: SparkSession) -> None:
    table = book.tables.create("t", "id BIGINT")

    def insert() -> tuple[int, SparkSession | None, SparkSession | None]:
        before = SparkSession.getActiveSession()
        return table.insert(spark.newSession().range(3)).rows, before, SparkSession.getActiveSession()

    with in_thread(insert) as outcome:
        pass
    assert outcome == [(3, None, None)]
    insert()
    assert (table.count(), SparkSession.getActiveSession() is None) == (6, insert()[1] is None)
