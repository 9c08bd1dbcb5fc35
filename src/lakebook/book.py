"""A book: registry, warehouse and settings, opened together."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lakebook.clock import Clock, SystemClock, to_ms
from lakebook.config import Settings, load_settings
from lakebook.errors import BookNotFound, InvalidSetting, LakebookError, WarehouseNotWritable
from lakebook.metrics import Metrics
from lakebook.names import check_name
from lakebook.pages import Page, check_limit, page_of
from lakebook.registry.databases import Database, SQLite, database_for
from lakebook.registry.deliveries import DeadLetter, get_dead_letter, list_dead_letters, redrive
from lakebook.registry.epoch import (
    BookIdentity,
    begin_epoch,
    create_identity,
    read_identity,
    recorded_warehouse,
)
from lakebook.registry.events import EventLog
from lakebook.registry.gauges import read_gauges
from lakebook.registry.holding import Restored, end_hold, restored
from lakebook.registry.inserts import ANY_INSERT_OR_TABLE
from lakebook.registry.maintenance import Work, list_named_work
from lakebook.registry.migrate import HEAD, REVISIONS, Migration, check_revision, migrate, revision_of
from lakebook.registry.owed import MetadataUpdate
from lakebook.registry.registry import Registry
from lakebook.registry.schema import MAX_BIGINT
from lakebook.registry.segment_checks import any_file
from lakebook.registry.stream_checks import Verification, verify_streams
from lakebook.storage.access import access_of
from lakebook.storage.warehouse import Warehouse
from lakebook.streams.metadata_store import MetadataStore

if TYPE_CHECKING:
    # Arrow, PyIceberg and Spark are loaded by who uses tables.
    from lakebook.components.overview import Overview
    from lakebook.components.upkeep import Upkeep
    from lakebook.iceberg.catalog import LakebookCatalog
    from lakebook.lake.checking import Checked
    from lakebook.lake.cleaning import Cleaner
    from lakebook.lake.debts import Settled
    from lakebook.lake.lake import Lake
    from lakebook.lake.published import PendingReport
    from lakebook.lake.repairing import Repaired
    from lakebook.lake.table import Table
    from lakebook.lake.tables import Tables
    from lakebook.pipelines.pipelines import Pipelines
    from lakebook.registry.backup_files import Summary
    from lakebook.server.endpoint import RestEndpoint
    from lakebook.spark.types import DataFrame, SparkSession
    from lakebook.streams.consumer import Consumer
    from lakebook.streams.positions import Start
    from lakebook.streams.producer import Producer
    from lakebook.streams.topics import Topics
    from lakebook.views.querying import Queries
    from lakebook.views.views import Views

LOG = logging.getLogger("lakebook")


class Book:
    """An open book. Close it, or use it in a `with` block."""

    def __init__(self, registry: Registry, warehouse: Warehouse, identity: BookIdentity) -> None:
        self._registry = registry
        self.warehouse = warehouse
        self.identity = identity
        self.settings: Settings = registry.settings
        self.metrics: Metrics = registry.metrics
        #: Topics, partitions, segments and consumer offsets.
        self.metadata = MetadataStore(registry, warehouse.recorded)
        #: The captured changes.
        self.events = EventLog(registry)
        self._lake: Lake | None = None
        self._topics: Topics | None = None
        self._endpoints: list[RestEndpoint] = []
        self._producers: set[Producer] = set()
        self._consumers: set[Consumer] = set()
        self._opening = threading.Lock()

    def __enter__(self) -> Book:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Book({self._registry.database.shown!r})"

    @property
    def lake(self) -> Lake:
        """Tables' bytes, caches and leases; made when it is first used."""
        with self._opening:
            if self._lake is None:
                from lakebook.lake.lake import Lake

                lake = Lake(self._registry, self.warehouse)
                lake.before_load = self._bring_up_to_date
                self._lake = lake
            return self._lake

    def _bring_up_to_date(self, namespace: str, name: str) -> None:
        """Put a topic's newest segments into its table, before the table is loaded through a catalog."""
        from lakebook.streams.mirroring import bring_up_to_date

        bring_up_to_date(self.lake, namespace, name)

    @property
    def tables(self) -> Tables:
        """Tables and namespaces."""
        from lakebook.lake.tables import Tables

        return Tables(self.lake)

    def table(self, name: str, *, namespace: str | None = None) -> Table:
        """A table by its name: `"orders"`, `"sales.orders"`, or with `namespace=`."""
        return self.tables.get(name, namespace=namespace)

    @property
    def topics(self) -> Topics:
        """Topics by their names: `book.topics["orders"]`."""
        lake = self.lake
        with self._opening:
            if self._topics is None:
                from lakebook.streams.topics import Topics

                self._topics = Topics(lake, self.metadata, producer=self.producer, consumer=self.consumer)
            return self._topics

    @property
    def views(self) -> Views:
        """Materialised views by their names: `book.views["blocks"]`."""
        from lakebook.views.views import Views

        return Views(self.lake, self.metadata)

    def sql(self, spark: SparkSession, sql: str, *, materialize: bool = False) -> DataFrame:
        """The rows of a SELECT over views, tables and topics by their names, as a Spark DataFrame.

        A name is a view, else a table (`name` or `namespace.name`), else a topic. What it reads is pinned until the
        book is closed. With `materialize`, what is missing or stale of views, in the time the query asks for, is
        built first.
        """
        return self._queries.sql(spark, sql, materialize=materialize)

    def sql_count(self, sql: str) -> int | None:
        """The answer of `SELECT count(*) FROM name` from the registry, without Spark; none if it is another query."""
        return self._queries.count(sql)

    @property
    def _queries(self) -> Queries:
        from lakebook.views.querying import Queries

        return Queries(self.lake, self.views, self.topics)

    @property
    def pipelines(self) -> Pipelines:
        """Pipelines from topics or tables into tables: `book.pipelines["clicks"]`."""
        from lakebook.pipelines.pipelines import Pipelines

        return Pipelines(self.lake, self.metadata)

    def release_reads(self) -> None:
        """Let go of everything that `Table.read` and `Topic.read` pinned here; their frames are good no more."""
        for lease in self.lake.renewals.leases():
            if lease.kept_until_closed:
                lease.close()
        if self._topics is not None:
            self._topics.release_reads()

    def catalog(self, name: str = "lakebook") -> LakebookCatalog:
        """The tables as a PyIceberg catalog, for reading and writing by other engines."""
        from lakebook.lake.catalogs import catalog_of

        return catalog_of(self.lake, name)

    def spark(
        self, *, iceberg: bool = False, catalog: str = "lakebook", master: str | None = None, **settings: str
    ) -> SparkSession:
        """A Spark session; with `iceberg`, one in which this book is a catalog of that name.

        Its master is the one of the book's settings, unless another is given. Spark reaches the book through an
        endpoint on loopback, which ends with the session or with the book.
        """
        from lakebook.spark.buckets import with_packages
        from lakebook.spark.session import session_with_catalog, spark_session

        check_name("catalog", catalog)
        if self.warehouse.bucket is not None:
            settings = with_packages({key.replace("_", "."): value for key, value in settings.items()})
        session = spark_session(master=master or self.settings.spark_master, **settings)
        if not iceberg:
            return session
        from lakebook.server.endpoint import RestEndpoint

        endpoint = RestEndpoint(self.catalog(catalog))
        endpoint.start()
        self._endpoints.append(endpoint)
        try:
            own = session_with_catalog(session, catalog, endpoint.uri, endpoint.token, self.warehouse)
        except BaseException:
            self._end(endpoint)
            raise
        stop = own.stop

        def stop_both() -> None:
            self._end(endpoint)
            stop()

        own.stop = stop_both  # type: ignore[method-assign]
        return own

    def _end(self, endpoint: RestEndpoint) -> None:
        if endpoint in self._endpoints:
            self._endpoints.remove(endpoint)
            endpoint.stop()

    def producer(
        self,
        topic: str,
        *,
        producer_id: str | None = None,
        partitioner: str = "key",
        linger: float | None = None,
        buffer: int | None = None,
        compression: str | None = None,
        timeout: float | None = None,
    ) -> Producer:
        """A producer of records for a topic; `with book.producer("orders") as producer: producer.send(b"…")`.

        A `producer_id` belongs to one producer at a time: opening another one with it fences the former.
        Records go where the hash of their key says, or where others gather (`partitioner="sticky"`); those
        without a key always do the latter. They become a segment when `linger` seconds have passed (else the
        topic's `segment.ms`, else the setting), or when there are enough of them. `buffer` bytes wait at most,
        and what cannot be stored within `timeout` seconds fails.
        """
        from lakebook.streams.producer import Producer

        producer = Producer(
            self.lake,
            self.metadata,
            topic,
            producer_id=producer_id,
            partitioner=partitioner,
            linger=linger,
            buffer=buffer,
            compression=compression,
            timeout=timeout,
            on_close=self._producers.discard,
        )
        self._producers.add(producer)
        return producer

    def consumer(
        self,
        topics: str | Sequence[str],
        group: str | None = None,
        *,
        start: Start | None = None,
        reset: str = "error",
        auto_commit: bool | float = True,
        partitions: Iterable[int | tuple[str, int]] | None = None,
        max_records: int = 1000,
        read_ahead: int = 64 * 1024**2,
        on_assigned: Callable[[list[tuple[str, int]]], None] = lambda partitions: None,
        on_revoked: Callable[[list[tuple[str, int]]], None] = lambda partitions: None,
    ) -> Consumer:
        """A consumer of topics; `with book.consumer("orders", group="billing") as consumer: consumer.poll()`.

        The members of a group share the partitions, and go on where the group has committed; else `start`
        says where to begin: "earliest" (the default), "latest", an offset or a time. An offset whose records
        are gone is an error, or `reset` says where to go on instead. With a group, positions are committed
        every few seconds (`auto_commit`: how many; false: only by `commit`). `partitions` names what to read
        where nothing is shared out. `on_assigned` and `on_revoked` hear of partitions that come and go.
        """
        from lakebook.streams.consumer import Consumer, ConsumerOptions

        options = ConsumerOptions(start, reset, auto_commit, max_records, read_ahead, on_assigned, on_revoked)
        consumer = Consumer(
            self.lake, self.metadata, topics, group, partitions, options, on_close=self._consumers.discard
        )
        self._consumers.add(consumer)
        return consumer

    def settle_debts(self) -> Settled:
        """Take the footers and checksums of files that outside engines brought, as far as they are owed."""
        from lakebook.lake.debts import settle_debts

        return settle_debts(self.lake)

    @property
    def cleaner(self) -> Cleaner:
        """Expires history, deletes retired files, sweeps what inserts left."""
        from lakebook.lake.cleaning import Cleaner

        return Cleaner(self.lake)

    def close(self) -> None:
        """Send what producers hold, publish what this process has changed, end leases, close connections."""
        # From the last to the first, and each of them whatever happens to the others.
        with ExitStack() as closing:
            closing.callback(self._registry.close)
            closing.callback(self.metadata.close)
            if self._lake is not None:
                closing.callback(self._lake.close)
            for endpoint in list(self._endpoints):
                closing.callback(self._end, endpoint)
            for producer in list(self._producers):
                closing.callback(producer.close)
            for consumer in list(self._consumers):
                closing.callback(consumer.close)

    def verify(
        self, progress: Callable[[str], None] = lambda step: None, *, files: bool = True, spark: Any = None
    ) -> Verification:
        """Check the invariants: the registry on one consistent state of it, and every file of a table or a topic.

        Without `files` no byte is read. With a Spark session the files of tables are checked by its executors.
        """
        former = self.restored
        found: list[Checked | Verification] = [
            self._registry.in_snapshot(lambda reader: verify_streams(reader, progress))
        ]
        # A restored book may find what it does not know.
        if files and (former is not None or self._registry.read_with(any_file)):
            from lakebook.streams.checking import verify_segments

            found.append(verify_segments(self.lake, progress))
        if former is not None or self._has_tables():
            from lakebook.lake.checking import verify_tables

            found.append(verify_tables(self.lake, progress, files=files, spark=spark))
        findings = [finding for item in found for finding in item.findings]
        if former is not None:
            findings = [
                replace(item, what=former.gone(item.what)) if "does not exist" in item.what else item
                for item in findings
            ]
        return Verification(
            {name: number for item in found for name, number in item.checked.items()},
            tuple(findings),
            tuple(text for item in found for text in item.unfinished),
        )

    def _has_tables(self) -> bool:
        # A book of streams alone needs neither Arrow nor PyIceberg to be verified.
        return self._registry.one(ANY_INSERT_OR_TABLE) is not None

    def repair(self, *, dry_run: bool = False, progress: Callable[[str], None] = lambda step: None) -> Repaired:
        """Mend what can be mended without guessing, and say what cannot."""
        from lakebook.lake.repairing import repair_tables

        repaired = repair_tables(self.lake, dry_run=dry_run, progress=progress)
        # Nothing of a stream can be mended without guessing.
        repaired.left += self._registry.in_snapshot(lambda reader: verify_streams(reader, progress)).findings
        if self._registry.read_with(any_file):
            from lakebook.streams.checking import verify_segments

            repaired.left += verify_segments(self.lake, progress).findings
        return repaired

    def publish_pending(
        self, progress: Callable[[int, int, str], None] = lambda done, total, table: None
    ) -> PendingReport:
        """Publish every table as Iceberg that has versions which are not, whoever made them.

        `progress` is told how many tables are done, of how many, and which is next. One that fails stops no other.
        """
        from lakebook.lake.published import publish_pending

        return publish_pending(self.lake, progress)

    # --- upkeep ----------------------------------------------------------------------

    @contextmanager
    def running(
        self,
        *,
        spark: SparkSession | str | None = "",
        components: Sequence[str] | None = None,
        worker: bool = False,
    ) -> Iterator[Upkeep]:
        """Look after all tables while the block runs: publish, tag, expire, compact, clean up.

        Compactions run on the given Spark session, or on one that is started at that master ("": that of the book's
        settings) when the first of them is due; with none, files stay as they are. If another process does this work
        already, this one takes over when the other ends; until then it only compacts, runs pipelines and builds views,
        which several processes share (with none, or if the setting `worker_interval` is 0, it does nothing). A `worker`
        does only that, and never takes over.
        """
        from lakebook.components.upkeep import Upkeep

        with self._session_for(spark) as session:
            upkeep = Upkeep(self.lake, session, components, worker=worker)
            upkeep.start()
            try:
                yield upkeep
            finally:
                upkeep.stop()

    def maintain(
        self,
        components: Sequence[str] | None = None,
        *,
        table: str | None = None,
        namespace: str | None = None,
        spark: SparkSession | str | None = "",
        progress: Callable[[str], None] = lambda step: None,
    ) -> Mapping[str, Mapping[str, Any]]:
        """Run one round of the components here and now, for all tables or for one; what each has done."""
        from lakebook.components.rounds import run_round

        record = None if table is None else self.table(table, namespace=namespace).record
        with self._session_for(spark) as session:
            return run_round(self.lake, components, record, session, progress)

    @contextmanager
    def _session_for(self, spark: SparkSession | str | None) -> Iterator[Callable[[], SparkSession] | None]:
        """What gives the session to work on, made when it is first asked for; one that was made is stopped."""
        from lakebook.spark.keeping import KeptSession

        if spark is None or not isinstance(spark, str):
            yield None if spark is None else lambda: spark
            return
        kept = KeptSession(lambda: self.spark(master=spark))
        try:
            yield kept
        finally:
            kept.close()

    def overview(self) -> Overview:
        """How the upkeep of the book stands: who does it, what waits, what fails, what is paused."""
        from lakebook.components.overview import overview

        return overview(self.lake)

    def pause(
        self, component: str | None = None, *, table: str | None = None, namespace: str | None = None, reason: str = ""
    ) -> None:
        """Let a component rest, or all of them, on one table or on all, until `resume`."""
        from lakebook.components.pausing import pause

        pause(self.lake, component, self._table_id(table, namespace), reason)

    def resume(self, component: str | None = None, *, table: str | None = None, namespace: str | None = None) -> bool:
        """Let what was paused go on, and catch up; whether it was paused."""
        from lakebook.components.pausing import resume

        return resume(self.lake, component, self._table_id(table, namespace))

    def _table_id(self, table: str | None, namespace: str | None) -> int | None:
        return None if table is None else self.table(table, namespace=namespace).id

    def maintenance_history(
        self,
        *,
        component: str | None = None,
        table: str | None = None,
        namespace: str | None = None,
        limit: int = 1000,
        after: int | None = None,
    ) -> Page[Work]:
        """What was done to which table, when and why, the newest first."""
        check_limit(limit)
        before = MAX_BIGINT if after is None else after
        table_id = self._table_id(table, namespace)
        found = self._registry.read_with(lambda reader: list_named_work(reader, component, table_id, before, limit + 1))
        return page_of(found, limit, lambda item: item.id)

    def owed(
        self,
        *,
        table: str | None = None,
        namespace: str | None = None,
        state: str | None = "owed",
        limit: int = 1000,
        after: tuple[int, int] | None = None,
    ) -> Page[MetadataUpdate]:
        """Versions of tables that are owed to Iceberg: in which state each is, and why it could not be published.

        A state is `pending`, `processing`, `completed` or `failed`; `owed` is any but completed, none is all of them.
        """
        from lakebook.components.orchestrator import owed

        return owed(self.lake, table_id=self._table_id(table, namespace), state=state, limit=limit, after=after)

    def dead_letters(self, *, limit: int = 1000, after: int | None = None) -> Page[DeadLetter]:
        """Events that a subscriber could not take after its last attempt, the oldest first."""
        check_limit(limit)
        found = self._registry.read_with(lambda reader: list_dead_letters(reader, after or 0, limit + 1))
        return page_of(found, limit, lambda item: item.id)

    def dead_letter(self, letter_id: int) -> DeadLetter:
        """One dead letter."""
        return self._registry.read_with(lambda reader: get_dead_letter(reader, letter_id))

    def redrive(self, letter_id: int) -> DeadLetter:
        """Have the object of a dead letter taken from the registry anew, by its subscriber."""
        return self._registry.write(lambda transaction: redrive(transaction, letter_id))

    def upgrade_footers(self, progress: Callable[[int], None] = lambda done: None) -> tuple[int, list[str]]:
        """Turn footers of format version 1 into version 2; how many, and the paths of broken ones."""
        from lakebook.lake.footer_store import upgrade_footers

        return upgrade_footers(self.lake, progress)

    def measure(self) -> Metrics:
        """Bring the gauges up to date with the registry, and return the metrics."""
        now = self._registry.clock.now_ms()
        self.metrics.set_gauges(self._registry.in_snapshot(lambda reader: read_gauges(reader, now)))
        return self.metrics

    # --- backup ----------------------------------------------------------------------

    def backup(
        self,
        file: str | os.PathLike[str],
        progress: Callable[[int, int | None, str], None] = lambda done, total, table: None,
    ) -> Summary:
        """Write the registry as it is at this moment into a new file, while others write on.

        The bytes of the warehouse are not in it. `lakebook.restore` makes a book of it.
        """
        from lakebook.registry.portable import write_backup

        try:
            store_at = to_ms(self.lake.store.now())
        except LakebookError as error:
            # A registry is worth a backup all the more where its warehouse does not answer.
            LOG.warning("the store does not say what time it is (%s)", error)
            store_at = None
        return write_backup(self._registry, file, self.warehouse.root, progress, store_at=store_at)

    @property
    def restored(self) -> Restored | None:
        """From which backup it was restored, and whether it is still held; none if it never was restored."""
        return restored(self._registry)

    def resume_after_restore(self) -> bool:
        """Let things be removed again from a book that was restored; whether it was held."""
        return self._registry.write(end_hold)

    def begin_epoch(self) -> str:
        """Begin a new life of the book, after it was restored, rebuilt or copied.

        Whoever has the book open from before is refused from then on, and every subscriber
        of the events starts anew.
        """
        epoch = begin_epoch(self._registry)
        identity = read_identity(self._registry)
        assert identity is not None
        self.identity = identity
        return epoch


