"""A reader's lease: it pins a version of a table, and all newer ones, while the reader lives."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Any

from lakebook import failpoints
from lakebook.clock import to_ms
from lakebook.errors import BookClosed, InvalidInput, LakebookError, LeaseLost
from lakebook.lake.lake import Lake
from lakebook.names import check_moment, shown
from lakebook.registry.leases import end_leases, renew_leases, take_lease
from lakebook.registry.tables import TableRecord
from lakebook.registry.transactions import new_id

#: Where the staged tables of reads lie, each in the folder of its lease.
READS = "reads"


class Lease:
    """A claim on a version. Nothing it needs is deleted until it is closed or its process is gone."""

    def __init__(self, lake: Lake, table: TableRecord, version: int, schema_version: int, lease_id: str) -> None:
        self._lake = lake
        self.table = table
        self.id = lease_id
        self.version = version
        self.schema_version = schema_version
        self._lost = False
        self._closed = False
        self._staged = False
        # By this clock it cannot have run out before that and a lease time.
        self._renewed = lake.clock.monotonic()
        #: Set where no `with` block ends it: the time after which it is renewed no more.
        self._until: int | None = None

    @property
    def folder(self) -> str:
        """Where the staged tables of this lease lie."""
        return f"{READS}/{self.id}"

    def staged_folder(self) -> str:
        """A new folder for a staged table; it goes with the lease."""
        self._staged = True
        return f"{self.folder}/{new_id()}"

    def may_be_renewed(self, now: int) -> bool:
        """Whether it is still held and has not come to its maximum."""
        return not self._closed and not self._lost and (self._until is None or now < self._until)

    def note_renewed(self, asked: float) -> None:
        """Remember when the registry was last asked to renew it, and did."""
        self._renewed = max(self._renewed, asked)

    def note_lost(self) -> None:
        """Remember that the registry no longer has it."""
        self._lost = not self._closed

    def check(self) -> None:
        """Raise `LeaseLost` unless it is still held.

        The registry is asked only if the lease could have run out: if nobody has renewed it for its time.
        """
        self._raise_lost()
        if self._lake.clock.monotonic() - self._renewed >= self._lake.settings.lease_seconds:
            self.confirm()

    def _raise_lost(self) -> None:
        if self._lost or self._closed:
            raise LeaseLost(
                "the lease was closed" if self._closed else "the lease ran out before it was renewed",
                on=f"{self.table.shown}, version {self.version}",
                remedy="Begin the read again",
            )

    def confirm(self) -> None:
        """Ask the registry whether it is still held, and renew it."""
        self._raise_lost()
        asked = self._lake.clock.monotonic()
        seconds = self._lake.settings.lease_seconds
        if self._lake.registry.write(lambda transaction: renew_leases(transaction, [self.id], seconds)):
            self.note_renewed(asked)
        else:
            self.note_lost()
        self._raise_lost()

    @property
    def kept_until_closed(self) -> bool:
        """Whether no `with` block ends it."""
        return self._until is not None

    def keep_until_closed(self) -> None:
        """Let it end with the book, or at the maximum, where no `with` block ends it."""
        self._until = self._lake.clock.now_ms() + round(self._lake.settings.lease_maximum * 1000)

    def close(self) -> None:
        """Let go. What it staged is removed."""
        if self._closed:
            return
        self._closed = True
        self._lake.renewals.let_go(self.id)
        # If the registry does not answer the lease runs out by itself, and the cleaner removes the folder.
        with suppress(LakebookError):
            if self._staged:
                self._lake.store.delete_folder(self.folder)
            self._lake.registry.write(lambda transaction: end_leases(transaction, [self.id]))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_asked(version: Any, as_of: Any) -> int | None:
    """Refuse a version or a time that cannot be; the time in milliseconds."""
    if version is not None and as_of is not None:
        raise InvalidInput("a version and a time were given; only one can be", on="read")
    if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
        raise InvalidInput(f"{shown(version)} is not a version", on="read", remedy="Give a whole number")
    if as_of is None:
        return None
    check_moment(as_of, "as_of")
    return to_ms(as_of)


def acquire(lake: Lake, table: TableRecord, version: int | None = None, as_of: datetime | None = None) -> Lease:
    """Take a lease on a version: the newest, a given one, or that of a time."""
    moment = check_asked(version, as_of)
    lease_id = new_id()
    seconds = lake.settings.lease_seconds
    record, schema_version = lake.registry.write(
        lambda transaction: take_lease(transaction, table, lease_id, version, moment, seconds)
    )
    failpoints.reach("lease.taken")
    lease = Lease(lake, table, record.version, schema_version, lease_id)
    try:
        lake.renewals.hold_lease(lease)
    except BookClosed:
        lease.close()
        raise
    return lease
