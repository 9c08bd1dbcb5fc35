"""Spark on a bucket that fails, with executors that die: right or a typed error, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bucket_cluster
from books import POSTGRESQL, SQLITE, Place
from buckets import Buckets
from extent import EVERYWHERE
from leftovers import check_that_nothing_is_left

TESTS = Path(__file__).parents[1]
CLUSTER = "local-cluster[2,1,1024]"
#: What is done in every run, under faults.
STEPS = 2 * len(bucket_cluster.FAULTS)


@pytest.fixture
def buckets() -> Iterator[Buckets]:
    server = Buckets()
    yield server
    server.stop()


@pytest.mark.timeout(1800 if EVERYWHERE else 900)
def test_inserts_and_compactions_on_a_faulty_bucket_are_right_or_leave_nothing(
    make_place: Callable[..., Place], buckets: Buckets, tmp_path: Path
) -> None:
    place, silent = make_place(POSTGRESQL, with_book=False), make_place(SQLITE, with_book=False)
    for each in (place, silent):
        each.settings |= {**buckets.settings, "warehouse": f"s3://{buckets.new_bucket()}/lake"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LAKEBOOK_", "AWS_"))}
    # How far it goes is told to it too: it counts its steps by that.
    environment |= {"LAKEBOOK_TEST_EVERYWHERE": "yes" if EVERYWHERE else "no"}
    paths = [str(TESTS), str(TESTS / "faults"), environment.get("PYTHONPATH", "")]
    environment |= {f"LAKEBOOK_{name.upper()}": str(value) for name, value in place.settings.items()}
    (tmp_path / "marks").mkdir()
    done = subprocess.run(
        [
            *(sys.executable, bucket_cluster.__file__, place.target, str(tmp_path / "marks"), buckets.endpoint),
            *(silent.target, silent.settings["warehouse"]),
        ],
        env={
            **environment,
            "LAKEBOOK_SPARK_MASTER": CLUSTER,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYSPARK_PYTHON": sys.executable,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["verified"] == []
    whole = ["compaction", "insert"] if EVERYWHERE else []
    assert told["killed"] == [*whole, "parts of a compaction", "parts of an insert"]
    assert told["done"] + len(told["failed"]) == STEPS
    assert set(told["failed"]) <= {"StorageUnavailable", "InsertFailed", "ReadFailed"}, told["failed"]
    rows = [first + number for first in told["inserted"] for number in range(bucket_cluster.ROWS)]
    assert told["ids"] == sorted(rows)
    assert told["large"] == bucket_cluster.LARGE_FILES
    assert told["large ids"] == list(range(bucket_cluster.LARGE_ROWS))
    # To wait for a store that says nothing takes its time.
    assert told.get("silent", []) == ["InsertFailed"] * (2 if EVERYWHERE else 0)
    assert told["said"] == [True, False, False]
    # Who died has left parts of files, and nobody else has ended them before a sweep does.
    assert buckets.uploads(place.settings["warehouse"].split("/")[2])
    for each in (place, silent):
        check_that_nothing_is_left(each)
