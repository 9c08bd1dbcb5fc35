"""Moving a whole book to another place: any registry, any warehouse, the source as it was.

    pin the source → the registry of one moment → the objects → what names them by address → verify → the book

The objects come before the registry: until all of them are there and were verified, there is no book. Whoever goes on
after a kill takes the newest state of the source, and of the objects only those that are missing.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from lakebook import failpoints
from lakebook.book import Book, open_book, open_with, warehouse_of
from lakebook.clock import Clock, SystemClock
from lakebook.config import MEMORY, SQLITE_SCHEME, Settings, load_settings, redact
from lakebook.errors import (
    BookExists,
    CopyFailed,
    InvalidInput,
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
from lakebook.iceberg.publishing import ICEBERG
from lakebook.iceberg.relocation import Relocation
from lakebook.lake.attempts import DATA
from lakebook.lake.leasing import acquire
from lakebook.lake.relocation import check_places, relocate_tables
from lakebook.pages import PAGE_SIZE, every
from lakebook.recovery.checkpoints import list_checkpoints
from lakebook.registry.backup_files import Header, backup_at
from lakebook.registry.databases import Database, database_for
from lakebook.registry.epoch import recorded_warehouse
from lakebook.registry.inserts import unaccounted_paths
from lakebook.registry.leases import HORIZON
from lakebook.registry.lives import begin_life
from lakebook.registry.pipelines import lease_of
from lakebook.registry.portable import Arrival, read_backup, refuse_book, write_backup
from lakebook.registry.relocation import (
    count_objects,
    forget_removed,
    leave_behind,
    note_checksums,
    plain_objects,
    published_at,
)
from lakebook.registry.retention import oldest_segments
from lakebook.registry.stream_folders import TOPICS, unknown_stream_paths
from lakebook.registry.table_files import chunks
from lakebook.registry.tables import TableRecord
from lakebook.registry.topic_leases import pinned_places
from lakebook.registry.transactions import Reader, Transaction
from lakebook.storage.copying import Copied, Journal, KnownObject, copy_objects, differing
from lakebook.storage.objects import WORKERS, ObjectStore
from lakebook.storage.warehouse import Warehouse
from lakebook.streams.pinning import Pin
from lakebook.streams.retention import remove_below_log_start

#: Hears how much is done, of how much if that is known, and of what.
Progress: TypeAlias = Callable[[int, int | None, str], None]

# In a warehouse to which a copy is under way, until there is a book.
MARKER = "lakebook-copy.json"
# Beside it: what the attempts have found out about the bytes they copied.
_JOURNAL = "lakebook-copy"
_FORMAT = "lakebook-copy"
# Where a book lays its bytes. Below a folder of such a name somebody else may have a book.
_FOLDERS = (DATA, ICEBERG, TOPICS)
_OWN = re.compile(rf"(?:{DATA}|{TOPICS})/\d+/.|{ICEBERG}/[0-9a-f-]{{32,36}}/.", re.ASCII)
# How often a copy begins with a newer state of the source because something of the former is gone.
_ROUNDS = 5
_TOLD = 5
_ELSEWHERE = "Name a warehouse with nothing in it"
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
    #: Whether a former run had copied and verified everything, and only its marks were left to remove.
    done_before: bool = False


@dataclass(frozen=True)
class _Mark:
    """Whose copy a warehouse is for, and to which registry that goes; older releases have not said the latter."""

    book_id: str
    registry: str | None


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
    those of both books. Both are where they are named: what the environment says about a registry and a warehouse does
    not count.
    """
    clock = clock or SystemClock()
    if workers < 1:
        raise InvalidInput(f"{workers} objects cannot be copied at once", on="workers", remedy="At least 1")
    given = {"warehouse": None if warehouse is None else os.fspath(warehouse), **settings}
    resolved = load_settings(target, given, named=True)
    if resolved.registry == MEMORY:
        raise InvalidSetting("a book in memory would be gone at once", on=MEMORY, remedy="Name a folder or a URL")
    database = database_for(resolved)
    theirs = load_settings(source, {**settings, "publish": "off"}, named=True)
    with open_with(theirs, clock=clock, create=False) as book:
        database.make_folder()
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
        # The file in the folder of the new book may say how its bucket is reached.
        reached = {item.name: getattr(settings, item.name) for item in fields(settings) if item.name.startswith("s3_")}
        self._given = {**given, **reached, "publish": "off"}
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
        self._registry = database.place()
        # Folders that outside engines have chosen for tables.
        self._chosen: tuple[str, ...] = ()
        self._report = CopyReport(book.identity.book_id, database.shown, redact(self._warehouse.root))

    def run(self) -> CopyReport:
        _refuse_same(self._source, self._target)
        try:
            refuse_book(self._database)
        except BookExists:
            # It was killed when all was done. A marker of a copy to another registry is not this one's to remove.
            found = self._marker()
            if (
                found is None
                or found.book_id != self._report.book_id
                or (
                    found.registry not in (None, self._registry)
                    or recorded_warehouse(self._database) != self._warehouse.recorded
                )
            ):
                raise
            self._remove_marks()
            self._report.done_before = True
            return self._report
        self._warehouse.check_writable()
        self._mark()
        self._note_chosen()
        # Of one that was killed. Nobody else writes there, and nobody would end them.
        self._end_uploads()
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
            self._remove_marks()
            return self._report
        raise CopyFailed(
            f"something of the source was deleted each time it was copied, at last {what}",
            on=self._source.uri(),
            remedy="Pause its janitor (`lakebook maintenance pause janitor`), and copy again",
        )

    # --- the marker ----------------------------------------------------------------

    def _marker(self) -> _Mark | None:
        """Which copy to this place was begun."""
        try:
            said = orjson.loads(self._target.read(MARKER))
        except (ObjectNotFound, orjson.JSONDecodeError):
            return None
        if not isinstance(said, dict) or said.get("format") != _FORMAT:
            return None
        registry = said.get("registry")
        return _Mark(str(said.get("book_id")), None if registry is None else str(registry))

    def _mark(self) -> None:
        """Say that this place is for a copy of this book, unless it has something else."""
        found, wanted = self._marker(), _Mark(self._report.book_id, self._registry)
        if found is not None:
            self._refuse_other(found, wanted)
            self._left_over = True
            return
        if next(self._target.list(), None) is not None:
            raise CopyFailed("there is something already", on=self._target.uri(), remedy=_ELSEWHERE)
        said = {"format": _FORMAT, "version": 2, "book_id": wanted.book_id, "registry": wanted.registry}
        self._target.put_new(MARKER, orjson.dumps(said))

    def _refuse_other(self, found: _Mark, wanted: _Mark) -> None:
        """Refuse a warehouse that may be a living book's: what the source does not know would be deleted there."""
        what, remedy = "", _ELSEWHERE
        if found.book_id != wanted.book_id:
            what = "a copy of another book was begun there"
        elif found.registry is None:
            what = "a copy was begun there by an older release, which has not said to which registry"
            remedy = f"{_ELSEWHERE}; or empty this one, if there is no book that has its bytes there"
        elif found.registry != wanted.registry:
            what = f"a copy to another registry ({found.registry}) was begun there, where there may be a book by now"
            remedy = f"{_ELSEWHERE}, or the registry to which that copy goes"
        elif list_checkpoints(self._target):
            what = "a book has written checkpoints there, whose registry is gone"
            remedy = f"{_ELSEWHERE}; `lakebook rebuild` brings back the book that is there"
        if what:
            raise CopyFailed(what, on=self._target.uri(), remedy=remedy)

    def _remove_marks(self) -> None:
        # The marker last: without it nobody would come back for the rest.
        self._target.delete_folder(_JOURNAL)
        self._target.delete_one(MARKER)

    # --- what a copy may tidy up ---------------------------------------------------

    def _note_chosen(self) -> None:
        self._chosen = self._book.lake.registry.in_snapshot(
            lambda reader: tuple(place for place in published_at(reader) if not _OWN.match(f"{place}/_"))
        )

    def _is_own(self, path: str) -> bool:
        """Whether an object lies where only this book lays some: in a bucket others may have books beside it."""
        return _OWN.match(path) is not None or path.startswith(tuple(f"{place}/" for place in self._chosen))

    def _end_uploads(self) -> None:
        self._target.end_uploads(of=lambda path: _is_mark(path) or self._is_own(path))

    # --- one round -----------------------------------------------------------------

    def _round(self, folder: Path) -> None:
        self._report = CopyReport(self._report.book_id, self._report.registry, self._report.warehouse)
        journal = Journal(self._target, _JOURNAL)
        with ExitStack() as stack:
            pins = _Pins(self._book, stack)
            try:
                pins.take()
                self._back_up(folder)
                # Also what was made between the two.
                pins.take()
            except _GONE as error:
                raise _Vanished(str(error)) from error
            staged = stack.enter_context(self._staged(folder))
            registry, relocation = staged.lake.registry, Relocation(self._source, self._target)
            try:
                check_places(registry, relocation)
                self._copy_objects(staged, pins, journal)
                written = relocate_tables(
                    registry, relocation, lambda path: self._progress(self._report.objects, None, path)
                )
            except (ObjectNotFound, LeaseLost) as error:
                raise _Vanished(error.on) from error
            self._report.rewritten = len(written)
            if self._left_over:
                self._remove_others(staged, written)
            # Those of which this process could not say whether they were begun, or that it could not end.
            self._end_uploads()
            self._verify(staged, journal)
            write_backup(registry, folder / "moved", self._warehouse.root)
        self._publish(folder / "moved")

    def _back_up(self, folder: Path) -> None:
        write_backup(self._book.lake.registry, folder / "source", self._book.warehouse.root, self._progress)

    @contextmanager
    def _staged(self, folder: Path) -> Iterator[Book]:
        """The registry of this moment, as that of a book whose bytes are at the new place; nobody can find it."""
        place = f"{SQLITE_SCHEME}{folder}/registry.db"
        database = database_for(load_settings(place, {"warehouse": self._warehouse.root}))

        def begin(transaction: Transaction, header: Header) -> None:
            begin_life(transaction, header, Warehouse(self._warehouse.root, folder).recorded, held=False)
            leave_behind(transaction)

        read_backup(database, backup_at(folder / "source"), Arrival(begin), self._clock, self._progress)
        # What every commit and read of it would do is not wanted of what goes away again.
        given = {**self._given, "warehouse": self._warehouse.root}
        with open_book(place, clock=self._clock, create=False, **given) as book:
            _remove_hidden(book)
            yield book

    def _copy_objects(self, staged: Book, pins: _Pins, journal: Journal) -> None:
        registry = staged.lake.registry
        total = registry.read_with(count_objects)
        copied = Copied()
        with registry.snapshot() as reader, journal:
            wanted = (KnownObject(*item) for item in plain_objects(reader))
            found: list[tuple[str, str]] = []
            for item, checksum in copy_objects(self._source, self._target, wanted, copied, journal, self._workers):
                self._progress(copied.objects, total, item.path)
                if item.checksum is not None and not item.is_of_bytes:
                    # What the former store knew it by means nothing here.
                    found.append((item.path, checksum))
                if copied.objects % _NOTED_AT_ONCE == 0:
                    pins.check()
                    registry.write(partial(_note, found))
                    found = []
            registry.write(partial(_note, found))
        self._report.objects, self._report.bytes, self._report.skipped = copied.objects, copied.bytes, copied.skipped

    def _remove_others(self, staged: Book, written: set[str]) -> None:
        """Remove what a former round has copied and this one does not need."""
        registry = staged.lake.registry
        found = (item.path for folder in (*_FOLDERS, *self._chosen) for item in self._target.list(folder))
        for some in chunks(found):
            paths = [path for path in some if path not in written and self._is_own(path)]
            others = registry.read_with(lambda reader: _unknown(reader, paths))  # noqa: B023 - called at once
            for _, error in self._target.delete(others):
                raise error
            for path in others:
                self._target.remove_empty_folders(path)

    def _verify(self, staged: Book, journal: Journal) -> None:
        found = staged.verify(lambda step: self._progress(self._report.objects, None, f"verifying {step}"))
        wrong = [f"{item.on}: {item.what}" for item in found.findings]
        with staged.lake.registry.snapshot() as reader:
            # Of these no row has a checksum by which it could be verified.
            rest = (KnownObject(*item) for item in plain_objects(reader) if item[2] is None)
            other = differing(self._target, rest, journal, self._workers)
            wrong += [f"{path}: its bytes are not those that were copied" for path in other]
        if not wrong:
            return
        raise CopyFailed(
            f"the copy is not whole, {len(wrong)} finding(s): {'; '.join(wrong[:_TOLD])}",
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


def _is_mark(path: str) -> bool:
    return path == MARKER or path.startswith(f"{_JOURNAL}/")


def _note(sums: list[tuple[str, str]], transaction: Transaction) -> None:
    note_checksums(transaction, sums)


def _unknown(reader: Reader, paths: list[str]) -> list[str]:
    streams = [path for path in paths if path.startswith(f"{TOPICS}/")]
    rest = [path for path in paths if not path.startswith(f"{TOPICS}/")]
    return [*unknown_stream_paths(reader, streams), *unaccounted_paths(reader, rest)]


def _remove_hidden(book: Book) -> None:
    """Remove deleted topics, dropped tables, and segments below the log start that no pipeline needs.

    The source may do so at any time, and holds none of them for a copy.
    """
    registry = book.lake.registry
    while book.metadata.purge_deleted_topics():
        pass
    for topic in every(lambda after: book.metadata.list_topics(after=after)):
        last = -1
        while page := registry.read_with(lambda reader: oldest_segments(reader, topic.id, last, PAGE_SIZE)):  # noqa: B023
            for oldest in page:
                if oldest.is_removable:
                    remove_below_log_start(book.lake, topic.name, topic.id, oldest.partition_id)
            last = page[-1].partition_id
    book.cleaner.empty_dropped()
    registry.write(forget_removed)


class _Pins:
    """Pins every version of every table, every record of every topic, and what pipelines pin, until it is closed."""

    def __init__(self, book: Book, stack: ExitStack) -> None:
        self._book = book
        self._stack = stack
        self._of_topics: list[Pin] = []
        self._known: set[tuple[str, int]] = set()

    def take(self) -> None:
        """Pin what is there and is not pinned yet."""
        book = self._book
        for space in every(lambda after: book.tables.list_namespaces(after=after)):
            for record in every(lambda after: book.tables.list(space.name, after=after)):  # noqa: B023 - used at once
                if self._is_new("table", record.id):
                    self._take_table(record)
        for topic in every(lambda after: book.metadata.list_topics(after=after)):
            if self._is_new("topic", topic.id):
                self._take_topic(topic.id, topic.name)

    def _take_table(self, record: TableRecord) -> None:
        lake = self._book.lake
        former = None
        while True:
            row = lake.registry.one(HORIZON, record.id)
            try:
                self._stack.enter_context(acquire(lake, record, None if row is None else int(row[0])))
                return
            except VersionExpired:
                # Its oldest versions have ended since they were looked up.
                if row == former:
                    raise
                former = row

    def _is_new(self, kind: str, ident: int) -> bool:
        known = (kind, ident) in self._known
        self._known.add((kind, ident))
        return not known

    def _take_topic(self, topic_id: int, name: str) -> None:
        book, registry = self._book, self._book.lake.registry
        partitions = every(lambda after: book.metadata.list_partitions(name, after=after))
        starts = {item.partition_id: item.log_start for item in partitions}
        self._pin(None).take(name, starts)
        # Below the log start, only who has a lease on it can give one.
        for pipeline in book.pipelines:
            lease = lease_of(pipeline.listed.id)
            held = registry.read_with(lambda reader: pinned_places(reader, lease))  # noqa: B023 - called at once
            hidden = {
                number: offset
                for (of_topic, number), offset in held.items()
                if of_topic == topic_id and offset < starts.get(number, 0)
            }
            if hidden:
                self._pin(lease).take(name, hidden)

    def _pin(self, inherit: str | None) -> Pin:
        if inherit is None and self._of_topics:
            return self._of_topics[0]
        self._of_topics.append(self._stack.enter_context(Pin(self._book.lake, inherit)))
        return self._of_topics[-1]

    def check(self) -> None:
        """Say that it is still needed: it is renewed only while somebody does."""
        for pin in self._of_topics:
            pin.check()
