"""The loss of a registry, as the operations page tells what to do."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import lakebook
from lake import numbers
from lakebook.cli.main import cli
from lakebook.errors import BookHeld
from rebuilding import checkpoint, rows_of_version
from streaming import produce

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A book in the present folder whose registry is gone."""
    monkeypatch.chdir(tmp_path)
    with lakebook.open("my-book") as book:
        numbers(book, "plain", [1, 2])
        book.metadata.create_topic("orders")
        produce(book, "orders", 0, "a")
        checkpoint(book)
        lost = produce(book, "orders", 0, "b")
        produce(book, "orders", 0, "c")
        book.lake.store.delete([lost.s3_key])
    for file in Path("my-book").glob("registry.db*"):
        file.unlink()
    return tmp_path


def test_the_commands_of_the_operations_page_bring_the_book_back(folder: Path) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Loss of the registry\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    for line in block.splitlines():
        done = CliRunner().invoke(cli, shlex.split(line, comments=True)[1:])
        assert done.exit_code == 0, done.output
    with lakebook.open(folder / "my-book") as book:
        assert rows_of_version(book.table("plain")) == ["{'id': 1}", "{'id': 2}"]
        assert book.cleaner.expire() is not None


def test_the_report_is_data(folder: Path) -> None:
    done = CliRunner().invoke(cli, ["rebuild", "my-book/warehouse", "--into", "my-book", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["complete"] is False
    assert [(hole["first"], hole["last"]) for hole in report["holes"]] == [(1, 1)]
    assert [item["name"] for item in report["tables"]] == ["default.plain"]
    with lakebook.open(folder / "my-book") as book, pytest.raises(BookHeld):
        book.cleaner.expire()


def test_the_report_is_read_by_people(folder: Path) -> None:
    done = CliRunner().invoke(cli, ["--book", str(folder / "my-book"), "rebuild", "my-book/warehouse"])
    assert done.exit_code == 0, done.output
    for text in ("hole: orders/0: 1 to 1", "taken on its own word: orders/0", "not everything came back"):
        assert text in done.output
    again = CliRunner().invoke(cli, ["--book", str(folder / "my-book"), "rebuild", "my-book/warehouse"])
    assert again.exit_code == 1
    assert "there is a book in it" in again.output
