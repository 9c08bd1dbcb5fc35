"""Mirroring: a topic with `iceberg=true` is an Iceberg table too, which nobody but the topic changes.

Its files are the topic's segments, where they lie: no byte is copied. Whoever mirrors puts the segments that came
since into the table, as one version at a time. Merges and retention change the table by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pyarrow.parquet import FileMetaData

from lakebook import failpoints
from lakebook.clock import to_datetime, to_ms
from lakebook.errors import RegistryBusy, TableAlreadyExists, TableNotFound, TopicNotFound
from lakebook.iceberg.partitioning import (
    order_to_json,
    partition_path,
    partition_spec,
    partition_to_json,
    sort_order,
    spec_to_json,
)
from lakebook.iceberg.schemas import last_field_id, schema_from, schema_to_json
from lakebook.iceberg.statistics import footer_columns, partition_of, partition_stats, stats_from_footer
from lakebook.lake.footers import open_footer, upgraded
from lakebook.lake.lake import Lake
from lakebook.lake.measuring import PARQUET
from lakebook.registry.footers import load_footers
from lakebook.registry.mirrors import (
    MIRROR,
    NAMESPACE,
    MirrorMoved,
    Pending,
    create_mirror,
    drop_unwanted_mirror,
    former_mirrors,
    hide_below_log_start,
    is_mirrored,
    mirror_of,
    mirror_segments,
    pending_segments,
    replace_mirrored,
    shown_below_log_start,
)
from lakebook.registry.retirement import Grace, expire_versions
from lakebook.registry.segments import SegmentInfo
from lakebook.registry.table_files import Committed, NewFile
from lakebook.registry.tables import NewTable, TableRecord
from lakebook.registry.topics import GET_TOPIC, Topic, not_found, topic_from
from lakebook.registry.transactions import Reader, Transaction
from lakebook.streams.segment_files import SEGMENT_SCHEMA

LOG = logging.getLogger("lakebook.mirroring")

# Segments that one version takes at most: their footers and statistics make one short transaction.
_MOST_SEGMENTS = 500
# How often in a row others may come first.
_MOST_TRIES = 50
# The schema of the segments never changes, and so the table has only this one.
_SCHEMA_VERSION = 1
_ENGINE = "lakebook"


@dataclass(frozen=True)
class MirrorReport:
    """What mirroring a topic did."""

    topic: str
    #: The table; none if the topic has none.
    table: str | None = None
    #: The newest version that this made, if it made one.
    version: int | None = None
    versions: int = 0
    files: int = 0
    rows: int = 0
    #: Files below the log start that left the table: retention has removed them, and leases keep them.
    removed: int = 0
    #: Whether the table was dropped, because the topic is not to be one any more.
    dropped: bool = False
    #: Why nothing could be done yet.
    waits: str = ""

    def _and(self, done: Committed | None, files: int) -> MirrorReport:
        if done is None:
            return self
        return replace(
            self,
            version=done.version,
            versions=self.versions + 1,
            files=self.files + files,
            rows=self.rows + done.added_rows,
            removed=self.removed + done.removed_files,
        )


# --- the shape of the table ----------------------------------------------------


@cache
def _shape() -> tuple[Any, Any, Any]:
    """Schema, partitioning and order: those of the segments' files, field ids and all."""
    schema = schema_from(SEGMENT_SCHEMA)
    return schema, partition_spec(schema, ["partition"]), sort_order(schema, ["offset"])


def _new_table(topic: Topic) -> NewTable:
    schema, spec, order = _shape()
    return NewTable(
        NAMESPACE,
        topic.name,
        schema_to_json(schema),
        last_field_id(schema),
        spec_to_json(spec),
        order_to_json(order),
        PARQUET,
        # What engines would write with, if they could.
        "zstd",
        _ENGINE,
        {},
        {},
        topic_id=topic.id,
    )


def mirrored_file(segment: Mapping[str, Any], footer: bytes) -> NewFile:
    """A segment as a file of the table, from its row and its footer; the file itself is not opened."""
    schema, spec, _ = _shape()
    path = segment["s3_key"]
    opened = open_footer(footer, on=path)
    columns = footer_columns(opened, schema)
    stats = () if columns is None else stats_from_footer(columns, ours=True)
    record = partition_of(spec, schema, stats)
    return NewFile(
        file_path=path,
        file_size=segment["size_bytes"],
        file_type=PARQUET,
        row_count=segment["record_count"],
        checksum=segment["checksum"] or "",
        schema_version=_SCHEMA_VERSION,
        modified_at=to_datetime(segment["created_at"]),
        row_groups=opened.num_row_groups,
        is_compressed=_is_compressed(opened),
        partition_path=partition_path(spec, schema, record),
        partition_values=partition_to_json(spec, schema, record),
        spec_id=spec.spec_id,
        has_statistics=bool(stats),
        stats=stats + partition_stats(spec, schema, record),
    )


def _is_compressed(opened: FileMetaData) -> bool:
    return opened.num_row_groups > 0 and str(opened.row_group(0).column(0).compression) != "UNCOMPRESSED"


# --- mirroring -----------------------------------------------------------------


