"""Behind a pooler that gives every transaction another session, a book works and leaves nothing in a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
import sqlalchemy as sa

import lakebook
from astha_subscribers import PATIENCE, QUICK, TOPIC, Recorder, append, delivering, until
from books import POSTGRESQL, Place, Postgres, describe
from held import held_before_commit
from lakebook import Book
from lakebook.book import migrate_book
from lakebook.config import load_settings
from lakebook.errors import InvalidSetting, RegistryBusy, RegistryTimeout
from lakebook.registry.databases import database_for
from lakebook.registry.migrate import migrate_to
from lakebook.registry.statements import Statement
from wires import Pooler


@pytest.fixture
def direct(make_place: Callable[..., Place]) -> Place:
    return make_place(POSTGRESQL)


@pytest.fixture
def pooler(direct: Place) -> Iterator[Pooler]:
    pooler = Pooler(direct.target)
    yield pooler
    pooler.close()


@pytest.fixture
def pooled(direct: Place, pooler: Pooler) -> Iterator[Place]:
    place = Place(POSTGRESQL, pooler.url(), {**direct.settings, "pooler": "transaction"})
    yield place
    place.close()


#: What another client of the pooler would find in its session.
STATE = """
    SELECT pg_backend_pid(), current_setting('lock_timeout'), current_setting('statement_timeout'),
           current_setting('idle_in_transaction_session_timeout'), (SELECT count(*) FROM pg_prepared_statements),
           (SELECT count(*) FROM pg_listening_channels()),
           (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())
