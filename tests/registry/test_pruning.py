"""Events and commit rows go when nobody needs them, and never before; who comes too late is told so."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from books import MEMORY, POSTGRESQL, SQLITE, Place, describe
from held import PATIENCE, held_before_commit
from lake import insert, numbers, own_warehouse, records  # noqa: F401
from lakebook import Book, Cursor, Event
from lakebook.clock import ManualClock
from lakebook.errors import AppendTurnLost, CommitNotFound, CursorExpired
from lakebook.registry import pruning, schema
from lakebook.registry.commits import open_commit_row
from lakebook.registry.deliveries import (
    Lane,
    events_of_object,
    load_progress,
    objects_of,
    park,
    redrive,
    save_lanes,
    save_progress,
)
from lakebook.registry.events import HORIZON
from lakebook.registry.maintenance import DONE, list_requests, note_work
from lakebook.registry.pg_snapshots import PgSnapshot
from lakebook.registry.pruning import drop_laggards, prune_commits, prune_events, prune_history
from lakebook.registry.transactions import Transaction, new_id

KEPT = 100.0
DAY = 86_400


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed(place: Place, clock: ManualClock) -> Book:
    book = place.open(clock=clock, events_kept=KEPT, events_most=50, events_oldest=1000.0)
    book.metadata.create_topic("orders", 4)
    return book


def append(book: Book, partition: int = 0) -> None:
    """Two events of one partition's object."""
    found = book.metadata.get_partition("orders", partition)
    assert found is not None
    book.metadata.add_segment(describe(partition=partition, base=found.high_watermark))


def kept(book: Book) -> list[dict[str, Any]]:
    return records(book, schema.events)


def object_of(book: Book, partition: int) -> int:
    rows = records(book, schema.partitions, partition_id=partition)
    return int(rows[0]["object_id"])


def horizon(book: Book) -> Cursor | None:
    row = book._registry.one(HORIZON)
    assert row is not None
    return None if row[1] is None else Cursor.parse(row[1])


def read_all(book: Book, cursor: Cursor, limit: int = 1000) -> tuple[list[Event], Cursor]:
    found: list[Event] = []
    while True:
        batch = book.events.read(cursor, limit)
        found.extend(batch.events)
        cursor = batch.cursor
        if not batch.more:
            return found, cursor


def are_suffixes(book: Book) -> bool:
    """Whether of every object the last events are kept, without a gap."""
    found = defaultdict(list)
    for row in kept(book):
        found[row["object_id"]].append(row["sequence"])
    last = {row["id"]: row["last_sequence"] for row in records(book, schema.lake_objects)}
    return all(
        sorted(numbers) == list(range(last[object_id] - len(numbers) + 1, last[object_id] + 1))
        for object_id, numbers in found.items()
    )


# --- events --------------------------------------------------------------------


def test_without_a_cursor_only_the_age_counts(timed: Book, clock: ManualClock) -> None:
    append(timed)
    old = len(kept(timed))
    clock.advance(KEPT)
    append(timed, 1)
    assert prune_events(timed._registry) == 0
    clock.advance(1)
    assert prune_events(timed._registry) == old
    assert [row["table_name"] for row in kept(timed)] == ["segments", "partitions"]
    assert prune_events(timed._registry) == 0
    assert timed.verify().ok
    clock.advance(KEPT + 1)
    assert prune_events(timed._registry) == 2
    assert timed.verify().ok


def test_what_a_cursor_has_not_passed_stays(timed: Book, clock: ManualClock) -> None:
    timed.events.save_cursor("slow", timed.events.now())
    append(timed)
    timed.events.save_cursor("quick", timed.events.now())
    append(timed, 1)
    clock.advance(KEPT + 1)
    pruned = prune_events(timed._registry)
    assert pruned == len(kept(timed)) + 1
    slow = timed.events.load_cursor("slow")
    assert slow is not None
    assert len(read_all(timed, slow)[0]) == 4
    assert prune_events(timed._registry) == 0
    timed.events.save_cursor("slow", timed.events.now())
    # The other one has not passed the second.
    assert prune_events(timed._registry) == 2
    timed.events.delete_cursor("quick")
    assert prune_events(timed._registry) == 2
    assert timed.verify().ok


