"""A PyIceberg catalog over the registry: what other engines read and write tables through."""

from __future__ import annotations

import importlib
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from pyiceberg.catalog import Catalog, MetastoreCatalog, PropertiesUpdateSummary
from pyiceberg.exceptions import (
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    NoSuchViewError,
    TableAlreadyExistsError,
)
from pyiceberg.exceptions import ValidationError as IcebergError
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, CreateTableTransaction, StagedTable, Table
from pyiceberg.table.metadata import TableMetadataV2, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.table.update import AssertCreate, TableRequirement, TableUpdate
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties

from lakebook.errors import (
    LakebookError,
    NamespaceAlreadyExists,
    NamespaceNotEmpty,
    NamespaceNotFound,
    NotAccepted,
    TableAlreadyExists,
    TableNotFound,
    VersionExpired,
)
from lakebook.iceberg.outside import Committer
from lakebook.iceberg.publishing import Publisher, default_location, require_published
from lakebook.iceberg.refs import queried
from lakebook.names import check_name, check_text, shown
from lakebook.registry.leases import pin_loaded, pinned_until
from lakebook.registry.registry import Registry
from lakebook.registry.table_files import CHUNK
from lakebook.registry.tables import (
    DEFAULT_NAMESPACE,
    TableRecord,
    change_namespace,
    create_namespace,
    drop_namespace,
    drop_table,
    get_namespace,
    get_table,
    list_namespaces,
    list_tables,
    refuse_mirror,
    rename_table,
    require_free_name,
)
from lakebook.registry.tags import ask_for_tag, is_tag_asked
from lakebook.registry.transactions import Reader, Transaction

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.view import View

LOG = logging.getLogger("lakebook.catalog")

_PARQUET = "parquet"
_MOST_LOADS = 10


class LakeParts(Protocol):
    """What a catalog needs of an open book's lake."""

    registry: Registry
    publisher: Publisher
    committer: Committer
    own_io: Mapping[str, str]
    told_io: Mapping[str, str]

    def settle_debts_of(self, table: TableRecord) -> None:
        """Take the footers of files that an outside engine has just brought, soon."""

    def bring_up_to_date(self, namespace: str, name: str) -> None:
        """Bring what is about to be loaded up to date, where its rows come from elsewhere."""


