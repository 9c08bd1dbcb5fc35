"""Who publishes or commits from outside is killed at every point; the next one goes on as if nothing had been."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from books import POSTGRESQL, SQLITE, Place
from extent import EVERYWHERE, crossed
from lakebook import Book, failpoints
from outside_facts import (
    check_everywhere,
    check_history,
    check_sound,
    check_that_nothing_unknown_lies_in_locations,
    covered,
    in_order,
)
from outside_writers import (
    BRIEF,
    LEFT,
    POINTS,
    TRANSACTIONS,
    append_once,
    create_once,
    create_table,
    make_backlog,
    overwrite_files,
    overwrite_once,
    publish_once,
    settle_once,
    work_until_killed,
)
from table_facts import IMPATIENT, Told, batches_of, with_own_warehouse
from table_writers import TABLE, Child, kill_all, rows_of

KILLS = int(os.environ.get("LAKEBOOK_TEST_KILLS", "20"))
#: Where one comes by who commits to a table that is there, and whom nobody outruns.
COMMITTING = tuple(point for point in POINTS if point not in ("publish.discarded", "outside.created"))
PUBLISHING = tuple(point for point in POINTS if point.startswith("publish."))


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(request.param), tmp_path)


def killed(program: Callable[..., None], place: Place, *arguments: Any, point: str, told: Told, **options: Any) -> bool:
    """Run a program that is killed when it comes to a point; whether it came there."""
    child = Child(program, place.target, {**place.settings, **BRIEF}, *arguments, points=point, **options)
    for fact in child.facts():
        if fact[0] in ("begin", "done"):
            list(told.hear([fact]))
    code = child.end()
    assert code in (0, -signal.SIGKILL)
    return code != 0


def finish(program: Callable[..., None], place: Place, *arguments: Any) -> None:
    """Another process does it, and nobody kills it."""
    child = Child(program, place.target, {**place.settings, **BRIEF}, *arguments)
    list(child.facts())
    assert child.end() == 0


def check_published(book: Book, *, every: bool = True) -> None:
    check_history(book.table(TABLE))
    check_everywhere(book.table(TABLE), every=every)
    check_sound(book)


# --- publishing --------------------------------------------------------------------


def test_these_are_all_points_of_publishing_and_of_outside_commits() -> None:
    named = [point for point in failpoints.POINTS if point.startswith(("publish.", "outside.", "debt."))]
    assert set(POINTS) == set(named)


@pytest.mark.parametrize("point", [*PUBLISHING, *TRANSACTIONS])
def test_a_backlog_whose_publisher_is_killed_becomes_one_snapshot_for_each_group(place: Place, point: str) -> None:
    book = place.open()
    table = create_table(book)
    kept: set[int] = set()
    groups: list[tuple[str, range]] = []
    kills = 0
    # At the first and the second time it comes there, as far as it does.
    for count in (1, 2):
        first = table.version + 1
        for operation, number in make_backlog(book, table, 100 * count):
            # The change of the schema is a version of its own, and in no group.
            first += table.history(limit=10_000).items[-1 - first].operation == "schema"
            groups.append((operation, range(first, first + number)))
            first += number
        kept |= {100 * count + number for number in LEFT}
        outrun = point == "publish.discarded"
        kills += killed(publish_once, place, point=f"{point}=kill@{count}", told=Told(), outrun_once=outrun)
        check_sound(book)
        finish(publish_once, place)
        found = check_history(table)
        assert [(item.summary["operation"], covered(item)) for item in found] == groups
        assert batches_of(book) == kept
    assert kills
    check_published(book)
    check_that_nothing_unknown_lies_in_locations(place)
    check_published(book)
    assert batches_of(book) == kept


# --- commits of outside engines ----------------------------------------------------


@pytest.mark.parametrize(("point", "overwrites"), crossed([*COMMITTING, *TRANSACTIONS[1:]], [False, True]))
def test_a_commit_of_an_outside_engine_that_is_killed_counts_as_a_whole_or_not_at_all(
    place: Place, point: str, overwrites: bool
) -> None:
    book = place.open()
    table = create_table(book)
    told = Told()
    kills = 0
    for count in itertools.count(1):
        # Pending changes are published by the commit itself.
        table.insert_arrow(rows_of(1000 + count))
        version = table.insert_arrow(rows_of(2000 + count)).version
        overwrite_files(
            book, table, [file for file in table.plan() if file.from_version == version], rows_of(3000 + count)
        )
        told.batches |= {1000 + count, 3000 + count}
        program, given = (overwrite_once, (count, 1000 + count)) if overwrites else (append_once, (count,))
        dies = killed(program, place, *given, point=f"{point}=kill@{count}", told=told)
        kills += dies
        told.check(book)
        finish(publish_once, place)
        if not dies or (count == 2 and not point.startswith("transaction")):
            break
    assert kills
    # Others go on.
    finish(append_once, place, 5000)
    told.batches |= {5000}
    finish(overwrite_once, place, 5001, 5000)
    told.batches = (told.batches | {5001}) - {5000}
    told.check(book)
    finish(settle_once, place)
    check_published(book)
    check_that_nothing_unknown_lies_in_locations(place)
    check_published(book, every=False)
    told.check(book)


CREATING = ("publish.reserved", "outside.metadata_written", "publish.committed", "outside.created", "debt.taken")


@pytest.mark.parametrize("point", [*CREATING, *TRANSACTIONS[1:]])
def test_a_table_whose_creator_is_killed_is_there_with_its_rows_or_not_at_all(place: Place, point: str) -> None:
    book = place.open()
    kills = 0
    for count in itertools.count(1):
        name = f"made_{count}"
        dies = killed(create_once, place, name, point=f"{point}=kill@{count}", told=Told())
        kills += dies
        if name not in {table.name for table in book.tables.list()}:
            finish(create_once, place, name)
        table = book.table(name)
        assert in_order(table.to_arrow()) == in_order(rows_of(1))
        table.publish()
        check_history(table)
        check_everywhere(table)
        check_sound(book)
        if not dies:
            break
    assert kills
    finish(settle_once, place)
    check_that_nothing_unknown_lies_in_locations(place)


def owed(place: Place) -> int:
    """How many files nobody has looked at, as one sees it who comes new."""
    return sum(not file.checksum for file in place.open().table(TABLE).plan())


def test_debts_whose_debtor_is_killed_are_paid_by_the_next(place: Place) -> None:
    book = place.open()
    create_table(book)
    told = Told()
    for batch in range(3):
        assert killed(append_once, place, batch, point="outside.committed=kill@1", told=told)
        told.check(book)
    assert told.batches == {0, 1, 2}
    assert owed(place) == 3
    for point in ("debt.taken", "transaction.before_commit", "transaction.after_commit"):
        for count in (1, 2):
            killed(settle_once, place, point=f"{point}=kill@{count}", told=told)
            told.check(book)
    finish(settle_once, place)
    assert owed(place) == book.settle_debts().paid == 0
    # What is published from now on has what was taken late.
    finish(append_once, place, 3)
    told.batches |= {3}
    told.check(book)
    check_published(book)
    check_that_nothing_unknown_lies_in_locations(place)


def test_who_has_seen_a_file_before_its_debt_was_paid_sees_what_was_taken(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    assert killed(append_once, place, 1, point="outside.committed=kill@1", told=Told())
    assert [file.checksum for file in table.plan()] == [""]
    assert [file.has_statistics for file in table.plan("batch = 2")] == [False]
    finish(settle_once, place)
    assert all(file.checksum for file in table.plan())
    assert list(table.plan("batch = 2")) == []


# --- everything in turn ------------------------------------------------------------


def start(place: Place, seed: int, points: str = "") -> Child:
    settings = {**place.settings, **IMPATIENT, **BRIEF}
    return Child(work_until_killed, place.target, settings, seed, points=points)


@pytest.mark.parametrize("point", [*POINTS, *TRANSACTIONS])
def test_a_worker_killed_at_each_failpoint_leaves_a_sound_table(place: Place, point: str) -> None:
    book = place.open()
    create_table(book)
    told = Told()
    # The second goes on, whatever the first has left.
    for count in (17, 61) if point.startswith("transaction") else (1, 4):
        child = start(place, count, f"{point}=kill@{count}")
        for _ in told.hear(child.facts()):
            pass
        assert child.end() == -signal.SIGKILL
        told.check(book)
        finish(publish_once, place)
        check_published(book, every=EVERYWHERE)
    finish(settle_once, place)
    check_that_nothing_unknown_lies_in_locations(place)
    check_published(book)
    told.check(book)


def test_a_worker_killed_at_random_loses_nothing_it_acknowledged(place: Place, soak: Callable[[str], None]) -> None:
    book = place.open()
    create_table(book)
    chance = random.Random(KILLS)
    told = Told()
    for number in range(KILLS):
        child = start(place, number + 1)
        heard = told.hear(child.facts())
        for _ in zip(heard, range(chance.randrange(1, 40)), strict=False):
            pass
        child.kill()
        for _ in heard:
            pass
        assert child.end() == -signal.SIGKILL
        told.check(book)
        if number % 5 == 4:
            finish(publish_once, place)
            check_published(book, every=False)
    finish(publish_once, place)
    finish(settle_once, place)
    check_published(book)
    check_that_nothing_unknown_lies_in_locations(place)
    check_published(book)
    told.check(book)
    soak(
        f"{place.kind}: a worker that publishes and commits from outside killed {KILLS} times, {told.changes:,}"
        " acknowledged changes all kept once, the same rows in Lakebook, PyIceberg and DuckDB, verify found nothing"
    )