def test_a_cursor_at_the_beginning_keeps_everything(timed: Book, clock: ManualClock) -> None:
    timed.events.save_cursor("new", timed.events.beginning())
    append(timed)
    clock.advance(KEPT + 1)
    assert prune_events(timed._registry) == 0
    assert horizon(timed) is None


def test_a_cursor_of_another_epoch_keeps_nothing(timed: Book, clock: ManualClock) -> None:
    timed.events.save_cursor("former", replace(timed.events.beginning(), epoch="0" * 32))
    append(timed)
    clock.advance(KEPT + 1)
    assert prune_events(timed._registry) > 0
    assert drop_laggards(timed._registry) == []


def test_what_a_delivery_waits_for_stays_whatever_the_cursor_says(timed: Book, clock: ManualClock) -> None:
    for partition in (0, 0, 0, 1):
        append(timed, partition)
    stalled = object_of(timed, 0)
    now = timed.events.now()
    timed._registry.write(lambda t: save_progress(t, "updater", now, [Lane(stalled, 4, 7)], []))
    clock.advance(KEPT + 1)
    assert prune_events(timed._registry) > 0
    assert [(row["object_id"], row["sequence"]) for row in kept(timed)] == [(stalled, n) for n in (4, 5, 6, 7)]
    assert timed.verify().ok
    # Another subscriber's lane on the same object, further on, changes nothing.
    timed._registry.write(lambda t: save_progress(t, "compactor", now, [Lane(stalled, 6, 7)], []))
    assert prune_events(timed._registry) == 0
    timed._registry.write(lambda t: save_lanes(t, "updater", [], [stalled]))
    assert prune_events(timed._registry) == 2
    timed._registry.write(lambda t: save_lanes(t, "compactor", [], [stalled]))
    assert prune_events(timed._registry) == 2
    assert kept(timed) == []


def test_a_cursor_before_the_horizon_is_told_so(timed: Book, clock: ManualClock) -> None:
    before = timed.events.now()
    append(timed)
    between = timed.events.now()
    clock.advance(KEPT + 1)
    append(timed, 1)
    assert prune_events(timed._registry) > 0
    with pytest.raises(CursorExpired, match="no longer kept"):
        timed.events.read(before)
    with pytest.raises(CursorExpired):
        timed.events.read(Cursor.parse(str(before)))
    # This one has passed everything that is gone, though nobody has saved it.
    assert len(timed.events.read(between).events) == 2
    assert timed.events.read(timed.events.now()).events == ()


def test_the_beginning_is_before_the_oldest_event_that_is_kept(timed: Book, clock: ManualClock) -> None:
    append(timed)
    clock.advance(KEPT + 1)
    for partition in (1, 2, 3):
        append(timed, partition)
    assert prune_events(timed._registry) > 0
    beginning = timed.events.beginning()
    for limit in (1, 2, 1000):
        found, cursor = read_all(timed, beginning, limit)
        assert [event.id for event in found] == [row["id"] for row in kept(timed)]
        assert timed.events.read(cursor).events == ()
    assert Cursor.parse(str(beginning)) == beginning
    assert beginning.is_beginning
    clock.advance(KEPT + 1)
    prune_events(timed._registry)
    assert timed.events.read(beginning).events == ()


def test_the_end_of_an_empty_log_is_not_its_beginning(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock, events_kept=KEPT)
    end = book.events.now()
    assert not end.is_beginning
    book.metadata.create_topic("orders")
    clock.advance(KEPT + 1)
    assert prune_events(book._registry) == 2
    # It was promised all that comes after it.
    with pytest.raises(CursorExpired):
        book.events.read(end)
    assert book.events.read(book.events.beginning()).events == ()


