"""Metrics: counters, timings and gauges, as values and in the Prometheus format."""

from __future__ import annotations

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

from books import describe
from lakebook import Book
from lakebook.errors import TopicNotFound
from lakebook.metrics import GAUGES


def test_gauges_say_what_the_registry_holds(book: Book) -> None:
    book.metadata.create_topic("orders", 2)
    book.metadata.add_segments([describe(base=0), describe(base=100), describe(partition=1)])
    book.metadata.commit_offset("g", "orders", 0, 150)
    book.metadata.delete_segments_before("orders", 0, 100)
    table = book.tables.create("t", "id BIGINT")
    table.insert_arrow(pa.table({"id": [1, 2]}))
    with table.pin():
        values = book.measure().values()
    assert {name: values[f"lakebook_{name}"] for name in GAUGES} == {
        "topics": 1,
        "partitions": 2,
        "segments": 2,
        "segment_bytes": 2000,
        "segment_records": 200,
        "consumer_groups": 1,
        "consumer_lag": 50,
        "tables": 1,
        "table_files": 1,
        "table_rows": 2,
        "table_bytes": table.record.total_size,
        "unpublished_tables": 1,
        "unpublished_versions": 2,
        "leases": 1,
        "inserts": 1,
        "events": 3 + 5 + 2 + 2 + 3 + 3,  # created, recorded, committed, removed; a table created, filled
        "temporary_files": 1,
        "temporary_files_expired": 0,
        "temporary_file_bytes": 1000,
        "open_commits": 0,
        "owed_updates": 0,
        "failed_updates": 0,
        "stalled_deliveries": 0,
        "dead_letters": 0,
        "requests": 0,
        "pipelines": 0,
        "stopped_pipelines": 0,
        "failing_pipelines": 0,
        "pipeline_lag": 0,
    }


def test_counters_and_timings_tell_what_this_process_did(book: Book) -> None:
    book.metadata.create_topic("orders")
    with pytest.raises(TopicNotFound):
        book.metadata.delete_topic("nowhere")
    values = book.metrics.values()
    assert values["lakebook_transactions_total{outcome=committed}"] >= 1
    assert values["lakebook_transactions_total{outcome=failed}"] == 1
    assert values["lakebook_events_captured_total{table=topics}"] == 1
    assert values["lakebook_seconds_count{operation=transaction}"] >= 2
    assert values["lakebook_seconds_sum{operation=transaction}"] > 0


def test_the_prometheus_format_can_be_read_by_its_own_parser(book: Book) -> None:
    book.metadata.create_topic("orders", 3)
    families = {f.name: f for f in text_string_to_metric_families(book.measure().prometheus())}
    assert families["lakebook_partitions"].samples[0].value == 3
    assert {f"lakebook_{name}" for name in GAUGES} <= families.keys()
    assert all(family.documentation for family in families.values())
