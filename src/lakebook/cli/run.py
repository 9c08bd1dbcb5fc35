"""`lakebook run`: look after all tables until it is told to stop."""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING

import click

from lakebook.cli.commands import BookCommand, Place, json_option, pass_place, spark_log_option
from lakebook.cli.output import print_json, print_note
from lakebook.components.names import COMPONENTS

if TYPE_CHECKING:
    # It loads all components, which help texts need not wait for.
    from lakebook.components.upkeep import Upkeep

# How often it looks whether it has ended by itself, or gained or lost the turn.
_LOOK = 0.5

_ACTIVE = "looking after the tables"
_WAITING = "waiting: another process looks after the tables"


@click.command(cls=BookCommand)
@click.option(
    "--only",
    "only",
    type=click.Choice(COMPONENTS),
    multiple=True,
    help="Run this component alone; can be given several times.  [default: all]",
)
@click.option(
    "--worker",
    is_flag=True,
    help="Only compact, run pipelines and build views, beside whoever looks after the tables; never take the turn.",
)
@click.option(
    "--spark-master",
    default="",
    help="The Spark master that compactions run on, else the setting's. Spark is started when the first one is due.",
)
@click.option("--no-spark", is_flag=True, help="Compact nothing: do not start Spark.")
@click.option(
    "--log-level",
    type=click.Choice(["warning", "info", "debug"]),
    default="info",
    show_default=True,
    help="How much it says on stderr.",
)
@spark_log_option
@json_option
@pass_place
def run(
    place: Place,
    only: tuple[str, ...],
    worker: bool,
    spark_master: str,
    no_spark: bool,
    log_level: str,
    spark_log: bool,
    as_json: bool,
) -> None:
    """Look after all tables: publish, tag, expire, compact and clean up, until it is stopped.

    One process at a time publishes, tags, expires and cleans up. A second one waits, and takes over within seconds
    when the first ends or dies. While it waits it compacts, runs pipelines and builds views: each is claimed by one
    process (not without Spark, nor if the setting worker_interval is 0). Ctrl-C or SIGTERM end it cleanly: what is
    under way is finished first.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", force=True)
    for noisy in ("py4j", "pyspark", "alembic"):
        logging.getLogger(noisy).setLevel(logging.INFO if spark_log else logging.ERROR)
    stopping = threading.Event()
    former = {number: signal.signal(number, lambda *_: stopping.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with place.open() as book:
            spark = None if no_spark else spark_master
            with book.running(spark=spark, components=only or None, worker=worker) as upkeep:
                said = None
                while not stopping.wait(_LOOK):
                    if (failure := upkeep.failure) is not None:
                        raise failure
                    if upkeep.active != said:
                        said = upkeep.active
                        _say_role(upkeep, as_json=as_json)
                _say("stopping", "stopping", as_json=as_json)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    _say("stopped", "stopped", as_json=as_json)


def _say_role(upkeep: Upkeep, *, as_json: bool) -> None:
    """Say whether it has the turn, and what works here."""
    if not upkeep.takes_turns:
        _say("working", f"working: {', '.join(upkeep.workers)}", as_json=as_json, components=list(upkeep.workers))
        return
    if upkeep.active:
        _say("active", _ACTIVE, as_json=as_json, components=list(upkeep.components))
        return
    shared = f"; {', '.join(upkeep.workers)} share its work meanwhile" if upkeep.workers else ""
    _say("waiting", f"{_WAITING}{shared}", as_json=as_json, components=list(upkeep.workers))


def _say(state: str, text: str, *, as_json: bool, **more: object) -> None:
    """Say what has become of it: to a reader on stderr, to a program as a line of JSON."""
    if as_json:
        print_json({"state": state, **more}, line=True)
    else:
        print_note(text)
