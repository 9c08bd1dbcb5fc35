"""The pipeline runner and turns without Spark: whose failure is written down, and who may run a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lakebook
from books import Place
from failing_spark import NoSpark, StandIn
from lake import own_warehouse, run_sql  # noqa: F401
from lakebook import Book
from lakebook.clock import ManualClock
from lakebook.components.pipeline_runner import PipelineRunner
from lakebook.components.worker_spark import LONGEST_PAUSE
from lakebook.errors import PipelineBusy, SparkUnsuitable
from lakebook.pipelines.pipeline import Pipeline
from lakebook.pipelines.turns import Turn
from lakebook.registry.pipelines import claim_pipeline, release_claim, renew_claim
from streaming import produce


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def book(shared_place: Place, clock: ManualClock) -> Book:
    """A book with a topic that has records, and a table."""
    book = shared_place.open(clock=clock)
    book.topics.create("orders")
    book.tables.create("t", "id BIGINT")
    produce(book, "orders", 0, 1, 2, 3)
    return book


def pipeline(book: Book, name: str = "p") -> Pipeline:
    """A pipeline with an interval, for which records wait."""
    return book.pipelines.create(name, into="t", topics="orders", decoder="json", interval=0.1)


def runner_of(book: Book, spark: Callable[[], Any] = NoSpark(), *, told: bool = True) -> PipelineRunner:  # noqa: B008
    """A runner that looks when it is told to."""
    runner = PipelineRunner(book.lake, spark)
    runner._metadata = book.metadata
    runner.told = told
    return runner


def due(runner: PipelineRunner) -> list[str]:
    return [item.name for item in runner._all_due()]


def run_due(runner: PipelineRunner) -> list[str]:
    """Run what is due, and wait for it; what was said of each."""
    with ThreadPoolExecutor(1) as pool:
        runner._hand_out(pool)
    return list(runner.status()["last"].values())


# --- whose failure it is -----------------------------------------------------------


def test_a_pipeline_that_was_not_run_for_want_of_spark_does_not_wait_for_its_interval(
    book: Book, clock: ManualClock
) -> None:
    for name in ("p", "q"):
        book.pipelines.create(name, into="t", topics="orders", decoder="json", interval=86_400.0)
    runner = runner_of(book)
    said = run_due(runner)
    assert len(said) == 2
    assert all(text.startswith("not run here") for text in said)
    assert due(runner) == []
    clock.advance(LONGEST_PAUSE)
    assert due(runner) == ["p", "q"]


def test_a_pipeline_of_which_spark_dies_is_left_alone_by_this_process_and_no_other_is(
    book: Book, clock: ManualClock
) -> None:
    pipeline(book)
    runner = runner_of(book, lambda: StandIn(dies=True))
    run_due(runner)
    # Spark is tried again, and dies of it again.
    for _ in range(12):
        clock.advance(3600.0)
        assert due(runner) == ["p"]
        run_due(runner)
    clock.advance(LONGEST_PAUSE)
    assert due(runner) == []
    pipeline(book, "q")
    assert due(runner) == ["q"]


def test_a_spark_that_dies_is_no_failure_of_the_pipeline_and_a_batch_that_fails_is_one(book: Book) -> None:
    made = pipeline(book)
    gone: Any = StandIn(dies=True)
    runner = runner_of(book, lambda: gone)
    assert "Connection refused" in runner.run_once()["pipelines"]["p"]
    # It took the turn and planned a batch; of all this nothing keeps others from running it.
    record = made.record
    assert (gone.is_gone, record.last_batch) == (True, 1)
    assert (record.holder, record.failures, record.retry_at) == (None, 0, None)
    assert "has failed 1 times in a row" in runner.status()["spark"]
    token = record.token
    (said,) = run_due(runner_of(book, lambda: gone))
    assert "not run here" in said
    # It is known to be gone before the turn is taken.
    assert (made.record.token, made.record.failures) == (token, 0)
    with pytest.raises(SparkUnsuitable):
        made.run(gone)
    assert (made.record.failures, made.record.retry_at) == (0, None)
    alive: Any = StandIn()
    runner = runner_of(book, lambda: alive)
    runner.run_once()
    record = made.record
    assert (runner.status()["spark"], record.failures, record.retry_at is None) == ("given", 1, False)


def test_spark_that_cannot_be_had_is_left_alone_for_a_while_by_this_process_alone(
    book: Book, clock: ManualClock
) -> None:
    made = pipeline(book)
    spark = NoSpark()
    runner = runner_of(book, spark)
    for number in range(1, 4):
        (said,) = run_due(runner)
        assert "there is no Java" in said
        assert (spark.calls, made.record.failures, made.record.retry_at) == (number, 0, None)
        assert f"has failed {number} times in a row" in runner.status()["spark"]
        clock.advance(0.2)
        assert (due(runner), due(runner_of(book))) == ([], ["p"])
        clock.advance(LONGEST_PAUSE)
    work = book.maintenance_history(component="pipelines")
    assert [(item.action, item.outcome) for item in work] == [("run", "failed")] * 3


def test_of_many_pipelines_one_tries_a_spark_that_cannot_be_had(book: Book) -> None:
    for name in ("a", "b", "c"):
        pipeline(book, name)
    spark = NoSpark()
    said = run_due(runner_of(book, spark))
    assert (spark.calls, len(said), all("there is no Java" in item for item in said)) == (1, 3, True)


# --- turns -------------------------------------------------------------------------


def test_a_renewal_that_comes_after_the_turn_was_given_back_holds_nothing(book: Book, clock: ManualClock) -> None:
    made = pipeline(book)
    write, ident = book._registry.write, made.record.id
    token = write(lambda transaction: claim_pipeline(transaction, ident, "a", 60.0))
    assert token is not None
    assert write(lambda transaction: renew_claim(transaction, ident, token, 60.0))
    assert due(runner_of(book, told=False)) == []
    write(lambda transaction: release_claim(transaction, ident, token))
    assert not write(lambda transaction: renew_claim(transaction, ident, token, 60.0))
    record = made.record
    assert (record.holder, record.held_until) == (None, None)
    assert due(runner_of(book, told=False)) == ["p"]


def test_a_pipeline_that_nobody_holds_is_taken_up_whatever_time_its_row_has(book: Book, clock: ManualClock) -> None:
    pipeline(book)
    run_sql(book, f"UPDATE pipelines SET held_until = {clock.now_ms() + 3_600_000}")
    assert due(runner_of(book, told=False)) == ["p"]


def test_nobody_has_a_turn_in_a_new_epoch(book: Book, shared_place: Place, clock: ManualClock) -> None:
    made = pipeline(book)
    with Turn(book.lake, made.record):
        rival = shared_place.open(clock=clock)
        theirs = rival.pipelines["p"]
        with pytest.raises(PipelineBusy), Turn(rival.lake, theirs.record):
            pass
        rival.begin_epoch()
        assert (theirs.record.holder, theirs.record.held_until) == (None, None)
        with Turn(rival.lake, theirs.record) as turn:
            assert turn.token > made.listed.token


def test_nobody_has_a_turn_in_a_book_that_was_restored(book: Book, tmp_path: Path) -> None:
    with Turn(book.lake, pipeline(book).record):
        book.backup(tmp_path / "backup")
    lakebook.restore_book(tmp_path / "backup", tmp_path / "restored")
    with lakebook.open(tmp_path / "restored", create=False, publish="off") as restored:
        record = restored.pipelines["p"].record
        assert (record.holder, record.held_until) == (None, None)


# --- what is at work ---------------------------------------------------------------


def test_a_look_that_fails_leaves_no_pipeline_at_work(book: Book) -> None:
    pipeline(book, "a")
    pipeline(book, "b")
    runner = runner_of(book)
    run_sql(book, "UPDATE pipelines SET definition = '{}' WHERE name = 'b'")
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError):
        runner._hand_out(pool)
    assert runner.status()["at_work"] == []
    run_sql(book, "UPDATE pipelines SET definition = (SELECT definition FROM pipelines WHERE name = 'a')")
    assert due(runner) == ["a", "b"]


def test_a_pipeline_that_no_thread_takes_is_not_at_work(book: Book) -> None:
    pipeline(book, "a")
    pipeline(book, "b")
    runner = runner_of(book)
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(RuntimeError):
        runner._hand_out(pool)
    assert runner.status()["at_work"] == []
    assert due(runner) == ["a", "b"]
    # One that is at work is not handed out again.
    runner._at_work.add("a")
    assert due(runner) == ["b"]
