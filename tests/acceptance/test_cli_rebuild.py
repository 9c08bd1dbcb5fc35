"""The loss of a registry, as the operations page tells what to do."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import lakebook
from lake import numbers
from lakebook.cli.main import cli
from lakebook.config import load_settings
from lakebook.errors import BookHeld
from rebuilding import checkpoint, rows_of_version
from shapes import Shape, embedded
from streaming import produce

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def fill(folder: Path) -> None:
    with lakebook.open(folder) as book:
        numbers(book, "plain", [1, 2])
        book.metadata.create_topic("orders")
        produce(book, "orders", 0, "a")
        checkpoint(book)
        lost = produce(book, "orders", 0, "b")
        produce(book, "orders", 0, "c")
        book.lake.store.delete([lost.s3_key])


@pytest.fixture
def folder(shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The present folder, with a book whose registry is gone."""
    monkeypatch.chdir(tmp_path)
    with shape.filled(fill, Path("my-book"), stays=True):
        yield tmp_path


@pytest.fixture
def warehouse(shape: Shape, folder: Path) -> str:
    return shape.lose(Path("my-book"))


def test_the_commands_of_the_operations_page_bring_the_book_back(folder: Path, warehouse: str) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Loss of the registry\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    for line in block.splitlines():
        words = [warehouse if word == "my-book/warehouse" else word for word in shlex.split(line, comments=True)[1:]]
        done = CliRunner().invoke(cli, words)
        # A segment of this book is lost.
        assert done.exit_code == (1 if words[0] == "rebuild" else 0), done.output
    with lakebook.open(folder / "my-book") as book:
        assert rows_of_version(book.table("plain")) == ["{'id': 1}", "{'id': 2}"]
        assert book.cleaner.expire() is not None


def test_the_report_is_data(folder: Path, warehouse: str) -> None:
    done = CliRunner().invoke(cli, ["rebuild", warehouse, "--into", "my-book", "--json"])
    assert done.exit_code == 1, done.output
    assert "rebuilding" not in done.stderr  # Nobody looks on.
    report = json.loads(done.stdout)
    assert report["complete"] is False
    assert [(hole["first"], hole["last"]) for hole in report["holes"]] == [(1, 1)]
    assert [item["name"] for item in report["tables"]] == ["default.plain"]
    with lakebook.open(folder / "my-book") as book, pytest.raises(BookHeld):
        book.cleaner.expire()


def test_a_book_is_rebuilt_where_it_is_named_and_else_where_every_command_looks_for_it(
    folder: Path, warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKEBOOK_REGISTRY", f"sqlite:///{folder}/exported/registry.db")
    monkeypatch.setenv("LAKEBOOK_WAREHOUSE", str(folder / "exported" / "warehouse"))
    reached = load_settings("my-book", {}, {})
    for name in ("s3_endpoint", "s3_region", "s3_access_key_id", "s3_secret_access_key"):
        if getattr(reached, name):
            monkeypatch.setenv(f"LAKEBOOK_{name.upper()}", getattr(reached, name))
    done = CliRunner().invoke(cli, ["rebuild", warehouse, "--into", "named"])
    assert done.exit_code == 1, done.output
    assert (folder / "named" / "registry.db").is_file()
    assert not (folder / "exported").exists()
    done = CliRunner().invoke(cli, ["rebuild", warehouse])
    assert done.exit_code == 1, done.output
    assert (folder / "exported" / "registry.db").is_file()
    assert not (folder / "registry.db").exists()


def test_the_report_is_read_by_people(folder: Path, warehouse: str) -> None:
    done = CliRunner().invoke(cli, ["--book", str(folder / "my-book"), "rebuild", warehouse])
    assert done.exit_code == 1, done.output
    for text in ("hole: orders/0: 1 to 1", "taken on its own word: orders/0", "not everything came back"):
        assert text in done.output
    again = CliRunner().invoke(cli, ["--book", str(folder / "my-book"), "rebuild", warehouse])
    assert again.exit_code == 1
    assert "there is a book in it" in again.output


def fill_whole(folder: Path) -> None:
    with lakebook.open(folder) as book:
        numbers(book, "plain", [1, 2])
        checkpoint(book)


def test_the_exit_code_tells_whether_everything_came_back(
    shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with shape.filled(fill_whole, Path("my-book"), stays=True):
        warehouse = shape.lose(Path("my-book"))
        # It is mistyped: there is no book, and the place can be used.
        for words in ([], ["--json"]):
            (tmp_path / "wrong").mkdir(exist_ok=True)
            done = CliRunner().invoke(cli, ["rebuild", str(tmp_path / "wrong"), "--into", "my-book", *words])
            assert done.exit_code == 1
            assert "Name the warehouse of a book" in done.stderr
            assert done.stdout == ""
        done = CliRunner().invoke(cli, ["rebuild", warehouse, "--into", "my-book", "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["complete"] is True


class Terminal(io.StringIO):
    """Somebody looks on."""

    def isatty(self) -> bool:
        return True


@embedded
def test_a_bar_shows_how_far_a_rebuild_is(folder: Path, warehouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["rebuild", warehouse, "--into", "my-book"], standalone_mode=False)
    # It is drawn when it begins and when it ends, whatever falls between.
    drawn = [(int(done), total) for done, total in re.findall(r"(\d+)/(\d+|\?)", terminal.getvalue())]
    assert drawn[0] == (0, "?")
    # A file of a table, and two segments.
    assert drawn[-1] == (3, "3")
    assert "rebuilding: filling topic orders" in terminal.getvalue()


@embedded
def test_a_rebuild_tells_what_is_done_of_what_is_known(folder: Path, warehouse: str) -> None:
    told: list[tuple[int, int | None, str]] = []
    done = lakebook.rebuild_book(warehouse, "my-book", progress=lambda *step: told.append(step))
    assert told[:3] == [
        (0, None, "listing the warehouse"),
        (done.objects, None, "listing the warehouse"),
        (0, None, "reading the checkpoint"),
    ]
    # Each of a table, of the segments, and at last of all files.
    assert told[3:] == [
        (0, 1, "reading table default.plain"),
        (0, 2, "reading segments"),
        (2, 2, "reading segments"),
        (0, 3, "filling table default.plain"),
        (1, 3, "filling table default.plain"),
        (3, 3, "filling topic orders"),
    ]
