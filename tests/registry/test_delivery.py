"""Astha delivers what is committed: typed, routed, in order per object, and whatever fails stays with whom it is."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest

from astha_subscribers import (
    PATIENCE,
    QUICK,
    TOPIC,
    Failing,
    Gate,
    Recorder,
    all_events,
    append,
    asked,
    begin_here,
    delivering,
    lanes,
    object_of,
    sequences_of,
    until,
)
from books import POSTGRESQL, SQLITE, Place
from lake import in_memory, insert, numbers, records
from lakebook import Book, failpoints
from lakebook.cdc import delivery as delivery_module
from lakebook.cdc.astha import Astha, Role, _write_down
from lakebook.cdc.capture import Capture, Router
from lakebook.cdc.delivery import ASKED, BATCH, GIVEN_UP, LEFT_BEHIND, PARKED, START, Delivery
from lakebook.cdc.rows import ROWS
from lakebook.cdc.subscribers import SUBSCRIPTIONS, Event, Refresh, Subscriber
from lakebook.clock import ManualClock
from lakebook.errors import DeadLetterNotFound, EpochChanged, RegistryUnavailable, SchedulerLost
from lakebook.registry import deliveries, schema
from lakebook.registry.epoch import begin_epoch
from lakebook.registry.events import EventLog
from lakebook.registry.maintenance import REFRESH, ask, list_work, meet
from lakebook.registry.pruning import drop_laggards, prune_events

#: Kinds of books whose registry other books can open too.
on_disk = pytest.mark.parametrize("place", [SQLITE], indirect=True)


@pytest.fixture
def book(place: Place) -> Book:
    book = place.open(**QUICK)
    book.metadata.create_topic(TOPIC, 6)
    return book


def letters(book: Book) -> list[deliveries.DeadLetter]:
    return book._registry.read_with(lambda reader: deliveries.list_dead_letters(reader, 0, 100))


def in_order(found: dict[int, list[int]]) -> bool:
    return all(numbers == sorted(set(numbers)) for numbers in found.values())


# --- what an event is --------------------------------------------------------------


def test_every_captured_table_has_typed_rows_after_and_before_the_change(book: Book) -> None:
    everything = Recorder(tables=tuple(ROWS))
    begin_here(book)
    with delivering(book, everything) as astha:
        book.metadata.create_topic("clicks", 2)
        append(book, 0, 3)
        book.metadata.commit_offset("g", TOPIC, 0, 1)
        book.metadata.commit_offset("g", TOPIC, 0, 2)
        book.metadata.update_topic_config("clicks", {"segment.ms": "5"})
        book.metadata.delete_segments_before(TOPIC, 0, 2)
        book.metadata.delete_consumer_group("g")
        table = numbers(book, "numbers", [1, 2], [3])
        table.delete("id = 3")
        table.publish()
        book.tables.drop("numbers")
        assert astha.wait_idle(PATIENCE)
    found = everything.events
    assert {event.table for event in found} == set(ROWS)
    assert {event.operation for event in found} == {"insert", "update", "delete"}
    for event in found:
        captured = event.captured
        assert type(event.data) is ROWS[event.table]
        shown = captured.row_after if captured.operation != "delete" else captured.row_before
        assert shown is not None
        assert {name: getattr(event.data, name) for name in shown} == dict(shown)
        if event.operation == "insert":
            assert event.before is None
        else:
            assert type(event.before) is ROWS[event.table]
            assert captured.row_before is not None
            assert {name: getattr(event.before, name) for name in captured.row_before} == dict(captured.row_before)
    assert [event.captured for event in found if event.table == "segments" and event.operation == "delete"]
    versions = [event.data.version for event in found if event.table == "tables"]
    assert versions == sorted(versions)


def test_a_row_of_a_newer_schema_is_read_without_what_is_not_known() -> None:
    known = {"id": 1, "table_id": 2, "row_count": 3, "deleted_rows": 0, "file_count": 1, "total_size": 4}
    times = {"last_modified": 5, "created_at": 6, "updated_at": 7}
    from lakebook.cdc.rows import row_reader

    row = row_reader("table_stats")({**known, **times, "of_tomorrow": True})
    assert row.row_count == 3
    assert not hasattr(row, "of_tomorrow")


# --- routing -----------------------------------------------------------------------


def test_a_subscriber_sees_its_tables_only(book: Book) -> None:
    subscribers = [Recorder(name, tables) for name, tables in SUBSCRIPTIONS.items()]
    streams = Recorder("streams", ("segments",))
    begin_here(book, "streams", *SUBSCRIPTIONS)
    before = len(all_events(book))
    with delivering(book, streams, *subscribers) as astha:
        numbers(book, "numbers", [1], [2]).publish()
        append(book)
        assert astha.wait_idle(PATIENCE)
    log = all_events(book)[before:]
    for subscriber in (streams, *subscribers):
        expected = {event.id for event in log if event.table in subscriber.subscribed_tables}
        assert {event.id for event in subscriber.events} == expected
        assert {event.table for event in subscriber.events} == {
            # The topic was created before anybody began.
            table
            for table in subscriber.subscribed_tables
            if table != "topics"
        }


def test_the_router_answers_by_table() -> None:
    router = Router([Recorder("a", ("segments", "topics")), Recorder("b", ("segments",))])
    assert router.route("segments") == ("a", "b")
    assert router.route("topics") == ("a",)
    assert router.route("tables") == ()


# --- order, and nobody waits for another -------------------------------------------


def test_events_of_each_object_come_in_order_while_many_write(book: Book) -> None:
    subscribers = [Recorder(f"s{number}", ("segments", "partitions"), workers=3) for number in range(3)]
    begin_here(book, "s0", "s1", "s2")
    before = {event.id for event in all_events(book)}

    def write(partition: int) -> None:
        chance = random.Random(partition)
        for _ in range(25):
            append(book, partition, chance.randint(1, 5))

    with delivering(book, *subscribers) as astha:
        writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(PATIENCE)
        assert astha.wait_idle(PATIENCE)
    expected = sequences_of(event for event in all_events(book) if event.id not in before)
    assert len(expected) == 4
    for subscriber in subscribers:
        assert subscriber.sequences() == expected


@in_memory
def test_an_object_that_takes_long_delays_no_other_of_the_same_subscriber(book: Book) -> None:
    slow = Gate(objects=[object_of(book, 0)])
    recorder = Recorder(act=slow, timeout=PATIENCE)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book, 0)
        until(lambda: slow.held)
        append(book, 0)
        for partition in (1, 2, 3):
            append(book, partition)
        until(lambda: len(recorder.events) == 3)
        assert object_of(book, 0) not in recorder.sequences()
        slow.opened.set()
        assert astha.wait_idle(PATIENCE)
    assert recorder.sequences() == sequences_of(all_events(book, ["segments"]))


@in_memory
def test_a_subscriber_that_takes_long_delays_no_other(book: Book) -> None:
    slow = Gate()
    late, prompt = Recorder("late", act=slow, timeout=PATIENCE), Recorder("prompt")
    begin_here(book, "late", "prompt")
    with delivering(book, late, prompt) as astha:
        append(book, 0)
        until(lambda: slow.held)
        for partition in range(6):
            append(book, partition, 3)
        until(lambda: len(prompt.events) == 19)
        assert late.events == []
        slow.opened.set()
        assert astha.wait_idle(PATIENCE)
    assert late.sequences() == prompt.sequences()


@in_memory
def test_poisoned_objects_delay_no_other_of_the_same_subscriber(place: Place) -> None:
    # With the pauses of every day: whoever had to wait for them would wait long.
    book = place.open(astha_lease=0.5)
    book.metadata.create_topic(TOPIC, 6)
    poison = Failing(objects=[object_of(book, 0), object_of(book, 1)])
    recorder = Recorder(act=poison)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book, 0)
        append(book, 1)
        until(lambda: poison.failures >= 8)
        append(book, 2, 5)
        until(lambda: len(recorder.events) == 5)
        assert astha.status()["subscribers"]["recorder"]["breaker"] == "closed"
        append(book, 3)
        until(lambda: len(recorder.events) == 6)


@in_memory
def test_a_burst_is_handed_over_in_batches(book: Book) -> None:
    slow = Gate(times=1)
    recorder = Recorder(act=slow, timeout=PATIENCE)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book)
        until(lambda: slow.held)
        append(book, 0, 3 * BATCH)
        slow.opened.set()
        assert astha.wait_idle(PATIENCE)
    assert sum(len(call) for call in recorder.calls) == 3 * BATCH + 1
    assert len(recorder.calls) <= 8
    assert max(len(call) for call in recorder.calls) == BATCH


@in_memory
def test_events_of_an_object_that_come_within_its_linger_are_handed_over_together(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock, **QUICK)
    book.metadata.create_topic(TOPIC, 2)
    lingering, prompt = Recorder("lingering", linger=10.0), Recorder("prompt")
    begin_here(book, "lingering", "prompt")
    with delivering(book, lingering, prompt) as astha:
        for number in range(5):
            append(book, 0)
            until(lambda: len(prompt.events) == number + 1)  # noqa: B023
        clock.advance(9)
        append(book, 1)
        until(lambda: astha.status()["subscribers"]["lingering"]["objects"] == 2)
        assert lingering.calls == []
        clock.advance(1)
        append(book, 1)
        until(lambda: len(lingering.calls) == 1)
        assert [event.sequence for event in lingering.calls[0]] == prompt.sequences()[object_of(book, 0)]
        assert len(lingering.calls[0]) == 5
        until(lambda: len(prompt.events) == 7)
        clock.advance(10)
        assert astha.wait_idle(PATIENCE)
    assert [len(call) for call in lingering.calls] == [5, 2]


# --- attempts ----------------------------------------------------------------------


def check_undisturbed(book: Book, other: Recorder) -> None:
    """It was told of everything, each once, whatever became of others."""
    assert other.sequences() == sequences_of(all_events(book, ["segments"]))
    assert (other.tried, other.refreshes) == (other.calls, [])


@pytest.mark.parametrize("times", [1, 5, 29])
def test_an_event_that_fails_up_to_the_last_attempt_is_taken(book: Book, times: int) -> None:
    failing = Failing(times)
    recorder, other = Recorder(act=failing), Recorder("other")
    begin_here(book, "recorder", "other")
    with delivering(book, recorder, other) as astha:
        append(book)
        assert astha.wait_idle(PATIENCE)
    check_undisturbed(book, other)
    assert failing.failures == times
    assert len(recorder.events) == 1
    assert len(recorder.tried) == times + 1
    assert (letters(book), recorder.refreshes, lanes(book)) == ([], [], [])


def test_an_event_that_always_fails_is_parked_once_its_object_refreshed_and_what_follows_delivered(book: Book) -> None:
    poisoned = object_of(book, 0)
    poison = Failing(error=ValueError("no such thing"), objects=[poisoned])
    recorder = Recorder(act=lambda events: poison(events) if events[0].data.base_offset == 1 else None)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book, 0)
        until(lambda: recorder.events)
        append(book, 0)
        until(lambda: recorder.refreshes)
        append(book, 0)
        append(book, 1)
        assert astha.wait_idle(PATIENCE)
    (letter,) = letters(book)
    event = next(event for event in all_events(book, ["segments"]) if (event.row_after or {})["base_offset"] == 1)
    assert (letter.subscriber, letter.event, letter.attempts) == ("recorder", event, 30)
    assert letter.error == "ValueError: no such thing"
    assert letter.redriven_at is None
    assert poison.failures == 30
    assert [(item.object_id, item.kind, item.reason) for item in recorder.refreshes] == [
        (poisoned, "partition", PARKED)
    ]
    offsets = [event.data.base_offset for event in recorder.events if event.object_id == poisoned]
    assert offsets == [0, 2]
    assert lanes(book) == []


@in_memory
def test_the_one_that_makes_a_batch_fail_is_found_and_alone_parked(book: Book) -> None:
    slow = Gate(times=1)

    def act(events: Sequence[Event[Any]]) -> None:
        slow(events)
        if any(event.data.base_offset == 7 for event in events):
            raise ValueError("seven")

    recorder = Recorder(act=act, timeout=PATIENCE)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book)
        until(lambda: slow.held)
        append(book, 0, 20)
        slow.opened.set()
        assert astha.wait_idle(PATIENCE)
    (letter,) = letters(book)
    assert letter.event.row_after is not None
    assert (letter.event.row_after["base_offset"], letter.attempts) == (7, 30)
    # Those before it were taken one by one; the refresh covers those behind it.
    assert [event.data.base_offset for event in recorder.events] == list(range(7))
    assert [refresh.reason for refresh in recorder.refreshes] == [PARKED]


def test_an_event_is_parked_once_also_if_nobody_knew_whether_it_was(book: Book) -> None:
    append(book, 0)
    event = all_events(book, ["segments"])[0]
    for _ in range(2):
        book._registry.write(lambda transaction: deliveries.park(transaction, "recorder", event, 30, "poison"))
    book._registry.write(lambda transaction: deliveries.park(transaction, "other", event, 30, "poison"))
    assert [letter.subscriber for letter in letters(book)] == ["recorder", "other"]
    assert book._registry.read_with(deliveries.count_dead_letters) == {"recorder": 1, "other": 1}


@in_memory
def test_the_pauses_between_attempts_double_up_to_the_longest(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock, astha_lease=0.5, delivery_pause=2.0)
    book.metadata.create_topic(TOPIC, 2)
    failing = Failing(objects=[object_of(book, 0)])
    recorder = Recorder(act=failing)
    begin_here(book)
    others = 0

    def turn(seconds: float) -> None:
        """Let time pass, and wait until everything that is due was handed over."""
        nonlocal others
        clock.advance(seconds)
        others += 1
        append(book, 1)
        until(lambda: len(recorder.events) == others)

    with delivering(book, recorder):
        append(book, 0)
        for attempt in range(1, 10):
            until(lambda: failing.failures == attempt)  # noqa: B023
            longest = min(2.0, 0.1 * 2.0 ** (attempt - 1))
            until(lambda: [lane.attempts for lane in lanes(book)] == [attempt])  # noqa: B023
            turn(longest * 0.49)
            turn(0)
            assert failing.failures == attempt
            turn(longest * 0.52)
    assert letters(book) == []


class Wordless(Exception):
    """An exception that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@in_memory
