"""A topic with `iceberg=true` is a table of the same records, in the same files, whatever becomes of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import duckdb
import pytest

from astha_subscribers import until
from books import POSTGRESQL, SQLITE, Place, describe
from by_hand import present_clock
from lake import PATIENCE, in_memory, insert, numbers, objects, own_warehouse, records, run_sql  # noqa: F401
from lakebook import Book, failpoints
from lakebook.cdc.subscribers import Refresh
from lakebook.clock import ManualClock
from lakebook.components.compactor import Compactor
from lakebook.components.topic_publisher import TopicPublisher
from lakebook.errors import (
    MergeConflict,
    ObjectNotFound,
    ReadOnlyTable,
    SubscriberFailed,
    TableAlreadyExists,
    TableNotFound,
    TopicNotFound,
)
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.tables import get_table
from lakebook.server.errors import failure_of
from lakebook.streams import mirroring
from lakebook.streams.mirroring import mirror_topic
from mirrored import TOPIC, append, as_records, consumed, in_order, in_table, in_topic, merge, paths, send

HOUR = 3600.0
#: A history that ends at once.
SHORT = {"lakebook.history.seconds": "0", "lakebook.history.versions": "1"}
on_disk = pytest.mark.parametrize("place", [SQLITE, POSTGRESQL], indirect=True)


@pytest.fixture
def clock() -> ManualClock:
    return present_clock()


@pytest.fixture
def book(place: Place, clock: ManualClock) -> Book:
    book = place.open(clock=clock, temporary_file_grace=1.0, published_grace=60.0)
    book.metadata.create_topic(TOPIC, 2, config={"iceberg": "true"})
    return book


def table_of(book: Book, topic: str = TOPIC) -> Table:
    return book.table(topic, namespace="topics")


def operations(table: Table) -> list[str]:
    return [version.operation for version in reversed(table.history())]


def check(book: Book) -> None:
    """The topic and its table have the same records, in the same files, and nothing is wrong."""
    assert in_table(book) == in_topic(book)
    assert sorted(file.file_path for file in table_of(book).plan()) == paths(book)
    checked = book.verify()
    assert checked.findings == ()


def clean(book: Book, clock: ManualClock) -> None:
    """End history and delete what nobody needs."""
    for _ in range(2):
        book.cleaner.expire()
        book.metadata.release_retired()
        clock.advance(61)
        book.cleaner.delete_expired_temporary_files(wait=False)


def waiting(book: Book) -> list[str]:
    return [file.file_path for file in book.metadata.list_temporary_files()]


# --- the same records in the same files --------------------------------------------


def test_a_topic_is_a_table_of_its_own_segments(book: Book) -> None:
    append(book, "a", "b", "c")
    append(book, "d", partition=1)
    report = mirror_topic(book.lake, TOPIC)
    assert (report.table, report.version, report.versions, report.files, report.rows) == ("topics.orders", 1, 1, 2, 4)
    table = table_of(book)
    assert [(c.field_id, c.name, c.required) for c in table.describe().columns] == [
        (1, "partition", True), (2, "offset", True), (3, "timestamp", True), (4, "key", False), (5, "value", False),
        (6, "headers", False),
    ]  # fmt: skip
    assert (table.describe().partition_by, table.describe().sort_by) == (
        ("partition",),
        ("offset asc nulls first",),
    )
    assert [record.name for record in book.tables.list("topics")] == [TOPIC]
    check(book)
    assert not [path for path in objects(book) if path.startswith("data/")]


def test_what_comes_later_is_one_more_version(book: Book) -> None:
    append(book, "a")
    mirror_topic(book.lake, TOPIC)
    append(book, "b")
    append(book, "c", partition=1)
    append(book, "d")
    assert mirror_topic(book.lake, TOPIC).files == 3
    again = mirror_topic(book.lake, TOPIC)
    assert (again.files, again.version) == (0, None)
    assert operations(table_of(book)) == ["create", "append", "append"]
    assert [row["value"] for row in in_table(book, version=1)] == [b"a"]
    check(book)


def test_many_segments_are_mirrored_some_at_a_time(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "_MOST_SEGMENTS", 2)
    for number in range(5):
        append(book, str(number), partition=number % 2)
    report = mirror_topic(book.lake, TOPIC)
    assert (report.versions, report.files, report.rows) == (3, 5, 5)
    check(book)


def test_a_plan_finds_records_by_partition_offset_and_time(book: Book) -> None:
    first = append(book, "a", "b")
    append(book, "c", "d")
    append(book, "e", partition=1)
    mirror_topic(book.lake, TOPIC)
    table = table_of(book)
    assert [file.file_path for file in table.plan("partition = 0 AND offset < 2")] == [first.s3_key]
    assert table.to_arrow("partition = 1").column("value").to_pylist() == [b"e"]
    assert len(table.plan("timestamp < '2024-01-01T00:00:00+00:00'").files) == 0


def test_segments_that_have_no_file_of_ours_are_passed_over(book: Book) -> None:
    book.metadata.add_segment(describe(TOPIC, base=0, count=10))
    assert mirror_topic(book.lake, TOPIC).files == 0
    append(book, "a")
    assert mirror_topic(book.lake, TOPIC).rows == 1
    assert [row["offset"] for row in in_table(book)] == [10]
    assert book.verify().findings == ()


def test_a_topic_that_is_not_to_be_a_table_has_none(book: Book) -> None:
    book.metadata.create_topic("plain")
    append(book, "a", topic="plain")
    assert mirror_topic(book.lake, "plain").table is None
    with pytest.raises(TableNotFound):
        table_of(book, "plain")
    with pytest.raises(TopicNotFound):
        mirror_topic(book.lake, "absent")


def test_new_partitions_are_mirrored_too(book: Book) -> None:
    mirror_topic(book.lake, TOPIC)
    book.metadata.grow_topic(TOPIC, 3)
    append(book, "a", partition=2)
    assert mirror_topic(book.lake, TOPIC).rows == 1
    check(book)


def test_a_table_of_somebodys_own_is_in_the_way_and_nothing_is_lost(book: Book) -> None:
    book.tables.create_namespace("topics")
    own = numbers(book, TOPIC, [1, 2], namespace="topics")
    append(book, "a")
    publisher = TopicPublisher(book.lake)
    with pytest.raises(TableAlreadyExists):
        mirror_topic(book.lake, TOPIC)
    assert publisher.run_once()["failed"].keys() == {TOPIC}
    assert "already" in publisher.status()["waiting"][0]["why"]
    assert book.catalog().load_table(f"topics.{TOPIC}").schema().column_names == ["id"]
    assert publisher.look_again() == 1
    book.tables.rename(TOPIC, "mine", namespace="topics")
    assert publisher.look_again() == 0
    check(book)
    assert own.count() == 2


# --- retention ---------------------------------------------------------------------


def test_what_retention_removes_leaves_the_table_and_its_bytes_follow_the_history(
    book: Book, clock: ManualClock
) -> None:
    gone = append(book, "a", "b")
    append(book, "c")
    mirror_topic(book.lake, TOPIC)
    assert book.metadata.delete_segments_before(TOPIC, 0, 2) == 1
    assert operations(table_of(book)) == ["create", "append", "delete"]
    check(book)
    assert waiting(book) == []
    assert [row["value"] for row in in_table(book, version=1)] == [b"a", b"b", b"c"]
    clean(book, clock)
    assert gone.s3_key in objects(book)
    table_of(book).set_properties(**SHORT)
    clean(book, clock)
    assert gone.s3_key not in objects(book)
    check(book)


def test_retention_of_what_was_never_mirrored_hands_it_over_at_once(book: Book) -> None:
    gone = append(book, "a")
    book.metadata.delete_segments_before(TOPIC, 0, 1)
    append(book, "b")
    mirror_topic(book.lake, TOPIC)
    assert waiting(book) == [gone.s3_key]
    check(book)


def test_what_a_lease_keeps_below_the_log_start_leaves_the_table_and_its_bytes_stay(
    book: Book, clock: ManualClock
) -> None:
    kept = append(book, "a")
    append(book, "b")
    mirror_topic(book.lake, TOPIC)
    table_of(book).set_properties(**SHORT)
    lease_id, _ = book.metadata.pin_topic(TOPIC, {0: 0}, seconds=HOUR)
    assert book.metadata.delete_segments_before(TOPIC, 0, 1) == 0
    report = mirror_topic(book.lake, TOPIC)
    assert (report.versions, report.removed, report.files) == (1, 1, 0)
    assert mirror_topic(book.lake, TOPIC).versions == 0
    check(book)
    clean(book, clock)
    assert kept.s3_key in objects(book)
    check(book)
    book.metadata.unpin(lease_id)
    book.metadata.delete_segments_before(TOPIC, 0, 1)
    clean(book, clock)
    assert kept.s3_key not in objects(book)
    check(book)


def test_a_reader_of_the_table_keeps_what_retention_has_removed(book: Book, clock: ManualClock) -> None:
    gone = append(book, "a")
    append(book, "b")
    mirror_topic(book.lake, TOPIC)
    table = table_of(book)
    table.set_properties(**SHORT)
    with table.pin() as pinned:
        book.metadata.delete_segments_before(TOPIC, 0, 1)
        clean(book, clock)
        assert gone.s3_key in objects(book)
        assert pinned.to_arrow().num_rows == 2
    clean(book, clock)
    assert gone.s3_key not in objects(book)


# --- merges ------------------------------------------------------------------------


def test_a_merge_replaces_files_and_changes_no_record(book: Book, clock: ManualClock) -> None:
    old = [append(book, "a", "b"), append(book, "c")]
    append(book, "d")
    mirror_topic(book.lake, TOPIC)
    before = in_table(book)
    merge(book, old)
    assert operations(table_of(book)) == ["create", "append", "replace"]
    assert in_table(book) == before == in_table(book, version=1)
    check(book)
    # No lease of the topic needs the old ones, but the table's history does.
    book.metadata.release_retired()
    assert waiting(book) == []
    table_of(book).set_properties(**SHORT)
    clean(book, clock)
    assert {segment.s3_key for segment in old}.isdisjoint(objects(book))
    check(book)


def test_a_merge_of_segments_that_are_partly_mirrored_mirrors_the_others_first(book: Book) -> None:
    old = [append(book, "a"), append(book, "b")]
    mirror_topic(book.lake, TOPIC)
    old += [append(book, "c"), append(book, "d")]
    merge(book, old)
    assert operations(table_of(book)) == ["create", "append", "append", "replace"]
    times = [version.committed_at for version in table_of(book).history()]
    assert times == sorted(times, reverse=True) and len(set(times)) == 4
    assert len(in_table(book, version=2)) == 4
    check(book)
    assert mirror_topic(book.lake, TOPIC).files == 0
    append(book, "e")
    assert mirror_topic(book.lake, TOPIC).files == 1
    check(book)


def test_a_merge_of_segments_that_are_not_mirrored_yet_is_mirrored_as_any_other(book: Book) -> None:
    mirror_topic(book.lake, TOPIC)
    merge(book, [append(book, "a"), append(book, "b")])
    assert operations(table_of(book)) == ["create"]
    assert mirror_topic(book.lake, TOPIC).files == 1
    check(book)


def test_a_reader_of_the_topic_keeps_merged_files_that_the_tables_history_has_let_go_of(
    book: Book, clock: ManualClock
) -> None:
    old = [append(book, "a"), append(book, "b")]
    mirror_topic(book.lake, TOPIC)
    table_of(book).set_properties(**SHORT)
    lease_id, _ = book.metadata.pin_topic(TOPIC, {0: 0}, seconds=HOUR)
    merge(book, old)
    clean(book, clock)
    kept = {segment.s3_key for segment in old}
    assert kept <= set(objects(book))
    assert records(book, schema.table_files, retired_at=None) and book.verify().findings == ()
    book.metadata.unpin(lease_id)
    clean(book, clock)
    assert kept.isdisjoint(objects(book))
    check(book)


def test_a_merge_that_the_table_was_not_told_of_is_refused(book: Book) -> None:
    old = [append(book, "a"), append(book, "b")]
    book.metadata.create_topic("other")
    mirror_topic(book.lake, TOPIC)
    # As if the table were not its own: nobody follows then.
    run_sql(book, "UPDATE tables SET topic_id = NULL")
    with pytest.raises(MergeConflict):
        merge(book, old)
    assert paths(book) == sorted(segment.s3_key for segment in old)


# --- turning it off, deleting ------------------------------------------------------


def test_turned_off_the_table_goes_and_the_records_stay(book: Book, clock: ManualClock) -> None:
    kept = append(book, "a")
    mirror_topic(book.lake, TOPIC)
    book.metadata.update_topic_config(TOPIC, {"iceberg": "false"})
    assert mirror_topic(book.lake, TOPIC).dropped
    with pytest.raises(TableNotFound):
        table_of(book)
    clean(book, clock)
    assert objects(book, "topics") == [kept.s3_key]
    assert records(book, schema.tables) == records(book, schema.mirror_positions) == []
    assert len(in_topic(book)) == 1
    checked = book.verify()
    assert (checked.findings, checked.unfinished) == ((), ())
    # Nobody else has it now: retention hands it over at once.
    book.metadata.delete_segments_before(TOPIC, 0, 1)
    assert waiting(book) == [kept.s3_key]


def test_turned_on_again_it_is_a_table_again_with_all_records(book: Book) -> None:
    append(book, "a")
    mirror_topic(book.lake, TOPIC)
    first = table_of(book).id
    for value in ("false", "true"):
        book.metadata.update_topic_config(TOPIC, {"iceberg": value})
        mirror_topic(book.lake, TOPIC)
    append(book, "b")
    mirror_topic(book.lake, TOPIC)
    assert table_of(book).id != first
    check(book)


def test_turned_on_again_it_waits_for_readers_of_the_former_table(book: Book) -> None:
    append(book, "a")
    mirror_topic(book.lake, TOPIC)
    publisher = TopicPublisher(book.lake)
    with table_of(book).pin() as pinned:
        for value in ("false", "true"):
            book.metadata.update_topic_config(TOPIC, {"iceberg": value})
            publisher.run_once()
        assert "former" in publisher.status()["waiting"][0]["why"]
        assert publisher.look_again() == 1
        assert pinned.to_arrow().num_rows == 1
    assert publisher.look_again() == 0
    check(book)


def test_deleting_the_topic_drops_the_table_and_every_file_goes_once(book: Book, clock: ManualClock) -> None:
    append(book, "a")
    mirror_topic(book.lake, TOPIC)
    table_of(book).publish()
    append(book, "b")
    book.metadata.delete_topic(TOPIC)
    with pytest.raises(TableNotFound):
        table_of(book)
    clean(book, clock)
    clean(book, clock)
    assert objects(book) == []
    assert records(book, schema.tables) == records(book, schema.mirror_positions) == []
    assert records(book, schema.partition_metadata) == []
    # Its name is free for a new one.
    book.metadata.create_topic(TOPIC, config={"iceberg": "true"})
    append(book, "c")
    mirror_topic(book.lake, TOPIC)
    check(book)


def test_a_deleted_topic_whose_table_is_emptied_first_loses_its_files_once(book: Book, clock: ManualClock) -> None:
    append(book, "a")
    mirror_topic(book.lake, TOPIC)
    book.metadata.update_topic_config(TOPIC, {"iceberg": "false"})
    mirror_topic(book.lake, TOPIC)
    clean(book, clock)
    book.metadata.delete_topic(TOPIC)
    clean(book, clock)
    assert objects(book) == []
    assert book.verify().findings == ()


# --- nobody else changes it ---------------------------------------------------------


def _append_outside(book: Book, table: Table) -> None:
    loaded = book.catalog().load_table(f"topics.{TOPIC}")
    loaded.append(table.to_arrow().cast(loaded.schema().as_arrow()))


def _property_outside(book: Book, table: Table) -> None:
    with book.catalog().load_table(f"topics.{TOPIC}").transaction() as transaction:
        transaction.set_properties({"a": "b"})


def _new_column(book: Book, table: Table) -> None:
    with table.update_schema() as update:
        update.add_column("extra", "int")


CHANGES: dict[str, Callable[[Book, Table], Any]] = {
    "insert": lambda book, table: table.insert_arrow(table.to_arrow()),
    "add_files": lambda book, table: table.add_files(["elsewhere.parquet"]),
    "append": lambda book, table: table.appender(),
    "delete": lambda book, table: table.delete("offset = 0"),
    "compact": lambda book, table: table.compact(None),  # type: ignore[arg-type]
    "schema": _new_column,
    "rename": lambda book, table: book.tables.rename(TOPIC, "other", namespace="topics"),
    "drop": lambda book, table: book.tables.drop(TOPIC, namespace="topics"),
    "catalog drop": lambda book, table: book.catalog().drop_table(f"topics.{TOPIC}"),
    "catalog rename": lambda book, table: book.catalog().rename_table(f"topics.{TOPIC}", "topics.other"),
    "catalog append": _append_outside,
    "catalog properties": _property_outside,
}


@on_disk
@pytest.mark.parametrize("change", CHANGES)
def test_nobody_else_changes_the_table(book: Book, change: str) -> None:
    append(book, "a")
    mirror_topic(book.lake, TOPIC)
    table = table_of(book)
    with pytest.raises(ReadOnlyTable, match="only the topic changes it") as caught:
        CHANGES[change](book, table)
    assert failure_of(caught.value, committing=True).status == 400
    assert operations(table) == ["create", "append"]
    check(book)


def test_a_segment_cannot_become_a_file_of_another_table(book: Book) -> None:
    segment = append(book, "a")
    own = numbers(book, "own")
    with pytest.raises(Exception, match="segment"):
        own.add_files([segment.s3_key])


def test_its_small_files_are_not_compacted_and_its_states_can_be_tagged(book: Book) -> None:
    for number in range(12):
        append(book, str(number))
    mirror_topic(book.lake, TOPIC)
    table = table_of(book)
    compactor = Compactor(book.lake, lambda: pytest.fail("it needs no Spark"))
    compactor.note(table.id)
    compactor.run_due()
    assert compactor.status()["debts"] == []
    table.tag("kept")
    book.metadata.delete_segments_before(TOPIC, 0, 12)
    assert [tag.name for tag in table.tags()] == ["kept"]
    check(book)


# --- other engines -----------------------------------------------------------------


def of_duckdb(book: Book) -> list[dict[str, Any]]:
    path = unquote(urlsplit(table_of(book).metadata_location or "").path)
    with duckdb.connect() as connection:
        connection.execute("LOAD avro; LOAD iceberg; SET TimeZone = 'UTC'")
        return in_order(connection.execute(f"SELECT * FROM iceberg_scan('{path}')").to_arrow_table())


@on_disk
def test_other_engines_read_the_same_records_as_a_consumer(book: Book) -> None:
    catalog = book.catalog()
    old = [append(book, "a", "b"), append(book, "c")]
    send(book, "d", partition=1)

    def same() -> None:
        # Loading it is enough to bring it up to date.
        loaded = catalog.load_table(f"topics.{TOPIC}")
        records = consumed(book)
        assert as_records(in_order(loaded.scan().to_arrow())) == records
        assert as_records(of_duckdb(book)) == records
        assert as_records(in_topic(book)) == records
        listed = {book.lake.store.relative(task.file.file_path) for task in loaded.scan().plan_files()}
        assert sorted(listed) == paths(book)

    same()
    merge(book, old)
    send(book, "e", "f", partition=1)
    same()
    book.metadata.delete_segments_before(TOPIC, 1, 1)
    same()
    assert [snapshot.summary["operation"] for snapshot in table_of(book).snapshots()] == [
        "append", "replace", "append", "delete",
    ]  # fmt: skip
    check(book)


def test_loading_another_table_does_not_look_at_topics(book: Book) -> None:
    numbers(book, TOPIC, [1])
    append(book, "a")
    assert book.catalog().load_table(f"default.{TOPIC}").schema().column_names == ["id"]
    with pytest.raises(TableNotFound):
        book._registry.read_with(lambda reader: get_table(reader, "topics", TOPIC))


# --- the publisher -----------------------------------------------------------------


def test_a_publisher_mirrors_what_comes_and_drops_what_is_turned_off(shared_place: Place) -> None:
    book = shared_place.open(publish_lag=0.0)
    book.metadata.create_topic(TOPIC, 2, config={"iceberg": "true"})
    append(book, "a")
    with book.running(spark=None, components=("topic_publisher", "iceberg_updater")) as upkeep:
        assert upkeep.wait_active(PATIENCE) and upkeep.wait_idle(PATIENCE)
        check(book)
        append(book, "b", partition=1)
        assert upkeep.wait_idle(PATIENCE) and upkeep.wait_idle(PATIENCE)
        check(book)
        assert len(of_duckdb(book)) == 2
        assert upkeep.components["topic_publisher"].status()["files"] == 2
        book.metadata.update_topic_config(TOPIC, {"iceberg": None})
        assert upkeep.wait_idle(PATIENCE)
        with pytest.raises(TableNotFound):
            table_of(book)
    assert {work.action for work in book.maintenance_history(component="topic_publisher")} == {"mirror"}


def test_a_refresh_mirrors_and_a_pause_rests(book: Book) -> None:
    publisher = TopicPublisher(book.lake)
    append(book, "a")
    (topic,) = records(book, schema.topics)
    partition = records(book, schema.partitions)[0]
    book.pause("topic_publisher")
    publisher.on_refresh(Refresh(topic["object_id"], "topic", None, "start"))
    with pytest.raises(TableNotFound):
        table_of(book)
    assert book.resume("topic_publisher")
    publisher.on_refresh(Refresh(topic["object_id"], "topic", None, "start"))
    check(book)
    append(book, "b")
    publisher.on_refresh(Refresh(partition["object_id"], "partition", None, "it was asked for"))
    check(book)
    append(book, "c")
    publisher.on_refresh(Refresh(table_of(book).record.object_id, "table", table_of(book).record, "it was asked for"))
    check(book)
    publisher.on_refresh(Refresh(10**6, "topic", None, "start"))
    publisher.on_health()


@in_memory
class Poison:
    """Fails so many times with something that nobody foresaw."""

    def __init__(self, error: BaseException, times: int = 10**9) -> None:
        self._error = error
        self._times = times
        self.failures = 0

    def __call__(self) -> None:
        if self.failures < self._times:
            self.failures += 1
            raise self._error


@pytest.fixture
def waiting_publisher(place: Place) -> Iterator[TopicPublisher]:
    """One that looks again at a topic which has to wait no longer."""
    book = place.open(maintenance_interval=0.05)
    book.metadata.create_topic(TOPIC, 1, config={"iceberg": "true"})
    book.tables.create_namespace("topics")
    numbers(book, TOPIC, [1], namespace="topics")
    append(book, "a")
    publisher = TopicPublisher(book.lake)
    assert publisher.run_once()["failed"].keys() == {TOPIC}
    book.tables.rename(TOPIC, "mine", namespace="topics")
    yield publisher
    publisher.stop()


@in_memory
def test_what_nobody_foresaw_does_not_end_the_retries_of_topics_that_wait(waiting_publisher: TopicPublisher) -> None:
    poison = Poison(RuntimeError("unforeseen"), 3)
    with failpoints.armed("mirror.written", poison):
        waiting_publisher.start()
        until(lambda: not waiting_publisher.status()["waiting"])
        waiting_publisher.on_health()
    assert poison.failures == 3
    assert waiting_publisher.status()["files"] == 1


@in_memory
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_publisher_whose_thread_has_ended_is_not_well(waiting_publisher: TopicPublisher) -> None:
    with failpoints.armed("mirror.written", Poison(SystemExit())):
        waiting_publisher.start()
        thread = waiting_publisher._thread
        assert thread is not None
        thread.join(PATIENCE)
        with pytest.raises(SubscriberFailed, match="its thread has ended"):
            waiting_publisher.on_health()
    waiting_publisher.stop()
    waiting_publisher.on_health()


def test_a_round_by_hand_mirrors_first(book: Book) -> None:
    append(book, "a")
    done = book.maintain(["topic_publisher", "iceberg_updater"], spark=None)
    assert done["topic_publisher"]["mirrored"] == {TOPIC: 1}
    assert done["iceberg_updater"]["published"] == ["topics.orders"]
    own = numbers(book)
    assert book.maintain(["topic_publisher"], table=own.name, spark=None)["topic_publisher"]["mirrored"] == {}


# --- what verify sees --------------------------------------------------------------


@in_memory
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ("UPDATE mirror_positions SET next_offset = 2", "it is missing in its topic's table"),
        ("UPDATE mirror_positions SET next_offset = 9", "it is mirrored to nowhere, or beyond its watermark"),
        ("UPDATE segments SET s3_key = s3_key || 'x'", "its topic's table has it, and the topic has not"),
    ],
)
def test_verify_finds_a_table_that_differs_from_its_topic(book: Book, damage: str, what: str) -> None:
    append(book, "a")
    mirror_topic(book.lake, TOPIC)
    append(book, "b")
    run_sql(book, damage)
    assert what in {finding.what for finding in book.verify(files=False).findings if finding.check == "mirrors"}


# --- races -------------------------------------------------------------------------


def _deadlocks(book: Book) -> int:
    sql = "SELECT pg_stat_force_next_flush(), deadlocks FROM pg_stat_database WHERE datname = current_database()"
    found: int = book._registry.read_with(lambda reader: reader._connection.execute(sql).fetchone())[1]
    return found


def test_mirrors_appends_merges_retention_and_clean_up_race_and_agree(shared_place: Place) -> None:
    book = shared_place.open(temporary_file_grace=0.0)
    # The table is made between its partitions: lower and higher ids on both sides of it.
    book.metadata.create_topic(TOPIC, 1, config={"iceberg": "true"})
    mirror_topic(book.lake, TOPIC)
    table_of(book).set_properties(**SHORT)
    book.metadata.grow_topic(TOPIC, 2)
    done = threading.Event()
    failures: list[BaseException] = []

    def appends(partition: int) -> None:
        for number in range(20):
            append(book, str(number), partition=partition)

    def merges() -> None:
        while not done.is_set():
            for partition in (0, 1):
                small = [s for s in book.metadata.each_segment(TOPIC, partition) if s.record_count < 4][:4]
                try:
                    merge(book, small) if len(small) > 1 else None
                except (MergeConflict, ObjectNotFound):
                    continue  # Removed meanwhile; this one holds no lease.

    def retains() -> None:
        while not done.is_set():
            for partition in (0, 1):
                found = book.metadata.get_partition(TOPIC, partition)
                assert found is not None
                book.metadata.delete_segments_before(TOPIC, partition, max(0, found.high_watermark - 10))

    def mirrors() -> None:
        while not done.is_set():
            mirror_topic(book.lake, TOPIC)

    def cleans() -> None:
        cleaner = book.cleaner
        while not done.is_set():
            cleaner.expire()
            book.metadata.release_retired()
            cleaner.delete_expired_temporary_files(wait=False)

    def watched(work: Callable[..., None], *given: Any) -> Callable[[], None]:
        def run() -> None:
            try:
                work(*given)
            except BaseException as error:  # noqa: BLE001 - told by the test itself
                failures.append(error)
                done.set()

        return run

    writers = [threading.Thread(target=watched(appends, partition)) for partition in (0, 1)]
    others = [threading.Thread(target=watched(work)) for work in (merges, retains, mirrors, mirrors, cleans)]
    for thread in (*writers, *others):
        thread.start()
    for thread in writers:
        thread.join(PATIENCE)
    done.set()
    for thread in others:
        thread.join(PATIENCE)
    assert not failures, failures
    mirror_topic(book.lake, TOPIC)
    check(book)
    # Whoever was last has handed every file over: none is left that nobody has.
    for _ in range(2):
        book.cleaner.expire()
        book.metadata.release_retired()
        book.cleaner.delete_expired_temporary_files(wait=False)
    assert objects(book, "topics") == paths(book)
    check(book)
    if shared_place.kind == POSTGRESQL:
        assert _deadlocks(book) == 0
