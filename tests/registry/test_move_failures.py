"""Copies, rebuilds, backups and restores that something is in the way of: it is told in our words."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

import lakebook
from answers import answers
from books import Postgres
from lake import numbers
from lakebook import failpoints
from lakebook.config import load_settings
from lakebook.errors import (
    BackupInvalid,
    BackupNotWritable,
    InvalidInput,
    InvalidSetting,
    RegistryNotWritable,
    RegistryUnavailable,
)
from lakebook.registry.databases import _MIGRATION_LOCK, database_for
from rebuilding import checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A book with a checkpoint and a backup."""
    with lakebook.open(tmp_path / "book", publish="off") as book:
        numbers(book, "numbers", [1], [2, 3])
        checkpoint(book)
        book.backup(tmp_path / "backup")
    return tmp_path / "book"


@pytest.fixture
def ways(source: Path) -> dict[str, Callable[[str], object]]:
    """Every way to make a book of that one, at a place."""
    return {
        "copy": lambda into: lakebook.copy_book(source, into, warehouse=source.parent / "bytes", workers=1),
        "rebuild": lambda into: lakebook.rebuild_book(source / "warehouse", into),
        "restore": lambda into: lakebook.restore_book(source.parent / "backup", into),
    }


# --- the session that holds the lock --------------------------------------------------


def end_session(url: str, *, granted: bool) -> bool:
    """End the session that has the lock, or one that waits for it; whether there was one."""
    with psycopg.connect(url, autocommit=True) as admin:
        found = admin.execute(
            "SELECT pg_terminate_backend(locked.pid, 10000) FROM pg_locks locked"
            " JOIN pg_database ON locked.database = pg_database.oid AND datname = current_database()"
            " WHERE locktype = 'advisory' AND granted = %s AND objid = %s::bigint::oid",
            (granted, _MIGRATION_LOCK),
        ).fetchall()
    return bool(found)


@pytest.mark.parametrize(
    ("way", "point"),
    [
        ("copy", "copy.object_copied"),
        ("copy", "copy.verified"),
        ("rebuild", "rebuild.chunk"),
        ("rebuild", "rebuild.done"),
        ("restore", "restore.loaded"),
    ],
)
def test_what_is_made_while_its_lock_is_lost_is_made_all_the_same(
    way: str,
    point: str,
    source: Path,
    ways: dict[str, Callable[[str], object]],
    postgres: Postgres,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = postgres.new_database(with_book=False)
    ended: list[bool] = []
    with failpoints.armed(point, lambda: ended.append(end_session(target, granted=True))):
        ways[way](target)
    assert ended[0]
    assert "the session that kept others from making the same registry was lost" in caplog.text
    with (
        lakebook.open(source, create=False, publish="off") as book,
        lakebook.open(target, create=False, publish="off") as made,
    ):
        assert answers(made) == answers(book)
        assert made.verify().findings == ()
    postgres.drop(target)


@pytest.mark.parametrize("way", ["copy", "rebuild", "restore"])
def test_who_waits_for_the_lock_and_is_cut_off_is_told_so(
    way: str, ways: dict[str, Callable[[str], object]], postgres: Postgres, tmp_path: Path
) -> None:
    target = postgres.new_database(with_book=False)
    database = database_for(load_settings(target, {"warehouse": tmp_path / "bytes"}))
    with ThreadPoolExecutor(1) as pool, database.migration_lock():
        waiting = pool.submit(ways[way], target)
        until = time.monotonic() + 60
        while not end_session(target, granted=False):
            assert time.monotonic() < until
            assert not waiting.done(), waiting.exception()
            time.sleep(0.01)
        with pytest.raises(RegistryUnavailable, match="cannot be reached"):
            waiting.result(60)
    ways[way](target)
    postgres.drop(target)


# --- places that cannot be ------------------------------------------------------------


@pytest.mark.parametrize("way", ["copy", "rebuild", "restore"])
# Nobody, not even root, makes files in /sys.
@pytest.mark.parametrize("into", ["taken", "taken/below", "/sys/lakebook"])
def test_a_place_that_cannot_be_a_folder_is_refused(
    way: str, into: str, ways: dict[str, Callable[[str], object]], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(RegistryNotWritable, match="cannot be made"):
        ways[way](str(tmp_path / into))
    assert (tmp_path / "taken").read_text() == "a file"


@pytest.mark.parametrize("way", ["copy", "rebuild", "restore"])
@pytest.mark.parametrize("into", ["a\0b", "sqlite:///a\0b/registry.db", "postgresql://host/a\0b"])
def test_a_place_with_a_name_that_none_has_is_refused(
    way: str, into: str, ways: dict[str, Callable[[str], object]]
) -> None:
    with pytest.raises(InvalidSetting):
        ways[way](into)


def test_a_file_with_a_name_that_none_has_is_no_backup(source: Path, tmp_path: Path) -> None:
    with lakebook.open(source, create=False, publish="off") as book, pytest.raises(BackupNotWritable, match="null"):
        book.backup(f"{tmp_path}/a\0b")
    with pytest.raises(BackupInvalid, match="null"):
        lakebook.restore_book(f"{tmp_path}/a\0b", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


@pytest.mark.parametrize("workers", [0, -1])
def test_a_copy_by_nobody_is_refused(source: Path, tmp_path: Path, workers: int) -> None:
    with pytest.raises(InvalidInput) as caught:
        lakebook.copy_book(source, tmp_path / "copied", workers=workers)
    assert caught.value.on == "workers"
    assert not (tmp_path / "copied").exists()
