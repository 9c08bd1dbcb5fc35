"""The pipeline runner: it runs the pipelines that have an interval, each at its own, several at a time.

One that fails waits by its own backoff and one that is slow has a thread of its own for so long; so none holds up
another. Where Spark is what fails, this process alone leaves it alone for a while. What has landed is the registry's
business: several runners at once do no harm.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

from lakebook.clock import to_ms
from lakebook.components.component import Component
from lakebook.components.worker_spark import WorkerSpark
from lakebook.errors import BookClosed, LakebookError, PipelineBusy, PipelineStopped, SparkUnsuitable
from lakebook.lake.lake import Lake
from lakebook.pipelines.pipeline import Pipeline
from lakebook.pipelines.pipelines import Pipelines
from lakebook.registry.pipelines import ACTIVE, PipelineRecord
from lakebook.streams.metadata_store import MetadataStore

if TYPE_CHECKING:
    from lakebook.spark.types import SparkSession

LOG = logging.getLogger("lakebook.components")

# How often it looks which of them are due.
_LOOK = 0.2
_AT_ONCE = 4
_MOST_SHOWN = 100


class PipelineRunner(Component):
    """Runs pipelines by the clock, in threads of its own, on one Spark session."""

    name: ClassVar[str] = "pipelines"

    def __init__(self, lake: Lake, spark: Callable[[], SparkSession] | None = None) -> None:
        super().__init__(lake)
        self._spark = None if spark is None else WorkerSpark(lake.clock, self.name, spark)
        self._metadata: MetadataStore | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._at_work: set[str] = set()
        #: When each is due again, by the monotonic clock, and how its last run went.
        self._due: dict[str, float] = {}
        self._said: dict[str, str] = {}

    # --- life ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to run what is due; once is enough."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._metadata is not None:
            self._metadata.close()  # Its thread has ended by itself.
        self._stopping.clear()
        self._metadata = MetadataStore(self.lake.registry, self.lake.store.warehouse.recorded)
        self._thread = threading.Thread(target=self._run, name="lakebook-pipelines", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End that: batches that are at work land, and no other begins."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._metadata is not None:
            self._metadata.close()
            self._metadata = None

    def status(self) -> Mapping[str, Any]:
        """Which are at work, and how the last runs went."""
        with self._lock:
            return {
                "spark": "none was given: nothing is run" if self._spark is None else self._spark.status(),
                "at_work": sorted(self._at_work),
                "last": dict(list(self._said.items())[:_MOST_SHOWN]),
            }

    def _run(self) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="lakebook-pipeline") as pool:
            while not self._stopping.wait(_LOOK):
                if not self.may_look():
                    continue
                try:
                    self._hand_out(pool)
                except BookClosed:
                    return
                except Exception:
                    # Whatever it is: the next look may find it mended.
                    LOG.exception("the pipelines could not be looked at")

    # --- one pipeline ----------------------------------------------------------------

    def _hand_out(self, pool: Executor) -> None:
        """Have all run that are due; each is at work from when a thread has it to do."""
        # All are looked up first: if that fails, none is taken for being at work.
        for pipeline in self._all_due():
            with self._lock:
                self._at_work.add(pipeline.name)
            try:
                pool.submit(self._one, pipeline)
            except BaseException:
                with self._lock:
                    self._at_work.discard(pipeline.name)
                raise

    def _all_due(self) -> list[Pipeline]:
        """Those that are to be run now."""
        if self._spark is None or self._metadata is None or self._spark.is_resting or self.paused() is not None:
            return []
        now, clock = self.lake.clock.monotonic(), self.lake.clock.now_ms()
        found = []
        for pipeline in Pipelines(self.lake, self._metadata):
            record = pipeline.listed
            if record.state != ACTIVE or pipeline.definition.interval is None:
                continue
            if record.retry_at is not None and to_ms(record.retry_at) > clock:
                continue
            if not self.told and _is_held(record, clock):
                continue  # Another process runs it: Spark is not started for that.
            with self._lock:
                if pipeline.name in self._at_work or self._due.get(pipeline.name, now) > now:
                    continue
            if self._spark.avoids(pipeline.name):
                continue
            found.append(pipeline)
        return found

    def _one(self, pipeline: Pipeline) -> None:
        was_run = True
        try:
            if self._spark is not None and self._spark.is_resting:
                # It has failed since this one was handed out: each that waits for a thread would try it in vain.
                was_run = False
                self._said[pipeline.name] = f"not run here: Spark {self._spark.status()}"
            else:
                self._said[pipeline.name] = self.run_one(pipeline)
        except PipelineBusy:
            self._said[pipeline.name] = "another process runs it"
        except SparkUnsuitable as error:
            # Told as what it is, a failure of this process.
            was_run = False
            self._said[pipeline.name] = f"not run here: {error}"
        except LakebookError as error:
            self._said[pipeline.name] = str(error)
            LOG.warning("pipeline %s failed (%s)", pipeline.name, error)
        except Exception as error:
            self._said[pipeline.name] = f"{type(error).__name__}: {error}"
            LOG.exception("pipeline %s failed", pipeline.name)
        finally:
            with self._lock:
                self._at_work.discard(pipeline.name)
                if was_run:
                    # Else it waits for Spark alone, not for an interval of its own.
                    self._due[pipeline.name] = self.lake.clock.monotonic() + (pipeline.definition.interval or 0.0)

    def run_one(self, pipeline: Pipeline) -> str:
        """Run a pipeline now, and write down what it did."""
        try:
            waiting = pipeline.waits()
        except PipelineStopped:
            waiting = 1  # A source is gone: the run says so, and stops it.
        if not waiting:
            return "nothing to do"
        assert self._spark is not None
        reason = f"{waiting} records wait"
        with (
            self.journal.work("run", reason, pipeline.listed.target_id) as entry,
            self._spark.session(pipeline.name) as spark,
        ):
            entry.detail["pipeline"] = pipeline.name
            report = pipeline.run(spark, enough=self._stopping.is_set)
            entry.worth_noting = bool(report.batches)
            done = {"batches": report.batches, "records": report.records, "rows": report.rows, "dead": report.dead}
            entry.detail |= done
        return f"{report.records} records, {report.rows} rows, {report.dead} dead"

    def run_once(self) -> Mapping[str, Any]:
        """Run every pipeline that has an interval once, here and now; what each has done."""
        if self._spark is None:
            return {"pipelines": {}}
        store = MetadataStore(self.lake.registry, self.lake.store.warehouse.recorded)
        done: dict[str, str] = {}
        try:
            for pipeline in Pipelines(self.lake, store):
                if pipeline.listed.state == ACTIVE and pipeline.definition.interval is not None:
                    try:
                        done[pipeline.name] = self.run_one(pipeline)
                    except LakebookError as error:
                        done[pipeline.name] = f"error: {error}"
        finally:
            store.close()
        return {"pipelines": done}


def _is_held(record: PipelineRecord, now: int) -> bool:
    """Whether somebody has the turn to run a pipeline."""
    return record.holder is not None and record.held_until is not None and to_ms(record.held_until) > now
