"""`verify` of segments' bytes: every file is there, and holds exactly the records that the registry has confirmed.

Verifying a live book must not cry wolf: what looks wrong is looked at again, because retention, a merge or
a sweep may have been at work between the two looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pyarrow.compute as pc

from lakebook.clock import to_ms
from lakebook.errors import InvalidFile, LakebookError, ObjectNotFound
from lakebook.lake.checking import Checked
from lakebook.lake.footer_store import read_footer
from lakebook.lake.footers import upgraded
from lakebook.lake.lake import Lake
from lakebook.registry.footers import StoredFooter
from lakebook.registry.holding import restored
from lakebook.registry.inserts import folders_above
from lakebook.registry.segment_checks import (
    known_folders,
    present_segments,
    retired_files,
    segments_with_files,
    still_retired,
)
from lakebook.registry.segments import SegmentInfo
from lakebook.registry.stream_checks import Finding
from lakebook.registry.stream_folders import TOPICS, unknown_stream_paths
from lakebook.registry.table_files import CHUNK, chunks
from lakebook.storage.answers import Measured
from lakebook.storage.objects import WORKERS
from lakebook.streams.segment_files import SegmentReader, check_offsets

Progress = Callable[[str], None]

# Segments that are looked at together, with their footers.
_AT_ONCE = 200
_CHECKED_COLUMNS = ("partition", "offset", "timestamp")


def verify_segments(lake: Lake, progress: Progress = lambda step: None) -> Checked:
    """Check the files of segments against the registry, byte by byte and record by record."""
    result = Checked()
    progress("segment files")
    result.checked["segment_files"] = _check_segments(lake, result)
    progress("merged files")
    result.checked["merged_files"] = _check_retired(lake, result)
    progress("stream folders")
    result.checked["stream_objects"] = _check_objects(lake, result)
    return result


def _check_segments(lake: Lake, result: Checked) -> int:
    number, after = 0, ""
    while True:
        start = after
        segments, footers = lake.registry.in_snapshot(
            lambda reader: segments_with_files(reader, start, _AT_ONCE)  # noqa: B023
        )
        if not segments:
            return number
        number += len(segments)
        after = segments[-1].id
        suspects = list(_wrong_segments(lake, segments, footers))
        if suspects:
            ids = {segment.id for segment, _ in suspects}
            there = lake.registry.read_with(lambda reader: present_segments(reader, ids))  # noqa: B023
            result.findings += [finding for segment, finding in suspects if segment.id in there]


def _wrong_segments(
    lake: Lake, segments: list[SegmentInfo], footers: dict[str, StoredFooter]
) -> Iterator[tuple[SegmentInfo, Finding]]:
    measured = _measured(lake, {segment.s3_key: segment.checksum for segment in segments})
    for segment in segments:
        found = measured[segment.s3_key]
        if isinstance(found, str):
            yield segment, Finding("files", segment.s3_key, found)
            continue
        if found.size != segment.size_bytes or segment.checksum not in (None, found.checksum):
            what = f"its bytes are not those that were recorded ({found.size} bytes, {found.checksum})"
            yield segment, Finding("files", segment.s3_key, what)
        try:
            yield from ((segment, finding) for finding in _wrong_records(lake, segment, footers, found.size))
        except Exception as error:  # noqa: BLE001 - whatever a parser says of a damaged file
            what = error.what if isinstance(error, LakebookError) else f"{type(error).__name__}: {error}"
            check = "segments" if isinstance(error, InvalidFile) else "files"
            yield segment, Finding(check, segment.s3_key, f"its records cannot be read ({what})")


def _measured(lake: Lake, recorded: Mapping[str, str | None]) -> dict[str, Measured | str]:
    """The sizes and checksums of files, or why they cannot be taken."""

    def measure(path: str) -> Measured | str:
        try:
            return lake.store.measure_as(path, recorded[path] or "")
        except ObjectNotFound:
            return "it does not exist"
        except LakebookError as error:
            return f"it cannot be read ({error.what})"

    with ThreadPoolExecutor(WORKERS) as pool:
        return dict(zip(recorded, pool.map(measure, recorded), strict=True))


def _wrong_records(lake: Lake, segment: SegmentInfo, footers: dict[str, StoredFooter], size: int) -> Iterator[Finding]:
    """What differs between a segment's row, its stored footer and its file, which has that many bytes."""
    path, stored = segment.s3_key, footers[segment.s3_key]
    ours = upgraded(stored.metadata, stored.partition_format_version, segment.record_count, on=path)
    if ours != read_footer(lake.store, path, size):
        yield Finding("footers", path, "the stored footer differs from the file's")
        return
    place = segment.base_offset
    least: list[int] = []
    most: list[int] = []
    for batch in SegmentReader(lake.store, path, ours, place).batches(place, _CHECKED_COLUMNS):
        check_offsets(batch, segment.partition_id, place, path)
        place += batch.num_rows
        times = pc.min_max(batch.column("timestamp")).as_py()
        least.append(to_ms(times["min"]))
        most.append(to_ms(times["max"]))
    if place != segment.end_offset + 1:
        count = place - segment.base_offset
        yield Finding("segments", path, f"it has {count} records instead of {segment.record_count}")
        return
    assert segment.min_timestamp is not None and segment.max_timestamp is not None
    if (min(least), max(most)) != (to_ms(segment.min_timestamp), to_ms(segment.max_timestamp)):
        yield Finding("segments", path, "the times of its records are not those that were recorded")


