"""Reading segments from an offset on, ahead of who asks for the records.

Any offset costs one look-up and one row group: which row group holds it is counted from the segment's
footer, which the registry has. A partition is read by one thread at a time, row group by row group, until
as many bytes wait as may. Who only looks at one place gets one row group; who reads on is read ahead for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc

from lakebook.errors import CorruptFooter, LakebookError, ObjectNotFound, ReadFailed
from lakebook.lake.footer_store import Footer, read_footer
from lakebook.lake.lake import Lake
from lakebook.registry.footers import load_footers
from lakebook.registry.segments import SegmentInfo
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.segment_files import TIMESTAMP, SegmentReader, check_offsets

_READERS = 4
# Offsets that are looked up at once, and how fast a reader that reads on comes to that: so that one that
# does not look costs one segment, and many small segments do not cost a query each.
_MOST_OFFSETS, _WIDER = 1000, 32
_FOOTERS_AT_ONCE = 32
# A segment may be replaced while it is looked for; hardly ever twice.
_LOOKS = 3
_MILLISECOND = timedelta(milliseconds=1)


def segment_footers(lake: Lake, segments: Sequence[SegmentInfo]) -> dict[str, Footer]:
    """The footers of segments by their paths: from memory, from the registry in one query, or from their files."""
    found: dict[str, Footer] = {}
    for segment in segments:
        kept = lake.footers.get((segment.s3_key, segment.checksum))
        if kept is not None:
            found[segment.s3_key] = kept
    absent = [segment for segment in segments if segment.s3_key not in found]
    if not absent:
        return found
    stored = lake.registry.read_with(lambda reader: load_footers(reader, [segment.s3_key for segment in absent]))
    for segment in absent:
        path, record = segment.s3_key, stored.get(segment.s3_key)
        metadata = read_footer(lake.store, path, segment.size_bytes) if record is None else record.metadata
        footer = Footer(metadata, segment.record_count)
        found[path] = lake.footers.put((path, segment.checksum), footer)
    return found


def open_segment(lake: Lake, segment: SegmentInfo, footer: Footer | None = None) -> SegmentReader:
    """A segment's reader. A file with other records than the registry says is refused."""
    path = segment.s3_key
    footer = footer or segment_footers(lake, [segment])[path]
    reader = SegmentReader(lake.store, path, footer.metadata, segment.base_offset)
    if reader.end != segment.end_offset + 1:
        raise CorruptFooter(
            f"it has {reader.end - segment.base_offset} records, and not {segment.record_count}",
            on=path,
            remedy="Run `lakebook verify`",
        )
    return reader


