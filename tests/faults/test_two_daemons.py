"""Daemons that share one PostgreSQL: one has the turn, all of them compact; who is frozen or killed harms nothing."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import sqlalchemy as sa

import lakebook
from astha_subscribers import until
from books import POSTGRESQL, Place
from compacting import by_arrow
from extent import long
from lakebook import Book, failpoints
from lakebook.errors import LakebookError
from lakebook.lake.compaction import debt_of
from lakebook.registry.statements import Statement
from leftovers import check_that_nothing_is_left
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
def place(make_place: Callable[..., Place], with_warehouse: Callable[[Place], Place]) -> Place:
    return with_warehouse(make_place(POSTGRESQL))


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
    check_that_nothing_is_left(place)
    assert check_runs(book.table(KEPT).to_arrow()) == {1: range(rows)}


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
    # Its work is taken over: what it wrote is swept, and another compacts the same files when its claim has run out.
    daemon = Daemon(place)
    daemon.wait_until("active")
    until(lambda: not any(item.alive for item in book.overview().compactions), PATIENCE)
    assert by_arrow(book, book.table(KEPT)) is not None
    until(lambda: _attempts(book) == 0, PATIENCE)
    frozen.wake()
    assert frozen.wait_for("refused")[1] in ("CommitAborted", "ClaimLost", "LeaseLost", "InsertFailed")
    assert frozen.end() == 0
    rows = insert(book, rows)
    until(lambda: is_published(book), PATIENCE)
    daemon.stop()
    check_that_nothing_is_left(place)
    assert check_runs(book.table(KEPT).to_arrow()) == {1: range(rows)}


OPEN = Statement(sa.text("SELECT count(*) FROM commits WHERE state = 'open' AND kind = 'compaction'"))


def _attempts(book: Book) -> int:
    """Compactions that nobody has finished."""
    row = book._registry.one(OPEN)
    assert row is not None
    return int(row[0])


# --- workers that wait for the turn --------------------------------------------

TABLES = [f"shared_{number}" for number in range(3)]
#: Two Sparks start in it, on a machine that may have other things to do.
SPARK_PATIENCE = 300.0
#: A claim does not run out on a busy machine while its holder is at work.
SHARING: dict[str, Any] = {
    **SETTINGS,
    "astha_lease": 30.0,
    "lease_seconds": 10.0,
    "compact_delay": 0.0,
    "worker_interval": 0.5,
}


def work_while_waiting(line: Line, target: str, settings: dict[str, Any], freezes: bool) -> None:
    """A daemon with Spark that never has the turn; it may stop when its first compaction is written."""
    left = ["once"] if freezes else []

    def freeze() -> None:
        if left:
            left.pop()
            line.tell("freezing")
            os.kill(os.getpid(), signal.SIGSTOP)

    # Not where it would take the place of what the test has armed.
    freezing = failpoints.armed("compact.written", freeze) if freezes else nullcontext()
    with (
        freezing,
        lakebook.open(target, **settings) as book,
        book.running(spark="local[1]", components=("compactor",)) as upkeep,
    ):
        while not line.stopped():
            assert not upkeep.active
            line.pause(0.05)
    line.tell("ended")


def files_of(book: Book, name: str) -> int:
    return len(book.table(name).plan().files)


def has_no_debt(book: Book) -> bool:
    return not any(debt_of(book.lake, book.table(name).record) for name in TABLES)


def feed(book: Book, rows: int) -> int:
    for name in TABLES:
        for number in range(rows, rows + BATCHES):
            book.table(name).insert_arrow(rows_of(1, number, number + 1))
    return rows + BATCHES


@long()
@pytest.mark.timeout(600)
def test_daemons_that_wait_share_the_compactions_and_one_that_dies_or_freezes_is_replaced(place: Place) -> None:
    book = place.open(**SHARING)
    for name in TABLES:
        book.tables.create(name, SCHEMA)
    settings = {**place.settings, **SHARING}
    with book.running(spark=None, components=("iceberg_updater",)) as upkeep:
        assert upkeep.wait_active(SPARK_PATIENCE)
        rows = feed(book, 0)
        frozen = Child(work_while_waiting, place.target, settings, True)
        frozen.wait_for("freezing")
        frozen.wait_until_frozen()
        (held,) = book.overview().compactions
        assert held.alive
        # Another does the rest at once, and that table when its holder has been silent for long enough. With the
        # first that it writes thereafter, it dies.
        dies = f"compact.written=kill@{len(TABLES) + 1}"
        mortal = Child(work_while_waiting, place.target, settings, False, points=dies)
        until(lambda: all(files_of(book, name) == 1 for name in TABLES), SPARK_PATIENCE)
        assert versions_of(book) == dict.fromkeys(TABLES, 1)
        frozen.wake()
        until(lambda: outcomes_of(book)["yielded"] == 1, SPARK_PATIENCE)
        assert "ClaimLost" in refusal_of(book)
        # Both are at work now, until one dies in the middle of it; the other brings everything to its end.
        while mortal.is_alive():
            rows = feed(book, rows)
            until(lambda: not mortal.is_alive() or has_no_debt(book), SPARK_PATIENCE)
        assert mortal.end() == -signal.SIGKILL
        until(lambda: has_no_debt(book), SPARK_PATIENCE)
        until(lambda: book.overview().compactions == (), SPARK_PATIENCE)
        frozen.stop()
        frozen.wait_for("ended")
        assert frozen.end() == 0
        assert upkeep.active
    # Each compaction that was begun has landed, but for those of the frozen one and of the dead one: none was in vain.
    landed = sum(versions_of(book).values())
    assert attempts_of(book) == {"committed": landed, "aborted": 1, "open": 1}
    assert outcomes_of(book) == {"done": landed, "yielded": 1}
    check_that_nothing_is_left(place)
    for name in TABLES:
        assert check_runs(book.table(name).to_arrow()) == {1: range(rows)}


ATTEMPTS = Statement(sa.text("SELECT state, count(*) FROM commits WHERE kind = 'compaction' GROUP BY state"))


def attempts_of(book: Book) -> dict[str, int]:
    """How many compactions were begun, by what became of them."""
    return {str(state): int(number) for state, number in book._registry.all(ATTEMPTS)}


def versions_of(book: Book) -> dict[str, int]:
    """How often each table was rewritten."""
    return {name: sum(item.operation == "replace" for item in book.table(name).history(limit=1000)) for name in TABLES}


def outcomes_of(book: Book) -> Counter[str]:
    """What the compactors have written down."""
    return Counter(item.outcome for item in book.maintenance_history(component="compactor", limit=1000))


def refusal_of(book: Book) -> str:
    (entry,) = [item for item in book.maintenance_history(component="compactor", limit=1000) if item.outcome != "done"]
    return str(entry.detail["error"])
