"""Conditions that people write, bound to the columns of a schema and projected onto partitions.

A text is read by PyIceberg's own parser, with these differences: names in double quotes may hold
anything (`"my.col"`), `X'0aff'` is a binary value, tabs in a text stay tabs, and `LIKE` refuses `_`,
which PyIceberg would take for an underscore and SQL takes for any character.

PyIceberg rounds a value that the column's type cannot hold. Here the comparison is changed instead,
so that it says the same: `x > 1.5` on an `int` becomes `x > 1`. Only for `float` and `double` is the
value rounded to the type, as Iceberg has it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import ROUND_FLOOR, Decimal
from itertools import count
from typing import Any, Literal, NamedTuple
from uuid import UUID

import pyiceberg.expressions as ice
from pyiceberg.expressions import literals
from pyiceberg.expressions.parser import boolean_expression
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, IdentityTransform, TimeTransform, TruncateTransform
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    PrimitiveType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)
from pyparsing import ParseBaseException

from lakebook.errors import InvalidInput, InvalidPredicate
from lakebook.iceberg.bounds import EXACT, decode, encode
from lakebook.names import shown
from lakebook.predicates import (
    INVERSE,
    Always,
    And,
    Not,
    Op,
    Or,
    Predicate,
    Shape,
    Test,
    all_of,
    normal_form,
    pushed_down,
)

#: How many characters a condition may have.
MAX_TEXT = 64 * 1024
#: How deep its parentheses may be.
MAX_PARENTHESES = 64

_EXAMPLE = "Write tests such as a = 1, \"My.Col\" >= '2024-01-31' or c.d IN ('x', 'y'), joined by AND, OR, NOT"

# The library's own grammar turns tabs within texts into spaces.
_GRAMMAR = boolean_expression.copy().parse_with_tabs()

_OPS: dict[type[ice.BooleanExpression], Op] = {
    ice.EqualTo: "eq",
    ice.NotEqualTo: "ne",
    ice.LessThan: "lt",
    ice.LessThanOrEqual: "le",
    ice.GreaterThan: "gt",
    ice.GreaterThanOrEqual: "ge",
    ice.In: "in",
    ice.NotIn: "not_in",
    ice.IsNull: "is_null",
    ice.NotNull: "not_null",
    ice.IsNaN: "is_nan",
    ice.NotNaN: "not_nan",
    ice.StartsWith: "starts_with",
    ice.NotStartsWith: "not_starts_with",
    ice.BoundEqualTo: "eq",
    ice.BoundNotEqualTo: "ne",
    ice.BoundLessThan: "lt",
    ice.BoundLessThanOrEqual: "le",
    ice.BoundGreaterThan: "gt",
    ice.BoundGreaterThanOrEqual: "ge",
    ice.BoundIn: "in",
    ice.BoundNotIn: "not_in",
    ice.BoundIsNull: "is_null",
    ice.BoundNotNull: "not_null",
    ice.BoundIsNaN: "is_nan",
    ice.BoundNotNaN: "not_nan",
    ice.BoundStartsWith: "starts_with",
    ice.BoundNotStartsWith: "not_starts_with",
}


def parse_where(where: str | ice.BooleanExpression | Predicate | None, schema: Schema) -> Predicate:
    """A condition, bound to the columns of a schema; nothing is the condition that is always true.

    The result has no `Not`, and each value has the type of its column. A condition that can never
    be true, such as `x > 10000000000` for an `int`, is `Always(False)`. A predicate that was bound to
    another schema of the table is bound anew, by its field ids.
    """
    if where is None:
        return Always(True)
    columns = _Columns(schema)
    if isinstance(where, str):
        read = _read(where)
        expr: Any = read.expr
    elif isinstance(where, (ice.BooleanExpression, Always, Test, And, Or, Not)):
        read, expr = _Text(), where
    else:
        raise InvalidPredicate(f"{shown(where)} is neither a text nor an expression", on="predicate", remedy=_EXAMPLE)

    def leaf(node: Any, negated: bool) -> Predicate:
        if isinstance(node, Test):
            return _bind(_inverse(node.op, negated), tuple(node.values), columns.by_id(node.field_id))
        op = _OPS.get(type(node))
        if op is None:
            raise InvalidPredicate(f"{shown(node)} is not a test that is known", on="predicate")
        return _bind(_inverse(op, negated), read.values_of(node), columns.of_term(node.term, read))

    return normal_form(expr, _shape, leaf)


def _inverse(op: Op, negated: bool) -> Op:
    return INVERSE.get(op, op) if negated else op


def _shape(node: Any) -> Shape:
    if isinstance(node, (And, ice.And)):
        return "and", (node.left, node.right)
    if isinstance(node, (Or, ice.Or)):
        return "or", (node.left, node.right)
    if isinstance(node, (Not, ice.Not)):
        return "not", (node.child,)
    if isinstance(node, Always):
        return "always", (node.value,)
    if isinstance(node, (ice.AlwaysTrue, ice.AlwaysFalse)):
        return "always", (isinstance(node, ice.AlwaysTrue),)
    return "leaf", (node,)


# --- reading a text ------------------------------------------------------------

# The text in single quotes is what the library's parser takes for one.
_TOKEN = re.compile(
    r"""
      (?P<text>   '(?:[^'\n\r\\]|''|\\(?:[^x]|x[0-9a-fA-F]+))*+')
    | (?P<binary> [xX]'[^']*')
    | (?P<name>   "(?:[^"]|"")*")
    | (?P<word>   [A-Za-z_][A-Za-z0-9_$]*)
    | (?P<space>  \s+)
    | (?P<open>   ['"])
    | (?P<other>  .)
    """,
    re.VERBOSE | re.ASCII,
)
# Words that stand for quoted names and binary values while the library reads.
_PLACEHOLDER = re.compile("_[0-9]+_")


@dataclass
class _Text:
    """What was read: the expression, and what stands for what in it."""

    expr: ice.BooleanExpression | None = None
    names: dict[str, str] = field(default_factory=dict)
    binaries: dict[str, bytes] = field(default_factory=dict)

    def values_of(self, node: Any) -> tuple[Any, ...]:
        """The values of a test as plain Python values."""
        found: Iterable[literals.Literal[Any]] = ()
        if isinstance(node, (ice.SetPredicate, ice.BoundSetPredicate)):
            found = node.literals
        elif isinstance(node, (ice.LiteralPredicate, ice.BoundLiteralPredicate)):
            found = (node.literal,)
        values = [_plain(literal) for literal in found]
        if self.binaries:
            values = [self.binaries.get(value, value) if isinstance(value, str) else value for value in values]
        return tuple(values)


def _read(text: str) -> _Text:
    if len(text) > MAX_TEXT:
        raise InvalidPredicate(
            f"the condition has {len(text)} characters",
            on="predicate",
            remedy=f"Use at most {MAX_TEXT}, or give an expression instead of a text",
        )
    if not text.strip():
        raise InvalidPredicate("the condition is empty", on="predicate", remedy=_EXAMPLE)
    read = _Text()
    taken = set(_PLACEHOLDER.findall(text))
    free = (word for word in map("_{}_".format, count()) if word not in taken)
    pieces: list[str] = []
    places: list[tuple[int, int]] = []
    length = depth = 0
    before = ""
    for match in _TOKEN.finditer(text):
        kind, piece = match.lastgroup, match.group()
        if kind == "open":
            raise _unreadable(text, match.start(), f"the quote {piece} is not closed in its line")
        if kind == "name":
            name = piece[1:-1].replace('""', '"')
            placeholder = next(free)
            read.names[placeholder] = name
            piece = f" {placeholder} "  # It must not grow together with a word beside it.
        elif kind == "binary":
            try:
                value = bytes.fromhex(piece[2:-1])
            except ValueError:
                raise _unreadable(text, match.start(), "a binary value has two hexadecimal digits per byte") from None
            placeholder = next(free)
            read.binaries[placeholder] = value
            piece = f"'{placeholder}'"
        elif kind == "text" and before.lower() == "like":
            piece = _pattern(text, match.start(), piece)
        elif piece == "(":
            depth += 1
            if depth > MAX_PARENTHESES:
                raise _unreadable(text, match.start(), f"parentheses are more than {MAX_PARENTHESES} deep")
        elif piece == ")":
            depth -= 1
        if kind != "space":
            before = piece
        places.append((length, match.start()))
        pieces.append(piece)
        length += len(piece)
    read.expr = _parsed(text, "".join(pieces), places)
    return read


def _pattern(text: str, place: int, pattern: str) -> str:
    if re.search(r"(?<!\\)_", pattern):
        raise _unreadable(
            text,
            place,
            "LIKE knows only a % at the end",
            remedy=r"Write \_ for an underscore and \% for a percent sign",
        )
    return pattern.replace(r"\_", "_")


def _parsed(text: str, prepared: str, places: Sequence[tuple[int, int]]) -> ice.BooleanExpression:
    try:
        expr = _GRAMMAR.parse_string(prepared, parse_all=True)[0]
    except ParseBaseException as error:
        ours, theirs = max((place for place in places if place[0] <= error.loc), default=(0, 0))
        raise _unreadable(text, theirs + error.loc - ours, "it cannot be read") from None
    except RecursionError:
        raise _unreadable(text, 0, "it is too deep") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        # What the grammar's own actions refuse, in words of PyIceberg's and of Python's.
        reasons = {"LIKE": "LIKE knows only a % at the end", "Boolean": "TRUE and FALSE cannot be joined with tests"}
        reason = next((reasons[word] for word in reasons if word in str(error)), "a value cannot be read")
        raise InvalidPredicate(reason, on="predicate", remedy=_EXAMPLE) from None
    if not isinstance(expr, ice.BooleanExpression):
        raise InvalidPredicate("it is no condition", on="predicate", remedy=_EXAMPLE)
    return expr


def _unreadable(text: str, place: int, what: str, remedy: str = _EXAMPLE) -> InvalidPredicate:
    rest = text[place:].strip()
    where = f"at character {place + 1}, {shown(rest[:40])}" if rest else "at its end"
    return InvalidPredicate(f"{what} ({where})", on="predicate", remedy=remedy)


# --- the columns of a schema ---------------------------------------------------


class _Column(NamedTuple):
    path: tuple[str, ...]
    field_id: int
    type: IcebergType
    obstacle: str = ""

    def __str__(self) -> str:
        return f"column {shown('.'.join(self.path))}"

    def test(self, op: Op, *values: Any) -> Test:
        return Test(op, self.path, self.field_id, str(self.type), values)

    def refusal(self, what: str, remedy: str = "") -> InvalidPredicate:
        return InvalidPredicate(what, on=str(self), remedy=remedy)


class _Columns:
    """The columns of a schema, by name and by id."""

    def __init__(self, schema: Schema) -> None:
        self._all: list[_Column] = []
        self._add(schema.as_struct(), (), "")

    def _add(self, kind: IcebergType, path: tuple[str, ...], obstacle: str) -> None:
        inside = obstacle or "it lies inside a list or a map"
        if isinstance(kind, StructType):
            for child in kind.fields:
                self._add_field(child.name, child.field_id, child.field_type, path, obstacle)
        elif isinstance(kind, ListType):
            self._add_field("element", kind.element_id, kind.element_type, path, inside)
        elif isinstance(kind, MapType):
            self._add_field("key", kind.key_id, kind.key_type, path, inside)
            self._add_field("value", kind.value_id, kind.value_type, path, inside)

    def _add_field(self, name: str, field_id: int, kind: IcebergType, path: tuple[str, ...], obstacle: str) -> None:
        here = (*path, name)
        own = "" if isinstance(kind, PrimitiveType) else f"it is a {_family(kind)}"
        self._all.append(_Column(here, field_id, kind, obstacle or own))
        self._add(kind, here, obstacle)

    def by_id(self, field_id: int) -> _Column:
        for column in self._all:
            if column.field_id == field_id:
                return self._testable(column)
        raise InvalidPredicate(f"there is no column with the id {field_id}", on="schema")

    def of_term(self, term: Any, read: _Text) -> _Column:
        if isinstance(term, ice.BoundReference):
            return self.by_id(term.field.field_id)
        if not isinstance(term, ice.Reference):
            raise InvalidPredicate(f"{shown(term)} is not a column", on="predicate")
        parts = term.name.split(".")
        quoted = any(part in read.names for part in parts)
        return self._testable(self._named(tuple(read.names.get(part, part) for part in parts), quoted))

    def _named(self, parts: tuple[str, ...], quoted: bool) -> _Column:
        """Exactly this name first, then one that differs in case only.

        Without quotes, `a.b` is the field b of a as well as a column of that name.
        """

        def form(path: Sequence[str]) -> object:
            return tuple(path) if quoted else ".".join(path)

        def lower(path: Sequence[str]) -> object:
            return form([part.lower() for part in path])

        for way in (form, lower):
            found = [column for column in self._all if way(column.path) == way(parts)]
            if len(found) == 1:
                return found[0]
            if found:
                names = ", ".join(sorted(shown(".".join(column.path)) for column in found))
                raise InvalidPredicate(
                    f"the column {shown('.'.join(parts))} is ambiguous", on="schema", remedy=f"Write one of {names}"
                )
        raise InvalidPredicate(
            f"there is no column {shown('.'.join(parts))}",
            on="schema",
            remedy="Names with other characters than A-Z a-z 0-9 _ have to be in double quotes",
        )

    def _testable(self, column: _Column) -> _Column:
        if column.obstacle:
            raise column.refusal(f"it cannot be tested: {column.obstacle}")
        return column


def _family(kind: IcebergType) -> str:
    return {StructType: "struct", ListType: "list", MapType: "map"}.get(type(kind), "type without tests")


# --- values of a column's type -------------------------------------------------


class _Place(NamedTuple):
    """Where a value lies among the values of a column's type.

    `between` is above `value` and below the one after it; `above` and `below` are beyond all of them.
    """

    kind: Literal["exact", "between", "above", "below"]
    value: Any = None


_ABOVE, _BELOW = _Place("above"), _Place("below")
_DAY = 86_400_000_000
_TIME = re.compile(r"\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?", re.ASCII)
_TIMESTAMP = re.compile(
    r"(\d{4}-\d{2}-\d{2})(?:[T ](\d{2}:\d{2}:\d{2}(?:\.\d{1,6})?)\s?(Z|[+-]\d{2}:\d{2})?)?", re.ASCII
)
_ZONE = "Write the time with its zone, such as '2024-01-31T10:00:00+00:00'"
_NO_ZONE = "Write the time without a zone, such as '2024-01-31T10:00:00'"


def _bind(op: Op, values: tuple[Any, ...], column: _Column) -> Predicate:
    """A test of a column with values of the column's own type that is true for the same rows."""
    if op not in INVERSE:
        raise column.refusal(f"there is no operation {shown(op)}", f"The operations are {', '.join(INVERSE)}")
    if op in ("is_null", "not_null"):
        return column.test(op)
    if op in ("is_nan", "not_nan"):
        floating = isinstance(column.type, (FloatType, DoubleType))
        return column.test(op) if floating else Always(op == "not_nan")
    if op in ("in", "not_in"):
        return _bind_set(op, values, column)
    if len(values) != 1:
        raise column.refusal(f"{op} needs one value, not {len(values)}")
    if op in ("starts_with", "not_starts_with"):
        return _bind_prefix(op, values[0], column)
    return _bind_comparison(op, _placed(values[0], column), column)


def _bind_comparison(op: Op, place: _Place, column: _Column) -> Predicate:
    if place.kind == "exact":
        return column.test(op, place.value)
    if op == "eq":
        return Always(False)
    if op == "ne":
        return column.test("not_null")
    below = op in ("lt", "le")
    if place.kind == "between":
        return column.test("le" if below else "gt", place.value)
    if isinstance(column.type, (FloatType, DoubleType)):
        # Beyond all numbers there is still an infinity.
        if place.kind == "above":
            return column.test("lt" if below else "ge", math.inf)
        return column.test("le" if below else "gt", -math.inf)
    return column.test("not_null") if below == (place.kind == "above") else Always(False)


def _bind_set(op: Op, values: tuple[Any, ...], column: _Column) -> Predicate:
    if not values:
        return Always(op == "not_in")
    kept = {}
    for value in values:
        place = _placed(value, column)
        if place.kind == "exact":
            kept[encode(str(column.type), place.value)] = place.value
    if not kept:
        return Always(False) if op == "in" else column.test("not_null")
    if len(kept) == 1:
        return column.test("eq" if op == "in" else "ne", *kept.values())
    return column.test(op, *(value for _, value in sorted(kept.items(), key=lambda item: item[0])))


def _bind_prefix(op: Op, value: Any, column: _Column) -> Predicate:
    if not isinstance(column.type, (StringType, BinaryType)):
        raise column.refusal(f"a column of the type {column.type} has no prefix")
    prefix = _placed(value, column).value
    if prefix:
        return column.test(op, prefix)
    return column.test("not_null") if op == "starts_with" else Always(False)


def _placed(value: Any, column: _Column) -> _Place:
    place = _PLACES.get(type(column.type))
    if place is None:
        raise column.refusal(f"columns of the type {column.type} cannot be compared")
    try:
        found = place(value, column)
        if found.value is not None:
            encode(str(column.type), found.value)
    except (ValueError, TypeError, ArithmeticError, InvalidInput) as error:
        if isinstance(error, InvalidPredicate):
            raise
        raise column.refusal(f"{shown(value)} is not a value of the type {column.type}") from None
    return found


def _exact(value: Any) -> _Place:
    return _Place("exact", value)


def _number(value: Any) -> Decimal:
    """A number of any kind, as it is; what is no number is refused."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, str)):
        raise TypeError
    number = Decimal(value)
    if number.is_nan():
        raise ValueError
    return number


def _among(units: Decimal, least: int, most: int, made: Callable[[int], Any]) -> _Place:
    """Where a number lies among whole ones."""
    # The comparisons come first: the digits of 1E+999999 are not worth writing out.
    if units > most:
        return _ABOVE
    if units < least:
        return _BELOW
    floor = int(units.to_integral_value(ROUND_FLOOR))
    return _Place("exact" if units == floor else "between", made(floor))


def _place_whole(value: Any, column: _Column) -> _Place:
    kind = column.type
    assert isinstance(kind, (IntegerType, LongType))
    return _among(_number(value), kind.min, kind.max, int)


def _place_decimal(value: Any, column: _Column) -> _Place:
    kind = column.type
    assert isinstance(kind, DecimalType)
    # 0.1 as a float is meant as 0.1, not as the 55 digits that it is.
    number = _number(repr(value) if isinstance(value, float) else value)
    most = 10**kind.precision - 1
    return _among(
        number.scaleb(kind.scale, EXACT), -most, most, lambda units: Decimal(units).scaleb(-kind.scale, EXACT)
    )


def _place_double(value: Any, _: _Column) -> _Place:
    number = _number(value)
    rounded = float(number)
    if math.isinf(rounded) and number.is_finite():
        return _ABOVE if rounded > 0 else _BELOW
    return _exact(rounded + 0.0)


def _place_float(value: Any, column: _Column) -> _Place:
    place = _place_double(value, column)
    if place.kind != "exact":
        return place
    try:
        return _exact(struct.unpack("<f", struct.pack("<f", place.value))[0])
    except OverflowError:
        return _ABOVE if place.value > 0 else _BELOW


def _place_boolean(value: Any, _: _Column) -> _Place:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return _exact(value.lower() == "true")
    return _exact(value)


def _place_string(value: Any, column: _Column) -> _Place:
    if not isinstance(value, str):
        raise column.refusal(f"it is a text, and {shown(value)} is none", "Put the value in single quotes")
    return _exact(value)


def _place_bytes(value: Any, column: _Column) -> _Place:
    if not isinstance(value, bytes):
        raise column.refusal(f"it is binary, and {shown(value)} is not", "Write the value as X'0aff'")
    if isinstance(column.type, FixedType) and len(value) != len(column.type):
        raise column.refusal(f"its values have {len(column.type)} bytes, not {len(value)}")
    return _exact(value)


def _place_uuid(value: Any, _: _Column) -> _Place:
    if isinstance(value, bytes):
        return _exact(UUID(bytes=value))
    return _exact(UUID(value) if isinstance(value, str) else value)


def _place_date(value: Any, _: _Column) -> _Place:
    if isinstance(value, datetime):
        # Noon lies between two dates.
        micros = encode("timestamp", value)
        days, rest = divmod(int.from_bytes(micros, "big") - 2**63, _DAY)
        return _Place("between" if rest else "exact", _of_units("date", days))
    if isinstance(value, str):
        return _exact(date.fromisoformat(value))
    return _exact(_of_units("date", value) if isinstance(value, int) else value)


def _place_time(value: Any, _: _Column) -> _Place:
    if isinstance(value, str):
        # Python would drop a zone, or digits beyond the sixth.
        if not _TIME.fullmatch(value):
            raise ValueError
        return _exact(time.fromisoformat(value))
    return _exact(_of_units("time", value) if isinstance(value, int) else value)


def _place_timestamp(value: Any, column: _Column) -> _Place:
    kind = str(column.type)
    zoned = kind == "timestamptz"
    if isinstance(value, str):
        match = _TIMESTAMP.fullmatch(value)
        if match is None:
            raise column.refusal(f"{shown(value)} is not a time", _ZONE if zoned else _NO_ZONE)
        day, clock, zone = match[1], match[2] or "00:00:00", match[3] or ""
        if zoned != bool(zone):
            raise column.refusal(f"{shown(value)} has {'no' if zoned else 'a'} zone", _ZONE if zoned else _NO_ZONE)
        value = literals.StringLiteral(f"{day}T{clock}{'+00:00' if zone == 'Z' else zone}").to(column.type).value
    elif isinstance(value, datetime):
        # PyIceberg's expressions have lost the zone, and are in UTC.
        aware = value.replace(tzinfo=UTC) if zoned and value.tzinfo is None else value
        value = int.from_bytes(encode(kind, aware), "big") - 2**63
    elif isinstance(value, date) and not zoned:
        return _exact(datetime.combine(value, time()))
    return _exact(_of_units(kind, value))


def _of_units(kind: str, units: Any) -> Any:
    """A date or time from Iceberg's number of days or microseconds; what Python cannot hold is refused."""
    value = decode(kind, encode(kind, units))
    if isinstance(value, int):
        raise ValueError
    return value


_PLACES: dict[type[IcebergType], Callable[[Any, _Column], _Place]] = {
    BooleanType: _place_boolean,
    IntegerType: _place_whole,
    LongType: _place_whole,
    FloatType: _place_float,
    DoubleType: _place_double,
    DecimalType: _place_decimal,
    DateType: _place_date,
    TimeType: _place_time,
    TimestampType: _place_timestamp,
    TimestamptzType: _place_timestamp,
    StringType: _place_string,
    UUIDType: _place_uuid,
    BinaryType: _place_bytes,
    FixedType: _place_bytes,
}


def _plain(literal: literals.Literal[Any]) -> Any:
    """The value of a PyIceberg literal as a plain Python value, or an infinity for what is beyond its type."""
    value = literal.value
    if isinstance(literal, literals.AboveMax):
        return Decimal("Infinity")
    if isinstance(literal, literals.BelowMin):
        return Decimal("-Infinity")
    if isinstance(literal, literals.UUIDLiteral):
        return UUID(bytes=value)
    units = _UNITS.get(type(literal))
    if units is None:
        return value
    try:
        return _of_units(units, value)
    except (ValueError, InvalidInput):
        raise InvalidPredicate(f"{shown(literal)} is out of range", on="predicate") from None


_UNITS: dict[type[Any], str] = {
    literals.DateLiteral: "date",
    literals.TimeLiteral: "time",
    literals.TimestampLiteral: "timestamp",
}


# --- partitions ----------------------------------------------------------------


def partition_tests(expr: Predicate, spec: PartitionSpec, schema: Schema) -> Predicate:
    """What the partition values of every row for which the predicate is true fulfil.

    The tests are on partition fields: their `field_id` is the negative id of the partition field, their
    `type` the result type of its transform. Days, months, years, hours and buckets are numbers.
    """
    sources: dict[int, list[PartitionField]] = {}
    for part in spec.fields:
        sources.setdefault(part.source_id, []).append(part)

    def leaf(test: Test, _: bool) -> Predicate:
        try:
            return all_of(_projected(test, part, schema) for part in sources.get(test.field_id, ()))
        except OverflowError:  # A number of days or microseconds that no calendar has.
            return Always(True)

    return normal_form(pushed_down(expr, nan_too=True), _shape, leaf)


def _projected(test: Test, part: PartitionField, schema: Schema) -> Predicate:
    transform, op = part.transform, test.op
    try:
        source = schema.find_field(test.field_id).field_type
    except ValueError:  # The column is gone; the files of its time are still there.
        return Always(True)
    if not transform.can_transform(source):
        return Always(True)
    kind = str(transform.result_type(source))
    moved = replace(test, path=(part.name,), field_id=-part.field_id, type=kind)
    if isinstance(transform, IdentityTransform):
        return moved
    if not isinstance(transform, (BucketTransform, TimeTransform, TruncateTransform)):
        return Always(True)
    if op in ("is_null", "not_null"):
        return moved
    # Whether a null is not NaN is left open, and nothing is missing in an empty set.
    if op in ("is_nan", "not_nan") or not test.values:
        return Always(True)
    apply: Callable[[Any], Any] = transform.transform(source)
    # A decimal has to have its column's scale before it is hashed, or moved by one.
    values = [decode(test.type, encode(test.type, value)) for value in test.values]
    # A row that fulfils any other test has a value, and its partition too.
    present = replace(moved, op="not_null", values=())

    def make(op: Op, values: Iterable[Any]) -> Predicate:
        found = sorted(set(values))
        if any(_overflows(kind, value) for value in found):
            return present
        if op in ("eq", "in"):
            op = "eq" if len(found) == 1 else "in"
        return replace(moved, op=op, values=tuple(found))

    if op in ("eq", "in"):
        results = [apply(value) for value in values]
        return make("in", _with_old_values(results) if isinstance(transform, TimeTransform) else results)
    value = values[0]
    if isinstance(transform, BucketTransform):
        return present
    if op in ("starts_with", "not_starts_with") and isinstance(transform, TruncateTransform):
        if len(value) > transform.width:
            return make("eq", [apply(value)]) if op == "starts_with" else present
        return make(op, [value])
    if op in ("lt", "le"):
        last = apply(_step(value, -1) if op == "lt" else value)
        return make("le", [max(_with_old_values([last]))] if isinstance(transform, TimeTransform) else [last])
    if op in ("gt", "ge"):
        return make("ge", [apply(_step(value, 1) if op == "gt" else value)])
    return present


def _with_old_values(values: Sequence[int]) -> list[int]:
    """The values of a time transform, and those that old writers gave to times before 1970.

    They rounded towards zero, and their files are still there: see Iceberg's own projections.
    """
    return [*values, *(value + 1 for value in values if value < 0)]


def _step(value: Any, by: int) -> Any:
    """The next value above or below; the value itself where there is none or it is not known."""
    try:
        if isinstance(value, int):
            return value + by
        if isinstance(value, Decimal):
            return EXACT.add(value, Decimal((int(by < 0), (1,), int(value.as_tuple().exponent))))
        if isinstance(value, datetime):
            return value + timedelta(microseconds=by)
        if isinstance(value, date):
            return value + timedelta(days=by)
    except OverflowError:
        pass
    return value


def _overflows(kind: str, value: Any) -> bool:
    # The least numbers have no multiple of the width below them, and writers have wrapped around.
    bits = {"int": 31, "long": 63}.get(kind)
    return bits is not None and not -(2**bits) <= value < 2**bits
