"""The tables of a book: creating, finding, renaming and dropping them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lakebook.errors import InvalidTable
from lakebook.iceberg.partitioning import order_to_json, partition_spec, sort_order, spec_to_json
from lakebook.iceberg.schemas import last_field_id, schema_from, schema_to_json
from lakebook.lake.catalogs import CatalogParts
from lakebook.lake.formats import FORMATS
from lakebook.lake.lake import Lake
from lakebook.lake.measuring import PARQUET
from lakebook.lake.properties import check_table_properties
from lakebook.lake.table import Table
from lakebook.names import check_name, shown
from lakebook.pages import PAGE_SIZE, Page, check_limit, page_of
from lakebook.registry.tables import (
    DEFAULT_NAMESPACE,
    Namespace,
    NewTable,
    TableRecord,
    create_namespace,
    create_table,
    drop_namespace,
    drop_table,
    get_namespace,
    get_table,
    list_namespaces,
    list_tables,
    rename_table,
)

_ENGINE = "spark"


def split_name(name: object, namespace: object = None) -> tuple[str, str]:
    """Namespace and name of a table: `"sales.orders"`, or a name with `namespace=`.

    Without `namespace`, what stands before the last dot is the namespace.
    """
    if namespace is None:
        head, dot, tail = name.rpartition(".") if isinstance(name, str) else ("", "", "")
        namespace, name = (head, tail) if dot else (DEFAULT_NAMESPACE, name)
    return check_name("namespace", namespace), check_name("table", name)


class Tables:
    """The tables and namespaces of a book."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake

    def create(
        self,
        name: str,
        schema: Any,
        *,
        namespace: str | None = None,
        partition_by: Sequence[str] = (),
        sort_by: Sequence[str] = (),
        format: str = PARQUET,  # noqa: A002 - the specification's word
        compression: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> Table:
        """Create a table. `schema` is Spark's, Arrow's, PyIceberg's, or DDL such as `"id BIGINT, name STRING"`."""
        space, plain = split_name(name, namespace)
        on = f"table {space}.{plain}"
        handler = FORMATS.get(format)
        if handler is None:
            raise InvalidTable(f"{shown(format)} is not a format", on=on, remedy=f"Use {' or '.join(FORMATS)}")
        codec = handler.compressions[0] if compression is None else compression
        if codec not in handler.compressions:
            raise InvalidTable(
                f"{shown(codec)} is not a compression of {format}",
                on=on,
                remedy=f"Use one of {', '.join(handler.compressions)}",
            )
        if (partition_by or sort_by) and not handler.structured:
            raise InvalidTable(f"a table of format {format} has no partitions and no order", on=on)
        columns = schema_from(schema)
        handler.check_schema(columns)
        wanted = NewTable(
            space,
            plain,
            schema_to_json(columns),
            last_field_id(columns),
            spec_to_json(partition_spec(columns, partition_by)),
            order_to_json(sort_order(columns, sort_by)),
            format,
            codec,
            _ENGINE,
            {},
            check_table_properties(properties or {}, self._lake),
        )
        record = self._lake.registry.write_opened(
            "table", lambda transaction, commit_id: create_table(transaction, wanted, commit_id)
        )
        self._lake.changed(record, record.version)
        return Table(self._lake, record)

    def register(self, name: str, metadata_location: str, *, namespace: str | None = None) -> Table:
        """Take an Iceberg table that lies in the warehouse, by its metadata file. No data is rewritten."""
        space, plain = split_name(name, namespace)
        if not isinstance(metadata_location, str) or not metadata_location:
            raise InvalidTable(f"{shown(metadata_location)} is not a location", on=f"table {space}.{plain}")
        CatalogParts(self._lake).committer.register(space, plain, metadata_location)
        table = self.get(plain, namespace=space)
        self._lake.settling.notice(table.record)
        return table

    def get(self, name: str, *, namespace: str | None = None) -> Table:
        """A table by its name."""
        return Table(self._lake, self._record(name, namespace))

    def _record(self, name: str, namespace: str | None) -> TableRecord:
        space, plain = split_name(name, namespace)
        return self._lake.registry.read_with(lambda reader: get_table(reader, space, plain))

    def list(
        self,
        namespace: str = DEFAULT_NAMESPACE,
        *,
        prefix: str = "",
        limit: int = PAGE_SIZE,
        after: str | None = None,
    ) -> Page[TableRecord]:
        """The tables of a namespace, in the order of their names."""
        check_name("namespace", namespace)
        if prefix not in ("", ".", ".."):
            check_name("table", prefix)
        if after is not None:
            check_name("table", after)
        check_limit(limit)
        found = self._lake.registry.read_with(
            lambda reader: list_tables(reader, namespace, after or "", prefix, limit + 1)
        )
        return page_of(found, limit, lambda table: table.name)

    def rename(
        self, name: str, new_name: str, *, namespace: str | None = None, new_namespace: str | None = None
    ) -> Table:
        """Give a table another name, or move it to another namespace."""
        record = self._record(name, namespace)
        if new_namespace is None and isinstance(new_name, str) and "." not in new_name:
            new_namespace = record.namespace
        space, plain = split_name(new_name, new_namespace)
        moved = self._lake.registry.write(lambda transaction: rename_table(transaction, record, space, plain))
        return Table(self._lake, moved)

    def drop(self, name: str, *, namespace: str | None = None) -> None:
        """Drop a table: gone at once for readers; its files go when nobody reads them and their grace has passed."""
        record = self._record(name, namespace)
        self._lake.registry.write(lambda transaction: drop_table(transaction, record))

    def create_namespace(self, name: str, *, properties: Mapping[str, str] | None = None) -> Namespace:
        """Create a namespace."""
        check_name("namespace", name)
        found = check_table_properties(properties or {}, self._lake)
        return self._lake.registry.write(lambda transaction: create_namespace(transaction, name, found))

    def get_namespace(self, name: str) -> Namespace:
        """A namespace by its name."""
        check_name("namespace", name)
        return self._lake.registry.read_with(lambda reader: get_namespace(reader, name))

    def list_namespaces(self, *, limit: int = PAGE_SIZE, after: str | None = None) -> Page[Namespace]:
        """The namespaces, in the order of their names."""
        if after is not None:
            check_name("namespace", after)
        check_limit(limit)
        found = self._lake.registry.read_with(lambda reader: list_namespaces(reader, after or "", limit + 1))
        return page_of(found, limit, lambda namespace: namespace.name)

    def drop_namespace(self, name: str) -> None:
        """Remove a namespace that has no tables."""
        check_name("namespace", name)
        self._lake.registry.write(lambda transaction: drop_namespace(transaction, name))
