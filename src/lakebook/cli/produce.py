"""`lakebook produce`: records from lines, JSON, CSV or Parquet into a topic."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import click

from lakebook.cli.commands import BookCommand, Interrupts, Place, json_option, pairs_of
from lakebook.cli.output import advancing, print_json, print_line, print_note, print_table
from lakebook.cli.record_input import BadInput, Input, Shape, inputs
from lakebook.errors import InvalidInput, LakebookError, PartitionNotFound
from lakebook.names import shown

if TYPE_CHECKING:
    # They load Arrow, for which no other command shall wait.
    from lakebook.streams.producer import Producer

_FORMATS = ("lines", "json", "csv", "parquet")
_BY_NAME = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}
# How many records are sent between two looks at what has become of those before them.
_BETWEEN_LOOKS = 1000

_Say: TypeAlias = Callable[[int, int | None, str], None]


@click.command(cls=BookCommand)
@click.argument("topic")
@click.argument("file", default="-")
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    help="What FILE has: a value per line, an object of JSON per line, CSV with a heading, or Parquet."
    "  [default: by its name, else lines]",
)
@click.option("--key-separator", metavar="TEXT", help="Of lines: what stands between the key and the value.")
@click.option("--key-field", metavar="NAME", help="Of JSON, CSV and Parquet: the field or column that is the key.")
@click.option(
    "--value-field",
    metavar="NAME",
    help="Of JSON, CSV and Parquet: the field or column that is the value."
    "  [default: the whole object or row as JSON; of Parquet the column `value`]",
)
@click.option(
    "--timestamp-field",
    metavar="NAME",
    help="Of JSON, CSV and Parquet: the field or column with the record's time (ISO, or milliseconds since 1970)."
    "  [default: now]",
)
@click.option(
    "--partition",
    type=click.IntRange(min=0),
    help="The partition of every record.  [default: what it says, or by its key]",
)
@click.option("--header", "headers", metavar="KEY=VALUE", multiple=True, help="A header of every record; repeatable.")
@click.option("--producer-id", metavar="ID", help="Fence every other producer of this id.  [default: an id of its own]")
@click.option(
    "--compression",
    type=click.Choice(("none", "snappy", "gzip", "lz4", "zstd")),
    help="How segments are compressed.  [default: as the topic says, else zstd]",
)
@click.option("--skip-bad", is_flag=True, help="Leave lines out that are no records, and count them.")
@json_option
@click.pass_context
def produce(
    context: click.Context,
    topic: str,
    file: str,
    form: str | None,
    key_separator: str | None,
    key_field: str | None,
    value_field: str | None,
    timestamp_field: str | None,
    partition: int | None,
    headers: tuple[str, ...],
    producer_id: str | None,
    compression: str | None,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Send the records of FILE, or of stdin, to TOPIC, and say where they are.

    A line of JSON is a record itself, with the parts key, value, headers, timestamp and partition, as
    `lakebook consume --json` prints it; with one of the options that name a field it is an object of your own.

    What is counted is durable. A bad line ends the command with an error that names it, after what came
    before it was stored. Ctrl-C stores what was read, and the exit code is 1.
    """
    place = context.find_object(Place)
    assert place is not None
    form = form or _BY_NAME.get(Path(file).suffix.lower(), "lines")
    pairs = pairs_of(headers, "--header", InvalidInput)
    fixed = tuple((name, value.encode("utf-8", "surrogateescape")) for name, value in pairs.items())
    shape = Shape(key_separator, key_field, value_field, timestamp_field, fixed, partition)
    _check(form, shape)
    report = Report(topic)
    failure = None
    try:
        with Interrupts() as interrupts, place.open() as book, _opened(file) as stream, _bar(file, stream) as say:
            with book.producer(topic, producer_id=producer_id, compression=compression) as producer:
                _Sending(producer, report, interrupts, say, skip_bad=skip_bad).send_all(stream, form, shape)
            report.interrupted = interrupts.asked
    except LakebookError as error:
        failure = error
    # Also before an error: what was acknowledged is told, whatever came after it.
    if report.records or failure is None:
        _print(report, as_json=as_json)
    if failure is not None:
        raise failure
    context.exit(1 if report.interrupted else 0)


