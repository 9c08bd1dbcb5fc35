"""Builds of a view race with commits to its source: what is not marked stale has every row."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from books import POSTGRESQL, SQLITE, Place
from held import held_before_commit, started, wait_until_blocked
from lakebook.errors import RangeClaimed
from viewing import at, claim, enter, order, orders, stale_hours, view_of

HOURS = 3
COMMITS = 12
WRITERS = 2


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place]) -> Place:
    return make_place(request.param)


def test_a_range_that_is_not_stale_has_seen_every_commit_of_its_time(place: Place) -> None:
    book = place.open()
    table = orders(book)
    view = view_of(book)
    rows = [0] * HOURS
    seen = [0] * HOURS

    def write(seed: int) -> list[int]:
        chosen = random.Random(seed)
        mine = place.open().table("orders")
        hours = [chosen.randrange(HOURS) for _ in range(COMMITS)]
        for hour in hours:
            order(mine, hour + 0.5)
        return hours

    def build(hour: int) -> None:
        try:
            held = claim(book, view, at(hour), at(hour + 1))
        except RangeClaimed:
            return
        # Pinned after the claim, as a build does.
        found = table.to_arrow().column("ts").to_pylist()
        seen[hour] = sum(1 for time in found if at(hour) <= time < at(hour + 1))
        enter(book, view, held)

    with ThreadPoolExecutor(WRITERS) as workers:
        writing = [workers.submit(write, seed) for seed in range(WRITERS)]
        number = 0
        while not all(item.done() for item in writing) or number < HOURS:
            build(number % HOURS)
            number += 1
    for item in writing:
        for hour in item.result():
            rows[hour] += 1
    stale = stale_hours(view)
    assert [hour for hour in range(HOURS) if seen[hour] != rows[hour] and hour not in stale] == []
    for hour in range(HOURS):
        build(hour)
    assert (seen, stale_hours(view)) == (rows, [])
    assert book.verify().findings == ()


def test_a_claim_waits_for_a_commit_in_flight_whose_rows_the_build_then_reads(make_place: Callable[..., Place]) -> None:
    book = make_place(POSTGRESQL).open()
    table = orders(book)
    view = view_of(book)

    def build() -> int:
        held = claim(book, view, at(0), at(1))
        rows: int = table.to_arrow().num_rows
        enter(book, view, held)
        return rows

    # An insert opens its commit row in a transaction of its own first.
    with held_before_commit(lambda: order(table, 0.5), skip=1) as committing:
        building = started(build)
        wait_until_blocked(book)
        committing.finish()
    assert (building.finish(), stale_hours(view)) == (1, [])


def test_a_commit_waits_for_a_range_that_is_entered_and_then_marks_it(make_place: Callable[..., Place]) -> None:
    book = make_place(POSTGRESQL).open()
    table = orders(book)
    view = view_of(book)
    held = claim(book, view, at(0), at(1))
    with held_before_commit(lambda: enter(book, view, held)) as entering:
        committing = started(lambda: order(table, 0.5))
        wait_until_blocked(book)
        entering.finish()
    committing.finish()
    assert stale_hours(view) == [0]
