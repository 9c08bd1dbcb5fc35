"""The options of the data source: each has a name, a meaning, and an error of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from lakebook.errors import InvalidSetting, SparkUnsuitable
from lakebook.names import is_moment, shown

if TYPE_CHECKING:
    from lakebook.book import Book

T = TypeVar("T")

#: What each use of the data source understands, and what it means.
READ_TOPIC = ("startingOffsets", "endingOffsets", "startingTimestamp", "endingTimestamp", "segmentsPerTask")
READ_STREAM = ("startingOffsets", "startingTimestamp", "maxRecordsPerBatch", "segmentsPerTask", "failOnDataLoss")
READ_TABLE = ("version", "timestamp")
WRITE_BATCH = ("partitioner", "sink", "batchId")
WRITE_STREAM = ("partitioner", "sink")
_COMMON = ("book", "topic", "table", "leaseSeconds")
# Spark's own, which it hands on.
_SPARKS = ("checkpointlocation", "queryname", "outputmode")

_ON = "option {}".format


@dataclass(frozen=True)
class Options:
    """The options as they were given, for one use of the data source."""

    #: A folder or a registry URL. It may hold a password, and so is never shown.
    place: str | None = field(repr=False)
    topic: str | None
    table: str | None
    given: Mapping[str, str] = field(repr=False)

    def text(self, name: str) -> str | None:
        """The text of an option; none if it was not given."""
        return self.given.get(name.lower())

    def number(self, name: str, *, least: int = 1) -> int | None:
        """A whole number."""
        return self._as(name, lambda text: _number(text, least), f"a whole number from {least} on")

    def flag(self, name: str, *, otherwise: bool) -> bool:
        """A choice between true and false."""
        found = self._as(name, lambda text: {"true": True, "false": False}[text.lower()], "true or false")
        return otherwise if found is None else found

    def moment(self, name: str) -> datetime | None:
        """A time with its zone."""
        return self._as(name, _moment, "a time with its zone, such as 2026-01-31T12:00:00Z")

    def places(self, offsets: str, timestamp: str, otherwise: str) -> Any:
        """A place in every partition: by offsets or by a time, but not by both."""
        moment = self.moment(timestamp)
        if moment is not None:
            if self.text(offsets) is not None:
                raise InvalidSetting(f"{offsets} says the same otherwise", on=_ON(timestamp), remedy="Give one of them")
            return moment
        wanted = 'earliest, latest, or an offset for each partition such as {"0": 10, "1": 20}'
        found = self._as(offsets, _offsets, wanted)
        return otherwise if found is None else found

    def _as(self, name: str, convert: Callable[[str], T], wanted: str) -> T | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            return convert(text.strip())
        except (ValueError, KeyError, TypeError):
            raise InvalidSetting(f"it cannot be {shown(text)}", on=_ON(name), remedy=f"Give {wanted}") from None

    @property
    def lease_seconds(self) -> int | None:
        """For how long what was planned is pinned, if the book's settings are not to decide."""
        return self.number("leaseSeconds")

    @contextmanager
    def opened(self) -> Iterator[Book]:
        """The book, open while the block runs."""
        book = self.open()
        try:
            yield book
        finally:
            book.close()

    def open(self) -> Book:
        """Open the book. It publishes nothing: who looks after it does."""
        from lakebook.book import open_book

        place = self.place or os.environ.get("LAKEBOOK_BOOK") or None
        if place is None and not os.environ.get("LAKEBOOK_REGISTRY"):
            raise InvalidSetting(
                "no book was named",
                on=_ON("book"),
                remedy="Give a folder or a registry URL, or set LAKEBOOK_BOOK before Spark is started",
            )
        if place == ":memory:":
            raise SparkUnsuitable("a book in memory is in one process alone", on=_ON("book"), remedy="Use a folder")
        return open_book(place, create=False, publish="off")


def options_of(given: Mapping[str, str], understood: Callable[[bool], tuple[str, ...]]) -> Options:
    """Check the names of options, and that either a topic or a table is meant.

    `understood` is asked which options there are beside the common ones, with whether it is a table.
    """
    plain = {name.lower(): value for name, value in given.items()}
    topic, table = plain.get("topic"), plain.get("table")
    if (topic is None) == (table is None):
        raise InvalidSetting(
            "a topic or a table has to be named" if topic is None else "a topic and a table were named",
            on="format lakebook",
            remedy='Give .option("topic", …) or .option("table", …)',
        )
    names = (*_COMMON, *understood(table is not None))
    known = {name.lower() for name in names} | set(_SPARKS)
    for name in plain:
        if name not in known:
            raise InvalidSetting(
                f"there is no option {shown(name)} here", on="format lakebook", remedy=f"There are {', '.join(names)}"
            )
    return Options(plain.get("book"), topic, table, plain)


def _number(text: str, least: int) -> int:
    number = int(text)
    if number < least:
        raise ValueError
    return number


def _moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    if not is_moment(found):
        raise ValueError
    return found


def _offsets(text: str) -> Any:
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    found = json.loads(text)
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    if not isinstance(found, dict):
        raise TypeError
    return {int(number): offset for number, offset in found.items()}
