"""Batches: segments of several partitions in one transaction, and how far each sink of a topic has come.

The files of a batch lie in a folder of its own, whose fence is the batch's commit. The turns of the partitions
fence the offsets. The transaction commits all of them, so that a batch lands as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from lakebook.errors import InvalidInput
from lakebook.names import check_id, shown
from lakebook.registry import schema
from lakebook.registry.appends import AppendTurn, add_footers, current_turn, renewed_turn, require_turn, turn_lost
from lakebook.registry.changes import row_of
from lakebook.registry.commits import COMMIT_OPEN, STATE_OF_COMMIT
from lakebook.registry.partitions import PARTITION_ROW, partition_row
from lakebook.registry.schema import MAX_BIGINT
from lakebook.registry.segments import FIND_BY_BASE, SegmentInfo, record_segments, segment_from
from lakebook.registry.statements import Statement, bind, insert_into
from lakebook.registry.stream_folders import batch_folder, end_folder
from lakebook.registry.topics import not_found, share_topic
from lakebook.registry.transactions import NoEffect, Reader, Transaction

_b = schema.sink_batches.c
_t = schema.topics.c

Appends = Sequence[tuple[AppendTurn, Sequence[SegmentInfo]]]

LAST_BATCH = Statement(
    sa.select(_b.batch_id)
    .select_from(schema.topics.join(schema.sink_batches, _b.topic_id == _t.id))
    .where(_t.name == bind("name"), _t.deleted_at.is_(None), _b.sink_id == bind("sink")),
    "name",
    "sink",
)
BATCH_OF = Statement(
    sa.select(_b.batch_id).where(_b.topic_id == bind("of_topic"), _b.sink_id == bind("sink")), "of_topic", "sink"
)
INSERT_BATCH = insert_into(schema.sink_batches)
ADVANCE_BATCH = Statement(
    sa.update(schema.sink_batches)
    .where(_b.topic_id == bind("of_topic"), _b.sink_id == bind("sink"), _b.batch_id < bind("new_batch"))
    .values(batch_id=bind("new_batch"), commit_id=bind("new_commit"), updated_at=bind("now")),
    "new_batch",
    "new_commit",
    "now",
    "of_topic",
    "sink",
)
FORGET_SINKS = Statement(sa.delete(schema.sink_batches).where(_b.topic_id == bind("of_topic")), "of_topic")


@dataclass(frozen=True)
class AppendResults:
    """What a batch recorded, with the turns for the next one in the order they were given.

    `duplicate` says that the batch had landed already; then it recorded nothing now.
    """

    segments: tuple[SegmentInfo, ...]
    turns: tuple[AppendTurn, ...]
    duplicate: bool = False


@dataclass(frozen=True)
class SinkBatch:
    """Which batch of which sink is appended: one with the same number or a smaller one was there before."""

    sink: str
    batch_id: int


class BatchLanded(NoEffect):
    """The batch of this transaction is there already."""


def sink_batch(sink: str | None, batch_id: int | None) -> SinkBatch | None:
    """The batch that a caller names, if it names one."""
    if sink is None and batch_id is None:
        return None
    if sink is None or batch_id is None:
        raise InvalidInput("a sink and the number of its batch go together", on="batch")
    check_id("sink", sink)
    if type(batch_id) is not int or not 0 <= batch_id <= MAX_BIGINT:
        raise InvalidInput(f"{shown(batch_id)} is not the number of a batch", on=f"sink {sink}")
    return SinkBatch(sink, batch_id)


def append_batch(
    transaction: Transaction,
    topic: str,
    appends: Appends,
    *,
    commit_id: str,
    warehouse: str,
    footers: Mapping[str, bytes],
    batch: SinkBatch | None,
) -> AppendResults:
    """Record a batch under the turns of its partitions. The transaction has just flipped the batch's commit row."""
    if batch is not None:
        # Before the turns: whoever repeats a batch may have lost them.
        _refuse_landed(transaction.one(LAST_BATCH, topic, batch.sink), batch)
    objects = [_object_of(transaction, turn) for turn, _ in appends]
    # Commits first, in the order in which several turns are claimed.
    for _, (turn, _) in sorted(zip(objects, appends, strict=True), key=lambda item: item[0]):
        if transaction.run(COMMIT_OPEN, transaction.clock.now_ms(), turn.commit_id, transaction.epoch) != 1:
            raise turn_lost(turn)
    topic_id = share_topic(transaction, topic)["id"]
    if any(turn.topic_id != topic_id for turn, _ in appends):
        raise not_found(topic)
    if batch is not None:
        _advance(transaction, topic_id, batch, commit_id)
    transaction.lock(*objects)
    recorded: list[SegmentInfo] = []
    turns: list[AppendTurn] = []
    for turn, segments in appends:
        partition = partition_row(transaction, topic, topic_id, turn.partition_id)
        require_turn(transaction, turn)
        theirs = record_segments(transaction, partition, segments, commit_id=commit_id, warehouse=warehouse)
        recorded += theirs
        turns.append(renewed_turn(transaction, partition, turn, theirs))
    add_footers(transaction, recorded, footers)
    end_folder(transaction, batch_folder(topic_id, commit_id))
    return AppendResults(tuple(recorded), tuple(turns))


