"""What is worth a compaction is found by rows alone, little is rewritten twice, and every writer has precedence."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from books import POSTGRESQL, Place
from by_hand import of_duckdb, of_pyiceberg
from compacting import MUCH, by_arrow, choice_of, enter_sizes, write
from deletes import delete_positions
from lake import files_of, ids, insert, numbers, objects, own_warehouse, records  # noqa: F401
from lakebook import Book, failpoints
from lakebook.clock import ManualClock
from lakebook.errors import CompactionClaimed, FilesChanged, InvalidTable
from lakebook.lake.attempts import Attempt
from lakebook.lake.bundles import bundles_of, longest_run, tasks_of
from lakebook.lake.compaction import begin, choose, claimed, debt_of, finish, policy_of
from lakebook.lake.leasing import acquire
from lakebook.lake.steps import Steps
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.commits import owner
from lakebook.registry.inserts import DECLARED_WORK, REWRITE
from lakebook.registry.outside import hold_back
from lakebook.registry.small_files import RUNS, SMALL_FILES, runs_of
from lakebook.registry.table_files import TableChange

TARGET = 64_000
SMALL = TARGET * 3 // 4
KIB = 1024


@dataclass(frozen=True)
class Sized:
    """A file of which only the size counts."""

    id: int
    file_size: int


def sized(*sizes: int) -> list[Sized]:
    return [Sized(number, size) for number, size in enumerate(sizes, 1)]


def bundles(files: list[Sized], worth: dict[int, int] | None = None, least: int = 5) -> list[list[Sized]]:
    return bundles_of(files, worth or {}, target=TARGET, small=SMALL, least=least)


# --- the choice itself ---------------------------------------------------------


def test_a_run_is_the_most_files_of_which_none_is_larger_than_the_others_together() -> None:
    cases = {
        (): 0,
        (7,): 0,
        (7, 7): 2,
        (5, 6, 7): 3,
        (1, 2, 4, 8, 16): 0,
        (1, 1, 1, 1, 1, 10): 5,
        (1, 100, 100): 3,
        (1, 2, 4, 8, 8): 5,
    }
    for sizes, length in cases.items():
        assert [file.file_size for file in longest_run(sized(*sizes))] == list(sizes[:length]), sizes


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 2 * TARGET), max_size=60), st.sets(st.integers(1, 60)), st.integers(2, 9))
def test_a_choice_has_no_file_twice_and_every_bundle_gains(sizes: list[int], marked: set[int], least: int) -> None:
    files = sized(*sizes)
    worth = {file.id: file.file_size // 2 for file in files if file.id in marked}
    found = bundles(files, worth, least)
    chosen = [file for bundle in found for file in bundle]
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(files)
    assert {file for file in files if file.id in worth} <= set(chosen)
    for bundle in found:
        total = sum(worth.get(file.id, file.file_size) for file in bundle)
        plain = [file for file in bundle if file.id not in worth]
        assert all(file.file_size < SMALL for file in plain)
        # Large enough to be left alone from now on, or twice as large as any that is in it.
        assert total >= SMALL or not plain or 2 * max(file.file_size for file in plain) <= total
        assert len(plain) != 1 or len(bundle) > 1
        assert total < 1.5 * TARGET or len(bundle) == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2 * TARGET)), max_size=40))
def test_no_task_writes_two_bundles_of_a_partition(given_bundles: list[tuple[int, int]]) -> None:
    tasks = tasks_of(given_bundles, TARGET, SMALL)
    placed = [(task, partition) for task, (partition, _) in zip(tasks, given_bundles, strict=True)]
    assert len(set(placed)) == len(placed)
    assert set(tasks) == set(range(len(set(tasks))))
    for task in set(tasks):
        together = [size for found, (_, size) in zip(tasks, given_bundles, strict=True) if found == task]
        assert len(together) == 1 or sum(together) <= TARGET


class Simulated:
    """A partition whose files are compacted, and how many bytes that writes."""

    def __init__(self) -> None:
        self.files: list[Sized] = []
        self.given = self.written = self.rounds = 0
        self._last = 0

    def add(self, size: int) -> None:
        self.given += size
        self._enter(size)

    def _enter(self, size: int) -> None:
        self._last += 1
        self.files.append(Sized(self._last, size))

    def compact(self) -> bool:
        found = bundles(self.files)
        gone = {file.id for bundle in found for file in bundle}
        self.files = [file for file in self.files if file.id not in gone]
        for bundle in found:
            size = sum(file.file_size for file in bundle)
            self.written += size
            self._enter(size)
        self.rounds += bool(found)
        return bool(found)


@pytest.mark.parametrize("size", [10, 100, 1000, 5000, 20_000, 47_000])
def test_a_stream_of_equal_inserts_is_rewritten_as_often_as_the_logarithm_says(size: int) -> None:
    partition = Simulated()
    most = 0
    for _ in range(1000):
        partition.add(size)
        while partition.compact():
            pass
        most = max(most, sum(1 for file in partition.files if file.file_size < SMALL))
    assert partition.written / partition.given <= max(1.0, math.log2(min(1000, TARGET / size)))
    assert sum(file.file_size for file in partition.files) == partition.given
    assert most <= 5 + math.log2(1000)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 2 * TARGET), max_size=200))
def test_what_is_compacted_comes_to_rest(sizes: list[int]) -> None:
    partition = Simulated()
    for size in sizes:
        partition.add(size)
    while partition.compact():
        pass
    assert partition.rounds <= 2 + math.log2(len(sizes) + 1)
    rest = list(partition.files)
    assert not partition.compact()
    assert partition.files == rest
    # Each byte at most once per doubling, and once more into a file that is left alone.
    assert partition.written <= partition.given * (2 + math.log2(TARGET))


# --- found by rows -------------------------------------------------------------


def test_the_database_finds_the_same_runs_as_the_choice(book: Book) -> None:
    table = book.tables.create("t", "id BIGINT, p BIGINT", partition_by=["p"])
    chance = random.Random(1)
    sizes: list[tuple[int, str]] = []
    for partition in range(12):
        for _ in range(chance.randrange(30)):
            size = (chance.randrange(1, 100), 2 ** chance.randrange(18), chance.randrange(90_000))[partition % 3]
            sizes.append((size, f"[{partition}]"))
    chance.shuffle(sizes)
    enter_sizes(book, table, sizes)
    expected = {}
    for values in {values for _, values in sizes}:
        run = longest_run(sized(*(size for size, of in sizes if of == values and size < SMALL)))
        if len(run) >= 5:
            expected[(0, values)] = (len(run), sum(file.file_size for file in run))
    for most in (1000, 3):
        found = book.lake.registry.read_with(lambda reader: runs_of(reader, table.id, SMALL, 5, (MUCH, MUCH), most))  # noqa: B023
        assert {run.partition: (run.files, run.bytes) for run in found}.items() <= expected.items()
        assert len(found) == min(most, len(expected))
        assert [run.files for run in found] == sorted((number for number, _ in expected.values()), reverse=True)[:most]
    bounded = book.lake.registry.read_with(lambda reader: runs_of(reader, table.id, SMALL, 5, (7, 50_000), 1000))
    assert bounded
    assert all(run.files <= 7 and run.bytes <= 50_000 for run in bounded)


def test_small_files_are_found_by_their_index(shared_place: Place) -> None:
    book = shared_place.open()
    table = book.tables.create("t", "id BIGINT")
    enter_sizes(book, table, [(1000 + number, "[]") for number in range(500)])
    plans = {}
    with book._registry.read() as reader:
        if reader.kind == POSTGRESQL:
            reader._connection.execute("ANALYZE")
            reader._connection.execute("SET enable_seqscan = off")
        for name, statement, values in (
            ("RUNS", RUNS, (table.id, 1100, MUCH, MUCH, 5, 10)),
            ("SMALL_FILES", SMALL_FILES, (table.id, 1100, 5, -1, 0, 10)),
            ("DECLARED_WORK", DECLARED_WORK, (table.id, 0)),
        ):
            compiled = statement.on(reader.kind)
            explain = "EXPLAIN " if reader.kind == POSTGRESQL else "EXPLAIN QUERY PLAN "
            given_values = compiled.arrange(values) if compiled.arrange else values
            plans[name] = str(reader._connection.execute(explain + compiled.sql, given_values).fetchall())
        if reader.kind == POSTGRESQL:
            reader._connection.execute("RESET enable_seqscan")
    assert "idx_table_files_small" in plans["RUNS"]
    assert "idx_table_files_small" in plans["SMALL_FILES"]
    assert "idx_commits_open" in plans["DECLARED_WORK"]


def grouped(book: Book, files: dict[str, int], **properties: str) -> Table:
    """A table with so many small files in each of its partitions."""
    table = book.tables.create("t", "id BIGINT, g STRING", partition_by=["g"], properties=properties)
    number = 0
    for group, count in files.items():
        for _ in range(count):
            insert(table, {"id": number, "g": group}, {"id": number + 1, "g": group})
            number += 2
    return table


def test_partitions_with_enough_small_files_become_one_file_each(book: Book) -> None:
    table = grouped(book, {"a": 7, "b": 4, "c": 5})
    debt = debt_of(book.lake, table.record)
    assert (debt.files, debt.partitions) == (12, 2)
    assert debt.bytes == sum(file.file_size for file in table.plan("g = 'a' OR g = 'c'"))
    before = ids(table)
    report = by_arrow(book, table)
    assert report is not None
    assert (report.files_in, report.files_out, report.partitions) == (12, 2, 2)
    assert (report.rows_in, report.rows_out, report.deletes) == (24, 24, 0)
    assert report.versions == (table.version,)
    assert report.bytes_out < report.bytes_in == debt.bytes
    assert table.history().items[0].operation == "replace"
    assert ids(table) == ids(table, version=16) == before
    assert sorted(file.partition_path for file in table.plan()) == ["g=a", *["g=b"] * 4, "g=c"]
    assert not debt_of(book.lake, table.record)
    assert by_arrow(book, table) is None
    assert book.verify().findings == ()


def test_a_round_takes_the_partitions_with_the_most_files_that_its_budget_allows(book: Book) -> None:
    table = grouped(book, {"a": 5, "b": 9, "c": 6})
    sizes = {group: sum(file.file_size for file in table.plan(f"g = '{group}'")) for group in "abc"}
    chosen = []
    for budget in (sizes["b"], sizes["b"] + sizes["a"], sum(sizes.values())):
        choice = choice_of(book, table, budget)
        assert choice is not None
        chosen.append(sorted({file.partition_path for file in choice.files}))
        assert sum(file.file_size for file in choice.files) <= budget
    assert chosen == [["g=b"], ["g=a", "g=b"], ["g=a", "g=b", "g=c"]]
    # A partition that is larger than the budget is begun with its smallest files.
    choice = choice_of(book, table, sizes["b"] - 1)
    assert choice is not None
    assert {file.partition_path for file in choice.files} == {"g=b"}
    assert len(choice.files) == 8
    assert choice_of(book, table, 10) is None
    rounds = 0
    while by_arrow(book, table, sizes["b"]) is not None:
        rounds += 1
    assert rounds == 3
    assert len(table.plan().files) == 3


def test_rows_that_came_together_stay_together(book: Book) -> None:
    table = numbers(book, "t", *([number] for number in range(40)))
    size = max(file.file_size for file in table.plan())
    table.set_properties(**{"write.target-file-size-bytes": str(10 * size)})
    choice = choice_of(book, table)
    assert choice is not None
    assert [len(bundle) for _, bundle in choice.bundles] == [10, 10, 10, 10]
    for _, bundle in choice.bundles:
        found = [file.id for file in bundle]
        assert found == list(range(found[0], found[0] + 10))
    assert sorted(set(choice.tasks.values())) == [0, 1, 2, 3]
    assert set(choice.tasks) == {choice.plan.location_of(file) for file in table.plan()}


def test_properties_of_a_table_say_how_it_is_compacted(book: Book) -> None:
    table = grouped(book, {"a": 4})
    record = table.record
    assert (policy_of(book.lake, record).target, policy_of(book.lake, record).least) == (128 * KIB**2, 5)
    assert not debt_of(book.lake, record)
    table.set_properties(**{"lakebook.compaction.min-files": "4", "lakebook.compaction": "off"})
    assert debt_of(book.lake, record).files == 4
    assert not policy_of(book.lake, record).enabled
    smallest = min(file.file_size for file in table.plan())
    table.set_properties(**{"write.target-file-size-bytes": str(smallest), "lakebook.compaction": "on"})
    assert policy_of(book.lake, record).enabled
    assert not debt_of(book.lake, record)
    wrong = {
        "lakebook.compaction": ["yes", ""],
        "lakebook.compaction.min-files": ["1", "0", "-3", "many", "2.5"],
        "write.target-file-size-bytes": ["0", "128MB", "", "1e9"],
    }
    for key, values in wrong.items():
        for value in values:
            with pytest.raises(InvalidTable, match=key):
                table.set_properties(**{key: value})
            with pytest.raises(InvalidTable, match=key):
                book.tables.create("other", "id BIGINT", properties={key: value})


# --- deletes -------------------------------------------------------------------


def test_deletes_of_a_tenth_of_the_rows_are_applied_and_end(book: Book) -> None:
    table = numbers(book, "t", range(100), range(100, 200), range(200, 300))
    first, second, third = table.plan().files
    delete_positions(book, table, [(first, number) for number in range(10)], about=first)
    delete_positions(book, table, [(second, number) for number in range(9)], about=second)
    assert (debt_of(book.lake, table.record).files, debt_of(book.lake, table.record).partitions) == (1, 1)
    before = ids(table)
    report = by_arrow(book, table)
    assert report is not None
    assert (report.files_in, report.rows_in, report.rows_out, report.deletes) == (1, 100, 90, 1)
    assert ids(table) == before
    assert {file.id for file in (second, third)} < {file.id for file in table.plan()}
    assert table.record.deleted_rows == 9
    assert by_arrow(book, table) is None
    # One file of deletes more does not matter, but many are read by every reader of the file.
    for number in range(5):
        delete_positions(book, table, [(second, 50 + number)] if number else [(second, 0)], about=second)
    report = by_arrow(book, table)
    assert report is not None
    assert (report.files_in, report.rows_out, report.deletes) == (1, 87, 6)
    assert table.record.deleted_rows == 0
    assert table.count() == 277
    assert by_arrow(book, table) is None
    assert book.verify().findings == ()


def test_deletes_about_several_files_end_when_none_needs_them(book: Book) -> None:
    table = numbers(book, "t", range(10), range(10, 20), range(20, 30))
    first, second, third = table.plan().files
    delete_positions(book, table, [(first, 0), (first, 1), (second, 5), ("nowhere", 3)])
    delete_positions(book, table, [(third, 2)])
    before = ids(table)
    choice = choice_of(book, table)
    assert choice is not None
    # The third file has nothing to do with the first deletes, though they are of its partition.
    assert {file.id for file in choice.files} == {first.id, second.id, third.id}
    assert len(choice.ended) == 2
    assert len(choice_of(book, table, 10).ended) == 0  # type: ignore[union-attr]
    report = by_arrow(book, table)
    assert report is not None
    assert (report.deletes, report.rows_in, report.rows_out) == (2, 30, 26)
    assert ids(table) == before
    assert table.record.deleted_rows == 0
    assert by_arrow(book, table) is None
    assert book.verify().findings == ()


def test_deletes_that_another_file_needs_stay(book: Book) -> None:
    table = numbers(book, "t", range(10), range(10, 30))
    first, second = table.plan().files
    delete_positions(book, table, [(first, 0), (second, 5)])
    before = ids(table)
    report = by_arrow(book, table)
    assert report is not None
    assert (report.files_in, report.deletes) == (1, 0)
    assert ids(table) == before
    assert table.record.deleted_rows == 2
    # What was written does not seem to be among what they are about.
    (new,) = (file for file in table.plan() if file.id not in (first.id, second.id))
    assert table.plan().deletes_for(new) == ()
    assert by_arrow(book, table) is None


# --- what other engines see ----------------------------------------------------


def test_what_is_published_is_a_replacement_that_every_engine_reads_alike(shared_place: Place) -> None:
    book = shared_place.open()
    table = grouped(book, {"a": 6, "b": 5})
    table.publish()
    rows = of_pyiceberg(book, table)
    last = book.lake.publisher.pointer(table.record)
    assert by_arrow(book, table) is not None
    new = [row for row in files_of(book, table) if row["to_version"] is None]
    # As old as what they were made of: deletes that came since would be about them too.
    assert last is not None
    assert {row["sequence_number"] for row in new} == {last.last_sequence}
    insert(table, {"id": 1000, "g": "a"})
    table.publish()
    operations = [item.summary["operation"] for item in table.snapshots()]
    assert operations == ["append", "replace", "append"]
    assert (of_pyiceberg(book, table, table.snapshots()[1].snapshot_id)) == rows
    location = table.metadata_location
    assert location is not None
    assert of_pyiceberg(book, table) == of_duckdb(location)
    assert len(of_duckdb(location)) == 23
    assert book.verify().findings == ()


def test_what_was_made_of_files_that_are_not_published_gets_its_number_with_its_snapshot(shared_place: Place) -> None:
    book = shared_place.open()
    table = grouped(book, {"a": 3})
    table.publish()
    for number in range(3):
        insert(table, {"id": 100 + number, "g": "a"})
    assert by_arrow(book, table) is not None
    assert [row["sequence_number"] for row in files_of(book, table) if row["to_version"] is None] == [None]
    table.publish()
    assert [item.summary["operation"] for item in table.snapshots()] == ["append", "append", "replace"]
    location = table.metadata_location
    assert location is not None
    assert of_pyiceberg(book, table) == of_duckdb(location)
    assert book.verify().findings == ()


# --- everybody else has precedence ---------------------------------------------


def compacting_when(book: Book, table: Table, act: Callable[[], Any]) -> None:
    """Compact, and do something when the files are written and not yet committed."""
    waiting = [act]

    def once() -> None:
        if waiting:
            waiting.pop()()

    with failpoints.armed("compact.written", once):
        by_arrow(book, table)


def test_a_compaction_whose_files_were_ended_or_got_deletes_gives_way(book: Book) -> None:
    table = grouped(book, {"a": 6})
    first = table.plan().files[0]
    acts: list[Callable[[], Any]] = [
        lambda: table.delete("id <= 1"),
        lambda: delete_positions(book, table, [(table.plan().files[-1], 0)], about=table.plan().files[-1]),
        lambda: delete_positions(book, table, [("anywhere", 0)], like=first),
    ]
    for act in acts:
        insert(table, {"id": 500 + len(table.plan().files), "g": "a"})
        there = set(objects(book, "data"))
        with pytest.raises(FilesChanged):
            compacting_when(book, table, act)
        assert table.history().items[0].operation == "delete"
        # Only what the other has written is new.
        assert set(objects(book, "data")) - there == {
            row["file_path"] for row in files_of(book, table) if row["from_version"] == table.version
        }
    assert book.verify().findings == ()
    report = by_arrow(book, table)
    assert report is not None
    assert table.count() == report.rows_out


def test_rows_that_come_meanwhile_are_no_conflict(book: Book) -> None:
    table = grouped(book, {"a": 6})
    compacting_when(book, table, lambda: insert(table, {"id": 500, "g": "a"}))
    assert [item.operation for item in table.history().items[:2]] == ["replace", "append"]
    assert len(table.plan().files) == 2
    assert table.count() == 13


def test_of_two_compactions_the_second_one_does_not_begin(shared_place: Place) -> None:
    book, other = shared_place.open(), shared_place.open()
    table = grouped(book, {"a": 6})

    def compact_too() -> None:
        with pytest.raises(CompactionClaimed, match=f"{owner()} compacts it"):
            by_arrow(other, other.table("t"))
        assert [row["kind"] for row in records(book, schema.commits)].count("compaction") == 1

    compacting_when(book, table, compact_too)
    assert len(table.plan().files) == 1
    assert table.version == 7
    assert records(book, schema.compaction_claims) == []
    assert by_arrow(other, other.table("t")) is None
    assert book.verify().findings == ()


def end_files(book: Book, table: Table, meanwhile: Callable[[], Any] = lambda: None) -> int:
    """End the newest version's files as an overwrite does; the version it has read."""
    record = table.record
    with Attempt(book.lake, record, kind=REWRITE) as attempt, acquire(book.lake, record) as lease:
        meanwhile()
        files = [row["id"] for row in files_of(book, table) if row["from_version"] <= lease.version]
        live = [row["id"] for row in files_of(book, table) if row["to_version"] is None]
        ended = [ident for ident in files if ident in live]
        attempt.commit(TableChange("delete", (), ended, read_version=lease.version))
        return lease.version


