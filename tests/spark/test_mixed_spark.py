"""Lakebook, PyIceberg and Spark write to one table at once, in several processes, on both databases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import lakebook
from books import POSTGRESQL, SQLITE, Place
from lake import own_warehouse  # noqa: F401
from spark.mixed_writers import TABLE
from spark.rows import values

OURS, THEIRS, SPARKS = 1_000, 2_000, 3_000
INSERTS, APPENDS, ROUNDS = 40, 8, 4
# Spark tries a commit again by itself; a whole statement is begun again so often at most.
MOST_STATEMENTS = 30

PROGRAM = Path(__file__).with_name("mixed_writers.py")


def started(place: Place, act: str, first: int, number: int) -> subprocess.Popen[str]:
    target = str(place.target)
    words = [sys.executable, str(PROGRAM), act, target, json.dumps(place.settings), str(first), str(number)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def acknowledged(program: subprocess.Popen[str]) -> list[int]:
    out, _ = program.communicate(timeout=200)
    assert program.returncode == 0
    return [int(item) for item in json.loads(out)]


def sure(session: SparkSession, statement: str) -> None:
    """Run a statement until it lands; a conflict changes nothing."""
    for left in reversed(range(MOST_STATEMENTS)):
        try:
            session.sql(statement)
        except (PySparkException, Py4JJavaError) as error:
            if "CommitFailed" not in str(error) and "conflict" not in str(error).lower():
                raise
            assert left, "it was begun too often"
        else:
            return


@pytest.mark.parametrize("place", [SQLITE, POSTGRESQL], indirect=True)
def test_nothing_is_lost_or_doubled_between_lakebook_pyiceberg_and_spark(place: Place, spark: SparkSession) -> None:
    with lakebook.open(place.target, **{**place.settings, "publish": "off"}) as book:
        properties = {
            "write.delete.mode": "merge-on-read",
            "commit.retry.num-retries": "20",
            "commit.retry.min-wait-ms": "10",
            "commit.retry.max-wait-ms": "200",
        }
        table = book.tables.create(TABLE, "id BIGINT, name STRING", properties=properties)
        session = book.spark(iceberg=True, catalog="mixed_book")
        name = f"mixed_book.default.{TABLE}"
        programs = [
            started(place, "insert", OURS, INSERTS),
            started(place, "append", THEIRS, APPENDS),
        ]
        expected: dict[int, str] = {}
        for number in range(ROUNDS):
            first = SPARKS + number * 10
            sure(session, f"INSERT INTO {name} VALUES ({first}, 'a'), ({first + 1}, 'b'), ({first + 2}, 'c')")
            sure(session, f"UPDATE {name} SET name = 'updated' WHERE id = {first + 1}")
            sure(session, f"DELETE FROM {name} WHERE id = {first + 2}")
            expected |= {first: "a", first + 1: "updated"}
        inserted, appended = (acknowledged(program) for program in programs)
        expected |= {ident: str(ident) for ident in (*inserted, *appended)}
        assert len(inserted) == INSERTS
        assert appended
        rows = sorted(expected.items())
        assert sorted(values(table.to_arrow())) == rows
        assert sorted(values(session.sql(f"SELECT * FROM {name}").toArrow())) == rows
        loaded = book.catalog().load_table(f"default.{TABLE}")
        assert sorted(values(loaded.scan().to_arrow())) == rows
        lineage = loaded.metadata.snapshots
        assert [item.parent_snapshot_id for item in lineage[1:]] == [item.snapshot_id for item in lineage[:-1]]
        numbers = [item.sequence_number or 0 for item in lineage]
        assert numbers == sorted(set(numbers))
        book.settle_debts()
        found = book.verify()
        assert (found.findings, found.unfinished) == ((), ())
