"""What `lakebook produce` reads: lines, lines of JSON and rows of CSV, one record at a time."""

from __future__ import annotations

import base64
import binascii
import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import IO, TYPE_CHECKING, Any

from lakebook.cli.commands import moment_of
from lakebook.errors import InvalidInput
from lakebook.names import is_moment, shown

if TYPE_CHECKING:
    # It loads Arrow, which lines of text can do without.
    from lakebook.streams.records import Headers

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# What a line of JSON may have that is a record itself; the last two are printed by `consume` and left alone.
_PARTS = ("key", "key_base64", "value", "value_base64", "headers", "timestamp", "partition", "topic", "offset")
# Longer than any record may be: a cell of CSV is limited by the record alone.
_LONGEST_CELL = 2**31 - 1
_MOST_DIGITS = 19


@dataclass(frozen=True)
class Shape:
    """How records are taken from what is read."""

    key_separator: str | None = None
    key_field: str | None = None
    value_field: str | None = None
    timestamp_field: str | None = None
    headers: Headers = ()
    partition: int | None = None

    @property
    def names_fields(self) -> bool:
        """Whether fields of the user's own objects are named: then a line is no record itself."""
        return any(field is not None for field in (self.key_field, self.value_field, self.timestamp_field))


@dataclass(frozen=True)
class Input:
    """A record to be sent, and the line it was read from."""

    line: int
    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp: datetime | None = None
    partition: int | None = None


@dataclass(frozen=True)
class BadInput:
    """A line that is no record, and why."""

    line: int
    error: InvalidInput


def bad(line: int, why: str, remedy: str = "") -> InvalidInput:
    """The error for a line that is no record."""
    return InvalidInput(why, on=f"line {line}", remedy=remedy)


def inputs(stream: IO[bytes], form: str, shape: Shape) -> Iterator[Input | BadInput]:
    """The records of a stream; a line that is none is told, and what follows it can still be read."""
    if form == "csv":
        return _csv_inputs(stream, shape)
    parse = _json_input if form == "json" else _line_input
    return _each(enumerate(stream, 1), parse, shape)


def _each(
    lines: Iterable[tuple[int, bytes]], parse: Callable[[int, bytes, Shape], Input | None], shape: Shape
) -> Iterator[Input | BadInput]:
    for number, line in lines:
        try:
            found = parse(number, line, shape)
        except InvalidInput as error:
            yield BadInput(number, error)
            continue
        if found is not None:
            yield found


# --- lines -------------------------------------------------------------------------


def _line_input(number: int, line: bytes, shape: Shape) -> Input:
    """A line as it stands, whatever its bytes are, without its end."""
    value = line.removesuffix(b"\n").removesuffix(b"\r")
    if shape.key_separator is None:
        return Input(number, value, None, shape.headers, None, shape.partition)
    key, found, rest = value.partition(shape.key_separator.encode())
    if not found:
        raise bad(number, f"it has no key separator {shown(shape.key_separator)}")
    return Input(number, rest, key, shape.headers, None, shape.partition)


# --- JSON --------------------------------------------------------------------------


def _json_input(number: int, line: bytes, shape: Shape) -> Input | None:
    if not line.strip():
        return None
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise bad(number, f"it is not JSON ({error})") from None
    if not isinstance(given, dict):
        raise bad(number, "it is not an object of JSON", "`--format lines` sends each line as it is")
    if shape.names_fields:
        return _input_of_fields(number, given, line.strip(), shape)
    return _input_of_record(number, given, shape)


def _input_of_fields(number: int, given: Mapping[str, Any], whole: bytes, shape: Shape) -> Input:
    """A record from an object of the user's own: named fields of it, or all of it."""

    def field(name: str) -> Any:
        if name not in given:
            raise bad(number, f"it has no field {shown(name)}")
        return given[name]

    return Input(
        number,
        whole if shape.value_field is None else _as_bytes(field(shape.value_field)),
        None if shape.key_field is None else _as_bytes(field(shape.key_field)),
        shape.headers,
        None if shape.timestamp_field is None else _time(number, field(shape.timestamp_field)),
        shape.partition,
    )


