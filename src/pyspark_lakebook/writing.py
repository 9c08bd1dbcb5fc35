"""Appending to a topic: executors stage rows, the driver stamps them and records the batch as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from lakebook.clock import SystemClock
from lakebook.errors import InvalidSetting, LakebookError
from lakebook.lake.lake import check_reachable
from lakebook.registry.topics import not_found
from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse
from lakebook.streams.landing import land_batch, most_record, remove_staged
from lakebook.streams.partitioners import KEY, check_partitioner
from lakebook.streams.staging import Stage, Staged, Stager
from pyspark_lakebook.columns import check_written
from pyspark_lakebook.options import Options

if TYPE_CHECKING:
    import pyarrow as pa

# What Spark tells every task of a streaming query. The id stays the same when the query is started again.
_QUERY = "sql.streaming.queryId"


@dataclass
class StagedRows(WriterCommitMessage):
    """What a task has staged, and for which query."""

    stage: Stage
    staged: tuple[Staged, ...]
    query: str | None


class _Writer:
    """What batches and streams have in common. It is made where the registry is, and sent to executors."""

    def __init__(self, given: Options, schema: StructType) -> None:
        assert given.topic is not None
        self._given = given
        self._topic: str = given.topic
        check_written(schema, f"topic {given.topic}")
        check_partitioner(given.text("partitioner") or KEY)
        self._place: tuple[Warehouse, Stage] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The folder is opened when the writer is about to be sent to executors, not when it is made: to commit
        # a batch of a stream Spark makes another one, which would open a folder for nothing.
        if self._place is None:
            self._place = self._open()
        return self.__dict__

    def _open(self) -> tuple[Warehouse, Stage]:
        """The warehouse, and a folder in it for what will be staged."""
        with self._given.opened() as book:
            check_reachable(book.lake)
            topic = book.metadata.get_topic(self._topic)
            if topic is None:
                raise not_found(self._topic)
            # Nobody renews it while the tasks run, for however long that is.
            folder = book.metadata.open_stream_folder(self._topic, "s", silent=book.settings.lease_maximum)
            assert folder.commit_id is not None
            stage = Stage(
                topic.name,
                topic.id,
                folder.folder,
                folder.commit_id,
                topic.partition_count,
                (self._given.text("partitioner") or KEY) == KEY,
                most_record(book.lake, topic),
                book.settings.upload_seconds,
            )
            return book.lake.store.warehouse, stage

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of a task."""
        assert self._place is not None
        warehouse, stage = self._place
        stager, clock = Stager(ObjectStore(warehouse), stage), SystemClock()
        for batch in iterator:
            stager.add(batch, clock.now_ms())
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(_QUERY)
        return StagedRows(stage, tuple(stager.finish()), query)

    def _land(
        self,
        messages: Sequence[WriterCommitMessage | None],
        sink: str | None,
        batch_id: int | None,
        *,
        of_query: bool = False,
    ) -> None:
        done = [message for message in messages if isinstance(message, StagedRows)]
        if done:
            staged = [item for message in done for item in message.staged]
            with self._given.opened() as book:
                land_batch(
                    book.lake,
                    book.metadata,
                    done[0].stage,
                    staged,
                    sink=sink,
                    batch_id=batch_id,
                    of_query=of_query,
                )

    def _discard(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Remove what was staged. If that fails, or no task has said where that is, a sweep does it."""
        stages = {message.stage for message in messages if isinstance(message, StagedRows)}
        if self._place is not None:
            stages.add(self._place[1])
        with suppress(LakebookError):
            if stages:
                with self._given.opened() as book:
                    for stage in stages:
                        remove_staged(book.lake, book.metadata, stage)


class TopicWriter(_Writer, DataSourceArrowWriter):
    """Appends a frame to a topic: all of it, or nothing."""

    def __init__(self, given: Options, schema: StructType) -> None:
        super().__init__(given, schema)
        self._sink, self._batch_id = given.text("sink"), given.number("batchId", least=0)
        if (self._sink is None) != (self._batch_id is None):
            raise InvalidSetting("sink and batchId go together", on="format lakebook", remedy="Give both, or neither")

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Record what all tasks have staged."""
        self._land(messages, self._sink, self._batch_id)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Forget what was staged."""
        self._discard(messages)


class TopicStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Appends the batches of a query to a topic, each exactly once."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Record what the tasks of a batch have staged, unless an earlier attempt has."""
        queries = [message.query for message in messages if isinstance(message, StagedRows) and message.query]
        sink = self._given.text("sink") or (queries[0] if queries else None)
        if messages and sink is None:
            raise InvalidSetting(
                "the query has no id", on=f"topic {self._topic}", remedy='Name it with .option("sink", …)'
            )
        self._land(messages, sink, batchId, of_query=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Forget what was staged."""
        self._discard(messages)
