"""An appender makes files of records by their number, size or age, and loses none that it has taken."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from books import Place
from lake import (  # noqa: F401
    PATIENCE,
    check_totals,
    files_of,
    ids,
    in_memory,
    insert,
    numbers,
    objects,
    own_warehouse,
    records,
    rows_of,
)
from lakebook import Book, failpoints
from lakebook.errors import InvalidInput, LakebookError, RegistryBusy, StorageRefused, TableNotFound
from lakebook.lake.appender import Appender
from lakebook.lake.inserting import InsertReport
from lakebook.registry import schema


class Reports:
    """Collects the reports of commits, and lets a test wait for them."""

    def __init__(self) -> None:
        self.all: list[InsertReport] = []
        self._changed = threading.Condition()

    def __call__(self, report: InsertReport) -> None:
        with self._changed:
            self.all.append(report)
            self._changed.notify_all()

    def wait_for(self, number: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.all) >= number, PATIENCE)

    @property
    def rows(self) -> list[int]:
        return [report.rows for report in self.all]


class Fails:
    """Fails some times, and then no more."""

    def __init__(self, times: int, error: Exception) -> None:
        self.left = times
        self.error = error
        self.failed = threading.Event()

    def __call__(self) -> None:
        if self.left:
            self.left -= 1
            self.failed.set()
            raise self.error


# --- rotation ------------------------------------------------------------------


@in_memory
def test_rows_become_files_by_their_number(book: Book) -> None:
    table = numbers(book, "t")
    reports = Reports()
    with table.appender(max_rows=3, on_commit=reports) as appender:
        for number in range(7):
            appender.append({"id": number})
            assert table.count() == (number + 1) // 3 * 3
    assert reports.rows == [3, 3, 1]
    assert [report.version for report in reports.all] == [1, 2, 3]
    assert ids(table) == list(range(7))
    assert check_totals(book, table)[:2] == (7, 3)
    assert book.verify().ok


@in_memory
def test_an_appender_reports_every_step_of_each_commit_and_the_metrics_tell_of_them(book: Book) -> None:
    table = numbers(book, "t")
    reports = Reports()
    with table.appender(max_rows=1, files_per_commit=2, on_commit=reports) as appender:
        for number in range(3):
            appender.append({"id": number})
    steps = {"insert_data", "commit", "update_table_files", "update_table_statistics"}
    assert [(report.files, set(report.seconds)) for report in reports.all] == [(2, steps), (1, steps)]
    values = book.metrics.values()
    told = {step: values[f"lakebook_insert_step_seconds_count{{step={step}}}"] for step in sorted(steps)}
    assert told == dict.fromkeys(sorted(steps), 2)
    of_appends = {
        name: values[f"lakebook_table_{name}_total{{operation=append}}"]
        for name in ("changes", "rows_added", "files_added", "bytes_added")
    }
    assert of_appends == {"changes": 2, "rows_added": 3, "files_added": 3, "bytes_added": check_totals(book, table)[2]}


@in_memory
def test_rows_become_files_by_their_size(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, text STRING")
    reports = Reports()
    with table.appender(max_bytes=100_000, on_commit=reports) as appender:
        for number in range(25):
            appender.append({"id": number, "text": "x" * 10_000})
    assert sum(reports.rows) == 25
    assert len(reports.rows) == 3
    assert reports.rows[0] == reports.rows[1] == 10
    assert ids(table) == list(range(25))


def test_rows_become_a_file_by_their_age_also_when_nothing_more_arrives(book: Book) -> None:
    table = numbers(book, "t")
    reports = Reports()
    with table.appender(max_age=0.05, on_commit=reports) as appender:
        for number in range(3):
            appender.append({"id": number})
            assert reports.wait_for(number + 1)
            assert ids(table) == list(range(number + 1))
    assert reports.rows == [1, 1, 1]
    assert book.verify().ok


def test_files_that_wait_for_others_are_committed_by_their_age_too(book: Book) -> None:
    table = numbers(book, "t")
    reports = Reports()
    with table.appender(max_rows=2, max_age=0.2, files_per_commit=5, on_commit=reports) as appender:
        appender.append([{"id": 1}, {"id": 2}])
        assert reports.wait_for(1), "the rows are in a file that nobody commits"
        assert ids(table) == [1, 2]


def test_several_files_go_into_one_commit(book: Book) -> None:
    table = numbers(book, "t")
    reports = Reports()
    with table.appender(max_rows=2, files_per_commit=3, on_commit=reports) as appender:
        for number in range(7):
            appender.append({"id": number})
            assert table.version == (number == 6 or number == 5)
    assert [(report.rows, report.files, report.version) for report in reports.all] == [(6, 3, 1), (1, 1, 2)]
    assert [file["row_count"] for file in files_of(book, table)] == [2, 2, 2, 1]
    assert len({file["commit_id"] for file in files_of(book, table)}) == 2
    assert check_totals(book, table)[:2] == (7, 4)
    assert book.verify().ok


@in_memory
def test_rows_of_a_partitioned_table_become_a_file_each(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, k STRING", partition_by=["k"], sort_by=["id desc"])
    with table.appender(max_rows=4) as appender:
        for number in range(8):
            appender.append({"id": number, "k": "ab"[number % 2]})
    assert check_totals(book, table)[:2] == (8, 4)
    assert [file.partition_path for file in table.plan("k = 'a'")] == ["k=a", "k=a"]
    assert table.to_arrow("k = 'a'").column("id").to_pylist() == [2, 0, 6, 4]


@in_memory
def test_flush_writes_what_there_is_and_says_so(book: Book) -> None:
    table = numbers(book, "t")
    with table.appender(properties={"job": "stream"}) as appender:
        assert appender.flush() is None
        appender.append({"id": 1})
        appender.append([{"id": 2}, {"id": 3}])
        report = appender.flush()
        assert report is not None
        assert (report.rows, report.files, report.version) == (3, 1, 1)
        assert appender.flush() is None
        assert ids(table) == [1, 2, 3]
        assert table.history()[0].summary == {"job": "stream"}
    assert table.version == 1


@in_memory
def test_arrow_tables_batches_and_records_can_be_mixed(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, d DOUBLE, s STRUCT<a: INT, l: ARRAY<INT>>")
    with table.appender() as appender:
        appender.append({"id": 1, "d": math.nan, "s": {"a": 1, "l": [1, None]}})
        appender.append(pa.table({"id": pa.array([2], pa.int32())}))
        appender.append(pa.record_batch({"d": [0.5], "id": [3]}))
        appender.append([])
        appender.append(pa.table({"id": pa.array([], pa.int64())}))
        appender.append(rows_of(table, [{"id": 4}]))
    found = table.to_arrow("id > 1").to_pylist()
    assert found == [
        {"id": 2, "d": None, "s": None},
        {"id": 3, "d": 0.5, "s": None},
        {"id": 4, "d": None, "s": None},
    ]
    (first,) = table.to_arrow("d IS NAN").to_pylist()
    assert first["s"] == {"a": 1, "l": [1, None]}
    assert table.version == 1
    assert book.verify().ok


def test_many_threads_may_append_at_once(book: Book) -> None:
    table = numbers(book, "t")
    with table.appender(max_rows=50) as appender:

        def append(first: int) -> None:
            for number in range(first, first + 100):
                appender.append({"id": number})

        threads = [threading.Thread(target=append, args=(first,)) for first in range(0, 400, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert ids(table) == list(range(400))
    assert check_totals(book, table)[0] == 400
    assert book.verify().ok


# --- ending --------------------------------------------------------------------


@in_memory
def test_close_writes_the_rest_and_nothing_can_be_appended_after_it(book: Book) -> None:
    table = numbers(book, "t")
    appender = table.appender()
    appender.append({"id": 1})
    appender.close()
    appender.close()
    assert ids(table) == [1]
    with pytest.raises(InvalidInput):
        appender.append({"id": 2})
    assert appender.flush() is None
    assert table.version == 1
    assert {row["state"] for row in records(book, schema.commits, kind="insert")} == {"committed"}
    assert book.verify().ok


@in_memory
def test_abandon_leaves_nothing_but_what_was_committed(book: Book) -> None:
    table = numbers(book, "t")
    appender = table.appender(max_rows=2, files_per_commit=3)
    for number in range(11):
        appender.append({"id": number})
    appender.abandon()
    appender.abandon()
    assert ids(table) == [0, 1, 2, 3, 4, 5]
    assert len(objects(book)) == 3
    with pytest.raises(InvalidInput):
        appender.append({"id": 99})
    assert book.verify().ok


@in_memory
def test_an_error_in_the_block_gives_up_what_was_not_committed(book: Book) -> None:
    table = numbers(book, "t")

    def go_wrong() -> None:
        with table.appender(max_rows=2) as appender:
            appender.append([{"id": 1}, {"id": 2}])
            appender.append({"id": 3})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        go_wrong()
    assert ids(table) == [1, 2]
    assert len(objects(book)) == 1
    assert book.verify().ok


# --- failures ------------------------------------------------------------------


@in_memory
def test_rows_that_were_taken_are_kept_and_the_next_append_tells_that_they_are_not_written(book: Book) -> None:
    table = numbers(book, "t")
    appender = table.appender(max_rows=2)
    appender.append({"id": 1})
    with failpoints.armed("change.written", Fails(1, RegistryBusy("the registry is busy", on="test"))):
        appender.append({"id": 2})
    assert table.count() == 0
    assert objects(book) == []
    # This one is not taken: whoever brings it has to bring it again.
    with pytest.raises(RegistryBusy):
        appender.append({"id": 3})
    appender.append({"id": 4})
    appender.close()
    assert ids(table) == [1, 2, 4]
    assert check_totals(book, table)[0] == 3
    assert book.verify().ok


@in_memory
def test_a_close_that_fails_can_be_tried_again(book: Book) -> None:
    table = numbers(book, "t")
    appender = table.appender()
    appender.append({"id": 1})
    with (
        failpoints.armed("change.written", Fails(1, StorageRefused("the disk is full", on="test"))),
        pytest.raises(StorageRefused),
    ):
        appender.close()
    with pytest.raises(InvalidInput):
        appender.append({"id": 2})
    assert table.count() == 0
    appender.close()
    appender.close()
    assert ids(table) == [1]
    assert book.verify().ok


@in_memory
def test_a_flush_that_fails_can_be_tried_again(book: Book) -> None:
    table = numbers(book, "t")
    with table.appender() as appender:
        appender.append({"id": 1})
        for error in (RegistryBusy("the registry is busy", on="test"), StorageRefused("the disk is full", on="test")):
            with failpoints.armed("change.written", Fails(1, error)), pytest.raises(type(error)):
                appender.flush()
        report = appender.flush()
        assert report is not None and report.rows == 1
        appender.append({"id": 2})
    assert ids(table) == [1, 2]
    assert len(objects(book)) == 2


def surfaced(appender: Appender) -> LakebookError | None:
    """The failure that the appender's own thread has noted, as its caller gets to know it."""
    patience = time.monotonic() + PATIENCE
    while time.monotonic() < patience:
        try:
            appender.append([])
        except LakebookError as error:
            return error
    return None


