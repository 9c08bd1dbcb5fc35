"""Everything that a book answers, to be compared before and after it was moved; and histories to ask about."""

from __future__ import annotations

import dataclasses
import json
import random
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from by_hand import in_order, of_duckdb, settle
from compacting import by_arrow
from deletes import delete_positions
from flowing import flow, planned
from lake import insert, lay, with_ids
from lakebook import Book, SegmentInfo
from lakebook.errors import SnapshotNotFound, SparkUnsuitable, ViewNotFound
from lakebook.lake.table import Table
from lakebook.pipelines.pipeline import Pipeline
from lakebook.registry.pipelines import pinned_offsets
from lakebook.views.view import View
from mirrored import append, in_topic, merge
from viewing import T0, at, build_hours, enter_hours, order, orders, view_of

HOURS = 6


def answers(book: Book) -> dict[str, Any]:
    """What everything in a book answers: every record, every offset, every row of every version, every range."""
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
        "views": {name: _of_view(book.views[name]) for name in book.views},
        "pipelines": {pipeline.name: _of_pipeline(book, pipeline) for pipeline in book.pipelines},
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
        "tags": sorted((tag.name, tag.version) for tag in table.tags()) if record.format == "parquet" else [],
        "columns": [(field.field_id, field.name, str(field.field_type)) for field in table.schema.fields],
        "times": {item.version: item.committed_at for item in table.history().items},
    }


def _first_column(table: Table) -> str:
    return "offset" if table.namespace == "topics" else "id"


def _of_view(view: View) -> dict[str, Any]:
    span = (T0, at(HOURS))
    instances = view.record.definition["instances"]
    return {
        "record": view.record,
        "ranges": {name: view.list_partitions(instance=name) for name in instances},
        "planned": {name: view.plan(*span, instance=name) for name in instances},
        "coverage": {name: view.coverage(*span, instance=name) for name in instances},
        "counts": {name: (view.count(instance=name), view.count(*span, instance=name)) for name in instances},
        "rows": {name: _rows_of_view(view, name) for name in instances},
    }


def _rows_of_view(view: View, instance: str) -> list[str] | None:
    with suppress(ViewNotFound):  # Only empty ranges were built.
        return sorted(map(str, view.to_arrow(instance=instance).to_pylist()))
    return None


def _of_pipeline(book: Book, pipeline: Pipeline) -> dict[str, Any]:
    return {
        # Whether somebody runs it is a matter of the moment.
        "described": dataclasses.replace(pipeline.describe(), running=False),
        "batches": list(pipeline.batches().items),
        "pinned": book._registry.read_with(lambda reader: pinned_offsets(reader, pipeline.record.id)),
    }


def _rows(table: Table, version: int | None, where: str | None = None) -> list[str]:
    return sorted(map(str, table.to_arrow(where, version=version).to_pylist()))


# --- histories -----------------------------------------------------------------


def make_history(book: Book, seed: int, steps: int = 18) -> None:
    """Some of everything: topics, tables of both formats, what outside engines do, pipelines and views."""
    chance = random.Random(seed)
    metadata = book.metadata
    metadata.create_topic("orders", 2, config={"iceberg": "true"})
    metadata.create_topic("clicks", 1)
    metadata.ensure_consumer_group("readers")
    table = book.tables.create("numbers", "id BIGINT, word STRING, part BIGINT", partition_by=["part"])
    insert(table, *({"id": number, "word": f"w{number}", "part": number % 2} for number in range(20)))
    book.tables.create("notes", "id BIGINT, text STRING", format="json")
    _note(book, {"id": 1, "text": "a\nb"})
    flowed = book.tables.create("flowed", "id BIGINT, value STRING")
    append(book, "first", "second", topic="clicks")
    book.pipelines.create("flow", into="flowed", topics="clicks")
    flow(book, book.pipelines["flow"], flowed)
    sold = orders(book, "sold")
    for number, hour in enumerate((0.5, 1.5, 3.5)):
        order(sold, hour, first=number)
    build_hours(book, view_of(book, "sold"), sold, range(3))
    enter_hours(book, view_of(book, "clicks", "of_clicks", event_time="timestamp"), range(2))
    for step in range(steps):
        _step(book, table, chance, step)
    book.publish_pending()
    settle(book)


