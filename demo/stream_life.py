"""A topic with life in it: a producer, two consumers that share a group, one of which dies.

The consumers are processes of their own. At the end Spark and DuckDB read the same records: the topic is an
Iceberg table too, and its data files are the topic's segments. Everything happens in a temporary folder, unless the
settings say where.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

import duckdb
import engines

import lakebook
from lakebook import Book
from lakebook.errors import Conflict, GroupNotFound
from lakebook.registry.members import GroupMember

ORDERS = 1000
#: Whoever is silent for two seconds is taken for dead, so that nobody has to wait long for the demo.
SETTINGS: dict[str, Any] = {"group_session": 2.0}
PATIENCE = 120.0


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


def show(text: str) -> None:
    print(f"  {text}")


# --- a consumer, in a process of its own --------------------------------------------


def consume(folder: str) -> None:
    """Print every record that this member of the group gets, and commit what was printed."""
    with (
        suppress(KeyboardInterrupt),
        lakebook.open(engines.place(folder), **SETTINGS) as book,
        book.consumer("orders", group="shop", auto_commit=False) as consumer,
    ):
        while True:
            for record in consumer.poll(timeout=0.5, max_records=50):
                print(json.dumps([record.partition, record.offset]), flush=True)
            # Another member may have got a partition meanwhile; it goes on from the last commit.
            with suppress(Conflict):
                consumer.commit()


class Member:
    """A child that consumes, and what it has told."""

    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        self.read: list[tuple[int, int]] = []
        self._told = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "consume", folder], stdout=subprocess.PIPE, text=True
        )
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            partition, offset = json.loads(line)
            with self._told:
                self.read.append((partition, offset))
                self._told.notify_all()

    def wait_for(self, enough: Callable[[], bool]) -> None:
        """Wait until it has read what it shall."""
        with self._told:
            assert self._told.wait_for(enough, PATIENCE), f"{self.name} has read {len(self.read)} records"

    def partitions(self) -> str:
        """How many records of which partitions it has read."""
        counted = Counter(partition for partition, _ in self.read)
        return ", ".join(f"{number} of partition {partition}" for partition, number in sorted(counted.items()))

    def end(self, how: signal.Signals) -> None:
        """End it by a signal."""
        self._process.send_signal(how)
        self._process.wait(PATIENCE)
        self._thread.join(PATIENCE)


# --- the life ----------------------------------------------------------------------


def produce(book: Book, first: int) -> int:
    """Send orders, and wait until all of them are durable; how many."""
    with book.producer("orders") as producer:
        sent = [
            producer.send(f"order {number}", key=f"customer-{number % 97}") for number in range(first, first + ORDERS)
        ]
        producer.flush()
    return sum(1 for future in sent if future.done() and future.exception() is None)


def share(book: Book, folder: str) -> None:
    say(f"A producer sends {ORDERS} orders; two consumers share a group, so each partition has one reader")
    first, second = Member("the first", folder), Member("the second", folder)
    try:
        wait_until(lambda: [len(member.partitions) for member in members_of(book)] == [1, 1])
        show(f"{produce(book, 0)} orders are acknowledged: stored, and in the registry")
        for member in (first, second):
            member.wait_for(lambda: len(member.read) > 0)  # noqa: B023 - called at once
        for found in members_of(book):
            show(f"member {found.member_id[:8]} reads {[f'{topic}/{number}' for topic, number in found.partitions]}")
        die(book, first, second)
    finally:
        # No child outlives the demo, whatever happens.
        first.end(signal.SIGKILL)
        second.end(signal.SIGKILL)


def members_of(book: Book) -> list[GroupMember]:
    with suppress(GroupNotFound):
        return book.metadata.group_members("shop")
    return []


def wait_until(condition: Callable[[], bool]) -> None:
    waiting, until = threading.Event(), monotonic() + PATIENCE
    while not condition():
        assert monotonic() < until, "the consumers have not come together"
        waiting.wait(0.05)


def die(book: Book, first: Member, second: Member) -> None:
    say("The first one is killed, without a word; the producer goes on")
    first.end(signal.SIGKILL)
    show(f"the first had read {first.partitions()}")
    sent = ORDERS + produce(book, ORDERS)
    wanted = {
        (partition.partition_id, offset)
        for partition in book.metadata.list_partitions("orders")
        for offset in range(partition.high_watermark)
    }
    assert len(wanted) == sent
    second.wait_for(lambda: wanted <= {*first.read, *second.read})
    show(f"the second has read {second.partitions()}, and so all there is")
    twice = len({*first.read} & {*second.read})
    show(f"{twice} records came twice: what the first had read and not committed; none was left out")
    second.end(signal.SIGINT)
    show(f"lag of the group: {sum(entry.lag for entry in book.metadata.lag('shop'))}")


def read_elsewhere(book: Book) -> None:
    say("Spark reads the segments with its own Parquet reader")
    spark = book.spark(spark_log_level="OFF")
    frame = book.topics["orders"].read(spark)
    show(f"{frame.count()} records, {frame.select('key').distinct().count()} customers")
    book.release_reads()
    spark.stop()
    say("DuckDB reads the same files as an Iceberg table, without a copy")
    table = book.catalog().load_table("topics.orders")
    with duckdb.connect() as connection:
        path = engines.readable(connection, book, table.metadata_location)
        (counted,) = connection.execute("SELECT count(*) FROM iceberg_scan(?)", [path]).fetchall()
    show(f"{counted[0]} rows in snapshot {table.metadata.current_snapshot_id}")


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="lakebook-demo-") as folder,
        lakebook.open(engines.place(folder), **SETTINGS) as book,
    ):
        book.topics.create("orders", 2, config={"iceberg": "true"})
        share(book, folder)
        read_elsewhere(book)
        say("And nothing is wrong")
        checked = book.verify()
        assert checked.ok, checked.findings
        show(", ".join(f"{number} {name}" for name, number in checked.checked.items() if number))


if __name__ == "__main__":
    if sys.argv[1:2] == ["consume"]:
        consume(sys.argv[2])
    else:
        main()
