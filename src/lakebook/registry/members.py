"""Members of consumer groups, and which of them reads which partition.

The registry is the coordinator: every change is made under the group's lock by the member
that notices it. A partition has an owner, who reads it, and one who wants it. As long as the
owner lives only it gives the partition away: it commits, stops reading and says so. What an
owner that has gone had passes on at once. Every change of owners begins a new generation, and
commits of an older one are refused.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import orjson
import sqlalchemy as sa

from lakebook.clock import to_datetime
from lakebook.errors import GroupInUse, GroupNotFound, MemberRemoved
from lakebook.registry import schema
from lakebook.registry.changes import row_of, update_row
from lakebook.registry.commits import owner
from lakebook.registry.databases import Failure
from lakebook.registry.groups import GROUP_ROW, locked_group, no_group
from lakebook.registry.statements import ONE, POSTGRESQL, SQLITE, ZERO, Statement, among, bind, insert_into
from lakebook.registry.topics import SHARE_TOPIC_BY_ID, share_topic
from lakebook.registry.transactions import Reader, Row, Transaction, TryAgain

_t = schema.topics.c
_g = schema.consumer_groups.c
_m = schema.group_members.c
_a = schema.group_assignments.c
#: A partition by its topic's id and its number.
Place = tuple[int, int]

MEMBERS = Statement(
    sa.select(schema.group_members).where(_m.consumer_group_id == bind("group_key")).order_by(_m.member_id),
    "group_key",
)
INSERT_MEMBER = insert_into(schema.group_members)
_this_member = (_m.consumer_group_id == bind("group_key"), _m.member_id == bind("member"))
RENEW_MEMBER = Statement(
    sa.update(schema.group_members).where(*_this_member).values(expires_at=bind("until")),
    "until",
    "group_key",
    "member",
)
REJOIN = Statement(
    sa.update(schema.group_members)
    .where(*_this_member)
    .values(topics=bind("new_topics", _m.topics.type), holder=bind("new_holder"), expires_at=bind("until")),
    "new_topics",
    "new_holder",
    "until",
    "group_key",
    "member",
)
DELETE_MEMBER = Statement(sa.delete(schema.group_members).where(*_this_member), "group_key", "member")
# Asked in the statement that removes: one that has renewed its time meanwhile stays.
REMOVE_SILENT = Statement(
    sa.delete(schema.group_members).where(*_this_member, _m.expires_at <= bind("until")),
    "group_key",
    "member",
    "until",
)
ASSIGNMENTS = Statement(
    sa.select(_a.topic_id, _a.partition_id, _a.member_id, _a.wanted_by).where(
        _a.consumer_group_id == bind("group_key")
    ),
    "group_key",
)
INSERT_ASSIGNMENT = insert_into(schema.group_assignments)
_this_assignment = (
    _a.consumer_group_id == bind("group_key"),
    _a.topic_id == bind("of_topic"),
    _a.partition_id == bind("number"),
)
UPDATE_ASSIGNMENT = Statement(
    sa.update(schema.group_assignments)
    .where(*_this_assignment)
    .values(member_id=bind("new_owner"), wanted_by=bind("new_wanted")),
    "new_owner",
    "new_wanted",
    "group_key",
    "of_topic",
    "number",
)
DELETE_ASSIGNMENT = Statement(
    sa.delete(schema.group_assignments).where(*_this_assignment), "group_key", "of_topic", "number"
)
# Of one who asks, without the rows of all the others.
MEMBER = Statement(sa.select(schema.group_members).where(*_this_member), "group_key", "member")
SILENT_OTHERS = Statement(
    sa.select(_m.member_id)
    .where(_m.consumer_group_id == bind("group_key"), _m.member_id != bind("member"), _m.expires_at <= bind("until"))
    .limit(ONE)
    .offset(ZERO),
    "group_key",
    "member",
    "until",
)
# How many partitions of each topic are shared out, and how many of them wait for somebody to look.
SHARED_OUT = Statement(
    sa.select(
        _a.topic_id,
        sa.func.count(),
        sa.func.sum(sa.case((sa.or_(_a.member_id.is_(None), _a.wanted_by.is_(None)), 1), else_=0)),
    )
    .where(_a.consumer_group_id == bind("group_key"))
    .group_by(_a.topic_id),
    "group_key",
)
_sizes = {
    database: sa.select(_t.id, _t.partition_count).where(among(_t.id, "ids", database), _t.deleted_at.is_(None))
    for database in (SQLITE, POSTGRESQL)
}
TOPIC_SIZES = Statement(_sizes[SQLITE], "ids", postgresql=_sizes[POSTGRESQL])
# In one statement, so that the generation is that of the owners.
_with_group = schema.consumer_groups.outerjoin(
    schema.group_assignments.join(schema.topics, sa.and_(_t.id == _a.topic_id, _t.deleted_at.is_(None))),
    sa.and_(_a.consumer_group_id == _g.id, _a.member_id == bind("member")),
)
MEMBERSHIP = Statement(
    sa.select(_g.generation, _t.name, _a.partition_id, _a.wanted_by)
    .select_from(_with_group)
    .where(_g.id == bind("group_key"))
    .order_by(_t.name, _a.partition_id),
    "group_key",
    "member",
)
LIST_MEMBERS = Statement(
    sa.select(_m.member_id, _m.holder, _m.joined_at, _m.expires_at, _t.name, _a.partition_id)
    .select_from(
        schema.consumer_groups.join(schema.group_members, _m.consumer_group_id == _g.id)
        .outerjoin(
            schema.group_assignments,
            sa.and_(_a.consumer_group_id == _m.consumer_group_id, _a.member_id == _m.member_id),
        )
        .outerjoin(schema.topics, sa.and_(_t.id == _a.topic_id, _t.deleted_at.is_(None)))
    )
    .where(_g.group_id == bind("group"))
    .order_by(_m.member_id, _t.name, _a.partition_id),
    "group",
)
GROUPS_OF_TOPIC = Statement(
    sa.select(_g.object_id, _g.id)
    .distinct()
    .select_from(schema.group_assignments.join(schema.consumer_groups, _g.id == _a.consumer_group_id))
    .where(_a.topic_id == bind("of_topic"))
    .order_by(_g.object_id)
    .limit(bind("most", sa.Integer))
    .offset(ZERO),
    "of_topic",
    "most",
)
FORGET_TOPIC = Statement(
    sa.delete(schema.group_assignments).where(
        _a.consumer_group_id == bind("group_key"), _a.topic_id == bind("of_topic")
    ),
    "group_key",
    "of_topic",
)
ASK_ANEW = Statement(
    sa.update(schema.group_assignments).where(_a.consumer_group_id == bind("group_key")).values(wanted_by=sa.null()),
    "group_key",
)


@dataclass(frozen=True)
class Membership:
    """What a member reads for its group, as (topic, partition) pairs, and the generation its commits carry.

    `partitions` are to be read. Those in `releasing` are the member's too, but another one
    wants them: stop reading them, commit, and sync with them in `released`.
    """

    group_id: str
    member_id: str
    generation: int
    partitions: tuple[tuple[str, int], ...]
    releasing: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class GroupMember:
    """A member of a group, for people who look at it."""

    group_id: str
    member_id: str
    holder: str
    partitions: tuple[tuple[str, int], ...]
    joined_at: datetime
    expires_at: datetime


@dataclass
class _State:
    """A group whose lock is held: what it was, and what it is to become."""

    group: dict[str, Any]
    members: dict[str, dict[str, Any]]
    #: Live topics that a member reads, by their ids.
    topics: dict[int, dict[str, Any]]
    #: Owner and who wants it, per partition.
    before: dict[Place, tuple[str | None, str | None]]
    owners: dict[Place, str | None] = field(default_factory=dict)
    #: Whether somebody came or went.
    changed: bool = False


def removed(group: str, member_id: str) -> MemberRemoved:
    """The error for a member that is none any more."""
    return MemberRemoved(
        f"the member {member_id} left the group, or was silent for too long and removed",
        on=f"group {group}",
        remedy="Join the group again as a new member, and read on from the committed offsets",
    )


def join_group(
    transaction: Transaction, group: str, topics: Sequence[str], member_id: str, seconds: float
) -> Membership:
    """Make somebody a member that reads these topics; one that is a member already reads these from now on."""
    asked = [share_topic(transaction, name) for name in sorted(set(topics))]
    state = _locked_state(transaction, group, asked, create=True)
    assert state is not None
    now = transaction.clock.now_ms()
    _remove_silent(transaction, state, member_id, now)
    ids = [row["id"] for row in asked]
    until = now + round(seconds * 1000)
    wanted = orjson.dumps(ids).decode()
    if member_id in state.members:
        transaction.run(REJOIN, wanted, owner(), until, state.group["id"], member_id)
    else:
        transaction.run(INSERT_MEMBER, state.group["id"], member_id, wanted, owner(), now, until)
    state.members[member_id] = {"topics": ids}
    state.topics.update({row["id"]: row for row in asked})
    state.changed = True
    return _settle(transaction, state, member_id)


def sync_group(
    transaction: Transaction, group: str, member_id: str, released: Set[tuple[str, int]], seconds: float
) -> Membership:
    """Renew a member's time, take what it has released, and see to whatever has changed."""
    row = transaction.one(GROUP_ROW, group)
    if row is None:
        raise removed(group, member_id)
    group_key = row_of(schema.consumer_groups, row)["id"]
    now, lasting = transaction.clock.now_ms(), round(seconds * 1000)
    if not released and not _is_due(transaction, group_key, member_id, now, lasting):
        # Without the group's lock: whoever removes members asks for their time in the same statement.
        if transaction.run(RENEW_MEMBER, now + lasting, group_key, member_id) == 0:
            raise removed(group, member_id)
        return _membership(transaction, group, group_key, member_id)
    state = _locked_state(transaction, group, [], create=False)
    if state is None or member_id not in state.members:
        raise removed(group, member_id)
    _remove_silent(transaction, state, member_id, _heard_until(state.members[member_id], now, lasting))
    transaction.run(RENEW_MEMBER, now + lasting, state.group["id"], member_id)
    _release(state, member_id, released)
    return _settle(transaction, state, member_id)