def mirror_topic(lake: Lake, topic: str) -> MirrorReport:
    """Bring the table of a topic up to date with the topic, and have it published as the book is set.

    The table is made where the topic is to have one, and dropped where it is not. Several may do this at once.
    """
    row = lake.registry.one(GET_TOPIC, topic)
    if row is None:
        raise not_found(topic)
    found = topic_from(row)
    if not is_mirrored(found.config):
        return _without_table(lake, found)
    table = lake.registry.read_with(lambda reader: mirror_of(reader, found.id)) or _created(lake, found)
    if table is None:
        waits = "its former table is read, or not emptied yet"
        return MirrorReport(topic, waits=waits if _has_former(lake, found.id) else "")
    report = MirrorReport(topic, f"{table.namespace}.{table.name}")
    try:
        report = _mirror_all(lake, found, table, report)
    except TableNotFound:
        return replace(report, dropped=True)  # Turned off meanwhile.
    if report.version is not None:
        lake.changed(table, report.version)
    else:
        lake.notice(table)  # Retention or a merge may have changed it.
    return report


def _without_table(lake: Lake, topic: Topic) -> MirrorReport:
    if lake.registry.read_with(lambda reader: mirror_of(reader, topic.id)) is None:
        return MirrorReport(topic.name)
    dropped = lake.registry.write(lambda transaction: drop_unwanted_mirror(transaction, topic.id))
    return MirrorReport(topic.name, dropped=dropped is not None)


def _created(lake: Lake, topic: Topic) -> TableRecord | None:
    """The table of a topic, which has just been made; none if it cannot be made."""
    _empty_former(lake, topic.id)
    wanted = _new_table(topic)
    return lake.registry.write_opened(
        "table", lambda transaction, commit_id: create_mirror(transaction, wanted, commit_id)
    )


def _has_former(lake: Lake, topic_id: int) -> bool:
    return bool(lake.registry.read_with(lambda reader: former_mirrors(reader, topic_id)))


def _empty_former(lake: Lake, topic_id: int) -> None:
    """Let dropped tables of the topic let go of its segments, as far as nobody reads them."""
    settings, now = lake.settings, lake.clock.now_ms()
    grace = Grace(settings.temporary_file_grace, settings.published_grace)
    for table_id, object_id in lake.registry.read_with(lambda reader: former_mirrors(reader, topic_id)):
        more = True
        while more:
            done = lake.registry.write(
                lambda transaction: expire_versions(transaction, table_id, object_id, now, 1, grace, ())  # noqa: B023 - called at once
            )
            more = done.more


def _mirror_all(lake: Lake, topic: Topic, table: TableRecord, report: MirrorReport) -> MirrorReport:
    while lake.registry.read_with(lambda reader: shown_below_log_start(reader, topic.id, 1)):
        report = report._and(
            lake.registry.write(lambda transaction: hide_below_log_start(transaction, table, _MOST_SEGMENTS)), 0
        )
    tries = 0
    while tries < _MOST_TRIES:
        pending, files = lake.registry.in_snapshot(lambda reader: _read(reader, topic.id))
        if not pending:
            return report
        try:
            done = lake.registry.write_opened(
                MIRROR,
                lambda transaction, commit_id: mirror_segments(transaction, table, pending, files, commit_id),  # noqa: B023 - called at once
            )
        except MirrorMoved:
            # Merged, removed, or mirrored by somebody else: none of them can go on for ever.
            tries += 1
            continue
        failpoints.reach("mirror.committed")
        tries = 0
        report = report._and(done, len(files))
    raise RegistryBusy(
        f"others were faster {_MOST_TRIES} times", on=f"topic {topic.name}", remedy="Mirror it again later"
    )


def _read(reader: Reader, topic_id: int) -> tuple[list[Pending], list[NewFile]]:
    """Segments that are not in the table yet, and the files they are. Those without a footer have no file of ours."""
    pending = pending_segments(reader, topic_id, _MOST_SEGMENTS)
    segments = [segment for item in pending for segment in item.segments]
    footers = load_footers(reader, [segment["s3_key"] for segment in segments])
    files = []
    for segment in segments:
        footer = footers.get(segment["s3_key"])
        if footer is not None:
            version = footer.partition_format_version
            whole = upgraded(footer.metadata, version, segment["record_count"], on=footer.file_path)
            files.append(mirrored_file(segment, whole))
    return pending, files


def bring_up_to_date(lake: Lake, namespace: str, name: str) -> None:
    """Mirror the topic whose table is about to be loaded through a catalog, if it is one."""
    if namespace != NAMESPACE:
        return
    try:
        mirror_topic(lake, name)
    except TopicNotFound:
        return
    except TableAlreadyExists as error:
        LOG.warning("%s", error)  # A table of somebody's own: that is what is loaded.


def follow_merge(
    transaction: Transaction, topic_id: int, old: Sequence[SegmentInfo], new: SegmentInfo, commit_id: str
) -> None:
    """Follow a merge in the topic's table, in the transaction of the merge."""
    now = transaction.clock.now_ms()
    rows = [_row(topic_id, segment, now) for segment in (*old, new)]
    replace_mirrored(transaction, rows[:-1], rows[-1], commit_id, mirrored_file)


def _row(topic_id: int, segment: SegmentInfo, now: int) -> dict[str, Any]:
    return {
        **vars(segment),
        "topic_id": topic_id,
        "created_at": now if segment.created_at is None else to_ms(segment.created_at),
    }
