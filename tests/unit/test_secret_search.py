"""Who looks for secrets finds one wherever it is, in whatever spelling."""

from __future__ import annotations

import gzip
import html
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fastavro
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lakebook
from books import Postgres
from buckets import Buckets
from lakebook.errors import InvalidSetting
from secret_search import Secret, objects_of, places_of, rows_of, shown_by, told_by

ROW = {"type": "record", "name": "r", "fields": [{"name": "x", "type": "bytes"}]}


def avro(text: str, *, among: str) -> bytes:
    file = io.BytesIO()
    schema, value = ({**ROW, "doc": text}, b"") if among == "schema" else (ROW, text.encode())
    fastavro.writer(file, schema, [{"x": value}] * 100, codec="deflate")
    return file.getvalue()


def parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, compression="zstd", use_dictionary=False)
    return file.getvalue()


def footer(text: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata({"k": text}), file)
    return file.getvalue()


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(data)
    return bytes(sink.getvalue())


HIDDEN_IN: dict[str, Callable[[str], bytes | str]] = {
    "plain": lambda text: f"a{text}b",
    "quoted": lambda text: quote(text, safe=""),
    "html": html.escape,
    "json": json.dumps,
    "repr": repr,
    "half of it": lambda text: text.partition("/")[0],
    "the other half": lambda text: text.rpartition("/")[2],
    "gzip": lambda text: gzip.compress(text.encode()),
    "zstd": lambda text: zstd(text.encode()),
    "avro": lambda text: avro(text, among="rows"),
    "schema of avro": lambda text: avro(text, among="schema"),
    "parquet": lambda text: parquet(x=[text] * 10_000),
    "footer of parquet": footer,
    "nested": lambda text: parquet(x=[[{"deep": gzip.compress(text.encode())}]]),
}


@pytest.mark.parametrize("where", HIDDEN_IN)
def test_a_secret_is_found_in_what_it_is_hidden_in(where: str) -> None:
    secret, other = Secret.new("/@ :%é\"<&'/"), Secret.new()
    hidden = HIDDEN_IN[where](secret.text)
    assert places_of([other, secret], [("here", hidden), ("there", "nothing")]) == ["here"]
    assert places_of([other], [("here", hidden)]) == []


def test_a_secret_is_found_in_rows_of_every_kind(postgres: Postgres) -> None:
    secret = Secret.new()
    url = postgres.new_database(with_book=False)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE plain (x TEXT); CREATE TABLE packed (x BYTEA); CREATE TABLE tree (x JSONB)")
        connection.execute("CREATE SCHEMA other; CREATE TABLE other.list (x TEXT[]); CREATE TABLE empty (x TEXT)")
        connection.execute("INSERT INTO plain VALUES (%s)", (secret.text,))
        connection.execute("INSERT INTO packed VALUES (%s)", (gzip.compress(secret.text.encode()),))
        connection.execute("INSERT INTO tree VALUES (%s)", (json.dumps({"a": [{secret.text: 1}]}),))
        connection.execute("INSERT INTO other.list VALUES (%s)", ([secret.text],))
    assert places_of([secret], rows_of(url)) == [f"rows of {name}" for name in ("list", "packed", "plain", "tree")]
    postgres.drop(url)


def test_a_secret_is_found_in_objects_and_their_names(buckets: Buckets) -> None:
    secret, bucket = Secret.new(), buckets.new_bucket()
    for key, body in (("a", gzip.compress(secret.text.encode())), (secret.text, b""), ("c", b"")):
        buckets.client.put_object(Bucket=bucket, Key=key, Body=body)
    assert places_of([secret], objects_of(buckets, bucket)) == sorted(["object a", f"object {secret.text}"])


def test_a_secret_is_found_in_what_errors_came_from() -> None:
    secret = Secret.new()

    def fail(*, named: bool) -> None:
        try:
            raise ValueError(secret.text)
        except ValueError as error:
            raise InvalidSetting("it is wrong", on="here") from (error if named else None)

    for named in (True, False):
        with pytest.raises(InvalidSetting) as caught:
            fail(named=named)
        assert any(secret.is_in(text) for text in told_by(caught.value))


def test_a_secret_is_found_in_what_parts_of_an_object_say(tmp_path: Path) -> None:
    class Talkative:
        def __init__(self, secret: str) -> None:
            self.secret = secret

        def __repr__(self) -> str:
            return self.secret

    secret = Secret.new()
    with lakebook.open(tmp_path) as book:
        assert places_of([secret], shown_by(book)) == []
        book.lake.store.talker = Talkative(secret.text)  # type: ignore[attr-defined]
        assert len(places_of([secret], shown_by(book))) == 2
