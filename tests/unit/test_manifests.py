"""Manifests are written from rows of the registry, and PyIceberg and DuckDB read from them what there is."""

from __future__ import annotations

import importlib
import json
import math
import struct
import tracemalloc
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyiceberg.avro.file import AvroFile
from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.expressions.parser import parse
from pyiceberg.expressions.visitors import _InclusiveMetricsEvaluator
from pyiceberg.io.pyarrow import StatsAggregator
from pyiceberg.manifest import (
    UNASSIGNED_SEQ,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable
from pyiceberg.table.metadata import TableMetadataV2
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.transforms import parse_transform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from lakebook.errors import InvalidInput, InvalidPartitioning, ObjectTruncated
from lakebook.iceberg.bounds import ColumnBounds, encode, encode_iceberg, to_iceberg
from lakebook.iceberg.file_io import WarehouseIO
from lakebook.iceberg.manifests import (
    DATA,
    DELETES,
    FANOUT,
    FILES_PER_MANIFEST,
    MOST_MERGED,
    ListedFile,
    ManifestLists,
    data_file,
    entries_of,
    live_entries,
    merged,
    read_manifest_list,
    to_merge,
    without,
    write_manifest_list,
    write_manifests,
)
from lakebook.iceberg.schemas import arrow_schema
from lakebook.iceberg.statistics import column_stats, partition_stats
from lakebook.registry.file_stats import ColumnStats
from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse

ADDED, EXISTING, DELETED = ManifestEntryStatus.ADDED, ManifestEntryStatus.EXISTING, ManifestEntryStatus.DELETED
PATH_FIELD = 2_147_483_546
TYPES: dict[str, PrimitiveType] = {
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "decimal(9, 2)": DecimalType(9, 2),
    "decimal(38, 10)": DecimalType(38, 10),
    "date": DateType(),
    "time": TimeType(),
    "timestamp": TimestampType(),
    "timestamptz": TimestamptzType(),
    "string": StringType(),
    "uuid": UUIDType(),
    "binary": BinaryType(),
    "fixed[3]": FixedType(3),
}
# Few different characters, so that texts differ late; the first of the halves of pairs comes after one of them.
TEXTS = st.text(alphabet="a\ud7ff\ue000\U0010ffff", max_size=20)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "decimal(9, 2)": st.decimals(-9999999, 9999999, places=2),
    "decimal(38, 10)": st.decimals(-(10**18), 10**18, places=10),
    "date": st.dates(),
    "time": st.times(),
    "timestamp": st.datetimes(),
    "timestamptz": st.datetimes(timezones=st.just(UTC)),
    "string": TEXTS,
    "uuid": st.uuids(),
    "binary": st.binary(max_size=20),
    "fixed[3]": st.binary(min_size=3, max_size=3),
}
SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "name", StringType()),
    NestedField(3, "ratio", DoubleType()),
    NestedField(4, "place", StructType(NestedField(5, "city", StringType()))),
    NestedField(6, "tags", ListType(7, StringType(), element_required=False)),
    schema_id=1,
)
UNPARTITIONED = UNPARTITIONED_PARTITION_SPEC
modest = settings(max_examples=15, deadline=None)


class Place:
    """A warehouse with new locations in it."""

    def __init__(self, folder: Path) -> None:
        self.store = ObjectStore(Warehouse(str(folder)))
        self.io = WarehouseIO(self.store, durable=False)
        self.locations = (self.store.uri(f"metadata/{number}.avro") for number in count())

    def new(self) -> str:
        return next(self.locations)

    def written(self) -> set[str]:
        return {item.path for item in self.store.list()}

    def added(
        self, files: Sequence[ListedFile], snapshot: int, spec: PartitionSpec = UNPARTITIONED, schema: Schema = SCHEMA
    ) -> ManifestFile:
        (manifest,) = write_manifests(self.io, self.locations, spec, schema, snapshot, files)
        return manifest

    def listed(self, manifests: Sequence[ManifestFile], snapshot: int, sequence: int) -> list[ManifestFile]:
        location = self.new()
        write_manifest_list(self.io, location, snapshot, None, sequence, manifests)
        return read_manifest_list(self.io, location)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "warehouse")


def listed_file(name: str, **changes: Any) -> ListedFile:
    return replace(ListedFile(f"file:///w/{name}.parquet", 100, 10, DATA, 0, Record()), **changes)


def paths(entries: Iterator[ManifestEntry]) -> list[str]:
    return [entry.data_file.file_path.removeprefix("file:///w/").removesuffix(".parquet") for entry in entries]


def told(entry: ManifestEntry) -> tuple[str, ManifestEntryStatus, int | None, int | None, int | None]:
    (name,) = paths(iter([entry]))
    return name, entry.status, entry.snapshot_id, entry.sequence_number, entry.file_sequence_number


def stats_of(field_id: int, kind: str, lower: Any, upper: Any, nans: int | None = 0) -> ColumnStats:
    low, high = (None if end is None else encode(kind, end) for end in (lower, upper))
    return column_stats(field_id, kind, ColumnBounds(low, high, 10, 1, nans), is_exact=True, column_size=77)


def bounds_of(kind: str, lower: Any, upper: Any, nans: int | None = 0) -> tuple[bytes | None, bytes | None]:
    schema = Schema(NestedField(1, "value", TYPES[kind]))
    made = data_file(listed_file("x", stats=[stats_of(1, kind, lower, upper, nans)]), schema)
    return (made.lower_bounds or {}).get(1), (made.upper_bounds or {}).get(1)


# --- bounds --------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_an_encoded_value_has_the_form_that_pyiceberg_writes(kind: str) -> None:
    @modest
    @given(VALUES[kind])
    def check(value: Any) -> None:
        encoded = encode(kind, value)
        data = to_iceberg(kind, encoded)
        # Of the two zeros one remains.
        assert data == to_bytes(TYPES[kind], value + 0.0 if isinstance(value, float) else value)
        assert encode_iceberg(kind, data) == encoded

    check()


