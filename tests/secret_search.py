"""Where a secret might have got to, and whether it is there.

A secret of these tests has a random word of its own at either end, which no way of quoting or escaping changes: where
one of the words is, the secret is, or a part of it.
"""

from __future__ import annotations

import gzip
import io
import secrets
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import fastavro
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg import sql

from buckets import Buckets

#: A place that was looked into, and what is in it.
Text = tuple[str, bytes | str]


@dataclass(frozen=True)
class Secret:
    """Something that is to be seen nowhere."""

    text: str
    words: tuple[str, str]

    @classmethod
    def new(cls, between: str = "-") -> Secret:
        """One that nothing else looks like; what stands between its words may need quoting."""
        # Short: of the bounds of a column, Iceberg keeps sixteen characters.
        words = (secrets.token_hex(6), secrets.token_hex(6))
        return cls(between.join(words), words)

    def is_in(self, content: bytes | str) -> bool:
        """Whether it is there, or half of it, in whatever spelling, and in whatever the content is packed."""
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        return any(word.encode() in plain for plain in unpacked(data) for word in self.words)


def places_of(hidden: Iterable[Secret], texts: Iterable[Text]) -> list[str]:
    """The places in which one of the secrets is."""
    wanted = tuple(hidden)
    return sorted({place for place, content in texts if any(secret.is_in(content) for secret in wanted)})


def unpacked(data: bytes) -> Iterator[bytes]:
    """Some bytes as they are, and what is in them if they are packed: what was compressed shows no word."""
    yield data
    if data.startswith(b"\x1f\x8b"):
        yield from unpacked(gzip.decompress(data))
    elif data.startswith(b"\x28\xb5\x2f\xfd"):
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as packed:
            yield from unpacked(packed.read())
    elif data.startswith(b"PAR1"):
        with pq.ParquetFile(io.BytesIO(data)) as file:
            yield repr((file.metadata.metadata, file.schema_arrow)).encode()
            for batch in file.iter_batches():
                yield from _values(batch.to_pylist())
    elif data.startswith(b"Obj\x01"):
        reader = fastavro.reader(io.BytesIO(data))
        yield repr(reader.metadata).encode()
        yield from _values(reader)


def _values(items: Iterable[Any]) -> Iterator[bytes]:
    for item in items:
        # Bytes among them may be packed once more.
        if isinstance(item, bytes):
            yield from unpacked(item)
        elif isinstance(item, dict):
            yield from _values(item.keys())
            yield from _values(item.values())
        elif isinstance(item, list | tuple):
            yield from _values(item)
        else:
            yield str(item).encode("utf-8", "surrogatepass")


def rows_of(url: str) -> Iterator[Text]:
    """Every value of every row of every table of a database, by the name of the table."""
    with psycopg.connect(url) as connection:
        names = connection.execute(
            "SELECT schemaname, tablename FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        ).fetchall()
        for schema, table in names:
            for row in connection.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(schema, table))):
                for value in _values(row):
                    yield f"rows of {table}", value


def objects_of(buckets: Buckets, bucket: str) -> Iterator[Text]:
    """Every object of a bucket, and its name."""
    for key in buckets.keys(bucket):
        yield f"object {key}", key
        yield f"object {key}", buckets.read(bucket, key)


def told_by(error: BaseException) -> Iterator[str]:
    """All that an error says, and those that it came from, also where it does not name them."""
    yield "".join(traceback.format_exception(error))
    found: BaseException | None = error
    while found is not None:
        yield from (str(found), repr(found), repr(found.args), repr(getattr(found, "__notes__", ())))
        if hasattr(found, "as_dict"):
            yield repr(found.as_dict())
        found = found.__cause__ or found.__context__


def shown_by(thing: object, depth: int = 4) -> Iterator[tuple[str, str]]:
    """What an object, and those that it consists of, say of themselves."""
    waiting, seen = [(thing, depth)], {id(thing)}
    while waiting:
        item, left = waiting.pop()
        name = f"{type(item).__module__}.{type(item).__qualname__}"
        yield from ((f"repr of {name}", repr(item)), (f"str of {name}", str(item)))
        for part in _parts(item) if left else ():
            if id(part) not in seen and hasattr(type(part), "__module__") and type(part).__module__ != "builtins":
                seen.add(id(part))
                waiting.append((part, left - 1))


def _parts(item: object) -> list[object]:
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    named = [getattr(item, name, None) for name in slots if isinstance(name, str)]
    return [*vars(item).values(), *named] if hasattr(item, "__dict__") else named
