"""Everything that a book answers, to be compared before and after it was moved; and histories to ask about."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import duckdb

from compacting import by_arrow
from deletes import delete_positions
from lake import insert
from lakebook import Book, SegmentInfo
from lakebook.lake.table import Table
from mirrored import append, in_topic, merge


def answers(book: Book) -> dict[str, Any]:
    """What topics, groups and tables answer: every record, every offset, every row of every version."""
    topics = list(book.metadata.list_topics().items)
    return {
        "topics": {topic.name: _of_topic(book, topic.name) for topic in topics},
        "groups": {
            group.group_id: sorted(
                (item.topic, item.partition_id, item.committed_offset, item.metadata)
                for item in book.metadata.get_consumer_offsets(group.group_id)
            )
            for group in book.metadata.list_consumer_groups().items
        },
        "tables": {f"{table.namespace}.{table.name}": _of_table(book, table) for table in _tables(book)},
    }


def _tables(book: Book) -> list[Table]:
    return [
        book.table(record.name, namespace=record.namespace)
        for space in book.tables.list_namespaces().items
        for record in book.tables.list(space.name).items
    ]


def _of_topic(book: Book, name: str) -> dict[str, Any]:
    topic = book.metadata.get_topic(name)
    assert topic is not None
    segments: list[SegmentInfo] = []
    partitions = book.metadata.list_partitions(name).items
    for partition in partitions:
        segments += book.metadata.each_segment(name, partition.partition_id)
    return {
        "config": dict(topic.config),
        "offsets": [(item.partition_id, item.log_start, item.high_watermark) for item in partitions],
        "segments": [dataclasses.replace(segment, s3_bucket="") for segment in segments],
        "found": [
            getattr(book.metadata.find_segment_for_offset(name, segment.partition_id, segment.base_offset), "id", None)
            for segment in segments
        ],
        "records": in_topic(book, name),
    }


def _of_table(book: Book, table: Table) -> dict[str, Any]:
    record = table.record
    versions = [item.version for item in table.history().items]
    return {
        "totals": (record.version, record.row_count, record.file_count, record.deleted_rows),
        "properties": dict(table.metadata.properties),
        "counts": table.count(),
        "versions": {version: _rows(table, version) for version in versions},
        "files": {version: sorted(file.file_path for file in table.plan(version=version)) for version in versions},
        "few": _rows(table, None, f"{_first_column(table)} < 10"),
        "planned": sorted(file.file_path for file in table.plan(f"{_first_column(table)} < 10")),
        "snapshots": [(item.snapshot_id, item.version, item.sequence_number) for item in table.snapshots()],
        "tags": sorted((tag.name, tag.version) for tag in table.tags()),
    }


def _first_column(table: Table) -> str:
    return "offset" if table.namespace == "topics" else "id"


def _rows(table: Table, version: int | None, where: str | None = None) -> list[str]:
    return sorted(map(str, table.to_arrow(where, version=version).to_pylist()))


# --- histories -----------------------------------------------------------------


def make_history(book: Book, seed: int, steps: int = 14) -> None:
    """Some of everything: records, merges, removals, offsets; inserts, deletes, evolution, tags, drops."""
    chance = random.Random(seed)
    metadata = book.metadata
    metadata.create_topic("orders", 2, config={"iceberg": "true"})
    metadata.create_topic("clicks", 1)
    metadata.ensure_consumer_group("readers")
    table = book.tables.create("numbers", "id BIGINT, word STRING, part BIGINT", partition_by=["part"])
    insert(table, *({"id": number, "word": f"w{number}", "part": number % 2} for number in range(20)))
    for step in range(steps):
        _step(book, table, chance, step)
    book.publish_pending()


def _step(book: Book, table: Table, chance: random.Random, step: int) -> None:
    metadata = book.metadata
    match chance.randrange(11):
        case 0 | 1:
            values = [f"{step}.{number}" for number in range(chance.randint(1, 4))]
            append(book, *values, topic=chance.choice(["orders", "clicks"]), partition=0)
        case 2:
            segments = list(metadata.each_segment("orders", 0))
            if len(segments) >= 2:
                merge(book, segments[:2])
        case 3:
            partition = metadata.get_partition("clicks", 0)
            assert partition is not None
            if partition.high_watermark:
                metadata.commit_offset("readers", "clicks", 0, partition.high_watermark, metadata=f"at {step}")
                metadata.delete_segments_before("clicks", 0, chance.randint(0, partition.high_watermark))
        case 4:
            rows = [{"id": 100 * step + number, "word": "ünï 🎈", "part": chance.randrange(3)} for number in range(5)]
            insert(table, *rows)
        case 5:
            files = [file for file in table.plan() if file.row_count > 1]
            if files:
                chosen = chance.choice(files)
                delete_positions(book, table, [(chosen, chance.randrange(chosen.row_count))], about=chosen)
        case 6:
            table.publish()
            table.tag(f"at-{step}")
        case 7:
            with table.update_schema() as change:
                change.add_column(f"extra_{step}", "DOUBLE")
        case 8:
            table.delete(f"part = {chance.randrange(3)}")
        case 9:
            by_arrow(book, table)
        case _:
            name = f"passing_{step}"
            passing = book.tables.create(name, "id BIGINT")
            insert(passing, {"id": step})
            if chance.random() < 0.5:
                book.tables.drop(name)


def published(book: Book) -> dict[str, list[Any]]:
    """The rows of every published table as DuckDB reads them, from the files alone."""
    found: dict[str, list[Any]] = {}
    connection = duckdb.connect()
    connection.execute("LOAD iceberg; LOAD avro; SET unsafe_enable_version_guessing = true")
    for table in _tables(book):
        location = table.metadata_location
        if location is not None:
            rows = connection.execute(f"SELECT * FROM iceberg_scan('{location}')").fetchall()
            found[table.name] = sorted(map(str, rows))
    return found


def objects_below(folder: Path) -> list[str]:
    """Every file below a folder, by its path."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
