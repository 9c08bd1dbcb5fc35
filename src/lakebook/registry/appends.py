"""Appending: a partition's turn, and producers whose retries are harmless.

The holder of the turn stamps offsets from the high watermark, stores the file, and the
transaction that records it asserts the turn's token and the base offset. Taking a turn
over fences the former holder's commit, so that it cannot land late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import AppendTurnHeld, AppendTurnLost, InvalidSegment, ProducerFenced, SequenceConflict
from lakebook.names import shown
from lakebook.registry import schema
from lakebook.registry.changes import row_of
from lakebook.registry.commits import STATE_OF_COMMIT, abort_commit, open_commit_row
from lakebook.registry.databases import Failure
from lakebook.registry.footers import insert_footers
from lakebook.registry.partitions import PARTITION_ROW, locked_partition
from lakebook.registry.schema import MAX_INTEGER
from lakebook.registry.segments import (
    FIND_BY_BASE,
    FIND_BY_BATCH,
    S3_KEY,
    SegmentInfo,
    record_segments,
    segment_from,
)
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind, insert_into
from lakebook.registry.stream_folders import end_folder, end_folders_of, open_turn_folder, turn_folder
from lakebook.registry.topics import SHARE_TOPIC_BY_ID, not_found, share_topic
from lakebook.registry.transactions import NoEffect, Reader, Transaction, TryAgain, new_id

APPEND = "append"

_a = schema.append_turns.c
_pr = schema.producers.c
_b = schema.producer_batches.c
_s = schema.segments.c
_f = schema.stream_folders.c
_p = schema.partitions.c

TURN = Statement(
    sa.select(_a.token, _a.holder, _a.commit_id, _a.expires_at).where(
        _a.topic_id == bind("of_topic"), _a.partition_id == bind("number")
    ),
    "of_topic",
    "number",
)
INSERT_TURN = insert_into(schema.append_turns)
UPDATE_TURN = Statement(
    sa.update(schema.append_turns)
    .where(_a.topic_id == bind("of_topic"), _a.partition_id == bind("number"))
    .values(token=bind("new_token"), holder=bind("new_holder"), commit_id=bind("new_commit"), expires_at=bind("until")),
    "new_token",
    "new_holder",
    "new_commit",
    "until",
    "of_topic",
    "number",
)
OPEN_TURNS = Statement(
    # In the order in which a batch takes them.
    sa.select(_a.commit_id).where(_a.topic_id == bind("of_topic"), _a.commit_id.is_not(None)).order_by(_a.partition_id),
    "of_topic",
)
DELETE_TURNS = Statement(sa.delete(schema.append_turns).where(_a.topic_id == bind("of_topic")), "of_topic")
DELETE_BATCHES = Statement(sa.delete(schema.producer_batches).where(_b.topic_id == bind("of_topic")), "of_topic")
# By the folders that are not ended, of which there is one per turn that somebody holds.
EXPIRED_TURNS = Statement(
    sa.select(_a.topic_id, _a.partition_id, _a.token, _a.holder, _a.commit_id, _p.object_id)
    .select_from(
        schema.stream_folders.join(
            schema.append_turns,
            sa.and_(_a.topic_id == _f.topic_id, _a.partition_id == _f.partition_id, _a.token == _f.token),
        ).join(schema.partitions, sa.and_(_p.topic_id == _a.topic_id, _p.partition_id == _a.partition_id))
    )
    .where(_f.ended_at.is_(None), _a.holder.is_not(None), _a.expires_at <= bind("silent_since"))
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "silent_since",
    "most",
)


def _left_behind(database: str) -> sa.CompoundSelect[Any]:
    tables = (schema.retired_segments, schema.temporary_files, schema.table_files)
    return sa.union_all(
        *(sa.select(table.c.file_path).where(among(table.c.file_path, "paths", database)) for table in tables)
    )


#: Files of segments that a merge or retention has taken.
LEFT_BEHIND = Statement(_left_behind(SQLITE), "paths", postgresql=_left_behind(POSTGRESQL))
HOLDING = Statement(
    sa.select(_s.end_offset, _s.producer_id)
    .where(_s.topic_id == bind("of_topic"), _s.partition_id == bind("number"), _s.base_offset <= bind("offset"))
    .order_by(_s.base_offset.desc())
    .limit(ONE)
    .offset(ZERO),
    "of_topic",
    "number",
    "offset",
)
SHARE_PRODUCER = Statement(
    sa.select(_pr.epoch).where(_pr.producer_id == bind("producer")).with_for_update(read=True, key_share=True),
    "producer",
)
CLAIM_PRODUCER = Statement(
    sa.select(_pr.epoch).where(_pr.producer_id == bind("producer")).with_for_update(), "producer"
)
INSERT_PRODUCER = insert_into(schema.producers)
UPDATE_PRODUCER = Statement(
    sa.update(schema.producers)
    .where(_pr.producer_id == bind("producer"))
    .values(epoch=bind("new_epoch"), updated_at=bind("now")),
    "new_epoch",
    "now",
    "producer",
)
LAST_BATCH = Statement(
    sa.select(schema.producer_batches).where(
        _b.topic_id == bind("of_topic"), _b.partition_id == bind("number"), _b.producer_id == bind("producer")
    ),
    "of_topic",
    "number",
    "producer",
)
INSERT_BATCH = insert_into(schema.producer_batches)
_batch_values = ("producer_epoch", "first_sequence", "last_sequence", "base_offset", "end_offset", "segment_id")
UPDATE_BATCH = Statement(
    sa.update(schema.producer_batches)
    .where(_b.topic_id == bind("of_topic"), _b.partition_id == bind("number"), _b.producer_id == bind("producer"))
    .values({name: bind(f"new_{name}", schema.producer_batches.c[name].type) for name in _batch_values}),
    *(f"new_{name}" for name in _batch_values),
    "of_topic",
    "number",
    "producer",
)


@dataclass(frozen=True)
class AppendTurn:
    """The right to append to a partition: stamp offsets from `next_offset` on.

    It is lost when another producer takes it over, which can happen once `expires_at` has
    passed. Every append renews it; the result of an append carries the turn for the next one.
    """

    topic: str
    partition_id: int
    token: int
    next_offset: int
    expires_at: datetime
    holder: str
    commit_id: str
    topic_id: int
    #: For how long an append renews it.
    seconds: float

    @property
    def folder(self) -> str:
        """Where the files of its segments are written: what lies there counts for nobody once the turn is lost."""
        return turn_folder(self.topic_id, self.partition_id, self.token)


@dataclass(frozen=True)
class AppendResult:
    """What an append recorded. `duplicate` says that an earlier attempt had landed already."""

    segments: tuple[SegmentInfo, ...]
    turn: AppendTurn
    duplicate: bool = False


class Landed(NoEffect):
    """What a transaction would record is there already."""

    def __init__(self, segments: tuple[SegmentInfo, ...], next_offset: int) -> None:
        super().__init__("landed")
        self.segments = segments
        self.next_offset = next_offset


def claim_turn(transaction: Transaction, topic: str, number: int, holder: str, seconds: float) -> AppendTurn:
    """Take a partition's turn, or renew one's own."""
    row = share_topic(transaction, topic)
    topic_id = row["id"]
    turn = transaction.one(TURN, topic_id, number)
    _refuse_if_held(transaction, turn, topic, number, holder)
    if turn is not None and turn[2] is not None:
        # Before the lock, in the order in which an append takes the two: its COMMIT may be in
        # flight, and then this waits for it and finds the turn renewed below.
        abort_commit(transaction, turn[2])
    partition = locked_partition(transaction, topic, topic_id, number)
    current = transaction.one(TURN, topic_id, number)
    if current != turn:
        _refuse_if_held(transaction, current, topic, number, holder, renewed=True)
        if current is not None and current[2] is not None:
            # Renewed, and run out again since. Whoever uses this commit waits for the partition: begin anew.
            raise TryAgain(Failure.BUSY)
    token = 1 if current is None else current[0] + 1
    if current is not None:
        end_folder(transaction, turn_folder(topic_id, number, current[0]))
    open_turn_folder(transaction, topic_id, number, token)
    return hold_turn(
        transaction, partition, topic, token, holder, seconds, partition["high_watermark"], new=current is None
    )


def _refuse_if_held(
    transaction: Transaction, turn: Any, topic: str, number: int, holder: str, *, renewed: bool = False
) -> None:
    if turn is None or turn[1] is None or (turn[1] == holder and not renewed):
        return
    left = turn[3] - transaction.clock.now_ms()
    if left > 0:
        raise AppendTurnHeld(
            f"the append turn is held by {turn[1]}",
            on=f"{topic}/{number}",
            remedy=f"Try again; without another append it ends in {left / 1000:.1f} s",
        )


def hold_turn(
    transaction: Transaction,
    partition: dict[str, Any],
    topic: str,
    token: int,
    holder: str,
    seconds: float,
    next_offset: int,
    *,
    new: bool = False,
) -> AppendTurn:
    """Let a holder have the turn from now on, with a commit for its next append."""
    topic_id, number = partition["topic_id"], partition["partition_id"]
    commit_id = new_id()
    open_commit_row(transaction, commit_id, APPEND)
    until = transaction.clock.now_ms() + round(seconds * 1000)
    if new:
        transaction.run(INSERT_TURN, topic_id, number, token, holder, commit_id, until)
    else:
        transaction.run(UPDATE_TURN, token, holder, commit_id, until, topic_id, number)
    return AppendTurn(topic, number, token, next_offset, to_datetime(until), holder, commit_id, topic_id, seconds)


def release_turn(transaction: Transaction, turn: AppendTurn) -> bool:
    """Give a turn back before its time; false if it was lost already."""
    if transaction.one(SHARE_TOPIC_BY_ID, turn.topic_id) is None:
        return False
    abort_commit(transaction, turn.commit_id)
    locked_partition(transaction, turn.topic, turn.topic_id, turn.partition_id)
    current = transaction.one(TURN, turn.topic_id, turn.partition_id)
    if current is None or current[0] != turn.token:
        return False
    _give_up(transaction, turn.topic_id, turn.partition_id, turn.token)
    return True


def _give_up(transaction: Transaction, topic_id: int, number: int, token: int) -> None:
    """Let nobody hold a turn, whose commit was aborted. The token stays, so that the next one is larger."""
    transaction.run(UPDATE_TURN, token, None, None, transaction.clock.now_ms(), topic_id, number)
    end_folder(transaction, turn_folder(topic_id, number, token))


def expire_turns(transaction: Transaction, silent_since: int, most: int) -> int:
    """Release turns that ran out before a time and that nobody took over, so that their folders end; how many."""
    found = transaction.all(EXPIRED_TURNS, silent_since, most)
    live = {
        topic_id
        for topic_id in sorted({row[0] for row in found})
        if transaction.one(SHARE_TOPIC_BY_ID, topic_id) is not None
    }
    released = 0
    # In the order in which several turns are claimed.
    for topic_id, number, token, holder, commit_id, object_id in sorted(found, key=lambda row: row[-1]):
        if topic_id not in live:
            continue  # Its deletion ends its folders.
        if commit_id is not None:
            abort_commit(transaction, commit_id)
        transaction.lock(object_id)
        current = transaction.one(TURN, topic_id, number)
        if current is not None and current[:2] == (token, holder) and current[3] <= silent_since:
            _give_up(transaction, topic_id, number, token)
            released += 1
    return released


def append_segments(
    transaction: Transaction,
    turn: AppendTurn,
    segments: Sequence[SegmentInfo],
    *,
    warehouse: str,
    footers: Mapping[str, bytes],
) -> AppendResult:
    """Record segments under a turn. The transaction has just flipped the turn's commit row."""
    topic = transaction.one(SHARE_TOPIC_BY_ID, turn.topic_id)
    if topic is None:
        raise not_found(turn.topic)
    if segments[0].producer_id is not None and segments[0].producer_epoch is not None:
        enter_epoch(transaction, segments[0].producer_id, segments[0].producer_epoch)
    partition = locked_partition(transaction, turn.topic, turn.topic_id, turn.partition_id)
    require_turn(transaction, turn)
    _refuse_landed(transaction, partition, segments)
    recorded = record_segments(transaction, partition, segments, commit_id=turn.commit_id, warehouse=warehouse)
    add_footers(transaction, recorded, footers)
    _remember_batch(transaction, partition, recorded)
    return AppendResult(tuple(recorded), renewed_turn(transaction, partition, turn, recorded))


