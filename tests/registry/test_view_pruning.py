"""What of a query prunes a table, and from when on views are built for it: never more than Spark would leave out."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from lake import in_memory
from lakebook import Book
from lakebook.iceberg.sql_names import parse_query
from lakebook.views.querying import Queries, _condition
from lakebook.views.view import View
from viewing import at, enter_hours, order, orders, view_of

COLUMNS = "id BIGINT, f FLOAT, d DOUBLE, s STRING, ts TIMESTAMP, plain TIMESTAMP_NTZ"


@in_memory
@pytest.mark.parametrize(
    ("where", "pruned"),
    [
        ("id > 5", '"id" > 5'),
        ("d > 0.1", '"d" > 0.1'),
        ("f > 0.1", None),
        ("s = 'x'", "\"s\" = 'x'"),
        ("s = DATE '2024-01-01'", None),
        ("s > TIMESTAMP '2024-01-01'", None),
        ("ts > DATE '2024-01-01'", "\"ts\" > '2024-01-01T00:00:00+00:00'"),
        ("ts > DATE '2024-01-01 10:00:00'", None),
        ("ts > TIMESTAMP '2024-01-01 10:00:00+02:00'", "\"ts\" > '2024-01-01T08:00:00+00:00'"),
        ("plain > '2024-01-01 10:00:00'", "\"plain\" > '2024-01-01T10:00:00'"),
        ("plain > '2024-01-01 10:00:00+02:00'", None),
    ],
)
def test_a_comparison_prunes_only_as_spark_understands_it(book: Book, where: str, pruned: str | None) -> None:
    table = book.tables.create("things", COLUMNS)
    (item,) = parse_query(f"SELECT * FROM things WHERE {where}").comparisons
    assert _condition(table, [item])(item) == pruned


@pytest.fixture
def built(book: Book, monkeypatch: pytest.MonkeyPatch) -> list[tuple[datetime, datetime]]:
    """The times between which views are materialised, which no Spark does."""
    found: list[tuple[datetime, datetime]] = []
    monkeypatch.setattr(View, "materialize", lambda self, spark, begin, end: found.append((begin, end)))
    return found


def materialize(book: Book, where: str) -> None:
    """Build what a query of the view needs."""
    spark: Any = None
    comparisons = parse_query(f"SELECT * FROM hourly WHERE {where}").comparisons
    Queries(book.lake, book.views, book.topics)._materialize(spark, book.views["hourly"], comparisons)


EARLY = "ts >= '1970-01-01' AND ts < '2024-01-01 06:00:00'"


@in_memory
def test_nothing_is_built_on_demand_before_the_first_row(book: Book, built: list[tuple[datetime, datetime]]) -> None:
    table = orders(book)
    view_of(book)
    materialize(book, EARLY)
    assert built == []
    order(table, 2.5)
    materialize(book, EARLY)
    assert built == [(at(2.5), at(6))]


@in_memory
def test_a_stale_range_before_the_first_row_is_built_on_demand(
    book: Book, built: list[tuple[datetime, datetime]]
) -> None:
    table = orders(book)
    order(table, 1.5)
    view = view_of(book)
    enter_hours(book, view, [1])
    table.delete("true")
    materialize(book, EARLY)
    assert built == [(at(1), at(6))]
