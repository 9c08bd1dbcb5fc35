"""Reading a view: its table at one version that a lease pins, all of it or the ranges of some time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from lakebook.clock import to_datetime
from lakebook.errors import InvalidInput, ViewNotFound
from lakebook.iceberg.schemas import describe_type
from lakebook.lake.lake import Lake
from lakebook.lake.leasing import Lease, acquire
from lakebook.lake.planning import Plan, make_plan
from lakebook.lake.reading import read_frame, read_table
from lakebook.lake.rewriting import of_files
from lakebook.registry.ranges import Range, ranges_between
from lakebook.registry.tables import TableRecord, current_table
from lakebook.registry.transactions import Reader
from lakebook.registry.views import GLOBAL, NAMESPACE, ViewRecord, view_table
from lakebook.spark import frames
from lakebook.views.building import event_time_field
from lakebook.views.times import extent

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession

_TRIES = 100


@dataclass(frozen=True)
class Selected:
    """The rows of a view in some time, of one pinned version: of some files all, of others those of the time."""

    lease: Lease
    plans: tuple[Plan, ...]

    def frame(self, spark: SparkSession, columns: Sequence[str] | None = None) -> DataFrame:
        """As a Spark frame, good for as long as the lease is held."""
        return frames.union([read_frame(spark, plan, self.lease, columns) for plan in self.plans])

    def arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """As an Arrow table."""
        return pa.concat_tables([read_table(plan, self.lease, columns) for plan in self.plans])

    @property
    def row_count(self) -> int:
        """How many rows there are, by the registry, or by the files of which only some are meant."""
        whole, *cut = self.plans
        return whole.row_count + sum(int(read_table(plan, self.lease, [_any(plan)]).num_rows) for plan in cut)


def _any(plan: Plan) -> str:
    return str(plan.schema.fields[0].name)


def table_of(lake: Lake, view: ViewRecord, instance: str) -> TableRecord:
    """The table of an instance, of which something was built."""
    table = lake.registry.read_with(lambda reader: view_table(reader, view, instance))
    if table is None:
        raise ViewNotFound(
            f"nothing of its instance {instance!r} was built yet",
            on=view.shown,
            remedy=f"Materialise a range of it. Its instances are {', '.join(view.definition['instances'])}; in a query"
            f" another one than {GLOBAL!r} is {NAMESPACE}.{view.name}.INSTANCE",
        )
    return table


def select(lake: Lake, view: ViewRecord, instance: str, span: tuple[int, int] | None) -> Selected:
    """Pin the newest version of a view, and choose what lies in a time."""
    table = table_of(lake, view, instance)
    for _ in range(_TRIES):
        lease = acquire(lake, table)
        try:
            if span is None:
                return Selected(lease, (make_plan(lake, table, lease.version, lease.schema_version, None),))
            version, ranges = lake.registry.in_snapshot(lambda reader: _ranges(reader, view, table, instance, span))
            if version == lease.version:
                return Selected(lease, _cut(lake, view, table, lease, ranges, span))
        except BaseException:
            lease.close()
            raise
        lease.close()  # It has changed in between.
    raise InvalidInput("it changes all the time", on=view.shown, remedy="Try again")


def _ranges(
    reader: Reader, view: ViewRecord, table: TableRecord, instance: str, span: tuple[int, int]
) -> tuple[int, list[Range]]:
    return current_table(reader, table).version, ranges_between(reader, view.name, instance, *span)


def _cut(
    lake: Lake, view: ViewRecord, table: TableRecord, lease: Lease, ranges: Sequence[Range], span: tuple[int, int]
) -> tuple[Plan, ...]:
    inside = {item.file_path for item in ranges if span[0] <= extent(item)[0] and extent(item)[1] <= span[1]}
    partly = {item.file_path for item in ranges} - inside - {None}
    every = make_plan(lake, table, lease.version, lease.schema_version, None)
    files = [file for file in every if file.file_path in inside or file.file_path in partly]
    whole = of_files(every, [file for file in files if file.file_path in inside])
    if not partly:
        return (whole,)
    current = lake.registry.read_with(lambda reader: current_table(reader, table))
    column = event_time_field(lake, view, current)
    if column is None:
        raise InvalidInput(
            f"a range lies in that time only in part, and its rows have no event time {view.definition['event_time']}",
            on=view.shown,
            remedy="Ask for whole ranges: `lakebook views partitions` shows them",
        )
    fields = {field.name: field.field_type for field in every.schema.fields}
    zone = "+00:00" if describe_type(fields[column]) == "timestamptz" else ""
    low, high = (to_datetime(time).replace(tzinfo=None).isoformat(timespec="milliseconds") + zone for time in span)
    quoted = '"' + column.replace('"', '""') + '"'
    where = f"{quoted} >= '{low}' AND {quoted} < '{high}'"
    tested = make_plan(lake, table, lease.version, lease.schema_version, where)
    given = tuple(file for file in files if file.file_path in partly)
    return whole, dataclasses.replace(tested, given=given)