def test_a_passing_failure_in_the_background_surfaces_once_and_no_row_is_lost(book: Book) -> None:
    table = numbers(book, "t")
    reports = Reports()
    appender = table.appender(max_age=0.05, on_commit=reports)
    with failpoints.armed("change.written", Fails(1, RegistryBusy("the registry is busy", on="test"))):
        appender.append({"id": 1})
        # It may go better in a while: the rows are tried again by themselves.
        assert reports.wait_for(1)
    assert ids(table) == [1]
    assert isinstance(surfaced(appender), RegistryBusy)
    appender.append({"id": 2})
    appender.close()
    assert ids(table) == [1, 2]
    assert book.verify().ok


@in_memory
def test_a_lasting_failure_in_the_background_surfaces_once_and_the_rows_are_kept(book: Book) -> None:
    table = numbers(book, "t")
    appender = table.appender(max_age=0.05)
    with failpoints.armed("change.written", Fails(1, StorageRefused("the disk is full", on="test"))):
        appender.append({"id": 1})
        assert isinstance(surfaced(appender), StorageRefused)
    appender.flush()
    assert ids(table) == [1]
    appender.append({"id": 2})
    appender.close()
    assert ids(table) == [1, 2]
    assert book.verify().ok


@in_memory
def test_close_after_a_failure_in_the_background_loses_no_row(book: Book) -> None:
    table = numbers(book, "t")
    fails = Fails(1, StorageRefused("the disk is full", on="test"))
    appender = table.appender(max_age=0.05)
    with failpoints.armed("change.written", fails):
        appender.append({"id": 1})
        assert fails.failed.wait(PATIENCE)
    # Whether it raises what happened before or not: what was taken is written.
    try:
        appender.close()
    except StorageRefused:
        appender.close()
    assert ids(table) == [1]


