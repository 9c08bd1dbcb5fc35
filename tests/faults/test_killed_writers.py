"""A writer is killed again and again; what it was told is there, and nothing is wrong."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from books import Place
from facts import check_acknowledged
from writers import PARTITIONS, POINTS, TOPIC

KILLS = int(os.environ.get("LAKEBOOK_TEST_KILLS", "20"))
PROGRAM = Path(__file__).parent / "writers.py"


def start(place: Place, seed: int, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), place.target, json.dumps(place.settings), str(seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def told_by(child: subprocess.Popen[str]) -> Iterator[tuple[Any, ...]]:
    """What a child acknowledges; its last line may have been cut off in the middle."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.endswith("\n"):
            yield tuple(json.loads(line))


def end(child: subprocess.Popen[str]) -> str:
    child.wait(60)
    assert child.stdout is not None
    assert child.stderr is not None
    errors = child.stderr.read()
    child.stdout.close()
    child.stderr.close()
    return errors


def test_a_writer_killed_at_random_loses_nothing_it_acknowledged(shared_place: Place, soak: Any) -> None:
    book = shared_place.open()
    book.metadata.create_topic(TOPIC, PARTITIONS)
    chance = random.Random(KILLS)
    facts: list[tuple[Any, ...]] = []
    for number in range(KILLS):
        child = start(shared_place, number)
        patience = chance.randrange(1, 60)
        acknowledged = told_by(child)
        for fact, _ in zip(acknowledged, range(patience), strict=False):
            facts.append(fact)
        child.kill()
        facts.extend(acknowledged)
        assert end(child) == ""
        if number % 10 == 9:
            check_acknowledged(book, facts)
    book.metadata.purge_deleted_topics()
    check_acknowledged(book, facts)
    assert book.verify().unfinished == () or all("log start" in item for item in book.verify().unfinished)
    soak(
        f"{shared_place.kind}: a writer killed {KILLS} times, {len(facts):,} acknowledgements all kept,"
        " verify found nothing"
    )


@pytest.mark.parametrize("point", POINTS)
def test_a_writer_killed_at_each_failpoint_leaves_a_sound_book(shared_place: Place, point: str) -> None:
    book = shared_place.open()
    book.metadata.create_topic(TOPIC, PARTITIONS)
    facts: list[tuple[Any, ...]] = []
    for count in (1, 2, 7) if point.startswith("transaction") else (1, 3):
        child = start(shared_place, count, LAKEBOOK_FAILPOINTS=f"{point}=kill@{count}")
        facts.extend(told_by(child))
        assert end(child) == ""
        assert child.returncode == -9
        check_acknowledged(book, facts)
    # The next writer goes on, whatever the former left.
    child = start(shared_place, 99)
    acknowledged = told_by(child)
    for fact, _ in zip(acknowledged, range(30), strict=False):
        facts.append(fact)
    child.kill()
    facts.extend(acknowledged)
    assert end(child) == ""
    check_acknowledged(book, facts)