def offset_at(lake: Lake, metadata: MetadataStore, topic: str, partition: int, moment: datetime) -> int | None:
    """The offset of the first record at or after a time; none if all records are older."""
    # Records have milliseconds: the next whole one is the first that can match.
    moment += -timedelta(microseconds=moment.microsecond) % _MILLISECOND
    wanted = pa.scalar(moment.astimezone(UTC), TIMESTAMP)
    for look in range(_LOOKS):
        segment = metadata.find_segment_for_timestamp(topic, partition, moment)
        if segment is None:
            return None
        try:
            for batch in open_segment(lake, segment).batches(segment.base_offset, ["offset", "timestamp"]):
                place = pc.index(pc.greater_equal(batch.column("timestamp"), wanted), True).as_py()
                if place >= 0:
                    return int(batch.column("offset")[place].as_py())
            return segment.end_offset + 1
        except ObjectNotFound:
            # It was removed or replaced since it was found; whoever finds it again can say nothing better.
            if look == _LOOKS - 1:
                raise
    raise AssertionError("unreachable")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records from `base` to before `end`. Without a batch there are none: a hole that a rebuild has left."""

    base: int
    end: int
    batch: pa.RecordBatch | None

    @property
    def size(self) -> int:
        """The bytes it takes in memory."""
        return 0 if self.batch is None else int(self.batch.nbytes)


class PartitionStream:
    """The records of one partition from an offset on, in order; see `Fetcher`."""

    def __init__(self, lake: Lake, metadata: MetadataStore, topic_id: int, partition: int, start: int) -> None:
        self._lake = lake
        self._metadata = metadata
        self._topic_id = topic_id
        self._partition = partition
        #: The first offset that has not been fetched.
        self.next = start
        self.ready: deque[Fetched] = deque()
        self.size = 0
        self.error: Exception | None = None
        #: Whether a thread reads it now, whether nobody wants it any more, whether it is read ahead.
        self.busy = self.closed = self.eager = False
        # Used by the one thread that reads.
        self._segments: deque[SegmentInfo] = deque()
        self._footers: dict[str, Footer] = {}
        self._rows: Iterator[pa.RecordBatch] | None = None
        self._segment: SegmentInfo | None = None
        self._wide = 1

    def read(self, watermark: int) -> Fetched:
        """The next records. There are some: the next offset lies below the watermark."""
        try:
            return self._read(watermark)
        except ObjectNotFound as error:
            former = self._segment
            self.forget()
            found = self._metadata.find_pinned_segment(self._topic_id, self._partition, self.next)
            if former is None or found is None or found.s3_key == former.s3_key:
                raise ReadFailed(
                    f"the file of the offset {self.next} is gone though it is pinned",
                    on=error.on,
                    remedy="Run `lakebook verify`",
                ) from error
            return self._read(watermark)
        except LakebookError:
            self.forget()
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            path = self._segment.s3_key if self._segment is not None else "segment"
            self.forget()
            raise ReadFailed(f"it cannot be read ({error})", on=path, remedy="Run `lakebook verify`") from error

    def _read(self, watermark: int) -> Fetched:
        while True:
            if self._rows is None:
                self._segment = self._upcoming(watermark)
                if self._segment is None:
                    return Fetched(watermark, watermark, None)
                self._rows = self._open(self._segment)
            batch = next(self._rows, None)
            if batch is not None:
                assert self._segment is not None
                base = max(self.next, self._segment.base_offset)
                # The first and the last tell: the file was checked when it was written, and is checked by `verify`.
                for row in (0, batch.num_rows - 1):
                    check_offsets(batch.slice(row, 1), self._partition, base + row, self._segment.s3_key)
                return Fetched(base, base + batch.num_rows, batch)
            self._rows = None

    def _upcoming(self, watermark: int) -> SegmentInfo | None:
        """The segment with the next offset, or the first one after it."""
        while self._segments:
            segment = self._segments.popleft()
            if segment.end_offset >= self.next:
                return segment
        end = self.next
        while end < watermark:
            end = min(end + self._wide, watermark)
            self._wide = min(self._wide * _WIDER, _MOST_OFFSETS)
            found = self._metadata.list_segments_in(self._topic_id, self._partition, self.next, end)
            if found:
                self._segments.extend(found[1:])
                return found[0]
        return None

    def _open(self, segment: SegmentInfo) -> Iterator[pa.RecordBatch]:
        if segment.s3_key not in self._footers:
            upcoming = [segment, *list(self._segments)[: _FOOTERS_AT_ONCE - 1]]
            self._footers = segment_footers(self._lake, upcoming)
        footer = self._footers.pop(segment.s3_key)
        return open_segment(self._lake, segment, footer).batches(self.next)

    def forget(self) -> None:
        """Close the file that is read, and find the next records anew."""
        rows, self._rows = self._rows, None
        self._segments.clear()
        self._footers.clear()
        close = getattr(rows, "close", None)
        if close is not None:
            close()


class Fetcher:
    """Reads partitions in the background, each in order, all of them together no more than so many bytes ahead.

    `tell` is called whenever there is something new to take.
    """

    def __init__(self, lake: Lake, metadata: MetadataStore, most_bytes: int, tell: Callable[[], None]) -> None:
        self._lake = lake
        self._metadata = metadata
        self._most = most_bytes
        self._tell = tell
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._streams: set[PartitionStream] = set()
        self._bytes = 0
        self._closed = False

    def open(self, topic_id: int, partition: int, start: int) -> PartitionStream:
        """A stream of a partition's records from an offset on; nothing is read until it is asked for."""
        stream = PartitionStream(self._lake, self._metadata, topic_id, partition, start)
        with self._lock:
            self._streams.add(stream)
        return stream

    def drop(self, stream: PartitionStream) -> None:
        """Let go of a stream and of what it has read."""
        with self._lock:
            self._streams.discard(stream)
            self._bytes -= stream.size
            stream.ready.clear()
            stream.size, stream.closed = 0, True
            if not stream.busy:
                stream.forget()

    def fetch(self, stream: PartitionStream, watermark: int) -> None:
        """Have a stream read on, up to a watermark, unless enough of it waits."""
        with self._lock:
            if stream.busy or stream.error is not None or not self._wants(stream, watermark):
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="lakebook-fetching")
            stream.busy = True
            self._pool.submit(self._fill, stream, watermark)

    def head(self, stream: PartitionStream, position: int) -> Fetched | None:
        """What was read at or after a position; none if it has to be waited for. A failure is raised here, once."""
        with self._lock:
            self._trim(stream, position)
            if stream.ready:
                return stream.ready[0]
            error, stream.error = stream.error, None
        if error is not None:
            raise error
        return None

    def trim(self, stream: PartitionStream, position: int) -> None:
        """Let go of what lies before a position."""
        with self._lock:
            self._trim(stream, position)

    def _trim(self, stream: PartitionStream, position: int) -> None:
        while stream.ready and stream.ready[0].end <= position:
            size = stream.ready.popleft().size
            stream.size -= size
            self._bytes -= size
            stream.eager = True

    def close(self) -> None:
        """End all threads."""
        with self._lock:
            streams, self._closed = list(self._streams), True
        for stream in streams:
            self.drop(stream)
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _wants(self, stream: PartitionStream, watermark: int) -> bool:
        if self._closed or stream.closed or stream.next >= watermark or self._bytes >= self._most:
            return False
        return not stream.ready or (stream.eager and stream.size < self._most / max(1, len(self._streams)))

    def _fill(self, stream: PartitionStream, watermark: int) -> None:
        error: Exception | None = None
        try:
            while self._wants(stream, watermark):
                fetched = stream.read(watermark)
                with self._lock:
                    if stream.closed:
                        break
                    stream.ready.append(fetched)
                    stream.next = fetched.end
                    stream.size += fetched.size
                    self._bytes += fetched.size
                self._tell()
        except Exception as failed:  # noqa: BLE001 - raised to who reads
            error = failed
        with self._lock:
            stream.busy = False
            stream.error = error
            if stream.closed:
                stream.forget()
        self._tell()
