"""Compares a bucket with what the registry of its book knows."""

from __future__ import annotations

from books import Place
from buckets import Buckets
from lakebook import Book
from lakebook.registry.inserts import known_paths
from lakebook.registry.stream_folders import unknown_stream_paths
from table_facts import later

#: In two weeks nobody waits for anything any more.
LONG = 14 * 86_400.0


def known(book: Book, paths: set[str]) -> set[str]:
    """Those paths that a row knows: of a table, of its Iceberg metadata, or of a segment."""
    registry = book.lake.registry
    streams = sorted(path for path in paths if path.startswith("topics/"))
    others = sorted(paths - set(streams))
    unknown = registry.read_with(lambda reader: unknown_stream_paths(reader, streams))
    return (set(streams) - set(unknown)) | registry.read_with(lambda reader: known_paths(reader, others))


def check_that_nothing_is_left(place: Place, buckets: Buckets) -> None:
    """Verify, expire, clean and sweep when the bucket is well again; then every object is one that a row knows."""
    bucket = place.settings["warehouse"].split("/")[2]
    well = {"s3_endpoint": buckets.endpoint, "s3_request_seconds": 60.0, "s3_retry_seconds": 60.0}
    checked = place.open(**well).verify()
    assert checked.ok, checked.findings
    clock = later(LONG)
    book = place.open(clock=clock, lease_seconds=0.1, **{**well, "insert_alive": 0.1})
    for _ in range(4):
        book.cleaner.expire(seconds=0, versions=1, wait=True)
        done = book.maintain(["janitor"], spark=None)
        assert not done["janitor"].get("failed"), done
        clock.advance(86_400.0)
    assert buckets.uploads(bucket) == []
    there = {key.removeprefix("lake/") for key in buckets.keys(bucket)}
    assert there - known(book, there) == set()
    checked = book.verify()
    assert checked.ok, checked.findings
