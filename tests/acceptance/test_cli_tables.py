"""The command line for tables: every command, its JSON, and its errors."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

import lakebook
from books import SQLITE
from extent import long
from lake import insert, lay, objects, records, replace_bytes, run_sql, with_ids
from lakebook import Book, failpoints
from lakebook.cli.main import cli
from lakebook.clock import ManualClock, SystemClock
from lakebook.errors import EpochChanged
from lakebook.lake.attempts import Attempt
from lakebook.registry import schema
from legacy_footers import as_version_1
from shapes import EMBEDDED, Shape, embedded

HOUR = 3600


def fill(folder: Path) -> None:
    """Two tables: one of two versions with rows, and a partitioned one in another namespace."""
    with lakebook.open(folder) as book:
        orders = book.tables.create(
            "orders", "id BIGINT NOT NULL, name STRING, price DECIMAL(10,2)", properties={"user.team": "sales"}
        )
        insert(orders, *({"id": number, "name": f"n{number}", "price": Decimal("1.50")} for number in range(10)))
        insert(orders, *({"id": number, "name": None, "price": None} for number in range(10, 15)))
        book.tables.create_namespace("sales", properties={"owner": "us"})
        visits = book.tables.create("sales.visits", "id INT, day DATE", partition_by=["day"], sort_by=["id DESC"])
        insert(visits, {"id": 1, "day": date(2026, 1, 30)}, {"id": 2, "day": date(2026, 1, 31)})


@pytest.fixture
def folder(shape: Shape, tmp_path: Path) -> Iterator[Path]:
    # Files of tables alone: what is published has tests of its own.
    with shape.filled(fill, tmp_path / "book", publish="off") as home:
        yield home


@pytest.fixture
def book(folder: Path) -> Iterator[Book]:
    with lakebook.open(folder) as opened:
        yield opened


class Shell:
    """Runs commands on one book."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: object, clock: ManualClock | None = None) -> Result:
        return CliRunner().invoke(cli, ["--book", str(self.folder), *map(str, words)], obj=clock)

    def text(self, *words: object, clock: ManualClock | None = None) -> str:
        result = self.run(*words, clock=clock)
        assert (result.exit_code, result.exception) == (0, None), result.output
        assert result.stderr == ""
        return result.stdout

    def json(self, *words: object, clock: ManualClock | None = None) -> Any:
        return json.loads(self.text(*words, "--json", clock=clock))

    def lines(self, *words: object) -> list[Any]:
        return [json.loads(line) for line in self.text(*words, "--json").splitlines()]

    def failed(self, *words: object) -> Any:
        """The JSON of a command that says by its exit code that something is not well."""
        result = self.run(*words, "--json")
        assert result.exit_code == 1
        return json.loads(result.stdout)


@pytest.fixture
def shell(folder: Path) -> Shell:
    return Shell(folder)


def cells(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines()]


# --- namespaces --------------------------------------------------------------------


def test_a_namespace_lives_from_create_to_drop(shell: Shell) -> None:
    assert shell.text("namespaces", "create", "new", "--property", "a=b=c") == "created namespace new\n"
    assert shell.json("namespaces", "show", "new")["properties"] == {"a": "b=c"}
    assert ["a:", "b=c"] in cells(shell.text("namespaces", "show", "new"))
    assert [found["name"] for found in shell.json("namespaces", "list")] == ["default", "new", "sales"]
    assert [found["name"] for found in shell.json("namespaces", "list", "--limit", 1)] == ["default"]
    assert ["sales", "1"] in [row[:2] for row in cells(shell.text("namespaces", "list"))]
    assert shell.text("namespaces", "drop", "new") == "dropped namespace new\n"
    assert shell.json("namespaces", "create", "new")["name"] == "new"
    assert shell.json("namespaces", "drop", "new") == {"dropped": "new"}
    assert [found["name"] for found in shell.json("namespaces", "list")] == ["default", "sales"]


# --- tables as a whole -------------------------------------------------------------


def test_a_created_table_is_described_as_it_was_asked_for(shell: Shell) -> None:
    words = ["--schema", "id BIGINT NOT NULL, at TIMESTAMP COMMENT 'when', tags ARRAY<STRING>", "--property", "a=b"]
    words += ["--partition-by", "day(at)", "--partition-by", "bucket(4, id)", "--sort-by", "id DESC"]
    said = shell.text("tables", "create", "sales.new", *words, "--compression", "snappy")
    assert said == "created table sales.new with 3 column(s)\n"
    table = shell.json("tables", "describe", "sales.new")
    assert [(column["field_id"], column["name"], column["type"]) for column in table["columns"]] == [
        (1, "id", "long"),
        (2, "at", "timestamptz"),
        (3, "tags", "list<string>"),
    ]
    assert [column["required"] for column in table["columns"]] == [True, False, False]
    assert table["columns"][1]["doc"] == "when"
    assert (table["partition_by"], len(table["sort_by"])) == (["day(at)", "bucket(4, id)"], 1)
    assert (table["format"], table["compression"], table["properties"]) == ("parquet", "snappy", {"a": "b"})
    text = cells(shell.text("tables", "describe", "sales.new"))
    assert ["1", "id", "long", "yes", "-"] in text
    assert ["partitioned", "by:", "day(at),", "bucket(4,", "id)"] in text
    assert ["a", "b"] in text


