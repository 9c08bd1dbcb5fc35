"""A registry on its way to another warehouse: which objects it needs there, and what changes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.footers import FORMAT_VERSION
from lakebook.registry.merges import release_all_retired
from lakebook.registry.pipelines import LEASES
from lakebook.registry.publishing import STATISTICS
from lakebook.registry.statements import Statement, bind
from lakebook.registry.stream_folders import TOPICS
from lakebook.registry.temporary_files import NOT_DELETED
from lakebook.registry.transactions import Reader, Transaction

_f = schema.table_files.c
_s = schema.segments.c
_t = schema.temporary_files.c
_i = schema.iceberg_files.c
_m = schema.partition_metadata.c
_v = schema.table_versions.c
_AT_ONCE = 500
_NO_CHECKSUM = sa.cast(sa.null(), sa.Text)

_plain = sa.union_all(
    sa.select(_f.file_path, _f.file_size, _f.checksum).where(_f.retired_at.is_(None), _f.content == 0),
    sa.select(_s.s3_key, _s.size_bytes, _s.checksum),
    *(
        sa.select(table.c.file_path, table.c.file_size, _NO_CHECKSUM).where(table.c.file_path.is_not(None))
        for table in (schema.lakehouse_partitions, schema.branch_files)
    ),
    sa.select(_i.file_path, _i.file_size, _NO_CHECKSUM).where(_i.kind == sa.literal_column(f"'{STATISTICS}'")),
).subquery()
_path, _size, _checksum = _plain.columns
_wanted = _path.not_in(sa.select(_t.file_path))
# A file may be in several tables: the topic's own and the one that it is published as.
PLAIN_OBJECTS = Statement(
    sa.select(_path, sa.func.max(_size), sa.func.max(_checksum)).where(_wanted).group_by(_path).order_by(_path)
)
COUNT_OBJECTS = Statement(sa.select(sa.func.count(sa.distinct(_path))).where(_wanted))
DELETE_FILES = Statement(
    sa.select(_f.file_path).distinct().where(_f.content != 0, _f.retired_at.is_(None)).order_by(_f.file_path)
)
FILES_OF_KIND = Statement(
    sa.select(_i.file_path).where(_i.table_id == bind("of_table"), _i.kind == bind("of_kind")).order_by(_i.file_path),
    "of_table",
    "of_kind",
)
PUBLISHED_TABLES = Statement(sa.select(schema.iceberg_tables.c.table_id).order_by(schema.iceberg_tables.c.table_id))
LOCATIONS = Statement(sa.select(schema.iceberg_tables.c.location).distinct().order_by(schema.iceberg_tables.c.location))


def _of_readers(table: sa.Table) -> sa.Delete:
    head = sa.literal_column(f"'{LEASES}'", sa.Text)
    return sa.delete(table).where(sa.func.substr(table.c.id, 1, len(LEASES)) != head)


# Nobody reads a book that is yet to be. What its pipelines have still to read stays pinned.
END_LEASES = Statement(_of_readers(schema.leases))
END_TOPIC_LEASES = Statement(_of_readers(schema.topic_leases))
# What is retired is not copied: it is as good as deleted, and only its rows remain.
FORGET_RETIRED = Statement(
    sa.update(schema.temporary_files).where(NOT_DELETED).values(state=sa.literal_column("'deleting'"))
)
PLAIN_LOCATIONS = Statement(sa.update(schema.table_files).values(location=sa.null()).where(_f.location.is_not(None)))
SET_ICEBERG_SIZE = Statement(
    sa.update(schema.iceberg_files).where(_i.file_path == bind("path")).values(file_size=bind("size")), "size", "path"
)
SET_BRANCH_SIZE = Statement(
    sa.update(schema.branch_files)
    .where(schema.branch_files.c.file_path == bind("path"))
    .values(file_size=bind("size")),
    "size",
    "path",
)
ROWS_OF_PATH = Statement(
    sa.select(_f.table_id, _f.id, _f.file_size, _f.from_version, _f.to_version).where(_f.file_path == bind("path")),
    "path",
)
SET_FILE = Statement(
    sa.update(schema.table_files)
    .where(_f.table_id == bind("of_table"), _f.id == bind("file_id"))
    .values(file_size=bind("size"), checksum=bind("sum")),
    "size",
    "sum",
    "of_table",
    "file_id",
)
SET_FOOTER = Statement(
    sa.update(schema.partition_metadata)
    .where(_m.file_path == bind("path"))
    .values(
        metadata=bind("footer"),
        file_size=bind("size"),
        partition_format_version=sa.literal_column(str(FORMAT_VERSION), sa.Integer),
    ),
    "footer",
    "size",
    "path",
)

SET_CHECKSUM = Statement(
    sa.update(schema.table_files).where(_f.file_path == bind("path")).values(checksum=bind("sum")), "sum", "path"
)
SET_SEGMENT_CHECKSUM = Statement(
    sa.update(schema.segments).where(_s.s3_key == bind("path")).values(checksum=bind("sum")), "sum", "path"
)


def _grown(table: sa.Table, column: str, *where: Any) -> sa.Update:
    return sa.update(table).where(*where).values({column: table.c[column] + bind("delta", sa.BigInteger)})


GROW_TABLE = Statement(_grown(schema.tables, "total_size", schema.tables.c.id == bind("of_table")), "delta", "of_table")
GROW_STATS = Statement(
    _grown(schema.table_stats, "total_size", schema.table_stats.c.table_id == bind("of_table")), "delta", "of_table"
)
_of_version = (_v.table_id == bind("of_table"), _v.version == bind("at"))
_p = schema.table_snapshots.c
SUMMARIES = Statement(
    sa.select(_p.snapshot_id, _p.version, _p.summary, _v.summary)
    .select_from(
        schema.table_snapshots.outerjoin(
            schema.table_versions, sa.and_(_v.table_id == _p.table_id, _v.version == _p.version)
        )
    )
    .where(_p.table_id == bind("of_table")),
    "of_table",
)
SET_SUMMARY = Statement(
    sa.update(schema.table_snapshots)
    .where(_p.table_id == bind("of_table"), _p.snapshot_id == bind("of_snapshot"))
    .values(summary=bind("said", sa.Text)),
    "said",
    "of_table",
    "of_snapshot",
)
SET_VERSION_SUMMARY = Statement(
    sa.update(schema.table_versions).where(*_of_version).values(summary=bind("said", sa.Text)),
    "said",
    "of_table",
    "at",
)
GROW_ADDED = Statement(_grown(schema.table_versions, "added_size", *_of_version), "delta", "of_table", "at")
GROW_REMOVED = Statement(_grown(schema.table_versions, "removed_size", *_of_version), "delta", "of_table", "at")


@dataclass(frozen=True)
class Rewritten:
    """A file of deletes that was written anew: it names files by where they are."""

    path: str
    size: int
    checksum: str
    footer: bytes


def leave_behind(transaction: Transaction) -> None:
    """Let go of what is not copied: readers, what they alone need, what is retired, and spellings of places."""
    transaction.run(END_LEASES)
    transaction.run(END_TOPIC_LEASES)
    while release_all_retired(transaction, _AT_ONCE) == _AT_ONCE:
        pass
    transaction.run(PLAIN_LOCATIONS)
    forget_removed(transaction)


def forget_removed(transaction: Transaction) -> None:
    """Take what waits for its removal for deleted."""
    transaction.run(FORGET_RETIRED)


def plain_objects(reader: Reader) -> Iterator[tuple[str, int, str | None]]:
    """Every object that is copied as it is: path, size, and the checksum where there is one."""
    for path, size, checksum in reader.each(PLAIN_OBJECTS):
        yield path, size, checksum or None


def count_objects(reader: Reader) -> int:
    """How many those are."""
    row = reader.one(COUNT_OBJECTS)
    return int(row[0]) if row is not None else 0


def published_at(reader: Reader) -> Iterator[str]:
    """The folders that published tables have: outside engines may have chosen them."""
    return (row[0] for row in reader.each(LOCATIONS))


def files_of_kind(reader: Reader, table_id: int, kind: str) -> list[str]:
    """Iceberg's own files of a published table."""
    return [row[0] for row in reader.all(FILES_OF_KIND, table_id, kind)]


