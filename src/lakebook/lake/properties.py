"""Properties of tables, and what Lakebook itself reads from them."""

from __future__ import annotations

from collections.abc import Mapping

from lakebook.errors import InvalidTable
from lakebook.lake.lake import Lake
from lakebook.names import check_text, shown

#: For how long a table's versions are kept, and how many at least.
HISTORY_SECONDS = "lakebook.history.seconds"
HISTORY_VERSIONS = "lakebook.history.versions"
_MOST_PROPERTIES = 1000


def check_table_properties(properties: Mapping[str, str], lake: Lake) -> dict[str, str]:
    """Refuse properties that are no texts, or whose value Lakebook could not use."""
    found = dict(properties)
    if len(found) > _MOST_PROPERTIES:
        raise InvalidTable(f"{len(found)} properties are too many", on="table", remedy=f"Use {_MOST_PROPERTIES}")
    for key, value in found.items():
        if not isinstance(key, str) or not key or not isinstance(value, str):
            raise InvalidTable(f"{shown(key)}: {shown(value)} is no property", on="table", remedy="Use texts")
        check_text("property", key)
        check_text("property", value)
    history_policy(lake, found)
    return found


def history_policy(lake: Lake, properties: Mapping[str, str]) -> tuple[float, int]:
    """For how many seconds, and how many versions at least, a table's history is kept."""
    try:
        seconds = float(properties.get(HISTORY_SECONDS, lake.settings.history_seconds))
        versions = int(properties.get(HISTORY_VERSIONS, lake.settings.history_versions))
    except ValueError:
        seconds, versions = -1.0, -1
    if not 0 <= seconds < 10**11 or not 1 <= versions < 10**12:
        raise InvalidTable(
            f"its history cannot be {shown(properties.get(HISTORY_SECONDS))} seconds"
            f" and {shown(properties.get(HISTORY_VERSIONS))} versions",
            on="table",
            remedy=f"Set {HISTORY_SECONDS} to a number and {HISTORY_VERSIONS} to at least 1",
        )
    return seconds, versions
