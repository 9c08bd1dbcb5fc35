"""Whoever backs up, restores or copies a book is killed on the way: nothing is half-made, and the next one ends it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lakebook
from answers import answers, make_history
from books import POSTGRESQL, SQLITE, Place, Postgres
from lakebook.errors import BookNotFound
from moving_processes import back_up, copy, restore
from table_facts import with_own_warehouse
from table_writers import Child, kill_all

KINDS = [SQLITE, POSTGRESQL]


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(request.param), tmp_path)


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == SQLITE:
        return str(tmp_path / "restored")
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.new_database(with_book=False)


def killed(child: Child) -> None:
    assert ("done",) not in list(child.facts())
    assert child.end() == -signal.SIGKILL


def test_a_backup_that_is_killed_leaves_no_backup_and_can_be_repeated(place: Place, tmp_path: Path) -> None:
    book = place.open()
    make_history(book, 1)
    file = tmp_path / "backup"
    killed(Child(back_up, place.target, place.settings, str(file), points="backup.written=kill@1"))
    assert not file.exists()
    book.backup(file)
    assert not file.with_name("backup.partial").exists()
    lakebook.restore_book(file, tmp_path / "restored")
    with lakebook.open(tmp_path / "restored", publish="off") as restored:
        assert answers(restored) == answers(book)


# The schema, one revision after the other; then the rows; then the moment before it is a book.
@pytest.mark.parametrize("step", ["migration.step=kill@3", "restore.rows_loaded=kill@1", "restore.loaded=kill@1"])
def test_a_restore_that_is_killed_leaves_no_book_and_can_be_repeated(step: str, target: str, tmp_path: Path) -> None:
    file = tmp_path / "backup"
    with lakebook.open(tmp_path / "book", publish="off") as book:
        make_history(book, 2, steps=4)
        book.metadata.create_topic("wide", 600)  # More than one chunk of rows.
        book.backup(file)
        before = answers(book)
    if step.startswith("migration") and not target.startswith("postgresql"):
        step = "restore.rows_loaded=kill@2"  # A file is made anew, with its schema at once.
    killed(Child(restore, str(file), target, points=step))
    with pytest.raises(BookNotFound):
        lakebook.open(target, create=False, warehouse=tmp_path / "book" / "warehouse")
    lakebook.restore_book(file, target)
    with lakebook.open(target, create=False, publish="off") as restored:
        assert answers(restored) == before
        assert restored.verify().ok
    if (folder := Path(target)).is_dir():
        assert sorted(path.name for path in folder.iterdir()) == ["registry.db", "registry.db.lock"]


@pytest.mark.parametrize(
    "step",
    ["copy.object_copied=kill@5", "copy.table_relocated=kill@1", "copy.verified=kill@1", "copy.published=kill@1"],
)
def test_a_copy_that_is_killed_leaves_no_book_and_goes_on_from_there(step: str, target: str, tmp_path: Path) -> None:
    source, to = str(tmp_path / "book"), str(tmp_path / "bytes")
    with lakebook.open(source, publish="off") as book:
        make_history(book, 3)
        before = answers(book)
    killed(Child(copy, source, target, to, points=step))
    if step.startswith("copy.published"):
        assert lakebook.copy_book(source, target, warehouse=to).objects == 0  # Only the marker was left.
    else:
        with pytest.raises(BookNotFound):
            lakebook.open(target, create=False, warehouse=to)
        # The source has gone on meanwhile.
        with lakebook.open(source, publish="off") as book:
            book.table("numbers").delete("part = 0")
            before = answers(book)
        report = lakebook.copy_book(source, target, warehouse=to)
        assert report.skipped >= (4 if step.startswith("copy.object") else report.objects)
    with lakebook.open(target, create=False, warehouse=to, publish="off") as moved:
        assert answers(moved) == before
        found = moved.verify()
        assert found.findings == ()
        assert not (Path(to) / "lakebook-copy.json").exists()
