"""Partition specs and sort orders are texts for people, and partition values survive as text."""

from __future__ import annotations

import math
import uuid
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    write_manifest,
)
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortDirection, SortField, SortOrder
from pyiceberg.typedef import Record
from pyiceberg.types import FixedType, IcebergType, NestedField

from lakebook.errors import InvalidPartitioning
from lakebook.iceberg.ddl import parse_type
from lakebook.iceberg.partitioning import (
    order_from_json,
    order_texts,
    order_to_json,
    partition_from_json,
    partition_path,
    partition_spec,
    partition_to_json,
    partition_values,
    sort_order,
    spec_from_json,
    spec_texts,
    spec_to_json,
)
from lakebook.iceberg.schemas import schema_from

SCHEMA = schema_from(
    """
    id BIGINT, ts TIMESTAMP, day DATE, name STRING, price DECIMAL(9, 2), raw BINARY, ratio DOUBLE,
    `a.b` STRING, place STRUCT<city: STRING, `zip.code`: INT, at: TIMESTAMP_NTZ>,
    tags ARRAY<STRING>, counts MAP<STRING, INT>, items ARRAY<STRUCT<n: INT>>
    """
)


@pytest.mark.parametrize(
    ("text", "name", "transform", "source"),
    [
        ("name", "name", "identity", "name"),
        ("identity(name)", "name", "identity", "name"),
        ("IDENTITY ( name )", "name", "identity", "name"),
        ("year(ts)", "ts_year", "year", "ts"),
        ("years(ts)", "ts_year", "year", "ts"),
        ("month(day)", "day_month", "month", "day"),
        ("months(day)", "day_month", "month", "day"),
        ("day(ts)", "ts_day", "day", "ts"),
        ("days(ts)", "ts_day", "day", "ts"),
        ("hour(ts)", "ts_hour", "hour", "ts"),
        (" hours( ts ) ", "ts_hour", "hour", "ts"),
        ("bucket(16, id)", "id_bucket", "bucket[16]", "id"),
        ("BUCKET(16,id)", "id_bucket", "bucket[16]", "id"),
        ("truncate(4, name)", "name_trunc", "truncate[4]", "name"),
        ("truncate(100, price)", "price_trunc", "truncate[100]", "price"),
        ("bucket(3, raw)", "raw_bucket", "bucket[3]", "raw"),
        ("a.b", "a.b", "identity", "a.b"),
        ("`a.b`", "a.b", "identity", "a.b"),
        ('bucket(2, "a.b")', "a.b_bucket", "bucket[2]", "a.b"),
        ("place.city", "place.city", "identity", "place.city"),
        ("day(place.at)", "place.at_day", "day", "place.at"),
        ("place.`zip.code`", "place.zip.code", "identity", "place.zip.code"),
    ],
)
def test_a_text_names_a_column_and_a_transform(text: str, name: str, transform: str, source: str) -> None:
    spec = partition_spec(SCHEMA, [text])
    (field,) = spec.fields
    assert (field.name, str(field.transform), field.field_id) == (name, transform, 1000)
    assert field.source_id == SCHEMA.find_field(source).field_id
    spec.check_compatible(SCHEMA)
    assert partition_spec(SCHEMA, spec_texts(spec, SCHEMA)) == spec


def test_several_fields_are_numbered_from_a_thousand() -> None:
    spec = partition_spec(SCHEMA, ["day(ts)", "bucket(16, id)", "name"])
    assert [(field.field_id, field.name) for field in spec.fields] == [
        (1000, "ts_day"),
        (1001, "id_bucket"),
        (1002, "name"),
    ]
    assert spec.spec_id == 0
    assert spec_texts(spec, SCHEMA) == ["day(ts)", "bucket(16, id)", "name"]
    assert spec_from_json(orjson.loads(orjson.dumps(spec_to_json(spec)))) == spec


