"""What can be said of the components without loading them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lakebook.errors import InvalidInput
from lakebook.names import shown

#: Every component there is.
COMPONENTS = ("topic_publisher", "iceberg_updater", "orchestrator", "snapshotter", "compactor", "janitor")

#: Numbers of the registry that upkeep brings down.
OWED = (
    "unpublished_versions",
    "owed_updates",
    "temporary_files_expired",
    "stalled_deliveries",
    "dead_letters",
    "events",
    "requests",
)
# From here on it is worth a word that nobody does the work.
_MANY_VERSIONS = 100
_MANY_EVENTS = 100_000


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
        if owed["temporary_files_expired"]:
            piled.append(f"the grace of {owed['temporary_files_expired']} files has passed")
        if owed["events"] >= _MANY_EVENTS:
            piled.append(f"{owed['events']} events are kept")
        if owed["requests"] or owed["stalled_deliveries"]:
            piled.append(f"{owed['requests'] + owed['stalled_deliveries']} requests and deliveries wait")
        if piled:
            found.append(f"nobody looks after the tables, and {', '.join(piled)}: start `lakebook run`")
    if owed["dead_letters"]:
        found.append(f"{owed['dead_letters']} events were parked: see `lakebook events dead-letters list`")
    return found
