"""Compares a book with what its writers were told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lakebook import Book
from writers import TOPIC


def check_acknowledged(book: Book, facts: Iterable[tuple[Any, ...]]) -> None:
    """Everything acknowledged is there, or was removed whole by retention; nothing overlaps."""
    facts = list(facts)
    partitions = {p.partition_id: p for p in book.metadata.list_partitions(TOPIC)}
    present = {number: {s.base_offset: s for s in book.metadata.each_segment(TOPIC, number)} for number in partitions}
    for kind, number, *rest in (fact for fact in facts if fact[0] == "segment"):
        base, end, segment_id = rest
        if end < partitions[number].log_start:
            continue
        found = present[number].get(base)
        assert found is not None, (kind, number, base)
        assert (found.end_offset, found.id) == (end, segment_id)
    for number, segments in present.items():
        expected = partitions[number].log_start
        for base, segment in sorted(segments.items()):
            assert base == expected
            expected = segment.end_offset + 1
        assert partitions[number].high_watermark == expected
    newest: dict[tuple[str, int], int] = {}
    for _, number, offset, group in (fact for fact in facts if fact[0] == "offset"):
        newest[group, number] = max(offset, newest.get((group, number), 0))
    for (group, number), offset in newest.items():
        committed = book.metadata.get_committed_offset(group, TOPIC, number)
        assert committed is not None
        assert committed >= offset
    checked = book.verify()
    assert checked.ok, checked.findings[:5]
