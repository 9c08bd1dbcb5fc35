"""Whatever happens to a view and its source, in any order: what is not stale has the rows of the query."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from pyspark.sql import SparkSession

import lakebook
from books import POSTGRESQL, SQLITE, Postgres
from lake import rows_of
from lakebook import Book
from lakebook.registry.ranges import Range
from viewing import DAY, T0, at, order, orders

EXAMPLES = int(os.environ.get("LAKEBOOK_TEST_VIEW_EXAMPLES", "4"))
STEPS = 10
TOTALS = "SELECT date_trunc('minute', ts) AS ts, region, count(*) AS n, {}(id) AS last FROM orders GROUP BY 1, 2"

#: Few times, so that they meet: within an hour, at its boundaries, and on both sides of one. None of a file lie far
#: from each other, for all between them would have to be built by Spark.
HOURS = [[0.0, 0.5], [0.99, 1.0], [4.75, 6.0], [5.25, 5.75], [12.5], [23.0, 23.99]]
FILES = st.sampled_from(HOURS).flatmap(lambda hours: st.lists(st.sampled_from(hours), min_size=1, max_size=3))
REGIONS = st.sampled_from(["eu", "us"])
BOUNDS = st.tuples(st.integers(0, 23), st.integers(1, 24)).map(lambda pair: (pair[0], max(pair[0] + 1, pair[1])))
Row = tuple[Any, ...]


class History(RuleBasedStateMachine):
    """A view over one table, and all rows of that table in a dictionary."""

    def __init__(self, make_book: Callable[[], Book], spark: SparkSession, told: list[str]) -> None:
        super().__init__()
        self._make_book, self._spark, self._told = make_book, spark, told
        self._rows: dict[int, tuple[float, str]] = {}
        self._ids = count(1)
        self._newest = max

    @initialize()
    def begin(self) -> None:
        self._book = self._make_book()
        self._table = orders(self._book)
        self._view = self._book.views.create("totals", TOTALS.format("max"), event_time="ts")
        # From here on every step has something to spoil.
        for hours in ([0.5], [5.25], [23.0, 23.99]):
            self.append(hours=hours, region="eu")
        self.materialize_all()

    # --- the source ------------------------------------------------------------------

    @rule(hours=FILES, region=REGIONS)
    def append(self, hours: list[float], region: str) -> None:
        with self._marks(hours):
            first = self._new_rows(hours, region)
            order(self._table, *hours, first=first, region=region)

    @rule(hours=FILES, region=REGIONS, settled=st.booleans())
    def append_outside(self, hours: list[float], region: str, settled: bool) -> None:
        with self._marks(hours):
            first = self._new_rows(hours, region)
            records = [{"id": first + n, "ts": at(hour), "region": region} for n, hour in enumerate(hours)]
            outside = self._book.catalog().load_table("default.orders")
            outside.append(rows_of(self._table, records))
            if settled:
                # Until its footer was taken, a file of an outside engine is read for every range.
                self._book.lake.settling.flush()

    @precondition(lambda self: self._rows)
    @rule(data=st.data(), outside=st.booleans())
    def delete(self, data: st.DataObject, outside: bool) -> None:
        gone = data.draw(st.sampled_from(sorted(self._rows)))
        if outside:
            self._book.catalog().load_table("default.orders").delete(f"id = {gone}")
        else:
            self._table.delete(f"id = {gone}", spark=self._spark)
        del self._rows[gone]
        self._check("delete")

    @rule()
    def compact(self) -> None:
        with self._marks([]):
            self._table.compact(self._spark)

    # --- the view --------------------------------------------------------------------

    @rule(bounds=BOUNDS, force=st.booleans())
    def materialize(self, bounds: tuple[int, int], force: bool) -> None:
        self._view.materialize(self._spark, at(bounds[0]), at(bounds[1]), force=force)
        states = {spec.state for spec in self._view.plan(at(bounds[0]), at(bounds[1]))}
        assert states <= {"built", "empty"}, states
        self._check("materialize")

    @rule()
    def materialize_all(self) -> None:
        self.materialize((0, 24), force=False)

    @rule()
    def merge(self) -> None:
        with self._marks([]):
            before = self._found()
            self._view.merge_partitions(self._spark, "day")
            assert self._found() == before

    @rule(bounds=BOUNDS)
    def retire(self, bounds: tuple[int, int]) -> None:
        wanted = [item for item in self._view.list_partitions() if _within(item, *bounds)]
        assert self._view.retire_partitions(at(bounds[0]), at(bounds[1])) == len(wanted)
        self._check("retire")

    @rule(bounds=BOUNDS)
    def regenerate(self, bounds: tuple[int, int]) -> None:
        self._view.regenerate_partitions(self._spark, at(bounds[0]), at(bounds[1]))
        self._check("regenerate")

    @rule()
    def alter(self) -> None:
        self._newest = min if self._newest is max else max
        self._book.views.alter("totals", sql=TOTALS.format(self._newest.__name__))
        self._check("alter")

    def teardown(self) -> None:
        if not hasattr(self, "_book"):
            return
        try:
            self._book.lake.settling.flush()
            self._view.materialize(self._spark, T0, T0 + DAY)
            assert self._found() == self._expected()
            self._view.merge_partitions(self._spark, "day")
            assert self._found() == self._expected()
            assert self._view.count() == len(self._expected())
            assert [item for item in self._view.list_partitions() if item.stale_at is not None] == []
            assert self._book.verify().findings == ()
            self._told.append("whole")
        finally:
            self._book.close()

    # --- what has to be --------------------------------------------------------------

    def _new_rows(self, hours: list[float], region: str) -> int:
        numbers = [next(self._ids) for _ in hours]
        self._rows.update({number: (hour, region) for number, hour in zip(numbers, hours, strict=True)})
        return numbers[0]

    def _expected(self) -> list[Row]:
        """The rows of the query over all there is."""
        groups: dict[Row, list[int]] = {}
        for number, (hour, region) in self._rows.items():
            moment = at(hour).replace(second=0, microsecond=0)
            groups.setdefault((moment, region), []).append(number)
        return sorted((*key, len(numbers), self._newest(numbers)) for key, numbers in groups.items())

    def _found(self) -> list[Row]:
        if not self._view.list_partitions():
            return []
        return sorted(tuple(row.values()) for row in self._view.to_arrow().to_pylist())

    def _check(self, step: str) -> None:
        """What is not stale has exactly the rows of the query, and no row lies in no range or in two."""
        self._told.append(step)
        found, expected = self._found(), self._expected()
        present = self._view.record.schema_hash
        ranges = self._view.list_partitions()
        assert all(any(item.begin <= row[0] < item.end for item in ranges) for row in found)
        for item in ranges:
            if item.stale_at is None and item.schema_hash == present:
                inside = [[row for row in rows if item.begin <= row[0] < item.end] for rows in (found, expected)]
                assert inside[0] == inside[1], (step, item)
        assert len({row[:2] for row in found}) == len(found)

    def _marks(self, hours: list[float]) -> _Marks:
        return _Marks(self, hours)


class _Marks:
    """One file of rows of these hours makes stale what lies between them, and nothing else."""

    def __init__(self, history: History, hours: list[float]) -> None:
        self._history, self._hours = history, hours

    def _stale(self) -> set[tuple[Any, Any]]:
        ranges = self._history._view.list_partitions()
        return {(item.begin, item.end) for item in ranges if item.stale_at is not None}

    def __enter__(self) -> None:
        self._before = self._stale()
        if self._hours:
            least, most = at(min(self._hours)), at(max(self._hours))
            ranges = self._history._view.list_partitions()
            self._before |= {(item.begin, item.end) for item in ranges if item.begin <= most and item.end > least}

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is None:
            assert self._stale() == self._before
            self._history._check("append" if self._hours else "move")


def _within(item: Range, first: int, last: int) -> bool:
    return at(first) <= item.begin and item.end <= at(last)


@pytest.fixture
def make_book(request: pytest.FixtureRequest, tmp_path: Path, empty_book: Path) -> Iterator[Callable[[], Book]]:
    """Makes books on one kind of database, each of its own."""
    urls: list[str] = []
    numbers = count()

    def make() -> Book:
        folder = tmp_path / f"book{next(numbers)}"
        if request.param == SQLITE:
            shutil.copytree(empty_book, folder)
            return lakebook.open(folder, publish="off")
        postgres: Postgres = request.getfixturevalue("postgres")
        urls.append(postgres.new_database(with_book=False))
        return lakebook.open(urls[-1], warehouse=str(folder), publish="off")

    yield make
    for url in urls:
        request.getfixturevalue("postgres").drop(url)


@pytest.mark.parametrize(
    ("make_book", "examples"),
    [(SQLITE, EXAMPLES), (POSTGRESQL, max(2, EXAMPLES // 4))],
    indirect=["make_book"],
    ids=[SQLITE, POSTGRESQL],
)
def test_whatever_happens_what_is_not_stale_has_the_rows_of_the_query(
    make_book: Callable[[], Book], spark: SparkSession, examples: int, soak: Callable[[str], None]
) -> None:
    told: list[str] = []
    asked = "LAKEBOOK_TEST_VIEW_EXAMPLES" in os.environ
    run_state_machine_as_test(
        lambda: History(make_book, spark, told),  # type: ignore[arg-type] # It takes what makes one, too.
        settings=settings(
            # The first one has no steps.
            max_examples=examples + 1,
            stateful_step_count=STEPS,
            deadline=None,
            # By default the same ones each time, which fit into the time of a test; asked for, others each time.
            derandomize=not asked,
            # To find a shorter history of the same failure would take very long.
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
    assert told.count("whole") > examples
    steps = len(told) - told.count("whole")
    soak(f"{told.count('whole'):,} histories of a view of {steps:,} steps: what is not stale had the rows of its query")
