"""The view keeper: what it builds, merges and retires, and how the failure of one view stays its own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pyspark.sql import SparkSession

from lake import insert
from lakebook import Book
from lakebook.components.view_keeper import ViewKeeper
from viewing import orders, view_of

HOUR = timedelta(hours=1)


def recent(book: Book, *hours: float) -> None:
    """Insert orders of so many hours ago."""
    now = datetime.now(UTC)
    insert(book.table("orders"), *({"id": n, "ts": now - hour * HOUR, "region": "eu"} for n, hour in enumerate(hours)))


def test_a_round_builds_closed_ranges_from_the_first_row_on_and_no_others(book: Book, spark: SparkSession) -> None:
    orders(book)
    view = view_of(book, lookback=12 * 3600)
    keeper = ViewKeeper(book.lake, lambda: spark)
    assert keeper.run_once()["failed"] == {}
    assert view.list_partitions() == []
    recent(book, 3, 1.5)
    keeper.run_once()
    found = view.list_partitions()
    now = datetime.now(UTC)
    assert len(found) in (2, 3, 4)
    assert all(item.end <= now for item in found)
    assert found[0].begin <= now - 3 * HOUR
    assert view.count() == 2
    recent(book, 1.5)
    assert keeper.run_once()["views"]["hourly"]["built"] == 1
    assert view.count() == 3
    assert {work.action for work in book.maintenance_history(component="views")} == {"materialize"}


def test_the_failure_of_one_view_is_its_own_and_backs_off(book: Book, spark: SparkSession) -> None:
    orders(book)
    recent(book, 3)
    broken = book.views.create("broken", "SELECT ts, raise_error('no') AS x FROM orders", event_time="ts")
    view = view_of(book)
    keeper = ViewKeeper(book.lake, lambda: spark)
    done = keeper.run_once()
    assert "no" in done["failed"]["broken"]
    assert (view.count(), broken.record.failures) == (1, 1)
    assert broken.record.retry_at is not None
    assert [item["view"] for item in keeper.status()["failing"]] == ["broken"]
    book.views.alter("broken", sql="SELECT ts FROM orders")
    assert keeper.run_once()["failed"] == {}
    assert broken.record.failures == 0


def test_old_minutes_become_hours_and_expired_ranges_go(book: Book, spark: SparkSession) -> None:
    orders(book)
    recent(book, 25)
    view = view_of(book, interval="hour", lookback=50 * 3600)
    keeper = ViewKeeper(book.lake, lambda: spark)
    begin = (datetime.now(UTC) - timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    view.materialize(spark, begin, begin + 24 * HOUR)
    assert keeper.run_once()["views"]["hourly"]["merged"] == 24
    rows = view.count()
    book.views.alter("hourly", retention=60.0)
    assert keeper.run_once()["views"]["hourly"]["retired"] > 0
    assert view.count() == 0 < rows
    book.views.pause("hourly")
    assert keeper.run_once()["views"] == {}


def test_the_daemon_builds_what_is_due_by_itself(book: Book, spark: SparkSession) -> None:
    orders(book)
    recent(book, 2)
    view = view_of(book)
    with book.running(spark=spark, components=("views",)) as upkeep:
        assert upkeep.wait_active(60)
        keeper = upkeep.components["views"]
        assert isinstance(keeper, ViewKeeper)
        assert keeper.wait_for(lambda: view.count() == 1, 60)
