"""Rows and files go into a table whole or not at all, and what is recorded of a file is what it is."""

from __future__ import annotations

import itertools
import json
import math
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from books import Place
from lake import (
    check_totals,
    files_of,
    ids,
    in_memory,
    insert,
    lay,
    numbers,
    objects,
    own_warehouse,  # noqa: F401
    parquet,
    records,
    registry_state,
    replace_bytes,
    rows_of,
    stats_of,
    with_ids,
)
from lakebook import Book, failpoints
from lakebook.clock import ManualClock
from lakebook.errors import (
    CorruptFooter,
    IncompatibleSchema,
    InsertFailed,
    InvalidFile,
    InvalidInput,
    InvalidTable,
    LakebookError,
    ObjectNotFound,
    PathInUse,
    PathOutsideWarehouse,
    TableNotFound,
)
from lakebook.iceberg.bounds import decode
from lakebook.lake.table import Table
from lakebook.predicates import Test
from lakebook.registry import schema, table_files

EVERY_TYPE = pa.schema(
    [
        ("b", pa.bool_()),
        ("i", pa.int32()),
        ("l", pa.int64()),
        ("f", pa.float32()),
        ("d", pa.float64()),
        ("m", pa.decimal128(9, 2)),
        ("w", pa.decimal128(38, 10)),
        ("day", pa.date32()),
        ("t", pa.time64("us")),
        ("n", pa.timestamp("us")),
        ("z", pa.timestamp("us", "UTC")),
        ("s", pa.string()),
        ("u", pa.uuid()),
        ("x", pa.binary(3)),
        ("y", pa.binary()),
    ]
)
LEAST: dict[str, Any] = {
    "b": False,
    "i": -(2**31),
    "l": -(2**63),
    "f": -1.5,
    "d": -math.inf,
    "m": Decimal("-9999999.99"),
    "w": Decimal("-9999999999999999999999999999.0000000001"),
    "day": date(1, 1, 1),
    "t": time(0),
    "n": datetime(1, 1, 1),  # noqa: DTZ001 - a timestamp without a zone
    "z": datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    "s": "",
    "u": uuid.UUID(int=0),
    "x": b"\0\0\0",
    "y": b"",
}
LARGEST: dict[str, Any] = {
    "b": True,
    "i": 2**31 - 1,
    "l": 2**63 - 1,
    "f": 2.0**127,
    "d": math.inf,
    "m": Decimal("9999999.99"),
    "w": Decimal("9999999999999999999999999999.9999999999"),
    "day": date(9999, 12, 31),
    "t": time(23, 59, 59, 999999),
    "n": datetime(9999, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001
    "z": datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    "s": "\U0010ffff" * 20,
    "u": uuid.UUID(int=2**128 - 1),
    "x": b"\xff\xff\xff",
    "y": b"\xff" * 30,
}


def checksum(data: bytes) -> str:
    return f"xxh3:{xxhash.xxh3_64(data).hexdigest()}"


def footer_in(data: bytes) -> bytes:
    """The footer of a Parquet file, cut out by hand."""
    assert data[-4:] == b"PAR1"
    length = int.from_bytes(data[-8:-4], "little")
    return data[-8 - length : -8]


def check_recorded(book: Book, table: Table) -> None:
    """What is recorded of each file is what is in it."""
    for file in files_of(book, table):
        data = book.lake.store.read(file["file_path"])
        opened = pq.read_metadata(pa.BufferReader(data))
        assert file["file_size"] == len(data)
        assert file["checksum"] == checksum(data)
        assert (file["row_count"], file["row_groups"]) == (opened.num_rows, opened.num_row_groups)
        (stored,) = records(book, schema.partition_metadata, file_path=file["file_path"])
        assert stored["metadata"] == footer_in(data)
        assert (stored["num_rows"], stored["file_size"]) == (opened.num_rows, len(data))
        assert stored["partition_format_version"] == 2


# --- reports and records -------------------------------------------------------


def test_an_insert_reports_what_it_did(book: Book) -> None:
    table = numbers(book, "t")
    report = table.insert_arrow(pa.table({"id": [1, 2, 3]}), properties={"job": "nightly"})
    assert (report.table, report.operation, report.version) == ("default.t", "append", 1)
    assert (report.rows, report.files, report.removed_rows, report.removed_files) == (3, 1, 0, 0)
    assert report.bytes == check_totals(book, table)[2]
    assert set(report.seconds) == {"insert_data", "commit", "update_table_files", "update_table_statistics"}
    newest = table.history()[0]
    assert (newest.commit_id, newest.added_rows, newest.added_size) == (report.commit_id, 3, report.bytes)
    assert newest.summary == {"job": "nightly"}
    batch = pa.record_batch({"id": [4]})
    assert table.insert_arrow(batch).version == 2
    assert ids(table) == [1, 2, 3, 4]
    assert book.verify().ok


def test_all_that_is_recorded_of_a_file_is_right(place: Place) -> None:
    book = place.open(clock=ManualClock(1_700_000_000_000))
    table = book.tables.create("t", EVERY_TYPE)
    report = insert(table, LEAST, LARGEST, {})
    (file,) = files_of(book, table)
    assert file["file_path"] == f"data/{table.id}/{report.commit_id}/{file['file_name']}"
    assert file["id"] == 1
    assert (file["file_type"], file["schema_version"], file["spec_id"]) == ("parquet", 1, 0)
    assert (file["partition_path"], file["partition_values"]) == ("", "[]")
    assert (file["has_field_ids"], file["has_statistics"], file["is_compressed"]) == (True, True, True)
    assert (file["commit_id"], file["from_version"], file["to_version"]) == (report.commit_id, 1, None)
    assert file["created_at"] == 1_700_000_000_001
    assert file["retired_at"] is None
    check_recorded(book, table)
    assert table.to_arrow().to_pylist() == [LEAST, LARGEST, dict.fromkeys(LEAST)]
    assert book.verify().ok


def test_the_statistics_of_every_type_are_right(book: Book) -> None:
    table = book.tables.create("t", EVERY_TYPE)
    insert(table, LARGEST, {}, LEAST)
    found = stats_of(book, table)
    kinds = {column.field_id: column for column in table.describe().columns}
    assert set(found) == set(kinds)
    for field_id, row in found.items():
        name, kind = kinds[field_id].name, kinds[field_id].type
        assert (row["value_count"], row["null_count"], row["nan_count"]) == (3, 1, 0), name
        assert decode(kind, row["lower_bound"]) == LEAST[name], name
        assert decode(kind, row["upper_bound"]) == LARGEST[name], name
        assert row["is_exact"], name
        assert row["column_size"] > 0, name
        extremes = table.min_max(name)
        assert extremes is not None, name
        assert (extremes.least, extremes.largest) == (LEAST[name], LARGEST[name])


def test_statistics_know_nulls_nan_and_zeros(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, d DOUBLE, f FLOAT, nothing STRING, s STRING")
    insert(
        table,
        {"id": 1, "d": math.nan, "f": -0.0, "s": ""},
        {"id": 2, "d": -0.0, "f": 0.0, "s": ""},
        {"id": 3, "d": None, "f": 0.0, "s": None},
    )
    found = stats_of(book, table)
    assert (found[2]["nan_count"], found[2]["null_count"], found[2]["value_count"]) == (1, 1, 3)
    assert decode("double", found[2]["lower_bound"]) == decode("double", found[2]["upper_bound"]) == 0.0
    assert found[3]["nan_count"] == 0
    assert found[3]["lower_bound"] == found[3]["upper_bound"]
    assert (found[4]["null_count"], found[4]["lower_bound"], found[4]["upper_bound"]) == (3, None, None)
    assert (found[5]["null_count"], found[5]["lower_bound"], found[5]["upper_bound"]) == (1, b"", b"")
    assert ids(table, "f = -0.0") == ids(table, "f = 0.0") == [1, 2, 3]
    assert ids(table, "s = ''") == [1, 2]
    assert ids(table, "d = 0") == [2]


@in_memory
def test_statistics_of_nested_fields_count_the_nulls_of_their_parents(book: Book) -> None:
    table = book.tables.create(
        "t", "id BIGINT, s STRUCT<a: INT, t: STRUCT<b: DOUBLE, c: STRING>>, l ARRAY<STRUCT<x: INT>>, m MAP<STRING, INT>"
    )
    insert(
        table,
        {"id": 1, "s": {"a": -7, "t": {"b": math.nan, "c": "c"}}, "l": [{"x": 1}, None], "m": [("k", None)]},
        {"id": 2, "s": None, "l": None, "m": None},
        {"id": 3, "s": {"a": None, "t": None}, "l": [], "m": []},
        {"id": 4, "s": {"a": 4, "t": {"b": 1.5, "c": None}}},
    )
    leaves = {"s.a": ("int", -7, 4, 2, 0), "s.t.b": ("double", 1.5, 1.5, 2, 1), "s.t.c": ("string", "c", "c", 3, 0)}
    found = stats_of(book, table)
    assert len(found) == 4
    for path, (kind, least, largest, nulls, nans) in leaves.items():
        row = found[table.schema.find_field(path).field_id]
        assert decode(kind, row["lower_bound"]) == least, path
        assert decode(kind, row["upper_bound"]) == largest, path
        assert (row["value_count"], row["null_count"], row["nan_count"]) == (4, nulls, nans), path
    assert ids(table, "s.a IS NULL") == [2, 3]
    assert ids(table, "s.t.b IS NAN") == [1]
    assert ids(table, "s.t.b > 1") == [4]
    assert ids(table, "s.t.c IS NOT NULL") == [1]
    assert book.verify().ok


def test_columns_of_lists_alone_have_no_statistics_and_that_is_no_damage(book: Book) -> None:
    table = book.tables.create("t", "l ARRAY<INT>, m MAP<STRING, INT>")
    insert(table, {"l": [1, 2], "m": [("k", 1)]}, {})
    lay(book, "in/a.parquet", rows_of(table, [{"l": [3]}]))
    table.add_files(["in/a.parquet"])
    assert table.to_arrow().to_pylist() == [
        {"l": [1, 2], "m": [("k", 1)]},
        {"l": None, "m": None},
        {"l": [3], "m": None},
    ]
    assert book.verify().ok


def test_hostile_column_names_are_no_trouble(book: Book) -> None:
    odd = ["a.b", "a", 'x"y', "é漢", "sp ace", "`q`", "sel'ect", ".dot", "[0]", "a`.b", "id", "%", "\\", "a\tb\n"]
    inner = pa.struct([("in.ner", pa.string()), ('q"', pa.float64())])
    table = book.tables.create("t", pa.schema([*((name, pa.int32()) for name in odd), ("S.t", inner)]))
    row: dict[str, Any] = {name: number for number, name in enumerate(odd)}
    row["S.t"] = {"in.ner": "v", 'q"': math.inf}
    nothing: dict[str, Any] = {**dict.fromkeys(odd), "id": -5, "S.t": None}
    insert(table, row, nothing)
    # Other names first, so that the columns have to be brought into order.
    table.insert_arrow(rows_of(table, [row]).select([*reversed(odd), "S.t"]))
    lay(book, "in/é%20 '.parquet", rows_of(table, [row]))
    table.add_files(["in/é%20 '.parquet"])
    assert table.to_arrow().to_pylist() == [row, nothing, row, row]
    for name in odd:
        quoted = '"' + name.replace('"', '""') + '"'
        assert table.to_arrow(f"{quoted} = {row[name]}", columns=[name]).to_pylist() == [{name: row[name]}] * 3
        extremes = table.min_max(name)
        assert extremes is not None and extremes.largest == row[name]
    assert table.to_arrow('"S.t"."in.ner" = \'v\'').num_rows == 3
    assert table.to_arrow('"S.t"."q""" > 1').num_rows == 3
    check_recorded(book, table)
    assert book.verify().ok


# --- whatever is nested in whatever --------------------------------------------

POOLS: dict[pa.DataType, list[Any]] = {
    pa.int32(): [0, -5, 2**31 - 1],
    pa.string(): ["", "x", "é"],
    pa.float64(): [0.0, -1.5, math.inf],
    pa.bool_(): [True, False],
    pa.binary(): [b"", b"\xff"],
    pa.date32(): [date(1960, 2, 29)],
    pa.decimal128(9, 2): [Decimal("-1.50"), Decimal("0.00")],
}


def nested_types(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    def struct_of(kinds: list[pa.DataType]) -> pa.DataType:
        return pa.struct([(f"f{number}", kind) for number, kind in enumerate(kinds)])

    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(struct_of),
        inner.map(pa.list_),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
    )


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    found: st.SearchStrategy[Any]
    if pa.types.is_struct(kind):
        found = st.fixed_dictionaries({field.name: values_of(field.type) for field in kind})
    elif pa.types.is_map(kind):
        found = st.dictionaries(st.sampled_from("abc"), values_of(kind.item_type)).map(lambda item: list(item.items()))
    elif pa.types.is_list(kind):
        found = st.lists(values_of(kind.value_type), max_size=3)
    else:
        found = st.sampled_from(POOLS[kind])
    return st.one_of(st.none(), found)


@st.composite
def nested_rows(draw: st.DrawFn) -> pa.Table:
    kinds = draw(
        st.lists(st.recursive(st.sampled_from(list(POOLS)), nested_types, max_leaves=5), min_size=1, max_size=3)
    )
    columns = {f"c{number}": kind for number, kind in enumerate(kinds)}
    rows = draw(st.lists(st.fixed_dictionaries({name: values_of(kind) for name, kind in columns.items()}), min_size=1))
    numbered = [{"id": number, **row} for number, row in enumerate(rows)]
    return pa.Table.from_pylist(numbered, pa.schema([("id", pa.int64()), *columns.items()]))


def test_whatever_is_nested_in_whatever_comes_back_as_it_was(make_place: Any) -> None:
    book: Book = make_place("memory").open()
    count = itertools.count()

    @settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(nested_rows())
    def check(data: pa.Table) -> None:
        table = book.tables.create(f"t{next(count)}", data.schema)
        expected = data.to_pylist()
        backwards = list(reversed(data.column_names))
        twice = pa.concat_tables([data, data]).combine_chunks()

        def append() -> None:
            with table.appender() as appender:
                appender.append(expected)

        ways: dict[str, Callable[[], Any]] = {
            "as it is": lambda: table.insert_arrow(data),
            "in another order": lambda: table.insert_arrow(data.select(backwards)),
            "as a part of another": lambda: table.insert_arrow(twice.slice(data.num_rows).select(backwards)),
            "as records": append,
            "as a file": lambda: table.add_files([lay(book, f"in/{next(count)}.parquet", data, row_group_size=2)]),
            "as a file with ids": lambda: table.add_files(
                [lay(book, f"in/{next(count)}.parquet", with_ids(table, expected), row_group_size=2)]
            ),
        }
        for way, insert_so in ways.items():
            insert_so()
            assert table.to_arrow().to_pylist() == expected, way
            assert table.to_arrow(columns=backwards).select(data.column_names).to_pylist() == expected, way
            table.delete("true")
        table.insert_arrow(data)
        table.insert_arrow(data.select(["id"]))
        with table.update_schema() as update:
            update.add_column("more", "ARRAY<STRING>").move_first("more")
        nothing = dict.fromkeys(data.column_names)
        assert table.to_arrow().to_pylist() == [
            *({"more": None, **row} for row in expected),
            *({"more": None, **nothing, "id": row["id"]} for row in expected),
        ]

    check()
    assert book.verify(files=False).ok


# --- properties ----------------------------------------------------------------


def test_properties_of_an_insert_come_back_whatever_they_are(book: Book) -> None:
    table = numbers(book, "t")
    hostile = {"a.b": "c", "é漢": "😀", "q'\"`": "\\ \n\t '; DROP TABLE tables; --", "x" * 4096: "y" * 4096, "e": ""}
    table.insert_arrow(pa.table({"id": [1]}), properties=hostile)
    assert table.history()[0].summary == hostile
    bad: list[Any] = [
        {"a": 1},
        {1: "a"},
        {"": "a"},
        {"a": None},
        {"a": "\0"},
        {"a\0": "b"},
        {"a": "\ud800"},
        {"a": "x" * 4097},
        {str(number): "x" for number in range(101)},
    ]
    lay(book, "in/a.parquet", rows_of(table, [{"id": 2}]))
    for properties in bad:
        for call in (
            lambda properties: table.insert_arrow(pa.table({"id": [2]}), properties=properties),
            lambda properties: table.add_files(["in/a.parquet"], properties=properties),
            lambda properties: table.appender(properties=properties),
            lambda properties: table.delete("true", properties=properties),
        ):
            with pytest.raises(InvalidInput):
                call(properties)
    assert table.version == 1
    assert ids(table) == [1]


# --- what rows are taken -------------------------------------------------------


def test_an_insert_of_no_rows_makes_no_version(book: Book) -> None:
    table = numbers(book, "t", [1])
    report = table.insert_arrow(pa.table({"id": pa.array([], pa.int64())}))
    assert (report.version, report.rows, report.files, report.bytes) == (1, 0, 0, 0)
    assert table.add_files([]).files == 0
    assert table.delete("id = 99").removed_files == 0
    assert table.delete("false").removed_files == 0
    assert table.version == 1
    assert len(objects(book)) == 1
    # Rows that would not fit are refused also where there are none.
    with pytest.raises(IncompatibleSchema):
        table.insert_arrow(pa.table({"id": pa.array([], pa.string())}))
    assert book.verify().ok


@in_memory
def test_columns_may_come_in_any_order_narrower_or_not_at_all(book: Book) -> None:
    table = book.tables.create(
        "t", "id BIGINT, d DOUBLE, m DECIMAL(20, 2), s STRUCT<a: BIGINT, b: STRING>, l ARRAY<BIGINT>, c STRING"
    )
    table.insert_arrow(
        pa.table(
            {
                "l": pa.array([[1, None], None, []], pa.large_list(pa.int8())),
                "s": pa.array([{"b": "x"}, None, {"b": None}], pa.struct([("b", pa.large_string())])),
                "id": pa.array([1, 2, 3], pa.uint8()),
                "m": pa.array([Decimal("1.50"), None, Decimal("-0.01")], pa.decimal128(5, 2)),
                "d": pa.array([0.1, None, -1.0], pa.float32()),
                "c": pa.array(["x", None, "x"]).dictionary_encode(),
            }
        )
    )
    assert table.to_arrow().to_pylist() == [
        {
            "id": 1,
            "d": 0.10000000149011612,
            "m": Decimal("1.50"),
            "s": {"a": None, "b": "x"},
            "l": [1, None],
            "c": "x",
        },
        {"id": 2, "d": None, "m": None, "s": None, "l": None, "c": None},
        {"id": 3, "d": -1.0, "m": Decimal("-0.01"), "s": {"a": None, "b": None}, "l": [], "c": "x"},
    ]
    assert book.verify().ok


@in_memory
def test_times_in_other_units_and_zones_are_the_same_times(book: Book) -> None:
    noon = datetime(2024, 6, 1, 12, tzinfo=UTC)
    table = book.tables.create("t", "id BIGINT, z TIMESTAMP, n TIMESTAMP_NTZ, t TIME")
    for number, (z, n, t) in enumerate(
        (
            (pa.timestamp("us", "Europe/Berlin"), pa.timestamp("ms"), pa.time32("ms")),
            (pa.timestamp("s", "+05:30"), pa.timestamp("s"), pa.time32("s")),
        )
    ):
        table.insert_arrow(
            pa.table(
                {
                    "id": [number],
                    "z": pa.array([noon], z),
                    "n": pa.array([noon.replace(tzinfo=None)], n),
                    "t": pa.array([time(12)], t),
                }
            )
        )
    expected = {"z": noon, "n": noon.replace(tzinfo=None), "t": time(12)}
    assert table.to_arrow().to_pylist() == [{"id": 0, **expected}, {"id": 1, **expected}]


@in_memory
def test_rows_that_do_not_fit_are_refused_and_nothing_is_left(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT NOT NULL, s STRUCT<a: INT NOT NULL, b: INT>, n INT, z TIMESTAMP")
    inner = pa.struct([("a", pa.int32()), ("b", pa.int32())])
    good = {"id": pa.array([1, 2]), "s": pa.array([None, {"a": 1}], inner)}
    bad: list[dict[str, Any]] = [
        {"id": pa.array([1, None])},
        {"id": pa.array(["1", "2"])},
        {"id": pa.array([1.0, 2.0])},
        {"s": pa.array([{"a": None}, None], inner)},
        {"s": pa.array([{"b": 1}, None], pa.struct([("b", pa.int32())]))},
        {"n": pa.array([1, 2], pa.int64())},
        {"z": pa.array([datetime(2024, 1, 1)] * 2)},  # noqa: DTZ001
        {"more": pa.array([1, 2])},
        {"N": pa.array([1, 2], pa.int32())},
        {"z": pa.nulls(2, pa.timestamp("ns", "UTC"))},
        {"n": pa.nulls(2, pa.duration("s"))},
    ]
    for columns in bad:
        with pytest.raises(LakebookError) as refused:
            table.insert_arrow(pa.table({**good, **columns}))
        assert isinstance(refused.value, (IncompatibleSchema, InvalidInput, InsertFailed))
        with pytest.raises(LakebookError), table.appender() as appender:
            appender.append(pa.table({**good, **columns}))
    with pytest.raises(IncompatibleSchema):
        table.insert_arrow(pa.table({"n": pa.array([1], pa.int32())}))
    assert (table.version, objects(book)) == (0, [])
    assert book.verify().ok


def test_a_failed_insert_can_never_become_visible_and_leaves_nothing(book: Book) -> None:
    table = numbers(book, "t", [1])
    before = objects(book)

    def fail() -> None:
        raise OSError("the disk is gone")

    for point in ("insert.arrow_written", "change.written"):
        with failpoints.armed(point, fail), pytest.raises(InsertFailed) as failed:
            insert(table, {"id": 2})
        assert "the disk is gone" in str(failed.value)
        assert objects(book) == before
    assert {row["state"] for row in records(book, schema.commits, kind="insert")} == {"committed", "aborted"}
    assert ids(table) == [1]
    insert(table, {"id": 3})
    assert [file["id"] for file in files_of(book, table)] == [1, 2]
    assert check_totals(book, table)[:2] == (2, 2)
    assert book.verify().ok


def test_an_insert_into_a_table_that_is_dropped_meanwhile_is_undone(book: Book) -> None:
    table = numbers(book, "t", [1])
    before = objects(book)
    with failpoints.armed("insert.arrow_written", lambda: book.tables.drop("t")), pytest.raises(TableNotFound):
        insert(table, {"id": 2})
    assert objects(book) == before


# --- partitions and order ------------------------------------------------------

PARTITIONED: list[tuple[str, pa.DataType, list[Any], dict[str, dict[str, int]]]] = [
    # Type, values, and for each transform the files and how many rows each of them has.
    (
        "INT",
        pa.int32(),
        [1, -1, None, 2**31 - 1, -11],
        {
            "k": {"k=1": 1, "k=-1": 1, "k=null": 1, "k=2147483647": 1, "k=-11": 1},
            "truncate(9999, k)": {"k_trunc=0": 1, "k_trunc=-9999": 2, "k_trunc=null": 1, "k_trunc=2147475231": 1},
        },
    ),
    (
        "STRING",
        pa.string(),
        ["", "a/b=c", "a/x", None, "null"],
        {
            "k": {"k=": 1, "k=a%2Fb%3Dc": 1, "k=a%2Fx": 1, "k=null": 2},
            "truncate(2, k)": {"k_trunc=": 1, "k_trunc=a%2F": 2, "k_trunc=null": 1, "k_trunc=nu": 1},
        },
    ),
    (
        "DATE",
        pa.date32(),
        [date(1969, 12, 31), date(1970, 1, 1), date(2024, 2, 29), None],
        {
            "k": {"k=1969-12-31": 1, "k=1970-01-01": 1, "k=2024-02-29": 1, "k=null": 1},
            "year(k)": {"k_year=1969": 1, "k_year=1970": 1, "k_year=2024": 1, "k_year=null": 1},
            "month(k)": {"k_month=1969-12": 1, "k_month=1970-01": 1, "k_month=2024-02": 1, "k_month=null": 1},
            "day(k)": {"k_day=1969-12-31": 1, "k_day=1970-01-01": 1, "k_day=2024-02-29": 1, "k_day=null": 1},
        },
    ),
    (
        "TIMESTAMP",
        pa.timestamp("us", "UTC"),
        [datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), datetime(2024, 1, 1, 5, tzinfo=UTC), None],
        {
            "year(k)": {"k_year=1969": 1, "k_year=2024": 1, "k_year=null": 1},
            "month(k)": {"k_month=1969-12": 1, "k_month=2024-01": 1, "k_month=null": 1},
            "day(k)": {"k_day=1969-12-31": 1, "k_day=2024-01-01": 1, "k_day=null": 1},
            "hour(k)": {"k_hour=1969-12-31-23": 1, "k_hour=2024-01-01-05": 1, "k_hour=null": 1},
        },
    ),
    (
        "DECIMAL(9, 2)",
        pa.decimal128(9, 2),
        [Decimal("-1.01"), Decimal("10.65"), None, Decimal("0.00")],
        {
            "k": {"k=-1.01": 1, "k=10.65": 1, "k=null": 1, "k=0.00": 1},
            "truncate(50, k)": {"k_trunc=-1.50": 1, "k_trunc=10.50": 1, "k_trunc=null": 1, "k_trunc=0.00": 1},
        },
    ),
    (
        "BINARY",
        pa.binary(),
        [b"", b"\xff\0", None],
        {
            "k": {"k=": 1, "k=%2FwA%3D": 1, "k=null": 1},
            "truncate(1, k)": {"k_trunc=": 1, "k_trunc=%2Fw%3D%3D": 1, "k_trunc=null": 1},
        },
    ),
    ("BOOLEAN", pa.bool_(), [True, False, None, True], {"k": {"k=true": 2, "k=false": 1, "k=null": 1}}),
    (
        "TIME",
        pa.time64("us"),
        [time(1), time(23, 59, 59, 999999), None],
        {"k": {"k=01%3A00%3A00": 1, "k=23%3A59%3A59.999999": 1, "k=null": 1}},
    ),
]


@pytest.mark.parametrize(("kind", "arrow", "values", "expected"), PARTITIONED, ids=[row[0] for row in PARTITIONED])
def test_rows_go_into_the_files_of_their_partitions(
    make_place: Any, kind: str, arrow: pa.DataType, values: list[Any], expected: dict[str, dict[str, int]]
) -> None:
    book: Book = make_place("memory").open()
    data = pa.table({"id": pa.array(range(len(values))), "k": pa.array(values, arrow)})
    for number, (transform, files) in enumerate(expected.items()):
        table = book.tables.create(f"t{number}", f"id BIGINT, k {kind}", partition_by=[transform])
        report = table.insert_arrow(data)
        assert (report.rows, report.files) == (len(values), sum(1 for _ in table.plan()))
        found: dict[str, int] = {}
        for file in table.plan():
            found[file.partition_path] = found.get(file.partition_path, 0) + file.row_count
        assert found == files
        assert ids(table) == list(range(len(values)))
        assert ids(table, "k IS NULL") == [number for number, value in enumerate(values) if value is None]
        check_totals(book, table)
    assert book.verify().ok


def test_rows_go_into_buckets_by_every_type_that_has_them(make_place: Any) -> None:
    book: Book = make_place("memory").open()
    for name in ("i", "l", "m", "w", "day", "t", "n", "z", "s", "u", "x", "y"):
        table = book.tables.create(name, EVERY_TYPE, partition_by=[f"bucket(7, {name})"])
        report = insert(table, LEAST, LARGEST, {})
        assert report.rows == 3, name
        assert table.to_arrow(f'"{name}" IS NULL').num_rows == 1
        values = [json.loads(file.partition_values)[0] for file in table.plan()]
        assert None in values
        assert all(0 <= value < 7 for value in values if value is not None)
        assert sorted(row[name] is None for row in table.to_arrow().to_pylist()) == [False, False, True]
    assert book.verify().ok


def test_every_type_can_be_a_partition_of_its_own(make_place: Any) -> None:
    book: Book = make_place("memory").open()
    for name in EVERY_TYPE.names:
        table = book.tables.create(name, EVERY_TYPE, partition_by=[name])
        assert insert(table, LEAST, LARGEST, {}, LEAST).files == 3, name
        assert check_totals(book, table)[:2] == (4, 3)
        assert table.to_arrow(f'"{name}" IS NULL').num_rows == 1
        sizes = sorted(file.row_count for file in table.plan())
        assert sizes == [1, 1, 2], name
    assert book.verify().ok


def test_no_row_is_lost_or_doubled_by_partitions_of_nan_and_zeros(book: Book) -> None:
    values = [0.0, -0.0, math.nan, None, 1.0, math.nan, -math.inf]
    for kind, arrow in (("DOUBLE", pa.float64()), ("FLOAT", pa.float32())):
        table = book.tables.create(kind, f"id BIGINT, k {kind}", partition_by=["k"])
        report = table.insert_arrow(pa.table({"id": list(range(7)), "k": pa.array(values, arrow)}))
        assert report.rows == 7
        assert ids(table) == list(range(7))
        assert ids(table, "k IS NAN") == [2, 5]
        assert ids(table, "k = 0") == [0, 1]
        assert ids(table, "k IS NULL") == [3]
        assert ids(table, "k < 0") == [6]
        check_totals(book, table)
    assert book.verify().ok


@in_memory
def test_a_nested_field_and_two_transforms_can_make_the_partitions(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, s STRUCT<k: STRING>, at DATE", partition_by=["s.k", "month(at)"])
    report = insert(
        table,
        {"id": 1, "s": {"k": "a"}, "at": date(2024, 1, 1)},
        {"id": 2, "s": {"k": "a"}, "at": date(2024, 1, 31)},
        {"id": 3, "s": {"k": "a"}, "at": date(2024, 2, 1)},
        {"id": 4, "s": None, "at": date(2024, 2, 1)},
        {"id": 5, "s": {"k": None}, "at": None},
    )
    assert report.files == 4
    assert ids(table) == [1, 2, 3, 4, 5]
    plan = table.plan("s.k = 'a' AND at < '2024-02-01'")
    assert [file.row_count for file in plan] == [2]
    assert [file.partition_path for file in plan] == ["s.k=a/at_month=2024-01"]
    assert ids(table, "s.k IS NULL") == [4, 5]
    stats = stats_of(book, table, plan.files[0].id)
    assert sorted(stats)[:2] == [-1001, -1000]
    assert book.verify().ok


@in_memory
def test_odd_names_can_make_the_partitions(book: Book) -> None:
    columns = 'id BIGINT, `a.b` INT, `x "y"` STRING, s STRUCT<`k.x`: STRING>'
    for number, term in enumerate(("`a.b`", 'bucket(2, `x "y"`)', "truncate(1, s.`k.x`)")):
        table = book.tables.create(f"t{number}", columns, partition_by=[term])
        insert(table, {"id": 1, "a.b": 1, 'x "y"': "x", "s": {"k.x": "a"}}, {"id": 2})
        assert ids(table) == [1, 2]
        assert len(table.plan().files) == 2
        assert ids(table, '"a.b" = 1 AND "x ""y""" = \'x\' AND s."k.x" = \'a\'') == [1]
    assert book.verify().ok


def test_hostile_texts_can_be_values_and_partitions(book: Book) -> None:
    texts = [
        "a\0b",
        "\0",
        "..",
        "/",
        "a/../b",
        "%00",
        "'; DROP TABLE tables; --",
        "\n\t\\",
        "x" * 3000,
        "",
        "NULL",
        "😀",
    ]
    for number, partition_by in enumerate(((), ("s",), ("truncate(1, s)",), ("bucket(4, s)",))):
        table = book.tables.create(f"t{number}", "id BIGINT, s STRING", partition_by=partition_by)
        insert(table, *({"id": place, "s": text} for place, text in enumerate(texts)))
        assert table.to_arrow().num_rows == len(texts)
        for place, text in enumerate(texts):
            where = Test("eq", ("s",), 2, "string", (text,))
            assert ids(table, where) == [place], text
            assert len(table.plan(where).files) == 1
        assert all(path.startswith(f"data/{table.id}/") for path in objects(book, f"data/{table.id}"))
        check_totals(book, table)
    assert book.verify().ok


@in_memory
def test_rows_of_a_file_are_in_the_tables_order(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, a INT, b STRING", sort_by=["a desc", "b"])
    given = [(1, "x"), (None, "y"), (2, "b"), (2, "a"), (2, None), (None, None)]
    insert(table, *({"id": number, "a": a, "b": b} for number, (a, b) in enumerate(given)))
    found = [(row["a"], row["b"]) for row in table.to_arrow().to_pylist()]
    # As the table says: descending with nulls last, then ascending with nulls first.
    assert found == [(2, None), (2, "a"), (2, "b"), (1, "x"), (None, None), (None, "y")]


@in_memory
def test_a_table_can_be_sorted_by_nested_fields_and_odd_names_and_types(book: Book) -> None:
    table = book.tables.create("t", "id INT, s STRUCT<id: INT>", sort_by=["s.id desc"])
    insert(table, {"id": 3, "s": {"id": 1}}, {"id": 2, "s": {"id": 3}}, {"id": 1, "s": {"id": 2}})
    assert table.to_arrow().column("id").to_pylist() == [2, 1, 3]
    table = book.tables.create("odd", "id INT, `.x` INT, `a.b` INT", sort_by=["`.x`", "`a.b` desc"])
    insert(table, {"id": 1, ".x": 2}, {"id": 2, ".x": 1, "a.b": 1}, {"id": 3, ".x": 1, "a.b": 2})
    assert table.to_arrow().column("id").to_pylist() == [3, 2, 1]
    for name in EVERY_TYPE.names:
        table = book.tables.create(f"by_{name}", EVERY_TYPE, sort_by=[name])
        insert(table, LARGEST, {}, LEAST)
        assert [row[name] for row in table.to_arrow().to_pylist()] == [None, LEAST[name], LARGEST[name]], name


# --- files that are there ------------------------------------------------------


def test_files_of_others_are_taken_with_and_without_field_ids(book: Book) -> None:
    table = book.tables.create("t", EVERY_TYPE)
    lay(book, "in/a.parquet", rows_of(table, [LEAST, LARGEST]), compression="none")
    lay(book, "in/deep/b.parquet", with_ids(table, [{}, LARGEST]), row_group_size=1)
    report = table.add_files(["in/a.parquet", "in/deep/b.parquet"], properties={"from": "elsewhere"})
    assert (report.operation, report.version, report.rows, report.files) == ("append", 1, 4, 2)
    assert set(report.seconds) == {"measure", "commit", "update_table_files", "update_table_statistics"}
    first, second = files_of(book, table)
    assert (first["file_path"], first["file_name"]) == ("in/a.parquet", "a.parquet")
    assert (first["has_field_ids"], second["has_field_ids"]) == (False, True)
    assert (first["is_compressed"], second["is_compressed"]) == (False, True)
    assert (first["row_groups"], second["row_groups"]) == (1, 2)
    assert table.history()[0].summary == {"from": "elsewhere"}
    check_recorded(book, table)
    check_totals(book, table)
    assert table.to_arrow().to_pylist() == [LEAST, LARGEST, dict.fromkeys(LEAST), LARGEST]
    assert book.verify().ok


def test_statistics_of_files_of_others_are_used_and_never_trusted_too_far(book: Book) -> None:
    table = book.tables.create("t", EVERY_TYPE)
    lay(book, "in/a.parquet", rows_of(table, [LARGEST, LEAST, {}]))
    table.add_files(["in/a.parquet"])
    found = stats_of(book, table)
    for column in table.describe().columns:
        row = found[column.field_id]
        assert decode(column.type, row["lower_bound"]) == LEAST[column.name]
        assert decode(column.type, row["upper_bound"]) == LARGEST[column.name]
        assert (row["value_count"], row["null_count"]) == (3, 1)
        # Nobody has counted its NaN, and its texts may have been cut.
        extremes = table.min_max(column.name)
        if column.name in ("f", "d", "s", "x", "y"):
            assert extremes is None
        else:
            assert extremes is not None and extremes.least == LEAST[column.name]
    assert found[4]["nan_count"] is None


@in_memory
def test_a_file_of_others_may_lack_optional_columns_and_be_narrower(book: Book) -> None:
    table = book.tables.create(
        "t", "id BIGINT, d DOUBLE, m DECIMAL(20, 2), s STRUCT<a: BIGINT, b: STRING>, text STRING"
    )
    lay(
        book,
        "in/a.parquet",
        pa.table(
            {
                "s": pa.array([{"a": 1}, None], pa.struct([("a", pa.int32())])),
                "id": pa.array([-1, 2], pa.int32()),
                "d": pa.array([0.5, None], pa.float32()),
                "m": pa.array([Decimal("-1.50"), Decimal("2.00")], pa.decimal128(5, 2)),
            }
        ),
    )
    table.add_files(["in/a.parquet"])
    assert table.to_arrow().to_pylist() == [
        {"id": -1, "d": 0.5, "m": Decimal("-1.50"), "s": {"a": 1, "b": None}, "text": None},
        {"id": 2, "d": None, "m": Decimal("2.00"), "s": None, "text": None},
    ]
    for where, found in (
        ("text IS NULL", [-1, 2]),
        ("text = 'x'", []),
        ("s.b IS NOT NULL", []),
        ("id < 0", [-1]),
        ("m = -1.5", [-1]),
        ("d >= 0.5", [-1]),
        ("s.a = 1", [-1]),
        ("s.a IS NULL", [2]),
    ):
        assert ids(table, where) == found, where
    assert list(table.plan("text = 'x'")) == []
    assert list(table.plan("id < -1")) == []
    assert book.verify().ok


@in_memory
def test_a_file_of_others_fits_a_required_column_if_it_has_no_nulls_there(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT NOT NULL, v STRING")
    strict = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    lay(book, "in/a.parquet", pa.table({"id": [1, 2]}, schema=strict))
    table.add_files(["in/a.parquet"])
    assert ids(table) == [1, 2]
    lay(book, "in/b.parquet", pa.table({"id": [1, 2]}))
    lay(book, "in/c.parquet", pa.table({"v": ["x"]}))
    for path in ("in/b.parquet", "in/c.parquet"):
        with pytest.raises(InvalidFile):
            table.add_files([path])


@in_memory
def test_a_file_of_others_that_does_not_fit_is_refused_and_stays(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, n INT, s STRUCT<a: INT NOT NULL, b: INT>, l ARRAY<INT>, z TIMESTAMP")
    good = parquet(with_ids(table, [{"id": 1}] * 100))
    bad: dict[str, bytes] = {
        "more.parquet": parquet(pa.table({"id": [1], "more": [1]})),
        "wider.parquet": parquet(pa.table({"n": [1]})),
        "text.parquet": parquet(pa.table({"id": ["1"]})),
        "case.parquet": parquet(pa.table({"ID": [1]})),
        "nested.parquet": parquet(pa.table({"s": [{"a": 1, "c": 1}]})),
        "list.parquet": parquet(pa.table({"l": pa.array([1], pa.int32())})),
        "plain.parquet": parquet(pa.table({"s": pa.array([1], pa.int32())})),
        "naive.parquet": parquet(pa.table({"z": pa.array([datetime(2024, 1, 1)])})),  # noqa: DTZ001
        "twice.parquet": parquet(pa.table([pa.array([1]), pa.array([2])], names=["id", "id"])),
        "ids.parquet": parquet(
            pa.table({"id": [1]}, schema=pa.schema([pa.field("id", pa.int64(), metadata={"PARQUET:field_id": "99"})]))
        ),
        "other-id.parquet": parquet(
            pa.table({"id": [1]}, schema=pa.schema([pa.field("id", pa.int64(), metadata={"PARQUET:field_id": "2"})]))
        ),
    }
    broken: dict[str, bytes] = {
        "empty.parquet": b"",
        "short.parquet": b"PAR1PAR1",
        "text.csv": b"id,n\n1,2\n" * 100,
        "cut.parquet": good[:-1],
        "half.parquet": good[: len(good) // 2],
        "footer.parquet": good[:-40] + b"\xff" * 32 + good[-8:],
        "length.parquet": good[:-8] + (2**31 - 1).to_bytes(4, "little") + b"PAR1",
        "zero.parquet": good[:-8] + (0).to_bytes(4, "little") + b"PAR1",
        "encrypted.parquet": good[:-4] + b"PARE",
    }
    lay(book, "in/good.parquet", good)
    for path, data in (bad | broken).items():
        lay(book, f"in/{path}", data)
        for paths in ([f"in/{path}"], ["in/good.parquet", f"in/{path}"]):
            with pytest.raises(InvalidFile if path in bad else (CorruptFooter, InvalidFile)) as refused:
                table.add_files(paths)
            assert path in refused.value.on, path
        assert book.lake.store.read(f"in/{path}") == data
    assert table.version == 0
    assert table.add_files(["in/good.parquet"]).rows == 100
    assert len(objects(book)) == len(bad) + len(broken) + 1
    assert book.verify().ok


@in_memory
def test_a_file_that_lacks_a_required_nested_field_is_refused(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, s STRUCT<a: INT NOT NULL, b: INT>")
    data = pa.table({"id": [1, 2], "s": pa.array([{"b": 1}, None], pa.struct([("b", pa.int32())]))})
    path = lay(book, "in/a.parquet", data)
    with pytest.raises(InvalidFile):
        table.add_files([path])
    assert table.version == 0


@in_memory
def test_a_type_that_no_table_has_is_a_matter_of_the_file(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, z TIMESTAMP")
    for number, kind in enumerate((pa.timestamp("ns", "UTC"), pa.duration("s"), pa.decimal256(50, 2))):
        path = lay(book, f"in/{number}.parquet", pa.table({"z": pa.nulls(1, kind)}))
        with pytest.raises(InvalidFile) as refused:
            table.add_files([path])
        assert refused.value.on == path


def test_a_path_has_to_be_in_the_warehouse_and_nobodys(book: Book, tmp_path: Any) -> None:
    table = numbers(book, "t", [1])
    (own,) = (file.file_path for file in table.plan())
    outside = tmp_path / "outside.parquet"
    outside.write_bytes(parquet(pa.table({"id": [1]})))
    elsewhere: list[Any] = [str(outside), f"file://{outside}", "../outside.parquet", "in/../../x", "", "in//x"]
    for path in [*elsewhere, "a\\b", "a\0", None, 7]:
        with pytest.raises(PathOutsideWarehouse):
            table.add_files([path])
    for path in ("missing.parquet", "in"):
        with pytest.raises(ObjectNotFound):
            table.add_files([path])
    lay(book, "data/x.parquet", pa.table({"id": [1]}))
    lay(book, "reads/x.parquet", pa.table({"id": [1]}))
    for path in ("data/x.parquet", "reads/x.parquet"):
        with pytest.raises(InvalidFile):
            table.add_files([path])
    with pytest.raises((PathInUse, InvalidFile)):
        table.add_files([own])
    no_lists: list[Any] = ["in/a.parquet", None, 5]
    for paths in no_lists:
        with pytest.raises(InvalidInput):
            table.add_files(paths)
    assert outside.exists()
    assert ids(table) == [1]


def test_a_file_is_added_once_to_one_table(place: Place) -> None:
    book = place.open(temporary_file_grace=0)
    table, other = numbers(book, "a"), numbers(book, "b")
    paths = [lay(book, f"in/{kind.__name__}.parquet", kind(table, [{"id": 1}])) for kind in (rows_of, with_ids)]
    for path in paths:
        with pytest.raises(InvalidFile):
            table.add_files([path, path])
        table.add_files([path])
        for target in (table, other):
            with pytest.raises(PathInUse):
                target.add_files([path])
    table.delete("true")
    with pytest.raises(PathInUse):
        other.add_files(paths)
    # Also while it waits for its removal.
    book.cleaner.expire(seconds=0, versions=1)
    with pytest.raises(PathInUse):
        other.add_files(paths)
    book.cleaner.delete_expired_temporary_files()
    # And for a day after it: a cleaner that was slow may be about to delete what lies there.
    with pytest.raises(PathInUse):
        other.add_files(paths)
    assert (table.version, other.version) == (3, 0)
    assert book.verify().ok


def test_two_who_add_the_same_file_at_once_get_it_once(book: Book) -> None:
    table, other = numbers(book, "a"), numbers(book, "b")
    path = lay(book, "in/x.parquet", with_ids(table, [{"id": 1}]))
    from_here = [False]

    def add_first() -> None:
        # Once only: the other's own commit comes by here too.
        if not from_here[0]:
            from_here[0] = True
            other.add_files([path])

    with failpoints.armed("insert.reserved", add_first), pytest.raises(PathInUse):
        table.add_files([path])
    assert (ids(table), ids(other)) == ([], [1])
    assert book.verify().ok


def test_a_failed_addition_deletes_nothing_and_can_be_repeated(book: Book) -> None:
    table = numbers(book, "t")
    paths = [lay(book, f"in/{number}.parquet", rows_of(table, [{"id": number}])) for number in range(3)]

    def fail() -> None:
        raise OSError("the network is gone")

    with failpoints.armed("change.written", fail), pytest.raises(InsertFailed):
        table.add_files(paths)
    assert objects(book) == paths
    assert table.version == 0
    assert book.verify().ok
    assert table.add_files(paths).rows == 3
    assert ids(table) == [0, 1, 2]


def test_a_path_that_was_deleted_can_hold_another_file_later(shared_place: Place) -> None:
    clock = ManualClock()
    book, other = shared_place.open(temporary_file_grace=0, clock=clock), shared_place.open()
    table = numbers(book, "t")
    path = lay(book, "in/x.parquet", rows_of(table, [{"id": 1}]))
    table.add_files([path])
    # Both have read its footer.
    assert (ids(table), ids(other.table("t"))) == ([1], [1])
    table.delete("true")
    clock.advance(1)
    book.cleaner.expire(seconds=0, versions=1)
    assert book.cleaner.delete_expired_temporary_files().files == 1
    lay(book, path, rows_of(table, [{"id": number} for number in range(5000)]), compression="none")
    with pytest.raises(PathInUse):
        table.add_files([path])
    clock.advance(86_401)
    assert book.cleaner.delete_expired_temporary_files().files == 0
    table.add_files([path])
    assert ids(table) == list(range(5000))
    assert ids(other.table("t")) == list(range(5000))
    assert book.verify().ok


@in_memory
def test_a_partitioned_table_takes_files_of_one_partition_each(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, day DATE, f DOUBLE", partition_by=["month(day)", "truncate(10, id)"])
    good: list[list[dict[str, Any]]] = [
        [{"id": 10, "day": date(2024, 1, 1)}, {"id": 19, "day": date(2024, 1, 31)}],
        [{"id": -10, "day": date(1969, 12, 31)}, {"id": -1, "day": date(1969, 12, 1)}],
        [{"id": None, "day": None}],
    ]
    bad: list[list[dict[str, Any]]] = [
        [{"id": 10, "day": date(2024, 1, 1)}, {"id": 20, "day": date(2024, 1, 1)}],
        [{"id": 10, "day": date(2024, 1, 1)}, {"id": 10, "day": date(2024, 2, 1)}],
        [{"id": 10, "day": date(2024, 1, 1)}, {"id": 10, "day": None}],
    ]
    for number, rows in enumerate(bad):
        lay(book, f"in/bad{number}.parquet", rows_of(table, rows))
        with pytest.raises(InvalidFile):
            table.add_files([f"in/bad{number}.parquet"])
    paths = [lay(book, f"in/{number}.parquet", rows_of(table, rows)) for number, rows in enumerate(good)]
    table.add_files(paths)
    assert [(file.partition_path, file.partition_values) for file in table.plan()] == [
        ("day_month=2024-01/id_trunc=10", "[648,10]"),
        ("day_month=1969-12/id_trunc=-10", "[-1,-10]"),
        ("day_month=null/id_trunc=null", "[null,null]"),
    ]
    assert ids(table) == [-10, -1, 10, 19, None]
    for where, found in (("day < '1970-01-01'", [-10, -1]), ("id = 19", [19]), ("day IS NULL", [None])):
        assert (len(table.plan(where).files), ids(table, where)) == (1, found)
    # What lies between two numbers can be in any bucket, and nobody knows whether a file has NaN.
    for number, (term, last, fits) in enumerate(
        (("bucket(4, id)", 1, True), ("bucket(4, id)", 2, False), ("f", 1, False))
    ):
        by = book.tables.create(f"by{number}", "id BIGINT, f DOUBLE", partition_by=[term])
        path = lay(book, f"in/by{number}.parquet", rows_of(by, [{"id": 1, "f": 1.0}, {"id": last, "f": 1.0}]))
        if fits:
            assert by.add_files([path]).rows == 2
        else:
            with pytest.raises(InvalidFile):
                by.add_files([path])
    assert book.verify().ok


def test_files_without_rows_or_row_groups_are_no_trouble(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, v STRING")
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, pa.schema([("id", pa.int64())])):
        pass
    no_groups = sink.getvalue().to_pybytes()
    assert pq.read_metadata(pa.BufferReader(no_groups)).num_row_groups == 0
    lay(book, "in/no-groups.parquet", no_groups)
    lay(book, "in/no-rows.parquet", rows_of(table, []))
    report = table.add_files(["in/no-groups.parquet", "in/no-rows.parquet"])
    assert (report.rows, report.files, report.version) == (0, 2, 1)
    for where in (None, "id = 1", "id IS NULL", "id IS NOT NULL", "v = 'x'", "v IS NULL"):
        assert table.to_arrow(where).num_rows == 0
    assert table.to_arrow(columns=["v"]).num_rows == 0
    assert check_totals(book, table)[:2] == (0, 2)
    insert(table, {"id": 1})
    assert ids(table, "id = 1") == ids(table, "v IS NULL") == [1]
    assert table.delete("true").removed_files == 3
    assert book.verify().ok


def test_json_files_of_others_are_taken_and_read(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, s STRUCT<a: INT>, at TIMESTAMP, d DECIMAL(5, 2)", format="json")
    lines = b'{"id":1,"s":{"a":2},"at":"2024-01-01T00:00:00.000Z","d":1.25}\n\n{"id":2,"s":null}\n'
    lay(book, "in/a.json", lines)
    report = table.add_files(["in/a.json"])
    assert (report.rows, report.files) == (2, 1)
    (file,) = files_of(book, table)
    assert (file["file_type"], file["checksum"], file["has_statistics"]) == ("json", checksum(lines), False)
    assert ids(table, "id = 2") == [2]
    assert table.to_arrow("s.a = 2").to_pylist() == [
        {"id": 1, "s": {"a": 2}, "at": datetime(2024, 1, 1, tzinfo=UTC), "d": Decimal("1.25")}
    ]
    assert table.min_max("id") is None
    assert records(book, schema.partition_metadata) == []
    assert check_totals(book, table)[:2] == (2, 1)
    assert book.verify().ok


@in_memory
def test_json_files_that_are_none_are_refused(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT", format="json")
    for number, data in enumerate((b"not json\n", parquet(pa.table({"id": [1]})), b"[1, 2]\n", b'{"id": "x"}\n')):
        path = lay(book, f"in/{number}.json", data)
        with pytest.raises((InvalidFile, InsertFailed)):
            table.add_files([path])
    assert table.version == 0


@in_memory
def test_a_table_of_json_takes_no_arrow_rows(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT", format="json")
    with pytest.raises(InvalidTable):
        table.insert_arrow(pa.table({"id": [1]}))
    with pytest.raises(InvalidInput):
        table.appender()
    assert objects(book) == []


# --- very many files -----------------------------------------------------------


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inserts of more than two files are staged, two files at a time."""
    monkeypatch.setattr(table_files, "STAGED", 2)
    monkeypatch.setattr(table_files.chunks, "__defaults__", (2,))


@pytest.mark.usefixtures("small_chunks")
def test_an_insert_of_many_files_is_staged_and_one_version(book: Book) -> None:
    table = numbers(book, "t", partition_by=["id"])
    staged: list[int] = []

    def look() -> None:
        staged.append(len(records(book, schema.file_column_stats)))
        assert table.version == 0
        assert book.verify().ok

    with failpoints.armed("insert.chunk_staged", look):
        report = table.insert_arrow(pa.table({"id": list(range(5))}))
    assert (report.version, report.files) == (1, 5)
    # A column and a partition field each.
    assert staged == [4, 8, 10]
    assert ids(table) == list(range(5))
    assert [file["id"] for file in files_of(book, table)] == [1, 2, 3, 4, 5]
    assert [file.row_count for file in table.plan("id = 3")] == [1]
    check_recorded(book, table)
    table.insert_arrow(pa.table({"id": [9]}))
    assert [file["id"] for file in files_of(book, table)] == [1, 2, 3, 4, 5, 6]
    assert check_totals(book, table)[:2] == (6, 6)
    assert book.verify().ok


@pytest.mark.usefixtures("small_chunks")
def test_an_insert_of_many_files_that_fails_leaves_nothing_staged(book: Book) -> None:
    table = numbers(book, "t", partition_by=["id"])
    table.insert_arrow(pa.table({"id": [100]}))
    before = registry_state(book)

    def fail() -> None:
        raise OSError("the disk is gone")

    for point in ("insert.chunk_staged", "change.written"):
        with failpoints.armed(point, fail), pytest.raises(InsertFailed):
            table.insert_arrow(pa.table({"id": list(range(5))}))
        after = registry_state(book)
        for name in ("table_files", "file_column_stats", "partition_metadata", "table_versions", "table_stats"):
            assert after[name] == before[name]
        assert len(objects(book)) == 1
        assert book.verify().ok
    table.insert_arrow(pa.table({"id": list(range(5))}))
    assert ids(table) == [0, 1, 2, 3, 4, 100]
    # Ids that were reserved are not given again.
    assert [file["id"] for file in files_of(book, table)] == [1, 12, 13, 14, 15, 16]
    assert book.verify().ok


@pytest.mark.usefixtures("small_chunks")
def test_another_insert_may_be_faster_than_one_of_many_files(book: Book) -> None:
    table = numbers(book, "t")
    paths = [lay(book, f"in/{number}.parquet", rows_of(table, [{"id": number}])) for number in range(5)]
    busy = [True]

    def be_faster() -> None:
        if busy[0]:
            busy[0] = False
            insert(table, {"id": 100})

    with failpoints.armed("insert.chunk_staged", be_faster):
        assert table.add_files(paths).version == 2
    assert ids(table) == [0, 1, 2, 3, 4, 100]
    assert [file["file_path"] for file in files_of(book, table) if file["from_version"] == 2] == paths
    assert ids(table, "id = 100") == [100]
    assert ids(table, "id = 3") == [3]
    assert book.verify().ok


@pytest.mark.usefixtures("small_chunks")
def test_an_addition_of_many_files_that_fails_can_be_repeated(book: Book) -> None:
    table = numbers(book, "t")
    paths = [lay(book, f"in/{number}.parquet", rows_of(table, [{"id": number}])) for number in range(5)]

    def fail() -> None:
        raise OSError("the network is gone")

    def look_and_fail() -> None:
        assert book.verify().ok
        fail()

    for point, action in (("insert.chunk_staged", look_and_fail), ("change.written", fail)):
        with failpoints.armed(point, action), pytest.raises(InsertFailed, match="the network"):
            table.add_files(paths)
        assert objects(book) == paths
        assert records(book, schema.file_column_stats) == []
        assert records(book, schema.partition_metadata) == []
        assert book.verify().ok
    assert table.add_files(paths).rows == 5
    assert ids(table) == [0, 1, 2, 3, 4]
    assert book.verify().ok


@in_memory
def test_a_file_that_is_not_what_its_writer_said_is_refused(book: Book) -> None:
    table = numbers(book, "t")

    def swap() -> None:
        (path,) = objects(book)
        replace_bytes(book, path, lambda data: parquet(pa.table({"id": [1]})))

    # Between writing and measuring there is no failpoint; but after it, verifying finds the swap.
    with failpoints.armed("insert.arrow_written", swap):
        insert(table, {"id": 1}, {"id": 2})
    assert [finding.check for finding in book.verify().findings] == ["files", "footers"]
