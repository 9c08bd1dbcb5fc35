"""Partitions: their log start and high watermark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from lakebook.errors import PartitionNotFound
from lakebook.names import shown
from lakebook.registry import schema
from lakebook.registry.changes import row_of
from lakebook.registry.schema import MAX_INTEGER
from lakebook.registry.statements import POSTGRESQL, SQLITE, ZERO, Statement, among, bind, wanted
from lakebook.registry.transactions import Row, Transaction

_t = schema.topics.c
_p = schema.partitions.c
_PARTITION = (_t.name, _p.partition_id, _p.high_watermark, _p.log_start, _t.id)
_of_live_topic = (
    sa.select(*_PARTITION)
    .select_from(schema.partitions.join(schema.topics, _t.id == _p.topic_id))
    .where(_t.name == bind("name"), _t.deleted_at.is_(None))
)

GET_PARTITION = Statement(_of_live_topic.where(_p.partition_id == bind("number")), "name", "number")
# With a time that every change of the partition moves, a merge of its segments too.
WATCH_PARTITION = Statement(
    _of_live_topic.where(_p.partition_id == bind("number")).add_columns(_p.updated_at), "name", "number"
)
LIST_PARTITIONS = Statement(
    _of_live_topic.where(_p.partition_id > bind("after"))
    .order_by(_p.partition_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "name",
    "after",
    "most",
)


def asked_for(database: str, *more: type[sa.types.TypeEngine[Any]]) -> tuple[Any, list[sa.ColumnElement[Any]]]:
    """Live partitions joined with (topic, partition, …) rows that the caller asks about."""
    rows, columns = wanted("wanted", database, sa.Text, sa.Integer, *more)
    live = rows.join(schema.topics, sa.and_(_t.name == columns[0], _t.deleted_at.is_(None)))
    return live.join(schema.partitions, sa.and_(_p.topic_id == _t.id, _p.partition_id == columns[1])), columns[2:]


_get_partitions = {
    database: sa.select(*_PARTITION).select_from(asked_for(database)[0]) for database in (SQLITE, POSTGRESQL)
}
GET_PARTITIONS = Statement(_get_partitions[SQLITE], "wanted", postgresql=_get_partitions[POSTGRESQL])
PARTITION_ROW = Statement(
    sa.select(schema.partitions).where(_p.topic_id == bind("topic_id"), _p.partition_id == bind("number")),
    "topic_id",
    "number",
)
_rows_among = {
    database: sa.select(schema.partitions).where(
        _p.topic_id == bind("topic_id"), among(_p.partition_id, "numbers", database)
    )
    for database in (SQLITE, POSTGRESQL)
}
PARTITION_ROWS = Statement(_rows_among[SQLITE], "topic_id", "numbers", postgresql=_rows_among[POSTGRESQL])


@dataclass(frozen=True)
class Partition:
    """A partition. `high_watermark` is the next offset to be written, `log_start` the first one kept."""

    topic: str
    partition_id: int
    high_watermark: int
    log_start: int
    topic_id: int


def partition_from(row: Row) -> Partition:
    """A partition from the columns of `GET_PARTITION`."""
    return Partition(*row)


def check_partition_id(topic: str, number: object) -> int:
    """Return `number` if it can be a partition's number at all."""
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MAX_INTEGER:
        return number
    raise no_partition(topic, number)


def no_partition(topic: str, number: object) -> PartitionNotFound:
    """The error for a partition that is not there."""
    return PartitionNotFound(
        f"there is no partition {shown(number)}",
        on=f"topic {topic}",
        remedy=f"`lakebook topics show {topic}` shows which there are",
    )


def partition_row(transaction: Transaction, topic: str, topic_id: int, number: int) -> dict[str, Any]:
    """The row of a partition as it is now."""
    row = transaction.one(PARTITION_ROW, topic_id, number)
    if row is None:
        raise no_partition(topic, number)
    return row_of(schema.partitions, row)


def partition_rows(
    transaction: Transaction, topic: str, topic_id: int, numbers: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """The rows of several partitions as they are now, by their numbers."""
    found = transaction.all(PARTITION_ROWS, topic_id, transaction.listed(numbers))
    rows = {row["partition_id"]: row for row in (row_of(schema.partitions, values) for values in found)}
    for number in numbers:
        if number not in rows:
            raise no_partition(topic, number)
    return rows


def locked_partition(transaction: Transaction, topic: str, topic_id: int, number: int) -> dict[str, Any]:
    """The row of a partition, whose lake object this transaction then holds."""
    object_id = partition_row(transaction, topic, topic_id, number)["object_id"]
    transaction.lock(object_id)
    # Read after the lock: what was read before may have changed while waiting.
    return partition_row(transaction, topic, topic_id, number)
