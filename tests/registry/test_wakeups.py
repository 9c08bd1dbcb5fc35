"""A commit wakes whoever waits for events, in the same process and in others; nothing depends on it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest

from astha_subscribers import PATIENCE, QUICK, TOPIC, Recorder, append, delivering, until, write_events
from books import MEMORY, POSTGRESQL, SQLITE, Place
from lakebook import Book
from lakebook.clock import SystemClock
from lakebook.registry.wakeups import ANNOUNCE_SECONDS, CHANNEL, Announcer, Waiter
from table_writers import Child, kill_all

#: Nobody looks by itself within a test.
NEVER = {**QUICK, "event_poll": 3600.0}


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


def write_elsewhere(place: Place, commits: int = 1) -> Child:
    """Commit in another process."""
    return Child(write_events, place.target, place.settings, 1, commits)


def begin_here(book: Book, *names: str) -> None:
    for name in names or ("recorder",):
        book.events.save_cursor(name, book.events.now())


@pytest.fixture
def waiter(place: Place) -> Iterator[Waiter]:
    book = place.open(**NEVER)
    waiter = Waiter(book._registry.database)
    waiter.start()
    yield waiter
    waiter.close()


# --- waiting -----------------------------------------------------------------------


@pytest.mark.parametrize("place", [SQLITE, POSTGRESQL], indirect=True)
def test_whoever_begins_to_wait_looks_at_what_came_before(waiter: Waiter) -> None:
    # What was committed before it could hear anything was not announced to it.
    assert waiter.wait(PATIENCE)


def test_a_commit_with_events_in_the_same_process_wakes(place: Place, waiter: Waiter) -> None:
    book = place.open()
    until(lambda: not waiter.wait(0.1))
    book.metadata.create_topic(TOPIC)
    assert waiter.wait(PATIENCE)


@pytest.mark.parametrize("place", [MEMORY, POSTGRESQL], indirect=True)
def test_a_commit_without_events_wakes_nobody(place: Place, waiter: Waiter) -> None:
    book = place.open()
    until(lambda: not waiter.wait(0.1))
    book._registry.write(lambda transaction: None)
    assert not waiter.wait(0.1)


def test_a_waiter_that_is_closed_waits_no_more(waiter: Waiter) -> None:
    released = threading.Event()

    def wait() -> None:
        while not waiter.closed:
            waiter.wait(3600)
        released.set()

    threading.Thread(target=wait, daemon=True).start()
    waiter.close()
    assert released.wait(PATIENCE)


@pytest.mark.parametrize("place", [MEMORY], indirect=True)
def test_a_commit_does_not_fail_because_others_begin_and_cease_to_wait(place: Place) -> None:
    database = place.open()._registry.database
    announcer = Announcer(database)
    failures: list[BaseException] = []
    ended = threading.Event()

    def come_and_go() -> None:
        for _ in range(1000):
            waiters = [Waiter(database) for _ in range(5)]
            for waiter in waiters:
                waiter.close()

    def announce() -> None:
        try:
            while not ended.is_set():
                announcer.announce()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work) for work in (come_and_go, come_and_go, announce, announce)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads[:2]:
            thread.join(PATIENCE)
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE)
        sys.setswitchinterval(interval)
    assert failures == []


# --- Astha is woken ----------------------------------------------------------------


def test_a_commit_in_this_process_is_delivered_at_once_to_all(place: Place) -> None:
    book = place.open(**NEVER)
    book.metadata.create_topic(TOPIC, 4)
    names = ("a", "b", "c", "d")
    begin_here(book, *names)
    recorders = [Recorder(name) for name in names]
    with delivering(book, *recorders):
        for number in range(1, 101):
            append(book, number % 4)
            if number % 7 == 0:
                until(lambda: all(len(recorder.events) == number for recorder in recorders))  # noqa: B023
        until(lambda: all(len(recorder.events) == 100 for recorder in recorders))


def test_a_commit_in_another_process_is_delivered_at_once_to_all(shared_place: Place) -> None:
    book = shared_place.open(**NEVER)
    book.metadata.create_topic(TOPIC, 4)
    names = ("a", "b", "c")
    begin_here(book, *names)
    recorders = [Recorder(name, ("partitions",)) for name in names]
    with delivering(book, *recorders):
        for turn in range(1, 4):
            child = write_elsewhere(shared_place, 5)
            assert child.end() == 0
            until(lambda: all(len(recorder.events) == 5 * turn for recorder in recorders))  # noqa: B023


@pytest.mark.parametrize("place", [MEMORY, SQLITE, POSTGRESQL], indirect=True)
def test_looking_by_itself_is_enough(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody wakes anybody: as behind a pooler that hands no notifications on.
    monkeypatch.setattr(Waiter, "wake", lambda waiter: None)
    book = place.open(**QUICK, event_poll=0.02)
    book.metadata.create_topic(TOPIC, 4)
    begin_here(book)
    recorder = Recorder()
    with delivering(book, recorder):
        for number in range(1, 6):
            append(book)
            until(lambda: len(recorder.events) == number)  # noqa: B023


# --- NOTIFY ------------------------------------------------------------------------


@pytest.fixture
def on_postgresql(make_place: Callable[..., Place]) -> Place:
    return make_place(POSTGRESQL)


def listeners(place: Place) -> list[int]:
    """The backends that listen."""
    with psycopg.connect(place.target, autocommit=True) as connection:
        found = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
        ).fetchall()
    return [int(row[0]) for row in found]


def end_session(place: Place, pid: int) -> None:
    with psycopg.connect(place.target, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))


def heard_while(place: Place, work: Callable[[], None]) -> int:
    """How many notifications somebody hears who listens while work is done."""
    with psycopg.connect(place.target, autocommit=True) as ear:
        ear.execute(f"LISTEN {CHANNEL}")
        work()
        # The last thing that is heard.
        with psycopg.connect(place.target, autocommit=True) as other:
            other.execute(f"NOTIFY {CHANNEL}, 'end'")
        for heard, notification in enumerate(ear.notifies(timeout=PATIENCE)):
            if notification.payload == "end":
                return heard
    raise AssertionError("nothing more is heard")


def test_commits_are_announced_no_more_often_than_once_in_a_moment(on_postgresql: Place) -> None:
    book = on_postgresql.open()
    book.metadata.create_topic(TOPIC, 4)
    clock = SystemClock()
    spent = 0.0

    def work() -> None:
        nonlocal spent
        begun = clock.monotonic()
        for number in range(400):
            append(book, number % 4)
        book.close()
        spent = clock.monotonic() - begun

    assert 0 < heard_while(on_postgresql, work) <= spent / ANNOUNCE_SECONDS + 2


def test_a_burst_is_announced_with_few_notifications(on_postgresql: Place) -> None:
    announcer = Announcer(on_postgresql.open()._registry.database)

    def work() -> None:
        for _ in range(20_000):
            announcer.announce()
        announcer.close()

    assert 0 < heard_while(on_postgresql, work) < 1000


def test_a_listener_whose_session_was_ended_listens_again(on_postgresql: Place) -> None:
    book = on_postgresql.open(**NEVER)
    book.metadata.create_topic(TOPIC, 4)
    begin_here(book)
    recorder = Recorder("recorder", ("partitions",))
    with delivering(book, recorder):
        until(lambda: listeners(on_postgresql))
        (pid,) = listeners(on_postgresql)
        end_session(on_postgresql, pid)
        until(lambda: listeners(on_postgresql) not in ([], [pid]))
        assert write_elsewhere(on_postgresql, 3).end() == 0
        until(lambda: len(recorder.events) == 3)


def test_what_was_committed_while_nobody_listened_is_found_when_one_listens_again(on_postgresql: Place) -> None:
    book = on_postgresql.open(**NEVER)
    book.metadata.create_topic(TOPIC, 4)
    begin_here(book)
    recorder = Recorder("recorder", ("partitions",))
    with delivering(book, recorder):
        for turn in range(1, 4):
            until(lambda: listeners(on_postgresql))
            child = write_elsewhere(on_postgresql, 2)
            child.wait_for("ready")
            for pid in listeners(on_postgresql):
                end_session(on_postgresql, pid)
            assert child.end() == 0
            until(lambda: len(recorder.events) == 2 * turn)  # noqa: B023
