"""Topics from the checkpoint and from what their segments say: which records there are, and which cannot be."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lakebook.recovery.batches import LastBatch, last_batches, settle_batches, unfinished_attempts
from lakebook.recovery.claims import Claim, Records, Settled, holes, read_claims, settle_claims
from lakebook.registry.freshness import Span, merged
from lakebook.storage.answers import ObjectInfo
from lakebook.storage.objects import ObjectStore

Row = dict[str, Any]


@dataclass
class FoundPartition:
    """A partition, and what became of the claims on it."""

    number: int
    #: What the checkpoint says of it; none if it does not know it.
    row: Row | None
    log_start: int
    watermark: int
    settled: Settled
    claimed: list[Claim]
    #: Offsets that no segment has: first, last and why.
    holes: list[tuple[int, int, str]] = field(default_factory=list)
    #: Claims on the same offsets, in groups.
    contested: list[list[Claim]] = field(default_factory=list)
    #: Segments that were taken on their own word.
    unproven: list[Claim] = field(default_factory=list)
    #: Segments with records that the checkpoint does not list.
    newer: list[Claim] = field(default_factory=list)
    #: Segments that the checkpoint lists, and whose records are gone.
    lost: list[Row] = field(default_factory=list)
    #: Whether there are holes that neither the checkpoint nor a claim says anything of.
    has_unknown_holes: bool = False

    @property
    def first_kept(self) -> int:
        """The first offset that is there: below the log start, where a pipeline has still to read it."""
        return min([self.log_start, *(claim.base for claim in self.settled.chosen[:1])])

    @property
    def shown(self) -> list[Claim]:
        """The segments from the log start on."""
        return [claim for claim in self.settled.chosen if claim.base >= self.log_start]


@dataclass
class FoundTopic:
    """A topic."""

    id: int
    row: Row | None
    partitions: dict[int, FoundPartition] = field(default_factory=dict)
    #: Segments of batches that were not stored as a whole.
    unfinished: list[Claim] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name, or one that says that it is not known."""
        return str(self.row["name"]) if self.row is not None else f"recovered_{self.id}"

    @property
    def chosen(self) -> list[Claim]:
        """Its segments."""
        return [claim for partition in self.partitions.values() for claim in partition.settled.chosen]

    @property
    def claimed(self) -> list[Claim]:
        """Every file that claims to be one of its segments."""
        return [claim for partition in self.partitions.values() for claim in partition.claimed]

    @property
    def sinks(self) -> dict[str, LastBatch]:
        """The last batches whose records it has, by the names of their sinks."""
        settled = [partition.settled for partition in self.partitions.values()]
        return last_batches(claim for item in settled for claim in (*item.chosen, *item.superseded, *item.below))

    def mirrored(self, paths: Collection[str]) -> list[Row] | None:
        """Up to where each partition is in a table that has these files; none if that does not fit."""
        left = set(paths)
        found: list[Row] = []
        for number, partition in self.partitions.items():
            # What only a pipeline has still to read may be in it, until it is hidden there too.
            left -= {claim.path for claim in partition.settled.chosen if claim.base < partition.log_start}
            in_table = [claim.path in left for claim in partition.shown]
            count = sum(in_table)
            if not all(in_table[:count]):
                return None
            shown = partition.shown[:count]
            left -= {claim.path for claim in shown}
            if shown:
                found.append({"topic_id": self.id, "partition_id": number, "next_offset": shown[-1].end})
        return found if not left else None


def found_topics(
    store: ObjectStore,
    rows: Mapping[str, Sequence[Row]],
    objects: Sequence[ObjectInfo],
    mirrored: Collection[str],
    waiting: Mapping[tuple[int, int], int],
    unreadable: Callable[[ObjectInfo, str], None],
    most_partitions: int,
    progress: Callable[[int], None] = lambda count: None,
) -> list[FoundTopic]:
    """Every topic that the checkpoint or a segment knows; `waiting` is from where pipelines have still to read it.

    Of how many partitions topics are, the settings say (`most_partitions`), and the checkpoint where some have more.
    `progress` hears now and then how many of the objects were read.
    """
    topics = {row["id"]: FoundTopic(row["id"], row) for row in rows["topics"]}
    claims: dict[tuple[int, int], list[Claim]] = {}
    by_path = {row["s3_key"]: row for row in rows["segments"]}
    most = max([most_partitions, *(row["partition_id"] + 1 for row in rows["partitions"])])
    for claim in read_claims(store, objects, by_path, unreadable, most, progress):
        topics.setdefault(claim.topic_id, FoundTopic(claim.topic_id, None))
        claims.setdefault((claim.topic_id, claim.partition), []).append(claim)
    known = {(row["topic_id"], row["partition_id"]): row for row in rows["partitions"]}
    listed: dict[tuple[int, int], list[Row]] = {}
    for row in rows["segments"]:
        listed.setdefault((row["topic_id"], row["partition_id"]), []).append(row)
    numbers: dict[int, int] = {}
    for topic_id, number in (*claims, *known):
        numbers[topic_id] = max(numbers.get(topic_id, 0), number + 1)
    for topic in topics.values():
        # There is no partition without those before it.
        places = [(topic.id, number) for number in range(numbers.get(topic.id, 1))]
        _settle_topic(
            store,
            topic,
            [
                _Known(known.get(place), listed.get(place, []), claims.get(place, []), waiting.get(place))
                for place in places
            ],
            mirrored,
        )
        if topic.row is not None:
            topic.row["partition_count"] = len(topic.partitions)
    return [topics[ident] for ident in sorted(topics)]


