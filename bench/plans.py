"""The query plans of the hot statements, and whether one of them reads a table from end to end."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from lakebook import Book
from lakebook.registry import events, groups, partitions, segments, topics
from lakebook.registry.statements import POSTGRESQL, SQLITE, Statement

#: Added to the name of a plan that PostgreSQL made without looking at the values.
GENERIC = " (any values)"

_HOT: dict[str, tuple[Statement, tuple[Any, ...]]] = {
    "FIND_BY_OFFSET": (segments.FIND_BY_OFFSET, ("orders", 0, 5_000)),
    "FIND_BY_TIMESTAMP": (segments.FIND_BY_TIMESTAMP, ("orders", 0, 1_700_000_000_000)),
    "FIND_PINNED": (segments.FIND_PINNED, (1, 0, 5_000)),
    "LIST_SEGMENTS": (segments.LIST_SEGMENTS, ("orders", 0, 5_000, 101)),
    "GET_PARTITION": (partitions.GET_PARTITION, ("orders", 0)),
    "GET_TOPIC": (topics.GET_TOPIC, ("orders",)),
    "GET_COMMITTED": (groups.GET_COMMITTED, ("readers", "orders", 0)),
}
# What follows the events differs between the databases; PostgreSQL plans these for their values only.
_FOLLOWING: dict[str, dict[str, Statement]] = {
    SQLITE: {"AFTER_ID": events.AFTER_ID},
    POSTGRESQL: {
        "SNAPSHOT_AND_LAST": events.SNAPSHOT_AND_LAST,
        "FIRST_NEW_ID": events.FIRST_NEW_ID,
        "NEW_IN_SNAPSHOT": events.NEW_IN_SNAPSHOT,
    },
}


def plans(book: Book, *, only_indexes: bool = False) -> dict[str, str]:
    """The plan of each hot statement, as the database explains it.

    With `only_indexes` PostgreSQL is told to avoid reading a table from end to end where it
    can, which shows in a book of few rows that there is an index for everything.
    """
    with book._registry.read() as reader:
        connection = reader._connection
        if reader.kind == SQLITE:
            return _of_sqlite(connection)
        connection.execute(f"SET enable_seqscan = {'off' if only_indexes else 'on'}")
        try:
            return _of_postgresql(connection)
        finally:
            connection.execute("RESET enable_seqscan")


def unindexed(found: Mapping[str, str]) -> list[str]:
    """The statements that read a whole table, or a whole index, or use no index at all."""
    return [name for name, plan in found.items() if not _is_indexed(plan)]


def _is_indexed(plan: str) -> bool:
    # SQLite calls every walk from end to end a SCAN, also one along an index.
    if re.search(r"^\s*SCAN |Seq Scan|TEMP B-TREE", plan, re.MULTILINE) or _sorts_a_big_table(plan):
        return False
    return bool(re.search(r"^\s*SEARCH |Index (Only )?Scan", plan, re.MULTILINE))


def _sorts_a_big_table(plan: str) -> bool:
    """Whether PostgreSQL fetches everything and sorts it, where the index has the order already."""
    lines = plan.splitlines()
    for number, line in enumerate(lines):
        if "Sort  (" in line:
            under = itertools.takewhile(lambda other: _depth(other) > _depth(line), lines[number + 1 :])  # noqa: B023
            text = "\n".join(under)
            if "Limit  (" not in text and re.search(r"Scan.* on (segments|events)", text):
                return True
    return False


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _of_sqlite(connection: Any) -> dict[str, str]:
    following = {name: (statement, (5_000, 101)) for name, statement in _FOLLOWING[SQLITE].items()}
    found = {}
    for name, (statement, values) in (_HOT | following).items():
        compiled = statement.on(SQLITE)
        arranged = compiled.arrange(values) if compiled.arrange else values
        found[name] = "\n".join(
            str(row[3]) for row in connection.execute(f"EXPLAIN QUERY PLAN {compiled.sql}", arranged)
        )
    return found


def _of_postgresql(connection: Any) -> dict[str, str]:
    now = connection.execute("SELECT CAST(pg_current_snapshot() AS text)").fetchone()[0]
    newest = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()[0]
    following = {
        "SNAPSHOT_AND_LAST": (_FOLLOWING[POSTGRESQL]["SNAPSHOT_AND_LAST"], (now.partition(":")[0],)),
        "FIRST_NEW_ID": (_FOLLOWING[POSTGRESQL]["FIRST_NEW_ID"], (now, now)),
        "NEW_IN_SNAPSHOT": (_FOLLOWING[POSTGRESQL]["NEW_IN_SNAPSHOT"], (newest, now, now, 101)),
    }
    found = {}
    for name, (statement, values) in (_HOT | following).items():
        compiled = statement.on(POSTGRESQL)
        arranged = compiled.arrange(values) if compiled.arrange else values
        found[name] = _lines(connection.execute(f"EXPLAIN {compiled.sql}", arranged, prepare=False))
    for name, (statement, _) in _HOT.items():
        found[name + GENERIC] = _generic_plan(connection, statement.on(POSTGRESQL).sql)
    return found


def _generic_plan(connection: Any, sql: str) -> str:
    """The plan that a statement settles on when the driver has prepared it."""
    pieces = sql.split("%s")
    numbered = pieces[0] + "".join(f"${number}{piece}" for number, piece in enumerate(pieces[1:], 1))
    connection.execute(f"PREPARE explained AS {numbered}")
    connection.execute("SET plan_cache_mode = force_generic_plan")
    try:
        nulls = ", ".join(["NULL"] * (len(pieces) - 1))
        return _lines(connection.execute(f"EXPLAIN EXECUTE explained({nulls})", prepare=False))
    finally:
        connection.execute("RESET plan_cache_mode")
        connection.execute("DEALLOCATE explained")


def _lines(cursor: Any) -> str:
    return "\n".join(row[0] for row in cursor.fetchall())
