"""The REST catalog, asked by PyIceberg's own client and by hand."""

from __future__ import annotations

import http.client
import inspect
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    ServiceUnavailableError,
    TableAlreadyExistsError,
    UnauthorizedError,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, StagedTable, Table
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.table.update import (
    AssertCreate,
    AssertRefSnapshotId,
    AssertTableUUID,
    SetPropertiesUpdate,
    TableRequirement,
    TableUpdate,
)
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.typedef import Identifier, Properties
from pyiceberg.types import DoubleType, LongType, NestedField, StringType

from lakebook import errors
from lakebook.server import rest
from lakebook.server.endpoint import RestEndpoint
from lakebook.server.rest import Change, ServedCatalog

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "name", StringType(), required=False),
    NestedField(3, "price", DoubleType(), required=False),
)
ROWS = pa.table(
    {"id": [1, 2], "name": ["a", None], "price": [0.5, 1.5]},
    schema=pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string()), ("price", pa.float64())]),
)


class StandIn(SqlCatalog):
    """PyIceberg's catalog over a database of its own, with what a served catalog has beyond it."""

    told_io: ClassVar[Mapping[str, str]] = {"s3.region": "eu-north-1"}
    # What the next calls run into: before they have done their work, or after it.
    fails_before: Exception | None = None
    fails_after: Exception | None = None
    # A load that says it has begun, and waits until it may go on.
    begun: threading.Event | None = None
    may_end: threading.Event | None = None

    def stage_table(
        self,
        identifier: Identifier,
        schema: Schema,
        location: str | None,
        partition_spec: PartitionSpec,
        sort_order: SortOrder,
        properties: Properties,
    ) -> Table:
        if not self.namespace_exists(identifier[:-1]):
            raise NoSuchNamespaceError(identifier[0])
        if self.table_exists(identifier):
            raise TableAlreadyExistsError(identifier[1])
        return self._create_staged_table(identifier, schema, location, partition_spec, sort_order, properties)

    def load_table(self, identifier: str | Identifier) -> Table:
        if self.fails_before is not None:
            raise self.fails_before
        if self.begun is not None and self.may_end is not None:
            self.begun.set()
            self.may_end.wait()
        return super().load_table(identifier)

    def commit(
        self, identifier: Identifier, requirements: Sequence[TableRequirement], updates: Sequence[TableUpdate]
    ) -> CommitTableResponse:
        if any(isinstance(each, AssertCreate) for each in requirements):
            empty = self._empty_table_metadata()
            table: Table = StagedTable(identifier, empty, "", self._load_file_io(), self)
        else:
            table = self.load_table(identifier)
        done = self.commit_table(table, tuple(requirements), tuple(updates))
        if self.fails_after is not None:
            raise self.fails_after
        return done

    def commit_all(self, changes: Sequence[Change]) -> None:
        for identifier, requirements, _ in changes:
            metadata = self.load_table(identifier).metadata
            for requirement in requirements:
                requirement.validate(metadata)
        for identifier, requirements, updates in changes:
            self.commit(identifier, requirements, updates)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    folder = tmp_path_factory.mktemp("rest")
    found = StandIn("stand-in", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
    yield found
    found.close()


@pytest.fixture(scope="module")
def endpoint(served: StandIn) -> Iterator[RestEndpoint]:
    catalog: ServedCatalog = served
    with RestEndpoint(catalog) as running:
        yield running


@pytest.fixture(scope="module")
def client(endpoint: RestEndpoint) -> Iterator[RestCatalog]:
    found = RestCatalog("client", uri=endpoint.uri, token=endpoint.token, warehouse="whichever")
    yield found
    found.close()


@pytest.fixture
def catalog(served: StandIn) -> Iterator[StandIn]:
    """The stand-in, whole again after the test."""
    yield served
    served.fails_before = served.fails_after = served.begun = served.may_end = None


_numbers = itertools.count(1)


@pytest.fixture
def namespace(served: StandIn) -> str:
    """A new namespace with a table `t` in it."""
    name = f"ns{next(_numbers)}"
    served.create_namespace((name,))
    served.create_table((name, "t"), SCHEMA)
    return name


class Answered:
    """The status of an answer, and what its body says."""

    def __init__(self, status: int, body: bytes, headers: http.client.HTTPMessage) -> None:
        self.status = status
        self.text = body.decode()
        self.headers = headers

    @property
    def document(self) -> Any:
        return json.loads(self.text)

    @property
    def kind(self) -> str | None:
        """The type of the error. Whatever is no error has none."""
        if self.status < 400:
            return None
        error = self.document["error"]
        assert error["code"] == self.status
        assert error["message"]
        return str(error["type"])


def ask(
    endpoint: RestEndpoint, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
) -> Answered:
    """A request as it stands there: nothing in the path is made nicer."""
    if headers is None:
        headers = {"Authorization": f"Bearer {endpoint.token}"}
    if body is not None and not isinstance(body, (bytes, str)):
        body = json.dumps(body)
    address = urlsplit(endpoint.uri)
    with closing(http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)) as connection:
        connection.putrequest(method, path, skip_accept_encoding=True)
        sent = body.encode() if isinstance(body, str) else body
        for name, value in headers.items():
            connection.putheader(name, value)
        if sent is not None:
            connection.putheader("Content-Length", str(len(sent)))
        connection.endheaders(sent)
        answer = connection.getresponse()
        return Answered(answer.status, answer.read(), answer.headers)


# --- PyIceberg's client ----------------------------------------------------------


def test_the_clients_catalog_does_what_a_catalog_does_with_namespaces(client: RestCatalog) -> None:
    client.create_namespace("sales", {"owner": "me"})
    with pytest.raises(NamespaceAlreadyExistsError):
        client.create_namespace("sales")
    assert ("sales",) in client.list_namespaces()
    assert client.list_namespaces("sales") == []
    assert client.namespace_exists("sales")
    assert not client.namespace_exists("nowhere")
    assert client.load_namespace_properties("sales")["owner"] == "me"
    done = client.update_namespace_properties("sales", {"owner", "absent"}, {"region": "eu"})
    assert (done.removed, done.updated, done.missing) == (["owner"], ["region"], ["absent"])
    assert client.load_namespace_properties("sales")["region"] == "eu"
    client.create_table("sales.t", SCHEMA)
    with pytest.raises(NamespaceNotEmptyError):
        client.drop_namespace("sales")
    client.drop_table("sales.t")
    client.drop_namespace("sales")
    assert not client.namespace_exists("sales")
    for gone in (client.drop_namespace, client.load_namespace_properties, client.list_tables, client.list_namespaces):
        with pytest.raises(NoSuchNamespaceError):
            gone("sales")