@dataclass(frozen=True)
class _Known:
    """What is known of a partition: by the checkpoint, and by files that claim to be segments of it."""

    row: Row | None
    listed: Sequence[Row]
    claims: Sequence[Claim]
    #: From where a pipeline has still to read it.
    waiting: int | None = None

    @property
    def log_start(self) -> int:
        if self.row is not None:
            return int(self.row["log_start"])
        return min((claim.base for claim in self.claims), default=0)

    @property
    def pinned(self) -> set[str]:
        """Segments below the log start that were kept for a pipeline: nothing is merged there, so all are listed."""
        if self.waiting is None:
            return set()
        start = self.log_start
        return {
            row["s3_key"]
            for row in self.listed
            if row["base_offset"] < start and row["base_offset"] + row["record_count"] > self.waiting
        }


def _settle_topic(store: ObjectStore, topic: FoundTopic, known: Sequence[_Known], mirrored: Collection[str]) -> None:
    claims = [claim for item in known for claim in item.claims]
    proven = {row["s3_key"] for item in known for row in item.listed}
    proven |= {claim.path for claim in claims if claim.path in mirrored}
    topic.unfinished = unfinished_attempts(claims, proven)
    left_out = {claim.path for claim in topic.unfinished}
    records = Records(store)
    settled = settle_batches(
        {number: [claim for claim in item.claims if claim.path not in left_out] for number, item in enumerate(known)},
        proven,
        lambda number, some: settle_claims(
            some, proven, mirrored, known[number].log_start, records.same, known[number].pinned
        ),
    )
    for number, item in enumerate(known):
        topic.partitions[number] = _found_partition(number, item, settled[number], proven)


def _found_partition(number: int, known: _Known, settled: Settled, proven: Collection[str]) -> FoundPartition:
    row, listed, claims, start = known.row, known.listed, known.claims, known.log_start
    known_end = row["high_watermark"] if row is not None else 0
    # What is contested was somebody's: its offsets are never given again.
    counted = (*settled.chosen, *settled.contested)
    watermark = max([start, known_end, *(claim.end for claim in counted)])
    found = FoundPartition(number, row, start, watermark, settled, list(claims))
    found.unproven = [claim for claim in settled.chosen if claim.path not in proven and claim.base >= known_end]
    found.contested = _grouped(settled.contested)
    there = {claim.path for claim in claims}
    gone = [item for item in listed if item["s3_key"] not in there and item["base_offset"] >= found.first_kept]
    # Not before the first that is there: what lies below the log start, and nobody has, is gone as it should be.
    for first, last in holes(settled.chosen, found.first_kept, watermark):
        found.holes.append((first, last, _why(first, last, settled.contested, gone, known_end)))
    listed_offsets = merged((item["base_offset"], item["base_offset"] + item["record_count"] - 1) for item in listed)
    found.newer = [claim for claim in settled.chosen if not _is_within(listed_offsets, claim.base, claim.end - 1)]
    there_now = merged((claim.base, claim.end - 1) for claim in settled.chosen)
    found.lost = [
        item
        for item in listed
        if item["base_offset"] >= start
        and not _is_within(there_now, item["base_offset"], item["base_offset"] + item["record_count"] - 1)
    ]
    claimed = merged((claim.base, claim.end - 1) for claim in settled.contested)
    found.has_unknown_holes = any(
        last >= known_end and not _is_within(claimed, max(first, known_end), last) for first, last, _ in found.holes
    )
    return found


def _is_within(offsets: Sequence[Span], first: int, last: int) -> bool:
    """Whether all offsets from one to another are among some, which are in order and apart from each other."""
    before = bisect(offsets, first, key=lambda item: item[0])
    return before > 0 and offsets[before - 1][1] >= last


def _grouped(claims: Sequence[Claim]) -> list[list[Claim]]:
    groups: list[list[Claim]] = []
    reach = -1
    for claim in sorted(claims, key=lambda item: (item.base, item.end)):
        if groups and claim.base < reach:
            groups[-1].append(claim)
        else:
            groups.append([claim])
        reach = max(reach, claim.end)
    return groups


def _why(first: int, last: int, contested: Sequence[Claim], gone: Sequence[Row], known_end: int) -> str:
    if any(claim.base <= last and first < claim.end for claim in contested):
        return "several files claim them"
    if any(row["base_offset"] <= last and first < row["base_offset"] + row["record_count"] for row in gone):
        return "the files of their segments are gone, or say nothing: lost, or removed by retention"
    return "no segment has them" if first < known_end else "a later segment follows, and none has them"