def open_book(
    target: str | os.PathLike[str] | None = None, *, clock: Clock | None = None, create: bool = True, **settings: Any
) -> Book:
    """Open the book at `target`, or create it.

    `target` is a folder (SQLite and a warehouse in it), `":memory:"` (gone when it is closed),
    or a registry URL (`postgresql://…`, `sqlite:///path`) together with `warehouse=`. With
    `create=False` a book that does not exist is an error.

    A folder is where a book is unless `LAKEBOOK_REGISTRY` says otherwise: so a program outgrows it by settings alone.
    """
    return open_with(load_settings(target, settings), clock=clock, create=create)


def open_with(resolved: Settings, *, clock: Clock | None = None, create: bool = True) -> Book:
    """Open the book that the settings name, or create it."""
    clock = clock or SystemClock()
    database = database_for(resolved)
    revision = _settled_revision(database)
    if revision is not None:
        check_revision(database, revision)
    elif not create:
        raise _no_book(database)
    warehouse = warehouse_of(resolved, database)
    resolved = replace(resolved, warehouse=warehouse.root)
    registry = Registry(database, resolved, clock, Metrics(clock))
    try:
        identity = read_identity(registry) if revision is not None else None
        if identity is None:
            identity = _create(registry, warehouse, create=create)
        if identity.warehouse != warehouse.recorded:
            raise InvalidSetting(
                f"this book's warehouse is {identity.warehouse}, not {warehouse.recorded}",
                on=database.shown,
                remedy="Open it with the warehouse it was created with",
            )
        registry.epoch = identity.epoch
        return Book(registry, warehouse, identity)
    except BaseException:
        registry.close()
        raise


