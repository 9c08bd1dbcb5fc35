"""A plan names every file that can have a matching row, as few others as it can, and never an old answer."""

from __future__ import annotations

import itertools
import math
import operator
import struct
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from books import MEMORY, Place
from lake import files_of, ids, in_memory, insert, lay, numbers, own_warehouse, rows_of, run_sql, with_ids  # noqa: F401
from lakebook import Book
from lakebook.clock import ManualClock, to_datetime
from lakebook.errors import InvalidInput, InvalidPredicate, SparkUnsuitable, VersionExpired, VersionNotFound
from lakebook.lake import planning, rewriting
from lakebook.lake.extremes import Extremes
from lakebook.lake.table import Table
from lakebook.predicates import INVERSE, Always, And, Not, Or, Predicate, Test
from lakebook.registry import table_files

#: Of each type three values in their order, as a condition writes them and as Python has them.
ORDERED: dict[str, tuple[pa.DataType, list[tuple[str, Any]]]] = {
    "i": (pa.int32(), [("-2147483648", -(2**31)), ("-1", -1), ("2147483647", 2**31 - 1)]),
    "l": (pa.int64(), [("-9223372036854775808", -(2**63)), ("0", 0), ("9223372036854775807", 2**63 - 1)]),
    "f": (pa.float32(), [("-1.5", -1.5), ("-0.25", -0.25), ("3.5", 3.5)]),
    "d": (pa.float64(), [("-1000000000.5", -1000000000.5), ("-0.5", -0.5), ("0.0", 0.0)]),
    "m": (pa.decimal128(9, 2), [(text, Decimal(text)) for text in ("-1.01", "-1.00", "9999999.99")]),
    "w": (pa.decimal128(38, 0), [(text, Decimal(text)) for text in ("-1" + "0" * 37, "5", "1" + "0" * 37)]),
    "day": (pa.date32(), [(f"'{day}'", day) for day in (date(1, 1, 1), date(1969, 12, 31), date(2024, 2, 29))]),
    "t": (pa.time64("us"), [("'00:00:00'", time(0)), ("'12:30:00'", time(12, 30)), ("'23:59:59.999999'", time.max)]),
    "n": (
        pa.timestamp("us"),
        [
            ("'0001-01-01T00:00:00'", datetime(1, 1, 1)),  # noqa: DTZ001
            ("'1969-12-31T23:59:59.999999'", datetime(1969, 12, 31, 23, 59, 59, 999999)),  # noqa: DTZ001
            ("'2024-01-01T00:00:00'", datetime(2024, 1, 1)),  # noqa: DTZ001
        ],
    ),
    "z": (
        pa.timestamp("us", "UTC"),
        [
            ("'1950-01-01T01:00:00+01:00'", datetime(1950, 1, 1, tzinfo=UTC)),
            ("'1970-01-01T00:00:00Z'", datetime(1970, 1, 1, tzinfo=UTC)),
            ("'9999-12-31T23:59:59.999999Z'", datetime.max.replace(tzinfo=UTC)),
        ],
    ),
    "s": (pa.string(), [("''", ""), ("'a'", "a"), ("'é漢'", "é漢")]),
    "u": (pa.uuid(), [(f"'{uuid.UUID(int=value)}'", uuid.UUID(int=value)) for value in (0, 2**100, 2**128 - 1)]),
    "x": (pa.binary(2), [("X'0000'", b"\0\0"), ("X'7f80'", b"\x7f\x80"), ("X'ff00'", b"\xff\0")]),
    "y": (pa.binary(), [("X''", b""), ("X'7fff'", b"\x7f\xff"), ("X'80'", b"\x80")]),
}
COLUMNS = pa.schema([("id", pa.int64()), *((name, kind) for name, (kind, _) in ORDERED.items())])
#: Each operation on the second value of three, and which of files 0, 1 and 2 (3 has nulls) it leaves.
OPERATIONS: dict[str, list[int]] = {
    "{c} = {1}": [1],
    "{c} != {1}": [0, 2],
    "NOT {c} = {1}": [0, 2],
    "{c} < {1}": [0],
    "{c} <= {1}": [0, 1],
    "{c} > {1}": [2],
    "{c} >= {1}": [1, 2],
    "{c} >= {1} AND {c} < {2}": [1],
    "{c} = {0} OR {c} = {2}": [0, 2],
    "{c} IN ({0}, {2})": [0, 2],
    "{c} NOT IN ({0}, {2})": [1],
    "NOT {c} IN ({0}, {2})": [1],
    "{c} IS NULL": [3],
    "{c} IS NOT NULL": [0, 1, 2],
    "{c} IS NULL OR {c} = {0}": [0, 3],
    "{c} < {0}": [],
    "{c} > {2}": [],
    "{c} = {0} AND {c} = {1}": [],
}


