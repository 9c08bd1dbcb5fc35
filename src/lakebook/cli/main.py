"""The `lakebook` command: its global options and everything below it."""

from __future__ import annotations

import io
import sys

import click
from click.core import ParameterSource

import lakebook
from lakebook.cli.admin import admin
from lakebook.cli.backup import backup, copy, restore
from lakebook.cli.book import doctor, init, metrics, migrate, repair, verify
from lakebook.cli.commands import BookGroup, Place
from lakebook.cli.consume import consume
from lakebook.cli.events import events
from lakebook.cli.groups import groups
from lakebook.cli.maintenance import maintenance
from lakebook.cli.namespaces import namespaces
from lakebook.cli.pipelines import pipelines
from lakebook.cli.produce import produce
from lakebook.cli.rebuild import rebuild
from lakebook.cli.run import run
from lakebook.cli.segments import segments
from lakebook.cli.sql import sql
from lakebook.cli.tables import tables
from lakebook.cli.topics import topics
from lakebook.cli.views import views
from lakebook.clock import Clock, SystemClock


@click.group(cls=BookGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--book",
    "-b",
    "target",
    metavar="TARGET",
    envvar="LAKEBOOK_BOOK",
    show_envvar=True,
    default=".",
    show_default=True,
    help="The book: a folder, or a registry URL (postgresql://… or sqlite:///path). Given here it counts before"
    " LAKEBOOK_REGISTRY.",
)
@click.option(
    "--warehouse",
    metavar="URL",
    help="The warehouse's root, where a URL names the registry: a folder or s3://bucket/prefix.",
)
@click.version_option(lakebook.__version__, prog_name="lakebook")
@click.pass_context
def cli(context: click.Context, target: str, warehouse: str | None) -> None:
    """Keep the book of record of a streaming lakehouse."""
    # A caller inside this process may bring a clock of its own.
    clock: Clock = SystemClock() if context.obj is None else context.obj
    given = context.get_parameter_source("target") is ParameterSource.COMMANDLINE
    context.obj = Place(target, warehouse, clock, given)


for command in (
    init,
    topics,
    produce,
    consume,
    groups,
    segments,
    namespaces,
    tables,
    pipelines,
    views,
    sql,
    events,
    run,
    maintenance,
    verify,
    repair,
    backup,
    restore,
    copy,
    rebuild,
    metrics,
    migrate,
    doctor,
    admin,
):
    cli.add_command(command)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal's encoding cannot show is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="lakebook")


if __name__ == "__main__":
    main()
