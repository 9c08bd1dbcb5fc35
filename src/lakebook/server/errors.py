"""How an error becomes an answer: a status, the name Iceberg's clients know it by, and a text.

A client decides by the status whether to repeat a commit, to clean up after it, or to leave it
alone. So 409 and 503 are only for what certainly changed nothing, and 500 says that nobody knows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

import orjson
from pydantic import ValidationError as MalformedModel
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchIdentifierError,
    NoSuchNamespaceError,
    NoSuchPropertyException,
    NoSuchTableError,
    NoSuchViewError,
    TableAlreadyExistsError,
    ValidationError,
    ValidationException,
)
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lakebook.errors import (
    CommitAborted,
    CommitOutcomeUnknown,
    FilesChanged,
    IncompatibleSchema,
    InvalidInput,
    NamespaceAlreadyExists,
    NamespaceNotEmpty,
    NamespaceNotFound,
    NotFound,
    PathInUse,
    RegistryBusy,
    RegistryUnavailable,
    SchemaChanged,
    StorageUnavailable,
    TableAlreadyExists,
    TableNotFound,
)

LOG = logging.getLogger("lakebook.server")
LOG.addHandler(logging.NullHandler())

MAX_MESSAGE = 2000

# What an address may carry that is nobody's business: a password, or a token among its parameters.
_SECRETS = re.compile(r"(?<=://)[^/\s@]+(?=@)|(?<=[?&])[^\s&)\]]+=[^\s&)\]]*")

# The first line that fits decides. What stands in no line is an error of the server's own.
_KNOWN: tuple[tuple[tuple[type[Exception], ...], int, str], ...] = (
    ((NoSuchTableError, NoSuchIdentifierError, TableNotFound), 404, "NoSuchTableException"),
    ((NoSuchNamespaceError, NamespaceNotFound), 404, "NoSuchNamespaceException"),
    ((NoSuchViewError,), 404, "NoSuchViewException"),
    ((NotFound,), 404, "NotFoundException"),
    (
        (TableAlreadyExistsError, NamespaceAlreadyExistsError, TableAlreadyExists, NamespaceAlreadyExists),
        409,
        "AlreadyExistsException",
    ),
    ((NamespaceNotEmptyError, NamespaceNotEmpty), 409, "NamespaceNotEmptyException"),
    ((CommitFailedException, CommitAborted, FilesChanged, SchemaChanged), 409, "CommitFailedException"),
    ((ValidationError, ValidationException, IncompatibleSchema), 400, "ValidationException"),
    ((InvalidInput, PathInUse, NoSuchPropertyException, ValueError), 400, "BadRequestException"),
    ((NotImplementedError,), 406, "UnsupportedOperationException"),
)
_OF_HTTP = {
    400: "BadRequestException",
    401: "NotAuthorizedException",
    404: "NotFoundException",
    405: "UnsupportedOperationException",
    406: "UnsupportedOperationException",
    413: "RequestTooLargeException",
    422: "UnprocessableEntityException",
}


@dataclass(frozen=True)
class Failure:
    """What a client is told of an error."""

    status: int
    kind: str
    message: str

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The answer in the form of Iceberg's specification."""
        error = {"message": self.message, "type": self.kind, "code": self.status}
        return Response(
            orjson.dumps({"error": error}),
            status_code=self.status,
            headers=None if headers is None else dict(headers),
            media_type="application/json",
        )


UNEXPECTED = Failure(500, "InternalServerError", "the server failed; its log says why")
UNKNOWN = Failure(
    500,
    "CommitStateUnknownException",
    "it is not known whether the change took effect; look before you repeat it",
)
BUSY = Failure(503, "ServiceUnavailableException", "nothing was changed, for the registry does not answer; try again")
NO_STORAGE = Failure(503, "ServiceUnavailableException", "the warehouse does not answer; try again")


def failure_of(error: Exception, *, committing: bool = False) -> Failure:
    """What to tell of an error; `committing` says that it came out of a commit of tables."""
    if isinstance(error, (CommitOutcomeUnknown, CommitStateUnknownException)):
        return UNKNOWN
    if isinstance(error, (RegistryBusy, RegistryUnavailable)):
        return BUSY
    if isinstance(error, StorageUnavailable):
        # A client may repeat what got a 503. Metadata are written after a commit too, so it could commit twice.
        return UNKNOWN if committing else NO_STORAGE
    if isinstance(error, HTTPException):
        return Failure(error.status_code, _OF_HTTP.get(error.status_code, "RESTException"), _shown(error.detail))
    if isinstance(error, MalformedModel):
        return Failure(400, "BadRequestException", _shown(malformed(error)))
    for kinds, status, kind in _KNOWN:
        if isinstance(error, kinds):
            return Failure(status, kind, _shown(str(error)) or kind)
    return UNEXPECTED


def malformed(error: MalformedModel) -> str:
    """What is wrong with a document, in a line: where, and why. For an unknown tag it names the known ones."""
    found = [
        f"{'.'.join(str(part) for part in each['loc']) or 'it'}: {each['msg']}"
        for each in error.errors(include_url=False, include_context=False, include_input=False)[:5]
    ]
    return "; ".join(found)


def _shown(text: str) -> str:
    """A text fit to leave the server: one line, of some length, without passwords."""
    line = _SECRETS.sub("***", " ".join(text.split()))
    line = line.encode("utf-8", "replace").decode()
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."
