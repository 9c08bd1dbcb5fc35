"""What goes in through Spark comes out of every engine, and nothing else is left in the warehouse."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io.pyarrow import pyarrow_to_schema
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

import lakebook
from lake import run_sql
from lakebook import Book, failpoints
from lakebook.errors import (
    IncompatibleSchema,
    InsertFailed,
    InvalidFile,
    InvalidInput,
    InvalidSchema,
    InvalidTable,
    LakebookError,
    SparkUnsuitable,
)
from lakebook.iceberg.partitioning import MAX_PATH_PART
from lakebook.iceberg.schemas import walk
from lakebook.lake.table import Table
from spark.rows import (
    arrow_rows,
    check_same,
    frame_of,
    ids,
    in_duckdb,
    in_spark,
    known_files,
    layout,
    raising,
    remains,
    values,
    warehouse_of,
)

NAN, INF = math.nan, math.inf
local = datetime.fromisoformat
COLUMNS = """
    id BIGINT NOT NULL, b BOOLEAN, i INT, l BIGINT, f FLOAT, d DOUBLE, s STRING, raw BINARY, day DATE,
    ts TIMESTAMP, ntz TIMESTAMP_NTZ, d1 DECIMAL(1, 0), d9 DECIMAL(9, 4), d18 DECIMAL(18, 18), d38 DECIMAL(38, 10),
    arr ARRAY<INT>, m MAP<STRING, INT>, st STRUCT<a: INT, `b.c`: STRING>,
    ls ARRAY<STRUCT<x: INT, y: STRING>>,
    ms MAP<STRING, STRUCT<x: INT, `a b`: ARRAY<STRING>>>,
    mls MAP<STRING, ARRAY<STRUCT<x: INT, `y.z`: DECIMAL(20, 2)>>>,
    ll ARRAY<ARRAY<STRUCT<q: TIMESTAMP>>>,
    sm STRUCT<m: MAP<STRING, ARRAY<INT>>, s: STRUCT<t: STRUCT<u: DATE>>>
