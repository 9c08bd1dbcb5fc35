"""A process that lands a batch is killed at each step; the batch is there once or not at all, and can be repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batch_processes import PARTITIONS, POINTS, ROWS, TOPIC, append
from books import Place
from lake import own_warehouse  # noqa: F401 - a fixture
from lakebook import Book, failpoints
from lakebook.streams.sweeping import sweep_streams

PROGRAM = Path(__file__).parent / "batch_processes.py"
# Of the transactions on the way: opening the folder, claiming a turn.
TRANSACTIONS = ["transaction.before_commit=kill@2", "transaction.after_commit=kill@5"]


def killed_at(place: Place, point: str, batch_id: int) -> bool:
    """Whether a process that lands a batch was killed at a point."""
    child = subprocess.run(
        [sys.executable, str(PROGRAM), place.target, json.dumps(place.settings), str(batch_id)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "LAKEBOOK_FAILPOINTS": point},
    )
    assert child.returncode in (0, -signal.SIGKILL), child.stderr
    return child.returncode != 0


def landed(book: Book) -> list[bytes]:
    """The values of a topic, each as often as it is there; its offsets have no gap."""
    with book.consumer(TOPIC, partitions=range(PARTITIONS)) as consumer:
        found = []
        while records := consumer.poll(0.2):
            found += records
    assert len(found) == book.topics[TOPIC].describe().record_count
    return sorted(record.value or b"" for record in found)


def test_every_failpoint_of_batches_is_armed() -> None:
    assert {point for point in failpoints.POINTS if point.startswith("batch.")} == set(POINTS)


@pytest.mark.parametrize("point", [f"{point}=kill" for point in POINTS] + TRANSACTIONS)
def test_a_batch_whose_process_was_killed_lands_once_when_it_is_repeated(shared_place: Place, point: str) -> None:
    # A turn that a dead process holds runs out soon.
    book = shared_place.open(insert_alive=0.1, sweep_grace=0)
    shared_place.settings = {**shared_place.settings, "append_turn": 0.5}
    book.topics.create(TOPIC, PARTITIONS)
    append(book, 1)
    assert killed_at(shared_place, point, 2)
    once = sorted(f"1-{number}".encode() for number in range(ROWS))
    twice = sorted([*once, *(f"2-{number}".encode() for number in range(ROWS))])
    assert landed(book) in (once, twice)
    append(book, 2)
    assert landed(book) == twice
    assert append(book, 2) == 0
    for _ in range(3):
        sweep_streams(book.lake, book.metadata)
    segments = {segment.s3_key for number in range(PARTITIONS) for segment in book.metadata.each_segment(TOPIC, number)}
    assert {item.path for item in book.lake.store.list("topics")} == segments
    assert book.verify().findings == ()
