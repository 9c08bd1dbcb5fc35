"""A registry that is lost comes back from the warehouse, and what cannot come back is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import lakebook
from books import SQLITE, Postgres
from buckets import Buckets
from lake import insert, numbers, run_sql
from lakebook import Book
from lakebook.components.janitor import Janitor
from lakebook.config import load_settings
from lakebook.errors import BookNotFound, InvalidSetting, RegistryNotEmpty, VersionExpired
from lakebook.recovery.checkpoints import list_checkpoints
from lakebook.registry import checkpoints
from lakebook.registry.databases import database_for
from lakebook.registry.migrate import revision_of
from lakebook.streams.mirroring import bring_up_to_date
from rebuilding import (
    Loss,
    answers,
    checkpoint,
    records_of,
    rows_of_version,
    stray_segment,
    table_answers,
)
from streaming import produce

TOPIC = "orders"


@pytest.fixture
def book(loss: Loss) -> Book:
    return loss.open()


def require_sound(book: Book) -> tuple[str, ...]:
    found = book.verify()
    assert found.ok, found.findings
    return found.unfinished


# --- everything that was known ----------------------------------------------------


def make_some_of_everything(book: Book) -> None:
    book.metadata.create_topic(TOPIC, 2, retention_ms=10**12, config={"iceberg": "true"})
    book.metadata.create_topic("clicks")
    book.metadata.ensure_consumer_group("readers")
    for number in range(4):
        produce(book, TOPIC, number % 2, f"{number}.0", f"{number}.1")
    produce(book, "clicks", 0, "a", "b", "c")
    book.metadata.commit_offset("readers", TOPIC, 1, 3, metadata="so far")
    table = book.tables.create("words", "id BIGINT, word STRING, part BIGINT, weight DOUBLE", partition_by=["part"])
    rows = ({"id": n, "word": f"w{n}", "part": n % 2, "weight": float("nan") if n == 3 else n / 2} for n in range(12))
    insert(table, *rows)
    insert(table, {"id": 100, "word": "ünï 🎈", "part": 5, "weight": None})
    table.publish()
    table.tag("first")
    with table.update_schema() as change:
        change.add_column("extra", "STRING")
    insert(table, {"id": 101, "word": None, "part": 0, "weight": 1.0, "extra": "e"})
    table.delete("part = 1")
    table.set_properties(owner="me")
    table.publish()
    insert(table, {"id": 102, "word": "not published", "part": 0, "weight": 2.0, "extra": None})
    lines = book.tables.create("lines", "id BIGINT", format="json")
    assert lines.record.format == "json"
    numbers(book, "plain", [1, 2], [3])
    numbers(book, "dropped", [1])
    book.tables.drop("dropped")
    bring_up_to_date(book.lake, "topics", TOPIC)


def test_everything_answers_the_same_that_a_checkpoint_has(loss: Loss, book: Book) -> None:
    make_some_of_everything(book)
    checkpoint(book)
    before, identity = answers(book), book.identity
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    assert again.identity.book_id == identity.book_id == report.book_id
    assert again.identity.epoch != identity.epoch
    assert answers(again) == before
    require_sound(again)
    assert report.is_complete, report.unknown
    assert (len(report.tables), len(report.topics), report.groups) == (4, 2, 1)


def test_what_was_published_after_the_checkpoint_comes_back_too(loss: Loss, book: Book) -> None:
    make_some_of_everything(book)
    checkpoint(book)
    words = book.table("words")
    with words.update_schema() as change:
        change.add_column("later", "BIGINT")
    insert(words, {"id": 200, "word": "late", "part": 2, "weight": 9.0, "extra": None, "later": 7})
    insert(words, {"id": 201, "word": "later", "part": 2, "weight": 9.0, "extra": None, "later": 8})
    words.set_properties(owner="you")
    words.publish()
    new = numbers(book, "new", [5, 6])
    new.publish()
    produce(book, TOPIC, 0, "after")
    before = {name: rows_of_version(book.table(name)) for name in ("words", "plain", "new")}
    records, version = records_of(book, TOPIC), words.record.version
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    require_sound(again)
    assert {name: rows_of_version(again.table(name)) for name in ("words", "plain")} | {
        "new": rows_of_version(again.table(f"recovered_{new.id}", namespace="recovered"))
    } == before
    assert records_of(again, TOPIC) == records
    found = again.table("words")
    assert found.record.version == version
    assert dict(found.metadata.properties)["owner"] == "you"
    # Both inserts became one snapshot, and which file came first only the registry knew.
    with pytest.raises(VersionExpired):
        found.to_arrow(version=version - 1)
    assert any("its name" in text for text in report.unknown)
    assert any("words" in text for text in report.unproven)


def test_the_book_goes_on(loss: Loss, book: Book) -> None:
    make_some_of_everything(book)
    checkpoint(book)
    snapshots = {item.snapshot_id: item.sequence_number for item in book.table("words").snapshots()}
    again = loss.after()
    words = again.table("words")
    newest = words.record.version
    report = insert(words, {"id": 300, "word": "new", "part": 0, "weight": 0.5, "extra": None})
    assert report.version == newest + 1
    words.publish()
    assert {item.snapshot_id for item in words.snapshots()} > snapshots.keys()
    assert max(item.sequence_number for item in words.snapshots()) > max(snapshots.values())
    scanned = again.catalog().load_table("default.words").scan().to_arrow()
    assert scanned.num_rows == words.count() == words.to_arrow().num_rows
    acknowledged = produce(again, TOPIC, 0, "next")
    assert acknowledged.base_offset == 4
    again.metadata.commit_offset("readers", TOPIC, 1, 4)
    require_sound(again)


def test_a_producer_goes_on_with_its_sequence(loss: Loss, book: Book) -> None:
    book.metadata.create_topic(TOPIC)
    with book.producer(TOPIC, producer_id="p") as producer:
        producer.send(b"one")
    checkpoint(book)
    with book.producer(TOPIC, producer_id="p") as producer:
        producer.send(b"two")
    again = loss.after()
    with again.producer(TOPIC, producer_id="p") as producer:
        assert producer.epoch == 2
        producer.send(b"three")
    assert records_of(again, TOPIC) == {0: [(0, b"one"), (1, b"two"), (2, b"three")]}


# --- what cannot be known ----------------------------------------------------------


def test_without_a_checkpoint_what_describes_itself_comes_back(loss: Loss, book: Book) -> None:
    make_some_of_everything(book)
    book.table("plain").publish()
    before = {
        "plain": rows_of_version(book.table("plain")),
        "words": rows_of_version(book.table("words"), book.table("words").record.version - 1),
    }
    records = records_of(book, TOPIC)
    ids = {name: book.table(name).id for name in before}
    topic = book.metadata.get_topic(TOPIC)
    assert topic is not None
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    require_sound(again)
    assert report.checkpoint is None and not report.is_complete
    for name, rows in before.items():
        assert rows_of_version(again.table(f"recovered_{ids[name]}", namespace="recovered")) == rows
    assert records_of(again, f"recovered_{topic.id}") == records
    assert any(item.path.startswith("data/") for item in report.left)


def delete_what_nobody_needs(book: Book) -> None:
    """Empty dropped tables, and delete their files as if every grace had passed."""
    book.cleaner.empty_dropped()
    run_sql(book, "UPDATE temporary_files SET expiration = 0")
    assert not book.cleaner.delete_expired_temporary_files(wait=False).failed


@pytest.mark.parametrize("is_known", [True, False])
def test_the_table_of_a_topic_that_no_checkpoint_has_is_made_anew(loss: Loss, book: Book, is_known: bool) -> None:
    book.metadata.create_topic(TOPIC)
    plain = numbers(book, "plain", [1])
    for number in range(3):
        produce(book, TOPIC, 0, f"{number}")
    if is_known:
        checkpoint(book)
    # Only now: the checkpoint has the topic, and not its table.
    book.metadata.update_topic_config(TOPIC, {"iceberg": "true"})
    bring_up_to_date(book.lake, "topics", TOPIC)
    shown = book.table(TOPIC, namespace="topics")
    for table in (shown, plain):
        table.publish()
    location = f"iceberg/{shown.record.table_uuid}"
    records = records_of(book, TOPIC)
    loss.lose()
    report = loss.rebuild()
    (said,) = [text for text in report.unknown if text.startswith(f"table at {location}")]
    assert "is made anew" in said
    again = loss.open()
    again.resume_after_restore()
    spaces = [space.name for space in again.tables.list_namespaces().items]
    tables = [(item.namespace, item.name) for name in spaces for item in again.tables.list(name).items]
    assert tables == ([("default", "plain")] if is_known else [("recovered", f"recovered_{plain.id}")])
    (topic,) = again.metadata.list_topics().items
    again.metadata.update_topic_config(topic.name, {"iceberg": "true"})
    bring_up_to_date(again.lake, "topics", topic.name)
    assert again.table(topic.name, namespace="topics").count() == 3
    again.metadata.update_topic_config(topic.name, {"iceberg": "false"})
    bring_up_to_date(again.lake, "topics", topic.name)
    delete_what_nobody_needs(again)
    assert records_of(again, topic.name) == records
    require_sound(again)


def test_a_segment_outlives_every_table_that_has_its_file(book: Book) -> None:
    """Older releases have rebuilt tables of topics as ordinary ones."""
    book.metadata.create_topic(TOPIC, config={"iceberg": "true"})
    produce(book, TOPIC, 0, "a", "b")
    bring_up_to_date(book.lake, "topics", TOPIC)
    before = records_of(book, TOPIC)
    run_sql(book, "UPDATE tables SET topic_id = NULL")
    run_sql(book, "DELETE FROM mirror_positions")
    book.tables.drop(TOPIC, namespace="topics")
    delete_what_nobody_needs(book)
    assert records_of(book, TOPIC) == before
    # What was changed behind the book's back, no event tells.
    assert [item for item in book.verify().findings if item.check != "events"] == []


def test_a_torn_checkpoint_is_told_of_and_the_one_before_it_is_used(loss: Loss, book: Book) -> None:
    table = numbers(book, "plain", [1])
    good = checkpoint(book)
    insert(table, {"id": 2})
    torn = checkpoint(book)
    data = book.lake.store.read(torn)
    book.lake.store.delete([torn])
    book.lake.store.put_new(torn, data[: len(data) - 7])
    loss.lose()
    report = loss.rebuild()
    assert (report.checkpoint, [path for path, _ in report.torn_checkpoints]) == (good, [torn])
    assert rows_of_version(loss.open().table("plain")) == ["{'id': 1}"]
    # The file of the second insert is nobody's now. It is left alone, and named.
    assert [item.why.partition(":")[0] for item in report.left] == ["of table default.plain"]


def test_segments_that_contradict_each_other_are_not_chosen_from(
    loss: Loss, book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    book.metadata.create_topic(TOPIC)
    produce(book, TOPIC, 0, "a", "b")
    checkpoint(book)
    first = stray_segment(book, TOPIC, 0, 2, "c", "d")
    second = stray_segment(book, TOPIC, 0, 2, "x", "y", "z")
    after = stray_segment(book, TOPIC, 0, 5, "e")
    loss.lose()
    report = loss.rebuild()
    (contested,) = report.contested
    assert set(contested.paths) == {first, second}
    assert (contested.first, contested.last) == (2, 4)
    assert [(hole.first, hole.last, hole.why) for hole in report.holes] == [(2, 4, "several files claim them")]
    again = loss.open()
    with caplog.at_level(logging.WARNING):
        assert records_of(again, TOPIC) == {0: [(0, b"a"), (1, b"b"), (5, b"e")]}
    assert "from 2 to 5" in caplog.text
    assert any("the records 2 to 4 are lost" in text for text in require_sound(again))
    # Nobody gets their offsets again, and all files are where they were.
    assert produce(again, TOPIC, 0, "f").base_offset == 6
    assert all(again.lake.store.size(path) for path in (first, second, after))
    require_sound(again)


def test_a_checkpoint_proves_which_of_two_segments_counted(loss: Loss, book: Book) -> None:
    book.metadata.create_topic(TOPIC)
    produce(book, TOPIC, 0, "a", "b")
    rival = stray_segment(book, TOPIC, 0, 0, "x", "y", "z")
    checkpoint(book)
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    assert records_of(again, TOPIC) == {0: [(0, b"a"), (1, b"b")]}
    assert not report.contested and not report.holes
    assert [item.path for item in report.left] == [rival]
    assert produce(again, TOPIC, 0, "c").base_offset == 2


def test_a_merge_and_what_it_was_made_of_are_the_same_records(loss: Loss, book: Book) -> None:
    book.metadata.create_topic(TOPIC, config={"iceberg": "true"})
    for number in range(4):
        produce(book, TOPIC, 0, f"{number}")
    bring_up_to_date(book.lake, "topics", TOPIC)
    checkpoint(book)
    whole = stray_segment(book, TOPIC, 0, 0, "0", "1", "2", "3", folder="m-1")
    before = records_of(book, TOPIC)
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    assert records_of(again, TOPIC) == before
    assert not report.contested and not report.holes
    # Times differ, so that it is no merge of these: the checkpoint knows better.
    assert [item.path for item in report.left] == [whole]
    require_sound(again)


def test_segments_whose_files_are_gone_are_holes_that_readers_skip(loss: Loss, book: Book) -> None:
    book.metadata.create_topic(TOPIC)
    lost = [produce(book, TOPIC, 0, *values) for values in (("a",), ("b", "c"), ("d",), ("e",))]
    checkpoint(book)
    for number in (1, 3):
        book.lake.store.delete([lost[number].s3_key])
    loss.lose()
    report = loss.rebuild()
    assert [(hole.first, hole.last) for hole in report.holes] == [(1, 2), (4, 4)]
    again = loss.open()
    assert records_of(again, TOPIC) == {0: [(0, b"a"), (3, b"d")]}
    require_sound(again)
    assert produce(again, TOPIC, 0, "f").base_offset == 5
    with again.consumer(TOPIC, start="earliest") as consumer:
        while len(consumer.poll(1.0)) or not consumer.skipped:
            pass
    require_sound(again)


def test_metadata_that_two_claim_to_follow_is_contested(loss: Loss, book: Book) -> None:
    table = numbers(book, "plain", [1])
    table.publish()
    checkpoint(book)
    insert(table, {"id": 2})
    table.publish()
    location = table.metadata_location
    assert location is not None
    store = book.lake.store
    path = store.relative(location)
    attempts, _, name = path.rsplit("/", 2)
    number = name.partition("-")[0]
    rival = f"{attempts}/{'0' * 32}/{number}-00000000-0000-4000-8000-000000000000.metadata.json"
    store.put_new(rival, store.read(path))
    loss.lose()
    report = loss.rebuild()
    (contested,) = report.contested
    assert set(contested.paths) == {path, rival}
    again = loss.open()
    assert rows_of_version(again.table("plain")) == ["{'id': 1}"]
    require_sound(again)


# --- the place ----------------------------------------------------------------------


def test_a_place_with_a_book_is_refused(loss: Loss, book: Book) -> None:
    numbers(book, "plain", [1])
    with pytest.raises(RegistryNotEmpty):
        loss.rebuild()
    with pytest.raises(InvalidSetting):
        lakebook.rebuild_book(f"{loss.warehouse}/nothing", loss.target)


def test_a_warehouse_with_nothing_of_a_book_is_refused_and_nothing_is_made(
    loss: Loss, book: Book, tmp_path: Path
) -> None:
    numbers(book, "plain", [1])
    checkpoint(book)
    before = answers(book)
    loss.lose()
    (tmp_path / "nothing").mkdir()
    # Files of tables alone say neither of which table they are nor whether they count.
    (tmp_path / "other" / "data" / "1").mkdir(parents=True)
    (tmp_path / "other" / "data" / "1" / "a.parquet").write_bytes(b"rows")
    (tmp_path / "other" / "topics.txt").write_text("no segment")
    for name in ("nothing", "other"):
        with pytest.raises(InvalidSetting, match="Name the warehouse of a book"):
            lakebook.rebuild_book(tmp_path / name, loss.target)
    with pytest.raises(InvalidSetting, match="'warehouse' below"):
        lakebook.rebuild_book(Path(loss.warehouse).parent, loss.target)
    with pytest.raises(InvalidSetting):
        lakebook.rebuild_book(tmp_path / "nothing", tmp_path / "fresh" / "book")
    assert not (tmp_path / "fresh").exists()
    assert list(Path(loss.warehouse).parent.glob("registry.db*")) == []
    assert loss.kind == SQLITE or revision_of(database_for(load_settings(loss.target, {}))) is None
    with pytest.raises(BookNotFound):
        loss.open(create=False)
    assert loss.rebuild().is_complete
    assert answers(loss.open()) == before


@pytest.mark.parametrize("above", ["topics/1/0/t1", "iceberg/1b4e28ba-2fa1-4d3b-a1e5-000000000001/metadata/0"])
def test_what_a_book_could_be_made_of_is_tried(loss: Loss, tmp_path: Path, above: str) -> None:
    place = tmp_path / "left" / above
    place.mkdir(parents=True)
    (place / "00001-1b4e28ba-2fa1-4d3b-a1e5-000000000002.metadata.json").write_bytes(b"torn")
    report = lakebook.rebuild_book(tmp_path / "left", loss.target)
    assert not report.is_complete
    assert report.unknown


def test_a_rebuilt_book_is_rebuilt_again(loss: Loss, book: Book) -> None:
    make_some_of_everything(book)
    checkpoint(book)
    before = {name: table_answers(book, name) for name in ("words", "plain")}
    again = loss.after()
    checkpoint_of_second = checkpoint(again)
    assert list_checkpoints(again.lake.store)[0] == checkpoint_of_second
    third = loss.after()
    assert {name: table_answers(third, name) for name in ("words", "plain")} == before
    require_sound(third)


# --- checkpoints ----------------------------------------------------------------------


def test_the_janitor_writes_a_checkpoint_when_something_changed_and_keeps_a_few(loss: Loss) -> None:
    book = loss.open(checkpoints_kept=2)
    janitor = Janitor(book.lake)
    assert janitor.run_once("checkpoint") == {"checkpoint": {"checkpoints": 0}}
    table = numbers(book, "plain", [1])
    paths = []
    for number in range(3):
        insert(table, {"id": number})
        paths.append(janitor.run_once("checkpoint")["checkpoint"]["path"])
        assert janitor.run_once("checkpoint") == {"checkpoint": {"checkpoints": 0}}
    assert list_checkpoints(book.lake.store) == paths[:0:-1]
    assert "checkpoint" not in Janitor(loss.open(checkpoint_interval=0).lake).run_once()


# --- a warehouse in a bucket ---------------------------------------------------------


def test_the_registry_of_a_book_in_a_bucket_is_rebuilt_and_restored(
    buckets: Buckets, postgres: Postgres, tmp_path: Path
) -> None:
    place: dict[str, Any] = {"warehouse": f"s3://{buckets.new_bucket()}/lake", "publish": "off", **buckets.settings}
    with lakebook.open(postgres.new_database(with_book=False), **place) as book:
        make_some_of_everything(book)
        checkpoint(book)
        before = answers(book)
        book.backup(tmp_path / "backup")
    rebuilt = tmp_path / "rebuilt"
    # Beside it, and above it.
    for wrong in (f"{place['warehouse']}s", place["warehouse"].removesuffix("/lake")):
        with pytest.raises(InvalidSetting, match="Name the warehouse of a book"):
            lakebook.rebuild_book(wrong, rebuilt, **buckets.settings)
    assert not rebuilt.exists()
    report = lakebook.rebuild_book(place["warehouse"], rebuilt, **buckets.settings)
    assert report.is_complete, report.unknown
    with lakebook.open(rebuilt, create=False, **place) as again:
        assert answers(again) == before
        require_sound(again)
    restored = postgres.new_database(with_book=False)
    lakebook.restore_book(tmp_path / "backup", restored, **buckets.settings)
    with lakebook.open(restored, create=False, **place) as again:
        assert answers(again) == before
        require_sound(again)


def test_pending_files_are_all_in_a_checkpoint_however_many_they_are(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_PAGE", 2)
    book = loss.open()
    table = numbers(book, "t", *([number] for number in range(5)))
    table.publish()
    for number in range(5, 12):
        insert(table, {"id": number})
    # Whole files: those that are published, and some that are not.
    table.delete("id < 7")
    checkpoint(book)
    before = answers(book)
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    assert report.is_complete, report.unknown
    assert answers(again) == before
    assert sorted(again.table("t").to_arrow()["id"].to_pylist()) == [7, 8, 9, 10, 11]
