"""The life of a topic: created, written, read, resumed, cleaned up, deleted, and verified.

Everything happens in a book in a temporary folder, SQLite and a warehouse beside it, unless the settings say where.
"""

from __future__ import annotations

import sys
import tempfile

import engines

import lakebook
from lakebook import Book, SegmentInfo
from lakebook.errors import AppendTurnLost, LakebookError, OffsetBeyondWatermark


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


def show(text: str) -> None:
    print(f"  {text}")


def segment_at(book: Book, offset: int, count: int = 1000) -> SegmentInfo:
    """Store a file in the warehouse and describe it."""
    path = f"topics/orders/0/{offset:020}.parquet"
    data = b"records of the demo" * count
    book.lake.store.put_new(path, data)
    return SegmentInfo("orders", 0, offset, offset + count - 1, count, len(data), path)


def create(book: Book) -> None:
    say("A topic with two partitions, kept for a week")
    topic = book.metadata.create_topic("orders", 2, retention_ms=7 * 24 * 3600 * 1000)
    show(f"{topic.name}: {topic.partition_count} partitions, id {topic.id}")


def write(book: Book) -> None:
    say("A producer takes partition 0's append turn and records four segments")
    turn = book.metadata.claim_append("orders", 0, holder="producer-1")
    for _ in range(4):
        result = book.metadata.append_segment(turn, segment_at(book, turn.next_offset))
        turn = result.turn
        show(f"recorded {result.segments[0].base_offset}..{result.segments[0].end_offset}")
    book.metadata.release_append(turn)
    say("Another one takes over; the first, waking up late, is refused")
    book.metadata.release_append(book.metadata.claim_append("orders", 0, holder="producer-2"))
    try:
        book.metadata.append_segment(turn, segment_at(book, turn.next_offset))
    except AppendTurnLost as error:
        show(f"refused: {error}")


def read(book: Book) -> None:
    say("A consumer finds offset 1500 by one look-up, and commits where it will go on")
    segment = book.metadata.find_segment_for_offset("orders", 0, 1500)
    assert segment is not None
    show(f"offset 1500 is in {segment.s3_key}")
    book.metadata.commit_offset("analytics", "orders", 0, 2500, "invoices are written up to here")
    try:
        book.metadata.commit_offset("analytics", "orders", 0, 9999)
    except OffsetBeyondWatermark as error:
        show(f"refused: {error}")


def resume(book: Book) -> None:
    say("The process ends; a new one opens the book, and the consumer resumes")
    offset = book.metadata.get_committed_offset("analytics", "orders", 0)
    assert offset is not None
    segment = book.metadata.find_segment_for_offset("orders", 0, offset)
    assert segment is not None
    show(f"resuming at {offset}, in {segment.s3_key}")
    for entry in book.metadata.lag("analytics", "orders"):
        show(f"partition {entry.partition_id}: {entry.lag} records left")


def clean_up(book: Book) -> None:
    say("Retention removes whole segments; their files wait an hour for whoever still reads them")
    removed = book.metadata.delete_segments_before("orders", 0, 2500)
    partition = book.metadata.get_partition("orders", 0)
    assert partition is not None
    show(f"{removed} segments removed, the log starts at {partition.log_start}")
    for file in book.metadata.list_temporary_files():
        show(f"{file.file_path} goes at {file.expiration:%H:%M:%S}")
    say("The consumer goes back on purpose, and that is recorded")
    for reset in book.metadata.reset_offset("analytics", "orders", 0, "earliest", reason="replay of the demo"):
        show(f"{reset.group_id}: {reset.from_offset} -> {reset.to_offset}")


def look_back(book: Book) -> None:
    say("Every change left one event, in the order of each object")
    batch = book.events.read(book.events.beginning())
    for event in batch.events[-6:]:
        show(f"{event.object_kind} {event.object_id} #{event.sequence}: {event.operation} {event.table}")
    show(f"{len(batch.events)} events; the cursor behind them is {batch.cursor}")
    say("And nothing is wrong")
    checked = book.verify()
    assert checked.ok, checked.findings
    show(", ".join(f"{number} {name}" for name, number in checked.checked.items()))
    book.metadata.delete_topic("orders")
    show(f"orders is deleted: {book.metadata.get_topic('orders')}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lakebook-demo-") as folder:
        with lakebook.open(engines.place(folder)) as book:
            create(book)
            write(book)
            read(book)
        with lakebook.open(engines.place(folder)) as book:
            resume(book)
            clean_up(book)
            look_back(book)


if __name__ == "__main__":
    try:
        main()
    except LakebookError as error:
        raise SystemExit(f"error: {error}") from error
