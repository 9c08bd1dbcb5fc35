"""Backup, restore and moves by command, as the documentation has them."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import lakebook
from answers import answers, make_history, published
from books import Postgres
from extent import long
from lake import numbers
from lakebook import failpoints
from lakebook.cli.main import cli
from lakebook.config import load_settings
from lakebook.registry.databases import database_for
from mirrored import append
from older import as_of
from shapes import EMBEDDED, Shape, embedded

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def fill(folder: Path) -> None:
    with lakebook.open(folder, publish="off") as book:
        numbers(book, "numbers", [1, 2], [3])
        book.metadata.create_topic("orders")
        append(book, "a", "b")


@pytest.fixture
def here(shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The present folder, with a book in it. What is made of it elsewhere is in a folder, in both shapes."""
    monkeypatch.chdir(tmp_path)
    for name, value in shape.environment.items():
        monkeypatch.setenv(name, value)
    with shape.filled(fill, Path("my-book")):
        yield tmp_path


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
    with lakebook.open("my-book") as book:
        assert restored["warehouse"] == book.warehouse.root
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


@embedded
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


def test_the_bytes_of_a_copy_go_where_they_are_told_to(here: Path) -> None:
    assert run("--book", "my-book", "tables", "publish", "numbers").exit_code == 0
    done = said("copy", "my-book", "third", "--warehouse", str(here / "bytes"))
    assert done["objects"] == 3
    assert done["warehouse"] == str(here / "bytes")
    assert done["rewritten"] > 0
    with lakebook.open("third", create=False) as book:
        assert book.table("numbers").count() == 3
        assert book.verify().findings == ()


class Terminal(io.StringIO):
    """Somebody looks on."""

    def isatty(self) -> bool:
        return True


@embedded
def test_a_bar_shows_how_far_a_copy_is(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["copy", "my-book", "shown"], standalone_mode=False)
    # It is drawn when it begins and when it ends, whatever falls between.
    drawn = [(int(done), total) for done, total in re.findall(r"(\d+)/(\d+|\?)", terminal.getvalue())]
    assert drawn[0] == (0, "?")
    assert drawn[-1][0] > 3
    assert drawn[-1][1] == str(drawn[-1][0])
    assert "copying" in terminal.getvalue()


@embedded
def test_a_copy_tells_how_many_objects_are_done_and_of_how_many(here: Path) -> None:
    told: list[tuple[int, int | None, str]] = []
    done = lakebook.copy_book("my-book", "heard", progress=lambda *step: told.append(step))
    objects = [step for step in told if step[2].startswith(("data/", "topics/"))]
    assert done.objects == 3
    assert [(count, total) for count, total, _ in objects] == [(1, 3), (2, 3), (3, 3)]
    assert told.index((3, None, "verifying tables")) > told.index(objects[-1])


# --- in an environment that names a book -------------------------------------------


