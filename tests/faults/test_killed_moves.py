"""Whoever backs up, restores or copies a book is killed on the way: nothing is half-made, and the next one ends it."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import lakebook
from answers import answers, make_history
from books import POSTGRESQL, SQLITE, Place, Postgres
from buckets import Buckets
from extent import crossed
from lake import ids, numbers, objects, records, run_sql
from lakebook import failpoints
from lakebook.errors import BookNotFound
from lakebook.registry import schema
from lakebook.storage.s3 import PART
from mirrored import append, in_topic
from moving_processes import back_up, copy, restore, write_on
from recovery_points import BACKUP
from table_facts import with_own_warehouse
from table_writers import Child, kill_all

KINDS = [SQLITE, POSTGRESQL]


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return with_own_warehouse(make_place(request.param), tmp_path)


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == SQLITE:
        return str(tmp_path / "restored")
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.new_database(with_book=False)


FOLDER, BUCKET = "folder", "bucket"


@pytest.fixture
def bytes_at(buckets: Buckets, tmp_path: Path) -> Callable[[str, str], str]:
    """Somewhere for the bytes of a book: a folder, or a place in a bucket."""
    return lambda kind, name: str(tmp_path / name) if kind == FOLDER else f"s3://{buckets.new_bucket()}/{name}"


def killed(child: Child) -> None:
    assert ("done",) not in list(child.facts())
    assert child.end() == -signal.SIGKILL


@pytest.mark.parametrize(("step", "bytes_in"), crossed(BACKUP, [FOLDER, BUCKET]))
def test_a_backup_that_is_killed_leaves_no_backup_and_can_be_repeated(
    step: str, bytes_in: str, target: str, bytes_at: Callable[[str, str], str], buckets: Buckets, tmp_path: Path
) -> None:
    given = {"warehouse": bytes_at(bytes_in, "lake"), "publish": "off", **buckets.settings}
    with lakebook.open(target, **given) as book:
        make_history(book, 1, steps=6)
        for name in ("wide", "wider") if step == BACKUP[1] else ():
            book.metadata.create_topic(name, 10_000)  # More rows than are held back before the first goes to the file.
        there = objects(book)
        file = tmp_path / "backup"
        killed(Child(back_up, target, given, str(file), points=step))
        assert not file.exists()
        # Nothing of it, a part, or all.
        assert (file.with_name("backup.partial").stat().st_size > 0) == (step != BACKUP[0])
        book.backup(file)
        assert not file.with_name("backup.partial").exists()
        assert objects(book) == there
        lakebook.restore_book(file, tmp_path / "again", **buckets.settings)
        with lakebook.open(tmp_path / "again", publish="off", **buckets.settings) as restored:
            assert answers(restored) == answers(book)


# The schema, one revision after the other; then the rows; then the moment before it is a book.
@pytest.mark.parametrize(
    ("step", "bytes_in"),
    crossed(["restore.rows_loaded=kill@1", "migration.step=kill@3", "restore.loaded=kill@1"], [FOLDER, BUCKET]),
)
def test_a_restore_that_is_killed_leaves_no_book_and_can_be_repeated(
    step: str, bytes_in: str, target: str, bytes_at: Callable[[str, str], str], buckets: Buckets, tmp_path: Path
) -> None:
    file, warehouse = tmp_path / "backup", bytes_at(bytes_in, "lake")
    with lakebook.open(tmp_path / "book", warehouse=warehouse, publish="off", **buckets.settings) as book:
        make_history(book, 2, steps=4)
        book.metadata.create_topic("wide", 600)  # More than one chunk of rows.
        book.backup(file)
        before = answers(book)
    if step.startswith("migration") and not target.startswith("postgresql"):
        step = "restore.rows_loaded=kill@2"  # A file is made anew, with its schema at once.
    killed(Child(restore, str(file), target, points=step, **buckets.settings))
    with pytest.raises(BookNotFound):
        lakebook.open(target, create=False, warehouse=warehouse, **buckets.settings)
    lakebook.restore_book(file, target, **buckets.settings)
    with lakebook.open(target, create=False, publish="off", **buckets.settings) as restored:
        assert answers(restored) == before
        assert restored.verify().ok
    if (folder := Path(target)).is_dir():
        assert sorted(path.name for path in folder.iterdir()) == ["registry.db", "registry.db.lock"]


@pytest.mark.parametrize(
    "step",
    ["copy.object_copied=kill@5", "copy.table_relocated=kill@1", "copy.verified=kill@1", "copy.published=kill@1"],
)
def test_a_copy_that_is_killed_leaves_no_book_and_goes_on_from_there(step: str, target: str, tmp_path: Path) -> None:
    source, to = str(tmp_path / "book"), str(tmp_path / "bytes")
    with lakebook.open(source, publish="off") as book:
        make_history(book, 3)
        before = answers(book)
    killed(Child(copy, source, target, to, points=step))
    if step.startswith("copy.published"):
        report = lakebook.copy_book(source, target, warehouse=to)
        assert (report.objects, report.done_before) == (0, True)  # Only the marker was left.
    else:
        with pytest.raises(BookNotFound):
            lakebook.open(target, create=False, warehouse=to)
        # The source has gone on meanwhile.
        with lakebook.open(source, publish="off") as book:
            book.table("numbers").delete("part = 0")
            before = answers(book)
        report = lakebook.copy_book(source, target, warehouse=to)
        assert report.skipped >= (4 if step.startswith("copy.object") else report.objects)
    with lakebook.open(target, create=False, warehouse=to, publish="off") as moved:
        assert answers(moved) == before
        found = moved.verify()
        assert found.findings == ()
        assert not (Path(to) / "lakebook-copy.json").exists()


@pytest.mark.parametrize(
    "step", ["object_copied=kill@3", "table_relocated=kill@1", "verified=kill@1", "published=kill@1"]
)
@pytest.mark.parametrize(("here", "there"), [(FOLDER, BUCKET), (BUCKET, FOLDER), (BUCKET, BUCKET)])
def test_a_copy_from_and_to_buckets_that_is_killed_goes_on_from_there(
    step: str, here: str, there: str, target: str, bytes_at: Callable[[str, str], str], buckets: Buckets, tmp_path: Path
) -> None:
    source = str(tmp_path / "book")
    bytes_of, to = bytes_at(here, "lake"), bytes_at(there, "moved")
    with lakebook.open(source, warehouse=bytes_of, publish="off", **buckets.settings) as book:
        table = numbers(book, "numbers", [1], [2], [3])
        book.metadata.create_topic("orders")
        append(book, "a")
        for row in records(book, schema.table_files):
            # As Spark's files are known.
            known = f"checksum = '{book.lake.store.checksum(row['file_path'])}'"
            run_sql(book, f"UPDATE table_files SET {known} WHERE file_path = '{row['file_path']}'")
        table.publish()
        before = answers(book)
    killed(Child(copy, source, target, to, points=f"copy.{step}", **buckets.settings))
    if not step.startswith("published"):
        with pytest.raises(BookNotFound):
            lakebook.open(target, create=False, warehouse=to, **buckets.settings)
    report = lakebook.copy_book(source, target, warehouse=to, **buckets.settings)
    assert report.done_before == step.startswith("published")
    if not step.startswith("object"):
        assert report.skipped == report.objects
    with lakebook.open(target, create=False, warehouse=to, publish="off", **buckets.settings) as moved:
        assert answers(moved) == before
        assert moved.verify().findings == ()
        assert not [path for path in objects(moved) if path.startswith("lakebook-copy")]


@pytest.mark.parametrize("bytes_in", [FOLDER, BUCKET])
def test_a_copy_of_a_book_that_is_written_to_is_one_of_its_states(
    bytes_in: str, target: str, bytes_at: Callable[[str, str], str], buckets: Buckets, tmp_path: Path
) -> None:
    given = {"warehouse": bytes_at(bytes_in, "lake"), **buckets.settings}
    source, target, to = target, str(tmp_path / "copied"), tmp_path / "moved"
    told: dict[int, list[int]] = {}
    with lakebook.open(source, publish="off", **given) as book:
        table = book.tables.create("numbers", "id BIGINT, part BIGINT", partition_by=["part"])
        book.tables.create("flowed", "id BIGINT, value STRING")
        book.metadata.create_topic("orders")
        book.pipelines.create("flow", into="flowed", topics="orders")
        writer = Child(write_on, source, given)

        def hear() -> None:
            version, rows = writer.wait_for("version")[1:]
            told[version] = rows

        def meanwhile() -> None:
            # Nobody copies a next object before the writer has gone on.
            while writer.connection.poll():
                hear()
            hear()

        while max(told, default=0) < 12:
            hear()
        with failpoints.armed("copy.object_copied", meanwhile):
            report = lakebook.copy_book(source, target, warehouse=to, workers=1, **buckets.settings)
        writer.stop()
        told |= dict(fact[1:] for fact in writer.facts() if fact[0] == "version")
        assert writer.end() == 0
        assert table.record.version > report.objects
        assert book.verify().findings == ()
    with lakebook.open(target, create=False, publish="off") as moved:
        assert moved.verify().findings == ()
        numbers_of = moved.table("numbers")
        # What compactions make, and what comes between two words of the writer, has the rows of the version before.
        for item in numbers_of.history().items:
            assert ids(numbers_of, version=item.version) in _around(told, item.version)
        orders = moved.metadata.get_partition("orders", 0)
        assert orders is not None
        found = [(row["offset"], row["value"].decode()) for row in in_topic(moved, "orders")]
        assert found == [(offset, str(offset)) for offset in range(orders.log_start, orders.high_watermark)]
        (landed,) = moved.pipelines["flow"].describe().sources
        assert ids(moved.table("flowed")) == list(range(landed.next))
        for snapshot in numbers_of.snapshots():
            scan = moved.catalog().load_table("default.numbers").scan(snapshot_id=snapshot.snapshot_id)
            assert sorted(scan.to_arrow()["id"].to_pylist()) in _around(told, snapshot.version or 0)


def _around(told: dict[int, list[int]], version: int) -> list[list[int]]:
    """The rows that a version was told to have; or else those of the versions before and after it."""
    if version in told:
        return [told[version]]
    return [
        told[max((known for known in told if known < version), default=min(told))],
        told[min(known for known in told if known > version)],
    ]


def test_a_copy_that_is_killed_while_it_uploads_leaves_no_upload_when_it_has_gone_on(
    buckets: Buckets, tmp_path: Path
) -> None:
    source, target, bucket = str(tmp_path / "book"), str(tmp_path / "copied"), buckets.new_bucket()
    to = f"s3://{bucket}/moved"
    with lakebook.open(source, publish="off") as book:
        table = book.tables.create("large", "data BINARY")
        table.insert_arrow(pa.table({"data": pa.array([random.Random(1).randbytes(PART + 1)])}))
    killed(Child(copy, source, target, to, points="upload.finishing=kill@1", **buckets.settings))
    (left,) = buckets.uploads(bucket)
    assert left.startswith("moved/data/")
    # What was being uploaded then may be nothing that is copied now.
    with lakebook.open(source, publish="off") as book:
        book.tables.drop("large")
        book.cleaner.empty_dropped()
        numbers(book, "numbers", [1])
    lakebook.copy_book(source, target, warehouse=to, **buckets.settings)
    assert buckets.uploads(bucket) == []
    with lakebook.open(target, create=False, publish="off", **buckets.settings) as moved:
        assert moved.table("numbers").count() == 1
