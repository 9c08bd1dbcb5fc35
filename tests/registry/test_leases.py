"""What a lease pins stays readable, and a lease ends only when its reader is certainly gone."""

from __future__ import annotations

from typing import Any

import pytest

from books import Place
from lake import files_of, ids, in_memory, insert, lay, numbers, objects, own_warehouse, records, replace_bytes, run_sql  # noqa: F401
from lakebook import Book
from lakebook.clock import ManualClock
from lakebook.errors import (
    BookClosed,
    LakebookError,
    LeaseLost,
    ReadFailed,
    RegistryCorrupt,
    TableNotFound,
    VersionExpired,
)
from lakebook.lake.cleaning import Cleaner
from lakebook.lake.table import Table
from lakebook.registry import schema

NOW = 1_700_000_000_000
LEASE = 60.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
def timed(place: Place, clock: ManualClock) -> Book:
    """A book whose time the test decides: retired files may go at once."""
    return place.open(clock=clock, lease_seconds=LEASE, temporary_file_grace=0)


def leases(book: Book) -> list[str]:
    return [row["id"] for row in records(book, schema.leases)]


def clean(cleaner: Cleaner, **how: Any) -> int:
    """Expire all that may be, and delete what that has retired; the number of files deleted."""
    clock = cleaner._lake.clock
    if isinstance(clock, ManualClock):
        # The times of versions run ahead of a clock that stands still.
        clock.advance(0.02)
    cleaner.expire(seconds=0, versions=1)
    return cleaner.delete_expired_temporary_files(**{"wait": False, **how}).files


# --- pinning -------------------------------------------------------------------


def test_a_lease_is_recorded_and_ends_with_its_block(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1], [2])
    with table.pin(version=1) as pinned:
        (row,) = records(timed, schema.leases)
        assert (row["id"], row["table_id"], row["version"]) == (pinned.lease.id, table.id, 1)
        assert (row["created_at"], row["expires_at"]) == (NOW, NOW + LEASE * 1000)
        assert row["holder"]
        assert timed.verify().ok
    assert leases(timed) == []
    for call in (pinned.plan, pinned.to_arrow, pinned.lease.check, pinned.lease.confirm):
        with pytest.raises(LeaseLost):
            call()
    pinned.lease.close()
    table.to_arrow()
    assert leases(timed) == []


def test_a_pinned_version_shows_the_same_whatever_happens(timed: Book) -> None:
    table = numbers(timed, "t", [1, 2], [3])
    with table.pin() as pinned:
        insert(table, {"id": 4})
        table.delete("id = 3")
        with table.update_schema() as update:
            update.rename_column("id", "key").add_column("id", "STRING")
        timed.tables.rename("t", "u")
        assert clean(timed.cleaner) == 0
        assert ids(pinned) == [1, 2, 3]
        assert ids(pinned, "id > 1") == [2, 3]
        assert pinned.count() == 3
        assert [row for batch in pinned.to_batches() for row in batch.to_pylist()] == [{"id": 1}, {"id": 2}, {"id": 3}]
        assert pinned.to_arrow().schema.names == ["id"]
    assert table.to_arrow(columns=["key"]).column("key").to_pylist() == [1, 2, 4]
    assert clean(timed.cleaner) == 1
    assert timed.verify().ok


def test_nothing_that_a_lease_pins_is_deleted_and_all_else_is(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [0], [1], [2], [3])
    table.delete("id = 0")
    pin = table.pin()
    for number in (1, 2, 3):
        table.delete(f"id = {number}")
    clock.advance(1)
    result = timed.cleaner.expire(seconds=0, versions=1)
    # Only what no pinned version has: the file that had ended before.
    assert (result.files, result.min_readable) == (1, {str(table.id): 5})
    assert timed.cleaner.delete_expired_temporary_files(wait=False).files == 1
    assert ids(pin) == [1, 2, 3]
    assert timed.verify().ok
    pin.lease.close()
    assert clean(timed.cleaner) == 3
    assert objects(timed) == []
    assert timed.verify().ok


def test_a_lease_pins_all_newer_versions_too(timed: Book) -> None:
    table = numbers(timed, "t", [1])
    with table.pin(version=1):
        insert(table, {"id": 2})
        table.delete("id = 2")
        insert(table, {"id": 3})
        assert clean(timed.cleaner) == 0
        assert ids(table, version=2) == [1, 2]