@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError(), StopIteration(), RecursionError()],
    ids=lambda error: type(error).__name__,
)
def test_whatever_is_raised_is_a_failure(book: Book, error: BaseException) -> None:
    failing = Failing(3, error)
    recorder = Recorder(act=failing)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book)
        assert astha.wait_idle(PATIENCE)
        assert astha.role is Role.ACTIVE
    assert len(recorder.tried) == 4
    assert len(recorder.events) == 1


@pytest.mark.parametrize(
    "error",
    [ValueError("a \0 in it"), ValueError("\udc80 half a letter"), Wordless(), ValueError("long " * 10**6)],
    ids=["nul", "surrogate", "wordless", "long"],
)
def test_an_error_of_any_text_is_written_down_and_stops_nobody(place: Place, error: BaseException) -> None:
    book = place.open(**QUICK, delivery_attempts=3)
    book.metadata.create_topic(TOPIC, 2)
    recorder, other = Recorder(act=Failing(error=error)), Recorder("other")
    ill = Recorder("ill", health=Failing(2, error), act=Failing(1))
    begin_here(book, "recorder", "other", "ill")
    with delivering(book, recorder, other, ill) as astha:
        append(book)
        until(lambda: letters(book))
        append(book, 1)
        assert astha.wait_idle(PATIENCE)
    assert {letter.subscriber for letter in letters(book)} == {"recorder"}
    (letter, *_) = letters(book)
    assert letter.error.startswith(type(error).__name__)
    assert len(letter.error) <= 2000
    assert len(other.events) == len(ill.events) == 2
    assert book._registry.read_with(lambda reader: list_work(reader, "astha", None, 10**18, 10)) == []


