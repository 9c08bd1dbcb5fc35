"""Mirrors: a topic that is an Iceberg table too. The table's files are the topic's segments, where they lie.

    append    segments that came, up to which the positions say; made by whoever mirrors
    replace   a merge of segments, in the merge's own transaction
    delete    segments that retention has removed, in the transaction that removes them; those that a lease keeps
              below the log start, by whoever mirrors

So a live file of the table is always a segment of the topic. A file that both have let go of goes to
`temporary_files`, by whoever lets go of it last: the topic's side decides in `kept_by_tables`, the table's
when its history ends. Both do so under the table's lock.

Who needs the locks of a topic, of partitions and of the table takes them in this order, whatever their ids are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from lakebook import failpoints
from lakebook.errors import MergeConflict, TableAlreadyExists
from lakebook.registry import schema
from lakebook.registry.changes import row_of
from lakebook.registry.footers import load_footers
from lakebook.registry.statements import ONE, ZERO, Statement, bind, insert_into
from lakebook.registry.stream_checks import Finding
from lakebook.registry.stream_folders import segment_paths
from lakebook.registry.table_files import (
    CHUNK,
    FILES_BY_PATH,
    Committed,
    NewFile,
    TableChange,
    chunks,
    commit_change,
)
from lakebook.registry.tables import (
    GET_NAMESPACE,
    GET_TABLE,
    GET_TABLE_BY_ID,
    TABLE_ROW,
    NewTable,
    TableRecord,
    create_namespace,
    create_table,
    drop_table,
    locked_table,
    table_from,
)
from lakebook.registry.topics import ANY_TOPIC, SHARE_TOPIC_BY_ID, not_found
from lakebook.registry.transactions import NoEffect, Reader, Transaction, new_id

#: The kind of the commits that mirror.
MIRROR = "mirror"
#: The namespace in which the tables of topics are; each has the name of its topic.
NAMESPACE = "topics"
#: The key of a topic's configuration, and its value, by which the topic is a table too.
ICEBERG, ON = "iceberg", "true"

_t = schema.tables.c
_f = schema.table_files.c
_p = schema.partitions.c
_s = schema.segments.c
_m = schema.mirror_positions.c

#: Makes a file of the table from a segment's row and its footer.
MakeFile = Callable[[Mapping[str, Any], bytes], NewFile]

MIRROR_OF = Statement(sa.select(_t.id).where(_t.topic_id == bind("of_topic"), _t.deleted_at.is_(None)), "of_topic")
# Dropped tables of the topic that still have files: a path is in one table at a time.
FORMER_MIRRORS = Statement(
    sa.select(_t.id, _t.object_id)
    .where(
        _t.topic_id == bind("of_topic"),
        _t.deleted_at.is_not(None),
        sa.exists(sa.select(ONE).select_from(schema.table_files).where(_f.table_id == _t.id, _f.retired_at.is_(None))),
    )
    .order_by(_t.id),
    "of_topic",
)
PLACES = Statement(
    sa.select(_p.partition_id, _p.object_id, _p.log_start, _m.next_offset)
    .select_from(
        schema.partitions.outerjoin(
            schema.mirror_positions, sa.and_(_m.topic_id == _p.topic_id, _m.partition_id == _p.partition_id)
        )
    )
    .where(
        _p.topic_id == bind("of_topic"),
        _p.high_watermark > _p.log_start,
        _p.high_watermark > sa.func.coalesce(_m.next_offset, ZERO),
    )
    .order_by(_p.partition_id),
    "of_topic",
)
SEGMENTS_FROM = Statement(
    sa.select(schema.segments)
    .where(_s.topic_id == bind("of_topic"), _s.partition_id == bind("number"), _s.base_offset >= bind("start"))
    .order_by(_s.base_offset)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_topic",
    "number",
    "start",
    "most",
)
# Of each partition one step into an index: mostly nothing is below the log start.
_first_base = (
    sa.select(sa.func.min(_s.base_offset))
    .where(_s.topic_id == _p.topic_id, _s.partition_id == _p.partition_id)
    .correlate(schema.partitions)
    .scalar_subquery()
)
WITH_SEGMENTS_BELOW = Statement(
    sa.select(_p.partition_id, _p.log_start)
    .where(_p.topic_id == bind("of_topic"), _p.log_start > ZERO, _first_base < _p.log_start)
    .order_by(_p.partition_id),
    "of_topic",
)
SHOWN_BELOW = Statement(
    sa.select(_f.id)
    .select_from(schema.segments.join(schema.table_files, sa.and_(_f.file_path == _s.s3_key, _f.to_version.is_(None))))
    .where(_s.topic_id == bind("of_topic"), _s.partition_id == bind("number"), _s.base_offset < bind("log_start"))
    .order_by(_s.base_offset)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_topic",
    "number",
    "log_start",
    "most",
)
POSITION = Statement(
    sa.select(_m.next_offset).where(_m.topic_id == bind("of_topic"), _m.partition_id == bind("number")),
    "of_topic",
    "number",
)
SET_POSITION = Statement(
    sa.update(schema.mirror_positions)
    .where(_m.topic_id == bind("of_topic"), _m.partition_id == bind("number"))
    .values(next_offset=bind("following")),
    "following",
    "of_topic",
    "number",
)
INSERT_POSITION = insert_into(schema.mirror_positions)
FORGET_POSITIONS = Statement(sa.delete(schema.mirror_positions).where(_m.topic_id == bind("of_topic")), "of_topic")
TOPIC_OF_OBJECT = Statement(
    sa.union_all(
        sa.select(schema.topics.c.id).where(schema.topics.c.object_id == bind("of_object")),
        sa.select(_p.topic_id).where(_p.object_id == bind("of_object")),
    ),
    "of_object",
)
# --- what must not be: checked by `verify`
_live_mirrors = sa.and_(_t.topic_id.is_not(None), _t.deleted_at.is_(None))
MIRRORED_FILES = Statement(
    sa.select(_f.file_path)
    .select_from(schema.table_files.join(schema.tables, _t.id == _f.table_id))
    .where(_live_mirrors, _f.to_version.is_(None), _f.file_path > bind("after"))
    .order_by(_f.file_path)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
MIRRORED_BUT_RETIRED = Statement(
    sa.select(_f.file_path)
    .select_from(
        schema.retired_segments.join(
            schema.table_files,
            sa.and_(_f.file_path == schema.retired_segments.c.file_path, _f.to_version.is_(None)),
        ).join(schema.tables, _t.id == _f.table_id)
    )
    .where(_live_mirrors)
)
NOT_MIRRORED = Statement(
    sa.select(_s.s3_key)
    .select_from(
        schema.mirror_positions.join(
            schema.partitions, sa.and_(_p.topic_id == _m.topic_id, _p.partition_id == _m.partition_id)
        )
        .join(
            schema.segments,
            sa.and_(
                _s.topic_id == _m.topic_id,
                _s.partition_id == _m.partition_id,
                _s.base_offset < _m.next_offset,
                _s.base_offset >= _p.log_start,
            ),
        )
        .join(schema.partition_metadata, schema.partition_metadata.c.file_path == _s.s3_key)
        .outerjoin(schema.table_files, sa.and_(_f.file_path == _s.s3_key, _f.to_version.is_(None)))
    )
    .where(_f.id.is_(None))
    .order_by(_s.s3_key)
)
POSITIONS_OF_NOTHING = Statement(
    sa.select(_m.topic_id, _m.partition_id)
    .select_from(
        schema.mirror_positions.outerjoin(
            schema.tables, sa.and_(_t.topic_id == _m.topic_id, _t.deleted_at.is_(None))
        ).outerjoin(schema.partitions, sa.and_(_p.topic_id == _m.topic_id, _p.partition_id == _m.partition_id))
    )
    .where(sa.or_(_t.id.is_(None), _p.topic_id.is_(None), _m.next_offset > _p.high_watermark))
    .order_by(_m.topic_id, _m.partition_id)
)


class MirrorMoved(NoEffect):
    """Somebody else has mirrored, merged or removed the segments meanwhile: look again."""


@dataclass(frozen=True)
class Pending:
    """Segments of a partition that are not in the table yet, in the order of their offsets."""

    topic_id: int
    partition_id: int
    object_id: int
    #: What the position was when they were read; none: there was none.
    position: int | None
    start: int
    segments: tuple[Mapping[str, Any], ...]

    @property
    def end(self) -> int:
        """The position after them."""
        return int(self.segments[-1]["end_offset"]) + 1


# --- the table -----------------------------------------------------------------


def is_mirrored(config: Mapping[str, Any]) -> bool:
    """Whether a topic of this configuration is to be a table too."""
    return config.get(ICEBERG) == ON


def mirror_of(reader: Reader, topic_id: int) -> TableRecord | None:
    """The table of a topic; none if it has none."""
    found = reader.one(MIRROR_OF, topic_id)
    row = None if found is None else reader.one(GET_TABLE_BY_ID, found[0])
    return None if row is None else table_from(row)


@dataclass(frozen=True)
class MirroredTopic:
    """A topic that is to be a table, or that is one."""

    id: int
    name: str
    #: The table that it is; none: it has yet to be made.
    table_id: int | None


def mirrored_topic(reader: Reader, topic_id: int) -> MirroredTopic | None:
    """A live topic, if it is to be a table or is one; none if mirroring has nothing to do with it."""
    row = reader.one(ANY_TOPIC, topic_id)
    topic = None if row is None else row_of(schema.topics, row)
    if topic is None or topic["deleted_at"] is not None:
        return None  # Its table went with it.
    table = mirror_of(reader, topic_id)
    if table is None and not is_mirrored(topic["config"]):
        return None
    return MirroredTopic(topic_id, topic["name"], None if table is None else table.id)


def topic_of_object(reader: Reader, object_id: int) -> int | None:
    """The topic that a lake object is, or is a partition of."""
    row = reader.one(TOPIC_OF_OBJECT, object_id)
    return None if row is None else int(row[0])


def former_mirrors(reader: Reader, topic_id: int) -> list[tuple[int, int]]:
    """Dropped tables of a topic that still have files of it, with their lake objects."""
    return [(int(row[0]), int(row[1])) for row in reader.all(FORMER_MIRRORS, topic_id)]


def create_mirror(transaction: Transaction, wanted: NewTable, commit_id: str) -> TableRecord | None:
    """Create the table of a topic; none if the topic is not to have one, or cannot have it yet."""
    assert wanted.topic_id is not None
    # Under the topic's lock: so nobody turns it off, or deletes it, meanwhile.
    if not _is_wanted(transaction, wanted.topic_id):
        return None
    present = mirror_of(transaction, wanted.topic_id)
    if present is not None or former_mirrors(transaction, wanted.topic_id):
        return present
    if transaction.one(GET_TABLE, wanted.namespace, wanted.name) is not None:
        raise TableAlreadyExists(
            "a table of that name is there already, so that the topic of that name cannot be one",
            on=f"table {wanted.namespace}.{wanted.name}",
            remedy="Rename or drop that table, or set iceberg=false on the topic",
        )
    if transaction.one(GET_NAMESPACE, wanted.namespace) is None:
        create_namespace(transaction, wanted.namespace, {})
    return create_table(transaction, wanted, commit_id)


def _is_wanted(transaction: Transaction, topic_id: int) -> bool:
    """Whether a topic is there and is to be a table, under its lock."""
    row = transaction.one(ANY_TOPIC, topic_id)
    if row is None:
        return False
    transaction.lock(row_of(schema.topics, row)["object_id"])
    row = transaction.one(ANY_TOPIC, topic_id)
    topic = None if row is None else row_of(schema.topics, row)
    return topic is not None and topic["deleted_at"] is None and is_mirrored(topic["config"])


def drop_mirror(transaction: Transaction, topic_id: int) -> TableRecord | None:
    """Drop the table of a topic that is no longer to have one, and whose lock is held; the table."""
    table = mirror_of(transaction, topic_id)
    if table is not None:
        drop_table(transaction, table, by_topic=True)
        transaction.run(FORGET_POSITIONS, topic_id)
    return table


def drop_unwanted_mirror(transaction: Transaction, topic_id: int) -> TableRecord | None:
    """Drop the table of a topic if the topic is not to have one; the table."""
    return None if _is_wanted(transaction, topic_id) else drop_mirror(transaction, topic_id)


# --- new segments --------------------------------------------------------------


def pending_segments(reader: Reader, topic_id: int, most: int) -> list[Pending]:
    """Segments that are not in the table yet, at most so many, by partition."""
    found: list[Pending] = []
    left = most
    for number, object_id, log_start, position in reader.all(PLACES, topic_id):
        if left <= 0:
            break
        start = max(log_start, position or 0)
        rows = tuple(row_of(schema.segments, row) for row in reader.all(SEGMENTS_FROM, topic_id, number, start, left))
        if rows:
            left -= len(rows)
            found.append(Pending(topic_id, number, object_id, position, start, rows))
    return found


def mirror_segments(
    transaction: Transaction, table: TableRecord, pending: Sequence[Pending], files: Sequence[NewFile], commit_id: str
) -> Committed | None:
    """Put segments into the table of their topic, as one version; none if none of them has a file.

    `MirrorMoved` is raised if they are no longer what was read, and nothing happens.
    """
    topic_id = pending[0].topic_id
    if transaction.one(SHARE_TOPIC_BY_ID, topic_id) is None:
        raise not_found(table.name)
    transaction.lock(*(item.object_id for item in pending))
    for item in pending:
        _require_same(transaction, item)
    locked_table(transaction, table)
    done = None
    if files:
        done = commit_change(transaction, table, _by_topic("append", files), commit_id)
    for item in pending:
        _set_position(transaction, topic_id, item.partition_id, item.end)
    failpoints.reach("mirror.written")
    return done


def _require_same(transaction: Transaction, item: Pending) -> None:
    position = transaction.one(POSITION, item.topic_id, item.partition_id)
    where = (item.topic_id, item.partition_id, item.start, len(item.segments))
    ids = [row_of(schema.segments, row)["id"] for row in transaction.all(SEGMENTS_FROM, *where)]
    same = (None if position is None else position[0]) == item.position
    if not same or ids != [segment["id"] for segment in item.segments]:
        raise MirrorMoved(f"{item.topic_id}/{item.partition_id}")


def _set_position(transaction: Transaction, topic_id: int, number: int, following: int) -> None:
    if transaction.run(SET_POSITION, following, topic_id, number) == 0:
        transaction.run(INSERT_POSITION, topic_id, number, following)


# --- segments that go ----------------------------------------------------------


def shown_below_log_start(reader: Reader, topic_id: int, most: int) -> list[int]:
    """Files of a topic's table that are segments which no reader without a lease finds any more; at most so many."""
    found: list[int] = []
    for number, log_start in reader.all(WITH_SEGMENTS_BELOW, topic_id):
        found += [row[0] for row in reader.all(SHOWN_BELOW, topic_id, number, log_start, most - len(found))]
        if len(found) == most:
            break
    return found


