"""Reading a version of a table: planned where the registry is, read where the executors are."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from lakebook.errors import ObjectNotFound, ReadFailed
from lakebook.iceberg.staging import spark_type
from lakebook.lake.detached import DetachedFiles, detached
from lakebook.lake.lake import check_reachable
from lakebook.registry.leases import pin_loaded
from pyspark_lakebook.columns import check_read
from pyspark_lakebook.options import Options

if TYPE_CHECKING:
    from lakebook.book import Book
    from lakebook.lake.table import PinnedTable

_TASK_BYTES = 64 * 1024**2


def columns_of(given: Options) -> StructType:
    """The columns of the version that is asked for."""
    with given.opened() as book, _pinned(book, given) as pinned:
        return _columns(pinned)


def _pinned(book: Book, given: Options) -> PinnedTable:
    assert given.table is not None
    version = given.number("version", least=0)
    return book.table(given.table).pin(version=version, as_of=given.moment("timestamp"))


def _columns(pinned: PinnedTable) -> StructType:
    return StructType.fromJson(spark_type(pinned.plan().schema))


@dataclass(repr=False)
class Files(InputPartition):
    """What one task reads."""

    files: DetachedFiles

    def __repr__(self) -> str:
        return f"Files({self.files!r})"


class TableReader(DataSourceReader):
    """Reads a version of a table."""

    def __init__(self, given: Options, schema: StructType) -> None:
        self._given: Options | None = given
        self._schema = schema

    def __getstate__(self) -> dict[str, Any]:
        # Executors need no book, and so no password.
        return {"_given": None, "_schema": self._schema}

    def partitions(self) -> Sequence[InputPartition]:
        """Pin the version for a time, and divide its files among tasks."""
        given = self._given
        assert given is not None
        with given.opened() as book:
            check_reachable(book.lake)
            with _pinned(book, given) as pinned:
                plan = pinned.plan()
                check_read(self._schema, _columns(pinned), plan.table.shown)
                seconds = given.lease_seconds or book.settings.catalog_lease
                # This process ends before the read does: nobody will renew the lease, nor end it.
                book.lake.registry.write(
                    lambda transaction: pin_loaded(transaction, plan.table, pinned.version, seconds)
                )
                return [Files(part) for part in detached(plan, _TASK_BYTES)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        if not isinstance(partition, Files):
            return
        from pyspark.sql.pandas.types import to_arrow_schema

        target = to_arrow_schema(self._schema)
        try:
            for batch in partition.files.batches():
                yield _as_spark_has_it(batch, target)
        except ObjectNotFound as error:
            raise ReadFailed(
                "the file is gone: it was pinned for a time only, which has passed",
                on=error.on,
                remedy="Read the table anew, or give the option leaseSeconds",
            ) from error


def _as_spark_has_it(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    arrays = [_cast(batch.column(field.name), field.type) for field in target]
    return pa.RecordBatch.from_arrays(arrays, schema=target)


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if "arrow.uuid" in str(values.type):
        # Spark has no type of its own for a UUID: it is a text.
        return pa.array([_texts(value) for value in values.to_pylist()], kind)
    return values.cast(kind)


def _texts(value: Any) -> Any:
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, dict):
        return {name: _texts(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_texts(item) for item in value)
    return value
