"""What every part of the lake works with: registry, bytes, settings, caches, renewals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cachetools import LRUCache

from lakebook.clock import Clock
from lakebook.config import Settings
from lakebook.errors import SparkUnsuitable
from lakebook.iceberg.partitioning import order_from_json, spec_from_json
from lakebook.iceberg.publishing import Publisher
from lakebook.iceberg.schemas import schema_from_json
from lakebook.lake.renewals import Renewals
from lakebook.metrics import Metrics
from lakebook.registry.registry import Registry
from lakebook.registry.tables import TableMetadata, TableRecord, get_metadata
from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse

T = TypeVar("T")

_SHAPES = 1000


@dataclass(frozen=True)
class TableShape:
    """The schema, partitioning and sort order of one schema version: they never change."""

    schema_version: int
    schema: Any
    spec: Any
    order: Any
    compression: str


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
        #: By table and schema version.
        self.shapes = Cache(_SHAPES, lambda _: 1)
        #: By path and checksum.
        self.footers = Cache(self.settings.cache_footers, lambda footer: len(footer.metadata) + 200)
        #: By table, version and predicate.
        self.plans = Cache(self.settings.cache_planned_files, lambda files: len(files) + 1)

    def close(self) -> None:
        """End every lease that is still held, and the thread that renews them."""
        for lease in self.renewals.leases():
            lease.close()
        self.renewals.close()

    def metadata_of(self, table: TableRecord, schema_version: int) -> TableMetadata:
        """A state of a table's metadata, with its present properties."""
        return self.registry.read_with(lambda reader: get_metadata(reader, table, schema_version))

    def shape_of(self, table: TableRecord, schema_version: int) -> TableShape:
        """The schema, partitioning and sort order of a schema version."""
        key = (table.id, schema_version)
        found: TableShape | None = self.shapes.get(key)
        if found is None:
            metadata = self.metadata_of(table, schema_version)
            found = TableShape(
                schema_version,
                schema_from_json(dict(metadata.schema)),
                spec_from_json(dict(metadata.partition_by)),
                order_from_json(dict(metadata.sort_by)),
                metadata.compression,
            )
            self.shapes.put(key, found)
        return found
