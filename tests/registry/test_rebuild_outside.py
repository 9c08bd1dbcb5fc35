"""What outside engines have committed comes back after a loss: rows, deletes, branches, tags and staged snapshots."""

from __future__ import annotations

from typing import Any

import orjson
import pyarrow as pa
import pytest
from pyiceberg.table.update import AddSnapshotUpdate, RemoveSnapshotRefUpdate

from by_hand import (
    Hand,
    check,
    check_versions,
    made,
    new_snapshot_id,
    of_duckdb,
    of_pyiceberg,
    present_clock,
    settle,
    to_ref,
)
from compacting import by_arrow
from deletes import delete_positions
from lake import insert, numbers, records, run_sql
from lakebook import Book
from lakebook.errors import InvalidTable
from lakebook.lake.table import Table
from lakebook.registry import schema
from rebuilding import Loss, checkpoint, rows_of_version, table_answers


@pytest.fixture
def book(loss: Loss) -> Book:
    return loss.open()


def iceberg(book: Book, table: Table) -> Any:
    return book.catalog().load_table((table.namespace, table.name))


def rows(*values: int) -> pa.Table:
    return pa.table({"id": pa.array(values, pa.int64())})


def commit_some(book: Book, table: Table, start: int) -> None:
    """Commits of every kind that an outside engine makes, among some of the book's own."""
    iceberg(book, table).append(rows(*range(start, start + 5)))
    insert(table, {"id": start + 5})
    table.publish()
    theirs = iceberg(book, table)
    theirs.append(rows(start + 6, start + 7))
    # The file of three rows that stay is written anew.
    theirs.delete(f"id = {start + 1}")
    theirs.overwrite(rows(start + 8), overwrite_filter=f"id = {start + 2}")


def found_again(book: Book, table: Table) -> Table:
    """The table after the loss: by its name, or by the one it was given if that is not known."""
    names = {(item.namespace, item.name) for item in book.tables.list().items}
    if (table.namespace, table.name) in names:
        return book.table(table.name)
    return book.table(f"recovered_{table.id}", namespace="recovered")


def engines(book: Book, table: Table) -> dict[str, Any]:
    """What every engine answers."""
    loaded = iceberg(book, table)
    snapshots = [item.snapshot_id for item in loaded.metadata.snapshots]
    return {
        "rows": rows_of_version(table),
        "some": rows_of_version(table, None, "id < 4"),
        "count": table.count(),
        "totals": (table.record.row_count, table.record.file_count, table.record.total_size, table.record.deleted_rows),
        "pyiceberg": {ident: of_pyiceberg(book, table, ident) for ident in snapshots},
        "duckdb": {ident: of_duckdb(loaded.metadata_location, ident) for ident in snapshots},
        "refs": {name: ref.model_dump() for name, ref in loaded.metadata.refs.items()},
    }


def rows_of_ref(loaded: Any, ref: str) -> list[int]:
    """The rows that a tag or a branch names."""
    return sorted(loaded.scan().use_ref(ref).to_arrow()["id"].to_pylist())


@pytest.mark.parametrize("where", ["before", "after", "around", "none"])
def test_commits_of_outside_engines_answer_the_same_in_every_engine(loss: Loss, book: Book, where: str) -> None:
    table = numbers(book, "t", [1, 2], [3])
    table.publish()
    if where in ("before", "around"):
        commit_some(book, table, 100)
    if where != "none":
        checkpoint(book)
    if where != "before":
        commit_some(book, table, 200)
    settle(book)
    before, versions = engines(book, table), {item.version for item in table.history().items}
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    found = found_again(again, table)
    assert engines(again, found) == before
    check(again, found)
    check_versions(again, found, with_duckdb=True)
    # They were looked at: nothing is owed.
    assert records(again, schema.footer_debts) == []
    assert not [left for left in report.left if left.path.startswith("iceberg/")], report.left
    if where == "before":
        assert report.is_complete, report.unknown
        assert {item.version for item in found.history().items} == versions
    commit_some(again, found, 300)
    check(again, found)


