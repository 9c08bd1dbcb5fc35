"""A warehouse in a bucket of S3, or of a store that is spoken to in the same way.

obstore reads, lists and stores what goes in one request: it is quick, and it can create an object only where none is.
It knows nothing of uploads in parts that were left unfinished, nor what of a batch could not be deleted, nor the
profiles of AWS: these go through boto3.
"""

from __future__ import annotations

import builtins
import logging
import os
import random
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cache
from itertools import islice
from threading import Lock
from typing import Any, BinaryIO, TypeVar, cast

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from lakebook import failpoints
from lakebook.config import redact, split_url
from lakebook.errors import (
    InvalidSetting,
    LakebookError,
    ObjectExists,
    ObjectNotFound,
    StorageRefused,
    StorageUnavailable,
)
from lakebook.storage.access import S3Access, check_header
from lakebook.storage.answers import Failures, Measured, ObjectInfo, Sink, reason_of, refused, typed, unavailable
from lakebook.storage.bucket import DELETED_AT_ONCE, Bucket

try:
    from botocore.config import Config
    from botocore.credentials import Credentials
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
    from botocore.loaders import Loader, create_loader
    from botocore.parsers import ResponseParserError
    from botocore.session import Session, get_session
    from botocore.utils import is_valid_endpoint_url, validate_region_name
    from obstore.auth.boto3 import Boto3CredentialProvider
except ModuleNotFoundError:
    raise InvalidSetting(
        "a warehouse in a bucket needs boto3", on="warehouse", remedy="Install it with `pip install 'lakebook[s3]'`"
    ) from None

PART = 16 << 20
_PARTS_AT_ONCE = 4
_ATTEMPTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
# What a write calls itself, so that it is known again when its answer was lost.
_WRITE = "lakebook-write"
_ETAG = "etag"
# Checksums of a whole object that a store may keep beside its etag, the best first. A CRC of 32 bits is no better than
# an etag, and what is made of the checksums of parts is none of the bytes.
_SUMS = ("SHA256", "CRC64NVME", "SHA1")

_ABSENT = frozenset({"NoSuchKey", "NoSuchBucket", "NoSuchUpload", "404", "NotFound"})
_THERE = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict"})
_THROTTLED = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout"})

# Headers by which a request is signed, as boto3 logs them where somebody debugs.
_SIGNED = re.compile(r"(?i)((?:x-amz-security-token|authorization)['\"]?:\s*b?['\"]?)[^'\"\n]+")

# What boto3 takes for the name of one. obstore takes anything, and panics when it is to be sent.
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")

_Result = TypeVar("_Result")

# The process in which the threads of obstore run. A child that is forked has none, and would wait for them for ever.
_process: int | None = None


