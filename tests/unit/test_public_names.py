"""The names that are promised, and the shape of every error."""

from __future__ import annotations

import inspect
import pickle

import pytest

import lakebook
from lakebook import errors

PUBLIC = {
    "Acknowledgement", "AppendResult", "AppendTurn", "Appender", "Book", "Cleaner", "Consumer", "ConsumerGroup",
    "ConsumerOffset", "CopyReport", "Cursor",
    "Event", "EventBatch", "GroupState", "InsertReport", "LakebookError", "Materialized", "MetadataStore",
    "OffsetCommit", "OffsetReset", "Page", "Partition", "PartitionLag", "PendingReport", "PinnedTable", "Plan",
    "Producer", "PublishReport", "RebuildReport", "Record", "RestoreReport",
    "SegmentInfo", "SnapshotRecord", "Table", "TableDescription", "Tables", "TemporaryFile", "TerminalError",
    "Topic", "TopicConfig", "TransientError", "View", "Views", "copy_book", "open", "rebuild_book", "restore_book",
    "spark_session",
}  # fmt: skip

SPECIFIED = {
    "create_topic", "delete_topic", "get_topic", "list_topics", "update_topic_config", "get_partition",
    "update_high_watermark", "list_partitions", "add_segment", "get_segments", "find_segment_for_offset",
    "delete_segments_before", "ensure_consumer_group", "commit_offset", "get_committed_offset",
    "get_consumer_offsets", "delete_consumer_group", "claim_append", "append_segment", "reset_offset", "lag",
    "find_segment_for_timestamp",
}  # fmt: skip

ALL_ERRORS = [
    value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, errors.LakebookError)
]


def test_the_package_exports_what_it_promises_and_no_more() -> None:
    assert set(lakebook.__all__) == PUBLIC
    assert all(hasattr(lakebook, name) for name in PUBLIC)


def test_the_metadata_store_has_every_specified_operation() -> None:
    assert {name for name in SPECIFIED if callable(getattr(lakebook.MetadataStore, name, None))} == SPECIFIED


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_drawn_in_the_tree_and_says_whether_it_may_be_retried(kind: type[errors.LakebookError]) -> None:
    assert errors.__doc__ is not None
    assert f" {kind.__name__}" in errors.__doc__
    assert kind.__doc__
    if kind is not errors.LakebookError:
        assert issubclass(kind, errors.TransientError) != issubclass(kind, errors.TerminalError)


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_crosses_a_process_border_whole(kind: type[errors.LakebookError]) -> None:
    error = kind("it failed", on="topic orders", remedy="Try again")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "topic orders: it failed. Try again"
    assert again.as_dict() == error.as_dict()
    assert again.as_dict()["transient"] == issubclass(kind, errors.TransientError)


def test_an_error_has_a_stable_code() -> None:
    assert errors.TopicNotFound("x").code == "topic_not_found"