"""
ROWS: list[dict[str, Any]] = [
    {
        "id": 1, "b": True, "i": -(2**31), "l": 2**63 - 1, "f": 1.5, "d": -0.0, "s": "ü'\"\n\t\\", "raw": b"\0\xff",
        "day": date(1969, 12, 31), "ts": datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
        "ntz": local("0001-01-01T00:00:00.000001"), "d1": Decimal(9), "d9": Decimal("-99999.9999"),
        "d18": Decimal("0.123456789012345678"), "d38": Decimal("1234567890123456789012345678.0123456789"),
        "arr": [1, None, 3], "m": [("k", 1), ("", None)], "st": {"a": 1, "b.c": "x"},
        "ls": [{"x": 1, "y": "a"}, None, {"x": None, "y": None}],
        "ms": [("a", {"x": 1, "a b": ["p", None]}), ("b", None), ("c", {"x": None, "a b": []})],
        "mls": [("a", [{"x": 1, "y.z": Decimal("1.25")}, None]), ("b", []), ("c", None)],
        "ll": [[{"q": datetime(1900, 1, 1, 0, 0, 0, 1, UTC)}], [], None, [None]],
        "sm": {"m": [("z", [1, None])], "s": {"t": {"u": date(9999, 12, 31)}}},
    },
    {"id": 2},
    {
        "id": 3, "f": NAN, "d": NAN, "s": "", "raw": b"", "arr": [], "m": [], "ls": [], "ms": [], "mls": [], "ll": [],
        "st": {"a": None, "b.c": None}, "sm": {"m": [], "s": None},
    },
    {
        "id": 4, "b": False, "f": INF, "d": -INF, "day": date(1, 1, 1), "d9": Decimal(0),
        "ts": datetime(9999, 12, 31, 23, 59, 59, 999999, UTC), "ntz": local("9999-12-31T23:59:59.999999"),
        "sm": {"m": None, "s": {"t": None}},
    },
    {"id": 5, "f": -INF, "d": INF, "ts": datetime(1, 1, 1, tzinfo=UTC), "ntz": local("1969-07-20T20:17:40.123456")},
]  # fmt: skip
ODD_NAMES = [
    "a.b", "Big Name", "q\"uo'te", "back`tick", "ünï", "名", "slash/x", "comma,semi;", "tab\there", "new\nline", "{x}",
    "=eq", "123", "%41", "UPPER", "_x2E", "hash#", "dollar$", "\\", " lead", "(paren)", "a.b.c",
]  # fmt: skip


# --- rows ----------------------------------------------------------------------


def test_every_type_at_every_depth_comes_back_equal_from_spark_arrow_and_duckdb(
    spark: SparkSession, book: Book
) -> None:
    table = book.tables.create("types", COLUMNS)
    report = table.insert(frame_of(spark, table, ROWS))
    assert (report.operation, report.version, report.rows) == ("append", 1, len(ROWS))
    assert values(in_duckdb(table)) == values(arrow_rows(table, ROWS))
    check_same(table, spark, ROWS)


def test_rows_that_arrow_wrote_are_the_same_for_every_engine(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("types", COLUMNS)
    table.insert_arrow(arrow_rows(table, ROWS))
    assert values(in_duckdb(table)) == values(arrow_rows(table, ROWS))
    check_same(table, spark, ROWS)


def test_a_table_of_nothing_but_collections_is_like_any_other(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("lists", "a ARRAY<STRUCT<x: INT>>, m MAP<STRING, INT>")
    rows: list[dict[str, Any]] = [{"a": [{"x": 1}], "m": [("k", 1)]}, {"a": None}]
    table.insert(frame_of(spark, table, rows[:1]))
    table.insert_arrow(arrow_rows(table, rows[1:]))
    check_same(table, spark, rows)
    with table.update_schema() as update:
        update.add_column("id", "INT")
    table.insert(frame_of(spark, table, [{"a": [], "id": 7}]))
    check_same(table, spark, [*rows, {"a": [], "id": 7}])
    assert table.to_arrow("id = 7").num_rows == in_spark(table, spark, "id = 7").num_rows == 1
    assert table.to_arrow("id is null").num_rows == in_spark(table, spark, "id is null").num_rows == 2


def test_maps_whose_keys_are_no_texts_come_back_equal(spark: SparkSession, book: Book) -> None:
    table = book.tables.create(
        "keys", "id INT, a ARRAY<MAP<INT, STRUCT<v: DOUBLE>>>, b MAP<DATE, INT>, c MAP<STRUCT<k: INT>, STRING>"
    )
    rows: list[dict[str, Any]] = [
        {"id": 1, "a": [[(1, {"v": NAN}), (2, None)], [], None], "b": [(date(1960, 1, 1), None)]},
        {"id": 2, "c": [({"k": 1}, "x"), ({"k": None}, None)]},
        {"id": 3},
    ]
    table.insert(frame_of(spark, table, rows))
    check_same(table, spark, rows)


def test_columns_may_be_called_anything(spark: SparkSession, book: Book) -> None:
    columns = pa.schema([pa.field("id", pa.int64()), *(pa.field(name, pa.string()) for name in ODD_NAMES)])
    nested = pa.struct([pa.field(name, pa.int32()) for name in ODD_NAMES])
    table = book.tables.create("odd", columns.append(pa.field("nested", pa.list_(nested))))
    rows: list[dict[str, Any]] = [
        {"id": 1, **{name: name for name in ODD_NAMES}, "nested": [dict.fromkeys(ODD_NAMES, 7), None]},
        {"id": 2},
    ]
    table.insert(frame_of(spark, table, rows))
    table.insert_arrow(arrow_rows(table, [{**rows[0], "id": 3}]))
    check_same(table, spark, [*rows, {**rows[0], "id": 3}])
    # Every one of them can be asked for by its name.
    wanted = ["id", *reversed(ODD_NAMES)]
    assert in_spark(table, spark, columns=wanted).column_names == wanted
    assert table.to_arrow(columns=wanted).column_names == wanted
    for name in ODD_NAMES:
        quoted = name.replace('"', '""')
        found = table.to_arrow(f'"{quoted}" is not null', columns=["id"])
        assert ids(found) == [1, 3], name
    assert ids(in_spark(table, spark, "\"a.b\" = 'a.b' and \"back`tick\" = 'back`tick'")) == [1, 3]


def test_columns_in_another_order_missing_ones_and_narrower_types_are_taken(spark: SparkSession, book: Book) -> None:
    table = book.tables.create(
        "loose",
        "id BIGINT NOT NULL, v DOUBLE, st STRUCT<a: BIGINT, b: STRING>, arr ARRAY<BIGINT>, d DECIMAL(10, 2),"
        " m MAP<STRING, STRUCT<x: BIGINT, y: STRING>>, never STRING",
    )
    table.insert(
        spark.sql(
            "SELECT map('k', named_struct('y', 'q', 'x', 1)) m, array(1, CAST(NULL AS INT)) arr,"
            " CAST(1.25 AS FLOAT) v, CAST(id AS INT) id, named_struct('b', 'x', 'a', CAST(id AS SMALLINT)) st,"
            " CAST(1.5 AS DECIMAL(4, 2)) d FROM range(2)"
        )
    )
    table.insert(spark.sql("SELECT CAST(9 AS TINYINT) id, array(named_struct('x', 1)) AS ls").drop("ls"))
    table.insert(spark.sql("SELECT 10L id, named_struct('a', 5) st, map('k', named_struct('x', CAST(6 AS BYTE))) m"))
    check_same(
        table,
        spark,
        [
            *(
                {
                    "id": number,
                    "v": 1.25,
                    "st": {"a": number, "b": "x"},
                    "arr": [1, None],
                    "d": Decimal("1.50"),
                    "m": [("k", {"x": 1, "y": "q"})],
                }
                for number in range(2)
            ),
            {"id": 9},
            {"id": 10, "st": {"a": 5, "b": None}, "m": [("k", {"x": 6, "y": None})]},
        ],
    )


UNFIT: list[tuple[str, type[LakebookError], str]] = [
    ("SELECT 1.0D v", IncompatibleSchema, "'id' is missing"),
    ("SELECT id, 1 zzz FROM range(3)", IncompatibleSchema, "no column 'zzz'"),
    ("SELECT 'a' id", IncompatibleSchema, "cannot take 'string'"),
    ("SELECT 1L id, CAST(1 AS DECIMAL(12, 2)) d", IncompatibleSchema, "cannot take 'decimal(12, 2)'"),
    ("SELECT 1L id, CAST(1 AS DECIMAL(9, 1)) d", IncompatibleSchema, "cannot take 'decimal(9, 1)'"),
    ("SELECT 1L id, 1L id", InvalidSchema, "there is 'id' already"),
    ("SELECT 1L ID", IncompatibleSchema, "'id' is missing"),
    ("SELECT 1L id, named_struct('b', 'x') st", IncompatibleSchema, "'st.a' is missing"),
    ("SELECT 1L id, named_struct('a', 1, 'c', 2) st", IncompatibleSchema, "no column 'st.c'"),
    ("SELECT 1L id, INTERVAL '1' DAY v", InvalidSchema, "no counterpart"),
]


def test_a_frame_that_does_not_fit_is_refused_before_spark_writes(spark: SparkSession, book: Book) -> None:
    table = book.tables.create(
        "strict", "id BIGINT NOT NULL, v DOUBLE, d DECIMAL(10, 2), st STRUCT<a: INT NOT NULL, b: STRING>"
    )
    with failpoints.armed("insert.staged", raising(AssertionError("it was about to write"))):
        for select, error, what in UNFIT:
            with pytest.raises(error) as raised:
                table.insert(spark.sql(select))
            assert what in str(raised.value)
    assert (table.version, table.count()) == (0, 0)


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_null_in_a_required_column_is_refused_with_an_error_that_names_it(
    spark: SparkSession, book: Book, kind: str
) -> None:
    table = book.tables.create(
        "strict", "id BIGINT NOT NULL, st STRUCT<a: INT NOT NULL>, ls ARRAY<STRUCT<need: INT NOT NULL>>", format=kind
    )
    for select, column in (
        ("SELECT if(id = 3, NULL, id) id FROM range(6)", "id"),
        ("SELECT id, named_struct('a', if(id = 3, NULL, 1)) st FROM range(6)", "a"),
        ("SELECT id, array(named_struct('need', if(id = 3, NULL, 1))) ls FROM range(6)", "need"),
    ):
        with pytest.raises(InsertFailed) as raised:
            table.insert(spark.sql(select))
        assert "null" in raised.value.what.lower()
        assert re.search(rf"\b{column}\b", raised.value.what)
        assert (table.version, table.count()) == (0, 0)
    # Where what holds it is null itself, nothing is missing.
    table.insert(spark.sql("SELECT id FROM range(2)"))
    assert values(table.to_arrow()) == [(0, None, None), (1, None, None)]
    # Row by row: PySpark makes no Arrow table of a null struct with a required field.
    assert sorted(tuple(row) for row in table.read(spark).collect()) == [(0, None, None), (1, None, None)]


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_frame_without_rows_makes_no_version_and_leaves_nothing(spark: SparkSession, book: Book, kind: str) -> None:
    table = book.tables.create("empty", "id BIGINT, s STRING", format=kind)
    assert in_spark(table, spark).num_rows == 0
    for frame in (frame_of(spark, table, []), spark.range(0, 10, 1, 3).where("id < 0").toDF("id")):
        report = table.insert(frame)
        assert (report.version, report.rows, report.files, report.bytes) == (0, 0, 0, 0)
    assert {path for path in remains(warehouse_of(book)) if not path.startswith("reads/")} == set()
    # Some of the tasks have rows and some have none.
    table.insert(spark.range(0, 10, 1, 4).where("id = 7").select("id", F.lit("x").alias("s")))
    check_same(table, spark, [{"id": 7, "s": "x"}])
    assert table.record.file_count == 1


def test_what_is_no_frame_or_no_session_is_refused(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("t", "id BIGINT")
    for wrong in (None, [1], arrow_rows(table, [])):
        with pytest.raises(InvalidInput):
            table.insert(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            table.overwrite(wrong)  # type: ignore[arg-type]
    for strange in (None, "spark", 7):
        with pytest.raises(SparkUnsuitable):
            table.read(strange)  # type: ignore[arg-type]


def test_a_book_in_memory_says_that_spark_cannot_reach_it(spark: SparkSession) -> None:
    with lakebook.open(":memory:") as book:
        for kind in ("parquet", "json"):
            table = book.tables.create(kind, "id BIGINT", format=kind)
            with pytest.raises(LakebookError):
                table.insert(spark.range(3).toDF("id"))
            assert table.count() == 0
        table = book.table("parquet")
        table.insert_arrow(pa.table({"id": [1, 2]}))
        with pytest.raises(LakebookError):
            table.read(spark)
        with pytest.raises(LakebookError):
            table.delete("id = 1", spark=spark)
        assert ids(table.to_arrow()) == [1, 2]
        assert book.verify().ok


# --- files ---------------------------------------------------------------------


def field_ids(schema: Any) -> list[int]:
    return [field.field_id for _, field, _ in walk(schema.fields)]


def test_every_file_has_the_field_ids_of_the_table_at_every_depth(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("ids", COLUMNS)
    with table.update_schema() as update:
        # So that ids are not simply their position.
        update.drop_column("i").move_first("sm").add_column(("ls", "element", "late"), "ARRAY<INT>")
    table.insert(spark.range(0, 4, 1, 2).toDF("id"))
    table.insert_arrow(arrow_rows(table, [{"id": 4}]))
    files = sorted(known_files(book))
    assert len(files) == 3
    for path in files:
        columns = pq.read_schema(warehouse_of(book) / path)
        assert field_ids(pyarrow_to_schema(columns)) == field_ids(table.schema)


def test_nothing_that_was_staged_remains_after_an_insert_or_when_a_read_is_closed(
    spark: SparkSession, book: Book
) -> None:
    table = book.tables.create("t", "id BIGINT")
    table.insert(spark.range(4).toDF("id"))
    assert remains(warehouse_of(book)) == known_files(book)
    with table.pin() as pinned:
        assert ids(pinned.read(spark).toArrow()) == [0, 1, 2, 3]
        staged = remains(warehouse_of(book)) - known_files(book)
        assert staged
        assert {path.split("/")[0] for path in staged} == {"reads"}
    assert remains(warehouse_of(book)) == known_files(book)


def test_a_read_that_cannot_be_gives_its_lease_back(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("t", "id BIGINT")
    table.insert_arrow(pa.table({"id": [1]}))
    wrong: list[dict[str, Any]] = [{"columns": ["nope"]}, {"where": "nope = 1"}, {"version": 7}]
    for how in wrong:
        with pytest.raises(LakebookError):
            table.read(spark, **how)
    assert book.lake.renewals.leases() == []
    assert remains(warehouse_of(book)) == known_files(book)


def test_a_codec_and_the_tables_own_properties_reach_the_writer(spark: SparkSession, book: Book) -> None:
    many = spark.range(0, 3000, 1, 1).select("id", F.sha2(F.col("id").cast("string"), 256).alias("s"))
    wanted = {"zstd": "ZSTD", "none": "UNCOMPRESSED"}
    for codec, name in wanted.items():
        table = book.tables.create(
            codec,
            "id BIGINT, s STRING",
            compression=codec,
            properties={
                "write.parquet.row-group-size-bytes": "50000",
                "write.parquet.page-row-limit": "1000",
                # What would lead its files astray is not taken.
                "write.data.path": f"file://{warehouse_of(book)}/elsewhere",
                "write.metadata.metrics.default": "none",
                "write.format.default": "orc",
                "write.object-storage.enabled": "true",
            },
        )
        table.insert(many)
        (path,) = (file.file_path for file in table.plan())
        footer = pq.read_metadata(warehouse_of(book) / path)
        assert footer.row_group(0).column(0).compression == name
        assert footer.num_row_groups > 1
        extremes = table.min_max("s")
        assert extremes is not None
        assert len(extremes.largest) == 64
        # Only some row groups can match, and their rows are found.
        assert ids(table.to_arrow("id = 2999")) == [2_999]
        assert len(next(iter(table.plan("id = 2999"))).row_groups or ()) == 1


def test_checksums_that_executors_take_are_those_of_the_files(spark: SparkSession, book: Book, tmp_path: Path) -> None:
    with lakebook.open(tmp_path / "book", measure_on_spark=0) as other:
        for kind in ("parquet", "json"):
            table = other.tables.create(kind, "id BIGINT, s STRING", format=kind)
            table.insert(spark.range(0, 10, 1, 3).selectExpr("id", "CAST(id AS STRING) s"))
            recorded = {file.file_path: (file.file_size, file.checksum) for file in table.plan()}
            assert len(recorded) == 3
            measured = other.lake.store.measure(sorted(recorded))
            assert {found.path: (found.size, found.checksum) for found in measured} == recorded
            check_same(table, spark, [{"id": number, "s": str(number)} for number in range(10)])


def test_verifying_with_spark_finds_a_changed_byte_and_a_missing_file(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, s STRING")
    table.insert(spark.range(0, 6, 1, 3).selectExpr("id", "CAST(id AS STRING) s"))
    assert book.verify(spark=spark).ok
    changed, gone, _ = (warehouse_of(book) / file.file_path for file in table.plan())
    kept = changed.read_bytes(), gone.read_bytes()
    changed.write_bytes(kept[0][:10] + bytes([kept[0][10] ^ 1]) + kept[0][11:])
    gone.unlink()
    for verified in (book.verify(spark=spark), book.verify()):
        assert not verified.ok
        found = {(finding.on, finding.what.split("(")[0].strip()) for finding in verified.findings}
        assert {(Path(on).name, what) for on, what in found} == {
            (changed.name, "its bytes are not those that were recorded"),
            (gone.name, "it does not exist"),
        }
    changed.write_bytes(kept[0])
    gone.write_bytes(kept[1])


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_verifying_with_spark_finds_what_verifying_here_finds(spark: SparkSession, book: Book, kind: str) -> None:
    table = book.tables.create("t", "id BIGINT, s STRING", format=kind)
    table.insert(spark.range(0, 8, 1, 4).selectExpr("id", "CAST(id AS STRING) s"))
    files = [file.file_path for file in table.plan()]
    outside = warehouse_of(book).parent / "outside"
    linked = warehouse_of(book) / files[0]
    outside.write_bytes(linked.read_bytes())
    linked.unlink()
    linked.symlink_to(outside)
    numbers = "UPDATE table_files SET {1} = {1} + {2} WHERE file_path = '{0}'"
    stored = "UPDATE partition_metadata SET metadata = CAST(replace(metadata, {}) AS BLOB)"
    damage = [(files[1], "row_count"), (files[2], "file_size")]
    for path, column in damage:
        run_sql(book, numbers.format(path, column, 1))
    run_sql(book, stored.format("'parquet-mr', 'PARQUET-MR'"))
    with_spark, here = book.verify(spark=spark), book.verify()
    assert with_spark.findings == here.findings
    told = {(finding.check, finding.on) for finding in here.findings}
    assert told >= {("files", path) for path in files[:3]}
    assert kind == "json" or told >= {("footers", path) for path in files[1:]}
    # All is well again, for whoever looks at the book in the end.
    linked.unlink()
    linked.write_bytes(outside.read_bytes())
    outside.unlink()
    for path, column in damage:
        run_sql(book, numbers.format(path, column, -1))
    run_sql(book, stored.format("'PARQUET-MR', 'parquet-mr'"))


# --- partitions and order ------------------------------------------------------

HOUR = datetime(1969, 12, 31, 23, 30, tzinfo=UTC)
LONG = "x" * 300
PARTITIONED: list[dict[str, Any]] = [
    {"id": number, "s": text, "ts": HOUR if number % 2 else None, "ntz": local("1969-12-31T01:00:00"),
     "day": date(1950, 1, 31), "d": Decimal("-0.01"), "raw": (text or "").encode(),
     "f": (NAN, INF, -INF, -0.0, 0.0, None)[number % 6], "b": (None, True, False)[number % 3], "a.b": {"c d": text}}
    for number, text in enumerate(
        [LONG, "a/b", "100%", "ü名", "", "null", "..", None, "a=b", "'q'", "new\nline", "%2F", "a+b c", "~"]
    )
]  # fmt: skip
PARTITION_COLUMNS = (
    "id BIGINT, s STRING, ts TIMESTAMP, ntz TIMESTAMP_NTZ, day DATE, d DECIMAL(9, 2), raw BINARY, f DOUBLE, b BOOLEAN,"
    " `a.b` STRUCT<`c d`: STRING>"
)
# What the partition of every row is, where that is the same for all that are not null.
TRANSFORMS: list[dict[str, Any]] = [
    {"bucket(4, id)": None, "truncate(3, s)": None, "year(ts)": -1},
    {"s": None, "month(day)": -240, "truncate(50, d)": "-0.50"},
    {"raw": None, "day(ntz)": -1, "b": None},
    {"f": None, "hour(ts)": -1, "`a.b`.`c d`": None},
]


@pytest.mark.parametrize("transforms", TRANSFORMS, ids=", ".join)
def test_rows_of_each_partition_transform_come_back_and_are_found(
    spark: SparkSession, book: Book, transforms: dict[str, Any]
) -> None:
    table = book.tables.create("parts", PARTITION_COLUMNS, partition_by=list(transforms))
    table.insert(frame_of(spark, table, PARTITIONED))
    check_same(table, spark, PARTITIONED)
    parts = [json.loads(file.partition_values) for file in table.plan()]
    for position, wanted in enumerate(transforms.values()):
        if wanted is not None:
            assert {part[position] for part in parts} - {None} == {wanted}
    for row in PARTITIONED:
        text = row["s"]
        if text is None or text.isprintable():
            condition = "s is null" if text is None else "s = '{}'".format(text.replace("'", "''"))
            assert ids(table.to_arrow(condition)) == [row["id"]], text
    # Spark and Arrow agree on which partition a row is in.
    ours = book.tables.create("ours", PARTITION_COLUMNS, partition_by=list(transforms))
    ours.insert_arrow(arrow_rows(ours, PARTITIONED))
    assert values(ours.to_arrow()) == values(arrow_rows(ours, PARTITIONED))
    assert sorted(map(repr, parts)) == sorted(repr(json.loads(file.partition_values)) for file in ours.plan())


def test_partition_values_of_any_length_and_text_make_paths_that_every_engine_opens(
    spark: SparkSession, book: Book
) -> None:
    table = book.tables.create(
        "parts", PARTITION_COLUMNS, partition_by=["s", "truncate(200, `a.b`.`c d`)", "hour(ts)", "bucket(3, id)"]
    )
    table.insert(frame_of(spark, table, PARTITIONED))
    assert values(in_duckdb(table)) == values(arrow_rows(table, PARTITIONED))
    assert len(table.plan().files) == len(PARTITIONED)
    for file in table.plan():
        assert all(len(part) <= MAX_PATH_PART for part in file.partition_path.split("/"))
    assert ids(in_spark(table, spark, f"s = '{LONG}'")) == [0]
    assert ids(in_spark(table, spark, "s is null or ts = '1969-12-31T23:30:00+00:00'")) == [1, 3, 5, 7, 9, 11, 13]


def test_files_are_sorted_as_the_table_says(spark: SparkSession, book: Book) -> None:
    rows = [
        {"id": (number * 37) % 100, "g": "ab"[number % 2], "v": None if number % 10 == 0 else number / 3}
        for number in range(100)
    ]
    frames = {
        "plain": {"sort_by": ["id desc"]},
        "parts": {"partition_by": ["g"], "sort_by": ["v asc nulls last", "id"]},
    }
    for name, how in frames.items():
        table = book.tables.create(name, "id BIGINT, g STRING, v DOUBLE", **how)  # type: ignore[arg-type]
        table.insert(frame_of(spark, table, rows).repartition(3))
        check_same(table, spark, rows)
        for path in (file.file_path for file in table.plan()):
            written = pq.read_table(warehouse_of(book) / path).to_pylist()
            keys = [
                (-row["id"],) if name == "plain" else (row["v"] is None, row["v"] or 0.0, row["id"]) for row in written
            ]
            assert keys == sorted(keys)


@pytest.fixture
def elsewhere(spark: SparkSession) -> Iterator[None]:
    """The session is in another zone than the machine and the books."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    yield
    assert before is not None
    spark.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_the_zone_of_the_session_changes_nothing_that_is_stored(spark: SparkSession, book: Book, kind: str) -> None:
    table = book.tables.create("t", "id BIGINT, ts TIMESTAMP, n TIMESTAMP_NTZ, d DATE", format=kind)
    rows = [
        {"id": 1, "ts": datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), "n": local("1969-12-31T23:59:59.999999")},
        {"id": 2, "d": date(1900, 1, 1)},
    ]
    table.insert(frame_of(spark, table, rows))
    check_same(table, spark, rows)
    for predicate in ("ts = '1969-12-31T23:59:59.999999+00:00'", "n = '1969-12-31T23:59:59.999999'"):
        assert ids(in_spark(table, spark, predicate)) == ids(table.to_arrow(predicate)) == [1]


