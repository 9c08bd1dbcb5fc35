"""Segments with files and footers, for tests of what writes them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from books import describe
from lake import lay, records
from lakebook import AppendTurn, Book, SegmentInfo
from lakebook.registry import schema
from lakebook.registry.stream_folders import StreamFolder
from lakebook.registry.transactions import new_id

T = TypeVar("T")

PATIENCE = 60
FOOTER = b"the end of a file"


def in_folder(folder: str, base: int, *, partition: int = 0, count: int = 10, **more: Any) -> SegmentInfo:
    """A segment whose file would lie in a folder."""
    return describe(partition=partition, base=base, count=count, s3_key=f"{folder}/{new_id()}.parquet", **more)


def footers_of(*segments: SegmentInfo) -> dict[str, bytes]:
    return {segment.s3_key: FOOTER for segment in segments}


def append(book: Book, turn: AppendTurn, *, count: int = 10, files: bool = False, **more: Any) -> AppendTurn:
    """Append one segment with its footer, and its file if that is asked for; the turn for the next one."""
    segment = in_folder(turn.folder, turn.next_offset, partition=turn.partition_id, count=count, **more)
    if files:
        lay(book, segment.s3_key, b"x" * segment.size_bytes)
    return book.metadata.append_segment(turn, segment, footers=footers_of(segment)).turn


def filled(book: Book, number: int = 5, *, partition: int = 0, files: bool = False) -> list[SegmentInfo]:
    """The segments of a partition after so many small ones were appended; its turn is given back."""
    turn = book.metadata.claim_append("orders", partition, holder="filler")
    for _ in range(number):
        turn = append(book, turn, files=files)
    book.metadata.release_append(turn)
    return list(book.metadata.get_segments("orders", partition))


def merged(folder: StreamFolder, old: list[SegmentInfo], **more: Any) -> SegmentInfo:
    """What replaces segments, in the folder of a merge."""
    first, last = old[0], old[-1]
    count = last.end_offset - first.base_offset + 1
    return in_folder(folder.folder, first.base_offset, partition=first.partition_id, count=count, **more)


def merge(book: Book, old: list[SegmentInfo], *, files: bool = False) -> SegmentInfo:
    """Merge segments."""
    folder = book.metadata.open_stream_folder("orders", "m", old[0].partition_id)
    new = merged(folder, old)
    if files:
        lay(book, new.s3_key, b"x" * new.size_bytes)
    return replace_with(book, folder, old, new)


def replace_with(
    book: Book, folder: StreamFolder, old: list[SegmentInfo], new: SegmentInfo, **more: Any
) -> SegmentInfo:
    assert folder.commit_id is not None
    assert folder.partition_id is not None
    return book.metadata.replace_segments(
        folder.topic_id,
        folder.partition_id,
        old,
        new,
        commit_id=folder.commit_id,
        footers=footers_of(new),
        **more,
    )


def folders(book: Book, *, ended: bool | None = None) -> list[str]:
    """The folders that are known, or only those that are ended, or are not."""
    rows = records(book, schema.stream_folders)
    return [row["folder"] for row in rows if ended is None or (row["ended_at"] is not None) == ended]


def footer_paths(book: Book) -> set[str]:
    return {row["file_path"] for row in records(book, schema.partition_metadata)}


def meanwhile(call: Callable[[], T], held: Any) -> T:
    """Begin a call while another one stands before its COMMIT, and let that go on; what the call returned."""
    with ThreadPoolExecutor(1) as pool:
        began = pool.submit(call)
        held.finish()
        return began.result(PATIENCE)