def hide_below_log_start(transaction: Transaction, table: TableRecord, most: int) -> Committed | None:
    """End the files of at most so many segments below the log start, which leases may keep; none if there are none.

    The table's lock is enough: what is below the log start only ever goes, and ends under the same lock.
    """
    assert table.topic_id is not None
    locked_table(transaction, table)
    ids = shown_below_log_start(transaction, table.topic_id, most)
    return commit_change(transaction, table, _by_topic("delete", (), ids), new_id()) if ids else None


def replace_mirrored(
    transaction: Transaction, old: Sequence[Mapping[str, Any]], new: Mapping[str, Any], commit_id: str, make: MakeFile
) -> Committed | None:
    """Follow a merge in the table of the topic: the segments of `old`, in order, became `new`.

    The transaction holds the partition's lock. Segments that are not in the table yet are put into it first,
    so that the version of the merge changes no record. None if none of them is in the table: then the merged
    one is mirrored as any other.
    """
    topic_id, number = new["topic_id"], new["partition_id"]
    table = mirror_of(transaction, topic_id)
    position = transaction.one(POSITION, topic_id, number)
    if table is None or position is None or position[0] <= old[0]["base_offset"]:
        return None
    locked_table(transaction, table)
    late = [row for row in old if row["base_offset"] >= position[0]]
    footers = load_footers(transaction, [new["s3_key"], *(row["s3_key"] for row in late)])
    made = {path: footer.metadata for path, footer in footers.items()}
    if late:
        change = _by_topic("append", [make(row, made[row["s3_key"]]) for row in late])
        commit_change(transaction, table, change, commit_id)
        # Each version has a time of its own.
        transaction.set_time(table.object_id, transaction.time_of(table.object_id) + 1)
        _set_position(transaction, topic_id, number, new["end_offset"] + 1)
    ended = [row["id"] for row in _rows_of(transaction, [row["s3_key"] for row in old]) if row["to_version"] is None]
    if len(ended) != len(old):
        raise MergeConflict(
            "some of the segments are not in the topic's table, and others are",
            on=table.shown,
            remedy="Merge segments from the log start on, that have files",
        )
    change = _by_topic("replace", [make(new, made[new["s3_key"]])], ended)
    return commit_change(transaction, table, change, commit_id)


