"""Consumer groups and their committed offsets, which only move forward unless they are reset."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import (
    GenerationFenced,
    GroupNotFound,
    OffsetBelowLogStart,
    OffsetBeyondWatermark,
    OffsetRegression,
)
from lakebook.names import shown
from lakebook.registry import schema
from lakebook.registry.changes import delete_rows, insert_new, insert_row, row_of, update_row
from lakebook.registry.databases import Failure
from lakebook.registry.partitions import asked_for, partition_row
from lakebook.registry.segments import find_by_timestamp
from lakebook.registry.statements import POSTGRESQL, SQLITE, ZERO, Statement, bind, insert_into
from lakebook.registry.topics import share_topic
from lakebook.registry.transactions import Row, Transaction, TryAgain

_t = schema.topics.c
_p = schema.partitions.c
_g = schema.consumer_groups.c
_o = schema.consumer_offsets.c
_m = schema.group_members.c
_a = schema.group_assignments.c

GROUP_ROW = Statement(sa.select(schema.consumer_groups).where(_g.group_id == bind("group")), "group")
OFFSET_ROW = Statement(
    sa.select(schema.consumer_offsets).where(
        _o.consumer_group_id == bind("group_key"), _o.topic_id == bind("of_topic"), _o.partition_id == bind("number")
    ),
    "group_key",
    "of_topic",
    "number",
)
OFFSETS_OF_GROUP = Statement(
    sa.select(schema.consumer_offsets).where(_o.consumer_group_id == bind("group_key")), "group_key"
)
OFFSETS_OF_TOPIC = Statement(
    sa.select(_g.object_id, schema.consumer_offsets)
    .select_from(schema.consumer_offsets.join(schema.consumer_groups, _g.id == _o.consumer_group_id))
    .where(_o.topic_id == bind("of_topic"))
    .order_by(_g.object_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_topic",
    "most",
)
_committed = schema.consumer_offsets.join(schema.consumer_groups, _g.id == _o.consumer_group_id).join(
    schema.topics, sa.and_(_t.id == _o.topic_id, _t.deleted_at.is_(None))
)
GET_COMMITTED = Statement(
    sa.select(_o.committed_offset)
    .select_from(_committed)
    .where(_g.group_id == bind("group"), _t.name == bind("name"), _o.partition_id == bind("number")),
    "group",
    "name",
    "number",
)


def _get_many_committed(database: str) -> sa.Select[Any]:
    places, _ = asked_for(database)
    groups = places.outerjoin(schema.consumer_groups, _g.group_id == bind("group"))
    offsets = groups.outerjoin(
        schema.consumer_offsets,
        sa.and_(_o.consumer_group_id == _g.id, _o.topic_id == _p.topic_id, _o.partition_id == _p.partition_id),
    )
    return sa.select(_t.name, _p.partition_id, _o.committed_offset).select_from(offsets)


GET_MANY_COMMITTED = Statement(
    _get_many_committed(SQLITE), "wanted", "group", postgresql=_get_many_committed(POSTGRESQL)
)
_OFFSET = (_g.group_id, _t.name, _o.partition_id, _o.committed_offset, _o.metadata, _o.committed_at)
GET_OFFSETS = Statement(
    sa.select(*_OFFSET)
    .select_from(_committed)
    .where(
        _g.group_id == bind("group"),
        sa.or_(
            _t.name > bind("after_topic"),
            sa.and_(_t.name == bind("after_topic"), _o.partition_id > bind("after_number")),
        ),
    )
    .order_by(_t.name, _o.partition_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "group",
    "after_topic",
    "after_number",
    "most",
)
# Every partition of every topic the group has committed on, also those it never committed on.
_followed = sa.select(_o.topic_id).where(_o.consumer_group_id == _g.id).distinct().correlate(schema.consumer_groups)
LAG = Statement(
    sa.select(_t.name, _p.partition_id, _o.committed_offset, _p.log_start, _p.high_watermark)
    .select_from(
        schema.consumer_groups.join(schema.topics, sa.true())
        .join(schema.partitions, _p.topic_id == _t.id)
        .outerjoin(
            schema.consumer_offsets,
            sa.and_(_o.consumer_group_id == _g.id, _o.topic_id == _p.topic_id, _o.partition_id == _p.partition_id),
        )
    )
    .where(
        _g.group_id == bind("group"),
        _t.deleted_at.is_(None),
        sa.or_(_t.name == bind("name"), sa.and_(bind("name") == "", _t.id.in_(_followed))),
    )
    .order_by(_t.name, _p.partition_id),
    "group",
    "name",
)
_behind = sa.case((_o.committed_offset < _p.log_start, 1), else_=0)
_left = _p.high_watermark - sa.case((_o.committed_offset < _p.log_start, _p.log_start), else_=_o.committed_offset)
LIST_GROUPS = Statement(
    sa.select(
        _g.group_id,
        _g.generation,
        _g.created_at,
        sa.func.count(sa.distinct(_t.id)),
        sa.func.count(_t.id),
        sa.func.coalesce(sa.func.sum(sa.case((_t.id.is_not(None), _left), else_=0)), 0),
        sa.func.coalesce(sa.func.sum(sa.case((_t.id.is_not(None), _behind), else_=0)), 0),
        sa.func.max(_o.committed_at),
    )
    .select_from(
        schema.consumer_groups.outerjoin(schema.consumer_offsets, _o.consumer_group_id == _g.id)
        .outerjoin(schema.topics, sa.and_(_t.id == _o.topic_id, _t.deleted_at.is_(None)))
        .outerjoin(
            schema.partitions,
            sa.and_(_p.topic_id == _t.id, _p.partition_id == _o.partition_id),
        )
    )
    .where(_g.group_id > bind("after"))
    .group_by(_g.id, _g.group_id, _g.generation, _g.created_at)
    .order_by(_g.group_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
OWNED_BY = Statement(
    sa.select(_a.topic_id, _a.partition_id).where(
        _a.consumer_group_id == bind("group_key"), _a.member_id == bind("member")
    ),
    "group_key",
    "member",
)
# A group that has been shared out here keeps its assignments, without owners, when its last member leaves.
UNATTENDED = Statement(
    sa.select(_g.id).where(
        _g.id == bind("group_key"),
        ~sa.exists().where(_m.consumer_group_id == _g.id),
        sa.exists().where(_a.consumer_group_id == _g.id),
    ),
    "group_key",
)
DELETE_MEMBERS = Statement(
    sa.delete(schema.group_members).where(_m.consumer_group_id == bind("group_key")), "group_key"
)
DELETE_ASSIGNMENTS = Statement(
    sa.delete(schema.group_assignments).where(_a.consumer_group_id == bind("group_key")), "group_key"
)
# Members that have been silent for as long are none any more.
_forgotten = (
    _g.updated_at < bind("before"),
    ~sa.exists().where(_o.consumer_group_id == _g.id, _o.committed_at >= bind("before")),
    ~sa.exists().where(_m.consumer_group_id == _g.id, _m.expires_at >= bind("before")),
)
FORGOTTEN_GROUPS = Statement(
    sa.select(_g.object_id).where(*_forgotten).order_by(_g.object_id).limit(bind("most", sa.Integer)).offset(ZERO),
    "before",
    "most",
)
FORGOTTEN_GROUP = Statement(
    sa.select(schema.consumer_groups).where(_g.object_id == bind("of_object"), *_forgotten), "of_object", "before"
)
INSERT_RESET = insert_into(
    schema.offset_resets,
    "consumer_group_id",
    "topic_id",
    "partition_id",
    "group_sequence",
    "from_offset",
    "to_offset",
    "target",
    "reason",
    "reset_at",
)
# Who commits the same offset over and over, for nothing comes, reads on: after this part of the time for which
# a group is kept it is noted that it was heard of.
_HEARD_AGAIN = 0.1


class GroupState(enum.StrEnum):
    """How a consumer group stands."""

    EMPTY = "empty"  # it has committed nothing
    CURRENT = "current"  # it has read everything there is on what it committed
    LAGGING = "lagging"  # there are records it has not read
    BEHIND = "behind"  # records were removed before it read them


@dataclass(frozen=True)
class ConsumerOffset:
    """The next offset a group will read of a partition."""

    group_id: str
    topic: str
    partition_id: int
    committed_offset: int
    metadata: str | None
    committed_at: datetime


@dataclass(frozen=True)
class OffsetCommit:
    """A commit to be made, or one that was made. `behind`: it lies below the log start."""

    topic: str
    partition_id: int
    offset: int
    metadata: str | None = None
    behind: bool = False


@dataclass(frozen=True)
class OffsetReset:
    """A reset that was made and recorded."""

    group_id: str
    topic: str
    partition_id: int
    from_offset: int | None
    to_offset: int
    target: str
    reason: str | None


@dataclass(frozen=True)
class PartitionLag:
    """How far a group is from the end of a partition. Records that are gone do not count."""

    topic: str
    partition_id: int
    committed_offset: int | None
    log_start: int
    high_watermark: int
    lag: int
    behind: bool


@dataclass(frozen=True)
class ConsumerGroup:
    """A consumer group with its state."""

    group_id: str
    state: GroupState
    generation: int
    topics: int
    partitions: int
    lag: int
    created_at: datetime
    last_commit_at: datetime | None


def no_group(group: object) -> GroupNotFound:
    """The error for a group that is not there."""
    return GroupNotFound(
        f"there is no consumer group {shown(group)}", on="group", remedy="`lakebook groups list` shows which there are"
    )


def group_from(row: Row) -> ConsumerGroup:
    """A group from the columns of `LIST_GROUPS`."""
    group_id, generation, created, topics, partitions, lag, behind, committed = row
    if partitions == 0:
        state = GroupState.EMPTY
    elif behind:
        state = GroupState.BEHIND
    else:
        state = GroupState.LAGGING if lag else GroupState.CURRENT
    return ConsumerGroup(
        group_id,
        state,
        generation,
        topics,
        partitions,
        int(lag),
        to_datetime(created),
        to_datetime(committed) if committed is not None else None,
    )


def offset_from(row: Row) -> ConsumerOffset:
    """A committed offset from the columns of `GET_OFFSETS`."""
    group_id, topic, number, offset, metadata, committed = row
    return ConsumerOffset(group_id, topic, number, offset, metadata, to_datetime(committed))


def lag_from(row: Row) -> PartitionLag:
    """A partition's lag from the columns of `LAG`."""
    topic, number, committed, start, watermark = row
    behind = committed is not None and committed < start
    return PartitionLag(topic, number, committed, start, watermark, watermark - max(committed or 0, start), behind)


