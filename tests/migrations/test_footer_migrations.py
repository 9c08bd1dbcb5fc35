"""Footers move from the rows of their ranges into a table of their own, and none is lost on the way."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa

from books import POSTGRESQL, SQLITE, Place
from lakebook import failpoints
from lakebook.config import load_settings
from lakebook.errors import MigrationFailed
from lakebook.registry.databases import Database, database_for
from lakebook.registry.migrate import HEAD, VERSION_TABLE, migrate, migrate_to, revision_of

INLINE, MOVED, DROPPED = "0003", "0004", "0005"
CHUNK_ROWS, CHUNK_BYTES = 500, 16 * 2**20

PARTITIONS = sa.table(
    "lakehouse_partitions",
    *map(
        sa.column,
        (
            "view_set_name",
            "view_instance_id",
            "begin_insert_time",
            "end_insert_time",
            "schema_hash",
            "source_hash",
            "num_rows",
            "file_path",
            "file_size",
            "partition_format_version",
            "updated",
            "file_metadata",
        ),
    ),
)


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def older(request: pytest.FixtureRequest, make_place: Callable[..., Place]) -> Place:
    """A registry from the time when footers were kept in the rows of their ranges."""
    place = make_place(request.param, with_book=False)
    database = database_of(place)
    path = getattr(database, "path", None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        database.create()
    migrate_to(database, INLINE)
    return place


def database_of(place: Place) -> Database:
    return database_for(load_settings(place.target, place.settings))


def in_database(place: Place, statement: Any, *values: Any) -> list[tuple[Any, ...]]:
    if isinstance(statement, str):
        statement = sa.text(statement)
    with database_of(place).engine() as engine, engine.begin() as connection:
        result = connection.execute(statement, *values)
        return [tuple(row) for row in result] if result.returns_rows else []


def a_range(number: int, footer: bytes | None, path: str | None = "") -> dict[str, Any]:
    return {
        "view_set_name": "orders",
        "view_instance_id": "global",
        "begin_insert_time": number * 1000,
        "end_insert_time": number * 1000 + 1000,
        "schema_hash": "s1",
        "source_hash": f"hash-{number}",
        "num_rows": number,
        "file_path": f"views/{number:06d}.parquet" if path == "" else path,
        "file_size": 10 * number,
        "partition_format_version": 1 + number % 2,
        "updated": 5_000_000 + number,
        "file_metadata": footer,
    }


def add(place: Place, ranges: list[dict[str, Any]]) -> None:
    in_database(place, sa.insert(PARTITIONS), ranges)


def mixed(number: int) -> list[dict[str, Any]]:
    """Footers of many sizes, many above a page of either database; every fourth range has none."""
    chance = random.Random(number)
    ranges = []
    for index in range(number):
        if index % 4 == 3:
            # With a file whose footer was not kept, or without any file.
            ranges.append(a_range(index, None, None if index % 8 == 7 else ""))
        else:
            size = chance.choice((0, 1, 200, 1000)) if index % 50 else chance.randrange(8193, 40_000)
            ranges.append(a_range(index, chance.randbytes(size)))
    return ranges


def expected(ranges: list[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    return {
        row["file_path"]: (
            row["file_metadata"],
            row["partition_format_version"],
            row["num_rows"],
            row["file_size"],
            row["updated"],
        )
        for row in ranges
        if row["file_metadata"] is not None
    }


def moved(place: Place) -> dict[str, tuple[Any, ...]]:
    names = "metadata, partition_format_version, num_rows, file_size, insert_time"
    rows = in_database(place, f"SELECT file_path, {names} FROM partition_metadata")
    return {path: (bytes(metadata), *rest) for path, metadata, *rest in rows}


def inline(place: Place) -> dict[str, bytes]:
    rows = in_database(
        place, "SELECT file_path, file_metadata FROM lakehouse_partitions WHERE file_metadata IS NOT NULL"
    )
    return {path: bytes(footer) for path, footer in rows}


def columns(place: Place) -> set[str]:
    with database_of(place).engine() as engine:
        return {column["name"] for column in sa.inspect(engine).get_columns("lakehouse_partitions")}


def test_footers_move_with_what_is_known_of_their_files(older: Place) -> None:
    ranges = mixed(700)
    add(older, ranges)
    kept = "SELECT * FROM lakehouse_partitions ORDER BY id"
    before = in_database(older, kept)
    migrate_to(database_of(older), MOVED)
    assert moved(older) == expected(ranges)
    assert any(len(footer) > 8192 for footer, *_ in moved(older).values())
    # Whoever reads them in their old place still finds every one.
    assert in_database(older, kept) == before
    migrate_to(database_of(older), DROPPED)
    assert moved(older) == expected(ranges)
    assert "file_metadata" not in columns(older)
    assert in_database(older, kept) == [row[:-1] for row in before]


def test_a_book_without_ranges_passes_through(older: Place) -> None:
    migrate(database_of(older))
    assert moved(older) == {}
    assert revision_of(database_of(older)) == HEAD


def sizes_of_chunks(place: Place) -> list[tuple[int, int]]:
    """Move the footers, and look from outside at what each chunk has committed: rows and bytes."""
    seen = [(0, 0)]

    def look() -> None:
        query = "SELECT count(*), coalesce(sum(length(metadata)), 0) FROM partition_metadata"
        ((rows, size),) = in_database_while_migrating(place, query)
        seen.append((rows, int(size)))

    with failpoints.armed("migration.footers_moved", look):
        migrate_to(database_of(place), MOVED)
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(seen)]


def in_database_while_migrating(place: Place, query: str) -> Any:
    connection = database_of(place).connect()
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_many_footers_are_moved_in_chunks_of_bounded_rows_that_are_committed_one_by_one(older: Place) -> None:
    add(older, [a_range(number, b"\x15\x04") for number in range(2 * CHUNK_ROWS + 100)])
    assert [rows for rows, _ in sizes_of_chunks(older)] == [CHUNK_ROWS, CHUNK_ROWS, 100]


def test_large_footers_are_moved_in_chunks_of_bounded_bytes(older: Place) -> None:
    mib = 2**20
    sizes = [5 * mib, 5 * mib, 5 * mib, 5 * mib, 17 * mib, mib, 100]
    add(older, [a_range(number, random.Random(number).randbytes(size)) for number, size in enumerate(sizes)])
    # Three fit; the one that is larger than a chunk goes alone.
    assert sizes_of_chunks(older) == [(3, 15 * mib), (1, 5 * mib), (1, 17 * mib), (2, mib + 100)]
    migrate_to(database_of(older), DROPPED)
    assert [len(footer) for _, (footer, *_) in sorted(moved(older).items())] == sizes


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_move_killed_after_a_chunk_goes_on_where_it_stopped(older: Place, chunk: int) -> None:
    ranges = mixed(1500)
    add(older, ranges)
    footers = {path: row[0] for path, row in expected(ranges).items()}
    assert 2 * CHUNK_ROWS < len(footers) <= 3 * CHUNK_ROWS
    in_child(older, f"migration.footers_moved=kill@{chunk}")
    # Half-way: the revision is still the old one, and every footer is in its old place.
    assert revision_of(database_of(older)) == INLINE
    assert inline(older) == footers
    assert len(moved(older)) == min(chunk * CHUNK_ROWS, len(footers))
    assert moved(older).items() <= expected(ranges).items()
    # The next run copies only what is missing.
    again: list[None] = []
    with failpoints.armed("migration.footers_moved", lambda: again.append(None)):
        migrate(database_of(older))
    assert len(again) == 3 - chunk
    assert moved(older) == expected(ranges)
    assert "file_metadata" not in columns(older)


def in_child(place: Place, points: str) -> None:
    """Migrate in a process that is killed at a failpoint."""
    program = (
        "import sys, json\n"
        "from lakebook.config import load_settings\n"
        "from lakebook.registry.databases import database_for\n"
        "from lakebook.registry.migrate import migrate\n"
        "migrate(database_for(load_settings(sys.argv[1], json.loads(sys.argv[2]))))\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program, place.target, json.dumps(place.settings)],
        env={**os.environ, "LAKEBOOK_FAILPOINTS": points},
        check=False,
    )
    assert killed.returncode == -9


def test_a_migration_killed_before_the_column_is_dropped_has_both(older: Place) -> None:
    ranges = mixed(40)
    add(older, ranges)
    in_child(older, "migration.step=kill@2")
    assert revision_of(database_of(older)) == MOVED
    assert moved(older) == expected(ranges)
    assert inline(older) == {path: row[0] for path, row in expected(ranges).items()}
    migrate(database_of(older))
    assert moved(older) == expected(ranges)


def test_ranges_that_came_after_a_stop_are_moved_too(older: Place) -> None:
    first, later = mixed(40), [a_range(number, b"later") for number in range(100, 110)]
    add(older, first)
    in_child(older, "migration.step=kill@1")
    add(older, later)
    migrate(database_of(older))
    assert moved(older) == expected(first + later)


def test_the_column_stays_while_a_footer_is_missing_or_differs(older: Place) -> None:
    ranges = mixed(40)
    add(older, ranges)
    database = database_of(older)
    migrate_to(database, MOVED)
    # As long as before: only its bytes tell.
    other = bytes(len(ranges[2]["file_metadata"]) + 1)
    in_database(older, "UPDATE lakehouse_partitions SET file_metadata = :b WHERE num_rows = 2", {"b": other})
    in_database(
        older,
        "UPDATE partition_metadata SET metadata = :b WHERE file_path = 'views/000002.parquet'",
        {"b": other[:-1] + b"\x01"},
    )
    with pytest.raises(MigrationFailed, match="0 footers are missing in partition_metadata and 1 differ there"):
        migrate(database)
    in_database(
        older, "DELETE FROM partition_metadata WHERE file_path IN ('views/000000.parquet', 'views/000001.parquet')"
    )
    with pytest.raises(MigrationFailed, match="2 footers are missing in partition_metadata and 1 differ there"):
        migrate(database)
    assert revision_of(database) == MOVED
    assert inline(older)["views/000002.parquet"] == other
    # What the error says to do is enough.
    in_database(older, "DELETE FROM partition_metadata WHERE file_path = 'views/000002.parquet'")
    in_database(older, f"UPDATE {VERSION_TABLE} SET version_num = '{INLINE}'")
    migrate(database)
    wanted = expected(ranges)
    wanted["views/000002.parquet"] = (other, *wanted["views/000002.parquet"][1:])
    assert moved(older) == wanted
    assert "file_metadata" not in columns(older)


def test_a_footer_that_belongs_to_no_file_is_not_thrown_away(older: Place) -> None:
    add(older, [a_range(1, b"1234"), a_range(2, b"123", None)])
    with pytest.raises(MigrationFailed, match="the ranges hold 2 footers of 7 bytes, and partition_metadata 1 of 4"):
        migrate(database_of(older))
    assert revision_of(database_of(older)) == INLINE
    in_database(older, "UPDATE lakehouse_partitions SET file_metadata = NULL WHERE file_path IS NULL")
    migrate(database_of(older))
    assert moved(older) == expected([a_range(1, b"1234")])


def test_a_footer_of_another_length_is_not_taken_for_the_same(older: Place) -> None:
    ranges = [a_range(1, b"1234"), a_range(2, b"123")]
    add(older, ranges)
    in_child(older, "migration.footers_moved=kill@1")
    in_database(older, "UPDATE partition_metadata SET metadata = :b WHERE num_rows = 1", {"b": b"12345"})
    with pytest.raises(MigrationFailed, match="2 of 8 bytes"):
        migrate(database_of(older))
    in_database(older, "DELETE FROM partition_metadata WHERE num_rows = 1")
    migrate(database_of(older))
    assert moved(older) == expected(ranges)


def test_an_id_that_was_given_before_is_not_given_again(older: Place) -> None:
    add(older, [a_range(number, b"1234") for number in range(10)])
    in_database(older, "DELETE FROM lakehouse_partitions WHERE num_rows >= 5")
    migrate(database_of(older))
    assert not refused(older, a_range(20, None))
    assert in_database(older, "SELECT id FROM lakehouse_partitions ORDER BY id DESC LIMIT 1") == [(11,)]


def refused(place: Place, row: dict[str, Any]) -> bool:
    """Add a range as it is today; whether the database took it."""
    row = {name: value for name, value in row.items() if name != "file_metadata"}
    try:
        in_database(place, sa.insert(sa.table("lakehouse_partitions", *map(sa.column, row))), [row])
    except sa.exc.IntegrityError:
        return True
    return False


def test_a_range_that_contradicts_itself_or_another_is_refused(older: Place) -> None:
    migrate(database_of(older))
    first, second = a_range(1, None), a_range(2, None)
    assert not refused(older, first)
    for change in (
        {"end_insert_time": second["begin_insert_time"]},
        {"num_rows": -1},
        {"file_size": -1},
        {"file_path": first["file_path"]},
        {"begin_insert_time": first["begin_insert_time"]},
        {"min_event_time": 2, "max_event_time": 1},
        {"min_event_time": 1},
        {"max_event_time": 1},
    ):
        assert refused(older, {**second, **change}), change
    assert not refused(older, {**second, "min_event_time": 1, "max_event_time": 1})
    # Another schema may have the same range, and ranges without a file do not clash.
    assert not refused(older, {**first, "schema_hash": "s2", "file_path": None})
    assert not refused(older, {**first, "schema_hash": "s3", "file_path": None})
