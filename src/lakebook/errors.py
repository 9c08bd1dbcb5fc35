"""Every error Lakebook raises, in one tree.

    LakebookError
    ├── TransientError            trying again may help
    │   ├── RegistryBusy
    │   │   └── RegistryTimeout
    │   ├── RegistryUnavailable
    │   ├── StorageUnavailable
    │   ├── UploadIncomplete
    │   ├── AppendTurnHeld
    │   ├── BufferFull
    │   ├── FlushTimeout
    │   ├── SubscriberFailed
    │   ├── FilesChanged
    │   ├── MergeConflict
    │   ├── PipelineBusy
    │   ├── RangeClaimed
    │   ├── CompactionClaimed
    │   ├── SchemaChanged
    │   └── ViewChanged
    └── TerminalError             trying the same again cannot help
        ├── InvalidInput
        │   ├── InvalidName
        │   ├── InvalidSetting
        │   ├── InvalidPartitionCount
        │   ├── InvalidConfig
        │   ├── InvalidSegment
        │   ├── InvalidRecord
        │   ├── RecordTooLarge
        │   ├── InvalidPage
        │   ├── InvalidTable
        │   ├── InvalidFile
        │   ├── InvalidCursor
        │   ├── InvalidPredicate
        │   ├── InvalidSchema
        │   ├── InvalidPartitioning
        │   ├── PathOutsideWarehouse
        │   ├── InvalidMetadata
        │   ├── InvalidCheckpoint
        │   ├── NotAccepted
        │   ├── ReadOnlyTable
        │   ├── InvalidPipeline
        │   ├── InvalidView
        │   └── InvalidOffset
        │       ├── OffsetOverflow
        │       ├── NegativeOffset
        │       ├── OffsetBeyondWatermark
        │       ├── OffsetBelowLogStart
        │       ├── OffsetRegression
        │       ├── SegmentOverlap
        │       ├── SegmentGap
        │       └── WatermarkMismatch
        ├── NotFound
        │   ├── BookNotFound
        │   ├── TopicNotFound
        │   ├── PartitionNotFound
        │   ├── GroupNotFound
        │   ├── NamespaceNotFound
        │   ├── TableNotFound
        │   ├── VersionNotFound
        │   ├── VersionExpired
        │   ├── SnapshotNotFound
        │   ├── TagNotFound
        │   ├── PipelineNotFound
        │   ├── CommitNotFound
        │   ├── ObjectNotFound
        │   ├── DeadLetterNotFound
        │   ├── ViewNotFound
        │   ├── SourceNotFound
        │   └── FooterNotFound
        ├── Conflict
        │   ├── TopicAlreadyExists
        │   ├── SegmentAlreadyExists
        │   ├── NamespaceAlreadyExists
        │   ├── NamespaceNotEmpty
        │   ├── TableAlreadyExists
        │   ├── TagAlreadyExists
        │   ├── PipelineAlreadyExists
        │   ├── ViewAlreadyExists
        │   ├── RangeOverlap
        │   ├── ClaimLost
        │   ├── LeaseLost
        │   ├── SchedulerLost
        │   ├── PathInUse
        │   ├── ObjectExists
        │   ├── AppendTurnLost
        │   ├── ProducerFenced
        │   ├── SequenceConflict
        │   ├── StaleBatch
        │   ├── GenerationFenced
        │   ├── MemberRemoved
        │   ├── GroupInUse
        │   ├── CommitAborted
        │   ├── IncompatibleSchema
        │   ├── RegistryNotEmpty
        │   └── EpochChanged
        ├── CommitOutcomeUnknown
        ├── CursorExpired
        ├── SparkUnsuitable
        ├── InsertFailed
        ├── ProduceFailed
        ├── ProducerClosed
        ├── ConsumerClosed
        ├── NotPublishable
        ├── PublishFailed
        ├── ReadFailed
        ├── PipelineStopped
        ├── BuildFailed
        ├── BookHeld
        ├── BookExists
        ├── BackupInvalid
        ├── BackupNotWritable
        ├── CopyFailed
        ├── SchemaOutdated
        ├── SchemaTooNew
        ├── RegistryUnfinished
        ├── MigrationFailed
        ├── UnsafeSqlite
        ├── WarehouseNotWritable
        ├── StorageRefused
        ├── ObjectTruncated
        ├── RegistryCorrupt
        ├── CorruptFooter
        ├── UnknownFooterVersion
        ├── RegistryNotWritable
        └── BookClosed

An error says what failed, on what object, and what to do next. Whether it may be
retried is its type, never a guess from its text.
"""

