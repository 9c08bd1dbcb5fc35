"""Queries by name over views, tables and topics, in Python and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from lakebook import Book
from lakebook.cli.main import cli
from lakebook.errors import InvalidInput, InvalidView, ReadFailed, SourceNotFound, ViewAlreadyExists, ViewNotFound
from streaming import produce
from viewing import T0, at, order, orders, view_of


@pytest.fixture
def filled(book: Book) -> Book:
    """A book with a table, a topic and a view of the table."""
    table = orders(book)
    order(table, 0.5, 0.6)
    order(table, 5.5, first=10)
    book.topics.create("clicks", 1)
    produce(book, "clicks", 0, "a", "b", times=[at(0.5), at(2.5)])
    view_of(book)
    return book


def test_names_are_views_then_tables_then_topics(filled: Book, spark: SparkSession) -> None:
    filled.views["hourly"].materialize(spark, at(0), at(1))
    found = filled.sql(spark, "SELECT v.id, o.region FROM hourly v JOIN default.orders o ON v.id = o.id ORDER BY 1")
    assert [tuple(row) for row in found.collect()] == [(0, "eu"), (1, "eu")]
    assert filled.sql(
        spark, "SELECT CAST(value AS STRING) FROM clicks WHERE timestamp >= '2024-01-01 02:00:00'"
    ).collect() == [("b",)]
    filled.views.create("orders", "SELECT id, ts FROM orders WHERE id = 0", event_time="ts").materialize(
        spark, at(0), at(1)
    )
    assert filled.sql_count("SELECT count(*) FROM orders") == 1
    assert filled.sql_count("SELECT count(*) FROM default.orders") == 3
    assert filled.sql_count("SELECT count(*) AS n FROM clicks") == 2
    assert filled.sql_count("SELECT count(*) FROM orders WHERE id = 1") is None
    assert [item.name for item in spark.catalog.listTables() if item.name.startswith("lakebook_")] == []


def test_comparisons_prune_by_the_registry(filled: Book, spark: SparkSession) -> None:
    sql = "SELECT id FROM orders WHERE ts >= TIMESTAMP '2024-01-01 05:00:00' AND id > 5 AND region = 'eu'"
    frame = filled.sql(spark, sql)
    assert [tuple(row) for row in frame.collect()] == [(10,)]
    assert len(frame.inputFiles()) <= 1
    # What the table's plan would not understand is left to Spark.
    assert filled.sql(spark, "SELECT id FROM orders WHERE id = 10.5 - 0.5 AND (region = 'eu' OR id < 5)").count() == 1


def test_a_missing_range_is_built_on_demand(filled: Book, spark: SparkSession) -> None:
    with pytest.raises(ViewNotFound):
        filled.sql(spark, "SELECT * FROM hourly")
    sql = "SELECT count(*) FROM hourly WHERE ts >= '2024-01-01 05:00:00' AND ts < '2024-01-01 06:00:00'"
    assert filled.sql(spark, sql, materialize=True).collect() == [(1,)]
    assert [item.begin for item in filled.views["hourly"].list_partitions()] == [at(5)]


def test_what_is_no_query_or_names_nothing_is_refused(filled: Book, spark: SparkSession) -> None:
    with pytest.raises(SourceNotFound, match="nowhere"):
        filled.sql(spark, "SELECT * FROM nowhere")
    with pytest.raises(SourceNotFound):
        filled.sql_count("SELECT count(*) FROM nowhere")
    with pytest.raises(ReadFailed):
        filled.sql(spark, "SELECT nothing FROM orders")
    for sql in ("DROP TABLE orders", "SELECT 1", "SELECT * FROM a; SELECT * FROM b", "SELEC", ""):
        with pytest.raises(InvalidInput):
            filled.sql(spark, sql)


def test_what_cannot_be_a_view_is_refused(filled: Book) -> None:
    views = filled.views
    with pytest.raises(ViewAlreadyExists):
        views.create("hourly", "SELECT * FROM orders", event_time="ts")
    with pytest.raises(SourceNotFound):
        views.create("second", "SELECT * FROM nowhere")
    for options in (
        {"event_time": "id"},
        {"event_time": "ts", "interval": "week"},
        {"event_time": "ts", "retention": -1},
        {"event_time": "ts", "instances": []},
        {"event_time": "ts", "instances": ["a b"]},
        {"event_time": "ts", "event_times": {"others": "ts"}},
    ):
        with pytest.raises(InvalidInput):
            views.create("second", "SELECT * FROM orders", **options)
    with pytest.raises(InvalidView):
        views.create("second", "SELECT * FROM orders WHERE id = :id", event_time="ts")
    assert list(views) == ["hourly"]


# --- the command line ----------------------------------------------------------


def run(book: Book, *arguments: str, code: int = 0) -> str:
    folder = book.warehouse.folder
    assert folder is not None
    result = CliRunner().invoke(cli, ["--book", str(Path(folder).parent), *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output if code else result.stdout


def parsed(book: Book, *arguments: str) -> Any:
    return json.loads(run(book, *arguments, "--json"))


def test_the_command_line_does_it_all(filled: Book, spark: SparkSession) -> None:
    made = parsed(
        filled,
        "views",
        "create",
        "daily",
        "--sql",
        "SELECT id, ts FROM orders",
        "--event-time",
        "ts",
        "--interval",
        "hour",
    )
    assert made["definition"]["interval"] == "hour"
    times = ("--begin", "2024-01-01", "--end", "2024-01-01T06:00:00")
    done = parsed(filled, "views", "materialize", "daily", *times)
    assert (done["built"], done["empty"], done["rows"]) == (2, 4, 3)
    order(filled.table("orders"), 1.5, first=20)
    drawn = run(filled, "views", "show", "daily", "--end", "2024-01-01T07:00:00")
    assert "#~___#." in drawn
    assert "stale: its sources have changed" in drawn
    shown = parsed(filled, "views", "show", "daily")
    assert [item["state"] for item in shown["coverage"]] == ["built", "stale", "empty", "built"]
    assert "being built" in run(filled, "views", "materialize", "daily", *times)
    assert parsed(filled, "views", "regenerate", "daily", *times)["replaced"] == 6
    assert len(parsed(filled, "views", "partitions", "daily")) == 6
    assert "rows" in run(filled, "views", "partitions", "daily", "--begin", "2024-01-01T05:00:00")
    assert parsed(filled, "views", "merge", "daily", "--into", "day") == []
    assert parsed(
        filled, "views", "retire", "daily", "--begin", "2024-01-01", "--end", "2024-01-01T01:00:00", "--yes"
    ) == {
        "view": "daily",
        "retired": 1,
    }
    run(filled, "views", "retire", "daily", *times, code=1)
    assert run(filled, "views", "alter", "daily", "--retention", "60") == "altered view daily\n"
    assert run(filled, "views", "retire-expired", "daily") == "daily: 5 range(s) retired\n"
    assert run(filled, "views", "pause", "daily") == "daily is paused\n"
    assert "paused" in run(filled, "views", "list")
    assert parsed(filled, "views", "resume", "daily") == {"view": "daily", "changed": True}
    assert run(filled, "views", "drop", "hourly", "--yes") == "dropped view hourly, 0 range(s)\n"
    assert [view["name"] for view in parsed(filled, "views", "list")] == ["daily"]
    assert "there is no view" in run(filled, "views", "show", "hourly", code=1)


def test_the_command_line_answers_queries(filled: Book, spark: SparkSession) -> None:
    assert parsed(filled, "sql", "SELECT count(*) FROM orders") == [{"count(1)": 3}]
    assert parsed(filled, "sql", "SELECT id, ts FROM orders WHERE id = 10") == [{"id": 10, "ts": at(5.5).isoformat()}]
    assert "region" in run(filled, "sql", "SELECT region, count(*) FROM orders GROUP BY region")
    lines = run(filled, "sql", "SELECT id FROM orders ORDER BY id", "--format", "lines", "--limit", "2")
    assert [json.loads(line) for line in lines.splitlines()] == [{"id": 0}, {"id": 1}]
    sql = f"SELECT count(*) AS n FROM hourly WHERE ts < '{at(1).isoformat()}' AND ts >= '{T0.isoformat()}'"
    assert parsed(filled, "sql", sql, "--materialize") == [{"n": 2}]
    assert "nowhere" in run(filled, "sql", "SELECT * FROM nowhere", code=1)
