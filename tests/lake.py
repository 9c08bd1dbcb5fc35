"""Small tables, rows and files for tests of tables, without Spark."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from books import MEMORY, POSTGRESQL, Postgres
from lakebook import Book
from lakebook.iceberg.arrow_files import plain_schema
from lakebook.iceberg.schemas import arrow_schema
from lakebook.lake.inserting import InsertReport
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.changes import row_of

PATIENCE = 60

#: For tests of what no registry knows of: bytes, Arrow, threads, time. One kind of book is enough for them.
in_memory = pytest.mark.parametrize("place", [MEMORY], indirect=True)


@pytest.fixture(autouse=True)
def own_warehouse(request: pytest.FixtureRequest) -> Iterator[None]:
    """The books of all tests on PostgreSQL share a warehouse: none finds what another has left there."""
    call = getattr(request.node, "callspec", None)
    if call is None or POSTGRESQL not in call.params.values():
        yield
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    _empty(Path(postgres.warehouse))
    yield
    _empty(Path(postgres.warehouse))


def _empty(folder: Path) -> None:
    for item in folder.iterdir() if folder.is_dir() else ():
        shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()


# --- rows ----------------------------------------------------------------------


def rows_of(table: Table, records: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Records as an Arrow table with exactly the columns of a table."""
    columns = plain_schema(table.schema)
    return pa.Table.from_pylist([{name: record.get(name) for name in columns.names} for record in records], columns)


def insert(table: Table, *records: Mapping[str, Any], **properties: str) -> InsertReport:
    """Insert records: one file, or one per partition."""
    return table.insert_arrow(rows_of(table, records), properties=properties)


def numbers(book: Book, name: str = "numbers", *files: Sequence[int], **options: Any) -> Table:
    """A table of one column `id`, with a file for each sequence of numbers."""
    table = book.tables.create(name, "id BIGINT", **options)
    for values in files:
        insert(table, *({"id": value} for value in values))
    return table


def ids(table: Any, where: Any = None, **at: Any) -> list[Any]:
    """The numbers in the column `id`, in order."""
    found: list[Any] = table.to_arrow(where, **at).column("id").to_pylist()
    return sorted(found, key=lambda value: (value is None, value or 0))


# --- files ---------------------------------------------------------------------


def parquet(data: pa.Table, **options: Any) -> bytes:
    """A Parquet file as other programs write it."""
    stream = io.BytesIO()
    pq.write_table(data, stream, **options)
    return stream.getvalue()


def lay(book: Book, path: str, data: pa.Table | bytes, **options: Any) -> str:
    """Put a file into the warehouse, as another program does; its path."""
    book.lake.store.put_new(path, data if isinstance(data, bytes) else parquet(data, **options))
    return path


def with_ids(table: Table, records: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Records with the field ids of a table, as its own files have them."""
    return rows_of(table, records).cast(arrow_schema(table.schema))


def replace_bytes(book: Book, path: str, change: Callable[[bytes], bytes]) -> None:
    """Damage an object: replace its bytes by others."""
    data = book.lake.store.read(path)
    book.lake.store.delete_one(path)
    book.lake.store.put_new(path, change(data))


def objects(book: Book, prefix: str = "") -> list[str]:
    """The paths of all objects."""
    return sorted(item.path for item in book.lake.store.list(prefix))


# --- the registry, as it is ----------------------------------------------------


def run_sql(book: Book, sql: str) -> None:
    """Change the registry behind Lakebook's back."""
    book._registry.write(lambda transaction: transaction._connection.execute(sql))


def records(book: Book, table: sa.Table, **where: Any) -> list[dict[str, Any]]:
    """All rows of a registry table, or those with these values."""
    columns = ", ".join(f'"{column.name}"' for column in table.columns)
    keys = ", ".join(f'"{column.name}"' for column in table.primary_key)
    sql = f"SELECT {columns} FROM {table.name} ORDER BY {keys}"
    found = book._registry.read_with(lambda reader: reader._connection.execute(sql).fetchall())
    rows = [row_of(table, row) for row in found]
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def files_of(book: Book, table: Table) -> list[dict[str, Any]]:
    """The rows of a table's files, those that are no longer visible too."""
    return records(book, schema.table_files, table_id=table.id)


def stats_of(book: Book, table: Table, file_id: int = 1) -> dict[int, dict[str, Any]]:
    """The column statistics of a file, by field id."""
    found = records(book, schema.file_column_stats, table_id=table.id, file_id=file_id)
    return {row["field_id"]: row for row in found}


def registry_state(book: Book) -> dict[str, list[dict[str, Any]]]:
    """Every row of the registry about tables, to see whether something has changed."""
    kinds = (
        schema.tables,
        schema.table_metadata,
        schema.table_files,
        schema.table_stats,
        schema.file_column_stats,
        schema.table_versions,
        schema.table_horizons,
        schema.partition_metadata,
        schema.temporary_files,
        schema.inserts,
        schema.leases,
        schema.commits,
    )
    state = {str(kind.name): records(book, kind) for kind in kinds}
    # Only a fence of its own: each transaction brings one.
    state["commits"] = [row for row in state["commits"] if row["kind"] != "fence"]
    return state


def check_totals(book: Book, table: Table) -> tuple[int, int, int]:
    """Rows, files and bytes, after making sure that everyone who knows them says the same."""
    live = [row for row in files_of(book, table) if row["to_version"] is None]
    expected = (sum(row["row_count"] for row in live), len(live), sum(row["file_size"] for row in live))
    record = table.record
    assert (record.row_count, record.file_count, record.total_size) == expected
    (stats,) = records(book, schema.table_stats, table_id=table.id)
    assert (stats["row_count"], stats["file_count"], stats["total_size"]) == expected
    assert record.deleted_rows == stats["deleted_rows"] == 0
    assert expected[2] == sum(book.lake.store.size(row["file_path"]) or 0 for row in live)
    assert expected[0] == table.count() == table.to_arrow().num_rows
    plan = table.plan()
    assert (plan.row_count, len(plan.files), plan.total_size) == expected
    return expected