def test_a_table_of_json_is_created_and_printed_as_json(shell: Shell) -> None:
    table = shell.json("tables", "create", "raw", "--schema", "id INT", "--format", "json", "--namespace", "sales")
    assert (table["namespace"], table["name"], table["format"], table["compression"]) == (
        "sales",
        "raw",
        "json",
        "gzip",
    )
    assert (table["version"], table["row_count"]) == (0, 0)


def test_tables_are_listed_by_namespace_and_prefix_and_up_to_a_limit(shell: Shell) -> None:
    shell.text("tables", "create", "others", "--schema", "id INT")

    def names(*words: object) -> list[str]:
        return [f"{table['namespace']}.{table['name']}" for table in shell.json("tables", "list", *words)]

    assert names() == ["default.orders", "default.others", "sales.visits"]
    assert names("--namespace", "sales") == ["sales.visits"]
    assert names("--prefix", "or") == ["default.orders"]
    assert names("--limit", 2) == ["default.orders", "default.others"]
    assert names("--namespace", "default", "--limit", 1) == ["default.orders"]
    assert names("--prefix", "x") == []
    assert ["default.orders", "parquet", "2", "15", "2"] in [row[:5] for row in cells(shell.text("tables", "list"))]


def test_a_description_has_the_exact_totals(shell: Shell, book: Book) -> None:
    table = shell.json("tables", "describe", "orders")
    assert (table["version"], table["row_count"], table["file_count"]) == (2, 15, 2)
    assert table["total_size"] == book.table("orders").plan().total_size
    assert datetime.fromisoformat(table["last_modified"]).tzinfo is not None
    assert ["rows:", "15"] in cells(shell.text("tables", "describe", "orders"))
    assert ["user.team", "sales"] in cells(shell.text("tables", "describe", "orders"))


def test_a_table_is_renamed_and_moved(shell: Shell) -> None:
    assert shell.text("tables", "rename", "orders", "bills") == "the table is now default.bills\n"
    assert shell.json("tables", "rename", "bills", "sales.bills")["namespace"] == "sales"
    moved = shell.json("tables", "rename", "sales.bills", "a.b", "--new-namespace", "default")
    assert (moved["namespace"], moved["name"], moved["row_count"]) == ("default", "a.b", 15)
    assert shell.json("tables", "describe", "a.b", "--namespace", "default")["row_count"] == 15
    assert shell.run("tables", "describe", "orders").exit_code == 1


def test_a_dropped_table_is_gone_from_the_list(shell: Shell) -> None:
    assert shell.text("tables", "drop", "orders", "--yes") == "dropped table default.orders\n"
    assert shell.json("tables", "drop", "visits", "--namespace", "sales", "--yes") == {"dropped": "sales.visits"}
    assert shell.json("tables", "list") == []


def test_the_history_has_every_version_with_what_it_changed(shell: Shell) -> None:
    found = shell.json("tables", "history", "orders")
    assert [(version["version"], version["operation"], version["added_rows"]) for version in found] == [
        (2, "append", 5),
        (1, "append", 10),
        (0, "create", 0),
    ]
    assert [version["version"] for version in shell.json("tables", "history", "orders", "--limit", 1)] == [2]
    assert ["1", "append", "1", "1", "10", "0", "0"] in [
        row[:7] for row in cells(shell.text("tables", "history", "orders"))
    ]


def test_properties_are_printed_set_and_removed(shell: Shell) -> None:
    assert shell.text("tables", "set", "orders").split() == ["user.team:", "sales"]
    changed = shell.json("tables", "set", "orders", "a=1", "b=x=y", "--unset", "user.team")
    assert changed == {"a": "1", "b": "x=y"}
    assert shell.json("tables", "describe", "orders")["properties"] == changed
    assert shell.json("tables", "set", "orders", "--unset", "a", "--unset", "b") == {}


@pytest.mark.parametrize("key", ["self", "changes", "namespace", "user.self"])
def test_a_property_can_have_any_name(shell: Shell, key: str) -> None:
    assert shell.json("tables", "set", "orders", f"{key}=x", "--unset", "user.team") == {key: "x"}


# --- files and rows ----------------------------------------------------------------


def test_files_are_those_a_condition_can_match(shell: Shell) -> None:
    every = shell.json("tables", "files", "orders")
    assert [file["row_count"] for file in every] == [10, 5]
    assert shell.json("tables", "files", "orders", "--where", "id > 12") == every[1:]
    assert shell.json("tables", "files", "orders", "--where", "id > 100") == []
    assert shell.json("tables", "files", "orders", "--version", 1) == every[:1]
    assert shell.json("tables", "files", "orders", "--limit", 1) == every[:1]
    head, first, _ = cells(shell.text("tables", "files", "orders"))
    assert head == ["path", "rows", "bytes", "row", "groups", "partition"]
    assert first == [every[0]["file_path"], "10", str(every[0]["file_size"]), "1", "-"]


def test_files_are_shown_with_their_partition(shell: Shell) -> None:
    (file,) = shell.json("tables", "files", "sales.visits", "--where", "day = '2026-01-31'")
    assert (file["partition_path"], file["row_count"]) == ("day=2026-01-31", 1)
    assert "day=2026-01-30" in shell.text("tables", "files", "sales.visits")


def test_files_say_which_of_their_row_groups_can_match(shell: Shell, book: Book) -> None:
    table = book.tables.create("large", "id BIGINT")
    rows = with_ids(table, ({"id": number} for number in range(30)))
    book.table("large").add_files([lay(book, "large.parquet", rows, row_group_size=10)])
    (file,) = shell.json("tables", "files", "large", "--where", "id = 25")
    assert (file["row_group_count"], file["row_groups"]) == (3, [2])
    last = cells(shell.text("tables", "files", "large", "--where", "id >= 10"))[-1]
    assert last[3:] == ["2", "of", "3", "-"]


