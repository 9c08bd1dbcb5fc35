"""A process that looks after topics, to be killed while it does: it merges, retains and sweeps."""

from __future__ import annotations

from typing import Any

import lakebook
from lakebook.components.janitor import Janitor
from table_writers import Line

TOPIC = "orders"
#: Where a merge comes by.
POINTS = ("merge.written", "merge.committed")
#: Segments are merged at once, and what others leave behind is found at once.
IMPATIENT = {
    "merge_quiet": 0,
    "merge_segments": 4,
    "insert_alive": 0.1,
    "sweep_grace": 0,
    "lease_seconds": 0.1,
    "temporary_file_grace": 0,
}


def look_after_topics(line: Line, target: str, settings: dict[str, Any], *actions: str) -> None:
    """Do pieces of the janitor's work, one after the other."""
    with lakebook.open(target, **settings) as book:
        janitor = Janitor(book.lake)
        for action in actions:
            line.tell("doing", action)
            janitor.run_once(action)
        line.tell("done")
