"""The compactor keeps the rows of tables in files of the right size.

Events only tell it which tables are worth a look; where it is not told of any, because another process has the
scheduler's turn, it walks through the tables by itself. It looks at one after the other in a thread of its own, and
asks the registry how much there is to gain; so it needs no memory of its own. Several of them share the tables: each
claims the one that it compacts, and leaves alone those that another has.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lakebook import forks
from lakebook.cdc.subscribers import Event, Refresh, Subscriber
from lakebook.components.chores import Chores
from lakebook.components.component import Component
from lakebook.errors import (
    BookClosed,
    CompactionClaimed,
    EpochChanged,
    LakebookError,
    RegistryBusy,
    RegistryTimeout,
    RegistryUnavailable,
    SubscriberFailed,
    TableNotFound,
)
from lakebook.lake.compaction import GAVE_WAY, CompactionReport, Debt, compact_once, debt_of, policy_of
from lakebook.lake.lake import Lake
from lakebook.registry.compaction_claims import refuse_claimed
from lakebook.registry.small_files import count_in_runs, tables_of_several_files
from lakebook.registry.table_files import CHUNK, give_way
from lakebook.registry.tables import EVERY_TABLE, TableRecord
from lakebook.registry.transactions import Reader

if TYPE_CHECKING:
    from lakebook.spark.types import SparkSession

LOG = logging.getLogger("lakebook.components")

#: Tables whose state is shown.
TABLES_SHOWN = 100

# What a table that fails is tried with at the least.
_LEAST_BUDGET = 16 * 1024**2

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 600.0
# Whoever lets it go on has it look again; this is for those who do not.
_WHILE_PAUSED = 60.0
# What one walk of a compactor that is not told of events looks at: tables, and of each the smallest files.
_MOST_TABLES = 50
_MOST_FILES = 2000
# A thread cannot be told to wait for years.
_LONGEST_WAIT = 3600.0
# What fails at one table, and would fail at the next one too.
_OF_ALL_TABLES = (BookClosed, EpochChanged, RegistryBusy, RegistryUnavailable)


@dataclass
class _Look:
    """A table that is worth a look, and when."""

    table_id: int
    due: float
    failures: int = 0
    #: Why it has to wait, where it was looked at before.
    why: str = ""


class Compactor(Component, Subscriber):
    """Compacts tables that have small files, or files with many deleted rows.

    The session comes from `spark` when there is something to compact for the first time. Without it, only
    what there is to gain is measured.
    """

    name = "compactor"
    # What is worth a look is looked up again at every start.
    durable = False

    def __init__(self, lake: Lake, spark: Callable[[], SparkSession] | None = None) -> None:
        super().__init__(lake)
        self._spark = spark
        self._session: SparkSession | None = None
        self._changed = threading.Condition()
        self._looks: dict[int, _Look] = {}
        self._at_work: _Look | None = None
        self._names: dict[int, str] = {}
        self._debts: dict[int, Debt] = {}
        self._failures: dict[int, tuple[int, str]] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        # After which table the next walk goes on, and the version of each at which one has stopped by it.
        self._walked = 0
        self._stopped_by: dict[int, int] = {}
        self._walks = spark is not None and lake.settings.worker_interval > 0
        self._chores = Chores(lake.clock, self.name, lake.metrics)
        if self._walks:
            self._chores.add("walk", lake.settings.worker_interval, self.walk)
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        """Let go of what is the parent's: its thread, its session, and a lock that it may have held."""
        self._changed = threading.Condition()
        self._thread, self._session, self._at_work = None, None, None

    # --- what it is told -------------------------------------------------------------

    def on_event(self, event: Event[Any]) -> None:
        """Note that a table has changed."""
        self.on_events([event])

    def on_events(self, events: Sequence[Event[Any]]) -> None:
        """Note that a table has changed; the work itself is not waited for."""
        if events:
            self.note(events[-1].data.table_id, self.lake.settings.compact_delay)

    def on_refresh(self, refresh: Refresh) -> None:
        """Note that a table is worth a look."""
        if refresh.table is not None:
            self.note(refresh.table.id, self.lake.settings.compact_delay)

    def on_health(self) -> None:
        """Raise if the registry does not answer, or if its thread has ended."""
        self.paused()
        with self._changed:
            ended = self._thread is not None and not self._thread.is_alive() and not self._stopping
        if ended:
            raise SubscriberFailed("its thread has ended", on=self.name, remedy="Start it again")

    def note(self, table_id: int, delay: float = 0.0) -> None:
        """Look at a table after so many seconds; one that waits already does not wait longer, nor less."""
        with self._changed:
            if table_id not in self._looks:
                self._looks[table_id] = _Look(table_id, self.lake.clock.monotonic() + delay)
                self._changed.notify_all()

    def walk(self) -> int:
        """Where nobody tells it of events: look which of some tables, of others each time, are worth a look.

        How many that were. By rows alone, and of each table only some; nothing is locked. Once for each version of a
        table, for what brought nothing then would bring nothing again; what fails comes again by itself. If the
        registry does not answer, the next walk goes on from there.
        """
        if self.told or self.paused() is not None:
            return 0
        since = self._walked
        ids = self.lake.registry.read_with(lambda reader: tables_of_several_files(reader, since, _MOST_TABLES))
        found = 0
        for table_id in ids:
            found += self._stop_by(table_id)
            self._walked = table_id
        if len(ids) < _MOST_TABLES:
            self._walked = 0  # From the beginning again after the last.
        return found

    def _stop_by(self, table_id: int) -> bool:
        """Note a table if it is worth a look; whether it is."""
        version: int | None = None
        try:
            table = self.table(table_id)
            if table is None or not self._is_worth_a_look(table):
                return False
            version = table.version
        except TableNotFound:
            return False  # It was purged a moment ago.
        except Exception as error:
            # A statement that takes too long does so at one table.
            if isinstance(error, _OF_ALL_TABLES) and not isinstance(error, RegistryTimeout):
                raise
            # The look will tell of it, and comes again by itself.
            LOG.debug("%s could not be measured (%s)", self._named(table_id), error)
        self.note(table_id, self.lake.settings.compact_delay)
        # Not before it is noted: else it would be passed by until it changes.
        if version is not None:
            self._stopped_by[table_id] = version
        return True

    def _is_worth_a_look(self, table: TableRecord) -> bool:
        policy = policy_of(self.lake, table)
        if not policy.enabled or self._stopped_by.get(table.id) == table.version:
            return False
        return bool(table.deleted_rows) or bool(
            self.lake.registry.read_with(
                lambda reader: count_in_runs(reader, table.id, policy.small, policy.least, _MOST_FILES), plan_once=False
            )
        )

    # --- its life --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look at tables; once is enough."""
        with self._changed:
            self._stopping = False
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="lakebook-compactor", daemon=True)
                self._thread.start()
        if self._walks:
            self._chores.start()

    def stop(self) -> None:
        """End that; a compaction that is at work is waited for, and no other is begun."""
        self._chores.stop()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no table is worth a look any more; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._looks and self._at_work is None, timeout)

    def status(self) -> Mapping[str, Any]:
        """What it does, what is next and when, how much there is to gain, and what has failed."""
        with self._changed:
            now = self.lake.clock.monotonic()
            waiting = sorted(self._looks.values(), key=lambda look: look.due)
            debts = sorted(self._debts.items(), key=lambda item: -item[1].files)
            return {
                "spark": "none was given: only what there is to gain is measured" if self._spark is None else "given",
                "at_work": None if self._at_work is None else self._named(self._at_work.table_id),
                "next": [
                    {
                        "table": self._named(look.table_id),
                        "in_seconds": round(max(0.0, look.due - now), 3),
                        "why": look.why,
                    }
                    for look in waiting[:TABLES_SHOWN]
                ],
                "waiting": len(waiting),
                "debts": [{"table": self._named(key), **asdict(debt)} for key, debt in debts[:TABLES_SHOWN]],
                "failures": [
                    {"table": self._named(key), "failures": number, "error": error}
                    for key, (number, error) in list(self._failures.items())[:TABLES_SHOWN]
                ],
            }

    def _named(self, table_id: int) -> str:
        return self._names.get(table_id, f"table {table_id}")

    # --- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        while (look := self._next(wait=True)) is not None:
            self._look(look)

    def run_due(self) -> int:
        """Look at every table that is due, in this thread; how many looks that took."""
        number = 0
        while (look := self._next(wait=False)) is not None:
            self._look(look)
            number += 1
        return number

    def _next(self, *, wait: bool) -> _Look | None:
        """The table that is due first, which is at work from now on; none if there is none, or at the end."""
        with self._changed:
            while not self._stopping:
                look = min(self._looks.values(), key=lambda item: item.due, default=None)
                left = _LONGEST_WAIT if look is None else look.due - self.lake.clock.monotonic()
                if look is not None and left <= 0:
                    # Taken out first: what changes from now on is noted anew.
                    self._at_work = self._looks.pop(look.table_id)
                    return look
                if not wait:
                    return None
                self._changed.wait(min(left, _LONGEST_WAIT))
            return None

    def _look(self, look: _Look) -> None:
        again: float | None = None
        try:
            again, look.why = self._work(look.table_id)
            look.failures = 0
            self._note_failure(look.table_id, 0, "")
        except (BookClosed, EpochChanged) as error:
            LOG.warning("%s ends: nothing can be done through this book any more (%s)", self.name, error)
            self._stopping = True
        except Exception as error:  # noqa: BLE001 - whatever it is, the other tables go on
            again = self._postpone(look, error)
        finally:
            with self._changed:
                self._at_work = None
                if again is not None:
                    look.due = self.lake.clock.monotonic() + again
                    self._looks[look.table_id] = look
                self._changed.notify_all()

    def _postpone(self, look: _Look, error: Exception) -> float:
        """For how long to leave a table alone that could not be compacted."""
        look.failures += 1
        look.why = f"{type(error).__name__}: {error}"
        if not isinstance(error, (*GAVE_WAY, CompactionClaimed)):
            # The session may be what has failed.
            self._session = None
            self._note_failure(look.table_id, look.failures, look.why)
            LOG.warning("%s could not be compacted (%s)", self._named(look.table_id), look.why)
        # The exponent is bounded too: a table may fail for months.
        pause = min(FIRST_PAUSE * 2.0 ** min(look.failures - 1, 30), LONGEST_PAUSE)
        if isinstance(error, CompactionClaimed):
            # By then, another has renewed its claim, or it can be taken over.
            pause = min(pause, self.lake.settings.lease_seconds)
        return pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, no secret

    def _note_failure(self, table_id: int, number: int, error: str) -> None:
        with self._changed:
            self._failures.pop(table_id, None)
            if number:
                self._failures[table_id] = (number, error)

    # --- the work --------------------------------------------------------------------

    def _work(self, table_id: int) -> tuple[float | None, str]:
        """Compact a table once; after how many seconds it is worth another look, and why it has to wait."""
        table = self.table(table_id)
        debt = Debt() if table is None else self._measure(table)
        if table is None or not debt or self._spark is None:
            if table is None:
                self._forget(table_id)
            return None, ""
        pause = self.paused(table_id)
        if pause is not None:
            return _WHILE_PAUSED, f"paused: {pause.reason}"
        done = self._compact(table, debt)
        if done.versions and not done.gained:
            self._stopped_by[table_id] = done.versions[-1]
        # To the end of the queue: other tables are due as well.
        return (0.0 if done.versions and done.gained else None), ""

    def _measure(self, table: TableRecord) -> Debt:
        debt = debt_of(self.lake, table) if policy_of(self.lake, table).enabled else Debt()
        name = f"{table.namespace}.{table.name}"
        self.lake.metrics.set_debt(name, debt.files, debt.bytes)
        with self._changed:
            self._names[table.id] = name
            self._debts.pop(table.id, None)
            if debt:
                self._debts[table.id] = debt
        return debt

    def _forget(self, table_id: int) -> None:
        with self._changed:
            self._debts.pop(table_id, None)
            self._stopped_by.pop(table_id, None)
            name = self._names.pop(table_id, None)
        if name is not None:
            self.lake.metrics.set_debt(name, 0, 0)

    def _refuse_taken(self, reader: Reader, table: TableRecord) -> None:
        now = self.lake.clock.now_ms()
        refuse_claimed(reader, table, now)
        give_way(reader, table, now)

    def _compact(self, table: TableRecord, debt: Debt) -> CompactionReport:
        # Asked before anything is begun: then no work is lost, and nothing needs to be written down.
        self.lake.registry.read_with(lambda reader: self._refuse_taken(reader, table))
        assert self._spark is not None
        reason = f"{debt.files} small files of {debt.partitions} partitions"
        with self.journal.work("compact", reason, table.id) as entry:
            if self._session is None:
                self._session = self._spark()
            failures, _ = self._failures.get(table.id, (0, ""))
            # What fails again and again is tried with less: one broken file must not cost a whole budget each time.
            budget = max(_LEAST_BUDGET, self.lake.settings.compact_bytes >> min(failures, 40))
            done = compact_once(self.lake, table, self._session, max_bytes=budget)
            entry.worth_noting = bool(done.versions)
            entry.detail |= {name: value for name, value in asdict(done).items() if name != "table"}
        return done

    # --- by hand ---------------------------------------------------------------------

    def run_once(self, table: TableRecord | None = None) -> Mapping[str, Any]:
        """Compact a table, or all of them, now and in this thread, until there is nothing to gain."""
        compacted: dict[str, Any] = {}
        failed: dict[str, str] = {}
        debts: dict[str, Any] = {}
        for record in [table] if table is not None else self._every_table():
            name = f"{record.namespace}.{record.name}"
            try:
                done = self._compact_fully(record)
            except LakebookError as error:
                failed[name] = f"{type(error).__name__}: {error}"
                continue
            if done.versions:
                compacted[name] = {key: value for key, value in asdict(done).items() if key != "table"}
            left = self._debts.get(record.id)
            if left:
                debts[name] = asdict(left)
        return {"compacted": compacted, "failed": failed, "left": debts}

    def _compact_fully(self, table: TableRecord) -> CompactionReport:
        whole = CompactionReport(f"{table.namespace}.{table.name}")
        while (debt := self._measure(table)) and self._spark is not None and self.paused(table.id) is None:
            done = self._compact(table, debt)
            whole = whole.and_then(done)
            if not done.versions or not done.gained or self._stopping:
                break
        return whole

    def _every_table(self) -> Iterator[TableRecord]:
        after = 0
        while page := self.lake.registry.all(EVERY_TABLE, after, CHUNK):
            for table_id, _, _ in page:
                table = self.table(table_id)
                if table is not None:
                    yield table
            after = page[-1][0]