def test_rows_are_read_by_condition_columns_and_version(shell: Shell) -> None:
    assert shell.lines("tables", "read", "orders", "--where", "id in (3, 12)") == [
        {"id": 3, "name": "n3", "price": "1.50"},
        {"id": 12, "name": None, "price": None},
    ]
    assert shell.lines("tables", "read", "orders", "--columns", "name, id", "--where", "price = 1.5 and id < 1") == [
        {"name": "n0", "id": 0}
    ]
    assert len(shell.lines("tables", "read", "orders")) == 15
    assert len(shell.lines("tables", "read", "orders", "--limit", 12)) == 12
    assert len(shell.lines("tables", "read", "orders", "--version", 1)) == 10
    assert shell.lines("tables", "read", "orders", "--version", 0) == []
    assert cells(shell.text("tables", "read", "orders", "--where", "id = 12")) == [
        ["id", "name", "price"],
        ["12", "-", "-"],
    ]
    assert cells(shell.text("tables", "read", "orders", "--version", 0, "--columns", "price,id")) == [["price", "id"]]


def test_reading_stops_after_twenty_rows_unless_told_otherwise(shell: Shell, book: Book) -> None:
    insert(book.table("orders"), *({"id": number} for number in range(100, 200)))
    assert len(shell.lines("tables", "read", "orders")) == 20
    assert len(shell.lines("tables", "read", "orders", "--limit", 1000)) == 115
    assert len(shell.text("tables", "read", "orders").splitlines()) == 21


def test_rows_and_files_are_those_of_a_time(folder: Path, shell: Shell) -> None:
    clock = ManualClock()
    with lakebook.open(folder, clock=clock) as book:
        table = book.tables.create("timed", "id BIGINT")
        for number in range(3):
            clock.advance(HOUR)
            insert(table, {"id": number})
    between = datetime.fromtimestamp(1_700_000_000 + 2.5 * HOUR, UTC)
    for text in (between.isoformat(), between.replace(tzinfo=None).isoformat()):
        assert shell.lines("tables", "read", "timed", "--as-of", text) == [{"id": 0}, {"id": 1}]
        assert len(shell.json("tables", "files", "timed", "--as-of", text)) == 2


VALUES = {
    "flag": (pa.bool_(), True, True),
    "number": (pa.float64(), 0.1, 0.1),
    "nan": (pa.float64(), float("nan"), "NaN"),
    "infinite": (pa.float32(), float("-inf"), "-Infinity"),
    "price": (pa.decimal128(38, 10), Decimal("0.0000000001"), "0.0000000001"),
    "raw": (pa.binary(), b"\xff\x00", base64.b64encode(b"\xff\x00").decode()),
    "day": (pa.date32(), date(2026, 1, 31), "2026-01-31"),
    "far": (pa.date32(), 10_000_000, "+29349-01-26"),
    "at": (pa.timestamp("us", tz="UTC"), datetime(2026, 1, 31, 8, tzinfo=UTC), "2026-01-31T08:00:00+00:00"),
    "local": (pa.timestamp("us"), 1_769_846_400_000_005, "2026-01-31T08:00:00.000005"),
    "later": (pa.timestamp("us", tz="UTC"), 10**18, "+33658-09-27T01:46:40+00:00"),
    "text": (pa.string(), 'ü"\n', 'ü"\n'),
    "list": (pa.list_(pa.decimal128(3, 1)), [Decimal("1.5"), None], ["1.5", None]),
    "numbers": (pa.map_(pa.int32(), pa.date32()), [(7, date(2026, 1, 31))], {"7": "2026-01-31"}),
    "texts": (pa.map_(pa.string(), pa.float64()), [("k", float("inf"))], {"k": "Infinity"}),
    "inner": (
        pa.struct([("a", pa.int32()), ("b", pa.list_(pa.binary()))]),
        {"a": 1, "b": [b"x"]},
        {"a": 1, "b": ["eA=="]},
    ),
}


def test_values_that_json_does_not_know_are_texts(shell: Shell, book: Book) -> None:
    columns = pa.schema([pa.field(name, kind) for name, (kind, _, _) in VALUES.items()])
    table = book.tables.create("odd", columns)
    rows = [pa.array([value, None], kind) for kind, value, _ in VALUES.values()]
    table.insert_arrow(pa.Table.from_arrays(rows, schema=columns))
    full, empty = shell.lines("tables", "read", "odd")
    assert full == {name: wanted for name, (_, _, wanted) in VALUES.items()}
    assert empty == dict.fromkeys(VALUES)
    lines = shell.text("tables", "read", "odd").splitlines()
    assert len(lines) == 3
    for wanted in ("true", "0.1", "0.0000000001", '{"a": 1, "b": ["eA=="]}', "2026-01-31T08:00:00+00:00", "\\n"):
        assert wanted in lines[1]


def test_reading_leaves_no_lease_behind(shell: Shell, book: Book) -> None:
    shell.lines("tables", "read", "orders", "--limit", 1)
    assert shell.run("tables", "read", "orders", "--columns", "nope").exit_code == 1
    assert records(book, schema.leases) == []


