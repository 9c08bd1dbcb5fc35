"""A table's schema comes from anything that describes columns, and is the same whatever it came from."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.types import (
    BinaryType,
    DecimalType,
    FixedType,
    FloatType,
    GeometryType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampNanoType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UnknownType,
)
from pyspark.sql import types as spark

from lakebook.errors import IncompatibleSchema, InvalidSchema
from lakebook.iceberg.ddl import parse_type
from lakebook.iceberg.schemas import (
    LeafField,
    arrow_schema,
    check_writable_from,
    describe_type,
    find_column,
    last_field_id,
    leaf_fields,
    schema_from,
    schema_from_json,
    schema_to_json,
    split_path,
)

DDL = """
    id BIGINT NOT NULL COMMENT 'the key',
    small TINYINT, short SMALLINT, number INT, price DECIMAL(10, 2), ratio FLOAT, exact DOUBLE, good BOOLEAN,
    day DATE, at TIMESTAMP, local TIMESTAMP_NTZ, name STRING, code VARCHAR(3), mark CHAR(1), raw BINARY,
    tags ARRAY<STRING>,
    counts MAP<STRING, INT>,
    `place of birth` STRUCT<city: STRING NOT NULL COMMENT 'town', at: ARRAY<STRUCT<x: DOUBLE, y: DOUBLE>>>
