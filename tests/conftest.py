"""Fixtures that the tests share."""

from __future__ import annotations

import itertools
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lakebook
import soak_record
from books import MEMORY, POSTGRESQL, SQLITE, Place, Postgres
from buckets import BUCKET, FOLDER, Buckets
from extent import left_out
from lakebook import Book
from rebuilding import Loss
from table_facts import with_bucket, with_own_warehouse


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


@pytest.fixture(scope="session")
def buckets() -> Iterator[Buckets]:
    server = Buckets()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def empty_book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to copy: that is quicker than to make a book."""
    folder = tmp_path_factory.mktemp("empty") / "book"
    lakebook.open(folder).close()
    return folder


@pytest.fixture
def make_place(request: pytest.FixtureRequest, tmp_path: Path, empty_book: Path) -> Iterator[Callable[..., Place]]:
    places: list[Place] = []
    databases: list[str] = []

    def make(kind: str, *, with_book: bool = True) -> Place:
        settings: dict[str, Any] = {}
        if kind == MEMORY:
            target = ":memory:"
        elif kind == SQLITE:
            target = str(tmp_path / "book")
            if with_book and not Path(target).exists():
                shutil.copytree(empty_book, target)
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


@pytest.fixture(params=[FOLDER, BUCKET])
def with_warehouse(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Place], Place]:
    """Gives each place a warehouse that no other has, in a folder or in a bucket."""
    folders = itertools.count(1)

    def give(place: Place) -> Place:
        if request.param == FOLDER:
            return with_own_warehouse(place, tmp_path / f"own-{next(folders)}")
        buckets: Buckets = request.getfixturevalue("buckets")
        return with_bucket(place, buckets)

    return give


@pytest.fixture(params=[MEMORY, SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place]) -> Place:
    """All three kinds: what holds on one holds on each."""
    return make_place(request.param)


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def shared_place(request: pytest.FixtureRequest, make_place: Callable[..., Place]) -> Place:
    """The kinds that several books and processes can open at once."""
    return make_place(request.param)


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def loss(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loss]:
    """Books whose registry is lost, on both databases."""
    databases: list[str] = []

    def new_database() -> str:
        postgres: Postgres = request.getfixturevalue("postgres")
        databases.append(postgres.new_database(with_book=False))
        return databases[-1]

    loss = Loss(request.param, tmp_path, new_database)
    yield loss
    loss.close()
    for url in databases:
        request.getfixturevalue("postgres").drop(url)


@pytest.fixture
def book(place: Place) -> Book:
    return place.open()


def pytest_configure() -> None:
    # Whoever starts the tests in the background of a shell has them ignore interrupts, and with them all they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gone = left_out(items)
    config.hook.pytest_deselected(items=list(gone))
    items[:] = [item for item in items if item not in gone]


# --- what the long tests found -----------------------------------------------------

SOAK = "soak"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-soak", metavar="FILE", help="write what the long fault tests found to FILE")


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Reports what a long test has found: at the end of the run, and in the file that was asked for."""
    # A property of the test: it comes with its report, also from another process.
    return lambda line: request.node.user_properties.append((SOAK, line))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    found: dict[str, list[str]] = {}
    for report in terminalreporter.getreports("passed"):
        lines = [value for name, value in report.user_properties if name == SOAK]
        if report.when == "call" and lines:
            found.setdefault(report.nodeid.partition("::")[0], []).extend(lines)
    if found:
        terminalreporter.section("what the long tests found")
        for file in sorted(found):
            for line in found[file]:
                terminalreporter.write_line(f"- {line}")
    record = config.getoption("--record-soak")
    if record and exitstatus == 0:
        soak_record.update(Path(record), found)
