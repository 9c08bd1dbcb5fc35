"""The book's own row: who it is, which life of it this is, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.registry import schema
from lakebook.registry.databases import Database
from lakebook.registry.migrate import revision_of
from lakebook.registry.registry import Registry
from lakebook.registry.statements import Statement, bind, insert_into
from lakebook.registry.transactions import Transaction, new_id

_b = schema.book.c
SELECT_BOOK = Statement(sa.select(_b.book_id, _b.epoch, _b.warehouse, _b.created_at, _b.epoch_since))
INSERT_BOOK = insert_into(schema.book)
SET_EPOCH = Statement(
    sa.update(schema.book)
    .where(_b.id == 1)
    .values(epoch=bind("new_epoch"), epoch_since=bind("now"), events_horizon=sa.null()),
    "new_epoch",
    "now",
)
ABORT_FORMER_COMMITS = Statement(
    sa.update(schema.commits).where(schema.commits.c.state == "open").values(state="aborted", finished_at=bind("now")),
    "now",
)
DELETE_EVENTS = Statement(sa.delete(schema.events))
DELETE_CURSORS = Statement(sa.delete(schema.cursors))
DELETE_DELIVERIES = Statement(sa.delete(schema.deliveries))
# Whoever has one is refused from here on, and nobody has to wait until it runs out.
END_VIEW_CLAIMS = Statement(sa.delete(schema.view_claims))
END_COMPACTION_CLAIMS = Statement(sa.delete(schema.compaction_claims))
END_TURNS = Statement(
    sa.update(schema.pipelines)
    .where(schema.pipelines.c.holder.is_not(None))
    .values(holder=sa.null(), held_until=sa.null())
)


@dataclass(frozen=True)
class BookIdentity:
    """Who a book is."""

    book_id: str
    epoch: str
    warehouse: str
    created_at: datetime
    epoch_since: datetime


def read_identity(registry: Registry) -> BookIdentity | None:
    """The book's row, or none in a registry that was only just created."""
    row = registry.one(SELECT_BOOK)
    if row is None:
        return None
    return BookIdentity(row[0], row[1], row[2], to_datetime(row[3]), to_datetime(row[4]))


def check_epoch(registry: Registry) -> None:
    """Raise `EpochChanged` if the book has begun a new life since it was opened; every write does so by itself."""
    found = read_identity(registry)
    if found is None or found.epoch != registry.epoch:
        raise registry.epoch_changed()


def recorded_warehouse(database: Database) -> str | None:
    """Where an existing book has its bytes, read before it is opened."""
    if revision_of(database) is None:
        return None
    try:
        connection = database.connect()
        try:
            row = database.run_alone(connection, SELECT_BOOK.on(database.kind).sql).fetchone()
        finally:
            connection.close()
    except database.errors as error:
        raise database.unreachable(error) from error
    return None if row is None else str(row[2])


def create_identity(registry: Registry, warehouse: str) -> BookIdentity:
    """Give a new book its row. The caller holds the migration lock."""
    now = registry.clock.now_ms()

    def work(transaction: Transaction) -> None:
        if transaction.one(SELECT_BOOK) is None:
            transaction.run(INSERT_BOOK, 1, new_id(), new_id(), warehouse, now, now, 0, *[None] * 6)

    registry.write(work)
    identity = read_identity(registry)
    assert identity is not None
    return identity


def begin_epoch(registry: Registry) -> str:
    """Begin a new life of the book, after a restore, a rebuild or a copy.

    Writers of the former life are refused from here on, their open commits can never
    take effect, and every subscriber starts anew with a refresh: the events of the
    former life, whose order means nothing in another database, are gone.
    """
    epoch = new_id()

    def work(transaction: Transaction) -> None:
        registry.lock_out_writers(transaction)
        now = registry.clock.now_ms()
        transaction.run(SET_EPOCH, epoch, now)
        transaction.run(ABORT_FORMER_COMMITS, now)
        transaction.run(DELETE_EVENTS)
        transaction.run(DELETE_CURSORS)
        transaction.run(DELETE_DELIVERIES)
        transaction.run(END_VIEW_CLAIMS)
        transaction.run(END_COMPACTION_CLAIMS)
        transaction.run(END_TURNS)

    registry.write(work)
    registry.epoch = epoch
    return epoch