from __future__ import annotations

import re


class LakebookError(Exception):
    """Something went wrong in Lakebook."""

    def __init__(self, what: str, *, on: str = "", remedy: str = "") -> None:
        self.what = what
        self.on = on
        self.remedy = remedy
        super().__init__(what)

    @property
    def code(self) -> str:
        """A stable name for programs: the class name in snake case."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def transient(self) -> bool:
        """Whether trying again may help."""
        return isinstance(self, TransientError)

    def __str__(self) -> str:
        text = f"{self.on}: {self.what}" if self.on else self.what
        return f"{text}. {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.on, self.remedy))

    def as_dict(self) -> dict[str, object]:
        """The error as plain values, for `--json` and for logs."""
        return {
            "error": self.code,
            "what": self.what,
            "on": self.on,
            "remedy": self.remedy,
            "transient": self.transient,
        }


def _rebuild(kind: type[LakebookError], what: str, on: str, remedy: str) -> LakebookError:
    """Unpickle an error that crossed a process border."""
    return kind(what, on=on, remedy=remedy)


class TransientError(LakebookError):
    """It failed for now; trying again may help."""


class TerminalError(LakebookError):
    """It failed for good; trying the same again cannot help."""


# --- transient -----------------------------------------------------------------


class RegistryBusy(TransientError):
    """The registry was locked or in conflict for longer than the retries last."""


class RegistryTimeout(RegistryBusy):
    """A statement took longer than the registry's server may work on one; nothing was changed."""


class RegistryUnavailable(TransientError):
    """The registry could not be reached."""


class StorageUnavailable(TransientError):
    """The warehouse could not be reached, or reading or writing there failed."""


class UploadIncomplete(TransientError):
    """The warehouse said that an object was stored, and it is not there, or not with all its bytes."""


class AppendTurnHeld(TransientError):
    """Another producer holds the partition's append turn."""


class BufferFull(TransientError):
    """A producer had no room for a record, for as long as it waits; the record was not taken."""


class FlushTimeout(TransientError):
    """Records were not stored in the time that was given to a flush; they are kept and sent on."""


class SubscriberFailed(TransientError):
    """A subscriber did not take an event, was not well, or did not answer in time."""


class FilesChanged(TransientError):
    """Another change has replaced or removed files this one works on; read again and repeat it."""


class MergeConflict(TransientError):
    """Segments that a merge would replace were removed or replaced meanwhile; look again and repeat it."""


class PipelineBusy(TransientError):
    """Somebody else runs the pipeline."""


class RangeClaimed(TransientError):
    """Another worker builds the range of the view just now."""


class CompactionClaimed(TransientError):
    """Another worker compacts the table just now."""


class SchemaChanged(TransientError):
    """The table's schema has changed meanwhile; look at the new one and repeat the change."""


class ViewChanged(TransientError):
    """The view's definition has changed meanwhile; look at the new one and repeat the change."""


# --- bad input -----------------------------------------------------------------


class InvalidInput(TerminalError):
    """An argument is not acceptable; nothing was changed."""


class InvalidName(InvalidInput):
    """A name is outside the rule for names."""


class InvalidSetting(InvalidInput):
    """A setting is unknown or has a value it cannot have."""


class InvalidPartitionCount(InvalidInput):
    """A topic cannot have this number of partitions."""


class InvalidConfig(InvalidInput):
    """A topic's configuration has an unknown key or a malformed value."""


class InvalidSegment(InvalidInput):
    """A segment's description contradicts itself."""


class InvalidRecord(InvalidInput):
    """A key, a value, headers or a time cannot be those of a record."""


class RecordTooLarge(InvalidInput):
    """A record has more bytes than the topic or the producer takes."""


class InvalidPage(InvalidInput):
    """A page was asked for with a limit or a token it cannot have."""


class InvalidTable(InvalidInput):
    """A table cannot have this format, compression or property, or cannot do what was asked."""


class InvalidFile(InvalidInput):
    """A file cannot be added to the table."""


class InvalidCursor(InvalidInput):
    """A text is not an event cursor of this registry."""


class InvalidPredicate(InvalidInput):
    """A condition on rows cannot be read, or does not fit the columns of the table."""


