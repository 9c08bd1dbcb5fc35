"""`lakebook rebuild`: a registry that is gone, from the warehouse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from lakebook.cli.commands import BookCommand, Place, json_option
from lakebook.cli.output import advancing, print_json, print_line, print_note, print_table

if TYPE_CHECKING:
    # Arrow and PyIceberg are loaded by who rebuilds.
    from lakebook.recovery.report import RebuildReport

# Objects that are named; the JSON has all of them.
_MOST_NAMED = 20


@click.command(cls=BookCommand)
@click.argument("warehouse")
@click.option("--into", metavar="TARGET", help="Where to make the book: a folder or a registry URL.  [default: --book]")
@json_option
@click.pass_context
def rebuild(context: click.Context, warehouse: str, into: str | None, as_json: bool) -> None:
    """Rebuild the registry of a book from its WAREHOUSE, at a place where there is no book.

    It begins from the newest checkpoint that the janitor has written into the warehouse, and reads Iceberg metadata
    and segments. It reports what could not be known. The warehouse is not changed, and nothing is removed from the
    book until it is told that it may.

    If it is stopped in the middle there is no book yet: run it again. A WAREHOUSE with nothing of a book is refused.

    The exit code is 1 if not everything came back that was known at the checkpoint. The book is there all the same.
    """
    from lakebook.recovery.rebuild import rebuild_book

    place = context.find_object(Place)
    assert place is not None
    target, settings = place.to_make(into, warehouse)
    with advancing("rebuilding:") as advance:
        done = rebuild_book(into=target, clock=place.clock, progress=advance, **{**settings, "warehouse": warehouse})
    if as_json:
        print_json({"complete": done.is_complete, **vars(done)})
    else:
        _print(done)
    print_note(
        "nothing is removed from it for now: run `lakebook verify`, and then `lakebook admin resume-after-restore`"
    )
    context.exit(0 if done.is_complete else 1)


def _print(done: RebuildReport) -> None:
    print_line(f"rebuilt the book {done.book_id}: registry {done.registry}, warehouse {done.warehouse}")
    if done.checkpoint_at is not None:
        print_line(
            f"checkpoint: {done.checkpoint_at.isoformat(timespec='seconds')}; of what came later, only what files say"
            " is known: no committed offset, no configuration, nothing that was not published"
        )
    for path, why in done.torn_checkpoints:
        print_line(f"checkpoint not used: {path}: {why}")
    print_table(
        ("table", "version", "oldest", "rows", "files", "snapshots"),
        [(item.name, item.version, item.oldest, item.rows, item.files, item.snapshots) for item in done.tables],
    )
    print_table(
        ("topic", "partitions", "segments", "records"),
        [(item.name, item.partitions, item.segments, item.records) for item in done.topics],
    )
    print_line(f"{done.groups} consumer group(s), {done.pipelines} pipeline(s), {done.views} view(s)")
    for hole in done.holes:
        print_line(f"hole: {hole.topic}/{hole.partition}: {hole.first} to {hole.last}: {hole.why}")
    for item in done.contested:
        where = "" if item.first is None else f" ({item.first} to {item.last})"
        print_line(f"contested: {item.on}{where}: {item.why}: {', '.join(item.paths)}")
    for text in done.unproven:
        print_line(f"taken on its own word: {text}")
    for text in done.unknown:
        print_line(f"not known: {text}")
    for view in done.marked_views:
        why = "; ".join(view.why)
        print_line(f"view {view.name}: {view.stale} range(s) are stale and {view.frozen} frozen now: {why}")
    for left in done.left[:_MOST_NAMED]:
        print_line(f"left alone: {left.path} ({left.size} bytes): {left.why}")
    if len(done.left) > _MOST_NAMED:
        print_line(f"left alone: {len(done.left) - _MOST_NAMED} more object(s); --json names all of them")
    print_line(
        "everything came back that was known at the checkpoint"
        if done.is_complete
        else "not everything came back; see above"
    )