def _check(form: str, shape: Shape) -> None:
    if form == "lines" and shape.names_fields:
        raise click.UsageError("Lines have no fields: give --format json, csv or parquet.")
    if form != "lines" and shape.key_separator is not None:
        raise click.UsageError("--key-separator is for lines.")
    if shape.key_separator == "":
        raise click.UsageError("--key-separator cannot be empty.")


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = open(file, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise InvalidInput(
            f"it cannot be read ({error.strerror})", on=shown(file), remedy="Name another file"
        ) from None
    with stream:
        yield stream


@contextmanager
def _bar(file: str, stream: IO[bytes]) -> Iterator[_Say]:
    """A bar for whoever waits; not where the records are typed."""
    if file == "-" and stream.isatty():
        yield lambda done, total, step: None
        return
    with advancing("sending") as say:
        yield say


# --- sending -----------------------------------------------------------------------


@dataclass
class Stored:
    """What is stored in one partition."""

    partition_id: int
    records: int
    first_offset: int
    last_offset: int


@dataclass
class Report:
    """What has become of the records."""

    topic: str
    records: int = 0
    bytes: int = 0
    skipped: int = 0
    interrupted: bool = False
    partitions: dict[int, Stored] = field(default_factory=dict)

    def add(self, partition: int, first: int, last: int, size: int) -> None:
        """Count records that were acknowledged."""
        number = last - first + 1
        self.records += number
        self.bytes += size
        found = self.partitions.get(partition)
        if found is None:
            self.partitions[partition] = Stored(partition, number, first, last)
            return
        found.records += number
        found.first_offset = min(found.first_offset, first)
        found.last_offset = max(found.last_offset, last)


class _Sending:
    """Sends records, and watches what becomes of them."""

    def __init__(
        self, producer: Producer, report: Report, interrupts: Interrupts, say: _Say, *, skip_bad: bool
    ) -> None:
        self._producer, self._report, self._interrupts, self._say = producer, report, interrupts, say
        self._skip_bad = skip_bad
        self._read = 0
        #: What was sent and is not counted yet, with its size.
        self._sent: deque[tuple[Future[Any], int]] = deque()

    def send_all(self, stream: IO[bytes], form: str, shape: Shape) -> None:
        """Send everything, and wait until it is stored; what was sent before an error is stored too."""
        total = _size_of(stream)
        failure = None
        try:
            step = self._send_tables if form == "parquet" else self._send_records
            for position in step(stream, form, shape):
                self._say(position, total, f"{self._read} records")
        except LakebookError as error:
            failure = error
        failure = self._finish() or failure
        if failure is not None:
            raise failure

    def _send_records(self, stream: IO[bytes], form: str, shape: Shape) -> Iterator[int]:
        for item in self._interrupts.each(inputs(stream, form, shape)):
            if isinstance(item, BadInput):
                self._refuse(item.error)
            else:
                self._send(item)
            if self._read % _BETWEEN_LOOKS == 0:
                self._count()
                yield _position(stream)

    def _send(self, item: Input) -> None:
        self._read += 1
        try:
            pending = self._producer.send(
                item.value, item.key, headers=item.headers, timestamp=item.timestamp, partition=item.partition
            )
        except (InvalidInput, PartitionNotFound) as error:
            self._refuse(InvalidInput(error.what, on=f"line {item.line}", remedy=error.remedy))
            return
        size = len(item.key or b"") + len(item.value or b"")
        self._sent.append((pending, size))

    def _refuse(self, error: LakebookError) -> None:
        if not self._skip_bad:
            raise error
        if not self._report.skipped:
            print_note(f"skipped: {error}")
        self._report.skipped += 1

    def _send_tables(self, stream: IO[bytes], _form: str, shape: Shape) -> Iterator[int]:
        from lakebook.cli.table_input import content_size, tables

        for table in self._interrupts.each(tables(stream, shape)):
            self._read += table.num_rows
            self._sent.append((self._producer.send_table(table), content_size(table)))
            self._count()
            yield _position(stream)

    def _count(self, *, wait: bool = False) -> None:
        """Count what was acknowledged; one that failed is an error."""
        while self._sent and (wait or self._sent[0][0].done()):
            pending, size = self._sent.popleft()
            found = pending.result()
            if isinstance(found, tuple):
                for place in found:
                    self._report.add(place.partition, place.base_offset, place.end_offset, 0)
                self._report.bytes += size
            else:
                self._report.add(found.partition, found.offset, found.offset, size)

    def _finish(self) -> LakebookError | None:
        """Wait until everything that was sent is stored; the first failure, if there is one."""
        failure = None
        try:
            self._producer.flush()
        except LakebookError as error:
            failure = error
        while self._sent:
            try:
                self._count(wait=True)
            except LakebookError as error:
                failure = failure or error
        return failure


def _size_of(stream: IO[bytes]) -> int | None:
    try:
        return os.fstat(stream.fileno()).st_size or None
    except (OSError, AttributeError):
        return None


def _position(stream: IO[bytes]) -> int:
    try:
        return stream.tell()
    except (OSError, ValueError):
        return 0


# --- telling -----------------------------------------------------------------------


def _print(report: Report, *, as_json: bool) -> None:
    places = [report.partitions[number] for number in sorted(report.partitions)]
    if as_json:
        print_json({**vars(report), "partitions": places})
        return
    print_line(f"stored {report.records} record(s) of {report.bytes} bytes in {report.topic}")
    if places:
        print_table(
            ("partition", "records", "first offset", "last offset"), [tuple(vars(place).values()) for place in places]
        )
    if report.skipped:
        print_note(f"skipped {report.skipped} line(s) that are no records")
    if report.interrupted:
        print_note("interrupted: what was read is stored")
