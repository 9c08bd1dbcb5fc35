"""What a worker leaves alone after its Spark has failed: Spark itself, and the work of which it may have died."""

from __future__ import annotations

from typing import Any

import pytest

from failing_spark import NoSpark, StandIn
from lakebook.clock import ManualClock
from lakebook.components.worker_spark import LONGEST_PAUSE, LONGEST_SUSPICION, WorkerSpark
from lakebook.errors import SparkUnsuitable


def kill(worker: WorkerSpark, work: str) -> None:
    """Do some work of which Spark dies."""
    with pytest.raises(SparkUnsuitable), worker.session(work) as spark:
        spark.die  # type: ignore[attr-defined] # noqa: B018 - a stand-in's


def kill_beside(worker: WorkerSpark, spark: Any) -> None:
    """Have Spark die of other work, and notice it."""
    kill(worker, "bad")
    spark.range(1)


def test_work_of_which_spark_dies_is_left_alone_for_ever_longer_whatever_else_goes_well() -> None:
    clock = ManualClock()
    alive: Any = StandIn()
    found: list[Any] = []
    worker = WorkerSpark(clock, "views", lambda: found.pop() if found else alive)
    pauses = []
    for _ in range(16):
        found.append(StandIn(dies=True))
        kill(worker, "bad")
        assert worker.avoids("bad")
        clock.advance(LONGEST_PAUSE)
        with worker.session("good"):
            pass
        # What goes well brings Spark back at once, and says nothing of the other.
        assert not worker.is_resting
        assert not worker.avoids("good")
        waited = LONGEST_PAUSE
        while worker.avoids("bad"):
            clock.advance(10.0)
            waited += 10.0
        pauses.append(waited)
    assert pauses[0] == LONGEST_PAUSE
    assert LONGEST_SUSPICION / 2 <= pauses[-1] <= LONGEST_SUSPICION + 10.0
    found.append(StandIn(dies=True))
    kill(worker, "bad")
    # Once it has gone well it is as any other.
    with worker.session("bad"):
        pass
    assert not worker.avoids("bad")


def test_who_was_at_work_beside_it_is_suspected_until_it_has_gone_well() -> None:
    clock = ManualClock()
    dying: Any = StandIn(dies=True)
    worker = WorkerSpark(clock, "views", lambda: dying)
    with pytest.raises(SparkUnsuitable), worker.session("innocent") as spark:
        kill_beside(worker, spark)
    assert worker.avoids("innocent")
    assert worker.avoids("bad")
    clock.advance(1.0)
    assert not worker.avoids("innocent")


def test_work_that_spark_could_not_be_started_for_is_not_suspected() -> None:
    worker = WorkerSpark(ManualClock(), "views", NoSpark())
    with pytest.raises(SparkUnsuitable), worker.session("work"):
        pass
    assert worker.is_resting
    assert not worker.avoids("work")
