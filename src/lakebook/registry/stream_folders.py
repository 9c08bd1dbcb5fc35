"""Folders that segments are written to, each with a fence that tells when nothing new can count in it.

    topics/<topic>/<partition>/t<token>     the holder of an append turn, until the token has passed on
    topics/<topic>/<partition>/m-<commit>   a merge, until its commit is settled
    topics/<topic>/s-<commit>               a batch of several partitions, until its commit is settled

A folder is ended in the transaction that closes its fence. What lies in it from then on counts only if a
row knows it. So it can be swept by its row, and is forgotten when it was found quiet a grace after that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.commits import abort_commit, open_commit_row
from lakebook.registry.statements import POSTGRESQL, SQLITE, ZERO, Statement, among, bind, insert_into
from lakebook.registry.temporary_files import NOT_DELETED
from lakebook.registry.transactions import Reader, Transaction, new_id

#: What the commit of a folder is for: to replace segments by one; to append to several partitions at once.
MERGE, BATCH = "merge", "batch"
#: Where all of them lie.
TOPICS = "topics"

_f = schema.stream_folders.c
_s = schema.segments.c

INSERT_FOLDER = insert_into(schema.stream_folders)
END_FOLDER = Statement(
    sa.update(schema.stream_folders)
    .where(_f.folder == bind("of_folder"), _f.ended_at.is_(None))
    .values(ended_at=bind("now")),
    "now",
    "of_folder",
)
RENEW_FOLDER = Statement(
    sa.update(schema.stream_folders)
    .where(_f.folder == bind("of_folder"), _f.ended_at.is_(None))
    .values(opened_at=bind("now")),
    "now",
    "of_folder",
)
OPEN_COMMITS_OF_TOPIC = Statement(
    sa.select(_f.commit_id).where(_f.topic_id == bind("of_topic"), _f.ended_at.is_(None), _f.commit_id.is_not(None)),
    "of_topic",
)
END_FOLDERS_OF_TOPIC = Statement(
    sa.update(schema.stream_folders)
    .where(_f.topic_id == bind("of_topic"), _f.ended_at.is_(None))
    .values(ended_at=bind("now")),
    "now",
    "of_topic",
)
_FOLDER = (_f.folder, _f.commit_id, _f.topic_id, _f.partition_id, _f.token, _f.opened_at, _f.swept_at)
SILENT_FOLDERS = Statement(
    sa.select(*_FOLDER)
    .where(_f.ended_at.is_(None), _f.commit_id.is_not(None), _f.opened_at <= bind("silent_since"))
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "silent_since",
    "most",
)
TO_SWEEP = Statement(
    sa.select(*_FOLDER)
    .where(_f.ended_at <= bind("ended_before"), sa.or_(_f.swept_at.is_(None), _f.swept_at <= bind("swept_before")))
    .order_by(_f.ended_at)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "ended_before",
    "swept_before",
    "most",
)
NOTE_SWEPT = Statement(
    sa.update(schema.stream_folders).where(_f.folder == bind("of_folder")).values(swept_at=bind("now")),
    "now",
    "of_folder",
)
FORGET_FOLDER = Statement(
    sa.delete(schema.stream_folders).where(_f.folder == bind("of_folder"), _f.ended_at.is_not(None)), "of_folder"
)
# Segments are found by bucket and key; there is one bucket, or a few if the warehouse was moved.
NEXT_BUCKET = Statement(sa.select(sa.func.min(_s.s3_bucket)).where(_s.s3_bucket > bind("after")), "after")
_keys = {
    database: sa.select(_s.s3_key).where(_s.s3_bucket == bind("bucket"), among(_s.s3_key, "paths", database))
    for database in (SQLITE, POSTGRESQL)
}
SEGMENT_KEYS = Statement(_keys[SQLITE], "bucket", "paths", postgresql=_keys[POSTGRESQL])


def _among_any(database: str, *which: tuple[sa.ColumnElement[Any], ...]) -> sa.CompoundSelect[Any]:
    return sa.union_all(*(sa.select(column).where(among(column, "paths", database), *more) for column, *more in which))


_retired = (schema.retired_segments.c.file_path,)
# What was deleted already leaves a row for a day. Something that appears under such a path counts for nobody.
_waiting = (schema.temporary_files.c.file_path, NOT_DELETED)
_elsewhere = (_retired, _waiting, (schema.table_files.c.file_path,), (schema.branch_files.c.file_path,))
KNOWN_ELSEWHERE = Statement(_among_any(SQLITE, *_elsewhere), "paths", postgresql=_among_any(POSTGRESQL, *_elsewhere))
RETIRED_AMONG = Statement(_among_any(SQLITE, _retired), "paths", postgresql=_among_any(POSTGRESQL, _retired))


@dataclass(frozen=True)
class StreamFolder:
    """A folder for segments. That of an append turn has a token, that of a merge or a batch a commit."""

    folder: str
    commit_id: str | None
    topic_id: int
    partition_id: int | None = None
    token: int | None = None
    opened_at: int = 0
    swept_at: int | None = None


def turn_folder(topic_id: int, number: int, token: int) -> str:
    """The folder of the holder of an append turn."""
    return f"{TOPICS}/{topic_id}/{number}/t{token}"


def merge_folder(topic_id: int, number: int, commit_id: str) -> str:
    """The folder of a merge."""
    return f"{TOPICS}/{topic_id}/{number}/m-{commit_id}"


def batch_folder(topic_id: int, commit_id: str) -> str:
    """The folder of a batch."""
    return f"{TOPICS}/{topic_id}/s-{commit_id}"


def open_turn_folder(transaction: Transaction, topic_id: int, number: int, token: int) -> None:
    """Open the folder of a turn that is being taken."""
    folder = turn_folder(topic_id, number, token)
    transaction.run(INSERT_FOLDER, folder, topic_id, number, token, None, transaction.clock.now_ms(), None, None)


def open_folder(transaction: Transaction, topic_id: int, number: int | None, silent: float = 0.0) -> StreamFolder:
    """Open a commit and its folder: of a merge in a partition, or, without one, of a batch.

    For so many seconds nobody need hear of it: it counts as opened after them.
    """
    commit_id, now = new_id(), transaction.clock.now_ms() + round(silent * 1000)
    if number is None:
        kind, folder = BATCH, batch_folder(topic_id, commit_id)
    else:
        kind, folder = MERGE, merge_folder(topic_id, number, commit_id)
    open_commit_row(transaction, commit_id, kind)
    transaction.run(INSERT_FOLDER, folder, topic_id, number, None, commit_id, now, None, None)
    return StreamFolder(folder, commit_id, topic_id, number, None, now)


def end_folder(transaction: Transaction, folder: str) -> None:
    """Note that the fence of a folder is closed; one that was ended before stays as it is."""
    transaction.run(END_FOLDER, transaction.clock.now_ms(), folder)


def renew_folder(transaction: Transaction, folder: StreamFolder) -> bool:
    """Say that whoever writes to a folder is at work; false if it was ended."""
    return transaction.run(RENEW_FOLDER, transaction.clock.now_ms(), folder.folder) == 1


def settle_folder(transaction: Transaction, folder: StreamFolder) -> None:
    """Close the fence of a merge or a batch, and end its folder. One that was committed stays committed."""
    if folder.commit_id is not None:
        # It waits for a COMMIT in flight, so that the folder is ended when all is decided.
        abort_commit(transaction, folder.commit_id)
        end_folder(transaction, folder.folder)


def end_folders_of(transaction: Transaction, topic_id: int) -> None:
    """End all folders of a hidden topic, and fence the merges and batches under way."""
    for (commit_id,) in sorted(transaction.all(OPEN_COMMITS_OF_TOPIC, topic_id)):
        abort_commit(transaction, commit_id)
    transaction.run(END_FOLDERS_OF_TOPIC, transaction.clock.now_ms(), topic_id)


# --- sweeping ------------------------------------------------------------------


def silent_folders(reader: Reader, silent_since: int, most: int) -> list[StreamFolder]:
    """Folders of merges and batches that nobody has ended, and that were opened or renewed before a time."""
    return [StreamFolder(*row) for row in reader.all(SILENT_FOLDERS, silent_since, most)]


def unswept_folders(reader: Reader, now: int, grace: float, most: int) -> list[StreamFolder]:
    """Folders that were ended a grace ago, and never swept or a grace ago for the last time, the oldest first."""
    before = now - round(grace * 1000)
    return [StreamFolder(*row) for row in reader.all(TO_SWEEP, before, before, most)]


def note_folder_swept(transaction: Transaction, folder: str) -> None:
    """Note that a folder was swept just now."""
    transaction.run(NOTE_SWEPT, transaction.clock.now_ms(), folder)


def forget_folder(transaction: Transaction, folder: str) -> None:
    """Forget a folder that is ended and quiet."""
    transaction.run(FORGET_FOLDER, folder)


def segment_paths(reader: Reader, paths: Iterable[str]) -> set[str]:
    """Which of these paths a segment has, or a retired one had."""
    listed = reader.listed(paths)
    # Files go one way, from segments to retired ones: one that does so meanwhile is seen in one of the two.
    return _live_paths(reader, listed) | {row[0] for row in reader.all(RETIRED_AMONG, listed)}


def unknown_stream_paths(reader: Reader, paths: Iterable[str]) -> list[str]:
    """Which of these paths no row knows: no segment or retired one, no table or branch, and nothing that waits."""
    wanted = list(paths)
    if not wanted:
        return []
    listed = reader.listed(wanted)
    # In the order in which a file goes: from a segment to a retired one, and from there to those that wait.
    known = _live_paths(reader, listed)
    known |= {row[0] for row in reader.all(KNOWN_ELSEWHERE, listed)}
    return [path for path in wanted if path not in known]


def _live_paths(reader: Reader, listed: Any) -> set[str]:
    found: set[str] = set()
    bucket: str | None = ""
    while bucket is not None:
        found.update(row[0] for row in reader.all(SEGMENT_KEYS, bucket, listed))
        row = reader.one(NEXT_BUCKET, bucket)
        bucket = None if row is None else row[0]
    return found
