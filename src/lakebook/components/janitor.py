"""The janitor: it removes by the clock what nobody needs any more, and keeps the database in order.

Each round is bounded and the next one goes on where it stopped. What cannot be decided is not deleted, and
an error leaves everything for the next round. Several janitors at once do no harm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from lakebook.clock import Enough
from lakebook.components.chores import Chores
from lakebook.components.component import Component
from lakebook.errors import InvalidInput, LakebookError
from lakebook.lake.cleaning import Cleaner
from lakebook.lake.debts import settle_debts
from lakebook.lake.lake import Lake
from lakebook.names import shown
from lakebook.recovery.checkpoints import forget_checkpoints, state_of, write_checkpoint
from lakebook.registry.holding import held_since
from lakebook.registry.pruning import drop_laggards, prune_commits, prune_events, prune_history
from lakebook.registry.topics import DELETED_TOPICS
from lakebook.registry.upkeep import keep_database
from lakebook.streams.merging import Merger
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.retention import Retention
from lakebook.streams.sweeping import sweep_streams

# Seconds that one piece of work takes before it leaves the rest for its next round. Short enough for leases
# to be looked at in between: after a whole lease time without a look, the watch would begin anew.
_LONGEST_ROUND = 10.0
_ROUNDS_PER_LEASE = 6
_LOOKS_PER_LEASE = 3
# Failures that are told of.
_MOST_TOLD = 5
# Intervals after which work that is always to be done is written down again.
_INTERVALS_BETWEEN_NOTES = 60
# What is done also while a restored book is held.
_REMOVES_NOTHING = frozenset({"debts", "events", "upkeep", "checkpoint"})
# Topics that one note names.
_MOST_TOPICS = 20


@dataclass
class _Round:
    """What a piece of work has done in one round."""

    done: dict[str, Any] = field(default_factory=dict)
    #: What could not be done, or should be done by somebody else.
    failed: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def detail(self) -> dict[str, Any]:
        """All of it in plain values."""
        told = {"failed": len(self.failed), "errors": self.failed[:_MOST_TOLD]} if self.failed else {}
        return {**self.done, **self.facts, **told}


@dataclass(frozen=True)
class _Action:
    """A piece of work: how often it comes, in intervals of the settings, and why it is done."""

    work: Callable[[Enough], _Round]
    intervals: float
    reason: str
    #: Whether there is always something to do, so that not every round is worth a word.
    is_routine: bool = False


class Janitor(Component):
    """Works by the clock: deletes files, sweeps, ends leases, prunes, and does the database's own upkeep."""

    name: ClassVar[str] = "janitor"

    def __init__(self, lake: Lake) -> None:
        super().__init__(lake)
        # One for all its life: what it knows of leases, it has seen over time.
        self._cleaner = Cleaner(lake)
        self._retention = Retention(lake)
        self._merger = Merger(lake)
        self._next_debt = ""
        # What the last checkpoint was of.
        self._checkpointed: tuple[int, ...] | None = None
        self._actions = self._all_actions()
        self._chores = Chores(lake.clock, self.name, lake.metrics)
        for name, action in self._actions.items():
            interval = action.intervals * lake.settings.maintenance_interval
            if name == "leases":
                interval = min(interval, lake.settings.lease_seconds / _LOOKS_PER_LEASE)
            if name == "checkpoint":
                interval = lake.settings.checkpoint_interval
            self._chores.add(name, interval, partial(self._run, name))
        # What could not be done the last time, and what was done and not written down yet.
        self._failed: dict[str, list[str]] = {}
        self._unsaid: dict[str, dict[str, int]] = {}
        self._said_at: dict[str, float] = {}
        self._by_hand = threading.local()

    def _all_actions(self) -> Mapping[str, _Action]:
        actions = {
            "leases": _Action(self._end_leases, 1, "their readers are dead"),
            "topics": _Action(self._purge_topics, 5, "they were deleted"),
            "retention": _Action(self._retain, 1, "topics keep them no longer"),
            "merging": _Action(self._merge, 1, "they are small"),
            "groups": _Action(self._expire_groups, 60, "nobody has read for them for long"),
            "segments": _Action(self._sweep_streams, 10, "nobody needs them"),
            "tables": _Action(self._empty_tables, 1, "they were dropped"),
            "files": _Action(self._delete_files, 1, "their grace has passed"),
            "sweep": _Action(self._sweep, 10, "inserts have failed or died"),
            "debts": _Action(self._settle_debts, 5, "outside engines brought files"),
            "events": _Action(self._prune_events, 1, "everybody has taken them", is_routine=True),
            "commits": _Action(self._prune_commits, 10, "nobody can ask for them", is_routine=True),
            "history": _Action(self._prune_history, 60, "it is old", is_routine=True),
            "upkeep": _Action(self._keep_database, 10, "the database's own upkeep", is_routine=True),
            "checkpoint": _Action(self._checkpoint, 1, "the registry may be lost", is_routine=True),
        }
        if not self.lake.settings.checkpoint_interval:
            del actions["checkpoint"]
        return actions

    # --- life ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to work by the clock."""
        self._chores.start()

    def stop(self) -> None:
        """End that; what is at work stops at its next step and is waited for."""
        self._chores.stop()

    def status(self) -> Mapping[str, Any]:
        """When each piece of work was done last, how it went, and what it could not do."""
        failed = {name: told[:_MOST_TOLD] for name, told in list(self._failed.items()) if told}
        return {"chores": self._chores.status(), "failed": failed}

    def run_due(self) -> int:
        """Do what is due, in this thread; how many pieces of work. For who has a clock of its own."""
        return self._chores.run_due()

    def run_once(self, action: str | None = None) -> dict[str, dict[str, Any]]:
        """Do all the work now and to its end, or one piece of it; what was done. One that fails stops no other."""
        if action is not None and action not in self._actions:
            raise InvalidInput(
                f"there is no such work as {shown(action)}", on=self.name, remedy=f"Use {', '.join(self._actions)}"
            )
        found: dict[str, dict[str, Any]] = {}
        self._by_hand.on = True
        try:
            for name in self._actions if action is None else (action,):
                try:
                    found[name] = self._chores.run_now(name)
                except LakebookError as error:
                    found[name] = {"error": str(error)}
        finally:
            self._by_hand.on = False
        return found

    # --- one round -------------------------------------------------------------------

    def _run(self, name: str) -> dict[str, Any]:
        pause = self.paused()
        if pause is not None:
            return {"paused": pause.reason}
        since = None if name in _REMOVES_NOTHING else held_since(self.lake.registry)
        if since is not None:
            return {"held": f"it was restored at {since.isoformat(timespec='seconds')}"}
        action = self._actions[name]
        with self.journal.work(name, action.reason) as entry:
            entry.worth_noting = False
            done = action.work(self._enough())
            entry.detail |= done.detail
            entry.worth_noting = self._is_news(name, action, done)
            if entry.worth_noting:
                entry.detail |= self._unsaid.pop(name, {})
                self._said_at[name] = self.lake.clock.monotonic()
        return done.detail

    def _enough(self) -> Enough:
        if getattr(self._by_hand, "on", False):
            return lambda: self._chores.stopping
        clock, settings = self.lake.clock, self.lake.settings
        until = clock.monotonic() + min(_LONGEST_ROUND, settings.lease_seconds / _ROUNDS_PER_LEASE)
        return lambda: self._chores.stopping or clock.monotonic() >= until

    def _is_news(self, name: str, action: _Action, done: _Round) -> bool:
        """Whether a round is worth a word: it has done something, or failed at something else than the last."""
        failed, self._failed[name] = self._failed.get(name, []), done.failed
        counted = {key: value for key, value in done.done.items() if isinstance(value, int)}
        unsaid = self._unsaid.setdefault(name, {}) if action.is_routine else {}
        for key, value in counted.items():
            # Of routine, added up until it is written down.
            unsaid[key] = unsaid.get(key, 0) + value
        if done.failed != failed or any(value for key, value in done.done.items() if key not in counted):
            return True
        pause = _INTERVALS_BETWEEN_NOTES * self.lake.settings.maintenance_interval if action.is_routine else 0.0
        waited = self.lake.clock.monotonic() - self._said_at.get(name, float("-inf"))
        return any(unsaid.values()) and waited >= pause

    # --- the work --------------------------------------------------------------------

    def _end_leases(self, _: Enough) -> _Round:
        return _Round({"leases": self._cleaner.end_dead()})

    def _purge_topics(self, enough: Enough) -> _Round:
        if not self.lake.registry.all(DELETED_TOPICS, 1):
            return _Round({"topics": 0})
        with self._metadata() as metadata:
            return _Round({"topics": metadata.purge_deleted_topics(enough=enough)})

    def _retain(self, enough: Enough) -> _Round:
        found = self._retention.run(enough)
        done: dict[str, Any] = {
            "records": sum(found.records.values()),
            "segments": sum(found.segments.values()),
        }
        topics = _of_topics({"records": found.records, "segments": found.segments})
        return _Round(done | topics, _told(found.failed))

    def _merge(self, enough: Enough) -> _Round:
        with self._metadata() as metadata:
            found = self._merger.run(metadata, enough)
        done = {"segments": found.segments, "into": sum(found.into.values()), "bytes": found.bytes}
        topics = _of_topics({"segments": found.replaced, "into": found.into})
        return _Round(done | topics, _told(found.failed), {"conflicts": found.conflicts} if found.conflicts else {})

    def _expire_groups(self, enough: Enough) -> _Round:
        with self._metadata() as metadata:
            return _Round({"groups": metadata.expire_groups(enough=enough)})

    def _sweep_streams(self, enough: Enough) -> _Round:
        with self._metadata() as metadata:
            swept = sweep_streams(self.lake, metadata, enough=enough)
        done = {"fenced": swept.fenced, "released": swept.released, "objects": swept.objects}
        return _Round(done, _told(swept.failed), {"settled": swept.settled})

    @contextmanager
    def _metadata(self) -> Iterator[MetadataStore]:
        # Not the book's own, whose cache is for readers.
        store = MetadataStore(self.lake.registry, self.lake.store.warehouse.recorded)
        try:
            yield store
        finally:
            store.close()

    def _empty_tables(self, enough: Enough) -> _Round:
        return _Round({"retired": self._cleaner.empty_dropped(enough)})

    def _delete_files(self, enough: Enough) -> _Round:
        cleaned = self._cleaner.delete_expired_temporary_files(wait=False, enough=enough)
        done = {"files": cleaned.files, "bytes": cleaned.bytes, "leases": cleaned.dead_leases}
        return _Round(done, _told(cleaned.failed), {"pinned": cleaned.pinned})

    def _sweep(self, enough: Enough) -> _Round:
        swept = self._cleaner.sweep(enough=enough)
        done = {"fenced": swept.fenced, "objects": swept.objects}
        return _Round(done, _told(swept.failed), {"settled": swept.settled})

    def _settle_debts(self, enough: Enough) -> _Round:
        settled = settle_debts(self.lake, enough=enough, after=self._next_debt)
        self._next_debt = settled.stopped_at
        return _Round({"paid": settled.paid}, _told(settled.failed))

    def _prune_events(self, enough: Enough) -> _Round:
        dropped = drop_laggards(self.lake.registry)
        done: dict[str, Any] = {"events": prune_events(self.lake.registry, enough)}
        return _Round(done | ({"dropped": dropped} if dropped else {}))

    def _prune_commits(self, enough: Enough) -> _Round:
        return _Round(dict(prune_commits(self.lake.registry, enough)))

    def _prune_history(self, enough: Enough) -> _Round:
        return _Round(dict(prune_history(self.lake.registry, enough)))

    def _keep_database(self, enough: Enough) -> _Round:
        report = keep_database(self.lake.registry, enough)
        told = [*report.hints, *report.notes]
        return _Round(report.done, told, dict(report.facts))

    def _checkpoint(self, _: Enough) -> _Round:
        state = state_of(self.lake)
        if state == self._checkpointed or not any(state):
            return _Round({"checkpoints": 0})
        written = write_checkpoint(self.lake)
        # Only now: the new one is there. Those of a former life stay until somebody has looked at this one.
        is_held = held_since(self.lake.registry) is not None
        kept = self.lake.settings.checkpoints_kept
        removed = 0 if is_held else forget_checkpoints(self.lake.store, kept, written.path)
        self._checkpointed = state
        return _Round({"checkpoints": 1, "bytes": written.size, "removed": removed}, facts={"path": written.path})


def _told(failed: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{what}: {why}" for what, why in failed]


def _of_topics(counted: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """What was done to which topics, of those with most done first."""
    named: dict[str, dict[str, int]] = {}
    for what, numbers in counted.items():
        for topic, number in numbers.items():
            named.setdefault(topic, {})[what] = number
    most = sorted(named, key=lambda topic: (-max(named[topic].values()), topic))[:_MOST_TOPICS]
    return {"topics": {topic: named[topic] for topic in most}} if named else {}
