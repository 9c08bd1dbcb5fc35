"""How often files that nobody accounts for were claimed for their removal.

Whoever takes a file that lies in the warehouse already looks at it first and enters it later. If a sweep
claimed files in between, the file may be gone: then it has to look again.
"""

from __future__ import annotations

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.statements import Statement
from lakebook.registry.transactions import Reader, Transaction

_b = schema.book.c

SWEEPS = Statement(sa.select(_b.sweeps))
SHARE_SWEEPS = Statement(sa.select(_b.sweeps).with_for_update(read=True))
ADVANCE_SWEEPS = Statement(sa.update(schema.book).values(sweeps=_b.sweeps + sa.literal_column("1", sa.Integer)))


def sweeps(reader: Reader) -> int:
    """The number of sweeps so far, to be read before files are looked at."""
    row = reader.one(SWEEPS)
    return int(row[0]) if row is not None else 0


def same_sweep(transaction: Transaction, before: int) -> bool:
    """Whether no sweep has come since; none can until this transaction ends."""
    row = transaction.one(SHARE_SWEEPS)
    return row is not None and int(row[0]) == before
