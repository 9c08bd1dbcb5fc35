"""A pipeline whose driver, workers and connections are killed again and again: each record lands exactly once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import duckdb
import psycopg
import pytest

from books import POSTGRESQL, SQLITE, Place
from extent import long
from lake import own_warehouse  # noqa: F401
from lakebook import Book
from pipeline_processes import IMPATIENT, PIPELINE, POINTS, TABLE, TOPIC
from streaming import produce
from table_facts import with_own_warehouse

PROGRAM = Path(__file__).with_name("pipeline_processes.py")
KILLS = int(os.environ.get("LAKEBOOK_TEST_PIPELINE_KILLS", "10"))
PARTITIONS, SEGMENT, BATCH = 4, 5_000, 20_000
#: A batch for each of those who are killed, and at least what is asked for.
RECORDS = max(100_000, KILLS * BATCH)


class Runner:
    """The program in a process of its own."""

    def __init__(self, place: Place, point: str = "") -> None:
        environment = {**os.environ, "LAKEBOOK_FAILPOINTS": point, "PYSPARK_PYTHON": sys.executable}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), place.target, json.dumps(place.settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def facts(self) -> Iterator[dict[str, Any]]:
        """What it tells, until it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def kill(self) -> None:
        """End it at once, with the Java and the workers that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill_workers(self) -> None:
        """End the workers of Python that transform rows."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and _is_worker(folder, self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(int(folder.name), signal.SIGKILL)


def _is_worker(folder: Path, session: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        told = (folder / "cmdline").read_bytes()
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        return b"pyspark.daemon" in told and int(fields[3]) == session
    return False


@pytest.fixture
def runners() -> Iterator[list[Runner]]:
    started: list[Runner] = []
    yield started
    for runner in started:
        runner.kill()


def make(place: Place, records: int, **options: Any) -> Book:
    book = place.open(**IMPATIENT)
    book.topics.create(TOPIC, PARTITIONS)
    for start in range(0, records, SEGMENT):
        values = [b'{"id":%d}' % number for number in range(start, min(start + SEGMENT, records))]
        produce(book, TOPIC, start // SEGMENT % PARTITIONS, *values)
    book.tables.create(TABLE, "id BIGINT NOT NULL")
    book.pipelines.create(
        PIPELINE,
        into=TABLE,
        topics=TOPIC,
        decoder="json",
        schema="id BIGINT NOT NULL",
        batch_records=BATCH,
        **options,
    )
    return book


def check_exactly_once(book: Book, records: int) -> None:
    expected = list(range(records))
    table = book.table(TABLE)
    assert sorted(table.to_arrow().column("id").to_pylist()) == expected
    assert book.pipelines[PIPELINE].record.row_count == records
    table.publish()
    loaded = book.catalog().load_table((table.namespace, table.name))
    assert sorted(loaded.scan().to_arrow().column("id").to_pylist()) == expected
    with duckdb.connect() as connection:
        connection.execute("LOAD avro; LOAD iceberg")
        path = unquote(urlsplit(table.metadata_location or "").path)
        found = connection.execute(f"SELECT id FROM iceberg_scan('{path}')").to_arrow_table()
    assert sorted(found.column("id").to_pylist()) == expected
    assert book.verify().findings == ()


@long()
@pytest.mark.parametrize("make_kind", [POSTGRESQL], ids=str)
def test_a_pipeline_that_is_killed_anywhere_lands_each_record_once(
    make_place: Callable[..., Place],
    make_kind: str,
    tmp_path: Path,
    runners: list[Runner],
    soak: Callable[[str], None],
) -> None:
    place = with_own_warehouse(make_place(make_kind), tmp_path)
    book = make(place, RECORDS, function="pipeline_processes:through_python")
    # Drivers are slow to start: fewer of them are killed than workers and connections.
    kills = [("worker", "connection", "driver", "worker", "connection")[number % 5] for number in range(KILLS)]
    told: dict[str, int] = {"driver": 0, "worker": 0, "connection": 0}
    finished = False
    while not finished:
        runner = Runner(place)
        runners.append(runner)
        for fact in runner.facts():
            finished = finished or "finished" in fact
            if "done" in fact and kills:
                kind = kills.pop(0)
                told[kind] += 1
                if kind == "driver":
                    runner.process.kill()
                elif kind == "worker":
                    runner.kill_workers()
                else:
                    cut_connections(place)
    assert kills == [], "the records were all landed before everything was killed"
    check_exactly_once(book, RECORDS)
    soak(f"{place.kind}: a pipeline over {RECORDS:,} records, {told} killed, each record landed once")


def cut_connections(place: Place) -> None:
    """End the connections that others have to the registry."""
    with psycopg.connect(place.target, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def test_a_pipeline_killed_at_each_point_lands_each_record_once(
    make_place: Callable[..., Place], tmp_path: Path, runners: list[Runner]
) -> None:
    place = with_own_warehouse(make_place(SQLITE), tmp_path)
    records = (len(POINTS) + 1) * BATCH
    book = make(place, records)
    for point in POINTS:
        before = book.table(TABLE).count()
        runner = Runner(place, f"{point}=kill@1")
        runners.append(runner)
        assert not any("finished" in fact for fact in runner.facts())
        assert runner.process.wait() == -signal.SIGKILL
        landed = book.table(TABLE).count()
        assert landed == book.pipelines[PIPELINE].record.row_count
        assert landed - before == (BATCH if point == "pipeline.landed" else 0)
    last = Runner(place)
    runners.append(last)
    assert any("finished" in fact for fact in last.facts())
    check_exactly_once(book, records)
