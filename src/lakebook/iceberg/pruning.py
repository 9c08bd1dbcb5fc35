"""What column bounds say about a predicate: whether no row can fulfil it, or every row has to.

Both answers hold for engines for which NaN is the largest number and equal to itself (Spark) and for
those for which it compares false (Arrow), and for both answers to whether a null is not NaN. Bounds
may be wider than the values; a text's bounds may be cut short.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TypeAlias

from lakebook.iceberg.bounds import ColumnBounds, encode
from lakebook.predicates import FLOATING, Always, And, Or, Predicate, Test, pushed_down

BoundsOf: TypeAlias = Callable[[int], ColumnBounds | None]
#: The predicate as a function of what is known of a file's columns, by field id.
Compiled: TypeAlias = Callable[[BoundsOf], bool]
#: Encoded values from one to another, both included; `None` is an open end.
Range: TypeAlias = tuple[bytes | None, bytes | None]
_Check: TypeAlias = Callable[[ColumnBounds], bool]


def may_match(expr: Predicate, bounds_of: BoundsOf) -> bool:
    """Whether a row can exist for which the predicate is true; no only if none can."""
    return compile_may_match(expr)(bounds_of)


def must_match(expr: Predicate, bounds_of: BoundsOf) -> bool:
    """Whether the predicate is true for every row; yes only if that is certain."""
    return compile_must_match(expr)(bounds_of)


def compile_may_match(expr: Predicate) -> Compiled:
    """`may_match` for one predicate and many files: its values are encoded once."""
    return _compiled(pushed_down(expr, nan_too=True), _may, unknown=True)


def compile_must_match(expr: Predicate) -> Compiled:
    """`must_match` for one predicate and many files: its values are encoded once."""
    return _compiled(pushed_down(expr), _must, unknown=False)


def best_conjuncts(expr: Predicate) -> list[Predicate]:
    """The parts of a predicate that all have to be true, those first that leave the fewest files."""
    parts: list[Predicate] = []
    waiting = [pushed_down(expr, nan_too=True)]
    while waiting:
        part = waiting.pop()
        if isinstance(part, And):
            waiting += (part.right, part.left)
        else:
            parts.append(part)
    return sorted(parts, key=lambda part: _RANKS.get(part.op, 4) if isinstance(part, Test) else 5)


_RANKS = {"eq": 0, "in": 1, "starts_with": 2, "lt": 3, "le": 3, "gt": 3, "ge": 3}


def driving_ranges(test: Test) -> list[Range] | None:
    """The ranges of encoded values, in order, of which a file's bounds have to touch one.

    `None` if the test is not of a kind that says so. A file that may have NaN has to be taken
    for one without an upper bound.
    """
    if test.op not in _RANKS:
        return None
    values = sorted({encode(test.type, value) for value in test.values})
    if test.op in ("eq", "in"):
        return [(value, value) for value in values]
    if test.op == "starts_with":
        return [(values[0], _after_prefix(values[0]))]
    return [(None, values[0])] if test.op in ("lt", "le") else [(values[0], None)]


def column_ranges(expr: Predicate) -> dict[int, tuple[str, list[Range]]]:
    """For each field that the predicate limits, its type and the ranges of which a file has to touch one.

    Unlike `driving_ranges` this sees a whole predicate: both ends of `a >= 1 AND a < 5`, and both values
    of `a = 1 OR a = 5`. A field without ranges is one that no file can fulfil.
    """
    return _ranges(pushed_down(expr, nan_too=True))


def _ranges(expr: Predicate) -> dict[int, tuple[str, list[Range]]]:
    if isinstance(expr, Test):
        ranges = driving_ranges(expr)
        return {} if ranges is None else {expr.field_id: (expr.type, ranges)}
    if not isinstance(expr, (And, Or)):
        return {}
    left, right = _ranges(expr.left), _ranges(expr.right)
    if isinstance(expr, Or):
        return {key: (left[key][0], _united(left[key][1] + right[key][1])) for key in left.keys() & right.keys()}
    both = {key: (left[key][0], _intersected(left[key][1], right[key][1])) for key in left.keys() & right.keys()}
    return left | right | both


def _united(ranges: list[Range]) -> list[Range]:
    found: list[Range] = []
    for low, high in sorted(ranges, key=lambda item: (item[0] is not None, item[0] or b"")):
        if found and not _apart(found[-1][1], low):
            before = found[-1]
            found[-1] = (before[0], None if before[1] is None or high is None else max(before[1], high))
        else:
            found.append((low, high))
    return found


def _intersected(left: list[Range], right: list[Range]) -> list[Range]:
    found: list[Range] = []
    one = other = 0
    while one < len(left) and other < len(right):
        (low, high), (least, most) = left[one], right[other]
        if not _apart(high, least) and not _apart(most, low):
            found.append((_larger(low, least), _smaller(high, most)))
        # The one that ends first touches nothing of what follows.
        if high is not None and (most is None or high <= most):
            one += 1
        else:
            other += 1
    return found


def _apart(high: bytes | None, low: bytes | None) -> bool:
    return high is not None and low is not None and high < low


def _larger(left: bytes | None, right: bytes | None) -> bytes | None:
    return right if left is None else left if right is None else max(left, right)


def _smaller(left: bytes | None, right: bytes | None) -> bytes | None:
    return right if left is None else left if right is None else min(left, right)


def _after_prefix(prefix: bytes) -> bytes | None:
    """The least bytes above all that begin with this prefix."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


# --- evaluators ----------------------------------------------------------------


