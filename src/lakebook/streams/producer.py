"""A producer: records, one by one or as Arrow, into the partitions of a topic.

Records gather per partition and become segments by size, number or age. A record is acknowledged when its
segment is stored and recorded. What cannot be stored is kept and tried again for a while, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import datetime
from types import TracebackType
from typing import Any, TypeAlias

import pyarrow as pa

from lakebook import forks
from lakebook.errors import InvalidInput, InvalidRecord, LakebookError, ProducerClosed
from lakebook.lake.lake import Lake
from lakebook.names import check_id, check_name, shown
from lakebook.registry.partitions import no_partition
from lakebook.registry.topics import Topic, not_found
from lakebook.registry.transactions import new_id
from lakebook.streams.batching import (
    OVERHEAD,
    Acknowledgement,
    Batch,
    Checked,
    Content,
    GivenHeaders,
    OffsetRange,
    Receipt,
    check_record,
    failed,
)
from lakebook.streams.dispatch import Dispatcher, Lane, Limits
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.partitioners import KEY, another_partition, check_partitioner, partition_of_key
from lakebook.streams.record_tables import Cuts, Part, by_partition, check_sizes, parts_of, too_large
from lakebook.streams.segment_files import COMPRESSION
from lakebook.streams.sending import Identity, PartitionSender

#: A record for `send_many`: its value alone, or what `send` takes, by name.
Sendable: TypeAlias = Content | Mapping[str, Any]

_COMPRESSIONS = ("none", "snappy", "gzip", "lz4", "zstd")
_FIELDS = frozenset({"value", "key", "headers", "timestamp", "partition"})
_SEGMENT_BYTES = 64 * 1024**2
_SEGMENT_RECORDS = 1_000_000
# A column of bytes must not have 2 GiB, and a record is not divided.
_MOST_BYTES = 512 * 1024**2
# Batches of which the buffer has room: one is stored while others fill.
_BATCHES = 4
# Seconds after which a busy producer looks whether its topic was changed or grown.
_LOOK_AGAIN = 5.0
# Seconds for which a block that failed waits for what it has sent before.
_PARTING = 5.0


class Producer:
    """Sends records to a topic. Close it, or use it in a `with` block; several threads may send at once."""

    def __init__(
        self,
        lake: Lake,
        metadata: MetadataStore,
        topic: str,
        *,
        producer_id: str | None = None,
        partitioner: str = KEY,
        linger: float | None = None,
        buffer: int | None = None,
        compression: str | None = None,
        timeout: float | None = None,
        on_close: Callable[[Producer], object] = lambda producer: None,
    ) -> None:
        check_name("topic", topic)
        self._by_key = check_partitioner(partitioner) == KEY
        self._linger = None if linger is None else _number("linger", linger, 0)
        self._seconds = lake.settings.produce_seconds if timeout is None else _number("timeout", timeout, 0.001)
        self._buffer = lake.settings.producer_buffer if buffer is None else int(_number("buffer", buffer, 1))
        if compression is not None and compression not in _COMPRESSIONS:
            raise InvalidInput(
                f"there is no compression {shown(compression)}", on="producer", remedy=f"Use one of {_COMPRESSIONS}"
            )
        self._given_compression = compression
        self._lake, self._metadata, self._clock = lake, metadata, lake.clock
        self._on_close = on_close
        found = metadata.get_topic(topic)
        if found is None:
            raise not_found(topic)
        self.topic = topic
        self.producer_id = new_id() if producer_id is None else check_id("producer", producer_id)
        # A random id has had no life before.
        self.epoch = 0 if producer_id is None else metadata.register_producer(self.producer_id)
        self._identity = Identity(self.producer_id, self.epoch)
        self._dispatcher = Dispatcher(topic, self._clock, lake.metrics, self._buffer, self._send)
        self._sticky: tuple[int, Batch | None] | None = None
        self._closed = False
        self._forked = False
        self._adopt(found)
        forks.watch(self)

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close(_PARTING)
        except LakebookError as failure:
            # The reason why the block ended is the one to be heard; the senders are told the other.
            if error is not None:
                error.add_note(f"Its producer ended with {type(failure).__name__}: {failure}")

    def __repr__(self) -> str:
        return f"Producer({self.topic!r}, producer_id={self.producer_id!r})"

    def after_fork_in_child(self) -> None:
        """Refuse everything in the child: the records and the threads are the parent's."""
        self._closed = self._forked = True
        self._dispatcher.make_locks()
        self._dispatcher.refuse(
            ProducerClosed(
                "it belongs to the process that forked this one",
                on=f"producer of {self.topic}",
                remedy="Open the book and a producer in this process",
            )
        )

    # --- sending ---------------------------------------------------------------------

    def send(
        self,
        value: Content,
        key: Content = None,
        *,
        headers: GivenHeaders = (),
        timestamp: datetime | None = None,
        partition: int | None = None,
    ) -> Future[Acknowledgement]:
        """Send a record; what is returned becomes its acknowledgement, or the reason why there is none.

        Texts are stored as UTF-8; a value of none is a tombstone. Waits while the buffer is full.
        """
        record = self._checked(value, key, headers, timestamp)
        if partition is not None:
            self._check_partition(partition)
        with self._dispatcher.lock:
            return self._take(record, partition)

    def send_many(self, records: Iterable[Sendable]) -> list[Future[Acknowledgement]]:
        """Send several records, in order. If one of them cannot be a record, none is sent."""
        checked = [self._checked_item(item) for item in records]
        sent: list[Future[Acknowledgement]] = []
        refused: LakebookError | None = None
        with self._dispatcher.lock:
            for record, partition in checked:
                try:
                    sent.append(self._take(record, partition))
                except LakebookError as error:
                    refused = error
                    break
        if refused is not None:
            # Those before them were taken.
            sent += [failed(refused) for _ in checked[len(sent) :]]
        return sent

    def send_table(self, table: pa.Table | pa.RecordBatch) -> Future[tuple[OffsetRange, ...]]:
        """Send the rows of a table with the columns value and, if they are there, key, timestamp, headers, partition.

        What is returned becomes the ranges of offsets where the rows are. Rows of one partition keep their
        order. If one row cannot be stored it becomes the reason, and the other rows may be there.
        """
        now, partitions = self._clock.now_ms(), self._topic.partition_count
        parts = list(parts_of(self.topic, table, now, by_key=self._by_key, partitions=partitions))
        for part in parts:
            check_sizes(self.topic, part.sizes, self._most_record)
            self._check_partitions(part)
        receipt = Receipt(self.topic, sum(part.rows.num_rows for part in parts))
        try:
            for part in parts:
                for number, rows, sizes in by_partition(part):
                    self._take_rows(number, rows, Cuts(sizes), receipt)
        except LakebookError as error:
            receipt.failed(error)
        if not parts:
            receipt.pending.set_result(())
        return receipt.pending

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was sent is acknowledged or has failed; raise the first failure."""
        self._refuse_child()
        self._dispatcher.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Send what is left, give the turns back and end the threads; raise the first failure.

        After `timeout` seconds what is still not stored fails.
        """
        if self._closed:
            return
        self._closed = True
        over = ProducerClosed("it is closed", on=f"producer of {self.topic}", remedy="Open another one")
        self._dispatcher.refuse(over)
        try:
            self._dispatcher.flush(timeout)
        finally:
            self._dispatcher.end(over)
            self._on_close(self)

    # --- records ---------------------------------------------------------------------

    def _checked(self, value: Any, key: Any, headers: Any, timestamp: Any) -> Checked:
        record = check_record(self.topic, value, key, headers, timestamp, self._clock.now_ms())
        if record[-1] > self._most_record + OVERHEAD:
            raise too_large(self.topic, record[-1] - OVERHEAD, self._most_record)
        return record

    def _checked_item(self, item: Any) -> tuple[Checked, int | None]:
        if not isinstance(item, Mapping):
            return self._checked(item, None, (), None), None
        if not item.keys() <= _FIELDS:
            raise InvalidRecord(
                f"{shown(item)} has more than a record has",
                on=f"record for {self.topic}",
                remedy=f"Give {', '.join(sorted(_FIELDS))}",
            )
        partition = item.get("partition")
        if partition is not None:
            self._check_partition(partition)
        record = self._checked(item.get("value"), item.get("key"), item.get("headers", ()), item.get("timestamp"))
        return record, partition

    def _check_partition(self, number: object) -> None:
        if type(number) is not int or number < 0:
            raise no_partition(self.topic, number)
        if number >= self._topic.partition_count:
            # It may have grown.
            self._look()
            if number >= self._topic.partition_count:
                raise no_partition(self.topic, number)

    def _check_partitions(self, part: Part) -> None:
        import pyarrow.compute as pc

        bounds = pc.min_max(part.partitions).as_py()
        for number in (bounds["min"], bounds["max"]):
            if number is not None:
                self._check_partition(number)

    def _take(self, record: Checked, partition: int | None) -> Future[Acknowledgement]:
        dispatcher, size, key = self._dispatcher, record[-1], record[1]
        dispatcher.make_room(size)
        sticky = False
        if partition is None:
            if key is not None and self._by_key:
                partition = partition_of_key(key, self._topic.partition_count)
            else:
                partition, sticky = self._sticky_partition(), True
        lane = self._lane(partition)
        batch = dispatcher.batch_for(lane, size)
        sent = batch.add(record)
        dispatcher.added(lane, batch, size)
        if sticky:
            self._sticky = (lane.number, lane.open)
        return sent

    def _take_rows(self, number: int | None, rows: pa.Table, cuts: Cuts, receipt: Receipt) -> None:
        """Take rows of one partition, in pieces for which there is room."""
        dispatcher = self._dispatcher
        start = 0
        while start < rows.num_rows:
            limits = dispatcher.limits
            end, size = cuts.piece(start, limits.batch_bytes, limits.batch_records)
            with dispatcher.lock:
                dispatcher.make_room(size)
                lane = self._lane(self._sticky_partition() if number is None else number)
                batch = dispatcher.batch_for(lane, size)
                if batch.count and batch.count + end - start > limits.batch_records:
                    # As many as the batch still takes.
                    end, size = cuts.piece(start, size, limits.batch_records - batch.count)
                batch.add_rows(rows.slice(start, end - start), size, receipt)
                dispatcher.added(lane, batch, size)
                if number is None:
                    self._sticky = (lane.number, lane.open)
            start = end

    def _sticky_partition(self) -> int:
        """Where records without a key gather: in one partition until its batch is complete, then in another."""
        if self._sticky is not None:
            number, batch = self._sticky
            if batch is not None and self._lane(number).open is batch:
                return number
            return another_partition(self._topic.partition_count, number)
        return another_partition(self._topic.partition_count, None)

    def _lane(self, number: int) -> Lane:
        lane = self._dispatcher.lanes.get(number)
        if lane is None:
            sender = PartitionSender(self._lake, self._metadata, lambda: self._topic, number, self._identity)
            lane = self._dispatcher.lanes[number] = Lane(number, sender)
        return lane

    # --- the topic -------------------------------------------------------------------

    def _look(self) -> None:
        """Notice that the topic has grown, has another configuration, or is gone."""
        self._looked = self._clock.monotonic()
        found = self._metadata.get_topic(self.topic)
        if found is None or found.id != self._topic.id:
            raise not_found(self.topic)
        self._adopt(found)

    def _adopt(self, topic: Topic) -> None:
        self._topic, self._looked = topic, self._clock.monotonic()
        config = topic.config
        # A child of this buffer's size would leave no room for the next.
        most = max(1, min(self._buffer // _BATCHES, _MOST_BYTES))
        if self._linger is not None:
            linger = self._linger
        elif "segment.ms" in config:
            linger = int(config["segment.ms"]) / 1000
        else:
            linger = self._lake.settings.producer_linger
        self._dispatcher.limits = Limits(
            batch_bytes=min(int(config.get("segment.bytes", _SEGMENT_BYTES)), most),
            batch_records=int(config.get("segment.records", _SEGMENT_RECORDS)),
            linger=linger,
            seconds=self._seconds,
        )
        largest = min(self._buffer, _MOST_BYTES)
        self._most_record = min(int(config.get("max.message.bytes", largest)), largest)
        self._compression = self._given_compression or config.get("compression.type", COMPRESSION)
        self._log_append_time = config.get("message.timestamp.type") == "LogAppendTime"

    def _send(self, lane: Lane, batch: Batch) -> int:
        """One try to store and record a batch, in a thread of the dispatcher."""
        now = self._clock.monotonic()
        if now - self._looked >= _LOOK_AGAIN:
            self._look()
        return lane.sender.send(
            batch,
            min(self._lake.settings.upload_seconds, batch.deadline - now),
            compression=self._compression,
            log_append_time=self._log_append_time,
        )

    def _refuse_child(self) -> None:
        if self._forked:
            raise ProducerClosed("it belongs to the process that forked this one", on=f"producer of {self.topic}")


def _number(name: str, value: object, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        raise InvalidInput(f"{shown(value)} cannot be {name}", on="producer", remedy=f"Use at least {least}")
    return value
