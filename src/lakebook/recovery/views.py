"""Views whose sources did not come back as they were at the checkpoint: which of their ranges are stale or frozen now.

A range is as the checkpoint knew it, and its sources may have got rows since, or lost some. It is told in the same way
as a commit tells it: what has come makes ranges of its time stale, what is gone freezes them and is remembered. Where
times are not known, all ranges are concerned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from lakebook.recovery.report import MarkedView
from lakebook.recovery.streams import FoundPartition, FoundTopic
from lakebook.recovery.tables import Rebuilt
from lakebook.registry.freshness import ALWAYS, TABLE, TOPIC, Span, freeze_all, mark_stale
from lakebook.registry.losses import MINUTE, note_losses
from lakebook.registry.ranges import count_marked
from lakebook.registry.table_files import changed_spans
from lakebook.registry.transactions import Transaction

Row = dict[str, Any]


def kept_losses(
    known: Sequence[Row], tables: Collection[int], topics: Sequence[FoundTopic], without_since: int | None
) -> Iterator[Row]:
    """What the sources that are there had lost, by the checkpoint.

    One that was taken by an older version of Lakebook, at `without_since`, says nothing of it. Then all that comes
    before the first record that is left counts as lost, if it is not the first there was.
    """
    live = {TABLE: tables, TOPIC: {topic.id for topic in topics}}
    yield from (row for row in known if row["source_id"] in live[row["kind"]])
    if without_since is None:
        return
    for topic in topics:
        for number, partition in topic.partitions.items():
            if partition.row is not None and partition.log_start > 0:
                first = min((claim.min_timestamp for claim in partition.shown), default=without_since)
                end = (first // MINUTE + 1) * MINUTE
                place = {"kind": TOPIC, "source_id": topic.id, "part": number}
                yield {**place, "begin_time": ALWAYS[0], "end_time": end}


class ViewMarks:
    """Marks the ranges of views, in a registry that is filled otherwise."""

    def __init__(
        self,
        rows: Mapping[str, Sequence[Row]],
        tables: Mapping[int, Rebuilt],
        made_anew: Collection[int],
        topics: Sequence[FoundTopic],
        names: Mapping[int, str],
    ) -> None:
        self._tables = tables
        self._made_anew = made_anew
        self._topics = topics
        self._names = names
        self._views = {row["id"]: str(row["name"]) for row in rows["views"]}
        self._readers: dict[tuple[str, int], list[str]] = {}
        for row in rows["view_sources"]:
            if row["view_id"] in self._views:
                self._readers.setdefault((row["kind"], row["source_id"]), []).append(self._views[row["view_id"]])
        # What was dropped before has frozen its ranges already.
        self._known = {row["id"]: row for row in rows["tables"] if row["deleted_at"] is None}
        self._said: dict[str, list[str]] = {}
        # What is said even if there is no range to be marked.
        self._warned: set[str] = set()

    def apply(self, transaction: Transaction) -> list[MarkedView]:
        """Mark what is concerned, and remember what is lost; the views of which there is something to say."""
        self._said, self._warned = {}, set()
        before = count_marked(transaction)
        for topic in self._topics:
            self._tell_of_topic(transaction, topic)
        for ident in sorted(self._known):
            if (TABLE, ident) in self._readers:
                self._tell_of_table(transaction, ident)
        after = count_marked(transaction)
        found: list[MarkedView] = []
        for name, why in sorted(self._said.items()):
            then, now = (counts.get(name, (0, 0)) for counts in (before, after))
            if then != now or name in self._warned:
                found.append(MarkedView(name, now[0] - then[0], now[1] - then[1], tuple(dict.fromkeys(why))))
        return found

    def _say(self, kind: str, source_id: int, why: str) -> list[str]:
        readers = self._readers.get((kind, source_id), [])
        for name in readers:
            self._said.setdefault(name, []).append(why)
        return readers

    # --- tables ------------------------------------------------------------------------

    def _tell_of_table(self, transaction: Transaction, ident: int) -> None:
        table, name = self._tables.get(ident), self._names[ident]
        if table is None and ident in self._made_anew:
            self._say(TABLE, ident, f"table {name} is made anew, and is another one then: alter the view")
            mark_stale(transaction, TABLE, ident, lambda _: [ALWAYS])
        elif table is None:
            self._say(TABLE, ident, f"table {name} did not come back")
            freeze_all(transaction, TABLE, ident)
        elif table.went_back:
            self._say(TABLE, ident, f"table {name} has lost versions that the checkpoint knew")
            freeze_all(transaction, TABLE, ident)
        elif table.is_newer:
            self._say(TABLE, ident, f"table {name} is newer than the checkpoint")
            changed = table.changed

            def spans_of(field_id: int | None) -> Iterator[Span]:
                if changed is None:
                    return iter([ALWAYS])
                return changed_spans(transaction, ident, (), changed, field_id)

            mark_stale(transaction, TABLE, ident, spans_of)

    # --- topics ------------------------------------------------------------------------

    def _tell_of_topic(self, transaction: Transaction, topic: FoundTopic) -> None:
        partitions = topic.partitions.values()
        newer = [(claim.min_timestamp, claim.max_timestamp) for part in partitions for claim in part.newer]
        if newer:
            self._say(TOPIC, topic.id, f"topic {topic.name} has segments that are newer than the checkpoint")
            mark_stale(transaction, TOPIC, topic.id, lambda _: newer)
        gone: list[Span] = []
        for number, partition in topic.partitions.items():
            spans = list(_lost_spans(partition))
            gone += spans
            # Not where times are unknown: nothing of a view that reads it could ever be built again.
            note_losses(transaction, TOPIC, topic.id, number, (span for span in spans if span != ALWAYS))
        # What a topic has lost, the table that is made of its segments loses too.
        mirrors = [(TABLE, ident) for ident, row in self._known.items() if row["topic_id"] == topic.id]
        for kind, ident in [(TOPIC, topic.id), *mirrors]:
            if gone:
                self._say(kind, ident, f"topic {topic.name} has lost records")
                mark_stale(transaction, kind, ident, lambda _: gone, gone=True)
            if any(partition.has_unknown_holes for partition in partitions):
                why = f"topic {topic.name} has holes, and which times their records had is not known"
                self._warned.update(self._say(kind, ident, why))


def _lost_spans(partition: FoundPartition) -> Iterator[Span]:
    """The times of records that are gone, or that nobody can tell from others."""
    for claim in partition.settled.contested:
        yield claim.min_timestamp, claim.max_timestamp
    for row in partition.lost:
        # Older versions of Lakebook have not put times into their checkpoints.
        least, most = row.get("min_timestamp"), row.get("max_timestamp")
        yield ALWAYS if least is None or most is None else (least, most)
