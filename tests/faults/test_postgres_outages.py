"""PostgreSQL dies and comes back under eight writers, and lines are cut at COMMIT: nothing is lost, nothing twice."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil  # type: ignore[import-untyped]
import psycopg
import pytest

from astha_subscribers import TOPIC as DELIVERED
from astha_subscribers import Recorder, append, until
from books import POSTGRESQL, Place, Postgres, describe
from buckets import BUCKET, FOLDER
from extent import long
from facts import check_acknowledged
from lakebook import Book, Cursor, Event
from lakebook.cdc.capture import Capture, Router
from lakebook.errors import CommitAborted, RegistryUnavailable
from outage_writers import write_through_outages
from table_facts import batches_of, check_that_only_what_counts_is_left
from table_writers import ROWS, TABLE, Child, create_table, kill_all, rows_of
from test_many_processes import check_order
from wires import AFTER, BEFORE, Cutter
from writers import PARTITIONS, TOPIC

WRITERS = 8
OUTAGES = int(os.environ.get("LAKEBOOK_TEST_OUTAGES", "3"))
STEPS = int(os.environ.get("LAKEBOOK_TEST_STEPS", "25"))
#: A server that is killed is back before anybody gives up.
PATIENT = {"outage_seconds": 60.0, "retry_seconds": 60.0, "lock_timeout": 30.0}


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Mortal(Postgres):
    """A server of its own that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        #: Where its socket is.
        self.folder = Path(parse_qs(urlsplit(self.url("postgres")).query)["host"][0])
        # What it has acknowledged must survive its death; the machine's own is not tried.
        self.set("synchronous_commit", "on")
        # What nobody waits for, such as what is rolled back, is not saved by chance.
        self.set("wal_writer_delay", "10s")

    def set(self, setting: str, value: str) -> None:
        """Change a setting of the server."""
        self._admin.execute(f"ALTER SYSTEM SET {setting} = '{value}'")
        self._admin.execute("SELECT pg_reload_conf()")

    def kill(self, how: signal.Signals) -> None:
        """End it as a crash does: with its sessions at once, or alone, which they then notice."""
        pid = self._server.get_pid()
        assert pid is not None
        everybody = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        os.kill(pid, how)
        until(lambda: not any(_lives(each) for each in everybody))
        # Nobody takes one that nobody has buried yet for alive.
        for lock in (self._server.pgdata / "postmaster.pid", self.folder / ".s.PGSQL.5432.lock"):
            lock.unlink(missing_ok=True)

    def start(self) -> None:
        """Let it recover."""
        self._server.ensure_postgres_running()

    def stop(self) -> None:
        with suppress(psycopg.Error):
            self._admin.close()
        self._server.cleanup()


@pytest.fixture
def mortal() -> Iterator[Mortal]:
    with tempfile.TemporaryDirectory(prefix="lb-") as folder:
        server = Mortal(Path(folder))
        yield server
        server.stop()


def new_book(place: Place) -> Book:
    book = place.open(**PATIENT)
    book.metadata.create_topic(TOPIC, PARTITIONS)
    create_table(book)
    return book


def kind_of(place: Place) -> str:
    """What a place has its warehouse in."""
    return f"with a {BUCKET if place.settings['warehouse'].startswith('s3://') else FOLDER}"


class Writers:
    """Several processes that write, and what they were told."""

    def __init__(self, target: str, settings: dict[str, Any], steps: int, number: int = WRITERS) -> None:
        self._lock = threading.Lock()
        self.facts: list[tuple[Any, ...]] = []
        self._failures: list[BaseException] = []
        self.children = [
            Child(write_through_outages, target, {**settings, **PATIENT}, seed, steps) for seed in range(1, number + 1)
        ]
        self._threads = [threading.Thread(target=self._hear, args=(child,), daemon=True) for child in self.children]
        self.written = [0] * number
        for thread in self._threads:
            thread.start()

    def _hear(self, child: Child) -> None:
        number = self.children.index(child)
        try:
            for fact in child.facts():
                with self._lock:
                    self.facts.append(fact)
                    self.written[number] += fact[0] in ("batch", "segment", "offset")
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self._failures.append(error)

    def wait_for_progress(self) -> None:
        """Return when all of them have written more."""
        before = list(self.written)
        until(
            lambda: self._failures or all(now > then for now, then in zip(self.written, before, strict=True)),
            patience=120,
        )
        assert not self._failures, self._failures[0]

    def stop(self) -> None:
        for child in self.children:
            with suppress(OSError):
                child.stop()

    def end(self) -> None:
        for thread in self._threads:
            thread.join(120)
        assert not self._failures, self._failures[0]
        assert [child.end() for child in self.children] == [0] * len(self.children)