class _WithoutSecrets(logging.Filter):
    """What boto3 says about its requests, without the keys and tokens in them."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = _SIGNED.sub(r"\1***", record.getMessage()), ()
        return True


for _speaker in ("botocore.auth", "botocore.endpoint"):
    logging.getLogger(_speaker).addFilter(_WithoutSecrets())


class S3Bucket(Bucket):
    """The objects of a bucket below a prefix. What was stored is durable."""

    def __init__(self, root: str, access: S3Access) -> None:
        head = redact(root)
        place = split_url(root, head)
        self._bucket, self._prefix = place.netloc, place.path.strip("/")
        # What is read out of it has to be all of it: engines take the whole text for the name.
        read = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        if not _BUCKET.fullmatch(self._bucket) or read != root.rstrip("/"):
            raise InvalidSetting("it names no bucket", on=head, remedy="Write s3://bucket/prefix")
        found = access.resolved()
        session = _session(found, head)
        self._access = found.with_region(None)
        try:
            # What botocore would say of them when it is first needed.
            validate_region_name(self._access.region)
            if self._access.endpoint and not is_valid_endpoint_url(self._access.endpoint):
                raise ValueError("its endpoint is no address")
            super().__init__(root, self._obstore(session, retried=True))
            # A create that is tried again meets its own object if only the answer was lost: see `put_new`.
            self._creating = self._obstore(session, retried=False)
        except (BaseError, BotoCoreError, ValueError, TypeError, OverflowError) as error:
            raise InvalidSetting(f"it cannot be used ({reason_of(error)})", on=head) from None
        self._session, self._made, self._making = session, None, Lock()

    @property
    def _client(self) -> Any:
        # To make it takes a tenth of a second, which those who only read and store small objects need not wait for.
        with self._making:
            if self._made is None:
                self._made = self._boto3(self._session)
            return self._made

    def _check_process(self) -> None:
        global _process
        if _process is None:
            _process = os.getpid()
        if _process != os.getpid():
            raise StorageRefused(
                "this process was forked from one that had used a bucket, and the threads that speak to it were not",
                on=self.shown_root,
                remedy="Start processes by spawn or forkserver, or fork before the first use of a bucket",
            )

    def _obstore(self, session: Session, *, retried: bool) -> Any:
        access = self._access
        given: dict[str, Any] = {"region": access.region, "virtual_hosted_style_request": access.path_style == "no"}
        if access.endpoint:
            given["endpoint"] = access.endpoint if access.path_style == "yes" else self._own_endpoint()
        if access.has_credentials:
            given |= {"access_key_id": access.access_key_id, "secret_access_key": access.secret_access_key}
            if access.session_token:
                given["session_token"] = access.session_token
        else:
            given["credential_provider"] = Boto3CredentialProvider(session)
        return S3Store(
            self._bucket,
            prefix=self._prefix or None,
            client_options={
                "allow_http": access.endpoint.startswith("http://"),
                "timeout": timedelta(seconds=access.request_seconds),
            },
            retry_config={
                "max_retries": _ATTEMPTS if retried else 0,
                "retry_timeout": timedelta(seconds=access.retry_seconds),
                "backoff": {
                    "init_backoff": timedelta(seconds=_FIRST_PAUSE),
                    "max_backoff": timedelta(seconds=_LONGEST_PAUSE),
                    "base": 2,
                },
            },
            **given,
        )

    def _own_endpoint(self) -> str:
        scheme, _, host = self._access.endpoint.partition("://")
        return f"{scheme}://{self._bucket}.{host}"

    def _boto3(self, session: Session) -> Any:
        access = self._access
        return session.create_client(
            "s3",
            endpoint_url=access.endpoint or None,
            region_name=access.region,
            config=Config(
                # It would pause for longer than the settings allow: `_call` tries again.
                retries={"mode": "standard", "total_max_attempts": 1},
                connect_timeout=min(10.0, access.request_seconds),
                read_timeout=access.request_seconds,
                max_pool_connections=2 * _PARTS_AT_ONCE,
                s3={"addressing_style": "path" if access.path_style == "yes" else "virtual"},
                # Stores that are not AWS's often do not know the newer checksums.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def _path(self, key: str) -> str:
        return key[len(self._prefix) + 1 :] if self._prefix else key

    # --- writing ---------------------------------------------------------------

    def put_new(self, path: str, data: bytes, _durable: bool) -> None:
        on, write = self._on(path), uuid.uuid4().hex

        self._check_process()

        def put() -> None:
            with typed(on):
                obstore.put(self._creating, path, data, mode="create", attributes={_WRITE: write}, use_multipart=False)

        for attempt, wait in enumerate(self._pauses()):
            try:
                return put()
            except ObjectExists:
                # It may be the attempt before this one whose answer did not come.
                if attempt and self._is_write(path, write):
                    return None
                raise
            except StorageUnavailable:
                if wait is None:
                    # Only the answer may have been lost, also this time.
                    with suppress(StorageUnavailable):
                        if self._is_write(path, write):
                            return None
                    raise
                time.sleep(wait)
        return None

    def _pauses(self) -> Iterator[float | None]:
        """How long to wait after each attempt; none: that was the last one."""
        until = time.monotonic() + self._access.retry_seconds
        for attempt in range(_ATTEMPTS):
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt) * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
            over = attempt + 1 == _ATTEMPTS or time.monotonic() + pause > until
            yield None if over else pause
            if over:
                return

    def _is_write(self, path: str, write: str) -> bool:
        with suppress(ObjectNotFound):
            head = self._call(path, lambda: self._client.head_object(Bucket=self._bucket, Key=self._key(path)))
            return bool(head.get("Metadata", {}).get(_WRITE) == write)
        return False

    @contextmanager
    def create(self, path: str, durable: bool) -> Iterator[BinaryIO]:
        upload = _Upload(self, path)
        try:
            with Sink(cast("BinaryIO", upload), self._on(path)) as sink:
                yield cast("BinaryIO", sink)
            failpoints.reach("upload.finishing")
            upload.finish(durable)
        except BaseException:
            upload.abandon()
            raise

    def begin_upload(self, path: str, write: str) -> tuple[str, bool]:
        """Begin to upload an object in parts; whether another upload may have been begun, whose answer was lost."""
        tried = 0

        def begin() -> Any:
            nonlocal tried
            tried += 1
            return self._client.create_multipart_upload(
                Bucket=self._bucket, Key=self._key(path), Metadata={_WRITE: write}
            )

        return str(self._call(path, begin)["UploadId"]), tried > 1

    def upload_part(self, path: str, upload: str, number: int, data: bytes) -> dict[str, Any]:
        """Upload one part, and what tells it when all are put together."""

        def store() -> str:
            stored = self._client.upload_part(
                Bucket=self._bucket, Key=self._key(path), UploadId=upload, PartNumber=number, Body=data
            )
            if "ETag" not in stored:
                raise OSError("the answer was cut short")
            return str(stored["ETag"])

        return {"PartNumber": number, "ETag": self._call(path, store)}

    def finish_upload(self, path: str, upload: str, parts: Sequence[dict[str, Any]], write: str) -> None:
        """Put the parts together, if there is no object yet."""
        try:
            self._call(
                path,
                lambda: self._client.complete_multipart_upload(
                    Bucket=self._bucket,
                    Key=self._key(path),
                    UploadId=upload,
                    MultipartUpload={"Parts": list(parts)},
                    IfNoneMatch="*",
                ),
            )
        except (ObjectExists, ObjectNotFound, StorageUnavailable):
            # The answer to an attempt that went well may have been lost.
            if not self._is_write(path, write):
                raise

    def abandon_upload(self, path: str, upload: str) -> None:
        """End an upload, and have its parts deleted; one that is gone is fine."""
        with suppress(ObjectNotFound):
            self._call(
                path,
                lambda: self._client.abort_multipart_upload(Bucket=self._bucket, Key=self._key(path), UploadId=upload),
            )

    def end_uploads(self, prefix: str, before: datetime | None, of: Callable[[str], bool] | None = None) -> int:
        below = f"{self._key(prefix)}/" if prefix else f"{self._prefix}/" if self._prefix else ""
        ended = 0
        for found in self._uploads(prefix, below):
            path = self._path(found["Key"])
            if (before is None or found["Initiated"] < before) and (of is None or of(path)):
                self.abandon_upload(path, found["UploadId"])
                ended += 1
        return ended

    def end_uploads_of(self, path: str) -> None:
        """End every upload of one object; a path is written by one alone."""
        key = self._key(path)
        for found in self._uploads(path, key):
            if found["Key"] == key:
                self.abandon_upload(path, found["UploadId"])

    def _uploads(self, path: str, below: str) -> builtins.list[Any]:
        """What was begun and not finished, by what its keys begin with."""
        uploads: builtins.list[Any] = []
        marker: dict[str, str] = {}
        while True:
            page = self._call(
                path,
                lambda: self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=below, **marker),  # noqa: B023 - called at once
            )
            uploads += page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return uploads
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    # --- reading ---------------------------------------------------------------

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        # A page that is cut short obstore does not ask for again. Keys come in order: it goes on behind the last one.
        last: str | None = None
        pauses = self._pauses()
        while True:
            try:
                for found in self._listed(prefix, last):
                    last, pauses = found.path, self._pauses()
                    yield found
                return
            except StorageUnavailable:
                # Of a listing obstore tells every failure alike.
                self._call(
                    prefix,
                    lambda: self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._key(prefix), MaxKeys=1),
                )
                wait = next(pauses)
                if wait is None:
                    raise
                time.sleep(wait)

    def measure(self, path: str, like: str = "") -> Measured:
        size, mark = self._marked(path, like)
        return super().measure(path) if mark is None else Measured(path, size, mark)

    def mark(self, path: str, like: str = "") -> str | None:
        return self._marked(path, like)[1]

    def _marked(self, path: str, like: str) -> tuple[int, str | None]:
        kind = like.partition(":")[0]
        size, marks = self._marks(path)
        if kind and kind not in marks:
            # The head may have been cut short behind its length.
            size, marks = self._marks(path)
        return size, marks.get(kind, next(iter(marks.values()), None))

    def _marks(self, path: str) -> tuple[int, dict[str, str]]:
        """The size of an object, and what it is known by, by the kind of that, the best first."""
        # Not by obstore, which does not ask for checksums.
        self._check_process()
        head = self._call(
            path,
            lambda: self._client.head_object(Bucket=self._bucket, Key=self._key(path), ChecksumMode="ENABLED"),
        )
        return head["ContentLength"], _marks_of(head)

    # --- deleting --------------------------------------------------------------

    def delete(self, paths: Iterable[str], failures: Failures) -> None:
        rest = iter(paths)
        while batch := list(islice(rest, DELETED_AT_ONCE)):
            self._delete_keys([self._key(path) for path in batch], failures)

    def _delete_keys(self, keys: Sequence[str], failures: Failures) -> None:
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        try:
            answer = self._call(
                self._path(keys[0]), lambda: self._client.delete_objects(Bucket=self._bucket, Delete=wanted)
            )
        except LakebookError as error:
            failures.extend((self._path(key), error) for key in keys)
            return
        for kept in answer.get("Errors", ()):
            if kept.get("Code") not in _ABSENT:
                on = self._on(self._path(kept["Key"]))
                failures.append(
                    (self._path(kept["Key"]), _by_code(kept.get("Code", ""), 0, kept.get("Message", ""), on))
                )

    def delete_folder(self, prefix: str) -> int:
        # Not by obstore's listing: it does not show the empty objects by which Hadoop marks a folder.
        failures: Failures = []
        count = 0
        for keys in self._keys_below(f"{self._key(prefix)}/", prefix):
            self._delete_keys(keys, failures)
            count += sum(not key.endswith("/") for key in keys)
        for _, error in failures:
            raise error
        # What an executor was still storing when it died.
        self.end_uploads(prefix, None)
        return count

    def _keys_below(self, below: str, path: str) -> Iterator[builtins.list[str]]:
        marker: dict[str, str] = {}
        while True:
            page = self._call(
                path,
                lambda: self._client.list_objects_v2(Bucket=self._bucket, Prefix=below, **marker),  # noqa: B023 - called at once
            )
            if keys := [found["Key"] for found in page.get("Contents", ())]:
                yield keys
            if not page.get("IsTruncated"):
                return
            marker = {"ContinuationToken": page["NextContinuationToken"]}

    def _call(self, path: str, request: Callable[[], _Result]) -> _Result:
        """What boto3 gets for a request, which is made again while it fails in a way that may pass."""
        for wait in self._pauses():
            try:
                return self._ask(path, request)
            except StorageUnavailable:
                if wait is None:
                    raise
                time.sleep(wait)
        raise AssertionError("the last attempt has returned or raised")

    def _ask(self, path: str, request: Callable[[], _Result]) -> _Result:
        on = self._on(path)
        try:
            return _whole(request())
        except ClientError as error:
            told = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise _by_code(told.get("Code", ""), status, told.get("Message", ""), on) from None
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise refused(error, on) from None
        except (BotoCoreError, ResponseParserError, OSError) as error:
            raise unavailable(error, on) from None


@cache
def _descriptions(folders: str | None) -> Loader:
    """What AWS's services are like, read from files once for all sessions: it is megabytes of JSON."""
    return create_loader(folders)


