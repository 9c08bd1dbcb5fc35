"""Alembic's entry: runs each revision in a transaction of its own, on both databases."""

from __future__ import annotations

from alembic import context

from lakebook.registry import schema
from lakebook.registry.migrate import VERSION_TABLE
from lakebook.registry.statements import POSTGRESQL

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=schema.metadata,
    version_table=VERSION_TABLE,
    # Named: else the one of another book is found, further along PostgreSQL's search path.
    version_table_schema=connection.dialect.default_schema_name if connection.dialect.name == POSTGRESQL else None,
    transaction_per_migration=True,
    # SQLite's DDL takes part in transactions too; Alembic assumes that it does not.
    transactional_ddl=True,
    on_version_apply=context.config.attributes["on_version_apply"],
)
with context.begin_transaction():
    context.run_migrations()
