"""Moving and losing a book: its copy, a checkpoint of it and its rebuild, beside the bare work on the same files.

The files are real ones and small, so that what is measured is the work per file and per row, and not the bandwidth
of a disk. Beside a copy stands `shutil.copytree` of the same warehouse; beside a rebuild, reading every file once for
its checksum. Both are without a registry, and neither syncs anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import xxhash

import lakebook
from bench.asked import Asked, Say
from bench.measure import timed
from bench.places import Ground, Place
from bench.report import Result
from lakebook import Book, SegmentInfo
from lakebook.recovery.checkpoints import write_checkpoint
from lakebook.registry.statements import POSTGRESQL
from lakebook.streams.segment_files import CONTENT_SCHEMA, TIMESTAMP, described, encoded, stamped

#: Tables, and published versions of each.
_TABLES, _COMMITS = 10, 20
_TOPICS, _PARTITIONS = 5, 4
#: Segments beside each file.
_SEGMENTS = 5 / 2
_RECORDS = 5
_AT_ONCE = 5000
_SETTINGS = {"publish": "off"}


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """Fill a book, then write a checkpoint of it, copy it, and rebuild it from its warehouse."""
    for size in asked.moved:
        with ground.new(size, "moving") as place:
            yield from _measure(ground, place, say)


def _measure(ground: Ground, place: Place, say: Say) -> Iterator[Result]:
    kind, size = ground.kind, place.size
    book = place.open(**_SETTINGS)
    segments = _fill(book, size, say)
    place.analyze()
    warehouse = Path(book.lake.store.warehouse.root)
    say(f"moving: a checkpoint of {size:,} files")
    seconds, written = timed(lambda: write_checkpoint(book.lake))
    yield Result("a checkpoint, rows/s", kind, size, written.rows / seconds, None, "rows/s")
    yield Result("a checkpoint, its size", kind, size, written.size / 1e6, None, "MB")
    say(f"moving: a copy of {size:,} files")
    place.close()
    target, settings = place.target
    files = sum(1 for item in warehouse.rglob("*") if item.is_file())
    bare, _ = timed(lambda: shutil.copytree(warehouse, ground.folder / f"bare-{kind}-{size}"))
    into = _new_place(ground, f"moved_{size}")
    elsewhere = ground.folder / f"moved-{kind}-{size}" / "warehouse"
    seconds, copied = timed(lambda: lakebook.copy_book(target, into, **{**settings, "warehouse": elsewhere}))
    rows = sum(copied.rows.values())
    name = f"copy of a book with {size:,} files and {segments:,} segments"
    yield Result(f"{name}, beside a bare copy, files/s", kind, size, files / seconds, files / bare, "files/s")
    yield Result(f"{name}, rows/s", kind, size, rows / seconds, None, "rows/s")
    say(f"moving: a rebuild from {size:,} files")
    bare, _ = timed(lambda: _read(warehouse))
    into = _new_place(ground, f"rebuilt_{size}")
    seconds, report = timed(lambda: lakebook.rebuild_book(warehouse, into))
    assert report.is_complete and len(report.topics) == _TOPICS, report.unknown
    name = f"rebuild of a book with {size:,} files and {segments:,} segments"
    yield Result(f"{name}, beside reading all, files/s", kind, size, files / seconds, files / bare, "files/s")
    yield Result(f"{name}, rows/s", kind, size, rows / seconds, None, "rows/s")


def _new_place(ground: Ground, name: str) -> str:
    return ground.new_database(name) if ground.kind == POSTGRESQL else str(ground.folder / name.replace("_", "-"))


def _read(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            xxhash.xxh3_64_hexdigest(path.read_bytes())


# --- filling ---------------------------------------------------------------------


def _fill(book: Book, size: int, say: Say) -> int:
    """Tables with so many files in several published versions, and topics; how many segments those have."""
    rows = pa.table({"id": pa.array(range(10), pa.int64()), "name": pa.array([f"name {n}" for n in range(10)])})
    tables, commits = min(_TABLES, size), min(_COMMITS, max(1, size // _TABLES // 2))
    each = max(1, size // tables // commits)
    for number in range(tables):
        table = book.tables.create(f"t{number}", rows.schema)
        table.insert_arrow(rows)
        table.publish()
        (first,) = table.plan().files
        data = book.lake.store.read(first.file_path)
        for commit in range(commits):
            say(f"moving: filling {size:,} files", (number * commits + commit) * each, size)
            table.add_files(_laid(book, f"in/{number}/{commit}", data, each))
            table.publish()
    topics = [f"topic{number}" for number in range(_TOPICS)]
    for name in topics:
        book.metadata.create_topic(name, _PARTITIONS)
    wanted = int(size * _SEGMENTS) // (_TOPICS * _PARTITIONS)
    for place, name in enumerate(topics):
        for partition in range(_PARTITIONS):
            done = place * _PARTITIONS + partition
            say(f"moving: filling {int(size * _SEGMENTS):,} segments", done * wanted, int(size * _SEGMENTS))
            _add_segments(book, name, partition, wanted)
    return wanted * _TOPICS * _PARTITIONS


def _laid(book: Book, folder: str, data: bytes, number: int) -> list[str]:
    """The same file under other names, not synced: nothing shall outlive this."""
    made = []
    for place in range(number):
        path = f"{folder}/{place}.parquet"
        _put(book, path, data)
        made.append(path)
    return made


def _put(book: Book, path: str, data: bytes) -> None:
    file = book.lake.store.local_path(path)
    assert file is not None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def _add_segments(book: Book, topic: str, partition: int, number: int) -> None:
    found = book.metadata.get_topic(topic)
    assert found is not None
    now = datetime.now(UTC)
    content = pa.table(
        [
            pa.array([now] * _RECORDS, TIMESTAMP),
            pa.nulls(_RECORDS, pa.binary()),
            pa.array([b"a value of some length"] * _RECORDS, pa.binary()),
            pa.nulls(_RECORDS, CONTENT_SCHEMA.field("headers").type),
        ],
        schema=CONTENT_SCHEMA,
    )
    some: list[SegmentInfo] = []
    for place in range(number):
        base = place * _RECORDS
        rows = stamped(content, partition, base)
        path = f"topics/{found.id}/{partition}/t1/{topic}-{partition}-{place:09d}.parquet"
        facts = {"topic_id": found.id, "partition": partition, "base_offset": base}
        data = encoded(rows, facts=facts)
        _put(book, path, data)
        file = described(path, rows, data)
        some.append(
            SegmentInfo(
                topic=topic,
                partition_id=partition,
                base_offset=base,
                end_offset=base + _RECORDS - 1,
                record_count=_RECORDS,
                size_bytes=file.size,
                s3_key=path,
                min_timestamp=file.min_timestamp,
                max_timestamp=file.max_timestamp,
                checksum=file.checksum,
            )
        )
    for start in range(0, number, _AT_ONCE):
        book.metadata.add_segments(some[start : start + _AT_ONCE])
