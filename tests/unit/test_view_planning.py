"""The plan of a view, beside one that looks at every interval by itself."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lakebook.registry.ranges import EMPTY_MARK, FROZEN_MARK, OUTDATED_MARK, STALE_MARK, Outline
from lakebook.registry.views import ViewRecord
from lakebook.views.planning import PartitionSpec, RangeSpec, coverage_of, make_batch_partition_spec

MINUTE, HOUR = 60_000, 3_600_000
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LONG = 6 * HOUR
DEFINITION: dict[str, Any] = {
    "sql": "SELECT * FROM t",
    "event_time": "ts",
    "event_times": {},
    "retention": None,
    "lookback": None,
    "instances": ["global"],
    "sort_by": [],
}


def view(interval: str) -> ViewRecord:
    definition = {**DEFINITION, "interval": interval}
    return ViewRecord(1, "v", definition, "hash", "active", 0, None, None, None, NOW, NOW)


@st.composite
def built(draw: st.DrawFn) -> list[Outline]:
    """Ranges that lie one after the other, some with gaps between them: hours, minutes of an hour, or several hours."""
    found: list[Outline] = []
    position = 0
    while position < LONG:
        kind = draw(st.sampled_from(["gap", "hour", "wide", "minutes"]))
        end = position + (2 * HOUR if kind == "wide" else HOUR)
        marks = st.integers(0, 2 * EMPTY_MARK - 1)
        if kind in ("hour", "wide"):
            found.append((position, end, draw(st.integers(0, 3)), draw(marks)))
        if kind == "minutes":
            whole = draw(st.booleans())
            for minute in range(0, 60, 20):
                if whole or draw(st.booleans()):
                    begin = position + minute * MINUTE
                    found.append((begin, begin + 20 * MINUTE, draw(st.integers(0, 3)), draw(marks)))
        position = end
    return found


LOST = st.lists(st.integers(0, 11), max_size=2, unique=True).map(
    lambda halves: tuple((half * HOUR // 2, half * HOUR // 2 + MINUTE) for half in sorted(halves))
)


def by_intervals(ranges: list[Outline], lost: tuple[tuple[int, int], ...]) -> list[RangeSpec]:
    """How each hour stands, with all that any range of it reaches."""
    specs: list[RangeSpec] = []
    position = 0
    last = max([LONG, *(item[1] for item in ranges)])
    while position < last:
        low, high = position, position + HOUR
        met = [item for item in ranges if item[0] < high and item[1] > low]
        high = max([high, *(item[1] for item in met)])
        if low >= LONG and not met:
            break
        some = [item[3] for item in met]
        if any(marks & FROZEN_MARK for marks in some):
            state = "frozen"
        elif sum(item[1] - item[0] for item in met) < high - low:
            state = "missing"
        elif any(marks & OUTDATED_MARK for marks in some):
            state = "outdated"
        elif any(marks & STALE_MARK for marks in some):
            state = "stale"
        else:
            state = "empty" if all(marks & EMPTY_MARK for marks in some) else "built"
        if state in ("missing", "outdated", "stale") and any(b < high and e > low for b, e in lost):
            state = "frozen"
        specs.append(RangeSpec(low, high, state, sum(item[2] for item in met)))
        position = high
    return specs


@given(ranges=built(), lost=LOST)
def test_a_plan_is_what_a_look_at_every_interval_gives(
    ranges: list[Outline], lost: tuple[tuple[int, int], ...]
) -> None:
    found = make_batch_partition_spec(PartitionSpec(view("hour"), "global", 0, LONG, ranges, lost))
    assert found == by_intervals(ranges, lost)
    coverage = coverage_of(found)
    assert sum(item.rows for item in coverage) == sum(item[2] for item in ranges)
    assert all(one.end == two.begin and one.state != two.state for one, two in pairwise(coverage))
