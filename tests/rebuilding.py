"""Books whose registry is lost and rebuilt, and everything that they answer."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from books import SQLITE, Place
from lakebook import Book, RebuildReport
from lakebook.components.janitor import Janitor
from lakebook.errors import LakebookError
from lakebook.lake.table import Table
from lakebook.recovery.rebuild import rebuild_book
from lakebook.streams.segment_files import CONTENT_SCHEMA, stamped, store_segment
from mirrored import BEGIN


def checkpoint(book: Book) -> str:
    """Have the janitor write a checkpoint; its path."""
    done = Janitor(book.lake).run_once("checkpoint")["checkpoint"]
    assert done["checkpoints"] == 1, done
    return str(done["path"])


def records_of(book: Book, topic: str) -> dict[int, list[tuple[int, bytes | None]]]:
    """Every record of a topic: its offset and its value, by partition."""
    found: dict[int, list[tuple[int, bytes | None]]] = {}
    with book.consumer(topic, start="earliest") as consumer:
        for record in consumer.until_end():
            found.setdefault(record.partition, []).append((record.offset, record.value))
    return found


def rows_of_version(table: Table, version: int | None = None, where: str | None = None) -> list[str]:
    """The rows of a version, in no order."""
    return sorted(map(str, table.to_arrow(where, version=version).to_pylist()))


def table_answers(book: Book, name: str, namespace: str = "default") -> dict[str, Any]:
    """What a table answers: its rows in every version, counts, plans, snapshots, tags."""
    table = book.table(name, namespace=namespace)
    key = table.to_arrow().schema.names[0]
    versions = [item.version for item in table.history().items]
    return {
        "uuid": table.record.table_uuid,
        "version": table.record.version,
        "totals": (table.record.row_count, table.record.file_count, table.record.total_size, table.record.deleted_rows),
        "count": table.count(),
        "versions": {version: rows_of_version(table, version) for version in versions},
        "times": {item.version: item.committed_at for item in table.history().items},
        "planned": sorted(file.file_path for file in table.plan(f"{key} < 10")),
        "some": rows_of_version(table, None, f"{key} < 10"),
        "snapshots": sorted((item.snapshot_id, item.version or -1, item.sequence_number) for item in table.snapshots()),
        "tags": sorted((tag.name, tag.version) for tag in table.tags()) if table.record.format == "parquet" else [],
        "properties": dict(table.metadata.properties),
        "columns": table.to_arrow().schema.names,
    }


def topic_answers(book: Book, name: str) -> dict[str, Any]:
    """What a topic answers: its configuration, its offsets, every record."""
    topic = book.metadata.get_topic(name)
    assert topic is not None
    return {
        "config": (topic.partition_count, topic.retention_ms, dict(topic.config)),
        "offsets": [
            (item.partition_id, item.log_start, item.high_watermark)
            for item in book.metadata.list_partitions(name).items
        ],
        "records": records_of(book, name),
    }


def group_answers(book: Book) -> dict[str, Any]:
    """How far each group has come."""
    return {
        group.group_id: sorted(
            (item.topic, item.partition_id, item.committed_offset, item.metadata)
            for item in book.metadata.get_consumer_offsets(group.group_id).items
        )
        for group in book.metadata.list_consumer_groups().items
    }


def answers(book: Book) -> dict[str, Any]:
    """Everything that a book answers."""
    return {
        "tables": {
            f"{item.namespace}.{item.name}": table_answers(book, item.name, item.namespace)
            for item in book.tables.list().items
        },
        "topics": {item.name: topic_answers(book, item.name) for item in book.metadata.list_topics().items},
        "groups": group_answers(book),
    }


class Loss:
    """A book whose registry is lost, and where it is rebuilt."""

    def __init__(self, kind: str, folder: Path, new_database: Callable[[], str]) -> None:
        self.kind = kind
        self._new_database = new_database
        self.target = str(folder / "book") if kind == SQLITE else new_database()
        self.warehouse = str(folder / "book" / "warehouse")
        #: What reaches the warehouse.
        self.reached: dict[str, Any] = {}
        self._places = [self._place()]

    def _place(self) -> Place:
        return Place(self.kind, self.target, {"warehouse": self.warehouse, "checkpoint_interval": 300, **self.reached})

    def in_bucket(self, warehouse: str, reached: dict[str, Any]) -> None:
        """Have the bytes in a bucket; to be said before the book is opened."""
        self.warehouse, self.reached = warehouse, reached
        self._places[-1] = self._place()

    def open(self, **settings: Any) -> Book:
        """The book as it is now."""
        return self._places[-1].open(**settings)

    def close(self) -> None:
        """Close every book."""
        for place in self._places:
            place.close()

    def lose(self) -> None:
        """Close every book, and lose the registry."""
        self.close()
        if self.kind == SQLITE:
            for file in Path(self.target).glob("registry.db*"):
                file.unlink()
        else:
            self.target = self._new_database()
        self._places.append(self._place())

    def rebuild(self) -> RebuildReport:
        """Rebuild the registry from the warehouse."""
        return rebuild_book(self.warehouse, self.target, **self.reached)

    def after(self) -> Book:
        """Lose the registry, rebuild it, and open the book."""
        self.lose()
        self.rebuild()
        return self.open()


def record_table(values: Sequence[str]) -> pa.Table:
    """Records with these values."""
    return pa.Table.from_pylist(
        [{"timestamp": BEGIN, "key": None, "value": value.encode(), "headers": None} for value in values],
        CONTENT_SCHEMA,
    )


def stray_segment(
    book: Book, topic: str, partition: int, base: int, *values: str, folder: str = "t99", **more: Any
) -> str:
    """A segment's file that no registry ever knew; its path. `more` is what it says of itself beside its place."""
    found = book.metadata.get_topic(topic)
    assert found is not None
    path = f"topics/{found.id}/{partition}/{folder}/{uuid.uuid4().hex}.parquet"
    facts = {"topic_id": found.id, "partition": partition, "base_offset": base, **more}
    store_segment(book.lake.store, path, stamped(record_table(values), partition, base), facts=facts)
    return path


def readable(table: Table, version: int) -> bool:
    """Whether a version can be read."""
    try:
        table.to_arrow(version=version)
    except LakebookError:
        return False
    return True
