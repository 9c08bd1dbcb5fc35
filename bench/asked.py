"""What a run is asked for, as every part of it gets to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.measure import Effort


class Say(Protocol):
    """Tells who watches what is being done."""

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None: ...


@dataclass(frozen=True)
class Asked:
    """The options of a run."""

    kinds: Sequence[str]
    parts: Sequence[str]
    quick: bool
    effort: Effort
    #: Numbers of segments.
    segments: Sequence[int]
    #: Rows that are inserted through Spark.
    rows: int
    #: Files that a table has when one more is committed.
    files: Sequence[int]
    #: Files of a table that is planned.
    planned: Sequence[int]
    #: Inserts that are published one by one, and in a burst.
    published: int
    #: Files of a table that is published at once.
    published_files: Sequence[int]
    #: Records that are sent to topics and read from them.
    records: int
    #: Segments among which one record is found.
    among: int
    #: Files, segments and events of a book that has grown, then its tables and topics.
    grown: Sequence[int] = ()
    grown_tables: Sequence[int] = ()
    #: Seconds that a number of writers gets.
    writing: int = 1
    #: Files of the books that are copied and rebuilt.
    moved: Sequence[int] = ()