def test_what_is_kept_for_a_delivery_alone_is_not_read_from_the_beginning(timed: Book, clock: ManualClock) -> None:
    append(timed)
    stalled = object_of(timed, 0)
    now = timed.events.now()
    timed._registry.write(lambda t: save_progress(t, "updater", now, [Lane(stalled, 1, 3)], []))
    append(timed, 1)
    timed.events.save_cursor("updater", timed.events.now())
    clock.advance(KEPT + 1)
    append(timed, 2)
    assert prune_events(timed._registry) > 0
    assert {row["object_id"] for row in kept(timed)} == {stalled, object_of(timed, 2)}
    # Page by page: what lies before the horizon must not stop a reader that began at it.
    for limit in (1, 2, 1000):
        found, _ = read_all(timed, timed.events.beginning(), limit)
        assert [event.object_id for event in found] == [object_of(timed, 2)] * 2


def test_a_cursor_in_the_middle_of_pages_is_told_so(timed: Book, clock: ManualClock) -> None:
    append(timed)
    page = timed.events.read(timed.events.beginning(), 2)
    assert page.more
    # Saved, it keeps everything that it has not read.
    timed.events.save_cursor("reader", page.cursor)
    clock.advance(KEPT + 1)
    prune_events(timed._registry)
    rest, _ = read_all(timed, page.cursor, 2)
    assert [event.id for event in (*page.events, *rest)] == list(range(1, 8))
    # Not saved, it is told.
    timed.events.delete_cursor("reader")
    assert prune_events(timed._registry) > 0
    with pytest.raises(CursorExpired):
        timed.events.read(page.cursor, 2)


def test_events_go_in_chunks_the_oldest_first(timed: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "CHUNK", 3)
    for _ in range(3):
        append(timed)
    clock.advance(KEPT + 1)
    every = [row["id"] for row in kept(timed)]
    assert prune_events(timed._registry, lambda: True) == 3
    assert [row["id"] for row in kept(timed)] == every[3:]
    assert timed.verify().ok
    asked = iter([False, True])
    assert prune_events(timed._registry, lambda: next(asked)) == 6
    assert prune_events(timed._registry) == len(every) - 9
    assert kept(timed) == []


def test_events_behind_stalled_ones_go_as_well(
    timed: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "CHUNK", 2)
    for _ in range(5):
        append(timed)
    for _ in range(5):
        append(timed, 1)
    stalled = object_of(timed, 0)
    now = timed.events.now()
    timed._registry.write(lambda t: save_progress(t, "updater", now, [Lane(stalled, 1, 11)], []))
    clock.advance(KEPT + 1)
    # Whole chunks of them may not go: it does not stop there.
    prune_events(timed._registry)
    assert {row["object_id"] for row in kept(timed)} == {stalled}
    assert are_suffixes(timed)


def test_two_who_prune_at_once_do_no_harm(shared_place: Place, clock: ManualClock) -> None:
    book = shared_place.open(clock=clock, events_kept=KEPT)
    book.metadata.create_topic("orders", 4)
    for number in range(40):
        append(book, number % 4)
    clock.advance(KEPT + 1)
    append(book)
    total = len(kept(book))
    others = [shared_place.open(clock=clock, events_kept=KEPT) for _ in range(2)]
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda other: counts.append(prune_events(other._registry)), args=(other,))
        for other in others
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sum(counts) == total - 2
    assert len(kept(book)) == 2
    assert len(book.events.read(book.events.beginning()).events) == 2
    assert book.verify().ok


# --- PostgreSQL's order of commits -----------------------------------------------


@pytest.fixture
def late(make_place: Callable[[str], Place], clock: ManualClock) -> Book:
    book = make_place(POSTGRESQL).open(clock=clock, events_kept=KEPT)
    book.metadata.create_topic("orders", 4)
    return book


def test_a_late_commit_is_not_removed_before_a_cursor_has_read_it(late: Book, clock: ManualClock) -> None:
    with held_before_commit(lambda: append(late, 0), skip=1) as early:
        append(late, 1)
        late.events.save_cursor("reader", late.events.now())
        append(late, 2)
        late.events.save_cursor("other", late.events.now())
        clock.advance(KEPT + 1)
        # What has the smaller ids is not committed yet; others' events do not wait for it.
        assert prune_events(late._registry) > 0
        assert {row["object_id"] for row in kept(late)} == {object_of(late, 2)}
        early.finish()
    # It is as old as the others, and both cursors stand behind its id.
    assert prune_events(late._registry) == 0
    for name, number in (("reader", 4), ("other", 2)):
        cursor = late.events.load_cursor(name)
        assert cursor is not None
        found, behind = read_all(late, cursor)
        assert len(found) == number
        assert {object_of(late, 0)} <= {event.object_id for event in found}
        late.events.save_cursor(name, behind)
    assert prune_events(late._registry) == 4
    assert late.verify().ok


