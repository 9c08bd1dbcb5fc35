"""The warehouse's root: where it is, how a book records it, and whether it can be written."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, MemoryStore, from_url

from lakebook.config import redact
from lakebook.errors import InvalidSetting, WarehouseNotWritable

_PROBE = b"lakebook"


class Warehouse:
    """The root of a book's bytes: a folder, a bucket, or memory."""

    def __init__(self, root: str, beside: Path | None = None) -> None:
        """Name a warehouse; `beside` is the folder of the registry file, where there is one."""
        scheme = urlsplit(root).scheme if "://" in root else ""
        if scheme not in ("", "file", "memory", "s3"):
            raise InvalidSetting(
                f"{scheme}:// is not a place for a warehouse",
                on=redact(root),
                remedy="Use a folder, file://… or s3://bucket/prefix",
            )
        self.folder = None
        if scheme in ("", "file"):
            path = unquote(urlsplit(root).path) if scheme else root
            if not path or "\0" in path:
                raise InvalidSetting("it names no folder", on="warehouse")
            self.folder = Path(path).absolute()
        #: Where the bytes are, for whoever opens them.
        self.root = str(self.folder) if self.folder is not None else root.rstrip("/") if scheme == "s3" else root
        #: What the registry records as `s3_bucket`: inside the book's own folder it is relative,
        #: so that the folder can be moved as a whole.
        self.recorded = _recorded(self.folder, beside) if self.folder is not None else redact(self.root)

    def _store(self) -> Any:
        if self.folder is not None:
            return LocalStore(self.folder, mkdir=True)
        if self.root.startswith("memory"):
            return MemoryStore()
        return from_url(self.root)

    def check_writable(self) -> None:
        """Store a small object, read it back and remove it, or say why that cannot be done."""
        path = f".lakebook-probe-{uuid.uuid4().hex}"
        try:
            store = self._store()
            obstore.put(store, path, _PROBE, mode="create")
            try:
                found = bytes(obstore.get(store, path).bytes())
            finally:
                obstore.delete(store, path)
        except (BaseError, OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise WarehouseNotWritable(
                f"it cannot be written ({reason[:200]})",
                on=redact(self.root),
                remedy="Check that the place exists and that this user may write there",
            ) from None
        if found != _PROBE:
            raise WarehouseNotWritable("what was written does not come back", on=redact(self.root))


def _recorded(folder: Path, beside: Path | None) -> str:
    if beside is not None and folder != beside and folder.is_relative_to(beside):
        return folder.relative_to(beside).as_posix()
    return str(folder)