def require_turn(transaction: Transaction, turn: AppendTurn) -> None:
    """Refuse a turn that has passed on; the partition is locked."""
    current = transaction.one(TURN, turn.topic_id, turn.partition_id)
    if current is None or current[0] != turn.token or current[1] != turn.holder:
        raise turn_lost(turn)


def renewed_turn(
    transaction: Transaction, partition: dict[str, Any], turn: AppendTurn, recorded: Sequence[SegmentInfo]
) -> AppendTurn:
    """The turn for the next append, after one has recorded segments."""
    watermark = recorded[-1].end_offset + 1
    return hold_turn(transaction, partition, turn.topic, turn.token, turn.holder, turn.seconds, watermark)


def add_footers(transaction: Transaction, segments: Sequence[SegmentInfo], footers: Mapping[str, bytes]) -> None:
    """Keep the footers of new segments, by their paths. A segment without one has no file of ours."""
    insert_footers(
        transaction,
        [
            (segment.s3_key, footers[segment.s3_key], segment.record_count, segment.size_bytes)
            for segment in segments
            if segment.s3_key in footers
        ],
    )


def check_footers(segments: Sequence[SegmentInfo], footers: Mapping[str, bytes], *folders: str) -> None:
    """Refuse footers of other files, and files that lie in no folder whose fence is that of this write."""
    if strange := footers.keys() - {segment.s3_key for segment in segments}:
        raise InvalidSegment(f"the footer of {shown(min(strange))} belongs to no segment", on="segments")
    for path, footer in footers.items():
        if not isinstance(footer, bytes) or not footer:
            raise InvalidSegment(f"the footer of {shown(path)} has no bytes", on="segments")
        if not path.startswith(tuple(f"{folder}/" for folder in folders)):
            raise InvalidSegment(
                f"the file {shown(path)} lies outside the folder of its write",
                on="segments",
                remedy=f"Write it to {folders[0]}: elsewhere it may have been swept",
            )


