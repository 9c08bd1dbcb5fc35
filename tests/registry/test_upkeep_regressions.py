"""What once went wrong in the upkeep of a book, and holds by now."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pytest

from astha_subscribers import (
    PATIENCE,
    QUICK,
    TOPIC,
    Failing,
    Recorder,
    append,
    asked,
    begin_here,
    delivering,
    lanes,
    object_of,
    until,
)
from books import POSTGRESQL, SQLITE, Place
from compacting import by_arrow
from held import held_before_commit
from lake import ids, numbers, own_warehouse, records, run_sql  # noqa: F401
from lakebook import Book, failpoints
from lakebook.cdc import breaker
from lakebook.cdc.astha import Astha
from lakebook.clock import ManualClock
from lakebook.components import snapshotter as snapshotter_module
from lakebook.components.snapshotter import Snapshotter
from lakebook.errors import RegistryBusy, StorageUnavailable, TableNotFound
from lakebook.registry import deliveries, schema
from lakebook.registry.events import Cursor
from lakebook.registry.maintenance import DONE, REFRESH, TAG, ask, list_pauses, list_work, meet, note_work, plain
from lakebook.registry.pruning import MOVE_HORIZON, drop_laggards, prune_commits, prune_events, prune_history
from lakebook.registry.schema import MAX_BIGINT

DAY = 86_400
#: As many requests as one look takes, and a few more.
MANY = 1001
LONE_SURROGATE = "\ud800"

on_both = pytest.mark.parametrize("place", [SQLITE, POSTGRESQL], indirect=True)
on_disk = pytest.mark.parametrize("place", [SQLITE], indirect=True)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def book(place: Place) -> Book:
    return with_topic(place, **QUICK)


def with_topic(place: Place, **settings: Any) -> Book:
    """A book with a topic of six partitions."""
    book = place.open(**settings)
    book.metadata.create_topic(TOPIC, 6)
    return book


def ask_for_tags(book: Book, number: int) -> None:
    """Ask the snapshotter for something, so many times."""
    book._registry.write(
        lambda transaction: [ask(transaction, TAG, "snapshotter", 1, {"snapshot_id": n}) for n in range(number)]
    )


def ask_for_refresh(book: Book, name: str, object_id: int = 0) -> None:
    book._registry.write(lambda transaction: ask(transaction, REFRESH, name, object_id))


def beats(book: Book) -> int:
    """How often whoever delivers has renewed its turn."""
    state = book._registry.read_with(deliveries.scheduler_state)
    return 0 if state is None else state.beat


def until_beats(book: Book, number: int) -> None:
    """Wait until the turn was renewed so many times more."""
    before = beats(book)
    until(lambda: beats(book) >= before + number)


# --- requests ----------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("others", [MANY - 101, MANY])
def test_a_refresh_does_not_wait_behind_requests_to_others(book: Book, others: int) -> None:
    ask_for_tags(book, others)
    recorder = Recorder()
    begin_here(book)
    with delivering(book, recorder):
        ask_for_refresh(book, "recorder")
        until(lambda: len(recorder.refreshes) >= 6)
        until(lambda: not records(book, schema.requests, component="recorder"))
    assert len(records(book, schema.requests)) == others


@on_both
def test_a_request_that_is_asked_again_while_it_is_being_met_stays(place: Place, clock: ManualClock) -> None:
    # Also where the clock stands still between the two.
    book = place.open(clock=clock)
    registry = book._registry
    ask_for_refresh(book, "compactor", 7)
    seen = asked(book)
    ask_for_refresh(book, "compactor", 7)
    registry.write(lambda transaction: meet(transaction, seen))
    (again,) = asked(book)
    assert again.key == seen[0].key
    assert again.requested_at > seen[0].requested_at
    registry.write(lambda transaction: meet(transaction, [again]))
    assert asked(book) == []


@on_disk
def test_one_request_is_one_refresh_however_often_it_cannot_be_written_down(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    book = with_topic(place, **QUICK, lock_timeout=0.05, retry_attempts=1)
    other = place.open()
    recorder = Recorder()
    begin_here(book)

    def failures() -> int:
        return sum("cannot be written down now" in message for message in caplog.messages)

    with ExitStack() as stack:

        def ask_and_hold() -> None:
            # Before the first look for requests: nothing can be written down from then on.
            ask_for_refresh(book, "recorder")
            writing = held_before_commit(lambda: run_sql(other, "UPDATE book SET epoch = epoch"))
            stack.enter_context(writing)

        with delivering(book, recorder, on_claimed=ask_and_hold) as astha:
            until(lambda: failures() >= 4)
            assert len(asked(book)) == 1
            stack.close()
            until(lambda: not asked(book))
            assert astha.wait_idle(PATIENCE)
    objects = [refresh.object_id for refresh in recorder.refreshes]
    assert sorted(objects) == sorted(object_of(book, partition) for partition in range(6))


# --- words of any kind ---------------------------------------------------------------


class Strange:
    """An object that is none of JSON's kinds."""

    def __str__(self) -> str:
        return f"strange\0{LONE_SURROGATE}"


