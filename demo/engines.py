"""Where a demo keeps its book, and how DuckDB reads it: by the settings, whatever they say."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import duckdb
from duckdb_extensions import import_extension

from lakebook import Book


def place(folder: str) -> Path | None:
    """A book in the folder, unless LAKEBOOK_REGISTRY names one elsewhere."""
    return None if os.environ.get("LAKEBOOK_REGISTRY") else Path(folder) / "book"


def readable(connection: duckdb.DuckDBPyConnection, book: Book, location: str) -> str:
    """What DuckDB opens to read a table's metadata; it is told where the bucket is, if there is one."""
    for name in ("avro", "iceberg"):
        import_extension(name)
    connection.execute("LOAD avro; LOAD iceberg")
    if book.warehouse.bucket is None:
        return unquote(urlsplit(location).path)
    import_extension("httpfs")
    connection.execute("LOAD httpfs")
    settings = book.settings
    told = {
        "KEY_ID": settings.s3_access_key_id,
        "SECRET": settings.s3_secret_access_key,
        "REGION": settings.s3_region,
        "ENDPOINT": urlsplit(settings.s3_endpoint).netloc,
        "URL_STYLE": "path",
    }
    words = ", ".join(f"{name} '{value}'" for name, value in told.items())
    connection.execute(f"CREATE SECRET (TYPE s3, PROVIDER config, USE_SSL false, {words})")
    return location
