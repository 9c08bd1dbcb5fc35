"""Tables as their users see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lakebook.errors import IncompatibleSchema, InvalidInput, NotAccepted, SparkUnsuitable
from lakebook.iceberg.commit_steps import check_names
from lakebook.iceberg.evolution import SchemaUpdate
from lakebook.iceberg.partitioning import order_texts, spec_texts
from lakebook.iceberg.schemas import describe_type, schema_to_json
from lakebook.iceberg.table_metadata import shapes_of
from lakebook.lake import compaction, rewriting, tagging
from lakebook.lake.appender import Appender
from lakebook.lake.compaction import CompactionReport
from lakebook.lake.extremes import Extremes, count_rows, extremes
from lakebook.lake.formats import FORMATS
from lakebook.lake.inserting import InsertReport, add_files, insert_arrow, insert_frame
from lakebook.lake.lake import Lake
from lakebook.lake.leasing import Lease, acquire, check_asked
from lakebook.lake.measuring import PARQUET
from lakebook.lake.planning import Plan, make_plan
from lakebook.lake.properties import check_table_properties
from lakebook.lake.published import PublishReport, publish_now, published_as
from lakebook.lake.reading import read_batches, read_frame, read_table
from lakebook.lake.sources import REFUSED, insert_json, insert_parquet
from lakebook.lake.tagging import Tag
from lakebook.names import shown
from lakebook.pages import Page, check_limit, page_of
from lakebook.registry.history import TableVersion, list_versions
from lakebook.registry.leases import resolve_version
from lakebook.registry.publishing import SnapshotRecord, snapshots_of
from lakebook.registry.schema import MAX_BIGINT
from lakebook.registry.tables import (
    TableMetadata,
    TableRecord,
    change_properties,
    change_schema,
    current_table,
    list_metadata,
    refuse_mirror,
)

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession


@dataclass(frozen=True)
class ColumnDescription:
    """A column of a table."""

    field_id: int
    name: str
    type: str
    required: bool
    doc: str | None


@dataclass(frozen=True)
class TableDescription:
    """Everything there is to say about a table, without its files."""

    namespace: str
    name: str
    id: int
    table_uuid: str
    format: str
    compression: str
    storage_engine: str
    version: int
    schema_version: int
    columns: tuple[ColumnDescription, ...]
    partition_by: tuple[str, ...]
    sort_by: tuple[str, ...]
    properties: Mapping[str, str]
    row_count: int
    file_count: int
    total_size: int
    last_modified: datetime
    created_at: datetime
    #: The newest version that is published as Iceberg, and the address of its metadata file.
    published_version: int | None
    metadata_location: str | None


class PinnedTable:
    """A version of a table that a lease pins: what it shows does not change or vanish."""

    def __init__(self, lake: Lake, lease: Lease) -> None:
        self._lake = lake
        self.lease = lease

    @property
    def version(self) -> int:
        """The version that is pinned."""
        return self.lease.version

    def plan(self, where: Any = None) -> Plan:
        """The files of this version that a predicate can match."""
        self.lease.check()
        return make_plan(self._lake, self.lease.table, self.lease.version, self.lease.schema_version, where)

    def read(self, spark: SparkSession, where: Any = None, columns: Sequence[str] | None = None) -> DataFrame:
        """The rows of this version as a Spark DataFrame, good for as long as the lease is held."""
        return read_frame(spark, self.plan(where), self.lease, columns)

    def to_arrow(self, where: Any = None, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of this version as an Arrow table."""
        return read_table(self.plan(where), self.lease, columns)

    def to_batches(self, where: Any = None, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of this version, batch by batch."""
        return read_batches(self.plan(where), self.lease, columns)

    def count(self) -> int:
        """The number of rows, from the registry; where rows are deleted, the files of deletes are read."""
        return count_rows(self._lake, self.lease)

    def __enter__(self) -> PinnedTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.lease.close()


class Table:
    """One table. Its files change only through here, or by another process through its own."""

    def __init__(self, lake: Lake, record: TableRecord) -> None:
        self._lake = lake
        self._record = record

    def __repr__(self) -> str:
        return f"Table({self._record.namespace!r}, {self._record.name!r})"

    @property
    def namespace(self) -> str:
        """The namespace it is in."""
        return self._record.namespace

    @property
    def name(self) -> str:
        """Its name."""
        return self._record.name

    @property
    def id(self) -> int:
        """Its internal id, which is in every path and event."""
        return self._record.id

    # --- describing ----------------------------------------------------------------

    @property
    def record(self) -> TableRecord:
        """The table's row as it is now: version and exact totals."""
        return self._current()

    @property
    def version(self) -> int:
        """The newest version."""
        return self._current().version

    def _current(self) -> TableRecord:
        self._record = self._lake.registry.read_with(lambda reader: current_table(reader, self._record))
        return self._record

    @property
    def metadata(self) -> TableMetadata:
        """The present schema, partitioning, sort order and properties."""
        record = self._current()
        return self._lake.metadata_of(record, record.schema_version)

    def metadata_history(self) -> list[TableMetadata]:
        """Every schema version there has been."""
        return self._lake.registry.read_with(lambda reader: list_metadata(reader, self._current()))

    @property
    def schema(self) -> Any:
        """The present schema, as PyIceberg has it."""
        record = self._current()
        return self._lake.shape_of(record, record.schema_version).schema

    def describe(self) -> TableDescription:
        """Everything there is to say about the table."""
        record = self._current()
        metadata = self._lake.metadata_of(record, record.schema_version)
        shape = self._lake.shape_of(record, record.schema_version)
        published = published_as(self._lake, record)
        return TableDescription(
            record.namespace,
            record.name,
            record.id,
            record.table_uuid,
            record.format,
            metadata.compression,
            metadata.storage_engine,
            record.version,
            record.schema_version,
            tuple(
                ColumnDescription(
                    field.field_id, field.name, describe_type(field.field_type), field.required, field.doc
                )
                for field in shape.schema.fields
            ),
            tuple(spec_texts(shape.spec, shape.schema)),
            tuple(order_texts(shape.order, shape.schema)),
            dict(metadata.properties),
            record.row_count,
            record.file_count,
            record.total_size,
            record.last_modified,
            record.created_at,
            None if published is None else published.version,
            None if published is None else published.metadata_location,
        )

    def history(self, *, limit: int = 1000, after: int | None = None) -> Page[TableVersion]:
        """The versions that are kept, the newest first."""
        check_limit(limit)
        if after is not None and (not isinstance(after, int) or abs(after) > MAX_BIGINT):
            raise InvalidInput(f"{shown(after)} is not a version", on=self._record.shown)
        found = self._lake.registry.read_with(lambda reader: list_versions(reader, self._record.id, after, limit + 1))
        return page_of(found, limit, lambda item: item.version)

    # --- changing what it is -------------------------------------------------------

    @contextmanager
    def update_schema(self) -> Iterator[SchemaUpdate]:
        """Change the schema: all changes of the block are one new schema version.

        If the schema has changed meanwhile nothing happens and `SchemaChanged` is raised.
        """
        record = self._current()
        refuse_mirror(record)
        shape = self._lake.shape_of(record, record.schema_version)
        protected = {field.source_id: "the table is partitioned by it" for field in shape.spec.fields}
        protected |= {field.source_id: "the table is sorted by it" for field in shape.order.fields}
        update = SchemaUpdate(shape.schema, record.last_field_id, protected)
        yield update
        new_schema, last_field_id = update.apply(self._next_schema_id(record))
        if new_schema.as_struct() == shape.schema.as_struct():
            return
        self._check_partition_names(record, new_schema)
        FORMATS[record.format].check_schema(new_schema)
        changed = self._lake.registry.write_opened(
            "schema",
            lambda transaction, commit_id: change_schema(
                transaction,
                record,
                record.schema_version,
                schema_to_json(new_schema),
                max(last_field_id, record.last_field_id),
                commit_id,
            ),
        )
        self._lake.changed(self._current(), changed.from_version)

    def _check_partition_names(self, record: TableRecord, new_schema: Any) -> None:
        """Refuse a column with the name of a partition field: other engines could not load the table."""
        states = self._lake.registry.read_with(lambda reader: list_metadata(reader, record))
        try:
            check_names(new_schema, list(shapes_of(states)[1].values()), record.shown)
        except NotAccepted as error:
            raise IncompatibleSchema(error.what, on=error.on, remedy=error.remedy) from None

    def _next_schema_id(self, record: TableRecord) -> int:
        """An id that no schema of the table has, nor one that an outside engine has added."""
        states = self._lake.registry.read_with(lambda reader: list_metadata(reader, record))
        ids = [int(state.schema.get("schema-id", 0)) for state in states]
        pointer = self._lake.publisher.pointer(record)
        if pointer is not None:
            ids += [schema.schema_id for schema in self._lake.publisher.load(pointer).schemas]
        return max(*ids, record.schema_version) + 1

    def set_properties(self, /, **changes: str | None) -> Mapping[str, str]:
        """Merge into the table's properties; `None` removes one. Use `**{"a.b": "c"}` for names with dots."""
        check_table_properties({key: value for key, value in changes.items() if value is not None}, self._lake)
        record = self._current()
        changed = self._lake.registry.write(lambda transaction: change_properties(transaction, record, changes))
        self._lake.changed(record, record.version)
        return changed.properties

    # --- what other engines see ----------------------------------------------------

    def publish(self) -> PublishReport:
        """Publish every version as Iceberg that is not yet, now, however the book is set."""
        return publish_now(self._lake, self._current())

    def snapshots(self) -> list[SnapshotRecord]:
        """The snapshots that the published metadata lists, the oldest first."""
        record = self._current()
        return self._lake.registry.read_with(lambda reader: snapshots_of(reader, record.id))

    def tag(
        self,
        name: str,
        *,
        version: int | None = None,
        snapshot_id: int | None = None,
        keep_seconds: float | None = None,
    ) -> Tag:
        """Keep the newest state, that of a version, or a snapshot, under a name that every engine knows."""
        return tagging.tag(
            self._lake, self._current(), name, version=version, snapshot_id=snapshot_id, keep_seconds=keep_seconds
        )

    def untag(self, name: str) -> Tag:
        """Remove a tag; what only it kept goes later."""
        return tagging.untag(self._lake, self._current(), name)

    def tags(self) -> list[Tag]:
        """The tags that the published metadata has, the one on the oldest snapshot first."""
        return tagging.tags(self._lake, self._current())

    @property
    def metadata_location(self) -> str | None:
        """The address of the newest metadata file, for engines that read it without a catalog; none before one is."""
        published = published_as(self._lake, self._current())
        return None if published is None else published.metadata_location

    # --- inserting -----------------------------------------------------------------

    def insert(self, frame: DataFrame, *, properties: Mapping[str, str] | None = None) -> InsertReport:
        """Insert the rows of a Spark DataFrame."""
        if not hasattr(frame, "sparkSession"):
            raise InvalidInput(
                f"{shown(type(frame).__name__)} is not a Spark DataFrame",
                on=self._record.shown,
                remedy="Use insert_arrow for an Arrow table",
            )
        return insert_frame(self._lake, self._current(), frame, properties)

    def insert_arrow(self, data: pa.Table, *, properties: Mapping[str, str] | None = None) -> InsertReport:
        """Insert an Arrow table, without Spark."""
        if not isinstance(data, (pa.Table, pa.RecordBatch)):
            raise InvalidInput(f"{shown(type(data).__name__)} is not an Arrow table", on=self._record.shown)
        table = data if isinstance(data, pa.Table) else pa.Table.from_batches([data])
        return insert_arrow(self._lake, self._current(), table, properties)

    def insert_json(
        self,
        spark: SparkSession,
        *paths: str,
        unknown: str = REFUSED,
        properties: Mapping[str, str] | None = None,
    ) -> InsertReport:
        """Insert the rows of JSON files or folders of them, wherever Spark can read them.

        A key that the table has no column for, at any depth, is refused; with `unknown="ignore"` it is left out.
        """
        return insert_json(self._lake, self._current(), spark, paths, unknown, properties)

    def insert_parquet(
        self,
        spark: SparkSession,
        *paths: str,
        properties: Mapping[str, str] | None = None,
    ) -> InsertReport:
        """Insert the rows of Parquet files or folders of them, wherever Spark can read them."""
        return insert_parquet(self._lake, self._current(), spark, paths, properties)

    def add_files(self, paths: Sequence[str], *, properties: Mapping[str, str] | None = None) -> InsertReport:
        """Take files that lie in the warehouse already, by their paths in it."""
        return add_files(self._lake, self._current(), paths, properties)

    def appender(
        self,
        *,
        max_bytes: int = 128 * 1024**2,
        max_rows: int = 1_000_000,
        max_age: float = 60.0,
        files_per_commit: int = 1,
        properties: Mapping[str, str] | None = None,
        on_commit: Callable[[InsertReport], None] = lambda report: None,
    ) -> Appender:
        """Insert record by record: rows become files by size, count or age, also when nothing arrives."""
        if self._record.format != PARQUET:
            raise InvalidInput("only tables of format parquet have an appender", on=self._record.shown)
        refuse_mirror(self._record)
        return Appender(
            self._lake,
            self._current(),
            max_bytes=max_bytes,
            max_rows=max_rows,
            max_age=max_age,
            files_per_commit=files_per_commit,
            properties=properties,
            on_commit=on_commit,
        )

    def overwrite(
        self,
        frame: DataFrame,
        *,
        where: Any = None,
        partition: Mapping[str, Any] | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> InsertReport:
        """Replace the rows of a predicate, of a partition, or all of them, by those of a frame."""
        return rewriting.overwrite(self._lake, self._current(), frame, where, partition, properties)

    def delete(
        self, where: Any, *, spark: SparkSession | None = None, properties: Mapping[str, str] | None = None
    ) -> InsertReport:
        """Delete the rows of a predicate; files of which only some rows match are rewritten on Spark."""
        if where is None:
            raise InvalidInput("no predicate was given", on=self._record.shown, remedy="Give where='true' for all rows")
        return rewriting.delete(self._lake, self._current(), where, spark, properties)

    def replace(
        self, paths: Iterable[str], frame: DataFrame, *, properties: Mapping[str, str] | None = None
    ) -> InsertReport:
        """Replace files, by their paths in the warehouse, by the same rows in other files."""
        return rewriting.replace(self._lake, self._current(), paths, frame, properties)

    def compact(self, spark: SparkSession, *, max_bytes: int | None = None) -> CompactionReport:
        """Put the rows of small files, and of files with many deleted rows, into files of the right size.

        It makes versions that change no row, until there is nothing to gain or so many bytes were rewritten.
        """
        return compaction.compact(self._lake, self._current(), spark, max_bytes=max_bytes)

    # --- reading -------------------------------------------------------------------

    def pin(self, *, version: int | None = None, as_of: datetime | None = None) -> PinnedTable:
        """Pin a version with a lease: the newest, a given one, or that of a time. Use it in a `with` block."""
        return PinnedTable(self._lake, acquire(self._lake, self._record, version, as_of))

    def plan(self, where: Any = None, *, version: int | None = None, as_of: datetime | None = None) -> Plan:
        """The files that a predicate can match, from registry rows alone.

        The plan pins nothing. Use `pin` to read what it names later on.
        """
        moment = check_asked(version, as_of)
        found, schema_version = self._lake.registry.read_with(
            lambda reader: resolve_version(reader, self._record, version, moment)
        )
        return make_plan(self._lake, self._record, found, schema_version, where)

    def read(
        self,
        spark: SparkSession,
        where: Any = None,
        *,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        as_of: datetime | None = None,
    ) -> DataFrame:
        """The rows as a Spark DataFrame. What it reads is pinned until the book is closed."""
        if spark is None or not hasattr(spark, "read"):
            raise SparkUnsuitable(f"{shown(spark)} is not a Spark session", on=self._record.shown)
        pinned = self.pin(version=version, as_of=as_of)
        try:
            frame = pinned.read(spark, where, columns)
        except BaseException:
            pinned.lease.close()
            raise
        pinned.lease.keep_until_closed()
        return frame

    def to_arrow(
        self,
        where: Any = None,
        *,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        as_of: datetime | None = None,
    ) -> pa.Table:
        """The rows as an Arrow table, read with the stored footers."""
        with self.pin(version=version, as_of=as_of) as pinned:
            return pinned.to_arrow(where, columns)

    def count(self) -> int:
        """The number of rows, from the registry; where rows are deleted, the files of deletes are read."""
        record = self._current()
        if not record.deleted_rows:
            return record.row_count
        with self.pin() as pinned:
            return pinned.count()

    def min_max(self, column: str) -> Extremes | None:
        """The least and largest value of a column from the registry, or none where only the files know."""
        return extremes(self._lake, self._current(), column)
