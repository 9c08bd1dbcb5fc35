"""`lakebook admin`: clean-up, leases and other work of whoever runs a book."""

from __future__ import annotations

import click

from lakebook.book import Book
from lakebook.cli.commands import (
    BookGroup,
    Place,
    confirm,
    dry_run_option,
    json_option,
    limit_option,
    namespace_option,
    pass_place,
    walk,
    yes_option,
)
from lakebook.cli.output import print_json, print_line, print_table, working
from lakebook.pages import Page, page_of
from lakebook.registry.leases import LeaseRecord, list_leases
from lakebook.registry.tables import GET_TABLE_BY_ID, table_from


@click.group(cls=BookGroup)
def admin() -> None:
    """Clean up, look after leases, and mend after a restore."""


@admin.command("delete-expired-temp")
@dry_run_option
@click.option("--no-wait", is_flag=True, help="Do not wait for leases that have run out but may yet be renewed.")
@json_option
@click.pass_context
def delete_expired_temp(context: click.Context, dry_run: bool, no_wait: bool, as_json: bool) -> None:
    """Delete retired files whose grace has passed and which no reader needs.

    The exit code is 1 if a file could not be deleted. The next run tries it again.
    """
    with _place(context).open() as book, working("deleting retired files") as say:
        done = book.cleaner.delete_expired_temporary_files(dry_run=dry_run, wait=not no_wait, progress=say)
    if as_json:
        print_json(done)
    else:
        verb = "would delete" if dry_run else "deleted"
        print_line(f"{verb} {done.files} file(s) of {done.bytes} bytes; leases keep {done.pinned}")
        if done.dead_leases:
            print_line(f"removed {done.dead_leases} dead lease(s)")
        _print_failed(done.failed)
    context.exit(1 if done.failed else 0)


@admin.command()
@click.argument("table", required=False)
@namespace_option
@dry_run_option
@click.option("--wait", is_flag=True, help="Wait until leases that have run out are known to be dead.")
@click.option("--seconds", type=float, help="Keep versions of this many seconds.  [default: what the table says]")
@click.option("--versions", type=int, help="Keep at least this many versions.  [default: what the table says]")
@json_option
@pass_place
def expire(
    place: Place,
    table: str | None,
    namespace: str | None,
    dry_run: bool,
    wait: bool,
    seconds: float | None,
    versions: int | None,
    as_json: bool,
) -> None:
    """End the history of TABLE, or of all tables, that need not be kept.

    Files that only this history needs are retired. `delete-expired-temp` deletes them.
    """
    if table is None and namespace is not None:
        raise click.UsageError("--namespace needs a table.")
    with place.open() as book, working("expiring history") as say:
        record = None if table is None else book.table(table, namespace=namespace).record
        done = book.cleaner.expire(record, dry_run=dry_run, wait=wait, seconds=seconds, versions=versions, progress=say)
    if as_json:
        print_json(done)
    else:
        verb = "would retire" if dry_run else "retired"
        print_line(f"{verb} {done.files} file(s) of {done.bytes} bytes in {done.tables} table(s)")
        for name, reason in done.failed:
            print_line(f"{name} could not be published, and its files stay: {reason}")
    if done.failed:
        raise SystemExit(1)


@admin.command()
@dry_run_option
@json_option
@click.pass_context
def sweep(context: click.Context, dry_run: bool, as_json: bool) -> None:
    """Remove what inserts left that failed or died.

    The exit code is 1 if something could not be removed. The next run tries it again.
    """
    with _place(context).open() as book, working("sweeping") as say:
        done = book.cleaner.sweep(dry_run=dry_run, progress=say)
    if as_json:
        print_json(done)
    else:
        verb = "would fence" if dry_run else "fenced"
        print_line(
            f"{verb} {done.fenced} insert(s), {'would remove' if dry_run else 'removed'} {done.objects} object(s);"
            f" {done.settled} insert(s) are settled"
        )
        _print_failed(done.failed)
    context.exit(1 if done.failed else 0)


