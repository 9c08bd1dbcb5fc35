"""Every kind of damage to a segment is found, and a sound book is told to be sound."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from books import MEMORY, POSTGRESQL, Place, describe
from lake import in_memory, lay, objects, own_warehouse, records, replace_bytes, run_sql  # noqa: F401
from lakebook import Book, SegmentInfo
from lakebook.clock import ManualClock, to_datetime
from lakebook.components.janitor import Janitor
from lakebook.registry import schema
from lakebook.streams import checking
from lakebook.streams.merging import merge_topic
from lakebook.streams.segment_files import CONTENT_SCHEMA, encoded, stamped
from streaming import produce

GRACE = 100.0
QUIET = 61.0

Damage = Callable[[Book, SegmentInfo], None]


@pytest.fixture(params=[MEMORY, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place]) -> Place:
    """Both databases; where the bytes lie makes no difference here."""
    return make_place(request.param)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def book(place: Place, clock: ManualClock) -> Book:
    book = place.open(clock=clock, temporary_file_grace=GRACE, sweep_grace=GRACE, merge_segments=2)
    book.metadata.create_topic("orders", 2)
    for number in range(3):
        produce(book, "orders", 0, f"{number}.0", f"{number}.1")
    produce(book, "orders", 1, "other")
    return book


def findings(book: Book) -> list[tuple[str, str]]:
    return [(finding.check, finding.on) for finding in book.verify().findings]


def rewritten(number: int, base: int, count: int, moment: int = 1_700_000_000_000) -> bytes:
    """The bytes of another segment."""
    times = pa.array([to_datetime(moment)] * count, CONTENT_SCHEMA.field("timestamp").type)
    nothing = [pa.nulls(count, CONTENT_SCHEMA.field(name).type) for name in ("key", "value", "headers")]
    return encoded(stamped(pa.table([times, *nothing], schema=CONTENT_SCHEMA), number, base))


def record(book: Book, data: bytes) -> SegmentInfo:
    """Have bytes recorded as the two records that come next, as a producer with a bug would."""
    turn = book.metadata.claim_append("orders", 0)
    path = lay(book, f"{turn.folder}/wrong.parquet", data)
    (found,) = book.lake.store.measure([path])
    at = to_datetime(1_700_000_000_000)
    segment = describe(
        base=turn.next_offset, count=2, s3_key=path, checksum=found.checksum, min_timestamp=at, max_timestamp=at
    )
    footer = data[-8 - int.from_bytes(data[-8:-4], "little") : -8]
    turn = book.metadata.append_segments(turn, [replace(segment, size_bytes=found.size)], footers={path: footer}).turn
    book.metadata.release_append(turn)
    return segment


def flipped(data: bytes) -> bytes:
    return data[:40] + bytes([data[40] ^ 1]) + data[41:]


DAMAGES: dict[str, tuple[Damage, str]] = {
    "gone": (lambda book, segment: book.lake.store.delete_one(segment.s3_key), "files"),
    "cut short": (lambda book, segment: replace_bytes(book, segment.s3_key, lambda data: data[:-20]), "files"),
    "a bit flipped": (lambda book, segment: replace_bytes(book, segment.s3_key, flipped), "files"),
    "another footer": (
        lambda book, segment: run_sql(
            book,
            "UPDATE partition_metadata SET metadata = (SELECT metadata FROM partition_metadata"
            f" WHERE file_path <> '{segment.s3_key}' ORDER BY file_path LIMIT 1) WHERE file_path = '{segment.s3_key}'",
        ),
        "footers",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_a_segment_is_found(book: Book, damage: str) -> None:
    assert book.verify().ok
    segment = list(book.metadata.each_segment("orders", 0))[1]
    inflict, check = DAMAGES[damage]
    inflict(book, segment)
    found = findings(book)
    assert (check, segment.s3_key) in found
    assert {on for _, on in found} == {segment.s3_key}
    # Nothing of it can be mended without guessing, and no byte is read where that was not asked for.
    assert segment.s3_key in {finding.on for finding in book.repair().left}
    assert all(finding.check != "segments" for finding in book.verify(files=False).findings)


@pytest.mark.parametrize(
    ("base", "count", "number", "moment"),
    [(8, 2, 0, 0), (6, 2, 1, 0), (6, 2, 0, 1), (6, 1, 0, 0), (6, 3, 0, 0)],
    ids=["other offsets", "another partition", "other times", "too few", "too many"],
)
def test_a_file_that_does_not_hold_what_was_recorded_is_found(
    book: Book, base: int, count: int, number: int, moment: int
) -> None:
    segment = record(book, rewritten(number, base, count, 1_700_000_000_000 + moment))
    assert findings(book) == [("segments", segment.s3_key)]


def test_a_file_that_holds_what_was_recorded_is_right(book: Book) -> None:
    record(book, rewritten(0, 6, 2))
    assert book.verify().ok


def test_what_was_checked_is_told(book: Book, clock: ManualClock) -> None:
    checked = book.verify().checked
    assert (checked["segment_files"], checked["merged_files"], checked["stream_objects"]) == (4, 0, 4)
    clock.advance(QUIET)
    merge_topic(book.lake, book.metadata, "orders")
    checked = book.verify().checked
    assert (checked["segment_files"], checked["merged_files"], checked["stream_objects"]) == (2, 3, 5)


@in_memory
def test_segments_are_looked_at_a_few_at_a_time(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_AT_ONCE", 3)
    assert book.verify().checked["segment_files"] == 4


def test_a_merged_file_that_a_reader_may_need_and_that_is_gone_is_found(book: Book, clock: ManualClock) -> None:
    book.metadata.pin_topic("orders", {0: 0})
    clock.advance(QUIET)
    merge_topic(book.lake, book.metadata, "orders")
    gone = records(book, schema.retired_segments)[0]["file_path"]
    book.lake.store.delete_one(gone)
    assert findings(book) == [("files", gone)]


def test_an_object_that_no_row_knows_is_found_unless_its_folder_is_yet_to_be_swept(
    book: Book, clock: ManualClock
) -> None:
    turn = book.metadata.claim_append("orders", 0)
    lay(book, f"{turn.folder}/at-work.parquet", b"half a file")
    checked = book.verify()
    assert checked.ok
    assert [text for text in checked.unfinished if "not swept" in text] == [
        f"{turn.folder}: 1 objects are not swept yet"
    ]
    stray = lay(book, "topics/1/0/t99/stray.parquet", b"stray")
    assert findings(book) == [("orphans", stray)]


def test_what_goes_while_it_is_looked_at_is_not_wrong(
    book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = checking._measured

    def meanwhile(lake: Any, recorded: dict[str, str | None]) -> Any:
        monkeypatch.undo()
        book.metadata.delete_topic("orders")
        clock.advance(GRACE + 1)
        janitor = Janitor(book.lake)
        janitor.run_once("files")
        assert objects(book) == []
        return inner(lake, recorded)

    monkeypatch.setattr(checking, "_measured", meanwhile)
    assert book.verify().ok


def test_segments_that_were_recorded_by_hand_have_no_files_to_be_checked(place: Place) -> None:
    book = place.open()
    book.metadata.create_topic("by-hand")
    book.metadata.add_segment(describe("by-hand"))
    checked = book.verify()
    assert checked.ok
    assert "segment_files" not in checked.checked


def test_a_book_of_streams_without_files_is_verified_without_loading_arrow(tmp_path: Path) -> None:
    program = (
        "import sys, lakebook\n"
        f"with lakebook.open({str(tmp_path / 'book')!r}) as book:\n"
        "    book.metadata.create_topic('t')\n"
        "    book.metadata.claim_append('t', 0)\n"
        "    assert book.verify().ok\n"
        "assert 'pyarrow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
