"""Readers, writers, cleaners and sweepers of tables that meet each other on the way."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psycopg
import pytest

from books import POSTGRESQL, SQLITE, Place, describe
from held import PATIENCE, Held, held_before_commit, started, wait_until_blocked
from lakebook import Book, failpoints
from lakebook.clock import SystemClock
from lakebook.errors import (
    CommitAborted,
    CommitOutcomeUnknown,
    FilesChanged,
    LeaseLost,
    PathInUse,
    TableNotFound,
    TransientError,
    VersionExpired,
)
from lakebook.lake.table import Table
from lakebook.registry import table_files
from lakebook.registry.databases import PostgreSQL
from lakebook.registry.inserts import EVERY_INSERT
from table_facts import (
    IMPATIENT,
    batches_of,
    check_that_only_what_counts_is_left,
    later,
    objects_of,
    with_own_warehouse,
)
from table_writers import (
    GIVEN,
    KEYS,
    ROWS,
    SCHEMA,
    TABLE,
    Child,
    check_rows,
    clean_until_stopped,
    create_table,
    halves,
    hold_lease,
    insert_batches,
    insert_frozen,
    keyed,
    kill_all,
    lay_files,
    leave_behind,
    read_until_stopped,
    replace_files,
    replace_until_stopped,
    rewrite_batch,
    rewrite_once,
    rows_of,
    verify_until_stopped,
)
from test_lost_commits import InCommit, Server, Wires

SECONDS = float(os.environ.get("LAKEBOOK_TEST_SECONDS", "4"))
#: A race that has not shown enough by then never will.
LONGEST = 120 + 2 * SECONDS


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(request.param), tmp_path)


@pytest.fixture
def postgres_place(make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(POSTGRESQL), tmp_path)


@contextmanager
def held_at(point: str, call: Callable[[], Any]) -> Iterator[Held]:
    """Start `call` in a thread, and return when it stands at a failpoint for the first time."""
    held = Held(call)

    def stand() -> None:
        if not held.go_on.is_set():
            held.stand()

    with failpoints.armed(point, stand):
        held.thread.start()
        assert held.reached.wait(PATIENCE), held.error
        try:
            yield held
        finally:
            held.go_on.set()
            held.thread.join(PATIENCE)


def check_sound(book: Book) -> None:
    checked = book.verify()
    assert checked.ok, checked.findings[:5]


# --- readers, while files are replaced and deleted -----------------------------


class Race:
    """Children that work against each other, while something is done to them."""

    def __init__(self, *children: Child) -> None:
        self.children = list(children)
        self.told: Counter[str] = Counter()

    def run(self, least: Mapping[str, int], interfere: Callable[[], None]) -> None:
        """For some seconds, and until there is enough of everything; then stop them."""
        clock = SystemClock()
        begun = clock.monotonic()
        while (spent := clock.monotonic() - begun) < LONGEST:
            if spent >= SECONDS and all(self.told[kind] >= number for kind, number in least.items()):
                break
            self.listen(1.0)
            interfere()
        for child in self.children:
            child.stop()
            for fact in child.facts():
                self._count(fact)
            assert child.end() == 0
        assert all(self.told[kind] >= number for kind, number in least.items()), self.told

    def listen(self, seconds: float) -> None:
        """Take what the children tell, or wait for something to be told."""
        speaking = {child.connection: child for child in self.children}
        for connection in wait(list(speaking), seconds):
            self._count(speaking[connection].hear())  # type: ignore[index]

    def replace(self, index: int, another: Child) -> None:
        """Kill a child; another takes its place."""
        mortal = self.children[index]
        mortal.kill()
        for fact in mortal.facts():
            self._count(fact)
        assert mortal.end() == -signal.SIGKILL
        self.told["killed"] += 1
        self.children[index] = another

    def _count(self, fact: tuple[Any, ...]) -> None:
        self.told[fact[0]] += fact[1] if fact[0] == "deleted" else 1


def with_keys(book: Book) -> Table:
    """A table that has every key once, in a few files."""
    table = book.tables.create(TABLE, SCHEMA)
    for start in range(0, KEYS, KEYS // 6):
        table.insert_arrow(keyed(range(start, start + KEYS // 6)))
    return table


def test_no_reader_fails_or_sees_a_wrong_row_while_files_are_replaced_and_deleted(
    place: Place, soak: Callable[[str], None]
) -> None:
    table = with_keys(place.open())
    settings = {**place.settings, "temporary_file_grace": 0, "sweep_grace": 0, "lock_timeout": 60}
    given = (place.target, settings)
    race = Race(
        Child(clean_until_stopped, *given),
        *(Child(read_until_stopped, *given, seed) for seed in range(3)),
        *(Child(replace_until_stopped, *given, seed) for seed in range(2)),
        Child(verify_until_stopped, *given),
    )
    chance = random.Random(KEYS)
    patience = 1

    def kill_the_cleaner() -> None:
        nonlocal patience
        if race.told["deleted"] >= patience:
            patience = race.told["deleted"] + chance.randint(1, 10)
            race.replace(0, Child(clean_until_stopped, *given))

    race.run({"read": 30, "replaced": 30, "deleted": 30, "killed": 3, "verified": 3}, kill_the_cleaner)
    assert table.count() == KEYS
    check_that_only_what_counts_is_left(place)
    told = race.told
    soak(
        f"{place.kind}: {told['read']:,} reads under a lease while {told['replaced']:,} changes replaced files and"
        f" {told['deleted']:,} files were deleted without a grace by a cleaner that was killed {told['killed']:,}"
        f" times; no reader failed or saw a wrong row, and verify found nothing {told['verified']:,} times"
    )


def test_whoever_was_frozen_for_too_long_is_refused_and_sees_no_wrong_row(
    place: Place, soak: Callable[[str], None]
) -> None:
    table = with_keys(place.open())
    settings = {**place.settings, **IMPATIENT, "lease_seconds": 0.2, "lock_timeout": 60}
    given = (place.target, settings)
    frozen = [
        *(Child(read_until_stopped, *given, seed, freezes=True) for seed in range(2)),
        *(Child(replace_until_stopped, *given, seed, freezes=True) for seed in range(2)),
    ]
    race = Race(Child(clean_until_stopped, *given, freezes=True), *frozen)
    chance = random.Random(KEYS)
    clock = SystemClock()

    def freeze_somebody() -> None:
        one = chance.choice(frozen)
        one.freeze()
        begun = clock.monotonic()
        # Longer than it takes until it is taken for dead, unless it holds the lock that the cleaner needs.
        while clock.monotonic() - begun < 0.7:
            race.listen(0.1)
        one.wake()
        race.told["frozen"] += 1

    race.run({"read": 20, "replaced": 20, "deleted": 20, "frozen": 5, "too late": 1}, freeze_somebody)
    assert table.count() == KEYS
    check_rows(table.to_arrow(), range(KEYS))
    check_that_only_what_counts_is_left(place)
    told = race.told
    soak(
        f"{place.kind}: processes frozen {told['frozen']:,} times among {told['read']:,} reads and"
        f" {told['replaced']:,} changes; {told['too late']:,} were refused, none saw or left a wrong row"
    )


# --- a lease against the cleaner -----------------------------------------------


@pytest.fixture
def replaced(place: Place) -> tuple[Book, Table]:
    """A table whose version 1 has a file that version 2 has no more."""
    book = place.open(temporary_file_grace=0)
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    replace_files(book, table, list(table.plan()), halves(rows_of(1)))
    return book, table


def expire(book: Book) -> Any:
    return book.cleaner.expire(seconds=0, versions=1)


def at_version(table: Table, version: int | None) -> Callable[[], Any]:
    return lambda: table.pin(version=version)


def test_an_expiry_waits_for_a_lease_in_flight_and_keeps_what_it_needs(
    place: Place, replaced: tuple[Book, Table]
) -> None:
    book, table = replaced
    janitor = place.open(clock=later(), temporary_file_grace=0)
    with held_before_commit(at_version(table, 1)) as leasing:
        expiring = started(lambda: expire(janitor))
        wait_until_blocked(book)
        assert expiring.thread.is_alive()
        pinned = leasing.finish()
    assert expiring.finish().files == 0
    with pinned:
        assert janitor.cleaner.delete_expired_temporary_files(wait=False).files == 0
        assert pinned.to_arrow().num_rows == ROWS
        check_sound(book)
    assert expire(janitor).files == 1
    assert janitor.cleaner.delete_expired_temporary_files().files == 1
    check_sound(book)


def test_a_lease_waits_for_an_expiry_in_flight_and_is_refused(place: Place, replaced: tuple[Book, Table]) -> None:
    book, table = replaced
    janitor = place.open(clock=later(), temporary_file_grace=0)
    with held_before_commit(lambda: expire(janitor)) as expiring:
        leasing = started(at_version(table, 1))
        wait_until_blocked(book)
        assert leasing.thread.is_alive()
        assert expiring.finish().files == 1
    with pytest.raises(VersionExpired):
        leasing.finish()
    check_sound(book)


def test_a_lease_on_the_newest_version_waits_for_an_expiry_and_is_safe(
    place: Place, replaced: tuple[Book, Table]
) -> None:
    book, table = replaced
    janitor = place.open(clock=later(), temporary_file_grace=0)
    with held_before_commit(lambda: expire(janitor)) as expiring:
        leasing = started(at_version(table, None))
        wait_until_blocked(book)
        expiring.finish()
    with leasing.finish() as pinned:
        assert janitor.cleaner.delete_expired_temporary_files().files == 1
        assert pinned.version == 2
        assert pinned.to_arrow().num_rows == ROWS
    check_sound(book)


def test_a_lease_waits_while_files_are_marked_and_none_of_its_own_is_deleted(
    place: Place, replaced: tuple[Book, Table]
) -> None:
    book, table = replaced
    janitor = place.open(clock=later(), temporary_file_grace=0)
    expire(janitor)
    with held_before_commit(janitor.cleaner.delete_expired_temporary_files) as cleaning:
        old, new = started(at_version(table, 1)), started(at_version(table, None))
        wait_until_blocked(book)
        assert old.thread.is_alive()
        assert new.thread.is_alive()
        assert cleaning.finish().files == 1
    with pytest.raises(VersionExpired):
        old.finish()
    with new.finish() as pinned:
        assert pinned.to_arrow().num_rows == ROWS
    check_sound(book)


def test_marking_waits_for_a_lease_in_flight_and_deletes_nothing_it_needs(
    place: Place, replaced: tuple[Book, Table]
) -> None:
    book, table = replaced
    janitor = place.open(clock=later(), temporary_file_grace=0)
    expire(janitor)
    with held_before_commit(at_version(table, 2)) as leasing:
        cleaning = started(janitor.cleaner.delete_expired_temporary_files)
        wait_until_blocked(book)
        pinned = leasing.finish()
    assert cleaning.finish().files == 1
    with pinned:
        assert pinned.to_arrow().num_rows == ROWS
    check_sound(book)


def test_a_reader_keeps_its_version_while_everything_after_it_goes(place: Place) -> None:
    book = place.open(temporary_file_grace=0)
    janitor = place.open(clock=later(), temporary_file_grace=0)
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    with table.pin() as pinned:
        for _ in range(3):
            replace_files(book, table, list(table.plan()), halves(rows_of(1)))
            expire(janitor)
            janitor.cleaner.delete_expired_temporary_files(wait=False)
        table.delete("true")
        assert pinned.to_arrow()["number"].to_pylist() == list(range(ROWS))
    expire(janitor)
    assert janitor.cleaner.delete_expired_temporary_files().files == 7
    assert objects_of(book) == set()
    check_sound(book)


def test_a_frozen_reader_whose_lease_was_taken_away_is_told_so(place: Place) -> None:
    clock = later(0)
    book = place.open(clock=clock)
    janitor = place.open(clock=clock, temporary_file_grace=0)
    table = create_table(book)
    table.insert_arrow(rows_of(1, 2))
    with table.pin() as pinned:
        table.delete("batch = 1")
        # Nobody renews the lease: its process is frozen. The janitor waits, and takes it for dead.
        clock.advance(61)
        janitor.cleaner.expire(seconds=0, versions=1, wait=True)
        clock.advance(1)
        assert janitor.cleaner.delete_expired_temporary_files().files == 1
        # It wakes, and must not take what is left of its version for the whole.
        with pytest.raises((LeaseLost, VersionExpired)):
            list(pinned.plan())
        with pytest.raises((LeaseLost, VersionExpired)):
            pinned.count()
        with pytest.raises(LeaseLost):
            pinned.to_arrow()
    check_sound(book)


def test_a_reader_that_froze_before_it_heard_of_its_lease_is_told_that_it_is_lost(place: Place) -> None:
    clock = later(0)
    book = place.open(clock=clock)
    janitor = place.open(clock=clock, temporary_file_grace=0)
    table = create_table(book)
    table.insert_arrow(rows_of(1, 2))
    with held_at("lease.taken", table.pin) as leasing:
        table.delete("batch = 1")
        clock.advance(61)
        janitor.cleaner.expire(seconds=0, versions=1, wait=True)
        clock.advance(1)
        assert janitor.cleaner.delete_expired_temporary_files().files == 1
        with leasing.finish() as pinned, pytest.raises(LeaseLost):
            pinned.to_arrow()
    check_sound(book)


def test_a_plan_without_a_lease_is_whole_or_refused(place: Place) -> None:
    book = place.open()
    janitor = place.open(clock=later(), temporary_file_grace=0)
    table = create_table(book)
    table.insert_arrow(rows_of(1, 2))
    plan = table.plan()
    table.delete("batch = 1")
    expire(janitor)
    assert janitor.cleaner.delete_expired_temporary_files().files == 1
    with pytest.raises(VersionExpired):
        list(plan)


def test_a_reader_that_reads_for_longer_than_a_lease_lasts_keeps_it(place: Place) -> None:
    book = place.open(lease_seconds=0.3)
    janitor = place.open(lease_seconds=0.3, temporary_file_grace=0)
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    with table.pin() as pinned:
        table.delete("true")
        cleaner = janitor.cleaner
        clock = SystemClock()
        begun = clock.monotonic()
        while clock.monotonic() - begun < 1.0:
            cleaner.expire(seconds=0, versions=1, wait=True)
            cleaner.delete_expired_temporary_files()
        assert pinned.to_arrow().num_rows == ROWS
    check_sound(book)


def test_the_lease_of_a_killed_reader_holds_up_the_cleaner_only_for_a_while(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    reader = Child(hold_lease, place.target, place.settings)
    reader.wait_for("pinned")
    reader.kill()
    assert reader.end() == -signal.SIGKILL
    table.delete("true")
    clock = later()
    janitor = place.open(clock=clock, temporary_file_grace=0)
    # As a timer does it: one after the other, now and then.
    for _ in range(3):
        expire(janitor)
        janitor.cleaner.delete_expired_temporary_files()
        clock.advance(600)
    assert objects_of(book) == set()
    check_sound(book)


# --- a frozen insert against the sweeper ---------------------------------------


def sweep_until_quiet(place: Place) -> Book:
    """Sweep at a later time until no insert is left to look at; the sweeper's book."""
    clock = later()
    janitor = place.open(clock=clock, sweep_grace=0)
    for _ in range(3):
        assert janitor.cleaner.sweep().failed == []
        clock.advance(1)
    assert janitor._registry.all(EVERY_INSERT, "", 10) == []
    return janitor


