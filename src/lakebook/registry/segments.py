"""Segments: recording them without overlap or hole, finding them, and removing whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from lakebook.clock import to_datetime, to_ms
from lakebook.errors import (
    InvalidSegment,
    OffsetBeyondWatermark,
    PartitionNotFound,
    PathInUse,
    PathOutsideWarehouse,
    SegmentAlreadyExists,
    SegmentGap,
    SegmentOverlap,
)
from lakebook.names import MAX_NAME, check_id, check_path, is_moment, shown
from lakebook.registry import schema
from lakebook.registry.changes import delete_rows, insert_rows, row_of, update_row
from lakebook.registry.databases import Failure
from lakebook.registry.freshness import TOPIC, Span, mark_stale
from lakebook.registry.losses import note_losses
from lakebook.registry.mirrors import kept_by_tables
from lakebook.registry.offsets import MAX_OFFSET, check_offset
from lakebook.registry.partitions import asked_for, locked_partition
from lakebook.registry.schema import MAX_BIGINT, MAX_INTEGER
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind
from lakebook.registry.temporary_files import USED_BY_OTHERS, add_temporary_files
from lakebook.registry.topic_leases import pinned_from
from lakebook.registry.transactions import Reader, Row, Transaction, new_ids

_t = schema.topics.c
_p = schema.partitions.c
_s = schema.segments.c


@dataclass(frozen=True)
class SegmentInfo:
    """A segment: the offsets `base_offset` to `end_offset` of a partition, in one immutable file.

    For a new one, `id`, `s3_bucket`, `created_at` and the timestamps may be left out: the id is
    then made, the bucket is the warehouse's root, and the records count as written when recorded.
    """

    topic: str
    partition_id: int
    base_offset: int
    end_offset: int
    record_count: int
    size_bytes: int
    s3_key: str
    id: str = ""
    s3_bucket: str = ""
    created_at: datetime | None = None
    min_timestamp: datetime | None = None
    max_timestamp: datetime | None = None
    checksum: str | None = None
    producer_id: str | None = None
    producer_epoch: int | None = None
    first_sequence: int | None = None
    last_sequence: int | None = None


_SEGMENT = (
    _t.name,
    _s.partition_id,
    _s.base_offset,
    _s.end_offset,
    _s.record_count,
    _s.size_bytes,
    _s.s3_key,
    _s.id,
    _s.s3_bucket,
    _s.created_at,
    _s.min_timestamp,
    _s.max_timestamp,
    _s.checksum,
    _s.producer_id,
    _s.producer_epoch,
    _s.first_sequence,
    _s.last_sequence,
)
#: What `segment_from` takes, of segments and topics.
SEGMENT_COLUMNS = _SEGMENT
_FIELDS = tuple(SegmentInfo.__dataclass_fields__)
_CREATED, _MIN, _MAX = (_FIELDS.index(name) for name in ("created_at", "min_timestamp", "max_timestamp"))
BASE_OFFSET, END_OFFSET, S3_KEY = (_FIELDS.index(name) for name in ("base_offset", "end_offset", "s3_key"))
#: Larger than any object a store takes, and small enough for a million of them to be summed up.
MAX_SIZE = 2**43

_of_live_partition = (_t.name == bind("name"), _t.deleted_at.is_(None), _p.partition_id == bind("number"))
_topic_partition = schema.topics.join(schema.partitions, _p.topic_id == _t.id)


def _visible(
    *conditions: sa.ColumnElement[bool],
    names: tuple[str, ...],
    order: str = "base_offset",
    descending: bool = False,
    after: bool = False,
    most: Any = ONE,
) -> Statement:
    """A look-up among the visible segments of a live topic's partition, in the words of each database.

    Segments below the log start are on their way out and no longer there for readers. Both forms
    walk one index from where the answer begins: SQLite takes the order from the inner side of a
    join, and only one lower bound; PostgreSQL takes neither, but plans a lateral query well.
    """

    def inner(database: str) -> tuple[sa.ColumnElement[bool], ...]:
        larger = sa.func.greatest if database == POSTGRESQL else sa.func.max
        bound = _s.base_offset > larger(bind("after"), _p.log_start - 1) if after else _s.base_offset >= _p.log_start
        return (_s.topic_id == _p.topic_id, _s.partition_id == _p.partition_id, bound, *conditions)

    def ordered(columns: Any) -> list[Any]:
        keys = [columns[order], columns["base_offset"]] if order != "base_offset" else [columns["base_offset"]]
        return [key.desc() if descending else key for key in keys]

    joined = (
        sa.select(*_SEGMENT)
        .select_from(_topic_partition.join(schema.segments, sa.and_(*inner(SQLITE)[:2])))
        .where(*_of_live_partition, *inner(SQLITE)[2:])
        .order_by(*ordered(_s))
        .limit(most)
        .offset(ZERO)
    )
    found = (
        sa.select(schema.segments)
        .where(*inner(POSTGRESQL))
        .order_by(*ordered(_s))
        .limit(most)
        .offset(ZERO)
        .correlate(schema.partitions)
        .lateral("found")
    )
    lateral = (
        sa.select(_t.name, *(found.c[column.name] for column in _SEGMENT[1:]))
        .select_from(_topic_partition.join(found, sa.true()))
        .where(*_of_live_partition)
    )
    if most is not ONE:
        lateral = lateral.order_by(*ordered(found.c))
    return Statement(joined, *names, postgresql=lateral)


# "The last one that begins at or before the offset" is one step into an index, hit or miss;
# its end is compared afterwards. A condition on both columns would scan on a miss.
FIND_BY_OFFSET = _visible(_s.base_offset <= bind("offset"), names=("name", "number", "offset"), descending=True)
FIND_BY_TIMESTAMP = _visible(
    _s.newest_timestamp >= bind("moment"), names=("name", "number", "moment"), order="newest_timestamp"
)
FIND_BY_TIMESTAMP_AFTER = _visible(
    _s.max_timestamp >= bind("moment"), names=("name", "number", "moment", "after"), after=True
)
LIST_SEGMENTS = _visible(names=("name", "number", "after", "most"), after=True, most=bind("most", sa.Integer))


def _find_many(database: str) -> sa.Select[Any]:
    places, (offset,) = asked_for(database, sa.BigInteger)
    other = schema.segments.alias("other")
    base = (
        sa.select(sa.func.max(other.c.base_offset))
        .where(
            other.c.topic_id == _p.topic_id,
            other.c.partition_id == _p.partition_id,
            other.c.base_offset <= offset,
            other.c.base_offset >= _p.log_start,
        )
        .scalar_subquery()
    )
    here = sa.and_(
        _s.topic_id == _p.topic_id,
        _s.partition_id == _p.partition_id,
        _s.base_offset == base,
        _s.end_offset >= offset,
    )
    return sa.select(_p.partition_id, offset, *_SEGMENT).select_from(places.outerjoin(schema.segments, here))


FIND_MANY = Statement(_find_many(SQLITE), "wanted", postgresql=_find_many(POSTGRESQL))
LAST_SEGMENT = Statement(
    sa.select(_s.newest_timestamp)
    .where(_s.topic_id == bind("topic_id"), _s.partition_id == bind("number"))
    .order_by(_s.base_offset.desc())
    .limit(ONE)
    .offset(ZERO),
    "topic_id",
    "number",
)
_of_any_partition = sa.select(*_SEGMENT).select_from(schema.segments.join(schema.topics, _t.id == _s.topic_id))
FIND_BY_BASE = Statement(
    _of_any_partition.where(
        _s.topic_id == bind("topic_id"), _s.partition_id == bind("number"), _s.base_offset == bind("offset")
    ).add_columns(_s.commit_id),
    "topic_id",
    "number",
    "offset",
)
FIND_BY_BATCH = Statement(
    _of_any_partition.where(
        _s.topic_id == bind("topic_id"),
        _s.partition_id == bind("number"),
        _s.producer_id == bind("producer"),
        _s.producer_epoch == bind("epoch"),
        _s.first_sequence == bind("first"),
    ),
    "topic_id",
    "number",
    "producer",
    "epoch",
    "first",
)
_ids_among = {
    database: sa.select(_s.id).where(among(_s.id, "ids", database)).limit(ONE).offset(ZERO)
    for database in (SQLITE, POSTGRESQL)
}
IDS_AMONG = Statement(_ids_among[SQLITE], "ids", postgresql=_ids_among[POSTGRESQL])
_paths_among = {
    database: sa.select(_s.s3_key)
    .where(_s.s3_bucket == bind("bucket"), among(_s.s3_key, "paths", database))
    .limit(ONE)
    .offset(ZERO)
    for database in (SQLITE, POSTGRESQL)
}
PATHS_AMONG = Statement(_paths_among[SQLITE], "bucket", "paths", postgresql=_paths_among[POSTGRESQL])
_of_partition = (_s.topic_id == bind("topic_id"), _s.partition_id == bind("number"))
#: From the segment that holds an offset on; where none does, from the next one on.
_from_containing = _s.base_offset >= sa.func.coalesce(
    sa.select(sa.case((_s.end_offset >= bind("offset"), _s.base_offset), else_=_s.base_offset + 1))
    .where(*_of_partition, _s.base_offset <= bind("offset"))
    .order_by(_s.base_offset.desc())
    .limit(ONE)
    .offset(ZERO)
    .scalar_subquery(),
    0,
)
CONTAINING_OR_NEXT = Statement(
    sa.select(_s.base_offset).where(*_of_partition, _from_containing).order_by(_s.base_offset).limit(ONE).offset(ZERO),
    "topic_id",
    "number",
    "offset",
)
TIMES_BETWEEN = Statement(
    sa.select(_s.min_timestamp, _s.max_timestamp).where(
        *_of_partition, _s.base_offset >= bind("start"), _s.base_offset < bind("end")
    ),
    "topic_id",
    "number",
    "start",
    "end",
)
# For readers with a lease: by the topic's id and without regard to the log start. A hidden topic shows too.
FIND_PINNED = Statement(
    _of_any_partition.add_columns(_t.deleted_at)
    .where(*_of_partition, _s.base_offset <= bind("offset"))
    .order_by(_s.base_offset.desc())
    .limit(ONE)
    .offset(ZERO),
    "topic_id",
    "number",
    "offset",
)
LIST_PINNED = Statement(
    _of_any_partition.add_columns(_t.deleted_at)
    .where(*_of_partition, _from_containing, _s.base_offset < bind("end"))
    .order_by(_s.base_offset),
    "topic_id",
    "number",
    "offset",
    "end",
)
BELOW = Statement(
    sa.select(schema.segments)
    .where(_s.topic_id == bind("topic_id"), _s.partition_id == bind("number"), _s.base_offset < bind("offset"))
    .order_by(_s.base_offset)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "topic_id",
    "number",
    "offset",
    "most",
)
PARTITION_WITH_SEGMENTS = Statement(
    sa.select(_s.partition_id).where(_s.topic_id == bind("topic_id")).order_by(_s.partition_id).limit(ONE).offset(ZERO),
    "topic_id",
)

_new = SegmentInfo.__new__
_set = object.__setattr__


def segment_from(row: Row) -> SegmentInfo:
    """A segment from the columns of `FIND_BY_OFFSET`."""
    (
        topic, number, base, end, count, size, key, segment_id, bucket, created, least, most, checksum,
        producer, epoch, first, last,
    ) = row  # fmt: skip
    # A frozen dataclass sets its fields one by one; giving it its dictionary at once is three
    # times as fast, and this is the hottest place there is.
    segment = _new(SegmentInfo)
    written = to_datetime(created)
    _set(segment, "__dict__", {
        "topic": topic, "partition_id": number, "base_offset": base, "end_offset": end, "record_count": count,
        "size_bytes": size, "s3_key": key, "id": segment_id, "s3_bucket": bucket,
        "created_at": written, "min_timestamp": written if least == created else to_datetime(least),
        "max_timestamp": written if most == created else to_datetime(most),
        "checksum": checksum, "producer_id": producer, "producer_epoch": epoch, "first_sequence": first,
        "last_sequence": last,
    })  # fmt: skip
    return segment


def find_by_timestamp(reader: Reader, topic: str, number: int, moment: datetime) -> SegmentInfo | None:
    """The first visible segment with a record at or after a time."""
    ms = to_ms(moment)
    row = reader.one(FIND_BY_TIMESTAMP, topic, number, ms)
    if row is not None and row[_MAX] < ms:
        # A segment before it, since removed, was newer than its time: look further.
        row = reader.one(FIND_BY_TIMESTAMP_AFTER, topic, number, ms, row[BASE_OFFSET])
    return None if row is None else segment_from(row)


def check_segment(segment: object, warehouse: str) -> SegmentInfo:
    """Return `segment` if its description makes sense by itself."""
    if not isinstance(segment, SegmentInfo):
        raise InvalidSegment(f"{shown(segment)} is not a SegmentInfo", on="segment")
    base, end, count, size = segment.base_offset, segment.end_offset, segment.record_count, segment.size_bytes
    # One comparison for what is right, as nearly all are; what is wrong is found out at leisure.
    if not (
        type(base) is type(end) is type(count) is type(size) is int
        and 0 <= base <= end < MAX_OFFSET
        and end - base + 1 == count <= MAX_INTEGER
        and 0 <= size <= MAX_SIZE
    ):
        _refuse_numbers(segment)
    check_path(segment.s3_key)
    on = "segment"
    if segment.s3_bucket not in ("", warehouse):
        raise PathOutsideWarehouse(
            f"the bucket {shown(segment.s3_bucket)} is not the warehouse's root {shown(warehouse)}",
            on=on,
            remedy="Leave s3_bucket out",
        )
    if segment.id != "":
        check_id("segment", segment.id)
    if segment.checksum is not None:
        _check_checksum(segment.checksum, on)
    if segment.created_at is not None or segment.min_timestamp is not None or segment.max_timestamp is not None:
        _check_times(segment, on)
    _check_batch(segment, on)
    return segment


def _refuse_numbers(segment: SegmentInfo) -> None:
    on = f"segment of {segment.topic}/{segment.partition_id}"
    # The watermark is one more than the last offset and has to fit too.
    check_offset(segment.base_offset, on, most=MAX_OFFSET - 1)
    check_offset(segment.end_offset, on, most=MAX_OFFSET - 1)
    if segment.end_offset < segment.base_offset:
        raise InvalidSegment(
            f"it ends at {segment.end_offset}, before its base offset {segment.base_offset}",
            on=on,
            remedy="end_offset is the offset of its last record",
        )
    _check_count(segment.record_count, 1, MAX_INTEGER, "record_count", on)
    _check_count(segment.size_bytes, 0, MAX_SIZE, "size_bytes", on)
    if segment.record_count == segment.end_offset - segment.base_offset + 1:
        raise InvalidSegment("its numbers have to be of type int itself", on=on)
    raise InvalidSegment(
        f"{segment.record_count} records cannot have the offsets {segment.base_offset} to {segment.end_offset}",
        on=on,
        remedy="Offsets are gapless: record_count = end_offset - base_offset + 1",
    )


def _check_count(value: object, least: int, most: int, name: str, on: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidSegment(f"{name} cannot be {shown(value)}", on=on, remedy=f"Use {least} to {most}")


def _check_times(segment: SegmentInfo, on: str) -> None:
    for name in ("created_at", "min_timestamp", "max_timestamp"):
        moment = getattr(segment, name)
        if moment is not None and not is_moment(moment):
            raise InvalidSegment(f"{name} has to be an aware datetime, not {shown(moment)}", on=on)
    if (segment.min_timestamp is None) != (segment.max_timestamp is None):
        raise InvalidSegment("min_timestamp and max_timestamp go together", on=on)
    if segment.min_timestamp and segment.max_timestamp and segment.min_timestamp > segment.max_timestamp:
        raise InvalidSegment("its min_timestamp is after its max_timestamp", on=on)


def _check_checksum(checksum: object, on: str) -> None:
    if (
        isinstance(checksum, str)
        and checksum.isascii()
        and checksum.isprintable()
        and ":" in checksum
        and len(checksum) <= MAX_NAME
    ):
        return
    raise InvalidSegment(f"the checksum {shown(checksum)} is not 'algorithm:value'", on=on)


def _check_batch(segment: SegmentInfo, on: str) -> None:
    batch = (segment.producer_id, segment.producer_epoch, segment.first_sequence, segment.last_sequence)
    if batch == (None, None, None, None):
        return
    if None in batch:
        raise InvalidSegment("producer_id, producer_epoch, first_sequence and last_sequence go together", on=on)
    check_id("producer", segment.producer_id)
    _check_count(segment.producer_epoch, 0, MAX_INTEGER, "producer_epoch", on)
    _check_count(segment.first_sequence, 0, MAX_BIGINT, "first_sequence", on)
    _check_count(segment.last_sequence, 0, MAX_BIGINT, "last_sequence", on)
    assert segment.first_sequence is not None and segment.last_sequence is not None
    if segment.last_sequence - segment.first_sequence + 1 != segment.record_count:
        raise InvalidSegment(
            f"{segment.record_count} records cannot have the sequence {segment.first_sequence}"
            f" to {segment.last_sequence}",
            on=on,
            remedy="Every record has a sequence number of its own",
        )


def check_without_producer(segments: Sequence[SegmentInfo]) -> None:
    """Refuse a producer's batch where no turn is asked for: its sequence counts only in order."""
    if any(segment.producer_id is not None for segment in segments):
        raise InvalidSegment(
            "a producer's batch needs the partition's append turn",
            on="segment",
            remedy="Record it with claim_append and append_segment",
        )


