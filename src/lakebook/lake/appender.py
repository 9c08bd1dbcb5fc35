"""An appender: record by record into a table, in files of a sensible size, without Spark.

Rows gather in memory. When there are enough of them, or the oldest has waited long enough
(also when nothing more arrives), they become a file; files are registered together in one
transaction. Rows count as stored once `flush` has returned, or their commit was reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import pyarrow as pa

from lakebook import failpoints
from lakebook.errors import CommitNotFound, CommitOutcomeUnknown, InvalidInput, LakebookError, PublishFailed
from lakebook.iceberg.arrow_files import aligned, plain_schema
from lakebook.lake.attempts import Attempt
from lakebook.lake.inserting import InsertReport, check_properties, counted, one_clear_error, published, write_arrow
from lakebook.lake.lake import Lake
from lakebook.lake.records import RecordCheck
from lakebook.lake.steps import Steps
from lakebook.names import shown
from lakebook.registry.table_files import NewFile, TableChange, has_files_of
from lakebook.registry.tables import TableRecord

Rows: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]] | pa.Table | pa.RecordBatch


class Appender:
    """Gathers rows and writes them in files. Close it, or use it in a `with` block."""

    def __init__(
        self,
        lake: Lake,
        table: TableRecord,
        *,
        max_bytes: int = 128 * 1024**2,
        max_rows: int = 1_000_000,
        max_age: float = 60.0,
        files_per_commit: int = 1,
        properties: Mapping[str, str] | None = None,
        on_commit: Callable[[InsertReport], None] = lambda report: None,
    ) -> None:
        for name, value, least in (
            ("max_bytes", max_bytes, 1),
            ("max_rows", max_rows, 1),
            ("max_age", max_age, 0.001),
            ("files_per_commit", files_per_commit, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
                raise InvalidInput(f"{shown(value)} cannot be {name}", on="appender", remedy=f"Use at least {least}")
        self._lake, self._table = lake, table
        self._shape = lake.shape_of(table, table.schema_version)
        self._schema = plain_schema(self._shape.schema)
        self._check = RecordCheck(self._schema, table.shown)
        self._max_bytes, self._max_rows, self._max_age = max_bytes, max_rows, max_age
        self._files_per_commit = files_per_commit
        self._summary = check_properties(properties)
        self._on_commit = on_commit
        # Guards the buffer; `_writing` is held by who makes files of it, so that their order is kept.
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._tables: list[pa.Table] = []
        self._rows = 0
        self._bytes = 0
        #: When the oldest row in the buffer, and the oldest one in a file that is not committed, came.
        self._oldest: float | None = None
        self._oldest_written: float | None = None
        self._attempt: Attempt | None = None
        self._files: list[NewFile] = []
        self._pending: list[pa.Table] = []
        #: How long it took to write `_files`.
        self._steps = Steps(lake.clock)
        #: The rows of `_files`, until they are committed.
        self._written: list[pa.Table] = []
        #: A commit whose outcome is not known yet, and its rows.
        self._doubtful: tuple[Attempt, list[pa.Table]] | None = None
        self._failure: Exception | None = None
        self._closed = False
        self._finished = False
        self._thread = threading.Thread(target=self._watch, name="lakebook-appender", daemon=True)
        self._thread.start()

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def append(self, rows: Rows) -> None:
        """Take one record, several, or an Arrow table or batch."""
        self._raise_failure()
        if isinstance(rows, (pa.Table, pa.RecordBatch)):
            table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
            # Refused now, to whoever brought it, and not later among the rows of others.
            self._take([], [aligned(table, self._shape.schema)])
        else:
            self._take(self._check.records(rows), [])

    def _take(self, records: list[Mapping[str, Any]], tables: list[pa.Table]) -> None:
        if records:
            # One conversion decides whether every record fits; a bad one is refused with nothing taken.
            tables = [self._converted(records)]
        with self._changed:
            if self._closed:
                raise InvalidInput("the appender is closed", on=self._table.shown)
            for table in tables:
                if not table.num_rows:
                    continue
                self._tables.append(table)
                self._rows += table.num_rows
                self._bytes += table.nbytes
                if self._oldest is None:
                    self._oldest = self._lake.clock.monotonic()
            full = self._rows >= self._max_rows or self._bytes >= self._max_bytes
            self._changed.notify_all()
        if full:
            try:
                self._write_out(everything=False)
            except LakebookError as error:
                # The rows are taken, so this call has done its part; the next one tells.
                self._failure = error

    def _converted(self, records: list[Mapping[str, Any]]) -> pa.Table:
        try:
            rows = [{name: record.get(name) for name in self._schema.names} for record in records]
            return aligned(pa.Table.from_pylist(rows, schema=self._schema), self._shape.schema)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(f"a record does not fit the table ({shown(str(error))})", on=self._table.shown) from None

    def flush(self) -> InsertReport | None:
        """Write and register all rows taken so far; the report of the commit, if there was something."""
        try:
            done = self._write_out(everything=True)
        except PublishFailed:
            self._failure = None
            raise
        self._failure = None  # Whatever it was, the rows have landed.
        return done

    def _write_out(self, *, everything: bool) -> InsertReport | None:
        done = None
        with self._writing:
            self._settle()
            with self._changed:
                self._pending += self._tables
                waiting = [moment for moment in (self._oldest_written, self._oldest) if moment is not None]
                self._oldest_written = min(waiting, default=None)
                self._tables, self._rows, self._bytes, self._oldest = [], 0, 0, None
            if self._pending:
                self._write_file()
            if self._files and (everything or len(self._files) >= self._files_per_commit):
                done = self._commit()
        if done is not None:
            try:
                done = published(self._lake, self._table, done)
            finally:
                # Also where publishing failed: the rows have landed.
                self._on_commit(done)
        return done

    def _write_file(self) -> None:
        with one_clear_error(self._table):
            if self._attempt is None:
                self._attempt = Attempt(self._lake, self._table).__enter__()
            data = pa.concat_tables(self._pending)
            with self._steps.step("insert_data"):
                files = write_arrow(self._lake, self._table, self._attempt, self._shape, data)
        # All at once: what could not be written stays for the next try, what was does not come twice.
        self._files, self._written, self._pending = [*self._files, *files], [*self._written, data], []
        failpoints.reach("appender.rotated")

    def _commit(self) -> InsertReport:
        assert self._attempt is not None
        attempt, steps, self._steps = self._attempt, self._steps, Steps(self._lake.clock)
        change = TableChange("append", tuple(self._files), (), self._summary)
        # Until the fence has told how it ended, nobody knows; whatever is raised on the way.
        self._doubtful, self._attempt, self._files, self._written = (attempt, self._written), None, [], []
        try:
            with steps.step("commit"):
                committed = attempt.commit(change)
        except BaseException:
            with suppress(LakebookError):
                self._settle()
            raise
        self._doubtful = None
        with self._changed:
            self._oldest_written = None
        attempt.__exit__(None, None, None)
        return counted(self._lake, self._table, attempt, change, committed, steps)

    def _settle(self) -> None:
        """Learn how the last commit ended: its rows have landed, or go back to be written to new paths."""
        if self._doubtful is None:
            return
        attempt, rows = self._doubtful
        try:
            committed = self._lake.registry.settle(attempt.commit_id) == "committed"
        except CommitNotFound:
            # Nobody keeps the row for so long. Its files tell whether it has landed; if they are gone too,
            # nobody knows, and to write the rows again might double them.
            commit_id = attempt.commit_id
            committed = self._lake.registry.read_with(lambda reader: has_files_of(reader, commit_id))
            if not committed:
                self._doubtful = None
                self._lake.renewals.let_go(attempt.commit_id)
                raise CommitOutcomeUnknown(
                    f"the registry was away for so long that it is not known whether {len(rows)} batches landed",
                    on=f"commit {attempt.commit_id}",
                    remedy="Look whether their rows are there, and append them again if not",
                ) from None
        if not committed:
            self._pending = [*rows, *self._pending]
        self._doubtful = None
        self._lake.renewals.let_go(attempt.commit_id)
        with suppress(LakebookError):
            attempt.abort()

    def close(self) -> None:
        """Write and register what is left. If that fails nothing is forgotten, and it can be tried again."""
        with self._changed:
            if self._finished:
                return
            self._closed = True
            self._changed.notify_all()
        self._join()
        self._write_out(everything=True)
        self._finished = True

    def abandon(self) -> None:
        """Give up what was not committed."""
        with self._changed:
            self._closed = self._finished = True
            self._tables, self._pending = [], []
            self._changed.notify_all()
        self._join()
        with self._writing:
            with suppress(LakebookError):
                self._settle()
            if self._attempt is not None:
                self._attempt.__exit__(None, None, None)
            self._attempt, self._files, self._written, self._pending = None, [], [], []

    def _join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _watch(self) -> None:
        """Write out what has waited long enough, also when nothing more arrives."""
        clock = self._lake.clock
        not_before = clock.monotonic()
        while True:
            with self._changed:
                if self._closed:
                    return
                since = [moment for moment in (self._oldest, self._oldest_written) if moment is not None]
                if not since:
                    self._changed.wait()
                    continue
                left = max(min(since) + self._max_age, not_before) - clock.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
            try:
                self._write_out(everything=True)
            except Exception as error:  # noqa: BLE001 - also one of `on_commit`
                # The rows are kept and tried again in a while; whoever appends next hears of it.
                self._failure = error
                not_before = clock.monotonic() + self._max_age
