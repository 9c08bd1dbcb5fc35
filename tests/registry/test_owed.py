"""What is owed to Iceberg is written down, published by one of many, and never in doubt."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakebook
from books import POSTGRESQL, Place
from lake import (
    PATIENCE,
    in_memory,
    insert,
    lay,
    numbers,
    own_warehouse,  # noqa: F401
    records,
    run_sql,
)
from lakebook import Book, failpoints
from lakebook.cdc.subscribers import SUBSCRIPTIONS, Event, Refresh, Subscriber
from lakebook.clock import ManualClock
from lakebook.components import orchestrator as orchestrating
from lakebook.components.iceberg_updater import IcebergUpdater
from lakebook.components.orchestrator import Orchestrator, owed
from lakebook.errors import InvalidInput, NotPublishable, PublishFailed, StorageUnavailable
from lakebook.iceberg import publishing
from lakebook.lake.background import MOST_PAUSES, OTHERS_PAUSE
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.deliveries import claim_turn, object_state, release_turn, renew_turn
from lakebook.registry.events import Cursor
from lakebook.registry.maintenance import (
    EVERY_COMPONENT,
    TOLD_OF_EVENTS,
    list_requests,
    list_work,
    pause,
    resume_component,
)
from lakebook.registry.owed import (
    COMPLETE,
    OWED_UPDATES,
    OWED_UPDATES_OF_TABLE,
    OWED_UPTO,
    begin_updates,
    complete_updates,
    fail_updates,
    owe,
    owed_summary,
    prune_updates,
    resume_updates,
)
from lakebook.registry.schedulers import active_scheduler
from lakebook.registry.schema import MAX_BIGINT
from lakebook.registry.statements import SQLITE
from lakebook.registry.transactions import Transaction

HOUR = 3600.0
LEASE = 5.0


def in_turn(book: Book, *steps: Callable[[Transaction], Any]) -> list[Any]:
    return [book._registry.write(step) for step in steps]


def states(book: Book, table: Table) -> dict[int, str]:
    return {item.version: item.state for item in owed(book.lake, table_id=table.id)}


def published(table: Table) -> int | None:
    return table.describe().published_version


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def tell(book: Book, subscriber: Subscriber, cursor: Cursor | None = None) -> Cursor:
    """Hand over what was committed since a cursor, a batch for each object; the cursor behind it."""
    batch = book.events.read(cursor or book.events.beginning(), 10_000)
    by_object: dict[int, list[Event[Any]]] = {}
    for captured in batch.events:
        if captured.table in subscriber.subscribed_tables:
            by_object.setdefault(captured.object_id, []).append(Event(captured))
    for events in by_object.values():
        subscriber.on_events(events)
    return batch.cursor


def refresh(book: Book, subscriber: Subscriber, object_id: int) -> None:
    kind, _, table = book._registry.in_snapshot(lambda reader: object_state(reader, object_id))
    subscriber.on_refresh(Refresh(object_id, kind, table, "it was asked for"))


@pytest.fixture
def orchestrator(book: Book) -> Orchestrator:
    return Orchestrator(book.lake)


@pytest.fixture
def updater(book: Book) -> IcebergUpdater:
    return IcebergUpdater(book.lake)


# --- the registry ------------------------------------------------------------------


def test_a_version_is_written_down_once_and_goes_from_state_to_state(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock)
    table = numbers(book, "t", [1], [2])
    assert in_turn(book, lambda t: owe(t, table.id, [0, 1]), lambda t: owe(t, table.id, [2, 0, 1, 2])) == [2, 1]
    assert states(book, table) == {0: "pending", 1: "pending", 2: "pending"}
    clock.advance(1)
    assert in_turn(book, lambda t: begin_updates(t, table.id, 1), lambda t: begin_updates(t, table.id, 1)) == [2, 0]
    clock.advance(1)
    assert in_turn(book, lambda t: fail_updates(t, table.id, 2, "the disk is full")) == [2]
    first = owed(book.lake, table_id=table.id)[0]
    assert (first.state, first.attempts, first.last_error) == ("failed", 1, "the disk is full")
    assert first.started_at is not None
    assert first.finished_at is not None
    assert [(first.started_at - first.created_at).seconds, (first.finished_at - first.created_at).seconds] == [1, 2]
    assert states(book, table) == {0: "failed", 1: "failed", 2: "pending"}
    assert in_turn(book, lambda t: begin_updates(t, table.id, 2), lambda t: resume_updates(t, table.id)) == [3, 3]
    assert set(states(book, table).values()) == {"pending"}
    table.publish()
    assert set(states(book, table).values()) == {"completed"}
    done = owed(book.lake, table_id=table.id)
    assert [(item.attempts, item.last_error) for item in done] == [(2, None), (2, None), (1, None)]
    assert in_turn(book, lambda t: fail_updates(t, table.id, 2, "late"), lambda t: begin_updates(t, table.id, 2)) == [
        0,
        0,
    ]
    assert book.verify().ok


def test_a_version_that_is_published_already_is_written_down_as_completed(book: Book) -> None:
    table = numbers(book, "t", [1])
    table.publish()
    insert(table, {"id": 2})
    in_turn(book, lambda t: owe(t, table.id, range(3)))
    assert states(book, table) == {0: "completed", 1: "completed", 2: "pending"}


def test_of_a_table_of_json_or_one_that_is_gone_nothing_is_owed(book: Book) -> None:
    rows, other = numbers(book, "rows"), numbers(book, "other", format="json")
    in_turn(book, lambda t: owe(t, rows.id, [0]))
    assert in_turn(book, lambda t: owe(t, other.id, [0]), lambda t: owe(t, 77, [0])) == [0, 0]
    book.tables.drop("rows")
    assert in_turn(book, lambda t: owe(t, rows.id, [1])) == [0]
    assert owed(book.lake).items == ()


def test_updates_are_listed_page_by_page_by_table_and_by_state(book: Book) -> None:
    first, second = numbers(book, "a", [1], [2]), numbers(book, "b", [3])
    in_turn(book, lambda t: owe(t, first.id, range(3)), lambda t: owe(t, second.id, range(2)))
    in_turn(book, lambda t: begin_updates(t, first.id, 1))

    def listed(**which: Any) -> list[tuple[int, int]]:
        page, found = owed(book.lake, limit=2, **which), []
        while True:
            found += [(item.table_id, item.version) for item in page]
            if page.next is None:
                return found
            page = owed(book.lake, limit=2, after=page.next, **which)

    assert listed() == [(first.id, 0), (first.id, 1), (first.id, 2), (second.id, 0), (second.id, 1)]
    assert listed(table_id=first.id) == [(first.id, 0), (first.id, 1), (first.id, 2)]
    assert listed(state="pending") == [(first.id, 2), (second.id, 0), (second.id, 1)]
    assert listed(table_id=first.id, state="processing") == [(first.id, 0), (first.id, 1)]
    with pytest.raises(InvalidInput, match="not a state"):
        owed(book.lake, state="lost")
    found = book._registry.read_with(owed_summary)
    assert [(item.table_id, item.state, item.count, item.first_version, item.last_version) for item in found] == [
        (first.id, "pending", 1, 2, 2),
        (first.id, "processing", 2, 0, 1),
        (second.id, "pending", 2, 0, 1),
    ]


def test_what_was_completed_long_ago_and_what_is_owed_of_nobody_is_pruned(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock)
    kept, gone = numbers(book, "kept", [1]), numbers(book, "gone", [2])
    in_turn(book, lambda t: owe(t, kept.id, [0, 1]), lambda t: owe(t, gone.id, [0, 1]))
    kept.publish()
    clock.advance(HOUR)
    insert(kept, {"id": 3})
    in_turn(book, lambda t: owe(t, kept.id, [2]))
    book.tables.drop("gone")
    older = clock.now_ms() - 1
    assert in_turn(book, lambda t: prune_updates(t, older, 1)) == [2]
    assert in_turn(book, lambda t: prune_updates(t, older, 10), lambda t: prune_updates(t, older, 10)) == [2, 0]
    assert states(book, kept) == {2: "pending"}
    assert states(book, gone) == {}


def test_the_rows_of_a_dropped_table_go_with_it(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock)
    table = numbers(book, "t", [1])
    table.publish()
    in_turn(book, lambda t: owe(t, table.id, [0, 1]))
    book.tables.drop("t")
    assert states(book, table) == {0: "completed", 1: "completed"}
    for _ in range(3):
        clock.advance(2 * 86_400)
        book.cleaner.expire(seconds=0, versions=1, wait=True)
        book.cleaner.delete_expired_temporary_files()
    assert records(book, schema.tables) == []
    assert states(book, table) == {}


def test_verify_finds_updates_that_contradict_the_pointer(book: Book) -> None:
    table = numbers(book, "t", [1], [2])
    in_turn(book, lambda t: owe(t, table.id, range(3)))
    assert book.verify(files=False).ok
    in_turn(book, lambda t: complete_updates(t, table.id, 1))
    (finding,) = book.verify(files=False).findings
    assert str(finding.what) == "updates of versions 0 to 1 are completed, but nothing is published"
    table.publish()
    assert book.verify(files=False).ok
    run_sql(book, "UPDATE metadata_updates SET state = 'pending' WHERE version = 2")
    (finding,) = book.verify(files=False).findings
    assert str(finding.what) == "updates of versions 2 to 2 are pending, but it is published up to version 2"


def test_what_is_owed_is_found_by_its_index_alone(shared_place: Place) -> None:
    book = shared_place.open()
    table = numbers(book, "t", [1])
    with book._registry.read() as reader:
        connection = reader._connection
        explain = "EXPLAIN QUERY PLAN " if reader.kind == SQLITE else "EXPLAIN "
        if reader.kind == POSTGRESQL:
            connection.execute("SET enable_seqscan = off")
        for statement, values in (
            (COMPLETE, (1, table.id, 1)),
            (OWED_UPTO, (table.id, 10)),
            (OWED_UPDATES, (0, -1, 10)),
            (OWED_UPDATES_OF_TABLE, (table.id, -1, table.id, 10)),
        ):
            compiled = statement.on(reader.kind)
            arranged = compiled.arrange(values) if compiled.arrange else values
            plan = str(connection.execute(explain + compiled.sql, arranged).fetchall())
            assert "idx_metadata_updates_owed" in plan


def test_who_writes_a_version_down_while_it_is_published_sees_that_it_is(shared_place: Place) -> None:
    book, other = shared_place.open(), shared_place.open()
    table = numbers(book, "t", [1])
    late = threading.Thread(target=lambda: in_turn(other, lambda t: owe(t, table.id, [0, 1])))
    written: list[bool] = []

    def interfere() -> None:
        if written and threading.current_thread() is threading.main_thread() and not late.ident:
            # The pointer has moved, but nobody can see it yet: whoever comes now has to wait.
            late.start()
            late.join(0.3)
            assert late.is_alive()

    with (
        failpoints.armed("publish.metadata_written", lambda: written.append(True)),
        failpoints.armed("transaction.before_commit", interfere),
    ):
        table.publish()
        late.join(PATIENCE)
    assert states(book, table) == {0: "completed", 1: "completed"}


# --- completed is exact, whoever publishes -------------------------------------------


def by_hand(book: Book, table: Table) -> None:
    table.publish()


def by_a_catalog(book: Book, table: Table) -> None:
    book.catalog().load_table((table.namespace, table.name))


def from_outside(book: Book, table: Table) -> None:
    book.catalog().load_table((table.namespace, table.name)).append(pa.table({"id": pa.array([7], pa.int64())}))


def in_the_background(book: Book, table: Table) -> None:
    book.lake.background.notice(table.record)
    assert book.lake.background.flush()


def pending(book: Book, table: Table) -> None:
    assert book.publish_pending().failed == ()


@pytest.mark.parametrize("publish", [by_hand, by_a_catalog, from_outside, in_the_background, pending])
def test_whoever_publishes_completes_what_is_owed(shared_place: Place, publish: Callable[[Book, Table], None]) -> None:
    book = shared_place.open()
    orchestrator = Orchestrator(book.lake)
    table = numbers(book, "t", [1], [2])
    cursor = tell(book, orchestrator)
    assert states(book, table) == {0: "pending", 1: "pending", 2: "pending"}
    publish(book, table)
    tell(book, orchestrator, cursor)
    newest = table.version
    assert states(book, table) == dict.fromkeys(range(newest + 1), "completed")
    assert published(table) == newest
    insert(table, {"id": 8})
    tell(book, orchestrator, cursor)
    assert states(book, table)[newest + 1] == "pending"
    assert book.verify().ok


def test_in_sync_mode_nothing_stays_owed(place: Place) -> None:
    book = place.open(publish="sync")
    orchestrator = Orchestrator(book.lake)
    table = numbers(book, "t", [1])
    cursor = tell(book, orchestrator)
    with (
        failpoints.armed("publish.metadata_written", raising(OSError("the disk is full"))),
        pytest.raises(PublishFailed),
    ):
        insert(table, {"id": 2})
    tell(book, orchestrator, cursor)
    assert states(book, table) == {0: "completed", 1: "completed", 2: "pending"}
    insert(table, {"id": 3})
    tell(book, orchestrator, cursor)
    assert states(book, table) == dict.fromkeys(range(4), "completed")


def test_while_all_of_a_table_is_published_anew_what_is_not_yet_is_owed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "MOST_VERSIONS", 2)
    with lakebook.open(tmp_path / "before", publish="off") as book:
        table = numbers(book, "t", [1], [2], [3])
        table.publish()
        in_turn(book, lambda t: owe(t, table.id, range(4)))
    (tmp_path / "before").rename(tmp_path / "after")
    with lakebook.open(tmp_path / "after", publish="off") as book:
        found: list[dict[int, str]] = []
        with failpoints.armed("publish.committed", lambda: found.append(states(book, table))):
            book.table("t").publish()
        assert found == [
            {0: "completed", 1: "completed", 2: "pending", 3: "pending"},
            dict.fromkeys(range(4), "completed"),
        ]
        assert book.verify().ok


# --- the orchestrator ----------------------------------------------------------------


def test_all_versions_of_a_batch_are_written_down_in_one_transaction(book: Book, orchestrator: Orchestrator) -> None:
    table = numbers(book, "t", *([number] for number in range(5)))
    with table.update_schema() as update:
        update.add_column("name", "STRING")
    before = book.metrics.values()["lakebook_transactions_total{outcome=committed}"]
    tell(book, orchestrator)
    assert book.metrics.values()["lakebook_transactions_total{outcome=committed}"] == before + 1
    assert states(book, table) == dict.fromkeys(range(7), "pending")
    tell(book, orchestrator)
    assert states(book, table) == dict.fromkeys(range(7), "pending")
    oldest = owed(book.lake)[0].created_at.isoformat()
    assert orchestrator.status() == {"pending": 7, "processing": 0, "failed": 0, "tables": 1, "oldest": oldest}


def test_a_change_without_a_new_version_writes_nothing_down(book: Book, orchestrator: Orchestrator) -> None:
    table, other = numbers(book, "t"), numbers(book, "other", format="json")
    cursor = tell(book, orchestrator)
    table.set_properties(**{"user.team": "sales"})
    book.tables.rename("t", "u")
    other.set_properties(**{"user.team": "sales"})
    before = book.metrics.values()["lakebook_transactions_total{outcome=committed}"]
    tell(book, orchestrator, cursor)
    assert book.metrics.values()["lakebook_transactions_total{outcome=committed}"] == before
    assert [item.version for item in owed(book.lake)] == [0]


def test_a_dropped_table_is_forgotten(book: Book, orchestrator: Orchestrator) -> None:
    _, second = numbers(book, "a", [1]), numbers(book, "b", [1])
    cursor = tell(book, orchestrator)
    assert len(owed(book.lake)) == 4
    book.tables.drop("a")
    tell(book, orchestrator, cursor)
    assert {item.table_id for item in owed(book.lake)} == {second.id}
    # What comes late does not bring it back.
    tell(book, orchestrator)
    assert {item.table_id for item in owed(book.lake)} == {second.id}
    object_id = second.record.object_id
    book.tables.drop("b")
    refresh(book, orchestrator, object_id)
    assert owed(book.lake).items == ()


def test_a_refresh_writes_down_what_is_not_published(
    book: Book, orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrating, "_CHUNK", 2)
    table = numbers(book, "t", [1])
    table.publish()
    for number in range(5):
        insert(table, {"id": number})
    refresh(book, orchestrator, table.record.object_id)
    assert states(book, table) == dict.fromkeys(range(2, 7), "pending")
    in_turn(book, lambda t: begin_updates(t, table.id, 3))
    refresh(book, orchestrator, table.record.object_id)
    assert states(book, table) == dict.fromkeys(range(2, 7), "pending")
    never = numbers(book, "never", [1])
    refresh(book, orchestrator, never.record.object_id)
    assert states(book, never) == {0: "pending", 1: "pending"}
    orchestrator.on_health()


# --- the updater ---------------------------------------------------------------------


def test_the_updater_publishes_what_events_tell_of(
    book: Book, orchestrator: Orchestrator, updater: IcebergUpdater
) -> None:
    table, other = numbers(book, "t", [1], [2], [3]), numbers(book, "other", format="json")
    tell(book, orchestrator)
    cursor = tell(book, updater)
    assert (published(table), other.metadata_location) == (3, None)
    assert states(book, table) == dict.fromkeys(range(4), "completed")
    assert {item.attempts for item in owed(book.lake)} == {1}
    (done,) = book._registry.read_with(lambda reader: list_work(reader, "iceberg_updater", None, MAX_BIGINT, 10))
    assert (done.table_id, done.action, done.outcome) == (table.id, "publish", "done")
    assert {**done.detail, "seconds": 0} == {"from_version": 0, "to_version": 3, "snapshots": 1, "seconds": 0}
    # Again, and with nothing to do: nothing is written at all.
    before = book.metrics.values()["lakebook_transactions_total{outcome=committed}"]
    tell(book, updater)
    tell(book, updater, cursor)
    refresh(book, updater, table.record.object_id)
    assert book.metrics.values()["lakebook_transactions_total{outcome=committed}"] == before
    table.set_properties(**{"user.team": "sales"})
    tell(book, updater, cursor)
    assert book.catalog().load_table("default.t").properties["user.team"] == "sales"
    assert updater.status() == {"at_work": [], "published": 2, "failed": 0}
    updater.on_health()


def test_the_updater_needs_nobody_to_have_written_down_what_is_owed(book: Book, updater: IcebergUpdater) -> None:
    table = numbers(book, "t", [1])
    tell(book, updater)
    assert published(table) == 1
    assert owed(book.lake).items == ()
    tell(book, Orchestrator(book.lake))
    assert states(book, table) == {0: "completed", 1: "completed"}


def test_a_dropped_table_is_no_failure(book: Book, updater: IcebergUpdater) -> None:
    table = numbers(book, "t", [1])
    with failpoints.armed("publish.reserved", lambda: book.tables.drop("t")):
        tell(book, updater)
    assert published_rows(book) == []
    tell(book, updater)
    refresh(book, updater, table._record.object_id)
    assert book._registry.read_with(lambda reader: list_work(reader, None, None, MAX_BIGINT, 10)) == []


def published_rows(book: Book) -> list[dict[str, Any]]:
    return records(book, schema.iceberg_tables)


@pytest.mark.parametrize("written_down", [True, False], ids=["written down", "not written down"])
def test_a_failure_is_seen_and_made_up_for(
    book: Book, orchestrator: Orchestrator, updater: IcebergUpdater, written_down: bool
) -> None:
    table = numbers(book, "t", [1])
    if written_down:
        tell(book, orchestrator)
    with failpoints.armed("publish.metadata_written", raising(StorageUnavailable("the bucket is gone"))):
        for attempt in (1, 2):
            with pytest.raises(StorageUnavailable):
                tell(book, updater)
            found = owed(book.lake, state="failed")
            assert [(item.version, item.attempts) for item in found] == [(0, attempt), (1, attempt)]
            assert {item.last_error for item in found} == {"StorageUnavailable: the bucket is gone"}
    assert published(table) is None
    assert updater.status()["failed"] == 2
    tell(book, updater)
    assert states(book, table) == {0: "completed", 1: "completed"}
    assert {(item.attempts, item.last_error) for item in owed(book.lake)} == {(3, None)}
    done = book._registry.read_with(lambda reader: list_work(reader, "iceberg_updater", table.id, MAX_BIGINT, 10))
    assert [item.outcome for item in done] == ["done", "failed", "failed"]
    assert "the bucket is gone" in done[-1].detail["error"]


def test_a_table_that_cannot_be_published_waits_for_its_next_change(book: Book, updater: IcebergUpdater) -> None:
    table = book.tables.create("t", "id BIGINT, name STRING")
    table.add_files([lay(book, "outside/a.parquet", pa.table({"id": [1], "name": ["x"]}))])
    table.publish()
    with table.update_schema() as update:
        update.drop_column("name")
    with table.update_schema() as update:
        update.add_column("name", "STRING")
    table.add_files([lay(book, "outside/b.parquet", pa.table({"id": [2], "name": ["y"]}))])
    tell(book, updater)
    found = owed(book.lake, state="failed")
    assert [item.version for item in found] == [2, 3, 4]
    assert "two columns as 'name'" in str(found[0].last_error)
    assert (published(table), updater.status()["failed"]) == (1, 1)
    (work,) = book.maintenance_history(component="iceberg_updater")
    assert (work.action, work.outcome, work.table_id) == ("publish", "failed", table.id)
    assert "two columns as 'name'" in work.detail["error"]
    refresh(book, updater, table.record.object_id)
    assert {item.attempts for item in owed(book.lake, state="failed")} == {2}
    other = numbers(book, "other", [1])
    with failpoints.armed("publish.reserved", raising(NotPublishable("not yet"))):
        cursor = tell(book, updater)
    assert states(book, other) == {0: "failed", 1: "failed"}
    insert(other, {"id": 2})
    tell(book, updater, cursor)
    assert states(book, other) == {0: "completed", 1: "completed"}
    assert published(other) == 2


def test_what_a_killed_updater_had_begun_is_resumed_by_a_refresh(shared_place: Place) -> None:
    book = shared_place.open()
    table = numbers(book, "t", [1])
    tell(book, Orchestrator(book.lake))
    child = os.fork()
    if child == 0:
        own = shared_place.open()
        with failpoints.armed("publish.metadata_written", lambda: os.kill(os.getpid(), signal.SIGKILL)):
            tell(own, IcebergUpdater(own.lake))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert states(book, table) == {0: "processing", 1: "processing"}
    refresh(book, Orchestrator(book.lake), table.record.object_id)
    assert states(book, table) == {0: "pending", 1: "pending"}
    refresh(book, IcebergUpdater(book.lake), table.record.object_id)
    assert states(book, table) == {0: "completed", 1: "completed"}
    assert {item.attempts for item in owed(book.lake)} == {2}
    assert book.verify().ok


# --- pauses --------------------------------------------------------------------------


def test_whoever_is_told_of_events_is_refreshed_after_a_rest() -> None:
    assert set(TOLD_OF_EVENTS) == set(SUBSCRIPTIONS)


@pytest.mark.parametrize("component", ["iceberg_updater", EVERY_COMPONENT])
@pytest.mark.parametrize("of_one_table", [True, False], ids=["one table", "all tables"])
def test_what_came_while_the_updater_rested_is_made_up_for(
    book: Book, orchestrator: Orchestrator, updater: IcebergUpdater, component: str, of_one_table: bool
) -> None:
    table = numbers(book, "t", [1])
    which = table.id if of_one_table else None
    in_turn(book, lambda t: pause(t, component, which, "the disk is being changed"))
    tell(book, orchestrator)
    cursor = tell(book, updater)
    assert published(table) is None
    # The orchestrator rests only where all do.
    assert states(book, table) == ({} if component == EVERY_COMPONENT else {0: "pending", 1: "pending"})
    assert in_turn(book, lambda t: resume_component(t, component, which)) == [True]
    assert in_turn(book, lambda t: resume_component(t, component, which)) == [False]
    asked = book._registry.read_with(list_requests)
    expected = {component} if component != EVERY_COMPONENT else set(SUBSCRIPTIONS)
    assert {(item.kind, item.component) for item in asked} == {("refresh", name) for name in expected}
    assert {item.object_id for item in asked} == {table.record.object_id if of_one_table else 0}
    tell(book, updater, cursor)
    assert published(table) is None
    refresh(book, updater, table.record.object_id)
    assert published(table) == 1


@in_memory
def test_who_works_by_the_clock_is_not_refreshed(book: Book) -> None:
    in_turn(book, lambda t: pause(t, "janitor", None, "later"), lambda t: pause(t, "compactor", 77, "later"))
    assert in_turn(book, lambda t: resume_component(t, "janitor", None)) == [True]
    assert in_turn(book, lambda t: resume_component(t, "compactor", 77)) == [True]
    assert book._registry.read_with(list_requests) == []


# --- who publishes -------------------------------------------------------------------


class Daemon:
    """Somebody who has the scheduler's turn."""

    def __init__(self, book: Book, status: dict[str, Any] | None = None) -> None:
        self.book = book
        self.status = status or {}
        turn = book._registry.write(lambda transaction: claim_turn(transaction, None, self.status))
        assert turn is not None
        self.turn = turn

    def renew(self) -> None:
        self.book._registry.write(lambda transaction: renew_turn(transaction, self.turn, self.status))

    def release(self) -> None:
        self.book._registry.write(lambda transaction: release_turn(transaction, self.turn))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def writer(place: Place, clock: ManualClock) -> Book:
    """A book whose background publishes when the test says so."""
    book = place.open(clock=clock, publish="async", publish_lag=HOUR, astha_lease=LEASE)
    book.lake.background._threaded = False
    return book