def test_who_reads_without_a_saved_cursor_is_told_of_a_late_commit_that_is_gone(late: Book, clock: ManualClock) -> None:
    with held_before_commit(lambda: append(late, 0), skip=1) as early:
        append(late, 1)
        cursor = late.events.now()
        clock.advance(KEPT + 1)
        prune_events(late._registry)
        # Nothing that it needs is gone, though a transaction from before is still open.
        assert late.events.read(cursor).events == ()
        early.finish()
    assert prune_events(late._registry) == 2
    with pytest.raises(CursorExpired):
        late.events.read(cursor)
    assert late.events.read(late.events.now()).events == ()


def test_a_transaction_that_stays_open_expires_no_cursor(late: Book, clock: ManualClock) -> None:
    with held_before_commit(lambda: append(late, 0), skip=1) as early:
        cursor = late.events.now()
        seen = 0
        for _ in range(5):
            append(late, 1)
            found, cursor = read_all(late, cursor)
            seen += len(found)
            clock.advance(KEPT + 1)
            prune_events(late._registry)
            assert late.events.read(cursor).events == ()
        early.finish()
    assert seen == 10
    assert len(read_all(late, cursor)[0]) == 2


def test_of_an_object_only_a_beginning_goes_though_transaction_ids_are_in_another_order(
    late: Book, clock: ManualClock
) -> None:
    """The later event of an object may have the smaller transaction id: it had begun earlier, and waited."""
    registry = late._registry
    target = object_of(late, 0)
    began, go_on = threading.Event(), threading.Event()

    def change(transaction: Transaction) -> None:
        transaction.lock(target)
        transaction.capture(target, "partitions", [("update", "{}", "{}", "{}")])

    def wait_and_change(transaction: Transaction) -> None:
        began.set()
        assert go_on.wait(PATIENCE)
        change(transaction)

    first = threading.Thread(target=lambda: registry.write(wait_and_change))
    first.start()
    assert began.wait(PATIENCE)
    with held_before_commit(lambda: append(late, 3), skip=1) as open_one:
        registry.write(change)
        go_on.set()
        first.join(PATIENCE)
        rows = [row for row in kept(late) if row["object_id"] == target]
        xids = [int(row["xid"]) for row in sorted(rows, key=lambda row: row["sequence"])]
        assert xids[-1] < xids[-2]
        snapshot = PgSnapshot.parse(late.events.now().since)
        assert snapshot is not None
        # One that is open has an id between the two.
        assert any(xids[-1] < xid < xids[-2] for xid in snapshot.open)
        late.events.save_cursor("reader", late.events.now())
        clock.advance(KEPT + 1)
        for enough in (True, False):
            prune_events(registry, lambda: enough)  # noqa: B023
            assert are_suffixes(late)
        open_one.finish()
    assert [row["object_id"] for row in kept(late)] == [object_of(late, 3)] * 2


# --- snapshots -------------------------------------------------------------------


def random_history(chance: random.Random) -> Iterator[PgSnapshot]:
    """Snapshots of a server, one after the other."""
    next_xid, running = 10, set[int]()
    while True:
        for _ in range(chance.randrange(4)):
            if running and chance.random() < 0.5:
                running.discard(chance.choice(sorted(running)))
            else:
                running.add(next_xid)
                next_xid += 1
        # Ids above the last that has ended are open anyway, and not listed.
        ended = max((xid for xid in range(10, next_xid) if xid not in running), default=9)
        yield PgSnapshot(ended + 1, frozenset(xid for xid in running if xid <= ended))


