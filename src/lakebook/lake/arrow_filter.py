"""Predicates as Arrow expressions."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lakebook.predicates import Always, And, Not, Or, Predicate, Test


def expression_of(predicate: Predicate, schema: pa.Schema) -> pc.Expression:
    """A predicate on rows of these columns."""
    if isinstance(predicate, Always):
        return pc.scalar(predicate.value)
    if isinstance(predicate, And):
        return expression_of(predicate.left, schema) & expression_of(predicate.right, schema)
    if isinstance(predicate, Or):
        return expression_of(predicate.left, schema) | expression_of(predicate.right, schema)
    if isinstance(predicate, Not):
        return ~expression_of(predicate.child, schema)
    return _test(predicate, schema)


def _type_of(path: tuple[str, ...], schema: pa.Schema) -> pa.DataType:
    kind = schema.field(path[0]).type
    for name in path[1:]:
        kind = kind.field(name).type
    return kind


def _test(test: Test, schema: pa.Schema) -> pc.Expression:
    column: Any = pc.field(*test.path) if len(test.path) > 1 else pc.field(test.path[0])
    kind = _type_of(test.path, schema)
    if isinstance(kind, pa.BaseExtensionType):
        # Arrow compares no UUIDs, but their bytes.
        kind = kind.storage_type
        column = column.cast(kind)
    values = [pc.scalar(_scalar(value, kind)) for value in test.values]
    match test.op:
        case "eq":
            return column == values[0]
        case "ne":
            return column != values[0]
        case "lt":
            return column < values[0]
        case "le":
            return column <= values[0]
        case "gt":
            return column > values[0]
        case "ge":
            return column >= values[0]
        case "in":
            # Not isin(), which takes a null for a value.
            return reduce(or_, [column == value for value in values], pc.scalar(False))
        case "not_in":
            return ~reduce(or_, [column == value for value in values], pc.scalar(False)) & column.is_valid()
        case "is_null":
            return column.is_null()
        case "not_null":
            return column.is_valid()
        case "is_nan":
            return pc.is_nan(column)
        case "not_nan":
            return ~pc.is_nan(column)
        case "starts_with":
            return pc.starts_with(column, test.values[0])
        case "not_starts_with":
            return ~pc.starts_with(column, test.values[0])
    raise AssertionError(test.op)


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    stored = value.bytes if hasattr(value, "bytes_le") else value
    return pa.scalar(stored, type=kind)
