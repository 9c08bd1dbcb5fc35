"""Builds of a view race with commits to its source: what is not marked stale has every row."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from books import POSTGRESQL, SQLITE, Place
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