@in_memory
def test_an_error_in_the_callers_report_does_not_stop_the_appender(book: Book) -> None:
    table = numbers(book, "t")
    reports = Reports()
    first = Fails(1, ValueError("the caller's own"))

    def on_commit(report: InsertReport) -> None:
        reports(report)
        first()

    appender = table.appender(max_age=0.05, on_commit=on_commit)
    appender.append({"id": 1})
    assert reports.wait_for(1)
    surfaced = []
    try:
        appender.append({"id": 2})
    except Exception as error:  # noqa: BLE001 - whichever way it is told
        surfaced.append(error)
        appender.append({"id": 2})
    assert reports.wait_for(2), "rows are no longer written by their age"
    appender.close()
    assert ids(table) == [1, 2]


@in_memory
def test_an_appender_of_a_dropped_table_says_so(book: Book) -> None:
    table = numbers(book, "t")
    appender = table.appender()
    appender.append({"id": 1})
    book.tables.drop("t")
    with pytest.raises(TableNotFound):
        appender.close()
    assert objects(book) == []
    with pytest.raises(TableNotFound):
        table.appender()


# --- what is refused -----------------------------------------------------------


@in_memory
def test_a_bad_record_is_refused_with_nothing_taken(book: Book) -> None:
    table = book.tables.create("t", "id INT NOT NULL, d DECIMAL(5, 2), day DATE, s STRUCT<a: INT NOT NULL, b: STRING>")
    good = {"id": 1}
    bad: list[Any] = [
        {"id": None},
        {},
        {"id": "x"},
        {"id": 2**31},
        {"id": 1, "more": 1},
        {"id": 1, "ID": 1},
        {"id": 1, "d": "x"},
        {"id": 1, "d": 12345},
        {"id": 1, "day": "2024-01-01x"},
        {"id": 1, "s": {"a": None}},
        {"id": 1, "s": {"b": "x"}},
        {"id": 1, "s": 5},
        {"id": 1, "s": {"a": 1, "b": "\ud800"}},
        7,
        "text",
        None,
        [good, None],
        [good, {"id": "x"}],
        [good, good, {"more": 1}],
        [[good]],
        pa.table({"id": pa.array([1, None], pa.int32())}),
        pa.table({"id": ["x"]}),
        pa.table({"id": pa.array([1], pa.int32()), "more": [1]}),
        pa.record_batch({"more": [1]}),
    ]
    with table.appender() as appender:
        for rows in bad:
            with pytest.raises(LakebookError) as refused:
                appender.append(rows)
            assert not refused.value.transient
        appender.append({"id": 7})
    assert ids(table) == [7]
    assert book.verify().ok