"""

SPARK = spark.StructType(
    [
        spark.StructField("id", spark.LongType(), False, {"comment": "the key"}),
        spark.StructField("small", spark.ByteType()),
        spark.StructField("short", spark.ShortType()),
        spark.StructField("number", spark.IntegerType()),
        spark.StructField("price", spark.DecimalType(10, 2)),
        spark.StructField("ratio", spark.FloatType()),
        spark.StructField("exact", spark.DoubleType()),
        spark.StructField("good", spark.BooleanType()),
        spark.StructField("day", spark.DateType()),
        spark.StructField("at", spark.TimestampType()),
        spark.StructField("local", spark.TimestampNTZType()),
        spark.StructField("name", spark.StringType()),
        spark.StructField("code", spark.VarcharType(3)),
        spark.StructField("mark", spark.CharType(1)),
        spark.StructField("raw", spark.BinaryType()),
        spark.StructField("tags", spark.ArrayType(spark.StringType())),
        spark.StructField("counts", spark.MapType(spark.StringType(), spark.IntegerType())),
        spark.StructField(
            "place of birth",
            spark.StructType(
                [
                    spark.StructField("city", spark.StringType(), False, {"comment": "town"}),
                    spark.StructField(
                        "at",
                        spark.ArrayType(
                            spark.StructType(
                                [spark.StructField("x", spark.DoubleType()), spark.StructField("y", spark.DoubleType())]
                            )
                        ),
                    ),
                ]
            ),
        ),
    ]
)

ARROW = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"doc": "the key"}),
        pa.field("small", pa.int8()),
        pa.field("short", pa.uint16()),
        pa.field("number", pa.int32()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("ratio", pa.float32()),
        pa.field("exact", pa.float64()),
        pa.field("good", pa.bool_()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("ms", "Europe/Berlin")),
        pa.field("local", pa.timestamp("us")),
        pa.field("name", pa.large_string()),
        pa.field("code", pa.dictionary(pa.int16(), pa.string())),
        pa.field("mark", pa.string_view()),
        pa.field("raw", pa.large_binary()),
        pa.field("tags", pa.large_list(pa.string())),
        pa.field("counts", pa.map_(pa.string(), pa.int32())),
        pa.field(
            "place of birth",
            pa.struct(
                [
                    pa.field("city", pa.string(), nullable=False, metadata={"doc": "town"}),
                    pa.field("at", pa.list_(pa.struct([("x", pa.float64()), ("y", pa.float64())]), 2)),
                ]
            ),
        ),
    ]
)


class Frame:
    """What a DataFrame looks like: a schema, and an attribute for every column."""

    def __init__(self, schema: object) -> None:
        self._schema = schema

    @property
    def schema(self) -> object:
        return self._schema

    def __getattr__(self, name: str) -> object:
        return lambda: {"type": "nonsense"}


SOURCES: dict[str, Callable[[], object]] = {
    "ddl": lambda: DDL,
    "spark": lambda: SPARK,
    "arrow": lambda: ARROW,
    "frame": lambda: Frame(SPARK),
    "arrow_table": lambda: ARROW.empty_table(),
    "pyiceberg": lambda: schema_from(DDL),
    "json": lambda: schema_to_json(schema_from(DDL)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_schema(source: str) -> None:
    schema = schema_from(SOURCES[source]())
    assert schema == schema_from(DDL)
    assert schema.schema_id == 1
    assert schema.find_field("id").required
    assert schema.find_field("id").doc == "the key"
    assert schema.find_field("place of birth.city").doc == "town"
    assert str(schema.find_type("price")) == "decimal(10, 2)"
    assert schema.find_type("at") == TimestamptzType()
    assert schema.find_type("local") == TimestampType()
    assert schema.find_type("small") == schema.find_type("short") == IntegerType()


def test_fields_are_numbered_as_iceberg_numbers_them() -> None:
    schema = schema_from("a STRUCT<x: INT, y: ARRAY<INT>>, b MAP<STRING, STRUCT<z: INT>>, c INT")
    assert schema == assign_fresh_schema_ids(schema)
    ids = {".".join(leaf.path): leaf.field_id for leaf in leaf_fields(schema)}
    assert ids == {"a.x": 4, "a.y.element": 6, "b.key": 7, "b.value.z": 9, "c": 3}
    assert last_field_id(schema) == 9


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_nesting_is_numbered_as_iceberg_numbers_it_and_survives_json(data: st.DataObject) -> None:
    kinds: st.SearchStrategy[IcebergType] = st.recursive(
        st.sampled_from([IntegerType(), StringType(), DecimalType(9, 4), FixedType(3)]),
        lambda inner: st.one_of(
            st.builds(lambda kind, required: ListType(-1, kind, element_required=required), inner, st.booleans()),
            st.builds(lambda key, value: MapType(-1, key, -1, value, value_required=False), inner, inner),
            st.lists(inner, min_size=1, max_size=3).map(
                lambda found: StructType(*(NestedField(-1, f"f{n}", kind) for n, kind in enumerate(found)))
            ),
        ),
        max_leaves=8,
    )
    found = data.draw(st.lists(kinds, min_size=1, max_size=4))
    plain = Schema(*(NestedField(-1, f"c.{n}", kind, required=n == 0) for n, kind in enumerate(found)))
    schema = schema_from(plain)
    assert schema == assign_fresh_schema_ids(plain)
    again = schema_from_json(schema_to_json(schema))
    assert (again, again.schema_id) == (schema, 1)
    assert schema_from(arrow_schema(schema)) == schema


def test_the_columns_that_identify_a_row_keep_doing_so() -> None:
    schema = Schema(
        NestedField(7, "a", StringType()),
        NestedField(5, "b", LongType(), required=True),
        identifier_field_ids=[5],
        schema_id=9,
    )
    found = schema_from(schema)
    assert (found.schema_id, found.identifier_field_ids, found.find_field("b").field_id) == (1, [2], 2)
    kept = schema_from(schema_to_json(schema))
    assert (kept.schema_id, kept.identifier_field_ids, kept) == (9, [5], schema)


# --- what is refused -----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "line 1, character 1"),
        ("   ", "line 1, character 4"),
        ("a", "line 1, character 2"),
        ("a INT,", "line 1, character 7"),
        ("a INT,\n  b NONSENSE", "line 2, character 5"),
        ("a INT b INT", "line 1, character 7"),
        ("a INT); DROP TABLE users; --", "line 1, character 6"),
        ("a INT; b INT", "line 1, character 6"),
        ("a INT) USING iceberg --", "line 1, character 6"),
        ("SHOW TABLES", "line 1, character 6"),
        ("a INT DEFAULT 5", "line 1, character 7"),
        ("a INT PRIMARY KEY", "line 1, character 7"),
        ("a INT GENERATED ALWAYS AS (1)", "line 1, character 7"),
        ("a INTERVAL DAY TO SECOND", "line 1, character 3"),
        ("a VARIANT", "line 1, character 3"),
        ("a VOID", "line 1, character 3"),
        ("a INT UNSIGNED", "line 1, character 7"),
        ("a INT[]", "line 1, character 6"),
        ("a ARRAY", "line 1, character 8"),
        ("a MAP<INT>", "line 1, character 10"),
        ("a STRUCT<>", "line 1, character 9"),
        ("a ARRAY<INT", "line 1, character 12"),
        ("a DECIMAL(39, 2)", "line 1, character 10"),
        ("a DECIMAL(5, 6)", "line 1, character 10"),
        ("a DECIMAL(5, 2, 1)", "line 1, character 15"),
        ("a DECIMAL(x)", "line 1, character 11"),
        ("a DECIMAL(1.5)", "line 1, character 11"),
        ("a TIMESTAMP(3)", "line 1, character 12"),
        ("a INT COMMENT x", "line 1, character 15"),
        ("a INT COMMENT 'x' COMMENT 'y'", "line 1, character 19"),
        ("a INT NOT NULL NOT NULL", "line 1, character 16"),
        ("12 INT", "line 1, character 1"),
        ("a.b INT", "line 1, character 2"),
        ("'a' INT", "line 1, character 1"),
        ("LIKE other", "line 1, character 6"),
        ("a INT /* no end", "not closed"),
        ("`a INT", "not closed"),
    ],
)
def test_a_text_that_describes_no_columns_is_refused_with_the_place(text: str, place: str) -> None:
    with pytest.raises(InvalidSchema, match=place) as caught:
        schema_from(text)
    assert "\n" not in str(caught.value)


def test_the_refused_type_and_its_column_are_named() -> None:
    with pytest.raises(InvalidSchema, match="the type of 'b', found 'VOID'"):
        schema_from("a INT, b VOID")


WORDS = [
    "a", "`b c`", "INT", "ARRAY", "MAP", "STRUCT", "<", ">", "<>", ">>", ",", ":", "(", ")", "5", "1L", "NOT", "NULL",
    "COMMENT", "'x'", '"y"', ";", "DECIMAL", "--", "/*", "*/", "{{", "}}", "\n", "SELECT", "SHOW", "\\", "\0", "$", "@",
    "`", "'", "e'", "0x1F", "1e5", "{%", "=>", "::", "é", "名",
]  # fmt: skip


class Heard(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join) | st.text(max_size=30))
def test_garbage_is_refused_quietly_or_read(text: str) -> None:
    heard, told = Heard(), ""
    logging.getLogger("sqlglot").addHandler(heard)
    try:
        schema = schema_from(text)
        assert schema_from_json(schema_to_json(schema)) == schema
    except InvalidSchema as error:
        told = str(error)
    finally:
        logging.getLogger("sqlglot").removeHandler(heard)
    assert "\n" not in told
    assert heard.records == []


def test_words_of_sql_are_names_like_any_other() -> None:
    names = "select order group period unique primary check like comment not map array date 1a größe"
    assert schema_from(names.replace(" ", " INT, ") + " INT").column_names == names.split()


def test_a_type_alone_can_be_read() -> None:
    assert describe_type(parse_type("STRUCT<a: INT, b ARRAY<STRING>>")) == "struct<a: int, b: list<string>>"
    assert describe_type(parse_type("map<string, decimal(5)>")) == "map<string, decimal(5, 0)>"
    with pytest.raises(InvalidSchema, match="expected a type"):
        parse_type("a INT")
    with pytest.raises(InvalidSchema, match="expected a comma or the end"):
        parse_type("INT NOT NULL")


@pytest.mark.parametrize(
    "kind",
    [
        pa.uint64(), pa.null(), pa.duration("s"), pa.month_day_nano_interval(), pa.timestamp("ns"),
        pa.timestamp("ns", "UTC"), pa.time64("ns"), pa.date64(), pa.decimal256(50, 2), pa.decimal128(5, -2),
        pa.binary(0), pa.dense_union([pa.field("a", pa.int32())]), pa.run_end_encoded(pa.int32(), pa.string()),
        pa.json_(), pa.bool8(), pa.struct([]), pa.dictionary(pa.int8(), pa.uint64()),
    ],
    ids=str,
)  # fmt: skip
def test_arrow_types_that_would_lose_something_are_refused(kind: pa.DataType) -> None:
    for where, schema in {
        "'x'": pa.schema([("x", kind)]),
        r"'s\.x": pa.schema([("s", pa.struct([("x", kind)]))]),
        r"'l\.element": pa.schema([("l", pa.list_(kind))]),
        r"'m\.value": pa.schema([("m", pa.map_(pa.string(), kind))]),
    }.items():
        with pytest.raises(InvalidSchema, match=f"column {where}"):
            schema_from(schema)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.uint32(), "long"),
        (pa.float16(), "float"),
        (pa.decimal32(5, 2), "decimal(5, 2)"),
        (pa.decimal256(38, 3), "decimal(38, 3)"),
        (pa.time32("ms"), "time"),
        (pa.timestamp("s"), "timestamp"),
        (pa.timestamp("us", "+02:00"), "timestamptz"),
        (pa.uuid(), "uuid"),
        (pa.binary(4), "fixed[4]"),
        (pa.binary_view(), "binary"),
        (pa.list_view(pa.int8()), "list<int>"),
        (pa.large_list_view(pa.int8()), "list<int>"),
    ],
    ids=str,
)
def test_arrow_types_that_fit_are_taken(kind: pa.DataType, expected: str) -> None:
    assert describe_type(schema_from(pa.schema([("x", kind)])).find_type("x")) == expected


@pytest.mark.parametrize(
    "kind",
    [
        spark.NullType(), spark.VariantType(), spark.CalendarIntervalType(), spark.DayTimeIntervalType(),
        spark.YearMonthIntervalType(), spark.GeometryType(4326), spark.StructType([]),
    ],
    ids=str,
)  # fmt: skip
def test_spark_types_without_a_counterpart_are_refused(kind: spark.DataType) -> None:
    for where, field in {
        "'x'": spark.StructField("x", kind),
        r"'x\.element'": spark.StructField("x", spark.ArrayType(kind)),
        r"'x\.value'": spark.StructField("x", spark.MapType(spark.StringType(), kind)),
    }.items():
        with pytest.raises(InvalidSchema, match=f"column {where}"):
            schema_from(spark.StructType([field]))


def test_spark_says_what_cannot_be_null() -> None:
    kind = spark.MapType(spark.StringType(), spark.ArrayType(spark.TimeType(3), containsNull=False), False)
    found = schema_from(spark.StructType([spark.StructField("m", kind, False)]))
    times = ListType(4, TimeType(), element_required=True)
    counted = MapType(2, StringType(), 3, times, value_required=True)
    assert found == Schema(NestedField(1, "m", counted, required=True))


@pytest.mark.parametrize(
    "kind", [TimestampNanoType(), UnknownType(), GeometryType(), FixedType(0), DecimalType(4, 5)], ids=repr
)
def test_types_that_format_version_two_does_not_have_are_refused(kind: IcebergType) -> None:
    with pytest.raises(InvalidSchema, match="column 'x'"):
        schema_from(Schema(NestedField(1, "x", kind)))


def test_a_default_is_refused_and_not_forgotten() -> None:
    with pytest.raises(InvalidSchema, match="default"):
        schema_from(Schema(NestedField(1, "x", IntegerType(), initial_default=5)))


@pytest.mark.parametrize("name", ["", "a\0b", "a\ud800", "x" * 1001], ids=ascii)
def test_names_that_not_every_reader_could_hold_are_refused(name: str) -> None:
    bad = NestedField(2, name, LongType())
    for field in (bad, NestedField(1, "s", StructType(bad))):
        with pytest.raises(InvalidSchema, match="cannot be the name of a column"):
            schema_from(Schema(field))
    if name.isascii():
        with pytest.raises(InvalidSchema, match="cannot be the name of a column"):
            schema_from(pa.schema([(name, pa.int8())]))
    with pytest.raises(InvalidSchema, match="cannot be the name of a column"):
        schema_from({"type": "struct", "fields": [{"id": 1, "name": name, "type": "int", "required": False}]})


def test_any_other_name_is_a_name() -> None:
    names = [
        "a.b",
        "a b",
        "A",
        "it's",
        'say "x"',
        "`",
        "名前",
        "x" * 1000,
        "\n",
        "a..b",
        ".",
        " ",
        "ß",
        "ss",
        "%",
        "\x7f",
    ]
    schema = schema_from(pa.schema([(name, pa.int32()) for name in names]))
    assert [field.name for field in schema.fields] == names
    assert schema_from_json(schema_to_json(schema)) == schema
    assert schema_from("`a b` INT, `x``y` INT").column_names == ["a b", "x`y"]


@pytest.mark.parametrize(
    ("one", "other"), [("a", "a"), ("a", "A"), ("Straße", "STRAßE"), ("ſ", "S"), ("ı", "I"), ("İ", "i"), ("Å", "å")]
)
def test_names_that_spark_cannot_tell_apart_are_refused(one: str, other: str) -> None:
    pair = [pa.field(one, pa.int32()), pa.field(other, pa.int32())]
    for schema in (pa.schema(pair), pa.schema([("s", pa.list_(pa.struct(pair)))])):
        with pytest.raises(InvalidSchema, match="already"):
            schema_from(schema)


def test_the_same_name_in_two_structs_is_no_clash() -> None:
    assert len(leaf_fields(schema_from("a STRUCT<x: INT>, b STRUCT<X: INT>, x INT"))) == 3


def test_a_dotted_name_cannot_be_the_path_of_another_field() -> None:
    for text in ("`a.b` INT, a STRUCT<b: INT>", "`a.element` INT, a ARRAY<INT>"):
        with pytest.raises(InvalidSchema, match="called the same"):
            schema_from(text)


@pytest.mark.parametrize("source", [pa.schema([]), Schema(), spark.StructType([]), {"type": "struct", "fields": []}])
def test_a_schema_without_columns_is_refused(source: object) -> None:
    with pytest.raises(InvalidSchema, match="no columns"):
        schema_from(source)


def deep(levels: int) -> dict[str, object]:
    """A column of so many levels, each in every source's form."""
    arrow: pa.DataType = pa.int32()
    iceberg: IcebergType = IntegerType()
    in_spark: spark.DataType = spark.IntegerType()
    json: Any = "int"
    for level in range(levels - 1):
        arrow = pa.struct([("f", arrow)])
        iceberg = StructType(NestedField(1, "f", iceberg))
        in_spark = spark.StructType([spark.StructField("f", in_spark)])
        json = {"type": "struct", "fields": [{"id": level + 2, "name": "f", "type": json, "required": False}]}
    return {
        "arrow": pa.schema([("c", arrow)]),
        "iceberg": Schema(NestedField(1, "c", iceberg)),
        "spark": spark.StructType([spark.StructField("c", in_spark)]),
        "json": {"type": "struct", "fields": [{"id": 1, "name": "c", "type": json, "required": False}]},
        "ddl": "c " + "STRUCT<f: " * (levels - 1) + "INT" + ">" * (levels - 1),
    }


