"""Values of Iceberg types as bytes that sort as the values do, and an index for intervals of them.

Two encoded values of a column compare bytewise as the values compare, also across the promotions
`int` to `long`, `float` to `double` and to a wider decimal: what was recorded before stays right.

An index that finds the intervals `[low, high]` which touch `[a, b]` needs more than a sorted column.
Here each interval has a signed 64-bit key of its low end and a class: the number of bits of its width.
All intervals of class `c` that touch `[a, b]` have a low key from `a - 2**c + 1` to `b`, so that one
search is at most one index range per class.
"""

from __future__ import annotations

import math
import re
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from pyiceberg.conversions import from_bytes
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
from lakebook.names import shown
from lakebook.predicates import FLOATING

#: The least and the largest key.
MIN_KEY = -(2**63)
MAX_KEY = 2**63 - 1
#: The class of an interval whose ends are not both known.
UNBOUNDED = 65
#: The class of a column that has no value at all.
NOTHING = -1

#: A decimal context that never rounds.
EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - a timestamp without a zone
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SIGN = 2**63
_WIDE_SIGN = 2**127
_UNSIGNED = struct.Struct(">Q")
_DOUBLE = struct.Struct(">d")
# Iceberg's own forms have the lowest byte first.
_INT32, _INT64 = struct.Struct("<i"), struct.Struct("<q")
_FLOAT32, _FLOAT64 = struct.Struct("<f"), struct.Struct("<d")
_DECIMAL = re.compile(r"decimal\(\s*(\d{1,2})\s*,\s*(\d{1,2})\s*\)", re.ASCII)
_FIXED = re.compile(r"fixed\[\s*(\d{1,9})\s*\]", re.ASCII)


@dataclass(frozen=True, slots=True)
class ColumnBounds:
    """What is known of a column's values in one file or row group; `None` is unknown.

    `lower` and `upper` are encoded. All values that are neither null nor NaN lie between them;
    they need not be values themselves. `value_count` counts nulls and NaN too.
    """

    lower: bytes | None = None
    upper: bytes | None = None
    value_count: int | None = None
    null_count: int | None = None
    nan_count: int | None = None


class _Codec(NamedTuple):
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    key: Callable[[bytes], int]
    iceberg: PrimitiveType


def encode(kind: str, value: Any) -> bytes:
    """A value as bytes that sort as the values of this type do.

    Dates, times and timestamps may also be given as Iceberg's number of days or microseconds.
    """
    codec = _codec(kind)
    try:
        return codec.encode(value)
    except (TypeError, ValueError, ArithmeticError, AttributeError, struct.error):
        raise InvalidInput(f"{shown(value)} is not a value of the type {kind}", on="column bounds") from None


def decode(kind: str, encoded: bytes) -> Any:
    """The value that was encoded.

    A date or a time that Python cannot hold is returned as Iceberg's number of days or microseconds.
    """
    codec = _codec(kind)
    try:
        return codec.decode(encoded)
    except (TypeError, ValueError, ArithmeticError, struct.error):
        raise InvalidInput(f"{shown(encoded)} is not an encoded {kind}", on="column bounds") from None


def from_iceberg(kind: str, data: bytes) -> Any:
    """The value of a bound in Iceberg's single-value form, as a plain Python value.

    A bound that was written before an `int` became a `long`, or a `float` a `double`, is understood.
    """
    codec = _codec(kind)
    try:
        value: Any = from_bytes(codec.iceberg, bytes(data))
        # Encoding brings days and microseconds into their Python form, as far as there is one.
        return value if kind in FLOATING else codec.decode(codec.encode(value))
    except (TypeError, ValueError, ArithmeticError, struct.error):
        raise InvalidInput(f"{shown(data)} is not a bound of the type {kind}", on="column bounds") from None


def encode_iceberg(kind: str, data: bytes) -> bytes | None:
    """A bound in Iceberg's single-value form, encoded; `None` if it says nothing.

    That is the case for NaN, for bytes that are no value of the type, and for types without an order.
    """
    try:
        codec = _codec(kind)
        # A truncated bound may end within a character: it is still a bound.
        return bytes(data) if kind == "string" else codec.encode(from_bytes(codec.iceberg, bytes(data)))
    except (InvalidInput, TypeError, ValueError, ArithmeticError, struct.error):
        return None


def to_iceberg(kind: str, encoded: bytes) -> bytes:
    """An encoded value in Iceberg's single-value form; the reverse of `encode_iceberg`."""
    codec = _codec(kind)
    write = _TO_ICEBERG.get(kind)
    if write is None:
        write = _write_decimal if isinstance(codec.iceberg, DecimalType) else bytes
    try:
        return write(encoded)
    except (TypeError, ValueError, ArithmeticError, struct.error):
        raise InvalidInput(f"{shown(encoded)} is not an encoded {kind}", on="column bounds") from None


def sort_key(kind: str, encoded: bytes) -> int:
    """A signed 64-bit number that never falls when the value rises; equal keys may be unequal values."""
    return _codec(kind).key(encoded)


