"""Intervals of event time, in UTC: minutes, hours and days, which lie within each other."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from lakebook.clock import to_ms
from lakebook.errors import InvalidInput
from lakebook.names import is_moment, shown
from lakebook.registry.ranges import Range

#: Milliseconds of each interval, the shortest first.
INTERVALS = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
#: Nothing lies after it, or before its opposite: some thousands of years.
_FARTHEST = 2**47


def check_interval(name: object) -> str:
    """Return the name of an interval."""
    if isinstance(name, str) and name in INTERVALS:
        return name
    raise InvalidInput(f"{shown(name)} is not an interval", on="view", remedy=f"Use {', '.join(INTERVALS)}")


def check_range(begin: object, end: object) -> tuple[int, int]:
    """A half-open range of time in milliseconds."""
    for moment in (begin, end):
        if not is_moment(moment):
            raise InvalidInput(f"{shown(moment)} is not an aware datetime", on="view", remedy="Give it a time zone")
    assert isinstance(begin, datetime) and isinstance(end, datetime)
    if begin >= end:
        raise InvalidInput("the range ends before it begins", on="view", remedy="Give begin and a later end")
    return to_ms(begin), to_ms(end)


def check_span(begin: datetime | None, end: datetime | None) -> tuple[int, int] | None:
    """A range of time of which either side may be open; none: all of time."""
    if begin is None and end is None:
        return None
    low = -_FARTHEST if begin is None else check_range(begin, datetime.max.replace(tzinfo=begin.tzinfo))[0]
    high = _FARTHEST if end is None else check_range(datetime.min.replace(tzinfo=end.tzinfo), end)[1]
    if low >= high:
        raise InvalidInput("the range ends before it begins", on="view", remedy="Give begin and a later end")
    return low, high


def aligned(begin: int, end: int, interval: str) -> tuple[int, int]:
    """The range of whole intervals that covers another."""
    width = INTERVALS[interval]
    return begin // width * width, -(-end // width) * width


def intervals(begin: int, end: int, interval: str) -> Iterator[tuple[int, int]]:
    """The intervals of an aligned range."""
    width = INTERVALS[interval]
    return ((start, start + width) for start in range(begin, end, width))


def extent(item: Range) -> tuple[int, int]:
    """The range of time of a built range."""
    return to_ms(item.begin), to_ms(item.end)
