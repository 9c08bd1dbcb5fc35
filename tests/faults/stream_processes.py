"""What the processes of the stream tests do: produce, consume in a group, and look after the topics.

Every life of a producer has a name of its own and counts its records. It tells how far it goes before it sends,
and what was acknowledged. So the test knows of each record that may be there, and of each that has to be.

Of another topic nothing is kept for longer than somebody has a lease on it. Its records count from 0, so that
whoever reads it knows by itself whether one is missing.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from typing import Any

import lakebook
from lakebook import Book
from lakebook.components.janitor import Janitor
from lakebook.errors import GenerationFenced, LakebookError, LeaseLost, MemberRemoved
from lakebook.streams.consumer import Consumer
from table_writers import Line

TOPIC, GROUP = "orders", "readers"
PARTITIONS = 4
FLEETING = "ticks"
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
# Records of one pass over the fleeting topic. They come faster than they are read, and so does retention.
_PASS = 500


def create_topics(book: Book) -> None:
    """Topics of small segments, whose retention is short: one waits for its group, one for nobody.

    Not as short as can be: what spans more than a tenth of the time is not merged.
    """
    config = {"segment.records": "25"}
    book.metadata.create_topic(TOPIC, PARTITIONS, retention_ms=5000, config={**config, "retention.groups": "wait"})
    book.metadata.create_topic(FLEETING, retention_ms=2000, config=config)
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


def tick(line: Line, target: str, settings: Mapping[str, Any]) -> None:
    """Send numbers from 0 on to the fleeting topic until told to stop."""
    number = 0
    with lakebook.open(target, **settings) as book, book.producer(FLEETING) as producer:
        while not line.stopped():
            producer.send_many([str(each) for each in range(number, number + _BATCH)])
            producer.flush(60)
            number += _BATCH
            line.pause(0.05)
    line.tell("done", number)


def follow(line: Line, target: str, settings: Mapping[str, Any]) -> None:
    """Read the fleeting topic slowly, from its log start on, again and again; nothing but a lease keeps it there.

    After each pass it tells how many records it had, and how often retention stood ahead of it.
    """
    with lakebook.open(target, **settings) as book:
        while not line.stopped():
            with (
                contextlib.suppress(LeaseLost),  # It was held up for too long: it says so, and begins anew.
                book.consumer(FLEETING, start="earliest", read_ahead=1) as consumer,
            ):
                line.tell("passed", *_pass(line, book, consumer))
    line.tell("done")


def _pass(line: Line, book: Book, consumer: Consumer) -> tuple[int, int]:
    begun = place = consumer.position()[FLEETING, 0]
    overtaken = 0
    while place < begun + _PASS and not line.stopped():
        for record in consumer.poll(0.2, max_records=_BATCH // 4):
            assert (record.offset, record.value) == (place, b"%d" % place), "a record is missing, or another one"
            place += 1
        (partition,) = book.metadata.list_partitions(FLEETING)
        overtaken += partition.log_start > place
        line.pause(0.05)
    assert not consumer.skipped
    return place - begun, overtaken


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
            line.tell("round", done["merging"].get("segments", 0))
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