@pytest.mark.parametrize("garbage", [False, 0, "", "done", [], 1.5], ids=repr)
def test_whoever_returns_something_has_not_taken_it(place: Place, garbage: object) -> None:
    book = place.open(**QUICK, delivery_attempts=3)
    book.metadata.create_topic(TOPIC)
    recorder, other = Recorder(act=lambda _: garbage), Recorder("other")
    begin_here(book, "recorder", "other")
    with delivering(book, recorder, other) as astha:
        append(book)
        assert astha.wait_idle(PATIENCE)
    check_undisturbed(book, other)
    (letter,) = letters(book)
    assert "instead of nothing" in letter.error
    assert len(recorder.tried) == 3


@in_memory
def test_a_refresh_that_fails_is_tried_until_it_succeeds_and_parks_nothing(place: Place) -> None:
    book = place.open(**QUICK, delivery_attempts=3)
    book.metadata.create_topic(TOPIC)
    failing = Failing(10)
    recorder = Recorder(take_state=failing)
    with delivering(book, recorder) as astha:
        assert astha.wait_idle(PATIENCE)
        append(book)
        assert astha.wait_idle(PATIENCE)
    assert failing.failures == 10
    assert [refresh.reason for refresh in recorder.refreshes] == [START]
    assert len(recorder.events) == 1
    assert letters(book) == []


# --- calls that take too long ------------------------------------------------------


def test_a_call_that_hangs_is_given_up_after_its_time_out_its_object_refreshed_and_the_rest_goes_on(book: Book) -> None:
    hanging = Gate(times=1)
    recorder, other = Recorder(act=hanging, timeout=0.2), Recorder("other")
    begin_here(book, "recorder", "other")
    with delivering(book, recorder, other) as astha:
        append(book, 0)
        until(lambda: recorder.refreshes)
        assert [(item.object_id, item.reason) for item in recorder.refreshes] == [(object_of(book, 0), GIVEN_UP)]
        append(book, 0)
        append(book, 1)
        assert astha.wait_idle(PATIENCE)
        taken = {(event.object_id, event.data.base_offset) for event in recorder.events}
        assert taken == {(object_of(book, 0), 1), (object_of(book, 1), 0)}
        assert astha.status()["subscribers"]["recorder"]["abandoned"] == 1
        # What comes back so late is not heard.
        hanging.opened.set()
        until(lambda: astha.status()["subscribers"]["recorder"]["abandoned"] == 0)
        assert astha.status()["subscribers"]["recorder"]["taken"] == 2
        append(book, 0)
        assert astha.wait_idle(PATIENCE)
    assert letters(book) == []
    check_undisturbed(book, other)


@in_memory
def test_without_pauses_too_what_was_given_up_is_refreshed(place: Place) -> None:
    book = place.open(astha_lease=0.5, delivery_pause=0.0)
    book.metadata.create_topic(TOPIC)
    hanging = Gate(times=1)
    recorder = Recorder(act=hanging, timeout=0.02)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book)
        until(lambda: recorder.refreshes)
        append(book)
        assert astha.wait_idle(PATIENCE)
        assert [event.data.base_offset for event in recorder.events] == [1]
        hanging.opened.set()


@in_memory
def test_a_call_within_its_time_out_is_waited_for(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock, **QUICK)
    book.metadata.create_topic(TOPIC, 2)
    slow = Gate(objects=[object_of(book, 0)])
    recorder = Recorder(act=slow, timeout=100.0)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book, 0)
        until(lambda: slow.held)
        clock.advance(99)
        append(book, 1)
        until(lambda: len(recorder.events) == 1)
        # The call that is held, alone: the other one may be about to end.
        until(lambda: astha.status()["subscribers"]["recorder"]["running"] == 1)
        clock.advance(1)
        append(book, 1)
        until(lambda: recorder.refreshes)
        slow.opened.set()
    assert [refresh.reason for refresh in recorder.refreshes] == [GIVEN_UP]


