"""What the text of a query says about it: comparisons that prune, counts, and rows that come from rows."""

from __future__ import annotations

import pytest

from lakebook.errors import InvalidInput
from lakebook.iceberg.sql_names import Comparison, parse_query


def test_a_query_of_one_thing_in_one_place_has_comparisons() -> None:
    query = parse_query("SELECT * FROM t WHERE a > 5 AND 'x' = b AND -1 <= t.c")
    assert [item.text for item in query.comparisons] == ['"a" > 5', "\"b\" = 'x'", '"c" >= -1']


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM t WHERE a > 5 AND b IN (SELECT b FROM t)",
        "SELECT * FROM t WHERE a > 5 AND EXISTS (SELECT 1 FROM other o WHERE o.b = t.b)",
        "SELECT (SELECT max(a) FROM other) FROM t WHERE a > 5",
    ],
)
def test_a_condition_prunes_nothing_that_a_subquery_reads(sql: str) -> None:
    assert parse_query(sql).comparisons == ()


def test_a_comparison_says_what_the_query_makes_of_its_value() -> None:
    query = parse_query("SELECT * FROM t WHERE a > TIMESTAMP '2024-01-01' AND b = DATE '2024-01-01' AND c < 'x'")
    assert [item.cast for item in query.comparisons] == ["timestamp", "date", None]
    assert query.comparisons[2] == Comparison("c", "<", "x", True)


def test_what_the_parser_stumbles_over_is_refused_as_a_query() -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        parse_query("SELECT count(*) FROM t |> LIMIT 1")


def test_a_count_of_all_rows_is_nothing_but_that() -> None:
    assert parse_query("SELECT count(*) FROM t").is_count
    assert not parse_query("SELECT count(*, a) FROM t").is_count


@pytest.mark.parametrize(
    ("sql", "empty"),
    [
        ("SELECT a FROM t", True),
        ("SELECT a, any(b) FROM t GROUP BY a", True),
        ("SELECT any(b) FROM t", False),
        ("SELECT count(*) FROM t GROUP BY ()", False),
        ("SELECT count(*) FROM t GROUP BY (a, b), ()", False),
    ],
)
def test_a_total_has_a_row_where_there_is_none(sql: str, empty: bool) -> None:
    assert parse_query(sql).is_empty_of_nothing is empty