@pytest.mark.parametrize("source", ["arrow", "iceberg", "spark", "json", "ddl"])
def test_a_hundred_levels_are_taken_and_no_more(source: str) -> None:
    schema = schema_from(deep(100)[source])
    assert schema_from_json(schema_to_json(schema)) == schema
    assert len(leaf_fields(schema)[0].path) == 100
    assert pa.types.is_struct(arrow_schema(schema).field("c").type)
    assert len(describe_type(schema.find_type("c"))) > 800
    check_writable_from(schema, schema)
    with pytest.raises(InvalidSchema, match="100 levels"):
        schema_from(deep(101)[source])


def test_absurd_nesting_is_refused_and_not_a_crash() -> None:
    nested: Any = "int"
    for number in range(20_000):
        nested = {"type": "list", "element-id": number, "element": nested, "element-required": False}
    sources = [
        {"type": "struct", "fields": [{"id": 1, "name": "c", "type": nested, "required": False}]},
        "c " + "ARRAY<" * 20_000 + "INT" + ">" * 20_000,
        "c " + "(" * 20_000,
    ]
    for source in sources:
        with pytest.raises(InvalidSchema):
            schema_from(source)
    while isinstance(nested, dict):  # Taken apart by hand: freeing it at once would recurse.
        nested = nested.pop("element")


