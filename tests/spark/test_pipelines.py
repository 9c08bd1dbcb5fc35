"""Pipelines on Spark: what they make of records, what they refuse, and that everything lands once."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fastavro
import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession

from lake import records, run_sql
from lakebook import Book, failpoints
from lakebook.cli.main import cli
from lakebook.errors import (
    InvalidInput,
    InvalidPipeline,
    LakebookError,
    OffsetBeyondWatermark,
    PipelineAlreadyExists,
    PipelineBusy,
    PipelineNotFound,
    PipelineStopped,
    TableNotFound,
    TopicNotFound,
)
from lakebook.pipelines.turns import Turn
from lakebook.registry import schema
from lakebook.registry.inserts import declared_work
from lakebook.spark.pipelines import PROVENANCE
from streaming import produce

JSON_SCHEMA = "id BIGINT NOT NULL, name STRING"
AVRO = '{"type": "record", "name": "order", "fields": [{"name": "id", "type": %s}]}'


def lines(*records: dict[str, Any]) -> list[bytes]:
    return [json.dumps(record).encode() for record in records]


def fill(book: Book, *numbers: int, topic: str = "orders", partition: int = 0) -> None:
    produce(book, topic, partition, *lines(*({"id": number, "name": f"n{number}"} for number in numbers)))


def orders(book: Book, partitions: int = 1) -> None:
    book.topics.create("orders", partitions)


def ids(book: Book, table: str = "t") -> list[int]:
    return sorted(book.table(table).to_arrow().column("id").to_pylist())


def doubled(frame: DataFrame) -> DataFrame:
    """A transformation of the tests' own."""
    return frame.selectExpr("id * 2 AS id", "name")


def summed(frame: DataFrame) -> DataFrame:
    """One that no pipeline can be made of."""
    return frame.groupBy("name").sum("id")


def test_records_of_json_become_rows(book: Book, spark: SparkSession) -> None:
    orders(book, 2)
    fill(book, 1, 2, 3)
    fill(book, 4, partition=1)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json")
    report = pipeline.run(spark)
    assert (report.batches, report.records, report.rows, report.dead) == (1, 4, 4, 0)
    assert ids(book) == [1, 2, 3, 4]
    assert pipeline.run(spark).batches == 0
    fill(book, 5)
    assert pipeline.run(spark).rows == 1
    assert ids(book) == [1, 2, 3, 4, 5]
    described = pipeline.describe()
    assert (described.lag, described.records, described.rows, described.batches) == (0, 5, 5, 2)
    assert [item.next for item in described.sources] == [4, 1]


def test_sql_over_source_filters_and_shapes(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, *range(10))
    sql = (
        "WITH even AS (SELECT * FROM source WHERE id % 2 = 0) SELECT id, concat('{', name, '}') AS name FROM even -- !"
    )
    book.tables.create_namespace("made")
    pipeline = book.pipelines.create(
        "p", into="made.anew", topics="orders", decoder="json", schema=JSON_SCHEMA, sql=sql, spark=spark
    )
    pipeline.run(spark)
    assert book.table("made.anew").to_arrow().sort_by("id").to_pylist() == [
        {"id": number, "name": f"{{n{number}}}"} for number in (0, 2, 4, 6, 8)
    ]


def test_a_function_of_the_users_transforms(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1, 2)
    book.tables.create("t", JSON_SCHEMA)
    book.pipelines.create(
        "p",
        into="t",
        topics="orders",
        decoder="json",
        schema=JSON_SCHEMA,
        function=f"{__name__}:doubled",
        spark=spark,
    ).run(spark)
    assert ids(book) == [2, 4]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) AS id, 'x' AS name FROM source",
        "SELECT DISTINCT id, name FROM source",
        "SELECT id, name FROM source LIMIT 1",
        "SELECT a.id, b.name FROM source a JOIN source b ON a.id = b.id",
        "SELECT id, name FROM source WHERE id IN (SELECT max(id) FROM source)",
        "SELECT row_number() OVER (ORDER BY id) AS id, name FROM source",
        "SELECT id, name FROM source UNION ALL SELECT id, name FROM source",
        "SELECT * FROM VALUES (1, 'a') AS other(id, name)",
    ],
)
def test_what_depends_on_where_batches_are_cut_is_refused(book: Book, spark: SparkSession, sql: str) -> None:
    orders(book)
    book.tables.create("t", JSON_SCHEMA)
    with pytest.raises(InvalidPipeline, match="view"):
        book.pipelines.create("p", into="t", topics="orders", decoder="json", schema=JSON_SCHEMA, sql=sql, spark=spark)
    assert list(book.pipelines) == []