def locked_group(transaction: Transaction, group: str, *, create: bool) -> dict[str, Any]:
    """The row of a group, whose lake object this transaction then holds."""
    row = transaction.one(GROUP_ROW, group)
    if row is None:
        if not create:
            raise no_group(group)
        return _create_group(transaction, group)
    found = row_of(schema.consumer_groups, row)
    transaction.lock(found["object_id"])
    current = transaction.one(GROUP_ROW, group)
    if current is None or row_of(schema.consumer_groups, current)["id"] != found["id"]:
        raise TryAgain(Failure.BUSY)  # It was deleted while its lock was waited for.
    return row_of(schema.consumer_groups, current)


def _create_group(transaction: Transaction, group: str) -> dict[str, Any]:
    object_id = transaction.create_object("group")
    now = transaction.time_of(object_id)
    row = {"object_id": object_id, "group_id": group, "generation": 0, "created_at": now, "updated_at": now}
    return {"id": insert_new(transaction, object_id, schema.consumer_groups, row), **row}


def begin_generation(transaction: Transaction, group: str) -> int:
    """Begin a new generation; commits of older ones are refused from then on."""
    row = locked_group(transaction, group, create=True)
    generation = int(row["generation"]) + 1
    changes = {"generation": generation, "updated_at": transaction.time_of(row["object_id"])}
    update_row(transaction, row["object_id"], schema.consumer_groups, row, changes)
    return generation