def test_a_table_is_made_filled_changed_renamed_and_dropped(client: RestCatalog, namespace: str) -> None:
    spec = PartitionSpec(PartitionField(1, 1000, BucketTransform(4), "id_bucket"))
    order = SortOrder(SortField(2, IdentityTransform()))
    made = client.create_table((namespace, "orders"), SCHEMA, None, spec, order, {"a": "b"})
    assert made.properties["a"] == "b"
    with pytest.raises(TableAlreadyExistsError):
        client.create_table((namespace, "orders"), SCHEMA)
    made.append(ROWS)
    made.append(ROWS)
    with made.update_schema() as change:
        change.add_column("more", LongType())
    loaded = client.load_table((namespace, "orders"))
    assert loaded.metadata == made.metadata
    assert loaded.metadata_location == made.metadata_location
    assert len(loaded.snapshots()) == 2
    assert (loaded.spec().fields[0].transform, loaded.sort_order().fields[0].source_id) == (BucketTransform(4), 2)
    assert loaded.scan().to_arrow().num_rows == 4
    assert loaded.schema().column_names == ["id", "name", "price", "more"]
    client.rename_table((namespace, "orders"), (namespace, "sold"))
    with pytest.raises(TableAlreadyExistsError):
        client.rename_table((namespace, "t"), (namespace, "sold"))
    assert client.list_tables(namespace) == [(namespace, "sold"), (namespace, "t")]
    assert client.table_exists((namespace, "sold"))
    assert not client.table_exists((namespace, "orders"))
    client.drop_table((namespace, "sold"))
    with pytest.raises(NoSuchTableError):
        client.load_table((namespace, "sold"))
    with pytest.raises(NoSuchTableError):
        client.drop_table((namespace, "sold"))
    again = client.register_table((namespace, "back"), loaded.metadata_location)
    assert again.metadata == loaded.metadata
    with pytest.raises(TableAlreadyExistsError):
        client.register_table((namespace, "back"), loaded.metadata_location)
    with pytest.raises(BadRequestError, match="there is no file"):
        client.register_table((namespace, "lost"), loaded.metadata_location + ".gone")


def test_a_purge_is_a_purge_and_a_drop_is_not(client: RestCatalog, namespace: str) -> None:
    def metadata_file(table: Table) -> Path:
        return Path(urlsplit(table.metadata_location).path)

    kept, gone = client.load_table((namespace, "t")), client.create_table((namespace, "u"), SCHEMA)
    gone.append(ROWS)
    client.drop_table((namespace, "t"))
    client.purge_table((namespace, "u"))
    assert client.list_tables(namespace) == []
    assert metadata_file(kept).exists()
    assert not metadata_file(gone).exists()


def test_a_staged_table_is_not_there_until_it_is_committed(client: RestCatalog, namespace: str) -> None:
    with client.create_table_transaction((namespace, "made"), SCHEMA, properties={"a": "b"}) as change:
        assert not client.table_exists((namespace, "made"))
        change.append(ROWS)
    made = client.load_table((namespace, "made"))
    assert made.scan().to_arrow().num_rows == 2
    assert made.properties["a"] == "b"


def test_who_stages_a_table_that_another_makes_first_loses(client: RestCatalog, namespace: str) -> None:
    change = client.create_table_transaction((namespace, "made"), SCHEMA)
    client.create_table((namespace, "made"), SCHEMA)
    with pytest.raises(CommitFailedException, match="already exists"):
        change.commit_transaction()
    with pytest.raises(TableAlreadyExistsError):
        client.create_table_transaction((namespace, "made"), SCHEMA)


def test_a_table_of_no_namespace_is_missing_its_namespace_or_itself(client: RestCatalog) -> None:
    with pytest.raises(NoSuchNamespaceError):
        client.create_table("nowhere.t", SCHEMA)
    with pytest.raises(NoSuchTableError):
        client.load_table("nowhere.t")
    assert not client.table_exists("nowhere.t")


def test_a_commit_whose_requirements_do_not_hold_fails_at_the_client(client: RestCatalog, namespace: str) -> None:
    table = client.load_table((namespace, "t"))
    table.append(ROWS)
    with pytest.raises(CommitFailedException, match="was created concurrently"):
        client.commit_table(table, (AssertRefSnapshotId(ref="main"),), (SetPropertiesUpdate(updates={"a": "b"}),))
    assert "a" not in client.load_table((namespace, "t")).properties