def width_class(low_key: int | None, high_key: int | None) -> int:
    """How many bits the width of an interval has: 0 to 64, or `UNBOUNDED` where an end is unknown."""
    if low_key is None or high_key is None or high_key < low_key:
        return UNBOUNDED
    return (high_key - low_key).bit_length()


def interval_key(kind: str, bounds: ColumnBounds) -> tuple[int, int]:
    """The class and the low key under which an index has to hold a column's bounds.

    A column that has NaN, or may have it, is open above: for some engines NaN is the largest number.
    """
    if bounds.null_count is not None and bounds.null_count == bounds.value_count:
        return NOTHING, MIN_KEY
    low = None if bounds.lower is None else sort_key(kind, bounds.lower)
    high = None if bounds.upper is None else sort_key(kind, bounds.upper)
    if kind in FLOATING and bounds.nan_count != 0:
        high = None
    if low is None or (high is not None and high < low):
        return UNBOUNDED, MIN_KEY
    return width_class(low, high), low


def probe_ranges(a: int | None, b: int | None) -> list[tuple[int, int, int]]:
    """For each class of `interval_key` the low keys of all intervals that touch the keys from `a` to `b`.

    `None` is an open end. Whatever touches is found; what is found may not touch.
    """
    highest = MAX_KEY if b is None else min(b, MAX_KEY)
    if highest < MIN_KEY or (a is not None and a > highest):
        return []
    ranges = []
    for width in range(UNBOUNDED):
        lowest = MIN_KEY if a is None else max(a - 2**width + 1, MIN_KEY)
        ranges.append((width, lowest, highest))
    return [*ranges, (UNBOUNDED, MIN_KEY, highest)]


# --- the codecs ----------------------------------------------------------------


@lru_cache(maxsize=1024)
def _codec(kind: str) -> _Codec:
    codec = _PLAIN.get(kind)
    if codec is not None:
        return codec
    if match := _DECIMAL.fullmatch(kind):
        return _decimal(int(match[1]), int(match[2]))
    if match := _FIXED.fullmatch(kind):
        return _Codec(_encode_bytes, bytes, _leading, FixedType(int(match[1])))
    raise InvalidInput(f"values of the type {shown(kind)} have no order", on="column bounds")


def _whole(value: Any) -> int:
    # True is an int for Python, and a mistake here.
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _encode_int(value: Any) -> bytes:
    return _UNSIGNED.pack(_whole(value) + _SIGN)


def _decode_int(encoded: bytes) -> int:
    number: int = _UNSIGNED.unpack(encoded)[0]
    return number - _SIGN


def _encode_double(value: Any) -> bytes:
    number = float(_whole(value) if not isinstance(value, float) else value)
    if math.isnan(number):
        raise ValueError
    bits: int = _UNSIGNED.unpack(_DOUBLE.pack(number + 0.0))[0]  # -0.0 + 0.0 is 0.0
    return _UNSIGNED.pack(~bits & (2**64 - 1) if bits & _SIGN else bits | _SIGN)


def _decode_double(encoded: bytes) -> float:
    bits: int = _UNSIGNED.unpack(encoded)[0]
    number: float = _DOUBLE.unpack(_UNSIGNED.pack(bits ^ _SIGN if bits & _SIGN else ~bits & (2**64 - 1)))[0]
    return number


def _decimal(precision: int, scale: int) -> _Codec:
    def encode_decimal(value: Any) -> bytes:
        number = value if isinstance(value, Decimal) else Decimal(_whole(value))
        unscaled = number.scaleb(scale, EXACT)
        # The comparison comes first: the digits of 1E+999999 are not worth writing out.
        if not -_WIDE_SIGN <= unscaled < _WIDE_SIGN or unscaled != unscaled.to_integral_value():
            raise ValueError
        return (int(unscaled) + _WIDE_SIGN).to_bytes(16, "big")

    def decode_decimal(encoded: bytes) -> Decimal:
        return Decimal(_unscaled(encoded)).scaleb(-scale, EXACT)

    return _Codec(encode_decimal, decode_decimal, _decimal_key, DecimalType(precision, scale))


def _unscaled(encoded: bytes) -> int:
    if len(encoded) != 16:
        raise ValueError
    return int.from_bytes(encoded, "big") - _WIDE_SIGN


def _decimal_key(encoded: bytes) -> int:
    return max(MIN_KEY, min(MAX_KEY, _unscaled(encoded)))


def _encode_boolean(value: Any) -> bytes:
    if not isinstance(value, bool):
        raise TypeError
    return b"\1" if value else b"\0"


def _decode_boolean(encoded: bytes) -> bool:
    if encoded not in (b"\0", b"\1"):
        raise ValueError
    return encoded == b"\1"


def _encode_date(value: Any) -> bytes:
    if isinstance(value, datetime):
        raise TypeError
    return _encode_int(value.toordinal() - _EPOCH_DAY if isinstance(value, date) else value)


def _decode_date(encoded: bytes) -> date | int:
    days = _decode_int(encoded)
    try:
        return date.fromordinal(days + _EPOCH_DAY)
    except (ValueError, OverflowError):
        return days