def later(writer: Book, seconds: float, *daemons: Daemon) -> None:
    """Let time pass, in which daemons go on, and publish what is due then."""
    clock = writer.lake.clock
    assert isinstance(clock, ManualClock)
    clock.advance(seconds)
    for daemon in daemons:
        daemon.renew()
    assert writer.lake.background.run_once()


def test_a_live_scheduler_is_given_precedence_but_not_for_ever(writer: Book) -> None:
    daemon = Daemon(writer)
    table = numbers(writer, "t", [1])
    later(writer, HOUR, daemon)
    for _ in range(MOST_PAUSES - 1):
        later(writer, OTHERS_PAUSE, daemon)
        assert (published(table), writer.lake.background.waiting()) == (None, 1)
    later(writer, OTHERS_PAUSE, daemon)
    assert (published(table), writer.lake.background.waiting()) == (1, 0)


def test_while_the_scheduler_publishes_everything_is_left_to_it(writer: Book) -> None:
    daemon, updater = Daemon(writer, {"components": ["iceberg_updater"]}), IcebergUpdater(writer.lake)
    table = numbers(writer, "t", [1])
    later(writer, HOUR, daemon)
    for number in range(4 * MOST_PAUSES):
        tell(writer, updater)
        insert(table, {"id": number})
        later(writer, OTHERS_PAUSE, daemon)
        assert published(table) == table.version - 1
    tell(writer, updater)
    later(writer, OTHERS_PAUSE, daemon)
    assert (published(table), writer.lake.background.waiting()) == (table.version, 0)
    # It has only looked, and published nothing itself.
    assert updater.status()["published"] == writer.metrics.values()["lakebook_publishes_total{outcome=published}"]