def test_files_of_the_warehouse_are_added(shell: Shell, book: Book) -> None:
    table = book.table("orders")
    for number in (100, 101, 102):
        lay(book, f"mine/{number}.parquet", with_ids(table, [{"id": number}]))
    said = shell.text("tables", "add-files", "orders", "mine/100.parquet", "mine/101.parquet")
    assert said.startswith("inserted 2 row(s) in 2 file(s) of ")
    assert said.endswith(" bytes into default.orders, which is now at version 3\n")
    report = shell.json("tables", "add-files", "orders", "mine/102.parquet")
    assert (report["operation"], report["rows"], report["version"]) == ("append", 1, 4)
    assert [row["id"] for row in shell.lines("tables", "read", "orders", "--where", "id >= 100")] == [100, 101, 102]
    lay(book, "mine/visits.parquet", with_ids(book.table("sales.visits"), [{"id": 7, "day": date(2026, 1, 31)}]))
    assert shell.json("tables", "add-files", "visits", "mine/visits.parquet", "--namespace", "sales")["rows"] == 1
    assert shell.lines("tables", "read", "sales.visits", "--where", "id = 7") == [{"id": 7, "day": "2026-01-31"}]


def test_rows_of_whole_files_are_deleted_without_spark(shell: Shell) -> None:
    report = shell.json("tables", "delete-rows", "orders", "--where", "id >= 10")
    assert (report["deleted_rows"], report["removed_files"], report["version"]) == (5, 1, 3)
    said = shell.text("tables", "delete-rows", "orders", "--where", "id = 77")
    assert said == "no row matches; default.orders is as it was\n"
    said = shell.text("tables", "delete-rows", "orders", "--where", "true")
    assert said == "deleted 10 row(s) from default.orders, which is now at version 4\n"
    assert shell.lines("tables", "read", "orders") == []
    assert len(shell.lines("tables", "read", "orders", "--version", 2)) == 15


# --- columns -----------------------------------------------------------------------


def test_the_schema_changes_column_by_column(shell: Shell) -> None:
    said = shell.text("tables", "add-column", "orders", "tags", "ARRAY<STRING>", "--doc", "a comment")
    assert said == "default.orders has now the schema version 2\n"
    table = shell.json("tables", "rename-column", "orders", "name", "label")
    assert [column["name"] for column in table["columns"]] == ["id", "label", "price", "tags"]
    table = shell.json("tables", "drop-column", "orders", "tags")
    assert [column["field_id"] for column in table["columns"]] == [1, 2, 3]
    table = shell.json("tables", "widen-column", "orders", "price", "DECIMAL(20,2)")
    assert table["columns"][2]["type"] == "decimal(20, 2)"
    table = shell.json("tables", "make-optional", "orders", "id")
    assert (table["columns"][0]["required"], table["schema_version"]) == (False, 6)
    assert shell.text("tables", "make-optional", "orders", "id") == "default.orders is like that already\n"
    (row,) = shell.lines("tables", "read", "orders", "--where", "id = 3")
    assert row == {"id": 3, "label": "n3", "price": "1.50"}
    (row,) = shell.lines("tables", "read", "orders", "--where", "id = 3", "--version", 2)
    assert row == {"id": 3, "name": "n3", "price": "1.50"}


# --- admin -------------------------------------------------------------------------


def later(seconds: float) -> ManualClock:
    return ManualClock(SystemClock().now_ms() + round(seconds * 1000))


def test_history_expires_and_its_files_are_deleted_after_their_grace(shell: Shell, book: Book) -> None:
    shell.text("tables", "delete-rows", "orders", "--where", "id >= 10")
    before = objects(book)
    words = ["admin", "expire", "orders", "--seconds", 0, "--versions", 1]
    dry = shell.json(*words, "--dry-run", clock=later(1))
    assert (dry["dry_run"], dry["tables"], dry["files"]) == (True, 1, 1)
    assert len(shell.json("tables", "history", "orders")) == 4
    done = shell.json(*words, clock=later(1))
    assert (done["files"], done["bytes"]) == (1, dry["bytes"])
    assert [version["version"] for version in shell.json("tables", "history", "orders")] == [3]
    assert shell.text("admin", "delete-expired-temp").startswith("deleted 0 file(s)")
    assert shell.json("admin", "delete-expired-temp", "--dry-run", clock=later(2 * HOUR))["files"] == 1
    assert objects(book) == before
    done = shell.json("admin", "delete-expired-temp", clock=later(2 * HOUR))
    assert (done["files"], done["pinned"], done["failed"]) == (1, 0, [])
    assert len(objects(book)) == len(before) - 1
    assert shell.text(*words).startswith("retired 0 file(s)")
    assert shell.json("admin", "expire", "--wait")["tables"] == 2
    assert shell.json("verify")["ok"]


def test_a_lease_keeps_its_files_and_is_listed(shell: Shell, book: Book) -> None:
    words = ["admin", "expire", "--seconds", 0, "--versions", 1]
    with book.table("orders").pin(version=1) as pinned:
        shell.text("tables", "delete-rows", "orders", "--where", "true")
        (lease,) = shell.json("admin", "leases")
        assert (lease["id"], lease["table"], lease["version"]) == (pinned.lease.id, "default.orders", 1)
        assert datetime.fromisoformat(lease["expires_at"]) > datetime.now(UTC)
        assert [lease["id"], "default.orders", "1"] in [row[:3] for row in cells(shell.text("admin", "leases"))]
        shell.text("tables", "drop", "orders", "--yes")
        assert "a dropped table" in shell.text("admin", "leases")
        assert shell.json(*words)["files"] == 0
    assert shell.json("admin", "leases") == []
    assert shell.json(*words)["files"] == 2


