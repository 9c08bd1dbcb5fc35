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
from pyiceberg.table import StaticTable

import lakebook
from books import POSTGRESQL, SQLITE, Place
from extent import EVERYWHERE, long
from lakebook import Book
from lakebook.lake.compaction import debt_of
from lakebook.lake.table import Table
from lakebook.recovery.checkpoints import CHECKPOINTS
from lakebook.registry.inserts import known_paths
from lakebook.registry.owed import list_updates
from outside_facts import DAYS, check_sound, of_duckdb, of_pyiceberg
from table_facts import later, objects_of, with_own_warehouse
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

#: How long everything runs at once.
SECONDS = float(os.environ.get("LAKEBOOK_TEST_UPKEEP_SECONDS", "60"))
INSERTS = 1000 if EVERYWHERE else 120
#: Of what is not live any more, nothing is kept for its history.
NOTHING_OLD = {**IMPATIENT, "tag_seconds": 0, "history_versions": 1}
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


def is_written_down(book: Book) -> bool:
    """Whether the orchestrator is at work, so that every version from now on is written down."""
    behind = {item.name: item.behind for item in book.overview().subscribers}
    return behind["orchestrator"] is not None


def has_no_debt(book: Book, name: str) -> bool:
    return debt_of(book.lake, book.table(name).record).files == 0


def check_that_every_file_is_tracked(book: Book) -> int:
    """Whatever lies in the warehouse is known to a row, but checkpoints; how many files."""
    there = sorted(path for path in objects_of(book) if not path.startswith(f"{CHECKPOINTS}/"))
    known = book._registry.read_with(lambda reader: known_paths(reader, there))
    assert [path for path in there if path not in known] == []
    return len(there)


@long(SQLITE)
def test_nothing_is_lost_and_no_reader_fails_while_everything_is_looked_after(
    place: Place, daemon: Callable[..., Daemon], soak: Callable[[str], None]
) -> None:
    settings = {**place.settings, **IMPATIENT}
    # What was ever published waits for readers of other engines. So that the files of one table go at once, nobody
    # publishes unasked; the updater does, except for that table.
    book = place.open(**{**IMPATIENT, "publish": "off"})
    create_tables(book)
    running = daemon("--spark-master", "local[1]", publish="off")
    until(lambda: is_written_down(book), running)
    modes = {KEPT: "async", BARE: "off"}
    writers = [
        Child(write, place.target, {**settings, "publish": modes[name]}, name, writer)
        for writer, name in enumerate((KEPT, BARE) * 2)
    ]
    readers = [Child(read, place.target, settings, seed) for seed in range(3)]
    readers.append(Child(read_outside, place.target, settings, 3))
    for child in (*writers, *readers):
        child.wait_for("ready")
    work_for(SECONDS, running, [*writers, *readers])
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
    assert book.table(BARE).metadata_location is None
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
    assert counts["rolled_back"] == counts["failed"]
    work = work_of(book)
    updates = check_updates(book, work)
    assert work["compactor", "compact", "done"], work
    assert work["snapshotter", "tag", "done"], work
    assert work["snapshotter", "expire", "done"], work
    assert work["janitor", "files", "done"], work
    soak(
        f"upkeep on {place.kind}, {SECONDS:.0f} s: {counts['inserted']:,} inserts and {counts['deleted']} deletes of"
        f" 4 writers; metadata updates {updates}; rollbacks {counts['rolled_back'] / counts['failed']:.1%} of"
        f" {counts['failed']} clean right after; consistency 100 %: {reads} reads of 4 readers saw whole states, none"
        f" failed, Iceberg and registry agree, verify found nothing; files tracked 100 % of {tracked:,};"
        f" {work['compactor', 'compact', 'done']} compactions, {work['compactor', 'compact', 'yielded']} more gave way"
        f" to writers, {work['snapshotter', 'tag', 'done']} tags and {work['snapshotter', 'expire', 'done']} expiries"
        f" of the snapshotter, {work['janitor', 'files', 'done']} rounds of the cleaner"
    )


