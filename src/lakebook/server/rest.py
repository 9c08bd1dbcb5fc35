"""The routes of the Iceberg REST catalog, over a catalog object."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote_to_bytes

import orjson
from pydantic import ValidationError as MalformedModel
from pyiceberg.catalog import PropertiesUpdateSummary
from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, CommitTableResponse, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.table.update import AssertCreate, TableRequirement, TableUpdate
from pyiceberg.typedef import Identifier, Properties
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lakebook.errors import InvalidInput, InvalidName, InvalidPage, NamespaceNotFound
from lakebook.names import check_name, shown
from lakebook.pages import MAX_PAGE_SIZE, PAGE_SIZE
from lakebook.server.errors import LOG, UNEXPECTED, Failure, failure_of, malformed

MAX_BODY = 64 * 1024 * 1024
#: How deep the values of a body may lie in each other; a column inside of a column takes three.
MAX_DEPTH = 150
MAX_INTEGER = 2**63

#: Between the levels of a namespace in a path.
SEPARATOR = "\x1f"

# A client would else try, after an hour, to exchange its token for another one.
_OVERRIDES = {"token-refresh-enabled": "false"}

T = TypeVar("T")
Change = tuple[Identifier, Sequence[TableRequirement], Sequence[TableUpdate]]


class ServedCatalog(Protocol):
    """What the routes need of a catalog: PyIceberg's own methods, staged creates, and commits by name."""

    @property
    def told_io(self) -> Mapping[str, str]:
        """What clients have to know to open the files."""

    def list_namespaces(self, namespace: Identifier, /) -> list[Identifier]:
        """The namespaces, or those below one."""

    def create_namespace(self, namespace: Identifier, properties: Properties, /) -> None:
        """Make a namespace."""

    def load_namespace_properties(self, namespace: Identifier, /) -> Properties:
        """The properties of a namespace."""

    def namespace_exists(self, namespace: Identifier, /) -> bool:
        """Whether there is such a namespace."""

    def update_namespace_properties(
        self, namespace: Identifier, removals: set[str], updates: Properties, /
    ) -> PropertiesUpdateSummary:
        """Set and remove properties of a namespace."""

    def drop_namespace(self, namespace: Identifier, /) -> None:
        """Remove an empty namespace."""

    def list_tables(self, namespace: Identifier, /) -> list[Identifier]:
        """The tables of a namespace."""

    def create_table(
        self,
        identifier: Identifier,
        schema: Schema,
        location: str | None,
        partition_spec: PartitionSpec,
        sort_order: SortOrder,
        properties: Properties,
        /,
    ) -> Table:
        """Make a table."""

    def stage_table(
        self,
        identifier: Identifier,
        schema: Schema,
        location: str | None,
        partition_spec: PartitionSpec,
        sort_order: SortOrder,
        properties: Properties,
        /,
    ) -> Table:
        """The table as it would be made; nothing is stored."""

    def load_table(self, identifier: Identifier, /) -> Table:
        """The table as it is now."""

    def table_exists(self, identifier: Identifier, /) -> bool:
        """Whether there is such a table."""

    def register_table(self, identifier: Identifier, metadata_location: str, overwrite: bool, /) -> Table:
        """Take up a table from its metadata file."""

    def rename_table(self, from_identifier: Identifier, to_identifier: Identifier, /) -> Table:
        """Give a table another name."""

    def drop_table(self, identifier: Identifier, /) -> None:
        """Remove a table."""

    def purge_table(self, identifier: Identifier, /) -> None:
        """Remove a table and its files."""

    def commit(
        self, identifier: Identifier, requirements: Sequence[TableRequirement], updates: Sequence[TableUpdate], /
    ) -> CommitTableResponse:
        """Change a table, or make one that was staged, if the requirements hold."""

    def commit_all(self, changes: Sequence[Change], /) -> None:
        """Change several tables, all or none."""


@dataclass(frozen=True)
class Call:
    """One request, read whole."""

    path: Mapping[str, str]
    query: QueryParams
    body: bytes

    def document(self) -> dict[str, Any]:
        """The body, which has to be a JSON object of harmless values."""
        try:
            found = orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"it is no JSON ({error})", on="the request's body") from None
        if not isinstance(found, dict):
            raise InvalidInput("it has to be a JSON object", on="the request's body")
        _check_values(found)
        return found


@dataclass(frozen=True)
class Staged:
    """A table that is not made yet: it has metadata, and no file of them."""

    metadata: TableMetadata


