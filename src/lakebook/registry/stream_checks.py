"""The stream invariants, checked on one consistent state of the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.errors import PathOutsideWarehouse
from lakebook.names import check_path
from lakebook.registry import schema
from lakebook.registry.changes import row_of
from lakebook.registry.commits import is_doubtful
from lakebook.registry.gaps import OFFSETS, is_covered, known_gaps
from lakebook.registry.pipelines import BROKEN_OFFSETS
from lakebook.registry.statements import ZERO, Statement, bind
from lakebook.registry.transactions import Reader, Row

_t = schema.topics.c
_p = schema.partitions.c
_s = schema.segments.c
_o = schema.consumer_offsets.c
_g = schema.consumer_groups.c
_m = schema.group_members.c
_a = schema.group_assignments.c
_tl = schema.topic_leases.c
_e = schema.events.c
_lo = schema.lake_objects.c
_r = schema.retired_segments.c
_pm = schema.partition_metadata.c
_at = schema.append_turns.c
_sf = schema.stream_folders.c


@dataclass(frozen=True)
class Finding:
    """Something that must not be."""

    check: str
    on: str
    what: str


@dataclass(frozen=True)
class Verification:
    """What was checked, and what was found wrong."""

    checked: dict[str, int]
    findings: tuple[Finding, ...]
    #: Deletions and removals that are under way; not wrong, but not finished.
    unfinished: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


_with_previous = sa.select(
    _s.topic_id,
    _s.partition_id,
    _s.id,
    _s.base_offset,
    sa.func.lag(_s.end_offset)
    .over(partition_by=[_s.topic_id, _s.partition_id], order_by=_s.base_offset)
    .label("previous_end"),
    sa.func.lag(_s.newest_timestamp)
    .over(partition_by=[_s.topic_id, _s.partition_id], order_by=_s.base_offset)
    .label("previous_newest"),
    _s.max_timestamp,
    _s.newest_timestamp,
).subquery()
_w = _with_previous.c
BROKEN_ORDER = Statement(
    sa.select(_w.topic_id, _w.partition_id, _w.base_offset, _w.previous_end)
    .where(_w.previous_end.is_not(None), _w.base_offset != _w.previous_end + 1)
    .order_by(_w.topic_id, _w.partition_id, _w.base_offset)
)
BROKEN_TIMES = Statement(
    sa.select(_w.topic_id, _w.partition_id, _w.base_offset).where(
        _w.previous_newest.is_not(None),
        _w.newest_timestamp
        != sa.case((_w.max_timestamp > _w.previous_newest, _w.max_timestamp), else_=_w.previous_newest),
    )
)
_ends = (
    sa.select(
        _s.topic_id,
        _s.partition_id,
        sa.func.max(_s.end_offset).label("last_end"),
        sa.func.min(sa.case((_s.base_offset >= _p.log_start, _s.base_offset))).label("first_kept"),
        sa.func.sum(sa.case((_s.base_offset < _p.log_start, 1), else_=0)).label("leaving"),
        sa.func.max(sa.case((sa.and_(_s.base_offset < _p.log_start, _s.end_offset >= _p.log_start), 1), else_=0)).label(
            "cut"
        ),
    )
    .select_from(
        schema.segments.join(schema.partitions, sa.and_(_p.topic_id == _s.topic_id, _p.partition_id == _s.partition_id))
    )
    .group_by(_s.topic_id, _s.partition_id)
    .subquery()
)
PARTITION_ENDS = Statement(
    sa.select(
        _p.topic_id,
        _p.partition_id,
        _p.log_start,
        _p.high_watermark,
        _ends.c.last_end,
        _ends.c.first_kept,
        _ends.c.leaving,
        _ends.c.cut,
        _t.deleted_at,
    ).select_from(
        schema.partitions.join(schema.topics, _t.id == _p.topic_id).outerjoin(
            _ends, sa.and_(_ends.c.topic_id == _p.topic_id, _ends.c.partition_id == _p.partition_id)
        )
    )
)
PARTITION_NUMBERS = Statement(
    sa.select(
        _t.id,
        _t.name,
        _t.partition_count,
        _t.deleted_at,
        sa.func.count(_p.partition_id),
        sa.func.coalesce(sa.func.max(_p.partition_id), -1),
    )
    .select_from(schema.topics.outerjoin(schema.partitions, _p.topic_id == _t.id))
    .group_by(_t.id, _t.name, _t.partition_count, _t.deleted_at)
)
OFFSETS_BEYOND = Statement(
    sa.select(_o.consumer_group_id, _o.topic_id, _o.partition_id, _o.committed_offset, _p.high_watermark)
    .select_from(
        schema.consumer_offsets.join(
            schema.partitions, sa.and_(_p.topic_id == _o.topic_id, _p.partition_id == _o.partition_id)
        )
    )
    .where(_o.committed_offset > _p.high_watermark)
)
# Who is named by an assignment and is no member of its group.
_strangers = [
    sa.select(_a.consumer_group_id, _a.topic_id, _a.partition_id, named, sa.literal_column(f"'{what}'")).where(
        named.is_not(None),
        ~sa.exists().where(_m.consumer_group_id == _a.consumer_group_id, _m.member_id == named),
    )
    for named, what in ((_a.member_id, "owned"), (_a.wanted_by, "wanted"))
]
STRANGERS = Statement(sa.union_all(*_strangers))
# A hidden topic has its assignments until it is emptied, and its leases too.
ASSIGNED_NOWHERE = Statement(
    sa.select(_a.consumer_group_id, _a.topic_id, _a.partition_id)
    .select_from(
        schema.group_assignments.outerjoin(
            schema.partitions, sa.and_(_p.topic_id == _a.topic_id, _p.partition_id == _a.partition_id)
        ).outerjoin(schema.topics, _t.id == _a.topic_id)
    )
    .where(_p.topic_id.is_(None), _t.deleted_at.is_(None))
)
MEMBERS_OF_NO_GENERATION = Statement(
    sa.select(_m.consumer_group_id, _m.member_id)
    .select_from(schema.group_members.join(schema.consumer_groups, _g.id == _m.consumer_group_id))
    .where(_g.generation == 0)
)
_first_base = (
    sa.select(sa.func.min(_s.base_offset))
    .where(_s.topic_id == _tl.topic_id, _s.partition_id == _tl.partition_id)
    .scalar_subquery()
)
BROKEN_LEASES = Statement(
    sa.select(_tl.id, _tl.topic_id, _tl.partition_id, _tl.from_offset, _p.log_start, _p.high_watermark)
    .select_from(
        schema.topic_leases.outerjoin(
            schema.partitions, sa.and_(_p.topic_id == _tl.topic_id, _p.partition_id == _tl.partition_id)
        ).outerjoin(schema.topics, _t.id == _tl.topic_id)
    )
    .where(
        _t.deleted_at.is_(None),
        sa.or_(
            _p.topic_id.is_(None),
            _tl.from_offset > _p.high_watermark,
            sa.and_(_tl.from_offset < _p.log_start, sa.func.coalesce(_first_base, _p.log_start) > _tl.from_offset),
        ),
    )
)
LIVE_AND_WAITING = Statement(
    sa.select(_s.s3_key).select_from(
        schema.segments.join(schema.temporary_files, schema.temporary_files.c.file_path == _s.s3_key)
    )
)
RETIRED_AND_LIVE = Statement(
    sa.select(_r.file_path).select_from(schema.segments.join(schema.retired_segments, _r.file_path == _s.s3_key))
)
RETIRED_AND_WAITING = Statement(
    sa.select(_r.file_path).select_from(
        schema.retired_segments.join(schema.temporary_files, schema.temporary_files.c.file_path == _r.file_path)
    )
)
RETIRED_OF_NOBODY = Statement(
    sa.select(_r.file_path)
    .select_from(schema.retired_segments.outerjoin(schema.topics, _t.id == _r.topic_id))
    .where(_t.id.is_(None))
)
WRONG_FOOTERS = Statement(
    sa.select(_s.s3_key, _s.record_count, _pm.num_rows, _s.size_bytes, _pm.file_size)
    .select_from(schema.segments.join(schema.partition_metadata, _pm.file_path == _s.s3_key))
    .where(sa.or_(_pm.num_rows != _s.record_count, _pm.file_size != _s.size_bytes))
)
ENDED_FOLDERS_OF_TURNS = Statement(
    sa.select(_sf.folder, _at.holder)
    .select_from(
        schema.append_turns.join(
            schema.stream_folders,
            sa.and_(_sf.topic_id == _at.topic_id, _sf.partition_id == _at.partition_id, _sf.token == _at.token),
        )
    )
    .where(_at.holder.is_not(None), _sf.ended_at.is_not(None))
)
ENDED_FOLDERS_OF_COMMITS = Statement(
    sa.select(_sf.folder)
    .select_from(schema.stream_folders.join(schema.commits, schema.commits.c.id == _sf.commit_id))
    .where(_sf.ended_at.is_not(None), schema.commits.c.state == sa.literal_column("'open'"))
)
WITHOUT_COMMIT = Statement(
    sa.select(_s.id, schema.commits.c.state)
    .select_from(schema.segments.outerjoin(schema.commits, schema.commits.c.id == _s.commit_id))
    .where(is_doubtful(_s.created_at))
)
STRANGE_PATHS = Statement(
    sa.select(_s.s3_key).where(
        sa.or_(_s.s3_key.like("/%"), _s.s3_key.like("%..%"), _s.s3_key.like("%://%"), _s.s3_key.like("%//%"))
    )
)
COUNTS = {
    table.name: Statement(sa.select(sa.func.count()).select_from(table))
    for table in (*schema.CAPTURED, schema.events, schema.lake_objects)
}
OBJECTS = Statement(
    sa.select(_lo.id, _lo.kind, _lo.last_sequence, _lo.last_commit_at)
    .where(_lo.id > bind("after"))
    .order_by(_lo.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
EVENTS_OF_OBJECT = Statement(
    sa.select(_e.sequence, _e.table_name, _e.operation, _e.key, _e.row_after, _e.row_before, _e.occurred_at, _e.id)
    .where(_e.object_id == bind("object_id"), _e.sequence > bind("after"))
    .order_by(_e.sequence)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "object_id",
    "after",
    "most",
)
EVENTS_WITHOUT_OBJECT = Statement(
    sa.select(sa.func.count())
    .select_from(schema.events.outerjoin(schema.lake_objects, _lo.id == _e.object_id))
    .where(_lo.id.is_(None))
)
RESETS = Statement(sa.select(schema.offset_resets.c.consumer_group_id, schema.offset_resets.c.group_sequence))
# Which rows belong to a lake object, per table that is captured for that kind of object.
_ROWS = {
    "topic": [
        (schema.topics, Statement(sa.select(schema.topics).where(_t.object_id == bind("object_id")), "object_id"))
    ],
    "partition": [
        (
            schema.partitions,
            Statement(sa.select(schema.partitions).where(_p.object_id == bind("object_id")), "object_id"),
        ),
        (
            schema.segments,
            Statement(
                sa.select(schema.segments)
                .select_from(
                    schema.segments.join(
                        schema.partitions, sa.and_(_p.topic_id == _s.topic_id, _p.partition_id == _s.partition_id)
                    )
                )
                .where(_p.object_id == bind("object_id")),
                "object_id",
            ),
        ),
    ],
    "group": [
        (
            schema.consumer_groups,
            Statement(
                sa.select(schema.consumer_groups).where(schema.consumer_groups.c.object_id == bind("object_id")),
                "object_id",
            ),
        ),
        (
            schema.consumer_offsets,
            Statement(
                sa.select(schema.consumer_offsets)
                .select_from(
                    schema.consumer_offsets.join(
                        schema.consumer_groups, schema.consumer_groups.c.id == _o.consumer_group_id
                    )
                )
                .where(schema.consumer_groups.c.object_id == bind("object_id")),
                "object_id",
            ),
        ),
    ],
    "table": [
        (
            schema.tables,
            Statement(sa.select(schema.tables).where(schema.tables.c.object_id == bind("object_id")), "object_id"),
        ),
        *(
            (
                rows,
                Statement(
                    sa.select(rows)
                    .select_from(rows.join(schema.tables, schema.tables.c.id == rows.c.table_id))
                    .where(schema.tables.c.object_id == bind("object_id")),
                    "object_id",
                ),
            )
            for rows in (schema.table_metadata, schema.table_files, schema.table_stats, schema.table_snapshots)
        ),
    ],
}
_PAGE = 5000


TOPIC_NAMES = Statement(sa.select(_t.id, _t.name))
GROUP_NAMES = Statement(sa.select(schema.consumer_groups.c.id, schema.consumer_groups.c.group_id))


class _Findings:
    def __init__(self, topics: dict[int, str], groups: dict[int, str]) -> None:
        self.topics = topics
        self.groups = groups
        self.found: list[Finding] = []
        self.unfinished: list[str] = []

    def place(self, topic_id: int, number: int) -> str:
        """A partition by the name of its topic; several have had the name, so the id is told too."""
        return f"{self.topics.get(topic_id, '?')}/{number} (topic {topic_id})"

    def add(self, check: str, on: str, what: str) -> None:
        self.found.append(Finding(check, on, what))


def verify_streams(reader: Reader, progress: Callable[[str], None] = lambda step: None) -> Verification:
    """Check everything that must hold of topics, segments, offsets and events."""
    findings = _Findings(
        dict(reader.all(TOPIC_NAMES)),
        dict(reader.all(GROUP_NAMES)),
    )
    for step, check in (
        ("partitions", _check_partitions),
        ("segments", _check_segments),
        ("offsets", _check_offsets),
        ("members", _check_members),
        ("leases", _check_leases),
        ("pipelines", _check_pipelines),
        ("files", _check_files),
        ("events", _check_events),
    ):
        progress(step)
        check(reader, findings)
    checked = {}
    for name, statement in COUNTS.items():
        row = reader.one(statement)
        checked[name] = int(row[0]) if row else 0
    return Verification(checked, tuple(findings.found), tuple(findings.unfinished))


def _check_partitions(reader: Reader, findings: _Findings) -> None:
    for _, name, wanted, deleted, present, last in reader.all(PARTITION_NUMBERS):
        if deleted is not None:
            findings.unfinished.append(f"topic {name} was deleted and is not emptied yet")
        elif present != wanted or last != wanted - 1:
            findings.add("partitions", f"topic {name}", f"it has {present} partitions up to {last} instead of {wanted}")


def _check_segments(reader: Reader, findings: _Findings) -> None:
    gaps = known_gaps(reader, OFFSETS)
    for topic, number, base, previous in reader.all(BROKEN_ORDER):
        what = "overlaps with" if base <= previous else "leaves a hole after"
        if base > previous and is_covered(gaps.get((topic, number), []), previous + 1, base - 1):
            continue
        findings.add(
            "segments", findings.place(topic, number), f"the segment at {base} {what} the one that ends at {previous}"
        )
    for topic, number, base in reader.all(BROKEN_TIMES):
        findings.add("segments", findings.place(topic, number), f"the segment at {base} has a wrong newest_timestamp")
    for topic, number, start, watermark, last_end, first_kept, leaving, cut, deleted in reader.all(PARTITION_ENDS):
        on = findings.place(topic, number)
        if deleted is not None:
            continue
        lost = gaps.get((topic, number), [])
        expected = max(start, last_end + 1 if last_end is not None else 0)
        if watermark != expected and not (watermark > expected and is_covered(lost, expected, watermark - 1)):
            findings.add("segments", on, f"the high watermark is {watermark} instead of {expected}")
        if first_kept is not None and first_kept != start and not is_covered(lost, start, first_kept - 1):
            findings.add("segments", on, f"the log start is {start}, but the first segment begins at {first_kept}")
        if cut:
            findings.add("segments", on, f"the log start {start} cuts a segment in half")
        if leaving:
            findings.unfinished.append(f"{on}: {leaving} segments below the log start are not removed yet")
        findings.unfinished += [
            f"{on}: the records {max(first, start)} to {last} are lost since the registry was rebuilt ({why})"
            for first, last, why in lost
            if last >= start
        ]


def _check_offsets(reader: Reader, findings: _Findings) -> None:
    for group, topic, number, committed, watermark in reader.all(OFFSETS_BEYOND):
        findings.add(
            "offsets",
            f"group {findings.groups.get(group, group)} on {findings.place(topic, number)}",
            f"{committed} lies above the high watermark {watermark}",
        )


def _check_members(reader: Reader, findings: _Findings) -> None:
    def on(group: int, topic: int, number: int) -> str:
        return f"group {findings.groups.get(group, group)} on {findings.place(topic, number)}"

    for group, topic, number, member, what in reader.all(STRANGERS):
        findings.add("members", on(group, topic, number), f"it is {what} by {member}, who is no member")
    for group, topic, number in reader.all(ASSIGNED_NOWHERE):
        findings.add("members", on(group, topic, number), "there is no such partition to be read")
    for group, member in reader.all(MEMBERS_OF_NO_GENERATION):
        findings.add(
            "members", f"group {findings.groups.get(group, group)}", f"it has the member {member} and no generation"
        )


def _check_leases(reader: Reader, findings: _Findings) -> None:
    for lease, topic, number, offset, start, watermark in reader.all(BROKEN_LEASES):
        if start is None:
            what = "there is no such partition"
        elif offset > watermark:
            what = f"it pins {offset}, above the high watermark {watermark}"
        else:
            what = f"it pins {offset}, whose segment is gone"
        findings.add("leases", f"lease {lease} on {findings.place(topic, number)}", what)


def _check_pipelines(reader: Reader, findings: _Findings) -> None:
    for name, topic, number, offset, watermark in reader.all(BROKEN_OFFSETS):
        where = "there is no such partition" if watermark is None else f"its high watermark is {watermark}"
        findings.add("pipelines", f"pipeline {name}", f"it has landed {topic}/{number} to before {offset}, and {where}")


def _check_files(reader: Reader, findings: _Findings) -> None:
    for (path,) in reader.all(LIVE_AND_WAITING):
        findings.add("files", path, "a live segment's file waits for its removal")
    _check_retired(reader, findings)
    for path, records, rows, size, stored in reader.all(WRONG_FOOTERS):
        findings.add(
            "footers",
            path,
            f"its footer is of {rows} rows and {stored} bytes instead of {records} rows and {size} bytes",
        )
    for folder, holder in reader.all(ENDED_FOLDERS_OF_TURNS):
        findings.add("folders", folder, f"it was ended, but {holder} has its append turn")
    for (folder,) in reader.all(ENDED_FOLDERS_OF_COMMITS):
        findings.add("folders", folder, "it was ended, but its commit is open")
    for segment, state in reader.all(WITHOUT_COMMIT):
        findings.add("commits", f"segment {segment}", f"its commit is {state or 'missing'}")
    for (path,) in reader.all(STRANGE_PATHS):
        try:
            check_path(path)
        except PathOutsideWarehouse as error:
            findings.add("files", path, error.what)


def _check_retired(reader: Reader, findings: _Findings) -> None:
    for (path,) in reader.all(RETIRED_AND_LIVE):
        findings.add("files", path, "a live segment's file is taken for one that was merged")
    for (path,) in reader.all(RETIRED_AND_WAITING):
        findings.add("files", path, "a file that readers may need waits for its removal")
    for (path,) in reader.all(RETIRED_OF_NOBODY):
        findings.add("files", path, "it was merged, and its topic is gone")


def _check_events(reader: Reader, findings: _Findings) -> None:
    row = reader.one(EVENTS_WITHOUT_OBJECT)
    if row and row[0]:
        findings.add("events", "events", f"{row[0]} belong to no lake object")
    resets = {(group, sequence) for group, sequence in reader.all(RESETS)}
    after = 0
    while objects := reader.all(OBJECTS, after, _PAGE):
        for lake_object in objects:
            _check_object(reader, findings, lake_object, resets)
        after = objects[-1][0]


def _check_object(reader: Reader, findings: _Findings, lake_object: Row, resets: set[tuple[int, int]]) -> None:
    """Replay an object's events and compare the outcome with its rows."""
    object_id, kind, last_sequence, last_time = lake_object
    on = f"{kind} object {object_id}"
    state: dict[tuple[str, str], bytes | None] = {}
    first = previous = previous_time = previous_id = 0
    for sequence, table, operation, key, after, before, time, number in _events_of(reader, object_id):
        first = first or sequence
        if previous and sequence != previous + 1:
            findings.add("events", on, f"event {previous + 1} is missing")
        if time < previous_time:
            findings.add("events", on, f"event {sequence} is older than the one before it")
        if number <= previous_id:
            findings.add("events", on, f"event {sequence} was given its id before the one before it")
        previous, previous_time, previous_id = sequence, time, number
        where = (table, _canonical(key))
        known = state.get(where, _UNKNOWN if first > 1 else None)
        if known is not _UNKNOWN and known != _canonical_or_none(before):
            findings.add("events", on, f"event {sequence} does not follow from the one before it on {table} {key}")
        state[where] = _canonical_or_none(after)
        if table == "consumer_offsets" and operation == "update":
            _check_forward(findings, on, sequence, _parsed(before), _parsed(after), resets)
    if previous != last_sequence and (previous or not first):
        if previous == 0 and last_sequence:
            pass  # All its events have been pruned, or belong to a former epoch.
        else:
            findings.add("events", on, f"the last event is {previous} instead of {last_sequence}")
    if previous and previous_time > last_time:
        findings.add("events", on, "its last event is newer than its last commit")
    _compare(reader, findings, lake_object, on, state, complete=first == 1 or last_sequence == 0)


