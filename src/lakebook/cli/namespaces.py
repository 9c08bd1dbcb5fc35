"""`lakebook namespaces`: create, list, show and drop namespaces of tables."""

from __future__ import annotations

import click

from lakebook.cli.commands import (
    BookGroup,
    Place,
    json_option,
    limit_option,
    pairs_of,
    pass_place,
    property_option,
    walk,
)
from lakebook.cli.output import print_fields, print_json, print_line, print_table
from lakebook.errors import InvalidTable
from lakebook.names import shown


@click.group(cls=BookGroup)
def namespaces() -> None:
    """Create, list, show and drop namespaces of tables."""


@namespaces.command()
@click.argument("name")
@property_option
@json_option
@pass_place
def create(place: Place, name: str, properties: tuple[str, ...], as_json: bool) -> None:
    """Create the namespace NAME."""
    pairs = pairs_of(properties, f"namespace {shown(name)}", InvalidTable)
    with place.open() as book:
        namespace = book.tables.create_namespace(name, properties=pairs)
    if as_json:
        print_json(namespace)
    else:
        print_line(f"created namespace {namespace.name}")


@namespaces.command("list")
@limit_option
@json_option
@pass_place
def list_namespaces(place: Place, limit: int | None, as_json: bool) -> None:
    """List the namespaces in the order of their names."""
    with place.open() as book:
        found = list(walk(lambda after, size: book.tables.list_namespaces(after=after, limit=size), limit))
    if as_json:
        print_json(found)
    else:
        print_table(
            ("namespace", "properties", "created"),
            [(each.name, len(each.properties), each.created_at) for each in found],
        )


@namespaces.command()
@click.argument("name")
@json_option
@pass_place
def show(place: Place, name: str, as_json: bool) -> None:
    """Show the namespace NAME with its properties."""
    with place.open() as book:
        namespace = book.tables.get_namespace(name)
    if as_json:
        print_json(namespace)
    else:
        print_fields({"namespace": namespace.name, "created": namespace.created_at, **namespace.properties})


@namespaces.command()
@click.argument("name")
@json_option
@pass_place
def drop(place: Place, name: str, as_json: bool) -> None:
    """Drop the namespace NAME, if it has no tables."""
    with place.open() as book:
        book.tables.drop_namespace(name)
    if as_json:
        print_json({"dropped": name})
    else:
        print_line(f"dropped namespace {name}")
