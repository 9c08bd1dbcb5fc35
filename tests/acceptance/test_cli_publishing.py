"""Publishing tables as Iceberg from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyiceberg.catalog.sql import SqlCatalog

import lakebook
from lake import insert, numbers
from lakebook import failpoints
from lakebook.cli.main import cli
from shapes import Shape


def fill(folder: Path) -> None:
    """Two tables of which nothing is published, and one that cannot be."""
    with lakebook.open(folder, publish="off") as book:
        orders = numbers(book, "orders", [1, 2])
        insert(orders, {"id": 3})
        book.tables.create_namespace("sales")
        numbers(book, "visits", [4], namespace="sales")
        numbers(book, "raw", format="json")


@pytest.fixture
def folder(shape: Shape, tmp_path: Path) -> Iterator[Path]:
    with shape.filled(fill, tmp_path / "book") as home:
        yield home


def run(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--book", str(folder), *words])


def printed(folder: Path, *words: str) -> str:
    result = run(folder, *words)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def test_a_table_is_published_and_the_address_of_its_metadata_printed(folder: Path) -> None:
    text = printed(folder, "tables", "publish", "orders")
    start, _, address = text.strip().rpartition(": ")
    assert start == "default.orders is published at version 2"
    with lakebook.open(folder, publish="off") as book:
        assert book.lake.store.size(book.lake.store.relative(address)) is not None
    again = json.loads(printed(folder, "tables", "publish", "orders", "--json"))
    assert (again["table"], again["version"], again["metadata_location"]) == ("default.orders", 2, address)
    described = json.loads(printed(folder, "tables", "describe", "orders", "--json"))
    assert (described["published_version"], described["metadata_location"]) == (2, address)
    lines = [line.split() for line in printed(folder, "tables", "describe", "orders").splitlines()]
    assert ["published:", "2"] in lines
    assert ["metadata:", address] in lines
    assert "published:         -" in printed(folder, "tables", "describe", "sales.visits")


def test_all_tables_are_published(folder: Path) -> None:
    text = printed(folder, "tables", "publish", "--all")
    assert "default.orders is published at version 2: " in text
    assert "sales.visits is published at version 1: " in text
    assert text.endswith("published 2 table(s), 0 failed\n")
    assert json.loads(printed(folder, "tables", "publish", "--all", "--json")) == {"published": [], "failed": []}


def test_a_table_that_cannot_be_published_makes_the_exit_code_1(folder: Path) -> None:
    failures = [OSError("the disk is full")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    with failpoints.armed("publish.metadata_written", fail):
        result = run(folder, "tables", "publish", "--all")
    assert result.exit_code == 1
    assert "failed: default.orders: " in result.stdout
    assert "the disk is full" in result.stdout
    assert result.stdout.endswith("published 1 table(s), 1 failed\n")
    result = run(folder, "tables", "publish", "raw")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: table default.raw: a table of format json cannot be published as Iceberg")


@pytest.mark.parametrize("words", [(), ("orders", "--all"), ("--all", "--namespace", "sales")])
def test_a_table_or_all_have_to_be_named(folder: Path, words: tuple[str, ...]) -> None:
    result = run(folder, "tables", "publish", *words)
    assert result.exit_code == 2
    assert "Name a table, or give --all." in result.stderr


def test_snapshots_are_listed(folder: Path) -> None:
    assert json.loads(printed(folder, "tables", "snapshots", "orders", "--json")) == []
    printed(folder, "tables", "publish", "orders")
    printed(folder, "tables", "delete-rows", "orders", "--where", "true")
    first, second = json.loads(printed(folder, "tables", "snapshots", "orders", "--json"))
    assert (first["version"], first["summary"]["lakebook.versions"]) == (2, "1-2")
    assert (second["version"], second["summary"]["operation"]) == (3, "delete")
    heading, *rows = printed(folder, "tables", "snapshots", "orders").splitlines()
    assert heading.split() == [
        *("snapshot", "version", "sequence", "operation"),
        *("added", "rows", "deleted", "rows", "rows", "committed"),
    ]
    assert rows[0].split()[:7] == [str(first["snapshot_id"]), "2", "1", "append", "3", "-", "3"]
    assert rows[1].split()[:7] == [str(second["snapshot_id"]), "3", "2", "delete", "-", "3", "0"]


def test_what_a_command_has_changed_is_published_when_it_ends(folder: Path) -> None:
    printed(folder, "tables", "create", "new", "--schema", "id BIGINT")
    described = json.loads(printed(folder, "tables", "describe", "new", "--json"))
    assert (described["version"], described["published_version"]) == (0, 0)
    printed(folder, "tables", "add-column", "new", "name", "STRING")
    described = json.loads(printed(folder, "tables", "describe", "new", "--json"))
    assert (described["version"], described["published_version"]) == (1, 1)


def test_a_table_of_another_catalog_is_registered_and_its_debts_are_settled(folder: Path, tmp_path: Path) -> None:
    with lakebook.open(folder, publish="off") as book:
        access = book.warehouse.access.iceberg_properties(credentials=True) if book.warehouse.bucket else {}
        place = {"warehouse": book.lake.store.uri("others"), **access}
    catalog = SqlCatalog("other", uri=f"sqlite:///{tmp_path}/other.db", **place)
    catalog.create_namespace("n")
    theirs = catalog.create_table("n.t", pa.schema([("id", pa.int64())]))
    theirs.append(pa.table({"id": [1, 2, 3]}))
    catalog.close()
    out = printed(folder, "tables", "register", "taken", theirs.metadata_location)
    assert out == "registered default.taken: 3 rows in 1 files\n"
    # Closing the book has taken what was owed.
    assert json.loads(printed(folder, "admin", "settle-debts", "--json")) == {"paid": 0, "failed": []}
    assert printed(folder, "admin", "settle-debts") == "took 0 file(s)\n"
    assert json.loads(printed(folder, "verify", "--json"))["findings"] == []
    with lakebook.open(folder, publish="off") as book:
        assert sorted(book.table("taken").to_arrow()["id"].to_pylist()) == [1, 2, 3]
    again = run(folder, "tables", "register", "taken", theirs.metadata_location)
    assert again.exit_code != 0
    assert "exists already" in again.stderr
    outside = run(folder, "tables", "register", "other", "file:///etc/passwd")
    assert outside.exit_code != 0
    assert "is not inside" in outside.stderr
