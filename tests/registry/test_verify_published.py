"""Every damage to what is published is found; what is pending, owed or at work is none."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from pyiceberg.table.metadata import TableMetadataV2
from pyiceberg.table.refs import SnapshotRef

from books import Place
from deletes import delete_positions
from lake import (
    files_of,
    ids,
    in_memory,
    insert,
    lay,
    numbers,
    objects,
    own_warehouse,  # noqa: F401
    records,
    registry_state,
    replace_bytes,
    run_sql,
    with_ids,
)
from lakebook import Book, failpoints
from lakebook.clock import ManualClock
from lakebook.iceberg.publishing import Work
from lakebook.lake.table import Table
from lakebook.registry import schema
from lakebook.registry.publishing import Pointer, SnapshotRecord

DAY = 86_400
OUTSIDE = 3 * DAY
NEVER = 2**60


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(time.time_ns() // 1_000_000)


def publish(book: Book, table: Table) -> Pointer:
    pointer = book.lake.publisher.publish(table.record)
    assert pointer is not None
    return pointer


def made(book: Book) -> Table:
    """A table with snapshots of rows and of deletes, some files ended, and a manifest for each snapshot."""
    table = numbers(book, "t", [0, 1, 2])
    publish(book, table)
    for number in (10, 20):
        insert(table, {"id": number})
        publish(book, table)
    (file,) = table.plan("id = 1").files
    delete_positions(book, table, [(file, 1)], about=file)
    publish(book, table)
    table.delete("id = 20")
    publish(book, table)
    assert ids(table) == [0, 2, 10]
    return table


@pytest.fixture
def good(place: Place, clock: ManualClock) -> Book:
    """A book with a published table, nothing of which is unfinished."""
    book = place.open(clock=clock, sweep_grace=0)
    made(book)
    publish(book, numbers(book, "other", [1]))
    publish(book, numbers(book, "empty"))
    numbers(book, "never", [1])
    for _ in range(2):
        book.cleaner.sweep()
        clock.advance(1)
    assert records(book, schema.inserts) == []
    found = book.verify()
    assert (found.findings, found.unfinished) == ((), ())
    assert found.checked["published_tables"] == 3
    assert found.checked["iceberg_files"] == len(objects(book, "iceberg"))
    assert found.checked["objects"] == len(objects(book))
    return book


# --- damage --------------------------------------------------------------------


class State:
    """What a damage is done to."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.table = book.table("t")
        pointer = book.lake.publisher.pointer(self.table.record)
        assert pointer is not None
        self.pointer = pointer
        self.snapshots: tuple[SnapshotRecord, ...] = tuple(self.table.snapshots())
        self.current = self.snapshots[-1]
        assert self.current.snapshot_id == pointer.snapshot_id

    def sql(self, text: str) -> None:
        run_sql(self.book, text)

    def manifests(self, snapshot: SnapshotRecord) -> list[str]:
        found = records(self.book, schema.snapshot_manifests, snapshot_id=snapshot.snapshot_id)
        return [row["file_path"] for row in found]

    @property
    def first(self) -> SnapshotRecord:
        """The oldest snapshot."""
        return self.snapshots[0]

    @property
    def only_old(self) -> str:
        """A manifest that the current snapshot does not list."""
        lists = [set(self.manifests(snapshot)) for snapshot in self.snapshots]
        return min(set().union(*lists) - lists[-1])

    def rewrite(self, change: Callable[[TableMetadataV2], dict[str, Any]]) -> None:
        """Replace the metadata file by one that says something else."""
        metadata = self.book.lake.publisher.load(self.pointer)
        changed = metadata.model_copy(update=change(metadata)).model_dump_json().encode()
        replace_bytes(self.book, self.pointer.metadata_location, lambda data: changed)
        self.sql(
            f"UPDATE iceberg_files SET file_size = {len(changed)} WHERE file_path = '{self.pointer.metadata_location}'"
        )

    def wait(self, path: str) -> None:
        self.sql(f"INSERT INTO temporary_files VALUES ('{path}', 1, 'waiting', 'x', 1, {NEVER})")

    def lose(self, path: str) -> None:
        self.book.lake.store.delete_one(path)

    def cut(self, path: str) -> None:
        replace_bytes(self.book, path, lambda data: data[:-10])

    def spoil(self, path: str) -> None:
        """Same size, other bytes."""
        replace_bytes(self.book, path, lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


Damage = Callable[[State], Any]


def set_pointer(what: str) -> Damage:
    return lambda state: state.sql(f"UPDATE iceberg_tables SET {what} WHERE table_id = {state.table.id}")


def expired_by_hand(state: State) -> None:
    set_pointer("version = 4")(state)
    state.sql(f"UPDATE table_horizons SET min_readable = 5 WHERE table_id = {state.table.id}")
    state.sql(f"DELETE FROM table_versions WHERE version < 5 AND table_id = {state.table.id}")


def an_unknown_snapshot(state: State) -> None:
    columns = [str(column.name) for column in schema.table_snapshots.columns]
    values = ["77" if name == "snapshot_id" else name for name in columns]
    state.sql(
        f"INSERT INTO table_snapshots ({', '.join(columns)}) SELECT {', '.join(values)} FROM table_snapshots"
        f" WHERE snapshot_id = {state.first.snapshot_id}"
    )


def a_log_that_is_cut(state: State) -> None:
    state.rewrite(lambda metadata: {"metadata_log": metadata.metadata_log[1:]})


def another_snapshot(state: State) -> None:
    first = state.first.snapshot_id
    ref = SnapshotRef.model_validate({"snapshot-id": first, "type": "branch"})
    state.rewrite(lambda metadata: {"current_snapshot_id": first, "refs": {"main": ref}})


def wait_for(path: Callable[[State], str]) -> Damage:
    return lambda state: state.wait(path(state))


def an_owed_footer(due: int) -> Damage:
    def damage(state: State) -> None:
        path = files_of(state.book, state.table)[0]["file_path"]
        state.sql(f"INSERT INTO footer_debts VALUES ('{path}', {state.table.id}, 1, {due}, NULL)")

    return damage


def retired(state: State) -> None:
    path = next(row["file_path"] for row in files_of(state.book, state.table) if row["to_version"] is not None)
    state.sql(f"UPDATE table_files SET retired_at = 1 WHERE file_path = '{path}'")
    state.wait(path)


def a_second_row(state: State) -> None:
    columns = [str(column.name) for column in schema.table_files.columns]
    values = [{"id": "5", "from_version": "4"}.get(name, name) for name in columns]
    path = next(row["file_path"] for row in files_of(state.book, state.table) if row["to_version"] is not None)
    state.sql(
        f"INSERT INTO table_files ({', '.join(columns)}) SELECT {', '.join(values)} FROM table_files"
        f" WHERE file_path = '{path}'"
    )


NEW = "INSERT INTO iceberg_files VALUES ('iceberg/{name}', {table}, '{kind}', 1, NULL, NULL, 1)"


def known(kind: str, table: str = "{table}") -> Damage:
    """A file of Iceberg's own that nothing needs."""

    def damage(state: State) -> None:
        state.sql(NEW.format(name="x", kind=kind, table=table.format(table=state.table.id)))
        lay(state.book, "iceberg/x", b"x")

    return damage


#: Damages that the registry alone can tell, and the checks that do.
OF_THE_REGISTRY: dict[str, tuple[Damage, str]] = {
    "a metadata file is not known": (
        lambda state: state.sql(f"DELETE FROM iceberg_files WHERE file_path = '{state.pointer.metadata_location}'"),
        "published",
    ),
    "the current snapshot has no row": (
        lambda state: state.sql(f"DELETE FROM table_snapshots WHERE snapshot_id = {state.current.snapshot_id}"),
        "published",
    ),
    "the current snapshot is another": (set_pointer("snapshot_id = 77"), "published"),
    "the last sequence number is too small": (set_pointer("last_sequence = 2"), "published"),
    "more is published than there is": (set_pointer("version = 99"), "published"),
    "less is published than a snapshot has": (set_pointer("version = 2"), "published"),
    "nothing is published but snapshots are": (
        lambda state: state.sql(f"DELETE FROM iceberg_tables WHERE table_id = {state.table.id}"),
        "published",
    ),
    "what is not published has expired": (expired_by_hand, "published"),
    "a manifest list is not known": (
        lambda state: state.sql(f"DELETE FROM iceberg_files WHERE file_path = '{state.first.manifest_list}'"),
        "published",
    ),
    "a manifest is not known": (
        lambda state: state.sql(f"DELETE FROM iceberg_files WHERE file_path = '{state.only_old}'"),
        "published",
    ),
    "manifests of a snapshot that is gone": (
        lambda state: state.sql(
            f"INSERT INTO snapshot_manifests SELECT table_id, 77, file_path FROM snapshot_manifests"
            f" WHERE snapshot_id = {state.first.snapshot_id}"
        ),
        "published",
    ),
    "a manifest is in no listing": (
        lambda state: state.sql(f"DELETE FROM snapshot_manifests WHERE file_path = '{state.only_old}'"),
        "published",
    ),
    "a manifest list of no snapshot": (known("manifest_list"), "published"),
    "a manifest of no snapshot": (known("manifest"), "published"),
    "metadata of no table": (known("metadata", "77"), "published"),
    "metadata waits": (wait_for(lambda state: state.pointer.metadata_location), "files"),
    "a manifest waits": (wait_for(lambda state: state.only_old), "files"),
    "a listed file is retired": (retired, "files"),
    "two rows of a file overlap": (a_second_row, "files"),
    "a footer is overdue": (an_owed_footer(1), "footers"),
    "a footer of nobody is owed": (
        lambda state: state.sql(f"INSERT INTO footer_debts VALUES ('gone', {state.table.id}, 1, {NEVER}, NULL)"),
        "footers",
    ),
}
#: Damages that show only when the files are read.
OF_THE_FILES: dict[str, Damage] = {
    "the metadata is gone": lambda state: state.lose(state.pointer.metadata_location),
    "the metadata is cut": lambda state: state.cut(state.pointer.metadata_location),
    "the metadata is another file": lambda state: state.spoil(state.pointer.metadata_location),
    "the uuid is another": lambda state: state.rewrite(lambda metadata: {"table_uuid": uuid.UUID(int=1)}),
    "the location is another": lambda state: state.rewrite(lambda metadata: {"location": f"{metadata.location}x"}),
    "the metadata has another sequence number": lambda state: state.rewrite(
        lambda metadata: {"last_sequence_number": 99}
    ),
    "the metadata has another current snapshot": another_snapshot,
    "the metadata lists less": lambda state: state.rewrite(lambda metadata: {"snapshots": metadata.snapshots[1:]}),
    "a snapshot is not in the metadata": an_unknown_snapshot,
    "a snapshot has no row": lambda state: state.sql(
        f"DELETE FROM table_snapshots WHERE snapshot_id = {state.first.snapshot_id}"
    ),
    "a snapshot has another list": lambda state: state.rewrite(
        lambda metadata: {
            "snapshots": [
                metadata.snapshots[0].model_copy(update={"manifest_list": metadata.snapshots[1].manifest_list}),
                *metadata.snapshots[1:],
            ]
        }
    ),
    "the log names less": a_log_that_is_cut,
    "the log names a file that is not known": lambda state: state.sql(
        f"DELETE FROM iceberg_files WHERE kind = 'metadata' AND file_path <> '{state.pointer.metadata_location}'"
        f" AND table_id = {state.table.id}"
    ),
    "a former metadata file is gone": lambda state: state.lose(
        next(
            row["file_path"]
            for row in records(state.book, schema.iceberg_files, kind="metadata", table_id=state.table.id)
            if row["file_path"] != state.pointer.metadata_location
        )
    ),
    "metadata that nothing names": known("metadata"),
    "statistics that nothing names": known("statistics"),
    "the current list is gone": lambda state: state.lose(state.current.manifest_list),
    "an old list is gone": lambda state: state.lose(state.first.manifest_list),
    "a list is spoiled": lambda state: state.spoil(state.first.manifest_list),
    "the current manifest is gone": lambda state: state.lose(state.manifests(state.current)[0]),
    "an old manifest is gone": lambda state: state.lose(state.only_old),
    "a manifest is cut": lambda state: state.cut(state.manifests(state.current)[0]),
    "an old manifest is spoiled": lambda state: state.spoil(state.only_old),
    "the current manifest is spoiled": lambda state: state.spoil(state.manifests(state.current)[0]),
    "the size of a manifest is wrong": lambda state: state.sql(
        f"UPDATE iceberg_files SET file_size = file_size + 1 WHERE file_path = '{state.only_old}'"
    ),
    "a listing is wrong": lambda state: state.sql(
        f"UPDATE snapshot_manifests SET snapshot_id = {state.first.snapshot_id}"
        f" WHERE snapshot_id = {state.snapshots[1].snapshot_id}"
        f" AND file_path <> '{state.manifests(state.first)[0]}'"
    ),
    "a branch's file is gone": lambda state: state.sql(
        f"INSERT INTO branch_files VALUES ('iceberg/gone.parquet', {state.table.id}, 1, 1)"
    ),
    "a visible file is not listed": lambda state: state.sql(
        f"UPDATE table_files SET to_version = NULL WHERE table_id = {state.table.id} AND to_version IS NOT NULL"
    ),
    "a listed file is not visible": lambda state: state.sql(
        f"UPDATE table_files SET to_version = 3 WHERE table_id = {state.table.id} AND id = 1"
    ),
    "a file of deletes is not visible": lambda state: state.sql(
        f"UPDATE table_files SET to_version = 5 WHERE table_id = {state.table.id} AND content = 1"
    ),
    "a listed file has other rows": lambda state: state.sql(
        f"UPDATE table_files SET row_count = row_count + 1 WHERE table_id = {state.table.id} AND id = 1"
    ),
    "a listed file has another size": lambda state: state.sql(
        f"UPDATE table_files SET file_size = file_size + 1 WHERE table_id = {state.table.id} AND id = 1"
    ),
    "a listed file lies elsewhere": lambda state: state.sql(
        f"UPDATE table_files SET location = 'file:///elsewhere' WHERE table_id = {state.table.id} AND id = 1"
    ),
    "a file of deletes is one of rows": lambda state: state.sql(
        f"UPDATE table_files SET content = 0 WHERE table_id = {state.table.id} AND content = 1"
    ),
}


@in_memory
@pytest.mark.parametrize("name", OF_THE_REGISTRY)
def test_damage_to_the_rows_is_found_without_reading_a_file(good: Book, name: str) -> None:
    damage, check = OF_THE_REGISTRY[name]
    damage(State(good))
    found = good.verify(files=False)
    assert check in {finding.check for finding in found.findings}
    assert all(finding.on and finding.what for finding in found.findings)
    assert check in {finding.check for finding in good.verify().findings}
    check_repair_leaves_it(good)


@in_memory
@pytest.mark.parametrize("name", OF_THE_FILES)
def test_damage_to_what_is_published_is_found(good: Book, name: str) -> None:
    OF_THE_FILES[name](State(good))
    found = good.verify()
    assert "published" in {finding.check for finding in found.findings}
    assert all(finding.on and finding.what for finding in found.findings)
    # Of the other tables nothing is said.
    assert not [finding for finding in found.findings if "other" in finding.on or "empty" in finding.on]
    check_repair_leaves_it(good)


def check_repair_leaves_it(book: Book) -> None:
    """Nothing that is published is mended by a guess: it is told, and left as it is."""
    there = objects(book)
    done = book.repair()
    checks = ("published", "footers", "files")
    found = {(item.check, item.on) for item in book.verify().findings if item.check in checks}
    assert found
    assert found <= {(item.check, item.on) for item in done.left}
    assert objects(book) == there


def test_damage_is_found_on_every_database(good: Book) -> None:
    state = State(good)
    state.sql(f"DELETE FROM iceberg_files WHERE file_path = '{state.only_old}'")
    state.spoil(state.current.manifest_list)
    known("manifest")(state)
    retired(state)
    an_owed_footer(1)(state)
    found = {(finding.check, finding.on) for finding in good.verify().findings}
    assert found >= {
        ("published", state.only_old),
        ("published", state.current.manifest_list),
        ("published", "iceberg/x"),
        ("footers", files_of(good, state.table)[0]["file_path"]),
    }
    assert "files" in {check for check, _ in found}


@in_memory
def test_many_wrong_files_are_told_of_in_a_few_words(place: Place) -> None:
    book = place.open()
    table = numbers(book, "t", *([number] for number in range(12)))
    publish(book, table)
    run_sql(book, f"UPDATE table_files SET row_count = 5 WHERE table_id = {table.id}")
    found = [finding.what for finding in book.verify().findings if finding.check == "published"]
    assert len(found) == 6
    assert found[-1] == "7 more files of its current snapshot are wrong"


# --- no damage -----------------------------------------------------------------


def test_versions_that_are_not_published_yet_are_unfinished_and_not_wrong(good: Book) -> None:
    table = good.table("t")
    insert(table, {"id": 30})
    table.delete("id = 10")
    for files in (True, False):
        found = good.verify(files=files)
        assert found.ok, found.findings
        assert "table default.t: versions 6 to 7 are not published yet" in found.unfinished
    publish(good, table)
    assert not [text for text in good.verify().unfinished if "not published" in text]


def test_a_table_whose_files_others_may_delete_is_noted(good: Book) -> None:
    note = "table default.t has gc.enabled=true: other engines may delete its files, and leases do not protect them"
    assert good.verify().unfinished == ()
    good.table("t").set_properties(**{"gc.enabled": "true"})
    publish(good, good.table("t"))
    for files in (True, False):
        found = good.verify(files=files)
        assert found.ok
        assert note in found.unfinished
    good.table("t").set_properties(**{"gc.enabled": "false"})
    assert note not in good.verify().unfinished


def owe(book: Book, table: Table, clock: ManualClock) -> str:
    """A file of an outside engine, of which nobody has taken the checksum and the footer yet."""
    path: str = files_of(book, table)[0]["file_path"]
    run_sql(book, f"INSERT INTO footer_debts VALUES ('{path}', {table.id}, 1, {clock.now_ms() + DAY * 1000}, 'slow')")
    run_sql(book, f"UPDATE table_files SET checksum = '' WHERE file_path = '{path}'")
    run_sql(book, f"DELETE FROM partition_metadata WHERE file_path = '{path}'")
    return path


def test_an_owed_footer_is_none_until_its_deadline(good: Book, clock: ManualClock) -> None:
    path = owe(good, good.table("other"), clock)

    def found() -> list[tuple[str, str]]:
        # The events were not told of what was done by hand.
        return [(item.check, item.on) for item in good.verify().findings if item.check != "events"]

    assert found() == []
    clock.advance(DAY + 1)
    assert found() == [("footers", path)]
    (finding,) = [item for item in good.verify(files=False).findings if item.check == "footers"]
    assert finding.what.endswith("(slow)")
    # It is not for repair to pay.
    assert ("footers", path) in [(item.check, item.on) for item in good.repair().left]
    assert records(good, schema.partition_metadata, file_path=path) == []


@in_memory
def test_of_a_file_with_an_owed_footer_the_size_is_checked_all_the_same(good: Book, clock: ManualClock) -> None:
    path = owe(good, good.table("other"), clock)
    replace_bytes(good, path, lambda data: data + b"x")
    assert [item.on for item in good.verify().findings if item.check == "files"] == [path]
    good.lake.store.delete_one(path)
    (finding,) = [item for item in good.verify().findings if item.check == "files"]
    assert (finding.on, finding.what) == (path, "it does not exist")


def test_what_outside_engines_have_just_written_is_no_orphan(good: Book, clock: ManualClock) -> None:
    location = State(good).pointer.location
    young = lay(good, f"{location}/data/young.parquet", b"at work")
    stray = lay(good, "data/stray.parquet", b"stray")

    def orphans() -> set[str]:
        return {item.on for item in good.verify().findings if item.check == "orphans"}

    assert orphans() == {stray}
    clock.advance(OUTSIDE - 60)
    assert orphans() == {stray}
    clock.advance(120)
    assert orphans() == {stray, young}
    before, there = registry_state(good), objects(good)
    foreseen = good.repair(dry_run=True)
    assert (registry_state(good), objects(good)) == (before, there)
    done = good.repair()
    assert foreseen.mended == done.mended == ["0 dead inserts fenced, 1 leftover objects removed"]
    assert {item.on for item in done.left} == {item.on for item in foreseen.left} == {stray}
    assert young not in objects(good)
    assert orphans() == {stray}


def test_what_a_publisher_at_work_has_written_is_unfinished(good: Book, clock: ManualClock) -> None:
    state = State(good)
    work = Work(good.lake.publisher, state.table.id, state.pointer.location).__enter__()
    lay(good, f"{work.folder}/x-m0.avro", b"manifest")
    for _ in range(2):
        found = good.verify()
        assert found.ok
        assert found.unfinished == (f"insert {work.commit_id} (open): 1 objects are not swept yet",)
        clock.advance(2 * OUTSIDE)


def test_tags_branches_deletes_and_rollbacks_of_other_engines_are_fine(shared_place: Place) -> None:
    book = shared_place.open()
    table = made(book)
    catalog = book.catalog()
    first = table.snapshots()[1].snapshot_id

    def engine() -> Any:
        return catalog.load_table("default.t")

    engine().manage_snapshots().create_tag(first, "old").create_branch(first, "audit").commit()
    assert book.verify().ok
    engine().append(with_ids(table, [{"id": 50}]), branch="audit")
    assert book.verify().ok
    engine().append(with_ids(table, [{"id": 60}]))
    engine().delete("id = 10")
    assert book.verify().ok
    engine().manage_snapshots().set_current_snapshot(snapshot_id=first).commit()
    assert ids(table) == [0, 1, 2, 10]
    assert book.verify().ok
    insert(table, {"id": 70})
    publish(book, table)
    found = book.verify()
    assert found.ok, found.findings
    with engine().update_schema() as update:
        update.rename_column("id", "number")
    engine().manage_snapshots().remove_tag("old").remove_branch("audit").commit()
    found = book.verify()
    assert found.ok, found.findings


POINTS = (
    "publish.reserved",
    "publish.manifests_written",
    "publish.list_written",
    "publish.metadata_written",
    "publish.committed",
    "publish.discarded",
    "expire.retired",
    "clean.marked",
    "clean.object_deleted",
    "clean.forgotten",
)


def test_no_point_at_which_a_publisher_or_cleaner_is_looks_like_damage(shared_place: Place, clock: ManualClock) -> None:
    book = shared_place.open(clock=clock, temporary_file_grace=0, published_grace=60, sweep_grace=0)
    observer = shared_place.open(clock=clock)
    table = made(book)
    seen: dict[str, int] = {}
    count = itertools.count()

    def work() -> None:
        insert(table, {"id": 30})
        table.delete("id = 30")
        publish(book, table)
        other = numbers(book, f"other{next(count)}", [1])
        publish(book, other)
        insert(other, {"id": 2})
        # Somebody else is faster.
        with failpoints.armed("publish.metadata_written", lambda: faster(other)):
            publish(book, other)
        book.tables.drop(other.name)
        clock.advance(61)
        book.cleaner.expire(seconds=0, versions=1)
        clock.advance(61)
        book.cleaner.delete_expired_temporary_files()
        book.cleaner.sweep()

    def faster(other: Table) -> None:
        if not seen.get(other.name):
            seen[other.name] = 1
            publish(observer, other)

    for point in POINTS:

        def look(point: str = point) -> None:
            seen[point] = seen.get(point, 0) + 1
            if seen[point] <= 2:
                found = observer.verify()
                assert found.ok, (point, found.findings)

        with failpoints.armed(point, look):
            work()
    assert set(POINTS) <= set(seen)
    assert book.verify().ok