def test_a_table_without_partitions_has_an_empty_spec() -> None:
    spec = partition_spec(SCHEMA, [])
    assert spec.is_unpartitioned()
    assert spec_from_json(spec_to_json(spec)) == spec
    assert partition_to_json(spec, SCHEMA, Record()) == "[]"
    assert partition_path(spec, SCHEMA, Record()) == ""


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["nothing"], "no column 'nothing'"),
        (["Name"], "no column 'Name'"),
        (["day(nothing)"], "no column 'nothing'"),
        (["week(ts)"], "no transform 'week'"),
        (["void(ts)"], "no transform 'void'"),
        (["day(name)"], "day does not fit the column 'name', which is 'string'"),
        (["hour(day)"], "hour does not fit"),
        (["bucket(4, ratio)"], "does not fit the column 'ratio', which is 'double'"),
        (["truncate(4, ts)"], "does not fit"),
        (["bucket(0, id)"], "cannot be read"),
        (["bucket(-1, id)"], "cannot be read"),
        (["bucket(2147483648, id)"], "cannot be read"),
        (["bucket(99999999999, id)"], "cannot be read"),
        (["bucket(1.5, id)"], "cannot be read"),
        (["bucket(id)"], "cannot be read"),
        (["bucket(id, 16)"], "cannot be read"),
        (["truncate(0, name)"], "cannot be read"),
        (["place"], "does not fit the column 'place'"),
        (["tags"], "does not fit the column 'tags'"),
        (["tags.element"], "in a list or map"),
        (["counts.key"], "in a list or map"),
        (["bucket(4, counts.value)"], "in a list or map"),
        (["items.element.n"], "in a list or map"),
        (["name", "name"], "adds nothing"),
        (["name", "identity(name)"], "adds nothing"),
        (["day(ts)", "hour(ts)"], "adds nothing to 'day"),
        (["year(ts)", "days(ts)"], "adds nothing"),
        (["bucket(4, id)", "bucket(4, id)"], "adds nothing"),
        ([""], "no column ''"),
        (["()"], "no column"),
        (["day()"], "no column ''"),
        (["day(ts"], "no column"),
        (["day(ts); DROP TABLE x"], "no column"),
        ([5], "Give a list of texts"),
        ("day(ts)", "Give a list of texts"),
        (None, "Give a list of texts"),
    ],
)
def test_a_partitioning_that_cannot_be_is_refused(texts: Any, reason: str) -> None:
    with pytest.raises(InvalidPartitioning, match=reason.replace("(", r"\(")):
        partition_spec(SCHEMA, texts)


def test_a_column_goes_before_a_transform_of_the_same_text() -> None:
    schema = schema_from("ts TIMESTAMP, `day(ts)` INT, `ts desc` INT, `identity(ts)` INT")
    spec = partition_spec(schema, ["day(ts)", "identity(ts)"])
    assert [field.source_id for field in spec.fields] == [2, 4]
    order = sort_order(schema, ["ts desc"])
    assert [field.source_id for field in order.fields] == [3]
    spec = partition_spec(schema, ["day(`ts`)"])
    assert [field.source_id for field in spec.fields] == [1]
    assert spec_texts(spec, schema) == ["day(`ts`)"]


def test_a_partition_field_is_not_called_like_a_column() -> None:
    schema = schema_from("ts TIMESTAMP, ts_day DATE, id INT, ID_bucket INT, id_bucket_16 INT, name STRING")
    texts = ["day(ts)", "ts_day", "bucket(16, id)", "bucket(8, id)", "bucket(4, name)", "bucket(5, name)"]
    spec = partition_spec(schema, texts)
    names = [field.name for field in spec.fields]
    assert names == ["ts_day_2", "ts_day", "id_bucket_2", "id_bucket_8", "name_bucket", "name_bucket_5"]
    assert spec_texts(spec, schema) == texts


def test_two_names_that_are_one_in_a_manifest_are_refused() -> None:
    schema = schema_from("`a.b` INT, `a_x2Eb` INT")
    with pytest.raises(InvalidPartitioning, match="in a manifest"):
        partition_spec(schema, ["a.b", "a_x2Eb"])


