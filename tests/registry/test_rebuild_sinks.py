"""Which batches of sinks have landed is known again after a loss: one that is repeated lands once."""

from __future__ import annotations

import pytest

from lakebook import Book, RebuildReport
from lakebook.errors import StaleBatch
from lakebook.streams.merging import merge_topic
from lakebook.streams.segment_facts import batch_facts
from rebuilding import Loss, checkpoint, records_of, stray_segment
from streaming import land, produce

TOPIC = "orders"


@pytest.fixture
def book(loss: Loss) -> Book:
    book = loss.open(merge_segments=2, merge_quiet=0)
    book.metadata.create_topic(TOPIC, 2)
    return book


def batch(number: int) -> list[bytes]:
    return [b"%d.%d" % (number, place) for place in range(6)]


def land_next(book: Book, number: int, sink: str = "copies") -> bool:
    """Land a batch as a query does; whether it was there already."""
    return land(book, batch(number), spread=True, sink=sink, batch_id=number, of_query=True).duplicate


def values(book: Book, topic: str = TOPIC) -> list[bytes]:
    return sorted((value or b"") for some in records_of(book, topic).values() for _, value in some)


def rebuilt(loss: Loss) -> tuple[Book, RebuildReport]:
    loss.lose()
    report = loss.rebuild()
    return loss.open(merge_segments=2, merge_quiet=0), report


def require_sound(book: Book) -> None:
    found = book.verify()
    assert found.ok, found.findings


@pytest.mark.parametrize("where", ["before", "after", "around"])
def test_a_batch_that_is_repeated_after_a_rebuild_lands_once(loss: Loss, book: Book, where: str) -> None:
    if where in ("before", "around"):
        land_next(book, 0)
    checkpoint(book)
    if where != "before":
        land_next(book, 1)
    last = 0 if where == "before" else 1
    again, report = rebuilt(loss)
    assert report.is_complete, report.unknown
    assert again.metadata.last_batch(TOPIC, "copies") == last
    assert land_next(again, last)
    assert not land_next(again, last + 1)
    # Other sinks have numbers of their own.
    assert again.metadata.last_batch(TOPIC, "others") is None
    expected = {"before": (0, 1), "after": (1, 2), "around": (0, 1, 2)}[where]
    assert values(again) == sorted(value for number in expected for value in batch(number))
    if last:
        with pytest.raises(StaleBatch):
            land_next(again, 0)
    require_sound(again)


def test_without_a_checkpoint_segments_tell_which_batches_landed(loss: Loss, book: Book) -> None:
    land_next(book, 7)
    land_next(book, 8)
    land_next(book, 3, sink="others")
    land(book, [b"no sink"])
    topic = book.topics[TOPIC].record.id
    again, _ = rebuilt(loss)
    name = f"recovered_{topic}"
    assert [again.metadata.last_batch(name, sink) for sink in ("copies", "others", "none")] == [8, 3, None]
    assert len(values(again, name)) == 19
    require_sound(again)


def test_a_merge_tells_of_the_batches_that_it_was_made_of(loss: Loss, book: Book) -> None:
    checkpoint(book)
    for number in range(3):
        land_next(book, number)
        produce(book, TOPIC, 0, f"other {number}")
    assert merge_topic(book.lake, book.metadata, TOPIC).segments == 9
    # What it replaced has gone meanwhile, or in part.
    for number, path in enumerate(sorted(item.path for item in book.lake.store.list("topics"))):
        if "/s-" in path and number % 3:
            book.lake.store.delete_one(path)
    again, report = rebuilt(loss)
    assert not report.holes
    assert again.metadata.last_batch(TOPIC, "copies") == 2
    assert land_next(again, 2)
    assert len(values(again)) == 21
    require_sound(again)


