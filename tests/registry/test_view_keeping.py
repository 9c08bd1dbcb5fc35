"""The view keeper without Spark: what it takes up first, and what it does though nothing can be built."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from books import Place
from failing_spark import NoSpark, StandIn
from lake import PATIENCE, in_memory, insert, own_warehouse, run_sql  # noqa: F401
from lakebook import Book
from lakebook.clock import ManualClock, to_datetime, to_ms
from lakebook.components.view_keeper import ViewKeeper
from lakebook.components.worker_spark import FIRST_PAUSE, LONGEST_PAUSE
from lakebook.errors import CommitOutcomeUnknown, PublishFailed
from lakebook.registry.claims import Claim
from lakebook.registry.views import GLOBAL, note_success
from lakebook.views.building import claimed
from lakebook.views.view import Materialized, View
from viewing import HOUR, at, claim, enter, order, orders, view_of

HOURS = 100


@pytest.fixture
def keeper(book: Book) -> ViewKeeper:
    """A keeper of a view with more to build than one look takes up."""
    begin = datetime.now(UTC) - HOURS * HOUR
    insert(orders(book), {"id": 1, "ts": begin, "region": "eu"})
    sql = "SELECT id, ts FROM orders WHERE region = :instance"
    book.views.create("hourly", sql, event_time="ts", instances=["eu", "us"], lookback=2.0 * HOURS * 3600)
    spark: Any = StandIn()
    return ViewKeeper(book.lake, lambda: spark)


@in_memory
def test_the_newest_ranges_of_all_instances_are_built_first(book: Book, keeper: ViewKeeper) -> None:
    now = to_ms(datetime.now(UTC))
    found = keeper._due(book.views["hourly"].record, now)
    begins = [spec.begin for _, spec in found]
    assert begins == sorted(begins, reverse=True)
    assert begins[0] >= now - 2 * HOUR / timedelta(milliseconds=1)
    assert {name for name, _ in found} == {"eu", "us"}


@in_memory
def test_ranges_are_merged_and_retired_though_others_cannot_be_built(
    book: Book, keeper: ViewKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    retired: list[str] = []
    failed = Materialized("hourly", failed={"2024-01-01T00:00": "no"})
    monkeypatch.setattr(View, "build", lambda self, spark, view, specs: failed)

    def retire(view: View) -> int:
        retired.append(view.name)
        return 0

    monkeypatch.setattr(View, "retire_expired_partitions", retire)
    done = keeper.run_once()
    assert list(done["failed"]) == retired == ["hourly"]
    assert book.views["hourly"].record.failures == 1


# --- whose failure it is -----------------------------------------------------------


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(to_ms(datetime(2024, 1, 1, 12, 30, tzinfo=UTC)))


def one_due(place: Place, clock: ManualClock) -> tuple[Book, View]:
    """A view of which one range is due."""
    book = place.open(clock=clock)
    order(orders(book), 11.5)
    return book, view_of(book, lookback=3600.0)


def look(keeper: ViewKeeper) -> None:
    """Have it look what is to be done, and do it."""
    keeper._chores.run_now("look")
    assert keeper.wait_for(lambda: not keeper._at_work, PATIENCE)


def failing(view: View) -> tuple[int, str | None, datetime | None]:
    record = view.record
    return record.failures, record.last_error, record.retry_at


def test_spark_that_cannot_be_had_is_no_failure_of_a_view_and_is_left_alone_for_ever_longer(
    shared_place: Place, clock: ManualClock
) -> None:
    book, view = one_due(shared_place, clock)
    spark = NoSpark()
    keeper = ViewKeeper(book.lake, spark)
    keeper.start()
    try:
        for number in range(1, 12):
            look(keeper)
            assert (spark.calls, failing(view)) == (number, (0, None, None))
            told = keeper.status()["spark"]
            assert f"has failed {number} times in a row" in told and "there is no Java" in told
            longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (number - 1))
            clock.advance(longest / 2 - 0.001)
            # Ranges expire all the same.
            look(keeper)
            assert spark.calls == number
            clock.advance(longest / 2 + 0.001)
    finally:
        keeper.stop()
    work = book.maintenance_history(component="views")
    assert {(item.action, item.outcome) for item in work} == {("materialize", "failed")}


def test_a_spark_that_dies_is_no_failure_of_the_view_and_a_view_that_fails_is_one(
    shared_place: Place, clock: ManualClock
) -> None:
    book, view = one_due(shared_place, clock)
    gone: Any = StandIn(dies=True)
    assert "Connection refused" in ViewKeeper(book.lake, lambda: gone).run_once()["failed"]["hourly"]
    assert (gone.is_gone, failing(view)) == (True, (0, None, None))
    # It is gone before anything is asked of it.
    keeper = ViewKeeper(book.lake, lambda: gone)
    keeper._work(view.record)
    assert ("has failed 1 times" in keeper.status()["spark"], failing(view)) == (True, (0, None, None))
    alive: Any = StandIn()
    keeper = ViewKeeper(book.lake, lambda: alive)
    keeper._work(view.record)
    assert (keeper.status()["spark"], view.record.failures) == ("given", 1)
    assert keeper.run_once()["failed"].keys() == {"hourly"}
    assert view.record.failures == 2


def test_a_view_of_which_spark_dies_is_left_alone_by_this_process_for_ever_longer(
    shared_place: Place, clock: ManualClock
) -> None:
    book, view = one_due(shared_place, clock)
    keeper = ViewKeeper(book.lake, lambda: StandIn(dies=True))  # type: ignore[arg-type, return-value]
    for _ in range(12):
        clock.advance(3600.0)
        assert keeper._may_use_spark(view.record, "by the clock")
        keeper._work(view.record)
    clock.advance(LONGEST_PAUSE)
    assert not keeper._may_use_spark(view.record, "by the clock")
    assert keeper._may_use_spark(view.record, "by hand")
    assert failing(view) == (0, None, None)


def test_who_cannot_build_a_view_does_not_say_that_it_has_recovered(shared_place: Place, clock: ManualClock) -> None:
    book, view = one_due(shared_place, clock)
    run_sql(book, "UPDATE views SET failures = 3")
    keeper = ViewKeeper(book.lake, NoSpark())
    for _ in range(2):
        keeper._work(view.record)
    assert view.record.failures == 3
    ViewKeeper(book.lake).run_once()
    assert view.record.failures == 3


def test_a_builder_that_wakes_after_another_has_built_its_range_counts_no_failure(
    shared_place: Place, clock: ManualClock
) -> None:
    book, view = one_due(shared_place, clock)
    run_sql(book, "UPDATE views SET failures = 12")
    listed = view.record
    rival = shared_place.open(clock=clock)

    def freeze() -> None:
        clock.advance(book.settings.lease_seconds + 1)
        theirs = rival.views["hourly"]
        for item in theirs.claims():
            enter(rival, theirs, claim(rival, theirs, item.begin, item.end))
        rival._registry.write(lambda transaction: note_success(transaction, theirs.record))

    spark: Any = StandIn(before=freeze)
    ViewKeeper(book.lake, lambda: spark)._work(listed)
    assert (len(view.list_partitions()), failing(view)) == (1, (0, None, None))


def fail_under_claim(book: Book, view: View, act: Callable[[Claim], object], error: Exception) -> None:
    """Claim a range, do something, and fail."""
    with claimed(book.lake, view.record, GLOBAL, to_ms(at(11)), to_ms(at(12))) as (held, _, _):
        act(held)
        raise error


@pytest.mark.parametrize("error", [PublishFailed("not yet"), CommitOutcomeUnknown("who knows")])
def test_what_fails_after_the_commit_of_a_range_is_told_as_what_it_is(
    shared_place: Place, clock: ManualClock, error: Exception
) -> None:
    book, view = one_due(shared_place, clock)
    with pytest.raises(type(error)):
        fail_under_claim(book, view, lambda held: enter(book, view, held), error)


def test_what_fails_under_a_claim_that_is_held_is_told_as_what_it_is_and_ends_the_claim(
    shared_place: Place, clock: ManualClock
) -> None:
    book, view = one_due(shared_place, clock)
    with pytest.raises(ValueError, match="no"):
        fail_under_claim(book, view, lambda _: None, ValueError("no"))
    assert view.claims() == []
    with pytest.raises(ValueError, match="no"):
        fail_under_claim(book, view, lambda _: book.views.drop("hourly"), ValueError("no"))


def test_a_view_that_no_thread_takes_is_not_at_work(shared_place: Place, clock: ManualClock) -> None:
    book, _ = one_due(shared_place, clock)
    keeper = ViewKeeper(book.lake, NoSpark())
    keeper._workers = ThreadPoolExecutor(1)
    keeper._workers.shutdown()
    with pytest.raises(RuntimeError):
        keeper._chores.run_now("look")
    assert keeper.status()["at_work"] == []


def test_a_view_waits_by_the_failures_that_its_row_has_and_not_by_those_it_was_listed_with(
    shared_place: Place, clock: ManualClock
) -> None:
    book, view = one_due(shared_place, clock)
    run_sql(book, "UPDATE views SET failures = 12")
    listed = view.record
    book._registry.write(lambda transaction: note_success(transaction, listed))
    spark: Any = StandIn()
    keeper = ViewKeeper(book.lake, lambda: spark)
    for failures in (1, 2):
        keeper._work(listed)
        assert view.record.failures == failures
        assert view.record.retry_at == to_datetime(clock.now_ms() + 1000 * 2 ** (failures - 1))
