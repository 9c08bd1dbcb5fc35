"""Work by the clock: each piece at its own interval, one after the other, whatever the others do."""

from __future__ import annotations

import os
import threading
from collections import Counter

import pytest

from lakebook.clock import ManualClock, SystemClock
from lakebook.components.chores import LONGEST_PAUSE, Chores
from lakebook.errors import BookClosed, InvalidInput, RegistryUnavailable
from lakebook.metrics import Metrics

PATIENCE = 60
# The longest that an interval of this many seconds can become.
JITTER = 1.11


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def chores(clock: ManualClock) -> Chores:
    return Chores(clock, "janitor", Metrics(clock))


def counting(counts: Counter[str], name: str) -> None:
    counts[name] += 1


def test_each_piece_of_work_comes_at_its_own_interval(chores: Chores, clock: ManualClock) -> None:
    done: Counter[str] = Counter()
    chores.add("often", 10, lambda: counting(done, "often"))
    chores.add("rarely", 100, lambda: counting(done, "rarely"))
    for _ in range(1000):
        clock.advance(1)
        chores.run_due()
    # With a tenth of jitter, and a first time within the first interval.
    assert 85 <= done["often"] <= 115
    assert 9 <= done["rarely"] <= 12


def test_nothing_is_due_before_its_time_and_what_was_missed_comes_once(chores: Chores, clock: ManualClock) -> None:
    done: Counter[str] = Counter()
    chores.add("work", 10, lambda: counting(done, "work"))
    clock.advance(10)
    assert chores.run_due() == 1
    assert chores.run_due() == 0
    clock.advance(8)
    assert chores.run_due() == 0
    # The machine slept for a month.
    clock.advance(30 * 86_400)
    assert chores.run_due() == 1
    assert chores.run_due() == 0
    assert done["work"] == 2


def test_setting_the_time_does_nothing(chores: Chores, clock: ManualClock) -> None:
    done: Counter[str] = Counter()
    chores.add("work", 10, lambda: counting(done, "work"))
    clock.advance(10)
    chores.run_due()
    clock.turn_back(86_400)
    assert chores.run_due() == 0
    clock.advance(10 * JITTER)
    assert chores.run_due() == 1
    clock.turn_back(-86_400 * 365)
    assert chores.run_due() == 0


def test_what_fails_comes_again_at_longer_intervals_and_holds_up_nobody(chores: Chores, clock: ManualClock) -> None:
    done: Counter[str] = Counter()
    broken = True

    def fail() -> None:
        done["fails"] += 1
        if broken:
            raise RegistryUnavailable("it does not answer", on="registry")

    chores.add("fails", 10, fail)
    chores.add("works", 10, lambda: counting(done, "works"))
    for _ in range(1000):
        clock.advance(1)
        chores.run_due()
    # After 10, 10, 20, 40 seconds and so on.
    assert 6 <= done["fails"] <= 9
    assert done["works"] >= 85
    state = chores.status()["fails"]
    assert (state["outcome"], state["failures"]) == ("failed", done["fails"])
    assert state["error"] == "RegistryUnavailable: registry: it does not answer"
    clock.advance(20 * LONGEST_PAUSE)
    for _ in range(20):
        chores.run_due()
        clock.advance(LONGEST_PAUSE * JITTER)
    before = done["fails"]
    # However often it has failed, it comes again.
    clock.advance(LONGEST_PAUSE * JITTER)
    chores.run_due()
    assert done["fails"] == before + 1
    broken = False
    clock.advance(LONGEST_PAUSE * JITTER)
    chores.run_due()
    assert chores.status()["fails"]["failures"] == 0
    clock.advance(10 * JITTER)
    chores.run_due()
    assert done["fails"] == before + 3


def test_rounds_are_counted_by_their_outcome(clock: ManualClock) -> None:
    metrics = Metrics(clock)
    chores = Chores(clock, "janitor", metrics)

    def fail() -> None:
        raise ValueError("broken")

    chores.add("good", 1, lambda: None)
    chores.add("bad", 1, fail)
    clock.advance(1)
    assert chores.run_due() == 2
    values = metrics.values()
    assert values["lakebook_chores_total{action=good,component=janitor,outcome=done}"] == 1
    assert values["lakebook_chores_total{action=bad,component=janitor,outcome=failed}"] == 1


