"""Rows that position deletes name are gone for every reader, and no others are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from books import MEMORY
from deletes import columns, delete_positions, enter_deletes, enter_rows, location_of
from lake import (  # noqa: F401
    files_of,
    ids,
    in_memory,
    insert,
    lay,
    numbers,
    own_warehouse,
    parquet,
    rows_of,
    with_ids,
)
from lakebook import Book, failpoints
from lakebook.errors import FilesChanged, InvalidInput, ReadFailed
from lakebook.lake import planning, position_deletes
from lakebook.lake.extremes import Extremes
from lakebook.lake.table import Table
from lakebook.registry.table_files import DeleteFile, visible_deletes
from lakebook.registry.transactions import Reader


def grouped(book: Book, rows: int = 12, group: int = 3, name: str = "t") -> Table:
    """A table of one file whose row groups have few rows each; `v` is ten times the number of the row."""
    table = book.tables.create(name, "id BIGINT, v BIGINT")
    data = with_ids(table, [{"id": number, "v": 10 * number} for number in range(rows)])
    table.add_files([lay(book, f"in/{table.id}.parquet", data, row_group_size=group)])
    return table


# --- reading -------------------------------------------------------------------


def test_deleted_rows_are_left_out_of_their_version_and_all_newer_ones(book: Book) -> None:
    table = numbers(book, "t", range(5), range(5, 10))
    first, second = table.plan().files
    delete_positions(book, table, [(first, 0), (first, 3), (second, 1)])
    delete_positions(book, table, [(second, 4)], about=second)
    assert ids(table) == [1, 2, 4, 5, 7, 8]
    assert ids(table, version=3) == [1, 2, 4, 5, 7, 8, 9]
    assert ids(table, version=2) == list(range(10))
    assert ids(table, "id >= 4 AND id < 8") == [4, 5, 7]
    with table.pin() as pinned:
        insert(table, {"id": 10})
        found = pa.Table.from_batches(pinned.to_batches(columns=["id"]))
        assert (sorted(found.column("id").to_pylist()), pinned.count()) == ([1, 2, 4, 5, 7, 8], 6)
    assert (ids(table), table.count()) == ([1, 2, 4, 5, 7, 8, 10], 7)
    with table.pin(version=3) as pinned:
        assert pinned.count() == 7
    with table.pin(version=2) as pinned:
        assert pinned.count() == 10
    # What was read before a delete came is not read from memory after it.
    delete_positions(book, table, [(table.plan().files[2], 0)])
    assert (ids(table), table.count(), table.record.deleted_rows) == ([1, 2, 4, 5, 7, 8], 6, 5)
    assert book.verify().findings == ()


def test_extremes_are_not_told_while_rows_are_deleted(book: Book) -> None:
    table = numbers(book, "t", range(5), range(5, 10))
    first, _ = table.plan().files
    assert table.min_max("id") == Extremes(0, 9)
    delete_positions(book, table, [(first, 0)], about=first)
    assert table.min_max("id") is None
    with pytest.raises(InvalidInput):
        table.min_max("nothing")
    # With the file its own deletes go; those about others stay.
    report = table.delete("id < 5")
    assert (report.removed_files, table.count(), table.record.deleted_rows) == (1, 5, 0)
    assert table.min_max("id") == Extremes(5, 9)
    assert {row["to_version"] for row in files_of(book, table) if row["content"]} == {4}


def test_a_file_whose_rows_are_all_deleted_has_none(book: Book) -> None:
    table = numbers(book, "t", range(4), [9])
    first, _ = table.plan().files
    delete_positions(book, table, [(first, position) for position in range(4)])
    assert (ids(table), ids(table, "id < 5"), table.count()) == ([9], [], 1)


def test_positions_beyond_the_file_and_positions_named_twice_do_no_harm(book: Book) -> None:
    table = numbers(book, "t", range(5))
    (file,) = table.plan().files
    odd = [-1, -(2**63), 5, 2**63 - 1, 2, 2]
    delete_positions(book, table, [(file, position) for position in odd])
    delete_positions(book, table, [(file, 2), (file, 0), *((file, 4) for _ in range(50))], about=file)
    assert (ids(table), table.count()) == ([1, 3], 2)


def test_nothing_is_deleted_by_rows_about_other_files(book: Book) -> None:
    table, other = numbers(book, "t", range(5)), numbers(book, "u", range(5))
    (file,) = other.plan().files
    delete_positions(book, table, [(file, 1), ("nowhere", 2), (location_of(book, file) + "x", 3), ("", 0)])
    assert (ids(table), table.count()) == (list(range(5)), 5)
    assert (ids(other), other.count()) == (list(range(5)), 5)
    delete_positions(book, table, [])
    assert (ids(table), table.count()) == (list(range(5)), 5)


@in_memory
def test_positions_count_from_the_start_of_the_file_where_some_row_groups_are_read(book: Book) -> None:
    table = grouped(book)
    (file,) = table.plan().files
    delete_positions(book, table, [(file, position) for position in (0, 4, 6, 7, 8, 11)])
    plan = table.plan("id >= 5 AND id <= 7 OR id >= 10")
    assert [item.row_groups for item in plan] == [(1, 2, 3)]
    assert ids(table, "id >= 5 AND id <= 7 OR id >= 10") == [5, 10]
    assert ids(table, "id < 3 OR id > 9") == [1, 2, 10]
    assert [item.row_groups for item in table.plan("id < 3 OR id > 9")] == [(0, 3)]
    assert ids(table, "id = 8") == []
    assert ids(table) == [1, 2, 3, 5, 9, 10]


@in_memory
def test_a_column_younger_than_the_file_has_as_many_nulls_as_rows_are_left(book: Book) -> None:
    table = grouped(book)
    (file,) = table.plan().files
    delete_positions(book, table, [(file, position) for position in (0, 1, 5, 11)])
    with table.update_schema() as update:
        update.add_column("w", "STRING")
    assert table.to_arrow(columns=["w"]).column("w").to_pylist() == [None] * 8
    # Only some of its row groups are read.
    assert table.to_arrow("id >= 9", columns=["w"]).column("w").to_pylist() == [None] * 2
    (groups,) = [item.row_groups for item in table.plan("id >= 9")]
    assert groups == (3,)


@in_memory
def test_columns_of_every_kind_lose_the_same_rows(book: Book) -> None:
    table = book.tables.create(
        "t",
        "id BIGINT, s STRING, u UUID, l ARRAY<STRUCT<a: INT, b: STRING>>, m MAP<STRING, BIGINT>, n STRUCT<x: BIGINT>",
    )
    rows = [
        {
            "id": number,
            "s": str(number),
            "u": bytes([number] * 16),
            "l": [{"a": number, "b": "x"}] * (number % 3),
            "m": [(str(number), number)],
            "n": {"x": number} if number % 2 else None,
        }
        for number in range(100)
    ]
    insert(table, *rows)
    whole = table.to_arrow()
    (file,) = table.plan().files
    gone = [number for number in range(100) if number % 7 in (0, 3)]
    delete_positions(book, table, [(file, position) for position in gone])
    assert table.to_arrow().equals(whole.filter(pc.invert(pc.is_in(whole["id"], pa.array(gone)))))


@in_memory
def test_many_rows_in_many_batches_are_left_out(book: Book) -> None:
    many = 200_000
    table = book.tables.create("t", "id BIGINT")
    table.insert_arrow(pa.table({"id": pa.array(range(many), pa.int64())}))
    (file,) = table.plan().files
    gone = {*range(0, many, 3), *range(65_000, 66_000), many - 1}
    delete_positions(book, table, [(file, position) for position in gone], row_group_size=10_000)
    assert ids(table) == [number for number in range(many) if number not in gone]
    assert table.count() == many - len(gone)


@in_memory
def test_deletes_are_looked_up_once_for_all_files_of_a_version(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    table = numbers(book, "t", *([number] for number in range(100)))
    looked: list[int] = []

    def look(reader: Reader, table_id: int, version: int) -> list[DeleteFile]:
        looked.append(version)
        return visible_deletes(reader, table_id, version)

    monkeypatch.setattr(planning, "visible_deletes", look)
    assert (len(ids(table)), looked) == (100, [100])
    assert (len(ids(table)), looked) == (100, [100])
    # A plan that nothing is read from needs none of it.
    insert(table, {"id": 100})
    assert (len(table.plan().files), looked) == (101, [100])
    delete_positions(book, table, [(file, 0) for file in table.plan("id >= 98")])
    assert (len(ids(table)), table.count(), looked) == (98, 98, [100, 102])


# --- which deletes apply -------------------------------------------------------


def test_deletes_apply_to_files_of_their_partition_that_were_there(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, g STRING", partition_by=["g"])
    insert(table, *({"id": number, "g": "ab"[number % 2]} for number in range(6)))
    a, b = sorted(table.plan().files, key=lambda file: file.partition_path)
    # It names rows of both, but is of the partition of one.
    delete_positions(book, table, [(a, 0), (b, 0)], like=a)
    insert(table, {"id": 6, "g": "a"})
    delete_positions(book, table, [(b, 1)], about=b)
    assert ids(table) == [1, 2, 4, 5, 6]
    plan = table.plan()
    (late,) = [file for file in plan if file.id not in (a.id, b.id)]
    assert [len(plan.deletes_for(file)) for file in (a, b, late)] == [1, 1, 0]
    assert [delete.referenced_path for delete in plan.deletes_for(b)] == [b.file_path]
    # A plan of other files still knows the deletes of its own.
    assert ids(table, "g = 'b'") == [1, 5]
    assert table.plan(version=1).deletes_for(a) == ()


def test_a_delete_does_not_apply_to_files_of_a_higher_sequence_number(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT")
    for number in (3, 4, 5):
        enter_rows(book, table, rows_of(table, [{"id": 10 * number + row} for row in range(3)]), sequence_number=number)
    files = table.plan().files
    delete_positions(book, table, [(file, 1) for file in files], sequence_number=4)
    assert ids(table) == [30, 32, 40, 42, 50, 51, 52]
    assert table.count() == 7
    # One that comes later, with a lower number: it was rewritten.
    delete_positions(book, table, [(file, 0) for file in files], sequence_number=3)
    assert ids(table) == [32, 40, 42, 50, 51, 52]


def test_files_are_named_by_their_location_as_it_is_spelled(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT")
    enter_rows(book, table, rows_of(table, [{"id": number} for number in range(4)]), spelled=True)
    (file,) = table.plan().files
    plain = book.lake.store.uri(file.file_path)
    assert file.location is not None
    assert file.location != plain
    delete_positions(book, table, [(file.location, 1), (plain, 2)])
    delete_positions(book, table, [(file.location, 3), (plain, 0)], about=file)
    assert ids(table) == [0, 2]


# --- files of deletes ----------------------------------------------------------


@in_memory
@pytest.mark.parametrize("most", [position_deletes._SHARED_ROWS, 0], ids=["read once", "read for each file"])
@pytest.mark.parametrize(
    "schema",
    [
        columns(),
        columns(ids=False),
        columns(names=("p", "row")),
        columns().set(0, columns().field(0).with_type(pa.large_string())),
        columns(ids=False).set(0, pa.field("file_path", pa.binary())),
        columns().set(1, columns().field(1).with_type(pa.int32())),
        columns().append(pa.field("row", pa.struct([("id", pa.int64())]))),
    ],
    ids=["by id and name", "by name", "by id", "large texts", "bytes", "small numbers", "with the row"],
)
def test_files_of_deletes_are_read_as_every_engine_writes_them(
    book: Book, monkeypatch: pytest.MonkeyPatch, schema: pa.Schema, most: int
) -> None:
    monkeypatch.setattr(position_deletes, "_SHARED_ROWS", most)
    table = numbers(book, "t", range(5), range(5, 10), range(10, 15))
    files = table.plan().files
    gone = [(file, position) for file in files for position in (1, 3)]
    names, plain = schema.names, columns(names=schema.names[:2])
    rows = [{names[0]: location_of(book, file), names[1]: position} for file, position in gone]
    data = pa.Table.from_pylist(rows, pa.schema([*plain, *list(schema)[2:]])).cast(schema)
    for options in ({"row_group_size": 2}, {"use_dictionary": False}, {"write_statistics": False}):
        enter_deletes(book, table, parquet(data, **options))
    # The columns the other way round.
    turned = data.select([*reversed(names[:2]), *names[2:]])
    enter_deletes(book, table, parquet(turned.slice(0, 2)), about=files[0])
    assert ids(table) == [0, 2, 4, 5, 7, 9, 10, 12, 14]
    assert table.count() == 9


def broken(name: str, place: str) -> tuple[pa.Table, bytes | None]:
    """A file of deletes that is none, and the bytes that stand in its place if it is damaged."""
    rows = pa.table([[place], [0]], schema=columns())
    whole = parquet(rows)
    found: dict[str, tuple[pa.Table, bytes | None]] = {
        "no parquet": (rows, b"x" * len(whole)),
        "cut": (rows, whole[:30]),
        "empty": (rows, b""),
        "another body": (rows, b"PAR1" + bytes(len(whole) - 4 - 300) + whole[-300:]),
        "other columns": (pa.table({"a": [place], "b": [0]}), None),
        "one column": (rows.select([0]), None),
        "texts for positions": (pa.table({"file_path": [place], "pos": ["0"]}), None),
        "numbers for files": (pa.table({"file_path": [0], "pos": [0]}), None),
        "no position": (pa.table({"file_path": [place], "pos": pa.array([None], pa.int64())}), None),
        "no file": (pa.table({"file_path": pa.array([None], pa.string()), "pos": [0]}), None),
        "a list": (pa.table({"file_path": [[place]], "pos": [0]}), None),
    }
    return found[name]


BROKEN = (
    *("no parquet", "cut", "empty", "another body", "other columns", "one column", "texts for positions"),
    *("numbers for files", "no position", "no file", "a list"),
)


@in_memory
@pytest.mark.parametrize("most", [position_deletes._SHARED_ROWS, 0], ids=["read once", "read for each file"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_of_deletes_is_told_by_its_name(
    book: Book, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(position_deletes, "_SHARED_ROWS", most)
    table = numbers(book, "t", range(5))
    data, damaged = broken(name, location_of(book, table.plan().files[0]))
    enter_deletes(book, table, parquet(data), damaged=damaged)
    (path,) = (row["file_path"] for row in files_of(book, table) if row["content"])
    acts: list[Callable[[], object]] = [table.to_arrow, table.count]
    for act in acts:
        with pytest.raises(ReadFailed) as caught:
            act()
        assert caught.value.on == path
    assert ids(table, version=1) == list(range(5))


def test_a_lost_file_of_deletes_is_an_error_and_not_rows_that_come_back(book: Book) -> None:
    table = numbers(book, "t", range(5))
    (file,) = table.plan().files
    delete_positions(book, table, [(file, 1)])
    (path,) = (row["file_path"] for row in files_of(book, table) if row["content"])
    book.lake.store.delete_one(path)
    for act in (table.to_arrow, table.count):
        with pytest.raises(ReadFailed) as caught:
            act()
        assert caught.value.on.endswith(path)
    # The rows can still be got rid of.
    table.delete("true")
    assert (ids(table), table.record.file_count) == ([], 0)


# --- changing ------------------------------------------------------------------


def test_a_file_whose_rows_were_deleted_meanwhile_is_a_conflict(book: Book) -> None:
    table = numbers(book, "t", range(5), range(5, 10))
    first, _ = table.plan().files
    waiting = [0]

    def meanwhile() -> None:
        if waiting:
            delete_positions(book, table, [(first, waiting.pop())], about=first)

    with failpoints.armed("lease.taken", meanwhile), pytest.raises(FilesChanged):
        table.delete("id < 5")
    assert ids(table) == list(range(1, 10))
    # Of another file: they can both be.
    waiting.append(1)
    with failpoints.armed("lease.taken", meanwhile):
        table.delete("id >= 5")
    assert (ids(table), table.count()) == ([2, 3, 4], 3)


def test_a_file_of_deletes_is_not_a_file_of_rows(book: Book) -> None:
    table = numbers(book, "t", range(5))
    (file,) = table.plan().files
    delete_positions(book, table, [(file, 1)])
    (path,) = (row["file_path"] for row in files_of(book, table) if row["content"])
    assert [item.file_path for item in table.plan()] == [file.file_path]
    assert [item.file_path for item in table.plan("id = 1")] == [file.file_path]
    with pytest.raises(InvalidInput, match="no file"):
        table.replace([path], None)  # type: ignore[arg-type]


# --- any rows, any deletes, any predicate --------------------------------------

#: Rows per file, and rows of each row group.
FILES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=4)
#: Which files a file of deletes is about, or only one of them; and the positions, a few beyond the end.
DELETES = st.lists(
    st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 13)), min_size=1, max_size=20)),
    max_size=4,
)
RANGES = st.lists(st.tuples(st.integers(-1, 50), st.integers(0, 25), st.booleans()), min_size=1, max_size=4)


def condition(low: int, more: int, outside: bool) -> tuple[str, Callable[[int], bool]]:
    """A condition, and what it means."""
    high = low + more
    if outside:
        return f"id < {low} OR v >= {10 * high}", lambda number: number < low or number >= high
    return f"id >= {low} AND v < {10 * high}", lambda number: low <= number < high


@pytest.mark.parametrize("most", [position_deletes._SHARED_ROWS, 0], ids=["read once", "read for each file"])
def test_what_is_read_is_all_rows_but_the_deleted(make_place: Any, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(position_deletes, "_SHARED_ROWS", most)
    book: Book = make_place(MEMORY).open()
    number = itertools.count()

    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        phases=(Phase.generate,),
    )
    @given(FILES, DELETES, st.integers(0, 4), RANGES)
    def check(
        files: list[tuple[int, int]],
        deletes: list[tuple[bool, list[tuple[int, int]]]],
        late: int,
        ranges: list[tuple[int, int, bool]],
    ) -> None:
        table = book.tables.create(f"t{next(number)}", "id BIGINT, v BIGINT")
        rows: list[dict[tuple[int, int], int]] = []
        values = itertools.count()

        def add(place: int, size: int, group: int) -> None:
            fresh = {(place, position): next(values) for position in range(size)}
            data = with_ids(table, [{"id": value, "v": 10 * value} for value in fresh.values()])
            table.add_files([lay(book, f"in/{table.id}-{place}.parquet", data, row_group_size=group)])
            rows.append(fresh)

        for place, (size, group) in enumerate(files):
            add(place, size, group)
        known = table.plan().files
        left = {key: value for fresh in rows for key, value in fresh.items()}
        for alone, pairs in deletes:
            named = [(place % len(known), position) for place, position in pairs]
            if alone:
                named = [(named[0][0], position) for _, position in named]
            about = known[named[0][0]] if alone else None
            gone = [(known[place], position) for place, position in named]
            delete_positions(book, table, gone, about=about, row_group_size=3)
            for key in named:
                left.pop(key, None)
        if late:
            add(len(files), late, 2)
            left |= rows[-1]
        assert ids(table) == sorted(left.values())
        assert table.count() == len(left)
        for low, more, outside in ranges:
            text, means = condition(low, more, outside)
            assert ids(table, text) == sorted(filter(means, left.values())), text

    check()
