"""Footers on their way between files, the registry and readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pyarrow.parquet import FileMetaData

from lakebook import failpoints
from lakebook.errors import CorruptFooter, FooterNotFound
from lakebook.lake.footers import footer_of_tail, open_footer, upgraded
from lakebook.lake.lake import Lake
from lakebook.registry import schema
from lakebook.registry.changes import row_of
from lakebook.registry.footers import (
    FORMAT_VERSION,
    StoredFooter,
    footer_sizes,
    insert_footers,
    load_footers,
    load_partition_metadata,
    replace_footer,
    sizes_of_version,
)
from lakebook.registry.table_checks import present_files
from lakebook.registry.table_files import CHUNK, PlannedFile, chunks, files_by_path
from lakebook.registry.tables import TABLE_ROW
from lakebook.registry.transactions import Transaction
from lakebook.storage.objects import ObjectStore

# Most footers are smaller, so that one request reads them.
_TAIL = 64 * 1024
_READERS = 8
# Bytes of stored footers that are in memory at once, unless one alone has more.
_LOADED_AT_ONCE = 32 * 1024**2


def read_footer(store: ObjectStore, path: str, size: int) -> bytes:
    """The footer of a Parquet file, from its end."""
    if size < 12:
        raise CorruptFooter("the file is too short to be a Parquet file", on=path)
    tail = store.read_range(path, max(0, size - _TAIL), min(size, _TAIL))
    place = footer_of_tail(tail[-8:], size, on=path)
    if place.length + 8 <= len(tail):
        return tail[-8 - place.length : -8]
    return store.read_range(path, place.offset, place.length)


def read_footers(store: ObjectStore, files: Sequence[tuple[str, int]]) -> list[bytes]:
    """The footers of files, by path and size, several at a time."""
    if len(files) == 1:
        return [read_footer(store, *files[0])]
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(lambda file: read_footer(store, *file), files))


@dataclass(frozen=True)
class Footer:
    """A stored footer in the form that readers take."""

    metadata: bytes
    num_rows: int

    def open(self, path: str) -> FileMetaData:
        """The footer as PyArrow has it."""
        return open_footer(self.metadata, on=path)


def footers_for(lake: Lake, files: Iterable[PlannedFile]) -> dict[str, Footer]:
    """The footers of files, from memory or from the registry in one query.

    One that is missing while its file exists is read from the file, and the registry is mended.
    """
    wanted = {file.file_path: file for file in files}
    found: dict[str, Footer] = {}
    for path, file in wanted.items():
        # By the checksum too: somebody else's path may have been used again since.
        kept = lake.footers.get((path, file.checksum))
        if kept is not None:
            found[path] = kept
    absent = [path for path in wanted if path not in found]
    if absent:
        stored = lake.registry.read_with(lambda reader: load_footers(reader, absent))
        for path in absent:
            file, record = wanted[path], stored.get(path)
            footer = (
                _usable(record, file.row_count)
                if record is not None
                else _mended(lake, path, file.file_size, file.row_count)
            )
            found[path] = lake.footers.put((path, file.checksum), footer)
    return found


def _usable(record: StoredFooter, rows: int) -> Footer:
    number = record.num_rows if record.num_rows is not None else rows
    return Footer(upgraded(record.metadata, record.partition_format_version, number, on=record.file_path), number)


def load_footer(lake: Lake, path: str, rows: int | None = None) -> Footer:
    """The footer of one file in one query; raises `FooterNotFound` when there is none."""
    record = lake.registry.read_with(lambda reader: load_partition_metadata(reader, path))
    if record.num_rows is None and rows is None:
        row = lake.registry.read_with(lambda reader: files_by_path(reader, [path])).get(path)
        if row is None:
            raise CorruptFooter("its row count is not known", on=path)
        rows = int(row["row_count"])
    return _usable(record, rows or 0)


def _mended(lake: Lake, path: str, size: int, rows: int) -> Footer:
    metadata = read_footer(lake.store, path, size)
    mend_footer(lake, path, metadata, rows, size)
    lake.metrics.count_repair("footer")
    return Footer(metadata, rows)


def mend_footer(lake: Lake, path: str, metadata: bytes, rows: int, size: int) -> None:
    """Store a footer that was lost, if its file still has a row and nobody was faster."""

    def work(transaction: Transaction) -> None:
        row = files_by_path(transaction, [path]).get(path)
        table = transaction.one(TABLE_ROW, row["table_id"]) if row is not None else None
        if table is None:
            return
        # Under the table's lock, so that no cleaner can forget the file meanwhile.
        transaction.lock(row_of(schema.tables, table)["object_id"])
        row = files_by_path(transaction, [path]).get(path)
        if row is None or path not in present_files(transaction, [path]):
            return
        try:
            load_partition_metadata(transaction, path)
        except FooterNotFound:
            if row["row_count"] == rows and row["file_size"] == size:
                insert_footers(transaction, [(path, metadata, rows, size)])

    lake.registry.write(work)


def stored_footers(lake: Lake, paths: Iterable[str]) -> Iterator[StoredFooter]:
    """The footers that files have in the registry, one after the other, in bounded memory."""
    for chunk in chunks(paths):
        yield from _loaded(lake, lake.registry.read_with(lambda reader: footer_sizes(reader, chunk)))  # noqa: B023


def _loaded(lake: Lake, sizes: Sequence[tuple[str, int]]) -> Iterator[StoredFooter]:
    """Footers by path and size, in the order given; as many at a time as are not too large together."""
    for part in _parts(sizes):
        found = lake.registry.read_with(lambda reader: load_footers(reader, part))  # noqa: B023 - called at once
        for path in part:
            # One that has gone since belongs to nobody any more. None is held for longer than it is used.
            record = found.pop(path, None)
            if record is not None:
                yield record
            del record


def _parts(sizes: Sequence[tuple[str, int]]) -> Iterator[list[str]]:
    held: list[str] = []
    total = 0
    for path, size in sizes:
        if held and total + size > _LOADED_AT_ONCE:
            yield held
            held, total = [], 0
        held.append(path)
        total += size
    if held:
        yield held


def upgrade_footers(lake: Lake, progress: Callable[[int], None] = lambda done: None) -> tuple[int, list[str]]:
    """Turn all footers of format version 1 into version 2; how many, and the paths of those that are broken.

    It can be stopped and run again at any time.
    """
    done, broken, after = 0, list[str](), ""
    while True:
        start = after
        page = lake.registry.read_with(lambda reader: sizes_of_version(reader, 1, start, CHUNK))  # noqa: B023 - called at once
        if not page:
            return done, broken
        after = page[-1][0]
        rows = lake.registry.read_with(lambda reader: files_by_path(reader, [path for path, _ in page]))  # noqa: B023
        for record in _loaded(lake, page):
            if _upgrade(lake, record, rows.get(record.file_path, {}).get("row_count")):
                done += 1
                failpoints.reach("footers.upgraded")
            else:
                broken.append(record.file_path)
            progress(done)


def _upgrade(lake: Lake, record: StoredFooter, rows: int | None) -> bool:
    number = record.num_rows if record.num_rows is not None else rows
    if number is None:
        return False
    try:
        metadata = upgraded(record.metadata, 1, number, on=record.file_path)
    except CorruptFooter:
        return False
    lake.registry.write(
        lambda transaction: replace_footer(transaction, record.file_path, 1, metadata, FORMAT_VERSION, number)
    )
    return True