def test_ten_thousand_fields_are_taken_and_no_more() -> None:
    fields = [(f"c{number}", pa.int32()) for number in range(9_998)]
    assert last_field_id(schema_from(pa.schema([*fields, ("l", pa.list_(pa.int32()))]))) == 10_000
    with pytest.raises(InvalidSchema, match="more than 10000"):
        schema_from(pa.schema([*fields, ("m", pa.map_(pa.string(), pa.int32()))]))


@pytest.mark.parametrize(
    "source",
    [None, 7, b"a INT", ["a INT"], object(), spark.IntegerType(), Frame(7), int],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_schema_is_refused(source: object) -> None:
    with pytest.raises(InvalidSchema, match="is not a schema"):
        schema_from(source)


FIELD: dict[str, Any] = {"id": 1, "name": "a", "type": "int", "required": False}


@pytest.mark.parametrize(
    "value",
    [
        {}, {"type": "list", "fields": [FIELD]}, {"fields": "x"}, {"fields": [7]}, {"fields": [FIELD, FIELD]},
        {"fields": [FIELD], "schema-id": "1"}, {"fields": [FIELD], "schema-id": True},
        {"fields": [FIELD], "schema-id": -1}, {"fields": [FIELD], "identifier-field-ids": "1"},
        {"fields": [FIELD], "identifier-field-ids": [1]}, {"fields": [FIELD], "identifier-field-ids": [2]},
        {"fields": [FIELD, {**FIELD, "name": "b"}]},
    ],
    ids=repr,
)  # fmt: skip
def test_json_that_is_no_schema_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchema):
        schema_from_json(value)


