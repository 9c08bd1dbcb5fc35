"""Staging the rows of a batch: where the rows are, without the registry and without offsets.

Executors write what they have of each partition to files of Arrow in the batch's folder. Whoever commits
the batch stamps them and makes segments of them; see `landing`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from lakebook.registry.partitions import no_partition
from lakebook.registry.transactions import new_id
from lakebook.storage.objects import ObjectStore
from lakebook.streams.partitioners import another_partition
from lakebook.streams.record_tables import by_partition, check_sizes, parts_of
from lakebook.streams.segment_files import CONTENT_SCHEMA
from lakebook.streams.uploading import within

# What a task holds in memory at most, beside the batch it just got.
_MOST_HELD = 64 * 1024**2
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")


@dataclass(frozen=True)
class Staged:
    """Rows of one partition in a staged file, in the order in which they shall have offsets."""

    path: str
    partition: int
    records: int


@dataclass(frozen=True)
class Stage:
    """Where and how to stage the rows for a topic: plain values, fit to be sent to executors."""

    topic: str
    topic_id: int
    folder: str
    commit_id: str
    partitions: int
    by_key: bool
    most_record: int
    #: Seconds that it may take to store a file.
    upload_seconds: float | None = None


class Stager:
    """Stages the rows of one task. Each file has rows of one partition."""

    def __init__(self, store: ObjectStore, stage: Stage) -> None:
        self._store = store
        self._stage = stage
        self._held: dict[int, list[pa.Table]] = {}
        self._sizes: dict[int, int] = {}
        self._sticky: int | None = None
        self.staged: list[Staged] = []

    def add(self, rows: pa.RecordBatch | pa.Table, now_ms: int) -> None:
        """Take rows; refuse what is no record. Those without a time get this one."""
        stage = self._stage
        for part in parts_of(stage.topic, rows, now_ms, by_key=stage.by_key, partitions=stage.partitions):
            check_sizes(stage.topic, part.sizes, stage.most_record)
            for number, theirs, sizes in by_partition(part):
                self._hold(self._number(number), theirs, sum(sizes.to_pylist()))
        while sum(self._sizes.values()) > _MOST_HELD:
            self._store_partition(max(self._sizes, key=self._sizes.__getitem__))

    def finish(self) -> list[Staged]:
        """Store what is left; all that was staged."""
        for number in sorted(self._held):
            self._store_partition(number)
        return self.staged

    def _number(self, number: int | None) -> int:
        if number is None:
            if self._sticky is None:
                self._sticky = another_partition(self._stage.partitions, None)
            return self._sticky
        if not 0 <= number < self._stage.partitions:
            raise no_partition(self._stage.topic, number)
        return number

    def _hold(self, number: int, rows: pa.Table, size: int) -> None:
        self._held.setdefault(number, []).append(rows)
        self._sizes[number] = self._sizes.get(number, 0) + size

    def _store_partition(self, number: int) -> None:
        rows = pa.concat_tables(self._held.pop(number))
        del self._sizes[number]
        if number == self._sticky:
            self._sticky = another_partition(self._stage.partitions, number)
        path = f"{self._stage.folder}/{new_id()}.arrow"
        seconds = self._stage.upload_seconds
        if seconds is None:
            self._write(path, rows)
        else:
            within(seconds, path, lambda: self._write(path, rows))
        self.staged.append(Staged(path, number, rows.num_rows))

    def _write(self, path: str, rows: pa.Table) -> None:
        # It need not outlive the power: without the commit it counts for nobody.
        with (
            self._store.create(path, durable=False) as stream,
            pa.ipc.new_stream(stream, CONTENT_SCHEMA, options=_OPTIONS) as writer,
        ):
            writer.write_table(rows)


def read_staged(store: ObjectStore, path: str) -> pa.Table:
    """The rows of a staged file."""
    with store.open(path) as stream, pa.ipc.open_stream(stream) as reader:
        return reader.read_all()