def check_distinct(segments: Sequence[SegmentInfo]) -> None:
    """Refuse a batch that names an id or a path twice."""
    ids = [segment.id for segment in segments if segment.id]
    if len(set(ids)) != len(ids):
        raise SegmentAlreadyExists("the batch names a segment id twice", on="segments")
    if len({segment.s3_key for segment in segments}) != len(segments):
        raise PathInUse("the batch names a path twice", on="segments", remedy="Every segment has a file of its own")


def record_segments(
    transaction: Transaction,
    partition: dict[str, Any],
    segments: Sequence[SegmentInfo],
    *,
    commit_id: str,
    warehouse: str,
) -> list[SegmentInfo]:
    """Record segments of one locked partition and move its watermark, in one transaction."""
    object_id = partition["object_id"]
    if transaction.retried_after is Failure.DUPLICATE:
        refuse_taken(transaction, segments, warehouse)
    recorded: list[SegmentInfo] = []
    rows = _rows_of(transaction, partition, segments, commit_id, warehouse, recorded)
    insert_rows(transaction, object_id, schema.segments, rows)
    refuse_waiting(transaction, segments)
    changes = {"high_watermark": recorded[-1].end_offset + 1, "updated_at": transaction.time_of(object_id)}
    update_row(transaction, object_id, schema.partitions, partition, changes)
    mark_stale(transaction, TOPIC, partition["topic_id"], lambda _: map(_span, recorded))
    return recorded


