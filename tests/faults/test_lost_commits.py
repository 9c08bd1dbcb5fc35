"""A COMMIT in flight while its outcome is asked for, on a real PostgreSQL."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from books import POSTGRESQL, Place, describe
from held import PATIENCE, Held
from lakebook import Book, failpoints
from lakebook.errors import AppendTurnLost, CommitAborted, TopicAlreadyExists
from lakebook.registry.databases import PostgreSQL
from table_facts import batches_of, check_that_only_what_counts_is_left, objects_of, with_own_warehouse
from table_writers import create_table, rows_of

GATE = 4711


class Server:
    """Makes COMMITs hang on the server until a gate is opened."""

    def __init__(self, url: str) -> None:
        self._admin = psycopg.connect(url, autocommit=True)
        self._admin.execute(
            f"""
            CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_advisory_xact_lock_shared({GATE}); RETURN NULL; END $$
            """
        )
        self._admin.execute(
            """
            CREATE CONSTRAINT TRIGGER wait_at_gate AFTER INSERT OR UPDATE ON commits
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.state = 'committed')
            EXECUTE FUNCTION wait_at_gate()
            """
        )

    def shut_gate(self) -> None:
        self._admin.execute("SELECT pg_advisory_lock(%s)", (GATE,))

    def open_gate(self) -> None:
        self._admin.execute("SELECT pg_advisory_unlock(%s)", (GATE,))

    def wait_for(self, query: str, event: str) -> int:
        """The backend that runs such a query and waits for such a lock."""
        for _ in range(200_000):
            row = self._admin.execute(
                "SELECT pid FROM pg_stat_activity WHERE query LIKE %s AND wait_event = %s AND state <> 'idle'",
                (query, event),
            ).fetchone()
            if row:
                return int(row[0])
        raise AssertionError(f"nothing waits: {query}")

    def terminate(self, pid: int) -> None:
        self._admin.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))

    def terminate_all(self, state: str) -> None:
        """End every session of this database that is in such a state."""
        found = self._admin.execute(
            "SELECT pid FROM pg_stat_activity"
            " WHERE application_name = 'lakebook' AND datname = current_database() AND state = %s",
            (state,),
        ).fetchall()
        assert found
        for (pid,) in found:
            self.terminate(pid)

    def close(self) -> None:
        self._admin.close()


class Wires:
    """The client's side of each connection, to be cut."""

    def __init__(self) -> None:
        self._connections: dict[int, Any] = {}

    def watch(self, connect: Callable[[PostgreSQL], Any]) -> Callable[[PostgreSQL], Any]:
        def watched(database: PostgreSQL) -> Any:
            connection = connect(database)
            self._connections[connection.info.backend_pid] = connection
            return connection

        return watched

    def cut(self, pid: int) -> None:
        with socket.socket(fileno=os.dup(self._connections[pid].pgconn.socket)) as wire:
            wire.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Wires:
    watched = Wires()
    monkeypatch.setattr(PostgreSQL, "connect", watched.watch(PostgreSQL.connect))
    return watched


