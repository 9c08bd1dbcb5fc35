"""Views as their users see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lakebook.clock import to_datetime, to_ms
from lakebook.errors import BuildFailed, ClaimLost, InvalidInput, LakebookError, RangeClaimed
from lakebook.lake.lake import Lake
from lakebook.names import shown
from lakebook.registry.claims import ClaimInfo, list_claims
from lakebook.registry.ranges import Range, all_ranges, count_rows, locked_ranges, ranges_between, retire_ranges
from lakebook.registry.tables import TableRecord, locked_table
from lakebook.registry.transactions import Transaction, new_id
from lakebook.registry.views import GLOBAL, ViewRecord, current_view, view_table, view_tables
from lakebook.spark.session import check_spark, reason_of
from lakebook.streams.metadata_store import MetadataStore
from lakebook.views import reading
from lakebook.views.building import BUILT, EMPTY, Built, build_range, change_files, tidy
from lakebook.views.definition import Definition, definition_of
from lakebook.views.merging import merge_range, mergeable
from lakebook.views.planning import (
    FROZEN,
    Coverage,
    RangeSpec,
    coverage_of,
    fetch_sql_partition_spec,
    make_batch_partition_spec,
)
from lakebook.views.times import aligned, check_interval, check_range, check_span, extent

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession

_PARALLEL = 2
# How often it is looked whether another worker has built a range that is waited for.
_WAIT = 0.2


@dataclass
class Materialized:
    """What a materialisation did to which ranges."""

    view: str
    #: Ranges that have rows now, that were built and have none, and that needed nothing.
    built: int = 0
    empty: int = 0
    up_to_date: int = 0
    #: Ranges whose sources are partly gone, which only force rebuilds, and those that another worker builds.
    frozen: int = 0
    claimed: int = 0
    rows: int = 0
    #: Ranges in whose place others came.
    replaced: int = 0
    #: Ranges that could not be built, and why.
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def ranges(self) -> int:
        """How many ranges were looked at."""
        return self.built + self.empty + self.up_to_date + self.frozen + self.claimed + len(self.failed)


class View:
    """One view, by its name."""

    def __init__(self, lake: Lake, metadata: MetadataStore, record: ViewRecord) -> None:
        self._lake = lake
        self._metadata = metadata
        self._record = record

    def __repr__(self) -> str:
        return f"View({self._record.name!r})"

    @property
    def name(self) -> str:
        """Its name."""
        return self._record.name

    @property
    def record(self) -> ViewRecord:
        """The view as the registry has it now."""
        self._record = self._lake.registry.read_with(lambda reader: current_view(reader, self._record))
        return self._record

    @property
    def definition(self) -> Definition:
        """What it is."""
        return definition_of(self.record)

    def claims(self) -> list[ClaimInfo]:
        """Its ranges that somebody builds now."""
        return self._lake.registry.read_with(lambda reader: list_claims(reader, self._record))

    # --- planning --------------------------------------------------------------------

    def plan(self, begin: datetime, end: datetime, *, instance: str = GLOBAL) -> list[RangeSpec]:
        """How each range between two times stands: one query of the registry."""
        return self._plan(self.record, *check_range(begin, end), instance)

    def _plan(self, view: ViewRecord, begin: int, end: int, instance: str) -> list[RangeSpec]:
        self._check_instance(view, instance)
        return make_batch_partition_spec(
            self._lake.registry.read_with(lambda reader: fetch_sql_partition_spec(reader, view, instance, begin, end))
        )

    def _check_instance(self, view: ViewRecord, instance: str) -> None:
        if instance not in view.definition["instances"]:
            raise InvalidInput(
                f"it has no instance {shown(instance)}", on=view.shown, remedy=f"It has {view.definition['instances']}"
            )

    def coverage(self, begin: datetime, end: datetime, *, instance: str = GLOBAL) -> list[Coverage]:
        """Stretches of time that are built, stale, empty, frozen or missing."""
        return coverage_of(self.plan(begin, end, instance=instance))

    def list_partitions(
        self, begin: datetime | None = None, end: datetime | None = None, *, instance: str = GLOBAL
    ) -> list[Range]:
        """The ranges that are built, in order: all, or those that meet a time."""
        span = check_span(begin, end)
        if span is None:
            return self._lake.registry.read_with(lambda reader: all_ranges(reader, self.name, instance))
        return self._lake.registry.read_with(lambda reader: ranges_between(reader, self.name, instance, *span))

    # --- building --------------------------------------------------------------------

    def materialize(
        self,
        spark: SparkSession,
        begin: datetime,
        end: datetime,
        *,
        parallel: int = _PARALLEL,
        force: bool = False,
        instance: str | None = None,
        wait: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Materialized:
        """Build what is missing or stale between two times, widened to whole intervals; several ranges at once.

        One that another worker builds is left to it, or waited for with `wait`. Ranges whose sources are partly gone
        are built only by `force`, which rebuilds everything, and only if they lie wholly between the two times. If
        ranges fail, the others are built all the same, and `BuildFailed` says which and why.
        """
        view = self.record
        low, high = check_range(begin, end)
        specs = [
            (name, spec)
            for name in (view.definition["instances"] if instance is None else [instance])
            for spec in self._plan(view, low, high, name)
        ]
        # Whoever forces an hour of a frozen day speaks of no other hour of it.
        asked = aligned(low, high, view.definition["interval"])
        whole = [item for item in specs if item[1].state != FROZEN or item[1].is_within(*asked)]
        done = self.build(spark, view, whole, parallel=parallel, force=force, wait=wait, progress=progress)
        done.frozen += len(specs) - len(whole)
        if done.failed:
            (where, why), *others = done.failed.items()
            more = f" and {len(others)} more" if others else ""
            raise BuildFailed(
                f"{where}{more} of {done.ranges} ranges could not be built ({why})",
                on=view.shown,
                remedy="Nothing of them was recorded. Mend the cause and materialise again",
            )
        return done

    def materialize_partitions(
        self, spark: SparkSession, begin: datetime, end: datetime, **options: Any
    ) -> Materialized:
        """The specification's name of `materialize`."""
        return self.materialize(spark, begin, end, **options)

    def regenerate_partitions(
        self, spark: SparkSession, begin: datetime, end: datetime, force: bool = False, **options: Any
    ) -> Materialized:
        """Build everything between two times anew; without `force` not what its sources no longer have."""
        view = self.record
        low, high = check_range(begin, end)
        if not force:
            frozen = [
                spec
                for name in view.definition["instances"]
                for spec in self._plan(view, low, high, name)
                if spec.state == "frozen"
            ]
            if frozen:
                raise InvalidInput(
                    f"{len(frozen)} ranges are frozen: their sources are partly gone, and so would their rows be",
                    on=view.shown,
                    remedy="Regenerate others, or by force",
                )
        return self.materialize(spark, begin, end, force=True, **options)

    def build(
        self,
        spark: SparkSession,
        view: ViewRecord,
        specs: Sequence[tuple[str, RangeSpec]],
        *,
        parallel: int = _PARALLEL,
        force: bool = False,
        wait: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Materialized:
        """Build planned ranges of instances; one that fails stops no other."""
        check_spark(spark, self._lake.store.warehouse)
        if isinstance(parallel, bool) or not isinstance(parallel, int) or not 1 <= parallel <= 64:
            raise InvalidInput(f"{shown(parallel)} ranges cannot be built at once", on=view.shown, remedy="Use 1 to 64")
        done = Materialized(view.name)
        due = [(name, spec) for name, spec in specs if spec.is_due(force=force)]
        for _, spec in specs:
            if not spec.is_due(force=force):
                frozen = spec.state == "frozen"
                done.frozen, done.up_to_date = done.frozen + frozen, done.up_to_date + (not frozen)
        progress(0, len(due))
        with ThreadPoolExecutor(max(1, min(parallel, len(due))), thread_name_prefix="lakebook-views") as workers:
            work = lambda item: self._build_one(spark, view, *item, force=force, wait=wait)  # noqa: E731
            for number, outcome in enumerate(workers.map(work, due), 1):
                _count(done, outcome)
                progress(number, len(due))
        return done

    def _build_one(
        self, spark: SparkSession, view: ViewRecord, instance: str, spec: RangeSpec, *, force: bool, wait: bool
    ) -> Built | RangeClaimed | ClaimLost | tuple[str, str]:
        while True:
            try:
                return build_range(self._lake, self._metadata, spark, view, instance, spec, force=force)
            except (RangeClaimed, ClaimLost) as claimed:
                # Another builds it, or has taken it over since: it is that one's.
                if not wait:
                    return claimed
                self._lake.clock.sleep(_WAIT)
            except Exception as error:  # noqa: BLE001 - Spark's and others': told with the range, the rest goes on
                begin = to_datetime(spec.begin).isoformat(timespec="minutes")
                where = begin if instance == GLOBAL else f"{instance} {begin}"
                return where, str(error) if isinstance(error, LakebookError) else reason_of(error)

    def merge_partitions(
        self,
        spark: SparkSession,
        into: str = "hour",
        *,
        instance: str | None = None,
        before: datetime | None = None,
    ) -> list[Built]:
        """Put ranges that are built, fresh and without a gap together to hours or days; what became of which.

        No row is read from the sources, and readers see the same rows before and after.
        """
        check_interval(into)
        check_spark(spark, self._lake.store.warehouse)
        view = self.record
        found: list[Built] = []
        for name in view.definition["instances"] if instance is None else [instance]:
            for begin, end in mergeable(self._lake, view, name, into, None if before is None else to_ms(before)):
                merged = merge_range(self._lake, spark, view, name, begin, end)
                found += [] if merged is None else [merged]
        return found

    # --- retiring --------------------------------------------------------------------

    def retire_partitions(self, begin: datetime, end: datetime, *, instance: str | None = None) -> int:
        """Remove the ranges that lie wholly between two times; how many."""
        span = check_range(begin, end)
        return self._retire(lambda item: span[0] <= extent(item)[0] and extent(item)[1] <= span[1], span, instance)

    def retire_expired_partitions(self) -> int:
        """Remove the ranges that ended longer ago than the view's retention; how many."""
        retention = self.definition.retention
        if retention is None:
            return 0
        least = self._lake.clock.now_ms() - round(retention * 1000)
        return self._retire(lambda item: extent(item)[1] <= least, None, None)

    def _retire(self, wanted: Callable[[Range], bool], span: tuple[int, int] | None, instance: str | None) -> int:
        view = self.record
        number = 0
        for name in self._instances(view) if instance is None else [instance]:
            table = self._lake.registry.read_with(lambda reader: view_table(reader, view, name))  # noqa: B023
            if table is not None:
                number += self._retire_of(view, name, table, wanted, span)
        return number

    def _instances(self, view: ViewRecord) -> Iterable[str]:
        """Its instances, and those it had once and has ranges of."""
        former = self._lake.registry.read_with(lambda reader: view_tables(reader, view))
        return sorted({*view.definition["instances"], *former})

    def _retire_of(
        self,
        view: ViewRecord,
        instance: str,
        table: TableRecord,
        wanted: Callable[[Range], bool],
        span: tuple[int, int] | None,
    ) -> int:
        commit_id = new_id()
        versions: list[int] = []

        def work(transaction: Transaction) -> int:
            locked_table(transaction, table)
            if span is None:
                found = all_ranges(transaction, view.name, instance)
            else:
                found = ranges_between(transaction, view.name, instance, *span)
            gone = locked_ranges(transaction, [item.id for item in found if wanted(item)])
            removed = retire_ranges(transaction, view.name, gone)
            done = change_files(transaction, table, "delete", (), gone, commit_id, gone=True)
            versions[:] = [] if done is None else [done.version]
            return removed

        removed = self._lake.registry.write(work)
        if versions:
            self._lake.changed(table, versions[0])
            tidy(self._lake, table)
        return removed

    # --- reading ---------------------------------------------------------------------

    def read(
        self,
        spark: SparkSession,
        begin: datetime | None = None,
        end: datetime | None = None,
        *,
        columns: Sequence[str] | None = None,
        instance: str = GLOBAL,
    ) -> DataFrame:
        """The rows as a Spark DataFrame, all or those of some time. They are pinned until the book is closed."""
        check_spark(spark, self._lake.store.warehouse)
        chosen = reading.select(self._lake, self.record, instance, check_span(begin, end))
        try:
            frame = chosen.frame(spark, columns)
        except BaseException:
            chosen.lease.close()
            raise
        chosen.lease.keep_until_closed()
        return frame

    def to_arrow(
        self,
        begin: datetime | None = None,
        end: datetime | None = None,
        *,
        columns: Sequence[str] | None = None,
        instance: str = GLOBAL,
    ) -> pa.Table:
        """The rows as an Arrow table, read with the stored footers."""
        chosen = reading.select(self._lake, self.record, instance, check_span(begin, end))
        with chosen.lease:
            return chosen.arrow(columns)

    def count(self, begin: datetime | None = None, end: datetime | None = None, *, instance: str = GLOBAL) -> int:
        """The number of rows, from the registry; where a range lies in the time only in part, its file is read."""
        span = check_span(begin, end)
        found = self._lake.registry.read_with(lambda reader: count_rows(reader, self.name, instance, span))
        if found is not None:
            return found
        chosen = reading.select(self._lake, self.record, instance, span)
        with chosen.lease:
            return chosen.row_count


def _count(done: Materialized, outcome: Built | RangeClaimed | ClaimLost | tuple[str, str]) -> None:
    if isinstance(outcome, RangeClaimed | ClaimLost):
        done.claimed += 1
    elif isinstance(outcome, tuple):
        done.failed[outcome[0]] = outcome[1]
    else:
        counts: Mapping[str, str] = {BUILT: "built", EMPTY: "empty", FROZEN: "frozen"}
        name = counts.get(outcome.outcome, "up_to_date")
        setattr(done, name, getattr(done, name) + 1)
        done.rows += outcome.rows
        done.replaced += outcome.replaced