def test_plain_leaves_what_every_database_can_keep_and_makes_texts_of_the_rest() -> None:
    for value in (None, True, False, 0, -1, 0.5, "", "été", MAX_BIGINT, -MAX_BIGINT):
        assert plain(value) == value
        assert type(plain(value)) is type(value)
    assert plain("a\0b") == "a\\0b"
    assert plain(LONE_SURROGATE) == "\\ud800"
    assert plain(Strange()) == "strange\\0\\ud800"
    assert plain(2**64) == str(2**64)
    assert plain(-(2**64)) == str(-(2**64))
    assert plain(b"x") == "b'x'"
    assert plain({1: (2, {3}), "a\0": [Strange()]}) == {"1": [2, [3]], "a\\0": ["strange\\0\\ud800"]}
    long = plain("x" * 100_000)
    assert set(long) == {"x"}
    assert len(long) == 1000


@on_both
def test_work_is_noted_whatever_its_words(book: Book) -> None:
    odd = {"nul\0": "a\0b", "lone": LONE_SURROGATE, "long": "x" * 100_000, "big": 2**64, "strange": Strange()}
    book._registry.write(
        lambda transaction: note_work(transaction, "janitor", None, "look", f"\0{LONE_SURROGATE}", DONE, odd, 0)
    )
    (found,) = book._registry.read_with(lambda reader: list_work(reader, "janitor", None, MAX_BIGINT, 10))
    assert found.reason == "\\0\\ud800"
    assert found.detail == plain(odd)
    assert json.dumps(found.detail).isascii()


@on_both
@pytest.mark.parametrize("text", [LONE_SURROGATE, "a\0b"], ids=["surrogate", "nul"])
def test_odd_words_of_a_component_do_not_stop_who_delivers(book: Book, text: str) -> None:
    recorder = Recorder()
    with delivering(book, recorder, describe=lambda: {"state": {"compactor": {"error": text}}}) as astha:
        until_beats(book, 3)
        append(book)
        assert astha.wait_idle(PATIENCE)
    assert not book._registry.read_with(lambda reader: list_work(reader, "astha", None, MAX_BIGINT, 10))
    state = book._registry.read_with(deliveries.scheduler_state)
    assert state is not None
    assert state.token == 1
    assert state.status["state"] == {"compactor": {"error": plain(text)}}


# --- pauses --------------------------------------------------------------------------


@on_both
def test_a_paused_table_that_is_dropped_leaves_no_pause(book: Book) -> None:
    numbers(book, "numbers", [1])
    numbers(book, "others", [1])
    for name in ("numbers", "others"):
        book.pause("compactor", table=name, reason="x")
    book.pause("janitor", reason="y")
    book.tables.drop("numbers")
    with pytest.raises(TableNotFound):
        book.resume("compactor", table="numbers")
    assert sum("paused" in warning for warning in book.overview().warnings) == 2
    prune_history(book._registry)
    left = [(pause.component, pause.table_id) for pause in book._registry.read_with(list_pauses)]
    assert left == [("compactor", book.table("others").id), ("janitor", None)]


