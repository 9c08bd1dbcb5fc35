"""The registry of an open book: reads, and one helper for every write.

A write transaction is tried again, a bounded number of times, after a lock conflict, a
serialisation failure or a lost connection. It has an id of its own in `commits`. If the
connection is lost while COMMIT is under way, nobody can tell from reading whether it
took effect; so the fence decides: whoever asks tries to abort that id, which waits for
a COMMIT still in flight and either finds it committed or makes sure it never will be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, TypeVar

from lakebook import failpoints
from lakebook.clock import Clock
from lakebook.config import Settings
from lakebook.errors import (
    BookClosed,
    CommitAborted,
    CommitNotFound,
    CommitOutcomeUnknown,
    EpochChanged,
    InvalidSetting,
    LakebookError,
    RegistryBusy,
    RegistryCorrupt,
    RegistryTimeout,
)
from lakebook.metrics import Metrics
from lakebook.registry.commits import (
    ABORT_OPEN,
    COMMIT_OPEN,
    DATABASE_NOW,
    FENCE_ASKED_MS,
    FENCE_KEPT_MS,
    INSERT_FENCE,
    PRUNE_FENCES,
    STATE_OF_COMMIT,
    open_commit_row,
    owner,
)
from lakebook.registry.connections import Connections
from lakebook.registry.databases import Database, Failure, PostgreSQL
from lakebook.registry.statements import POSTGRESQL, Statement
from lakebook.registry.transactions import NoEffect, Reader, Row, Transaction, TryAgain, new_id
from lakebook.registry.wakeups import Announcer

T = TypeVar("T")

_WRITES_BETWEEN_PRUNES = 200

# Whoever was first with a name is found by the next attempt. If it is not, it was no duplicate.
_MOST_DUPLICATES = 2

_BACKOFF_FIRST = 0.005
_BACKOFF_LAST = 1.0


class Registry:
    """The registry of an open book: reads, snapshots and writes."""

    def __init__(self, database: Database, settings: Settings, clock: Clock, metrics: Metrics) -> None:
        self.database = database
        #: `sqlite` or `postgresql`.
        self.kind = database.kind
        self.settings = settings
        self.clock = clock
        self.metrics = metrics
        self.connections = Connections(database, settings.connections)
        self.epoch = ""
        self._announcer = Announcer(database)
        # Somewhere in between: else processes that write little would never prune.
        self._writes = random.randrange(_WRITES_BETWEEN_PRUNES)  # noqa: S311 - no secret
        self._any_errors = (database.errors, LakebookError)
        self._brings_limits = database.brings_limits

    def close(self) -> None:
        """Close all connections."""
        self._announcer.close()
        self.connections.close()

    # --- reading -----------------------------------------------------------------

    def one(self, statement: Statement, *values: Any) -> Row | None:
        """The first row of a statement that runs by itself. The way of the hot look-ups."""
        compiled = statement.compiled.get(self.kind) or statement.on(self.kind)
        arranged = compiled.arrange(values) if compiled.arrange else values
        try:
            connection = self.connections.take()
            try:
                if self._brings_limits:
                    row: Row | None = self.database.run_alone(connection, compiled.sql, arranged).fetchone()
                else:
                    row = connection.execute(compiled.sql, arranged).fetchone()
            except BaseException:
                self.connections.drop(connection)
                raise
        except self.database.errors as error:
            return self._read_again(lambda reader: reader.one(statement, *values), self._reading, error)
        self.connections.give(connection)
        return row

    def all(self, statement: Statement, *values: Any) -> list[Row]:
        """All rows of a statement that runs by itself."""
        return self.read_with(lambda reader: reader.all(statement, *values))

    def read_with(self, work: Callable[[Reader], T], *, plan_once: bool = True) -> T:
        """Run `work` on a connection, and again if the connection was lost."""
        return self._with_retry(work, partial(self._reading, plan_once=plan_once))

    def read_through(self, work: Callable[[Reader], T]) -> T:
        """The same for `work` that looks at a large part of the registry, which is not to stay in this process."""
        return self._with_retry(work, self._reading_through)

    def in_snapshot(self, work: Callable[[Reader], T]) -> T:
        """Run `work` on one consistent state of the registry."""
        return self._with_retry(work, self._in_one_state)

    def in_snapshot_once(self, work: Callable[[Reader], T]) -> T:
        """Run `work` on one consistent state of the registry; it cannot be repeated, and is not."""
        try:
            with self.snapshot() as reader:
                return work(reader)
        except self.database.errors as error:
            raise self._wrapped(error) from error

    def _with_retry(self, work: Callable[[Reader], T], opened: Callable[[Any], AbstractContextManager[Reader]]) -> T:
        try:
            with opened(self.connections.take()) as reader:
                return work(reader)
        except self.database.errors as error:
            return self._read_again(work, opened, error)

    def _read_again(
        self, work: Callable[[Reader], T], opened: Callable[[Any], AbstractContextManager[Reader]], error: Exception
    ) -> T:
        """Read on fresh connections: once more, and where the server is away, until it is back or was away too long."""
        until = self.clock.monotonic() + (self.settings.outage_seconds if self.database.comes_back else 0.0)
        for attempt in count(1):
            failure = self.database.classify(error)
            gone = failure is Failure.LOST and self.clock.monotonic() < until
            if failure not in (Failure.LOST, Failure.BUSY) or (attempt > 1 and not gone):
                raise self._wrapped(error) from error
            self.connections.drop_idle()
            if attempt > 1:
                self.clock.sleep(_backoff(attempt))
            try:
                with opened(self.connections.take()) as reader:
                    return work(reader)
            except self.database.errors as failed:
                error = failed
        raise AssertionError("unreachable")

    def database_now_ms(self) -> int | None:
        """The time on the database server's clock; none where the database has no clock of its own."""
        if self.kind != POSTGRESQL:
            return None
        row = self.one(DATABASE_NOW)
        assert row is not None
        return int(row[0])

    def read(self, *, plan_once: bool = True) -> AbstractContextManager[Reader]:
        """A connection for statements that each see the newest state."""
        return self._reading(self._take(), plan_once=plan_once)

    def snapshot(self) -> AbstractContextManager[Reader]:
        """A connection for statements that all see the same state."""
        return self._in_one_state(self._take())

    @contextmanager
    def _reading(self, connection: Any, *, plan_once: bool = True) -> Iterator[Reader]:
        try:
            yield Reader(connection, self.database, alone=True, plan_once=plan_once)
        except BaseException:
            self.connections.drop(connection)
            raise
        self.connections.give(connection)

    @contextmanager
    def _reading_through(self, connection: Any) -> Iterator[Reader]:
        with self._reading(connection) as reader, self.database.reading_through(connection):
            yield reader

    @contextmanager
    def _in_one_state(self, connection: Any) -> Iterator[Reader]:
        try:
            connection.execute(self.database.begin_snapshot)
            yield Reader(connection, self.database)
            connection.execute("COMMIT")
        except BaseException:
            self.connections.drop(connection)
            raise
        self.connections.give(connection)

    def _take(self) -> Any:
        try:
            return self.connections.take()
        except self.database.errors as error:
            raise self.database.unreachable(error) from error

    # --- writing -----------------------------------------------------------------

    def write(self, work: Callable[[Transaction], T], *, commit_id: str | None = None) -> T:
        """Run `work` in a write transaction, again and again until it commits or must not.

        With `commit_id`, the transaction first flips that open commit row to committed;
        without, it brings a row of its own, so that its outcome can be asked for too.
        """
        started = self.clock.monotonic()
        attempt = 0
        failure = None
        duplicates = 0
        with self.metrics.timed("transaction"):
            while True:
                attempt += 1
                try:
                    result = self._attempt(work, commit_id, failure)
                except TryAgain as again:
                    failure = again.failure
                    self.metrics.count_retry(again.failure.value)
                    duplicates = duplicates + 1 if failure is Failure.DUPLICATE else 0
                    if duplicates > _MOST_DUPLICATES and again.cause is not None:
                        self.metrics.count_transaction("failed")
                        raise self._wrapped(again.cause) from again.cause
                    spent = self.clock.monotonic() - started
                    if spent >= self.settings.retry_seconds or (
                        attempt >= self.settings.retry_attempts and not self._may_come_back(failure, spent)
                    ):
                        self.metrics.count_transaction("given_up")
                        raise self._given_up(again) from again.cause
                    self.clock.sleep(_backoff(attempt))
                except BaseException:
                    self.metrics.count_transaction("failed")
                    raise
                else:
                    self.metrics.count_transaction("committed")
                    self._prune_now_and_then()
                    return result

    def _may_come_back(self, failure: Failure, spent: float) -> bool:
        """Whether to wait on for a server that is away."""
        return failure is Failure.LOST and self.database.comes_back and spent < self.settings.outage_seconds

    def _attempt(self, work: Callable[[Transaction], T], commit_id: str | None, retried_after: Failure | None) -> T:
        connection = self._take_for_write()
        fence = commit_id or new_id()
        begun_ms, begun = self.clock.now_ms(), self.clock.monotonic()
        in_commit = False
        try:
            _about_to_wait()
            transaction = self._begin(connection, retried_after)
            failpoints.reach("transaction.begun")
            self._enter_commit_row(transaction, fence, opened=commit_id is not None)
            result = work(transaction)
            transaction.write_events()
            failpoints.reach("transaction.before_commit")
            in_commit = True
            connection.execute("COMMIT")
        except self.database.errors as error:
            self.connections.drop(connection)
            failure = self.database.classify(error)
            if failure is Failure.LOST:
                self.connections.drop_idle()
                if in_commit:
                    self._settle_lost_commit(fence, commit_id is not None, begun_ms, begun, error)
                    return self._committed(transaction, result)
            if failure in (Failure.LOST, Failure.BUSY, Failure.DUPLICATE):
                raise TryAgain(failure, error) from error
            raise self._wrapped(error) from error
        except (LakebookError, TryAgain, NoEffect):
            self._roll_back(connection)
            raise
        except BaseException:
            # An interrupt may have left the connection in the middle of a statement.
            self.connections.drop(connection)
            raise
        self.connections.give(connection)
        failpoints.reach("transaction.after_commit")
        return self._committed(transaction, result)

    def _take_for_write(self) -> Any:
        try:
            return self.connections.take()
        except self.database.errors as error:
            if self.database.classify(error) in (Failure.LOST, Failure.BUSY):
                raise TryAgain(self.database.classify(error), error) from error
            raise self.database.unreachable(error) from error

    def _begin(self, connection: Any, retried_after: Failure | None) -> Transaction:
        found = self.database.begin(connection)
        if self.epoch and found != self.epoch:
            raise self.epoch_changed()
        return Transaction(connection, self.database, self.clock, self.epoch, retried_after)

    def epoch_changed(self) -> EpochChanged:
        """What whoever has the book open from a former life is told."""
        return EpochChanged(
            "the book was restored or rebuilt since it was opened here",
            on=self.database.shown,
            remedy="Open the book again, and check what this process wrote last",
        )

    def _enter_commit_row(self, transaction: Transaction, fence: str, *, opened: bool) -> None:
        now = self.clock.now_ms()
        if not opened:
            transaction.run(INSERT_FENCE, fence, "committed", self.epoch, owner())
        elif transaction.run(COMMIT_OPEN, now, fence, self.epoch) != 1:
            raise CommitAborted(
                "it was fenced or has been used before",
                on=f"commit {fence}",
                remedy="Ask for its outcome, and begin again with a new commit",
            )

    def _roll_back(self, connection: Any) -> None:
        try:
            connection.execute("ROLLBACK")
        except self.database.errors:
            self.connections.drop(connection)
        else:
            self.connections.give(connection)

    def _committed(self, transaction: Transaction, result: T) -> T:
        for table, number in transaction.captured.items():
            self.metrics.count_events(table, number)
        if transaction.captured:
            self._announcer.announce()
        return result

    # --- the fence ---------------------------------------------------------------

    def _settle_lost_commit(self, fence: str, opened: bool, begun_ms: int, begun: float, error: Exception) -> None:
        """Return if the lost COMMIT took effect; ask for another attempt if it never will."""
        deadline = self.clock.monotonic() + self.settings.retry_seconds
        attempt = 0
        while True:
            attempt += 1
            elapsed_ms = max(self.clock.now_ms() - begun_ms, (self.clock.monotonic() - begun) * 1000)
            if elapsed_ms > FENCE_ASKED_MS and not opened:
                break  # The fence may have been pruned: its absence would prove nothing.
            try:
                state = self._fence_open(fence) if opened else self._fence_unopened(fence)
            except self.database.errors as failed:
                if self.database.classify(failed) not in (Failure.LOST, Failure.BUSY, Failure.SLOW):
                    break
                self.connections.drop_idle()
                if self.clock.monotonic() >= deadline:
                    break
                self.clock.sleep(_backoff(attempt))
                continue
            except (BookClosed, CommitNotFound):
                break
            self.metrics.count_settled(state)
            if state == "committed":
                return
            if opened:
                raise CommitAborted(
                    "the connection was lost during COMMIT and it did not take effect",
                    on=f"commit {fence}",
                    remedy="Begin again with a new commit",
                ) from error
            raise TryAgain(Failure.LOST, error) from error
        raise CommitOutcomeUnknown(
            "the connection was lost during COMMIT and the registry does not answer",
            on=f"commit {fence}",
            remedy="When the registry is back, look whether the change is there before you repeat it",
        ) from error

    def settle(self, commit_id: str) -> str:
        """Settle an opened commit for good: `committed`, or `aborted` from now on."""
        for attempt in range(1, self.settings.retry_attempts + 1):
            try:
                return self._fence_open(commit_id)
            except self.database.errors as error:
                if self.database.classify(error) not in (Failure.LOST, Failure.BUSY, Failure.SLOW):
                    raise self._wrapped(error) from error
                self.connections.drop_idle()
                self.clock.sleep(_backoff(attempt))
        raise RegistryBusy("its COMMIT is still in flight", on=f"commit {commit_id}", remedy="Ask again later")

    def _fence_open(self, commit_id: str) -> str:
        """Try `open → aborted`, which waits for a COMMIT in flight, then say what is true."""
        connection = self.connections.take()
        try:
            _about_to_wait()
            with self._bounded(connection):
                Reader(connection, self.database)._execute(ABORT_OPEN, (self.clock.now_ms(), commit_id))
            row = Reader(connection, self.database, alone=True).one(STATE_OF_COMMIT, commit_id)
        except BaseException:
            self.connections.drop(connection)
            raise
        self.connections.give(connection)
        if row is None:
            raise CommitNotFound("there is no such commit", on=f"commit {commit_id}")
        return str(row[0])

    def _fence_unopened(self, fence: str) -> str:
        """Take the id of a transaction that brought its own row: who is first decides."""
        connection = self.connections.take()
        try:
            try:
                with self._bounded(connection):
                    Reader(connection, self.database)._execute(INSERT_FENCE, (fence, "aborted", self.epoch, owner()))
            except self.database.errors as error:
                if self.database.classify(error) is not Failure.DUPLICATE:
                    raise
            # The row that is there decides: an earlier try of this very call may have written it.
            row = Reader(connection, self.database, alone=True).one(STATE_OF_COMMIT, fence)
        except BaseException:
            self.connections.drop(connection)
            raise
        self.connections.give(connection)
        if row is None:
            raise CommitNotFound("its fence is gone", on=f"commit {fence}")
        return str(row[0])

    @contextmanager
    def _bounded(self, connection: Any) -> Iterator[None]:
        """Statements that wait for others for a bounded time only, also where the session has no limit of its own."""
        if not self.database.begin_bounded:
            yield
            return
        connection.execute(self.database.begin_bounded)
        try:
            yield
        except self.database.errors as error:
            if self.database.classify(error) is Failure.DUPLICATE:
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def write_opened(self, kind: str, work: Callable[[Transaction, str], T]) -> T:
        """Open a commit row, then run `work` in the transaction that commits it.

        Where the row cannot be committed any more it is aborted, so that none stays open.
        """
        for attempt in range(1, self.settings.retry_attempts + 1):
            commit_id = self.open_commit(kind)
            try:
                return self.write(partial(_with_commit, work, commit_id), commit_id=commit_id)
            except CommitAborted:
                # The connection was lost during COMMIT, and the fence says it never took effect.
                if attempt == self.settings.retry_attempts:
                    raise
            except CommitOutcomeUnknown:
                raise
            except BaseException:
                with suppress(LakebookError):
                    self.settle(commit_id)
                raise
        raise AssertionError("unreachable")

    def open_commit(self, kind: str) -> str:
        """Open a commit row; its transaction will begin by committing it."""
        commit_id = new_id()
        self.write(lambda transaction: open_commit_row(transaction, commit_id, kind))
        failpoints.reach("commit.opened")
        return commit_id

    def prune_fences(self, most: int = 10_000) -> int:
        """Remove fences that nobody can ask for any more."""
        with self.read() as reader:
            return int(reader._execute(PRUNE_FENCES, (FENCE_KEPT_MS, most)).rowcount)

    def _prune_now_and_then(self) -> None:
        self._writes += 1
        if self._writes % _WRITES_BETWEEN_PRUNES == 0:
            # Somebody else may write just now; the next turn does it. The write itself is committed.
            with suppress(*self._any_errors):
                self.prune_fences()

    # --- errors ------------------------------------------------------------------

    def _given_up(self, again: TryAgain) -> LakebookError:
        if again.failure is Failure.LOST:
            return self.database.unreachable(again.cause or again)
        return RegistryBusy(
            f"other writers held it for too long ({again.failure.value})",
            on=self.database.shown,
            remedy="Try again; if it stays so, look for a transaction that was left open",
        )

    def _wrapped(self, error: Exception) -> LakebookError:
        failure = self.database.classify(error)
        if failure in (Failure.LOST, Failure.CORRUPT, Failure.DENIED):
            return self.database.unreachable(error)
        if failure is Failure.BUSY:
            return RegistryBusy("it is locked", on=self.database.shown, remedy="Try again")
        if failure is Failure.SLOW:
            return RegistryTimeout(
                "a statement took longer than it may, and the server ended it",
                on=self.database.shown,
                remedy="Look for what keeps the server busy; the limits are read_timeout and write_timeout",
            )
        if failure is Failure.POOLED:
            return InvalidSetting(
                "a prepared statement is not there: a pooler has given the session to somebody else",
                on=self.database.shown,
                remedy='Set pooler="transaction"',
            )
        code = getattr(error, "sqlstate", None) or getattr(error, "sqlite_errorname", None) or type(error).__name__
        return RegistryCorrupt(
            f"the database refused a statement ({code})", on=self.database.shown, remedy="Run lakebook doctor"
        )

    def lock_out_writers(self, transaction: Transaction) -> None:
        """Wait until every other write transaction has ended, and keep new ones out."""
        if isinstance(self.database, PostgreSQL):
            transaction._connection.execute(self.database.lock_out_writers)


def _with_commit(work: Callable[[Transaction, str], T], commit_id: str, transaction: Transaction) -> T:
    return work(transaction, commit_id)


def _about_to_wait() -> None:
    """Here a writer may have to wait for others."""
    failpoints.reach("transaction.beginning")


def _backoff(attempt: int) -> float:
    return min(_BACKOFF_LAST, _BACKOFF_FIRST * 2.0**attempt) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, no secret
