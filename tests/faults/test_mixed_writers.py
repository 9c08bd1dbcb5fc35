"""Lakebook and outside engines write to one table at once, each in processes of its own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.table import StaticTable

from books import POSTGRESQL, SQLITE, Place
from extent import long
from held import PATIENCE, Held
from lakebook import Book, failpoints
from lakebook.errors import RegistryBusy
from lakebook.lake.table import Table
from lakebook.server.endpoint import RestEndpoint
from outside_facts import (
    Noted,
    check_everywhere,
    check_history,
    check_sound,
    check_that_nothing_unknown_lies_in_locations,
    in_order,
    of_pyiceberg,
)
from outside_writers import (
    BRIEF,
    append_frozen,
    appending_outside,
    as_table_is,
    cleaning,
    commit_patiently,
    create_table,
    evolving,
    insert_steadily,
    inserting,
    loaded,
    overwrite_files,
    overwriting_outside,
    publish_frozen,
    rewriting,
    run_logged,
)
from table_facts import batches_of, later, with_own_warehouse
from table_writers import TABLE, Child, kill_all, rows_of
from test_table_races import Race

SECONDS = float(os.environ.get("LAKEBOOK_TEST_SECONDS", "4"))


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(request.param), tmp_path)


def check_all(book: Book, *, every: bool = True) -> None:
    table = book.table(TABLE)
    table.publish()
    book.settle_debts()
    check_history(table)
    check_everywhere(table, every=every)
    check_sound(book)


# --- everybody at once -------------------------------------------------------------


@long(POSTGRESQL)
def test_nothing_is_lost_or_doubled_while_everybody_writes_and_cleans(
    place: Place, tmp_path: Path, soak: Callable[[str], None]
) -> None:
    book = place.open()
    create_table(book)
    logs = tmp_path / "logs"
    logs.mkdir()
    settings = {
        **place.settings,
        **BRIEF,
        "lock_timeout": 60,
        "publish_lag": 0.05,
        "temporary_file_grace": 0,
        "sweep_grace": 0,
        "published_grace": 60,
    }
    programs: list[tuple[str, Any]] = [
        ("async", inserting),
        ("sync", inserting),
        ("async", rewriting),
        ("off", appending_outside),
        ("off", overwriting_outside),
        ("sync", evolving),
        ("off", cleaning),
    ]
    race = Race(
        *(
            Child(
                run_logged,
                place.target,
                {**settings, "publish": mode},
                str(logs),
                program.__name__,
                seed,
                program,
            )
            for seed, (mode, program) in enumerate(programs, 1)
        )
    )
    least = {
        "inserted": 10,
        "appended": 5,
        "rewritten": 3,
        "outside deleted": 1,
        "outside overwritten": 1,
        "cleaned": 2,
    }
    race.run(least, lambda: None)
    noted = Noted(logs)
    noted.check(book)
    check_all(book, every=False)
    noted.check(book)
    check_that_nothing_unknown_lies_in_locations(place)
    check_all(book, every=False)
    told = race.told
    rewrites = told["outside deleted"] + told["outside overwritten"]
    soak(
        f"{place.kind}: {noted.added:,} batches added and {noted.removed:,} removed by Lakebook and by PyIceberg at"
        f" once ({told['appended']:,} outside appends, {rewrites:,} outside"
        f" deletes and overwrites, {told['evolved']:,} new columns, {told['cleaned']:,} clean-ups); nothing lost,"
        " nothing twice, one line of snapshots, the same rows in Lakebook, PyIceberg and DuckDB"
    )


# --- who is slow gets through ------------------------------------------------------

#: Commits of the outside engine; and how often it may be refused, each, before it gets through.
COMMITS, MOST_ATTEMPTS = 4, 12


@pytest.mark.parametrize("mode", ["off", "async", "sync"])
def test_an_outside_engine_gets_through_to_a_table_that_is_never_quiet(place: Place, mode: str) -> None:
    book = place.open()
    create_table(book)
    settings = {**place.settings, **BRIEF, "lock_timeout": 60, "publish_lag": 0.05}
    steady = Child(insert_steadily, place.target, {**settings, "publish": mode}, 1)
    steady.wait_for("ready")
    outside = Child(commit_patiently, place.target, settings, 2, COMMITS, True)
    outside.wait_for("ready")
    # Not before the table has become busy.
    for _ in range(3):
        steady.wait_for("inserted")
    outside.connection.send("go")
    heard = list(outside.facts())
    assert outside.end() == 0
    steady.stop()
    mine = {fact[1] for fact in steady.facts() if fact[0] == "inserted"}
    assert steady.end() == 0
    told = Counter(fact[0] for fact in heard)
    assert told == {"appended": COMMITS, "removed": COMMITS}, heard
    attempts = [fact[2] for fact in heard]
    assert max(attempts) <= MOST_ATTEMPTS, heard
    # Who is held back is held back for a moment only.
    assert mine
    assert {batch for batch in batches_of(book) if batch >= 2_000_000} == set()
    assert mine <= batches_of(book)
    check_all(book, every=False)


# --- who was frozen does no harm ---------------------------------------------------


def frozen(program: Callable[..., None], place: Place, *arguments: Any) -> Child:
    child = Child(program, place.target, {**place.settings, **BRIEF}, *arguments)
    child.wait_for("freezing")
    child.wait_until_frozen()
    return child


def wake(child: Child) -> tuple[Any, ...]:
    child.wake()
    (fact,) = list(child.facts())
    assert child.end() == 0
    return fact


def janitor(place: Place) -> Book:
    """One that comes an hour later, and takes whoever is silent for dead."""
    return place.open(clock=later(), insert_alive=0.1, sweep_grace=0, temporary_file_grace=0)


@pytest.mark.parametrize("point", ["publish.reserved", "publish.list_written", "publish.metadata_written"])
@pytest.mark.parametrize("swept", [False, True], ids=["outrun", "swept"])
def test_a_frozen_publisher_does_no_harm_when_it_wakes(place: Place, point: str, swept: bool) -> None:
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    table.publish()
    version = table.insert_arrow(rows_of(2)).version
    overwrite_files(book, table, [file for file in table.plan() if file.from_version == version], rows_of(3))
    child = frozen(publish_frozen, place, point)
    table.insert_arrow(rows_of(4))
    table.publish()
    location = table.metadata_location
    if swept:
        cleaner = janitor(place).cleaner
        cleaner.expire(seconds=0, versions=1)
        cleaner.delete_expired_temporary_files(wait=False)
        assert cleaner.sweep().fenced == 1
        cleaner.sweep()
        location = table.metadata_location
    fact = wake(child)
    # It looks again and finds that there is nothing left to do, or that it was taken for dead.
    assert fact[0] in ("published", "refused")
    assert table.metadata_location == location
    assert batches_of(book) == {1, 3, 4}
    check_all(book)
    check_that_nothing_unknown_lies_in_locations(place)
    check_all(book)


@pytest.mark.parametrize("point", ["publish.reserved", "publish.metadata_written"])
def test_a_frozen_publisher_whose_work_was_swept_publishes_nothing_that_is_gone(place: Place, point: str) -> None:
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    child = frozen(publish_frozen, place, point)
    assert janitor(place).cleaner.sweep().fenced == 1
    wake(child)
    table.publish()
    assert batches_of(book) == {1}
    check_all(book)
    check_that_nothing_unknown_lies_in_locations(place)
    check_all(book)


@pytest.mark.parametrize("point", ["outside.metadata_written", "outside.committed"])
def test_a_frozen_commit_of_an_outside_engine_does_no_harm_when_it_wakes(place: Place, point: str) -> None:
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    child = frozen(append_frozen, place, point, 2)
    table.insert_arrow(rows_of(3))
    table.publish()
    cleaner = janitor(place).cleaner
    cleaner.expire(seconds=0, versions=1)
    cleaner.delete_expired_temporary_files(wait=False)
    cleaner.sweep()
    cleaner.sweep()
    fact = wake(child)
    assert fact[0] in ("appended", "refused")
    assert batches_of(book) == ({1, 2, 3} if fact[0] == "appended" else {1, 3})
    check_all(book)
    check_that_nothing_unknown_lies_in_locations(place)
    check_all(book)


def test_a_first_publication_lists_no_file_that_an_expiry_removed_meanwhile(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    version = table.insert_arrow(rows_of(1)).version
    overwrite_files(book, table, [file for file in table.plan() if file.from_version == version], rows_of(2))
    child = frozen(publish_frozen, place, "publish.metadata_written")
    # Nothing is published yet, so that nothing holds history back.
    cleaner = janitor(place).cleaner
    assert cleaner.expire(seconds=0, versions=1).files == 1
    late = place.open(clock=later(7200), temporary_file_grace=0)
    assert late.cleaner.delete_expired_temporary_files().files == 1
    wake(child)
    table.publish()
    check_sound(book)
    assert batches_of(book) == {2}
    for snapshot in table.snapshots():
        assert StaticTable.from_metadata(table.metadata_location or "").scan(
            snapshot_id=snapshot.snapshot_id
        ).to_arrow().num_rows == len(rows_of(1))


# --- what has landed is never told as failed ---------------------------------------


def outside_rows(book: Book, batch: int) -> tuple[Any, Any]:
    outside = loaded(book.catalog())
    return outside, as_table_is(outside, rows_of(batch))


def test_a_commit_that_landed_is_not_told_as_failed_because_the_table_was_renamed(place: Place) -> None:
    book, other = place.open(), place.open()
    create_table(book)
    outside, rows = outside_rows(book, 1)

    def rename() -> None:
        other.tables.rename(TABLE, "renamed")

    with failpoints.armed("outside.committed", rename):
        outside.append(rows)
    assert other.table("renamed").count() == len(rows)
    check_sound(book)


def busy() -> None:
    raise RegistryBusy("somebody else holds the lock", on="test")


def test_a_commit_that_landed_is_not_told_as_failed_because_the_registry_is_busy_then(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    outside, rows = outside_rows(book, 1)

    def be_busy_from_now_on() -> None:
        failpoints._armed["transaction.begun"] = busy

    try:
        with failpoints.armed("outside.committed", be_busy_from_now_on):
            outside.append(rows)
    finally:
        failpoints._armed.pop("transaction.begun", None)
    assert batches_of(book) == {1}
    check_all(book)
    assert in_order(table.to_arrow()) == of_pyiceberg(table)


def test_a_client_over_http_does_not_hear_that_nothing_was_changed_when_it_was(place: Place) -> None:
    book = place.open()
    create_table(book)

    def be_busy_from_now_on() -> None:
        failpoints._armed["transaction.begun"] = busy

    with RestEndpoint(book.catalog()) as endpoint:
        catalog = load_catalog("rest", type="rest", uri=endpoint.uri, token=endpoint.token)
        outside = loaded(catalog)
        rows = as_table_is(outside, rows_of(1))
        try:
            with failpoints.armed("outside.committed", be_busy_from_now_on):
                outside.append(rows)
        finally:
            failpoints._armed.pop("transaction.begun", None)
    assert batches_of(book) == {1}
    check_all(book)


def test_two_commits_of_outside_engines_that_meet_both_land_or_one_is_refused(place: Place) -> None:
    book, other = place.open(), place.open()
    create_table(book)
    book.table(TABLE).insert_arrow(rows_of(1))
    first, second = loaded(book.catalog()), loaded(other.catalog())
    held = Held(lambda: first.append(as_table_is(first, rows_of(2))))

    def stand() -> None:
        if not held.go_on.is_set():
            held.stand()

    with failpoints.armed("outside.metadata_written", stand):
        held.thread.start()
        assert held.reached.wait(PATIENCE), held.error
        second.overwrite(as_table_is(second, rows_of(3)), "batch = 1")
        held.finish()
    assert batches_of(book) == {2, 3}
    check_all(book)


def test_an_overwrite_that_meets_an_insert_of_its_rows_is_repeated_or_refused_and_loses_nothing(place: Place) -> None:
    book = place.open(outside_hold=0.5)
    table: Table = create_table(book)
    table.insert_arrow(rows_of(1))
    outside = loaded(book.catalog())
    met: list[object] = []

    def insert_once() -> None:
        if not met:
            met.append(table.insert_arrow(rows_of(2)))

    with failpoints.armed("outside.metadata_written", insert_once):
        try:
            outside.overwrite(as_table_is(outside, rows_of(3)), "batch < 3")
        except (CommitFailedException, ValidationException):
            expected = {1, 2}
        else:
            # The rows that came meanwhile were not among those it has seen.
            expected = {2, 3} if 2 in batches_of(book) else {3}
    assert batches_of(book) == expected
    assert met
    check_all(book)
