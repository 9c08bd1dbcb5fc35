"""What every command shares: the book it works on, its errors, and options that several have."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeVar

import click

from lakebook.book import Book, open_with
from lakebook.cli.output import print_error
from lakebook.clock import Clock
from lakebook.config import Settings, is_registry_url, load_settings
from lakebook.errors import InvalidConfig, InvalidInput, LakebookError
from lakebook.names import shown
from lakebook.pages import PAGE_SIZE, Page, every

T = TypeVar("T")


class BookCommand(click.Command):
    """A command whose errors become one line on stderr and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LakebookError as error:
            print_error(error, json_wanted=bool(ctx.params.get("as_json")))
            ctx.exit(1)


class BookGroup(click.Group):
    """Commands about one noun."""

    command_class = BookCommand
    group_class = type


@dataclass(frozen=True)
class Place:
    """The book that the command line names."""

    target: str
    warehouse: str | None
    clock: Clock
    #: Whether the command line itself has named it; else it is the present folder, or what the environment says.
    given: bool = False

    @property
    def named(self) -> bool:
        """Whether it is a folder that counts before the environment: a whole place, with all that is in it."""
        return self.given and not is_registry_url(self.target)

    def settings(self) -> Settings:
        """The settings of the book."""
        return load_settings(self.target, {"warehouse": self.warehouse}, named=self.named)

    def open(self, *, create: bool = False) -> Book:
        """Open the book; one that is not there is created only if that is asked for."""
        return open_with(self.settings(), clock=self.clock, create=create)

    def to_make(self, into: str | None, warehouse: str | None = None) -> tuple[str, dict[str, Any]]:
        """Where a book is to be made, and the settings that say so: at `into`, else where the other commands look.

        `into` is what was named, whatever the environment says; --book is what it is for every command.
        """
        given = {"warehouse": warehouse or self.warehouse}
        if into is not None:
            return into, given
        meant = load_settings(self.target, given, named=self.named)
        return self.target, {name: getattr(meant, name) or None for name in ("registry", "warehouse")}


pass_place = click.make_pass_decorator(Place)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
limit_option = click.option("--limit", type=click.IntRange(min=1), help="Print at most this many.  [default: all]")
yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would be done.")
spark_log_option = click.option("--spark-log", is_flag=True, help="Let Spark's own log through to stderr.")
property_option = click.option(
    "--property", "properties", metavar="KEY=VALUE", multiple=True, help="A property; can be given several times."
)
namespace_option = click.option(
    "--namespace", help="The table's namespace.  [default: what stands before the last dot of the name]"
)


def walk(fetch: Callable[[Any, int], Page[T]], limit: int | None) -> Iterator[T]:
    """The items of a long list, fetched page by page, at most `limit` of them."""
    size = PAGE_SIZE if limit is None else min(limit, PAGE_SIZE)
    return islice(every(lambda after: fetch(after, size)), limit)


def pairs_of(texts: Iterable[str], on: str, wrong: type[InvalidInput] = InvalidConfig) -> dict[str, str]:
    """`key=value` texts as a mapping; one that is none raises the error that fits what they belong to."""
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise wrong(f"{shown(text)} is not a setting", on=on, remedy="Write it as key=value")
        if key in pairs:
            raise wrong(f"{shown(key)} is given twice", on=on, remedy="Give every key once")
        pairs[key] = value
    return pairs


def moment_of(text: str) -> datetime | None:
    """An ISO time, in UTC unless it says otherwise; none if it is no time."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def moment_given(text: str | None, option: str) -> datetime | None:
    """The time that an option names, if it was given."""
    if text is None:
        return None
    moment = moment_of(text)
    if moment is None:
        raise InvalidInput(f"{shown(text)} is not a time", on=option, remedy="Write it like 2026-01-31T12:00:00+00:00")
    return moment


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is deleted or ended; where nobody can answer, refuse."""
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise InvalidInput(
            "nothing was done, because there is no terminal to ask on",
            on="confirmation",
            remedy="Add --yes to do it without a question",
        )
    click.confirm(question, abort=True, err=True)


class Interrupts:
    """Ctrl-C and SIGTERM while a command works: it ends between two steps, and at once where it only waits.

    So no step is torn apart half-way, and what was done up to then can still be told.
    """

    def __init__(self) -> None:
        #: Whether somebody wants it to end.
        self.asked = False
        self._waits = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        # Only the main thread hears of signals, and only it may say who handles them.
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _hear(self, *_: object) -> None:
        self.asked = True
        if self._waits:
            raise KeyboardInterrupt

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, an interrupt is raised as `KeyboardInterrupt`, also one that came before."""
        self._waits = True
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._waits = False

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """The items, until there are no more or somebody wants it to end."""
        following = iter(items)
        while not self.asked:
            try:
                self._waits = True
                item = next(following)
                self._waits = False
            except (StopIteration, KeyboardInterrupt):
                self._waits = False
                return
            yield item
