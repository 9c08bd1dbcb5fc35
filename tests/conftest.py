"""Fixtures that the tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from books import MEMORY, POSTGRESQL, SQLITE, Place, Postgres
from lakebook import Book


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    # A short path: the server's socket lies in it, and a socket's path has a small limit.
    with tempfile.TemporaryDirectory(prefix="lb-") as folder:
        server = Postgres(Path(folder))
        yield server
        server.stop()


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    url = postgres.new_database()
    yield url
    postgres.drop(url)


@pytest.fixture
def make_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Place]]:
    places: list[Place] = []
    databases: list[str] = []

    def make(kind: str, *, with_book: bool = True) -> Place:
        settings: dict[str, Any] = {}
        if kind == MEMORY:
            target = ":memory:"
        elif kind == SQLITE:
            target = str(tmp_path / "book")
        else:
            postgres: Postgres = request.getfixturevalue("postgres")
            target = postgres.new_database(with_book=with_book)
            databases.append(target)
            settings["warehouse"] = postgres.warehouse
        places.append(Place(kind, target, settings))
        return places[-1]

    yield make
    for place in places:
        place.close()
    for url in databases:
        request.getfixturevalue("postgres").drop(url)


@pytest.fixture(params=[MEMORY, SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place]) -> Place:
    """All three kinds: what holds on one holds on each."""
    return make_place(request.param)


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def shared_place(request: pytest.FixtureRequest, make_place: Callable[..., Place]) -> Place:
    """The kinds that several books and processes can open at once."""
    return make_place(request.param)


@pytest.fixture
def book(place: Place) -> Book:
    return place.open()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-soak", metavar="FILE", help="write what the long fault tests found to FILE")


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Records the outcome of a long test, where it was asked for."""
    lines: list[str] = request.config.stash.setdefault(SOAK, [])
    return lines.append


SOAK: pytest.StashKey[list[str]] = pytest.StashKey()


def pytest_terminal_summary(config: pytest.Config, exitstatus: int) -> None:
    file = config.getoption("--record-soak")
    if file and exitstatus == 0:
        lines = config.stash.get(SOAK, [])
        today = datetime.now(UTC).date().isoformat()
        text = "".join(f"- {line}\n" for line in lines)
        Path(file).write_text(f"# The last soak\n\n`make soak`, {today}:\n\n{text}", encoding="utf-8")