@pytest.mark.parametrize(
    "error",
    [
        errors.CommitOutcomeUnknown("the connection was lost"),
        CommitStateUnknownException("who knows"),
        errors.StorageUnavailable("the metadata cannot be written"),
        errors.RegistryCorrupt("broken"),
        RuntimeError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_commit_of_unknown_outcome_is_unknown_to_the_client_and_done_once(
    catalog: StandIn, client: RestCatalog, namespace: str, error: Exception
) -> None:
    table = client.load_table((namespace, "t"))
    catalog.fails_after = error
    with pytest.raises(CommitStateUnknownException):
        table.append(ROWS)
    catalog.fails_after = None
    assert len(client.load_table((namespace, "t")).snapshots()) == 1


def test_a_busy_registry_is_unavailable_to_the_client(catalog: StandIn, client: RestCatalog, namespace: str) -> None:
    table = client.load_table((namespace, "t"))
    catalog.fails_before = errors.RegistryBusy("locked")
    with pytest.raises(ServiceUnavailableError, match="nothing was changed"):
        table.append(ROWS)


def test_a_wrong_token_is_not_let_in(endpoint: RestEndpoint) -> None:
    with pytest.raises(UnauthorizedError, match="token"):
        RestCatalog("stranger", uri=endpoint.uri, token=endpoint.token + "x")


def test_lists_come_in_pages_of_the_size_that_is_asked_for(endpoint: RestEndpoint, client: RestCatalog) -> None:
    names = [f"paged{number:02}" for number in range(5)]
    for name in names:
        client.create_namespace(name)
        client.create_table(("paged00", name), SCHEMA)
    with closing(RestCatalog("pages", uri=endpoint.uri, token=endpoint.token, **{"rest-page-size": "3"})) as paged:
        assert paged.list_tables("paged00") == [("paged00", name) for name in names]
        assert [name for (name,) in paged.list_namespaces() if name.startswith("paged")] == names
        assert paged.list_namespaces() == sorted(client.list_namespaces())
    first = ask(endpoint, "GET", "/v1/namespaces/paged00/tables?pageToken=&pageSize=3").document
    assert [each["name"] for each in first["identifiers"]] == names[:3]
    # What goes meanwhile moves nothing, not even the last one of the page before.
    client.drop_table(("paged00", names[2]))
    path = f"/v1/namespaces/paged00/tables?pageSize=300000&pageToken={quote(first['next-page-token'])}"
    second = ask(endpoint, "GET", path).document
    assert [each["name"] for each in second["identifiers"]] == names[3:]
    assert "next-page-token" not in second


# --- Java's client ---------------------------------------------------------------


def snapshot(number: int, sequence: int, parent: int | None = None) -> dict[str, Any]:
    parents = {} if parent is None else {"parent-snapshot-id": parent}
    return {
        "sequence-number": sequence,
        "snapshot-id": number,
        **parents,
        "timestamp-ms": 4070908800000 + sequence,
        "summary": {"operation": "append", "added-records": "3", "iceberg-version": "Apache Iceberg 1.12.0"},
        "manifest-list": f"file:/nowhere/snap-{number}.avro",
        "schema-id": 0,
    }


# What Iceberg 1.12 for Java was seen to send, change after change of one table.
BIG = 8270521604297862611
JAVA: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        [{"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": None}],
        [
            {"action": "add-snapshot", "snapshot": snapshot(BIG, 1)},
            {"action": "set-snapshot-ref", "ref-name": "main", "snapshot-id": BIG, "type": "branch"},
        ],
    ),
    (
        [
            {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 3},
            {"type": "assert-current-schema-id", "current-schema-id": 0},
        ],
        [
            {
                "action": "add-schema",
                "schema": {
                    "type": "struct",
                    "schema-id": 1,
                    "fields": [
                        {"id": 1, "name": "id", "required": True, "type": "long"},
                        {"id": 2, "name": "called", "required": False, "type": "string", "doc": "doc"},
                        {"id": 3, "name": "at", "required": False, "type": "timestamptz"},
                        {
                            "id": 4,
                            "name": "s",
                            "required": False,
                            "type": {
                                "type": "struct",
                                "fields": [
                                    {
                                        "id": 5,
                                        "name": "x",
                                        "required": False,
                                        "type": {
                                            "type": "list",
                                            "element-id": 6,
                                            "element": "decimal(9, 2)",
                                            "element-required": False,
                                        },
                                    }
                                ],
                            },
                        },
                    ],
                },
                "last-column-id": 6,
            },
            {"action": "set-current-schema", "schema-id": -1},
        ],
    ),
    (
        [
            {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": 999},
            {"type": "assert-default-spec-id", "default-spec-id": 0},
        ],
        [
            {
                "action": "add-spec",
                "spec": {
                    "spec-id": 1,
                    "fields": [{"name": "at_day", "transform": "day", "source-id": 3, "field-id": 1000}],
                },
            },
            {"action": "set-default-spec", "spec-id": -1},
        ],
    ),
    (
        [{"type": "assert-default-sort-order-id", "default-sort-order-id": 0}],
        [
            {
                "action": "add-sort-order",
                "sort-order": {
                    "order-id": 1,
                    "fields": [
                        {"transform": "identity", "source-id": 2, "direction": "desc", "null-order": "nulls-last"}
                    ],
                },
            },
            {"action": "set-default-sort-order", "sort-order-id": -1},
        ],
    ),
    ([], [{"action": "set-properties", "updates": {"x": "y", "z": "1"}}]),
    ([], [{"action": "remove-properties", "removals": ["x"]}]),
    (
        [{"type": "assert-ref-snapshot-id", "ref": "rel", "snapshot-id": None}],
        [
            {"action": "set-snapshot-ref", "ref-name": "rel", "snapshot-id": BIG, "type": "tag", "max-ref-age-ms": 10},
            {
                "action": "set-snapshot-ref",
                "ref-name": "dev",
                "snapshot-id": BIG,
                "type": "branch",
                "min-snapshots-to-keep": 2,
            },
        ],
    ),
    ([], [{"action": "remove-snapshot-ref", "ref-name": "rel"}]),
    (
        [],
        [
            {
                "action": "set-statistics",
                "snapshot-id": BIG,
                "statistics": {
                    "snapshot-id": BIG,
                    "statistics-path": "file:///nowhere/s.puffin",
                    "file-size-in-bytes": 100,
                    "file-footer-size-in-bytes": 42,
                    "blob-metadata": [
                        {
                            "type": "apache-datasketches-theta-v1",
                            "snapshot-id": BIG,
                            "sequence-number": 1,
                            "fields": [1],
                            "properties": {"ndv": "3"},
                        }
                    ],
                },
            }
        ],
    ),
    (
        [],
        [
            {
                "action": "set-partition-statistics",
                "partition-statistics": {
                    "snapshot-id": BIG,
                    "statistics-path": "file:///nowhere/p.parquet",
                    "file-size-in-bytes": 7,
                },
            }
        ],
    ),
    ([], [{"action": "remove-statistics", "snapshot-id": BIG}]),
    (
        [{"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": BIG}],
        [
            {"action": "add-snapshot", "snapshot": snapshot(7, 2, BIG)},
            {"action": "set-snapshot-ref", "ref-name": "main", "snapshot-id": 7, "type": "branch"},
        ],
    ),
    ([], [{"action": "remove-snapshot-ref", "ref-name": "dev"}, {"action": "remove-snapshots", "snapshot-ids": [BIG]}]),
]


def test_what_javas_client_sends_is_understood(endpoint: RestEndpoint, catalog: StandIn, namespace: str) -> None:
    before = catalog.load_table((namespace, "t"))
    asserted = {"type": "assert-table-uuid", "uuid": str(before.metadata.table_uuid)}
    path = f"/v1/namespaces/{namespace}/tables/t"
    for requirements, updates in JAVA:
        # Java's client names the table in the path only.
        answer = ask(endpoint, "POST", path, {"requirements": [asserted, *requirements], "updates": updates})
        assert answer.status == 200, (updates, answer.text)
        assert set(answer.document) == {"metadata-location", "metadata"}
    now = catalog.load_table((namespace, "t"))
    assert answer.document["metadata-location"] == now.metadata_location
    metadata = now.metadata
    assert [each.snapshot_id for each in metadata.snapshots] == [7] == [metadata.current_snapshot_id]
    assert [field.name for field in metadata.schema().fields] == ["id", "called", "at", "s"]
    assert str(metadata.schema().find_type("s.x.element")) == "decimal(9, 2)"
    assert (metadata.default_spec_id, metadata.default_sort_order_id, list(metadata.refs)) == (1, 1, ["main"])
    assert metadata.properties.get("z") == "1" and "x" not in metadata.properties


def test_javas_create_commit_makes_a_table(endpoint: RestEndpoint, catalog: StandIn, namespace: str) -> None:
    fields = [{"id": 1, "name": "id", "required": True, "type": "long"}]
    create = {
        "name": "made",
        "location": None,
        "schema": {"type": "struct", "schema-id": 0, "fields": fields},
        "partition-spec": {"spec-id": 0, "fields": []},
        "write-order": None,
        "properties": {},
        "stage-create": True,
    }
    staged = ask(endpoint, "POST", f"/v1/namespaces/{namespace}/tables", create)
    assert staged.status == 200
    assert set(staged.document) == {"metadata", "config"}
    assert not catalog.table_exists((namespace, "made"))
    metadata = staged.document["metadata"]
    updates = [
        {"action": "assign-uuid", "uuid": metadata["table-uuid"]},
        {"action": "upgrade-format-version", "format-version": 2},
        {"action": "add-schema", "schema": metadata["schemas"][0], "last-column-id": 1},
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "add-spec", "spec": {"spec-id": 0, "fields": []}},
        {"action": "set-default-spec", "spec-id": -1},
        {"action": "add-sort-order", "sort-order": {"order-id": 0, "fields": []}},
        {"action": "set-default-sort-order", "sort-order-id": -1},
        {"action": "set-location", "location": metadata["location"]},
        {"action": "set-properties", "updates": {"p": "q"}},
    ]
    commit = {"requirements": [{"type": "assert-create"}], "updates": updates}
    path = f"/v1/namespaces/{namespace}/tables/made"
    assert ask(endpoint, "POST", path, commit).document["metadata"]["table-uuid"] == metadata["table-uuid"]
    assert str(catalog.load_table((namespace, "made")).metadata.table_uuid) == metadata["table-uuid"]
    again = ask(endpoint, "POST", path, commit)
    assert (again.status, again.kind) == (409, "CommitFailedException")