def leave_group(transaction: Transaction, group: str, member_id: str) -> None:
    """Let a member go; what it had passes on at once. One that is none any more has nothing to do."""
    state = _locked_state(transaction, group, [], create=False)
    if state is None or state.members.pop(member_id, None) is None:
        return
    transaction.run(DELETE_MEMBER, state.group["id"], member_id)
    state.changed = True
    _settle(transaction, state, member_id)


def refuse_while_read(transaction: Transaction, group: str, topic: dict[str, Any]) -> None:
    """Refuse to go on while a live member of a group reads a topic, which is shared; the group's lock is held then.

    Members that have been silent for too long are removed: one that comes back begins where the group stands.
    """
    state = _locked_state(transaction, group, [topic], create=False)
    if state is None:
        raise no_group(group)
    _remove_silent(transaction, state, "", transaction.clock.now_ms())
    readers = sum(topic["id"] in row["topics"] for row in state.members.values())
    if readers:
        raise GroupInUse(
            f"{readers} of its members read {topic['name']}",
            on=f"group {group}",
            remedy="Close its consumers (`lakebook groups members` shows them), or wait until their time has run out",
        )
    if state.changed:
        _settle(transaction, state, "")


def group_members(reader: Reader, group: str) -> list[GroupMember]:
    """The members of a group and what each of them owns, in the order of their ids."""
    rows: dict[str, Row] = {}
    owned: dict[str, list[tuple[str, int]]] = {}
    for row in reader.all(LIST_MEMBERS, group):
        rows[row[0]] = row
        places = owned.setdefault(row[0], [])
        if row[4] is not None:
            places.append((row[4], row[5]))
    return [
        GroupMember(group, member, holder, tuple(owned[member]), to_datetime(joined), to_datetime(expires))
        for member, holder, joined, expires, _, _ in rows.values()
    ]


