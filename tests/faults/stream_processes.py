"""What the processes of the stream tests do: produce, consume in a group, and look after the topic.

Every life of a producer has a name of its own and counts its records. It tells how far it goes before it sends,
and what was acknowledged. So the test knows of each record that may be there, and of each that has to be.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from typing import Any

import lakebook
from lakebook import Book
from lakebook.components.janitor import Janitor
from lakebook.errors import GenerationFenced, LakebookError, MemberRemoved
from table_writers import Line

TOPIC, GROUP = "orders", "readers"
PARTITIONS = 4
#: Everything happens as soon as it may.
BUSY: dict[str, Any] = {
    "maintenance_interval": 0.2,
    "temporary_file_grace": 0,
    "lease_seconds": 3,
    "insert_alive": 6,
    "sweep_grace": 0.5,
    "append_turn": 1.0,
    "group_session": 2.0,
    "merge_segments": 3,
    "merge_quiet": 0,
    "merge_target": 1_000_000,
    "producer_linger": 0.01,
    "publish": "off",
}
_BATCH = 40


def create_topic(book: Book) -> None:
    """A topic of small segments, whose retention is as short as can be, but waits for the group."""
    config = {"segment.records": "25", "retention.bytes": "1", "retention.groups": "wait"}
    book.metadata.create_topic(TOPIC, PARTITIONS, retention_ms=1, config=config)
    # Retention waits for groups that have committed something.
    book.metadata.commit_offset(GROUP, TOPIC, 0, 0)


def produce(line: Line, target: str, settings: Mapping[str, Any], life: str, seed: int) -> None:
    """Send records until told to stop; tell what is about to be sent, and where what was acknowledged is."""
    choose = random.Random(seed)
    number = 0
    with lakebook.open(target, **settings) as book, book.producer(TOPIC) as producer:
        line.tell("ready")
        while not line.stopped():
            last = number + choose.randint(1, _BATCH)
            line.tell("sending", life, last)
            sent = [producer.send(f"{life}:{each}", key=life) for each in range(number, last)]
            producer.flush(60)
            found = [future.result(0) for future in sent]
            line.tell("acknowledged", life, number, [(ack.partition, ack.offset) for ack in found])
            number = last
            line.pause(choose.choice((0.0, 0.0, 0.02, 0.1)))
    line.tell("done", life, number)


def consume(line: Line, target: str, settings: Mapping[str, Any], seed: int) -> None:
    """Read for the group until told to stop. What was read is told before it is committed."""
    choose = random.Random(seed)
    with (
        lakebook.open(target, **settings) as book,
        book.consumer(
            TOPIC, group=GROUP, reset="earliest", auto_commit=False, on_assigned=lambda new: line.tell("assigned", new)
        ) as consumer,
    ):
        line.tell("ready")
        while not line.stopped():
            try:
                records = consumer.poll(0.2, max_records=choose.randint(1, 500))
                if records:
                    text = [(record.partition, record.offset, (record.value or b"").decode()) for record in records]
                    line.tell("read", text)
                if choose.random() < 0.7:
                    consumer.commit()
            except (GenerationFenced, MemberRemoved):
                # Another reads these partitions now: what was not committed is read again.
                continue
        with contextlib.suppress(GenerationFenced, MemberRemoved):
            consumer.commit()
    line.tell("done")


def look_after(line: Line, target: str, settings: Mapping[str, Any]) -> None:
    """Retention, merging and clean-up, one round after the other."""
    with lakebook.open(target, **settings) as book:
        # One for all the time: it has to see that a lease stands still.
        janitor = Janitor(book.lake)
        line.tell("ready")
        rounds = 0
        while not line.stopped():
            done = janitor.run_once()
            failed = {name: report for name, report in done.items() if "error" in report}
            assert not failed, failed
            rounds += 1
            line.pause(0.2)
    line.tell("done", rounds)


def drain(book: Book) -> list[tuple[int, int, str]]:
    """What no reader has committed, up to the end, read by one alone."""
    found: list[tuple[int, int, str]] = []
    with book.consumer(TOPIC, group=GROUP, reset="earliest", auto_commit=False) as consumer:
        while sum(part.lag for part in book.metadata.lag(GROUP, TOPIC)):
            records = consumer.poll(1.0)
            found += [(record.partition, record.offset, (record.value or b"").decode()) for record in records]
            try:
                consumer.commit()
            except LakebookError:
                continue
    return found
