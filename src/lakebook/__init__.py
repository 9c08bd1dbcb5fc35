"""Lakebook: the book of record of a streaming lakehouse."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lakebook.book import Book
from lakebook.book import open_book as open  # noqa: A004
from lakebook.errors import LakebookError, TerminalError, TransientError
from lakebook.pages import Page
from lakebook.registry.appends import AppendResult, AppendTurn
from lakebook.registry.events import Cursor, Event, EventBatch
from lakebook.registry.groups import (
    ConsumerGroup,
    ConsumerOffset,
    GroupState,
    OffsetCommit,
    OffsetReset,
    PartitionLag,
)
from lakebook.registry.partitions import Partition
from lakebook.registry.segments import SegmentInfo
from lakebook.registry.temporary_files import TemporaryFile
from lakebook.registry.topics import Topic, TopicConfig
from lakebook.streams.metadata_store import MetadataStore

if TYPE_CHECKING:
    from lakebook.copying import CopyReport, copy_book
    from lakebook.lake.appender import Appender
    from lakebook.lake.cleaning import Cleaner
    from lakebook.lake.inserting import InsertReport
    from lakebook.lake.planning import Plan
    from lakebook.lake.published import PendingReport, PublishReport
    from lakebook.lake.table import PinnedTable, Table, TableDescription
    from lakebook.lake.tables import Tables
    from lakebook.recovery.rebuild import rebuild_book
    from lakebook.recovery.report import RebuildReport
    from lakebook.registry.publishing import SnapshotRecord
    from lakebook.restoring import RestoreReport, restore_book
    from lakebook.spark.session import spark_session
    from lakebook.streams.batching import Acknowledgement
    from lakebook.streams.consumer import Consumer
    from lakebook.streams.producer import Producer
    from lakebook.streams.records import Record
    from lakebook.views.view import Materialized, View
    from lakebook.views.views import Views

# Loaded when they are first asked for: whoever uses streams alone need not wait for Arrow and PyIceberg.
_LAZY = {
    "Acknowledgement": "lakebook.streams.batching",
    "Appender": "lakebook.lake.appender",
    "Cleaner": "lakebook.lake.cleaning",
    "CopyReport": "lakebook.copying",
    "Consumer": "lakebook.streams.consumer",
    "InsertReport": "lakebook.lake.inserting",
    "Materialized": "lakebook.views.view",
    "PendingReport": "lakebook.lake.published",
    "PinnedTable": "lakebook.lake.table",
    "Plan": "lakebook.lake.planning",
    "Producer": "lakebook.streams.producer",
    "PublishReport": "lakebook.lake.published",
    "RebuildReport": "lakebook.recovery.report",
    "Record": "lakebook.streams.records",
    "SnapshotRecord": "lakebook.registry.publishing",
    "Table": "lakebook.lake.table",
    "TableDescription": "lakebook.lake.table",
    "Tables": "lakebook.lake.tables",
    "RestoreReport": "lakebook.restoring",
    "View": "lakebook.views.view",
    "Views": "lakebook.views.views",
    "copy_book": "lakebook.copying",
    "restore_book": "lakebook.restoring",
    "rebuild_book": "lakebook.recovery.rebuild",
    "spark_session": "lakebook.spark.session",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lakebook' has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "Acknowledgement",
    "AppendResult",
    "AppendTurn",
    "Appender",
    "Book",
    "Cleaner",
    "Consumer",
    "ConsumerGroup",
    "ConsumerOffset",
    "CopyReport",
    "Cursor",
    "Event",
    "EventBatch",
    "GroupState",
    "InsertReport",
    "LakebookError",
    "Materialized",
    "MetadataStore",
    "OffsetCommit",
    "OffsetReset",
    "Page",
    "Partition",
    "PartitionLag",
    "PendingReport",
    "PinnedTable",
    "Plan",
    "Producer",
    "PublishReport",
    "RebuildReport",
    "Record",
    "RestoreReport",
    "SegmentInfo",
    "SnapshotRecord",
    "Table",
    "TableDescription",
    "Tables",
    "TemporaryFile",
    "TerminalError",
    "Topic",
    "TopicConfig",
    "TransientError",
    "View",
    "Views",
    "copy_book",
    "open",
    "rebuild_book",
    "restore_book",
    "spark_session",
]
