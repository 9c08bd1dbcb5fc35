"""`lakebook maintenance`: how the upkeep stands, what it did, and letting it rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from lakebook.cli.commands import (
    BookGroup,
    Place,
    json_option,
    limit_option,
    namespace_option,
    pass_place,
    walk,
)
from lakebook.cli.output import print_fields, print_json, print_line, print_note, print_table, working
from lakebook.clock import to_datetime
from lakebook.components.names import COMPONENTS
from lakebook.registry.maintenance import Work
from lakebook.registry.owed import OWED, STATES

if TYPE_CHECKING:
    # It loads Arrow, which most commands need not wait for.
    from lakebook.components.overview import Overview

_component = click.argument("component", type=click.Choice((*COMPONENTS, "all")))
_table = click.option("--table", help="Only for this table.")


@click.group(cls=BookGroup)
def maintenance() -> None:
    """See and steer what looks after the tables."""


@maintenance.command()
@json_option
@click.pass_context
def status(context: click.Context, as_json: bool) -> None:
    """Show who does the work, who compacts what, what waits, what fails, what is paused, and what was done last.

    The exit code is 1 if something is not as it should be.
    """
    place = context.find_object(Place)
    assert place is not None
    with place.open() as book:
        found = book.overview()
    if as_json:
        print_json(found)
    else:
        _print_overview(found)
    context.exit(1 if found.warnings else 0)


def _print_overview(found: Overview) -> None:
    print_fields(
        {
            "running": found.active,
            "by": found.holder,
            "since": found.since if found.active else None,
            "heard of": found.heard_at,
            **{name.replace("_", " "): number for name, number in found.owed.items()},
        }
    )
    print_line("")
    print_table(
        ("subscriber", "behind", "stalled", "dead letters", "breaker", "abandoned", "saved"),
        [
            (
                item.name,
                item.behind,
                item.stalled,
                item.dead_letters,
                item.breaker,
                item.abandoned,
                item.saved_at,
            )
            for item in found.subscribers
        ],
    )
    for name, state in found.components.items():
        for key, value in state.items():
            if value not in (None, [], {}, 0, ""):
                print_line(f"{name}: {key}: {value}")
    if found.stalled:
        print_line("")
        print_table(
            ("subscriber", "object", "from", "to", "attempts", "refresh", "error"),
            [
                (
                    item.subscriber,
                    item.shown,
                    item.lane.next_sequence,
                    item.lane.known_sequence,
                    item.lane.attempts,
                    item.lane.refresh,
                    item.lane.last_error,
                )
                for item in found.stalled
            ],
        )
    if found.compactions:
        print_line("")
        print_table(
            ("compacted now", "by", "claimed until", "alive"),
            [(item.table, item.holder, item.expires_at, item.alive) for item in found.compactions],
        )
    if found.requests:
        print_line("")
        print_table(
            ("asked of", "what", "by", "since"),
            [(item.component, item.kind, item.requested_by, to_datetime(item.requested_at)) for item in found.requests],
        )
    if found.recent:
        print_line("")
        _print_work(found.recent)
    for warning in found.warnings:
        print_note(f"warning: {warning}")


def _print_work(found: Iterable[Work]) -> None:
    print_table(
        ("finished", "component", "table", "action", "outcome", "why", "what"),
        [
            (
                item.finished_at,
                item.component,
                item.table or item.table_id,
                item.action,
                item.outcome,
                item.reason,
                " ".join(f"{key}={value}" for key, value in item.detail.items()),
            )
            for item in found
        ],
    )


@maintenance.command()
@click.argument("components", type=click.Choice(COMPONENTS), nargs=-1)
@_table
@namespace_option
@click.option("--spark-master", default="", help="The Spark master to compact on, else the setting's.")
@click.option("--no-spark", is_flag=True, help="Compact nothing: do not start Spark.")
@json_option
@click.pass_context
def run(
    context: click.Context,
    components: tuple[str, ...],
    table: str | None,
    namespace: str | None,
    spark_master: str,
    no_spark: bool,
    as_json: bool,
) -> None:
    """Run one round of COMPONENTS, or of all, here and now.

    It does no harm while `lakebook run` is at work. The exit code is 1 if something failed.
    """
    place = context.find_object(Place)
    assert place is not None
    if table is None and namespace is not None:
        raise click.UsageError("--namespace needs a table.")
    with place.open() as book, working("maintaining") as say:
        done = book.maintain(
            components or None,
            table=table,
            namespace=namespace,
            spark=None if no_spark else spark_master,
            progress=say,
        )
    if as_json:
        print_json(done)
    else:
        for name, result in done.items():
            for key, value in result.items():
                print_line(f"{name}: {key}: {value}")
    context.exit(1 if any(result.get("error") or result.get("failed") for result in done.values()) else 0)


@maintenance.command()
@_component
@_table
@namespace_option
@click.option("--reason", default="", help="Why, for whoever looks at it later.")
@json_option
@pass_place
def pause(place: Place, component: str, table: str | None, namespace: str | None, reason: str, as_json: bool) -> None:
    """Let COMPONENT rest, or `all`, until it is told to go on."""
    with place.open() as book:
        book.pause(None if component == "all" else component, table=table, namespace=namespace, reason=reason)
    if as_json:
        print_json({"paused": component, "table": table})
    else:
        print_line(f"paused {component}" + (f" on {table}" if table else ""))


@maintenance.command()
@_component
@_table
@namespace_option
@json_option
@pass_place
def resume(place: Place, component: str, table: str | None, namespace: str | None, as_json: bool) -> None:
    """Let COMPONENT, or `all`, go on after a pause, and catch up."""
    with place.open() as book:
        rested = book.resume(None if component == "all" else component, table=table, namespace=namespace)
    if as_json:
        print_json({"resumed": rested})
    else:
        print_line(f"resumed {component}" if rested else f"{component} was not paused so")


@maintenance.command()
@click.argument("table", required=False)
@namespace_option
@click.option(
    "--state",
    type=click.Choice((OWED, *STATES, "all")),
    default=OWED,
    show_default=True,
    help="Only versions in this state; owed: in any but completed.",
)
@limit_option
@json_option
@pass_place
def owed(place: Place, table: str | None, namespace: str | None, state: str, limit: int | None, as_json: bool) -> None:
    """Show which versions of TABLE, or of all tables, are owed to Iceberg, and why one could not be published."""
    if table is None and namespace is not None:
        raise click.UsageError("--namespace needs a table.")
    with place.open() as book:
        found = list(
            walk(
                lambda after, size: book.owed(
                    table=table, namespace=namespace, state=None if state == "all" else state, limit=size, after=after
                ),
                limit,
            )
        )
    if as_json:
        print_json(found)
        return
    print_table(
        ("table", "version", "state", "attempts", "written down", "begun", "ended", "error"),
        [
            (
                item.table or item.table_id,
                item.version,
                item.state,
                item.attempts,
                item.created_at,
                item.started_at,
                item.finished_at,
                item.last_error,
            )
            for item in found
        ],
    )


@maintenance.command()
@click.option("--component", type=click.Choice((*COMPONENTS, "astha")), help="Only what this one did.")
@_table
@namespace_option
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Print at most this many.")
@json_option
@pass_place
def history(
    place: Place, component: str | None, table: str | None, namespace: str | None, limit: int, as_json: bool
) -> None:
    """Show what was done to which table, when and why, the newest first."""
    with place.open() as book:
        found = list(
            walk(
                lambda after, size: book.maintenance_history(
                    component=component, table=table, namespace=namespace, limit=size, after=after
                ),
                limit,
            )
        )
    if as_json:
        print_json(found)
    else:
        _print_work(found)
