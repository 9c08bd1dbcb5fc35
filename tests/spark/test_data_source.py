"""The data source `lakebook`: topics and tables read, followed and written by format name alone."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField, UUIDType
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, StringType, StructField, StructType, _parse_datatype_json_value

from books import SQLITE
from lake import records
from lakebook import Book
from lakebook.errors import (
    BookNotFound,
    InvalidCursor,
    InvalidInput,
    InvalidName,
    InvalidSchema,
    InvalidSetting,
    LakebookError,
    OffsetBelowLogStart,
    OffsetBeyondWatermark,
    PartitionNotFound,
    ReadFailed,
    RecordTooLarge,
    SparkUnsuitable,
    StaleBatch,
    TableNotFound,
    TopicNotFound,
    VersionNotFound,
)
from lakebook.registry import schema
from lakebook.registry.appends import AppendTurn, release_turn
from lakebook.registry.topic_leases import list_topic_leases
from lakebook.streams.partitioners import partition_of_key
from pyspark_lakebook import DefaultSource as LakebookDataSource
from pyspark_lakebook.options import READ_TOPIC, Options, options_of
from pyspark_lakebook.streams import Followed, spread
from pyspark_lakebook.topics import topic_columns
from rebuilding import Loss, checkpoint
from spark.rows import arrow_rows, once_at, values, warehouse_of
from streaming import produce

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def folder_of(book: Book) -> str:
    return str(warehouse_of(book).parent)


def read(spark: SparkSession, book: Book, **options: Any) -> DataFrame:
    return spark.read.format("lakebook").options(book=folder_of(book), **options).load()


def source(book: Book, /, **options: str) -> LakebookDataSource:
    """The data source as Spark makes it, in this process: a new one in Spark's takes seconds."""
    return LakebookDataSource({"book": folder_of(book), **options})


def sent(thing: Any) -> Any:
    """What arrives at an executor."""
    return pickle.loads(pickle.dumps(thing))


def tables(book: Book, columns: StructType | None = None, /, **options: str) -> list[pa.Table]:
    """What each task reads."""
    made = source(book, **options)
    columns = made.schema() if columns is None else columns
    reader = made.reader(columns)
    tasks = [sent(task) for task in reader.partitions()]
    batches = [list(sent(reader).read(task)) for task in tasks]
    return [pa.Table.from_batches(some) for some in batches]


def found_by(book: Book, **options: str) -> list[tuple[int, int]]:
    """Where the records are that are read."""
    rows = [row for table in tables(book, **options) for row in table.to_pylist()]
    return sorted((row["partition"], row["offset"]) for row in rows)


def places(frame: DataFrame) -> list[tuple[int, int]]:
    return sorted((row["partition"], row["offset"]) for row in frame.collect())


def expected(*ranges: tuple[int, int, int]) -> list[tuple[int, int]]:
    return [(partition, offset) for partition, start, end in ranges for offset in range(start, end)]


def orders(book: Book) -> None:
    book.topics.create("orders", 2)
    for base in (0, 3, 6):
        produce(book, "orders", 0, *range(base, base + 3), times=[at(base + place) for place in range(3)])
    produce(book, "orders", 1, "a", "b", times=[at(0), at(5)])


def kept(book: Book, topic: str = "orders") -> list[bytes]:
    """The values of a topic, partition by partition, as a consumer reads them."""
    with book.consumer(topic, partitions=range(book.topics[topic].record.partition_count)) as consumer:
        found = []
        while records := consumer.poll(0.2):
            found += records
    assert [(record.partition, record.offset) for record in sorted(found, key=lambda r: (r.partition, r.offset))] == [
        (item.partition_id, offset)
        for item in book.topics[topic].describe().partitions
        for offset in range(item.log_start, item.high_watermark)
    ]
    return [record.value or b"" for record in sorted(found, key=lambda record: (record.partition, record.offset))]


def failing(text: str) -> AbstractContextManager[Any]:
    return pytest.raises(PySparkException, match=text)


# --- reading a topic -----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, [(0, 0, 9), (1, 0, 2)]),
        ({"startingOffsets": '{"0": 4, "1": 1}', "endingOffsets": '{"0": 7}'}, [(0, 4, 7), (1, 1, 2)]),
        ({"startingTimestamp": at(4).isoformat(), "endingTimestamp": "2026-01-31T12:00:07Z"}, [(0, 4, 7), (1, 1, 2)]),
        ({"startingOffsets": "latest"}, []),
        ({"segmentsPerTask": "1", "startingOffsets": "1"}, [(0, 1, 9), (1, 1, 2)]),
    ],
)
def test_a_topic_is_read_by_offsets_and_times(
    book: Book, options: dict[str, str], found: list[tuple[int, int, int]]
) -> None:
    orders(book)
    assert found_by(book, topic="orders", **options) == expected(*found)


