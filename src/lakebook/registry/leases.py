"""Leases: readers at work, each of which pins its version and all newer ones.

A lease is taken under a shared lock on the table's horizon row and refused below
`min_readable`. The cleaner takes that row alone, raises `min_readable` and removes dead
leases in the same transaction. So either the cleaner sees the lease, or the lease is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from lakebook.clock import to_datetime, to_ms
from lakebook.errors import RegistryCorrupt, VersionExpired, VersionNotFound
from lakebook.registry import schema
from lakebook.registry.commits import owner
from lakebook.registry.gaps import is_lost_after
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind, insert_into
from lakebook.registry.tables import TableRecord, current_table
from lakebook.registry.transactions import Reader, Transaction

_h = schema.table_horizons.c
_l = schema.leases.c
_v = schema.table_versions.c

HORIZON = Statement(sa.select(_h.min_readable).where(_h.table_id == bind("of_table")), "of_table")
SHARE_HORIZON = Statement(
    sa.select(_h.min_readable).where(_h.table_id == bind("of_table")).with_for_update(read=True), "of_table"
)
CLAIM_HORIZON = Statement(
    sa.select(_h.min_readable).where(_h.table_id == bind("of_table")).with_for_update(), "of_table"
)
RAISE_HORIZON = Statement(
    sa.update(schema.table_horizons)
    .where(_h.table_id == bind("of_table"), _h.min_readable < bind("least"))
    .values(min_readable=bind("least"), updated_at=bind("now")),
    "of_table",
    "least",
    "now",
)
INSERT_LEASE = insert_into(schema.leases)


def _with_ids(make: Any) -> dict[str, Any]:
    return {database: make(among(_l.id, "lease_ids", database)) for database in (SQLITE, POSTGRESQL)}


_renew = _with_ids(
    lambda these: sa.update(schema.leases).where(these).values(expires_at=bind("until")).returning(_l.id)
)
RENEW_LEASES = Statement(_renew[SQLITE], "until", "lease_ids", postgresql=_renew[POSTGRESQL])
_end = _with_ids(lambda these: sa.delete(schema.leases).where(these))
END_LEASES = Statement(_end[SQLITE], "lease_ids", postgresql=_end[POSTGRESQL])
END_DEAD_LEASE = Statement(
    sa.delete(schema.leases).where(_l.id == bind("lease_id"), _l.expires_at == bind("seen")), "lease_id", "seen"
)
LEASES_OF = Statement(
    sa.select(_l.id, _l.table_id, _l.version, _l.holder, _l.created_at, _l.expires_at)
    .where(_l.table_id == bind("of_table"))
    .order_by(_l.version),
    "of_table",
)
LIST_LEASES = Statement(
    sa.select(_l.id, _l.table_id, _l.version, _l.holder, _l.created_at, _l.expires_at)
    .where(_l.id > bind("after"))
    .order_by(_l.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
VERSION_AT = Statement(
    sa.select(_v.version)
    .where(_v.table_id == bind("of_table"), _v.committed_at <= bind("moment"))
    .order_by(_v.committed_at.desc())
    .limit(ONE)
    .offset(ZERO),
    "of_table",
    "moment",
)
SCHEMA_AT = Statement(
    sa.select(_v.schema_version).where(_v.table_id == bind("of_table"), _v.version == bind("of_version")),
    "of_table",
    "of_version",
)


@dataclass(frozen=True)
class LeaseRecord:
    """A reader's claim on a version of a table."""

    id: str
    table_id: int
    version: int
    holder: str
    created_at: datetime
    expires_at: datetime


def expired_version(table: TableRecord, version: int, least: int) -> VersionExpired:
    """The error for a version that is no longer kept."""
    return VersionExpired(
        f"version {version} is no longer kept; the oldest that can be read is {least}",
        on=table.shown,
        remedy="Read a newer version, or keep more history from now on",
    )


def resolve_version(reader: Reader, table: TableRecord, version: int | None, moment: int | None) -> tuple[int, int]:
    """The version that is asked for, and the schema version it has."""
    # The time first: a commit between the two reads is then not newer than what is current.
    found = reader.one(VERSION_AT, table.id, moment) if moment is not None else None
    current = current_table(reader, table)
    row = reader.one(HORIZON, table.id)
    if row is None:
        raise _no_horizon(table)
    least = int(row[0])
    wanted = current.version if version is None else version
    if moment is not None:
        if found is None:
            if least > 0:
                raise VersionExpired(
                    "its state of that time is no longer kept",
                    on=table.shown,
                    remedy=f"The oldest version that can be read is {least}",
                )
            raise VersionNotFound("it did not exist at that time", on=table.shown)
        wanted = int(found[0])
        if wanted < current.version and is_lost_after(reader, table.id, wanted):
            raise VersionExpired(
                f"which version it had at that time is not known: those after {wanted} are lost since the registry"
                " was rebuilt",
                on=table.shown,
                remedy="Read it by a version, or by a later time",
            )
    if wanted > current.version or wanted < 0:
        raise VersionNotFound(f"there is no version {wanted}; the newest is {current.version}", on=table.shown)
    if wanted < least:
        raise expired_version(table, wanted, least)
    if wanted == current.version:
        return wanted, current.schema_version
    at = reader.one(SCHEMA_AT, table.id, wanted)
    if at is None:
        raise expired_version(table, wanted, least)
    return wanted, int(at[0])


