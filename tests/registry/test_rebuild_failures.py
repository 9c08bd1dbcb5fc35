"""A rebuild where the store fails, where others lie beside the book, and where objects say what cannot be."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lake import insert, lay, numbers, records
from lakebook import Book
from lakebook.clock import ManualClock
from lakebook.components.janitor import Janitor
from lakebook.errors import EpochChanged, LakebookError, RegistryUnfinished, StorageRefused, StorageUnavailable
from lakebook.lake.table import Table
from lakebook.recovery.checkpoints import forget_checkpoints, list_checkpoints, read_checkpoint, write_checkpoint
from lakebook.registry import schema
from lakebook.storage.answers import ObjectInfo
from lakebook.storage.objects import ObjectStore
from lakebook.streams.segment_files import stamped, store_segment
from mirrored import content, info, stored
from rebuilding import Loss, answers, checkpoint, record_table, records_of, rows_of_version, stray_segment
from streaming import produce

TOPIC = "orders"


@pytest.fixture
def book(loss: Loss) -> Book:
    return loss.open()


# --- a store that fails ------------------------------------------------------------

#: Objects, by how they are read and by their paths.
Which = Callable[[str, str], bool]
KINDS: dict[str, Which] = {
    "checkpoint": lambda how, path: path.endswith(".lbc"),
    "metadata": lambda how, path: path.endswith("-v2.metadata.json"),
    "manifest list": lambda how, path: path.endswith(".avro") and "/snap-" in path,
    "manifest": lambda how, path: path.endswith(".avro") and "/snap-" not in path,
    "footer of a file": lambda how, path: path.startswith("data/") and how == "ranges",
    "bytes of a file": lambda how, path: path.startswith("data/") and how == "checksum",
    "footer of a segment": lambda how, path: path.startswith("topics/") and how == "ranges",
    "records of a segment": lambda how, path: path.startswith("topics/") and how == "open",
    "bytes of a segment": lambda how, path: path.startswith("topics/") and how == "checksum",
}


class Broken(io.RawIOBase):
    """A file that was opened, and of which nothing comes."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return 10**6 + offset if whence == 2 else offset

    def tell(self) -> int:
        return 10**6

    def readinto(self, _buffer: Any) -> int:
        raise self._error


@contextmanager
def failing_store(which: Which, error: type[LakebookError]) -> Iterator[list[str]]:
    """Have a store fail on some objects; the paths of those that were wanted."""
    asked: list[str] = []

    def fail(how: str, path: str) -> LakebookError | None:
        if not which(how, path):
            return None
        asked.append(path)
        return error("the storage says no", on=path)

    def failing(how: str, former: Any) -> Any:
        def call(self: ObjectStore, path: Any, *given: Any) -> Any:
            for item in [path] if isinstance(path, str) else path:
                if (wrong := fail(how, item)) is not None:
                    if how == "open":
                        return Broken(wrong)
                    raise wrong
            return former(self, path, *given)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, how in (
            ("read", "read"),
            ("read_ranges", "ranges"),
            ("open", "open"),
            ("checksum", "checksum"),
            ("measure", "checksum"),
        ):
            patch.setattr(ObjectStore, name, failing(how, getattr(ObjectStore, name)))
        yield asked


@pytest.mark.parametrize("error", [StorageUnavailable, StorageRefused])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_store_that_fails_ends_a_rebuild_and_the_next_one_has_everything(
    loss: Loss, book: Book, kind: str, error: type[LakebookError]
) -> None:
    table = numbers(book, "plain", [1])
    table.publish()
    book.metadata.create_topic(TOPIC)
    produce(book, TOPIC, 0, "a", "b")
    checkpoint(book)
    insert(table, {"id": 2})
    table.publish()
    produce(book, TOPIC, 0, "c")
    # It has other records than the one that counted: both are read to know that.
    stray_segment(book, TOPIC, 0, 0, "x", "y")
    before = answers(book)
    loss.lose()
    with failing_store(KINDS[kind], error) as asked:
        with pytest.raises(error, match="says no"):
            loss.rebuild()
        assert asked
    with pytest.raises(RegistryUnfinished):
        loss.open()
    loss.rebuild()
    assert answers(loss.open()) == before


