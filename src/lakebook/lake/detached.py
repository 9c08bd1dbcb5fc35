"""Files of a plan that are read where no registry is: on executors, with everything they need handed over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa

from lakebook.lake.footer_store import Footer, footers_for
from lakebook.lake.formats import FORMATS
from lakebook.lake.lake import Cache, Lake, TableShape
from lakebook.lake.measuring import PARQUET
from lakebook.lake.planning import Plan
from lakebook.predicates import Always
from lakebook.registry.table_files import DeleteFile, PlannedFile, chunks
from lakebook.registry.tables import TableRecord
from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse

_FILES = 100


@dataclass(frozen=True, repr=False)
class DetachedFiles:
    """Some files of a version with their stored footers, fit to be sent to another process."""

    warehouse: Warehouse
    table: TableRecord
    version: int
    shape: TableShape
    shapes: Mapping[int, TableShape]
    files: tuple[PlannedFile, ...]
    footers: Mapping[str, Footer]
    deletes: tuple[DeleteFile, ...]

    def __repr__(self) -> str:
        return f"DetachedFiles({self.table.shown!r}, version {self.version}, {len(self.files)} files)"

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows of the files, without deleted ones."""
        plan = self._plan()
        handler = FORMATS[self.table.format]
        for file in self.files:
            yield from handler.batches(plan, file, self.shape.schema, self.footers.get(file.file_path))

    def _plan(self) -> Plan:
        lake = _Reading(self.warehouse, self.shapes)
        lake.plans.put((self.table.id, self.version), self.deletes)
        return Plan(cast("Lake", lake), self.table, self.version, self.shape, Always(True), self.files)


class _Reading:
    """What reading a file needs of a lake: its bytes, and what the table's schemas were."""

    def __init__(self, warehouse: Warehouse, shapes: Mapping[int, TableShape]) -> None:
        self.store = ObjectStore(warehouse)
        self.plans = Cache(1, lambda _: 1)
        self._shapes = shapes

    def shape_of(self, _table: TableRecord, schema_version: int) -> TableShape:
        """The schema, partitioning and sort order of a schema version."""
        return self._shapes[schema_version]


def detached(plan: Plan, most_bytes: int) -> Iterator[DetachedFiles]:
    """The files of a plan in parts of so many bytes, each with what its reader needs."""
    for part in _parts(plan, most_bytes):
        shapes = {number: plan.lake.shape_of(plan.table, number) for number in {file.schema_version for file in part}}
        footers = footers_for(plan.lake, (file for file in part if file.file_type == PARQUET))
        found: dict[int, DeleteFile] = {delete.id: delete for file in part for delete in plan.deletes_for(file)}
        yield DetachedFiles(
            plan.lake.store.warehouse,
            plan.table,
            plan.version,
            plan.shape,
            shapes,
            tuple(part),
            footers,
            tuple(found[number] for number in sorted(found)),
        )


def _parts(files: Any, most_bytes: int) -> Iterator[Sequence[PlannedFile]]:
    for chunk in chunks(files, _FILES):
        held: list[PlannedFile] = []
        size = 0
        for file in chunk:
            if held and size + file.file_size > most_bytes:
                yield held
                held, size = [], 0
            held.append(file)
            size += file.file_size
        if held:
            yield held
