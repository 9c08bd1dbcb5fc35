"""Published tables and files of position deletes for another warehouse.

What is copied as it is, has been copied. A file of deletes names files by their addresses, and so does all that
Iceberg keeps of a table: these are written anew, and the sizes they have now are recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakebook import failpoints
from lakebook.errors import CopyFailed, LakebookError, PathOutsideWarehouse
from lakebook.iceberg.relocation import Relocation
from lakebook.lake.footer_store import read_footer
from lakebook.lake.position_deletes import delete_columns
from lakebook.registry.publishing import MANIFEST_LIST, METADATA, pointer_of
from lakebook.registry.registry import Registry
from lakebook.registry.relocation import (
    DELETE_FILES,
    PUBLISHED_TABLES,
    Rewritten,
    files_of_kind,
    note_rewritten,
    note_sizes,
    note_summaries,
)

Progress = Callable[[str], None]


def check_places(registry: Registry, relocation: Relocation) -> None:
    """Refuse a source that was moved since it was published: its metadata speaks of another place."""
    for (table_id,) in registry.all(PUBLISHED_TABLES):
        path, _ = _files_of(registry, table_id)
        try:
            relocation.source.relative(relocation.read_metadata(path).location)
        except PathOutsideWarehouse as error:
            raise CopyFailed(
                f"its metadata is that of another place ({error.what})",
                on=relocation.source.uri(path),
                remedy="The source was moved: publish its tables anew (`lakebook tables publish`), and copy again",
            ) from None


def relocate_tables(registry: Registry, relocation: Relocation, progress: Progress = lambda path: None) -> set[str]:
    """Write anew what names files by their addresses, and record the sizes; the paths of all that was written.

    The registry is that of the book which is yet to be.
    """
    tables = [row[0] for row in registry.all(PUBLISHED_TABLES)]
    deletes: dict[str, None] = {row[0]: None for row in registry.all(DELETE_FILES)}
    for table_id in tables:
        # Also those that only branches and older snapshots have.
        deletes.update(dict.fromkeys(_published_deletes(registry, relocation, table_id)))
    sizes: dict[str, int] = {}
    for path in deletes:
        file = _relocated_deletes(relocation, path)
        registry.write(lambda transaction: note_rewritten(transaction, file))  # noqa: B023 - called at once
        sizes[path] = file.size
        progress(path)
    written = set(deletes)
    for table_id in tables:
        written |= _relocated_table(registry, relocation, table_id, sizes, progress)
    return written


def _published_deletes(registry: Registry, relocation: Relocation, table_id: int) -> set[str]:
    found: set[str] = set()
    seen: set[str] = set()
    metadata, lists = _files_of(registry, table_id)
    for _, manifests in relocation.lists(metadata, lists):
        for manifest in manifests:
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                found.update(relocation.delete_files(manifest))
    # One that nobody needs any more is still named by the manifest that says so.
    return {path for path in found if relocation.source.size(path) is not None}


def _files_of(registry: Registry, table_id: int) -> tuple[str, set[str]]:
    """The metadata file that a table is published as, and the manifest lists that are kept of it."""
    pointer = registry.read_with(lambda reader: pointer_of(reader, table_id))
    assert pointer is not None
    lists = registry.read_with(lambda reader: files_of_kind(reader, table_id, MANIFEST_LIST))
    return pointer.metadata_location, set(lists)


def _relocated_table(
    registry: Registry, relocation: Relocation, table_id: int, sizes: dict[str, int], progress: Progress
) -> set[str]:
    """Write the manifests, the lists of them and the metadata files of a table anew; their paths."""
    current, lists = _files_of(registry, table_id)
    metadata = relocation.read_metadata(current)
    made: dict[str, int] = {}
    grown: dict[int, dict[str, int]] = {}
    for snapshot, listed in relocation.lists(current, lists):
        renamed = []
        for manifest in listed:
            path = relocation.source.relative(manifest.manifest_path)
            if path not in made:
                made[path] = relocation.manifest(manifest, metadata, sizes)
                progress(path)
            renamed.append(relocation.renamed(manifest, made[path]))
        path = relocation.source.relative(snapshot.manifest_list)
        made[path] = relocation.manifest_list(snapshot, renamed)
        progress(path)
        if more := relocation.grown(snapshot, listed, sizes):
            grown[snapshot.snapshot_id] = more
    for path in registry.read_with(lambda reader: files_of_kind(reader, table_id, METADATA)):
        made[path] = relocation.metadata(path, grown)
        progress(path)
    failpoints.reach("copy.table_relocated")
    registry.write(lambda transaction: note_sizes(transaction, made))
    registry.write(lambda transaction: note_summaries(transaction, table_id, grown))
    return set(made)


def _relocated_deletes(relocation: Relocation, path: str) -> Rewritten:
    """Write a file of deletes anew, in the same row groups."""
    source, target = relocation.source, relocation.target
    target.delete_one(path)
    try:
        with source.open(path) as stream, pq.ParquetFile(stream) as opened:
            (name, _) = delete_columns(path, opened.schema_arrow)
            place = opened.schema_arrow.get_field_index(name)
            with (
                target.create(path) as sink,
                pq.ParquetWriter(sink, opened.schema_arrow, compression=_codec(opened)) as writer,
            ):
                for group in range(opened.num_row_groups):
                    rows = opened.read_row_group(group)
                    field = rows.schema.field(place)
                    moved = _moved_column(relocation, rows.column(place)).cast(field.type)
                    writer.write_table(rows.set_column(place, field, moved), row_group_size=max(1, rows.num_rows))
    except LakebookError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CopyFailed(
            f"the file of deletes cannot be read ({error})", on=path, remedy="Run `lakebook verify` on the source"
        ) from None
    (measured,) = target.measure([path])
    return Rewritten(path, measured.size, measured.checksum, read_footer(target, path, measured.size))


def _codec(opened: pq.ParquetFile) -> str:
    found = opened.metadata
    if not found.num_row_groups:
        return "zstd"
    codec = str(found.row_group(0).column(0).compression)
    return "none" if codec == "UNCOMPRESSED" else codec.lower()


def _moved_column(relocation: Relocation, column: pa.ChunkedArray) -> pa.Array:
    """Locations in the words of the other warehouse; these are the same few in many rows."""
    encoded = column.combine_chunks().cast(pa.string()).dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    names = pa.array([relocation.moved(name) for name in encoded.dictionary.to_pylist()], pa.string())
    return pc.take(names, encoded.indices)
