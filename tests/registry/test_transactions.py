"""The write helper: fences, retries, interrupts, and what the database refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import psycopg
import pytest

from books import POSTGRESQL, SQLITE, Place, Postgres, describe
from lakebook import Book, failpoints
from lakebook.clock import ManualClock
from lakebook.config import load_settings
from lakebook.errors import (
    BookClosed,
    CommitNotFound,
    RegistryBusy,
    RegistryNotWritable,
    RegistryUnavailable,
    TopicAlreadyExists,
)
from lakebook.registry.commits import FENCE_KEPT_MS
from lakebook.registry.databases import Failure, database_for
from lakebook.registry.statements import Statement
from lakebook.registry.transactions import Transaction, new_id


def test_a_fence_that_was_asked_for_twice_gives_the_same_answer(book: Book) -> None:
    # The answer to the first question may be lost; its row must not be taken for a commit.
    fence = new_id()
    assert book._registry._fence_unopened(fence) == "aborted"
    assert book._registry._fence_unopened(fence) == "aborted"


def test_a_transaction_can_be_asked_for_by_its_fence(book: Book) -> None:
    fences: list[str] = []

    def work(transaction: Transaction) -> None:
        fences.append("reached")

    registry = book._registry
    entered = registry._enter_commit_row

    def remember(transaction: Transaction, fence: str, *, opened: bool) -> None:
        fences.append(fence)
        entered(transaction, fence, opened=opened)

    registry._enter_commit_row = remember  # type: ignore[method-assign]
    registry.write(work)
    assert registry._fence_unopened(fences[0]) == "committed"


def test_an_opened_commit_is_settled_once_and_for_all(book: Book) -> None:
    commit_id = book._registry.open_commit("append")
    assert book._registry.settle(commit_id) == "aborted"
    assert book._registry.settle(commit_id) == "aborted"
    with pytest.raises(CommitNotFound):
        book._registry.settle(new_id())


def test_fences_are_pruned_by_the_databases_clock(place: Place) -> None:
    # A client whose clock is far behind must not lose its fences to one whose clock is right.
    slow = place.open(clock=ManualClock(1_000_000))
    slow.metadata.create_topic("orders")
    assert slow._registry.prune_fences() == 0
    fast = ManualClock(4_000_000_000_000)
    slow._registry.clock = fast
    assert slow._registry.prune_fences() == 0


def test_old_fences_go_and_commits_of_appends_stay(book: Book) -> None:
    book.metadata.create_topic("orders")
    book.metadata.add_segment(describe())
    with book._registry.read() as reader:
        old = f"UPDATE commits SET opened_at = 0, finished_at = {FENCE_KEPT_MS // 2}"
        reader._connection.execute(old)
    assert book._registry.prune_fences(most=1) == 1
    assert book._registry.prune_fences() >= 1
    assert book._registry.prune_fences() == 0
    assert book.verify().ok


def test_a_write_that_is_committed_is_not_failed_by_what_comes_after(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise RegistryUnavailable("gone")

    monkeypatch.setattr(book._registry, "prune_fences", fail)
    book._registry._writes = -1
    assert book.metadata.create_topic("orders").name == "orders"


@pytest.mark.parametrize("point", ["transaction.begun", "transaction.before_commit"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupt_leaves_nothing_and_the_book_goes_on(book: Book, point: str, error: type[BaseException]) -> None:
    book.metadata.create_topic("orders")

    def interrupt() -> None:
        raise error

    with failpoints.armed(point, interrupt), pytest.raises(error):
        book.metadata.create_topic("clicks")
    assert book.metadata.get_topic("clicks") is None
    for number in range(10):
        book.metadata.add_segment(describe(base=number * 100))
    assert book.verify().ok


def test_a_driver_interrupted_within_a_batch_is_not_used_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    book = place.open()
    book.metadata.create_topic("orders")
    many = [describe(base=base, count=1) for base in range(300)]
    real = Transaction.write_events

    def interrupted(transaction: Transaction) -> None:
        real(transaction)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Transaction, "write_events", interrupted)
        with pytest.raises(KeyboardInterrupt):
            book.metadata.add_segments(many)
    assert list(book.metadata.get_segments("orders", 0)) == []
    assert len(book.metadata.add_segments(many)) == 300
    assert book.verify().ok


def test_a_lock_that_is_held_for_too_long_is_a_transient_error(shared_place: Place) -> None:
    holder = shared_place.open()
    holder.metadata.create_topic("orders")
    waiting = shared_place.open(lock_timeout=0.05, retry_attempts=2)
    result: list[BaseException] = []

    def write() -> None:
        with suppress(BaseException):
            try:
                waiting.metadata.add_segment(describe())
            except BaseException as error:
                result.append(error)
                raise

    def meanwhile() -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=write)
            thread.start()
            thread.join()

    with failpoints.armed("transaction.before_commit", meanwhile):
        holder.metadata.delete_segments_before("orders", 0, 0)
        turn = holder.metadata.claim_append("orders", 0)
        holder.metadata.append_segment(turn, describe())
    assert any(isinstance(error, RegistryBusy) and error.transient for error in result)
    assert holder.verify().ok


def test_a_transaction_that_rests_is_ended_by_the_server_and_holds_up_nobody(make_place: Callable[..., Place]) -> None:
    place = make_place(POSTGRESQL)
    frozen = place.open(transaction_silence=0.2)
    frozen.metadata.create_topic("orders")
    other = place.open()
    attempts: list[int] = []

    def rest(transaction: Transaction) -> int:
        row = transaction.one(Statement("SELECT object_id FROM topics"))
        assert row is not None
        transaction.lock(row[0])
        attempts.append(1)
        if len(attempts) == 1:
            # It gets the lock only because the server has ended this transaction.
            other.metadata.update_topic_config("orders", {"user.a": "b"})
        transaction.lock(row[0])
        return len(attempts)

    assert frozen._registry.write(rest) == 2
    topic = frozen.metadata.get_topic("orders")
    assert topic is not None and topic.config == {"user.a": "b"}


def test_the_same_name_from_many_threads_is_created_once(book: Book) -> None:
    outcomes: list[str] = []

    def create() -> None:
        try:
            book.metadata.create_topic("orders")
            outcomes.append("created")
        except TopicAlreadyExists:
            outcomes.append("refused")

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["created", *["refused"] * 7]
    assert book.verify().ok


@pytest.mark.parametrize(
    ("state", "failure"),
    [
        ("40001", Failure.BUSY),
        ("40P01", Failure.BUSY),
        ("55P03", Failure.BUSY),
        ("57014", Failure.SLOW),
        ("26000", Failure.POOLED),
        ("23505", Failure.DUPLICATE),
        ("57P01", Failure.LOST),
        ("57P05", Failure.LOST),
        ("25P03", Failure.LOST),
        ("25006", Failure.LOST),
        ("08006", Failure.LOST),
        ("53300", Failure.LOST),
        ("53100", Failure.DENIED),
        ("42501", Failure.DENIED),
        ("42601", Failure.OTHER),
        ("23514", Failure.OTHER),
    ],
)
def test_what_an_error_of_postgresql_means_is_decided_by_its_code(state: str, failure: Failure) -> None:
    database = database_for(load_settings("postgresql://host/db", {"warehouse": "x"}, {}))
    assert database.classify(psycopg.errors.lookup(state)("any text")) is failure


def test_a_write_reads_committed_whatever_the_servers_default_is(postgres: Postgres) -> None:
    url = postgres.new_database()
    with psycopg.connect(url, autocommit=True) as admin:
        name = admin.info.dbname
        admin.execute(f'ALTER DATABASE "{name}" SET default_transaction_isolation = "serializable"')
        admin.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    place = Place(POSTGRESQL, url, {"warehouse": postgres.warehouse})
    book = place.open()

    def isolation(transaction: Transaction) -> object:
        return transaction._connection.execute("SHOW transaction_isolation").fetchone()

    assert book._registry.write(isolation) == ("read committed",)
    place.close()
    postgres.drop(url)


def test_a_user_without_rights_is_told_so(postgres: Postgres) -> None:
    url = postgres.new_database(with_book=False)
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("DROP ROLE IF EXISTS nobody_much")
        admin.execute("CREATE ROLE nobody_much LOGIN")
    place = Place(POSTGRESQL, url.replace("postgres:@", "nobody_much:@"), {"warehouse": postgres.warehouse})
    with pytest.raises(RegistryNotWritable):
        place.open()
    postgres.drop(url)


def test_a_full_disk_is_said_at_once_and_leaves_nothing(make_place: Callable[..., Place]) -> None:
    book = make_place(SQLITE).open()
    book.metadata.create_topic("orders")
    connection = book._registry.connections.take()
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    book._registry.connections.give(connection)
    with pytest.raises(RegistryNotWritable):
        book.metadata.create_topic("wide", 1000)
    assert book.metadata.get_topic("wide") is None
    book.metadata.create_topic("wide", 1000)
    assert book.verify().ok


def test_a_book_closed_meanwhile_refuses_the_rest(book: Book) -> None:
    book.metadata.create_topic("orders")
    assert book.metadata.get_topic("orders") is not None
    book.close()
    with pytest.raises(BookClosed):
        book.metadata.get_topic("orders")
