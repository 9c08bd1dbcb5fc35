"""What is left to do for upkeep, as numbers that can be had at any time without doing any of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lakebook.components.names import OLD_VERSIONS, OWED, SMALL_FILES, SMALL_SEGMENTS
from lakebook.lake.compaction import policy_of
from lakebook.lake.lake import Lake
from lakebook.lake.properties import history_policy
from lakebook.registry.pipelines import PAUSED, STOPPED, Standing
from lakebook.registry.small_files import count_in_runs, tables_with_most_files
from lakebook.registry.small_segments import partitions_with_most_segments
from lakebook.registry.tables import GET_TABLE_BY_ID, TableRecord, table_from
from lakebook.registry.tags import history_of, tables_with_most_history
from lakebook.streams.merging import count_mergeable

# Whoever asks must not wait for long on a large book: tables that are looked at, and of each the smallest files.
_MOST_TABLES = 50
_MOST_FILES = 2000
# Partitions that are looked at, and of each the newest segments: what is older was merged, or was small before them.
_MOST_PARTITIONS = 20
_MOST_SEGMENTS = 1000
_MOST_SHOWN = 5
_MOST_TEXT = 200


def backlog(gauges: Mapping[str, int], counted: Mapping[str, int]) -> dict[str, int]:
    """The numbers that upkeep brings down."""
    return {**{name: gauges[name] for name in OWED}, **counted}


def count_backlog(lake: Lake) -> dict[str, int]:
    """What no number of the registry says: it is counted, at the least, of what is largest."""
    return {
        SMALL_FILES: count_small_files(lake),
        SMALL_SEGMENTS: count_small_segments(lake),
        OLD_VERSIONS: count_old_versions(lake),
    }


def count_small_files(lake: Lake) -> int:
    """How many small files are worth a compaction, at the least: of the tables with the most files, by rows alone."""
    found = 0
    for table in _tables(
        lake,
        lake.registry.read_with(
            lambda reader: tables_with_most_files(reader, lake.settings.compact_files, _MOST_TABLES)
        ),
    ):
        policy = policy_of(lake, table)
        if policy.enabled:
            found += lake.registry.read_with(
                lambda reader: count_in_runs(reader, table.id, policy.small, policy.least, _MOST_FILES),  # noqa: B023
                plan_once=False,
            )
    return found


def count_small_segments(lake: Lake) -> int:
    """How many segments are worth a merge, at the least: of the partitions with the most, the newest."""
    places = lake.registry.read_with(
        lambda reader: partitions_with_most_segments(reader, lake.settings.merge_segments, _MOST_PARTITIONS)
    )
    return sum(count_mergeable(lake, topic, number, _MOST_SEGMENTS) for topic, number in places)


def count_old_versions(lake: Lake) -> int:
    """How many versions the policies of their tables keep no more, of the tables with the longest history.

    What a lease needs is no such version.
    """
    found = 0
    for table in _tables(lake, lake.registry.read_with(lambda reader: tables_with_most_history(reader, _MOST_TABLES))):
        seconds, versions = history_policy(lake, lake.metadata_of(table, table.schema_version).properties)
        since = lake.clock.now_ms() - round(seconds * 1000)
        history = lake.registry.in_snapshot(lambda reader: history_of(reader, table, since, versions))  # noqa: B023
        found += max(0, history.needed - history.oldest)
    return found


def _tables(lake: Lake, ids: Sequence[int]) -> list[TableRecord]:
    """Those of some tables that were not dropped meanwhile."""
    rows = [lake.registry.one(GET_TABLE_BY_ID, table_id) for table_id in ids]
    return [table_from(row) for row in rows if row is not None]


def pipeline_warnings(pipelines: Sequence[Standing], *, active: bool) -> list[str]:
    """Which pipelines do not go on, and why; and what waits for those that nobody runs."""
    found = [
        f"pipeline {item.name} has stopped, and {item.lag} records wait: {_cut(item.last_error)}; mend it, then run"
        f" `lakebook pipelines resume {item.name}`"
        for item in pipelines
        if item.state == STOPPED
    ]
    found += [
        f"pipeline {item.name} has failed {item.failures} times in a row: {_cut(item.last_error)}; see"
        f" `lakebook pipelines show {item.name}`"
        for item in pipelines
        if item.failures and item.state != STOPPED
    ]
    found += [
        f"pipeline {item.name} is paused, and {item.lag} records wait"
        for item in pipelines
        if item.state == PAUSED and item.lag
    ]
    waiting = [item for item in pipelines if item.scheduled and item.lag and item.state not in (STOPPED, PAUSED)]
    if waiting and not active:
        number = sum(item.lag for item in waiting)
        names = ", ".join(item.name for item in waiting[:_MOST_SHOWN]) + (" …" if len(waiting) > _MOST_SHOWN else "")
        found.append(f"nobody runs the pipelines that have an interval, and {number} records wait for {names}")
    return found


def _cut(text: str | None) -> str:
    return (text or "")[:_MOST_TEXT]