def test_a_dead_lease_is_waited_for_and_removed(folder: Path, shell: Shell) -> None:
    # Of a process that died: nobody renews it, and nobody ends it.
    with lakebook.open(folder) as book:
        run_sql(book, "INSERT INTO leases VALUES ('lost', 1, 1, 'nobody', 1, 2)")
    assert shell.json("admin", "delete-expired-temp", "--no-wait", clock=later(0))["dead_leases"] == 0
    clock = later(0)
    done = shell.json("admin", "delete-expired-temp", clock=clock)
    assert done["dead_leases"] == 1
    assert clock.monotonic() >= 60


def test_a_namespace_can_go_once_its_dropped_tables_are_cleaned_up(shell: Shell) -> None:
    shell.text("tables", "drop", "sales.visits", "--yes")
    refused = shell.run("namespaces", "drop", "sales", "--json")
    assert json.loads(refused.stderr)["error"] == "namespace_not_empty"
    shell.text("admin", "expire")
    shell.text("admin", "delete-expired-temp", clock=later(2 * HOUR))
    shell.text("admin", "expire")
    assert shell.text("namespaces", "drop", "sales") == "dropped namespace sales\n"


@embedded
def test_a_file_that_cannot_be_deleted_is_told_by_the_exit_code(shell: Shell, book: Book, folder: Path) -> None:
    (file,) = shell.json("tables", "files", "orders", "--where", "id > 12")
    shell.text("tables", "delete-rows", "orders", "--where", "id >= 10")
    shell.text("admin", "expire", "--seconds", 0, "--versions", 1, clock=later(1))
    # What lies at its path is no file any more.
    place = folder / "warehouse" / file["file_path"]
    place.unlink()
    (place / "in the way").mkdir(parents=True)
    result = shell.run("admin", "delete-expired-temp", clock=later(2 * HOUR))
    assert result.exit_code == 1
    assert f"failed: {file['file_path']}: " in result.stdout
    (place / "in the way").rmdir()
    place.rmdir()
    assert shell.json("admin", "delete-expired-temp", clock=later(2 * HOUR))["files"] == 1


def test_what_a_dead_insert_left_is_swept(folder: Path, shell: Shell) -> None:
    with lakebook.open(folder) as book:
        attempt = Attempt(book.lake, book.table("orders").record).__enter__()
        lay(book, f"{attempt.folder}/left.parquet", b"left")
    assert shell.json("admin", "sweep")["fenced"] == 0
    dry = shell.json("admin", "sweep", "--dry-run", clock=later(HOUR))
    assert (dry["dry_run"], dry["fenced"]) == (True, 1)
    with lakebook.open(folder) as book:
        assert objects(book, attempt.folder) == [f"{attempt.folder}/left.parquet"]
    done = shell.json("admin", "sweep", clock=later(HOUR))
    assert (done["fenced"], done["objects"], done["failed"]) == (1, 1, [])
    with lakebook.open(folder) as book:
        assert objects(book, attempt.folder) == []
    said = shell.text("admin", "sweep", clock=later(24 * HOUR))
    assert said.startswith("fenced 0 insert(s), removed 0 object(s); ")


def bytes_in_sql(book: Book, data: bytes) -> str:
    return f"X'{data.hex()}'" if book._registry.kind == SQLITE else f"decode('{data.hex()}', 'hex')"


def test_footers_of_the_first_format_are_upgraded(folder: Path, shell: Shell) -> None:
    assert shell.text("admin", "upgrade-footers") == "upgraded 0 footer(s)\n"
    with lakebook.open(folder) as book:
        good, broken, *_ = records(book, schema.partition_metadata)
        for row, footer in ((good, as_version_1(bytes(good["metadata"]))), (broken, b"broken")):
            run_sql(
                book,
                "UPDATE partition_metadata SET partition_format_version = 1, num_rows = NULL,"
                f" metadata = {bytes_in_sql(book, footer)} WHERE file_path = '{row['file_path']}'",
            )
    assert shell.failed("admin", "upgrade-footers") == {"upgraded": 1, "broken": [broken["file_path"]]}
    result = shell.run("admin", "upgrade-footers")
    assert (result.exit_code, result.stdout) == (1, f"upgraded 0 footer(s)\nbroken: {broken['file_path']}\n")
    with lakebook.open(folder) as book:
        kept = records(book, schema.partition_metadata, file_path=good["file_path"])
        assert [(row["partition_format_version"], bytes(row["metadata"])) for row in kept] == [(2, good["metadata"])]


def test_deletions_of_topics_are_finished(shell: Shell, book: Book) -> None:
    book.metadata.create_topic("gone")

    def die() -> None:
        raise KeyboardInterrupt

    with failpoints.armed("topic.hidden", die), pytest.raises(KeyboardInterrupt):
        book.metadata.delete_topic("gone")
    assert shell.json("verify")["unfinished"]
    assert shell.json("admin", "purge-topics") == {"purged": 1}
    assert shell.text("admin", "purge-topics") == "purged 0 topic(s)\n"
    assert shell.json("verify")["unfinished"] == []


def test_a_new_epoch_refuses_who_has_the_book_open(shell: Shell, book: Book) -> None:
    epoch = shell.json("admin", "begin-epoch", "--yes")["epoch"]
    assert epoch != book.identity.epoch
    with pytest.raises(EpochChanged):
        book.tables.create("late", "id INT")
    assert shell.text("admin", "begin-epoch", "--yes").startswith("began epoch ")


