"""Whoever builds a view is killed at every step: a range is whole or not there, and the next one builds it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import lakebook
import view_processes
from lakebook.components.janitor import Janitor
from lakebook.registry.claims import list_claims
from spark_hosts import hosted_spark
from table_facts import later
from table_writers import Child, kill_all
from view_processes import IMPATIENT, VIEW, materialise
from viewing import at, claim, enter, hours_of, order, orders, stale_hours, view_of


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A book with a table of orders, and a view of it whose first hour is built and stale."""
    with lakebook.open(tmp_path / "book", **IMPATIENT) as book:
        table = orders(book)
        view = view_of(book, name=VIEW)
        enter(book, view, claim(book, view, at(0), at(1)))
        order(table, 0.5, 1.5)
        assert stale_hours(view) == [0]
    return tmp_path / "book"


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[int, str]]:
    with hosted_spark() as reached:
        yield reached


@pytest.mark.parametrize("point", view_processes.POINTS)
def test_a_build_that_is_killed_leaves_a_whole_range_or_none(
    folder: Path, gateway: tuple[int, str], point: str
) -> None:
    child = Child(materialise, str(folder), IMPATIENT, gateway, points=f"{point}=kill@1")
    assert list(child.facts()) == [("started",)]
    assert child.end() == -signal.SIGKILL
    with lakebook.open(folder, **IMPATIENT) as book:
        view = book.views.get(VIEW)
        committed = point == "view.committed"
        assert [(hours_of(item), item.num_rows) for item in view.list_partitions()] == [((0, 1), 1 if committed else 0)]
        assert stale_hours(view) == ([] if committed else [0])
        assert view.count() == (1 if committed else 0)
        left = book._registry.read_with(lambda reader: list_claims(reader, view.record))
        assert [item.begin for item in left] == ([] if committed else [at(0)])
        assert book.verify().findings == ()
    with lakebook.open(folder, clock=(clock := later()), **IMPATIENT) as book:
        view = book.views.get(VIEW)
        # A dead claim stands in nobody's way, and a late commit of the dead one is refused.
        if not committed:
            enter(book, view, claim(book, view, at(0), at(1)))
        janitor = Janitor(book.lake)
        for _ in range(3):
            janitor.run_once("sweep")
            janitor.run_once("files")
            clock.advance(1)
        known = {item.file_path for item in view.list_partitions() if item.file_path is not None}
        assert {item.path for item in book.lake.store.list("data")} - _of_orders(book) == known
        assert book.verify().findings == ()


def _of_orders(book: lakebook.Book) -> set[str]:
    return {file.file_path for file in book.table("orders").plan()}
