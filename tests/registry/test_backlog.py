"""What upkeep has left to do, as anybody can see it: small files, what is owed, who is asked in vain, and names."""

from __future__ import annotations

from typing import Any

import pytest

from books import Place, describe
from lake import insert, numbers
from lakebook import Book
from lakebook.components.backlog import count_old_versions, count_small_files, count_small_segments
from lakebook.components.janitor import Janitor
from lakebook.lake.compaction import debt_of
from lakebook.pipelines.pipeline import Pipeline
from lakebook.registry.deliveries import Lane, claim_turn, park, save_lanes
from lakebook.registry.maintenance import REFRESH, ask
from lakebook.registry.owed import begin_updates, fail_updates, owe
from lakebook.registry.pipelines import STOPPED, note_failure, set_state
from streaming import produce


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


# --- small segments ----------------------------------------------------------------


def test_small_segments_are_counted_as_the_janitor_merges_them(place: Place) -> None:
    book = place.open(merge_segments=3, merge_quiet=0)
    book.topics.create("orders", 2)
    book.topics.create("kept", config={"segment.merge": "false"})
    for number in range(5):
        produce(book, "orders", 0, number)
        produce(book, "kept", 0, number)
    produce(book, "orders", 1, 1)
    assert count_small_segments(book.lake) == 5
    assert book.overview().owed["small_segments"] == 5
    assert Janitor(book.lake).run_once("merging")["merging"]["segments"] == 5
    assert count_small_segments(book.lake) == 0


def test_segments_that_are_young_are_not_counted(place: Place) -> None:
    book = place.open(merge_segments=3, merge_quiet=3600)
    book.topics.create("orders")
    for number in range(3):
        produce(book, "orders", 0, number)
    assert count_small_segments(book.lake) == 0


def test_of_very_many_segments_the_newest_are_counted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    book = place.open(merge_segments=3, merge_quiet=0)
    book.topics.create("orders")
    for number in range(6):
        produce(book, "orders", 0, number)
    monkeypatch.setattr("lakebook.components.backlog._MOST_SEGMENTS", 4)
    assert count_small_segments(book.lake) == 4
    monkeypatch.setattr("lakebook.components.names._MANY_SMALL_SEGMENTS", 4)
    (warning,) = book.overview().warnings
    assert "4 small segments are worth a merge" in warning and "lakebook run" in warning


# --- history -----------------------------------------------------------------------


def test_versions_beyond_the_history_that_is_kept_are_counted_until_they_expire(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = numbers(book, "a", *([number] for number in range(6)))
    numbers(book, "b", [1])
    assert count_old_versions(book.lake) == 0
    table.set_properties(**{"lakebook.history.versions": "2", "lakebook.history.seconds": "0"})
    assert count_old_versions(book.lake) == book.overview().owed["old_versions"] == 5
    with table.pin(version=3):
        # What somebody reads is no surplus.
        assert count_old_versions(book.lake) == 3
    monkeypatch.setattr("lakebook.components.names._MANY_OLD_VERSIONS", 5)
    assert any("5 versions are older than the history that is kept" in item for item in book.overview().warnings)
    book.cleaner.expire()
    assert count_old_versions(book.lake) == 0


# --- pipelines ---------------------------------------------------------------------


def pipeline(book: Book, name: str, **options: Any) -> Pipeline:
    return book.pipelines.create(name, into="t", topics="orders", decoder="json", **options)


def test_a_pipeline_that_does_not_go_on_is_a_warning(book: Book) -> None:
    book.topics.create("orders")
    book.tables.create("t", "id BIGINT")
    produce(book, "orders", 0, 1, 2, 3)
    by_hand, failing, stopped, paused = (pipeline(book, name) for name in ("a", "b", "c", "d"))
    assert book.overview().owed["pipeline_lag"] == 12
    # Somebody runs them by hand, or nobody does: that is nobody else's business.
    assert [item for item in book.overview().warnings if "pipeline" in item] == []
    write = book._registry.write
    for _ in range(2):
        write(lambda transaction: note_failure(transaction, failing.listed.id, "the disk is full", 1.0))
    write(lambda transaction: set_state(transaction, stopped.listed.id, "c", STOPPED, "a record does not fit"))
    paused.pause()
    found = book.overview()
    assert [item for item in found.warnings if "pipeline" in item] == [
        "pipeline c has stopped, and 3 records wait: a record does not fit; mend it, then run"
        " `lakebook pipelines resume c`",
        "pipeline b has failed 2 times in a row: the disk is full; see `lakebook pipelines show b`",
        "pipeline d is paused, and 3 records wait",
    ]
    assert (found.owed["stopped_pipelines"], found.owed["failing_pipelines"]) == (1, 1)
    for item in (by_hand, failing, stopped, paused):
        item.delete()
    assert book.overview().owed["pipeline_lag"] == 0


def test_pipelines_with_an_interval_that_nobody_runs_are_a_warning_while_records_wait(book: Book) -> None:
    book.topics.create("orders")
    book.tables.create("t", "id BIGINT")
    produce(book, "orders", 0, 1, 2)
    pipeline(book, "a", interval=5.0)
    told = "nobody runs the pipelines that have an interval, and 2 records wait for a"
    assert told in book.overview().warnings
    deliver(book, components=["pipelines"])
    assert told not in book.overview().warnings


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