@pytest.mark.parametrize("point", ["insert.reserved", "insert.arrow_written", "insert.chunk_staged"])
def test_an_insert_that_wakes_after_it_was_fenced_and_swept_leaves_nothing(
    place: Place, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_files, "STAGED", 2)
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    kept = objects_of(book)
    with held_at(point, lambda: table.insert_arrow(rows_of(2, 3, 4))) as frozen:
        janitor = sweep_until_quiet(place)
        assert objects_of(book) == kept
        check_sound(janitor)
        with pytest.raises(CommitAborted):
            frozen.finish()
    assert batches_of(book) == {1}
    assert objects_of(book) == kept
    checked = book.verify()
    assert checked.ok, checked.findings
    assert checked.unfinished == ()


@pytest.mark.parametrize("point", ["insert.reserved", "insert.arrow_written", "insert.chunk_staged"])
def test_a_frozen_process_whose_insert_was_fenced_is_refused(place: Place, point: str) -> None:
    book = place.open()
    create_table(book)
    frozen = Child(insert_frozen, place.target, place.settings, point, [2, 3, 4])
    frozen.wait_for("freezing")
    frozen.wait_until_frozen()
    sweep_until_quiet(place)
    assert objects_of(book) == set()
    frozen.wake()
    assert frozen.wait_for("refused") == ("refused", "CommitAborted")
    assert frozen.end() == 0
    assert batches_of(book) == set()
    assert objects_of(book) == set()
    check_sound(book)


