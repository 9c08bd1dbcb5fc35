"""Pipelines: what they are, how far they have come, and the transaction in which a batch lands.

A batch is planned first: the ranges of its sources are written down, so that whoever runs it, and however
often, reads the same records. It lands in the transaction that makes its files visible: every offset moves
from the start of its range to its end, and only if it stands at the start. So of two that run a batch one
lands it, and one that was frozen meanwhile lands nothing.

What a pipeline has still to read is pinned by leases of its own, which nobody has to renew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import PipelineAlreadyExists, PipelineNotFound
from lakebook.names import shown
from lakebook.registry import schema
from lakebook.registry.changes import row_of
from lakebook.registry.commits import owner
from lakebook.registry.leases import INSERT_LEASE, SHARE_HORIZON, end_leases, resolve_version
from lakebook.registry.statements import ZERO, Statement, bind, insert_into
from lakebook.registry.tables import TableRecord
from lakebook.registry.topic_leases import (
    ROWS_OF_LEASE,
    advance_topic_lease,
    drop_from_topic_lease,
    end_topic_leases,
    take_topic_lease,
)
from lakebook.registry.transactions import NoEffect, Reader, Row, Transaction

ACTIVE, PAUSED, STOPPED = "active", "paused", "stopped"
TOPIC, TABLE = "topic", "table"
PLANNED, LANDED = "planned", "landed"
#: The partition of a source that has none.
WHOLE = 0
#: What the ids of pipelines' leases begin with.
LEASES = "pipeline-"
# Nobody renews the leases of pipelines: they end with it.
_FOR_EVER_SECONDS = 100 * 365 * 86_400.0

_p = schema.pipelines.c
_o = schema.pipeline_offsets.c
_b = schema.pipeline_batches.c
_l = schema.leases.c
_v = schema.table_versions.c
_f = schema.table_files.c

_NEW = tuple(str(column.name) for column in schema.pipelines.columns if column.name != "id")
INSERT_PIPELINE = Statement(
    sa.insert(schema.pipelines).values({name: bind(name) for name in _NEW}).returning(_p.id), *_NEW
)
GET_PIPELINE = Statement(sa.select(schema.pipelines).where(_p.name == bind("name")), "name")
PIPELINE_ROW = Statement(sa.select(schema.pipelines).where(_p.id == bind("of_pipeline")), "of_pipeline")
LOCK_PIPELINE = Statement(sa.select(_p.id).where(_p.id == bind("of_pipeline")).with_for_update(), "of_pipeline")
PIPELINES_INTO = Statement(
    sa.select(schema.pipelines).where(_p.target_id == bind("of_table")).order_by(_p.name), "of_table"
)
LIST_PIPELINES = Statement(
    sa.select(schema.pipelines)
    .where(_p.name > bind("after"))
    .order_by(_p.name)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
DELETE_PIPELINE = Statement(sa.delete(schema.pipelines).where(_p.id == bind("of_pipeline")), "of_pipeline")
DELETE_OFFSETS = Statement(
    sa.delete(schema.pipeline_offsets).where(_o.pipeline_id == bind("of_pipeline")), "of_pipeline"
)
DELETE_BATCHES = Statement(
    sa.delete(schema.pipeline_batches).where(_b.pipeline_id == bind("of_pipeline")), "of_pipeline"
)
SET_STATE = Statement(
    sa.update(schema.pipelines)
    .where(_p.id == bind("of_pipeline"))
    .values(
        state=bind("new_state"),
        failures=0,
        last_error=bind("error", sa.Text),
        failed_at=bind("at", sa.BigInteger),
        retry_at=sa.null(),
        updated_at=bind("now"),
    ),
    "new_state",
    "error",
    "at",
    "now",
    "of_pipeline",
)
CLAIM = Statement(
    sa.update(schema.pipelines)
    .where(
        _p.id == bind("of_pipeline"),
        sa.or_(_p.holder.is_(None), _p.held_until <= bind("now"), _p.holder == bind("new_holder")),
    )
    .values(token=_p.token + 1, holder=bind("new_holder"), held_until=bind("until"))
    .returning(_p.token),
    "now",
    "new_holder",
    "until",
    "of_pipeline",
)
RENEW_CLAIM = Statement(
    sa.update(schema.pipelines)
    # A renewal that comes after the turn was given back would hold what nobody has.
    .where(_p.id == bind("of_pipeline"), _p.token == bind("own_token"), _p.holder.is_not(None))
    .values(held_until=bind("until")),
    "until",
    "of_pipeline",
    "own_token",
)
RELEASE_CLAIM = Statement(
    sa.update(schema.pipelines)
    .where(_p.id == bind("of_pipeline"), _p.token == bind("own_token"))
    .values(holder=sa.null(), held_until=sa.null()),
    "of_pipeline",
    "own_token",
)
NOTE_FAILURE = Statement(
    sa.update(schema.pipelines)
    .where(_p.id == bind("of_pipeline"))
    .values(
        failures=_p.failures + 1,
        last_error=bind("error"),
        failed_at=bind("now"),
        retry_at=bind("retry"),
        updated_at=bind("now"),
    ),
    "error",
    "now",
    "retry",
    "of_pipeline",
)
HOLD_CLAIM = Statement(
    sa.update(schema.pipelines)
    .where(_p.id == bind("of_pipeline"), _p.token == bind("own_token"))
    .values(updated_at=bind("now")),
    "now",
    "of_pipeline",
    "own_token",
)
ALTER_PIPELINE = Statement(
    sa.update(schema.pipelines)
    .where(_p.id == bind("of_pipeline"))
    .values(definition=bind("new_definition"), dead_letters_id=bind("dead_letters", sa.BigInteger)),
    "new_definition",
    "dead_letters",
    "of_pipeline",
)
INSERT_OFFSETS = insert_into(schema.pipeline_offsets)
OFFSETS_OF = Statement(
    sa.select(schema.pipeline_offsets)
    .where(_o.pipeline_id == bind("of_pipeline"))
    .order_by(_o.kind, _o.source_id, _o.partition_id),
    "of_pipeline",
)
_this_offset = (
    _o.pipeline_id == bind("of_pipeline"),
    _o.kind == bind("of_kind"),
    _o.source_id == bind("of_source"),
    _o.partition_id == bind("number"),
)
#: The heart of exactly once: from where the batch begins, and from nowhere else.
ADVANCE_OFFSET = Statement(
    sa.update(schema.pipeline_offsets)
    .where(*_this_offset, _o.next_offset == bind("range_start"))
    .values(next_offset=bind("range_end")),
    "range_end",
    "of_pipeline",
    "of_kind",
    "of_source",
    "number",
    "range_start",
)
EXTEND_BACK = Statement(
    sa.update(schema.pipeline_offsets)
    .where(*_this_offset, _o.first_offset == bind("range_end"))
    .values(first_offset=bind("range_start")),
    "range_start",
    "of_pipeline",
    "of_kind",
    "of_source",
    "number",
    "range_end",
)
SKIP_TO = Statement(
    sa.update(schema.pipeline_offsets)
    .where(*_this_offset, _o.next_offset < bind("new_next"))
    .values(next_offset=bind("new_next")),
    "of_pipeline",
    "of_kind",
    "of_source",
    "number",
    "new_next",
)
DROP_PLANNED = Statement(
    sa.delete(schema.pipeline_batches).where(
        _b.pipeline_id == bind("of_pipeline"), _b.state == sa.literal_column(f"'{PLANNED}'")
    ),
    "of_pipeline",
)
INSERT_BATCH = insert_into(schema.pipeline_batches)
PLANNED_BATCH = Statement(
    sa.select(schema.pipeline_batches)
    .where(_b.pipeline_id == bind("of_pipeline"), _b.state == sa.literal_column(f"'{PLANNED}'"))
    .order_by(_b.number),
    "of_pipeline",
)
LIST_BATCHES = Statement(
    sa.select(schema.pipeline_batches)
    .where(_b.pipeline_id == bind("of_pipeline"), _b.number < bind("below"))
    .order_by(_b.number.desc())
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_pipeline",
    "below",
    "most",
)
LAND_BATCH = Statement(
    sa.update(schema.pipeline_batches)
    .where(
        _b.pipeline_id == bind("of_pipeline"),
        _b.number == bind("of_number"),
        _b.state == sa.literal_column(f"'{PLANNED}'"),
    )
    .values(
        state=sa.literal_column(f"'{LANDED}'"),
        row_count=bind("rows"),
        dead_count=bind("dead"),
        file_count=bind("files"),
        total_size=bind("size"),
        version=bind("new_version", sa.BigInteger),
        landed_at=bind("now"),
    ),
    "rows",
    "dead",
    "files",
    "size",
    "new_version",
    "now",
    "of_pipeline",
    "of_number",
)
COUNT_LANDED = Statement(
    sa.update(schema.pipelines)
    .where(_p.id == bind("of_pipeline"))
    .values(
        record_count=_p.record_count + bind("records"),
        row_count=_p.row_count + bind("rows"),
        dead_count=_p.dead_count + bind("dead"),
        failures=0,
        retry_at=sa.null(),
        landed_at=bind("now"),
        updated_at=bind("now"),
    ),
    "records",
    "rows",
    "dead",
    "now",
    "of_pipeline",
)
NUMBER_BATCH = Statement(
    sa.update(schema.pipelines)
    .where(
        _p.id == bind("of_pipeline"),
        _p.token == bind("own_token"),
        _p.state == sa.literal_column(f"'{ACTIVE}'"),
    )
    .values(last_batch=_p.last_batch + 1)
    .returning(_p.last_batch),
    "of_pipeline",
    "own_token",
)
PRUNE_BATCHES = Statement(
    sa.delete(schema.pipeline_batches).where(_b.landed_at.is_not(None), _b.landed_at < bind("before")), "before"
)
MOVE_TABLE_LEASE = Statement(
    sa.update(schema.leases)
    .where(_l.id == bind("lease_id"), _l.version < bind("new_version"))
    .values(version=bind("new_version")),
    "new_version",
    "lease_id",
)
_t = schema.topics.c
_n = schema.partitions.c
#: Offsets above the end of their partition, of topics that are there.
BROKEN_OFFSETS = Statement(
    sa.select(_p.name, _t.name, _o.partition_id, _o.next_offset, _n.high_watermark)
    .select_from(
        schema.pipeline_offsets.join(schema.pipelines, _p.id == _o.pipeline_id)
        .join(schema.topics, sa.and_(_t.id == _o.source_id, _o.kind == sa.literal_column(f"'{TOPIC}'")))
        .outerjoin(schema.partitions, sa.and_(_n.topic_id == _t.id, _n.partition_id == _o.partition_id))
    )
    .where(_t.deleted_at.is_(None), sa.or_(_n.topic_id.is_(None), _o.next_offset > _n.high_watermark))
    .order_by(_p.name, _t.name, _o.partition_id)
)
# What lies between where pipelines stand and the ends of their sources; of those that are there.
_behind = sa.case(
    (_o.next_offset < _n.high_watermark, _n.high_watermark - _o.next_offset), else_=sa.literal_column("0")
)
LAG_IN_TOPICS = Statement(
    sa.select(_o.pipeline_id, sa.func.sum(_behind))
    .select_from(
        schema.pipeline_offsets.join(
            schema.partitions,
            sa.and_(
                _o.kind == sa.literal_column(f"'{TOPIC}'"),
                _n.topic_id == _o.source_id,
                _n.partition_id == _o.partition_id,
            ),
        )
    )
    .group_by(_o.pipeline_id)
)
_s = schema.tables.c
LAG_IN_TABLES = Statement(
    sa.select(_o.pipeline_id, sa.func.sum(_s.version + sa.literal_column("1") - _o.next_offset))
    .select_from(
        schema.pipeline_offsets.join(
            schema.tables, sa.and_(_o.kind == sa.literal_column(f"'{TABLE}'"), _s.id == _o.source_id)
        )
    )
    .group_by(_o.pipeline_id)
)
EVERY_PIPELINE = Statement(sa.select(schema.pipelines).order_by(_p.name))
VERSIONS_BETWEEN = Statement(
    sa.select(_v.version, _v.operation, _v.added_rows, _v.added_files + _v.removed_files)
    .where(_v.table_id == bind("of_table"), _v.version >= bind("first"), _v.version < bind("end"))
    .order_by(_v.version)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "first",
    "end",
    "most",
)
ADDED_BETWEEN = Statement(
    sa.select(_f.id)
    .select_from(
        schema.table_files.join(
            schema.table_versions, sa.and_(_v.table_id == _f.table_id, _v.version == _f.from_version)
        )
    )
    .where(
        _f.table_id == bind("of_table"),
        _f.from_version >= bind("first"),
        _f.from_version < bind("end"),
        _v.operation == sa.literal_column("'append'"),
        _f.content == sa.literal_column("0"),
    )
    .order_by(_f.id),
    "of_table",
    "first",
    "end",
)


@dataclass(frozen=True)
class PipelineRecord:
    """A pipeline as the registry has it."""

    id: int
    name: str
    target_id: int
    dead_letters_id: int | None
    definition: Mapping[str, Any]
    state: str
    token: int
    holder: str | None
    held_until: datetime | None
    last_batch: int
    record_count: int
    row_count: int
    dead_count: int
    failures: int
    last_error: str | None
    failed_at: datetime | None
    retry_at: datetime | None
    landed_at: datetime | None
    created_at: datetime
    updated_at: datetime

    @property
    def shown(self) -> str:
        """The pipeline as an error names it."""
        return f"pipeline {self.name}"


@dataclass(frozen=True)
class Standing:
    """How a pipeline stands: whether it goes on, and what waits for it."""

    name: str
    state: str
    failures: int
    last_error: str | None
    #: Whether a daemon runs it.
    scheduled: bool
    #: Records, or versions of tables, that it has not read, of the partitions that it knows.
    lag: int


@dataclass(frozen=True)
class SourceRange:
    """Records of one partition of a source: from `start` to before `end`. Of a table they are versions."""

    kind: str
    source_id: int
    partition: int
    start: int
    end: int


@dataclass(frozen=True)
class SourceOffset:
    """How far a pipeline has come: what lies between `first` and `next` has landed."""

    kind: str
    source_id: int
    partition: int
    first: int
    next: int


@dataclass(frozen=True)
class BatchRecord:
    """A batch: what it reads, and what has become of it."""

    number: int
    state: str
    ranges: tuple[SourceRange, ...]
    record_count: int
    row_count: int | None
    dead_count: int | None
    file_count: int | None
    total_size: int | None
    version: int | None
    planned_at: datetime
    landed_at: datetime | None


@dataclass(frozen=True)
class Landing:
    """What a batch brings: how many records it read, and what it made of them."""

    records: int
    rows: int
    dead: int
    files: int
    size: int
    #: Set where the target gets files: its new version.
    version: int | None = None


class BatchLanded(NoEffect):
    """Somebody else has landed this batch, or a part of it."""


class ClaimLost(NoEffect):
    """Somebody else runs the pipeline now."""


def pipeline_not_found(name: object) -> PipelineNotFound:
    """The error for a pipeline that is not there."""
    return PipelineNotFound(
        f"there is no pipeline {shown(name)}",
        on="pipeline",
        remedy="`lakebook pipelines list` shows which there are",
    )


def _moment(value: int | None) -> datetime | None:
    return None if value is None else to_datetime(value)


def pipeline_from(row: Row) -> PipelineRecord:
    """A pipeline from a row of all columns."""
    values = row_of(schema.pipelines, row)
    for name in ("held_until", "failed_at", "retry_at", "landed_at", "created_at", "updated_at"):
        values[name] = _moment(values[name])
    return PipelineRecord(**values)


def _batch_from(row: Row) -> BatchRecord:
    values = row_of(schema.pipeline_batches, row)
    del values["pipeline_id"]
    values["ranges"] = tuple(SourceRange(*item) for item in values["ranges"])
    values["planned_at"], values["landed_at"] = to_datetime(values["planned_at"]), _moment(values["landed_at"])
    return BatchRecord(**values)


# --- pipelines -----------------------------------------------------------------


def create_pipeline(
    transaction: Transaction,
    name: str,
    target_id: int,
    dead_letters_id: int | None,
    definition: Mapping[str, Any],
) -> int:
    """Enter a pipeline that has not begun yet; its id."""
    if transaction.one(GET_PIPELINE, name) is not None:
        raise PipelineAlreadyExists(
            f"there is a pipeline {shown(name)} already", on="pipeline", remedy="Choose another name"
        )
    now = transaction.clock.now_ms()
    values: dict[str, Any] = dict.fromkeys(_NEW)
    values |= {"name": name, "target_id": target_id, "dead_letters_id": dead_letters_id, "state": ACTIVE}
    values |= {"definition": orjson.dumps(dict(definition)).decode(), "created_at": now, "updated_at": now}
    values |= dict.fromkeys(("token", "last_batch", "record_count", "row_count", "dead_count", "failures"), 0)
    row = transaction.one(INSERT_PIPELINE, *(values[column] for column in _NEW))
    assert row is not None
    return int(row[0])


def get_pipeline(reader: Reader, name: str) -> PipelineRecord:
    """A pipeline by its name."""
    row = reader.one(GET_PIPELINE, name)
    if row is None:
        raise pipeline_not_found(name)
    return pipeline_from(row)


def pipeline_by_id(reader: Reader, pipeline_id: int, name: str) -> PipelineRecord:
    """A pipeline as it is now; an error if it was deleted."""
    row = reader.one(PIPELINE_ROW, pipeline_id)
    if row is None:
        raise pipeline_not_found(name)
    return pipeline_from(row)


def list_pipelines(reader: Reader, after: str, most: int) -> list[PipelineRecord]:
    """Pipelines in the order of their names."""
    return [pipeline_from(row) for row in reader.all(LIST_PIPELINES, after, most)]


def standing_of_all(reader: Reader) -> list[Standing]:
    """How all pipelines stand, in the order of their names."""
    found = [pipeline_from(row) for row in reader.all(EVERY_PIPELINE)]
    if not found:
        return []
    lag: dict[int, int] = {}
    for statement in (LAG_IN_TOPICS, LAG_IN_TABLES):
        lag |= {int(row[0]): int(row[1]) for row in reader.all(statement)}
    return [
        Standing(
            item.name,
            item.state,
            item.failures,
            item.last_error,
            item.definition.get("interval") is not None,
            lag.get(item.id, 0),
        )
        for item in found
    ]


def pipelines_into(reader: Reader, table_id: int) -> list[PipelineRecord]:
    """The pipelines that fill a table."""
    return [pipeline_from(row) for row in reader.all(PIPELINES_INTO, table_id)]


def delete_pipeline(transaction: Transaction, pipeline_id: int, name: str) -> None:
    """Forget a pipeline, how far it had come, and what it pinned. Its target stays as it is."""
    if transaction.run(DELETE_PIPELINE, pipeline_id) != 1:
        raise pipeline_not_found(name)
    offsets = offsets_of(transaction, pipeline_id)
    transaction.run(DELETE_OFFSETS, pipeline_id)
    transaction.run(DELETE_BATCHES, pipeline_id)
    end_topic_leases(transaction, [lease_of(pipeline_id)])
    end_leases(transaction, [lease_of(pipeline_id, item.source_id) for item in offsets if item.kind == TABLE])


def set_state(transaction: Transaction, pipeline_id: int, name: str, state: str, error: str | None = None) -> None:
    """Pause, resume or stop a pipeline; whatever has failed before is over."""
    now = transaction.clock.now_ms()
    if transaction.run(SET_STATE, state, error, None if error is None else now, now, pipeline_id) != 1:
        raise pipeline_not_found(name)


def alter_pipeline(
    transaction: Transaction,
    pipeline: PipelineRecord,
    token: int,
    dead_letters_id: int | None,
    definition: Mapping[str, Any],
) -> None:
    """Let whoever has the turn change what a pipeline does.

    A batch that is planned is planned anew: whoever is at work at it still goes by what it knows, and lands nothing.
    """
    require_turn(transaction, pipeline.id, token)
    transaction.run(ALTER_PIPELINE, orjson.dumps(dict(definition)).decode(), dead_letters_id, pipeline.id)
    transaction.run(DROP_PLANNED, pipeline.id)


def stop_pipeline(transaction: Transaction, pipeline: PipelineRecord, token: int, error: str) -> None:
    """Stop a pipeline, if nobody else has run it since: of what they found, one that was frozen knows nothing."""
    require_turn(transaction, pipeline.id, token)
    set_state(transaction, pipeline.id, pipeline.name, STOPPED, error)


def note_failure(transaction: Transaction, pipeline_id: int, error: str, pause: float) -> None:
    """Write down why a batch failed, and when it is tried again."""
    now = transaction.clock.now_ms()
    transaction.run(NOTE_FAILURE, error, now, now + round(pause * 1000), pipeline_id)


# --- who runs it ---------------------------------------------------------------


def claim_pipeline(transaction: Transaction, pipeline_id: int, holder: str, seconds: float) -> int | None:
    """Take the turn to run a pipeline; the token that goes with it, none if somebody else has it."""
    now = transaction.clock.now_ms()
    row = transaction.one(CLAIM, now, holder, now + round(seconds * 1000), pipeline_id)
    return None if row is None else int(row[0])


def renew_claim(transaction: Transaction, pipeline_id: int, token: int, seconds: float) -> bool:
    """Keep the turn; whether it was still held."""
    until = transaction.clock.now_ms() + round(seconds * 1000)
    return transaction.run(RENEW_CLAIM, until, pipeline_id, token) == 1


def require_turn(transaction: Transaction, pipeline_id: int, token: int) -> None:
    """Refuse to go on if somebody else has had the turn since; until the transaction ends, nobody can take it."""
    if transaction.run(HOLD_CLAIM, transaction.clock.now_ms(), pipeline_id, token) != 1:
        raise ClaimLost


def release_claim(transaction: Transaction, pipeline_id: int, token: int) -> None:
    """Give the turn back."""
    transaction.run(RELEASE_CLAIM, pipeline_id, token)


# --- how far it has come -------------------------------------------------------


def lease_of(pipeline_id: int, table_id: int | None = None) -> str:
    """The id of the lease that pins what a pipeline has still to read of topics, or of a table."""
    return f"{LEASES}{pipeline_id}" if table_id is None else f"{LEASES}{pipeline_id}-{table_id}"


def topic_pin(pipeline_id: int, topic_id: int, partition: int, offset: int, sequence: int, now: int) -> dict[str, Any]:
    """A row of the lease by which a pipeline pins a partition of a topic."""
    place = {"topic_id": topic_id, "partition_id": partition, "from_offset": offset, "sequence": sequence}
    return {"id": lease_of(pipeline_id), **place, **_for_ever(now)}


def table_pin(pipeline_id: int, table_id: int, version: int, now: int) -> dict[str, Any]:
    """The lease by which a pipeline pins a table."""
    return {"id": lease_of(pipeline_id, table_id), "table_id": table_id, "version": version, **_for_ever(now)}


def _for_ever(now: int) -> dict[str, Any]:
    return {"holder": owner(), "created_at": now, "expires_at": now + round(_FOR_EVER_SECONDS * 1000)}


def offsets_of(reader: Reader, pipeline_id: int) -> list[SourceOffset]:
    """How far a pipeline has come in each partition of its sources."""
    return [SourceOffset(*row[1:]) for row in reader.all(OFFSETS_OF, pipeline_id)]


def add_partitions(
    transaction: Transaction,
    pipeline: PipelineRecord,
    topic_id: int,
    topic: str,
    starts: Mapping[int, int],
    *,
    pins: bool,
) -> None:
    """Let a pipeline begin at 0 of partitions that came since it was made; what is left of them is pinned.

    Under the lock of its row: one that was deleted meanwhile pins nothing, and of two that look one adds them.
    """
    if transaction.one(LOCK_PIPELINE, pipeline.id) is None:
        raise pipeline_not_found(pipeline.name)
    known = {item.partition for item in offsets_of(transaction, pipeline.id) if item.source_id == topic_id}
    new = {number: start for number, start in starts.items() if number not in known}
    if not new:
        return
    if pins:
        take_topic_lease(transaction, topic, new, lease_of(pipeline.id), _FOR_EVER_SECONDS)
    transaction.insert_many(INSERT_OFFSETS, [(pipeline.id, TOPIC, topic_id, number, 0, 0) for number in sorted(new)])


def begin_at_topic(
    transaction: Transaction, pipeline_id: int, topic: str, offsets: Mapping[int, int], *, pins: bool
) -> int:
    """Let a pipeline begin at these offsets of a topic's partitions, and pin what follows; the topic's id."""
    lease = lease_of(pipeline_id)
    topic_id = take_topic_lease(transaction, topic, offsets, lease, _FOR_EVER_SECONDS)
    if not pins:
        drop_from_topic_lease(transaction, lease, [(topic_id, number) for number in offsets])
    rows = [(pipeline_id, TOPIC, topic_id, number, offset, offset) for number, offset in sorted(offsets.items())]
    transaction.insert_many(INSERT_OFFSETS, rows)
    return topic_id


def begin_at_table(transaction: Transaction, pipeline_id: int, table: TableRecord, version: int) -> None:
    """Let a pipeline begin with what follows a version of a table, and pin that."""
    if transaction.one(SHARE_HORIZON, table.id) is None:
        resolve_version(transaction, table, version, None)
    wanted, _ = resolve_version(transaction, table, version, None)
    now = transaction.clock.now_ms()
    expires = now + round(_FOR_EVER_SECONDS * 1000)
    transaction.run(INSERT_LEASE, lease_of(pipeline_id, table.id), table.id, wanted, owner(), now, expires)
    transaction.insert_many(INSERT_OFFSETS, [(pipeline_id, TABLE, table.id, WHOLE, version + 1, version + 1)])


def pinned_offsets(reader: Reader, pipeline_id: int) -> dict[tuple[int, int], int]:
    """From which offset on a pipeline pins which partitions, by topic and number."""
    return {(row[0], row[1]): row[2] for row in reader.all(ROWS_OF_LEASE, lease_of(pipeline_id))}


# --- batches -------------------------------------------------------------------


def planned_batch(reader: Reader, pipeline_id: int) -> BatchRecord | None:
    """The batch that is planned and has not landed, if there is one."""
    row = reader.one(PLANNED_BATCH, pipeline_id)
    return None if row is None else _batch_from(row)


def own_planned_batch(reader: Reader, pipeline: PipelineRecord, token: int) -> BatchRecord | None:
    """The batch that is planned, for whoever has the turn; what others have planned may be of another definition."""
    found = planned_batch(reader, pipeline.id)
    # Looked at last: whoever has planned it had the turn before.
    if pipeline_by_id(reader, pipeline.id, pipeline.name).token != token:
        raise ClaimLost
    return found


def plan_batch(
    transaction: Transaction, pipeline_id: int, token: int, ranges: Sequence[SourceRange], records: int
) -> BatchRecord:
    """Write down what the next batch reads, unless one is planned already: then it is that one."""
    row = transaction.one(NUMBER_BATCH, pipeline_id, token)
    if row is None:
        raise ClaimLost
    found = planned_batch(transaction, pipeline_id)
    if found is not None:
        raise AlreadyPlanned(found)
    stands = {(item.kind, item.source_id, item.partition): item.next for item in offsets_of(transaction, pipeline_id)}
    if any(stands.get((item.kind, item.source_id, item.partition)) != item.start for item in ranges):
        raise BatchLanded
    number, now = int(row[0]), transaction.clock.now_ms()
    listed = [[item.kind, item.source_id, item.partition, item.start, item.end] for item in ranges]
    text = orjson.dumps(listed).decode()
    transaction.insert_many(
        INSERT_BATCH, [(pipeline_id, number, PLANNED, text, records, None, None, None, None, None, now, None)]
    )
    return BatchRecord(number, PLANNED, tuple(ranges), records, None, None, None, None, None, to_datetime(now), None)


class AlreadyPlanned(NoEffect):
    """A batch is planned, which has to be run before another one is planned."""

    def __init__(self, batch: BatchRecord) -> None:
        super().__init__(batch.number)
        self.batch = batch


def list_batches(reader: Reader, pipeline_id: int, below: int, most: int) -> list[BatchRecord]:
    """Batches of a pipeline, the newest first."""
    return [_batch_from(row) for row in reader.all(LIST_BATCHES, pipeline_id, below, most)]


def land_batch(transaction: Transaction, pipeline: PipelineRecord, batch: BatchRecord, landing: Landing) -> None:
    """Move the offsets over a batch. Part of the transaction that makes its files visible.

    Every offset has to stand where its range begins: else the batch, or another one over its records, has landed.
    """
    now = transaction.clock.now_ms()
    for item in sorted(batch.ranges, key=lambda item: (item.kind, item.source_id, item.partition)):
        place = (pipeline.id, item.kind, item.source_id, item.partition)
        if transaction.run(ADVANCE_OFFSET, item.end, *place, item.start) != 1:
            raise BatchLanded
    values = (landing.rows, landing.dead, landing.files, landing.size, landing.version, now)
    if transaction.run(LAND_BATCH, *values, pipeline.id, batch.number) != 1:
        raise BatchLanded
    _count(transaction, pipeline, landing, now)
    _let_go(transaction, pipeline.id, batch.ranges)


def skip_to(transaction: Transaction, pipeline_id: int, places: Mapping[tuple[str, int, int], int]) -> int:
    """Go on behind what is lost; how many partitions were moved. A batch that was planned over it is planned anew."""
    # Whoever plans a batch changes that row, too.
    transaction.one(LOCK_PIPELINE, pipeline_id)
    moved = [place for place, offset in sorted(places.items()) if transaction.run(SKIP_TO, pipeline_id, *place, offset)]
    if moved:
        transaction.run(DROP_PLANNED, pipeline_id)
        ends = [SourceRange(*place, 0, places[place]) for place in moved]
        _let_go(transaction, pipeline_id, ends)
    return len(moved)


def land_backfill(
    transaction: Transaction, pipeline: PipelineRecord, token: int, ranges: Sequence[SourceRange], landing: Landing
) -> None:
    """Note that what lies directly before all that had landed has landed too."""
    require_turn(transaction, pipeline.id, token)
    now = transaction.clock.now_ms()
    for item in sorted(ranges, key=lambda item: (item.kind, item.source_id, item.partition)):
        place = (pipeline.id, item.kind, item.source_id, item.partition)
        if transaction.run(EXTEND_BACK, item.start, *place, item.end) != 1:
            raise BatchLanded
    _count(transaction, pipeline, landing, now)


def _count(transaction: Transaction, pipeline: PipelineRecord, landing: Landing, now: int) -> None:
    counted = (landing.records, landing.rows, landing.dead, now)
    if transaction.run(COUNT_LANDED, *counted, pipeline.id) != 1:
        raise pipeline_not_found(pipeline.name)


def _let_go(transaction: Transaction, pipeline_id: int, ranges: Sequence[SourceRange]) -> None:
    """Pin only what is left to read."""
    topics = {(item.source_id, item.partition): item.end for item in ranges if item.kind == TOPIC}
    if topics:
        advance_topic_lease(transaction, lease_of(pipeline_id), topics)
    for item in ranges:
        if item.kind == TABLE:
            transaction.run(MOVE_TABLE_LEASE, item.end - 1, lease_of(pipeline_id, item.source_id))


def prune_batches(transaction: Transaction, before: int) -> int:
    """Forget batches that landed before a time."""
    return transaction.run(PRUNE_BATCHES, before)


# --- tables as sources ---------------------------------------------------------


@dataclass(frozen=True)
class VersionRead:
    """A version of a table that is a source: what it did, how many rows it added, and how many files it touched."""

    version: int
    operation: str
    rows: int
    files: int


def versions_between(reader: Reader, table_id: int, first: int, end: int, most: int) -> list[VersionRead]:
    """Versions of a table from one to before another."""
    return [VersionRead(*row) for row in reader.all(VERSIONS_BETWEEN, table_id, first, end, most)]


def files_added_between(reader: Reader, table_id: int, first: int, end: int) -> list[int]:
    """Ids of the files that appends of these versions added, also of those that are not visible any more."""
    return [int(row[0]) for row in reader.all(ADDED_BETWEEN, table_id, first, end)]