def conditions() -> Iterator[tuple[str, list[int]]]:
    for name, (_, values) in ORDERED.items():
        for text, expected in OPERATIONS.items():
            yield text.format(*(value[0] for value in values), c=name), expected


def row(number: int) -> dict[str, Any]:
    """The row whose values are all the lowest, the middle, or the highest ones; the fourth has none."""
    if number == 3:
        return {"id": 3}
    return {"id": number, **{name: values[number][1] for name, (_, values) in ORDERED.items()}}


def planned(table: Table, where: Any = None, **at: Any) -> list[int]:
    """The numbers of the files that are planned, the first being 0."""
    return [file.id - 1 for file in table.plan(where, **at)]


# --- pruning -------------------------------------------------------------------


def test_files_are_chosen_by_every_operation_on_every_type(book: Book) -> None:
    table = book.tables.create("t", COLUMNS)
    for number in range(4):
        insert(table, row(number))
    for where, expected in conditions():
        assert planned(table, where) == expected, where


def test_rows_are_found_by_every_operation_on_every_type(make_place: Any) -> None:
    book: Book = make_place(MEMORY).open()
    table = book.tables.create("t", COLUMNS)
    insert(table, *(row(number) for number in range(4)))
    for where, expected in conditions():
        assert ids(table, where) == expected, where


def test_row_groups_are_chosen_by_every_operation_on_every_type(make_place: Any) -> None:
    book: Book = make_place(MEMORY).open()
    table = book.tables.create("t", COLUMNS)
    for number, make in enumerate((rows_of, with_ids)):
        data = make(table, [row(number) for number in range(4)])
        table.add_files([lay(book, f"in/{number}.parquet", data, row_group_size=1)])
    for where, expected in conditions():
        groups = [file.row_groups or tuple(range(file.row_group_count)) for file in table.plan(where)]
        # Nobody has counted the NaN of these files, so that any row group may have some.
        may_be_nan = where.startswith(("f ", "d ", "NOT f", "NOT d")) and any(
            sign in where for sign in (">", "NOT", "!")
        )
        if not may_be_nan:
            assert groups == ([tuple(expected)] * 2 if expected else []), where
        if expected:
            assert ids(table, where) == sorted(expected * 2), where


