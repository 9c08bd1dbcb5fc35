"""What a review of streams found: large groups, groups that read on in silence, heirs of leases, merges in mirrors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from books import POSTGRESQL, Place, describe
from held import PATIENCE, held_before_commit, started, wait_until_blocked
from lake import own_warehouse, records  # noqa: F401
from lakebook import Book
from lakebook.clock import ManualClock
from lakebook.errors import PartitionNotFound, RegistryCorrupt
from lakebook.registry import schema
from lakebook.registry.members import Place as Partition
from lakebook.registry.members import balanced
from lakebook.streams.merging import merge_topic
from lakebook.streams.mirroring import mirror_topic
from mirrored import in_table, in_topic
from mirrored import merge as merge_by_hand
from streaming import produce

KEPT = 1000.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# --- large groups: with the time that the tests have, what grows faster than the group does not end ----------


def test_the_second_member_of_a_group_with_very_many_partitions_has_half_of_them() -> None:
    owned: dict[Partition, str | None] = {(1, number): "a" for number in range(50_000)}
    found = balanced({"a": {1}, "b": {1}}, owned, owned)
    assert Counter(found.values()) == {"a": 25_000, "b": 25_000}


def test_very_many_members_that_read_different_topics_are_at_rest() -> None:
    reading = {f"{kind}{number:04}": {topic} for kind, topic in (("a", 1), ("b", 2)) for number in range(1000)}
    owned: dict[Partition, str | None] = {(1, number): f"a{number % 1000:04}" for number in range(20_000)}
    owned |= {(2, number): f"b{number:04}" for number in range(1000)}
    assert balanced(reading, owned, owned) == owned


def test_members_that_share_topics_with_very_many_others_take_from_those_that_have_most() -> None:
    reading = {f"{kind}{number:04}": {topic} for kind, topic in (("a", 1), ("b", 2)) for number in range(300)}
    owned: dict[Partition, str | None] = {(1, number): f"a{number % 300:04}" for number in range(6000)}
    owned |= {(2, number): f"b{number:04}" for number in range(300)}
    found = balanced({**reading, "c": {1, 2}}, owned, owned)
    shares = Counter(found.values())
    assert shares["c"] == 19
    assert all(shares[name] in (19, 20) for name in reading if name.startswith("a"))
    assert all(found[place] == name for place, name in owned.items() if place[0] == 2)
    assert sum(found[place] != name for place, name in owned.items()) == 19


def test_each_member_notices_what_becomes_of_the_topics_that_it_reads(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock)
    for name in ("x", "y"):
        book.metadata.create_topic(name, 1)
        book.metadata.join_group("g", [name], member_id=f"of-{name}")
    book.metadata.grow_topic("y", 3)
    assert book.metadata.sync_group("g", "of-x").partitions == (("x", 0),)
    assert book.metadata.sync_group("g", "of-y").partitions == (("y", 0), ("y", 1), ("y", 2))
    book.metadata.delete_topic("x")
    assert book.metadata.sync_group("g", "of-x").partitions == ()
    assert len(records(book, schema.group_assignments)) == 3
    clock.advance(book.settings.group_session - 1)
    book.metadata.sync_group("g", "of-x")
    clock.advance(2)
    # The other one is silent, and what it had is nobody's.
    assert book.metadata.sync_group("g", "of-x").partitions == ()
    assert [member.member_id for member in book.metadata.group_members("g")] == ["of-x"]
    assert book.verify().ok


# --- groups ------------------------------------------------------------------------


def test_a_group_that_commits_the_same_offset_again_and_again_is_not_forgotten(
    place: Place, clock: ManualClock
) -> None:
    book = place.open(clock=clock, group_kept=KEPT)
    book.metadata.create_topic("orders")
    for _ in range(10):
        book.metadata.commit_offset("g", "orders", 0, 0)
        clock.advance(KEPT * 0.3)
        assert book.metadata.expire_groups() == 0
    clock.advance(KEPT)
    assert book.metadata.expire_groups() == 1
    assert book.verify().ok


def test_who_commits_the_same_offset_often_writes_it_once(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock, group_kept=KEPT)
    book.metadata.create_topic("orders")
    for _ in range(10):
        book.metadata.commit_offset("g", "orders", 0, 0)
        clock.advance(KEPT / 1000)
    written = [row for row in records(book, schema.events) if row["table_name"] == "consumer_offsets"]
    assert len(written) == 1


# --- leases ------------------------------------------------------------------------


def test_what_an_heir_may_read_stays_though_the_lease_before_it_ends_meanwhile(shared_place: Place) -> None:
    book = shared_place.open()
    book.metadata.create_topic("orders")
    old = [produce(book, "orders", 0, number) for number in range(2)]
    former, _ = book.metadata.pin_topic("orders", {0: 0})
    merge_by_hand(book, old)
    heir = lambda: book.metadata.pin_topic("orders", {0: 0}, lease_id="heir", inherit=former)  # noqa: E731
    with held_before_commit(heir) as held:
        ending = started(lambda: book.metadata.unpin(former))
        wait_until_blocked(book)
        held.finish()
        ending.finish()
    assert book.metadata.release_retired() == 0
    assert len(records(book, schema.retired_segments)) == 2
    book.metadata.unpin("heir")
    assert book.metadata.release_retired() == 2
    assert book.verify().ok


def test_a_lease_is_renewed_and_moved_at_once_without_a_circle_of_locks(make_place: Callable[..., Place]) -> None:
    book = make_place(POSTGRESQL).open()
    book.metadata.create_topic("orders", 30)
    book.metadata.add_segments([describe(partition=number) for number in range(30)])
    # Taken from the last partition on, so that the rows lie in the other order.
    for number in reversed(range(30)):
        _, topic_id = book.metadata.pin_topic("orders", {number: 0}, lease_id="l")

    def moves() -> None:
        for offset in range(1, 101):
            book.metadata.advance_pin("l", {(topic_id, number): offset for number in range(30)})

    def renews() -> None:
        for _ in range(200):
            book.metadata.renew_pins(["l"])

    for other in [started(renews), started(moves), started(renews)]:
        other.thread.join(PATIENCE)
        other.finish()
    sql = "SELECT pg_stat_force_next_flush(), deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert book._registry.read_with(lambda reader: reader._connection.execute(sql).fetchone())[1] == 0
    assert book.metadata.pinned_places("l") == {(topic_id, number): 100 for number in range(30)}


def test_many_partitions_are_pinned_at_once_or_none(place: Place) -> None:
    book = place.open()
    book.metadata.create_topic("orders", 300)
    book.metadata.add_segments([describe(partition=number) for number in range(300)])
    lease, topic_id = book.metadata.pin_topic("orders", {number: number % 100 for number in range(300)})
    expected = {(topic_id, number): number % 100 for number in range(300)}
    assert book.metadata.pinned_places(lease) == expected
    assert book.metadata.advance_pin(lease, {(topic_id, number): 100 for number in range(150)}) == set()
    book.metadata.unpin(lease, [(topic_id, number) for number in range(100)])
    expected = {(topic_id, number): 100 if number < 150 else number % 100 for number in range(100, 300)}
    assert book.metadata.pinned_places(lease) == expected
    with pytest.raises(PartitionNotFound):
        book.metadata.pin_topic("orders", {0: 0, 299: 0, 300: 0}, lease_id="other")
    assert book.metadata.pinned_places("other") == {}
    assert book.verify().ok


def test_a_lake_object_without_a_row_is_noticed_among_several(book: Book) -> None:
    book.metadata.create_topic("orders", 3)
    ids = [row["object_id"] for row in records(book, schema.partitions)]
    book._registry.write(lambda transaction: transaction.lock(*ids))
    with pytest.raises(RegistryCorrupt, match="object 999"):
        book._registry.write(lambda transaction: transaction.lock(*ids, 999))


# --- merges ------------------------------------------------------------------------


def test_small_segments_of_a_topic_that_is_a_table_are_merged_too(place: Place, clock: ManualClock) -> None:
    book = place.open(clock=clock, merge_segments=4)
    book.metadata.create_topic("orders", config={"iceberg": "true"})
    for number in range(5):
        produce(book, "orders", 0, number)
    mirror_topic(book.lake, "orders")
    clock.advance(book.settings.merge_quiet + 1)
    done = merge_topic(book.lake, book.metadata, "orders")
    assert (done.replaced, done.into, done.conflicts) == ({"orders": 5}, {"orders": 1}, 0)
    assert in_table(book) == in_topic(book)
    assert book.verify().findings == ()