def _span(segment: SegmentInfo) -> Span:
    """The times of a recorded segment's records."""
    assert segment.min_timestamp is not None and segment.max_timestamp is not None
    return to_ms(segment.min_timestamp), to_ms(segment.max_timestamp)


def _rows_of(
    transaction: Transaction,
    partition: dict[str, Any],
    segments: Sequence[SegmentInfo],
    commit_id: str,
    warehouse: str,
    recorded: list[SegmentInfo],
) -> Iterator[dict[str, Any]]:
    """The rows of new segments, one after the other; `recorded` fills with what is told of them."""
    topic_id, number = partition["topic_id"], partition["partition_id"]
    now = transaction.time_of(partition["object_id"])
    last = transaction.one(LAST_SEGMENT, topic_id, number)
    newest = last[0] if last else None
    watermark = partition["high_watermark"]
    created = to_datetime(now)
    for segment, fresh_id in zip(segments, new_ids(len(segments)), strict=True):
        if segment.base_offset != watermark:
            check_base(segment, watermark)
        watermark = segment.end_offset + 1
        least = now if segment.min_timestamp is None else to_ms(segment.min_timestamp)
        most = now if segment.max_timestamp is None else to_ms(segment.max_timestamp)
        if newest is None or most > newest:
            newest = most
        segment_id = segment.id or fresh_id
        yield {
            "id": segment_id,
            "topic_id": topic_id,
            "partition_id": number,
            "base_offset": segment.base_offset,
            "end_offset": segment.end_offset,
            "record_count": segment.record_count,
            "size_bytes": segment.size_bytes,
            "s3_bucket": warehouse,
            "s3_key": segment.s3_key,
            "checksum": segment.checksum,
            "min_timestamp": least,
            "max_timestamp": most,
            "newest_timestamp": newest,
            "commit_id": commit_id,
            "producer_id": segment.producer_id,
            "producer_epoch": segment.producer_epoch,
            "first_sequence": segment.first_sequence,
            "last_sequence": segment.last_sequence,
            "created_at": now,
        }
        copy = _new(SegmentInfo)
        fields = copy.__dict__
        fields.update(segment.__dict__)
        fields["id"] = segment_id
        fields["s3_bucket"] = warehouse
        fields["created_at"] = created
        fields["min_timestamp"] = created if least == now else to_datetime(least)
        fields["max_timestamp"] = created if most == now else to_datetime(most)
        recorded.append(copy)


