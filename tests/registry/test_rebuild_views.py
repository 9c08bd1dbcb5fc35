"""After a rebuild no range of a view is taken for fresh that lacks rows of its sources."""

from __future__ import annotations

from typing import Any

import pytest

from flowing import flow
from lake import insert, records, run_sql
from lakebook import Book
from lakebook.components.janitor import Janitor
from lakebook.errors import PipelineStopped
from lakebook.lake.table import Table
from lakebook.recovery.checkpoints import _Lines, list_checkpoints, read_checkpoint
from lakebook.recovery.report import MarkedView
from lakebook.registry import checkpoints, schema
from lakebook.registry.losses import note_losses
from lakebook.registry.migrate import HEAD
from lakebook.streams.mirroring import bring_up_to_date
from lakebook.views.view import View
from mirrored import BEGIN
from rebuilding import Loss, checkpoint, rows_of_version, stray_segment
from streaming import produce
from viewing import HOUR, MINUTE, T0, at, claim, enter, enter_hours, frozen_hours, order, orders, stale_hours, view_of

CLICKS = "clicks"


@pytest.fixture
def book(loss: Loss) -> Book:
    return loss.open()


def clicks(book: Book, *hours: float, partitions: int = 1, **config: str) -> list[str]:
    """A topic with a segment of each of these hours; the paths of the segments."""
    book.topics.create(CLICKS, partitions, config=config)
    return [click(book, hour) for hour in hours]


def click(book: Book, hour: float) -> str:
    return produce(book, CLICKS, 0, 1, times=[at(hour)]).s3_key


def clicks_view(book: Book, name: str = "hourly", source: str = CLICKS, hours: int = 6) -> View:
    view = view_of(book, source, name, event_time="timestamp")
    enter_hours(book, view, range(hours))
    return view


def states(view: View, first: float, last: float) -> list[str]:
    return [spec.state for spec in view.plan(at(first), at(last))]


def rebuilt(loss: Loss, name: str = "hourly") -> tuple[View, list[MarkedView]]:
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    assert again.verify().ok
    return again.views[name], report.marked_views


def published_orders(book: Book, *hours: float) -> Table:
    table = orders(book)
    for number, hour in enumerate(hours):
        order(table, hour, first=10 * number)
    table.publish()
    return table


# --- tables ------------------------------------------------------------------------


def test_rows_that_are_newer_than_the_checkpoint_make_their_ranges_stale(loss: Loss, book: Book) -> None:
    table = published_orders(book, 0.5)
    enter_hours(book, view_of(book), range(5))
    checkpoint(book)
    order(table, 2.5, first=100)
    order(table, 3.5, first=200)
    table.publish()
    view, marked = rebuilt(loss)
    assert (stale_hours(view), frozen_hours(view)) == ([2, 3], [])
    assert marked == [MarkedView("hourly", 2, 0, ("table default.orders is newer than the checkpoint",))]


def test_rows_that_were_deleted_after_the_checkpoint_make_their_ranges_stale(loss: Loss, book: Book) -> None:
    table = published_orders(book, 0.5, 2.5)
    enter_hours(book, view_of(book), range(5))
    checkpoint(book)
    table.delete("id >= 10")
    table.publish()
    view, _ = rebuilt(loss)
    assert stale_hours(view) == [2]


def test_all_ranges_are_stale_if_nobody_knows_which_files_the_source_had(loss: Loss, book: Book) -> None:
    table = published_orders(book, 0.5, 2.5)
    enter_hours(book, view_of(book), range(5))
    checkpoint(book)
    table.delete("id >= 10")
    table.set_properties(**{"lakebook.history.versions": "1", "lakebook.history.seconds": "0"})
    table.publish()
    book.cleaner.expire()
    insert(table, {"id": 1000, "ts": None, "region": None})
    table.publish()
    assert 2 not in {item.version for item in table.snapshots()}
    view, marked = rebuilt(loss)
    assert stale_hours(view) == [0, 1, 2, 3, 4]
    assert [item.stale for item in marked] == [5]


