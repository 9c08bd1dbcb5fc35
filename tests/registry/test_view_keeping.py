"""The view keeper without Spark: what it takes up first, and what it does though nothing can be built."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lake import in_memory, insert
from lakebook import Book
from lakebook.clock import to_ms
from lakebook.components.view_keeper import ViewKeeper
from lakebook.views.view import Materialized, View
from viewing import HOUR, orders

HOURS = 100


@pytest.fixture
def keeper(book: Book) -> ViewKeeper:
    """A keeper of a view with more to build than one look takes up."""
    begin = datetime.now(UTC) - HOURS * HOUR
    insert(orders(book), {"id": 1, "ts": begin, "region": "eu"})
    sql = "SELECT id, ts FROM orders WHERE region = :instance"
    book.views.create("hourly", sql, event_time="ts", instances=["eu", "us"], lookback=2.0 * HOURS * 3600)
    spark: Any = None
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