@pytest.mark.parametrize(
    ("kind", "encoded"),
    [
        ("int", encode("long", 2**31)),
        ("date", encode("long", -(2**31) - 1)),
        ("float", encode("double", 0.1)),
        ("float", encode("double", 1e300)),
        ("double", b"\xff" * 8),
        ("long", b"\0"),
        ("boolean", b"\2"),
        ("uuid", b"\0"),
        ("decimal(9, 2)", b"\0"),
    ],
)
def test_what_is_no_encoded_value_has_no_form_and_is_no_bound(kind: str, encoded: bytes) -> None:
    with pytest.raises(InvalidInput):
        to_iceberg(kind, encoded)
    schema = Schema(NestedField(1, "value", TYPES[kind]))
    column = ColumnStats(1, encoded, encoded, True, 10, 0, 0, None, 0, 0)
    made = data_file(listed_file("x", stats=[column]), schema)
    assert not made.lower_bounds
    assert not made.upper_bounds
    assert made.value_counts == {1: 10}


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_the_bounds_of_a_file_enclose_its_values(kind: str) -> None:
    @modest
    @given(st.lists(VALUES[kind], min_size=1))
    def check(values: list[Any]) -> None:
        lower, upper = bounds_of(kind, min(values), max(values))
        encoded = sorted(encode(kind, value) for value in values)
        assert lower is None or (encode_iceberg(kind, lower) or b"") <= encoded[0]
        assert upper is None or (encode_iceberg(kind, upper) or b"") >= encoded[-1]
        if kind not in ("string", "uuid", "binary"):
            assert lower is not None
            assert upper is not None

    check()


@pytest.mark.parametrize(("kind", "physical"), [("string", "BYTE_ARRAY"), ("binary", "BYTE_ARRAY")])
def test_long_values_are_cut_as_pyiceberg_cuts_them(kind: str, physical: str) -> None:
    @modest
    @given(st.text(alphabet="aé\U00010000", max_size=40))
    @example("a" * 16)
    @example("a" * 17)
    def check(text: str) -> None:
        value = text if kind == "string" else text.encode()
        theirs = StatsAggregator(TYPES[kind], physical, 16)
        theirs.update_min(value)
        theirs.update_max(value)
        assert bounds_of(kind, value, value) == (theirs.min_as_bytes(), theirs.max_as_bytes())

    check()


def test_a_cut_upper_bound_is_raised_or_left_out() -> None:
    last, before_pairs = "\U0010ffff", "\ud7ff"
    assert bounds_of("string", "a", "b" + last * 20)[1] == b"c"
    assert bounds_of("string", "a", "b" * 15 + before_pairs + "x")[1] == ("b" * 15 + "\ue000").encode()
    assert bounds_of("string", "a", last * 20) == (b"a", None)
    assert bounds_of("string", "a", last * 16) == (b"a", (last * 16).encode())
    assert bounds_of("binary", b"a", b"b" + b"\xff" * 20)[1] == b"c"
    assert bounds_of("binary", b"a", b"\xff" * 20) == (b"a", None)


def test_a_text_that_ends_within_a_character_is_no_bound() -> None:
    column = ColumnStats(2, b"a\xc3", b"b\xc3", False, 10, 0, 0, None, 0, 0)
    made = data_file(listed_file("x", stats=[column]), SCHEMA)
    assert not made.lower_bounds
    assert not made.upper_bounds


def test_bounds_that_no_value_is_between_are_left_out() -> None:
    assert bounds_of("long", 7, 3) == (None, None)
    assert bounds_of("long", None, 3) == (None, struct.pack("<q", 3))
    assert bounds_of("long", 7, None) == (struct.pack("<q", 7), None)


@pytest.mark.parametrize(("kind", "form"), [("float", "<f"), ("double", "<d")])
def test_a_column_that_may_have_nan_is_open_above(kind: str, form: str) -> None:
    low, high = struct.pack(form, 1.5), struct.pack(form, 2.5)
    assert bounds_of(kind, 1.5, 2.5, 0) == (low, high)
    assert bounds_of(kind, 1.5, 2.5, 3) == (low, None)
    assert bounds_of(kind, 1.5, 2.5, None) == (low, None)


@pytest.mark.parametrize(("kind", "form"), [("float", "<f"), ("double", "<d")])
def test_both_zeros_are_between_bounds_of_zero(kind: str, form: str) -> None:
    assert bounds_of(kind, 0.0, -0.0) == (struct.pack(form, -0.0), struct.pack(form, 0.0))


def as_java_has_it(value: uuid.UUID) -> tuple[int, int]:
    most, least = struct.unpack(">qq", value.bytes)
    return most, least


# Halves at the ends of their signs, so that the orders differ.
HALVES = st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1])
UUIDS = st.builds(lambda most, least: uuid.UUID(int=most << 64 | least), HALVES, HALVES)


@settings(max_examples=100, deadline=None)
@given(st.lists(UUIDS | st.uuids(), min_size=1, max_size=4))
def test_bounds_of_uuids_are_right_in_the_order_of_bytes_and_in_that_of_java(values: list[uuid.UUID]) -> None:
    lower, upper = bounds_of("uuid", min(values), max(values))
    if lower is not None:
        low = uuid.UUID(bytes=lower)
        assert all(low <= value and as_java_has_it(low) <= as_java_has_it(value) for value in values)
    if upper is not None:
        high = uuid.UUID(bytes=upper)
        assert all(high >= value and as_java_has_it(high) >= as_java_has_it(value) for value in values)


def test_uuids_that_begin_with_the_time_have_bounds() -> None:
    first, last = uuid.UUID("0190c5e4-0000-7000-8000-000000000000"), uuid.UUID("0190c5e5-0000-7000-8000-000000000000")
    lower, upper = bounds_of("uuid", first, last)
    assert lower is not None
    assert upper is not None
    assert lower < first.bytes < last.bytes < upper
    assert bounds_of("uuid", first, first) == (first.bytes, first.bytes)


def test_a_file_has_what_is_known_of_the_columns_that_the_schema_has() -> None:
    stats = [
        stats_of(1, "long", -5, 7),
        stats_of(3, "double", 0.5, 1.5, 4),
        stats_of(5, "string", "a" * 20, "b" * 20),
        replace(stats_of(2, "string", None, None), value_count=None, null_count=None, column_size=None),
        stats_of(7, "string", "in a list", "in a list"),
        stats_of(99, "long", 1, 1),
        *partition_stats(PartitionSpec(PartitionField(1, 1000, parse_transform("identity"), "id")), SCHEMA, Record(3)),
    ]
    made = data_file(listed_file("x", stats=stats, sort_order_id=4, spec_id=3), SCHEMA)
    assert (made.content, made.file_path, made.file_format) == (0, "file:///w/x.parquet", FileFormat.PARQUET)
    assert (made.record_count, made.file_size_in_bytes, made.sort_order_id, made.spec_id) == (10, 100, 4, 3)
    assert made.column_sizes == {1: 77, 3: 77, 5: 77}
    assert made.value_counts == {1: 10, 3: 10, 5: 10}
    assert made.null_value_counts == {1: 1, 3: 1, 5: 1}
    assert made.nan_value_counts == {3: 4}
    assert made.lower_bounds == {1: struct.pack("<q", -5), 3: struct.pack("<d", 0.5), 5: b"a" * 16}
    assert made.upper_bounds == {1: struct.pack("<q", 7), 5: b"b" * 15 + b"c"}