def require_followed(transaction: Transaction, paths: Sequence[str]) -> None:
    """Refuse a merge of segments that a live table still shows: nobody has told it."""
    for row in _rows_of(transaction, paths):
        if row["to_version"] is None and transaction.one(GET_TABLE_BY_ID, row["table_id"]) is not None:
            raise MergeConflict(
                "the topic's table was not told of the merge", on=row["file_path"], remedy="Merge with `then`"
            )


def _by_topic(operation: str, added: Sequence[NewFile], removed: Sequence[int] = ()) -> TableChange:
    # The paths are the segments' own, so nobody else has them; nor does anybody else write to the table.
    return TableChange(operation, added, removed, checked=True, waits=False, by_topic=True)


def kept_by_tables(transaction: Transaction, paths: Sequence[str]) -> set[str]:
    """Which files of segments that are gone a table keeps; their bytes follow its history.

    The transaction holds the partition's lock. What is still a live file of the topic's table ends here, in a
    version of its own. The rest may go when no reader of the topic needs it.
    """
    tables = {}
    for table_id in sorted({row["table_id"] for row in _rows_of(transaction, paths)}):
        found = transaction.one(TABLE_ROW, table_id)
        if found is not None:
            tables[table_id] = row_of(schema.tables, found)["object_id"]
    transaction.lock(*tables.values())
    # Read again under the locks: history may have let go of them meanwhile.
    rows = _rows_of(transaction, paths)
    for table_id in tables:
        found = transaction.one(GET_TABLE_BY_ID, table_id)
        table = None if found is None else table_from(found)
        ended = [row["id"] for row in rows if row["table_id"] == table_id and row["to_version"] is None]
        # A dropped one is emptied as a whole.
        if ended and table is not None and table.topic_id is not None:
            commit_change(transaction, table, _by_topic("delete", (), ended), new_id())
    return {row["file_path"] for row in rows if row["retired_at"] is None}


def _rows_of(reader: Reader, paths: Sequence[str]) -> list[dict[str, Any]]:
    return [
        row_of(schema.table_files, row)
        for chunk in chunks(paths)
        for row in reader.all(FILES_BY_PATH, reader.listed(chunk))
    ]


# --- checks --------------------------------------------------------------------


def check_mirrors(reader: Reader) -> Iterator[Finding]:
    """What must not be: a table that shows other records than its topic."""
    after = ""
    while page := [row[0] for row in reader.all(MIRRORED_FILES, after, CHUNK)]:
        known = segment_paths(reader, page)
        yield from (Finding("mirrors", path, _NO_SEGMENT) for path in page if path not in known)
        after = page[-1]
    for statement, what in ((MIRRORED_BUT_RETIRED, _NO_SEGMENT), (NOT_MIRRORED, "it is missing in its topic's table")):
        yield from (Finding("mirrors", path, what) for (path,) in reader.all(statement))
    for topic_id, number in reader.all(POSITIONS_OF_NOTHING):
        yield Finding("mirrors", f"topic {topic_id}/{number}", "it is mirrored to nowhere, or beyond its watermark")


_NO_SEGMENT = "its topic's table has it, and the topic has not"
