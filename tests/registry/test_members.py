"""Members of a group share its partitions: each has one reader, and who was removed commits nothing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import lakebook
from books import POSTGRESQL, Place, describe
from held import PATIENCE, Held, held_before_commit, started, wait_until_blocked
from lake import records, run_sql
from lakebook import Book
from lakebook.clock import ManualClock
from lakebook.errors import (
    GenerationFenced,
    GroupNotFound,
    InvalidInput,
    InvalidName,
    LakebookError,
    MemberRemoved,
    OffsetRegression,
    TopicNotFound,
)
from lakebook.registry import schema
from lakebook.registry.groups import GROUP_ROW, locked_group
from lakebook.registry.members import Membership, balanced
from lakebook.registry.topics import hide_topic

SESSION = 10.0
KEPT = 1000.0
Owned = tuple[tuple[str, int], ...]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def book(place: Place, clock: ManualClock) -> Book:
    book = place.open(clock=clock, group_session=SESSION, group_kept=KEPT)
    book.metadata.create_topic("orders", 4)
    return book


def of(topic: str, *numbers: int) -> Owned:
    return tuple((topic, number) for number in numbers)


def join(book: Book, member: str, *topics: str) -> Membership:
    return book.metadata.join_group("g", topics or ("orders",), member_id=member)


def sync(book: Book, member: str, released: Iterable[tuple[str, int]] = ()) -> Membership:
    return book.metadata.sync_group("g", member, released=released)


def hand_over(book: Book, *members: str) -> dict[str, Membership]:
    """Let all members release what others want, until everybody has what it is to have."""
    for _ in range(10):
        found = {member: sync(book, member) for member in members}
        if not any(membership.releasing for membership in found.values()):
            return {member: sync(book, member) for member in members}
        for member, membership in found.items():
            sync(book, member, membership.releasing)
    raise AssertionError("the members do not come to rest")


def owners(book: Book) -> dict[tuple[str, int], str]:
    return {place: member.member_id for member in book.metadata.group_members("g") for place in member.partitions}


def generation(book: Book) -> int:
    (group,) = records(book, schema.consumer_groups, group_id="g")
    return int(group["generation"])


def keep_alive(book: Book, clock: ManualClock, *members: str, seconds: float) -> None:
    """Let time pass in which these members are heard of, and the others are not."""
    for _ in range(round(seconds)):
        clock.advance(1)
        for member in members:
            sync(book, member)


# --- joining and leaving -------------------------------------------------------


def test_the_first_member_reads_everything(book: Book) -> None:
    found = join(book, "a")
    assert found == Membership("g", "a", 1, of("orders", 0, 1, 2, 3), ())
    assert sync(book, "a") == found
    assert book.verify().ok


def test_a_member_gets_a_name_if_it_has_none(book: Book) -> None:
    one, two = (book.metadata.join_group("g", ["orders"]) for _ in range(2))
    assert one.member_id and two.member_id and one.member_id != two.member_id


def test_a_partition_passes_on_only_when_its_owner_has_let_go_of_it(book: Book) -> None:
    join(book, "a")
    assert join(book, "b").partitions == ()
    seen = sync(book, "a")
    assert (seen.partitions, seen.releasing) == (of("orders", 0, 1), of("orders", 2, 3))
    # Nobody else gets them as long as the owner has not said so, however often all of them ask.
    assert sync(book, "b").partitions == () == sync(book, "b").releasing
    assert sync(book, "a") == seen
    one = sync(book, "a", of("orders", 3))
    assert (one.partitions, one.releasing) == (of("orders", 0, 1), of("orders", 2))
    assert one.generation > seen.generation
    assert sync(book, "b").partitions == of("orders", 3)
    sync(book, "a", of("orders", 2))
    assert sync(book, "b") == Membership("g", "b", generation(book), of("orders", 2, 3), ())
    assert book.verify().ok


def test_only_what_is_wanted_by_another_can_be_released(book: Book) -> None:
    join(book, "a")
    join(book, "b")
    before = sync(book, "a")
    # Its own, another one's, one that is not there, one of no topic: nothing of that changes hands.
    after = sync(book, "a", [*of("orders", 0, 7), ("nowhere", 0)])
    assert after == before
    sync(book, "b", of("orders", 3))
    assert set(owners(book).values()) == {"a"}


def test_what_a_member_had_that_left_passes_on_at_once(book: Book) -> None:
    for member in ("a", "b"):
        join(book, member)
    hand_over(book, "a", "b")
    before = generation(book)
    book.metadata.leave_group("g", "b")
    assert sync(book, "a").partitions == of("orders", 0, 1, 2, 3)
    assert generation(book) > before
    with pytest.raises(MemberRemoved):
        sync(book, "b")
    # To leave twice, or a group that is not there, is nothing.
    book.metadata.leave_group("g", "b")
    book.metadata.leave_group("nobody", "b")
    assert [group.group_id for group in book.metadata.list_consumer_groups()] == ["g"]


def test_one_who_wanted_a_partition_and_left_gets_nothing(book: Book) -> None:
    join(book, "a")
    join(book, "b")
    releasing = sync(book, "a").releasing
    book.metadata.leave_group("g", "b")
    # The owner has stopped reading, and says so to nobody: it reads on.
    assert sync(book, "a", releasing) == Membership("g", "a", generation(book), of("orders", 0, 1, 2, 3), ())


def test_two_members_swap_with_others_coming_and_going(book: Book) -> None:
    for member in ("a", "b", "c"):
        join(book, member)
    hand_over(book, "a", "b", "c")
    assert sorted(Counter(owners(book).values()).values()) == [1, 1, 2]
    join(book, "d")
    # While that one waits, the richest goes: nobody else has to move.
    rich = Counter(owners(book).values()).most_common(1)[0][0]
    kept = {place: member for place, member in owners(book).items() if member != rich}
    book.metadata.leave_group("g", rich)
    found = hand_over(book, *({"a", "b", "c", "d"} - {rich}))
    assert all(owners(book)[place] == member for place, member in kept.items())
    assert sorted(len(membership.partitions) for membership in found.values()) == [1, 1, 2]
    assert book.verify().ok


def test_more_members_than_partitions_leave_some_with_nothing(book: Book) -> None:
    names = [f"m{number}" for number in range(6)]
    for name in names:
        join(book, name)
    found = hand_over(book, *names)
    assert sorted(len(membership.partitions) for membership in found.values()) == [0, 0, 1, 1, 1, 1]


def test_a_member_that_joins_again_keeps_what_it_still_reads(book: Book) -> None:
    book.metadata.create_topic("other", 2)
    join(book, "a", "orders", "other")
    join(book, "b", "orders")
    hand_over(book, "a", "b")
    mine = sync(book, "a").partitions
    before = generation(book)
    again = join(book, "a", "orders")
    assert again.generation > before
    assert again.partitions == tuple(place for place in mine if place[0] == "orders")
    # Nobody reads the other one any more; it is not left to anybody.
    assert {topic for topic, _ in owners(book)} == {"orders"}
    join(book, "b", "other")
    assert hand_over(book, "a", "b")["a"].partitions == of("orders", 0, 1, 2, 3)
    assert sync(book, "b").partitions == of("other", 0, 1)
    assert book.verify().ok


def test_who_cannot_be_a_member_is_refused(book: Book) -> None:
    with pytest.raises(TopicNotFound):
        join(book, "a", "orders", "nowhere")
    with pytest.raises(InvalidInput):
        book.metadata.join_group("g", [])
    with pytest.raises(InvalidInput):
        book.metadata.join_group("g", "orders")
    with pytest.raises(InvalidName):
        join(book, "")
    for seconds in (0, -1.0, float("inf")):
        with pytest.raises(InvalidInput):
            book.metadata.join_group("g", ["orders"], seconds=seconds)
    with pytest.raises(MemberRemoved):
        sync(book, "a")
    with pytest.raises(GroupNotFound):
        book.metadata.group_members("g")
    assert list(book.metadata.list_consumer_groups()) == []


def test_members_are_listed_with_what_they_own(book: Book, clock: ManualClock) -> None:
    join(book, "b")
    clock.advance(3)
    join(book, "a")
    first, second = book.metadata.group_members("g")
    assert (first.group_id, first.member_id, first.partitions) == ("g", "a", ())
    assert (second.member_id, second.partitions) == ("b", of("orders", 0, 1, 2, 3))
    assert (first.joined_at - second.joined_at).total_seconds() == 3
    assert (first.expires_at - first.joined_at).total_seconds() == SESSION
    assert first.holder


# --- silence -------------------------------------------------------------------


def test_a_silent_member_is_removed_and_what_it_had_passes_on(book: Book, clock: ManualClock) -> None:
    for member in ("a", "b"):
        join(book, member)
    hand_over(book, "a", "b")
    keep_alive(book, clock, "a", seconds=SESSION - 1)
    assert len(sync(book, "a").partitions) == 2
    keep_alive(book, clock, "a", seconds=1)
    assert sync(book, "a").partitions == of("orders", 0, 1, 2, 3)
    with pytest.raises(MemberRemoved):
        sync(book, "b")
    assert join(book, "c").partitions == ()
    assert book.verify().ok


def test_one_that_wanted_a_partition_and_fell_silent_does_not_hold_it_up(book: Book, clock: ManualClock) -> None:
    join(book, "a")
    join(book, "b")
    assert sync(book, "a").releasing
    keep_alive(book, clock, "a", seconds=SESSION)
    assert sync(book, "a") == Membership("g", "a", generation(book), of("orders", 0, 1, 2, 3), ())


def test_a_newcomer_takes_over_from_members_that_all_died(book: Book, clock: ManualClock) -> None:
    for member in ("a", "b"):
        join(book, member)
    clock.advance(SESSION)
    assert join(book, "c").partitions == of("orders", 0, 1, 2, 3)
    assert [member.member_id for member in book.metadata.group_members("g")] == ["c"]


def test_after_an_outage_that_all_members_felt_none_is_removed(book: Book, clock: ManualClock) -> None:
    for member in ("a", "b", "c"):
        join(book, member)
    before = hand_over(book, "a", "b", "c")
    # The registry was away: nobody was heard of, and nobody could have been.
    clock.advance(3 * SESSION)
    assert sync(book, "a") == before["a"]
    assert sync(book, "b") == before["b"]
    # Who does not come back then is removed.
    keep_alive(book, clock, "a", "b", seconds=SESSION / 3)
    with pytest.raises(MemberRemoved):
        sync(book, "c")
    assert len(owners(book)) == 4


def test_a_member_that_is_always_late_still_notices_who_is_gone(book: Book, clock: ManualClock) -> None:
    for member in ("a", "b"):
        join(book, member)
    hand_over(book, "a", "b")
    for _ in range(3):
        clock.advance(SESSION * 2)
        found = sync(book, "a")
    assert found.partitions == of("orders", 0, 1, 2, 3)


def test_a_member_may_ask_for_a_longer_time(book: Book, clock: ManualClock) -> None:
    book.metadata.join_group("g", ["orders"], member_id="slow", seconds=10 * SESSION)
    join(book, "a")
    keep_alive(book, clock, "a", seconds=3 * SESSION)
    assert len(book.metadata.group_members("g")) == 2


def test_a_sync_without_news_changes_nothing_but_the_time(book: Book, clock: ManualClock) -> None:
    join(book, "a")
    join(book, "b")
    before = hand_over(book, "a", "b")
    cursor = book.events.now()
    clock.advance(1)
    assert sync(book, "a") == before["a"]
    assert book.events.read(cursor).events == ()
    expiry = {member.member_id: member.expires_at for member in book.metadata.group_members("g")}
    assert (expiry["a"] - expiry["b"]).total_seconds() == 1


# --- topics --------------------------------------------------------------------


def test_partitions_of_a_grown_topic_are_shared_out(book: Book) -> None:
    for member in ("a", "b"):
        join(book, member)
    before = hand_over(book, "a", "b")
    book.metadata.grow_topic("orders", 7)
    after = hand_over(book, "a", "b")
    assert sorted(len(membership.partitions) for membership in after.values()) == [3, 4]
    for member in ("a", "b"):
        assert set(before[member].partitions) < set(after[member].partitions), "what was shared out has moved"


def test_a_deleted_topic_is_read_no_more_and_what_is_left_is_shared_anew(book: Book) -> None:
    book.metadata.create_topic("other", 4)
    for member in ("a", "b"):
        join(book, member, "orders", "other")
    hand_over(book, "a", "b")
    assert {place[0] for place in sync(book, "a").partitions} == {"orders"}, "the test wants one topic for each"
    book.metadata.delete_topic("orders")
    assert records(book, schema.group_assignments, member_id="a") == []
    found = hand_over(book, "a", "b")
    assert {member: len(membership.partitions) for member, membership in found.items()} == {"a": 2, "b": 2}
    assert book.verify().ok


def test_a_topic_that_is_hidden_and_not_emptied_is_read_no_more(book: Book) -> None:
    book.metadata.create_topic("other", 1)
    join(book, "a", "orders", "other")
    book._registry.write(lambda transaction: hide_topic(transaction, "orders"))
    assert sync(book, "a").partitions == of("other", 0)
    assert book.verify().ok
    assert book.metadata.purge_deleted_topics() == 1
    assert sync(book, "a").partitions == of("other", 0)


def test_a_topic_of_the_same_name_is_another_one_to_who_joined_before(book: Book) -> None:
    found = join(book, "a")
    book.metadata.delete_topic("orders")
    book.metadata.create_topic("orders", 4)
    with pytest.raises(GenerationFenced):
        book.metadata.commit_offset("g", "orders", 0, 0, generation=found.generation, member="a")
    assert sync(book, "a").partitions == ()
    assert join(book, "a").partitions == of("orders", 0, 1, 2, 3)
    assert book.verify().ok


# --- commits -------------------------------------------------------------------


def fill(book: Book) -> None:
    book.metadata.add_segments([describe(partition=number) for number in range(4)])


def commit(book: Book, membership: Membership, number: int, offset: int) -> None:
    book.metadata.commit_offset(
        "g", "orders", number, offset, generation=membership.generation, member=membership.member_id
    )


def test_a_member_commits_on_what_it_owns_and_on_nothing_else(book: Book) -> None:
    fill(book)
    join(book, "a")
    join(book, "b")
    a = sync(book, "a")
    commit(book, a, 0, 10)
    commit(book, a, 3, 10)  # It has yet to release this one, and commits before it does.
    b = sync(book, "b")
    with pytest.raises(GenerationFenced, match="does not own"):
        commit(book, b, 3, 20)
    a = sync(book, "a", a.releasing)
    with pytest.raises(GenerationFenced, match="does not own"):
        commit(book, a, 3, 20)
    with pytest.raises(GenerationFenced):
        commit(book, b, 3, 20)
    commit(book, sync(book, "b"), 3, 20)
    commit(book, a, 0, 20)
    assert book.metadata.get_committed_offsets("g", of("orders", 0, 3)) == {("orders", 0): 20, ("orders", 3): 20}


def test_a_member_that_was_frozen_cannot_commit_over_its_successor(book: Book, clock: ManualClock) -> None:
    fill(book)
    frozen = join(book, "a")
    join(book, "b")
    keep_alive(book, clock, "b", seconds=SESSION)
    successor = sync(book, "b")
    commit(book, successor, 0, 10)
    for number in range(4):
        with pytest.raises(GenerationFenced):
            commit(book, frozen, number, 50)
        with pytest.raises(GenerationFenced):
            book.metadata.commit_offset("g", "orders", number, 50, generation=frozen.generation)
        # To know the generation is not enough.
        with pytest.raises(GenerationFenced):
            book.metadata.commit_offset("g", "orders", number, 50, generation=successor.generation, member="a")
    assert book.metadata.get_committed_offset("g", "orders", 0) == 10


def test_a_commit_of_nobody_is_refused_while_there_are_members(book: Book) -> None:
    fill(book)
    membership = join(book, "a")
    with pytest.raises(GenerationFenced):
        book.metadata.commit_offset("g", "orders", 0, 10)
    with pytest.raises(GenerationFenced):
        book.metadata.commit_offset("g", "orders", 0, 10, member="a")
    commit(book, membership, 0, 20)
    book.metadata.leave_group("g", "a")
    book.metadata.commit_offset("g", "orders", 0, 30)
    with pytest.raises(OffsetRegression):
        book.metadata.commit_offset("g", "orders", 0, 10)
    # Who left is none of nobody: its commits carry a generation, and that is over.
    with pytest.raises(GenerationFenced):
        commit(book, membership, 0, 40)
    with pytest.raises(GenerationFenced):
        book.metadata.commit_offset("g", "orders", 0, 40, generation=membership.generation)
    join(book, "b")
    with pytest.raises(GenerationFenced):
        book.metadata.commit_offset("g", "orders", 0, 40)
    assert book.metadata.get_committed_offset("g", "orders", 0) == 30


# --- the end of groups ---------------------------------------------------------


def test_a_deleted_group_has_no_members(book: Book) -> None:
    membership = join(book, "a")
    book.metadata.delete_consumer_group("g")
    assert records(book, schema.group_members) == records(book, schema.group_assignments) == []
    with pytest.raises(MemberRemoved):
        sync(book, "a")
    with pytest.raises(MemberRemoved):
        sync(book, "a", membership.partitions)
    book.metadata.leave_group("g", "a")
    with pytest.raises(GroupNotFound):
        book.metadata.group_members("g")
    assert join(book, "a").generation == 1
    assert book.verify().ok


def test_groups_are_forgotten_when_nobody_has_needed_them_for_long(book: Book, clock: ManualClock) -> None:
    fill(book)
    book.metadata.ensure_consumer_group("empty")
    book.metadata.commit_offset("committed", "orders", 0, 10)
    book.metadata.join_group("left", ["orders"], member_id="a")
    book.metadata.leave_group("left", "a")
    book.metadata.join_group("died", ["orders"], member_id="a")
    book.metadata.join_group("alive", ["orders"], member_id="a")
    clock.advance(KEPT / 2)
    book.metadata.sync_group("alive", "a")
    book.metadata.commit_offset("committed", "orders", 0, 20)
    assert book.metadata.expire_groups() == 0
    clock.advance(KEPT / 2 + 1)
    assert book.metadata.expire_groups() == 2
    assert [group.group_id for group in book.metadata.list_consumer_groups()] == ["alive", "committed", "died"]
    # A member that died counts from when it was to be heard of.
    clock.advance(SESSION)
    assert book.metadata.expire_groups() == 1
    cursor = book.events.now()
    clock.advance(KEPT / 2)
    assert book.metadata.expire_groups() == 2
    # Nobody takes them for what is still there: each deletion is told.
    assert Counter((event.table, str(event.operation)) for event in book.events.read(cursor).events) == {
        ("consumer_groups", "delete"): 2,
        ("consumer_offsets", "delete"): 1,
    }
    assert records(book, schema.group_members) == []
    assert book.metadata.expire_groups() == 0
    assert book.verify().ok


def test_forgetting_groups_can_be_stopped_and_goes_on(book: Book, clock: ManualClock) -> None:
    for number in range(45):
        book.metadata.ensure_consumer_group(f"g{number}")
    clock.advance(KEPT + 1)
    assert book.metadata.expire_groups(enough=lambda: True) == 20
    assert book.metadata.expire_groups() == 25


# --- verify --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ("UPDATE group_assignments SET member_id = 'ghost' WHERE partition_id = 1", "owned by ghost"),
        ("UPDATE group_assignments SET wanted_by = 'ghost' WHERE partition_id = 1", "wanted by ghost"),
        ("UPDATE group_assignments SET partition_id = 9 WHERE partition_id = 1", "no such partition"),
    ],
)
def test_verify_finds_an_assignment_that_cannot_be(book: Book, damage: str, what: str) -> None:
    join(book, "a")
    assert book.verify().ok
    run_sql(book, damage)
    (finding,) = book.verify().findings
    assert finding.check == "members" and "group g on orders/" in finding.on
    assert what in finding.what


def test_verify_finds_members_whose_commits_nothing_fences(book: Book) -> None:
    join(book, "a")
    run_sql(book, "UPDATE consumer_groups SET generation = 0")
    assert ("members", "group g") in {(finding.check, finding.on) for finding in book.verify().findings}


# --- sharing out ---------------------------------------------------------------

MEMBERS = st.sets(st.sampled_from("abcdef"), min_size=1)
SIZES = st.dictionaries(st.integers(1, 4), st.integers(1, 7), min_size=1)


def places_of(sizes: dict[int, int]) -> list[tuple[int, int]]:
    return [(topic, number) for topic, size in sorted(sizes.items()) for number in range(size)]


@settings(max_examples=100, deadline=None)
@given(members=MEMBERS, sizes=SIZES, data=st.data())
def test_members_that_read_the_same_have_equal_shares_with_the_fewest_moves(
    members: set[str], sizes: dict[int, int], data: st.DataObject
) -> None:
    places = places_of(sizes)
    owned = {place: data.draw(st.none() | st.sampled_from(sorted(members))) for place in places}
    found = balanced({member: set(sizes) for member in members}, owned, {})
    assert found.keys() == set(places)
    shares = Counter(dict.fromkeys(members, 0) | Counter(found.values()))
    assert max(shares.values()) - min(shares.values()) <= 1
    # As many as can keep what they have: the richest keep one more, and there are so many of them.
    least, richer = divmod(len(places), len(members))
    had = sorted(Counter(dict.fromkeys(members, 0) | Counter(filter(None, owned.values()))).values())[::-1]
    most_kept = sum(min(count, least + (rank < richer)) for rank, count in enumerate(had))
    assert sum(found[place] == member for place, member in owned.items()) == most_kept
    assert found == balanced({member: set(sizes) for member in sorted(members)[::-1]}, owned, {})
    assert found == balanced({member: set(sizes) for member in members}, found, {}), "it does not come to rest"


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, data=st.data())
def test_members_that_read_different_topics_are_as_equal_as_can_be(sizes: dict[int, int], data: st.DataObject) -> None:
    reading = data.draw(
        st.dictionaries(st.sampled_from("abcd"), st.sets(st.sampled_from(sorted(sizes)), min_size=1), min_size=1)
    )
    places = [place for place in places_of(sizes) if any(place[0] in topics for topics in reading.values())]
    able = {place: sorted(member for member, topics in reading.items() if place[0] in topics) for place in places}
    owned = {place: data.draw(st.none() | st.sampled_from(able[place])) for place in places}
    found = balanced(reading, owned, {})
    assert found.keys() == set(places)
    assert all(found[place] in able[place] for place in places)
    shares = Counter(found.values())
    # The smallest load that anybody has to bear, found by trying.
    least = 0
    while not fits(able, least):
        least += 1
    assert max(shares.values(), default=0) == least
    assert found == balanced(reading, found, {})


def fits(able: dict[tuple[int, int], list[str]], most: int) -> bool:
    """Whether every partition finds a reader if nobody has more than so many (a matching by paths)."""
    has: dict[str, list[tuple[int, int]]] = {}

    def settle(place: tuple[int, int], tried: set[str]) -> bool:
        for member in able[place]:
            if member in tried:
                continue
            tried.add(member)
            mine = has.setdefault(member, [])
            if len(mine) < most:
                mine.append(place)
                return True
            for other in mine:
                if settle(other, tried):
                    mine.remove(other)
                    mine.append(place)
                    return True
        return False

    return all(settle(place, set()) for place in able)


def test_load_passes_through_one_who_reads_both_topics() -> None:
    reading = {"a": {1}, "b": {1, 2}, "c": {2}}
    owned: dict[tuple[int, int], str | None] = {(1, 0): "a", (1, 1): "a", (1, 2): "a", (2, 0): "b", (2, 1): "b"}
    found = balanced(reading, owned, {})
    assert Counter(found.values()) == {"a": 2, "b": 2, "c": 1}
    assert sum(found[place] != member for place, member in owned.items()) == 2


def test_what_was_to_go_to_somebody_still_goes_there() -> None:
    owned: dict[tuple[int, int], str | None] = dict.fromkeys(places_of({1: 4}), "a")
    wanted: dict[tuple[int, int], str | None] = {**owned, (1, 0): "b", (1, 1): "b"}
    assert balanced({"a": {1}, "b": {1}}, owned, wanted) == wanted


# --- any order of things -------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c", "d"])


class Group(RuleBasedStateMachine):
    """Members that do what they like, and what each of them believes to own."""

    open_book: Callable[[ManualClock], Book]

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.book = type(self).open_book(self.clock)
        self.known: dict[str, Membership] = {}
        self.last: dict[tuple[str, int], str] = {}
        self.generation = 0

    @initialize()
    def topics(self) -> None:
        for name, size in (("x", 3), ("y", 2)):
            self.book.metadata.create_topic(name, size)

    def took(self, membership: Membership) -> None:
        self.known[membership.member_id] = membership

    @rule(name=NAMES, topics=st.sampled_from([("x",), ("x", "y"), ("y",)]))
    def joins(self, name: str, topics: tuple[str, ...]) -> None:
        try:
            self.took(join(self.book, name, *topics))
        except TopicNotFound:
            assert any(self.book.metadata.get_topic(topic) is None for topic in topics)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), release=st.booleans())
    def syncs(self, data: st.DataObject, release: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        releasing = self.known[name].releasing
        try:
            self.took(sync(self.book, name, releasing if release else ()))
        except MemberRemoved:
            assert name not in self.present()
            del self.known[name]

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        del self.known[name]
        self.book.metadata.leave_group("g", name)
        assert name not in self.present()

    @rule(seconds=st.sampled_from([1, 4, 6, 11]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(topic=st.sampled_from("xy"), size=st.integers(1, 5))
    def grows(self, topic: str, size: int) -> None:
        try:
            self.book.metadata.grow_topic(topic, size)
        except LakebookError:
            assert (known := self.book.metadata.get_topic(topic)) is None or known.partition_count > size

    @rule(topic=st.sampled_from("xy"))
    def deletes_and_creates(self, topic: str) -> None:
        if self.book.metadata.get_topic(topic) is None:
            self.book.metadata.create_topic(topic, 2)
        else:
            self.book.metadata.delete_topic(topic)
            # What was of the topic that is gone is nobody's; one of the same name is not it.
            for name, membership in self.known.items():
                parts = (tuple(p for p in of if p[0] != topic) for of in (membership.partitions, membership.releasing))
                self.known[name] = Membership("g", name, membership.generation, *parts)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def commits(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        topic, number = data.draw(st.sampled_from(of("x", 0, 1) + of("y", 0)))
        mine = self.known[name]
        try:
            self.book.metadata.commit_offset("g", topic, number, 0, generation=mine.generation, member=name)
        except (GenerationFenced, TopicNotFound):
            return
        assert owners(self.book)[topic, number] == name
        assert (topic, number) in mine.partitions + mine.releasing

    def present(self) -> set[str]:
        return {member.member_id for member in self.book.metadata.group_members("g")}

    @invariant()
    def nobody_believes_to_own_what_another_one_has(self) -> None:
        if not self.known:
            return
        members = {member.member_id: set(member.partitions) for member in self.book.metadata.group_members("g")}
        for name, membership in self.known.items():
            if name in members:
                believed = {*membership.partitions, *membership.releasing}
                assert believed <= members[name], f"{name} reads what it does not own"
        now = generation(self.book)
        changed = {place for place, name in owners(self.book).items() if self.last.get(place, name) != name}
        assert not changed or now > self.generation, "owners have changed within a generation"
        self.last, self.generation = owners(self.book), now

    def teardown(self) -> None:
        present = sorted(self.known)
        for name in present:
            try:
                sync(self.book, name)
            except MemberRemoved:
                del self.known[name]
        if self.known:
            alive = sorted(self.known)
            self.clock.advance(SESSION - 1)
            hand_over(self.book, *alive)
            self.clock.advance(SESSION - 1)
            found = hand_over(self.book, *alive)
            assert self.present() == set(alive)
            every = [place for membership in found.values() for place in membership.partitions]
            assert len(set(every)) == len(every)
            subscribed = {tuple(row["topics"]) for row in records(self.book, schema.group_members)}
            if len(subscribed) == 1:
                shares = [len(membership.partitions) for membership in found.values()]
                assert max(shares) - min(shares) <= 1
        checked = self.book.verify()
        assert checked.ok, checked.findings
        self.book.close()


def drive(open_book: Callable[[ManualClock], Book], examples: int) -> None:
    class Driven(Group):
        pass

    Driven.open_book = staticmethod(open_book)
    run_state_machine_as_test(
        Driven,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_whatever_members_do_no_partition_has_two_readers() -> None:
    drive(lambda clock: lakebook.open(":memory:", clock=clock, group_session=SESSION, publish="off"), 40)


def test_whatever_members_do_no_partition_has_two_readers_on_postgresql(make_place: Callable[..., Place]) -> None:
    drive(
        lambda clock: make_place(POSTGRESQL).open(clock=clock, group_session=SESSION),
        6,
    )


# --- all at once ---------------------------------------------------------------


class Readers:
    """Who reads what now, as the members themselves believe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by: dict[tuple[str, int], str] = {}
        self.failures: list[str] = []
        self.passed = 0

    def took(self, member: str, places: Iterable[tuple[str, int]]) -> None:
        with self._lock:
            for place in places:
                other = self._by.setdefault(place, member)
                if other != member:
                    self.failures.append(f"{place} is read by {other} and by {member}")
            self.passed += 1

    def let_go(self, member: str, places: Iterable[tuple[str, int]]) -> None:
        with self._lock:
            for place in places:
                assert self._by.pop(place) == member