def test_an_aggregation_in_a_function_is_refused_when_it_runs(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create(
        "p", into="t", topics="orders", decoder="json", schema=JSON_SCHEMA, function=f"{__name__}:summed"
    )
    with pytest.raises(InvalidPipeline, match="aggregation"):
        pipeline.run(spark)
    record = pipeline.record
    assert record.failures == 1 and record.last_error is not None and "aggregation" in record.last_error
    assert record.retry_at is not None and ids(book) == []


def test_records_that_do_not_fit_go_to_the_dead_letters_with_the_reason(book: Book, spark: SparkSession) -> None:
    orders(book)
    bad = [b"{", b'{"id": "x"}', b'{"name": "no id"}', b"\xff\xfe"]
    more = [
        b'{"id": 5}{"id": 6}',
        b'{"id": 5} x',
        b'{"id": 5},{"id": 6}',
        b'{"id": 5}]',
        b'{"id": 5},1]',
        b'[{"id": 5}]',
    ]
    bad += more
    produce(book, "orders", 0, *lines({"id": 1, "name": "a"}), *bad, b' {"id": 2, "name": "}{", "x": {}}\n')
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json", bad_records="dead_letter")
    report = pipeline.run(spark)
    assert (report.records, report.rows, report.dead) == (12, 2, 10)
    assert ids(book) == [1, 2]
    letters = book.table("t_dead_letters").to_arrow().sort_by("offset").to_pylist()
    assert [(row["offset"], row["value"]) for row in letters] == list(zip(range(1, 11), bad, strict=True))
    assert [row["reason"] for row in letters] == [
        "it is not JSON that fits the schema",
        "it is not JSON that fits the schema",
        "it has no id",
        "it is not UTF-8",
        *["there is more in it than one object"] * 5,
        "it is not JSON that fits the schema",
    ]
    assert {(row["pipeline"], row["topic"], row["partition"]) for row in letters} == {("p", "orders", 0)}


def test_a_batch_of_nothing_but_dead_letters_lands(book: Book, spark: SparkSession) -> None:
    orders(book)
    produce(book, "orders", 0, b"1", b"2")
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json", bad_records="dead_letter")
    assert pipeline.run(spark).dead == 2
    assert (book.table("t").version, book.table("t_dead_letters").count(), pipeline.describe().lag) == (0, 2, 0)


def test_a_record_that_does_not_fit_stops_the_pipeline_where_it_is_told_to(book: Book, spark: SparkSession) -> None:
    orders(book)
    produce(book, "orders", 0, *lines({"id": 1}), b"{", *lines({"id": 2}))
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json")
    with pytest.raises(PipelineStopped, match="offset 1: it is not JSON"):
        pipeline.run(spark)
    assert pipeline.describe().state == "stopped" and ids(book) == [] and pipeline.describe().lag == 3
    with pytest.raises(PipelineStopped, match="offset 1: it is not JSON"):
        pipeline.run(spark)
    pipeline.resume()
    assert pipeline.describe().state == "active"


def test_records_of_avro_become_rows(book: Book, spark: SparkSession) -> None:
    schema = {
        "type": "record",
        "name": "order",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "name", "type": ["null", "string"]},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "tags", "type": {"type": "array", "items": "string"}},
        ],
    }
    at = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)

    def encoded(records: Iterable[dict[str, Any]]) -> Iterable[bytes]:
        for record in records:
            stream = io.BytesIO()
            fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), record)
            yield stream.getvalue()

    orders(book)
    good: list[dict[str, Any]] = [
        {"id": 1, "name": "a", "at": at, "tags": ["x", "y"]},
        {"id": 2, "name": None, "at": at, "tags": []},
    ]
    produce(book, "orders", 0, *encoded(good), b"\x80", b"")
    pipeline = book.pipelines.create(
        "p",
        into="t",
        topics="orders",
        decoder="avro",
        schema=json.dumps(schema),
        bad_records="dead_letter",
        spark=spark,
    )
    assert pipeline.run(spark).dead == 2
    assert book.table("t").to_arrow().sort_by("id").to_pylist() == good


def test_raw_records_and_their_provenance(book: Book, spark: SparkSession) -> None:
    orders(book)
    at = datetime(2026, 1, 2, tzinfo=UTC)
    produce(book, "orders", 0, b"\x00\x01", times=[at])
    sql = "SELECT value, _source_topic, _source_partition, _source_offset, _source_timestamp FROM source"
    pipeline = book.pipelines.create("p", into="t", topics="orders", sql=sql, provenance=True, spark=spark)
    pipeline.run(spark)
    assert book.table("t").to_arrow().to_pylist() == [
        {
            "value": b"\x00\x01",
            "_source_topic": "orders",
            "_source_partition": 0,
            "_source_offset": 0,
            "_source_timestamp": at,
        }
    ]


