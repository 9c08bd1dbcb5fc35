"""`lakebook init`, `verify`, `repair`, `metrics`, `migrate` and `doctor`: commands about the book as a whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from lakebook.book import Book, migrate_with
from lakebook.cli.commands import BookCommand, Place, dry_run_option, json_option, pass_place, spark_log_option
from lakebook.cli.output import print_json, print_line, print_note, print_table, print_text, working
from lakebook.cli.spark import spark_started
from lakebook.config import MEMORY, redact
from lakebook.doctor import Status, examine
from lakebook.errors import BookNotFound
from lakebook.registry.stream_checks import Verification


@click.command(cls=BookCommand)
@click.argument("target", required=False)
@json_option
@pass_place
def init(place: Place, target: str | None, as_json: bool) -> None:
    """Create a book, unless there is one.

    It is created at TARGET, or where --book says.
    """
    wanted = place if target is None else replace(place, target=target, given=True)
    if wanted.target == MEMORY:
        raise click.UsageError("A book in memory would be gone when this command ends.")
    book, created = _opened_or_created(wanted)
    with book:
        registry, warehouse = redact(book.settings.registry), redact(book.warehouse.root)
        identity = {"book_id": book.identity.book_id, "created_at": book.identity.created_at}
    if as_json:
        print_json({"created": created, "registry": registry, "warehouse": warehouse, **identity})
    else:
        print_line(f"{'created a book' if created else 'the book exists'}: registry {registry}, warehouse {warehouse}")


def _opened_or_created(place: Place) -> tuple[Book, bool]:
    try:
        return place.open(), False
    except BookNotFound:
        return place.open(create=True), True


@click.command(cls=BookCommand)
@click.option("--no-files", is_flag=True, help="Check the registry alone, without reading a file.")
@click.option("--spark", "on_spark", is_flag=True, help="Let Spark read the files.")
@spark_log_option
@json_option
@click.pass_context
def verify(context: click.Context, no_files: bool, on_spark: bool, spark_log: bool, as_json: bool) -> None:
    """Check the registry and the files of tables for what must not be.

    The exit code is 1 if anything is wrong. Removals that are under way are not.
    """
    if no_files and on_spark:
        raise click.UsageError("--no-files and --spark exclude each other.")
    place = context.find_object(Place)
    assert place is not None
    with place.open() as book:
        if on_spark:
            with spark_started(book, show_log=spark_log) as spark:
                found = _verified(book, files=True, spark=spark)
        else:
            found = _verified(book, files=not no_files, spark=None)
    if as_json:
        print_json({"ok": found.ok, **vars(found)})
    else:
        _print_verification(found)
    context.exit(0 if found.ok else 1)


def _verified(book: Book, *, files: bool, spark: Any) -> Verification:
    with working("checking") as say:
        return book.verify(lambda step: say(f"checking {step}"), files=files, spark=spark)


def _print_verification(found: Verification) -> None:
    print_table(("table", "rows checked"), found.checked.items())
    for text in found.unfinished:
        print_line(f"unfinished: {text}")
    for finding in found.findings:
        print_line(f"finding: [{finding.check}] {finding.on}: {finding.what}")
    print_line("nothing is wrong" if found.ok else f"{len(found.findings)} finding(s)")


@click.command(cls=BookCommand)
@dry_run_option
@json_option
@click.pass_context
def repair(context: click.Context, dry_run: bool, as_json: bool) -> None:
    """Mend what can be mended without guessing, and say what cannot.

    The exit code is 1 if something wrong is left.
    """
    place = context.find_object(Place)
    assert place is not None
    with place.open() as book, working("checking") as say:
        done = book.repair(dry_run=dry_run, progress=lambda step: say(f"checking {step}"))
    if as_json:
        print_json({"ok": not done.left, **vars(done)})
    else:
        for text in done.mended:
            print_line(f"{'would mend' if dry_run else 'mended'}: {text}")
        for finding in done.left:
            print_line(f"left: [{finding.check}] {finding.on}: {finding.what}")
        print_line(f"{len(done.mended)} {'to mend' if dry_run else 'mended'}, {len(done.left)} left")
    context.exit(1 if done.left else 0)


@click.command(cls=BookCommand)
@click.option("--prometheus", is_flag=True, help="Print the Prometheus text format.")
@json_option
@pass_place
def metrics(place: Place, prometheus: bool, as_json: bool) -> None:
    """Print numbers about the book."""
    if prometheus and as_json:
        raise click.UsageError("--json and --prometheus exclude each other.")
    with place.open() as book:
        measured = book.measure()
    if prometheus:
        print_text(measured.prometheus())
    elif as_json:
        print_json(measured.values())
    else:
        print_table(("metric", "value"), measured.values().items())


@click.command(cls=BookCommand)
@json_option
@pass_place
def migrate(place: Place, as_json: bool) -> None:
    """Bring the registry's schema up to date."""
    done = migrate_with(place.settings(), progress=lambda revision: print_note(f"applied revision {revision}"))
    if as_json:
        print_json(done)
    elif done.applied:
        print_line(f"the schema was {done.before} and is now {done.after} (applied {', '.join(done.applied)})")
    else:
        print_line(f"the schema is up to date at {done.after}")


@click.command(cls=BookCommand)
@json_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Look for what is wrong, and say what to do.

    It looks at the registry, the warehouse, the clock, leftovers, Java and Spark.

    The exit code is 1 if a check fails. A warning does not change it.
    """
    place = context.find_object(Place)
    assert place is not None
    checks = examine(place.target, clock=place.clock, named=place.named, warehouse=place.warehouse)
    failed = any(check.status is Status.FAIL for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": checks})
    else:
        print_table(
            ("check", "status", "detail", "remedy"),
            [(check.name, check.status, check.detail, check.remedy) for check in checks],
        )
    context.exit(1 if failed else 0)