def test_a_writer_who_declares_before_the_compaction_commits_wins(shared_place: Place) -> None:
    book, other = shared_place.open(), shared_place.open()
    table = grouped(book, {"a": 6})
    with claimed(book.lake, table.record) as claim, acquire(book.lake, table.record) as lease:
        choice = choose(book.lake, table.record, lease, MUCH)
        assert choice is not None
        with begin(book.lake, table.record, choice) as attempt:
            files = write(book, choice, attempt, lease)

            def try_to_commit() -> None:
                with pytest.raises(FilesChanged, match="a writer is about to"):
                    finish(book.lake, lease, attempt, choice, files, Steps(book.lake.clock), claim)

            assert end_files(other, other.table("t"), try_to_commit) == 6
        assert attempt.committed is None
    assert [item.operation for item in table.history().items[:2]] == ["delete", "append"]
    assert (table.count(), table.version) == (0, 7)
    states = {row["kind"]: row["state"] for row in records(book, schema.commits)}
    assert (states["compaction"], states["rewrite"]) == ("aborted", "committed")
    assert book.verify().findings == ()


def test_a_writer_who_declares_after_the_compaction_reads_what_it_has_made(shared_place: Place) -> None:
    book, other = shared_place.open(), shared_place.open()
    table = grouped(book, {"a": 6})
    compacting, goes_on, declared = threading.Event(), threading.Event(), threading.Event()
    read: list[int] = []

    def hold() -> None:
        # Inside of the transaction, under the table's lock.
        compacting.set()
        assert goes_on.wait(60)

    def overwrite() -> None:
        assert compacting.wait(60)
        read.append(end_files(other, other.table("t"), declared.set))

    writer = threading.Thread(target=overwrite)
    writer.start()
    with failpoints.armed("change.written", only_in(threading.current_thread(), hold)):
        compactor = threading.Thread(target=goes_on_when_waited_for, args=(compacting, goes_on, declared))
        compactor.start()
        report = by_arrow(book, table)
    writer.join(60)
    compactor.join(60)
    assert report is not None
    assert report.versions == (7,)
    assert read == [7]
    assert [item.operation for item in table.history().items[:2]] == ["delete", "replace"]
    assert table.count() == 0