def test_a_piece_of_work_can_be_asked_for(chores: Chores, clock: ManualClock) -> None:
    answers = iter([7, ValueError("broken")])

    def work() -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    chores.add("work", 10, work)
    assert chores.status()["work"]["last_run"] is None
    assert chores.run_now("work") == 7
    # It has just been done, so that it is not due as it was before.
    clock.advance(8)
    assert chores.run_due() == 0
    assert (chores.status()["work"]["outcome"], chores.status()["work"]["running"]) == ("done", False)
    with pytest.raises(ValueError, match="broken"):
        chores.run_now("work")
    assert chores.status()["work"]["outcome"] == "failed"
    with pytest.raises(InvalidInput, match="no such work"):
        chores.run_now("other")


def test_nothing_more_is_tried_through_a_book_that_is_closed(chores: Chores, clock: ManualClock) -> None:
    done: Counter[str] = Counter()

    def closed() -> None:
        raise BookClosed("it is closed", on="book")

    chores.add("first", 1, closed)
    chores.add("second", 1000, lambda: counting(done, "second"))
    clock.advance(1)
    chores.run_due()
    clock.advance(1000)
    assert chores.run_due() == 0
    assert chores.stopping
    assert not done


def test_the_thread_works_until_it_is_stopped_and_can_be_started_again() -> None:
    clock = SystemClock()
    chores = Chores(clock, "janitor", Metrics(clock))
    done: Counter[str] = Counter()
    thrice = threading.Event()

    def work() -> None:
        done["work"] += 1
        if done["work"] % 3 == 0:
            thrice.set()

    chores.add("work", 0.01, work)
    for _ in range(2):
        thrice.clear()
        chores.start()
        chores.start()
        assert thrice.wait(PATIENCE)
        chores.stop()
        before = done["work"]
        assert chores.run_due() == 0
        assert done["work"] == before


def test_stopping_wakes_a_thread_that_waits_for_long() -> None:
    clock = SystemClock()
    chores = Chores(clock, "janitor", Metrics(clock))
    chores.add("work", 86_400 * 365 * 1000, lambda: None)
    chores.start()
    stopped = threading.Thread(target=chores.stop)
    stopped.start()
    stopped.join(PATIENCE)
    assert not stopped.is_alive()


def test_stopping_waits_for_what_is_at_work_and_begins_nothing_more() -> None:
    clock = SystemClock()
    chores = Chores(clock, "janitor", Metrics(clock))
    begun, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def long() -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        order.append("worked")

    chores.add("long", 0.01, long)
    chores.start()
    assert begun.wait(PATIENCE)
    assert chores.status()["long"]["running"]

    def stop() -> None:
        chores.stop()
        order.append("stopped")

    stopping = threading.Thread(target=stop)
    stopping.start()
    deadline = clock.monotonic() + PATIENCE
    while not chores.stopping:
        assert clock.monotonic() < deadline
        begun.wait(0)
    go_on.set()
    stopping.join(PATIENCE)
    assert order == ["worked", "stopped"]


def test_a_piece_of_work_can_stop_all_of_them() -> None:
    clock = SystemClock()
    chores = Chores(clock, "janitor", Metrics(clock))
    stopped = threading.Event()

    def stop() -> None:
        chores.stop()
        stopped.set()

    chores.add("stop", 0.01, stop)
    chores.start()
    assert stopped.wait(PATIENCE)
    chores.stop()
    assert chores.stopping


def test_work_that_is_asked_for_waits_for_the_one_at_work() -> None:
    clock = ManualClock()
    chores = Chores(clock, "janitor", Metrics(clock))
    begun, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def long() -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        order.append("long")

    chores.add("long", 1, long)
    chores.add("short", 1, lambda: order.append("short"))
    first = threading.Thread(target=chores.run_now, args=("long",))
    second = threading.Thread(target=chores.run_now, args=("short",))
    first.start()
    assert begun.wait(PATIENCE)
    second.start()
    go_on.set()
    first.join(PATIENCE)
    second.join(PATIENCE)
    assert order == ["long", "short"]


def test_a_child_process_begins_without_the_parents_thread_and_locks() -> None:
    clock = SystemClock()
    chores = Chores(clock, "janitor", Metrics(clock))
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(PATIENCE)

    chores.add("hold", 0.01, hold)
    chores.start()
    assert begun.wait(PATIENCE)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - in another process
        chores._chores["hold"].work = lambda: None
        answer = b"1" if chores.run_now("hold") is None and not chores.status()["hold"]["running"] else b"0"
        chores.stop()
        os.write(writing, answer)
        os._exit(0)
    try:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read() == b"1"
    finally:
        os.waitpid(child, 0)
        go_on.set()
        chores.stop()
