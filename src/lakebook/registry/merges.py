"""Merges: a run of segments is replaced by one with the same offsets, and its files wait for their readers.

    segments            a merge takes the rows away; from then on nobody finds the files
    retired_segments    while a lease that is older than the merge may need them
    temporary_files     for a grace; then the files go

What a merge replaces in a topic that is a table too stays in the history of that table as well, and goes when
neither needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import InvalidSegment, MergeConflict
from lakebook.registry import schema
from lakebook.registry.appends import add_footers
from lakebook.registry.changes import delete_rows, insert_rows, row_of, update_row
from lakebook.registry.commits import STATE_OF_COMMIT
from lakebook.registry.databases import Failure
from lakebook.registry.mirrors import kept_by_tables, require_followed
from lakebook.registry.partitions import locked_partition
from lakebook.registry.segments import SegmentInfo, refuse_taken, refuse_waiting
from lakebook.registry.statements import ONE, ZERO, Statement, bind, insert_into
from lakebook.registry.stream_folders import end_folder, merge_folder
from lakebook.registry.temporary_files import add_temporary_files
from lakebook.registry.topics import SHARE_TOPIC_BY_ID, not_found
from lakebook.registry.transactions import Reader, Transaction, new_id

MERGED = "merged"

#: What else happens in the transaction of a merge; it is given the partition's row.
Then: TypeAlias = Callable[[Transaction, dict[str, Any]], None]

_s = schema.segments.c
_r = schema.retired_segments.c
_l = schema.topic_leases.c

RUN = Statement(
    sa.select(schema.segments)
    .where(
        _s.topic_id == bind("topic_id"),
        _s.partition_id == bind("number"),
        _s.base_offset >= bind("first"),
        _s.base_offset <= bind("last"),
    )
    .order_by(_s.base_offset),
    "topic_id",
    "number",
    "first",
    "last",
)
INSERT_RETIRED = insert_into(schema.retired_segments)
# Leases and merges are taken one after the other, under the partition's lock: one that is newer than the
# merge has not found the file, and no older one can come any more.
_pinned = sa.exists(
    sa.select(ONE)
    .select_from(schema.topic_leases)
    .where(
        _l.topic_id == _r.topic_id,
        _l.partition_id == _r.partition_id,
        _l.from_offset <= _r.end_offset,
        _l.sequence < _r.sequence,
    )
    .correlate(schema.retired_segments)
)


def _taking(*which: sa.ColumnElement[bool], names: tuple[str, ...]) -> Statement:
    some = (
        sa.select(_r.file_path)
        .where(*which)
        .order_by(_r.topic_id, _r.partition_id, _r.end_offset)
        .limit(bind("most", sa.Integer))
        .offset(ZERO)
    )
    return Statement(
        sa.delete(schema.retired_segments).where(_r.file_path.in_(some)).returning(_r.file_path, _r.file_size),
        *names,
        "most",
    )


TAKE_UNPINNED = _taking(sa.not_(_pinned), names=())
TAKE_ANY = _taking(names=())
TAKE_OF_TOPIC = _taking(_r.topic_id == bind("of_topic"), names=("of_topic",))
PATH_OF_COMMIT = Statement(
    sa.select(_s.id, _s.created_at).where(
        _s.topic_id == bind("topic_id"),
        _s.partition_id == bind("number"),
        _s.base_offset == bind("first"),
        _s.commit_id == bind("of_commit"),
    ),
    "topic_id",
    "number",
    "first",
    "of_commit",
)


def check_merge(old: Sequence[SegmentInfo], new: SegmentInfo) -> None:
    """Refuse a merge whose result is not what it replaces."""
    on = f"{new.topic}/{new.partition_id}"
    if not old or any(not segment.id for segment in old):
        raise InvalidSegment("a merge replaces segments that are recorded", on=on)
    if any((segment.topic, segment.partition_id) != (new.topic, new.partition_id) for segment in old):
        raise InvalidSegment("a merge replaces segments of one partition", on=on)
    if (new.base_offset, new.end_offset) != (old[0].base_offset, old[-1].end_offset) or any(
        before.end_offset + 1 != after.base_offset for before, after in pairwise(old)
    ):
        raise InvalidSegment("a merge keeps all offsets, of segments that follow one another", on=on)
    if new.producer_id is not None:
        raise InvalidSegment("merged segments are of no producer", on=on)


def replace_segments(
    transaction: Transaction,
    topic_id: int,
    number: int,
    old: Sequence[SegmentInfo],
    new: SegmentInfo,
    *,
    commit_id: str,
    warehouse: str,
    footers: Mapping[str, bytes],
    then: Then | None = None,
) -> SegmentInfo:
    """Replace segments by one. The transaction has just flipped the merge's commit row."""
    if transaction.one(SHARE_TOPIC_BY_ID, topic_id) is None:
        raise not_found(new.topic)
    partition = locked_partition(transaction, new.topic, topic_id, number)
    if transaction.retried_after is Failure.DUPLICATE:
        refuse_taken(transaction, [new], warehouse)
    rows = _rows_of(transaction, partition, old)
    object_id = partition["object_id"]
    delete_rows(transaction, object_id, schema.segments, rows)
    merged = _merged_row(rows, new, commit_id, warehouse)
    insert_rows(transaction, object_id, schema.segments, [merged])
    refuse_waiting(transaction, [new])
    add_footers(transaction, [new], footers)
    # Whoever remembers segments of the partition sees by its row that some are gone.
    changes = {"updated_at": transaction.time_of(object_id)}
    update_row(transaction, object_id, schema.partitions, partition, changes)
    if then is not None:
        then(transaction, {**partition, **changes})
    _retire(transaction, rows, transaction.next_sequence(object_id) - 1)
    end_folder(transaction, merge_folder(topic_id, number, commit_id))
    return _told(new, merged)