# --- other books in the same place -----------------------------------------------


def test_a_book_below_the_root_of_another_is_left_alone(loss: Loss, book: Book) -> None:
    table = numbers(book, "plain", [1])
    table.publish()
    checkpoint(book)
    newer = numbers(book, "newer", [2])
    newer.publish()
    uuids = {table.record.table_uuid, newer.record.table_uuid}
    store = book.lake.store
    for item in list(store.list()):
        # As a book that has its warehouse there.
        store.put_new(f"second/{item.path}", store.read(item.path))
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    assert [item.name for item in again.tables.list().items] == ["plain"]
    assert [item.name for item in again.tables.list("recovered").items] == [f"recovered_{newer.id}"]
    told = [text for text in report.unknown if "second/" in text]
    assert len(told) == 2 and all(any(f"second/iceberg/{ident}" in text for text in told) for ident in uuids)
    assert not [item for item in report.contested if "second" in item.on]
    assert again.verify().ok


def test_a_table_that_lies_elsewhere_is_taken_where_the_checkpoint_says_so(loss: Loss, book: Book) -> None:
    place = book.lake.store.uri("elsewhere/mine")
    known = book.catalog().create_table("default.known", pa.schema([("id", pa.int64())]), location=place)
    known.append(pa.table({"id": [1, 2]}))
    checkpoint(book)
    other = book.lake.store.uri("elsewhere/newer")
    newer = book.catalog().create_table("default.newer", pa.schema([("id", pa.int64())]), location=other)
    newer.append(pa.table({"id": [3]}))
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    assert [item.name for item in again.tables.list().items] == ["known"]
    assert "recovered" not in {item.name for item in again.tables.list_namespaces().items}
    assert rows_of_version(again.table("known")) == ["{'id': 1}", "{'id': 2}"]
    assert [text for text in report.unknown if "elsewhere/newer" in text]
    assert again.verify().ok


# --- the order of checkpoints -----------------------------------------------------


def test_a_checkpoint_that_was_just_written_stays_whatever_clock_the_others_had(loss: Loss) -> None:
    now = round(datetime.now(UTC).timestamp() * 1000)
    ahead, here = ManualClock(now + 86_400_000), ManualClock(now)
    for number in range(3):
        former = loss.open(clock=ahead, checkpoints_kept=2)
        former.metadata.create_topic(f"former-{number}")
        checkpoint(former)
        ahead.advance(1)
    paths = []
    for number in range(3):
        book = loss.open(clock=here, checkpoints_kept=2)
        book.metadata.create_topic(f"present-{number}")
        paths.append(checkpoint(book))
        assert list_checkpoints(book.lake.store)[0] == paths[-1]
        here.advance(1)
    assert list_checkpoints(book.lake.store) == paths[:0:-1]
    before = answers(book)
    loss.lose()
    assert loss.rebuild().checkpoint == paths[-1]
    assert answers(loss.open()) == before


