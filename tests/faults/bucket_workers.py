"""Who uses a book whose bucket fails: in the process of the test, or several in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import lakebook
from compacting import by_arrow
from lakebook import Book
from lakebook.components.janitor import Janitor
from lakebook.errors import LakebookError
from lakebook.storage import s3
from table_writers import ROWS, SCHEMA, TABLE, Line, rows_of

TOPIC, OTHER = "clicks", "fleeting"
#: So that files of a few rows go in parts.
PART = 800
FIRST_PAUSE = 0.01


class Worker:
    """Uses a book in every way, and remembers what it was told."""

    def __init__(self, book: Book, first: int = 0) -> None:
        self._book = book
        self._number = first
        #: Batches of rows, and values of records.
        self.tried: set[int] = set()
        self.batches: set[int] = set()
        self.sent: set[str] = set()
        self.records: set[str] = set()
        self.failed = 0

    def next(self) -> int:
        self._number += 1
        return self._number

    def insert(self) -> None:
        batch = self.next()
        self.tried.add(batch)
        self._book.table(TABLE).insert_arrow(rows_of(batch))
        self.batches.add(batch)

    def append(self) -> None:
        batch = self.next()
        self.tried.add(batch)
        with self._book.table(TABLE).appender() as appender:
            for number in range(ROWS):
                appender.append({"batch": batch, "number": number})
        self.batches.add(batch)

    def compact(self) -> None:
        by_arrow(self._book, self._book.table(TABLE))

    def publish(self) -> None:
        self._book.table(TABLE).publish()

    def read(self) -> None:
        found = self._book.table(TABLE).to_arrow()
        assert found.num_rows % ROWS == 0
        assert self.batches <= set(found["batch"].to_pylist())

    def produce(self) -> None:
        values = [f"record {self.next()}" for _ in range(3)]
        self.sent |= set(values)
        # What cannot be stored in time fails; each is asked for its own outcome.
        with suppress(LakebookError), self._book.producer(TOPIC, timeout=3.0) as producer:
            sent = [(value, producer.send(value)) for value in values]
            with suppress(LakebookError):
                producer.flush()
            for value, one in sent:
                one.result(60)
                self.records.add(value)

    def consume(self) -> None:
        with self._book.consumer(TOPIC, group="billing", auto_commit=False) as consumer:
            found = {record.value.decode() for record in consumer.poll(timeout=0.2) if record.value is not None}
            assert found <= self.sent
            consumer.commit()

    def merge(self) -> None:
        Janitor(self._book.lake).run_once("merging")

    def clean(self) -> None:
        self._book.maintain(["janitor"], spark=None)

    def drop(self) -> None:
        with suppress(LakebookError):
            table = self._book.tables.create(OTHER, SCHEMA)
            table.insert_arrow(rows_of(1))
            table.publish()
        self._book.tables.drop(OTHER)

    def step(self, act: Callable[[], None]) -> bool:
        """Do something that may fail, but only in a way that callers know; whether it went well."""
        try:
            act()
        except LakebookError:
            self.failed += 1
            return False
        return True


def work_until_stopped(line: Line, target: str, settings: dict[str, Any], first: int, acts: Sequence[str]) -> None:
    """Do these in turn, again and again; then tell what was tried, what is there, what failed, and what went well."""
    s3.PART, s3._FIRST_PAUSE = PART, FIRST_PAUSE
    with lakebook.open(target, **settings) as book:
        worker = Worker(book, first)
        line.tell("ready")
        done = 0
        while not line.stopped():
            for act in acts:
                done += worker.step(getattr(worker, act))
        line.tell("worked", worker.tried, worker.batches, worker.failed, done)
