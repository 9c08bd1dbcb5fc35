"""What upkeep has left to do, as anybody can see it: small files, what is owed, who is asked in vain, and names."""

from __future__ import annotations

from typing import Any

import pytest

from books import Place, describe
from lake import insert, numbers
from lakebook import Book
from lakebook.components.backlog import count_small_files
from lakebook.lake.compaction import debt_of
from lakebook.registry.deliveries import Lane, claim_turn, park, save_lanes
from lakebook.registry.maintenance import REFRESH, ask
from lakebook.registry.owed import begin_updates, fail_updates, owe


@pytest.fixture
def book(place: Place) -> Book:
    return place.open(compact_files=3)


def deliver(book: Book, **status: Any) -> None:
    """As if some process delivered, and said this of itself."""
    book._registry.write(lambda transaction: claim_turn(transaction, None, status))


# --- small files -------------------------------------------------------------------


def test_small_files_are_counted_as_the_compactor_counts_them(book: Book) -> None:
    one, two = (book.tables.create(name, "id BIGINT, day BIGINT", partition_by=["day"]) for name in ("one", "two"))
    for number in range(4):
        insert(one, {"id": number, "day": 1})
        insert(two, {"id": number, "day": number})  # Too few in each of its partitions.
    insert(one, {"id": 9, "day": 2})
    assert debt_of(book.lake, two.record).files == 0
    assert count_small_files(book.lake) == debt_of(book.lake, one.record).files == 4
    one.set_properties(**{"lakebook.compaction": "off"})
    assert count_small_files(book.lake) == 0


def test_of_very_many_small_files_some_are_counted(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers(book, "a", *([number] for number in range(6)))
    numbers(book, "b", *([number] for number in range(4)))
    assert count_small_files(book.lake) == 10
    monkeypatch.setattr("lakebook.components.backlog._MOST_FILES", 5)
    assert count_small_files(book.lake) == 9
    monkeypatch.setattr("lakebook.components.backlog._MOST_TABLES", 1)
    assert count_small_files(book.lake) == 5
    assert book.overview().owed["small_files"] == 5


# --- what is owed ------------------------------------------------------------------


def test_what_is_owed_is_listed_by_name_with_its_state_and_why_it_failed(book: Book) -> None:
    table, other = numbers(book, "a", [1], [2]), numbers(book, "b", [3])
    book._registry.write(lambda transaction: owe(transaction, table.id, range(3)))
    book._registry.write(lambda transaction: owe(transaction, other.id, range(2)))
    assert any("5 versions are owed to Iceberg" in warning for warning in book.overview().warnings)
    book._registry.write(lambda transaction: begin_updates(transaction, table.id, 1))
    book._registry.write(lambda transaction: fail_updates(transaction, table.id, 1, "the disk is full"))
    assert [(item.table, item.version, item.state, item.last_error) for item in book.owed(table="a")] == [
        ("default.a", 0, "failed", "the disk is full"),
        ("default.a", 1, "failed", "the disk is full"),
        ("default.a", 2, "pending", None),
    ]
    assert "2 versions could not be published: see `lakebook maintenance owed --state failed`" in (
        book.overview().warnings
    )
    table.publish()
    assert [(item.table, item.version) for item in book.owed()] == [("default.b", 0), ("default.b", 1)]
    assert [item.version for item in book.owed(table="a", state="completed")] == [0, 1, 2]
    assert len(book.owed(state=None)) == 5
    page = book.owed(limit=1)
    assert [item.version for item in book.owed(after=page.next)] == [1]


# --- who does the work -------------------------------------------------------------


def test_calls_that_were_given_up_and_still_run_are_a_warning(book: Book) -> None:
    deliver(book, subscribers={"compactor": {"breaker": "closed", "abandoned": 2}})
    found = book.overview()
    assert {item.name: item.abandoned for item in found.subscribers}["compactor"] == 2
    assert "2 calls of compactor were given up and still run: look what they hang on" in found.warnings


def test_a_request_to_a_component_that_nobody_runs_is_a_warning(book: Book) -> None:
    for component in ("compactor", "orchestrator"):
        book._registry.write(lambda transaction: ask(transaction, REFRESH, component))  # noqa: B023 - called at once
    deliver(book, components=["orchestrator"])
    assert [warning for warning in book.overview().warnings if "requests" in warning] == [
        "1 requests wait for compactor, which `lakebook run --only` leaves out"
    ]


# --- names -------------------------------------------------------------------------


def test_what_stalls_what_is_parked_and_what_was_done_is_shown_by_name(book: Book) -> None:
    numbers(book, "a", [1])
    book.metadata.create_topic("orders", 2)
    book.metadata.add_segments([describe(partition=1, base=0)])
    book.metadata.ensure_consumer_group("readers")
    book.maintain(["iceberg_updater"], spark=None)
    events = book.events.read(book.events.beginning()).events
    objects = {event.object_id for event in events} | {10**6}
    lanes = [Lane(object_id, 1, 2) for object_id in objects]
    book._registry.write(lambda transaction: save_lanes(transaction, "compactor", lanes, []))
    kinds = {event.table: event for event in events}
    for name in ("tables", "segments"):
        event = kinds[name]
        book._registry.write(lambda transaction: park(transaction, "compactor", event, 30, "no way"))  # noqa: B023
    book.pause("compactor", table="a", reason="a backfill")
    found = book.overview()
    shown = {item.shown for item in found.stalled}
    assert shown == {
        "table default.a",
        "topic orders",
        "partition orders/0",
        "partition orders/1",
        "group readers",
        "object 1000000",
    }
    assert [letter.shown for letter in book.dead_letters()] == ["table default.a", "partition orders/1"]
    assert book.dead_letter(1).shown == "table default.a"
    assert [pause.table for pause in found.pauses] == ["default.a"]
    assert any(warning.startswith("compactor is paused on table default.a since") for warning in found.warnings)
    assert {item.table for item in book.maintenance_history(table="a")} <= {"default.a"}
