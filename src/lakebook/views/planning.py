"""Which ranges of a view have to be built: missing, stale, frozen, empty or up to date, by registry rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from lakebook.clock import to_datetime
from lakebook.registry.losses import Lost, is_lost, losses_between
from lakebook.registry.ranges import Range, ranges_between
from lakebook.registry.transactions import Reader
from lakebook.registry.views import ViewRecord
from lakebook.views.definition import definition_of
from lakebook.views.times import aligned, extent, intervals

MISSING, STALE, OUTDATED, FROZEN, EMPTY, FRESH = "missing", "stale", "outdated", "frozen", "empty", "built"
#: Every state a range can have; those that a build mends come first.
STATES = (MISSING, STALE, OUTDATED, FROZEN, EMPTY, FRESH)
_TO_BUILD = (MISSING, STALE, OUTDATED)


@dataclass(frozen=True)
class PartitionSpec:
    """What the registry has of a view between two times."""

    view: ViewRecord
    instance: str
    begin: int
    end: int
    ranges: tuple[Range, ...]
    #: Times of which a source has lost rows.
    lost: tuple[Lost, ...] = ()


@dataclass(frozen=True)
class RangeSpec:
    """A range of a view, how it stands, and what is built in it."""

    begin: int
    end: int
    state: str
    ranges: tuple[Range, ...] = ()

    def is_due(self, *, force: bool = False) -> bool:
        """Whether it is to be built; by force, also what is up to date or whose sources are partly gone."""
        return force or self.state in _TO_BUILD


@dataclass(frozen=True)
class Coverage:
    """A stretch of time in which a view stands the same."""

    begin: datetime
    end: datetime
    state: str
    rows: int


def fetch_sql_partition_spec(reader: Reader, view: ViewRecord, instance: str, begin: int, end: int) -> PartitionSpec:
    """Look up what is built between two times, widened to whole intervals, and what can not be built any more."""
    low, high = aligned(begin, end, definition_of(view).interval)
    ranges = tuple(ranges_between(reader, view.name, instance, low, high))
    # What is built may reach beyond the time.
    extents = [extent(item) for item in ranges[:1] + ranges[-1:]]
    first, last = min([low, *(item[0] for item in extents)]), max([high, *(item[1] for item in extents)])
    return PartitionSpec(view, instance, low, high, ranges, losses_between(reader, view.id, first, last))


def make_batch_partition_spec(found: PartitionSpec) -> list[RangeSpec]:
    """Decide of each range how it stands, in order.

    What is built wider than an interval stands, and is rebuilt, as a whole; so does everything built that
    an interval of the view covers.
    """
    view, interval = found.view, definition_of(found.view).interval
    specs: list[RangeSpec] = []
    position = found.begin
    for (low, high), ranges in _groups(found.ranges, interval):
        specs += _missing(position, low, interval, found.lost)
        specs.append(RangeSpec(low, high, state_of(view, ranges, low, high, found.lost), tuple(ranges)))
        position = high
    return specs + _missing(position, found.end, interval, found.lost)


def _missing(begin: int, end: int, interval: str, lost: Sequence[Lost]) -> list[RangeSpec]:
    """The intervals of a time of which nothing is built."""
    return [RangeSpec(*gap, FROZEN if is_lost(lost, *gap) else MISSING) for gap in intervals(begin, end, interval)]


def _groups(ranges: Iterable[Range], interval: str) -> list[tuple[tuple[int, int], list[Range]]]:
    """Built ranges by the whole intervals they lie in; several lie in one where the interval was shorter once."""
    groups: list[tuple[tuple[int, int], list[Range]]] = []
    for item in ranges:
        low, high = aligned(*extent(item), interval)
        if groups and low < groups[-1][0][1]:
            groups[-1][1].append(item)
        else:
            groups.append(((low, high), [item]))
    return groups


def state_of(view: ViewRecord, ranges: Sequence[Range], begin: int, end: int, lost: Sequence[Lost] = ()) -> str:
    """How a range stands, by what is built in it and by what its sources have lost."""
    found = _state_of(view, ranges, begin, end)
    # A build would have what is left: less than the query over all rows there were.
    return FROZEN if found in _TO_BUILD and is_lost(lost, begin, end) else found


def _state_of(view: ViewRecord, ranges: Sequence[Range], begin: int, end: int) -> str:
    if not ranges:
        return MISSING
    covered = sum(high - low for low, high in map(extent, ranges)) == end - begin
    if any(item.frozen_at is not None for item in ranges):
        return FROZEN
    if not covered:
        return MISSING
    if any(item.schema_hash != view.schema_hash for item in ranges):
        return OUTDATED
    if any(item.stale_at is not None for item in ranges):
        return STALE
    return EMPTY if all(item.is_empty for item in ranges) else FRESH


def coverage_of(specs: Iterable[RangeSpec]) -> list[Coverage]:
    """How a view stands over time, with neighbours of one state put together."""
    found: list[Coverage] = []
    for spec in specs:
        rows = sum(item.num_rows for item in spec.ranges)
        begin, end = to_datetime(spec.begin), to_datetime(spec.end)
        if found and (found[-1].state, found[-1].end) == (spec.state, begin):
            found[-1] = Coverage(found[-1].begin, end, spec.state, found[-1].rows + rows)
        else:
            found.append(Coverage(begin, end, spec.state, rows))
    return found