class InvalidSchema(InvalidInput):
    """A table cannot have this schema, or a text does not describe one."""


class InvalidPartitioning(InvalidInput):
    """A table cannot be partitioned or sorted like this."""


class PathOutsideWarehouse(InvalidInput):
    """A path does not lie inside the warehouse."""


class InvalidMetadata(InvalidInput):
    """A file is not the metadata of an Iceberg table, or not one that Lakebook takes."""


class InvalidCheckpoint(InvalidInput):
    """A checkpoint in the warehouse is torn or damaged, or of a newer version of Lakebook."""


class NotAccepted(InvalidInput):
    """A commit of an outside engine has something that Lakebook does not take."""


class ReadOnlyTable(InvalidInput):
    """The files of the table are a topic's segments: nobody but the topic changes it."""


class InvalidPipeline(InvalidInput):
    """This cannot be a pipeline."""


class InvalidView(InvalidInput):
    """A view cannot be like this."""


class InvalidOffset(InvalidInput):
    """An offset is not acceptable here."""


class OffsetOverflow(InvalidOffset):
    """An offset is larger than an offset can be."""


class NegativeOffset(InvalidOffset):
    """An offset is below zero."""


class OffsetBeyondWatermark(InvalidOffset):
    """An offset lies above the partition's high watermark."""


class OffsetBelowLogStart(InvalidOffset):
    """An offset lies below the partition's log start: its records are gone."""


class OffsetRegression(InvalidOffset):
    """A committed offset would move backwards."""


class SegmentOverlap(InvalidOffset):
    """A segment begins below the high watermark: its offsets are taken."""


class SegmentGap(InvalidOffset):
    """A segment begins above the high watermark: it would leave a hole."""


class WatermarkMismatch(InvalidOffset):
    """A high watermark may only be confirmed, and this is not the one."""


# --- not found -----------------------------------------------------------------


class NotFound(TerminalError):
    """What was asked for does not exist."""


class BookNotFound(NotFound):
    """There is no book at this place."""


class TopicNotFound(NotFound):
    """There is no topic of this name."""


class PartitionNotFound(NotFound):
    """The topic has no such partition."""


class GroupNotFound(NotFound):
    """There is no consumer group of this name."""


class NamespaceNotFound(NotFound):
    """There is no namespace of this name."""


class TableNotFound(NotFound):
    """There is no table of this name."""


class VersionNotFound(NotFound):
    """The table never had this version, or not yet."""


class VersionExpired(NotFound):
    """The table's history no longer keeps this version."""


class SnapshotNotFound(NotFound):
    """The published metadata lists no such snapshot, or none that stands for exactly this version."""


class TagNotFound(NotFound):
    """The table has no tag of this name."""


class PipelineNotFound(NotFound):
    """There is no such pipeline."""


class CommitNotFound(NotFound):
    """There is no commit row of this id."""


class ObjectNotFound(NotFound):
    """The warehouse has no object at this path."""


class DeadLetterNotFound(NotFound):
    """There is no such dead letter."""


class ViewNotFound(NotFound):
    """There is no such view."""


class SourceNotFound(NotFound):
    """A query names something that is no view, no table and no topic."""


class FooterNotFound(NotFound):
    """The registry holds no footer of this file."""


# --- conflicts -----------------------------------------------------------------


class Conflict(TerminalError):
    """It contradicts what the registry holds."""


class TopicAlreadyExists(Conflict):
    """A live topic has this name."""


class SegmentAlreadyExists(Conflict):
    """A segment with this id exists."""


class NamespaceAlreadyExists(Conflict):
    """A namespace has this name."""


class NamespaceNotEmpty(Conflict):
    """The namespace still has tables."""


class TableAlreadyExists(Conflict):
    """A live table has this name."""


class TagAlreadyExists(Conflict):
    """A tag or a branch of the table has this name."""


class PipelineAlreadyExists(Conflict):
    """There is a pipeline of that name already."""


class ViewAlreadyExists(Conflict):
    """A view of that name exists already."""


class RangeOverlap(Conflict):
    """A range of a view would overlap another one."""


class ClaimLost(Conflict):
    """Another worker has taken over the range that was being built, or the table that was being compacted."""


class LeaseLost(Conflict):
    """A reader's lease ran out before it was renewed; what it pinned may be gone."""


class SchedulerLost(Conflict):
    """Another process delivers events by now; what this one still wants to write down is refused."""


