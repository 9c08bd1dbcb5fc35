"""A process that materialises a view on the Spark of another one, to be killed while it does."""

from __future__ import annotations

from typing import Any

import lakebook
from table_writers import Line, joined
from viewing import at

VIEW = "hourly"
POINTS = ("view.claimed", "view.built", "view.written", "view.committed")
#: Whoever takes over does not wait for long.
IMPATIENT: dict[str, Any] = {
    "lease_seconds": 0.5,
    "insert_alive": 0.1,
    "sweep_grace": 0,
    "temporary_file_grace": 0,
    "publish": "off",
}


def materialise(line: Line, target: str, settings: dict[str, Any], gateway: tuple[int, str]) -> None:
    """Build an hour of the view."""
    spark = joined(*gateway)
    line.tell("started")
    with lakebook.open(target, **settings) as book:
        book.views.get(VIEW).materialize(spark, at(0), at(1), parallel=1)
    line.tell("done")
