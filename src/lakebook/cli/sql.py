"""`lakebook sql`: queries over views, tables and topics."""

from __future__ import annotations

from typing import Any

import click

from lakebook.cli.commands import BookCommand, Place, pass_place, spark_log_option
from lakebook.cli.output import print_json, print_note, print_table, working
from lakebook.cli.spark import spark_started

_FORMATS = click.Choice(["table", "json", "lines"])


@click.command(cls=BookCommand)
@click.argument("query")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text: the same as --format json.")
@click.option("--format", "form", type=_FORMATS, default="table", show_default=True, help="lines: one object per line.")
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Print at most this many.")
@click.option("--materialize", is_flag=True, help="Build what is missing or stale of views first.")
@spark_log_option
@pass_place
def sql(place: Place, query: str, as_json: bool, form: str, limit: int, materialize: bool, spark_log: bool) -> None:
    """Run the SELECT statement QUERY over views, tables and topics by their names.

    `SELECT count(*) FROM name` alone is answered by the registry, without Spark.
    """
    form = "json" if as_json else form
    with place.open() as book:
        counted = None if materialize else book.sql_count(query)
        if counted is not None:
            _print(["count(1)"], [{"count(1)": counted}], form)
            return
        with spark_started(book, show_log=spark_log) as spark, working("running the query"):
            from lakebook.cli.rows import plain_rows

            found = book.sql(spark, query, materialize=materialize).limit(limit + 1).toArrow()
            rows = [row for batch in found.to_batches() for row in plain_rows(batch)]
    _print(list(found.schema.names), rows[:limit], form)
    if len(rows) > limit:
        print_note(f"only the first {limit} rows: --limit asks for more")


def _print(columns: list[str], rows: list[dict[str, Any]], form: str) -> None:
    if form == "json":
        print_json(rows)
    elif form == "lines":
        for row in rows:
            print_json(row, line=True)
    else:
        from lakebook.cli.rows import cell

        print_table(columns, [[cell(row[name]) for name in columns] for row in rows])
