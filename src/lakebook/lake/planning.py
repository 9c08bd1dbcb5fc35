"""Plans: the files of a version that a predicate can match, from registry rows alone.

The search is driven by the column that leaves the fewest files: its index gives candidates,
whose other statistics are then looked at. Without such a column the version's files are
walked through. Of files with several row groups the stored footer says which can match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lakebook.iceberg.bounds import ColumnBounds, probe_ranges, sort_key
from lakebook.iceberg.predicates import parse_where, partition_tests
from lakebook.iceberg.pruning import column_ranges, compile_may_match
from lakebook.iceberg.statistics import bounds_of, footer_columns, matching_row_groups
from lakebook.lake.arrow_schemas import schema_of_file
from lakebook.lake.footer_store import footers_for
from lakebook.lake.lake import Lake, TableShape
from lakebook.lake.measuring import PARQUET
from lakebook.lake.position_deletes import DeletedRows, Positions
from lakebook.predicates import Always, Predicate, all_of, fields_of
from lakebook.registry.file_stats import ColumnStats, files_meeting, files_short_of, stats_of_files
from lakebook.registry.leases import HORIZON, expired_version
from lakebook.registry.table_files import (
    CHUNK,
    DeleteFile,
    PlannedFile,
    chunks,
    planned_by_id,
    unmeasured_files,
    visible_among,
    visible_deletes,
    visible_files,
)
from lakebook.registry.tables import TableRecord
from lakebook.registry.transactions import Reader

# A column that leaves more is no better than walking through the files in order.
_MOST_CANDIDATES = 20_000
# One that leaves so few need not be compared with others.
_FEW = 100
_MOST_RANGES = 200
# To look at so many files is to read a large part of a book.
_MANY = 10_000


@dataclass(frozen=True)
class Plan:
    """The files of a version that can have rows of a predicate."""

    lake: Lake
    table: TableRecord
    version: int
    shape: TableShape
    predicate: Predicate
    #: The files, where they were chosen otherwise than by the predicate.
    given: tuple[PlannedFile, ...] | None = None

    @property
    def schema(self) -> Any:
        """The schema the rows are read with."""
        return self.shape.schema

    def __iter__(self) -> Iterator[PlannedFile]:
        """The files one after the other, in bounded memory."""
        if self.given is not None:
            yield from self.given
            return
        key = (self.table.id, self.version, self.predicate)
        kept: tuple[PlannedFile, ...] | None = self.lake.plans.get(key)
        if kept is not None:
            yield from kept
            return
        found: list[PlannedFile] | None = []
        for file in _search(self):
            if not file.checksum:
                # What is known of it will change, without a new version, when its footer has been taken.
                found = None
            if found is not None:
                found.append(file)
                if len(found) > self.lake.settings.cache_planned_files:
                    found = None
            yield file
        require_readable(self.lake, self.table, self.version)
        if found is not None:
            self.lake.plans.put(key, tuple(found))

    @cached_property
    def files(self) -> tuple[PlannedFile, ...]:
        """All files."""
        return tuple(self)

    @property
    def paths(self) -> list[str]:
        """The paths of all files, in the form that other engines open; deleted rows are still in them."""
        return [self.lake.store.uri(file.file_path) for file in self.files]

    @property
    def row_count(self) -> int:
        """The rows of all files; more than match, unless there is no predicate and nothing is deleted in them."""
        return sum(file.row_count for file in self.files)

    @property
    def total_size(self) -> int:
        """The bytes of all files."""
        return sum(file.file_size for file in self.files)

    # --- deleted rows --------------------------------------------------------------

    @cached_property
    def deletes(self) -> tuple[DeleteFile, ...]:
        """The files of deletes that the version has: of all its files, not only of those that can match."""
        key = (self.table.id, self.version)
        kept: tuple[DeleteFile, ...] | None = self.lake.plans.get(key)
        if kept is None:
            kept = tuple(
                self.lake.registry.read_with(lambda reader: visible_deletes(reader, self.table.id, self.version))
            )
            require_readable(self.lake, self.table, self.version)
            self.lake.plans.put(key, kept)
        return kept

    def deletes_for(self, file: PlannedFile) -> tuple[DeleteFile, ...]:
        """The files of deletes that may name rows of a file; most plans have none."""
        if not self.deletes:
            return ()
        by_path, by_partition = self._scoped
        found = [*by_path.get(file.file_path, ()), *by_partition.get((file.spec_id, file.partition_values), ())]
        return tuple(delete for delete in found if delete.applies_to(file))

    def deleted_rows(self, file: PlannedFile) -> Positions | None:
        """The numbers of a file's deleted rows, from the files of deletes; none if there are none."""
        deletes = self.deletes_for(file)
        return self._deleted.of(self.location_of(file), file.row_count, deletes) if deletes else None

    def location_of(self, file: PlannedFile | DeleteFile) -> str:
        """Where a file is, as Iceberg's metadata and files of deletes spell it."""
        return file.location or self.lake.store.uri(file.file_path)

    @cached_property
    def _scoped(self) -> tuple[dict[str, list[DeleteFile]], dict[tuple[int, str], list[DeleteFile]]]:
        """The deletes about one file by its path, and the others by their partition."""
        by_path: dict[str, list[DeleteFile]] = {}
        by_partition: dict[tuple[int, str], list[DeleteFile]] = {}
        for delete in self.deletes:
            if delete.referenced_path is not None:
                by_path.setdefault(delete.referenced_path, []).append(delete)
            else:
                by_partition.setdefault((delete.spec_id, delete.partition_values), []).append(delete)
        return by_path, by_partition

    @cached_property
    def _deleted(self) -> DeletedRows:
        return DeletedRows(self.lake.store)


