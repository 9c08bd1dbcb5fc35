"""An outside engine whose metadata is written by hand, so that it can write what no library would."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import duckdb
import pyarrow as pa
import pytest
from pydantic import BaseModel
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table.metadata import TableMetadataV2
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    AssertTableUUID,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
)
from pyiceberg.typedef import Record

from deletes import POSITION, columns, rows_of_deletes
from lake import objects, parquet, records, with_ids
from lakebook import Book
from lakebook.clock import ManualClock
from lakebook.errors import InvalidInput, PathInUse
from lakebook.iceberg.manifests import _manifest_writer, read_manifest_list, write_manifest_list
from lakebook.iceberg.table_metadata import schema_for
from lakebook.lake.table import Table
from lakebook.registry import schema

ADDED, EXISTING, DELETED = ManifestEntryStatus.ADDED, ManifestEntryStatus.EXISTING, ManifestEntryStatus.DELETED
#: How a commit is refused: it can never be taken, or it may be tried again.
REFUSED = (InvalidInput, PathInUse, CommitFailedException)
#: Waits of PyIceberg's own retries, short enough for tests.
QUICK = {"commit.retry.min-wait-ms": "1", "commit.retry.max-wait-ms": "2"}
PATH = 2147483546

_Model = TypeVar("_Model", bound=BaseModel)
Entry = tuple[ManifestEntryStatus, int | None, int | None, DataFile]


def present_clock() -> ManualClock:
    """A clock that stands still at the present: engines and storage have their own."""
    return ManualClock(round(time.time() * 1000))


# --- what every engine sees ------------------------------------------------------


def in_order(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows)


def of_duckdb(location: str, snapshot_id: int | None = None) -> list[str]:
    """The rows that DuckDB reads with nothing but the metadata file."""
    path = unquote(urlsplit(location).path)
    asked = "" if snapshot_id is None else f", snapshot_from_id := {snapshot_id}"
    found = _connection().execute(f"SELECT * FROM iceberg_scan('{path}'{asked})").to_arrow_table()
    return in_order(found.to_pylist())


@lru_cache(maxsize=1)
def _connection() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("LOAD avro; LOAD iceberg; SET TimeZone = 'UTC'")
    return connection


def of_pyiceberg(book: Book, table: Table, snapshot_id: int | None = None) -> list[str]:
    """The rows that PyIceberg reads through the catalog."""
    loaded = book.catalog().load_table((table.namespace, table.name))
    return in_order(loaded.scan(snapshot_id=snapshot_id).to_arrow().to_pylist())


def settle(book: Book) -> None:
    """Wait until the footers of what engines brought have been looked at."""
    book.lake.settling.flush()


def check(book: Book, table: Table, *, with_duckdb: bool = True) -> list[dict[str, Any]]:
    """Nothing is wrong, and every engine reads the same rows; which those are."""
    settle(book)
    rows: list[dict[str, Any]] = table.to_arrow().to_pylist()
    expected = in_order(rows)
    found = of_pyiceberg(book, table)
    assert found == expected, (found, expected)
    loaded = book.catalog().load_table((table.namespace, table.name))
    if with_duckdb and loaded.metadata.current_snapshot_id is not None:
        found = of_duckdb(loaded.metadata_location)
        assert found == expected, (found, expected)
    assert table.count() == len(rows)
    check_counts(book, table)
    findings = book.verify().findings
    assert findings == (), findings
    return rows


def check_ids(book: Book, table: Table, *expected: int, with_duckdb: bool = True) -> None:
    """Nothing is wrong, and every engine reads exactly these ids."""
    found = check(book, table, with_duckdb=with_duckdb)
    read = sorted(row["id"] for row in found)
    assert read == sorted(expected), read


def check_counts(book: Book, table: Table) -> None:
    """The totals of a table are those of its live files, to the byte."""
    live = [row for row in records(book, schema.table_files, table_id=table.id) if row["to_version"] is None]
    rows, deletes = ([row for row in live if bool(row["content"]) is kind] for kind in (False, True))
    expected = (
        sum(row["row_count"] for row in rows),
        len(rows),
        sum(row["file_size"] for row in live),
        sum(row["row_count"] for row in deletes),
    )
    (stats,) = records(book, schema.table_stats, table_id=table.id)
    for found in (table.record, stats):
        values = found if isinstance(found, dict) else vars(found)
        assert tuple(values[name] for name in ("row_count", "file_count", "total_size", "deleted_rows")) == expected
    head = book.catalog().load_table((table.namespace, table.name)).current_snapshot()
    if head is None or head.summary is None:
        return
    told = head.summary.additional_properties
    if "total-records" in told:
        assert int(told["total-records"]) == expected[0]
        assert int(told["total-data-files"]) == expected[1]


def check_versions(book: Book, table: Table, *, with_duckdb: bool = False) -> None:
    """Every version that a snapshot stands for has its rows and its time."""
    loaded = book.catalog().load_table((table.namespace, table.name))
    times = {item.version: item.committed_at for item in table.history().items}
    for record in table.snapshots():
        snapshot = loaded.metadata.snapshot_by_id(record.snapshot_id)
        assert snapshot is not None
        assert snapshot.timestamp_ms == record.timestamp_ms
        if record.version is None or record.version not in times:
            continue
        assert round(times[record.version].timestamp() * 1000) == snapshot.timestamp_ms
        expected = in_order(table.to_arrow(version=record.version).to_pylist())
        assert of_pyiceberg(book, table, record.snapshot_id) == expected
        if with_duckdb:
            assert of_duckdb(loaded.metadata_location, record.snapshot_id) == expected


# --- nothing has changed ---------------------------------------------------------

_WATCHED = (
    schema.tables,
    schema.table_metadata,
    schema.table_files,
    schema.table_stats,
    schema.file_column_stats,
    schema.table_versions,
    schema.table_horizons,
    schema.table_snapshots,
    schema.iceberg_tables,
    schema.iceberg_files,
    schema.snapshot_manifests,
    schema.branch_files,
    schema.footer_debts,
    schema.partition_metadata,
    schema.temporary_files,
    schema.segments,
    schema.events,
)
# A conflict with what is pending may ask this book to wait.
_UNWATCHED = {"hold_until", "updated_at"}


def state(book: Book) -> dict[str, Any]:
    """Every row about tables and every object, to see whether something has changed."""
    settle(book)
    found: dict[str, Any] = {}
    for kind in _WATCHED:
        rows = [
            {key: value for key, value in row.items() if key not in _UNWATCHED}
            for row in records(book, kind)
            if kind is not schema.events or row["table_name"] != "tables"
        ]
        found[str(kind.name)] = rows
    # What engines write themselves lies right in these folders; what this book writes for them, one deeper.
    found["objects"] = [path for path in objects(book) if path.split("/")[-2:-1] not in (["data"], ["metadata"])]
    return found


@contextmanager
def nothing_changes(book: Book) -> Iterator[None]:
    """What happens within is as if it had never been."""
    before = state(book)
    yield
    after = state(book)
    for name, value in before.items():
        new = [item for item in after[name] if item not in value]
        gone = [item for item in value if item not in after[name]]
        assert after[name] == value, (name, new, gone)


@contextmanager
def refused(book: Book, *kinds: type[BaseException]) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """A commit that is refused with an error of a known type, and without a trace."""
    with nothing_changes(book), pytest.raises(kinds or REFUSED) as caught:
        yield caught
    assert str(caught.value)


# --- metadata by hand ------------------------------------------------------------


class Hand:
    """An engine that writes every file itself."""

    def __init__(self, book: Book, table: Table) -> None:
        self.book = book
        self.table = table
        self.catalog = book.catalog()
        self.name = (table.namespace, table.name)
        self.io = book.lake.publisher.io
        self.load()

    def load(self) -> IcebergTable:
        """Look at the table anew."""
        self.loaded = self.catalog.load_table(self.name)
        return self.loaded

    @property
    def metadata(self) -> TableMetadataV2:
        found = self.loaded.metadata
        assert isinstance(found, TableMetadataV2)
        return found

    @property
    def head(self) -> Snapshot | None:
        return self.metadata.current_snapshot()

    def place(self, name: str = "", folder: str = "data") -> str:
        """A location under the table's own."""
        return f"{self.metadata.location}/{folder}/{name or f'{uuid.uuid4()}.parquet'}"

    def path(self, location: str) -> str:
        return self.book.lake.store.relative(location)

    def lay(self, location: str, data: bytes) -> int:
        """Write a file; its size."""
        self.book.lake.store.put_new(self.path(location), data)
        return len(data)

    # --- files ---

    def data_file(
        self, *values: int, location: str | None = None, arrow: pa.Table | None = None, lay: bool = True, **changes: Any
    ) -> DataFile:
        """A file of rows, laid in the warehouse; `changes` are lies about it."""
        where = location or self.place()
        data = parquet(arrow if arrow is not None else with_ids(self.table, ({"id": value} for value in values)))
        if lay:
            self.lay(where, data)
        rows = arrow.num_rows if arrow is not None else len(values)
        return made_file(where, len(data), rows, **{"spec_id": self.metadata.default_spec_id, **changes})

    def deletes(self, gone: Sequence[tuple[str, int]], *, about: str | None = None, **changes: Any) -> DataFile:
        """A file of position deletes."""
        where = self.place(f"{uuid.uuid4()}-deletes.parquet")
        data = parquet(rows_of_deletes(self.book, gone, columns()))
        bounds = {} if about is None else {PATH: about.encode()}
        return made_file(
            where,
            self.lay(where, data),
            len(gone),
            **{
                "content": DataFileContent.POSITION_DELETES,
                "spec_id": self.metadata.default_spec_id,
                "lower_bounds": {**bounds, POSITION: b"\0" * 8} if bounds else None,
                "upper_bounds": {**bounds, POSITION: b"\xff" * 7 + b"\x7f"} if bounds else None,
                **changes,
            },
        )

    def live(self) -> dict[str, DataFile]:
        """The files of rows of the head, by their locations."""
        return {task.file.file_path: task.file for task in self.loaded.scan().plan_files()}

    # --- metadata ---

    def manifest(
        self, snapshot_id: int, *entries: Entry, content: int = 0, spec_id: int | None = None, location: str = ""
    ) -> ManifestFile:
        """A manifest of these entries: status, snapshot, sequence number and file."""
        number = self.metadata.default_spec_id if spec_id is None else spec_id
        spec = self.metadata.specs()[number]
        shape = schema_for(spec, self.metadata.schemas)
        where = location or self.place(f"{uuid.uuid4()}-m0.avro", "metadata")
        with _manifest_writer(self.io, where, spec, shape, snapshot_id, content) as writer:
            for status, ident, sequence, file in entries:
                writer.write(status, ident, sequence, sequence, file)
        return writer.manifest_file()

    def added(self, snapshot_id: int, *files: DataFile, **options: Any) -> ManifestFile:
        """A manifest of files that a snapshot adds."""
        entries: list[Entry] = [(ADDED, snapshot_id, None, file) for file in files]
        return self.manifest(snapshot_id, *entries, **options)

    def kept(self) -> list[ManifestFile]:
        """The manifests of the head."""
        return read_manifest_list(self.io, self.head.manifest_list) if self.head is not None else []

    def snapshot(
        self,
        snapshot_id: int,
        manifests: Sequence[ManifestFile],
        *,
        operation: str = "append",
        location: str = "",
        parent: int | str | None = "head",
        sequence: int | None = None,
        schema_id: int | None = None,
        **changes: Any,
    ) -> Snapshot:
        """A snapshot that lists these manifests; its list is written."""
        above = (self.head.snapshot_id if self.head is not None else None) if parent == "head" else parent
        number = self.metadata.last_sequence_number + 1 if sequence is None else sequence
        where = location or self.place(f"snap-{snapshot_id}-{uuid.uuid4()}.avro", "metadata")
        assert above is None or isinstance(above, int)
        mine = [item for item in manifests if item.added_snapshot_id == snapshot_id and item.content == 0]
        told = {
            "operation": operation,
            "added-data-files": str(sum(item.added_files_count or 0 for item in mine)),
            "added-records": str(sum(item.added_rows_count or 0 for item in mine)),
        }
        changes.setdefault("summary", told)
        write_manifest_list(self.io, where, snapshot_id, above, number, manifests)
        shape = self.metadata.current_schema_id if schema_id is None else schema_id
        return made_snapshot(snapshot_id, where, above, number, operation, shape, **changes)

    # --- committing ---

    def requirements(self, ref: str = "main") -> tuple[TableRequirement, ...]:
        """What every engine asks for."""
        known = self.metadata.refs.get(ref)
        at = known.snapshot_id if known is not None else None
        return (
            made(AssertRefSnapshotId, ref=ref, snapshot_id=at),
            made(AssertTableUUID, uuid=self.metadata.table_uuid),
        )

    def commit(self, *updates: TableUpdate, requirements: Sequence[TableRequirement] | None = None) -> None:
        """Commit, and look at the table anew."""
        self.catalog.commit(self.name, self.requirements() if requirements is None else requirements, updates)
        self.load()

    def onto_main(self, *snapshots: Snapshot) -> list[TableUpdate]:
        """The updates that make snapshots the newest ones of `main`."""
        return [*(AddSnapshotUpdate(snapshot=item) for item in snapshots), to_ref(snapshots[-1].snapshot_id)]

    def append(self, *files: DataFile, snapshot_id: int | None = None, **options: Any) -> int:
        """Append files; the snapshot's id."""
        ident = snapshot_id or new_snapshot_id()
        manifest = self.added(ident, *files)
        self.commit(*self.onto_main(self.snapshot(ident, [*self.kept(), manifest], **options)))
        return ident

    def delete_positions(self, *gone: tuple[str, int], about: str | None = None, operation: str = "delete") -> int:
        """Delete rows by a file of position deletes."""
        ident = new_snapshot_id()
        manifest = self.added(ident, self.deletes(gone, about=about), content=1)
        self.commit(*self.onto_main(self.snapshot(ident, [*self.kept(), manifest], operation=operation)))
        return ident