class LakebookCatalog(MetastoreCatalog):
    """The tables of a book as an Iceberg catalog.

    Made by `Book.catalog()`, or by PyIceberg's `load_catalog` with
    `py-catalog-impl=lakebook.iceberg.LakebookCatalog` and `uri` naming the book.
    """

    def __init__(self, name: str, *, lake: LakeParts | None = None, **properties: str) -> None:
        super().__init__(name, **properties)
        self._book: Any = None
        if lake is None:
            lake = self._open(properties)
        self._lake = lake

    def _open(self, properties: Mapping[str, str]) -> LakeParts:
        target = properties.get("uri")
        if not target:
            raise NotAccepted("the catalog names no book", on=self.name, remedy="Set `uri` to the book")
        # A book is made of more than this module may know.
        given = {"warehouse": properties["warehouse"]} if properties.get("warehouse") else {}
        self._book = importlib.import_module("lakebook").open(target, **given)
        opened: LakebookCatalog = self._book.catalog(self.name)
        return opened._lake

    @property
    def told_io(self) -> Mapping[str, str]:
        """What engines elsewhere have to know to open the files; credentials are their own."""
        return self._lake.told_io

    def close(self) -> None:
        """Close the book, if this catalog has opened it."""
        if self._book is not None:
            self._book.close()

    # --- tables ------------------------------------------------------------------------

    def _named(self, identifier: str | Identifier) -> tuple[str, str]:
        parts = self.identifier_to_tuple(identifier)
        if len(parts) != 2:
            raise NoSuchTableError(f"Table does not exist: {shown('.'.join(map(str, parts)))}")
        return check_name("namespace", parts[0]), check_name("table", parts[1])

    def _record(self, identifier: str | Identifier) -> TableRecord:
        namespace, name = self._named(identifier)
        with _words():
            return self._lake.registry.read_with(lambda reader: get_table(reader, namespace, name))

    def _table(self, namespace: str, name: str, metadata: TableMetadataV2, location: str) -> Table:
        return Table((namespace, name), metadata, location, self._io(location), self)

    def _io(self, location: str) -> FileIO:
        if location.startswith("memory:"):
            # Only this process can see it; PyIceberg then reads metadata, and no rows.
            return self._lake.publisher.io
        return load_file_io({**self._lake.own_io, **self.properties}, location)

    def load_table(self, identifier: str | Identifier) -> Table:
        """A table, with every version that was acknowledged before."""
        with _words():
            self._lake.bring_up_to_date(*self._named(identifier))
        record = self._record(identifier)
        publisher = self._lake.publisher
        with _words():
            for tries_left in reversed(range(_MOST_LOADS)):
                pointer = require_published(publisher.publish(record), record)
                metadata = publisher.load(pointer)
                try:
                    self._pin(record, pointer.version, queried(metadata, publisher.settings.tag_queries))
                    break
                except VersionExpired:
                    # Others have committed, published and expired meanwhile.
                    if not tries_left:
                        raise
        return self._table(record.namespace, record.name, metadata, publisher.store.uri(pointer.metadata_location))

    def _pin(self, record: TableRecord, version: int, wanted: int | None) -> None:
        """Pin a version that is loaded, and ask for a tag on its snapshot where one is wanted."""
        registry, seconds = self._lake.registry, self._lake.publisher.settings.catalog_lease

        def read(reader: Reader) -> tuple[int, bool]:
            asked = wanted is None or is_tag_asked(reader, record, wanted)
            return pinned_until(reader, record, version), asked

        left, asked = registry.read_with(read)
        # Not at every load: half of the time is enough.
        pins = left < registry.clock.now_ms() + round(seconds * 500)

        def hold(transaction: Transaction, *, asks: bool) -> None:
            if pins:
                pin_loaded(transaction, record, version, seconds)
            if asks and wanted is not None:
                ask_for_tag(transaction, record, wanted)

        try:
            if pins or not asked:
                registry.write(lambda transaction: hold(transaction, asks=not asked))
        except VersionExpired:
            raise
        except LakebookError as error:
            if asked:
                raise
            # Nobody who reads is to suffer from it.
            LOG.warning("%s: a tag could not be asked for (%s)", record.shown, error)
            registry.write(lambda transaction: hold(transaction, asks=False))

    def create_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> Table:
        """Create a table without rows."""
        namespace, name = self._named(identifier)
        metadata = self._new_metadata(identifier, schema, location, partition_spec, sort_order, properties)
        with _words():
            made, where = self._lake.committer.enter_new(namespace, name, metadata, is_new=True)
        return self._table(namespace, name, made, where)

    def _new_metadata(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None,
        partition_spec: PartitionSpec,
        sort_order: SortOrder,
        properties: Properties,
    ) -> TableMetadataV2:
        namespace, name = self._named(identifier)
        on = f"table {namespace}.{name}"
        given = {key: str(value) for key, value in properties.items()}
        self._lake.committer.check_given(on, given)
        store = self._lake.publisher.store
        if location:
            store.relative(location)
        ident = uuid.uuid4()
        place = location.rstrip("/") if location else store.uri(default_location(str(ident)))
        try:
            converted = self._convert_schema_if_needed(schema)
            made = new_table_metadata(converted, partition_spec, sort_order, place, given, ident)
        except (IcebergError, ValueError, TypeError) as error:
            raise NotAccepted(f"it cannot be created ({error})", on=on) from error
        if not isinstance(made, TableMetadataV2):
            raise NotAccepted("only format version 2 is taken", on=on)
        return made

    def stage_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> StagedTable:
        """A table that a later commit will create; nothing is stored."""
        namespace, name = self._named(identifier)
        self.load_namespace_properties(namespace)
        with _words():
            self._lake.registry.read_with(lambda reader: require_free_name(reader, namespace, name))
        metadata = self._new_metadata(identifier, schema, location, partition_spec, sort_order, properties)
        where = f"{metadata.location}/metadata/00000-{uuid.uuid4()}.metadata.json"
        return StagedTable((namespace, name), metadata, where, self._io(where), self)

    def create_table_transaction(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> CreateTableTransaction:
        """A transaction that creates a table together with its first rows."""
        staged = self.stage_table(identifier, schema, location, partition_spec, sort_order, properties)
        return CreateTableTransaction(staged)

    def register_table(self, identifier: str | Identifier, metadata_location: str, overwrite: bool = False) -> Table:
        """Take an Iceberg table that lies in the warehouse, as it is."""
        namespace, name = self._named(identifier)
        if overwrite and self.table_exists(identifier):
            raise NotAccepted(
                "a table that exists is not registered over", on=f"table {namespace}.{name}", remedy="Drop it first"
            )
        with _words():
            made, where = self._lake.committer.register(namespace, name, metadata_location)
        self._settle(identifier)
        return self._table(namespace, name, made, where)

    def drop_table(self, identifier: str | Identifier, purge_requested: bool = False) -> None:  # noqa: ARG002
        """Drop a table. Its files go later, when nobody can need them any more."""
        record = self._record(identifier)
        with _words():
            self._lake.registry.write(lambda transaction: drop_table(transaction, record))

    def purge_table(self, identifier: str | Identifier) -> None:
        """Drop a table; the book removes its files by its own rules."""
        self.drop_table(identifier)

    def rename_table(self, from_identifier: str | Identifier, to_identifier: str | Identifier) -> Table:
        """Give a table another name."""
        record = self._record(from_identifier)
        namespace, name = self._named(to_identifier)
        with _words():
            self._lake.registry.write(lambda transaction: rename_table(transaction, record, namespace, name))
        return self.load_table(to_identifier)

    def table_exists(self, identifier: str | Identifier) -> bool:
        """Whether there is such a table, published or not."""
        try:
            return self._record(identifier).format == _PARQUET
        except (NoSuchTableError, NoSuchNamespaceError):
            return False

    def list_tables(self, namespace: str | Identifier) -> list[Identifier]:
        """The tables of a namespace that are published as Iceberg."""
        space = self._namespace(namespace)
        found: list[Identifier] = []
        after = ""
        self.load_namespace_properties(space)
        with _words():
            while True:
                start = after
                page = self._lake.registry.read_with(lambda reader: list_tables(reader, space, start, "", CHUNK))  # noqa: B023
                found += [(space, record.name) for record in page if record.format == _PARQUET]
                if len(page) < CHUNK:
                    return found
                after = page[-1].name

    # --- commits -----------------------------------------------------------------------

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit to a table."""
        return self.commit(table.name(), requirements, updates)

    def commit(
        self, identifier: str | Identifier, requirements: Sequence[TableRequirement], updates: Sequence[TableUpdate]
    ) -> CommitTableResponse:
        """Commit to a table, or create it."""
        namespace, name = self._named(identifier)
        committer = self._lake.committer
        with _words():
            if any(isinstance(requirement, AssertCreate) for requirement in requirements):
                made, where = committer.create(namespace, name, requirements, updates)
                self._settle(identifier)
            else:
                record = self._record(identifier)
                refuse_mirror(record)
                made, where = committer.commit(record, requirements, updates)
                self._lake.settle_debts_of(record)
        return CommitTableResponse.model_validate({"metadata": made, "metadata-location": where})

    def _settle(self, identifier: str | Identifier) -> None:
        # The commit counts, whatever has become of the name since.
        with suppress(NoSuchTableError):
            self._lake.settle_debts_of(self._record(identifier))

    def commit_all(
        self, changes: Sequence[tuple[str | Identifier, Sequence[TableRequirement], Sequence[TableUpdate]]]
    ) -> None:
        """Commit to several tables, all or nothing."""
        if not changes:
            return
        for _, requirements, _ in changes:
            if len(changes) > 1 and any(isinstance(item, AssertCreate) for item in requirements):
                raise NotAccepted("a table is not created together with other commits", on="commit")
        if len(changes) == 1:
            self.commit(*changes[0])
            return
        records = [self._record(identifier) for identifier, _, _ in changes]
        for record in records:
            refuse_mirror(record)
        with _words():
            self._lake.committer.commit_all(
                [(record, item[1], item[2]) for record, item in zip(records, changes, strict=True)]
            )
        for record in records:
            self._lake.settle_debts_of(record)

    # --- namespaces --------------------------------------------------------------------

    def _namespace(self, namespace: str | Identifier) -> str:
        parts = self.identifier_to_tuple(namespace)
        if len(parts) != 1:
            raise NoSuchNamespaceError(f"Namespace does not exist: {shown('.'.join(map(str, parts)))}")
        return check_name("namespace", parts[0])

    def create_namespace(self, namespace: str | Identifier, properties: Properties = EMPTY_DICT) -> None:
        """Create a namespace."""
        parts = self.identifier_to_tuple(namespace)
        if len(parts) != 1:
            raise NotAccepted("a namespace has one level", on="namespace", remedy="Use a name without dots")
        name = check_name("namespace", parts[0])
        given = _texts(properties)
        with _words():
            self._lake.registry.write(lambda transaction: create_namespace(transaction, name, given))

    def drop_namespace(self, namespace: str | Identifier) -> None:
        """Remove a namespace that has no tables."""
        name = self._namespace(namespace)
        with _words():
            self._lake.registry.write(lambda transaction: drop_namespace(transaction, name))

    def list_namespaces(self, namespace: str | Identifier = ()) -> list[Identifier]:
        """The namespaces; there is one level of them."""
        if namespace:
            self.load_namespace_properties(namespace)
            return []
        found: list[Identifier] = []
        while True:
            after = str(found[-1][0]) if found else ""
            page = self._lake.registry.read_with(lambda reader: list_namespaces(reader, after, CHUNK))  # noqa: B023
            found += [(item.name,) for item in page]
            if len(page) < CHUNK:
                return found if (DEFAULT_NAMESPACE,) in found else [(DEFAULT_NAMESPACE,), *found]

    def load_namespace_properties(self, namespace: str | Identifier) -> Properties:
        """The properties of a namespace."""
        name = self._namespace(namespace)
        try:
            return dict(self._lake.registry.read_with(lambda reader: get_namespace(reader, name)).properties)
        except NamespaceNotFound as error:
            if name == DEFAULT_NAMESPACE:
                return {}  # It is made with its first table.
            raise NoSuchNamespaceError(str(error)) from error

    def update_namespace_properties(
        self, namespace: str | Identifier, removals: set[str] | None = None, updates: Properties = EMPTY_DICT
    ) -> PropertiesUpdateSummary:
        """Change the properties of a namespace."""
        name = self._namespace(namespace)
        gone, given = set(removals or ()), _texts(updates)
        if gone & given.keys():
            raise NotAccepted("a property is both set and removed", on=f"namespace {name}")
        with _words():
            before = self._lake.registry.write(
                lambda transaction: change_namespace(transaction, name, {**dict.fromkeys(gone), **given})
            )
        return PropertiesUpdateSummary(
            removed=sorted(gone & before.keys()), updated=sorted(given), missing=sorted(gone - before.keys())
        )

    # --- views, which may wait ---------------------------------------------------------

    def view_exists(self, identifier: str | Identifier) -> bool:  # noqa: ARG002
        """There are no views yet."""
        return False

    def list_views(self, namespace: str | Identifier) -> list[Identifier]:
        """There are no views yet."""
        self.load_namespace_properties(namespace)
        return []

    def load_view(self, identifier: str | Identifier) -> View:
        """There are no views yet."""
        raise NoSuchViewError(f"View does not exist: {shown('.'.join(map(str, self.identifier_to_tuple(identifier))))}")

    def drop_view(self, identifier: str | Identifier) -> None:
        """There are no views yet."""
        self.load_view(identifier)

    def register_view(self, identifier: str | Identifier, metadata_location: str) -> NoReturn:  # noqa: ARG002
        """There are no views yet."""
        self._refuse_view(identifier)

    def create_view(self, identifier: str | Identifier, *_: Any, **__: Any) -> NoReturn:
        """There are no views yet."""
        self._refuse_view(identifier)

    def _refuse_view(self, identifier: str | Identifier) -> NoReturn:
        name = ".".join(map(str, self.identifier_to_tuple(identifier)))
        raise NotAccepted("views are not kept yet", on=f"view {shown(name)}", remedy="Create a table")


def _texts(properties: Mapping[str, Any]) -> dict[str, str]:
    given = {str(key): str(value) for key, value in properties.items()}
    for key, value in given.items():
        check_text("property", key)
        check_text("property", value)
    return given


_WORDS: dict[type[Exception], Callable[[str], Exception]] = {
    TableNotFound: NoSuchTableError,
    NamespaceNotFound: NoSuchNamespaceError,
    TableAlreadyExists: TableAlreadyExistsError,
    NamespaceAlreadyExists: NamespaceAlreadyExistsError,
    NamespaceNotEmpty: NamespaceNotEmptyError,
}


@contextmanager
def _words() -> Iterator[None]:
    """Errors in the words of PyIceberg's catalogs."""
    try:
        yield
    except tuple(_WORDS) as error:
        raise _WORDS[type(error)](str(error)) from error


__all__ = ["Catalog", "LakeParts", "LakebookCatalog"]