def forget_assignments(transaction: Transaction, topic_id: int, most: int) -> int:
    """Delete who reads what of a hidden topic, in the order of the groups; how many groups read it."""
    found = transaction.all(GROUPS_OF_TOPIC, topic_id, most)
    transaction.lock(*(row[0] for row in found))
    for _, group_key in found:
        transaction.run(FORGET_TOPIC, group_key, topic_id)
        # The members may have unequal shares now: the next one that syncs looks.
        transaction.run(ASK_ANEW, group_key)
    return len(found)


# --- under the group's lock ------------------------------------------------------


def _is_due(reader: Reader, group_key: int, member_id: str, now: int, lasting: int) -> bool:
    """Whether there is more to do for a member than to renew its time.

    Each looks at the topics that it reads itself: groups are large, and every member asks.
    """
    row = reader.one(MEMBER, group_key, member_id)
    if row is None:
        return False
    member = row_of(schema.group_members, row)
    if reader.one(SILENT_OTHERS, group_key, member_id, _heard_until(member, now, lasting)) is not None:
        return True
    shared_out = reader.all(SHARED_OUT, group_key)
    if any(waiting for _, _, waiting in shared_out):
        return True
    topics = _topics_of([member])
    sizes: dict[int, int] = dict(reader.all(TOPIC_SIZES, reader.listed(topics)))
    return sizes != {topic_id: count for topic_id, count, _ in shared_out if topic_id in topics}


