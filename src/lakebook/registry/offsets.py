"""What an offset can be."""

from __future__ import annotations

from lakebook.errors import InvalidOffset, NegativeOffset, OffsetOverflow
from lakebook.names import shown
from lakebook.registry.schema import MAX_BIGINT

#: The largest high watermark; the largest offset a record can have is one less.
MAX_OFFSET = MAX_BIGINT


def check_offset(offset: object, on: str, *, most: int = MAX_OFFSET) -> int:
    """Return `offset` if it is a whole number that an offset can be."""
    if not isinstance(offset, int) or isinstance(offset, bool):
        raise InvalidOffset(f"{shown(offset)} is not a whole number", on=on, remedy="Give the offset as an int")
    if offset < 0:
        raise NegativeOffset(f"the offset {shown(offset)} is below zero", on=on, remedy="Offsets begin at 0")
    if offset > most:
        raise OffsetOverflow(f"the offset {shown(offset)} is too large", on=on, remedy=f"The largest is {most}")
    return offset