def dead(daemon: Daemon) -> None:
    clock = daemon.book.lake.clock
    assert isinstance(clock, ManualClock)
    clock.advance(3 * LEASE)


def gone(daemon: Daemon) -> None:
    daemon.release()


def ahead(daemon: Daemon) -> None:
    clock = daemon.book.lake.clock
    assert isinstance(clock, ManualClock)
    clock.turn_back(HOUR)


def busy_with_other_things(daemon: Daemon) -> None:
    daemon.status = {"components": ["compactor"]}
    daemon.renew()


def resting(daemon: Daemon) -> None:
    in_turn(daemon.book, lambda transaction: pause(transaction, "iceberg_updater", None, "later"))


@pytest.mark.parametrize("fate", [dead, gone, ahead, busy_with_other_things, resting])
def test_who_does_not_publish_is_not_waited_for(
    writer: Book, clock: ManualClock, fate: Callable[[Daemon], None]
) -> None:
    daemon = Daemon(writer)
    table = numbers(writer, "t", [1])
    clock.advance(HOUR)
    daemon.renew()
    fate(daemon)
    assert writer.lake.background.run_once()
    assert published(table) == 1


def test_a_flush_waits_for_nobody(writer: Book) -> None:
    Daemon(writer)
    table = numbers(writer, "t", [1])
    assert writer.lake.background.flush()
    assert published(table) == 1


