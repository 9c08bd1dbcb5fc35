"""One attempt to change a table's files: its commit row, its folder, and what becomes of both.

Reserve, write into the folder, commit. If anything fails the commit row is fenced first;
only then is the folder removed, because from then on the attempt can never become visible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType

from lakebook import failpoints
from lakebook.errors import CommitAborted, CommitOutcomeUnknown, LakebookError
from lakebook.lake.lake import Lake
from lakebook.registry.commits import COMMIT_OPEN, require_open
from lakebook.registry.file_stats import DELETE_STATS_BETWEEN
from lakebook.registry.inserts import (
    DELETE_STAGED_FOOTERS,
    INSERT,
    NOTE_IDS,
    NOTE_SWEPT,
    REWRITE,
    declare_work,
    open_insert,
)
from lakebook.registry.table_files import (
    Committed,
    HeldBack,
    NewFile,
    TableChange,
    commit_change,
    reserve_file_ids,
    stage_footers,
    stage_stats,
    staged_chunks,
)
from lakebook.registry.tables import TableRecord, refuse_mirror
from lakebook.registry.transactions import Transaction, new_id

#: Where the folders of inserts lie, outside of any Iceberg location.
DATA = "data"


# How often a change that waits looks whether it still has to.
_HOLD_STEP = 0.02


def folder_of(table_id: int, commit_id: str) -> str:
    """The folder of an attempt: of ids alone, so that no name can lead anywhere else."""
    return f"{DATA}/{table_id}/{commit_id}"


def end_of_folder(folder: str) -> str:
    """The first path after all those in a folder."""
    return folder + "0"  # The character after the slash.


@dataclass
class Attempt:
    """An attempt at work. Leave its `with` block without a commit, and nothing of it remains."""

    lake: Lake
    table: TableRecord
    #: Whether it writes files of its own; `add_files` takes those of others.
    writes: bool = True
    #: What it is for. One that ends files it has read is a `REWRITE`: begun before it reads, so that no
    #: compaction takes them away from under it.
    kind: str = INSERT
    #: What Spark's writer is told beyond the table's own properties.
    writing: Mapping[str, str] = field(default_factory=dict)
    #: Whether a view makes it, whose table it is.
    by_view: bool = False
    commit_id: str = field(default_factory=new_id)
    committed: Committed | None = None
    _staged: tuple[int, int] | None = None
    #: Whether nobody knows what became of it: its commit was lost and the registry did not answer.
    outcome_unknown: bool = False

    @property
    def folder(self) -> str:
        """Where it writes."""
        return folder_of(self.table.id, self.commit_id)

    def __enter__(self) -> Attempt:
        if not self.by_view:
            refuse_mirror(self.table)
        self.lake.registry.write(self._open)
        self.lake.renewals.hold_insert(self.commit_id)
        try:
            failpoints.reach("insert.reserved")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _open(self, transaction: Transaction) -> None:
        folder, alive = self.folder if self.writes else None, self.lake.settings.insert_alive
        if self.kind == REWRITE:
            declare_work(transaction, self.table, self.commit_id, folder, alive)
        else:
            open_insert(transaction, self.commit_id, self.table.id, folder, alive, self.kind)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lake.renewals.let_go(self.commit_id)
        if self.committed is None and not self.outcome_unknown:
            # The caller's own error is the one to report; what is left over, a sweep finds.
            with suppress(LakebookError):
                self.abort()

    def commit(self, change: TableChange) -> Committed:
        """Make one version of the change. Footers and statistics of many files are staged first."""
        if not change.is_small:
            change = self._stage(change)
        try:
            self.committed = self._commit(change)
        except CommitOutcomeUnknown:
            self.outcome_unknown = True
            self.lake.notice(self.table)
            raise
        failpoints.reach("change.committed")
        return self.committed

    def prepared(self, change: TableChange) -> TableChange:
        """A change that `commit_within` can take: of many files, footers and statistics are staged."""
        return change if change.is_small else self._stage(change)

    def commit_within(self, transaction: Transaction, change: TableChange) -> Committed:
        """Make one version of a change in the transaction of another attempt. Whoever commits that sets `committed`."""
        if transaction.run(COMMIT_OPEN, transaction.clock.now_ms(), self.commit_id, transaction.epoch) != 1:
            raise CommitAborted("it was taken for dead and fenced", on=self.table.shown, remedy="Begin again")
        return commit_change(transaction, self.table, replace(change, waits=False), self.commit_id)

    def _commit(self, change: TableChange) -> Committed:
        """Commit, after waiting for an outside engine that has precedence for a moment."""
        clock = self.lake.clock
        patience = clock.monotonic() + 2 * self.lake.settings.outside_hold
        while True:
            try:
                return self.lake.registry.write(
                    lambda transaction: commit_change(transaction, self.table, change, self.commit_id),  # noqa: B023 - called at once
                    commit_id=self.commit_id,
                )
            except HeldBack as held:
                left = min((held.until - clock.now_ms()) / 1000, patience - clock.monotonic())
                if left > 0:
                    clock.sleep(min(left, _HOLD_STEP))
                else:
                    change = replace(change, waits=False)

    def _stage(self, change: TableChange) -> TableChange:
        number = len(change.added)

        def reserve(transaction: Transaction) -> int:
            require_open(transaction, self.commit_id)
            first = reserve_file_ids(transaction, self.table, number)
            transaction.run(NOTE_IDS, first, first + number - 1, self.commit_id)
            return first

        first = self.lake.registry.write(reserve)
        self._staged = (first, first + number - 1)
        begin = first
        for chunk in staged_chunks(change.added):
            start = begin
            self.lake.registry.write(lambda transaction: self._stage_chunk(transaction, chunk, start))  # noqa: B023 - called at once
            begin += len(chunk)
            failpoints.reach("insert.chunk_staged")
        return replace(change, first_staged_id=first)

    def _stage_chunk(self, transaction: Transaction, files: Sequence[NewFile], first_id: int) -> None:
        require_open(transaction, self.commit_id)
        stage_stats(transaction, self.table, files, first_id)
        if self.writes:
            stage_footers(transaction, files)

    def abort(self) -> bool:
        """Fence it and remove what it wrote; whether it had not been committed after all."""
        state = self.lake.registry.settle(self.commit_id)
        if state == "committed":
            # Whoever waited for it does not know, and will not have it published.
            self.lake.notice(self.table)
            return False
        failpoints.reach("insert.aborted")
        discard(self.lake, self.table.id, self.commit_id, self.folder if self.writes else None, self._staged)
        return True


def discard(
    lake: Lake, table_id: int, commit_id: str, folder: str | None, staged: tuple[int | None, int | None] | None
) -> int:
    """Remove what an aborted attempt has left: its folder, staged footers and statistics.

    The caller has fenced it. The row of the attempt stays: a late executor may still write.
    """
    removed = lake.store.delete_folder(folder) if folder is not None else 0

    def work(transaction: Transaction) -> None:
        if folder is not None:
            transaction.run(DELETE_STAGED_FOOTERS, f"{folder}/", end_of_folder(folder))
        if staged is not None and staged[0] is not None:
            transaction.run(DELETE_STATS_BETWEEN, table_id, *staged)
        transaction.run(NOTE_SWEPT, transaction.clock.now_ms(), commit_id)

    lake.registry.write(work)
    return removed