@in_memory
def test_of_several_leases_the_one_on_the_oldest_version_counts(timed: Book) -> None:
    table = numbers(timed, "t", [1], [2])
    older, newer = table.pin(version=1), table.pin()
    table.delete("true")
    cleaner = timed.cleaner
    assert clean(cleaner) == 0
    older.lease.close()
    assert clean(cleaner) == 0
    with pytest.raises(VersionExpired):
        table.pin(version=1)
    assert ids(newer) == [1, 2]
    newer.lease.close()
    assert clean(cleaner) == 2


def test_leases_of_one_table_do_not_keep_the_files_of_another(timed: Book) -> None:
    kept, gone = numbers(timed, "kept", [1]), numbers(timed, "gone", [2])
    with kept.pin():
        kept.delete("true")
        gone.delete("true")
        assert clean(timed.cleaner) == 1
        assert [file["table_id"] for file in records(timed, schema.table_files)] == [kept.id]


def test_a_lease_of_another_process_counts_as_well(shared_place: Place) -> None:
    book, other = shared_place.open(temporary_file_grace=0), shared_place.open()
    table = numbers(book, "t", [1])
    with other.table("t").pin() as pinned:
        table.delete("true")
        assert clean(book.cleaner) == 0
        assert ids(pinned) == [1]
    assert clean(book.cleaner) == 1


def test_closing_the_book_ends_its_leases(shared_place: Place) -> None:
    book, other = shared_place.open(), shared_place.open()
    table = numbers(book, "t", [1])
    pins = [table.pin() for _ in range(3)]
    assert len(leases(other)) == 3
    book.close()
    assert leases(other) == []
    for pinned in pins:
        with pytest.raises(LakebookError):
            pinned.to_arrow()
    with pytest.raises(BookClosed):
        table.pin()
    assert leases(other) == []


def test_a_dropped_table_stays_for_who_has_pinned_it(timed: Book) -> None:
    table = numbers(timed, "t", [1, 2])
    with table.pin() as pinned:
        timed.tables.drop("t")
        assert clean(timed.cleaner) == 0
        assert ids(pinned) == [1, 2]
        with pytest.raises(TableNotFound):
            table.pin()
    assert clean(timed.cleaner) == 1
    timed.cleaner.expire()
    assert records(timed, schema.tables) == []
    assert timed.verify().ok


def test_a_lease_below_the_oldest_readable_version_is_refused(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1], [2])
    clock.advance(1)
    timed.cleaner.expire(seconds=0, versions=1)
    for version in (0, 1):
        with pytest.raises(VersionExpired):
            table.pin(version=version)
    assert leases(timed) == []
    assert table.pin().version == 2


def test_without_a_horizon_nothing_can_be_pinned_or_planned(book: Book) -> None:
    table = numbers(book, "t", [1])
    run_sql(book, "DELETE FROM table_horizons")
    for call in (table.pin, table.plan, table.to_arrow):
        with pytest.raises(RegistryCorrupt):
            call()
    assert leases(book) == []


# --- renewing ------------------------------------------------------------------


def expires_at(book: Book) -> int:
    (row,) = records(book, schema.leases)
    return int(row["expires_at"])


def test_leases_are_renewed_while_their_process_lives(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1])
    with table.pin() as pinned:
        for number in range(1, 4):
            clock.advance(LEASE / 3)
            timed.lake.renewals.renew()
            assert expires_at(timed) == NOW + number * LEASE * 1000 / 3 + LEASE * 1000
        clock.advance(LEASE / 2)
        pinned.lease.confirm()
        assert expires_at(timed) == clock.now_ms() + LEASE * 1000
    timed.lake.renewals.renew()
    assert leases(timed) == []


@in_memory
def test_a_lease_that_had_run_out_is_good_again_if_nobody_has_removed_it(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1])
    with table.pin() as pinned:
        table.delete("true")
        clock.advance(10 * LEASE)
        # A cleaner that has only just come cannot know whether its reader is alive.
        assert clean(timed.cleaner) == 0
        timed.lake.renewals.renew()
        assert ids(pinned) == [1]
        assert expires_at(timed) == clock.now_ms() + LEASE * 1000


