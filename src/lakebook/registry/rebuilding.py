"""Filling an empty registry from elsewhere: nobody can open it as a book before all of it is there.

While it is filled its schema has a revision that is none. A process that dies leaves that mark, and whoever fills
it next begins anew. The last transaction brings the book's own row and the true revision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook import failpoints
from lakebook.errors import RegistryNotEmpty
from lakebook.registry import schema
from lakebook.registry.databases import Database, SQLite
from lakebook.registry.epoch import INSERT_BOOK, recorded_warehouse
from lakebook.registry.migrate import (
    HEAD,
    REVISIONS,
    UNFINISHED,
    check_revision,
    migrate,
    revision_of,
)
from lakebook.registry.registry import Registry
from lakebook.registry.statements import POSTGRESQL, Insert, Statement, insert_into
from lakebook.registry.transactions import Transaction, new_id

#: Rows that are inserted in one transaction.
CHUNK = 1000

SET_REVISION = Statement(sa.text("UPDATE schema_version SET version_num = :revision"), "revision")
NEXT_ID = Statement(
    sa.text("UPDATE sqlite_sequence SET seq = max(seq, :least) WHERE name = :of_table"), "least", "of_table"
)
FIRST_ID = Statement(
    sa.text(
        "INSERT INTO sqlite_sequence (name, seq)"
        " SELECT :of_table, :least WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = :of_table)"
    ),
    "of_table",
    "least",
)


def check_empty(database: Database) -> str | None:
    """Refuse a registry with a book in it; the revision of one that is there, and has none. Nothing is made."""
    if isinstance(database, SQLite) and database.path is not None and not database.path.is_file():
        return None  # To ask would make an empty file.
    revision = revision_of(database)
    if revision is None or revision.startswith(UNFINISHED):
        return revision
    if revision not in REVISIONS:
        check_revision(database, revision)
    if recorded_warehouse(database) is not None:
        raise RegistryNotEmpty(
            "there is a book in it", on=database.shown, remedy="Name a new database, or a folder that is empty"
        )
    return revision


def prepare(database: Database) -> None:
    """Have an empty registry that cannot be opened. The caller holds the migration lock."""
    revision = check_empty(database)
    if revision is None:
        database.create()
    elif revision.startswith(UNFINISHED):
        _wipe(database, revision.removeprefix(UNFINISHED))
    migrate(database)
    _mark(database, f"{UNFINISHED}{HEAD}")


def _mark(database: Database, revision: str) -> None:
    with database.engine() as engine, engine.begin() as connection:
        connection.execute(sa.text("UPDATE schema_version SET version_num = :revision"), {"revision": revision})


def _wipe(database: Database, revision: str) -> None:
    with database.engine() as engine, engine.begin() as connection:
        there = set(sa.inspect(connection).get_table_names())
        for table in reversed(schema.metadata.sorted_tables):
            if table.name in there:
                connection.execute(sa.delete(table))
        connection.execute(sa.text("UPDATE schema_version SET version_num = :revision"), {"revision": revision})


class Filling:
    """Puts rows into a registry that is being filled."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._inserts: dict[tuple[str, bool], Insert] = {}
        self.inserted: dict[str, int] = {}

    def insert(self, table: sa.Table, rows: Iterable[Mapping[str, Any]]) -> None:
        """Insert rows, by the names of their columns; columns that a row does not name have their defaults."""
        some: list[Mapping[str, Any]] = []
        for row in rows:
            some.append(row)
            if len(some) == CHUNK:
                self._insert(table, some)
                some = []
        self._insert(table, some)

    def _insert(self, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        name = str(table.name)
        # An id that is none is for the database to give.
        numbered = "id" not in table.c or rows[0].get("id") is not None
        columns = [str(column.name) for column in table.columns if numbered or column.name != "id"]
        json = {str(column.name) for column in table.columns if isinstance(column.type, sa.JSON)}
        statement = self._inserts.setdefault((name, numbered), insert_into(table, *columns))
        values = [
            tuple(_dumped(row.get(column)) if column in json else row.get(column) for column in columns) for row in rows
        ]
        self._registry.write(lambda transaction: transaction.insert_many(statement, values))
        self.inserted[name] = self.inserted.get(name, 0) + len(rows)
        failpoints.reach("rebuild.chunk")

    def finish(
        self,
        book_id: str,
        warehouse: str,
        created_at: int,
        checkpoint_at: int | None,
        least_ids: Mapping[str, int],
        store_times: tuple[int | None, int | None],
    ) -> str:
        """Make it a book, with a new epoch, which is held; ids are given from above `least_ids`.

        `store_times` are those of the checkpoint and of the newest object, by the clock of the store.
        """
        epoch = new_id()

        def work(transaction: Transaction) -> None:
            now = transaction.clock.now_ms()
            for table in schema.metadata.sorted_tables:
                # The ids of a table's files are counted per table.
                if "id" in table.c and len(table.primary_key.columns) == 1 and _is_counted(table):
                    self._raise_ids(transaction, str(table.name), least_ids.get(str(table.name), 0))
            taken = now if checkpoint_at is None else checkpoint_at
            times = (taken, now, now, *store_times)
            transaction.run(INSERT_BOOK, 1, book_id, epoch, warehouse, created_at, now, 0, None, *times)
            transaction.run(SET_REVISION, HEAD)

        failpoints.reach("rebuild.filled")
        self._registry.write(work)
        failpoints.reach("rebuild.done")
        return epoch

    def _raise_ids(self, transaction: Transaction, table: str, least: int) -> None:
        if transaction.kind == POSTGRESQL:
            sequence = f"pg_get_serial_sequence('{table}', 'id')"
            highest = f"GREATEST({int(least)}, (SELECT COALESCE(MAX(id), 0) FROM {table}))"  # noqa: S608 - our own names
            raised = f"SELECT setval({sequence}, {highest}) FROM (SELECT 1) AS one WHERE {highest} > 0"  # noqa: S608
            transaction.one(Statement(sa.text(raised)))
            return
        transaction.run(NEXT_ID, least, table)
        if least:
            transaction.run(FIRST_ID, table, least)


def _is_counted(table: sa.Table) -> bool:
    return isinstance(table.c["id"].identity, sa.Identity)


def _dumped(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()
