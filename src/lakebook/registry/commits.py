"""Commit rows: the fence that settles a write whose outcome is not known.

    open → committed      by the transaction of the write itself, as its first step
    open → aborted        by whoever must know the outcome; it waits for a COMMIT in flight

A write that stores files first opens its row beforehand. Any other brings a row of its own,
already committed, in its transaction; whoever asks tries to insert the same id as aborted.

Rows that nobody can ask for any more are removed. Who finds none where one was knows that it is
finished, and not how: it goes by what the write has left.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles

from lakebook.errors import CommitAborted
from lakebook.registry import schema
from lakebook.registry.statements import ONE, ZERO, Statement, bind, insert_into
from lakebook.registry.transactions import Transaction

# Fences are kept for twice as long as anybody may still ask for them.
FENCE_KEPT_MS = 3_600_000
FENCE_ASKED_MS = FENCE_KEPT_MS // 2

#: A transaction that was not opened beforehand has a commit row of this kind.
FENCE = "fence"

_HOUR = FENCE_KEPT_MS
_DAY = 24 * _HOUR

# How long finished rows are kept, by kind and by how they ended; those of other kinds, for good. No row goes
# while an attempt's row, an append turn or a folder of segments names it. Who else may ask, and why it does no harm:
# - Whoever lost the connection during COMMIT asks for at most `retry_seconds`, and hears that the outcome is
#   unknown if there is no row any more.
# - `append`: a call that is repeated finds what landed by the segments themselves, or by its file, which waits.
# - `table`, `schema`, `mirror`: nobody keeps the id beyond the call.
# - `insert`, `rewrite`, `compaction`: an appender that lost its registry keeps asking how its last commit
#   ended, and its rows with it. The others do not ask after their call.
# - `merge`, `batch`: a batch that is repeated is known by its sink, or by this row; a merge by its file.
# - `publish`: if it was committed, its metadata files have rows; nobody asks.
# - An attempt that was frozen until others had aborted, swept and forgotten it asks when it wakes, and removes
#   what it still writes because it hears that it was aborted. So that is remembered for longer.
# - `verify` asks for the commits of files and segments. It knows that those of old ones may be gone. Of an
#   aborted commit no row of a table can exist; if one does, the commit stays to tell of it.
# A client whose clock is slow by hours lets its rows look older: then it hears "unknown", and never a wrong answer.
_ENDS = ("committed", "aborted")
_KEPT = {
    **{(kind, state): _HOUR for kind in ("append", "table", "schema", "mirror") for state in _ENDS},
    **{(kind, "committed"): _DAY for kind in ("insert", "rewrite", "compaction", "merge", "batch")},
    **{(kind, "aborted"): 30 * _DAY for kind in ("insert", "rewrite", "compaction", "publish", "merge", "batch")},
    ("publish", "committed"): _HOUR,
}
# A write that opens its row and then commits it takes seconds. One that has not for a day is dead.
_FORSAKEN_MS = _DAY


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


_named_by_attempt = sa.exists(
    sa.select(ONE).select_from(schema.inserts).where(schema.inserts.c.commit_id == _c.id).correlate(schema.commits)
)
_turns = schema.append_turns.c
_named_by_turn = _c.id.in_(sa.select(_turns.commit_id).where(_turns.commit_id.is_not(None)))
_folders = schema.stream_folders.c
_named_by_folder = _c.id.in_(sa.select(_folders.commit_id).where(_folders.commit_id.is_not(None)))
_has_files = sa.exists(
    sa.select(ONE)
    .select_from(schema.table_files)
    .where(schema.table_files.c.commit_id == _c.id)
    .correlate(schema.commits)
)
PRUNE_COMMITS = Statement(
    sa.delete(schema.commits).where(
        _c.id.in_(
            sa.select(_c.id)
            .where(
                _c.kind == bind("of_kind"),
                _c.finished_at < DATABASE_TIME - bind("kept", sa.BigInteger),
                _c.state == bind("in_state"),
                sa.not_(_named_by_attempt),
                sa.not_(_named_by_turn),
                sa.not_(_named_by_folder),
                sa.or_(_c.state == "committed", sa.not_(_has_files)),
            )
            .order_by(_c.finished_at)
            .limit(bind("most", sa.Integer))
            .offset(ZERO)
        )
    ),
    "of_kind",
    "kept",
    "in_state",
    "most",
)
ABORT_FORSAKEN = Statement(
    sa.update(schema.commits)
    .where(
        _c.id.in_(
            sa.select(_c.id)
            .where(
                # As a constant, else the planner does not see that the index of open ones is enough.
                _c.state == sa.literal_column("'open'"),
                _c.opened_at < DATABASE_TIME - bind("silent", sa.BigInteger),
                sa.not_(_named_by_attempt),
                sa.not_(_named_by_turn),
                sa.not_(_named_by_folder),
            )
            .order_by(_c.opened_at)
            .limit(bind("most", sa.Integer))
            .offset(ZERO)
            # One that is just being committed is not waited for.
            .with_for_update(skip_locked=True)
        )
    )
    .values(state="aborted", finished_at=bind("now")),
    "now",
    "silent",
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


def is_doubtful(written_at: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    """Whether something written at a time has a commit that is not committed, in a query that may lack its row.

    The rows of old ones are removed, so that only what is new must have one. Half an hour is left for clocks
    that differ.
    """
    new = written_at > DATABASE_TIME - sa.literal_column(str(FENCE_ASKED_MS), sa.BigInteger)
    return sa.or_(_c.state != sa.literal_column("'committed'"), sa.and_(_c.state.is_(None), new))


def abort_forsaken(transaction: Transaction, most: int) -> int:
    """Abort commits of writers that died before they used them; how many.

    Those of attempts and folders are settled by a sweep, and the one that an append turn names when the turn
    passes on: at most one per partition stays open for long. Aborting is safe at any time: a writer that lives
    begins again.
    """
    return transaction.run(ABORT_FORSAKEN, transaction.clock.now_ms(), _FORSAKEN_MS, most)


def prune_commit_rows(transaction: Transaction, most: int) -> int:
    """Remove finished commits that nobody can ask for any more, at most so many of each kind; how many."""
    return sum(transaction.run(PRUNE_COMMITS, kind, kept, state, most) for (kind, state), kept in _KEPT.items())