def test_bounds_have_the_type_that_the_column_has_now() -> None:
    stats = [stats_of(1, "int", -5, 7), stats_of(2, "float", 0.5, 1.5), stats_of(3, "decimal(9, 2)", 1, 2)]
    now = Schema(
        NestedField(1, "a", LongType()), NestedField(2, "b", DoubleType()), NestedField(3, "c", DecimalType(20, 2))
    )
    made = data_file(listed_file("x", stats=stats), now)
    assert made.lower_bounds == {1: struct.pack("<q", -5), 2: struct.pack("<d", 0.5), 3: b"\x64"}
    assert made.upper_bounds == {1: struct.pack("<q", 7), 2: struct.pack("<d", 1.5), 3: b"\x00\xc8"}


def test_position_deletes_of_one_data_file_name_it_whole() -> None:
    location = f"file:///w/{'x' * 100}.parquet"
    file = listed_file("d", content=DELETES, referenced=location, sort_order_id=1, stats=[stats_of(1, "long", 1, 1)])
    made = data_file(file, SCHEMA)
    assert (made.content, made.sort_order_id) == (DataFileContent.POSITION_DELETES, None)
    assert made.lower_bounds == made.upper_bounds == {PATH_FIELD: location.encode()}
    assert not made.value_counts
    assert not data_file(replace(file, referenced=None), SCHEMA).lower_bounds


# --- manifests -----------------------------------------------------------------


def test_added_files_are_read_back_by_pyiceberg(place: Place) -> None:
    stats = [stats_of(1, "long", -5, 7), stats_of(2, "string", "a", "b"), stats_of(3, "double", 0.5, 1.5)]
    files = [listed_file(f"f{number}", rows=number, stats=stats) for number in range(1, 1203)]
    (manifest,) = place.listed([place.added(files, 11)], 11, 5)
    assert (manifest.content, manifest.partition_spec_id, manifest.added_snapshot_id) == (ManifestContent.DATA, 0, 11)
    assert (manifest.added_files_count, manifest.existing_files_count, manifest.deleted_files_count) == (1202, 0, 0)
    assert (manifest.added_rows_count, manifest.existing_rows_count) == (sum(range(1, 1203)), 0)
    assert (manifest.sequence_number, manifest.min_sequence_number) == (5, 5)
    assert manifest.manifest_length == place.store.size(place.store.relative(manifest.manifest_path))
    theirs = manifest.fetch_manifest_entry(place.io)
    assert [told(entry) for entry in theirs] == [(f"f{number}", ADDED, 11, 5, 5) for number in range(1, 1203)]
    assert [told(entry) for entry in entries_of(place.io, manifest)] == [told(entry) for entry in theirs]
    wanted = data_file(files[0], SCHEMA)
    for entry in (theirs[0], next(entries_of(place.io, manifest))):
        assert dict(entry.data_file.value_counts) == wanted.value_counts
        assert (entry.data_file.lower_bounds, entry.data_file.upper_bounds) == (
            wanted.lower_bounds,
            wanted.upper_bounds,
        )
        assert entry.data_file.spec_id == 0
    least: Any = from_bytes(LongType(), theirs[0].data_file.lower_bounds[1])
    assert least == -5


def test_a_manifest_says_what_it_is(place: Place) -> None:
    for content, word in ((DATA, "data"), (DELETES, "deletes")):
        manifest = place.added([listed_file("x", content=content)], 1)
        assert manifest.content == content
        with AvroFile[Record](place.io.new_input(manifest.manifest_path)) as file:
            assert file.header.meta["content"] == word
            assert file.header.meta["format-version"] == "2"
            assert file.header.meta["schema-id"] == "1"
            assert file.header.meta["partition-spec-id"] == "0"
            assert json.loads(file.header.meta["partition-spec"]) == []
            assert Schema.model_validate_json(file.header.meta["schema"]) == SCHEMA


def test_no_files_make_no_manifest(place: Place) -> None:
    assert write_manifests(place.io, place.locations, UNPARTITIONED, SCHEMA, 1, iter(())) == []
    assert place.written() == set()


def test_many_files_make_several_manifests(place: Place) -> None:
    files = (listed_file(str(number)) for number in range(FILES_PER_MANIFEST + 1))
    found = write_manifests(place.io, place.locations, UNPARTITIONED, SCHEMA, 1, files)
    assert [manifest.added_files_count for manifest in found] == [FILES_PER_MANIFEST, 1]
    names = [name for manifest in found for name in paths(entries_of(place.io, manifest))]
    assert names == [str(number) for number in range(FILES_PER_MANIFEST + 1)]


def test_files_of_another_kind_do_not_fit_into_a_manifest(place: Place) -> None:
    for other in (listed_file("y", content=DELETES), listed_file("y", spec_id=1)):
        with pytest.raises(InvalidInput):
            place.added([listed_file("x"), other], 1)
    one, deletes = place.added([listed_file("x")], 1), place.added([listed_file("y", content=DELETES)], 1)
    before = place.written()
    with pytest.raises(InvalidInput):
        merged(place.io, place.new(), [one, deletes], UNPARTITIONED, SCHEMA, 2)
    with pytest.raises(InvalidInput):
        merged(place.io, place.new(), [one], PartitionSpec(spec_id=1), SCHEMA, 2)
    assert place.written() == before


def test_what_fails_leaves_no_file(place: Place) -> None:
    def files() -> Iterator[ListedFile]:
        yield from (listed_file(str(number)) for number in range(600))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_manifests(place.io, place.locations, UNPARTITIONED, SCHEMA, 1, files())
    manifest = place.added([listed_file("x")], 1)
    before = place.written()
    with pytest.raises(InvalidInput):
        write_manifest_list(place.io, place.new(), 2, 1, 2, [manifest])
    assert place.written() == before