# --- predicates ----------------------------------------------------------------

TESTED = (
    "id BIGINT NOT NULL, v DOUBLE, s STRING, i INT, ts TIMESTAMP, n TIMESTAMP_NTZ, d DECIMAL(5, 2), b BOOLEAN,"
    " st STRUCT<x: FLOAT>"
)
TESTED_ROWS: list[dict[str, Any]] = [
    {"id": 1, "v": NAN, "s": "a", "i": 1, "ts": HOUR, "d": Decimal("1.25"), "b": True, "st": {"x": NAN}},
    {"id": 2, "v": 1.0, "s": "", "i": -1, "n": local("1969-01-01"), "d": Decimal("-1.25"), "b": False},
    {"id": 3, "st": {"x": None}},
    {"id": 4, "v": -INF, "s": "ab%c", "i": 2**31 - 1, "ts": datetime(2024, 1, 1, tzinfo=UTC), "st": {"x": 0.1}},
    {"id": 5, "v": INF, "s": "ü", "i": 0, "n": local("2024-01-01T00:00:00.000001"), "d": Decimal(0), "st": {"x": -0.0}},
    {"id": 6, "v": -0.0, "s": "a'b", "i": -(2**31)},
]
PREDICATES = {
    "v = 0": [6],
    "v < 1": [4, 6],
    "v <= 1": [2, 4, 6],
    "v is nan": [1],
    "not (v = 1)": [1, 4, 5, 6],
    "v in (0, 1)": [2, 6],
    "v not in (0, 1)": [1, 4, 5],
    "s = ''": [2],
    "s = 'a''b'": [6],
    "s > 'ab'": [4, 5],
    "s like 'a%'": [1, 4, 6],
    "s not like 'a%'": [2, 5],
    "not (s = 'a' or s is null)": [2, 4, 5, 6],
    "i > 1.5": [4],
    "i < -1": [6],
    "ts = '1969-12-31T23:30:00+00:00'": [1],
    "ts > '2000-01-01T00:00:00+02:00'": [4],
    "n >= '2024-01-01T00:00:00.000001'": [5],
    "n < '1970-01-01T00:00:00'": [2],
    "d = 1.25": [1],
    "d < 0.5": [2, 5],
    "b = true": [1],
    "b != true": [2],
    "st.x is null": [2, 3, 6],
    "st.x = 0": [5],
    "st.x = 0.1": [4],
    "st.x < 1 and v is not null": [4, 5],
    "true": [1, 2, 3, 4, 5, 6],
    "false": [],
    "i > 3000000000": [],
}


