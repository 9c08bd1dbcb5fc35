"""SQL statements written in SQLAlchemy Core and run on the driver's own cursor.

A statement is compiled once per database. Its values are bound by position, in the
order in which the statement declares their names, so that a look-up costs little
more than the driver itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine.interfaces import Dialect

SQLITE = "sqlite"
POSTGRESQL = "postgresql"

# Both are positional, so that no dictionary is built for a look-up.
DIALECTS: dict[str, Dialect] = {
    SQLITE: SQLiteDialect_pysqlite(paramstyle="qmark"),
    POSTGRESQL: PGDialect_psycopg(paramstyle="format"),  # type: ignore[no-untyped-call]
}

#: `LIMIT 1` as a constant: a bound one hides from the planner that one row is enough.
ONE: sa.ColumnClause[int] = sa.literal_column("1", sa.Integer)
#: Without it, SQLAlchemy gives every LIMIT on SQLite an OFFSET whose zero is bound at each call.
ZERO: sa.ColumnClause[int] = sa.literal_column("0", sa.Integer)

Clause: TypeAlias = sa.sql.base.Executable | str


class Compiled:
    """One statement in the words of one database."""

    __slots__ = ("arrange", "sql")

    arrange: Callable[[Sequence[Any]], tuple[Any, ...]] | None

    def __init__(self, clause: Clause, names: tuple[str, ...], database: str) -> None:
        if isinstance(clause, str):
            clause = sa.text(clause)
        compiled = clause.compile(dialect=DIALECTS[database])  # type: ignore[attr-defined]
        order = list(compiled.positiontup or ())
        # Constants of the clause itself are bound like values, behind the ones that are given.
        constants = tuple(name for name in dict.fromkeys(order) if name not in names)
        if missing := [name for name in constants if compiled.params.get(name) is None] + sorted({*names} - {*order}):
            raise TypeError(f"the statement's values and its declared names differ in {missing}")
        self.sql = str(compiled)
        # None: the values stand in the right order already, the usual case.
        self.arrange = None
        if order != list(names):
            everything = (*names, *constants)
            self.arrange = _arrangement(
                [everything.index(name) for name in order], tuple(compiled.params[name] for name in constants)
            )

    def wide(self, rows: int) -> str:
        """This INSERT with that many rows of values."""
        head, _, row = self.sql.partition(" VALUES ")
        return f"{head} VALUES {', '.join([row] * rows)}"


class Statement:
    """A named statement: its clause, and the names of its values in the order they are given."""

    def __init__(self, clause: Clause, *names: str, postgresql: Clause | None = None) -> None:
        self._clauses = {SQLITE: clause, POSTGRESQL: clause if postgresql is None else postgresql}
        self._names = names
        #: What `on` has compiled; looked into directly where a call would be felt.
        self.compiled: dict[str, Compiled] = {}

    def on(self, database: str) -> Compiled:
        """This statement for that kind of database."""
        compiled = self.compiled.get(database)
        if compiled is None:
            compiled = self.compiled[database] = Compiled(self._clauses[database], self._names, database)
        return compiled


def _arrangement(indexes: Sequence[int], constants: tuple[Any, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(indexes) == 1:
        only = indexes[0]
        return lambda values: ((*values, *constants)[only],)
    pick: Callable[[Any], tuple[Any, ...]] = itemgetter(*indexes)
    return (lambda values: pick((*values, *constants))) if constants else pick


class Insert(Statement):
    """An INSERT of one row, that can also take many."""

    def __init__(self, table: sa.TableClause, columns: tuple[str, ...]) -> None:
        # Inline: else SQLAlchemy has PostgreSQL return a key that nobody asks for.
        clause = sa.insert(table).values({name: sa.bindparam(name) for name in columns}).inline()
        super().__init__(clause, *columns)
        #: PostgreSQL's way to take many rows; the names are the schema's own.
        self.copy = f"COPY {table.name} ({', '.join(columns)}) FROM STDIN"


def insert_into(table: sa.Table, *columns: str) -> Insert:
    """Insert one row; the values are given in the order of `columns` (all, if none is named)."""
    return Insert(table, columns or tuple(str(column.name) for column in table.columns))


def bind(name: str, kind: type[sa.types.TypeEngine[Any]] | sa.types.TypeEngine[Any] | None = None) -> Any:
    """A value that is given when the statement runs."""
    return sa.bindparam(name, type_=kind)


def among(column: sa.ColumnElement[Any], name: str, database: str) -> sa.ColumnElement[bool]:
    """`column IN (many values)`, the values bound as one: see `Reader.listed`."""
    if database == POSTGRESQL:
        return column == sa.any_(sa.bindparam(name, type_=ARRAY(column.type)))
    return column.in_(
        sa.select(sa.literal_column("value")).select_from(sa.func.json_each(sa.bindparam(name, type_=sa.Text)))
    )


def wanted(
    name: str, database: str, *types: type[sa.types.TypeEngine[Any]]
) -> tuple[sa.FromClause, list[sa.ColumnElement[Any]]]:
    """Rows that the caller asks about, bound as one JSON array of arrays, and their columns."""
    given = sa.bindparam(name, type_=sa.Text)
    if database == POSTGRESQL:
        rows = sa.func.jsonb_array_elements(sa.cast(given, JSONB)).table_valued(sa.column("value", JSONB), name=name)
        texts = [rows.c.value.op("->>")(sa.literal_column(str(index))) for index in range(len(types))]
        return rows, [sa.cast(text, kind) for text, kind in zip(texts, types, strict=True)]
    rows = sa.func.json_each(given).table_valued("value", name=name)
    return rows, [sa.func.json_extract(rows.c.value, sa.literal_column(f"'$[{n}]'")) for n, _ in enumerate(types)]
