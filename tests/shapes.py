"""The two shapes of a book: in a folder, and on PostgreSQL, a bucket and a cluster. The settings alone differ.

A home is a folder that is opened as a book. Of a scaled one, `lakebook.toml` says where its registry, its warehouse
and its Spark are. What many tests begin with is filled once and then copied, which is quicker.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from books import Postgres
from buckets import Buckets

EMBEDDED, SCALED = "embedded", "scaled"
CLUSTER = "local-cluster[2,1,1024]"

#: For tests of what only a book in a folder has: its files, and what becomes of them.
embedded = pytest.mark.parametrize("shape", [EMBEDDED], indirect=True)

Fill = Callable[[Path], None]


class Shape(Protocol):
    """Where books are."""

    name: str
    #: What reaches its warehouse from a home that does not say so.
    environment: dict[str, str]

    def empty(self, folder: Path) -> AbstractContextManager[Path]:
        """A home in which there is no book yet."""

    def filled(self, fill: Fill, folder: Path, *, stays: bool = False, **settings: Any) -> AbstractContextManager[Path]:
        """A home with what `fill` puts into one. Whatever the one before it has left is gone.

        A folder that is moved has its tables published anew: `stays` is for those who must not see that.
        """

    def lose(self, folder: Path) -> str:
        """Lose the registry of the book in a home; where its warehouse is."""

    def end(self) -> None:
        """Remove what the tests have left outside their folders."""


def _say(folder: Path, settings: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    (folder / "lakebook.toml").write_text("".join(lines), encoding="utf-8")


class Embedded:
    """Books in folders."""

    name = EMBEDDED

    def __init__(self, folder: Path) -> None:
        self.environment: dict[str, str] = {}
        self._folder = folder
        self._filled: dict[Fill, Path] = {}

    @contextmanager
    def empty(self, folder: Path) -> Iterator[Path]:
        yield folder

    @contextmanager
    def filled(self, fill: Fill, folder: Path, *, stays: bool = False, **settings: Any) -> Iterator[Path]:
        if stays or fill not in self._filled:
            filled = folder if stays else self._folder / f"{len(self._filled)}"
            _say(filled, settings)
            fill(filled)
            self._filled[fill] = filled
        if not stays:
            shutil.copytree(self._filled[fill], folder)
        yield folder

    def lose(self, folder: Path) -> str:
        for file in folder.glob("registry.db*"):
            file.unlink()
        return str(folder / "warehouse")

    def end(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True)
class _Filled:
    """A book that is copied, and what was in its bucket."""

    url: str
    settings: dict[str, Any]
    bucket: str
    objects: dict[str, bytes]
    #: What the store knows each object's bytes by.
    marks: dict[str, str]


class Scaled:
    """Books on PostgreSQL, in buckets, with Spark on a cluster."""

    name = SCALED

    def __init__(self, folder: Path, postgres: Postgres, buckets: Buckets) -> None:
        self._folder = folder
        self._postgres = postgres
        self._buckets = buckets
        self._filled: dict[Fill, _Filled] = {}
        self.environment = {f"LAKEBOOK_{name.upper()}": value for name, value in buckets.settings.items()}

    @contextmanager
    def empty(self, folder: Path) -> Iterator[Path]:
        with self._home(folder, self._postgres.new_database(with_book=False), self._buckets.new_bucket(), {}):
            yield folder

    @contextmanager
    def filled(self, fill: Fill, folder: Path, *, stays: bool = False, **settings: Any) -> Iterator[Path]:
        if fill not in self._filled:
            self._filled[fill] = self._fill(fill, settings)
        filled = self._filled[fill]
        # A registry knows its bucket: a copy of it has the same one, as it was.
        present = self._buckets.marks(filled.bucket)
        for key in present.keys() - filled.objects.keys():
            self._buckets.client.delete_object(Bucket=filled.bucket, Key=key)
        for key, data in filled.objects.items():
            if present.get(key) != filled.marks[key]:
                self._buckets.client.put_object(Bucket=filled.bucket, Key=key, Body=data)
        with self._home(folder, self._postgres.copy(filled.url), filled.bucket, filled.settings):
            yield folder

    @contextmanager
    def _home(self, folder: Path, url: str, bucket: str, settings: dict[str, Any]) -> Iterator[None]:
        self._settle(folder, url, bucket, settings)
        try:
            yield
        finally:
            self._postgres.drop(url)

    def _settle(self, folder: Path, url: str, bucket: str, settings: dict[str, Any]) -> None:
        registry = url.replace("postgresql://", "postgresql+psycopg://", 1)
        place = {"registry": registry, "warehouse": f"s3://{bucket}/lake", "spark_master": CLUSTER}
        _say(folder, {**place, **self._buckets.settings, **settings})

    def _fill(self, fill: Fill, settings: dict[str, Any]) -> _Filled:
        url, bucket = self._postgres.new_database(with_book=False), self._buckets.new_bucket()
        folder = self._folder / f"{len(self._filled)}"
        self._settle(folder, url, bucket, settings)
        fill(folder)
        marks = self._buckets.marks(bucket)
        objects = {key: self._buckets.read(bucket, key) for key in marks}
        return _Filled(url, settings, bucket, objects, marks)

    def lose(self, folder: Path) -> str:
        settings = tomllib.loads((folder / "lakebook.toml").read_text(encoding="utf-8"))
        self._postgres.empty(settings["registry"])
        return str(settings["warehouse"])

    def end(self) -> None:
        for filled in self._filled.values():
            self._postgres.drop(filled.url)
