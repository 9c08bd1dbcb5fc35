"""How `lakebook consume` prints a record: as text, as JSON, as its value alone, or in hexadecimal."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lakebook.cli.output import as_json, one_line, shown_value

if TYPE_CHECKING:
    # It loads Arrow, for which no other command shall wait.
    from lakebook.streams.records import Record


def _text(record: Record) -> bytes:
    """One line whatever is in it: what cannot be printed is escaped."""
    parts = [
        f"{record.partition}/{record.offset}",
        shown_value(record.timestamp),
        _shown(record.key),
        _shown(record.value),
        *(f"{one_line(name)}={_shown(content)}" for name, content in record.headers),
    ]
    return "\t".join(parts).encode() + b"\n"


def _shown(content: bytes | None) -> str:
    return "-" if content is None else one_line(content.decode("utf-8", "backslashreplace"))


def _json(record: Record) -> bytes:
    """One line of JSON, as `lakebook produce --format json` takes it."""
    fields = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        **_content("key", record.key),
        **_content("value", record.value),
        "headers": [{"key": name, **_content("value", content)} for name, content in record.headers],
    }
    return as_json(fields, line=True).encode() + b"\n"


def _content(name: str, content: bytes | None) -> dict[str, Any]:
    """Bytes as a text, or as base64 under a name that says so."""
    try:
        return {name: None if content is None else content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(content or b"").decode()}


def _value(record: Record) -> bytes:
    """The value's bytes as they are, and a line's end."""
    return (record.value or b"") + b"\n"


def _hex(record: Record) -> bytes:
    parts = [f"{record.partition}/{record.offset}", *map(_in_hex, (record.key, record.value))]
    return "\t".join(parts).encode() + b"\n"


def _in_hex(content: bytes | None) -> str:
    return "-" if content is None else content.hex()


#: The forms in which records can be printed.
FORMS: dict[str, Callable[[Record], bytes]] = {"text": _text, "json": _json, "value": _value, "hex": _hex}
