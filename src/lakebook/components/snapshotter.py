"""The snapshotter decides which states of a table are kept, and lets go of the rest.

It keeps states as Iceberg tags: by time, by size, and because somebody has loaded them through the catalog.
It removes its own tags when there are too many, and any tag whose time is over; it ends the history that a
table's policy no longer keeps. What it knows it can take from the registry and the metadata again, so that
several of them do no harm to each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from lakebook.cdc.subscribers import Event, Refresh, Subscriber
from lakebook.clock import to_datetime, to_ms
from lakebook.components.component import Component, Entry
from lakebook.errors import (
    BookClosed,
    EpochChanged,
    LakebookError,
    PublishFailed,
    RegistryUnavailable,
    StorageUnavailable,
    SubscriberFailed,
    TableNotFound,
)
from lakebook.iceberg.refs import QUERY, SIZE, TIME, Refs, TagRef, made_at, own_among, refs_at
from lakebook.lake.cleaning import Cleaner
from lakebook.lake.lake import Lake
from lakebook.lake.measuring import PARQUET
from lakebook.lake.properties import TagPolicy, history_policy, tag_policy
from lakebook.lake.tagging import AlreadyKept, keep_snapshot, let_go
from lakebook.registry.holding import held_since
from lakebook.registry.maintenance import DONE, FAILED, TAG, Request, Work, list_work, meet, requests_of_kind
from lakebook.registry.publishing import SnapshotRecord, snapshots_of
from lakebook.registry.schema import MAX_BIGINT
from lakebook.registry.table_files import CHUNK
from lakebook.registry.tables import EVERY_TABLE, TableRecord
from lakebook.registry.tags import (
    SNAPSHOTTER,
    History,
    added_size,
    has_retirable,
    history_of,
    metadata_locations,
    table_of_object,
)
from lakebook.registry.transactions import Reader

LOG = logging.getLogger("lakebook.components")

#: Tables that one round looks at; the next one goes on.
TABLES_PER_ROUND = 200
#: Tables whose state is shown.
TABLES_SHOWN = 100

_MADE, _REMOVED, _EXPIRED = "tag", "untag", "expire"
_LONGEST_PAUSE = 3600.0
# So much of the time for which history is kept may pass between two expiries of a table, and no more than this.
_PART_OF_HISTORY = 24
_LONGEST_PART = 3600.0
# Pieces of work among which the last tag and the last expiry are looked for.
_REMEMBERED = 50
# Looked at so often in their time, leases that run out are seen to stand still.
_LOOKS_PER_LEASE = 3

# Where one table fails like this, all others would too, each after a long wait.
_OUTAGES = (RegistryUnavailable, StorageUnavailable)


@dataclass(frozen=True)
class _LastTag:
    """The last tag that a snapshotter made on a table."""

    name: str
    made_at: int
    #: The version whose state it keeps, and the bytes of its files; none: not known.
    version: int
    size: int | None


@dataclass(frozen=True)
class _Standing:
    """What can be let go of depends on this alone, beside the policy."""

    horizon: int
    old: frozenset[int]
    #: Old snapshots that neither a tag nor a branch names.
    unnamed: frozenset[int]


@dataclass
class _Known:
    """What is known of a table."""

    table_id: int
    object_id: int = 0
    shown: str = ""
    #: Since when it has changed, or somebody asks for something; none: not since it was looked at.
    noticed: float | None = None
    #: When it is to be looked at though nothing has happened, by the clock on the wall.
    due_at: int = MAX_BIGINT
    #: Before this it is not tried again.
    retry_at: float = float("-inf")
    failures: int = 0
    error: str = ""
    #: Whether the last tag and the last expiry were looked up.
    is_remembered: bool = False
    last: _LastTag | None = None
    next_tag_at: int | None = None
    #: Up to which version there is nothing to tag.
    seen: int = 0
    #: Bytes that versions after the last tag have added, and up to which version they are counted.
    added: int = 0
    counted: int = 0
    expired_at: int | None = None
    #: The metadata file that was looked at, its tags, and the snapshots that tags and branches name.
    location: str | None = None
    tags: tuple[TagRef, ...] = ()
    named: frozenset[int] = frozenset()
    #: Where history stood when there was nothing left to do.
    settled: _Standing | None = None

    def waits(self, now: int, tick: float) -> float | None:
        """For how long it has been worth a look; none: it is not."""
        if tick < self.retry_at or (self.noticed is None and self.due_at > now):
            return None
        return max((now - self.due_at) / 1000, 0.0 if self.noticed is None else tick - self.noticed)

    @property
    def version(self) -> int:
        """The newest version whose state is kept, or need not be."""
        return max(self.seen, 0 if self.last is None else self.last.version)

    def note(self, tag: _LastTag) -> None:
        """Remember a tag, if it is the last one, or keeps a newer state than the last."""
        last = self.last
        newest = tag if last is None or tag.made_at > last.made_at else last
        state = tag if last is None or tag.version > last.version else last
        if state is tag:
            self.added, self.counted = 0, tag.version
        self.last = _LastTag(newest.name, newest.made_at, state.version, state.size)


def _standing(known: _Known, history: History) -> _Standing:
    return _Standing(history.horizon, history.old_snapshots, history.old_snapshots - known.named)


class Snapshotter(Component, Subscriber):
    """Keeps states of tables as tags, and ends their history."""

    name = SNAPSHOTTER
    #: What it was told is in no other place than its memory.
    durable = False

    def __init__(self, lake: Lake) -> None:
        super().__init__(lake)
        self._cleaner = Cleaner(lake)
        # Guards what is known; `_round` is held by who works.
        self._lock = threading.Lock()
        self._round = threading.Lock()
        self._known: dict[int, _Known] = {}
        self._objects: dict[int, int] = {}
        self._knows_all = False
        self._next_round = lake.clock.monotonic()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    # --- what it is told -------------------------------------------------------------

    def on_event(self, event: Event[Any]) -> None:
        """Remember that a table has changed."""
        self.on_events([event])

    def on_events(self, events: Sequence[Event[Any]]) -> None:
        """Remember that a table has changed; its next round looks at it."""
        if events:
            captured = events[-1].captured
            row = captured.row_after if captured.row_after is not None else captured.row_before
            assert row is not None
            self._notice(int(row["table_id"]))

    def on_refresh(self, refresh: Refresh) -> None:
        """Forget what is known of a table, and look at it in the next round."""
        with self._lock:
            self._known.pop(self._objects.pop(refresh.object_id, 0), None)
        if refresh.table is not None:
            self._notice(refresh.table.id)

    def on_health(self) -> None:
        """Raise if its thread has ended by itself, or the registry does not answer."""
        self.paused()
        thread = self._thread
        if thread is not None and not thread.is_alive():
            raise SubscriberFailed("its thread has ended", on=self.name, remedy="Restart the process")

    def _notice(self, table_id: int) -> None:
        tick = self.lake.clock.monotonic()
        with self._lock:
            known = self._known.setdefault(table_id, _Known(table_id))
            if known.noticed is None:
                known.noticed = tick

    # --- its life --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to work by the clock."""
        if self._thread is not None:
            return
        self._ending.clear()
        self._knows_all = False
        self._thread = threading.Thread(target=self._run, name="lakebook-snapshotter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End that; the table that is at work is finished."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ending.set()
            thread.join()
            self._ending.clear()

    def _run(self) -> None:
        pace = self.lake.settings.lease_seconds / _LOOKS_PER_LEASE
        while not self._ending.wait(min(self.due(), pace)):
            try:
                if self.due() == 0:
                    self.run_once()
                else:
                    # Between rounds too: whoever watches leases must not be away for long.
                    with self._round:
                        self._cleaner.end_dead()
            except (BookClosed, EpochChanged) as error:
                LOG.warning("%s ends (%s)", self.name, error)
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the next round tries again
                self.lake.metrics.count_chore(self.name, "round", FAILED)
                LOG.warning("a round of the %s failed (%s: %s)", self.name, type(error).__name__, error)

    def due(self) -> float:
        """Seconds until the next round; 0: it is due."""
        return max(0.0, self._next_round - self.lake.clock.monotonic())

    def run_once(self, only: int | None = None) -> int:
        """One round: look at every table that has changed or whose time has come; how many were looked at.

        With an id, at that table alone. A round is bounded. What it leaves, the next one looks at, which is
        then due at once.
        """
        with self._round:
            self._next_round = self.lake.clock.monotonic() + self.lake.settings.maintenance_interval
            if self.paused() is not None:
                return 0
            # Nobody who is gone holds history back.
            self._cleaner.end_dead()
            self._find_tables()
            requests = self._requests()
            ready = [known for known in self._ready() if only in (None, known.table_id)]
            looked = 0
            for known in ready[:TABLES_PER_ROUND]:
                if self._ending.is_set() or not self._tried(known, requests.get(known.table_id, ())):
                    return looked
                looked += 1
            if len(ready) > looked:
                self._next_round = self.lake.clock.monotonic()
            return looked

    # --- which tables ----------------------------------------------------------------

    def _find_tables(self) -> None:
        """Notice tables whose metadata was changed by others, by a tag for example; at first, all tables."""
        if not self._knows_all:
            after = 0
            while page := self.lake.registry.all(EVERY_TABLE, after, CHUNK):
                for table_id, _, deleted_at in page:
                    if deleted_at is None:
                        self._notice(table_id)
                after = page[-1][0]
            self._knows_all = True
        for table_id, location in self.lake.registry.read_with(lambda reader: list(metadata_locations(reader))):
            known = self._known.get(table_id)
            if known is None or known.location != location:
                self._notice(table_id)

    def _requests(self) -> dict[int, list[Request]]:
        """What is asked for, by table."""

        def read(reader: Reader) -> list[tuple[int | None, Request]]:
            found = requests_of_kind(reader, TAG, [self.name])
            return [(table_of_object(reader, item.object_id), item) for item in found]

        found: dict[int, list[Request]] = {}
        gone: list[Request] = []
        for table_id, request in self.lake.registry.read_with(read):
            if table_id is None:
                gone.append(request)
            else:
                found.setdefault(table_id, []).append(request)
                self._notice(table_id)
        self._meet(gone)
        return found

    def _meet(self, requests: Sequence[Request]) -> None:
        if requests:
            self.lake.registry.write(lambda transaction: meet(transaction, requests))

    def _ready(self) -> list[_Known]:
        """The tables that are worth a look, the one that has waited longest first."""
        now, tick = self.lake.clock.now_ms(), self.lake.clock.monotonic()
        with self._lock:
            found = [(known.waits(now, tick), known) for known in self._known.values()]
        ready = [(waited, known) for waited, known in found if waited is not None]
        return [known for _, known in sorted(ready, key=lambda item: (-item[0], item[1].table_id))]

    def _tried(self, known: _Known, requests: Sequence[Request]) -> bool:
        """Look at a table; whether it is worth while to go on with others."""
        with self._lock:
            # Before the look: what happens from now on is noticed anew.
            known.noticed = None
        known.retry_at = float("-inf")
        try:
            self._look(known, requests)
        except (BookClosed, EpochChanged):
            raise
        except Exception as error:  # noqa: BLE001 - one table stops no other
            self._postpone(known, error)
            return not isinstance(error, _OUTAGES)
        known.failures, known.error = 0, ""
        return True

    def _postpone(self, known: _Known, error: Exception) -> None:
        known.failures += 1
        # The exponent is bounded too: a table may fail for months.
        pause = self.lake.settings.maintenance_interval * 2 ** min(known.failures - 1, 30)
        known.retry_at = self.lake.clock.monotonic() + min(pause, _LONGEST_PAUSE)
        self._notice(known.table_id)
        known.error = f"{type(error).__name__}: {error}"
        LOG.warning("the %s could not look after %s (%s)", self.name, known.shown or known.table_id, known.error)

    # --- one table -------------------------------------------------------------------

    def _look(self, known: _Known, requests: Sequence[Request]) -> None:
        record = self.table(known.table_id)
        if record is None:
            with self._lock:
                self._known.pop(known.table_id, None)
                self._objects.pop(known.object_id, None)
            self._meet(requests)
            return
        known.object_id, known.shown = record.object_id, f"{record.namespace}.{record.name}"
        self._objects[record.object_id] = record.id
        if self.paused(record.id) is not None:
            known.due_at = self.lake.clock.now_ms() + self._interval
            # Also if it is noticed again; whoever lets it go on has it refreshed.
            known.retry_at = self.lake.clock.monotonic() + self.lake.settings.maintenance_interval
            return
        if not known.is_remembered:
            self._remember(known)
        properties = self.lake.metadata_of(record, record.schema_version).properties
        failure: LakebookError | None = None
        try:
            self._look_at_tags(known, record, tag_policy(self.lake, properties), requests)
        except (*_OUTAGES, BookClosed, EpochChanged):
            raise
        except LakebookError as error:
            failure = error  # A table that cannot be tagged has a history all the same.
        looks = self._end_history(known, record, *history_policy(self.lake, properties))
        if failure is not None:
            raise failure
        looks += [tag.goes_at + 1 for tag in known.tags if tag.goes_at is not None]
        if known.next_tag_at is not None:
            looks.append(known.next_tag_at)
        known.due_at = min(looks, default=MAX_BIGINT)

    def _look_at_tags(self, known: _Known, table: TableRecord, policy: TagPolicy, requests: Sequence[Request]) -> None:
        if table.format == PARQUET:
            self._take_stock(known, table)
            self._keep_loaded(known, table, policy, requests)
            self._keep_newest(known, table, policy)
            self._remove_tags(known, table, policy)
        self._meet(requests)

    @property
    def _interval(self) -> int:
        return round(self.lake.settings.maintenance_interval * 1000)

    def _remember(self, known: _Known) -> None:
        """What was done to a table before this process: tags that are gone by now count too."""
        found = self.lake.registry.read_with(
            lambda reader: list_work(reader, self.name, known.table_id, MAX_BIGINT, _REMEMBERED)
        )
        done = [item for item in found if item.outcome == DONE]
        tagged = next((item for item in done if item.action == _MADE), None)
        expired = next((item for item in done if item.action == _EXPIRED), None)
        if tagged is not None:
            last = _last_of(tagged)
            if last is not None:
                known.note(last)
        if expired is not None:
            known.expired_at = to_ms(expired.finished_at)
        known.is_remembered = True

    def _take_stock(self, known: _Known, table: TableRecord) -> None:
        """Take the tags that a table has from its metadata, if that was changed."""
        lake = self.lake
        pointer = lake.publisher.pointer(table)
        if pointer is None or pointer.metadata_location == known.location:
            return
        refs = refs_at(lake.publisher, pointer)
        if refs.own:
            snapshots = self._snapshots(table)
            for tag in refs.own:
                self._note_kept(known, tag, snapshots.get(tag.snapshot_id))
        known.tags, known.named = tuple(refs.tags.values()), refs.named
        known.location = pointer.metadata_location

    def _snapshots(self, table: TableRecord) -> dict[int, SnapshotRecord]:
        found = self.lake.registry.read_with(lambda reader: snapshots_of(reader, table.id))
        return {item.snapshot_id: item for item in found}

    def _note_kept(self, known: _Known, tag: TagRef, snapshot: SnapshotRecord | None) -> None:
        """Remember which state was kept last, and when."""
        if snapshot is None or snapshot.version is None or tag.own_since is None:
            return
        size = snapshot.summary.get("total-files-size", "")
        new = _LastTag(tag.name, tag.own_since, snapshot.version, int(size) if size.isdecimal() else None)
        known.note(new)

    @contextmanager
    def _work(self, action: str, reason: str, table: TableRecord) -> Iterator[Entry]:
        """A piece of work that is written down if there was something to do."""
        outcome = FAILED
        noted = True
        try:
            with self.journal.work(action, reason, table.id) as entry:
                entry.worth_noting = False
                # Somebody else was faster, or it was dropped.
                with suppress(AlreadyKept, TableNotFound):
                    yield entry
            outcome, noted = DONE, entry.worth_noting
        finally:
            if noted:
                self.lake.metrics.count_chore(self.name, action, outcome)

    # --- tags ------------------------------------------------------------------------

    def _keep_loaded(self, known: _Known, table: TableRecord, policy: TagPolicy, requests: Sequence[Request]) -> None:
        """Keep states that were loaded through the catalog. Of many, the last ones: the others would go at once."""
        wanted = [item.argument.get("snapshot_id") for item in requests] if policy.queries else []
        for snapshot_id in wanted[-policy.kept :]:
            if not isinstance(snapshot_id, int):
                continue
            with self._work(_MADE, "it was loaded through the catalog", table) as entry:
                made = keep_snapshot(self.lake, table, QUERY, snapshot_id, policy.keep_seconds)
                self._note_made(known, table, made, entry)

    def _keep_newest(self, known: _Known, table: TableRecord, policy: TagPolicy) -> None:
        """Keep the newest state, if it is time for that."""
        wanted = self._wanted(known, table, policy)
        if wanted is None:
            return
        last_at = 0 if known.last is None else known.last.made_at

        def check(present: Refs) -> None:
            # Another snapshotter has come to the same decision.
            if any((tag.own_since or 0) > last_at for tag in present.own):
                raise AlreadyKept

        kind, reason = wanted
        with self._work(_MADE, reason, table) as entry:
            pointer = self.lake.publish(table)
            assert pointer is not None
            refs = refs_at(self.lake.publisher, pointer)
            if refs.current is not None and not refs.is_kept(refs.current):
                made = keep_snapshot(self.lake, table, kind, refs.current, policy.keep_seconds, check)
                self._note_made(known, table, made, entry)
            known.seen, known.next_tag_at = pointer.version, None

    def _wanted(self, known: _Known, table: TableRecord, policy: TagPolicy) -> tuple[str, str] | None:
        """Whether the newest state is to be kept now, and why."""
        known.next_tag_at = None
        if table.version <= known.version:
            return None
        # A name may be of a clock that was ahead.
        since = min(to_ms(table.created_at) if known.last is None else known.last.made_at, self.lake.clock.now_ms())
        if policy.seconds:
            known.next_tag_at = since + round(policy.seconds * 1000)
            if self.lake.clock.now_ms() >= known.next_tag_at:
                return TIME, f"{policy.seconds:g} s since {'it was created' if known.last is None else 'the last tag'}"
        if policy.bytes:
            added = self._added(known, table)
            if added >= policy.bytes:
                return SIZE, f"{added} bytes since {'it was created' if known.last is None else 'the last tag'}"
        return None

    def _added(self, known: _Known, table: TableRecord) -> int:
        """Bytes that came since the last tag."""
        known.added += self.lake.registry.read_with(
            lambda reader: added_size(reader, table.id, known.counted, table.version)
        )
        known.counted = max(known.counted, table.version)
        # Versions that have expired are counted no more; what the table has grown by came in any case.
        before = 0 if known.last is None else known.last.size
        return max(known.added, 0 if before is None else table.total_size - before)

    def _note_made(self, known: _Known, table: TableRecord, made: TagRef, entry: Entry) -> None:
        self._note_kept(known, made, self._snapshots(table).get(made.snapshot_id))
        entry.worth_noting = True
        entry.detail |= {"tag": made.name, "snapshot_id": made.snapshot_id}
        if known.last is not None and known.last.name == made.name:
            entry.detail |= {"version": known.last.version, "size": known.last.size}

    def _remove_tags(self, known: _Known, table: TableRecord, policy: TagPolicy) -> None:
        """Remove tags whose time is over, and own ones that are too many. Branches are nobody's here."""
        self._take_stock(known, table)
        now = self.lake.clock.now_ms()
        over = [tag for tag in known.tags if tag.goes_at is not None and now > tag.goes_at]
        surplus = [tag for tag in own_among(known.tags) if tag not in over][policy.kept :]
        for tags, reason in ((over, "its time is over"), (surplus, f"more than {policy.kept} tags")):
            if tags:
                with self._work(_REMOVED, reason, table) as entry:
                    let_go(self.lake, table, tags)
                    entry.worth_noting = True
                    entry.detail["tags"] = [tag.name for tag in tags]
        self._take_stock(known, table)

    # --- history ---------------------------------------------------------------------

    def _end_history(self, known: _Known, table: TableRecord, seconds: float, versions: int) -> list[int]:
        """End the history that the policy no longer keeps; when to look again."""

        def read() -> History:
            since = self.lake.clock.now_ms() - round(seconds * 1000)
            return self.lake.registry.in_snapshot(lambda reader: history_of(reader, table, since, versions))

        if held_since(self.lake.registry) is not None:
            return [self.lake.clock.now_ms() + self._interval]
        # Not for every single version: each time, the metadata is written anew.
        part = round(min(seconds / _PART_OF_HISTORY, _LONGEST_PART) * 1000)
        rests_until = 0 if known.expired_at is None else known.expired_at + part
        history = read()
        ends = history.needed > history.oldest and rests_until <= self.lake.clock.now_ms()
        if ends or self._has_left_over(known, table, history):
            self._expire(known, table, history.oldest, f"history: {versions} versions, {_span(seconds)}")
            history, rests_until = read(), (known.expired_at or 0) + part
            known.settled = _standing(known, history)
        if history.followed_at is None:
            return []
        # What a lease holds back has no time.
        held = history.needed <= history.oldest
        soon = self.lake.clock.now_ms() + self._interval if held else 0
        return [max(history.followed_at + round(seconds * 1000), rests_until, soon)]

    def _has_left_over(self, known: _Known, table: TableRecord, history: History) -> bool:
        """Whether there may be snapshots or files that nothing keeps any more, because a tag is gone for example."""
        standing = _standing(known, history)
        if standing == known.settled:
            return False
        if standing.unnamed:
            return True
        if self.lake.registry.read_with(lambda reader: has_retirable(reader, table.id, history.horizon)):
            return True
        known.settled = standing
        return False

    def _expire(self, known: _Known, table: TableRecord, oldest: int, reason: str) -> None:
        with self._work(_EXPIRED, reason, table) as entry:
            # What is needed it asks the registry: tags and branches by their snapshots, readers by their
            # leases. Whoever consumes a table later on pins its version by a lease too.
            done = self._cleaner.expire(table)
            least = done.min_readable.get(str(table.id), oldest)
            entry.worth_noting = bool(done.files) or least > oldest
            entry.detail |= {"files": done.files, "bytes": done.bytes, "min_readable": least}
            if entry.worth_noting:
                known.expired_at = self.lake.clock.now_ms()
            if done.failed:
                raise PublishFailed(done.failed[0][1], on=table.shown, remedy="It is tried again later")
        if table.format == PARQUET:
            self._take_stock(known, table)

    # --- status ----------------------------------------------------------------------

    def status(self) -> Mapping[str, Any]:
        """What it knows of the tables: last and next tag, last expiry. Those with something to say come first."""
        with self._lock:
            known = sorted(self._known.values(), key=lambda item: (not _has_something(item), item.table_id))
        return {
            "tables": len(known),
            "next_round_seconds": round(self.due(), 3),
            "of_tables": [_shown(item) for item in known[:TABLES_SHOWN]],
        }


def _last_of(work: Work) -> _LastTag | None:
    """The tag that a piece of work made."""
    name, version, size = (work.detail.get(key) for key in ("tag", "version", "size"))
    moment = made_at(name) if isinstance(name, str) else None
    if moment is None or not isinstance(version, int):
        return None
    return _LastTag(str(name), moment, version, size if isinstance(size, int) else None)


def _has_something(known: _Known) -> bool:
    return bool(known.failures or known.last or known.next_tag_at or known.expired_at)


def _shown(known: _Known) -> dict[str, Any]:
    return {
        "table": known.shown or f"table {known.table_id}",
        "last_tag": None if known.last is None else known.last.name,
        "last_tag_at": None if known.last is None else to_datetime(known.last.made_at).isoformat(),
        "next_tag_at": None if known.next_tag_at is None else to_datetime(known.next_tag_at).isoformat(),
        "last_expiry_at": None if known.expired_at is None else to_datetime(known.expired_at).isoformat(),
        "failures": known.failures,
        "error": known.error,
    }


def _span(seconds: float) -> str:
    """A time as a person says it."""
    for name, length in (("days", 86_400), ("hours", 3600)):
        if seconds >= 2 * length and seconds % length == 0:
            return f"{seconds / length:g} {name}"
    return f"{seconds:g} s"
