"""Everything at once: writers, readers under leases, outside readers, and all components in a daemon of their own."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from books import POSTGRESQL, SQLITE, Place
from lakebook import Book
from lakebook.lake.compaction import debt_of
from lakebook.registry.inserts import known_paths
from lakebook.registry.owed import list_updates
from outside_facts import check_sound, of_duckdb, of_pyiceberg
from table_facts import objects_of, with_own_warehouse
from table_writers import Child, kill_all
from upkeep_processes import (
    BARE,
    IMPATIENT,
    KEPT,
    Daemon,
    check_runs,
    create_tables,
    read,
    read_outside,
    rows_of,
    write,
)

#: How long everything runs at once; unless it is said, a third of it has to do on the second database.
SECONDS = float(os.environ.get("LAKEBOOK_TEST_UPKEEP_SECONDS", "60"))
PART = 1.0 if "LAKEBOOK_TEST_UPKEEP_SECONDS" in os.environ else 1 / 3
INSERTS = 1000
#: For what comes soon, but by itself.
PATIENCE = 120.0


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(request.param), tmp_path)


@pytest.fixture
def daemon(place: Place, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    started: list[Daemon] = []

    def start(*options: str, **settings: Any) -> Daemon:
        started.append(Daemon(place, tmp_path / "daemon.log", {**IMPATIENT, **settings}, *options))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def until(what: Callable[[], object], daemon: Daemon, patience: float = PATIENCE) -> None:
    """Wait for something that comes by itself."""
    deadline = time.monotonic() + patience
    while not what():
        assert daemon.process.poll() is None, daemon.log[-4000:]
        assert time.monotonic() < deadline, daemon.log[-4000:]
        with suppress(subprocess.TimeoutExpired):
            daemon.process.wait(0.05)


def is_published(book: Book, name: str) -> bool:
    description = book.table(name).describe()
    return description.published_version == description.version


def has_no_debt(book: Book, name: str) -> bool:
    return debt_of(book.lake, book.table(name).record).files == 0


def check_that_every_file_is_tracked(book: Book) -> int:
    """Whatever lies in the warehouse is known to a row; how many files."""
    there = sorted(objects_of(book))
    known = book._registry.read_with(lambda reader: known_paths(reader, there))
    assert [path for path in there if path not in known] == []
    return len(there)


def test_nothing_is_lost_and_no_reader_fails_while_everything_is_looked_after(
    place: Place, daemon: Callable[..., Daemon], soak: Callable[[str], None]
) -> None:
    settings = {**place.settings, **IMPATIENT}
    book = place.open(**IMPATIENT)
    create_tables(book)
    running = daemon("--spark-master", "local[1]")
    modes = {KEPT: "async", BARE: "off"}
    writers = [
        Child(write, place.target, {**settings, "publish": modes[name]}, name, writer)
        for writer, name in enumerate((KEPT, BARE) * 2)
    ]
    readers = [Child(read, place.target, settings, seed) for seed in range(3)]
    readers.append(Child(read_outside, place.target, settings, 3))
    for child in (*writers, *readers):
        child.wait_for("ready")
    seconds = SECONDS * (PART if place.kind == POSTGRESQL else 1)
    work_for(seconds, running, [*writers, *readers])
    for child in (*writers, *readers):
        child.stop()
    expected: dict[str, dict[int, range]] = {KEPT: {}, BARE: {}}
    counts: Counter[str] = Counter()
    for child in writers:
        _, name, writer, first, following, own = child.wait_for("written")
        counts.update(own)
        if following > first:
            expected[name][writer] = range(first, following)
    reads = sum(child.wait_for("read")[1] for child in readers)
    until(lambda: is_published(book, KEPT) and all(has_no_debt(book, name) for name in (KEPT, BARE)), running)
    running.stop()
    for child in (*writers, *readers):
        assert child.end() == 0
    for name in (KEPT, BARE):
        assert check_runs(book.table(name).to_arrow()) == expected[name]
    agrees = of_pyiceberg(book.table(KEPT))
    assert agrees == of_duckdb(book.table(KEPT))
    assert len(agrees) == sum(map(len, expected[KEPT].values()))
    check_sound(book)
    book.maintain(["janitor"], spark=None)
    tracked = check_that_every_file_is_tracked(book)
    updates = book._registry.read_with(lambda reader: list_updates(reader, book.table(KEPT).id, None, None, 1_000_000))
    tried = [update for update in updates if update.attempts]
    at_once = sum(update.attempts == 1 for update in tried) / max(1, len(tried))
    assert all(update.state == "completed" for update in updates)
    assert at_once >= 0.999, Counter(update.attempts for update in tried)
    work = Counter((item.component, item.action, item.outcome) for item in book.maintenance_history(limit=1000).items)
    assert work["compactor", "compact", "done"], work
    soak(
        f"upkeep on {place.kind}, {seconds:.0f} s: {counts['inserted']} inserts and {counts['deleted']} deletes of"
        f" 4 writers, {reads} reads of 4 readers, none failed; {len(updates)} metadata updates kept on record,"
        f" {at_once:.1%} at the first try and all in the end; {counts['rolled_back']} rollbacks, all clean;"
        f" {tracked} files, all tracked; compactions {work['compactor', 'compact', 'done']}, of which"
        f" {work['compactor', 'compact', 'yielded']} more gave way to writers; verify found nothing"
    )


def work_for(seconds: float, running: Daemon, children: list[Child]) -> None:
    """Let them work, and see that none of them ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert running.process.poll() is None, running.log[-4000:]
        for child in children:
            assert not child.connection.poll(0.05), child.hear()


def test_a_table_fed_by_many_inserts_ends_with_a_handful_of_files(
    place: Place, daemon: Callable[..., Daemon], soak: Callable[[str], None]
) -> None:
    number = round(INSERTS * (PART if place.kind == POSTGRESQL else 1))
    book = place.open(**IMPATIENT)
    table = book.tables.create("fed", "writer BIGINT, number BIGINT")
    running = daemon("--spark-master", "local[1]", tag_seconds=0)
    for each in range(number):
        table.insert_arrow(rows_of(0, each, each + 1))
    until(lambda: is_published(book, "fed") and has_no_debt(book, "fed"), running)
    # History follows the clock of the janitor and the snapshotter.
    until(lambda: len(table.snapshots()) <= IMPATIENT["snapshots_kept"], running)
    running.stop()
    record = table.record
    assert record.row_count == number
    assert check_runs(table.to_arrow()) == {0: range(number)}
    assert record.file_count <= 10
    assert len(of_pyiceberg(table)) == number
    check_sound(book)
    check_that_every_file_is_tracked(book)
    soak(
        f"{number} inserts of one file on {place.kind} became {record.file_count} file(s)"
        f" and {len(table.snapshots())} snapshot(s) by themselves"
    )