def check_base(segment: SegmentInfo, watermark: int) -> None:
    """Refuse a segment that does not begin exactly at the high watermark."""
    on = f"{segment.topic}/{segment.partition_id}"
    if segment.base_offset < watermark:
        raise SegmentOverlap(
            f"the offset {segment.base_offset} is taken: the high watermark is {watermark}",
            on=on,
            remedy=f"Stamp the segment again from {watermark}",
        )
    if segment.base_offset > watermark:
        raise SegmentGap(
            f"the offset {segment.base_offset} would leave a hole: the high watermark is {watermark}",
            on=on,
            remedy=f"Stamp the segment again from {watermark}",
        )


def refuse_waiting(transaction: Transaction, segments: Sequence[SegmentInfo]) -> None:
    """Refuse a path that waits for its removal: it must never count again, for the file is about to go.

    Asked after the insert, which waits for a transaction that is just letting go of the path.
    """
    used = transaction.one(USED_BY_OTHERS, transaction.listed(segment.s3_key for segment in segments))
    if used is not None:
        raise _path_in_use(*used)


def refuse_taken(transaction: Transaction, segments: Sequence[SegmentInfo], warehouse: str) -> None:
    """Refuse segments whose id or path exists already; the attempt before this one met one of them."""
    taken = transaction.one(IDS_AMONG, transaction.listed(segment.id for segment in segments if segment.id))
    if taken is not None:
        raise SegmentAlreadyExists(
            f"a segment {shown(taken[0])} exists already", on="segment", remedy="Choose another id"
        )
    used = transaction.one(PATHS_AMONG, warehouse, transaction.listed(segment.s3_key for segment in segments))
    if used is not None:
        raise _path_in_use(used[0], "belongs to another segment")