def only_in(thread: threading.Thread, act: Callable[[], None]) -> Callable[[], None]:
    return lambda: act() if threading.current_thread() is thread else None


def goes_on_when_waited_for(compacting: threading.Event, goes_on: threading.Event, declared: threading.Event) -> None:
    """Let the compaction commit; whoever declares work meanwhile has to wait for it."""
    assert compacting.wait(60)
    assert not declared.is_set()
    goes_on.set()


def test_declared_work_counts_only_while_it_is_alive_and_open(shared_place: Place) -> None:
    clock = ManualClock()
    book, other = shared_place.open(clock=clock), shared_place.open(clock=clock)
    table = grouped(book, {"a": 6})
    with pytest.raises(FilesChanged), Attempt(other.lake, table.record, kind=REWRITE):
        by_arrow(book, table)
    # It has ended, and is no longer in the way. Nor are plain inserts, or work on other tables.
    numbers(book, "unrelated", [1])
    with (
        Attempt(other.lake, table.record),
        Attempt(other.lake, book.table("unrelated").record, kind=REWRITE),
        Attempt(other.lake, table.record, kind=REWRITE) as dead,
    ):
        clock.advance(book.settings.insert_alive + 1)
        report = by_arrow(book, table)
        assert report is not None
        # Whoever comes back from the dead can still commit, if nobody has taken the files away.
        assert dead.commit(TableChange("delete", (), [table.plan().files[0].id])).version == 8
    assert table.count() == 0