@in_memory
def test_an_object_that_always_hangs_stops_no_other(book: Book) -> None:
    hanging = Gate(objects=[object_of(book, 0)])
    recorder = Recorder(act=hanging, take_state=hanging, timeout=0.02, workers=2)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book, 0)
        until(lambda: hanging.held >= 2)
        for number in range(30):
            append(book, 1 + number % 5)
            until(lambda: len(recorder.events) == number + 1)  # noqa: B023
        # Each of its calls keeps a thread: there are few of them, however long it lasts.
        assert hanging.held <= 4
        assert astha.status()["subscribers"]["recorder"]["abandoned"] <= 4
        hanging.opened.set()
        assert astha.wait_idle(PATIENCE)
    assert [refresh.reason for refresh in recorder.refreshes][-1] == GIVEN_UP


@in_memory
def test_a_delivery_that_cannot_hand_over_anything_keeps_still(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Gate()
    recorder = Recorder(act=hanging, take_state=hanging, health=hanging, timeout=0.01, workers=6)
    monkeypatch.setattr(delivery_module, "HEALTH_SECONDS", 0.01)
    turns = 0
    dispatch = Delivery._dispatch

    def counted(delivery: Delivery, now: float) -> float:
        nonlocal turns
        turns += 1
        return dispatch(delivery, now)

    monkeypatch.setattr(Delivery, "_dispatch", counted)
    begin_here(book)
    with delivering(book, recorder) as astha:
        for partition in range(6):
            append(book, partition, 3)
        until(lambda: astha.status()["subscribers"]["recorder"]["abandoned"] == 8)
        state = book._registry.read_with(deliveries.scheduler_state)
        assert state is not None
        before, beat = turns, state.beat
        until(lambda: getattr(book._registry.read_with(deliveries.scheduler_state), "beat", 0) >= beat + 10)
        # Nothing is announced meanwhile, and it looks once a second by itself.
        assert turns - before < 50
        hanging.opened.set()
        assert astha.wait_idle(PATIENCE)


@in_memory
def test_threads_of_calls_that_were_given_up_end_with_the_delivery(book: Book) -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("lakebook-recorder")]

    hanging = Gate(times=3)
    recorder = Recorder(act=hanging, timeout=0.02)
    begin_here(book)
    with delivering(book, recorder) as astha:
        for partition in range(3):
            append(book, partition)
        until(lambda: hanging.held == 3)
        until(lambda: len(recorder.refreshes) == 3)
        hanging.opened.set()
        assert astha.wait_idle(PATIENCE)
    until(lambda: not threads())


# --- health ------------------------------------------------------------------------


@in_memory
def test_one_that_is_not_well_uses_up_no_attempt_and_goes_on_when_it_is(book: Book) -> None:
    ill = Failing(error=ConnectionError("away"))
    failing = Failing(1)
    recorder = Recorder(act=failing, health=ill)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book, 0)
        until(lambda: ill.failures >= 50)
        shown = astha.status()["subscribers"]["recorder"]
        assert shown["breaker"] in ("open", "half_open")
        assert "ConnectionError: away" in shown["reason"]
        append(book, 1)
        until(lambda: len(lanes(book)) == 2)
        assert {lane.attempts for lane in lanes(book)} == {0}
        # It was asked for its health, and for nothing else.
        assert len(recorder.tried) <= 1
        ill.times = 0
        assert astha.wait_idle(PATIENCE)
        assert astha.status()["subscribers"]["recorder"]["breaker"] == "closed"
    assert recorder.sequences() == sequences_of(all_events(book, ["segments"]))
    assert (letters(book), recorder.refreshes) == ([], [])


@in_memory
def test_one_that_does_not_say_whether_it_is_well_uses_up_no_attempt(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_module, "HEALTH_SECONDS", 0.02)
    hanging = Gate(times=3)
    failing = Failing(1)
    recorder = Recorder(act=failing, health=lambda: hanging() if failing.failures else None)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book, 0)
        until(lambda: hanging.held == 3)
        assert len(recorder.tried) == 1
        assert astha.wait_idle(PATIENCE)
        hanging.opened.set()
        until(lambda: astha.status()["subscribers"]["recorder"]["abandoned"] == 0)
    assert letters(book) == []
    # Whether it took the event is not known, so it was told of the state.
    assert len(recorder.events) + len(recorder.refreshes) >= 1


@in_memory
def test_one_that_says_too_late_that_it_is_well_is_told_nothing_out_of_turn(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_module, "HEALTH_SECONDS", 0.1)
    # Not well when the first call fails, so that the breaker opens; the question of the next call hangs.
    failing, ill, hanging = Failing(1), Failing(1), Gate(times=1)

    def health() -> None:
        if failing.failures:
            ill()
            hanging()

    recorder = Recorder(act=failing, health=health)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book)
        until(lambda: recorder.events)
        assert (ill.failures, hanging.held) == (1, 1)
        append(book)
        append(book)
        assert astha.wait_idle(PATIENCE)
        hanging.opened.set()
        until(lambda: abandoned(astha) == 0)
    assert [event.data.base_offset for event in recorder.events] == [0, 1, 2]
    assert recorder.refreshes == []


class Hesitant(Recorder):
    """Whose workers hesitate before they read events from the log."""

    def __init__(self, gate: Gate, **options: Any) -> None:
        self._gate = gate
        super().__init__(**options)

    @property
    def subscribed_tables(self) -> tuple[str, ...]:
        if threading.current_thread().name.endswith("-worker"):
            self._gate()
        return super().subscribed_tables


def abandoned(astha: Astha) -> int:
    return int(astha.status()["subscribers"]["recorder"]["abandoned"])


@in_memory
def test_events_that_are_read_too_late_are_not_handed_over_out_of_turn(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock, **QUICK)
    book.metadata.create_topic(TOPIC)
    begin_here(book)
    with delivering(book, Recorder(act=Failing())):
        append(book)
        until(lambda: lanes(book))
    clock.advance(1)
    hanging = Gate(times=1)
    recorder = Hesitant(hanging)
    # What is left of the last time is read from the log.
    with delivering(book, recorder) as astha:
        until(lambda: hanging.held)
        clock.advance(recorder.timeout)
        append(book)
        assert astha.wait_idle(PATIENCE)
        assert abandoned(astha) == 1
        hanging.opened.set()
        until(lambda: abandoned(astha) == 0)
    assert [refresh.reason for refresh in recorder.refreshes] == [GIVEN_UP]
    assert 0 not in [event.data.base_offset for event in recorder.events]


