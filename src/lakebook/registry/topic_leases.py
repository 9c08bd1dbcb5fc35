"""Leases on topics: readers at work, each of which pins partitions from an offset on.

A lease is taken under the partition's lock and refused below the log start. Segments are
removed under the same lock, and only below what every lease pins. So either the removal sees
the lease, or the lease is refused. That a lease has a row is what counts, not its time: one
that has run out pins until its row is gone. All rows of a lease run out at the same time and
go together, so that none is lost by halves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from lakebook.clock import to_datetime, to_ms
from lakebook.errors import OffsetBelowLogStart, OffsetBeyondWatermark
from lakebook.registry import schema
from lakebook.registry.commits import owner
from lakebook.registry.partitions import partition_rows
from lakebook.registry.statements import POSTGRESQL, SQLITE, ZERO, Statement, among, bind, insert_into
from lakebook.registry.topics import share_topic
from lakebook.registry.transactions import Reader, Row, Transaction

_l = schema.topic_leases.c
#: A partition by its topic's id and its number.
Place = tuple[int, int]

INSERT_LEASE = insert_into(schema.topic_leases)
# Renewed and read in one: from then on whoever ends dead leases finds this one renewed.
ENTER_LEASE = Statement(
    sa.update(schema.topic_leases)
    .where(_l.id == bind("lease_id"))
    .values(expires_at=bind("until"))
    .returning(_l.topic_id, _l.partition_id, _l.from_offset, _l.sequence),
    "until",
    "lease_id",
)
ROWS_OF_LEASE = Statement(
    sa.select(_l.topic_id, _l.partition_id, _l.from_offset, _l.sequence).where(_l.id == bind("lease_id")), "lease_id"
)
# The one that is inherited from stays as it is until the heir's is there: what it pins is pinned throughout.
SHARE_LEASE = Statement(
    sa.select(_l.topic_id, _l.partition_id, _l.from_offset, _l.sequence)
    .where(_l.id == bind("lease_id"))
    .order_by(_l.topic_id, _l.partition_id)
    .with_for_update(read=True),
    "lease_id",
)
_this_row = (_l.id == bind("lease_id"), _l.topic_id == bind("of_topic"), _l.partition_id == bind("number"))
MOVE_BACK = Statement(
    sa.update(schema.topic_leases).where(*_this_row).values(from_offset=bind("new_offset")),
    "new_offset",
    "lease_id",
    "of_topic",
    "number",
)
ADVANCE = Statement(
    sa.update(schema.topic_leases)
    .where(*_this_row, _l.from_offset < bind("new_offset"))
    .values(from_offset=bind("new_offset")),
    "new_offset",
    "lease_id",
    "of_topic",
    "number",
)
DROP_ROW = Statement(sa.delete(schema.topic_leases).where(*_this_row), "lease_id", "of_topic", "number")


def _with_ids(make: Any) -> dict[str, Any]:
    return {database: make(among(_l.id, "lease_ids", database)) for database in (SQLITE, POSTGRESQL)}


_in_order = (_l.id, _l.topic_id, _l.partition_id)
_lock = _with_ids(lambda these: sa.select(_l.id).where(these).order_by(*_in_order).with_for_update())
LOCK_LEASES = Statement(_lock[SQLITE], "lease_ids", postgresql=_lock[POSTGRESQL])
LOCK_LEASES_OF_TOPIC = Statement(
    sa.select(_l.id).where(_l.topic_id == bind("of_topic")).order_by(*_in_order).with_for_update(), "of_topic"
)
_renew = _with_ids(
    lambda these: sa.update(schema.topic_leases).where(these).values(expires_at=bind("until")).returning(_l.id)
)
RENEW_LEASES = Statement(_renew[SQLITE], "until", "lease_ids", postgresql=_renew[POSTGRESQL])
_end = _with_ids(lambda these: sa.delete(schema.topic_leases).where(these))
END_LEASES = Statement(_end[SQLITE], "lease_ids", postgresql=_end[POSTGRESQL])
END_DEAD_LEASE = Statement(
    sa.delete(schema.topic_leases).where(_l.id == bind("lease_id"), _l.expires_at == bind("seen")), "lease_id", "seen"
)
LEASES_OF_TOPIC = Statement(sa.delete(schema.topic_leases).where(_l.topic_id == bind("of_topic")), "of_topic")
LIST_LEASES = Statement(
    sa.select(schema.topic_leases)
    .where(
        sa.tuple_(_l.id, _l.topic_id, _l.partition_id)
        > sa.tuple_(bind("after_id", sa.Text), bind("after_topic", sa.BigInteger), bind("after_number", sa.Integer))
    )
    .order_by(_l.id, _l.topic_id, _l.partition_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after_id",
    "after_topic",
    "after_number",
    "most",
)
PINNED_FROM = Statement(
    sa.select(sa.func.min(_l.from_offset)).where(_l.topic_id == bind("of_topic"), _l.partition_id == bind("number")),
    "of_topic",
    "number",
)


@dataclass(frozen=True)
class TopicLease:
    """A reader's claim on a partition: its records from an offset on stay readable.

    Files that were retired up to `sequence` of the partition's events its reader cannot have found.
    """

    id: str
    topic_id: int
    partition_id: int
    from_offset: int
    sequence: int
    holder: str
    created_at: datetime
    expires_at: datetime


def take_topic_lease(
    transaction: Transaction,
    topic: str,
    offsets: Mapping[int, int],
    lease_id: str,
    seconds: float,
    *,
    inherit: str | None = None,
) -> int:
    """Pin partitions of a topic, each from an offset on, and renew the lease; the topic's id.

    Below the log start an offset is refused, unless this lease or the one to `inherit` from
    pins it already. What the lease pins is never loosened: the smaller offset stays.
    """
    row = share_topic(transaction, topic)
    numbers = sorted(offsets)
    known = partition_rows(transaction, topic, row["id"], numbers)
    transaction.lock(*(partition["object_id"] for partition in known.values()))
    # Read again: they may have changed while their locks were waited for.
    partitions = partition_rows(transaction, topic, row["id"], numbers)
    now = transaction.clock.now_ms()
    until = now + round(seconds * 1000)
    _lock_rows(transaction, [lease_id])
    mine = _by_place(transaction.all(ENTER_LEASE, until, lease_id))
    theirs = {} if inherit is None else _by_place(transaction.all(SHARE_LEASE, inherit))
    new: list[Row] = []
    for number in numbers:
        partition = partitions[number]
        place, offset = (row["id"], number), offsets[number]
        pins = [pin for pin in (mine.get(place), theirs.get(place)) if pin is not None]
        _refuse(partition, offset, pins, f"{topic}/{number}")
        if place not in mine:
            # What the former lease's reader has found, this one's may still read.
            sequence = min([transaction.next_sequence(partition["object_id"]) - 1, *(pin[1] for pin in pins)])
            new.append((lease_id, *place, offset, sequence, owner(), now, until))
        elif offset < mine[place][0]:
            transaction.run(MOVE_BACK, offset, lease_id, *place)
    transaction.insert_many(INSERT_LEASE, new)
    return int(row["id"])


def _lock_rows(transaction: Transaction, lease_ids: Iterable[str]) -> None:
    """Lock all rows of leases in one order, so that nobody waits in a circle: a statement keeps to none."""
    transaction.all(LOCK_LEASES, transaction.listed(lease_ids))


def _by_place(rows: Iterable[Row]) -> dict[Place, tuple[int, int]]:
    """What a lease pins: from which offset on, and since which sequence."""
    return {(topic_id, number): (offset, sequence) for topic_id, number, offset, sequence in rows}


def _refuse(partition: dict[str, Any], offset: int, pins: Iterable[tuple[int, int]], on: str) -> None:
    start, watermark = partition["log_start"], partition["high_watermark"]
    if offset > watermark:
        raise OffsetBeyondWatermark(
            f"the offset {offset} lies above the high watermark {watermark}",
            on=on,
            remedy="Read from the high watermark at most, which is the next record to come",
        )
    if offset < start and not any(pinned <= offset for pinned, _ in pins):
        raise OffsetBelowLogStart(
            f"the records before {start} are gone", on=on, remedy=f"Read from {start} on, or by the reset policy"
        )


def renew_topic_leases(transaction: Transaction, lease_ids: Sequence[str], seconds: float) -> set[str]:
    """Renew leases; the ids of those that are still held. One that pins nothing is not."""
    _lock_rows(transaction, lease_ids)
    until = transaction.clock.now_ms() + round(seconds * 1000)
    return {row[0] for row in transaction.all(RENEW_LEASES, until, transaction.listed(lease_ids))}


def advance_topic_lease(transaction: Transaction, lease_id: str, offsets: Mapping[Place, int]) -> set[Place]:
    """Let go of what lies before the given offsets; the places that the lease does not pin any more."""
    _lock_rows(transaction, [lease_id])
    rows = [(offset, lease_id, topic_id, number) for (topic_id, number), offset in sorted(offsets.items())]
    transaction.run_many(ADVANCE, rows)
    return offsets.keys() - pinned_places(transaction, lease_id).keys()


def drop_from_topic_lease(transaction: Transaction, lease_id: str, places: Iterable[Place]) -> None:
    """Let go of some of the partitions that a lease pins."""
    transaction.run_many(DROP_ROW, [(lease_id, *place) for place in sorted(places)])


def end_topic_leases(transaction: Transaction, lease_ids: Sequence[str]) -> None:
    """Let go of leases."""
    _lock_rows(transaction, lease_ids)
    transaction.run(END_LEASES, transaction.listed(lease_ids))


def end_dead_topic_leases(transaction: Transaction, dead: Iterable[TopicLease]) -> None:
    """Remove leases that are as they were seen; one that was renewed since is not dead."""
    ended = sorted({(lease.id, to_ms(lease.expires_at)) for lease in dead})
    _lock_rows(transaction, {lease_id for lease_id, _ in ended})
    for lease_id, seen in ended:
        transaction.run(END_DEAD_LEASE, lease_id, seen)


def forget_topic_leases(transaction: Transaction, topic_id: int) -> None:
    """Delete what pins a hidden topic: it pins nothing any more, for the topic's records are gone on purpose."""
    transaction.all(LOCK_LEASES_OF_TOPIC, topic_id)
    transaction.run(LEASES_OF_TOPIC, topic_id)


def list_topic_leases(reader: Reader, after: tuple[str, int, int], most: int) -> list[TopicLease]:
    """What leases pin, in the order of their ids, topics and partitions."""
    return [TopicLease(*row[:-2], *map(to_datetime, row[-2:])) for row in reader.all(LIST_LEASES, *after, most)]


def pinned_places(reader: Reader, lease_id: str) -> dict[Place, int]:
    """From which offset on a lease pins which partitions."""
    return {place: pin[0] for place, pin in _by_place(reader.all(ROWS_OF_LEASE, lease_id)).items()}


def pinned_from(reader: Reader, topic_id: int, partition: int) -> int | None:
    """The smallest offset that a lease pins of a partition; none if no lease does."""
    row = reader.one(PINNED_FROM, topic_id, partition)
    return None if row is None or row[0] is None else int(row[0])
