"""Topics with real segments for tests: they are read back record by record, from their files."""

from __future__ import annotations

from collections.abc import Iterable

from lakebook import Book, SegmentInfo
from lakebook.registry.footers import load_footers
from lakebook.streams.segment_files import SegmentReader


def values_of(book: Book, segments: Iterable[SegmentInfo], start: int = 0) -> list[tuple[int, bytes | None]]:
    """The offsets and values of segments from an offset on, as their files have them."""
    found: list[tuple[int, bytes | None]] = []
    for segment in segments:
        footers = book._registry.read_with(lambda reader: load_footers(reader, [segment.s3_key]))  # noqa: B023
        reader = SegmentReader(book.lake.store, segment.s3_key, footers[segment.s3_key].metadata, segment.base_offset)
        for batch in reader.batches(max(start, segment.base_offset)):
            found += zip(batch.column("offset").to_pylist(), batch.column("value").to_pylist(), strict=True)
    return found


def log_of(book: Book, topic: str = "orders", number: int = 0) -> list[tuple[int, bytes | None]]:
    """Everything that a partition holds: offsets and values."""
    return values_of(book, book.metadata.each_segment(topic, number))
