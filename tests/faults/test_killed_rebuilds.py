"""Whoever rebuilds a registry is killed at every step: there is no book until all of it is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from books import SQLITE
from buckets import Buckets
from extent import EVERYWHERE, long
from lake import insert, numbers
from lakebook.errors import RegistryUnfinished
from lakebook.recovery.checkpoints import list_checkpoints
from rebuilding import Loss, answers, checkpoint
from recovery_points import DONE, STEPS, WRITTEN
from streaming import produce


def in_a_child(point: str, *words: str, **settings: str) -> int:
    environment = {**os.environ, "LAKEBOOK_FAILPOINTS": point, **settings}
    command = [sys.executable, "-m", "lakebook.cli.main", *words]
    return subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60).returncode


def rebuild_in_a_child(loss: Loss, point: str) -> int:
    return in_a_child(point, "rebuild", loss.warehouse, "--into", loss.target, **reached(loss))


def reached(loss: Loss) -> dict[str, str]:
    return {f"LAKEBOOK_{name.upper()}": value for name, value in loss.reached.items()}


@long(SQLITE)
@pytest.mark.parametrize("bytes_in", ["folder", "bucket"] if EVERYWHERE else ["folder"])
def test_a_rebuild_that_is_killed_leaves_no_book_and_the_next_one_begins_anew(
    bytes_in: str, loss: Loss, request: pytest.FixtureRequest
) -> None:
    if bytes_in == "bucket":
        buckets: Buckets = request.getfixturevalue("buckets")
        loss.in_bucket(f"s3://{buckets.new_bucket()}/lake", buckets.settings)
    book = loss.open()
    book.metadata.create_topic("orders", 2)
    produce(book, "orders", 0, "a", "b")
    produce(book, "orders", 1, "c")
    table = numbers(book, "numbers", [1, 2], [3])
    table.publish()
    insert(table, {"id": 4})
    # A checkpoint is whole, or is none: whoever dies after it has left one more.
    words = ("--book", loss.target, "maintenance", "run", "janitor", "--no-spark")
    assert (
        in_a_child(f"{WRITTEN}=kill@1", *words, LAKEBOOK_WAREHOUSE=loss.warehouse, **reached(loss)) == -signal.SIGKILL
    )
    assert len(list_checkpoints(book.lake.store)) == 1
    checkpoint(book)
    before = answers(book)
    loss.lose()
    for point in STEPS:
        assert rebuild_in_a_child(loss, point) == -signal.SIGKILL, point
        with pytest.raises(RegistryUnfinished):
            loss.open()
    assert rebuild_in_a_child(loss, f"{DONE}=kill@1") == -signal.SIGKILL
    again = loss.open()
    assert answers(again) == before
    assert again.verify().ok