def test_a_create_needs_no_more_than_a_name_and_a_schema(endpoint: RestEndpoint, namespace: str) -> None:
    fields = [{"id": 1, "name": "id", "required": True, "type": "long"}]
    least = {"name": "least", "schema": {"type": "struct", "fields": fields}}
    assert ask(endpoint, "POST", f"/v1/namespaces/{namespace}/tables", least).status == 200
    # A field of a partitioning gets its id when the table is made.
    spec = {"fields": [{"name": "b", "transform": "bucket[4]", "source-id": 1}]}
    made = ask(
        endpoint, "POST", f"/v1/namespaces/{namespace}/tables", least | {"name": "parted", "partition-spec": spec}
    )
    assert made.document["metadata"]["partition-specs"][0]["fields"][0]["field-id"] == 1000


def test_metadata_leave_out_what_is_not_there(endpoint: RestEndpoint, catalog: StandIn, namespace: str) -> None:
    # Java takes an absent current snapshot for none, and a null in other places for an error.
    catalog.load_table((namespace, "t"))
    loaded = ask(endpoint, "GET", f"/v1/namespaces/{namespace}/tables/t?snapshots=refs")
    assert set(loaded.document) == {"metadata-location", "metadata", "config"}
    metadata = loaded.document["metadata"]
    assert "current-snapshot-id" not in metadata
    assert (metadata["refs"], metadata["snapshots"], metadata["statistics"]) == ({}, [], [])
    assert "null" not in loaded.text


# --- several tables --------------------------------------------------------------


def test_a_commit_of_several_tables_is_all_or_nothing(endpoint: RestEndpoint, catalog: StandIn, namespace: str) -> None:
    catalog.create_table((namespace, "u"), SCHEMA)

    def change(name: str, uuid: str, value: str) -> dict[str, Any]:
        return {
            "identifier": {"namespace": [namespace], "name": name},
            "requirements": [{"type": "assert-table-uuid", "uuid": uuid}],
            "updates": [{"action": "set-properties", "updates": {"v": value}}],
        }

    def values() -> list[str | None]:
        return [catalog.load_table((namespace, name)).properties.get("v") for name in ("t", "u")]

    uuids = [str(catalog.load_table((namespace, name)).metadata.table_uuid) for name in ("t", "u")]
    changes = [change("t", uuids[0], "1"), change("u", uuids[1], "1")]
    assert ask(endpoint, "POST", "/v1/transactions/commit", {"table-changes": changes}).status == 204
    assert values() == ["1", "1"]
    changes = [change("t", uuids[0], "2"), change("u", uuids[0], "2")]
    failed = ask(endpoint, "POST", "/v1/transactions/commit", {"table-changes": changes})
    assert (failed.status, failed.kind) == (409, "CommitFailedException")
    twice = ask(endpoint, "POST", "/v1/transactions/commit", {"table-changes": [changes[0], changes[0]]})
    assert (twice.status, twice.kind) == (400, "BadRequestException")
    missing = ask(endpoint, "POST", "/v1/transactions/commit", {"table-changes": [change("nix", uuids[0], "2")]})
    assert (missing.status, missing.kind) == (404, "NoSuchTableException")
    assert values() == ["1", "1"]
    catalog.fails_after = errors.CommitOutcomeUnknown("lost")
    unknown = ask(endpoint, "POST", "/v1/transactions/commit", {"table-changes": [change("t", uuids[0], "3")]})
    assert (unknown.status, unknown.kind) == (500, "CommitStateUnknownException")


# --- by hand ---------------------------------------------------------------------

NS = "/v1/namespaces"
TABLE = f"{NS}/raw/tables/t"
FIELDS = [{"id": 1, "name": "id", "required": True, "type": "long"}]
CREATE = {"name": "made", "schema": {"type": "struct", "schema-id": 0, "fields": FIELDS}}
SOURCE = {"namespace": ["raw"], "name": "t"}


def deep(levels: int) -> Any:
    kind: Any = "long"
    for number in range(levels):
        kind = {"type": "struct", "fields": [{"id": number + 2, "name": "x", "required": False, "type": kind}]}
    return CREATE | {"schema": {"type": "struct", "fields": [FIELDS[0] | {"type": kind}]}}