def test_a_batch_that_was_not_stored_as_a_whole_has_not_landed(loss: Loss, book: Book) -> None:
    land_next(book, 0)
    checkpoint(book)
    told = batch_facts("an attempt", 6, "copies", 1)
    path = stray_segment(book, TOPIC, 0, 3, "1.0", "1.2", "1.4", folder="s-1", **told)
    again, report = rebuilt(loss)
    assert again.metadata.last_batch(TOPIC, "copies") == 0
    assert [left.why for left in report.left if left.path == path] == [
        "of a batch that was not stored as a whole: it never counted"
    ]
    assert values(again) == batch(0)
    assert not land_next(again, 1)
    assert values(again) == [*batch(0), *batch(1)]
    produce(again, TOPIC, 0, "behind it")
    # Nor has it after another loss: others have its offsets.
    again, report = rebuilt(loss)
    assert values(again) == [*batch(0), *batch(1), b"behind it"]
    assert not report.contested
    assert land_next(again, 1)
    require_sound(again)


def test_a_batch_that_was_stored_as_a_whole_counts_and_is_not_repeated(loss: Loss, book: Book) -> None:
    checkpoint(book)
    told = batch_facts("an attempt", 6, "copies", 0)
    stray_segment(book, TOPIC, 0, 0, "0.0", "0.2", "0.4", folder="s-1", **told)
    stray_segment(book, TOPIC, 1, 0, "0.1", "0.3", "0.5", folder="s-1", **told)
    again, report = rebuilt(loss)
    assert report.is_complete and len(report.unproven) == 2
    assert land_next(again, 0)
    assert values(again) == batch(0)
    require_sound(again)


def test_what_is_left_of_a_batch_counts_if_others_went_on_behind_it(loss: Loss, book: Book) -> None:
    checkpoint(book)
    land_next(book, 0)
    produce(book, TOPIC, 0, "behind it")
    lost = next(segment.s3_key for segment in book.metadata.each_segment(TOPIC, 1))
    book.lake.store.delete_one(lost)
    again, _ = rebuilt(loss)
    assert values(again) == [b"0.0", b"0.2", b"0.4", b"behind it"]
    assert land_next(again, 0)
    require_sound(again)


def test_no_part_of_a_batch_counts_of_which_another_part_is_disproved(loss: Loss, book: Book) -> None:
    produce(book, TOPIC, 0, "proven")
    checkpoint(book)
    told = batch_facts("an attempt", 4, "copies", 0)
    stray_segment(book, TOPIC, 0, 0, "0.0", "0.2", folder="s-1", **told)
    other = stray_segment(book, TOPIC, 1, 0, "0.1", "0.3", folder="s-1", **told)
    again, report = rebuilt(loss)
    assert values(again) == [b"proven"]
    assert other in {left.path for left in report.left}
    assert not land_next(again, 0)
    assert values(again) == sorted([b"proven", *batch(0)])
    require_sound(again)


def test_of_two_attempts_at_a_batch_neither_is_chosen(loss: Loss, book: Book) -> None:
    checkpoint(book)
    for attempt in ("one", "two"):
        told = batch_facts(attempt, 4, "copies", 0)
        stray_segment(book, TOPIC, 0, 0, f"{attempt} 0", f"{attempt} 2", folder=f"s-{attempt}", **told)
        # Only one of the places is claimed by both.
        stray_segment(book, TOPIC, 1, 0 if attempt == "one" else 2, "1", "3", folder=f"s-{attempt}", **told)
    again, report = rebuilt(loss)
    assert values(again) == []
    assert sum(len(item.paths) for item in report.contested) == 4
    assert not land_next(again, 0)
    assert values(again) == batch(0)
    require_sound(again)


def test_attempts_with_the_same_records_at_the_same_offsets_are_one(loss: Loss, book: Book) -> None:
    checkpoint(book)
    for attempt in ("one", "two"):
        told = batch_facts(attempt, 4, "copies", 0)
        for number in range(2 if attempt == "two" else 1):
            stray_segment(book, TOPIC, number, 0, f"0.{number}", f"0.{number + 2}", folder=f"s-{attempt}", **told)
    again, report = rebuilt(loss)
    assert values(again) == [b"0.0", b"0.1", b"0.2", b"0.3"]
    assert not report.contested
    assert land_next(again, 0)


def test_segments_of_before_say_nothing_of_sinks_and_are_read(loss: Loss, book: Book) -> None:
    checkpoint(book)
    stray_segment(book, TOPIC, 0, 0, "old", folder="s-1")
    again, report = rebuilt(loss)
    assert values(again) == [b"old"]
    assert any("which batches of its sinks" in text for text in report.unknown)
    require_sound(again)
