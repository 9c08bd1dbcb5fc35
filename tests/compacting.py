"""Compactions without Spark: all that a compaction does, but Arrow writes the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from lakebook import Book
from lakebook.lake.attempts import Attempt
from lakebook.lake.compaction import Choice, CompactionReport, begin, choose, claimed, finish
from lakebook.lake.inserting import write_arrow
from lakebook.lake.leasing import Lease, acquire
from lakebook.lake.reading import read_table
from lakebook.lake.rewriting import of_files
from lakebook.lake.steps import Steps
from lakebook.lake.table import Table
from lakebook.registry.table_files import NewFile, TableChange

MUCH = 2**40


def choice_of(book: Book, table: Table, max_bytes: int = MUCH) -> Choice | None:
    """What would be compacted now."""
    with acquire(book.lake, table.record) as lease:
        return choose(book.lake, table.record, lease, max_bytes)


def write(book: Book, choice: Choice, attempt: Attempt, lease: Lease) -> list[NewFile]:
    """Write each bundle as one file."""
    record = attempt.table
    return [
        file
        for _, bundle in choice.bundles
        for file in write_arrow(
            book.lake, record, attempt, choice.plan.shape, read_table(of_files(choice.plan, bundle), lease)
        )
    ]


def by_arrow(book: Book, table: Table, max_bytes: int = MUCH) -> CompactionReport | None:
    """Compact once; none if there is nothing to gain."""
    record = table.record
    with claimed(book.lake, record) as claim, acquire(book.lake, record) as lease:
        choice = choose(book.lake, record, lease, max_bytes)
        if choice is None:
            return None
        with begin(book.lake, record, choice) as attempt:
            files = write(book, choice, attempt, lease)
            return finish(book.lake, lease, attempt, choice, files, Steps(book.lake.clock), claim)


def enter_sizes(book: Book, table: Table, sizes: Sequence[tuple[int, str]], spec_id: int = 0) -> None:
    """Enter rows of files that are not there: each of so many bytes, in a partition with these values."""
    now = datetime.now(UTC)
    one = NewFile("", 0, "parquet", 10, "checksum", 1, now)
    with Attempt(book.lake, table.record, writes=False) as attempt:
        files = [
            replace(
                one,
                file_path=f"made-up/{attempt.commit_id}/{number}.parquet",
                file_size=size,
                partition_path=values,
                partition_values=values,
                spec_id=spec_id,
            )
            for number, (size, values) in enumerate(sizes)
        ]
        attempt.commit(TableChange("append", files))
