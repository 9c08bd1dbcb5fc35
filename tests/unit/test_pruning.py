"""Bounds never hide a row that a predicate is true for, and never promise one that it is not true for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from random import Random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import parse_transform
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from lakebook.iceberg.bounds import NOTHING, ColumnBounds, encode, interval_key, probe_ranges, sort_key
from lakebook.iceberg.predicates import partition_tests
from lakebook.iceberg.pruning import (
    Range,
    best_conjuncts,
    column_ranges,
    compile_may_match,
    compile_must_match,
    driving_ranges,
    may_match,
    must_match,
)
from lakebook.predicates import INVERSE, Always, And, Not, Op, Or, Predicate, Test

# --- what a predicate says of a row, as simply as it can be said ----------------


@dataclass(frozen=True)
class Engine:
    """In what engines differ."""

    nan_is_largest: bool
    null_is_no_nan: bool


ENGINES = [Engine(True, True), Engine(False, False), Engine(False, True), Engine(True, False)]


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def equal(left: Any, right: Any, engine: Engine) -> bool:
    if is_nan(left) and is_nan(right):
        return engine.nan_is_largest
    return bool(left == right)


def less(left: Any, right: Any, engine: Engine) -> bool:
    if is_nan(left) or is_nan(right):
        return engine.nan_is_largest and not is_nan(left)
    return bool(left < right)


def passes(test: Test, value: Any, engine: Engine) -> bool | None:
    if test.op in ("is_null", "not_null"):
        return (value is None) == (test.op == "is_null")
    if test.op in ("is_nan", "not_nan"):
        if value is None and not engine.null_is_no_nan:
            return None
        return is_nan(value) == (test.op == "is_nan")
    if value is None:
        return None
    other = test.values[0]
    checks: dict[str, Callable[[], bool]] = {
        "eq": lambda: equal(value, other, engine),
        "ne": lambda: not equal(value, other, engine),
        "lt": lambda: less(value, other, engine),
        "ge": lambda: less(other, value, engine) or equal(value, other, engine),
        "gt": lambda: less(other, value, engine),
        "le": lambda: less(value, other, engine) or equal(value, other, engine),
        "in": lambda: any(equal(value, one, engine) for one in test.values),
        "not_in": lambda: not any(equal(value, one, engine) for one in test.values),
        "starts_with": lambda: value.startswith(other),
        "not_starts_with": lambda: not value.startswith(other),
    }
    return checks[test.op]()


def truth(expr: Predicate, row: dict[int, Any], engine: Engine) -> bool | None:
    if isinstance(expr, Always):
        return expr.value
    if isinstance(expr, Test):
        return passes(expr, row[expr.field_id], engine)
    if isinstance(expr, Not):
        inner = truth(expr.child, row, engine)
        return None if inner is None else not inner
    sides = {truth(expr.left, row, engine), truth(expr.right, row, engine)}
    decided = isinstance(expr, Or)
    return decided if decided in sides else None if None in sides else not decided


# --- random columns and predicates ----------------------------------------------

NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
FLOATS = [math.nan, -math.inf, -1.5, -0.0, 0.0, 5e-324, 1.5, math.inf]
# Few values, so that they meet; texts with common beginnings and characters of every length.
VALUES: dict[str, list[Any]] = {
    "int": [-(2**31), -1, 0, 1, 7, 2**31 - 1],
    "long": [-(2**63), -1, 0, 1, 7, 2**63 - 1],
    "float": [*FLOATS, 0.10000000149011612],
    "double": [*FLOATS, 0.1],
    "decimal(5, 2)": [Decimal(text) for text in ("-999.99", "-0.01", "0.00", "0.01", "1.00", "999.99")],
    "string": ["", "a", "ab", "abc", "b", "é", "a\U0001f600", "a\U0001f601", "a￿", "\U0010ffff"],
    "binary": [b"", b"\0", b"a", b"ab", b"\xff", b"\xff\xff", b"a\xff"],
    "fixed[2]": [b"\0\0", b"ab", b"\xff\xff"],
    "boolean": [False, True],
    "date": [date.min, date(1969, 12, 31), date(1970, 1, 1), date(2024, 2, 29), date.max],
    "time": [time(), time(12), time.max],
    "timestamp": [(NOON + timedelta(hours=hours)).replace(tzinfo=None) for hours in (-1, 0, 1)],
    "timestamptz": [NOON + timedelta(hours=hours) for hours in (-1, 0, 1)],
    "uuid": [UUID(int=0), UUID(int=1), UUID(int=2**127), UUID(int=2**128 - 1)],
}
PREFIXED = ("string", "binary")
OPS: list[Op] = sorted(INVERSE)


def usable(value: Any) -> bool:
    return value is not None and not is_nan(value)


# Plain random choices from a seed: a hundred times as many cases as Hypothesis could draw one by one.
SEEDS = st.integers(0, 2**64)


def a_test(random: Random, kinds: dict[int, str], values: Sequence[Any] = ()) -> Test:
    field_id = random.choice(sorted(kinds))
    kind = kinds[field_id]
    op = random.choice([op for op in OPS if "starts" not in op or kind in PREFIXED])
    choices = [value for value in values or VALUES[kind] if usable(value)]
    count = 0 if "null" in op or "nan" in op else random.randint(1, 3) if "in" in op.split("_") else 1
    return Test(op, (f"c{field_id}",), field_id, kind, tuple(random.choice(choices) for _ in range(count)))


def a_predicate(random: Random, leaf: Callable[[], Predicate], size: int) -> Predicate:
    if random.random() < 0.2:
        return Not(a_predicate(random, leaf, size))
    if size == 1:
        return Always(random.random() < 0.5) if random.random() < 0.05 else leaf()
    join: type[And] | type[Or] = And if random.random() < 0.5 else Or
    left = random.randint(1, size - 1)
    return join(a_predicate(random, leaf, left), a_predicate(random, leaf, size - left))


def exact_bounds(kind: str, values: Sequence[Any]) -> ColumnBounds:
    encoded = [encode(kind, value) for value in values if usable(value)]
    return ColumnBounds(
        min(encoded, default=None),
        max(encoded, default=None),
        len(values),
        sum(value is None for value in values),
        sum(is_nan(value) for value in values),
    )


def known_bounds(random: Random, kind: str, values: Sequence[Any]) -> ColumnBounds | None:
    """What might be known of a column: all of it, wider bounds, parts of it, nothing."""
    bounds = exact_bounds(kind, values)
    how = random.choice(["exact", "exact", "wider", "cut", "parts", "unknown"])
    if how == "unknown":
        return None
    lower, upper = bounds.lower, bounds.upper
    if lower is not None and upper is not None:
        if how == "wider":
            other = encode(kind, random.choice([value for value in VALUES[kind] if usable(value)]))
            lower, upper = min(lower, other), max(upper, other)
        if how == "cut" and kind in PREFIXED:
            length = random.randint(0, 2)
            lower = lower[:length]
            if len(upper) > length and (rest := upper[:length].rstrip(b"\xff")):
                upper = rest[:-1] + bytes([rest[-1] + 1])
    bounds = replace(bounds, lower=lower, upper=upper)
    if how != "parts":
        return bounds
    return ColumnBounds(*(random.choice([value, None]) for value in astuple(bounds)))


@dataclass(frozen=True)
class Case:
    """A file of few rows, what is known of it, and a predicate."""

    rows: list[dict[int, Any]]
    known: dict[int, ColumnBounds | None]
    expr: Predicate


def a_case(seed: int) -> Case:
    random = Random(seed)
    kinds = {1: random.choice(["float", "double"]), 2: random.choice(PREFIXED), 3: random.choice(sorted(VALUES))}
    count = random.randint(0, 4)
    columns: dict[int, list[Any]] = {}
    for field_id, kind in kinds.items():
        # Often one and the same value in all rows, so that something can be certain.
        choices = random.choices([None, *VALUES[kind]], k=random.choice([1, 2, 5]))
        columns[field_id] = [random.choice(choices) for _ in range(count)]
    known = {field_id: known_bounds(random, kinds[field_id], values) for field_id, values in columns.items()}
    rows = [{field_id: values[number] for field_id, values in columns.items()} for number in range(count)]
    return Case(rows, known, a_predicate(random, lambda: a_test(random, kinds), random.randint(1, 5)))


def matches(case: Case, engine: Engine) -> list[bool]:
    return [truth(case.expr, row, engine) is True for row in case.rows]


@settings(max_examples=600, deadline=None)
@given(SEEDS)
def test_no_row_is_hidden_and_none_is_promised_that_is_not_there(seed: int) -> None:
    case = a_case(seed)
    may, must = may_match(case.expr, case.known.get), must_match(case.expr, case.known.get)
    for engine in ENGINES:
        found = matches(case, engine)
        if not may:
            assert not any(found), (engine, case)
        if must:
            assert all(found), (engine, case)


@settings(max_examples=300, deadline=None)
@given(SEEDS)
def test_an_index_finds_every_file_that_has_a_matching_row(seed: int) -> None:
    case = a_case(seed)
    if not any(any(matches(case, engine)) for engine in ENGINES):
        return
    for part in best_conjuncts(case.expr):
        if isinstance(part, Test) and (driving := driving_ranges(part)) is not None:
            assert in_index(part.type, case.known[part.field_id], driving), case
    for field_id, (kind, found) in column_ranges(case.expr).items():
        assert in_index(kind, case.known[field_id], found), case


def test_the_random_files_are_not_all_kept() -> None:
    random_cases = [a_case(seed) for seed in range(300)]
    kept = sum(may_match(case.expr, case.known.get) for case in random_cases)
    certain = sum(must_match(case.expr, case.known.get) for case in random_cases)
    assert 100 < kept < 250
    assert 20 < certain < kept


def in_index(kind: str, bounds: ColumnBounds | None, ranges: list[Range]) -> bool:
    width, low = interval_key(kind, bounds or ColumnBounds())
    assert width != NOTHING
    return any(
        width == probed and least <= low <= most
        for start, end in ranges
        for probed, least, most in probe_ranges(
            None if start is None else sort_key(kind, start), None if end is None else sort_key(kind, end)
        )
    )


# --- how much the bounds say ----------------------------------------------------


def column(kind: str, *values: Any) -> Callable[[int], ColumnBounds]:
    return lambda _: exact_bounds(kind, values)


def on(kind: str, op: Op, *values: Any) -> Test:
    return Test(op, ("c",), 1, kind, values)


@pytest.mark.parametrize("kind", sorted(VALUES))
@pytest.mark.parametrize("op", OPS)
def test_one_value_is_known_to_pass_or_to_fail(kind: str, op: Op) -> None:
    """With exact bounds of one value nothing is left open, whatever the type and the operation."""
    if "starts" in op and kind not in PREFIXED:
        return
    for value in [None, *VALUES[kind]]:
        for other in VALUES[kind]:
            if not usable(other):
                continue
            test = on(kind, op, *([] if "null" in op or "nan" in op else [other]))
            answers = {passes(test, value, engine) is True for engine in ENGINES}
            assert may_match(test, column(kind, value)) == (True in answers), (value, other)
            assert must_match(test, column(kind, value)) == (False not in answers), (value, other)


@pytest.mark.parametrize(
    ("op", "may", "must"),
    [
        # For the bounds 10 to 20, the values from 9 to 21 that can, and that have to match.
        ("eq", range(10, 21), ()),
        ("ne", range(9, 22), (9, 21)),
        ("lt", range(11, 22), (21,)),
        ("le", range(10, 22), (20, 21)),
        ("gt", range(9, 20), (9,)),
        ("ge", range(9, 21), (9, 10)),
        ("in", range(10, 21), ()),
        ("not_in", range(9, 22), (9, 21)),
    ],
)
def test_a_range_decides_what_lies_beside_it(op: Op, may: Sequence[int], must: Sequence[int]) -> None:
    bounds = column("int", 10, 20)
    assert [value for value in range(9, 22) if may_match(on("int", op, value), bounds)] == list(may)
    assert [value for value in range(9, 22) if must_match(on("int", op, value), bounds)] == list(must)


def test_several_values_are_looked_for_at_once() -> None:
    bounds = column("int", 10, 20)
    assert not may_match(on("int", "in", 1, 5, 9, 21, 30), bounds)
    assert may_match(on("int", "in", 1, 5, 15, 30), bounds)
    assert must_match(on("int", "not_in", 1, 5, 9, 21, 30), bounds)
    assert not must_match(on("int", "not_in", 1, 15), bounds)
    assert must_match(on("int", "in", 3, 4), column("int", 4, 4))
    assert not may_match(on("int", "not_in", 3, 4), column("int", 4, 4))
    assert not may_match(on("int", "in"), bounds)
    assert may_match(on("int", "not_in"), bounds)


def test_what_is_not_known_may_match_and_need_not() -> None:
    for op in OPS:
        test = on("string", op, "a")
        if "nan" not in op:
            assert may_match(test, lambda _: None)
            assert may_match(test, lambda _: ColumnBounds())
        assert not must_match(test, lambda _: None)
        assert not must_match(test, lambda _: ColumnBounds())
    one_sided = ColumnBounds(encode("int", 10), None, 5, 0, 0)
    assert not may_match(on("int", "lt", 10), lambda _: one_sided)
    assert must_match(on("int", "ge", 10), lambda _: one_sided)
    assert may_match(on("int", "gt", 10), lambda _: one_sided)
    assert must_match(on("int", "ne", 9), lambda _: one_sided)


def test_a_column_of_nulls_fulfils_no_comparison() -> None:
    nulls = column("int", None, None)
    for op in OPS:
        assert may_match(on("int", op, 1), nulls) == (op in ("is_null", "not_nan"))
    assert must_match(on("int", "is_null"), nulls)
    some = column("int", None, 5)
    assert may_match(on("int", "eq", 5), some)
    assert not must_match(on("int", "eq", 5), some)
    assert not must_match(on("int", "not_null"), some)
    assert not must_match(Not(on("int", "eq", 4)), some)
    assert must_match(Not(on("int", "eq", 4)), column("int", 5))


@pytest.mark.parametrize("nans", [1, None])
def test_nan_is_above_every_bound_and_below_no_value(nans: int | None) -> None:
    def bounds(_: int) -> ColumnBounds:
        return ColumnBounds(encode("double", 1.0), encode("double", 2.0), 5, 0, nans)

    assert may_match(on("double", "gt", 3.0), bounds)
    assert may_match(on("double", "ge", math.inf), bounds)
    assert not may_match(on("double", "lt", 1.0), bounds)
    assert not may_match(on("double", "eq", 3.0), bounds)
    assert not must_match(on("double", "gt", 0.0), bounds)
    assert not must_match(on("double", "lt", 3.0), bounds)
    assert must_match(on("double", "ne", 3.0), bounds)
    # An engine that compares NaN as false says that NaN is not >= 1.
    assert may_match(Not(on("double", "ge", 1.0)), bounds)
    assert not must_match(Not(on("double", "gt", 3.0)), bounds)
    assert not must_match(on("double", "not_nan"), bounds)


def test_without_nan_numbers_are_bounded() -> None:
    assert not may_match(on("double", "gt", 3.0), column("double", 1.0, 2.0))
    assert must_match(on("double", "lt", 3.0), column("double", 1.0, 2.0))
    assert not may_match(Not(on("double", "ge", 1.0)), column("double", 1.0, 2.0))
    only = column("double", math.nan, math.nan)
    assert not may_match(on("double", "le", math.inf), only)
    assert must_match(on("double", "is_nan"), only)
    assert not may_match(on("double", "not_nan"), only)
    assert not may_match(on("double", "eq", 1.0), column("double", math.nan, None))


def test_both_zeros_are_equal() -> None:
    for zero in (0.0, -0.0):
        assert must_match(on("double", "eq", 0.0), column("double", zero))
        assert must_match(on("float", "eq", -0.0), column("float", zero))
        assert not may_match(on("double", "ne", -0.0), column("double", zero))
        assert not may_match(on("double", "lt", 0.0), column("double", zero))


def test_bounds_of_a_text_may_be_cut_short() -> None:
    def bounds(_: int) -> ColumnBounds:
        return ColumnBounds(b"ab", b"ad", 5, 0, 0)  # of "abc" to "acz", cut to two characters

    assert may_match(on("string", "eq", "abc"), bounds)
    assert may_match(on("string", "starts_with", "abcdef"), bounds)
    assert may_match(on("string", "starts_with", "a"), bounds)
    assert must_match(on("string", "starts_with", "a"), bounds)
    assert not may_match(on("string", "not_starts_with", "a"), bounds)
    assert not may_match(on("string", "starts_with", "aa"), bounds)
    assert not may_match(on("string", "starts_with", "ae"), bounds)
    assert not may_match(on("string", "starts_with", "b"), bounds)
    assert must_match(on("string", "not_starts_with", "ae"), bounds)
    assert not must_match(on("string", "starts_with", "ab"), bounds)
    assert may_match(on("string", "not_starts_with", "ab"), bounds)
    assert not may_match(on("string", "eq", "aaz"), bounds)


def test_a_promoted_column_is_pruned_by_its_old_bounds() -> None:
    assert not may_match(on("long", "gt", 5), column("int", 1, 5))
    assert must_match(on("double", "le", 1.5), column("float", 0.5, 1.5))
    assert not may_match(on("decimal(38, 2)", "lt", Decimal("1.00")), column("decimal(5, 2)", Decimal("1.00")))


def test_and_or_and_not_are_joined() -> None:
    yes, no = on("int", "ge", 10), on("int", "lt", 10)
    bounds = column("int", 10, 20)
    assert not may_match(And(yes, no), bounds)
    assert may_match(Or(yes, no), bounds)
    assert must_match(Or(no, yes), bounds)
    assert not must_match(And(no, yes), bounds)
    assert not may_match(Not(yes), bounds)
    assert must_match(Not(no), bounds)
    assert may_match(Always(True), bounds)
    assert must_match(Always(True), lambda _: None)
    assert not may_match(Always(False), lambda _: None)


def test_a_compiled_predicate_is_used_for_many_files() -> None:
    expr = And(on("int", "ge", 500), on("int", "lt", 510))
    may, must = compile_may_match(expr), compile_must_match(expr)
    files = [column("int", number, number + 4) for number in range(0, 1000, 5)]
    assert [number * 5 for number, file in enumerate(files) if may(file)] == [500, 505]
    assert [number * 5 for number, file in enumerate(files) if must(file)] == [500, 505]


# --- what an index can be asked for ---------------------------------------------


def test_a_test_drives_an_index_by_ranges() -> None:
    def number(value: int) -> bytes:
        return encode("int", value)

    assert driving_ranges(on("int", "eq", 5)) == [(number(5), number(5))]
    assert driving_ranges(on("int", "in", 7, 5, 7)) == [(number(5), number(5)), (number(7), number(7))]
    assert driving_ranges(on("int", "in")) == []
    assert driving_ranges(on("int", "lt", 5)) == driving_ranges(on("int", "le", 5)) == [(None, number(5))]
    assert driving_ranges(on("int", "gt", 5)) == driving_ranges(on("int", "ge", 5)) == [(number(5), None)]
    assert driving_ranges(on("string", "starts_with", "ab")) == [(b"ab", b"ac")]
    assert driving_ranges(on("binary", "starts_with", b"a\xff")) == [(b"a\xff", b"b")]
    assert driving_ranges(on("binary", "starts_with", b"\xff")) == [(b"\xff", None)]
    driving = ("eq", "in", "lt", "le", "gt", "ge", "starts_with")
    assert all((driving_ranges(on("string", op, "x")) is not None) == (op in driving) for op in OPS)


def test_the_parts_of_a_conjunction_come_with_the_most_selective_first() -> None:
    after, equals, other = on("int", "ge", 1), on("int", "eq", 2), Or(on("int", "lt", 3), on("int", "gt", 4))
    unlike, several = on("int", "ne", 5), on("int", "in", 6, 7)
    expr = And(And(other, unlike), And(after, And(several, equals)))
    assert best_conjuncts(expr) == [equals, several, after, unlike, other]
    assert best_conjuncts(Not(Or(unlike, Not(after)))) == [on("int", "eq", 5), after]
    assert best_conjuncts(equals) == [equals]


def test_the_ranges_of_a_column_are_those_of_the_whole_predicate() -> None:
    def span(low: int | None, high: int | None) -> Range:
        return (None if low is None else encode("int", low), None if high is None else encode("int", high))

    def ranges(expr: Predicate) -> list[Range]:
        return column_ranges(expr)[1][1]

    assert ranges(And(on("int", "ge", 1), on("int", "lt", 5))) == [span(1, 5)]
    assert ranges(Or(on("int", "eq", 5), on("int", "eq", 1))) == [span(1, 1), span(5, 5)]
    assert ranges(Or(on("int", "lt", 5), on("int", "gt", 3))) == [span(None, None)]
    assert ranges(Or(on("int", "gt", 5), on("int", "lt", 3))) == [span(None, 3), span(5, None)]
    assert ranges(And(on("int", "in", 1, 3, 5, 7), on("int", "gt", 3))) == [span(3, 3), span(5, 5), span(7, 7)]
    assert ranges(And(on("int", "lt", 1), on("int", "gt", 5))) == []
    wide, narrow = And(on("int", "ge", 1), on("int", "le", 10)), And(on("int", "ge", 2), on("int", "le", 3))
    assert ranges(Or(wide, narrow)) == ranges(Or(narrow, wide)) == [span(1, 10)]
    assert ranges(And(wide, Or(narrow, on("int", "gt", 9)))) == [span(2, 3), span(9, 10)]
    assert ranges(Not(Or(on("int", "lt", 1), on("int", "ge", 5)))) == [span(1, 5)]
    assert column_ranges(Or(on("int", "eq", 1), on("int", "is_null"))) == {}
    other = Test("eq", ("d",), 2, "int", (9,))
    assert column_ranges(And(on("int", "eq", 1), other)) == {1: ("int", [span(1, 1)]), 2: ("int", [span(9, 9)])}
    assert column_ranges(Or(on("int", "eq", 1), other)) == {}
    assert column_ranges(Always(True)) == {}


# --- partitions -----------------------------------------------------------------

MOMENTS = [
    datetime.min.replace(tzinfo=UTC),
    datetime(1969, 1, 1, tzinfo=UTC),
    datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    datetime(1970, 1, 1, tzinfo=UTC),
    datetime(1970, 1, 1, 1, tzinfo=UTC),
    datetime(2023, 12, 31, 23, tzinfo=UTC),
    NOON,
    NOON + timedelta(microseconds=1),
    datetime.max.replace(tzinfo=UTC),
]
SOURCES: dict[str, tuple[PrimitiveType, list[Any]]] = {
    "int": (IntegerType(), [-21, -20, -1, 0, 1, 19, 20, 2**31 - 1]),
    "long": (LongType(), [-21, -20, -1, 0, 1, 19, 20, 2**63 - 1]),
    "decimal(5, 2)": (DecimalType(5, 2), [Decimal(cents).scaleb(-2) for cents in (-99999, -20, -1, 0, 19, 20, 999)]),
    "string": (StringType(), VALUES["string"]),
    "binary": (BinaryType(), VALUES["binary"]),
    "double": (DoubleType(), VALUES["double"]),
    "uuid": (UUIDType(), VALUES["uuid"]),
    "time": (TimeType(), VALUES["time"]),
    "date": (DateType(), [*VALUES["date"], *(moment.date() for moment in MOMENTS)]),
    "timestamp": (TimestampType(), [moment.replace(tzinfo=None) for moment in MOMENTS]),
    "timestamptz": (TimestamptzType(), MOMENTS),
}
TIMES = ("year", "month", "day", "hour")
TRANSFORMS = ("identity", "bucket[4]", "truncate[1]", "truncate[2]", "truncate[20]", "void", *TIMES)


def pairs() -> list[tuple[str, str]]:
    return [
        (kind, name)
        for kind, (source, _) in SOURCES.items()
        for name in TRANSFORMS
        if parse_transform(name).can_transform(source)
    ]


@pytest.mark.parametrize(("kind", "name"), pairs())
def test_the_partition_of_a_matching_row_is_never_hidden(kind: str, name: str) -> None:
    source, values = SOURCES[kind]
    schema = Schema(NestedField(1, "c", source))
    transform = parse_transform(name)
    spec = PartitionSpec(PartitionField(1, 1000, transform, "p"))
    apply, result = transform.transform(source), str(transform.result_type(source))

    @settings(max_examples=25, deadline=None)
    @given(SEEDS)
    def check(seed: int) -> None:
        random = Random(seed)
        expr = a_predicate(random, lambda: a_test(random, {1: kind}, values), random.randint(1, 3))
        tested = partition_tests(expr, spec, schema)
        for value in [None, *values]:
            if any(truth(expr, {1: value}, engine) is True for engine in ENGINES):
                partition = apply(value)
                assert may_match(tested, {-1000: exact_bounds(result, [partition])}.get), value
                if name in TIMES and partition is not None and partition < 0:
                    # What old writers recorded for times before 1970.
                    assert may_match(tested, {-1000: exact_bounds(result, [partition + 1])}.get), value

    check()


def test_a_partition_of_nan_is_kept_for_engines_that_compare_it_as_false() -> None:
    schema = Schema(NestedField(1, "c", DoubleType()))
    spec = PartitionSpec(PartitionField(1, 1000, parse_transform("identity"), "p"))
    nan = {-1000: exact_bounds("double", [math.nan])}
    for test in (on("double", "ge", 1.0), on("double", "gt", 1.0)):
        assert may_match(partition_tests(test, spec, schema), nan.get)
        assert may_match(partition_tests(Not(test), spec, schema), nan.get)
    assert not may_match(partition_tests(on("double", "lt", 1.0), spec, schema), nan.get)


def test_a_partition_that_has_no_matching_row_is_hidden() -> None:
    schema = Schema(NestedField(1, "c", TimestamptzType()))
    spec = PartitionSpec(PartitionField(1, 1000, parse_transform("day"), "p"))
    expr = And(on("timestamptz", "ge", NOON), on("timestamptz", "lt", NOON + timedelta(days=2)))
    may = compile_may_match(partition_tests(expr, spec, schema))
    days = [date(2023, 12, 30) + timedelta(days=number) for number in range(7)]
    kept = [day for day in days if may({-1000: exact_bounds("date", [day])}.get)]
    assert kept == [date(2024, 1, 1), date(2024, 1, 2), date(2024, 1, 3)]
    assert not may({-1000: exact_bounds("date", [None])}.get)