def _check_retired(lake: Lake, result: Checked) -> int:
    """Files of merged segments, which readers with a lease may be about to open."""
    number, after = 0, ""
    while True:
        start = after
        page = lake.registry.read_with(lambda reader: retired_files(reader, start, CHUNK))  # noqa: B023
        if not page:
            return number
        number += len(page)
        after = page[-1][0]
        wrong = {path: found for path, size in page if (found := lake.store.size(path)) != size}
        there = lake.registry.read_with(lambda reader: still_retired(reader, wrong)) if wrong else set()  # noqa: B023
        for path in sorted(there):
            what = "it does not exist" if wrong[path] is None else f"it has {wrong[path]} bytes"
            result.findings.append(Finding("files", path, f"it was merged, and readers may need it, but {what}"))


def _check_objects(lake: Lake, result: Checked) -> int:
    """Objects that no row knows. In a folder that is not forgotten yet they are somebody's work, or will be swept."""
    number = 0
    left: dict[str, int] = {}
    former = restored(lake.registry)
    for items in chunks(lake.store.list(TOPICS)):
        number += len(items)
        written = {item.path: item.modified for item in items}
        paths = [item.path for item in items]
        unknown = lake.registry.read_with(lambda reader: unknown_stream_paths(reader, paths))  # noqa: B023
        above = sorted({folder for path in unknown for folder in folders_above(path)})
        folders = lake.registry.read_with(lambda reader: known_folders(reader, above)) if above else set()  # noqa: B023
        for path in unknown:
            if former is not None and former.was_there(written[path]):
                result.unfinished.append(former.unknown(path, written[path]))
                continue
            mine = next((folder for folder in folders_above(path) if folder in folders), None)
            if mine is not None:
                left[mine] = left.get(mine, 0) + 1
            # In this order: what was forgotten or handed over between the two looks is gone by then.
            elif _is_unknown(lake, path) and lake.store.size(path) is not None:
                result.findings.append(Finding("orphans", path, "no row refers to it"))
    result.unfinished += [f"{folder}: {count} objects are not swept yet" for folder, count in sorted(left.items())]
    return number


def _is_unknown(lake: Lake, path: str) -> bool:
    return bool(lake.registry.read_with(lambda reader: unknown_stream_paths(reader, [path])))