def test_a_writer_that_was_taken_for_dead_meets_a_conflict_and_loses_nothing(shared_place: Place) -> None:
    clock = ManualClock()
    book, other = shared_place.open(clock=clock), shared_place.open(clock=clock)
    table = grouped(book, {"a": 6})

    def meanwhile() -> None:
        clock.advance(book.settings.insert_alive + 1)
        assert by_arrow(book, table) is not None

    before, record = ids(table), table.record
    with Attempt(other.lake, record, kind=REWRITE) as attempt, acquire(other.lake, record) as lease:
        files = [file.id for file in table.plan()]
        meanwhile()
        with pytest.raises(FilesChanged):
            attempt.commit(TableChange("delete", (), files, read_version=lease.version))
    assert ids(table) == before
    assert end_files(other, other.table("t")) == 7
    assert table.count() == 0


def test_overwrites_and_deletes_declare_their_work_before_they_read(book: Book) -> None:
    table = grouped(book, {"a": 6, "b": 6})
    seen: list[str] = []

    def look() -> None:
        kinds = {row["id"]: row["kind"] for row in records(book, schema.commits) if row["state"] == "open"}
        seen.extend(kinds.values())

    with failpoints.armed("lease.taken", look):
        table.delete("g = 'b'")
    assert seen == ["rewrite"]
    assert table.count() == 12