def _heard_until(member: Mapping[str, Any], now: int, lasting: int) -> int:
    """The time up to which a member knows who was silent.

    One that is late itself may have been kept from the registry as the others were: it knows of
    the time before it was heard of last, and gives them until it comes again.
    """
    expires: int = member["expires_at"]
    return now if expires > now else expires - lasting


def _silent(members: Mapping[str, Mapping[str, Any]], but: str, until: int) -> list[str]:
    return [name for name, row in members.items() if row["expires_at"] <= until and name != but]


def _members_of(reader: Reader, group_key: int) -> list[dict[str, Any]]:
    return [row_of(schema.group_members, row) for row in reader.all(MEMBERS, group_key)]


def _topics_of(members: Iterable[Mapping[str, Any]]) -> list[int]:
    return sorted({topic_id for member in members for topic_id in member["topics"]})


def _locked_state(
    transaction: Transaction, group: str, asked: Sequence[dict[str, Any]], *, create: bool
) -> _State | None:
    """A group as it is, locked; none if it is not there.

    Its topics are shared first, so that none of them goes before this transaction ends.
    """
    row = transaction.one(GROUP_ROW, group)
    known = [] if row is None else _topics_of(_members_of(transaction, row_of(schema.consumer_groups, row)["id"]))
    topics = {}
    for topic_id in known:
        found = transaction.one(SHARE_TOPIC_BY_ID, topic_id)
        if found is not None:
            topics[topic_id] = row_of(schema.topics, found)
    try:
        locked = locked_group(transaction, group, create=create)
    except GroupNotFound:
        return None
    members = {row["member_id"]: row for row in _members_of(transaction, locked["id"])}
    if not {*known, *(row["id"] for row in asked)}.issuperset(_topics_of(members.values())):
        raise TryAgain(Failure.BUSY)  # Somebody joined with other topics while the lock was waited for.
    topics |= {row["id"]: row for row in asked}
    before = {
        (topic_id, number): (owner_id, wanted)
        for topic_id, number, owner_id, wanted in transaction.all(ASSIGNMENTS, locked["id"])
    }
    return _State(locked, members, topics, before, {place: pair[0] for place, pair in before.items()})


