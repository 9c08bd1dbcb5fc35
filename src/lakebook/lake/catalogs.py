"""A book's lake as an Iceberg catalog."""

from __future__ import annotations

from collections.abc import Mapping

from lakebook.iceberg.catalog import LakebookCatalog
from lakebook.iceberg.outside import Committer
from lakebook.lake.lake import Lake
from lakebook.lake.properties import check_table_properties
from lakebook.registry.tables import TableRecord


class CatalogParts:
    """What a catalog needs of a lake."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self.registry = lake.registry
        self.publisher = lake.publisher
        warehouse = lake.store.warehouse
        in_bucket = warehouse.bucket is not None
        #: How engines of this process open the files, and what others are told of it.
        self.own_io: Mapping[str, str] = warehouse.access.iceberg_properties(credentials=True) if in_bucket else {}
        self.told_io: Mapping[str, str] = warehouse.access.iceberg_properties(credentials=False) if in_bucket else {}
        self.committer = Committer(lake.publisher, self._check)

    def _check(self, properties: Mapping[str, str]) -> None:
        check_table_properties(properties, self._lake)

    def settle_debts_of(self, table: TableRecord) -> None:
        """Take the footers of files that were just brought, in the background; what fails stays owed."""
        self._lake.settling.notice(table)

    def bring_up_to_date(self, namespace: str, name: str) -> None:
        """Bring a table that is about to be loaded up to date with the topic whose segments are its files."""
        self._lake.before_load(namespace, name)


def catalog_of(lake: Lake, name: str) -> LakebookCatalog:
    """The catalog of a lake."""
    return LakebookCatalog(name, lake=CatalogParts(lake))
