"""Two daemons share one PostgreSQL: one works, and when it is frozen the other goes on; nothing is harmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import lakebook
from astha_subscribers import until
from books import POSTGRESQL, Place
from compacting import by_arrow
from lakebook import Book
from lakebook.errors import LakebookError
from lakebook.registry.statements import Statement
from table_facts import with_own_warehouse
from table_writers import Child, Line, freeze_at, kill_all
from upkeep_processes import IMPATIENT, KEPT, SCHEMA, check_runs, rows_of

#: A transaction of one that is frozen is ended soon, and a turn passes on soon.
SETTINGS: dict[str, Any] = {
    **IMPATIENT,
    "publish": "off",
    "astha_lease": 1.0,
    "transaction_silence": 1.0,
    "lock_timeout": 5.0,
    "insert_alive": 1.0,
    "lease_seconds": 1.0,
}
BATCHES = 6
PATIENCE = 90.0


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture
def place(make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(POSTGRESQL), tmp_path)


def look_after(line: Line, target: str, settings: dict[str, Any]) -> None:
    """All components, as a daemon runs them; it tells whenever it gains or loses the turn."""
    with lakebook.open(target, **settings) as book, book.running(spark=None) as upkeep:
        said = None
        while not line.stopped():
            if upkeep.astha.failure is not None:
                raise upkeep.astha.failure
            if upkeep.active != said:
                said = upkeep.active
                line.tell("active" if said else "waiting")
            line.pause(0.05)


class Daemon:
    """A process that looks after the tables, or waits for its turn to."""

    def __init__(self, place: Place) -> None:
        self.child = Child(look_after, place.target, {**place.settings, **SETTINGS})
        self._role = ""

    def is_(self, role: str) -> bool:
        """Whether that is what it said last. On a busy machine a turn may also pass on without anybody's doing."""
        while self.child.connection.poll():
            (self._role,) = self.child.hear()
        return self._role == role

    def wait_until(self, role: str) -> None:
        until(lambda: self.is_(role), PATIENCE)

    def stop(self) -> None:
        self.child.stop()
        assert self.child.end() == 0


def is_published(book: Book) -> bool:
    description = book.table(KEPT).describe()
    return bool(description.published_version == description.version)


def insert(book: Book, first: int) -> int:
    for number in range(first, first + BATCHES):
        book.table(KEPT).insert_arrow(rows_of(1, number, number + 1))
    return first + BATCHES


def test_a_daemon_that_is_frozen_is_replaced_and_does_no_harm_when_it_wakes(place: Place) -> None:
    book = place.open(**SETTINGS)
    book.tables.create(KEPT, SCHEMA, partition_by=["writer"])
    first, second = Daemon(place), Daemon(place)
    rows = 0
    for _ in range(2):
        rows = insert(book, rows)
        until(lambda: first.is_("active") or second.is_("active"), PATIENCE)
        frozen, other = (first, second) if first.is_("active") else (second, first)
        # Wherever it is: publishing, expiring, deleting.
        frozen.child.freeze()
        frozen.child.wait_until_frozen()
        rows = insert(book, rows)
        other.wait_until("active")
        until(lambda: is_published(book), PATIENCE)
        frozen.child.wake()
        frozen.wait_until("waiting")
        rows = insert(book, rows)
        until(lambda: is_published(book), PATIENCE)
    first.stop()
    second.stop()
    assert check_runs(book.table(KEPT).to_arrow()) == {1: range(rows)}
    checked = book.verify()
    assert checked.ok, checked.findings


def compact_and_freeze(line: Line, target: str, settings: dict[str, Any]) -> None:
    """Compact, but stop when everything is written and nothing is committed."""
    with lakebook.open(target, **settings) as book, freeze_at(line, "compact.written"):
        try:
            by_arrow(book, book.table(KEPT))
        except LakebookError as error:
            line.tell("refused", type(error).__name__)
        else:
            line.tell("compacted")


def test_of_two_workers_the_frozen_one_loses_its_compaction_and_nothing_else(place: Place) -> None:
    book = place.open(**SETTINGS)
    book.tables.create(KEPT, SCHEMA, partition_by=["writer"])
    rows = insert(book, 0)
    frozen = Child(compact_and_freeze, place.target, {**place.settings, **SETTINGS})
    frozen.wait_for("freezing")
    frozen.wait_until_frozen()
    # Its work is taken over: what it wrote is swept, and another compacts the same files.
    daemon = Daemon(place)
    daemon.wait_until("active")
    assert by_arrow(book, book.table(KEPT)) is not None
    until(lambda: _attempts(book) == 0, PATIENCE)
    frozen.wake()
    assert frozen.wait_for("refused")[1] in ("CommitAborted", "FilesChanged", "LeaseLost", "InsertFailed")
    assert frozen.end() == 0
    rows = insert(book, rows)
    until(lambda: is_published(book), PATIENCE)
    daemon.stop()
    assert check_runs(book.table(KEPT).to_arrow()) == {1: range(rows)}
    checked = book.verify()
    assert checked.ok, checked.findings


OPEN = Statement(sa.text("SELECT count(*) FROM commits WHERE state = 'open' AND kind = 'compaction'"))


def _attempts(book: Book) -> int:
    """Compactions that nobody has finished."""
    row = book._registry.one(OPEN)
    assert row is not None
    return int(row[0])
