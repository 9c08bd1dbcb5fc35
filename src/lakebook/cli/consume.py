"""`lakebook consume`: print the records of a topic, for oneself or as a member of a group."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

import click

from lakebook.book import Book
from lakebook.cli.commands import BookCommand, Interrupts, Place, json_option, moment_of, pass_place
from lakebook.cli.output import print_note
from lakebook.cli.record_output import FORMS
from lakebook.errors import Conflict, InvalidInput
from lakebook.names import shown

if TYPE_CHECKING:
    # They load Arrow, for which no other command shall wait.
    from lakebook.streams.consumer import Consumer
    from lakebook.streams.records import Record

# Seconds for which it waits for records before it looks whether it was told to stop.
_LOOK = 0.2
_MOST = 1000
# Seconds between two commits of what was printed.
_COMMIT = 1.0

_Where = int | datetime | str
_Part = tuple[str, int]


@click.command(cls=BookCommand)
@click.argument("topic")
@click.option("--group", metavar="NAME", help="Read as a member of this group, and commit what was printed.")
@click.option(
    "--from",
    "start",
    metavar="earliest|latest|OFFSET|TIME|committed",
    help="Where to begin; of a group, where it has committed nothing. `committed`: nowhere else.  [default: earliest]",
)
@click.option(
    "--until",
    "end",
    metavar="end|OFFSET|TIME",
    help="Where to end, in each partition: before this offset, or before the first record at or after this time."
    "  [default: the end as it is now; none with --follow]",
)
@click.option("--partition", "partitions", type=int, multiple=True, help="Only this partition; can be repeated.")
@click.option("--follow", is_flag=True, help="Wait for further records until interrupted.")
@click.option("--max", "most", type=click.IntRange(min=1), help="Print at most this many.  [default: all]")
@click.option(
    "--format",
    "form",
    type=click.Choice(tuple(FORMS)),
    default="text",
    show_default=True,
    help="How a record is printed: a line of text, a line of JSON, its value alone, or key and value in hexadecimal.",
)
@click.option(
    "--reset",
    type=click.Choice(("error", "earliest", "latest")),
    default="error",
    show_default=True,
    help="What to do where the offset to begin at is gone: fail, or go on at an end and say what was skipped.",
)
@click.option("--commit/--no-commit", default=True, help="Whether a group's offsets are committed.  [default: commit]")
@json_option
@pass_place
def consume(
    place: Place,
    topic: str,
    group: str | None,
    start: str | None,
    end: str | None,
    partitions: tuple[int, ...],
    follow: bool,
    most: int | None,
    form: str,
    reset: str,
    commit: bool,
    as_json: bool,
) -> None:
    """Print the records of TOPIC, each partition in order.

    With --group the partitions are shared with the other members of the group. Ctrl-C leaves it and commits
    what was printed. To go back on purpose, use `lakebook groups reset`.

    With --json, or --format json, bytes that are no UTF-8 are in base64, under key_base64 and value_base64;
    `lakebook produce --format json` takes such lines.
    """
    if follow and end == "end":
        raise click.UsageError("--until end and --follow exclude each other.")
    begin = None if start is None else _where(start, "--from", ("earliest", "latest", "committed"))
    bound = None if end is None else _where(end, "--until", ("end",))
    if begin == "committed" and group is None:
        raise click.UsageError("--from committed needs a group.")
    with Interrupts() as interrupts, place.open() as book:
        printing = _Printing(book, topic, "json" if as_json else form, bound, follow=follow, left=most)
        with book.consumer(
            topic,
            group=group,
            partitions=partitions or None,
            start=begin,
            reset=reset,
            auto_commit=False,
            on_revoked=printing.commit_revoked,
        ) as consumer:
            printing.run(consumer, interrupts, commits=commit and group is not None)
    if not as_json:
        print_note(f"{printing.records} record(s)")


def _where(text: str, option: str, names: tuple[str, ...]) -> _Where:
    if text in names:
        return text
    if re.fullmatch(r"[0-9]{1,100}", text):
        return int(text)
    moment = moment_of(text)
    if moment is None:
        raise InvalidInput(
            f"{shown(text)} is no place in a topic", on=option, remedy=f"Use {', '.join(names)}, an offset or a time"
        )
    return moment


class _Printing:
    """Prints records up to where it is to end, and commits what was printed."""

    def __init__(
        self, book: Book, topic: str, form: str, bound: _Where | None, *, follow: bool, left: int | None
    ) -> None:
        self._metadata, self._clock, self._topic = book.metadata, book.lake.clock, topic
        self._form = FORMS[form]
        self._bound, self._follow, self._left = bound, follow, left
        self._consumer: Consumer | None = None
        self._commits = False
        #: Of each partition: where it ends, the next offset that was not printed, and what of it is committed.
        self._ends: dict[_Part, int | None] = {}
        self._printed: dict[_Part, int] = {}
        self._committed: dict[_Part, int] = {}
        self._committed_at = self._clock.monotonic()
        self.records = 0

    def run(self, consumer: Consumer, interrupts: Interrupts, *, commits: bool) -> None:
        """Print until the end, the most, or an interrupt."""
        self._consumer, self._commits = consumer, commits
        try:
            while not interrupts.asked and self._left != 0:
                found = consumer.poll(_LOOK, _MOST if self._left is None else min(_MOST, self._left))
                self._print([record for record in found if self._is_wanted(record)])
                if self._is_over(consumer):
                    break
                if self._clock.monotonic() - self._committed_at >= _COMMIT:
                    self._commit(self._printed)
        finally:
            # Also where nobody takes the output any more: what was taken before is done.
            self._commit(self._printed)

    def _is_wanted(self, record: Record) -> bool:
        place = (record.topic, record.partition)
        if isinstance(self._bound, datetime) and record.timestamp >= self._bound:
            self._ends[place] = min(record.offset, self._end_of(place, record.offset))
        return record.offset < self._end_of(place, record.offset + 1)

    def _end_of(self, place: _Part, otherwise: int) -> int:
        """Where a partition ends; the end as it was when it was first looked at, unless more is waited for."""
        if place not in self._ends:
            end = None
            if not self._follow:
                partition = self._metadata.get_partition(*place)
                end = 0 if partition is None else partition.high_watermark
            if isinstance(self._bound, int):
                end = self._bound if end is None else min(end, self._bound)
            self._ends[place] = end
        found = self._ends[place]
        return otherwise if found is None else found

    def _print(self, records: list[Record]) -> None:
        if not records:
            return
        click.echo(b"".join(map(self._form, records)), nl=False)
        self.records += len(records)
        if self._left is not None:
            self._left -= len(records)
        for record in records:
            self._printed[record.topic, record.partition] = record.offset + 1

    def _is_over(self, consumer: Consumer) -> bool:
        """Whether every partition that this process reads has come to its end; those that have rest."""
        positions = consumer.position()
        over = [place for place, position in positions.items() if position >= self._end_of(place, position + 1)]
        if over:
            consumer.pause(over)
        return len(over) == len(positions) == len(consumer.assignment()) and not (self._follow and not over)

    def commit_revoked(self, places: list[_Part]) -> None:
        """Commit what was printed of partitions that are about to be given away."""
        self._commit({place: self._printed[place] for place in places if place in self._printed})

    def _commit(self, printed: dict[_Part, int]) -> None:
        self._committed_at = self._clock.monotonic()
        fresh = {place: offset for place, offset in printed.items() if self._committed.get(place) != offset}
        if not fresh or not self._commits or self._consumer is None:
            return
        mine = set(self._consumer.assignment())
        for place in fresh.keys() - mine:
            # Another member reads it now, from what was committed last.
            del self._printed[place]
        fresh = {place: offset for place, offset in fresh.items() if place in mine}
        with suppress(Conflict):
            self._consumer.commit(fresh)
        self._committed |= fresh