@in_memory
def test_no_value_is_changed_to_make_it_fit(book: Book) -> None:
    table = book.tables.create("t", "id INT, d DECIMAL(5, 2), f FLOAT, s STRUCT<a: INT>")
    changed: list[Any] = []
    for record in ({"id": 1.5}, {"id": True}, {"d": 1.234}, {"s": {"a": 1.5}}, {"s": {"a": 1, "more": 2}}):
        with table.appender() as appender, suppress(LakebookError):
            appender.append(record)
            changed.append(record)
    assert changed == []
    assert table.count() == 0


@in_memory
def test_settings_that_cannot_be_are_refused(book: Book) -> None:
    table = numbers(book, "t")
    bad: list[dict[str, Any]] = [
        {"max_rows": 0},
        {"max_rows": -1},
        {"max_rows": True},
        {"max_rows": "5"},
        {"max_rows": math.nan},
        {"max_bytes": 0},
        {"max_age": 0},
        {"max_age": -1.0},
        {"max_age": None},
        {"max_age": math.nan},
        {"files_per_commit": 0},
        {"properties": {"a": 1}},
    ]
    for settings in bad:
        with pytest.raises(InvalidInput):
            table.appender(**settings)


def test_an_appender_holds_its_insert_so_that_no_sweep_takes_it_for_dead(place: Place) -> None:
    book = place.open()
    table = numbers(book, "t")
    appender = table.appender(max_rows=1, files_per_commit=2)
    appender.append({"id": 1})
    assert book.cleaner.sweep().fenced == 0
    assert book.verify().ok
    assert len(book.verify().unfinished) == 1
    appender.append({"id": 2})
    appender.close()
    assert ids(table) == [1, 2]
    assert book.verify().unfinished == ()
