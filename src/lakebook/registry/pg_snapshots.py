"""PostgreSQL's snapshots as values: which transactions had ended when one was taken.

What is made of them here, cursors and the horizon of the events, has the same form and need not have been
taken at any time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TEXT = re.compile(r"(\d{1,19}):(\d{1,19}):((?:\d{1,19}(?:,\d{1,19})*)?)", re.ASCII)


@dataclass(frozen=True)
class PgSnapshot:
    """Every transaction below `xmax` had ended, but for those in `open`."""

    xmax: int
    open: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> PgSnapshot | None:
        """Read one as PostgreSQL writes it: xmin, xmax, and what was open between; none if it is none."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        low, high = int(match[1]), int(match[2])
        between = [int(part) for part in match[3].split(",") if part]
        if not 0 < low <= high or between != sorted(set(between)) or not all(low <= xid < high for xid in between):
            return None
        return cls(high, frozenset(between))

    def __str__(self) -> str:
        between = sorted(self.open)
        low = between[0] if between else self.xmax
        return f"{low}:{self.xmax}:{','.join(map(str, between))}"

    def sees(self, xid: int) -> bool:
        """Whether a transaction had ended."""
        return xid < self.xmax and xid not in self.open

    def includes(self, other: PgSnapshot) -> bool:
        """Whether it sees everything that another one sees."""
        between = range(self.xmax, other.xmax)
        if len(between) > len(other.open):
            return False  # Not all of them can have been open.
        return all(xid in other.open for xid in between) and not any(other.sees(xid) for xid in self.open)

    def below(self, xid: int) -> PgSnapshot:
        """What it sees of the transactions below one."""
        if xid >= self.xmax:
            return self
        return PgSnapshot(xid, frozenset(item for item in self.open if item < xid))

    def shared(self, other: PgSnapshot) -> PgSnapshot:
        """What both see."""
        xmax = min(self.xmax, other.xmax)
        return PgSnapshot(xmax, frozenset(xid for xid in self.open | other.open if xid < xmax))

    def joined(self, other: PgSnapshot) -> PgSnapshot:
        """What one of the two sees."""
        last = max(self, other, key=lambda item: item.xmax)
        first = other if last is self else self
        return PgSnapshot(last.xmax, frozenset(xid for xid in last.open if not first.sees(xid)))
