"""`lakebook pipelines`: make, change, list, show, run, pause, resume, backfill and delete pipelines."""

from __future__ import annotations

import threading
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lakebook.cli.commands import (
    BookGroup,
    Interrupts,
    Place,
    confirm,
    json_option,
    limit_option,
    moment_of,
    pass_place,
    spark_log_option,
    yes_option,
)
from lakebook.cli.output import advancing, print_fields, print_json, print_line, print_note, print_table, working
from lakebook.cli.spark import spark_started
from lakebook.config import declared_pipelines
from lakebook.errors import InvalidInput, LakebookError
from lakebook.names import shown

if TYPE_CHECKING:
    from lakebook.pipelines.pipeline import Pipeline, PipelineDescription
    from lakebook.pipelines.running import RunReport

_DECODERS = click.Choice(["raw", "json", "avro"])


@click.group(cls=BookGroup)
def pipelines() -> None:
    """Make, change, list, show, run, pause, resume, backfill and delete pipelines.

    A pipeline reads topics, or tables, makes rows of their records one by one, and puts them into a table. How
    far it has come is committed together with the files it made: each record lands exactly once.
    """


@pipelines.command()
@click.argument("name")
@click.option("--from", "topics", metavar="TOPIC", multiple=True, help="A topic to read; can be given several times.")
@click.option("--from-table", "tables", metavar="TABLE", multiple=True, help="A table to read, instead of topics.")
@click.option("--into", metavar="TABLE", required=True, help="The table to fill; it is made if it is not there.")
@click.option("--sql", help="The transformation: a query over `source`, row by row.")
@click.option("--function", metavar="MODULE:FUNCTION", help="The transformation as a Python function instead.")
@click.option("--decoder", type=_DECODERS, default="raw", show_default=True, help="What the values of records are.")
@click.option("--schema", help="The columns of the decoder: DDL such as 'id BIGINT, name STRING', or an Avro schema.")
@click.option("--schema-file", type=click.Path(exists=True, dir_okay=False), help="A file with the schema instead.")
@click.option("--header", type=click.Choice(["confluent"]), help="What stands before each record of Avro.")
@click.option(
    "--schema-of",
    "schema_files",
    metavar="ID=FILE",
    multiple=True,
    help="With --header: the Avro schema of an id, in a file; can be given several times.",
)
@click.option("--provenance", is_flag=True, help="Let `source` have _source_topic, _source_partition, … too.")
@click.option(
    "--bad-records",
    type=click.Choice(["stop", "dead_letter"]),
    default="stop",
    show_default=True,
    help="What becomes of records that do not fit.",
)
@click.option("--dead-letters", metavar="TABLE", help="The table for them.  [default: TABLE_dead_letters]")
@click.option("--evolve", is_flag=True, help="Add columns to the table that the query has and it has not.")
@click.option(
    "--start", type=click.Choice(["earliest", "latest"]), default="earliest", show_default=True, help="Where to begin."
)
@click.option(
    "--retention",
    type=click.Choice(["wait", "stop"]),
    default="wait",
    show_default=True,
    help="Whether retention waits for the pipeline, or the pipeline stops at what is gone.",
)
@click.option("--interval", type=float, help="Seconds between two batches, where `lakebook run` runs it.")
@click.option("--batch-records", type=int, help="Records of one batch at most.")
@click.option("--batch-bytes", type=int, help="Bytes of one batch at most.")
@click.option("--target-file-size", type=int, help="Bytes of the files that it writes, at best.")
@click.option("--no-check", is_flag=True, help="Do not start Spark to try the transformation; the first run tells.")
@spark_log_option
@json_option
@pass_place
def create(
    place: Place,
    /,
    name: str,
    schema: str | None,
    schema_file: str | None,
    schema_files: tuple[str, ...],
    no_check: bool,
    spark_log: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Make the pipeline NAME, for example

    lakebook pipelines create clicks --from clicks --into clicks --decoder json --schema "id BIGINT, page STRING"
    """
    if schema is not None and schema_file is not None:
        raise click.UsageError("--schema and --schema-file exclude each other.")
    if schema_file is not None:
        schema = Path(schema_file).read_text(encoding="utf-8")
    given = {key: value for key, value in options.items() if value is not None}
    if schema_files:
        given["schemas"] = _schemas(schema_files)
    with place.open() as book:
        if no_check:
            pipeline = book.pipelines.create(name, schema=schema, **given)
        else:
            with spark_started(book, show_log=spark_log) as spark, working("trying the transformation"):
                pipeline = book.pipelines.create(name, schema=schema, spark=spark, **given)
        described = pipeline.describe()
    if as_json:
        print_json(described)
    else:
        print_line(f"created pipeline {name} into {described.target}, {described.lag} record(s) behind")


def _schemas(given: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in given:
        number, equals, name = item.partition("=")
        if not equals or not Path(name).is_file() or number in found:
            raise click.UsageError(f"--schema-of {item!r}: give ID=FILE, each id once, and a file that is there.")
        found[number] = Path(name).read_text(encoding="utf-8")
    return found


@pipelines.command()
@click.argument("name")
@click.option("--sql", help="The transformation: a query over `source`, row by row.")
@click.option("--function", metavar="MODULE:FUNCTION", help="The transformation as a Python function instead.")
@click.option("--decoder", type=_DECODERS, help="What the values of records are.")
@click.option("--schema", help="The columns of the decoder: DDL, or an Avro schema.")
@click.option("--schema-file", type=click.Path(exists=True, dir_okay=False), help="A file with the schema instead.")
@click.option("--header", type=click.Choice(["confluent"]), help="What stands before each record of Avro.")
@click.option(
    "--schema-of", "schema_files", metavar="ID=FILE", multiple=True, help="The Avro schemas of all ids, in files."
)
@click.option(
    "--bad-records", type=click.Choice(["stop", "dead_letter"]), help="What becomes of records that do not fit."
)
@click.option("--dead-letters", metavar="TABLE", help="The table for them.")
@click.option("--evolve/--no-evolve", default=None, help="Add columns to the table that the query has and it has not.")
@click.option("--interval", type=float, help="Seconds between two batches, where `lakebook run` runs it.")
@click.option("--no-interval", is_flag=True, help="Let `lakebook run` leave it alone.")
@click.option("--batch-records", type=int, help="Records of one batch at most.")
@click.option("--batch-bytes", type=int, help="Bytes of one batch at most.")
@click.option("--target-file-size", type=int, help="Bytes of the files that it writes, at best.")
@click.option("--no-check", is_flag=True, help="Do not start Spark to try the transformation; the next run tells.")
@spark_log_option
@json_option
@pass_place
def alter(
    place: Place,
    /,
    name: str,
    schema: str | None,
    schema_file: str | None,
    schema_files: tuple[str, ...],
    no_interval: bool,
    no_check: bool,
    spark_log: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Change what the pipeline NAME makes of the records that it has not read yet, or how it goes about it.

    What is not named stays as it is. One that has stopped goes on with `resume`.
    """
    if schema is not None and schema_file is not None:
        raise click.UsageError("--schema and --schema-file exclude each other.")
    given = {key: value for key, value in options.items() if value is not None}
    if schema_file is not None:
        schema = Path(schema_file).read_text(encoding="utf-8")
    if schema is not None:
        given["schema"] = schema
    if schema_files:
        given["schemas"] = _schemas(schema_files)
    if no_interval:
        given["interval"] = None
    # One takes the place of the other.
    for one, other in (("sql", "function"), ("function", "sql")):
        if one in given:
            given.setdefault(other, None)
    if not given:
        raise click.UsageError("Name what is to be changed.")
    with place.open() as book:
        if no_check:
            described = book.pipelines.alter(name, **given).describe()
        else:
            with spark_started(book, show_log=spark_log) as spark, working("trying the transformation"):
                described = book.pipelines.alter(name, spark=spark, **given).describe()
    if as_json:
        print_json(described)
    else:
        print_line(f"altered pipeline {name}, which is {described.state}")


@pipelines.command()
@click.option("--no-check", is_flag=True, help="Do not start Spark to try the transformations.")
@spark_log_option
@json_option
@pass_place
def apply(place: Place, no_check: bool, spark_log: bool, as_json: bool) -> None:
    """Make the pipelines that `lakebook.toml` declares and the book has not yet.

    A declaration is a table [pipelines.NAME] with the options of `create`: from or from_table, into, sql, ….
    """
    declared = declared_pipelines(place.target)
    with place.open() as book:
        known = {pipeline.name for pipeline in book.pipelines}
        missing = [name for name in declared if name not in known]
        if missing and no_check:
            book.pipelines.apply(declared)
        elif missing:
            with spark_started(book, show_log=spark_log) as spark, working("trying the transformations"):
                book.pipelines.apply(declared, spark=spark)
    if as_json:
        print_json({"created": missing, "unchanged": [name for name in declared if name in known]})
    else:
        print_line(f"created {len(missing)} pipeline(s), {len(declared) - len(missing)} were there")


@pipelines.command("list")
@json_option
@pass_place
def list_pipelines(place: Place, as_json: bool) -> None:
    """List the pipelines with their lag."""
    with place.open() as book:
        found = [pipeline.describe() for pipeline in book.pipelines]
    if as_json:
        print_json(found)
        return
    print_table(
        ("pipeline", "state", "from", "into", "lag", "records", "rows", "dead", "records/s", "last landed", "error"),
        [
            (
                item.name,
                _state(item),
                ", ".join(source.name for source in item.definition.sources),
                item.target,
                item.lag,
                item.records,
                item.rows,
                item.dead,
                item.rate,
                item.landed_at,
                (item.last_error or "")[:60] if item.failures or item.state == "stopped" else "",
            )
            for item in found
        ],
    )


def _state(item: PipelineDescription) -> str:
    return "running" if item.running and item.state == "active" else item.state


@pipelines.command()
@click.argument("name")
@limit_option
@json_option
@pass_place
def show(place: Place, name: str, limit: int | None, as_json: bool) -> None:
    """Show the pipeline NAME: what it does, how far it has come, its last batches and its last error."""
    with place.open() as book:
        pipeline = book.pipelines[name]
        described = pipeline.describe()
        batches = list(pipeline.batches(limit=limit or 10))
    if as_json:
        print_json({**vars(described), "last_batches": batches})
        return
    definition = described.definition
    print_fields(
        {
            "pipeline": described.name,
            "state": _state(described),
            "into": described.target,
            "dead letters": described.dead_letters,
            "transformation": definition.sql or definition.function or "none",
            "decoder": definition.decoder + (f", {definition.header} header" if definition.header else ""),
            "interval": definition.interval,
            "records": described.records,
            "rows": described.rows,
            "dead": described.dead,
            "lag": described.lag,
            "records/s": described.rate,
            "last landed": described.landed_at,
            "failures": described.failures,
            "last error": described.last_error,
            "next attempt": described.retry_at,
        }
    )
    print_line("")
    print_table(
        ("source", "partition", "landed from", "to before", "end", "lag"),
        [(item.name, item.partition, item.first, item.next, item.end, item.lag) for item in described.sources],
    )
    if batches:
        print_line("")
        print_table(
            ("batch", "state", "records", "rows", "dead", "files", "bytes", "version", "planned", "landed"),
            [
                (
                    item.number,
                    item.state,
                    item.record_count,
                    item.row_count,
                    item.dead_count,
                    item.file_count,
                    item.total_size,
                    item.version,
                    item.planned_at,
                    item.landed_at,
                )
                for item in batches
            ],
        )


@pipelines.command()
@click.argument("name")
@click.option("--follow", is_flag=True, help="Run on and on, until it is stopped.")
@click.option("--interval", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Seconds between runs.")
@click.option("--records", type=click.IntRange(min=1), help="Run sooner when so many records wait.")
@spark_log_option
@json_option
@pass_place
def run(
    place: Place, name: str, follow: bool, interval: float, records: int | None, spark_log: bool, as_json: bool
) -> None:
    """Run the pipeline NAME until everything has landed that is there now; with --follow, until it is stopped.

    Ctrl-C and SIGTERM end it between two batches.
    """
    with place.open() as book:
        pipeline = book.pipelines[name]
        with spark_started(book, show_log=spark_log) as spark, Interrupts() as interrupts:
            if follow:
                _follow(pipeline, spark, interrupts, interval, records, as_json=as_json)
                return
            with advancing(f"running {name}") as progress:
                report = pipeline.run(spark, progress=progress, enough=lambda: interrupts.asked)
    _print_run(report, as_json=as_json)


class _Asked(threading.Event):
    """An event that is set when somebody wants the command to end."""

    def __init__(self, interrupts: Interrupts) -> None:
        super().__init__()
        self._interrupts = interrupts

    def is_set(self) -> bool:
        return self._interrupts.asked


def _follow(
    pipeline: Pipeline, spark: Any, interrupts: Interrupts, interval: float, records: int | None, *, as_json: bool
) -> None:
    def told(report: RunReport | LakebookError) -> None:
        if isinstance(report, LakebookError):
            print_note(f"error: {report}")
        else:
            _print_run(report, as_json=as_json, line=True)

    pipeline.follow(spark, interval=interval, records=records, stop=_Asked(interrupts), told=told)


def _print_run(report: RunReport, *, as_json: bool, line: bool = False) -> None:
    if as_json:
        print_json(report, line=line)
        return
    dead = f", {report.dead} did not fit" if report.dead else ""
    rate = f" ({report.records / report.seconds:,.0f} records/s)" if report.seconds and report.records else ""
    print_line(
        f"{report.records} record(s) became {report.rows} row(s) in {report.batches} batch(es){dead}{rate}"
        if report.batches
        else "there was nothing to do"
    )


@pipelines.command()
@click.argument("name")
@json_option
@pass_place
def pause(place: Place, name: str, as_json: bool) -> None:
    """Let the pipeline NAME rest. What it has still to read stays pinned."""
    with place.open() as book:
        book.pipelines[name].pause()
    _print_state(name, "paused", as_json=as_json)


@pipelines.command()
@click.argument("name")
@click.option("--skip-lost", is_flag=True, help="Go on behind records that are gone, or a version that is no append.")
@json_option
@pass_place
def resume(place: Place, name: str, skip_lost: bool, as_json: bool) -> None:
    """Let the pipeline NAME go on, after a pause or when what stopped it is mended."""
    with place.open() as book:
        book.pipelines[name].resume(skip_lost=skip_lost)
    _print_state(name, "active", as_json=as_json)


def _print_state(name: str, state: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"pipeline": name, "state": state})
    else:
        print_line(f"pipeline {name} is {state}")


@pipelines.command()
@click.argument("name")
@yes_option
@json_option
@pass_place
def delete(place: Place, name: str, yes: bool, as_json: bool) -> None:
    """Delete the pipeline NAME. Its table stays as it is."""
    with place.open() as book:
        pipeline = book.pipelines[name]
        confirm(f"Delete pipeline {name}, and forget how far it has come?", yes=yes)
        pipeline.delete()
    if as_json:
        print_json({"deleted": name})
    else:
        print_line(f"deleted pipeline {name}")


@pipelines.command()
@click.argument("name")
@click.option("--topic", help="Which of its topics, where it has several.")
@click.option("--from", "start", metavar="PLACE", default="earliest", show_default=True, help="An offset or a time.")
@click.option("--until", "end", metavar="PLACE", help="The first offset or time that is not read.")
@spark_log_option
@json_option
@pass_place
def backfill(
    place: Place,
    name: str,
    topic: str | None,
    start: str,
    end: str | None,
    spark_log: bool,
    as_json: bool,
) -> None:
    """Run the pipeline NAME over records before its first one, or again over those that have landed.

    The latter takes the place of the rows that are there, and needs a pipeline with provenance.
    """
    first, last = _place(start), None if end is None else _place(end)
    with place.open() as book:
        pipeline = book.pipelines[name]
        with spark_started(book, show_log=spark_log) as spark, working("backfilling"):
            report = pipeline.backfill(spark, topic=topic, start=first, end=last)
    if as_json:
        print_json(report)
    else:
        how = "took the place of what was there" if report.replaced else "were added"
        print_line(f"{report.rows} row(s) of {report.records} record(s) {how}")


def _place(text: str) -> str | int | datetime:
    if text in ("earliest", "latest"):
        return text
    if text.isdecimal():
        return int(text)
    moment = moment_of(text)
    if moment is None:
        raise InvalidInput(f"{shown(text)} is not a place", on="backfill", remedy="Give an offset or an ISO time")
    return moment