def test_an_explicit_sequence_number_is_kept_and_the_least_one_is_listed(place: Place) -> None:
    files = [listed_file("old", sequence_number=3), listed_file("new"), listed_file("less old", sequence_number=4)]
    (manifest,) = place.listed([place.added(files, 11)], 11, 9)
    assert (manifest.sequence_number, manifest.min_sequence_number) == (9, 3)
    for found in (entries_of(place.io, manifest), iter(manifest.fetch_manifest_entry(place.io))):
        assert [told(entry)[3:] for entry in found] == [(3, 9), (9, 9), (4, 9)]
    (later,) = place.listed([place.added([listed_file("x", sequence_number=12), listed_file("y")], 11)], 11, 9)
    assert later.min_sequence_number == 9


def test_a_manifest_can_be_listed_again_with_another_sequence_number(place: Place) -> None:
    manifest = place.added([listed_file("x")], 11)
    assert place.listed([manifest], 11, 5)[0].sequence_number == 5
    assert manifest.sequence_number == UNASSIGNED_SEQ
    (again,) = place.listed([manifest], 11, 6)
    assert (again.sequence_number, again.min_sequence_number) == (6, 6)
    assert [told(entry)[3:] for entry in entries_of(place.io, again)] == [(6, 6)]


def test_a_list_tells_its_size_and_is_not_remembered(place: Place) -> None:
    manifests = place.listed([place.added([listed_file(str(number))], 1) for number in range(3)], 1, 1)
    location = place.new()
    size = write_manifest_list(place.io, location, 2, 1, 2, manifests)
    assert size == place.store.size(place.store.relative(location))
    found = read_manifest_list(place.io, location)
    assert found == manifests
    assert all(one is not other for one, other in zip(found, read_manifest_list(place.io, location), strict=True))
    with AvroFile[Record](place.io.new_input(location)) as file:
        meta = file.header.meta
    assert (meta["snapshot-id"], meta["parent-snapshot-id"], meta["sequence-number"]) == ("2", "1", "2")
    assert write_manifest_list(place.io, (empty := place.new()), 3, 2, 3, []) > 0
    assert read_manifest_list(place.io, empty) == []


def test_lists_that_are_kept_say_what_their_files_say_also_of_a_manifest_that_is_told_in_other_words(
    place: Place,
) -> None:
    lists = ManifestLists(place.io)
    manifest = place.added([listed_file("a")], 1)
    first, second, third = place.new(), place.new(), place.new()
    _, listed = lists.write(first, 1, None, 5, [manifest])
    other = ManifestFile(*listed[0]._data)
    other.min_sequence_number = 3
    lists.write(second, 2, 1, 6, [other])
    size, again = lists.write(third, 3, 2, 7, listed)
    assert size == place.store.size(place.store.relative(third))
    assert [item.min_sequence_number for item in (*again, *lists.read(second))] == [5, 3]
    for location in (first, second, third):
        # Two manifests are equal to PyIceberg if their paths are.
        found = read_manifest_list(place.io, location)
        assert [item._data for item in lists.read(location)] == [item._data for item in found]


def test_removed_files_are_deleted_and_the_others_exist_as_they_were(place: Place) -> None:
    files = [listed_file("a", sequence_number=2), listed_file("b", rows=3), listed_file("c", rows=5)]
    (first,) = place.listed([place.added(files, 11)], 11, 5)
    removed = ["file:///w/b.parquet", "file:///w/other.parquet"]
    rewritten, found = without(place.io, place.new(), first, UNPARTITIONED, SCHEMA, 12, removed)
    assert found == {"file:///w/b.parquet"}
    (second,) = place.listed([rewritten], 12, 6)
    assert (second.added_files_count, second.existing_files_count, second.deleted_files_count) == (0, 2, 1)
    assert (second.added_rows_count, second.existing_rows_count, second.deleted_rows_count) == (0, 15, 3)
    assert (second.sequence_number, second.min_sequence_number, second.added_snapshot_id) == (6, 2, 12)
    wanted = [("a", EXISTING, 11, 2, 5), ("b", DELETED, 12, 5, 5), ("c", EXISTING, 11, 5, 5)]
    assert [told(entry) for entry in entries_of(place.io, second)] == wanted
    theirs = second.fetch_manifest_entry(place.io, discard_deleted=False)
    assert [told(entry) for entry in theirs] == wanted
    assert paths(live_entries(place.io, second)) == ["a", "c"]

    rewritten, found = without(place.io, place.new(), second, UNPARTITIONED, SCHEMA, 13, {"file:///w/a.parquet"})
    (third,) = place.listed([rewritten], 13, 7)
    assert [told(entry)[:3] for entry in entries_of(place.io, third)] == [("a", DELETED, 13), ("c", EXISTING, 11)]
    assert third.min_sequence_number == 5


def test_a_manifest_that_has_none_of_the_removed_files_stays(place: Place) -> None:
    (manifest,) = place.listed([place.added([listed_file("a"), listed_file("b")], 11)], 11, 5)
    rewritten, _ = without(place.io, place.new(), manifest, UNPARTITIONED, SCHEMA, 12, {"file:///w/b.parquet"})
    (second,) = place.listed([rewritten], 12, 6)
    before = place.written()
    # The second is deleted there already.
    for removed in (set(), {"file:///w/x.parquet"}, {"file:///w/b.parquet"}):
        same, found = without(place.io, place.new(), second, UNPARTITIONED, SCHEMA, 13, removed)
        assert same is second
        assert found == set()
    assert place.written() == before


def test_merged_manifests_have_all_live_entries_in_order(place: Place) -> None:
    (one,) = place.listed([place.added([listed_file("a", rows=2), listed_file("b")], 11)], 11, 5)
    rewritten, _ = without(place.io, place.new(), one, UNPARTITIONED, SCHEMA, 12, {"file:///w/b.parquet"})
    other = place.added([listed_file("c", sequence_number=3)], 12)
    manifests = place.listed([rewritten, other], 12, 6)
    result = merged(place.io, place.new(), manifests, UNPARTITIONED, SCHEMA, 13)
    assert result is not None
    (found,) = place.listed([result], 13, 7)
    assert (found.added_files_count, found.existing_files_count, found.deleted_files_count) == (0, 2, 0)
    assert (found.existing_rows_count, found.sequence_number, found.min_sequence_number) == (12, 7, 3)
    wanted = [("a", EXISTING, 11, 5, 5), ("c", EXISTING, 12, 3, 6)]
    assert [told(entry) for entry in entries_of(place.io, found)] == wanted
    assert [told(entry) for entry in found.fetch_manifest_entry(place.io)] == wanted