RAW: list[tuple[str, str, Any, int, str | None]] = [
    ("GET", "/v1/config", None, 200, None),
    ("GET", "/v1/config?warehouse=any%20where", None, 200, None),
    ("GET", NS, None, 200, None),
    ("GET", f"{NS}?parent=", None, 200, None),
    ("GET", f"{NS}?parent=raw", None, 200, None),
    ("GET", f"{NS}?parent=nix", None, 404, "NoSuchNamespaceException"),
    ("GET", f"{NS}?parent=raw%1Fbelow", None, 404, "NoSuchNamespaceException"),
    ("GET", f"{NS}?parent=%E2%82%AC", None, 404, "NoSuchNamespaceException"),
    ("GET", f"{NS}?pageSize=0", None, 400, "BadRequestException"),
    ("GET", f"{NS}?pageSize=-1", None, 400, "BadRequestException"),
    ("GET", f"{NS}?pageSize=many", None, 400, "BadRequestException"),
    ("GET", f"{NS}?pageSize=%D9%A3", None, 400, "BadRequestException"),
    ("GET", f"{NS}?pageSize={'9' * 5000}", None, 400, "BadRequestException"),
    ("GET", f"{NS}?pageToken=*", None, 400, "BadRequestException"),
    ("GET", f"{NS}?pageToken=_w==", None, 400, "BadRequestException"),
    ("POST", NS, {"namespace": ["raw"]}, 409, "AlreadyExistsException"),
    ("POST", NS, {"namespace": ["raw"], "properties": {"a": 1}}, 400, "BadRequestException"),
    ("POST", NS, {"namespace": ["a", "b"]}, 400, "BadRequestException"),
    ("POST", NS, {"namespace": []}, 400, "BadRequestException"),
    ("POST", NS, {"namespace": "raw"}, 400, "BadRequestException"),
    ("POST", NS, {}, 400, "BadRequestException"),
    ("POST", NS, [], 400, "BadRequestException"),
    ("POST", NS, b"", 400, "BadRequestException"),
    ("POST", NS, b"{", 400, "BadRequestException"),
    ("POST", NS, b'{"namespace": ["a"], "properties": {"x": NaN}}', 400, "BadRequestException"),
    ("POST", NS, b'{"namespace": ["\\ud800"]}', 400, "BadRequestException"),
    ("POST", NS, b'{"namespace": ["\xff"]}', 400, "BadRequestException"),
    ("POST", NS, b"[" * 100_000, 400, "BadRequestException"),
    ("POST", NS, {"namespace": ["a"], "properties": {"x": "a\0b"}}, 400, "BadRequestException"),
    ("HEAD", f"{NS}/raw", None, 204, None),
    ("GET", f"{NS}/raw", None, 200, None),
    ("GET", f"{NS}/nix", None, 404, "NoSuchNamespaceException"),
    ("GET", f"{NS}/raw%1Fbelow", None, 404, "NoSuchNamespaceException"),
    ("GET", f"{NS}/raw.below", None, 404, "NoSuchNamespaceException"),
    ("DELETE", f"{NS}/raw", None, 409, "NamespaceNotEmptyException"),
    ("DELETE", f"{NS}/nix", None, 404, "NoSuchNamespaceException"),
    ("PUT", f"{NS}/raw", None, 405, "UnsupportedOperationException"),
    ("POST", f"{NS}/raw/properties", {}, 200, None),
    ("POST", f"{NS}/raw/properties", {"removals": None, "updates": None}, 200, None),
    ("POST", f"{NS}/raw/properties", {"removals": ["a"], "updates": {"a": "b"}}, 422, "UnprocessableEntityException"),
    ("POST", f"{NS}/raw/properties", {"removals": "a"}, 400, "BadRequestException"),
    ("POST", f"{NS}/nix/properties", {"updates": {"a": "b"}}, 404, "NoSuchNamespaceException"),
    ("GET", f"{NS}/raw/tables", None, 200, None),
    ("GET", f"{NS}/nix/tables", None, 404, "NoSuchNamespaceException"),
    ("GET", f"{NS}/raw/", None, 404, "NotFoundException"),
    ("POST", f"{NS}/raw/tables", CREATE | {"name": "t"}, 409, "AlreadyExistsException"),
    ("POST", f"{NS}/raw/tables", CREATE | {"name": "t", "stage-create": True}, 409, "AlreadyExistsException"),
    ("POST", f"{NS}/raw/tables", CREATE | {"name": "../t"}, 400, "BadRequestException"),
    ("POST", f"{NS}/raw/tables", CREATE | {"name": None}, 400, "BadRequestException"),
    ("POST", f"{NS}/raw/tables", CREATE | {"schema": {"type": "list"}}, 400, "BadRequestException"),
    ("POST", f"{NS}/raw/tables", CREATE | {"partition-spec": 7}, 400, "BadRequestException"),
    ("POST", f"{NS}/raw/tables", CREATE | {"partition-spec": {"fields": 7}}, 400, "BadRequestException"),
    ("POST", f"{NS}/raw/tables", CREATE | {"properties": [1]}, 400, "BadRequestException"),
    ("POST", f"{NS}/raw/tables", CREATE | {"properties": {"a": None}}, 400, "BadRequestException"),
    ("POST", f"{NS}/raw/tables", deep(45) | {"stage-create": True}, 200, None),
    ("POST", f"{NS}/raw/tables", deep(60), 400, "BadRequestException"),
    ("POST", f"{NS}/raw/tables", {"name": "made"}, 400, "BadRequestException"),
    ("POST", f"{NS}/nix/tables", CREATE, 404, "NoSuchNamespaceException"),
    ("POST", f"{NS}/nix/tables", CREATE | {"stage-create": True}, 404, "NoSuchNamespaceException"),
    ("POST", f"{NS}/raw%1Fbelow/tables", CREATE, 404, "NoSuchNamespaceException"),
    ("HEAD", TABLE, None, 204, None),
    ("GET", TABLE, None, 200, None),
    ("GET", f"{TABLE}?snapshots=all", None, 200, None),
    ("GET", f"{TABLE}?snapshots=some", None, 400, "BadRequestException"),
    ("GET", f"{NS}/raw/tables/nix", None, 404, "NoSuchTableException"),
    # So clients ask for the metadata table `raw.t.files`; they go on only if the table is what is missing.
    ("GET", f"{NS}/raw%1Ft/tables/files", None, 404, "NoSuchTableException"),
    ("GET", f"{NS}/nix/tables/t", None, 404, "NoSuchTableException"),
    ("DELETE", f"{NS}/nix/tables/t", None, 404, "NoSuchTableException"),
    ("DELETE", f"{NS}/raw/tables/nix?purgeRequested=true", None, 404, "NoSuchTableException"),
    ("DELETE", f"{TABLE}?purgeRequested=maybe", None, 400, "BadRequestException"),
    ("PATCH", TABLE, {}, 405, "UnsupportedOperationException"),
    ("POST", TABLE, {"requirements": [], "updates": []}, 200, None),
    ("POST", TABLE, {"identifier": SOURCE, "requirements": [], "updates": []}, 200, None),
    ("POST", TABLE, {"identifier": SOURCE | {"name": "u"}, "updates": []}, 400, "BadRequestException"),
    ("POST", TABLE, {"identifier": "t", "updates": []}, 400, "BadRequestException"),
    ("POST", TABLE, {"updates": {}}, 400, "BadRequestException"),
    ("POST", TABLE, {"updates": [7]}, 400, "BadRequestException"),
    ("POST", TABLE, {"updates": [{}]}, 400, "BadRequestException"),
    ("POST", TABLE, {"updates": [{"action": "set-statistics"}]}, 400, "BadRequestException"),
    ("POST", TABLE, {"updates": [{"action": "set-properties", "updates": 1}]}, 400, "BadRequestException"),
    ("POST", TABLE, {"updates": [{"action": "set-current-schema", "schema-id": 99}]}, 400, "BadRequestException"),
    ("POST", TABLE, {"updates": [{"action": "set-current-schema", "schema-id": 2**70}]}, 400, "BadRequestException"),
    ("POST", TABLE, {"updates": [{"action": "add-snapshot", "snapshot": {}}]}, 400, "BadRequestException"),
    ("POST", TABLE, {"requirements": [{"type": "assert-create"}]}, 409, "CommitFailedException"),
    ("POST", f"{NS}/raw/tables/nix", {"updates": []}, 404, "NoSuchTableException"),
    ("POST", f"{NS}/raw/tables/a%20b", {"requirements": [{"type": "assert-create"}]}, 400, "BadRequestException"),
    ("POST", f"{NS}/a%1Fb/tables/t", {"requirements": [{"type": "assert-create"}]}, 404, "NoSuchNamespaceException"),
    ("POST", f"{TABLE}/metrics", {"report-type": "scan-report"}, 204, None),
    ("POST", f"{TABLE}/metrics", b"whatever it is", 204, None),
    ("POST", "/v1/tables/rename", {"source": SOURCE}, 400, "BadRequestException"),
    (
        "POST",
        "/v1/tables/rename",
        {"source": SOURCE | {"name": "nix"}, "destination": SOURCE | {"name": "u"}},
        404,
        "NoSuchTableException",
    ),
    (
        "POST",
        "/v1/tables/rename",
        {"source": SOURCE, "destination": {"namespace": ["catalog", "raw"], "name": "u"}},
        404,
        "NoSuchNamespaceException",
    ),
    (
        "POST",
        "/v1/tables/rename",
        {"source": SOURCE, "destination": SOURCE | {"name": "a/b"}},
        400,
        "BadRequestException",
    ),
    ("POST", f"{NS}/raw/register", {"name": "r"}, 400, "BadRequestException"),
    ("POST", f"{NS}/raw/register", {"name": "r/", "metadata-location": "file:///x"}, 400, "BadRequestException"),
    (
        "POST",
        f"{NS}/raw/register",
        {"name": "r", "metadata-location": "file:///x", "overwrite": "yes"},
        400,
        "BadRequestException",
    ),
    (
        "POST",
        f"{NS}/raw/register",
        {"name": "r", "metadata-location": "file:///x", "overwrite": True},
        406,
        "UnsupportedOperationException",
    ),
    ("POST", f"{NS}/nix/register", {"name": "r", "metadata-location": "file:///x"}, 404, "NoSuchNamespaceException"),
    ("POST", "/v1/transactions/commit", {"table-changes": []}, 204, None),
    ("POST", "/v1/transactions/commit", {"table-changes": [{}]}, 400, "BadRequestException"),
    ("POST", "/v1/transactions/commit", {"table-changes": [7]}, 400, "BadRequestException"),
    ("POST", "/v1/transactions/commit", {}, 400, "BadRequestException"),
    ("GET", f"{NS}/raw/views", None, 406, "UnsupportedOperationException"),
    ("POST", f"{NS}/raw/views", {}, 406, "UnsupportedOperationException"),
    ("GET", f"{NS}/raw/views/v", None, 406, "UnsupportedOperationException"),
    ("POST", "/v1/views/rename", {}, 406, "UnsupportedOperationException"),
    ("POST", f"{TABLE}/plan", {}, 406, "UnsupportedOperationException"),
    ("GET", f"{TABLE}/credentials", None, 406, "UnsupportedOperationException"),
    ("POST", "/v1/oauth/tokens", b"grant_type=client_credentials", 406, "UnsupportedOperationException"),
    ("GET", "/", None, 404, "NotFoundException"),
    ("GET", "/v2/config", None, 404, "NotFoundException"),
    ("GET", "/v1/%63onfig", None, 404, "NotFoundException"),
]