def commit_offsets(
    transaction: Transaction,
    group: str,
    commits: Sequence[OffsetCommit],
    generation: int | None,
    member: str | None = None,
    *,
    kept: float,
) -> list[OffsetCommit]:
    """Commit offsets of one group, all or none; with `member`, only on partitions that it owns.

    `kept` is for how many seconds the group is kept after its last commit.
    """
    # Topics before the group: the order in which everything that takes both takes them.
    topics = {name: share_topic(transaction, name) for name in sorted({commit.topic for commit in commits})}
    row = locked_group(transaction, group, create=True)
    _check_generation(transaction, row, generation, member)
    if member is not None:
        owned = set(transaction.all(OWNED_BY, row["id"], member))
        for commit in commits:
            if (topics[commit.topic]["id"], commit.partition_id) not in owned:
                raise GenerationFenced(
                    f"the member {member} does not own {commit.topic}/{commit.partition_id}",
                    on=f"group {group}",
                    remedy="Sync with the group; another member reads this partition now",
                )
    heard = round(kept * 1000 * _HEARD_AGAIN)
    return [_commit(transaction, row, topics[commit.topic], commit, heard) for commit in commits]


def _check_generation(
    transaction: Transaction, group: dict[str, Any], generation: int | None, member: str | None
) -> None:
    """Refuse a commit of another generation; one of nobody in particular needs a group without members."""
    if (generation or 0) == group["generation"]:
        return
    if generation is None and member is None and transaction.one(UNATTENDED, group["id"]) is not None:
        return
    raise GenerationFenced(
        f"the group is at generation {group['generation']}, not {generation or 0}",
        on=f"group {group['group_id']}",
        remedy="Join the group again; another member reads these partitions now",
    )


