"""`lakebook topics`: create, list, show, configure and delete topics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from lakebook.book import Book
from lakebook.cli.commands import (
    BookGroup,
    Place,
    confirm,
    json_option,
    limit_option,
    pairs_of,
    pass_place,
    walk,
    yes_option,
)
from lakebook.cli.output import print_fields, print_json, print_line, print_table
from lakebook.errors import InvalidConfig
from lakebook.names import shown
from lakebook.registry.rates import PartitionTraffic, ReadingGroup
from lakebook.registry.topic_config import check_config, check_retention
from lakebook.registry.topics import Topic, not_found

_FOREVER = "for ever"


@click.group(cls=BookGroup)
def topics() -> None:
    """Create, list, show, configure and delete topics."""


@topics.command()
@click.argument("name")
@click.option("--partitions", type=int, default=1, show_default=True, help="How many partitions it has.")
@click.option("--retention-ms", type=int, help="Milliseconds for which segments are kept.  [default: for ever]")
@click.option("--config", metavar="KEY=VALUE", multiple=True, help="A configuration key; can be given several times.")
@json_option
@pass_place
def create(
    place: Place, name: str, partitions: int, retention_ms: int | None, config: tuple[str, ...], as_json: bool
) -> None:
    """Create the topic NAME."""
    pairs = pairs_of(config, f"topic {shown(name)}")
    with place.open() as book:
        topic = book.metadata.create_topic(name, partitions, retention_ms=retention_ms, config=pairs)
    if as_json:
        print_json(topic)
    else:
        print_line(f"created topic {topic.name} with {topic.partition_count} partition(s)")


@topics.command("list")
@click.option("--prefix", default="", help="Only topics whose names begin with this.")
@limit_option
@json_option
@pass_place
def list_topics(place: Place, prefix: str, limit: int | None, as_json: bool) -> None:
    """List the topics in the order of their names."""
    with place.open() as book:
        found = list(walk(lambda after, size: book.metadata.list_topics(prefix=prefix, after=after, limit=size), limit))
    if as_json:
        print_json(found)
        return
    print_table(
        ("topic", "partitions", "retention ms", "config keys", "created"),
        [
            (topic.name, topic.partition_count, _retention(topic), len(topic.config), topic.created_at)
            for topic in found
        ],
    )


@topics.command()
@click.argument("name")
@json_option
@pass_place
def show(place: Place, name: str, as_json: bool) -> None:
    """Show the topic NAME: its configuration, its partitions with their rates, and the groups that read it.

    The rates are records and bytes per second of the last minute and of the last hour, by the segments that
    are still there.
    """
    with place.open() as book:
        topic = _existing(book, name)
        traffic = book.metadata.topic_traffic(name)
    if as_json:
        print_json({**vars(topic), "partitions": traffic.partitions, "groups": traffic.groups})
        return
    _print_config(topic, {"topic": topic.name, "created": topic.created_at, "changed": topic.updated_at})
    print_line("")
    _print_partitions(traffic.partitions)
    if traffic.groups:
        print_line("")
        _print_groups(traffic.groups)


def _print_partitions(found: Iterable[PartitionTraffic]) -> None:
    headings = ("partition", "log start", "high watermark", "records", "segments", "bytes")
    rates = ("records/s 1 min", "bytes/s 1 min", "records/s 1 h", "bytes/s 1 h", "last append")
    print_table((*headings, *rates), [tuple(vars(partition).values()) for partition in found])


def _print_groups(found: Iterable[ReadingGroup]) -> None:
    print_table(
        ("group", "state", "generation", "members", "lag", "last commit"),
        [tuple(vars(group).values()) for group in found],
    )


@topics.command()
@click.argument("name")
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Set a key; can be given several times.")
@click.option("--unset", "unsets", metavar="KEY", multiple=True, help="Remove a key; can be given several times.")
@click.option("--retention-ms", type=int, help="Keep segments for this many milliseconds.")
@click.option("--keep-forever", is_flag=True, help="Keep segments for ever.")
@click.option("--partitions", type=int, help="Grow to this many partitions. A topic never shrinks.")
@json_option
@pass_place
def config(
    place: Place,
    name: str,
    sets: tuple[str, ...],
    unsets: tuple[str, ...],
    retention_ms: int | None,
    keep_forever: bool,
    partitions: int | None,
    as_json: bool,
) -> None:
    """Change the configuration of the topic NAME; without an option, print it."""
    if keep_forever and retention_ms is not None:
        raise click.UsageError("--retention-ms and --keep-forever exclude each other.")
    changes = _changes(name, sets, unsets)
    retention: dict[str, Any] = {"retention_ms": retention_ms} if keep_forever or retention_ms is not None else {}
    # Checked before the topic grows: what is refused must not be refused half-way.
    check_config(name, changes, removals=True)
    check_retention(name, retention_ms)
    with place.open() as book:
        topic = _existing(book, name)
        if partitions is not None:
            topic = book.metadata.grow_topic(name, partitions)
        if changes or retention:
            topic = book.metadata.update_topic_config(name, changes, **retention)
    if as_json:
        print_json(topic)
    else:
        _print_config(topic, {"topic": topic.name})


@topics.command()
@click.argument("name")
@yes_option
@json_option
@pass_place
def delete(place: Place, name: str, yes: bool, as_json: bool) -> None:
    """Delete the topic NAME with everything in it."""
    with place.open() as book:
        topic = _existing(book, name)
        confirm(f"Delete topic {topic.name} with its {topic.partition_count} partition(s)?", yes=yes)
        book.metadata.delete_topic(name)
    if as_json:
        print_json({"deleted": name})
    else:
        print_line(f"deleted topic {name}")


def _existing(book: Book, name: str) -> Topic:
    topic = book.metadata.get_topic(name)
    if topic is None:
        raise not_found(name)
    return topic


def _changes(name: str, sets: tuple[str, ...], unsets: tuple[str, ...]) -> dict[str, str | None]:
    changes: dict[str, str | None] = {**pairs_of(sets, f"topic {shown(name)}")}
    for key in unsets:
        if key in changes:
            raise InvalidConfig(f"{shown(key)} is given twice", on=f"topic {shown(name)}", remedy="Give every key once")
        changes[key] = None
    return changes


def _retention(topic: Topic) -> int | str:
    return _FOREVER if topic.retention_ms is None else topic.retention_ms


def _print_config(topic: Topic, heading: dict[str, object]) -> None:
    print_fields({**heading, "partitions": topic.partition_count, "retention ms": _retention(topic), **topic.config})
