"""Topics: creating, finding, changing, growing and deleting them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import InvalidPartitionCount, TopicAlreadyExists, TopicNotFound
from lakebook.names import check_name, shown
from lakebook.registry import schema
from lakebook.registry.changes import delete_rows, insert_new, insert_rows, row_of, update_row
from lakebook.registry.freshness import TOPIC, freeze_all
from lakebook.registry.losses import forget_losses
from lakebook.registry.statements import POSTGRESQL, SQLITE, ZERO, Statement, among, bind
from lakebook.registry.topic_config import check_config, check_retention
from lakebook.registry.transactions import Reader, Row, Transaction

_t = schema.topics.c
_p = schema.partitions.c
_TOPIC = (_t.id, _t.name, _t.partition_count, _t.retention_ms, _t.config, _t.created_at, _t.updated_at)
_live = _t.deleted_at.is_(None)

GET_TOPIC = Statement(sa.select(*_TOPIC).where(_t.name == bind("name"), _live), "name")
GET_TOPICS = Statement(
    sa.select(*_TOPIC).where(among(_t.name, "names", SQLITE), _live),
    "names",
    postgresql=sa.select(*_TOPIC).where(among(_t.name, "names", POSTGRESQL), _live),
)
LIST_TOPICS = Statement(
    sa.select(*_TOPIC)
    .where(_live, _t.name > bind("after"), _t.name >= bind("prefix"), _t.name < bind("prefix_end"))
    .order_by(_t.name)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "prefix",
    "prefix_end",
    "most",
)
# KEY SHARE: appends and commits on a topic do not wait for each other nor for a change of its
# configuration, but its deletion (FOR UPDATE) waits for them, and they find it gone afterwards.
SHARE_TOPIC = Statement(
    sa.select(schema.topics).where(_t.name == bind("name"), _live).with_for_update(read=True, key_share=True), "name"
)
SHARE_TOPIC_BY_ID = Statement(
    sa.select(schema.topics).where(_t.id == bind("topic_id"), _live).with_for_update(read=True, key_share=True),
    "topic_id",
)
CLAIM_TOPIC = Statement(sa.select(schema.topics).where(_t.name == bind("name"), _live).with_for_update(), "name")
ANY_TOPIC = Statement(sa.select(schema.topics).where(_t.id == bind("topic_id")), "topic_id")
DELETED_TOPICS = Statement(
    sa.select(_t.id, _t.name)
    .where(_t.deleted_at.is_not(None))
    .order_by(_t.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "most",
)
PARTITIONS_OF_TOPIC = Statement(
    sa.select(schema.partitions)
    .where(_p.topic_id == bind("topic_id"))
    .order_by(_p.partition_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "topic_id",
    "most",
)
# The end of all names with a prefix: no name contains a character this large.
_AFTER_ALL = "\x7f"


@dataclass(frozen=True)
class TopicConfig:
    """What a new topic shall be."""

    name: str
    partition_count: int = 1
    retention_ms: int | None = None
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Topic:
    """A topic. `retention_ms` of none keeps segments for ever."""

    id: int
    name: str
    partition_count: int
    retention_ms: int | None
    config: Mapping[str, str]
    created_at: datetime
    updated_at: datetime


def topic_from(row: Row) -> Topic:
    """A topic from the columns of `GET_TOPIC`."""
    topic_id, name, count, retention, config, created, updated = row
    config = orjson.loads(config) if isinstance(config, str) else dict(config)
    return Topic(topic_id, name, count, retention, config, to_datetime(created), to_datetime(updated))


def check_partition_count(name: str, count: object, most: int) -> int:
    """Return `count` if a topic may have that many partitions."""
    if isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= most:
        return count
    raise InvalidPartitionCount(
        f"{shown(count)} is not a number of partitions",
        on=f"topic {name}",
        remedy=f"Use 1 to {most} (the setting max_partitions)",
    )


def check_topic(wanted: TopicConfig, most_partitions: int) -> None:
    """Refuse a description of a topic that cannot be."""
    check_name("topic", wanted.name)
    check_partition_count(wanted.name, wanted.partition_count, most_partitions)
    check_retention(wanted.name, wanted.retention_ms)
    check_config(wanted.name, wanted.config)


def not_found(name: object) -> TopicNotFound:
    """The error for a topic that is not there."""
    return TopicNotFound(
        f"there is no topic {shown(name)}", on="topic", remedy="`lakebook topics list` shows which there are"
    )


def share_topic(transaction: Transaction, name: str) -> dict[str, Any]:
    """The row of a live topic, which cannot be deleted before this transaction ends."""
    row = transaction.one(SHARE_TOPIC, name)
    if row is None:
        # The one that was waited for may have been deleted, and its name taken again meanwhile.
        row = transaction.one(SHARE_TOPIC, name)
    if row is None:
        raise not_found(name)
    return row_of(schema.topics, row)


def create_topic(transaction: Transaction, wanted: TopicConfig) -> Topic:
    """Create a topic and its partitions."""
    if transaction.one(GET_TOPIC, wanted.name) is not None:
        raise TopicAlreadyExists(
            f"a topic {wanted.name!r} exists already", on=f"topic {wanted.name}", remedy="Choose another name"
        )
    object_id = transaction.create_object("topic")
    now = transaction.time_of(object_id)
    row = {
        "object_id": object_id,
        "name": wanted.name,
        "partition_count": wanted.partition_count,
        "retention_ms": wanted.retention_ms,
        "config": dict(wanted.config),
        "created_at": now,
        "updated_at": now,
        "deleted_at": None,
    }
    topic_id = insert_new(transaction, object_id, schema.topics, row)
    _create_partitions(transaction, topic_id, range(wanted.partition_count))
    return _topic_of({"id": topic_id, **row})


def _create_partitions(transaction: Transaction, topic_id: int, numbers: Sequence[int]) -> None:
    for number in numbers:
        object_id = transaction.create_object("partition")
        now = transaction.time_of(object_id)
        row = {
            "topic_id": topic_id,
            "partition_id": number,
            "object_id": object_id,
            "log_start": 0,
            "high_watermark": 0,
            "created_at": now,
            "updated_at": now,
        }
        insert_rows(transaction, object_id, schema.partitions, [row])


def update_topic(
    transaction: Transaction, name: str, config: Mapping[str, str | None], retention: tuple[int | None] | None
) -> Topic:
    """Merge into a topic's configuration; a value of none removes its key."""
    row = _locked_topic(transaction, name)
    merged = {**row["config"], **config}
    changes: dict[str, Any] = {"config": {key: value for key, value in merged.items() if value is not None}}
    if retention is not None:
        changes["retention_ms"] = retention[0]
    return _changed(transaction, row, changes)


