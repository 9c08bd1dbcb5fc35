"""A change is published before it returns, soon after, or not at all; and publishing never undoes a change."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from books import MEMORY, Place
from lake import (
    PATIENCE,
    ids,
    in_memory,
    insert,
    lay,
    numbers,
    objects,
    own_warehouse,  # noqa: F401
    records,
    with_ids,
)
from lakebook import Book, InsertReport, failpoints
from lakebook.clock import ManualClock
from lakebook.errors import (
    BookClosed,
    EpochChanged,
    NotPublishable,
    PublishFailed,
    RegistryUnavailable,
    StorageUnavailable,
)
from lakebook.lake.background import FIRST_PAUSE, LONGEST_PAUSE, BackgroundPublisher
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.tables import TableRecord

HOUR = 3600.0


def covered(table: Table) -> list[str]:
    return [item.summary["lakebook.versions"] for item in table.snapshots()]


def published(table: Table) -> int | None:
    return table.describe().published_version


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


FULL = OSError("the disk is full")


# --- sync ------------------------------------------------------------------------


def test_in_sync_mode_every_change_returns_when_it_is_published(place: Place) -> None:
    book = place.open(publish="sync")
    table = book.tables.create("t", "id BIGINT")
    assert published(table) == 0
    done = insert(table, {"id": 1})
    assert published(table) == 1
    assert done.snapshot_id == table.snapshots()[-1].snapshot_id
    assert done.seconds["publish"] > 0
    assert set(done.seconds) >= {"insert_data", "commit", "update_table_files", "update_table_statistics"}
    done = table.add_files([lay(book, "outside/a.parquet", with_ids(table, [{"id": 2}]))])
    assert (published(table), done.snapshot_id) == (2, table.snapshots()[-1].snapshot_id)
    with table.update_schema() as update:
        update.add_column("name", "STRING")
    assert published(table) == 3
    reports: list[InsertReport] = []
    with table.appender(on_commit=reports.append) as appender:
        appender.append({"id": 3, "name": "c"})
    assert published(table) == 4
    assert [report.snapshot_id for report in reports] == [table.snapshots()[-1].snapshot_id]
    done = table.delete("id = 3")
    assert (published(table), done.snapshot_id) == (5, table.snapshots()[-1].snapshot_id)
    before = table.metadata_location
    table.set_properties(**{"user.team": "sales"})
    assert table.metadata_location != before
    assert covered(table) == ["1", "2", "4", "5"]
    assert book.lake.background.waiting() == 0


def test_a_change_that_had_nothing_to_do_has_no_snapshot(place: Place) -> None:
    book = place.open(publish="sync")
    table = numbers(book, "t", [1])
    done = table.delete("id = 7")
    assert (done.version, done.snapshot_id) == (1, None)
    assert "publish" not in done.seconds


def test_an_insert_waits_for_no_later_version(shared_place: Place) -> None:
    book, other = shared_place.open(publish="sync"), shared_place.open(publish="off")
    table = numbers(book, "t")
    rival = other.table("t")

    def interfere() -> None:
        if rival.version == 1:
            insert(rival, {"id": 2})
            rival.delete("id = 1")

    with failpoints.armed("publish.reserved", interfere):
        done = insert(table, {"id": 1})
    assert (covered(table), table.version) == (["1"], 3)
    assert done.snapshot_id == table.snapshots()[0].snapshot_id
    insert(table, {"id": 4})
    assert covered(table) == ["1", "2", "3", "4"]


def test_an_insert_that_others_have_published_has_the_snapshot_that_covers_it(shared_place: Place) -> None:
    book, other = shared_place.open(publish="sync"), shared_place.open(publish="sync")
    table = numbers(book, "t")
    rival = other.table("t")

    def interfere() -> None:
        if rival.version == 1:
            insert(rival, {"id": 2})
            rival.delete("id = 2")

    with failpoints.armed("change.committed", interfere):
        done = insert(table, {"id": 1})
    assert covered(table) == ["1-2", "3"]
    assert (done.version, done.snapshot_id) == (1, table.snapshots()[0].snapshot_id)


@pytest.mark.parametrize("error", [FULL, PublishFailed("no"), RuntimeError("a bug")], ids=lambda error: str(error))
@in_memory
def test_a_change_that_cannot_be_published_says_that_it_is_committed(place: Place, error: Exception) -> None:
    book = place.open(publish="sync")
    table = numbers(book, "t", [1])
    with (
        failpoints.armed("publish.metadata_written", raising(error)),
        pytest.raises(
            PublishFailed, match=r"the change is committed \(at version 2\), but it is not published"
        ) as told,
    ):
        insert(table, {"id": 2})
    assert str(error) in str(told.value)
    assert "Do not repeat" in told.value.remedy
    assert (ids(table), table.version, published(table)) == ([1, 2], 2, 1)
    values = book.metrics.values()
    assert values["lakebook_table_changes_total{operation=append}"] == 2
    assert values["lakebook_publishes_total{outcome=failed}"] == 1
    insert(table, {"id": 3})
    assert covered(table) == ["1", "2-3"]


@in_memory
def test_a_table_is_created_and_changed_even_if_that_cannot_be_published(place: Place) -> None:
    book = place.open(publish="sync")
    with failpoints.armed("publish.metadata_written", raising(FULL)):
        with pytest.raises(PublishFailed, match="at version 0"):
            book.tables.create("t", "id BIGINT")
        table = book.table("t")
        with pytest.raises(PublishFailed, match="at version 1"), table.update_schema() as update:
            update.add_column("name", "STRING")
        with pytest.raises(PublishFailed, match="at version 1"):
            table.set_properties(**{"user.team": "sales"})
    assert [column.name for column in table.describe().columns] == ["id", "name"]
    assert table.metadata.properties == {"user.team": "sales"}
    assert published(table) is None


@in_memory
def test_an_appender_reports_a_commit_that_could_not_be_published(place: Place) -> None:
    book = place.open(publish="sync")
    table = numbers(book, "t")
    reports: list[InsertReport] = []
    appender = table.appender(on_commit=reports.append)
    appender.append({"id": 1})
    with (
        failpoints.armed("publish.metadata_written", raising(FULL)),
        pytest.raises(PublishFailed, match="at version 1"),
    ):
        appender.flush()
    assert [(report.version, report.rows, report.snapshot_id) for report in reports] == [(1, 1, None)]
    appender.append({"id": 2})
    appender.close()
    assert ids(table) == [1, 2]
    assert reports[1].snapshot_id == table.snapshots()[-1].snapshot_id
    assert covered(table) == ["1-2"]


# --- off -------------------------------------------------------------------------


def test_where_publishing_is_off_nothing_is_published(place: Place) -> None:
    book = place.open(publish="off")
    table = numbers(book, "t", [1])
    with table.update_schema() as update:
        update.add_column("name", "STRING")
    table.set_properties(**{"user.team": "sales"})
    done = table.delete("true")
    assert (done.snapshot_id, "publish" in done.seconds) == (None, False)
    assert book.lake.background.waiting() == 0
    assert book.lake.background.flush()
    assert objects(book, "iceberg") == []
    assert records(book, schema.iceberg_tables) == []
    assert table.publish().version == 3


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_table_of_json_is_left_alone(place: Place, mode: str) -> None:
    book = place.open(publish=mode, publish_lag=HOUR)
    table = numbers(book, "t", format="json")
    table.set_properties(**{"user.team": "sales"})
    assert book.lake.background.waiting() == 0
    assert (table.metadata_location, objects(book, "iceberg")) == (None, [])


# --- async -----------------------------------------------------------------------


def test_in_async_mode_a_burst_of_changes_becomes_one_snapshot(place: Place) -> None:
    clock = ManualClock()
    book = place.open(publish="async", publish_lag=HOUR, clock=clock)
    table = numbers(book, "t", [1], [2])
    done = insert(table, {"id": 3})
    assert (done.snapshot_id, published(table)) == (None, None)
    assert book.lake.background.waiting() == 1
    clock.advance(HOUR)
    assert book.lake.background.run_once()
    assert book.lake.background.waiting() == 0
    assert (covered(table), published(table)) == (["1-3"], 3)
    table.set_properties(**{"user.team": "sales"})
    with table.update_schema() as update:
        update.add_column("name", "STRING")
    assert book.lake.background.flush()
    assert published(table) == 4


@in_memory
def test_the_thread_publishes_by_itself(place: Place) -> None:
    book = place.open(publish="async", publish_lag=0)
    done = threading.Event()
    with failpoints.armed("publish.committed", done.set):
        table = book.tables.create("t", "id BIGINT")
        assert done.wait(PATIENCE)
        done.clear()
        insert(table, {"id": 1})
        assert done.wait(PATIENCE)
    book.lake.background.flush()
    assert (covered(table), published(table)) == (["1"], 1)


def test_closing_a_book_publishes_what_it_has_changed(shared_place: Place) -> None:
    with shared_place.open(publish="async", publish_lag=HOUR) as book:
        first, second = numbers(book, "a", [1], [2]), numbers(book, "b", [3])
    with shared_place.open() as book:
        assert [published(book.table(table.name)) for table in (first, second)] == [2, 1]
        assert covered(book.table("a")) == ["1-2"]


def test_a_book_whose_changes_cannot_be_published_is_closed_all_the_same(shared_place: Place) -> None:
    book = shared_place.open(publish="async", publish_lag=HOUR)
    numbers(book, "t", [1])
    lease = book.table("t").pin().lease
    with failpoints.armed("publish.metadata_written", raising(FULL)):
        book.close()
    assert book.metrics.values()["lakebook_publishes_total{outcome=failed}"] == 1
    with pytest.raises(BookClosed):
        book.table("t")
    with shared_place.open() as book:
        assert [row["id"] for row in records(book, schema.leases) if row["id"] == lease.id] == []
        assert (ids(book.table("t")), published(book.table("t"))) == ([1], None)


@in_memory
def test_an_insert_whose_outcome_was_lost_to_its_caller_is_published_all_the_same(place: Place) -> None:
    book = place.open(publish="async", publish_lag=HOUR)
    table = numbers(book, "t")
    assert book.lake.background.flush()
    failures = [KeyboardInterrupt()]

    def interrupt() -> None:
        if failures and table.version == 1:
            raise failures.pop()

    with failpoints.armed("transaction.after_commit", interrupt), pytest.raises(KeyboardInterrupt):
        insert(table, {"id": 1})
    assert ids(table) == [1]
    assert book.lake.background.waiting() == 1


# --- the background publisher by itself --------------------------------------------


class Stand:
    """A background publisher without a thread, on a clock of the test, that counts what it publishes."""

    def __init__(self, book: Book) -> None:
        self.clock = ManualClock()
        self.book = book
        self.published: list[str] = []
        self.tried: list[float] = []
        self.errors: list[BaseException] = []
        self.background = BackgroundPublisher(self._publish, self.clock, 1.0, threaded=False)

    def _publish(self, table: TableRecord) -> None:
        self.tried.append(self.clock.monotonic())
        if self.errors:
            raise self.errors.pop(0)
        self.book.lake.publish(table)
        self.published.append(table.name)


@pytest.fixture
def stand(make_place: Callable[..., Place]) -> Stand:
    return Stand(make_place(MEMORY).open())


def tables(stand: Stand, *names: str) -> list[TableRecord]:
    return [numbers(stand.book, name, [1]).record for name in names]


def test_a_table_is_published_a_moment_after_it_was_noticed_first(stand: Stand) -> None:
    (table,) = tables(stand, "t")
    stand.background.notice(table)
    stand.clock.advance(0.6)
    stand.background.notice(table)
    assert stand.background.run_once()
    assert stand.published == []
    stand.clock.advance(0.4)
    assert stand.background.run_once()
    assert stand.background.run_once()
    assert stand.published == ["t"]
    stand.background.notice(table)
    stand.clock.advance(1)
    stand.background.run_once()
    assert stand.published == ["t", "t"]


def test_each_noticed_table_is_published_once(stand: Stand) -> None:
    first, second = tables(stand, "a", "b")
    for _ in range(3):
        stand.background.notice(first)
        stand.background.notice(second)
    assert stand.background.waiting() == 2
    stand.clock.advance(1)
    stand.background.run_once()
    assert stand.published == ["a", "b"]


def test_what_is_noticed_while_it_is_published_is_published_again(stand: Stand) -> None:
    (table,) = tables(stand, "t")
    stand.background.notice(table)
    with failpoints.armed("publish.committed", lambda: stand.background.notice(table)):
        assert stand.background.flush()
    assert stand.background.waiting() == 1
    assert stand.background.flush()
    assert stand.published == ["t", "t"]


def test_a_failure_is_tried_again_after_ever_longer_pauses(stand: Stand) -> None:
    (table,) = tables(stand, "t")
    stand.errors = [PublishFailed("no") for _ in range(10)]
    stand.background.notice(table)
    while not stand.published:
        stand.clock.advance(FIRST_PAUSE)
        stand.background.run_once()
    pauses = [after - before for before, after in itertools.pairwise(stand.tried)]
    assert pauses == [min(FIRST_PAUSE * 2**number, LONGEST_PAUSE) for number in range(10)]
    assert pauses[-1] == LONGEST_PAUSE
    # It has succeeded, and a new failure is the first again.
    stand.errors = [PublishFailed("no")]
    stand.background.notice(table)
    assert not stand.background.flush()
    stand.clock.advance(FIRST_PAUSE)
    assert stand.background.run_once()
    assert stand.published == ["t", "t"]


def test_being_noticed_again_does_not_shorten_the_pause_after_a_failure(stand: Stand) -> None:
    (table,) = tables(stand, "t")
    stand.errors = [PublishFailed("no"), PublishFailed("no")]
    stand.background.notice(table)
    assert not stand.background.flush()
    assert not stand.background.flush()
    stand.background.notice(table)
    stand.clock.advance(2 * FIRST_PAUSE - 0.01)
    assert stand.background.run_once()
    assert stand.published == []
    stand.clock.advance(0.01)
    assert stand.background.run_once()
    assert stand.published == ["t"]


def test_one_table_that_fails_keeps_no_other_from_being_published(stand: Stand) -> None:
    first, second = tables(stand, "a", "b")
    stand.errors = [RuntimeError("a bug")]
    stand.background.notice(first)
    stand.background.notice(second)
    assert not stand.background.flush()
    assert stand.published == ["b"]
    assert stand.background.flush()
    assert stand.published == ["b", "a"]


@pytest.mark.parametrize("error", [RegistryUnavailable("down"), StorageUnavailable("down")], ids=lambda it: it.code)
def test_in_an_outage_no_further_table_is_tried(stand: Stand, error: Exception) -> None:
    first, second = tables(stand, "a", "b")
    stand.errors = [error]
    stand.background.notice(first)
    stand.background.notice(second)
    assert not stand.background.flush()
    assert (stand.published, stand.background.waiting()) == ([], 2)
    assert stand.background.flush()
    assert sorted(stand.published) == ["a", "b"]


def test_what_cannot_be_published_is_not_tried_again_before_it_changes(stand: Stand) -> None:
    (table,) = tables(stand, "t")
    stand.errors = [NotPublishable("it has two columns of one name", on="table t")]
    stand.background.notice(table)
    assert not stand.background.flush()
    assert stand.background.waiting() == 0
    stand.clock.advance(HOUR)
    stand.background.run_once()
    assert stand.published == []
    stand.background.notice(table)
    assert stand.background.flush()
    assert stand.published == ["t"]


def test_a_dropped_table_is_forgotten(stand: Stand) -> None:
    (table,) = tables(stand, "t")
    stand.background.notice(table)
    stand.book.tables.drop("t")
    assert stand.background.flush()
    assert (stand.published, stand.background.waiting()) == ([], 0)
    assert stand.book.metrics.values()["lakebook_publishes_total{outcome=dropped}"] == 1


@pytest.mark.parametrize("error", [BookClosed("closed"), EpochChanged("restored")], ids=lambda it: it.code)
def test_where_the_book_is_closed_nothing_more_is_noticed(stand: Stand, error: Exception) -> None:
    first, second = tables(stand, "a", "b")
    stand.errors = [error]
    stand.background.notice(first)
    stand.background.notice(second)
    assert not stand.background.flush()
    stand.background.notice(first)
    assert stand.background.waiting() == 0
    stand.background.close()
    assert stand.published == []


def test_an_interrupt_of_a_flush_loses_no_notice(stand: Stand) -> None:
    (table,) = tables(stand, "t")
    stand.errors = [KeyboardInterrupt()]
    stand.background.notice(table)
    with pytest.raises(KeyboardInterrupt):
        stand.background.flush()
    assert stand.background.flush()
    assert stand.published == ["t"]


def test_a_flush_without_time_begins_no_table(stand: Stand) -> None:
    (table,) = tables(stand, "t")
    stand.background.notice(table)
    assert not stand.background.flush(0)
    assert stand.published == []
    assert stand.background.flush(10)
    assert stand.published == ["t"]


def test_a_flush_waits_for_who_publishes_just_now(stand: Stand) -> None:
    (table,) = tables(stand, "t")
    stand.background.notice(table)
    stand.clock.advance(1)
    begun, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    with failpoints.armed("publish.metadata_written", pause):
        thread = threading.Thread(target=stand.background.run_once)
        thread.start()
        assert begun.wait(PATIENCE)
        assert not stand.background.flush(0.001)
        go_on.set()
        assert stand.background.flush()
        assert stand.published == ["t"]
        thread.join(PATIENCE)


def test_closing_publishes_once_and_keeps_its_failures_to_itself(stand: Stand) -> None:
    first, second = tables(stand, "a", "b")
    stand.errors = [PublishFailed("no", on="table a")]
    stand.background.notice(first)
    stand.background.notice(second)
    stand.background.close()
    stand.background.close()
    assert stand.published == ["b"]
    stand.background.notice(first)
    assert stand.background.waiting() == 0


def test_a_forked_child_has_neither_the_thread_nor_the_notices_of_its_parent(shared_place: Place) -> None:
    book = shared_place.open(publish="async", publish_lag=HOUR)
    table = numbers(book, "t", [1])
    assert book.lake.background.waiting() == 1

    def in_child() -> int:
        background = book.lake.background
        if background.waiting() or not background.flush() or published(table) is not None:
            return 1
        insert(table, {"id": 2})
        names = [thread.name for thread in threading.enumerate()]
        if background.waiting() != 1 or names.count("lakebook-publishing") != 1:
            return 2
        book.close()
        return 0

    child = os.fork()
    if child == 0:
        code = 9
        try:
            code = in_child()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert published(table) == 2
    assert book.lake.background.waiting() == 1
    assert book.lake.background.flush()
    assert covered(table) == ["1-2"]


def test_publishing_is_counted_and_timed(place: Place) -> None:
    book = place.open(publish="sync")
    numbers(book, "t", [1])
    values: dict[str, Any] = book.measure().values()
    assert values["lakebook_publishes_total{outcome=published}"] == 2
    assert values["lakebook_publish_seconds_count"] == 2
    assert values["lakebook_publish_seconds_sum"] > 0
    assert (values["lakebook_unpublished_tables"], values["lakebook_unpublished_versions"]) == (0, 0)
    assert book.table("t").to_arrow() == pa.table({"id": pa.array([1], pa.int64())})
