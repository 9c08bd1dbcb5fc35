"""Which ranges of a view have to be built: missing, stale, frozen, empty or up to date, by registry rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from typing import NamedTuple

from lakebook.clock import to_datetime
from lakebook.registry.losses import Lost, is_lost, losses_between
from lakebook.registry.ranges import (
    EMPTY_MARK,
    FROZEN_MARK,
    OUTDATED_MARK,
    STALE_MARK,
    Outline,
    outlines_between,
)
from lakebook.registry.transactions import Reader
from lakebook.registry.views import ViewRecord
from lakebook.views.definition import definition_of
from lakebook.views.times import INTERVALS, aligned, intervals

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
    ranges: Sequence[Outline]
    #: Times of which a source has lost rows.
    lost: tuple[Lost, ...] = ()


class RangeSpec(NamedTuple):
    """A range of a view, how it stands, and how many rows are built in it."""

    begin: int
    end: int
    state: str
    rows: int = 0

    def is_due(self, *, force: bool = False) -> bool:
        """Whether it is to be built; by force, also what is up to date or whose sources are partly gone."""
        return force or self.state in _TO_BUILD

    def is_within(self, begin: int, end: int) -> bool:
        """Whether none of it lies before or after two times."""
        return begin <= self.begin and self.end <= end


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
    ranges = outlines_between(reader, view.name, instance, view.schema_hash, low, high)
    # What is built may reach beyond the time.
    first, last = (min(low, ranges[0][0]), max(high, ranges[-1][1])) if ranges else (low, high)
    return PartitionSpec(view, instance, low, high, ranges, losses_between(reader, view.id, first, last))


def make_batch_partition_spec(found: PartitionSpec) -> list[RangeSpec]:
    """Decide of each range how it stands, in order.

    What is built wider than an interval stands, and is rebuilt, as a whole; so does everything built that
    an interval of the view covers.
    """
    interval, lost = definition_of(found.view).interval, found.lost
    specs: list[RangeSpec] = []
    position = found.begin
    for low, high, built, rows, marks in _grouped(found.ranges, INTERVALS[interval]):
        if low > position:
            specs += _missing(position, low, interval, lost)
        state = _WHOLE[marks] if built == high - low else _state(marks, is_covered=False)
        if lost and state in _TO_BUILD and is_lost(lost, low, high):
            state = FROZEN
        specs.append(RangeSpec(low, high, state, rows))
        position = high
    return specs + _missing(position, found.end, interval, lost)


def _missing(begin: int, end: int, interval: str, lost: Sequence[Lost]) -> list[RangeSpec]:
    """The intervals of a time of which nothing is built."""
    return [RangeSpec(*gap, FROZEN if is_lost(lost, *gap) else MISSING) for gap in intervals(begin, end, interval)]


def _grouped(ranges: Sequence[Outline], width: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Built ranges by the whole intervals they lie in; several lie in one where the interval was shorter once.

    Of each: begin, end, how much of that is built, rows, and what can be said of any of them, or of all.
    """
    number = 0
    while number < len(ranges):
        begin, end, rows, marks = ranges[number]
        number += 1
        low, high, built = begin - begin % width, end + -end % width, end - begin
        while built < high - low and number < len(ranges) and ranges[number][0] < high:
            begin, end, more, marked = ranges[number]
            number += 1
            high = max(high, end + -end % width)
            built, rows, marks = built + end - begin, rows + more, together(marks, marked)
        yield low, high, built, rows, marks


def together(marks: int, others: int) -> int:
    """What can be said of two ranges as one: that all of it is empty, or that any of it is what else may be."""
    return (marks | others) & ~EMPTY_MARK | marks & others & EMPTY_MARK


def _state(marks: int, *, is_covered: bool) -> str:
    if marks & FROZEN_MARK:
        return FROZEN
    if not is_covered:
        return MISSING
    if marks & OUTDATED_MARK:
        return OUTDATED
    if marks & STALE_MARK:
        return STALE
    return EMPTY if marks & EMPTY_MARK else FRESH


#: How a range that is built as a whole stands, by what can be said of it: looked up, for a plan may have very many.
_WHOLE = tuple(_state(marks, is_covered=True) for marks in range(2 * EMPTY_MARK))


def state_of(ranges: Sequence[Outline], begin: int, end: int, lost: Sequence[Lost]) -> str:
    """How a range stands, by what is built within it and by what its sources have lost."""
    built = sum(item[1] - item[0] for item in ranges)
    marks = reduce(together, (item[3] for item in ranges)) if ranges else 0
    found = _state(marks, is_covered=built == end - begin)
    # A build would have what is left: less than the query over all rows there were.
    return FROZEN if found in _TO_BUILD and is_lost(lost, begin, end) else found


def coverage_of(specs: Iterable[RangeSpec]) -> list[Coverage]:
    """How a view stands over time, with neighbours of one state put together."""
    runs: list[RangeSpec] = []
    for spec in specs:
        if runs and (runs[-1].state, runs[-1].end) == (spec.state, spec.begin):
            runs[-1] = RangeSpec(runs[-1].begin, spec.end, spec.state, runs[-1].rows + spec.rows)
        else:
            runs.append(spec)
    return [Coverage(to_datetime(run.begin), to_datetime(run.end), run.state, run.rows) for run in runs]