def _object_of(transaction: Transaction, turn: AppendTurn) -> int:
    row = transaction.one(PARTITION_ROW, turn.topic_id, turn.partition_id)
    if row is None:
        raise not_found(turn.topic)
    return int(row_of(schema.partitions, row)["object_id"])


def _refuse_landed(row: Any, batch: SinkBatch) -> None:
    if row is not None and row[0] >= batch.batch_id:
        raise BatchLanded(f"batch {batch.batch_id} of {batch.sink}")


def _advance(transaction: Transaction, topic_id: int, batch: SinkBatch, commit_id: str) -> None:
    """Note the batch as the last one of its sink; one that landed before ends the transaction."""
    now = transaction.clock.now_ms()
    if transaction.run(ADVANCE_BATCH, batch.batch_id, commit_id, now, topic_id, batch.sink) == 1:
        return
    _refuse_landed(transaction.one(BATCH_OF, topic_id, batch.sink), batch)
    transaction.run(INSERT_BATCH, topic_id, batch.sink, batch.batch_id, commit_id, now)


def landed_batch(
    reader: Reader, topic: str, appends: Appends, commit_id: str, batch: SinkBatch | None
) -> AppendResults | None:
    """What an earlier call with the same batch has landed; none if it has not."""
    committed = reader.one(STATE_OF_COMMIT, commit_id) == ("committed",)
    if not committed:
        last = last_batch(reader, topic, batch.sink) if batch is not None else None
        if last is None or batch is None or last < batch.batch_id:
            return None
    segments: list[SegmentInfo] = []
    turns: list[AppendTurn] = []
    for turn, theirs in appends:
        # What another commit has landed are the same records, in files and at offsets of its own.
        segments += [_recorded(reader, turn, segment, commit_id) for segment in theirs] if committed else []
        partition = reader.one(PARTITION_ROW, turn.topic_id, turn.partition_id)
        if partition is not None:
            turn = current_turn(reader, turn, row_of(schema.partitions, partition)["high_watermark"])
        turns.append(turn)
    return AppendResults(tuple(segments), tuple(turns), duplicate=True)


def _recorded(reader: Reader, turn: AppendTurn, segment: SegmentInfo, commit_id: str) -> SegmentInfo:
    """A segment as it was recorded; as it was given, if a merge or retention has taken it since."""
    row = reader.one(FIND_BY_BASE, turn.topic_id, turn.partition_id, segment.base_offset)
    return segment_from(row[:-1]) if row is not None and row[-1] == commit_id else segment


def last_batch(reader: Reader, topic: str, sink: str) -> int | None:
    """The last batch that a sink has appended to a topic; none if it has appended none."""
    row = reader.one(LAST_BATCH, topic, sink)
    return None if row is None else int(row[0])


def forget_sinks(transaction: Transaction, topic_id: int) -> None:
    """Forget how far the sinks of a hidden topic had come."""
    transaction.run(FORGET_SINKS, topic_id)