@pytest.mark.parametrize(
    "change",
    [
        {"id": 0}, {"id": True}, {"id": 2**31 - 1}, {"id": "1"}, {"id": None}, {"name": 5}, {"required": "no"},
        {"doc": 5}, {"doc": "\0"}, {"doc": "x" * 5000}, {"write-default": 5}, {"initial-default": 5}, {"type": None},
        {"type": "integer"}, {"type": "decimal(5,2)x"}, {"type": "decimal(99, 2)"}, {"type": "fixed[0]"},
        {"type": "timestamp_ns"}, {"type": "unknown"}, {"type": {"type": "list", "element": "int"}},
        {"type": {"type": "struct", "fields": []}}, {"type": {"type": []}}, {"type": {"type": "map", "key": "int"}},
    ],
    ids=lambda change: ascii(change)[:40],
)  # fmt: skip
def test_json_that_is_no_field_is_refused(change: dict[str, Any]) -> None:
    assert schema_from_json({"fields": [FIELD]}).schema_id == 0
    with pytest.raises(InvalidSchema):
        schema_from_json({"fields": [{**FIELD, **change}]})


# --- what a schema becomes -----------------------------------------------------


def test_parquet_files_have_the_ids_at_every_depth() -> None:
    schema = schema_from("a STRUCT<x: UUID, y: ARRAY<STRING>> NOT NULL, b MAP<STRING, STRUCT<z: TIMESTAMP>>, c TIME")
    arrow = arrow_schema(schema)
    target = io.BytesIO()
    pq.ParquetWriter(target, arrow).close()
    written = str(pq.ParquetFile(target).schema)
    for field_id in range(1, last_field_id(schema) + 1):
        assert f"field_id={field_id} " in written
    assert "field_id=4 x (UUID)" in written
    assert arrow.field("a").type.field("y").type == pa.list_(pa.field("element", pa.string()))
    assert arrow.field("b").type.item_type.field("z").type == pa.timestamp("us", "UTC")
    assert not arrow.field("a").nullable
    assert schema_from(arrow) == schema