def turn_lost(turn: AppendTurn) -> AppendTurnLost:
    """The error for a turn that has passed to somebody else."""
    return AppendTurnLost(
        "the append turn has passed on",
        on=f"{turn.topic}/{turn.partition_id}",
        remedy="Claim it again and stamp the segment from the new high watermark to a new path",
    )


def landed_before(reader: Reader, turn: AppendTurn, segments: Sequence[SegmentInfo]) -> AppendResult | None:
    """What an earlier call with the same turn and the same segments has landed; none if it has not."""
    state = reader.one(STATE_OF_COMMIT, turn.commit_id)
    partition = reader.one(PARTITION_ROW, turn.topic_id, turn.partition_id)
    # Without a commit row it is finished for long: then what has landed tells how.
    if state not in (("committed",), None) or partition is None:
        return None
    row = row_of(schema.partitions, partition)
    landed = [_landed_segment(reader, turn, segment) for segment in segments]
    if None in landed:
        return None
    turn = current_turn(reader, turn, row["high_watermark"])
    return AppendResult(tuple(segment for segment in landed if segment is not None), turn, duplicate=True)


def current_turn(reader: Reader, turn: AppendTurn, next_offset: int) -> AppendTurn:
    """A turn as it is after appends whose results are not known, if it is still held."""
    turn = replace(turn, next_offset=next_offset)
    current = reader.one(TURN, turn.topic_id, turn.partition_id)
    if current is not None and current[:2] == (turn.token, turn.holder) and current[2] is not None:
        turn = replace(turn, commit_id=current[2], expires_at=to_datetime(current[3]))
    return turn