def _path_in_use(path: str, why: str) -> PathInUse:
    return PathInUse(f"the path {shown(path)} {why}", on="segment", remedy="Write every segment to a path of its own")


def move_log_start(transaction: Transaction, topic: dict[str, Any], number: int, offset: int) -> int:
    """Move the log start to the first segment that keeps something at or after `offset`."""
    partition = locked_partition(transaction, topic["name"], topic["id"], number)
    watermark, present = partition["high_watermark"], partition["log_start"]
    on = f"{topic['name']}/{number}"
    if offset > watermark:
        raise OffsetBeyondWatermark(
            f"the offset {offset} lies above the high watermark {watermark}",
            on=on,
            remedy=f"Give at most {watermark}, which removes everything",
        )
    # Only whole segments go: the one that holds the offset stays.
    kept = transaction.one(CONTAINING_OR_NEXT, topic["id"], number, offset)
    start = watermark if kept is None else kept[0]
    if start > present:
        times = [(row[0], row[1]) for row in transaction.all(TIMES_BETWEEN, topic["id"], number, present, start)]
        mark_stale(transaction, TOPIC, topic["id"], lambda _: times, gone=True)
        note_losses(transaction, TOPIC, topic["id"], number, times)
        update_row(
            transaction,
            partition["object_id"],
            schema.partitions,
            partition,
            {"log_start": start, "updated_at": transaction.time_of(partition["object_id"])},
        )
    return int(max(start, present))