@in_memory
def test_a_lease_without_a_block_is_renewed_only_up_to_its_maximum(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock, lease_seconds=LEASE, lease_maximum=100.0)
    table = numbers(book, "t", [1])
    pinned = table.pin()
    pinned.lease.keep_until_closed()
    clock.advance(99)
    book.lake.renewals.renew()
    assert expires_at(book) == clock.now_ms() + LEASE * 1000
    clock.advance(1)
    book.lake.renewals.renew()
    assert expires_at(book) == clock.now_ms() + LEASE * 1000 - 1000


# --- dead leases ---------------------------------------------------------------


@pytest.fixture
def abandoned(timed: Book, clock: ManualClock) -> Table:
    """A table without rows, whose files a lease pins that nobody renews any more."""
    table = numbers(timed, "t", [1], [2])
    pinned = table.pin()
    timed.lake.renewals.let_go(pinned.lease.id)
    table.delete("true")
    clock.advance(LEASE)
    return table


def test_a_lease_is_dead_only_after_a_whole_lease_time_of_watching(
    timed: Book, abandoned: Table, clock: ManualClock
) -> None:
    cleaner = timed.cleaner
    for _ in range(4):
        assert clean(cleaner) == 0
        assert len(leases(timed)) == 1
        clock.advance(LEASE / 4)
    assert clean(cleaner) == 2
    assert leases(timed) == []
    assert objects(timed) == []
    assert abandoned.count() == 0
    assert timed.verify().ok


@in_memory
def test_a_cleaner_may_wait_for_leases_to_be_dead(timed: Book, abandoned: Table, clock: ManualClock) -> None:
    steps: list[str] = []
    before = clock.monotonic()
    result = timed.cleaner.expire(abandoned.record, seconds=0, versions=1, wait=True, progress=steps.append)
    assert result.files == 2
    assert LEASE <= clock.monotonic() - before <= 2 * LEASE
    assert steps[0] == "waiting for 1 leases that have run out"
    assert leases(timed) == []
    assert timed.cleaner.delete_expired_temporary_files().files == 2
    assert timed.verify().ok


@in_memory
def test_a_reader_that_comes_back_while_the_cleaner_waits_keeps_its_lease(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1])
    with table.pin() as pinned:
        table.delete("true")
        clock.advance(LEASE)
        timed.cleaner.expire(seconds=0, versions=1, wait=True, progress=lambda step: timed.lake.renewals.renew())
        assert len(leases(timed)) == 1
        assert ids(pinned) == [1]
    assert clean(timed.cleaner) == 1


@in_memory
def test_each_renewal_begins_the_watch_anew(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1])
    cleaner = timed.cleaner
    pinned = table.pin()
    table.delete("true")
    clock.advance(LEASE)
    for _ in range(3):
        for _ in range(3):
            assert clean(cleaner) == 0
            clock.advance(LEASE / 4)
        pinned.lease.confirm()
        for _ in range(4):
            assert clean(cleaner) == 0
            clock.advance(LEASE / 4)
    assert ids(pinned) == [1]
    pinned.lease.close()


@in_memory
def test_a_jump_of_the_clock_begins_the_watch_anew(timed: Book, abandoned: Table, clock: ManualClock) -> None:
    cleaner = timed.cleaner
    clock.advance(3600)
    assert clean(cleaner) == 0
    clock.advance(LEASE - 1)
    assert clean(cleaner) == 0
    # Someone sets the time: what has passed since the last look is not known any more.
    clock.turn_back(10)
    clock.advance(1)
    assert clean(cleaner) == 0
    clock.advance(LEASE - 1)
    assert clean(cleaner) == 0
    clock.advance(1)
    assert clean(cleaner) == 2
    assert abandoned.count() == 0


@in_memory
def test_a_long_pause_of_the_cleaner_begins_the_watch_anew(timed: Book, abandoned: Table, clock: ManualClock) -> None:
    cleaner = timed.cleaner
    assert clean(cleaner) == 0
    # The machine has slept, and so perhaps have the readers.
    clock.advance(10 * LEASE)
    assert clean(cleaner) == 0
    clock.advance(LEASE / 2)
    assert clean(cleaner) == 0
    clock.advance(LEASE / 2)
    assert clean(cleaner) == 2
    assert abandoned.count() == 0