_UNKNOWN = b"?"


def _events_of(reader: Reader, object_id: int) -> Iterator[Row]:
    after = 0
    while page := reader.all(EVENTS_OF_OBJECT, object_id, after, _PAGE):
        yield from page
        after = page[-1][0]


def _check_forward(
    findings: _Findings, on: str, sequence: int, before: Any, after: Any, resets: set[tuple[int, int]]
) -> None:
    if after["committed_offset"] < before["committed_offset"] and (
        (after["consumer_group_id"], sequence) not in resets
    ):
        findings.add("offsets", on, f"event {sequence} moved a committed offset backwards without a reset")


def _compare(
    reader: Reader,
    findings: _Findings,
    lake_object: Row,
    on: str,
    state: dict[tuple[str, str], bytes | None],
    *,
    complete: bool,
) -> None:
    """Every row equals what its last event says, and nothing else is there."""
    left = {where for where, row in state.items() if row is not None}
    for table, statement in _ROWS.get(lake_object[1], []):
        key_columns = [str(column.name) for column in table.primary_key.columns]
        for values in reader.all(statement, lake_object[0]):
            row = row_of(table, values)
            where = (table.name, _canonical({name: row[name] for name in key_columns}))
            left.discard(where)
            if where not in state:
                if complete:
                    findings.add("events", on, f"a row of {table.name} has no event: {where[1]}")
            elif state[where] != _canonical_or_none(row):
                findings.add("events", on, f"a row of {table.name} differs from its last event: {where[1]}")
    for table_name, key in sorted(left):
        findings.add("events", on, f"a row of {table_name} is gone without an event: {key}")


def _parsed(value: Any) -> Any:
    return orjson.loads(value) if isinstance(value, str) else value


def _canonical(value: Any) -> str:
    return orjson.dumps(_parsed(value), option=orjson.OPT_SORT_KEYS).decode()


def _canonical_or_none(value: Any) -> bytes | None:
    # A digest would do; a row is small, and the whole of it makes a mismatch easy to see.
    return None if value is None else orjson.dumps(_parsed(value), option=orjson.OPT_SORT_KEYS)
