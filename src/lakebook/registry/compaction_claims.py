"""Claims on tables: who compacts which one now.

A claim is taken before files are chosen. It runs out if it is not renewed; who takes it over has a token of its own,
and the former holder can commit nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import ClaimLost, CompactionClaimed
from lakebook.registry import schema
from lakebook.registry.commits import owner
from lakebook.registry.object_names import names_of_tables
from lakebook.registry.statements import ZERO, Statement, bind, insert_into
from lakebook.registry.tables import TableRecord, locked_table
from lakebook.registry.transactions import Reader, Transaction, new_id

_c = schema.compaction_claims.c
_one = (_c.table_id == bind("of_table"), _c.token == bind("of_token"))

_claim_on = sa.select(_c.token, _c.holder, _c.expires_at).where(_c.table_id == bind("of_table"))

CLAIM_ON = Statement(_claim_on, "of_table")
# Waits for a renewal under way, and then sees it: else who takes it over would end a claim that was just renewed.
LOCK_CLAIM_ON = Statement(_claim_on.with_for_update(), "of_table")
INSERT_CLAIM = insert_into(schema.compaction_claims)
END_CLAIM = Statement(sa.delete(schema.compaction_claims).where(*_one), "of_table", "of_token")
RENEW_CLAIM = Statement(
    sa.update(schema.compaction_claims).where(*_one).values(expires_at=bind("until")), "until", "of_table", "of_token"
)
EVERY_CLAIM = Statement(
    sa.select(_c.table_id, _c.holder, _c.expires_at).order_by(_c.table_id).limit(bind("most", sa.Integer)).offset(ZERO),
    "most",
)


@dataclass(frozen=True)
class CompactionClaim:
    """A table that this process compacts."""

    table_id: int
    token: str


@dataclass(frozen=True)
class CompactionInfo:
    """A table that somebody compacts."""

    table_id: int
    #: With its namespace.
    table: str
    holder: str
    expires_at: datetime
    #: Whether it was renewed in time; else its holder has died or is frozen, and whoever comes takes it over.
    alive: bool


def take_claim(transaction: Transaction, table: TableRecord, seconds: float) -> CompactionClaim:
    """Claim a table; `CompactionClaimed` is raised while another one has it. One that has run out is taken over."""
    # Under the table's lock: two that find no claim, or a dead one, do not both take it, and one that is about to
    # commit has either committed by now or finds that its claim is gone.
    locked_table(transaction, table)
    row = transaction.one(LOCK_CLAIM_ON, table.id)
    now = transaction.clock.now_ms()
    if row is not None:
        token, holder, until = row
        _refuse(table, holder, until, now)
        transaction.run(END_CLAIM, table.id, token)
    claim = CompactionClaim(table.id, new_id())
    transaction.run(INSERT_CLAIM, table.id, claim.token, owner(), now + round(seconds * 1000))
    return claim


def refuse_claimed(reader: Reader, table: TableRecord, now: int) -> None:
    """Raise `CompactionClaimed` if somebody compacts a table; by the present state alone, and without a lock."""
    row = reader.one(CLAIM_ON, table.id)
    if row is not None:
        _refuse(table, row[1], row[2], now)


def _refuse(table: TableRecord, holder: str, until: int, now: int) -> None:
    if until > now:
        raise CompactionClaimed(
            f"{holder} compacts it",
            on=table.shown,
            remedy="Leave it to that one, or wait until it has ended or has been silent for a while",
        )


def renew_claim(transaction: Transaction, claim: CompactionClaim, seconds: float) -> bool:
    """Renew a claim; whether it is still held."""
    until = transaction.clock.now_ms() + round(seconds * 1000)
    return transaction.run(RENEW_CLAIM, until, claim.table_id, claim.token) == 1


def end_claim(transaction: Transaction, claim: CompactionClaim) -> None:
    """Let go of a claim, if it is still held."""
    transaction.run(END_CLAIM, claim.table_id, claim.token)


def settle_claim(transaction: Transaction, table: TableRecord, claim: CompactionClaim) -> None:
    """End a claim with what was done under it; `ClaimLost` if another has taken it over. The table is locked."""
    if transaction.run(END_CLAIM, claim.table_id, claim.token) != 1:
        raise ClaimLost("another worker has taken the compaction over", on=table.shown, remedy="Leave it to that one")


def list_claims(reader: Reader, now: int, most: int) -> list[CompactionInfo]:
    """The tables that are being compacted, or whose compactor has died."""
    rows = reader.all(EVERY_CLAIM, most)
    names = names_of_tables(reader, (row[0] for row in rows))
    return [
        CompactionInfo(table_id, names[table_id], holder, to_datetime(until), until > now)
        for table_id, holder, until in rows
    ]