def migrate_book(
    target: str | os.PathLike[str] | None = None,
    *,
    progress: Callable[[str], None] = lambda revision: None,
    **settings: Any,
) -> Migration:
    """Bring the registry of a book up to date with this version of Lakebook."""
    return migrate_with(load_settings(target, settings), progress=progress)


def migrate_with(resolved: Settings, *, progress: Callable[[str], None] = lambda revision: None) -> Migration:
    """Bring the registry of the book that the settings name up to date."""
    database = database_for(resolved)
    if not may_exist(database):
        raise _no_book(database)
    with database.migration_lock():
        if revision_of(database) is None:
            raise _no_book(database)
        return migrate(database, progress)


def warehouse_of(settings: Settings, database: Database) -> Warehouse:
    """The warehouse that the settings name."""
    beside = database.path.parent if isinstance(database, SQLite) and database.path is not None else None
    root = settings.warehouse
    if not root and may_exist(database):
        root = recorded_warehouse(database) or ""
    if beside is not None and "://" not in root:
        # What is recorded may be relative to the book's folder; what is given, to the present one.
        root = settings.warehouse or str(beside / (root or "warehouse"))
    if not root:
        raise InvalidSetting(
            "a new book on PostgreSQL needs a warehouse",
            on=database.shown,
            remedy="Give warehouse='/a/folder' or 's3://bucket/prefix', on the command line --warehouse",
        )
    return Warehouse(root, beside, access_of(settings))