def test_a_frozen_process_that_wakes_and_then_dies_leaves_no_staged_rows(place: Place) -> None:
    book = place.open()
    create_table(book)
    frozen = Child(
        insert_frozen,
        place.target,
        place.settings,
        "insert.arrow_written",
        [2, 3, 4],
        points="insert.chunk_staged=kill@1,insert.aborted=kill@1",
    )
    frozen.wait_for("freezing")
    frozen.wait_until_frozen()
    sweep_until_quiet(place)
    frozen.wake()
    assert frozen.end() == -signal.SIGKILL
    assert objects_of(book) == set()
    check_sound(book)


def test_a_sweeper_waits_for_a_commit_in_flight_and_deletes_nothing_that_counts(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    janitor = place.open(clock=later(), sweep_grace=0, lock_timeout=PATIENCE)
    # The first transaction opens the commit row, the second is the insert.
    with held_before_commit(lambda: table.insert_arrow(rows_of(1)), skip=1) as inserting:
        sweeping = started(janitor.cleaner.sweep)
        wait_until_blocked(book)
        assert sweeping.thread.is_alive(), (sweeping.result, sweeping.error)
        assert inserting.finish().rows == ROWS
    swept = sweeping.finish()
    assert (swept.fenced, swept.objects, swept.failed) == (1, 0, [])
    assert batches_of(book) == {1}
    check_sound(book)
    check_that_only_what_counts_is_left(place)
    assert batches_of(book) == {1}


def test_an_insert_that_wakes_while_it_is_swept_leaves_nothing(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    janitor = place.open(clock=later(), sweep_grace=0)
    with (
        held_at("insert.arrow_written", lambda: table.insert_arrow(rows_of(1))) as inserting,
        held_at("sweep.fenced", janitor.cleaner.sweep) as sweeping,
    ):
        with pytest.raises(CommitAborted):
            inserting.finish()
        assert sweeping.finish().failed == []
    assert objects_of(book) == set()
    check_that_only_what_counts_is_left(place)


def test_a_sweeper_passes_by_a_transaction_that_stays_open(postgres_place: Place) -> None:
    book = postgres_place.open()
    table = create_table(book)
    leave_behind(book, table)
    janitor = postgres_place.open(clock=later(), sweep_grace=0, lock_timeout=0.1, retry_attempts=2)
    with held_before_commit(lambda: table.insert_arrow(rows_of(1)), skip=1) as inserting:
        swept = janitor.cleaner.sweep()
        assert (swept.fenced, swept.objects, len(swept.failed)) == (2, 1, 1)
        inserting.finish()
    assert batches_of(book) == {1}
    check_sound(book)


def test_an_insert_into_a_table_that_is_dropped_meanwhile_leaves_nothing(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    with held_at("insert.arrow_written", lambda: table.insert_arrow(rows_of(2))) as inserting:
        book.tables.drop(TABLE)
        janitor = place.open(clock=later(), temporary_file_grace=0)
        for _ in range(2):
            expire(janitor)
            janitor.cleaner.delete_expired_temporary_files()
        assert janitor.verify().checked["tables"] == 0
        with pytest.raises(TableNotFound):
            inserting.finish()
    check_that_only_what_counts_is_left(place)
    assert objects_of(book) == set()


def test_a_drop_waits_for_an_insert_in_flight_and_takes_its_files_along(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    other = place.open(lock_timeout=PATIENCE)
    with held_before_commit(lambda: table.insert_arrow(rows_of(1)), skip=1) as inserting:
        dropping = started(lambda: other.tables.drop(TABLE))
        wait_until_blocked(book)
        inserting.finish()
    dropping.finish()
    check_that_only_what_counts_is_left(place)
    assert objects_of(book) == set()


def test_a_reader_of_a_dropped_table_keeps_its_files(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    janitor = place.open(clock=later(), temporary_file_grace=0)
    with table.pin() as pinned:
        book.tables.drop(TABLE)
        expire(janitor)
        assert janitor.cleaner.delete_expired_temporary_files(wait=False).files == 0
        assert pinned.to_arrow().num_rows == ROWS
    check_that_only_what_counts_is_left(place)
    assert objects_of(book) == set()


def test_an_insert_that_says_it_is_alive_is_not_fenced(place: Place) -> None:
    book = place.open(**IMPATIENT)
    table = create_table(book)
    janitor = place.open(**IMPATIENT)
    clock = SystemClock()
    with held_at("insert.arrow_written", lambda: table.insert_arrow(rows_of(1))) as inserting:
        begun = clock.monotonic()
        # It may be fenced if this machine was too busy to let it renew in time; then it must be refused.
        fenced = 0
        while clock.monotonic() - begun < 0.5 and not fenced:
            fenced = janitor.cleaner.sweep().fenced
        if fenced:
            with pytest.raises(CommitAborted):
                inserting.finish()
        else:
            assert inserting.finish().rows == ROWS
    assert batches_of(book) == (set() if fenced else {1})
    check_sound(book)


def test_an_appender_that_was_fenced_keeps_its_rows_and_stores_them_once(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    with table.appender(max_age=3600) as appender:
        appender.append(rows_of(1))
        with held_at("appender.rotated", appender.flush) as frozen:
            sweep_until_quiet(place)
            with pytest.raises(CommitAborted):
                frozen.finish()
        assert batches_of(book) == set()
        assert objects_of(book) == set()
        appender.append(rows_of(2))
        appender.flush()
    assert batches_of(book) == {1, 2}
    check_sound(book)


def test_two_sweepers_at_once_do_no_harm(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    for _ in range(5):
        leave_behind(book, table)
    one, two = (place.open(clock=later(), sweep_grace=0) for _ in range(2))
    with held_at("sweep.fenced", one.cleaner.sweep) as first:
        assert two.cleaner.sweep().failed == []
        assert first.finish().failed == []
    assert batches_of(book) == {1}
    assert len(objects_of(book)) == 1
    check_sound(book)


@pytest.mark.parametrize("point", ["clean.marked", "clean.object_deleted", "clean.forgotten"])
def test_two_cleaners_at_once_do_no_harm(place: Place, point: str) -> None:
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    for _ in range(3):
        replace_files(book, table, list(table.plan()), halves(rows_of(1)))
    book.tables.create("old", SCHEMA).insert_arrow(rows_of(7))
    book.tables.drop("old")
    one, two = (place.open(clock=later(), temporary_file_grace=0) for _ in range(2))
    assert expire(one).files == 6
    with held_at(point, one.cleaner.delete_expired_temporary_files) as first:
        two.cleaner.delete_expired_temporary_files()
        # The dropped table goes too, with all its rows.
        expire(two)
        assert first.finish().failed == []
    check_that_only_what_counts_is_left(place)
    assert batches_of(book) == {1}


def test_a_cleaner_that_waited_while_a_dropped_table_went_is_not_misled(postgres_place: Place) -> None:
    place = postgres_place
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    table.delete("true")
    old = book.tables.create("old", SCHEMA)
    old.insert_arrow(rows_of(7))
    gone = old.record
    book.tables.drop("old")
    one, two = (place.open(clock=later(), temporary_file_grace=0) for _ in range(2))
    expire(one)
    with (
        held_at("clean.object_deleted", one.cleaner.delete_expired_temporary_files) as first,
        held_before_commit(table.pin) as leasing,
    ):
        # The other comes to the same files, and has to wait for a lease on the first of the tables.
        second = started(two.cleaner.delete_expired_temporary_files)
        wait_until_blocked(book)
        assert first.finish().files == 2
        one.cleaner.expire(gone)
        leasing.finish().lease.close()
    assert second.finish().failed == []
    check_that_only_what_counts_is_left(place)


# --- writers against writers ---------------------------------------------------


def told_by_all(children: Sequence[Child]) -> Counter[str]:
    told = Counter(fact[0] for child in children for fact in child.facts())
    assert [child.end() for child in children] == [0] * len(children)
    return told


def test_inserts_of_several_processes_all_land_and_the_totals_stay_exact(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    settings = {**place.settings, "lock_timeout": 60}
    children = [Child(insert_batches, place.target, settings, first, 8) for first in range(0, 400, 100)]
    assert told_by_all(children)["inserted"] == 32
    expected = {first + number for first in range(0, 400, 100) for number in range(8)}
    assert batches_of(book) == expected
    described = table.describe()
    assert (described.version, described.row_count, described.file_count) == (32, 32 * ROWS, 32)
    assert described.total_size == sum(
        os.stat(book.lake.store.local_path(path) or "").st_size for path in objects_of(book)
    )
    extremes = table.min_max("batch")
    assert extremes is not None
    assert (extremes.least, extremes.largest) == (0, 307)
    assert [item.added_rows for item in table.history() if item.version] == [ROWS] * 32
    check_sound(book)


def test_changes_of_different_files_never_meet(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1, 2, 3, 4))
    settings = {**place.settings, "lock_timeout": 60}
    children = [Child(rewrite_batch, place.target, settings, batch, 6) for batch in (1, 2, 3, 4)]
    assert told_by_all(children) == {"replaced": 24}
    assert batches_of(book) == {1, 2, 3, 4}
    assert (table.count(), table.version, table.record.file_count) == (4 * ROWS, 25, 8)
    check_sound(book)


def test_of_several_changes_of_one_file_exactly_one_wins(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    settings = {**place.settings, "lock_timeout": 60}
    children = [Child(rewrite_once, place.target, settings, 1) for _ in range(4)]
    for child in children:
        child.wait_for("ready")
    for child in children:
        child.stop()
    assert told_by_all(children) == {"replaced": 1, "refused": 3}
    assert batches_of(book) == {1}
    assert (table.version, table.record.file_count) == (2, 2)
    assert len(objects_of(book)) == 3
    check_sound(book)


def test_a_change_waits_for_another_of_the_same_file_and_is_then_refused(place: Place) -> None:
    book = place.open()
    table = create_table(book)
    table.insert_arrow(rows_of(1, 2))
    files = list(table.plan("batch = 1"))
    other = place.open(lock_timeout=PATIENCE).table(TABLE)
    # A deletion takes a lease and opens its commit row first.
    with held_before_commit(lambda: table.delete("batch = 1"), skip=2) as deleting:
        replacing = started(lambda: replace_files(book, other, files, halves(rows_of(1))))
        wait_until_blocked(book)
        assert deleting.finish().removed_rows == ROWS
    with pytest.raises(FilesChanged) as refused:
        replacing.finish()
    assert isinstance(refused.value, TransientError)
    assert batches_of(book) == {2}
    assert len(objects_of(book)) == 2
    check_sound(book)


def test_of_two_who_add_one_file_exactly_one_wins_and_the_file_stays(place: Place) -> None:
    book = place.open()
    tables = [book.tables.create(name, SCHEMA) for name in ("a", "b")]
    lay_files(book, 1)
    other = place.open(lock_timeout=PATIENCE).table("b")
    with held_before_commit(lambda: tables[0].add_files(GIVEN[:1]), skip=1) as first:
        second = started(lambda: other.add_files(GIVEN[:1]))
        wait_until_blocked(book)
        assert first.finish().rows == ROWS
    with pytest.raises(PathInUse):
        second.finish()
    assert [table.count() for table in tables] == [ROWS, 0]
    assert tables[0].to_arrow().num_rows == ROWS
    check_that_only_what_counts_is_left(place)
    assert objects_of(book) == set(GIVEN[:1])


# Each on a table of its own. Whatever waits for another's lock fails: the time-out is short.
CHANGES: dict[str, Callable[[Book], object]] = {
    "insert into a": lambda book: book.table("a").insert_arrow(rows_of(9)),
    "insert into b": lambda book: book.table("b").insert_arrow(rows_of(9)),
    "deletion from c": lambda book: book.table("c").delete("batch = 1"),
    "replacement in d": lambda book: replace_files(
        book, book.table("d"), list(book.table("d").plan()), halves(rows_of(1))
    ),
    "properties of e": lambda book: book.table("e").set_properties(owner="x"),
    "expiry of f": lambda book: book.cleaner.expire(book.table("f").record, seconds=0, versions=1),
    "lease on g": lambda book: book.table("g").pin(),
    "drop of h": lambda book: book.tables.drop("h"),
    "new name for i": lambda book: book.tables.rename("i", "j"),
    "creation of k": lambda book: book.tables.create("k", SCHEMA),
    "publishing of l": lambda book: book.table("l").publish(),
    "append to a topic": lambda book: book.metadata.add_segment(describe("orders", 0)),
    "offset of a group": lambda book: book.metadata.commit_offset("g", "orders", 0, 0),
    "clean-up of dropped ones": lambda book: book.cleaner.delete_expired_temporary_files(wait=False),
    "sweep": lambda book: book.cleaner.sweep(),
}
# How many transactions come before the one to hold.
BEFORE = {"insert": 1, "deletion": 2, "replacement": 1, "creation": 1, "publishing": 1, "append": 1}


@pytest.mark.parametrize("held", CHANGES)
def test_changes_of_different_tables_do_not_wait_for_each_other(postgres_place: Place, held: str) -> None:
    place = postgres_place
    with place.open(temporary_file_grace=0) as book:
        book.metadata.create_topic("orders")
        for name in "abcdefghil":
            book.tables.create(name, SCHEMA).insert_arrow(rows_of(1))
        book.tables.create("old", SCHEMA).insert_arrow(rows_of(1))
        book.tables.drop("old")
        book.cleaner.expire()
        leave_behind(book, book.table("a"))
    book = place.open(clock=later(), lock_timeout=0.5, retry_attempts=1, sweep_grace=7200)
    with held_before_commit(lambda: CHANGES[held](book), skip=BEFORE.get(held.split()[0], 0)) as holding:
        for name, change in CHANGES.items():
            if name != held:
                change(book)
        holding.finish()
    check_sound(book)


def test_readers_and_writers_of_one_table_do_not_wait_for_each_other(postgres_place: Place) -> None:
    book = postgres_place.open(lock_timeout=0.5, retry_attempts=1)
    table = create_table(book)
    table.insert_arrow(rows_of(1))
    with held_before_commit(lambda: table.insert_arrow(rows_of(2)), skip=1) as inserting:
        with table.pin() as pinned:
            assert pinned.to_arrow().num_rows == ROWS
        inserting.finish()
    with held_before_commit(table.pin) as leasing:
        table.insert_arrow(rows_of(3))
        with table.pin() as pinned:
            assert pinned.to_arrow().num_rows == 3 * ROWS
        leasing.finish().lease.close()
    check_sound(book)


# --- a connection that is lost during COMMIT -----------------------------------


class Lost:
    """A book whose COMMITs can be made to hang, and whose connections can be cut."""

    def __init__(self, place: Place, wires: Wires) -> None:
        self.book = place.open()
        self.table = create_table(self.book)
        self.server, self.wires = Server(place.target), wires

    def cut_during(self, call: Callable[[], Any]) -> tuple[InCommit, int]:
        """Cut the wire of a change while its COMMIT is under way; the call, and the server's process."""
        self.server.shut_gate()
        calling = InCommit(call)
        pid = self.server.wait_for("COMMIT", "advisory")
        self.wires.cut(pid)
        return calling, pid


@pytest.fixture
def lost(postgres_place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lost]:
    wires = Wires()
    monkeypatch.setattr(PostgreSQL, "connect", wires.watch(PostgreSQL.connect))
    lost = Lost(postgres_place, wires)
    yield lost
    lost.server.close()


def in_final_commit(lost: Lost, held: Held) -> int:
    """Let an insert go on into its last COMMIT, and cut its wire there; the server's process."""
    lost.server.shut_gate()
    held.go_on.set()
    pid = lost.server.wait_for("COMMIT", "advisory")
    lost.wires.cut(pid)
    # It asks for the outcome while the COMMIT is still in flight, and has to wait for it.
    lost.server.wait_for("UPDATE commits%", "transactionid")
    return pid


def test_an_insert_that_landed_after_its_wire_was_cut_is_there_once(lost: Lost) -> None:
    with held_at("insert.arrow_written", lambda: lost.table.insert_arrow(rows_of(1))) as inserting:
        in_final_commit(lost, inserting)
        lost.server.open_gate()
        assert inserting.finish().version == 1
    assert lost.book.metrics.values()["lakebook_commits_settled_total{outcome=committed}"] == 1
    assert batches_of(lost.book) == {1}
    assert lost.table.version == 1
    check_sound(lost.book)


def test_an_insert_that_died_after_its_wire_was_cut_leaves_nothing(lost: Lost) -> None:
    with held_at("insert.arrow_written", lambda: lost.table.insert_arrow(rows_of(1))) as inserting:
        pid = in_final_commit(lost, inserting)
        lost.server.terminate(pid)
        lost.server.open_gate()
        with pytest.raises(CommitAborted):
            inserting.finish()
    assert batches_of(lost.book) == set()
    assert objects_of(lost.book) == set()
    lost.table.insert_arrow(rows_of(1))
    assert batches_of(lost.book) == {1}
    assert lost.table.version == 1
    check_sound(lost.book)


@pytest.mark.parametrize("lands", [True, False])
def test_an_appender_whose_wire_was_cut_stores_its_rows_once(lost: Lost, lands: bool) -> None:
    with lost.table.appender(max_age=3600) as appender:
        appender.append(rows_of(1))
        with held_at("appender.rotated", appender.flush) as flushing:
            pid = in_final_commit(lost, flushing)
            if not lands:
                lost.server.terminate(pid)
            lost.server.open_gate()
            if lands:
                assert flushing.finish().rows == ROWS
            else:
                with pytest.raises(CommitAborted):
                    flushing.finish()
        appender.append(rows_of(2))
    assert batches_of(lost.book) == {1, 2}
    assert len(objects_of(lost.book)) == 2
    check_sound(lost.book)


@pytest.mark.parametrize("lands", [True, False])
def test_the_files_of_an_insert_stay_while_nobody_knows_whether_it_landed(
    lost: Lost, postgres_place: Place, lands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(database: PostgreSQL) -> Any:
        raise psycopg.OperationalError("the server does not answer")

    book = postgres_place.open(retry_seconds=0)
    table = book.table(TABLE)
    with held_at("insert.arrow_written", lambda: table.insert_arrow(rows_of(1))) as inserting:
        lost.server.shut_gate()
        inserting.go_on.set()
        pid = lost.server.wait_for("COMMIT", "advisory")
        with monkeypatch.context() as patch:
            patch.setattr(PostgreSQL, "connect", away)
            lost.wires.cut(pid)
            with pytest.raises(CommitOutcomeUnknown):
                inserting.finish()
    assert len(objects_of(lost.book)) == 1
    if not lands:
        lost.server.terminate(pid)
    lost.server.open_gate()
    # Whoever sweeps learns what became of it.
    check_that_only_what_counts_is_left(postgres_place)
    assert batches_of(lost.book) == ({1} if lands else set())


def test_an_insert_whose_reservation_was_lost_is_reserved_once(lost: Lost) -> None:
    calling, pid = lost.cut_during(lambda: lost.table.insert_arrow(rows_of(1)))
    lost.server.wait_for("INSERT INTO commits%", "transactionid")
    lost.server.terminate(pid)
    lost.server.open_gate()
    assert calling.finish().rows == ROWS
    assert batches_of(lost.book) == {1}
    assert len(lost.book._registry.all(EVERY_INSERT, "", 10)) == 1
    check_sound(lost.book)


def test_a_connection_lost_before_the_commit_of_an_insert_is_replaced(lost: Lost) -> None:
    cut = threading.Event()

    def lose() -> None:
        if not cut.is_set():
            cut.set()
            lost.server.terminate_all("idle in transaction")

    with failpoints.armed("change.written", lose):
        assert lost.table.insert_arrow(rows_of(1)).version == 1
    assert cut.is_set()
    assert batches_of(lost.book) == {1}
    check_sound(lost.book)


def test_a_lease_whose_commit_was_lost_is_held_once(lost: Lost) -> None:
    lost.table.insert_arrow(rows_of(1))
    calling, _ = lost.cut_during(lost.table.pin)
    lost.server.wait_for("INSERT INTO commits%", "transactionid")
    lost.server.open_gate()
    with calling.finish() as pinned:
        assert pinned.to_arrow().num_rows == ROWS
        assert lost.book.verify().checked["leases"] == 1
    assert lost.book.verify().checked["leases"] == 0


def test_files_are_forgotten_once_where_the_commit_of_the_cleaner_was_lost(lost: Lost, postgres_place: Place) -> None:
    lost.table.insert_arrow(rows_of(1))
    lost.table.delete("true")
    janitor = postgres_place.open(clock=later(), temporary_file_grace=0)
    expire(janitor)
    with held_at("clean.object_deleted", janitor.cleaner.delete_expired_temporary_files) as cleaning:
        lost.server.shut_gate()
        cleaning.go_on.set()
        lost.wires.cut(lost.server.wait_for("COMMIT", "advisory"))
        lost.server.wait_for("INSERT INTO commits%", "transactionid")
        lost.server.open_gate()
        assert cleaning.finish().files == 1
    assert objects_of(lost.book) == set()
    check_sound(lost.book)
