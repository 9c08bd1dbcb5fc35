"""Claims on ranges of views: who builds what now, and whether its sources have changed meanwhile.

A claim is taken before the sources are read, in a transaction that holds their lake objects. It runs out if it is
not renewed; who takes it over has a token of its own, and the former holder can enter nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import ClaimLost, RangeClaimed
from lakebook.registry import schema
from lakebook.registry.commits import owner
from lakebook.registry.databases import Failure
from lakebook.registry.ranges import Range, ranges_between, shown_range
from lakebook.registry.statements import Statement, bind, insert_into
from lakebook.registry.transactions import Reader, Transaction, TryAgain, new_id
from lakebook.registry.views import ViewRecord, current_view, lock_sources, locked_view

_c = schema.view_claims.c
_one = (_c.view_id == bind("of_view"), _c.instance == bind("instance"))

# Waits for renewals under way, and then sees them: else who takes a range over would end a claim that was just renewed.
LOCK_OVERLAPPING = Statement(
    sa.select(_c.begin_time, _c.end_time, _c.token, _c.holder, _c.expires_at)
    .where(*_one, _c.begin_time < bind("end"), _c.end_time > bind("begin"))
    .order_by(_c.begin_time)
    .with_for_update(),
    "of_view",
    "instance",
    "begin",
    "end",
)
INSERT_CLAIM = insert_into(schema.view_claims)
DELETE_CLAIM = Statement(
    sa.delete(schema.view_claims).where(*_one, _c.begin_time == bind("begin"), _c.token == bind("of_token")),
    "of_view",
    "instance",
    "begin",
    "of_token",
)
RENEW_CLAIM = Statement(
    sa.update(schema.view_claims)
    .where(*_one, _c.begin_time == bind("begin"), _c.token == bind("of_token"))
    .values(expires_at=bind("until")),
    "until",
    "of_view",
    "instance",
    "begin",
    "of_token",
)
LOCK_CLAIM = Statement(
    sa.select(_c.dirty, _c.frozen)
    .where(*_one, _c.begin_time == bind("begin"), _c.token == bind("of_token"))
    .with_for_update(),
    "of_view",
    "instance",
    "begin",
    "of_token",
)
IS_FROZEN = Statement(
    sa.select(_c.frozen).where(*_one, _c.begin_time == bind("begin"), _c.token == bind("of_token")),
    "of_view",
    "instance",
    "begin",
    "of_token",
)
CLAIMS_OF = Statement(
    sa.select(_c.instance, _c.begin_time, _c.end_time, _c.holder, _c.expires_at)
    .where(_c.view_id == bind("of_view"))
    .order_by(_c.instance, _c.begin_time),
    "of_view",
)


@dataclass(frozen=True)
class Claim:
    """A range that this process builds."""

    view_id: int
    instance: str
    begin: int
    end: int
    token: str

    @property
    def _key(self) -> tuple[int, str, int, str]:
        return self.view_id, self.instance, self.begin, self.token


@dataclass(frozen=True)
class ClaimInfo:
    """A range that somebody builds."""

    instance: str
    begin: datetime
    end: datetime
    holder: str
    expires_at: datetime


def take_claim(
    transaction: Transaction, view: ViewRecord, instance: str, begin: int, end: int, seconds: float
) -> tuple[Claim, ViewRecord, list[Range]]:
    """Claim a range; with the view and what is built in the range, as they are now.

    `RangeClaimed` is raised while another one has it. One that has run out is taken over.
    """
    known = current_view(transaction, view)
    lock_sources(transaction, known)
    present = locked_view(transaction, view)
    if present.sources != known.sources:
        raise TryAgain(Failure.BUSY)  # It was altered while the locks were waited for.
    rivals = transaction.all(LOCK_OVERLAPPING, view.id, instance, begin, end)
    now = transaction.clock.now_ms()
    for found_begin, found_end, token, holder, until in rivals:
        if until > now:
            raise RangeClaimed(
                f"{shown_range(found_begin, found_end)} is being built by {holder}",
                on=view.shown,
                remedy="Wait until that has ended, or has been silent for a while",
            )
        transaction.run(DELETE_CLAIM, view.id, instance, found_begin, token)
    claim = Claim(view.id, instance, begin, end, new_id())
    until = now + round(seconds * 1000)
    transaction.run(INSERT_CLAIM, view.id, instance, begin, end, claim.token, owner(), until, False, False)
    return claim, present, ranges_between(transaction, view.name, instance, begin, end)


def renew_claim(transaction: Transaction, claim: Claim, seconds: float) -> bool:
    """Renew a claim; whether it is still held."""
    until = transaction.clock.now_ms() + round(seconds * 1000)
    return transaction.run(RENEW_CLAIM, until, *claim._key) == 1


def end_claim(transaction: Transaction, claim: Claim) -> None:
    """Let go of a claim, if it is still held."""
    transaction.run(DELETE_CLAIM, *claim._key)


def settle_claim(transaction: Transaction, view: ViewRecord, claim: Claim) -> tuple[bool, bool]:
    """End a claim with the range that was built under it; whether that is stale already, and whether frozen.

    The first of the locks on rows of a view: who marks what a commit concerns takes it first, too.
    """
    row = transaction.one(LOCK_CLAIM, *claim._key)
    if row is None:
        current_view(transaction, view)  # If it was dropped, that is the reason to tell.
        raise ClaimLost(
            f"another worker has taken {shown_range(claim.begin, claim.end)} over",
            on=view.shown,
            remedy="Leave it to that one",
        )
    transaction.run(DELETE_CLAIM, *claim._key)
    return bool(row[0]), bool(row[1])


def is_frozen(reader: Reader, claim: Claim) -> bool:
    """Whether rows of the range have gone from its sources since it was claimed; of a lost claim the end tells."""
    row = reader.one(IS_FROZEN, *claim._key)
    return row is not None and bool(row[0])


def list_claims(reader: Reader, view: ViewRecord) -> list[ClaimInfo]:
    """The ranges of a view that are being built, or whose builder has died."""
    return [
        ClaimInfo(instance, to_datetime(begin), to_datetime(end), holder, to_datetime(until))
        for instance, begin, end, holder, until in reader.all(CLAIMS_OF, view.id)
    ]
