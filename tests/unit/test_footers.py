"""Parquet footers: an old one becomes a new one, and a broken one is told from both."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakebook.errors import CorruptFooter, InvalidInput, UnknownFooterVersion
from lakebook.lake.footers import (
    FOOTER_VERSION,
    LEGACY_FOOTER_VERSION,
    FooterPlace,
    as_parquet_file,
    footer_of_tail,
    open_footer,
    parse_legacy_and_upgrade,
    read_num_rows,
    strip_column_index_info,
    upgraded,
)
from legacy_footers import (
    BINARY,
    BYTE,
    DOUBLE,
    I32,
    I64,
    LIST,
    MAP,
    STRUCT,
    UUID,
    Field,
    List,
    Map,
    NotCompact,
    Struct,
    as_version_1,
    as_version_2,
    chunks_of,
    decode,
    encode,
    footer_of,
    grown,
    join,
    parquet,
    signed_number_of,
    signed_varint,
    split,
    take_pointers_out,
    varint,
)

KIB = 1024
MIB = 1024 * KIB
ROWS = 60


def flat(columns: int, rows: int = ROWS) -> pa.Table:
    return pa.table(
        {
            f"column_{number:05}": range(number, number + rows)
            if number % 2
            else [f"text {row}" for row in range(number, number + rows)]
            for number in range(columns)
        }
    )


def nested() -> pa.Table:
    rows = [{"id": row, "tags": ["a"] * (row % 3), "point": {"x": row / 2, "y": None}} for row in range(ROWS)]
    return pa.Table.from_pylist(rows).replace_schema_metadata({"owner": "a team", "note": "n" * 300})


def every_type() -> pa.Table:
    return pa.table(
        {
            "flag": [row % 2 == 0 for row in range(ROWS)],
            "when": pa.array(range(ROWS), pa.timestamp("us", tz="UTC")),
            "price": pa.array(range(ROWS), pa.int64()).cast(pa.decimal128(38, 4)),
            "long text": ["x" * 500 + str(row) for row in range(ROWS)],
            "bytes": pa.array([bytes([row]) * 16 for row in range(ROWS)], pa.binary(16)),
            "nothing": pa.nulls(ROWS),
            "kind": pa.array(["a", "b", None] * (ROWS // 3)).dictionary_encode(),
        }
    )


def of_duckdb(folder: Path) -> bytes:
    file = folder / "of_duckdb.parquet"
    duckdb.execute(f"COPY (SELECT range AS id, 'text ' || range AS name FROM range({ROWS})) TO '{file}'")
    return split(file.read_bytes())[1]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return {
        "flat": footer_of(flat(5), row_group_size=25),
        "one row group": footer_of(flat(3)),
        "nested": footer_of(nested(), row_group_size=20),
        "every type": footer_of(every_type(), row_group_size=20),
        "no statistics": footer_of(flat(5), write_statistics=False),
        "no pointers": footer_of(flat(5), write_page_index=False),
        "sorted": footer_of(
            flat(4), row_group_size=30, sorting_columns=[pq.SortingColumn(1)], write_page_checksum=True
        ),
        "no rows": footer_of(flat(3, rows=0)),
        "wide": footer_of(flat(100), row_group_size=30),
        "duckdb": of_duckdb(tmp_path_factory.mktemp("duckdb")),
    }


def rows_of(footer: bytes) -> int:
    return int(open_footer(footer).num_rows)


# --- real footers ----------------------------------------------------------------


def test_the_second_reading_gives_back_every_real_footer(real: dict[str, bytes]) -> None:
    for name, footer in real.items():
        assert encode(decode(footer)) == footer, name
        assert decode(footer).one(3) == signed_varint(rows_of(footer)), name


def test_an_upgrade_puts_the_row_count_in_takes_the_pointers_out_and_changes_nothing_else(
    real: dict[str, bytes],
) -> None:
    for name, footer in real.items():
        rows, legacy = rows_of(footer), as_version_1(footer)
        assert legacy != footer
        done = parse_legacy_and_upgrade(legacy, rows)
        assert done == as_version_2(footer, None), name
        assert not any(chunk.all(number) for chunk in chunks_of(decode(done)) for number in (4, 5, 6, 7)), name


def test_an_upgraded_footer_tells_pyarrow_what_the_original_told(real: dict[str, bytes]) -> None:
    with_pointers = 0
    for name, footer in real.items():
        before = open_footer(footer)
        after = open_footer(parse_legacy_and_upgrade(as_version_1(footer), before.num_rows))
        assert after.schema.equals(before.schema), name
        assert after.metadata == before.metadata, name
        assert (after.num_rows, after.num_columns, after.created_by) == (
            before.num_rows,
            before.num_columns,
            before.created_by,
        )
        assert after.num_row_groups == before.num_row_groups
        for group in range(before.num_row_groups):
            old, new = before.row_group(group), after.row_group(group)
            assert (new.num_rows, new.total_byte_size, new.sorting_columns) == (
                old.num_rows,
                old.total_byte_size,
                old.sorting_columns,
            )
            for column in range(before.num_columns):
                was, now = old.column(column), new.column(column)
                assert now.to_dict() == was.to_dict(), name
                assert now.equals(was), name
                with_pointers += was.has_column_index and was.has_offset_index
                assert not now.has_column_index
                assert not now.has_offset_index
    assert with_pointers > 100


def test_duckdb_reads_the_rows_of_a_file_whose_footer_was_upgraded(tmp_path: Path) -> None:
    data, footer = split(parquet(flat(6), row_group_size=25))
    file = tmp_path / "upgraded.parquet"
    file.write_bytes(join(data, parse_legacy_and_upgrade(as_version_1(footer), ROWS)))
    found = duckdb.execute(
        "SELECT count(*), sum(column_00001), max(column_00002), count(*) FILTER (column_00003 > 40)"
        f" FROM read_parquet('{file}')"
    ).fetchone()
    assert found == (ROWS, sum(range(1, ROWS + 1)), "text 9", 22)
    told = duckdb.execute(
        "SELECT count(*), count(DISTINCT row_group_id), sum(num_values), max(stats_max_value)"
        f" FROM parquet_metadata('{file}') WHERE path_in_schema = 'column_00001'"
    ).fetchone()
    assert told == (3, 3, ROWS, "60")
    rows = duckdb.execute(f"SELECT num_rows, num_row_groups FROM parquet_file_metadata('{file}')").fetchone()
    assert rows == (ROWS, 3)
    assert pq.read_table(file).equals(flat(6))


def test_a_footer_that_has_its_row_count_only_loses_its_pointers(real: dict[str, bytes]) -> None:
    for footer in real.values():
        assert parse_legacy_and_upgrade(footer, rows_of(footer)) == strip_column_index_info(footer)


def test_a_footer_that_states_another_row_count_is_corrupt(real: dict[str, bytes]) -> None:
    with pytest.raises(CorruptFooter, match="states 60 rows, and 61 are recorded") as caught:
        parse_legacy_and_upgrade(real["flat"], 61, on="t/a.parquet")
    assert caught.value.on == "t/a.parquet"


def test_stripping_what_is_stripped_gives_the_same_object(real: dict[str, bytes]) -> None:
    for footer in real.values():
        once = strip_column_index_info(footer)
        assert once == as_version_2(footer, None)
        assert strip_column_index_info(once) is once


def test_the_row_count_can_be_read_from_a_footer_that_has_one(real: dict[str, bytes]) -> None:
    for footer in real.values():
        assert read_num_rows(footer) == rows_of(footer)
        assert read_num_rows(as_version_1(footer)) is None


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 2**31, 2**63 - 1])
def test_any_row_count_can_be_put_in(real: dict[str, bytes], rows: int) -> None:
    done = parse_legacy_and_upgrade(as_version_1(real["flat"]), rows)
    assert read_num_rows(done) == open_footer(done).num_rows == rows


@pytest.mark.parametrize("rows", [-1, 2**63, None, "7", 1.0, True])
def test_what_is_no_number_of_rows_is_refused(real: dict[str, bytes], rows: Any) -> None:
    with pytest.raises(InvalidInput, match="is not a number of rows"):
        parse_legacy_and_upgrade(as_version_1(real["flat"]), rows)


# --- sizes -----------------------------------------------------------------------


def test_footers_around_eight_kib_are_upgraded() -> None:
    for size in range(8 * KIB - 2, 8 * KIB + 5):
        tree = decode(as_version_1(footer_of(flat(3))))
        tree.fields.append(Field(100, BINARY, (b"", b"")))
        pad = size - len(encode(tree)) - 2
        tree.fields[-1].value = (varint(pad), b"p" * pad)
        legacy = encode(tree)
        assert len(legacy) == size
        assert parse_legacy_and_upgrade(legacy, ROWS) == as_version_2(legacy, ROWS)


def test_a_footer_of_a_mib_is_upgraded() -> None:
    footer = footer_of(flat(850, rows=10), row_group_size=1)
    assert MIB < len(footer) < 2 * MIB
    tree = decode(footer)
    done = parse_legacy_and_upgrade(encode(tree.without(3)), 10)
    take_pointers_out(tree)
    assert done == encode(tree)
    assert open_footer(done).num_row_groups == 10


def test_a_footer_of_64_mib_is_upgraded() -> None:
    footer = as_version_1(footer_of(flat(2000, rows=1)))
    legacy, count = grown(footer, 64 * MIB)
    assert 64 * MIB <= len(legacy) < 65 * MIB
    wanted, _ = grown(strip_column_index_info(footer), 0)
    done = parse_legacy_and_upgrade(legacy, count)
    tree = decode(wanted)
    tree.fields.insert(2, Field(3, I64, signed_varint(count)))
    tree.one(4).values = [encode(tree.one(4).values[0])] * count
    assert done == encode(tree)
    opened = open_footer(done)
    assert (opened.num_rows, opened.num_row_groups, opened.num_columns) == (count, count, 2000)


def test_an_upgrade_takes_memory_for_the_footer_and_not_for_its_parts() -> None:
    footer = as_version_1(footer_of(flat(500, rows=1)))
    parse_legacy_and_upgrade(footer, 1)
    legacy, count = grown(footer, 2 * MIB)
    tracemalloc.start()
    try:
        done = parse_legacy_and_upgrade(legacy, count)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(done) < len(legacy)
    assert peak < 3 * len(legacy)


# --- any shape -------------------------------------------------------------------

SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def padded(raw: bytes, more: int) -> bytes:
    """A number in more bytes than it needs."""
    return raw if not more else raw[:-1] + bytes([raw[-1] | 0x80]) + b"\x80" * (more - 1) + b"\0"


NUMBERS = st.builds(padded, st.integers(-(2**31), 2**31).map(signed_varint), st.sampled_from([0, 0, 0, 1, 3]))
BINARIES = st.one_of(st.binary(max_size=20), st.integers(60, 200).map(lambda size: b"b" * size)).map(
    lambda data: (varint(len(data)), data)
)
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    1: st.none(),
    2: st.none(),
    BYTE: st.binary(min_size=1, max_size=1),
    4: NUMBERS,
    I32: NUMBERS,
    I64: NUMBERS,
    DOUBLE: st.binary(min_size=8, max_size=8),
    BINARY: BINARIES,
    UUID: st.binary(min_size=16, max_size=16),
}
ELEMENTS = {**SCALARS, 1: SCALARS[BYTE], 2: SCALARS[BYTE]}


@st.composite
def lists(draw: st.DrawFn, depth: int) -> List:
    kind = draw(st.sampled_from([*ELEMENTS, *((LIST, MAP, STRUCT) if depth else ())]))
    element = ELEMENTS[kind] if kind in ELEMENTS else values(kind, depth - 1)
    found = draw(st.one_of(st.lists(element, max_size=4), st.lists(element, min_size=14, max_size=17)))
    return List(kind, found, draw(st.sampled_from([None, varint(len(found))])))


@st.composite
def maps(draw: st.DrawFn, depth: int) -> Map:
    kinds = [draw(st.sampled_from([*ELEMENTS, *((LIST, STRUCT) if depth else ())])) for _ in range(2)]
    count = draw(st.integers(0, 3))
    entries = [
        draw(ELEMENTS[kind] if kind in ELEMENTS else values(kind, depth - 1)) for _ in range(count) for kind in kinds
    ]
    return Map(varint(count), kinds[0] * 16 + kinds[1], entries)


def values(kind: int, depth: int) -> st.SearchStrategy[Any]:
    if kind in SCALARS:
        return SCALARS[kind]
    return {LIST: lists(depth), 10: lists(depth), MAP: maps(depth), STRUCT: structs(depth)}[kind]


@st.composite
def a_field(draw: st.DrawFn, number: int, depth: int) -> Field:
    kind = draw(st.sampled_from([*SCALARS, *((LIST, 10, MAP, STRUCT) if depth else ())]))
    long = draw(st.sampled_from([None, None, None, signed_varint(number), padded(signed_varint(number), 1)]))
    return Field(number, kind, draw(values(kind, depth)), long)


FIELD_NUMBERS = st.one_of(st.integers(1, 12), st.integers(-5, 60), st.sampled_from([-32768, 32767]))


@st.composite
def structs(draw: st.DrawFn, depth: int, leave_out: tuple[int, ...] = ()) -> Struct:
    numbers = draw(st.lists(FIELD_NUMBERS.filter(lambda number: number not in leave_out), max_size=6))
    if draw(st.booleans()):
        numbers.sort()
    return Struct([draw(a_field(number, depth)) for number in numbers])


@st.composite
def usual_chunks(draw: st.DrawFn) -> Struct:
    """A chunk as writers make it, or almost."""
    away = draw(st.sampled_from([0, 0, 0, 1]))
    chunk = Struct([Field(2 + away, I64, draw(NUMBERS)), Field(3 + away, STRUCT, draw(structs(1)))])
    if draw(st.booleans()):
        chunk.fields.insert(0, Field(1 + away, BINARY, draw(BINARIES)))
    pointers = draw(st.sampled_from([(), (4, 5), (4, 5, 6, 7), (6, 7), (4, 7), (5, 6), (7, 8), (4, 5, 8), (8, 9)]))
    alike = draw(st.booleans())
    chunk.fields += [
        Field(number + away, (I64, I32)[(place if alike else number) % 2], draw(NUMBERS))
        for place, number in enumerate(pointers)
    ]
    chunk.fields += draw(st.sampled_from([[], [], [Field(18, STRUCT, Struct())], [Field(30, BINARY, (b"\1", b"k"))]]))
    return chunk


@st.composite
def footers(draw: st.DrawFn) -> Struct:
    chunks = st.lists(st.one_of(structs(1), usual_chunks()), max_size=3)
    groups = []
    for _ in range(draw(st.integers(0, 3))):
        group = draw(structs(1, leave_out=(1,)))
        group.fields.insert(draw(st.integers(0, len(group.fields))), Field(1, LIST, List(STRUCT, draw(chunks))))
        groups.append(group)
    footer = draw(structs(1, leave_out=(3, 4)))
    footer.fields.insert(draw(st.integers(0, len(footer.fields))), Field(4, LIST, List(STRUCT, groups)))
    if draw(st.sampled_from([True, False, False])):
        footer.fields.insert(draw(st.integers(0, len(footer.fields))), Field(3, I64, signed_varint(ROWS)))
    return footer


@settings(SETTINGS, max_examples=70)
@given(footers())
def test_fields_known_or_not_in_any_order_and_form_are_copied_byte_for_byte(tree: Struct) -> None:
    footer = encode(tree)
    assert encode(decode(footer)) == footer
    done = parse_legacy_and_upgrade(footer, ROWS)
    assert done == as_version_2(footer, ROWS)
    stripped = strip_column_index_info(footer)
    assert stripped == as_version_2(footer, None)
    assert strip_column_index_info(stripped) is stripped
    assert read_num_rows(done) == ROWS


def test_chunks_that_are_almost_usual_lose_their_pointers_and_nothing_else() -> None:
    # Each of six fields behind the metadata is missing, an i64 or an i32; all of it also one number further on.
    chunks = [
        Struct(
            [
                *([Field(1 + away, BINARY, (b"\4", b"path"))] if path else []),
                Field(2 + away, I64, b"\2"),
                Field(3 + away, STRUCT, Struct([Field(1, I32, b"\4")])),
                *(Field(number + away, kind, b"\6") for number, kind in enumerate(kinds, start=4) if kind),
            ]
        )
        for away, path in product((0, 1), (True, False))
        for kinds in product((0, I64, I32), repeat=6)
    ]
    assert len(chunks) == 4 * 3**6
    footer = encode(Struct([Field(4, LIST, List(STRUCT, [Struct([Field(1, LIST, List(STRUCT, chunks))])]))]))
    assert strip_column_index_info(footer) == as_version_2(footer, None)


def in_the_long_form(value: Any) -> Any:
    """A tree of which every header names its field, and every list its size."""
    if isinstance(value, Struct):
        return Struct(
            [Field(f.number, f.kind, in_the_long_form(f.value), signed_varint(f.number)) for f in value.fields]
        )
    if isinstance(value, List):
        return List(value.kind, [in_the_long_form(each) for each in value.values], varint(len(value.values)))
    return value


def test_footers_in_the_long_form_are_upgraded_and_open(real: dict[str, bytes]) -> None:
    for footer in real.values():
        legacy = encode(in_the_long_form(decode(as_version_1(footer))))
        done = parse_legacy_and_upgrade(legacy, rows_of(footer))
        assert done == as_version_2(legacy, rows_of(footer))
        assert open_footer(done).equals(open_footer(strip_column_index_info(footer)))


def test_the_step_to_the_next_field_is_made_longer_where_a_field_is_gone(real: dict[str, bytes]) -> None:
    tree = decode(real["one row group"])
    for chunk in chunks_of(tree):
        # 3 to 18 is as far as a short header reaches, to 19 it takes the long one.
        chunk.fields += [Field(18, 1, None), Field(19, BINARY, (b"\3", b"key"))]
    near = encode(tree)
    for chunk in chunks_of(tree):
        chunk.fields = chunk.without(18).fields
    far = encode(tree)
    assert b"\0\xf1\x18\3key\0" in strip_column_index_info(near)
    assert b"\0\x08\x26\3key\0" in strip_column_index_info(far)
    for footer in (near, far):
        assert strip_column_index_info(footer) == as_version_2(footer, None)
        assert open_footer(strip_column_index_info(footer)).num_rows == ROWS


def test_a_step_back_behind_a_field_that_is_gone_takes_the_long_form() -> None:
    # 10, then back to 4, which goes, and on to 8, which then has nothing to count from but 10.
    chunk = b"\x06" + signed_varint(10) + b"\2" + b"\x06" + signed_varint(4) + b"\2" + b"\x46\2" + b"\0"
    assert strip_column_index_info(row_groups(b"\x1c\x19\x1c" + chunk + b"\0")) == row_groups(
        b"\x1c\x19\x1c" + b"\x06" + signed_varint(10) + b"\2" + b"\x06" + signed_varint(8) + b"\2" + b"\0" + b"\0"
    )


def test_the_row_count_takes_the_long_form_behind_a_number_far_below_zero() -> None:
    footer = b"\x01" + signed_varint(-20) + b"\x01" + signed_varint(20) + b"\0"
    assert parse_legacy_and_upgrade(footer, ROWS) == as_version_2(footer, ROWS)
    assert parse_legacy_and_upgrade(b"\0", ROWS) == b"\x36" + signed_varint(ROWS) + b"\0"


def test_the_encryption_of_columns_is_kept(real: dict[str, bytes]) -> None:
    tree = decode(as_version_1(real["flat"]))
    key = Struct(
        [Field(2, STRUCT, Struct([Field(1, LIST, List(BINARY, [(b"\1", b"c")])), Field(2, BINARY, (b"\1", b"k"))]))]
    )
    for chunk in chunks_of(tree):
        chunk.fields += [Field(8, STRUCT, key), Field(9, BINARY, (b"\4", b"\0\1\2\3"))]
    tree.fields += [Field(8, STRUCT, Struct([Field(1, STRUCT, Struct())])), Field(9, BINARY, (b"\1", b"f"))]
    legacy = encode(tree)
    after = decode(parse_legacy_and_upgrade(legacy, ROWS))
    assert [(chunk.one(8), chunk.one(9)) for chunk in chunks_of(after)] == [(key, (b"\4", b"\0\1\2\3"))] * 15
    assert after.without(3, 4) == tree.without(3, 4)
    with pytest.raises(CorruptFooter, match="signed"):
        parse_legacy_and_upgrade(legacy + bytes(28), ROWS)


# --- broken footers --------------------------------------------------------------


def judge(footer: bytes) -> None:
    """The code and the second reading agree: on the result, or that there is none."""
    uses: list[tuple[int | None, Callable[[], bytes]]] = [
        (ROWS, lambda: parse_legacy_and_upgrade(footer, ROWS)),
        (None, lambda: strip_column_index_info(footer)),
    ]
    for rows, use in uses:
        try:
            wanted = as_version_2(footer, rows)
        except NotCompact:
            with pytest.raises(CorruptFooter):
                use()
        else:
            assert use() == wanted
            counts = [signed_number_of(value) for value in decode(footer).all(3)]
            assert read_num_rows(footer) == (counts[0] if counts else None)


def test_a_footer_cut_off_at_any_byte_is_corrupt(real: dict[str, bytes]) -> None:
    for name in ("one row group", "duckdb"):
        for footer in (as_version_1(real[name]), encode(in_the_long_form(decode(real[name])))):
            for end in range(len(footer)):
                with pytest.raises(CorruptFooter):
                    parse_legacy_and_upgrade(footer[:end], ROWS)


@settings(SETTINGS, max_examples=300)
@given(st.data())
def test_other_bytes_in_a_footer_make_it_corrupt_or_another_footer(real: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["one row group", "every type", "nested", "duckdb"]))
    footer = bytearray(as_version_1(real[name]))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(footer) - 1))
        change = data.draw(st.sampled_from(["bit", "byte", "out", "in", "twice"]))
        if change == "bit":
            footer[place] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "byte":
            footer[place] = data.draw(st.integers(0, 255))
        elif change == "out":
            del footer[place : place + data.draw(st.integers(1, 40))]
        elif change == "in":
            footer[place:place] = data.draw(st.binary(min_size=1, max_size=12))
        else:
            footer[place:place] = footer[place : place + data.draw(st.integers(1, 40))]
        if not footer:
            break
    judge(bytes(footer))


@settings(SETTINGS, max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes_are_either_corrupt_or_a_footer(data: bytes) -> None:
    judge(data)


def row_groups(groups: bytes) -> bytes:
    """A footer of nothing but row groups."""
    return b"\x49" + groups + b"\0"


MANY = varint(2**31 - 1)
HOSTILE = {
    "nothing": b"",
    "bytes behind the end": b"\0\0",
    "a signature without encryption": b"\0" + bytes(28),
    "an unknown type": b"\x1e\0",
    "another unknown type": b"\x1f\0",
    "a step without a type": b"\x10\0",
    "a number of eleven bytes": b"\x16" + b"\x80" * 10 + b"\0\0",
    "a length of eleven bytes": b"\x18\x81" + b"\x80" * 9 + b"\0x\0",
    "a row count of eleven bytes": b"\x36\xf8" + b"\x80" * 9 + b"\0\0",
    "a number of only high bytes": b"\x16" + b"\xff" * 1000,
    "a row count of more than 64 bits": b"\x36" + b"\xfe" * 9 + b"\x02\0",
    "a row count below zero": b"\x36\x01\0",
    "a row count that is a text": b"\x38\x01x\0",
    "a row count that is an i32": b"\x35\x78\0",
    "a length beyond the end": b"\x18\x05abc\0",
    "a length beyond everything": b"\x18" + b"\xff" * 9 + b"\x01abc\0",
    "a list beyond the end": b"\x19\xf6" + MANY + b"\0" * 100,
    "a list of structures beyond the end": b"\x19\xfc" + MANY + b"\0" * 100,
    "a list of doubles cut off": b"\x19\x57" + bytes(8) + b"\0",
    "a list of an unknown type": b"\x19\x1e\0\0",
    "a list of stops": b"\x19\x20\0\0\0",
    "a list without a header": b"\x19",
    "a map beyond the end": b"\x1b" + MANY + b"\x88" + b"\0" * 100,
    "a map of an unknown type": b"\x1b\x01\xee\0\0\0",
    "row groups beyond the end": row_groups(b"\xfc" + MANY + b"\0" * 100),
    "row groups that are a text": b"\x48\x01x\0",
    "row groups that are numbers": row_groups(b"\x26\0\0"),
    "row groups that are a set": b"\x4a\x1c\0\0",
    "columns beyond the end": row_groups(b"\x1c\x19\xfc" + MANY + b"\0" * 100),
    "columns that are numbers": row_groups(b"\x1c\x19\x16\0\0"),
    "a field number of more than 16 bits": b"\x01" + varint(2**17) + b"\0",
    "field numbers that grow beyond 16 bits": b"\x01" + signed_varint(32767) + b"\x11\0",
    "lists in lists": b"\x19" + b"\x19" * (4 * MIB),
    "structures in structures": b"\x1c" * (4 * MIB),
    "structures in lists in structures": b"\x19\x1c" * (2 * MIB),
    "maps in maps": b"\x1b" + b"\x01\xbb" * (2 * MIB),
    "a chunk of structures": row_groups(b"\x1c\x19\x1c" + b"\x1c" * (4 * MIB)),
}


@pytest.mark.parametrize("footer", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_corrupt_and_take_no_room(footer: bytes) -> None:
    # So that the patterns are there: they are made once, and not for this footer.
    strip_column_index_info(row_groups(b"\x1c\x19\x1c\x1c\0\0\0"))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFooter) as caught:
            parse_legacy_and_upgrade(footer, ROWS, on="t/a.parquet")
        with pytest.raises(CorruptFooter):
            strip_column_index_info(footer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith("t/a.parquet: the footer")
    assert peak < MIB


@pytest.mark.parametrize("name", [name for name in HOSTILE if MANY in HOSTILE[name]])
def test_a_size_beyond_the_end_is_told_before_anything_is_read(name: str) -> None:
    with pytest.raises(CorruptFooter, match="more than it has bytes"):
        parse_legacy_and_upgrade(HOSTILE[name], ROWS)


def test_a_number_may_have_ten_bytes() -> None:
    footer = b"\x18\x81" + b"\x80" * 8 + b"\0x" + b"\x26" + padded(signed_varint(ROWS), 9) + b"\0"
    assert len(padded(signed_varint(ROWS), 9)) == 10
    assert read_num_rows(footer) == ROWS
    assert parse_legacy_and_upgrade(footer, ROWS) == footer


def test_structures_may_be_nested_as_deep_as_thrift_reads_them() -> None:
    for depth, corrupt in ((60, False), (80, True)):
        footer = b"\xf9" + b"\x19" * depth + b"\x16\2" + b"\0"
        if corrupt:
            with pytest.raises(CorruptFooter, match="nested"):
                strip_column_index_info(footer)
        else:
            assert strip_column_index_info(footer) is footer


def test_what_is_broken_at_the_end_of_many_chunks_is_found() -> None:
    # Each is of the usual shape up to its last byte, so that whoever guesses has to begin again.
    text = b"\x18\x3f" + b"x" * 63
    chunk = b"\x26\0\x1c" + (b"\x19\x4c" + (text * 60 + b"\0") * 4) * 4 + b"\0\x16\0\x15\0\x31\0"
    count = 4 * MIB // len(chunk)
    chunks = b"\x1c\x19\xfc" + varint(count) + chunk * count
    done = strip_column_index_info(row_groups(chunks + b"\0"))
    assert done == row_groups(
        b"\x1c\x19\xfc" + varint(count) + chunk.replace(b"\x16\0\x15\0\x31\0", b"\x51\0") * count + b"\0"
    )
    with pytest.raises(CorruptFooter):
        strip_column_index_info(row_groups(chunks[:-2] + b"\x1e\0"))


# --- versions, files and PyArrow -------------------------------------------------


def test_each_version_is_brought_up_to_date_and_no_other_is_known(real: dict[str, bytes]) -> None:
    footer = real["flat"]
    assert upgraded(footer, FOOTER_VERSION, ROWS) is footer
    # Whatever it is: a footer of today's version is not looked at.
    assert upgraded(b"?", 2, ROWS) == b"?"
    assert upgraded(as_version_1(footer), LEGACY_FOOTER_VERSION, ROWS) == strip_column_index_info(footer)
    for version in (0, 3, -1, 2**40):
        with pytest.raises(UnknownFooterVersion, match=f"version {version},") as caught:
            upgraded(footer, version, ROWS, on="t/a.parquet")
        assert caught.value.on == "t/a.parquet"


def test_an_upgrade_that_fails_names_the_file() -> None:
    with pytest.raises(CorruptFooter) as caught:
        upgraded(b"\x15", 1, ROWS, on="t/a.parquet")
    assert str(caught.value) == "t/a.parquet: the footer ends too early. Record the footer again from the file"


def test_the_footer_of_a_file_is_found_from_its_last_bytes() -> None:
    file = parquet(flat(4))
    data, footer = split(file)
    for tail in (file[-8:], file[-100:], file):
        place = footer_of_tail(tail, len(file))
        assert place == FooterPlace(len(data), len(footer))
        assert file[place.offset : place.offset + place.length] == footer
    assert footer_of_tail(as_parquet_file(b"\0"), 13) == (4, 1)


TAILS: dict[str, tuple[bytes, int, str]] = {
    "too little": (b"\1\0\0PAR1", 100, "too short"),
    "nothing": (b"", 0, "too short"),
    "two magics and a length": (b"\0\0\0\0PAR1", 11, "too short"),
    "another magic": (b"\1\0\0\0PAR2", 100, "b'PAR2'"),
    "an encrypted footer": (b"\1\0\0\0PARE", 100, "encrypted"),
    "no length": (b"\0\0\0\0PAR1", 100, "empty"),
    "one byte too long": (struct.pack("<I", 89) + b"PAR1", 100, "89 bytes, and the file has only 100"),
    "far too long": (b"\xff\xff\xff\xffPAR1", 100, "4294967295 bytes"),
}


@pytest.mark.parametrize(("tail", "size", "reason"), TAILS.values(), ids=TAILS.keys())
def test_the_end_of_what_is_no_parquet_file_is_refused(tail: bytes, size: int, reason: str) -> None:
    with pytest.raises(CorruptFooter, match=reason) as caught:
        footer_of_tail(tail, size, on="t/a.parquet")
    assert caught.value.on == "t/a.parquet"
    assert footer_of_tail(struct.pack("<I", 88) + b"PAR1", 100) == FooterPlace(4, 88)


def test_a_footer_alone_is_a_file_that_pyarrow_opens(real: dict[str, bytes], tmp_path: Path) -> None:
    for footer in real.values():
        file = as_parquet_file(footer)
        assert split(file) == (b"PAR1", footer)
        assert pq.read_metadata(pa.BufferReader(file)).equals(open_footer(footer))


@pytest.mark.parametrize("footer", [b"", b"\0", b"\xff" * 40, b"\x15\4\x19", b"PAR1"], ids=ascii)
def test_what_pyarrow_cannot_open_is_corrupt(footer: bytes) -> None:
    with pytest.raises(CorruptFooter, match="cannot be opened") as caught:
        open_footer(footer, on="t/a.parquet")
    assert caught.value.on == "t/a.parquet"
    assert "\n" not in str(caught.value)


def test_a_legacy_footer_does_not_open_before_its_upgrade(real: dict[str, bytes]) -> None:
    legacy = as_version_1(real["flat"])
    with pytest.raises(CorruptFooter):
        open_footer(legacy)
    assert open_footer(upgraded(legacy, 1, ROWS)).num_rows == ROWS
