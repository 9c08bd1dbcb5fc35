"""Every committed change leaves one event, and a cursor finds each of them once."""

from __future__ import annotations

from collections import defaultdict

import pytest

from books import Place, describe
from lakebook import Book, Cursor, Event
from lakebook.clock import ManualClock
from lakebook.errors import CursorExpired, InvalidCursor, InvalidPage, SegmentGap


def all_events(book: Book, cursor: Cursor | None = None, limit: int = 1000) -> list[Event]:
    cursor = cursor or book.events.beginning()
    found: list[Event] = []
    while True:
        batch = book.events.read(cursor, limit)
        found.extend(batch.events)
        cursor = batch.cursor
        if not batch.more:
            return found


def replayed(events: list[Event]) -> dict[tuple[str, str], object]:
    rows: dict[tuple[str, str], object] = {}
    for event in events:
        key = (event.table, str(sorted(event.key.items())))
        assert rows.get(key) == event.row_before
        rows[key] = event.row_after
    return {key: row for key, row in rows.items() if row is not None}


def busy_day(book: Book) -> None:
    book.metadata.create_topic("orders", 2, config={"user.team": "sales"})
    book.metadata.create_topic("clicks")
    book.metadata.add_segments([describe(base=0), describe(base=100), describe(partition=1)])
    book.metadata.commit_offset("g", "orders", 0, 50, "half")
    book.metadata.commit_offset("g", "orders", 0, 60)
    book.metadata.update_topic_config("orders", {"segment.ms": "5"})
    book.metadata.grow_topic("clicks", 2)
    book.metadata.delete_segments_before("orders", 0, 100)
    book.metadata.reset_offset("g", "orders", 0, "latest")
    book.metadata.ensure_consumer_group("h")
    book.metadata.delete_consumer_group("h")
    book.metadata.delete_topic("clicks")


def test_events_tell_every_change_in_the_order_of_each_object(book: Book) -> None:
    busy_day(book)
    events = all_events(book)
    per_object: dict[int, list[int]] = defaultdict(list)
    for event in events:
        per_object[event.object_id].append(event.sequence)
    assert all(sequences == list(range(1, len(sequences) + 1)) for sequences in per_object.values())
    assert [event.id for event in events] == sorted({event.id for event in events})
    rows = replayed(events)
    tables = [table for table, _ in rows]
    assert sorted(tables) == ["consumer_groups", "consumer_offsets", *["partitions"] * 2, *["segments"] * 2, "topics"]


def test_an_event_carries_key_and_rows_before_and_after(book: Book) -> None:
    book.metadata.create_topic("orders")
    cursor = book.events.now()
    book.metadata.add_segment(describe(base=0, id="one"))
    segment, partition = all_events(book, cursor)
    assert (segment.table, segment.operation, segment.key, segment.row_before) == (
        "segments",
        "insert",
        {"id": "one"},
        None,
    )
    assert segment.row_after is not None
    assert segment.row_after["end_offset"] == 99
    assert (partition.table, partition.operation) == ("partitions", "update")
    assert partition.row_before is not None
    assert partition.row_after is not None
    assert (partition.row_before["high_watermark"], partition.row_after["high_watermark"]) == (0, 100)
    assert (segment.object_id, segment.object_kind) == (partition.object_id, "partition")
    assert segment.occurred_at == partition.occurred_at


def test_a_refused_change_leaves_no_event(book: Book) -> None:
    book.metadata.create_topic("orders")
    cursor = book.events.now()
    with pytest.raises(SegmentGap):
        book.metadata.add_segments([describe(base=0), describe(base=500)])
    assert all_events(book, cursor) == []


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 1000])
def test_pages_of_any_size_give_the_same_events(book: Book, limit: int) -> None:
    busy_day(book)
    assert all_events(book, limit=limit) == all_events(book)


def test_events_that_arrive_between_pages_come_after_them(book: Book) -> None:
    book.metadata.create_topic("orders", 3)
    batch = book.events.read(book.events.beginning(), 2)
    book.metadata.add_segment(describe(base=0))
    rest = all_events(book, batch.cursor, 2)
    assert [*batch.events, *rest] == all_events(book)


def test_a_cursor_survives_as_text(book: Book) -> None:
    book.metadata.create_topic("orders", 4)
    batch = book.events.read(book.events.beginning(), 2)
    again = Cursor.parse(str(batch.cursor))
    assert again == batch.cursor
    assert all_events(book, again) == all_events(book)[2:]


def test_a_subscribers_cursor_is_kept(place: Place) -> None:
    book = place.open()
    book.metadata.create_topic("orders")
    assert book.events.load_cursor("updater") is None
    book.events.save_cursor("updater", book.events.beginning())
    now = book.events.now()
    book.events.save_cursor("updater", now)
    if place.kind != "memory":
        book.close()
        book = place.open()
    assert book.events.load_cursor("updater") == now
    book.events.delete_cursor("updater")
    assert book.events.load_cursor("updater") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0/sqlite/1",
        "a" * 32 + "/sqlite/-1",
        "a" * 32 + "/sqlite/1'; DROP TABLE events",
        "a" * 32 + "/postgresql/1",
        "a" * 32 + "/postgresql/9:1:||0",
        "a" * 32 + "/postgresql/1:5:9||0",
        "a" * 32 + "/postgresql/1:9:5,3||0",
        "a" * 32 + "/postgresql/٣:٩:||0",
    ],
)
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidCursor):
        Cursor.parse(text)


def test_a_cursor_of_another_database_or_epoch_is_refused(book: Book) -> None:
    other = "postgresql" if book.events.now().kind == "sqlite" else "sqlite"
    epoch = book.identity.epoch
    with pytest.raises(InvalidCursor):
        book.events.read(Cursor(epoch, other))
    with pytest.raises(CursorExpired):
        book.events.read(Cursor("0" * 32, book.events.now().kind))
    with pytest.raises(InvalidPage):
        book.events.read(book.events.beginning(), 0)


def test_times_of_an_object_never_run_backwards(place: Place) -> None:
    clock = ManualClock()
    book = place.open(clock=clock)
    book.metadata.create_topic("orders")
    for number in range(5):
        book.metadata.add_segment(describe(base=number * 100))
        clock.turn_back(3600)
    times = [event.occurred_at for event in all_events(book) if event.object_kind == "partition"]
    assert times == sorted(times)
    commits = sorted(set(times))
    assert len(commits) == 6
    segments = list(book.metadata.get_segments("orders", 0))
    assert [segment.created_at for segment in segments] == commits[1:]
    assert book.verify().ok


def test_a_refresh_and_its_cursor_belong_to_one_state(book: Book) -> None:
    busy_day(book)
    before = all_events(book)
    cursor = book.events.now()
    assert all_events(book, cursor) == []
    book.metadata.add_segment(describe(base=200))
    assert [event.table for event in all_events(book, cursor)] == ["segments", "partitions"]
    assert len(all_events(book)) == len(before) + 2
