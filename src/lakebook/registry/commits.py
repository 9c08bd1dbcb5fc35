"""Commit rows: the fence that settles a write whose outcome is not known.

    open → committed      by the transaction of the write itself, as its first step
    open → aborted        by whoever must know the outcome; it waits for a COMMIT in flight

A write that stores files first opens its row beforehand. Any other brings a row of its own,
already committed, in its transaction; whoever asks tries to insert the same id as aborted.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles

from lakebook.errors import CommitAborted
from lakebook.registry import schema
from lakebook.registry.statements import ZERO, Statement, bind, insert_into
from lakebook.registry.transactions import Transaction

# Fences are kept for twice as long as anybody may still ask for them.
FENCE_KEPT_MS = 3_600_000
FENCE_ASKED_MS = FENCE_KEPT_MS // 2

#: A transaction that was not opened beforehand has a commit row of this kind.
FENCE = "fence"


class _DatabaseTime(sa.sql.expression.ColumnElement[int]):
    """The database's own clock, in milliseconds: fences of all clients are pruned by one clock."""

    inherit_cache = True
    type = sa.BigInteger()


@compiles(_DatabaseTime, "sqlite")
def _sqlite_time(*_: Any, **__: Any) -> str:
    # Not unixepoch('subsec'), which older libraries do not know.
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


@compiles(_DatabaseTime, "postgresql")
def _postgresql_time(*_: Any, **__: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)"


DATABASE_TIME = _DatabaseTime()

INSERT_COMMIT = insert_into(schema.commits)
INSERT_FENCE = Statement(
    sa.insert(schema.commits).values(
        id=bind("id"),
        kind=sa.literal_column(f"'{FENCE}'"),
        state=bind("state"),
        epoch=bind("epoch"),
        owner=bind("owner"),
        opened_at=DATABASE_TIME,
        finished_at=DATABASE_TIME,
    ),
    "id",
    "state",
    "epoch",
    "owner",
)
_c = schema.commits.c
COMMIT_OPEN = Statement(
    sa.update(schema.commits)
    .where(_c.id == bind("commit_id"), _c.state == "open", _c.epoch == bind("of_epoch"))
    .values(state="committed", finished_at=bind("now")),
    "now",
    "commit_id",
    "of_epoch",
)
ABORT_OPEN = Statement(
    sa.update(schema.commits)
    .where(_c.id == bind("commit_id"), _c.state == "open")
    .values(state="aborted", finished_at=bind("now")),
    "now",
    "commit_id",
)
SHARE_COMMIT = Statement(sa.select(_c.state).where(_c.id == bind("commit_id")).with_for_update(read=True), "commit_id")
STATE_OF_COMMIT = Statement(sa.select(_c.state).where(_c.id == bind("commit_id")), "commit_id")
# The time of the statement, not of the transaction; as the clock reads, in milliseconds.
DATABASE_NOW = Statement(sa.text("SELECT CAST(floor(extract(epoch FROM clock_timestamp()) * 1000) AS bigint)"))
PRUNE_FENCES = Statement(
    sa.delete(schema.commits).where(
        _c.id.in_(
            sa.select(_c.id)
            .where(_c.kind == FENCE, _c.finished_at < DATABASE_TIME - bind("kept", sa.BigInteger))
            .order_by(_c.finished_at)
            .limit(bind("most", sa.Integer))
            .offset(ZERO)
        )
    ),
    "kept",
    "most",
)


def owner() -> str:
    """Who writes, for people who look at a commit row."""
    return f"{socket.gethostname()}:{os.getpid()}"


def open_commit_row(transaction: Transaction, commit_id: str, kind: str) -> None:
    """Open a commit row as part of a transaction."""
    now = transaction.clock.now_ms()
    transaction.run(INSERT_COMMIT, commit_id, kind, "open", transaction.epoch, owner(), now, None)


def require_open(transaction: Transaction, commit_id: str) -> None:
    """Refuse to go on with a commit that was fenced; whoever would fence it waits for this transaction."""
    row = transaction.one(SHARE_COMMIT, commit_id)
    if row is None or row[0] != "open":
        raise CommitAborted("it was fenced", on=f"commit {commit_id}", remedy="Begin again with a new commit")


def abort_commit(transaction: Transaction, commit_id: str) -> None:
    """Make sure that an open commit never takes effect; one that has is left as it is."""
    transaction.run(ABORT_OPEN, transaction.clock.now_ms(), commit_id)
