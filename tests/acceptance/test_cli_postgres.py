"""The command line on a book whose registry is on PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import lakebook
from books import Postgres, describe
from lakebook import Book
from lakebook.cli.main import cli
from lakebook.config import load_settings
from lakebook.registry.databases import database_for
from lakebook.registry.migrate import HEAD, REVISIONS, migrate_to

Run = Callable[..., Result]


@pytest.fixture
def run(postgres: Postgres, postgres_url: str) -> Run:
    def run(*words: object) -> Result:
        where = ["--book", postgres_url, "--warehouse", postgres.warehouse]
        return CliRunner().invoke(cli, [*where, *map(str, words)])

    return run


@pytest.fixture
def book(postgres: Postgres, postgres_url: str) -> Iterator[Book]:
    with lakebook.open(postgres_url, warehouse=postgres.warehouse) as opened:
        yield opened


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_topic_and_its_group_live_from_creation_to_deletion(run: Run, book: Book) -> None:
    assert as_json(run("topics", "create", "orders", "--partitions", 2, "--json"))["partition_count"] == 2
    book.metadata.add_segment(describe("orders"))
    book.metadata.commit_offset("billing", "orders", 0, 40)
    assert as_json(run("groups", "list", "--json"))[0]["lag"] == 60
    assert as_json(run("segments", "find", "orders", 0, "--offset", 99, "--json"))["end_offset"] == 99
    assert as_json(run("groups", "reset", "billing", "--topic", "orders", "--to", "earliest", "--json"))[0] == {
        "group_id": "billing",
        "topic": "orders",
        "partition_id": 0,
        "from_offset": 40,
        "to_offset": 0,
        "target": "earliest",
        "reason": None,
    }
    assert as_json(run("verify", "--json"))["findings"] == []
    assert as_json(run("metrics", "--json"))["lakebook_consumer_lag"] == 100
    assert run("groups", "delete", "billing", "--yes").exit_code == 0
    assert run("topics", "delete", "orders", "--yes").exit_code == 0
    assert as_json(run("topics", "list", "--json")) == []
    assert as_json(run("groups", "list", "--json")) == []


def test_events_of_one_table_are_limited_without_leaving_any_out(run: Run, book: Book) -> None:
    book.metadata.create_topic("orders", 3)
    book.metadata.create_topic("returns", 3)

    def tail(*words: object) -> list[Any]:
        return [json.loads(line) for line in run("events", "tail", "--json", *words).stdout.splitlines()]

    *everything, _ = tail("--table", "partitions")
    found: list[Any] = []
    since: list[object] = []
    while len(found) < len(everything):
        *some, position = tail("--table", "partitions", "--limit", 4, *since)
        assert 0 < len(some) <= 4
        found += some
        since = ["--since", position["cursor"]]
    assert found == everything
    assert len(tail(*since)) == 1


def test_an_unknown_topic_is_one_line(run: Run, book: Book) -> None:
    result = run("topics", "show", "nowhere")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_init_creates_the_book_once_and_hides_the_password(postgres: Postgres) -> None:
    url = postgres.new_database(with_book=False)
    where = ["--book", url.replace("postgres:@", "postgres:hunter2@"), "--warehouse", postgres.warehouse]
    assert "hunter2" in where[1]
    assert CliRunner().invoke(cli, [*where, "topics", "list"]).exit_code == 1
    first, second, health = (
        CliRunner().invoke(cli, [*where, *words]) for words in (["init"], ["init"], ["doctor", "--json"])
    )
    assert first.stdout.startswith("created a book")
    assert second.stdout.startswith("the book exists")
    assert json.loads(health.stdout)["ok"] is True
    assert "hunter2" not in first.output + second.output + health.output
    postgres.drop(url)


def test_an_existing_book_knows_its_warehouse_and_a_new_one_has_to_be_told(postgres: Postgres) -> None:
    url = postgres.new_database(with_book=False)
    result = CliRunner().invoke(cli, ["-b", url, "init"])
    assert result.exit_code == 1
    assert "needs a warehouse" in result.stderr
    assert CliRunner().invoke(cli, ["-b", url, "--warehouse", postgres.warehouse, "init"]).exit_code == 0
    assert CliRunner().invoke(cli, ["-b", url, "topics", "list"]).exit_code == 0
    postgres.drop(url)


def test_migrating_a_server_out_of_reach_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli, ["-b", "postgresql://user:s3cret@127.0.0.1:1/db", "--warehouse", str(tmp_path), "migrate"]
    )
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert "s3cret" not in result.output


def test_migrate_applies_what_is_missing(postgres: Postgres) -> None:
    url = postgres.new_database(with_book=False)
    migrate_to(database_for(load_settings(url, {"warehouse": postgres.warehouse})), "0001")
    result = CliRunner().invoke(cli, ["-b", url, "--warehouse", postgres.warehouse, "migrate", "--json"])
    assert json.loads(result.stdout) == {"before": "0001", "after": HEAD, "applied": list(REVISIONS[1:])}
    postgres.drop(url)