def test_what_the_same_snapshot_added_and_deleted_stays_so_in_a_merged_manifest(place: Place) -> None:
    (old,) = place.listed([place.added([listed_file("a"), listed_file("b")], 11)], 11, 5)
    rewritten, _ = without(place.io, place.new(), old, UNPARTITIONED, SCHEMA, 12, {"file:///w/b.parquet"})
    new = place.added([listed_file("c"), listed_file("d", sequence_number=4), listed_file("e")], 12)
    assert [told(entry)[3] for entry in entries_of(place.io, new)] == [None, 4, None]
    new, found = without(place.io, place.new(), new, UNPARTITIONED, SCHEMA, 12, {"file:///w/e.parquet"})
    assert found == {"file:///w/e.parquet"}
    result = merged(place.io, place.new(), [rewritten, new], UNPARTITIONED, SCHEMA, 12)
    assert result is not None
    (manifest,) = place.listed([result], 12, 6)
    assert [told(entry) for entry in entries_of(place.io, manifest)] == [
        ("a", EXISTING, 11, 5, 5),
        ("b", DELETED, 12, 5, 5),
        ("c", ADDED, 12, 6, 6),
        ("d", ADDED, 12, 4, 6),
    ]
    assert (manifest.added_files_count, manifest.existing_files_count, manifest.min_sequence_number) == (2, 1, 4)


def test_manifests_without_live_files_merge_into_nothing(place: Place) -> None:
    (old,) = place.listed([place.added([listed_file("a")], 11)], 11, 5)
    rewritten, _ = without(place.io, place.new(), old, UNPARTITIONED, SCHEMA, 12, {"file:///w/a.parquet"})
    before = place.written()
    assert merged(place.io, place.new(), place.listed([rewritten], 12, 6), UNPARTITIONED, SCHEMA, 13) is None
    assert merged(place.io, place.new(), [], UNPARTITIONED, SCHEMA, 13) is None
    assert len(place.written() - before) == 1  # The list.