"""


def check_that_nothing_is_left_in_a_session(pooler: Pooler) -> None:
    seen = []
    with ExitStack() as stack:
        for _ in range(pooler.most):
            # Each holds a session of its own while the others look at theirs.
            connection = stack.enter_context(psycopg.connect(pooler.url(), prepare_threshold=None))
            seen.append(connection.execute(STATE).fetchone())
    assert len({row[0] for row in seen if row}) == pooler.most
    assert {row[1:] for row in seen if row} == {("0", "0", "0", 0, 0, 0)}


def use(book: Book) -> None:
    """Everything that a book does most, more often than it takes for a statement to be prepared."""
    book.metadata.create_topic("orders", 2)
    table = book.tables.create("numbers", "batch BIGINT")
    turn = book.metadata.claim_append("orders", 0)
    for number in range(7):
        turn = book.metadata.append_segment(turn, describe("orders", 0, turn.next_offset)).turn
        book.metadata.add_segment(describe("orders", 1, 100 * number))
        book.metadata.commit_offset("g", "orders", 0, 100 * number)
        table.insert_arrow(pa.table({"batch": [number]}))
        with table.pin() as pinned:
            assert pinned.to_arrow("batch >= 0").num_rows == number + 1
        assert book.metadata.get_committed_offset("g", "orders", 0) is not None
    # Enough rows at once for COPY.
    book.metadata.add_segments([describe("orders", 1, 700 + 100 * number) for number in range(120)])
    book.table("numbers").publish()


def test_a_book_is_created_used_and_checked_behind_a_pooler(postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.new_database(with_book=False)
    other = Pooler(url)
    try:
        # Nobody else's files are in this warehouse: they would be found.
        with lakebook.open(other.url(), warehouse=str(tmp_path), pooler="transaction", publish="off") as book:
            use(book)
            book.begin_epoch()
        with lakebook.open(other.url(), pooler="transaction", publish="off") as book:
            assert book.table("numbers").count() == 7
            checked = book.verify()
            assert checked.ok, checked.findings
        assert other.lent > 100
        check_that_nothing_is_left_in_a_session(other)
    finally:
        other.close()
        postgres.drop(url)


def test_an_older_book_is_migrated_behind_a_pooler(postgres: Postgres) -> None:
    url = postgres.new_database(with_book=False)
    pooler = Pooler(url)
    try:
        settings = load_settings(pooler.url(), {"warehouse": postgres.warehouse, "pooler": "transaction"})
        migrate_to(database_for(settings), "0005")
        with psycopg.connect(url) as connection:
            connection.execute("INSERT INTO book VALUES (1, 'b', 'e', %s, 0, 0)", (postgres.warehouse,))
        assert migrate_book(pooler.url(), pooler="transaction").applied
        check_that_nothing_is_left_in_a_session(pooler)
    finally:
        pooler.close()
        postgres.drop(url)


def test_a_book_that_does_not_know_of_the_pooler_is_told_which_setting_it_needs(direct: Place, pooler: Pooler) -> None:
    book = lakebook.open(pooler.url(), **direct.settings)
    book.metadata.create_topic("orders")

    def work() -> None:
        for number in range(50):
            book.metadata.add_segment(describe("orders", 0, 100 * number))

    with pytest.raises(InvalidSetting, match='pooler="transaction"'):
        work()
    book.close()


def test_events_are_delivered_by_looking_for_them(pooled: Place, pooler: Pooler) -> None:
    book = pooled.open(**QUICK, event_poll=0.02)
    book.metadata.create_topic(TOPIC, 4)
    book.events.save_cursor("recorder", book.events.now())
    recorder = Recorder()
    with delivering(book, recorder):
        for number in range(1, 4):
            append(book)
            until(lambda: len(recorder.events) == number)  # noqa: B023
    check_that_nothing_is_left_in_a_session(pooler)


def test_with_a_direct_address_a_commit_of_another_process_wakes_at_once(
    pooled: Place, direct: Place, pooler: Pooler
) -> None:
    book = pooled.open(**QUICK, event_poll=3600.0, listen_registry=direct.target)
    writer = direct.open()
    writer.metadata.create_topic(TOPIC, 4)
    book.events.save_cursor("recorder", book.events.now())
    recorder = Recorder()
    with delivering(book, recorder) as astha:
        assert astha.wait_active(PATIENCE)
        for number in range(1, 4):
            append(writer)
            until(lambda: len(recorder.events) == number)  # noqa: B023
    check_that_nothing_is_left_in_a_session(pooler)


def test_nobody_waits_for_a_lock_for_longer_than_is_set(pooled: Place) -> None:
    book = pooled.open()
    book.metadata.create_topic("orders")
    impatient = pooled.open(lock_timeout=0.05, retry_attempts=2)
    commit_id = book._registry.open_commit("append")
    with held_before_commit(lambda: book._registry.write(lambda _: None, commit_id=commit_id)) as held:
        with pytest.raises(RegistryBusy):
            impatient._registry.settle(commit_id)
        held.finish()
    assert impatient._registry.settle(commit_id) == "committed"
    with held_before_commit(lambda: book.metadata.commit_offset("g", "orders", 0, 0)) as held:
        with pytest.raises(RegistryBusy):
            impatient.metadata.commit_offset("g", "orders", 0, 0)
        held.finish()


SLOW = Statement(sa.text("SELECT pg_sleep(30)"))
ANY_TOPIC = Statement(sa.text("SELECT id FROM topics"))
LIMITS = Statement(sa.text("SELECT current_setting('statement_timeout'), current_setting('lock_timeout')"))


def test_a_statement_that_takes_too_long_is_ended_and_nothing_is_changed(
    direct: Place, pooled: Place, pooler: Pooler
) -> None:
    for place in (direct, pooled):
        book = place.open(read_timeout=0.05, write_timeout=0.05)
        registry = book._registry
        with pytest.raises(RegistryTimeout, match="write_timeout"):
            registry.write(lambda transaction: transaction.one(SLOW))
        # In a snapshot, and each by itself.
        for read in (registry.in_snapshot, registry.read_with):
            with pytest.raises(RegistryTimeout, match="read_timeout"):
                read(lambda reader: reader.all(SLOW))
        with pytest.raises(RegistryTimeout, match="read_timeout"):
            registry.one(SLOW)
        book.metadata.create_topic(f"after-{place.settings.get('pooler', 'none')}")
    check_that_nothing_is_left_in_a_session(pooler)


def test_no_read_waits_for_a_lock_for_longer_than_is_set(direct: Place, pooled: Place) -> None:
    for place in (direct, pooled):
        book = place.open(lock_timeout=0.05, cache_segments=0, cache_staleness=0)
        with psycopg.connect(direct.target) as connection:
            connection.execute("LOCK TABLE topics")
            with pytest.raises(RegistryBusy):
                book.metadata.get_topic("orders")
            with pytest.raises(RegistryBusy):
                book._registry.in_snapshot(lambda reader: reader.all(ANY_TOPIC))
        assert book.metadata.get_topic("orders") is None


def test_without_limits_statements_take_as_long_as_they_take(direct: Place, pooled: Place) -> None:
    for place in (direct, pooled):
        registry = place.open(read_timeout=0, write_timeout=0, lock_timeout=7)._registry
        limits = [registry.one(LIMITS), registry.read_with(lambda reader: reader.one(LIMITS))]
        limits += [work(lambda reader: reader.one(LIMITS)) for work in (registry.in_snapshot, registry.write)]
        assert limits == [("0", "7s")] * 4


def test_no_limit_of_the_role_stops_a_migration(direct: Place) -> None:
    with psycopg.connect(direct.target, autocommit=True) as connection:
        row = connection.execute("SELECT current_database()").fetchone()
        assert row is not None
        connection.execute(f'ALTER DATABASE "{row[0]}" SET statement_timeout = 60000')
    for pooled in ("none", "transaction"):
        database = database_for(load_settings(direct.target, {**direct.settings, "pooler": pooled}))
        with database.engine() as engine, engine.begin() as migrating:
            assert migrating.exec_driver_sql("SHOW statement_timeout").scalar() == "0"
            assert migrating.exec_driver_sql("SHOW lock_timeout").scalar() == "10s"
