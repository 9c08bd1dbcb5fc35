"""Views on Spark: what is built is what the query gives over all sources, whatever happened in between."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import lakebook
from lake import run_sql
from lakebook import Book, failpoints
from lakebook.errors import BuildFailed, InvalidInput, ReadOnlyTable, ViewNotFound
from lakebook.views.view import View
from streaming import in_thread, produce
from viewing import DAY, HOUR, MINUTE, T0, at, claim, enter, frozen_hours, hours_of, order, orders, stale_hours, view_of

TOTALS = "SELECT date_trunc('minute', ts) AS ts, region, count(*) AS n, max(id) AS last FROM orders GROUP BY 1, 2"


def rows(view: View, **options: Any) -> list[tuple[Any, ...]]:
    """All rows of a view, in order."""
    return sorted((tuple(row.values()) for row in view.to_arrow(**options).to_pylist()), key=str)


def of_query(book: Book, spark: SparkSession, sql: str, source: str = "orders") -> list[tuple[Any, ...]]:
    """What a query gives over all rows of a table."""
    book.table(source).read(spark).createOrReplaceTempView(source)
    try:
        return sorted((tuple(row.values()) for row in spark.sql(sql).toArrow().to_pylist()), key=str)
    finally:
        spark.catalog.dropTempView(source)


def test_a_view_is_built_read_counted_and_rebuilt_where_it_is_stale(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.1, 0.2, 1.5)
    view = book.views.create("totals", TOTALS, event_time="ts", sort_by=["ts"])
    done = view.materialize(spark, at(0), at(3))
    assert (done.built, done.empty, done.rows, done.ranges) == (2, 1, 3, 3)
    assert rows(view) == of_query(book, spark, TOTALS)
    assert (view.count(), view.count(at(0), at(1)), view.count(at(0), at(0.15))) == (3, 2, 1)
    assert [(item.num_rows, item.sort_order, item.min_event_time) for item in view.list_partitions()] == [
        (2, ("ts",), at(0.1)),
        (1, ("ts",), at(1.5)),
        (0, (), None),
    ]
    order(table, 0.1, first=10)
    assert stale_hours(view) == [0]
    again = view.materialize(spark, at(0), at(3))
    assert (again.built, again.up_to_date, again.replaced) == (1, 2, 1)
    assert rows(view) == of_query(book, spark, TOTALS)
    assert view.read(spark, at(0), at(1)).count() == 2
    assert view.read(spark, at(1.4), at(3), columns=["n"]).collect() == [(1,)]
    with pytest.raises(ReadOnlyTable):
        book.tables.drop("lakebook_views.totals")


def test_an_overwrite_and_a_delete_make_stale_what_they_touch(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.5)
    order(table, 2.5, first=10)
    view = view_of(book)
    view.materialize(spark, at(0), at(4))
    table.overwrite(table.read(spark, "id = 10"), where="id = 10")
    assert stale_hours(view) == [2]
    view.materialize(spark, at(0), at(4))
    table.replace([book.lake.store.relative(path) for path in table.plan().paths], table.read(spark))
    assert stale_hours(view) == []
    # The file that the compaction made has rows of three hours.
    table.delete("id = 0", spark=spark)
    assert stale_hours(view) == [0, 1, 2]
    assert view.materialize(spark, at(0), at(4)).empty == 2
    assert view.count() == 1


def test_a_topic_and_a_table_are_joined_within_a_range(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.5, 1.5)
    book.topics.create("clicks", 2)
    produce(book, "clicks", 0, 0, 1, times=[at(0.6), at(1.6)])
    produce(book, "clicks", 1, 1, times=[at(0.7)])
    sql = """SELECT o.id, c.timestamp AS ts FROM clicks c JOIN `orders` AS o
             ON o.id = CAST(CAST(c.value AS STRING) AS BIGINT)"""
    view = book.views.create("joined", sql, event_time="ts")
    view.materialize(spark, at(0), at(2))
    assert [row[0] for row in rows(view)] == [0, 1]
    produce(book, "clicks", 1, 0, times=[at(0.9)])
    assert stale_hours(view) == [0]
    assert view.materialize(spark, at(0), at(2)).rows == 2
    assert [name for name in spark.catalog.listTables() if name.name.startswith("lakebook_")] == []


def test_hours_become_a_day_and_nobody_sees_another_row(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.5, 1.5, 23.5)
    view = view_of(book, sort_by=["id"])
    view.materialize(spark, T0, T0 + DAY, parallel=4)
    before = rows(view)
    assert view.merge_partitions(spark, "day", before=T0 + HOUR) == []
    (merged,) = view.merge_partitions(spark, "day")
    assert (merged.rows, merged.replaced, rows(view)) == (3, 24, before)
    assert view.merge_partitions(spark, "day") == []
    assert (view.count(), view.count(at(1), at(2)), len(view.list_partitions())) == (3, 1, 1)
    order(table, 5.5, first=10)
    (spec,) = view.plan(at(5), at(6))
    assert (spec.state, spec.end - spec.begin) == ("stale", DAY.total_seconds() * 1000)
    assert view.merge_partitions(spark, "day") == []
    view.materialize(spark, at(5), at(6))
    assert (view.count(), len(view.list_partitions())) == (4, 1)


def test_stale_ranges_and_gaps_are_not_merged(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.01, 0.99)
    view = view_of(book, interval="minute")
    view.materialize(spark, T0, T0 + 59 * MINUTE)
    assert view.merge_partitions(spark, "hour") == []
    view.materialize(spark, T0, T0 + HOUR)
    order(table, 0.5, first=10)
    assert view.merge_partitions(spark, "hour") == []
    view.materialize(spark, T0, T0 + HOUR)
    assert [item.rows for item in view.merge_partitions(spark, "hour")] == [3]


def test_a_commit_during_a_merge_leaves_the_merged_range_stale(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.5, 1.5)
    view = view_of(book)
    view.materialize(spark, T0, T0 + DAY, parallel=4)
    with failpoints.armed("view.built", lambda: order(table, 3.5, first=10)):
        assert len(view.merge_partitions(spark, "day")) == 1
    assert (stale_hours(view), view.count()) == ([0], 2)


def test_another_query_lives_beside_the_former_until_it_is_built(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.5, 1.5)
    view = view_of(book)
    view.materialize(spark, at(0), at(2))
    book.views.alter("hourly", sql="SELECT id, ts, upper(region) AS place FROM orders")
    assert sorted(row["region"] for row in view.to_arrow().to_pylist()) == ["eu", "eu"]
    assert view.materialize(spark, at(0), at(1)).replaced == 1
    found = {row["id"]: (row["region"], row["place"]) for row in view.to_arrow().to_pylist()}
    assert found == {0: (None, "EU"), 1: ("eu", None)}
    view.materialize(spark, at(0), at(2))
    assert {item.schema_hash for item in view.list_partitions()} == {view.record.schema_hash}
    book.views.alter("hourly", sql="SELECT id, ts, 1 AS place FROM orders")
    with pytest.raises(BuildFailed, match="place"):
        view.materialize(spark, at(0), at(1))
    assert view.count() == 2


def test_a_failed_build_leaves_no_row_and_others_go_on(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.5, 1.5)
    sql = "SELECT ts, CASE WHEN id = 0 THEN raise_error('no') ELSE id END AS id FROM orders"
    view = book.views.create("failing", sql, event_time="ts")
    with pytest.raises(BuildFailed, match="no"):
        view.materialize(spark, at(0), at(3))
    assert [hours_of(item) for item in view.list_partitions()] == [(1, 2), (2, 3)]
    assert view.claims() == []


def test_a_total_over_nothing_is_a_row(book: Book, spark: SparkSession) -> None:
    orders(book)
    view = book.views.create("counted", "SELECT count(*) AS n FROM orders", event_time="ts")
    assert view.materialize(spark, at(0), at(1)).rows == 1
    assert view.materialize(spark, at(1), at(2)).rows == 1
    assert rows(view) == [(0,), (0,)]
    with pytest.raises(InvalidInput, match="event time"):
        view.to_arrow(at(0.5), at(1))


def test_frozen_ranges_are_rebuilt_only_by_force(book: Book, spark: SparkSession) -> None:
    book.topics.create("clicks", 1)
    produce(book, "clicks", 0, 1, times=[at(0.5)])
    produce(book, "clicks", 0, 2, times=[at(1.5)])
    view = view_of(book, "clicks", event_time="timestamp")
    view.materialize(spark, at(0), at(2))
    book.metadata.delete_segments_before("clicks", 0, 1)
    assert frozen_hours(view) == [0]
    assert view.materialize(spark, at(0), at(2)).frozen == 1
    with pytest.raises(InvalidInput, match="frozen"):
        view.regenerate_partitions(spark, at(0), at(2))
    assert view.regenerate_partitions(spark, at(1), at(2)).built == 1
    assert view.count() == 2
    assert view.regenerate_partitions(spark, at(0), at(1), force=True).empty == 1
    assert (view.count(), frozen_hours(view)) == (1, [0])


def test_instances_have_rows_of_their_own(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.1)
    order(table, 0.2, first=1, region="us")
    sql = "SELECT id, ts FROM orders WHERE region = :instance"
    view = book.views.create("regional", sql, event_time="ts", instances=["eu", "us"])
    assert view.materialize(spark, at(0), at(1)).built == 2
    assert [rows(view, instance=name)[0][0] for name in ("eu", "us")] == [0, 1]
    assert [item.name for item in book.tables.list("lakebook_views").items] == ["regional.eu", "regional.us"]
    assert book.sql(spark, "SELECT id FROM lakebook_views.regional.us").collect() == [(1,)]
    assert book.sql_count("SELECT count(*) FROM lakebook_views.regional.eu") == 1
    with pytest.raises(ViewNotFound, match=r"lakebook_views\.regional"):
        book.sql_count("SELECT count(*) FROM regional")
    with pytest.raises(InvalidInput):
        view.plan(at(0), at(1))
    with pytest.raises(ViewNotFound):
        view.to_arrow()


def test_retiring_says_how_many_and_the_bytes_go_at_once(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.5, 1.5, 2.5)
    view = view_of(book, retention=3600)
    view.materialize(spark, at(0), at(3))
    assert view.retire_partitions(at(0.5), at(2)) == 1
    assert [hours_of(item) for item in view.list_partitions()] == [(0, 1), (2, 3)]
    assert (view.count(), len(book.metadata.list_temporary_files().items)) == (2, 1)
    assert view.retire_expired_partitions() == 2
    assert (view.count(), view.to_arrow().num_rows) == (0, 0)


def test_two_workers_build_each_range_once(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.5, 1.5, 2.5)
    view = view_of(book)
    second = book.views.get("hourly")
    with in_thread(lambda: second.materialize(spark, at(0), at(3), wait=True)) as outcome:
        first = view.materialize(spark, at(0), at(3), wait=True)
    (other,) = outcome
    assert first.built + other.built == 3
    assert (view.count(), view.claims()) == (3, [])


def test_a_commit_while_a_range_is_built_leaves_it_stale(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.5)
    view = view_of(book)
    with failpoints.armed("view.claimed", lambda: order(table, 0.7, first=5)):
        view.materialize(spark, at(0), at(1))
    # The build may have seen it, as its claim came before it; it is built once more, to be sure.
    assert (view.count(), stale_hours(view)) == (2, [0])
    with failpoints.armed("view.built", lambda: order(table, 0.8, first=6)):
        view.materialize(spark, at(0), at(1))
    assert (view.count(), stale_hours(view)) == (2, [0])
    view.materialize(spark, at(0), at(1))
    assert (view.count(), stale_hours(view)) == (3, [])


def test_what_another_worker_has_taken_over_is_left_to_it_and_is_no_failure(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.5, 23.5)
    view = view_of(book)

    def take_over(begin: float, end: float) -> None:
        run_sql(book, "UPDATE view_claims SET expires_at = 0")
        enter(book, view, claim(book, view, at(begin), at(end)))

    with failpoints.armed("view.built", lambda: take_over(0, 1)):
        done = view.materialize(spark, at(0), at(1))
    assert (done.claimed, done.built, done.failed) == (1, 0, {})
    with failpoints.armed("view.built", lambda: take_over(23, 24)):
        # Who waits for the other finds it done.
        done = view.materialize(spark, at(23), at(24), wait=True)
    assert (done.up_to_date, done.built, done.failed) == (1, 0, {})
    assert view.materialize(spark, at(0), at(24), force=True).built == 2
    with failpoints.armed("view.built", lambda: run_sql(book, "DELETE FROM view_claims")):
        assert view.merge_partitions(spark, "day") == []
    assert (view.count(), book.verify().findings) == (2, ())


def test_other_engines_read_a_view_as_a_table(tmp_path: Path, spark: SparkSession) -> None:
    with lakebook.open(tmp_path / "published", publish="sync") as book:
        table = orders(book)
        order(table, 0.5, 1.5)
        view = view_of(book)
        view.materialize(spark, at(0), at(2))
        catalog = book.catalog()
        assert catalog.load_table("lakebook_views.hourly").scan().to_arrow().num_rows == 2
        order(table, 0.7, first=10)
        view.materialize(spark, at(0), at(2))
        published = catalog.load_table("lakebook_views.hourly")
        assert sorted(published.scan().to_arrow().column("id").to_pylist()) == [0, 1, 10]
        with pytest.raises(Exception, match="only the view changes it"):
            published.append(table.to_arrow())
        assert view.count() == 3
        assert book.verify().findings == ()


def test_a_view_of_a_view_is_told_of_its_changes_and_not_of_its_merges(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.5, 1.5)
    view = view_of(book)
    view.materialize(spark, T0, T0 + DAY, parallel=4)
    above = view_of(book, "lakebook_views.hourly", "above")
    above.materialize(spark, at(0), at(2))
    assert len(view.merge_partitions(spark, "day")) == 1
    assert (stale_hours(above), above.count()) == ([], 2)
    order(table, 0.7, first=10)
    assert stale_hours(above) == []
    view.materialize(spark, T0, T0 + DAY)
    assert stale_hours(above) == [0, 1]
    with pytest.raises(InvalidInput, match="itself"):
        book.views.alter("above", sql="SELECT * FROM lakebook_views.above")


def test_a_view_of_a_view_keeps_what_is_retired_and_is_told_of_what_became_empty(
    book: Book, spark: SparkSession
) -> None:
    table = orders(book)
    order(table, 0.5)
    order(table, 1.5, first=1)
    view = view_of(book)
    view.materialize(spark, at(0), at(2))
    above = view_of(book, "lakebook_views.hourly", "above")
    above.materialize(spark, at(0), at(2))
    view.retire_partitions(at(0), at(1))
    assert (frozen_hours(above), stale_hours(above)) == ([0], [])
    table.delete("id = 1")
    assert view.materialize(spark, at(1), at(2)).empty == 1
    assert (frozen_hours(above), stale_hours(above)) == ([0], [1])
    above.materialize(spark, at(0), at(2))
    assert rows(above) == [(0, at(0.5), "eu")]


def test_retention_before_the_sources_are_pinned_takes_nothing_from_what_is_built(
    book: Book, spark: SparkSession
) -> None:
    book.topics.create("clicks", 1)
    produce(book, "clicks", 0, 1, times=[at(0.5)])
    view = view_of(book, "clicks", event_time="timestamp")
    view.materialize(spark, at(0), at(1))
    produce(book, "clicks", 0, 2, times=[at(0.6)])

    def retain() -> None:
        book.metadata.delete_segments_before("clicks", 0, 1)

    with failpoints.armed("view.claimed", retain):
        assert view.materialize(spark, at(0), at(1)).frozen == 1
    assert (view.count(), frozen_hours(view), view.claims()) == (1, [0], [])


def test_what_is_lost_before_it_was_built_is_built_only_by_force(book: Book, spark: SparkSession) -> None:
    book.topics.create("clicks", 1)
    for hour in (0.2, 0.5, 1.5):
        produce(book, "clicks", 0, 1, times=[at(hour)])
    view = view_of(book, "clicks", event_time="timestamp")

    def retain() -> None:
        book.metadata.delete_segments_before("clicks", 0, 1)

    with failpoints.armed("view.claimed", retain):
        done = view.materialize(spark, at(0), at(1))
    assert (done.frozen, done.built, view.list_partitions(), view.claims()) == (1, 0, [], [])
    done = view.materialize(spark, at(0), at(2))
    assert (done.frozen, done.built, view.count()) == (1, 1, 1)
    with pytest.raises(InvalidInput, match="frozen"):
        view.regenerate_partitions(spark, at(0), at(2))
    assert view.materialize(spark, at(0), at(1), force=True).built == 1
    assert (view.count(), frozen_hours(view), stale_hours(view)) == (2, [0], [])
    # A late record of a time that is partly gone makes it no better.
    produce(book, "clicks", 0, 1, times=[at(0.7)])
    assert (view.materialize(spark, at(0), at(2)).frozen, view.count()) == (1, 2)


def test_what_is_retired_before_a_view_of_it_was_built_is_frozen_for_that(book: Book, spark: SparkSession) -> None:
    table = orders(book)
    order(table, 0.5)
    order(table, 1.5, first=1)
    view = view_of(book)
    view.materialize(spark, at(0), at(2))
    above = view_of(book, "lakebook_views.hourly", "above")
    view.retire_partitions(at(0), at(1))
    done = above.materialize(spark, at(0), at(2))
    assert (done.frozen, done.built, rows(above)) == (1, 1, [(1, at(1.5), "eu")])
    assert above.materialize(spark, at(0), at(1), force=True).empty == 1


def test_a_range_that_was_merged_since_the_plan_is_left_alone_or_built_as_a_whole(
    book: Book, spark: SparkSession
) -> None:
    table = orders(book)
    order(table, 0.5)
    view = view_of(book)
    view.materialize(spark, T0, T0 + DAY, parallel=4)
    planned = [("global", spec) for spec in view.plan(at(0), at(1))]
    view.merge_partitions(spark, "day")
    due = [(name, spec._replace(state="stale")) for name, spec in planned]
    done = view.build(spark, view.record, due)
    assert (done.up_to_date, done.failed) == (1, {})
    done = view.build(spark, view.record, due, force=True)
    assert (done.built, done.failed) == (1, {})
    order(table, 0.7, first=10)
    done = view.build(spark, view.record, due)
    assert (done.built, done.failed, stale_hours(view), view.count()) == (1, {}, [], 2)
    assert [hours_of(item) for item in view.list_partitions()] == [(0, 24)]


STATES = {
    "fresh": "stale_at = NULL, frozen_at = NULL",
    "stale": "stale_at = 1, frozen_at = NULL",
    "frozen": "stale_at = NULL, frozen_at = 1",
    "stale and frozen": "stale_at = 1, frozen_at = 1",
    "outdated": "stale_at = NULL, frozen_at = NULL, schema_hash = 'former'",
}


def test_a_part_of_a_wider_range_is_asked_for_and_nothing_aborts_however_that_stands(
    book: Book, spark: SparkSession
) -> None:
    table = orders(book)
    order(table, 0.5, 5.5, 23.5)
    view = view_of(book)
    enter(book, view, claim(book, view, T0, T0 + DAY))
    run_sql(book, f"UPDATE lakehouse_partitions SET {STATES['stale']}")
    view.materialize(spark, at(5), at(6))
    for state, force, rival in product(STATES, (False, True), (None, "dead", "alive")):
        run_sql(book, f"UPDATE lakehouse_partitions SET {STATES[state]}")
        if rival is not None:
            claim(book, view, at(7), at(8))
        if rival == "dead":
            run_sql(book, "UPDATE view_claims SET expires_at = 0")
        done = view.materialize(spark, at(5), at(6), force=force)
        told = {name: number for name, number in vars(done).items() if number and name not in ("view", "rows")}
        where = (state, force, rival)
        if state in ("frozen", "stale and frozen"):
            # By force, it would lose rows of other times than were asked for.
            assert told == {"frozen": 1}, where
        elif state == "fresh" and not force:
            assert told == {"up_to_date": 1}, where
        elif rival == "alive":
            assert told == {"claimed": 1}, where
        else:
            assert told == {"built": 1, "replaced": 1}, where
            assert stale_hours(view) == [], where
        assert ([hours_of(item) for item in view.list_partitions()], view.count()) == ([(0, 24)], 3), where
        run_sql(book, "DELETE FROM view_claims")
    run_sql(book, f"UPDATE lakehouse_partitions SET {STATES['frozen']}")
    assert view.materialize(spark, T0, T0 + DAY, force=True).built == 1


def test_force_takes_nothing_from_a_frozen_range_that_was_merged_since_the_plan(
    book: Book, spark: SparkSession
) -> None:
    orders(book)
    view = view_of(book)
    planned = [("global", spec) for spec in view.plan(at(0), at(1))]
    enter(book, view, claim(book, view, T0, T0 + DAY))
    run_sql(book, f"UPDATE lakehouse_partitions SET {STATES['frozen']}")
    assert view.build(spark, view.record, planned, force=True).frozen == 1