def test_many_entries_are_written_and_merged_in_little_memory(place: Place) -> None:
    stats = [stats_of(1, "long", 1, 2), stats_of(2, "string", "a", "b")]
    files = (listed_file(str(number), stats=stats) for number in range(2500))
    tracemalloc.start()
    manifests = place.listed(write_manifests(place.io, place.locations, UNPARTITIONED, SCHEMA, 1, files), 1, 1)
    result = merged(place.io, place.new(), manifests, UNPARTITIONED, SCHEMA, 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result is not None
    assert result.existing_files_count == 2500
    assert peak < 2_500_000


def test_a_manifest_or_list_that_is_not_whole_is_not_taken_for_one(place: Place) -> None:
    manifests = [place.added([listed_file(f"{part}-{number}") for number in range(700)], 1) for part in range(2)]
    location = place.new()
    write_manifest_list(place.io, location, 1, None, 1, manifests)
    for whole in (location, manifests[0].manifest_path):
        data = place.store.read(place.store.relative(whole))
        for end in (0, 100, len(data) - 1, len(data) - 40):
            short = place.new()
            place.store.put_new(place.store.relative(short), data[:end])
            with pytest.raises(ObjectTruncated):
                read_manifest_list(place.io, short) if whole == location else list(
                    entries_of(place.io, moved(manifests[0], short))
                )
    # The entries of another are as whole, but too few.
    with pytest.raises(ObjectTruncated):
        list(entries_of(place.io, moved(manifests[0], place.added([listed_file("x")], 1).manifest_path)))


def moved(manifest: ManifestFile, location: str) -> ManifestFile:
    return ManifestFile(location, *(manifest[position] for position in range(1, len(manifest))))


# --- partitions ----------------------------------------------------------------

FIVE, SEVEN = (uuid.UUID(f"90000000-0000-4000-8000-{number:012d}") for number in (5, 7))
A_UUID = uuid.UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7")
PARTITIONED = Schema(
    NestedField(1, "day", DateType(), required=True),
    NestedField(2, "at", TimestamptzType()),
    NestedField(3, "local", TimestampType()),
    NestedField(4, "price", DecimalType(9, 2)),
    NestedField(5, "key", UUIDType()),
    NestedField(6, "raw", BinaryType()),
    NestedField(7, "name", StringType()),
    NestedField(8, "hash", FixedType(3)),
    NestedField(9, "ratio", DoubleType()),
    NestedField(10, "id", LongType()),
    NestedField(11, "flag", BooleanType()),
    NestedField(12, "time", TimeType()),
    NestedField(13, "key 2", UUIDType()),
    NestedField(14, "price 2", DecimalType(9, 2)),
    NestedField(15, "hash 2", FixedType(3)),
    NestedField(16, "short", FloatType()),
    schema_id=1,
)
FIELDS: list[tuple[int, str, list[Any]]] = [
    (1, "identity", [date(2024, 2, 29).toordinal() - 719163, -1]),
    (2, "identity", [1_700_000_000_123_456, -5]),
    (3, "identity", [1_700_000_000_123_456, -5]),
    (4, "identity", [Decimal("-12.30"), Decimal("9999999.99")]),
    (5, "identity", [A_UUID, FIVE]),
    (6, "identity", [b"\x00\xff", b""]),
    (7, "identity", ["ä/名前", ""]),
    (8, "identity", [b"abc", b"\xff\xff\xff"]),
    (9, "identity", [1.5, -math.inf]),
    (10, "identity", [2**63 - 1, -(2**63)]),
    (11, "identity", [True, False]),
    (12, "identity", [86_399_999_999, 0]),
    (13, "identity", [A_UUID, SEVEN]),
    (14, "identity", [Decimal("0.00"), Decimal("1.00")]),
    (15, "identity", [b"xyz", b"\x00\x00\x00"]),
    (16, "identity", [0.5, 0.25]),
    (10, "bucket[16]", [3, 15]),
    (5, "bucket[7]", [0, 6]),
    (7, "truncate[3]", ["ä/名", ""]),
    (4, "truncate[50]", [Decimal("-12.50"), Decimal("0.00")]),
    (6, "truncate[1]", [b"\x00", b""]),
    (10, "truncate[10]", [-10, 20]),
    (2, "year", [54, -1]),
    (2, "month", [650, -1]),
    (2, "day", [19_782, -1]),
    (2, "hour", [474_768, -1]),
    (1, "day", [19_782, -1]),
    (1, "void", [None, None]),
]


def spec_of(*fields: tuple[int, str], spec_id: int = 3) -> PartitionSpec:
    made = [
        PartitionField(source, 1000 + number, parse_transform(transform), f"field {number}")
        for number, (source, transform) in enumerate(fields)
    ]
    return PartitionSpec(*made, spec_id=spec_id)


EVERY_FIELD = spec_of(*((source, transform) for source, transform, _ in FIELDS))


def partitioned(place: Place) -> tuple[list[Record], ManifestFile]:
    """Files of three partitions: the first values, the second ones, and nulls."""
    records = [Record(*(values[number] for *_, values in FIELDS)) for number in range(2)]
    records.append(Record(*([None] * len(FIELDS))))
    files = [listed_file(str(number), partition=record, spec_id=3) for number, record in enumerate(records)]
    return records, place.added(files, 11, EVERY_FIELD, PARTITIONED)


def values_of(record: Record) -> list[tuple[type, Any]]:
    return [(type(record[position]), record[position]) for position in range(len(record))]


def test_partitions_of_every_type_come_back_and_survive_merging(place: Place) -> None:
    records, manifest = partitioned(place)
    wanted = [values_of(record) for record in records]
    (first,) = place.listed([manifest], 11, 5)
    second = merged(place.io, place.new(), [first], EVERY_FIELD, PARTITIONED, 12)
    assert second is not None
    # With one name changed the Avro schema differs, and the entries are encoded anew.
    renamed = PartitionSpec(
        *EVERY_FIELD.fields[:-1], EVERY_FIELD.fields[-1].model_copy(update={"name": "x"}), spec_id=3
    )
    third = merged(place.io, place.new(), place.listed([second], 12, 6), renamed, PARTITIONED, 13)
    assert third is not None
    for found in (first, *place.listed([second], 12, 6), *place.listed([third], 13, 7)):
        assert [values_of(entry.data_file.partition) for entry in entries_of(place.io, found)] == wanted
        theirs = found.fetch_manifest_entry(place.io)
        assert [values_of(entry.data_file.partition) for entry in theirs] == wanted
        assert {entry.data_file.spec_id for entry in theirs} == {3}
        assert found.partitions == first.partitions


def test_partitions_are_summarized_as_pyiceberg_does_it(place: Place) -> None:
    records, manifest = partitioned(place)
    (found,) = place.listed([manifest], 11, 5)
    # All optional: PyIceberg takes a partition by a required column for one that is never null.
    fields = [field.model_copy(update={"required": False}) for field in PARTITIONED.fields]
    schema = Schema(*(NestedField(f.field_id, f.name, f.field_type, required=False) for f in fields))
    with write_manifest(2, EVERY_FIELD, schema, place.io.new_output(place.new()), 11, "deflate") as writer:
        for record in records:
            file = data_file(listed_file("x", partition=record), schema)
            writer.add_entry(ManifestEntry.from_args(status=ADDED, snapshot_id=11, data_file=file))
    theirs = writer.to_manifest_file().partitions
    assert theirs is not None
    assert found.partitions is not None
    for (source, transform, values), one, other in zip(FIELDS, theirs, found.partitions, strict=True):
        if source in (5, 13) and transform == "identity":
            assert other.contains_null
            assert other.lower_bound is not None
            assert other.upper_bound is not None
            assert other.lower_bound <= min(values).bytes < max(values).bytes <= other.upper_bound
        else:
            assert one == other


def test_a_summary_of_zeros_has_both(place: Place) -> None:
    spec = spec_of((9, "identity"))
    files = [listed_file(name, partition=Record(zero), spec_id=3) for name, zero in (("a", 0.0), ("b", -0.0))]
    summaries = place.added(files, 1, spec, PARTITIONED).partitions
    assert summaries is not None
    assert (summaries[0].contains_null, summaries[0].contains_nan) == (False, False)
    assert (summaries[0].lower_bound, summaries[0].upper_bound) == (struct.pack("<d", -0.0), struct.pack("<d", 0.0))


@pytest.mark.parametrize(
    ("source", "values"),
    [(5, [uuid.UUID(int=1), uuid.UUID(int=2**127)]), (5, [uuid.UUID(int=0), FIVE]), (9, [1.5, math.nan])],
)
def test_where_no_summary_is_right_for_every_engine_there_is_none(place: Place, source: int, values: list[Any]) -> None:
    spec = spec_of((source, "identity"), (10, "identity"))
    files = [
        listed_file(str(number), partition=Record(value, 7), spec_id=3) for number, value in enumerate([*values, None])
    ]
    (manifest,) = place.listed([place.added(files, 1, spec, PARTITIONED)], 1, 1)
    assert manifest.partitions is None
    # A missing bound is said of nulls alone.
    only_nulls = place.added([listed_file("x", partition=Record(None, 7), spec_id=3)], 1, spec, PARTITIONED)
    assert only_nulls.partitions is not None
    assert (only_nulls.partitions[0].contains_null, only_nulls.partitions[0].lower_bound) == (True, None)


def test_types_of_bytes_have_names_of_their_own(place: Place) -> None:
    _, manifest = partitioned(place)
    with AvroFile[Record](place.io.new_input(manifest.manifest_path)) as file:
        names = list(named_types(json.loads(file.header.meta["avro.schema"])))
    assert len(names) == len(set(names))


def named_types(described: Any) -> Iterator[str]:
    if isinstance(described, dict):
        if described.get("type") in ("record", "fixed"):
            yield described["name"]
        for part in described.values():
            yield from named_types(part)
    elif isinstance(described, list):
        for part in described:
            yield from named_types(part)


def test_a_partition_by_a_column_that_was_promoted_is_rewritten_in_its_new_type(place: Place) -> None:
    old = Schema(NestedField(1, "id", IntegerType()), NestedField(2, "price", DecimalType(9, 2)), schema_id=1)
    new = Schema(NestedField(1, "id", LongType()), NestedField(2, "price", DecimalType(20, 2)), schema_id=2)
    spec = spec_of((1, "identity"), (2, "identity"))
    file = listed_file("x", partition=Record(7, Decimal("1.50")), spec_id=3)
    (manifest,) = place.listed([place.added([file], 11, spec, old)], 11, 5)
    result = merged(place.io, place.new(), [manifest], spec, new, 12)
    assert result is not None
    assert [entry.data_file.partition for entry in entries_of(place.io, result)] == [Record(7, Decimal("1.50"))]
    assert result.partitions is not None
    assert result.partitions[0].lower_bound == struct.pack("<q", 7)


def test_a_spec_of_a_dropped_column_needs_a_schema_that_has_it(place: Place) -> None:
    spec = spec_of((1, "identity"))
    file = listed_file("x", partition=Record(7), spec_id=3)
    (manifest,) = place.listed([place.added([file], 11, spec, SCHEMA)], 11, 5)
    dropped = Schema(*SCHEMA.fields[1:], schema_id=2)
    before = place.written()
    with pytest.raises(InvalidPartitioning):
        merged(place.io, place.new(), [manifest], spec, dropped, 12)
    assert place.written() == before
    with_it = Schema(*dropped.fields, SCHEMA.fields[0], schema_id=2)
    result = merged(place.io, place.new(), [manifest], spec, with_it, 12)
    assert result is not None
    assert [entry.data_file.partition for entry in result.fetch_manifest_entry(place.io)] == [Record(7)]


# --- tables --------------------------------------------------------------------

TABLE = Schema(
    NestedField(1, "id", LongType()),
    NestedField(2, "name", StringType()),
    NestedField(3, "day", DateType()),
    schema_id=1,
)
BY_DAY = PartitionSpec(PartitionField(3, 1000, parse_transform("identity"), "day"), spec_id=1)
DAYS = (19_000, 19_001, 19_002)


def parquet(place: Place, path: str, rows: pa.Table) -> int:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink)
    data = sink.getvalue().to_pybytes()
    place.store.put_new(path, data)
    return len(data)


