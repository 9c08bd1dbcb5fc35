"""Whether a book was restored, and whether anything may be removed from it.

After a restore the registry knows an earlier state than the warehouse has. So nothing is removed until somebody has
looked at it and says so: the book is held. And what lay there when it was restored is never removed because no
row knows it, not even then: it may be what another life of the book has committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from lakebook.clock import to_datetime, to_ms
from lakebook.errors import BookHeld
from lakebook.registry import schema
from lakebook.registry.registry import Registry
from lakebook.registry.statements import Statement
from lakebook.registry.transactions import Reader, Transaction

_b = schema.book.c
READ_RESTORED = Statement(sa.select(_b.backup_at, _b.restored_at, _b.held_at, _b.store_backup_at, _b.store_restored_at))
END_HOLD = Statement(sa.update(schema.book).where(_b.held_at.is_not(None)).values(held_at=sa.null()))


@dataclass(frozen=True)
class Restored:
    """That a book was restored."""

    #: When the backup was taken.
    backup_at: datetime
    #: When it was restored.
    restored_at: datetime
    #: Since when nothing is removed; none if somebody has said that it may be.
    held_at: datetime | None
    #: Both times by the clock of the store, by which alone its objects can be compared; none where it is not known.
    store_backup_at: datetime | None = None
    store_restored_at: datetime | None = None

    def was_there(self, modified: datetime) -> bool:
        """Whether something that the store dates so lay there when the book was restored.

        Some stores date by whole seconds. What has the date of the restore itself counts as having been there.
        """
        return to_ms(modified) <= to_ms(self.store_restored_at or self.restored_at)

    def unknown(self, path: str, modified: datetime) -> str:
        """What is to be said of something that no row knows and that was there."""
        backup = self.store_backup_at or self.backup_at
        taken = backup.isoformat(timespec="seconds")
        if to_ms(modified) <= to_ms(backup):
            return f"{path}: it was not committed when the backup was taken ({taken}), and this book does not know it"
        written = modified.isoformat(timespec="seconds")
        return f"{path}: it is newer than the backup ({written}, and the backup is of {taken}), and not known here"

    def gone(self, what: str) -> str:
        """What is to be said of something that does not exist."""
        return f"{what}: deleted since the backup of {self.backup_at.isoformat(timespec='seconds')}, or lost"


def restored(reader: Reader | Registry) -> Restored | None:
    """From when a book was restored; none if it never was."""
    row: Any = reader.one(READ_RESTORED)
    if row is None or row[0] is None:
        return None
    held, *of_store = (None if value is None else to_datetime(value) for value in row[2:])
    return Restored(to_datetime(row[0]), to_datetime(row[1]), held, *of_store)


def held_since(reader: Reader | Registry) -> datetime | None:
    """Since when nothing is removed from a book; none if it is not held."""
    found = restored(reader)
    return None if found is None else found.held_at


def refuse_while_held(registry: Registry) -> None:
    """Refuse to remove anything from a book that is held."""
    since = held_since(registry)
    if since is not None:
        raise BookHeld(
            f"it was restored at {since.isoformat(timespec='seconds')}, and nothing is removed until somebody says so",
            on=registry.database.shown,
            remedy="Run `lakebook verify`, and then `lakebook admin resume-after-restore`",
        )


def end_hold(transaction: Transaction) -> bool:
    """Let things be removed again; whether the book was held."""
    return transaction.run(END_HOLD) == 1