def _remove_silent(transaction: Transaction, state: _State, but: str, until: int) -> None:
    for member_id in _silent(state.members, but, until):
        if transaction.run(REMOVE_SILENT, state.group["id"], member_id, until):
            del state.members[member_id]
            state.changed = True


def _release(state: _State, member_id: str, released: Set[tuple[str, int]]) -> None:
    """Take from a member what it has let go of, where another one wants it."""
    for place, (owner_id, wanted) in state.before.items():
        topic = state.topics.get(place[0])
        if owner_id == member_id and wanted != member_id and topic and (topic["name"], place[1]) in released:
            state.owners[place] = None


def _settle(transaction: Transaction, state: _State, member_id: str) -> Membership:
    """Say who wants what, pass on what nobody owns, and begin a new generation if owners have changed."""
    reading = {name: set(row["topics"]) for name, row in state.members.items()}
    places = _places(state, reading)
    owners = {place: _still(state.owners.get(place), place, reading) for place in places}
    before = {place: state.before[place][1] for place in places & state.before.keys()}
    wanted: dict[Place, str | None] = dict(before)
    if state.changed or places != state.before.keys() or None in before.values():
        wanted = {**dict.fromkeys(places), **balanced(reading, owners, before)}
    after = {place: (owners[place] or wanted[place], wanted[place]) for place in places}
    _store(transaction, state, after)
    had = {place: pair[0] for place, pair in state.before.items() if pair[0] is not None}
    if state.changed or had != {place: pair[0] for place, pair in after.items() if pair[0] is not None}:
        changes = {
            "generation": state.group["generation"] + 1,
            "updated_at": transaction.time_of(state.group["object_id"]),
        }
        update_row(transaction, state.group["object_id"], schema.consumer_groups, state.group, changes)
    return _membership(transaction, state.group["group_id"], state.group["id"], member_id)


def _places(state: _State, reading: Mapping[str, Set[int]]) -> set[Place]:
    """The partitions that are shared out; those of a group without members are kept for who comes next."""
    if not reading:
        return set(state.before)
    wanted = set().union(*reading.values())
    return {
        (topic_id, number)
        for topic_id, row in state.topics.items()
        if topic_id in wanted
        for number in range(row["partition_count"])
    }


def _still(owner_id: str | None, place: Place, reading: Mapping[str, Set[int]]) -> str | None:
    return owner_id if owner_id is not None and place[0] in reading.get(owner_id, ()) else None


def _store(transaction: Transaction, state: _State, after: Mapping[Place, tuple[str | None, str | None]]) -> None:
    group_key, before = state.group["id"], state.before
    gone = sorted(before.keys() - after.keys())
    transaction.run_many(DELETE_ASSIGNMENT, [(group_key, *place) for place in gone])
    changed = [place for place in sorted(after.keys() & before.keys()) if after[place] != before[place]]
    transaction.run_many(UPDATE_ASSIGNMENT, [(*after[place], group_key, *place) for place in changed])
    new = sorted(after.keys() - before.keys())
    transaction.insert_many(INSERT_ASSIGNMENT, [(group_key, *place, *after[place]) for place in new])


def _membership(reader: Reader, group: str, group_key: int, member_id: str) -> Membership:
    rows = reader.all(MEMBERSHIP, group_key, member_id)
    if not rows:
        raise removed(group, member_id)  # The group itself was deleted.
    owned = [(name, number, wanted in (member_id, None)) for _, name, number, wanted in rows if name is not None]
    return Membership(
        group,
        member_id,
        rows[0][0],
        tuple((name, number) for name, number, keeps in owned if keeps),
        tuple((name, number) for name, number, keeps in owned if not keeps),
    )


