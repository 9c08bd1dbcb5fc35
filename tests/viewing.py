"""Views for tests: ranges entered without Spark, and what is known of them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from lake import insert, rows_of
from lakebook import Book
from lakebook.clock import to_ms
from lakebook.lake.attempts import Attempt
from lakebook.lake.inserting import write_arrow
from lakebook.lake.table import Table
from lakebook.registry.claims import Claim, settle_claim, take_claim
from lakebook.registry.ranges import NewRange, Range, enter_range, replaced_by, retire_ranges
from lakebook.registry.transactions import Transaction
from lakebook.views.building import _described, insert_partition
from lakebook.views.shaping import table_for
from lakebook.views.view import View

T0 = datetime(2024, 1, 1, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
SECONDS = 60.0


def at(hours: float) -> datetime:
    """So many hours after the beginning of the tests' time."""
    return T0 + timedelta(hours=hours)


def orders(book: Book, name: str = "orders", **options: Any) -> Table:
    """A table with an event time, and no rows."""
    return book.tables.create(name, "id BIGINT, ts TIMESTAMP, region STRING", **options)


def order(table: Table, *hours: float, first: int = 0, region: str = "eu") -> None:
    """Insert rows of these times as one file."""
    insert(table, *({"id": first + n, "ts": at(hour), "region": region} for n, hour in enumerate(hours)))


def view_of(book: Book, source: str = "orders", name: str = "hourly", **options: Any) -> View:
    """A view that has the rows of a table or a topic."""
    options.setdefault("event_time", "ts")
    return book.views.create(name, f"SELECT * FROM {source}", **options)


def claim(book: Book, view: View, begin: datetime, end: datetime, instance: str = "global") -> Claim:
    """Claim a range."""
    record = view.record
    return book._registry.write(
        lambda transaction: take_claim(transaction, record, instance, to_ms(begin), to_ms(end), SECONDS)
    )[0]


def enter(book: Book, view: View, held: Claim) -> None:
    """Enter a claimed range as an empty one, as a build does."""
    record = view.record

    def work(transaction: Transaction) -> None:
        stale, frozen = settle_claim(transaction, record, held)
        replaced = replaced_by(transaction, record.name, held.instance, held.begin, held.end)
        retire_ranges(transaction, record.name, replaced)
        made = NewRange(held.begin, held.end, record.schema_hash, "sources")
        enter_range(transaction, record.name, held.instance, made, stale=stale, frozen=frozen)

    book._registry.write(work)


def enter_hours(book: Book, view: View, hours: Iterable[int]) -> None:
    """Enter empty ranges of an hour each."""
    for hour in hours:
        enter(book, view, claim(book, view, at(hour), at(hour + 1)))


def build_hours(book: Book, view: View, source: Table, hours: Iterable[int]) -> None:
    """Build ranges of an hour each with the rows that a table of orders has of them: Arrow writes the files."""
    record = view.record
    rows = source.to_arrow().to_pylist()
    for hour in hours:
        held = claim(book, view, at(hour), at(hour + 1))
        table = table_for(book.lake, record, held.instance, "id BIGINT, ts TIMESTAMP, region STRING")
        wanted = [row for row in rows if row["ts"] is not None and at(hour) <= row["ts"] < at(hour + 1)]
        with Attempt(book.lake, table, by_view=True) as attempt:
            shape = book.lake.shape_of(table, table.schema_version)
            target = Table(book.lake, table)
            files = write_arrow(book.lake, table, attempt, shape, rows_of(target, wanted)) if wanted else []
            made = _described(book.lake, record, table, held, files, "sources", ())
            insert_partition(
                book.lake, record, held.instance, table, held, attempt, made, files, lambda _: None, "overwrite"
            )


def stale_hours(view: View) -> list[int]:
    """The hours whose ranges are stale."""
    return [hours_of(item)[0] for item in view.list_partitions() if item.stale_at is not None]


def frozen_hours(view: View) -> list[int]:
    """The hours whose ranges are frozen."""
    return [hours_of(item)[0] for item in view.list_partitions() if item.frozen_at is not None]


def hours_of(item: Range) -> tuple[int, int]:
    """A range in hours since the beginning."""
    return int((item.begin - T0) / HOUR), int((item.end - T0) / HOUR)
