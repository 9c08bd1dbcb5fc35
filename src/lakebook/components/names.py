"""What can be said of the components without loading them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lakebook.errors import InvalidInput
from lakebook.names import shown

#: Every component there is.
COMPONENTS = (
    "pipelines",
    "topic_publisher",
    "iceberg_updater",
    "orchestrator",
    "snapshotter",
    "compactor",
    "views",
    "janitor",
)

#: Those that claim what they work on, so that any number of processes can share it: they need not have the turn.
WORKERS = ("pipelines", "compactor", "views")

#: Numbers of the registry that upkeep brings down.
OWED = (
    "unpublished_versions",
    "owed_updates",
    "failed_updates",
    "inserts",
    "temporary_files_expired",
    "stalled_deliveries",
    "dead_letters",
    "events",
    "requests",
    "stopped_pipelines",
    "failing_pipelines",
    "pipeline_lag",
)
#: Beside them: files that are worth a compaction, segments that are worth a merge, and versions beyond what is kept.
SMALL_FILES = "small_files"
SMALL_SEGMENTS = "small_segments"
OLD_VERSIONS = "old_versions"
# From here on it is worth a word that nobody does the work.
_MANY_VERSIONS = 100
_MANY_SMALL_FILES = 100
_MANY_SMALL_SEGMENTS = 100
_MANY_OLD_VERSIONS = 100
_MANY_INSERTS = 1000
_MANY_EVENTS = 100_000


def check_workers(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse a name that is no component's, or that of one that needs the turn."""
    for name in check_components(names):
        if name not in WORKERS:
            raise InvalidInput(
                f"{name} is done by the one process that has the turn",
                on="components",
                remedy=f"Use {', '.join(WORKERS)}",
            )
    return check_components(names)


def check_components(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse a name that no component has."""
    for name in names:
        if name not in COMPONENTS:
            raise InvalidInput(
                f"there is no component {shown(name)}", on="components", remedy=f"Use {', '.join(COMPONENTS)}"
            )
    return tuple(dict.fromkeys(names))


def warnings_of(owed: Mapping[str, int], *, active: bool) -> list[str]:
    """What piles up while nobody looks after the tables."""
    found: list[str] = []
    if not active:
        piled = []
        if owed["unpublished_versions"] >= _MANY_VERSIONS:
            piled.append(f"{owed['unpublished_versions']} versions are not published")
        elif owed["owed_updates"]:
            # However few: somebody has written down that they are to be published, and has gone.
            piled.append(f"{owed['owed_updates']} versions are owed to Iceberg")
        if owed[SMALL_FILES] >= _MANY_SMALL_FILES:
            piled.append(f"{owed[SMALL_FILES]} small files are worth a compaction")
        if owed[SMALL_SEGMENTS] >= _MANY_SMALL_SEGMENTS:
            piled.append(f"{owed[SMALL_SEGMENTS]} small segments are worth a merge")
        if owed[OLD_VERSIONS] >= _MANY_OLD_VERSIONS:
            piled.append(f"{owed[OLD_VERSIONS]} versions are older than the history that is kept")
        if owed["inserts"] >= _MANY_INSERTS:
            piled.append(f"the folders of {owed['inserts']} inserts are not swept")
        if owed["temporary_files_expired"]:
            piled.append(f"the grace of {owed['temporary_files_expired']} files has passed")
        if owed["events"] >= _MANY_EVENTS:
            piled.append(f"{owed['events']} events are kept")
        if owed["requests"] or owed["stalled_deliveries"]:
            piled.append(f"{owed['requests'] + owed['stalled_deliveries']} requests and deliveries wait")
        if piled:
            found.append(f"nobody looks after the tables, and {', '.join(piled)}: start `lakebook run`")
    if owed["failed_updates"]:
        found.append(
            f"{owed['failed_updates']} versions could not be published: see `lakebook maintenance owed --state failed`"
        )
    if owed["dead_letters"]:
        found.append(f"{owed['dead_letters']} events were parked: see `lakebook events dead-letters list`")
    return found
