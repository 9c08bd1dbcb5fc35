"""A backup is one state of the registry in one file, and a book that is restored from it answers the same."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import lakebook
from answers import answers, make_history, published
from books import POSTGRESQL, SQLITE, Place, Postgres
from buckets import Buckets
from extent import EVERYWHERE
from fault_proxy import FaultProxy
from lake import insert, numbers, objects, own_warehouse, records  # noqa: F401
from lakebook import Book
from lakebook.clock import ManualClock, SystemClock
from lakebook.components.janitor import Janitor
from lakebook.errors import BackupInvalid, BackupNotWritable, BookExists, BookHeld
from lakebook.lake.attempts import Attempt
from lakebook.recovery.rebuild import rebuild_book
from lakebook.registry import schema
from lakebook.registry.migrate import HEAD
from mirrored import append, send

KINDS = [SQLITE, POSTGRESQL]
_numbers = itertools.count()
#: From where to where; small runs have two of them.
PAIRS = [(SQLITE, POSTGRESQL), (POSTGRESQL, SQLITE), *([(kind, kind) for kind in KINDS] if EVERYWHERE else [])]
#: Histories of each pair of places.
EXAMPLES = int(os.environ.get("LAKEBOOK_TEST_MOVING_EXAMPLES", "3"))


@pytest.fixture
def place(request: pytest.FixtureRequest, make_place: Callable[..., Place], tmp_path: Path) -> Place:
    return make_place(request.param)


on_both = pytest.mark.parametrize("place", KINDS, indirect=True)


@pytest.fixture
def target(postgres: Postgres, tmp_path: Path) -> Callable[[str], str]:
    """Somewhere for a book, of a kind, where there is none."""

    def make(kind: str) -> str:
        if kind == SQLITE:
            return str(tmp_path / f"restored-{next(_numbers)}")
        return postgres.new_database(with_book=False)

    return make


def opened(target: str) -> Book:
    return lakebook.open(target, create=False, publish="off")


# --- the same before and after ---------------------------------------------------


@pytest.mark.parametrize(
    ("place", "into"),
    PAIRS,
    indirect=["place"],
)
def test_a_restored_book_answers_the_same(
    place: Place, into: str, target: Callable[[str], str], tmp_path: Path
) -> None:
    to = target(into)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        number = next(_numbers)
        here = Place(SQLITE, str(tmp_path / f"book-{number}"), {}) if place.kind == SQLITE else None
        book = (here or place).open() if here else _emptied(place)
        make_history(book, seed)
        before, seen = answers(book), published(book)
        rows = {name: records(book, table) for name, table in schema.metadata.tables.items()}
        file = tmp_path / f"{number}.backup"
        done = book.backup(file)
        report = lakebook.restore_book(file, where := _fresh(to, target, into))
        assert report.rows == done.rows
        with opened(where) as restored:
            assert (answers(restored), published(restored)) == (before, seen)
            assert restored.identity.book_id == book.identity.book_id
            assert restored.identity.epoch != book.identity.epoch
            assert restored.verify().findings == ()
            for name, table in schema.metadata.tables.items():
                if name not in ("book", "events", "cursors", "deliveries", "schedulers", "commits", "segments"):
                    assert records(restored, table) == rows[name], name
        book.close()

    check()


def _emptied(place: Place) -> Book:
    """A book on PostgreSQL for another history: the names of the former are free again."""
    book = place.open()
    for pipeline in book.pipelines:
        pipeline.delete()
    for name in book.views:
        book.views.drop(name)
    for record in book.tables.list().items:
        if record.namespace not in ("topics", "lakebook_views"):
            book.tables.drop(record.name, namespace=record.namespace)
    for topic in book.metadata.list_topics().items:
        book.metadata.delete_topic(topic.name)
    return book


def _fresh(first: str, target: Callable[[str], str], kind: str, used: set[str] = set()) -> str:  # noqa: B006 - on purpose
    if first not in used:
        used.add(first)
        return first
    return target(kind)


@on_both
def test_ids_that_were_given_once_are_not_given_again(
    place: Place, target: Callable[[str], str], tmp_path: Path
) -> None:
    book = place.open()
    for name in ("first", "second"):
        numbers(book, name)
    gone = book.table("second").id
    book.tables.drop("second")
    book.cleaner.delete_expired_temporary_files()
    assert records(book, schema.tables, id=gone) == []
    book.backup(tmp_path / "backup")
    for kind in KINDS:
        lakebook.restore_book(tmp_path / "backup", to := target(kind))
        with opened(to) as restored:
            assert numbers(restored, "third").id > gone


@on_both
def test_writers_go_on_while_a_backup_is_taken_and_it_is_of_one_moment(place: Place, tmp_path: Path) -> None:
    book, writer = place.open(), place.open()
    book.metadata.create_topic("orders")
    append(book, "a")
    begun, written = threading.Event(), threading.Event()

    def progress(_: int, __: int | None, table: str) -> None:
        if table == "topics":
            begun.set()
            assert written.wait(60)

    def write() -> None:
        assert begun.wait(60)
        append(writer, "b")
        writer.metadata.create_topic("later")
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    done = book.backup(tmp_path / "backup", progress)
    thread.join()
    assert (done.rows["topics"], done.rows["segments"]) == (1, 1)
    assert len(list(book.metadata.each_segment("orders", 0))) == 2


# --- the file ----------------------------------------------------------------------


@pytest.fixture
def backed_up(tmp_path: Path) -> Path:
    with lakebook.open(tmp_path / "original", publish="off") as book:
        numbers(book, "numbers", [1, 2], [3])
        book.backup(tmp_path / "backup")
    return tmp_path / "backup"


def test_a_backup_replaces_no_file_and_leaves_nothing_if_it_fails(backed_up: Path, tmp_path: Path) -> None:
    before = backed_up.read_bytes()
    with lakebook.open(tmp_path / "original") as book:
        with pytest.raises(BackupNotWritable):
            book.backup(backed_up)
        with pytest.raises(BackupNotWritable):
            book.backup(tmp_path / "no" / "such" / "folder")

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            book.backup(tmp_path / "other", fail)
    assert backed_up.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup", "original"]


def cut(data: bytes) -> bytes:
    return data[:-1]


def cut_in_half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def changed(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


def of_another_program(data: bytes) -> bytes:
    return gzip.compress(b'{"some": "thing"}\n')


def no_file_of_ours(data: bytes) -> bytes:
    return b"SQLite format 3\0" + data


def with_other_rows(data: bytes) -> bytes:
    return gzip.compress(gzip.decompress(data).replace(b'"numbers"', b'"letters"'))


def without_its_end(data: bytes) -> bytes:
    return gzip.compress(b"".join(gzip.decompress(data).splitlines(keepends=True)[:-1]))


def with_something_behind(data: bytes) -> bytes:
    return gzip.compress(gzip.decompress(data) + b"[1]\n")


def of_a_later_form(data: bytes) -> bytes:
    return gzip.compress(gzip.decompress(data).replace(b'"version":1', b'"version":2', 1))


def of_a_later_schema(data: bytes) -> bytes:
    return sealed(gzip.decompress(data).replace(f'"revision":"{HEAD}"'.encode(), b'"revision":"9999"', 1))


def with_unknown_columns(data: bytes) -> bytes:
    return sealed(gzip.decompress(data).replace(b'["namespace_id","integer"]', b'["nonsense","integer"]', 1))


def empty(data: bytes) -> bytes:
    return b""


def write(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file


def sealed(lines: bytes) -> bytes:
    """A backup of these lines, the last of which is written anew."""
    body = lines.splitlines(keepends=True)[:-1]
    rows: dict[str, int] = {}
    name = ""
    for line in body[1:]:
        if line.startswith(b"{"):
            name = json.loads(line)["table"]
            rows[name] = 0
        else:
            rows[name] += 1
    digest = xxhash.xxh3_64(b"".join(body)).hexdigest()
    return gzip.compress(b"".join(body) + json.dumps({"end": {"rows": rows, "checksum": f"xxh3:{digest}"}}).encode())


DAMAGES = [
    cut, cut_in_half, changed, of_another_program, no_file_of_ours, with_other_rows, without_its_end,
    with_something_behind, of_a_later_form, of_a_later_schema, with_unknown_columns, empty,
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "damage"),
    # Most of it is refused before a database is asked for anything.
    [*((SQLITE, damage) for damage in DAMAGES), (POSTGRESQL, cut), (POSTGRESQL, with_unknown_columns)],
)
def test_what_is_no_whole_backup_is_refused_and_leaves_no_book(
    backed_up: Path, kind: str, damage: Callable[[bytes], bytes], target: Callable[[str], str], tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(damage(backed_up.read_bytes()))
    to = target(kind)
    with pytest.raises(BackupInvalid):
        lakebook.restore_book(wrong, to)
    with pytest.raises(lakebook.LakebookError):
        opened(to)
    assert not (Path(to) / "registry.db").exists()
    lakebook.restore_book(backed_up, to)
    with opened(to) as book:
        assert book.table("numbers").count() == 3


def test_a_file_that_is_not_there_is_no_backup(tmp_path: Path) -> None:
    with pytest.raises(BackupInvalid, match="No such file"):
        lakebook.restore_book(tmp_path / "nothing", tmp_path / "book")


#: Columns of a book that came with 0013 and with 0017.
LATER = ("backup_at", "restored_at", "held_at", "store_backup_at", "store_restored_at")


@pytest.mark.parametrize("kind", KINDS)
def test_a_backup_of_an_older_schema_is_brought_up_to_date(
    backed_up: Path, kind: str, target: Callable[[str], str], tmp_path: Path
) -> None:
    lines = gzip.decompress(backed_up.read_bytes()).splitlines(keepends=True)
    # As revision 0012 would have written it: it had a table less, and its book five columns less.
    lines[0] = lines[0].replace(f'"revision":"{HEAD}"'.encode(), b'"revision":"0012"')
    place = next(number for number, line in enumerate(lines) if line.startswith(b'{"table":"book"'))
    said, row = json.loads(lines[place]), json.loads(lines[place + 1])
    kept = [n for n, (name, _) in enumerate(said["columns"]) if name not in LATER]
    said["columns"] = [said["columns"][n] for n in kept]
    lines[place] = json.dumps(said).encode() + b"\n"
    lines[place + 1] = json.dumps([row[n] for n in kept]).encode() + b"\n"
    gaps = next(number for number, line in enumerate(lines) if line.startswith(b'{"table":"known_gaps"'))
    with pytest.raises(BackupInvalid, match="known_gaps"):
        lakebook.restore_book(write(tmp_path / "too new", sealed(b"".join(lines))), target(kind))
    assert lines.pop(gaps)
    assert lines[gaps].startswith(b"{")
    lakebook.restore_book(write(tmp_path / "old", sealed(b"".join(lines))), to := target(kind))
    with opened(to) as book:
        assert book.table("numbers").count() == 3
        assert book.restored is not None
        assert book.restored.held_at is not None
        assert book.verify().ok


@on_both
def test_nothing_is_restored_over_a_book(place: Place, backed_up: Path) -> None:
    book = place.open()
    book.metadata.create_topic("mine")
    with pytest.raises(BookExists):
        lakebook.restore_book(backed_up, place.target)
    assert [topic.name for topic in book.metadata.list_topics().items] == ["mine"]


# --- the life after ------------------------------------------------------------------


def restored_beside(book: Book, file: Path, to: str) -> Book:
    book.backup(file)
    lakebook.restore_book(file, to)
    # So late that every grace has passed, also that of outside engines.
    clock = ManualClock(SystemClock().now_ms() + 5 * 86_400_000)
    return lakebook.open(to, clock=clock, create=False, publish="off", temporary_file_grace=0, sweep_grace=0)


@on_both
def test_a_restored_book_removes_nothing_until_it_is_told_to(
    place: Place, target: Callable[[str], str], tmp_path: Path
) -> None:
    book = place.open(temporary_file_grace=0)
    table = numbers(book, "numbers", [1], [2], [3])
    table.delete("id >= 1")
    book.metadata.create_topic("orders", retention_ms=1)
    append(book, "a")
    with restored_beside(book, tmp_path / "backup", target(place.kind)) as restored:
        before = objects(restored)
        cleaner = restored.cleaner
        for work in (
            lambda: cleaner.expire(seconds=0, versions=1),
            cleaner.delete_expired_temporary_files,
            cleaner.sweep,
            cleaner.empty_dropped,
        ):
            with pytest.raises(BookHeld):
                work()
        done = Janitor(restored.lake).run_once()
        held = {name for name, what in done.items() if "held" in what}
        assert set(done) - held == {"debts", "events", "upkeep"} | ({"checkpoint"} & set(done))
        restored.maintain(["snapshotter"], spark=None)
        restored.repair()
        assert any("resume-after-restore" in text for text in restored.overview().warnings)
        assert [path for path in objects(restored) if not path.startswith("checkpoints/")] == before
        assert list(restored.metadata.each_segment("orders", 0)) != []
        assert cleaner.expire(seconds=0, versions=1, dry_run=True).files == 3
        assert restored.resume_after_restore()
        assert not restored.resume_after_restore()
        assert restored.overview().warnings == ()
        cleaner.expire(seconds=0, versions=1)
        assert cleaner.delete_expired_temporary_files().files == 3
        assert Janitor(restored.lake).run_once("retention")["retention"]["records"] == 1
        assert restored.verify().ok


@on_both
def test_what_was_open_when_the_backup_was_taken_is_never_swept(
    place: Place, target: Callable[[str], str], tmp_path: Path
) -> None:
    book = place.open()
    table = numbers(book, "numbers", [1])
    table.publish()
    book.metadata.create_topic("orders")
    turn = book.metadata.claim_append("orders", 0)
    with Attempt(book.lake, table.record) as attempt:
        path = f"{attempt.folder}/open.parquet"
        book.lake.store.put_new(path, b"rows")
        book.lake.store.put_new(f"{turn.folder}/open.parquet", b"records")
        outside = f"iceberg/{table.record.table_uuid}/data/open.parquet"
        book.lake.store.put_new(outside, b"rows of another engine")
        to = target(place.kind)
        with restored_beside(book, tmp_path / "backup", to) as restored:
            found = restored.verify()
            assert found.ok
            assert sum("not committed when the backup was taken" in text for text in found.unfinished) == 3
            restored.resume_after_restore()
            restored.cleaner.sweep()
            restored.cleaner.sweep()
            janitor = Janitor(restored.lake)
            for _ in range(3):
                janitor.run_once()
            restored.repair()
            assert {path, outside, f"{turn.folder}/open.parquet"} <= set(objects(restored))
            assert restored.verify().ok
            assert restored.verify().unfinished == found.unfinished
    assert path not in objects(book)


@pytest.mark.parametrize("ahead", [timedelta(hours=1), timedelta(hours=-1)])
def test_nothing_that_was_there_is_swept_from_a_bucket_whose_clock_is_another_one(
    ahead: timedelta, buckets: Buckets, tmp_path: Path
) -> None:
    with closing(FaultProxy(buckets.endpoint, ahead=ahead)) as store:
        reached = {**buckets.settings, "s3_endpoint": store.endpoint}
        warehouse = f"s3://{buckets.new_bucket()}/lake"
        with lakebook.open(tmp_path / "book", warehouse=warehouse, publish="off", **reached) as book:
            table = numbers(book, "numbers", [1])
            book.metadata.create_topic("orders")
            turn = book.metadata.claim_append("orders", 0)
            with Attempt(book.lake, table.record) as attempt:
                for folder in (attempt.folder, turn.folder):
                    book.lake.store.put_new(f"{folder}/open.parquet", b"written before the backup")
                book.backup(tmp_path / "backup")
                _another_second(book)
                insert(table, {"id": 2})
                for folder in (attempt.folder, turn.folder):
                    book.lake.store.put_new(f"{folder}/late.parquet", b"written since")
                there = set(objects(book))
                # In the same second as the last of them, and whole seconds are all that a bucket tells.
                lakebook.restore_book(tmp_path / "backup", tmp_path / "restored", **reached)
                attempt.outcome_unknown = True  # The former life ends here, without any tidying up.
        clock = ManualClock(SystemClock().now_ms() + 5 * 86_400_000)
        given = {"temporary_file_grace": 0, "sweep_grace": 0, "publish": "off", **reached}
        with lakebook.open(tmp_path / "restored", clock=clock, create=False, **given) as restored:
            found = restored.verify()
            assert found.ok
            for text, names in (("newer than the backup", 3), ("not committed when the backup was taken", 2)):
                assert sum(text in line for line in found.unfinished) == names, found.unfinished
            restored.resume_after_restore()
            _another_second(restored)
            # What it has left itself, and is known to nobody, goes.
            with Attempt(restored.lake, restored.table("numbers").record) as own:
                restored.lake.store.put_new(f"{own.folder}/own.parquet", b"rows")
                own.outcome_unknown = True
            clock.advance(86_400)
            for _ in range(3):
                restored.cleaner.sweep()
                Janitor(restored.lake).run_once()
            restored.repair()
            assert _data(restored) == there
            assert restored.verify().unfinished == found.unfinished
        # Nor when this registry is lost too, and made anew from what lies there.
        rebuild_book(warehouse, tmp_path / "rebuilt", **reached)
        with lakebook.open(tmp_path / "rebuilt", clock=clock, create=False, **given) as rebuilt:
            assert rebuilt.verify().ok
            rebuilt.resume_after_restore()
            for _ in range(3):
                rebuilt.cleaner.sweep()
                Janitor(rebuilt.lake).run_once()
            assert _data(rebuilt) == there


def _data(book: Book) -> set[str]:
    return {path for path in objects(book) if not path.startswith("checkpoints/")}


def _another_second(book: Book) -> None:
    """Wait until the store dates what comes later than all that is there."""
    newest = max(item.modified for item in book.lake.store.list())
    while book.lake.store.now() <= newest:
        time.sleep(0.05)


def test_a_warehouse_that_does_not_answer_is_no_reason_for_no_backup(tmp_path: Path) -> None:
    with lakebook.open(tmp_path / "book", publish="off") as book:
        table = numbers(book, "numbers", [1])
        before = answers(book)
        (tmp_path / "book" / "warehouse").rename(tmp_path / "away")
        (tmp_path / "book" / "warehouse").write_text("no folder")
        book.backup(tmp_path / "backup")
    (tmp_path / "book" / "warehouse").unlink()
    (tmp_path / "away").rename(tmp_path / "book" / "warehouse")
    lakebook.restore_book(tmp_path / "backup", tmp_path / "restored")
    with opened(str(tmp_path / "restored")) as restored:
        assert answers(restored) == before
        assert restored.table("numbers").id == table.id
        assert restored.restored is not None
        assert restored.restored.store_backup_at is None
        assert restored.verify().findings == ()


@on_both
def test_verify_names_what_happened_to_the_warehouse_since(
    place: Place, target: Callable[[str], str], tmp_path: Path
) -> None:
    book = place.open(temporary_file_grace=0, published_grace=60)
    table = numbers(book, "numbers", [1], [2])
    table.publish()
    book.metadata.create_topic("orders")
    send(book, "a")
    book.backup(tmp_path / "backup")
    before = set(objects(book))
    # The life that goes on: a row more, one file gone, records at offsets that the restored book gives once more.
    insert(table, {"id": 3})
    table.publish()
    send(book, "b")
    (segment, _) = book.metadata.each_segment("orders", 0)
    book.lake.store.delete_one(segment.s3_key)
    lost = table.plan().files[0].file_path
    book.lake.store.delete_one(lost)
    newer = set(objects(book)) - before
    assert len(newer) >= 4
    lakebook.restore_book(tmp_path / "backup", to := target(place.kind))
    with opened(to) as restored:
        found = restored.verify()
        gone = {finding.on for finding in found.findings if "deleted since the backup" in finding.what}
        assert gone == {segment.s3_key, lost} == {finding.on for finding in found.findings}
        named = {text.partition(":")[0] for text in found.unfinished if "newer than the backup" in text}
        assert named == newer
        # It goes on beside them: nothing that it writes touches what it does not know.
        send(restored, "c")
        insert(restored.table("numbers"), {"id": 30})
        restored.resume_after_restore()
        Janitor(restored.lake).run_once()
        assert newer <= set(objects(restored))


def test_a_registry_that_was_lost_is_restored_to_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with lakebook.open(folder, publish="off") as book:
        numbers(book, "numbers", [1, 2])
        book.backup(tmp_path / "backup")
        before = answers(book)
    for path in folder.glob("registry.db*"):
        path.unlink()
    report = lakebook.restore_book(tmp_path / "backup", folder)
    assert report.warehouse == str(folder / "warehouse")
    with opened(str(folder)) as restored:
        assert restored.identity.warehouse == "warehouse"
        assert answers(restored) == before
        assert abs(restored.restored.held_at.timestamp() * 1000 - SystemClock().now_ms()) < 60_000  # type: ignore[union-attr]