_MANIFEST = (
    "manifest_path",
    "manifest_length",
    "partition_spec_id",
    "content",
    "sequence_number",
    "min_sequence_number",
    "added_snapshot_id",
    "added_files_count",
    "existing_files_count",
    "deleted_files_count",
    "added_rows_count",
    "existing_rows_count",
    "deleted_rows_count",
    "partitions",
    "key_metadata",
)


def told_as(manifest: ManifestFile, **changes: Any) -> ManifestFile:
    """A manifest, with lies about it."""
    return ManifestFile.from_args(**{name: getattr(manifest, name) for name in _MANIFEST} | changes)


def new_snapshot_id() -> int:
    return uuid.uuid4().int >> 66 or 1


def made_file(location: str, size: int, rows: int, **changes: Any) -> DataFile:
    """A file as a manifest lists it."""
    spec_id = changes.pop("spec_id", 0)
    made = DataFile.from_args(
        **{
            "content": DataFileContent.DATA,
            "file_path": location,
            "file_format": FileFormat.PARQUET,
            "partition": Record(),
            "record_count": rows,
            "file_size_in_bytes": size,
            **{name: value for name, value in changes.items() if value is not None},
        }
    )
    made.spec_id = spec_id
    return made


def made_snapshot(
    snapshot_id: int,
    location: str,
    parent: int | None,
    sequence: int,
    operation: str | None = "append",
    schema_id: int | None = 0,
    **changes: Any,
) -> Snapshot:
    """A snapshot, without a look at what its list says."""
    return Snapshot.model_validate(
        {
            "snapshot-id": snapshot_id,
            "parent-snapshot-id": parent,
            "sequence-number": sequence,
            "timestamp-ms": round(time.time() * 1000),
            "manifest-list": location,
            "summary": None if operation is None else {"operation": operation},
            "schema-id": schema_id,
            **changes,
        }
    )


def made(kind: type[_Model], **values: Any) -> _Model:
    """An update or a requirement; its fields are known by their names in Python too."""
    return kind.model_validate(values)


def to_ref(snapshot_id: int, ref: str = "main", kind: str = "branch", **more: Any) -> SetSnapshotRefUpdate:
    """The update by which a branch or a tag names a snapshot."""
    return SetSnapshotRefUpdate.model_validate({"ref-name": ref, "type": kind, "snapshot-id": snapshot_id, **more})