def test_spark_finds_the_format_and_reads_the_same_as_the_native_path(spark: SparkSession, book: Book) -> None:
    orders(book)
    frame = read(spark, book, topic="orders", segmentsPerTask="1")
    native = book.topics["orders"].read(spark)
    assert frame.schema == native.schema
    assert values(frame.toArrow()) == values(native.toArrow())
    executed = frame._jdf.queryExecution()
    assert folder_of(book) not in executed.toString() + executed.simpleString()
    book.release_reads()
    # The frame goes on with its plan, which outlives retention; a new one does not see what is gone.
    assert book.metadata.delete_segments_before("orders", 0, 9) == 0
    assert places(frame) == expected((0, 0, 9), (1, 0, 2))
    assert places(read(spark, book, topic="orders", startingOffsets='{"1": 1}')) == expected((1, 1, 2))
    release(book)
    assert book.metadata.delete_segments_before("orders", 0, 9) == 3


def test_nothing_to_read_and_an_error_both_reach_the_user(spark: SparkSession, book: Book) -> None:
    orders(book)
    assert read(spark, book, topic="orders", startingOffsets="latest").collect() == []
    with failing("(?s)TopicNotFound.*there is no topic 'nothing'"):
        read(spark, book, topic="nothing")


def test_some_columns_are_read_where_the_schema_names_them(book: Book) -> None:
    orders(book)
    columns = StructType([topic_columns()["value"], topic_columns()["partition"]])
    (table,) = tables(book, columns, topic="orders", startingOffsets='{"0": 8}')
    assert table.to_pylist() == [{"value": b"8", "partition": 0}, *({"value": v, "partition": 1} for v in (b"a", b"b"))]
    with pytest.raises(InvalidSchema, match="there is no column 'price'"):
        tables(book, StructType().add("price", "long"), topic="orders")
    with pytest.raises(InvalidSchema, match="the column 'value' is binary, not string"):
        tables(book, StructType().add("value", "string"), topic="orders")


def test_each_task_has_so_many_segments(book: Book) -> None:
    orders(book)
    assert [table.num_rows for table in tables(book, topic="orders", segmentsPerTask="1")] == [3, 3, 3, 2]
    assert [table.num_rows for table in tables(book, topic="orders", segmentsPerTask="3")] == [9, 2]
    assert [table.num_rows for table in tables(book, topic="orders")] == [11]


def test_a_segment_that_is_gone_or_another_fails_the_read(book: Book) -> None:
    book.topics.create("orders")
    first, second = produce(book, "orders", 0, 1, 2), produce(book, "orders", 0, 3, 4, 5)
    reader = source(book, topic="orders").reader(topic_columns())
    (task,) = reader.partitions()
    book.lake.store.delete_one(first.s3_key)
    with pytest.raises(ReadFailed, match="leaseSeconds"):
        list(reader.read(task))
    shorter = book.lake.store.read(second.s3_key)
    book.lake.store.put_new(first.s3_key, shorter)
    with pytest.raises(LakebookError):
        list(reader.read(task))
    book.topics.delete("orders")


