"""The pipeline runner: it runs the pipelines that have an interval, each at its own, several at a time.

One that fails waits by its own backoff and one that is slow has a thread of its own for so long; so none holds up
another. What has landed is the registry's business: several runners at once do no harm.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

from lakebook.clock import to_ms
from lakebook.components.component import Component
from lakebook.errors import BookClosed, LakebookError, PipelineBusy, PipelineStopped
from lakebook.lake.lake import Lake
from lakebook.pipelines.pipeline import Pipeline
from lakebook.pipelines.pipelines import Pipelines
from lakebook.registry.pipelines import ACTIVE
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
        self._spark = spark
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
        """Begin to run what is due."""
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
            return {"at_work": sorted(self._at_work), "last": dict(list(self._said.items())[:_MOST_SHOWN])}

    def _run(self) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="lakebook-pipeline") as pool:
            while not self._stopping.wait(_LOOK):
                try:
                    for pipeline in self._all_due():
                        pool.submit(self._one, pipeline)
                except BookClosed:
                    return
                except Exception:
                    # Whatever it is: the next look may find it mended.
                    LOG.exception("the pipelines could not be looked at")

    # --- one pipeline ----------------------------------------------------------------

    def _all_due(self) -> list[Pipeline]:
        """Those that are to be run now, and are noted as at work from here on."""
        if self._spark is None or self._metadata is None or self.paused() is not None:
            return []
        now, clock = self.lake.clock.monotonic(), self.lake.clock.now_ms()
        found = []
        for pipeline in Pipelines(self.lake, self._metadata):
            record = pipeline.listed
            if record.state != ACTIVE or pipeline.definition.interval is None:
                continue
            if record.retry_at is not None and to_ms(record.retry_at) > clock:
                continue
            with self._lock:
                if pipeline.name in self._at_work or self._due.get(pipeline.name, now) > now:
                    continue
                self._at_work.add(pipeline.name)
            found.append(pipeline)
        return found

    def _one(self, pipeline: Pipeline) -> None:
        try:
            self._said[pipeline.name] = self.run_one(pipeline)
        except PipelineBusy:
            self._said[pipeline.name] = "another process runs it"
        except LakebookError as error:
            self._said[pipeline.name] = str(error)
            LOG.warning("pipeline %s failed (%s)", pipeline.name, error)
        except Exception as error:
            self._said[pipeline.name] = f"{type(error).__name__}: {error}"
            LOG.exception("pipeline %s failed", pipeline.name)
        finally:
            with self._lock:
                self._at_work.discard(pipeline.name)
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
        spark = self._spark()
        with self.journal.work("run", f"{waiting} records wait", pipeline.listed.target_id) as entry:
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