def grow_topic(transaction: Transaction, name: str, partition_count: int) -> Topic:
    """Give a topic more partitions; each begins at offset 0 for every group."""
    row = _locked_topic(transaction, name)
    present = row["partition_count"]
    if partition_count < present:
        raise InvalidPartitionCount(
            f"it has {present} partitions and cannot shrink to {partition_count}",
            on=f"topic {name}",
            remedy="Create a new topic with fewer partitions",
        )
    _create_partitions(transaction, row["id"], range(present, partition_count))
    return _changed(transaction, row, {"partition_count": partition_count})


def _locked_topic(transaction: Transaction, name: str) -> dict[str, Any]:
    row = share_topic(transaction, name)
    transaction.lock(row["object_id"])
    # Read again: it may have changed while the lock was waited for.
    current = transaction.one(ANY_TOPIC, row["id"])
    assert current is not None
    return row_of(schema.topics, current)


def _changed(transaction: Transaction, row: dict[str, Any], changes: dict[str, Any]) -> Topic:
    if all(row[name] == value for name, value in changes.items()):
        return _topic_of(row)
    changes["updated_at"] = transaction.time_of(row["object_id"])
    update_row(transaction, row["object_id"], schema.topics, row, changes)
    return _topic_of({**row, **changes})


def _topic_of(row: Mapping[str, Any]) -> Topic:
    return topic_from(tuple(row[column.name] for column in _TOPIC))


def hide_topic(transaction: Transaction, name: str) -> int:
    """Make a topic invisible at once. It waits for appends and commits under way on it."""
    row = transaction.one(CLAIM_TOPIC, name) or transaction.one(CLAIM_TOPIC, name)
    if row is None:
        raise not_found(name)
    topic = row_of(schema.topics, row)
    transaction.lock(topic["object_id"])
    current = transaction.one(ANY_TOPIC, topic["id"])
    assert current is not None
    topic = row_of(schema.topics, current)
    now = transaction.time_of(topic["object_id"])
    update_row(transaction, topic["object_id"], schema.topics, topic, {"updated_at": now, "deleted_at": now})
    freeze_all(transaction, TOPIC, topic["id"])
    return int(topic["id"])


def forget_partitions(transaction: Transaction, topic_id: int, most: int) -> int:
    """Delete partitions of a hidden topic that nothing refers to any more."""
    found = [row_of(schema.partitions, row) for row in transaction.all(PARTITIONS_OF_TOPIC, topic_id, most)]
    locked = {row["object_id"] for row in found}
    transaction.lock(*locked)
    # Only rows that are still there: another process may do the same work, and be further on.
    for row in (row_of(schema.partitions, row) for row in transaction.all(PARTITIONS_OF_TOPIC, topic_id, most)):
        if row["object_id"] in locked:
            delete_rows(transaction, row["object_id"], schema.partitions, [row])
    return len(found)


def forget_topic(transaction: Transaction, topic_id: int) -> None:
    """Delete the row of a hidden topic that has been emptied."""
    row = transaction.one(ANY_TOPIC, topic_id)
    if row is None:
        return
    topic = row_of(schema.topics, row)
    transaction.lock(topic["object_id"])
    if transaction.one(ANY_TOPIC, topic_id) is not None:
        delete_rows(transaction, topic["object_id"], schema.topics, [topic])
        forget_losses(transaction, TOPIC, topic_id)


def list_topics(reader: Reader, after: str, prefix: str, most: int) -> list[Topic]:
    """Live topics in the order of their names."""
    return [topic_from(row) for row in reader.all(LIST_TOPICS, after, prefix, prefix + _AFTER_ALL, most)]
