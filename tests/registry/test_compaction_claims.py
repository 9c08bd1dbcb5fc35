"""One worker at a time compacts a table: it claims it, keeps the claim, and lands nothing once another has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lakebook
from books import Place
from compacting import MUCH, by_arrow, write
from held import held_before_commit, started, wait_until_blocked
from lake import numbers, objects, own_warehouse, records  # noqa: F401
from lakebook import Book, failpoints
from lakebook.clock import ManualClock
from lakebook.components.compactor import Compactor
from lakebook.components.upkeep import Upkeep
from lakebook.errors import ClaimLost, CompactionClaimed, EpochChanged, InvalidInput, SparkUnsuitable, TableNotFound
from lakebook.lake.compaction import begin, choose, claimed, compact, finish
from lakebook.lake.leasing import acquire
from lakebook.lake.steps import Steps
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.commits import owner
from lakebook.registry.compaction_claims import (
    CompactionClaim,
    end_claim,
    list_claims,
    refuse_claimed,
    renew_claim,
    settle_claim,
    take_claim,
)

SECONDS = 60.0
INTERVAL = 10.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def book(shared_place: Place, clock: ManualClock) -> Book:
    return shared_place.open(clock=clock, worker_interval=INTERVAL, compact_delay=0)


@pytest.fixture
def rival(book: Book, shared_place: Place, clock: ManualClock) -> Book:
    return shared_place.open(clock=clock, worker_interval=INTERVAL, compact_delay=0)


def small(book: Book, name: str = "t", files: int = 6) -> Table:
    return numbers(book, name, *([number] for number in range(files)))


def take(book: Book, table: Table) -> CompactionClaim:
    return book._registry.write(lambda transaction: take_claim(transaction, table.record, SECONDS))


def renew(book: Book, claim: CompactionClaim) -> bool:
    return book._registry.write(lambda transaction: renew_claim(transaction, claim, SECONDS))


def claims(book: Book) -> list[dict[str, Any]]:
    return records(book, schema.compaction_claims)


# --- the claim itself ----------------------------------------------------------


def test_a_table_that_somebody_compacts_is_not_claimed_again_and_others_are(book: Book, rival: Book) -> None:
    table, other = small(book), small(book, "other")
    claim = take(book, table)
    with pytest.raises(CompactionClaimed, match=f"{owner()} compacts it") as refused:
        take(rival, rival.table("t"))
    assert isinstance(refused.value, lakebook.errors.TransientError)
    take(rival, rival.table("other"))
    assert {row["table_id"]: row["holder"] for row in claims(book)} == {table.id: owner(), other.id: owner()}
    book._registry.write(lambda transaction: end_claim(transaction, claim))
    take(rival, rival.table("t"))


def test_a_renewal_under_way_keeps_a_claim_from_who_finds_it_run_out(
    book: Book, rival: Book, clock: ManualClock
) -> None:
    table = small(book)
    claim, theirs = take(book, table), rival.table("t")
    clock.advance(SECONDS + 1)
    with held_before_commit(lambda: renew(book, claim)) as renewing:
        taking = started(lambda: take(rival, theirs))
        wait_until_blocked(book)
        assert renewing.finish()
    with pytest.raises(CompactionClaimed):
        taking.finish()
    assert renew(book, claim)


def test_a_claim_runs_out_unless_it_is_renewed(book: Book, rival: Book, clock: ManualClock) -> None:
    table = small(book)
    claim = take(book, table)
    for _ in range(3):
        clock.advance(SECONDS - 1)
        with pytest.raises(CompactionClaimed):
            take(rival, rival.table("t"))
        assert renew(book, claim)
    clock.advance(SECONDS)
    # As long as nobody has taken it over, it is still its holder's.
    assert renew(book, claim)
    clock.advance(SECONDS)
    book._registry.read_with(lambda reader: refuse_claimed(reader, table.record, clock.now_ms()))
    (dead,) = book._registry.read_with(lambda reader: list_claims(reader, clock.now_ms(), 10))
    assert (dead.table, dead.holder, dead.alive) == ("default.t", owner(), False)
    taken = take(rival, rival.table("t"))
    assert taken.token != claim.token
    assert not renew(book, claim)
    # Nor does the former holder end it.
    book._registry.write(lambda transaction: end_claim(transaction, claim))
    assert [row["token"] for row in claims(book)] == [taken.token]


def test_what_was_done_under_a_lost_claim_is_refused_once_and_for_all(
    book: Book, rival: Book, clock: ManualClock
) -> None:
    table = small(book)
    claim = take(book, table)
    clock.advance(SECONDS)
    taken = take(rival, rival.table("t"))
    for lost in (claim, claim):
        with pytest.raises(ClaimLost):
            book._registry.write(lambda transaction: settle_claim(transaction, table.record, lost))  # noqa: B023
    rival._registry.write(lambda transaction: settle_claim(transaction, table.record, taken))
    assert claims(book) == []


def test_a_dropped_table_is_not_claimed_and_its_claim_goes_with_its_rows(book: Book, clock: ManualClock) -> None:
    table = small(book)
    claim = take(book, table)
    book.tables.drop("t")
    with pytest.raises(TableNotFound):
        take(book, table)
    assert renew(book, claim)
    (shown,) = book._registry.read_with(lambda reader: list_claims(reader, clock.now_ms(), 10))
    assert shown.table == "default.t"
    clock.advance(10 * 86400)
    for _ in range(4):
        book.maintain(["janitor"], spark=None)
        clock.advance(10 * 86400)
    assert records(book, schema.tables) == []
    assert claims(book) == []
    assert not renew(book, claim)


def test_a_new_life_has_no_claims(shared_place: Place, book: Book, rival: Book, tmp_path: Path) -> None:
    table = small(book)
    claim = take(book, table)
    rival.backup(tmp_path / "backup")
    rival.begin_epoch()
    assert claims(rival) == []
    with pytest.raises(EpochChanged):
        renew(book, claim)
    take(rival, rival.table("t"))
    lakebook.restore_book(tmp_path / "backup", tmp_path / "restored", warehouse=str(book.warehouse.folder))
    with lakebook.open(tmp_path / "restored", warehouse=str(book.warehouse.folder)) as restored:
        assert claims(restored) == []
        assert restored.table("t").count() == 6


# --- a compaction --------------------------------------------------------------


def test_a_frozen_worker_cannot_land_its_compaction(book: Book, rival: Book, clock: ManualClock) -> None:
    table = small(book)
    before = set(objects(book, "data"))
    with claimed(book.lake, table.record) as claim, acquire(book.lake, table.record) as lease:
        choice = choose(book.lake, table.record, lease, MUCH)
        assert choice is not None
        with begin(book.lake, table.record, choice) as attempt:
            files = write(book, choice, attempt, lease)
            clock.advance(book.settings.lease_seconds)
            # Another has begun, and has ended nothing yet: all that this one has read is as it was.
            with claimed(rival.lake, table.record):
                with pytest.raises(ClaimLost):
                    finish(book.lake, lease, attempt, choice, files, Steps(book.lake.clock), claim)
                assert len(claims(book)) == 1
    # What it wrote is gone like that of any attempt that failed.
    assert set(objects(book, "data")) == before
    assert (table.version, claims(book)) == (6, [])
    report = by_arrow(rival, rival.table("t"))
    assert report is not None
    assert (report.files_in, report.files_out) == (6, 1)
    assert book.verify().findings == ()


@pytest.mark.parametrize("point", ["compact.claimed", "lease.taken", "compact.written", "change.written"])
def test_a_compaction_that_fails_lets_its_table_go(book: Book, rival: Book, point: str) -> None:
    table = small(book)

    def fail() -> None:
        raise RuntimeError("it fails on purpose")

    with failpoints.armed(point, fail), pytest.raises(RuntimeError):
        by_arrow(book, table)
    assert claims(book) == []
    assert by_arrow(rival, rival.table("t")) is not None
    assert claims(book) == []
    assert book.verify().findings == ()


def test_a_claim_is_renewed_with_the_leases_of_its_process(book: Book, rival: Book, clock: ManualClock) -> None:
    table = small(book)
    with claimed(book.lake, table.record):
        for _ in range(3):
            clock.advance(book.settings.lease_seconds * 0.9)
            book.lake.renewals.renew()
            with pytest.raises(CompactionClaimed):
                take(rival, rival.table("t"))
    take(rival, rival.table("t"))


def test_by_hand_it_is_told_who_compacts_the_table_and_nothing_is_counted(book: Book, rival: Book) -> None:
    table = small(book)
    spark: Any = None  # Nobody gets as far as to need it.
    with claimed(rival.lake, table.record):
        with pytest.raises(CompactionClaimed, match=f"{owner()} compacts it"):
            compact(book.lake, table.record, spark)
        # But where there is nothing to gain, nobody needs to know.
        quiet = numbers(book, "quiet", [1])
        with claimed(rival.lake, quiet.record):
            assert compact(book.lake, quiet.record, spark).versions == ()
    assert not any(name.startswith("lakebook_compactions") for name in book.metrics.values())


# --- the compactor -------------------------------------------------------------


class Counted:
    """Spark that cannot be had, and how often it was asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        raise SparkUnsuitable("there is no Java", on="Spark")