@pytest.mark.parametrize("seed", range(20))
def test_snapshots_compare_join_and_cut_like_the_sets_that_they_see(seed: int) -> None:
    chance = random.Random(seed)
    history = random_history(chance)
    taken = [next(history) for _ in range(12)]
    xids = range(5, max(item.xmax for item in taken) + 5)

    def seen(item: PgSnapshot) -> set[int]:
        return {xid for xid in xids if item.sees(xid)}

    for first in taken:
        assert PgSnapshot.parse(str(first)) == first
        limit = chance.choice(xids)
        assert seen(first.below(limit)) == {xid for xid in seen(first) if xid < limit}
        for second in taken:
            cut = second.below(chance.choice(xids))
            assert first.includes(second) == (seen(second) <= seen(first))
            assert first.includes(cut) == (seen(cut) <= seen(first))
            assert seen(first.joined(cut)) == seen(first) | seen(cut)
            assert seen(first.shared(cut)) == seen(first) & seen(cut)
            assert PgSnapshot.parse(str(first.shared(cut))) == first.shared(cut)


# --- random interleavings --------------------------------------------------------


class Follower:
    """A subscriber that reads, leaves some objects for later, and must miss nothing."""

    def __init__(self, book: Book, name: str, chance: random.Random) -> None:
        self._book = book
        self.name = name
        self._chance = chance
        self.taken: dict[int, int] = {}
        book.events.save_cursor(name, self._refresh())

    def _refresh(self) -> Cursor:
        """State and cursor of one moment."""
        cursor, objects = self._book._registry.in_snapshot(lambda reader: objects_of(reader, ("topics", "partitions")))
        self.taken = dict(objects)
        return cursor

    def _take(self, event: Event) -> None:
        assert event.sequence == self.taken.get(event.object_id, 0) + 1, "an event was skipped or came twice"
        self.taken[event.object_id] = event.sequence

    def read(self, limit: int, *, patient: bool = False) -> bool:
        """Read some, take most of them, and write down how far it has come; whether there may be more."""
        cursor, lanes = self._book._registry.read_with(lambda reader: load_progress(reader, self.name))
        assert cursor is not None
        batch = self._book.events.read(cursor, limit)
        left = {lane.object_id: lane for lane in lanes}
        changed: dict[int, Lane] = {}
        for event in batch.events:
            lane = changed.get(event.object_id) or left.get(event.object_id)
            if lane is not None:
                changed[event.object_id] = replace(lane, known_sequence=event.sequence)
            elif not patient and self._chance.random() < 0.2:
                changed[event.object_id] = Lane(event.object_id, event.sequence, event.sequence)
            else:
                self._take(event)
        self._book._registry.write(lambda t: save_progress(t, self.name, batch.cursor, list(changed.values()), []))
        return batch.more

    def catch_up(self, most: int) -> None:
        """Take events that were left."""
        _, lanes = self._book._registry.read_with(lambda reader: load_progress(reader, self.name))
        for lane in lanes:
            wanted = (lane.object_id, lane.next_sequence, lane.known_sequence)
            found = self._book._registry.read_with(
                lambda reader: events_of_object(reader, *wanted, ("partitions", "segments"), most)  # noqa: B023
            )
            assert found, "what was left is gone"
            for event in found:
                self._take(event)
            following = found[-1].sequence + 1
            done = following > lane.known_sequence
            moved = [] if done else [replace(lane, next_sequence=following)]
            gone = [lane.object_id] if done else []
            self._book._registry.write(lambda t: save_lanes(t, self.name, moved, gone))  # noqa: B023


