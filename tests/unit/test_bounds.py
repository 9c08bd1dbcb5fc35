"""Encoded values sort as the values do, and intervals of them are found by index ranges."""

from __future__ import annotations

import math
import struct
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.conversions import to_bytes
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IntegerType,
    LongType,
    PrimitiveType,
    StringType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from lakebook.errors import InvalidInput
from lakebook.iceberg.bounds import (
    EXACT,
    MAX_KEY,
    MIN_KEY,
    NOTHING,
    UNBOUNDED,
    ColumnBounds,
    decode,
    encode,
    encode_iceberg,
    from_iceberg,
    interval_key,
    probe_ranges,
    sort_key,
    width_class,
)

INTS = st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 3)
LONGS = st.integers(-(2**63), 2**63 - 1) | INTS | st.sampled_from([2**63 - 1, -(2**63), 2**53 + 1])
NUMBERS = st.sampled_from([0.0, -0.0, math.inf, -math.inf, 5e-324, -5e-324, 1.7976931348623157e308])
# Few different characters, so that many texts share a beginning; one of each length in UTF-8.
TEXTS = st.text(alphabet="\0aé￿\U00010000\U0010ffff", max_size=12)
MOMENTS = st.datetimes()

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "int": INTS,
    "long": LONGS,
    "float": st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, math.inf, -math.inf]),
    "double": st.floats(allow_nan=False) | NUMBERS,
    "decimal(9, 2)": st.decimals(-9999999, 9999999, places=2),
    "decimal(38, 10)": st.integers(-(10**38) + 1, 10**38 - 1).map(lambda number: Decimal(number).scaleb(-10, EXACT)),
    "date": st.dates(),
    "time": st.times(),
    "timestamp": MOMENTS,
    "timestamptz": MOMENTS.map(lambda moment: moment.replace(tzinfo=UTC)),
    "timestamp_ns": LONGS,
    "timestamptz_ns": LONGS,
    "string": TEXTS,
    "uuid": st.uuids(),
    "binary": st.binary(max_size=12),
    "fixed[3]": st.binary(min_size=3, max_size=3),
}  # fmt: skip
ICEBERG: dict[str, PrimitiveType] = {
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "decimal(9, 2)": DecimalType(9, 2),
    "decimal(38, 10)": DecimalType(38, 10),
    "date": DateType(),
    "time": TimeType(),
    "timestamp": TimestampType(),
    "timestamptz": TimestamptzType(),
    "timestamp_ns": TimestampNanoType(),
    "timestamptz_ns": TimestamptzNanoType(),
    "string": StringType(),
    "uuid": UUIDType(),
    "binary": BinaryType(),
    "fixed[3]": FixedType(3),
}
KINDS = sorted(VALUES)
#: Types whose values are of one order, because the first may become the second.
PROMOTIONS = [("int", "long"), ("float", "double"), ("decimal(9, 2)", "decimal(38, 2)")]
MIDNIGHT = datetime(2024, 1, 1, tzinfo=UTC).replace(tzinfo=None)
modest = settings(max_examples=25, deadline=None)


@pytest.mark.parametrize("kind", KINDS)
def test_encoded_values_sort_as_the_values_do(kind: str) -> None:
    @modest
    @given(VALUES[kind], VALUES[kind])
    def check(left: Any, right: Any) -> None:
        one, other = encode(kind, left), encode(kind, right)
        assert (one < other) == (left < right)
        assert (one == other) == (left == right)

    check()


@pytest.mark.parametrize(("narrow", "wide"), PROMOTIONS)
def test_a_promoted_column_keeps_its_order(narrow: str, wide: str) -> None:
    @modest
    @given(VALUES[narrow], VALUES.get(wide, VALUES[narrow]))
    def check(old: Any, new: Any) -> None:
        assert encode(narrow, old) == encode(wide, old)
        assert (encode(narrow, old) < encode(wide, new)) == (old < new)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_comes_back_as_it_was(kind: str) -> None:
    @modest
    @given(VALUES[kind])
    def check(value: Any) -> None:
        again = decode(kind, encode(kind, value))
        assert again == value
        assert type(again) is type(value)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_of_iceberg_is_understood(kind: str) -> None:
    @modest
    @given(VALUES[kind])
    def check(value: Any) -> None:
        data = to_bytes(ICEBERG[kind], value)
        assert from_iceberg(kind, data) == value
        assert encode_iceberg(kind, data) == encode(kind, value)

    check()


