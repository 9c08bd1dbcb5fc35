"""What every part of the lake works with: registry, bytes, settings, caches, renewals."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import orjson
from cachetools import LRUCache

from lakebook.clock import Clock
from lakebook.config import Settings
from lakebook.errors import LakebookError, NotPublishable, PublishFailed, SparkUnsuitable, TableNotFound
from lakebook.iceberg.partitioning import order_from_json, spec_from_json
from lakebook.iceberg.publishing import Publisher
from lakebook.iceberg.schemas import leaf_fields, stored_schema
from lakebook.lake.background import BackgroundPublisher, Look
from lakebook.lake.renewals import Renewals
from lakebook.metrics import Metrics
from lakebook.registry.publishing import Pointer, pointer_of, snapshots_of, standing_of
from lakebook.registry.registry import Registry
from lakebook.registry.schedulers import publishes_for_all
from lakebook.registry.tables import TableMetadata, TableRecord, get_metadata, list_metadata
from lakebook.registry.transactions import Reader
from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse

LOG = logging.getLogger("lakebook.publishing")

T = TypeVar("T")

_SHAPES = 1000
# Of these there are some of each table, and each is small.
_FACTS = 30_000
# Versions after which a writer looks how many are not published: not at each, that would be felt.
_BETWEEN_LOOKS = 32
# The one format that Iceberg knows too.
_PUBLISHED = "parquet"


@dataclass(frozen=True)
class TableShape:
    """The schema, partitioning and sort order of one schema version: they never change."""

    schema_version: int
    schema: Any
    spec: Any
    order: Any
    compression: str

    @cached_property
    def plain_fields(self) -> frozenset[int]:
        """The columns, by field id, of which a file of this schema version has statistics, if it has any."""
        return frozenset(leaf.field_id for leaf in leaf_fields(self.schema) if not leaf.in_collection)


def check_reachable(lake: Lake) -> None:
    """Refuse Spark where it cannot see the warehouse."""
    if lake.store.warehouse.root.startswith("memory:"):
        raise SparkUnsuitable(
            "the warehouse is in the memory of this process, where Spark cannot reach it",
            on="Spark",
            remedy="Open the book in a folder",
        )


class Cache:
    """A bounded cache that several threads may use; its keys are such that nothing in it grows stale."""

    def __init__(self, maximum: int, size_of: Callable[[Any], int]) -> None:
        self._items: LRUCache[Any, Any] = LRUCache(max(1, maximum), getsizeof=size_of)
        self._enabled = maximum > 0
        self._lock = threading.Lock()

    def get(self, key: Any) -> Any | None:
        """What is kept under a key."""
        with self._lock:
            return self._items.get(key)

    def put(self, key: Any, value: T) -> T:
        """Keep a value, if it is not larger than the whole cache."""
        with self._lock:
            if self._enabled and self._items.getsizeof(value) <= self._items.maxsize:
                self._items[key] = value
        return value

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._items.clear()


class Lake:
    """The lake of an open book."""

    def __init__(self, registry: Registry, warehouse: Warehouse) -> None:
        self.registry = registry
        self.store = ObjectStore(warehouse)
        self.settings: Settings = registry.settings
        self.clock: Clock = registry.clock
        self.metrics: Metrics = registry.metrics
        self.renewals = Renewals(registry)
        #: Publishes tables as Iceberg.
        self.publisher = Publisher(registry, self.store)
        #: Publishes in the background what this process has changed.
        self.background = BackgroundPublisher(
            self.publish, self.clock, self.settings.publish_lag, look=self._look_before_publishing
        )
        #: Takes the footers that outside engines' files owe. Apart: checksums of large files take long.
        self.settling = BackgroundPublisher(self._settle, self.clock, 0.0, done="looked at")
        #: Told the namespace and name of a table before it is loaded through a catalog; see `streams.mirroring`.
        self.before_load: Callable[[str, str], None] = lambda namespace, name: None
        #: By table and schema version, and by what is told of them.
        self.shapes = Cache(_SHAPES, lambda _: 1)
        #: What else is known of tables, by table and what it is.
        self.facts = Cache(_FACTS, lambda fact: 1 + len(fact) // 8)
        #: By path and checksum.
        self.footers = Cache(self.settings.cache_footers, lambda footer: len(footer.metadata) + 200)
        #: By table, version and predicate.
        self.plans = Cache(self.settings.cache_planned_files, lambda files: len(files) + 1)

    def close(self) -> None:
        """Publish what was noticed; end every lease that is still held, and the threads."""
        try:
            self.background.close()
            self.settling.close()
        finally:
            for lease in self.renewals.leases():
                lease.close()
            self.renewals.close()

    # --- publishing ------------------------------------------------------------------

    def changed(self, table: TableRecord, version: int) -> int | None:
        """Have a committed change of a table published: now, soon or not at all, as the book is set.

        The snapshot that covers the version, where there is one already.
        """
        self.notice(table)
        if table.format != _PUBLISHED or self.settings.publish == "off":
            return None
        if self.settings.publish == "async":
            self._bound_backlog(table, version)
            return None
        try:
            pointer = self.publish(table)
            return None if pointer is None else self._snapshot_of(table, version, pointer)
        except Exception as error:
            # Whatever it was: the caller must not take the change for undone.
            raise PublishFailed(
                f"the change is committed (at version {version}), but it is not published yet"
                f" ({type(error).__name__}: {error})",
                on=table.shown,
                remedy="Do not repeat the change. Mend the cause and run `lakebook tables publish`",
            ) from error

    def notice(self, table: TableRecord) -> None:
        """Have a table that may have changed published in the background, where that is how it is done."""
        if table.format == _PUBLISHED and self.settings.publish == "async":
            self.background.notice(table)

    def _look_before_publishing(self, table: TableRecord, leases: int) -> Look:
        now, silence = self.clock.now_ms(), round(leases * self.settings.astha_lease * 1000)

        def look(reader: Reader) -> Look:
            standing = standing_of(reader, table.id)
            if standing is None or not standing.is_pending:
                return Look(is_pending=False)
            others = leases > 0 and publishes_for_all(reader, table.id, now, silence)
            return Look(publications=standing.metadata_number, others=others)

        return self.registry.read_with(look)

    def _bound_backlog(self, table: TableRecord, version: int) -> None:
        """Have who changes a table publish it, where too many versions of it are not: so it waits for its readers."""
        most = self.settings.publish_backlog
        if not most or version % max(1, min(_BETWEEN_LOOKS, most // 4)):
            return
        try:
            pointer = self.registry.read_with(lambda reader: pointer_of(reader, table.id))
        except LakebookError as error:
            # The change is committed; the next look makes up for this one.
            LOG.warning("it is not known how much of %s is published (%s)", table.shown, error)
            return
        if version - (-1 if pointer is None else pointer.version) > most:
            self.background.publish_at_once(table)

    def _settle(self, table: TableRecord) -> None:
        from lakebook.lake.debts import settle_debts

        settle_debts(self, table.id)

    def _snapshot_of(self, table: TableRecord, version: int, pointer: Pointer) -> int | None:
        if pointer.version == version:
            return pointer.snapshot_id
        # Others have committed meanwhile, and were published with it or after it.
        found = self.registry.read_with(lambda reader: snapshots_of(reader, table.id))
        covering = [item for item in found if item.version is not None and item.version >= version]
        return min(covering, key=lambda item: item.sequence_number).snapshot_id if covering else pointer.snapshot_id

    def publish(self, table: TableRecord) -> Pointer | None:
        """Publish every version of a table that is not yet; what it is published as then."""
        if table.format != _PUBLISHED:
            return None
        begun = self.clock.monotonic()
        outcome = "failed"
        try:
            pointer = self.publisher.publish(table)
            outcome = "published"
        except TableNotFound:
            outcome = "dropped"
            raise
        except NotPublishable:
            outcome = "not_publishable"
            raise
        finally:
            self.metrics.count_publish(outcome, self.clock.monotonic() - begun)
        return pointer

    # --- what a table is -------------------------------------------------------------

    def metadata_of(self, table: TableRecord, schema_version: int) -> TableMetadata:
        """A state of a table's metadata, with its present properties."""
        return self.registry.read_with(lambda reader: get_metadata(reader, table, schema_version))

    def shape_of(self, table: TableRecord, schema_version: int, reader: Reader | None = None) -> TableShape:
        """The schema, partitioning and sort order of a schema version; `reader` is a transaction that is at work."""
        key = (table.id, schema_version)
        found: TableShape | None = self.shapes.get(key)
        if found is None:
            metadata = (
                self._state(table, schema_version) if reader is None else get_metadata(reader, table, schema_version)
            )
            found = self.shapes.put(key, self._shape_from(metadata))
        return found

    def _shape_from(self, metadata: TableMetadata) -> TableShape:
        """The shape that a state of some table's metadata tells of; those that are told alike are one."""
        told = (metadata.schema, metadata.partition_by, metadata.sort_by)
        key = (metadata.schema_version, metadata.compression, *(orjson.dumps(dict(part)) for part in told))
        found: TableShape | None = self.shapes.get(key)
        if found is None:
            found = TableShape(
                metadata.schema_version,
                stored_schema(metadata.schema),
                spec_from_json(dict(metadata.partition_by)),
                order_from_json(dict(metadata.sort_by)),
                metadata.compression,
            )
            self.shapes.put(key, found)
        return found

    def specs_of(self, table: TableRecord, schema_version: int) -> tuple[tuple[int, int], ...]:
        """The schema versions up to one, each with the id of its partition spec."""
        found: tuple[tuple[int, int], ...] | None = self.facts.get((table.id, "specs"))
        if found is None or found[-1][0] < schema_version:
            found = self._note_specs(table, self.registry.read_with(lambda reader: list_metadata(reader, table)))
        return tuple(item for item in found if item[0] <= schema_version)

    def _note_specs(self, table: TableRecord, states: Sequence[TableMetadata]) -> tuple[tuple[int, int], ...]:
        known = tuple((state.schema_version, int(state.partition_by.get("spec-id", 0))) for state in states)
        return self.facts.put((table.id, "specs"), known)

    def _state(self, table: TableRecord, schema_version: int) -> TableMetadata:
        """A state of a table's metadata. Whoever asks for the first time is told of the others too: plans need them."""
        if self.facts.get((table.id, "specs")) is None:
            states = self.registry.read_with(lambda reader: list_metadata(reader, table))
            if states:
                self._note_specs(table, states)
            for state in states:
                if state.schema_version == schema_version:
                    return state
        return self.metadata_of(table, schema_version)