def check_told(book: Book, facts: list[tuple[Any, ...]]) -> None:
    """What was acknowledged is there once, what was refused is not, and of the unknown either."""
    check_acknowledged(book, facts)
    unknown = {fact[1:3] for fact in facts if fact[0] == "unknown"}
    refused = {fact[1:3] for fact in facts if fact[0] == "refused"}
    batches = batches_of(book)
    told = [fact[1] for fact in facts if fact[0] == "batch"]
    assert set(told) <= batches
    assert batches <= set(told) | {batch for kind, batch in unknown if kind == "batch"}
    assert not {("batch", batch) for batch in batches} & refused
    assert book.table(TABLE).count() == len(batches) * ROWS
    segments = [segment.id for number in range(PARTITIONS) for segment in book.metadata.each_segment(TOPIC, number)]
    acknowledged = [fact[4] for fact in facts if fact[0] == "segment"]
    assert max(Counter([*segments, ""]).values()) == max(Counter([*acknowledged, ""]).values()) == 1
    assert set(acknowledged) <= set(segments) <= set(acknowledged) | {name for kind, name in unknown}
    assert not {("segment", name) for name in segments} & refused
    checked = book.verify()
    assert checked.ok, checked.findings


class Follower:
    """Reads events as they come, with a cursor that it keeps in memory; a server that is away is waited for."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._done = threading.Event()
        self.seen: list[Event] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        cursor = self._book.events.beginning()
        last = False
        while True:
            ending = self._done.is_set()
            try:
                batch = self._book.events.read(cursor, 100)
            except RegistryUnavailable:
                continue
            self.seen.extend(batch.events)
            cursor = batch.cursor
            if last and not batch.events and not batch.more:
                return
            last = ending

    def finish(self) -> list[Event]:
        self._done.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.seen


@long(FOLDER)
def test_nothing_is_lost_or_twice_though_the_server_is_killed_under_eight_writers(
    mortal: Mortal, with_warehouse: Callable[[Place], Place], soak: Callable[[str], None]
) -> None:
    place = with_warehouse(Place(POSTGRESQL, mortal.new_database(), {}))
    book = new_book(place)
    follower = Follower(book)
    writers = Writers(place.target, place.settings, 1_000_000)
    for outage in range(OUTAGES):
        writers.wait_for_progress()
        mortal.kill(signal.SIGQUIT if outage % 2 == 0 else signal.SIGKILL)
        mortal.start()
    writers.wait_for_progress()
    writers.stop()
    writers.end()
    check_order(book, follower.finish())
    check_told(book, writers.facts)
    check_that_only_what_counts_is_left(place)
    check_told(book, writers.facts)
    kinds = Counter(fact[0] for fact in writers.facts)
    place.close()
    soak(
        f"PostgreSQL killed {OUTAGES} times under {WRITERS} writers, {kind_of(place)}:"
        f" {kinds['batch'] + kinds['segment']:,} commits and {kinds['offset']:,} offsets acknowledged,"
        f" {kinds['refused']:,} refused, {kinds['unknown']:,} unknown; each was there once or not at all, as its writer"
        " was told, and nothing was left over"
    )


def use_up_ids(url: str) -> int:
    """Transactions that leave nothing behind; the last of their ids."""
    with psycopg.connect(url) as connection:
        for _ in range(300):
            row = connection.execute("SELECT CAST(pg_current_xact_id() AS text)").fetchone()
            connection.rollback()
    assert row is not None
    return int(row[0])


def next_id(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT CAST(pg_snapshot_xmax(pg_current_snapshot()) AS text)").fetchone()
    assert row is not None
    return int(row[0])


def read_all(book: Book, cursor: Cursor, limit: int = 1000) -> tuple[list[Event], Cursor]:
    found: list[Event] = []
    while True:
        batch = book.events.read(cursor, limit)
        found.extend(batch.events)
        cursor = batch.cursor
        if not batch.more:
            return found, cursor


def test_no_cursor_skips_what_is_committed_with_an_id_that_was_given_out_before_a_crash(mortal: Mortal) -> None:
    place = Place(POSTGRESQL, mortal.new_database(), {"warehouse": mortal.warehouse})
    book = place.open(**PATIENT)
    nothing_yet = book.events.now()
    book.metadata.create_topic(DELIVERED, 4)
    append(book, number=5)
    capture = Capture(book.events, Router([Recorder()]))
    end = book.events.now()
    before = read_all(book, book.events.beginning())[0]
    used = use_up_ids(place.target)
    # Whoever looks now has seen them end: at the end, behind nothing new, in the middle of pages, for others.
    page = book.events.read(book.events.beginning(), 2)
    assert page.more
    cursors = {
        "the end": book.events.now(),
        "nothing new": book.events.read(end).cursor,
        "everything": read_all(book, book.events.beginning())[1],
        "in pages": page.cursor,
        "from outside": Cursor.parse(str(book.events.now())),
        "shared": capture.read(end).cursor,
    }
    mortal.kill(signal.SIGQUIT)
    mortal.start()
    assert next_id(place.target) < used
    for _ in range(10):
        append(book)
    assert next_id(place.target) < used
    everything = {event.id for event in read_all(book, book.events.beginning())[0]}
    old = {event.id for event in before}
    new = everything - old
    assert len(new) == 20
    for name, cursor in cursors.items():
        found = [event.id for event in read_all(book, cursor, 7)[0]]
        rest = old - {event.id for event in page.events} if name == "in pages" else set()
        assert sorted(found) == sorted(new | rest), name
    assert capture.read(end).number == 20
    assert {event.id for event in read_all(book, nothing_yet)[0]} == everything
    place.close()


@long(FOLDER)
def test_nothing_is_lost_or_twice_though_lines_are_cut_at_commit(
    make_place: Callable[..., Place], with_warehouse: Callable[[Place], Place], soak: Callable[[str], None]
) -> None:
    place = with_warehouse(make_place(POSTGRESQL))
    book = new_book(place)
    cutter = Cutter(place.target, chance=0.1)
    try:
        writers = Writers(cutter.url(), place.settings, STEPS)
        writers.end()
    finally:
        cutter.close()
    assert min(cutter.cuts.values()) > 0
    check_told(book, writers.facts)
    assert not [fact for fact in writers.facts if fact[0] == "unknown"]
    check_that_only_what_counts_is_left(place)
    check_told(book, writers.facts)
    soak(
        f"lines cut at COMMIT under {WRITERS} writers, {kind_of(place)}: {cutter.cuts[BEFORE]:,} before the server had"
        f" it, {cutter.cuts[AFTER]:,} before the client had its answer; nothing lost, nothing twice, nothing left over"
    )


#: What is done while a COMMIT is cut, and how often it is there then.
ACTS: dict[str, tuple[Callable[[Book], object], Callable[[Book], int]]] = {
    "a topic": (
        lambda book: book.metadata.create_topic("new"),
        lambda book: len(list(book.metadata.list_topics())) - 1,
    ),
    "a segment": (
        lambda book: book.metadata.add_segment(describe(TOPIC)),
        lambda book: len(list(book.metadata.each_segment(TOPIC, 0))),
    ),
    "an offset": (
        lambda book: book.metadata.commit_offset("g", TOPIC, 0, 0),
        lambda book: 1 if book.metadata.get_committed_offset("g", TOPIC, 0) == 0 else 0,
    ),
    "a table": (
        lambda book: book.tables.create("new", "number BIGINT"),
        lambda book: len(list(book.tables.list())) - 1,
    ),
    "an insert": (
        lambda book: book.table(TABLE).insert_arrow(rows_of(1)),
        lambda book: book.table(TABLE).count() // ROWS,
    ),
}


# Inserts alone write into the warehouse.
CASES = [
    (act, when, kind)
    for act in ACTS
    for when in (BEFORE, AFTER)
    for kind in ((FOLDER, BUCKET) if act == "an insert" else (FOLDER,))
]


@pytest.mark.parametrize(("act", "when", "with_warehouse"), CASES, indirect=["with_warehouse"])
def test_what_is_cut_at_any_of_its_commits_is_done_once_or_refused(
    make_place: Callable[..., Place], with_warehouse: Callable[[Place], Place], act: str, when: str
) -> None:
    do, count = ACTS[act]
    for skipped in range(3):
        place = with_warehouse(make_place(POSTGRESQL))
        new_book(place)
        cutter = Cutter(place.target)
        through = Place(POSTGRESQL, cutter.url(), place.settings)
        try:
            book = through.open()
            cutter.cut_next(when, skipped)
            done = 1
            try:
                do(book)
            except CommitAborted:
                # Its files were for that commit alone: they are gone, and it can be repeated.
                assert (act, when) == ("an insert", BEFORE)
                done = 0
            was_cut = cutter.cuts[when]
            cutter.spare()
            assert count(book) == done
            checked = book.verify()
            assert checked.ok, checked.findings
            check_that_only_what_counts_is_left(place)
            assert count(book) == done
        finally:
            through.close()
            cutter.close()
        if not was_cut:
            break  # It has no more of them.