def test_a_bound_from_before_a_promotion_is_understood() -> None:
    assert from_iceberg("long", struct.pack("<i", -7)) == -7
    assert from_iceberg("double", struct.pack("<f", 0.5)) == 0.5
    assert from_iceberg("decimal(38, 2)", b"\x85") == Decimal("-1.23")
    assert encode_iceberg("long", struct.pack("<i", -7)) == encode("int", -7)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("int", b"\0"),
        ("long", b"\0" * 5),
        ("date", b""),
        ("string", b"\xff\xfe"),
        ("uuid", b"\0" * 3),
        ("decimal(9, 2)", b"\x7f" * 17),
        ("geometry", b"\0"),
    ],
)
def test_bytes_that_are_no_bound_are_refused(kind: str, data: bytes) -> None:
    with pytest.raises(InvalidInput):
        from_iceberg(kind, data)


def test_a_bound_that_says_nothing_is_unknown() -> None:
    assert encode_iceberg("double", struct.pack("<d", math.nan)) is None
    assert encode_iceberg("float", struct.pack("<f", math.nan)) is None
    assert encode_iceberg("int", b"\0") is None
    assert encode_iceberg("geometry", b"\0") is None
    # Cut within a character, it is still a bound of the characters.
    assert encode_iceberg("string", "é".encode()[:1]) == b"\xc3"
    assert math.isnan(from_iceberg("double", struct.pack("<d", math.nan)))


def test_both_zeros_are_one_value() -> None:
    assert encode("double", -0.0) == encode("double", 0.0) == encode("float", -0.0) == encode("double", 0)
    assert math.copysign(1, decode("double", encode("double", -0.0))) == 1


def test_dates_and_times_may_be_given_as_numbers() -> None:
    assert encode("date", 19723) == encode("date", date(2024, 1, 1))
    assert encode("time", 1_000_000) == encode("time", time(0, 0, 1))
    before = datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    assert encode("timestamp", -1) == encode("timestamp", before.replace(tzinfo=None)) == encode("timestamptz", before)
    assert encode("timestamptz", 0) == encode("timestamptz", datetime(1970, 1, 1, tzinfo=UTC))
    assert encode("date", 0) == encode("timestamptz", 0) == encode("int", 0)


