"""Processes that deliver events are killed, frozen and cut off; every event comes, in order, and none is skipped."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from astha_subscribers import (
    NAMES,
    PATIENCE,
    POINTS,
    TABLES,
    TOPIC,
    Fact,
    Recorder,
    all_events,
    append,
    deliver_until_stopped,
    delivering,
    facts_in,
    sequences_of,
    until,
    write_events,
)
from books import POSTGRESQL, SQLITE, Place, Postgres
from extent import long
from lakebook import Book, failpoints
from lakebook.registry.databases import sqlite_driver
from lakebook.registry.deliveries import SchedulerState, events_behind, load_progress, scheduler_state
from lakebook.registry.transactions import Reader
from table_writers import Child, kill_all

KILLS = max(4, int(os.environ.get("LAKEBOOK_TEST_KILLS", "20")) // 4)
PROCESSES = 8
EVENTS = 10_000
PARTITIONS = 12
LEASE = 0.5
#: A killed one is taken over when its beat has stood still for a lease, on a busy machine somewhat later.
TAKEN_OVER = 20 * LEASE
SETTINGS = {"astha_lease": LEASE, "delivery_pause": 0.05, "lock_timeout": 60.0, "transaction_silence": 2.0}


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place]) -> Place:
    return make_place(request.param)


@pytest.fixture
def book(place: Place) -> Book:
    return new_book(place)


def new_book(place: Place) -> Book:
    """A book with a topic, whose subscribers have taken everything so far."""
    book = place.open(**SETTINGS)
    book.metadata.create_topic(TOPIC, PARTITIONS)
    for name in NAMES:
        book.events.save_cursor(name, book.events.now())
    return book


class Daemon:
    """A process that delivers events, as its test sees it."""

    def __init__(self, place: Place, file: Path, run: str, points: str = "", **settings: Any) -> None:
        given = {**place.settings, **SETTINGS, **settings}
        self.child = Child(deliver_until_stopped, place.target, given, str(file), run, points=points)
        self.role = ""
        self.child.wait_for("ready")

    def listen(self) -> str:
        """What it is by what it has told so far."""
        while self.child.connection.poll():
            kind, *rest = self.child.hear()
            if kind == "role":
                self.role = rest[0]
        return self.role

    def wait_for(self, role: str, patience: float = PATIENCE) -> None:
        until(lambda: self.listen() == role, patience)

    def stop(self) -> None:
        """End it as one should; what it tells at last."""
        self.child.stop()
        assert self.child.wait_for("stopped") == ("stopped", "None")
        assert self.child.end() == 0

    def kill(self) -> None:
        """End it at once."""
        self.child.kill()
        assert self.child.end() == -signal.SIGKILL


def caught_up(book: Book) -> bool:
    """Whether it is written down that everyone has taken everything."""

    def look(reader: Reader) -> bool:
        for name in NAMES:
            cursor, lanes = load_progress(reader, name)
            if cursor is None or lanes or events_behind(reader, cursor):
                return False
        return True

    return book._registry.read_with(look)


def state_of(book: Book) -> SchedulerState:
    found = book._registry.read_with(scheduler_state)
    assert found is not None
    return found


def expected_of(book: Book) -> dict[int, list[int]]:
    """The sequences that everyone is to be told of, by object: the creation of the topic came before."""
    return sequences_of(
        event for event in all_events(book, TABLES) if event.operation != "insert" or event.table != "partitions"
    )


def check_told(book: Book, file: Path, *, fresh: bool = True) -> dict[str, int]:
    """What was told is complete and in order, nothing is skipped, and within a run nothing comes twice."""
    facts = facts_in(file)
    assert not fresh or {fact.kind for fact in facts} <= {"event"}
    expected = expected_of(book)
    for name in NAMES:
        _check_subscriber([fact for fact in facts if fact.subscriber == name and fact.kind == "event"], expected)
    runs = len({fact.run for fact in facts})
    return {"events": sum(map(len, expected.values())), "told": len(facts), "runs": runs}


def _check_subscriber(facts: list[Fact], expected: Mapping[int, list[int]]) -> None:
    places = {number: {sequence: at for at, sequence in enumerate(found)} for number, found in expected.items()}
    reached: dict[int, int] = defaultdict(lambda: -1)
    last: dict[tuple[str, int], int] = {}
    for fact in facts:
        at = places[fact.object_id][fact.sequence]
        # A new run may begin earlier, but nothing is left out.
        assert at <= reached[fact.object_id] + 1, fact
        reached[fact.object_id] = max(reached[fact.object_id], at)
        # Within a run each comes right after the one before it: in order, and once.
        before = last.get((fact.run, fact.object_id))
        assert before is None or at == before + 1, fact
        last[fact.run, fact.object_id] = at
    assert {number: at + 1 for number, at in reached.items()} == {
        number: len(found) for number, found in expected.items()
    }


# --- one at a time -----------------------------------------------------------------


@long(SQLITE)
def test_when_the_one_that_delivers_is_killed_another_takes_over(place: Place, book: Book, tmp_path: Path) -> None:
    file = tmp_path / "told"
    first = Daemon(place, file, "first")
    first.wait_for("active")
    second = Daemon(place, file, "second")
    for number in range(30):
        append(book, number % 3)
    assert (first.listen(), second.listen()) == ("active", "standby")
    first.kill()
    append(book, 0, 5)
    second.wait_for("active", TAKEN_OVER)
    assert state_of(book).token == 2
    until(lambda: caught_up(book))
    second.stop()
    assert check_told(book, file)["runs"] == 2


def test_one_that_was_frozen_is_taken_over_and_does_no_harm_when_it_is_woken(
    place: Place, book: Book, tmp_path: Path
) -> None:
    file = tmp_path / "told"
    first = Daemon(place, file, "first")
    first.wait_for("active")
    second = Daemon(place, file, "second")
    for turn in range(3):
        active, waiting = (first, second) if turn % 2 == 0 else (second, first)
        for number in range(20):
            append(book, number % 5, 3)
        # Wherever it is, also in the middle of a call or a transaction.
        active.child.freeze()
        active.child.wait_until_frozen()
        if place.kind == SQLITE:
            let_go_of_the_file(active, book)
        # Where it was frozen within a statement, the other waits for the lock and tries again.
        waiting.wait_for("active", 120.0)
        append(book, turn, 10)
        until(lambda: caught_up(book))
        active.child.wake()
        active.wait_for("standby", 120.0)
        append(book, turn)
        until(lambda: caught_up(book))
        assert waiting.listen() == "active"
    first.stop()
    second.stop()
    check_told(book, file)


def let_go_of_the_file(frozen: Daemon, book: Book) -> None:
    """On SQLite one that is frozen in the middle of a write holds up everybody: let it finish that."""
    connection = sqlite_driver().connect(book.settings.registry.removeprefix("sqlite:///"), timeout=0.05)
    try:
        for _ in range(1000):
            try:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
            except sqlite_driver().OperationalError:
                frozen.child.wake()
                frozen.child.freeze()
                frozen.child.wait_until_frozen()
            else:
                return
    finally:
        connection.close()
    raise AssertionError("it never lets go")


def test_a_clean_stop_gives_the_turn_back_at_once(place: Place, book: Book, tmp_path: Path) -> None:
    file = tmp_path / "told"
    first = Daemon(place, file, "first", astha_lease=30.0)
    first.wait_for("active")
    second = Daemon(place, file, "second", astha_lease=30.0)
    append(book, 0, 5)
    first.stop()
    assert state_of(book).holder is None
    append(book, 0, 5)
    # Long before it could have taken the first for dead.
    second.wait_for("active", 20)
    until(lambda: caught_up(book))
    second.stop()
    found = check_told(book, file)
    # Nothing came twice.
    assert found["told"] == 2 * found["events"]


@long(SQLITE)
def test_a_clock_that_jumps_takes_the_turn_from_nobody_and_loses_nothing(
    place: Place, book: Book, tmp_path: Path
) -> None:
    file = tmp_path / "told"
    first = Daemon(place, file, "first")
    first.wait_for("active")
    second = Daemon(place, file, "second")
    second.wait_for("standby")
    hour = 3_600_000
    for daemon, jump in ((first, hour), (second, hour), (first, -3 * hour), (second, -3 * hour), (first, 2 * hour)):
        daemon.child.connection.send(jump)
        beat = state_of(book).beat
        append(book, 1, 3)
        # For more than a lease.
        until(lambda: state_of(book).beat > beat + 8)  # noqa: B023
        assert (first.listen(), second.listen()) == ("active", "standby")
    until(lambda: caught_up(book))
    assert state_of(book).token == 1
    first.stop()
    second.wait_for("active")
    second.stop()
    found = check_told(book, file)
    assert found["told"] == 2 * found["events"]


def test_restarted_cleanly_again_and_again_it_repeats_nothing(place: Place, book: Book, tmp_path: Path) -> None:
    file = tmp_path / "told"
    writer = Child(write_events, place.target, {**place.settings, **SETTINGS}, 3, 150)
    writer.wait_for("ready")
    for turn in range(4):
        daemon = Daemon(place, file, f"run {turn}")
        daemon.wait_for("active")
        daemon.stop()
    list(writer.facts())
    assert writer.end() == 0
    last = Daemon(place, file, "last")
    until(lambda: caught_up(book))
    last.stop()
    found = check_told(book, file)
    assert found["told"] == 2 * found["events"]


# --- killed ------------------------------------------------------------------------


def test_these_are_all_points_of_delivering() -> None:
    assert set(POINTS) == {point for point in failpoints.POINTS if point.startswith(("astha.", "delivery."))}


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_each_failpoint_it_goes_on_without_a_gap(
    place: Place, book: Book, tmp_path: Path, point: str
) -> None:
    file = tmp_path / "told"
    for turn, count in enumerate((1, 1) if point == "astha.claimed" else (1, 2, 5)):
        for number in range(10):
            append(book, number % 4, 2)
        daemon = Daemon(place, file, f"run {turn}", f"{point}=kill@{count}")
        # The rest of them comes while it delivers.
        with suppress(BrokenPipeError):
            append(book, 5, 5)
        list(daemon.child.facts())
        assert daemon.child.end() == -signal.SIGKILL
    last = Daemon(place, file, "last")
    until(lambda: caught_up(book))
    last.stop()
    check_told(book, file)


@long(POSTGRESQL)
def test_a_history_of_eight_writers_is_complete_and_in_order_though_whoever_delivers_it_is_killed(
    place: Place, book: Book, tmp_path: Path, soak: Callable[[str], None]
) -> None:
    chance = random.Random(KILLS)
    file = tmp_path / "told"
    # A transaction has ten segments and an event of the partition, more or less.
    commits = EVENTS // 10 // PROCESSES
    settings = {**place.settings, **SETTINGS}
    writers = [Child(write_events, place.target, settings, seed, commits) for seed in range(PROCESSES)]
    for writer in writers:
        writer.wait_for("ready")
    file.touch()
    for kill in range(KILLS):
        daemon = Daemon(place, file, f"run {kill}")
        # Somewhere among what it delivers next.
        written = file.stat().st_size + chance.randrange(1, 40 * EVENTS // KILLS)
        until(lambda: file.stat().st_size >= written or (caught_up(book) and not any_writes(writers)))  # noqa: B023
        daemon.kill()
    last = Daemon(place, file, "last")
    done = [sum(fact[0] == "committed" for fact in writer.facts()) for writer in writers]
    assert [writer.end() for writer in writers] == [0] * PROCESSES
    assert done == [commits] * PROCESSES
    until(lambda: caught_up(book))
    last.stop()
    found = check_told(book, file)
    assert found["events"] >= EVENTS
    assert book.verify().ok
    soak(
        f"{place.kind}: {PROCESSES} writers, {found['events']:,} events delivered to {len(NAMES)} subscribers"
        f" ({found['told']:,} times) by a process that was killed {KILLS} times; complete, in order, none skipped"
    )
    print(place.kind, found)  # noqa: T201 - counts are asked for


def any_writes(writers: list[Child]) -> bool:
    return any(writer._process.is_alive() for writer in writers)


# --- the database goes away --------------------------------------------------------


def test_sessions_that_the_server_ends_lose_nothing(make_place: Callable[..., Place], tmp_path: Path) -> None:
    place = make_place(POSTGRESQL)
    book = new_book(place)
    file = tmp_path / "told"
    daemon = Daemon(place, file, "first")
    daemon.wait_for("active")
    with psycopg.connect(place.target, autocommit=True) as admin:
        for turn in range(6):
            append(book, turn, 20)
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            append(book, turn, 20)
    until(lambda: caught_up(book))
    daemon.wait_for("active")
    daemon.stop()
    check_told(book, file)


def test_a_server_that_is_stopped_and_started_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    # A server of its own: nobody else's tests run on it.
    with tempfile.TemporaryDirectory(prefix="lb-") as folder:
        postgres = Postgres(Path(folder))
        place = Place(POSTGRESQL, postgres.new_database(), {"warehouse": postgres.warehouse})
        book = new_book(place)
        impatient = place.open(
            **{**SETTINGS, "retry_attempts": 3, "retry_seconds": 0.2, "outage_seconds": 0.0, "delivery_pause": 5.0}
        )
        recorder = Recorder(NAMES[0], TABLES)
        with delivering(impatient, recorder) as astha:
            append(book, 0, 5)
            assert astha.wait_idle(PATIENCE)
            postgres._server.stop()
            until(lambda: "cannot be written down now" in caplog.text)
            (delivery,) = astha._deliveries
            for _ in range(300):
                # Whoever wakes it does not make it ask more often.
                delivery.wake()
                until(lambda: delivery._inbox.empty())
            until(lambda: "cannot read events" in caplog.text)
            assert caplog.text.count("cannot read events") < 50
            postgres._server.start()
            until(lambda: can_append(book))
            assert astha.wait_idle(PATIENCE)
        assert recorder.sequences() == expected_of(book)
        assert recorder.refreshes == []
        place.close()
        with suppress(psycopg.Error):
            postgres.stop()


def can_append(book: Book) -> bool:
    try:
        append(book, 1, 5)
    except Exception:  # noqa: BLE001 - the server is not there yet
        return False
    return True


def test_a_registry_file_that_somebody_keeps_locked_is_waited_for(
    make_place: Callable[..., Place], caplog: pytest.LogCaptureFixture
) -> None:
    place = make_place(SQLITE)
    book = new_book(place)
    impatient = place.open(**{**SETTINGS, "lock_timeout": 0.02, "retry_attempts": 2})
    recorder = Recorder(NAMES[0], TABLES)
    other = sqlite_driver().connect(f"{place.target}/registry.db", isolation_level=None)
    with delivering(impatient, recorder) as astha:
        append(book, 0, 5)
        other.execute("BEGIN EXCLUSIVE")
        until(lambda: caplog.text.count("cannot be written down now") >= 5)
        # Reading goes on, so everything is delivered; it is only not written down.
        until(lambda: recorder.sequences() == expected_of(book))
        other.execute("ROLLBACK")
        append(book, 1, 5)
        assert astha.wait_idle(PATIENCE)
        until(lambda: events_left(book, NAMES[0]) == 0)
    other.close()
    assert recorder.sequences() == expected_of(book)
    assert [call for call in recorder.calls if len(call) == 0] == []


def events_left(book: Book, name: str) -> int:
    def look(reader: Reader) -> int:
        cursor, _ = load_progress(reader, name)
        assert cursor is not None
        return events_behind(reader, cursor)

    return book._registry.read_with(look)
