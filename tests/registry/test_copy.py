"""A copy of a book answers the same at any other place, and the source is as it was."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyiceberg.table import StaticTable

import lakebook
from answers import answers, make_history, objects_below, published
from books import POSTGRESQL, SQLITE, Postgres
from buckets import Buckets
from deletes import columns, delete_positions, enter_rows
from lake import insert, numbers, objects, records, replace_bytes, run_sql, with_ids
from lakebook import Book, failpoints
from lakebook.components.janitor import Janitor
from lakebook.errors import BookExists, CopyFailed, EpochChanged, InvalidSetting
from lakebook.registry import schema
from mirrored import append, send

_numbers = itertools.count()
KINDS = [SQLITE, POSTGRESQL]


@pytest.fixture
def place(postgres: Postgres, tmp_path: Path) -> Callable[[str], tuple[str, Path]]:
    """Somewhere for a book, of a kind, where there is none; and for its bytes."""

    def make(kind: str) -> tuple[str, Path]:
        folder = tmp_path / f"place-{next(_numbers)}"
        if kind == SQLITE:
            return str(folder), folder / "warehouse"
        return postgres.new_database(with_book=False), folder

    return make


def opened(target: str, warehouse: Path, **more: Any) -> Book:
    return lakebook.open(target, warehouse=warehouse, publish="off", **more)


@pytest.mark.parametrize(
    ("kind", "into"), [(SQLITE, SQLITE), (SQLITE, POSTGRESQL), (POSTGRESQL, SQLITE), (POSTGRESQL, POSTGRESQL)]
)
def test_a_copy_answers_the_same_without_its_source(
    kind: str, into: str, place: Callable[[str], tuple[str, Path]]
) -> None:
    @settings(
        max_examples=2,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        (source, bytes_of), (target, to) = place(kind), place(into)
        with opened(source, bytes_of) as book:
            make_history(book, seed)
            before, seen = answers(book), published(book)
            there = objects_below(bytes_of)
            epoch = book.identity.epoch
        report = lakebook.copy_book(source, target, warehouse=to)
        with opened(source, bytes_of) as book:
            assert (answers(book), book.identity.epoch, objects_below(bytes_of)) == (before, epoch, there)
            assert book.verify().ok
        bytes_of.rename(gone := bytes_of.with_name("moved-away"))
        with opened(target, to, create=False) as copy:
            assert answers(copy) == before
            assert published(copy) == seen
            assert copy.identity.epoch != epoch
            assert copy.identity.book_id == report.book_id
            assert copy.restored is None
            assert copy.verify().findings == ()
            assert "lakebook-copy.json" not in objects(copy)
            _goes_on(copy)
        gone.rename(bytes_of)

    check()


def _goes_on(book: Book) -> None:
    """It is a book like any other: it takes rows and records, publishes and removes."""
    append(book, "after the move")
    insert(book.table("numbers"), {"id": 999})
    book.table("numbers").publish()
    book.cleaner.expire(seconds=0, versions=1)
    Janitor(book.lake).run_once()
    assert book.verify().findings == ()


def test_deletes_of_every_kind_are_found_at_the_new_place(place: Callable[[str], tuple[str, Path]]) -> None:
    (source, bytes_of), (target, to) = place(SQLITE), place(SQLITE)
    with opened(source, bytes_of) as book:
        table = numbers(book, "numbers", range(10), range(10, 20))
        first, second = table.plan().files
        # About one file, about several, without field ids, about a file that Iceberg spells in its own way.
        delete_positions(book, table, [(first, 1)], about=first)
        delete_positions(book, table, [(first, 2), (second, 3)], row_group_size=1)
        delete_positions(book, table, [(second, 4)], schema=columns(ids=False))
        enter_rows(book, table, with_ids(table, [{"id": number} for number in range(20, 30)]), spelled=True)
        spelled = next(file for file in table.plan() if file.location is not None)
        delete_positions(book, table, [(spelled, 5)], about=spelled)
        table.publish()
        before, seen = answers(book), published(book)
        assert len(seen["numbers"]) == 25
    lakebook.copy_book(source, target)
    shutil.rmtree(source)
    with opened(target, to, create=False) as copy:
        assert answers(copy) == before
        assert published(copy) == seen
        location = copy.table("numbers").metadata_location
        assert location is not None
        assert StaticTable.from_metadata(location).scan().to_arrow().num_rows == 25
        assert copy.verify().findings == ()
        assert "place-" not in _texts(to).replace(str(to), "")


def _texts(folder: Path) -> str:
    """What metadata files say, all of it."""
    return "".join(path.read_text() for path in folder.rglob("*.metadata.json"))


def test_branches_tags_and_files_of_outside_engines_come_along(place: Callable[[str], tuple[str, Path]]) -> None:
    (source, bytes_of), (target, to) = place(SQLITE), place(SQLITE)
    with opened(source, bytes_of) as book:
        table = numbers(book, "numbers", [1], [2])
        table.publish()
        table.tag("kept")
        outside = book.catalog().load_table("default.numbers")
        outside.append(with_ids(table, [{"id": 3}]))
        outside.manage_snapshots().create_branch(outside.current_snapshot().snapshot_id, "side").commit()  # type: ignore[union-attr]
        outside = book.catalog().load_table("default.numbers")
        outside.append(with_ids(table, [{"id": 4}]), branch="side")
        before = answers(book)
        side = sorted(outside.refresh().scan().use_ref("side").to_arrow()["id"].to_pylist())
    lakebook.copy_book(source, target)
    shutil.rmtree(source)
    with opened(target, to, create=False) as copy:
        assert answers(copy) == before
        there = copy.catalog().load_table("default.numbers")
        assert sorted(there.scan().use_ref("side").to_arrow()["id"].to_pylist()) == side == [1, 2, 3, 4]
        assert copy.verify().findings == ()
        there.append(with_ids(copy.table("numbers"), [{"id": 5}]))
        assert copy.table("numbers").count() == 4


def test_the_source_is_pinned_while_it_is_copied(place: Callable[[str], tuple[str, Path]]) -> None:
    (source, bytes_of), (target, to) = place(SQLITE), place(SQLITE)
    with opened(source, bytes_of, temporary_file_grace=0) as book:
        table = numbers(book, "numbers", [1], [2], [3])
        book.metadata.create_topic("orders")
        send(book, "a")
        before = answers(book)
        done = threading.Event()

        def meanwhile() -> None:
            if done.is_set():
                return
            done.set()
            # Everything that can be removed is, and something is added.
            table.delete("id < 3")
            book.metadata.delete_segments_before("orders", 0, 1)
            send(book, "b")
            book.cleaner.expire(seconds=0, versions=1)
            book.cleaner.delete_expired_temporary_files(wait=False)

        with failpoints.armed("copy.object_copied", meanwhile):
            lakebook.copy_book(source, target)
        assert done.is_set()
        assert book.table("numbers").count() == 1
        assert records(book, schema.leases) == records(book, schema.topic_leases) == []
    with opened(target, to, create=False) as copy:
        assert answers(copy) == before


def test_what_is_gone_from_the_source_meanwhile_is_not_waited_for(place: Callable[[str], tuple[str, Path]]) -> None:
    (source, bytes_of), (target, to) = place(SQLITE), place(SQLITE)
    with opened(source, bytes_of, temporary_file_grace=0) as book:
        numbers(book, "numbers", [1])
        numbers(book, "passing", *([number] for number in range(30)))
        done = threading.Event()

        def drop() -> None:
            if not done.is_set():
                done.set()
                book.tables.drop("passing")
                run_sql(book, "DELETE FROM leases")  # As if nobody had heard of the copy for long.
                book.cleaner.empty_dropped()
                assert book.cleaner.delete_expired_temporary_files(wait=False).files == 30

        with failpoints.armed("copy.object_copied", drop):
            report = lakebook.copy_book(source, target, workers=1)
        assert report.skipped > 0
    with opened(target, to, create=False) as copy:
        assert [record.name for record in copy.tables.list()] == ["numbers"]
        assert copy.verify().findings == ()


def test_a_damaged_source_is_not_copied(place: Callable[[str], tuple[str, Path]]) -> None:
    (source, bytes_of), (target, to) = place(SQLITE), place(SQLITE)
    with opened(source, bytes_of) as book:
        table = numbers(book, "numbers", [1], [2])
        path = table.plan().files[0].file_path
        good = book.lake.store.read(path)
        replace_bytes(book, path, lambda data: data[:-8] + b"00000000")
        with pytest.raises(CopyFailed, match="were recorded"):
            lakebook.copy_book(source, target)
        book.lake.store.delete_one(path)
        with pytest.raises(CopyFailed, match="does not exist"):
            lakebook.copy_book(source, target)
        with pytest.raises(lakebook.LakebookError):
            opened(target, to, create=False)
        book.lake.store.put_new(path, good)
        assert lakebook.copy_book(source, target).objects == 2
        with pytest.raises(BookExists):
            lakebook.copy_book(source, target)


def test_a_copy_goes_only_where_there_is_nothing(place: Callable[[str], tuple[str, Path]], tmp_path: Path) -> None:
    (source, bytes_of), (other, bytes_of_other) = place(SQLITE), place(SQLITE)
    for where, folder in ((source, bytes_of), (other, bytes_of_other)):
        with opened(where, folder) as book:
            numbers(book, "numbers", [1])
    (target, to) = place(SQLITE)
    to.mkdir(parents=True)
    (to / "mine").write_text("something")
    with pytest.raises(CopyFailed, match="something already"):
        lakebook.copy_book(source, target)
    assert (to / "mine").read_text() == "something"
    (to / "mine").unlink()

    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    with failpoints.armed("copy.object_copied", stop), pytest.raises(Stopped):
        lakebook.copy_book(other, target)
    with pytest.raises(CopyFailed, match="copy of another book"):
        lakebook.copy_book(source, target)
    lakebook.copy_book(other, target)
    with pytest.raises(InvalidSetting):
        lakebook.copy_book(source, tmp_path / "fourth", warehouse=bytes_of / "inside")
    with pytest.raises(InvalidSetting):
        lakebook.copy_book(source, ":memory:")


def test_whoever_wrote_to_the_source_is_refused_by_the_copy(place: Callable[[str], tuple[str, Path]]) -> None:
    (source, bytes_of), (target, to) = place(SQLITE), place(SQLITE)
    with opened(source, bytes_of) as book:
        book.metadata.create_topic("orders")
        lakebook.copy_book(source, target)
        with opened(target, to, create=False) as copy:
            copy.lake.registry.epoch = book.identity.epoch
            with pytest.raises(EpochChanged):
                copy.metadata.create_topic("clicks")


def test_what_another_store_knew_objects_by_is_replaced_by_their_own_checksums(
    place: Callable[[str], tuple[str, Path]],
) -> None:
    (source, bytes_of), (target, to) = place(SQLITE), place(SQLITE)
    with opened(source, bytes_of) as book:
        numbers(book, "numbers", [1])
        book.metadata.create_topic("orders")
        append(book, "a")
        checksums = [row["checksum"] for kind in (schema.table_files, schema.segments) for row in records(book, kind)]
        for kind in ("table_files", "segments"):
            run_sql(book, f"UPDATE {kind} SET checksum = 'etag:5d41402abc4b2a76b9719d911017c592'")
    lakebook.copy_book(source, target)
    with opened(target, to, create=False) as copy:
        found = [row["checksum"] for kind in (schema.table_files, schema.segments) for row in records(copy, kind)]
        assert found == checksums
        assert copy.verify().ok


def test_a_book_moves_into_a_bucket_and_back(
    place: Callable[[str], tuple[str, Path]], buckets: Buckets, tmp_path: Path
) -> None:
    (source, bytes_of), (target, to) = place(SQLITE), place(SQLITE)
    scaled, bucket = place(POSTGRESQL)[0], buckets.new_bucket()
    reached = buckets.settings
    with opened(source, bytes_of) as book:
        make_history(book, 7)
        table = numbers(book, "deleted", range(10))
        (file,) = table.plan().files
        delete_positions(book, table, [(file, 1)], about=file)
        table.publish()
        before, seen = answers(book), published(book)
    lakebook.copy_book(source, scaled, warehouse=f"s3://{bucket}/lake", **reached)
    bytes_of.rename(tmp_path / "moved-away")
    with lakebook.open(scaled, create=False, publish="off", **reached) as copy:
        assert copy.warehouse.root == f"s3://{bucket}/lake"
        assert answers(copy) == before
        assert copy.catalog().load_table(("default", "deleted")).scan().to_arrow().num_rows == 9
        assert copy.verify().findings == ()
        assert buckets.uploads(bucket) == []
    lakebook.copy_book(scaled, target, warehouse=to, **reached)
    for key in buckets.keys(bucket):
        buckets.client.delete_object(Bucket=bucket, Key=key)
    with opened(target, to, create=False) as back:
        assert answers(back) == before
        assert published(back) == seen
        assert back.verify().findings == ()
        _goes_on(back)