# --- verify and repair -------------------------------------------------------------


def test_verify_reads_the_files_unless_told_otherwise(shell: Shell, book: Book) -> None:
    checked = shell.json("verify")["checked"]
    assert (checked["tables"], checked["data_files"]) == (2, 4)
    (path, *_) = objects(book)
    replace_bytes(book, path, lambda data: data[:-1] + b"?")
    assert [finding["check"] for finding in shell.failed("verify")["findings"]] == ["files", "footers"]
    assert f"finding: [files] {path}: " in shell.run("verify").stdout
    assert "data_files" not in shell.json("verify", "--no-files")["checked"]


def test_repair_mends_what_it_can_and_says_so(shell: Shell, book: Book) -> None:
    assert shell.text("repair") == "0 mended, 0 left\n"
    path = book.table("orders").plan().files[0].file_path
    run_sql(book, f"DELETE FROM partition_metadata WHERE file_path = '{path}'")
    run_sql(book, "UPDATE tables SET row_count = 7 WHERE name = 'orders'")
    dry = shell.run("repair", "--dry-run")
    assert f"would mend: {path}" in dry.stdout
    assert shell.run("verify").exit_code == 1
    done = shell.json("repair")
    assert (done["ok"], done["left"]) == (True, [])
    assert any(text.startswith(path) for text in done["mended"])
    assert shell.json("verify")["ok"]
    assert shell.json("tables", "describe", "orders")["row_count"] == 15


def test_repair_fails_while_something_is_left(shell: Shell, book: Book) -> None:
    path = book.table("orders").plan().files[0].file_path
    replace_bytes(book, path, lambda data: b"?" + data[1:])
    done = shell.failed("repair")
    assert (done["ok"], done["mended"]) == (False, [])
    assert {finding["on"] for finding in done["left"]} == {path}
    result = shell.run("repair")
    assert result.exit_code == 1
    assert f"left: [files] {path}: " in result.stdout
    assert result.stdout.endswith(" left\n")


def test_repair_does_not_pass_over_what_is_wrong_with_streams(shell: Shell, book: Book) -> None:
    book.metadata.create_topic("orders")
    run_sql(book, "UPDATE partitions SET high_watermark = 5")
    assert shell.run("verify").exit_code == 1
    assert shell.failed("repair")["left"]


# --- errors ------------------------------------------------------------------------