def work_of(book: Book) -> Counter[tuple[str, str, str]]:
    """What the components did, all of it."""
    found: Counter[tuple[str, str, str]] = Counter()
    page = book.maintenance_history(limit=1000)
    while True:
        found.update((item.component, item.action, item.outcome) for item in page)
        if page.next is None:
            return found
        page = book.maintenance_history(limit=1000, after=page.next)


def check_updates(book: Book, work: Counter[tuple[str, str, str]]) -> str:
    """Every version is published in the end, and of a thousand at most one not at the first try; in words."""
    table = book.table(KEPT)
    updates = book._registry.read_with(lambda reader: list_updates(reader, table.id, None, None, 1_000_000))
    # None was pruned or left out, but for a table that was published before anybody looked after it.
    assert [update.version for update in updates] == list(range(table.version + 1))[-len(updates) :]
    assert len(updates) >= table.version
    assert {update.state for update in updates} == {"completed"}
    # Where a publication failed and somebody else published the version, no second attempt is on record.
    again = sum(update.attempts > 1 for update in updates) + work["iceberg_updater", "publish", "failed"]
    assert again <= len(updates) / 1000, Counter(update.attempts for update in updates)
    return f"{1 - again / len(updates):.1%} of {len(updates):,} at the first try and 100 % in the end"


def work_for(seconds: float, running: Daemon, children: list[Child]) -> None:
    """Let them work, and see that none of them ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert running.process.poll() is None, running.log[-4000:]
        for child in children:
            assert not child.connection.poll(0.05), child.hear()


@long(POSTGRESQL)
def test_a_table_fed_by_many_inserts_ends_with_a_handful_of_files(
    place: Place, daemon: Callable[..., Daemon], soak: Callable[[str], None]
) -> None:
    book = place.open(**IMPATIENT)
    table = book.tables.create("fed", "writer BIGINT, number BIGINT")
    running = daemon("--spark-master", "local[1]", **NOTHING_OLD)
    for each in range(INSERTS):
        table.insert_arrow(rows_of(0, each, each + 1))
    until(lambda: is_published(book, "fed") and has_no_debt(book, "fed"), running)
    # History follows the clock of the janitor and the snapshotter.
    until(lambda: len(table.snapshots()) <= IMPATIENT["snapshots_kept"], running)
    running.stop()
    record = table.record
    assert record.row_count == INSERTS
    assert check_runs(table.to_arrow()) == {0: range(INSERTS)}
    assert record.file_count <= 10
    assert len(of_pyiceberg(table)) == INSERTS
    check_sound(book)
    left = check_that_nothing_is_left_over(place)
    soak(
        f"{INSERTS:,} inserts of one file on {place.kind} became {record.file_count} file(s) and"
        f" {len(table.snapshots())} snapshot(s) by themselves; after every grace {left} objects are left, all live"
    )


def check_that_nothing_is_left_over(place: Place) -> int:
    """Once every grace has passed, the janitor leaves what is live and nothing else; how many objects."""
    clock = later(2 * DAYS)
    with lakebook.open(place.target, clock=clock, **{**place.settings, **NOTHING_OLD}) as book:
        # What expires in one round is deleted when its own grace has passed.
        for _ in range(4):
            book.maintain(["iceberg_updater", "snapshotter", "janitor"], spark=None)
            clock.advance(2 * DAYS)
        live = live_objects(book, book.table("fed"))
        assert objects_of(book) == live
        # Its files, and for each of a few states the metadata, a list of manifests and some of them.
        assert len(live) <= 30
        check_sound(book)
        return len(live)


def live_objects(book: Book, table: Table) -> set[str]:
    """Every object that the published metadata reaches, by PyIceberg alone."""
    location = table.metadata_location
    assert location is not None
    static = StaticTable.from_metadata(location)
    found = {location, *(entry.metadata_file for entry in static.metadata.metadata_log)}
    for snapshot in static.metadata.snapshots:
        found.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(static.io):
            found.add(manifest.manifest_path)
            found |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(static.io)}
    return {book.lake.store.relative(path) for path in found}