@on_disk
def test_tables_on_which_the_snapshotter_rests_do_not_keep_it_busy(
    place: Place, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotter_module, "TABLES_PER_ROUND", 2)
    book = place.open(clock=clock)
    for name in ("a", "b", "c"):
        numbers(book, name, [1]).publish()
        book.pause("snapshotter", table=name, reason="x")
    snapshotter = Snapshotter(book.lake)
    assert _rounds(snapshotter) == [2, 1]
    clock.advance(snapshotter.due())
    # A while later they are looked at once more.
    assert sum(_rounds(snapshotter)) == 3


def _rounds(snapshotter: Snapshotter) -> list[int]:
    """How many tables each round looks at, as long as the next one is due at once."""
    found = [snapshotter.run_once()]
    while snapshotter.due() == 0 and len(found) < 10:
        found.append(snapshotter.run_once())
    return found


# --- who is left behind --------------------------------------------------------------


@on_disk
def test_lanes_of_who_has_no_cursor_hold_no_events(place: Place, clock: ManualClock) -> None:
    book = with_topic(place, clock=clock, events_kept=0.0, events_oldest=1.0)
    append(book, 0, 5)
    registry = book._registry
    lane = deliveries.Lane(object_of(book, 0), 1, 5)
    begin_here(book, "gone")
    registry.write(lambda transaction: deliveries.save_lanes(transaction, "gone", [lane], []))
    book.events.delete_cursor("gone")
    clock.advance(2)
    assert drop_laggards(registry) == []
    assert prune_events(registry) > 0
    assert records(book, schema.events) == []
    assert lanes(book, "gone") == []


@on_disk
@pytest.mark.parametrize("name", ["recorder", "orchestrator"])
def test_who_is_dropped_while_it_is_delivered_to_is_told_of_everything_after_a_kill(
    place: Place, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 60.0)
    book = with_topic(place, clock=clock, astha_lease=0.5, events_kept=0.0, events_oldest=1.0)
    registry = book._registry
    ask_for_tags(book, MANY)
    poisoned = object_of(book, 0)
    begin_here(book, name)
    first = Recorder(name, act=Failing(objects=[poisoned]), take_state=Failing(objects=[poisoned]))
    with delivering(book, first):
        append(book, 0)
        until(lambda: [lane.attempts for lane in lanes(book, name)] == [1])
        # Not as long as the pause until the next attempt: of that lane there is nothing new to write down.
        clock.advance(2)
        assert drop_laggards(registry) == [name]
        append(book, 1)
        until(lambda: book.events.load_cursor(name) is not None)
        cursor, left = registry.in_snapshot(lambda reader: deliveries.load_progress(reader, name))
    # As if it had been killed then: nothing more was written down.
    registry.write(lambda transaction: deliveries.forget_progress(transaction, name))
    if cursor is not None:
        registry.write(lambda transaction: deliveries.save_progress(transaction, name, cursor, left, []))
    second = Recorder(name)
    with delivering(book, second) as astha:
        clock.advance(60)
        assert astha.wait_idle(PATIENCE)
    told = {event.object_id for event in second.events} | {refresh.object_id for refresh in second.refreshes}
    assert poisoned in told


