"""A copy of a book answers the same at any other place, and the source is as it was."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyiceberg.table import StaticTable

import lakebook
from answers import answers, make_history, objects_below, published, read_by_duckdb
from books import POSTGRESQL, SQLITE, Postgres
from buckets import Buckets
from by_hand import ADDED, DELETED, Hand, settle, to_ref
from compacting import by_arrow
from deletes import columns, delete_positions, enter_rows
from extent import EVERYWHERE
from fault_proxy import FaultProxy
from flowing import flow
from lake import insert, numbers, objects, records, replace_bytes, run_sql, with_ids
from lakebook import Book, failpoints
from lakebook.components.janitor import Janitor
from lakebook.errors import BookExists, CopyFailed, EpochChanged, InvalidSetting
from lakebook.iceberg.manifests import entries_of, read_manifest_list
from lakebook.registry import schema
from mirrored import append, send

_numbers = itertools.count()
KINDS = [SQLITE, POSTGRESQL]
#: From where to where; small runs have two of them.
PAIRS = [(SQLITE, POSTGRESQL), (POSTGRESQL, SQLITE), *([(kind, kind) for kind in KINDS] if EVERYWHERE else [])]
#: Histories of each pair of places.
EXAMPLES = int(os.environ.get("LAKEBOOK_TEST_MOVING_EXAMPLES", "2"))


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


class Stopped(Exception):
    """A copy has come as far as it was to come."""


@contextmanager
def stopped(point: str, at: int = 1) -> Iterator[None]:
    """The block ends when the point is reached for this time."""
    reached = itertools.count(1)

    def stop() -> None:
        if next(reached) == at:
            raise Stopped

    with failpoints.armed(point, stop), pytest.raises(Stopped):
        yield


def known_by_their_store(book: Book) -> None:
    """Let the files of tables be recorded by what their store knows them by, as those are that Spark wrote."""
    for row in records(book, schema.table_files):
        path = row["file_path"]
        run_sql(
            book, f"UPDATE table_files SET checksum = '{book.lake.store.checksum(path)}' WHERE file_path = '{path}'"
        )


@pytest.mark.parametrize(("kind", "into"), PAIRS)
def test_a_copy_answers_the_same_without_its_source(
    kind: str, into: str, place: Callable[[str], tuple[str, Path]]
) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        (source, bytes_of), (target, to) = place(kind), place(into)
        with opened(source, bytes_of) as book:
            make_history(book, seed)
            before, seen, scanned = answers(book), published(book), read_by_duckdb(book)
            there = objects_below(bytes_of)
            epoch = book.identity.epoch
        report = lakebook.copy_book(source, target, warehouse=to)
        with opened(source, bytes_of) as book:
            assert (answers(book), book.identity.epoch, objects_below(bytes_of)) == (before, epoch, there)
            assert book.verify().ok
        bytes_of.rename(gone := bytes_of.with_name("moved-away"))
        with opened(target, to, create=False) as copy:
            assert answers(copy) == before
            assert (published(copy), read_by_duckdb(copy)) == (seen, scanned)
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
        before, seen, scanned = answers(book), published(book), read_by_duckdb(book)
        assert len(scanned["default.numbers"]) == 25
    lakebook.copy_book(source, target)
    shutil.rmtree(source)
    with opened(target, to, create=False) as copy:
        assert answers(copy) == before
        assert (published(copy), read_by_duckdb(copy)) == (seen, scanned)
        location = copy.table("numbers").metadata_location
        assert location is not None
        assert StaticTable.from_metadata(location).scan().to_arrow().num_rows == 25
        assert copy.verify().findings == ()
        assert "place-" not in _texts(to).replace(str(to), "")


def _texts(folder: Path) -> str:
    """What metadata files say, all of it."""
    return "".join(path.read_text() for path in folder.rglob("*.metadata.json"))


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_in_the_summaries_of_a_copy_are_those_of_its_own_files(
    kind: str, place: Callable[[str], tuple[str, Path]]
) -> None:
    (source, bytes_of), (target, to) = place(kind), place(kind)
    with opened(source, bytes_of) as book:
        table = numbers(book, "numbers", range(10), range(10, 20))
        table.publish()
        first, second = table.plan().files
        # By this book and by an outside engine, on the branch `main` and on another one.
        delete_positions(book, table, [(first, 1), (second, 1)])
        delete_positions(book, table, [(first, 2)], about=first)
        table.publish()
        hand = Hand(book, table)
        files = sorted(hand.live())
        hand.delete_positions((files[0], 3), (files[1], 4))
        hand.delete_positions((files[0], 5), about=files[0])
        hand.commit(to_ref(hand.metadata.current_snapshot_id or 0, "work"), requirements=())
        hand.load().delete("id = 19", branch="work")
        # With the file that they are about, deletes go.
        table.delete("id < 10")
        table.publish()
        settle(book)
        lengths = _sizes_by_summaries(book)
        totals = {row["snapshot_id"]: row["summary"] for row in records(book, schema.table_snapshots)}
    # Addresses of another length: what was deleted is told in files of other sizes.
    further = to / "a-folder-of-a-very-long-name-that-no-compression-makes-small" / "warehouse"
    lakebook.copy_book(source, target, warehouse=further)
    with opened(target, further, create=False) as copy:
        found = _sizes_by_summaries(copy)
        assert found.keys() == lengths.keys()
        assert any(found[ident] != lengths[ident] for ident in found)
        in_rows = {row["snapshot_id"]: row["summary"] for row in records(copy, schema.table_snapshots)}
        for ident, summary in totals.items():
            kept = {key: value for key, value in summary.items() if not key.endswith("files-size")}
            assert {key: value for key, value in in_rows[ident].items() if not key.endswith("files-size")} == kept
            assert in_rows[ident].get("total-files-size") == found[ident].get("total-files-size")
        # And they stay so, counted on by this book.
        by_arrow(copy, copy.table("numbers"))
        copy.table("numbers").publish()
        _sizes_by_summaries(copy)
        assert copy.verify().findings == ()


def _sizes_by_summaries(book: Book) -> dict[int, dict[str, str]]:
    """The sizes that the summary of each snapshot tells, which are those of its files, to the byte."""
    table = book.table("numbers")
    hand = Hand(book, table)
    found = {}
    for snapshot in hand.metadata.snapshots:
        assert snapshot.summary is not None
        told = {key: value for key, value in snapshot.summary.additional_properties.items() if "files-size" in key}
        entries = [
            entry
            for manifest in read_manifest_list(hand.io, snapshot.manifest_list)
            for entry in entries_of(hand.io, manifest)
        ]
        own = [entry for entry in entries if entry.snapshot_id == snapshot.snapshot_id]
        expected = {
            "total-files-size": [entry for entry in entries if entry.status != DELETED],
            "added-files-size": [entry for entry in own if entry.status == ADDED],
            "removed-files-size": [entry for entry in own if entry.status == DELETED],
        }
        for key, some in expected.items():
            size = sum(book.lake.store.size(hand.path(entry.data_file.file_path)) or 0 for entry in some)
            assert int(told.get(key, size)) == size, (snapshot.snapshot_id, key)
        found[snapshot.snapshot_id] = told
    by_version = {item.version: item.summary for item in table.history().items}
    for record in table.snapshots():
        summary = by_version.get(record.version or -1, {})
        assert summary.get("added-files-size") in (None, found[record.snapshot_id].get("added-files-size"))
    return found


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


def test_what_pipelines_have_still_to_read_stays_pinned_in_a_copy(place: Callable[[str], tuple[str, Path]]) -> None:
    (source, bytes_of), (target, to) = place(SQLITE), place(SQLITE)
    with opened(source, bytes_of) as book:
        book.metadata.create_topic("orders")
        flowed = book.tables.create("flowed", "id BIGINT, value STRING")
        flow(book, book.pipelines.create("flow", into="flowed", topics="orders"), flowed)
        book.pipelines.create("of_table", into="flowed", tables=numbers(book, "numbers", [1], [2]).name)
        append(book, "a")
        append(book, "b")
        # Below the log start, and there for the pipeline alone.
        book.metadata.delete_segments_before("orders", 0, 1)
    lakebook.copy_book(source, target)
    with opened(target, to, create=False) as copy:
        copy.metadata.delete_segments_before("orders", 0, 2)
        copy.table("numbers").delete("id >= 0")
        copy.cleaner.expire(seconds=0, versions=1)
        Janitor(copy.lake).run_once()
        assert flow(copy, copy.pipelines["flow"], copy.table("flowed")) == 2
        assert copy.table("numbers").to_arrow(version=1).num_rows == 1
        assert copy.verify().findings == ()


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


def test_a_topic_whose_deletion_died_half_way_does_not_come_along(place: Callable[[str], tuple[str, Path]]) -> None:
    (source, bytes_of), (target, copied) = place(SQLITE), place(POSTGRESQL)
    with opened(source, bytes_of) as book:
        for name in ("kept", "gone"):
            book.metadata.create_topic(name)
            send(book, "a", "b", topic=name)
        with stopped("topic.hidden"):
            book.metadata.delete_topic("gone")
    report = lakebook.copy_book(source, target, warehouse=copied)
    assert report.objects == 1
    assert len(objects_below(copied)) == 1
    with opened(target, copied) as book:
        assert [row["name"] for row in records(book, schema.topics)] == ["kept"]
        assert book.verify().ok


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

    with stopped("copy.object_copied"):
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


def test_the_file_of_each_end_says_how_its_bucket_is_reached(buckets: Buckets, tmp_path: Path) -> None:
    homes = [tmp_path / "source", tmp_path / "target"]
    with closing(FaultProxy(buckets.endpoint)) as source, closing(FaultProxy(buckets.endpoint)) as target:
        names = [buckets.new_bucket(), buckets.new_bucket()]
        for home, proxy, bucket in zip(homes, (source, target), names, strict=True):
            home.mkdir()
            said = {**buckets.settings, "s3_endpoint": proxy.endpoint, "warehouse": f"s3://{bucket}/lake"}
            (home / "lakebook.toml").write_text("".join(f'{name} = "{value}"\n' for name, value in said.items()))
        with lakebook.open(homes[0], publish="off") as book:
            numbers(book, "numbers", [1, 2]).publish()
            before = answers(book)
        lakebook.copy_book(*homes)
        assert source.count(names[1]) == target.count(names[0]) == 0
        with lakebook.open(homes[1], create=False, publish="off") as copy:
            assert answers(copy) == before
            assert copy.verify().findings == ()


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
        before, seen, scanned = answers(book), published(book), read_by_duckdb(book)
    lakebook.copy_book(source, scaled, warehouse=f"s3://{bucket}/lake", **reached)
    bytes_of.rename(tmp_path / "moved-away")
    with lakebook.open(scaled, create=False, publish="off", **reached) as copy:
        assert copy.warehouse.root == f"s3://{bucket}/lake"
        assert (answers(copy), published(copy)) == (before, seen)
        assert copy.catalog().load_table(("default", "deleted")).scan().to_arrow().num_rows == 9
        assert copy.verify().findings == ()
        assert buckets.uploads(bucket) == []
    lakebook.copy_book(scaled, target, warehouse=to, **reached)
    for key in buckets.keys(bucket):
        buckets.client.delete_object(Bucket=bucket, Key=key)
    with opened(target, to, create=False) as back:
        assert answers(back) == before
        assert (published(back), read_by_duckdb(back)) == (seen, scanned)
        assert back.verify().findings == ()
        _goes_on(back)


@pytest.fixture
def bucket_book(place: Callable[[str], tuple[str, Path]], buckets: Buckets) -> Iterator[tuple[str, str, Book]]:
    """A book in a bucket, all of whose files are known by what the store knows them by: its place and its bucket."""
    source, bucket = place(SQLITE)[0], buckets.new_bucket()
    with lakebook.open(source, warehouse=f"s3://{bucket}/lake", publish="off", **buckets.settings) as book:
        numbers(book, "numbers", *([number] for number in range(6)))
        book.metadata.create_topic("orders")
        append(book, "a")
        known_by_their_store(book)
        yield source, bucket, book


@pytest.mark.parametrize("to_bucket", [False, True])
def test_what_a_copy_has_copied_is_not_read_again_when_it_goes_on(
    to_bucket: bool, bucket_book: tuple[str, str, Book], place: Callable[[str], tuple[str, Path]], buckets: Buckets
) -> None:
    (source, _, book), (target, folder) = bucket_book, place(SQLITE)
    to = f"s3://{buckets.new_bucket()}/moved" if to_bucket else str(folder)
    before = answers(book)
    with stopped("copy.object_copied", at=4):
        lakebook.copy_book(source, target, warehouse=to, workers=1, **buckets.settings)
    # Whoever reads them once more finds that they are gone.
    paths = sorted(path for path in objects(book) if path.startswith(("data/", "topics/")))
    for path in paths[:3]:
        book.lake.store.delete_one(path)
    with stopped("copy.verified"):
        lakebook.copy_book(source, target, warehouse=to, **buckets.settings)
    for path in paths:
        book.lake.store.delete_one(path)
    report = lakebook.copy_book(source, target, warehouse=to, **buckets.settings)
    assert report.skipped == report.objects == 7
    assert not report.done_before
    with lakebook.open(target, warehouse=to, create=False, publish="off", **buckets.settings) as copy:
        assert answers(copy) == before
        assert copy.verify().findings == ()
        assert objects(copy) == paths
        assert all(row["checksum"].startswith("xxh3:") for row in records(copy, schema.table_files))


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-8] + b"00000000"])
def test_what_is_at_the_new_place_only_in_parts_is_copied_again(
    damage: Callable[[bytes], bytes],
    bucket_book: tuple[str, str, Book],
    place: Callable[[str], tuple[str, Path]],
    buckets: Buckets,
) -> None:
    (source, _, book), (target, to) = bucket_book, place(SQLITE)
    with stopped("copy.verified"):
        lakebook.copy_book(source, target, warehouse=to, **buckets.settings)
    # As a loss of power leaves a file.
    file = to / book.table("numbers").plan().files[0].file_path
    file.write_bytes(damage(file.read_bytes()))
    report = lakebook.copy_book(source, target, warehouse=to, **buckets.settings)
    assert (report.objects, report.skipped) == (7, 6)
    with opened(target, to, create=False) as copy:
        assert answers(copy) == answers(book)


def test_an_object_that_is_not_what_its_store_knew_is_not_copied(
    bucket_book: tuple[str, str, Book], place: Callable[[str], tuple[str, Path]], buckets: Buckets
) -> None:
    (source, bucket, book), (target, to) = bucket_book, place(SQLITE)
    path = book.table("numbers").plan().files[2].file_path
    good = book.lake.store.read(path)
    # As many bytes, but others.
    buckets.client.put_object(Bucket=bucket, Key=f"lake/{path}", Body=good[:-8] + b"00000000")
    with pytest.raises(CopyFailed, match="it is not what was recorded") as caught:
        lakebook.copy_book(source, target, warehouse=to, **buckets.settings)
    assert caught.value.on == f"s3://{bucket}/lake/{path}"
    assert "in parts of 16 MiB" in str(caught.value)
    assert not (to / path).exists()
    buckets.client.put_object(Bucket=bucket, Key=f"lake/{path}", Body=good)
    assert lakebook.copy_book(source, target, warehouse=to, **buckets.settings).objects == 7


def test_what_has_no_checksum_is_compared_with_what_was_read(place: Callable[[str], tuple[str, Path]]) -> None:
    (source, bytes_of), (target, to) = place(SQLITE), place(SQLITE)
    with opened(source, bytes_of) as book:
        table = numbers(book, "numbers", [1])
        table.publish()
        outside = book.catalog().load_table("default.numbers")
        outside.manage_snapshots().create_branch(outside.current_snapshot().snapshot_id, "side").commit()  # type: ignore[union-attr]
        book.catalog().load_table("default.numbers").append(with_ids(table, [{"id": 2}]), branch="side")
        (own,) = [row["file_path"] for row in records(book, schema.branch_files)]

    def damage() -> None:
        data = (to / own).read_bytes()
        (to / own).write_bytes(data[:-8] + b"00000000")

    with (
        failpoints.armed("copy.table_relocated", damage),
        pytest.raises(CopyFailed, match="not those that were copied"),
    ):
        lakebook.copy_book(source, target)
    with stopped("copy.verified"):
        lakebook.copy_book(source, target)
    report = lakebook.copy_book(source, target)
    assert report.skipped == report.objects
    with opened(target, to, create=False) as copy:
        there = copy.catalog().load_table("default.numbers")
        assert sorted(there.scan().use_ref("side").to_arrow()["id"].to_pylist()) == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_copy_that_became_a_book_are_no_other_copys_to_delete(
    kind: str, place: Callable[[str], tuple[str, Path]]
) -> None:
    (source, bytes_of), (target, to), (second, _) = place(SQLITE), place(kind), place(kind)
    with opened(source, bytes_of) as book:
        numbers(book, "numbers", [1])
    with stopped("copy.published"):
        lakebook.copy_book(source, target, warehouse=to)
    with opened(target, to, create=False) as copy:
        insert(copy.table("numbers"), {"id": 2})
    with pytest.raises(CopyFailed, match="a copy to another registry") as caught:
        lakebook.copy_book(source, second, warehouse=to)
    assert "nothing in it, or the registry to which that copy goes" in str(caught.value)
    with opened(target, to, create=False) as copy:
        assert copy.table("numbers").count() == 2
        assert copy.verify().findings == ()
    assert lakebook.copy_book(source, target, warehouse=to).done_before
    assert not (to / "lakebook-copy.json").exists()


def test_books_in_two_schemas_of_a_database_are_two(
    place: Callable[[str], tuple[str, Path]], postgres: Postgres
) -> None:
    (source, bytes_of), (_, to) = place(SQLITE), place(SQLITE)
    database = postgres.new_database(with_book=False)
    with psycopg.connect(database, autocommit=True) as connection:
        for name in ("one", "two"):
            connection.execute(f"CREATE SCHEMA {name}")
    joint = "&" if "?" in database else "?"
    one, two = (f"{database}{joint}options=-csearch_path%3D{name}" for name in ("one", "two"))
    with opened(source, bytes_of) as book:
        numbers(book, "numbers", [1])
    with stopped("copy.object_copied"):
        lakebook.copy_book(source, one, warehouse=to)
    said = (to / "lakebook-copy.json").read_text()
    assert "schema=one" in said and "password" not in said
    with pytest.raises(CopyFailed, match="a copy to another registry"):
        lakebook.copy_book(source, two, warehouse=to)
    assert lakebook.copy_book(source, one, warehouse=to).objects == 1


def test_a_marker_that_does_not_say_to_which_registry_is_not_gone_on_from(
    place: Callable[[str], tuple[str, Path]],
) -> None:
    (source, bytes_of), (target, to), (second, _) = place(SQLITE), place(SQLITE), place(SQLITE)
    with opened(source, bytes_of) as book:
        numbers(book, "numbers", [1])
    with stopped("copy.published"):
        lakebook.copy_book(source, target)
    marker = to / "lakebook-copy.json"
    said = orjson.loads(marker.read_bytes())
    marker.write_bytes(orjson.dumps({**said, "version": 1, "registry": None}))
    with pytest.raises(CopyFailed, match="by an older release"):
        lakebook.copy_book(source, second, warehouse=to)
    # The book itself is there, and has its bytes here: only marks are removed.
    assert lakebook.copy_book(source, target).done_before


def test_a_copy_does_not_go_on_where_a_book_has_lost_its_registry(place: Callable[[str], tuple[str, Path]]) -> None:
    (source, bytes_of), (target, to) = place(SQLITE), place(SQLITE)
    with opened(source, bytes_of) as book:
        numbers(book, "numbers", [1])
    with stopped("copy.published"):
        lakebook.copy_book(source, target)
    with opened(target, to, create=False) as copy:
        insert(copy.table("numbers"), {"id": 2})
        Janitor(copy.lake).run_once("checkpoint")
    for file in Path(target).glob("registry.db*"):
        file.unlink()
    with pytest.raises(CopyFailed, match="whose registry is gone"):
        lakebook.copy_book(source, target)
    lakebook.rebuild_book(to, target)
    with opened(target, to, create=False) as copy:
        assert copy.table("numbers").count() == 2


@pytest.mark.parametrize("name", ["team2", "data"])
def test_a_book_that_was_made_below_the_new_place_meanwhile_stays(
    name: str, place: Callable[[str], tuple[str, Path]], buckets: Buckets
) -> None:
    (source, bytes_of), (target, _), (below, _) = place(SQLITE), place(SQLITE), place(SQLITE)
    bucket = buckets.new_bucket()
    to: dict[str, Any] = {"warehouse": f"s3://{bucket}", **buckets.settings}
    inside = {**to, "warehouse": f"s3://{bucket}/{name}"}
    with opened(source, bytes_of) as book:
        table = numbers(book, "numbers", [1])
        where = book.lake.store.uri("chosen/here")
        chosen = book.catalog().create_table("default.chosen", pa.schema([("id", pa.int64())]), location=where)
        chosen.append(pa.table({"id": [1]}))
    with stopped("copy.verified"):
        lakebook.copy_book(source, target, **to)
    # Of the former attempt, and needed no more.
    old = [f"data/{table.id}/{'0' * 32}/old.parquet", "topics/7/0/t1/old.parquet", "chosen/here/data/old.parquet"]
    for key in old:
        buckets.client.put_object(Bucket=bucket, Key=key, Body=b"old")
        buckets.client.create_multipart_upload(Bucket=bucket, Key=key)
    with lakebook.open(below, publish="off", **inside) as other:
        numbers(other, "numbers", [1], [2])
    theirs = f"{name}/data/1/{'0' * 32}/large.parquet"
    buckets.client.create_multipart_upload(Bucket=bucket, Key=theirs)
    if name == "data":
        # It lies among the files of tables, where `verify` finds what nobody knows.
        with pytest.raises(CopyFailed, match="no row refers to it"):
            lakebook.copy_book(source, target, **to)
    else:
        lakebook.copy_book(source, target, **to)
        with lakebook.open(target, create=False, publish="off", **to) as copy:
            assert copy.table("numbers").count() == copy.table("chosen").count() == 1
    assert set(buckets.keys(bucket)).isdisjoint(old)
    assert buckets.uploads(bucket) == [theirs]
    with lakebook.open(below, create=False, publish="off", **inside) as other:
        assert other.table("numbers").count() == 2
        assert other.verify().findings == ()


def test_the_marker_of_a_copy_to_another_registry_stays(place: Callable[[str], tuple[str, Path]]) -> None:
    (source, bytes_of), (target, _), (second, elsewhere) = place(SQLITE), place(SQLITE), place(SQLITE)
    with opened(source, bytes_of) as book:
        numbers(book, "numbers", [1])
    lakebook.copy_book(source, target)
    with stopped("copy.object_copied"):
        lakebook.copy_book(source, second)
    with pytest.raises(BookExists):
        lakebook.copy_book(source, target, warehouse=elsewhere)
    assert lakebook.copy_book(source, second).objects == 1
