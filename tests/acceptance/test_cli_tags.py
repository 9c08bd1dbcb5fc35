"""Tags of tables from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import lakebook
from lake import insert, numbers
from lakebook.cli.main import cli
from shapes import Shape


def fill(folder: Path) -> None:
    """A table with a snapshot of two versions, and a third version that is not published."""
    with lakebook.open(folder, publish="off") as book:
        orders = numbers(book, "orders", [1], [2])
        orders.publish()
        insert(orders, {"id": 3})
        numbers(book, "empty")
        numbers(book, "raw", format="json")


@pytest.fixture
def folder(shape: Shape, tmp_path: Path) -> Iterator[Path]:
    with shape.filled(fill, tmp_path / "book", stays=True) as home:
        yield home


def run(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--book", str(folder), "tables", *words])


def printed(folder: Path, *words: str) -> str:
    result = run(folder, *words)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def refused(folder: Path, *words: str) -> str:
    result = run(folder, *words)
    assert (result.exit_code, result.stdout) == (1, "")
    return result.stderr


def test_a_state_is_tagged_listed_and_untagged(folder: Path) -> None:
    assert json.loads(printed(folder, "tags", "orders", "--json")) == []
    assert printed(folder, "tag", "orders", "now") == "default.orders has the tag now on version 3\n"
    assert printed(folder, "tag", "default.orders", "before", "--version", "2").endswith(
        "the tag before on version 2\n"
    )
    snapshots = {item["version"]: item for item in json.loads(printed(folder, "snapshots", "orders", "--json"))}
    found = json.loads(printed(folder, "tags", "orders", "--json"))
    assert [(tag["name"], tag["version"], tag["snapshot_id"], tag["goes_at"]) for tag in found] == [
        ("before", 2, snapshots[2]["snapshot_id"], None),
        ("now", 3, snapshots[3]["snapshot_id"], None),
    ]
    heading, first, second = printed(folder, "tags", "orders").splitlines()
    assert heading.split() == ["tag", "snapshot", "version", "committed", "goes"]
    assert first.split() == ["before", str(snapshots[2]["snapshot_id"]), "2", first.split()[3], "-"]
    assert second.split()[0] == "now"
    assert printed(folder, "untag", "orders", "now") == "removed the tag now on version 3 from default.orders\n"
    gone = json.loads(printed(folder, "untag", "orders", "before", "--json"))
    assert (gone["name"], gone["version"]) == ("before", 2)
    assert json.loads(printed(folder, "tags", "orders", "--json")) == []


def test_a_tag_can_be_kept_for_a_time(folder: Path) -> None:
    begun = datetime.now(UTC)
    made = json.loads(printed(folder, "tag", "orders", "week", "--keep-seconds", "604800", "--json"))
    goes = datetime.fromisoformat(made["goes_at"])
    assert timedelta(days=7, seconds=-1) <= goes - begun <= timedelta(days=7, minutes=5)
    assert (made["name"], made["version"]) == ("week", 3)
    (listed,) = json.loads(printed(folder, "tags", "orders", "--json"))
    assert listed == made
    text = printed(folder, "tag", "orders", "week", "--keep-seconds", "60")
    assert text.startswith("default.orders has the tag week on version 3 until 20")


def test_what_cannot_be_is_one_line_on_stderr_and_exit_code_1(folder: Path) -> None:
    assert "Tag version 2" in refused(folder, "tag", "orders", "middle", "--version", "1")
    error = json.loads(refused(folder, "tag", "orders", "next", "--version", "9", "--json"))
    assert (error["error"], error["on"]) == ("version_not_found", "table default.orders")
    assert "begin with lb-" in refused(folder, "tag", "orders", "lb-mine")
    assert "it has no snapshot yet" in refused(folder, "tag", "empty", "now")
    assert "format json" in refused(folder, "tags", "raw")
    assert "there is no tag 'now'" in refused(folder, "untag", "orders", "now")
    assert "is a branch" in refused(folder, "untag", "orders", "main")
    assert "cannot be kept for -1.0 seconds" in refused(folder, "tag", "orders", "x", "--keep-seconds", "-1")
    printed(folder, "tag", "orders", "now")
    error = json.loads(refused(folder, "tag", "orders", "now", "--version", "2", "--json"))
    assert error["error"] == "tag_already_exists"
    assert "there is no table 'none'" in refused(folder, "tags", "none")
    assert run(folder, "tag", "orders").exit_code == 2