# --- sort orders ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ts", "ts asc nulls first"),
        ("ts asc", "ts asc nulls first"),
        ("ts desc", "ts desc nulls last"),
        ("name ASC NULLS LAST", "name asc nulls last"),
        ("  name\tDesc  nulls  first ", "name desc nulls first"),
        ("name nulls last", "name asc nulls last"),
        ("bucket(16, id) desc", "bucket(16, id) desc nulls last"),
        ("day(ts)", "day(ts) asc nulls first"),
        ("place.city desc", "place.city desc nulls last"),
        ("`a.b` desc", "a.b desc nulls last"),
    ],
)
def test_a_sort_order_says_the_direction_and_where_nulls_go(text: str, told: str) -> None:
    order = sort_order(SCHEMA, [text])
    assert order.order_id == 1
    assert order_texts(order, SCHEMA) == [told]
    assert sort_order(SCHEMA, [told]) == order
    assert order_from_json(orjson.loads(orjson.dumps(order_to_json(order)))) == order
    order.check_compatible(SCHEMA)


def test_no_order_is_icebergs_unsorted_order() -> None:
    assert sort_order(SCHEMA, []) == UNSORTED_SORT_ORDER
    assert order_from_json(order_to_json(UNSORTED_SORT_ORDER)) == UNSORTED_SORT_ORDER


@pytest.mark.parametrize(
    "texts",
    [
        ["nothing"], ["ts up"], ["desc"], ["ts desc nulls"], ["ts nulls first desc"], ["place"], ["tags"],
        ["tags.element"], ["ts", "ts desc"], ["day(name)"], [None], "ts", [""], ["ts desc; x"],
    ],
    ids=repr,
)  # fmt: skip
def test_a_sort_order_that_cannot_be_is_refused(texts: Any) -> None:
    with pytest.raises(InvalidPartitioning):
        sort_order(SCHEMA, texts)


def test_strange_names_can_be_told_and_read_again() -> None:
    names = ["a desc", "a", "b", "`b`", "bucket(4, b)", "x y", "a.b.c", "desc", "q`uote", '"dq"', "a asc nulls first"]
    schema = Schema(*(NestedField(number, name, parse_type("INT")) for number, name in enumerate(names, start=1)))
    spec = partition_spec(schema, names)
    assert [field.source_id for field in spec.fields] == list(range(1, len(names) + 1))
    assert partition_spec(schema, spec_texts(spec, schema)) == spec
    for order in (
        sort_order(schema, names),
        SortOrder(*(SortField(number, direction=SortDirection.DESC) for number in range(1, len(names) + 1))),
    ):
        assert sort_order(schema, order_texts(order, schema)) == order


@pytest.mark.parametrize(
    "value",
    [
        None, [], {}, {"fields": 5}, {"fields": [5]}, {"spec-id": 0, "fields": [{}]}, {"spec-id": True, "fields": []},
        {"spec-id": 0, "fields": [{"source-id": 1, "field-id": 1000, "name": "x", "transform": "week"}]},
        {"spec-id": 0, "fields": [{"source-id": 1, "field-id": 1000, "name": "x", "transform": "bucket[0]"}]},
        {"spec-id": 0, "fields": [{"source-id": 1, "field-id": 1000, "name": "x", "transform": "bucket[5]x"}]},
        {"spec-id": 0, "fields": [{"source-id": 1, "field-id": 1000, "name": "", "transform": "day"}]},
        {"spec-id": 0, "fields": [{"source-id": 1, "field-id": 7, "name": "x", "transform": "day"}]},
        {"order-id": 1, "fields": [{"source-id": 1, "transform": "day", "direction": 1, "null-order": "nulls-last"}]},
        {"order-id": 1, "fields": [{"source-id": 1, "transform": "day", "direction": "asc"}]},
    ],
    ids=repr,
)  # fmt: skip
def test_json_that_is_no_spec_and_no_order_is_refused(value: Any) -> None:
    with pytest.raises(InvalidPartitioning):
        spec_from_json(value)
    with pytest.raises(InvalidPartitioning):
        order_from_json(value)


# --- partition values ----------------------------------------------------------