def _landed_segment(reader: Reader, turn: AppendTurn, segment: SegmentInfo) -> SegmentInfo | None:
    row = reader.one(FIND_BY_BASE, turn.topic_id, turn.partition_id, segment.base_offset)
    if row is not None and row[-1] == turn.commit_id and row[S3_KEY] == segment.s3_key:
        return segment_from(row[:-1])
    # Retention or a merge may have taken it. That its offsets are gone, or in another segment, proves
    # nothing about this one: a turn that was used before may be given with another. Its file does.
    left = reader.one(LEFT_BEHIND, reader.listed([segment.s3_key]))
    return segment if left is not None else None


def forget_turns(transaction: Transaction, topic_id: int) -> None:
    """Delete the turns and producers' batches of a hidden topic, and fence what was under way."""
    end_folders_of(transaction, topic_id)
    for (commit_id,) in transaction.all(OPEN_TURNS, topic_id):
        abort_commit(transaction, commit_id)
    transaction.run(DELETE_TURNS, topic_id)
    transaction.run(DELETE_BATCHES, topic_id)


# --- producers -----------------------------------------------------------------


def next_epoch(transaction: Transaction, producer_id: str) -> int:
    """Begin a new epoch of a producer, which fences every older one. It waits for their appends."""
    row = transaction.one(CLAIM_PRODUCER, producer_id)
    now = transaction.clock.now_ms()
    if row is None:
        transaction.run(INSERT_PRODUCER, producer_id, 0, now)
        return 0
    if row[0] >= MAX_INTEGER:
        raise ProducerFenced(
            "it has had every epoch there can be", on=f"producer {producer_id}", remedy="Use another producer id"
        )
    transaction.run(UPDATE_PRODUCER, row[0] + 1, now, producer_id)
    return int(row[0]) + 1