def _step(book: Book, table: Table, chance: random.Random, step: int) -> None:
    metadata = book.metadata
    match chance.randrange(19):
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
            # An empty table may have no snapshot.
            with suppress(SnapshotNotFound):
                table.tag(f"at-{step}")
        case 7:
            with table.update_schema() as change:
                change.add_column(f"extra_{step}", "DOUBLE")
        case 8:
            # Files of others may have no statistics yet: what is in them, only Spark could tell.
            with suppress(SparkUnsuitable):
                table.delete(f"part = {chance.randrange(3)}")
        case 9:
            by_arrow(book, table)
        case 10:
            name = f"passing_{step}"
            passing = book.tables.create(name, "id BIGINT")
            insert(passing, {"id": step})
            if chance.random() < 0.5:
                book.tables.drop(name)
        case 11:
            _note(book, {"id": step, "text": f"ünï {step}"}, {"id": step + 100, "text": None})
        case 12 | 13:
            _step_of_others(book, table, chance, step)
        case 14 | 15:
            _flow(book, chance)
        case _:
            _view(book, chance, step)


def _note(book: Book, *rows: dict[str, Any]) -> None:
    """Rows of a table that are lines of JSON."""
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    book.table("notes").add_files([lay(book, f"notes/{uuid.uuid4()}.json", lines.encode())])


def _step_of_others(book: Book, table: Table, chance: random.Random, step: int) -> None:
    """Something that another engine does."""
    theirs = book.catalog().load_table("default.numbers")
    head = theirs.current_snapshot()
    rows = [{"id": 1000 * step + number, "word": "theirs", "part": number % 2} for number in range(4)]
    match chance.randrange(4):
        case 0:
            theirs.append(with_ids(table, rows))
        case 1:
            gone = f"id >= {chance.randrange(20)} and id < 20"
            if theirs.scan(row_filter=gone).to_arrow().num_rows:
                theirs.delete(gone)
        case 2 if head is not None and "work" not in theirs.refs():
            theirs.manage_snapshots().create_branch(head.snapshot_id, "work").commit()
            book.catalog().load_table("default.numbers").append(with_ids(table, rows), branch="work")
        case 3 if head is not None:
            theirs.manage_snapshots().create_tag(head.snapshot_id, f"theirs-{step}").commit()


def _flow(book: Book, chance: random.Random) -> None:
    pipeline = book.pipelines["flow"]
    pipeline.resume(skip_lost=True)
    match chance.randrange(3):
        case 0:
            planned(book, pipeline)  # And whoever has planned it dies.
        case 1:
            flow(book, pipeline, book.table("flowed"))
            pipeline.pause()
        case _:
            flow(book, pipeline, book.table("flowed"))


def _view(book: Book, chance: random.Random, step: int) -> None:
    view, sold = book.views["hourly"], book.table("sold")
    match chance.randrange(4):
        case 0:
            order(sold, chance.random() * HOURS, first=10 * step)  # Something may be stale now.
        case 1:
            build_hours(book, view, sold, [chance.randrange(HOURS)])
        case 2:
            hour = chance.randrange(HOURS)
            view.retire_partitions(at(hour), at(hour + 1))
        case _:
            sold.delete(f"id < {chance.randrange(3)}")


# --- what other engines see ------------------------------------------------------


def published(book: Book) -> dict[str, Any]:
    """The rows of every snapshot and every branch of every published table, as other engines read them."""
    found: dict[str, Any] = {}
    for table in _tables(book):
        if table.metadata_location is None:
            continue
        theirs = book.catalog().load_table((table.namespace, table.name))
        found[f"{table.namespace}.{table.name}"] = {
            "snapshots": {
                item.snapshot_id: in_order(theirs.scan(snapshot_id=item.snapshot_id).to_arrow().to_pylist())
                for item in theirs.metadata.snapshots
            },
            "refs": {name: ref.model_dump() for name, ref in theirs.metadata.refs.items()},
            "log": [item.model_dump() for item in theirs.metadata.snapshot_log],
            "schemas": [schema.model_dump() for schema in theirs.metadata.schemas],
        }
    return found


def read_by_duckdb(book: Book) -> dict[str, list[str]]:
    """The rows of every published table as DuckDB reads them, from the files alone; only of those in a folder."""
    return {
        f"{table.namespace}.{table.name}": of_duckdb(location)
        for table in _tables(book)
        if (location := table.metadata_location) is not None and table.snapshots()
    }


def objects_below(folder: Path) -> list[str]:
    """Every file below a folder, by its path."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