@pytest.fixture
def place(make_place: Callable[[str], Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(POSTGRESQL), tmp_path)


@pytest.fixture
def book(place: Place, wires: Wires) -> Iterator[Book]:
    book = place.open()
    book.metadata.create_topic("orders")
    yield book
    # Whatever has become of its commits, nothing is wrong, and nothing is left of them.
    check_that_only_what_counts_is_left(place)


@pytest.fixture
def server(place: Place, book: Book) -> Iterator[Server]:
    server = Server(place.target)
    yield server
    server.close()


class InCommit(Held):
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(call)
        self.thread.start()


def test_a_commit_that_landed_after_its_wire_was_cut_is_found_to_have_landed(
    book: Book, server: Server, wires: Wires
) -> None:
    server.shut_gate()
    call = InCommit(lambda: book.metadata.create_topic("clicks"))
    wires.cut(server.wait_for("COMMIT", "advisory"))
    # The caller asks for the outcome while the COMMIT is still in flight, and has to wait for it.
    server.wait_for("INSERT INTO commits%", "transactionid")
    server.open_gate()
    assert call.finish().name == "clicks"
    assert book.metrics.values()["lakebook_commits_settled_total{outcome=committed}"] == 1
    with pytest.raises(TopicAlreadyExists):
        book.metadata.create_topic("clicks")


def test_a_commit_that_died_after_its_wire_was_cut_is_made_again(book: Book, server: Server, wires: Wires) -> None:
    server.shut_gate()
    call = InCommit(lambda: book.metadata.create_topic("clicks"))
    pid = server.wait_for("COMMIT", "advisory")
    wires.cut(pid)
    server.wait_for("INSERT INTO commits%", "transactionid")
    server.terminate(pid)
    server.wait_for("COMMIT", "advisory")  # The second attempt.
    server.open_gate()
    assert call.finish().name == "clicks"
    assert book.metrics.values()["lakebook_commits_settled_total{outcome=aborted}"] == 1
    assert [topic.name for topic in book.metadata.list_topics()] == ["clicks", "orders"]


def test_an_append_that_landed_after_its_wire_was_cut_is_acknowledged_once(
    book: Book, server: Server, wires: Wires
) -> None:
    turn = book.metadata.claim_append("orders", 0)
    segment = describe(base=0, id="one")
    server.shut_gate()
    call = InCommit(lambda: book.metadata.append_segment(turn, segment))
    wires.cut(server.wait_for("COMMIT", "advisory"))
    server.wait_for("UPDATE commits%", "transactionid")
    server.open_gate()
    result = call.finish()
    assert result.turn.next_offset == 100
    assert book.metadata.append_segment(turn, segment).duplicate
    assert book.metadata.append_segment(result.turn, describe(base=100)).turn.next_offset == 200


def test_an_append_that_died_after_its_wire_was_cut_can_never_land(book: Book, server: Server, wires: Wires) -> None:
    turn = book.metadata.claim_append("orders", 0)
    segment = describe(base=0, id="one")
    server.shut_gate()
    call = InCommit(lambda: book.metadata.append_segment(turn, segment))
    pid = server.wait_for("COMMIT", "advisory")
    wires.cut(pid)
    server.wait_for("UPDATE commits%", "transactionid")
    server.terminate(pid)
    server.open_gate()
    with pytest.raises(AppendTurnLost):
        call.finish()
    with pytest.raises(AppendTurnLost):
        book.metadata.append_segment(turn, segment)
    turn = book.metadata.claim_append("orders", 0)
    assert not book.metadata.append_segment(turn, segment).duplicate
    assert len(book.metadata.get_segments("orders", 0)) == 1


def test_an_insert_that_landed_after_its_wire_was_cut_is_acknowledged_once(
    make_place: Callable[..., Place], with_warehouse: Callable[[Place], Place], wires: Wires
) -> None:
    place = with_warehouse(make_place(POSTGRESQL))
    book = place.open()
    table = create_table(book)
    # When its file is written: it has been opened by a COMMIT of its own.
    with closing(Server(place.target)) as server, failpoints.armed("insert.arrow_written", server.shut_gate):
        call = InCommit(lambda: table.insert_arrow(rows_of(1)))
        wires.cut(server.wait_for("COMMIT", "advisory"))
        server.wait_for("UPDATE commits%", "transactionid")
        server.open_gate()
        assert (call.finish().files, table.version) == (1, 1)
    check_that_only_what_counts_is_left(place)
    assert (batches_of(book), len(objects_of(book))) == ({1}, 1)


def test_an_insert_that_died_after_its_wire_was_cut_is_refused_and_leaves_nothing(
    make_place: Callable[..., Place], with_warehouse: Callable[[Place], Place], wires: Wires
) -> None:
    place = with_warehouse(make_place(POSTGRESQL))
    book = place.open()
    table = create_table(book)
    # When its file is written: it has been opened by a COMMIT of its own.
    with closing(Server(place.target)) as server, failpoints.armed("insert.arrow_written", server.shut_gate):
        call = InCommit(lambda: table.insert_arrow(rows_of(1)))
        pid = server.wait_for("COMMIT", "advisory")
        assert len(objects_of(book)) == 1
        wires.cut(pid)
        server.wait_for("UPDATE commits%", "transactionid")
        server.terminate(pid)
        server.open_gate()
        with pytest.raises(CommitAborted):
            call.finish()
    assert (table.version, objects_of(book)) == (0, set())
    table.insert_arrow(rows_of(1))
    check_that_only_what_counts_is_left(place)
    assert (batches_of(book), len(objects_of(book))) == ({1}, 1)


def test_segments_added_while_the_connection_dies_are_recorded_once(book: Book, server: Server, wires: Wires) -> None:
    server.shut_gate()
    segments = [describe(base=0), describe(base=100)]
    call = InCommit(lambda: book.metadata.add_segments(segments))
    wires.cut(server.wait_for("COMMIT", "advisory"))  # Opening the commit row.
    server.open_gate()
    assert [segment.base_offset for segment in call.finish()] == [0, 100]
    assert len(book.metadata.get_segments("orders", 0)) == 2


def test_whoever_asks_for_the_outcome_waits_for_a_commit_in_flight(
    place: Place, book: Book, server: Server, wires: Wires
) -> None:
    janitor = place.open()
    turn = book.metadata.claim_append("orders", 0)
    server.shut_gate()
    appending = InCommit(lambda: book.metadata.append_segment(turn, describe(base=0)))
    server.wait_for("COMMIT", "advisory")
    asking = InCommit(lambda: janitor._registry.settle(turn.commit_id))
    server.wait_for("UPDATE commits%", "transactionid")
    assert asking.thread.is_alive()
    server.open_gate()
    assert asking.finish() == "committed"
    assert appending.finish().turn.next_offset == 100


def test_a_frozen_append_that_wakes_after_it_was_fenced_does_no_harm(place: Place, book: Book) -> None:
    other = place.open()
    turn = book.metadata.claim_append("orders", 0)
    assert other._registry.settle(turn.commit_id) == "aborted"
    with pytest.raises(AppendTurnLost):
        book.metadata.append_segment(turn, describe(base=0))
    assert list(book.metadata.get_segments("orders", 0)) == []


def test_a_connection_lost_before_commit_is_replaced_and_the_work_done_once(book: Book, server: Server) -> None:
    lost = threading.Event()
    held = Held(lambda: book.metadata.commit_offset("g", "orders", 0, 0))

    def lose() -> None:
        if threading.current_thread() is held.thread and not lost.is_set():
            lost.set()
            server.terminate_all("idle in transaction")

    with failpoints.armed("transaction.before_commit", lose):
        held.thread.start()
        held.thread.join(PATIENCE)
    assert lost.is_set()
    assert held.finish().offset == 0
    assert book.metrics.values()["lakebook_transaction_retries_total{reason=lost}"] == 1


def test_readers_come_back_after_the_server_dropped_all_connections(book: Book, server: Server) -> None:
    assert book.metadata.get_topic("orders") is not None
    server.terminate_all("idle")
    assert book.metadata.get_topic("orders") is not None
    assert [topic.name for topic in book.metadata.list_topics()] == ["orders"]
