"""`lakebook backup`, `restore` and `copy`: the registry in one file, a book made of it, a book at another place."""

from __future__ import annotations

import click

from lakebook.cli.commands import BookCommand, Place, json_option, pass_place
from lakebook.cli.output import advancing, print_json, print_line, print_note
from lakebook.clock import to_datetime
from lakebook.restoring import restore_book


@click.command(cls=BookCommand)
@click.argument("file", type=click.Path(dir_okay=False))
@json_option
@pass_place
def backup(place: Place, file: str, as_json: bool) -> None:
    """Write the registry as it is at this moment into FILE, which must not be there yet.

    Writers go on meanwhile. The bytes of the warehouse are not in it. The same FILE can be restored on SQLite and on
    PostgreSQL.
    """
    with place.open() as book, advancing("rows") as advance:
        done = book.backup(file, advance)
    taken = to_datetime(done.header.taken_at)
    if as_json:
        print_json({"file": file, "taken_at": taken, "rows": done.rows, "checksum": done.checksum})
    else:
        print_line(f"wrote {sum(done.rows.values())} row(s) of {taken.isoformat(timespec='seconds')} to {file}")


@click.command(cls=BookCommand)
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--into", metavar="TARGET", help="Where to make the book: a folder or a registry URL.  [default: --book]")
@click.option("--warehouse", metavar="URL", help="Where its bytes are.  [default: where they were]")
@json_option
@pass_place
def restore(place: Place, file: str, into: str | None, warehouse: str | None, as_json: bool) -> None:
    """Make a book from the backup in FILE, at a place where there is none.

    Its bytes are where they were at the time of the backup, or in --warehouse. It begins a new epoch. Nothing
    is removed from it before `lakebook admin resume-after-restore`.
    """
    target, settings = place.to_make(into, warehouse)
    with advancing("rows") as advance:
        done = restore_book(file, target, clock=place.clock, progress=advance, **settings)
    if as_json:
        print_json(done)
        return
    print_line(
        f"restored {sum(done.rows.values())} row(s) of {done.backup_at.isoformat(timespec='seconds')}:"
        f" registry {done.registry}, warehouse {done.warehouse}"
    )
    print_note(
        "nothing is removed from it for now: run `lakebook verify`, and then `lakebook admin resume-after-restore`"
    )


@click.command("copy", cls=BookCommand)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--warehouse", metavar="URL", help="Where its bytes go.  [default: a folder beside an SQLite registry]")
@click.option("--workers", type=click.IntRange(1, 256), default=8, show_default=True, help="Objects copied at once.")
@json_option
@pass_place
def copy(place: Place, source: str, target: str, warehouse: str | None, workers: int, as_json: bool) -> None:
    """Copy the book FROM, registry and bytes, TO a place where there is none.

    Both are folders or registry URLs. Writers of the source go on: the copy is its state of one moment, and the source
    stays as it is. A copy that was interrupted goes on if the same command is run again. There is a book at the new
    place when all of it was copied and verified.
    """
    # It loads Arrow, which other commands need not wait for.
    from lakebook.copying import copy_book

    with advancing("copying") as advance:
        done = copy_book(
            source,
            target,
            warehouse=warehouse or place.warehouse,
            workers=workers,
            clock=place.clock,
            progress=advance,
        )
    if as_json:
        print_json(done)
        return
    if done.done_before:
        print_line(
            f"a former run has copied and verified all of it, and only its marks were left to remove: registry"
            f" {done.registry}, warehouse {done.warehouse}"
        )
        return
    print_line(
        f"copied {done.objects} object(s) of {done.bytes} bytes ({done.skipped} were there already), rewrote"
        f" {done.rewritten}, and verified them: registry {done.registry}, warehouse {done.warehouse}"
    )