def test_what_is_as_it_was_at_the_checkpoint_stays_fresh(loss: Loss, book: Book) -> None:
    table = published_orders(book, 0.5)
    order(table, 1.5, first=100)
    clicks(book, 0.5, 1.5)
    other = orders(book, "others")
    enter_hours(book, view_of(book), range(3))
    clicks_view(book, "of_topic")
    order(table, 2.5, first=200)
    checkpoint(book)
    # Neither is one of their sources, nor is a version that only now is published another one.
    order(other, 0.5)
    other.publish()
    table.publish()
    view, marked = rebuilt(loss)
    assert (stale_hours(view), frozen_hours(view)) == ([2], [])
    of_topic = loss.open().views["of_topic"]
    assert stale_hours(of_topic) == frozen_hours(of_topic) == []
    assert marked == []


def test_a_table_that_does_not_come_back_freezes_what_was_built_of_it(loss: Loss, book: Book) -> None:
    table = published_orders(book, 0.5)
    enter_hours(book, view_of(book), range(2))
    checkpoint(book)
    location = table.metadata_location
    assert location is not None
    book.lake.store.delete([book.lake.store.relative(location)])
    view, marked = rebuilt(loss)
    assert (stale_hours(view), frozen_hours(view)) == ([], [0, 1])
    assert marked == [MarkedView("hourly", 0, 2, ("table default.orders did not come back",))]


# --- topics ------------------------------------------------------------------------


def test_segments_that_are_newer_than_the_checkpoint_make_their_ranges_stale(loss: Loss, book: Book) -> None:
    clicks(book, 0.5)
    clicks_view(book)
    checkpoint(book)
    click(book, 2.5)
    click(book, 4.5)
    view, marked = rebuilt(loss)
    assert (stale_hours(view), frozen_hours(view)) == ([2, 4], [])
    assert marked == [MarkedView("hourly", 2, 0, ("topic clicks has segments that are newer than the checkpoint",))]


def test_a_merge_makes_ranges_stale_only_if_it_has_newer_records(loss: Loss, book: Book) -> None:
    clicks(book)
    view = view_of(book, CLICKS, event_time="timestamp")
    hour = BEGIN.replace(minute=0, second=0, microsecond=0)
    enter(book, view, claim(book, view, hour, hour + HOUR))
    parts = [produce(book, CLICKS, 0, value, times=[BEGIN]).s3_key for value in ("a", "b")]
    build_anew(book, view)
    checkpoint(book)
    stray_segment(book, CLICKS, 0, 0, "a", "b", folder="m-1")
    book.lake.store.delete(parts)
    again, marked = rebuilt(loss)
    assert (stale_hours(again), frozen_hours(again), marked) == ([], [], [])
    stray_segment(loss.open(), CLICKS, 0, 0, "a", "b", "c", folder="m-2")
    again, marked = rebuilt(loss)
    assert (len(stale_hours(again)), [item.stale for item in marked]) == (1, [1])


def build_anew(book: Book, view: View) -> None:
    """Enter all ranges anew."""
    for item in view.list_partitions():
        enter(book, view, claim(book, view, item.begin, item.end))


def test_segments_that_are_gone_freeze_what_was_built_of_them_and_what_was_not(loss: Loss, book: Book) -> None:
    paths = clicks(book, 0.5, 2.5, 4.5)
    clicks_view(book, hours=4)
    checkpoint(book)
    book.lake.store.delete(paths[1:])
    view, marked = rebuilt(loss)
    assert (stale_hours(view), frozen_hours(view)) == ([], [2])
    assert states(view, 0, 6) == ["empty", "empty", "frozen", "empty", "frozen", "missing"]
    assert marked == [MarkedView("hourly", 0, 1, ("topic clicks has lost records",))]


def test_records_that_are_contested_freeze_the_ranges_of_their_times(loss: Loss, book: Book) -> None:
    clicks(book)
    view = view_of(book, CLICKS, event_time="timestamp")
    hour = BEGIN.replace(minute=0, second=0, microsecond=0)
    for begin in (hour, hour + HOUR):
        enter(book, view, claim(book, view, begin, begin + HOUR))
    checkpoint(book)
    stray_segment(book, CLICKS, 0, 0, "a")
    stray_segment(book, CLICKS, 0, 0, "b")
    view, _ = rebuilt(loss)
    assert [item.begin for item in view.list_partitions() if item.frozen_at is not None] == [hour]
    assert stale_hours(view) == []


