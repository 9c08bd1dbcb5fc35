"""Opening a book: creating it, refusing what is not one, closing it, forking."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import lakebook
from books import Place, Postgres, describe
from lakebook.config import load_settings
from lakebook.errors import (
    BookClosed,
    BookNotFound,
    InvalidSetting,
    RegistryCorrupt,
    UnsafeSqlite,
    WarehouseNotWritable,
)
from lakebook.registry import databases
from lakebook.registry.databases import SQLite, sqlite_driver
from lakebook.registry.migrate import migrate


def test_a_folder_becomes_a_book_and_stays_one(tmp_path: Path) -> None:
    with lakebook.open(tmp_path / "a" / "book") as book:
        book.metadata.create_topic("orders")
        identity = book.identity
    with lakebook.open(str(tmp_path / "a" / "book")) as book:
        assert book.identity == identity
        assert book.metadata.get_topic("orders") is not None


def test_a_book_can_be_required_to_exist(tmp_path: Path) -> None:
    with pytest.raises(BookNotFound, match="lakebook init"):
        lakebook.open(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_books_in_memory_are_apart_and_gone_when_closed() -> None:
    with lakebook.open(":memory:") as one, lakebook.open(":memory:") as two:
        one.metadata.create_topic("orders")
        assert two.metadata.get_topic("orders") is None
    with lakebook.open(":memory:") as three:
        assert three.metadata.get_topic("orders") is None


def test_a_folder_can_be_moved_as_a_whole(tmp_path: Path) -> None:
    with lakebook.open(tmp_path / "here") as book:
        book.metadata.create_topic("orders")
        book.metadata.add_segment(describe())
    shutil.move(tmp_path / "here", tmp_path / "there")
    with lakebook.open(tmp_path / "there") as book:
        segment = book.metadata.find_segment_for_offset("orders", 0, 0)
        assert segment is not None
        assert segment.s3_bucket == "warehouse"
        assert book.warehouse.root == str(tmp_path / "there" / "warehouse")


def test_another_warehouse_than_the_books_own_is_refused(tmp_path: Path) -> None:
    lakebook.open(tmp_path / "book").close()
    with pytest.raises(InvalidSetting, match="warehouse"):
        lakebook.open(tmp_path / "book", warehouse=str(tmp_path / "elsewhere"))


def test_a_book_on_a_server_remembers_its_warehouse(postgres: Postgres) -> None:
    url = postgres.new_database(with_book=False)
    with pytest.raises(InvalidSetting, match="warehouse"):
        lakebook.open(url)
    lakebook.open(url, warehouse=postgres.warehouse).close()
    with lakebook.open(url) as book:
        assert book.warehouse.root == book.settings.warehouse == postgres.warehouse
    postgres.drop(url)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "registry.db").write_bytes(b"this is not a database, but it is long enough to be looked at" * 100)
    with pytest.raises(RegistryCorrupt):
        lakebook.open(tmp_path)


@pytest.mark.parametrize("kept", [100, 4096, 5000, 100_000])
def test_a_registry_that_was_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    with lakebook.open(tmp_path) as book:
        book.metadata.create_topic("orders")
        book.metadata.add_segments([describe(base=base, count=1) for base in range(1000)])
    os.truncate(tmp_path / "registry.db", kept)
    with pytest.raises(RegistryCorrupt):
        lakebook.open(tmp_path)


def test_a_warehouse_that_cannot_be_written_is_found_before_a_book_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WarehouseNotWritable):
        lakebook.open(tmp_path / "book", warehouse=str(tmp_path / "file" / "warehouse"))
    with pytest.raises(WarehouseNotWritable):
        lakebook.open(tmp_path / "file" / "book")
    assert not (tmp_path / "book").exists()
    with pytest.raises(WarehouseNotWritable):
        lakebook.open(tmp_path / "book3", warehouse="/proc")
    with pytest.raises(InvalidSetting):
        lakebook.open(tmp_path / "book2", warehouse="ftp://host/x")


def test_the_probe_of_the_warehouse_leaves_nothing(tmp_path: Path) -> None:
    lakebook.open(tmp_path).close()
    assert list((tmp_path / "warehouse").iterdir()) == []


def test_a_closed_book_says_so(place: Place) -> None:
    book = place.open()
    book.metadata.create_topic("orders")
    assert book.metadata.get_topic("orders") is not None
    book.close()
    for use in (
        lambda: book.metadata.get_topic("orders"),
        lambda: book.metadata.create_topic("other"),
        lambda: book.metadata.list_topics(),
        lambda: book.verify(),
    ):
        with pytest.raises(BookClosed):
            use()
    book.close()


class OldDriver:
    """A driver whose library is older than the one that mended the defect."""

    def __init__(self, version: str) -> None:
        self._driver = sqlite_driver()
        self.sqlite_version = version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


def test_an_old_sqlite_library_refuses_a_wal_book_and_makes_new_ones_without_wal(tmp_path: Path) -> None:
    lakebook.open(tmp_path / "wal").close()
    old = OldDriver("3.51.2")
    with pytest.raises(UnsafeSqlite, match="pysqlite3"):
        SQLite(load_settings(tmp_path / "wal", {}, {}), old).connect()
    (tmp_path / "new").mkdir()
    database = SQLite(load_settings(tmp_path / "new", {}, {}), old)
    connection = database.connect()
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()
    assert database.library()["safe"] is False
    good = SQLite(load_settings(tmp_path / "wal", {}, {}), OldDriver("3.51.3")).connect()
    assert good.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    good.close()


def test_the_library_in_use_is_safe() -> None:
    assert SQLite(load_settings(":memory:", {}, {})).library()["safe"] is True


def test_every_connection_is_durable_and_checks_its_keys(tmp_path: Path) -> None:
    with lakebook.open(tmp_path) as book:
        connection = book._registry.connections.take()
        settings = {
            name: connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "foreign_keys", "auto_vacuum")
        }
        book._registry.connections.give(connection)
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "auto_vacuum": 2}


def run_in_fork(action: Any) -> int:
    child = os.fork()
    if child == 0:
        try:
            os._exit(int(action()))
        except BaseException:  # noqa: BLE001 - told by the exit code
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_uses_connections_of_its_own(shared_place: Place) -> None:
    book = shared_place.open()
    book.metadata.create_topic("orders")
    assert book.metadata.get_partition("orders", 0) is not None

    def in_child() -> int:
        book.metadata.add_segment(describe())
        book.close()
        return 0 if book._registry.epoch else 1

    assert run_in_fork(in_child) == 0
    # The parent's session was neither used nor ended by the child.
    book.metadata.add_segment(describe(base=100))
    partition = book.metadata.get_partition("orders", 0)
    assert partition is not None
    assert partition.high_watermark == 200
    assert book.verify().ok


def test_a_forked_child_cannot_use_a_book_in_memory() -> None:
    with lakebook.open(":memory:") as book:
        book.metadata.create_topic("orders")

        def in_child() -> int:
            try:
                book.metadata.list_topics()
            except BookClosed:
                return 7
            return 1

        assert run_in_fork(in_child) == 7
        assert book.metadata.get_topic("orders") is not None


def test_a_book_names_itself_without_secrets(tmp_path: Path) -> None:
    with lakebook.open(tmp_path) as book:
        assert repr(book) == f"Book('sqlite:///{tmp_path}/registry.db')"


def test_a_child_forked_while_a_thread_reads_does_not_wait_for_its_locks(shared_place: Place) -> None:
    book = shared_place.open()
    book.metadata.create_topic("orders")
    assert book.metadata.get_partition("orders", 0) is not None
    cache = book.metadata._cache
    locks = [cache._lock, *([cache._probe._lock] if cache._probe is not None else [])]
    locks += [
        metric._lock for metric in book.metrics._collectors._names_to_collectors.values() if hasattr(metric, "_lock")
    ]

    def in_child() -> int:
        book.metadata.add_segment(describe())
        assert book.metadata.get_partition("orders", 0) is not None
        assert book.metrics.values()["lakebook_transactions_total{outcome=committed}"] == 2
        return 0

    for lock in set(locks):
        lock.acquire()
    try:
        assert run_in_fork(in_child) == 0
    finally:
        for lock in set(locks):
            lock.release()
    assert book.verify().ok


def test_an_existing_rollback_book_is_not_switched_to_wal_under_an_old_library(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, {}, {})
    old = SQLite(settings, OldDriver("3.40.1"))
    old.create()
    migrate(old)
    held_open = old.connect()
    with lakebook.open(tmp_path) as book:
        book.metadata.create_topic("orders")
    assert held_open.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    held_open.close()


@pytest.mark.parametrize("target", [":memory:", "folder"])
def test_a_book_works_with_pythons_own_sqlite(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "sqlite_driver", lambda: importlib.import_module("sqlite3.dbapi2"))
    with lakebook.open(target if target == ":memory:" else tmp_path / target) as book:
        book.metadata.create_topic("orders", 2)
        book.metadata.add_segments([describe(base=base, count=1) for base in range(120)])
        book.metadata.commit_offset("g", "orders", 0, 60)
        assert book.metadata.delete_segments_before("orders", 0, 60) == 60
        found = book.metadata.find_segments_for_offsets([("orders", 0, 59), ("orders", 0, 60)])
        assert [segment and segment.base_offset for segment in found.values()] == [None, 60]
        assert book._registry.prune_fences() == 0
        book.metadata.delete_topic("orders")
        assert book.verify().ok


def test_a_folder_remembers_a_warehouse_elsewhere(tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    lakebook.open(tmp_path / "book", warehouse=elsewhere).close()
    with lakebook.open(tmp_path / "book") as book:
        assert book.warehouse.root == elsewhere