def make_plan(lake: Lake, table: TableRecord, version: int, schema_version: int, where: Any) -> Plan:
    """A plan of a version that the caller has pinned."""
    shape = lake.shape_of(table, schema_version)
    return Plan(lake, table, version, shape, parse_where(where, shape.schema))


def require_readable(lake: Lake, table: TableRecord, version: int) -> None:
    """Raise if rows of a version may have gone while they were looked at.

    A clean-up raises the horizon before it removes anything, so this needs no clock.
    """
    row = lake.registry.one(HORIZON, table.id)
    least = int(row[0]) if row is not None else version + 1
    if least > version:
        raise expired_version(table, version, least)


def _search(plan: Plan) -> Iterator[PlannedFile]:
    predicate = plan.predicate
    if isinstance(predicate, Always):
        if predicate.value:
            yield from _all_files(plan)
        return
    whole: Predicate = predicate
    if _has_one_spec(plan):
        # Else files of another spec, which have not these partition values, would not be found.
        whole = all_of([predicate, partition_tests(predicate, plan.shape.spec, plan.schema)])
    candidates = _driven(plan, whole) if plan.table.format == PARQUET else None
    files = files_of(plan, candidates) if candidates is not None else _all_files(plan)
    matching = compile_may_match(whole)
    fields = sorted(fields_of(whole))
    for chunk in chunks(files):
        kept = list(_matching(plan, chunk, matching, fields))
        yield from _with_row_groups(plan, kept, compile_may_match(predicate))


def _has_one_spec(plan: Plan) -> bool:
    """Whether every file of the table has the partition spec of the plan."""
    specs = plan.lake.specs_of(plan.table, plan.shape.schema_version)
    return len({spec_id for _, spec_id in specs}) == 1


def _all_files(plan: Plan) -> Iterator[PlannedFile]:
    after = 0
    while True:
        start = after
        page = plan.lake.registry.read_with(
            lambda reader: visible_files(reader, plan.table.id, plan.version, start, CHUNK)  # noqa: B023 - called at once
        )
        yield from page
        if len(page) < CHUNK:
            return
        after = page[-1].id


def files_of(plan: Plan, ids: Sequence[int]) -> Iterator[PlannedFile]:
    """Files of a plan's table by their ids."""
    for chunk in chunks(ids):
        yield from plan.lake.registry.read_with(lambda reader: planned_by_id(reader, plan.table.id, chunk))  # noqa: B023


def _driven(plan: Plan, predicate: Predicate) -> list[int] | None:
    """Ids of the candidates by the column that leaves the fewest; none if no column leaves few."""
    best: list[int] | None = None
    for field_id, (kind, ranges) in column_ranges(predicate).items():
        if len(ranges) > _MOST_RANGES:
            continue
        most = _MOST_CANDIDATES if best is None else len(best)
        found = _candidates(plan, field_id, kind, ranges, most)
        if found is not None and (best is None or len(found) < len(best)):
            best = sorted(found)
            if len(best) <= _FEW:
                break
    return best