class PathInUse(Conflict):
    """Another segment, or a file that waits for its removal, has this path."""


class ObjectExists(Conflict):
    """The warehouse has an object at this path already."""


class AppendTurnLost(Conflict):
    """The partition's append turn has passed to another producer."""


class ProducerFenced(Conflict):
    """A newer epoch of this producer is at work."""


class SequenceConflict(Conflict):
    """A producer's sequence numbers overlap or leave out what it sent before."""


class StaleBatch(Conflict):
    """A sink's batch has a smaller number than its last one: its query has begun anew, or another has its name."""


class GenerationFenced(Conflict):
    """The consumer group has moved on to another generation."""


class MemberRemoved(Conflict):
    """The member is no longer one of its consumer group: it left, or was silent for too long."""


class GroupInUse(Conflict):
    """Live members of the consumer group read the topic: they would undo what is done to the group's offsets."""


class CommitAborted(Conflict):
    """The commit was fenced; it can never take effect."""


class IncompatibleSchema(Conflict):
    """The table's schema does not allow this change, or does not take this data."""


class RegistryNotEmpty(Conflict):
    """A registry is to be filled, and there is something in it."""


class EpochChanged(Conflict):
    """The book was restored or rebuilt since it was opened."""


# --- state of the book ---------------------------------------------------------


class CommitOutcomeUnknown(TerminalError):
    """The connection was lost during COMMIT and the outcome could not be settled."""


class SparkUnsuitable(TerminalError):
    """The Spark session cannot do what Lakebook needs of it."""


class InsertFailed(TerminalError):
    """An insert failed; nothing of it is visible."""


class ProduceFailed(TerminalError):
    """Records could not be stored for as long as it was tried; they are not in the topic."""


class ProducerClosed(TerminalError):
    """The producer was closed, or belongs to the process that forked this one."""


class ConsumerClosed(TerminalError):
    """The consumer was closed, or belongs to the process that forked this one."""


class NotPublishable(TerminalError):
    """A table cannot be published as Iceberg without telling other engines something wrong."""


class PublishFailed(TerminalError):
    """Iceberg metadata could not be written; what is published is as it was before."""


class ReadFailed(TerminalError):
    """A read failed though its files are pinned."""


class PipelineStopped(TerminalError):
    """The pipeline does not go on before somebody has looked at it."""


class BuildFailed(TerminalError):
    """Ranges of a view could not be built; nothing of those was recorded."""


class CursorExpired(TerminalError):
    """The events after this cursor are no longer kept, or belong to another epoch."""


class BookHeld(TerminalError):
    """The book was restored from a backup, and nothing is removed before somebody has looked at it."""


class BookExists(TerminalError):
    """A book can be restored or copied only to a place where there is none."""


class BackupInvalid(TerminalError):
    """The file is no backup of a book, or not all of one, or was changed since."""


class BackupNotWritable(TerminalError):
    """The backup cannot be written there."""


class CopyFailed(TerminalError):
    """A book could not be copied as a whole; there is no book at the new place yet."""


class SchemaOutdated(TerminalError):
    """The registry has an older schema than this version of Lakebook."""


class SchemaTooNew(TerminalError):
    """The registry was written by a newer version of Lakebook."""


class RegistryUnfinished(TerminalError):
    """The registry was being rebuilt, and that was not finished."""


class MigrationFailed(TerminalError):
    """A migration found something that it must not go past; the schema is that of the revision before."""


class UnsafeSqlite(TerminalError):
    """This SQLite library can corrupt a WAL database."""


class WarehouseNotWritable(TerminalError):
    """The warehouse cannot be written."""


class StorageRefused(TerminalError):
    """The warehouse does not take it: there is no right, no room, or something else in its place."""


class ObjectTruncated(TerminalError):
    """An object of the warehouse is shorter than it has to be."""


class RegistryCorrupt(TerminalError):
    """The registry holds something that it must not hold."""


class CorruptFooter(TerminalError):
    """A Parquet footer is not one, or contradicts what is recorded about its file."""


class UnknownFooterVersion(TerminalError):
    """A Parquet footer was recorded in a form that this version of Lakebook does not know."""


class RegistryNotWritable(TerminalError):
    """The database has no room, or this user has no right to write there."""


class BookClosed(TerminalError):
    """The book was closed, or belongs to the process that forked this one."""
