"""What a check of the segments' bytes asks of the registry: which files there are, and which of them still count."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.footers import StoredFooter, load_footers
from lakebook.registry.segments import SEGMENT_COLUMNS, SegmentInfo, segment_from
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind
from lakebook.registry.stream_folders import TOPICS
from lakebook.registry.transactions import Reader

_s = schema.segments.c
_t = schema.topics.c
_f = schema.partition_metadata.c
_r = schema.retired_segments.c
_d = schema.stream_folders.c

# A footer of ours lies below this folder, by one step into an index; "0" is what comes after "/".
ANY_FILE = Statement(
    sa.union_all(
        sa.select(ONE)
        .select_from(schema.partition_metadata)
        .where(_f.file_path >= sa.literal_column(f"'{TOPICS}/'"), _f.file_path < sa.literal_column(f"'{TOPICS}0'")),
        sa.select(ONE).select_from(schema.retired_segments),
    )
    .limit(ONE)
    .offset(ZERO)
)
# By their ids, which never change: what is recorded meanwhile may come or not.
SEGMENTS_WITH_FILES = Statement(
    sa.select(*SEGMENT_COLUMNS)
    .select_from(
        schema.segments.join(schema.partition_metadata, _f.file_path == _s.s3_key).join(
            schema.topics, _t.id == _s.topic_id
        )
    )
    .where(_s.id > bind("after"))
    .order_by(_s.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
RETIRED_FILES = Statement(
    sa.select(_r.file_path, _r.file_size)
    .where(_r.file_path > bind("after"))
    .order_by(_r.file_path)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)


def _among(column: sa.ColumnElement[str], name: str) -> Statement:
    clauses = [sa.select(column).where(among(column, name, database)) for database in (SQLITE, POSTGRESQL)]
    return Statement(clauses[0], name, postgresql=clauses[1])


IDS_AMONG = _among(_s.id, "ids")
RETIRED_AMONG = _among(_r.file_path, "paths")
FOLDERS_AMONG = _among(_d.folder, "folders")


def any_file(reader: Reader) -> bool:
    """Whether a segment has, or had, a file of ours. Those that were recorded by hand may have none."""
    return reader.one(ANY_FILE) is not None


def segments_with_files(reader: Reader, after: str, most: int) -> tuple[list[SegmentInfo], dict[str, StoredFooter]]:
    """Segments that have a footer, in the order of their ids, visible or on their way out, and the footers."""
    segments = [segment_from(row) for row in reader.all(SEGMENTS_WITH_FILES, after, most)]
    return segments, load_footers(reader, [segment.s3_key for segment in segments])


def retired_files(reader: Reader, after: str, most: int) -> list[tuple[str, int]]:
    """Files of merged segments that readers may need, with their sizes, in the order of their paths."""
    return [(path, size) for path, size in reader.all(RETIRED_FILES, after, most)]


def present_segments(reader: Reader, ids: Iterable[str]) -> set[str]:
    """Which segments are still there, by their ids."""
    return {row[0] for row in reader.all(IDS_AMONG, reader.listed(ids))}


def still_retired(reader: Reader, paths: Iterable[str]) -> set[str]:
    """Which files still wait for their readers."""
    return {row[0] for row in reader.all(RETIRED_AMONG, reader.listed(paths))}


def known_folders(reader: Reader, folders: Iterable[str]) -> set[str]:
    """Which folders are not forgotten yet."""
    return {row[0] for row in reader.all(FOLDERS_AMONG, reader.listed(folders))}