def _session(access: S3Access, on: str) -> Session:
    session = get_session()
    try:
        # A profile that is named has to be there, also where nobody needs it: to ask for this looks at it.
        session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
        if access.has_credentials:
            session.set_credentials(access.access_key_id, access.secret_access_key, access.session_token or None)
        found = session.get_credentials()
    except BotoCoreError as error:
        raise InvalidSetting(f"no credentials can be had ({reason_of(error)})", on=on) from None
    if found is None:
        raise InvalidSetting(
            "there are no credentials for it",
            on=on,
            remedy="Set s3_access_key_id and s3_secret_access_key, or what AWS looks at: AWS_ACCESS_KEY_ID, a profile",
        )
    if type(found) is Credentials:
        # Others are fetched when they are needed, by whoever gives them out.
        check_header(f"{found.access_key}{found.token or ''}", f"credentials of {on}")
    return session


def _whole(answer: _Result) -> _Result:
    """An answer whose head was not cut short: what reads it for boto3 takes it for one without a body."""
    if isinstance(answer, dict) and "ResponseMetadata" in answer:
        told = answer["ResponseMetadata"]
        headers = told.get("HTTPHeaders", {})
        if told.get("HTTPStatusCode") != 204 and not {"content-length", "transfer-encoding"} & headers.keys():
            raise OSError("the answer was cut short")
    return answer


