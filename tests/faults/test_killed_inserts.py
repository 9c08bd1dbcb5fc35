"""A process that works on tables is killed again and again; what it was told is there, and nothing is left over."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import astha_subscribers
import batch_processes
import merge_processes
import mirror_processes
import moving_processes
import outside_writers
import pipeline_processes
import producing
import recovery_points
import table_writers
import view_processes
import writers
from books import POSTGRESQL, SQLITE, Place
from compacting import by_arrow
from lakebook import failpoints
from lakebook.errors import CompactionClaimed
from table_facts import (
    IMPATIENT,
    Told,
    batches_of,
    check_that_only_what_counts_is_left,
    later,
    objects_of,
    with_own_warehouse,
)
from table_writers import (
    GIVEN,
    SCHEMA,
    TABLE,
    Child,
    add_given_files,
    change_with_spark,
    compact_once,
    create_table,
    kill_all,
    lay_files,
    rows_of,
    upgrade_stored_footers,
    work_until_killed,
)

TESTS = Path(__file__).parents[1]
KILLS = int(os.environ.get("LAKEBOOK_TEST_KILLS", "20"))


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(request.param), tmp_path)


def start(place: Place, seed: int, points: str = "") -> Child:
    return Child(work_until_killed, place.target, {**place.settings, **IMPATIENT}, seed, points=points)


def work_for_a_while(place: Place, seed: int, told: Told, facts: int) -> None:
    """A child that is killed after it has told so much."""
    child = start(place, seed)
    heard = told.hear(child.facts())
    for _ in zip(heard, range(facts), strict=False):
        pass
    child.kill()
    # What it told before it was killed counts too.
    for _ in heard:
        pass
    assert child.end() == -signal.SIGKILL


def test_a_worker_killed_at_random_loses_nothing_it_acknowledged(place: Place, soak: Callable[[str], None]) -> None:
    book = place.open()
    create_table(book)
    chance = random.Random(KILLS)
    told = Told()
    for number in range(KILLS):
        work_for_a_while(place, number + 1, told, chance.randrange(1, 50))
        told.check(book)
    check_that_only_what_counts_is_left(place)
    told.check(book)
    soak(
        f"{place.kind}: a worker on tables killed {KILLS} times, {told.changes:,} acknowledged changes all kept once,"
        " verify found nothing, no file was left over"
    )


@pytest.mark.parametrize("point", table_writers.POINTS)
def test_a_worker_killed_at_each_failpoint_leaves_a_sound_table(place: Place, point: str) -> None:
    book = place.open()
    create_table(book)
    told = Told()
    # The second goes on, whatever the first has left.
    for count in (2, 23) if point.startswith("transaction") else (1, 3):
        child = start(place, count, f"{point}=kill@{count}")
        for _ in told.hear(child.facts()):
            pass
        assert child.end() == -signal.SIGKILL
        told.check(book)
    check_that_only_what_counts_is_left(place)
    told.check(book)


@pytest.mark.parametrize("point", ["insert.reserved", "insert.chunk_staged", "change.written"])
def test_files_that_were_being_added_when_the_process_was_killed_stay_and_can_be_added_again(
    place: Place, point: str
) -> None:
    book = place.open()
    table = book.tables.create(TABLE, SCHEMA)
    lay_files(book)
    child = Child(add_given_files, place.target, place.settings, points=f"{point}=kill@1")
    assert list(child.facts()) == []
    assert child.end() == -signal.SIGKILL
    clock = later()
    janitor = place.open(clock=clock, sweep_grace=0)
    for _ in range(3):
        janitor.cleaner.sweep()
        clock.advance(1)
        checked = book.verify()
        assert checked.ok, checked.findings
    assert objects_of(book) == set(GIVEN)
    assert table.add_files(GIVEN).files == len(GIVEN)
    assert batches_of(book) == set(range(len(GIVEN)))
    check_that_only_what_counts_is_left(place)


def run_writers(*words: str, points: str = "", **pipes: Any) -> subprocess.Popen[str]:
    """The writers as a program, which has a Spark of its own."""
    return subprocess.Popen(
        [sys.executable, table_writers.__file__, *words],
        env={
            **os.environ,
            "LAKEBOOK_FAILPOINTS": points,
            # What pytest finds by its own settings.
            "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        },
        text=True,
        start_new_session=True,
        **pipes,
    )


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[int, str]]:
    """How to reach a Spark that outlives those who are killed while they use it."""
    host = run_writers(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert host.stdout is not None
    port, secret = json.loads(host.stdout.readline())
    yield port, secret
    host.communicate()


# Each at each point, and both databases with each.
CHANGES = [
    (act, kind, point, (SQLITE, POSTGRESQL)[(number + place) % 2])
    for number, (act, kind) in enumerate(
        [
            ("insert", "json"),
            ("insert", "parquet"),
            ("overwrite", "parquet"),
            ("delete", "parquet"),
            ("replace", "parquet"),
        ]
    )
    for place, point in enumerate(table_writers.SPARK_POINTS)
]


@pytest.mark.parametrize(("act", "kind", "point", "database"), CHANGES)
def test_a_change_with_spark_killed_at_each_failpoint_leaves_nothing(
    make_place: Callable[..., Place],
    tmp_path: Path,
    gateway: tuple[int, str],
    act: str,
    kind: str,
    point: str,
    database: str,
) -> None:
    place = with_own_warehouse(make_place(database), tmp_path)
    book = place.open()
    table = book.tables.create(TABLE, SCHEMA, format=kind)
    if kind == "parquet":
        table.insert_arrow(rows_of(0, 1))
    before, batches, version = objects_of(book), batches_of(book), table.version
    child = Child(
        change_with_spark,
        place.target,
        {**place.settings, **IMPATIENT},
        act,
        gateway,
        points=f"{point}=kill@1",
    )
    assert list(child.facts()) == [("ready",)]
    assert child.end() == -signal.SIGKILL
    # Of JSON nothing is staged before it is written.
    assert (objects_of(book) > before) == ((kind, point) != ("json", "insert.staged"))
    checked = book.verify()
    assert checked.ok, checked.findings
    assert (batches_of(book), table.version) == (batches, version)
    check_that_only_what_counts_is_left(place)
    assert (batches_of(book), objects_of(book)) == (batches, before)


def test_an_insert_whose_spark_is_killed_with_it_leaves_nothing(make_place: Callable[..., Place]) -> None:
    place = make_place(SQLITE)
    book = place.open()
    create_table(book)
    child = run_writers(
        place.target,
        json.dumps(IMPATIENT),
        points="insert.written=kill@1",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, said = child.communicate(timeout=280)
    # The virtual machine may outlive its Python for a moment.
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL, said
    assert objects_of(book)
    Told().check(book)
    check_that_only_what_counts_is_left(place)
    assert objects_of(book) == set()


@pytest.mark.parametrize("point", [*table_writers.COMPACTION_POINTS, "change.written", "change.committed"])
def test_a_compaction_that_is_killed_changes_no_row_and_leaves_nothing(place: Place, point: str) -> None:
    book = place.open()
    table = book.tables.create(TABLE, SCHEMA)
    for batch in range(6):
        table.insert_arrow(rows_of(batch))
    before = objects_of(book)
    child = Child(compact_once, place.target, {**place.settings, **IMPATIENT}, points=f"{point}=kill@1")
    assert list(child.facts()) == [("ready",)]
    assert child.end() == -signal.SIGKILL
    # Unless it had only just begun, it had written its file.
    assert len(objects_of(book) - before) == (0 if point == "compact.claimed" else 1)
    checked = book.verify()
    assert checked.ok, checked.findings
    # Under the table's lock: a server may still have the COMMIT under way of one who is dead already.
    table.set_properties()
    committed = point == "change.committed"
    assert len(table.plan().files) == (1 if committed else 6)
    assert batches_of(book) == set(range(6))
    if not committed:
        janitor = place.open(clock=later(), **IMPATIENT)
        janitor.cleaner.sweep()
        assert objects_of(book) == before
    check_that_only_what_counts_is_left(place)
    assert batches_of(book) == set(range(6))
    if not committed:
        # Who compacts it is known until that has been silent for long enough.
        with pytest.raises(CompactionClaimed):
            by_arrow(place.open(clock=later(-60)), table)
    # Then the next one is not kept from it.
    assert (by_arrow(place.open(clock=later()), table) is None) == committed


@pytest.mark.parametrize("point", table_writers.FOOTER_POINTS)
def test_an_upgrade_of_footers_that_is_killed_goes_on_where_it_was(place: Place, point: str) -> None:
    book = place.open(cache_footers=0)
    table = book.tables.create(TABLE, SCHEMA)
    for batch in range(5):
        table.insert_arrow(rows_of(batch))
    older = "UPDATE partition_metadata SET partition_format_version = 1, num_rows = NULL"
    book._registry.write(lambda transaction: transaction._connection.execute(older))
    for _ in range(2):
        child = Child(upgrade_stored_footers, place.target, place.settings, points=f"{point}=kill@2")
        assert list(child.facts()) == []
        assert child.end() == -signal.SIGKILL
        checked = book.verify()
        assert checked.ok, checked.findings
        assert batches_of(book) == set(range(5))
    assert book.upgrade_footers() == (1, [])
    assert book.upgrade_footers() == (0, [])
    assert book.verify().ok
    assert batches_of(book) == set(range(5))


def test_every_failpoint_is_swept() -> None:
    # The migrations have tests of their own.
    migrations = {point for point in failpoints.POINTS if point.startswith("migration.")}
    swept = {*writers.POINTS, *table_writers.POINTS, *table_writers.SPARK_POINTS, *outside_writers.POINTS}
    swept |= {
        *table_writers.COMPACTION_POINTS,
        *table_writers.FOOTER_POINTS,
        *astha_subscribers.POINTS,
        *merge_processes.POINTS,
    }
    swept |= {*mirror_processes.POINTS, *producing.POINTS, producing.UPLOAD, *batch_processes.POINTS}
    swept |= {*view_processes.POINTS, *pipeline_processes.POINTS, *moving_processes.POINTS}
    swept |= recovery_points.POINTS
    assert swept | migrations == set(failpoints.POINTS)