# --- sharing out -----------------------------------------------------------------


def balanced(
    reading: Mapping[str, Set[int]], owners: Mapping[Place, str | None], wanted: Mapping[Place, str | None]
) -> dict[Place, str]:
    """Who shall read each partition: members have as equally many as their topics allow, and few change hands.

    The outcome depends on nothing but what is given.
    """
    places: dict[int, list[Place]] = {}
    for place in sorted(owners):
        places.setdefault(place[0], []).append(place)
    target: dict[Place, str] = {}
    for members in _circles(reading):
        topics = set().union(*(reading[name] for name in members))
        here = {place: owners[place] for topic_id in sorted(topics) for place in places.get(topic_id, ())}
        if all(reading[name] == topics for name in members):
            target |= _equal_shares(members, here, wanted)
        else:
            target |= _Shares({name: reading[name] for name in members}, here, wanted).found()
    return target


def _circles(reading: Mapping[str, Set[int]]) -> list[list[str]]:
    """Members that share topics, directly or through others: what one circle reads no other one does."""
    readers = _readers_of(reading)
    circles = []
    left = set(reading)
    for start in sorted(reading):
        if start not in left:
            continue
        circle, queue = {start}, [start]
        while queue:
            for topic_id in reading[queue.pop()]:
                new = set(readers.pop(topic_id, ())) - circle
                circle |= new
                queue += new
        left -= circle
        circles.append(sorted(circle))
    return circles


def _readers_of(reading: Mapping[str, Set[int]]) -> dict[int, list[str]]:
    readers: dict[int, list[str]] = {}
    for name in sorted(reading):
        for topic_id in reading[name]:
            readers.setdefault(topic_id, []).append(name)
    return readers


def _equal_shares(
    members: Sequence[str], owners: Mapping[Place, str | None], wanted: Mapping[Place, str | None]
) -> dict[Place, str]:
    """Equal shares for members that all read the same, in one pass: a group may be large."""
    least, richer = divmod(len(owners), len(members))
    had: dict[str, list[Place]] = {name: [] for name in members}
    loose = []
    for place, name in owners.items():
        if name is None:
            loose.append(place)
        else:
            had[name].append(place)
    hoped = Counter(name for place in owners if (name := wanted.get(place)) in had)
    target: dict[Place, str] = {}
    room: dict[str, int] = {}
    # Who has most keeps one more, so that few change hands.
    for rank, name in enumerate(sorted(members, key=lambda name: (-len(had[name]), -hoped[name], name))):
        share = least + (rank < richer)
        # It gives rather what was to go to another one before.
        mine = sorted(had[name], key=lambda place: (wanted.get(place) != name and wanted.get(place) in had, place))
        target |= dict.fromkeys(mine[:share], name)
        loose += mine[share:]
        room[name] = share - len(mine[:share])
    _fill(target, sorted(loose), room, wanted)
    return target


def _fill(
    target: dict[Place, str], loose: Sequence[Place], room: dict[str, int], wanted: Mapping[Place, str | None]
) -> None:
    """Give what nobody keeps to those that have room: who was to have it before, else who has most room."""
    left = []
    for place in loose:
        name = wanted.get(place)
        if name is not None and room.get(name, 0) > 0:
            target[place] = name
            room[name] -= 1
        else:
            left.append(place)
    queue = [(-number, name) for name, number in room.items() if number > 0]
    heapify(queue)
    for place in left:
        number, name = heappop(queue)
        target[place] = name
        if number < -1:
            heappush(queue, (number + 1, name))