class Passer:
    """Somebody who saves no cursor: nothing is skipped, or it is told."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._cursor = self._book.events.now()
        self._seen: dict[int, int] = {}

    def read(self) -> None:
        try:
            batch = self._book.events.read(self._cursor, 3)
        except CursorExpired:
            self._begin_anew()
            return
        for event in batch.events:
            assert event.sequence == self._seen.get(event.object_id, event.sequence - 1) + 1
            self._seen[event.object_id] = event.sequence
        self._cursor = batch.cursor


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", [MEMORY, SQLITE, POSTGRESQL])
def test_whatever_happens_in_whatever_order_nothing_needed_is_removed(
    make_place: Callable[[str], Place], clock: ManualClock, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    monkeypatch.setattr(pruning, "CHUNK", 7)
    chance = random.Random(seed)
    book = make_place(kind).open(clock=clock, events_kept=5.0)
    book.metadata.create_topic("orders", 6)
    followers = [Follower(book, name, chance) for name in ("one", "two")]
    passer = Passer(book)
    held: list[tuple[int, Any]] = []
    pruned = 0
    with ExitStack() as stack:
        for _ in range(120):
            action = chance.choice(["append", "append", "hold", "read", "read", "catch_up", "prune", "pass", "time"])
            if action == "append":
                append(book, chance.choice([number for number in range(6) if number not in {at for at, _ in held}]))
            elif action == "hold" and kind == POSTGRESQL:
                if held:
                    stack.close()
                    held.clear()
                else:
                    partition = chance.randrange(6)
                    call = held_before_commit(lambda: append(book, partition), skip=1)  # noqa: B023
                    held.append((partition, stack.enter_context(call)))
            elif action == "read":
                chance.choice(followers).read(chance.choice([1, 2, 5, 100]))
            elif action == "catch_up":
                chance.choice(followers).catch_up(chance.choice([1, 3, 100]))
            elif action == "time":
                clock.advance(chance.choice([1, 4, 20]))
            elif action == "prune":
                pruned += prune_events(book._registry, lambda: chance.random() < 0.3)
                assert are_suffixes(book)
            else:
                passer.read()
    clock.advance(20)
    for follower in followers:
        while follower.read(100, patient=True):
            pass
        follower.catch_up(1000)
        last = {row["id"]: row["last_sequence"] for row in records(book, schema.lake_objects)}
        assert {key: value for key, value in follower.taken.items() if value} == last
    pruned += prune_events(book._registry)
    assert kept(book) == []
    assert pruned > 20
    assert book.verify().ok


# --- who is too far behind -------------------------------------------------------


def test_who_is_too_many_events_behind_loses_its_cursor(timed: Book, clock: ManualClock) -> None:
    timed.events.save_cursor("compactor", timed.events.now())
    timed.events.save_cursor("mine", timed.events.now())
    for _ in range(25):
        append(timed)
    assert drop_laggards(timed._registry) == []
    append(timed, 1)
    timed.events.save_cursor("quick", timed.events.now())
    timed._registry.write(lambda t: save_lanes(t, "compactor", [Lane(1, 1, 1)], []))
    assert drop_laggards(timed._registry) == ["compactor", "mine"]
    assert timed.events.load_cursor("compactor") is None
    assert timed.events.load_cursor("quick") is not None
    assert records(timed, schema.deliveries) == []
    # Whoever delivers to a component just now is asked to begin anew; nobody delivers to others.
    requests = timed._registry.read_with(list_requests)
    assert [(request.kind, request.component) for request in requests] == [("refresh", "compactor")]
    assert drop_laggards(timed._registry) == []
    clock.advance(KEPT + 1)
    assert prune_events(timed._registry) > 50


def test_who_is_behind_for_too_long_loses_its_cursor(timed: Book, clock: ManualClock) -> None:
    timed.events.save_cursor("mine", timed.events.now())
    clock.advance(10_000)
    # There was nothing to be read.
    assert drop_laggards(timed._registry) == []
    append(timed)
    clock.advance(1000)
    assert drop_laggards(timed._registry) == []
    clock.advance(1)
    assert drop_laggards(timed._registry) == ["mine"]


def test_who_leaves_something_for_too_long_loses_its_cursor(timed: Book, clock: ManualClock) -> None:
    append(timed)
    stalled = object_of(timed, 0)
    position = timed.events.now()
    timed._registry.write(lambda t: save_progress(t, "updater", position, [Lane(stalled, 2, 3)], []))
    clock.advance(990)
    append(timed, 1)
    timed.events.save_cursor("updater", timed.events.now())
    assert drop_laggards(timed._registry) == []
    clock.advance(20)
    assert drop_laggards(timed._registry) == ["updater"]
    assert records(timed, schema.deliveries) == []
    assert prune_events(timed._registry) > 0
    assert stalled not in {row["object_id"] for row in kept(timed)}


def test_who_leaves_too_much_loses_its_cursor(timed: Book) -> None:
    for _ in range(30):
        append(timed)
    stalled = object_of(timed, 0)
    position = timed.events.now()
    timed._registry.write(lambda t: save_progress(t, "updater", position, [Lane(stalled, 20, 61)], []))
    assert drop_laggards(timed._registry) == []
    timed._registry.write(lambda t: save_progress(t, "updater", position, [Lane(stalled, 10, 61)], []))
    assert drop_laggards(timed._registry) == ["updater"]


# --- commit rows -----------------------------------------------------------------


def commits(book: Book, **where: Any) -> list[dict[str, Any]]:
    return [row for row in records(book, schema.commits, **where) if row["kind"] != "fence"]


def age(book: Book, seconds: float) -> None:
    """Make every commit row older: it is the database's own clock that counts."""
    by = round(seconds * 1000)
    sql = f"UPDATE commits SET opened_at = opened_at - {by}, finished_at = finished_at - {by}"
    book._registry.write(lambda transaction: transaction._connection.execute(sql))