def _rows_of(transaction: Transaction, partition: dict[str, Any], old: Sequence[SegmentInfo]) -> list[dict[str, Any]]:
    """The rows of the segments, if they are all still there and nothing else is between them."""
    where = (partition["topic_id"], partition["partition_id"])
    found = transaction.all(RUN, *where, old[0].base_offset, old[-1].base_offset)
    rows = [row_of(schema.segments, row) for row in found]
    on, again = f"{old[0].topic}/{where[1]}", "Look again which segments there are"
    if [(row["id"], row["end_offset"]) for row in rows] != [(segment.id, segment.end_offset) for segment in old]:
        raise MergeConflict("the segments were replaced or removed meanwhile", on=on, remedy=again)
    if rows[0]["base_offset"] < partition["log_start"]:
        raise MergeConflict("the log start has moved past the first of the segments", on=on, remedy=again)
    return rows


def _merged_row(rows: Sequence[dict[str, Any]], new: SegmentInfo, commit_id: str, warehouse: str) -> dict[str, Any]:
    first, last = rows[0], rows[-1]
    return {
        **first,
        "id": new.id or new_id(),
        "end_offset": new.end_offset,
        "record_count": new.record_count,
        "size_bytes": new.size_bytes,
        "s3_bucket": warehouse,
        "s3_key": new.s3_key,
        "checksum": new.checksum,
        "min_timestamp": min(row["min_timestamp"] for row in rows),
        "max_timestamp": max(row["max_timestamp"] for row in rows),
        # A running maximum, which what comes after the last one goes on from.
        "newest_timestamp": last["newest_timestamp"],
        "commit_id": commit_id,
        "producer_id": None,
        "producer_epoch": None,
        "first_sequence": None,
        "last_sequence": None,
        # When its records came: a merge brings none.
        "created_at": max(row["created_at"] for row in rows),
    }


def _told(new: SegmentInfo, row: Mapping[str, Any]) -> SegmentInfo:
    return replace(
        new,
        id=row["id"],
        s3_bucket=row["s3_bucket"],
        created_at=to_datetime(row["created_at"]),
        min_timestamp=to_datetime(row["min_timestamp"]),
        max_timestamp=to_datetime(row["max_timestamp"]),
    )


def _retire(transaction: Transaction, rows: Sequence[dict[str, Any]], sequence: int) -> None:
    """Keep the files of replaced segments for their readers."""
    require_followed(transaction, [row["s3_key"] for row in rows])
    now = transaction.clock.now_ms()
    transaction.insert_many(
        INSERT_RETIRED,
        [
            (
                row["s3_key"],
                row["topic_id"],
                row["partition_id"],
                row["base_offset"],
                row["end_offset"],
                row["size_bytes"],
                sequence,
                now,
            )
            for row in rows
        ],
    )


def landed_merge(reader: Reader, topic_id: int, number: int, new: SegmentInfo, commit_id: str) -> SegmentInfo | None:
    """What an earlier call for the same merge has landed; none if it has not."""
    if reader.one(STATE_OF_COMMIT, commit_id) != ("committed",):
        return None
    row = reader.one(PATH_OF_COMMIT, topic_id, number, new.base_offset, commit_id)
    return new if row is None else replace(new, id=row[0], created_at=to_datetime(row[1]))


# --- letting go ----------------------------------------------------------------


def release_retired(transaction: Transaction, now: int, grace: float, most: int) -> int:
    """Hand files of replaced segments that no lease pins any more to `temporary_files`; how many."""
    return _hand_over(transaction, transaction.all(TAKE_UNPINNED, most), MERGED, now, grace)


def release_all_retired(transaction: Transaction, most: int) -> int:
    """Hand files of replaced segments to `temporary_files`, whatever leases pin: no reader is there; how many."""
    return _hand_over(transaction, transaction.all(TAKE_ANY, most), MERGED, transaction.clock.now_ms(), 0)


def forget_retired(transaction: Transaction, topic_id: int, grace: float, most: int) -> int:
    """Hand the files of replaced segments of a hidden topic to `temporary_files`; how many."""
    files = transaction.all(TAKE_OF_TOPIC, topic_id, most)
    return _hand_over(transaction, files, "topic deleted", transaction.clock.now_ms(), grace)


def _hand_over(transaction: Transaction, files: Sequence[Any], reason: str, now: int, grace: float) -> int:
    # Those that a table has too go with its history.
    kept = kept_by_tables(transaction, [path for path, _ in files])
    going = [(path, size) for path, size in files if path not in kept]
    add_temporary_files(transaction, going, reason, now, grace)
    return len(files)