def test_a_compactor_leaves_a_claimed_table_alone_without_a_word(book: Book, rival: Book, clock: ManualClock) -> None:
    table = small(book)
    spark = Counted()
    compactor = Compactor(book.lake, spark)
    compactor.note(table.id)
    with claimed(rival.lake, table.record):
        for _ in range(12):
            assert compactor.run_due() == 1
            (waiting,) = compactor.status()["next"]
            assert "CompactionClaimed" in waiting["why"]
            assert waiting["in_seconds"] <= book.settings.lease_seconds
            for _ in range(2):
                rival.lake.renewals.renew()
                clock.advance(waiting["in_seconds"] / 2 + 0.001)
    assert (spark.calls, compactor.status()["failures"], records(book, schema.maintenance_history)) == (0, [], [])
    assert compactor.run_due() == 1
    assert spark.calls == 1


def test_one_that_is_claimed_at_the_last_moment_is_not_written_down_either(book: Book, rival: Book) -> None:
    table = small(book)

    def too_late() -> Any:
        take(rival, rival.table("t"))

    compactor = Compactor(book.lake, too_late)
    compactor.note(table.id)
    assert compactor.run_due() == 1
    assert "CompactionClaimed" in compactor.status()["next"][0]["why"]
    assert (compactor.status()["failures"], records(book, schema.maintenance_history)) == ([], [])


