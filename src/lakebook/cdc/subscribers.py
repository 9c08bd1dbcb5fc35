"""What Astha hands over, and what whoever takes it has to offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from lakebook.cdc.rows import row_reader
from lakebook.registry import events
from lakebook.registry.tables import TableRecord

T = TypeVar("T")

#: Who is told of changes of which tables. It is fixed: nobody subscribes while the book is in use.
SUBSCRIPTIONS: Mapping[str, tuple[str, ...]] = {
    "iceberg_updater": ("table_metadata", "table_files"),
    "compactor": ("table_files", "table_stats"),
    "snapshotter": ("table_metadata", "table_files", "table_snapshots"),
    "orchestrator": ("tables", "table_metadata"),
    "topic_publisher": ("topics", "partitions"),
}

_READERS = {name: row_reader(name) for names in SUBSCRIPTIONS.values() for name in names}


class Event(Generic[T]):
    """One committed change of one row.

    `data` is the row after the change, for a delete the one before it; `before` is missing for an
    insert. Both are made when they are first asked for: most subscribers need few of them.
    """

    __slots__ = ("_before", "_data", "captured")

    def __init__(self, captured: events.Event) -> None:
        #: The change as it lies in the log.
        self.captured = captured
        self._data: T | None = None
        self._before: T | None = None

    def __repr__(self) -> str:
        return f"Event({self.operation} {self.table}, object {self.object_id} #{self.sequence})"

    @property
    def id(self) -> int:
        """Its number in the log."""
        return self.captured.id

    @property
    def table(self) -> str:
        """The table whose row has changed."""
        return self.captured.table

    @property
    def operation(self) -> str:
        """`insert`, `update` or `delete`."""
        return self.captured.operation

    @property
    def object_id(self) -> int:
        """The lake object it belongs to; order is kept within one."""
        return self.captured.object_id

    @property
    def sequence(self) -> int:
        """Its place in the history of its lake object."""
        return self.captured.sequence

    @property
    def timestamp(self) -> Any:
        """When it was committed."""
        return self.captured.occurred_at

    @property
    def data(self) -> T:
        """The row after the change; for a delete, the one before it."""
        if self._data is None:
            row = self.captured.row_after if self.captured.row_after is not None else self.captured.row_before
            assert row is not None
            self._data = _reader(self.table)(row)
        return self._data

    @property
    def before(self) -> T | None:
        """The row before the change; none for an insert."""
        if self._before is None and self.captured.row_before is not None:
            self._before = _reader(self.table)(self.captured.row_before)
        return self._before


def _reader(table: str) -> Any:
    found = _READERS.get(table)
    if found is None:
        found = _READERS[table] = row_reader(table)
    return found


@dataclass(frozen=True)
class Refresh:
    """A lake object whose state a subscriber is to take from the registry anew.

    What it holds was read together with the cursor from which events go on. By the time it is handed
    over the registry may be ahead of it, and events of that time follow.
    """

    object_id: int
    kind: str
    #: The table as it was then; none if it is gone, or if the object is no table.
    table: TableRecord | None
    #: Why: at the start, after a dead letter, after a call that was given up, or because somebody asked.
    reason: str


class Subscriber(ABC):
    """Somebody who acts on changes.

    Events of one lake object come one after the other, in the order of their commits; different objects
    come at the same time, up to `workers` of them. Whatever is raised is a failure: the events come
    again, after a pause. So each call must do no harm when it is repeated.
    """

    #: Under this name its cursor is kept.
    name: ClassVar[str]
    #: Seconds for which events of an object are collected before they are handed over.
    linger: float = 0.0
    #: Seconds after which a call is given up, and the object refreshed.
    timeout: float = 60.0
    #: Objects that are handed over at the same time.
    workers: int = 2
    #: Whether what it was told outlives its process. If not, it is refreshed at every start.
    durable: bool = True

    @property
    def subscribed_tables(self) -> tuple[str, ...]:
        """The tables of whose changes it is told."""
        return SUBSCRIPTIONS[self.name]

    @abstractmethod
    def on_event(self, event: Event[Any]) -> None:
        """Act on one change."""

    def on_events(self, events: Sequence[Event[Any]]) -> None:
        """Act on several changes of one lake object, in their order. What is faster in one go overrides this."""
        for event in events:
            self.on_event(event)

    @abstractmethod
    def on_refresh(self, refresh: Refresh) -> None:
        """Take the state of a lake object from the registry, and forget what was known of it."""

    @abstractmethod
    def on_health(self) -> None:
        """Raise if nothing could be handed over now; it has a few seconds to answer."""
