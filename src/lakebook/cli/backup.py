"""`lakebook backup` and `restore`: the registry in one file, and a book made of it."""

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
    target = place.target if into is None else into
    with advancing("rows") as advance:
        done = restore_book(file, target, clock=place.clock, warehouse=warehouse or place.warehouse, progress=advance)
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