def test_a_compactor_that_nobody_tells_of_events_walks_through_the_tables(book: Book) -> None:
    tables = [small(book, f"t{number}") for number in range(3)]
    numbers(book, "alone", [1])
    off = small(book, "off")
    off.set_properties(**{"lakebook.compaction": "off"})
    compactor = Compactor(book.lake, Counted())
    # It is told of events.
    assert compactor.walk() == 0
    compactor.told = False
    book.pause("compactor", reason="a holiday")
    assert compactor.walk() == 0
    book.resume("compactor")
    assert compactor.walk() == 3
    assert compactor.status()["waiting"] == 3
    # Once for each version: what brings nothing is not tried for ever.
    assert compactor.walk() == 0
    tables[1].insert_arrow(tables[1].to_arrow())
    assert compactor.walk() == 1
    assert [compactor.run_due(), compactor.status()["waiting"]] == [3, 3]


def test_a_walk_takes_some_tables_at_a_time_and_begins_again_after_the_last(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakebook.components.compactor._MOST_TABLES", 2)
    for number in range(5):
        small(book, f"t{number}", 5)
    compactor = Compactor(book.lake, Counted())
    compactor.told = False
    assert [compactor.walk() for _ in range(4)] == [2, 2, 1, 0]
    book.table("t4").insert_arrow(book.table("t4").to_arrow())
    assert sum(compactor.walk() for _ in range(3)) == 1


# --- daemons that wait ---------------------------------------------------------


class Recorded:
    """What became of the components of an upkeep, in order."""

    def __init__(self, upkeep: Upkeep, monkeypatch: pytest.MonkeyPatch) -> None:
        self.facts: list[str] = []
        for name, component in upkeep.components.items():
            for act in ("start", "stop"):
                monkeypatch.setattr(component, act, self._noted(f"{act} {name}", getattr(component, act)))

    def _noted(self, fact: str, act: Callable[[], None]) -> Callable[[], None]:
        def noted() -> None:
            self.facts.append(fact)
            act()

        return noted


COMPONENTS = ("compactor", "views", "pipelines", "janitor")
PATIENCE = 60.0


def test_workers_begin_before_the_turn_and_outlive_it(shared_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    book = shared_place.open(worker_interval=INTERVAL)
    first = Upkeep(book.lake, Counted(), COMPONENTS)
    second = Upkeep(shared_place.open(worker_interval=INTERVAL).lake, Counted(), COMPONENTS)
    done = Recorded(second, monkeypatch)
    first.start()
    assert first.wait_active(PATIENCE)
    second.start()
    assert not second.active
    assert second.workers == ("compactor", "views", "pipelines")
    assert done.facts == ["start compactor", "start views", "start pipelines"]
    assert [second.components[name].told for name in second.workers] == [False] * 3
    threads = {second.components["compactor"]._thread, second.components["pipelines"]._thread}  # type: ignore[attr-defined]
    first.stop()
    assert second.wait_active(PATIENCE)
    assert [second.components[name].told for name in second.workers] == [True] * 3
    # What had begun goes on, in the same threads.
    assert {second.components["compactor"]._thread, second.components["pipelines"]._thread} == threads  # type: ignore[attr-defined]
    assert [fact for fact in done.facts if fact.startswith("stop")] == []
    second._lose_turn()
    assert done.facts[-1] == "stop janitor"
    assert [second.components[name].told for name in second.workers] == [False] * 3
    second.stop()
    assert sorted(done.facts[-3:]) == ["stop compactor", "stop pipelines", "stop views"]
    assert all(not thread.is_alive() for thread in threads)


@pytest.mark.parametrize(("interval", "spark"), [(0.0, Counted()), (INTERVAL, None)])
def test_a_waiting_daemon_does_nothing_if_it_is_told_so_or_has_no_spark(
    shared_place: Place, monkeypatch: pytest.MonkeyPatch, interval: float, spark: Counted | None
) -> None:
    first = Upkeep(shared_place.open().lake, None, ("janitor",))
    second = Upkeep(shared_place.open(worker_interval=interval).lake, spark, COMPONENTS)
    done = Recorded(second, monkeypatch)
    first.start()
    assert first.wait_active(PATIENCE)
    second.start()
    assert (second.workers, done.facts) == ((), [])
    first.stop()
    assert second.wait_active(PATIENCE)
    assert done.facts == [f"start {name}" for name in COMPONENTS]
    second.stop()
    assert done.facts[4:] == [f"stop {name}" for name in reversed(COMPONENTS)]


def test_only_what_was_asked_for_works_while_it_waits(shared_place: Place) -> None:
    lake = shared_place.open(worker_interval=INTERVAL).lake
    assert Upkeep(lake, Counted(), ("janitor", "views")).workers == ("views",)
    assert Upkeep(lake, Counted(), ("janitor",)).workers == ()


def test_a_worker_never_takes_the_turn(shared_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Upkeep(shared_place.open(worker_interval=INTERVAL).lake, Counted(), worker=True)
    done = Recorded(worker, monkeypatch)
    worker.start()
    assert done.facts == ["start pipelines", "start compactor", "start views"]
    assert [component.told for component in worker.components.values()] == [False] * 3
    other = Upkeep(shared_place.open().lake, None, ("janitor",))
    other.start()
    assert other.wait_active(PATIENCE)
    assert (worker.active, worker.failure) == (False, None)
    other.stop()
    assert shared_place.open().overview().holder is None
    worker.stop()
    assert done.facts[3:] == ["stop views", "stop compactor", "stop pipelines"]


def test_a_worker_ends_with_a_book_whose_life_is_over(shared_place: Place) -> None:
    worker = Upkeep(shared_place.open(worker_interval=INTERVAL).lake, Counted(), worker=True)
    worker.start()
    shared_place.open().begin_epoch()
    assert isinstance(worker.failure, EpochChanged)
    worker.stop()


@pytest.mark.parametrize(
    ("interval", "spark", "components"),
    [(0.0, Counted(), None), (INTERVAL, None, None), (INTERVAL, Counted(), ("compactor", "janitor"))],
)
def test_a_worker_that_could_do_nothing_or_needs_the_turn_is_refused(
    shared_place: Place, interval: float, spark: Counted | None, components: tuple[str, ...] | None
) -> None:
    with pytest.raises(InvalidInput):
        Upkeep(shared_place.open(worker_interval=interval).lake, spark, components, worker=True)


def test_workers_end_with_a_book_whose_life_is_over(shared_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    book = shared_place.open(worker_interval=INTERVAL, astha_lease=0.5)
    upkeep = Upkeep(book.lake, Counted(), COMPONENTS)
    done = Recorded(upkeep, monkeypatch)
    upkeep.start()
    assert upkeep.wait_active(PATIENCE)
    shared_place.open().begin_epoch()
    assert upkeep.astha._thread is not None
    upkeep.astha._thread.join(PATIENCE)
    assert isinstance(upkeep.astha.failure, EpochChanged)
    assert sorted(fact for fact in done.facts if fact.startswith("stop")) == sorted(
        f"stop {name}" for name in COMPONENTS
    )
    upkeep.stop()


def test_maintenance_status_says_who_compacts_what(book: Book, rival: Book, clock: ManualClock) -> None:
    table = small(book)
    assert book.overview().compactions == ()
    with claimed(rival.lake, table.record):
        (shown,) = book.overview().compactions
        assert (shown.table_id, shown.table, shown.holder, shown.alive) == (table.id, "default.t", owner(), True)
        clock.advance(book.settings.lease_seconds)
        assert [item.alive for item in book.overview().compactions] == [False]
