"""The REST catalog, asked by PyIceberg's own client and by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchNamespaceError, TableAlreadyExistsError
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, StagedTable, Table
from pyiceberg.table.sorting import SortOrder
from pyiceberg.table.update import AssertCreate, TableRequirement, TableUpdate
from pyiceberg.typedef import Identifier, Properties

from lakebook.server.rest import Change


class StandIn(SqlCatalog):
    """PyIceberg's catalog of its own, with what a served catalog has beyond it."""

    # What the next calls run into, before or after they have done their work.
    fails_before: Exception | None = None
    fails_after: Exception | None = None

    def stage_table(
        self,
        identifier: Identifier,
        schema: Schema,
        location: str | None,
        partition_spec: PartitionSpec,
        sort_order: SortOrder,
        properties: Properties,
    ) -> Table:
        if not self.namespace_exists(identifier[:-1]):
            raise NoSuchNamespaceError(identifier[0])
        if self.table_exists(identifier):
            raise TableAlreadyExistsError(identifier[1])
        return self._create_staged_table(identifier, schema, location, partition_spec, sort_order, properties)

    def load_table(self, identifier: str | Identifier) -> Table:
        if self.fails_before is not None:
            raise self.fails_before
        return super().load_table(identifier)

    def commit(
        self, identifier: Identifier, requirements: Sequence[TableRequirement], updates: Sequence[TableUpdate]
    ) -> CommitTableResponse:
        if any(isinstance(each, AssertCreate) for each in requirements):
            empty = self._empty_table_metadata()
            table: Table = StagedTable(identifier, empty, "", self._load_file_io(), self)
        else:
            table = self.load_table(identifier)
        done = self.commit_table(table, tuple(requirements), tuple(updates))
        if self.fails_after is not None:
            raise self.fails_after
        return done

    def commit_all(self, changes: Sequence[Change]) -> None:
        for identifier, requirements, _ in changes:
            metadata = self.load_table(identifier).metadata
            for requirement in requirements:
                requirement.validate(metadata)
        for identifier, requirements, updates in changes:
            self.commit(identifier, requirements, updates)


def stand_in(folder: Path) -> StandIn:
    return StandIn("stand-in", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
