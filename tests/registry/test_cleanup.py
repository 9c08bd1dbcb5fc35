"""History ends, files go and leftovers are swept; nothing goes that could still count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from books import Place, describe
from lake import (
    check_totals,
    files_of,
    ids,
    in_memory,
    insert,
    lay,
    numbers,
    objects,
    own_warehouse,  # noqa: F401
    records,
    registry_state,
    rows_of,
    run_sql,
)
from lakebook import Book, failpoints
from lakebook.clock import ManualClock
from lakebook.errors import CommitAborted, InvalidInput, RegistryCorrupt, VersionExpired
from lakebook.lake import cleaning
from lakebook.lake.attempts import Attempt
from lakebook.lake.table import Table
from lakebook.registry import retirement, schema
from lakebook.registry.table_files import TableChange

NOW = 1_700_000_000_000
GRACE = 3600.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
def timed(place: Place, clock: ManualClock) -> Book:
    return place.open(clock=clock, temporary_file_grace=GRACE, sweep_grace=GRACE, insert_alive=600.0)


def emptied(book: Book, clock: ManualClock, name: str = "t", files: int = 3) -> Table:
    """A table whose files have all ended, some time ago."""
    table = numbers(book, name, *([number] for number in range(files)))
    table.delete("true")
    clock.advance(1)
    return table


def retire(book: Book, clock: ManualClock) -> None:
    """Retire what has ended, and let its grace pass."""
    book.cleaner.expire(seconds=0, versions=1)
    clock.advance(GRACE + 1)


def versions(table: Table) -> list[int]:
    return sorted(version.version for version in table.history())


def waiting(book: Book) -> list[dict[str, Any]]:
    """Files that wait for their removal; not paths whose file was removed lately."""
    return [row for row in records(book, schema.temporary_files) if row["reason"] != "deleted"]


# --- history -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "kept", "oldest"),
    # Versions are from 0, 10, 20, 30, 40 and 50 seconds after the first one; now it is 55.
    [
        (1000, 1, 0),
        (55, 1, 0),
        (54.999, 1, 0),
        (45, 1, 1),
        (44.9, 1, 1),
        (35.1, 1, 1),
        (34.9, 1, 2),
        (5.1, 1, 4),
        (5, 1, 5),
        (0, 1, 5),
        (0, 2, 4),
        (0, 6, 0),
        (0, 100, 0),
        (25.1, 2, 2),
        (5, 3, 3),
    ],
)
def test_the_policy_keeps_by_time_and_by_number(
    make_place: Any, clock: ManualClock, seconds: float, kept: int, oldest: int
) -> None:
    book: Book = make_place("memory").open(clock=clock)
    table = numbers(book, "t")
    for number in range(5):
        clock.advance(10)
        insert(table, {"id": number})
    clock.advance(5)
    previewed = book.cleaner.expire(seconds=seconds, versions=kept, dry_run=True)
    result = book.cleaner.expire(seconds=seconds, versions=kept)
    assert result.min_readable == previewed.min_readable == {str(table.id): oldest}
    assert versions(table) == list(range(oldest, 6))
    for version in range(6):
        if version < oldest:
            with pytest.raises(VersionExpired):
                table.plan(version=version)
        else:
            assert ids(table, version=version) == list(range(version))
    # Nothing has ended, so that there is nothing to retire.
    assert (result.tables, result.files) == (1, 0)
    assert book.verify().ok


def test_a_table_may_have_a_policy_of_its_own(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock, history_seconds=0, history_versions=1)
    properties = {"lakebook.history.seconds": "25.5", "lakebook.history.versions": "2"}
    own = numbers(book, "own", properties=properties)
    many = numbers(book, "many", properties={"lakebook.history.versions": "4"})
    plain = numbers(book, "plain")
    for number in range(5):
        clock.advance(10)
        for table in (own, many, plain):
            insert(table, {"id": number})
    clock.advance(1)
    book.cleaner.expire()
    assert versions(own) == [2, 3, 4, 5]
    assert versions(many) == [2, 3, 4, 5]
    assert versions(plain) == [5]
    # A schema of its own does not lose the policy, and another policy is used from then on.
    with own.update_schema() as update:
        update.add_column("x", "INT")
    own.set_properties(**{"lakebook.history.seconds": None, "lakebook.history.versions": "2"})
    clock.advance(1)
    book.cleaner.expire()
    assert versions(own) == [5, 6]
    assert book.verify().ok


@in_memory
def test_one_table_can_be_expired_alone(timed: Book, clock: ManualClock) -> None:
    one, other = emptied(timed, clock, "one"), emptied(timed, clock, "other")
    result = timed.cleaner.expire(one.record, seconds=0, versions=1)
    assert (result.tables, result.files) == (1, 3)
    assert versions(one) == [4]
    assert versions(other) == [0, 1, 2, 3, 4]


@in_memory
def test_a_policy_that_keeps_nothing_is_refused(timed: Book) -> None:
    table = numbers(timed, "t", [1])
    policies: list[dict[str, Any]] = [{"versions": 0}, {"versions": -1}, {"seconds": -1}, {"seconds": -0.1}]
    for policy in policies:
        with pytest.raises(InvalidInput):
            timed.cleaner.expire(**policy)
    assert versions(table) == [0, 1]


def test_a_file_is_retired_when_no_kept_version_has_it(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1], [2], [3])
    table.delete("id = 1")
    table.delete("id = 2")
    clock.advance(1)
    # Version 4 still has the second file.
    result = timed.cleaner.expire(seconds=0, versions=2)
    first, second, third = files_of(timed, table)
    assert (result.files, result.bytes) == (1, first["file_size"])
    assert (first["to_version"], second["to_version"], third["to_version"]) == (4, 5, None)
    assert first["retired_at"] is not None
    assert second["retired_at"] is third["retired_at"] is None
    (row,) = waiting(timed)
    assert (row["file_path"], row["file_size"], row["state"], row["reason"]) == (
        first["file_path"],
        first["file_size"],
        "waiting",
        "retired",
    )
    assert row["expiration"] == row["added_at"] + GRACE * 1000
    assert ids(table, version=4) == [2, 3]
    again = timed.cleaner.expire(seconds=0, versions=2)
    assert (again.files, len(waiting(timed))) == (0, 1)
    assert timed.cleaner.expire(seconds=0, versions=1).files == 1
    assert timed.verify().ok


def test_history_is_ended_in_batches(timed: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retirement, "CHUNK", 2)
    monkeypatch.setattr(cleaning, "CHUNK", 2)
    tables = [emptied(timed, clock, f"t{number}", 5) for number in range(3)]
    steps: list[str] = []
    result = timed.cleaner.expire(seconds=0, versions=1, progress=steps.append)
    assert (result.tables, result.files) == (3, 15)
    assert len(steps) == 9
    assert result.bytes == sum(row["file_size"] for row in waiting(timed))
    clock.advance(GRACE + 1)
    deleted = timed.cleaner.delete_expired_temporary_files()
    assert (deleted.files, deleted.bytes, deleted.failed) == (15, result.bytes, [])
    assert objects(timed) == []
    assert [files_of(timed, table) for table in tables] == [[], [], []]
    assert timed.verify().ok


# --- files ---------------------------------------------------------------------


def test_a_file_goes_when_its_grace_has_passed_and_all_that_is_known_of_it(timed: Book, clock: ManualClock) -> None:
    table = emptied(timed, clock, files=2)
    insert(table, {"id": 9})
    clock.advance(1)
    timed.cleaner.expire(seconds=0, versions=1)
    clock.advance(GRACE - 1)
    assert timed.cleaner.delete_expired_temporary_files().files == 0
    assert len(objects(timed)) == 3
    clock.advance(1)
    result = timed.cleaner.delete_expired_temporary_files()
    assert (result.files, result.pinned, result.dead_leases, result.failed) == (2, 0, 0, [])
    (left,) = files_of(timed, table)
    assert objects(timed) == [left["file_path"]]
    assert [row["file_path"] for row in records(timed, schema.partition_metadata)] == [left["file_path"]]
    assert {row["file_id"] for row in records(timed, schema.file_column_stats)} == {left["id"]}
    assert waiting(timed) == []
    assert ids(table) == [9]
    assert check_totals(timed, table)[:2] == (1, 1)
    assert timed.verify().ok


def test_a_dry_run_says_what_would_be_done_and_does_nothing(timed: Book, clock: ManualClock) -> None:
    emptied(timed, clock, "t")
    emptied(timed, clock, "dropped")
    timed.tables.drop("dropped")
    insert(numbers(timed, "other"), {"id": 1})
    cleaner = timed.cleaner
    before, there = registry_state(timed), objects(timed)
    previewed = cleaner.expire(seconds=0, versions=1, dry_run=True)
    assert (registry_state(timed), objects(timed)) == (before, there)
    done = cleaner.expire(seconds=0, versions=1)
    assert (previewed.files, previewed.bytes, previewed.tables) == (done.files, done.bytes, done.tables)
    assert previewed.dry_run
    assert not done.dry_run
    clock.advance(GRACE + 1)
    before, there = registry_state(timed), objects(timed)
    foreseen = cleaner.delete_expired_temporary_files(dry_run=True)
    assert (registry_state(timed), objects(timed)) == (before, there)
    deleted = cleaner.delete_expired_temporary_files()
    assert (foreseen.files, foreseen.bytes) == (deleted.files, deleted.bytes) == (6, done.bytes)
    before, there = registry_state(timed), objects(timed)
    assert cleaner.sweep(dry_run=True).dry_run
    assert (registry_state(timed), objects(timed)) == (before, there)
    assert timed.verify().ok


@in_memory
def test_deleting_what_is_gone_is_fine(timed: Book, clock: ManualClock) -> None:
    table = emptied(timed, clock)
    retire(timed, clock)
    for path in objects(timed)[:2]:
        timed.lake.store.delete_one(path)
    assert timed.cleaner.delete_expired_temporary_files().files == 3
    assert (files_of(timed, table), waiting(timed), objects(timed)) == ([], [], [])
    assert timed.cleaner.delete_expired_temporary_files().files == 0
    assert timed.verify().ok


def test_storage_that_fails_half_way_loses_no_progress(shared_place: Place, clock: ManualClock) -> None:
    book = shared_place.open(clock=clock, temporary_file_grace=0)
    table = emptied(book, clock, files=4)
    book.cleaner.expire(seconds=0, versions=1)
    clock.advance(1)
    path = files_of(book, table)[1]["file_path"]
    local = book.lake.store.local_path(path)
    assert local is not None
    # A folder cannot be deleted as a file is.
    local.unlink()
    (local / "inside").mkdir(parents=True)
    result = book.cleaner.delete_expired_temporary_files()
    assert result.files == 3
    assert [failed for failed, _ in result.failed] == [path]
    assert [row["file_path"] for row in files_of(book, table)] == [path]
    assert [(row["file_path"], row["state"]) for row in waiting(book)] == [(path, "deleting")]
    assert len(records(book, schema.partition_metadata)) == 1
    again = book.cleaner.delete_expired_temporary_files()
    assert (again.files, len(again.failed)) == (0, 1)
    (local / "inside").rmdir()
    local.rmdir()
    assert book.cleaner.delete_expired_temporary_files().files == 1
    assert (files_of(book, table), waiting(book)) == ([], [])
    assert records(book, schema.partition_metadata) == []
    assert book.verify().ok


def test_a_cleaner_that_dies_at_any_point_is_continued_by_the_next(timed: Book, clock: ManualClock) -> None:
    class Died(BaseException):
        pass

    def die() -> None:
        raise Died

    def clean() -> None:
        retire(timed, clock)
        timed.cleaner.delete_expired_temporary_files()

    for point in ("expire.retired", "clean.marked", "clean.object_deleted", "clean.forgotten"):
        table = emptied(timed, clock, point.replace(".", "-"))
        with failpoints.armed(point, die), pytest.raises(Died):
            clean()
        assert timed.verify().ok
        assert ids(table) == []
        clean()
        assert (files_of(timed, table), waiting(timed), objects(timed)) == ([], [], [])
        assert timed.verify().ok


def test_two_cleaners_at_once_do_not_disturb_each_other(shared_place: Place, clock: ManualClock) -> None:
    book = shared_place.open(clock=clock, temporary_file_grace=0)
    other = shared_place.open(clock=clock, temporary_file_grace=0)
    table = emptied(book, clock)
    for point in ("clean.marked", "clean.object_deleted"):
        book.cleaner.expire(seconds=0, versions=1)
        clock.advance(1)
        busy = [True]

        def be_second(busy: list[bool] = busy) -> None:
            if busy[0]:
                busy[0] = False
                other.cleaner.expire(seconds=0, versions=1)
                other.cleaner.delete_expired_temporary_files()

        with failpoints.armed(point, be_second):
            book.cleaner.delete_expired_temporary_files()
        assert (files_of(book, table), waiting(book), objects(book)) == ([], [], [])
        insert(table, {"id": 1})
        table.delete("true")
        clock.advance(1)
    assert book.verify().ok


def test_without_a_horizon_nothing_is_deleted(timed: Book, clock: ManualClock) -> None:
    table = emptied(timed, clock)
    retire(timed, clock)
    run_sql(timed, "DELETE FROM table_horizons")
    before, there = registry_state(timed), objects(timed)
    for call in (timed.cleaner.expire, timed.cleaner.delete_expired_temporary_files):
        with pytest.raises(RegistryCorrupt):
            call()
    assert (registry_state(timed), objects(timed)) == (before, there)
    assert len(files_of(timed, table)) == 3


def test_files_of_others_go_too_once_a_table_has_taken_and_ended_them(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t")
    lay(timed, "in/deep/taken.parquet", rows_of(table, [{"id": 1}]))
    lay(timed, "in/deep/other.parquet", rows_of(table, [{"id": 2}]))
    table.add_files(["in/deep/taken.parquet"])
    table.delete("true")
    clock.advance(1)
    retire(timed, clock)
    assert timed.cleaner.delete_expired_temporary_files().files == 1
    assert objects(timed) == ["in/deep/other.parquet"]
    assert timed.verify().ok


def test_files_of_segments_that_were_let_go_are_deleted_as_well(timed: Book, clock: ManualClock) -> None:
    timed.metadata.create_topic("orders", 1)
    for path in ("topics/a.parquet", "topics/b.parquet"):
        lay(timed, path, b"segment")
    timed.metadata.add_segments(
        [describe(base=0, s3_key="topics/a.parquet"), describe(base=100, s3_key="topics/b.parquet")]
    )
    timed.metadata.delete_segments_before("orders", 0, 100)
    assert timed.cleaner.delete_expired_temporary_files().files == 0
    clock.advance(GRACE + 1)
    assert timed.cleaner.delete_expired_temporary_files(dry_run=True).files == 1
    result = timed.cleaner.delete_expired_temporary_files()
    assert (result.files, result.failed) == (1, [])
    assert objects(timed) == ["topics/b.parquet"]
    assert waiting(timed) == []
    assert timed.verify().ok


def test_folders_that_have_become_empty_go_and_the_warehouse_stays(shared_place: Place, clock: ManualClock) -> None:
    book = shared_place.open(clock=clock, temporary_file_grace=0)
    emptied(book, clock)
    retire(book, clock)
    book.cleaner.delete_expired_temporary_files()
    root = Path(book.warehouse.root)
    assert root.is_dir()
    assert list(root.iterdir()) == []


# --- dropped tables ------------------------------------------------------------


def test_a_dropped_table_is_emptied_and_its_rows_vanish(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1], [2])
    table.delete("id = 1")
    with table.update_schema() as update:
        update.add_column("x", "INT")
    timed.tables.drop("t")
    clock.advance(1)
    found = timed.verify()
    assert found.ok
    assert found.unfinished == ("table default.t was dropped and is not emptied yet",)
    assert timed.cleaner.expire().files == 2
    assert [row["reason"] for row in waiting(timed)] == ["table dropped"] * 2
    assert timed.verify().ok
    clock.advance(GRACE + 1)
    assert timed.cleaner.delete_expired_temporary_files().files == 2
    assert timed.verify().ok
    timed.cleaner.expire()
    state = registry_state(timed)
    for name in state.keys() - {"commits", "inserts"}:
        assert state[name] == [], name
    assert objects(timed) == []
    assert timed.verify().unfinished == ()


@in_memory
def test_a_dropped_table_without_files_vanishes_at_once(timed: Book, clock: ManualClock) -> None:
    numbers(timed, "t")
    timed.tables.drop("t")
    timed.cleaner.expire()
    assert records(timed, schema.tables) == []
    assert timed.verify().ok


def test_a_dropped_table_is_emptied_in_batches(
    timed: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retirement, "CHUNK", 2)
    table = numbers(timed, "t", *([number] for number in range(5)))
    table.delete("id < 2")
    insert(table, {"id": 9})
    timed.tables.drop("t")
    preview = timed.cleaner.expire(dry_run=True)
    done = timed.cleaner.expire()
    assert preview.files == done.files == 6
    clock.advance(GRACE + 1)
    assert timed.cleaner.delete_expired_temporary_files().files == 6
    timed.cleaner.expire()
    assert records(timed, schema.tables) == []


@in_memory
def test_files_that_were_retired_before_their_table_was_dropped_go_with_it(timed: Book, clock: ManualClock) -> None:
    table = emptied(timed, clock)
    insert(table, {"id": 9})
    clock.advance(1)
    timed.cleaner.expire(seconds=0, versions=1)
    timed.tables.drop("t")
    assert timed.cleaner.expire().files == 1
    clock.advance(GRACE + 1)
    assert timed.cleaner.delete_expired_temporary_files().files == 4
    timed.cleaner.expire()
    assert records(timed, schema.tables) == []
    assert timed.verify().ok


# --- sweeping ------------------------------------------------------------------


def die_in_insert(book: Book, table: Table) -> Attempt:
    """An insert that has written a file when its process is gone."""
    attempt = Attempt(book.lake, table.record).__enter__()
    lay(book, f"{attempt.folder}/part.parquet", rows_of(table, [{"id": 99}]))
    book.lake.renewals.let_go(attempt.commit_id)
    return attempt


def inserts(book: Book) -> list[str]:
    return [row["commit_id"] for row in records(book, schema.inserts)]


def test_an_insert_that_is_silent_for_long_is_fenced_and_swept(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1])
    timed.cleaner.sweep()
    attempt = die_in_insert(timed, table)
    clock.advance(599)
    assert timed.cleaner.sweep().fenced == 0
    found = timed.verify()
    assert found.ok
    assert found.unfinished == (f"insert {attempt.commit_id} (open): 1 objects are not swept yet",)
    clock.advance(1)
    preview = timed.cleaner.sweep(dry_run=True)
    assert (preview.fenced, len(objects(timed))) == (1, 2)
    result = timed.cleaner.sweep()
    assert (result.fenced, result.objects, result.failed) == (1, 1, [])
    assert len(objects(timed)) == 1
    # It comes too late.
    with pytest.raises(CommitAborted):
        attempt.commit(TableChange("append"))
    assert ids(table) == [1]
    assert timed.verify().ok


@in_memory
def test_an_insert_that_says_it_is_alive_is_left_alone(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t")
    with Attempt(timed.lake, table.record) as attempt:
        lay(timed, f"{attempt.folder}/part.parquet", rows_of(table, [{"id": 1}]))
        for _ in range(10):
            clock.advance(500)
            timed.lake.renewals.renew()
            assert timed.cleaner.sweep().fenced == 0
        assert len(objects(timed)) == 1
    assert objects(timed) == []


def test_late_files_of_a_dead_insert_are_swept_until_it_is_quiet(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t")
    attempt = die_in_insert(timed, table)
    clock.advance(600)
    timed.cleaner.sweep()
    for _ in range(2):
        # An executor that nobody could stop writes on.
        lay(timed, f"{attempt.folder}/deep/late.parquet", b"late")
        assert timed.cleaner.sweep().objects == 0
        clock.advance(GRACE + 1)
        result = timed.cleaner.sweep()
        assert (result.objects, result.settled, result.fenced) == (1, 0, 0)
    clock.advance(GRACE + 1)
    assert timed.cleaner.sweep().settled == 1
    assert inserts(timed) == []
    clock.advance(GRACE + 1)
    result = timed.cleaner.sweep()
    assert (result.objects, result.settled) == (0, 0)
    assert timed.verify().ok


def test_of_a_committed_insert_only_what_does_not_count_is_swept(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", partition_by=["id"])
    report = insert(table, {"id": 1}, {"id": 2})
    folder = f"data/{table.id}/{report.commit_id}"
    counted = objects(timed)
    lay(timed, f"{folder}/.part.crc", b"crc")
    lay(timed, f"{folder}/x/uncounted.parquet", rows_of(table, [{"id": 3}]))
    preview = timed.cleaner.sweep(dry_run=True)
    assert (preview.objects, len(objects(timed))) == (2, 4)
    assert timed.cleaner.sweep().objects == 2
    assert objects(timed) == counted
    clock.advance(GRACE + 1)
    assert timed.cleaner.sweep().settled == 1
    assert inserts(timed) == []
    assert ids(table) == [1, 2]
    # Files that are ended, or wait for their removal, are the cleaner's and not the sweep's.
    table.delete("id = 1")
    clock.advance(1)
    timed.cleaner.expire(seconds=0, versions=1)
    timed.cleaner.sweep()
    assert objects(timed) == counted
    assert timed.verify().ok


def test_a_folder_whose_commit_row_is_gone_keeps_what_counts(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1], [2])
    run_sql(timed, "DELETE FROM commits WHERE kind = 'insert'")
    clock.advance(10 * GRACE)
    timed.cleaner.sweep()
    clock.advance(10 * GRACE)
    timed.cleaner.sweep()
    assert len(objects(timed)) == 2
    assert ids(table) == [1, 2]


def test_what_lies_elsewhere_is_never_touched(timed: Book, clock: ManualClock) -> None:
    table = emptied(timed, clock)
    foreign = [
        lay(timed, path, b"mine")
        for path in ("x.parquet", "data/x", f"data/{table.id}/x", f"data/{table.id}/other/x", "topics/1/x", "in/.x.crc")
    ]
    die_in_insert(timed, table)
    clock.advance(10 * GRACE)
    for _ in range(3):
        retire(timed, clock)
        timed.cleaner.delete_expired_temporary_files()
        timed.cleaner.sweep()
        clock.advance(GRACE + 1)
    assert objects(timed) == sorted(foreign)


def test_a_folder_that_leads_elsewhere_is_not_swept(shared_place: Place, clock: ManualClock, tmp_path: Path) -> None:
    book = shared_place.open(clock=clock, insert_alive=1.0)
    table = numbers(book, "t")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"mine")
    linked = Attempt(book.lake, table.record).__enter__()
    plain = die_in_insert(book, table)
    book.lake.renewals.let_go(linked.commit_id)
    place = book.lake.store.local_path(linked.folder)
    assert place is not None
    place.symlink_to(outside)
    clock.advance(10)
    result = book.cleaner.sweep()
    assert [path for path, _ in result.failed] == [linked.folder]
    assert (outside / "precious").read_bytes() == b"mine"
    # One that fails does not stop the others.
    assert objects(book, plain.folder) == []
    place.unlink()
    assert book.cleaner.sweep().failed == []


@in_memory
def test_many_inserts_are_swept_in_batches(timed: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "CHUNK", 2)
    table = numbers(timed, "t", [1], [2])
    for _ in range(5):
        die_in_insert(timed, table)
    clock.advance(600)
    result = timed.cleaner.sweep()
    assert (result.fenced, result.objects) == (5, 5)
    clock.advance(GRACE + 1)
    assert timed.cleaner.sweep().settled == 7
    assert inserts(timed) == []
    assert ids(table) == [1, 2]


@in_memory
def test_failed_and_empty_inserts_are_forgotten_by_and_by(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1])
    table.insert_arrow(rows_of(table, []))
    with pytest.raises(Exception, match="in/none"):
        table.add_files(["in/none"])
    assert len(inserts(timed)) == 3
    for _ in range(2):
        clock.advance(GRACE + 1)
        timed.cleaner.sweep()
    assert inserts(timed) == []
    assert ids(table) == [1]
    assert timed.verify().ok
