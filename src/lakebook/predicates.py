"""Conditions on the rows of a table, as plain values that every layer can read.

A predicate selects the rows for which it is TRUE. As in SQL, a comparison with a null is
neither true nor false, and `Not` of it is not true either; `is_null` and `not_null` are always
true or false. Engines disagree on whether a null is `not_nan`, and that is left open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

from lakebook.errors import InvalidPredicate

Op: TypeAlias = Literal[
    "eq", "ne", "lt", "le", "gt", "ge", "in", "not_in",
    "is_null", "not_null", "is_nan", "not_nan", "starts_with", "not_starts_with",
]  # fmt: skip

#: Each operation, and the one that is true where it is false.
INVERSE: dict[Op, Op] = {
    "eq": "ne",
    "ne": "eq",
    "lt": "ge",
    "ge": "lt",
    "gt": "le",
    "le": "gt",
    "in": "not_in",
    "not_in": "in",
    "is_null": "not_null",
    "not_null": "is_null",
    "is_nan": "not_nan",
    "not_nan": "is_nan",
    "starts_with": "not_starts_with",
    "not_starts_with": "starts_with",
}

#: The types that have NaN.
FLOATING = frozenset({"float", "double"})

#: How often AND and OR may alternate on the way from the top of a predicate to a test.
MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Always:
    """The predicate that is true for every row, or for none."""

    value: bool


@dataclass(frozen=True, slots=True)
class Test:
    """One column against no, one or several values.

    `type` is the column's Iceberg type (`int`, `decimal(10, 2)`, `timestamptz`), `values` are
    plain Python values of it: an aware datetime in UTC for `timestamptz`, a naive one for
    `timestamp`. A negative `field_id` is that of a partition field.
    """

    __test__: ClassVar[bool] = False  # pytest would take the name for a test case

    op: Op
    path: tuple[str, ...]
    field_id: int
    type: str
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class And:
    """True where both sides are."""

    left: Predicate
    right: Predicate


@dataclass(frozen=True, slots=True)
class Or:
    """True where at least one side is."""

    left: Predicate
    right: Predicate


@dataclass(frozen=True, slots=True)
class Not:
    """True where the other is false; a null stays a null."""

    child: Predicate


Predicate: TypeAlias = Always | Test | And | Or | Not

#: How a node of some tree is made up: its kind, and what it joins.
Shape: TypeAlias = tuple[Literal["and", "or", "not", "always", "leaf"], tuple[Any, ...]]


def pushed_down(expr: Predicate, *, nan_too: bool = False) -> Predicate:
    """The same predicate without `Not`, as shallow as it can be.

    `Not(x >= 5)` becomes `x < 5`, which is right for every value but NaN: NaN is the largest
    number for some engines and compares false for others. With `nan_too` the result is
    true for NaN wherever one of them says so; it may then be true for more rows.
    """

    def leaf(test: Test, negated: bool) -> Predicate:
        if not negated:
            return test
        inverse = replace(test, op=INVERSE[test.op])
        if nan_too and test.op in ("gt", "ge") and test.type in FLOATING:
            return Or(inverse, replace(test, op="is_nan", values=()))
        return inverse

    return normal_form(expr, _shape, leaf)


def fields_of(expr: Predicate) -> frozenset[int]:
    """The ids of all fields that are tested."""
    found: set[int] = set()
    waiting: list[Predicate] = [expr]
    while waiting:
        kind, parts = _shape(waiting.pop())
        if kind == "leaf":
            found.add(parts[0].field_id)
        elif kind != "always":
            waiting.extend(parts)
    return frozenset(found)


def all_of(parts: Iterable[Predicate]) -> Predicate:
    """The predicates joined by AND, as a balanced tree; `Always(True)` if there are none."""
    return _joined(And, parts, neutral=True)


def any_of(parts: Iterable[Predicate]) -> Predicate:
    """The predicates joined by OR, as a balanced tree; `Always(False)` if there are none."""
    return _joined(Or, parts, neutral=False)


def normal_form(
    node: Any, shape: Callable[[Any], Shape], leaf: Callable[[Any, bool], Predicate], *, negated: bool = False
) -> Predicate:
    """A tree of any kind as a predicate in which only leaves are negated.

    `shape` says what a node joins, `leaf` makes a predicate of a leaf, negated or not. A chain of
    a thousand ANDs is no deep tree here; a tree in which AND and OR alternate without end is refused.
    """
    return _normal(node, negated, shape, leaf, 0)


def _normal(
    node: Any, negated: bool, shape: Callable[[Any], Shape], leaf: Callable[[Any, bool], Predicate], depth: int
) -> Predicate:
    if depth > MAX_DEPTH:
        raise InvalidPredicate(
            f"AND and OR alternate more than {MAX_DEPTH} times",
            on="predicate",
            remedy="Write it with fewer parentheses",
        )
    joined: str | None = None
    parts: list[Predicate] = []
    # A stack instead of calls: chains are as long as people make them.
    waiting = [(node, negated)]
    while waiting:
        node, negated = waiting.pop()
        kind, children = shape(node)
        if kind == "not":
            waiting.append((children[0], not negated))
        elif kind == "always":
            parts.append(Always(children[0] != negated))
        elif kind == "leaf":
            parts.append(leaf(children[0], negated))
        else:
            effective = kind if not negated else "or" if kind == "and" else "and"
            if joined is None:
                joined = effective
            if effective == joined:
                waiting.extend((child, negated) for child in reversed(children))
            else:
                parts.append(_normal(node, negated, shape, leaf, depth + 1))
    return any_of(parts) if joined == "or" else all_of(parts)


def _shape(expr: Predicate) -> Shape:
    if isinstance(expr, Test):
        return "leaf", (expr,)
    if isinstance(expr, And):
        return "and", (expr.left, expr.right)
    if isinstance(expr, Or):
        return "or", (expr.left, expr.right)
    if isinstance(expr, Not):
        return "not", (expr.child,)
    return "always", (expr.value,)


def _joined(kind: type[And] | type[Or], parts: Iterable[Predicate], *, neutral: bool) -> Predicate:
    kept: list[Predicate] = []
    for part in parts:
        if not isinstance(part, Always):
            kept.append(part)
        elif part.value != neutral:
            return part
    return _balanced(kind, kept) if kept else Always(neutral)


def _balanced(kind: type[And] | type[Or], parts: Sequence[Predicate]) -> Predicate:
    if len(parts) == 1:
        return parts[0]
    middle = (len(parts) + 1) // 2
    return kind(_balanced(kind, parts[:middle]), _balanced(kind, parts[middle:]))