def test_leaves_know_their_path_and_whether_a_collection_holds_them() -> None:
    schema = schema_from("`a.b` STRUCT<x: INT NOT NULL, l: ARRAY<STRUCT<y: DATE>>>, m MAP<STRING, DECIMAL(5, 2)>")
    assert leaf_fields(schema) == [
        LeafField(3, ("a.b", "x"), "int", in_collection=False, required=True),
        LeafField(6, ("a.b", "l", "element", "y"), "date", in_collection=True, required=False),
        LeafField(7, ("m", "key"), "string", in_collection=True, required=True),
        LeafField(8, ("m", "value"), "decimal(5, 2)", in_collection=True, required=False),
    ]


def test_columns_are_found_by_name_by_path_and_in_quotes() -> None:
    fields = schema_from('`a.b` STRUCT<`c.d`: INT>, a STRUCT<e: ARRAY<STRUCT<x: INT>>>, `it``s "so"` INT').fields
    assert find_column(fields, "a.b") == ("a.b",)
    assert find_column(fields, "a.b.c.d") == find_column(fields, "`a.b`.`c.d`") == ("a.b", "c.d")
    assert find_column(fields, "a.e.element.x") == find_column(fields, ["a", "e", "element", "x"])
    assert find_column(fields, '"a"."e"') == ("a", "e")
    for text in ('it`s "so"', '`it``s "so"`', '"it`s ""so"""'):
        assert find_column(fields, text) == ('it`s "so"',)
    for unknown in ("A", "a.x", "a.e.x", "", ".", "`a", "a.`b`c", (), ("a", 5), None, 7):
        assert find_column(fields, unknown) is None
    assert split_path("a.`b``.c`.d") == ("a", "b`.c", "d")
    assert split_path("a.") is split_path("a..b") is None


