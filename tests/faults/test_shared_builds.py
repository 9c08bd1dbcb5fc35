"""Daemons share the building of views and the running of pipelines: who freezes or dies is replaced, and fenced."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession

import lakebook
from books import POSTGRESQL, Place
from extent import long
from lake import insert
from lakebook import Book, failpoints
from lakebook.registry.statements import Statement
from lakebook.registry.tables import TableRecord
from lakebook.registry.views import view_table
from spark.sessions import QUICK
from spark_hosts import hosted_spark
from streaming import produce
from table_facts import with_own_warehouse
from table_writers import Child, Line, joined, kill_all
from viewing import HOUR, MINUTE

#: Work passes on soon, and the turn only when it is given back. What the frozen one has written is not swept before.
SETTINGS: dict[str, Any] = {
    "publish": "off",
    "astha_lease": 60.0,
    "lease_seconds": 2.0,
    "insert_alive": 600.0,
    "worker_interval": 0.3,
    "lock_timeout": 10.0,
}
PATIENCE = 180.0
Gateway = tuple[int, str]


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with hosted_spark() as reached:
        yield reached


@pytest.fixture(params=[POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(request.param), tmp_path)


def quick(gateway: Gateway) -> SparkSession:
    """The session that is shared, for a few rows."""
    spark = joined(*gateway)
    for name, value in QUICK.items():
        if name.startswith("spark.sql."):
            spark.conf.set(name, value)
    return spark


def look_after(line: Line, target: str, settings: dict[str, Any], gateway: Gateway | None, freezes_at: str) -> None:
    """A daemon, with Spark or without; it tells whether it has the turn, and may stop at its first piece of work."""
    left = ["once"] if freezes_at else []

    def freeze() -> None:
        if left:
            left.pop()
            line.tell("freezing")
            os.kill(os.getpid(), signal.SIGSTOP)

    spark = None if gateway is None else quick(gateway)
    # Not where it would take the place of what the test has armed.
    freezing = failpoints.armed(freezes_at, freeze) if freezes_at else nullcontext()
    with freezing, lakebook.open(target, **settings) as book, book.running(spark=spark) as upkeep:
        said = None
        while not line.stopped():
            if upkeep.failure is not None:
                raise upkeep.failure
            if upkeep.active != said:
                said = upkeep.active
                line.tell("active" if said else "waiting")
            line.pause(0.05)
    line.tell("ended")


def look_after_once(line: Line, target: str, settings: dict[str, Any], gateway: Gateway) -> None:
    """One daemon alone: all there is to do, in one round."""
    with lakebook.open(target, **settings) as book:
        book.maintain(["pipelines", "views"], spark=quick(gateway))
    line.tell("ended")


class Work:
    """Something that daemons share."""

    #: Where one of them freezes, with something written and nothing entered, and where another dies.
    freezes_at: str
    dies_at: str
    #: Who looks into it, and what it is made of: by daemons together, and by one alone.
    component: str
    shared: tuple[str, ...]
    alone: tuple[str, ...]
    #: Pieces of each that come with each feeding; every one is one version of one table.
    pieces: int

    def __init__(self) -> None:
        self.fed = 0

    def make(self, book: Book, names: tuple[str, ...]) -> None:
        """Make what is to be done."""
        raise NotImplementedError

    def feed(self, book: Book) -> None:
        """Give all of it something to do."""
        raise NotImplementedError

    def is_done(self, book: Book, name: str) -> bool:
        """Whether nothing of it is left to do."""
        raise NotImplementedError

    def table_of(self, book: Book, name: str) -> TableRecord:
        """The table that is filled."""
        raise NotImplementedError

    def found(self, book: Book, name: str) -> Any:
        """What has come of it."""
        raise NotImplementedError

    def expected(self) -> Any:
        """What has to come of each."""
        raise NotImplementedError


class Views(Work):
    """A view with some hours to build."""

    freezes_at, dies_at = "view.built", "view.written"
    component, shared, alone = "views", ("together",), ("alone",)
    pieces = 4

    def __init__(self) -> None:
        super().__init__()
        self._begin = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - self.pieces * HOUR

    def make(self, book: Book, names: tuple[str, ...]) -> None:
        if not self.fed:
            book.tables.create("orders", "id BIGINT, ts TIMESTAMP")
            self.feed(book)
        for name in names:
            book.views.create(
                name,
                "SELECT date_trunc('HOUR', ts) AS ts, count(*) AS orders, sum(id) AS ids FROM orders GROUP BY 1",
                event_time="ts",
                lookback=(self.pieces + 2) * 3600.0,
            )

    def feed(self, book: Book) -> None:
        times = [self._begin + number * HOUR + MINUTE for number in range(self.pieces)]
        rows = [{"id": self.fed * 100 + number, "ts": time} for number, time in enumerate(times)]
        insert(book.table("orders"), *rows)
        self.fed += 1

    def is_done(self, book: Book, name: str) -> bool:
        built = [item for item in book.views[name].list_partitions() if item.num_rows and item.stale_at is None]
        return len(built) == self.pieces

    def table_of(self, book: Book, name: str) -> TableRecord:
        record = book.views[name].record
        found = book._registry.read_with(lambda reader: view_table(reader, record, "global"))
        assert found is not None
        return found

    def found(self, book: Book, name: str) -> Any:
        view = book.views[name]
        ranges = [(item.begin, item.end) for item in view.list_partitions() if item.num_rows]
        return sorted(ranges), sorted(map(tuple, (row.values() for row in view.to_arrow().to_pylist())))

    def expected(self) -> Any:
        begins = [self._begin + number * HOUR for number in range(self.pieces)]
        ids = [sum(lot * 100 + number for lot in range(self.fed)) for number in range(self.pieces)]
        rows = [(begin, self.fed, total) for begin, total in zip(begins, ids, strict=True)]
        return [(begin, begin + HOUR) for begin in begins], rows


class Pipelines(Work):
    """Pipelines from one topic, each with some batches."""

    freezes_at, dies_at = "pipeline.written", "pipeline.written"
    component, shared, alone = "pipelines", ("first", "second"), ("alone",)
    pieces = 2
    RECORDS = 20

    def make(self, book: Book, names: tuple[str, ...]) -> None:
        if not self.fed:
            book.topics.create("orders", 1)
            self.feed(book)
        for name in names:
            book.tables.create(name, "id BIGINT NOT NULL")
            # A segment makes a batch.
            book.pipelines.create(
                name,
                into=name,
                topics="orders",
                decoder="json",
                schema="id BIGINT NOT NULL",
                batch_records=self.RECORDS,
                interval=0.1,
            )

    def feed(self, book: Book) -> None:
        for _ in range(self.pieces):
            first = book.metadata.list_partitions("orders")[0].high_watermark
            produce(book, "orders", 0, *(b'{"id":%d}' % number for number in range(first, first + self.RECORDS)))
        self.fed += 1

    def is_done(self, book: Book, name: str) -> bool:
        return book.pipelines[name].waits() == 0

    def table_of(self, book: Book, name: str) -> TableRecord:
        return book.table(name).record

    def found(self, book: Book, name: str) -> Any:
        return sorted(book.table(name).to_arrow()["id"].to_pylist())

    def expected(self) -> Any:
        return list(range(self.fed * self.pieces * self.RECORDS))


@long()
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [Views, Pipelines])
def test_daemons_that_wait_share_the_work_and_one_that_dies_or_freezes_is_replaced(
    place: Place, gateway: Gateway, kind: type[Work]
) -> None:
    book, work = place.open(**SETTINGS), kind()
    settings = {**place.settings, **SETTINGS}
    # One has the turn, and no Spark: whatever is built, those have built who wait.
    first = Child(look_after, place.target, settings, None, "")
    first.wait_for("active")
    frozen = Child(look_after, place.target, settings, gateway, work.freezes_at)
    frozen.wait_for("waiting")
    work.make(book, work.shared)
    frozen.wait_for("freezing")
    frozen.wait_until_frozen()
    # The next one takes over what has been silent for too long, and dies in the middle of its second piece.
    mortal = Child(look_after, place.target, settings, gateway, "", points=f"{work.dies_at}=kill@2")
    wait_until(lambda: not mortal.is_alive())
    assert mortal.end() == -signal.SIGKILL
    last = Child(look_after, place.target, settings, gateway, "")
    wait_until(lambda: is_done(book, work))
    # Each piece was entered once, whoever began it; and what the frozen one wrote cannot be entered any more.
    assert versions_of(book, work) == dict.fromkeys(work.shared, work.pieces)
    assert (frozen.pid, "open") in attempts_of(book)
    frozen.wake()
    wait_until(lambda: (frozen.pid, "open") not in attempts_of(book))
    assert versions_of(book, work) == dict.fromkeys(work.shared, work.pieces)
    # The turn passes on; work goes on meanwhile.
    first.stop()
    work.feed(book)
    first.wait_for("ended")
    assert first.end() == 0
    wait_until(lambda: is_done(book, work))
    assert versions_of(book, work) == dict.fromkeys(work.shared, 2 * work.pieces)
    wait_until(lambda: has_told(frozen, "active") or has_told(last, "active"))
    for child in (frozen, last):
        child.stop()
        child.wait_for("ended")
    assert (frozen.end(), last.end()) == (0, 0)
    # To lose a piece to another is no failure.
    assert failures_of(book, work) == []
    work.make(book, work.alone)
    alone = Child(look_after_once, place.target, settings, gateway)
    alone.wait_for("ended")
    assert alone.end() == 0
    for name in (*work.shared, *work.alone):
        assert work.found(book, name) == work.expected(), name
    checked = book.verify()
    assert checked.ok, checked.findings


def wait_until(what: Callable[[], bool]) -> None:
    """Wait until something is the case, and leave the machine to those who bring it about."""
    never, late = threading.Event(), monotonic() + PATIENCE
    while not what():
        assert monotonic() < late, "it does not come about"
        never.wait(0.05)


def has_told(child: Child, kind: str) -> bool:
    """Whether it has said so since it was last listened to."""
    heard: list[Any] = []
    while child.connection.poll():
        heard += child.hear()[:1]
    return kind in heard


def is_done(book: Book, work: Work) -> bool:
    return all(work.is_done(book, name) for name in work.shared)


def versions_of(book: Book, work: Work) -> dict[str, int]:
    """How often each table was changed."""
    return {name: work.table_of(book, name).version for name in work.shared}


ATTEMPTS = Statement(sa.text("SELECT DISTINCT owner, state FROM commits WHERE kind = 'insert'"))


def attempts_of(book: Book) -> set[tuple[int, str]]:
    """What became of what each process has begun."""
    return {(int(owner.rpartition(":")[2]), str(state)) for owner, state in book._registry.all(ATTEMPTS)}


def failures_of(book: Book, work: Work) -> list[Any]:
    """What daemons have written down as failed."""
    return [item for item in book.maintenance_history(component=work.component, limit=1000) if item.outcome != "done"]
