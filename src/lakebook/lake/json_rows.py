"""Rows of JSON files, as Spark writes them, read into Arrow by field id."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import islice
from typing import Any

import pyarrow as pa

from lakebook.iceberg.arrow_files import plain_schema
from lakebook.iceberg.schemas import schema_to_json
from lakebook.lake.json_lines import open_lines
from lakebook.storage.objects import ObjectStore

_ROWS = 10_000


def read_json_rows(store: ObjectStore, path: str, wanted: Any, written: Any) -> Iterator[pa.RecordBatch]:
    """The rows of a file that was written with one schema, in the columns of another."""
    target = plain_schema(wanted)
    fields, names = schema_to_json(wanted)["fields"], _names_by_id(schema_to_json(written)["fields"])
    lines = open_lines(store, path)
    while chunk := list(islice(lines, _ROWS)):
        rows = [_row(json.loads(line, parse_float=Decimal), fields, names) for line in chunk]
        yield pa.RecordBatch.from_pylist(rows, schema=target)


def _names_by_id(fields: list[Mapping[str, Any]]) -> dict[int, str]:
    found: dict[int, str] = {}
    waiting: list[Any] = list(fields)
    while waiting:
        item = waiting.pop()
        if "name" in item:
            found[item["id"]] = item["name"]
        kind = item["type"]
        if isinstance(kind, Mapping):
            waiting.extend(kind.get("fields", ()))
            waiting.extend({"type": kind[part]} for part in ("element", "key", "value") if part in kind)
    return found


def _row(source: Mapping[str, Any], fields: list[Mapping[str, Any]], names: Mapping[int, str]) -> dict[str, Any]:
    row = {}
    for field in fields:
        name = names.get(field["id"])
        row[field["name"]] = _value(source.get(name), field["type"], names) if name is not None else None
    return row


def _value(value: Any, kind: Any, names: Mapping[int, str]) -> Any:
    if value is None:
        return None
    if isinstance(kind, Mapping):
        if kind["type"] == "struct":
            return _row(value, kind["fields"], names)
        if kind["type"] == "list":
            return [_value(item, kind["element"], names) for item in value]
        return [(_key(key, kind["key"]), _value(item, kind["value"], names)) for key, item in value.items()]
    return _plain(value, kind)


def _key(key: str, kind: Any) -> Any:
    # JSON knows only texts as keys.
    if kind in ("int", "long"):
        return int(key)
    return _plain(key, kind) if kind != "boolean" else key == "true"


def _plain(value: Any, kind: str) -> Any:
    if kind in ("float", "double"):
        return float(value)
    if kind.startswith("decimal"):
        return Decimal(value)
    if kind == "date":
        return date.fromisoformat(value)
    if kind == "timestamptz":
        return datetime.fromisoformat(value).astimezone(UTC)
    if kind == "timestamp":
        return datetime.fromisoformat(value)
    if kind == "binary" or kind.startswith("fixed"):
        return base64.b64decode(value)
    return value
