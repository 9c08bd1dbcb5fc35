"""Every kind of damage to a table is found; repair mends what needs no guess, and says what does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import legacy_footers
from books import SQLITE, Place
from lake import (
    PATIENCE,
    check_totals,
    files_of,
    ids,
    in_memory,
    insert,
    lay,
    numbers,
    objects,
    own_warehouse,  # noqa: F401
    records,
    registry_state,
    replace_bytes,
    rows_of,
    run_sql,
    stats_of,
)
from lakebook import Book, failpoints
from lakebook.lake.attempts import Attempt
from lakebook.lake.table import Table
from lakebook.registry import schema, table_files

Damage = Callable[[Book, Table, dict[str, Any]], None]


def sql(text: str) -> Damage:
    """Damage to the registry, by a statement in which the table and its first file can be named."""

    def damage(book: Book, table: Table, file: dict[str, Any]) -> None:
        run_sql(book, text.format(table=table.id, path=file["file_path"], commit=file["commit_id"]))

    return damage


def changed(change: Callable[[bytes], bytes]) -> Damage:
    """Damage to the bytes of the first file."""
    return lambda book, table, file: replace_bytes(book, file["file_path"], change)


def flipped(data: bytes) -> bytes:
    middle = len(data) // 4
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def stored_footer(change: Callable[[bytes], bytes]) -> Damage:
    def damage(book: Book, table: Table, file: dict[str, Any]) -> None:
        (row,) = records(book, schema.partition_metadata, file_path=file["file_path"])
        mark = "%s" if book._registry.database.kind == "postgresql" else "?"
        text = f"UPDATE partition_metadata SET metadata = {mark} WHERE file_path = {mark}"
        values = (change(row["metadata"]), file["file_path"])
        book._registry.write(lambda transaction: transaction._connection.execute(text, values))

    return damage


_OLD = "UPDATE partition_metadata SET partition_format_version = 1, num_rows = NULL WHERE file_path = '{path}'"


def broken_old_footer(book: Book, table: Table, file: dict[str, Any]) -> None:
    stored_footer(lambda data: data[:-7])(book, table, file)
    sql(_OLD)(book, table, file)


def other_old_footer(book: Book, table: Table, file: dict[str, Any]) -> None:
    stored_footer(lambda data: data.replace(b"parquet", b"PARQUET"))(book, table, file)
    sql(_OLD)(book, table, file)


def laid(path: str) -> Damage:
    """An object that should not be there; `{table}` is the table, `{commit}` an insert that is long settled."""

    def damage(book: Book, table: Table, file: dict[str, Any]) -> None:
        lay(book, path.format(table=table.id, commit=file["commit_id"]), b"stray")

    return damage


def wrong_totals(book: Book, table: Table, file: dict[str, Any]) -> None:
    run_sql(book, f"UPDATE tables SET row_count = 99 WHERE id = {table.id}")
    run_sql(book, f"UPDATE table_stats SET total_size = 5 WHERE table_id = {table.id}")


def retire_by_hand(book: Book, table: Table, file: dict[str, Any]) -> None:
    table.delete("id < 10")
    run_sql(book, f"UPDATE table_files SET retired_at = 1 WHERE file_path = '{file['file_path']}'")


def wait_by_hand(book: Book, table: Table, file: dict[str, Any]) -> None:
    values = f"'{file['file_path']}', 1, 'waiting', 'retired', 1, 1"
    run_sql(book, f"INSERT INTO temporary_files VALUES ({values})")


def lease_by_hand(book: Book, table: Table, file: dict[str, Any]) -> None:
    run_sql(book, f"UPDATE table_horizons SET min_readable = 2 WHERE table_id = {table.id}")
    run_sql(book, f"DELETE FROM table_versions WHERE version < 2 AND table_id = {table.id}")
    run_sql(book, f"INSERT INTO leases VALUES ('lease', {table.id}, 1, 'nobody', 1, 1)")


_STATS = "INSERT INTO file_column_stats VALUES ({table}, 77, 1, NULL, NULL, {{no}}, NULL, NULL, NULL, NULL, 65, 0)"


def dangling_stats(book: Book, table: Table, file: dict[str, Any]) -> None:
    no = "false" if book._registry.database.kind == "postgresql" else "0"
    run_sql(book, _STATS.format(table=table.id).format(no=no))


def dangling_footer(book: Book, table: Table, file: dict[str, Any]) -> None:
    columns = "partition_format_version, num_rows, file_size, insert_time, metadata"
    run_sql(
        book,
        f"INSERT INTO partition_metadata (file_path, {columns}) SELECT 'gone.parquet', {columns}"
        f" FROM partition_metadata WHERE file_path = '{file['file_path']}'",
    )


@dataclass(frozen=True)
class Case:
    """A damage, the checks that find it, and whether repair can mend it without a guess."""

    damage: Damage
    checks: set[str]
    mended: bool = False


ONE = "WHERE table_id = {table}"
FIRST = "WHERE table_id = {table} AND id = 1"

CASES: dict[str, Case] = {
    # --- bytes
    "a file is gone": Case(lambda book, table, file: book.lake.store.delete_one(file["file_path"]), {"files"}),
    "a byte is changed": Case(changed(flipped), {"files"}),
    "a file is cut": Case(changed(lambda data: data[:-100]), {"files", "footers"}),
    "a file is empty": Case(changed(lambda data: b""), {"files", "footers"}),
    "a file has grown": Case(changed(lambda data: data + b"x"), {"files"}),
    "a file is another": Case(changed(lambda data: data[::-1]), {"files", "footers"}),
    # --- what is recorded of a file
    "its size is wrong": Case(sql(f"UPDATE table_files SET file_size = file_size + 1 {FIRST}"), {"files"}),
    "its checksum is wrong": Case(sql(f"UPDATE table_files SET checksum = 'xxh3:0' {FIRST}"), {"files"}),
    "its rows are wrong": Case(sql(f"UPDATE table_files SET row_count = row_count + 1 {FIRST}"), {"files"}),
    "its commit was aborted": Case(sql("UPDATE commits SET state = 'aborted' WHERE id = '{commit}'"), {"commits"}),
    "its commit is gone": Case(sql("DELETE FROM commits WHERE id = '{commit}'"), {"commits"}),
    "it begins in the future": Case(sql(f"UPDATE table_files SET from_version = 99 {FIRST}"), {"versions"}),
    "it ends in the future": Case(sql(f"UPDATE table_files SET to_version = 99 {FIRST}"), {"versions", "statistics"}),
    "its id was never given": Case(sql("UPDATE tables SET last_file_id = 1 WHERE id = {table}"), {"versions"}),
    "its statistics are gone": Case(
        sql("DELETE FROM file_column_stats WHERE table_id = {table} AND file_id = 1"), {"statistics"}, True
    ),
    "its statistics leave out rows": Case(
        lambda book, table, file: run_sql(
            book,
            "UPDATE file_column_stats SET lower_bound = upper_bound, width = 0"
            f" WHERE table_id = {table.id} AND file_id = 1 AND field_id = 1",
        ),
        {"statistics"},
        True,
    ),
    "its statistics say that there is nothing": Case(
        sql(
            "UPDATE file_column_stats SET lower_bound = NULL, upper_bound = NULL, width = -1"
            " WHERE table_id = {table} AND file_id = 1"
        ),
        {"statistics"},
        True,
    ),
    "it is retired but does not wait": Case(retire_by_hand, {"files"}),
    "it waits but is used": Case(wait_by_hand, {"files"}),
    # --- footers
    "a footer is gone": Case(sql("DELETE FROM partition_metadata WHERE file_path = '{path}'"), {"footers"}, True),
    "a footer is another": Case(stored_footer(flipped), {"footers"}, True),
    "a footer is none": Case(stored_footer(lambda data: b"nothing"), {"footers"}, True),
    "a footer is empty": Case(stored_footer(lambda data: b""), {"footers"}, True),
    "a footer of the older format is broken": Case(broken_old_footer, {"footers"}, True),
    "a footer of the older format is another": Case(other_old_footer, {"footers"}, True),
    "a footer is of an unknown format": Case(
        sql("UPDATE partition_metadata SET partition_format_version = 7 WHERE file_path = '{path}'"), {"footers"}
    ),
    "a footer is not needed": Case(dangling_footer, {"footers"}, True),
    # --- totals
    "the rows are wrong": Case(sql("UPDATE tables SET row_count = 1 WHERE id = {table}"), {"statistics"}, True),
    "the files are wrong": Case(sql("UPDATE tables SET file_count = 9 WHERE id = {table}"), {"statistics"}, True),
    "the bytes are wrong": Case(sql("UPDATE tables SET total_size = 0 WHERE id = {table}"), {"statistics"}, True),
    "the totals are wrong": Case(
        sql(f"UPDATE table_stats SET row_count = 0, file_count = 7 {ONE}"), {"statistics"}, True
    ),
    "all totals are wrong": Case(wrong_totals, {"statistics"}, True),
    "statistics are not needed": Case(dangling_stats, {"statistics"}, True),
    # --- versions
    "the horizon is gone": Case(sql(f"DELETE FROM table_horizons {ONE}"), {"versions"}),
    "a version is gone": Case(sql(f"DELETE FROM table_versions {ONE} AND version = 1"), {"versions"}),
    "the newest version is gone": Case(sql(f"DELETE FROM table_versions {ONE} AND version = 2"), {"versions"}),
    "the horizon is in the future": Case(sql(f"UPDATE table_horizons SET min_readable = 9 {ONE}"), {"versions"}),
    "a lease is on a version that cannot be read": Case(lease_by_hand, {"leases"}),
    # --- objects
    "an object is nobody's": Case(laid("data/{table}/stray/x.parquet"), {"orphans"}),
    "an object lies beside the tables": Case(laid("data/x.parquet"), {"orphans"}),
    "a sidecar was left": Case(laid("data/{table}/{commit}/.x.parquet.crc"), {"orphans"}, True),
    "a mark was left": Case(laid("data/{table}/{commit}/_SUCCESS"), {"orphans"}, True),
}


@pytest.fixture
def good(place: Place) -> Book:
    """A book with a table of two files, whose inserts are settled and forgotten."""
    book = place.open(sweep_grace=0)
    table = numbers(book, "t", [1, 2, 3], [11, 12])
    numbers(book, "other", [1])
    book.cleaner.sweep()
    book.cleaner.sweep()
    assert records(book, schema.inserts) == []
    found = book.verify()
    assert (found.ok, found.unfinished) == (True, ())
    assert (found.checked["table_files"], found.checked["data_files"], found.checked["objects"]) == (3, 3, 3)
    assert check_totals(book, table)[:2] == (5, 2)
    return book


@in_memory
@pytest.mark.parametrize("name", CASES)
def test_every_damage_is_found_and_repaired_or_told(good: Book, name: str) -> None:
    case = CASES[name]
    table = good.table("t")
    case.damage(good, table, files_of(good, table)[0])
    found = good.verify()
    assert not found.ok
    assert {finding.check for finding in found.findings} >= case.checks
    assert all(finding.on and finding.what for finding in found.findings)
    # A dry run says what would be done, and does nothing.
    before, there = registry_state(good), objects(good)
    foreseen = good.repair(dry_run=True)
    assert (registry_state(good), objects(good)) == (before, there)
    assert foreseen.dry_run
    done = good.repair()
    assert not done.dry_run
    assert bool(foreseen.mended) == bool(done.mended)
    # What was wrong with the events of a row goes with what was wrong with the row.
    assert done.left == [finding for finding in foreseen.left if finding.check != "events" or not case.mended]
    after = good.verify()
    if case.mended:
        assert after.ok, after.findings
        assert done.mended
        assert done.left == []
        assert ids(table) == [1, 2, 3, 11, 12]
        check_totals(good, table)
    else:
        # What cannot be mended is still there, and was told.
        assert not after.ok
        assert {(finding.check, finding.on) for finding in after.findings} <= {
            (finding.check, finding.on) for finding in done.left
        }
        assert set(objects(good)) == set(there)
    assert ids(good.table("other")) == [1]


def test_a_totals_row_that_is_gone_is_mended_or_told(good: Book) -> None:
    run_sql(good, "DELETE FROM table_stats WHERE table_id = 1")
    assert {finding.check for finding in good.verify().findings} >= {"statistics"}
    done = good.repair()
    # Not neither: whoever runs it has to know where the book stands.
    assert good.verify().ok or done.left


def test_a_footer_row_that_says_other_numbers_is_mended_or_told(good: Book) -> None:
    run_sql(good, "UPDATE partition_metadata SET num_rows = 99, file_size = 7 WHERE file_path LIKE 'data/1/%'")
    assert {finding.check for finding in good.verify().findings} == {"footers"}
    done = good.repair()
    assert good.verify().ok or len(done.left) == 2


@in_memory
def test_a_footer_is_not_taken_from_a_file_that_is_not_the_one_recorded(good: Book) -> None:
    table = good.table("t")
    (first, _) = files_of(good, table)
    run_sql(good, f"DELETE FROM partition_metadata WHERE file_path = '{first['file_path']}'")
    replace_bytes(good, first["file_path"], flipped)
    done = good.repair()
    assert done.mended == []
    assert {finding.check for finding in done.left} == {"files", "footers"}
    assert not any(row["file_path"] == first["file_path"] for row in records(good, schema.partition_metadata))


def test_footers_of_the_older_format_are_read_and_upgraded(place: Place) -> None:
    book = place.open(cache_footers=0)
    table = numbers(book, "t", [1, 2], [3])
    run_sql(book, "UPDATE partition_metadata SET partition_format_version = 1, num_rows = NULL")
    assert book.verify().ok
    assert ids(table, "id > 1") == [2, 3]
    assert book.upgrade_footers() == (2, [])
    stored = records(book, schema.partition_metadata)
    assert sorted((row["partition_format_version"], row["num_rows"]) for row in stored) == [(2, 1), (2, 2)]
    assert book.upgrade_footers() == (0, [])
    assert ids(table, "id > 1") == [2, 3]
    assert book.verify().ok


def test_footers_that_were_upgraded_are_those_of_their_files(place: Place) -> None:
    book = place.open(cache_footers=0)
    table = numbers(book, "t", [1, 2])
    # With a column index, which an upgrade leaves out.
    foreign = lay(book, "in/a.parquet", legacy_footers.parquet(rows_of(table, [{"id": 3}])))
    table.add_files([foreign])
    for file in files_of(book, table):
        stored_footer(legacy_footers.as_version_1)(book, table, file)
        sql(_OLD)(book, table, file)
    assert book.verify().ok
    assert book.upgrade_footers() == (2, [])
    (row,) = records(book, schema.partition_metadata, file_path=foreign)
    assert row["metadata"] != legacy_footers.split(book.lake.store.read(foreign))[1]
    found = book.verify()
    assert found.ok, found.findings
    assert ids(table, "id > 1") == [2, 3]


def test_a_broken_footer_of_the_older_format_is_told_by_the_upgrade_and_mended_by_repair(place: Place) -> None:
    book = place.open(cache_footers=0)
    table = numbers(book, "t", [1, 2], [3])
    first, _ = files_of(book, table)
    run_sql(book, "UPDATE partition_metadata SET partition_format_version = 1, num_rows = NULL")
    broken_old_footer(book, table, first)
    assert book.upgrade_footers() == (1, [first["file_path"]])
    (finding,) = book.verify().findings
    assert (finding.check, finding.on) == ("footers", first["file_path"])
    assert finding.what.startswith("the stored footer is broken (")
    assert book.repair().left == []
    assert book.verify().ok
    assert book.upgrade_footers() == (0, [])
    assert ids(table) == [1, 2, 3]


def test_statistics_taken_from_the_footer_find_the_same_rows(place: Place) -> None:
    book = place.open()
    table = book.tables.create("t", "id BIGINT, s STRING, d DOUBLE, n STRUCT<x: INT>", partition_by=["bucket(4, id)"])
    for number in range(4):
        insert(table, {"id": number, "s": f"s{number}", "d": number / 2, "n": {"x": -number}})
    with table.update_schema() as update:
        update.add_column("late", "INT")
    before = {file["id"]: stats_of(book, table, file["id"]) for file in files_of(book, table)}
    run_sql(book, f"DELETE FROM file_column_stats WHERE table_id = {table.id} AND field_id <> 2")
    done = book.repair()
    assert (len(done.mended), done.left) == (4, [])
    assert book.verify().ok
    for file_id, stats in before.items():
        found = stats_of(book, table, file_id)
        # How many values are NaN, no footer tells.
        unknown = {"nan_count": None, "width": 65, "low_key": 0}
        assert {key: {**row, **unknown} for key, row in found.items()} == {
            key: {**row, **unknown} for key, row in stats.items()
        }
    for where, wanted in (("id = 2", [2]), ("s > 's1'", [2, 3]), ("n.x = -3", [3]), ("d < 1", [0, 1])):
        assert ids(table, where) == wanted
    extremes = table.min_max("s")
    assert extremes is not None and (extremes.least, extremes.largest) == ("s0", "s3")


@pytest.mark.parametrize("place", [SQLITE], indirect=True)
def test_a_file_that_is_a_link_out_of_the_warehouse_stops_neither_verify_nor_repair(
    place: Place, tmp_path: Path
) -> None:
    book = place.open()
    table = numbers(book, "t", [1], [2])
    numbers(book, "published", [3]).publish()
    first, second = files_of(book, table)
    (outside := tmp_path / "outside").mkdir()
    metadata = book.table("published").metadata_location
    assert metadata is not None
    links = [first["file_path"], "data/1/stray", book.lake.store.relative(metadata)]
    for number, path in enumerate(links):
        place_of = book.lake.store.local_path(path)
        assert place_of is not None
        target = outside / str(number)
        target.write_bytes(place_of.read_bytes() if place_of.exists() else b"")
        place_of.unlink(missing_ok=True)
        place_of.symlink_to(target)
    replace_bytes(book, second["file_path"], flipped)
    found = book.verify()
    told = {(finding.check, finding.on) for finding in found.findings}
    assert told >= {
        ("files", first["file_path"]),
        ("files", second["file_path"]),
        ("orphans", "data/1/stray"),
        ("published", links[2]),
    }
    run_sql(book, f"DELETE FROM partition_metadata WHERE file_path = '{first['file_path']}'")
    run_sql(book, f"DELETE FROM file_column_stats WHERE table_id = {table.id}")
    left = {(finding.check, finding.on) for finding in book.repair().left}
    assert left >= {*told, ("footers", first["file_path"]), ("statistics", first["file_path"])}
    data = book.lake.store.local_path("data")
    assert data is not None
    data.rename(outside / "data")
    data.symlink_to(outside / "data")
    told = {(finding.check, finding.on) for finding in book.verify().findings}
    assert told >= {("files", first["file_path"]), ("files", second["file_path"]), ("orphans", "data")}


def test_several_damages_are_all_found_at_once(good: Book) -> None:
    table = good.table("t")
    first, second = files_of(good, table)
    replace_bytes(good, first["file_path"], flipped)
    good.lake.store.delete_one(second["file_path"])
    run_sql(good, "UPDATE tables SET row_count = 0")
    lay(good, "data/1/stray/x", b"stray")
    dangling_footer(good, table, first)
    found = {(finding.check, finding.on) for finding in good.verify().findings}
    assert found >= {
        ("files", first["file_path"]),
        ("files", second["file_path"]),
        ("statistics", "table default.t"),
        ("orphans", "data/1/stray/x"),
        ("footers", "gone.parquet"),
    }
    # Without the files, only what the registry knows.
    assert {finding.check for finding in good.verify(files=False).findings} == {"statistics", "footers", "events"}
    steps: list[str] = []
    good.verify(steps.append)
    wanted = ["tables", "data files", "orphans"]
    assert [step for step in steps if step in wanted] == wanted


def test_several_damages_are_all_mended_at_once(good: Book) -> None:
    table = good.table("t")
    first, second = files_of(good, table)
    wrong_totals(good, table, first)
    dangling_footer(good, table, first)
    dangling_stats(good, table, first)
    stored_footer(flipped)(good, table, first)
    run_sql(good, f"DELETE FROM partition_metadata WHERE file_path = '{second['file_path']}'")
    lay(good, f"data/{table.id}/{first['commit_id']}/.x.crc", b"crc")
    checks = {finding.check for finding in good.verify().findings}
    assert checks == {"statistics", "footers", "orphans", "events"}
    done = good.repair()
    assert done.left == []
    assert len(done.mended) >= 6
    found = good.verify()
    assert (found.ok, found.unfinished) == (True, ())
    assert check_totals(good, table)[:2] == (5, 2)
    assert ids(table, "id > 10") == [11, 12]


@in_memory
def test_damage_to_ended_files_and_dropped_tables_is_found_too(place: Place) -> None:
    book = place.open(temporary_file_grace=0)
    table = numbers(book, "t", [1], [2])
    table.delete("id = 1")
    (ended, _) = files_of(book, table)
    replace_bytes(book, ended["file_path"], flipped)
    assert [(finding.check, finding.on) for finding in book.verify().findings] == [("files", ended["file_path"])]
    book.cleaner.expire(seconds=0, versions=1)
    assert not book.verify().ok
    # Once it is gone there is nothing wrong any more.
    book.cleaner.delete_expired_temporary_files()
    assert book.verify().ok


def test_files_of_others_are_verified_where_they_lie(book: Book) -> None:
    table = numbers(book, "t")
    table.add_files([lay(book, "in/a.parquet", rows_of(table, [{"id": 1}]))])
    lay(book, "in/unknown.parquet", b"not ours")
    assert book.verify().ok
    replace_bytes(book, "in/a.parquet", flipped)
    assert {finding.on for finding in book.verify().findings} == {"in/a.parquet"}


def test_repair_sweeps_what_inserts_left_and_does_not_touch_what_is_at_work(place: Place) -> None:
    book = place.open()
    table = numbers(book, "t", [1])
    with Attempt(book.lake, table.record) as attempt:
        lay(book, f"{attempt.folder}/part.parquet", rows_of(table, [{"id": 2}]))
        lay(book, f"data/{table.id}/{files_of(book, table)[0]['commit_id']}/.x.crc", b"crc")
        before = objects(book)
        assert len(before) == 3
        foreseen = book.repair(dry_run=True)
        assert (len(foreseen.mended), objects(book)) == (1, before)
        done = book.repair()
        assert (len(done.mended), done.left) == (1, [])
        assert objects(book) == [path for path in before if not path.endswith(".crc")]
    assert ids(table) == [1]
    assert book.verify().ok


@in_memory
def test_repair_of_a_good_book_does_nothing(good: Book) -> None:
    before, there = registry_state(good), objects(good)
    done = good.repair()
    assert (done.mended, done.left) == ([], [])
    assert (registry_state(good), objects(good)) == (before, there)


def test_repair_leaves_what_a_large_insert_has_staged(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "STAGED", 2)
    monkeypatch.setattr(table_files.chunks, "__defaults__", (2,))
    table = numbers(book, "t", partition_by=["id"])
    foreign = numbers(book, "foreign")
    paths = [lay(book, f"in/{number}.parquet", rows_of(foreign, [{"id": number}])) for number in range(3)]

    def repair() -> None:
        # Something else is wrong, and mended, while the insert is at work.
        run_sql(book, f"UPDATE tables SET row_count = 99 WHERE id = {foreign.id}")
        book.repair()

    with failpoints.armed("insert.chunk_staged", repair):
        table.insert_arrow(pa.table({"id": list(range(5))}))
        foreign.add_files(paths)
    book.repair()
    assert book.verify().ok
    for number in range(5):
        assert ids(table, f"id = {number}") == [number]
    for number in range(3):
        assert ids(foreign, f"id = {number}") == [number]


# --- a book in use -------------------------------------------------------------

POINTS = (
    "insert.reserved",
    "insert.arrow_written",
    "insert.chunk_staged",
    "change.written",
    "change.committed",
    "appender.rotated",
    "expire.retired",
    "clean.marked",
    "clean.object_deleted",
    "clean.forgotten",
    "sweep.fenced",
    "sweep.folder_deleted",
    "lease.taken",
)


def test_no_point_at_which_another_is_looks_like_damage(shared_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "STAGED", 2)
    monkeypatch.setattr(table_files.chunks, "__defaults__", (2,))
    book = shared_place.open(temporary_file_grace=0, insert_alive=0.1, sweep_grace=0)
    observer = shared_place.open()
    table = numbers(book, "t", partition_by=["id"])
    seen: dict[str, int] = {}
    count = itertools.count()

    def work() -> None:
        table.insert_arrow(pa.table({"id": list(range(5))}))
        with table.appender(max_rows=1, files_per_commit=2) as appender:
            appender.append([{"id": 7}])
            appender.append([{"id": 8}])
        table.delete("id < 3")
        with table.pin():
            numbers(book, f"other{next(count)}", [1])
        dead = Attempt(book.lake, table.record).__enter__()
        lay(book, f"{dead.folder}/x.parquet", b"x")
        book.lake.renewals.let_go(dead.commit_id)
        run_sql(book, "UPDATE inserts SET alive_until = 0")
        book.cleaner.sweep()
        book.cleaner.expire(seconds=0, versions=1)
        book.cleaner.delete_expired_temporary_files()

    for point in POINTS:

        def look(point: str = point) -> None:
            seen[point] = seen.get(point, 0) + 1
            if seen[point] <= 2:
                found = observer.verify()
                assert found.ok, (point, found.findings)

        with failpoints.armed(point, look):
            work()
    assert set(seen) == set(POINTS)
    assert book.verify().ok


def test_a_busy_book_gives_no_false_alarm(shared_place: Place) -> None:
    book = shared_place.open(temporary_file_grace=0, sweep_grace=0)
    observer = shared_place.open()
    table = numbers(book, "t", [0])
    failures: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            for number in range(1, 12):
                insert(table, {"id": number})
                table.delete(f"id = {number - 1}")
                book.cleaner.expire(seconds=0, versions=1)
                book.cleaner.delete_expired_temporary_files()
                book.cleaner.sweep()
                numbers(book, f"t{number}", [1])
                book.tables.drop(f"t{number}")
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)
        finally:
            done.set()

    worker = threading.Thread(target=work)
    worker.start()
    looks = 0
    while not done.is_set() or looks == 0:
        found = observer.verify()
        looks += 1
        assert found.ok, found.findings
    worker.join(PATIENCE)
    assert failures == []
    assert ids(observer.table("t")) == [11]
    assert book.verify().ok