@pytest.mark.parametrize("place", [POSTGRESQL], indirect=True)
def test_a_state_that_is_read_too_late_is_not_handed_over_out_of_turn(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock, **QUICK, lock_timeout=PATIENCE)
    book.metadata.create_topic(TOPIC)
    begin_here(book)
    recorder = Recorder()
    with delivering(book, recorder) as astha, psycopg.connect(place.target) as other:
        (delivery,) = astha._deliveries
        # Nobody can read the state of an object while this is held.
        other.execute("LOCK TABLE lake_objects IN ACCESS EXCLUSIVE MODE")
        delivery.refresh(1)
        for number in (1, 2):
            until(lambda: astha.status()["subscribers"]["recorder"]["running"])
            clock.advance(recorder.timeout)
            delivery.wake()
            until(lambda: abandoned(astha) == number)  # noqa: B023
        other.rollback()
        until(lambda: abandoned(astha) == 0)
        assert astha.wait_idle(PATIENCE)
    assert [refresh.reason for refresh in recorder.refreshes] == [GIVEN_UP]


@in_memory
def test_an_idle_subscriber_that_falls_ill_and_recovers_is_known_to_be_well_again(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_module, "_HEALTH_INTERVAL", 0.02)
    ill = Failing()
    recorder = Recorder(health=ill)
    begin_here(book)
    with delivering(book, recorder) as astha:

        def breaker() -> str:
            return str(astha.status()["subscribers"]["recorder"]["breaker"])

        until(lambda: breaker() != "closed")
        until(lambda: ill.failures >= 3)
        ill.times = 0
        until(lambda: breaker() == "closed")
    assert recorder.tried == []


@in_memory
def test_a_registry_that_is_away_is_not_the_subscribers_fault(book: Book) -> None:
    away = Failing(40, RegistryUnavailable("away", on="registry"))
    recorder = Recorder(act=away)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book)
        assert astha.wait_idle(PATIENCE)
    assert away.failures == 40
    assert (letters(book), len(recorder.events)) == ([], 1)


# --- refreshes ---------------------------------------------------------------------


def test_a_subscriber_without_a_cursor_begins_with_the_state_of_every_object(book: Book) -> None:
    kept = numbers(book, "kept", [1], [2])
    numbers(book, "gone", [1])
    book.tables.drop("gone")
    recorder = Recorder(tables=("tables", "table_files"))
    with delivering(book, recorder) as astha:
        assert astha.wait_idle(PATIENCE)
        (refresh,) = recorder.refreshes
        assert (refresh.object_id, refresh.kind, refresh.table, refresh.reason) == (
            kept.record.object_id,
            "table",
            kept.record,
            START,
        )
        assert recorder.events == []
        insert(kept, {"id": 3})
        assert astha.wait_idle(PATIENCE)
    assert sorted(event.table for event in recorder.events) == ["table_files", "tables"]


class Model(Recorder):
    """Knows the version of every table, by what it is told alone."""

    def __init__(self, name: str = "model", **options: Any) -> None:
        super().__init__(name, ("tables",), **options)
        self.known: dict[int, int] = {}

    def on_events(self, events: Sequence[Event[Any]]) -> None:
        super().on_events(events)
        for event in events:
            if event.data.deleted_at is None:
                self.known[event.object_id] = event.data.version
            else:
                self.known.pop(event.object_id, None)

    def on_refresh(self, refresh: Refresh) -> None:
        super().on_refresh(refresh)
        if refresh.table is None:
            self.known.pop(refresh.object_id, None)
        else:
            self.known[refresh.object_id] = refresh.table.version


def state_of(book: Book) -> dict[int, int]:
    return {row["object_id"]: row["version"] for row in records(book, schema.tables) if row["deleted_at"] is None}


def test_nothing_falls_between_a_refresh_and_the_events_that_follow_it(book: Book) -> None:
    chance = random.Random(20261)
    ended = threading.Event()

    def write(number: int) -> None:
        table = numbers(book, f"t{number}", [1])
        for step in range(1000):
            if ended.is_set():
                return
            insert(table, {"id": step})
            if step % 5 == 4:
                numbers(book, f"short_{number}_{step}", [1])
                book.tables.drop(f"short_{number}_{step}")

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    try:
        # Some begin anew in the middle of it, with whatever is committed just then.
        for turn in range(6):
            models = [Model("new", durable=False), Model(f"also_new_{turn}"), Model("asked")]
            with delivering(book, *models) as astha:
                until(lambda: all(model.known for model in models))  # noqa: B023
                for _ in range(chance.randint(0, 3)):
                    book._registry.write(lambda transaction: ask(transaction, REFRESH, "asked"))
                    until(lambda: not asked(book))
                if turn == 5:
                    ended.set()
                    for writer in writers:
                        writer.join(PATIENCE)
                    assert astha.wait_idle(PATIENCE)
                    assert all(model.known == state_of(book) for model in models[:2])
    finally:
        ended.set()
        for writer in writers:
            writer.join(PATIENCE)


def test_what_does_not_outlive_its_process_is_refreshed_at_each_start(book: Book) -> None:
    lasting, forgetful = Recorder("lasting"), Recorder("forgetful", durable=False)
    for turn in range(1, 4):
        with delivering(book, lasting, forgetful) as astha:
            assert astha.wait_idle(PATIENCE)
            assert (len(lasting.refreshes), len(forgetful.refreshes)) == (6, 6 * turn)
            append(book)
            assert astha.wait_idle(PATIENCE)
    assert len(lasting.events) == len(forgetful.events) == 3


def test_a_new_epoch_begins_with_a_refresh(book: Book) -> None:
    recorder = Recorder()
    with delivering(book, recorder) as astha:
        append(book)
        assert astha.wait_idle(PATIENCE)
        before = len(recorder.refreshes)
        begin_epoch(book._registry)
        append(book)
        assert astha.wait_idle(PATIENCE)
        assert len(recorder.refreshes) == before + 6
        append(book, 1)
        assert astha.wait_idle(PATIENCE)
        assert recorder.events[-1].object_id == object_of(book, 1)


@on_disk
def test_a_book_of_a_former_epoch_delivers_no_more_and_says_so(place: Place, book: Book) -> None:
    recorder = Recorder()
    with delivering(book, recorder) as astha:
        begin_epoch(place.open()._registry)
        until(lambda: astha.role is Role.STOPPED)
        assert isinstance(astha.failure, EpochChanged)
    # Whoever opens it anew is not kept waiting for long.
    anew = Recorder()
    with delivering(place.open(**QUICK), anew):
        until(lambda: len(anew.refreshes) == 6)


def test_a_cursor_that_is_too_old_is_replaced_by_a_refresh(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock, **QUICK, events_kept=0.0)
    book.metadata.create_topic(TOPIC, 6)
    old = book.events.now()
    append(book, 0, 5)
    clock.advance(1)
    # Nobody has a cursor, so what it has not seen goes: it is told so, and never skips.
    assert prune_events(book._registry) > 0
    book.events.save_cursor("recorder", old)
    recorder = Recorder()
    with delivering(book, recorder) as astha:
        assert astha.wait_idle(PATIENCE)
        assert len(recorder.refreshes) == 6
        append(book, 0)
        assert astha.wait_idle(PATIENCE)
    assert len(recorder.events) == 1