def test_finished_commits_go_when_nobody_can_ask_for_them(book: Book) -> None:
    book.metadata.create_topic("orders", 2)
    append(book)
    turn = book.metadata.claim_append("orders", 1)
    turn = book.metadata.append_segment(turn, describe(partition=1)).turn
    table = numbers(book, "t", [1], [2])
    with table.update_schema() as update:
        update.add_column("x", "INT")
    book.lake.publish(table.record)
    table.delete("id = 1")
    kinds = {row["kind"] for row in commits(book)}
    assert {"append", "table", "schema", "insert", "publish"} <= kinds
    assert prune_commits(book._registry)["commits"] == 0
    age(book, 3700)
    prune_commits(book._registry)
    # The attempts' folders have not been swept quiet, and the turn is held.
    assert {row["kind"] for row in commits(book)} == kinds - {"table", "schema"}
    assert [row["state"] for row in commits(book, kind="append")] == ["open"]
    attempts = {row["commit_id"] for row in records(book, schema.inserts)}
    assert {row["id"] for row in commits(book) if row["kind"] != "append"} == attempts
    book._registry.write(lambda transaction: transaction._connection.execute("DELETE FROM inserts"))
    prune_commits(book._registry)
    assert {row["kind"] for row in commits(book)} == kinds - {"table", "schema", "publish"}
    age(book, DAY)
    prune_commits(book._registry)
    # What a turn names is never taken for forsaken.
    assert [(row["kind"], row["state"]) for row in commits(book)] == [("append", "open")]
    assert book.metadata.append_segment(turn, describe(partition=1, base=100)).segments[0].base_offset == 100


def test_what_was_written_long_ago_is_sound_without_its_commit_rows(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock)
    book.metadata.create_topic("orders", 2)
    append(book)
    numbers(book, "t", [1], [2]).delete("id = 1")
    book._registry.write(lambda transaction: transaction._connection.execute("DELETE FROM inserts"))
    assert prune_commits(book._registry)["commits"] > 3
    assert commits(book) == []
    assert book.verify().ok


def test_that_an_attempt_was_aborted_is_remembered_for_long(book: Book) -> None:
    table = numbers(book, "t")
    aborted = book._registry.open_commit("insert")
    assert book._registry.settle(aborted) == "aborted"
    age(book, 29 * DAY)
    prune_commits(book._registry)
    assert book._registry.settle(aborted) == "aborted"
    # A file that has an aborted commit must not exist. If one does, the commit is what tells of it.
    insert(table, {"id": 1})
    (file,) = records(book, schema.table_files)
    book._registry.write(
        lambda transaction: transaction._connection.execute(
            f"UPDATE commits SET state = 'aborted' WHERE id = '{file['commit_id']}'"
        )
    )
    book._registry.write(lambda transaction: transaction._connection.execute("DELETE FROM inserts"))
    age(book, 31 * DAY)
    prune_commits(book._registry)
    with pytest.raises(CommitNotFound):
        book._registry.settle(aborted)
    assert [row["id"] for row in commits(book)] == [file["commit_id"]]
    assert {finding.check for finding in book.verify().findings} >= {"commits"}