@pytest.mark.parametrize(("silence", "expected"), [(0, None), (LEASE, None), (LEASE + 1, 1)])
def test_at_the_end_a_table_is_left_only_to_who_surely_lives(
    shared_place: Place, clock: ManualClock, silence: float, expected: int | None
) -> None:
    other = shared_place.open(clock=clock)
    Daemon(other)
    with shared_place.open(clock=clock, publish="async", publish_lag=HOUR, astha_lease=LEASE) as book:
        numbers(book, "t", [1])
        clock.advance(silence)
    assert published(other.table("t")) == expected
    if expected is None:
        tell(other, IcebergUpdater(other.lake))
        assert published(other.table("t")) == 1


@in_memory
def test_the_active_scheduler_is_the_one_that_was_heard_of_lately(book: Book) -> None:
    def active(lease_ms: int) -> str | None:
        now = book._registry.clock.now_ms()
        found = book._registry.read_with(lambda reader: active_scheduler(reader, now, lease_ms))
        return None if found is None else found.holder

    assert active(60_000) is None
    daemon = Daemon(book)
    assert active(60_000)
    daemon.release()
    assert active(60_000) is None


# --- back-pressure -------------------------------------------------------------------


def debts(book: Book, table: Table, changes: int) -> list[int]:
    """How many versions were not published, after each of so many changes."""
    found: list[int] = []
    for number in range(changes):
        insert(table, {"id": number})
        version = published(table)
        found.append(table.version - (-1 if version is None else version))
    return found


