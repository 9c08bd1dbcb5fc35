"""Commits of outside engines mark the ranges of views whose times their files have, and no others."""

from __future__ import annotations

import struct
from datetime import datetime
from typing import Any

import pytest

from books import POSTGRESQL, SQLITE
from by_hand import Hand, settle
from lake import ids, in_memory, own_warehouse, rows_of, with_ids  # noqa: F401
from lakebook import Book
from lakebook.clock import to_ms
from lakebook.lake.table import Table
from lakebook.registry.views import earliest_time
from viewing import at, enter_hours, order, orders, stale_hours, view_of

TS = 2
#: PyIceberg writes to a folder.
with_folder = pytest.mark.parametrize("place", [SQLITE, POSTGRESQL], indirect=True)


@pytest.fixture
def table(book: Book) -> Table:
    return orders(book)


def row(hour: float, number: int = 1) -> dict[str, Any]:
    return {"id": number, "ts": at(hour), "region": "eu"}


def bound(time: datetime) -> bytes:
    """A time as a manifest has it."""
    return struct.pack("<q", to_ms(time) * 1000)


def said(least: float, most: float) -> dict[str, Any]:
    """What an engine writes of the times of a file."""
    return {"lower_bounds": {TS: bound(at(least))}, "upper_bounds": {TS: bound(at(most))}}


@with_folder
def test_an_append_of_pyiceberg_makes_the_ranges_of_its_rows_stale_and_no_others(book: Book, table: Table) -> None:
    order(table, 0.5)
    view = view_of(book)
    enter_hours(book, view, range(6))
    outside = book.catalog().load_table("default.orders")
    outside.append(rows_of(table, [row(2.5), row(3.5)]))
    assert stale_hours(view) == [2, 3]
    enter_hours(book, view, [2, 3])
    settle(book)
    assert stale_hours(view) == []
    assert [spec.state for spec in view.plan(at(1), at(4))] == ["empty"] * 3


@with_folder
def test_rows_that_pyiceberg_deletes_make_the_ranges_of_their_files_stale(book: Book, table: Table) -> None:
    view = view_of(book)
    outside = book.catalog().load_table("default.orders")
    outside.append(rows_of(table, [row(0.5, 1)]))
    outside.append(rows_of(table, [row(2.5, 2), row(3.5, 3)]))
    enter_hours(book, view, range(6))
    outside.delete("id = 3")
    assert stale_hours(view) == [2, 3]
    enter_hours(book, view, [2, 3])
    outside.delete("id = 1")
    assert stale_hours(view) == [0]


@with_folder
def test_what_is_gone_back_to_makes_the_ranges_of_what_comes_and_goes_stale(book: Book, table: Table) -> None:
    view = view_of(book)
    outside = book.catalog().load_table("default.orders")
    outside.append(rows_of(table, [row(0.5, 1)]))
    former = outside.current_snapshot()
    assert former is not None
    outside.append(rows_of(table, [row(4.5, 2)]))
    enter_hours(book, view, range(6))
    outside.manage_snapshots().rollback_to_snapshot(former.snapshot_id).commit()
    assert stale_hours(view) == [4]


@with_folder
def test_deleted_positions_make_the_ranges_of_the_file_they_are_about_stale(book: Book, table: Table) -> None:
    view = view_of(book)
    hand = Hand(book, table)
    first = hand.data_file(arrow=with_ids(table, [row(1.5)]), **said(1.5, 1.5))
    second = hand.data_file(arrow=with_ids(table, [row(3.5)]), **said(3.5, 3.5))
    hand.append(first, second)
    enter_hours(book, view, range(6))
    hand.delete_positions((first.file_path, 0), about=first.file_path)
    assert stale_hours(view) == [1]
    hand.delete_positions((second.file_path, 0))
    assert stale_hours(view) == list(range(6))


@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"lower_bounds": {TS: bound(at(1))}},
        {"lower_bounds": {TS: bound(at(2))}, "upper_bounds": {TS: bound(at(1))}},
        {"lower_bounds": {TS: b"?"}, "upper_bounds": {TS: b"?"}},
        {"lower_bounds": {1: bound(at(1))}, "upper_bounds": {1: bound(at(1))}},
        {"null_value_counts": {TS: 0}, "value_counts": {TS: 0}},
    ],
)
@in_memory
def test_a_file_without_bounds_that_can_be_true_makes_everything_stale(
    book: Book, table: Table, bounds: dict[str, Any]
) -> None:
    view = view_of(book)
    enter_hours(book, view, range(3))
    hand = Hand(book, table)
    hand.append(hand.data_file(arrow=with_ids(table, [row(1.5)]), **bounds))
    assert stale_hours(view) == [0, 1, 2]


@with_folder
def test_rows_without_an_event_time_belong_to_no_range_whoever_writes_them(book: Book, table: Table) -> None:
    view = view_of(book)
    enter_hours(book, view, range(3))
    outside = book.catalog().load_table("default.orders")
    outside.append(rows_of(table, [{"id": 1, "ts": None, "region": "eu"}]))
    assert stale_hours(view) == []


@with_folder
@pytest.mark.parametrize("lie", [said(3.5, 3.6), {"null_value_counts": {TS: 1}}], ids=["times", "nulls"])
def test_where_a_file_has_other_times_than_its_writer_said_they_are_stale_once_it_was_looked_at(
    book: Book, table: Table, lie: dict[str, Any]
) -> None:
    view = view_of(book)
    enter_hours(book, view, range(6))
    hand = Hand(book, table)
    hand.append(hand.data_file(arrow=with_ids(table, [row(1.5)]), **lie))
    # No plan goes by what nobody has looked at.
    assert ids(table, "ts < '2024-01-01T03:00:00+00:00'") == [1]
    settle(book)
    assert stale_hours(view) == ([1, 3] if "lower_bounds" in lie else [1])


@with_folder
@pytest.mark.parametrize(
    ("lie", "where"),
    [
        ({}, "id = 1 AND region IN ('eu', 'us')"),
        (said(3.5, 3.6), "ts < '2024-01-01T03:00:00+00:00'"),
        ({"null_value_counts": {TS: 1}}, "ts < '2024-01-01T03:00:00+00:00'"),
    ],
    ids=["honest", "times", "nulls"],
)
def test_a_plan_finds_a_file_whenever_somebody_looks_at_it_meanwhile(
    book: Book, table: Table, lie: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its footer is taken here, and nowhere else.
    monkeypatch.setattr(book.lake.settling, "notice", lambda table: None)
    hand = Hand(book, table)
    registry, read = book.lake.registry, book.lake.registry.read_with
    reads = before = 0

    def after_a_look(work: Any, **options: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads == before:
            settled.append(book.settle_debts().paid)
        return read(work, **options)

    while reads >= before:
        reads, before = 0, before + 1
        hand.append(hand.data_file(arrow=with_ids(table, [row(1.5)]), **lie))
        settled: list[int] = []
        with monkeypatch.context() as patched:
            patched.setattr(registry, "read_with", after_a_look)
            found = table.plan(where).files
        assert len(found) == before, f"the footer was taken before read {before}"
        assert settled == ([1] if reads >= before else [])
    assert before > 4


@with_folder
def test_the_first_row_of_a_source_is_known_before_its_footer_was_taken(book: Book, table: Table) -> None:
    view = view_of(book)
    book.catalog().load_table("default.orders").append(rows_of(table, [row(2.5)]))
    found = book._registry.read_with(lambda reader: earliest_time(reader, view.record))
    assert found == to_ms(at(2.5))
