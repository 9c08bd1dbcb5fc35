"""Counters, timings and gauges of one book, on the Prometheus client's own types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from lakebook import forks
from lakebook.clock import Clock

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# What `Book.measure` reads from the registry, and what each number means.
GAUGES = {
    "topics": "Live topics.",
    "partitions": "Partitions of live topics.",
    "segments": "Segments of live topics.",
    "segment_bytes": "Bytes in the segments of live topics.",
    "segment_records": "Records in the segments of live topics.",
    "consumer_groups": "Consumer groups.",
    "consumer_lag": "Records that consumer groups have not read yet, over all groups.",
    "tables": "Live tables.",
    "table_files": "Visible files of live tables.",
    "table_rows": "Rows of live tables.",
    "table_bytes": "Bytes in the visible files of live tables.",
    "unpublished_tables": "Live tables of format parquet with versions that are not published as Iceberg.",
    "unpublished_versions": "Versions of live tables that are not published as Iceberg.",
    "leases": "Leases of readers, also those that have run out and are not removed yet.",
    "inserts": "Changes of tables whose folders have not been swept quiet yet.",
    "events": "Captured events that are kept.",
    "temporary_files": "Files that wait for their removal.",
    "temporary_files_expired": "Files whose grace has passed and that are still there.",
    "temporary_file_bytes": "Bytes in files that wait for their removal.",
    "open_commits": "Commit rows that are neither committed nor aborted.",
    "owed_updates": "Versions of tables that are owed to Iceberg and written down as such.",
    "failed_updates": "Those of them whose last attempt to be published has failed.",
    "stalled_deliveries": "Lake objects of which a subscriber has not taken every event yet.",
    "dead_letters": "Events that were parked and not driven again.",
    "requests": "Requests to the components that are not met yet.",
    "pipelines": "Pipelines.",
    "stopped_pipelines": "Pipelines that have stopped, and go on only when somebody resumes them.",
    "failing_pipelines": "Pipelines whose last batch has failed, and that try it again.",
    "pipeline_lag": "Records, or versions of source tables, that pipelines have not read yet, over all pipelines.",
}


class _HotCounters(Collector):
    """Counts kept as plain integers: a look-up through the cache is faster than a Counter."""

    def __init__(self) -> None:
        self.cache_hits = 0
        self.cache_misses = 0

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "lakebook_cache_lookups", "Look-ups answered by the read cache or by the registry.", labels=["result"]
        )
        family.add_metric(["hit"], self.cache_hits)
        family.add_metric(["miss"], self.cache_misses)
        yield family


class Metrics:
    """The metrics of one book."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.hot = _HotCounters()
        self._begin()
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        """Count anew in the child: a thread of the parent may have held a counter's lock."""
        self.hot.cache_hits = self.hot.cache_misses = 0
        self._begin()

    def _begin(self) -> None:
        self._collectors = CollectorRegistry()
        self._collectors.register(self.hot)
        self._transactions = Counter(
            "lakebook_transactions", "Write transactions by outcome.", ["outcome"], registry=self._collectors
        )
        self._retries = Counter(
            "lakebook_transaction_retries",
            "Write transactions tried again, by reason.",
            ["reason"],
            registry=self._collectors,
        )
        self._settled = Counter(
            "lakebook_commits_settled",
            "COMMITs of unknown outcome that the fence settled.",
            ["outcome"],
            registry=self._collectors,
        )
        self._changes = Counter(
            "lakebook_table_changes", "Committed changes of tables.", ["operation"], registry=self._collectors
        )
        self._rows = Counter(
            "lakebook_table_rows_added", "Rows that changes of tables added.", ["operation"], registry=self._collectors
        )
        self._files = Counter(
            "lakebook_table_files_added",
            "Files that changes of tables added.",
            ["operation"],
            registry=self._collectors,
        )
        self._bytes = Counter(
            "lakebook_table_bytes_added",
            "Bytes that changes of tables added.",
            ["operation"],
            registry=self._collectors,
        )
        self._steps = Histogram(
            "lakebook_insert_step_seconds",
            "How long the steps of an insert take.",
            ["step"],
            buckets=_BUCKETS,
            registry=self._collectors,
        )
        self._produced = Counter(
            "lakebook_produced_records", "Records that producers have stored.", registry=self._collectors
        )
        self._produced_bytes = Counter(
            "lakebook_produced_bytes", "Bytes of the records that producers have stored.", registry=self._collectors
        )
        self._produce_retries = Counter(
            "lakebook_produce_retries",
            "Batches of records that producers sent again, by reason.",
            ["reason"],
            registry=self._collectors,
        )
        self._consumed = Counter(
            "lakebook_consumed_records", "Records that consumers have handed out.", registry=self._collectors
        )
        self._skipped = Counter(
            "lakebook_skipped_records",
            "Offsets that consumers left out because their records were not there.",
            registry=self._collectors,
        )
        self._rebalances = Counter(
            "lakebook_rebalances", "How often a consumer got partitions from its group.", registry=self._collectors
        )
        self._publishes = Counter(
            "lakebook_publishes", "Tables published as Iceberg, by outcome.", ["outcome"], registry=self._collectors
        )
        self._publish_seconds = Histogram(
            "lakebook_publish_seconds",
            "How long it takes to publish a table.",
            buckets=_BUCKETS,
            registry=self._collectors,
        )
        self._deliveries = Counter(
            "lakebook_deliveries",
            "Events handed to subscribers, by outcome.",
            ["subscriber", "outcome"],
            registry=self._collectors,
        )
        self._delivery_seconds = Histogram(
            "lakebook_delivery_seconds",
            "How long after its commit an event was taken.",
            ["subscriber"],
            buckets=_BUCKETS,
            registry=self._collectors,
        )
        self._refreshes = Counter(
            "lakebook_refreshes",
            "Lake objects that subscribers took from the registry anew, by outcome.",
            ["subscriber", "outcome"],
            registry=self._collectors,
        )
        self._breakers = Gauge(
            "lakebook_breaker_open",
            "Whether a subscriber's circuit breaker is open (1), half open (0.5) or closed (0).",
            ["subscriber"],
            registry=self._collectors,
        )
        self._turns = Counter(
            "lakebook_astha",
            "What became of the scheduler in this process: claimed, lost, released, reinitialised.",
            ["change"],
            registry=self._collectors,
        )
        self._compacted_files = Counter(
            "lakebook_compacted_files", "Files that compactions read and wrote.", ["side"], registry=self._collectors
        )
        self._compacted_bytes = Counter(
            "lakebook_compacted_bytes", "Bytes that compactions read and wrote.", ["side"], registry=self._collectors
        )
        self._compactions = Counter(
            "lakebook_compactions",
            "Compactions, by outcome: done, yielded to a writer, failed.",
            ["outcome"],
            registry=self._collectors,
        )
        self._debt_files = Gauge(
            "lakebook_compaction_debt_files",
            "Small files of a table that are worth a compaction.",
            ["table"],
            registry=self._collectors,
        )
        self._debt_bytes = Gauge(
            "lakebook_compaction_debt_bytes",
            "Bytes in small files of a table that are worth a compaction.",
            ["table"],
            registry=self._collectors,
        )
        self._chores = Counter(
            "lakebook_chores",
            "Rounds of work by the clock, by component, action and outcome.",
            ["component", "action", "outcome"],
            registry=self._collectors,
        )
        self._repairs = Counter(
            "lakebook_repairs", "Things a reader or `repair` has mended.", ["what"], registry=self._collectors
        )
        self._events = Counter(
            "lakebook_events_captured", "Events captured by this process.", ["table"], registry=self._collectors
        )
        self._timings = Histogram(
            "lakebook_seconds",
            "How long an operation took.",
            ["operation"],
            registry=self._collectors,
            buckets=_BUCKETS,
        )
        self._gauges = {
            name: Gauge(f"lakebook_{name}", help_text, registry=self._collectors) for name, help_text in GAUGES.items()
        }

    def count_transaction(self, outcome: str) -> None:
        """Count a write transaction that ended."""
        self._transactions.labels(outcome).inc()

    def count_retry(self, reason: str) -> None:
        """Count a write transaction that starts again."""
        self._retries.labels(reason).inc()

    def count_settled(self, outcome: str) -> None:
        """Count a COMMIT whose outcome had to be asked for."""
        self._settled.labels(outcome).inc()

    def count_change(self, operation: str, rows: int, files: int, size: int, seconds: Mapping[str, float]) -> None:
        """Count a committed change of a table's files."""
        self._changes.labels(operation).inc()
        self._rows.labels(operation).inc(rows)
        self._files.labels(operation).inc(files)
        self._bytes.labels(operation).inc(size)
        for step, spent in seconds.items():
            self._steps.labels(step).observe(max(0.0, spent))

    def count_produced(self, records: int, size: int) -> None:
        """Count a batch of records that a producer has stored."""
        self._produced.inc(records)
        self._produced_bytes.inc(size)

    def count_produce_retry(self, reason: str) -> None:
        """Count a batch of records that is sent again."""
        self._produce_retries.labels(reason).inc()

    def count_consumed(self, records: int) -> None:
        """Count records that a consumer has handed out."""
        self._consumed.inc(records)

    def count_skipped(self, offsets: int) -> None:
        """Count offsets that a consumer left out."""
        self._skipped.inc(offsets)

    def count_rebalance(self) -> None:
        """Count partitions that came to a consumer."""
        self._rebalances.inc()

    def count_publish(self, outcome: str, seconds: float) -> None:
        """Count an attempt to publish a table, which may have had nothing to do."""
        self._publishes.labels(outcome).inc()
        self._publish_seconds.observe(max(0.0, seconds))

    def count_deliveries(self, subscriber: str, outcome: str, number: int) -> None:
        """Count events that were handed over: taken, failed or parked."""
        self._deliveries.labels(subscriber, outcome).inc(number)

    def observe_delivery(self, subscriber: str, seconds: float) -> None:
        """Note how old an event was when it was taken."""
        self._delivery_seconds.labels(subscriber).observe(max(0.0, seconds))

    def count_refresh(self, subscriber: str, outcome: str) -> None:
        """Count a lake object that a subscriber took anew, or failed to."""
        self._refreshes.labels(subscriber, outcome).inc()

    def set_breaker(self, subscriber: str, opened: float) -> None:
        """Say whether a breaker is open."""
        self._breakers.labels(subscriber).set(opened)

    def count_turn(self, change: str) -> None:
        """Count a change of who delivers events."""
        self._turns.labels(change).inc()

    def count_compaction(
        self, outcome: str, files_in: int = 0, files_out: int = 0, bytes_in: int = 0, bytes_out: int = 0
    ) -> None:
        """Count a compaction, and what it read and wrote."""
        self._compactions.labels(outcome).inc()
        self._compacted_files.labels("in").inc(files_in)
        self._compacted_files.labels("out").inc(files_out)
        self._compacted_bytes.labels("in").inc(bytes_in)
        self._compacted_bytes.labels("out").inc(bytes_out)

    def set_debt(self, table: str, files: int, size: int) -> None:
        """Say how much of a table is worth a compaction."""
        self._debt_files.labels(table).set(files)
        self._debt_bytes.labels(table).set(size)

    def count_chore(self, component: str, action: str, outcome: str) -> None:
        """Count a round of work by the clock."""
        self._chores.labels(component, action, outcome).inc()

    def count_repair(self, what: str) -> None:
        """Count something that was mended."""
        self._repairs.labels(what).inc()

    def count_events(self, table: str, number: int) -> None:
        """Count events that a committed transaction captured."""
        self._events.labels(table).inc(number)

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Measure how long the block takes."""
        start = self._clock.monotonic()
        try:
            yield
        finally:
            self._timings.labels(operation).observe(self._clock.monotonic() - start)

    def set_gauges(self, values: Mapping[str, int]) -> None:
        """Take over what the registry said."""
        for name, value in values.items():
            self._gauges[name].set(value)

    def prometheus(self) -> str:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._collectors).decode()

    def values(self) -> dict[str, float]:
        """All metrics as name and number; a labelled one carries its labels in the name."""
        found: dict[str, float] = {}
        for family in self._collectors.collect():
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_created")):
                    continue
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return dict(sorted(found.items()))