def _commit(
    transaction: Transaction, group: dict[str, Any], topic: dict[str, Any], commit: OffsetCommit, heard: int
) -> OffsetCommit:
    partition = partition_row(transaction, commit.topic, topic["id"], commit.partition_id)
    on = f"group {group['group_id']} on {commit.topic}/{commit.partition_id}"
    _refuse_beyond(commit.offset, partition, on)
    found = transaction.one(OFFSET_ROW, group["id"], topic["id"], commit.partition_id)
    before = row_of(schema.consumer_offsets, found) if found else None
    if before is not None and commit.offset < before["committed_offset"]:
        raise OffsetRegression(
            f"the offset {commit.offset} lies below the committed {before['committed_offset']}",
            on=on,
            remedy="Use reset_offset (`lakebook groups reset`) to go back on purpose",
        )
    _store(transaction, group, partition, before, commit.offset, commit.metadata, heard)
    return OffsetCommit(
        commit.topic, commit.partition_id, commit.offset, commit.metadata, commit.offset < partition["log_start"]
    )


def _refuse_beyond(offset: int, partition: dict[str, Any], on: str) -> None:
    watermark = partition["high_watermark"]
    if offset > watermark:
        raise OffsetBeyondWatermark(
            f"the offset {offset} lies above the high watermark {watermark}",
            on=on,
            remedy="Commit the offset that is to be read next, at most the high watermark",
        )


def _store(
    transaction: Transaction,
    group: dict[str, Any],
    partition: dict[str, Any],
    before: dict[str, Any] | None,
    offset: int,
    metadata: str | None,
    heard: int | None = None,
) -> None:
    """Write an offset unless it is there already; then its time is noted after so many milliseconds again."""
    object_id = group["object_id"]
    values = {
        "committed_offset": offset,
        "metadata": metadata,
        "committed_at": transaction.time_of(object_id),
    }
    if before is None:
        key = {
            "consumer_group_id": group["id"],
            "topic_id": partition["topic_id"],
            "partition_id": partition["partition_id"],
        }
        insert_row(transaction, object_id, schema.consumer_offsets, {**key, **values})
    elif (before["committed_offset"], before["metadata"]) != (offset, metadata) or (
        heard is not None and values["committed_at"] - before["committed_at"] >= heard
    ):
        update_row(transaction, object_id, schema.consumer_offsets, before, values)