def day_file(place: Place, number: int) -> ListedFile:
    """A file of ten rows of one day."""
    day, first = DAYS[number % len(DAYS)], number * 10
    ids = list(range(first, first + 10))
    names = [f"a name that is longer than a bound, and then {value:03d}" for value in ids]
    rows = pa.table(
        [ids, names, [day] * 10], schema=pa.schema([("id", pa.int64()), ("name", pa.string()), ("day", pa.int32())])
    )
    rows = rows.set_column(2, "day", rows["day"].cast(pa.date32())).cast(arrow_schema(TABLE))
    path = f"data/{number}.parquet"
    size = parquet(place, path, rows)
    stats = [
        stats_of(1, "long", first, first + 9),
        stats_of(2, "string", names[0], names[-1]),
        stats_of(3, "date", day, day),
    ]
    return ListedFile(place.store.uri(path), size, 10, DATA, 1, Record(day), stats)


def delete_file(place: Place, name: str, file: ListedFile, positions: list[int]) -> ListedFile:
    fields = [
        pa.field("file_path", pa.string(), False, {"PARQUET:field_id": str(PATH_FIELD)}),
        pa.field("pos", pa.int64(), False, {"PARQUET:field_id": str(PATH_FIELD - 1)}),
    ]
    rows = pa.table([[file.location] * len(positions), positions], schema=pa.schema(fields))
    path = f"data/{name}-deletes.parquet"
    size = parquet(place, path, rows)
    return ListedFile(place.store.uri(path), size, len(positions), DELETES, 1, file.partition, referenced=file.location)


def metadata_of(place: Place, list_location: str, snapshot: int, sequence: int) -> Path:
    metadata = TableMetadataV2.model_validate(
        {
            "location": place.store.uri(),
            "table-uuid": str(uuid.uuid4()),
            "last-updated-ms": 1_700_000_000_000,
            "last-column-id": 3,
            "last-sequence-number": sequence,
            "schemas": [TABLE],
            "current-schema-id": 1,
            "partition-specs": [BY_DAY],
            "default-spec-id": 1,
            "last-partition-id": 1000,
            "sort-orders": [UNSORTED_SORT_ORDER],
            "default-sort-order-id": 0,
            "snapshots": [
                {
                    "snapshot-id": snapshot,
                    "sequence-number": sequence,
                    "timestamp-ms": 1_700_000_000_000,
                    "manifest-list": list_location,
                    "summary": {"operation": "append"},
                    "schema-id": 1,
                }
            ],
            "current-snapshot-id": snapshot,
            "refs": {"main": {"snapshot-id": snapshot, "type": "branch"}},
        }
    )
    path = f"metadata/v{snapshot}.metadata.json"
    place.store.put_new(path, metadata.model_dump_json().encode())
    found = place.store.local_path(path)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def duck() -> Iterator[Any]:
    extensions: Any = importlib.import_module("duckdb_extensions")
    with duckdb.connect() as connection:
        for name in ("avro", "iceberg"):
            extensions.import_extension(name, con=connection)
            connection.execute(f"LOAD {name}")
        connection.execute("SET TimeZone = 'UTC'")
        yield connection


