"""Any sequence of appends, retention, merges, reads and commits has the outcome that lists would have."""

from __future__ import annotations

from pathlib import Path

from books import Postgres
from stream_lists import OPERATIONS, SETTINGS, Streams, drive, in_memory, on_postgresql, steps_of

# What is most at odds with each other happens more often.
OFTEN = ("append", "merge", "clean", "read_with_lease")


def test_streams_in_memory_are_what_lists_would_be() -> None:
    drive(Streams, steps_of(OPERATIONS, OFTEN), in_memory(SETTINGS), 25)


def test_streams_on_postgresql_are_what_lists_would_be(postgres: Postgres, tmp_path: Path) -> None:
    with on_postgresql(postgres, tmp_path, SETTINGS) as open_book:
        drive(Streams, steps_of(OPERATIONS, OFTEN), open_book, 6)