def test_a_predicate_selects_the_same_rows_in_spark_and_arrow(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("tested", TESTED)
    table.insert(frame_of(spark, table, TESTED_ROWS))
    for predicate, wanted in PREDICATES.items():
        assert ids(table.to_arrow(predicate, columns=["id"])) == wanted, predicate
    with table.pin() as pinned:
        # Each is planned and read for itself, and all in one job.
        frames = [
            pinned.read(spark, predicate, ["id"]).withColumn("predicate", F.lit(predicate)) for predicate in PREDICATES
        ]
        found = reduce(lambda one, other: one.union(other), frames).toArrow().to_pylist()
    for predicate, wanted in PREDICATES.items():
        assert sorted(row["id"] for row in found if row["predicate"] == predicate) == wanted, predicate


def test_a_delete_removes_the_rows_that_a_read_shows(spark: SparkSession, book: Book) -> None:
    # NaN is Spark's largest number, and in no file's bounds: whoever goes by them would pass over it.
    rows: list[dict[str, Any]] = [{"id": 1, "v": NAN}, {"id": 2, "v": 1.0}, {"id": 3}, {"id": 4, "v": -INF}]
    for number, predicate in enumerate(("v > 1", "not (v <= 1)", "v >= 1", "v < 1", "v != 1", "v is not nan")):
        table = book.tables.create(f"t{number}", "id BIGINT, v DOUBLE")
        table.insert_arrow(arrow_rows(table, rows))
        shown = ids(in_spark(table, spark, predicate))
        table.delete(predicate, spark=spark)
        assert ids(table.to_arrow()) == [row["id"] for row in rows if row["id"] not in shown], predicate


# --- evolution -----------------------------------------------------------------


def evolved(table: Table, spark: SparkSession) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Insert rows, change the schema in every way there is, and insert again; the rows before and after."""
    before: list[dict[str, Any]] = [
        {"id": 1, "name": "one", "s": {"a": 1, "b": "b1", "in": {"p": 1.5}}, "l": [{"x": 1, "y": "y1"}, None],
         "m": [("q", {"k": 1, "v": Decimal("1.25")}), ("n", None)], "ml": [("q", [{"k": 1}, None]), ("n", None)],
         "ll": [[{"k": 7}], None, []], "gone": {"z": 5}, "same": "old"},
        {"id": 2},
        {"id": 3, "s": {"a": None, "b": None, "in": None}, "l": [], "m": [], "ml": [], "ll": [], "gone": {"z": None}},
    ]  # fmt: skip
    table.insert(frame_of(spark, table, before))
    with table.update_schema() as update:
        update.rename_column("s.a", "aa").rename_column("l.element.x", "xx").rename_column("m.value.k", "kk")
        update.rename_column("ml.value.element.k", "kk").rename_column("ll.element.element.k", "kk")
        update.widen_column("id", "BIGINT").widen_column("s.in.p", "DOUBLE").widen_column("m.value.v", "DECIMAL(9, 2)")
        update.widen_column("ml.value.element.kk", "BIGINT").widen_column("ll.element.element.kk", "BIGINT")
        update.drop_column("s.b").drop_column("l.element.y").drop_column("same").rename_column("name", "Na.me")
        update.move_first("ml").move_after("id", "s")
    with table.update_schema() as update:
        # The same names again, for other columns.
        update.add_column("s.b", "STRING").add_column(("l", "element", "y"), "INT").add_column("same", "INT")
        update.add_column(("s", "a"), "STRING").add_column("name", "DATE").move_first("s.in")
        # A struct of which a file has none of the fields.
        update.add_column("gone.new", "INT").drop_column("gone.z")
    after: list[dict[str, Any]] = [
        {"id": 2**40, "Na.me": "four", "s": {"in": {"p": 0.1}, "aa": 2, "b": "new b", "a": "new a"},
         "l": [{"xx": 2, "y": 3}], "m": [("q", {"kk": 2, "v": Decimal("1234567.25")})], "ml": [("q", [{"kk": 2**40}])],
         "ll": [[{"kk": 2**40}]], "gone": {"new": 6}, "same": 8, "name": date(2024, 1, 1)},
    ]  # fmt: skip
    table.insert(frame_of(spark, table, after))
    seen: list[dict[str, Any]] = [
        {"id": 1, "Na.me": "one", "s": {"in": {"p": 1.5}, "aa": 1}, "l": [{"xx": 1}, None],
         "m": [("q", {"kk": 1, "v": Decimal("1.25")}), ("n", None)], "ml": [("q", [{"kk": 1}, None]), ("n", None)],
         "ll": [[{"kk": 7}], None, []], "gone": {}},
        {"id": 2},
        {"id": 3, "s": {}, "l": [], "m": [], "ml": [], "ll": [], "gone": {}},
        *after,
    ]  # fmt: skip
    return before, seen


EVOLVING = (
    "id INT, name STRING, s STRUCT<a: INT, b: STRING, in: STRUCT<p: FLOAT>>, l ARRAY<STRUCT<x: INT, y: STRING>>,"
    " m MAP<STRING, STRUCT<k: INT, v: DECIMAL(5, 2)>>, ml MAP<STRING, ARRAY<STRUCT<k: INT>>>,"
    " ll ARRAY<ARRAY<STRUCT<k: INT>>>, gone STRUCT<z: INT>, same STRING"
)


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_old_rows_are_read_by_field_id_at_every_depth_after_every_change(
    spark: SparkSession, book: Book, kind: str
) -> None:
    table = book.tables.create("evolving", EVOLVING, format=kind)
    before, seen = evolved(table, spark)
    check_same(table, spark, seen)
    # And in the schema of its time.
    old = in_spark(table, spark, version=1)
    assert [name for name, _ in layout(old.schema)] == ["id", "name", "s", "l", "m", "ml", "ll", "gone", "same"]
    assert layout(old.schema) == layout(table.to_arrow(version=1).schema)
    wanted = pa.Table.from_pylist(before, schema=table.to_arrow(version=1).schema)
    assert values(old) == values(table.to_arrow(version=1)) == values(wanted)
    moment = next(item for item in table.history().items if item.version == 1).committed_at
    assert values(in_spark(table, spark, as_of=moment)) == values(wanted)
    # Columns that are younger than a file, alone and beside others.
    wanted = arrow_rows(table, seen)
    for columns in (["name"], ["same", "id"], ["gone", "Na.me"]):
        assert sorted(map(repr, values(table.to_arrow(columns=columns)))) == sorted(
            map(repr, values(wanted.select(columns)))
        )
    # A predicate means the column that has the name now.
    assert ids(in_spark(table, spark, "same = 8 and \"Na.me\" = 'four'")) == [2**40]
    assert ids(table.to_arrow("same is null")) == [1, 2, 3]
    assert ids(in_spark(table, spark, "s.aa = 1")) == ids(table.to_arrow("s.aa = 1")) == [1]


def test_files_without_field_ids_are_read_by_the_names_of_their_time(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("mixed", "id INT, a STRING, s STRUCT<x: INT, y: INT>, l ARRAY<STRUCT<k: INT>>")
    foreign = warehouse_of(book) / "foreign"
    foreign.mkdir()

    def add(name: str, rows: list[dict[str, Any]]) -> None:
        pq.write_table(arrow_rows(table, rows), foreign / name)
        table.add_files([f"foreign/{name}"])

    add("one.parquet", [{"id": 1, "a": "a1", "s": {"x": 1, "y": -1}, "l": [{"k": 1}, None]}, {"id": 2}])
    table.insert(frame_of(spark, table, [{"id": 3, "a": "a3", "s": {"x": 3, "y": -3}, "l": [{"k": 3}]}]))
    with table.update_schema() as update:
        # Names are exchanged: whoever reads by the present ones is wrong without noticing.
        update.rename_column("s.x", "t").rename_column("s.y", "x").rename_column("s.t", "y")
        update.rename_column("a", "b").add_column("a", "STRING").rename_column("l.element.k", "kk")
    add("two.parquet", [{"id": 4, "a": "new", "b": "b4", "s": {"y": 4, "x": -4}, "l": [{"kk": 4}]}])
    table.insert_arrow(arrow_rows(table, [{"id": 5, "a": "new", "b": "b5", "s": {"y": 5, "x": -5}}]))
    with table.update_schema() as update:
        update.drop_column("b").add_column("b", "INT")
    rows: list[dict[str, Any]] = [
        {"id": 1, "s": {"y": 1, "x": -1}, "l": [{"kk": 1}, None]},
        {"id": 2},
        {"id": 3, "s": {"y": 3, "x": -3}, "l": [{"kk": 3}]},
        {"id": 4, "a": "new", "s": {"y": 4, "x": -4}, "l": [{"kk": 4}]},
        {"id": 5, "a": "new", "s": {"y": 5, "x": -5}},
    ]
    check_same(table, spark, rows)
    assert ids(in_spark(table, spark, "s.y = 1 or s.y = 4")) == ids(table.to_arrow("s.y = 1 or s.y = 4")) == [1, 4]
    # Rewritten, they have ids and the same rows.
    report = table.replace(sorted(known_files(book)), table.read(spark))
    assert report.rows == 5
    check_same(table, spark, rows)


def test_a_table_of_nothing_but_files_without_field_ids_is_read(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("foreign", "id INT, a STRING")
    (warehouse_of(book) / "foreign").mkdir()
    pq.write_table(arrow_rows(table, [{"id": 1, "a": "x"}]), warehouse_of(book) / "foreign/one.parquet")
    table.add_files(["foreign/one.parquet"])
    check_same(table, spark, [{"id": 1, "a": "x"}])
    with table.update_schema() as update:
        update.rename_column("a", "b")
    check_same(table, spark, [{"id": 1, "b": "x"}])


FOREIGN: dict[str, tuple[str, pa.Array]] = {
    "int8": ("INT", pa.array([-5, None], pa.int8())),
    "int32 for a long": ("BIGINT", pa.array([-5, None], pa.int32())),
    "uint8": ("INT", pa.array([250, None], pa.uint8())),
    "uint32": ("BIGINT", pa.array([4_000_000_000, None], pa.uint32())),
    "uint64": ("BIGINT", pa.array([5, None], pa.uint64())),
    "float16": ("FLOAT", pa.array([1.5, None], pa.float16())),
    "float32 for a double": ("DOUBLE", pa.array([1.5, None], pa.float32())),
    "dictionary": ("STRING", pa.array(["a", None]).dictionary_encode()),
    "large list": ("ARRAY<INT>", pa.array([[1, None], None], pa.large_list(pa.int32()))),
    "list of two": ("ARRAY<INT>", pa.array([[1, None], None], pa.list_(pa.int32(), 2))),
    "smaller decimal": ("DECIMAL(20, 2)", pa.array([Decimal("1.25"), None], pa.decimal128(5, 2))),
    "microseconds": ("TIMESTAMP", pa.array([-1, None], pa.timestamp("us", "UTC"))),
    "milliseconds": ("TIMESTAMP", pa.array([-1, None], pa.timestamp("ms", "UTC"))),
    "milliseconds without a zone": ("TIMESTAMP_NTZ", pa.array([-1, None], pa.timestamp("ms"))),
    "milliseconds in a list": ("ARRAY<TIMESTAMP>", pa.array([[-1], None], pa.list_(pa.timestamp("ms", "UTC")))),
}


def test_a_file_that_was_added_reads_the_same_everywhere_or_is_refused(spark: SparkSession, book: Book) -> None:
    (warehouse_of(book) / "foreign").mkdir()
    taken = []
    for number, (name, (kind, column)) in enumerate(FOREIGN.items()):
        table = book.tables.create(f"t{number}", f"v {kind}, more INT")
        path = f"foreign/{number}.parquet"
        pq.write_table(pa.table({"v": column}), warehouse_of(book) / path)
        try:
            table.add_files([path])
        except InvalidFile:
            (warehouse_of(book) / path).unlink()
            continue
        taken.append(name)
        wanted = column.to_pylist()
        assert table.to_arrow().column("v").to_pylist() == wanted, name
        assert in_duckdb(table).column(0).to_pylist() == wanted, name
        assert [row["v"] for row in in_spark(table, spark).to_pylist()] == wanted, name
    assert {"int8", "int32 for a long", "dictionary", "large list", "microseconds"} <= set(taken)


def test_a_file_in_which_only_some_columns_have_ids_is_refused(book: Book) -> None:
    # Iceberg's readers would go by the ids that there are, and others by the names.
    def field(name: str, kind: pa.DataType, number: int | None) -> pa.Field:
        return pa.field(name, kind, metadata=None if number is None else {"PARQUET:field_id": str(number)})

    table = book.tables.create("t", "id BIGINT, a STRING, s STRUCT<x: INT, y: INT>")
    numbers = pa.int32()
    wrong = [
        [(1, None, 2), (None, None)],
        [(1, 2, 3), (None, None)],
        [(None, None, None), (5, 4)],
        [(1, 2, 3), (4, None)],
    ]
    (warehouse_of(book) / "foreign").mkdir()
    file = warehouse_of(book) / "foreign/some.parquet"
    for (one, two, three), (four, five) in wrong:
        inner = pa.struct([field("x", numbers, four), field("y", numbers, five)])
        columns = pa.schema([field("id", pa.int64(), one), field("a", pa.string(), two), field("s", inner, three)])
        pq.write_table(pa.table({"id": [1], "a": ["a"], "s": [{"x": 1, "y": 2}]}, schema=columns), file)
        with pytest.raises(InvalidFile):
            table.add_files(["foreign/some.parquet"])
    file.unlink()
    assert table.count() == 0


# --- JSON ----------------------------------------------------------------------


@pytest.mark.parametrize(("compression", "suffix"), [("none", ".json"), ("gzip", ".json.gz")])
def test_a_table_of_json_gives_back_what_it_got(spark: SparkSession, book: Book, compression: str, suffix: str) -> None:
    table = book.tables.create("lines", COLUMNS, format="json", compression=compression)
    report = table.insert(frame_of(spark, table, ROWS))
    assert (report.version, report.rows, report.files) == (1, len(ROWS), 2)
    assert all(path.endswith(suffix) for path in known_files(book))
    check_same(table, spark, ROWS)
    # Each file has as many lines as its row says.
    assert sum(file.row_count for file in table.plan()) == len(ROWS)
    assert ids(in_spark(table, spark, "d is nan or s = ''")) == ids(table.to_arrow("d is nan or s = ''")) == [3]


def test_a_table_of_json_has_only_texts_as_keys_of_maps(book: Book) -> None:
    # JSON has no others, and Spark could not read them back.
    with pytest.raises(InvalidTable):
        book.tables.create("lines", "id BIGINT, m ARRAY<MAP<INT, STRING>>", format="json")
    table = book.tables.create("lines", "id BIGINT", format="json")
    with pytest.raises((InvalidTable, IncompatibleSchema)), table.update_schema() as update:
        update.add_column("m", "MAP<INT, STRING>")


# --- the user's own files ------------------------------------------------------


def test_files_and_folders_of_json_are_inserted(spark: SparkSession, book: Book, tmp_path: Path) -> None:
    source = tmp_path / "source data"
    (source / "deep").mkdir(parents=True)
    lines = [
        {"id": 1, "s": "ü", "d": 1.25, "st": {"x": [1, 2]}, "ts": "1969-12-31T23:59:59.999999Z"},
        {"s": None, "id": 2},
        {"id": 3, "d": 2, "st": {"x": []}},
    ]
    one, two, three = source / "one.json", source / "two.json", source / "deep" / "three.json"
    for file, line in zip((one, two, three), lines, strict=True):
        file.write_text(json.dumps(line) + "\n", encoding="utf-8")
    rows: list[dict[str, Any]] = [
        {"id": 1, "s": "ü", "d": Decimal("1.25"), "st": {"x": [1, 2]},
         "ts": datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)},
        {"id": 2},
        {"id": 3, "d": Decimal(2), "st": {"x": []}},
    ]  # fmt: skip
    columns = "id BIGINT NOT NULL, s STRING, d DECIMAL(9, 2), st STRUCT<x: ARRAY<INT>>, ts TIMESTAMP"
    for kind in ("parquet", "json"):
        table = book.tables.create(kind, columns, format=kind)
        assert table.insert_json(spark, str(source)).rows == 2
        assert table.insert_json(spark, f"file://{three}").rows == 1
        check_same(table, spark, rows)
    table.insert_json(spark, str(one), str(three), properties={"from": "files"})
    assert table.history().items[0].summary["from"] == "files"
    assert ids(table.to_arrow()) == [1, 1, 2, 3, 3]


def test_keys_of_json_that_the_table_has_no_column_for_are_refused_unless_asked_otherwise(
    spark: SparkSession, book: Book, tmp_path: Path
) -> None:
    columns = (
        "id BIGINT, s STRUCT<x: INT, `a.b`: STRING>, l ARRAY<STRUCT<y: INT>>, m MAP<STRING, STRUCT<z: INT>>, n INT"
    )
    table = book.tables.create("t", columns)
    good: dict[str, Any] = {"id": 1, "s": {"x": 1, "a.b": "b"}, "l": [{"y": 1}, None], "m": {"anything": {"z": 1}}}
    strange: dict[str, tuple[dict[str, Any], list[str]]] = {
        "beside": ({"id": 2, "more": 1, "and": {"id": 1}}, ["more", "and"]),
        "case": ({"Id": 2}, ["Id"]),
        "struct": ({"id": 2, "s": {"x": 1, "X": 2}}, ["s.X"]),
        "list": ({"id": 2, "l": [{"y": 1}, {"y": 1, "w": 2}]}, ["l.w"]),
        "map": ({"id": 2, "m": {"k": {"z": 1}, "z": {"k": 1}}}, ["m.k"]),
        "everywhere": ({"s": {"a": 1}, "l": [{"b": 1}], "m": {"k": {"c": 1}}, "d": 1}, ["d", "s.a", "l.b", "m.c"]),
    }
    for name, (line, keys) in strange.items():
        file = tmp_path / f"{name}.json"
        file.write_text(f"{json.dumps(good)}\n{json.dumps(line)}\n", encoding="utf-8")
        with pytest.raises(IncompatibleSchema) as raised:
            table.insert_json(spark, str(file))
        assert all(repr(key) in raised.value.what for key in keys), raised.value
        assert "unknown='ignore'" in str(raised.value)
    assert (table.version, table.count()) == (0, 0)
    assert table.insert_json(spark, str(tmp_path / "case.json"), unknown="ignore").rows == 2
    with pytest.raises(InvalidInput):
        table.insert_json(spark, str(tmp_path / "case.json"), unknown="drop")
    check_same(table, spark, [{**good, "m": [("anything", {"z": 1})]}, {}])


def test_lines_of_json_are_read_as_spark_reads_them(spark: SparkSession, book: Book, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "day=2026-05-01").mkdir(parents=True)
    # Several rows in a line, no rows, numbers that a double cannot hold, keys in another order, no end of the line.
    lines = [
        ' [{"id": 1, "d": 1234567890.0123456789}, {"d": null, "id": 2}]',
        "",
        "  ",
        "[]",
        '\t{"id": 3, "d": 0.1}',
        '{"id": null}',
        "{}",
    ]
    (source / "day=2026-05-01/a.json").write_text("\n".join(lines), encoding="utf-8")
    expected: list[dict[str, Any]] = [
        {"id": 1, "d": Decimal("1234567890.0123456789"), "day": date(2026, 5, 1)},
        {"id": 2, "day": date(2026, 5, 1)},
        {"id": 3, "d": Decimal("0.1"), "day": date(2026, 5, 1)},
        {"day": date(2026, 5, 1)},
        {"day": date(2026, 5, 1)},
    ]
    for unknown in ("error", "ignore"):
        table = book.tables.create(unknown, "id BIGINT, d DECIMAL(30, 10), day DATE")
        assert table.insert_json(spark, str(source), unknown=unknown).rows == 5
        check_same(table, spark, expected)
        other = book.tables.create(f"{unknown}_other", "id BIGINT, d DECIMAL(30, 10)")
        with pytest.raises(IncompatibleSchema, match="day"):
            other.insert_json(spark, str(source), unknown=unknown)


def test_files_and_folders_of_parquet_are_inserted(spark: SparkSession, book: Book, tmp_path: Path) -> None:
    source = tmp_path / "source data"
    source.mkdir()
    # Without field ids, with columns in another order and narrower.
    pq.write_table(pa.table({"s": ["a"], "id": pa.array([1], pa.int32())}), source / "one.parquet")
    pq.write_table(pa.table({"s": ["b"], "id": pa.array([2], pa.int32())}), source / "two.parquet")
    for kind in ("parquet", "json"):
        table = book.tables.create(kind, "id BIGINT NOT NULL, s STRING, more INT", format=kind)
        assert table.insert_parquet(spark, str(source)).rows == 2
        assert table.insert_parquet(spark, str(source / "one.parquet"), str(source / "two.parquet")).rows == 2
        check_same(table, spark, [{"id": 1, "s": "a"}, {"id": 2, "s": "b"}] * 2)


def test_files_that_are_missing_or_broken_are_refused(spark: SparkSession, book: Book, tmp_path: Path) -> None:
    table = book.tables.create("t", "id BIGINT, s STRING")
    broken, strange, parquet = tmp_path / "broken.json", tmp_path / "strange.json", tmp_path / "broken.parquet"
    broken.write_text('{"id": 1, "s": "a"}\n{"id": 2, "s"\n', encoding="utf-8")
    strange.write_text('{"id": "no number"}\n', encoding="utf-8")
    parquet.write_bytes(b"PAR1 but not really PAR1")
    for insert, path in (
        (table.insert_json, str(tmp_path / "nowhere.json")),
        (table.insert_parquet, str(tmp_path / "nowhere")),
        (table.insert_parquet, "nosuchscheme://bucket/x.parquet"),
        (table.insert_json, str(broken)),
        (table.insert_json, str(strange)),
        (table.insert_parquet, str(parquet)),
    ):
        with pytest.raises(InsertFailed) as raised:
            insert(spark, path)
        assert len(str(raised.value)) < 600
    nothing: list[tuple[Any, ...]] = [(), ("",), (None,), (7,)]
    for paths in nothing:
        with pytest.raises(InvalidInput):
            table.insert_json(spark, *paths)
    assert (table.version, table.count()) == (0, 0)


# --- at the same time ----------------------------------------------------------


def test_threads_with_one_session_insert_into_one_table_without_losing_a_row(spark: SparkSession, book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, s STRING")

    def insert(number: int) -> int:
        frame = spark.range(number * 100, number * 100 + 10, 1, 2).selectExpr("id", "CAST(id AS STRING) s")
        return book.table("t").insert(frame).version

    with ThreadPoolExecutor(2) as pool:
        versions = list(pool.map(insert, range(4)))
    assert sorted(versions) == [1, 2, 3, 4]
    rows = [{"id": number * 100 + item, "s": str(number * 100 + item)} for number in range(4) for item in range(10)]
    check_same(table, spark, rows)
    record = table.record
    assert (record.row_count, record.file_count) == (40, 8)
    assert record.total_size == sum((warehouse_of(book) / path).stat().st_size for path in known_files(book))
    extremes = table.min_max("id")
    assert extremes is not None and (extremes.least, extremes.largest) == (0, 309)