def test_a_commit_that_is_gone_is_missed_only_of_what_is_new(book: Book) -> None:
    book.metadata.create_topic("orders")
    append(book)
    numbers(book, "t", [1])
    delete = "DELETE FROM commits WHERE kind <> 'fence'"
    book._registry.write(lambda transaction: transaction._connection.execute(delete))
    missing = [finding for finding in book.verify().findings if finding.check == "commits"]
    assert len(missing) == 2
    assert {finding.what for finding in missing} == {"its commit is missing"}


def test_writers_that_died_before_they_used_their_commit_are_settled(book: Book) -> None:
    book.metadata.create_topic("orders", 2)
    dead = book._registry.open_commit("append")
    turn = book.metadata.claim_append("orders", 1)
    numbers(book, "t", [1])
    open_attempt = new_id()
    book._registry.write(lambda transaction: open_commit_row(transaction, open_attempt, "insert"))
    sql = f"INSERT INTO inserts (commit_id, table_id, opened_at, alive_until) VALUES ('{open_attempt}', 1, 0, 0)"
    book._registry.write(lambda transaction: transaction._connection.execute(sql))
    age(book, DAY - 60)
    assert prune_commits(book._registry)["aborted"] == 0
    age(book, 120)
    living = book._registry.open_commit("append")
    assert prune_commits(book._registry)["aborted"] == 1
    states = {row["id"]: row["state"] for row in commits(book)}
    assert states[dead] == "aborted"
    # A sweep settles the attempt, and the next holder the turn.
    assert {states[item] for item in (living, turn.commit_id, open_attempt)} == {"open"}
    age(book, 3700)
    prune_commits(book._registry)
    assert dead not in {row["id"] for row in commits(book)}


def test_one_that_is_just_being_committed_is_not_waited_for(
    make_place: Callable[[str], Place], clock: ManualClock
) -> None:
    # To the database its clock is slow by years, so that all it opens looks forsaken.
    book = make_place(POSTGRESQL).open(clock=clock)
    book.metadata.create_topic("orders", 2)
    with held_before_commit(lambda: append(book), skip=1) as slow:
        assert [row["state"] for row in commits(book)] == ["open"]
        assert prune_commits(book._registry)["aborted"] == 0
        slow.finish()
    assert [segment.base_offset for segment in book.metadata.get_segments("orders", 0)] == [0]


def test_an_append_that_is_repeated_after_its_commit_row_is_gone_has_landed_once(book: Book) -> None:
    book.metadata.create_topic("orders")
    turn = book.metadata.claim_append("orders", 0)
    segment = describe(base=0)
    book.metadata.append_segment(turn, segment)
    age(book, 3700)
    assert prune_commits(book._registry)["commits"] == 1
    # Whoever was frozen for that long repeats the call.
    again = book.metadata.append_segment(turn, segment)
    assert again.duplicate
    assert again.segments[0].base_offset == 0
    assert book.metadata.get_partition("orders", 0).high_watermark == 100  # type: ignore[union-attr]
    with pytest.raises(AppendTurnLost):
        book.metadata.append_segment(turn, describe(base=0))


# --- history -----------------------------------------------------------------------


def gone(counts: dict[str, int]) -> dict[str, int]:
    return {what: count for what, count in counts.items() if count}


def test_history_that_is_old_goes(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock, maintenance_kept=1000.0)
    book.metadata.create_topic("orders", 4)
    registry = book._registry
    events = book.events.read(book.events.beginning()).events
    for event in events[:3]:
        registry.write(lambda t: park(t, "compactor", event, 30, "it fails"))  # noqa: B023 - called at once
    registry.write(lambda t: note_work(t, "janitor", None, "sweep", "it was due", DONE, {}, clock.now_ms()))
    clock.advance(10)
    for row in records(book, schema.dead_letters):
        registry.write(lambda t: redrive(t, row["id"]))  # noqa: B023 - called at once
    registry.write(lambda t: park(t, "compactor", events[4], 30, "it fails, and nobody looks"))
    assert set(prune_history(registry).values()) == {0}
    clock.advance(1001)
    assert gone(prune_history(registry)) == {"work": 1, "letters": 3}
    assert [row["error"] for row in records(book, schema.dead_letters)] == ["it fails, and nobody looks"]
    clock.advance(30 * DAY)
    assert gone(prune_history(registry)) == {"letters": 1}