CREATE = ["tables", "create", "new", "--schema"]
READ = ["tables", "read", "orders"]
FILES = ["tables", "files", "orders"]
DELETE = ["tables", "delete-rows", "orders", "--where"]
ADD = ["tables", "add-files", "orders"]
ON_TABLE: list[list[str]] = [
    ["describe"],
    ["rename", "elsewhere"],
    ["drop", "--yes"],
    ["history"],
    ["files"],
    ["read"],
    ["insert", "rows.json", "--format", "json"],
    ["add-files", "a.parquet"],
    ["add-column", "a", "INT"],
    ["drop-column", "id"],
    ["rename-column", "id", "key"],
    ["widen-column", "id", "BIGINT"],
    ["make-optional", "id"],
    ["set", "a=b"],
    ["delete-rows", "--where", "true"],
]
ERRORS: list[tuple[str, Sequence[object]]] = [
    *(("table_not_found", ["tables", verb, "nowhere", *rest]) for verb, *rest in ON_TABLE),
    *(("invalid_name", ["tables", verb, "no spaces", *rest]) for verb, *rest in ON_TABLE),
    ("table_not_found", ["tables", "describe", "orders", "--namespace", "sales"]),
    ("table_not_found", ["admin", "expire", "nowhere"]),
    *(("invalid_name", ["tables", "create", name, "--schema", "id INT"]) for name in ("a b", "a\nb", "..", "", "ö")),
    ("invalid_name", ["tables", "create", "x" * 250, "--schema", "id INT"]),
    ("invalid_name", ["tables", "create", "a/../b", "--schema", "id INT"]),
    ("invalid_name", ["tables", "create", "sales.", "--schema", "id INT"]),
    ("invalid_name", ["tables", "create", "a", "--schema", "id INT", "--namespace", "a/b"]),
    ("invalid_name", ["tables", "rename", "orders", "a b"]),
    ("invalid_name", ["tables", "list", "--namespace", "a b"]),
    ("invalid_name", ["tables", "list", "--prefix", "ö"]),
    ("invalid_name", ["tables", "list", "--prefix", "\udc80"]),
    ("invalid_name", ["namespaces", "create", "a b"]),
    ("invalid_name", ["namespaces", "show", "\udc80"]),
    ("invalid_name", ["namespaces", "drop", ".."]),
    ("namespace_not_found", ["tables", "create", "nowhere.new", "--schema", "id INT"]),
    ("namespace_not_found", ["tables", "list", "--namespace", "nowhere"]),
    ("namespace_not_found", ["tables", "rename", "orders", "nowhere.orders"]),
    ("namespace_not_found", ["namespaces", "show", "nowhere"]),
    ("namespace_not_found", ["namespaces", "drop", "nowhere"]),
    ("namespace_already_exists", ["namespaces", "create", "sales"]),
    ("namespace_not_empty", ["namespaces", "drop", "sales"]),
    ("table_already_exists", ["tables", "create", "orders", "--schema", "id INT"]),
    ("table_already_exists", ["tables", "rename", "orders", "sales.visits"]),
    *(
        ("invalid_schema", [*CREATE, ddl])
        for ddl in ("", "id", "id FROB", "id INT, ID INT", "id INT; DROP TABLE x", "id INT)", "a " + "ARRAY<" * 500)
    ),
    *(
        ("invalid_partitioning", [*CREATE, "id INT", option, term])
        for option, term in (
            ("--partition-by", "nope"),
            ("--partition-by", "frob(id)"),
            ("--partition-by", "bucket(0, id)"),
            ("--partition-by", ""),
            ("--sort-by", "nope"),
            ("--sort-by", "id SIDEWAYS"),
        )
    ),
    ("invalid_table", [*CREATE, "id INT", "--compression", "frob"]),
    ("invalid_table", [*CREATE, "id INT", "--property", "novalue"]),
    ("invalid_table", [*CREATE, "id INT", "--property", "=x"]),
    ("invalid_table", [*CREATE, "id INT", "--property", "a=1", "--property", "a=2"]),
    ("invalid_table", [*CREATE, "id INT", "--property", "lakebook.history.versions=0"]),
    ("invalid_table", [*CREATE, "id INT", "--format", "json", "--partition-by", "id"]),
    ("invalid_table", ["namespaces", "create", "new", "--property", "novalue"]),
    ("invalid_table", ["tables", "set", "orders", "novalue"]),
    ("invalid_table", ["tables", "set", "orders", "a=1", "--unset", "a"]),
    ("invalid_table", ["tables", "set", "orders", "lakebook.history.seconds=long"]),
    ("invalid_input", ["tables", "set", "orders", f"a={'x' * 5000}"]),
    ("invalid_input", ["tables", "set", "orders", "a=\udc80"]),
    *(
        ("invalid_predicate", [*words, where])
        for words in ([*READ, "--where"], [*FILES, "--where"], DELETE)
        for where in ("", "id =", "nope = 1", "id = 'x'", "id = 1; DROP TABLE x", "(" * 5000)
    ),
    ("invalid_input", [*READ, "--columns", "nope"]),
    ("invalid_input", [*READ, "--columns", ""]),
    ("invalid_input", [*READ, "--columns", "id,"]),
    *(
        (code, [*words, *rest])
        for words in (READ, FILES)
        for code, *rest in (
            ("invalid_input", "--as-of", "yesterday"),
            ("invalid_input", "--as-of", ""),
            ("invalid_input", "--as-of", "0001-01-01T00:00:00+14:00"),
            ("invalid_input", "--as-of", "2026-01-31", "--version", 1),
            ("version_not_found", "--as-of", "1999-01-01"),
            ("version_not_found", "--version", 3),
            ("version_not_found", "--version", -1),
            ("version_not_found", "--version", 10**30),
        )
    ),
    ("path_outside_warehouse", [*ADD, "../registry.db"]),
    ("path_outside_warehouse", [*ADD, "/etc/passwd"]),
    ("path_outside_warehouse", [*ADD, "s3://bucket/x"]),
    ("path_outside_warehouse", [*ADD, ""]),
    ("object_not_found", [*ADD, "nowhere.parquet"]),
    ("invalid_file", [*ADD, "a.parquet", "a.parquet"]),
    ("invalid_file", [*ADD, "data/1/x.parquet"]),
    ("incompatible_schema", ["tables", "add-column", "orders", "ID", "INT"]),
    ("incompatible_schema", ["tables", "add-column", "orders", "nope.a", "INT"]),
    ("invalid_schema", ["tables", "add-column", "orders", "a", "FROB"]),
    ("invalid_schema", ["tables", "add-column", "orders", "", "INT"]),
    ("incompatible_schema", ["tables", "drop-column", "orders", "nope"]),
    ("incompatible_schema", ["tables", "drop-column", "sales.visits", "day"]),
    ("incompatible_schema", ["tables", "rename-column", "orders", "id", "NAME"]),
    ("invalid_schema", ["tables", "rename-column", "orders", "id", ""]),
    ("incompatible_schema", ["tables", "widen-column", "orders", "id", "INT"]),
    ("incompatible_schema", ["tables", "make-optional", "orders", "nope"]),
    *(
        ("invalid_table", ["admin", "expire", "orders", option, value])
        for option, value in (
            ("--versions", 0),
            ("--versions", 10**30),
            ("--seconds", -1),
            ("--seconds", "nan"),
            ("--seconds", "inf"),
            ("--seconds", 1e300),
        )
    ),
    ("invalid_input", ["tables", "drop", "orders"]),
    ("invalid_input", ["admin", "begin-epoch"]),
]