def test_no_password_is_shown_or_sent_to_executors() -> None:
    given = {"book": "postgresql://me:S3CRET@host/db", "topic": "orders"}
    made = LakebookDataSource(given)
    assert "S3CRET" not in repr(options_of(given, lambda _: READ_TOPIC))
    for reader in (made.reader(topic_columns()), made.streamReader(topic_columns())):
        assert b"S3CRET" not in pickle.dumps(reader)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({}, InvalidSetting, "a topic or a table has to be named"),
        ({"topic": "orders", "table": "t"}, InvalidSetting, "a topic and a table were named"),
        ({"topic": "nothing"}, TopicNotFound, "there is no topic 'nothing'"),
        ({"topic": "or/ders"}, InvalidName, "or/ders"),
        ({"topic": "orders", "startingOffset": "1"}, InvalidSetting, "there is no option 'startingoffset' here"),
        ({"topic": "orders", "maxRecordsPerBatch": "1"}, InvalidSetting, "there is no option"),
        ({"topic": "orders", "startingOffsets": "soon"}, InvalidSetting, "it cannot be 'soon'"),
        ({"topic": "orders", "startingTimestamp": "2026-01-31T12:00:00"}, InvalidSetting, "its zone"),
        (
            {"topic": "orders", "startingOffsets": "1", "startingTimestamp": "2026-01-31T12:00Z"},
            InvalidSetting,
            "one of",
        ),
        ({"topic": "orders", "startingOffsets": '{"7": 1}'}, PartitionNotFound, ""),
        ({"topic": "orders", "endingOffsets": '{"0": 99}'}, OffsetBeyondWatermark, ""),
        ({"topic": "orders", "segmentsPerTask": "0"}, InvalidSetting, "a whole number from 1 on"),
        ({"topic": "orders", "book": "/nowhere/at/all"}, BookNotFound, ""),
        ({"topic": "orders", "book": ":memory:"}, SparkUnsuitable, ""),
        ({"table": "nothing"}, TableNotFound, ""),
        ({"table": "nothing", "startingOffsets": "1"}, InvalidSetting, "there is no option"),
    ],
)
def test_what_cannot_be_read_is_told_by_its_own_error(
    book: Book, options: dict[str, str], error: type[LakebookError], told: str
) -> None:
    orders(book)
    with pytest.raises(error, match=told or None):
        tables(book, **options)