def _no_horizon(table: TableRecord) -> RegistryCorrupt:
    return RegistryCorrupt("it has no horizon row", on=table.shown, remedy="Run `lakebook verify`")


def take_lease(
    transaction: Transaction, table: TableRecord, lease_id: str, version: int | None, moment: int | None, seconds: float
) -> tuple[LeaseRecord, int]:
    """Pin a version; the lease and the schema version to read it with."""
    # Under the lock before the version is looked up: from here on the cleaner waits.
    if transaction.one(SHARE_HORIZON, table.id) is None:
        current_table(transaction, table)
        raise _no_horizon(table)
    wanted, schema_version = resolve_version(transaction, table, version, moment)
    now = transaction.clock.now_ms()
    expires = now + round(seconds * 1000)
    transaction.run(INSERT_LEASE, lease_id, table.id, wanted, owner(), now, expires)
    return LeaseRecord(lease_id, table.id, wanted, owner(), to_datetime(now), to_datetime(expires)), schema_version


LOADED = Statement(sa.select(_l.expires_at).where(_l.id == bind("lease_id")), "lease_id")
EXTEND = Statement(
    sa.update(schema.leases).where(_l.id == bind("lease_id")).values(expires_at=bind("until")), "until", "lease_id"
)


def pinned_until(reader: Reader, table: TableRecord, version: int) -> int:
    """Until when a version that was loaded through a catalog is pinned; 0 if it is not."""
    found = reader.one(LOADED, f"loaded-{table.id}-{version}")
    return 0 if found is None else int(found[0])


def pin_loaded(transaction: Transaction, table: TableRecord, version: int, seconds: float) -> None:
    """Pin a version that was loaded through a catalog, for a time: nobody will renew or end this lease."""
    lease_id = f"loaded-{table.id}-{version}"
    now = transaction.clock.now_ms()
    until = now + round(seconds * 1000)
    if transaction.one(SHARE_HORIZON, table.id) is None:
        raise _no_horizon(table)
    # Not looked up first: a cleaner may end a dead lease at any moment.
    if transaction.run(EXTEND, until, lease_id) == 0:
        resolve_version(transaction, table, version, None)
        transaction.run(INSERT_LEASE, lease_id, table.id, version, owner(), now, until)


def renew_leases(transaction: Transaction, ids: Sequence[str], seconds: float) -> set[str]:
    """Renew leases; the ids of those that are still held."""
    until = transaction.clock.now_ms() + round(seconds * 1000)
    return {row[0] for row in transaction.all(RENEW_LEASES, until, transaction.listed(ids))}


def end_leases(transaction: Transaction, ids: Iterable[str]) -> None:
    """Let go of leases."""
    transaction.run(END_LEASES, transaction.listed(ids))


def claim_horizon(transaction: Transaction, table_id: int) -> int:
    """Take a table's horizon alone: no lease can be taken until this transaction ends."""
    row = transaction.one(CLAIM_HORIZON, table_id)
    if row is None:
        raise RegistryCorrupt("it has no horizon row", on=f"table {table_id}", remedy="Run `lakebook verify`")
    return int(row[0])


def raise_horizon(transaction: Transaction, table_id: int, least: int) -> None:
    """Let no lease be taken below a version any more."""
    transaction.run(RAISE_HORIZON, table_id, least, transaction.clock.now_ms())


def leases_of(reader: Reader, table_id: int) -> list[LeaseRecord]:
    """The leases on a table, the one on the oldest version first."""
    return [_lease_from(row) for row in reader.all(LEASES_OF, table_id)]


def list_leases(reader: Reader, after: str, most: int) -> list[LeaseRecord]:
    """Leases in the order of their ids."""
    return [_lease_from(row) for row in reader.all(LIST_LEASES, after, most)]


def _lease_from(row: tuple[Any, ...]) -> LeaseRecord:
    return LeaseRecord(*row[:-2], *map(to_datetime, row[-2:]))


def end_dead_leases(transaction: Transaction, dead: Sequence[LeaseRecord]) -> None:
    """Remove leases that are as they were seen; one that was renewed since is not dead."""
    for lease in dead:
        transaction.run(END_DEAD_LEASE, lease.id, to_ms(lease.expires_at))
