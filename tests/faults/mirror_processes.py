"""A process that mirrors a topic and merges its segments, to be killed on the way."""

from __future__ import annotations

from typing import Any

import lakebook
from lakebook.streams.mirroring import mirror_topic
from mirrored import TOPIC, merge
from table_writers import Line

POINTS = ("mirror.written", "mirror.committed")


def mirror_and_merge(line: Line, target: str, settings: dict[str, Any]) -> None:
    """Mirror what there is, merge the first two segments, remove the first records, and say so."""
    with lakebook.open(target, **settings) as book:
        mirror_topic(book.lake, TOPIC)
        merge(book, list(book.metadata.each_segment(TOPIC, 0))[:2])
        book.metadata.delete_segments_before(TOPIC, 0, 4)
        line.tell("done")
