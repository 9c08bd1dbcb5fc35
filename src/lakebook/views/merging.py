"""Merging: neighbouring ranges of a view become one, with the same rows and without a look at the sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lakebook.errors import ClaimLost, FilesChanged, RangeClaimed
from lakebook.lake.lake import Lake
from lakebook.lake.leasing import acquire
from lakebook.lake.planning import make_plan
from lakebook.lake.reading import read_frame
from lakebook.lake.rewriting import of_files
from lakebook.registry.ranges import Range, all_ranges
from lakebook.registry.views import ViewRecord, view_table
from lakebook.views.building import Built, claimed, enter_frame
from lakebook.views.sources import combined_hash
from lakebook.views.times import INTERVALS, extent

if TYPE_CHECKING:
    from lakebook.spark.types import SparkSession

MERGED = "merged"


def mergeable(
    lake: Lake, view: ViewRecord, instance: str, into: str, before: int | None = None
) -> list[tuple[int, int]]:
    """The wider intervals that are made of several ranges, all built by the present query, fresh and without a gap."""
    ranges = lake.registry.read_with(lambda reader: all_ranges(reader, view.name, instance))
    return [
        bounds
        for bounds, parts in _buckets(ranges, INTERVALS[into])
        if len(parts) > 1 and _is_whole(view, parts, *bounds) and (before is None or bounds[1] <= before)
    ]


def _buckets(ranges: Sequence[Range], width: int) -> Iterator[tuple[tuple[int, int], list[Range]]]:
    parts: list[Range] = []
    for item in ranges:
        start = extent(item)[0] // width * width
        if parts and extent(parts[0])[0] // width * width != start:
            yield _bounds(parts, width), parts
            parts = []
        parts.append(item)
    if parts:
        yield _bounds(parts, width), parts


def _bounds(parts: Sequence[Range], width: int) -> tuple[int, int]:
    start = extent(parts[0])[0] // width * width
    return start, start + width


def _is_whole(view: ViewRecord, parts: Sequence[Range], begin: int, end: int) -> bool:
    """Whether ranges are fresh and lie one after the other from a boundary to the next.

    Either all of them are frozen or none: one frozen range would keep all others from ever being built anew.
    """
    if len({item.frozen_at is None for item in parts}) > 1:
        return False
    position = begin
    for item in parts:
        low, high = extent(item)
        if low != position or item.schema_hash != view.schema_hash or item.stale_at is not None:
            return False
        position = high
    return position == end


def merge_range(lake: Lake, spark: SparkSession, view: ViewRecord, instance: str, begin: int, end: int) -> Built | None:
    """Put the ranges of an interval into one; none if they are no longer what they were, or somebody builds there."""
    try:
        with claimed(lake, view, instance, begin, end) as (claim, current, parts):
            table = lake.registry.read_with(lambda reader: view_table(reader, current, instance))
            if table is None or len(parts) < 2 or not _is_whole(current, parts, begin, end):
                return None
            with acquire(lake, table) as lease:
                plan = make_plan(lake, table, lease.version, lease.schema_version, None)
                paths = {item.file_path for item in parts if item.file_path is not None}
                files = [file for file in plan if file.file_path in paths]
                rows = sum(item.num_rows for item in parts)
                if len(files) != len(paths) or sum(file.row_count for file in files) != rows:
                    return None  # They were retired since.
                frame = read_frame(spark, of_files(plan, files), lease)
                source_hash = combined_hash([item.source_hash for item in parts])

                def check(replaced: Sequence[Range]) -> None:
                    if {item.id for item in replaced} != {item.id for item in parts}:
                        raise FilesChanged("its ranges have changed meanwhile", on=view.shown, remedy="Merge again")

                built = enter_frame(
                    lake, current, instance, table, claim, frame, source_hash, check, operation="replace", rows=rows
                )
    except (RangeClaimed, ClaimLost, FilesChanged):
        return None
    return Built(begin, end, MERGED, built.rows, built.replaced)
