"""Writes docs/reference from the docstrings, the schema, the settings and the command line."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import sqlalchemy as sa

import lakebook
from lakebook import errors
from lakebook.cli.main import cli
from lakebook.config import Settings
from lakebook.iceberg.evolution import SchemaUpdate
from lakebook.lake.cleaning import Cleaned, Expired, Swept
from lakebook.lake.extremes import Extremes
from lakebook.lake.leasing import Lease
from lakebook.lake.repairing import Repaired
from lakebook.lake.table import ColumnDescription
from lakebook.metrics import GAUGES, Metrics
from lakebook.pipelines.backfill import BackfillReport
from lakebook.pipelines.definitions import Definition
from lakebook.pipelines.pipeline import Pipeline, PipelineDescription
from lakebook.pipelines.pipelines import Pipelines
from lakebook.pipelines.running import BatchReport, RunReport
from lakebook.registry import schema
from lakebook.registry.backup_files import Header, Summary
from lakebook.registry.events import EventLog
from lakebook.registry.history import TableVersion
from lakebook.registry.holding import Restored
from lakebook.registry.members import GroupMember, Membership
from lakebook.registry.ranges import Range
from lakebook.registry.rates import PartitionTraffic, ReadingGroup, TopicTraffic
from lakebook.registry.stream_checks import Finding, Verification
from lakebook.registry.table_files import PlannedFile
from lakebook.registry.tables import Namespace, TableMetadata, TableRecord
from lakebook.registry.topic_config import KEYS, USER_PREFIX
from lakebook.storage.warehouse import Warehouse
from lakebook.streams.batching import Acknowledgement, OffsetRange
from lakebook.streams.consumer import Consumer
from lakebook.streams.positions import Skipped
from lakebook.streams.producer import Producer
from lakebook.streams.records import Record
from lakebook.streams.topic import Topic, TopicDescription
from lakebook.streams.topics import Topics
from lakebook.views.planning import Coverage
from lakebook.views.view import Materialized, View
from lakebook.views.views import Views

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Written by `make docs` from the code; change it there. -->\n\n"

# What one meets through a book without importing it.
REACHED = (
    Summary,
    Header,
    Restored,
    EventLog,
    Metrics,
    Settings,
    Verification,
    Finding,
    Repaired,
    Warehouse,
    Producer,
    Acknowledgement,
    OffsetRange,
    Consumer,
    Record,
    Skipped,
    Topics,
    Topic,
    TopicDescription,
    TopicTraffic,
    PartitionTraffic,
    ReadingGroup,
    GroupMember,
    Membership,
    TableRecord,
    TableMetadata,
    TableVersion,
    ColumnDescription,
    Namespace,
    PlannedFile,
    Extremes,
    Lease,
    SchemaUpdate,
    Pipelines,
    Pipeline,
    PipelineDescription,
    Definition,
    RunReport,
    BatchReport,
    BackfillReport,
    Views,
    View,
    Materialized,
    Coverage,
    Range,
    Expired,
    Cleaned,
    Swept,
)


def documented(thing: Any) -> str:
    """A thing's own docstring; a part of the interface without one is an error."""
    text = inspect.getdoc(thing)
    if not text or (dataclasses.is_dataclass(thing) and text.startswith(f"{getattr(thing, '__name__', '')}(")):
        raise ValueError(f"{thing!r} has no docstring")
    return text


class _Elided:
    """Stands for a default whose text would say nothing."""

    def __repr__(self) -> str:
        return "…"