@pytest.fixture(scope="module")
def raw(served: StandIn) -> None:
    served.create_namespace(("raw",))
    served.create_table(("raw", "t"), SCHEMA)


def told(case: tuple[str, str, Any, int, str | None]) -> str:
    method, path, body, status, _ = case
    text = "" if body is None else body.decode("latin-1") if isinstance(body, bytes) else json.dumps(body)
    return ascii(f"{method} {path} {text}")[1:90] + f" {status}"


@pytest.mark.usefixtures("raw")
@pytest.mark.parametrize("case", RAW, ids=told)
def test_a_request_gets_the_answer_of_the_specification(
    endpoint: RestEndpoint, case: tuple[str, str, Any, int, str | None]
) -> None:
    method, path, body, status, kind = case
    answer = ask(endpoint, method, path, body)
    assert (answer.status, answer.kind) == (status, kind), answer.text
    if status in (200, 400, 404, 409):
        assert answer.headers["Content-Type"] == "application/json"
    if status == 204:
        assert answer.text == ""


@pytest.mark.usefixtures("raw")
def test_a_head_has_a_status_and_nothing_else(endpoint: RestEndpoint) -> None:
    for path in (f"{NS}/nix", f"{NS}/raw/tables/nix", f"{NS}/nix/tables/t", f"{NS}/a%2Fb/tables/t"):
        answer = ask(endpoint, "HEAD", path)
        assert (answer.status, answer.text) == (404, ""), path


@pytest.mark.usefixtures("raw")
def test_an_unknown_change_is_refused_with_what_is_known(endpoint: RestEndpoint) -> None:
    update = ask(endpoint, "POST", TABLE, {"updates": [{"action": "add-encryption-key"}]})
    assert (update.status, update.kind) == (400, "BadRequestException")
    message = update.document["error"]["message"]
    assert "updates.0" in message
    assert "'add-encryption-key'" in message
    assert "'add-snapshot'" in message and "'set-statistics'" in message
    requirement = ask(endpoint, "POST", TABLE, {"requirements": [{"type": "assert-weather"}]})
    assert requirement.status == 400
    assert "'assert-ref-snapshot-id'" in requirement.document["error"]["message"]


def test_the_configuration_tells_every_endpoint_that_is_served(endpoint: RestEndpoint) -> None:
    config = ask(endpoint, "GET", "/v1/config").document
    assert config["overrides"] == {"token-refresh-enabled": "false"}
    assert len(config["endpoints"]) == 16
    assert not [each for each in config["endpoints"] if "view" in each]
    for each in config["endpoints"]:
        method, path = each.split(" ")
        filled = path.replace("/{prefix}", "").format(namespace="nix", table="nix")
        answer = ask(endpoint, method, filled, {} if method == "POST" else None)
        assert answer.status not in (405, 406), each
        if answer.status == 404 and method != "HEAD":
            assert answer.kind != "NotFoundException", each


# --- who may ask -----------------------------------------------------------------


def test_nothing_is_told_without_the_token(endpoint: RestEndpoint) -> None:
    token = endpoint.token
    for headers in (
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": token},
        {"Authorization": f"Basic {token}"},
        {"Authorization": f"Bearer {token[:-1]}"},
        {"Authorization": f"Bearer {token}x"},
        {"Authorization": f"Bearer {token.swapcase()}"},
        {"Authorization": "Bearer \xff\xfe"},
        {"Authorization": f"Bearer {token} {token}"},
        {"authorization": f"Bearer {token}", "Authorization": "Bearer x"},
    ):
        for method, path in (("GET", "/v1/config"), ("GET", "/nowhere"), ("POST", "/v1/oauth/tokens")):
            answer = ask(endpoint, method, path, headers=headers)
            assert (answer.status, answer.kind) == (401, "NotAuthorizedException"), headers
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert token not in answer.text
    # The name of the scheme may be written in any case.
    assert ask(endpoint, "GET", "/v1/config", headers={"Authorization": f"bearer {token}"}).status == 200