def test_the_book_may_be_named_by_the_environment(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    orders(book)
    made = LakebookDataSource({"topic": "orders"})
    with pytest.raises(InvalidSetting, match="LAKEBOOK_BOOK"):
        made.schema()
    monkeypatch.setenv("LAKEBOOK_BOOK", folder_of(book))
    assert len(made.reader(made.schema()).partitions()) == 1


# --- reading a table -----------------------------------------------------------


def test_a_table_is_read_by_the_same_name(spark: SparkSession, book: Book) -> None:
    columns = "id BIGINT, name STRING, at TIMESTAMP, d DECIMAL(9, 2), tags ARRAY<STRUCT<k: STRING, v: INT>>"
    book.tables.create_namespace("sales")
    table = book.tables.create("sales.orders", columns)
    row = {"id": 1, "name": "a", "at": NOON, "d": Decimal("1.25"), "tags": [{"k": "x", "v": 1}, None]}
    first = table.insert_arrow(arrow_rows(table, [row]))
    with table.update_schema() as update:
        update.add_column("late", "STRING")
    table.insert_arrow(arrow_rows(table, [{"id": 2, "late": "yes"}]))
    frame = read(spark, book, table="sales.orders")
    assert frame.schema == table.read(spark).schema
    assert values(frame.toArrow()) == values(table.to_arrow())
    (before,) = tables(book, table="sales.orders", version=str(first.version))
    assert values(before) == values(table.to_arrow(version=first.version))
    with pytest.raises(VersionNotFound):
        tables(book, table="sales.orders", version="99")


def test_a_uuid_is_a_text(book: Book) -> None:
    table = book.tables.create("ids", Schema(NestedField(1, "u", UUIDType(), required=False)))
    table.insert_arrow(arrow_rows(table, [{"u": UUID(int=7).bytes}, {}]))
    (found,) = tables(book, table="ids")
    assert found.to_pylist() == [{"u": str(UUID(int=7))}, {"u": None}]


def test_an_empty_table_is_no_task(book: Book) -> None:
    book.tables.create("t", "id BIGINT")
    assert tables(book, table="t") == []


# --- writing -------------------------------------------------------------------


def write(frame: DataFrame, book: Book, mode: str = "append", **options: Any) -> None:
    frame.write.format("lakebook").options(**{"book": folder_of(book), "topic": "orders", **options}).mode(mode).save()


def append(book: Book, *tasks: Sequence[Any], columns: str = "string", **options: str) -> None:
    """Write values as Spark does, each sequence as a task of its own."""
    schema = StructType().add("value", columns)
    writer = source(book, **{"topic": "orders", **options}).writer(schema, overwrite=False)
    func, committer = sent(writer), sent(writer)
    messages = []
    try:
        for task in tasks:
            batch = pa.record_batch([pa.array(task, pa.string())], names=["value"])
            messages.append(sent(func.write(iter([batch]))))
    except LakebookError:
        committer.abort([*messages, None])
        raise
    committer.commit(messages)


def test_a_frame_is_appended_where_its_keys_belong(spark: SparkSession, book: Book) -> None:
    book.topics.create("orders", 3)
    frame = spark.range(100).selectExpr("concat('k', id % 10) AS key", "cast(id AS STRING) AS value").repartition(4)
    write(frame, book)
    found = book.topics["orders"].read(spark).collect()
    assert sorted(int(row["value"]) for row in found) == list(range(100))
    assert all(row["partition"] == partition_of_key(bytes(row["key"]), 3) for row in found)


def test_nothing_of_a_frame_is_appended_whose_last_task_fails(spark: SparkSession, book: Book) -> None:
    book.topics.create("orders")
    folder = warehouse_of(book)

    def last_fails(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1:
            # Not before the other has staged its rows: a task that is killed while it writes may write after the end.
            while not any(folder.glob("topics/*/s-*/*.arrow")):
                time.sleep(0.01)
            raise ValueError("no luck")
        yield from batches

    frame = spark.range(10, numPartitions=2).selectExpr("cast(id AS STRING) AS value")
    with failing("no luck"):
        write(frame.mapInArrow(last_fails, "value STRING"), book)
    assert kept(book) == []


def test_every_column_of_a_record_can_be_given(spark: SparkSession, book: Book) -> None:
    book.topics.create("orders", 2)
    frame = spark.sql(
        "SELECT 1 AS partition, X'00FF' AS value, X'6B' AS key, TIMESTAMP '2026-01-31 12:00:00.123456Z' AS timestamp,"
        " array(struct('h' AS key, X'01' AS value), struct('n' AS key, cast(NULL AS BINARY) AS value)) AS headers"
    )
    write(frame, book)
    (row,) = book.topics["orders"].read(spark).toArrow().to_pylist()
    assert row == {
        "partition": 1,
        "offset": 0,
        "timestamp": NOON.replace(microsecond=123000),
        "key": b"k",
        "value": b"\x00\xff",
        "headers": [{"key": "h", "value": b"\x01"}, {"key": "n", "value": None}],
    }


def test_tasks_and_their_rows_keep_their_order(book: Book) -> None:
    book.topics.create("orders", config={"segment.records": "400"})
    numbers = [str(number) for number in range(1000)]
    append(book, numbers[:300], numbers[300:310], numbers[310:])
    assert kept(book) == [number.encode() for number in numbers]
    sizes = [segment.record_count for segment in book.metadata.each_segment("orders", 0)]
    assert (max(sizes), len(sizes)) == (400, 3)


def test_an_empty_frame_appends_nothing(book: Book) -> None:
    book.topics.create("orders")
    append(book, [], [])
    append(book)
    assert kept(book) == []


def test_a_numbered_batch_lands_once(book: Book) -> None:
    book.topics.create("orders")
    for number in (0, 0, 1, 0):
        append(book, ["a"], sink="nightly", batchId=str(number))
    assert kept(book) == [b"a", b"a"]
    with pytest.raises(InvalidSetting, match="sink and batchId go together"):
        append(book, ["a"], sink="nightly")


def test_a_batch_waits_for_whoever_appends_and_stamps_anew(book: Book) -> None:
    book.topics.create("orders")
    turn = book.metadata.claim_append("orders", 0, holder="another", seconds=0.5)

    def interfere() -> None:
        # Another producer took the turn while the batch was being stored.
        book.metadata._registry.write(lambda transaction: release_turn(transaction, current_turn_of(book, "orders")))
        produce(book, "orders", 0, "between")

    with once_at("batch.stored", interfere):
        append(book, ["x", "y"])
    assert turn.token == 1
    assert kept(book) == [b"between", b"x", b"y"]


def current_turn_of(book: Book, topic: str) -> AppendTurn:
    """The turn that somebody holds on a topic's first partition, as its holder has it."""
    (row,) = records(book, schema.append_turns)
    held = book.metadata.get_partition(topic, 0)
    assert held is not None
    return AppendTurn(
        topic, 0, row["token"], held.high_watermark, NOON, row["holder"], row["commit_id"], held.topic_id, 30.0
    )


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"key": "string"}, "the frame has no column value"),
        ({"value": "string", "offset": "long"}, "a record has no column 'offset'"),
        ({"value": "long"}, "the column value is bigint"),
        ({"value": "string", "timestamp": "string"}, "the column timestamp is string"),
        ({"value": "string", "timestamp": "timestamp_ntz"}, "the column timestamp is timestamp_ntz"),
        ({"value": "string", "headers": "array<string>"}, "the column headers is array<string>"),
    ],
)
def test_a_frame_that_holds_no_records_is_refused(book: Book, columns: dict[str, str], told: str) -> None:
    fields = [
        StructField(name, ArrayType(StringType()) if kind.startswith("array") else _parse_datatype_json_value(kind))
        for name, kind in columns.items()
    ]
    with pytest.raises(InvalidSchema, match=told):
        source(book, topic="orders").writer(StructType(fields), overwrite=False)


