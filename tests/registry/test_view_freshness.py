"""A commit marks exactly the ranges of views that it concerns, in its own transaction."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from lake import in_memory, insert, own_warehouse, records, run_sql  # noqa: F401
from lakebook import Book
from lakebook.clock import to_datetime, to_ms
from lakebook.errors import ClaimLost, RangeClaimed, RangeOverlap, ReadOnlyTable, ViewChanged, ViewNotFound
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.freshness import _FROZEN, _STALE, ALWAYS, merged
from lakebook.registry.losses import is_lost, losses_between
from lakebook.registry.views import alter_view
from lakebook.views.merging import mergeable
from lakebook.views.view import View
from stream_writes import append, filled, merge
from streaming import produce
from viewing import (
    HOUR,
    MINUTE,
    T0,
    at,
    claim,
    enter,
    enter_hours,
    frozen_hours,
    hours_of,
    order,
    orders,
    stale_hours,
    view_of,
)


@pytest.fixture
def table(book: Book) -> Table:
    return orders(book)


def test_an_append_makes_the_ranges_of_its_rows_stale_and_no_others(book: Book, table: Table) -> None:
    view = view_of(book)
    enter_hours(book, view, range(6))
    order(table, 1.5)
    assert stale_hours(view) == [1]
    order(table, 3, 4.99)
    assert stale_hours(view) == [1, 3, 4]


@in_memory
def test_a_row_at_a_boundary_belongs_to_the_range_that_begins_there(book: Book, table: Table) -> None:
    view = view_of(book)
    enter_hours(book, view, range(4))
    order(table, 2)
    assert stale_hours(view) == [2]


@in_memory
def test_rows_without_an_event_time_belong_to_no_range(book: Book, table: Table) -> None:
    view = view_of(book)
    enter_hours(book, view, range(3))
    insert(table, {"id": 1, "ts": None, "region": "eu"})
    assert stale_hours(view) == []


def test_a_delete_makes_the_ranges_of_the_files_it_ends_stale(book: Book, table: Table) -> None:
    order(table, 0.5)
    order(table, 2.5, first=10)
    view = view_of(book)
    enter_hours(book, view, range(4))
    table.delete("id >= 10")
    assert stale_hours(view) == [2]


@in_memory
def test_other_tables_and_other_views_concern_nobody(book: Book, table: Table) -> None:
    other = orders(book, "others")
    view, second = view_of(book), view_of(book, "others", "second")
    enter_hours(book, view, range(2))
    enter_hours(book, second, range(2))
    order(other, 0.5)
    assert (stale_hours(view), stale_hours(second)) == ([], [0])


def test_each_source_may_have_an_event_time_of_its_own(book: Book, table: Table) -> None:
    other = book.tables.create("others", "id BIGINT, seen TIMESTAMP")
    sql = "SELECT a.id FROM orders a JOIN others b ON a.id = b.id"
    view = book.views.create("joined", sql, event_time="ts", event_times={"others": "seen"})
    enter_hours(book, view, range(4))
    insert(other, {"id": 1, "seen": at(3.1)})
    order(table, 1.1)
    assert stale_hours(view) == [1, 3]


def test_late_records_of_a_topic_make_their_range_stale(book: Book) -> None:
    book.topics.create("clicks", 2)
    view = view_of(book, "clicks", event_time="timestamp")
    enter_hours(book, view, range(6))
    produce(book, "clicks", 1, 1, 2, times=[at(4.5), at(2.5)])
    assert stale_hours(view) == [2, 3, 4]


def test_retention_of_a_topic_freezes_what_it_takes_away_and_makes_nothing_stale(book: Book) -> None:
    book.topics.create("clicks", 1)
    produce(book, "clicks", 0, 1, times=[at(0.5)])
    produce(book, "clicks", 0, 2, times=[at(2.5)])
    view = view_of(book, "clicks", event_time="timestamp")
    enter_hours(book, view, range(4))
    book.metadata.delete_segments_before("clicks", 0, 1)
    assert (frozen_hours(view), stale_hours(view)) == ([0], [])


def test_a_source_that_is_gone_freezes_all_that_was_built_of_it(book: Book, table: Table) -> None:
    book.topics.create("clicks", 1)
    view, second = view_of(book), view_of(book, "clicks", "second", event_time="timestamp")
    enter_hours(book, view, range(2))
    enter_hours(book, second, range(2))
    book.tables.drop("orders")
    book.topics.delete("clicks")
    assert frozen_hours(view) == frozen_hours(second) == [0, 1]


# --- claims --------------------------------------------------------------------


def test_a_commit_while_a_range_is_built_makes_it_stale_from_the_beginning(book: Book, table: Table) -> None:
    view = view_of(book)
    held = claim(book, view, at(0), at(1))
    order(table, 0.5)
    enter(book, view, held)
    assert stale_hours(view) == [0]
    enter_hours(book, view, [0])
    assert stale_hours(view) == []


def test_a_claim_is_marked_once_and_not_waited_for_again(book: Book, table: Table) -> None:
    view = view_of(book)
    held = claim(book, view, at(0), at(1))
    marks = [
        book._registry.write(lambda transaction: transaction.run(statement, held.view_id, *ALWAYS))  # noqa: B023
        for statement in (_STALE[0], _STALE[0], _FROZEN[0], _FROZEN[0])
    ]
    assert marks == [1, 0, 1, 0]


def test_a_commit_of_another_time_leaves_a_claim_alone(book: Book, table: Table) -> None:
    view = view_of(book)
    held = claim(book, view, at(0), at(1))
    order(table, 1.5)
    enter(book, view, held)
    assert stale_hours(view) == []


def test_retention_while_a_range_is_built_freezes_it(book: Book) -> None:
    book.topics.create("clicks", 1)
    produce(book, "clicks", 0, 1, times=[at(0.5)])
    view = view_of(book, "clicks", event_time="timestamp")
    held = claim(book, view, at(0), at(1))
    book.metadata.delete_segments_before("clicks", 0, 1)
    enter(book, view, held)
    assert (frozen_hours(view), stale_hours(view)) == ([0], [])


def test_a_range_that_somebody_builds_is_not_claimed_again(book: Book, table: Table) -> None:
    view = view_of(book)
    held = claim(book, view, at(0), at(2))
    with pytest.raises(RangeClaimed):
        claim(book, view, at(1), at(2))
    claim(book, view, at(2), at(3))
    enter(book, view, held)
    claim(book, view, at(0), at(1))


def test_a_dead_claim_is_taken_over_and_its_holder_can_enter_nothing(book: Book, table: Table) -> None:
    view = view_of(book)
    dead = claim(book, view, at(0), at(1))
    run_sql(book, "UPDATE view_claims SET expires_at = 0")
    alive = claim(book, view, at(0), at(1))
    with pytest.raises(ClaimLost):
        enter(book, view, dead)
    enter(book, view, alive)
    assert [hours_of(item) for item in view.list_partitions()] == [(0, 1)]


def test_instances_are_claimed_apart(book: Book, table: Table) -> None:
    sql = "SELECT id FROM orders WHERE region = :instance"
    view = book.views.create("regional", sql, event_time="ts", instances=["eu", "us"])
    enter(book, view, claim(book, view, at(0), at(1), "eu"))
    enter(book, view, claim(book, view, at(0), at(1), "us"))
    order(table, 0.5)
    assert [item.stale_at is not None for name in ("eu", "us") for item in view.list_partitions(instance=name)] == [
        True,
        True,
    ]


# --- ranges --------------------------------------------------------------------


def test_a_range_takes_the_place_of_those_within_it_and_never_of_a_part(book: Book, table: Table) -> None:
    view = view_of(book)
    enter_hours(book, view, range(3))
    enter(book, view, claim(book, view, at(0), at(3)))
    assert [hours_of(item) for item in view.list_partitions()] == [(0, 3)]
    with pytest.raises(RangeOverlap):
        enter(book, view, claim(book, view, at(1), at(2)))
    assert [hours_of(item) for item in view.list_partitions()] == [(0, 3)]


@in_memory
def test_the_plan_says_of_every_range_how_it_stands(book: Book, table: Table) -> None:
    view = view_of(book)
    enter_hours(book, view, [1, 2])
    order(table, 2.5)
    states = [(spec.begin, spec.state) for spec in view.plan(at(0.5), at(3.5))]
    assert [state for _, state in states] == ["missing", "empty", "stale", "missing"]
    found = view.coverage(T0 - HOUR, at(4))
    assert [(item.begin, item.state) for item in found] == [
        (T0 - HOUR, "missing"),
        (at(1), "empty"),
        (at(2), "stale"),
        (at(3), "missing"),
    ]


@in_memory
def test_another_query_leaves_what_is_built_until_it_is_built_anew(book: Book, table: Table) -> None:
    view = view_of(book)
    enter_hours(book, view, [0, 1])
    book.views.alter("hourly", sql="SELECT id FROM orders")
    assert [spec.state for spec in view.plan(at(0), at(2))] == ["outdated", "outdated"]
    enter_hours(book, view, [0])
    assert [spec.state for spec in view.plan(at(0), at(2))] == ["empty", "outdated"]
    assert len(view.list_partitions()) == 2


@in_memory
def test_what_was_not_watched_meanwhile_is_stale_when_a_view_returns_to_it(book: Book, table: Table) -> None:
    orders(book, "others")
    view = view_of(book)
    enter_hours(book, view, [0, 1])
    held = claim(book, view, at(2), at(3))
    book.views.alter("hourly", sql="SELECT * FROM others")
    order(table, 0.5)
    book.views.alter("hourly", sql="SELECT * FROM orders")
    enter(book, view, held)
    assert stale_hours(view) == [0, 1, 2]


def test_a_name_that_is_another_table_now_makes_all_stale_when_the_view_is_altered(book: Book, table: Table) -> None:
    view = view_of(book)
    enter_hours(book, view, [0])
    book.views.alter("hourly", lookback=60.0)
    assert stale_hours(view) == []
    book.tables.rename("orders", "former")
    orders(book)
    book.views.alter("hourly", lookback=70.0)
    assert stale_hours(view) == [0]


def test_of_two_changes_of_a_view_at_once_one_is_refused(book: Book, table: Table) -> None:
    view = view_of(book)
    read = view.record
    book.views.alter("hourly", retention=60.0)
    wanted = {**read.definition, "lookback": 60.0}
    with pytest.raises(ViewChanged):
        book._registry.write(lambda transaction: alter_view(transaction, read, wanted, read.schema_hash, read.sources))
    assert view.definition.retention == 60.0


@in_memory
def test_a_shorter_interval_rebuilds_wide_ranges_as_they_are(book: Book, table: Table) -> None:
    view = view_of(book)
    enter_hours(book, view, [0])
    book.views.alter("hourly", interval="minute")
    order(table, 0.5)
    (spec,) = view.plan(T0, T0 + MINUTE)
    assert (spec.state, spec.end - spec.begin) == ("stale", HOUR / timedelta(milliseconds=1))


def test_a_dropped_view_leaves_nothing_behind(book: Book, table: Table) -> None:
    view = view_of(book)
    enter_hours(book, view, range(3))
    held = claim(book, view, at(3), at(4))
    assert book.views.drop("hourly") == 3
    assert list(book.views) == []
    with pytest.raises(ViewNotFound):
        enter(book, view, held)
    order(table, 0.5)
    assert view_of(book).list_partitions() == []
    assert book.verify().findings == ()


@in_memory
def test_pausing_is_told_once(book: Book, table: Table) -> None:
    view = view_of(book)
    assert [book.views.pause("hourly"), book.views.pause("hourly"), view.record.state] == [True, False, "paused"]
    assert [book.views.resume("hourly"), view.record.state] == [True, "active"]


def test_spans_are_put_together() -> None:
    assert merged([(5, 9), (0, 2), (3, 4), (20, 30), (25, 26)]) == [(0, 9), (20, 30)]


@in_memory
def test_a_topic_without_views_is_appended_to_as_before(book: Book) -> None:
    book.metadata.create_topic("orders", 1)
    append(book, book.metadata.claim_append("orders", 0, holder="me"))


@in_memory
def test_the_table_of_a_view_is_changed_by_nobody_else(book: Book, table: Table) -> None:
    view = view_of(book)
    run_sql(book, f"UPDATE tables SET view_id = {view.record.id}")
    owned = book.table("orders")
    for change in (
        lambda: order(owned, 1),
        lambda: owned.delete("true"),
        lambda: book.tables.drop("orders"),
        lambda: book.tables.rename("orders", "others"),
        lambda: owned.update_schema().__enter__(),
    ):
        with pytest.raises(ReadOnlyTable):
            change()


# --- changes that others make --------------------------------------------------


@in_memory
def test_a_merge_of_segments_makes_nothing_stale(book: Book) -> None:
    book.metadata.create_topic("orders", 1)
    segments = filled(book)
    view = view_of(book, "orders", event_time="timestamp")
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    for begin in (hour - HOUR, hour, hour + HOUR):
        enter(book, view, claim(book, view, begin, begin + HOUR))
    merge(book, segments)
    assert stale_hours(view) == frozen_hours(view) == []
    append(book, book.metadata.claim_append("orders", 0, holder="me"))
    assert len(stale_hours(view)) == 1


def test_retention_of_a_topic_that_is_a_table_freezes_views_of_the_table(book: Book) -> None:
    book.topics.create("clicks", 1, config={"iceberg": "true"})
    produce(book, "clicks", 0, 1, times=[at(0.5)])
    produce(book, "clicks", 0, 2, times=[at(2.5)])
    book.maintain(["topic_publisher"], spark=None)
    view = view_of(book, "topics.clicks", event_time="timestamp")
    enter_hours(book, view, range(5))
    produce(book, "clicks", 0, 3, times=[at(4.5)])
    book.maintain(["topic_publisher"], spark=None)
    assert stale_hours(view) == [4]
    book.metadata.delete_segments_before("clicks", 0, 1)
    assert (frozen_hours(view), stale_hours(view)) == ([0], [4])


@in_memory
def test_frozen_ranges_are_not_merged_with_others(book: Book) -> None:
    book.topics.create("clicks", 1)
    produce(book, "clicks", 0, 1, times=[at(0.5)])
    produce(book, "clicks", 0, 2, times=[at(2.5)])
    view = view_of(book, "clicks", event_time="timestamp")
    enter_hours(book, view, range(24))
    assert len(mergeable(book.lake, view.record, "global", "day")) == 1
    book.metadata.delete_segments_before("clicks", 0, 1)
    assert mergeable(book.lake, view.record, "global", "day") == []
    book.topics.delete("clicks")
    assert len(mergeable(book.lake, view.record, "global", "day")) == 1


# --- what sources have lost ----------------------------------------------------


def states(view: View, first: float, last: float) -> list[str]:
    return [spec.state for spec in view.plan(at(first), at(last))]


def test_what_retention_has_taken_before_it_was_built_is_frozen(book: Book) -> None:
    book.topics.create("clicks", 2)
    for hour in (0.2, 0.8, 2.5):
        produce(book, "clicks", 0, 1, times=[at(hour)])
    produce(book, "clicks", 1, 1, times=[at(4.5)])
    early = view_of(book, "clicks", "early", event_time="timestamp")
    enter_hours(book, early, [3])
    assert states(early, 0, 5) == ["missing"] * 3 + ["empty", "missing"]
    book.metadata.delete_segments_before("clicks", 0, 2)
    late = view_of(book, "clicks", "late", event_time="timestamp")
    assert states(early, 0, 5) == ["frozen", "missing", "missing", "empty", "missing"]
    assert states(late, 0, 5) == ["frozen"] + ["missing"] * 4
    assert [spec.is_due() for spec in late.plan(at(0), at(2))] == [False, True]
    book.metadata.delete_segments_before("clicks", 1, 1)
    assert states(late, 0, 5) == ["frozen"] + ["missing"] * 3 + ["frozen"]
    assert [(item.state, item.rows) for item in late.coverage(at(0), at(2))] == [("frozen", 0), ("missing", 0)]


@in_memory
def test_what_is_lost_is_told_by_few_rows(book: Book) -> None:
    book.topics.create("clicks", 1)
    for minute in (0, 1, 2, 5, 3, 4, 30, 31):
        produce(book, "clicks", 0, 1, times=[T0 + minute * MINUTE])
    view = view_of(book, "clicks", event_time="timestamp", interval="minute")
    for offset in range(1, 9):
        book.metadata.delete_segments_before("clicks", 0, offset)
    rows = records(book, schema.source_losses)
    minutes = [[int((to_datetime(row[name]) - T0) / MINUTE) for name in ("begin_time", "end_time")] for row in rows]
    assert sorted(minutes) == [[0, 6], [30, 32]]
    lost = book._registry.read_with(lambda reader: losses_between(reader, view.record.id, *ALWAYS))
    assert [
        is_lost(lost, to_ms(T0 + n * MINUTE), to_ms(T0 + (n + 1) * MINUTE)) for n in (-1, 0, 5, 6, 29, 30, 31, 32)
    ] == [
        False,
        True,
        True,
        False,
        False,
        True,
        True,
        False,
    ]


def test_a_view_that_reads_a_topic_anew_keeps_what_it_has_of_times_the_topic_has_lost(book: Book, table: Table) -> None:
    book.topics.create("clicks", 1)
    produce(book, "clicks", 0, 1, times=[at(0.5)])
    book.metadata.delete_segments_before("clicks", 0, 1)
    view = view_of(book)
    enter_hours(book, view, range(2))
    book.views.alter("hourly", sql="SELECT timestamp AS ts FROM clicks")
    assert states(view, 0, 2) == ["frozen", "outdated"]


def test_retention_of_a_topic_that_is_a_table_freezes_what_views_of_the_table_have_not_built(book: Book) -> None:
    book.topics.create("clicks", 1, config={"iceberg": "true"})
    produce(book, "clicks", 0, 1, times=[at(0.5)])
    produce(book, "clicks", 0, 2, times=[at(2.5)])
    book.maintain(["topic_publisher"], spark=None)
    view = view_of(book, "topics.clicks", event_time="timestamp")
    assert states(view, 0, 3) == ["missing"] * 3
    book.metadata.delete_segments_before("clicks", 0, 1)
    assert states(view, 0, 3) == ["frozen", "missing", "missing"]


@in_memory
def test_a_deleted_topic_leaves_nothing_that_it_had_lost(book: Book) -> None:
    book.topics.create("clicks", 1)
    produce(book, "clicks", 0, 1, times=[at(0.5)])
    book.metadata.delete_segments_before("clicks", 0, 1)
    assert len(records(book, schema.source_losses)) == 1
    book.topics.delete("clicks")
    book.maintain(["janitor"], spark=None)
    assert records(book, schema.source_losses) == []