def _input_of_record(number: int, given: Mapping[str, Any], shape: Shape) -> Input:
    """A record from an object that says by its names what is what."""
    if unknown := [name for name in given if name not in _PARTS]:
        raise bad(
            number,
            f"a record has no part {shown(unknown[0])}",
            "Name the fields of other objects with --key-field or --value-field, or send them with --format lines",
        )
    partition = given.get("partition") if shape.partition is None else shape.partition
    if partition is not None and (isinstance(partition, bool) or not isinstance(partition, int)):
        raise bad(number, f"{shown(partition)} is not a partition")
    return Input(
        number,
        _content(number, given, "value"),
        _content(number, given, "key"),
        (*_headers(number, given.get("headers")), *shape.headers),
        _time(number, given.get("timestamp")),
        partition,
    )


def _content(number: int, given: Mapping[str, Any], name: str) -> bytes | None:
    encoded = given.get(f"{name}_base64")
    if encoded is None:
        return _as_bytes(given.get(name))
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise bad(number, f"its {name}_base64 is not base64") from None


def _headers(number: int, given: Any) -> Headers:
    """Headers from an object, or from a list of objects with a key and a value."""
    if isinstance(given, dict):
        given = [{"key": name, "value": value} for name, value in given.items()]
    if given is None:
        return ()
    if not isinstance(given, list) or not all(
        isinstance(pair, dict) and isinstance(pair.get("key"), str) for pair in given
    ):
        raise bad(number, "its headers are neither an object nor a list of objects with a key")
    return tuple((pair["key"], _content(number, pair, "value")) for pair in given)


def _as_bytes(value: Any) -> bytes | None:
    """A value of JSON as bytes: a text as it is, anything else as JSON."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # Half a pair of surrogates can stand in JSON, and in no UTF-8.
    return text.encode("utf-8", "replace")


def _time(number: int, given: Any) -> datetime | None:
    """A time from an ISO text, or from milliseconds since 1970."""
    if given is None:
        return None
    found = None
    if isinstance(given, str):
        digits = given.isascii() and given.isdecimal() and len(given) <= _MOST_DIGITS
        found = _of_ms(int(given)) if digits else moment_of(given)
    elif isinstance(given, int) and not isinstance(given, bool):
        found = _of_ms(given)
    if found is None or not is_moment(found):
        raise bad(
            number, f"{shown(given)} is not a time", "Write it like 2026-01-31T12:00:00Z, or as milliseconds since 1970"
        )
    return found


def _of_ms(number: int) -> datetime | None:
    try:
        return _EPOCH + timedelta(milliseconds=number)
    except OverflowError:
        return None


# --- CSV ---------------------------------------------------------------------------


def _csv_inputs(stream: IO[bytes], shape: Shape) -> Iterator[Input | BadInput]:
    """Rows under the names of the first one. Bytes that are no UTF-8 make their own row bad, not the file."""
    csv.field_size_limit(_LONGEST_CELL)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        rows = csv.reader(text)
        names = next(rows, [])
        _check_names(names, shape)
        while True:
            first = rows.line_num + 1
            try:
                row = next(rows)
                found: Input | BadInput | None = _csv_input(first, names, row, shape) if row else None
            except StopIteration:
                return
            except csv.Error as error:
                found = BadInput(first, bad(first, f"it is not CSV ({error})"))
            except InvalidInput as error:
                found = BadInput(first, error)
            if found is not None:
                yield found
    finally:
        text.detach()


def _check_names(names: list[str], shape: Shape) -> None:
    for option, name in (
        ("--key-field", shape.key_field),
        ("--value-field", shape.value_field),
        ("--timestamp-field", shape.timestamp_field),
    ):
        if name is not None and name not in names:
            raise InvalidInput(
                f"there is no column {shown(name)}", on=option, remedy=f"The columns are {', '.join(map(shown, names))}"
            )
    if len(set(names)) < len(names):
        raise bad(1, "two columns have the same name")


def _csv_input(number: int, names: list[str], row: list[str], shape: Shape) -> Input:
    if len(row) != len(names):
        raise bad(number, f"it has {len(row)} cells, not {len(names)}")
    cells = dict(zip(names, row, strict=True))
    try:
        whole = json.dumps(cells, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise bad(number, "it is not UTF-8") from None
    return _input_of_fields(number, cells, whole, shape)
