"""Whoever mirrors a topic is killed at every step: the table has the topic's records, each of them once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from books import POSTGRESQL, SQLITE, Place
from lakebook.streams.mirroring import mirror_topic
from mirror_processes import POINTS, mirror_and_merge
from mirrored import TOPIC, append, in_table, in_topic, paths
from table_facts import with_own_warehouse
from table_writers import Child, kill_all


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(request.param), tmp_path)


# The changes of a child's table: it is created, and mirrored; then come the versions of the merge and the removal.
STEPS = (
    *(f"{point}=kill@1" for point in POINTS),
    *(f"change.written=kill@{number}" for number in (1, 2, 3)),
    *(f"transaction.before_commit=kill@{number}" for number in (2, 4, 6, 8)),
)


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_mirrors_and_is_killed_leaves_what_the_next_one_goes_on_from(place: Place, step: str) -> None:
    book = place.open()
    book.metadata.create_topic(TOPIC, config={"iceberg": "true"})
    for number in range(3):
        append(book, f"{number}.0", f"{number}.1")
    child = Child(mirror_and_merge, place.target, place.settings, points=step)
    assert ("done",) not in list(child.facts())
    assert child.end() == -signal.SIGKILL
    # Waits, under its lock, for what a server may still have under way of one who is dead already.
    book.metadata.release_append(book.metadata.claim_append(TOPIC, 0))
    mirror_topic(book.lake, TOPIC)
    assert in_table(book) == in_topic(book)
    assert sorted(file.file_path for file in book.table(TOPIC, namespace="topics").plan()) == paths(book)
    assert book.verify().findings == ()