def test_provenance_without_columns_for_it_is_refused(book: Book, spark: SparkSession) -> None:
    orders(book)
    book.tables.create("t", JSON_SCHEMA)
    with pytest.raises(InvalidPipeline, match="_source_offset BIGINT"):
        book.pipelines.create("p", into="t", topics="orders", decoder="json", provenance=True)


def test_several_topics_flow_into_one_table(book: Book, spark: SparkSession) -> None:
    orders(book)
    book.topics.create("more")
    fill(book, 1)
    fill(book, 2, topic="more")
    pipeline = book.pipelines.create(
        "p", into="t", topics=["orders", "more"], decoder="json", schema=JSON_SCHEMA, provenance=True, spark=spark
    )
    pipeline.run(spark)
    rows = book.table("t").to_arrow().sort_by("id").to_pylist()
    assert [(row["id"], row["_source_topic"]) for row in rows] == [(1, "orders"), (2, "more")]


def test_a_batch_has_no_more_records_than_it_may(book: Book, spark: SparkSession) -> None:
    orders(book, 2)
    for number in range(3):
        fill(book, 2 * number)
        fill(book, 2 * number + 1, partition=1)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json", batch_records=2)
    report = pipeline.run(spark)
    assert (report.batches, report.records) == (3, 6)
    assert [item.record_count for item in pipeline.batches()] == [2, 2, 2]
    assert ids(book) == [0, 1, 2, 3, 4, 5]