def _marks_of(head: Mapping[str, Any]) -> dict[str, str]:
    """What the answer about an object says that it is known by."""
    sums = {kind.lower(): head.get(f"Checksum{kind}") for kind in _SUMS if head.get("ChecksumType") != "COMPOSITE"}
    # Of a store that does not tell the type: behind the dash stands the number of parts.
    marks = {kind: f"{kind}:{value}" for kind, value in sums.items() if value and "-" not in value}
    if tag := head.get("ETag", "").strip('"'):
        marks[_ETAG] = f"{_ETAG}:{tag}"
    return marks


def _by_code(code: str, status: int, message: str, on: str) -> LakebookError:
    """What the store has answered, as an error of Lakebook."""
    if code in _ABSENT or (status == 404 and not code):
        return ObjectNotFound("there is no such object", on=on)
    if code in _THERE:
        return ObjectExists("the object is there already", on=on, remedy="Write to a new path")
    told = OSError(f"{code or status}: {message.strip()}" if message else str(code or status))
    if code in _THROTTLED or status == 429 or status >= 500 or code in ("InternalError", "ServiceUnavailable"):
        return unavailable(told, on)
    found: StorageRefused = refused(told, on)
    return found


class _Upload:
    """An object on its way: in one request if it is small, else in parts while it is written."""

    def __init__(self, bucket: S3Bucket, path: str) -> None:
        self._bucket = bucket
        self._path = path
        self._write = uuid.uuid4().hex
        self._waiting = bytearray()
        self._upload: str | None = None
        # Whether an upload may have been begun that nobody knows the name of.
        self._doubtful = False
        self._pool: ThreadPoolExecutor | None = None
        self._sent: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, Any]] = []
        self._number = 0

    def write(self, data: Any) -> int:
        """Take some bytes; what fills a part is sent while the caller goes on."""
        with memoryview(data) as view:
            count = view.nbytes
            self._waiting += view.cast("B") if view.nbytes else b""
        while len(self._waiting) >= PART:
            self._send(bytes(self._waiting[:PART]))
            del self._waiting[:PART]
        return count

    def _send(self, data: bytes) -> None:
        if self._upload is None:
            try:
                self._upload, self._doubtful = self._bucket.begin_upload(self._path, self._write)
            except StorageUnavailable:
                self._doubtful = True
                raise
            self._pool = ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="lakebook-upload")
        while len(self._sent) >= _PARTS_AT_ONCE:
            self._parts.append(self._sent.popleft().result())
        self._number += 1
        assert self._pool is not None
        self._sent.append(self._pool.submit(self._bucket.upload_part, self._path, self._upload, self._number, data))

    def finish(self, durable: bool) -> None:
        """Have the object appear."""
        if self._upload is None:
            self._bucket.put_new(self._path, bytes(self._waiting), durable)
            return
        if self._waiting:
            self._send(bytes(self._waiting))
            self._waiting.clear()
        while self._sent:
            self._parts.append(self._sent.popleft().result())
        self._bucket.finish_upload(self._path, self._upload, self._parts, self._write)
        self._end_pool()
        self._end_unknown()

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._end_pool()
        if self._upload is not None:
            with suppress(LakebookError):
                self._bucket.abandon_upload(self._path, self._upload)
        self._end_unknown()

    def _end_unknown(self) -> None:
        if self._doubtful:
            # Else a sweep of the folder ends them.
            with suppress(LakebookError):
                self._bucket.end_uploads_of(self._path)

    def _end_pool(self) -> None:
        if self._pool is not None:
            # Parts that still arrive after the end of an upload would stay.
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