SCALES = st.integers(-(10**9) + 1, 10**9 - 1).map(lambda digits: Decimal(digits).scaleb(-2))
INTS, LONGS = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
VALUES: dict[str, tuple[IcebergType, st.SearchStrategy[Any]]] = {
    "flag": (parse_type("BOOLEAN"), st.booleans()),
    "number": (parse_type("INT"), INTS),
    "long": (parse_type("BIGINT"), LONGS),
    "narrow": (parse_type("FLOAT"), st.floats(width=32)),
    "wide": (parse_type("DOUBLE"), st.floats()),
    "price": (parse_type("DECIMAL(9, 2)"), SCALES),
    "day": (parse_type("DATE"), INTS),
    "clock": (parse_type("TIME"), LONGS),
    "ts": (parse_type("TIMESTAMP"), LONGS),
    "local": (parse_type("TIMESTAMP_NTZ"), LONGS),
    "text": (parse_type("STRING"), st.text(max_size=20)),
    "key": (parse_type("UUID"), st.uuids()),
    "raw": (parse_type("BINARY"), st.binary(max_size=20)),
    "mac": (FixedType(6), st.binary(min_size=6, max_size=6)),
}
ALL = schema_from(Schema(*(NestedField(1, name, kind) for name, (kind, _) in VALUES.items())))
EVERY = partition_spec(ALL, list(VALUES))


@settings(max_examples=100, deadline=None)
@given(st.tuples(*(st.none() | values for _, values in VALUES.values())))
@example((None,) * len(VALUES))
@example(
    (True, -1, 2**63 - 1, math.nan, -math.inf, Decimal("-0.01"), 0, 0, -1, 1, "a/b=c", uuid.UUID(int=1), b"", b"\0" * 6)
)
@example((False, 0, 0, -0.0, math.inf, Decimal("0.00"), -1, 1, 1, 1, "\0\n", uuid.UUID(int=0), b"\xff", b"123456"))
def test_partition_values_survive_as_text(values: tuple[Any, ...]) -> None:
    text = partition_to_json(EVERY, ALL, Record(*values))
    again = partition_from_json(EVERY, ALL, text)
    assert [repr(again[number]) for number in range(len(again))] == [repr(value) for value in values]
    assert partition_to_json(EVERY, ALL, again) == text
    path = partition_path(EVERY, ALL, again)
    assert path.count("/") == len(VALUES) - 1
    assert path.isascii()
    assert path.isprintable()
    assert all(0 < len(part) <= 200 for part in path.split("/"))


def test_a_partition_has_one_text() -> None:
    schema = schema_from("d DATE, t TIMESTAMP, n TIMESTAMP_NTZ, c TIME, u UUID, p DECIMAL(9, 2), r DOUBLE")
    spec = partition_spec(schema, ["d", "t", "n", "c", "u", "p", "r"])
    key = uuid.UUID(int=7)
    objects = Record(
        date(1970, 1, 2),
        datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        datetime(1970, 1, 1, 0, 0, 2),  # noqa: DTZ001
        time(0, 0, 3),
        key.bytes,
        Decimal("-0"),
        3,
    )
    numbers = Record(1, 1_000_000, 2_000_000, 3_000_000, key, Decimal("0.00"), 3.0)
    text = partition_to_json(spec, schema, objects)
    assert text == partition_to_json(spec, schema, numbers)
    assert partition_from_json(spec, schema, text) == numbers
    assert partition_values(spec, schema, objects) == [1, 1_000_000, 2_000_000, 3_000_000, str(key), "0.00", 3.0]


def test_a_manifest_takes_the_values_and_gives_back_the_same(tmp_path: Path) -> None:
    names = [name for name in VALUES if name != "narrow"]
    spec = partition_spec(ALL, names)
    text = orjson.dumps(
        [True, -5, 2**40, "-Infinity", "-12.34", 19727, 1, -1, 2, "ä/\0", str(uuid.UUID(int=9)), "00ff", "010203040506"]
    ).decode()
    output = PyArrowFileIO().new_output(str(tmp_path / "manifest.avro"))
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path="a.parquet",
        file_format=FileFormat.PARQUET,
        partition=partition_from_json(spec, ALL, text),
        record_count=1,
        file_size_in_bytes=1,
    )
    with write_manifest(2, spec, ALL, output, 1, "null") as writer:
        writer.add_entry(ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, snapshot_id=1, data_file=file))
    (entry,) = writer.to_manifest_file().fetch_manifest_entry(PyArrowFileIO())
    assert partition_to_json(spec, ALL, entry.data_file.partition) == text


