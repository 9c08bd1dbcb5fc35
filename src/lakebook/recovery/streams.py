"""Topics from the checkpoint and from what their segments say: which records there are, and which cannot be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lakebook.recovery.claims import Claim, Settled, holes, read_claims, same_records, settle_claims
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


@dataclass
class FoundTopic:
    """A topic."""

    id: int
    row: Row | None
    partitions: dict[int, FoundPartition] = field(default_factory=dict)

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

    def mirrored(self, paths: Collection[str]) -> list[Row] | None:
        """Up to where each partition is in a table that has these files; none if that does not fit."""
        left = set(paths)
        found: list[Row] = []
        for number, partition in self.partitions.items():
            in_table = [claim.path in left for claim in partition.settled.chosen]
            count = sum(in_table)
            if not all(in_table[:count]):
                return None
            shown = partition.settled.chosen[:count]
            left -= {claim.path for claim in shown}
            if shown:
                found.append({"topic_id": self.id, "partition_id": number, "next_offset": shown[-1].end})
        return found if not left else None


def found_topics(
    store: ObjectStore,
    rows: Mapping[str, Sequence[Row]],
    objects: Sequence[ObjectInfo],
    mirrored: Collection[str],
    unreadable: Callable[[ObjectInfo, str], None],
) -> list[FoundTopic]:
    """Every topic that the checkpoint or a segment knows."""
    topics = {row["id"]: FoundTopic(row["id"], row) for row in rows["topics"]}
    claims: dict[tuple[int, int], list[Claim]] = {}
    by_path = {row["s3_key"]: row for row in rows["segments"]}
    for claim in read_claims(store, objects, by_path, unreadable):
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
        for number in range(numbers.get(topic.id, 1)):
            place = (topic.id, number)
            topic.partitions[number] = _settled(
                store, number, known.get(place), listed.get(place, []), claims.get(place, []), mirrored
            )
        if topic.row is not None:
            topic.row["partition_count"] = len(topic.partitions)
    return [topics[ident] for ident in sorted(topics)]


def _settled(
    store: ObjectStore,
    number: int,
    row: Row | None,
    listed: Sequence[Row],
    claims: Sequence[Claim],
    mirrored: Collection[str],
) -> FoundPartition:
    proven = {item["s3_key"] for item in listed} | {claim.path for claim in claims if claim.path in mirrored}
    start = row["log_start"] if row is not None else min((claim.base for claim in claims), default=0)
    settled = settle_claims(claims, proven, mirrored, start, lambda one, other: same_records(store, one, other))
    known_end = row["high_watermark"] if row is not None else 0
    # What is contested was somebody's: its offsets are never given again.
    counted = (*settled.chosen, *settled.contested)
    watermark = max([start, known_end, *(claim.end for claim in counted)])
    found = FoundPartition(number, row, start, watermark, settled, list(claims))
    found.unproven = [claim for claim in settled.chosen if claim.path not in proven and claim.base >= known_end]
    found.contested = _grouped(settled.contested)
    there = {claim.path for claim in claims}
    gone = [item for item in listed if item["s3_key"] not in there and item["base_offset"] >= start]
    for first, last in holes(settled.chosen, start, watermark):
        found.holes.append((first, last, _why(first, last, settled.contested, gone, known_end)))
    return found


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