def _encode_time(value: Any) -> bytes:
    if isinstance(value, time):
        if value.tzinfo is not None:
            raise TypeError
        seconds = (value.hour * 60 + value.minute) * 60 + value.second
        value = seconds * 1_000_000 + value.microsecond
    return _encode_int(value)


def _decode_time(encoded: bytes) -> time | int:
    micros = _decode_int(encoded)
    if not 0 <= micros < 86_400_000_000:
        return micros
    return (_EPOCH + micros * _MICROSECOND).time()


def _encode_timestamp(value: Any) -> bytes:
    # A naive datetime cannot be subtracted from an aware one: a zone too much is an error.
    return _encode_int((value - _EPOCH) // _MICROSECOND if isinstance(value, datetime) else value)


def _decode_timestamp(encoded: bytes) -> datetime | int:
    return _moment(_EPOCH, _decode_int(encoded))


def _encode_timestamptz(value: Any) -> bytes:
    return _encode_int((value - _EPOCH_UTC) // _MICROSECOND if isinstance(value, datetime) else value)


def _decode_timestamptz(encoded: bytes) -> datetime | int:
    return _moment(_EPOCH_UTC, _decode_int(encoded))


def _moment(epoch: datetime, micros: int) -> datetime | int:
    try:
        return epoch + micros * _MICROSECOND
    except OverflowError:
        return micros


def _encode_string(value: Any) -> bytes:
    encoded: bytes = str.encode(value, "utf-8")
    return encoded


def _decode_string(encoded: bytes) -> str:
    return bytes(encoded).decode("utf-8")


def _encode_uuid(value: Any) -> bytes:
    return value.bytes if isinstance(value, uuid.UUID) else uuid.UUID(bytes=value).bytes


def _decode_uuid(encoded: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=bytes(encoded))


def _encode_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError
    return value


def _leading(encoded: bytes) -> int:
    return int.from_bytes(encoded[:8].ljust(8, b"\0"), "big") - _SIGN


_PLAIN = {
    "boolean": _Codec(_encode_boolean, _decode_boolean, _leading, BooleanType()),
    "int": _Codec(_encode_int, _decode_int, _decode_int, IntegerType()),
    "long": _Codec(_encode_int, _decode_int, _decode_int, LongType()),
    "float": _Codec(_encode_double, _decode_double, _leading, FloatType()),
    "double": _Codec(_encode_double, _decode_double, _leading, DoubleType()),
    "date": _Codec(_encode_date, _decode_date, _decode_int, DateType()),
    "time": _Codec(_encode_time, _decode_time, _decode_int, TimeType()),
    "timestamp": _Codec(_encode_timestamp, _decode_timestamp, _decode_int, TimestampType()),
    "timestamptz": _Codec(_encode_timestamptz, _decode_timestamptz, _decode_int, TimestamptzType()),
    # Python has no nanoseconds: these values are numbers on both sides.
    "timestamp_ns": _Codec(_encode_int, _decode_int, _decode_int, TimestampNanoType()),
    "timestamptz_ns": _Codec(_encode_int, _decode_int, _decode_int, TimestamptzNanoType()),
    "string": _Codec(_encode_string, _decode_string, _leading, StringType()),
    "uuid": _Codec(_encode_uuid, _decode_uuid, _leading, UUIDType()),
    "binary": _Codec(_encode_bytes, bytes, _leading, BinaryType()),
}


# --- Iceberg's form ------------------------------------------------------------


def _write_int(encoded: bytes) -> bytes:
    return _INT32.pack(_decode_int(encoded))


def _write_long(encoded: bytes) -> bytes:
    return _INT64.pack(_decode_int(encoded))


def _write_float(encoded: bytes) -> bytes:
    number = _decode_double(encoded)
    packed = _FLOAT32.pack(number)
    # Neither NaN nor what would be rounded; a rounded bound is none.
    if _FLOAT32.unpack(packed)[0] != number:
        raise ValueError
    return packed


def _write_double(encoded: bytes) -> bytes:
    number = _decode_double(encoded)
    if math.isnan(number):
        raise ValueError
    return _FLOAT64.pack(number)


def _write_decimal(encoded: bytes) -> bytes:
    unscaled = _unscaled(encoded)
    # As few bytes as it takes, one bit of them for the sign.
    length = (unscaled if unscaled >= 0 else ~unscaled).bit_length() // 8 + 1
    return unscaled.to_bytes(length, "big", signed=True)


def _write_boolean(encoded: bytes) -> bytes:
    return _encode_boolean(_decode_boolean(encoded))


def _write_uuid(encoded: bytes) -> bytes:
    return _decode_uuid(encoded).bytes


_TO_ICEBERG: dict[str, Callable[[bytes], bytes]] = {
    "boolean": _write_boolean,
    "int": _write_int,
    "date": _write_int,
    "float": _write_float,
    "double": _write_double,
    **dict.fromkeys(("long", "time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"), _write_long),
    "string": bytes,
    "uuid": _write_uuid,
    "binary": bytes,
}
