"""A process that appends a numbered batch of staged rows to a topic; killed by a failpoint in the tests."""

from __future__ import annotations

import json
import sys

import pyarrow as pa

import lakebook
from lakebook import Book
from lakebook.failpoints import arm_from_environment
from lakebook.streams.landing import land_batch, most_record
from lakebook.streams.staging import Stage, Stager

TOPIC, SINK = "orders", "nightly"
PARTITIONS, ROWS = 3, 60
POINTS = ("batch.stored", "batch.landed")


def append(book: Book, batch_id: int) -> int:
    """Stage rows as two tasks do, and land them; how many were recorded now."""
    topic = book.topics[TOPIC].record
    folder = book.metadata.open_stream_folder(TOPIC, "s")
    assert folder.commit_id is not None
    stage = Stage(
        TOPIC, topic.id, folder.folder, folder.commit_id, topic.partition_count, True, most_record(book.lake, topic)
    )
    staged = []
    for task in range(2):
        stager = Stager(book.lake.store, stage)
        texts = [f"{batch_id}-{number}" for number in range(task, ROWS, 2)]
        stager.add(pa.table({"key": texts, "value": texts}), book.lake.clock.now_ms())
        staged += stager.finish()
    return land_batch(book.lake, book.metadata, stage, staged, sink=SINK, batch_id=batch_id).record_count


if __name__ == "__main__":
    target, settings, number = sys.argv[1:]
    arm_from_environment()
    with lakebook.open(target, **json.loads(settings)) as book:
        sys.stdout.write(f"{append(book, int(number))}\n")