@admin.command("upgrade-footers")
@json_option
@click.pass_context
def upgrade_footers(context: click.Context, as_json: bool) -> None:
    """Bring stored Parquet footers of the first format up to date.

    The exit code is 1 if a footer is broken. `lakebook repair` takes it from its file.
    """
    with _place(context).open() as book, working("upgrading footers") as say:
        done, broken = book.upgrade_footers(lambda number: say(f"{number} footers upgraded"))
    if as_json:
        print_json({"upgraded": done, "broken": broken})
    else:
        print_line(f"upgraded {done} footer(s)")
        for path in broken:
            print_line(f"broken: {path}")
    context.exit(1 if broken else 0)


@admin.command("settle-debts")
@json_option
@click.pass_context
def settle_debts(context: click.Context, as_json: bool) -> None:
    """Take the footers and checksums of files that outside engines brought.

    The exit code is 1 if a file is not what its writer said. The next run tries it again.
    """
    with _place(context).open() as book, working("reading files"):
        done = book.settle_debts()
    if as_json:
        print_json({"paid": done.paid, "failed": done.failed})
    else:
        print_line(f"took {done.paid} file(s)")
        _print_failed(done.failed)
    context.exit(1 if done.failed else 0)


@admin.command()
@limit_option
@json_option
@pass_place
def leases(place: Place, limit: int | None, as_json: bool) -> None:
    """List the leases of readers: what they pin, and until when."""
    with place.open() as book:
        found = list(walk(lambda after, size: _leases(book, after, size), limit))
        names = {table_id: _name_of(book, table_id) for table_id in {lease.table_id for lease in found}}
    if as_json:
        print_json([{**vars(lease), "table": names[lease.table_id]} for lease in found])
        return
    print_table(
        ("lease", "table", "version", "holder", "expires"),
        [
            (
                lease.id,
                names[lease.table_id] or f"a dropped table ({lease.table_id})",
                lease.version,
                lease.holder,
                lease.expires_at,
            )
            for lease in found
        ],
    )


def _leases(book: Book, after: str | None, size: int) -> Page[LeaseRecord]:
    found = book.lake.registry.read_with(lambda reader: list_leases(reader, after or "", size + 1))
    return page_of(found, size, lambda lease: lease.id)


def _name_of(book: Book, table_id: int) -> str | None:
    row = book.lake.registry.one(GET_TABLE_BY_ID, table_id)
    return None if row is None else f"{table_from(row).namespace}.{table_from(row).name}"


@admin.command("purge-topics")
@json_option
@pass_place
def purge_topics(place: Place, as_json: bool) -> None:
    """Finish deletions of topics that a process left half-way."""
    purged = 0
    with place.open() as book, working("purging deleted topics"):
        while number := book.metadata.purge_deleted_topics():
            purged += number
    if as_json:
        print_json({"purged": purged})
    else:
        print_line(f"purged {purged} topic(s)")


@admin.command("begin-epoch")
@yes_option
@json_option
@pass_place
def begin_epoch(place: Place, yes: bool, as_json: bool) -> None:
    """Begin a new life of the book, after it was restored, rebuilt or copied.

    Whoever has it open is refused from then on. Subscribers of the events start anew.
    """
    with place.open() as book:
        confirm("Begin a new epoch? Whoever has the book open is refused from then on.", yes=yes)
        epoch = book.begin_epoch()
    if as_json:
        print_json({"epoch": epoch})
    else:
        print_line(f"began epoch {epoch}")


@admin.command("resume-after-restore")
@yes_option
@json_option
@pass_place
def resume_after_restore(place: Place, yes: bool, as_json: bool) -> None:
    """Let things be removed again from a book that was restored.

    Look at what `lakebook verify` says first. What lay in the warehouse when the book was restored, and is not known
    to it, stays in any case.
    """
    with place.open() as book:
        confirm("Let retired files be deleted and history end again?", yes=yes)
        resumed = book.resume_after_restore()
    if as_json:
        print_json({"resumed": resumed})
    else:
        print_line("things are removed again" if resumed else "the book was not held")


def _place(context: click.Context) -> Place:
    place = context.find_object(Place)
    assert place is not None
    return place


def _print_failed(failed: list[tuple[str, str]]) -> None:
    for path, why in failed:
        print_line(f"failed: {path}: {why}")