def test_holes_of_which_nobody_knows_the_times_are_reported(loss: Loss, book: Book) -> None:
    clicks(book, 0.5)
    clicks_view(book)
    checkpoint(book)
    lost = click(book, 2.5)
    click(book, 4.5)
    book.lake.store.delete([lost])
    view, marked = rebuilt(loss)
    assert (stale_hours(view), frozen_hours(view)) == ([4], [])
    (found,) = marked
    assert found.why[1] == "topic clicks has holes, and which times their records had is not known"
    # The next one knows that they are no news.
    checkpoint(loss.open())
    assert rebuilt(loss)[1] == []


def test_views_of_a_topics_table_are_stale_if_it_is_made_anew_and_frozen_where_records_are_lost(
    loss: Loss, book: Book
) -> None:
    paths = clicks(book, 0.5, 2.5, iceberg="true")
    bring_up_to_date(book.lake, "topics", CLICKS)
    clicks_view(book, source="topics.clicks", hours=4)
    checkpoint(book)
    book.lake.store.delete(paths[1:])
    view, marked = rebuilt(loss)
    assert (stale_hours(view), frozen_hours(view)) == ([0, 1, 2, 3], [2])
    assert [(item.stale, item.frozen, len(item.why)) for item in marked] == [(4, 1, 2)]


# --- what was lost before --------------------------------------------------------------


def losses_of(book: Book) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in records(book, schema.source_losses))


def test_what_sources_had_lost_is_still_known(loss: Loss, book: Book) -> None:
    clicks(book, 0.5, 2.5)
    view_of(book, CLICKS, event_time="timestamp")
    book.metadata.delete_segments_before(CLICKS, 0, 1)
    before = losses_of(book)
    assert len(before) == 1
    checkpoint(book)
    view, marked = rebuilt(loss)
    assert (losses_of(loss.open()), marked) == (before, [])
    assert states(view, 0, 3) == ["frozen", "missing", "missing"]


def test_a_checkpoint_that_does_not_say_what_was_lost_leaves_nothing_before_the_first_record_to_build(
    loss: Loss, book: Book
) -> None:
    paths = clicks(book, 0.5, 2.5, 4.5)
    clicks_view(book, "built", hours=3)
    view_of(book, CLICKS, event_time="timestamp")
    book.metadata.delete_segments_before(CLICKS, 0, 1)
    as_of_an_older_version(book, checkpoint(book))
    view, marked = rebuilt(loss)
    assert states(view, 0, 4) == ["frozen", "frozen", "frozen", "missing"]
    assert marked == []
    # Neither does it say of which times a segment was.
    loss.open().lake.store.delete([paths[2]])
    as_of_an_older_version(loss.open(), checkpoint_again(loss.open()))
    view, marked = rebuilt(loss, "built")
    assert frozen_hours(view) == [0, 1, 2]
    assert [(item.name, item.frozen) for item in marked] == [("built", 2)]


def checkpoint_again(book: Book) -> str:
    book.topics.create("more", 1)
    return checkpoint(book)


def as_of_an_older_version(book: Book, path: str) -> None:
    """Have a checkpoint as it was written before sources' losses, and the times of segments, were in it."""
    store = book.lake.store
    assert list_checkpoints(store)[0] == path
    found = read_checkpoint(store, path)
    lines = _Lines()
    head = {"lakebook": "checkpoint", "format": 1, "revision": HEAD, "at": found.at, "book_id": found.book_id}
    lines.add([{**head, "epoch": found.epoch, "created_at": found.created_at}])
    for table, columns in found.columns.items():
        if table == "source_losses":
            continue
        width = 5 if table == "segments" else len(columns)
        lines.add([{"table": table, "columns": columns[:width]}])
        lines.add([row[:width] for row in found.rows[table]])
    store.delete([path])
    store.put_new(path, lines.finish())