def claim_to_show(table: Any, *values: int, snapshot_id: int) -> None:
    """Append rows as an engine that carries a summary's entries on, or that means no good."""
    table.append(rows(*values), snapshot_properties={"lakebook.snapshot": str(snapshot_id)})


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("where", ["before", "after", "none"])
def test_no_summary_of_an_outside_engine_says_which_snapshot_a_version_shows(
    loss: Loss, book: Book, where: str, is_older: bool
) -> None:
    table = numbers(book, "t", [1, 2])
    table.publish()
    first = iceberg(book, table).current_snapshot().snapshot_id
    if where == "after":
        checkpoint(book)
    claim_to_show(iceberg(book, table), 3, 4, snapshot_id=first)
    claim_to_show(iceberg(book, table), 5, snapshot_id=first)
    version = table.record.version
    assert all("lakebook.snapshot" not in item.summary for item in table.history().items)
    # What an engine has written stays as it wrote it.
    assert iceberg(book, table).current_snapshot().summary["lakebook.snapshot"] == str(first)
    if is_older:
        # Older releases took what it says for what they say themselves.
        said = orjson.dumps({"lakebook.snapshot": str(first)}).decode()
        run_sql(book, f"UPDATE table_versions SET summary = '{said}' WHERE version = {version}")
    if where == "before":
        checkpoint(book)
    settle(book)
    before = engines(book, table)
    loss.lose()
    loss.rebuild()
    again = loss.open()
    found = found_again(again, table)
    assert engines(again, found) == before
    assert rows_of_version(found) == [f"{{'id': {number}}}" for number in range(1, 6)]
    check(again, found)
    check_versions(again, found, with_duckdb=True)


def test_whoever_inserts_cannot_say_which_snapshot_a_version_shows(book: Book) -> None:
    table = numbers(book, "t", [1])
    with pytest.raises(InvalidTable, match="Lakebook's own"):
        table.insert_arrow(rows(2), properties={"lakebook.snapshot": "1"})
    assert table.count() == 1


# --- position deletes --------------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "after", "none"])
def test_deleted_rows_stay_deleted_and_compaction_leaves_them_out(loss: Loss, book: Book, where: str) -> None:
    table = numbers(book, "t", range(10), range(10, 20))
    table.publish()
    hand = Hand(book, table)
    hand.append(hand.data_file(*range(30, 40)))
    files = sorted(hand.live())

    def delete() -> None:
        for number, file in enumerate(files):
            hand.delete_positions((file, number), (file, 5), about=file)
        hand.delete_positions(*((file, 9) for file in files))

    if where == "before":
        delete()
    if where != "none":
        checkpoint(book)
    if where != "before":
        delete()
    settle(book)
    before = engines(book, table)
    assert before["totals"][3] == 9
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    found = found_again(again, table)
    assert engines(again, found) == before
    assert found.count() == 30 - 9 == len(before["rows"])
    check(again, found)
    check_versions(again, found, with_duckdb=True)
    assert report.is_complete is (where != "none"), report.unknown
    # Compacting and inserting go on from the sequence numbers that the deletes have.
    insert(found, {"id": 100})
    by_arrow(again, found)
    assert found.record.deleted_rows == 0
    check(again, found)
    assert rows_of_version(found) == sorted([*before["rows"], str({"id": 100})])


def test_deletes_of_a_version_that_was_not_published_come_back(loss: Loss, book: Book) -> None:
    table = numbers(book, "t", range(5), range(5, 10))
    table.publish()
    first, second = table.plan().files
    delete_positions(book, table, [(first, 0), (second, 1)])
    delete_positions(book, table, [(second, 4)], about=second)
    checkpoint(book)
    before = table_answers(book, "t")
    again = loss.after()
    assert table_answers(again, "t") == before
    found = again.table("t")
    assert found.count() == 7
    check(again, found)
    by_arrow(again, found)
    assert (found.count(), found.record.deleted_rows) == (7, 0)
    check(again, found)


