"""`lakebook views`: create, show, build, merge and retire materialised views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from lakebook.book import Book
from lakebook.cli.chart import draw_coverage
from lakebook.cli.commands import (
    BookGroup,
    Place,
    confirm,
    json_option,
    limit_option,
    moment_given,
    pairs_of,
    pass_place,
    spark_log_option,
    walk,
    yes_option,
)
from lakebook.cli.output import advancing, print_fields, print_json, print_line, print_table, working
from lakebook.cli.spark import spark_started
from lakebook.clock import to_datetime
from lakebook.errors import InvalidView
from lakebook.names import shown

if TYPE_CHECKING:
    from lakebook.registry.ranges import Range
    from lakebook.views.view import Materialized, View

_INTERVALS = click.Choice(["minute", "hour", "day"])
#: Intervals that are drawn unless somebody asks for a time.
_DRAWN = 120

_sql_help = 'The query, such as "SELECT ts, count(*) AS n FROM orders GROUP BY ts".'
_event_time_option = click.option("--event-time", metavar="COLUMN", help="The event time of tables.")
_source_option = click.option(
    "--source-event-time",
    metavar="SOURCE=COLUMN",
    multiple=True,
    help="The event time of one source, where it differs.",
)
_interval_option = click.option("--interval", type=_INTERVALS, help="How wide ranges are built.")
_retention_option = click.option("--retention", type=float, metavar="SECONDS", help="For how long ranges are kept.")
_lookback_option = click.option(
    "--lookback", type=float, metavar="SECONDS", help="How far back upkeep builds what is missing or stale."
)
_instances_option = click.option(
    "--instance", "instances", multiple=True, help="An instance; can be given several times."
)
_sort_option = click.option("--sort-by", metavar="COLUMN", multiple=True, help="Sort the rows of a range.")
_begin_option = click.option("--begin", metavar="ISO", required=True, help="From this time on (UTC).")
_end_option = click.option("--end", metavar="ISO", required=True, help="Up to before this time (UTC).")
_parallel_option = click.option("--parallel", type=int, default=2, show_default=True, help="Ranges built at once.")


@click.group(cls=BookGroup)
def views() -> None:
    """Create, show, build, merge and retire materialised views."""


@views.command()
@click.argument("name")
@click.option("--sql", required=True, help=_sql_help)
@_event_time_option
@_source_option
@_interval_option
@_retention_option
@_lookback_option
@_instances_option
@_sort_option
@json_option
@pass_place
def create(
    place: Place,
    name: str,
    sql: str,
    event_time: str | None,
    source_event_time: tuple[str, ...],
    interval: str | None,
    retention: float | None,
    lookback: float | None,
    instances: tuple[str, ...],
    sort_by: tuple[str, ...],
    as_json: bool,
) -> None:
    """Create the view NAME. Nothing is built yet."""
    with place.open() as book:
        view = book.views.create(
            name,
            sql,
            event_time=event_time or "timestamp",
            interval=interval or "hour",
            retention=retention,
            lookback=lookback,
            instances=instances or ("global",),
            sort_by=sort_by,
            event_times=pairs_of(source_event_time, f"view {shown(name)}", InvalidView),
        )
        _print_view(view, as_json, f"created view {view.name}")


def _print_view(view: View, as_json: bool, line: str) -> None:
    print_json(view.record) if as_json else print_line(line)


@views.command("list")
@limit_option
@json_option
@pass_place
def list_views(place: Place, limit: int | None, as_json: bool) -> None:
    """List the views in the order of their names."""
    with place.open() as book:
        found = list(walk(lambda after, size: book.views.list(after=after, limit=size), limit))
        if as_json:
            print_json(found)
            return
        rows = [
            (
                view.name,
                view.definition["interval"],
                ", ".join(source.name for source in view.sources),
                sum(book.views.get(view.name).count(instance=name) for name in view.definition["instances"]),
                view.state,
                view.last_error,
            )
            for view in found
        ]
    print_table(("view", "interval", "sources", "rows", "state", "last error"), rows)


@views.command()
@click.argument("name")
@click.option("--begin", metavar="ISO", help="Draw from this time on (UTC).  [default: what is built]")
@click.option("--end", metavar="ISO", help="Draw up to this time (UTC).  [default: now]")
@click.option("--instance", default="global", show_default=True, help="The instance to draw.")
@json_option
@pass_place
def show(place: Place, name: str, begin: str | None, end: str | None, instance: str, as_json: bool) -> None:
    """Show the view NAME, and draw which of its ranges are built, stale, empty, frozen or missing."""
    with place.open() as book:
        view = book.views.get(name)
        record, definition = view.record, view.definition
        if instance == "global" and instance not in definition.instances:
            instance = definition.instances[0]
        ranges = view.list_partitions(instance=instance)
        first, last = _drawn(place, view, ranges, moment_given(begin, "--begin"), moment_given(end, "--end"))
        coverage = view.coverage(first, last, instance=instance)
        claims = view.claims()
    if as_json:
        print_json({"view": record, "coverage": coverage, "claims": claims, "ranges": len(ranges)})
        return
    print_fields(
        {
            "view": record.name,
            "query": definition.sql,
            "sources": ", ".join(f"{source.name} ({source.kind})" for source in record.sources),
            "event time": definition.event_time,
            "interval": definition.interval,
            "instances": ", ".join(definition.instances),
            "retention": "for ever" if definition.retention is None else timedelta(seconds=definition.retention),
            "state": record.state,
            "ranges": len(ranges),
            "rows": sum(item.num_rows for item in ranges),
            "being built": len(claims),
            "last error": record.last_error,
            "tried again": record.retry_at,
        }
    )
    draw_coverage(coverage, first, last, definition.width)


def _drawn(
    place: Place, view: View, ranges: Sequence[Range], begin: datetime | None, end: datetime | None
) -> tuple[datetime, datetime]:
    """From when to when a view is drawn: as asked, or what is built, or the last intervals before now."""
    width = timedelta(milliseconds=view.definition.width)
    last = end or (ranges[-1].end if ranges else to_datetime(place.clock.now_ms()))
    first = begin or max(ranges[0].begin if ranges else last - _DRAWN * width, last - _DRAWN * width)
    return (first, last) if first < last else (last - width, last)


@views.command()
@click.argument("name")
@click.option("--sql", help=_sql_help)
@_event_time_option
@_interval_option
@_retention_option
@_lookback_option
@_instances_option
@_sort_option
@json_option
@pass_place
def alter(
    place: Place,
    name: str,
    sql: str | None,
    event_time: str | None,
    interval: str | None,
    retention: float | None,
    lookback: float | None,
    instances: tuple[str, ...],
    sort_by: tuple[str, ...],
    as_json: bool,
) -> None:
    """Change the view NAME. What another query has built is read until it is built anew."""
    given: dict[str, Any] = {"sql": sql, "event_time": event_time, "interval": interval, "retention": retention}
    given |= {"lookback": lookback, "instances": instances or None, "sort_by": sort_by or None}
    with place.open() as book:
        view = book.views.alter(name, **{key: value for key, value in given.items() if value is not None})
        _print_view(view, as_json, f"altered view {view.name}")


@views.command()
@click.argument("name")
@yes_option
@json_option
@pass_place
def drop(place: Place, name: str, yes: bool, as_json: bool) -> None:
    """Drop the view NAME with all it has built."""
    with place.open() as book:
        book.views.get(name)
        confirm(f"Drop the view {name} with all it has built?", yes=yes)
        ranges = book.views.drop(name)
    print_json({"view": name, "ranges": ranges}) if as_json else print_line(f"dropped view {name}, {ranges} range(s)")


@views.command()
@click.argument("name")
@json_option
@pass_place
def pause(place: Place, name: str, as_json: bool) -> None:
    """Let upkeep leave the view NAME alone."""
    with place.open() as book:
        changed = book.views.pause(name)
    print_json({"view": name, "changed": changed}) if as_json else print_line(f"{name} is paused")


@views.command()
@click.argument("name")
@json_option
@pass_place
def resume(place: Place, name: str, as_json: bool) -> None:
    """Let upkeep go on with the view NAME."""
    with place.open() as book:
        changed = book.views.resume(name)
    print_json({"view": name, "changed": changed}) if as_json else print_line(f"{name} is active")


# --- ranges ------------------------------------------------------------------------


def _times(begin: str, end: str) -> tuple[datetime, datetime]:
    """The two times that a command was given."""
    first, last = moment_given(begin, "--begin"), moment_given(end, "--end")
    assert first is not None and last is not None
    return first, last


@contextmanager
def _on_spark(place: Place, name: str, spark_log: bool) -> Iterator[tuple[Book, View, Any]]:
    """A book, a view of it and a Spark session; a view that is not there starts no Spark."""
    with place.open() as book:
        view = book.views.get(name)
        with spark_started(book, show_log=spark_log) as spark:
            yield book, view, spark


@views.command()
@click.argument("name")
@_begin_option
@_end_option
@click.option("--force", is_flag=True, help="Rebuild everything, also what its sources no longer have.")
@_parallel_option
@spark_log_option
@json_option
@pass_place
def materialize(
    place: Place, name: str, begin: str, end: str, force: bool, parallel: int, spark_log: bool, as_json: bool
) -> None:
    """Build what is missing or stale of the view NAME between two times."""
    first, last = _times(begin, end)
    with _on_spark(place, name, spark_log) as (_, view, spark), advancing("building") as step:
        done = view.materialize(
            spark,
            first,
            last,
            parallel=parallel,
            force=force,
            progress=lambda number, total: step(number, total, "ranges"),
        )
    _print_done(done, as_json)


def _print_done(done: Materialized, as_json: bool) -> None:
    if as_json:
        print_json(done)
    else:
        print_line(
            f"{done.view}: {done.ranges} range(s): {done.built} built with {done.rows} row(s), {done.empty} empty,"
            f" {done.up_to_date} up to date, {done.frozen} frozen, {done.claimed} being built by others;"
            f" {done.replaced} replaced"
        )


@views.command()
@click.argument("name")
@_begin_option
@_end_option
@click.option("--force", is_flag=True, help="Also what its sources no longer have.")
@_parallel_option
@spark_log_option
@json_option
@pass_place
def regenerate(
    place: Place, name: str, begin: str, end: str, force: bool, parallel: int, spark_log: bool, as_json: bool
) -> None:
    """Build everything of the view NAME between two times anew."""
    first, last = _times(begin, end)
    with _on_spark(place, name, spark_log) as (_, view, spark), advancing("building") as step:
        done = view.regenerate_partitions(
            spark, first, last, force, parallel=parallel, progress=lambda number, total: step(number, total, "ranges")
        )
    _print_done(done, as_json)


@views.command()
@click.argument("name")
@click.option("--into", type=click.Choice(["hour", "day"]), default="hour", show_default=True, help="How wide.")
@spark_log_option
@json_option
@pass_place
def merge(place: Place, name: str, into: str, spark_log: bool, as_json: bool) -> None:
    """Put ranges of the view NAME that are built, fresh and without a gap together to hours or days."""
    with _on_spark(place, name, spark_log) as (_, view, spark), working("merging"):
        done = view.merge_partitions(spark, into)
    if as_json:
        print_json(done)
    else:
        merged = sum(item.replaced for item in done)
        print_line(f"{name}: {merged} range(s) became {len(done)}, with {sum(item.rows for item in done)} row(s)")


@views.command()
@click.argument("name")
@click.option("--begin", metavar="ISO", help="Only ranges that end after this time (UTC).")
@click.option("--end", metavar="ISO", help="Only ranges that begin before this time (UTC).")
@click.option("--instance", default="global", show_default=True, help="The instance to list.")
@json_option
@pass_place
def partitions(place: Place, name: str, begin: str | None, end: str | None, instance: str, as_json: bool) -> None:
    """List the built ranges of the view NAME."""
    with place.open() as book:
        found = book.views.get(name).list_partitions(
            moment_given(begin, "--begin"), moment_given(end, "--end"), instance=instance
        )
    if as_json:
        print_json(found)
        return
    print_table(
        ("begin", "end", "rows", "bytes", "stale since", "frozen since", "built"),
        [
            (item.begin, item.end, item.num_rows, item.file_size, item.stale_at, item.frozen_at, item.updated)
            for item in found
        ],
    )


@views.command()
@click.argument("name")
@_begin_option
@_end_option
@yes_option
@json_option
@pass_place
def retire(place: Place, name: str, begin: str, end: str, yes: bool, as_json: bool) -> None:
    """Remove the ranges of the view NAME that lie wholly between two times."""
    first, last = _times(begin, end)
    with place.open() as book:
        view = book.views.get(name)
        confirm(f"Remove what {name} has built between {begin} and {end}?", yes=yes)
        number = view.retire_partitions(first, last)
    print_json({"view": name, "retired": number}) if as_json else print_line(f"{name}: {number} range(s) retired")


@views.command("retire-expired")
@click.argument("name")
@json_option
@pass_place
def retire_expired(place: Place, name: str, as_json: bool) -> None:
    """Remove the ranges of the view NAME that are older than its retention."""
    with place.open() as book:
        number = book.views.get(name).retire_expired_partitions()
    print_json({"view": name, "retired": number}) if as_json else print_line(f"{name}: {number} range(s) retired")