def test_a_reader_hears_that_its_lease_is_lost(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1], [2])
    first, second = table.pin(), table.pin()
    batches = second.to_batches()
    table.delete("true")
    clock.advance(LEASE)
    timed.cleaner.expire(seconds=0, versions=1, wait=True)
    assert timed.cleaner.delete_expired_temporary_files().files == 2
    # It is told so when it asks, when it renews, and when a file is gone from under it.
    with pytest.raises(LeaseLost):
        list(batches)
    with pytest.raises(LeaseLost):
        first.lease.confirm()
    timed.lake.renewals.renew()
    for pinned in (first, second):
        for call in (pinned.plan, pinned.to_arrow, pinned.lease.check):
            with pytest.raises(LeaseLost) as lost:
                call()
            assert "version 2" in lost.value.on
    assert leases(timed) == []
    assert timed.verify().ok


@in_memory
def test_a_renewal_tells_of_a_lost_lease_before_a_file_is_missed(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1])
    pinned = table.pin()
    clock.advance(LEASE)
    timed.cleaner.expire(wait=True)
    assert leases(timed) == []
    timed.lake.renewals.renew()
    with pytest.raises(LeaseLost):
        pinned.to_arrow()


@in_memory
def test_a_damaged_file_under_a_good_lease_is_no_lost_lease(book: Book) -> None:
    table = numbers(book, "t", [1])
    (file,) = files_of(book, table)
    with table.pin() as pinned:
        replace_bytes(book, file["file_path"], lambda data: data[:40])
        with pytest.raises(ReadFailed):
            pinned.to_arrow()
        book.lake.store.delete_one(file["file_path"])
        with pytest.raises(ReadFailed):
            pinned.to_arrow()
        pinned.lease.check()


def test_dead_leases_are_removed_also_where_nothing_waits_for_its_removal(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1])
    pinned = table.pin()
    timed.lake.renewals.let_go(pinned.lease.id)
    lay(timed, f"{pinned.lease.staged_folder()}/metadata/x.json", b"{}")
    clock.advance(LEASE)
    result = timed.cleaner.delete_expired_temporary_files()
    assert result.dead_leases == 1
    assert leases(timed) == []
    assert objects(timed, "reads") == []


# --- staged tables of reads ----------------------------------------------------


@in_memory
def test_what_a_read_has_staged_goes_with_its_lease(timed: Book) -> None:
    table = numbers(timed, "t", [1])
    with table.pin() as pinned, table.pin() as other:
        folders = [pinned.lease.staged_folder(), pinned.lease.staged_folder(), other.lease.staged_folder()]
        assert len(set(folders)) == 3
        for folder in folders:
            lay(timed, f"{folder}/metadata/v1.metadata.json", b"{}")
        timed.cleaner.delete_expired_temporary_files()
        assert len(objects(timed, "reads")) == 3
        assert timed.verify().unfinished == ()
        pinned.lease.close()
        assert objects(timed, "reads") == [f"{folders[2]}/metadata/v1.metadata.json"]
    assert objects(timed, "reads") == []


@in_memory
def test_what_a_dead_reader_has_staged_is_removed(timed: Book, abandoned: Table, clock: ManualClock) -> None:
    (lease_id,) = leases(timed)
    lay(timed, f"reads/{lease_id}/0/metadata/v1.metadata.json", b"{}")
    lay(timed, "reads/nobody/0/metadata/v1.metadata.json", b"{}")
    found = timed.verify()
    assert found.ok
    assert found.unfinished == ("the staged tables of lease nobody, which is over, are not removed yet",)
    cleaner = timed.cleaner
    cleaner.delete_expired_temporary_files(wait=False)
    assert objects(timed, "reads") == [f"reads/{lease_id}/0/metadata/v1.metadata.json"]
    cleaner.expire(seconds=0, versions=1, wait=True)
    cleaner.delete_expired_temporary_files()
    assert objects(timed) == []
    assert abandoned.count() == 0
    assert timed.verify().unfinished == ()


@in_memory
def test_a_dry_run_touches_no_lease(timed: Book, abandoned: Table, clock: ManualClock) -> None:
    cleaner = timed.cleaner
    for _ in range(10):
        clock.advance(LEASE / 4)
        assert cleaner.expire(seconds=0, versions=1, dry_run=True).files == 0
        assert cleaner.delete_expired_temporary_files(dry_run=True).files == 0
    assert len(leases(timed)) == 1
    assert abandoned.version == 3
