"""Properties of tables, and what Lakebook itself reads from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lakebook.errors import InvalidTable
from lakebook.iceberg.refs import TAG_QUERIES
from lakebook.lake.lake import Lake
from lakebook.names import check_text, shown

#: For how long a table's versions are kept, and how many at least.
HISTORY_SECONDS = "lakebook.history.seconds"
HISTORY_VERSIONS = "lakebook.history.versions"
#: When the snapshotter tags a table, how many of its tags stay, and each for how long (0: it has no end).
TAG_SECONDS = "lakebook.tag.seconds"
TAG_BYTES = "lakebook.tag.bytes"
TAGS_KEPT = "lakebook.tag.kept"
TAG_KEEP_SECONDS = "lakebook.tag.keep-seconds"
#: Whether a table is compacted, from how many small files on, and to files of which size; Iceberg's own name.
COMPACTION = "lakebook.compaction"
COMPACTION_FILES = "lakebook.compaction.min-files"
TARGET_SIZE = "write.target-file-size-bytes"
#: No time that is set may be longer.
MOST_SECONDS = 10**11
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
    tag_policy(lake, found)
    compaction_policy(lake, found)
    return found


def history_policy(lake: Lake, properties: Mapping[str, str]) -> tuple[float, int]:
    """For how many seconds, and how many versions at least, a table's history is kept."""
    try:
        seconds = float(properties.get(HISTORY_SECONDS, lake.settings.history_seconds))
        versions = int(properties.get(HISTORY_VERSIONS, lake.settings.history_versions))
    except ValueError:
        seconds, versions = -1.0, -1
    if not 0 <= seconds < MOST_SECONDS or not 1 <= versions < 10**12:
        raise InvalidTable(
            f"its history cannot be {shown(properties.get(HISTORY_SECONDS))} seconds"
            f" and {shown(properties.get(HISTORY_VERSIONS))} versions",
            on="table",
            remedy=f"Set {HISTORY_SECONDS} to a number and {HISTORY_VERSIONS} to at least 1",
        )
    return seconds, versions


@dataclass(frozen=True)
class TagPolicy:
    """Which states of a table the snapshotter keeps."""

    #: Seconds between two tags, and bytes of new files after which one is made; 0: none for that reason.
    seconds: float
    bytes: int
    #: Whether a state that is loaded through a catalog gets one.
    queries: bool
    #: How many of them stay.
    kept: int
    #: For how long each stays; none: until there are more than `kept`.
    keep_seconds: float | None


def tag_policy(lake: Lake, properties: Mapping[str, str]) -> TagPolicy:
    """Which states of a table are kept as tags."""
    settings = lake.settings
    seconds = _number(properties, TAG_SECONDS, settings.tag_seconds, 0, MOST_SECONDS)
    size = _number(properties, TAG_BYTES, settings.tag_bytes, 0, 2**63, whole=True)
    kept = _number(properties, TAGS_KEPT, settings.tags_kept, 1, 10**9, whole=True)
    keep = _number(properties, TAG_KEEP_SECONDS, 0, 0, MOST_SECONDS)
    queries = properties.get(TAG_QUERIES, settings.tag_queries)
    if queries not in ("yes", "no"):
        raise InvalidTable(
            f"{TAG_QUERIES} cannot be {shown(queries)}", on="table", remedy=f"Set {TAG_QUERIES} to yes or no"
        )
    return TagPolicy(float(seconds), int(size), queries == "yes", int(kept), float(keep) or None)


@dataclass(frozen=True)
class CompactionPolicy:
    """How a table is compacted."""

    #: Whether the compactor looks after it; by hand it can be compacted all the same.
    enabled: bool
    #: Bytes that a file has at best.
    target: int
    #: Small files of a partition from which on they are rewritten.
    least: int

    @property
    def small(self) -> int:
        """Files of fewer bytes are small."""
        return max(1, self.target * 3 // 4)


def compaction_policy(lake: Lake, properties: Mapping[str, str]) -> CompactionPolicy:
    """Whether and how a table is compacted."""
    settings = lake.settings
    enabled = properties.get(COMPACTION, "on")
    if enabled not in ("on", "off"):
        raise InvalidTable(
            f"{COMPACTION} cannot be {shown(enabled)}", on="table", remedy=f"Set {COMPACTION} to on or off"
        )
    target = _number(properties, TARGET_SIZE, settings.compact_target, 1, 2**63, whole=True)
    least = _number(properties, COMPACTION_FILES, settings.compact_files, 2, 2**31, whole=True)
    return CompactionPolicy(enabled == "on", int(target), int(least))


def _number(
    properties: Mapping[str, str], key: str, default: float, least: int, below: int, *, whole: bool = False
) -> float:
    """A property that is a number, or what stands for it."""
    given = properties.get(key)
    try:
        found = default if given is None else int(given) if whole else float(given)
    except ValueError:
        found = -1
    # Written so that NaN is refused too.
    if not least <= found < below:
        raise InvalidTable(
            f"{key} cannot be {shown(given)}", on="table", remedy=f"Set {key} to a number of at least {least}"
        )
    return found