def test_members_that_come_and_go_at_once_never_read_the_same(shared_place: Place) -> None:
    books = [shared_place.open() for _ in range(2)]
    books[0].metadata.create_topic("orders", 6)
    books[0].metadata.create_topic("other", 3)
    readers, failed = Readers(), []
    barrier = threading.Barrier(5)

    def live(book: Book, name: str, rounds: int) -> None:
        mine: set[tuple[str, int]] = set()
        membership = book.metadata.join_group("g", ["orders", "other"], member_id=name, seconds=600)
        for number in range(rounds):
            owned = {*membership.partitions, *membership.releasing}
            readers.took(name, owned - mine)
            assert mine <= owned, "what it had is gone without its word"
            mine = owned
            released = membership.releasing if number % 2 else ()
            readers.let_go(name, released)
            mine -= set(released)
            membership = book.metadata.sync_group("g", name, released=released, seconds=600)
        owned = {*membership.partitions, *membership.releasing}
        readers.took(name, owned - mine)
        readers.let_go(name, owned)
        book.metadata.leave_group("g", name)

    def run(index: int) -> None:
        try:
            barrier.wait(PATIENCE)
            for life in range(3):
                live(books[index % 2], f"m{index}-{life}", 4 + index)
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert failed == []
    assert readers.failures == []
    assert readers.passed >= 5 * 3 * 4
    assert books[0].metadata.group_members("g") == []
    last = books[0].metadata.join_group("g", ["orders", "other"])
    assert len(last.partitions) == 9
    assert books[0].verify().ok