def _compiled(expr: Predicate, leaf: Callable[[Test], _Check | bool], *, unknown: bool) -> Compiled:
    if isinstance(expr, (And, Or)):
        left, right = _compiled(expr.left, leaf, unknown=unknown), _compiled(expr.right, leaf, unknown=unknown)
        if isinstance(expr, And):
            return lambda bounds_of: left(bounds_of) and right(bounds_of)
        return lambda bounds_of: left(bounds_of) or right(bounds_of)
    if isinstance(expr, Test):
        field_id, check = expr.field_id, leaf(expr)
        if not isinstance(check, bool):

            def test(bounds_of: BoundsOf) -> bool:
                bounds = bounds_of(field_id)
                return unknown if bounds is None else check(bounds)

            return test
        return lambda bounds_of: check
    value = isinstance(expr, Always) and expr.value
    return lambda bounds_of: value


def _empty(bounds: ColumnBounds) -> bool:
    """Whether every value is null, for certain."""
    return bounds.null_count is not None and bounds.null_count == bounds.value_count


def _no_number(bounds: ColumnBounds) -> bool:
    """Whether every value is null or NaN, for certain."""
    nulls, nans, values = bounds.null_count, bounds.nan_count, bounds.value_count
    return nulls is not None and (nulls == values or (nans is not None and nulls + nans == values))


def _may(test: Test) -> _Check | bool:
    """What has to hold of a column's bounds for a row to pass a test."""
    op = test.op
    floating = test.type in FLOATING
    if op == "is_null":
        return lambda bounds: bounds.null_count != 0
    if op == "not_null":
        return lambda bounds: not _empty(bounds)
    if op == "is_nan":
        return floating and (lambda bounds: bounds.nan_count != 0 and not _empty(bounds))
    if op == "not_nan":
        return not floating or (lambda bounds: bounds.nan_count is None or bounds.nan_count != bounds.value_count)
    values = sorted({encode(test.type, value) for value in test.values})
    if not values:
        return op == "not_in"
    no_value = _no_number if floating else _empty
    first = values[0]
    if op == "eq":
        return lambda bounds: (
            (bounds.lower is None or bounds.lower <= first)
            and (bounds.upper is None or bounds.upper >= first)
            and not no_value(bounds)
        )
    if op == "in":
        return lambda bounds: _touches(values, bounds) and not no_value(bounds)
    if op == "lt":
        return lambda bounds: (bounds.lower is None or bounds.lower < first) and not no_value(bounds)
    if op == "le":
        return lambda bounds: (bounds.lower is None or bounds.lower <= first) and not no_value(bounds)
    if op == "gt":
        return lambda bounds: (
            (bounds.upper is None or bounds.upper > first or (floating and bounds.nan_count != 0))
            and not _empty(bounds)
        )
    if op == "ge":
        return lambda bounds: (
            (bounds.upper is None or bounds.upper >= first or (floating and bounds.nan_count != 0))
            and not _empty(bounds)
        )
    if op in ("ne", "not_in"):
        # NaN differs from every value for all engines.
        some = frozenset(values)
        return lambda bounds: (
            (
                bounds.lower is None
                or bounds.lower != bounds.upper
                or bounds.lower not in some
                or (floating and bounds.nan_count != 0)
            )
            and not _empty(bounds)
        )
    if op == "starts_with":
        return lambda bounds: not _beside(first, bounds) and not _empty(bounds)
    return lambda bounds: not _within(first, bounds) and not _empty(bounds)


def _must(test: Test) -> _Check | bool:
    """What has to hold of a column's bounds for every row to pass a test."""
    op = test.op
    floating = test.type in FLOATING
    if op == "is_null":
        return lambda bounds: _empty(bounds)
    if op == "not_null":
        return lambda bounds: bounds.null_count == 0
    if op == "is_nan":
        return floating and (lambda bounds: bounds.nan_count is not None and bounds.nan_count == bounds.value_count)
    if op == "not_nan":
        return lambda bounds: bounds.null_count == 0 and (not floating or bounds.nan_count == 0)
    values = sorted({encode(test.type, value) for value in test.values})
    if not values:
        return False
    first = values[0]
    if op in ("ne", "not_in"):
        return lambda bounds: (
            bounds.null_count == 0 and (not _touches(values, bounds) or (floating and _no_number(bounds)))
        )

    def holds(bounds: ColumnBounds) -> bool:
        lower, upper = bounds.lower, bounds.upper
        if op in ("eq", "in"):
            return lower is not None and lower == upper and lower in some
        if op == "lt":
            return upper is not None and upper < first
        if op == "le":
            return upper is not None and upper <= first
        if op == "gt":
            return lower is not None and lower > first
        if op == "ge":
            return lower is not None and lower >= first
        return _within(first, bounds) if op == "starts_with" else _beside(first, bounds)

    some = frozenset(values)
    return lambda bounds: bounds.null_count == 0 and (not floating or bounds.nan_count == 0) and holds(bounds)


def _touches(values: list[bytes], bounds: ColumnBounds) -> bool:
    """Whether one of the values, which are in order, lies between the bounds."""
    at = 0 if bounds.lower is None else bisect_left(values, bounds.lower)
    return at < len(values) and (bounds.upper is None or values[at] <= bounds.upper)


def _beside(prefix: bytes, bounds: ColumnBounds) -> bool:
    """Whether no value can begin with a prefix."""
    lower, upper = bounds.lower, bounds.upper
    return (upper is not None and upper < prefix) or (lower is not None and lower[: len(prefix)] > prefix)


def _within(prefix: bytes, bounds: ColumnBounds) -> bool:
    """Whether every value that is there has to begin with a prefix."""
    lower, upper = bounds.lower, bounds.upper
    return lower is not None and upper is not None and lower.startswith(prefix) and upper.startswith(prefix)