def test_a_compaction_does_not_wait_for_an_outside_engine_but_gives_way(shared_place: Place) -> None:
    clock = ManualClock()
    book = shared_place.open(clock=clock, outside_hold=5.0)
    table = grouped(book, {"a": 6})
    assert book.lake.registry.write(lambda transaction: hold_back(transaction, table.record, 5.0))
    begun = clock.monotonic()
    with pytest.raises(FilesChanged, match="an outside engine"):
        by_arrow(book, table)
    assert clock.monotonic() == begun
    clock.advance(6)
    assert by_arrow(book, table) is not None
    # What it knows of the last hold stays: the next one is not given right after it.
    assert not book.lake.registry.write(lambda transaction: hold_back(transaction, table.record, 5.0))


def test_a_replacement_with_other_rows_is_refused(book: Book) -> None:
    table = grouped(book, {"a": 6})
    with claimed(book.lake, table.record) as claim, acquire(book.lake, table.record) as lease:
        choice = choose(book.lake, table.record, lease, MUCH)
        assert choice is not None
        with begin(book.lake, table.record, choice) as attempt:
            files = write(book, choice, attempt, lease)
            with pytest.raises(InvalidTable, match="12 rows and their replacement 24"):
                finish(book.lake, lease, attempt, choice, [*files, *files], Steps(book.lake.clock), claim)
    assert (table.version, len(table.plan().files)) == (6, 6)
