"""Lakebook: the book of record of a streaming lakehouse."""

from __future__ import annotations

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

__version__ = "0.1.0"

__all__ = [
    "AppendResult",
    "AppendTurn",
    "Book",
    "ConsumerGroup",
    "ConsumerOffset",
    "Cursor",
    "Event",
    "EventBatch",
    "GroupState",
    "LakebookError",
    "MetadataStore",
    "OffsetCommit",
    "OffsetReset",
    "Page",
    "Partition",
    "PartitionLag",
    "SegmentInfo",
    "TemporaryFile",
    "TerminalError",
    "Topic",
    "TopicConfig",
    "TransientError",
    "open",
]