def signature_of(thing: Any) -> str:
    """A signature with types, without `self`."""
    signature = inspect.signature(thing)
    kept = [
        parameter
        if parameter.default is inspect.Parameter.empty or isinstance(parameter.default, str | int | float | None)
        else parameter.replace(default=_Elided())
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    return str(signature.replace(parameters=kept)).replace("'", "")


def api_page() -> str:
    """Every public name, its methods and its fields."""
    parts = ["# The Python interface\n", "`import lakebook` gives these names.\n"]
    things = [(name, getattr(lakebook, name)) for name in sorted(lakebook.__all__, key=str.lower)]
    things += [(shown_name(thing), thing) for thing in REACHED if thing not in dict(things).values()]
    for name, thing in things:
        parts.extend(class_section(name, thing) if inspect.isclass(thing) else function_section(name, thing))
    return "\n".join(parts)


def shown_name(thing: type) -> str:
    """The name of a class that is not imported; with its room where another one is imported by that name."""
    taken = thing.__name__ in lakebook.__all__
    return f"{thing.__module__.split('.')[1]}.{thing.__name__}" if taken else thing.__name__


def function_section(name: str, thing: Any) -> Iterator[str]:
    """A function: signature and docstring."""
    yield f"## `lakebook.{name}`\n"
    yield f"```python\n{name}{signature_of(thing)}\n```\n"
    yield documented(thing) + "\n"


def class_section(name: str, thing: Any) -> Iterator[str]:
    """A class: docstring, fields or members, public methods."""
    yield f"## `{name}`\n"
    yield documented(thing) + "\n"
    if issubclass(thing, enum.Enum):
        yield "\n".join(f"- `{member.value}`" for member in thing) + "\n"
        return
    if dataclasses.is_dataclass(thing):
        yield "| field | type |\n|---|---|"
        yield (
            "\n".join(
                f"| `{field.name}` | `{field.type}` |".replace(" | None", " or None")
                for field in dataclasses.fields(thing)
            )
            + "\n"
        )
    for method_name, method in public_methods(thing):
        yield f"### `{name}.{method_name}`\n"
        if not isinstance(method, property):
            yield f"```python\n{method_name}{signature_of(method)}\n```\n"
        yield documented(method) + "\n"


def public_methods(thing: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that Lakebook itself defines, in the order of the source."""
    for owner in thing.__mro__:
        if not owner.__module__.startswith("lakebook"):
            continue
        for name, value in vars(owner).items():
            if name.startswith("_") or not isinstance(value, property | classmethod | type(public_methods)):
                continue
            yield name, getattr(thing, name) if isinstance(value, classmethod) else value


def errors_page() -> str:
    """The tree of errors."""
    assert errors.__doc__ is not None
    head, tree, rest = errors.__doc__.split("\n\n", 2)
    parts = ["# Errors\n", f"{head}\n", f"```\n{inspect.cleandoc(tree)}\n```\n", f"{rest.strip()}\n"]
    parts.append("| error | code | when |\n|---|---|---|")
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.LakebookError):
            parts.append(f"| `{name}` | `{kind('').code}` | {documented(kind)} |")
    return "\n".join(parts) + "\n"


def settings_page() -> str:
    """Settings of a book, and the configuration of a topic."""
    parts = ["# Settings\n", documented(Settings) + "\n", "| setting | type | default | meaning |\n|---|---|---|---|"]
    parts.extend(
        f"| `{field.name}` | `{field.type}` | `{field.default!r}` | {field.metadata['doc']} |"
        for field in dataclasses.fields(Settings)
    )
    parts.append(
        "\n`LAKEBOOK_BOOK` names the book for the command line; `LAKEBOOK_CONFIG` names the settings file. A folder"
        " that is given to the command line by `--book` counts before `LAKEBOOK_REGISTRY` and `LAKEBOOK_WAREHOUSE`;"
        " one that a program opens does not.\n"
    )
    parts.append("## Configuration of a topic\n\n| key | value |\n|---|---|")
    parts.extend(f"| `{key}` | {wanted} |" for key, (_, wanted) in sorted(KEYS.items()))
    parts.append(f"| `{USER_PREFIX}…` | any printable text; kept as it is |")
    return "\n".join(parts) + "\n"


def metrics_page() -> str:
    """Counters, timings and gauges."""
    parts = ["# Metrics\n", "`lakebook metrics` prints them (`--json`, `--prometheus`); `book.metrics` holds them.\n"]
    parts.append("| metric | kind | meaning |\n|---|---|---|")
    with lakebook.open(":memory:") as book:
        parts.extend(
            f"| `{family.name}` | {family.type} | {family.documentation} |"
            for family in book.metrics._collectors.collect()
        )
    assert all(f"`lakebook_{name}`" in "\n".join(parts) for name in GAUGES)
    return "\n".join(parts) + "\n"


def schema_page() -> str:
    """The registry's tables."""
    assert schema.__doc__ is not None
    parts = ["# The registry's schema\n", "```\n" + schema.__doc__.strip() + "\n```\n"]
    for name, table in sorted(schema.metadata.tables.items()):
        parts.append(f"## `{name}`\n\n{table.comment}\n\n| column | type | null |\n|---|---|---|")
        parts.extend(f"| `{c.name}` | {c.type} | {'yes' if c.nullable else 'no'} |" for c in table.columns)
        rules = sorted(str(rule) for rule in map(rule_of, table.constraints) if rule)
        rules += sorted(index_of(index) for index in table.indexes)
        parts.append("\n" + "\n".join(f"- {rule}" for rule in rules) + "\n")
    captured = ", ".join(f"`{table.name}`" for table in schema.CAPTURED)
    parts.append(f"Changes of {captured} are captured as events.\n")
    return "\n".join(parts)


def rule_of(rule: sa.Constraint) -> str:
    """A constraint in words."""
    if isinstance(rule, sa.PrimaryKeyConstraint):
        return f"key: {columns_of(rule)}"
    if isinstance(rule, sa.UniqueConstraint):
        return f"unique: {columns_of(rule)}"
    if isinstance(rule, sa.ForeignKeyConstraint):
        return f"refers: {columns_of(rule)} to `{rule.referred_table.name}`"
    return f"check: `{rule.sqltext}`" if isinstance(rule, sa.CheckConstraint) else ""


def index_of(index: sa.Index) -> str:
    """An index in words."""
    where = index.dialect_options["postgresql"]["where"]
    return f"{'unique ' if index.unique else ''}index `{index.name}`: {columns_of(index)}" + (
        f" where `{where}`" if where is not None else ""
    )


def columns_of(thing: Any) -> str:
    """The columns of a constraint or an index."""
    return ", ".join(f"`{column.name}`" for column in thing.columns)


def commands_page() -> str:
    """Every command with its options."""
    parts = ["# The command line\n"]
    for path, command, context in walk(cli, ["lakebook"]):
        parts.append(f"{'#' * min(4, len(path) + 1)} `{' '.join(path)}`\n\n```\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def walk(
    command: click.Command, path: list[str], above: click.Context | None = None
) -> Iterator[tuple[list[str], click.Command, click.Context]]:
    """A command and everything below it, each in the context that a user would see it in."""
    if not command.help:
        raise ValueError(f"{' '.join(path)} has no help text")
    # A fixed width: the terminal of whoever runs this is no part of the reference.
    settings = {**command.context_settings, "terminal_width": 80, "max_content_width": 80}
    context = click.Context(command, parent=above, info_name=path[-1], **settings)
    yield path, command, context
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from walk(command.commands[name], [*path, name], context)


def pages() -> dict[str, str]:
    """Every page of the reference, by the name of its file."""
    made = {
        "api.md": api_page(),
        "commands.md": commands_page(),
        "errors.md": errors_page(),
        "metrics.md": metrics_page(),
        "schema.md": schema_page(),
        "settings.md": settings_page(),
    }
    return {name: NOTE + "\n".join(line.rstrip() for line in text.splitlines()) + "\n" for name, text in made.items()}


def main() -> int:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
