"""The sources of a view: which topics and tables its query names, and their rows of one range of time, pinned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

from lakebook.clock import to_datetime, to_ms
from lakebook.errors import InvalidView, SourceNotFound, TableNotFound
from lakebook.iceberg.schemas import describe_type
from lakebook.iceberg.sql_names import Query
from lakebook.lake.lake import Lake, check_reachable
from lakebook.lake.leasing import acquire
from lakebook.lake.table import PinnedTable
from lakebook.names import shown
from lakebook.registry import schema
from lakebook.registry.changes import row_of
from lakebook.registry.freshness import TABLE, TOPIC
from lakebook.registry.tables import (
    DEFAULT_NAMESPACE,
    GET_TABLE,
    GET_TABLE_BY_ID,
    TableRecord,
    table_from,
)
from lakebook.registry.topics import ANY_TOPIC
from lakebook.registry.transactions import Reader
from lakebook.registry.views import NAMESPACE, Source, ViewRecord, last_change
from lakebook.spark import queries
from lakebook.spark.session import check_spark
from lakebook.spark.topics import read_segments
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.pinning import Pin
from lakebook.streams.ranges import pin_starts

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession
    from lakebook.views.definition import Definition

#: The event time of a topic's records.
TIMESTAMP = "timestamp"
_WITH_ZONE, _WITHOUT_ZONE = "timestamptz", "timestamp"


def split_source(name: str) -> tuple[str, str]:
    """Namespace and name of a table, as a query writes it."""
    if name.startswith(f"{NAMESPACE}."):
        # Of a view with instances, the name of the table has a dot.
        return NAMESPACE, name.removeprefix(f"{NAMESPACE}.")
    head, dot, tail = name.rpartition(".")
    return (head, tail) if dot else (DEFAULT_NAMESPACE, name)


def find_table(reader: Reader, name: str) -> TableRecord | None:
    """The table that a query names, if there is one."""
    row = reader.one(GET_TABLE, *split_source(name))
    return None if row is None else table_from(row)


def unknown_source(name: str, on: str) -> SourceNotFound:
    """The error for a name that nothing has."""
    return SourceNotFound(
        f"there is no view, table or topic {shown(name)}",
        on=on,
        remedy="`lakebook views list`, `tables list` and `topics list` show which there are",
    )


def resolve(lake: Lake, metadata: MetadataStore, name: str, query: Query, wanted: Definition) -> list[Source]:
    """The topics and tables that a view's query reads, each with its event time."""
    return [_resolved(lake, metadata, name, source, wanted) for source in query.names]


def _resolved(lake: Lake, metadata: MetadataStore, own: str, name: str, wanted: Definition) -> Source:
    on = f"view {own}"
    table = lake.registry.read_with(lambda reader: find_table(reader, name))
    if table is not None:
        if table.view_id is not None and (table.namespace, table.name.partition(".")[0]) == (NAMESPACE, own):
            raise InvalidView("it would read itself", on=on, remedy="Name another source")
        column = wanted.event_times.get(name, wanted.event_time)
        fields = {field.name: field for field in lake.shape_of(table, table.schema_version).schema.fields}
        field = fields.get(column)
        if field is None or describe_type(field.field_type) not in (_WITH_ZONE, _WITHOUT_ZONE):
            raise InvalidView(
                f"{table.shown} has no column {shown(column)} of timestamps, to be its event time",
                on=on,
                remedy="Name its event time with event_time, or with event_times for each source",
            )
        return Source(name, TABLE, table.id, column, field.field_id)
    topic = metadata.get_topics([name]).get(name)
    if topic is None:
        raise unknown_source(name, on)
    return Source(name, TOPIC, topic.id, TIMESTAMP, None)


@dataclass(frozen=True)
class OpenSources:
    """The rows of all sources in a range, good within the block."""

    frames: dict[str, DataFrame]
    #: Tells what the sources were: compactions, merges and retention do not change it.
    source_hash: str
    #: Whether none of them has a file with rows of the range.
    is_empty: bool


