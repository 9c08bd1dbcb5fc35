"""Whatever the history of a book was: what was published or in the checkpoint answers as before the loss."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyiceberg.table import StaticTable
from pyiceberg.table.update import AddSnapshotUpdate, RemoveSnapshotRefUpdate
from pyiceberg.types import IntegerType

from books import SQLITE
from by_hand import Hand, in_order, made, new_snapshot_id, of_duckdb, settle, to_ref
from compacting import by_arrow
from deletes import delete_positions
from lake import insert, with_ids
from lakebook import Book
from lakebook.errors import SnapshotNotFound, SparkUnsuitable
from lakebook.lake.table import Table
from lakebook.streams.mirroring import bring_up_to_date
from rebuilding import Loss, answers, checkpoint, group_answers, records_of, rows_of_version
from streaming import produce

EXAMPLES = int(os.environ.get("LAKEBOOK_TEST_REBUILD_EXAMPLES", "6"))
STEPS = ("append", "insert", "delete", "compact", "publish", "tag", "column", "commit", "retain", "mirror", "drop")
#: What outside engines do, and what only they have brought.
THEIRS = (
    *("their append", "their delete", "their column", "no column", "positions", "back", "branch", "forward", "stage"),
    *("keep", "nothing", "back and on", "claim", "two columns"),
)


def begin(book: Book) -> None:
    book.metadata.create_topic("orders", 2, config={"iceberg": "true"})
    book.metadata.ensure_consumer_group("readers")
    words = book.tables.create("words", "id BIGINT, word STRING, part BIGINT", partition_by=["part"])
    insert(words, {"id": 1, "word": "first", "part": 2})
    book.tables.create("passing", "id BIGINT")


def act(book: Book, step: str, number: int) -> None:
    words = book.table("words")
    match step:
        case "append":
            produce(book, "orders", number % 2, f"{number}.0", f"{number}.1")
        case "insert":
            insert(words, *({"id": 10 * number + n, "word": f"w{n}", "part": n % 2} for n in range(3)))
        case "delete":
            # Files of others have no statistics yet: what is in them, only Spark could tell.
            with suppress(SparkUnsuitable):
                words.delete(f"part = {number % 2}")
        case "compact":
            by_arrow(book, words)
        case "publish":
            words.publish()
        case "tag":
            words.publish()
            # An empty table may have no snapshot.
            with suppress(SnapshotNotFound):
                words.tag(f"at-{number}")
        case "column":
            with words.update_schema() as change:
                change.add_column(f"extra_{number}", "DOUBLE")
        case "commit":
            partition = book.metadata.get_partition("orders", 0)
            assert partition is not None
            book.metadata.commit_offset("readers", "orders", 0, partition.high_watermark)
        case "retain":
            partition = book.metadata.get_partition("orders", 1)
            assert partition is not None
            book.metadata.delete_segments_before("orders", 1, partition.high_watermark // 2)
        case "mirror":
            bring_up_to_date(book.lake, "topics", "orders")
        case "drop":
            if any(item.name == "passing" for item in book.tables.list().items):
                insert(book.table("passing"), {"id": number})
                book.tables.drop("passing")
        case _:
            act_outside(book, step, number)


def act_outside(book: Book, step: str, number: int) -> None:
    words = book.table("words")
    theirs = book.catalog().load_table("default.words")
    head = theirs.current_snapshot()
    rows = with_ids(words, [{"id": 10 * number + n, "word": f"t{n}", "part": n % 2} for n in range(3, 6)])
    match step:
        case "their append":
            theirs.append(rows)
        case "their delete":
            gone = f"id < {10 * number - 6}" if number % 2 else f"part = {number % 3}"
            if theirs.scan(row_filter=gone).to_arrow().num_rows:
                theirs.delete(gone)
        case "their column":
            with theirs.update_schema() as change:
                change.add_column(f"theirs_{number}", IntegerType())
        case "positions":
            for file in words.plan().files[:2]:
                delete_positions(book, words, [(file, 0)], about=file)
        case "back" if head is not None and len(theirs.history()) > 1:
            theirs.manage_snapshots().set_current_snapshot(snapshot_id=theirs.history()[-2].snapshot_id).commit()
        case "branch" if head is not None and "work" not in theirs.refs():
            theirs.manage_snapshots().create_branch(head.snapshot_id, "work").commit()
            book.catalog().load_table("default.words").append(rows, branch="work")
        case "forward" if "work" in theirs.refs():
            hand = Hand(book, words)
            hand.commit(to_ref(hand.metadata.refs["work"].snapshot_id))
        case "no column":
            # The schema is the one that was there before, under its old id.
            with theirs.update_schema() as change:
                change.add_column("passing", IntegerType())
            with theirs.update_schema() as change:
                change.delete_column("passing")
        case "two columns":
            with theirs.transaction() as transaction:
                for name in ("one", "two"):
                    with transaction.update_schema() as change:
                        change.add_column(f"{name}_{number}", IntegerType())
        case "keep" if head is not None:
            # How long snapshots of `main` are to be kept: an entry of its log, and no version.
            hand = Hand(book, words)
            hand.commit(to_ref(head.snapshot_id, max_snapshot_age_ms=10**9 + number))
        case "nothing" if head is not None:
            Hand(book, words).commit(made(RemoveSnapshotRefUpdate, ref_name="main"))
        case "back and on" if head is not None and len(theirs.history()) > 1:
            hand, ident = Hand(book, words), new_snapshot_id()
            former = theirs.history()[-2].snapshot_id
            on = hand.snapshot(ident, hand.kept(), parent_snapshot_id=former)
            hand.commit(to_ref(former), made(AddSnapshotUpdate, snapshot=on), to_ref(ident), requirements=())
        case "claim":
            theirs.append(rows, snapshot_properties={"lakebook.versions": "1-99999999999"})
        case "stage" if head is not None:
            hand, ident = Hand(book, words), new_snapshot_id()
            staged = hand.snapshot(ident, hand.kept())
            hand.commit(made(AddSnapshotUpdate, snapshot=staged), requirements=())


def newest(book: Book) -> dict[str, Any]:
    """What is known of a book whose every version is published, whenever its checkpoint was taken."""
    words = book.table("words")
    return {
        "words": rows_of_version(words),
        "some": rows_of_version(words, None, "id < 25"),
        "version": words.record.version,
        "tags": sorted((tag.name, tag.version) for tag in words.tags()),
        "records": records_of(book, "orders"),
        "count": words.count(),
        **published(book),
    }


def versions(book: Book) -> dict[int, list[str]]:
    """The rows of every version that can be read."""
    words = book.table("words")
    return {item.version: rows_of_version(words, item.version) for item in words.history().items}


def check_times(table: Table) -> None:
    times = [item.committed_at for item in sorted(table.history().items, key=lambda item: item.version)]
    assert times == sorted(set(times))
    assert rows_of_version(table, None) == sorted(map(str, table.to_arrow(as_of=times[-1]).to_pylist()))


def published(book: Book) -> dict[str, Any]:
    """What other engines see of it, in every snapshot."""
    location = book.table("words").metadata_location
    if location is None:
        return {}
    # Without the catalog, which would publish first what is pending.
    loaded = StaticTable.from_metadata(location)
    return {
        "snapshots": {
            item.snapshot_id: in_order(loaded.scan(snapshot_id=item.snapshot_id).to_arrow().to_pylist())
            for item in loaded.metadata.snapshots
        },
        "duckdb": of_duckdb(location) if loaded.metadata.current_snapshot_id is not None else [],
        "refs": {name: ref.model_dump() for name, ref in loaded.metadata.refs.items()},
    }


# A book is made, lost and rebuilt for each of them: few, and others with every run.
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@example(steps=["append", "append", "column", "their append"], place=0)
@example(steps=["their append", "column", "back", "column", "insert"], place=1)
@example(steps=["insert", "publish", "keep", "insert"], place=4)
@example(steps=["insert", "no column", "insert", "two columns", "claim", "insert"], place=1)
@example(steps=["publish", "insert", "nothing", "column", "insert", "back", "column"], place=1)
@example(steps=["insert", "publish", "insert", "publish", "back and on", "keep", "column", "their append"], place=3)
@example(steps=["insert", "their append", "column", "column", "back", "their column", "their append"], place=6)
@given(
    steps=st.lists(st.sampled_from(STEPS + THEIRS), min_size=4, max_size=10),
    place=st.integers(min_value=0, max_value=10),
)
def test_a_rebuilt_book_answers_as_before(steps: list[str], place: int) -> None:
    with tempfile.TemporaryDirectory(prefix="lb-") as folder:
        loss = Loss(SQLITE, Path(folder), lambda: "")
        try:
            check_history(loss, steps, min(place, len(steps)))
        finally:
            loss.close()


def check_history(loss: Loss, steps: list[str], place: int) -> None:
    book = loss.open()
    begin(book)
    for number, step in enumerate(steps[:place]):
        act(book, step, number)
    checkpoint(book)
    known = group_answers(book)
    is_last = place == len(steps)
    settle(book)
    before = answers(book) if is_last else {}
    for number, step in enumerate(steps[place:], place):
        act(book, step, number)
    if not is_last:
        book.table("words").publish()
    expected, states = newest(book), versions(book)
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    assert not report.contested
    assert newest(again) == expected
    found_states = versions(again)
    # What is not known is not told. What is told is what was.
    assert found_states == {version: states[version] for version in found_states}
    check_times(again.table("words"))
    assert group_answers(again) == known
    if is_last:
        assert answers(again) == before
        assert report.is_complete, report.unknown
    found = again.verify()
    assert found.ok, found.findings
    insert(again.table("words"), {"id": 1, "word": "new", "part": 0})
    again.publish_pending()
    found = again.verify()
    assert found.ok, found.findings