def test_the_first_members_of_a_new_group_may_all_come_at_once(shared_place: Place) -> None:
    books = [shared_place.open() for _ in range(4)]
    books[0].metadata.create_topic("orders", 4)
    barrier = threading.Barrier(4)

    def come(book: Book) -> Membership:
        barrier.wait(PATIENCE)
        return book.metadata.join_group("g", ["orders"], seconds=600)

    coming = [Held(lambda book=book: come(book)) for book in books]  # type: ignore[misc]
    for held in coming:
        held.thread.start()
    found = [held.finish() for held in coming]
    assert sorted(len(membership.partitions) for membership in found) == [0, 0, 0, 4]
    members = [membership.member_id for membership in found]
    after = hand_over(books[0], *members)
    assert [len(membership.partitions) for membership in after.values()] == [1, 1, 1, 1]
    assert books[0].verify().ok


# --- races ---------------------------------------------------------------------


@pytest.fixture
def two(shared_place: Place, clock: ManualClock) -> tuple[Book, Book]:
    books = shared_place.open(clock=clock, group_kept=KEPT), shared_place.open(clock=clock, group_kept=KEPT)
    books[0].metadata.create_topic("orders", 4)
    return books


def test_a_renewal_and_a_removal_agree_on_who_was_first(two: tuple[Book, Book], clock: ManualClock) -> None:
    book, other = two
    for member in ("a", "b", "c"):
        join(book, member)
    hand_over(book, "a", "b", "c")
    clock.advance(SESSION - 1)
    sync(book, "a")
    clock.advance(2)
    # Both have run out, and one of them is just saying that it lives.
    with held_before_commit(lambda: sync(other, "b")) as renewing:
        removing = started(lambda: sync(book, "a"))
        wait_until_blocked(book)
        mine = renewing.finish()
    removing.finish()
    assert set(sync(book, "b").partitions) >= set(mine.partitions)
    assert {member.member_id for member in book.metadata.group_members("g")} == {"a", "b"}
    clock.advance(SESSION - 1)
    sync(book, "a")
    clock.advance(2)
    with held_before_commit(lambda: sync(book, "a")) as removing_b:
        late = started(lambda: sync(other, "b"))
        wait_until_blocked(book)
        removing_b.finish()
    with pytest.raises(MemberRemoved):
        late.finish()
    assert set(owners(book).values()) == {"a"}
    assert book.verify().ok


