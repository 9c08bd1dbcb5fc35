"""The rule for names and warehouse paths, and the only place that applies it."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from lakebook.errors import InvalidInput, InvalidName, PathOutsideWarehouse

MAX_NAME = 249
MAX_PATH = 1024
MAX_TEXT = 4096
#: The largest number that is read from a text: what is added to it fits into 64 bits too.
MAX_DECIMAL = 10**18 - 1
#: Ids, tokens and versions are counted from 1: a larger one was given by nobody, and those after it have room.
MAX_COUNTED = 10**15

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)
_RULE = f"Use 1 to {MAX_NAME} of the characters A-Z a-z 0-9 . _ - (and not '.' or '..')"


def check_name(kind: str, name: object) -> str:
    """Return `name` if it is a legal name for a topic, group, namespace or table."""
    if isinstance(name, str) and _NAME.fullmatch(name) and name not in (".", ".."):
        return name
    raise InvalidName(f"{shown(name)} is not a legal {kind} name", on=kind, remedy=_RULE)


# Most paths are of these characters, and none of their parts begins with a dot.
_PLAIN_PATH = re.compile(r"(?:[A-Za-z0-9_=+@%-][A-Za-z0-9._=+@%-]*/)*[A-Za-z0-9_=+@%-][A-Za-z0-9._=+@%-]*", re.ASCII)


def check_path(path: object) -> str:
    """Return `path` if it is a plain relative path that stays inside the warehouse."""
    if isinstance(path, str) and len(path) <= MAX_PATH and _PLAIN_PATH.fullmatch(path):
        return path
    if not isinstance(path, str) or not 0 < len(path.encode("utf-8", "replace")) <= MAX_PATH:
        reason = f"has to be a text of 1 to {MAX_PATH} bytes"
    elif path.startswith("/") or "\\" in path or "://" in path:
        reason = "has to be relative to the warehouse"
    elif any(part in ("", ".", "..") for part in path.split("/")):
        reason = "has an empty, '.' or '..' part"
    elif not path.isprintable():
        reason = "has a character that cannot be printed"
    else:
        return path
    raise PathOutsideWarehouse(
        f"the path {shown(path)} {reason}",
        on="warehouse",
        remedy="Give a path relative to the warehouse's root, such as 'topics/7/0/5f3c.parquet'",
    )


def check_id(kind: str, value: object) -> str:
    """Return `value` if it can be an id that a caller chose (a segment's, a producer's)."""
    if isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isascii() and value.isprintable():
        return value
    raise InvalidName(
        f"{shown(value)} is not a legal {kind} id",
        on=kind,
        remedy=f"Use 1 to {MAX_NAME} printable ASCII characters",
    )


def is_moment(value: object) -> bool:
    """Whether a value is a time in a known zone that exists in UTC too."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        return False
    try:
        value.astimezone(UTC)
    except OverflowError:  # The first or the last day of all, in another zone.
        return False
    return True


def check_moment(value: object, on: str) -> None:
    """Refuse a time that does not say in which zone it is, or that no registry can hold."""
    if not is_moment(value):
        raise InvalidInput(f"{shown(value)} is not an aware datetime", on=on, remedy="Give it a time zone")


def check_text(kind: str, value: object) -> None:
    """Refuse a free text that not every database can hold, or that is far too long."""
    if value is None:
        return
    if not isinstance(value, str) or len(value) > MAX_TEXT or "\0" in value or not _is_unicode(value):
        raise InvalidInput(
            f"{shown(value)} cannot be a {kind}", on=kind, remedy=f"Use a text of at most {MAX_TEXT} characters"
        )


def _is_unicode(value: str) -> bool:
    # A lone surrogate is a str in Python and nothing anywhere else.
    return value.encode("utf-8", "replace").decode() == value


def decimal_in(text: object, most: int = MAX_DECIMAL) -> int | None:
    """The number that a text of plain decimal digits is; none if it is no such text, or larger than `most`."""
    # Not `isdigit`: there are digits that are no numbers (²). And the length first: a text may be endless.
    if not isinstance(text, str) or len(text) > len(str(most)) or not (text.isascii() and text.isdecimal()):
        return None
    number = int(text)
    return number if number <= most else None


def shown(value: object) -> str:
    """A hostile or endless value, made fit for one line of an error message."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
