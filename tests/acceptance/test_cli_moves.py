"""Backup, restore and moves by command, as the documentation has them."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import lakebook
from answers import answers
from lake import numbers
from lakebook.cli.main import cli
from lakebook.config import load_settings
from lakebook.registry.databases import SQLite, database_for
from lakebook.registry.migrate import REVISIONS, migrate_to
from mirrored import append

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with lakebook.open("my-book", publish="off") as book:
        numbers(book, "numbers", [1, 2], [3])
        book.metadata.create_topic("orders")
        append(book, "a", "b")
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def said(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def commands_of(section: str) -> list[list[str]]:
    """The commands of a section of the page, word by word."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines]


def test_backup_and_restore_work_as_the_documentation_says(here: Path) -> None:
    with lakebook.open("my-book") as book:
        before = answers(book)
    for section in ("Backup", "Restore"):
        commands = commands_of(section)
        assert commands
        for command in commands:
            done = run(*command)
            assert done.exit_code == 0, (command, done.output)
    with lakebook.open("restored", create=False) as book:
        assert answers(book) == before
        assert book.restored is not None
        assert book.restored.held_at is None


def test_what_the_commands_say(here: Path) -> None:
    done = said("--book", "my-book", "backup", "b")
    assert done["rows"]["tables"] == 1
    assert done["checksum"].startswith("xxh3:")
    restored = said("restore", "b", "--into", "other")
    assert restored["rows"] == done["rows"]
    assert restored["warehouse"] == str(here / "my-book" / "warehouse")
    again = run("restore", "b", "--into", "other")
    assert again.exit_code == 1
    assert "there is a book already" in again.stderr
    refused = run("--book", "other", "admin", "expire")
    assert refused.exit_code == 1
    assert "resume-after-restore" in refused.stderr
    assert run("--book", "other", "admin", "resume-after-restore").exit_code == 1  # Nobody can answer.
    assert said("--book", "other", "admin", "resume-after-restore", "--yes") == {"resumed": True}
    assert said("--book", "other", "admin", "resume-after-restore", "--yes") == {"resumed": False}
    assert run("--book", "other", "admin", "expire").exit_code == 0
    (here / "c").write_bytes((here / "b").read_bytes()[:-9])
    cut = run("restore", "c", "--into", "third")
    assert cut.exit_code == 1
    assert "cut short" in cut.stderr
    assert not (here / "third" / "registry.db").exists()


def test_a_backup_is_restored_over_bytes_that_were_brought_elsewhere(here: Path) -> None:
    said("--book", "my-book", "backup", "b")
    (here / "my-book" / "warehouse").rename(here / "elsewhere")
    done = said("restore", "b", "--into", "other", "--warehouse", str(here / "elsewhere"))
    assert done["warehouse"] == str(here / "elsewhere")
    with lakebook.open("other", create=False) as book:
        assert book.table("numbers").count() == 3
        assert book.table("numbers").to_arrow().num_rows == 3
        assert book.verify().findings == ()


def test_a_book_is_moved_as_the_documentation_says(here: Path) -> None:
    with lakebook.open("my-book") as book:
        book.table("numbers").publish()
        before = answers(book)
    for command in commands_of("Move a book"):
        done = run(*command)
        assert done.exit_code == 0, (command, done.output)
    (here / "my-book").rename(here / "gone")
    with lakebook.open("moved", create=False) as book:
        assert answers(book) == before
    again = run("copy", "gone", "moved")
    assert again.exit_code == 1
    assert "there is a book already" in again.stderr
    moved = run("copy", "gone", "third", "--warehouse", str(here / "bytes"))
    assert moved.exit_code == 1
    assert "publish its tables anew" in moved.stderr
    assert run("--book", "gone", "tables", "publish", "numbers").exit_code == 0
    done = said("copy", "gone", "third", "--warehouse", str(here / "bytes"))
    assert done["objects"] == 3
    assert done["warehouse"] == str(here / "bytes")
    assert done["rewritten"] > 0


def test_an_older_book_is_upgraded_as_the_documentation_says(here: Path) -> None:
    backup, migrate, verify = commands_of("Upgrade")
    assert run(*backup).exit_code == 0
    # In the place of the version before: a registry of an older revision, with a book in it.
    (here / "my-book").rename(here / "present")
    database = database_for(load_settings("my-book", {}))
    assert isinstance(database, SQLite)
    assert database.path is not None
    database.path.parent.mkdir()
    migrate_to(database, REVISIONS[-4])
    with closing(sqlite3.connect(database.path)) as connection, connection:
        connection.execute(
            "INSERT INTO book (id, book_id, epoch, warehouse, created_at, epoch_since)"
            " VALUES (1, 'b', 'e', 'warehouse', 1, 1)"
        )
    assert run("--book", "my-book", "topics", "list").exit_code == 1
    done = run(*migrate)
    assert done.exit_code == 0, done.output
    again = run(*migrate)
    assert again.exit_code == 0, again.output
    checked = run(*verify)
    assert checked.exit_code == 0, checked.output
    assert run("--book", "my-book", "topics", "create", "orders").exit_code == 0
    # And the way back.
    assert run("restore", backup[-1], "--into", "as-before", "--warehouse", "present/warehouse").exit_code == 0