@pytest.mark.parametrize(("backlog", "most"), [(1, 1), (3, 3), (8, 9)])
def test_who_changes_a_table_publishes_it_where_too_much_is_not(place: Place, backlog: int, most: int) -> None:
    book = place.open(publish="async", publish_lag=HOUR, publish_backlog=backlog)
    found = debts(book, book.tables.create("t", "id BIGINT"), 3 * backlog)
    assert max(found) <= most
    assert found.count(0) >= 2


@in_memory
def test_without_a_limit_nobody_who_changes_a_table_publishes_it(place: Place) -> None:
    book = place.open(publish="async", publish_lag=HOUR, publish_backlog=0)
    assert debts(book, book.tables.create("t", "id BIGINT"), 5) == [2, 3, 4, 5, 6]
    book = place.open(publish="off", publish_backlog=1)
    assert debts(book, book.tables.create("t", "id BIGINT"), 3) == [2, 3, 4]


@pytest.mark.parametrize(
    "error",
    [NotPublishable("it has two columns of one name"), StorageUnavailable("down"), RuntimeError("a bug")],
    ids=str,
)
@in_memory
def test_a_change_does_not_fail_because_what_is_owed_cannot_be_published(place: Place, error: Exception) -> None:
    clock = ManualClock()
    book = place.open(publish="async", publish_lag=HOUR, publish_backlog=2, clock=clock)
    book.lake.background._threaded = False
    table = book.tables.create("t", "id BIGINT")
    tried: list[bool] = []

    def fail() -> None:
        tried.append(True)
        raise error

    with failpoints.armed("publish.reserved", fail):
        assert debts(book, table, 5) == [2, 3, 4, 5, 6]
    # What may be over soon is not tried at every change.
    assert len(tried) == (4 if isinstance(error, NotPublishable) else 1)
    clock.advance(60)
    assert debts(book, table, 1) == [0]


def test_writers_of_several_processes_bound_the_debt_together(shared_place: Place) -> None:
    books = [shared_place.open(publish="async", publish_lag=HOUR, publish_backlog=4) for _ in range(2)]
    numbers(books[0], "t")
    tables = [book.table("t") for book in books]
    found = [
        debt for _ in range(6) for book, table in zip(books, tables, strict=True) for debt in debts(book, table, 1)
    ]
    assert max(found) <= 4