def test_it_is_on_the_loopback_address_only(endpoint: RestEndpoint) -> None:
    assert urlsplit(endpoint.uri).hostname == "127.0.0.1"


@pytest.mark.parametrize("token", ["", "a b", "a\nb", "ä", "a\0"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(catalog: StandIn, token: str) -> None:
    with pytest.raises(errors.InvalidSetting) as failed:
        RestEndpoint(catalog, token=token)
    assert token == "" or token not in str(failed.value)


# --- hostile requests ------------------------------------------------------------

HOSTILE = [
    ".", "..", "../..", "a/b", "/etc/passwd", "a\\b", "a\0b", "\0", "a\nb", " ", "a b", "x" * 250, "x" * 20_000, "ü",
    "💥", "a;DROP TABLE x", "a'b", "%", "%2e%2e", "a\x1fb", "\x1f", "a?b", "a#b", "\r\nX: y", "a+b", "{t}", "\x7f",
]  # fmt: skip


@pytest.mark.usefixtures("raw")
@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:30])
def test_a_hostile_name_is_refused_or_not_found(endpoint: RestEndpoint, catalog: StandIn, name: str) -> None:
    path = quote(name, safe="")
    commit = {"requirements": [{"type": "assert-create"}], "updates": []}
    asked: list[tuple[str, str, Any]] = [
        ("GET", f"{NS}/{path}", None),
        ("DELETE", f"{NS}/{path}", None),
        ("GET", f"{NS}?parent={path}", None),
        ("POST", NS, {"namespace": [name]}),
        ("POST", f"{NS}/{path}/properties", {"updates": {"a": "b"}}),
        ("GET", f"{NS}/{path}/tables", None),
        ("POST", f"{NS}/{path}/tables", CREATE),
        ("POST", f"{NS}/raw/tables", CREATE | {"name": name}),
        ("POST", f"{NS}/raw/tables", CREATE | {"name": name, "stage-create": True}),
        ("GET", f"{NS}/{path}/tables/t", None),
        ("GET", f"{NS}/raw/tables/{path}", None),
        ("DELETE", f"{NS}/raw/tables/{path}?purgeRequested=true", None),
        ("POST", f"{NS}/raw/tables/{path}", {"updates": []}),
        ("POST", f"{NS}/raw/tables/{path}", commit),
        ("POST", f"{NS}/{path}/tables/t", commit),
        ("POST", f"{NS}/raw/register", {"name": name, "metadata-location": "file:///x"}),
        ("POST", "/v1/tables/rename", {"source": SOURCE, "destination": SOURCE | {"name": name}}),
        ("POST", "/v1/tables/rename", {"source": SOURCE, "destination": {"namespace": [name], "name": "u"}}),
        ("POST", "/v1/tables/rename", {"source": SOURCE | {"name": name}, "destination": SOURCE | {"name": "u"}}),
        (
            "POST",
            "/v1/transactions/commit",
            {"table-changes": [{"identifier": SOURCE | {"name": name}, "updates": []}]},
        ),
    ]
    namespaces = catalog.list_namespaces()
    for method, where, body in asked:
        answer = ask(endpoint, method, where, body)
        assert answer.status in (400, 404), (method, where, answer.text)
        assert answer.kind in ("BadRequestException", "NoSuchNamespaceException", "NoSuchTableException"), where
        assert len(answer.text) < 3000
    assert catalog.list_namespaces() == namespaces
    assert catalog.list_tables("raw") == [("raw", "t")]


@pytest.mark.usefixtures("raw")
@pytest.mark.parametrize("path", ["%", "%zz", "%ff", "%C3", "..;", "raw%2Ftables%2Ft", "raw%252Ftables", "\xff\xfe"])
def test_a_path_that_is_no_name_names_nothing(endpoint: RestEndpoint, path: str) -> None:
    address = urlsplit(endpoint.uri)
    with socket.create_connection((str(address.hostname), address.port or 0), timeout=30) as connection:
        head = f"GET {NS}/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.token}\r\n"
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode("latin-1"))
        with closing(http.client.HTTPResponse(connection)) as answer:
            answer.begin()
            assert answer.status in (400, 404)
            assert answer.read()


def test_a_body_that_is_too_large_is_refused_before_it_is_read(endpoint: RestEndpoint) -> None:
    headers = {"Authorization": f"Bearer {endpoint.token}", "Content-Length": str(rest.MAX_BODY + 1)}
    answer = ask(endpoint, "POST", "/v1/namespaces", headers=headers)
    assert (answer.status, answer.kind) == (413, "RequestTooLargeException")