# --- tags, branches and staged snapshots -------------------------------------------


@pytest.mark.parametrize("where", ["before", "after", "none"])
def test_tags_branches_and_staged_snapshots_come_back_with_their_files(loss: Loss, where: str) -> None:
    clock = present_clock()
    settings = {"clock": clock, "temporary_file_grace": 60.0, "published_grace": 3600.0, "catalog_lease": 60.0}
    book = loss.open(**settings)
    table = numbers(book, "t", [1], [2])
    table.publish()

    def refer() -> int:
        theirs = iceberg(book, table)
        head = theirs.current_snapshot().snapshot_id
        theirs.manage_snapshots().create_tag(head, "theirs").create_branch(head, "work").commit()
        table.tag("ours")
        for number in (10, 11):
            iceberg(book, table).append(rows(number), branch="work")
        iceberg(book, table).delete("id = 1", branch="work")
        hand = Hand(book, table)
        ident = new_snapshot_id()
        staged = hand.snapshot(ident, [*hand.kept(), hand.added(ident, hand.data_file(20))])
        hand.commit(made(AddSnapshotUpdate, snapshot=staged), requirements=())
        table.delete("id = 2")
        insert(table, {"id": 3})
        table.publish()
        return ident

    if where == "before":
        staged = refer()
    if where != "none":
        checkpoint(book)
    if where != "before":
        staged = refer()
    settle(book)
    before, tags = engines(book, table), [(tag.name, tag.version) for tag in table.tags()]
    pinned = sorted(row["file_path"] for row in records(book, schema.branch_files))
    loss.lose()
    report = loss.rebuild()
    again = loss.open(**settings)
    found = found_again(again, table)
    assert engines(again, found) == before
    assert sorted(row["file_path"] for row in records(again, schema.branch_files)) == pinned
    assert [(tag.name, tag.version) for tag in found.tags()] == tags
    assert rows_of_version(found, dict(tags)["ours"]) == ["{'id': 1}", "{'id': 2}"]
    assert not [left for left in report.left if left.path.startswith("iceberg/")], report.left
    check(again, found)
    # Long after, when the book is let go on: what a tag or a branch names is there, and nothing else was taken away.
    again.resume_after_restore()
    for _ in range(2):
        clock.advance(10 * 86_400)
        again.cleaner.expire(seconds=0, versions=1, wait=True)
        clock.advance(10 * 86_400)
        again.cleaner.delete_expired_temporary_files()
        again.cleaner.sweep()
    check(again, found)
    theirs = iceberg(again, found)
    assert rows_of_ref(theirs, "theirs") == rows_of_ref(theirs, "ours") == [1, 2]
    assert rows_of_ref(theirs, "work") == [2, 10, 11]
    # The branch goes on, and becomes the table; the staged snapshot had its time.
    theirs.append(rows(12), branch="work")
    hand = Hand(again, found)
    hand.commit(to_ref(hand.metadata.refs["work"].snapshot_id))
    check(again, found)
    assert sorted(row["id"] for row in found.to_arrow().to_pylist()) == [2, 10, 11, 12]
    assert staged


@pytest.mark.parametrize("where", ["before", "after", "none"])
def test_a_table_that_was_replaced_by_an_empty_one_is_empty_again(loss: Loss, book: Book, where: str) -> None:
    table = numbers(book, "t", [1, 2], [3])
    table.publish()
    if where == "after":
        checkpoint(book)
    Hand(book, table).commit(made(RemoveSnapshotRefUpdate, ref_name="main"))
    settle(book)
    if where == "before":
        checkpoint(book)
    before = (table.record.version, table.count(), rows_of_version(table))
    assert before[1:] == (0, [])
    loss.lose()
    loss.rebuild()
    again = loss.open()
    found = found_again(again, table)
    assert (found.record.version, found.count(), rows_of_version(found)) == before
    check(again, found)
    insert(found, {"id": 4})
    assert engines(again, found)["rows"] == ["{'id': 4}"]
    check(again, found)