#: What a handler gives back: a document, a table, the outcome of a commit, or nothing to tell.
Answer = dict[str, Any] | Table | Staged | CommitTableResponse | None
Handler = Callable[[Call], Answer]


class Routes:
    """The handlers, over one catalog. They run in threads, each for one request."""

    def __init__(self, catalog: ServedCatalog) -> None:
        self._catalog = catalog

    def served(self) -> list[tuple[str, str, Handler]]:
        """Every operation: its method, its path, and what does it."""
        namespace = "/namespaces/{namespace}"
        table = f"{namespace}/tables/{{table}}"
        return [
            ("GET", "/namespaces", self.list_namespaces),
            ("POST", "/namespaces", self.create_namespace),
            ("HEAD", namespace, self.namespace_exists),
            ("GET", namespace, self.load_namespace),
            ("DELETE", namespace, self.drop_namespace),
            ("POST", f"{namespace}/properties", self.update_namespace),
            ("GET", f"{namespace}/tables", self.list_tables),
            ("POST", f"{namespace}/tables", self.create_table),
            ("POST", f"{namespace}/register", self.register_table),
            ("HEAD", table, self.table_exists),
            ("GET", table, self.load_table),
            ("POST", table, self.commit),
            ("DELETE", table, self.drop_table),
            ("POST", f"{table}/metrics", self.drop_metrics),
            ("POST", "/tables/rename", self.rename_table),
            ("POST", "/transactions/commit", self.commit_all),
        ]

    def config(self, _call: Call) -> Answer:
        """What a client has to know first. There is one warehouse, so it does not matter which it asks for."""
        endpoints = [f"{method} /v1/{{prefix}}{path}" for method, path, _ in self.served()]
        return {"defaults": dict(self._catalog.told_io), "overrides": _OVERRIDES, "endpoints": endpoints}

    # --- namespaces ------------------------------------------------------------

    def list_namespaces(self, call: Call) -> Answer:
        """A page of the namespaces; there are none below another."""
        parent = call.query.get("parent")
        below = _legal_namespace(parent.split(SEPARATOR)) if parent else ()
        page, more = _page([SEPARATOR.join(each) for each in self._catalog.list_namespaces(below)], call.query)
        return {"namespaces": [each.split(SEPARATOR) for each in page], **more}

    def create_namespace(self, call: Call) -> Answer:
        """Make a namespace."""
        document = call.document()
        levels = _texts(document, "namespace")
        if len(levels) != 1:
            raise InvalidInput("a namespace has exactly one level", on="namespace")
        namespace = (check_name("namespace", levels[0]),)
        properties = _properties(document, "properties")
        self._catalog.create_namespace(namespace, properties)
        return {"namespace": list(namespace), "properties": properties}

    def load_namespace(self, call: Call) -> Answer:
        """A namespace and its properties."""
        namespace = _existing_namespace(call.path["namespace"])
        return {"namespace": list(namespace), "properties": dict(self._catalog.load_namespace_properties(namespace))}

    def namespace_exists(self, call: Call) -> Answer:
        """Whether there is such a namespace: by the status alone."""
        namespace = _existing_namespace(call.path["namespace"])
        if not self._catalog.namespace_exists(namespace):
            raise _no_namespace(namespace)
        return None

    def drop_namespace(self, call: Call) -> Answer:
        """Remove an empty namespace."""
        self._catalog.drop_namespace(_existing_namespace(call.path["namespace"]))
        return None

    def update_namespace(self, call: Call) -> Answer:
        """Set and remove properties of a namespace."""
        namespace = _existing_namespace(call.path["namespace"])
        document = call.document()
        removals = set(_texts(document, "removals")) if document.get("removals") is not None else set()
        updates = _properties(document, "updates")
        if both := removals & updates.keys():
            raise HTTPException(422, f"both to be set and to be removed: {', '.join(map(shown, sorted(both)))}")
        done = self._catalog.update_namespace_properties(namespace, removals, updates)
        return {"updated": sorted(done.updated), "removed": sorted(done.removed), "missing": sorted(done.missing)}

    # --- tables ----------------------------------------------------------------

    def list_tables(self, call: Call) -> Answer:
        """A page of the tables of a namespace."""
        namespace = _existing_namespace(call.path["namespace"])
        page, more = _page([each[-1] for each in self._catalog.list_tables(namespace)], call.query)
        return {"identifiers": [{"namespace": list(namespace), "name": name} for name in page], **more}

    def create_table(self, call: Call) -> Answer:
        """Make a table, or show what it would be if it is only staged."""
        namespace = _existing_namespace(call.path["namespace"])
        document = {"location": None, "partition-spec": None, "write-order": None} | call.document()
        if document.get("properties") is None:
            document.pop("properties", None)
        _number_partition_fields(document["partition-spec"])
        request = _parsed(CreateTableRequest.model_validate, document)
        create = self._catalog.stage_table if request.stage_create else self._catalog.create_table
        table = create(
            (*namespace, check_name("table", request.name)),
            request.table_schema,
            request.location,
            UNPARTITIONED_PARTITION_SPEC if request.partition_spec is None else request.partition_spec,
            UNSORTED_SORT_ORDER if request.write_order is None else request.write_order,
            request.properties,
        )
        return Staged(table.metadata) if request.stage_create else table

    def register_table(self, call: Call) -> Answer:
        """Take up a table from its metadata file."""
        namespace = _existing_namespace(call.path["namespace"])
        document = call.document()
        name = check_name("table", _text(document, "name"))
        location = _text(document, "metadata-location")
        overwrite = document.get("overwrite") or False
        if not isinstance(overwrite, bool):
            raise InvalidInput("it has to be true or false", on="overwrite")
        try:
            return self._catalog.register_table((*namespace, name), location, overwrite)
        except FileNotFoundError:
            raise InvalidInput(f"there is no file {shown(location)}", on="metadata-location") from None

    def load_table(self, call: Call) -> Answer:
        """A table as it is now, with all of its snapshots, whichever were asked for."""
        if call.query.get("snapshots", "all") not in ("all", "refs"):
            raise InvalidInput("it has to be all or refs", on="snapshots")
        return _of_existing(self._catalog.load_table, _existing_table(call))

    def table_exists(self, call: Call) -> Answer:
        """Whether there is such a table: by the status alone."""
        identifier = _existing_table(call)
        if not _of_existing(self._catalog.table_exists, identifier):
            raise _no_table(identifier)
        return None

    def drop_table(self, call: Call) -> Answer:
        """Remove a table, and its files if that is asked for."""
        purge = call.query.get("purgeRequested", "false").lower()
        if purge not in ("true", "false"):
            raise InvalidInput("it has to be true or false", on="purgeRequested")
        drop = self._catalog.purge_table if purge == "true" else self._catalog.drop_table
        _of_existing(drop, _existing_table(call))
        return None

    def rename_table(self, call: Call) -> Answer:
        """Give a table another name, maybe in another namespace."""
        document = call.document()
        source = _legal_table(*_names(document, "source"))
        levels, name = _names(document, "destination")
        self._catalog.rename_table(source, (*_legal_namespace(levels), check_name("table", name)))
        return None

    def drop_metrics(self, _call: Call) -> Answer:
        """Take a client's report of its scan or commit, and keep nothing of it."""
        return None

    # --- commits ---------------------------------------------------------------

    def commit(self, call: Call) -> Answer:
        """Change a table, or make one that was staged."""
        levels, name = _levels(call.path["namespace"]), _decoded(call.path["table"])
        document = call.document()
        if document.get("identifier") is not None and _names(document, "identifier") != (levels, name):
            raise InvalidInput("the body names another table than the path", on="identifier")
        return self._catalog.commit(*_change(document, levels, name))

    def commit_all(self, call: Call) -> Answer:
        """Change several tables, all or none."""
        entries = call.document().get("table-changes")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise InvalidInput("it has to be a list of changes", on="table-changes")
        changes = [_change(entry, *_names(entry, "identifier")) for entry in entries]
        if len({identifier for identifier, _, _ in changes}) < len(changes):
            raise InvalidInput("a table may stand there once", on="table-changes")
        self._catalog.commit_all(changes)
        return None