def test_the_path_is_for_people() -> None:
    spec = partition_spec(SCHEMA, ["day(ts)", "bucket(16, id)", "name", "a.b", "raw", "hour(place.at)"])
    record = Record(19727, 3, "a/b c=ü", None, b"\x01\x02", 473_448)
    assert partition_path(spec, SCHEMA, record) == (
        "ts_day=2024-01-05/id_bucket=3/name=a%2Fb+c%3D%C3%BC/a.b=null/raw=AQI%3D/place.at_hour=2024-01-05-00"
    )
    assert partition_path(spec, SCHEMA, record) == spec.partition_to_path(record, SCHEMA)


def test_a_day_beyond_the_calendar_has_a_path_too() -> None:
    spec = partition_spec(SCHEMA, ["day(ts)", "day"])
    assert partition_path(spec, SCHEMA, Record(2**31 - 1, -(2**31))) == "ts_day=2147483647/day=-2147483648"


def test_long_values_have_short_paths_that_differ() -> None:
    spec = partition_spec(SCHEMA, ["name"])
    paths = [partition_path(spec, SCHEMA, Record("ü" * 300 + end)) for end in ("", "x", "y")]
    assert len(set(paths)) == 3
    assert all(len(path) <= 200 and path.startswith("name=%C3%BC%C3%BC") for path in paths)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("flag", 1), ("number", 2**31), ("number", True), ("number", "5"), ("number", 1.0), ("long", 2**63),
        ("long", -(2**63) - 1), ("wide", "1"), ("wide", True), ("wide", 10**400), ("price", Decimal("0.001")),
        ("price", Decimal("10000000.00")), ("price", Decimal("NaN")), ("price", Decimal("sNaN")), ("price", 5),
        ("price", Decimal("inf")), ("day", datetime(2024, 1, 1, tzinfo=UTC)), ("day", 2**31), ("clock", "x"),
        ("ts", date(2024, 1, 1)), ("text", 5), ("text", "\ud800"), ("text", b"x"), ("key", "x"), ("key", b"x"),
        ("raw", "x"), ("mac", b"12345"),
    ],
    ids=repr,
)  # fmt: skip
def test_values_of_another_type_are_refused(column: str, value: Any) -> None:
    spec = partition_spec(ALL, [column])
    with pytest.raises(InvalidPartitioning, match="is not"):
        partition_to_json(spec, ALL, Record(value))
    with pytest.raises(InvalidPartitioning, match="has not 1 values"):
        partition_to_json(spec, ALL, Record(None, None))


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("flag", "[1]"), ("number", "[1.0]"), ("number", '["1"]'), ("number", "[true]"), ("number", "[2147483648]"),
        ("wide", '["nan"]'), ("wide", '["1"]'), ("price", "[1]"), ("price", '["x"]'), ("price", '["0.001"]'),
        ("price", '["NaN"]'), ("text", "[1]"), ("key", '["x"]'), ("raw", '["0"]'), ("raw", '["zz"]'), ("mac", '["00"]'),
        ("day", '["2024-01-05"]'), ("text", "[]"), ("text", "[null, null]"), ("text", "null"), ("text", ""),
        ("text", '{"a": 1}'), ("text", "[[]]"), ("text", "\ud800"), ("text", "[" * 100_000),
    ],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_a_text_that_is_no_partition_is_refused(column: str, text: str) -> None:
    with pytest.raises(InvalidPartitioning):
        partition_from_json(partition_spec(ALL, [column]), ALL, text)


def test_a_schema_without_the_column_cannot_tell_the_values() -> None:
    spec = partition_spec(SCHEMA, ["name", "day(ts)"])
    other = schema_from("id BIGINT")
    with pytest.raises(InvalidPartitioning, match="has not all columns"):
        partition_to_json(spec, other, Record("x", 1))
    assert spec_texts(spec, other) == ["identity(#4)", "day(#2)"]