def test_what_cannot_be_written_is_told_by_its_own_error(book: Book) -> None:
    book.topics.create("orders", config={"max.message.bytes": "10"})
    with pytest.raises(RecordTooLarge):
        append(book, ["x"], ["x" * 11])
    with pytest.raises(TopicNotFound):
        append(book, ["x"], topic="nothing")
    with pytest.raises(InvalidInput, match="there is no partitioner"):
        append(book, ["x"], partitioner="dice")
    value = StructType().add("value", "string")
    with pytest.raises(InvalidInput, match="can only be appended to"):
        source(book, topic="orders").writer(value, overwrite=True)
    with pytest.raises(InvalidInput, match="tables are not written"):
        source(book, table="t").writer(value, overwrite=False)
    with pytest.raises(InvalidInput, match="a table cannot be followed"):
        source(book, table="t").streamReader(value)
    assert kept(book) == []


# --- streams -------------------------------------------------------------------


class Query:
    """A query that copies a topic to another, until it has seen all there is."""

    def __init__(self, spark: SparkSession, book: Book, checkpoint: Path) -> None:
        self.spark, self.book, self.checkpoint = spark, book, checkpoint

    def run(self, **options: Any) -> list[int]:
        """Run it until all was read; how many records each batch had."""
        source = self.spark.readStream.format("lakebook").options(
            **{"book": folder_of(self.book), "topic": "orders", **options}
        )
        query = (
            source.load()
            .select("key", "value")
            .writeStream.format("lakebook")
            .options(book=folder_of(self.book), topic="copies", checkpointLocation=str(self.checkpoint))
            .start()
        )
        try:
            query.processAllAvailable()
            return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
        finally:
            query.stop()

    def forget_last(self) -> None:
        """Have Spark forget that its last batch was committed."""
        last = max(self.checkpoint.glob("commits/[0-9]*"), key=lambda file: int(file.name))
        last.unlink()
        last.with_name(f".{last.name}.crc").unlink()


def test_a_stream_goes_on_where_its_checkpoint_stands_and_each_batch_lands_once(
    spark: SparkSession, book: Book, tmp_path: Path
) -> None:
    orders(book)
    book.topics.create("copies")
    query = Query(spark, book, tmp_path / "checkpoint")
    assert query.run(maxRecordsPerBatch="4", startingOffsets='{"0": 1}') == [4, 4, 2]
    produce(book, "orders", 1, "c")
    book.metadata.grow_topic("orders", 3)
    produce(book, "orders", 2, "new")
    # As if Spark had died between the sink's commit and its own: the last batch is repeated.
    query.forget_last()
    assert query.run(maxRecordsPerBatch="4") == [2, 2]
    assert sorted(kept(book, "copies")) == sorted([*(str(n).encode() for n in range(1, 9)), b"a", b"b", b"c", b"new"])


def test_a_stream_goes_on_after_a_rebuild_and_the_batch_that_it_repeats_lands_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    loss = Loss(SQLITE, tmp_path, str)
    try:
        book = loss.open()
        orders(book)
        book.topics.create("copies", 2)
        assert Query(spark, book, tmp_path / "checkpoint").run(maxRecordsPerBatch="4", startingOffsets="latest") == []
        checkpoint(book)
        produce(book, "orders", 1, "c", "d", "e")
        assert Query(spark, book, tmp_path / "checkpoint").run(maxRecordsPerBatch="2") == [2, 1]
        again = loss.after()
        query = Query(spark, again, tmp_path / "checkpoint")
        query.forget_last()
        produce(again, "orders", 1, "f")
        assert query.run(maxRecordsPerBatch="2") == [1, 1]
        assert sorted(kept(again, "copies")) == [b"c", b"d", b"e", b"f"]
        assert again.verify().ok
    finally:
        loss.close()