class RestApp:
    """The catalog as an ASGI application, for those who have the token."""

    def __init__(self, catalog: ServedCatalog, token: str) -> None:
        self._token = token.encode()
        routes = Routes(catalog)
        committing = (routes.commit, routes.commit_all)
        served = [
            _route(method, f"/v1{path}", handler, committing=handler in committing)
            for method, path, handler in routes.served()
        ]
        self._app = Starlette(
            routes=[
                _route("GET", "/v1/config", routes.config),
                *served,
                *(Route(path, _unsupported, methods=["GET", "HEAD", "POST", "DELETE"]) for path in _UNSUPPORTED),
            ],
            exception_handlers={HTTPException: _refused, Exception: _failed},
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        app: ASGIApp = self._app
        if not self._admits(scope):
            failure = Failure(401, "NotAuthorizedException", "a valid token is needed: Authorization: Bearer <token>")
            app = failure.response({"WWW-Authenticate": "Bearer"})
        # An escaped slash is part of a name, so the path is taken apart before it is decoded.
        await app({**scope, "path": scope["raw_path"].decode("latin-1")}, receive, send)

    def _admits(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        return hmac.compare_digest(token.strip(), self._token) and scheme.lower() == b"bearer"


# --- from a request to an answer -----------------------------------------------


# What the specification has and this server has not.
_UNSUPPORTED = (
    "/v1/oauth/tokens",
    "/v1/namespaces/{namespace}/views",
    "/v1/namespaces/{namespace}/views/{view}",
    "/v1/namespaces/{namespace}/register-view",
    "/v1/views/rename",
    "/v1/namespaces/{namespace}/tables/{table}/credentials",
    "/v1/namespaces/{namespace}/tables/{table}/plan",
    "/v1/namespaces/{namespace}/tables/{table}/plan/{plan}",
    "/v1/namespaces/{namespace}/tables/{table}/tasks",
)


async def _unsupported(_request: Request) -> Response:
    raise HTTPException(406, "this server does not support the operation")


def _route(method: str, path: str, handler: Handler, *, committing: bool = False) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            body = await _body(request)
        except ClientDisconnect:
            return Response(status_code=400)  # Nobody is there to read it.
        call = Call(request.path_params, request.query_params, body)
        return await run_in_threadpool(_answer, handler, call, f"{method} {path}", committing)

    return Route(path, endpoint, methods=[method])


async def _body(request: Request) -> bytes:
    """The body, if it is not too large, whether its length is told or not."""
    too_large = HTTPException(413, f"a body may have at most {MAX_BODY} bytes")
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told) > MAX_BODY:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise too_large
    return bytes(body)


def _answer(handler: Handler, call: Call, what: str, committing: bool) -> Response:
    """Do it, and tell the client what came of it."""
    try:
        answer = handler(call)
    except Exception as error:  # noqa: BLE001 - whatever a catalog raises has to become an answer
        failure = failure_of(error, committing=committing)
        if failure.status >= 500:
            LOG.error("%s failed with status %s", what, failure.status, exc_info=error)
        return failure.response()
    try:
        return _rendered(answer)
    except Exception as error:  # noqa: BLE001 - it is done by now, so nothing may say that the request was bad
        LOG.error("the answer to %s cannot be told", what, exc_info=error)
        return UNEXPECTED.response()


def _rendered(answer: Answer) -> Response:
    if answer is None:
        return Response(status_code=204)
    if isinstance(answer, dict):
        return Response(orjson.dumps(answer), media_type="application/json")
    told: dict[str, Any] = {} if isinstance(answer, Staged) else {"metadata-location": answer.metadata_location}
    told["metadata"] = orjson.Fragment(answer.metadata.model_dump_json())
    if not isinstance(answer, CommitTableResponse):
        told["config"] = {}
    return Response(orjson.dumps(told), media_type="application/json")


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return failure_of(error).response(error.headers)


async def _failed(_request: Request, _error: Exception) -> Response:
    return UNEXPECTED.response()


# --- names ---------------------------------------------------------------------


def _decoded(part: str) -> str:
    """A part of a path as it was meant. What is no UTF-8 becomes a text that names nothing."""
    return unquote_to_bytes(part.encode("latin-1")).decode("utf-8", "replace")


def _levels(namespace: str) -> list[str]:
    return _decoded(namespace).split(SEPARATOR)


def _existing_namespace(part: str) -> Identifier:
    """A namespace that is asked for: one that cannot be is not found."""
    return _legal_namespace(_levels(part))


def _legal_namespace(levels: list[str]) -> Identifier:
    if len(levels) != 1 or not _is_name(levels[0]):
        raise _no_namespace(levels)
    return (levels[0],)


def _existing_table(call: Call) -> Identifier:
    """A table that is asked for: one that cannot be is not found.

    Clients rely on it: they ask for `namespace.table.files` as a table of its own first, and
    look for the metadata of `namespace.table` only when they hear that there is none.
    """
    return _legal_table(_levels(call.path["namespace"]), _decoded(call.path["table"]))


def _legal_table(levels: list[str], name: str) -> Identifier:
    if len(levels) != 1 or not _is_name(levels[0]) or not _is_name(name):
        raise _no_table((*levels, name))
    return levels[0], name


def _is_name(name: str) -> bool:
    try:
        check_name("object", name)
    except InvalidName:
        return False
    return True


def _no_namespace(levels: Sequence[str]) -> NoSuchNamespaceError:
    return NoSuchNamespaceError(f"there is no namespace {shown('.'.join(levels))}")


def _no_table(identifier: Sequence[str]) -> NoSuchTableError:
    return NoSuchTableError(f"there is no table {shown('.'.join(identifier))}")


def _of_existing(act: Callable[[Identifier], T], identifier: Identifier) -> T:
    """Where there is no namespace there is no table either, and it is the table that was asked for."""
    try:
        return act(identifier)
    except (NoSuchNamespaceError, NamespaceNotFound) as error:
        raise _no_table(identifier) from error


# --- what a body says ----------------------------------------------------------


def _check_values(document: object) -> None:
    """Refuse what could hurt further in: numbers and texts no database has, and endless nesting."""
    level: list[object] = [document]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value)
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, str):
                if "\0" in value:
                    raise InvalidInput("a text has a NUL character", on="the request's body")
            elif isinstance(value, int | float) and not -MAX_INTEGER <= value < MAX_INTEGER:
                raise InvalidInput("a number has more than 64 bits", on="the request's body")
        if not below:
            return
        level = below
    raise InvalidInput("its values are nested too deeply", on="the request's body")