def _candidates(
    plan: Plan, field_id: int, kind: str, ranges: Sequence[tuple[bytes | None, bytes | None]], most: int
) -> set[int] | None:
    table_id, version = plan.table.id, plan.version
    # Files without statistics may match whatever is asked. They are asked for first: a file whose statistics are taken
    # meanwhile has been found here by then. The other way round it is found neither by them nor as one without.
    found = set(plan.lake.registry.read_with(lambda reader: unmeasured_files(reader, table_id, version, most + 1)))
    for low, high in ranges:
        probes = probe_ranges(
            None if low is None else sort_key(kind, low), None if high is None else sort_key(kind, high)
        )
        found.update(
            plan.lake.registry.read_with(
                lambda reader: files_meeting(reader, table_id, field_id, version, probes, low, high, most + 1)  # noqa: B023
            )
        )
        if len(found) > most:
            return None
    short = _short_of(plan, field_id, most)
    if short is None:
        return None
    found.update(short)
    return found if len(found) <= most else None


def _short_of(plan: Plan, field_id: int, most: int) -> list[int] | None:
    """Ids of files that have lost their statistics of a column: they too may match; none if they are too many.

    To find them is to look at every file. But a row of statistics goes only with its file, so the files of a version
    are looked at once by a process, and from then on those that came since.
    """
    lake, table_id = plan.lake, plan.table.id
    key = (table_id, field_id, "short")
    seen: tuple[int, ...] = lake.facts.get(key) or (-1,)
    looked, short = seen[0], frozenset(seen[1:])
    if plan.version > looked:
        having = versions_having(lake, plan.table, plan.shape.schema_version, field_id)
        registry, is_long = lake.registry, looked < 0 and plan.table.file_count > _MANY
        more = (registry.read_through if is_long else registry.read_with)(
            lambda reader: files_short_of(reader, table_id, field_id, having, looked, plan.version, most + 1)
        )
        short = short.union(more)
        if len(short) > most:
            return None
        lake.facts.put(key, (plan.version, *sorted(short)))
    if not short:
        return []
    return lake.registry.read_with(lambda reader: visible_among(reader, table_id, plan.version, sorted(short)))


def versions_having(lake: Lake, table: TableRecord, schema_version: int, field_id: int) -> tuple[int, ...]:
    """The schema versions, up to one, whose files have statistics of a column or, if negative, of a partition field."""
    key = (table.id, schema_version, field_id, "having")
    found: tuple[int, ...] | None = lake.facts.get(key)
    if found is None:
        numbers = [number for number, _ in lake.specs_of(table, schema_version)]
        if field_id > 0:
            numbers = [number for number in numbers if field_id in lake.shape_of(table, number).plain_fields]
        found = lake.facts.put(key, tuple(numbers))
    return found


def _matching(
    plan: Plan, files: Sequence[PlannedFile], matching: Callable[..., bool], fields: Sequence[int]
) -> Iterator[PlannedFile]:
    ids = sorted(file.id for file in files)
    stats = plan.lake.registry.read_with(lambda reader: stats_of_files(reader, plan.table.id, ids, fields))
    for file in files:
        if matching(known_bounds(plan, file, stats)):
            yield file


def known_bounds(
    plan: Plan, file: PlannedFile, stats: Mapping[tuple[int, int], ColumnStats], reader: Reader | None = None
) -> Callable[[int], ColumnBounds | None]:
    """What is known of a file's columns; `reader` is a transaction that is at work."""

    def of(field_id: int) -> ColumnBounds | None:
        if not file.checksum:
            return None  # What its writer says of it, nobody has looked at yet.
        found = bounds_of(stats.get((file.id, field_id)))
        if found is None and file.has_statistics and field_id > 0:
            shape = plan.lake.shape_of(plan.table, file.schema_version, reader)
            if field_id not in shape.plain_fields:
                # The file is older than the column: nothing but nulls.
                return ColumnBounds(None, None, file.row_count, file.row_count, 0)
        return found

    return of


def _with_row_groups(plan: Plan, files: Sequence[PlannedFile], matching: Callable[..., bool]) -> Iterator[PlannedFile]:
    several = [file for file in files if file.row_group_count > 1 and file.file_type == PARQUET]
    footers = footers_for(plan.lake, several)
    for file in files:
        footer = footers.get(file.file_path)
        if footer is None:
            yield file
            continue
        opened = footer.open(file.file_path)
        columns = footer_columns(opened, schema_of_file(plan.lake, plan.table, file, opened))
        if columns is None:
            yield file
            continue
        groups = matching_row_groups(columns, matching)
        if groups:
            yield file if len(groups) == file.row_group_count else replace(file, row_groups=groups)
