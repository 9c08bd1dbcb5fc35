"""Changes of captured tables: the row and its event, always together.

Nothing else writes to `schema.CAPTURED`. A change carries the lake object it belongs to,
whose lock the transaction holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.errors import RegistryCorrupt
from lakebook.registry import schema
from lakebook.registry.statements import Insert, Statement, bind, insert_into
from lakebook.registry.transactions import Transaction

Values = Mapping[str, Any]


def insert_row(transaction: Transaction, object_id: int, table: sa.Table, row: Values) -> None:
    """Insert a row whose key is known beforehand."""
    insert_rows(transaction, object_id, table, [row])


def insert_rows(transaction: Transaction, object_id: int, table: sa.Table, rows: Iterable[Values]) -> None:
    """Insert rows of one lake object; each has all columns, in the order of the table, and no JSON."""
    values: list[tuple[Any, ...]] = []
    key_of, dumps = _key_json(table), orjson.dumps

    def changes() -> Iterator[tuple[str, str, str, None]]:
        # In one pass, so that a large batch leaves little for the garbage collector to walk through.
        for row in rows:
            values.append(tuple(row.values()))
            yield "insert", key_of(row), dumps(row).decode(), None

    transaction.capture(object_id, str(table.name), changes())
    transaction.insert_many(_insert(table), values)


def insert_new(transaction: Transaction, object_id: int, table: sa.Table, row: Values) -> int:
    """Insert a row whose id the database chooses, and return the id."""
    json_columns = _json_columns(table)
    values = [orjson.dumps(value).decode() if name in json_columns else value for name, value in row.items()]
    found = transaction.one(_insert_returning(table), *values)
    assert found is not None
    new_id = int(found[0])
    capture(transaction, object_id, table, "insert", after={"id": new_id, **row})
    return new_id


def update_row(transaction: Transaction, object_id: int, table: sa.Table, before: Values, changes: Values) -> None:
    """Change a row that was read under the lock of its lake object."""
    key = _key_of(table)
    json_columns = _json_columns(table)
    values = [orjson.dumps(value).decode() if name in json_columns else value for name, value in changes.items()]
    statement = _update(table, tuple(changes))
    require_one(transaction.run(statement, *values, *(before[name] for name in key)), table)
    capture(transaction, object_id, table, "update", after={**before, **changes}, before=before)


def delete_rows(transaction: Transaction, object_id: int, table: sa.Table, rows: Sequence[Values]) -> None:
    """Delete rows of one lake object that were read under its lock."""
    key = _key_of(table)
    transaction.run_many(_delete(table), [tuple(row[name] for name in key) for row in rows])
    key_of, dumps = _key_json(table), orjson.dumps
    transaction.capture(
        object_id, str(table.name), [("delete", key_of(row), None, dumps(row).decode()) for row in rows]
    )


def capture(
    transaction: Transaction,
    object_id: int,
    table: sa.Table,
    operation: str,
    *,
    after: Values | None = None,
    before: Values | None = None,
) -> None:
    """Capture one change."""
    row = after if after is not None else before
    assert row is not None
    key = _key_json(table)(row)
    transaction.capture(
        object_id,
        str(table.name),
        [
            (
                operation,
                key,
                orjson.dumps(after).decode() if after is not None else None,
                orjson.dumps(before).decode() if before is not None else None,
            )
        ],
    )


def require_one(affected: int, table: sa.Table) -> None:
    """Refuse to go on when a change did not meet exactly the row it was meant for."""
    if affected != 1:
        raise RegistryCorrupt(
            f"a change met {affected} rows instead of one", on=table.name, remedy="Run lakebook verify"
        )


def row_of(table: sa.Table, values: Sequence[Any]) -> dict[str, Any]:
    """A row of all columns as a dictionary, with its JSON parsed."""
    row = dict(zip(_names(table), values, strict=True))
    for name in _json_columns(table):
        if isinstance(row[name], str):
            row[name] = orjson.loads(row[name])
    for name in _flags(table):
        row[name] = bool(row[name])  # SQLite knows only 0 and 1.
    return row


@cache
def _names(table: sa.Table) -> tuple[str, ...]:
    # SQLAlchemy's names are a kind of str that JSON does not take for one.
    return tuple(str(column.name) for column in table.columns)


@cache
def _json_columns(table: sa.Table) -> frozenset[str]:
    return frozenset(str(column.name) for column in table.columns if isinstance(column.type, sa.JSON))


@cache
def _flags(table: sa.Table) -> tuple[str, ...]:
    return tuple(str(column.name) for column in table.columns if isinstance(column.type, sa.Boolean))


@cache
def _key_of(table: sa.Table) -> tuple[str, ...]:
    return tuple(str(column.name) for column in table.primary_key.columns)


@cache
def _key_json(table: sa.Table) -> Callable[[Values], str]:
    """What makes the key of a row as JSON; the usual key of one column is written directly."""
    names = _key_of(table)
    if len(names) == 1:
        (name,) = names
        return lambda row: f'{{"{name}":{orjson.dumps(row[name]).decode()}}}'
    return lambda row: orjson.dumps({name: row[name] for name in names}).decode()


@cache
def _insert(table: sa.Table) -> Insert:
    return insert_into(table)


@cache
def _insert_returning(table: sa.Table) -> Statement:
    names = [column.name for column in table.columns if column.name != "id"]
    return Statement(sa.insert(table).values({name: bind(name) for name in names}).returning(table.c["id"]), *names)


@cache
def _update(table: sa.Table, names: tuple[str, ...]) -> Statement:
    key = _key_of(table)
    clause = (
        sa.update(table)
        .where(*(table.c[name] == bind(f"key_{name}") for name in key))
        .values({name: bind(f"new_{name}", table.c[name].type) for name in names})
    )
    return Statement(clause, *(f"new_{name}" for name in names), *(f"key_{name}" for name in key))


@cache
def _delete(table: sa.Table) -> Statement:
    key = _key_of(table)
    return Statement(
        sa.delete(table).where(*(table.c[name] == bind(f"key_{name}") for name in key)),
        *(f"key_{name}" for name in key),
    )


assert all(table.primary_key.columns for table in schema.CAPTURED)
