"""Spark's own Iceberg writes to the tables of a book, and reads them; all engines see the same."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import lakebook
from lakebook import Book, failpoints
from lakebook.errors import StorageUnavailable, TerminalError
from lakebook.lake.table import Table
from lakebook.spark.session import session_with_catalog
from spark.rows import arrow_rows, frame_of, in_spark, values, warehouse_of

#: How a session tells of what a catalog or a procedure has refused.
REFUSED = (PySparkException, Py4JJavaError)


@pytest.fixture
def session(book: Book, spark: SparkSession) -> SparkSession:
    """A session of the shared Spark in which the book is a catalog."""
    return book.spark(iceberg=True)


def of_spark(session: SparkSession, table: Table, at: str = "") -> list[tuple[Any, ...]]:
    return values(session.sql(f"SELECT * FROM lakebook.default.{table.name}{at}").toArrow())


def of_pyiceberg(book: Book, table: Table, snapshot_id: int | None = None) -> list[tuple[Any, ...]]:
    loaded = book.catalog().load_table(f"default.{table.name}")
    return values(loaded.scan(snapshot_id=snapshot_id).to_arrow())


def of_duckdb(table: Table, snapshot_id: int | None = None) -> list[tuple[Any, ...]]:
    path = unquote(urlsplit(table.metadata_location or "").path)
    asked = "" if snapshot_id is None else f", snapshot_from_id := {snapshot_id}"
    with duckdb.connect() as connection:
        connection.execute("LOAD avro; LOAD iceberg; SET TimeZone = 'UTC'")
        return values(connection.execute(f"SELECT * FROM iceberg_scan('{path}'{asked})").to_arrow_table())


def check_same(book: Book, session: SparkSession, table: Table) -> list[tuple[Any, ...]]:
    """All engines see the same rows, and nothing is wrong; the rows."""
    ours = values(table.to_arrow())
    assert of_spark(session, table) == ours
    assert of_pyiceberg(book, table) == ours
    assert values(in_spark(table, session)) == ours
    (counted,) = session.sql(f"SELECT count(*) FROM lakebook.default.{table.name}").collect()
    assert table.count() == counted[0] == len(ours)
    found = book.verify()
    assert (found.findings, found.unfinished) == ((), ())
    return ours


def insert(table: Table, *rows: dict[str, Any]) -> None:
    table.insert_arrow(arrow_rows(table, rows))


# --- what this book has written ----------------------------------------------------


def check_versions(book: Book, session: SparkSession, table: Table) -> None:
    """Every version that a snapshot stands for has the same rows everywhere."""
    for snapshot in table.snapshots():
        ours = values(table.to_arrow(version=snapshot.version))
        number = snapshot.snapshot_id
        assert of_spark(session, table, f" VERSION AS OF {number}") == ours
        assert of_pyiceberg(book, table, number) == ours
        moment = datetime.fromtimestamp(snapshot.timestamp_ms / 1000).astimezone()
        assert values(table.to_arrow(as_of=moment)) == ours
        assert of_spark(session, table, f" TIMESTAMP AS OF timestamp_millis({snapshot.timestamp_ms})") == ours
    assert of_duckdb(table) == check_same(book, session, table)


def test_a_partitioned_table_is_the_same_in_all_engines_at_every_version(book: Book, session: SparkSession) -> None:
    table = book.tables.create("t", "id BIGINT, d DATE, kind STRING", partition_by=["day(d)", "kind", "bucket(4, id)"])
    for number in (1, 2):
        insert(
            table, *({"id": 10 * number + n, "d": date(2026, 1, n), "kind": kind} for n in (1, 2) for kind in ("a",))
        )
        insert(table, {"id": 10 * number, "d": None, "kind": None})
        table.publish()
    table.delete("kind IS NULL")
    table.publish()
    # The same rows in one file for each partition.
    files = [file.file_path for file in table.plan("kind = 'a'")]
    table.replace(files, table.read(session, "kind = 'a'"))
    table.publish()
    assert [item.summary["operation"] for item in table.snapshots()] == ["append", "append", "delete", "replace"]
    check_versions(book, session, table)
    for where in ("kind = 'a'", "d = '2026-01-01'", "id > 20", "kind IS NULL"):
        ours = values(table.to_arrow(where))
        assert of_spark(session, table, f" WHERE {where}") == ours


def test_an_evolved_and_nested_table_is_the_same_in_all_engines_at_every_version(
    book: Book, session: SparkSession
) -> None:
    table = book.tables.create(
        "t", "id INT, name STRING, gone STRING, at STRUCT<city: STRING, zip: INT>, tags ARRAY<STRING>"
    )
    insert(table, {"id": 1, "name": "a", "gone": "x", "at": {"city": "Ulm", "zip": 89073}, "tags": ["x", None]})
    insert(table, {"id": 2, "tags": []})
    table.publish()
    with table.update_schema() as update:
        update.rename_column("name", "title")
        update.widen_column("id", "BIGINT")
        update.drop_column("gone")
        update.add_column("day", "DATE")
    insert(table, {"id": 2**40, "title": "b", "day": date(2026, 1, 31), "at": {"city": None, "zip": 1}})
    table.publish()
    with table.update_schema() as update:
        update.add_column("gone", "INT")  # Another column of the same name.
    insert(table, {"id": 3, "gone": 5})
    table.publish()
    check_versions(book, session, table)
    assert [row.gone for row in session.sql("SELECT gone FROM lakebook.default.t WHERE id = 1").collect()] == [None]


# --- what Spark changes ------------------------------------------------------------


MODES = ("write.delete.mode", "write.update.mode", "write.merge.mode")


@pytest.mark.parametrize("mode", ["copy-on-write", "merge-on-read"])
def test_rows_that_spark_inserts_updates_deletes_and_merges(book: Book, session: SparkSession, mode: str) -> None:
    table = book.tables.create("t", "id BIGINT, name STRING, d DATE", partition_by=["day(d)"])
    insert(table, *({"id": n, "name": f"n{n}", "d": date(2026, 1, 1 + n % 3)} for n in range(9)))
    settings = ", ".join(f"'{name}' = '{mode}'" for name in MODES)
    session.sql(f"ALTER TABLE lakebook.default.t SET TBLPROPERTIES ({settings})")
    assert table.metadata.properties[MODES[0]] == mode
    wanted = {n: f"n{n}" for n in range(9)}

    def check() -> None:
        assert {row[0]: row[1] for row in check_same(book, session, table)} == wanted

    session.sql("INSERT INTO lakebook.default.t VALUES (20, 's', DATE'2026-02-01'), (21, NULL, NULL)")
    wanted |= {20: "s", 21: None}  # type: ignore[dict-item]
    check()
    session.sql("UPDATE lakebook.default.t SET name = 'u' WHERE id IN (3, 4, 21)")
    wanted |= {3: "u", 4: "u", 21: "u"}
    check()
    session.sql("DELETE FROM lakebook.default.t WHERE id = 5 OR name = 's'")
    del wanted[5], wanted[20]
    check()
    # Behind what this book has inserted meanwhile.
    insert(table, {"id": 30, "name": "ours", "d": date(2026, 1, 1)})
    wanted[30] = "ours"
    session.sql(
        "MERGE INTO lakebook.default.t a USING (SELECT 8 AS id, 'm' AS name, DATE'2026-01-02' AS d UNION ALL"
        " SELECT 40, 'new', DATE'2026-03-01' UNION ALL SELECT 0, 'gone', NULL) b ON a.id = b.id"
        " WHEN MATCHED AND b.name = 'gone' THEN DELETE WHEN MATCHED THEN UPDATE SET name = b.name"
        " WHEN NOT MATCHED THEN INSERT *"
    )
    wanted |= {8: "m", 40: "new"}
    del wanted[0]
    check()
    assert bool(table.record.deleted_rows) == (mode == "merge-on-read")
    # This book goes on with what Spark has left.
    table.delete("id = 6", spark=session)
    table.overwrite(frame_of(session, table, [{"id": 7, "name": "again", "d": date(2026, 1, 2)}]), where="id = 7")
    del wanted[6]
    wanted[7] = "again"
    check()
    if mode == "merge-on-read":
        session.sql("CALL lakebook.system.rewrite_position_delete_files(table => 'default.t')")
        check()
    session.sql("CALL lakebook.system.rewrite_data_files(table => 'default.t', options => map('rewrite-all', 'true'))")
    check()
    table.publish()
    assert of_duckdb(table) == values(table.to_arrow())


def test_shapes_that_spark_changes_and_times_that_it_travels_to(book: Book, session: SparkSession) -> None:
    table = book.tables.create("t", "id BIGINT, name STRING")
    insert(table, {"id": 1, "name": "a"}, {"id": 2, "name": "b"})
    table.publish()
    (first,) = table.snapshots()
    before = values(table.to_arrow())
    for change in (
        "ADD COLUMN x INT",
        "RENAME COLUMN name TO title",
        "ALTER COLUMN x TYPE BIGINT",
        "ADD PARTITION FIELD bucket(4, id)",
        "WRITE ORDERED BY id",
    ):
        session.sql(f"ALTER TABLE lakebook.default.t {change}")
        check_same(book, session, table)
    assert [field.name for field in table.schema.fields] == ["id", "title", "x"]
    assert table.describe().partition_by == ("bucket(4, id)",)
    session.sql("INSERT INTO lakebook.default.t VALUES (3, 's', 7)")
    insert(table, {"id": 4, "title": "ours", "x": 2**40})
    assert [row[0] for row in check_same(book, session, table)] == [1, 2, 3, 4]
    session.sql("ALTER TABLE lakebook.default.t DROP COLUMN x")
    check_same(book, session, table)
    assert of_spark(session, table, f" VERSION AS OF {first.snapshot_id}") == before
    assert values(table.to_arrow(version=first.version)) == before
    moment = datetime.fromtimestamp(first.timestamp_ms / 1000).astimezone()
    at = f" TIMESTAMP AS OF timestamp_millis({first.timestamp_ms})"
    assert of_spark(session, table, at) == values(table.to_arrow(as_of=moment)) == before
    # What Spark's metadata tables say is what the registry says.
    table.publish()
    rows = session.sql("SELECT snapshot_id, parent_id FROM lakebook.default.t.snapshots").collect()
    assert {tuple(row) for row in rows} == {(item.snapshot_id, item.parent_snapshot_id) for item in table.snapshots()}
    listed = session.sql("SELECT file_path, record_count FROM lakebook.default.t.files").collect()
    assert sorted(row.record_count for row in listed) == sorted(file.row_count for file in table.plan())
    for name in ("history", "manifests", "partitions", "entries", "refs", "all_data_files", "metadata_log_entries"):
        assert session.sql(f"SELECT * FROM lakebook.default.t.{name}").collect(), name
    session.sql("ALTER TABLE lakebook.default.t CREATE TAG kept")
    session.sql("ALTER TABLE lakebook.default.t CREATE BRANCH other")
    session.sql("INSERT INTO lakebook.default.t.branch_other VALUES (9, 'branch')")
    ours = check_same(book, session, table)
    assert of_spark(session, table, " VERSION AS OF 'other'") == [*ours, (9, "branch")]
    session.sql(f"CALL lakebook.system.rollback_to_snapshot('default.t', {first.snapshot_id})")
    assert [row[0] for row in check_same(book, session, table)] == [1, 2]
    # A tag has the columns of its snapshot.
    assert [row[:2] for row in of_spark(session, table, " VERSION AS OF 'kept'")] == ours
    insert(table, {"id": 5, "title": "after"})
    assert [row[0] for row in check_same(book, session, table)] == [1, 2, 5]


def test_tables_that_spark_makes_and_makes_anew(book: Book, session: SparkSession) -> None:
    session.sql("CREATE TABLE lakebook.default.c USING iceberg AS SELECT id, id * 2 AS y FROM range(100)")
    table = book.table("c")
    assert len(check_same(book, session, table)) == 100
    version = table.version
    session.sql(
        "CREATE OR REPLACE TABLE lakebook.default.c USING iceberg PARTITIONED BY (z) AS"
        " SELECT id, CAST(id % 2 AS STRING) AS z FROM range(7)"
    )
    table = book.table("c")
    assert [row[0] for row in check_same(book, session, table)] == list(range(7))
    assert len(table.to_arrow(version=version)) == 100
    insert(table, {"id": 8, "z": "0"})
    assert len(check_same(book, session, table)) == 8
    session.sql("CREATE TABLE lakebook.default.e (a INT NOT NULL, b MAP<STRING, INT>) USING iceberg PARTITIONED BY (a)")
    session.sql("INSERT INTO lakebook.default.e VALUES (1, map('x', 1)), (2, NULL)")
    assert len(check_same(book, session, book.table("e"))) == 2
    session.sql("ALTER TABLE lakebook.default.e RENAME TO default.f")
    assert book.table("f").count() == 2
    assert sorted(table.name for table in book.tables.list()) == ["c", "f"]
    with pytest.raises(REFUSED, match=r"(?i)version 3|format"):
        session.sql("CREATE TABLE lakebook.default.v (a INT) USING iceberg TBLPROPERTIES ('format-version' = '3')")


def test_nothing_that_spark_would_clean_up_goes(book: Book, session: SparkSession) -> None:
    table = book.tables.create("t", "id BIGINT")
    for number in range(3):
        insert(table, {"id": number})
        session.sql(f"INSERT INTO lakebook.default.t VALUES ({number + 10})")
    session.sql("DELETE FROM lakebook.default.t WHERE id < 2")
    before = {path for path in warehouse_of(book).rglob("*") if path.is_file()}
    versions = [item.version for item in table.snapshots()]
    for call in (
        "expire_snapshots(table => 'default.t', older_than => TIMESTAMP'2100-01-01 00:00:00', retain_last => 1)",
        "remove_orphan_files(table => 'default.t', older_than => TIMESTAMP'2000-01-01 00:00:00')",
    ):
        with pytest.raises(REFUSED, match=r"(?i)gc is disabled|gc\.enabled"):
            session.sql(f"CALL lakebook.system.{call}")
    assert {path for path in warehouse_of(book).rglob("*") if path.is_file()} >= before
    assert [item.version for item in table.snapshots()] == versions
    for version in versions:
        assert table.to_arrow(version=version).num_rows
    check_same(book, session, table)
    session.sql("CALL lakebook.system.rewrite_manifests('default.t')")
    check_same(book, session, table)


def test_a_file_without_field_ids_is_read_by_its_names_also_while_its_footer_is_owed(
    book: Book, session: SparkSession
) -> None:
    table = book.tables.create("t", "id BIGINT, name STRING")
    insert(table, {"id": 1, "name": "ours"})
    outside = book.catalog().load_table("default.t")
    path = warehouse_of(book) / "given.parquet"
    pq.write_table(pa.table({"id": [2], "name": ["given"]}), path)

    def away() -> None:
        raise StorageUnavailable("the warehouse does not answer", on="test")

    with failpoints.armed("debt.taken", away):
        outside.add_files([path.as_uri()])
        assert len(book.settle_debts().failed) == 1
        assert values(table.to_arrow()) == [(1, "ours"), (2, "given")]
        assert values(in_spark(table, session)) == [(1, "ours"), (2, "given")]
        with table.update_schema() as update:
            update.rename_column("name", "title")
        assert values(table.to_arrow()) == [(1, "ours"), (2, "given")]
        assert values(in_spark(table, session)) == [(1, "ours"), (2, "given")]
    assert book.settle_debts().failed == []
    # What was planned before is not what counts now.
    assert values(in_spark(table, session)) == [(1, "ours"), (2, "given")]
    check_same(book, session, table)


# --- the endpoint ------------------------------------------------------------------


def status_of(uri: str, token: str) -> int:
    request = urllib.request.Request(f"{uri}/v1/config", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def shown_settings(session: SparkSession) -> Sequence[tuple[str, str]]:
    return [(row.key, row.value) for row in session.sql("SET").collect()]


def test_the_token_is_shown_to_nobody_and_a_wrong_one_is_refused(
    book: Book, session: SparkSession, spark: SparkSession
) -> None:
    book.tables.create("t", "id BIGINT")
    (endpoint,) = book._endpoints
    assert status_of(endpoint.uri, endpoint.token) == 200
    assert status_of(endpoint.uri, "x" * len(endpoint.token)) == 401
    assert status_of(endpoint.uri, "") == 401
    settings = dict(shown_settings(session))
    assert settings["spark.sql.catalog.lakebook.uri"] == endpoint.uri
    assert "redacted" in settings["spark.sql.catalog.lakebook.token"]
    everything = [*settings.values(), *(value for _, value in spark.sparkContext.getConf().getAll())]
    assert [value for value in everything if endpoint.token in value] == []
    # No other session of the same Spark has it.
    assert [key for key, _ in shown_settings(spark) if "catalog.lakebook" in key] == []
    wrong = session_with_catalog(spark, "lakebook", endpoint.uri, "wrong", book.warehouse)
    with pytest.raises(REFUSED, match=r"(?i)not ?authorized|401"):
        wrong.sql("SHOW NAMESPACES IN lakebook").collect()


@pytest.fixture
def unstoppable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests go on with the Spark that is shared."""
    with monkeypatch.context() as patch:
        patch.setattr(SparkSession, "stop", lambda session: None)
        yield


