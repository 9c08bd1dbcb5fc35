"""What every commit changes costs PostgreSQL no index entry, and what is written much is vacuumed in time."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pyarrow as pa

from astha_subscribers import until
from books import POSTGRESQL, Place, describe
from lakebook.registry import schema

ROUNDS = 40
#: Changed in every round.
CHANGED = ("lake_objects", "partitions", "append_turns", "consumer_offsets", "tables", "table_stats", "cursors")


def updates(place: Place) -> dict[str, tuple[int, int]]:
    """How many rows of each table were changed, and how many of them without a new index entry."""
    with psycopg.connect(place.target) as connection:
        found = connection.execute("SELECT relname, n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables").fetchall()
    return {name: (changed, hot) for name, changed, hot in found}


def test_rows_that_every_commit_changes_need_no_new_index_entries(make_place: Callable[..., Place]) -> None:
    place = make_place(POSTGRESQL)
    with place.open() as book:
        book.metadata.create_topic("orders")
        table = book.tables.create("numbers", "number BIGINT")
        for number in range(ROUNDS):
            turn = book.metadata.claim_append("orders", 0)
            turn = book.metadata.append_segment(turn, describe("orders", 0, turn.next_offset)).turn
            book.metadata.commit_offset("g", "orders", 0, turn.next_offset)
            table.insert_arrow(pa.table({"number": [number]}))
            book.events.save_cursor("somebody", book.events.now())
    # Sessions say what they did when they end.
    until(lambda: all(updates(place)[name][0] >= ROUNDS - 1 for name in CHANGED))
    found = updates(place)
    # Where nobody has vacuumed yet, a page is full now and then.
    assert {name: found[name] for name in CHANGED if found[name][1] < 0.9 * found[name][0]} == {}


def test_every_large_or_busy_table_says_how_it_is_stored(make_place: Callable[..., Place]) -> None:
    place = make_place(POSTGRESQL)
    with psycopg.connect(place.target) as connection:
        found: dict[str, list[str]] = dict(
            connection.execute("SELECT relname, reloptions FROM pg_class WHERE reloptions IS NOT NULL").fetchall()
        )
        newer = connection.execute(
            "SELECT 'lz4' = ANY (enumvals) FROM pg_settings WHERE name = 'default_toast_compression'"
        ).fetchone()
        footers = connection.execute(
            "SELECT attcompression FROM pg_attribute"
            " WHERE attrelid = 'partition_metadata'::regclass AND attname = 'metadata'"
        ).fetchone()
    assert found.keys() >= schema.STORAGE.keys()
    assert newer is not None
    assert footers == ("l" if newer[0] else "",)
