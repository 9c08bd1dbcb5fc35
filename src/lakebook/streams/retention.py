"""Retention: records that a topic no longer keeps go, by time and by size, whole segments from the oldest on.

The log start moves first, whoever reads. The segments' rows and files follow as far as no lease needs
them; what a lease keeps goes with a later round. Several processes may do this at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lakebook.clock import Enough, never
from lakebook.errors import LakebookError, PartitionNotFound, TopicNotFound
from lakebook.lake.lake import Lake
from lakebook.pages import PAGE_SIZE
from lakebook.registry.holding import refuse_while_held
from lakebook.registry.retention import Oldest, Policy, kept_from, oldest_segments, retain
from lakebook.registry.segments import remove_segments_below
from lakebook.registry.topics import Topic, list_topics

# Rows that one transaction removes, so that producers of the partition do not wait long.
_CHUNK = 1000
_MOST_MEASURED = 100_000


@dataclass
class Retained:
    """What retention did."""

    #: By topic: the records that are kept no more, and the segments that were handed over for their removal.
    records: dict[str, int] = field(default_factory=dict)
    segments: dict[str, int] = field(default_factory=dict)
    #: What could not be done, and why. It is tried again by the next round.
    failed: list[tuple[str, str]] = field(default_factory=list)


def topics_after(lake: Lake, after: str = "") -> Iterator[Topic]:
    """Live topics in the order of their names, from behind a name on."""
    while page := lake.registry.read_with(lambda reader: list_topics(reader, after, "", PAGE_SIZE)):  # noqa: B023
        yield from page
        after = page[-1].name


class Retention:
    """Applies the retention of all topics; a round that was stopped is followed by one that goes on from there."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        # The last topic that was looked at.
        self._after = ""
        # The size and the watermark at which a partition was found to be not too large.
        self._measured: dict[tuple[int, int], tuple[int | None, int]] = {}

    def run(self, enough: Enough = never) -> Retained:
        """Look at every topic once, or until it is enough."""
        refuse_while_held(self._lake.registry)
        result = Retained()
        after = "" if enough is never else self._after
        self._after = ""
        for topic in topics_after(self._lake, after):
            self._look_at(topic, enough, result)
            if enough():
                self._after = topic.name
                break
        return result

    def _look_at(self, topic: Topic, enough: Enough, result: Retained) -> None:
        policy = Policy.of(topic.retention_ms, topic.config)
        after = -1
        while page := self._oldest(topic, after):
            for oldest in page:
                try:
                    self._retain(topic, policy, oldest, enough, result)
                except (TopicNotFound, PartitionNotFound):
                    return  # It was deleted meanwhile.
                except LakebookError as error:
                    result.failed.append((f"{topic.name}/{oldest.partition_id}", str(error)))
                if enough():
                    return
            after = page[-1].partition_id

    def _oldest(self, topic: Topic, after: int) -> list[Oldest]:
        return self._lake.registry.read_with(lambda reader: oldest_segments(reader, topic.id, after, PAGE_SIZE))

    def _retain(self, topic: Topic, policy: Policy, oldest: Oldest, enough: Enough, result: Retained) -> None:
        number, now = oldest.partition_id, self._lake.clock.now_ms()
        moved = 0
        if self._is_due(topic, policy, oldest, now):
            moved = self._lake.registry.write(lambda transaction: retain(transaction, topic, number, now))
        if moved:
            result.records[topic.name] = result.records.get(topic.name, 0) + moved
        if moved or oldest.is_removable:
            removed = remove_below_log_start(self._lake, topic.name, topic.id, number, enough)
            if removed:
                result.segments[topic.name] = result.segments.get(topic.name, 0) + removed

    def _is_due(self, topic: Topic, policy: Policy, oldest: Oldest, now: int) -> bool:
        """Whether something is to be removed of a partition; asked without its lock, as mostly nothing is."""
        place, measured = (topic.id, oldest.partition_id), (policy.bytes, oldest.high_watermark)
        by_size = policy.bytes is not None and self._measured.get(place) != measured
        # Segments on their way out say nothing of those behind them.
        is_hidden = oldest.base_offset < oldest.log_start
        by_time = policy.ms is not None and (is_hidden or oldest.max_timestamp < now - policy.ms)
        if oldest.log_start == oldest.high_watermark or not (by_size or by_time):
            return False
        due = self._lake.registry.read_with(lambda reader: kept_from(reader, topic, policy, place[1], now))
        if by_size and due is None and not policy.waits:
            # It grows only with its watermark. Where a group is waited for, that may end without it.
            if len(self._measured) >= _MOST_MEASURED:
                self._measured.clear()
            self._measured[place] = measured
        return due is not None


def remove_below_log_start(lake: Lake, topic: str, topic_id: int, number: int, enough: Enough = never) -> int:
    """Hand over the segments below a partition's log start that no lease needs; how many."""
    removed = 0
    while True:
        done = lake.registry.write(
            lambda transaction: remove_segments_below(
                transaction, topic, topic_id, number, None, grace=lake.settings.temporary_file_grace, most=_CHUNK
            )
        )
        removed += done
        if done < _CHUNK or enough():
            return removed
