"""The configuration keys a topic may have, and what their values may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lakebook.errors import InvalidConfig
from lakebook.names import shown
from lakebook.registry.schema import MAX_BIGINT

#: Keys with this prefix are the user's own and are kept as they are.
USER_PREFIX = "user."
MAX_VALUE = 4096


def _number(least: int, most: int = MAX_BIGINT) -> tuple[Callable[[str], bool], str]:
    def accepts(value: str) -> bool:
        return value.isascii() and value.isdecimal() and len(value) <= 19 and least <= int(value) <= most

    return accepts, f"a whole number from {least} to {most}"


def _one_of(*choices: str) -> tuple[Callable[[str], bool], str]:
    return choices.__contains__, "one of " + ", ".join(choices)


KEYS: dict[str, tuple[Callable[[str], bool], str]] = {
    "cleanup.policy": _one_of("delete"),
    # Whether the topic is an Iceberg table too.
    "iceberg": _one_of("true", "false"),
    "compression.type": _one_of("none", "snappy", "gzip", "lz4", "zstd"),
    "max.message.bytes": _number(1, 2**31 - 1),
    "message.timestamp.type": _one_of("CreateTime", "LogAppendTime"),
    "retention.bytes": _number(1),
    # Whether retention waits for the slowest consumer group.
    "retention.groups": _one_of("ignore", "wait"),
    # Whether small segments of the topic are merged in the background.
    "segment.merge": _one_of("true", "false"),
    "segment.bytes": _number(1024),
    "segment.ms": _number(1),
    "segment.records": _number(1, 2**31 - 1),
}


def check_config(topic: str, config: Mapping[str, str | None], *, removals: bool = False) -> None:
    """Refuse unknown keys and malformed values; `None` asks for a removal where that is allowed."""
    if not isinstance(config, Mapping):
        raise InvalidConfig(f"{shown(config)} is not a mapping of texts", on=f"topic {topic}")
    for key, value in config.items():
        if not isinstance(key, str) or not (key in KEYS or _is_users(key)):
            raise InvalidConfig(
                f"there is no configuration key {shown(key)}",
                on=f"topic {topic}",
                remedy=f"The keys are {', '.join(sorted(KEYS))}, and any that begins with {USER_PREFIX!r}",
            )
        if value is None and removals:
            continue
        accepts, wanted = KEYS.get(key, (_fits, f"a printable text of at most {MAX_VALUE} characters"))
        if not isinstance(value, str) or not accepts(value):
            raise InvalidConfig(f"{key} cannot be {shown(value)}", on=f"topic {topic}", remedy=f"It has to be {wanted}")


def check_retention(topic: str, retention_ms: object) -> None:
    """Refuse a retention that is neither none (for ever) nor a positive number of milliseconds."""
    if retention_ms is None:
        return
    if not isinstance(retention_ms, int) or isinstance(retention_ms, bool) or not 0 < retention_ms <= MAX_BIGINT:
        raise InvalidConfig(
            f"retention_ms cannot be {shown(retention_ms)}",
            on=f"topic {topic}",
            remedy="Give milliseconds above zero, or nothing to keep segments for ever",
        )


def _is_users(key: str) -> bool:
    return key.startswith(USER_PREFIX) and _fits(key) and len(key) <= 249


def _fits(value: str) -> bool:
    return value.isprintable() and len(value) <= MAX_VALUE and value.encode("utf-8", "replace").decode() == value
