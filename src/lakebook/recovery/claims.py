"""Segments that describe themselves: what each claims, and which claims can all be true.

Two files that claim the same offsets are no contradiction if they hold the same records, as a merge and what it
was made of do. If they differ, one of them may be proven: the checkpoint knew it. Where none is, none is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from lakebook.clock import to_ms
from lakebook.errors import InvalidSegment, LakebookError
from lakebook.lake.footer_store import read_footers
from lakebook.lake.footers import open_footer
from lakebook.storage.answers import ObjectInfo
from lakebook.storage.objects import ObjectStore
from lakebook.streams.segment_files import SegmentReader

_AT_ONCE = 500


@dataclass(frozen=True)
class Claim:
    """What a segment's file says of itself."""

    path: str
    size: int
    modified: int
    topic_id: int
    partition: int
    base: int
    count: int
    min_timestamp: int
    max_timestamp: int
    producer_id: str | None = None
    producer_epoch: int | None = None
    first_sequence: int | None = None
    last_sequence: int | None = None

    @property
    def end(self) -> int:
        """One more than its last offset."""
        return self.base + self.count

    @property
    def batch(self) -> tuple[Any, ...] | None:
        """The batch of a producer that it is; none if it is not one."""
        if self.producer_id is None or self.first_sequence is None:
            return None
        return (self.producer_id, self.producer_epoch, self.first_sequence)


@dataclass
class Settled:
    """What became of the claims on a partition."""

    chosen: list[Claim] = field(default_factory=list)
    #: The same records are in chosen ones.
    superseded: list[Claim] = field(default_factory=list)
    #: Others are proven to have their offsets.
    disproved: list[Claim] = field(default_factory=list)
    #: Nobody can tell which of them counted.
    contested: list[Claim] = field(default_factory=list)
    below: list[Claim] = field(default_factory=list)


def read_claims(
    store: ObjectStore,
    objects: Sequence[ObjectInfo],
    listed: Mapping[str, Mapping[str, Any]],
    unreadable: Callable[[ObjectInfo, str], None],
) -> Iterable[Claim]:
    """What files say of themselves, or the checkpoint of one that was recorded by hand (`listed`).

    `unreadable` is told of each of which nobody says anything.
    """
    for start in range(0, len(objects), _AT_ONCE):
        some = objects[start : start + _AT_ONCE]
        try:
            footers: list[bytes | None] = list(read_footers(store, [(item.path, item.size) for item in some]))
        except LakebookError:
            footers = [None] * len(some)
        for item, footer in zip(some, footers, strict=True):
            try:
                found = footer if footer is not None else read_footers(store, [(item.path, item.size)])[0]
                yield _claim(item, found, listed.get(item.path))
            except LakebookError as error:
                unreadable(item, error.what)
            except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
                unreadable(item, f"it does not say what it is ({type(error).__name__})")


def _claim(item: ObjectInfo, footer: bytes, listed: Mapping[str, Any] | None) -> Claim:
    opened = open_footer(footer, on=item.path)
    facts: dict[str, Any] = {key.decode(): value.decode() for key, value in (opened.metadata or {}).items()}
    if listed is not None and "lakebook.topic_id" not in facts and listed["record_count"] == opened.num_rows:
        known = {"topic_id": "topic_id", "partition": "partition_id", "base_offset": "base_offset"}
        facts |= {f"lakebook.{name}": listed[column] for name, column in known.items()}
    times = _times(opened, item.path)
    sequence = facts.get("lakebook.first_sequence"), facts.get("lakebook.last_sequence")
    epoch = facts.get("lakebook.producer_epoch")
    claim = Claim(
        item.path,
        item.size,
        to_ms(item.modified),
        int(facts["lakebook.topic_id"]),
        int(facts["lakebook.partition"]),
        int(facts["lakebook.base_offset"]),
        opened.num_rows,
        *times,
        facts.get("lakebook.producer_id"),
        None if epoch is None else int(epoch),
        *(None if number is None else int(number) for number in sequence),
    )
    if claim.count < 1 or claim.base < 0 or claim.partition < 0:
        raise InvalidSegment("what it says of itself is impossible", on=item.path)
    return claim


def _times(opened: Any, path: str) -> tuple[int, int]:
    """The least and the largest time of its records, by its footer."""
    place = next(number for number in range(opened.num_columns) if opened.schema.column(number).path == "timestamp")
    least: list[datetime] = []
    most: list[datetime] = []
    for number in range(opened.num_row_groups):
        found = opened.row_group(number).column(place).statistics
        if found is None or not found.has_min_max:
            raise InvalidSegment("it does not say of which time it is", on=path)
        least.append(found.min)
        most.append(found.max)
    return to_ms(min(least)), to_ms(max(most))


