"""`lakebook segments`: which files hold a partition's records."""

from __future__ import annotations

from datetime import datetime

import click

from lakebook.book import Book
from lakebook.cli.commands import BookGroup, Place, json_option, limit_option, moment_of, pass_place, walk
from lakebook.cli.output import print_fields, print_json, print_table
from lakebook.errors import InvalidInput, NotFound
from lakebook.names import shown
from lakebook.registry.segments import SegmentInfo


@click.group(cls=BookGroup)
def segments() -> None:
    """List and find the segments of a partition."""


@segments.command("list")
@click.argument("topic")
@click.argument("partition", type=int)
@click.option("--from-offset", type=int, default=0, show_default=True, help="Begin with the segment that holds this.")
@limit_option
@json_option
@pass_place
def list_segments(place: Place, topic: str, partition: int, from_offset: int, limit: int | None, as_json: bool) -> None:
    """List the segments of a PARTITION of a TOPIC in the order of their offsets."""
    with place.open() as book:
        found = list(
            walk(
                lambda after, size: book.metadata.get_segments(
                    topic, partition, from_offset=from_offset, after=after, limit=size
                ),
                limit,
            )
        )
    if as_json:
        print_json(found)
        return
    print_table(
        ("base offset", "end offset", "records", "bytes", "newest record", "path"),
        [
            (
                segment.base_offset,
                segment.end_offset,
                segment.record_count,
                segment.size_bytes,
                segment.max_timestamp,
                segment.s3_key,
            )
            for segment in found
        ],
    )


@segments.command()
@click.argument("topic")
@click.argument("partition", type=int)
@click.option("--offset", type=int, help="Find the segment that holds this offset.")
@click.option("--time", metavar="ISO", help="Find the first segment with a record at or after this time.")
@json_option
@pass_place
def find(place: Place, topic: str, partition: int, offset: int | None, time: str | None, as_json: bool) -> None:
    """Find the segment of a PARTITION of a TOPIC that holds an offset or a time."""
    if (offset is None) == (time is None):
        raise click.UsageError("Give either --offset or --time.")
    with place.open() as book:
        segment = _by_offset(book, topic, partition, offset) if time is None else _by_time(book, topic, partition, time)
    if as_json:
        print_json(segment)
    else:
        print_fields({name.replace("_", " "): value for name, value in vars(segment).items() if value is not None})


def _by_offset(book: Book, topic: str, partition: int, offset: int | None) -> SegmentInfo:
    assert offset is not None
    found = book.metadata.find_segment_for_offset(topic, partition, offset)
    return found or _missing(topic, partition, f"no segment holds the offset {offset}")


def _by_time(book: Book, topic: str, partition: int, time: str) -> SegmentInfo:
    moment: datetime | None = moment_of(time)
    if moment is None:
        raise InvalidInput(
            f"{shown(time)} is not a time", on="--time", remedy="Write it like 2026-01-31T12:00:00+00:00"
        )
    found = book.metadata.find_segment_for_timestamp(topic, partition, moment)
    return found or _missing(topic, partition, f"no record is as new as {moment.isoformat()}")


def _missing(topic: str, partition: int, what: str) -> SegmentInfo:
    raise NotFound(
        what, on=f"{topic}/{partition}", remedy=f"`lakebook topics show {topic}` shows which offsets there are"
    )