def may_exist(database: Database) -> bool:
    """Whether it is worth while to ask the database; asking SQLite would make an empty file."""
    path = database.path if isinstance(database, SQLite) else None
    return path is None or path.is_file()


def _create(registry: Registry, warehouse: Warehouse, *, create: bool) -> BookIdentity:
    """Create what is missing of a book, while no other process does."""
    database = registry.database
    if not create:
        raise _no_book(database)
    # Before anything is made: a book without a place for its bytes is none.
    warehouse.check_writable()
    if isinstance(database, SQLite) and database.path is not None:
        _make_folder(database.path.parent)
    with database.migration_lock():
        if revision_of(database) is None:
            database.create()
        migrate(database)
        return create_identity(registry, warehouse.recorded)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WarehouseNotWritable(
            f"the folder cannot be made ({error.strerror})", on=str(folder), remedy="Choose another folder"
        ) from None


def _settled_revision(database: Database) -> str | None:
    """The revision of a book; none where a book is yet to be made, or is being made just now."""
    if not may_exist(database):
        return None
    revision = revision_of(database)
    if revision is None or revision == HEAD or revision not in REVISIONS:
        return revision
    with database.migration_lock():
        revision = revision_of(database)
        # Without its row it is no older book, but one whose creation was interrupted.
        return revision if recorded_warehouse(database) is not None else None


def _no_book(database: Database) -> BookNotFound:
    return BookNotFound("there is no book here", on=database.shown, remedy="Create one with `lakebook init`")