def test_a_topic_that_is_deleted_while_somebody_joins_leaves_nothing_behind(two: tuple[Book, Book]) -> None:
    book, other = two
    with held_before_commit(lambda: join(book, "a")) as joining:
        deleting = started(lambda: other.metadata.delete_topic("orders"))
        wait_until_blocked(book)
        assert len(joining.finish().partitions) == 4
    deleting.finish()
    assert records(book, schema.group_assignments) == []
    assert sync(book, "a").partitions == ()
    assert book.verify().ok


def test_members_that_join_at_once_with_different_topics_leave_each_other_theirs(two: tuple[Book, Book]) -> None:
    book, other = two
    book.metadata.create_topic("other", 2)
    join(book, "a")
    with held_before_commit(lambda: join(book, "b", "other")) as first:
        second = started(lambda: join(other, "c"))
        wait_until_blocked(book)
        mine = first.finish()
    second.finish()
    assert mine.partitions == of("other", 0, 1)
    assert {place: name for place, name in owners(book).items() if place[0] == "other"} == {
        ("other", 0): "b",
        ("other", 1): "b",
    }
    assert generation(book) == mine.generation + 1
    assert book.verify().ok


def test_a_group_is_not_forgotten_while_somebody_joins_it(two: tuple[Book, Book], clock: ManualClock) -> None:
    book, other = two
    book.metadata.ensure_consumer_group("g")
    clock.advance(KEPT + 1)
    with held_before_commit(lambda: join(book, "a")) as joining:
        forgetting = started(other.metadata.expire_groups)
        wait_until_blocked(book)
        joining.finish()
    assert forgetting.finish() == 0
    assert len(sync(book, "a").partitions) == 4


def test_who_has_nothing_to_tell_does_not_wait_for_the_group(make_place: Callable[..., Place]) -> None:
    place = make_place(POSTGRESQL)
    book = place.open()
    book.metadata.create_topic("orders", 4)
    before = join(book, "a")
    with held_before_commit(
        lambda: book._registry.write(lambda transaction: locked_group(transaction, "g", create=False))
    ):
        quick = started(lambda: sync(book, "a"))
        assert quick.finish() == before


def test_a_group_that_is_deleted_and_made_anew_has_none_of_the_former_members(two: tuple[Book, Book]) -> None:
    book, other = two
    join(book, "a")
    join(book, "b")
    releasing = sync(book, "a").releasing
    with held_before_commit(lambda: book.metadata.delete_consumer_group("g")) as deleting:
        syncing = started(lambda: sync(other, "a", releasing))
        leaving = started(lambda: other.metadata.leave_group("g", "b"))
        wait_until_blocked(book)
        deleting.finish()
    with pytest.raises(MemberRemoved):
        syncing.finish()
    leaving.finish()
    assert book._registry.one(GROUP_ROW, "g") is None
    assert book.verify().ok