def test_a_redrive_refreshes_the_object_and_the_request_disappears(place: Place) -> None:
    book = place.open(**QUICK, delivery_attempts=2)
    book.metadata.create_topic(TOPIC, 2)
    poison = Failing()
    recorder = Recorder(act=poison)
    begin_here(book)
    with delivering(book, recorder) as astha:
        append(book, 1)
        until(lambda: letters(book))
        poison.times = 0
        assert astha.wait_idle(PATIENCE)
        before = len(recorder.refreshes)
        (letter,) = letters(book)
        driven = book._registry.write(lambda transaction: deliveries.redrive(transaction, letter.id))
        assert driven.redriven_at is not None
        until(lambda: not asked(book))
        assert astha.wait_idle(PATIENCE)
    (refresh,) = recorder.refreshes[before:]
    assert (refresh.object_id, refresh.reason) == (object_of(book, 1), ASKED)
    # Not the event itself: it would be out of order.
    assert recorder.events == []
    with pytest.raises(DeadLetterNotFound):
        book._registry.write(lambda transaction: deliveries.redrive(transaction, 4711))


def test_a_refresh_that_is_asked_for_while_nobody_delivers_is_made_up_for(book: Book) -> None:
    begin_here(book)
    wanted = object_of(book, 3)
    book._registry.write(lambda transaction: ask(transaction, REFRESH, "recorder", wanted))
    recorder = Recorder()
    with delivering(book, recorder) as astha:
        until(lambda: not asked(book))
        assert astha.wait_idle(PATIENCE)
    assert [refresh.object_id for refresh in recorder.refreshes] == [object_of(book, 3)]


def test_requests_for_others_stay(book: Book) -> None:
    book._registry.write(lambda transaction: ask(transaction, REFRESH, "somebody"))
    with delivering(book, Recorder()) as astha:
        assert astha.wait_idle(PATIENCE)
        append(book)
        assert astha.wait_idle(PATIENCE)
    assert [request.component for request in asked(book)] == ["somebody"]


def test_what_is_asked_for_again_after_it_was_seen_is_not_taken_for_met(book: Book) -> None:
    registry = book._registry
    registry.write(lambda transaction: ask(transaction, REFRESH, "recorder", 1))
    seen = asked(book)
    # Whoever has seen the first may have read the state before this one was asked.
    registry.write(lambda transaction: ask(transaction, REFRESH, "recorder", 1))
    assert len(asked(book)) == 1
    registry.write(lambda transaction: meet(transaction, seen))
    assert len(asked(book)) == 1
    again = asked(book)
    registry.write(lambda transaction: meet(transaction, again))
    assert asked(book) == []


@in_memory
def test_a_refresh_that_is_asked_for_during_a_refresh_comes_after_it(book: Book) -> None:
    slow = Gate(times=1)
    recorder = Recorder(take_state=slow, timeout=PATIENCE)
    begin_here(book)

    wanted = object_of(book, 0)

    def please() -> None:
        book._registry.write(lambda transaction: ask(transaction, REFRESH, "recorder", wanted))

    with delivering(book, recorder) as astha:
        please()
        until(lambda: slow.held)
        until(lambda: not asked(book))
        # What the first one has read was before this was asked for.
        please()
        until(lambda: not asked(book))
        slow.opened.set()
        assert astha.wait_idle(PATIENCE)
    assert len(recorder.refreshes) == 2


def test_a_refresh_of_everything_is_not_forgotten_when_the_process_dies(book: Book) -> None:
    begin_here(book)
    recorder = Recorder()
    registry = book._registry
    turn = registry.write(lambda transaction: deliveries.claim_turn(transaction, None, {}))
    assert turn is not None
    delivery = Delivery(registry, Capture(EventLog(registry), Router([recorder])), recorder)
    delivery.load(*registry.in_snapshot(lambda reader: deliveries.load_progress(reader, "recorder")))
    registry.write(lambda transaction: ask(transaction, REFRESH, "recorder"))
    delivery.refresh(None)
    progress, met = delivery.progress(), asked(book)
    registry.write(lambda transaction: _write_down(transaction, turn, {}, [(delivery, progress)], met))
    assert asked(book) == []
    # It dies here. The next one has to know.
    registry.write(lambda transaction: deliveries.release_turn(transaction, turn))
    with delivering(book, recorder) as astha:
        assert astha.wait_idle(PATIENCE)
    assert len(recorder.refreshes) == 6


def test_an_object_whose_waiting_events_were_removed_is_refreshed(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock, astha_lease=0.5, events_kept=0.0)
    book.metadata.create_topic(TOPIC, 2)
    failing = Failing()
    recorder = Recorder(act=failing)
    begin_here(book)
    with delivering(book, recorder):
        append(book, 0, 3)
        until(lambda: failing.failures)
        until(lambda: lanes(book))
    # A laggard loses its place while it has events left; then they are removed.
    book._registry.write(lambda transaction: deliveries.forget_progress(transaction, "recorder"))
    book.events.save_cursor("recorder", book.events.now())
    clock.advance(10)
    assert prune_events(book._registry) > 0
    registry = book._registry
    lane = deliveries.Lane(object_of(book, 0), 2, 3)
    registry.write(lambda transaction: deliveries.save_lanes(transaction, "recorder", [lane], []))
    failing.times = 0
    with delivering(book, recorder) as astha:
        assert astha.wait_idle(PATIENCE)
    assert [(item.object_id, item.reason) for item in recorder.refreshes] == [(object_of(book, 0), LEFT_BEHIND)]
    assert recorder.events == []


def test_a_laggard_that_loses_its_cursor_while_it_is_delivered_to_takes_everything_anew(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock, **QUICK, events_oldest=5.0)
    numbers(book, "numbers", [1])
    failing = Failing()
    recorder = Recorder("compactor", ("table_files",), act=failing)
    book.events.save_cursor("compactor", book.events.now())
    with delivering(book, recorder) as astha:
        insert(book.table("numbers"), {"id": 1})
        until(lambda: lanes(book, "compactor"))
        clock.advance(6)
        assert drop_laggards(book._registry) == ["compactor"]
        until(lambda: recorder.refreshes)
        failing.times = 0
        clock.advance(6)
        assert astha.wait_idle(PATIENCE)
    assert lanes(book, "compactor") == []


def test_a_cursor_that_cannot_be_read_is_replaced_by_a_refresh(book: Book) -> None:
    begin_here(book)
    book._registry.write(
        lambda transaction: transaction._connection.execute("UPDATE cursors SET position = 'nonsense'")
    )
    recorder, other = Recorder(), Recorder("other")
    with delivering(book, recorder, other) as astha:
        assert astha.wait_idle(PATIENCE)
    assert len(recorder.refreshes) == 6


