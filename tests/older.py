"""Books as older versions of Lakebook have left them."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from lakebook.clock import SystemClock
from lakebook.registry.backup_files import backup_at
from lakebook.registry.databases import Database
from lakebook.registry.migrate import migrate_to
from lakebook.registry.portable import _LEFT_OUT, _insert, _set_positions, _transaction


def as_of(database: Database, revision: str, backup: Path) -> None:
    """Make a registry of an older revision that has the rows of a backup, as far as there were columns for them."""
    migrate_to(database, revision)
    with database.engine() as engine:
        found = sa.inspect(engine)
        there = set(found.get_table_names()) - _LEFT_OUT
        known = {name: {column["name"] for column in found.get_columns(name)} for name in there}
    with _transaction(database, SystemClock()) as transaction, backup_at(backup).opened() as (header, tables):
        for name, columns, rows in tables:
            kept = [number for number, column in enumerate(columns) if column.name in known.get(name, ())]
            values = [[row[number] for number in kept] for row in rows]
            if kept:
                transaction.insert_many(_insert(transaction, name, [columns[number] for number in kept]), values)
            else:
                # It came later. What it holds, no older book can have.
                assert values == [], name
        _set_positions(transaction, header.positions)