def note_rewritten(transaction: Transaction, file: Rewritten) -> None:
    """Record the new size of a file of deletes wherever the former one is known."""
    transaction.run(SET_BRANCH_SIZE, file.size, file.path)
    transaction.run(SET_FOOTER, file.footer, file.size, file.path)
    for table_id, file_id, former, first, end in transaction.all(ROWS_OF_PATH, file.path):
        transaction.run(SET_FILE, file.size, file.checksum, table_id, file_id)
        delta = file.size - former
        transaction.run(GROW_ADDED, delta, table_id, first)
        if end is None:
            transaction.run(GROW_TABLE, delta, table_id)
            transaction.run(GROW_STATS, delta, table_id)
        else:
            transaction.run(GROW_REMOVED, delta, table_id, end)


def note_sizes(transaction: Transaction, sizes: dict[str, int]) -> None:
    """Record the sizes of Iceberg's own files."""
    transaction.run_many(SET_ICEBERG_SIZE, [(size, path) for path, size in sizes.items()])


def grown_summary(summary: Mapping[str, str], grown: Mapping[str, int]) -> dict[str, str]:
    """A snapshot's summary whose sizes, as far as it has them, have grown by so many bytes."""
    found = dict(summary)
    for name, more in grown.items():
        if str(found.get(name, "")).isdecimal():
            found[name] = str(max(0, int(found[name]) + more))
    return found


def note_summaries(transaction: Transaction, table_id: int, grown: Mapping[int, Mapping[str, int]]) -> None:
    """Record the sizes in the summaries of snapshots, and of the versions that outside engines made with them."""
    if not grown:
        return
    for snapshot_id, version, *summaries in transaction.all(SUMMARIES, table_id):
        more = grown.get(snapshot_id)
        if more is None:
            continue
        ours, of_version = (
            orjson.dumps(grown_summary(orjson.loads(said) if isinstance(said, str) else said, more)).decode()
            if said is not None
            else None
            for said in summaries
        )
        transaction.run(SET_SUMMARY, ours, table_id, snapshot_id)
        if of_version is not None:
            transaction.run(SET_VERSION_SUMMARY, of_version, table_id, version)


def note_checksums(transaction: Transaction, sums: list[tuple[str, str]]) -> None:
    """Record checksums of bytes, by path, in place of what another store knew them by."""
    transaction.run_many(SET_CHECKSUM, [(checksum, path) for path, checksum in sums])
    for path, checksum in sums:
        # Not by an index: only for segments.
        if path.startswith(f"{TOPICS}/"):
            transaction.run(SET_SEGMENT_CHECKSUM, checksum, path)
