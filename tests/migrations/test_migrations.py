"""Migrations, replayed from empty, give exactly the declared schema, and can be resumed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.dialects.postgresql.base import ischema_names

from books import POSTGRESQL, SQLITE, Place
from lakebook import failpoints
from lakebook.book import migrate_book
from lakebook.config import load_settings
from lakebook.errors import BookNotFound, SchemaOutdated, SchemaTooNew
from lakebook.registry import schema
from lakebook.registry.databases import Database, database_for
from lakebook.registry.migrate import HEAD, REVISIONS, VERSION_TABLE, migrate, migrate_to, revision_of

KINDS = [SQLITE, POSTGRESQL]


@pytest.fixture(params=KINDS)
def empty(request: pytest.FixtureRequest, make_place: Callable[..., Place]) -> Place:
    return make_place(request.param, with_book=False)


@pytest.fixture(autouse=True)
def nothing_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has the migrations themselves, whatever was made in this process before."""
    monkeypatch.setattr("lakebook.registry.migrate._made", None)


def database_of(place: Place) -> Database:
    database = database_for(load_settings(place.target, place.settings))
    path = getattr(database, "path", None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    return database


def in_database(place: Place, statement: str) -> Any:
    with database_of(place).engine() as engine, engine.begin() as connection:
        result = connection.execute(sa.text(statement))
        return result.fetchall() if result.returns_rows else None


def test_the_list_of_revisions_is_that_of_the_migrations() -> None:
    config = Config()
    config.set_main_option("script_location", "lakebook.registry:migrations")
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    assert tuple(script.revision for script in reversed(list(scripts.walk_revisions()))) == REVISIONS


def test_migrations_from_empty_give_the_declared_schema(empty: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ischema_names, "xid8", schema.Xid8)  # SQLAlchemy does not know the type.
    database = database_of(empty)
    migrate(database)
    with database.engine() as engine, engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={"version_table": VERSION_TABLE, "compare_type": True},
        )
        assert compare_metadata(context, schema.metadata) == []


def normal(sql: str) -> str:
    return re.sub(r"\s+", " ", sql.replace('"', "")).strip()


def top_level(sql: str) -> list[str]:
    """The columns and constraints between the outermost parentheses."""
    found, depth = [""], 0
    for character in sql:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 1:
            found.append("")
        else:
            found[-1] += character
    return [part.replace("(", " ").replace(")", " ").replace("CREATE TABLE", "").strip() for part in found]


def declared_and_migrated(place: Place, other: Place, query: str) -> tuple[set[Any], set[Any]]:
    database, declared = database_of(place), database_of(other)
    migrate(database)
    with declared.engine() as engine, engine.begin() as connection:
        schema.metadata.create_all(connection)
    return (
        {tuple(normal(str(value)) for value in row) for row in in_database(other, query)},
        {tuple(normal(str(value)) for value in row) for row in in_database(place, query)},
    )


def test_on_sqlite_every_table_index_and_check_is_as_declared(make_place: Callable[..., Place], tmp_path: Any) -> None:
    place = make_place(SQLITE)
    other = Place(SQLITE, str(tmp_path / "declared"), {})
    query = f"SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' AND name <> '{VERSION_TABLE}'"
    declared, migrated = declared_and_migrated(place, other, query)

    def parts(rows: set[Any]) -> dict[str, list[str]]:
        # The order of constraints within a table is no part of what it means.
        return {name: sorted(top_level(sql)) for name, sql in rows}

    assert parts(migrated) == parts(declared)