def test_a_body_of_untold_length_is_refused_when_it_grows_too_large(
    endpoint: RestEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest, "MAX_BODY", 1000)
    address = urlsplit(endpoint.uri)
    with closing(http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)) as connection:
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        connection.request("POST", NS, iter([b"x" * 600, b"x" * 600]), headers, encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.loads(answer.read())["error"]["code"] == 413


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["action", "type", "snapshot", "schema", "fields", "statistics", "spec", "uuid", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
ACTIONS = st.sampled_from(["add-schema", "add-spec", "add-snapshot", "set-statistics", "set-properties", "assign-uuid"])
UPDATE = st.builds(
    lambda action, rest: {**rest, "action": action},
    ACTIONS,
    st.dictionaries(
        st.sampled_from(["schema", "spec", "snapshot", "statistics", "updates", "uuid", "sort-order"]), JSON, max_size=2
    ),
)


@pytest.mark.usefixtures("raw")
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=JSON, update=UPDATE)
def test_no_document_makes_the_server_fail(endpoint: RestEndpoint, body: Any, update: Any) -> None:
    for path, document in (
        (f"{NS}/raw/tables/nix", {"updates": [update]}),
        (f"{NS}/raw/tables/nix", {"requirements": [body]}),
        (f"{NS}/nix/tables", {"name": "t", "schema": body, "partition-spec": body, "stage-create": True}),
        ("/v1/transactions/commit", {"table-changes": [{"identifier": SOURCE, "updates": body}]}),
        ("/v1/tables/rename", {"source": body, "destination": body}),
        (NS, {"namespace": body}),
    ):
        answer = ask(endpoint, "POST", path, document)
        assert answer.status in (200, 204, 400, 404, 409), (path, document, answer.text)


# --- errors ----------------------------------------------------------------------

# The status of every error that a client may hear of; all the others are the server's own: 500.
STATUS = {
    errors.InvalidInput: (400, "BadRequestException"),
    errors.NotFound: (404, "NotFoundException"),
    errors.TableNotFound: (404, "NoSuchTableException"),
    # Where it is a table that is asked for, it is the table that is missing.
    errors.NamespaceNotFound: (404, "NoSuchTableException"),
    errors.TableAlreadyExists: (409, "AlreadyExistsException"),
    errors.NamespaceAlreadyExists: (409, "AlreadyExistsException"),
    errors.NamespaceNotEmpty: (409, "NamespaceNotEmptyException"),
    errors.CommitAborted: (409, "CommitFailedException"),
    errors.FilesChanged: (409, "CommitFailedException"),
    errors.SchemaChanged: (409, "CommitFailedException"),
    errors.IncompatibleSchema: (400, "ValidationException"),
    errors.PathInUse: (400, "BadRequestException"),
    errors.RegistryBusy: (503, "ServiceUnavailableException"),
    errors.RegistryUnavailable: (503, "ServiceUnavailableException"),
    errors.StorageUnavailable: (503, "ServiceUnavailableException"),
    errors.CommitOutcomeUnknown: (500, "CommitStateUnknownException"),
}
ALL_ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.LakebookError)]


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_has_its_status(endpoint: RestEndpoint, catalog: StandIn, kind: type[errors.LakebookError]) -> None:
    status, name = next((STATUS[each] for each in kind.__mro__ if each in STATUS), (500, "InternalServerError"))
    catalog.fails_before = kind("it failed at postgresql://me:hunter2@host/db", on="here", remedy="Try")
    loaded = ask(endpoint, "GET", TABLE)
    assert (loaded.status, loaded.kind) == (status, name)
    if kind is errors.NamespaceNotFound:
        name = "NoSuchNamespaceException"
    if kind is errors.StorageUnavailable:
        # A client may repeat what is 503, and nobody knows how far a commit has got.
        status, name = 500, "CommitStateUnknownException"
    committed = ask(endpoint, "POST", TABLE, {"updates": []})
    assert (committed.status, committed.kind) == (status, name)
    assert "hunter2" not in loaded.text + committed.text


@pytest.mark.parametrize(
    "error", [RuntimeError("secret"), KeyError("secret"), OSError("secret"), AssertionError("secret")], ids=repr
)
def test_an_unexpected_error_is_told_of_in_the_log_and_nowhere_else(
    endpoint: RestEndpoint,
    catalog: StandIn,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    catalog.fails_before = error
    answer = ask(endpoint, "GET", TABLE)
    assert (answer.status, answer.kind) == (500, "InternalServerError")
    assert "secret" not in answer.text and "Traceback" not in answer.text
    assert "secret" in caplog.text


def test_an_answer_that_cannot_be_told_after_a_commit_does_not_say_the_request_was_bad(
    endpoint: RestEndpoint, catalog: StandIn, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_: CommitTableResponse) -> None:
        raise ValueError("the metadata have no form")

    # The change is done by then: a client that hears of a bad request would remove its files.
    monkeypatch.setattr(CommitTableResponse, "metadata_location", property(unreadable), raising=False)
    body = {"updates": [{"action": "set-properties", "updates": {"a": "b"}}]}
    answer = ask(endpoint, "POST", f"{NS}/{namespace}/tables/t", body)
    assert (answer.status, answer.kind) == (500, "InternalServerError")
    assert catalog.load_table((namespace, "t")).properties["a"] == "b"


# --- the thread ------------------------------------------------------------------


def test_it_can_be_started_and_stopped_more_than_once(catalog: StandIn) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    endpoint = RestEndpoint(catalog, token="of-my-own")
    with pytest.raises(errors.TerminalError, match="does not run"):
        _ = endpoint.uri
    endpoint.stop()
    endpoint.start()
    first = endpoint.uri
    endpoint.start()
    assert endpoint.uri == first
    assert ask(endpoint, "GET", "/v1/config", headers={"Authorization": "Bearer of-my-own"}).status == 200
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    running = [each for each in threading.enumerate() if each.name == "lakebook-rest"]
    endpoint.stop()
    endpoint.stop()
    assert sum(each.is_alive() for each in running) == len(running) - 1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(first).port or 0))
    with endpoint:
        assert ask(endpoint, "GET", "/v1/config").status == 200


def test_two_endpoints_have_ports_and_tokens_of_their_own(endpoint: RestEndpoint, catalog: StandIn) -> None:
    with RestEndpoint(catalog) as other:
        assert other.uri != endpoint.uri
        assert other.token != endpoint.token
        assert ask(other, "GET", "/v1/config", headers={"Authorization": f"Bearer {endpoint.token}"}).status == 401


def test_a_request_at_work_ends_before_the_server_does(catalog: StandIn, namespace: str) -> None:
    catalog.begun, catalog.may_end = threading.Event(), threading.Event()
    endpoint = RestEndpoint(catalog)
    endpoint.start()
    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(ask, endpoint, "GET", f"{NS}/{namespace}/tables/t")
        assert catalog.begun.wait(30)
        stopped = threads.submit(endpoint.stop)
        assert not stopped.done()
        catalog.may_end.set()
        assert asked.result(30).status == 200
        stopped.result(30)


def test_many_ask_at_once(endpoint: RestEndpoint, namespace: str) -> None:
    paths = ["/v1/config", f"{NS}/{namespace}", f"{NS}/{namespace}/tables/t", f"{NS}/{namespace}/tables"] * 10
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda path: ask(endpoint, "GET", path).status, paths))
    assert answers == [200] * len(paths)


def test_one_of_many_commits_at_once_holds(endpoint: RestEndpoint, catalog: StandIn, namespace: str) -> None:
    uuid = catalog.load_table((namespace, "t")).metadata.table_uuid
    required = [AssertTableUUID(uuid=uuid).model_dump(mode="json"), {"type": "assert-current-schema-id"}]
    required[1]["current-schema-id"] = 0
    fields = [{"id": 1, "name": "id", "required": True, "type": "long"}]
    schema = {"type": "struct", "schema-id": 1, "fields": fields}
    updates = [{"action": "add-schema", "schema": schema}, {"action": "set-current-schema", "schema-id": 1}]
    body = {"requirements": required, "updates": updates}
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, endpoint, "POST", f"{NS}/{namespace}/tables/t", body) for _ in range(8)]
        answers = sorted(each.result().status for each in asked)
    assert answers == [200] + [409] * 7


def test_a_forked_child_does_not_keep_the_port_open(catalog: StandIn) -> None:
    endpoint = RestEndpoint(catalog)
    endpoint.start()
    port = urlsplit(endpoint.uri).port or 0
    waiting, go_on = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go_on)
        os.read(waiting, 1)
        os._exit(0)
    os.close(waiting)
    try:
        endpoint.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    finally:
        os.close(go_on)
        os.waitpid(child, 0)
