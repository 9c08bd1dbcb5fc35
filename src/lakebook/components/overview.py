"""How the upkeep of a book stands, as any process can see it from the registry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lakebook.cdc.subscribers import SUBSCRIPTIONS
from lakebook.components.backlog import backlog, count_backlog, pipeline_warnings
from lakebook.components.names import warnings_of
from lakebook.lake.lake import Lake
from lakebook.registry.compaction_claims import CompactionInfo, list_claims
from lakebook.registry.deliveries import (
    Stalled,
    count_dead_letters,
    events_behind,
    list_cursors,
    list_stalled,
    scheduler_state,
)
from lakebook.registry.gauges import read_gauges
from lakebook.registry.holding import held_since
from lakebook.registry.maintenance import Pause, Request, Work, list_named_work, list_pauses, list_requests
from lakebook.registry.pipelines import standing_of_all
from lakebook.registry.schedulers import active_scheduler
from lakebook.registry.schema import MAX_BIGINT
from lakebook.registry.transactions import Reader

_MOST = 100


@dataclass(frozen=True)
class SubscriberOverview:
    """How one subscriber stands."""

    name: str
    #: Events that it has not read yet; none: it has no cursor, and begins with a refresh.
    behind: int | None
    #: When its cursor was written down last.
    saved_at: datetime | None
    #: Lake objects of which it has not taken every event.
    stalled: int
    dead_letters: int
    #: `closed`, `open` or `half_open`; none: nobody delivers now.
    breaker: str | None
    reason: str
    #: Calls that were given up after their time-out and have not come back.
    abandoned: int = 0


@dataclass(frozen=True)
class Overview:
    """How the upkeep of a book stands."""

    #: Whether some process looks after the tables.
    active: bool
    #: Who has the turn; none if nobody has.
    holder: str | None
    since: datetime | None
    heard_at: datetime | None
    subscribers: tuple[SubscriberOverview, ...]
    stalled: tuple[Stalled, ...]
    #: What each component said of itself last.
    components: Mapping[str, Any]
    #: Which tables are being compacted, and by whom: also by processes that wait for the turn.
    compactions: tuple[CompactionInfo, ...]
    pauses: tuple[Pause, ...]
    requests: tuple[Request, ...]
    #: The newest pieces of work.
    recent: tuple[Work, ...]
    #: Numbers of the registry that upkeep brings down.
    owed: Mapping[str, int]
    #: What is not as it should be, and what to do about it.
    warnings: tuple[str, ...]


def overview(lake: Lake) -> Overview:
    """How the upkeep of a book stands, of one moment."""
    now = lake.clock.now_ms()
    lease_ms = round(2 * lake.settings.astha_lease * 1000)
    counted = count_backlog(lake)
    return lake.registry.in_snapshot(lambda reader: _read(reader, now, lease_ms, counted))


def _read(reader: Reader, now: int, lease_ms: int, counted: Mapping[str, int]) -> Overview:
    state = scheduler_state(reader)
    active = active_scheduler(reader, now, lease_ms) is not None
    said: Mapping[str, Any] = state.status if state is not None and active else {}
    owed = backlog(read_gauges(reader, now), counted)
    stalled = list_stalled(reader, _MOST)
    subscribers = _subscribers(reader, said.get("subscribers", {}), stalled)
    pauses = tuple(list_pauses(reader))
    requests = tuple(list_requests(reader, most=_MOST))
    return Overview(
        active,
        None if state is None else state.holder,
        None if state is None else state.claimed_at,
        None if state is None else state.renewed_at,
        subscribers,
        tuple(stalled),
        said.get("state", {}),
        tuple(list_claims(reader, now, _MOST)),
        pauses,
        requests,
        tuple(list_named_work(reader, None, None, MAX_BIGINT, 10)),
        owed,
        (
            *warnings_of(owed, active=active),
            *pipeline_warnings(standing_of_all(reader), active=active),
            *_warnings(subscribers, pauses),
            *_held(reader),
            *_unheard(requests, said.get("components")),
        ),
    )


def _subscribers(reader: Reader, said: Mapping[str, Any], stalled: list[Stalled]) -> tuple[SubscriberOverview, ...]:
    cursors = {name: (cursor, at) for name, cursor, at in list_cursors(reader)}
    letters = count_dead_letters(reader)
    found = []
    for name in sorted({*SUBSCRIPTIONS, *cursors}):
        cursor, at = cursors.get(name, (None, None))
        own = said.get(name, {})
        found.append(
            SubscriberOverview(
                name,
                None if cursor is None else events_behind(reader, cursor),
                at,
                sum(item.subscriber == name for item in stalled),
                letters.get(name, 0),
                own.get("breaker"),
                own.get("reason", ""),
                own.get("abandoned", 0),
            )
        )
    return tuple(found)


def _warnings(subscribers: tuple[SubscriberOverview, ...], pauses: tuple[Pause, ...]) -> list[str]:
    found = [
        f"the breaker of {item.name} is {item.breaker}: {item.reason}"
        for item in subscribers
        if item.breaker not in (None, "closed")
    ]
    found += [
        f"{item.abandoned} calls of {item.name} were given up and still run: look what they hang on"
        for item in subscribers
        if item.abandoned
    ]
    found += [
        f"{pause.component} is paused"
        + (f" on table {pause.table or pause.table_id}" if pause.table_id is not None else "")
        + f" since {pause.since.isoformat(timespec='seconds')}: {pause.reason}"
        for pause in pauses
    ]
    return found


def _held(reader: Reader) -> list[str]:
    since = held_since(reader)
    if since is None:
        return []
    return [
        f"the book was restored at {since.isoformat(timespec='seconds')}, and nothing is removed from it:"
        " run `lakebook verify`, and then `lakebook admin resume-after-restore`"
    ]


def _unheard(requests: tuple[Request, ...], running: Sequence[str] | None) -> list[str]:
    """Who is asked for something, though the process that is at work does not run it."""
    counts = Counter(request.component for request in requests)
    return [
        f"{number} requests wait for {name}, which `lakebook run --only` leaves out"
        for name, number in sorted(counts.items())
        if running is not None and name not in running
    ]
