"""The janitor removes by the clock what nobody needs, a bounded piece at a time, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import orjson
import psycopg
import pytest
from bench.plans import plans

from books import POSTGRESQL, SQLITE, Place, Postgres, describe
from held import PATIENCE
from lake import (
    files_of,
    ids,
    in_memory,
    lay,
    numbers,
    objects,
    own_warehouse,  # noqa: F401
    records,
    rows_of,
    run_sql,
)
from lakebook import Book, failpoints
from lakebook.clock import ManualClock, SystemClock
from lakebook.components.janitor import Janitor
from lakebook.errors import InvalidInput, PathInUse, RegistryUnavailable
from lakebook.lake import cleaning
from lakebook.lake.attempts import Attempt
from lakebook.lake.leasing import READS
from lakebook.lake.table import Table
from lakebook.registry import schema, upkeep
from lakebook.registry.statements import Statement
from lakebook.registry.upkeep import keep_database

GRACE = 100.0
LEASE = 60.0
DAY = 86_400
# Longer than any interval of the janitor's, with its jitter.
LONG = 60 * 60 * 1.2


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed(place: Place, clock: ManualClock) -> Book:
    return place.open(clock=clock, temporary_file_grace=GRACE, sweep_grace=GRACE, lease_seconds=LEASE)


def retired(book: Book, clock: ManualClock, name: str = "t", files: int = 3) -> Table:
    """A table whose files are all retired, and their grace has passed."""
    table = numbers(book, name, *([number] for number in range(files)))
    table.delete("true")
    clock.advance(1)
    book.cleaner.expire(seconds=0, versions=1)
    clock.advance(GRACE + 1)
    return table


def work(book: Book) -> list[tuple[str, str]]:
    """What the janitor has written down: action and outcome, the oldest first."""
    return [(row["action"], row["outcome"]) for row in records(book, schema.maintenance_history)]


def detail(book: Book, action: str) -> dict[str, Any]:
    (*_, row) = records(book, schema.maintenance_history, action=action)
    assert isinstance(row["detail"], dict)
    return row["detail"]


# --- its work ------------------------------------------------------------------


def test_files_whose_grace_has_passed_go_and_that_is_written_down(timed: Book, clock: ManualClock) -> None:
    table = retired(timed, clock)
    janitor = Janitor(timed.lake)
    done = janitor.run_once()
    assert done["files"]["files"] == 3
    assert files_of(timed, table) == []
    assert objects(timed) == []
    assert ("files", "done") in work(timed)
    assert detail(timed, "files")["files"] == 3
    noted = len([entry for entry in work(timed) if entry[0] == "files"])
    janitor.run_once()
    # There was nothing to do, and nothing is said about it.
    assert len([entry for entry in work(timed) if entry[0] == "files"]) == noted
    assert timed.verify().ok


def test_a_book_with_nothing_to_do_has_no_history_of_it(timed: Book, clock: ManualClock) -> None:
    janitor = Janitor(timed.lake)
    for _ in range(3):
        clock.advance(LONG)
        assert janitor.run_due() == 14
    assert set(work(timed)) <= {("events", "done"), ("commits", "done"), ("upkeep", "done")}
    assert all(state["outcome"] == "done" for state in janitor.status()["chores"].values())


def test_leases_of_dead_readers_go_though_no_file_waits(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1])
    timed.lake.renewals.let_go(table.pin().lease.id)
    living = table.pin()
    janitor = Janitor(timed.lake)
    for _ in range(20):
        clock.advance(LEASE / 4)
        timed.lake.renewals.renew()
        janitor.run_due()
    assert [row["id"] for row in records(timed, schema.leases)] == [living.lease.id]
    # Whichever of the two comes first: who deletes files looks at leases too.
    assert {("leases", "done"), ("files", "done")} & set(work(timed))
    assert ids(living) == [1]


def test_what_a_dead_reader_staged_goes(timed: Book, clock: ManualClock) -> None:
    lay(timed, f"{READS}/0123/metadata/x.json", b"staged")
    Janitor(timed.lake).run_once("files")
    assert objects(timed) == []


def test_a_dropped_table_is_emptied_and_vanishes(
    timed: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaning, "CHUNK", 2)
    numbers(timed, "t", *([number] for number in range(5)))
    timed.tables.drop("t")
    janitor = Janitor(timed.lake)
    assert janitor.run_once("tables") == {"tables": {"retired": 5}}
    assert len(objects(timed)) == 5
    clock.advance(GRACE + 1)
    janitor.run_once("files")
    assert objects(timed) == []
    assert records(timed, schema.tables) == []
    assert timed.verify().ok


def test_a_deletion_of_a_topic_that_died_half_way_is_finished(timed: Book) -> None:
    class Died(BaseException):
        pass

    def die() -> None:
        raise Died

    timed.metadata.create_topic("orders", 3)
    timed.metadata.add_segments([describe(partition=number) for number in range(3)])
    with failpoints.armed("topic.hidden", die), pytest.raises(Died):
        timed.metadata.delete_topic("orders")
    assert len(records(timed, schema.segments)) == 3
    assert Janitor(timed.lake).run_once("topics") == {"topics": {"topics": 1}}
    assert records(timed, schema.topics) == records(timed, schema.segments) == []
    assert len(records(timed, schema.temporary_files)) == 3


def test_what_dead_inserts_left_is_swept(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t")
    attempt = Attempt(timed.lake, table.record).__enter__()
    timed.lake.renewals.let_go(attempt.commit_id)
    lay(timed, f"{attempt.folder}/left.parquet", b"left")
    clock.advance(timed.settings.insert_alive + 1)
    janitor = Janitor(timed.lake)
    done = janitor.run_once("sweep")["sweep"]
    assert (done["fenced"], done["objects"]) == (1, 1)
    assert objects(timed) == []
    clock.advance(GRACE + 1)
    assert janitor.run_once("sweep")["sweep"]["settled"] == 1
    # That a folder is quiet is nothing to tell of.
    assert work(timed) == [("sweep", "done")]
    assert timed.verify().ok


def test_footers_that_are_owed_are_taken_and_one_that_cannot_be_is_told_of_once(
    timed: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = numbers(timed, "t", [1], [2], [3])
    paths = sorted(row["file_path"] for row in files_of(timed, table))
    run_sql(timed, "DELETE FROM partition_metadata")
    for path in paths:
        run_sql(timed, f"INSERT INTO footer_debts VALUES ('{path}', {table.id}, 1, {clock.now_ms() * 2}, NULL)")
    gone = timed.lake.store.read(paths[1])
    timed.lake.store.delete_one(paths[1])
    janitor = Janitor(timed.lake)
    # One file a round, and the one that fails does not keep it from the next.
    monkeypatch.setattr(janitor, "_enough", lambda: lambda: True)
    for paid in (1, 0, 1, 0, 0):
        assert janitor.run_once("debts")["debts"]["paid"] == paid
    assert [row["file_path"] for row in records(timed, schema.footer_debts)] == [paths[1]]
    assert "it is not there" in janitor.status()["failed"]["debts"][0]
    timed.lake.store.put_new(paths[1], gone)
    # From the end, and from the beginning again.
    assert [janitor.run_once("debts")["debts"]["paid"] for _ in range(2)] == [0, 1]
    assert "debts" not in janitor.status()["failed"]
    assert timed.verify().ok


def test_events_that_everybody_has_taken_go_and_who_is_too_far_behind_is_dropped(
    place: Place, clock: ManualClock
) -> None:
    book = place.open(clock=clock, events_kept=GRACE, events_oldest=1000.0)
    book.events.save_cursor("mine", book.events.now())
    book.metadata.create_topic("orders", 3)
    janitor = Janitor(book.lake)
    clock.advance(GRACE + 1)
    assert janitor.run_once("events") == {"events": {"events": 0}}
    clock.advance(1000)
    assert janitor.run_once("events") == {"events": {"events": 4, "dropped": ["mine"]}}
    assert detail(book, "events")["dropped"] == ["mine"]
    assert book.events.load_cursor("mine") is None


def test_routine_is_written_down_now_and_then_and_added_up(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock, events_kept=0)
    janitor = Janitor(book.lake)
    for number in range(4):
        book.metadata.create_topic(f"orders-{number}")
        clock.advance(1)
        assert janitor.run_once("events")["events"]["events"] == 2
    assert work(book) == [("events", "done")]
    clock.advance(60 * book.settings.maintenance_interval)
    janitor.run_once("events")
    assert [row["detail"]["events"] for row in records(book, schema.maintenance_history)] == [2, 6]


def test_commit_rows_and_old_history_go(timed: Book, clock: ManualClock) -> None:
    retired(timed, clock)
    janitor = Janitor(timed.lake)
    janitor.run_once("files")
    for _ in range(3):
        clock.advance(GRACE + 1)
        janitor.run_once("sweep")
    # To the database, the clock of this book is slow by years.
    assert janitor.run_once("commits")["commits"]["commits"] > 0
    assert [row for row in records(timed, schema.commits) if row["kind"] != "fence"] == []
    assert len(work(timed)) > 0
    clock.advance(timed.settings.maintenance_kept + 1)
    assert janitor.run_once("history")["history"]["work"] > 0
    assert work(timed) == [("history", "done")]
    assert timed.verify().ok


# --- bounds ----------------------------------------------------------------------


def test_a_round_ends_and_the_next_one_goes_on(
    timed: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaning, "CHUNK", 2)
    retired(timed, clock, files=7)
    cleaner = timed.cleaner
    counts = [cleaner.delete_expired_temporary_files(wait=False, enough=lambda: True).files for _ in range(5)]
    assert counts == [2, 2, 2, 1, 0]
    assert timed.verify().ok


def test_files_that_cannot_go_do_not_keep_a_bounded_round_from_the_others(
    shared_place: Place, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaning, "CHUNK", 1)
    book = shared_place.open(clock=clock, temporary_file_grace=GRACE)
    table = retired(book, clock, files=3)
    first = min(row["file_path"] for row in files_of(book, table))
    local = book.lake.store.local_path(first)
    assert local is not None
    local.unlink()
    (local / "inside").mkdir(parents=True)
    cleaner = book.cleaner
    found = [cleaner.delete_expired_temporary_files(wait=False, enough=lambda: True) for _ in range(4)]
    assert [(len(item.failed), item.files) for item in found] == [(1, 0), (0, 1), (0, 1), (0, 0)]
    # Then it begins with it again.
    assert len(cleaner.delete_expired_temporary_files(wait=False, enough=lambda: True).failed) == 1


def test_a_bounded_sweep_goes_on_where_it_stopped(
    timed: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaning, "CHUNK", 2)
    table = numbers(timed, "t")
    for _ in range(3):
        attempt = Attempt(timed.lake, table.record).__enter__()
        timed.lake.renewals.let_go(attempt.commit_id)
    clock.advance(timed.settings.insert_alive + 1)
    cleaner = timed.cleaner
    assert [cleaner.sweep(enough=lambda: True).fenced for _ in range(4)] == [1, 1, 1, 0]


def test_a_bounded_sweep_keeps_its_listing_of_outside_files(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    # Objects have the times of the machine, so the clock is ahead of them.
    clock = ManualClock(SystemClock().now_ms() + 4 * DAY * 1000)
    book = place.open(clock=clock)
    left = [lay(book, f"iceberg/x/data/{number}.parquet", b"left") for number in range(2500)]
    cleaner = book.cleaner
    counts = [cleaner.sweep(enough=lambda: True).objects for _ in range(4)]
    assert counts == [1000, 1000, 500, 0]
    assert objects(book) == []
    assert len(left) == sum(counts)
    # One that was kept for too long is not gone on with.
    lay(book, "iceberg/x/data/1.avro", b"left")
    assert cleaner.sweep(enough=lambda: True).objects == 1
    lay(book, "iceberg/x/data/2.avro", b"left")
    clock.advance(3601)
    assert cleaner.sweep(enough=lambda: True).objects == 1


def test_a_janitor_that_is_stopped_ends_its_round_early(timed: Book, clock: ManualClock) -> None:
    timed.metadata.create_topic("orders", 3)
    timed.metadata.add_segments([describe(partition=number) for number in range(3)])
    hidden = "UPDATE topics SET deleted_at = 1"
    run_sql(timed, hidden)
    janitor = Janitor(timed.lake)
    janitor.stop()
    assert janitor.run_once("topics") == {"topics": {"topics": 0}}
    assert len(records(timed, schema.segments)) == 2
    assert timed.metadata.purge_deleted_topics() == 1


# --- its life ----------------------------------------------------------------------


def test_while_it_rests_nothing_is_done(timed: Book, clock: ManualClock) -> None:
    retired(timed, clock)
    janitor = Janitor(timed.lake)
    timed.pause("janitor", reason="a restore is under way")
    assert janitor.run_once("files") == {"files": {"paused": "a restore is under way"}}
    clock.advance(LONG)
    janitor.run_due()
    assert len(objects(timed)) == 3
    assert timed.resume("janitor")
    timed.pause(reason="everything rests")
    assert janitor.run_once("files") == {"files": {"paused": "everything rests"}}
    timed.resume()
    assert janitor.run_once("files")["files"]["files"] == 3


@in_memory
def test_work_that_it_does_not_know_is_refused(timed: Book) -> None:
    with pytest.raises(InvalidInput, match="no such work"):
        Janitor(timed.lake).run_once("windows")


def test_an_error_at_one_piece_of_work_stops_no_other(
    timed: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    retired(timed, clock)
    janitor = Janitor(timed.lake)

    def fail(*_: object, **__: object) -> None:
        raise RegistryUnavailable("it does not answer", on="registry")

    with monkeypatch.context() as broken:
        broken.setattr(janitor._cleaner, "sweep", fail)
        done = janitor.run_once()
    assert "does not answer" in done["sweep"]["error"]
    assert done["files"]["files"] == 3
    assert ("sweep", "failed") in work(timed)
    assert janitor.status()["chores"]["sweep"]["outcome"] == "failed"
    assert "error" not in janitor.run_once()["sweep"]


def test_a_file_that_storage_refuses_to_delete_is_told_of_once(shared_place: Place, clock: ManualClock) -> None:
    book = shared_place.open(clock=clock, temporary_file_grace=GRACE)
    table = retired(book, clock, files=2)
    local = book.lake.store.local_path(files_of(book, table)[0]["file_path"])
    assert local is not None
    local.unlink()
    (local / "inside").mkdir(parents=True)
    janitor = Janitor(book.lake)
    for _ in range(3):
        janitor.run_once("files")
    assert work(book) == [("files", "done")]
    assert detail(book, "files")["failed"] == 1
    assert len(janitor.status()["failed"]["files"]) == 1
    (local / "inside").rmdir()
    local.rmdir()
    assert janitor.run_once("files")["files"]["files"] == 1
    assert janitor.status()["failed"] == {}


def test_how_it_stands_can_be_written_down(timed: Book) -> None:
    janitor = Janitor(timed.lake)
    janitor.run_once()
    state = orjson.loads(orjson.dumps(janitor.status()))
    assert set(state["chores"]) == {
        "leases",
        "topics",
        "retention",
        "merging",
        "groups",
        "segments",
        "tables",
        "files",
        "sweep",
        "debts",
        "events",
        "commits",
        "history",
        "upkeep",
    }
    assert all(chore["last_run"] is not None and chore["next_run"] for chore in state["chores"].values())


def test_it_works_by_itself_until_it_is_stopped(shared_place: Place) -> None:
    clock = SystemClock()
    book = shared_place.open(temporary_file_grace=0, maintenance_interval=0.05, lease_seconds=1.0)
    table = numbers(book, "t", [1], [2])
    janitor = Janitor(book.lake)
    janitor.start()
    try:
        table.delete("true")
        deadline = clock.monotonic() + PATIENCE
        while objects(book):
            assert clock.monotonic() < deadline
            book.cleaner.expire(seconds=0, versions=1)
    finally:
        janitor.stop()
    assert not any(state["running"] for state in janitor.status()["chores"].values())
    assert ("files", "done") in work(book)
    assert book.verify().ok


def test_two_janitors_at_once_do_no_harm(shared_place: Place, clock: ManualClock) -> None:
    book = shared_place.open(clock=clock, temporary_file_grace=GRACE, events_kept=0)
    for number in range(3):
        retired(book, clock, f"t{number}", files=4)
    kept = numbers(book, "kept", [1], [2])
    book.tables.drop("t0")
    others = [shared_place.open(clock=clock, temporary_file_grace=GRACE, events_kept=0) for _ in range(2)]
    found: list[dict[str, dict[str, Any]]] = []
    threads = [
        threading.Thread(target=lambda other: found.append(Janitor(other.lake).run_once()), args=(other,))
        for other in others
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [item for done in found for item in done.values() if "error" in item] == []
    assert sorted(objects(book)) == sorted(row["file_path"] for row in files_of(book, kept))
    assert ids(kept) == [1, 2]
    assert book.verify().ok


# --- paths that others chose ---------------------------------------------------------


def test_a_cleaner_that_was_slow_does_not_delete_a_file_that_was_added_meanwhile(
    shared_place: Place, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick = (shared_place.open(clock=clock, temporary_file_grace=GRACE) for _ in range(2))
    table = numbers(quick, "t")
    path = lay(quick, "in/x.parquet", rows_of(table, [{"id": 1}]))
    table.add_files([path])
    table.delete("true")
    clock.advance(1)
    quick.cleaner.expire(seconds=0, versions=1)
    clock.advance(GRACE + 1)
    looked, go_on = threading.Event(), threading.Event()
    delete = slow.lake.store.delete

    def freeze(paths: Any) -> Any:
        looked.set()
        assert go_on.wait(PATIENCE)
        return delete(paths)

    monkeypatch.setattr(slow.lake.store, "delete", freeze)
    cleaning_up = threading.Thread(target=slow.cleaner.delete_expired_temporary_files)
    cleaning_up.start()
    assert looked.wait(PATIENCE)
    # It has looked whether the file may go, and is about to delete it. Another does it first.
    assert quick.cleaner.delete_expired_temporary_files().files == 1
    lay(quick, path, rows_of(table, [{"id": 2}]))
    for _ in range(2):
        with pytest.raises(PathInUse, match="removed within the last day"):
            table.add_files([path])
        clock.advance(DAY / 3)
        quick.cleaner.delete_expired_temporary_files()
    go_on.set()
    cleaning_up.join(PATIENCE)
    monkeypatch.undo()
    # The file that nobody could add is lost to its writer; no row was ever led astray.
    assert objects(quick) == []
    assert quick.verify().ok
    clock.advance(DAY / 3)
    Janitor(quick.lake).run_once("files")
    assert records(quick, schema.temporary_files) == []
    lay(quick, path, rows_of(table, [{"id": 3}]))
    table.add_files([path])
    assert ids(table) == [3]
    assert quick.verify().ok


def test_what_lies_where_a_file_was_deleted_is_never_deleted_for_that(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t")
    path = lay(timed, "in/x.parquet", rows_of(table, [{"id": 1}]))
    table.add_files([path])
    timed.metadata.create_topic("orders")
    table.delete("true")
    clock.advance(1)
    timed.cleaner.expire(seconds=0, versions=1)
    clock.advance(GRACE + 1)
    janitor = Janitor(timed.lake)
    assert janitor.run_once("files")["files"]["files"] == 1
    (row,) = records(timed, schema.temporary_files)
    assert (row["file_path"], row["reason"]) == (path, "deleted")
    # It waits for nothing, so nobody counts it.
    assert list(timed.metadata.list_temporary_files()) == []
    values = timed.measure().values()
    assert (values["lakebook_temporary_files"], values["lakebook_temporary_files_expired"]) == (0, 0)
    assert timed.verify().ok
    lay(timed, path, b"somebody's own")
    with pytest.raises(PathInUse):
        timed.metadata.add_segment(describe(s3_key=path))
    for _ in range(3):
        clock.advance(DAY / 2)
        janitor.run_once()
        assert objects(timed) == [path]
    assert records(timed, schema.temporary_files) == []


def test_own_paths_leave_nothing_behind(timed: Book, clock: ManualClock) -> None:
    table = numbers(timed, "t", [1])
    timed.lake.publish(table.record)
    timed.tables.drop("t")
    janitor = Janitor(timed.lake)
    for _ in range(3):
        janitor.run_once()
        clock.advance(timed.settings.published_grace + 1)
    janitor.run_once()
    assert objects(timed) == []
    assert records(timed, schema.temporary_files) == []


# --- the databases' own upkeep --------------------------------------------------------


@pytest.fixture
def sqlite(make_place: Callable[[str], Place]) -> Book:
    return make_place(SQLITE).open()


def fill(book: Book, number: int = 3000) -> None:
    book.metadata.create_topic("orders")
    book.metadata.add_segments([describe(base=base, count=1) for base in range(number)])


def test_free_pages_are_given_back_a_few_at_a_time(sqlite: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "FREE_PAGES", 10)
    fill(sqlite)
    run_sql(sqlite, "DELETE FROM events")
    before = keep_database(sqlite._registry, lambda: True)
    assert before.done == {}
    assert before.facts["free_pages"] > 100
    asked = iter([False, True])
    some = keep_database(sqlite._registry, lambda: next(asked))
    assert 0 < some.done["pages"] <= 256
    after = keep_database(sqlite._registry)
    # A twentieth stays for what comes next.
    assert after.facts["free_pages"] <= max(10, before.facts["pages"] // 20)
    assert after.facts["pages"] < before.facts["pages"]
    assert (after.notes, after.hints) == ([], [])
    assert keep_database(sqlite._registry).done == {}
    assert sqlite.verify().ok


def test_a_large_wal_is_cut_unless_somebody_reads_it(sqlite: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(sqlite, 500)
    large = keep_database(sqlite._registry)
    assert large.facts["wal_bytes"] > 0
    assert "wal_truncated" not in large.done
    monkeypatch.setattr(upkeep, "LARGE_WAL", 1)
    with sqlite._registry.snapshot() as reader:
        assert reader.one(Statement("SELECT count(*) FROM segments")) == (500,)
        # A reader that stands before the last commits keeps them in it.
        sqlite.metadata.create_topic("clicks")
        busy = keep_database(sqlite._registry)
        assert "wal_truncated" not in busy.done
        assert any("somebody is reading it" in note for note in busy.notes)
    done = keep_database(sqlite._registry)
    assert done.done["wal_truncated"]
    assert done.facts["wal_bytes"] == 0
    assert sqlite.verify().ok


def test_upkeep_waits_for_no_writer_and_fails_at_none(sqlite: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "FREE_PAGES", 0)
    monkeypatch.setattr(upkeep, "LARGE_WAL", 1)
    fill(sqlite)
    run_sql(sqlite, "DELETE FROM events")
    with closing(sqlite._registry.database.connect()) as writer:
        writer.execute("BEGIN IMMEDIATE")
        report = keep_database(sqlite._registry)
        assert "pages" not in report.done
        assert report.notes
        writer.execute("ROLLBACK")
    assert keep_database(sqlite._registry).done["pages"] > 0


def analysed(book: Book) -> set[str]:
    if not book._registry.all(Statement("SELECT name FROM sqlite_master WHERE name = 'sqlite_stat1'")):
        return set()
    found = {row[0] for row in book._registry.all(Statement("SELECT DISTINCT tbl FROM sqlite_stat1"))}
    return found & schema.metadata.tables.keys()


def test_statistics_are_gathered_of_large_tables_alone(sqlite: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LARGE_TABLE", 100)
    fill(sqlite, 200)
    assert "segments" in keep_database(sqlite._registry).done["analysed"]
    assert {"segments", "events"} <= analysed(sqlite)
    assert not {"topics", "partitions", "lake_objects"} & analysed(sqlite)
    assert keep_database(sqlite._registry).done == {}


def test_look_ups_keep_their_plans_with_the_statistics(sqlite: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LARGE_TABLE", 100)
    fill(sqlite, 2000)
    before = plans(sqlite)
    keep_database(sqlite._registry)
    sqlite._registry.connections.drop_idle()
    assert plans(sqlite) == before


def test_statistics_that_make_look_ups_slow_are_removed(sqlite: Book) -> None:
    fill(sqlite, 10)
    run_sql(sqlite, "ANALYZE")
    assert "topics" in analysed(sqlite)
    assert keep_database(sqlite._registry).notes == []
    assert analysed(sqlite) == set()


def test_a_book_in_memory_has_nothing_to_keep(make_place: Callable[[str], Place]) -> None:
    book = make_place("memory").open()
    fill(book, 10)
    report = keep_database(book._registry)
    assert (report.done, report.hints, report.notes, report.facts["wal_bytes"]) == ({}, [], [], 0)


@pytest.fixture
def changed(make_place: Callable[[str], Place]) -> Book:
    """A book on PostgreSQL whose statistics are stale, and the server knows it."""
    book = make_place(POSTGRESQL).open()
    fill(book)
    # A session tells what it has changed when it ends.
    book._registry.connections.drop_idle()
    return book


def until(condition: Callable[[], Any]) -> Any:
    deadline = SystemClock().monotonic() + PATIENCE
    while not (found := condition()):
        assert SystemClock().monotonic() < deadline
    return found


def test_tables_with_stale_statistics_are_analysed(changed: Book) -> None:
    until(lambda: keep_database(changed._registry, lambda: True).facts["rows"] > 6000)
    # The server's own autovacuum may be at a table just then; it is noted, and the next round has it.
    until(lambda: not keep_database(changed._registry).notes)
    estimate = changed._registry.one(Statement("SELECT reltuples FROM pg_class WHERE relname = 'segments'"))
    assert estimate == (3000.0,)


def test_tables_with_many_dead_rows_are_told_of(changed: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "DEAD_ROWS", 100)
    run_sql(changed, "UPDATE segments SET size_bytes = size_bytes + 1")
    changed._registry.connections.drop_idle()
    (hint,) = until(lambda: keep_database(changed._registry).hints)
    assert "segments has 3000 dead rows" in hint
    assert "VACUUM (ANALYZE) segments" in hint


def test_a_role_that_owns_nothing_gets_a_note_and_no_failure(postgres: Postgres, changed: Book) -> None:
    url = changed.settings.registry
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("DROP ROLE IF EXISTS keeps_nothing")
        admin.execute("CREATE ROLE keeps_nothing LOGIN")
        admin.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO keeps_nothing")
    place = Place(POSTGRESQL, url.replace("//postgres:", "//keeps_nothing:"), {"warehouse": postgres.warehouse})
    try:
        book = place.open()
        report = until(lambda: (found := keep_database(book._registry)).notes and found)
        assert "analysed" not in report.done
        assert any("segments" in note for note in report.notes)
        assert "error" not in Janitor(book.lake).run_once("upkeep")["upkeep"]
    finally:
        place.close()
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute("DROP OWNED BY keeps_nothing")
            admin.execute("DROP ROLE keeps_nothing")