@pytest.mark.usefixtures("unstoppable", "spark")
def test_the_endpoint_ends_with_the_session_or_with_the_book(tmp_path: Path) -> None:
    book = lakebook.open(tmp_path / "book", publish="off")
    book.tables.create("t", "id BIGINT")
    first, second = book.spark(iceberg=True), book.spark(iceberg=True, catalog="other")
    one, two = book._endpoints
    uris = one.uri, two.uri
    assert len(set(uris)) == 2
    assert [row.tableName for row in second.sql("SHOW TABLES IN other.default").collect()] == ["t"]
    second.sql("DROP TABLE other.default.t")
    assert list(book.tables.list()) == []
    first.stop()
    with pytest.raises(TerminalError):
        _ = one.uri
    with pytest.raises(OSError, match="refused"):
        status_of(uris[0], one.token)
    assert status_of(uris[1], two.token) == 200
    book.close()
    with pytest.raises(OSError, match="refused"):
        status_of(uris[1], two.token)


def test_spark_reads_a_file_without_ids_before_its_footer_was_taken(book: Book, session: SparkSession) -> None:
    table = book.tables.create("t", "id BIGINT, name STRING")
    insert(table, {"id": 1, "name": "a"})
    loaded = book.catalog().load_table("default.t")
    path = Path(unquote(urlsplit(loaded.location()).path)) / "data" / "plain.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    # In another order: without names, Iceberg would go by positions.
    pq.write_table(pa.table({"name": ["b", None], "id": [2, 3]}), path)
    rows: list[list[tuple[Any, ...]]] = []
    with failpoints.armed("debt.taken", lambda: rows.append(values(in_spark(table, session)))):
        loaded.add_files([f"{loaded.location()}/data/plain.parquet"])
        book.lake.settling.flush()
    assert rows == [[(1, "a"), (2, "b"), (3, None)]]
    assert check_same(book, session, table) == rows[0]