class _Shares:
    """Shares of members that read different topics, where load may have to pass through others."""

    def __init__(
        self, reading: Mapping[str, Set[int]], owners: Mapping[Place, str | None], wanted: Mapping[Place, str | None]
    ) -> None:
        self._reading = {name: reading[name] for name in sorted(reading)}
        self._readers = _readers_of(reading)
        self._owners = owners
        self._wanted = wanted
        self._target: dict[Place, str] = {}
        # By member and topic: what it has, in order, by who owned it and who was to have it.
        self._has: dict[str, dict[int, dict[tuple[str | None, str | None], list[Place]]]] = {
            name: {} for name in self._reading
        }
        self._load: Counter[str] = Counter(dict.fromkeys(self._reading, 0))

    def found(self) -> dict[Place, str]:
        """Who shall read each partition."""
        for place in sorted(self._owners):
            name = self._owners[place]
            if name is not None:
                self._give(place, name)
        idle = {topic_id: [(self._load[name], name) for name in names] for topic_id, names in self._readers.items()}
        for queue in idle.values():
            heapify(queue)
        for place in sorted(self._owners.keys() - self._target.keys()):
            self._place(place, idle[place[0]])
        while self._improve():
            pass
        return self._target

    def _give(self, place: Place, name: str) -> None:
        kind = (self._owners[place], self._wanted.get(place))
        former = self._target.get(place)
        if former is not None:
            places = self._has[former][place[0]][kind]
            del places[bisect_left(places, place)]
            self._load[former] -= 1
        self._target[place] = name
        insort(self._has[name].setdefault(place[0], {}).setdefault(kind, []), place)
        self._load[name] += 1

    def _place(self, place: Place, queue: list[tuple[int, str]]) -> None:
        """Give a partition that nobody has to the one of its readers that has least."""
        while queue[0][0] != self._load[queue[0][1]]:
            name = queue[0][1]
            heapreplace(queue, (self._load[name], name))
        least, name = queue[0]
        hoped = self._wanted.get(place)
        if hoped is not None and place[0] in self._reading.get(hoped, ()) and self._load[hoped] == least:
            name = hoped
        self._give(place, name)

    def _improve(self) -> bool:
        """Move one partition from somebody who has at least two more than another; whether there was one."""
        least = min(self._load.values(), default=0)
        # From these, and from whom they reach, no way leads to anybody who has two less than those that come after.
        hopeless: set[str] = set()
        for name in sorted(self._reading, key=lambda name: (-self._load[name], name)):
            if self._load[name] < least + 2:
                return False
            way = [] if name in hopeless else self._way_from(name, hopeless)
            if way:
                for giver, taker in way:
                    self._give(self._choose(giver, taker), taker)
                return True
        return False

    def _way_from(self, start: str, hopeless: set[str]) -> list[tuple[str, str]]:
        """The shortest way to one that has two less: directly, or through others that read both topics."""
        came: dict[str, str] = {start: start}
        seen: set[int] = set()
        queue = deque([start])
        while queue:
            giver = queue.popleft()
            topics = {topic_id for topic_id, kinds in self._has[giver].items() if any(kinds.values())} - seen
            seen |= topics
            takers = {name for topic_id in topics for name in self._readers[topic_id]} - came.keys() - hopeless
            for taker in sorted(takers, key=lambda name: (self._load[name], name)):
                came[taker] = giver
                if self._load[taker] <= self._load[start] - 2:
                    return self._steps(came, taker)
                queue.append(taker)
        hopeless |= came.keys()
        return []

    def _steps(self, came: Mapping[str, str], last: str) -> list[tuple[str, str]]:
        steps = []
        while came[last] != last:
            steps.append((came[last], last))
            last = came[last]
        return steps

    def _choose(self, giver: str, taker: str) -> Place:
        """What to give: rather what does not change hands by that, or was to go there before."""
        kinds = (
            (kind, places)
            for topic_id in self._reading[taker]
            for kind, places in self._has[giver].get(topic_id, {}).items()
            if places
        )
        _, places = max(
            kinds,
            key=lambda item: (item[0][0] == taker, item[0][0] != giver, item[0][1] == taker, item[1][-1]),
        )
        return places[-1]
