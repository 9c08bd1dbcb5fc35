"""Sweeping the folders of segments: what crashed producers, sinks and merges left there, and no row knows.

A folder is swept by its row, never by a listing of the warehouse, and only when its fence is closed: from
then on nothing that lies in it can come to count. It is swept again a grace later, for uploads that come
late, and forgotten when it was quiet. Whatever cannot be decided stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lakebook.clock import Enough, never
from lakebook.errors import LakebookError
from lakebook.lake.lake import Lake
from lakebook.registry.holding import refuse_while_held, restored
from lakebook.registry.stream_folders import (
    StreamFolder,
    forget_folder,
    note_folder_swept,
    unknown_stream_paths,
    unswept_folders,
)
from lakebook.registry.table_files import CHUNK, chunks
from lakebook.streams.metadata_store import MetadataStore


@dataclass
class SweptStreams:
    """What a sweep of streams did."""

    #: Append turns that ran out long ago, and merges and batches that were silent for long: all fenced now.
    fenced: int = 0
    #: Files of merged segments that no reader needs any more.
    released: int = 0
    #: Objects that do not count and were removed.
    objects: int = 0
    #: Folders that are quiet and forgotten.
    settled: int = 0
    #: What could not be done, and why. It is tried again by the next sweep.
    failed: list[tuple[str, str]] = field(default_factory=list)


def sweep_streams(lake: Lake, metadata: MetadataStore, *, enough: Enough = never) -> SweptStreams:
    """Fence what is dead, let go of merged files, and sweep the folders whose grace has passed."""
    refuse_while_held(lake.registry)
    result = SweptStreams()
    result.fenced += metadata.expire_turns(enough=enough)
    result.fenced += metadata.settle_stream_folders(enough=enough)
    result.released += metadata.release_retired(enough=enough)
    failed: set[str] = set()
    now = lake.clock.now_ms()
    while True:
        found = lake.registry.read_with(
            lambda reader: unswept_folders(reader, now, lake.settings.sweep_grace, CHUNK + len(failed))
        )
        left = [folder for folder in found if folder.folder not in failed]
        if not left:
            return result
        for folder in left:
            if enough():
                return result
            try:
                _sweep(lake, folder, result)
            except LakebookError as error:
                failed.add(folder.folder)
                result.failed.append((folder.folder, str(error)))


def _sweep(lake: Lake, folder: StreamFolder, result: SweptStreams) -> None:
    removed = remove_unknown(lake, folder.folder)
    result.objects += removed
    # Swept before, a grace ago, and still quiet: nobody writes there any more.
    if removed == 0 and folder.swept_at is not None:
        lake.registry.write(lambda transaction: forget_folder(transaction, folder.folder))
        result.settled += 1
    else:
        lake.registry.write(lambda transaction: note_folder_swept(transaction, folder.folder))


def remove_unknown(lake: Lake, folder: str) -> int:
    """Remove what no row knows from a folder whose fence is closed; how many objects."""
    removed = 0
    former = restored(lake.registry)
    listed = (item.path for item in lake.store.list(folder) if former is None or not former.was_there(item.modified))
    # Listed before the rows are asked: whatever is to count had its row before the fence was closed.
    for items in chunks(listed):
        unknown = lake.registry.read_with(lambda reader: unknown_stream_paths(reader, items))  # noqa: B023
        for _, error in lake.store.delete(unknown):
            raise error
        removed += len(unknown)
        for path in unknown:
            lake.store.remove_empty_folders(path)
    # What somebody was storing in parts when it died is no object yet, but costs as much.
    return removed + lake.store.end_uploads(folder)