# --- from one start to the next ----------------------------------------------------


def test_a_clean_stop_and_start_repeats_nothing_and_skips_nothing(place: Place, book: Book) -> None:
    chance = random.Random(5)
    recorder = Recorder(tables=("segments", "partitions"), workers=3)
    begin_here(book)
    before = {event.id for event in all_events(book)}
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            append(book, chance.randrange(6), chance.randint(1, 4))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(8):
            taken = len(recorder.events)
            with delivering(book, recorder):
                until(lambda: len(recorder.events) >= taken + 20)  # noqa: B023
    finally:
        ended.set()
        writer.join(PATIENCE)
    with delivering(book, recorder) as astha:
        assert astha.wait_idle(PATIENCE)
    expected = sequences_of(event for event in all_events(book) if event.id not in before)
    assert recorder.sequences() == expected
    assert recorder.refreshes == []


def test_lanes_survive_a_restart_with_their_attempts(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock, astha_lease=0.5, delivery_attempts=6)
    book.metadata.create_topic(TOPIC, 2)
    begin_here(book)
    first = Recorder(act=Failing(objects=[object_of(book, 0)]))
    with delivering(book, first):
        append(book, 0)
        for attempt in (1, 2, 3):
            until(lambda: [lane.attempts for lane in lanes(book)] == [attempt])  # noqa: B023
            if attempt < 3:
                clock.advance(60)
                append(book, 1)
    (lane,) = [lane for lane in lanes(book) if lane.object_id == object_of(book, 0)]
    assert (lane.attempts, lane.last_error, lane.refresh) == (3, "ValueError: poison", False)
    # In another time: the pause is no longer than the longest.
    clock.turn_back(10_000)
    second = Recorder(act=Failing(objects=[object_of(book, 0)]))
    with delivering(book, second) as astha:
        for attempt in (4, 5):
            clock.advance(60)
            append(book, 1)
            until(lambda: attempt in [lane.attempts for lane in lanes(book)])  # noqa: B023
        clock.advance(60)
        append(book, 1)
        until(lambda: letters(book))
        assert astha.wait_idle(PATIENCE)
    (letter,) = letters(book)
    assert letter.attempts == 6
    assert len([call for call in second.tried if call[0].object_id == object_of(book, 0)]) == 3


# --- the turn ----------------------------------------------------------------------


@on_disk
def test_while_the_holder_finishes_its_last_calls_nobody_takes_over(place: Place, book: Book) -> None:
    slow = Gate()
    recorder, waiting = Recorder(act=slow, timeout=PATIENCE), Recorder()
    begin_here(book)
    first = Astha(book._registry, [recorder])
    first.start()
    assert first.wait_active(PATIENCE)
    append(book)
    until(lambda: slow.held)
    second = Astha(place.open(**QUICK)._registry, [waiting])
    second.start()
    stopping = threading.Thread(target=first.stop)
    stopping.start()
    state = book._registry.read_with(deliveries.scheduler_state)
    assert state is not None
    # Its beat goes on for several lease times.
    until(lambda: getattr(book._registry.read_with(deliveries.scheduler_state), "beat", 0) > state.beat + 15)
    assert second.role is Role.STANDBY
    slow.opened.set()
    stopping.join(PATIENCE)
    assert second.wait_active(PATIENCE)
    assert second.wait_idle(PATIENCE)
    second.stop()
    assert len(recorder.events) == 1
    assert waiting.events == []


@on_disk
def test_no_clock_decides_who_has_the_turn(place: Place) -> None:
    clock, other = ManualClock(), ManualClock()
    book = place.open(clock=clock, astha_lease=2.0)
    book.metadata.create_topic(TOPIC, 2)
    begin_here(book)
    recorder, waiting = Recorder(), Recorder()
    second = Astha(place.open(clock=other, astha_lease=2.0)._registry, [waiting])
    with delivering(book, recorder) as astha:
        second.start()
        for move in (clock.turn_back, other.turn_back, clock.advance, other.advance):
            move(3600)
            state = book._registry.read_with(deliveries.scheduler_state)
            assert state is not None
            append(book)
            until(lambda: getattr(book._registry.read_with(deliveries.scheduler_state), "beat", 0) > state.beat + 2)  # noqa: B023
            assert (astha.role, second.role) == (Role.ACTIVE, Role.STANDBY)
        assert astha.wait_idle(PATIENCE)
        assert len(recorder.events) == 4
    # Its own clock stands still, but the turn was given back.
    assert second.wait_active(PATIENCE)
    second.stop()
    assert waiting.events == []


def test_whoever_has_lost_the_turn_writes_nothing_down(book: Book) -> None:
    registry = book._registry
    old = registry.write(lambda transaction: deliveries.claim_turn(transaction, None, {}))
    assert old is not None
    state = registry.read_with(deliveries.scheduler_state)
    assert state is not None
    # Somebody who has not watched it stand still does not get it.
    assert registry.write(lambda transaction: deliveries.claim_turn(transaction, (old.token, 0), {})) is None
    new = registry.write(lambda transaction: deliveries.claim_turn(transaction, (state.token, state.beat), {}))
    assert new is not None
    assert new.token == old.token + 1
    recorder = Recorder()
    delivery = Delivery(registry, Capture(EventLog(registry), Router([recorder])), recorder)
    delivery.load(book.events.now(), [])
    delivery.refresh(object_of(book, 0))
    found = [(delivery, delivery.progress())]
    for refused in (
        lambda transaction: deliveries.renew_turn(transaction, old, {}),
        lambda transaction: deliveries.require_turn(transaction, old),
        lambda transaction: _write_down(transaction, old, {}, found, []),
    ):
        with pytest.raises(SchedulerLost):
            registry.write(refused)
    # Nor does it give back what is not its own.
    registry.write(lambda transaction: deliveries.release_turn(transaction, old))
    registry.write(lambda transaction: deliveries.require_turn(transaction, new))
    assert lanes(book) == []
    registry.write(lambda transaction: deliveries.release_turn(transaction, new))
    with pytest.raises(SchedulerLost):
        registry.write(lambda transaction: deliveries.require_turn(transaction, new))
    with pytest.raises(SchedulerLost):
        registry.write(lambda transaction: deliveries.renew_turn(transaction, new, {}))


# --- failures of its own -----------------------------------------------------------


class Once:
    """Raises the first so many times."""

    def __init__(self, times: int, error: BaseException | None = None) -> None:
        self._left = times
        self._error = error or RuntimeError("of its own")

    def __call__(self) -> None:
        if self._left:
            self._left -= 1
            raise self._error