def remove_segments_below(
    transaction: Transaction,
    topic: str,
    topic_id: int,
    number: int,
    offset: int | None,
    *,
    grace: float,
    most: int,
    then: Callable[[Transaction, list[dict[str, Any]]], None] | None = None,
) -> int:
    """Hand at most so many segments below `offset` to `temporary_files`.

    An offset of none stands for the log start, or for what leases pin where that is less; a
    segment that holds the offset stays whole. A deleted topic's segments go whatever leases pin.
    `then` is told which rows were removed. Files that a table has too go with its history.
    """
    try:
        partition = locked_partition(transaction, topic, topic_id, number)
    except PartitionNotFound:
        return 0  # The topic was deleted and emptied by another process; nothing is left to do.
    below = offset
    if below is None:
        # Read under the partition's lock, under which leases are taken.
        pinned = pinned_from(transaction, topic_id, number)
        below = partition["log_start"] if pinned is None else min(partition["log_start"], pinned)
    found = [row_of(schema.segments, row) for row in transaction.all(BELOW, topic_id, number, below, most)]
    rows = [row for row in found if row["end_offset"] < below]
    if rows:
        object_id = partition["object_id"]
        delete_rows(transaction, object_id, schema.segments, rows)
        reason = "retention" if offset is None else "topic deleted"
        if then is not None:
            then(transaction, rows)
        kept = kept_by_tables(transaction, [row["s3_key"] for row in rows])
        files = [(row["s3_key"], row["size_bytes"]) for row in rows if row["s3_key"] not in kept]
        # By the clock: after many quick commits the partition's own time is some milliseconds ahead.
        add_temporary_files(transaction, files, reason, transaction.clock.now_ms(), grace)
    return len(rows)