def test_what_a_process_has_migrated_it_makes_again_just_so(tmp_path: Any) -> None:
    (tmp_path / "third").mkdir()
    places = [Place(SQLITE, str(tmp_path / name), {}) for name in ("first", "second", "third")]
    in_database(places[2], "CREATE TABLE somebodys (name TEXT)")
    applied = [migrate(database_of(place)).applied for place in places]
    assert applied == [REVISIONS] * 3

    def told(place: Place) -> Any:
        parts = in_database(place, "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY rowid")
        rows = {name: in_database(place, f"SELECT * FROM {name}") for kind, name, *_ in parts if kind == "table"}
        return parts, rows, in_database(place, "PRAGMA auto_vacuum"), in_database(place, "PRAGMA journal_mode")

    assert told(places[0]) == told(places[1])
    # One in which somebody has tables is not empty: nothing of it comes into others, and it is migrated.
    ours = [part for part in told(places[2])[0] if part[1] != "somebodys"]
    assert ours == told(places[0])[0]
    for place in places:
        with place.open() as book:
            assert book.verify().ok


def test_a_step_that_fails_where_all_are_made_at_once_leaves_nothing(tmp_path: Any) -> None:
    first, second = (database_of(Place(SQLITE, str(tmp_path / name), {})) for name in ("first", "second"))
    migrate(first)

    def fail() -> None:
        raise RuntimeError("the disk is full")

    with failpoints.armed("migration.step", fail), pytest.raises(RuntimeError):
        migrate(second)
    assert revision_of(second) is None
    assert migrate(second).applied == REVISIONS


POSTGRESQL_CATALOG = f"""
    SELECT 'column', table_name, column_name, data_type || is_nullable || coalesce(collation_name, '')
           || is_identity || coalesce(column_default, '')
    FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> '{VERSION_TABLE}'
    UNION ALL
    SELECT 'index', tablename, indexname, indexdef FROM pg_indexes
    WHERE schemaname = 'public' AND tablename <> '{VERSION_TABLE}'
    UNION ALL
    SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid)
    FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text <> '{VERSION_TABLE}'
    UNION ALL
    SELECT 'storage', oid::regclass::text, unnest(reloptions), '' FROM pg_class
    WHERE relnamespace = 'public'::regnamespace
    UNION ALL
    SELECT 'toast', c.oid::regclass::text, unnest(t.reloptions), '' FROM pg_class c JOIN pg_class t
    ON c.reltoastrelid = t.oid WHERE c.relnamespace = 'public'::regnamespace
"""


def test_on_postgresql_every_column_index_and_constraint_is_as_declared(make_place: Callable[..., Place]) -> None:
    declared, migrated = declared_and_migrated(
        make_place(POSTGRESQL, with_book=False), make_place(POSTGRESQL, with_book=False), POSTGRESQL_CATALOG
    )
    assert migrated == declared
    assert len(declared) > 100


def test_nothing_cascades() -> None:
    for table in schema.metadata.tables.values():
        for key in table.foreign_keys:
            assert key.ondelete is None
            assert key.onupdate is None


def give_identity(place: Place) -> None:
    in_database(
        place,
        "INSERT INTO book (id, book_id, epoch, warehouse, created_at, epoch_since)"
        f" VALUES (1, '{'b' * 32}', '{'e' * 32}', '{recorded_warehouse(place)}', 1, 1)",
    )


def test_an_older_schema_is_refused_with_the_command_that_mends_it(empty: Place) -> None:
    migrate_to(database_of(empty), REVISIONS[0])
    give_identity(empty)
    with pytest.raises(SchemaOutdated, match="lakebook migrate"):
        empty.open()


def test_an_older_book_is_migrated_and_keeps_what_it_holds(empty: Place) -> None:
    database = database_of(empty)
    migrate_to(database, REVISIONS[0])
    give_identity(empty)
    in_database(empty, "INSERT INTO lake_objects (kind, last_sequence, last_commit_at) VALUES ('topic', 0, 5)")
    in_database(
        empty,
        "INSERT INTO topics (object_id, name, partition_count, config, created_at, updated_at)"
        " VALUES (1, 'orders', 1, '{}', 5, 5)",
    )
    steps: list[str] = []
    done = migrate_book(empty.target, progress=steps.append, **empty.settings)
    assert (done.before, done.after, list(done.applied)) == (REVISIONS[0], HEAD, list(REVISIONS[1:]))
    assert steps == list(REVISIONS[1:])
    book = empty.open()
    assert book.identity.book_id == "b" * 32
    assert book.metadata.get_topic("orders") is not None
    assert migrate_book(empty.target, **empty.settings).applied == ()