def reinitialised(book: Book) -> list[Any]:
    return book._registry.read_with(lambda reader: list_work(reader, "astha", None, 10**18, 100))


@pytest.mark.parametrize("point", ["astha.claimed", "astha.saved"])
def test_after_a_failure_of_its_own_it_begins_anew_says_so_and_loses_nothing(book: Book, point: str) -> None:
    recorder = Recorder()
    begin_here(book)
    append(book, 0)
    with failpoints.armed(point, Once(2)):
        astha = Astha(book._registry, [recorder])
        astha.start()
        until(lambda: len(reinitialised(book)) == 1 or len(reinitialised(book)) == 2)
        append(book, 1)
        until(lambda: astha.role is Role.ACTIVE)
        assert astha.wait_idle(PATIENCE)
        astha.stop()
    first, *_ = reinitialised(book)
    assert (first.action, first.outcome, first.detail["error"]) == (
        "reinitialise",
        "failed",
        "RuntimeError: of its own",
    )
    assert set(recorder.sequences()) == {object_of(book, 0), object_of(book, 1)}


def test_a_failure_before_anything_was_delivered_gives_the_turn_back(place: Place) -> None:
    # Nobody could take it for dead within the test.
    book = place.open(astha_lease=10 * PATIENCE)
    with failpoints.armed("astha.claimed", Once(2)), delivering(book, Recorder()):
        state = book._registry.read_with(deliveries.scheduler_state)
        assert state is not None
        assert state.token == 3


class Moody(Recorder):
    """Whose settings cannot be asked for, some of the time."""

    def __init__(self, where: str, mood: Callable[[], None]) -> None:
        self._where = where
        self._mood = mood
        super().__init__()

    @property
    def subscribed_tables(self) -> tuple[str, ...]:
        if self._where == "tables":
            self._mood()
        return ("segments",)

    @property
    def linger(self) -> float:  # type: ignore[override]
        if self._where == "linger":
            self._mood()
        return 0.0


@pytest.mark.parametrize("error", [RuntimeError("moody"), SystemExit(1), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("where", ["tables", "linger"])
def test_a_delivery_that_breaks_down_loses_no_event(book: Book, where: str, error: BaseException) -> None:
    mood = Once(1, error)
    moody, other = Moody(where, mood), Recorder("other")
    begin_here(book, "recorder", "other")
    append(book, 0, 3)
    astha = Astha(book._registry, [moody, other])
    astha.start()
    until(lambda: reinitialised(book))
    append(book, 1, 2)
    until(lambda: len(moody.events) >= 5)
    assert astha.wait_idle(PATIENCE)
    astha.stop()
    expected = sequences_of(all_events(book, ["segments"]))
    assert moody.sequences() == expected
    assert {number: sorted(set(found)) for number, found in other.sequences().items()} == expected
    assert reinitialised(book)[0].detail["error"].startswith(type(error).__name__)


def beat_of(book: Book) -> int:
    state = book._registry.read_with(deliveries.scheduler_state)
    assert state is not None
    return state.beat


@in_memory
def test_whoever_begins_anew_does_not_call_for_an_object_that_is_still_being_called_for(book: Book) -> None:
    slow = Gate(objects=[object_of(book, 0)], times=1)
    moods: list[Once] = []
    moody = Moody("linger", lambda: moods[0]() if moods else None)
    moody.act, moody.timeout = slow, PATIENCE
    begin_here(book)
    with delivering(book, moody) as astha:
        append(book, 0)
        until(lambda: slow.held)
        moods.append(Once(1))
        append(book, 1)
        until(lambda: astha._deliveries and astha._deliveries[0].failure is not None)
        # Its turn goes on for several beats, and it waits for the call.
        beat = beat_of(book)
        until(lambda: beat_of(book) > beat + 8)
        assert len(moody.tried) == 1
        slow.opened.set()
        until(lambda: reinitialised(book))
        assert astha.wait_idle(PATIENCE)
    assert moody.sequences() == sequences_of(all_events(book, ["segments"]))


# --- memory ------------------------------------------------------------------------


@in_memory
def test_a_subscriber_that_is_not_well_while_100_000_events_arrive_keeps_few_in_memory(book: Book) -> None:
    ill = Failing()
    recorder = Recorder(health=ill, act=Failing(1), workers=4)
    begin_here(book)
    with delivering(book, recorder) as astha:
        (delivery,) = astha._deliveries
        append(book, 0)
        until(lambda: ill.failures)
        most = 0
        for number in range(50):
            append(book, number % 6, 2000)
            most = max(most, delivery._in_memory)
        until(lambda: delivery.cursor == book.events.now())
        most = max(most, delivery._in_memory)
        assert 0 < most <= 6 * delivery_module._MOST_IN_LANE
        assert len(recorder.tried) <= 1
        ill.times = 0
        until(lambda: len(recorder.events) == 100_001, 120)
        assert astha.wait_idle(PATIENCE)
        assert delivery._in_memory == 0
    assert recorder.sequences() == sequences_of(all_events(book, ["segments"]))


@in_memory
def test_many_objects_together_keep_few_in_memory(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, "_MOST_IN_MEMORY", 100)
    ill = Failing()
    recorder = Recorder(health=ill, act=Failing(1))
    begin_here(book)
    with delivering(book, recorder) as astha:
        (delivery,) = astha._deliveries
        append(book, 0)
        until(lambda: ill.failures)
        for number in range(60):
            append(book, number % 6, 20)
        until(lambda: delivery.cursor == book.events.now())
        assert delivery._in_memory <= 100
        ill.times = 0
        assert astha.wait_idle(PATIENCE)
    assert recorder.sequences() == sequences_of(all_events(book, ["segments"]))


# --- reading together --------------------------------------------------------------


def test_who_shares_a_page_that_was_read_before_is_told_that_there_may_be_more(book: Book) -> None:
    capture = Capture(EventLog(book._registry), Router([Recorder("a"), Recorder("b")]))
    cursor = book.events.now()
    append(book)
    first = capture.read(cursor)
    assert [event.table for event in first.routed["a"]] == ["segments"]
    append(book)
    capture.announce()
    # A reader that was woken by the second commit must not stop at a page that was read before it.
    again = capture.read(cursor)
    assert again.more
    assert [event.sequence for event in capture.read(again.cursor).routed["b"]] == [4]


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "lakebook-astha"])


def test_a_component_is_a_subscriber_of_fixed_tables() -> None:
    assert set(SUBSCRIPTIONS) == {"iceberg_updater", "compactor", "snapshotter", "orchestrator", "topic_publisher"}
    assert all(table in ROWS for tables in SUBSCRIPTIONS.values() for table in tables)
    assert issubclass(Recorder, Subscriber)