@pytest.fixture
def exported(here: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment names the book in `my-book`, as the page about scaling out has it; its registry."""
    with lakebook.open("my-book") as book:
        registry, warehouse = book.settings.registry, book.warehouse.root
    monkeypatch.setenv("LAKEBOOK_REGISTRY", registry)
    monkeypatch.setenv("LAKEBOOK_WAREHOUSE", warehouse)
    return registry


@contextmanager
def found_at(folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[lakebook.Book]:
    """The book in a folder, whatever the environment names."""
    with monkeypatch.context() as environment:
        environment.delenv("LAKEBOOK_REGISTRY", raising=False)
        environment.delenv("LAKEBOOK_WAREHOUSE", raising=False)
        with lakebook.open(folder, create=False) as book:
            yield book


@pytest.mark.parametrize("by_url", [False, True])
def test_a_copy_is_between_the_places_that_are_named(
    here: Path, exported: str, by_url: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = said("copy", exported if by_url else "my-book", "moved")
    assert done["warehouse"] == str(here / "moved" / "warehouse")
    with found_at("moved", monkeypatch) as moved, found_at("my-book", monkeypatch) as book:
        assert answers(moved) == answers(book)
        assert moved.identity.epoch != book.identity.epoch
    # And to a place that the environment does not name, from one that it does not name.
    third = said("copy", "moved", f"sqlite:///{here}/third/registry.db", "--warehouse", str(here / "bytes"))
    assert (third["registry"], third["warehouse"]) == (f"sqlite:///{here}/third/registry.db", str(here / "bytes"))


def test_the_warehouse_of_a_copy_on_postgresql_is_named_and_not_taken_from_the_environment(
    here: Path, exported: str, postgres: Postgres
) -> None:
    url = postgres.new_database(with_book=False)
    refused = run("copy", "my-book", url)
    assert refused.exit_code == 1
    assert "--warehouse" in refused.stderr
    done = said("copy", "my-book", url, "--warehouse", str(here / "bytes"))
    assert done["warehouse"] == str(here / "bytes")
    assert said("copy", url, "back")["objects"] == done["objects"]
    postgres.drop(url)


def test_a_book_is_restored_where_it_is_named(here: Path, exported: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said("backup", "b")
    done = said("restore", "b", "--into", "restored")
    with found_at("my-book", monkeypatch) as book:
        assert done["warehouse"] == book.warehouse.root
        assert book.restored is None
        before = answers(book)
    with found_at("restored", monkeypatch) as restored:
        assert answers(restored) == before
        assert restored.restored is not None


def test_without_a_name_a_book_is_restored_where_every_command_looks_for_it(
    here: Path, exported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said("backup", "b")
    monkeypatch.setenv("LAKEBOOK_REGISTRY", f"sqlite:///{here}/fresh/registry.db")
    assert said("restore", "b")["registry"] == f"sqlite:///{here}/fresh/registry.db"
    assert run("verify").exit_code == 0
    assert not (here / "registry.db").exists()


@embedded
def test_a_book_that_the_command_line_names_counts_before_what_is_exported(here: Path, exported: str) -> None:
    moved = str(here / "moved")
    for words in (["--book", moved, "init"], ["init", moved]):
        assert said(*words)["registry"] == f"sqlite:///{moved}/registry.db"
    assert said("--book", moved, "topics", "create", "own")["name"] == "own"
    assert [topic["name"] for topic in said("--book", moved, "topics", "list")] == ["own"]
    for words in (["verify"], ["migrate"], ["doctor"], ["repair"], ["metrics"]):
        done = run("--book", moved, *words)
        assert done.exit_code == 0, done.output
    assert f"{moved}/registry.db" in run("--book", moved, "doctor", "--json").stdout
    # An address that is named has its own warehouse, and the exported one is of another book.
    with lakebook.open(f"sqlite:///{moved}/registry.db", create=False) as book:
        assert book.warehouse.root == str(here / "moved" / "warehouse")
    assert said("--book", f"sqlite:///{moved}/registry.db", "topics", "list")[0]["name"] == "own"
    # Where nothing is named, or the environment names it, what is exported counts as ever.
    assert "own" not in [topic["name"] for topic in said("topics", "list")]
    by_environment = CliRunner().invoke(cli, ["topics", "list", "--json"], env={"LAKEBOOK_BOOK": moved})
    assert "own" not in [topic["name"] for topic in json.loads(by_environment.stdout)]
    # A backup is restored at the folder that is named, and a file in it may say that its registry is elsewhere.
    said("backup", "b")
    assert said("--book", "restored", "restore", "b")["registry"] == "sqlite:///restored/registry.db"
    (here / "led").mkdir()
    (here / "led" / "lakebook.toml").write_text(f'registry = "sqlite:///{moved}/registry.db"\n')
    assert said("--book", "led", "topics", "list")[0]["name"] == "own"


@embedded
def test_a_copy_that_was_done_says_so_when_it_is_run_again(here: Path) -> None:
    class Killed(Exception):
        pass

    def kill() -> None:
        raise Killed

    with failpoints.armed("copy.published", kill), pytest.raises(Killed):
        lakebook.copy_book("my-book", "third")
    done = run("copy", "my-book", "third")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("a former run has copied and verified all of it")
    assert not list((here / "third" / "warehouse").glob("lakebook-copy*"))
    assert "there is a book already" in run("copy", "my-book", "third").stderr


@embedded
def test_a_file_in_the_place_of_a_book_is_told_of(here: Path) -> None:
    said("--book", "my-book", "backup", "b")
    for words in (["copy", "my-book"], ["rebuild", "my-book/warehouse", "--into"], ["restore", "b", "--into"]):
        done = run(*words, "b")
        assert done.exit_code == 1
        assert done.stderr.startswith("error: sqlite:///b/registry.db: its folder cannot be made (File exists)")
        assert done.stderr.count("\n") == 1


@embedded
def test_a_folder_that_was_moved_is_published_anew_before_it_is_copied(here: Path) -> None:
    with lakebook.open("my-book") as book:
        book.table("numbers").publish()
    (here / "my-book").rename(here / "gone")
    moved = run("copy", "gone", "third", "--warehouse", str(here / "bytes"))
    assert moved.exit_code == 1
    assert "publish its tables anew" in moved.stderr
    assert run("--book", "gone", "tables", "publish", "numbers").exit_code == 0
    assert said("copy", "gone", "third", "--warehouse", str(here / "bytes"))["objects"] == 3


def live(folder: Path) -> None:
    with lakebook.open(folder, publish="off") as book:
        make_history(book, 11)


@long(EMBEDDED)
def test_an_older_book_is_upgraded_as_the_documentation_says(
    shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in shape.environment.items():
        monkeypatch.setenv(name, value)
    backup, migrate, verify = commands_of("Upgrade")
    with shape.filled(live, Path("my-book"), stays=True):
        with lakebook.open("my-book") as book:
            before, seen = answers(book), published(book)
        assert run(*backup).exit_code == 0
        # In the place of the version before: a registry of an older revision, with all that it has known.
        shape.lose(Path("my-book"))
        as_of(database_for(load_settings("my-book", {})), "0012", Path(backup[-1]))
        assert run("--book", "my-book", "topics", "list").exit_code == 1
        for _ in range(2):  # The second time there is nothing to do.
            done = run(*migrate)
            assert done.exit_code == 0, done.output
        checked = run(*verify)
        assert checked.exit_code == 0, checked.output
        with lakebook.open("my-book") as book:
            assert (answers(book), published(book)) == (before, seen)
        assert run("--book", "my-book", "topics", "create", "more").exit_code == 0
        # And the way back.
        done = run("restore", backup[-1], "--into", "as-before")
        assert done.exit_code == 0, done.output
        with lakebook.open("as-before", create=False) as book:
            assert (answers(book), published(book)) == (before, seen)
