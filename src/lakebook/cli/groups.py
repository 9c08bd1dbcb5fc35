"""`lakebook groups`: consumer groups, what they have still to read, and resetting them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

import click

from lakebook.cli.commands import (
    BookGroup,
    Place,
    confirm,
    json_option,
    limit_option,
    moment_of,
    pass_place,
    walk,
    yes_option,
)
from lakebook.cli.output import print_json, print_line, print_table
from lakebook.registry.members import GroupMember


@click.group(cls=BookGroup)
def groups() -> None:
    """List, show, reset and delete consumer groups, and see their members."""


@groups.command("list")
@limit_option
@json_option
@pass_place
def list_groups(place: Place, limit: int | None, as_json: bool) -> None:
    """List the consumer groups in the order of their names."""
    with place.open() as book:
        found = list(walk(lambda after, size: book.metadata.list_consumer_groups(after=after, limit=size), limit))
    if as_json:
        print_json(found)
        return
    print_table(
        ("group", "state", "generation", "topics", "partitions", "lag", "last commit"),
        [
            (
                group.group_id,
                group.state,
                group.generation,
                group.topics,
                group.partitions,
                group.lag,
                group.last_commit_at,
            )
            for group in found
        ],
    )


@groups.command()
@click.argument("name")
@click.option("--topic", help="Only this topic, also if the group has committed nothing on it.")
@json_option
@pass_place
def show(place: Place, name: str, topic: str | None, as_json: bool) -> None:
    """Show what the group NAME has still to read of each partition, and who reads for it."""
    with place.open() as book:
        partitions = book.metadata.lag(name, topic)
        present = book.metadata.group_members(name)
    if as_json:
        lag = sum(entry.lag for entry in partitions)
        print_json({"group_id": name, "lag": lag, "partitions": partitions, "members": present})
        return
    print_table(
        ("topic", "partition", "committed", "log start", "high watermark", "lag", "state"),
        [
            (
                entry.topic,
                entry.partition_id,
                entry.committed_offset,
                entry.log_start,
                entry.high_watermark,
                entry.lag,
                "behind" if entry.behind else "lagging" if entry.lag else "current",
            )
            for entry in partitions
        ],
    )
    if present:
        print_line("")
        _print_members(present)


@groups.command()
@click.argument("name")
@json_option
@pass_place
def members(place: Place, name: str, as_json: bool) -> None:
    """List the members of the group NAME and the partitions that each of them reads."""
    with place.open() as book:
        present = book.metadata.group_members(name)
    if as_json:
        print_json(present)
    else:
        _print_members(present)


def _print_members(present: Iterable[GroupMember]) -> None:
    print_table(
        ("member", "partitions", "process", "joined", "silent from"),
        [
            (
                member.member_id,
                " ".join(f"{topic}/{number}" for topic, number in member.partitions) or None,
                member.holder,
                member.joined_at,
                member.expires_at,
            )
            for member in present
        ],
    )


@groups.command()
@click.argument("name")
@click.option("--topic", required=True, help="The topic to reset the group on.")
@click.option("--partition", type=int, help="Only this partition.  [default: all]")
@click.option(
    "--to",
    "target",
    required=True,
    metavar="earliest|latest|OFFSET|TIME",
    help="Where to: an end, an offset, or an ISO time (UTC unless it says otherwise).",
)
@click.option("--reason", help="Why, for the record of resets.")
@json_option
@pass_place
def reset(
    place: Place, name: str, topic: str, partition: int | None, target: str, reason: str | None, as_json: bool
) -> None:
    """Move the committed offsets of the group NAME on purpose, and record it."""
    with place.open() as book:
        resets = book.metadata.reset_offset(name, topic, partition, _target(target), reason=reason)
    if as_json:
        print_json(resets)
        return
    print_table(
        ("topic", "partition", "from", "to"),
        [(entry.topic, entry.partition_id, entry.from_offset, entry.to_offset) for entry in resets],
    )


@groups.command()
@click.argument("name")
@yes_option
@json_option
@pass_place
def delete(place: Place, name: str, yes: bool, as_json: bool) -> None:
    """Delete the group NAME with its committed offsets."""
    with place.open() as book:
        committed = book.metadata.lag(name)
        confirm(f"Delete group {name} with its offsets on {len(committed)} partition(s)?", yes=yes)
        book.metadata.delete_consumer_group(name)
    if as_json:
        print_json({"deleted": name})
    else:
        print_line(f"deleted group {name}")


def _target(text: str) -> int | str | datetime:
    """What to reset to; a text that is none of these is left for the store to refuse."""
    if re.fullmatch(r"[+-]?[0-9]{1,100}", text):
        return int(text)
    return moment_of(text) or text
