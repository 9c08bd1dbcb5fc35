"""Whatever the history of a book was: what was published or in the checkpoint answers as before the loss."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from books import SQLITE
from compacting import by_arrow
from lake import insert
from lakebook import Book
from lakebook.streams.mirroring import bring_up_to_date
from rebuilding import Loss, answers, checkpoint, group_answers, records_of, rows_of_version
from streaming import produce

STEPS = ("append", "insert", "delete", "compact", "publish", "tag", "column", "commit", "retain", "mirror", "drop")


def begin(book: Book) -> None:
    book.metadata.create_topic("orders", 2, config={"iceberg": "true"})
    book.metadata.ensure_consumer_group("readers")
    words = book.tables.create("words", "id BIGINT, word STRING, part BIGINT", partition_by=["part"])
    insert(words, {"id": 1, "word": "first", "part": 2})
    book.tables.create("passing", "id BIGINT")


def act(book: Book, step: str, number: int) -> None:
    words = book.table("words")
    match step:
        case "append":
            produce(book, "orders", number % 2, f"{number}.0", f"{number}.1")
        case "insert":
            insert(words, *({"id": 10 * number + n, "word": f"w{n}", "part": n % 2} for n in range(3)))
        case "delete":
            words.delete(f"part = {number % 2}")
        case "compact":
            by_arrow(book, words)
        case "publish":
            words.publish()
        case "tag":
            words.publish()
            words.tag(f"at-{number}")
        case "column":
            with words.update_schema() as change:
                change.add_column(f"extra_{number}", "DOUBLE")
        case "commit":
            partition = book.metadata.get_partition("orders", 0)
            assert partition is not None
            book.metadata.commit_offset("readers", "orders", 0, partition.high_watermark)
        case "retain":
            partition = book.metadata.get_partition("orders", 1)
            assert partition is not None
            book.metadata.delete_segments_before("orders", 1, partition.high_watermark // 2)
        case "mirror":
            bring_up_to_date(book.lake, "topics", "orders")
        case "drop":
            if any(item.name == "passing" for item in book.tables.list().items):
                insert(book.table("passing"), {"id": number})
                book.tables.drop("passing")


def newest(book: Book) -> dict[str, Any]:
    """What is known of a book whose every version is published, whenever its checkpoint was taken."""
    words = book.table("words")
    return {
        "words": rows_of_version(words),
        "some": rows_of_version(words, None, "id < 25"),
        "version": words.record.version,
        "tags": sorted((tag.name, tag.version) for tag in words.tags()),
        "records": records_of(book, "orders"),
    }


# A book is made, lost and rebuilt for each of them: few, and others with every run.
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.sampled_from(STEPS), min_size=4, max_size=10),
    place=st.integers(min_value=0, max_value=10),
)
def test_a_rebuilt_book_answers_as_before(steps: list[str], place: int) -> None:
    with tempfile.TemporaryDirectory(prefix="lb-") as folder:
        loss = Loss(SQLITE, Path(folder), lambda: "")
        try:
            check_history(loss, steps, min(place, len(steps)))
        finally:
            loss.close()


def check_history(loss: Loss, steps: list[str], place: int) -> None:
    book = loss.open()
    begin(book)
    for number, step in enumerate(steps[:place]):
        act(book, step, number)
    checkpoint(book)
    known = group_answers(book)
    is_last = place == len(steps)
    before = answers(book) if is_last else {}
    for number, step in enumerate(steps[place:], place):
        act(book, step, number)
    if not is_last:
        book.table("words").publish()
    expected = newest(book)
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    assert not report.contested
    assert newest(again) == expected
    assert group_answers(again) == known
    if is_last:
        assert answers(again) == before
        assert report.is_complete, report.unknown
    found = again.verify()
    assert found.ok, found.findings
    insert(again.table("words"), {"id": 1, "word": "new", "part": 0})
    again.publish_pending()
    found = again.verify()
    assert found.ok, found.findings
