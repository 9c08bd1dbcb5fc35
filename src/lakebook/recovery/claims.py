"""Segments that describe themselves: what each claims, and which claims can all be true.

Two files that claim the same offsets are no contradiction if they hold the same records, as a merge and what it
was made of do. If they differ, one of them may be proven: the checkpoint knew it. Where none is, none is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any

import pyarrow as pa

from lakebook.clock import to_ms
from lakebook.errors import InvalidSegment, LakebookError
from lakebook.lake.footer_store import read_footers
from lakebook.lake.footers import open_footer
from lakebook.names import MAX_COUNTED, MAX_DECIMAL, check_id, decimal_in
from lakebook.registry.schema import MAX_INTEGER
from lakebook.storage.answers import NO_ANSWER, ObjectInfo
from lakebook.storage.objects import ObjectStore
from lakebook.streams.segment_facts import attempt_in, facts_of, sinks_in
from lakebook.streams.segment_files import SegmentReader

#: Whatever a parser says of a file that anybody may have written.
DAMAGED = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    OSError,
    pa.ArrowException,
)
_AT_ONCE = 500
# Files of which rows are kept while they are compared: a merge, what it was made of, and a merge of merges.
_KEPT = 4


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
    #: Which attempt at a batch it is a part of, and the records of all its parts; none if it is of no batch.
    attempt: str | None = None
    attempt_records: int | None = None
    #: The last batches of sinks that are in it, by the sinks' names.
    sinks: tuple[tuple[str, int], ...] = ()

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

    @property
    def says_no_batch(self) -> bool:
        """Whether it is of a batch, and was written when segments did not say of which."""
        return self.attempt is None and self._folder.startswith("s-")

    @property
    def commit_id(self) -> str:
        """The commit in whose folder it lies, or what its folder is called by."""
        return self._folder.partition("-")[2]

    @property
    def _folder(self) -> str:
        # One that was recorded by hand may lie in none.
        return self.path.rpartition("/")[0].rpartition("/")[2]


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
    most_partitions: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Iterable[Claim]:
    """What files say of themselves, or the checkpoint of one that was recorded by hand (`listed`).

    `unreadable` is told of each of which nobody says anything that can be. A store that is away or refuses is no such
    file: that is raised. `progress` hears now and then how many of them were read.
    """
    for start in range(0, len(objects), _AT_ONCE):
        some = objects[start : start + _AT_ONCE]
        try:
            footers: list[bytes | None] = list(read_footers(store, [(item.path, item.size) for item in some]))
        except NO_ANSWER:
            raise
        except LakebookError:
            footers = [None] * len(some)
        for item, footer in zip(some, footers, strict=True):
            try:
                found = footer if footer is not None else read_footers(store, [(item.path, item.size)])[0]
                claim = _claim(item, found, listed.get(item.path), most_partitions)
            except NO_ANSWER:
                raise
            except LakebookError as error:
                unreadable(item, error.what)
            except DAMAGED as error:
                unreadable(item, f"it does not say what it is ({type(error).__name__})")
            else:
                yield claim
        progress(start + len(some))


def _claim(item: ObjectInfo, footer: bytes, listed: Mapping[str, Any] | None, most_partitions: int) -> Claim:
    opened = open_footer(footer, on=item.path)
    facts: dict[str, Any] = facts_of(opened)
    if listed is not None and "topic_id" not in facts and listed["record_count"] == opened.num_rows:
        known = {"topic_id": "topic_id", "partition": "partition_id", "base_offset": "base_offset"}
        facts |= {name: listed[column] for name, column in known.items()}
    times = _times(opened, item.path)
    producer_id, epoch, first, last = _batch_in(facts)
    attempt, attempt_records = attempt_in(facts)
    claim = Claim(
        item.path,
        item.size,
        to_ms(item.modified),
        _number(facts, "topic_id", MAX_COUNTED),
        _number(facts, "partition", MAX_INTEGER),
        _number(facts, "base_offset"),
        opened.num_rows,
        *times,
        producer_id,
        epoch,
        first,
        last,
        attempt,
        attempt_records,
        tuple(sorted(sinks_in(facts).items())),
    )
    if not 1 <= claim.count <= MAX_INTEGER or claim.topic_id < 1 or claim.min_timestamp > claim.max_timestamp:
        raise InvalidSegment("what it says of itself is impossible", on=item.path)
    if claim.partition >= most_partitions:
        # Of a topic all partitions are made up to its last.
        raise InvalidSegment(
            f"it says that it is of partition {claim.partition}, and topics have at most {most_partitions} (the setting"
            " max_partitions)",
            on=item.path,
        )
    return claim


def _number(facts: Mapping[str, Any], name: str, most: int = MAX_DECIMAL) -> int:
    """A number that a file says, as text, or the checkpoint of it."""
    said = facts.get(name)
    number = said if isinstance(said, int) else decimal_in(said, most)
    if number is None:
        raise InvalidSegment(f"what it says of its {name} is no number that can be")
    return number


def _batch_in(facts: Mapping[str, Any]) -> tuple[str | None, int | None, int | None, int | None]:
    """The producer, its epoch, and the first and the last sequence number; none where nothing is said."""
    most = {"producer_epoch": MAX_INTEGER, "first_sequence": MAX_DECIMAL, "last_sequence": MAX_DECIMAL}
    epoch, first, last = (None if facts.get(name) is None else _number(facts, name, most[name]) for name in most)
    producer_id = facts.get("producer_id")
    if producer_id is not None:
        check_id("producer", producer_id)
        if first is not None and last is not None and (epoch is None or first > last):
            raise InvalidSegment("what it says of its producer is impossible")
    return producer_id, epoch, first, last


def _times(opened: Any, path: str) -> tuple[int, int]:
    """The least and the largest time of its records, by its footer."""
    numbers = range(opened.num_columns)
    place = next((number for number in numbers if opened.schema.column(number).path == "timestamp"), None)
    if place is None:
        raise InvalidSegment("it has no times", on=path)
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
    claims: Iterable[Claim],
    proven: Collection[str],
    preferred: Collection[str],
    log_start: int,
    same: Same,
    pinned: Collection[str] = (),
) -> Settled:
    """Decide on the claims on one partition. `same` tells whether two have the same records where both have some.

    Below the log start only those that are `pinned` count.
    """
    result = Settled()
    group: list[Claim] = []
    reach = -1
    for claim in sorted(claims, key=lambda item: (item.base, item.end, item.path)):
        if claim.base < log_start and claim.path not in pinned:
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


def overlap(one: Claim, other: Claim) -> bool:
    """Whether two claim the same offsets, where both are of one partition."""
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
        if all(same(claim, item) for item in certain if overlap(claim, item)):
            left.append(claim)
        else:
            result.disproved.append(claim)
    contested = {claim.path for one, other in _overlapping(left) if not same(one, other) for claim in (one, other)}
    result.contested += [claim for claim in left if claim.path in contested]
    candidates = [*certain, *(claim for claim in left if claim.path not in contested)]
    chosen = _covering(sorted(candidates, key=lambda item: item.end), preferred)
    result.chosen += chosen
    taken = {claim.path for claim in chosen}
    result.superseded += [claim for claim in candidates if claim.path not in taken]


def _overlapping(claims: Sequence[Claim]) -> Iterator[tuple[Claim, Claim]]:
    """The pairs that claim the same offsets, of claims in the order of their offsets."""
    for number, one in enumerate(claims):
        for other in islice(claims, number + 1, None):
            if other.base >= one.end:
                break
            yield one, other


def _covering(claims: list[Claim], preferred: Collection[str]) -> list[Claim]:
    """Those that have the most records together without an overlap; else the preferred; else the fewest."""
    ends = [claim.end for claim in claims]
    # The best of the first so many; and the last one of those, with how many come before it.
    best = [(0, 0, 0)]
    taken: list[tuple[Claim, int] | None] = [None]
    for number, claim in enumerate(claims):
        before = bisect_right(ends, claim.base, 0, number)
        records, liked, fewer = best[before]
        with_it = (records + claim.count, liked + (claim.path in preferred), fewer - 1)
        better = with_it > best[number]
        best.append(with_it if better else best[number])
        taken.append((claim, before) if better else taken[number])
    found: list[Claim] = []
    last = taken[-1]
    while last is not None:
        claim, before = last
        found.append(claim)
        last = taken[before]
    return found[::-1]


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


class Records:
    """Compares the records of files. What was read last is kept: a merge has those of very many others, in order."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        # By path: rows, and the offset of the first of them.
        self._kept: OrderedDict[str, tuple[int, pa.RecordBatch]] = OrderedDict()
        self._same: dict[tuple[str, str], bool] = {}

    def same(self, one: Claim, other: Claim) -> bool:
        """Whether two files have the same records at the offsets that both claim; not if one cannot be read."""
        key = (one.path, other.path)
        if key not in self._same:
            start, end = max(one.base, other.base), min(one.end, other.end)
            try:
                rows = [self._rows(claim, start, end) for claim in (one, other)]
            except NO_ANSWER:
                raise
            except (LakebookError, OSError, ValueError, StopIteration, pa.ArrowException):
                return False
            self._same[key] = bool(rows[0].equals(rows[1]))
        return self._same[key]

    def _rows(self, claim: Claim, start: int, end: int) -> pa.Table:
        found: list[pa.RecordBatch] = []
        while start < end:
            base, rows = self._group(claim, start)
            found.append(rows.slice(start - base, end - start))
            start += found[-1].num_rows
        return pa.Table.from_batches(found).combine_chunks()

    def _group(self, claim: Claim, offset: int) -> tuple[int, pa.RecordBatch]:
        """Rows of which the one at an offset is the first, or one of them."""
        kept = self._kept.get(claim.path)
        if kept is None or not kept[0] <= offset < kept[0] + kept[1].num_rows:
            (footer,) = read_footers(self._store, [(claim.path, claim.size)])
            kept = offset, next(SegmentReader(self._store, claim.path, footer, claim.base).batches(offset))
        self._kept[claim.path] = kept
        self._kept.move_to_end(claim.path)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return kept


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
