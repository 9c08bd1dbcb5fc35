"""Programs that write to one table beside Spark: this book's own inserts, and PyIceberg's appends."""

from __future__ import annotations

import json
import sys
from typing import Any

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException

import lakebook

TABLE = "mixed"


def rows(numbers: list[int]) -> pa.Table:
    return pa.table({"id": pa.array(numbers, pa.int64()), "name": pa.array([str(item) for item in numbers])})


def insert(target: str, settings: dict[str, Any], first: int, number: int) -> list[int]:
    """Insert as fast as it goes; what was acknowledged."""
    done: list[int] = []
    with lakebook.open(target, **settings) as book:
        table = book.table(TABLE)
        for ident in range(first, first + number):
            table.insert_arrow(rows([ident]))
            done.append(ident)
    return done


def append(target: str, settings: dict[str, Any], first: int, number: int) -> list[int]:
    """Append through PyIceberg, which tries again by itself; what was acknowledged."""
    done: list[int] = []
    with lakebook.open(target, **settings) as book:
        catalog = book.catalog()
        for ident in range(first, first + number):
            try:
                catalog.load_table(f"default.{TABLE}").append(rows([ident]))
            except CommitFailedException:
                continue
            done.append(ident)
    return done


if __name__ == "__main__":
    act = {"insert": insert, "append": append}[sys.argv[1]]
    sys.stdout.write(json.dumps(act(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))))