# --- fitting together ----------------------------------------------------------

TABLE = """
    id BIGINT NOT NULL, ratio DOUBLE, price DECIMAL(12, 2), name STRING,
    place STRUCT<city: STRING NOT NULL, zip: BIGINT>, items ARRAY<STRUCT<n: BIGINT>>, counts MAP<STRING, BIGINT>
"""


@pytest.mark.parametrize(
    "incoming",
    [
        TABLE,
        "id INT",
        "name STRING, id BIGINT",
        "id BIGINT, ratio FLOAT, price DECIMAL(9, 2)",
        "id BIGINT, place STRUCT<zip: INT, city: STRING>, items ARRAY<STRUCT<n: INT>>, counts MAP<STRING, INT>",
        "id BIGINT, place STRUCT<city: STRING>",
    ],
)
def test_a_frame_that_fits_may_be_inserted(incoming: str) -> None:
    check_writable_from(schema_from(TABLE), schema_from(incoming))


@pytest.mark.parametrize(
    ("incoming", "reason"),
    [
        ("name STRING", "the required column 'id' is missing"),
        ("id BIGINT, other INT", "the table has no column 'other'"),
        ("id BIGINT, Name STRING", "the table has no column 'Name'"),
        ("id STRING", "the column 'id' is 'long' in the table and cannot take 'string'"),
        ("id BIGINT, name BINARY", "cannot take 'binary'"),
        ("id BIGINT, price DECIMAL(12, 3)", r"cannot take 'decimal\(12, 3\)'"),
        ("id BIGINT, price DECIMAL(13, 2)", r"cannot take 'decimal\(13, 2\)'"),
        ("id BIGINT, price BIGINT", "cannot take 'long'"),
        ("id BIGINT, place STRUCT<zip: INT>", r"the required column 'place\.city' is missing"),
        ("id BIGINT, place STRUCT<city: STRING, street: INT>", r"no column 'place\.street'"),
        ("id BIGINT, place STRING", "cannot take 'string'"),
        ("id BIGINT, items ARRAY<STRUCT<n: STRING>>", r"'items\.element\.n'"),
        ("id BIGINT, counts MAP<INT, INT>", r"'counts\.key'"),
        ("id BIGINT, counts MAP<STRING, DOUBLE>", r"'counts\.value'"),
        (", ".join(f"c{number} INT" for number in range(9)), "; and 5 more"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused_with_the_reason(incoming: str, reason: str) -> None:
    with pytest.raises(IncompatibleSchema, match=reason):
        check_writable_from(schema_from(TABLE), schema_from(incoming))


def test_a_narrower_table_takes_no_wider_frame() -> None:
    wide = {LongType(): "id INT", FloatType(): "id INT", BinaryType(): "id STRING"}
    for kind, table in wide.items():
        with pytest.raises(IncompatibleSchema):
            check_writable_from(schema_from(table), schema_from(Schema(NestedField(1, "id", kind))))