def _parsed(parse: Callable[[Any], T], document: Any) -> T:
    """Have PyIceberg read a document. Whatever it raises, the document is to blame."""
    try:
        return parse(document)
    except MalformedModel as error:
        raise InvalidInput(malformed(error)) from None
    except Exception as error:
        raise InvalidInput(f"it cannot be understood ({shown(str(error))})", on="the request's body") from error


def _text(document: dict[str, Any], key: str) -> str:
    found = document.get(key)
    if not isinstance(found, str):
        raise InvalidInput("it has to be a text", on=key)
    return found


def _texts(document: dict[str, Any], key: str) -> list[str]:
    found = document.get(key)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise InvalidInput("it has to be a list of texts", on=key)
    return found


def _properties(document: dict[str, Any], key: str) -> dict[str, str]:
    found = document.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise InvalidInput("it has to be an object of texts", on=key)
    return found


def _names(document: dict[str, Any], key: str) -> tuple[list[str], str]:
    """The levels and the name of an identifier."""
    found = document.get(key)
    if not isinstance(found, dict):
        raise InvalidInput("it has to be an object with a namespace and a name", on=key)
    return _texts(found, "namespace"), _text(found, "name")


def _number_partition_fields(spec: object) -> None:
    # Their ids may be left out where a table is made; it gets new ones anyway.
    fields = spec.get("fields") if isinstance(spec, dict) else None
    for number, field in enumerate(fields if isinstance(fields, list) else []):
        if isinstance(field, dict):
            field.setdefault("field-id", PARTITION_FIELD_ID_START + number)