def test_a_stream_with_a_new_checkpoint_does_not_go_on_under_the_sink_of_a_former_one(book: Book) -> None:
    book.topics.create("orders")
    columns = StructType().add("value", "string")

    def commit(value: str, batch_id: int) -> None:
        """As Spark commits a batch of a query."""
        writer = source(book, topic="orders", sink="copies").streamWriter(columns, overwrite=False)
        rows = pa.record_batch([pa.array([value])], names=["value"])
        sent(writer).commit([sent(sent(writer).write(iter([rows])))], batch_id)

    for number in (0, 1, 1):
        commit(f"{number}", number)
    with pytest.raises(StaleBatch, match="sink copies of topic orders: its last batch is 1"):
        commit("anew", 0)
    assert kept(book) == [b"0", b"1"]


def release(book: Book) -> None:
    """End the leases of processes that were stopped: a janitor would do so in a minute."""
    for lease in book.lake.registry.read_with(lambda reader: list_topic_leases(reader, ("", 0, 0), 1000)):
        book.metadata.unpin(lease.id)


# --- without Spark -------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "cap", "taken"),
    [
        ({0: 10, 1: 10, 2: 10}, 10, {0: 3, 1: 3, 2: 4}),
        ({0: 1, 1: 100}, 10, {0: 1, 1: 9}),
        ({0: 5, 1: 5}, 100, {0: 5, 1: 5}),
        ({0: 0, 1: 7, 2: 9}, 1, {0: 0, 1: 0, 2: 1}),
        ({}, 5, {}),
    ],
)
def test_a_cap_is_shared_among_partitions(available: dict[int, int], cap: int, taken: dict[int, int]) -> None:
    assert spread(available, cap) == taken


def followed(book: Book, **options: str) -> Followed:
    return Followed(Options(folder_of(book), "orders", None, {name.lower(): text for name, text in options.items()}))


def test_a_stream_pins_what_it_has_yet_to_read(book: Book) -> None:
    orders(book)
    stream = followed(book, maxRecordsPerBatch="3", startingOffsets='{"0": 1, "1": 2}')
    try:
        end = stream.latest()
        assert end["offsets"] == {"0": 4, "1": 2}
        assert stream.initial()["offsets"] == {"0": 1, "1": 2}
        assert stream.latest() == end
        assert book.metadata.delete_segments_before("orders", 0, 9) == 0
        (task,) = stream.plan(stream.initial(), end)
        assert "3 records" in repr(task)
        stream.advance(end)
        stream._pin.renew()
        # What holds the first record that it still needs stays.
        assert book.metadata.delete_segments_before("orders", 0, 9) == 1
        assert stream.latest()["offsets"] == {"0": 7, "1": 2}
        assert json.dumps(stream.latest()) == json.dumps(stream.latest())
    finally:
        stream.close()
    assert book.metadata.delete_segments_before("orders", 0, 9) == 2


def test_a_stream_that_was_frozen_past_its_lease_pins_anew(book: Book) -> None:
    orders(book)
    stream = followed(book)
    try:
        start, end = stream.initial(), stream.latest()
        release(book)
        stream._pin.renew()
        assert len(stream.plan(start, end)) == 1
        assert book.metadata.delete_segments_before("orders", 0, 9) == 0
    finally:
        stream.close()
    assert book.metadata.delete_segments_before("orders", 0, 9) == 3


def test_records_that_are_gone_stop_a_stream_or_are_skipped_where_that_is_wanted(
    book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    orders(book)
    for strict in ("true", "false"):
        stream = followed(book, failOnDataLoss=strict)
        start, end = stream.initial(), stream.latest()
        stream.close()
        book.metadata.delete_segments_before("orders", 0, 5)
        stream = followed(book, failOnDataLoss=strict)
        try:
            assert stream.plan(start, start) == []
            if strict == "true":
                with pytest.raises(OffsetBelowLogStart, match="failOnDataLoss"):
                    stream.plan({**start, "offsets": {"0": 0, "1": 0}}, end)
            else:
                (task,) = stream.plan({**start, "offsets": {"0": 0, "1": 0}}, end)
                assert "8 records" in repr(task)
                assert "orders/0: the records 0 to 2 are gone and skipped" in caplog.text
        finally:
            stream.close()


def test_a_checkpoint_of_a_deleted_topic_is_not_that_of_its_successor(book: Book) -> None:
    orders(book)
    stream = followed(book)
    before = stream.latest()
    stream.close()
    book.topics.delete("orders")
    orders(book)
    stream = followed(book)
    try:
        with pytest.raises(InvalidCursor, match="deleted"):
            stream.plan(before, before)
        with pytest.raises(InvalidCursor, match="another source"):
            stream.plan({"0": 1}, {"0": 2})
    finally:
        stream.close()
