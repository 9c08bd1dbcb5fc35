"""Spark's own Iceberg reads a topic's table as it reads any other, and cannot change it."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from lakebook import Book
from mirrored import TOPIC, append, as_records, consumed, in_order, in_topic, merge, paths, send

REFUSED = (PySparkException, Py4JJavaError)
NAME = f"lakebook.topics.{TOPIC}"


@pytest.fixture
def session(book: Book, spark: SparkSession) -> SparkSession:
    """A session of the shared Spark in which the book is a catalog."""
    return book.spark(iceberg=True)


def check(book: Book, session: SparkSession) -> None:
    """Spark, through the catalog and through the table, has the records of a consumer, from the topic's own files."""
    ours = consumed(book)
    assert as_records(in_topic(book)) == ours
    through_catalog = session.sql(f"SELECT * FROM {NAME}")
    assert as_records(in_order(through_catalog.toArrow())) == ours
    files = session.sql(f"SELECT file_path FROM {NAME}.files").collect()
    assert sorted(book.lake.store.relative(row[0]) for row in files) == paths(book)
    assert as_records(in_order(book.table(TOPIC, namespace="topics").read(session).toArrow())) == ours
    (counted,) = session.sql(f"SELECT count(*) FROM {NAME} WHERE partition = 0").collect()
    assert counted[0] == sum(row["partition"] == 0 for row in ours)


def test_spark_reads_the_records_of_a_topic_and_cannot_change_them(book: Book, session: SparkSession) -> None:
    book.metadata.create_topic(TOPIC, 2, config={"iceberg": "true"})
    old = [append(book, "a", "b"), append(book, "c")]
    append(book, "d", partition=1)
    check(book, session)
    merge(book, old)
    send(book, "e", "f", partition=1)
    check(book, session)
    book.metadata.delete_segments_before(TOPIC, 1, 1)
    check(book, session)
    for statement in (
        f"INSERT INTO {NAME} SELECT * FROM {NAME}",
        f"DELETE FROM {NAME} WHERE offset = 0",
        f"ALTER TABLE {NAME} ADD COLUMN extra INT",
        f"ALTER TABLE {NAME} SET TBLPROPERTIES ('a' = 'b')",
        f"DROP TABLE {NAME}",
    ):
        with pytest.raises(REFUSED, match="only the topic changes it"):
            session.sql(statement)
    check(book, session)
    operations = session.sql(f"SELECT operation FROM {NAME}.snapshots ORDER BY committed_at").collect()
    assert [row[0] for row in operations] == ["append", "replace", "append", "delete"]
    book.release_reads()
