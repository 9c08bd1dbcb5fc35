"""Compactions on Spark: many small files become few with the same rows, as every engine reads them."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.transforms import IdentityTransform
from pyspark.sql import SparkSession

from by_hand import of_duckdb, of_pyiceberg
from deletes import delete_positions
from lake import lay, records, rows_of
from lakebook import Book
from lakebook.components.compactor import Compactor
from lakebook.errors import FilesChanged, InsertFailed
from lakebook.lake.compaction import CompactionReport, compact_once, debt_of
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.maintenance import list_work
from lakebook.registry.schema import MAX_BIGINT
from spark.rows import arrow_rows, frame_of, ids, in_spark, once_at, raising, remains, values, warehouse_of


def many(book: Book, files: int, name: str = "t", columns: str = "id BIGINT, g STRING", **options: Any) -> Table:
    """A table with so many files of three rows."""
    table = book.tables.create(name, columns, **options)
    for number in range(files):
        rows = [{"id": 3 * number + row, "g": "abc"[row]} for row in (2, 0, 1)]
        table.insert_arrow(arrow_rows(table, rows))
    return table


def by_rows(table: Table, **at: Any) -> list[tuple[Any, ...]]:
    return values(table.to_arrow(**at))


def check_unchanged(table: Table, spark: SparkSession, before: list[tuple[Any, ...]], version: int) -> None:
    """The rows are those of before, also to Spark, and those of that version can still be read."""
    assert by_rows(table) == values(in_spark(table, spark)) == before
    assert by_rows(table, version=version) == before
    assert table.count() == len(before)


def content(book: Book, table: Table) -> list[list[int]]:
    """The numbers in each file, in the order in which they lie there."""
    paths = [book.lake.store.local_path(file.file_path) for file in table.plan()]
    return [pq.read_table(path, columns=["id"], partitioning=None)["id"].to_pylist() for path in paths]


def test_a_thousand_tiny_files_become_one_with_the_same_rows(spark: SparkSession, book: Book) -> None:
    table = many(book, 1000)
    before = by_rows(table)
    assert debt_of(book.lake, table.record).files == 1000
    report = table.compact(spark)
    assert (report.files_in, report.files_out, report.partitions) == (1000, 1, 1)
    assert (report.rows_in, report.rows_out) == (3000, 3000)
    assert report.versions == (1001,)
    assert report.bytes_out < report.bytes_in
    assert table.history().items[0].operation == "replace"
    check_unchanged(table, spark, before, 1000)
    version = table.version
    again = table.compact(spark)
    assert (again.versions, again.files_in, again.bytes_in) == ((), 0, 0)
    assert table.version == version


def test_each_partition_becomes_files_of_the_target_size_in_the_tables_order(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, g STRING, v STRING", partition_by=["g"], sort_by=["id DESC"])
    chance = random.Random(1)
    for number in range(12):
        rows = [{"id": 100 * number + row, "g": "bc"[row % 2], "v": ""} for row in range(90, 100)]
        rows += [{"id": 100 * number + row, "g": "a", "v": chance.randbytes(100).hex()} for row in range(90)]
        table.insert_arrow(arrow_rows(table, rows))
    size = max(file.file_size for file in table.plan("g = 'a'"))
    table.set_properties(**{"write.target-file-size-bytes": str(4 * size), "write.distribution-mode": "hash"})
    before = by_rows(table)
    report = compact_once(book.lake, table.record, spark)
    assert (report.files_in, report.partitions, report.rows_out) == (36, 3, 1200)
    groups = Counter(file.partition_path for file in table.plan())
    # Of the first partition, three times four files; the others are small enough for one.
    assert groups == {"g=a": 3, "g=b": 1, "g=c": 1}
    for numbers in content(book, table):
        assert numbers == sorted(numbers, reverse=True)
    # Rows that came together are together still.
    first = [numbers for numbers in content(book, table) if len(numbers) == 360]
    assert sorted((numbers[-1] // 100, numbers[0] // 100) for numbers in first) == [(0, 3), (4, 7), (8, 11)]
    check_unchanged(table, spark, before, 12)


def test_position_deletes_are_applied_and_gone(spark: SparkSession, book: Book) -> None:
    table = many(book, 6)
    files = table.plan().files
    delete_positions(book, table, [(files[0], 0), (files[1], 1)])
    delete_positions(book, table, [(files[2], 2)], about=files[2])
    before = by_rows(table)
    assert len(before) == 15
    version = table.version
    report = table.compact(spark)
    assert (report.rows_in, report.rows_out, report.deletes) == (9, 6, 2)
    assert table.record.deleted_rows == 0
    assert table.plan().deletes == ()
    check_unchanged(table, spark, before, version)
    assert table.compact(spark).versions == ()


def test_what_is_published_is_a_replacement_that_every_engine_reads_alike(spark: SparkSession, book: Book) -> None:
    table = many(book, 8, partition_by=["g"])
    table.publish()
    before = of_pyiceberg(book, table)
    files = table.plan("g = 'a'").files
    report = table.compact(spark)
    assert (report.files_in, report.files_out) == (24, 3)
    table.publish()
    snapshot = table.snapshots()[-1]
    assert snapshot.summary["operation"] == "replace"
    assert (snapshot.summary["deleted-data-files"], snapshot.summary["added-data-files"]) == ("24", "3")
    location = table.metadata_location
    assert location is not None
    assert before == of_pyiceberg(book, table) == of_duckdb(location)
    assert of_pyiceberg(book, table, table.snapshots()[0].snapshot_id) == before
    assert {file.file_path for file in files}.isdisjoint(file.file_path for file in table.plan())
    # Another engine goes on from it.
    book.catalog().load_table("default.t").delete("id = 0")
    assert len(table.to_arrow()) == 23


def test_files_of_several_schemas_become_one_of_the_newest(spark: SparkSession, book: Book) -> None:
    table = many(book, 3)
    plain = rows_of(table, [{"id": 100, "g": "plain"}])
    table.add_files([lay(book, "in/plain.parquet", plain)])
    with table.update_schema() as update:
        update.rename_column("g", "h")
        update.add_column("n", "BIGINT")
    table.insert_arrow(arrow_rows(table, [{"id": 200, "h": "x", "n": 1}]))
    with table.update_schema() as update:
        update.drop_column("n")
        update.add_column("n", "STRING")
    table.insert_arrow(arrow_rows(table, [{"id": 300, "h": "y", "n": "text"}]))
    before = by_rows(table)
    version = table.version
    report = table.compact(spark)
    assert (report.files_in, report.files_out, report.rows_out) == (6, 1, 12)
    check_unchanged(table, spark, before, version)
    (file,) = table.plan()
    assert (file.schema_version, file.has_field_ids) == (3, True)


def test_files_of_an_earlier_partition_spec_land_in_the_present_partitions(spark: SparkSession, book: Book) -> None:
    table = many(book, 6)
    loaded = book.catalog().load_table("default.t")
    with loaded.update_spec() as update:
        update.add_field("g", IdentityTransform())
    for number in range(6):
        table.insert_arrow(arrow_rows(table, [{"id": 1000 + number, "g": "a"}]))
    before = by_rows(table)
    version = table.version
    report = table.compact(spark)
    assert len(report.versions) == 2
    assert (report.files_in, report.files_out) == (12, 4)
    found = sorted((file.partition_path, file.row_count) for file in table.plan())
    assert found == [("g=a", 6), ("g=a", 6), ("g=b", 6), ("g=c", 6)]
    assert len({file.spec_id for file in table.plan()}) == 1
    check_unchanged(table, spark, before, version)
    assert table.compact(spark).versions == ()
    table.publish()


def test_tables_of_json_are_compacted_too(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, g STRING", format="json", compression="none")
    for number in range(6):
        rows = [{"id": 10 * number + row, "g": None if row else "ä"} for row in range(10)]
        table.insert(frame_of(spark, table, rows).coalesce(1))
    size = max(file.file_size for file in table.plan())
    before = by_rows(table)
    table.set_properties(**{"write.target-file-size-bytes": str(3 * size)})
    report = table.compact(spark)
    assert (report.files_in, report.files_out, report.rows_out) == (6, 2, 60)
    check_unchanged(table, spark, before, 6)
    assert table.compact(spark).versions == ()


def test_a_budget_bounds_what_is_rewritten_and_the_next_goes_on(spark: SparkSession, book: Book) -> None:
    table = many(book, 10, partition_by=["g"])
    before = by_rows(table)
    budget = sum(file.file_size for file in table.plan("g = 'a'")) + 10
    reports = [table.compact(spark, max_bytes=budget) for _ in range(4)]
    assert [report.files_in for report in reports] == [10, 10, 10, 0]
    assert all(report.bytes_in <= budget for report in reports)
    assert reports[3] == CompactionReport("default.t", seconds=reports[3].seconds)
    check_unchanged(table, spark, before, 10)


# --- at the same time ----------------------------------------------------------


def test_a_writer_that_comes_while_a_compaction_writes_wins(spark: SparkSession, book: Book) -> None:
    table = many(book, 6)
    frame = frame_of(spark, table, [{"id": 1000, "g": "new"}])
    there = remains(warehouse_of(book))

    def give_way() -> None:
        with pytest.raises(FilesChanged):
            table.compact(spark)

    def overwrite() -> None:
        # It is at work when the compaction comes to its commit, and has read what that would take away.
        with once_at("insert.measured", give_way):
            table.overwrite(frame, where="id < 9")

    with once_at("compact.written", overwrite), pytest.raises(FilesChanged):
        table.compact(spark)
    assert ids(table.to_arrow()) == [*range(9, 18), 1000]
    assert [item.operation for item in table.history().items[:2]] == ["overwrite", "append"]
    new = {file.file_path for file in table.plan()}
    assert remains(warehouse_of(book)) == there | new
    assert book.metrics.values()["lakebook_compactions_total{outcome=yielded}"] == 2
    for number in range(5):
        table.insert_arrow(arrow_rows(table, [{"id": 2000 + number, "g": "x"}]))
    assert table.compact(spark).files_out == 1
    assert table.count() == 15


def test_what_fails_leaves_nothing(spark: SparkSession, book: Book) -> None:
    table = many(book, 6)
    before, there = by_rows(table), remains(warehouse_of(book))
    for point in ("insert.staged", "insert.measured", "compact.written", "change.written"):
        with once_at(point, raising(OSError("no space"))), pytest.raises(InsertFailed, match="no space"):
            table.compact(spark)
        assert remains(warehouse_of(book)) == there, point
        assert (by_rows(table), table.version) == (before, 6), point
    assert book.metrics.values()["lakebook_compactions_total{outcome=failed}"] == 4


# --- the component -------------------------------------------------------------


def test_the_compactor_compacts_what_it_is_told_of_and_writes_it_down(spark: SparkSession, book: Book) -> None:
    tables = [many(book, 12, name, partition_by=["g"]) for name in ("one", "two")]
    off = many(book, 6, "off", properties={"lakebook.compaction": "off"})
    asked: list[float] = []

    def session() -> SparkSession:
        asked.append(time.monotonic())
        return spark

    compactor = Compactor(book.lake, session)
    compactor.start()
    try:
        for table in (*tables, off):
            compactor.note(table.id)
        assert compactor.wait_idle(120)
        assert len(asked) == 1
        assert [len(table.plan().files) for table in (*tables, off)] == [3, 3, 6]
        assert compactor.status()["debts"] == compactor.status()["failures"] == []
        assert compactor.status()["at_work"] is None
    finally:
        compactor.stop()
    work = book._registry.read_with(lambda reader: list_work(reader, "compactor", None, MAX_BIGINT, 10))
    assert sorted(item.table_id or 0 for item in work) == sorted(table.id for table in tables)
    for item in work:
        assert (item.action, item.outcome, item.reason) == ("compact", "done", "36 small files of 3 partitions")
        assert (item.detail["files_in"], item.detail["files_out"], item.detail["partitions"]) == (36, 3, 3)
        assert item.detail["bytes_out"] < item.detail["bytes_in"]
    found = book.metrics.values()
    assert found["lakebook_compaction_debt_files{table=default.one}"] == 0
    assert found["lakebook_compactions_total{outcome=done}"] == 2
    assert found["lakebook_compacted_files_total{side=in}"] == 72


def test_a_compactor_that_gives_way_writes_that_down_and_tries_again(spark: SparkSession, book: Book) -> None:
    table = many(book, 6)
    compactor = Compactor(book.lake, lambda: spark)
    compactor.note(table.id)
    with once_at("compact.written", lambda: table.delete("id < 3")):
        assert compactor.run_due() == 1
    (entry,) = records(book, schema.maintenance_history)
    assert entry["outcome"] == "yielded"
    assert "FilesChanged" in entry["detail"]["error"]
    (waiting,) = compactor.status()["next"]
    assert waiting["in_seconds"] <= 1
    compactor.start()
    try:
        assert compactor.wait_idle(120)
    finally:
        compactor.stop()
    assert len(table.plan().files) == 1
    assert ids(table.to_arrow()) == list(range(3, 18))
    assert [row["outcome"] for row in records(book, schema.maintenance_history)] == ["yielded", "done"]


def test_by_hand_all_tables_are_compacted(spark: SparkSession, book: Book) -> None:
    for name in ("one", "two"):
        many(book, 5, name)
    done = Compactor(book.lake, lambda: spark).run_once()
    assert {name: item["files_out"] for name, item in done["compacted"].items()} == {"default.one": 1, "default.two": 1}
    assert (done["failed"], done["left"]) == ({}, {})


def test_arrow_and_spark_agree_on_types_after_a_compaction(spark: SparkSession, book: Book) -> None:
    columns = "id BIGINT, d DECIMAL(9, 2), t TIMESTAMP, s STRUCT<a: INT, b: ARRAY<STRING>>, m MAP<STRING, DOUBLE>"
    table = book.tables.create("t", columns)
    for number in range(5):
        row = {"id": number, "s": {"a": number, "b": ["x", None]}, "m": [("k", float("nan"))]}
        table.insert_arrow(arrow_rows(table, [row, {"id": 100 + number}]))
    before = by_rows(table)
    assert table.compact(spark).files_out == 1
    check_unchanged(table, spark, before, 5)
    assert isinstance(table.to_arrow(), pa.Table)