def recorded_warehouse(place: Place) -> str:
    return "warehouse" if place.kind == SQLITE else str(place.settings["warehouse"])


def test_a_newer_schema_is_refused(empty: Place) -> None:
    empty.open().close()
    in_database(empty, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(SchemaTooNew):
        empty.open()
    with pytest.raises(SchemaTooNew):
        migrate_book(empty.target, **empty.settings)


def test_where_there_is_no_book_there_is_nothing_to_migrate(empty: Place) -> None:
    with pytest.raises(BookNotFound):
        migrate_book(empty.target, **empty.settings)


@pytest.mark.parametrize("step", range(1, len(REVISIONS) + 1))
def test_a_migration_killed_at_any_step_is_resumed(empty: Place, step: int) -> None:
    program = "import sys, json, lakebook; lakebook.open(sys.argv[1], **json.loads(sys.argv[2]))"
    killed = subprocess.run(
        [sys.executable, "-c", program, empty.target, json.dumps(empty.settings)],
        env={**os.environ, "LAKEBOOK_FAILPOINTS": f"migration.step=kill@{step}"},
        check=False,
    )
    assert killed.returncode == -9
    # A revision is one transaction: the one that was under way has left nothing.
    assert revision_of(database_of(empty)) == (REVISIONS[step - 2] if step > 1 else None)
    # Opening it finishes what was begun: there is no older book, but one that was being made.
    book = empty.open()
    book.metadata.create_topic("orders")
    assert book.verify().ok


def test_a_book_whose_creation_stopped_before_its_row_is_finished_by_the_next_open(empty: Place) -> None:
    migrate(database_of(empty))
    book = empty.open()
    book.metadata.create_topic("orders")
    assert empty.open().identity == book.identity


def test_a_failing_step_leaves_the_revision_before_it(empty: Place) -> None:
    database = database_of(empty)
    steps = 0

    def fail() -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise RuntimeError("the disk is full")

    with failpoints.armed("migration.step", fail), pytest.raises(RuntimeError):
        migrate(database)
    assert revision_of(database) == REVISIONS[0]
    assert migrate(database).applied == REVISIONS[1:]


def test_what_was_removed_from_a_topic_before_losses_were_known_counts_as_lost(empty: Place) -> None:
    migrate_to(database_of(empty), "0011")
    give_identity(empty)
    in_database(empty, "INSERT INTO lake_objects (kind, last_sequence, last_commit_at) VALUES ('topic', 0, 5)")
    in_database(
        empty,
        "INSERT INTO topics (object_id, name, partition_count, config, created_at, updated_at)"
        " VALUES (1, 'orders', 3, '{}', 5, 5)",
    )
    for number, start in enumerate((0, 7, 7)):
        in_database(
            empty,
            "INSERT INTO partitions (topic_id, partition_id, object_id, high_watermark, log_start, created_at,"
            f" updated_at) VALUES (1, {number}, 1, 10, {start}, 5, 90000)",
        )
    columns = "id, topic_id, partition_id, base_offset, end_offset, record_count, s3_bucket, s3_key"
    times = "min_timestamp, max_timestamp, newest_timestamp, size_bytes, created_at, commit_id"
    in_database(
        empty,
        f"INSERT INTO segments ({columns}, {times})"
        " VALUES ('s', 1, 1, 7, 9, 3, 'b', 'k', 600001, 700000, 700000, 1, 5, 'c')",
    )
    migrate_book(empty.target, **empty.settings)
    found = in_database(empty, "SELECT part, begin_time, end_time FROM source_losses ORDER BY part")
    assert [tuple(row) for row in found] == [(1, -(2**62), 660000), (2, -(2**62), 120000)]
