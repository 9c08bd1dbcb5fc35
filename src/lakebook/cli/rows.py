"""Rows of a table in values that JSON has."""

from __future__ import annotations

import base64
import math
import uuid
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from lakebook.cli.output import as_json

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAYS_OF_400_YEARS = 146_097


def plain_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a batch: decimals and times as texts, bytes in base64, maps as objects."""
    columns = [[_plain(value, column.type) for value in _values(column)] for column in batch.columns]
    for row in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, row, strict=True))


def cell(value: Any) -> Any:
    """A plain value as a table on a terminal shows it."""
    if isinstance(value, bool | dict | list):
        return as_json(value, line=True)
    return repr(value) if isinstance(value, float) else value


def _values(column: pa.Array) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        # Arrow's times go further than Python's, in years and in digits.
        return [_value(item) for item in column]
    return values


def _value(item: pa.Scalar) -> Any:
    """A value of which some part may be beyond Python: that part is a text."""
    kind = item.type
    if not item.is_valid:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _value(item[number]) for number, field in enumerate(kind)}
    if pa.types.is_map(kind):
        return [(_value(entry[0]), _value(entry[1])) for entry in item.values]
    if pa.types.is_list(kind):
        return [_value(element) for element in item.values]
    try:
        return item.as_py()
    except (ValueError, OverflowError):
        return _far(item)


def _far(item: pa.Scalar) -> str:
    """A date or a time that Python cannot hold, in ISO's long form."""
    if pa.types.is_date32(item.type):
        return _long_date(item.value)
    per_second = _PER_SECOND[item.type.unit]
    seconds, fraction = divmod(item.value, per_second)
    days, second = divmod(seconds, 86_400)
    digits = f".{fraction:0{len(str(per_second)) - 1}d}" if fraction else ""
    clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}{digits}"
    return f"{_long_date(days)}T{clock}{'' if item.type.tz is None else '+00:00'}"


def _long_date(days: int) -> str:
    # The calendar repeats itself after 400 years.
    cycles, rest = divmod(days, _DAYS_OF_400_YEARS)
    day = date(1970, 1, 1) + timedelta(days=rest)
    year = day.year + 400 * cycles
    return f"{year:04}-{day:%m-%d}" if 0 <= year <= 9999 else f"{year:+06}-{day:%m-%d}"


def _plain(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return {_key(_plain(key, kind.key_type)): _plain(item, kind.item_type) for key, item in value}
    if pa.types.is_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    return _leaf(value)


def _leaf(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        # As Spark writes them.
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value) if isinstance(value, uuid.UUID) else value


def _key(value: Any) -> str:
    # An object of JSON has only texts as keys.
    return value if isinstance(value, str) else as_json(value, line=True)
