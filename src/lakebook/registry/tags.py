"""What the snapshotter asks of the registry: requests for tags, what was added, and where history stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.leases import HORIZON
from lakebook.registry.maintenance import TAG, ask, is_asked, request_key
from lakebook.registry.retirement import TO_RETIRE, oldest_needed_version
from lakebook.registry.statements import ZERO, Statement, bind
from lakebook.registry.table_files import CHUNK
from lakebook.registry.tables import TableRecord
from lakebook.registry.transactions import Reader, Transaction

#: Who meets requests for tags.
SNAPSHOTTER = "snapshotter"

_t = schema.tables.c
_v = schema.table_versions.c
_i = schema.iceberg_tables.c
_n = schema.table_snapshots.c

# A replace brings the same rows in other files: nothing new is to be kept.
ADDED_SIZE = Statement(
    sa.select(sa.func.coalesce(sa.func.sum(_v.added_size), ZERO)).where(
        _v.table_id == bind("of_table"),
        _v.version > bind("after"),
        _v.version <= bind("through"),
        _v.operation != sa.literal_column("'replace'"),
    ),
    "of_table",
    "after",
    "through",
)
OLDEST_VERSIONS = Statement(
    sa.select(_v.version, _v.committed_at)
    .where(_v.table_id == bind("of_table"))
    .order_by(_v.version)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_table",
    "most",
)
METADATA_LOCATIONS = Statement(
    sa.select(_i.table_id, _i.metadata_location)
    .select_from(schema.iceberg_tables.join(schema.tables, _t.id == _i.table_id))
    .where(_i.table_id > bind("after"), _t.deleted_at.is_(None))
    .order_by(_i.table_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "after",
    "most",
)
OLD_SNAPSHOTS = Statement(
    sa.select(_n.snapshot_id).where(_n.table_id == bind("of_table"), _n.pinned_version < bind("needed")),
    "of_table",
    "needed",
)
TABLE_OF_OBJECT = Statement(sa.select(_t.id).where(_t.object_id == bind("of_object")), "of_object")


_h = schema.table_horizons.c
_readable = _t.version - sa.func.coalesce(_h.min_readable, sa.literal_column("0"))
TABLES_WITH_MOST_HISTORY = Statement(
    sa.select(_t.id)
    .select_from(schema.tables.outerjoin(schema.table_horizons, _h.table_id == _t.id))
    .where(_t.deleted_at.is_(None), _readable > sa.literal_column("0"))
    .order_by(_readable.desc(), _t.id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "most",
)


@dataclass(frozen=True)
class History:
    """Where the history of a table stands, and what its policy would keep of it now."""

    #: The oldest version that is there, and the oldest that the policy or a lease keeps.
    oldest: int
    needed: int
    #: When the oldest version was followed by the next; none while it is one of those that are kept by number.
    followed_at: int | None
    #: The oldest version that may be read.
    horizon: int
    #: Snapshots that the metadata lists, of versions that are not needed.
    old_snapshots: frozenset[int]


def _request(table: TableRecord, snapshot_id: int) -> tuple[str, str, int, dict[str, int]]:
    return TAG, SNAPSHOTTER, table.object_id, {"snapshot_id": snapshot_id}


def is_tag_asked(reader: Reader, table: TableRecord, snapshot_id: int) -> bool:
    """Whether a tag on a snapshot is asked for already."""
    return is_asked(reader, request_key(*_request(table, snapshot_id)))


def ask_for_tag(transaction: Transaction, table: TableRecord, snapshot_id: int) -> None:
    """Ask the snapshotter to keep a snapshot, because somebody reads it."""
    ask(transaction, *_request(table, snapshot_id))


def table_of_object(reader: Reader, object_id: int) -> int | None:
    """The table that is a lake object."""
    row = reader.one(TABLE_OF_OBJECT, object_id)
    return None if row is None else int(row[0])


def added_size(reader: Reader, table_id: int, after: int, through: int) -> int:
    """The bytes that versions have added, as far as they are kept; the same rows in other files do not count."""
    row = reader.one(ADDED_SIZE, table_id, after, through)
    assert row is not None
    return int(row[0])


def metadata_locations(reader: Reader) -> Iterator[tuple[int, str]]:
    """Where the metadata of each live table is: it moves with every tag, whoever makes it, and no event tells."""
    after = 0
    while page := reader.all(METADATA_LOCATIONS, after, CHUNK):
        yield from ((int(row[0]), row[1]) for row in page)
        after = page[-1][0]


def tables_with_most_history(reader: Reader, most: int) -> list[int]:
    """The live tables with the most versions that can be read, those with the most first."""
    return [int(row[0]) for row in reader.all(TABLES_WITH_MOST_HISTORY, most)]


def history_of(reader: Reader, table: TableRecord, since: int, versions: int) -> History:
    """Where the history of a table stands; the caller reads on one consistent state.

    What is needed is asked of `oldest_needed_version` alone: of the policy, and of leases. A consumer that
    has yet to read a version pins it by a lease as well, or has to be asked there.
    """
    rows = reader.all(OLDEST_VERSIONS, table.id, 2)
    oldest = int(rows[0][0]) if rows else table.version
    beyond = table.version - oldest >= versions and len(rows) > 1
    needed = oldest_needed_version(reader, table.id, table.version, since, versions)
    horizon = reader.one(HORIZON, table.id)
    return History(
        oldest,
        needed,
        int(rows[1][1]) if beyond else None,
        0 if horizon is None else int(horizon[0]),
        frozenset(int(row[0]) for row in reader.all(OLD_SNAPSHOTS, table.id, needed)),
    )


def has_retirable(reader: Reader, table_id: int, horizon: int) -> bool:
    """Whether files have ended that no readable version and no snapshot has any more."""
    return bool(reader.all(TO_RETIRE, table_id, horizon, 1))
