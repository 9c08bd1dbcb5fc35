"""Whoever rebuilds a registry is killed at every step: there is no book until all of it is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from books import POSTGRESQL, SQLITE, Postgres
from lake import insert, numbers
from lakebook.errors import RegistryUnfinished
from rebuilding import Loss, answers, checkpoint
from streaming import produce

POINTS = ("rebuild.begun=kill@1", "rebuild.chunk=kill@1", "rebuild.chunk=kill@9", "rebuild.filled=kill@1")


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def loss(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loss]:
    databases: list[str] = []

    def new_database() -> str:
        postgres: Postgres = request.getfixturevalue("postgres")
        databases.append(postgres.new_database(with_book=False))
        return databases[-1]

    loss = Loss(request.param, tmp_path, new_database)
    yield loss
    loss.close()
    for url in databases:
        request.getfixturevalue("postgres").drop(url)


def rebuild_in_a_child(loss: Loss, point: str) -> int:
    command = [sys.executable, "-m", "lakebook.cli.main", "rebuild", loss.warehouse, "--into", loss.target]
    environment = {**os.environ, "LAKEBOOK_FAILPOINTS": point}
    return subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60).returncode


def test_a_rebuild_that_is_killed_leaves_no_book_and_the_next_one_begins_anew(loss: Loss) -> None:
    book = loss.open()
    book.metadata.create_topic("orders", 2)
    produce(book, "orders", 0, "a", "b")
    produce(book, "orders", 1, "c")
    table = numbers(book, "numbers", [1, 2], [3])
    table.publish()
    insert(table, {"id": 4})
    checkpoint(book)
    before = answers(book)
    loss.lose()
    for point in POINTS:
        assert rebuild_in_a_child(loss, point) == -signal.SIGKILL, point
        with pytest.raises(RegistryUnfinished):
            loss.open()
    assert rebuild_in_a_child(loss, "rebuild.done=kill@1") == -signal.SIGKILL
    again = loss.open()
    assert answers(again) == before
    assert again.verify().ok
