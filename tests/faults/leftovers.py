"""Compares a warehouse with what the registry of its book knows, when every grace has passed."""

from __future__ import annotations

from typing import Any

from books import Place
from lakebook import Book
from lakebook.registry.inserts import EVERY_INSERT, known_paths
from lakebook.registry.stream_folders import unknown_stream_paths
from table_facts import later, objects_of, uploads_of

#: In two weeks nobody waits for anything any more.
LONG = 14 * 86_400.0
#: A store that is well again has time.
PATIENT: dict[str, Any] = {"s3_request_seconds": 60.0, "s3_retry_seconds": 60.0}
# What the janitor does to the database itself may come with advice.
_ADVISES = frozenset({"upkeep"})


def known(book: Book, paths: set[str]) -> set[str]:
    """Those paths that a row knows: of a table, of its Iceberg metadata, or of a segment."""
    registry = book.lake.registry
    streams = sorted(path for path in paths if path.startswith("topics/"))
    others = sorted(paths - set(streams))
    unknown = registry.read_with(lambda reader: unknown_stream_paths(reader, streams))
    return (set(streams) - set(unknown)) | registry.read_with(lambda reader: known_paths(reader, others))


def check_that_nothing_is_left(place: Place, **settings: Any) -> None:
    """Verify, expire, clean and sweep when all is well again; then every object is one that a row knows."""
    checked = place.open(**PATIENT, **settings).verify()
    assert checked.ok, checked.findings
    clock = later(LONG)
    impatient = {"lease_seconds": 0.1, "insert_alive": 0.1}
    book = place.open(clock=clock, **PATIENT, **{**settings, **impatient})
    for _ in range(4):
        book.cleaner.expire(seconds=0, versions=1, wait=True)
        _clean(book)
        clock.advance(86_400.0)
    assert book._registry.all(EVERY_INSERT, "", 1) == []
    assert uploads_of(book) == []
    there = objects_of(book)
    assert there - known(book, there) == set()
    checked = book.verify()
    assert checked.ok, checked.findings
    assert not checked.unfinished, checked.unfinished


def _clean(book: Book) -> None:
    """One round of the janitor, in which nothing fails."""
    done = book.maintain(["janitor"], spark=None)["janitor"]
    assert "error" not in done, done
    for action, told in done.items():
        assert "error" not in told, (action, told)
        assert action in _ADVISES or not told.get("failed"), (action, told)
