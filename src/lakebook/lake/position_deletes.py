"""Position deletes: the rows of a file that are deleted, by their numbers, from files of deletes.

A file of deletes has a row for each deleted one: where the file is that has it, and its number in that
file, counted from 0. A file may be named by several of them, and a row more than once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakebook.errors import LakebookError, ReadFailed
from lakebook.lake.lake import Cache
from lakebook.names import shown
from lakebook.registry.table_files import DeleteFile, PlannedFile
from lakebook.spark.session import reason_of
from lakebook.storage.objects import ObjectStore

# The columns by Iceberg's ids for them, and by their names where a writer gave no ids.
_COLUMNS = {2147483546: "file_path", 2147483545: "pos"}
_ID = b"PARQUET:field_id"
# A file of deletes about many files is read once, not once for each of them, unless it is larger than this.
_SHARED_ROWS = 1_000_000
_KEPT_ROWS = 4 * _SHARED_ROWS


class DeleteMarks:
    """Marks by which Iceberg finds the deletes of a file: numbers in the order they came, and scopes.

    A file of deletes that is not about one file alone applies to the files of its partition, which are
    its scope, that have the same or a lower number.
    """

    def __init__(self, deletes: Sequence[DeleteFile]) -> None:
        numbered = all(delete.sequence_number is not None for delete in deletes)
        ordered = sorted(
            deletes,
            key=lambda delete: (delete.sequence_number or 0 if numbered else 0, delete.from_version, delete.id),
        )
        self._numbers = {delete.id: number for number, delete in enumerate(ordered, 1)}
        keys = dict.fromkeys(_partition(delete) for delete in deletes if delete.referenced_path is None)
        self._scopes = {key: number for number, key in enumerate(keys, 1)}

    @property
    def scoped(self) -> bool:
        """Whether some files of deletes are about more than one file."""
        return bool(self._scopes)

    @property
    def last_number(self) -> int:
        """The number of files that came after all deletes."""
        return len(self._numbers) + 1

    def number_of(self, delete: DeleteFile) -> int:
        """The number of a file of deletes."""
        return self._numbers[delete.id]

    def first_number(self, deletes: Sequence[DeleteFile]) -> int | None:
        """The number of a file that these apply to: that of the first; none if there are no deletes at all."""
        return min(map(self.number_of, deletes), default=self.last_number) if self._numbers else None

    def scope_of(self, file: PlannedFile | DeleteFile) -> int:
        """The scope of a file; 0 is that of all files which only deletes about them alone apply to."""
        return self._scopes.get(_partition(file), 0) if self._scopes else 0


def _partition(file: PlannedFile | DeleteFile) -> tuple[int, str]:
    return file.spec_id, file.partition_values


class Positions:
    """Numbers of rows, in their order and each once."""

    def __init__(self, values: pa.Array) -> None:
        self._values = values
        # To search in, without a copy.
        self._view = memoryview(values.buffers()[1] or b"").cast("q")[values.offset : values.offset + len(values)]

    def __len__(self) -> int:
        return len(self._values)

    def _between(self, first: int, end: int) -> pa.Array:
        start = bisect_left(self._view, first)
        return self._values.slice(start, bisect_left(self._view, end, start) - start)

    def in_ranges(self, ranges: Iterable[tuple[int, int]]) -> Positions:
        """What they are where only these ranges of rows are read, one after the other; each a start and an end."""
        found = [pa.array([], pa.int64())]
        before = 0
        for first, end in ranges:
            found.append(pc.add(self._between(first, end), before - first))
            before += end - first
        return Positions(pa.concat_arrays(found))

    def left_out_of(self, batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
        """The other rows of a batch whose first row has this number."""
        inside = self._between(first, first + batch.num_rows)
        if not len(inside):
            return batch
        is_deleted = pc.is_in(_numbers(batch.num_rows), value_set=pc.subtract(inside, first))
        return batch.filter(pc.invert(is_deleted))


@lru_cache(4)
def _numbers(count: int) -> pa.Array:
    """The numbers from 0 on; most batches have as many rows as the one before."""
    return pa.array(range(count), pa.int64())


@dataclass(frozen=True)
class _Shared:
    """All rows of a file of deletes, by the files they are about."""

    rows: int
    places: dict[str, int]
    positions: pa.ListArray

    def of(self, location: str) -> pa.Array:
        place = self.places.get(location)
        return self.positions[place].values if place is not None else self.positions.values[:0]


class DeletedRows:
    """The positions that files of deletes name. Small files are kept in memory for the next that asks."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._shared = Cache(_KEPT_ROWS, lambda found: found.rows + 1)

    def of(self, location: str, rows: int, deletes: Sequence[DeleteFile]) -> Positions | None:
        """The deleted rows of a file that has so many; none if there are none."""
        found: list[pa.Array] = []
        number = 0
        for delete in deletes:
            for positions in self._positions(delete, location):
                # Those beyond the file delete nothing.
                inside = pc.and_(pc.greater_equal(positions, 0), pc.less(positions, rows))
                found.append(positions.filter(inside))
                number += len(found[-1])
                if number > 2 * rows:
                    # Then most of them are there more than once.
                    found = [pc.unique(pa.concat_arrays(found))]
                    number = len(found[0])
        return Positions(pc.unique(pa.concat_arrays(found)).sort()) if number else None

    def _positions(self, delete: DeleteFile, location: str) -> Iterator[pa.Array]:
        if delete.referenced_path is not None or delete.row_count > _SHARED_ROWS:
            yield from _read_some(self._store, delete.file_path, location)
            return
        shared: _Shared | None = self._shared.get(delete.file_path)
        if shared is None:
            shared = self._shared.put(delete.file_path, _read_all(self._store, delete.file_path))
        yield shared.of(location)


