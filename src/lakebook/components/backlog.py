"""What is left to do for upkeep, as numbers that can be had at any time without doing any of it."""

from __future__ import annotations

from collections.abc import Mapping

from lakebook.components.names import OWED, SMALL_FILES
from lakebook.lake.compaction import policy_of
from lakebook.lake.lake import Lake
from lakebook.registry.small_files import count_in_runs, tables_with_most_files
from lakebook.registry.tables import GET_TABLE_BY_ID, table_from

# Whoever asks must not wait for long on a large book: tables that are looked at, and of each the smallest files.
_MOST_TABLES = 50
_MOST_FILES = 2000


def backlog(gauges: Mapping[str, int], small_files: int) -> dict[str, int]:
    """The numbers that upkeep brings down."""
    return {**{name: gauges[name] for name in OWED}, SMALL_FILES: small_files}


def count_small_files(lake: Lake) -> int:
    """How many small files are worth a compaction, at the least: of the tables with the most files, by rows alone."""
    found = 0
    for table_id in lake.registry.read_with(
        lambda reader: tables_with_most_files(reader, lake.settings.compact_files, _MOST_TABLES)
    ):
        row = lake.registry.one(GET_TABLE_BY_ID, table_id)
        if row is None:
            continue  # It was dropped meanwhile.
        policy = policy_of(lake, table_from(row))
        if policy.enabled:
            found += lake.registry.read_with(
                lambda reader: count_in_runs(reader, table_id, policy.small, policy.least, _MOST_FILES),  # noqa: B023
                plan_once=False,
            )
    return found