def test_pyiceberg_and_duckdb_read_a_table_from_its_manifests(place: Place, duck: Any) -> None:
    files = [day_file(place, number) for number in range(6)]
    data = place.added(files[:4], 1, BY_DAY, TABLE)
    manifests = place.listed([data], 1, 1)
    rewritten, found = without(place.io, place.new(), manifests[0], BY_DAY, TABLE, 2, [files[1].location])
    assert len(found) == 1
    manifests = place.listed([rewritten, place.added(files[4:], 2, BY_DAY, TABLE)], 2, 2)
    joined = merged(place.io, place.new(), manifests, BY_DAY, TABLE, 3)
    assert joined is not None
    deletes = place.added(
        [delete_file(place, "0", files[0], [0, 9]), delete_file(place, "5", files[5], [3])], 3, BY_DAY, TABLE
    )
    location = place.new()
    write_manifest_list(place.io, location, 3, 2, 3, [joined, deletes])
    path = metadata_of(place, location, 3, 3)

    wanted = sorted({*range(60)} - {*range(10, 20), 0, 9, 53})
    table = StaticTable.from_metadata(str(path))
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == wanted
    by_day = table.scan(row_filter="day = '2022-01-08'")
    assert len(list(by_day.plan_files())) == 2
    assert sorted(by_day.to_arrow()["id"].to_pylist()) == [value for value in wanted if value // 10 % 3 == 0]
    one = table.scan(row_filter="name = 'a name that is longer than a bound, and then 042'")
    assert one.to_arrow()["id"].to_pylist() == [42]
    assert len(list(table.scan(row_filter="id = 42").plan_files())) == 1

    scan = f"iceberg_scan('{path}')"
    assert duck.execute(f"SELECT id FROM {scan} ORDER BY id").fetchall() == [(value,) for value in wanted]
    assert duck.execute(f"SELECT id FROM {scan} WHERE day = DATE '2022-01-08' AND id > 30").fetchall() == [
        (value,) for value in wanted if value // 10 % 3 == 0 and value > 30
    ]
    assert duck.execute(f"SELECT id FROM {scan} WHERE name LIKE '% 042'").fetchall() == [(42,)]
    # The same without summaries.
    summarized = read_manifest_list(place.io, location)
    for manifest in summarized:
        manifest[13] = None
    location = place.new()
    write_manifest_list(place.io, location, 4, 3, 4, summarized)
    plain = metadata_of(place, location, 4, 4)
    day = "SELECT id FROM iceberg_scan('{}') WHERE day = DATE '2022-01-08'"
    assert duck.execute(day.format(plain)).fetchall() == duck.execute(day.format(path)).fetchall()
    found = StaticTable.from_metadata(str(plain)).scan(row_filter="day = '2022-01-08'").to_arrow()
    assert found.num_rows == by_day.to_arrow().num_rows

    listed = f"SELECT manifest_content, status, count(*) FROM iceberg_metadata('{path}') GROUP BY ALL ORDER BY 1"
    assert duck.execute(listed).fetchall() == [("DATA", "EXISTING", 5), ("DELETE", "ADDED", 2)]


def test_duckdb_reads_a_manifest_of_every_partition_type(place: Place, duck: Any) -> None:
    _, manifest = partitioned(place)
    path = place.store.local_path(place.store.relative(manifest.manifest_path))
    numbers = (0, 1, 3, 4, 6, 12, 16, 25)
    columns = ", ".join(f"CAST(data_file.partition.field_x20{number} AS VARCHAR)" for number in numbers)
    assert duck.execute(f"SELECT {columns} FROM read_avro('{path}')").fetchall() == [
        ("2024-02-29", "2023-11-14 22:13:20.123456+00", "-12.30", str(A_UUID), "ä/名前", str(A_UUID), "3", "474768"),
        ("1969-12-31", "1969-12-31 23:59:59.999995+00", "9999999.99", str(FIVE), "", str(SEVEN), "15", "-1"),
        (None,) * len(numbers),
    ]


def test_bounds_prune_what_cannot_match_and_nothing_else() -> None:
    made = data_file(
        listed_file("x", stats=[stats_of(1, "long", -5, 7), stats_of(2, "string", "b" * 30, "d" * 30)]), SCHEMA
    )
    for name, value, may_match in [
        ("id", -5, True),
        ("id", 7, True),
        ("id", 8, False),
        ("id", -6, False),
        ("name", "b" * 30, True),
        ("name", "d" * 30, True),
        ("name", "d" * 15 + "f", False),
        ("name", "a", False),
    ]:
        assert _InclusiveMetricsEvaluator(SCHEMA, parse(f"{name} = {value!r}")).eval(made) is may_match


# --- merging -------------------------------------------------------------------


def manifest_of(live: int, spec_id: int = 0, content: int = DATA) -> ManifestFile:
    return ManifestFile.from_args(
        manifest_path=f"file:///{uuid.uuid4()}",
        partition_spec_id=spec_id,
        content=ManifestContent(content),
        added_files_count=live - live // 2,
        existing_files_count=live // 2,
        deleted_files_count=3,
    )


def live_of(manifest: ManifestFile) -> int:
    return (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)


def merge(manifests: list[ManifestFile]) -> int:
    """Do what is to be done; returns how many entries that wrote again."""
    written = 0
    for group in to_merge(manifests):
        start = manifests.index(group[0])
        total = sum(map(live_of, group))
        assert len(group) > 1
        assert total <= MOST_MERGED
        assert manifests[start : start + len(group)] == group
        manifests[start : start + len(group)] = [manifest_of(total)]
        written += total
    return written


@pytest.mark.parametrize(("files", "appends"), [(1, 5000), (100, 1200), (7000, 300)])
def test_manifests_and_the_work_for_them_grow_with_the_logarithm_of_the_files(files: int, appends: int) -> None:
    manifests: list[ManifestFile] = []
    written = 0
    for number in range(1, appends + 1):
        manifests.append(manifest_of(files))
        written += merge(manifests)
        total = number * files
        tiers = math.log(total, FANOUT)
        assert len(manifests) <= FANOUT * (tiers + 1) + total / MOST_MERGED
        assert written <= total * (tiers + 2)
    assert sum(map(live_of, manifests)) == appends * files


SIZES = st.sampled_from([1, 1, 1, 2, 7, 8, 9, 63, 64, 500, 4000, FILES_PER_MANIFEST, 24_999, 25_001, MOST_MERGED])


@settings(max_examples=100, deadline=None)
@given(st.lists(SIZES, max_size=80))
def test_what_was_merged_needs_no_more_merging(sizes: list[int]) -> None:
    manifests = [manifest_of(size) for size in sizes]
    merge(manifests)
    assert to_merge(manifests) == []
    assert sum(map(live_of, manifests)) == sum(sizes)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 1)), max_size=60))
def test_only_neighbours_of_one_spec_and_content_are_merged(kinds: list[tuple[int, int, int]]) -> None:
    manifests = [manifest_of(*kind) for kind in kinds]
    seen: set[str] = set()
    for group in to_merge(manifests):
        (key,) = {(manifest.partition_spec_id, manifest.content) for manifest in group}
        alike = [
            manifest
            for manifest in manifests
            if live_of(manifest) and (manifest.partition_spec_id, manifest.content) == key
        ]
        start = alike.index(group[0])
        assert alike[start : start + len(group)] == group
        assert seen.isdisjoint(manifest.manifest_path for manifest in group)
        seen |= {manifest.manifest_path for manifest in group}


def test_a_run_is_merged_when_it_is_long_enough() -> None:
    assert to_merge([manifest_of(1) for _ in range(FANOUT - 1)]) == []
    few = [manifest_of(1) for _ in range(FANOUT)]
    assert to_merge(few) == [few]
    # The large one is not written again for the sake of small ones.
    assert to_merge([manifest_of(512), *few]) == [few]
    # What is in between goes along.
    mixed = [manifest_of(size) for size in (8, 8, 1, 8, 8, 8, 8, 2, 8, 8)]
    assert to_merge(mixed) == [mixed]
    # One merge may complete the next run, and both are done at once.
    cascade = [*(manifest_of(8) for _ in range(FANOUT - 1)), *few]
    assert to_merge(cascade) == [cascade]


def test_small_manifests_that_removals_left_between_others_are_merged() -> None:
    # Never eight of a size: only their number tells.
    manifests = [manifest_of(size) for _ in range(5) for size in (64, 1, 1, 8, 1, 1)]
    assert to_merge(manifests) == [manifests]
