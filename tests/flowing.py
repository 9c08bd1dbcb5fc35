"""Batches of pipelines without Spark: all that a batch does, but Arrow writes the files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from lake import records, rows_of
from lakebook import Book
from lakebook.lake.attempts import Attempt
from lakebook.lake.footer_store import read_footer
from lakebook.lake.inserting import write_arrow
from lakebook.lake.table import Table
from lakebook.pipelines.pipeline import Pipeline
from lakebook.pipelines.turns import Turn
from lakebook.registry import schema
from lakebook.registry.pipelines import BatchRecord, Landing, land_batch, plan_batch, planned_batch
from lakebook.registry.table_files import TableChange
from lakebook.registry.transactions import Transaction
from lakebook.streams.segment_files import SegmentReader


def planned(book: Book, pipeline: Pipeline) -> BatchRecord | None:
    """Plan a batch of all that waits, unless one is planned; none if nothing waits."""
    record, planner = pipeline.record, pipeline._runner().planner
    found = book._registry.read_with(lambda reader: planned_batch(reader, record.id))
    plan = planner.plan(planner.ends())
    if found is not None or not plan.ranges:
        return found
    with Turn(book.lake, record) as turn:
        return book._registry.write(
            lambda transaction: plan_batch(transaction, record.id, turn.token, plan.ranges, plan.records)
        )


def _records(book: Book, topic_id: int, partition: int) -> list[dict[str, Any]]:
    """All records of a partition that are there, also those below the log start that the pipeline pins."""
    store = book.lake.store
    found: list[dict[str, Any]] = []
    for row in records(book, schema.segments, topic_id=topic_id, partition_id=partition):
        path, base = row["s3_key"], row["base_offset"]
        reader = SegmentReader(store, path, read_footer(store, path, row["size_bytes"]), base)
        found += pa.Table.from_batches(list(reader.batches(base))).to_pylist()
    return found


def flow(book: Book, pipeline: Pipeline, target: Table) -> int:
    """Land what waits in its topics as rows (`id`, `value`) of the target, as one batch; how many records that were."""
    batch = planned(book, pipeline)
    if batch is None:
        return 0
    found = [
        {"id": row["offset"], "value": row["value"].decode()}
        for item in batch.ranges
        for row in _records(book, item.source_id, item.partition)
        if item.start <= row["offset"] < item.end
    ]
    record, table = pipeline.record, target.record
    with Attempt(book.lake, table) as attempt:
        shape = book.lake.shape_of(table, table.schema_version)
        files = write_arrow(book.lake, table, attempt, shape, rows_of(target, found))
        landing = Landing(len(found), len(found), 0, len(files), sum(file.file_size for file in files))

        def land(transaction: Transaction) -> None:
            land_batch(transaction, record, batch, replace(landing, version=table.version + 1))

        attempt.commit(TableChange("append", files, check=land))
    return len(found)