@on_disk
def test_a_horizon_that_is_ahead_of_every_cursor_is_tried_with_pauses(
    place: Place, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    book = with_topic(place, clock=clock, **QUICK)
    now = book.events.now()
    ahead = str(Cursor(now.epoch, now.kind, after=10**9))
    book._registry.write(lambda transaction: transaction.run(MOVE_HORIZON, ahead))
    recorder = Recorder()

    def anew() -> int:
        return sum("takes everything anew" in message for message in caplog.messages)

    with delivering(book, recorder) as astha:
        until(lambda: anew() >= 2)
        append(book)
        until_beats(book, 3)
        # The first time at once; then the clock would have to move.
        assert anew() == 2
        clock.advance(10)
        append(book)
        until(lambda: anew() >= 3)
        book._registry.write(lambda transaction: transaction.run(MOVE_HORIZON, str(now)))
        clock.advance(10)
        assert astha.wait_idle(PATIENCE)
    assert {refresh.object_id for refresh in recorder.refreshes} == {object_of(book, number) for number in range(6)}


@on_disk
def test_one_object_whose_storage_fails_delays_no_other(place: Place, clock: ManualClock) -> None:
    # The clock stands still: whoever had to wait for a pause would wait for ever.
    book = with_topic(place, clock=clock, astha_lease=0.5)
    failing = Failing(error=StorageUnavailable("it is slow", on="one object"), objects=[object_of(book, 0)])
    recorder = Recorder(act=failing)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book, 0)
        for number in range(1, 7):
            until(lambda: failing.failures >= number and _rests(astha))  # noqa: B023
            append(book, 1)
            until(lambda: len(recorder.events) == number and _rests(astha))  # noqa: B023
            assert astha.status()["subscribers"]["recorder"]["breaker"] == "closed"
            clock.advance(60)
            # Whoever asks wakes it: it looks at the clock.
            assert not astha.wait_idle(0)
    assert set(recorder.sequences()) == {object_of(book, 1)}


def _rests(astha: Astha) -> bool:
    """Whether one object waits for its next attempt, and nothing is under way."""
    status = astha.status()["subscribers"]["recorder"]
    return bool(status["failing"] == status["objects"] == 1 and status["running"] == 0)


@on_both
def test_very_many_lanes_are_written_down_replaced_and_forgotten(place: Place) -> None:
    book = place.open()
    registry = book._registry
    names = ("first", "second")
    for attempts in (0, 3):
        many = [deliveries.Lane(number, 1, 1, True, attempts) for number in range(1, 3001)]
        for name in names:
            registry.write(lambda transaction: deliveries.save_lanes(transaction, name, many, []))  # noqa: B023
        for name in names:
            assert sorted(lanes(book, name), key=lambda lane: lane.object_id) == many
    registry.write(lambda transaction: deliveries.save_lanes(transaction, "first", [], range(1, 3000)))
    assert [lane.object_id for lane in lanes(book, "first")] == [3000]
    assert len(lanes(book, "second")) == 3000


# --- writers, while others look after the table --------------------------------------


@on_disk
def test_an_appender_goes_on_whose_commit_was_forgotten_before_it_could_ask(
    place: Place, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = place.open(clock=clock)
    table = numbers(book, "t")
    appender = table.appender(max_rows=1000, max_age=100 * DAY)
    appender.append({"id": 1})
    away = Failing(error=RegistryBusy("it does not answer", on="test"))
    with monkeypatch.context() as patched:
        patched.setattr(book.lake.registry, "settle", away)
        with failpoints.armed("change.committed", away), pytest.raises(RegistryBusy):
            appender.flush()
    # It has landed, though it does not know. Meanwhile others sweep up behind it, and forget it.
    assert ids(table) == [1]
    run_sql(book, "DELETE FROM inserts")
    clock.advance(2 * DAY)
    assert prune_commits(book._registry)["commits"] > 0
    appender.append({"id": 2})
    appender.close()
    assert ids(table) == [1, 2]


@on_disk
@pytest.mark.parametrize("properties", [{}, {"commit.retry.num-retries": "0"}], ids=["as usual", "no retries"])
def test_another_engine_appends_though_the_table_was_compacted_since_it_was_loaded(
    place: Place, properties: dict[str, str]
) -> None:
    book = place.open()
    table = numbers(book, "t", *([number] for number in range(6)), properties=properties)
    loaded = book.catalog().load_table((table.namespace, table.name))
    assert by_arrow(book, table) is not None
    loaded.append(pa.table({"id": pa.array([100], pa.int64())}))
    assert ids(table) == [*range(6), 100]
