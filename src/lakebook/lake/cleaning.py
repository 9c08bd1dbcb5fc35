"""Expiring history, deleting retired files, and sweeping what crashed inserts left."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from lakebook import failpoints
from lakebook.clock import Enough, never, to_datetime, to_ms
from lakebook.errors import CommitNotFound, InvalidTable, LakebookError, TableNotFound
from lakebook.iceberg.publishing import ICEBERG
from lakebook.lake.attempts import discard
from lakebook.lake.lake import Lake
from lakebook.lake.leasing import READS
from lakebook.lake.properties import history_policy
from lakebook.names import shown
from lakebook.registry.holding import refuse_while_held, restored
from lakebook.registry.inserts import (
    FORGET_INSERT,
    NOTE_SWEPT,
    UnsweptInsert,
    known_paths,
    unaccounted_paths,
    unswept_inserts,
)
from lakebook.registry.leases import LeaseRecord, end_dead_leases, list_leases
from lakebook.registry.publishing import Pointer, pointer_of, snapshots_of
from lakebook.registry.retirement import (
    OLD_TOMBSTONE,
    Grace,
    Retired,
    claim_abandoned,
    expire_versions,
    expired_files,
    forget_files,
    forget_tombstones,
    mark_deleting,
    oldest_needed_version,
    retirable,
    still_deleting,
)
from lakebook.registry.table_files import CHUNK, chunks
from lakebook.registry.tables import (
    EVERY_TABLE,
    GET_METADATA,
    GET_TABLE_BY_ID,
    TableRecord,
    metadata_from,
    table_from,
)
from lakebook.registry.topic_leases import TopicLease, end_dead_topic_leases, list_topic_leases
from lakebook.registry.transactions import Reader, Transaction
from lakebook.storage.answers import ObjectInfo

MAIN = "main"

#: What is watched; all have an id, and a time at which they run out.
Watched = TypeVar("Watched", LeaseRecord, TopicLease)

# Beyond this the clock was set, or the machine slept.
_JUMP = 2.0
# Seconds for which a sweep that was stopped may go on with its listing.
_LISTING_KEPT = 3600.0


@dataclass
class Cleaned:
    """What a clean-up did, or would do."""

    dry_run: bool = False
    files: int = 0
    bytes: int = 0
    #: Files that leases keep.
    pinned: int = 0
    #: Leases that had run out and were removed.
    dead_leases: int = 0
    #: What could not be deleted, and why. It is tried again by the next clean-up.
    failed: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Expired:
    """What an expiry of history did, or would do."""

    dry_run: bool = False
    tables: int = 0
    files: int = 0
    bytes: int = 0
    min_readable: dict[str, int] = field(default_factory=dict)
    #: Tables that could not be published, and why: what their snapshots list is not retired.
    failed: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Swept:
    """What a sweep did, or would do."""

    dry_run: bool = False
    #: Inserts that had gone silent and were fenced.
    fenced: int = 0
    #: Objects that do not count and were removed.
    objects: int = 0
    #: Inserts whose folders are quiet.
    settled: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


class _Watch(Generic[Watched]):
    """Tells dead leases from those whose renewal could not be seen.

    A lease is dead only when it has run out and stood still for a whole lease time while this
    process was watching. After the start, a jump of the clock or a long wait the watch begins anew.
    """

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._seen: dict[str, tuple[Any, float]] = {}
        self._wall, self._tick = lake.clock.now_ms(), lake.clock.monotonic()

    def look(self) -> tuple[list[Watched], list[Watched]]:
        """Dead leases, and those that have run out but may yet be renewed."""
        clock = self._lake.clock
        wall, before = clock.now_ms(), clock.monotonic()
        passed = before - self._tick
        if abs((wall - self._wall) / 1000 - passed) > _JUMP or passed > self._lake.settings.lease_seconds:
            self._seen.clear()
        self._wall, self._tick = wall, before
        out = [lease for lease in self.every() if to_ms(lease.expires_at) <= wall]
        after = clock.monotonic()  # The time of the reading itself was no watching.
        self._seen = {
            lease.id: self._seen[lease.id]
            if lease.id in self._seen and self._seen[lease.id][0] == lease.expires_at
            else (lease.expires_at, after)
            for lease in out
        }
        dead = [lease for lease in out if before - self._seen[lease.id][1] >= self._lake.settings.lease_seconds]
        gone = {lease.id for lease in dead}
        return dead, [lease for lease in out if lease.id not in gone]

    def wait(self, progress: Callable[[str], None]) -> list[Watched]:
        """Dead leases, after waiting for those that have run out and may yet be renewed."""
        pause = self._lake.settings.lease_seconds / 4
        first: dict[str, Any] = {}
        while True:
            dead, doubtful = self.look()
            # One that was renewed meanwhile is alive, though its clock is behind this one.
            doubtful = [lease for lease in doubtful if first.setdefault(lease.id, lease.expires_at) == lease.expires_at]
            if not doubtful:
                return dead
            progress(f"waiting for {len(doubtful)} leases that have run out")
            self._lake.clock.sleep(pause)

    @abstractmethod
    def every(self) -> list[Watched]:
        """All leases there are."""


class LeaseWatch(_Watch[LeaseRecord]):
    """Watches readers of tables."""

    def every(self) -> list[LeaseRecord]:
        """All leases there are."""
        found: list[LeaseRecord] = []
        after = ""
        while True:
            start = after
            page = self._lake.registry.read_with(lambda reader: list_leases(reader, start, CHUNK))  # noqa: B023
            found += page
            if len(page) < CHUNK:
                return found
            after = page[-1].id


class TopicLeaseWatch(_Watch[TopicLease]):
    """Watches readers of topics."""

    def every(self) -> list[TopicLease]:
        """All leases there are, each once, however many partitions it pins."""
        found: dict[str, TopicLease] = {}
        after = ("", -1, -1)
        while True:
            start = after
            page = self._lake.registry.read_with(lambda reader: list_topic_leases(reader, start, CHUNK))  # noqa: B023
            found |= {lease.id: lease for lease in page}
            if len(page) < CHUNK:
                return list(found.values())
            after = (page[-1].id, page[-1].topic_id, page[-1].partition_id)


class Cleaner:
    """Removes what is retired, never what is in use."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._watch = LeaseWatch(lake)
        self._topic_watch = TopicLeaseWatch(lake)
        # Where it has stopped, because it was enough, and goes on the next time.
        self._next_file = self._next_insert = ""
        self._listing: tuple[Iterator[list[ObjectInfo]], float] | None = None

    def _refuse_while_held(self, dry_run: bool) -> None:
        if not dry_run:
            refuse_while_held(self._lake.registry)

    # --- history -------------------------------------------------------------------

    def expire(
        self,
        table: TableRecord | None = None,
        *,
        dry_run: bool = False,
        wait: bool = False,
        seconds: float | None = None,
        versions: int | None = None,
        progress: Callable[[str], None] = lambda step: None,
    ) -> Expired:
        """End the history of a table, or of all, that its policy no longer keeps."""
        self._refuse_while_held(dry_run)
        dead = self._dead(wait and not dry_run, progress)
        result = Expired(dry_run)
        if dead and not dry_run:
            # At once: the publisher keeps the snapshots that any lease pins.
            self._lake.registry.write(lambda transaction: end_dead_leases(transaction, dead))
        for table_id, object_id, dropped in self._tables(table):
            result.tables += 1
            since, least = self._policy(table_id, dropped, seconds, versions)
            if dry_run:
                self._preview(table_id, since, least, dropped, result)
                continue
            if not dropped:
                self._unlist(table_id, since, least, result)
            while True:
                done = self._expire_some(table_id, object_id, since, least, dead)
                result.files += done.files
                result.bytes += done.size
                result.min_readable[str(table_id)] = done.min_readable
                progress(f"table {table_id}: {result.files} files retired")
                if not done.more:
                    break
        return result

    def _expire_some(self, table_id: int, object_id: int, since: int, least: int, dead: list[LeaseRecord]) -> Retired:
        settings = self._lake.settings
        grace = Grace(settings.temporary_file_grace, settings.published_grace)
        return self._lake.registry.write(
            lambda transaction: expire_versions(transaction, table_id, object_id, since, least, grace, dead)
        )

    def _unlist(self, table_id: int, since: int, versions: int, result: Expired) -> None:
        """Take snapshots of versions that are not kept out of the metadata of a table, if it is published.

        Only what no snapshot lists can be retired. If this fails, the expiry retires less.
        """
        lake = self._lake
        found = lake.registry.in_snapshot(lambda reader: _published(reader, table_id, since, versions))
        if found is None:
            return
        table, _, needed = found
        try:
            lake.publisher.publish(table, drop_below=needed)
        except TableNotFound:
            pass  # It was dropped meanwhile: the expiry sees that too.
        except LakebookError as error:
            result.failed.append((table.shown, str(error)))

    def _tables(self, table: TableRecord | None) -> list[tuple[int, int, bool]]:
        if table is not None:
            return [(table.id, table.object_id, False)]
        found: list[tuple[int, int, bool]] = []
        while True:
            after = found[-1][0] if found else 0
            page = self._lake.registry.all(EVERY_TABLE, after, CHUNK)
            found += [(row[0], row[1], row[2] is not None) for row in page]
            if len(page) < CHUNK:
                return found

    def _policy(self, table_id: int, dropped: bool, seconds: float | None, versions: int | None) -> tuple[int, int]:
        now = self._lake.clock.now_ms()
        if dropped:
            return now, 1
        properties = self._lake.registry.read_with(lambda reader: _properties(reader, table_id))
        kept_seconds, kept_versions = history_policy(self._lake, properties)
        kept_seconds = kept_seconds if seconds is None else seconds
        kept_versions = kept_versions if versions is None else versions
        if not 0 <= kept_seconds < 10**11 or not 1 <= kept_versions < 10**12:
            raise InvalidTable(
                f"{shown(kept_seconds)} seconds and {shown(kept_versions)} versions are no history",
                on=f"table {table_id}",
                remedy="Keep at least one version, for 0 seconds or more",
            )
        return now - round(kept_seconds * 1000), kept_versions

    def _preview(self, table_id: int, since: int, versions: int, dropped: bool, result: Expired) -> None:
        lake = self._lake
        leaving = self._leaving(table_id, since, versions, result)
        found = lake.registry.in_snapshot(
            lambda reader: retirable(reader, table_id, since, versions, dropped=dropped, leaving=leaving)
        )
        result.files += found[0]
        result.bytes += found[1]
        result.min_readable[str(table_id)] = found[2]

    def _leaving(self, table_id: int, since: int, versions: int, result: Expired) -> list[int]:
        """The snapshots that would leave the metadata."""
        lake = self._lake

        def read(reader: Reader) -> tuple[Any, Any]:
            found = _published(reader, table_id, since, versions)
            return found, snapshots_of(reader, table_id) if found is not None else []

        found, rows = lake.registry.in_snapshot(read)
        if found is None:
            return []
        table, pointer, needed = found
        try:
            metadata = lake.publisher.load(pointer)
        except LakebookError as error:
            result.failed.append((table.shown, str(error)))
            return []
        # The branch `main` would move on, if a file of its snapshot has ended since.
        named = {ref.snapshot_id for name, ref in metadata.refs.items() if name != MAIN}
        # Of a branch or a tag, all that leads to it stays.
        above = {item.snapshot_id: item.parent_snapshot_id for item in metadata.snapshots}
        reached: set[int | None] = {None}
        for at in {ref.snapshot_id for ref in metadata.refs.values()}:
            ident: int | None = at
            while ident not in reached:
                reached.add(ident)
                ident = above.get(ident) if ident is not None else None
        return [
            row.snapshot_id
            for row in rows
            if row.pinned_version < needed and row.snapshot_id not in (named if row.version is not None else reached)
        ]

    # --- files ---------------------------------------------------------------------

    def delete_expired_temporary_files(
        self,
        *,
        dry_run: bool = False,
        wait: bool = True,
        progress: Callable[[str], None] = lambda step: None,
        enough: Enough = never,
    ) -> Cleaned:
        """Delete files whose grace has passed and which no lease needs, in batches.

        Deleting what is already gone is fine. What storage refuses stays for the next run. `enough` is asked
        after each batch whether to stop; this cleaner's next run goes on from there.
        """
        self._refuse_while_held(dry_run)
        result = Cleaned(dry_run)
        dead = self._dead(wait and not dry_run, progress)
        now = self._lake.clock.now_ms()
        after = "" if enough is never else self._next_file
        self._next_file = ""
        while True:
            start = after
            page = self._lake.registry.read_with(lambda reader: expired_files(reader, now, start, CHUNK))  # noqa: B023
            if not page:
                break
            after = page[-1][0]
            self._delete_batch([path for path, _, _ in page], {path: size for path, size, _ in page}, dead, result)
            progress(f"{result.files} files deleted")
            if enough():
                self._next_file = after
                break
        result.dead_leases = len(dead)
        if not dry_run:
            self._end_leases(dead)
            result.dead_leases += self._end_topic_leases(wait, progress)
            self._forget_tombstones()
            self._remove_read_folders()
            # A dropped table whose last file has gone now can go as well.
            for table_id, object_id, dropped in self._tables(None):
                if dropped:
                    self._expire_some(table_id, object_id, now, 1, dead)
        return result

    def _delete_batch(self, paths: list[str], sizes: dict[str, int], dead: list[LeaseRecord], result: Cleaned) -> None:
        lake = self._lake

        def mark(transaction: Transaction) -> Any:
            return mark_deleting(transaction, paths, dead, dry_run=result.dry_run)

        marked = lake.registry.write(mark)
        result.pinned += marked.pinned
        if result.dry_run:
            result.files += len(marked.paths)
            result.bytes += sum(sizes[path] for path in marked.paths)
            return
        gone, failed = self._delete_marked(list(marked.paths))
        result.files += len(gone)
        result.bytes += sum(sizes[path] for path in gone)
        result.failed += failed

    def _delete_marked(self, marked: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
        """Delete objects that are marked, and then their rows; which are gone, and what could not be deleted."""
        lake = self._lake
        failpoints.reach("clean.marked")
        # Asked again: another cleaner may have dealt with them while this one was slow.
        paths = lake.registry.read_with(lambda reader: still_deleting(reader, marked))
        failed = dict(lake.store.delete(paths))
        failpoints.reach("clean.object_deleted")
        gone = [path for path in paths if path not in failed]
        if gone:
            lake.registry.write(lambda transaction: forget_files(transaction, gone))
        failpoints.reach("clean.forgotten")
        for path in gone:
            lake.store.remove_empty_folders(path)
        return gone, [(path, str(error)) for path, error in failed.items()]

    def _forget_tombstones(self) -> None:
        """Let paths be used again whose files were deleted long enough ago."""
        registry, now = self._lake.registry, self._lake.clock.now_ms()
        # Only then is it worth to wait for other writers.
        while registry.one(OLD_TOMBSTONE, now) is not None:
            if registry.write(lambda transaction: forget_tombstones(transaction, CHUNK)) == 0:
                return

    def empty_dropped(self, enough: Enough = never) -> int:
        """Hand over the files of dropped tables, and forget tables that have none left; how many files."""
        self._refuse_while_held(False)
        now, files = self._lake.clock.now_ms(), 0
        dead = self._dead(False, lambda step: None)
        for table_id, object_id, dropped in self._tables(None):
            more = dropped
            while more:
                done = self._expire_some(table_id, object_id, now, 1, dead)
                files += done.files
                if enough():
                    return files
                more = done.more
        return files

    def end_dead(self) -> int:
        """Remove leases of readers that are known to be dead by now; how many. It waits for none.

        Whoever calls this more often than a lease lasts sees every dead one by and by.
        """
        dead = self._dead(False, lambda step: None)
        self._end_leases(dead)
        return len(dead) + self._end_topic_leases(False, lambda step: None)

    def _end_leases(self, dead: list[LeaseRecord]) -> None:
        if dead:
            self._lake.registry.write(lambda transaction: end_dead_leases(transaction, dead))

    def _end_topic_leases(self, wait: bool, progress: Callable[[str], None]) -> int:
        dead = self._topic_watch.wait(progress) if wait else self._topic_watch.look()[0]
        if dead:
            self._lake.registry.write(lambda transaction: end_dead_topic_leases(transaction, dead))
        return len(dead)

    def _dead(self, wait: bool, progress: Callable[[str], None]) -> list[LeaseRecord]:
        return self._watch.wait(progress) if wait else self._watch.look()[0]

    def _remove_read_folders(self) -> None:
        """Remove staged tables of reads whose lease is gone; a lease is there before its folder is."""
        found = {item.path.split("/")[1] for item in self._lake.store.list(READS)}
        held = {lease.id for lease in self._watch.every()}
        for lease_id in sorted(found - held):
            self._lake.store.delete_folder(f"{READS}/{lease_id}")

    # --- inserts -------------------------------------------------------------------

    def sweep(
        self,
        *,
        dry_run: bool = False,
        progress: Callable[[str], None] = lambda step: None,
        enough: Enough = never,
    ) -> Swept:
        """Remove what inserts left that failed or died, by their commit rows, and what outside engines left.

        Folders of finished inserts are swept once more after a grace, for executors that were late. Outside
        engines have no commit rows: what lies in an Iceberg location goes when no row knows it and it is
        older than `outside_grace`. Nothing else is ever removed because of a listing. `enough` is asked now
        and then whether to stop; this cleaner's next sweep goes on from there.
        """
        self._refuse_while_held(dry_run)
        result = Swept(dry_run)
        if not dry_run:
            self._forget_tombstones()
        if not self._sweep_inserts(result, progress, enough):
            return result
        try:
            self._sweep_locations(result, progress, enough)
            if not dry_run:
                result.objects += self._lake.store.end_uploads(ICEBERG, before=self._outside_limit())
        except LakebookError as error:
            result.failed.append((ICEBERG, str(error)))
        if not dry_run:
            self._end_uploads_of_readers(result)
        return result

    def _end_uploads_of_readers(self, result: Swept) -> None:
        """End what readers were uploading when they were killed: where there is no object yet, no listing shows it."""
        try:
            # No manifest takes as long as that.
            result.objects += self._lake.store.end_uploads(READS, before=self._outside_limit())
        except LakebookError as error:
            result.failed.append((READS, str(error)))

    def _outside_limit(self) -> datetime:
        """What outside engines began before this, they have given up."""
        return to_datetime(self._lake.clock.now_ms() - round(self._lake.settings.outside_grace * 1000))

    def _sweep_inserts(self, result: Swept, progress: Callable[[str], None], enough: Enough) -> bool:
        """Sweep the folders of inserts; whether all of them were looked at."""
        now = self._lake.clock.now_ms()
        before = now - round(self._lake.settings.sweep_grace * 1000)
        after = "" if enough is never else self._next_insert
        self._next_insert = ""
        while True:
            start = after
            page = self._lake.registry.read_with(lambda reader: unswept_inserts(reader, start, now, before, CHUNK))  # noqa: B023
            for insert in page:
                after = insert.commit_id
                try:
                    self._sweep_one(insert, result)
                except LakebookError as error:
                    result.failed.append((insert.folder or insert.commit_id, str(error)))
                if enough():
                    self._next_insert = after
                    return False
            progress(f"{result.objects} objects removed")
            if len(page) < CHUNK:
                return True

    def _sweep_locations(self, result: Swept, progress: Callable[[str], None], enough: Enough) -> None:
        # A listing of many objects takes long, and has no order: so it is kept until the next sweep, if that
        # comes soon. What it tells of an object's age must not be old itself.
        now = self._lake.clock.monotonic()
        kept, self._listing = self._listing, None
        fresh = enough is not never and kept is not None and now - kept[1] < _LISTING_KEPT
        listing = kept[0] if kept is not None and fresh else abandoned_objects(self._lake)
        for items in listing:
            self._sweep_abandoned(items, result, progress)
            if enough():
                self._listing = (listing, self._lake.clock.monotonic())
                return

    def _sweep_abandoned(self, items: list[ObjectInfo], result: Swept, progress: Callable[[str], None]) -> None:
        if result.dry_run:
            result.objects += len(items)
        elif items:
            files = [(item.path, item.size) for item in items]
            # Marked before they are deleted: from then on no commit can name them.
            marked = self._lake.registry.write(lambda transaction: claim_abandoned(transaction, files))
            gone, failed = self._delete_marked(marked)
            result.objects += len(gone)
            result.failed += failed
            progress(f"{result.objects} objects removed")

    def _sweep_one(self, insert: UnsweptInsert, result: Swept) -> None:
        lake = self._lake
        state = insert.state
        if state == "open":
            result.fenced += 1
            if result.dry_run:
                return
            try:
                state = lake.registry.settle(insert.commit_id)
            except CommitNotFound:
                state = None
            failpoints.reach("sweep.fenced")
        # Without a commit row nobody knows how it ended: then, too, only what no row refers to goes.
        if state != "aborted" and state != "open":
            removed = self._remove_uncounted(insert, dry_run=result.dry_run)
        elif result.dry_run:
            removed = sum(1 for _ in lake.store.list(insert.folder)) if insert.folder else 0
        else:
            staged = (insert.first_file_id, insert.last_file_id)
            removed = discard(lake, insert.table_id, insert.commit_id, insert.folder, staged)
            failpoints.reach("sweep.folder_deleted")
        result.objects += removed
        if result.dry_run:
            return
        # Swept before, a grace ago, and still quiet: nobody writes there any more.
        quiet = removed == 0 and insert.swept_at is not None
        statement = FORGET_INSERT if quiet else None
        result.settled += quiet

        def note(transaction: Transaction) -> None:
            if statement is not None:
                transaction.run(statement, insert.commit_id)
            else:
                transaction.run(NOTE_SWEPT, transaction.clock.now_ms(), insert.commit_id)

        lake.registry.write(note)

    def _remove_uncounted(self, insert: UnsweptInsert, *, dry_run: bool) -> int:
        """Remove from the folder of a committed insert what no row refers to."""
        if insert.folder is None:
            return 0
        removed = 0
        former = restored(self._lake.registry)
        listed = self._lake.store.list(insert.folder)
        for chunk in chunks(item.path for item in listed if former is None or not former.was_there(item.modified)):
            known = self._lake.registry.read_with(lambda reader: known_paths(reader, chunk))  # noqa: B023
            uncounted = [path for path in chunk if path not in known]
            removed += len(uncounted)
            if not dry_run and uncounted:
                self._lake.store.delete(uncounted)
                failpoints.reach("sweep.leftovers_deleted")
                for path in uncounted:
                    self._lake.store.remove_empty_folders(path)
        # What an executor was storing when it died is no object yet, but costs as much.
        return removed if dry_run else removed + self._lake.store.end_uploads(insert.folder)


def abandoned_objects(lake: Lake) -> Iterator[list[ObjectInfo]]:
    """Objects in Iceberg locations that are older than the grace for outside engines and that no row accounts for.

    One list for every chunk of objects there are, empty ones too: whoever sweeps may stop after each.
    """
    former = restored(lake.registry)
    for items in chunks(lake.store.list(ICEBERG)):
        paths = [
            item.path
            for item in items
            if is_past_grace(lake, item) and (former is None or not former.was_there(item.modified))
        ]
        found = lake.registry.read_with(lambda reader: unaccounted_paths(reader, paths)) if paths else set()  # noqa: B023
        yield [item for item in items if item.path in found]


def is_past_grace(lake: Lake, item: ObjectInfo) -> bool:
    """Whether an object is so old that no outside engine can be about to commit it."""
    return to_ms(item.modified) < lake.clock.now_ms() - round(lake.settings.outside_grace * 1000)


def _published(reader: Reader, table_id: int, since: int, versions: int) -> tuple[TableRecord, Pointer, int] | None:
    """A live table, what it is published as, and the oldest version that is needed; none if it is not published."""
    row = reader.one(GET_TABLE_BY_ID, table_id)
    pointer = pointer_of(reader, table_id)
    if row is None or pointer is None:
        return None
    table = table_from(row)
    return table, pointer, oldest_needed_version(reader, table_id, table.version, since, versions)


def _properties(reader: Reader, table_id: int) -> Mapping[str, str]:
    row = reader.one(GET_TABLE_BY_ID, table_id)
    if row is None:
        return {}
    found = reader.one(GET_METADATA, table_id, table_from(row).schema_version)
    return metadata_from(found).properties if found is not None else {}
