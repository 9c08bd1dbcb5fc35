"""Lines of JSON files. Executors count them too, so nothing is loaded here that takes long to load."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

from lakebook.storage.answers import Measured
from lakebook.storage.objects import ObjectStore

_GZIP = ".gz"


def open_lines(store: ObjectStore, path: str) -> Iterator[bytes]:
    """The lines of a JSON file, whether it is compressed or not."""
    with store.open(path) as stream:
        source: Any = gzip.GzipFile(fileobj=stream) if path.endswith(_GZIP) else stream
        for line in source:
            if line.strip():
                yield line


def count_lines(store: ObjectStore, path: str) -> int:
    """How many rows a JSON file has."""
    return sum(1 for _ in open_lines(store, path))


def measured_lines(store: ObjectStore, path: str) -> tuple[Measured, int]:
    """Size and checksum of a JSON file, and how many rows it has."""
    (found,) = store.measure([path])
    return found, count_lines(store, path)
