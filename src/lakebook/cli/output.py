"""What the command line prints: tables, JSON, notes and errors."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import IO, Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from lakebook.errors import LakebookError

# Wider than any table: what is not read on a terminal is read by a program, line by line.
_UNBOUNDED = 10_000_000
_STYLES = {"ok": "green", "current": "green", "warn": "yellow", "lagging": "yellow", "fail": "red", "behind": "red"}


def print_json(value: object, *, line: bool = False) -> None:
    """Print one JSON document, on one line if several follow each other."""
    click.echo(as_json(value, line=line))


def as_json(value: object, *, line: bool = False) -> str:
    """A value as JSON: dataclasses as objects, times as ISO strings."""
    return json.dumps(value, default=_plain, indent=None if line else 2)


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under their headings; numbers stand to the right."""
    # Asked of the stream itself: Rich can be told by the environment to take a pipe for a terminal.
    on_terminal = sys.stdout.isatty()
    table = Table(box=box.SIMPLE_HEAD if on_terminal else None, pad_edge=False)
    cells = [tuple(row) for row in rows]
    for number, column in enumerate(columns):
        numeric = bool(cells) and all(isinstance(row[number], int | float | None) for row in cells)
        table.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*(_cell(value) for value in row))
    Console(file=sys.stdout, highlight=False, width=None if on_terminal else _UNBOUNDED).print(table)


def print_fields(fields: Mapping[str, object]) -> None:
    """Print one thing as a name and a value per line."""
    for name, value in fields.items():
        click.echo(f"{name + ':':<18} {shown_value(value)}")


def print_line(text: str) -> None:
    """Print one line of plain text."""
    click.echo(one_line(text))


def print_text(text: str) -> None:
    """Print a text of many lines as it is."""
    click.echo(text, nl=False)


def print_note(text: str) -> None:
    """Print a line for the reader on stderr, where it is in no program's way."""
    click.echo(one_line(text), err=True)


def print_error(error: LakebookError, *, json_wanted: bool) -> None:
    """Print an error as one line on stderr."""
    click.echo(as_json(error.as_dict(), line=True) if json_wanted else one_line(f"error: {error}"), err=True)


def progress_console(stream: IO[str] | None = None) -> Console | None:
    """Where progress is shown, if somebody looks on: stderr, or a stream that stands for it."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    return Console(file=stream, stderr=stream is None, highlight=False)


@contextmanager
def working(what: str, stream: IO[str] | None = None) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being done; what is yielded tells the next step."""
    console = progress_console(stream)
    if console is None:
        yield lambda step: None
        return
    with console.status(Text(what)) as status:
        yield lambda step: status.update(Text(one_line(step)))


@contextmanager
def advancing(what: str) -> Iterator[Callable[[int, int | None, str], None]]:
    """Show a bar on a terminal; what is yielded tells how many are done, of how many if known, and which is next."""
    console = progress_console()
    if console is None:
        yield lambda done, total, step: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, step: bar.update(
            task, completed=done, total=total, description=one_line(f"{what} {step}")
        )


def shown_value(value: object) -> str:
    """A value as a person reads it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0").rstrip(".")
    return one_line(str(value))


def one_line(text: str) -> str:
    """A text without line breaks or escape sequences, which could pretend to be something else."""
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _cell(value: object) -> Text:
    text = shown_value(value)
    return Text(text, style=_STYLES.get(text, ""))
