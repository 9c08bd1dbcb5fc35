"""Records on their way into Arrow: refused if a value would have to be changed to fit its column."""

from __future__ import annotations

import numbers
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, TypeAlias

import pyarrow as pa

from lakebook.errors import InvalidInput
from lakebook.names import shown

_Check: TypeAlias = Callable[[Any], bool]


class RecordCheck:
    """Checks records of a table; made once, used for each of them."""

    def __init__(self, schema: pa.Schema, on: str) -> None:
        self._on = on
        self._columns = {field.name: _check_of(field.type) for field in schema}
        self._required = [field.name for field in schema if not field.nullable]

    def records(self, given: Any) -> list[Mapping[str, Any]]:
        """One record or several, as a list of records that fit."""
        if isinstance(given, Mapping):
            found: list[Any] = [given]
        elif isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray)):
            found = list(given)
        else:
            raise InvalidInput(f"{shown(given)} is neither a record nor a list of them", on=self._on)
        for record in found:
            self._check(record)
        return found

    def _check(self, record: Any) -> None:
        if not isinstance(record, Mapping):
            raise InvalidInput(f"{shown(record)} is no record", on=self._on, remedy="Give a mapping of column names")
        for name, value in record.items():
            check = self._columns.get(name)
            if check is None:
                raise InvalidInput(f"the table has no column {shown(name)}", on=self._on)
            if value is not None and not check(value):
                raise InvalidInput(f"{shown(value)} does not fit the column {shown(name)}", on=self._on)
        for name in self._required:
            if record.get(name) is None:
                raise InvalidInput(f"the column {shown(name)} is required and has no value", on=self._on)


def _check_of(kind: pa.DataType) -> _Check:
    if pa.types.is_struct(kind):
        return _struct_check(kind)
    if pa.types.is_map(kind):
        return _map_check(kind)
    if pa.types.is_list(kind):
        item = _optional(kind.value_field)
        return lambda value: isinstance(value, Sequence) and not _is_text(value) and all(map(item, value))
    for matches, check in _PLAIN:
        if matches(kind):
            return check
    if pa.types.is_timestamp(kind):
        zoned = kind.tz is not None
        return lambda value: isinstance(value, datetime) and (value.utcoffset() is not None) == zoned
    return lambda value: isinstance(value, (uuid.UUID, bytes))


def _is_text(value: Any) -> bool:
    return isinstance(value, (str, bytes, bytearray))


def _optional(field: pa.Field) -> _Check:
    check, nullable = _check_of(field.type), field.nullable
    return lambda value: nullable if value is None else check(value)


def _struct_check(kind: pa.StructType) -> _Check:
    fields = {kind.field(number).name: _optional(kind.field(number)) for number in range(kind.num_fields)}

    def check(value: Any) -> bool:
        return (
            isinstance(value, Mapping)
            and value.keys() <= fields.keys()
            and all(fits(value.get(name)) for name, fits in fields.items())
        )

    return check


def _map_check(kind: pa.MapType) -> _Check:
    key, item = _check_of(kind.key_type), _optional(kind.item_field)

    def check(value: Any) -> bool:
        pairs = value.items() if isinstance(value, Mapping) else value
        if _is_text(pairs) or not hasattr(pairs, "__iter__"):
            return False
        return all(
            isinstance(pair, Sequence) and len(pair) == 2 and pair[0] is not None and key(pair[0]) and item(pair[1])
            for pair in pairs
        )

    return check


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


_PLAIN: tuple[tuple[Callable[[pa.DataType], bool], _Check], ...] = (
    (pa.types.is_boolean, lambda value: isinstance(value, bool)),
    (pa.types.is_integer, _is_whole),
    (pa.types.is_floating, lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool)),
    (pa.types.is_decimal, lambda value: isinstance(value, Decimal) or _is_whole(value)),
    (pa.types.is_string, lambda value: isinstance(value, str)),
    (pa.types.is_binary, lambda value: isinstance(value, (bytes, bytearray))),
    (pa.types.is_fixed_size_binary, lambda value: isinstance(value, (bytes, bytearray))),
    (pa.types.is_date, lambda value: isinstance(value, date) and not isinstance(value, datetime)),
    (pa.types.is_time, lambda value: isinstance(value, time)),
)