@pytest.fixture(scope="module")
def home(shape: Shape, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home of `untouched`."""
    with shape.filled(fill, tmp_path_factory.mktemp("untouched") / "book", publish="off") as home:
        yield home


@pytest.fixture(scope="module")
def untouched(home: Path) -> Iterator[Book]:
    """A book that nobody changes: each test makes sure of that."""
    with lakebook.open(home) as opened:
        yield opened


def state_of(book: Book) -> object:
    kinds = (schema.namespaces, schema.tables, schema.table_versions, schema.table_files, schema.leases)
    found = {kind.name: records(book, kind) for kind in (*kinds, schema.table_metadata, schema.temporary_files)}
    # Fenced attempts are remembered until a sweep; open ones would be left behind.
    running = [row for row in records(book, schema.commits) if row["state"] == "open"]
    events = [event.id for event in book.events.read(book.events.beginning()).events]
    return found, running, objects(book), events, book.identity.epoch


@pytest.mark.parametrize(("code", "words"), ERRORS, ids=lambda value: ascii(value)[:80])
def test_bad_input_is_one_line_and_changes_nothing(
    home: Path, untouched: Book, code: str, words: Sequence[object]
) -> None:
    shell = Shell(home)
    before = state_of(untouched)
    result = shell.run(*words)
    assert (result.exit_code, result.stdout) == (1, ""), result.exception
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    result = shell.run(*words, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert json.loads(result.stderr)["error"] == code
    assert state_of(untouched) == before


@pytest.mark.parametrize(
    "words",
    [
        ["tables", "create", "new"],
        [*CREATE, "id INT", "--format", "csv"],
        [*READ, "--limit", 0],
        [*READ, "--version", "first"],
        ["tables", "insert", "orders", "rows.json"],
        ["tables", "insert", "orders", "--format", "json"],
        ["tables", "insert", "orders", "rows.csv", "--format", "csv"],
        ["tables", "insert", "orders", "rows.parquet", "--format", "parquet", "--ignore-unknown"],
        ["tables", "add-files", "orders"],
        ["tables", "delete-rows", "orders"],
        ["admin", "expire", "--seconds", "long"],
        ["admin", "expire", "--namespace", "sales"],
        ["verify", "--no-files", "--spark"],
    ],
)
def test_wrong_usage_is_told_apart_by_its_exit_code(home: Path, words: list[object]) -> None:
    assert Shell(home).run(*words).exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["namespaces", "create", "new"],
        ["namespaces", "list"],
        ["tables", "create", "new", "--schema", "id INT"],
        ["tables", "list"],
        ["tables", "insert", "new", "rows.json", "--format", "json"],
        ["repair"],
        ["admin", "sweep"],
        ["admin", "leases"],
        ["admin", "begin-epoch", "--yes"],
    ],
)
def test_no_command_creates_a_book(tmp_path: Path, words: list[object]) -> None:
    result = Shell(tmp_path / "none").run(*words)
    assert result.exit_code == 1
    assert "there is no book here" in result.stderr
    assert list(tmp_path.iterdir()) == []


# --- processes ---------------------------------------------------------------------


def in_child(code: str, *words: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


LOADED = """
import json, sys
from lakebook.cli.main import cli
for words in json.loads(sys.argv[1]):
    try:
        cli(words)
    except SystemExit as end:
        assert end.code == 0, words
    heavy = [name for name in ("pyarrow", "pyiceberg", "pyspark", "sqlglot") if name in sys.modules]
    assert not heavy, (words, heavy)
"""


def test_who_needs_no_table_loads_neither_arrow_nor_iceberg_nor_spark(tmp_path: Path) -> None:
    book = ["--book", str(tmp_path / "book")]
    words = [["--help"], ["tables", "--help"], ["tables", "insert", "--help"], ["admin", "--help"]]
    words += [[*book, *rest] for rest in (["init"], ["topics", "create", "a"], ["topics", "list"], ["groups", "list"])]
    words += [[*book, *rest] for rest in (["events", "tail"], ["metrics"], ["verify"], ["admin", "purge-topics"])]
    done = in_child(LOADED, json.dumps(words))
    assert done.returncode == 0, done.stderr


def test_a_spark_that_cannot_be_started_is_one_line(folder: Path, tmp_path: Path) -> None:
    done = in_child(
        "from lakebook.cli.main import main; main()",
        *("--book", folder, "tables", "insert", "orders", tmp_path / "rows.json", "--format", "json", "--json"),
        JAVA_HOME=str(tmp_path / "no-java"),
    )
    assert (done.returncode, done.stdout) == (1, "")
    error = json.loads(done.stderr)
    assert error["error"] == "spark_unsuitable"
    assert "no-java" in error["what"]


# Spark is started twice, but Java, which takes longest, only once.
SPARK = """
import json, sys
from lakebook.cli.main import cli
for words in json.loads(sys.argv[1]):
    try:
        cli(words)
    except SystemExit as end:
        print(json.dumps({"exit": end.code}))
"""


@long(EMBEDDED)
def test_rows_are_inserted_and_deleted_with_spark_and_only_results_are_printed(folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text("".join(f'{{"id": {number}, "name": "s{number}"}}\n' for number in range(100, 110)))
    # The rows are few: compiling plans into Java would be most of the work.
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.sql.codegen.wholeStage false\nspark.sql.shuffle.partitions 2\nspark.driver.memory 1g\n"
    )
    commands = [
        ["tables", "insert", "orders", str(rows), "--format", "json", "--json"],
        ["tables", "delete-rows", "orders", "--where", "id >= 105", "--json"],
    ]
    done = in_child(
        SPARK, json.dumps([["--book", str(folder), *words] for words in commands]), SPARK_CONF_DIR=str(tmp_path)
    )
    assert (done.returncode, done.stderr) == (0, "")
    decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].strip()
    inserted, first, deleted, second = found
    assert (first, second) == ({"exit": 0}, {"exit": 0})
    assert (inserted["operation"], inserted["rows"], inserted["version"]) == ("append", 10, 3)
    assert (deleted["deleted_rows"], deleted["version"]) == (5, 4)
    shell = Shell(folder)
    kept = shell.lines("tables", "read", "orders", "--where", "id >= 100")
    assert kept == [{"id": number, "name": f"s{number}", "price": None} for number in range(100, 105)]
    assert shell.json("tables", "describe", "orders")["row_count"] == 20
    assert shell.json("verify")["ok"]
    assert shell.json("admin", "leases") == []
