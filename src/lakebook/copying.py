"""Moving a whole book to another place: any registry, any warehouse, the source as it was.

    pin the source → the registry of one moment → the objects → what names them by address → verify → the book

The objects come before the registry: until all of them are there and were verified, there is no book. Whoever goes on
after a kill takes the newest state of the source, and of the objects only those that are missing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from lakebook import failpoints
from lakebook.book import Book, open_book, warehouse_of
from lakebook.clock import Clock, SystemClock
from lakebook.config import MEMORY, SQLITE_SCHEME, Settings, load_settings, redact
from lakebook.errors import (
    BookExists,
    CopyFailed,
    InvalidSetting,
    LeaseLost,
    ObjectNotFound,
    OffsetBelowLogStart,
    PartitionNotFound,
    TableNotFound,
    TopicNotFound,
    VersionExpired,
    VersionNotFound,
)
from lakebook.iceberg.relocation import Relocation
from lakebook.lake.leasing import acquire
from lakebook.lake.relocation import check_places, relocate_tables
from lakebook.pages import every
from lakebook.registry.backup_files import Header, backup_at
from lakebook.registry.databases import Database, SQLite, database_for
from lakebook.registry.inserts import unaccounted_paths
from lakebook.registry.leases import HORIZON
from lakebook.registry.lives import begin_life
from lakebook.registry.portable import Arrival, read_backup, refuse_book
from lakebook.registry.relocation import count_objects, leave_behind, note_checksums, plain_objects
from lakebook.registry.stream_folders import TOPICS, unknown_stream_paths
from lakebook.registry.table_files import chunks
from lakebook.registry.transactions import Reader, Transaction
from lakebook.storage.copying import Copied, KnownObject, copy_objects
from lakebook.storage.objects import WORKERS, ObjectStore
from lakebook.storage.warehouse import Warehouse
from lakebook.streams.pinning import Pin

#: Hears how much is done, of how much if that is known, and of what.
Progress: TypeAlias = Callable[[int, int | None, str], None]

# In a warehouse to which a copy is under way, until there is a book.
MARKER = "lakebook-copy.json"
_FORMAT = "lakebook-copy"
# How often a copy begins with a newer state of the source because something of the former is gone.
_ROUNDS = 5
_TOLD = 5
_NOTED_AT_ONCE = 1000
# What says that something of the source went while it was being pinned.
_GONE = (
    TableNotFound, TopicNotFound, PartitionNotFound, OffsetBelowLogStart, VersionExpired, VersionNotFound, LeaseLost,
)  # fmt: skip


@dataclass
class CopyReport:
    """What was copied."""

    book_id: str
    #: Where the new book is.
    registry: str
    warehouse: str
    #: Objects that the new book needs; their bytes; and how many of them were there already.
    objects: int = 0
    bytes: int = 0
    skipped: int = 0
    #: Objects that were written anew, because they name others by their addresses.
    rewritten: int = 0
    #: Rows of the registry, by table.
    rows: dict[str, int] = field(default_factory=dict)


class _Vanished(Exception):
    """Something that the copy speaks of is gone from the source."""


def copy_book(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    warehouse: str | os.PathLike[str] | None = None,
    workers: int = WORKERS,
    clock: Clock | None = None,
    progress: Progress = lambda done, total, step: None,
    **settings: Any,
) -> CopyReport:
    """Copy the book at `source` to `target`, where there is none; `warehouse` is where its bytes go.

    Writers of the source go on: the copy is its state of one moment. A copy that was interrupted is begun again with
    the same words, and goes on with the objects that are missing. The copy has an epoch of its own. Other settings are
    those of both books.
    """
    clock = clock or SystemClock()
    given = {"warehouse": None if warehouse is None else os.fspath(warehouse), **settings}
    resolved = load_settings(target, given)
    if resolved.registry == MEMORY:
        raise InvalidSetting("a book in memory would be gone at once", on=MEMORY, remedy="Name a folder or a URL")
    database = database_for(resolved)
    with open_book(source, clock=clock, create=False, **{**settings, "publish": "off"}) as book:
        if isinstance(database, SQLite) and database.path is not None:
            database.path.parent.mkdir(parents=True, exist_ok=True)
        # Two copies to one place would tidy up after each other.
        with database.migration_lock():
            return _Copy(book, resolved, database, workers, clock, progress, settings).run()


class _Copy:
    """One copy of a book."""

    def __init__(
        self,
        book: Book,
        settings: Settings,
        database: Database,
        workers: int,
        clock: Clock,
        progress: Progress,
        given: Mapping[str, Any],
    ) -> None:
        self._given = {**given, "publish": "off"}
        self._book = book
        self._database = database
        self._workers = workers
        self._clock = clock
        self._progress = progress
        self._warehouse = warehouse_of(settings, database)
        self._source = book.lake.store
        self._target = ObjectStore(self._warehouse)
        # Whether something may lie there that a former attempt has copied.
        self._left_over = False
        self._report = CopyReport(book.identity.book_id, database.shown, redact(self._warehouse.root))

    def run(self) -> CopyReport:
        _refuse_same(self._source, self._target)
        try:
            refuse_book(self._database)
        except BookExists:
            # It was killed when all was done.
            if self._marker() != self._report.book_id:
                raise
            self._target.delete_one(MARKER)
            return self._report
        self._warehouse.check_writable()
        self._mark()
        what = ""
        for _ in range(_ROUNDS):
            try:
                with tempfile.TemporaryDirectory(prefix="lakebook-copy-") as folder:
                    self._round(Path(folder))
            except _Vanished as gone:
                if what == str(gone):
                    raise CopyFailed(
                        "it does not exist", on=what, remedy="Run `lakebook verify` on the source"
                    ) from gone
                what, self._left_over = str(gone), True
                self._progress(0, None, f"the source has changed ({what}); again")
                continue
            failpoints.reach("copy.published")
            self._target.delete_one(MARKER)
            return self._report
        raise CopyFailed(
            f"something of the source was deleted each time it was copied, at last {what}",
            on=self._source.uri(),
            remedy="Pause its janitor (`lakebook maintenance pause janitor`), and copy again",
        )

    # --- the marker ----------------------------------------------------------------

    def _marker(self) -> str | None:
        """The id of the book whose copy to this place was begun."""
        try:
            said = orjson.loads(self._target.read(MARKER))
        except (ObjectNotFound, orjson.JSONDecodeError):
            return None
        return str(said.get("book_id")) if isinstance(said, dict) and said.get("format") == _FORMAT else None

    def _mark(self) -> None:
        """Say that this place is for a copy of this book, unless it has something else."""
        found = self._marker()
        if found == self._report.book_id:
            self._left_over = True
            return
        if found is not None or next(self._target.list(), None) is not None:
            what = "a copy of another book was begun there" if found is not None else "there is something already"
            raise CopyFailed(what, on=self._target.uri(), remedy="Name a warehouse with nothing in it")
        self._target.put_new(MARKER, orjson.dumps({"format": _FORMAT, "version": 1, "book_id": self._report.book_id}))

    # --- one round -----------------------------------------------------------------

    def _round(self, folder: Path) -> None:
        self._report = CopyReport(self._report.book_id, self._report.registry, self._report.warehouse)
        with ExitStack() as stack:
            try:
                pins = stack.enter_context(_pinned(self._book))
            except _GONE as error:
                raise _Vanished(str(error)) from error
            staged = stack.enter_context(self._staged(folder))
            registry, relocation = staged.lake.registry, Relocation(self._source, self._target)
            try:
                check_places(registry, relocation)
                self._copy_objects(staged, pins)
                written = relocate_tables(
                    registry, relocation, lambda path: self._progress(self._report.objects, None, path)
                )
            except (ObjectNotFound, LeaseLost) as error:
                raise _Vanished(error.on) from error
            self._report.rewritten = len(written)
            if self._left_over:
                self._remove_others(staged, written)
            self._verify(staged)
            staged.backup(folder / "moved")
        self._publish(folder / "moved")

    @contextmanager
    def _staged(self, folder: Path) -> Iterator[Book]:
        """The registry of this moment, as that of a book whose bytes are at the new place; nobody can find it."""
        self._book.backup(folder / "source", self._progress)
        place = f"{SQLITE_SCHEME}{folder}/registry.db"
        database = database_for(load_settings(place, {"warehouse": self._warehouse.root}))

        def begin(transaction: Transaction, header: Header) -> None:
            begin_life(transaction, header, Warehouse(self._warehouse.root, folder).recorded, held=False)
            leave_behind(transaction)

        read_backup(database, backup_at(folder / "source"), Arrival(begin), self._clock, self._progress)
        # What every commit and read of it would do is not wanted of what goes away again.
        given = {**self._given, "warehouse": self._warehouse.root}
        with open_book(place, clock=self._clock, create=False, **given) as book:
            yield book

    def _copy_objects(self, staged: Book, pins: Pin) -> None:
        registry = staged.lake.registry
        total = registry.read_with(count_objects)
        copied = Copied()
        with registry.snapshot() as reader:
            wanted = (KnownObject(*item) for item in plain_objects(reader))
            found: list[tuple[str, str]] = []
            for item, checksum in copy_objects(self._source, self._target, wanted, copied, self._workers):
                self._progress(copied.objects, total, item.path)
                if item.checksum is not None and not item.is_of_bytes:
                    # What the former store knew it by means nothing here.
                    found.append((item.path, checksum))
                if copied.objects % _NOTED_AT_ONCE == 0:
                    # It is renewed only while somebody says that it is used.
                    pins.check()
                    registry.write(partial(_note, found))
                    found = []
            registry.write(partial(_note, found))
        self._report.objects, self._report.bytes, self._report.skipped = copied.objects, copied.bytes, copied.skipped

    def _remove_others(self, staged: Book, written: set[str]) -> None:
        """Remove what a former round has copied and this one does not need."""
        registry = staged.lake.registry
        for items in chunks(self._target.list()):
            paths = [item.path for item in items if item.path not in written and item.path != MARKER]
            others = registry.read_with(lambda reader: _unknown(reader, paths))  # noqa: B023 - called at once
            for _, error in self._target.delete(others):
                raise error
            for path in others:
                self._target.remove_empty_folders(path)

    def _verify(self, staged: Book) -> None:
        found = staged.verify(lambda step: self._progress(self._report.objects, None, f"verifying {step}"))
        if found.ok:
            return
        told = "; ".join(f"{item.on}: {item.what}" for item in found.findings[:_TOLD])
        raise CopyFailed(
            f"the copy is not whole, {len(found.findings)} finding(s): {told}",
            on=self._target.uri(),
            remedy="Run `lakebook verify` on the source, mend what it finds, and copy again",
        )

    def _publish(self, file: Path) -> None:
        recorded = self._warehouse.recorded

        def begin(transaction: Transaction, header: Header) -> None:
            begin_life(transaction, header, recorded, held=False)

        def verified() -> None:
            failpoints.reach("copy.verified")

        arrival = Arrival(begin, verified)
        summary = read_backup(self._database, backup_at(file), arrival, self._clock, self._progress, locked=True)
        self._report.rows = summary.rows


def _refuse_same(source: ObjectStore, target: ObjectStore) -> None:
    here, there = f"{source.uri().rstrip('/')}/", f"{target.uri().rstrip('/')}/"
    if here.startswith(there) or there.startswith(here):
        raise InvalidSetting(
            "the new warehouse would be in the former, or the other way round",
            on=target.uri(),
            remedy="Name another warehouse",
        )


def _note(sums: list[tuple[str, str]], transaction: Transaction) -> None:
    note_checksums(transaction, sums)


def _unknown(reader: Reader, paths: list[str]) -> list[str]:
    streams = [path for path in paths if path.startswith(f"{TOPICS}/")]
    rest = [path for path in paths if not path.startswith(f"{TOPICS}/")]
    return [*unknown_stream_paths(reader, streams), *unaccounted_paths(reader, rest)]


@contextmanager
def _pinned(book: Book) -> Iterator[Pin]:
    """Pin every version of every table, and every record of every topic, while the block runs."""
    lake = book.lake
    with ExitStack() as stack:
        pin = stack.enter_context(Pin(lake))
        for space in every(lambda after: book.tables.list_namespaces(after=after)):
            for record in every(lambda after: book.tables.list(space.name, after=after)):  # noqa: B023 - used at once
                row = lake.registry.one(HORIZON, record.id)
                stack.enter_context(acquire(lake, record, None if row is None else int(row[0])))
        for topic in every(lambda after: book.metadata.list_topics(after=after)):
            partitions = every(lambda after: book.metadata.list_partitions(topic.name, after=after))  # noqa: B023
            pin.take(topic.name, {item.partition_id: item.log_start for item in partitions})
        yield pin