def _change(document: dict[str, Any], levels: list[str], name: str) -> Change:
    """One table's part in a commit."""
    asked = {key: document[key] for key in ("requirements", "updates") if document.get(key) is not None}
    identifier = {"namespace": levels, "name": name}
    request = _parsed(CommitTableRequest.model_validate, {"identifier": identifier, **asked})
    if any(isinstance(requirement, AssertCreate) for requirement in request.requirements):
        table = (*_legal_namespace(levels), check_name("table", name))
    else:
        table = _legal_table(levels, name)
    return table, request.requirements, request.updates


# --- pages ---------------------------------------------------------------------


def _page(names: list[str], query: QueryParams) -> tuple[list[str], dict[str, str]]:
    """The names that were asked for, in order, and where the rest begins.

    Who asks for no page gets all of them. A token holds the last name before the rest, so what
    comes and goes meanwhile moves nothing.
    """
    names = sorted(names)
    token, size = query.get("pageToken"), query.get("pageSize")
    if token is None and size is None:
        return names, {}
    limit = PAGE_SIZE
    if size is not None:
        if not (size.isascii() and size.isdecimal() and len(size) <= 18 and int(size) > 0):
            raise InvalidPage(f"{shown(size)} is not a page size", on="pageSize", remedy="Use a number above zero")
        limit = min(int(size), MAX_PAGE_SIZE)
    if token:
        after = _opened(token)
        names = [name for name in names if name > after]
    page = names[:limit]
    return page, {"next-page-token": _sealed(page[-1])} if len(names) > limit else {}


def _sealed(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _opened(token: str) -> str:
    try:
        return base64.b64decode(token.encode("ascii"), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidPage(f"{shown(token)} is not a page token", on="pageToken") from None
