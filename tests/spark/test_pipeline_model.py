"""Whatever happens to a pipeline, and in whatever order: each record lands once, as what was asked for makes of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from pyspark.sql import SparkSession

import lakebook
from books import Postgres
from lake import run_sql
from lakebook import Book, failpoints
from lakebook.errors import InvalidInput, LakebookError, PipelineBusy, PipelineStopped
from lakebook.spark.pipelines import PROVENANCE
from lakebook.streams.merging import merge_topic
from streaming import produce

#: Sequences of operations that are tried; `make soak` tries more.
EXAMPLES = int(os.environ.get("LAKEBOOK_TEST_PIPELINE_EXAMPLES", "4"))
STEPS = 8
TOPIC, TABLE, LETTERS = "orders", "t", "t_dead_letters"
PARTITIONS = 2
#: Where whoever runs a pipeline may die, or be frozen.
POINTS = (
    "pipeline.planned",
    "insert.reserved",
    "insert.written",
    "pipeline.written",
    "transaction.before_commit",
    "change.committed",
    "pipeline.landed",
)
NUMBERS = st.integers(0, PARTITIONS - 1)
SHARES = st.sampled_from([0, 30, 60, 100])
#: What may happen while one is frozen.
MEANWHILE = st.lists(
    st.sampled_from(["run", "run", "alter", "retain", "produce", "pause", "resume", "merge"]), min_size=1, max_size=3
)


class Crash(BaseException):
    """What a process that is killed sees."""


def query(factor: int) -> str:
    return f"SELECT id * {factor} AS id, {', '.join(PROVENANCE)} FROM source WHERE id % 3 <> 0"


class Machine(RuleBasedStateMachine):
    """A pipeline, and what has to have become of each record."""

    def __init__(self, spark: SparkSession, open_book: Callable[[], Book]) -> None:
        super().__init__()
        self.spark = spark
        self.book = open_book()
        self.book.topics.create(TOPIC, PARTITIONS)
        columns = "id BIGINT, _source_topic STRING, _source_partition INT, _source_offset BIGINT"
        self.book.tables.create(TABLE, f"{columns}, _source_timestamp TIMESTAMP")
        #: The ids of records by partition; none: it does not fit.
        self.logs: list[list[int | None]] = [[] for _ in range(PARTITIONS)]
        self.factor, self.count, self.columns = 1, 0, 0
        #: By partition and offset, with which factor a record has landed.
        self.landed: dict[tuple[int, int], int] = {}
        self.stands: dict[int, tuple[int, int]] = {}

    @initialize(start=st.sampled_from(["earliest", "latest"]), retention=st.sampled_from(["wait", "wait", "stop"]))
    def begin(self, start: str, retention: str) -> None:
        self.waits = retention == "wait"
        self.produce(0, [True, False])
        self.produce(1, [True, True])
        self.pipeline = self.book.pipelines.create(
            "p",
            into=TABLE,
            topics=TOPIC,
            decoder="json",
            schema="id BIGINT NOT NULL",
            sql=query(1),
            provenance=True,
            bad_records="dead_letter",
            start=start,
            retention=retention,
        )
        self.stands = self.standing()
        self.produce(0, [True])

    # --- what it has to be ---------------------------------------------------------

    def standing(self) -> dict[int, tuple[int, int]]:
        return {item.partition: (item.first, item.next) for item in self.pipeline._runner().planner.offsets()}

    def sync(self, *, skipped: bool = False) -> None:
        """Note what has landed since, by the definition that there is now."""
        now = self.standing()
        for number, (first, following) in now.items():
            before_first, before_next = self.stands[number]
            assert first <= before_first and following >= before_next, "offsets move only forward"
            if not skipped:
                new = {*range(first, before_first), *range(before_next, following)}
                self.landed |= {(number, offset): self.factor for offset in new}
        self.stands = now

    @invariant()
    def rows_are_those_of_the_records_that_have_landed(self) -> None:
        expected, dead = {}, set()
        for (number, offset), factor in self.landed.items():
            value = self.logs[number][offset]
            if value is None:
                dead.add((number, offset))
            elif value % 3:
                expected[number, offset] = value * factor
        rows = self.book.table(TABLE).to_arrow().to_pylist()
        assert len(rows) == len(expected)
        assert {(row["_source_partition"], row["_source_offset"]): row["id"] for row in rows} == expected
        if self.stands:
            letters = self.book.table(LETTERS).to_arrow().to_pylist()
            assert len(letters) == len(dead)
            assert {(row["partition"], row["offset"]) for row in letters} == dead

    @invariant()
    def nothing_stops_where_nothing_is_lost(self) -> None:
        if self.stands and self.waits:
            assert self.pipeline.record.state != "stopped"

    # --- what may happen -----------------------------------------------------------

    @rule(number=NUMBERS, fits=st.lists(st.booleans(), min_size=1, max_size=4))
    def produce(self, number: int, fits: list[bool]) -> None:
        ids: list[int | None] = []
        for fit in fits:
            self.count += 1
            ids.append(self.count if fit else None)
        produce(self.book, TOPIC, number, *(b"{" if one is None else json.dumps({"id": one}).encode() for one in ids))
        self.logs[number] += ids

    @rule()
    def run(self) -> None:
        active = self.pipeline.record.state == "active"
        try:
            report = self.pipeline.run(self.spark)
        except PipelineBusy:
            # Whoever had the turn died without giving it back, and it has run out by now.
            run_sql(self.book, "UPDATE pipelines SET held_until = 0")
            self.run()
            return
        except PipelineStopped:
            assert not active or not self.waits, "only what is gone stops it"
        else:
            assert active
            if not report.lost:
                assert self.pipeline.describe().lag == 0
        self.sync()

    @rule(point=st.sampled_from(POINTS), times=st.integers(1, 4))
    def crash(self, point: str, times: int) -> None:
        left = [times]

        def die() -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Crash

        with failpoints.armed(point, die), suppress(Crash, LakebookError):
            self.pipeline.run(self.spark)
        self.sync()

    @rule(point=st.sampled_from(["pipeline.planned", "insert.written", "pipeline.written"]), acts=MEANWHILE)
    def freeze(self, point: str, acts: list[str]) -> None:
        """One is frozen for so long that others take its turn, and then goes on."""
        with self._frozen_at(point, acts), suppress(PipelineStopped, PipelineBusy):
            self.pipeline.run(self.spark)
        self.sync()

    @contextmanager
    def _frozen_at(self, point: str, acts: list[str]) -> Iterator[None]:
        frozen: list[str] = []

        def meanwhile() -> None:
            if frozen:
                return
            frozen.append(point)
            run_sql(self.book, "UPDATE pipelines SET held_until = 0")
            for act in acts:
                self._act(act)

        with failpoints.armed(point, meanwhile):
            yield

    def _act(self, name: str) -> None:
        """One of what may happen meanwhile."""
        values: dict[str, tuple[Any, ...]] = {
            "alter": (self.factor % 5 + 1, 2),
            "retain": (0, 100),
            "produce": (0, [True]),
            "resume": (True,),
        }
        getattr(self, name)(*values.get(name, ()))

    @rule()
    def pause(self) -> None:
        self.pipeline.pause()

    @rule(skip_lost=st.booleans())
    def resume(self, skip_lost: bool) -> None:
        self.pipeline.resume(skip_lost=skip_lost)
        before = self.stands
        assert not self.waits or self.standing() == before, "nothing is lost where retention waits"
        self.sync(skipped=True)

    @rule(factor=st.integers(1, 5), batch=st.sampled_from([2, 100]))
    def alter(self, factor: int, batch: int) -> None:
        try:
            self.book.pipelines.alter("p", sql=query(factor), batch_records=batch)
        except PipelineBusy:
            return
        self.sync()  # What had landed had landed before.
        self.factor = factor

    @rule()
    def add_a_column(self) -> None:
        self.columns += 1
        with self.book.table(TABLE).update_schema() as update:
            update.add_column(f"more_{self.columns}", "int")

    @rule(number=NUMBERS, share=SHARES)
    def retain(self, number: int, share: int) -> None:
        self.book.metadata.delete_segments_before(TOPIC, number, len(self.logs[number]) * share // 100)

    @rule()
    def merge(self) -> None:
        merge_topic(self.book.lake, self.book.metadata, TOPIC)

    @rule(number=NUMBERS, start=SHARES, end=SHARES, dies=st.sampled_from([None, None, "insert.written"]))
    def backfill(self, number: int, start: int, end: int, dies: str | None) -> None:
        length = len(self.logs[number])
        places = {number: length * start // 100}, {number: length * end // 100}
        others = {other: 0 for other in range(PARTITIONS) if other != number}

        def die() -> None:
            raise Crash

        try:
            with failpoints.armed(dies or "view.claimed", die):
                done = self.pipeline.backfill(self.spark, start={**places[0], **others}, end={**places[1], **others})
        except (InvalidInput, PipelineStopped, PipelineBusy, Crash):
            self.sync()
            return
        self.sync()
        for partition, (first, following) in done.ranges.items():
            self.landed |= {(partition, offset): self.factor for offset in range(first, following)}

    # --- the end -------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if self.stands:
                self.resume(True)
                while self.pipeline.waits():
                    self.run()
                    self.resume(True)
                self.rows_are_those_of_the_records_that_have_landed()
                if self.waits:
                    for number, (first, following) in self.stands.items():
                        assert following == len(self.logs[number])
                        assert all((number, offset) in self.landed for offset in range(first, following))
                found = self.book.verify()
                assert (found.findings, found.unfinished) == ((), ())
        finally:
            self.book.close()


def drive(spark: SparkSession, open_book: Callable[[], Book], examples: int) -> None:
    class Driven(Machine):
        def __init__(self) -> None:
            super().__init__(spark, open_book)

    run_state_machine_as_test(
        Driven,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


OPTIONS: dict[str, Any] = {"publish": "off", "merge_quiet": 0, "merge_segments": 2}


@pytest.mark.timeout(0 if EXAMPLES > 10 else 300)
def test_a_pipeline_on_sqlite_lands_each_record_once(spark: SparkSession, tmp_path: Path) -> None:
    made: list[Path] = []

    def open_book() -> Book:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        made.append(tmp_path / str(len(made)))
        return lakebook.open(made[-1], **OPTIONS)

    drive(spark, open_book, EXAMPLES)


@pytest.mark.timeout(0 if EXAMPLES > 10 else 300)
def test_a_pipeline_on_postgresql_lands_each_record_once(
    spark: SparkSession, postgres: Postgres, tmp_path: Path
) -> None:
    urls: list[str] = []

    def open_book() -> Book:
        urls.append(postgres.new_database(with_book=False))
        return lakebook.open(urls[-1], warehouse=str(tmp_path / str(len(urls))), **OPTIONS)

    try:
        drive(spark, open_book, max(1, EXAMPLES // 3))
    finally:
        for url in urls:
            postgres.drop(url)
