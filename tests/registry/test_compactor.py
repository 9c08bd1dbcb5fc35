"""The compactor looks at tables that have changed, says what there is to gain, and waits where it must."""

from __future__ import annotations

from typing import Any

import pytest

from books import Place
from lake import insert, numbers, own_warehouse, records, run_sql  # noqa: F401
from lakebook import Book
from lakebook.cdc.subscribers import Event, Refresh
from lakebook.clock import ManualClock
from lakebook.components.compactor import FIRST_PAUSE, LONGEST_PAUSE, Compactor
from lakebook.errors import BookClosed, RegistryTimeout, RegistryUnavailable, SparkUnsuitable
from lakebook.lake.attempts import Attempt
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.inserts import REWRITE
from lakebook.registry.maintenance import end_pause, list_work, pause
from lakebook.registry.outside import hold_back
from lakebook.registry.schema import MAX_BIGINT
from lakebook.registry.tables import TableRecord

DELAY = 10.0


class Failing:
    """Spark that cannot be had."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        raise SparkUnsuitable("there is no Java", on="Spark")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def book(shared_place: Place, clock: ManualClock) -> Book:
    return shared_place.open(clock=clock, compact_delay=DELAY)


def small(book: Book, name: str = "t", files: int = 6) -> Table:
    return numbers(book, name, *([number] for number in range(files)))


def due_in(compactor: Compactor) -> list[float]:
    return [item["in_seconds"] for item in compactor.status()["next"]]


def test_events_make_it_look_at_a_table_once_after_a_while(book: Book, clock: ManualClock) -> None:
    compactor = Compactor(book.lake)
    begun = book.events.now()
    table = small(book)
    captured = [event for event in book.events.read(begun).events if event.table in compactor.subscribed_tables]
    assert {event.table for event in captured} == {"table_files", "table_stats"}
    for event in captured:
        compactor.on_event(Event(event))
    compactor.on_events([Event(event) for event in captured])
    compactor.on_events([])
    compactor.on_refresh(Refresh(table.record.object_id, "table", table.record, "start"))
    compactor.on_refresh(Refresh(1000, "table", None, "start"))
    assert due_in(compactor) == [DELAY]
    assert compactor.run_due() == 0
    clock.advance(DELAY)
    assert compactor.run_due() == 1
    assert compactor.run_due() == 0
    status = compactor.status()
    (debt,) = status["debts"]
    assert (debt["table"], debt["files"], debt["partitions"]) == ("default.t", 6, 1)
    assert "none was given" in status["spark"]
    assert book.metrics.values()["lakebook_compaction_debt_files{table=default.t}"] == 6
    assert book.metrics.values()["lakebook_compaction_debt_bytes{table=default.t}"] == table.record.total_size
    assert compactor.wait_idle(0)


def test_what_is_turned_off_or_gone_has_no_debt(book: Book) -> None:
    table = small(book)
    compactor = Compactor(book.lake)
    for act in (lambda: table.set_properties(**{"lakebook.compaction": "off"}), lambda: book.tables.drop("t")):
        table.set_properties(**{"lakebook.compaction": "on"})
        compactor.note(table.id)
        compactor.run_due()
        assert compactor.status()["debts"]
        act()
        compactor.note(table.id)
        compactor.run_due()
        assert compactor.status()["debts"] == []
        assert book.metrics.values()["lakebook_compaction_debt_files{table=default.t}"] == 0
    assert compactor.wait_idle(0)


def test_a_table_that_fails_comes_again_at_ever_longer_intervals_and_holds_no_other_up(
    book: Book, clock: ManualClock
) -> None:
    small(book)
    quiet = numbers(book, "quiet", [1])
    spark = Failing()
    compactor = Compactor(book.lake, spark)
    compactor.note(book.table("t").id)
    compactor.note(quiet.id)
    assert compactor.run_due() == 2
    assert spark.calls == 1
    pauses = []
    for _ in range(14):
        (left,) = due_in(compactor)
        pauses.append(left)
        # Events do not make it come earlier.
        compactor.note(book.table("t").id)
        assert compactor.run_due() == 0
        clock.advance(left + 0.001)
        assert compactor.run_due() == 1
    assert spark.calls == 15
    for number, left in enumerate(pauses):
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2**number)
        assert longest / 2 <= left <= longest
    (failure,) = compactor.status()["failures"]
    assert (failure["table"], failure["failures"]) == ("default.t", 15)
    assert "there is no Java" in failure["error"]
    assert not compactor.wait_idle(0)
    work = book._registry.read_with(lambda reader: list_work(reader, "compactor", None, MAX_BIGINT, 100))
    assert {(item.action, item.outcome, item.table_id) for item in work} == {("compact", "failed", book.table("t").id)}
    assert {item.reason for item in work} == {"6 small files of 1 partitions"}


def test_a_pause_is_respected_and_looked_at_again(book: Book, clock: ManualClock) -> None:
    table = small(book)
    spark = Failing()
    compactor = Compactor(book.lake, spark)
    for component, table_id in (("compactor", table.id), ("*", None)):
        book._registry.write(lambda transaction: pause(transaction, component, table_id, "a holiday"))  # noqa: B023
        compactor.note(table.id)
        assert compactor.run_due() == 1
        (waiting,) = compactor.status()["next"]
        assert waiting["why"] == "paused: a holiday"
        assert compactor.run_once()["compacted"] == {}
        assert spark.calls == 0
        # How much there is to gain is known all the same.
        assert compactor.status()["debts"]
        book._registry.write(lambda transaction: end_pause(transaction, component, table_id))  # noqa: B023
        clock.advance(waiting["in_seconds"])
        assert compactor.run_due() == 1
        assert spark.calls == 1
        spark.calls = 0
        clock.advance(1)
        compactor = Compactor(book.lake, spark)


def test_it_begins_nothing_while_somebody_else_has_precedence(book: Book, clock: ManualClock) -> None:
    table = small(book)
    spark = Failing()
    compactor = Compactor(book.lake, spark)
    compactor.note(table.id)
    with Attempt(book.lake, table.record, kind=REWRITE):
        assert compactor.run_due() == 1
    assert book.lake.registry.write(lambda transaction: hold_back(transaction, table.record, 2.0))
    clock.advance(1)
    assert compactor.run_due() == 1
    (waiting,) = compactor.status()["next"]
    assert "an outside engine" in waiting["why"]
    assert (spark.calls, compactor.status()["failures"]) == (0, [])
    # No work was lost, so there is nothing to write down.
    assert records(book, schema.maintenance_history) == []
    clock.advance(2)
    assert compactor.run_due() == 1
    assert spark.calls == 1


def test_by_hand_it_says_what_it_could_not_do(book: Book) -> None:
    small(book)
    numbers(book, "quiet", [1])
    measured = Compactor(book.lake).run_once()
    assert measured["compacted"] == measured["failed"] == {}
    assert measured["left"]["default.t"]["files"] == 6
    tried = Compactor(book.lake, Failing()).run_once(book.table("t").record)
    assert list(tried["failed"]) == ["default.t"]
    assert Compactor(book.lake, Failing()).run_once(book.table("quiet").record) == {
        "compacted": {},
        "failed": {},
        "left": {},
    }


def walking(book: Book) -> Compactor:
    """A compactor that nobody tells of events."""
    compactor = Compactor(book.lake, Failing())
    compactor.told = False
    return compactor


def test_a_walk_that_fails_at_a_table_forgets_no_other(book: Book) -> None:
    tables = [small(book, name) for name in ("a", "b", "c", "d")]
    # As a program of a later version might have set it.
    strange = '{"lakebook.compaction": "?"}'
    run_sql(book, f"UPDATE table_metadata SET properties = '{strange}' WHERE table_id = {tables[2].id}")
    compactor = walking(book)
    compactor.walk()
    assert compactor._looks.keys() == {table.id for table in tables}
    # What it could not look at is told, and comes again by itself.
    assert due_in(compactor) == [DELAY] * 4


def test_a_table_that_takes_too_long_to_look_at_stops_no_walk(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [small(book, name) for name in ("a", "b", "c")]
    compactor = walking(book)
    read = compactor.table

    def slow(table_id: int) -> TableRecord | None:
        if table_id == tables[1].id:
            raise RegistryTimeout("a statement took longer than it may", on="registry")
        return read(table_id)

    monkeypatch.setattr(compactor, "table", slow)
    compactor.walk()
    assert compactor._looks.keys() == {table.id for table in tables}


def test_a_walk_that_breaks_off_keeps_what_it_found_and_goes_on_where_it_was(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [small(book, name) for name in ("a", "b", "c")]
    compactor = walking(book)
    read = compactor.table

    def away(table_id: int) -> TableRecord | None:
        if table_id == tables[2].id:
            raise RegistryUnavailable("the server does not answer", on="registry")
        return read(table_id)

    with monkeypatch.context() as patched:
        patched.setattr(compactor, "table", away)
        with pytest.raises(RegistryUnavailable):
            compactor.walk()
    assert compactor._looks.keys() == {tables[0].id, tables[1].id}
    assert compactor.walk() == 1
    assert compactor._looks.keys() == {table.id for table in tables}
    assert compactor.walk() == 0


def test_a_table_that_is_purged_during_a_walk_is_no_failure(book: Book) -> None:
    tables = [small(book, name) for name in ("a", "b", "c")]
    run_sql(book, f"DELETE FROM table_metadata WHERE table_id = {tables[1].id}")
    compactor = walking(book)
    assert compactor.walk() == 2
    assert compactor._looks.keys() == {tables[0].id, tables[2].id}
    assert compactor.status()["failures"] == []


def test_its_thread_looks_at_tables_until_it_is_stopped(shared_place: Place) -> None:
    book = shared_place.open(compact_delay=0)
    compactor = Compactor(book.lake)
    table = small(book)
    compactor.start()
    compactor.start()
    compactor.on_health()
    compactor.on_refresh(Refresh(table.record.object_id, "table", table.record, "start"))
    assert compactor.wait_idle(60)
    assert [debt["files"] for debt in compactor.status()["debts"]] == [6]
    compactor.stop()
    compactor.on_health()
    insert(table, {"id": 100})
    compactor.note(table.id)
    assert not compactor.wait_idle(0)
    compactor.start()
    assert compactor.wait_idle(60)
    assert [debt["files"] for debt in compactor.status()["debts"]] == [7]
    # A book that is closed ends it, and whoever asks hears of it.
    book.close()
    compactor.note(table.id)
    assert compactor._thread is not None
    compactor._thread.join(60)
    with pytest.raises(BookClosed):
        compactor.on_health()
    compactor.stop()
