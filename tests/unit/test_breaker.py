"""The breaker and the pauses: by the clock alone, without a registry."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lakebook.cdc.breaker import FIRST_PAUSE, THRESHOLD, Breaker, State, pause_after
from lakebook.clock import ManualClock

LONGEST = 60.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    return Breaker(clock, LONGEST)


def wait_for_half_open(breaker: Breaker, clock: ManualClock) -> float:
    """Seconds after which it lets one call through."""
    left = breaker.opens_in()
    assert left is not None
    clock.advance(left)
    assert breaker.allows()
    assert breaker.state is State.HALF_OPEN
    return left


# --- pauses ------------------------------------------------------------------------


def test_pauses_double_from_the_first_up_to_the_longest() -> None:
    for attempts in range(1, 31):
        most = min(LONGEST, FIRST_PAUSE * 2.0 ** (attempts - 1))
        found = [pause_after(attempts, LONGEST) for _ in range(50)]
        assert all(most / 2 <= pause <= most for pause in found)
    assert pause_after(1, LONGEST) <= FIRST_PAUSE < LONGEST / 2 <= pause_after(30, LONGEST)


def test_no_two_pauses_are_alike() -> None:
    assert len({pause_after(20, LONGEST) for _ in range(50)}) > 40


@pytest.mark.parametrize("attempts", [-1, 0, 1_000, 10**9])
def test_a_pause_is_within_its_limits_after_any_number_of_attempts(attempts: int) -> None:
    assert 0 <= pause_after(attempts, LONGEST) <= LONGEST


def test_without_a_longest_pause_there_is_none() -> None:
    assert pause_after(30, 0) == 0


# --- closed ------------------------------------------------------------------------


def test_a_new_breaker_lets_everything_through(breaker: Breaker) -> None:
    assert breaker.state is State.CLOSED
    for _ in range(3):
        assert breaker.allows()
        breaker.began()
    assert breaker.opens_in() is None


def test_failures_of_one_object_never_open_it(breaker: Breaker) -> None:
    for _ in range(10 * THRESHOLD):
        breaker.failed(7, "poison")
    assert breaker.state is State.CLOSED
    assert breaker.allows()


def test_failures_in_a_row_of_several_objects_open_it(breaker: Breaker) -> None:
    for number in range(THRESHOLD - 1):
        breaker.failed(number, "down")
        assert breaker.state is State.CLOSED
    breaker.failed(THRESHOLD, "down")
    assert breaker.state is State.OPEN
    assert breaker.reason == "down"
    assert not breaker.allows()


def test_a_success_between_failures_keeps_it_closed(breaker: Breaker) -> None:
    for number in range(10 * THRESHOLD):
        breaker.failed(number, "sometimes")
        if number % (THRESHOLD - 1) == THRESHOLD - 2:
            breaker.succeeded()
    assert breaker.state is State.CLOSED


def test_two_poisoned_objects_say_nothing_about_the_others(breaker: Breaker) -> None:
    # Theirs are the only calls while nothing else happens; whoever comes later must not wait for them.
    for number in range(10 * THRESHOLD):
        breaker.failed(number % 2, "poison")
    assert breaker.state is State.CLOSED


# --- open and half open ------------------------------------------------------------


def test_one_that_is_not_well_opens_it_at_once(breaker: Breaker) -> None:
    breaker.trip("not well")
    assert breaker.state is State.OPEN
    assert (breaker.reason, breaker.openings) == ("not well", 1)
    assert not breaker.allows()


def test_it_lets_one_call_at_a_time_through_when_its_pause_is_over(breaker: Breaker, clock: ManualClock) -> None:
    breaker.trip("not well")
    left = breaker.opens_in()
    assert left is not None
    clock.advance(left / 2)
    assert not breaker.allows()
    clock.advance(left / 2)
    assert breaker.allows()
    breaker.began()
    assert breaker.state is State.HALF_OPEN
    assert not breaker.allows()


def test_a_call_that_goes_well_closes_a_half_open_one(breaker: Breaker, clock: ManualClock) -> None:
    breaker.trip("not well")
    wait_for_half_open(breaker, clock)
    breaker.began()
    breaker.succeeded()
    assert breaker.state is State.CLOSED
    assert (breaker.openings, breaker.reason) == (0, "")
    assert breaker.allows()


def test_a_call_that_fails_opens_a_half_open_one_for_longer_up_to_the_longest(
    breaker: Breaker, clock: ManualClock
) -> None:
    breaker.trip("not well")
    pauses = []
    for number in range(40):
        pauses.append(wait_for_half_open(breaker, clock))
        breaker.began()
        breaker.failed(number, "still")
        assert breaker.state is State.OPEN
    assert all(pause <= LONGEST for pause in pauses)
    assert all(later > sooner for sooner, later in pairwise(pauses[:7]))
    assert min(pauses[-20:]) >= 0.8 * LONGEST


def test_the_pauses_of_an_open_breaker_differ(clock: ManualClock) -> None:
    found = set()
    for _ in range(20):
        breaker = Breaker(clock, LONGEST)
        breaker.trip("not well")
        found.add(breaker.opens_in())
    assert len(found) > 15


def test_a_call_that_began_before_it_was_opened_does_not_close_it(breaker: Breaker) -> None:
    breaker.began()
    breaker.trip("not well")
    breaker.succeeded()
    assert breaker.state is State.OPEN
    assert not breaker.allows()


def test_one_that_is_open_is_not_opened_for_longer_by_calls_that_were_under_way(
    breaker: Breaker, clock: ManualClock
) -> None:
    breaker.trip("not well")
    left = breaker.opens_in()
    assert left is not None
    clock.advance(left / 2)
    for number in range(2 * THRESHOLD):
        breaker.failed(number, "too")
        breaker.trip("too")
    assert breaker.openings == 1
    assert breaker.opens_in() == pytest.approx(left / 2)


def test_after_it_was_closed_it_begins_with_the_shortest_pause_again(breaker: Breaker, clock: ManualClock) -> None:
    for _ in range(10):
        breaker.trip("not well")
        longest = wait_for_half_open(breaker, clock)
    breaker.succeeded()
    breaker.trip("once more")
    left = breaker.opens_in()
    assert left is not None
    assert left < longest / 10


def test_a_wall_clock_that_is_set_changes_nothing(breaker: Breaker, clock: ManualClock) -> None:
    breaker.trip("not well")
    left = breaker.opens_in()
    clock.turn_back(3600)
    assert breaker.opens_in() == left
