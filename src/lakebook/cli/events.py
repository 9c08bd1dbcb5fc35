"""`lakebook events`: the captured changes, as far as they have come or as they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from lakebook.cli.commands import BookGroup, Place, json_option, limit_option, pass_place, walk
from lakebook.cli.output import as_json as json_text
from lakebook.cli.output import print_fields, print_json, print_line, print_note, print_table, shown_value
from lakebook.pages import PAGE_SIZE
from lakebook.registry.events import Cursor, Event, EventBatch, EventLog
from lakebook.registry.schema import CAPTURED


@click.group(cls=BookGroup)
def events() -> None:
    """Read the captured changes, and those that could not be delivered."""


@events.command()
@click.option("--since", metavar="CURSOR", help="Begin behind this cursor.  [default: the oldest event that is kept]")
@click.option("--limit", type=click.IntRange(min=1), help="Print at most this many.  [default: all]")
@click.option("--follow", is_flag=True, help="Wait for further events until interrupted.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.01, max=3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks with --follow.",
)
@click.option(
    "--table", type=click.Choice([table.name for table in CAPTURED]), help="Only changes of this table's rows."
)
@json_option
@pass_place
def tail(
    place: Place,
    since: str | None,
    limit: int | None,
    follow: bool,
    interval: float,
    table: str | None,
    as_json: bool,
) -> None:
    """Print events, oldest first, and the cursor behind the last one.

    The cursor goes to stderr; with --json it is the last line: {"cursor": "…"}.
    """
    with place.open() as book:
        cursor = book.events.beginning() if since is None else Cursor.parse(since)
        reading = _Reading(book.events, cursor, limit, table, as_json)
        try:
            while not reading.done:
                if not reading.print_next() and not reading.done:
                    if not follow:
                        break
                    place.clock.sleep(interval)
        except KeyboardInterrupt:
            if not follow:
                raise
    if as_json:
        print_json({"cursor": str(reading.cursor)}, line=True)
    else:
        print_note(f"cursor: {reading.cursor}")


@dataclass
class _Reading:
    """How far the events have been printed."""

    log: EventLog
    cursor: Cursor
    left: int | None
    table: str | None
    as_json: bool

    @property
    def done(self) -> bool:
        return self.left == 0

    def print_next(self) -> bool:
        """Print the next events; false if there are no more for now."""
        batch = self._next()
        for event in self._wanted(batch):
            if self.as_json:
                print_json(event, line=True)
            else:
                print_line(_line_of(event))
        if self.left is not None:
            self.left -= len(self._wanted(batch))
        self.cursor = batch.cursor
        return batch.more

    def _next(self) -> EventBatch:
        """The next events, none of them wanted beyond the limit: the cursor stands behind them all."""
        batch = self.log.read(self.cursor, PAGE_SIZE)
        if self._fits(batch):
            return batch
        assert self.left is not None
        last = self._wanted(batch)[self.left - 1]
        batch = self.log.read(self.cursor, batch.events.index(last) + 1)
        # Others may have committed in between, and their events may come first.
        return batch if self._fits(batch) else self.log.read(self.cursor, min(self.left, PAGE_SIZE))

    def _fits(self, batch: EventBatch) -> bool:
        return self.left is None or len(self._wanted(batch)) <= self.left

    def _wanted(self, batch: EventBatch) -> list[Event]:
        return [event for event in batch.events if self.table in (None, event.table)]


def _line_of(event: Event) -> str:
    parts = [
        shown_value(event.occurred_at),
        f"{event.operation:<6}",
        f"{event.table:<16}",
        f"{event.object_kind} {event.object_id} #{event.sequence}",
        _pairs(event.key),
    ]
    before, after = event.row_before, event.row_after
    if before is not None and after is not None:
        changed = {
            name: f"{_short(before.get(name))} → {_short(value)}"
            for name, value in after.items()
            if before.get(name) != value
        }
        parts.append(_pairs(changed))
    return "  ".join(parts)


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value if isinstance(value, str) else _short(value)}" for name, value in values.items())


def _short(value: object) -> str:
    return json_text(value, line=True)


@events.group("dead-letters", cls=BookGroup)
def dead_letters() -> None:
    """Events that a subscriber could not take after its last attempt."""


@dead_letters.command("list")
@limit_option
@json_option
@pass_place
def list_letters(place: Place, limit: int | None, as_json: bool) -> None:
    """List the dead letters, the oldest first."""
    with place.open() as book:
        found = list(walk(lambda after, size: book.dead_letters(limit=size, after=after), limit))
    if as_json:
        print_json(found)
        return
    print_table(
        ("id", "subscriber", "object", "event", "attempts", "parked", "redriven", "error"),
        [
            (
                letter.id,
                letter.subscriber,
                letter.shown,
                f"{letter.event.operation} {letter.event.table} #{letter.event.sequence}",
                letter.attempts,
                letter.parked_at,
                letter.redriven_at,
                letter.error,
            )
            for letter in found
        ],
    )


@dead_letters.command()
@click.argument("letter", type=click.IntRange(min=1))
@json_option
@pass_place
def show(place: Place, letter: int, as_json: bool) -> None:
    """Show the dead letter with the id LETTER, its event and its error."""
    with place.open() as book:
        found = book.dead_letter(letter)
    if as_json:
        print_json(found)
        return
    print_fields(
        {
            "id": found.id,
            "subscriber": found.subscriber,
            "object": found.shown,
            "attempts": found.attempts,
            "parked": found.parked_at,
            "redriven": found.redriven_at,
            "error": found.error,
        }
    )
    print_line(_line_of(found.event))


@dead_letters.command()
@click.argument("letter", type=click.IntRange(min=1))
@json_option
@pass_place
def redrive(place: Place, letter: int, as_json: bool) -> None:
    """Have the object of the dead letter LETTER taken from the registry anew.

    The event itself is not replayed: others have come since. Whoever runs `lakebook run` does it within
    a second; until one does, the request waits.
    """
    with place.open() as book:
        found = book.redrive(letter)
    if as_json:
        print_json(found)
    else:
        print_line(f"{found.subscriber} will take {found.shown} anew")
