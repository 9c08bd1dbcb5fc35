"""Batches of sinks that were lost with the registry: each counts in all of its partitions, or in none.

A batch is stored segment by segment and committed as a whole. Each of its segments says which attempt at it they are,
and how many records all of them have: one that stopped in the middle is known, and did not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lakebook.recovery.claims import Claim, Settled, overlap

Settle = Callable[[int, Sequence[Claim]], Settled]


@dataclass(frozen=True)
class LastBatch:
    """The last batch of a sink that has landed, and the commit by which it did."""

    number: int
    commit_id: str


def unfinished_attempts(claims: Sequence[Claim], proven: Collection[str]) -> list[Claim]:
    """The segments of attempts at batches that were not stored as a whole, and so have never counted.

    A part of a batch that counted may be gone as well, merged or removed by retention. That it counted is shown by
    whoever went on: by a merge of it, or by a segment that begins behind it where nobody else claims its offsets.
    """
    attempts = _by_attempt(claims)
    merged = last_batches(claim for claim in claims if claim.attempt is None)
    found: list[Claim] = []
    for some in attempts.values():
        if sum(claim.count for claim in some) == some[0].attempt_records:
            continue
        if any(claim.path in proven for claim in some) or _is_merged(some[0], merged):
            continue
        if not any(_is_followed(claim, claims) for claim in some):
            found += some
    return found


def _by_attempt(claims: Iterable[Claim]) -> dict[str, list[Claim]]:
    found: dict[str, list[Claim]] = {}
    for claim in claims:
        if claim.attempt is not None:
            found.setdefault(claim.attempt, []).append(claim)
    return found


def _is_merged(claim: Claim, merged: Mapping[str, LastBatch]) -> bool:
    return any(sink in merged and merged[sink].number >= number for sink, number in claim.sinks)


def _is_followed(claim: Claim, claims: Sequence[Claim]) -> bool:
    others = [item for item in claims if item.partition == claim.partition and item.attempt != claim.attempt]
    return any(item.base >= claim.end for item in others) and not any(overlap(item, claim) for item in others)


def settle_batches(
    claims: Mapping[int, Sequence[Claim]], proven: Collection[str], settle: Settle
) -> dict[int, Settled]:
    """Decide on the claims on all partitions of a topic, by the number of each; `settle` decides on one alone.

    An attempt of which a part is disproved has not counted, nor has any other part of it. Where a part is contested,
    all of it is. And a batch counts once.
    """
    left = {number: list(some) for number, some in claims.items()}
    settled = {number: settle(number, some) for number, some in left.items()}
    refused: dict[str, list[Claim]] = {"disproved": [], "contested": []}
    while any(broken := _broken(settled, proven)):
        changed: set[int] = set()
        for some, into in zip(broken, refused.values(), strict=True):
            into += some
            changed |= {claim.partition for claim in some}
        gone = {claim.path for some in broken for claim in some}
        for number in changed:
            # What they stood in the way of may count now.
            left[number] = [claim for claim in left[number] if claim.path not in gone]
            settled[number] = settle(number, left[number])
    for claim in refused["disproved"]:
        settled[claim.partition].disproved.append(claim)
    for claim in refused["contested"]:
        settled[claim.partition].contested.append(claim)
    return settled


def _broken(settled: Mapping[int, Settled], proven: Collection[str]) -> tuple[list[Claim], list[Claim]]:
    """What cannot count though it was chosen: what is disproved by another part of its batch, and what is contested."""
    results = list(settled.values())
    chosen = [claim for result in results for claim in result.chosen if claim.attempt is not None]
    certain = {claim.attempt for claim in chosen if claim.path in proven}
    open_ones = [claim for claim in chosen if claim.attempt not in certain]
    disproved = {claim.attempt for result in results for claim in result.disproved}
    contested = {claim.attempt for result in results for claim in result.contested}
    by_batch: dict[tuple[tuple[str, int], ...], list[Claim]] = {}
    for claim in chosen:
        if claim.sinks:
            by_batch.setdefault(claim.sinks, []).append(claim)
    for some in by_batch.values():
        if sum(claim.count for claim in some) > (some[0].attempt_records or 0):
            others = {claim.attempt for claim in some} - certain
            (disproved if len({claim.attempt for claim in some}) > len(others) else contested).update(others)
    return (
        [claim for claim in open_ones if claim.attempt in disproved],
        [claim for claim in open_ones if claim.attempt in contested and claim.attempt not in disproved],
    )


def last_batches(claims: Iterable[Claim]) -> dict[str, LastBatch]:
    """The last batch of each sink that segments tell of."""
    found: dict[str, LastBatch] = {}
    for claim in claims:
        for sink, number in claim.sinks:
            if sink not in found or found[sink].number < number:
                found[sink] = LastBatch(number, claim.commit_id)
    return found