def test_of_very_many_losses_the_oldest_are_told_as_one(
    loss: Loss, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "MOST_LOSSES", 3)
    clicks(book, 0.5, partitions=2)
    view_of(book, CLICKS, event_time="timestamp", interval="minute")
    topic = book.metadata.get_topic(CLICKS)
    assert topic is not None
    for part, minutes in ((0, (0, 4, 8, 12, 16)), (1, (0, 4, 8))):
        spans = [(ms(minute), ms(minute)) for minute in minutes]
        book._registry.write(lambda transaction: note_losses(transaction, "topic", topic.id, part, spans))  # noqa: B023
    produce(book, CLICKS, 1, 1)
    checkpoint(book)
    rebuilt(loss)
    rows = losses_of(loss.open())
    found = [(part, (begin - ms(0)) // 60_000, (end - ms(0)) // 60_000) for *_, part, begin, end in rows]
    assert found == [(0, 0, 9), (0, 12, 13), (0, 16, 17), (1, 0, 1), (1, 4, 5), (1, 8, 9)]


def ms(minutes: int) -> int:
    return int((T0 + minutes * MINUTE).timestamp() * 1000)


# --- pipelines -------------------------------------------------------------------------


def test_a_pipeline_whose_target_is_newer_than_the_checkpoint_is_stopped(loss: Loss, book: Book) -> None:
    book.topics.create("orders")
    target, other = (book.tables.create(name, "id BIGINT") for name in ("t", "other"))
    for table in (target, other):
        insert(table, {"id": 1})
        table.publish()
    for name, into in (("newer", "t"), ("same", "other")):
        book.pipelines.create(name, into=into, topics="orders", decoder="json")
    checkpoint(book)
    insert(target, {"id": 2})
    target.publish()
    loss.lose()
    report = loss.rebuild()
    (said,) = [text for text in report.unknown if "pipeline" in text]
    assert said.startswith("pipeline newer: ") and said.endswith("it is stopped")
    again = loss.open()
    newer, same = (again.pipelines[name].record for name in ("newer", "same"))
    assert (newer.state, same.state) == ("stopped", "active")
    assert "is newer than the checkpoint" in str(newer.last_error)
    assert rows_of_version(again.table("t")) == ["{'id': 1}", "{'id': 2}"]
    again.pipelines["newer"].resume()
    assert again.pipelines["newer"].record.state == "active"


def test_what_a_pipeline_has_still_to_read_stays_pinned(loss: Loss, book: Book) -> None:
    book.topics.create("orders", 2)
    source = orders(book, "sold")
    target = book.tables.create("flowed", "id BIGINT, value STRING")
    for number in range(2):
        produce(book, "orders", number, "a", "b")
    pipeline = book.pipelines.create("flow", into="flowed", topics="orders")
    book.pipelines.create("hasty", into="flowed", topics="orders", retention="stop")
    book.pipelines.create("of_table", into="flowed", tables="sold")
    flow(book, pipeline, target)
    for number in range(3):
        produce(book, "orders", 0, f"c{number}")
        order(source, 0.5, first=number)
    for table in (source, target):
        table.publish()
    before = pins_of(book)
    assert {row[0] for row in before} == {"pipeline-1", "pipeline-3-1"}
    checkpoint(book)
    again = loss.after()
    assert pins_of(again) == before
    again.resume_after_restore()
    again.metadata.delete_segments_before("orders", 0, 5)
    again.metadata.delete_segments_before("orders", 1, 2)
    again.table("sold").delete("id >= 0")
    again.cleaner.expire(seconds=0, versions=1)
    assert again.table("sold").to_arrow(version=1).num_rows == 1
    assert flow(again, again.pipelines["flow"], again.table("flowed")) == 3
    assert again.verify().ok


@pytest.mark.parametrize("is_shown", [False, True])
def test_records_below_the_log_start_come_back_for_a_pipeline_that_has_not_read_them(
    loss: Loss, book: Book, is_shown: bool
) -> None:
    book.topics.create("orders", 2, config={"iceberg": "true"} if is_shown else None)
    target = book.tables.create("flowed", "id BIGINT, value STRING")
    # Of the first segment one record is read, and the pipeline rests in the middle of it.
    produce(book, "orders", 0, "a")
    pipeline = book.pipelines.create("flow", into="flowed", topics="orders")
    book.pipelines.create("hasty", into="flowed", topics="orders", retention="stop")
    assert flow(book, pipeline, target) == 1
    produce(book, "orders", 0, "b", "c")
    for value in ("d", "e", "f"):
        produce(book, "orders", 0, value)
    produce(book, "orders", 1, "g")
    if is_shown:
        bring_up_to_date(book.lake, "topics", "orders")
    book.metadata.delete_segments_before("orders", 0, 5)
    book.metadata.delete_segments_before("orders", 1, 1)
    if is_shown:
        bring_up_to_date(book.lake, "topics", "orders")
    run_sql(book, "UPDATE pipeline_offsets SET next_offset = 2 WHERE partition_id = 0 AND pipeline_id = 1")
    run_sql(book, "UPDATE topic_leases SET from_offset = 2 WHERE partition_id = 0 AND id = 'pipeline-1'")
    target.publish()
    # Its files wait for their removal: nobody has to read them any more.
    stray = stray_segment(book, "orders", 0, 0, "removed")
    before, places = pins_of(book), segments_of(book)
    assert [place[1:] for place in places] == [(1, 2), (3, 3), (4, 4), (5, 5), (0, 0)]
    checkpoint(book)
    loss.lose()
    report = loss.rebuild()
    assert not report.holes and not report.unknown
    assert [item.path for item in report.left if "below the log start" in item.why][-1:] == [stray]
    again = loss.open()
    assert (segments_of(again), pins_of(again)) == (places, before)
    assert [(item.log_start, item.high_watermark) for item in again.metadata.list_partitions("orders").items] == [
        (5, 6),
        (1, 1),
    ]
    assert again.verify().ok
    again.resume_after_restore()
    Janitor(again.lake).run_once()
    assert flow(again, again.pipelines["flow"], again.table("flowed")) == 5
    assert rows_of_version(again.table("flowed")) == [
        str({"id": number, "value": value}) for number, value in [(0, "a"), (0, "g"), *enumerate("cdef", 2)]
    ]
    assert flow(again, again.pipelines["flow"], again.table("flowed")) == 0
    Janitor(again.lake).run_once()
    assert [place[1:] for place in segments_of(again)] == [(5, 5)]
    assert again.verify().ok


def test_a_pipeline_stops_where_records_below_the_log_start_did_not_come_back(loss: Loss, book: Book) -> None:
    book.topics.create("orders")
    target = book.tables.create("flowed", "id BIGINT, value STRING")
    book.pipelines.create("flow", into="flowed", topics="orders")
    paths = [produce(book, "orders", 0, value).s3_key for value in "abcd"]
    book.metadata.delete_segments_before("orders", 0, 3)
    target.publish()
    checkpoint(book)
    book.lake.store.delete([paths[0], paths[2]])
    loss.lose()
    report = loss.rebuild()
    # The first is no hole: all before the log start may be gone.
    assert [(item.first, item.last) for item in report.holes] == [(2, 2)]
    again = loss.open()
    assert [place[1:] for place in segments_of(again)] == [(1, 1), (3, 3)]
    assert [row[3] for row in pins_of(again)] == [1]
    assert again.verify().ok
    with pytest.raises(PipelineStopped, match="the records 0 to 0 of orders/0 are gone"):
        flow(again, again.pipelines["flow"], again.table("flowed"))


def segments_of(book: Book) -> list[tuple[Any, ...]]:
    """The segments that the registry has: their paths and offsets, in the order of these."""
    rows = sorted(records(book, schema.segments), key=lambda row: (row["partition_id"], row["base_offset"]))
    return [(row["s3_key"], row["base_offset"], row["end_offset"]) for row in rows]


def pins_of(book: Book) -> list[tuple[Any, ...]]:
    """What leases pin."""
    topics = [tuple(row.values())[:4] for row in records(book, schema.topic_leases)]
    return topics + [tuple(row.values())[:3] for row in records(book, schema.leases)]