def _read_some(store: ObjectStore, path: str, location: str) -> Iterator[pa.Array]:
    """The positions that a file of deletes has for one file, batch by batch."""
    with _opened(store, path) as (opened, columns):
        groups = [group for group in range(opened.num_row_groups) if _may_have(opened, columns[0], group, location)]
        for batch in opened.iter_batches(row_groups=groups, columns=columns):
            files, positions = _checked(path, batch.select(columns))
            place = files.dictionary.index(location).as_py()
            if place >= 0:
                yield positions.filter(pc.equal(files.indices, place))


def _read_all(store: ObjectStore, path: str) -> _Shared:
    """The positions of a file of deletes, by the files that it names."""
    with _opened(store, path) as (opened, columns):
        whole = opened.read(columns=columns).select(columns).unify_dictionaries().combine_chunks()
    if not whole.num_rows:
        return _Shared(0, {}, pa.array([], pa.list_(pa.int64())))
    files, positions = _checked(path, whole.to_batches()[0])
    grouped = pa.table([files.indices, positions], ["file", "pos"]).group_by("file").aggregate([("pos", "list")])
    named = files.dictionary.take(grouped.column("file").combine_chunks()).to_pylist()
    lists = grouped.column("pos_list").combine_chunks()
    return _Shared(whole.num_rows, {name: place for place, name in enumerate(named)}, lists)


@contextmanager
def _opened(store: ObjectStore, path: str) -> Iterator[tuple[pq.ParquetFile, list[str]]]:
    """A file of deletes, and the names that its two columns have."""
    try:
        with store.open(path) as stream:
            footer = pq.read_metadata(stream)
            names = delete_columns(path, footer.schema.to_arrow_schema())
            # As a dictionary: these are the same few texts in many rows.
            with pq.ParquetFile(stream, metadata=footer, read_dictionary=names[:1]) as opened:
                yield opened, names
    except LakebookError:
        raise
    except Exception as error:
        raise ReadFailed(
            f"the file of deletes cannot be read ({reason_of(error)})", on=path, remedy="Run `lakebook verify`"
        ) from error


def delete_columns(path: str, columns: pa.Schema) -> list[str]:
    """The names of the two columns of a file of deletes: where the file is, and the number of the row."""
    ids = {int((field.metadata or {}).get(_ID, -1)): field.name for field in columns}
    names = [ids.get(field_id, name) for field_id, name in _COLUMNS.items()]
    if not set(names) <= set(columns.names):
        raise ReadFailed(
            f"it is no file of position deletes: its columns are {shown(columns.names)}",
            on=path,
            remedy="Run `lakebook verify`",
        )
    return names


def _may_have(opened: pq.ParquetFile, column: str, group: int, location: str) -> bool:
    """Whether a row group can have rows about a file, by its statistics."""
    found = opened.metadata.row_group(group)
    for number in range(found.num_columns):
        chunk = found.column(number)
        if chunk.path_in_schema == column:
            bounds = chunk.statistics
            if bounds is None or not bounds.has_min_max or not isinstance(bounds.min, str):
                return True
            return bool(bounds.min <= location <= bounds.max)
    return True


def _checked(path: str, batch: pa.RecordBatch) -> tuple[pa.DictionaryArray, pa.Array]:
    files, positions = batch.columns
    if not isinstance(files, pa.DictionaryArray) or not pa.types.is_integer(positions.type):
        raise ReadFailed(
            f"it is no file of position deletes: its columns are {files.type} and {positions.type}", on=path
        )
    if files.null_count or positions.null_count:
        raise ReadFailed("it is no file of position deletes: a value is missing", on=path)
    texts = pa.DictionaryArray.from_arrays(files.indices, files.dictionary.cast(pa.string()))
    return texts, positions.cast(pa.int64())