# --- which are true ------------------------------------------------------------

Same = Callable[[Claim, Claim], bool]


def settle_claims(
    claims: Iterable[Claim], proven: Collection[str], preferred: Collection[str], log_start: int, same: Same
) -> Settled:
    """Decide on the claims on one partition. `same` tells whether two have the same records where both have some."""
    result = Settled()
    group: list[Claim] = []
    reach = -1
    for claim in sorted(claims, key=lambda item: (item.base, item.end, item.path)):
        if claim.base < log_start:
            result.below.append(claim)
            continue
        if group and claim.base >= reach:
            _settle_group(group, proven, preferred, same, result)
            group = []
        group.append(claim)
        reach = max(reach, claim.end) if len(group) > 1 else claim.end
    if group:
        _settle_group(group, proven, preferred, same, result)
    _settle_batches(result, proven)
    return result


def _overlap(one: Claim, other: Claim) -> bool:
    return one.base < other.end and other.base < one.end


def _settle_group(
    group: list[Claim], proven: Collection[str], preferred: Collection[str], same: Same, result: Settled
) -> None:
    if len(group) == 1:
        result.chosen += group
        return
    certain = [claim for claim in group if claim.path in proven]
    left: list[Claim] = []
    for claim in group:
        if claim.path in proven:
            continue
        if all(same(claim, item) for item in certain if _overlap(claim, item)):
            left.append(claim)
        else:
            result.disproved.append(claim)
    contested = {
        claim.path
        for number, one in enumerate(left)
        for other in left[number + 1 :]
        if _overlap(one, other) and not same(one, other)
        for claim in (one, other)
    }
    result.contested += [claim for claim in left if claim.path in contested]
    candidates = [*certain, *(claim for claim in left if claim.path not in contested)]
    chosen = _covering(sorted(candidates, key=lambda item: item.end), preferred)
    result.chosen += chosen
    taken = {claim.path for claim in chosen}
    result.superseded += [claim for claim in candidates if claim.path not in taken]


def _covering(claims: list[Claim], preferred: Collection[str]) -> list[Claim]:
    """Those that have the most records together without an overlap; else the preferred; else the fewest."""
    best: list[tuple[tuple[int, int, int], list[Claim]]] = [((0, 0, 0), [])]
    for number, claim in enumerate(claims):
        before = max(place for place in range(number + 1) if place == 0 or claims[place - 1].end <= claim.base)
        (records, liked, fewer), some = best[before]
        with_it = (records + claim.count, liked + (claim.path in preferred), fewer - 1)
        best.append(max(best[number], (with_it, [*some, claim]), key=lambda item: item[0]))
    return best[-1][1]


def _settle_batches(result: Settled, proven: Collection[str]) -> None:
    """A batch of a producer counts once, wherever it claims to be."""
    batches: dict[tuple[Any, ...], list[Claim]] = {}
    for claim in result.chosen:
        if claim.batch is not None:
            batches.setdefault(claim.batch, []).append(claim)
    refused: set[str] = set()
    for claims in batches.values():
        if len(claims) == 1:
            continue
        certain = [claim for claim in claims if claim.path in proven]
        others = [claim for claim in claims if len(certain) != 1 or claim not in certain]
        (result.disproved if len(certain) == 1 else result.contested).extend(others)
        refused |= {claim.path for claim in others}
    result.chosen = sorted((c for c in result.chosen if c.path not in refused), key=lambda item: item.base)


def same_records(store: ObjectStore, one: Claim, other: Claim) -> bool:
    """Whether two files have the same records at the offsets that both claim. What cannot be read is not the same."""
    start, end = max(one.base, other.base), min(one.end, other.end)
    try:
        rows = [_rows(store, claim, start, end) for claim in (one, other)]
    except (LakebookError, OSError, ValueError):
        return False
    return bool(rows[0].equals(rows[1]))


def _rows(store: ObjectStore, claim: Claim, start: int, end: int) -> Any:
    import pyarrow as pa

    (footer,) = read_footers(store, [(claim.path, claim.size)])
    batches = list(SegmentReader(store, claim.path, footer, claim.base).batches(start))
    return pa.Table.from_batches(batches).slice(0, end - start).combine_chunks()


def holes(chosen: Sequence[Claim], log_start: int, watermark: int) -> list[tuple[int, int]]:
    """The offsets that no segment has, as ranges from first to last."""
    found: list[tuple[int, int]] = []
    expected = log_start
    for claim in chosen:
        if claim.base > expected:
            found.append((expected, claim.base - 1))
        expected = claim.end
    if watermark > expected:
        found.append((expected, watermark - 1))
    return found
