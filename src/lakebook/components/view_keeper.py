"""The view keeper builds what is due of views: closed ranges that are missing or stale, as far back as each view says.

It also merges closed minutes to hours and hours to days, and retires ranges whose time is over. Each view is worked
on by itself: one that fails comes again at ever longer intervals, and stops no other. Where Spark is what fails, this
process alone leaves it alone for a while: other workers build the views on theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

from lakebook import forks
from lakebook.clock import to_datetime
from lakebook.components.chores import Chores
from lakebook.components.component import Component
from lakebook.components.worker_spark import WorkerSpark
from lakebook.errors import BuildFailed, LakebookError, SparkUnsuitable
from lakebook.lake.lake import Lake
from lakebook.pages import PAGE_SIZE
from lakebook.registry.transactions import Transaction
from lakebook.registry.views import (
    ACTIVE,
    ViewRecord,
    earliest_time,
    list_views,
    locked_view,
    note_failure,
    note_success,
)
from lakebook.streams.metadata_store import MetadataStore
from lakebook.views.definition import definition_of
from lakebook.views.merging import mergeable
from lakebook.views.planning import MISSING, RangeSpec
from lakebook.views.times import INTERVALS
from lakebook.views.view import View

if TYPE_CHECKING:
    from lakebook.spark.types import SparkSession

# Seconds between two looks at what is due, and between two looks at what is to be merged and retired.
_LOOK, _TIDY = 1.0, 60.0
# Views that are built at once, and ranges of one that are built before it is looked at anew.
_WORKERS = 4
_MOST_RANGES = 60
_LONGEST_PAUSE = 3_600_000
_BY_HAND, _BY_THE_CLOCK = "by hand", "by the clock"


class ViewKeeper(Component):
    """Works by the clock: looks each second which ranges of which views are due, and builds them on Spark."""

    name: ClassVar[str] = "views"

    def __init__(self, lake: Lake, spark: Callable[[], SparkSession] | None = None) -> None:
        super().__init__(lake)
        self._spark = None if spark is None else WorkerSpark(lake.clock, self.name, spark)
        self._metadata = MetadataStore(lake.registry, lake.store.warehouse.recorded)
        self._chores = Chores(lake.clock, self.name, lake.metrics)
        self._chores.add("look", _LOOK, self._look)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._at_work: dict[int, str] = {}
        self._tidied: dict[int, float] = {}
        self._firsts: dict[int, tuple[float, int | None]] = {}
        self._workers: ThreadPoolExecutor | None = None
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        """Let go of what is the parent's: its threads, and a lock that one may have held."""
        self._lock, self._workers, self._at_work = threading.RLock(), None, {}
        self._changed = threading.Condition(self._lock)

    # --- life ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look what is due."""
        with self._lock:
            if self._workers is None:
                self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="lakebook-view-keeper")
        self._chores.start()

    def stop(self) -> None:
        """End that; ranges that are being built are waited for."""
        self._chores.stop()
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._at_work.clear()

    def status(self) -> Mapping[str, Any]:
        """Which views it works on, which fail, and when those are tried again."""
        with self._lock:
            at_work = sorted(self._at_work.values())
        failing = [view for view in self._views() if view.failures]
        return {
            "spark": "none was given: nothing is built" if self._spark is None else self._spark.status(),
            "at_work": at_work,
            "failing": [
                {
                    "view": view.name,
                    "failures": view.failures,
                    "error": view.last_error,
                    "again": None if view.retry_at is None else view.retry_at.isoformat(timespec="seconds"),
                }
                for view in failing
            ],
            **self._chores.status(),
        }

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until something is so after a view was worked on; whether it is."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    # --- by the clock ----------------------------------------------------------------

    def _look(self) -> None:
        """Give every active view that has something to do to a worker, unless one has it already."""
        if not self.may_look() or self.paused() is not None:
            return
        now = self.lake.clock.now_ms()
        for view in self._views():
            waits = view.retry_at is not None and view.retry_at > to_datetime(now)
            if view.state != ACTIVE or waits or not (self._is_due(view, now) or self._is_untidy(view)):
                continue
            with self._lock:
                if self._workers is None:
                    return
                if view.id not in self._at_work:
                    self._workers.submit(self._work, view)
                    # After it: what no thread has taken is not at work. Who has taken it waits for the lock at its end.
                    self._at_work[view.id] = view.name

    def _is_due(self, view: ViewRecord, now: int) -> bool:
        return self._may_use_spark(view, _BY_THE_CLOCK) and bool(self._due(view, now))

    def _may_use_spark(self, view: ViewRecord, reason: str) -> bool:
        """Whether to try: where it has failed only just, or has died of this view, by hand alone."""
        if self._spark is None:
            return False
        return reason == _BY_HAND or not (self._spark.is_resting or self._spark.avoids(view.id))

    def _is_untidy(self, view: ViewRecord) -> bool:
        return self.lake.clock.monotonic() - self._tidied.get(view.id, float("-inf")) >= _TIDY

    def _work(self, view: ViewRecord) -> None:
        try:
            self._keep(view, _BY_THE_CLOCK)
        except SparkUnsuitable:
            pass  # This process's own failure, told as such; others have another Spark.
        except Exception as error:  # noqa: BLE001 - written down; the others go on
            self._note_failure(view, error)
        finally:
            with self._changed:
                self._at_work.pop(view.id, None)
                self._changed.notify_all()

    def _note_failure(self, view: ViewRecord, error: Exception) -> None:
        text = str(error) if isinstance(error, LakebookError) else f"{type(error).__name__}: {error}"

        def work(transaction: Transaction) -> None:
            # As it is by now: what was listed may be long ago, and others may have built it since.
            failures = locked_view(transaction, view).failures
            note_failure(transaction, view, text[:2000], min(_LONGEST_PAUSE, 1000 * 2 ** min(failures, 30)))

        try:
            self.lake.registry.write(work)
        except LakebookError:
            return  # It is tried again at once, which does no harm.

    # --- by hand ---------------------------------------------------------------------

    def run_once(self) -> Mapping[str, Any]:
        """Do for every active view what is due, now and in this thread."""
        done: dict[str, Any] = {}
        failed: dict[str, str] = {}
        for view in self._views():
            if view.state != ACTIVE or self.paused() is not None:
                continue
            self._tidied.pop(view.id, None)
            try:
                done[view.name] = self._keep(view, _BY_HAND)
            except LakebookError as error:
                if not isinstance(error, SparkUnsuitable):
                    self._note_failure(view, error)
                failed[view.name] = str(error)
        return {"views": done, "failed": failed}

    # --- the work --------------------------------------------------------------------

    def _views(self) -> Iterator[ViewRecord]:
        after = ""
        while page := self.lake.registry.read_with(lambda reader: list_views(reader, after, PAGE_SIZE)):  # noqa: B023
            yield from page
            after = page[-1].name

    def _due(self, view: ViewRecord, now: int) -> list[tuple[str, RangeSpec]]:
        """The closed ranges that are missing or stale, not before there is anything in the sources."""
        definition = definition_of(view)
        end = now // definition.width * definition.width
        begin = now - round(definition.looks_back * 1000)
        if begin >= end:
            return []
        shown = View(self.lake, self._metadata, view)
        specs = [
            (name, spec)
            for name in definition.instances
            for spec in shown.plan(to_datetime(begin), to_datetime(end), instance=name)
            if spec.is_due() and spec.end <= now
        ]
        if any(spec.state == MISSING for _, spec in specs):
            first = self._first_time(view)
            specs = [
                (name, spec)
                for name, spec in specs
                if spec.state != MISSING or (first is not None and spec.end > first)
            ]
        # The newest first: ranges that fail again and again, or a long past, keep nothing new from being built.
        return sorted(specs, key=lambda item: item[1].begin, reverse=True)[:_MOST_RANGES]

    def _first_time(self, view: ViewRecord) -> int | None:
        """When the rows of its sources begin; looked up now and then, for that takes a walk through their files."""
        now = self.lake.clock.monotonic()
        looked, found = self._firsts.get(view.id, (float("-inf"), None))
        if found is None or now - looked >= _TIDY:
            found = self.lake.registry.read_with(lambda reader: earliest_time(reader, view))
            self._firsts[view.id] = (now, found)
        return found

    def _keep(self, view: ViewRecord, reason: str) -> Mapping[str, Any]:
        """Build, merge and retire what is due of one view; what was done."""
        done: dict[str, Any] = {}
        shown = View(self.lake, self._metadata, view)
        able = self._may_use_spark(view, reason)
        try:
            if able:
                done |= self._build(shown, view, reason)
        except SparkUnsuitable:
            able = False  # It is not tried a second time for merges.
            raise
        finally:
            # A view of which nothing can be built has ranges that expire all the same.
            if self._is_untidy(view):
                self._tidied[view.id] = self.lake.clock.monotonic()
                done |= self._tidy(shown, view, reason, merges=able)
        # Who could not have built it does not know whether it would fail.
        if view.failures and able:
            self.lake.registry.write(lambda transaction: note_success(transaction, view))
        return done

    def _build(self, shown: View, view: ViewRecord, reason: str) -> dict[str, Any]:
        specs = self._due(view, self.lake.clock.now_ms())
        if not specs:
            return {}
        assert self._spark is not None
        with self.journal.work("materialize", reason) as entry, self._spark.session(view.id) as spark:
            built = shown.build(spark, view, specs)
            done = {"view": view.name, "built": built.built, "empty": built.empty, "rows": built.rows}
            entry.detail.update(done)
            # Ranges that another worker builds are its to write down.
            entry.worth_noting = built.claimed < len(specs)
            if built.failed:
                (where, why), *others = built.failed.items()
                raise BuildFailed(f"{where} and {len(others)} other ranges failed ({why})", on=view.shown)
        return done

    def _tidy(self, shown: View, view: ViewRecord, reason: str, *, merges: bool) -> dict[str, Any]:
        with self.journal.work("tidy", reason) as entry:
            # First, for it needs no Spark.
            retired = shown.retire_expired_partitions()
            now = self.lake.clock.now_ms()
            merged = 0
            for into in ("hour", "day"):
                closed = now // INTERVALS[into] * INTERVALS[into]
                for name in definition_of(view).instances if merges else ():
                    # Spark is not started for nothing.
                    if mergeable(self.lake, view, name, into, closed):
                        assert self._spark is not None
                        with self._spark.session(view.id) as spark:
                            done = shown.merge_partitions(spark, into, instance=name, before=to_datetime(closed))
                        merged += sum(item.replaced for item in done)
            found = {"merged": merged, "retired": retired}
            entry.detail.update({"view": view.name, **found})
            entry.worth_noting = any(found.values())
        return found