def test_texts_are_chosen_by_their_beginning(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, s STRING")
    files: list[list[Any]] = [["a", "ab"], ["abc", "abd"], ["b"], ["é", "\U0010ffff"], [None], ["a%", "a_"]]
    for number, texts in enumerate(files):
        insert(table, *({"id": number, "s": text} for text in texts))
    assert planned(table, "s LIKE 'ab%'") == [0, 1]
    assert planned(table, "s LIKE 'abc%'") == [1]
    assert planned(table, "s NOT LIKE 'ab%'") == [0, 2, 3, 5]
    assert planned(table, "s LIKE 'é%'") == [3]
    assert planned(table, "s LIKE '\U0010ffff%'") == [3]
    assert planned(table, r"s LIKE 'a\%%'") == [0, 5]
    assert ids(table, r"s LIKE 'a\%%'") == [5]
    assert ids(table, "s LIKE 'ab%'") == [0, 1, 1]
    assert ids(table, "s NOT LIKE 'ab%'") == [0, 2, 3, 3, 5, 5]


@pytest.mark.parametrize("many", [0, 10_000])
def test_a_file_that_lost_its_statistics_is_always_looked_at(
    place: Place, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    # In a table that has so many files, they are read in another way.
    monkeypatch.setattr(planning, "_MANY", many)
    book = place.open()
    table = book.tables.create("t", "id BIGINT, s STRUCT<x: INT>", partition_by=["bucket(64, id)"])
    for number in range(3):
        insert(table, {"id": number, "s": {"x": number}})
    with table.update_schema() as update:
        update.add_column("late", "INT")
    insert(table, {"id": 3, "s": {"x": 3}, "late": 3})
    insert(table, {"id": 4, "s": {"x": 4}, "late": 4})
    # All that is known of the first; of the last, all but its partition.
    run_sql(book, f"DELETE FROM file_column_stats WHERE table_id = {table.id} AND file_id = 1")
    run_sql(book, f"DELETE FROM file_column_stats WHERE table_id = {table.id} AND file_id = 5 AND field_id > 0")
    every = [file["file_path"] for file in files_of(book, table)]
    for where, wanted, looked_at in (
        ("id = 0", [0], {0}),
        ("id = 4", [4], {0, 4}),
        ("id >= 3", [3, 4], {0, 3, 4}),
        ("s.x = 2", [2], {0, 2, 4}),
        ("s.x <> 2", [0, 1, 3, 4], {0, 1, 3, 4}),
        # Those of before have no such column: there is nothing to be lost.
        ("late = 4", [4], {4}),
        ("late IS NULL", [0, 1, 2], {0, 1, 2, 4}),
        ("late = 3 AND s.x > 0", [3], {3, 4}),
    ):
        assert ids(table, where) == wanted, where
        assert {file.file_path for file in table.plan(where)} == {every[number] for number in looked_at}, where
    assert table.min_max("id") is None
    assert table.min_max("late") is None
    # A file that came since is looked at too.
    insert(table, {"id": 5, "s": {"x": 5}, "late": 5})
    run_sql(book, f"DELETE FROM file_column_stats WHERE table_id = {table.id} AND file_id = 6")
    assert ids(table, "id = 5") == ids(table, "s.x = 5") == ids(table, "late = 5") == [5]
    assert ids(table, "s.x = 4", version=5) == []
    assert ids(table, "s.x = 4", version=6) == [4]
    # A delete ends no file of which it cannot tell that every row matches.
    with pytest.raises(SparkUnsuitable):
        table.delete("s.x = 4")
    assert ids(table) == [0, 1, 2, 3, 4, 5]


def test_a_file_of_unknown_bounds_is_always_looked_at(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, d DOUBLE, f FLOAT, s STRING, y BINARY")
    # Too long for a footer's statistics; NaN, after which there is no upper end.
    insert(
        table,
        {"id": 1, "d": -10.0, "f": -10.0, "s": "b" * 5000, "y": b"b" * 5000},
        {"id": 2, "d": math.nan, "f": math.nan, "s": "c" * 5000, "y": b"c" * 5000},
    )
    # Nobody has counted its NaN.
    table.add_files(
        [lay(book, "in/a.parquet", rows_of(table, [{"id": 3, "d": -20.0, "f": -20.0, "s": "a", "y": b"a"}]))]
    )
    # It has no statistics at all.
    data = rows_of(table, [{"id": 4, "d": -30.0, "f": -30.0, "s": "A", "y": b"A"}])
    table.add_files([lay(book, "in/b.parquet", data, write_statistics=False)])
    for where, expected in (
        ("d < -5", [1, 3, 4]),
        ("f < -5", [1, 3, 4]),
        ("d = -10", [1]),
        ("d <= -10.0 AND f >= -25", [1, 3]),
        ("d IN (-10, -30)", [1, 4]),
        ("s < 'B'", [4]),
        ("s >= 'b' AND s < 'c'", [1]),
        ("s LIKE 'b%'", [1]),
        ("s LIKE 'A%'", [4]),
        ("y < X'42'", [4]),
        ("y > X'62' AND y < X'63'", [1]),
        ("d IS NAN", [2]),
        ("d IS NULL", []),
    ):
        assert ids(table, where) == expected, where


def test_both_ways_to_search_find_the_same_files(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    table = book.tables.create("t", "id BIGINT, k INT")
    for number in range(20):
        insert(table, {"id": number, "k": number % 3}, {"id": number, "k": None})
    wheres = [
        "id = 5",
        "id >= 3 AND id < 6 AND k = 0",
        "id = 5 OR k = 1",
        "k = 2 AND id > 11",
        "id IN (1, 2, 300)",
        f"id IN ({', '.join(map(str, range(0, 500, 2)))})",
        "k IS NULL AND id < 2",
    ]
    driven = {where: [planned(table, where), ids(table, where)] for where in wheres}
    assert driven["id = 5"] == [[5], [5, 5]]
    assert driven["id >= 3 AND id < 6 AND k = 0"] == [[3], [3]]
    assert driven["id IN (1, 2, 300)"] == [[1, 2], [1, 1, 2, 2]]
    assert driven["k IS NULL AND id < 2"] == [[0, 1], [0, 1]]
    for limit, value in (("_MOST_CANDIDATES", 0), ("_MOST_RANGES", 0), ("_FEW", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(planning, limit, value)
            patch.setattr(book.lake, "plans", type(book.lake.plans)(0, lambda _: 1))
            for where in wheres:
                assert [planned(table, where), ids(table, where)] == driven[where], (limit, where)


@in_memory
def test_plans_of_very_many_files_come_in_chunks(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    table = numbers(book, "t", *([number] for number in range(7)))
    monkeypatch.setattr(planning, "CHUNK", 2)
    monkeypatch.setattr(table_files.chunks, "__defaults__", (2,))
    for where, expected in ((None, list(range(7))), ("id != 3", [0, 1, 2, 4, 5, 6]), ("id > 2", [3, 4, 5, 6])):
        assert planned(table, where) == expected
        assert ids(table, where) == expected


def test_partitions_prune_also_what_bounds_cannot(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, k STRING, at TIMESTAMP", partition_by=["bucket(8, k)", "day(at)"])
    noon = datetime(1969, 12, 31, 12, tzinfo=UTC)
    texts = [f"key-{number}" for number in range(30)]
    insert(table, *({"id": number, "k": text, "at": noon} for number, text in enumerate(texts)))
    insert(table, {"id": 100, "k": "key-3", "at": noon + timedelta(days=1)}, {"id": 101})
    for number, text in enumerate(texts):
        where = f"k = '{text}' AND at <= '1969-12-31T23:59:59Z'"
        assert len(table.plan(where).files) == 1
        assert ids(table, where) == [number]
    assert ids(table, "k = 'key-3'") == [3, 100]
    assert len(table.plan("at >= '1970-01-01T00:00:00Z'").files) == 1
    assert ids(table, "at IS NULL") == [101]
    assert len(table.plan("k IS NULL").files) == 1
    assert ids(table, "k IN ('key-1', 'key-2') AND at < '1970-01-01T00:00:00Z'") == [1, 2]


@in_memory
def test_a_condition_that_cannot_be_is_refused(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, l ARRAY<INT>, s STRUCT<a: INT>, z TIMESTAMP")
    bad: list[Any] = [
        "", "id", "id = ", "missing = 1", "id = 'x'", "l = 1", "l.element = 1", "s = 1", "s.b = 1",
        "z > '2024-01-01T00:00:00'", "id = 1; DROP TABLE tables", "id LIKE 'a%'", 5, b"id = 1", ["id = 1"],
        "(" * 100 + "id = 1" + ")" * 100,
    ]  # fmt: skip
    for where in bad:
        for call in (table.plan, table.to_arrow, table.delete):
            with pytest.raises((InvalidPredicate, InvalidInput)):
                call(where)
    for columns in (["missing"], [], "id", ["id", "s.a"]):
        with pytest.raises(InvalidInput):
            table.to_arrow(columns=columns)


@in_memory
def test_a_plan_says_how_much_there_is_to_read(book: Book) -> None:
    table = numbers(book, "t", [1, 2, 3], [4, 5])
    plan = table.plan("id >= 4")
    assert (plan.version, plan.row_count, len(plan.files)) == (2, 2, 1)
    (file,) = plan.files
    assert plan.total_size == file.file_size == files_of(book, table)[1]["file_size"]
    assert plan.paths == [book.lake.store.uri(file.file_path)]
    assert (file.checksum, file.schema_version) == (files_of(book, table)[1]["checksum"], 1)
    assert [file.id for file in plan] == [file.id for file in plan.files] == [2]
    assert [column.name for column in plan.schema.fields] == ["id"]


@in_memory
def test_columns_come_in_the_order_they_are_asked_for(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, a INT, s STRUCT<x: INT, y: INT>, z STRING")
    insert(table, {"id": 1, "a": 2, "s": {"x": 3, "y": 4}, "z": "five"})
    assert table.to_arrow(columns=["z", "id"]).to_pylist() == [{"z": "five", "id": 1}]
    assert table.to_arrow(columns=("s",)).to_pylist() == [{"s": {"x": 3, "y": 4}}]
    # A condition may be on a column that is not asked for, or on a part of one.
    assert table.to_arrow("s.x = 3 AND z = 'five'", columns=["a"]).to_pylist() == [{"a": 2}]
    assert table.to_arrow("s.x = 4", columns=["a"]).num_rows == 0
    with table.pin() as pinned:
        assert [batch.schema.names for batch in pinned.to_batches(columns=["z", "a"])] == [["z", "a"]]
        assert pinned.to_arrow(columns=["a"]).schema == pa.schema([("a", pa.int32())])


# --- answers without files -----------------------------------------------------


def test_the_number_of_rows_needs_no_file(book: Book) -> None:
    table = numbers(book, "t", [1, 2, 3], [4, 5])
    for path in [file.file_path for file in table.plan()]:
        book.lake.store.delete_one(path)
    assert table.count() == 5
    with table.pin(version=1) as pinned:
        assert pinned.count() == 3
    with table.pin(version=0) as pinned:
        assert pinned.count() == 0
    assert table.min_max("id") == Extremes(1, 5)


def test_extremes_are_told_only_if_they_are_certain(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, d DOUBLE, s STRING, nothing INT")
    assert table.min_max("id") == Extremes(None, None)
    insert(table, {"id": 5, "d": -1.5, "s": "b"}, {"id": -7, "d": 2.5, "s": ""}, {})
    assert table.min_max("id") == Extremes(-7, 5)
    assert table.min_max("d") == Extremes(-1.5, 2.5)
    assert table.min_max("s") == Extremes("", "b")
    assert table.min_max("nothing") == Extremes(None, None)
    # Only nulls, and only NaN among nulls, are no hindrance and one.
    insert(table, {"id": 9})
    assert table.min_max("d") == Extremes(-1.5, 2.5)
    insert(table, {"id": 10, "d": math.nan})
    assert table.min_max("d") is None
    assert table.min_max("id") == Extremes(-7, 10)
    insert(table, {"id": 11, "s": "x" * 5000})
    assert table.min_max("s") is None
    # Another writer may have cut a text, and has not counted its NaN.
    other = book.tables.create("other", "id BIGINT, d DOUBLE, s STRING, nothing INT")
    other.add_files([lay(book, "in/a.parquet", rows_of(other, [{"id": 1, "d": 1.0, "s": "a"}]))])
    assert [other.min_max(name) for name in ("id", "d", "s", "nothing")] == [
        Extremes(1, 1),
        None,
        None,
        Extremes(None, None),
    ]
    other.add_files([lay(book, "in/b.parquet", rows_of(other, [{"id": 2}]), write_statistics=False)])
    assert other.min_max("id") is None


def test_extremes_follow_the_versions_of_a_table(book: Book) -> None:
    table = numbers(book, "t", [1, 2], [100])
    assert table.min_max("id") == Extremes(1, 100)
    table.delete("id = 100")
    assert table.min_max("id") == Extremes(1, 2)
    with table.update_schema() as update:
        update.add_column("new", "INT").rename_column("id", "key")
    assert table.min_max("key") == Extremes(1, 2)
    assert table.min_max("new") == Extremes(None, None)
    table.delete("true")
    assert table.min_max("key") == Extremes(None, None)


@in_memory
def test_extremes_of_nested_fields_are_told_and_those_of_elements_are_not(book: Book) -> None:
    table = book.tables.create(
        "t", "id BIGINT, s STRUCT<a: INT, b: STRUCT<c: STRING>>, l ARRAY<INT>, m MAP<STRING, INT>"
    )
    insert(
        table,
        {"id": 1, "s": {"a": -4, "b": {"c": "x"}}, "l": [1, 2], "m": [("k", 5)]},
        {"id": 2, "s": None},
        {"id": 3, "s": {"a": 2, "b": None}},
    )
    assert table.min_max("s.a") == Extremes(-4, 2)
    assert table.min_max("s.b.c") == Extremes("x", "x")
    for column in ("s", "l", "m", "missing", "s.x", ""):
        with pytest.raises(InvalidInput):
            table.min_max(column)
    # There are values, so that it would be wrong to say that there are none.
    for column in ("l.element", "m.key", "m.value"):
        try:
            assert table.min_max(column) is None, column
        except InvalidInput:
            continue


# --- time travel ---------------------------------------------------------------


def test_every_version_can_be_read_by_its_number_and_by_its_time(place: Place) -> None:
    clock = ManualClock(1_700_000_000_000)
    book = place.open(clock=clock)
    table = numbers(book, "t")
    expected: list[list[int]] = [[]]
    for number in range(1, 4):
        clock.advance(10)
        insert(table, {"id": number})
        expected.append(list(range(1, number + 1)))
    clock.advance(10)
    table.delete("id = 2")
    expected.append([1, 3])
    for version, found in enumerate(expected):
        assert ids(table, version=version) == found
        assert planned(table, version=version) == [number - 1 for number in found]
        at = to_datetime(1_700_000_000_000 + version * 10_000)
        for moment in (at, at + timedelta(seconds=5), at.astimezone(None)):
            assert ids(table, as_of=moment) == found
            assert table.plan(as_of=moment).version == version
        with table.pin(version=version) as pinned:
            assert (pinned.version, pinned.count(), ids(pinned)) == (version, len(found), found)
    assert ids(table, as_of=datetime.max.replace(tzinfo=UTC)) == [1, 3]
    assert ids(table, "id > 1", version=2) == [2]
    assert book.verify().ok


def test_versions_of_the_same_millisecond_have_times_of_their_own(place: Place) -> None:
    book = place.open(clock=ManualClock(1_700_000_000_000))
    table = numbers(book, "t", [1], [2], [3])
    for version in table.history():
        assert table.plan(as_of=version.committed_at).version == version.version
    assert table.plan(as_of=to_datetime(1_700_000_000_000)).version == 0


def test_the_clock_may_be_set_back_without_confusing_the_versions(place: Place) -> None:
    clock = ManualClock(1_700_000_000_000)
    book = place.open(clock=clock)
    table = numbers(book, "t", [1])
    clock.turn_back(3600)
    insert(table, {"id": 2})
    newest, before, _ = table.history()
    assert newest.committed_at > before.committed_at
    assert ids(table, as_of=newest.committed_at) == [1, 2]
    assert ids(table, as_of=before.committed_at) == [1]


def test_a_version_that_is_not_there_or_no_longer_is_refused(place: Place) -> None:
    clock = ManualClock(1_700_000_000_000)
    book = place.open(clock=clock, temporary_file_grace=0)
    table = numbers(book, "t", [1], [2])
    table.delete("id = 1")
    bad_versions: list[Any] = [4, -1, 2**70]
    for version in bad_versions:
        for call in (table.plan, table.pin, table.to_arrow):
            with pytest.raises(VersionNotFound):
                call(version=version)
    long_ago = to_datetime(1_600_000_000_000)
    with pytest.raises(VersionNotFound):
        table.plan(as_of=long_ago)
    bad: list[dict[str, Any]] = [
        {"version": 1, "as_of": long_ago},
        {"version": "1"},
        {"version": 1.0},
        {"version": True},
        {"as_of": long_ago.replace(tzinfo=None)},
        {"as_of": "2024-01-01"},
        {"as_of": 1_700_000_000},
    ]
    for at in bad:
        for call in (table.plan, table.pin, table.to_arrow):
            with pytest.raises(InvalidInput):
                call(**at)
    clock.advance(100)
    book.cleaner.expire(seconds=0, versions=2)
    for version in (0, 1):
        for call in (table.plan, table.pin, table.to_arrow):
            with pytest.raises(VersionExpired):
                call(version=version)
    with pytest.raises(VersionExpired):
        table.plan(as_of=long_ago)
    with pytest.raises(VersionExpired):
        table.plan(as_of=to_datetime(1_700_000_000_001))
    assert ids(table, version=2) == [1, 2]
    assert ids(table, version=3) == [2]
    assert book.verify().ok


# --- caches --------------------------------------------------------------------


def test_a_plan_is_never_older_than_the_table(shared_place: Place) -> None:
    book, other = shared_place.open(), shared_place.open()
    table = numbers(book, "t", [1])
    seen = other.table("t")
    where = "id >= 0"
    for number in range(2, 5):
        assert ids(seen, where) == ids(table, where) == list(range(1, number))
        insert(table, {"id": number})
        assert planned(seen, where) == planned(table, where) == list(range(number))
    table.delete("id = 1")
    assert ids(seen, where) == [2, 3, 4]
    with table.update_schema() as update:
        update.rename_column("id", "old").add_column("id", "BIGINT")
    assert planned(seen, where) == planned(table, where) == []
    assert planned(seen, "old >= 0") == [1, 2, 3]
    assert ids(seen, where, version=1) == [1]
    book.tables.drop("t")
    assert ids(numbers(book, "t", [9]), where) == [9]
    assert ids(other.table("t"), where) == [9]


@in_memory
def test_conditions_that_look_alike_are_kept_apart(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, b BOOLEAN, d DOUBLE, s STRING")
    insert(table, {"id": 1, "b": True, "d": 1.0, "s": "1"})
    insert(table, {"id": 0, "b": False, "d": 0.0, "s": "0"})
    for _ in range(2):
        for where, expected in (
            ("id = 1", [1]), ("d = 1", [1]), ("b = true", [1]), ("s = '1'", [1]), ("id = 0", [0]), ("d = -0.0", [0]),
            ("b = false", [0]), ("s = '0'", [0]), ("id < 1", [0]), ("id <= 1", [0, 1]), ("true", [0, 1]), ("false", []),
        ):  # fmt: skip
            assert ids(table, where) == expected


def test_plans_are_right_with_small_caches_and_without_any(place: Place) -> None:
    for size in (0, 1, 2):
        with place.open(cache_planned_files=size, cache_footers=size) as book:
            table = numbers(book, f"t{size}", [1], [2], [3])
            for _ in range(2):
                assert ids(table) == [1, 2, 3]
                assert ids(table, "id > 1") == [2, 3]
                assert planned(table, "id = 3") == [2]


@in_memory
def test_a_plan_that_was_not_read_to_its_end_is_not_kept(book: Book) -> None:
    table = numbers(book, "t", [1], [2], [3])
    assert next(iter(table.plan("id >= 1"))).id == 1
    assert planned(table, "id >= 1") == [0, 1, 2]


def test_a_footer_that_is_lost_is_read_from_its_file_and_kept_again(place: Place) -> None:
    book = place.open(cache_footers=0)
    table = numbers(book, "t", [1, 2])
    run_sql(book, "DELETE FROM partition_metadata")
    assert not book.verify().ok
    assert ids(table) == [1, 2]
    assert book.verify().ok


# --- random tables -------------------------------------------------------------

#: The columns of the random tables: name, type, path, and a few values, so that they meet.
POOLS: dict[str, tuple[str, list[Any]]] = {
    "i": ("int", [-(2**31), -5, -1, 0, 1, 7, 2**31 - 1]),
    "l": ("long", [-(2**63), -(2**40), -1, 0, 3, 2**63 - 1]),
    "d": ("double", [-math.inf, -2.5, -0.0, 0.0, 1e-300, 7.5, math.inf, math.nan]),
    "f": ("float", [-1.5, -0.0, 0.0, 0.5, 3.25, math.nan]),
    "s": ("string", ["", "a", "ab", "abc", "b", "é", "漢字", "\U0010ffff", "a" * 5000, "b" * 5000]),
    "day": ("date", [date(1, 1, 1), date(1969, 12, 31), date(1970, 1, 1), date(2024, 2, 29)]),
    "at": ("timestamptz", [datetime(year, 1, 1, 5, tzinfo=UTC) for year in (1950, 1969, 1970, 2024)]),
    "m": ("decimal(9, 2)", [Decimal(text) for text in ("-9999999.99", "-1.50", "0.00", "0.01", "1.50")]),
    "b": ("boolean", [True, False]),
    "n.x": ("int", [-3, 0, 3]),
    "n.y.z": ("double", [-1.0, 0.0, 2.0, math.nan]),
}  # fmt: skip
DDL = (
    "id BIGINT, i INT, l BIGINT, d DOUBLE, f FLOAT, s STRING, day DATE, at TIMESTAMP, m DECIMAL(9, 2), b BOOLEAN,"
    " n STRUCT<x: INT, y: STRUCT<z: DOUBLE>>"
)
#: What may change between two files; what it does to a row that is there already.
CHANGES = ("widen", "rename", "again", "add")


def values_of(name: str) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), st.sampled_from(POOLS[name][1]))


@st.composite
def random_rows(draw: st.DrawFn) -> dict[str, Any]:
    found = {name: draw(values_of(name)) for name in POOLS if "." not in name}
    inner = draw(st.one_of(st.none(), st.builds(lambda z: {"z": z}, values_of("n.y.z"))))
    found["n"] = draw(st.one_of(st.none(), st.builds(lambda x: {"x": x, "y": inner}, values_of("n.x"))))
    return found


FILES = st.lists(
    st.tuples(st.lists(random_rows(), min_size=1, max_size=4), st.sampled_from(["arrow", "foreign", "with_ids"])),
    min_size=1,
    max_size=4,
)
OPS = ["eq", "ne", "lt", "le", "gt", "ge", "in", "not_in", "is_null", "not_null", "is_nan", "not_nan", "starts_with"]


@st.composite
def random_tests(draw: st.DrawFn) -> tuple[Any, ...]:
    name = draw(st.sampled_from([*POOLS, "e"]))
    kind = POOLS[name][0] if name != "e" else "int"
    pool = [value for value in (POOLS[name][1] if name != "e" else [1, 2]) if value == value]
    op = draw(st.sampled_from(OPS))
    if op == "starts_with" and kind != "string":
        op = "eq"
    if op in ("is_nan", "not_nan") and kind not in ("double", "float"):
        op = "is_null"
    if op in ("is_null", "not_null", "is_nan", "not_nan"):
        return "test", op, name, ()
    if op in ("in", "not_in"):
        return "test", op, name, tuple(draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3)))
    return "test", op, name, (draw(st.sampled_from(pool)),)


PREDICATES = st.recursive(
    random_tests(),
    lambda inner: st.one_of(
        st.tuples(st.just("and"), inner, inner),
        st.tuples(st.just("or"), inner, inner),
        st.tuples(st.just("not"), inner),
    ),
    max_leaves=5,
)


def bound(expr: tuple[Any, ...], table: Table, names: dict[str, str]) -> Predicate:
    """An expression as Lakebook has it, on the columns as they are called now."""
    if expr[0] == "not":
        return Not(bound(expr[1], table, names))
    if expr[0] in ("and", "or"):
        left, right = bound(expr[1], table, names), bound(expr[2], table, names)
        return And(left, right) if expr[0] == "and" else Or(left, right)
    _, op, name, values = expr
    if name == "e" and "e" not in names:
        return Always(False)
    field = table.schema.find_field(names.get(name, name))
    return Test(op, tuple(names.get(name, name).split(".")), field.field_id, str(field.field_type), values)


COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def holds(expr: tuple[Any, ...], row: dict[str, Any], names: dict[str, str], negated: bool = False) -> bool:
    """Whether an expression is true for a row, as simply as it can be said."""
    if expr[0] == "not":
        return holds(expr[1], row, names, not negated)
    if expr[0] in ("and", "or"):
        both = (expr[0] == "and") != negated
        left, right = (holds(side, row, names, negated) for side in expr[1:])
        return (left and right) if both else (left or right)
    _, op, name, values = expr
    if name == "e" and "e" not in names:
        return negated
    op = INVERSE[op] if negated else op
    value: Any = row
    for part in name.split("."):
        value = None if value is None else value.get(part)
    if op in ("is_null", "not_null"):
        return (value is None) == (op == "is_null")
    if value is None:
        return False
    if op in ("is_nan", "not_nan"):
        return math.isnan(value) == (op == "is_nan")
    if op in ("in", "not_in"):
        return (value in values and value == value) == (op == "in")
    if op in ("starts_with", "not_starts_with"):
        return str(value).startswith(values[0]) == (op == "starts_with")
    return COMPARED[op](value, values[0])


def evolve(table: Table, change: str, written: list[tuple[int, dict[str, Any]]], names: dict[str, str]) -> None:
    """Change the schema, and what is known of the rows accordingly."""
    with table.update_schema() as update:
        if change == "widen":
            update.widen_column("i", "BIGINT").widen_column("f", "DOUBLE").widen_column("m", "DECIMAL(20, 2)")
            update.widen_column(names.get("n.x", "n.x"), "BIGINT")
        elif change == "rename" and "s" not in names:
            update.rename_column("s", "t").rename_column("n.x", "w").move_first("n")
            names |= {"s": "t", "n.x": "n.w"}
        elif change == "again":
            update.drop_column("l").add_column("l", "BIGINT")
            for _, row in written:
                row["l"] = None
        elif change == "add" and "e" not in names:
            update.add_column("e", "INT")
            names["e"] = "e"
            for _, row in written:
                row["e"] = None


def called(row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A row with its columns as they are called now."""
    found = {names.get(name, name): value for name, value in row.items() if name != "e" or "e" in names}
    if found.get("n") is not None and "n.x" in names:
        found["n"] = {"w": row["n"]["x"], "y": row["n"]["y"]}
    return found


#: Without partitions, files may also be those of others.
PARTITIONS = [(), (), ("bucket(3, s)",), ("truncate(2, s)",), ("month(day)", "b"), ("hour(at)",), ("day", "year(at)")]
EXAMPLES = 36


def test_random_conditions_on_random_tables_find_exactly_the_rows_they_should(place: Place) -> None:
    book = place.open()
    number = itertools.count()

    @settings(
        max_examples=EXAMPLES if place.kind == MEMORY else EXAMPLES // 3,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        phases=(Phase.generate,),
    )
    @given(
        FILES,
        st.sampled_from(PARTITIONS),
        st.lists(st.sampled_from(CHANGES), max_size=3),
        st.lists(PREDICATES, min_size=1, max_size=6),
    )
    def check(
        files: list[tuple[list[dict[str, Any]], str]],
        partitions: tuple[str, ...],
        changes: list[str],
        expressions: list[tuple[Any, ...]],
    ) -> None:
        table = book.tables.create(f"t{next(number)}", DDL, partition_by=partitions)
        written: list[tuple[int, dict[str, Any]]] = []
        names: dict[str, str] = {}
        for place_of, (rows, how) in enumerate(files):
            fresh = [(place_of, {"id": len(written) + more, **row, "e": 1}) for more, row in enumerate(rows)]
            if "e" not in names:
                for _, row in fresh:
                    del row["e"]
            given_rows = [called(row, names) for _, row in fresh]
            if how == "arrow" or partitions:
                insert(table, *given_rows)
            else:
                data = (rows_of if how == "foreign" else with_ids)(table, given_rows)
                path = f"in/{table.id}-{place_of}.parquet"
                table.add_files([lay(book, path, data, row_group_size=2)])
            written += fresh
            if place_of < len(changes):
                evolve(table, changes[place_of], written, names)
        check_expressions(table, written, names, expressions, by_file=not partitions)

    check()


def check_expressions(
    table: Table,
    written: list[tuple[int, dict[str, Any]]],
    names: dict[str, str],
    expressions: list[tuple[Any, ...]],
    *,
    by_file: bool,
) -> None:
    everything = sorted(table.to_arrow().to_pylist(), key=lambda row: row["id"])
    expected_rows = [called(row, names) for _, row in written]
    assert [same(row) for row in everything] == [same(row) for row in expected_rows]
    for expr in expressions:
        where = bound(expr, table, names)
        matching = [(file, row["id"]) for file, row in written if holds(expr, row, names)]
        assert ids(table, where) == [ident for _, ident in matching]
        if not by_file:
            continue
        plan = table.plan(where)
        found = {file.id - 1 for file in plan}
        assert found >= {file for file, _ in matching}
        whole, _ = rewriting._split(plan)
        for file in whole:
            assert all(holds(expr, row, names) for place_of, row in written if place_of == file.id - 1)
    for name, (kind, _) in POOLS.items():
        values = [lookup(row, name) for _, row in written]
        present = [value for value in values if value is not None]
        extremes = table.min_max(names.get(name, name))
        if extremes is not None and kind != "float":
            assert extremes == Extremes(min(present, default=None), max(present, default=None))


def lookup(row: dict[str, Any], name: str) -> Any:
    value: Any = row
    for part in name.split("."):
        value = None if value is None else value.get(part)
    return value


def same(row: Any) -> Any:
    """A row in a form in which two are equal if they look the same, also with NaN and -0.0."""
    if isinstance(row, dict):
        return {name: same(value) for name, value in row.items() if not (name == "e" and value is None)}
    if isinstance(row, datetime):
        return row.astimezone(UTC).isoformat()
    return struct.pack(">d", row) if isinstance(row, float) and row == row else repr(row)