def reset_offset(
    transaction: Transaction,
    group: str,
    topic: dict[str, Any],
    number: int,
    to: int | str | datetime,
    reason: str | None,
) -> OffsetReset:
    """Move a committed offset wherever it was asked for, and record that."""
    row = locked_group(transaction, group, create=False)
    partition = partition_row(transaction, topic["name"], topic["id"], number)
    on = f"group {group} on {topic['name']}/{number}"
    offset = _place_of(transaction, partition, topic["name"], to)
    target = to.isoformat() if isinstance(to, datetime) else str(to)
    if isinstance(to, int):
        _refuse_beyond(offset, partition, on)
        if offset < partition["log_start"]:
            raise OffsetBelowLogStart(
                f"the records before {partition['log_start']} are gone", on=on, remedy="Reset to 'earliest'"
            )
    found = transaction.one(OFFSET_ROW, row["id"], topic["id"], number)
    before = row_of(schema.consumer_offsets, found) if found else None
    metadata = before["metadata"] if before else None
    sequence = transaction.next_sequence(row["object_id"])
    _store(transaction, row, partition, before, offset, metadata)
    previous = before["committed_offset"] if before else None
    now = transaction.time_of(row["object_id"])
    transaction.run(INSERT_RESET, row["id"], topic["id"], number, sequence, previous, offset, target, reason, now)
    return OffsetReset(group, topic["name"], number, previous, offset, target, reason)


def _place_of(transaction: Transaction, partition: dict[str, Any], topic: str, to: int | str | datetime) -> int:
    """The offset that a reset asks for."""
    if isinstance(to, int):
        return to
    if isinstance(to, datetime):
        found = find_by_timestamp(transaction, topic, partition["partition_id"], to)
        if found is not None:
            return found.base_offset
    # The watermark that was read before the time was looked for: what came in between is newer.
    return int(partition["log_start"] if to == "earliest" else partition["high_watermark"])


def delete_group(transaction: Transaction, group: str) -> None:
    """Delete a group with its offsets and members; a new one of that name inherits nothing."""
    _delete(transaction, locked_group(transaction, group, create=False))


def expire_groups(transaction: Transaction, kept: float, most: int) -> int:
    """Delete at most so many groups that have had no members, commits or changes for `kept` seconds."""
    before = transaction.clock.now_ms() - round(kept * 1000)
    found = [row[0] for row in transaction.all(FORGOTTEN_GROUPS, before, most)]
    transaction.lock(*found)
    deleted = 0
    for object_id in found:
        # Asked again under its lock: a member may have joined, or a commit may have landed.
        row = transaction.one(FORGOTTEN_GROUP, object_id, before)
        if row is not None:
            _delete(transaction, row_of(schema.consumer_groups, row))
            deleted += 1
    return deleted


def _delete(transaction: Transaction, row: dict[str, Any]) -> None:
    object_id = row["object_id"]
    transaction.run(DELETE_MEMBERS, row["id"])
    transaction.run(DELETE_ASSIGNMENTS, row["id"])
    offsets = [row_of(schema.consumer_offsets, offset) for offset in transaction.all(OFFSETS_OF_GROUP, row["id"])]
    if offsets:
        delete_rows(transaction, object_id, schema.consumer_offsets, offsets)
    delete_rows(transaction, object_id, schema.consumer_groups, [row])


def forget_offsets(transaction: Transaction, topic_id: int, most: int) -> int:
    """Delete offsets of a hidden topic, in the order of the groups they belong to."""
    found = transaction.all(OFFSETS_OF_TOPIC, topic_id, most)
    transaction.lock(*{row[0] for row in found})
    # Only rows that are still there: a group may have been deleted while its lock was waited for.
    current = transaction.all(OFFSETS_OF_TOPIC, topic_id, most)
    locked = {row[0] for row in found}
    for row in current:
        if row[0] in locked:
            delete_rows(transaction, row[0], schema.consumer_offsets, [row_of(schema.consumer_offsets, row[1:])])
    return len(found)
