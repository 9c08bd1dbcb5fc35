"""Alembic's entry: runs each revision in a transaction of its own, on both databases."""

from __future__ import annotations

from alembic import context

from lakebook.registry import schema
from lakebook.registry.migrate import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    version_table=VERSION_TABLE,
    transaction_per_migration=True,
    # SQLite's DDL takes part in transactions too; Alembic assumes that it does not.
    transactional_ddl=True,
    on_version_apply=context.config.attributes["on_version_apply"],
)
with context.begin_transaction():
    context.run_migrations()
