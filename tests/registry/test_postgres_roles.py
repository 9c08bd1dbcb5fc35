"""A role that owns its schema and nothing else can create a book there, migrate it, use it and look after it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

import lakebook
from books import Postgres, describe
from lakebook.book import migrate_book
from lakebook.config import load_settings
from lakebook.errors import RegistryNotWritable
from lakebook.registry.databases import database_for
from lakebook.registry.migrate import HEAD, migrate_to
from lakebook.registry.upkeep import keep_database

ROLE = "lake_keeper"
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture
def shared(postgres: Postgres) -> Iterator[str]:
    """A database of somebody else's, in which a role has one schema."""
    url = postgres.new_database(with_book=False)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {ROLE} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE")
        connection.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC")
        connection.execute("REVOKE ALL ON DATABASE " + url.split("?")[0].rsplit("/", 1)[1] + " FROM PUBLIC")
        connection.execute("GRANT CONNECT ON DATABASE " + url.split("?")[0].rsplit("/", 1)[1] + f" TO {ROLE}")
        connection.execute(f"CREATE SCHEMA books AUTHORIZATION {ROLE}")
    yield url
    postgres.drop(url)
    with psycopg.connect(postgres.url("postgres"), autocommit=True) as connection:
        connection.execute(f"DROP ROLE {ROLE}")


def as_role(url: str, search_path: str | None = "books") -> str:
    options = "" if search_path is None else f"&options=-csearch_path%3D{search_path}"
    return f"{url}&user={ROLE}{options}"


def relations(url: str, schema: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = %s", (schema,)).fetchone()
    assert row is not None
    return int(row[0])


def use(target: str, **settings: Any) -> None:
    with lakebook.open(target, publish="off", **settings) as book:
        book.metadata.create_topic("orders")
        book.metadata.add_segment(describe("orders"))
        book.metadata.commit_offset("g", "orders", 0, 50)
        table = book.tables.create("numbers", "number BIGINT")
        for number in range(3):
            table.insert_arrow(pa.table({"number": [number]}))
        table.publish()
        book.metadata.delete_topic("orders")
        book.cleaner.expire(seconds=0, versions=1)
        book.cleaner.delete_expired_temporary_files(wait=False)
        assert keep_database(book._registry).notes == []
        book.begin_epoch()
    with lakebook.open(target, publish="off") as book:
        assert book.table("numbers").count() == 3
        checked = book.verify()
        assert checked.ok, checked.findings


def test_a_book_lives_in_the_schema_that_the_address_names(shared: str, tmp_path: Path) -> None:
    use(as_role(shared), warehouse=str(tmp_path))
    assert relations(shared, "books") > 40
    assert relations(shared, "public") == 0


def test_the_role_that_the_documentation_makes_is_enough(postgres: Postgres, tmp_path: Path) -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## PostgreSQL\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```sql\n(.*?)```", section, re.DOTALL)
    url = postgres.new_database(with_book=False)
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC")
            for statement in block.split(";\n"):
                connection.execute(statement.encode())
        use(f"{url}&user=lake", warehouse=str(tmp_path))
        assert relations(url, "lake") > 40
        assert relations(url, "public") == 0
    finally:
        postgres.drop(url)
        with psycopg.connect(postgres.url("postgres"), autocommit=True) as connection:
            connection.execute("DROP ROLE IF EXISTS lake")


def test_a_book_is_migrated_by_its_role(shared: str, tmp_path: Path) -> None:
    target = as_role(shared)
    migrate_to(database_for(load_settings(target, {"warehouse": str(tmp_path)})), "0003")
    with psycopg.connect(target) as connection:
        connection.execute("INSERT INTO book VALUES (1, 'b', 'e', %s, 0, 0)", (str(tmp_path),))
    done = migrate_book(target)
    assert (done.before, done.after) == ("0003", HEAD)
    use(target)


def test_a_book_in_a_schema_of_ones_own_is_not_mistaken_for_one_further_along_the_path(
    shared: str, tmp_path: Path
) -> None:
    """As with the default search path, which leads to the schema of the role's name and then to `public`."""
    lakebook.open(shared, warehouse=str(tmp_path / "theirs"), publish="off").close()
    with psycopg.connect(shared, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {ROLE} AUTHORIZATION {ROLE}")
        connection.execute(f"GRANT USAGE ON SCHEMA public TO {ROLE}")
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {ROLE}")
    use(as_role(shared, None), warehouse=str(tmp_path / "ours"))
    assert relations(shared, ROLE) == relations(shared, "public")
    with lakebook.open(shared) as theirs:
        assert list(theirs.metadata.list_topics()) == []


def test_two_books_in_one_database_do_not_see_each_others_events(shared: str, tmp_path: Path) -> None:
    with psycopg.connect(shared, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA more AUTHORIZATION {ROLE}")
    with (
        lakebook.open(as_role(shared), warehouse=str(tmp_path / "a"), publish="off") as one,
        lakebook.open(as_role(shared, "more"), warehouse=str(tmp_path / "b"), publish="off") as other,
    ):
        one.metadata.create_topic("orders")
        other.metadata.create_topic("clicks")
        assert [topic.name for topic in one.metadata.list_topics()] == ["orders"]
        for book in (one, other):
            found = book.events.read(book.events.beginning(), 100).events
            assert len(found) == 2  # The topic and its partition.
            assert book.verify().ok


@pytest.mark.parametrize("search_path", ["nowhere", None])
def test_without_a_schema_to_write_to_it_is_said_so(shared: str, tmp_path: Path, search_path: str | None) -> None:
    with pytest.raises(RegistryNotWritable, match="no schema has been selected"):
        lakebook.open(as_role(shared, search_path), warehouse=str(tmp_path))
