"""Conditions as people write them, bound to a schema; and the tree they become."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import reduce
from typing import Any
from uuid import UUID

import pyiceberg.expressions
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.expressions.literals import DateLiteral, LongAboveMax, TimestampLiteral
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import parse_transform
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
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
    UUIDType,
)

from lakebook.errors import InvalidPredicate
from lakebook.iceberg.bounds import ColumnBounds, encode
from lakebook.iceberg.predicates import parse_where, partition_tests
from lakebook.iceberg.pruning import may_match
from lakebook.predicates import (
    INVERSE,
    MAX_DEPTH,
    Always,
    And,
    Not,
    Op,
    Or,
    Predicate,
    Test,
    all_of,
    any_of,
    fields_of,
    pushed_down,
)

SCHEMA = Schema(
    NestedField(1, "i", IntegerType()),
    NestedField(2, "l", LongType()),
    NestedField(3, "f", FloatType()),
    NestedField(4, "d", DoubleType()),
    NestedField(5, "dec", DecimalType(5, 2)),
    NestedField(6, "s", StringType()),
    NestedField(7, "ts", TimestampType()),
    NestedField(8, "tz", TimestamptzType()),
    NestedField(9, "day", DateType()),
    NestedField(10, "t", TimeType()),
    NestedField(11, "u", UUIDType()),
    NestedField(12, "b", BinaryType()),
    NestedField(13, "fx", FixedType(2)),
    NestedField(14, "ok", BooleanType()),
    NestedField(15, "my.col", IntegerType()),
    NestedField(16, "My Col", IntegerType()),
    NestedField(17, "and", IntegerType()),
    NestedField(18, 'q"q', IntegerType()),
    NestedField(19, "twin", IntegerType()),
    NestedField(20, "Twin", IntegerType()),
    NestedField(21, "größe", IntegerType()),
    NestedField(
        22,
        "st",
        StructType(
            NestedField(23, "in.ner", IntegerType()),
            NestedField(24, "Deep", StructType(NestedField(25, "x", StringType()))),
        ),
    ),
    NestedField(26, "tags", ListType(27, StringType())),
    NestedField(28, "m", MapType(29, StringType(), 30, StructType(NestedField(31, "z", IntegerType())))),
    NestedField(32, "ns", TimestampNanoType()),
)
EVERY_OP = sorted(INVERSE)
# Its constructors are not those that a type checker sees.
ice: Any = pyiceberg.expressions


def test_of(name: str, op: Op, *values: Any) -> Test:
    column = SCHEMA.find_field(name)
    return Test(op, (name,), column.field_id, str(column.field_type), values)


test_of.__test__ = False  # type: ignore[attr-defined]


def naive(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC).replace(tzinfo=None)  # type: ignore[misc, arg-type]


def one_value(value: Any, kind: str) -> Callable[[int], ColumnBounds]:
    """The bounds of a column in a file of one row."""
    if value is None:
        return lambda _: ColumnBounds(None, None, 1, 1, 0)
    return lambda _: ColumnBounds(encode(kind, value), encode(kind, value), 1, 0, 0)


# --- the tree ------------------------------------------------------------------


@pytest.mark.parametrize("op", EVERY_OP)
def test_a_negated_test_is_the_inverse_test(op: Op) -> None:
    test = Test(op, ("i",), 1, "int", (1,))
    assert pushed_down(Not(test)) == Test(INVERSE[op], ("i",), 1, "int", (1,))
    assert pushed_down(Not(Not(test))) == test
    assert INVERSE[INVERSE[op]] == op


def test_not_is_pushed_down_to_the_tests() -> None:
    a, b, c = (test_of("i", "lt", number) for number in (1, 2, 3))
    expr = Not(And(a, Or(Not(b), Not(Not(c)))))
    assert pushed_down(expr) == Or(test_of("i", "ge", 1), And(test_of("i", "lt", 2), test_of("i", "ge", 3)))


def test_what_is_always_true_or_false_is_folded_away() -> None:
    a = test_of("i", "lt", 1)
    assert pushed_down(And(a, Always(True))) == a
    assert pushed_down(And(Always(False), a)) == Always(False)
    assert pushed_down(Or(a, Not(Always(True)))) == a
    assert pushed_down(Not(And(a, Always(False)))) == Always(True)
    assert all_of([]) == Always(True)
    assert any_of([]) == Always(False)


def test_a_negated_comparison_can_let_nan_in() -> None:
    above = test_of("d", "gt", 1.0)
    assert pushed_down(Not(above)) == test_of("d", "le", 1.0)
    assert pushed_down(Not(above), nan_too=True) == Or(test_of("d", "le", 1.0), test_of("d", "is_nan"))
    assert pushed_down(Not(test_of("i", "gt", 1)), nan_too=True) == test_of("i", "le", 1)
    assert pushed_down(Not(test_of("d", "lt", 1.0)), nan_too=True) == test_of("d", "ge", 1.0)


def test_the_fields_of_a_predicate_are_found_wherever_they_stand() -> None:
    expr = Not(And(test_of("i", "lt", 1), Or(test_of("s", "eq", "x"), Not(test_of("d", "is_nan")))))
    assert fields_of(expr) == {1, 6, 4}
    assert fields_of(Always(True)) == frozenset()


def depth(expr: Predicate) -> int:
    return 1 + max(depth(expr.left), depth(expr.right)) if isinstance(expr, (And, Or)) else 0


def test_a_long_chain_is_no_deep_tree() -> None:
    tests: list[Predicate] = [test_of("i", "ne", number) for number in range(5000)]
    for chain in (reduce(And, tests), reduce(lambda left, right: And(right, left), tests)):
        assert depth(pushed_down(chain)) == 13
        assert fields_of(chain) == {1}
        assert depth(parse_where(chain, SCHEMA)) == 13


def test_a_tree_without_end_is_refused() -> None:
    expr: Predicate = test_of("i", "eq", 1)
    for number in range(5000):
        expr = And(expr, test_of("i", "eq", 1)) if number % 2 else Or(expr, test_of("i", "eq", 1))
    with pytest.raises(InvalidPredicate, match=f"alternate more than {MAX_DEPTH} times"):
        pushed_down(expr)
    with pytest.raises(InvalidPredicate):
        parse_where(expr, SCHEMA)
    assert fields_of(expr) == {1}


# --- names ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "path", "field_id"),
    [
        ("i", ("i",), 1),
        ("I", ("i",), 1),
        ('"i"', ("i",), 1),
        ('"my.col"', ("my.col",), 15),
        ('"MY.COL"', ("my.col",), 15),
        ("my.col", ("my.col",), 15),
        ('"My Col"', ("My Col",), 16),
        ('"my col"', ("My Col",), 16),
        ('"and"', ("and",), 17),
        ('"q""q"', ('q"q',), 18),
        ("twin", ("twin",), 19),
        ("Twin", ("Twin",), 20),
        ('"größe"', ("größe",), 21),
        ('"GRÖSSE"', None, 0),
        ('st."in.ner"', ("st", "in.ner"), 23),
        ('"st" . "in.ner"', ("st", "in.ner"), 23),
        ("st.in.ner", ("st", "in.ner"), 23),
        ('"st.in.ner"', None, 0),
        ("TWIN", None, 0),
    ],
)
def test_a_column_is_found_by_its_name(written: str, path: tuple[str, ...] | None, field_id: int) -> None:
    for text in (f"{written} = 3", f"3 = {written}", f"({written}=3)"):
        if path is None:
            with pytest.raises(InvalidPredicate):
                parse_where(text, SCHEMA)
        else:
            assert parse_where(text, SCHEMA) == Test("eq", path, field_id, "int", (3,))


def test_a_nested_column_is_found_without_regard_to_case() -> None:
    wanted = Test("eq", ("st", "Deep", "x"), 25, "string", ("v",))
    for text in ("st.Deep.x = 'v'", "ST.deep.X = 'v'", "st.\"deep\".x = 'v'", "st . \"Deep\" . x = 'v'"):
        assert parse_where(text, SCHEMA) == wanted
    assert parse_where(ice.EqualTo("st.Deep.x", "v"), SCHEMA) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nope = 1", "no column 'nope'"),
        ('"no""pe" = 1', "no column 'no\"pe'"),
        ("i.x = 1", "no column 'i.x'"),
        ("TWIN = 1", "'TWIN' is ambiguous"),
        ("tags = 'x'", "column 'tags': it cannot be tested: it is a list"),
        ("tags is null", "it is a list"),
        ("tags.element = 'x'", "inside a list or a map"),
        ("m.key = 'x'", "inside a list or a map"),
        ("m.value.z = 1", "column 'm.value.z': it cannot be tested: it lies inside a list or a map"),
        ("st = 1", "it is a struct"),
        ("ns > 1", "columns of the type timestamp_ns cannot be compared"),
    ],
)
def test_a_column_that_cannot_be_tested_is_named(text: str, said: str) -> None:
    with pytest.raises(InvalidPredicate, match=re.escape(said)):
        parse_where(text, SCHEMA)


def test_quoted_names_and_texts_do_not_mix() -> None:
    text = """ "my.col" = 1 and s = 'a "my.col" b' and s <> '"' and "q""q" = 2 and s <> 'it''s "x' """
    parsed = parse_where(text, SCHEMA)
    assert fields_of(parsed) == {15, 6, 18}
    assert 'a "my.col" b' in str(parsed)
    assert parse_where("s = '_0_' and b = X'00' and \"my.col\" = 1 and s <> '_1__2_'", SCHEMA) == all_of(
        [
            test_of("s", "eq", "_0_"),
            test_of("b", "eq", b"\0"),
            Test("eq", ("my.col",), 15, "int", (1,)),
            test_of("s", "ne", "_1__2_"),
        ]
    )
    with pytest.raises(InvalidPredicate):
        parse_where('i"my.col" = 1', SCHEMA)


# --- what cannot be read -------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        (" \n ", "empty"),
        ("i", "cannot be read"),
        ("i = ", "cannot be read"),
        ("i = 1 and", "at its end"),
        ("i = 1 xor l = 2", "at character 7, 'xor l = 2'"),
        ('"my.col" = 1 xor', "at character 14, 'xor'"),
        ("i = 1; drop table x", "at character 6, '; drop table x'"),
        ("i = null", "cannot be read"),
        ("größe = 1", "cannot be read"),
        ("\ud800 = 1", "cannot be read"),
        ("s = 'x", "quote ' is not closed in its line (at character 5"),
        ("s = 'x\ny'", "is not closed in its line"),
        ('"i = 1', "is not closed"),
        ("s = '" + r"\xaaaaaaaa" * 5000, "is not closed"),
        ("b = X'0'", "two hexadecimal digits"),
        ("i = 1 and true", "TRUE and FALSE cannot be joined"),
        ("s like '%x'", "LIKE knows only a % at the end"),
        ("s like 'a_b%'", "LIKE knows only a % at the end (at character 8"),
        ("(" * 65 + "i = 1" + ")" * 65, "more than 64 deep (at character 65"),
        ("(" * 60000, "more than 64 deep"),
        ("not " * 17000, "characters"),
        ("i = 1 or " * 8000 + "i = 1", "72005 characters. Use at most 65536"),
        ("i = " + "9" * 5000, "value cannot be read"),
        ("i = 1" + ")" * 5000, "cannot be read"),
    ],
    ids=lambda value: value[:20],
)
def test_a_text_that_cannot_be_read_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(InvalidPredicate, match=re.escape(said)) as caught:
        parse_where(text, SCHEMA)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [5, b"i = 1", ["i = 1"], object(), True])
def test_what_is_no_condition_is_refused(value: Any) -> None:
    with pytest.raises(InvalidPredicate, match="neither a text nor an expression"):
        parse_where(value, SCHEMA)


def test_a_very_long_but_plain_text_is_read() -> None:
    assert depth(parse_where(" or ".join(["i = 1"] * 500), SCHEMA)) == 9
    assert parse_where("not " * 999 + "i = 1", SCHEMA) == test_of("i", "ne", 1)
    assert parse_where("(" * 64 + "i = 1" + ")" * 64, SCHEMA) == test_of("i", "eq", 1)
    many = parse_where(f"i in ({', '.join(str(number) for number in reversed(range(2000)))})", SCHEMA)
    assert many == test_of("i", "in", *range(2000))


# --- values --------------------------------------------------------------------

NEVER = Always(False)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # Whole numbers: what lies between two of them, and beyond all of them.
        ("i = 1", test_of("i", "eq", 1)),
        ("i = 1.0", test_of("i", "eq", 1)),
        ("i = '15'", test_of("i", "eq", 15)),
        ("i > 1.5", test_of("i", "gt", 1)),
        ("i >= 1.5", test_of("i", "gt", 1)),
        ("i < 1.5", test_of("i", "le", 1)),
        ("i <= -1.5", test_of("i", "le", -2)),
        ("i = 1.5", NEVER),
        ("i <> 1.5", test_of("i", "not_null")),
        ("i < 1000000000000000000000000000000", test_of("i", "not_null")),
        ("i >= 2147483648", NEVER),
        ("i >= 2147483647", test_of("i", "ge", 2147483647)),
        ("i > 2147483647.5", NEVER),
        ("i > -2147483649", test_of("i", "not_null")),
        ("i <= -2147483649", NEVER),
        ("i = 2147483648", NEVER),
        ("not i = 2147483648", test_of("i", "not_null")),
        ("i in (3, 1, 2147483648, 1)", test_of("i", "in", 1, 3)),
        ("i in (2147483648)", NEVER),
        ("i not in (2147483648, 2147483649)", test_of("i", "not_null")),
        ("i not in (1, 2147483648)", test_of("i", "ne", 1)),
        ("l <= 9223372036854775807", test_of("l", "le", 2**63 - 1)),
        ("l < 9223372036854775808", test_of("l", "not_null")),
        ("i > '1e999999999'", NEVER),
        ("i > '1e-999999999'", test_of("i", "gt", 0)),
        # Decimals of another scale.
        ("dec = 1", test_of("dec", "eq", Decimal("1.00"))),
        ("dec = 1.1", test_of("dec", "eq", Decimal("1.10"))),
        ("dec = '1.1000'", test_of("dec", "eq", Decimal("1.10"))),
        ("dec > 1.234", test_of("dec", "gt", Decimal("1.23"))),
        ("dec <= -1.234", test_of("dec", "le", Decimal("-1.24"))),
        ("dec = 1.234", NEVER),
        ("dec < 1000", test_of("dec", "not_null")),
        ("dec < 999.995", test_of("dec", "not_null")),
        ("dec >= -1000", test_of("dec", "not_null")),
        ("dec in (1.5, 1.505)", test_of("dec", "eq", Decimal("1.50"))),
        # Numbers that are rounded to their type, and what is beyond it.
        ("d = 0.1", test_of("d", "eq", 0.1)),
        ("d = 1", test_of("d", "eq", 1.0)),
        ("f = 0.1", test_of("f", "eq", 0.10000000149011612)),
        ("f < 1" + "0" * 39, test_of("f", "lt", math.inf)),
        ("f > 1" + "0" * 39, test_of("f", "ge", math.inf)),
        ("f > -1" + "0" * 39, test_of("f", "gt", -math.inf)),
        ("f <= -1" + "0" * 39, test_of("f", "le", -math.inf)),
        ("f = 1" + "0" * 39, NEVER),
        ("f <> 1" + "0" * 39, test_of("f", "not_null")),
        ("d <= 1" + "0" * 400, test_of("d", "lt", math.inf)),
        ("d >= 'Infinity'", test_of("d", "ge", math.inf)),
        ("d = -0.0", test_of("d", "eq", 0.0)),
        ("d is nan", test_of("d", "is_nan")),
        ("not d is nan", test_of("d", "not_nan")),
        ("i is nan", NEVER),
        ("i is not nan", Always(True)),
        # Texts.
        ("s = 'it''s'", test_of("s", "eq", "it's")),
        ("s = 'a\tb'", test_of("s", "eq", "a\tb")),
        ("s in ('b', 'a', '\U0001f600')", test_of("s", "in", "a", "b", "\U0001f600")),
        ("s like 'ab%'", test_of("s", "starts_with", "ab")),
        ("s not like 'ab%'", test_of("s", "not_starts_with", "ab")),
        (r"s like 'a\_b%'", test_of("s", "starts_with", "a_b")),
        (r"s like '100\%'", test_of("s", "eq", "100%")),
        ("s like '%'", test_of("s", "not_null")),
        ("s not like '%'", NEVER),
        # Dates and times.
        ("day = '2024-02-29'", test_of("day", "eq", date(2024, 2, 29))),
        ("day >= 0", test_of("day", "ge", date(1970, 1, 1))),
        ("t > '10:11:12.5'", test_of("t", "gt", time(10, 11, 12, 500000))),
        ("t < 1", test_of("t", "lt", time(0, 0, 0, 1))),
        ("ts > '2024-01-01T00:00:00'", test_of("ts", "gt", naive(2024, 1, 1))),
        ("ts > '2024-01-01 00:00:00.000001'", test_of("ts", "gt", naive(2024, 1, 1, 0, 0, 0, 1))),
        ("ts > '2024-01-01'", test_of("ts", "gt", naive(2024, 1, 1))),
        ("ts > -1", test_of("ts", "gt", naive(1969, 12, 31, 23, 59, 59, 999999))),
        ("tz > '2024-01-01T00:00:00+02:00'", test_of("tz", "gt", datetime(2023, 12, 31, 22, tzinfo=UTC))),
        ("tz > '2024-01-01 00:00:00Z'", test_of("tz", "gt", datetime(2024, 1, 1, tzinfo=UTC))),
        # The rest.
        ("u = '00000000-0000-0000-0000-00000000000a'", test_of("u", "eq", UUID(int=10))),
        ("b >= X'0aFF'", test_of("b", "ge", b"\x0a\xff")),
        ("b in (X'', x'00')", test_of("b", "in", b"", b"\0")),
        ("fx = X'0102'", test_of("fx", "eq", b"\1\2")),
        ("ok = true", test_of("ok", "eq", True)),
        ("ok = 'FALSE'", test_of("ok", "eq", False)),
        ("true", Always(True)),
        ("false", NEVER),
        ("ns is not null", test_of("ns", "not_null")),
        ("i between 1 and 3", And(test_of("i", "ge", 1), test_of("i", "le", 3))),
        ("not (i between 1 and 3)", Or(test_of("i", "lt", 1), test_of("i", "gt", 3))),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_gets_the_type_of_its_column(text: str, wanted: Predicate) -> None:
    parsed = parse_where(text, SCHEMA)
    assert parsed == wanted
    # 1, 1.0, True and Decimal("1") are equal, and not the same.
    assert repr(parsed) == repr(wanted)
    assert parse_where(parsed, SCHEMA) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "i = 'x'", "i = true", "i = 'nan'", "i = X'00'", "s = 5", "s > 1.5", "s = true", "i like '1%'", "ok = 1",
        "ok = 'x'",
        "d = 'nan'", "d = 'x'", "dec = 'NaN'", "dec = 'x'", "day = '2024-02-30'", "day = 99999999", "day = 1.5",
        "t = '25:00:00'", "t = '10:00:00+02:00'", "t = '10:00:00.1234567'", "t = -1", "ts = '2024-01-01T00:00:00Z'",
        "ts = '2024-01-01T00:00:00.1234567'", "ts = 'yesterday'", "ts = 10000000000000000000",
        "tz = '2024-01-01T00:00:00'",
        "tz = '2024-01-01'", "tz = '2024-13-01T00:00:00Z'", "tz = '0001-01-01T00:00:00+10:00'", "u = 'x'", "u = 5",
        "b = 'abc'", "b = 5", "fx = X'01'", "s = '\ud800'", "i = '1e99999999999999999999'",
    ],
    ids=ascii,
)  # fmt: skip
def test_a_value_of_another_type_is_refused_with_its_column(text: str) -> None:
    with pytest.raises(InvalidPredicate) as caught:
        parse_where(text, SCHEMA)
    assert caught.value.on == f"column '{text.split()[0]}'"


@pytest.mark.parametrize(
    ("expr", "wanted"),
    [
        (ice.AlwaysTrue(), Always(True)),
        (ice.EqualTo("my.col", 1), Test("eq", ("my.col",), 15, "int", (1,))),
        (ice.Not(ice.GreaterThan("i", 1.5)), test_of("i", "le", 1)),
        (ice.LessThan("i", math.inf), test_of("i", "not_null")),
        (ice.EqualTo("dec", 0.1), test_of("dec", "eq", Decimal("0.10"))),
        (ice.GreaterThanOrEqual("b", b"\1"), test_of("b", "ge", b"\1")),
        (ice.StartsWith("b", b"\1"), test_of("b", "starts_with", b"\1")),
        (ice.EqualTo("u", UUID(int=7)), test_of("u", "eq", UUID(int=7))),
        (ice.EqualTo("u", UUID(int=7).bytes), test_of("u", "eq", UUID(int=7))),
        (ice.LessThan("day", naive(2024, 1, 1, 12)), test_of("day", "le", date(2024, 1, 1))),
        (ice.LessThan("day", naive(2024, 1, 1)), test_of("day", "lt", date(2024, 1, 1))),
        (ice.LessThan("ts", date(2024, 1, 1)), test_of("ts", "lt", naive(2024, 1, 1))),
        (ice.LessThan("t", time(1)), test_of("t", "lt", time(1))),
        (ice.LessThan("tz", datetime(2024, 1, 1, tzinfo=UTC)), test_of("tz", "lt", datetime(2024, 1, 1, tzinfo=UTC))),
        (ice.In("s", ("b", "a")), test_of("s", "in", "a", "b")),
        (ice.In("s", ()), NEVER),
        (ice.IsNaN("f"), test_of("f", "is_nan")),
        (ice.LessThan("l", LongAboveMax()), test_of("l", "not_null")),
        (ice.Or(ice.IsNull("i"), ice.NotNull("l")), Or(test_of("i", "is_null"), test_of("l", "not_null"))),
    ],
    ids=str,
)
def test_an_expression_of_pyiceberg_is_bound(expr: Any, wanted: Predicate) -> None:
    assert parse_where(expr, SCHEMA) == wanted


def test_a_bound_expression_of_pyiceberg_is_bound_anew() -> None:
    for expr in (ice.EqualTo("i", 7), ice.NotIn("s", ("a", "b")), ice.IsNull("d")):
        assert parse_where(expr.bind(SCHEMA), SCHEMA) == parse_where(expr, SCHEMA)


@pytest.mark.parametrize(
    "expr",
    [
        ice.EqualTo("day", DateLiteral(10**9)),
        ice.EqualTo("ts", TimestampLiteral(10**19)),
        ice.EqualTo("tz", date(2024, 1, 1)),
    ],
)
def test_an_expression_with_a_value_that_does_not_fit_is_refused(expr: Any) -> None:
    with pytest.raises(InvalidPredicate):
        parse_where(expr, SCHEMA)


def test_a_long_chain_of_expressions_is_bound() -> None:
    chain = reduce(ice.Or, [ice.EqualTo("i", number) for number in range(3000)])
    assert depth(parse_where(chain, SCHEMA)) == 12


def test_a_predicate_is_bound_anew_by_field_ids() -> None:
    before = parse_where("old > 5 and not old = 7", Schema(NestedField(1, "old", IntegerType())))
    after = parse_where(before, Schema(NestedField(1, "new", LongType())))
    assert after == And(Test("gt", ("new",), 1, "long", (5,)), Test("ne", ("new",), 1, "long", (7,)))
    with pytest.raises(InvalidPredicate, match="no column with the id 1"):
        parse_where(before, Schema(NestedField(2, "i", IntegerType())))
    with pytest.raises(InvalidPredicate):
        parse_where(Test("lt", ("d",), 4, "double", (math.nan,)), SCHEMA)
    with pytest.raises(InvalidPredicate):
        parse_where(Test("lt", ("d",), 4, "double", ()), SCHEMA)
    unknown: Any = "like"
    with pytest.raises(InvalidPredicate, match="no operation 'like'"):
        parse_where(Not(Test(unknown, ("s",), 6, "string", ("x",))), SCHEMA)
    with pytest.raises(InvalidPredicate):
        parse_where(Test("lt", ("ts",), 7, "timestamp", (datetime(2024, 1, 1, tzinfo=UTC),)), SCHEMA)


# --- a condition says what it says ---------------------------------------------

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "=": lambda left, right: left == right,
    "<>": lambda left, right: left != right,
}
NUMBERS = st.one_of(
    st.decimals(-4, 4, places=1),
    st.decimals(-4, 4, places=3),
    st.sampled_from(["2147483647.5", "-2147483648.5", "2147483648", "999.99", "999.995", "-1000"]).map(Decimal),
    st.just(Decimal("9" * 30)),
)
#: The text of a condition on x, and what it says of a value, with None for neither true nor false.
Said = tuple[str, Callable[[Any], bool | None]]


def said_comparison(op: str, number: Decimal) -> Said:
    return f"x {op} {number:f}", lambda value: None if value is None else COMPARISONS[op](value, number)


def said_set(negated: bool, numbers: list[Decimal]) -> Said:
    texts = [f"{number:f}" if "." in f"{number:f}" else f"{number:f}.0" for number in numbers]
    return (
        f"x {'not ' * negated}in ({', '.join(texts)})",
        lambda value: None if value is None else (value in numbers) != negated,
    )


def said_null(negated: bool) -> Said:
    return f"x is {'not ' * negated}null", lambda value: (value is None) != negated


def said_not(child: Said) -> Said:
    def meaning(value: Any) -> bool | None:
        inner = child[1](value)
        return None if inner is None else not inner

    return f"not ({child[0]})", meaning


def said_joined(kind: str, parts: list[Said]) -> Said:
    decided = kind == "or"

    def meaning(value: Any) -> bool | None:
        results = [part[1](value) for part in parts]
        return decided if decided in results else None if None in results else not decided

    text = f" {kind} ".join(part if kind == "or" or " or " not in part else f"({part})" for part, _ in parts)
    return text, meaning


CONDITIONS = st.recursive(
    st.one_of(
        st.builds(said_comparison, st.sampled_from(sorted(COMPARISONS)), NUMBERS),
        st.builds(said_set, st.booleans(), st.lists(NUMBERS, min_size=1, max_size=3)),
        st.builds(said_null, st.booleans()),
    ),
    lambda inner: st.one_of(
        st.builds(said_not, inner),
        st.builds(said_joined, st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3)),
    ),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(CONDITIONS, st.sampled_from([IntegerType(), LongType(), DecimalType(5, 2)]), st.data())
def test_a_bound_condition_is_true_for_the_rows_it_was_true_for(said: Said, kind: Any, data: st.DataObject) -> None:
    text, meaning = said
    parsed = parse_where(text, Schema(NestedField(1, "x", kind)))
    values: st.SearchStrategy[Any] = st.integers(-4, 4) | st.sampled_from([2**31 - 1, -(2**31)])
    if isinstance(kind, DecimalType):
        values = st.decimals(-4, 4, places=2) | st.sampled_from([Decimal("999.99"), Decimal("-999.99")])
    for value in data.draw(st.lists(st.none() | values, min_size=1, max_size=8)):
        assert may_match(parsed, one_value(value, str(kind))) == (meaning(value) is True), (text, parsed)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ix\"'.=<>()_$ \t\n%\\oranditlke1X5é\U0001f600", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parsed = parse_where(text, SCHEMA)
    except InvalidPredicate:
        return
    assert parse_where(parsed, SCHEMA) == parsed


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\\'"), max_size=20))
def test_a_text_and_a_name_come_through_as_they_are(text: str) -> None:
    schema = Schema(NestedField(1, text, StringType()), NestedField(2, text + "_", StringType()))
    name = text.replace('"', '""')
    assert parse_where(f"\"{name}\" = '{text}'", schema) == Test("eq", (text,), 1, "string", (text,))


# --- partitions ----------------------------------------------------------------

PARTITIONED = Schema(
    NestedField(1, "i", IntegerType()),
    NestedField(2, "s", StringType()),
    NestedField(3, "ts", TimestamptzType()),
    NestedField(4, "day", DateType()),
    NestedField(5, "dec", DecimalType(9, 2)),
    NestedField(6, "d", DoubleType()),
    NestedField(7, "b", BinaryType()),
)


def projected(where: str | Predicate, *fields: tuple[int, str]) -> Predicate:
    spec = PartitionSpec(
        *(
            PartitionField(source, 1000 + number, parse_transform(name), f"p{number}")
            for number, (source, name) in enumerate(fields)
        )
    )
    return partition_tests(parse_where(where, PARTITIONED), spec, PARTITIONED)


def part(op: Op, kind: str, *values: Any, number: int = 0) -> Test:
    return Test(op, (f"p{number}",), -1000 - number, kind, values)


@pytest.mark.parametrize(
    ("where", "source", "transform", "wanted"),
    [
        ("i > 5", 1, "identity", part("gt", "int", 5)),
        ("not i in (5, 6)", 1, "identity", part("not_in", "int", 5, 6)),
        ("d is nan", 6, "identity", part("is_nan", "double")),
        ("ts < '2024-01-01T00:00:00Z'", 3, "identity", part("lt", "timestamptz", datetime(2024, 1, 1, tzinfo=UTC))),
        ("i = 34", 1, "bucket[16]", part("eq", "int", 3)),
        ("i in (34, 35)", 1, "bucket[16]", part("in", "int", 3, 5)),
        ("i > 34", 1, "bucket[16]", part("not_null", "int")),
        ("i <> 34", 1, "bucket[16]", part("not_null", "int")),
        ("i is null", 1, "bucket[16]", part("is_null", "int")),
        ("dec = 14.2", 5, "bucket[16]", part("eq", "int", 3)),
        ("ts < '2024-01-01T00:00:00Z'", 3, "day", part("le", "date", 19722)),
        ("ts <= '2024-01-01T00:00:00Z'", 3, "day", part("le", "date", 19723)),
        ("ts > '2023-12-31T23:59:59.999999Z'", 3, "day", part("ge", "date", 19723)),
        ("ts = '2024-01-01T05:00:00Z'", 3, "hour", part("eq", "int", 19723 * 24 + 5)),
        ("ts >= '2024-06-01T00:00:00Z'", 3, "month", part("ge", "int", 54 * 12 + 5)),
        ("day < '2024-01-01'", 4, "year", part("le", "int", 53)),
        ("day in ('2024-01-01', '2025-01-01')", 4, "year", part("in", "int", 54, 55)),
        ("day <> '2024-01-01'", 4, "year", part("not_null", "int")),
        ("day = '1969-12-31'", 4, "month", part("in", "int", -1, 0)),
        ("day <= '1969-12-31'", 4, "day", part("le", "date", 0)),
        ("day >= '1969-12-31'", 4, "day", part("ge", "date", -1)),
        ("i < 20", 1, "truncate[10]", part("le", "int", 10)),
        ("i > 19", 1, "truncate[10]", part("ge", "int", 20)),
        ("i = -1", 1, "truncate[10]", part("eq", "int", -10)),
        ("i = -2147483648", 1, "truncate[10]", part("not_null", "int")),
        ("dec < 20.0", 5, "truncate[100]", part("le", "decimal(9, 2)", Decimal("19.00"))),
        ("s = 'abcdef'", 2, "truncate[3]", part("eq", "string", "abc")),
        ("s < 'abcdef'", 2, "truncate[3]", part("le", "string", "abc")),
        ("s >= 'abcdef'", 2, "truncate[3]", part("ge", "string", "abc")),
        ("s like 'ab%'", 2, "truncate[3]", part("starts_with", "string", "ab")),
        ("s like 'abcd%'", 2, "truncate[3]", part("eq", "string", "abc")),
        ("s not like 'ab%'", 2, "truncate[3]", part("not_starts_with", "string", "ab")),
        ("s not like 'abcd%'", 2, "truncate[3]", part("not_null", "string")),
        ("b = X'010203'", 7, "truncate[2]", part("eq", "binary", b"\1\2")),
        ("i = 5", 1, "void", Always(True)),
        ("i is null", 1, "void", Always(True)),
        ("i = 5", 1, "curve[5]", Always(True)),
        ("i = 5", 2, "identity", Always(True)),
        ("i = 5", 99, "identity", Always(True)),
        ("s = 'a'", 2, "day", Always(True)),
    ],
)
def test_a_test_is_projected_onto_a_partition(where: str, source: int, transform: str, wanted: Predicate) -> None:
    found = projected(where, (source, transform))
    assert found == wanted
    assert repr(found) == repr(wanted)


def test_a_projection_keeps_what_each_side_of_and_and_or_says() -> None:
    both = ((1, "bucket[16]"), (2, "identity"))
    assert projected("i = 34 and s > 'a'", *both) == And(part("eq", "int", 3), part("gt", "string", "a", number=1))
    assert projected("i = 34 or s > 'a'", *both) == Or(part("eq", "int", 3), part("gt", "string", "a", number=1))
    assert projected("i = 34 or d > 1", *both) == Always(True)
    assert projected("i = 34 and d > 1", *both) == part("eq", "int", 3)
    assert projected("not (i <> 34 or s <= 'a')", *both) == And(
        part("eq", "int", 3), part("gt", "string", "a", number=1)
    )
    assert projected("i = 34", (1, "bucket[16]"), (1, "truncate[10]")) == And(
        part("eq", "int", 3), part("eq", "int", 30, number=1)
    )
    assert projected("i > 2147483648", *both) == Always(False)


def test_a_projection_without_a_partition_or_with_a_column_that_is_gone_says_nothing() -> None:
    assert projected("i = 1") == Always(True)
    spec = PartitionSpec(PartitionField(77, 1000, parse_transform("identity"), "p0"))
    assert partition_tests(Test("eq", ("gone",), 77, "int", (1,)), spec, PARTITIONED) == Always(True)


def test_the_first_and_the_last_moment_of_all_are_projected() -> None:
    last = datetime.max.replace(tzinfo=UTC)
    assert projected(Test("gt", ("ts",), 3, "timestamptz", (last,)), (3, "year")) == part("ge", "int", 8029)
    first = datetime.min.replace(tzinfo=UTC)
    assert projected(Test("lt", ("ts",), 3, "timestamptz", (first,)), (3, "year")) == part("le", "int", -1968)
    assert projected(Test("lt", ("ts",), 3, "timestamptz", (first + timedelta(days=400),)), (3, "year")) == part(
        "le", "int", -1967
    )