def test_checkpoints_of_one_moment_are_ordered_by_their_names(
    loss: Loss, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = ObjectStore.list
    late = datetime(2024, 5, 1, tzinfo=UTC)

    def listed(self: ObjectStore, prefix: str = "") -> Iterator[ObjectInfo]:
        # A copy of a warehouse, whose objects have dates in any order.
        found = list(former(self, prefix))
        return (replace(item, modified=late - timedelta(days=place)) for place, item in enumerate(found))

    monkeypatch.setattr(ObjectStore, "list", listed)
    janitor, paths = Janitor(book.lake), []
    for number in range(6):
        book.metadata.create_topic(f"t{number}")
        paths.append(janitor.run_once("checkpoint")["checkpoint"]["path"])
    assert list_checkpoints(book.lake.store) == paths[:-4:-1]


def test_a_checkpoint_of_an_older_state_never_becomes_the_newest(
    loss: Loss, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.metadata.create_topic(TOPIC)
    # The names are ahead of every clock.
    ahead = loss.open(clock=ManualClock(round(datetime.now(UTC).timestamp() * 1000) + 86_400_000))
    checkpoint(ahead)
    rival, read = loss.open(), book.lake.registry.in_snapshot
    frozen = iter([True])

    def froze(work: Any) -> Any:
        state = read(work)
        if next(frozen, False):
            # Meanwhile another janitor has had its turn.
            rival.metadata.create_topic("newer")
            checkpoint(rival)
        return state

    monkeypatch.setattr(book.lake.registry, "in_snapshot", froze)
    checkpoint(book)
    newest = read_checkpoint(book.lake.store, list_checkpoints(book.lake.store)[0])
    assert {row["name"] for row in newest.of("topics")} == {TOPIC, "newer"}


def test_who_has_a_book_open_from_a_former_life_writes_no_checkpoint_of_it(loss: Loss, book: Book) -> None:
    book.metadata.create_topic(TOPIC)
    checkpoint(book)
    former = list_checkpoints(book.lake.store)
    loss.open().begin_epoch()
    with pytest.raises(EpochChanged):
        write_checkpoint(book.lake)
    assert list_checkpoints(book.lake.store) == former


def test_what_is_named_like_no_checkpoint_is_none_and_the_one_just_written_stays(loss: Loss, book: Book) -> None:
    store = book.lake.store
    for name in ("zzz", "99991231T235959.999Z-ff", "20240231T000000.000Z-ff", "99990101T000000.000Z-", "2024²Z-ff"):
        store.put_new(f"checkpoints/{name}.lbc", b"")
    book.metadata.create_topic(TOPIC)
    first = checkpoint(book)
    book.metadata.create_topic("more")
    second = checkpoint(book)
    assert list_checkpoints(store) == [second, first]
    assert forget_checkpoints(store, 1, second) == 1
    assert list_checkpoints(store) == [second]


# --- objects that say what cannot be ------------------------------------------------


def test_segments_that_were_recorded_by_hand_may_have_the_same_names(loss: Loss, book: Book) -> None:
    book.metadata.create_topic(TOPIC, 2)
    for partition in (0, 1):
        rows = stamped(content([f"{partition}.a", f"{partition}.b"]), partition, 0)
        file = stored(book, f"{TOPIC}/{partition}/00000000000000000000.parquet", rows)
        book.metadata.add_segment(info(TOPIC, partition, file))
    checkpoint(book)
    topic = book.metadata.get_topic(TOPIC)
    assert topic is not None
    newer = []
    for partition in (0, 1):
        newer.append(f"topics/{topic.id}/{partition}/t9/same.parquet")
        batch = {"producer_id": "p", "producer_epoch": 0, "first_sequence": 2, "last_sequence": 2}
        facts = {"topic_id": topic.id, "partition": partition, "base_offset": 2, **batch}
        store_segment(book.lake.store, newer[-1], stamped(record_table(["later"]), partition, 2), facts=facts)
    own = stray_segment(book, TOPIC, 0, 3, "last")
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    assert report.is_complete, report.unknown
    assert {number: len(found) for number, found in records_of(again, TOPIC).items()} == {0: 4, 1: 3}
    ids = {row["s3_key"]: row["id"] for row in records(again, schema.segments)}
    assert len(set(ids.values())) == 5
    assert ids[own] == own.rpartition("/")[2].removesuffix(".parquet")
    # What producers are told about their last batches is the same segments.
    last = {row["partition_id"]: row["segment_id"] for row in records(again, schema.producer_batches)}
    assert last == {partition: ids[path] for partition, path in enumerate(newer)}
    assert again.verify().ok


TIMES = pa.timestamp("us", "UTC")
PLACE = {"topic_id": "1", "partition": "0", "base_offset": "3"}


def hostile_segment(book: Book, rows: pa.Table | None = None, **facts: str) -> str:
    """A file among the segments that says something of itself; its path."""
    topic = book.metadata.get_topic(TOPIC)
    assert topic is not None
    buffer = io.BytesIO()
    table = stamped(record_table(["x"]), 0, 3) if rows is None else rows
    with pq.ParquetWriter(buffer, table.schema) as writer:
        told = {**PLACE, "topic_id": str(topic.id), **facts}
        writer.add_key_value_metadata({f"lakebook.{name}": value for name, value in told.items()})
        writer.write_table(table)
    return lay(book, f"topics/{topic.id}/0/t99/{uuid.uuid4().hex}.parquet", buffer.getvalue())


def far_times() -> pa.Table:
    return pa.table({"timestamp": pa.array([2**62], pa.int64()).cast(TIMES)})


BATCH = {"producer_id": "p", "producer_epoch": "0", "first_sequence": "0", "last_sequence": "0"}
SEGMENTS: dict[str, Callable[[Book], str]] = {
    "no times": lambda book: hostile_segment(book, pa.table({"x": [1]})),
    "times that are none": lambda book: hostile_segment(book, pa.table({"timestamp": [1]})),
    "a time behind all": lambda book: hostile_segment(book, far_times()),
    "sinks as a list": lambda book: hostile_segment(book, sinks="[1]"),
    "sinks that are no JSON": lambda book: hostile_segment(book, sinks="{"),
    "a batch behind all": lambda book: hostile_segment(book, sinks='{"a":1e308}'),
    "a batch of 30 digits": lambda book: hostile_segment(book, sinks='{"a":' + "9" * 30 + "}"),
    "a batch that is none": lambda book: hostile_segment(book, sinks='{"a":true}'),
    "a sink that no database names": lambda book: hostile_segment(book, sinks=r'{"a\u0000":1}'),
    "records of 30 digits": lambda book: hostile_segment(book, batch="b", batch_records="9" * 30),
    "an offset of 30 digits": lambda book: hostile_segment(book, base_offset="9" * 30),
    "an offset that is none": lambda book: hostile_segment(book, base_offset="²"),
    "a topic of 30 digits": lambda book: hostile_segment(book, topic_id="9" * 30),
    "no topic": lambda book: hostile_segment(book, topic_id="0"),
    "a partition of 12 digits": lambda book: hostile_segment(book, partition="9" * 12),
    "a partition behind all": lambda book: hostile_segment(book, partition="10000"),
    "an epoch of 10 digits": lambda book: hostile_segment(book, **{**BATCH, "producer_epoch": "9" * 10}),
    "a sequence of 30 digits": lambda book: hostile_segment(book, **{**BATCH, "last_sequence": "9" * 30}),
    "a sequence that runs back": lambda book: hostile_segment(book, **{**BATCH, "first_sequence": "7"}),
    "a batch without an epoch": lambda book: hostile_segment(
        book, producer_id="p", first_sequence="0", last_sequence="0"
    ),
    "a producer that no database names": lambda book: hostile_segment(book, **{**BATCH, "producer_id": "p\0"}),
}
NAMES = {
    "an id that is none": "data/²/x/f",
    "an id of 20 digits": f"data/{'9' * 20}/x/f",
    "an id behind all": f"data/{'9' * 18}/x/f",
    "a topic's id that is none": "topics/²/0/t1/f",
    "a topic's id of 20 digits": f"topics/{'9' * 20}/0/t1/f",
    "a turn that is none": "topics/1/0/t²/f",
    "a turn of 20 digits": f"topics/1/0/t{'9' * 20}/f",
    "metadata of 30 digits": f"iceberg/{uuid.UUID(int=1)}/metadata/x/{'9' * 30}-{uuid.UUID(int=2)}.metadata.json",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", [*SEGMENTS, *NAMES])
def test_an_object_that_says_what_cannot_be_is_told_of_and_all_else_comes_back(
    loss: Loss, book: Book, what: str
) -> None:
    book.metadata.create_topic(TOPIC)
    produce(book, TOPIC, 0, "a", "b", "c")
    numbers(book, "plain", [1], [2]).publish()
    checkpoint(book)
    before = answers(book)
    path = SEGMENTS[what](book) if what in SEGMENTS else lay(book, NAMES[what], b"")
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    assert answers(again) == before
    assert path in {item.path for item in report.left}
    if what in SEGMENTS:
        assert any(path in text for text in report.unknown), report.unknown
    assert again.verify().ok
    # Ids and turns go on where they were.
    again.metadata.create_topic("next")
    numbers(again, "next", [3]).publish()
    produce(again, TOPIC, 0, "d")
    found = again.metadata.get_topic("next")
    assert found is not None and found.id < 10 and again.table("next").id < 10
    assert again.verify().ok


# --- metadata that says what cannot be -----------------------------------------------


def rename_metadata(book: Book, table: Table, version: int) -> None:
    """Have the newest metadata file of a table say by its name that it was written for a version."""
    location = table.metadata_location
    assert location is not None
    store = book.lake.store
    path = store.relative(location)
    store.put_new(f"{path.rpartition('-v')[0]}-v{version}.metadata.json", store.read(path))
    store.delete([path])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("told", ["none", "late", "early"])
@pytest.mark.parametrize("change", ["rows", "columns", "rows by others"])
@pytest.mark.parametrize("version", [10**18 - 1, 10**12, 10**6])
def test_a_version_that_nothing_justifies_is_not_believed(
    loss: Loss, book: Book, told: str, change: str, version: int
) -> None:
    table = numbers(book, "plain", [1])
    if told == "early":
        # The table was never published then: what is there first comes after all that is known.
        checkpoint(book)
    if told == "late":
        table.publish()
        checkpoint(book)
    if change == "rows":
        insert(table, {"id": 2})
    elif change == "columns":
        with table.update_schema() as update:
            update.add_column("more", "STRING")
    else:
        table.publish()
        book.catalog().load_table("default.plain").append(pa.table({"id": [2]}))
    table.publish()
    rows, newest = rows_of_version(table), table.record.version
    rename_metadata(book, table, version)
    loss.lose()
    report = loss.rebuild()
    again = loss.open()
    found = again.table(f"recovered_{table.id}", namespace="recovered") if told == "none" else again.table("plain")
    assert rows_of_version(found) == rows
    assert abs(found.record.version - newest) <= 1
    assert any(f"-v{version}" in text for text in report.unproven)
    insert(found, {"id": 9})
    found.publish()
    assert again.verify().ok


def test_a_snapshot_that_claims_a_version_behind_all_costs_no_memory(loss: Loss, book: Book) -> None:
    table = numbers(book, "plain", [1])
    table.publish()
    checkpoint(book)
    claimed = f"{10**12}-{10**12 + 10}"
    theirs = book.catalog().load_table("default.plain")
    theirs.append(pa.table({"id": [2]}), snapshot_properties={"lakebook.versions": claimed})
    rename_metadata(book, table, 10**12 + 10)
    loss.lose()
    loss.rebuild()
    again = loss.open()
    assert rows_of_version(again.table("plain")) == ["{'id': 1}", "{'id': 2}"]
    assert again.verify().ok


def test_what_a_snapshot_counts_may_be_any_number(loss: Loss, book: Book) -> None:
    table = numbers(book, "plain", [1])
    table.publish()
    theirs = book.catalog().load_table("default.plain")
    said = dict.fromkeys(("removed-delete-files", "removed-files-size"), "9" * 30)
    theirs.append(pa.table({"id": [2]}), snapshot_properties=said)
    loss.lose()
    loss.rebuild()
    again = loss.open()
    found = again.table(f"recovered_{table.id}", namespace="recovered")
    assert rows_of_version(found) == ["{'id': 1}", "{'id': 2}"]
    assert again.verify().ok


@pytest.mark.parametrize(
    "wrong",
    [{"last-sequence-number": 10**30}, {"last-updated-ms": 10**17}, {"last-column-id": 10**12}],
    ids=["sequence", "time", "column"],
)
def test_metadata_with_numbers_that_no_registry_holds_is_told_of(loss: Loss, book: Book, wrong: dict[str, int]) -> None:
    table = numbers(book, "plain", [1])
    table.publish()
    checkpoint(book)
    before = answers(book)
    location = table.metadata_location
    assert location is not None
    store = book.lake.store
    former = store.relative(location)
    data = orjson.loads(store.read(former)) | {"metadata-log": [{"metadata-file": location, "timestamp-ms": 1}]}
    text = orjson.dumps(data).decode()
    for name, value in wrong.items():
        text = text.replace(f'"{name}":{data[name]}', f'"{name}":{value}')
    path = f"{former.rpartition('/')[0]}/00007-{uuid.uuid4()}-v3.metadata.json"
    store.put_new(path, text.encode())
    loss.lose()
    report = loss.rebuild()
    assert any(path in item for item in report.unknown)
    again = loss.open()
    assert answers(again) == before
    assert again.verify().ok