@contextmanager
def opened(
    lake: Lake, metadata: MetadataStore, spark: SparkSession, view: ViewRecord, begin: int, end: int
) -> Iterator[OpenSources]:
    """Pin all sources of a view, and have their rows of a range as frames."""
    check_spark(spark, lake.store.warehouse)
    check_reachable(lake)
    first, last = to_datetime(begin), to_datetime(end)
    frames: dict[str, DataFrame] = {}
    marks: list[Any] = []
    files = 0
    with ExitStack() as pins:
        for source in view.sources:
            if source.kind == TABLE:
                found = _table_rows(lake, spark, view, source, (first, last), pins)
            else:
                found = _topic_rows(lake, metadata, spark, view, source, (first, last), pins)
            frames[source.name] = found.frame
            marks.append([source.kind, source.id, found.mark])
            files += found.files
        yield OpenSources(frames, combined_hash(marks), not files)


@dataclass(frozen=True)
class _Rows:
    """The rows of a source in a range, what the source was, and how many files can have such rows."""

    frame: DataFrame
    mark: Any
    files: int


def combined_hash(parts: Sequence[Any]) -> str:
    """One hash of several plain values."""
    return xxhash.xxh3_128_hexdigest(orjson.dumps(list(parts)))


def _table_rows(
    lake: Lake, spark: SparkSession, view: ViewRecord, source: Source, times: tuple[datetime, datetime], pins: ExitStack
) -> _Rows:
    row = lake.registry.one(GET_TABLE_BY_ID, source.id)
    if row is None:
        raise TableNotFound(f"its source {shown(source.name)} was dropped", on=view.shown, remedy="Alter the view")
    table = table_from(row)
    pinned = pins.enter_context(PinnedTable(lake, acquire(lake, table)))
    fields = {field.field_id: field for field in lake.shape_of(table, pinned.lease.schema_version).schema.fields}
    field = fields.get(source.field_id)
    if field is None:
        raise InvalidView(
            f"the column {shown(source.event_time)} of {table.shown} is gone", on=view.shown, remedy="Alter the view"
        )
    zone = "+00:00" if describe_type(field.field_type) == _WITH_ZONE else ""
    low, high = (time.replace(tzinfo=None).isoformat(timespec="milliseconds") + zone for time in times)
    column = '"' + field.name.replace('"', '""') + '"'
    where = f"{column} >= '{low}' AND {column} < '{high}'"
    frame = pinned.read(spark, where)
    mark = lake.registry.read_with(lambda reader: last_change(reader, table.id, pinned.version))
    return _Rows(frame, pinned.version if mark is None else mark, len(pinned.plan(where).files))


def _topic_rows(
    lake: Lake,
    metadata: MetadataStore,
    spark: SparkSession,
    view: ViewRecord,
    source: Source,
    times: tuple[datetime, datetime],
    pins: ExitStack,
) -> _Rows:
    row = lake.registry.one(ANY_TOPIC, source.id)
    topic = None if row is None else row_of(schema.topics, row)
    if topic is None or topic["deleted_at"] is not None:
        raise SourceNotFound(f"its source {shown(source.name)} was deleted", on=view.shown, remedy="Alter the view")
    pin = pins.enter_context(Pin(lake))
    partitions, topic_id, starts = pin_starts(lake, metadata, pin, topic["name"])
    paths = []
    for number, partition in partitions.items():
        for segment in metadata.list_segments_in(topic_id, number, starts[number], partition.high_watermark):
            assert segment.min_timestamp is not None and segment.max_timestamp is not None
            if to_ms(segment.min_timestamp) < to_ms(times[1]) and to_ms(segment.max_timestamp) >= to_ms(times[0]):
                paths.append(lake.store.uri(segment.s3_key))
    on_disk = lake.store.warehouse.folder is not None
    rows = read_segments(spark, paths, [], {}, on_disk=on_disk)
    marks = {str(number): partition.high_watermark for number, partition in partitions.items()}
    return _Rows(queries.between(rows, TIMESTAMP, *times), marks, len(paths))
