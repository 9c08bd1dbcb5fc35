"""Commits on different lake objects never wait for each other on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from books import POSTGRESQL, Place, describe
from held import held_before_commit
from lakebook import Book

Change = Callable[[Book], object]

# Each on a lake object of its own. Whatever waits for another's lock fails: the time-out is short.
CHANGES: dict[str, Change] = {
    "append to orders/0": lambda book: book.metadata.add_segment(describe("orders", 0)),
    "append to orders/1": lambda book: book.metadata.add_segment(describe("orders", 1)),
    "append to clicks/0": lambda book: book.metadata.add_segment(describe("clicks", 0)),
    "claim of orders/2": lambda book: book.metadata.claim_append("orders", 2),
    "retention of orders/3": lambda book: book.metadata.delete_segments_before("orders", 3, 100),
    "commit of group a on orders/0": lambda book: book.metadata.commit_offset("a", "orders", 0, 0),
    "commit of group b on orders/0": lambda book: book.metadata.commit_offset("b", "orders", 0, 0),
    "first commit of a new group": lambda book: book.metadata.commit_offset("new", "orders", 1, 0),
    "configuration of orders": lambda book: book.metadata.update_topic_config("orders", {"segment.ms": "5"}),
    "creation of a topic": lambda book: book.metadata.create_topic("new"),
    "deletion of an old topic": lambda book: book.metadata.delete_topic("old"),
    "deletion of a group": lambda book: book.metadata.delete_consumer_group("leaving"),
    "a subscriber's cursor": lambda book: book.events.save_cursor("updater", book.events.beginning()),
    "a producer's epoch": lambda book: book.metadata.register_producer("p"),
}


@pytest.fixture
def book(make_place: Callable[[str], Place]) -> Book:
    book = make_place(POSTGRESQL).open(lock_timeout=0.5, retry_attempts=1)
    book.metadata.create_topic("orders", 4)
    book.metadata.create_topic("clicks")
    book.metadata.create_topic("old")
    book.metadata.add_segment(describe("orders", 3))
    book.metadata.ensure_consumer_group("a")
    book.metadata.ensure_consumer_group("b")
    book.metadata.ensure_consumer_group("leaving")
    return book


@pytest.mark.parametrize("held", CHANGES)
def test_while_one_commit_is_held_open_all_others_go_through(book: Book, held: str) -> None:
    # Appends open their commit row in a transaction of its own first.
    with held_before_commit(lambda: CHANGES[held](book), skip=1 if held.startswith("append") else 0) as holding:
        for name, change in CHANGES.items():
            if name != held:
                change(book)
        holding.finish()
    checked = book.verify()
    assert checked.ok, checked.findings