def test_a_date_that_python_does_not_have_stays_a_number() -> None:
    for kind in ("date", "time", "timestamp", "timestamptz"):
        for number in (2**62, -(2**62)):
            assert decode(kind, encode(kind, number)) == number
    assert from_iceberg("date", struct.pack("<i", 2**31 - 1)) == 2**31 - 1
    assert encode_iceberg("timestamp", struct.pack("<q", 2**63 - 1)) == b"\xff" * 8


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", 2**63), ("int", -(2**63) - 1), ("int", True), ("int", 1.0), ("int", "1"), ("int", None),
        ("int", Decimal(1)), ("double", math.nan), ("double", "1"), ("double", True), ("double", 10**400),
        ("boolean", 1), ("boolean", "true"), ("decimal(9, 2)", Decimal("1.005")), ("decimal(9, 2)", Decimal("NaN")),
        ("decimal(9, 2)", Decimal("Infinity")), ("decimal(9, 2)", Decimal("1E+999999999")), ("decimal(9, 2)", 1.5),
        ("decimal(9, 2)", Decimal(2**127)), ("date", MIDNIGHT), ("date", "2024-01-01"), ("time", time(1, tzinfo=UTC)),
        ("timestamp", MIDNIGHT.replace(tzinfo=UTC)), ("timestamptz", MIDNIGHT), ("timestamp", date(2024, 1, 1)),
        ("string", b"x"), ("string", "\ud800"), ("string", None), ("uuid", "x"), ("uuid", b"x"), ("binary", "x"),
        ("binary", 3), ("fixed[3]", "abc"), ("timestamp_ns", 1.5), ("struct<>", 1), ("decimal(x)", 1), ("", 1),
    ],
    ids=ascii,
)  # fmt: skip
def test_what_is_no_value_of_the_type_is_refused(kind: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode(kind, value)
    assert caught.value.on == "column bounds"


@pytest.mark.parametrize(
    ("kind", "encoded"),
    [
        ("int", b""),
        ("double", b"\0" * 7),
        ("boolean", b"\2"),
        ("decimal(9, 2)", b"\0"),
        ("string", b"\xff"),
        ("uuid", b""),
    ],
)
def test_bytes_that_were_not_encoded_are_refused(kind: str, encoded: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode(kind, encoded)


# --- keys ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_never_falls_when_the_value_rises(kind: str) -> None:
    @modest
    @given(VALUES[kind], VALUES[kind])
    def check(left: Any, right: Any) -> None:
        low, high = sorted([encode(kind, left), encode(kind, right)])
        assert MIN_KEY <= sort_key(kind, low) <= sort_key(kind, high) <= MAX_KEY

    check()


def test_a_key_is_the_number_where_there_is_one() -> None:
    for kind in ("int", "long", "date", "time", "timestamp", "timestamptz"):
        for number in (MIN_KEY, -1, 0, 7, MAX_KEY):
            assert sort_key(kind, encode(kind, number)) == number
    assert sort_key("decimal(9, 2)", encode("decimal(9, 2)", Decimal("-1.23"))) == -123
    assert sort_key("decimal(38, 0)", encode("decimal(38, 0)", Decimal(10**37))) == MAX_KEY
    assert sort_key("decimal(38, 0)", encode("decimal(38, 0)", Decimal(-(10**37)))) == MIN_KEY
    assert sort_key("string", b"") == MIN_KEY
    assert sort_key("string", b"a") == sort_key("string", b"a\0") < sort_key("string", b"a\1")
    assert sort_key("string", b"\xff" * 9) == MAX_KEY
    assert sort_key("boolean", encode("boolean", False)) < sort_key("boolean", encode("boolean", True))
    assert sort_key("uuid", UUID(int=0).bytes) == MIN_KEY
    assert sort_key("double", encode("double", 0.0)) == 0


def test_the_class_of_an_interval_is_the_number_of_bits_of_its_width() -> None:
    assert [width_class(5, 5 + width) for width in (0, 1, 2, 3, 4, 7, 8)] == [0, 1, 2, 2, 3, 3, 4]
    assert width_class(MIN_KEY, MAX_KEY) == 64
    assert width_class(None, 1) == width_class(1, None) == width_class(2, 1) == UNBOUNDED


def test_the_index_entry_of_bounds_says_what_is_not_known() -> None:
    low, high = encode("double", 1.0), encode("double", 2.0)
    key = sort_key("double", low)
    assert interval_key("double", ColumnBounds(low, high, 9, 0, 0)) == (53, key)
    assert interval_key("double", ColumnBounds(low, high, 9, 0, None)) == (UNBOUNDED, key)
    assert interval_key("double", ColumnBounds(low, high, 9, 0, 1)) == (UNBOUNDED, key)
    assert interval_key("double", ColumnBounds(None, high, 9, 0, 0)) == (UNBOUNDED, MIN_KEY)
    assert interval_key("double", ColumnBounds(high, low, 9, 0, 0)) == (UNBOUNDED, MIN_KEY)
    assert interval_key("double", ColumnBounds(None, None, 9, 9, 0)) == (NOTHING, MIN_KEY)
    assert interval_key("int", ColumnBounds(encode("int", 1), encode("int", 4), 9, None, None)) == (2, 1)
    assert interval_key("int", ColumnBounds()) == (UNBOUNDED, MIN_KEY)


def found(entry: tuple[int, int], a: int | None, b: int | None) -> bool:
    """Whether a search over the index entry would return it."""
    return any(entry[0] == width and low <= entry[1] <= high for width, low, high in probe_ranges(a, b))


KEYS = (
    st.integers(MIN_KEY, MAX_KEY) | st.integers(-20, 20) | st.sampled_from([MIN_KEY, MIN_KEY + 1, MAX_KEY - 1, MAX_KEY])
)


@settings(max_examples=200, deadline=None)
@given(st.tuples(KEYS, KEYS).map(sorted), st.none() | KEYS, st.none() | KEYS)
def test_a_search_never_misses_an_interval_that_it_touches(interval: list[int], a: int | None, b: int | None) -> None:
    low, high = interval
    if (a is None or high >= a) and (b is None or low <= b) and (a is None or b is None or a <= b):
        assert found((width_class(low, high), low), a, b)
    if b is not None and b < low:
        assert not found((width_class(low, high), low), a, b)
    # Twice the width away, an interval is not looked at.
    if a is not None and high + 2 * (high - low) < a:
        assert not found((width_class(low, high), low), a, b)


def test_the_ranges_of_a_search_are_small_and_within_64_bits() -> None:
    ranges = probe_ranges(1000, 1000)
    assert [width for width, _, _ in ranges] == list(range(UNBOUNDED + 1))
    assert ranges[:4] == [(0, 1000, 1000), (1, 999, 1000), (2, 997, 1000), (3, 993, 1000)]
    assert ranges[-1] == (UNBOUNDED, MIN_KEY, 1000)
    for a, b in ((MIN_KEY, MIN_KEY), (MAX_KEY, MAX_KEY), (None, None), (MIN_KEY, None)):
        assert all(MIN_KEY <= low <= high <= MAX_KEY for _, low, high in probe_ranges(a, b))
    assert probe_ranges(5, 4) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_found_by_any_value_that_it_has(kind: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(st.lists(VALUES[kind], min_size=1, max_size=4), st.integers(0, 3))
    def check(values: list[Any], which: int) -> None:
        encoded = [encode(kind, value) for value in values]
        bounds = ColumnBounds(min(encoded), max(encoded), len(values), 0, 0)
        key = sort_key(kind, encoded[which % len(encoded)])
        assert found(interval_key(kind, bounds), key, key)
        assert found(interval_key(kind, bounds), None, key)
        assert found(interval_key(kind, bounds), key, None)

    check()
