"""Footers in the registry: bytes go in and come out, by the path of their file."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pyarrow as pa
import pytest

from books import MEMORY, POSTGRESQL, SQLITE, Place
from lakebook import Book
from lakebook.clock import ManualClock, to_datetime
from lakebook.errors import FooterNotFound
from lakebook.lake import footer_store
from lakebook.lake.footer_store import stored_footers
from lakebook.lake.footers import parse_legacy_and_upgrade
from lakebook.registry.footers import (
    DELETE_FOOTERS,
    FORMAT_VERSION,
    GET_FOOTER,
    GET_FOOTERS,
    REPLACE_FOOTER,
    StoredFooter,
    delete_partition_metadata_batch,
    footer_sizes,
    insert_footers,
    load_footers,
    load_partition_metadata,
    replace_footer,
    sizes_of_version,
)
from lakebook.registry.transactions import Transaction
from legacy_footers import as_version_1, footer_of, grown

NOW = 1_700_000_000_123

# All bytes, what COPY's text form has to escape, and what it takes for the end of its data.
AWKWARD = [b"", bytes(range(256)), b"\\N", b"\\.", b"\\x15", b"a\tb\nc\\d\r\0\xff", b"\xff\xfe" * 5000]


def add(book: Book, *rows: tuple[str, bytes, int, int]) -> None:
    book._registry.write(lambda transaction: insert_footers(transaction, rows))


def load(book: Book, path: str) -> StoredFooter:
    return book._registry.read_with(lambda reader: load_partition_metadata(reader, path))


def load_all(book: Book, paths: list[str]) -> dict[str, StoredFooter]:
    return book._registry.read_with(lambda reader: load_footers(reader, paths))


def delete(book: Book, paths: list[str]) -> int:
    return book._registry.write(lambda transaction: delete_partition_metadata_batch(transaction, paths))


def of_version(book: Book, version: int, after: str = "", most: int = 100) -> list[tuple[str, int]]:
    return book._registry.read_with(lambda reader: sizes_of_version(reader, version, after, most))


def replace(book: Book, path: str, old: int, footer: bytes, rows: int | None = 9) -> bool:
    return book._registry.write(lambda transaction: replace_footer(transaction, path, old, footer, 2, rows))


def make_old(book: Book, *paths: str) -> None:
    """Footers as the migration takes them over from before: version 1, number of rows unknown."""

    def work(transaction: Transaction) -> None:
        older = "UPDATE partition_metadata SET partition_format_version = 1, num_rows = NULL"
        for path in paths:
            transaction._connection.execute(f"{older} WHERE file_path = '{path}'")

    book._registry.write(work)


def test_a_footer_comes_back_as_it_was(place: Place) -> None:
    book = place.open(clock=ManualClock(NOW))
    footer = random.Random(1).randbytes(100_000)
    add(book, ("views/a.parquet", footer, 7, 1234))
    found = load(book, "views/a.parquet")
    assert found == StoredFooter("views/a.parquet", footer, FORMAT_VERSION, 7, 1234, to_datetime(NOW))
    assert type(found.metadata) is bytes


# Few rows are inserted one by one, many at once.
@pytest.mark.parametrize("number", [len(AWKWARD), 120])
def test_every_byte_is_kept(book: Book, number: int) -> None:
    rows = [(f"ü/{index:03d}\\t.parquet", AWKWARD[index % len(AWKWARD)], index, index * 2) for index in range(number)]
    add(book, *rows)
    found = load_all(book, [row[0] for row in rows])
    assert [
        (footer.file_path, footer.metadata, footer.num_rows, footer.file_size) for _, footer in sorted(found.items())
    ] == rows
    assert {type(footer.metadata) for footer in found.values()} == {bytes}
    assert {path: load(book, path) for path in found} == found


def test_a_footer_of_many_mebibytes_is_kept(book: Book) -> None:
    footer = random.Random(2).randbytes(20 * 2**20)
    add(book, ("large.parquet", footer, 1, 1))
    assert load(book, "large.parquet").metadata == footer
    assert replace(book, "large.parquet", FORMAT_VERSION, footer[::-1])
    assert load(book, "large.parquet").metadata == footer[::-1]


def test_a_file_without_a_footer_is_named(book: Book) -> None:
    with pytest.raises(FooterNotFound, match=r"nowhere\.parquet"):
        load(book, "nowhere.parquet")


def test_any_number_of_footers_is_loaded_and_deleted(book: Book) -> None:
    paths = [f"v/{number:05d}.parquet" for number in range(2500)]
    add(book, *((path, path.encode(), number, number) for number, path in enumerate(paths)))
    # A path may be asked for twice, and one that has no footer is left out.
    found = load_all(book, [*paths, "v/none.parquet", paths[0]])
    assert {path: footer.metadata for path, footer in found.items()} == {path: path.encode() for path in paths}
    assert load_all(book, []) == {}
    assert delete(book, []) == 0
    assert delete(book, [*paths[10:], "v/none.parquet", paths[10], paths[10]]) == 2490
    assert sorted(load_all(book, paths)) == paths[:10]
    assert delete(book, paths) == 10
    assert load_all(book, paths) == {}


def test_footers_of_an_old_version_are_walked_in_pages_and_replaced(place: Place) -> None:
    book = place.open(clock=ManualClock(NOW))
    paths = [f"v/{number}.parquet" for number in range(8)]
    add(book, *((path, b"one", 5, 50) for path in paths))
    old = paths[::2]
    make_old(book, *old)
    assert of_version(book, 1) == [(path, 3) for path in old]
    assert {(load(book, path).num_rows, load(book, path).partition_format_version) for path in old} == {(None, 1)}
    page = of_version(book, 1, most=3)
    assert [path for path, _ in page] == old[:3]
    assert [path for path, _ in of_version(book, 1, page[-1][0], 3)] == old[3:]
    for path, _ in page:
        assert replace(book, path, 1, b"two")
    # A run that begins anew finds only what is left.
    assert [path for path, _ in of_version(book, 1)] == old[3:]
    assert len(of_version(book, 2)) == 7
    assert load(book, old[0]) == StoredFooter(old[0], b"two", 2, 9, 50, to_datetime(NOW))


def test_a_footer_is_replaced_only_in_the_version_it_was_read_in(book: Book) -> None:
    add(book, ("a.parquet", b"one", 5, 50), ("b.parquet", b"one", 5, 50))
    make_old(book, "a.parquet")
    assert replace(book, "a.parquet", 1, b"two", None)
    assert not replace(book, "a.parquet", 1, b"three")
    assert not replace(book, "gone.parquet", 1, b"three")
    assert load(book, "a.parquet").metadata == b"two"
    assert load(book, "a.parquet").num_rows is None
    assert load(book, "b.parquet").metadata == b"one"


def test_sizes_of_footers_are_told_without_the_footers(book: Book) -> None:
    rows = [(f"v/{index}", data, 1, 1) for index, data in enumerate([*AWKWARD, b"x" * 100_000])]
    add(book, *rows)
    found = book._registry.read_with(lambda reader: footer_sizes(reader, [*(row[0] for row in rows), "v/none"]))
    assert found == [(row[0], len(row[1])) for row in rows]


def test_many_large_footers_are_never_in_memory_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    book = place.open()
    size, at_once = 2**20, 4 * 2**20
    monkeypatch.setattr(footer_store, "_LOADED_AT_ONCE", at_once)
    paths = [f"v/{number:02d}" for number in range(24)]
    for path in paths:
        add(book, (path, bytes(size), 1, 1))
    # One that alone is larger than that is loaded too.
    add(book, ("v/99", bytes(2 * at_once), 1, 1))
    tracemalloc.start()
    try:
        seen = [(record.file_path, len(record.metadata)) for record in stored_footers(book.lake, [*paths, "v/99"])]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == [*((path, size) for path in paths), ("v/99", 2 * at_once)]
    assert peak < 5 * at_once


@pytest.mark.parametrize("place", [SQLITE], indirect=True)
def test_a_footer_of_64_mib_is_upgraded_in_the_registry_within_a_few_times_its_size(place: Place) -> None:
    book = place.open()
    # With long bounds: a footer of many short ones takes longer, and no more memory.
    columns = pa.table({f"c{number}": ["x" * 1000] for number in range(200)})
    legacy, count = grown(as_version_1(footer_of(columns)), 64 * 2**20)
    add(book, ("large.parquet", legacy, count, 1), ("small.parquet", as_version_1(footer_of(columns)), 1, 1))
    book._registry.write(
        lambda transaction: transaction._connection.execute(
            "UPDATE partition_metadata SET partition_format_version = 1"
        )
    )
    tracemalloc.start()
    try:
        assert book.upgrade_footers() == (2, [])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(legacy)
    found = load(book, "large.parquet")
    assert (found.partition_format_version, found.num_rows) == (FORMAT_VERSION, count)
    assert found.metadata == parse_legacy_and_upgrade(legacy, count)


def test_a_failed_transaction_leaves_no_footer(book: Book) -> None:
    def work(transaction: Transaction) -> None:
        insert_footers(transaction, [("a.parquet", b"one", 1, 1)])
        assert load_partition_metadata(transaction, "a.parquet").metadata == b"one"
        raise RuntimeError("the writer thought better of it")

    with pytest.raises(RuntimeError):
        book._registry.write(work)
    with pytest.raises(FooterNotFound):
        load(book, "a.parquet")


def test_a_footer_is_found_by_one_statement_on_its_key(place: Place) -> None:
    book = place.open()
    add(book, *((f"v/{number:05d}.parquet", b"x", 1, 1) for number in range(2000)))
    values: dict[Any, tuple[Any, ...]] = {
        GET_FOOTER: ("v/00500.parquet",),
        GET_FOOTERS: (),
        DELETE_FOOTERS: (),
        REPLACE_FOOTER: (2, 1, b"x", "v/00500.parquet", 2),
    }
    with book._registry.read() as reader:
        if place.kind == POSTGRESQL:
            reader._connection.execute("ANALYZE partition_metadata")
        for statement, given in values.items():
            given = given or (reader.listed(["v/00500.parquet", "v/01500.parquet"]),)
            explain = "EXPLAIN " if place.kind == POSTGRESQL else "EXPLAIN QUERY PLAN "
            plan = str(reader._connection.execute(explain + statement.on(reader.kind).sql, given).fetchall())
            key = "sqlite_autoindex_partition_metadata_1" if place.kind != POSTGRESQL else "pk_partition_metadata"
            assert key in plan, plan
            assert "SCAN partition_metadata" not in plan
            assert "Seq Scan" not in plan


def test_footers_are_seen_by_other_books_of_the_same_registry(shared_place: Place) -> None:
    first, second = shared_place.open(), shared_place.open()
    assert shared_place.kind != MEMORY
    add(first, ("a.parquet", b"one", 1, 1))
    assert load(second, "a.parquet").metadata == b"one"
    assert delete(second, ["a.parquet"]) == 1
    with pytest.raises(FooterNotFound):
        load(first, "a.parquet")
