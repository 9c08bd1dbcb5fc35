"""Charts of text: how a view stands over time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from lakebook.views.planning import Coverage

# The state that a cell shows where it stands for several: the one somebody should look at first.
_SIGNS = {
    "missing": ("·", ".", "bright_black"),
    "stale": ("▒", "~", "yellow"),
    "outdated": ("▒", "o", "magenta"),
    "frozen": ("▓", "f", "cyan"),
    "empty": ("□", "_", "green"),
    "built": ("█", "#", "green"),
}
_WORDS = {
    "missing": "missing",
    "stale": "stale: its sources have changed",
    "outdated": "built by another query",
    "frozen": "frozen: its sources are partly gone",
    "empty": "empty",
    "built": "built",
}
_WIDTH = 60


def draw_coverage(coverage: Sequence[Coverage], begin: datetime, end: datetime, width_ms: int) -> None:
    """Draw which stretches of time are built, stale, empty, frozen or missing, with a legend."""
    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, highlight=False, width=None if terminal else 10_000)
    cells = _cells(coverage, begin, end, width_ms)
    step = (end - begin) / max(1, len(cells))
    console.print()
    for start in range(0, len(cells), _WIDTH):
        row = cells[start : start + _WIDTH]
        line = Text(f"{(begin + start * step).replace(tzinfo=None).isoformat(sep=' ', timespec='minutes')}  ")
        for state in row:
            sign, plain, style = _SIGNS[state]
            line.append(sign if terminal else plain, style=style)
        console.print(line)
    legend = Text("\n")
    for state in dict.fromkeys(cells):
        sign, plain, style = _SIGNS[state]
        legend.append(sign if terminal else plain, style=style).append(f" {_WORDS[state]}   ")
    console.print(legend)


def _cells(coverage: Sequence[Coverage], begin: datetime, end: datetime, width_ms: int) -> list[str]:
    """One state for each interval, or for several where there would be too many."""
    number = max(1, min(4 * _WIDTH, round((end - begin) / timedelta(milliseconds=width_ms))))
    order = list(_SIGNS)
    cells = []
    for cell in range(number):
        low, high = begin + (end - begin) * cell / number, begin + (end - begin) * (cell + 1) / number
        met = {item.state for item in coverage if item.begin < high and item.end > low}
        cells.append(min(met, key=order.index, default="missing"))
    return cells
