"""The warehouse's root: where it is, how a book records it, and whether it can be written."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from lakebook.config import redact, split_url
from lakebook.errors import InvalidSetting, LakebookError, ObjectExists, WarehouseNotWritable
from lakebook.storage.access import S3Access

if TYPE_CHECKING:
    from lakebook.storage.bucket import Bucket

_PROBE = b"lakebook"
_PLACES = "Use a folder, file://… or s3://bucket/prefix"


class Warehouse:
    """The root of a book's bytes: a folder, a bucket, or memory."""

    def __init__(self, root: str, beside: Path | None = None, access: S3Access | None = None) -> None:
        """Name a warehouse; `beside` is the folder of the registry file, where there is one.

        `access` is how a bucket is reached; without it, as AWS's own tools would.
        """
        parts = split_url(root, redact(root), _PLACES) if "://" in root else None
        scheme = parts.scheme if parts is not None else ""
        if scheme not in ("", "file", "memory", "s3"):
            raise InvalidSetting(f"{scheme}:// is not a place for a warehouse", on=redact(root), remedy=_PLACES)
        if scheme in ("memory", "s3") and not root.startswith(f"{scheme}://"):
            # Engines go by how it begins, and so does all that is recorded.
            raise InvalidSetting(
                f"it is {scheme}:// in another spelling",
                on=redact(root),
                remedy=f"Write {scheme}:// in small letters, with nothing before it",
            )
        self.folder = None
        self.access = access or S3Access()
        if scheme in ("", "file"):
            path = unquote(parts.path) if parts is not None and scheme else root
            if not path or "\0" in path:
                raise InvalidSetting("it names no folder", on="warehouse")
            self.folder = Path(path).absolute()
        #: Where the bytes are, for whoever opens them.
        self.root = str(self.folder) if self.folder is not None else root.rstrip("/") if scheme == "s3" else root
        #: What the registry records as `s3_bucket`: inside the book's own folder it is relative,
        #: so that the folder can be moved as a whole.
        self.recorded = _recorded(self.folder, beside) if self.folder is not None else redact(self.root)

    def __repr__(self) -> str:
        return f"Warehouse({redact(self.root)!r})"

    @property
    def bucket(self) -> str | None:
        """The bucket in which it is, if it is in one."""
        return urlsplit(self.root).netloc if self.root.startswith("s3://") else None

    def _probe_bucket(self, name: str) -> bytes:
        from lakebook.storage.s3 import S3Bucket  # Only who has a bucket needs what it is reached with.

        place = S3Bucket(self.root, self.access)
        try:
            place.put_new(name, _PROBE, True)
            self._refuse_replacing(place, name)
            return place.read(name)
        finally:
            place.delete([name], [])

    def _refuse_replacing(self, place: Bucket, name: str) -> None:
        """Refuse a store that lets what is there be created again: of two who commit, both would believe they had."""
        try:
            place.put_new(name, _PROBE, True)
        except ObjectExists:
            return
        raise WarehouseNotWritable(
            "the store replaces an object that is to be created only where there is none",
            on=redact(self.root),
            remedy="Use a store that knows `If-None-Match: *` on PUT, and let no proxy before it drop that header",
        )

    def check_writable(self) -> None:
        """Store a small object, read it back and remove it, or say why that cannot be done.

        Of a bucket it is also tried whether the object can be created twice, which must not be.
        """
        name = f".lakebook-probe-{uuid.uuid4().hex}"
        try:
            if self.folder is not None:
                found = _probe_folder(self.folder, name)
            else:
                found = self._probe_bucket(name) if self.bucket is not None else _PROBE
        except (LakebookError, OSError, ValueError) as error:
            if isinstance(error, InvalidSetting | WarehouseNotWritable):
                raise
            told = error.what if isinstance(error, LakebookError) else str(error).strip()
            reason = told.splitlines()[0] if told else type(error).__name__
            raise WarehouseNotWritable(
                f"it cannot be written ({reason[:200]})",
                on=redact(self.root),
                remedy="Check that the place exists and that this user may write there",
            ) from None
        if found != _PROBE:
            raise WarehouseNotWritable("what was written does not come back", on=redact(self.root))


def _probe_folder(folder: Path, name: str) -> bytes:
    # Not through obstore: in a folder that takes no files, such as /proc, it tries for ever.
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    try:
        with file.open("xb") as probe:
            probe.write(_PROBE)
            probe.flush()
            os.fsync(probe.fileno())
        return file.read_bytes()
    finally:
        file.unlink(missing_ok=True)


def _recorded(folder: Path, beside: Path | None) -> str:
    if beside is not None and folder != beside and folder.is_relative_to(beside):
        return folder.relative_to(beside).as_posix()
    return str(folder)