def test_partitions_that_come_later_are_read_from_their_beginning(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json", start="latest")
    book.metadata.grow_topic("orders", 2)
    fill(book, 2, partition=1)
    fill(book, 3)
    pipeline.run(spark)
    assert ids(book) == [2, 3]


def test_new_columns_are_added_to_the_target_where_that_is_asked_for(book: Book, spark: SparkSession) -> None:
    orders(book)
    book.tables.create("t", "id INT")
    produce(book, "orders", 0, *lines({"id": 2**40, "name": "a"}))
    pipeline = book.pipelines.create(
        "p", into="t", topics="orders", decoder="json", schema=JSON_SCHEMA, evolve=True, spark=spark
    )
    pipeline.run(spark)
    assert book.table("t").to_arrow().to_pylist() == [{"id": 2**40, "name": "a"}]


def test_a_table_as_a_source_gives_the_rows_of_appends(book: Book, spark: SparkSession) -> None:
    source = book.tables.create("s", "id BIGINT")
    source.insert(spark.range(3).toDF("id"))
    pipeline = book.pipelines.create("p", into="t", tables="s", sql="SELECT id * 10 AS id FROM source", spark=spark)
    pipeline.run(spark)
    assert ids(book) == [0, 10, 20]
    source.insert(spark.range(3, 4).toDF("id"))
    source.replace([file.file_path for file in source.plan()], source.read(spark))
    book.release_reads()
    source.insert(spark.range(4, 5).toDF("id"))
    report = pipeline.run(spark)
    assert (report.records, ids(book)) == (2, [0, 10, 20, 30, 40])
    # The rows of a compaction were read before it, though its inputs are not visible any more.
    source.delete("id = 0", spark=spark)
    with pytest.raises(PipelineStopped, match="no append"):
        pipeline.run(spark)
    pipeline.resume(skip_lost=True)
    source.insert(spark.range(5, 6).toDF("id"))
    pipeline.run(spark)
    assert ids(book) == [0, 10, 20, 30, 40, 50]


def test_what_a_pipeline_has_to_read_is_pinned_until_it_has_landed(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1)
    fill(book, 2)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json")
    assert book.metadata.delete_segments_before("orders", 0, 2) == 0
    pipeline.run(spark)
    assert book.metadata.delete_segments_before("orders", 0, 2) == 2
    fill(book, 3)
    pipeline.delete()
    assert book.metadata.delete_segments_before("orders", 0, 3) == 1
    assert ids(book) == [1, 2]


def test_a_pipeline_that_does_not_hold_retention_up_stops_at_what_it_lost(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1)
    fill(book, 2)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json", retention="stop")
    book.metadata.delete_segments_before("orders", 0, 1)
    with pytest.raises(PipelineStopped, match="0 to 0"):
        pipeline.run(spark)
    pipeline.resume(skip_lost=True)
    pipeline.run(spark)
    assert ids(book) == [2]


def test_a_planned_batch_whose_records_are_gone_stops_the_pipeline(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json", retention="stop")

    def retain() -> None:
        book.metadata.delete_segments_before("orders", 0, 1)

    with failpoints.armed("pipeline.planned", retain), pytest.raises(PipelineStopped, match="are gone"):
        pipeline.run(spark)
    assert pipeline.describe().state == "stopped"
    pipeline.resume(skip_lost=True)
    fill(book, 2)
    assert pipeline.run(spark).rows == 1 and ids(book) == [2]


def test_a_paused_pipeline_does_not_run(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json")
    pipeline.pause()
    for _ in range(2):
        with pytest.raises(PipelineStopped, match="paused"):
            pipeline.run(spark)
    # It rests; nothing has stopped it.
    assert pipeline.describe().state == "paused"
    pipeline.resume()
    assert pipeline.run(spark).rows == 1


def test_two_do_not_run_a_pipeline_at_once(book: Book, spark: SparkSession) -> None:
    orders(book)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json")
    with Turn(book.lake, pipeline.record), pytest.raises(PipelineBusy):
        pipeline.run(spark)
    assert pipeline.run(spark).batches == 0


def test_one_that_was_frozen_while_another_landed_its_batch_lands_nothing(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1, 2)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json")

    overtaken: list[int] = []

    def overtake() -> None:
        """Let another run the pipeline when this one's turn has run out; once."""
        if not overtaken:
            overtaken.append(0)
            run_sql(book, "UPDATE pipelines SET held_until = 0")
            overtaken.append(pipeline.run(spark).rows)

    # Its files are written, and it is about to land them.
    with failpoints.armed("pipeline.written", overtake):
        report = pipeline.run(spark)
    assert (report.batches, report.lost, overtaken) == (0, 1, [0, 2])
    assert ids(book) == [1, 2]
    assert (pipeline.record.row_count, book.table("t").version) == (2, 1)


def test_what_is_not_there_is_told_by_its_name(book: Book, spark: SparkSession) -> None:
    with pytest.raises(TopicNotFound):
        book.pipelines.create("p", into="t", topics="orders")
    orders(book)
    with pytest.raises(TableNotFound):
        book.pipelines.create("p", into="t", topics="orders")
    with pytest.raises(PipelineNotFound):
        book.pipelines["p"]
    book.tables.create("t", JSON_SCHEMA)
    book.pipelines.create("p", into="t", topics="orders", decoder="json")
    with pytest.raises(PipelineAlreadyExists):
        book.pipelines.create("p", into="t", topics="orders", decoder="json")


@pytest.mark.parametrize(
    "options",
    [
        {"topics": ()},
        {"topics": "orders", "tables": "t"},
        {"sql": "SELECT 1", "function": "a:b"},
        {"function": "os.system('x')"},
        {"decoder": "xml"},
        {"decoder": "avro"},
        {"decoder": "avro", "schema": "{"},
        {"decoder": "avro", "schema": AVRO % '"long"', "header": "apicurio"},
        {"decoder": "avro", "schema": AVRO % '"long"', "schemas": {1: AVRO % '"long"'}},
        {"decoder": "avro", "header": "confluent"},
        {"decoder": "avro", "header": "confluent", "schemas": {}},
        {"decoder": "avro", "header": "confluent", "schemas": {1: "{"}},
        {"decoder": "avro", "header": "confluent", "schemas": {-1: AVRO % '"long"'}},
        {"decoder": "avro", "header": "confluent", "schemas": {"1": AVRO % '"long"', "01": AVRO % '"long"'}},
        {"decoder": "avro", "header": "confluent", "schemas": AVRO % '"long"'},
        {"decoder": "json", "schema": "id BIGINT", "header": "confluent"},
        {"decoder": "avro", "schema": (AVRO % '"long"').replace('"id"', '"_source_offset"')},
        {"decoder": "json", "schema": "id"},
        {"decoder": "json", "schema": "_source_offset BIGINT"},
        {"schema": "id BIGINT"},
        {"bad_records": "drop"},
        {"dead_letters": "d"},
        {"batch_records": 0},
        {"interval": float("nan")},
        {"target_file_size": True},
        {"topics": ["orders", "orders"]},
        {"topics": (), "tables": "t"},
    ],
)
def test_what_cannot_be_a_pipeline_is_refused_and_leaves_nothing(book: Book, options: dict[str, Any]) -> None:
    orders(book)
    book.tables.create("t", JSON_SCHEMA)
    with pytest.raises(InvalidInput):
        book.pipelines.create("p", into="t", **{"topics": "orders", **options})
    assert list(book.pipelines) == []


def test_what_lies_before_the_first_record_can_be_backfilled_once(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1, 2, 3)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json", start="latest")
    fill(book, 4)
    pipeline.run(spark)
    assert ids(book) == [4]
    report = pipeline.backfill(spark, start=1)
    assert (report.ranges, report.records, report.replaced) == ({0: (1, 3)}, 2, False)
    assert ids(book) == [2, 3, 4]
    with pytest.raises(InvalidPipeline, match="land twice"):
        pipeline.backfill(spark, start=1, end=3)
    with pytest.raises(OffsetBeyondWatermark):
        pipeline.backfill(spark, start=0, end=5)
    pipeline.backfill(spark)
    assert ids(book) == [1, 2, 3, 4] and pipeline.backfill(spark).records == 0
    assert [(item.first, item.next) for item in pipeline.describe().sources] == [(0, 4)]


def test_a_backfill_replaces_rows_and_dead_letters_by_their_provenance(book: Book, spark: SparkSession) -> None:
    orders(book, 2)
    produce(book, "orders", 0, *lines({"id": 1}), b"{", *lines({"id": 3}), b"{")
    produce(book, "orders", 1, *lines({"id": 9}), b"}")
    options: dict[str, Any] = {"provenance": True, "bad_records": "dead_letter", "function": f"{__name__}:changed"}
    pipeline = book.pipelines.create(
        "p", into="t", topics="orders", decoder="json", schema=JSON_SCHEMA, spark=spark, **options
    )
    pipeline.run(spark)
    assert ids(book) == [1, 3, 9]
    CHANGES.append(100)
    try:
        report = pipeline.backfill(spark, start={0: 1, 1: "latest"}, end={0: 4, 1: "latest"})
    finally:
        CHANGES.clear()
    assert (report.records, report.rows, report.dead, report.replaced) == (3, 1, 2, True)
    assert ids(book) == [1, 9, 103]
    letters = book.table("t_dead_letters").to_arrow().to_pylist()
    assert sorted((row["partition"], row["offset"]) for row in letters) == [(0, 1), (0, 3), (1, 1)]
    fill(book, 5)
    pipeline.run(spark)
    assert ids(book) == [1, 5, 9, 103]


CHANGES: list[int] = []


def changed(frame: DataFrame) -> DataFrame:
    """A transformation that is another one the next time."""
    return frame.selectExpr(f"id + {sum(CHANGES)} AS id", "name", *PROVENANCE)


def test_the_command_line_runs_and_backfills(book: Book, spark: SparkSession, tmp_path: Path) -> None:
    orders(book)
    fill(book, 1, 2)
    book.tables.create("t", JSON_SCHEMA)
    book.pipelines.create("p", into="t", topics="orders", decoder="json", start="latest")
    fill(book, 3)

    def command(*arguments: str) -> Any:
        done = CliRunner().invoke(cli, ["--book", str(tmp_path / "book"), "pipelines", *arguments, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    assert command("run", "p")["rows"] == 1
    assert command("backfill", "p", "--from", "1")["rows"] == 1
    assert ids(book) == [2, 3]


def test_a_pipeline_that_runs_on_and_on_ends_when_it_is_told_to(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json")
    stop, told = threading.Event(), []

    def hear(report: Any) -> None:
        told.append(report.rows)
        if len(told) == 2:
            stop.set()
        else:
            fill(book, 2, 3)

    pipeline.follow(spark, interval=3600.0, records=2, stop=stop, told=hear)
    assert told == [1, 2] and ids(book) == [1, 2, 3]


def test_the_daemon_runs_pipelines_with_an_interval_and_one_that_fails_stops_no_other(
    book: Book, spark: SparkSession
) -> None:
    orders(book)
    fill(book, 1, 2)
    book.tables.create("t", JSON_SCHEMA)
    book.tables.create("u", JSON_SCHEMA)
    options: dict[str, Any] = {"topics": "orders", "decoder": "json", "schema": JSON_SCHEMA, "interval": 0.1}
    failing = book.pipelines.create("a", into="u", function=f"{__name__}:summed", **options)
    book.pipelines.create("b", into="t", **options)
    idle = book.pipelines.create("c", into="u", topics="orders", decoder="json")
    landed = threading.Event()
    with (
        failpoints.armed("pipeline.landed", landed.set),
        book.running(spark=spark, components=["pipelines"]) as upkeep,
    ):
        assert upkeep.wait_active(60)
        assert landed.wait(60)
    assert ids(book) == [1, 2]
    assert failing.record.failures > 0 and idle.record.last_batch == 0
    (noted,) = [item for item in book.maintenance_history(component="pipelines") if item.outcome == "done"]
    assert noted.detail["pipeline"] == "b" and noted.detail["rows"] == 2
    # Without a session it takes that of the process, and leaves it running: it is somebody else's.
    done = book.maintain(["pipelines"])["pipelines"]["pipelines"]
    assert done["b"] == "nothing to do" and done["a"].startswith("error")
    assert spark.range(3).count() == 3


def test_verify_finds_an_offset_above_its_topics_end(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1)
    book.tables.create("t", JSON_SCHEMA)
    book.pipelines.create("p", into="t", topics="orders", decoder="json").run(spark)
    run_sql(book, "UPDATE pipeline_offsets SET next_offset = 5")
    (finding,) = book.verify().findings
    assert (finding.check, finding.on) == ("pipelines", "pipeline p") and "high watermark is 1" in finding.what
    run_sql(book, "UPDATE pipeline_offsets SET next_offset = 1")


def test_a_pause_ends_a_run_between_two_batches(book: Book, spark: SparkSession) -> None:
    orders(book)
    for number in range(3):
        fill(book, number)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json", batch_records=1)
    with failpoints.armed("pipeline.landed", pipeline.pause):
        assert pipeline.run(spark).batches == 1
    pipeline.resume()
    assert pipeline.run(spark).batches == 2 and ids(book) == [0, 1, 2]


def test_a_query_that_loses_the_provenance_it_was_asked_for_is_refused(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1)
    types = ("STRING", "INT", "BIGINT", "TIMESTAMP")
    book.tables.create(
        "t", ", ".join(f"{name} {kind}" for name, kind in zip(PROVENANCE, types, strict=True)) + ", id BIGINT"
    )
    options: dict[str, Any] = {"topics": "orders", "decoder": "json", "schema": JSON_SCHEMA, "provenance": True}
    with pytest.raises(InvalidPipeline, match="does not give _source_topic"):
        book.pipelines.create("p", into="t", sql="SELECT id FROM source", spark=spark, **options)
    pipeline = book.pipelines.create("p", into="t", sql="SELECT id FROM source", **options)
    with pytest.raises(InvalidPipeline, match="does not give _source_topic"):
        pipeline.run(spark)


def test_a_backfill_replaces_nothing_that_another_pipeline_has_landed(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1, 2)
    options: dict[str, Any] = {"into": "t", "topics": "orders", "decoder": "json", "schema": JSON_SCHEMA}
    for name, test in (("a", "id = 1"), ("b", "id = 2")):
        sql = f"SELECT * FROM source WHERE {test}"
        book.pipelines.create(name, provenance=True, sql=sql, spark=spark, **options).run(spark)
    with pytest.raises(InvalidPipeline, match="pipeline b"):
        book.pipelines["a"].backfill(spark)
    assert ids(book) == [1, 2]


def test_a_sorted_target_and_a_sorted_query_land(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 3, 1, 2)
    book.tables.create("t", JSON_SCHEMA, sort_by=["id"], properties={"write.distribution-mode": "range"})
    pipeline = book.pipelines.create(
        "p", into="t", topics="orders", decoder="json", schema=JSON_SCHEMA, sql="SELECT * FROM source ORDER BY name"
    )
    assert pipeline.run(spark).records == 3 and ids(book) == [1, 2, 3]


def test_the_first_records_of_a_new_partition_that_are_gone_stop_the_pipeline(book: Book, spark: SparkSession) -> None:
    orders(book)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json")
    book.metadata.grow_topic("orders", 2)
    fill(book, 1, partition=1)
    fill(book, 2, partition=1)
    book.metadata.delete_segments_before("orders", 1, 1)
    with pytest.raises(PipelineStopped, match="0 to 0 of orders/1"):
        pipeline.run(spark)
    pipeline.resume(skip_lost=True)
    pipeline.run(spark)
    assert ids(book) == [2]


def test_a_pipeline_whose_topic_is_gone_is_stopped_also_by_the_daemon(book: Book, spark: SparkSession) -> None:
    orders(book)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json", interval=1.0)
    book.topics.delete("orders")
    assert pipeline.describe().lag is None
    book.maintain(["pipelines"], spark=spark)
    assert pipeline.describe().state == "stopped"


def test_a_pipeline_that_was_deleted_meanwhile_pins_nothing(book: Book, spark: SparkSession) -> None:
    orders(book)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json")
    planner = pipeline._runner().planner
    pipeline.delete()
    with pytest.raises(PipelineNotFound):
        planner.ends()
    assert records(book, schema.topic_leases) == []


def test_values_of_avro_that_their_type_cannot_hold_are_dead_letters(book: Book, spark: SparkSession) -> None:
    wide = fastavro.parse_schema({"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}]})
    kinds = [{"name": "id", "type": "int"}]
    orders(book)
    for value in (1, 2**40):
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, wide, {"id": value})
        produce(book, "orders", 0, stream.getvalue())
    options: dict[str, Any] = {
        "decoder": "avro",
        "schema": json.dumps({"type": "record", "name": "r", "fields": kinds}),
    }
    pipeline = book.pipelines.create("p", into="t", topics="orders", bad_records="dead_letter", spark=spark, **options)
    assert pipeline.run(spark).dead == 1 and ids(book) == [1]


def test_a_backfill_is_declared_before_it_looks_at_files_so_that_compactions_give_way(
    book: Book, spark: SparkSession
) -> None:
    orders(book)
    fill(book, 1, 2)
    pipeline = book.pipelines.create(
        "p", into="t", topics="orders", decoder="json", schema=JSON_SCHEMA, provenance=True, spark=spark
    )
    pipeline.run(spark)
    table = book.table("t")
    seen: list[str | None] = []

    def look() -> None:
        seen.append(book._registry.read_with(lambda reader: declared_work(reader, table.id, 0)))

    with failpoints.armed("lease.taken", look):
        assert pipeline.backfill(spark, start=1).replaced
    assert seen and None not in seen
    assert ids(book) == [1, 2]


def test_a_backfill_that_brings_a_new_column_keeps_the_rows_that_stay(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1, 2)
    function = f"{__name__}:widened"
    options: dict[str, Any] = {"decoder": "json", "schema": JSON_SCHEMA, "provenance": True, "evolve": True}
    pipeline = book.pipelines.create("p", into="t", topics="orders", function=function, spark=spark, **options)
    pipeline.run(spark)
    CHANGES.append(7)
    try:
        pipeline.backfill(spark, start=1)
    finally:
        CHANGES.clear()
    rows = book.table("t").to_arrow().sort_by("id").to_pylist()
    assert [(row["id"], row["more"]) for row in rows] == [(1, None), (2, 7)]


def widened(frame: DataFrame) -> DataFrame:
    """A transformation that has a column more the next time."""
    return frame.selectExpr("id", "name", *PROVENANCE, *(f"{number} AS more" for number in CHANGES))


def avro(schema: str, id_: int | None, **record: Any) -> bytes:
    """A record of Avro, with the header of a schema registry if it has an id."""
    stream = io.BytesIO(b"" if id_ is None else b"\0" + id_.to_bytes(4, "big"))
    stream.seek(0, io.SEEK_END)
    fastavro.schemaless_writer(stream, fastavro.parse_schema(json.loads(schema)), record)
    return stream.getvalue()


def test_records_with_a_registrys_header_are_read_by_the_schema_of_their_id(book: Book, spark: SparkSession) -> None:
    orders(book)
    old = AVRO % '"int"'
    new = json.loads(AVRO % '"long"')
    new["fields"].append({"name": "name", "type": ["null", "string"], "default": None})
    newest = json.dumps(new)
    bad = [
        avro(newest, 7, id=3, name="c"),
        avro(newest, None, id=0, name="d"),
        b"\0\0\0\0",
        avro(old, 5, id=1) + b"!",
    ]
    produce(book, "orders", 0, avro(old, 5, id=1), avro(newest, 70_000, id=2**40, name="b"), *bad)
    options: dict[str, Any] = {"decoder": "avro", "header": "confluent", "schemas": {5: old, 70_000: newest}}
    pipeline = book.pipelines.create("p", into="t", topics="orders", bad_records="dead_letter", spark=spark, **options)
    report = pipeline.run(spark)
    assert (report.records, report.rows, report.dead) == (6, 2, 4)
    # The columns are those of the highest id; what an older record has not has its default.
    assert book.table("t").to_arrow().sort_by("id").to_pylist() == [
        {"id": 1, "name": None},
        {"id": 2**40, "name": "b"},
    ]
    letters = book.table("t_dead_letters").to_arrow().sort_by("offset").to_pylist()
    assert [row["value"] for row in letters] == bad
    assert [row["reason"] for row in letters] == [
        "its schema has the id 7, which the pipeline does not know",
        "it does not begin with the header of a schema registry",
        "it does not begin with the header of a schema registry",
        "there is more in it than the schema says",
    ]


def test_one_schema_can_be_that_of_all_ids(book: Book, spark: SparkSession) -> None:
    orders(book)
    schema = AVRO % '"long"'
    produce(book, "orders", 0, avro(schema, 1, id=1), avro(schema, 2, id=2))
    options: dict[str, Any] = {"decoder": "avro", "header": "confluent", "schema": schema}
    pipeline = book.pipelines.create("p", into="t", topics="orders", spark=spark, **options)
    assert pipeline.run(spark).rows == 2 and ids(book) == [1, 2]
    produce(book, "orders", 0, avro(schema, None, id=3))
    with pytest.raises(PipelineStopped, match="header of a schema registry"):
        pipeline.run(spark)


def test_one_that_was_frozen_stops_nothing_when_what_it_would_read_has_landed_and_is_gone(
    book: Book, spark: SparkSession
) -> None:
    orders(book)
    fill(book, 1, 2)
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json")
    overtaken: list[int] = []

    def overtake() -> None:
        if not overtaken:
            overtaken.append(0)
            run_sql(book, "UPDATE pipelines SET held_until = 0")
            overtaken.append(pipeline.run(spark).rows)
            book.metadata.delete_segments_before("orders", 0, 2)

    with failpoints.armed("pipeline.planned", overtake):
        report = pipeline.run(spark)
    assert (report.batches, overtaken) == (0, [0, 2])
    record = pipeline.record
    assert (record.state, record.failures, ids(book)) == ("active", 0, [1, 2])


def test_a_backfill_that_was_frozen_lands_nothing_where_the_pipeline_was_made_anew(
    book: Book, spark: SparkSession
) -> None:
    orders(book)
    fill(book, 1, 2)
    options: dict[str, Any] = {"decoder": "json", "schema": JSON_SCHEMA, "provenance": True, "into": "t"}
    pipeline = book.pipelines.create("p", topics="orders", spark=spark, **options)
    pipeline.run(spark)
    taken: list[int] = []

    def make_anew() -> None:
        if not taken:
            taken.append(0)
            pipeline.delete()
            book.table("t").delete("id > 0")
            book.pipelines.create("p", topics="orders", **options).run(spark)

    with failpoints.armed("insert.written", make_anew), pytest.raises(LakebookError):
        pipeline.backfill(spark)
    assert ids(book) == [1, 2]


def test_a_pipeline_that_stopped_at_a_record_is_altered_and_goes_on(book: Book, spark: SparkSession) -> None:
    orders(book)
    produce(book, "orders", 0, *lines({"id": 1}), b"{", *lines({"id": 2}))
    book.tables.create("t", JSON_SCHEMA)
    pipeline = book.pipelines.create("p", into="t", topics="orders", decoder="json")
    with pytest.raises(PipelineStopped):
        pipeline.run(spark)
    altered = book.pipelines.alter("p", bad_records="dead_letter", spark=spark)
    assert altered.describe().dead_letters == "default.t_dead_letters"
    altered.resume()
    # Also by whoever had it before.
    assert pipeline.run(spark).dead == 1 and ids(book) == [1, 2]
    with pytest.raises(InvalidPipeline, match="provenance"):
        book.pipelines.alter("p", provenance=True)
    with pytest.raises(InvalidPipeline, match="view"):
        book.pipelines.alter("p", sql="SELECT DISTINCT * FROM source", spark=spark)
    with Turn(book.lake, pipeline.record), pytest.raises(PipelineBusy):
        book.pipelines.alter("p", batch_records=1)
    assert pipeline.record.definition["batch_records"] > 1


def test_one_that_was_frozen_lands_nothing_by_a_definition_that_was_changed(book: Book, spark: SparkSession) -> None:
    orders(book)
    fill(book, 1)
    book.tables.create("t", JSON_SCHEMA)
    options: dict[str, Any] = {"decoder": "json", "schema": JSON_SCHEMA}
    pipeline = book.pipelines.create("p", into="t", topics="orders", sql="SELECT id, name FROM source", **options)
    done: list[int] = []

    def change() -> None:
        if not done:
            done.append(0)
            run_sql(book, "UPDATE pipelines SET held_until = 0")
            book.pipelines.alter("p", sql="SELECT id + 10 AS id, name FROM source")

    with failpoints.armed("pipeline.written", change):
        assert pipeline.run(spark).rows == 0
    assert ids(book) == []
    pipeline.run(spark)
    assert ids(book) == [11]