def enter_epoch(transaction: Transaction, producer_id: str, epoch: int) -> None:
    """Refuse a producer of an older epoch; remember a newer one."""
    row = transaction.one(SHARE_PRODUCER, producer_id)
    now = transaction.clock.now_ms()
    if row is None:
        transaction.run(INSERT_PRODUCER, producer_id, epoch, now)
        return
    if row[0] < epoch:
        row = transaction.one(CLAIM_PRODUCER, producer_id)
        assert row is not None
        if row[0] < epoch:
            transaction.run(UPDATE_PRODUCER, epoch, now, producer_id)
            return
    if row[0] > epoch:
        raise ProducerFenced(
            f"epoch {epoch} was followed by epoch {row[0]}",
            on=f"producer {producer_id}",
            remedy="Stop this producer: another one with the same id has taken over",
        )


def check_one_producer(segments: Sequence[SegmentInfo]) -> None:
    """Refuse an append whose segments are not all of one producer and one epoch, or of none."""
    if len({(segment.producer_id, segment.producer_epoch) for segment in segments}) > 1:
        raise InvalidSegment(
            "an append has segments of one producer and one epoch",
            on=f"{segments[0].topic}/{segments[0].partition_id}",
            remedy="Append what belongs to another one by itself",
        )


def _refuse_landed(transaction: Transaction, partition: dict[str, Any], segments: Sequence[SegmentInfo]) -> None:
    """Check a producer's sequence; an append that landed before ends the transaction."""
    producer_id = segments[0].producer_id
    if producer_id is None:
        return
    where = (partition["topic_id"], partition["partition_id"], producer_id)
    row = transaction.one(LAST_BATCH, *where)
    last = row_of(schema.producer_batches, row) if row else None
    landed = [_landed_batch(transaction, partition, segment, last) for segment in segments]
    if None not in landed:
        raise Landed(tuple(segment for segment in landed if segment is not None), partition["high_watermark"])
    epoch, expected = segments[0].producer_epoch, 0
    # A new epoch counts from the beginning.
    if last is not None and last["producer_epoch"] == epoch:
        expected = last["last_sequence"] + 1
    for segment in segments:
        _check_next(segment, expected)
        assert segment.last_sequence is not None
        expected = segment.last_sequence + 1


def _landed_batch(
    transaction: Transaction, partition: dict[str, Any], segment: SegmentInfo, last: dict[str, Any] | None
) -> SegmentInfo | None:
    """The recorded form of this very batch, if it is there."""
    where = (partition["topic_id"], partition["partition_id"], segment.producer_id)
    row = transaction.one(FIND_BY_BATCH, *where, segment.producer_epoch, segment.first_sequence)
    if row is not None:
        found = segment_from(row)
        return found if found.last_sequence == segment.last_sequence else None
    if last is None or last["producer_epoch"] != segment.producer_epoch:
        return None
    assert segment.first_sequence is not None and segment.last_sequence is not None
    if not last["first_sequence"] <= segment.first_sequence <= segment.last_sequence <= last["last_sequence"]:
        return None
    # The last append is remembered as a whole, also when retention or a merge has taken its segments.
    base = last["base_offset"] + segment.first_sequence - last["first_sequence"]
    end = base + segment.record_count - 1
    taken = end < partition["log_start"] or _is_merged(transaction, partition, base, end)
    return replace(segment, base_offset=base, end_offset=end) if taken else None


def _is_merged(transaction: Transaction, partition: dict[str, Any], base: int, end: int) -> bool:
    """Whether offsets that a producer's batch had are now in segments of no producer."""
    where = (partition["topic_id"], partition["partition_id"])
    for offset in (base, end):
        row = transaction.one(HOLDING, *where, offset)
        if row is None or row[0] < offset or row[1] is not None:
            return False
    return True


def _check_next(segment: SegmentInfo, expected: int) -> None:
    assert segment.first_sequence is not None
    if segment.first_sequence == expected:
        return
    what = "overlaps with what has landed" if segment.first_sequence < expected else "leaves a hole"
    raise SequenceConflict(
        f"the batch {segment.first_sequence}..{segment.last_sequence} of epoch {segment.producer_epoch} {what}:"
        f" {expected} comes next",
        on=f"producer {segment.producer_id} on {segment.topic}/{segment.partition_id}",
        remedy="Repeat a batch with exactly the records it had at first, and leave none out",
    )


def _remember_batch(transaction: Transaction, partition: dict[str, Any], recorded: Sequence[SegmentInfo]) -> None:
    first, last = recorded[0], recorded[-1]
    if first.producer_id is None:
        return
    where = (partition["topic_id"], partition["partition_id"])
    values = (
        first.producer_epoch,
        first.first_sequence,
        last.last_sequence,
        first.base_offset,
        last.end_offset,
        last.id,
    )
    if transaction.run(UPDATE_BATCH, *values, *where, first.producer_id) == 0:
        transaction.run(INSERT_BATCH, *where, first.producer_id, *values)
